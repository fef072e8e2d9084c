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
// Memory is never exceeded. A request begins where there is memory for its prompt and for an output
// as long as is expected; nobody knows the true one. Where contexts outgrow the memory, the request
// that came in last loses its place and begins again, what it had got being part of its prompt (as
// in vLLM). One that alone outgrows its instance's memory is unservable.
//
// Prefill and decode apart. A pool may hand over to another one: its instances only run prompts.
// When a prompt is through, its first token is there; its context goes to an instance of the other
// pool as soon as that has memory for it, and the request decodes there. Memory here is held until
// the context is there.
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
#include "lengths.hpp"
#include "router.hpp"
#include "scheduler.hpp"
#include "service.hpp"
#include "transfers.hpp"

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
  TransferCosts transfers{0, 0};  // between the instances that run prompts and those that decode
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
  // From now on the instances of a pool only run prompts; requests decode in another pool.
  void hand_over(int32_t pool, int32_t decode_pool);

  // Everything that happens before this time, s. Takes time by the events, and by the instances
  // once.
  void advance(double until);
  // Serves what is left after the trace; what no instance gets to is counted as late.
  void finish();

  double now() const { return now_; }
  const std::vector<Instance>& instances() const { return instances_; }
  const SlotSeries& series() const { return series_; }
  // Energy of the instances of each pool, J, by its number. What an instance that moves draws
  // counts for its new pool from its last event on.
  const std::vector<double>& pool_energy() const { return pool_energy_; }
  const Tally& tally() const { return tally_; }
  int64_t clock_changes() const { return clocks_.changes(); }
  int64_t helped() const { return helped_; }
  int64_t squashed() const { return squashed_; }
  // Requests that are longer than the model takes; they are not served, and count nowhere else.
  int64_t too_long() const { return too_long_; }
  // How often a request lost its place because contexts outgrew the memory, and began again.
  int64_t preempted() const { return preempted_; }
  const Transfers& transfers() const { return transfers_; }

 private:
  struct Event {
    double at;
    int32_t instance, version;
  };
  // The fleet and its events: replay.cpp.
  Instance& instance(int32_t id);
  void check_clock(int32_t size, int32_t clock) const;
  const Tables& tables(const Instance& i) const;
  void make_pool(int32_t pool);  // unless it is there
  int32_t number(const Instance& i) const { return static_cast<int32_t>(&i - instances_.data()); }
  double deadline(int32_t request) const;
  double kv_tokens(const Instance& i) const { return service_.sizes[i.size].kv_tokens; }
  void pass_time(Instance& i);            // energy and progress up to now_
  void schedule(Instance& i, double at);  // its next event
  void handle_event(Instance& i);         // its event is due
  void arrive(int32_t request);
  void wake(Instance& i);  // something came that may run
  void count_finished(int32_t request, double first_token_s, double token_interval_s);

  // What an instance runs next, and what comes of it: iterations.cpp.
  void start_next(Instance& i);  // begin whatever comes next, from now_ on
  bool begin_prompts(Instance& i);
  bool take_prompt(Instance& i, Prompt* prompt);  // the next one that fits
  bool fits(const Instance& i, const Prompt& prompt) const;
  // Whether a batch of `inside` requests takes one more, with so many tokens of context, and keeps
  // its TBT SLO in steps without prompts; true where the scheduler does not care.
  bool keeps_tbt(const Instance& i, std::size_t inside, uint8_t klass, double tokens) const;
  void end_prompts(Instance& i);
  void end_decoding(Instance& i);
  void end_prompt(Instance& i, const Prompt& prompt);
  void decode(Instance& i, const Prompt& prompt);
  void add_prompt(Instance& i, const Prompt& prompt);
  // Steps until a request leaves, memory is full, or another prompt has its turn.
  double whole_steps(const Instance& i) const;
  void make_room(Instance& i);  // preempt where contexts outgrow the memory
  void finish_request(int32_t request, double first_token, double token_interval_s);
  void drop_unservable(int32_t request, double first_token_s);

  // From the instances that run prompts to those that decode: handovers.cpp.
  void hand_over(Instance& i, const Prompt& prompt, int32_t decode_pool);
  void take_handovers(Instance& i);  // begin transfers for which there is memory now
  void end_transfer();

  const Service& service_;
  const Requests& requests_;
  Options options_;
  std::unique_ptr<Scheduler> scheduler_;
  Router router_;
  ClockManager clocks_;
  SlotSeries series_;
  Tally tally_;
  ExpectedLengths lengths_;
  Transfers transfers_;
  double now_ = 0;
  int64_t following_ = 0;  // the next request that arrives
  std::vector<Instance> instances_;
  std::vector<double> pool_energy_;
  std::vector<Event> events_;      // heap, soonest first
  std::vector<int32_t> stranded_;  // requests that came when no instance ran
  std::vector<Unplaced> unplaced_;
  int64_t helped_ = 0, squashed_ = 0, too_long_ = 0, preempted_ = 0;
};

}  // namespace envplan::serving
