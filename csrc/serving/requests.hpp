// Requests by their arrival, and the latencies that their classes must keep.
#pragma once

#include <cstdint>

namespace envplan::serving {

constexpr std::size_t kMaxClasses = 64;  // sets of classes are bits

// A latency objective, s: the longest time to the first token, and the longest mean time between
// further ones.
struct Slo {
  double ttft_s, tbt_s;
};

// Borrowed as long as the Service lives; all of length count > 0.
struct Requests {
  int64_t count;
  const double* arrival;  // s, ascending
  const int32_t* input;   // tokens, not negative
  const int32_t* output;
  const uint8_t* known;  // class
  const uint8_t* taken;  // class that it is taken for when it arrives
  // Output tokens that are expected of each when it arrives; null: the mean of the requests of the
  // class it is taken for that have finished by then.
  const int32_t* expected = nullptr;

  // Tokens of input and output together.
  double context(int64_t request) const {
    return static_cast<double>(input[request]) + output[request];
  }
};

}  // namespace envplan::serving
