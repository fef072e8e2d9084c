// Contexts on their way from the instances that run prompts to those that decode.
//
// A transfer begins when memory is kept at its destination, and memory at its origin is held until
// it ends. Each instance has a link to send and one to receive (full duplex). A link carries one
// context after another at its own rate, in the order in which they begin. The receiver's carries a
// context while the sender's does, at the earliest, and is not done before that. A latency follows.
//
// Engines have several contexts in flight (NIXL, Mooncake), which share the links. A link is
// through with all of them when it is here, but with most single ones later than here.
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
  // A context of so many tokens leaves for instance number `to`. Links have so many bytes/s.
  void begin(const Handover& handover, double tokens, Link& sending, Link& receiving, int32_t to,
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
