#include "rounding.hpp"

#include <algorithm>
#include <cmath>
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

class Rounding {
  struct Was {
    Index operation, choice;
    int64_t start, end_by;
  };

 public:
  Rounding(const RoundingProblem& p, Index* choice)
      : p_(p),
        choice_(choice),
        n_(p.num_operations),
        start_(n_),
        end_by_(n_),
        succs_(reversed(n_, p.pred_begin, p.pred, p.pred_lag)) {
    for (Index i = 0; i < n_; ++i) {
      most_preds_ = std::max(most_preds_, p.pred_begin[i + 1] - p.pred_begin[i]);
    }
  }

  void diffuse() {
    for (Index i = 0; i < n_; ++i) {
      start_[i] = earliest_start(i);
      choice_[i] = 0;
      choice_[i] = cheapest_within(i, p_.finish[i] - start_[i]);
    }
  }

  void exchange() {
    fill_all();
    for (int pass = 0; pass < kExchangePasses && exchange_pass(); ++pass) {
    }
  }

  // `heat` is the first temperature in units of the mean cost between neighbouring options.
  void anneal(int64_t moves, double heat, Random random) {
    update_starts(0, n_);
    double step = 0;
    for (Index i = 0; i < n_; ++i) {
      choice_[i] = cheapest_within(i, window_end(i, -1, 0) - start_[i]);
      step += static_cast<double>(cost(i, std::max(choice_[i] - 1, 0)) - cost(i, choice_[i]));
    }
    std::vector<Index> pred_choice(most_preds_);
    const double decay = std::pow(kCooling, static_cast<double>(kMovesPerTemperature) / moves);
    double temperature = heat * step / n_;
    for (int64_t m = 1; m <= moves; ++m) {
      if (m % kMovesPerTemperature == 0) temperature *= decay;
      move_start(random, temperature, pred_choice.data());
    }
  }

  // Cost of the current choice relative to everything at its fastest; exact, and never near the
  // integer range: it is a sum of differences that shrink the deadline's worth of energy.
  __int128 total() const {
    __int128 sum = 0;
    for (Index i = 0; i < n_; ++i) sum += cost(i, choice_[i]) - cost(i, 0);
    return sum;
  }

 private:
  Index first_option(Index i) const { return p_.option_begin[p_.table[i]]; }
  Index num_options(Index i) const { return p_.option_begin[p_.table[i] + 1] - first_option(i); }
  int64_t time(Index i, Index c) const { return p_.time[first_option(i) + c]; }
  int64_t cost(Index i, Index c) const { return p_.cost[first_option(i) + c]; }

  int64_t earliest_start(Index i) const {
    int64_t start = 0;
    for (Index e = p_.pred_begin[i]; e < p_.pred_begin[i + 1]; ++e) {
      const Index q = p_.pred[e];
      start = std::max(start, start_[q] + time(q, choice_[q]) + p_.pred_lag[e]);
    }
    return start;
  }

  void update_starts(Index begin, Index end) {
    for (Index i = begin; i < end; ++i) start_[i] = earliest_start(i);
  }

  int64_t latest_end(Index i) const {
    int64_t by = p_.deadline;
    for (Index e = succs_.begin[i]; e < succs_.begin[i + 1]; ++e) {
      const Index j = succs_.other[e];
      by = std::min(by, end_by_[j] - time(j, choice_[j]) - succs_.lag[e]);
    }
    return by;
  }

  void update_ends(Index begin, Index end) {
    for (Index i = end - 1; i >= begin; --i) end_by_[i] = latest_end(i);
  }

  // The slowest option, which is the cheapest, that takes at most `room`; the fastest if none does.
  // Looks from the current choice, which is rarely far.
  Index cheapest_within(Index i, int64_t room) const {
    const int64_t* t = p_.time + first_option(i);
    const Index size = num_options(i);
    Index k = choice_[i];
    while (k + 1 < size && t[k + 1] <= room) ++k;
    while (k > 0 && t[k] > room) --k;
    return k;
  }

  // Takes the best single slow-down within slack until none is left. Returns what it saved.
  // candidates: bits of the window from `begin` on, of all operations that may have slack.
  int64_t fill(Index begin, Index end, uint64_t candidates) {
    int64_t saved = 0;
    for (;;) {
      int64_t best = 0;
      Index best_op = -1, best_choice = -1;
      for (uint64_t left = candidates; left != 0; left &= left - 1) {
        const Index i = begin + lowest(left);
        const Index c = cheapest_within(i, end_by_[i] - start_[i]);
        const int64_t gain = cost(i, choice_[i]) - cost(i, c);
        if (gain > best) {
          best = gain;
          best_op = i;
          best_choice = c;
        }
      }
      if (best_op < 0) return saved;
      choose(best_op, best_choice, begin, end);
      saved += best;
    }
  }

  void fill_all() {
    update_ends(0, n_);
    for (Index begin = 0;; begin += kWindow / 2) {
      const Index end = std::min(n_, begin + kWindow);
      update_starts(begin, end);
      fill(begin, end, ~uint64_t{0} >> (kWindow - (end - begin)));
      undo_.clear();
      if (end == n_) return;
    }
  }

  bool exchange_pass() {
    update_starts(0, n_);
    update_ends(0, n_);
    bool any = false;
    for (Index i = 0; i < n_; ++i) {
      const Index begin = std::max(0, i - kWindow / 2), end = std::min(n_, i + kWindow / 2);
      start_[end - 1] = earliest_start(end - 1);
      any |= exchange_around(i, begin, end);
    }
    return any;
  }

  // Makes operation i faster where what others of its window then save is more.
  bool exchange_around(Index i, Index begin, Index end) {
    const Index before = choice_[i];
    for (Index d = 1; d <= kExchangeDepth && d <= before; ++d) {
      const uint64_t reached = choose(i, before - d, begin, end);
      const bool better = fill(begin, end, reached) > cost(i, before - d) - cost(i, before);
      if (!better) {
        for (auto was = undo_.rbegin(); was != undo_.rend(); ++was) {
          choice_[was->operation] = was->choice;
          start_[was->operation] = was->start;
          end_by_[was->operation] = was->end_by;
        }
      }
      undo_.clear();
      if (better) return true;
    }
    return false;
  }

  // Gives operation i another option; brings starts and latest finishes of its window up to date.
  // Returns the bits of all that these have changed for, i among them.
  uint64_t choose(Index i, Index choice, Index begin, Index end) {
    undo_.push_back({i, choice_[i], start_[i], end_by_[i]});
    choice_[i] = choice;
    const auto bit = [begin](Index j) { return uint64_t{1} << (j - begin); };
    uint64_t reached = bit(i), later = 0, earlier = 0;
    const auto reach_later = [&](Index j) {
      for (Index e = succs_.begin[j]; e < succs_.begin[j + 1]; ++e) {
        if (succs_.other[e] < end) later |= bit(succs_.other[e]);
      }
    };
    const auto reach_earlier = [&](Index j) {
      for (Index e = p_.pred_begin[j]; e < p_.pred_begin[j + 1]; ++e) {
        if (p_.pred[e] >= begin) earlier |= bit(p_.pred[e]);
      }
    };
    for (reach_later(i); later != 0;) {
      const Index j = begin + lowest(later);
      later &= later - 1;
      const int64_t start = earliest_start(j);
      if (start == start_[j]) continue;
      undo_.push_back({j, choice_[j], start_[j], end_by_[j]});
      start_[j] = start;
      reached |= bit(j);
      reach_later(j);
    }
    for (reach_earlier(i); earlier != 0;) {
      const Index j = begin + highest(earlier);
      earlier ^= bit(j);
      const int64_t end_by = latest_end(j);
      if (end_by == end_by_[j]) continue;
      undo_.push_back({j, choice_[j], start_[j], end_by_[j]});
      end_by_[j] = end_by;
      reached |= bit(j);
      reach_earlier(j);
    }
    return reached;
  }

  static Index lowest(uint64_t bits) { return __builtin_ctzll(bits); }
  static Index highest(uint64_t bits) { return kWindow - 1 - __builtin_clzll(bits); }

  // When i's window ends: the first of its successors' starts, with `moved` starting at `at`.
  int64_t window_end(Index i, Index moved, int64_t at) const {
    int64_t end = p_.deadline;
    for (Index e = succs_.begin[i]; e < succs_.begin[i + 1]; ++e) {
      const Index j = succs_.other[e];
      end = std::min(end, (j == moved ? at : start_[j]) - succs_.lag[e]);
    }
    return end;
  }

  // Tries to move one start to where some option of its operation or of a predecessor fits exactly.
  void move_start(Random& random, double temperature, Index* pred_choice) {
    const Index j = random.below(n_);
    const Index first = p_.pred_begin[j], last = p_.pred_begin[j + 1];
    const int64_t end = window_end(j, -1, 0);
    const Index edge = first + random.below(2 * (last - first) + 1);
    const Index shift = random.below(2 * kReach + 1) - kReach;
    const Index fitted = edge < last ? p_.pred[edge] : j;
    const Index option = choice_[fitted] + shift;
    if (option < 0 || option >= num_options(fitted)) return;
    const int64_t to = edge < last ? start_[fitted] + time(fitted, option) + p_.pred_lag[edge]
                                   : end - time(j, option);
    if (to == start_[j] || to < 0 || end - to < time(j, 0)) return;
    for (Index e = first; e < last; ++e) {
      if (to - p_.pred_lag[e] - start_[p_.pred[e]] < time(p_.pred[e], 0)) return;
    }
    const Index own = cheapest_within(j, end - to);
    int64_t change = cost(j, own) - cost(j, choice_[j]);
    for (Index e = first; e < last; ++e) {
      const Index i = p_.pred[e];
      pred_choice[e - first] = cheapest_within(i, window_end(i, j, to) - start_[i]);
      change += cost(i, pred_choice[e - first]) - cost(i, choice_[i]);
    }
    if (change > 0 && static_cast<double>(change) > -temperature * std::log(random.uniform()))
      return;
    start_[j] = to;
    choice_[j] = own;
    for (Index e = first; e < last; ++e) choice_[p_.pred[e]] = pred_choice[e - first];
  }

  const RoundingProblem& p_;
  Index* choice_;
  Index n_;
  Index most_preds_ = 0;
  std::vector<int64_t> start_, end_by_;
  std::vector<Was> undo_;  // what the last exchange has changed, oldest first
  Arcs succs_;
};

void check(const RoundingProblem& p) {
  require(p.num_operations > 0 && p.num_tables > 0, "there is nothing to round");
  require_offsets(p.pred_begin, p.num_operations, p.num_preds,
                  "pred_begin must ascend from 0 and span pred and pred_lag");
  require_offsets(p.option_begin, p.num_tables, p.num_options,
                  "option_begin must ascend from 0 and span time and cost");
  for (Index t = 0; t < p.num_tables; ++t) {
    require(p.option_begin[t] < p.option_begin[t + 1], "a table has no options");
    for (Index k = p.option_begin[t] + 1; k < p.option_begin[t + 1]; ++k) {
      require(p.time[k - 1] <= p.time[k] && p.cost[k - 1] >= p.cost[k],
              "times must ascend and costs descend within a table");
    }
  }
  for (Index i = 0; i < p.num_operations; ++i) {
    require(p.table[i] >= 0 && p.table[i] < p.num_tables, "an operation's table is out of range");
    for (Index e = p.pred_begin[i]; e < p.pred_begin[i + 1]; ++e) {
      require(p.pred[e] >= 0 && p.pred[e] < i, "operations must come after their predecessors");
      require(p.pred_lag[e] >= 0, "a lag is out of range");
    }
  }
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
  const __int128 before = rounding.total();
  const std::vector<Index> best(choice, choice + problem.num_operations);
  rounding.anneal(moves, heat, Random(seed));
  rounding.exchange();
  if (rounding.total() < before) return true;
  std::copy(best.begin(), best.end(), choice);
  return false;
}

}  // namespace envplan
