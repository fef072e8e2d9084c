// Contexts on their way from the instances that run prompts to those that decode.
//
// A transfer takes a latency and the bytes of the context over the slower of the two links. An
// instance sends one context after the other. It begins when memory is kept at its destination, and
// memory at its origin is held until it ends.
#pragma once

#include <cstdint>
#include <vector>

#include "instance.hpp"

namespace envplan::serving {

struct TransferCosts {
  double latency_s;        // not negative
  double bytes_per_token;  // of context, not negative
};

struct Transfer {
  double end;
  int32_t to;
  Handover handover;
};

class Transfers {
 public:
  // Throws std::invalid_argument for negative costs.
  explicit Transfers(TransferCosts costs);
  // The next one that ends, s.
  double next() const;
  // A context of so many tokens leaves over a link with so many bytes/s.
  void begin(const Handover& handover, Instance& from, int32_t to, double tokens, double bytes_s,
             double now);
  Transfer pop();
  const std::vector<Transfer>& running() const { return running_; }
  int64_t count() const { return count_; }
  double bytes() const { return bytes_; }

 private:
  TransferCosts costs_;
  std::vector<Transfer> running_;  // heap, first to end first
  int64_t count_ = 0;
  double bytes_ = 0;
};

}  // namespace envplan::serving
