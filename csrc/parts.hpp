// All Pareto options of an operation, by time and cost, from those of the parts it consists of.
// Cost is energy less what the GPU would draw if it waited as long: c = e - P t. It may be
// negative.
//
// Rules. Parts run one after the other, each by one of its options: a clock, a config, a time and
// an energy. Clocks change as parts begin, and only as such do that may ask. A clock is asked for
// `latency` before it has to be there, the first one as the operation starts. Requests lie at least
// max(latency, min_dwell) apart, so that none is made before the last has come, and the last clock
// is there for `min_dwell` before the end. Where both are 0, parts are independent.
//
// So an option takes the same whatever the latency, and with a smaller latency or min_dwell no
// option is lost.
//
// Graph. A path from the first node to the last one is a choice. Where parts are independent, a
// node is the start of a part and an edge an option of it. Else a node is either the start of a
// part, where the clock changes, or that and a clock which has been kept long enough. From the
// former edges lead through as many parts as keep each clock so long, to the latter; from there
// through one part, or back to the former.
//
// Idea. The lower convex hull is found first, from its ends (Aneja and Nair 1979): the lightest
// path by the weights of time and cost that the line between two vertices has is another vertex, or
// there is none between them. An edge is left out between two vertices where the lightest paths
// through it by the weights of both prove that no path through it comes below the line between
// them.
// So few edges soon remain, and a dynamic program over those finds all vertices that are left.
//
// Between two vertices other options lie in the triangle that ends at the time of the one and the
// cost of the other. The same program finds all of these that nothing beats, over edges and paths
// that can end in the triangle. With a slack it only looks at triangles higher than that, and
// leaves out what saves less on a choice that is no slower: half of the slack at the end, the other
// half over all parts. The hull is exact whatever the slack.
//
// Arithmetic. Times and costs are added up and compared as integers. Floating point only decides
// what is left out for coming too late or too dear, with a margin above its error.
#pragma once

#include <cstdint>
#include <vector>

#include "types.hpp"

namespace envplan {

// Borrowed arrays; sizes in parentheses.
struct PartsProblem {
  Index num_parts, num_clocks, num_options;
  const Index* option_begin;   // (num_parts * num_clocks + 1) options of a part at a clock, from 0
  const Time* time;            // (options) ns, at least 1
  const std::int64_t* energy;  // (options) 10 fJ; those of all parts: less than 2^62 units
  const std::uint8_t* asks;    // (num_parts) whether the clock may change as it begins
  Time latency, min_dwell;     // ns
  Power waiting;               // 10 uW; as long as all parts take, it draws less than 2^62 units
  std::int64_t slack;          // 10 fJ, of the whole operation; 0 leaves nothing out
};

// An option of the operation: its total, and the option of each part, (num_parts).
struct Composed {
  Time time;
  std::int64_t energy;
  std::vector<Index> options;
};

// Options by ascending time and falling cost. Throws std::overflow_error where more than
// `max_choices`, at most 2^31 - 1, have to be kept at a time, and std::invalid_argument where the
// arrays contradict the above. Recursion is as deep as there are parts. Safe to call from several
// threads.
std::vector<Composed> compose(const PartsProblem& problem, std::int64_t max_choices);

}  // namespace envplan
