// How often a choice of rows asks for another clock.
//
// An operation makes a request where its row wants another clock than its stage has asked for last,
// and a stage begins an iteration with the clock that its last row leaves (replay.hpp). So whether
// an operation makes one depends on its own row and on the last one before it, around the ring of
// its stage, that has a clock.
#pragma once

#include <vector>

#include "replay.hpp"

namespace envplan {

// The requests of a choice, counted anew where rows change. The problem must outlive this.
class ClockChanges {
 public:
  // rows: by number, over all tables.
  ClockChanges(const Problem& problem, const std::vector<Index>& rows);

  Index count() const { return count_; }

  // Takes other rows. No operation may be named twice.
  void apply(const std::vector<Change>& changes);
  // Goes back to before the last apply().
  void revert();

 private:
  Index clock(Index i) const { return problem_.rows[rows_[i]].clock; }
  Index next(Index i) const;
  Index before(Index i) const;
  bool makes_request(Index i) const;
  void reach(Index i);
  Index requests_of_reached() const;

  const Problem& problem_;
  std::vector<Index> rows_;
  Index count_ = 0, count_before_ = 0;
  std::vector<Change> replaced_;
  std::vector<Index> reached_;  // whose requests the changes may have altered
  std::vector<bool> is_reached_;
};

inline ClockChanges::ClockChanges(const Problem& problem, const std::vector<Index>& rows)
    : problem_(problem), rows_(rows), is_reached_(rows.size(), false) {
  for (Index i = 0; i < problem_.num_operations; ++i) count_ += makes_request(i);
}

// The next operation around the ring of a stage.
inline Index ClockChanges::next(Index i) const {
  const Problem::Operation& op = problem_.operations[i];
  return op.after != kNone ? op.after : problem_.number_of[problem_.stage_begin[op.stage]];
}

inline Index ClockChanges::before(Index i) const {
  const Problem::Operation& op = problem_.operations[i];
  return op.before != kNone ? op.before
                            : problem_.number_of[problem_.stage_begin[op.stage + 1] - 1];
}

inline bool ClockChanges::makes_request(Index i) const {
  const Index wanted = clock(i);
  if (wanted == kNone) return false;
  Index j = before(i);
  while (clock(j) == kNone) j = before(j);
  return problem_.rows[rows_[j]].leaves != wanted;
}

inline void ClockChanges::apply(const std::vector<Change>& changes) {
  count_before_ = count_;
  replaced_.clear();
  for (const Change& change : changes) {
    reach(change.operation);
    // The next one with a clock finds another; whether it has one may change with its row.
    Index j = next(change.operation);
    while (clock(j) == kNone && j != change.operation) {
      reach(j);
      j = next(j);
    }
    reach(j);
  }
  count_ -= requests_of_reached();
  for (const auto& [i, row] : changes) {
    replaced_.push_back({i, rows_[i]});
    rows_[i] = row;
  }
  count_ += requests_of_reached();
  for (const Index i : reached_) is_reached_[i] = false;
  reached_.clear();
}

inline void ClockChanges::revert() {
  for (const auto& [i, row] : replaced_) rows_[i] = row;
  count_ = count_before_;
}

inline void ClockChanges::reach(Index i) {
  if (is_reached_[i]) return;
  is_reached_[i] = true;
  reached_.push_back(i);
}

inline Index ClockChanges::requests_of_reached() const {
  Index requests = 0;
  for (const Index i : reached_) requests += makes_request(i);
  return requests;
}

}  // namespace envplan
