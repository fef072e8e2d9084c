// What a replay counts: requests by class and by how fast they were answered, energy by slot.
#pragma once

#include <cstdint>
#include <vector>

#include "requests.hpp"

namespace envplan::serving {

// Requests of one class that arrived and are finished or given up.
struct Counts {
  int64_t requests, first_in_time, tokens_in_time, attained;
  int64_t unservable;  // of the requests: longer than the memory of the instances that they came to
};

// How often a time was how long. The ends of the bins grow by 1%, so a quantile of what was counted
// is known that well. The last bin is for what took longer than all others, or never came.
class TimeCounts {
 public:
  TimeCounts() : counts_(kBins) {}
  // The longest time of each bin, s; that of the last one is infinite.
  static std::vector<double> ends();
  void add(double seconds);
  const std::vector<int64_t>& counts() const { return counts_; }

 private:
  static constexpr std::size_t kBins = 2085;  // up to a day
  std::vector<int64_t> counts_;
};

// Energy and attained requests in slots of equal length from 0 on; the last one has no end.
class SlotSeries {
 public:
  // Throws std::invalid_argument where slots are not positive, or too many.
  SlotSeries(double slot_s, double end_s);
  // Adds the energy of a span of time, s, to the slots that it lies in; what is after the end of
  // the trace does not count.
  void add_energy(double watts, double from, double until);
  void add_attained(double arrival);
  double slot_s() const { return slot_s_; }
  const std::vector<double>& energy() const { return energy_; }
  const std::vector<int64_t>& attained() const { return attained_; }

 private:
  double slot_s_, end_s_;
  std::vector<double> energy_;
  std::vector<int64_t> attained_;
};

// Counts of the requests that are over, by class.
class Tally {
 public:
  explicit Tally(std::size_t classes)
      : counts_(classes), first_token_times_(classes), token_intervals_(classes) {}
  // Counts a request; both times are infinite where tokens never came. Says whether it attained
  // its SLO.
  bool add(uint8_t klass, const Slo& slo, double first_token_s, double token_interval_s);
  void add_unservable(uint8_t klass) { ++counts_[klass].unservable; }
  const std::vector<Counts>& counts() const { return counts_; }
  const std::vector<TimeCounts>& first_token_times() const { return first_token_times_; }
  const std::vector<TimeCounts>& token_intervals() const { return token_intervals_; }

 private:
  std::vector<Counts> counts_;
  std::vector<TimeCounts> first_token_times_, token_intervals_;
};

}  // namespace envplan::serving
