// Precedences between operations, sorted by the operation at one end.
#pragma once

#include <vector>

#include "types.hpp"

namespace envplan {

// The arcs of operation i are begin[i]..begin[i + 1]; `other` is the operation at the far end, and
// `lag` the ns between the end of the earlier one and the start of the later one.
struct Arcs {
  std::vector<Index> begin;  // (operations + 1)
  std::vector<Index> other;  // (arcs)
  std::vector<Time> lag;     // (arcs)
};

// The same arcs sorted by their other end; sizes as in Arcs.
inline Arcs reversed(Index num_operations, const Index* begin, const Index* other,
                     const Time* lag) {
  const Index count = begin[num_operations];
  Arcs back{std::vector<Index>(num_operations + 1), std::vector<Index>(count),
            std::vector<Time>(count)};
  for (Index e = 0; e < count; ++e) ++back.begin[other[e] + 1];
  for (Index i = 0; i < num_operations; ++i) back.begin[i + 1] += back.begin[i];
  std::vector<Index> fill(back.begin.begin(), back.begin.end() - 1);
  for (Index i = 0; i < num_operations; ++i) {
    for (Index e = begin[i]; e < begin[i + 1]; ++e) {
      const Index slot = fill[other[e]]++;
      back.other[slot] = i;
      back.lag[slot] = lag[e];
    }
  }
  return back;
}

}  // namespace envplan
