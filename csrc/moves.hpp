// Small random changes to a choice of rows: what annealing tries.
//
// A move is one of: another row for one operation; the clock of a neighbour for it; another clock
// for a whole run of operations at one clock, maybe that of the run before or after; one row for a
// stretch of operations of one table; one operation slower and one near it faster; one clock for
// neighbouring operations that take about as long with it.
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
  // merges: whether to propose one clock for several operations, which is for where changes of
  // clock have a price.
  Moves(const Problem& problem, bool merges) : problem_(problem), num_kinds_(merges ? 10 : 8) {
    for (Index i = 0; i < problem_.num_operations; ++i) {
      if (problem_.operations[i].end_row - problem_.operations[i].first_row > 1)
        movable_.push_back(i);
    }
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
    switch (random->below(num_kinds_)) {
      case 0:
      case 1:
        change(i, shifted(i));
        break;
      case 2:
        take_neighbours_clock(i);
        break;
      case 3:
      case 4:
        change_run(i);
        break;
      case 5:
        change_stretch(i);
        break;
      case 6:
      case 7:
        trade(i);
        break;
      default:
        merge(i);
    }
    return changes_;
  }

 private:
  static constexpr Index kReach = 8;        // rows by which a move shifts an operation at least
  static constexpr Index kStretch = 16;     // alike operations that one move shifts together
  static constexpr Index kNeighbours = 48;  // how far apart, in number, a move trades time
  static constexpr Index kMergeBits = 6;
  static constexpr Index kLongestRun = 512;  // operations of one clock that a move shifts together

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

  void change_run(Index i) {
    const Index run_clock = clock(i);
    if (run_clock == kNone) return;
    Index first = i, end = i;
    const auto alike = [&](Index j) { return j != kNone && clock(j) == run_clock; };
    for (Index k = 0; k < kLongestRun && alike(op(first).before); ++k) first = op(first).before;
    for (Index k = 0; k < kLongestRun && alike(op(end).after); ++k) end = op(end).after;
    Index to = problem_.rows[shifted(i)].clock;
    enum Source { kShiftedRow, kRunBefore, kRunAfter };
    const Index source = random_->below(3);
    const Index neighbour = source == kRunBefore ? op(first).before : op(end).after;
    if (source != kShiftedRow && neighbour != kNone) to = clock(neighbour);
    if (to == kNone) return;
    for (Index j = first;; j = op(j).after) {
      change_clock(j, to);
      if (j == end) return;
    }
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
  const Index num_kinds_;  // those of propose(), some of them more than once
  std::vector<Index> movable_;
  std::vector<Change> changes_;
  std::vector<Index> span_;
  const Index* rows_ = nullptr;
  Random* random_ = nullptr;
};

}  // namespace envplan
