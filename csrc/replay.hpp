// The exact replay of a pipeline: when each operation runs, at which clock, and what that takes.
//
// Problem. Operations run on stages, each stage's one after the other in a given order, and each
// starts as soon as those before it let it. Every operation has an option table: its rows say how
// long it takes, and what energy, at which clock. A choice is one row for each operation.
//
// Clocks. The clock of an operation's row is asked for, unless its stage has asked for that clock
// last. The clock comes `latency` later, perhaps during a later operation; until then the stage
// runs at the clock of the last request that has come. A stage begins an iteration with the clock
// that its last request leaves, since iterations follow each other. A row of no clock asks for none
// and runs as it is at any clock. Without latency every operation runs at its row. A row may change
// clocks within itself, which its time and energy include: when it ends, the clock that it leaves
// is in force.
//
// Requests. A machine that asks at the start asks for an operation's clock as it starts. One that
// asks ahead does so `latency` before, but not before the operation before it on the stage starts,
// nor, where that changes clocks within itself, before its last slice; for a stage's first
// operation not before the iteration begins. So requests are in order, and no clock comes early.
//
// Another clock. At a clock that is not its row's, an operation runs by the row of its table that
// stands for that clock (`nearest`). Where the clock changes during an operation, what is left of
// it is carried over: left' = ceil(left * time' / time) ns, where the times are those of the whole
// operation by the two rows. A part of an operation takes its share of its row's energy, rounded
// half up to a whole unit of 10 fJ.
//
// Noise. A factor f for each operation multiplies the time of whatever row it runs by: the time is
// min(max(1, rint(time * f)), kMostTime), and the energy grows in proportion, rounded half up.
// Power stays that of the row. A machine that asks ahead knows only when operations start and end
// without noise. Its timer for an operation begins where its request may be made at the earliest,
// and takes what lies between that and the request without noise. Where the operation without noise
// begins at least `latency` after the one before has ended, the timer begins as that ends. If the
// operation starts sooner, its clock is asked for as it starts. So with noise a clock may come
// early: what is left of the operation before then runs at it, unless that changes clocks within
// itself.
//
// Spacing. Between two requests of a stage there should be at least `min_dwell`, and so from its
// last of an iteration to its first of the next, which begins when this one ends. The shortage is
// what is missing, summed over all stages and requests.
//
// Power. A row draws the powers of its slices one after the other, the last one to its end; without
// slices its average power, rounded up to a whole unit. Where an operation does not run by one row
// from start to end as it is, it draws the most power of each row as long as it runs by that. A
// stage between two operations draws its blocking power.
//
// Arithmetic is exact, in integers: time in ns, energy in units of 10 fJ, power in units of 10 uW.
// Sums of energies have 128 bits. What takes longer than kMostTime throws std::overflow_error.
//
// Thread safety. A Problem never changes, so threads may share one. A Replay belongs to one thread
// at a time, its const members included: they use scratch of its own.
#pragma once

#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "arcs.hpp"
#include "types.hpp"

namespace envplan {

constexpr Index kNone = -1;  // no operation, no clock

// Borrowed arrays that describe a problem; sizes are given in parentheses. Operations are numbered
// by stage and in execution order within a stage; rows over all tables. Arrays of first entries
// (stage_begin, succ_begin, table_begin, slice_begin) ascend from 0.
struct ProblemArrays {
  Index num_operations, num_stages, num_tables, num_rows, num_clocks, num_arcs, num_slices;
  const Index* order;          // (num_operations) the operations in a topological order
  const Index* stage_begin;    // (num_stages + 1) first operation of each stage
  const Index* succ_begin;     // (num_operations + 1)
  const Index* succ;           // (arcs) what starts later; the next on the stage is among them
  const Time* succ_lag;        // (arcs) ns between our end and its start, less than kMostTime
  const Index* table;          // (num_operations)
  const Index* table_begin;    // (num_tables + 1) first row of each table
  const Time* time;            // (rows) ns, at least 1, ascending within a table
  const std::int64_t* energy;  // (rows) 10 fJ
  const Index* clock;          // (rows) which clock, ascending in MHz; kNone where it has none
  const Index* leaves;         // (rows) the clock in force as it ends; kNone where it has none
  const Index* nearest;        // (rows * num_clocks) the row that stands for this one at a clock;
                               // anything where the row has no clock
  const Power* waiting;        // (num_stages) blocking power, 10 uW
  const Index* slice_begin;    // (rows + 1) first slice of each row, which has one at least; null:
                               // there are none
  const Time* slice_time;      // (slices) ns
  const Power* slice_power;    // (slices) 10 uW
};

// A problem ready to be replayed: copies of the arrays, with the operations in the topological
// order given. "Number" below is an operation's place in that order.
struct Problem {
  // Throws std::invalid_argument where the arrays contradict each other or the above.
  explicit Problem(const ProblemArrays& arrays);

  struct Operation {
    Index stage, table;
    Index first_row, end_row;
    Index before, after;  // neighbours on the stage; kNone at its ends
  };
  struct Row {
    Time time;
    std::int64_t energy;
    Power power;  // the most
    Index clock, leaves;
    Index first_slice, end_slice;
  };
  struct Slice {
    Time time;
    Power power;
  };

  Index row_at(Index row, Index clock) const {
    return nearest[static_cast<std::int64_t>(row) * num_clocks + clock];
  }

  // Whether a row keeps its clock all along.
  bool steady(Index row) const {
    const Index at = rows[row].clock;
    return at < 0 || row_at(row, at) == row;
  }

  Index num_operations, num_stages, num_tables, num_clocks;
  std::vector<Operation> operations;  // by number
  std::vector<Index> order;           // number -> the caller's operation
  std::vector<Index> number_of;       // the caller's operation -> number: a stage's are neighbours
  std::vector<Index> stage_begin;     // into member
  std::vector<Index> last;            // numbers of the operations that nothing waits for
  Arcs preds, succs;                  // by number
  std::vector<Row> rows;
  std::vector<Slice> slices;
  std::vector<Index> table_begin, nearest;
  std::vector<Power> waiting;
  Energy total_waiting = 0;  // of all stages, 10 uW

 private:
  void copy_order(const ProblemArrays& arrays);
  void copy_rows(const ProblemArrays& arrays);
  void copy_slices(const ProblemArrays& arrays, Index row);
  void copy_nearest(const ProblemArrays& arrays);
  void copy_stages(const ProblemArrays& arrays);
  void copy_precedences(const ProblemArrays& arrays);
};

// How clocks follow requests.
struct Machine {
  Time latency;     // from a request until the clock comes, ns
  bool asks_ahead;  // or as operations start
};

struct Change {
  Index operation;  // number
  Index row;        // over all tables
};

// A part of an operation at one clock.
struct Part {
  Index row, clock;  // clock: kNone where the row has none
  Time begin, end;
  std::int64_t energy;
};

// When to give up a change that cannot be worth it: as soon as the energy above waiting has grown,
// with what lateness and shortage would cost, by more than `most`. Tails are estimates, so a change
// may be given up that would have been worth it; what is kept is replayed exactly all the same.
struct Budget {
  double most;
  Time free;         // a makespan up to this costs nothing
  const Time* tail;  // (num_operations, by number) about how long all goes on after each has ended
  double late_price, short_price;  // 10 fJ a ns
};

// A choice of rows, replayed.
class Replay {
 public:
  // Shortages are counted where min_dwell > 0. The problem must outlive this.
  Replay(const Problem& problem, Machine machine, Time min_dwell);

  // Takes rows, one an operation in the caller's numbering, each an index into its table. Throws
  // std::invalid_argument where there is no such row. Replays nothing.
  void choose(const Index* rows);
  // Writes them back.
  void chosen(Index* rows) const;
  void set_row(Index i, Index row) { row_[i] = row; }
  const std::vector<Index>& rows() const { return row_; }  // by number, over all tables

  // Replays everything. factors: (num_operations) in the caller's numbering, or null; borrowed
  // until the next run. Noise takes two replays where clocks are asked for ahead.
  void run(const double* factors = nullptr);
  // Replays the rows of the last run again under other noise. Takes one replay.
  void run_again(const double* factors);

  // A trial, without noise: replays what changes reach, no operation being named twice. Returns
  // whether it did not give up; where it did, undo() must follow. Where it did not, the changes
  // stay unless undo() follows. Takes time by what the changes reach, not by the number of
  // operations.
  bool change(const std::vector<Change>& changes, const Budget& budget);
  // Goes back to before the last change. Nothing may have been changed or undone since.
  void undo() { exchange_with_replaced(); }
  // Goes forth again to after the last change, which must have been undone.
  void redo() { exchange_with_replaced(); }
  // The time within which the last change changed anything.
  std::pair<Time, Time> changed_span() const { return {changed_from_, changed_to_}; }

  Time makespan() const { return totals_.makespan; }
  Energy cost() const { return totals_.cost; }  // of all operations, less waiting as long, 10 fJ
  // 10 fJ of one GPU a stage, waiting until a time included.
  Energy energy_until(Time sync) const { return totals_.cost + problem_.total_waiting * sync; }
  Time shortage() const { return totals_.shortage; }
  Time start(Index i) const { return runs_[i].start; }
  Time finish(Index i) const { return runs_[i].finish; }
  bool makes_request(Index i) const { return runs_[i].last_request == i; }
  // When the clock of operation i is asked for, where it makes a request and clocks count: with a
  // latency or a min_dwell.
  Time request_time(Index i) const { return runs_[i].own_request_at; }
  std::int64_t energy(Index i) const;
  std::uint64_t touched() const { return touched_; }  // operations replayed so far

  // Appends the parts of operation i, in time order.
  void parts(Index i, std::vector<Part>* out) const;
  // Power as a step function: `times` begins at 0 and ends at the makespan, `power` has one less.
  void power_steps(std::vector<Time>* times, std::vector<Power>* power) const;
  // By how much power is above a cap, integrated over a span of time, 10 fJ.
  Energy energy_above_cap(Power cap, Time from, Time to) const;

  // How long what runs after each operation takes on the longest way to the end, by number.
  void tails(std::vector<Time>* tail) const;

 private:
  // How an operation runs, and what it leaves to the next of its stage.
  struct OperationRun {
    Time start = 0, finish = 0;
    Energy cost = 0;                  // energy less waiting as long
    Time own_request_at = 0;          // when this operation's own request was made
    Time requested_at = 0;            // when the last request was made; kept where min_dwell > 0
    Time shortage = 0;                // of this operation's own request
    Index effective_request = kNone;  // operation whose request was the last to come
    Index last_request = kNone;       // operation that made the last request
    Index clock_in_force = kNone;     // clock
    Index requested_clock = kNone;    // clock last asked for

    bool same_clocks(const OperationRun& other) const {
      return effective_request == other.effective_request && last_request == other.last_request &&
             clock_in_force == other.clock_in_force && requested_clock == other.requested_clock &&
             requested_at == other.requested_at;
    }
    bool same_times_and_cost(const OperationRun& other) const {
      return start == other.start && finish == other.finish && cost == other.cost &&
             shortage == other.shortage && own_request_at == other.own_request_at;
    }
    bool awaits_clock() const { return effective_request != last_request; }
  };
  // Whether a change reaches an operation that has not been replayed since.
  enum class Reached : unsigned char { kNo, kByOthers, kByName };
  // The operations that a change names: the first, and one after which its effects show.
  struct ChangedRange {
    Index first, settled;
  };
  struct Totals {
    Time makespan = 0;
    Energy cost = 0;
    Time shortage_within = 0;  // without that from one iteration to the next
    Time shortage = 0;
  };
  struct WholeOperation {
    Time time;
    std::int64_t energy;
  };
  // When an operation's clock is asked for in noisy runs.
  struct Timer {
    Time time;
    bool from_end;  // of the operation before
  };

  Index clock(Index i) const { return problem_.rows[row_[i]].clock; }
  WholeOperation whole_operation(Index i, Index row) const;
  Index clock_left(Index stage) const;
  void finish_clocks(Index i, OperationRun* run) const;
  Index next_request(Index effective_request, Index last_request) const;
  void begin_operation(Index i, OperationRun* run) const;
  Time earliest_start(Index i) const;
  Time earliest_request(Index i) const;
  Time time_to_request(Index i, Time start) const;
  Timer timer(Index i) const;
  Time early_landing(Index i, const OperationRun& run) const;
  void take_over_clocks(Index i, OperationRun* run) const;
  void request_clock(Index i, OperationRun* run) const;
  Time apply_due_requests(Time at, OperationRun* run) const;
  template <class EachPart>
  void execute(Index i, OperationRun* run, EachPart each) const;
  void replay(Index i);
  void replay_all();
  void measure();
  Time shortage_around() const;
  void exchange_with_replaced();
  ChangedRange set_rows(const std::vector<Change>& changes);
  Index update_initial_clocks(const std::vector<Change>& changes);
  bool exceeds(const Budget& budget, Index i, bool has_settled) const;
  void reach(Index i);
  void forget_reached(Index from);
  void collect_rises(Time from, Time to) const;
  void collect_rises_of_operation(Index i, Time from, Time to) const;

  const Problem& problem_;
  const Time latency_;
  const bool asks_ahead_;
  const Time min_dwell_;
  const double* factors_ = nullptr;
  std::vector<Index> row_;
  std::vector<OperationRun> runs_;
  std::vector<Timer> timers_;  // one an operation, where noise is replayed that they count for
  std::vector<Index> initial_clock_;  // clock that each stage begins with
  Totals totals_;

  std::vector<Reached> reached_;
  Index num_reached_ = 0;
  std::uint64_t touched_ = 0;
  // What the last change replaced, and where swapped back what it brought.
  std::vector<Change> replaced_rows_;
  std::vector<std::pair<Index, Index>> replaced_initial_clocks_;  // (stage, clock)
  std::vector<std::pair<Index, OperationRun>> replaced_runs_;
  Totals replaced_totals_;
  Time changed_from_ = 0, changed_to_ = 0;

  // Scratch of const members.
  mutable std::vector<std::pair<Time, Power>> rises_;
  mutable std::vector<Part> parts_;
};

// Makespans of a choice in noisy runs, ns. factors: (runs * num_operations), in the caller's
// numbering; out: (runs).
void makespans(const Problem& problem, const Index* rows, Machine machine, const double* factors,
               std::int64_t runs, Time* out);

}  // namespace envplan
