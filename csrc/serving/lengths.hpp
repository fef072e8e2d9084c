// How long outputs are expected to be: nobody knows before they end.
#pragma once

#include <cstdint>
#include <vector>

#include "service.hpp"

namespace envplan::serving {

class ExpectedLengths {
 public:
  // `service` must outlive it.
  explicit ExpectedLengths(const Service& service);

  // Output tokens that are expected of a request that arrives now: what the trace's predictor says,
  // or else the mean of the class it is taken for, as far as its requests have finished.
  double output(int32_t request) const;
  // A request has finished.
  void learn(int32_t request);

 private:
  static constexpr double kPriorRequests = 10;  // that the usual output of a class counts as
  const Requests& requests_;
  std::vector<double> tokens_, count_;  // by class
};

}  // namespace envplan::serving
