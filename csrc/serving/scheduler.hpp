// Which prompt of an instance runs next, and how much of prompts an iteration takes.
//
// A Scheduler is one way to do that; it makes a PromptQueue for each instance. A new way is a class
// here and a line in make_scheduler.
//
//   edf    the nearest deadline first; an iteration takes as many prompt tokens as keep the tokens
//          of the batch together. A prompt that is late already goes behind those that are not, and
//          one that is too late to be of use is given up.
//   fcfs   first come, first served, as vLLM does by default: an iteration takes `chunk` tokens,
//          of which each decoding request has one.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "service.hpp"

namespace envplan::serving {

enum class Policy : uint8_t { kEdf, kFcfs };

// A prompt that waits, or the rest of one. A request that was preempted begins again: what it had
// got is part of its prompt then.
struct Prompt {
  double deadline;
  int32_t request;
  int32_t done;            // tokens of it that are through; if there are any, it holds memory
  int32_t generated = 0;   // tokens of its output that are part of the prompt
  double reserve = 0;      // tokens of memory that are kept for the request
  double first_token = 0;  // when that came, if any were generated

  int32_t length(const Requests& requests) const {
    return std::max(1, requests.input[request] + generated);
  }
};

// Prompts that wait at an instance.
class PromptQueue {
 public:
  virtual ~PromptQueue() = default;
  virtual bool empty() const = 0;
  // A prompt that comes, or the rest of one that has run.
  virtual void push(const Prompt& prompt) = 0;
  // The prompt that runs next, at a time; null if none waits. Valid until the queue changes.
  virtual const Prompt* next(double now) = 0;
  // Where there is no memory for `next`: one that holds memory already; null if there is none.
  virtual const Prompt* next_begun(double now) = 0;
  // Takes out what `next` or `next_begun` gave last.
  virtual Prompt pop() = 0;
  // When `next` will be another prompt though none comes or goes, s; kNever: not at all.
  virtual double changes_at() const = 0;
  // Takes out a prompt that is too late to be of use, more than `squash_s`; false if there is none.
  virtual bool pop_squashed(double now, double squash_s, Prompt* prompt) = 0;
  // The prompts in the order in which they run, if all are in time and no more than `most`: their
  // number. Otherwise -1.
  virtual int in_time(int most, Prompt* prompts) const = 0;
  // All prompts, in no order.
  virtual std::vector<Prompt> all() const = 0;
};

class Scheduler {
 public:
  virtual ~Scheduler() = default;
  virtual std::unique_ptr<PromptQueue> make_queue() const = 0;
  // Whether prompts of looser SLOs wait for those of stricter ones.
  virtual bool by_deadline() const = 0;
  // How long an iteration with prompts may take beside a batch, s, if it is to keep a TBT SLO and
  // the batch makes it `beside_s` longer.
  virtual double iteration_limit(double tbt_s, double beside_s) const = 0;
  // Prompt tokens of an iteration beside a batch, which take no longer than `limit_s`.
  virtual int32_t chunk(const Service& service, const Size& size, const Tables& table,
                        std::size_t batch, double limit_s) const = 0;
  // The same at the highest clock, as a router expects it.
  virtual int32_t usual_chunk(const Service& service, int32_t size, std::size_t batch) const = 0;
  // Whether such a batch takes nothing from prompts.
  virtual bool is_small(const Service& service, int32_t size, std::size_t batch) const = 0;
  // Whether a request waits where the batch would miss its TBT SLO with it.
  virtual bool keeps_tbt() const = 0;
  // The largest batch that may hold a request of a class.
  virtual std::size_t most_batch(const Service& service, int32_t size, uint8_t klass) const = 0;
  // The same where no prompts run.
  virtual std::size_t most_decoding(const Service& service, int32_t size, uint8_t klass) const = 0;
};

std::unique_ptr<Scheduler> make_scheduler(Policy policy);

}  // namespace envplan::serving
