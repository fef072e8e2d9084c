// The integers that everything is counted in.
#pragma once

#include <cstdint>

namespace envplan {

using Time = std::int64_t;   // ns
using Power = std::int64_t;  // uW
using Energy = __int128;     // fJ = uW * ns
using Index = std::int32_t;

}  // namespace envplan
