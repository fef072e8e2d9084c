#include "switching.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <utility>
#include <vector>

#include "random.hpp"

namespace envplan {

namespace {

using std::int32_t;
using std::int64_t;
using std::uint64_t;

constexpr int32_t kReach = 8;         // options by which a move shifts an operation
constexpr int32_t kStretch = 16;      // alike operations that one move shifts together
constexpr int32_t kNeighbours = 48;   // how far apart, in number, a move trades time
constexpr int32_t kLongestRun = 512;  // operations of one clock that a move shifts together
constexpr int64_t kMovesPerTemperature = 256;
constexpr int64_t kAcceptsPerTail = 8;  // moves accepted between two backward passes
constexpr double kCooling = 0.02;       // last temperature over first
constexpr double kPriceGrowth = 16;     // last price of being late over first
constexpr int kDescents = 6;
constexpr int32_t kSettling = 4;  // operations a stage until a move shows whether clocks last

// What an operation meets and leaves behind.
struct Run {
  int64_t start = 0, finish = 0;
  double cost = 0;        // energy less blocking power, fJ
  int32_t come = -1;      // operation whose request was the last to come; -1: none yet
  int32_t asked = -1;     // operation that made the last request; -1: none yet
  int32_t in_force = -1;  // clock
  int32_t wanted = -1;    // clock last asked for
  int64_t asked_at = 0;   // when the last request was made, ns; kept where there is a dwell
  int64_t too_soon = 0;   // ns by which that is too soon after the one before
  bool asks = false;

  bool same(const Run& other) const {
    return start == other.start && finish == other.finish && same_clocks(other);
  }
  bool same_clocks(const Run& other) const {
    return come == other.come && asked == other.asked && in_force == other.in_force &&
           wanted == other.wanted && asks == other.asks && asked_at == other.asked_at;
  }
  bool awaits() const { return come != asked; }
};

struct Change {
  int32_t operation;
  int32_t option;
};

class Search {
 public:
  Search(const SwitchingProblem& p, int32_t* choice)
      : p_(p),
        choice_(choice),
        n_(p.num_operations),
        runs_(n_),
        dirty_(n_, 0),
        tail_(n_, 0),
        before_(n_, -1),
        after_(n_, -1),
        initial_(p.num_stages, -1),
        members_(p.num_stages) {
    for (int32_t s = 0; s < p.num_stages; ++s) total_power_ += p.blocking_power[s];
    for (int32_t i = 0; i < n_; ++i) {
      auto& members = members_[p.stage[i]];
      if (!members.empty()) {
        before_[i] = members.back();
        after_[members.back()] = i;
      }
      members.push_back(i);
    }
    const int32_t edges = p.pred_begin[n_];
    succ_begin_.assign(n_ + 1, 0);
    succ_.resize(edges);
    succ_lag_.resize(edges);
    for (int32_t e = 0; e < edges; ++e) ++succ_begin_[p.pred[e] + 1];
    for (int32_t i = 0; i < n_; ++i) succ_begin_[i + 1] += succ_begin_[i];
    std::vector<int32_t> fill(succ_begin_.begin(), succ_begin_.end() - 1);
    for (int32_t j = 0; j < n_; ++j) {
      for (int32_t e = p.pred_begin[j]; e < p.pred_begin[j + 1]; ++e) {
        const int32_t slot = fill[p.pred[e]]++;
        succ_[slot] = j;
        succ_lag_[slot] = p.pred_lag[e];
      }
    }
    for (int32_t i = 0; i < n_; ++i) {
      if (succ_begin_[i] == succ_begin_[i + 1]) last_.push_back(i);
      if (num_options(i) > 1) movable_.push_back(i);
    }
  }

  // Replays everything anew.
  void replay() {
    cost_ = 0;
    shortage_ = 0;
    for (int32_t s = 0; s < p_.num_stages; ++s) initial_[s] = clock_left(s);
    for (int32_t i = 0; i < n_; ++i) {
      runs_[i] = run(i);
      cost_ += runs_[i].cost;
      shortage_ += runs_[i].too_soon;
    }
    measure();
  }

  SwitchingReplay result() const { return {makespan_, energy(), too_soon_}; }
  int64_t start(int32_t i) const { return runs_[i].start; }

  // Takes the best value for each group of operations in turn, until none gets better.
  void choose_constant(bool by_table) {
    pick_pace();
    descend(false);
    if (by_table) descend(true);
  }

  bool improve(int64_t moves, double heat, Random random) {
    replay();
    best_.assign(choice_, choice_ + n_);
    best_result_ = result();
    changed_ = false;
    if (!movable_.empty()) anneal(moves, heat, random);
    std::copy(best_.begin(), best_.end(), choice_);
    return changed_;
  }

 private:
  int32_t first_option(int32_t i) const { return p_.option_begin[p_.table[i]]; }
  int32_t num_options(int32_t i) const {
    return p_.option_begin[p_.table[i] + 1] - first_option(i);
  }
  int32_t option(int32_t i) const { return first_option(i) + choice_[i]; }
  int32_t clock(int32_t i) const { return p_.clock[option(i)]; }
  double energy() const { return cost_ + total_power_ * static_cast<double>(makespan_); }
  double objective() const {
    const int64_t late = std::max<int64_t>(0, makespan_ - p_.deadline);
    return energy() + price_ * static_cast<double>(late + too_soon_);
  }

  // The clock that a stage's last request leaves.
  int32_t clock_left(int32_t s) const {
    const auto& members = members_[s];
    for (auto i = members.rbegin(); i != members.rend(); ++i) {
      if (clock(*i) >= 0) return clock(*i);
    }
    return -1;
  }

  int32_t next_request(int32_t s, int32_t come) const {
    int32_t i = come < 0 ? members_[s].front() : after_[come];
    while (!runs_[i].asks) i = after_[i];
    return i;
  }

  // Operation i after its predecessors and all before it on its stage.
  Run run(int32_t i) {
    Run now;
    for (int32_t e = p_.pred_begin[i]; e < p_.pred_begin[i + 1]; ++e) {
      now.start = std::max(now.start, runs_[p_.pred[e]].finish + p_.pred_lag[e]);
    }
    const int32_t s = p_.stage[i], previous = before_[i];
    if (previous >= 0) {
      const Run& left = runs_[previous];
      now.come = left.come;
      now.asked = left.asked;
      now.in_force = left.in_force;
      now.wanted = left.wanted;
      now.asked_at = left.asked_at;
    } else {
      now.in_force = now.wanted = initial_[s];
    }
    const int32_t planned = option(i), mhz = p_.clock[planned];
    const double waiting = p_.blocking_power[s];
    if (mhz < 0) {
      now.finish = now.start + p_.time[planned];
      now.cost = p_.energy[planned] - waiting * static_cast<double>(p_.time[planned]);
      return now;
    }
    if (mhz != now.wanted) {
      if (p_.dwell > 0) {
        if (now.asked >= 0) {
          now.too_soon = std::max<int64_t>(0, p_.dwell - (now.start - now.asked_at));
        }
        now.asked_at = now.start;
      }
      now.asks = true;
      now.asked = i;
      now.wanted = mhz;
    }
    runs_[i].asks = now.asks;  // next_request looks there
    runs_[i].start = now.start;
    int64_t at = now.start;
    long double left = 1;
    int64_t first_spent = 0, first_time = 0;  // of the part before the only change so far
    for (;;) {
      int64_t until = std::numeric_limits<int64_t>::max();
      while (now.awaits()) {
        const int32_t next = next_request(s, now.come);
        until = runs_[next].start + p_.latency;
        if (until > at) break;
        now.come = next;
        now.in_force = clock(next);
        until = std::numeric_limits<int64_t>::max();
      }
      const int32_t row =
          now.in_force == mhz
              ? planned
              : p_.nearest[static_cast<int64_t>(planned) * p_.num_clocks + now.in_force];
      const int64_t time = p_.time[row];
      const int64_t needed = remaining(left, first_spent, first_time, time);
      const int64_t spent = until - at < needed ? until - at : needed;
      now.cost +=
          (p_.energy[row] / static_cast<double>(time) - waiting) * static_cast<double>(spent);
      at += spent;
      if (spent == needed) break;
      if (left == 1) {
        first_spent = spent;
        first_time = time;
      } else {
        first_time = 0;
      }
      left -= static_cast<long double>(spent) / static_cast<long double>(time);
    }
    now.finish = at;
    return now;
  }

  // ns that what is left of an operation takes at `time` for the whole; exact up to one change.
  static int64_t remaining(long double left, int64_t spent, int64_t whole, int64_t time) {
    if (left == 1) return time;
    if (whole > 0) {
      if (whole < (int64_t{1} << 31) && time < (int64_t{1} << 31)) {
        return ((whole - spent) * time + whole - 1) / whole;
      }
      const __int128 work = static_cast<__int128>(whole - spent) * time;
      return static_cast<int64_t>((work + whole - 1) / whole);
    }
    const long double exact = left * static_cast<long double>(time);
    return std::max<int64_t>(1, static_cast<int64_t>(std::ceil(exact - 1e-9L)));
  }

  void measure() {
    makespan_ = 0;
    for (const int32_t i : last_) makespan_ = std::max(makespan_, runs_[i].finish);
    too_soon_ = p_.dwell > 0 ? shortage_ + shortage_around() : 0;
  }

  // What is missing between each stage's last request and its first of the next iteration.
  int64_t shortage_around() const {
    int64_t sum = 0;
    for (const auto& members : members_) {
      const Run& last = runs_[members.back()];
      if (last.asked < 0) continue;
      const int64_t first = runs_[*std::find_if(members.begin(), members.end(), [this](int32_t i) {
                              return runs_[i].asks;
                            })].start;
      sum += std::max<int64_t>(0, p_.dwell - (makespan_ + first - last.asked_at));
    }
    return sum;
  }

  void touch(int32_t i) {
    if (dirty_[i]) return;
    dirty_[i] = 1;
    ++num_dirty_;
  }

  // Makes the changes and replays what they reach. Gives up, without measuring, once it is clear
  // that the objective grows by more than `most`; returns whether it did not.
  bool apply(double most) {
    undo_.clear();
    undone_.clear();
    int32_t from = n_, settled = 0;
    const double cost_before = cost_;
    const int64_t shortage_before = shortage_;
    for (const Change& change : changes_) {
      undone_.push_back({change.operation, choice_[change.operation]});
      choice_[change.operation] = change.option;
      touch(change.operation);
      if (after_[change.operation] >= 0) touch(after_[change.operation]);
      from = std::min(from, change.operation);
      settled = std::max(settled, change.operation + kSettling * p_.num_stages);
    }
    initial_undo_.clear();
    for (const Change& change : changes_) {
      const int32_t s = p_.stage[change.operation], left = clock_left(s);
      if (left == initial_[s]) continue;
      initial_undo_.push_back({s, initial_[s]});
      initial_[s] = left;
      touch(members_[s].front());
      from = std::min(from, members_[s].front());
    }
    const int64_t makespan_before = makespan_;
    const int64_t free = std::max(makespan_before, p_.deadline);
    for (int32_t i = from; num_dirty_ > 0; ++i) {
      if (!dirty_[i]) continue;
      dirty_[i] = 0;
      --num_dirty_;
      const Run old = runs_[i];
      const Run now = run(i);
      runs_[i] = now;
      if (now.same(old) && now.cost == old.cost && now.too_soon == old.too_soon) {
        if (now.awaits() && after_[i] >= 0) touch(after_[i]);
        continue;
      }
      undo_.push_back({i, old});
      cost_ += now.cost - old.cost;
      shortage_ += now.too_soon - old.too_soon;
      if (now.finish != old.finish) {
        for (int32_t e = succ_begin_[i]; e < succ_begin_[i + 1]; ++e) touch(succ_[e]);
      }
      if (after_[i] >= 0 && (now.awaits() || old.awaits() || !now.same_clocks(old))) {
        touch(after_[i]);
      }
      const int64_t late = std::max<int64_t>(0, now.finish + tail_[i] - free);
      const int64_t short_now = i > settled ? shortage_ - shortage_before : 0;
      if ((late > 0 || short_now > 0) &&
          cost_ - cost_before + (total_power_ + price_) * static_cast<double>(late) +
                  price_ * static_cast<double>(short_now) >
              most) {
        for (; num_dirty_ > 0; ++i) {
          num_dirty_ -= dirty_[i];
          dirty_[i] = 0;
        }
        return false;
      }
    }
    measure();
    return true;
  }

  // Back to before the last apply.
  void revert(const SwitchingReplay& before, double cost, int64_t shortage) {
    for (auto u = undo_.rbegin(); u != undo_.rend(); ++u) runs_[u->first] = u->second;
    for (auto c = undone_.rbegin(); c != undone_.rend(); ++c) choice_[c->operation] = c->option;
    for (auto c = initial_undo_.rbegin(); c != initial_undo_.rend(); ++c) {
      initial_[c->operation] = c->option;
    }
    makespan_ = before.makespan;
    too_soon_ = before.too_soon;
    cost_ = cost;
    shortage_ = shortage;
  }

  // Applies changes_ if the objective grows by no more than `most`.
  bool attempt(double most) {
    const SwitchingReplay before = result();
    const double value = objective(), cost = cost_;
    const int64_t shortage = shortage_;
    if (apply(most) && objective() - value <= most) return true;
    revert(before, cost, shortage);
    return false;
  }

  void update_tails() {
    for (int32_t i = n_ - 1; i >= 0; --i) {
      int64_t tail = 0;
      for (int32_t e = succ_begin_[i]; e < succ_begin_[i + 1]; ++e) {
        const int32_t j = succ_[e];
        tail = std::max(tail, succ_lag_[e] + runs_[j].finish - runs_[j].start + tail_[j]);
      }
      tail_[i] = tail;
    }
  }

  // Lexicographic: how late and too soon, then energy.
  static bool better(const SwitchingReplay& a, const SwitchingReplay& b, int64_t deadline) {
    const int64_t bad_a = std::max<int64_t>(0, a.makespan - deadline) + a.too_soon;
    const int64_t bad_b = std::max<int64_t>(0, b.makespan - deadline) + b.too_soon;
    return bad_a != bad_b ? bad_a < bad_b : a.energy < b.energy;
  }

  void anneal(int64_t moves, double heat, Random random) {
    double step = 0;
    for (const int32_t i : movable_) step += mean_step(i);
    double temperature = heat * step / static_cast<double>(movable_.size());
    const double blocks = static_cast<double>(std::max<int64_t>(1, moves / kMovesPerTemperature));
    const double decay = std::pow(kCooling, 1 / blocks),
                 growth = std::pow(kPriceGrowth, 1 / blocks);
    price_ = heat > 0 ? p_.late_price : p_.late_price * kPriceGrowth;
    update_tails();
    int64_t accepted = 0;
    for (int64_t m = 1; m <= moves; ++m) {
      if (m % kMovesPerTemperature == 0 && heat > 0) {
        temperature *= decay;
        price_ *= growth;
        resum();
        update_tails();
      }
      propose(random);
      const int64_t makespan_before = makespan_;
      if (changes_.empty() || !attempt(-temperature * std::log(random.uniform()))) continue;
      // Tails that are too long hide good moves.
      if (++accepted % kAcceptsPerTail == 0 || makespan_ < makespan_before) update_tails();
      const SwitchingReplay now = result();
      if (better(now, best_result_, p_.deadline)) {
        best_result_ = now;
        std::copy(choice_, choice_ + n_, best_.begin());
        changed_ = true;
      }
    }
  }

  // Sums of floats drift; begin them anew.
  void resum() {
    cost_ = 0;
    for (const Run& r : runs_) cost_ += r.cost;
  }

  double cost_of(int32_t i, int32_t o) const {
    return p_.energy[o] - p_.blocking_power[p_.stage[i]] * static_cast<double>(p_.time[o]);
  }

  double mean_step(int32_t i) const {
    const int32_t first = first_option(i), count = num_options(i);
    return std::abs(cost_of(i, first + count - 1) - cost_of(i, first)) / (count - 1);
  }

  // The option of j, with its config, that stands for a clock.
  int32_t at_clock(int32_t j, int32_t mhz) const {
    const int64_t row = option(j);
    if (p_.clock[row] < 0) return choice_[j];
    return p_.nearest[row * p_.num_clocks + mhz] - first_option(j);
  }

  void change(int32_t i, int32_t to) {
    if (to != choice_[i]) changes_.push_back({i, to});
  }

  // A neighbouring option of i, not its own.
  int32_t shifted(int32_t i, Random& random) const {
    const int32_t count = num_options(i);
    int32_t by = 1 + random.below(kReach);
    if (random.below(2)) by = -by;
    return std::clamp(choice_[i] + by, 0, count - 1);
  }

  void propose(Random& random) {
    changes_.clear();
    const int32_t i = movable_[random.below(static_cast<int32_t>(movable_.size()))];
    switch (random.below(8)) {
      case 0:
      case 1:
        return change(i, shifted(i, random));
      case 2:
        return propose_neighbours_clock(i, random);
      case 3:
      case 4:
        return propose_run(i, random);
      case 5:
        return propose_stretch(i, random);
      default:
        return propose_trade(i, random);
    }
  }

  // i takes the clock of the operation before or after it.
  void propose_neighbours_clock(int32_t i, Random& random) {
    const int32_t other = random.below(2) ? before_[i] : after_[i];
    if (other >= 0 && clock(other) >= 0) change(i, at_clock(i, clock(other)));
  }

  // All of one clock around i go to another, which may be that of the run before or after.
  void propose_run(int32_t i, Random& random) {
    const int32_t mhz = clock(i);
    if (mhz < 0) return;
    int32_t first = i, last = i;
    for (int32_t k = 0; k < kLongestRun && before_[first] >= 0 && clock(before_[first]) == mhz;
         ++k) {
      first = before_[first];
    }
    for (int32_t k = 0; k < kLongestRun && after_[last] >= 0 && clock(after_[last]) == mhz; ++k) {
      last = after_[last];
    }
    int32_t to = p_.clock[first_option(i) + shifted(i, random)];
    const int32_t way = random.below(3), edge = way == 1 ? before_[first] : after_[last];
    if (way > 0 && edge >= 0) to = clock(edge);
    if (to < 0) return;
    for (int32_t j = first;; j = after_[j]) {
      change(j, at_clock(j, to));
      if (j == last) return;
    }
  }

  // i and the next operations of its table take one option.
  void propose_stretch(int32_t i, Random& random) {
    const int32_t to = random.below(2) ? shifted(i, random) : choice_[i];
    int32_t count = 1 + random.below(kStretch);
    for (int32_t j = i; j >= 0 && count > 0; j = after_[j]) {
      if (p_.table[j] != p_.table[i]) continue;
      change(j, to);
      --count;
    }
  }

  // i gets slower and one near it faster, or the other way round.
  void propose_trade(int32_t i, Random& random) {
    const int32_t j = i + 1 + random.below(kNeighbours);
    if (j >= n_) return;
    const int32_t by = 1 + random.below(kReach / 2), sign = random.below(2) ? 1 : -1;
    const int32_t one = choice_[i] + sign * by;
    const int32_t other = choice_[j] - sign * (1 + random.below(kReach / 2));
    if (one < 0 || one >= num_options(i) || other < 0 || other >= num_options(j)) return;
    change(i, one);
    change(j, other);
  }

  // The option of a table nearest to a clock; of several the fastest.
  int32_t option_at(int32_t table, int32_t mhz) const {
    int32_t best = p_.option_begin[table];
    for (int32_t o = p_.option_begin[table]; o < p_.option_begin[table + 1]; ++o) {
      const int32_t there = std::abs(p_.clock[o] - mhz), here = std::abs(p_.clock[best] - mhz);
      if (there < here || (there == here && p_.time[o] < p_.time[best])) best = o;
    }
    return best;
  }

  void set_clock(int32_t s, int32_t mhz, const std::vector<int32_t>& at) {
    for (const int32_t i : members_[s]) {
      choice_[i] = at[static_cast<int64_t>(p_.table[i]) * p_.num_clocks + mhz] - first_option(i);
    }
  }

  std::vector<int32_t> options_at() const {
    std::vector<int32_t> at(static_cast<int64_t>(p_.num_tables) * p_.num_clocks);
    for (int32_t t = 0; t < p_.num_tables; ++t) {
      for (int32_t k = 0; k < p_.num_clocks; ++k) at[t * p_.num_clocks + k] = option_at(t, k);
    }
    return at;
  }

  // All stages in step: for each pace every stage's clock of least energy that keeps up with it.
  void pick_pace() {
    const std::vector<int32_t> at = options_at();
    std::vector<std::vector<int64_t>> work(p_.num_stages);
    std::vector<int64_t> paces;
    for (int32_t s = 0; s < p_.num_stages; ++s) {
      for (int32_t k = 0; k < p_.num_clocks; ++k) {
        int64_t sum = 0;
        for (const int32_t i : members_[s]) {
          sum += p_.time[at[static_cast<int64_t>(p_.table[i]) * p_.num_clocks + k]];
        }
        work[s].push_back(sum);
        paces.push_back(sum);
      }
    }
    std::sort(paces.begin(), paces.end());
    paces.erase(std::unique(paces.begin(), paces.end()), paces.end());
    const size_t step = std::max<size_t>(1, paces.size() / 256);
    std::vector<int32_t> best;
    SwitchingReplay least{std::numeric_limits<int64_t>::max() / 2, 0, 0};
    for (size_t q = 0; q < paces.size(); q += step) {
      for (int32_t s = 0; s < p_.num_stages; ++s) {
        int32_t k = 0;
        while (k + 1 < p_.num_clocks && work[s][k] > paces[q]) ++k;
        if (work[s][k] > paces[q]) {
          k = static_cast<int32_t>(std::min_element(work[s].begin(), work[s].end()) -
                                   work[s].begin());
        }
        set_clock(s, k, at);
      }
      keep_if_better(best, least);
    }
    std::copy(best.begin(), best.end(), choice_);
    replay();
  }

  bool keep_if_better(std::vector<int32_t>& best, SwitchingReplay& least) {
    replay();
    if (!better(result(), least, p_.deadline)) return false;
    least = result();
    best.assign(choice_, choice_ + n_);
    return true;
  }

  void descend(bool by_table) {
    const std::vector<int32_t> at = options_at();
    std::vector<int32_t> best(choice_, choice_ + n_);
    SwitchingReplay least = result();
    for (int pass = 0; pass < kDescents; ++pass) {
      bool any = false;
      for (int32_t s = 0; s < p_.num_stages; ++s) {
        any |= by_table ? descend_tables(s, best, least) : descend_stage(s, at, best, least);
      }
      if (!any) break;
    }
  }

  bool descend_stage(int32_t s, const std::vector<int32_t>& at, std::vector<int32_t>& best,
                     SwitchingReplay& least) {
    bool any = false;
    for (int32_t k = 0; k < p_.num_clocks; ++k) {
      set_clock(s, k, at);
      any |= keep_if_better(best, least);
    }
    std::copy(best.begin(), best.end(), choice_);
    replay();
    return any;
  }

  bool descend_tables(int32_t s, std::vector<int32_t>& best, SwitchingReplay& least) {
    std::vector<int32_t> tables;
    for (const int32_t i : members_[s]) tables.push_back(p_.table[i]);
    std::sort(tables.begin(), tables.end());
    tables.erase(std::unique(tables.begin(), tables.end()), tables.end());
    bool any = false;
    for (const int32_t t : tables) {
      for (int32_t o = 0; o < p_.option_begin[t + 1] - p_.option_begin[t]; ++o) {
        for (const int32_t i : members_[s]) {
          if (p_.table[i] == t) choice_[i] = o;
        }
        any |= keep_if_better(best, least);
      }
      std::copy(best.begin(), best.end(), choice_);
    }
    replay();
    return any;
  }

  const SwitchingProblem& p_;
  int32_t* choice_;
  int32_t n_;
  std::vector<Run> runs_;
  std::vector<unsigned char> dirty_;
  std::vector<int64_t> tail_;                  // longest way from an operation's finish to the end
  std::vector<int32_t> before_, after_;        // neighbours on the stage, -1 where none
  std::vector<int32_t> initial_;               // clock that each stage begins with
  std::vector<std::vector<int32_t>> members_;  // operations of each stage
  std::vector<int32_t> succ_begin_, succ_, last_, movable_;
  std::vector<int64_t> succ_lag_;
  std::vector<Change> changes_, undone_, initial_undo_;
  std::vector<std::pair<int32_t, Run>> undo_;
  int32_t num_dirty_ = 0;
  double total_power_ = 0, cost_ = 0, price_ = 0;
  int64_t makespan_ = 0, too_soon_ = 0;
  int64_t shortage_ = 0;  // the part of too_soon_ that lies within the iteration
  std::vector<int32_t> best_;
  SwitchingReplay best_result_{};
  bool changed_ = false;
};

}  // namespace

SwitchingReplay replay_switching(const SwitchingProblem& problem, const int32_t* choice,
                                 int64_t* start) {
  std::vector<int32_t> copy(choice, choice + problem.num_operations);
  Search search(problem, copy.data());
  search.replay();
  if (start != nullptr) {
    for (int32_t i = 0; i < problem.num_operations; ++i) start[i] = search.start(i);
  }
  return search.result();
}

void choose_constant(const SwitchingProblem& problem, bool by_table, int32_t* choice) {
  std::fill(choice, choice + problem.num_operations, 0);
  Search(problem, choice).choose_constant(by_table);
}

bool improve_switching(const SwitchingProblem& problem, int64_t moves, double heat, uint64_t seed,
                       int32_t* choice) {
  return Search(problem, choice).improve(moves, heat, Random(seed));
}

}  // namespace envplan
