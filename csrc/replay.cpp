#include "replay.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

namespace envplan {

namespace {

using std::int64_t;
using std::uint64_t;
using Wide = unsigned __int128;

constexpr Time kNever = std::numeric_limits<Time>::max();
constexpr int kBlock = 8;       // noisy runs replayed side by side
constexpr Index kSettling = 4;  // operations a stage until a change shows whether clocks last
constexpr char kTouched = 1, kChanged = 2;

void require(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(what);
}

[[noreturn]] void too_long() {
  throw std::overflow_error("operation times and latencies add up to more than 146 years");
}

// energy * part / whole, rounded half up. Twice the product has at most 126 bits.
Wide share(int64_t energy, Time part, Time whole) {
  if (part == whole) return static_cast<Wide>(energy);
  const Wide twice = 2 * static_cast<Wide>(energy) * static_cast<Wide>(part);
  return (twice + static_cast<Wide>(whole)) / (2 * static_cast<Wide>(whole));
}

// What is left of an operation by a row of `time` if `left` is left of it by one of `before`.
Time carried(Time left, Time time, Time before) {
  if (((left | time) >> 31) == 0) return (left * time + before - 1) / before;
  const Wide product = static_cast<Wide>(left) * static_cast<Wide>(time);
  return static_cast<Time>((product + static_cast<Wide>(before - 1)) / static_cast<Wide>(before));
}

// rint, also where the compiler has no instruction for it.
double rounded(double x) { return x < 0x1p52 ? (x + 0x1p52) - 0x1p52 : x; }

Time noisy(Time time, double factor) {
  if (factor == 1) return time;
  const double product = static_cast<double>(time) * factor;
  if (!(product < 0x1p62)) return kMostTime;
  return std::max<Time>(1, static_cast<Time>(rounded(product)));
}

Time ended(Time start, Time time) {
  if (time > kMostTime - start) too_long();
  return start + time;
}

}  // namespace

Problem::Problem(const ProblemArrays& a)
    : num_operations(a.num_operations),
      num_stages(a.num_stages),
      num_tables(a.num_tables),
      num_clocks(a.num_clocks) {
  const Index n = num_operations;
  require(n > 0 && num_stages > 0 && num_tables > 0 && num_clocks >= 0, "there is nothing to run");
  require(a.stage_begin[0] == 0 && a.stage_begin[num_stages] == n,
          "stage_begin must span the operations");
  require(a.succ_begin[0] == 0 && a.table_begin[0] == 0, "succ_begin and table_begin begin at 0");

  order.assign(a.order, a.order + n);
  member.assign(n, -1);
  for (Index i = 0; i < n; ++i) {
    require(order[i] >= 0 && order[i] < n && member[order[i]] < 0,
            "order must name every operation once");
    member[order[i]] = i;
  }

  for (Index t = 0; t < num_tables; ++t) {
    require(a.table_begin[t] < a.table_begin[t + 1], "a table has no rows");
  }
  table_begin.assign(a.table_begin, a.table_begin + num_tables + 1);
  const Index num_rows = table_begin.back();
  for (Index row = 0; row < num_rows; ++row) {
    require(a.time[row] >= 1 && a.time[row] <= kMostTime, "a row's time is out of range");
    require(a.energy[row] >= 0 && a.energy[row] <= kMostTime, "a row's energy is out of range");
    require(a.clock[row] >= -1 && a.clock[row] < num_clocks, "a row's clock is out of range");
    require(a.leaves[row] >= -1 && a.leaves[row] < num_clocks &&
                (a.leaves[row] < 0) == (a.clock[row] < 0),
            "the clock that a row leaves is out of range");
    const auto first = static_cast<Index>(slices.size());
    if (a.slice_begin == nullptr) {
      slices.push_back({a.time[row], (a.energy[row] + a.time[row] - 1) / a.time[row]});
    } else {
      require(a.slice_begin[row] < a.slice_begin[row + 1], "a row has no slices");
      for (Index k = a.slice_begin[row]; k < a.slice_begin[row + 1]; ++k) {
        require(a.slice_time[k] >= 0 && a.slice_time[k] <= a.time[row] && a.slice_power[k] >= 0 &&
                    a.slice_power[k] <= kMostTime,
                "a slice is out of range");
        slices.push_back({a.slice_time[k], a.slice_power[k]});
      }
    }
    const auto end = static_cast<Index>(slices.size());
    Power most = 0;
    for (Index k = first; k < end; ++k) most = std::max(most, slices[k].power);
    rows.push_back({a.time[row], a.energy[row], most, a.clock[row], a.leaves[row], first, end});
  }
  nearest.assign(a.nearest, a.nearest + static_cast<int64_t>(num_rows) * num_clocks);
  for (Index t = 0; t < num_tables; ++t) {
    for (Index row = table_begin[t]; row < table_begin[t + 1]; ++row) {
      for (Index k = 0; k < num_clocks && rows[row].clock >= 0; ++k) {
        const Index other = row_at(row, k);
        require(other >= table_begin[t] && other < table_begin[t + 1] && rows[other].clock >= 0,
                "nearest must name rows with clocks of the same table");
      }
    }
  }

  stage_begin.assign(a.stage_begin, a.stage_begin + num_stages + 1);
  operations.resize(n);
  for (Index s = 0; s < num_stages; ++s) {
    require(stage_begin[s] <= stage_begin[s + 1], "stage_begin must ascend");
    require(a.waiting[s] >= 0 && a.waiting[s] <= kMostTime, "a blocking power is out of range");
    for (Index k = stage_begin[s]; k < stage_begin[s + 1]; ++k) {
      const Index table = a.table[k];
      require(table >= 0 && table < num_tables, "an operation's table is out of range");
      operations[member[k]] = {s,
                               table,
                               table_begin[table],
                               table_begin[table + 1],
                               k > stage_begin[s] ? member[k - 1] : -1,
                               k + 1 < stage_begin[s + 1] ? member[k + 1] : -1};
    }
  }
  waiting.assign(a.waiting, a.waiting + num_stages);
  for (const Power power : waiting) total_waiting += power;

  succs.begin.push_back(0);
  for (const Index from : order) {
    require(a.succ_begin[from] <= a.succ_begin[from + 1], "succ_begin must ascend");
    for (Index e = a.succ_begin[from]; e < a.succ_begin[from + 1]; ++e) {
      require(a.succ[e] >= 0 && a.succ[e] < n && member[a.succ[e]] > member[from],
              "order must be topological");
      require(a.succ_lag[e] >= 0 && a.succ_lag[e] < kMostTime, "a lag is out of range");
      succs.other.push_back(member[a.succ[e]]);
      succs.lag.push_back(a.succ_lag[e]);
    }
    succs.begin.push_back(static_cast<Index>(succs.other.size()));
    if (succs.begin[succs.begin.size() - 2] == succs.begin.back()) last.push_back(member[from]);
  }
  preds = reversed(n, succs.begin.data(), succs.other.data(), succs.lag.data());
  for (Index i = 0; i < n; ++i) {
    const auto first = preds.other.begin() + preds.begin[i];
    const auto end = preds.other.begin() + preds.begin[i + 1];
    const Index before = operations[i].before;
    require(before < 0 || std::find(first, end, before) != end,
            "operations of a stage must wait for the one before");
  }
}

Replay::Replay(const Problem& problem, Time latency, Time hold)
    : problem_(problem),
      latency_(latency),
      hold_(hold),
      row_(problem.num_operations),
      met_(problem.num_operations),
      initial_(problem.num_stages, -1),
      dirty_(problem.num_operations, 0) {
  require(latency >= 0 && latency < kMostTime, "latency is out of range");
  // What all operations lack to it is added up.
  const Time operations = problem.num_operations + problem.num_stages;
  require(hold >= 0 && hold < kMostTime / operations, "hold is out of range");
  for (Index i = 0; i < problem.num_operations; ++i) row_[i] = problem.operations[i].first_row;
}

void Replay::choose(const Index* rows) {
  for (Index i = 0; i < problem_.num_operations; ++i) {
    const Problem::Operation& op = problem_.operations[i];
    const Index row = rows[problem_.order[i]];
    require(row >= 0 && row < op.end_row - op.first_row, "an operation has no such row");
    row_[i] = op.first_row + row;
  }
}

void Replay::chosen(Index* rows) const {
  for (Index i = 0; i < problem_.num_operations; ++i) {
    rows[problem_.order[i]] = row_[i] - problem_.operations[i].first_row;
  }
}

void Replay::run(const double* factors) {
  factors_ = factors;
  totals_ = {};
  for (Index s = 0; s < problem_.num_stages; ++s) initial_[s] = clock_left(s);
  for (Index i = 0; i < problem_.num_operations; ++i) {
    replay(i);
    totals_.cost += met_[i].cost;
    totals_.shortage_within += met_[i].shortage;
  }
  measure();
}

std::int64_t Replay::energy(Index i) const {
  const Energy waiting = problem_.waiting[problem_.operations[i].stage];
  const Energy sum = met_[i].cost + waiting * (met_[i].finish - met_[i].start);
  if (sum > std::numeric_limits<int64_t>::max()) {
    throw std::overflow_error("an operation takes more than 9200 J");
  }
  return static_cast<int64_t>(sum);
}

// Time and energy of all of operation i by a row.
Replay::Whole Replay::whole(Index i, Index row) const {
  const Problem::Row& r = problem_.rows[row];
  const double factor = factors_ == nullptr ? 1 : factors_[problem_.order[i]];
  if (factor == 1) return {r.time, r.energy};
  const Time time = noisy(r.time, factor);
  const Wide energy = share(r.energy, time, r.time);
  if (energy > static_cast<Wide>(std::numeric_limits<int64_t>::max())) {
    throw std::overflow_error("an operation takes more than 9200 J under noise");
  }
  return {time, static_cast<int64_t>(energy)};
}

// The clock that a stage's last request leaves.
Index Replay::clock_left(Index stage) const {
  for (Index k = problem_.stage_begin[stage + 1]; k-- > problem_.stage_begin[stage];) {
    const Index left = problem_.rows[row_[problem_.member[k]]].leaves;
    if (left >= 0) return left;
  }
  return -1;
}

// The operation that makes the next request after that of `come`, of those up to `asked`.
Index Replay::next_request(Index come, Index asked) const {
  for (;;) {
    const Index before = problem_.operations[asked].before;
    const Index earlier = before < 0 ? -1 : met_[before].asked;
    if (earlier == come) return asked;
    asked = earlier;
  }
}

// Operation i as it starts, its own request made. Sets all but its finish and cost.
void Replay::enter(Index i, Met* met) const {
  Met& now = *met;
  Time start = 0;
  for (Index e = problem_.preds.begin[i]; e < problem_.preds.begin[i + 1]; ++e) {
    start = std::max(start, met_[problem_.preds.other[e]].finish + problem_.preds.lag[e]);
  }
  if (start > kMostTime) too_long();
  now.start = start;
  if (latency_ == 0 && hold_ == 0) return;
  const Problem::Operation& op = problem_.operations[i];
  if (op.before >= 0) {
    const Met& left = met_[op.before];
    now.come = left.come;
    now.asked = left.asked;
    now.in_force = left.in_force;
    now.wanted = left.wanted;
    now.asked_at = left.asked_at;
  } else {
    now.come = now.asked = -1;
    now.in_force = now.wanted = initial_[op.stage];
  }
  now.shortage = 0;
  const Index mhz = clock(i);
  if (mhz < 0 || mhz == now.wanted) return;
  if (hold_ > 0) {
    if (now.asked >= 0) now.shortage = std::max<Time>(0, hold_ - (now.start - now.asked_at));
    now.asked_at = now.start;
  }
  now.asked = i;
  now.wanted = mhz;
  if (latency_ == 0) {
    now.come = i;
    now.in_force = mhz;
  }
}

// Runs operation i from its start to its end; calls each(row, clock, begin, end, energy) for every
// part. What met_ says of the start and the request of operation i must be up to date.
template <class EachPart>
void Replay::work(Index i, Met* now, EachPart each) const {
  const Index planned = row_[i], wanted = problem_.rows[planned].clock;
  const Index stage = problem_.operations[i].stage;
  if (latency_ == 0 || wanted < 0) {
    const Whole all = whole(i, planned);
    now->finish = ended(now->start, all.time);
    now->cost = all.energy - static_cast<Energy>(problem_.waiting[stage]) * all.time;
    each(planned, wanted, now->start, now->finish, all.energy);
    leave(i, now);
    return;
  }
  Time at = now->start, left = 0;
  Energy energy = 0;
  Index row = -1;
  Whole all{};
  do {
    Time until = kNever;
    while (now->awaits()) {
      const Index next = next_request(now->come, now->asked);
      const Time comes = met_[next].start + latency_;
      if (comes > at) {
        until = comes;
        break;
      }
      now->come = next;
      now->in_force = clock(next);
    }
    const Index met = now->in_force == wanted ? planned : problem_.row_at(planned, now->in_force);
    if (met != row) {
      const Whole before = all;
      all = whole(i, met);
      left = row < 0 ? all.time : carried(left, all.time, before.time);
      row = met;
    }
    const Time spent = std::min(left, until - at), end = ended(at, spent);
    const auto part = static_cast<int64_t>(share(all.energy, spent, all.time));
    each(row, now->in_force, at, end, part);
    energy += part;
    at = end;
    left -= spent;
  } while (left > 0);
  now->finish = at;
  now->cost = energy - static_cast<Energy>(problem_.waiting[stage]) * (at - now->start);
  leave(i, now);
}

// The clocks within operation i have all come when it ends.
void Replay::leave(Index i, Met* now) const {
  const Problem::Row& row = problem_.rows[row_[i]];
  if (row.leaves == row.clock) return;
  now->come = now->asked;
  now->in_force = now->wanted = row.leaves;
}

void Replay::replay(Index i) {
  ++touched_;
  enter(i, &met_[i]);
  work(i, &met_[i], [](Index, Index, Time, Time, int64_t) {});
}

void Replay::parts(Index i, std::vector<Part>* out) const {
  Met now;
  enter(i, &now);
  work(i, &now, [out](Index row, Index clock, Time begin, Time end, int64_t energy) {
    out->push_back({row, clock, begin, end, energy});
  });
}

void Replay::measure() {
  totals_.makespan = 0;
  for (const Index i : problem_.last) {
    totals_.makespan = std::max(totals_.makespan, met_[i].finish);
  }
  totals_.shortage = hold_ > 0 ? totals_.shortage_within + shortage_around() : 0;
}

// What is missing between each stage's last request and its first of the next iteration.
Time Replay::shortage_around() const {
  Time sum = 0;
  for (Index s = 0; s < problem_.num_stages; ++s) {
    if (problem_.stage_begin[s] == problem_.stage_begin[s + 1]) continue;
    const Met& end = met_[problem_.member[problem_.stage_begin[s + 1] - 1]];
    if (end.asked < 0) continue;
    Index first = problem_.member[problem_.stage_begin[s]];
    while (!asks(first)) first = problem_.operations[first].after;
    sum += std::max<Time>(0, hold_ - (totals_.makespan + met_[first].start - end.asked_at));
  }
  return sum;
}

void Replay::touch(Index i) {
  if (dirty_[i]) return;
  dirty_[i] = kTouched;
  ++num_dirty_;
}

void Replay::forget_touched(Index from) {
  for (Index i = from; num_dirty_ > 0; ++i) {
    num_dirty_ -= dirty_[i] != 0;
    dirty_[i] = 0;
  }
}

bool Replay::change(const std::vector<Change>& changes, const Budget& budget) {
  other_rows_.clear();
  other_initial_.clear();
  other_met_.clear();
  other_totals_ = totals_;
  changed_from_ = kNever;
  changed_to_ = 0;
  Index from = problem_.num_operations, settled = 0;
  for (const auto& [i, row] : changes) {
    other_rows_.push_back({i, row_[i]});
    row_[i] = row;
    touch(i);
    dirty_[i] = kChanged;
    from = std::min(from, i);
    settled = std::max(settled, i + kSettling * problem_.num_stages);
  }
  const bool clocks_matter = latency_ > 0 || hold_ > 0;
  for (const Change& change : changes) {
    const Index s = problem_.operations[change.operation].stage;
    const Index left = clocks_matter ? clock_left(s) : initial_[s];
    if (left == initial_[s]) continue;
    other_initial_.emplace_back(s, initial_[s]);
    initial_[s] = left;
    const Index first = problem_.member[problem_.stage_begin[s]];
    touch(first);
    from = std::min(from, first);
  }
  for (Index i = from; num_dirty_ > 0; ++i) {
    if (!dirty_[i]) continue;
    const bool named = dirty_[i] == kChanged;
    dirty_[i] = 0;
    --num_dirty_;
    const Met old = met_[i];
    replay(i);
    const Met& now = met_[i];
    const bool same_clocks = now.same_clocks(old);
    const bool awaits = now.awaits() || old.awaits();
    const Index after = problem_.operations[i].after;
    // A request that is still to come reaches later operations of the stage.
    if (after >= 0 && (awaits || !same_clocks)) touch(after);
    const bool same = same_clocks && now.start == old.start && now.finish == old.finish &&
                      now.cost == old.cost && now.shortage == old.shortage;
    if (same && !named && !awaits) continue;
    // What runs may differ though it takes as long and as much: the clock changes at another time.
    changed_from_ = std::min({changed_from_, now.start, old.start});
    changed_to_ = std::max({changed_to_, now.finish, old.finish});
    if (same) continue;
    other_met_.emplace_back(i, old);
    totals_.cost += now.cost - old.cost;
    totals_.shortage_within += now.shortage - old.shortage;
    if (now.finish != old.finish) {
      for (Index e = problem_.succs.begin[i]; e < problem_.succs.begin[i + 1]; ++e) {
        touch(problem_.succs.other[e]);
      }
    }
    const Time late = std::max<Time>(0, now.finish + budget.tail[i] - budget.free);
    const Time missing = i > settled ? totals_.shortage_within - other_totals_.shortage_within : 0;
    if ((late > 0 || missing > 0) && static_cast<double>(totals_.cost - other_totals_.cost) +
                                             budget.late_price * static_cast<double>(late) +
                                             budget.short_price * static_cast<double>(missing) >
                                         budget.most) {
      forget_touched(i + 1);
      return false;
    }
  }
  measure();
  return true;
}

void Replay::swap() {
  for (auto& [i, row] : other_rows_) std::swap(row_[i], row);
  for (auto& [s, clock] : other_initial_) std::swap(initial_[s], clock);
  for (auto& [i, met] : other_met_) std::swap(met_[i], met);
  std::swap(totals_, other_totals_);
}

// Rises of power within a span of time, above that of waiting, unsorted, into rises_.
void Replay::collect(Time from, Time to) const {
  rises_.clear();
  for (Index s = 0; s < problem_.num_stages; ++s) {
    const auto end = problem_.member.begin() + problem_.stage_begin[s + 1];
    auto at = std::partition_point(problem_.member.begin() + problem_.stage_begin[s], end,
                                   [&](Index i) { return met_[i].finish <= from; });
    for (; at != end && met_[*at].start < to; ++at) {
      parts_.clear();
      parts(*at, &parts_);
      const auto draw = [&](Time begin, Time end, Power power) {
        if (end <= from || begin >= to || begin == end) return;
        const Power rise = power - problem_.waiting[s];
        rises_.emplace_back(std::max(begin, from), rise);
        rises_.emplace_back(std::min(end, to), -rise);
      };
      for (const Part& part : parts_) {
        const Problem::Row& row = problem_.rows[part.row];
        if (part.end - part.begin != row.time) {
          draw(part.begin, part.end, row.power);
          continue;
        }
        Time begin = part.begin;
        for (Index k = row.first_slice; k < row.end_slice; ++k) {
          const Time ends = std::min(part.end, begin + problem_.slices[k].time);
          const Time end = k + 1 < row.end_slice ? ends : part.end;
          draw(begin, end, problem_.slices[k].power);
          begin = end;
        }
      }
    }
  }
  std::sort(rises_.begin(), rises_.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
}

void Replay::power_steps(std::vector<Time>* times, std::vector<Power>* power) const {
  collect(0, makespan());
  times->assign(1, 0);
  power->clear();
  Energy level = problem_.total_waiting;
  auto rise = rises_.begin();
  for (;;) {
    const Time at = rise == rises_.end() ? makespan() : rise->first;
    const bool starts = at == times->back();
    if (!starts) {
      if (level > kMostTime) throw std::overflow_error("power is out of range");
      const auto step = static_cast<Power>(level);
      if (!power->empty() && power->back() == step) {
        times->back() = at;  // nothing has changed since the step before
      } else {
        times->push_back(at);
        power->push_back(step);
      }
    }
    if (at == makespan()) return;
    level += rise->second;
    ++rise;
  }
}

Energy Replay::over(Power cap, Time from, Time to) const {
  to = std::min(to, makespan());
  collect(from, to);
  Energy sum = 0, level = problem_.total_waiting - cap;
  Time at = from;
  for (const auto& [time, rise] : rises_) {
    if (level > 0) sum += level * (time - at);
    at = time;
    level += rise;
  }
  return level > 0 && to > at ? sum + level * (to - at) : sum;
}

void Replay::tails(std::vector<Time>* tail) const {
  tail->resize(problem_.num_operations);
  for (Index i = problem_.num_operations - 1; i >= 0; --i) {
    Time most = 0;
    for (Index e = problem_.succs.begin[i]; e < problem_.succs.begin[i + 1]; ++e) {
      const Index j = problem_.succs.other[e];
      most = std::max(most, problem_.succs.lag[e] + met_[j].finish - met_[j].start + (*tail)[j]);
    }
    (*tail)[i] = most;
  }
}

namespace {

// Clocks that come at once: only times count, and neighbouring runs share all look-ups.
void makespans_on_time(const Problem& p, const Replay& chosen, const double* factors, int64_t runs,
                       Time* out) {
  const Index n = p.num_operations;
  std::vector<Time> finish(static_cast<std::size_t>(n) * kBlock);
  for (int64_t first = 0; first < runs; first += kBlock) {
    const auto width = static_cast<int>(std::min<int64_t>(kBlock, runs - first));
    for (Index i = 0; i < n; ++i) {
      Time start[kBlock] = {};
      for (Index e = p.preds.begin[i]; e < p.preds.begin[i + 1]; ++e) {
        const Time* before = &finish[static_cast<std::size_t>(p.preds.other[e]) * kBlock];
        for (int r = 0; r < width; ++r) start[r] = std::max(start[r], before[r] + p.preds.lag[e]);
      }
      const Time time = p.rows[chosen.rows()[i]].time;
      for (int r = 0; r < width; ++r) {
        if (start[r] > kMostTime) too_long();
        const double factor = factors[(first + r) * n + p.order[i]];
        finish[static_cast<std::size_t>(i) * kBlock + r] = ended(start[r], noisy(time, factor));
      }
    }
    for (int r = 0; r < width; ++r) {
      out[first + r] = 0;
      for (const Index i : p.last) {
        out[first + r] = std::max(out[first + r], finish[static_cast<std::size_t>(i) * kBlock + r]);
      }
    }
  }
}

}  // namespace

void makespans(const Problem& problem, const Index* rows, Time latency, const double* factors,
               int64_t runs, Time* out) {
  Replay replay(problem, latency, 0);
  replay.choose(rows);
  if (latency == 0) return makespans_on_time(problem, replay, factors, runs, out);
  for (int64_t r = 0; r < runs; ++r) {
    replay.run(factors + r * problem.num_operations);
    out[r] = replay.makespan();
  }
}

}  // namespace envplan
