#include "stage_paths.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace envplan {

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kRounding = 1e-15;

// The cheapest way to the end of a segment, and what is waited there to leave it.
struct Leaving {
  double cost = kInf;
  Index start =
      kNone;  // the segment's first operation; kNone: it goes back to the stage's beginning
  Index clock = kNone;  // the segment's
  double fill = 0;      // ns that it waits to be held for long enough,
  Index fill_at = 0;    // before this operation, where that is cheapest
  double wait = 0;      // ns before the operation that follows it, so that no clock is late

  void offer(const Leaving& other) {
    if (other.cost < cost) *this = other;
  }
};

// How the cheapest way begins a segment: the first operation's time and cost are those of `row`,
// but for a share at `late_row`, the same at the clock before.
struct Entry {
  Leaving from;
  Index row = kNone, late_row = kNone;
  double late_share = 0;
};

// Segments under way that began at one operation, by clock. `length` bounds theirs from above.
struct Segments {
  Index start;
  double least_wait_price;  // of the operations after the first
  Index least_wait_at;
  std::vector<double> cost, length;
  double detour = -kInf;  // by how much they cost more than those of free paths, at least
};

// How paths begin and end: with a request for the first clock, which is held, as the last one is;
// or without one. Then the first clock and the last one are `clock`, or any where that is kNone.
struct Ends {
  enum Kind { kHeld, kFree } kind;
  Index clock;
};

class StageWalk {
 public:
  StageWalk(const Problem& problem, Index stage, const StagePrices& prices)
      : p_(problem), prices_(prices), num_clocks_(problem.num_clocks) {
    waiting_ = static_cast<double>(p_.waiting[stage]);
    for (Index i = p_.stage_begin[stage]; i < p_.stage_begin[stage + 1]; ++i) {
      operations_.push_back(p_.number_of[i]);
    }
    size_ = static_cast<Index>(operations_.size());
    measure_operations();
    measure_lateness();
  }

  StagePath run() {
    if (size_ == 0) return {};
    const Ends any{Ends::kFree, kNone};
    if (num_clocks_ == 0 || prices_.min_dwell == 0) return path_to(walk(any));
    // Paths that begin and end with any clock, the free ones, bound all others from below.
    notes_free_ = true;
    walk(any);
    notes_free_ = false;
    std::vector<std::pair<double, Index>> by_last;
    for (Index a = 0; a < num_clocks_; ++a) by_last.emplace_back(last_at(a).cost, a);
    std::sort(by_last.begin(), by_last.end());
    // Either the iteration begins with a request,
    Leaving best = walk({Ends::kHeld, kNone});
    StagePath path = path_to(best);
    // or with the clock that it ends with.
    for (const auto& [least, a] : by_last) {
      if (least >= best.cost) break;
      const Leaving cyclic = walk({Ends::kFree, a}, best.cost - least);
      if (cyclic.cost >= best.cost) continue;
      best = cyclic;
      path = path_to(best);
    }
    return path;
  }

 private:
  // The cheapest way to the end of the stage. Gives up where all ways cost more than free ones by
  // more than `most_detour`: then its cost is kInf.
  Leaving walk(const Ends& ends, double most_detour = kInf) {
    mature_.assign(std::max<Index>(1, num_clocks_), Leaving{});
    for (Index a = 0; a < static_cast<Index>(mature_.size()); ++a) {
      const bool may_begin = ends.kind == Ends::kFree && (ends.clock == kNone || ends.clock == a);
      if (may_begin) mature_[a].cost = 0;
      if (num_clocks_ > 0) mature_[a].clock = a;
    }
    young_.clear();
    entries_.resize(static_cast<std::size_t>(size_) * num_clocks_);  // read only where written
    for (Index k = 0; k < size_; ++k) {
      step(k, k == 0 && ends.kind == Ends::kHeld);
      if (most_detour < kInf && least_detour(k) > most_detour) return {};
    }
    if (ends.clock != kNone) return last_at(ends.clock);
    if (ends.kind == Ends::kHeld) return last_held();
    Leaving best;
    for (Index a = 0; a < static_cast<Index>(mature_.size()); ++a) best.offer(last_at(a));
    return best;
  }

  // By how much all ways up to operation k cost more than free ones to the same segments, at least.
  // From there on both cost the same, but for how they may end.
  double least_detour(Index k) const {
    double least = kInf;
    for (Index a = 0; a < num_clocks_; ++a) {
      if (!(mature_[a].cost < kInf)) continue;
      least = std::min(least, mature_[a].cost - free_mature_[at(k, a)]);
    }
    for (const Segments& young : young_) least = std::min(least, young.detour);
    return least;
  }

  // Compares segments that begin at k to those of free paths, or notes what those cost.
  void compare_to_free(Index k, Segments* entered) {
    if (notes_free_) {
      free_begun_.resize(static_cast<std::size_t>(size_) * num_clocks_);
      std::copy(entered->cost.begin(), entered->cost.end(), &free_begun_[at(k, 0)]);
    }
    if (free_begun_.empty()) return;
    entered->detour = kInf;
    for (Index b = 0; b < num_clocks_; ++b) {
      if (!(entered->cost[b] < kInf)) continue;
      entered->detour = std::min(entered->detour, entered->cost[b] - free_begun_[at(k, b)]);
    }
  }

  void note_free_mature(Index k) {
    free_mature_.resize(static_cast<std::size_t>(size_) * num_clocks_);
    for (Index a = 0; a < num_clocks_; ++a) free_mature_[at(k, a)] = mature_[a].cost;
  }

  // The cheapest way to the end at a clock, however short its segment is.
  Leaving last_at(Index a) const {
    Leaving best = mature_[a];
    for (const Segments& young : young_) best.offer({young.cost[a], young.start, a});
    return best;
  }

  // The cheapest way to the end whose last segment lasts until the next iteration's first request.
  // It may wait after its last operation and, there, before its first.
  Leaving last_held() const {
    Leaving best;
    for (const Leaving& segment : mature_) best.offer(segment);
    const double held = static_cast<double>(prices_.min_dwell - prices_.latency);
    for (const Segments& young : young_) {
      double least_price = young.least_wait_price;
      Index least_at = young.least_wait_at;
      for (const Index k : {Index{0}, size_}) {
        if (prices_.wait_price[k] < least_price) least_price = prices_.wait_price[k], least_at = k;
      }
      for (Index a = 0; a < num_clocks_; ++a) {
        Leaving last{young.cost[a], young.start, a};
        last.fill = std::max(0.0, held - young.length[a]);
        last.fill_at = least_at;
        if (last.fill > 0) last.cost += last.fill * least_price;
        best.offer(last);
      }
    }
    return best;
  }

  double time(Index row) const { return static_cast<double>(p_.rows[row].time); }
  double effective_energy(Index row) const {
    return static_cast<double>(p_.rows[row].energy) - waiting_ * time(row);
  }
  double cost(Index k, Index row) const {
    return effective_energy(row) + prices_.time_price[k] * time(row);
  }
  double lag(Index k) const {  // between operation k and the one before it
    if (k == 0) return 0;
    const Index before = operations_[k - 1];
    for (Index e = p_.succs.begin[before]; e < p_.succs.begin[before + 1]; ++e) {
      if (p_.succs.other[e] == operations_[k]) return static_cast<double>(p_.succs.lag[e]);
    }
    return 0;
  }
  std::size_t at(Index k, Index a) const { return static_cast<std::size_t>(k) * num_clocks_ + a; }

  // The least cost of each operation at each clock, and how long it may take there.
  void measure_operations() {
    const std::size_t cells = static_cast<std::size_t>(size_) * std::max<Index>(1, num_clocks_);
    least_at_.assign(cells, kInf);
    least_row_at_.assign(cells, kNone);
    asking_row_at_.assign(cells, kNone);
    longest_at_.assign(cells, 0);
    double magnitude = 0;
    for (Index k = 0; k < size_; ++k) {
      require(prices_.time_price[k] >= 0 && prices_.wait_price[k] >= 0, "a price is negative");
      double least = kInf, shortest = kInf, longest = 0, most = 0;
      Index least_row = kNone;
      const Problem::Operation& op = p_.operations[operations_[k]];
      for (Index r = op.first_row; r < op.end_row; ++r) {
        const Index clock = p_.rows[r].clock;
        require(p_.rows[r].leaves == clock && p_.steady(r), "a row changes clocks within itself");
        const double c = cost(k, r);
        if (c < least) least = c, least_row = r;
        shortest = std::min(shortest, time(r));
        longest = std::max(longest, time(r));
        most = std::max(most, static_cast<double>(p_.rows[r].energy) +
                                  (prices_.time_price[k] + waiting_) * time(r));
        for (Index a = 0; a < num_clocks_; ++a) {
          if (clock != kNone && clock != a) continue;
          measure_row_at(k, a, r, c);
        }
      }
      least_.push_back(least);
      least_row_.push_back(least_row);
      shortest_.push_back(shortest);
      longest_.push_back(longest);
      magnitude += most + prices_.change +
                   prices_.wait_price[k] * static_cast<double>(prices_.latency + prices_.min_dwell);
    }
    require(size_ == 0 || prices_.wait_price[size_] >= 0, "a price is negative");
    if (size_ > 0) magnitude += prices_.wait_price[size_] * static_cast<double>(prices_.min_dwell);
    margin_ = size_ * (waiting_ + 2) + magnitude * size_ * kRounding;
  }

  // A row that runs at clock a, or at any.
  void measure_row_at(Index k, Index a, Index r, double c) {
    const std::size_t cell = at(k, a);
    if (c < least_at_[cell]) least_at_[cell] = c, least_row_at_[cell] = r;
    longest_at_[cell] = std::max(longest_at_[cell], time(r));
    if (p_.rows[r].clock != a) return;
    Index& asking = asking_row_at_[cell];
    if (asking == kNone || c < cost(k, asking)) asking = r;
  }

  // How late a request for each operation's clock may be, and which operation it may be late for.
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
      reaches_.push_back(last);
    }
  }

  // Ways to leave segments at operation k.
  struct Ways {
    Leaving on_time;  // the clock is there as k starts
    Leaving unknown;  // another request may be under way
    // By clock before k, and how late the clock of k is, ns; apart for segments of one operation,
    // which may have taken another time than the longest at their clock.
    std::vector<Leaving> late, late_after_first;
    std::vector<double> by, by_after_first;
  };

  // A segment may be left at k.
  //   shortage: ns that it lacks to be held for long enough
  //   least_price: of a ns of waiting within it
  //   time_before: of the operation before k at most
  //   is_first: that operation is the segment's first
  void leave(Index k, Ways* ways, Leaving from, double shortage, double least_price,
             double time_before, bool is_first) const {
    if (!(from.cost < kInf)) return;
    const auto latency = static_cast<double>(prices_.latency);
    const double late =
        prices_.asks_ahead ? std::max(0.0, latency - time_before - lag(k)) : latency;
    if (late == 0 || prices_.asks_ahead) {
      const double fill = std::max(0.0, shortage - late);
      double cost = from.cost + late * prices_.wait_price[k];
      if (fill > 0) cost += fill * least_price;
      if (cost < ways->on_time.cost) {
        ways->on_time = {cost, from.start, from.clock, fill, from.fill_at, late};
      }
      if (late == 0) return;
    }
    auto& list = is_first ? ways->late_after_first : ways->late;
    auto& by = is_first ? ways->by_after_first : ways->by;
    if (list.empty()) list.resize(num_clocks_), by.resize(num_clocks_);
    from.fill = shortage;
    if (shortage > 0) from.cost += shortage * least_price;
    list[from.clock].offer(from);
    by[from.clock] = late;
  }

  Ways ways_to_leave(Index k) const {
    Ways ways;
    // Asked ahead, the request that ends a segment may be as much later within its operation than
    // the one that began it.
    const double held =
        static_cast<double>(prices_.min_dwell) - (prices_.asks_ahead ? latest_[k] : 0.0);
    for (Index a = 0; a < num_clocks_; ++a) {
      const double before = k > 0 ? longest_at_[at(k - 1, a)] : 0;
      leave(k, &ways, mature_[a], 0, 0, before, false);
    }
    const bool is_on_time = has_time_to_ask(k);
    for (const Segments& young : young_) {
      const bool is_here = prices_.wait_price[k] < young.least_wait_price;
      const double least_price = is_here ? prices_.wait_price[k] : young.least_wait_price;
      const Index fill_at = is_here ? k : young.least_wait_at;
      if (reaches_[young.start] >= k) {
        leave_unsettled(young, held, least_price, fill_at, &ways.unknown);
      } else if (is_on_time) {
        leave_unsettled(young, held, least_price, fill_at, &ways.on_time);
      } else {
        leave_late(k, young, held, least_price, fill_at, &ways);
      }
    }
    return ways;
  }

  // Whether a request for the clock of operation k is never late, whatever runs before it.
  bool has_time_to_ask(Index k) const {
    if (prices_.latency == 0) return true;
    if (!prices_.asks_ahead || k == 0) return false;
    const double least_before = static_cast<double>(prices_.latency) - lag(k);
    for (Index a = 0; a < num_clocks_; ++a) {
      if (longest_at_[at(k - 1, a)] < least_before) return false;
    }
    return true;
  }

  // The cheapest way to leave young segments, whatever their clock, where no lateness counts.
  //   held: ns that they must last; what they lack they wait for before operation fill_at
  void leave_unsettled(const Segments& young, double held, double least_price, Index fill_at,
                       Leaving* cheapest) const {
    // It takes most of the time where clocks are held, so its loop is plain.
    const double *cost = young.cost.data(), *length = young.length.data();
    double least = cheapest->cost;
    Index best = kNone;
    for (Index a = 0; a < num_clocks_; ++a) {
      const double left = cost[a] + std::max(0.0, held - length[a]) * least_price;
      if (left < least) least = left, best = a;
    }
    if (best == kNone) return;
    *cheapest = {least, young.start, best, std::max(0.0, held - length[best]), fill_at, 0};
  }

  // The same where the next clock may be late.
  void leave_late(Index k, const Segments& young, double held, double least_price, Index fill_at,
                  Ways* ways) const {
    const bool is_first = young.start == k - 1;
    for (Index a = 0; a < num_clocks_; ++a) {
      if (!(young.cost[a] < kInf)) continue;
      const double shortage = std::max(0.0, held - young.length[a]);
      Leaving from{young.cost[a], young.start, a};
      from.fill_at = fill_at;
      const double before = is_first ? young.length[a] : longest_at_[at(k - 1, a)];
      leave(k, ways, from, shortage, least_price, before, is_first);
    }
  }

  // A clock before an operation that its own clock is late for: what beginning a segment costs is
  // cost + (late_cost + rest * what the operation costs at its own clock).
  struct LateWay {
    double least;  // of that for any row
    double cost, late_cost, rest;
    Index clock;
  };

  // Begins segments at k by rows that are late for `by` ns, and run at the clock before until then.
  // It takes most of the time where clocks come late. Ways are tried by what they cost at least, so
  // that few of them are.
  void enter_late(Index k, const std::vector<Leaving>& list, const std::vector<double>& by,
                  Segments* entered) {
    if (list.empty()) return;
    for (const std::vector<Index>& rows : alike_rows(p_.operations[operations_[k]].table)) {
      const auto count = static_cast<Index>(rows.size());
      own_cost_.resize(count);
      for (Index j = 0; j < count; ++j) own_cost_[j] = cost(k, rows[j]);
      const double least_own = *std::min_element(own_cost_.begin(), own_cost_.end());
      late_ways_.clear();
      for (Index a = 0; a < num_clocks_; ++a) {
        if (!(list[a].cost < kInf)) continue;
        const Index other = p_.row_at(rows.front(), a);
        const double share = std::min(1.0, by[a] / time(other));
        const double late_cost = share * cost(k, other), rest = 1 - share;
        const double least = list[a].cost + (late_cost + rest * least_own);
        late_ways_.push_back({least, list[a].cost, late_cost, rest, a});
      }
      std::sort(late_ways_.begin(), late_ways_.end(),
                [](const LateWay& one, const LateWay& other) { return one.least < other.least; });
      for (Index j = 0; j < count; ++j) {
        const auto [cheapest, a] = cheapest_late_way(own_cost_[j], p_.rows[rows[j]].clock);
        if (a == kNone) continue;
        const Index other = p_.row_at(rows[j], a);
        const double share = std::min(1.0, by[a] / time(other));
        enter(k, p_.rows[rows[j]].clock, cheapest, {list[a], rows[j], other, share}, entered);
      }
    }
  }

  // The least cost of a late way to a row of another clock, and the clock before; of several of one
  // cost the lowest.
  std::pair<double, Index> cheapest_late_way(double own_cost, Index own_clock) const {
    double cheapest = kInf;
    Index before = kNone;
    for (const LateWay& way : late_ways_) {
      if (way.least > cheapest) break;
      if (way.clock == own_clock) continue;
      const double mixed = way.cost + (way.late_cost + way.rest * own_cost);
      if (mixed > cheapest || (mixed == cheapest && way.clock > before)) continue;
      cheapest = mixed;
      before = way.clock;
    }
    return {cheapest, before};
  }

  // The rows of a table that have a clock, apart where other rows stand for them at some clock.
  const std::vector<std::vector<Index>>& alike_rows(Index table) {
    if (alike_rows_.empty()) alike_rows_.resize(p_.num_tables);
    std::vector<std::vector<Index>>& groups = alike_rows_[table];
    if (!groups.empty()) return groups;
    const auto at_clocks = [&](Index r) { return &p_.nearest[at(r, 0)]; };
    for (Index r = p_.table_begin[table]; r < p_.table_begin[table + 1]; ++r) {
      if (p_.rows[r].clock == kNone) continue;
      const auto is_alike = [&](const std::vector<Index>& rows) {
        return std::equal(at_clocks(r), at_clocks(r) + num_clocks_, at_clocks(rows.front()));
      };
      const auto group = std::find_if(groups.begin(), groups.end(), is_alike);
      if (group == groups.end()) {
        groups.push_back({r});
      } else {
        group->push_back(r);
      }
    }
    return groups;
  }

  void enter(Index k, Index b, double cost, const Entry& entry, Segments* entered) {
    cost += prices_.change;
    if (cost >= entered->cost[b]) return;
    entered->cost[b] = cost;
    entries_[at(k, b)] = entry;
  }

  void step(Index k, bool begins_with_request) {
    Ways ways = ways_to_leave(k);
    if (begins_with_request) ways.on_time.cost = 0;  // any lateness of the first is left out
    Segments entered{k, kInf, k, std::vector<double>(num_clocks_, kInf),
                     std::vector<double>(num_clocks_, 0)};
    enter_late(k, ways.late, ways.by, &entered);
    enter_late(k, ways.late_after_first, ways.by_after_first, &entered);
    for (Index b = 0; b < num_clocks_; ++b) {
      const Index own = asking_row_at_[at(k, b)];
      if (own == kNone) continue;
      enter(k, b, ways.on_time.cost + cost(k, own), {ways.on_time, own}, &entered);
      enter(k, b, ways.unknown.cost + least_[k], {ways.unknown, least_row_[k]}, &entered);
      const double late = std::min(latest_[k], longest_[k]);
      const double own_time = longest_at_[at(k, b)];
      const double longer = late > 0 ? late * (1 - own_time / longest_[k]) + 1 : 0;
      entered.length[b] = reaches_[k] > k ? longest_[k] + 1 : own_time + longer;
    }
    go_on(k);
    if (num_clocks_ == 0) return;  // no segment begins: the stage has no clock to ask for
    compare_to_free(k, &entered);
    young_.push_back(std::move(entered));
    settle(k);
    if (notes_free_) note_free_mature(k);
  }

  // The row of operation k in a segment that began before it.
  Index row_within(Index start, Index a, Index k) const {
    const bool may_be_late = start != kNone && reaches_[start] >= k;
    if (a == kNone || (may_be_late && least_row_at_[at(k, a)] != kNone)) return least_row_[k];
    return least_row_at_[at(k, a)];
  }

  // Segments under way go on with operation k.
  void go_on(Index k) {
    for (Index a = 0; a < std::max<Index>(1, num_clocks_); ++a) {
      mature_[a].cost += num_clocks_ > 0 ? least_at_[at(k, a)] : least_[k];
    }
    for (Segments& young : young_) {
      const bool may_be_late = reaches_[young.start] >= k;
      if (prices_.wait_price[k] < young.least_wait_price) {
        young.least_wait_price = prices_.wait_price[k];
        young.least_wait_at = k;
      }
      const double *least = &least_at_[at(k, 0)], *longest = &longest_at_[at(k, 0)];
      double *cost = young.cost.data(), *length = young.length.data();
      const double pause = lag(k);
      if (may_be_late) {
        for (Index a = 0; a < num_clocks_; ++a) {
          cost[a] += least[a] < kInf ? least_[k] : kInf;
          length[a] += longest_[k] + 1 + pause;
        }
      } else {
        for (Index a = 0; a < num_clocks_; ++a) {
          cost[a] += least[a];
          length[a] += longest[a] + pause;
        }
      }
    }
  }

  // Segments that are long enough whatever comes join those of their clock.
  void settle(Index k) {
    const auto held = static_cast<double>(prices_.min_dwell);
    for (Segments& young : young_) {
      if (young.start == k || reaches_[young.start] > k) continue;
      for (Index a = 0; a < num_clocks_; ++a) {
        if (young.length[a] < held) continue;
        mature_[a].offer({young.cost[a], young.start, a});
        young.cost[a] = kInf;
      }
    }
    const auto is_over = [](const Segments& young) {
      return std::all_of(young.cost.begin(), young.cost.end(), [](double c) { return c == kInf; });
    };
    young_.erase(std::remove_if(young_.begin(), young_.end(), is_over), young_.end());
  }

  // The way that ends with a segment, from its last operation back to its first.
  StagePath path_to(const Leaving& end) const {
    StagePath path;
    path.bound = end.cost - margin_;
    path.rows.resize(size_);
    path.times.resize(size_);
    path.waits.assign(size_ + 1, 0);
    path.waits[end.fill_at] += end.fill;
    Leaving segment = end;
    for (Index k = size_ - 1; k >= 0; --k) {
      const Index start = segment.start, clock = segment.clock;
      path.rows[k] = clock == kNone ? least_row_[k] : least_row_at_[at(k, clock)];
      if (start != k) {
        add_operation(row_within(start, clock, k), 1, k, &path);
        continue;
      }
      const Entry& entry = entries_[at(k, clock)];
      path.rows[k] = asking_row_at_[at(k, clock)];
      add_operation(entry.row, 1 - entry.late_share, k, &path);
      if (entry.late_share > 0) add_operation(entry.late_row, entry.late_share, k, &path);
      path.changes += 1;
      path.waits[k] += entry.from.wait;
      path.waits[entry.from.fill_at] += entry.from.fill;
      segment = entry.from;
    }
    return path;
  }

  void add_operation(Index row, double share, Index k, StagePath* path) const {
    path->times[k] += share * time(row);
    path->energy += share * effective_energy(row);
  }

  const Problem& p_;
  const StagePrices& prices_;
  const Index num_clocks_;
  Index size_ = 0;
  double waiting_ = 0, margin_ = 0;
  std::vector<Index> operations_;  // (operations) their numbers
  // (operations): the least cost at any clock, the row of it, and times at any clock.
  std::vector<double> least_, shortest_, longest_;
  std::vector<Index> least_row_;
  std::vector<double> latest_;  // (operations) ns that a clock asked for it may be late
  std::vector<Index> reaches_;  // (operations) the last one that such a clock may be late for
  // (operations, clocks): the least cost, the row of it, that of the rows that ask for the clock,
  // and the most time.
  std::vector<double> least_at_, longest_at_;
  std::vector<Index> least_row_at_, asking_row_at_;
  std::vector<std::vector<std::vector<Index>>> alike_rows_;  // by table, where they were asked for
  std::vector<double> own_cost_;                             // scratch, by row
  std::vector<LateWay> late_ways_;                           // scratch
  std::vector<Leaving> mature_;  // by clock: segments that are held for long enough
  std::vector<Segments> young_;  // others
  std::vector<Entry> entries_;   // (operations, clocks) how segments began
  // (operations, clocks): what free paths cost on which a segment begins there, and on which one is
  // held for long enough by then; empty where nothing is held.
  bool notes_free_ = false;
  std::vector<double> free_begun_, free_mature_;
};

}  // namespace

StagePath cheapest_stage_path(const Problem& problem, Index stage, const StagePrices& prices) {
  require(stage >= 0 && stage < problem.num_stages, "there is no such stage");
  return StageWalk(problem, stage, prices).run();
}

}  // namespace envplan
