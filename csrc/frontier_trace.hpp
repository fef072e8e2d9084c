// The record of a walk along a frontier: every breakpoint, and enough snapshots to return to any T.
//
// Memory: two networks (the one that walks and the one that optimum_at() moves) and between 8 and
// 256 snapshots, a GiB together at most but for the 8. When there are as many as may be, every
// second one is dropped.
//
// Thread safety: one thread at a time. optimum_at() moves a cursor, so it is no exception.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernel.hpp"

namespace envplan {

class FrontierTrace {
 public:
  // Begins where `start` stands, which is copied. Records from the first breakpoint whose flow
  // below it is more than `from_flow` (T_star where from_flow is the power that waiting draws), or
  // from where it begins if that is negative.
  FrontierTrace(const ParametricFlow& start, Power from_flow)
      : walk_(start), cursor_(start), from_flow_(from_flow), start_time_(start.time()) {}

  // Walks on until about `work` nodes have been touched. Returns false when it has come to `until`
  // and recorded a breakpoint at least, to T_min, or to where watched arcs have no period. May be
  // called again with an earlier `until`.
  bool extend(std::uint64_t work, Time until = 0);

  Time start_time() const { return start_time_; }
  const ParametricFlow& walk() const { return walk_; }

  // Breakpoints by descending time: at times()[k] the cost above all-slowest is costs()[k], and
  // flows()[k] is the slope -dC/dT just below it (at T_min there is nothing below). The first and
  // the last may be no breakpoints but where the walk began and was told to end.
  const std::vector<Time>& times() const { return times_; }
  const std::vector<Power>& flows() const { return flows_; }
  const std::vector<Energy>& costs() const { return costs_; }

  // From now on extend() ends at a breakpoint where these arcs, in the caller's numbering, have no
  // period. Without any it does at none. Throws std::invalid_argument where there is no such arc.
  void watch(const std::vector<ParametricFlow::ShiftedArc>& arcs);
  // The period of the watched arcs at each breakpoint; kNoPeriod where nothing was watched.
  const std::vector<Time>& periods() const { return periods_; }

  // The optimum at any T between the last recorded breakpoint and the first, walked to from the
  // snapshot above it. The reference is good until the next call. Throws std::out_of_range for
  // another T.
  const ParametricFlow& optimum_at(Time t);

 private:
  void record();
  std::size_t max_snapshots() const;

  static constexpr std::size_t kMaxSnapshots = 256, kMinSnapshots = 8, kSnapshotBytes = 1 << 30;
  ParametricFlow walk_, cursor_;
  Power from_flow_;
  Time start_time_;
  std::vector<Time> times_;
  std::vector<Power> flows_;
  std::vector<Energy> costs_;
  std::vector<ParametricFlow::Snapshot> snapshots_;  // of breakpoint 0, stride_, 2 stride_, ...
  std::size_t stride_ = 1;
  std::vector<ParametricFlow::ShiftedArc> watched_;
  std::vector<Time> periods_;
};

}  // namespace envplan
