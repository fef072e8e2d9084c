// A serving fleet replayed request by request.
//
// Idea. An instance runs iterations, as engines with continuous batching and chunked prefill do. An
// iteration gives every request that is decoding one token, and carries at most `chunk` tokens of
// prompts that wait, the nearest deadline first. Iterations without prompts are all alike until a
// request leaves, so they are passed over in one step: between two events, every decoding request
// of an instance is `progress` tokens further. Hence a request costs about three events however
// long its output is, and a week of 27 million requests takes well under a minute on one core.
//
// What an iteration costs is measured or modelled outside and comes in as Tables, one for each
// configuration (TP and clock):
//   without prompts   step_s[b], step_w[b] for b decoding requests
//   with prompts      max(prompt_s(c), sum of growth) + step_s[b] - step_s[1], where c counts the
//                     prompt tokens of the iteration and growth is what these tokens add to
//                     prompt_s of their own prompt: long prompts pay for their context
//   without anything  idle_w
//
// A request meets its SLOs if its first token comes within ttft_s of its arrival, and its further
// tokens come tbt_s apart on average. One that is late already goes behind those that are not, and
// one that is too late to be of use is given up.
//
// Time is in seconds from the trace's beginning, energy in joules, in double precision. Nothing
// here draws random numbers: the same calls give the same results.
//
// Errors. What comes from outside is checked: std::invalid_argument for tables and requests that
// contradict what is said below, std::out_of_range for an index of nothing.
//
// Thread safety. A Service never changes, so threads may share one. A Replay belongs to one thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace envplan::serving {

constexpr std::size_t kClasses = 9;  // of requests

// One configuration: what an instance with this TP and clock does. Every table has two entries at
// least, and step_s and step_w as many as each other, prompt_s and prompt_w likewise.
struct Tables {
  double idle_w;
  std::vector<double> step_s, step_w;      // by decoding requests, 0 .. most; s are positive
  double grid;                             // tokens between two entries of the prompt tables, > 0
  std::vector<double> prompt_s, prompt_w;  // of k * grid tokens; straight on beyond the last
  double prompt_time(double tokens) const;
  double prompt_power(double tokens) const;
};

// An instance size: its configurations by rising clock, and its memory.
struct Size {
  double kv_tokens;             // tokens of context that fit beside the weights
  int32_t chunk;                // prompt tokens of one iteration, at least 1
  std::vector<int32_t> tables;  // indices of its configurations, clocks ascending; at least one
  // Set by Service, at the highest clock:
  int32_t shared_chunk;                 // prompt tokens of an iteration with a small batch
  std::vector<int32_t> chunk_beside;    // the same, by batch, where fewer make prompts slower
  std::vector<std::size_t> most_batch;  // that an iteration with prompts keeps a class's TBT SLO of
};

// What a stretch of requests asks of one instance size.
struct Need {
  double instances;  // that it needs, not rounded
  double busy;       // instances that prompts keep busy, on average
  double decoding;   // requests that decode at a time, on average
  double hopeless;   // share of requests whose prompts alone take longer than their SLOs
};

struct Requests {  // borrowed as long as the Service lives; all of length count > 0; arrival
                   // ascends
  int64_t count;
  const double* arrival;
  const int32_t* input;
  const int32_t* output;
  const uint8_t* known;  // class, below kClasses
  const uint8_t* taken;  // class it is taken for when it arrives
};

struct Slo {
  double ttft_s, tbt_s;
};

// What is served, by which instances, within which SLOs. Never changes.
struct Service {
  Requests requests;
  std::vector<Tables> tables;
  std::vector<Size> sizes;
  std::vector<Slo> slos;  // of each class

  // Copies all but the requests' arrays.
  Service(Requests requests, std::vector<Tables> tables, std::vector<Size> sizes,
          std::vector<Slo> slos);

  // Requests by the class they are taken for that arrive in [begin, end), s.
  std::array<int64_t, kClasses> counts(double begin, double end) const;

  // What the requests of [begin, end) need of a size at its highest clock: those that are taken
  // for one of `classes` (bit k: class k). instances is the least number at which no more than a
  // share `late` of them waits too long. Work (s of one instance) arrives in bins of a tenth of a
  // second and is done by all instances together, stricter SLOs first; a request waits too long if
  // the work that goes before it takes longer than its SLO leaves. Contexts must fit, too. Requests
  // that are late in any case are work like others, and are not counted as late.
  Need required_instances(double begin, double end, uint32_t classes, int32_t size,
                          double late) const;

  // Throws std::invalid_argument where anything contradicts the contracts above.
  void check() const;

  // The largest batch that, beside so many prompt tokens in each iteration, keeps a TBT SLO.
  std::size_t batch_beside(const Tables& table, int32_t tokens, double tbt) const;

  // A prompt alone in an instance, s.
  double own_time(const Size& size, const Tables& table, double tokens) const;

  // Prompt tokens of an iteration: as many as take no more than `most`, s.
  int32_t max_chunk_tokens(const Size& size, const Tables& table, double most) const;
};

struct Options {
  double clock_delay_s;  // until a managed clock is in force
  double clock_hold_s;   // before a managed clock may go down
  double clock_margin;   // share of the TTFT SLO that a managed clock leaves
  double pack_share;     // of it that a request may wait at a packed instance
  double squash_s;       // a prompt that is so much later than its SLO is given up
  double slot_s;         // of the series, > 0
  double end_s;          // of the trace: energy counts until then; not negative
};

struct Counts {  // by class; requests that arrived and are finished or given up
  int64_t requests[kClasses], first_in_time[kClasses], tokens_in_time[kClasses];
  int64_t attained[kClasses];
};

// How often a time was how long. The ends of the bins grow by 1%, so a quantile of what was counted
// is known that well. The last bin is for what took longer than all others, or never came.
class TimeCounts {
 public:
  TimeCounts() : counts_(kBins) {}
  // The longest time of each bin, s; that of the last one is infinite.
  static std::vector<double> ends();
  void add(double seconds);
  const std::vector<int64_t>& counts() const { return counts_; }

 private:
  static constexpr std::size_t kBins = 2085;  // up to a day
  std::vector<int64_t> counts_;
};

// One instance. Phases: what it does until `next`.
enum class Phase : uint8_t { kStarting, kIdle, kStepping, kPrompts, kGone };

struct Waiting {  // a prompt, or the rest of one
  double deadline;
  int32_t request;
  int32_t done;  // tokens of it that are through
};

struct Decoding {
  double leaves;       // progress of the instance at its last token
  double first_token;  // when that came
  int32_t request;
};

struct Piece {  // of a prompt, in the running iteration
  Waiting prompt;
  int32_t tokens;
};

struct Instance {
  int32_t pool = 0, size = 0, clock = 0, preferred = 0, version = 0;
  bool managed = false, leaving = false;
  Phase phase = Phase::kStarting;
  double since = 0, next = 0, progress = 0, step = 0, watts = 0;
  double kv = 0, claimed = 0;  // tokens of what is in memory, and of what waits, too
  double asked_at = -1e9;      // when its clock was last asked to change
  int32_t asked_clock = 0;     // what was asked for
  double queued[3] = {0, 0, 0};
  std::vector<Waiting> waiting;  // heap, nearest deadline first
  std::vector<Waiting> late;     // first come first, from late_begin on
  std::size_t late_begin = 0;
  std::vector<Decoding> decoding;  // heap, first to leave first
  std::vector<Piece> pieces;
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
  const std::vector<double>& slot_energy() const { return slot_energy_; }
  const std::vector<int64_t>& slot_attained() const { return slot_attained_; }
  const Counts& counts() const { return counts_; }
  // Times to the first token, and mean times between further ones, of requests by class.
  const std::array<TimeCounts, kClasses>& first_token_times() const { return first_token_times_; }
  const std::array<TimeCounts, kClasses>& token_intervals() const { return token_intervals_; }
  int64_t clock_changes() const { return clock_changes_; }
  int64_t helped() const { return helped_; }
  int64_t squashed() const { return squashed_; }

 private:
  struct Event {
    double at;
    int32_t instance, version;
  };
  Instance& instance(int32_t id);
  void check_pool(int32_t pool) const;
  void check_clock(int32_t size, int32_t clock) const;
  const Tables& tables(const Instance& i) const;
  const Tables& fastest(const Instance& i) const;
  int level(int32_t request) const;
  double context(int32_t request) const;  // tokens of memory that it needs
  // Prompt tokens of an iteration beside so many times an instance's batch.
  int32_t chunk_beside(const Instance& i, std::size_t times) const;
  double iteration_limit(const Instance& i, const Tables& table) const;
  void ensure_pool(int32_t pool);  // make room for its members
  void pass_time(Instance& i);     // energy and progress up to now_
  void book_energy(double watts, double from, double until);
  void start_next(Instance& i);                    // begin whatever comes next, from now_ on
  void schedule(Instance& i, double at);           // its next event
  void handle_event(Instance& i);                  // its event is due
  bool begin_prompts(Instance& i);                 // an iteration with prompts, if one can run
  bool take_prompt(Instance& i, Waiting& prompt);  // the next prompt that fits
  void move_late_prompts(Instance& i);
  void squash_late_prompts(Instance& i);
  void choose_clock(Instance& i);
  int32_t clock_for_prompts(const Instance& i) const;
  bool prompts_are_in_time(const Instance& i, int32_t clock, const Waiting* begin,
                           const Waiting* end) const;
  int32_t clock_for_steps(const Instance& i, int32_t least) const;
  int32_t top_clock(const Instance& i) const;
  void end_prompts(Instance& i);
  void end_decoding(Instance& i);
  void arrive(int32_t request);
  struct Estimate;
  double wait_at(const Instance& i, int32_t request, Estimate& estimate) const;
  int32_t best_of(int32_t pool, int32_t request, double* wait) const;
  void first_token(Instance& i, const Piece& piece);
  // Counts a request that is over; both times are infinite where tokens never came.
  void count_finished(int32_t request, double first_token_s, double token_interval_s);

  const Service& service_;
  const Requests& requests_;
  const std::vector<Tables>& tables_;
  const std::vector<Size>& sizes_;
  const std::vector<Slo>& slos_;
  double levels_[2];
  Options options_;
  double now_ = 0;
  int64_t following_ = 0;
  std::vector<Instance> instances_;
  std::vector<std::vector<int32_t>> members_;  // running instances of each pool
  std::vector<bool> pack_;
  std::vector<double> strict_;  // the strictest TTFT SLO of what goes to a pool, s
  std::vector<int32_t> home_;   // pool of a class; -1: none
  std::vector<std::vector<int32_t>> helpers_;
  std::vector<Event> events_;
  std::vector<int32_t> stranded_;
  std::vector<double> slot_energy_;
  std::vector<int64_t> slot_attained_;
  Counts counts_{};
  std::array<TimeCounts, kClasses> first_token_times_, token_intervals_;
  int64_t clock_changes_ = 0, helped_ = 0, squashed_ = 0;
};

}  // namespace envplan::serving
