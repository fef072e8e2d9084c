// Small random changes to a choice of rows: what annealing tries.
//
// A move is one of: another row for one operation; the clock of a neighbour for it; another clock
// for a whole run of operations at one clock, maybe that of the run before or after; one row for a
// stretch of operations of one table; one operation slower and one near it faster. Where changes of
// clock count, also: one clock for neighbouring operations that take about as long with it; the
// border between two runs elsewhere; one run slower and one near it faster; another clock for a
// part of a run.
//
// Contract: the problem must outlive this. propose() names no operation twice and none that stays
// as it is; it proposes nothing where the move that was drawn is not possible. A new move is a
// method and a line in propose().
#pragma once

#include <algorithm>
#include <vector>

#include "random.hpp"
#include "replay.hpp"

namespace envplan {

class Moves {
 public:
  // runs: whether to propose changes to runs of one clock, too, which is for where changes of clock
  // count: they have a price, come late, or must be held.
  Moves(const Problem& problem, bool runs) : problem_(problem) {
    for (Index i = 0; i < problem_.num_operations; ++i) {
      if (problem_.operations[i].end_row - problem_.operations[i].first_row > 1)
        movable_.push_back(i);
    }
    add(2, &Moves::shift);
    add(1, &Moves::take_neighbours_clock);
    add(2, &Moves::change_run);
    add(1, &Moves::change_stretch);
    add(2, &Moves::trade);
    if (!runs) return;
    add(2, &Moves::merge);
    add(4, &Moves::shift_border);
    add(4, &Moves::trade_runs);
    add(4, &Moves::split);
  }

  // Operations with more than one row, by number.
  const std::vector<Index>& movable() const { return movable_; }

  // The move proposed last.
  const std::vector<Change>& changes() const { return changes_; }

  // A move from rows (by number, over all tables), of which there must be movable ones.
  const std::vector<Change>& propose(const std::vector<Index>& rows, Random* random) {
    rows_ = rows.data();
    random_ = random;
    changes_.clear();
    const Index i = movable_[random->below(static_cast<Index>(movable_.size()))];
    const Kind kind = kinds_[random->below(static_cast<Index>(kinds_.size()))];
    (this->*kind)(i);
    return changes_;
  }

 private:
  static constexpr Index kReach = 8;        // rows by which a move shifts an operation at least
  static constexpr Index kStretch = 16;     // alike operations that one move shifts together
  static constexpr Index kNeighbours = 48;  // how far apart, in number, a move trades time
  static constexpr Index kMergeBits = 6;
  static constexpr Index kBorder = 12;       // operations by which the border of a run shifts
  static constexpr Index kLongestRun = 512;  // operations of one clock that a move shifts together

  // A kind of move, which changes an operation and perhaps others.
  using Kind = void (Moves::*)(Index);
  void add(int weight, Kind kind) { kinds_.insert(kinds_.end(), weight, kind); }

  const Problem::Operation& op(Index i) const { return problem_.operations[i]; }
  Index clock(Index i) const { return problem_.rows[rows_[i]].clock; }
  bool coin() { return random_->below(2) == 1; }

  void change(Index i, Index row) {
    if (row != rows_[i]) changes_.push_back({i, row});
  }

  // Takes i to the row of its own config that stands for a clock.
  void change_clock(Index i, Index to) {
    if (clock(i) != kNone) change(i, problem_.row_at(rows_[i], to));
  }

  // By how many rows a move shifts i at most: more where its table is long.
  Index reach(Index i) const { return std::max(kReach, (op(i).end_row - op(i).first_row) / 12); }

  // A row of i near its own.
  Index shifted(Index i) {
    const Index by = 1 + random_->below(reach(i));
    return std::clamp(coin() ? rows_[i] - by : rows_[i] + by, op(i).first_row, op(i).end_row - 1);
  }

  void take_neighbours_clock(Index i) {
    const Index neighbour = coin() ? op(i).before : op(i).after;
    if (neighbour != kNone && clock(neighbour) != kNone) change_clock(i, clock(neighbour));
  }

  void shift(Index i) { change(i, shifted(i)); }

  // Neighbours on a stage at one clock, from the first to the last.
  struct Run {
    Index first, last;
  };

  Run run_of(Index i) const {
    Run run{i, i};
    const auto alike = [&](Index j) { return j != kNone && clock(j) == clock(i); };
    for (Index k = 0; k < kLongestRun && alike(op(run.first).before); ++k)
      run.first = op(run.first).before;
    for (Index k = 0; k < kLongestRun && alike(op(run.last).after); ++k)
      run.last = op(run.last).after;
    return run;
  }

  // Two runs may be parts of one that is longer than kLongestRun. Numbers ascend on a stage.
  bool overlap(Run one, Run other) const {
    if (op(one.first).stage != op(other.first).stage) return false;
    return one.first <= other.last && other.first <= one.last;
  }

  void change_clocks(Run run, Index to) {
    for (Index j = run.first;; j = op(j).after) {
      change_clock(j, to);
      if (j == run.last) return;
    }
  }

  void change_run(Index i) {
    if (clock(i) == kNone) return;
    const Run run = run_of(i);
    Index to = problem_.rows[shifted(i)].clock;
    enum Source { kShiftedRow, kRunBefore, kRunAfter };
    const Index source = random_->below(3);
    const Index neighbour = source == kRunBefore ? op(run.first).before : op(run.last).after;
    if (source != kShiftedRow && neighbour != kNone) to = clock(neighbour);
    if (to != kNone) change_clocks(run, to);
  }

  // A clock near another one, the nearer the likelier.
  Index near(Index at, bool higher) {
    const Index by = 1 + random_->below(1 + random_->below(kReach));
    return std::clamp(higher ? at + by : at - by, 0, problem_.num_clocks - 1);
  }

  // A run of operations gives some at its end to the next run, or takes some.
  void shift_border(Index i) {
    if (clock(i) == kNone) return;
    Index last = run_of(i).last;
    const Index next = op(last).after;
    if (next == kNone || clock(next) == kNone) return;
    Index count = 1 + random_->below(1 + random_->below(kBorder));
    if (coin()) {
      const Index to = clock(last);
      for (Index j = next; j != kNone && count > 0; j = op(j).after, --count) change_clock(j, to);
    } else {
      const Index to = clock(next);
      for (Index j = last; j != kNone && count > 0; j = op(j).before, --count) change_clock(j, to);
    }
  }

  // A run gets slower, and one that is near in time faster.
  void trade_runs(Index i) {
    const Index j = i + 1 + random_->below(kNeighbours);
    if (j >= problem_.num_operations || clock(i) == kNone || clock(j) == kNone) return;
    const Run one = run_of(i), other = run_of(j);
    if (overlap(one, other)) return;
    const bool higher = coin();
    const Index to = near(clock(i), higher);
    change_clocks(other, near(clock(j), !higher));
    change_clocks(one, to);
  }

  // Some operations of a run, from i on, get a clock of their own.
  void split(Index i) {
    if (clock(i) == kNone) return;
    const Index to = near(clock(i), coin());
    Index count = 1 + random_->below(1 << random_->below(kMergeBits + 1));
    for (Index j = i; j != kNone && count > 0; j = op(j).after, --count) change_clock(j, to);
  }

  // One clock for some operations from i on, at which they take about as long together.
  void merge(Index i) {
    if (clock(i) == kNone) return;
    span_.clear();
    const Index length = 2 + random_->below(1 << random_->below(kMergeBits));
    Time now = 0;
    for (Index j = i; j != kNone && static_cast<Index>(span_.size()) < length; j = op(j).after) {
      if (clock(j) == kNone) continue;
      span_.push_back(j);
      now += problem_.rows[rows_[j]].time;
    }
    Index to = clock(i);
    while (to + 1 < problem_.num_clocks && time_of_span(to) > now) ++to;
    while (to > 0 && time_of_span(to - 1) <= now) --to;
    if (to > 0 && coin()) --to;
    for (const Index j : span_) change_clock(j, to);
  }

  Time time_of_span(Index at) const {
    Time time = 0;
    for (const Index j : span_) time += problem_.rows[problem_.row_at(rows_[j], at)].time;
    return time;
  }

  void change_stretch(Index i) {
    const Index to = coin() ? shifted(i) : rows_[i];
    Index count = 1 + random_->below(kStretch);
    for (Index j = i; j != kNone && count > 0; j = op(j).after) {
      if (op(j).table != op(i).table) continue;
      change(j, to);
      --count;
    }
  }

  void trade(Index i) {
    const Index j = i + 1 + random_->below(kNeighbours);
    if (j >= problem_.num_operations) return;
    const Index sign = coin() ? 1 : -1;
    const Index row_of_i = rows_[i] + sign * (1 + random_->below(reach(i) / 2));
    const Index row_of_j = rows_[j] - sign * (1 + random_->below(reach(j) / 2));
    const auto has = [&](Index k, Index row) {
      return row >= op(k).first_row && row < op(k).end_row;
    };
    if (!has(i, row_of_i) || !has(j, row_of_j)) return;
    change(i, row_of_i);
    change(j, row_of_j);
  }

  const Problem& problem_;
  std::vector<Kind> kinds_;  // one is drawn, those of more weight being there several times
  std::vector<Index> movable_;
  std::vector<Change> changes_;
  std::vector<Index> span_;
  const Index* rows_ = nullptr;
  Random* random_ = nullptr;
};

}  // namespace envplan
