#include "lengths.hpp"

#include <cmath>

namespace envplan::serving {

ExpectedLengths::ExpectedLengths(const Service& service)
    : requests_(service.requests), count_(service.slos.size(), kPriorRequests) {
  for (const double usual : service.usual_output) tokens_.push_back(kPriorRequests * usual);
}

double ExpectedLengths::output(int32_t request) const {
  if (requests_.expected != nullptr) return requests_.expected[request];
  const uint8_t klass = requests_.taken[request];
  return std::round(tokens_[klass] / count_[klass]);
}

void ExpectedLengths::learn(int32_t request) {
  const uint8_t klass = requests_.taken[request];
  tokens_[klass] += requests_.output[request];
  count_[klass] += 1;
}

}  // namespace envplan::serving
