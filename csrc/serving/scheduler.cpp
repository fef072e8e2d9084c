#include "scheduler.hpp"

#include <algorithm>
#include <deque>

namespace envplan::serving {
namespace {

struct LaterDeadline {
  bool operator()(const Prompt& a, const Prompt& b) const { return a.deadline > b.deadline; }
};

class DeadlineQueue : public PromptQueue {
 public:
  bool empty() const override { return waiting_.empty() && late_.empty(); }

  void push(const Prompt& prompt) override {
    waiting_.push_back(prompt);
    std::push_heap(waiting_.begin(), waiting_.end(), LaterDeadline());
  }

  const Prompt* next(double now) override {
    move_late(now);
    next_is_late_ = waiting_.empty();
    if (!next_is_late_) return &waiting_.front();
    return late_.empty() ? nullptr : &late_.front();
  }

  const Prompt* next_begun(double) override {
    if (late_.empty() || late_.front().done == 0) return nullptr;
    next_is_late_ = true;
    return &late_.front();
  }

  Prompt pop() override {
    if (next_is_late_) return pop_late();
    const Prompt prompt = waiting_.front();
    std::pop_heap(waiting_.begin(), waiting_.end(), LaterDeadline());
    waiting_.pop_back();
    return prompt;
  }

  double changes_at() const override {
    return waiting_.empty() ? kNever : waiting_.front().deadline;
  }

  bool pop_squashed(double now, double squash_s, Prompt* prompt) override {
    move_late(now);
    if (late_.empty()) return false;
    const Prompt& first = late_.front();
    if (first.done > 0 || !(first.deadline + squash_s < now)) return false;
    *prompt = pop_late();
    return true;
  }

  int in_time(int most, Prompt* prompts) const override {
    if (!late_.empty() || waiting_.size() > static_cast<std::size_t>(most)) return -1;
    Prompt* const end = std::copy(waiting_.begin(), waiting_.end(), prompts);
    std::sort(prompts, end,
              [](const Prompt& a, const Prompt& b) { return a.deadline < b.deadline; });
    return static_cast<int>(waiting_.size());
  }

  std::vector<Prompt> all() const override {
    std::vector<Prompt> prompts = waiting_;
    prompts.insert(prompts.end(), late_.begin(), late_.end());
    return prompts;
  }

 private:
  // Moves prompts whose deadlines have passed from those that wait to the late ones.
  void move_late(double now) {
    while (!waiting_.empty() && waiting_.front().deadline < now) {
      std::pop_heap(waiting_.begin(), waiting_.end(), LaterDeadline());
      // One that has been begun holds memory: it is the next of the late ones.
      if (waiting_.back().done > 0) {
        late_.push_front(waiting_.back());
      } else {
        late_.push_back(waiting_.back());
      }
      waiting_.pop_back();
    }
  }

  Prompt pop_late() {
    const Prompt prompt = late_.front();
    late_.pop_front();
    return prompt;
  }

  std::vector<Prompt> waiting_;  // heap, nearest deadline first
  std::deque<Prompt> late_;      // first come first; at the front those that have been begun
  bool next_is_late_ = false;
};

class Edf : public Scheduler {
 public:
  std::unique_ptr<PromptQueue> make_queue() const override {
    return std::make_unique<DeadlineQueue>();
  }
  bool by_deadline() const override { return true; }
  bool keeps_tbt() const override { return true; }
  double iteration_limit(double tbt_s, double beside_s) const override {
    return kTbtShare * tbt_s - beside_s;
  }
  int32_t chunk(const Service& service, const Size& size, const Tables& table, std::size_t,
                double limit_s) const override {
    return service.max_chunk_tokens(size, table, limit_s);
  }
  int32_t usual_chunk(const Service& service, int32_t size, std::size_t batch) const override {
    const std::vector<int32_t>& chunks = service.limits[size].chunk_beside;
    return chunks[std::min(batch, chunks.size() - 1)];
  }
  bool is_small(const Service& service, int32_t size, std::size_t batch) const override {
    return usual_chunk(service, size, batch) == service.limits[size].shared_chunk;
  }
  std::size_t most_batch(const Service& service, int32_t size, uint8_t klass) const override {
    return service.limits[size].most_batch[klass];
  }
  std::size_t most_decoding(const Service& service, int32_t size, uint8_t klass) const override {
    return service.limits[size].most_decoding[klass];
  }
};

// Nothing is given up, and a prompt that has been begun goes on first.
class ArrivalQueue : public PromptQueue {
 public:
  bool empty() const override { return prompts_.empty(); }

  void push(const Prompt& prompt) override {
    const auto later = [](const Prompt& a, const Prompt& b) { return a.request < b.request; };
    if (prompt.done > 0 || prompts_.empty() || !later(prompt, prompts_.back())) {
      prompt.done > 0 ? prompts_.push_front(prompt) : prompts_.push_back(prompt);
    } else {  // one that came before others, and comes again
      prompts_.insert(std::upper_bound(prompts_.begin(), prompts_.end(), prompt, later), prompt);
    }
  }

  const Prompt* next(double) override { return prompts_.empty() ? nullptr : &prompts_.front(); }
  const Prompt* next_begun(double) override { return nullptr; }

  Prompt pop() override {
    const Prompt prompt = prompts_.front();
    prompts_.pop_front();
    return prompt;
  }

  double changes_at() const override { return kNever; }
  bool pop_squashed(double, double, Prompt*) override { return false; }

  int in_time(int most, Prompt* prompts) const override {
    if (prompts_.size() > static_cast<std::size_t>(most)) return -1;
    std::copy(prompts_.begin(), prompts_.end(), prompts);
    return static_cast<int>(prompts_.size());
  }

  std::vector<Prompt> all() const override { return {prompts_.begin(), prompts_.end()}; }

 private:
  std::deque<Prompt> prompts_;  // by arrival
};

class Fcfs : public Scheduler {
 public:
  std::unique_ptr<PromptQueue> make_queue() const override {
    return std::make_unique<ArrivalQueue>();
  }
  bool by_deadline() const override { return false; }
  bool keeps_tbt() const override { return false; }
  double iteration_limit(double, double) const override { return kNever; }
  int32_t chunk(const Service&, const Size& size, const Tables&, std::size_t batch,
                double) const override {
    return std::max<int32_t>(1, size.chunk - static_cast<int32_t>(batch));
  }
  int32_t usual_chunk(const Service& service, int32_t size, std::size_t batch) const override {
    return chunk(service, service.sizes[size], service.fastest(size), batch, kNever);
  }
  bool is_small(const Service& service, int32_t size, std::size_t batch) const override {
    return 2 * batch <= static_cast<std::size_t>(service.sizes[size].chunk);
  }
  std::size_t most_batch(const Service& service, int32_t size, uint8_t) const override {
    return service.fastest(size).largest_batch();
  }
  std::size_t most_decoding(const Service& service, int32_t size, uint8_t) const override {
    return service.fastest(size).largest_batch();
  }
};

}  // namespace

std::unique_ptr<Scheduler> make_scheduler(Policy policy) {
  if (policy == Policy::kFcfs) return std::make_unique<Fcfs>();
  return std::make_unique<Edf>();
}

}  // namespace envplan::serving
