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
//    costs a few table look-ups. A long problem is annealed segment by segment. Then exchange once
//    more.
//
// Deterministic: the result depends on the arguments only.
#pragma once

#include <cstdint>

#include "types.hpp"

namespace envplan {

// Borrowed arrays; sizes in parentheses. Operations are numbered in a topological order that
// follows their relaxed start times, so that neighbours in time are neighbours in number. Every
// operation's fastest option fits between its predecessors' relaxed finishes and its own; where one
// does not, the fastest is taken and the deadline may be missed.
struct RoundingProblem {
  Index num_operations, num_preds, num_tables, num_options;
  const Index* pred_begin;    // (num_operations + 1) ascending from 0
  const Index* pred;          // (num_preds) operation of a smaller number that must end first
  const Time* pred_lag;       // (num_preds) ns between its end and our start, not negative
  const Index* table;         // (num_operations) the operation's option table
  const Index* option_begin;  // (num_tables + 1) first option of each table, which has one at least
  const Time* time;           // (num_options) ns, ascending within a table; all operations after
                              // one another take less than 2^62 at their slowest, lags included
  const std::int64_t* cost;   // (num_options) 10 fJ, descending within a table
  const Time* finish;         // (num_operations) relaxed finish time, ns
  Time deadline;              // ns; every relaxed finish time is at most this
};

// Diffusion and exchange. Writes the chosen option of each operation, an index into the options of
// its table, to `choice` (num_operations). Throws std::invalid_argument where the arrays contradict
// the above.
void round_to_options(const RoundingProblem& problem, Index* choice);

// Annealing and exchange from the choice given, which must meet the deadline. `heat` is the first
// temperature in units of the mean cost between neighbouring options: 1 rebuilds much, 0.1 refines.
// Returns whether `choice` got cheaper; it stays as it is otherwise. Throws as round_to_options,
// and where the choice names no option.
bool improve_options(const RoundingProblem& problem, std::int64_t moves, double heat,
                     std::uint64_t seed, Index* choice);

// Both are safe to call from several threads, and allocate what they need anew.

}  // namespace envplan
