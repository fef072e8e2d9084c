// What a stretch of requests needs of one instance size: Service::required_instances.

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "../types.hpp"
#include "service.hpp"

namespace envplan::serving {
namespace {

constexpr double kBin = 0.1;          // s
constexpr double kFine = 1.005;       // precision of a need
constexpr double kSteadyBin = 600.0;  // s over which iterations may stay full
constexpr double kLong = 0.99;  // quantile of the prompts whose own time a deadline must leave
constexpr double kLeastSlack = 0.02;  // s
constexpr double kLeastFree = 0.1;    // of an instance is left by stricter requests
constexpr double kMemoryBin = 5.0;    // s over which contexts are averaged
constexpr double kMemoryShare = 0.6;  // of memory that can be filled: contexts come in large pieces
constexpr double kFull = 1e9;         // instances: more than there are

// How long requests of a level may wait for others' work.
struct Level {
  double ttft_s;     // SLO
  double least_s;    // that any of them may wait, whatever its own prompt takes
  double stricter;   // instances that stricter levels keep busy
  double longest_s;  // of its prompts, each alone, but for the few that take longer still

  // A prompt is in one instance only, where stricter ones go first: its own time is stretched.
  double slack(double own_s, double instances) const {
    const double free = std::max(kLeastFree, 1 - stricter / instances);
    return std::max(least_s, ttft_s - own_s / free);
  }
};

// Work in bins, by how strict its SLO is, and how long it may wait.
struct Queues {
  static constexpr std::size_t kMost = kMaxClasses + 1;  // levels
  std::size_t bins, levels;
  std::vector<double> work;         // of a bin and level: of this and all stricter ones, s
  std::vector<std::size_t> begins;  // of a bin and level: where its prompts begin in own_s
  std::vector<double> own_s;        // of each prompt alone
  std::vector<Level> limits;        // of a level
  double allowed;                   // requests that may be late

  bool too_late(double instances) const {
    switch (levels) {  // the usual numbers, so that the compiler knows them
      case 1:
        return too_late_of<1>(instances);
      case 2:
        return too_late_of<2>(instances);
      case 3:
        return too_late_of<3>(instances);
      case 4:
        return too_late_of<4>(instances);
      default:
        return too_late_of<kMost>(instances);
    }
  }

  template <std::size_t kLevels>
  bool too_late_of(double instances) const {
    const std::size_t count = kLevels < kMost ? kLevels : levels;
    double queue[kLevels] = {}, shortest[kLevels];  // that all prompts of a level may wait
    for (std::size_t l = 0; l < count; ++l)
      shortest[l] = instances * limits[l].slack(limits[l].longest_s, instances);
    const double served = instances * kBin;
    double missed = 0;
    for (std::size_t bin = 0; bin < bins; ++bin)
      for (std::size_t l = 0; l < count; ++l) {
        queue[l] = std::max(0.0, queue[l] + work[bin * count + l] - served);
        if (queue[l] <= shortest[l]) continue;
        missed += late_prompts(bin * count + l, limits[l], queue[l], instances);
        if (missed > allowed) return true;
      }
    return false;
  }

  // The prompts of a bin and level that may wait less than it takes to do other prompts' work.
  double late_prompts(std::size_t cell, const Level& level, double queue_s,
                      double instances) const {
    double late = 0;
    for (std::size_t k = begins[cell]; k < begins[cell + 1]; ++k) {
      const double slack_s = level.slack(std::min(own_s[k], level.longest_s), instances);
      if (queue_s - own_s[k] > instances * slack_s) ++late;
    }
    return late;
  }

  // The least number of instances at which it is not too late, to a half percent.
  double least(double mean) const {
    double low = 0, high = std::max(1e-3, mean);
    while (too_late(high)) low = high, high *= 2;
    while (high > kFine * low && high > 1e-3) {
      const double middle = 0.5 * (low + high);
      (too_late(middle) ? low : high) = middle;
    }
    return high;
  }
};

// What a share of the values does not exceed.
double quantile(std::vector<double>& values, double share) {
  const auto place =
      static_cast<std::ptrdiff_t>(std::ceil(share * static_cast<double>(values.size() - 1)));
  std::nth_element(values.begin(), values.begin() + place, values.end());
  return values[place];
}

// A prompt that can be in time: its bin and level, and how long it takes alone.
struct Prompt {
  std::size_t cell;
  double own_s;
};

// The instances of one size that a stretch of requests needs: demand is put into bins, and each of
// three bounds is taken from them. Times in s, tokens as counts.
class Capacity {
 public:
  // The requests from `from` to `to` that are taken for one of `classes`.
  Capacity(const Service& service, const Size& size, double begin, double duration, int64_t from,
           int64_t to, uint64_t classes)
      : service_(service),
        requests_(service.requests),
        size_(size),
        table_(service.tables[size.tables.back()]),
        begin_(begin),
        duration_(duration) {
    for (auto k = from; k < to; ++k) {
      if (!(classes >> requests_.taken[k] & 1) || service.is_too_long(k)) continue;
      ++count_;
      if (requests_.context(k) <= size.kv_tokens) chosen_.push_back(k);
    }
  }

  Need need(double late) {
    if (chosen_.empty()) return {0, 0, 0, count_ > 0 ? 1.0 : 0.0};
    find_levels();
    measure_costs();
    bin_demand();
    limit_queues(late);
    const double memory = memory_bound(late);
    const double busy = busy_s_ / duration_;  // so many have time for all the work
    const double fewest = std::max({busy, queues_.least(busy), quantile_of_steady_bounds(late)});
    return {std::max(fewest, memory), busy, stays_s_ / duration_,
            1 - static_cast<double>(hopeful_) / static_cast<double>(count_)};
  }

 private:
  // The different TTFT SLOs of the classes that are there, strictest first, and the least TBT SLO.
  void find_levels() {
    uint64_t present = 0;
    for (const int64_t k : chosen_) present |= uint64_t{1} << requests_.known[k];
    const std::vector<Slo>& slos = service_.slos;
    for (std::size_t c = 0; c < slos.size(); ++c) {
      if (!(present >> c & 1)) continue;
      ttft_s_.push_back(slos[c].ttft_s);
      tbt_s_ = std::min(tbt_s_, slos[c].tbt_s);
    }
    std::sort(ttft_s_.begin(), ttft_s_.end());
    ttft_s_.erase(std::unique(ttft_s_.begin(), ttft_s_.end()), ttft_s_.end());
    ttft_s_.push_back(kNever);  // the level of work that is late in any case
    for (std::size_t c = 0; c < slos.size(); ++c) {
      level_of_class_[c] =
          std::lower_bound(ttft_s_.begin(), ttft_s_.end(), slos[c].ttft_s) - ttft_s_.begin();
    }
  }

  // What a token of a prompt takes, a request more in the batch, and a step at a usual batch.
  void measure_costs() {
    chunk_ = service_.max_chunk_tokens(size_, table_, kTbtShare * tbt_s_);
    token_s_ = table_.prompt_time(chunk_) / chunk_;
    const auto batches = static_cast<double>(table_.step_s.size() - 2);
    batch_s_ = (table_.step_s.back() - table_.step_s[1]) / std::max(1.0, batches);
    step_s_ = table_.step_s[std::min<std::size_t>(kUsualBatch, table_.step_s.size() - 1)];
  }

  // Work by level in fine bins, contexts in memory bins, tokens in steady bins.
  void bin_demand() {
    const std::size_t levels = ttft_s_.size();
    queues_.levels = levels;
    queues_.bins = static_cast<std::size_t>(duration_ / kBin) + 2;
    queues_.work.assign(queues_.bins * levels, 0.0);
    queues_.begins.assign(queues_.bins * levels + 1, 0);
    held_tokens_.assign(static_cast<std::size_t>(duration_ / kMemoryBin) + 1, 0.0);
    const auto steady_bins = static_cast<std::size_t>(std::ceil(duration_ / kSteadyBin));
    input_tokens_.assign(steady_bins, 0.0);
    output_tokens_.assign(steady_bins, 0.0);
    inputs_.assign(levels, 0.0);
    arrived_.assign(levels, 0.0);
    work_s_.assign(levels, 0.0);
    for (const int64_t k : chosen_) bin_request(k);
    list_prompts();
  }

  // The times of the prompts that can be in time, by bin and level. `begins` holds their numbers.
  void list_prompts() {
    std::vector<std::size_t>& begins = queues_.begins;
    std::partial_sum(begins.begin(), begins.end(), begins.begin());
    queues_.own_s.resize(begins.back());
    std::vector<std::size_t> next(begins.begin(), begins.end() - 1);
    for (const Prompt& prompt : prompts_) queues_.own_s[next[prompt.cell]++] = prompt.own_s;
  }

  void bin_request(int64_t k) {
    const double at = requests_.arrival[k] - begin_, input = requests_.input[k],
                 output = requests_.output[k];
    // Every step of a request reads its context, which grows.
    const double context_s = table_.context_s * (input + 0.5 * output);
    const double work = input * token_s_ + output * (batch_s_ + context_s);
    const double beside_s = static_cast<double>(kUsualBatch - 1) * context_s;
    const double stay = work + output * (step_s_ + beside_s);
    const std::size_t level = level_of_class_[requests_.known[k]];
    const std::size_t bin = std::min(static_cast<std::size_t>(at / kBin), queues_.bins - 1);
    const std::size_t cell = bin * queues_.levels + level;
    const double own_s = service_.own_time(size_, table_, requests_.input[k]);
    busy_s_ += work;
    stays_s_ += stay;
    inputs_[level] += input;
    arrived_[level] += 1;
    hold_memory(at, stay, input + output);
    if (own_s > ttft_s_[level]) {
      // It is in nobody's way once it is late: from then on it waits behind all others.
      const double in_time_s = std::min(work, ttft_s_[level]);
      queues_.work[cell] += in_time_s;
      work_s_[level] += in_time_s;
      queues_.work[bin * queues_.levels + queues_.levels - 1] += work - in_time_s;
      return;
    }
    ++hopeful_;
    queues_.work[cell] += work;
    work_s_[level] += work;
    ++queues_.begins[cell + 1];
    prompts_.push_back({cell, std::max(own_s, input * token_s_)});
    const std::size_t steady_bins = input_tokens_.size();
    const auto steady_bin =
        std::min(static_cast<std::size_t>(at / duration_ * static_cast<double>(steady_bins)),
                 steady_bins - 1);
    input_tokens_[steady_bin] += input;
    output_tokens_[steady_bin] += output;
  }

  // Counts a request's context in each of the bins that it stays in, by the part that it stays.
  void hold_memory(double from, double stay, double tokens) {
    const double until = from + stay;
    const std::size_t last = held_tokens_.size() - 1;
    auto bin = std::min(static_cast<std::size_t>(from / kMemoryBin), last);
    for (; bin <= last && static_cast<double>(bin) * kMemoryBin < until; ++bin) {
      const double begin = static_cast<double>(bin) * kMemoryBin;
      const double part = std::min(until, begin + kMemoryBin) - std::max(from, begin);
      held_tokens_[bin] += tokens * std::max(0.0, part) / kMemoryBin;
    }
  }

  // How long each level may wait, and its work with that of all stricter ones.
  void limit_queues(double late) {
    queues_.allowed = late * static_cast<double>(hopeful_);
    double stricter = 0;
    for (std::size_t level = 0; level < queues_.levels; ++level) {
      // The prompts that all instances are at do not wait: of each, half is left on average.
      const double prompt_s = inputs_[level] * token_s_ / std::max(1.0, arrived_[level]);
      queues_.limits.push_back({ttft_s_[level] - table_.prompt_time(1) - 0.5 * kBin,
                                std::max(kLeastSlack, 0.5 * prompt_s), stricter,
                                longest_prompt_s(level)});
      stricter += work_s_[level] / duration_;
    }
    for (std::size_t bin = 0; bin < queues_.bins; ++bin) {
      for (std::size_t level = 1; level < queues_.levels; ++level) {
        const std::size_t k = bin * queues_.levels + level;
        queues_.work[k] += queues_.work[k - 1];
      }
    }
  }

  // The time alone that a share kLong of a level's prompts does not exceed.
  double longest_prompt_s(std::size_t level) const {
    std::vector<double> own_s;
    for (const Prompt& prompt : prompts_)
      if (prompt.cell % queues_.levels == level) own_s.push_back(prompt.own_s);
    return own_s.empty() ? 0 : quantile(own_s, kLong);
  }

  double memory_bound(double late) {
    return quantile(held_tokens_, 1 - late) / (kMemoryShare * size_.kv_tokens);
  }

  // Where prompts always wait, every iteration is as long as it may be. Then the batch, by Little's
  // law, and the prompt tokens that leave room for it must be what comes: otherwise batches grow,
  // prompts get slower, and the fleet falls behind though it could serve the same load in calm.
  double quantile_of_steady_bounds(double late) const {
    const double context = mean_context();
    std::vector<double> steady(input_tokens_.size(), kFull);
    for (int32_t piece = chunk_; piece > 0; piece -= kLeastChunk) {
      const std::size_t batch = service_.batch_beside(table_, piece, tbt_s_, context);
      const double context_s = table_.context_s * context * static_cast<double>(batch);
      const double beside_s = table_.step_s[batch] - table_.step_s[1] + context_s;
      const double iteration_s =
          std::max(table_.prompt_time(piece) + beside_s, table_.step_s[batch] + context_s);
      const double full = iteration_s * static_cast<double>(steady.size()) / duration_;
      for (std::size_t k = 0; k < steady.size(); ++k) {
        const double most =
            std::max(input_tokens_[k] / piece, output_tokens_[k] / static_cast<double>(batch));
        steady[k] = std::min(steady[k], most * full);
      }
    }
    return quantile(steady, 1 - late);
  }

  // Tokens of context of a decoding request, on average over the steps.
  double mean_context() const {
    double steps = 0, read = 0;
    for (const int64_t k : chosen_) {
      steps += requests_.output[k];
      read += requests_.output[k] * (requests_.input[k] + 0.5 * requests_.output[k]);
    }
    return steps > 0 ? read / steps : 0;
  }

  static constexpr std::size_t kUsualBatch = 16;
  const Service& service_;
  const Requests& requests_;
  const Size& size_;
  const Tables& table_;
  const double begin_, duration_;
  int64_t count_ = 0;  // requests, and those that the size can hold
  std::vector<int64_t> chosen_;
  // Levels, strictest first.
  std::vector<double> ttft_s_;
  double tbt_s_ = kNever;
  std::array<std::size_t, kMaxClasses> level_of_class_{};
  // Costs.
  int32_t chunk_ = 0;
  double token_s_ = 0, batch_s_ = 0, step_s_ = 0;
  // Demand.
  Queues queues_;
  std::vector<Prompt> prompts_;  // that can be in time
  std::vector<double> held_tokens_, input_tokens_, output_tokens_;
  std::vector<double> inputs_, arrived_, work_s_;  // of a level
  double busy_s_ = 0, stays_s_ = 0;
  int64_t hopeful_ = 0;  // requests that are in time if they are alone
};

}  // namespace

Need Service::required_instances(double begin, double end, uint64_t classes, int32_t size_index,
                                 double late) const {
  if (size_index < 0 || static_cast<std::size_t>(size_index) >= sizes.size()) {
    throw std::out_of_range("there is no such size");
  }
  require(begin < end, "a stretch must end after it begins");
  const double* last = requests.arrival + requests.count;
  const auto from = std::lower_bound(requests.arrival, last, begin) - requests.arrival;
  const auto to = std::lower_bound(requests.arrival, last, end) - requests.arrival;
  return Capacity(*this, sizes[size_index], begin, end - begin, from, to, classes).need(late);
}

}  // namespace envplan::serving
