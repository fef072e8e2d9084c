// From the relaxation to frequencies: one option for each operation so that a deadline holds.
//
// Choosing one option per operation is NP-hard, so this is a heuristic; its result always meets the
// deadline, and the relaxed bound says how much it can be off.
//
// 1. Diffusion. Operations in topological order; each takes the cheapest option that ends by its
//    relaxed finish time, from wherever its predecessors really ended. What rounding leaves over is
//    handed on along the path instead of being lost.
// 2. Exchange. While some operation can get cheaper within its own slack, the best such step is
//    taken. Then, in a window of neighbouring operations, one gets faster and the time it frees is
//    filled by the others; kept where the sum got cheaper. Starts before the window and latest
//    finishes after it stay as they are, so the deadline holds throughout.
// 3. Annealing (Kirkpatrick et al. 1983) on start times: the window of an operation is what lies
//    between its own start and its successors', and it always takes the cheapest option that fits.
//    Moving one start changes its own window and its predecessors' and nothing else, so a move
//    costs a few table look-ups. Then exchange once more.
//
// Deterministic: the result depends on the arguments only.
#pragma once

#include <cstdint>

namespace envplan {

// Borrowed arrays; sizes in parentheses. Operations are numbered in a topological order that
// follows their relaxed start times, so that neighbours in time are neighbours in number. Every
// operation's fastest option fits between its predecessors' relaxed finishes and its own.
struct RoundingProblem {
  std::int32_t num_operations;
  const std::int32_t* pred_begin;    // (num_operations + 1)
  const std::int32_t* pred;          // (edges) operation that must end first
  const std::int64_t* pred_lag;      // (edges) ns between its end and our start
  const std::int32_t* table;         // (num_operations) the operation's option table
  const std::int32_t* option_begin;  // (tables + 1) first option of each table
  const std::int64_t* time;          // (options) ns, ascending within a table
  const std::int64_t* cost;          // (options) fJ, descending within a table
  const std::int64_t* finish;        // (num_operations) relaxed finish time, ns
  std::int64_t deadline;             // ns; every relaxed finish time is at most this
};

// Diffusion and exchange. Writes the chosen option of each operation, an index into the options of
// its table, to `choice` (num_operations).
void round_to_options(const RoundingProblem& problem, std::int32_t* choice);

// Annealing and exchange from the choice given, which must meet the deadline. `heat` is the first
// temperature in units of the mean cost between neighbouring options: 1 rebuilds much, 0.1 refines.
// Returns whether `choice` got cheaper; it stays as it is otherwise.
bool improve_options(const RoundingProblem& problem, std::int64_t moves, double heat,
                     std::uint64_t seed, std::int32_t* choice);

}  // namespace envplan
