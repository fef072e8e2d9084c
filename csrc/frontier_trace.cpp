#include "frontier_trace.hpp"

#include <algorithm>
#include <functional>
#include <stdexcept>
#include <utility>

namespace envplan {

bool FrontierTrace::extend(std::uint64_t work, Time until) {
  const std::uint64_t end = walk_.touched() + work;
  if (times_.empty() && from_flow_ < 0) record();
  while (walk_.touched() < end) {
    const bool more = walk_.step(times_.empty() ? 0 : until);
    if (walk_.flow() > from_flow_ || !more) record();
    const bool period_lost = !watched_.empty() && !periods_.empty() && periods_.back() == kNoPeriod;
    if (!more || period_lost) return false;
  }
  return true;
}

std::size_t FrontierTrace::max_snapshots() const {
  const std::size_t bytes = walk_.num_nodes() * sizeof(Time) + walk_.num_arcs() * sizeof(Power);
  return std::clamp(kSnapshotBytes / bytes, kMinSnapshots, kMaxSnapshots) / 2 * 2;
}

// Records where the walk stands; where it has stood there before, what has changed.
void FrontierTrace::record() {
  if (!times_.empty() && times_.back() == walk_.time()) {
    flows_.back() = walk_.flow();
    periods_.back() = walk_.period(watched_);
    return;
  }
  if (times_.size() % stride_ == 0) {
    if (snapshots_.size() == max_snapshots()) {
      for (std::size_t k = 1; 2 * k < snapshots_.size(); ++k) {
        snapshots_[k] = std::move(snapshots_[2 * k]);
      }
      snapshots_.resize(snapshots_.size() / 2);
      stride_ *= 2;
    }
    snapshots_.push_back(walk_.snapshot());
  }
  times_.push_back(walk_.time());
  flows_.push_back(walk_.flow());
  costs_.push_back(walk_.cost());
  periods_.push_back(walk_.period(watched_));
}

void FrontierTrace::watch(const std::vector<ParametricFlow::ShiftedArc>& arcs) {
  watched_ = walk_.to_internal_numbering(arcs);
  if (!times_.empty() && times_.back() == walk_.time()) periods_.back() = walk_.period(watched_);
}

const ParametricFlow& FrontierTrace::optimum_at(Time t) {
  const auto later = std::upper_bound(times_.begin(), times_.end(), t, std::greater<>());
  if (later == times_.begin() || t < times_.back()) throw std::out_of_range("no such time");
  const std::size_t snapshot = (later - times_.begin() - 1) / stride_;
  // The cursor goes on from where it stands if that lies between the snapshot and t.
  if (cursor_.time() < t || cursor_.time() > times_[snapshot * stride_]) {
    cursor_.restore(snapshots_[snapshot]);
  }
  while (cursor_.time() > t && cursor_.step(t)) {
  }
  return cursor_;
}

}  // namespace envplan
