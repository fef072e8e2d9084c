// How a request goes from the instance that ran its prompt to the one that decodes it.

#include <algorithm>

#include "replay.hpp"

namespace envplan::serving {

// The context stays here, as part of what prompts use, until it is at its destination.
void Replay::hand_over(Instance& i, const Prompt& prompt, int32_t decode_pool) {
  const int32_t request = prompt.request;
  const Router::Arrival arrival{request, static_cast<double>(requests_.input[request]),
                                lengths_.output(request)};
  const Router::Choice choice = router_.choose_to_decode(decode_pool, arrival, instances_);
  const auto release = [&] {
    i.memory.prompts -= prompt.length(requests_);
    i.memory.reserved -= prompt.reserve;
    i.memory.claimed -= prompt.reserve;
  };
  if (choice.instance < 0 && choice.is_too_small) {
    release();
    drop_unservable(request, prompt.first_token - requests_.arrival[request]);
    return;
  }
  ++i.going;
  if (choice.instance < 0) {
    unplaced_.push_back({prompt, number(i), decode_pool});
    return;
  }
  Instance& to = instances_[choice.instance];
  const double reserve = router_.reserve(to.pool, arrival);
  to.handovers.push_back({prompt, number(i), reserve});
  to.memory.claimed += reserve;
  wake(to);
}

void Replay::take_handovers(Instance& i) {
  // What was preempted here goes first.
  while (!i.handovers.empty() && i.prompts->empty()) {
    const Handover& first = i.handovers.front();
    const double tokens = first.prompt.length(requests_);
    const std::size_t inside = i.decoding() - i.handovers.size();
    const uint8_t klass = requests_.taken[first.prompt.request];
    const double taken = std::max(i.memory.reserved, i.used());
    const bool fits = taken + first.reserve_here <= kv_tokens(i) &&
                      inside < scheduler_->most_decoding(service_, i.size, klass) &&
                      keeps_tbt(i, inside, klass, tokens);
    // An instance with nothing inside takes any context: there will never be more memory.
    if (!fits && i.memory.reserved > 0) return;
    Instance& from = instances_[first.from];
    i.memory.reserved += first.reserve_here;
    i.memory.prompts += tokens;
    ++i.coming;
    transfers_.begin(first, tokens, from.sends, i.receives, number(i), now_);
    i.handovers.pop_front();
  }
}

void Replay::end_transfer() {
  const Transfer ended = transfers_.pop();
  Handover handover = ended.handover;
  Instance& from = instances_[handover.from];
  from.memory.prompts -= handover.prompt.length(requests_);
  from.memory.reserved -= handover.prompt.reserve;
  from.memory.claimed -= handover.prompt.reserve;
  --from.going;
  Instance& to = instances_[ended.to];
  handover.prompt.reserve = handover.reserve_here;
  --to.coming;
  to.arrived.push_back(handover);
  wake(to);
  if (from.phase == Phase::kIdle) wake(from);  // there may be memory for a prompt now
}

}  // namespace envplan::serving
