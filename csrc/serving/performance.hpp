// What iterations of an instance cost: times and powers of its configurations (TP and clock).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace envplan::serving {

// One configuration. Every table has two entries at least, and step_s and step_w as many as each
// other, prompt_s and prompt_w likewise.
struct Tables {
  double idle_w;
  std::vector<double> step_s, step_w;      // by decoding requests, 0 .. most; s are positive
  double grid;                             // tokens between two entries of the prompt tables, > 0
  std::vector<double> prompt_s, prompt_w;  // of k * grid tokens; straight on beyond the last
  double context_s = 0;  // that a token of context of the decoding requests adds to a step, >= 0
  double context_w = 0;  // power while contexts are read

  double prompt_time(double tokens) const;
  double prompt_power(double tokens) const;
  std::size_t largest_batch() const { return step_s.size() - 1; }
};

// An instance size: its configurations by rising clock, and its memory.
struct Size {
  double kv_tokens;             // tokens of context that fit beside the weights
  int32_t chunk;                // prompt tokens of one iteration, at least 1
  std::vector<int32_t> tables;  // indices of its configurations, clocks ascending; at least one
  double link_bytes_s = 1e300;  // that an instance can send to others, or receive, > 0
};

}  // namespace envplan::serving
