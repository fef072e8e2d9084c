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

  struct Choice {
    int32_t instance;  // -1: there is none
    bool helps;        // it is of another pool than the class's own
  };
  Choice choose(int32_t request, const std::vector<Instance>& instances, double now) const;

  static void check_pool(int32_t pool);  // throws std::out_of_range

 private:
  struct Estimate;
  void ensure_pool(int32_t pool);
  double wait_at(const Instance& i, int32_t request, double now, Estimate& estimate) const;
  int32_t best_of(int32_t pool, int32_t request, const std::vector<Instance>& instances, double now,
                  double* wait) const;

  const Service& service_;
  const Scheduler& scheduler_;
  double pack_share_;
  std::vector<std::vector<int32_t>> members_;  // running instances of each pool
  std::vector<bool> pack_;
  std::vector<double> strictest_;
  std::vector<int32_t> home_;  // pool of a class; -1: none
  std::vector<std::vector<int32_t>> helpers_;
};

}  // namespace envplan::serving
