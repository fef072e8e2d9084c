#include "transfers.hpp"

#include <algorithm>

#include "../types.hpp"

namespace envplan::serving {
namespace {

struct LaterEnd {
  bool operator()(const Transfer& a, const Transfer& b) const { return a.end > b.end; }
};

}  // namespace

Transfers::Transfers(TransferCosts costs) : costs_(costs) {
  require(costs.latency_s >= 0 && costs.bytes_per_token >= 0,
          "a transfer must not cost less than 0");
}

double Transfers::next() const { return running_.empty() ? kNever : running_.front().end; }

void Transfers::begin(const Handover& handover, Instance& from, int32_t to, double tokens,
                      double bytes_s, double now) {
  const double bytes = costs_.bytes_per_token * tokens;
  from.link_free = std::max(now, from.link_free) + bytes / bytes_s;
  running_.push_back({from.link_free + costs_.latency_s, to, handover});
  std::push_heap(running_.begin(), running_.end(), LaterEnd());
  ++count_;
  bytes_ += bytes;
}

Transfer Transfers::pop() {
  std::pop_heap(running_.begin(), running_.end(), LaterEnd());
  const Transfer ended = running_.back();
  running_.pop_back();
  return ended;
}

}  // namespace envplan::serving
