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

void Transfers::begin(const Handover& handover, double tokens, Link& sending, Link& receiving,
                      int32_t to, double now) {
  const double bytes = costs_.bytes_per_token * tokens;
  const double begin = std::max(now, sending.free);
  sending.free = begin + bytes / sending.bytes_s;
  receiving.free = std::max(begin, receiving.free) + bytes / receiving.bytes_s;
  const double end = std::max(sending.free, receiving.free) + costs_.latency_s;
  running_.push_back({end, to, handover});
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
