// A serving fleet replayed request by request.
//
// Idea. An instance runs iterations, as engines with continuous batching and chunked prefill do. An
// iteration gives every request that is decoding one token, and carries some tokens of prompts that
// wait. Which and how many is the scheduler's (scheduler.hpp). Iterations without prompts follow
// one another until a request leaves, so they are passed over in one step (batch.hpp). Hence a
// request costs about three events however long its output is, and a week of 27 million requests
// takes well under a minute on one core.
//
// What an iteration costs is measured or modelled outside and comes in as Tables, one for each
// configuration:
//   without prompts   step_s[b], step_w[b] for b decoding requests, and context_s, context_w for
//                     each token of their contexts
//   with prompts      max(prompt_s(c), sum of growth) + step_s[b] - step_s[1], where c counts the
//                     prompt tokens of the iteration and growth is what these tokens add to
//                     prompt_s of their own prompt: long prompts pay for their context; and the
//                     contexts of the decoding requests
//   without anything  idle_w
//
// A request meets its SLOs if its first token comes within ttft_s of its arrival, and its further
// tokens come tbt_s apart on average.
//
// Time is in seconds from the trace's beginning, energy in joules, in double precision. Nothing
// here draws random numbers: the same calls give the same results.
//
// Errors. What comes from outside is checked: std::invalid_argument for what contradicts the
// contracts below, std::out_of_range for an index of nothing.
//
// Thread safety. A Replay belongs to one thread.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "clocks.hpp"
#include "counts.hpp"
#include "instance.hpp"
#include "router.hpp"
#include "scheduler.hpp"
#include "service.hpp"

namespace envplan::serving {

struct Options {
  double clock_delay_s;  // until a managed clock is in force
  double clock_hold_s;   // before a managed clock may go down
  double clock_margin;   // share of the TTFT SLO that a managed clock leaves
  double pack_share;     // of it that a request may wait at a packed instance
  double squash_s;       // a prompt that is so much later than its SLO is given up
  double slot_s;         // of the series, > 0
  double end_s;          // of the trace: energy counts until then; not negative
  Policy scheduler = Policy::kEdf;
};

class Replay {
 public:
  // `service` must outlive it. Throws std::invalid_argument where slots are not positive.
  Replay(const Service& service, Options options);

  // A new instance of a pool; returns its number. clock: index among its size's tables; a managed
  // instance leaves it for a higher one where prompts would be late, and comes back. Pools need not
  // be declared; their numbers are below 65,536.
  int32_t start(int32_t pool, int32_t size, int32_t clock, bool managed, double ready_at);
  // The instance takes nothing more, finishes what it has and is gone; one that starts is gone.
  void retire(int32_t instance);
  // The instance serves another pool, or at another clock, from now on.
  void move(int32_t instance, int32_t pool, int32_t clock, bool managed);
  // The pool that a class goes to, and others that may help if it would be late there.
  void route(int32_t klass, int32_t pool, std::vector<int32_t> helpers);
  // pack: fill instances one after another instead of spreading requests over them.
  void set_pack(int32_t pool, bool pack);

  // Everything that happens before this time, s. Takes time by the events, and by the instances
  // once.
  void advance(double until);
  // Serves what is left after the trace; what no instance gets to is counted as late.
  void finish();

  double now() const { return now_; }
  const std::vector<Instance>& instances() const { return instances_; }
  const SlotSeries& series() const { return series_; }
  const Tally& tally() const { return tally_; }
  int64_t clock_changes() const { return clocks_.changes(); }
  int64_t helped() const { return helped_; }
  int64_t squashed() const { return squashed_; }

 private:
  struct Event {
    double at;
    int32_t instance, version;
  };
  // The fleet and its events: replay.cpp.
  Instance& instance(int32_t id);
  void check_clock(int32_t size, int32_t clock) const;
  const Tables& tables(const Instance& i) const;
  int32_t number(const Instance& i) const { return static_cast<int32_t>(&i - instances_.data()); }
  double context(int32_t request) const;  // tokens of memory that it needs
  double deadline(int32_t request) const;
  void pass_time(Instance& i);            // energy and progress up to now_
  void schedule(Instance& i, double at);  // its next event
  void handle_event(Instance& i);         // its event is due
  void arrive(int32_t request);
  void count_finished(int32_t request, double first_token_s, double token_interval_s);

  // What an instance runs next, and what comes of it: iterations.cpp.
  void start_next(Instance& i);  // begin whatever comes next, from now_ on
  bool begin_prompts(Instance& i);
  bool take_prompt(Instance& i, Prompt* prompt);  // the next one that fits
  bool fits(const Instance& i, int32_t request) const;
  void end_prompts(Instance& i);
  void end_decoding(Instance& i);
  void first_token(Instance& i, const Piece& piece);
  void release(Instance& i, int32_t request);
  void add_prompt(Instance& i, int32_t request);

  const Service& service_;
  const Requests& requests_;
  Options options_;
  std::unique_ptr<Scheduler> scheduler_;
  Router router_;
  ClockManager clocks_;
  SlotSeries series_;
  Tally tally_;
  double now_ = 0;
  int64_t following_ = 0;  // the next request that arrives
  std::vector<Instance> instances_;
  std::vector<Event> events_;      // heap, soonest first
  std::vector<int32_t> stranded_;  // requests that came when no instance ran
  int64_t helped_ = 0, squashed_ = 0;
};

}  // namespace envplan::serving
