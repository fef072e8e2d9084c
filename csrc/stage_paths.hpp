// The cheapest way of one stage through its operations, at given prices: a term of a lower bound.
//
// Problem. A stage chooses a row, and so a clock, for each of its operations, and may wait before
// each. It pays
// - for operation k: its energy less what waiting as long would draw, plus f_k a ns that it takes,
// - for waiting before operation k, or after the last one: q_k a ns,
// - for each request for another clock: `change`.
// Clocks come late and must be held as replay.hpp and annealing.hpp say. The answer is a lower
// bound on what any rows and any waits cost in an exact replay without noise, and the way that it
// was found at: rows, times, waits and energy of it.
//
// Idea. A *segment* is what a stage runs from one request for a clock to the next. A shortest path
// goes over segments, named by their first operation and their clock. Going from one operation to
// the next, every segment that is under way either goes on, or is left for a segment of another
// clock. Two things may cost more than the operations do:
// - Lateness. The first operation of a segment runs at the clock before until the new one comes,
//   d ns long. Asked at the start, d is the latency. Asked ahead, d is the latency less the time
//   since the operation before it started, or 0. Then waiting before it shortens d. Costs are
//   linear in the wait, so only two waits need be tried: none, and one that makes d vanish.
// - Holding. A segment shorter than min_dwell waits for what it lacks, where waiting within it is
//   cheapest.
// Segments that are long enough, whatever comes, need not be told apart: of those at one clock the
// cheapest is kept (`mature`). The others are few (`young`).
//
// Relaxations, each of which can only lower the bound:
// - a stage begins with any clock at once;
// - where clocks are held, iterations follow each other. Either an iteration ends with another
//   clock than it begins with: then both its first and its last segment are held, the last one with
//   what is waited at the end of the iteration and at the beginning of the next. Or these clocks
//   are the same: then the two segments need not be held;
// - an operation at whose clock the request before may still be under way costs the least that any
//   row of its does, and a request made then hides no lateness. Where no operation can be shorter
//   than the latency (ahead: than half of it, where two in a row are as long as that) there is
//   none;
// - how long an operation takes is bounded from above where it serves to hide or to hold.
//
// Arithmetic is in doubles. The bound is lowered by more than their error, and by what a replay may
// gain from rounding: for each operation 1 ns at blocking power and 2 units of energy.
//
// Sources: the shortest path as the Lagrangian subproblem of a flow of prices; in words, and why
// the sum over stages is a bound: docs/theory.md, "Late and held clocks".
#pragma once

#include <vector>

#include "replay.hpp"

namespace envplan {

struct StagePrices {
  Time latency, min_dwell;
  bool asks_ahead;
  double change;             // 10 fJ a request
  const double* time_price;  // f: (operations of the stage) 10 fJ a ns that each takes
  const double* wait_price;  // q: (operations of the stage + 1) 10 fJ a ns of waiting before each
                             // and after the last
};

// But for rounding, bound = energy + sum f_k times_k + sum q_k waits_k + changes * change.
struct StagePath {
  double bound = 0;           // 10 fJ
  double energy = 0;          // 10 fJ, less what waiting would draw for as long as operations take
  Index changes = 0;          // requests for another clock
  std::vector<Index> rows;    // (operations of the stage) over all tables: the clocks asked for
  std::vector<double> times;  // (operations of the stage) ns
  std::vector<double> waits;  // (operations of the stage + 1) ns before each, and after the last
};

// Throws std::invalid_argument where a row leaves another clock than it asks for, or a price is
// negative. Time: operations x clocks, x clocks again where clocks may come late, and x segments
// that fit into min_dwell where clocks are held.
StagePath cheapest_stage_path(const Problem& problem, Index stage, const StagePrices& prices);

}  // namespace envplan
