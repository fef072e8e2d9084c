// What an instance runs: iterations with prompts, or steps until something happens.

#include <algorithm>
#include <cmath>

#include "replay.hpp"

namespace envplan::serving {
namespace {

constexpr double kRounding = 1e-6;  // steps

}  // namespace

void Replay::start_next(Instance& i) {
  clocks_.update(i, router_.strictest_ttft(i.pool), now_);
  if (begin_prompts(i)) return;
  const Tables& table = tables(i);
  if (i.batch.empty()) {
    i.phase = Phase::kIdle;
    i.watts = table.idle_w;
    if (i.leaving && i.prompts->empty()) {
      i.phase = Phase::kGone;
      i.watts = 0;
    }
    schedule(i, kNever);
    return;
  }
  i.phase = Phase::kStepping;
  i.batch.set_pace(table);
  i.watts = i.batch.step_w();
  // At least one token at a time: what has happened may let a prompt in at the next one.
  const double steps = std::max(1.0, std::round(i.batch.front().leaves - i.batch.progress()));
  schedule(i, now_ + i.batch.duration(steps));
}

void Replay::add_prompt(Instance& i, int32_t request) {
  i.prompts->push({deadline(request), request, 0});
  ++i.waiting;
  i.queued[service_.levels[requests_.known[request]]] += std::max(1, requests_.input[request]);
  i.memory.claimed += context(request);
}

// Whether a prompt that waits has a place in memory and in the batch.
bool Replay::fits(const Instance& i, int32_t request) const {
  const std::size_t inside = i.batch.size() + i.pieces.size();
  return i.memory.reserved + context(request) <= service_.sizes[i.size].kv_tokens &&
         inside < tables(i).largest_batch() &&
         inside < scheduler_->most_batch(service_, i.size, requests_.known[request]);
}

bool Replay::take_prompt(Instance& i, Prompt* prompt) {
  while (i.prompts->pop_squashed(now_, options_.squash_s, prompt)) {
    const int32_t request = prompt->request;
    --i.waiting;
    i.queued[service_.levels[requests_.known[request]]] -= std::max(1, requests_.input[request]);
    i.memory.claimed -= context(request);
    ++squashed_;
    count_finished(request, kNever, kNever);
  }
  const Prompt* next = i.prompts->next(now_);
  if (next == nullptr) return false;
  if (next->done == 0) {
    // An instance with nothing inside takes any prompt: there will never be more memory.
    if (fits(i, next->request) || i.memory.reserved <= 0) {
      i.memory.reserved += context(next->request);
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
    const int32_t length = std::max(1, requests_.input[prompt.request]);
    int32_t tokens = std::min(room, length - prompt.done);
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
    i.queued[service_.levels[requests_.known[prompt.request]]] -= tokens;
    if (growth > most) break;
  }
  if (i.pieces.empty()) return false;
  const std::size_t batch = std::min(i.batch.size(), table.largest_batch());
  const double more = batch > 0 ? table.step_s[batch] - table.step_s[1] : 0.0;
  const double context_s = i.batch.context_time(table);
  i.phase = Phase::kPrompts;
  i.watts = std::max(table.prompt_power(whole), batch > 0 ? table.step_w[batch] : 0.0);
  const double prompts_s = std::max(growth, table.prompt_time(whole));
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
    if (prompt.done >= requests_.input[prompt.request]) {
      first_token(i, piece);
    } else {
      i.prompts->push(prompt);
      ++i.waiting;
    }
  }
  i.pieces.clear();
}

void Replay::first_token(Instance& i, const Piece& piece) {
  const int32_t request = piece.prompt.request;
  const int32_t output = requests_.output[request];
  if (output <= 1) {
    release(i, request);
    count_finished(request, now_ - requests_.arrival[request], 0.0);
    return;
  }
  i.batch.add(request, now_, requests_.input[request] + 1.0, output - 1);
}

void Replay::end_decoding(Instance& i) {
  while (!i.batch.empty() && i.batch.front().leaves <= i.batch.progress() + kRounding) {
    const Decoding gone = i.batch.pop();
    const int32_t request = gone.request;
    release(i, request);
    count_finished(request, gone.first_token - requests_.arrival[request],
                   (now_ - gone.first_token) / (requests_.output[request] - 1));
  }
}

void Replay::release(Instance& i, int32_t request) {
  i.memory.reserved -= context(request);
  i.memory.claimed -= context(request);
}

}  // namespace envplan::serving
