// One option for each operation where clocks follow late, and must not be changed too often.
//
// An operation asks for its clock as it begins; the clock comes `latency` later, perhaps during a
// later operation. Until then the stage runs at the clock of the last request that has come: the
// operation is split in proportion to the work done, and each part takes the time and the power of
// the option that stands for its clock. So how long an operation takes depends on the clocks before
// it, and changing one clock may move everything after it. A stage begins with the clock that its
// last request has left, since iterations follow each other.
//
// Between two changes of a stage's clock there must be `dwell`, from request to request, and from
// the last of an iteration to the first of the next, which begins when this one ends.
//
// The search anneals (Kirkpatrick et al. 1983) on options, every move replayed exactly as above:
// one operation's option, a run of operations of one clock, its border, a stretch of alike
// operations, one faster here and one slower there. Being late, or changing too soon, costs a price
// that rises until no plan with it is kept.
//
// Deterministic: results depend on the arguments only.
#pragma once

#include <cstdint>

namespace envplan {

// Borrowed arrays; sizes in parentheses. Operations are numbered in a topological order that
// follows their start times; those of a stage stand in their execution order.
struct SwitchingProblem {
  std::int32_t num_operations;
  std::int32_t num_stages;
  std::int32_t num_tables;
  std::int32_t num_clocks;
  const std::int32_t* pred_begin;    // (num_operations + 1)
  const std::int32_t* pred;          // (edges) operation that must end first
  const std::int64_t* pred_lag;      // (edges) ns between its end and our start
  const std::int32_t* stage;         // (num_operations)
  const std::int32_t* table;         // (num_operations) the operation's option table
  const std::int32_t* option_begin;  // (num_tables + 1) first option of each table
  const std::int64_t* time;          // (options) ns, at least 1, ascending within a table
  const double* energy;              // (options) fJ
  const std::int32_t* clock;         // (options) which clock, ascending in MHz; -1: controls none
  const std::int32_t* nearest;       // (options x num_clocks) which option of its table stands for
                                     // it at a clock; -1 in rows of options that control none
  const double* blocking_power;      // (num_stages) uW
  std::int64_t latency;              // ns
  std::int64_t dwell;                // ns
  std::int64_t deadline;             // ns
  double late_price;                 // uW: what a ns after the deadline costs, to begin with
};

// What a choice comes to.
struct SwitchingReplay {
  std::int64_t makespan;  // ns
  double energy;          // fJ, of one GPU a stage, waiting until the makespan included
  std::int64_t too_soon;  // ns by which clocks last too short, all added up
};

// Replays `choice` (num_operations), indices into the options of each operation's table. Where
// `start` is not null the start times go there (num_operations), ns.
SwitchingReplay replay_switching(const SwitchingProblem& problem, const std::int32_t* choice,
                                 std::int64_t* start);

// One clock for each stage, or one option for each stage and table; the best that a descent, stage
// by stage, finds. Writes `choice`.
void choose_constant(const SwitchingProblem& problem, bool by_table, std::int32_t* choice);

// Anneals from `choice` and leaves the best plan seen there: the one least late and too soon, and
// among those that are neither the one of least energy. `heat` is the first temperature in units of
// the mean cost between neighbouring options; 0 descends. Returns whether `choice` has changed.
bool improve_switching(const SwitchingProblem& problem, std::int64_t moves, double heat,
                       std::uint64_t seed, std::int32_t* choice);

}  // namespace envplan
