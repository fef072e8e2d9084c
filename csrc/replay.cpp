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
  require(num_operations > 0 && num_stages > 0 && num_tables > 0 && num_clocks >= 0,
          "there is nothing to run");
  require_offsets(a.stage_begin, num_stages, num_operations,
                  "stage_begin must ascend from 0 and span the operations");
  require_offsets(a.succ_begin, num_operations, a.num_arcs,
                  "succ_begin must ascend from 0 and span succ and succ_lag");
  require_offsets(a.table_begin, num_tables, a.num_rows,
                  "table_begin must ascend from 0 and span the rows");
  if (a.slice_begin != nullptr) {
    require_offsets(a.slice_begin, a.num_rows, a.num_slices,
                    "slice_begin must ascend from 0 and span slice_time and slice_power");
  }
  copy_order(a);
  copy_rows(a);
  copy_nearest(a);
  copy_stages(a);
  copy_precedences(a);
}

void Problem::copy_order(const ProblemArrays& a) {
  order.assign(a.order, a.order + num_operations);
  number_of.assign(num_operations, -1);
  for (Index i = 0; i < num_operations; ++i) {
    require(order[i] >= 0 && order[i] < num_operations && number_of[order[i]] < 0,
            "order must name every operation once");
    number_of[order[i]] = i;
  }
}

void Problem::copy_rows(const ProblemArrays& a) {
  for (Index t = 0; t < num_tables; ++t) {
    require(a.table_begin[t] < a.table_begin[t + 1], "a table has no rows");
  }
  table_begin.assign(a.table_begin, a.table_begin + num_tables + 1);
  for (Index row = 0; row < a.num_rows; ++row) {
    require(a.time[row] >= 1 && a.time[row] <= kMostTime, "a row's time is out of range");
    require(a.energy[row] >= 0 && a.energy[row] <= kMostEnergy, "a row's energy is out of range");
    require(a.clock[row] >= -1 && a.clock[row] < num_clocks, "a row's clock is out of range");
    require(a.leaves[row] >= -1 && a.leaves[row] < num_clocks &&
                (a.leaves[row] < 0) == (a.clock[row] < 0),
            "the clock that a row leaves is out of range");
    const auto first = static_cast<Index>(slices.size());
    copy_slices(a, row);
    const auto end = static_cast<Index>(slices.size());
    Power most = 0;
    for (Index k = first; k < end; ++k) most = std::max(most, slices[k].power);
    rows.push_back({a.time[row], a.energy[row], most, a.clock[row], a.leaves[row], first, end});
  }
}

// A row's slices; without any, one of its average power.
void Problem::copy_slices(const ProblemArrays& a, Index row) {
  if (a.slice_begin == nullptr) {
    slices.push_back({a.time[row], (a.energy[row] + a.time[row] - 1) / a.time[row]});
    return;
  }
  require(a.slice_begin[row] < a.slice_begin[row + 1], "a row has no slices");
  for (Index k = a.slice_begin[row]; k < a.slice_begin[row + 1]; ++k) {
    require(a.slice_time[k] >= 0 && a.slice_time[k] <= a.time[row] && a.slice_power[k] >= 0 &&
                a.slice_power[k] <= kMostPower,
            "a slice is out of range");
    slices.push_back({a.slice_time[k], a.slice_power[k]});
  }
}

void Problem::copy_nearest(const ProblemArrays& a) {
  nearest.assign(a.nearest, a.nearest + static_cast<int64_t>(a.num_rows) * num_clocks);
  for (Index t = 0; t < num_tables; ++t) {
    for (Index row = table_begin[t]; row < table_begin[t + 1]; ++row) {
      for (Index k = 0; k < num_clocks && rows[row].clock >= 0; ++k) {
        const Index other = row_at(row, k);
        require(other >= table_begin[t] && other < table_begin[t + 1] && rows[other].clock >= 0,
                "nearest must name rows with clocks of the same table");
      }
    }
  }
}

void Problem::copy_stages(const ProblemArrays& a) {
  stage_begin.assign(a.stage_begin, a.stage_begin + num_stages + 1);
  operations.resize(num_operations);
  for (Index s = 0; s < num_stages; ++s) {
    require(a.waiting[s] >= 0 && a.waiting[s] <= kMostPower, "a blocking power is out of range");
    for (Index k = stage_begin[s]; k < stage_begin[s + 1]; ++k) {
      const Index table = a.table[k];
      require(table >= 0 && table < num_tables, "an operation's table is out of range");
      const Index before = k > stage_begin[s] ? number_of[k - 1] : kNone;
      const Index after = k + 1 < stage_begin[s + 1] ? number_of[k + 1] : kNone;
      operations[number_of[k]] = {s,      table, table_begin[table], table_begin[table + 1],
                                  before, after};
    }
  }
  waiting.assign(a.waiting, a.waiting + num_stages);
  for (const Power power : waiting) total_waiting += power;
  require(total_waiting <= kMostPower, "blocking powers together are out of range");
}

void Problem::copy_precedences(const ProblemArrays& a) {
  succs.begin.push_back(0);
  for (const Index from : order) {
    for (Index e = a.succ_begin[from]; e < a.succ_begin[from + 1]; ++e) {
      require(
          a.succ[e] >= 0 && a.succ[e] < num_operations && number_of[a.succ[e]] > number_of[from],
          "order must be topological");
      require(a.succ_lag[e] >= 0 && a.succ_lag[e] < kMostTime, "a lag is out of range");
      succs.other.push_back(number_of[a.succ[e]]);
      succs.lag.push_back(a.succ_lag[e]);
    }
    succs.begin.push_back(static_cast<Index>(succs.other.size()));
    const bool has_successors = a.succ_begin[from] < a.succ_begin[from + 1];
    if (!has_successors) last.push_back(number_of[from]);
  }
  preds = reversed(num_operations, succs.begin.data(), succs.other.data(), succs.lag.data());
  for (Index i = 0; i < num_operations; ++i) {
    const auto first = preds.other.begin() + preds.begin[i];
    const auto end = preds.other.begin() + preds.begin[i + 1];
    const Index before = operations[i].before;
    require(before < 0 || std::find(first, end, before) != end,
            "operations of a stage must wait for the one before");
  }
}

Replay::Replay(const Problem& problem, Machine machine, Time min_dwell)
    : problem_(problem),
      latency_(machine.latency),
      asks_ahead_(machine.asks_ahead),
      min_dwell_(min_dwell),
      row_(problem.num_operations),
      runs_(problem.num_operations),
      initial_clock_(problem.num_stages, kNone),
      reached_(problem.num_operations, Reached::kNo) {
  require(latency_ >= 0 && latency_ < kMostTime, "latency is out of range");
  // What all operations lack to it is added up.
  const Time operations = problem.num_operations + problem.num_stages;
  require(min_dwell >= 0 && min_dwell < kMostTime / operations, "min_dwell is out of range");
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
  timers_.clear();
  const bool needs_timers = factors != nullptr && asks_ahead_ && latency_ > 0;
  if (needs_timers) {
    factors_ = nullptr;
    replay_all();
    std::vector<Timer> timers;
    for (Index i = 0; i < problem_.num_operations; ++i) timers.push_back(timer(i));
    timers_ = std::move(timers);
  }
  run_again(factors);
}

void Replay::run_again(const double* factors) {
  factors_ = factors;
  replay_all();
}

void Replay::replay_all() {
  totals_ = {};
  for (Index s = 0; s < problem_.num_stages; ++s) initial_clock_[s] = clock_left(s);
  for (Index i = 0; i < problem_.num_operations; ++i) {
    replay(i);
    totals_.cost += runs_[i].cost;
    totals_.shortage_within += runs_[i].shortage;
  }
  measure();
}

std::int64_t Replay::energy(Index i) const {
  const Energy waiting = problem_.waiting[problem_.operations[i].stage];
  const Energy sum = runs_[i].cost + waiting * (runs_[i].finish - runs_[i].start);
  if (sum > std::numeric_limits<int64_t>::max()) {
    throw std::overflow_error("an operation takes more than 92 kJ");
  }
  return static_cast<int64_t>(sum);
}

// Time and energy of all of operation i by a row.
Replay::WholeOperation Replay::whole_operation(Index i, Index row) const {
  const Problem::Row& r = problem_.rows[row];
  const double factor = factors_ == nullptr ? 1 : factors_[problem_.order[i]];
  if (factor == 1) return {r.time, r.energy};
  const Time time = noisy(r.time, factor);
  const Wide energy = share(r.energy, time, r.time);
  if (energy > static_cast<Wide>(std::numeric_limits<int64_t>::max())) {
    throw std::overflow_error("an operation takes more than 92 kJ under noise");
  }
  return {time, static_cast<int64_t>(energy)};
}

// The clock that a stage's last request leaves.
Index Replay::clock_left(Index stage) const {
  for (Index k = problem_.stage_begin[stage + 1]; k-- > problem_.stage_begin[stage];) {
    const Index left = problem_.rows[row_[problem_.number_of[k]]].leaves;
    if (left != kNone) return left;
  }
  return kNone;
}

// The operation that makes the next request after `effective_request`, of those up to
// `last_request`: requests of a stage are a list linked backwards.
Index Replay::next_request(Index effective_request, Index last_request) const {
  Index request = last_request;
  for (;;) {
    const Index before = problem_.operations[request].before;
    const Index earlier = before == kNone ? kNone : runs_[before].last_request;
    if (earlier == effective_request) return request;
    request = earlier;
  }
}

// Operation i as it starts, its own request made. Sets all but its finish and cost.
void Replay::begin_operation(Index i, OperationRun* run) const {
  run->start = earliest_start(i);
  if (latency_ == 0 && min_dwell_ == 0) return;
  take_over_clocks(i, run);
  request_clock(i, run);
}

// When the predecessors of operation i let it start.
Time Replay::earliest_start(Index i) const {
  Time start = 0;
  for (Index e = problem_.preds.begin[i]; e < problem_.preds.begin[i + 1]; ++e) {
    start = std::max(start, runs_[problem_.preds.other[e]].finish + problem_.preds.lag[e]);
  }
  if (start > kMostTime) too_long();
  return start;
}

// The earliest time at which the clock of operation i may be asked for ahead. The operation before
// it on the stage must have been replayed.
Time Replay::earliest_request(Index i) const {
  const Index before = problem_.operations[i].before;
  if (before == kNone) return 0;
  const OperationRun& run = runs_[before];
  if (problem_.steady(row_[before])) return run.start;
  // Its last request within itself was made by the time its last slice began.
  const Problem::Row& row = problem_.rows[row_[before]];
  const double factor = factors_ == nullptr ? 1 : factors_[problem_.order[before]];
  const Time last_slice = noisy(problem_.slices[row.end_slice - 1].time, factor);
  return std::max(run.start, run.finish - std::min(last_slice, run.finish));
}

// When the clock of operation i is asked for, which starts at a time.
Time Replay::time_to_request(Index i, Time start) const {
  if (!asks_ahead_) return start;
  if (timers_.empty()) return std::max(earliest_request(i), start - latency_);
  const Timer& timer = timers_[i];
  const Time begins =
      timer.from_end ? runs_[problem_.operations[i].before].finish : earliest_request(i);
  return std::min(start, ended(begins, timer.time));
}

// The timer of operation i in noisy runs, from a replay without noise.
Replay::Timer Replay::timer(Index i) const {
  const Time request = std::max<Time>(0, runs_[i].start - latency_);
  const Index before = problem_.operations[i].before;
  if (before != kNone && request >= runs_[before].finish) {
    return {request - runs_[before].finish, true};
  }
  return {std::max<Time>(0, request - earliest_request(i)), false};
}

// When the clock of the operation after i comes, if that may be while i still runs; kNever where it
// is not. Only noise makes it come so early: its timer runs from the start of i.
Time Replay::early_landing(Index i, const OperationRun& run) const {
  const Index after = problem_.operations[i].after;
  if (timers_.empty() || after == kNone || timers_[after].from_end) return kNever;
  const Index wanted = clock(after);
  const bool asks = wanted != kNone && wanted != run.requested_clock;
  if (!asks || !problem_.steady(row_[i])) return kNever;
  return ended(ended(run.start, timers_[after].time), latency_);
}

// Clocks and requests as the operation before i on its stage leaves them.
void Replay::take_over_clocks(Index i, OperationRun* run) const {
  const Problem::Operation& op = problem_.operations[i];
  if (op.before != kNone) {
    const OperationRun& before = runs_[op.before];
    run->effective_request = before.effective_request;
    run->last_request = before.last_request;
    run->clock_in_force = before.clock_in_force;
    run->requested_clock = before.requested_clock;
    run->requested_at = before.requested_at;
  } else {
    run->effective_request = run->last_request = kNone;
    run->clock_in_force = run->requested_clock = initial_clock_[op.stage];
  }
}

// The request of operation i, which starts, if its row asks for another clock than the last one.
void Replay::request_clock(Index i, OperationRun* run) const {
  run->shortage = 0;
  run->own_request_at = 0;
  const Index wanted = clock(i);
  if (wanted == kNone || wanted == run->requested_clock) return;
  run->own_request_at = time_to_request(i, run->start);
  if (min_dwell_ > 0) {
    if (run->last_request != kNone) {
      const Time dwell = run->own_request_at - run->requested_at;
      run->shortage = std::max<Time>(0, min_dwell_ - dwell);
    }
    run->requested_at = run->own_request_at;
  }
  run->last_request = i;
  run->requested_clock = wanted;
  if (latency_ == 0) {
    run->effective_request = i;
    run->clock_in_force = wanted;
  }
}

// Takes over the clocks that have come by a time. Returns when the next one comes, or kNever.
Time Replay::apply_due_requests(Time at, OperationRun* run) const {
  while (run->awaits_clock()) {
    const Index next = next_request(run->effective_request, run->last_request);
    const Time comes = runs_[next].own_request_at + latency_;
    if (comes > at) return comes;
    run->effective_request = next;
    run->clock_in_force = clock(next);
  }
  return kNever;
}

// Runs operation i from its start to its end; calls each(row, clock, begin, end, energy) for every
// part. What the run says of its start and its request must be up to date.
template <class EachPart>
void Replay::execute(Index i, OperationRun* run, EachPart each) const {
  const Index planned_row = row_[i], planned_clock = problem_.rows[planned_row].clock;
  const auto waiting = static_cast<Energy>(problem_.waiting[problem_.operations[i].stage]);
  if (latency_ == 0 || planned_clock == kNone) {
    const WholeOperation all = whole_operation(i, planned_row);
    run->finish = ended(run->start, all.time);
    run->cost = all.energy - waiting * all.time;
    each(planned_row, planned_clock, run->start, run->finish, all.energy);
    finish_clocks(i, run);
    return;
  }
  constexpr Index kNoRow = -1;
  const Time next_lands = early_landing(i, *run);
  Time at = run->start, left = 0;  // left: of the whole operation by the current row
  Energy energy = 0;
  Index row = kNoRow;
  WholeOperation all{};
  do {
    Time until = apply_due_requests(at, run);
    // Requests come in order, so none of others is still to come when that of the next has.
    if (next_lands <= at) {
      run->clock_in_force = clock(problem_.operations[i].after);
    } else {
      until = std::min(until, next_lands);
    }
    const Index current_row = run->clock_in_force == planned_clock
                                  ? planned_row
                                  : problem_.row_at(planned_row, run->clock_in_force);
    if (current_row != row) {
      const WholeOperation before = all;
      all = whole_operation(i, current_row);
      left = row == kNoRow ? all.time : carried(left, all.time, before.time);
      row = current_row;
    }
    const Time spent = std::min(left, until - at), end = ended(at, spent);
    const auto part = static_cast<int64_t>(share(all.energy, spent, all.time));
    each(row, run->clock_in_force, at, end, part);
    energy += part;
    at = end;
    left -= spent;
  } while (left > 0);
  run->finish = at;
  run->cost = energy - waiting * (at - run->start);
  finish_clocks(i, run);
}

// The clocks within operation i have all come when it ends.
void Replay::finish_clocks(Index i, OperationRun* run) const {
  const Problem::Row& row = problem_.rows[row_[i]];
  if (row.leaves == row.clock) return;
  run->effective_request = run->last_request;
  run->clock_in_force = run->requested_clock = row.leaves;
}

void Replay::replay(Index i) {
  ++touched_;
  begin_operation(i, &runs_[i]);
  execute(i, &runs_[i], [](Index, Index, Time, Time, int64_t) {});
}

void Replay::parts(Index i, std::vector<Part>* out) const {
  OperationRun run;
  begin_operation(i, &run);
  execute(i, &run, [out](Index row, Index clock, Time begin, Time end, int64_t energy) {
    out->push_back({row, clock, begin, end, energy});
  });
}

void Replay::measure() {
  totals_.makespan = 0;
  for (const Index i : problem_.last) {
    totals_.makespan = std::max(totals_.makespan, runs_[i].finish);
  }
  totals_.shortage = min_dwell_ > 0 ? totals_.shortage_within + shortage_around() : 0;
}

// What is missing between each stage's last request and its first of the next iteration.
Time Replay::shortage_around() const {
  Time sum = 0;
  for (Index s = 0; s < problem_.num_stages; ++s) {
    if (problem_.stage_begin[s] == problem_.stage_begin[s + 1]) continue;
    const OperationRun& end = runs_[problem_.number_of[problem_.stage_begin[s + 1] - 1]];
    if (end.last_request == kNone) continue;
    Index first = problem_.number_of[problem_.stage_begin[s]];
    while (!makes_request(first)) first = problem_.operations[first].after;
    const Time dwell = totals_.makespan + request_time(first) - end.requested_at;
    sum += std::max<Time>(0, min_dwell_ - dwell);
  }
  return sum;
}

void Replay::reach(Index i) {
  if (reached_[i] != Reached::kNo) return;
  reached_[i] = Reached::kByOthers;
  ++num_reached_;
}

void Replay::forget_reached(Index from) {
  for (Index i = from; num_reached_ > 0; ++i) {
    num_reached_ -= reached_[i] != Reached::kNo;
    reached_[i] = Reached::kNo;
  }
}

bool Replay::change(const std::vector<Change>& changes, const Budget& budget) {
  replaced_rows_.clear();
  replaced_initial_clocks_.clear();
  replaced_runs_.clear();
  replaced_totals_ = totals_;
  changed_from_ = kNever;
  changed_to_ = 0;
  const ChangedRange range = set_rows(changes);
  const Index first_at_new_clock = update_initial_clocks(changes);
  for (Index i = std::min(range.first, first_at_new_clock); num_reached_ > 0; ++i) {
    if (reached_[i] == Reached::kNo) continue;
    const bool is_named = reached_[i] == Reached::kByName;
    reached_[i] = Reached::kNo;
    --num_reached_;
    const OperationRun old_run = runs_[i];
    replay(i);
    const OperationRun& run = runs_[i];
    const bool same_clocks = run.same_clocks(old_run);
    const bool awaits_clock = run.awaits_clock() || old_run.awaits_clock();
    const Index after = problem_.operations[i].after;
    // A request that is still to come reaches later operations of the stage.
    if (after != kNone && (awaits_clock || !same_clocks)) reach(after);
    // Where the clock of the next is asked for ahead depends on how this one runs.
    const bool moves_request = asks_ahead_ && (is_named || run.start != old_run.start);
    if (after != kNone && moves_request) reach(after);
    const bool same = same_clocks && run.same_times_and_cost(old_run);
    if (same && !is_named && !awaits_clock) continue;
    // What runs may differ though it takes as long and as much: the clock changes at another time.
    changed_from_ = std::min({changed_from_, run.start, old_run.start});
    changed_to_ = std::max({changed_to_, run.finish, old_run.finish});
    if (same) continue;
    replaced_runs_.emplace_back(i, old_run);
    totals_.cost += run.cost - old_run.cost;
    totals_.shortage_within += run.shortage - old_run.shortage;
    if (run.finish != old_run.finish) {
      for (Index e = problem_.succs.begin[i]; e < problem_.succs.begin[i + 1]; ++e) {
        reach(problem_.succs.other[e]);
      }
    }
    if (exceeds(budget, i, i > range.settled)) {
      forget_reached(i + 1);
      return false;
    }
  }
  measure();
  return true;
}

// Takes the rows that a change names.
Replay::ChangedRange Replay::set_rows(const std::vector<Change>& changes) {
  ChangedRange range{problem_.num_operations, 0};
  for (const auto& [i, row] : changes) {
    replaced_rows_.push_back({i, row_[i]});
    row_[i] = row;
    reach(i);
    reached_[i] = Reached::kByName;
    range.first = std::min(range.first, i);
    range.settled = std::max(range.settled, i + kSettling * problem_.num_stages);
  }
  return range;
}

// Begins stages with the clocks that their new last requests leave. Returns the first operation
// that this reaches, or num_operations.
Index Replay::update_initial_clocks(const std::vector<Change>& changes) {
  Index first_reached = problem_.num_operations;
  if (latency_ == 0 && min_dwell_ == 0) return first_reached;
  for (const Change& change : changes) {
    const Index stage = problem_.operations[change.operation].stage;
    const Index left = clock_left(stage);
    if (left == initial_clock_[stage]) continue;
    replaced_initial_clocks_.emplace_back(stage, initial_clock_[stage]);
    initial_clock_[stage] = left;
    const Index first_of_stage = problem_.number_of[problem_.stage_begin[stage]];
    reach(first_of_stage);
    first_reached = std::min(first_reached, first_of_stage);
  }
  return first_reached;
}

// Whether a change cannot be worth its budget any more, operation i being replayed last. What
// shortage there is counts only once a change has settled.
bool Replay::exceeds(const Budget& budget, Index i, bool has_settled) const {
  const Time late = std::max<Time>(0, runs_[i].finish + budget.tail[i] - budget.free);
  const Time missing = has_settled ? totals_.shortage_within - replaced_totals_.shortage_within : 0;
  if (late <= 0 && missing <= 0) return false;
  return static_cast<double>(totals_.cost - replaced_totals_.cost) +
             budget.late_price * static_cast<double>(late) +
             budget.short_price * static_cast<double>(missing) >
         budget.most;
}

void Replay::exchange_with_replaced() {
  for (auto& [i, row] : replaced_rows_) std::swap(row_[i], row);
  for (auto& [s, clock] : replaced_initial_clocks_) std::swap(initial_clock_[s], clock);
  for (auto& [i, run] : replaced_runs_) std::swap(runs_[i], run);
  std::swap(totals_, replaced_totals_);
}

// Rises of power within a span of time, above that of waiting, by time, into rises_.
void Replay::collect_rises(Time from, Time to) const {
  rises_.clear();
  for (Index s = 0; s < problem_.num_stages; ++s) {
    const auto begin = problem_.number_of.begin() + problem_.stage_begin[s];
    const auto end = problem_.number_of.begin() + problem_.stage_begin[s + 1];
    auto operation =
        std::partition_point(begin, end, [&](Index i) { return runs_[i].finish <= from; });
    for (; operation != end && runs_[*operation].start < to; ++operation) {
      collect_rises_of_operation(*operation, from, to);
    }
  }
  std::sort(rises_.begin(), rises_.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
}

void Replay::collect_rises_of_operation(Index i, Time from, Time to) const {
  const Power waiting = problem_.waiting[problem_.operations[i].stage];
  const auto draw = [&](Time begin, Time end, Power power) {
    if (end <= from || begin >= to || begin == end) return;
    const Power rise = power - waiting;
    rises_.emplace_back(std::max(begin, from), rise);
    rises_.emplace_back(std::min(end, to), -rise);
  };
  parts_.clear();
  parts(i, &parts_);
  for (const Part& part : parts_) {
    const Problem::Row& row = problem_.rows[part.row];
    const bool is_whole_row = part.end - part.begin == row.time;
    if (!is_whole_row) {
      draw(part.begin, part.end, row.power);
      continue;
    }
    Time begin = part.begin;
    for (Index k = row.first_slice; k < row.end_slice; ++k) {
      const bool is_last = k + 1 == row.end_slice;
      const Time slice_end = std::min(part.end, begin + problem_.slices[k].time);
      const Time end = is_last ? part.end : slice_end;
      draw(begin, end, problem_.slices[k].power);
      begin = end;
    }
  }
}

void Replay::power_steps(std::vector<Time>* times, std::vector<Power>* power) const {
  collect_rises(0, makespan());
  times->assign(1, 0);
  power->clear();
  Energy level = problem_.total_waiting;
  auto rise = rises_.begin();
  for (;;) {
    const Time at = rise == rises_.end() ? makespan() : rise->first;
    const bool starts = at == times->back();
    if (!starts) {
      if (level > kMostPower) throw std::overflow_error("power is out of range");
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

Energy Replay::energy_above_cap(Power cap, Time from, Time to) const {
  to = std::min(to, makespan());
  collect_rises(from, to);
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
      most = std::max(most, problem_.succs.lag[e] + runs_[j].finish - runs_[j].start + (*tail)[j]);
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

void makespans(const Problem& problem, const Index* rows, Machine machine, const double* factors,
               int64_t runs, Time* out) {
  Replay replay(problem, machine, 0);
  replay.choose(rows);
  if (machine.latency == 0) return makespans_on_time(problem, replay, factors, runs, out);
  for (int64_t r = 0; r < runs; ++r) {
    const double* of_run = factors + r * problem.num_operations;
    r == 0 ? replay.run(of_run) : replay.run_again(of_run);
    out[r] = replay.makespan();
  }
}

}  // namespace envplan
