#include "counts.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "../types.hpp"

namespace envplan::serving {
namespace {

constexpr double kShortestBin = 1e-4;  // s: the end of the first bin of TimeCounts
constexpr double kBinGrowth = 1.01;    // from the end of each to that of the next
constexpr double kMaxSlots = 1 << 27;
constexpr double kRounding = 1e-9;  // s, and bins

}  // namespace

std::vector<double> TimeCounts::ends() {
  std::vector<double> ends(kBins);
  for (std::size_t k = 0; k < kBins; ++k) {
    ends[k] = kShortestBin * std::pow(kBinGrowth, static_cast<double>(k));
  }
  ends.back() = std::numeric_limits<double>::infinity();
  return ends;
}

void TimeCounts::add(double seconds) {
  static const double growth = std::log(kBinGrowth);
  const double bins_up = std::log(std::max(seconds, kShortestBin) / kShortestBin) / growth;
  ++counts_[static_cast<std::size_t>(std::min(std::ceil(bins_up - kRounding), kBins - 1.0))];
}

SlotSeries::SlotSeries(double slot_s, double end_s) : slot_s_(slot_s), end_s_(end_s) {
  require(slot_s > 0 && end_s >= 0 && end_s / slot_s < kMaxSlots,
          "slots must be positive, and not too many");
  const auto slots = static_cast<std::size_t>(std::ceil(end_s / slot_s)) + 1;
  energy_.assign(slots, 0.0);
  attained_.assign(slots, 0);
}

void SlotSeries::add_energy(double watts, double from, double until) {
  until = std::min(until, end_s_);
  const std::size_t last = energy_.size() - 1;
  while (from < until) {
    auto slot = static_cast<std::size_t>(from / slot_s_);
    // A quotient that is rounded down may name the slot that ends here.
    if (static_cast<double>(slot + 1) * slot_s_ <= from) ++slot;
    const double slot_end = static_cast<double>(slot + 1) * slot_s_;
    const double to = slot < last ? std::min(until, slot_end) : until;
    energy_[std::min(slot, last)] += watts * (to - from);
    from = to;
  }
}

void SlotSeries::add_attained(double arrival) {
  const auto slot = static_cast<std::size_t>(arrival / slot_s_);
  ++attained_[std::min(slot, attained_.size() - 1)];
}

bool Tally::add(uint8_t klass, const Slo& slo, double first_token_s, double token_interval_s) {
  const bool first_ok = first_token_s <= slo.ttft_s + kRounding;
  const bool tokens_ok = token_interval_s <= slo.tbt_s + kRounding;
  first_token_times_[klass].add(first_token_s);
  token_intervals_[klass].add(token_interval_s);
  Counts& counts = counts_[klass];
  ++counts.requests;
  counts.first_in_time += first_ok;
  counts.tokens_in_time += tokens_ok;
  counts.attained += first_ok && tokens_ok;
  return first_ok && tokens_ok;
}

}  // namespace envplan::serving
