// The integers that everything is counted in, and checks of what comes from outside.
//
// 10 uW * 1 ns = 10 fJ, so times, powers and energies multiply without rounding. Sums of energies
// have 128 bits; everything else is kept within 64.
#pragma once

#include <cstdint>
#include <stdexcept>

namespace envplan {

using Time = std::int64_t;   // ns
using Power = std::int64_t;  // 10 uW; also a marginal cost, 10 fJ a ns
using Energy = __int128;     // 10 fJ = 10 uW * ns
using Index = std::int32_t;

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
