// The cheapest way of one stage through its operations, at given prices: a term of a lower bound.
//
// Problem. Operation i of a stage costs its energy less waiting as long, plus f_i a ns that it
// takes; a ns of waiting before it costs q_i; each request for another clock costs `change`. Clocks
// come late and are held as replay.hpp says. The answer is a lower bound on what any choice of rows
// and any waits cost in an exact replay without noise, and the choice that it was found at.
//
// States. A segment is what a stage runs from one request to the next. A shortest path goes over
// (first operation of the segment, clock). Operations within it run at its clock; the first one
// runs at the clock before until the new one comes: for d = max(0, latency - time since the last
// start) where clocks are asked for ahead, else for the latency. A wait before it shortens d; costs
// are linear in the wait, so no wait or as much as makes d vanish is best. A segment shorter than
// min_dwell waits for what it lacks at the least q_i within it.
//
// Relaxations, each of which can only lower the bound:
// - a stage may begin with any clock, and its first and last segments need not be held;
// - an operation at whose clock the request before may still be under way costs the least that any
//   row of its does, and a request made then hides no lateness. Where no operation can be shorter
//   than the latency (ahead: than half of it, where two in a row are as long as that) there is
//   none;
// - how long an operation takes is bounded from above where it serves to hide or to hold.
//
// Arithmetic is in doubles. The bound is lowered by more than their error, and by what a replay may
// gain from rounding: for each operation 1 ns at blocking power and 2 fJ.
//
// Sources: the shortest path as the Lagrangian subproblem of a flow of prices, ALGORITHM.md section
// 8 in words: docs/theory.md.
#pragma once

#include <vector>

#include "replay.hpp"

namespace envplan {

struct StagePrices {
  Time latency, min_dwell;
  bool asks_ahead;
  double change;             // fJ a request
  const double* time_price;  // (operations of the stage) fJ a ns that each takes
  const double* wait_price;  // (operations of the stage) fJ a ns of waiting before each
};

struct StagePath {
  double bound;             // fJ
  std::vector<Index> rows;  // (operations of the stage) over all tables
};

// Throws std::invalid_argument where a row leaves another clock than it asks for, or a price is
// negative. Time: operations x clocks, x clocks again where clocks may come late.
StagePath cheapest_stage_path(const Problem& problem, Index stage, const StagePrices& prices);

}  // namespace envplan
