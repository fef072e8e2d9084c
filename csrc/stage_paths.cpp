#include "stage_paths.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

namespace envplan {

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kRounding = 1e-15;

// A place that a segment was left at: where it began, and its clock.
struct Source {
  Index start = kNone, clock = kNone;
};

struct Leaving {
  double cost = kInf;
  Source source;

  void offer(double other_cost, Source other) {
    if (other_cost < cost) *this = {other_cost, other};
  }
};

// Segments that began at one operation, by clock.
struct Segment {
  Index start;
  double least_wait_price;
  std::vector<double> cost, length;
};

class StageWalk {
 public:
  StageWalk(const Problem& problem, Index stage, const StagePrices& prices)
      : p_(problem), prices_(prices), clocks_(problem.num_clocks) {
    waiting_ = static_cast<double>(p_.waiting[stage]);
    for (Index i = p_.stage_begin[stage]; i < p_.stage_begin[stage + 1]; ++i) {
      operations_.push_back(p_.number_of[i]);
    }
    size_ = static_cast<Index>(operations_.size());
    measure_operations();
  }

  StagePath run() {
    StagePath path;
    if (size_ == 0) return {0.0, {}};
    mature_.assign(std::max<Index>(1, clocks_), Leaving{0.0, {}});
    for (Index a = 0; a < clocks_; ++a) mature_[a].source = {kNone, a};
    sources_.assign(static_cast<std::size_t>(size_) * clocks_, Source{});
    for (Index k = 0; k < size_; ++k) step(k);
    Leaving best;
    for (const Leaving& at : mature_) best.offer(at.cost, at.source);
    for (const Segment& segment : young_) {
      for (Index a = 0; a < clocks_; ++a) best.offer(segment.cost[a], {segment.start, a});
    }
    path.bound = best.cost - margin_;
    path.rows = rows_of(best.source);
    return path;
  }

 private:
  double time(Index row) const { return static_cast<double>(p_.rows[row].time); }
  double cost(Index k, Index row) const {
    return static_cast<double>(p_.rows[row].energy) +
           (prices_.time_price[k] - waiting_) * time(row);
  }
  double lag(Index k) const {  // between operation k and the one before it
    if (k == 0) return 0;
    const Index before = operations_[k - 1];
    for (Index e = p_.succs.begin[before]; e < p_.succs.begin[before + 1]; ++e) {
      if (p_.succs.other[e] == operations_[k]) return static_cast<double>(p_.succs.lag[e]);
    }
    return 0;
  }

  void measure_operations() {
    const std::size_t cells = static_cast<std::size_t>(size_) * std::max<Index>(1, clocks_);
    pure_.assign(cells, kInf);
    asking_.assign(cells, kInf);
    pure_row_.assign(cells, kNone);
    longest_.assign(cells, 0);
    double magnitude = 0;
    for (Index k = 0; k < size_; ++k) {
      require(prices_.time_price[k] >= 0 && prices_.wait_price[k] >= 0, "a price is negative");
      double least = kInf, shortest = kInf, slowest = 0, most = 0;
      const Problem::Operation& op = p_.operations[operations_[k]];
      for (Index r = op.first_row; r < op.end_row; ++r) {
        const Index clock = p_.rows[r].clock;
        require(p_.rows[r].leaves == clock && p_.steady(r), "a row changes clocks within itself");
        const double c = cost(k, r);
        if (c < least) least = c, least_row_.resize(k + 1, kNone), least_row_[k] = r;
        shortest = std::min(shortest, time(r));
        slowest = std::max(slowest, time(r));
        most = std::max(most, static_cast<double>(p_.rows[r].energy) +
                                  (prices_.time_price[k] + waiting_) * time(r));
        for (Index a = 0; a < clocks_; ++a) {
          if (clock != kNone && clock != a) continue;
          const std::size_t cell = at(k, a);
          if (c < pure_[cell]) pure_[cell] = c, pure_row_[cell] = r;
          if (clock == a) asking_[cell] = std::min(asking_[cell], c);
          longest_[cell] = std::max(longest_[cell], time(r));
        }
      }
      least_.push_back(least);
      shortest_.push_back(shortest);
      slowest_.push_back(slowest);
      magnitude += most + prices_.change +
                   prices_.wait_price[k] * static_cast<double>(prices_.latency + prices_.min_dwell);
    }
    margin_ = size_ * (waiting_ + 2) + magnitude * size_ * kRounding;
    measure_lateness();
  }

  void measure_lateness() {
    const auto latency = static_cast<double>(prices_.latency);
    for (Index k = 0; k < size_; ++k) {
      const double hidden = prices_.asks_ahead && k > 0 ? shortest_[k - 1] + lag(k) : 0;
      latest_.push_back(std::max(0.0, latency - hidden));
      double left = latest_[k];
      Index last = k;
      while (last < size_ && left > shortest_[last]) {
        left -= shortest_[last];
        if (++last < size_) left -= lag(last);
      }
      reaches_.push_back(last);  // the last operation that a request for k may be late for
    }
  }

  std::size_t at(Index k, Index a) const { return static_cast<std::size_t>(k) * clocks_ + a; }

  // Ways to leave segments at operation k.
  struct Ways {
    Leaving on_time;                              // the clock is there as k starts
    Leaving unknown;                              // another request may be under way
    std::vector<Leaving> late, late_after_first;  // by clock before k
    std::vector<double> by, by_after_first;       // how late, ns
  };

  void leave(Index k, Ways* ways, double cost, Source source, double shortage, double least_price,
             double time_before, bool is_first) const {
    if (!(cost < kInf)) return;
    if (shortage > 0) cost += shortage * least_price;
    const auto latency = static_cast<double>(prices_.latency);
    const double late =
        prices_.asks_ahead ? std::max(0.0, latency - time_before - lag(k)) : latency;
    if (late == 0 || prices_.asks_ahead) {
      const double price = prices_.wait_price[k] - (shortage > 0 ? least_price : 0.0);
      ways->on_time.offer(cost + std::max(0.0, price) * late, source);
      if (late == 0) return;
    }
    auto& list = is_first ? ways->late_after_first : ways->late;
    auto& by = is_first ? ways->by_after_first : ways->by;
    if (list.empty()) list.resize(clocks_), by.resize(clocks_);
    list[source.clock].offer(cost, source);
    by[source.clock] = late;
  }

  Ways ways_to_leave(Index k) const {
    Ways ways;
    const double held =
        static_cast<double>(prices_.min_dwell) - (prices_.asks_ahead ? latest_[k] : 0.0);
    for (Index a = 0; a < clocks_; ++a) {
      const double before = k > 0 ? longest_[at(k - 1, a)] : 0;
      Leaving from = mature_[a];
      from.source.clock = a;
      leave(k, &ways, from.cost, from.source, 0, 0, before, false);
    }
    for (const Segment& s : young_) {
      const double least_price = std::min(s.least_wait_price, prices_.wait_price[k]);
      for (Index a = 0; a < clocks_; ++a) {
        const double shortage = std::max(0.0, held - s.length[a]);
        if (reaches_[s.start] >= k) {
          ways.unknown.offer(s.cost[a] + shortage * least_price, {s.start, a});
          continue;
        }
        const bool is_first = s.start == k - 1;
        const double before = is_first ? s.length[a] : longest_[at(k - 1, a)];
        leave(k, &ways, s.cost[a], {s.start, a}, shortage, least_price, before, is_first);
      }
    }
    return ways;
  }

  void enter_late(Index k, const std::vector<Leaving>& list, const std::vector<double>& by,
                  Segment* segment) {
    if (list.empty()) return;
    const Problem::Operation& op = p_.operations[operations_[k]];
    for (Index r = op.first_row; r < op.end_row; ++r) {
      const Index b = p_.rows[r].clock;
      if (b == kNone) continue;
      const double own = cost(k, r);
      for (Index a = 0; a < clocks_; ++a) {
        if (!(list[a].cost < kInf) || a == b) continue;
        const Index other = p_.row_at(r, a);
        const double share = std::min(1.0, by[a] / time(other));
        enter(k, b, list[a].cost + share * cost(k, other) + (1 - share) * own, list[a].source,
              segment);
      }
    }
  }

  void enter(Index k, Index b, double cost, Source source, Segment* segment) {
    cost += prices_.change;
    if (cost >= segment->cost[b]) return;
    segment->cost[b] = cost;
    sources_[at(k, b)] = source;
  }

  void step(Index k) {
    const Ways ways = ways_to_leave(k);
    Segment entered{k, kInf, std::vector<double>(clocks_, kInf), std::vector<double>(clocks_, 0)};
    enter_late(k, ways.late, ways.by, &entered);
    enter_late(k, ways.late_after_first, ways.by_after_first, &entered);
    for (Index b = 0; b < clocks_; ++b) {
      const double own = asking_[at(k, b)];
      if (!(own < kInf)) continue;
      enter(k, b, ways.on_time.cost + own, ways.on_time.source, &entered);
      enter(k, b, ways.unknown.cost + least_[k], ways.unknown.source, &entered);
      const double late = std::min(latest_[k], slowest_[k]);
      const double own_time = longest_[at(k, b)];
      const double longer = late > 0 ? late * (1 - own_time / slowest_[k]) + 1 : 0;
      entered.length[b] = reaches_[k] > k ? slowest_[k] + 1 : own_time + longer;
    }
    advance(k);
    young_.push_back(std::move(entered));
    if (clocks_ > 0) settle(k);
  }

  // Operation k at the clock of each segment.
  void advance(Index k) {
    for (Index a = 0; a < std::max<Index>(1, clocks_); ++a) {
      mature_[a].cost += clocks_ > 0 ? pure_[at(k, a)] : least_[k];
    }
    for (Segment& s : young_) {
      const bool may_be_late = reaches_[s.start] >= k;
      s.least_wait_price = std::min(s.least_wait_price, prices_.wait_price[k]);
      for (Index a = 0; a < clocks_; ++a) {
        const bool has_row = pure_[at(k, a)] < kInf;
        s.cost[a] += may_be_late && has_row ? least_[k] : pure_[at(k, a)];
        s.length[a] += (may_be_late ? slowest_[k] + 1 : longest_[at(k, a)]) + lag(k);
      }
    }
  }

  // Segments that are long enough whatever comes need not be told apart any more.
  void settle(Index k) {
    const auto held = static_cast<double>(prices_.min_dwell);
    for (Segment& s : young_) {
      if (s.start == k || reaches_[s.start] > k) continue;
      for (Index a = 0; a < clocks_; ++a) {
        if (s.length[a] < held) continue;
        mature_[a].offer(s.cost[a], {s.start, a});
        s.cost[a] = kInf;
      }
    }
    const auto is_over = [](const Segment& s) {
      return std::all_of(s.cost.begin(), s.cost.end(), [](double c) { return c == kInf; });
    };
    young_.erase(std::remove_if(young_.begin(), young_.end(), is_over), young_.end());
  }

  std::vector<Index> rows_of(Source source) const {
    std::vector<Index> rows(size_);
    for (Index k = size_ - 1; k >= 0; --k) {
      rows[k] = source.clock == kNone ? least_row_[k] : pure_row_[at(k, source.clock)];
      if (source.start == k) source = sources_[at(k, source.clock)];
    }
    return rows;
  }

  const Problem& p_;
  const StagePrices& prices_;
  const Index clocks_;
  Index size_ = 0;
  double waiting_ = 0, margin_ = 0;
  std::vector<Index> operations_, pure_row_, least_row_, reaches_;
  std::vector<double> pure_, asking_, longest_;  // (operations, clocks)
  std::vector<double> least_, shortest_, slowest_, latest_;
  std::vector<Leaving> mature_;  // by clock
  std::vector<Segment> young_;
  std::vector<Source> sources_;  // (operations, clocks) where each segment came from
};

}  // namespace

StagePath cheapest_stage_path(const Problem& problem, Index stage, const StagePrices& prices) {
  require(stage >= 0 && stage < problem.num_stages, "there is no such stage");
  return StageWalk(problem, stage, prices).run();
}

}  // namespace envplan
