// What an instance runs: iterations with prompts, or steps until something happens.

#include <algorithm>
#include <cmath>

#include "replay.hpp"

namespace envplan::serving {
namespace {

constexpr double kRounding = 1e-6;  // steps
// Tokens that a request is expected to get still when it has got as many as were expected.
constexpr double kLeastRest = 32;

}  // namespace

void Replay::start_next(Instance& i) {
  for (const Handover& handover : i.arrived) {
    i.memory.prompts -= handover.prompt.length(requests_);
    decode(i, handover.prompt);
  }
  i.arrived.clear();
  make_room(i);
  take_handovers(i);
  clocks_.update(i, router_.strictest_ttft(i.pool), now_);
  if (begin_prompts(i)) return;
  const Tables& table = tables(i);
  if (i.batch.empty()) {
    i.phase = Phase::kIdle;
    i.watts = table.idle_w;
    if (i.leaving && i.is_empty()) {
      i.phase = Phase::kGone;
      i.watts = 0;
    }
    schedule(i, kNever);
    return;
  }
  i.phase = Phase::kStepping;
  i.batch.set_pace(table);
  i.watts = i.batch.step_w();
  schedule(i, now_ + i.batch.duration(whole_steps(i)));
}

double Replay::whole_steps(const Instance& i) const {
  double steps = std::round(i.batch.front().leaves - i.batch.progress());
  const double free = kv_tokens(i) - i.used();
  const auto batch = static_cast<double>(i.batch.size());
  if (steps * batch > free) steps = std::min(steps, std::floor(free / batch) + 1);
  // A prompt that waits for memory may make way for another one once it is late.
  const double changes_at = i.prompts->changes_at();
  if (changes_at < kNever) {
    const double seconds = std::max(0.0, changes_at - now_);
    steps = std::min(steps, std::floor(i.batch.steps_in(seconds)) + 1);
  }
  // At least one token at a time: what has happened may let a prompt in at the next one.
  return std::max(1.0, steps);
}

void Replay::make_room(Instance& i) {
  while (i.used() > kv_tokens(i) && !i.batch.empty()) {
    const Decoding gone = i.batch.pop_latest();
    const int32_t request = gone.request;
    const auto steps_left = static_cast<int32_t>(std::round(gone.leaves - i.batch.progress()));
    Prompt prompt{now_ + service_.slos[requests_.taken[request]].ttft_s, request, 0};
    prompt.generated = requests_.output[request] - steps_left;
    prompt.first_token = gone.first_token;
    --i.decoding_of_class[requests_.taken[request]];
    i.memory.reserved -= gone.reserve;
    i.memory.claimed -= gone.reserve;
    const double length = prompt.length(requests_);
    if (length + 1 > kv_tokens(i)) {
      drop_unservable(request, gone.first_token - requests_.arrival[request]);
      continue;
    }
    prompt.reserve = std::min(kv_tokens(i), std::max(gone.reserve, length + kLeastRest));
    ++preempted_;
    add_prompt(i, prompt);
  }
}

void Replay::add_prompt(Instance& i, const Prompt& prompt) {
  i.prompts->push(prompt);
  ++i.waiting;
  i.queued[service_.levels[requests_.taken[prompt.request]]] += prompt.length(requests_);
  i.memory.claimed += prompt.reserve;
}

// Whether a prompt that waits has a place in memory and in the batch.
bool Replay::fits(const Instance& i, const Prompt& prompt) const {
  const uint8_t klass = requests_.taken[prompt.request];
  const Tables& table = tables(i);
  const std::size_t inside = i.batch.size() + i.pieces.size();
  if (std::max(i.memory.reserved, i.used()) + prompt.reserve > kv_tokens(i)) return false;
  if (inside >= table.largest_batch()) return false;
  if (inside >= scheduler_->most_batch(service_, i.size, klass)) return false;
  return keeps_tbt(i, inside, klass, prompt.length(requests_));
}

bool Replay::keeps_tbt(const Instance& i, std::size_t inside, uint8_t klass, double tokens) const {
  const Tables& table = service_.fastest(i.size);
  if (table.context_s <= 0 || !scheduler_->keeps_tbt() || inside == 0) return true;
  const double tbt = std::min(clocks_.strictest_tbt(i), service_.slos[klass].tbt_s);
  const std::size_t batch = std::min(inside + 1, table.largest_batch());
  return table.step_s[batch] + table.context_s * (i.used() + tokens) <= kTbtShare * tbt;
}

bool Replay::take_prompt(Instance& i, Prompt* prompt) {
  while (i.prompts->pop_squashed(now_, options_.squash_s, prompt)) {
    const int32_t request = prompt->request;
    --i.waiting;
    i.queued[service_.levels[requests_.taken[request]]] -= prompt->length(requests_);
    i.memory.claimed -= prompt->reserve;
    ++squashed_;
    const double first_token_s =
        prompt->generated > 0 ? prompt->first_token - requests_.arrival[request] : kNever;
    count_finished(request, first_token_s, kNever);
  }
  const Prompt* next = i.prompts->next(now_);
  if (next == nullptr) return false;
  if (next->done == 0) {
    // An instance with nothing inside takes any prompt: there will never be more memory.
    if (fits(i, *next) || i.memory.reserved <= 0) {
      i.memory.reserved += next->reserve;
      i.memory.prompts += next->length(requests_);
    } else if (i.prompts->next_begun(now_) == nullptr) {
      return false;
    }
  }
  *prompt = i.prompts->pop();
  --i.waiting;
  return true;
}

bool Replay::begin_prompts(Instance& i) {
  i.pieces.clear();
  if (i.prompts->empty()) return false;
  const Tables& table = tables(i);
  const double most = clocks_.iteration_limit(i, table, router_.strictest_ttft(i.pool));
  int32_t room = scheduler_->chunk(service_, service_.sizes[i.size], table, i.batch.size(), most);
  double growth = 0, whole = 0;
  Prompt prompt;
  while (room > 0 && take_prompt(i, &prompt)) {
    int32_t tokens = std::min(room, prompt.length(requests_) - prompt.done);
    const double before = table.prompt_time(prompt.done);
    if (most < kNever) {  // long contexts take longer
      while (tokens > kLeastChunk &&
             growth + table.prompt_time(prompt.done + tokens) - before > most) {
        tokens -= kLeastChunk;
      }
    }
    growth += table.prompt_time(prompt.done + tokens) - before;
    room -= tokens;
    whole += tokens;
    i.pieces.push_back({prompt, tokens});
    i.queued[service_.levels[requests_.taken[prompt.request]]] -= tokens;
    if (growth > most) break;
  }
  if (i.pieces.empty()) return false;
  const std::size_t batch = std::min(i.batch.size(), table.largest_batch());
  const double more = batch > 0 ? table.step_s[batch] - table.step_s[1] : 0.0;
  const double context_s = i.batch.context_time(table);
  const double prompts_s = std::max(growth, table.prompt_time(whole));
  i.phase = Phase::kPrompts;
  i.watts = std::max(table.prompt_power(whole), batch > 0 ? table.step_w[batch] : 0.0);
  if (context_s > 0) {
    const double computing_s = prompts_s + more;
    i.watts = (computing_s * i.watts + context_s * table.context_w) / (computing_s + context_s);
  }
  schedule(i, now_ + prompts_s + more + context_s);
  return true;
}

void Replay::end_prompts(Instance& i) {
  i.batch.advance(1);
  end_decoding(i);
  for (const Piece& piece : i.pieces) {
    Prompt prompt = piece.prompt;
    prompt.done += piece.tokens;
    if (prompt.done >= prompt.length(requests_)) {
      end_prompt(i, prompt);
    } else {
      i.prompts->push(prompt);
      ++i.waiting;
    }
  }
  i.pieces.clear();
}

// A prompt is through, which gives a token: the first one, if it was not preempted.
void Replay::end_prompt(Instance& i, const Prompt& through) {
  Prompt prompt = through;
  const int32_t request = prompt.request;
  if (prompt.generated == 0) prompt.first_token = now_;
  if (prompt.generated + 1 < requests_.output[request]) {
    const int32_t decode_pool = router_.decode_pool(i.pool);
    if (decode_pool >= 0) {
      hand_over(i, prompt, decode_pool);
      return;
    }
    i.memory.prompts -= prompt.length(requests_);
    decode(i, prompt);
    return;
  }
  i.memory.prompts -= prompt.length(requests_);
  i.memory.reserved -= prompt.reserve;
  i.memory.claimed -= prompt.reserve;
  const int32_t further = requests_.output[request] - 1;
  finish_request(request, prompt.first_token,
                 further > 0 ? (now_ - prompt.first_token) / further : 0.0);
}

// A request whose prompt is through decodes from the next step on.
void Replay::decode(Instance& i, const Prompt& prompt) {
  const int32_t request = prompt.request, got = prompt.generated + 1;
  ++i.decoding_of_class[requests_.taken[request]];
  i.batch.add(request, prompt.first_token, requests_.input[request] + double(got),
              requests_.output[request] - got, prompt.reserve);
}

void Replay::end_decoding(Instance& i) {
  while (!i.batch.empty() && i.batch.front().leaves <= i.batch.progress() + kRounding) {
    const Decoding gone = i.batch.pop();
    const int32_t request = gone.request;
    --i.decoding_of_class[requests_.taken[request]];
    i.memory.reserved -= gone.reserve;
    i.memory.claimed -= gone.reserve;
    finish_request(request, gone.first_token,
                   (now_ - gone.first_token) / (requests_.output[request] - 1));
  }
}

void Replay::finish_request(int32_t request, double first_token, double token_interval_s) {
  lengths_.learn(request);
  count_finished(request, first_token - requests_.arrival[request], token_interval_s);
}

void Replay::drop_unservable(int32_t request, double first_token_s) {
  tally_.add_unservable(requests_.known[request]);
  count_finished(request, first_token_s, kNever);
}

}  // namespace envplan::serving
