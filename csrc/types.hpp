// The integers that everything is counted in, and checks of what comes from outside.
//
// 10 uW * 1 ns = 10 fJ, so times, powers and energies multiply without rounding. Sums of energies
// have 128 bits; everything else is kept within 64.
//
// Ranges. A single time, power or energy is at most 2^62, so that no sum of two overflows: 146
// years, 46 TW, 46 kJ. So is an iteration's time, and the blocking power of all stages together.
// With them sums stay in 128 bits: the energies of as many operations as can be counted are at most
// 2^93, a power over an iteration is at most 2^124.
#pragma once

#include <cstdint>
#include <limits>
#include <stdexcept>

namespace envplan {

using Time = std::int64_t;   // ns
using Power = std::int64_t;  // 10 uW; also a marginal cost, 10 fJ a ns
using Energy = __int128;     // 10 fJ = 10 uW * ns
using Index = std::int32_t;

constexpr Time kMostTime = Time{1} << 62;
constexpr Power kMostPower = Power{1} << 62;
constexpr std::int64_t kMostEnergy = std::int64_t{1} << 62;  // of one operation

constexpr std::int64_t kUnitsPerJoule = 100'000'000'000'000;
constexpr Energy kMostSum = (((Energy{1} << 126) - 1) << 1) + 1;  // 2^127 - 1
static_assert(kMostEnergy / kUnitsPerJoule == 46'116, "the limit that docs and units.py state");
static_assert(Energy{kMostEnergy} * std::numeric_limits<Index>::max() <= kMostSum / 4);
static_assert(Energy{kMostPower} * kMostTime <= kMostSum / 4);

// Throws std::invalid_argument unless a condition on what comes from outside holds.
inline void require(bool holds, const char* message) {
  if (!holds) throw std::invalid_argument(message);
}

// Throws std::invalid_argument unless begin[0] = 0 <= begin[1] <= ... <= begin[count] = size: what
// an array of first entries (CSR) must be before anything it points to is read.
inline void require_offsets(const Index* begin, Index count, std::int64_t size,
                            const char* message) {
  require(begin[0] == 0 && begin[count] == size, message);
  for (Index i = 0; i < count; ++i) require(begin[i] <= begin[i + 1], message);
}

}  // namespace envplan
