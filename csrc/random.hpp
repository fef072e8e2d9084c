// The random numbers of the local searches: the same on every machine.
#pragma once

#include <cstdint>

namespace envplan {

// Marsaglia's xorshift64*.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed * 2 + 1) {}
  std::uint64_t next() {
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return state_ * 0x2545F4914F6CDD1Dull;
  }
  std::int32_t below(std::int32_t n) { return static_cast<std::int32_t>((next() >> 32) * n >> 32); }
  double uniform() { return (static_cast<double>(next() >> 11) + 0.5) * 0x1p-53; }

 private:
  std::uint64_t state_;
};

}  // namespace envplan
