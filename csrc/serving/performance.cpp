#include "performance.hpp"

#include <algorithm>

namespace envplan::serving {
namespace {

// The value at a place between the entries of a table; beyond the last two straight on.
double between(const std::vector<double>& values, double at) {
  const std::size_t last = values.size() - 1;
  const std::size_t k = std::min(static_cast<std::size_t>(at), last - 1);
  return values[k] + (at - static_cast<double>(k)) * (values[k + 1] - values[k]);
}

}  // namespace

double Tables::prompt_time(double tokens) const { return between(prompt_s, tokens / grid); }

double Tables::prompt_power(double tokens) const {
  return between(prompt_w, std::min(tokens / grid, static_cast<double>(prompt_w.size() - 1)));
}

}  // namespace envplan::serving
