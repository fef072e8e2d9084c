#include "rounding.hpp"

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

#include "arcs.hpp"
#include "random.hpp"

namespace envplan {

namespace {

using std::int64_t;
using std::uint64_t;

constexpr Index kWindow = 64;        // operations that one exchange looks at: bits of a word
constexpr Index kExchangeDepth = 4;  // options by which an exchange speeds its operation up
constexpr int kExchangePasses = 4;
constexpr Index kReach = 8;  // options by which an annealing move shifts an operation
constexpr int64_t kMovesPerTemperature = 256;
constexpr double kCooling = 0.05;  // last temperature over first
// Operations annealed together. What a move reads of so many fits a processor's second cache; moves
// all over a long pipeline would wait for memory.
constexpr Index kSegment = 8192;

// Where share k of so many shares of a whole begins; the last one ends with it.
Index share_begin(Index whole, Index k, Index shares) {
  return static_cast<Index>(static_cast<int64_t>(whole) * k / shares);
}

// Operations begin..end - 1, fewer than 65; a set of them is a word with a bit for each.
struct Window {
  Index begin, end;

  uint64_t bit(Index i) const { return uint64_t{1} << (i - begin); }
  uint64_t all() const { return ~uint64_t{0} >> (kWindow - (end - begin)); }
  Index lowest(uint64_t bits) const { return begin + __builtin_ctzll(bits); }
  Index highest(uint64_t bits) const { return begin + kWindow - 1 - __builtin_clzll(bits); }
};

class Rounding {
 public:
  Rounding(const RoundingProblem& problem, Index* choice)
      : problem_(problem),
        choice_(choice),
        num_operations_(problem.num_operations),
        start_(num_operations_),
        latest_finish_(num_operations_),
        succs_(reversed(num_operations_, problem.pred_begin, problem.pred, problem.pred_lag)) {
    for (Index i = 0; i < num_operations_; ++i) {
      max_preds_ = std::max(max_preds_, problem.pred_begin[i + 1] - problem.pred_begin[i]);
    }
  }

  void diffuse() {
    for (Index i = 0; i < num_operations_; ++i) {
      start_[i] = earliest_start(i);
      choice_[i] = 0;
      choice_[i] = cheapest_within(i, problem_.finish[i] - start_[i]);
    }
  }

  void exchange() {
    slow_down_everywhere();
    for (int pass = 0; pass < kExchangePasses && exchange_pass(); ++pass) {
    }
  }

  // `heat` is the first temperature in units of the mean cost between neighbouring options.
  void anneal(int64_t moves, double heat, Random random) {
    update_starts(0, num_operations_);
    double sum_of_steps = 0;
    for (Index i = 0; i < num_operations_; ++i) {
      choice_[i] = cheapest_within(i, window_end(i) - start_[i]);
      const Index faster = std::max(choice_[i] - 1, 0);
      sum_of_steps += static_cast<double>(cost(i, faster) - cost(i, choice_[i]));
    }
    const double first_temperature = heat * sum_of_steps / num_operations_;
    // Neighbours in number are neighbours in time, so a segment has nearly all that its moves
    // reach.
    const Index num_segments = (num_operations_ + kSegment - 1) / kSegment;
    for (Index k = 0; k < num_segments; ++k) {
      anneal_segment(share_begin(num_operations_, k, num_segments),
                     share_begin(num_operations_, k + 1, num_segments), moves / num_segments,
                     first_temperature, random);
    }
  }

  // Cost of the current choice relative to everything at its fastest; exact, and never near the
  // integer range: it is a sum of differences that shrink the deadline's worth of energy.
  __int128 total() const {
    __int128 sum = 0;
    for (Index i = 0; i < num_operations_; ++i) sum += cost(i, choice_[i]) - cost(i, 0);
    return sum;
  }

 private:
  // An operation before an exchange changed it.
  struct Replaced {
    Index operation, choice;
    int64_t start, latest_finish;
  };

  Index first_option(Index i) const { return problem_.option_begin[problem_.table[i]]; }
  Index num_options(Index i) const {
    return problem_.option_begin[problem_.table[i] + 1] - first_option(i);
  }
  int64_t time(Index i, Index option) const { return problem_.time[first_option(i) + option]; }
  int64_t cost(Index i, Index option) const { return problem_.cost[first_option(i) + option]; }

  // When the predecessors of an operation let it start.
  int64_t earliest_start(Index i) const {
    int64_t start = 0;
    for (Index e = problem_.pred_begin[i]; e < problem_.pred_begin[i + 1]; ++e) {
      const Index pred = problem_.pred[e];
      start = std::max(start, start_[pred] + time(pred, choice_[pred]) + problem_.pred_lag[e]);
    }
    return start;
  }

  void update_starts(Index begin, Index end) {
    for (Index i = begin; i < end; ++i) start_[i] = earliest_start(i);
  }

  // When an operation must end so that its successors end by their latest finishes.
  int64_t latest_finish(Index i) const {
    int64_t finish = problem_.deadline;
    for (Index e = succs_.begin[i]; e < succs_.begin[i + 1]; ++e) {
      const Index succ = succs_.other[e];
      finish = std::min(finish, latest_finish_[succ] - time(succ, choice_[succ]) - succs_.lag[e]);
    }
    return finish;
  }

  void update_latest_finishes() {
    for (Index i = num_operations_ - 1; i >= 0; --i) latest_finish_[i] = latest_finish(i);
  }

  // The slowest option, which is the cheapest, that takes at most `room`; the fastest if none does.
  // Looks from the current choice, which is rarely far.
  Index cheapest_within(Index i, int64_t room) const {
    const int64_t* times = problem_.time + first_option(i);
    const Index size = num_options(i);
    Index option = choice_[i];
    while (option + 1 < size && times[option + 1] <= room) ++option;
    while (option > 0 && times[option] > room) --option;
    return option;
  }

  void slow_down_everywhere() {
    update_latest_finishes();
    for (Index begin = 0;; begin += kWindow / 2) {
      const Window window{begin, std::min(num_operations_, begin + kWindow)};
      update_starts(window.begin, window.end);
      slow_down_within_slack(window, window.all());
      replaced_.clear();
      if (window.end == num_operations_) return;
    }
  }

  // Takes the best single slow-down within slack until none is left. Returns what it saved.
  // candidates: all operations of the window that may have slack.
  int64_t slow_down_within_slack(Window window, uint64_t candidates) {
    int64_t saved = 0;
    for (;;) {
      int64_t best_gain = 0;
      Index best_operation = 0, best_option = 0;
      for (uint64_t left = candidates; left != 0; left &= left - 1) {
        const Index i = window.lowest(left);
        const Index option = cheapest_within(i, latest_finish_[i] - start_[i]);
        const int64_t gain = cost(i, choice_[i]) - cost(i, option);
        if (gain > best_gain) {
          best_gain = gain;
          best_operation = i;
          best_option = option;
        }
      }
      if (best_gain == 0) return saved;
      change_option(best_operation, best_option, window);
      saved += best_gain;
    }
  }

  bool exchange_pass() {
    update_starts(0, num_operations_);
    update_latest_finishes();
    bool has_improved = false;
    for (Index i = 0; i < num_operations_; ++i) {
      const Window window{std::max(0, i - kWindow / 2), std::min(num_operations_, i + kWindow / 2)};
      // The only one of the window that the exchanges before have not brought up to date.
      start_[window.end - 1] = earliest_start(window.end - 1);
      has_improved |= exchange_around(i, window);
    }
    return has_improved;
  }

  // Makes operation i faster where what others of its window then save is more.
  bool exchange_around(Index i, Window window) {
    const Index slower = choice_[i];
    for (Index depth = 1; depth <= kExchangeDepth && depth <= slower; ++depth) {
      const Index faster = slower - depth;
      const int64_t price = cost(i, faster) - cost(i, slower);
      const uint64_t reached = change_option(i, faster, window);
      const bool is_worth_it = slow_down_within_slack(window, reached) > price;
      if (!is_worth_it) restore_replaced();
      replaced_.clear();
      if (is_worth_it) return true;
    }
    return false;
  }

  // Gives operation i another option; brings starts and latest finishes of its window up to date.
  // Returns all that these have changed for, i among them.
  uint64_t change_option(Index i, Index option, Window window) {
    remember(i);
    choice_[i] = option;
    const uint64_t started = propagate_starts(i, window);
    return window.bit(i) | started | propagate_latest_finishes(i, window);
  }

  // Brings the starts after operation i up to date; returns the operations that start anew.
  uint64_t propagate_starts(Index i, Window window) {
    uint64_t changed = 0, waiting = succs_within(i, window);
    while (waiting != 0) {
      const Index j = window.lowest(waiting);
      waiting &= waiting - 1;
      const int64_t start = earliest_start(j);
      if (start == start_[j]) continue;
      remember(j);
      start_[j] = start;
      changed |= window.bit(j);
      waiting |= succs_within(j, window);
    }
    return changed;
  }

  // The same for the latest finishes before operation i.
  uint64_t propagate_latest_finishes(Index i, Window window) {
    uint64_t changed = 0, waiting = preds_within(i, window);
    while (waiting != 0) {
      const Index j = window.highest(waiting);
      waiting ^= window.bit(j);
      const int64_t finish = latest_finish(j);
      if (finish == latest_finish_[j]) continue;
      remember(j);
      latest_finish_[j] = finish;
      changed |= window.bit(j);
      waiting |= preds_within(j, window);
    }
    return changed;
  }

  uint64_t succs_within(Index i, Window window) const {
    uint64_t succs = 0;
    for (Index e = succs_.begin[i]; e < succs_.begin[i + 1]; ++e) {
      if (succs_.other[e] < window.end) succs |= window.bit(succs_.other[e]);
    }
    return succs;
  }

  uint64_t preds_within(Index i, Window window) const {
    uint64_t preds = 0;
    for (Index e = problem_.pred_begin[i]; e < problem_.pred_begin[i + 1]; ++e) {
      if (problem_.pred[e] >= window.begin) preds |= window.bit(problem_.pred[e]);
    }
    return preds;
  }

  void remember(Index i) { replaced_.push_back({i, choice_[i], start_[i], latest_finish_[i]}); }

  void restore_replaced() {
    for (auto replaced = replaced_.rbegin(); replaced != replaced_.rend(); ++replaced) {
      choice_[replaced->operation] = replaced->choice;
      start_[replaced->operation] = replaced->start;
      latest_finish_[replaced->operation] = replaced->latest_finish;
    }
  }

  // When i's window ends: the first of its successors' starts.
  int64_t window_end(Index i) const {
    constexpr Index kNone = -1;
    return window_end_with(i, kNone, 0);
  }

  // The same with operation `moved` starting at `moved_start`.
  int64_t window_end_with(Index i, Index moved, int64_t moved_start) const {
    int64_t end = problem_.deadline;
    for (Index e = succs_.begin[i]; e < succs_.begin[i + 1]; ++e) {
      const Index succ = succs_.other[e];
      end = std::min(end, (succ == moved ? moved_start : start_[succ]) - succs_.lag[e]);
    }
    return end;
  }

  // Moves starts of the operations begin..end - 1 only.
  void anneal_segment(Index begin, Index end, int64_t moves, double temperature, Random& random) {
    const double decay = std::pow(kCooling, static_cast<double>(kMovesPerTemperature) / moves);
    std::vector<Index> pred_choice(max_preds_);
    for (int64_t move = 1; move <= moves; ++move) {
      if (move % kMovesPerTemperature == 0) temperature *= decay;
      const Index i = begin + random.below(end - begin);
      move_start(i, random, temperature, pred_choice.data());
    }
  }

  // Tries to move the start of operation i to where some option of it or of a predecessor fits
  // exactly. pred_choice: scratch, (max_preds_).
  void move_start(Index i, Random& random, double temperature, Index* pred_choice) {
    const Index pred_begin = problem_.pred_begin[i], pred_end = problem_.pred_begin[i + 1];
    const int64_t end = window_end(i);
    const std::optional<int64_t> fitting = fitting_start(random, i, end);
    if (!fitting) return;
    const int64_t start = *fitting;
    if (start == start_[i] || start < 0 || end - start < time(i, 0)) return;
    for (Index e = pred_begin; e < pred_end; ++e) {
      const Index pred = problem_.pred[e];
      if (start - problem_.pred_lag[e] - start_[pred] < time(pred, 0)) return;
    }
    const Index option = cheapest_within(i, end - start);
    int64_t change = cost(i, option) - cost(i, choice_[i]);
    for (Index e = pred_begin; e < pred_end; ++e) {
      const Index pred = problem_.pred[e];
      const int64_t room = window_end_with(pred, i, start) - start_[pred];
      pred_choice[e - pred_begin] = cheapest_within(pred, room);
      change += cost(pred, pred_choice[e - pred_begin]) - cost(pred, choice_[pred]);
    }
    // Metropolis et al. 1953.
    if (change > 0 && static_cast<double>(change) > -temperature * std::log(random.uniform())) {
      return;
    }
    start_[i] = start;
    choice_[i] = option;
    for (Index e = pred_begin; e < pred_end; ++e) {
      choice_[problem_.pred[e]] = pred_choice[e - pred_begin];
    }
  }

  // A start of operation i at which an option near the current one fits exactly: as often one of a
  // predecessor, which then ends there, as one of i, which then ends with its window. Nothing where
  // there is no such option.
  std::optional<int64_t> fitting_start(Random& random, Index i, int64_t end) const {
    const Index pred_begin = problem_.pred_begin[i], pred_end = problem_.pred_begin[i + 1];
    const Index e = pred_begin + random.below(2 * (pred_end - pred_begin) + 1);
    const Index shift = random.below(2 * kReach + 1) - kReach;
    const bool fits_pred = e < pred_end;
    const Index fitted = fits_pred ? problem_.pred[e] : i;
    const Index option = choice_[fitted] + shift;
    if (option < 0 || option >= num_options(fitted)) return std::nullopt;
    if (fits_pred) return start_[fitted] + time(fitted, option) + problem_.pred_lag[e];
    return end - time(i, option);
  }

  const RoundingProblem& problem_;
  Index* choice_;
  Index num_operations_;
  Index max_preds_ = 0;
  std::vector<int64_t> start_, latest_finish_;
  std::vector<Replaced> replaced_;  // by the exchange that is tried, oldest first
  Arcs succs_;
};

void check(const RoundingProblem& p) {
  require(p.num_operations > 0 && p.num_tables > 0, "there is nothing to round");
  require_offsets(p.pred_begin, p.num_operations, p.num_preds,
                  "pred_begin must ascend from 0 and span pred and pred_lag");
  require_offsets(p.option_begin, p.num_tables, p.num_options,
                  "option_begin must ascend from 0 and span time and cost");
  for (Index t = 0; t < p.num_tables; ++t) {
    const Index first = p.option_begin[t], last = p.option_begin[t + 1] - 1;
    require(first <= last, "a table has no options");
    // The difference of two costs stays within 64 bits.
    require(p.cost[first] < kMostEnergy && p.cost[last] >= -kMostEnergy, "a cost is out of range");
    for (Index k = first + 1; k <= last; ++k) {
      require(p.time[k - 1] <= p.time[k] && p.cost[k - 1] >= p.cost[k],
              "times must ascend and costs descend within a table");
    }
    require(p.time[first] >= 0, "a time is out of range");
  }
  require(p.deadline >= 0 && p.deadline < kMostTime, "the deadline is out of range");
  __int128 longest = 0;  // no path takes longer
  for (Index i = 0; i < p.num_operations; ++i) {
    require(p.table[i] >= 0 && p.table[i] < p.num_tables, "an operation's table is out of range");
    require(p.finish[i] >= 0 && p.finish[i] < kMostTime, "a finish is out of range");
    Time most_lag = 0;
    for (Index e = p.pred_begin[i]; e < p.pred_begin[i + 1]; ++e) {
      require(p.pred[e] >= 0 && p.pred[e] < i, "operations must come after their predecessors");
      require(p.pred_lag[e] >= 0, "a lag is out of range");
      most_lag = std::max(most_lag, p.pred_lag[e]);
    }
    longest += p.time[p.option_begin[p.table[i] + 1] - 1];
    longest += most_lag;
  }
  require(longest < kMostTime, "times add up to too much");
}

void check_choice(const RoundingProblem& p, const Index* choice) {
  for (Index i = 0; i < p.num_operations; ++i) {
    const Index num_options = p.option_begin[p.table[i] + 1] - p.option_begin[p.table[i]];
    require(choice[i] >= 0 && choice[i] < num_options, "an operation has no such option");
  }
}

}  // namespace

void round_to_options(const RoundingProblem& problem, Index* choice) {
  check(problem);
  Rounding rounding(problem, choice);
  rounding.diffuse();
  rounding.exchange();
}

bool improve_options(const RoundingProblem& problem, int64_t moves, double heat, uint64_t seed,
                     Index* choice) {
  check(problem);
  check_choice(problem, choice);
  Rounding rounding(problem, choice);
  const __int128 given_total = rounding.total();
  const std::vector<Index> given_choice(choice, choice + problem.num_operations);
  rounding.anneal(moves, heat, Random(seed));
  rounding.exchange();
  if (rounding.total() < given_total) return true;
  std::copy(given_choice.begin(), given_choice.end(), choice);
  return false;
}

}  // namespace envplan
