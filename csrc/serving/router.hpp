// Which instance a request goes to: the one of its class's pool that answers first, by what waits
// there, or one of another pool where it would be late in its own.
#pragma once

#include <cstdint>
#include <vector>

#include "instance.hpp"
#include "scheduler.hpp"
#include "service.hpp"

namespace envplan::serving {

class Router {
 public:
  // Both must outlive it. pack_share: of the TTFT SLO that a request may wait at a packed instance.
  Router(const Service& service, const Scheduler& scheduler, double pack_share);

  // These throw std::out_of_range where there is no such class, and no pool may have the number.
  void route(int32_t klass, int32_t pool, std::vector<int32_t> helpers);
  void set_pack(int32_t pool, bool pack);

  void add(int32_t instance, int32_t pool);
  // Says whether it was there.
  bool remove(int32_t instance, int32_t pool);

  // The strictest TTFT SLO of what goes to a pool, s.
  double strictest_ttft(int32_t pool) const { return strictest_[pool]; }

  // A request as a router knows it.
  struct Arrival {
    int32_t request;
    double input, output;  // tokens; the output as long as expected
  };
  struct Choice {
    int32_t instance;   // -1: there is none
    bool helps;         // it is of another pool than the class's own
    bool is_too_small;  // there are instances, and none could hold the request's prompt
  };
  // The instance that a request goes to.
  Choice choose(const Arrival& arrival, const std::vector<Instance>& instances, double now) const;

  // Requests of a pool only have their prompts there; they decode in another pool.
  void hand_over(int32_t pool, int32_t decode_pool);
  // The pool where requests of a pool decode; -1: the same.
  int32_t decode_pool(int32_t pool) const { return decode_pool_[pool]; }
  // The instance where a request decodes whose prompt is through: the one with the fewest requests
  // among those with memory for it or, where the pool is packed, the first of these.
  Choice choose_to_decode(int32_t pool, const Arrival& arrival,
                          const std::vector<Instance>& instances) const;

  // Tokens of memory that a request takes in a pool, as far as is known when it arrives.
  double reserve(int32_t pool, const Arrival& arrival) const;

  static void check_pool(int32_t pool);  // throws std::out_of_range
  // Lets a pool that is checked be asked about.
  void ensure_pool(int32_t pool);

 private:
  struct Estimate;
  double wait_at(const Instance& i, const Arrival& arrival, double now, Estimate& estimate) const;
  Choice best_of(int32_t pool, const Arrival& arrival, const std::vector<Instance>& instances,
                 double now, double* wait) const;

  const Service& service_;
  const Scheduler& scheduler_;
  double pack_share_;
  std::vector<std::vector<int32_t>> members_;  // running instances of each pool
  std::vector<bool> pack_;
  std::vector<int32_t> decode_pool_;
  std::vector<double> strictest_;
  std::vector<int32_t> home_;  // pool of a class; -1: none
  std::vector<std::vector<int32_t>> helpers_;
};

}  // namespace envplan::serving
