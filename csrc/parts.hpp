// All Pareto options of an operation, by time and cost, from those of the parts it consists of.
// Cost is energy less what the GPU would draw if it waited as long: c = e - P t. It may be
// negative.
//
// Parts run one after the other, each by one of its options: a clock, a config, a time and an
// energy. Where clocks follow at once and need not be held, parts are independent, and the options
// of the operation are the sums of theirs that nothing beats.
//
// Otherwise a part asks for another clock as it starts, and only one that lasts at least `latency`
// at the clock before does: the clock then comes while it runs. What is left of it is carried over
// as a replay does (replay.hpp): left' = ceil(left * time' / time) ns, each share's energy rounded
// half up to a whole fJ. The operation asks for its first clock as it starts, and for no other one
// before that has come. Every clock is kept for at least `hold`, the last one before the end.
//
// A dynamic program over parts, whose state is the clock in force (one state where parts are
// independent). A state's front holds its choices so far that no other beats in both time and
// cost; the choice of a run of parts adds the same time and cost to whatever it follows. With a
// slack, choices are left out where another is no slower and costs little more; vertices of a
// front's lower convex hull are always kept. Hulls of unions and of sums follow from hulls alone,
// so the hull of the options is exact whatever the slack.
#pragma once

#include <cstdint>
#include <vector>

#include "types.hpp"

namespace envplan {

// Borrowed arrays; sizes in parentheses.
struct PartsProblem {
  Index num_parts, num_clocks;
  const Index* option_begin;   // (num_parts * num_clocks + 1) options of a part at a clock
  const Time* time;            // (options) ns, at least 1
  const std::int64_t* energy;  // (options) fJ; those of all parts add up to less than 2^62
  const Index* config;         // (options) a clock changes within a part between equal ones only
  const std::uint8_t* asks;    // (num_parts) whether a clock may be asked for as it starts
  Time latency, hold;          // ns
  Power waiting;               // uW; as long as all parts take, it draws less than 2^62 fJ
  std::int64_t slack;          // fJ, of the whole operation; 0 leaves nothing out
};

// An option of the operation: its total, and the option of each part, (num_parts).
struct Composed {
  Time time;
  std::int64_t energy;
  std::vector<Index> options;
};

// Options by ascending time and falling cost. Throws std::overflow_error where all fronts
// together have more than `most` choices.
std::vector<Composed> compose(const PartsProblem& problem, std::int64_t most);

}  // namespace envplan
