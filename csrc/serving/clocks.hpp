// Clocks that follow the load: the preferred clock of an instance, or the lowest above it at which
// the prompts that wait are in time and the steps of the batch keep tokens together.
#pragma once

#include "instance.hpp"
#include "service.hpp"

namespace envplan::serving {

class ClockManager {
 public:
  struct Delays {
    double delay_s;  // until a clock is in force
    double hold_s;   // before a clock may go down
    double margin;   // share of the TTFT SLO that a clock leaves
  };

  // Both must outlive it.
  ClockManager(const Service& service, const Scheduler& scheduler, Delays delays)
      : service_(service), scheduler_(scheduler), delays_(delays) {}

  // Takes over a clock that has come, and asks for another one where the instance's is managed. The
  // clock goes up at once, but for the delay, and down after a while. strictest_ttft: of what may
  // come meanwhile, s.
  void update(Instance& i, double strictest_ttft, double now);

  // How long an iteration with prompts may take at a configuration, s. Below the highest clock, a
  // request that comes meanwhile must still be in time.
  double iteration_limit(const Instance& i, const Tables& table, double strictest_ttft) const;

  // The strictest TBT SLO of the requests that an instance decodes, s.
  double strictest_tbt(const Instance& i) const;

  int64_t changes() const { return changes_; }

 private:
  int32_t top_clock(const Instance& i) const;
  const Tables& tables_at(const Instance& i, int32_t clock) const;
  int32_t clock_for_prompts(const Instance& i, double strictest_ttft, double now) const;
  int32_t clock_for_steps(const Instance& i, int32_t least) const;
  bool prompts_are_in_time(const Instance& i, int32_t clock, const Prompt* begin, const Prompt* end,
                           double strictest_ttft, double now) const;

  const Service& service_;
  const Scheduler& scheduler_;
  Delays delays_;
  int64_t changes_ = 0;
};

}  // namespace envplan::serving
