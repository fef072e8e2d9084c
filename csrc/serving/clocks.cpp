#include "clocks.hpp"

#include <algorithm>

namespace envplan::serving {
namespace {

constexpr double kBlocked = 0.25;  // of the TTFT SLO that a slow iteration may take
constexpr int kLooked = 8;         // prompts whose deadlines a managed clock is held against

}  // namespace

int32_t ClockManager::top_clock(const Instance& i) const {
  return static_cast<int32_t>(service_.sizes[i.size].tables.size()) - 1;
}

const Tables& ClockManager::tables_at(const Instance& i, int32_t clock) const {
  return service_.tables[service_.sizes[i.size].tables[clock]];
}

void ClockManager::update(Instance& i, double strictest_ttft, double now) {
  if (i.asked_clock != i.clock && now >= i.asked_at + delays_.delay_s) {
    i.clock = i.asked_clock;
    ++changes_;
  }
  if (!i.managed) return;
  const int32_t wanted = clock_for_steps(i, clock_for_prompts(i, strictest_ttft, now));
  if (wanted == i.asked_clock) return;
  if (wanted < i.asked_clock && now < i.asked_at + delays_.hold_s) return;
  i.asked_clock = wanted;
  i.asked_at = now;
  if (i.batch.empty() && i.phase == Phase::kIdle && delays_.delay_s <= 0) {
    i.clock = wanted;
    ++changes_;
  }
}

double ClockManager::iteration_limit(const Instance& i, const Tables& table,
                                     double strictest_ttft) const {
  double most = kNever;
  if (i.managed && &table != &service_.fastest(i.size)) most = kBlocked * strictest_ttft;
  if (i.batch.empty()) return most;
  const std::size_t batch = std::min(i.batch.size(), table.largest_batch());
  const double beside = table.step_s[batch] - table.step_s[1] + i.batch.context_time(table);
  return std::min(most, scheduler_.iteration_limit(strictest_tbt(i), beside));
}

double ClockManager::strictest_tbt(const Instance& i) const {
  double tbt = kNever;
  for (std::size_t k = 0; k < i.decoding_of_class.size(); ++k) {
    if (i.decoding_of_class[k] > 0) tbt = std::min(tbt, service_.slos[k].tbt_s);
  }
  return tbt;
}

// The preferred clock, or the lowest above it at which every prompt that waits is in time.
int32_t ClockManager::clock_for_prompts(const Instance& i, double strictest_ttft,
                                        double now) const {
  const int32_t top = top_clock(i);
  Prompt prompts[kLooked];
  const int count = i.prompts->in_time(kLooked, prompts);
  if (count < 0) return top;
  if (count == 0) return i.preferred;
  int32_t clock = i.preferred;
  while (clock < top &&
         !prompts_are_in_time(i, clock, prompts, prompts + count, strictest_ttft, now)) {
    ++clock;
  }
  return clock;
}

// Whether prompts, one after the other at a clock, are all in time. The present iteration may run
// at the old clock until the new one comes.
bool ClockManager::prompts_are_in_time(const Instance& i, int32_t clock, const Prompt* begin,
                                       const Prompt* end, double strictest_ttft, double now) const {
  const Requests& requests = service_.requests;
  const Tables& table = tables_at(i, clock);
  const double limit_s = iteration_limit(i, table, strictest_ttft);
  const int32_t room =
      scheduler_.chunk(service_, service_.sizes[i.size], table, i.batch.size(), limit_s);
  const double token_s = table.prompt_time(room) / room;
  double at = now + delays_.delay_s;
  for (const Prompt* prompt = begin; prompt != end; ++prompt) {
    const double tokens = prompt->length(requests) - prompt->done;
    at += std::max(table.prompt_time(std::min(tokens, double(room))), tokens * token_s);
    const double ttft = service_.slos[requests.taken[prompt->request]].ttft_s;
    if (!(at <= prompt->deadline - delays_.margin * ttft)) return false;
  }
  return true;
}

// The lowest clock, from a least one on, at which the steps of the batch keep tokens together.
int32_t ClockManager::clock_for_steps(const Instance& i, int32_t least) const {
  const std::size_t batch = i.batch.size();
  if (batch == 0) return least;
  const double tbt = strictest_tbt(i);
  int32_t clock = least;
  for (; clock < top_clock(i); ++clock) {
    const Tables& table = tables_at(i, clock);
    const double step_s =
        table.step_s[std::min(batch, table.largest_batch())] + i.batch.context_time(table);
    if (step_s <= kTbtShare * tbt) break;
  }
  return clock;
}

}  // namespace envplan::serving
