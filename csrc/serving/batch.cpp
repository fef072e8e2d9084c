#include "batch.hpp"

#include <algorithm>

namespace envplan::serving {
namespace {

constexpr double kRounding = 1e-9;  // steps

struct LaterLeave {
  bool operator()(const Decoding& a, const Decoding& b) const { return a.leaves > b.leaves; }
};

}  // namespace

void Batch::add(int32_t request, double first_token, double context, double steps, double reserve) {
  const double offset = context - progress_;
  requests_.push_back({progress_ + steps, first_token, offset, reserve, added_++, request});
  std::push_heap(requests_.begin(), requests_.end(), LaterLeave());
  offsets_ += offset;
}

Decoding Batch::pop() {
  std::pop_heap(requests_.begin(), requests_.end(), LaterLeave());
  const Decoding gone = requests_.back();
  requests_.pop_back();
  offsets_ -= gone.offset;
  return gone;
}

Decoding Batch::pop_latest() {
  const auto earlier = [](const Decoding& a, const Decoding& b) { return a.order < b.order; };
  const auto latest = std::max_element(requests_.begin(), requests_.end(), earlier);
  const Decoding gone = *latest;
  *latest = requests_.back();
  requests_.pop_back();
  std::make_heap(requests_.begin(), requests_.end(), LaterLeave());
  offsets_ -= gone.offset;
  return gone;
}

double Batch::rest_of_step(double seconds) const {
  const double passed = steps_in(seconds);
  const double progress = progress_ + passed;
  const double rest = std::ceil(progress - kRounding) - progress;
  return rest * (speed() + growth() * passed + 0.5 * growth() * rest);
}

void Batch::set_pace(const Tables& table) {
  const std::size_t batch = std::min(size(), table.largest_batch());
  step_s_ = table.step_s[batch];
  step_w_ = table.step_w[batch];
  context_s_ = table.context_s;
  context_w_ = table.context_w;
}

}  // namespace envplan::serving
