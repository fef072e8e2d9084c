// Maximum flow with lower bounds, and the minimum cut that proves it.
//
// Problem. A directed graph whose arc a carries a flow in [lower[a], upper[a]], conserved at every
// node but the source and the sink. Find the greatest net flow out of the source, and a set S of
// nodes with the source in it and the sink not such that
//     value = sum of upper over arcs leaving S - sum of lower over arcs entering S.
//
// Method. Lower bounds become supplies and demands of the nodes at their ends; a first maximum flow
// from a super source to a super sink settles them (Ford and Fulkerson 1962, section II.3), a
// second one raises the result from source to sink. Both are Dinic's (1970) blocking flows, O(n^2
// m), with distances counted from the sink so that no search starts into a dead end. Nothing
// recurses.
//
// Arithmetic is exact in int64. Unlimited arcs never lose capacity. The sum of all lower and all
// limited upper bounds must stay below kMaxTotal, so no sum inside can overflow.
//
// Deterministic: the same arrays give the same flow and the same cut.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

namespace envplan::maxflow {

using Flow = std::int64_t;
using Index = std::int32_t;

constexpr Flow kInfinite = std::numeric_limits<Flow>::max() / 2;  // as upper: no limit
constexpr Flow kMaxTotal = Flow{1} << 60;

enum class Status : int { kOptimal = 0, kInfeasible = 1, kUnbounded = 2 };

struct Result {
  Status status;
  Flow value;
};

// Solves the problem above.
//
// Sizes, all arrays allocated by the caller, outputs overwritten whole:
//   tail, head       (num_arcs)   nodes in [0, num_nodes); loops and parallel arcs are welcome
//   lower            (num_arcs)   >= 0
//   upper            (num_arcs)   >= lower; kInfinite or more means no limit
//   flow_out         (num_arcs)
//   source_side_out  (num_nodes)  1 for the nodes of a set S, else 0
//
// Returns, by status:
//   kOptimal     value: the maximum, negative if the bounds force a net flow into the source.
//                flow_out: a flow of that value. S: the smallest minimum cut's source side.
//   kInfeasible  no flow keeps the bounds. S: a violated cut, with both source and sink in it or
//                neither. value: by how much lower bounds entering S exceed upper bounds leaving
//                it. flow_out: 0 everywhere.
//   kUnbounded   a path without limits leads from source to sink. value: kInfinite. flow_out: some
//                flow that keeps the bounds. S: the nodes that unlimited arcs reach from the
//                source.
//
// Throws std::invalid_argument for an index or bound out of range or source == sink, and
// std::overflow_error if the bounds add up to kMaxTotal or more. Allocates O(num_nodes + num_arcs).
Result solve(Index num_nodes, Index num_arcs, const Index* tail, const Index* head,
             const Flow* lower, const Flow* upper, Index source, Index sink, Flow* flow_out,
             std::uint8_t* source_side_out);

namespace detail {

// Edges 2a and 2a + 1 are an arc and its reverse; what is left of each is in left_.
class Residual {
 public:
  explicit Residual(Index num_nodes) : num_nodes_(num_nodes) {}

  void add(Index tail, Index head, Flow capacity) {
    to_.push_back(head);
    to_.push_back(tail);
    left_.push_back(capacity);
    left_.push_back(0);
  }

  // Sorts the edges by tail; call it after the last add() and before anything below.
  void index() {
    begin_.assign(num_nodes_ + 1, 0);
    for (std::size_t e = 0; e < to_.size(); ++e) ++begin_[to_[e ^ 1] + 1];
    for (Index v = 0; v < num_nodes_; ++v) begin_[v + 1] += begin_[v];
    edges_.resize(to_.size());
    std::vector<Index> next(begin_.begin(), begin_.end() - 1);
    for (std::size_t e = 0; e < to_.size(); ++e) {
      edges_[next[to_[e ^ 1]]++] = static_cast<Index>(e);
    }
  }

  // Takes arcs from `first` on out of the graph.
  void close_from(Index first) {
    std::fill(left_.begin() + 2 * std::size_t(first), left_.end(), 0);
  }

  Flow pushed(Index arc) const { return left_[2 * std::size_t(arc) + 1]; }

  // Adds flow from `source` to `sink` until none can be added; returns how much that was.
  Flow augment(Index source, Index sink) {
    Flow total = 0;
    while (measure(source, sink)) total += block(source, sink);
    return total;
  }

  // Marks the nodes that edges with at least `least` left reach from `root`. reached: (num_nodes)
  void reach(Index root, Flow least, std::vector<std::uint8_t>* reached) {
    reached->assign(num_nodes_, 0);
    (*reached)[root] = 1;
    queue_.assign(1, root);
    for (std::size_t k = 0; k < queue_.size(); ++k) {
      for (Index i = begin_[queue_[k]]; i < begin_[queue_[k] + 1]; ++i) {
        const Index v = to_[edges_[i]];
        if ((*reached)[v] || left_[edges_[i]] < least) continue;
        (*reached)[v] = 1;
        queue_.push_back(v);
      }
    }
  }

 private:
  // Distances to the sink, as far as the source needs them; false if it has no way there.
  bool measure(Index source, Index sink) {
    distance_.assign(num_nodes_, kFar);
    distance_[sink] = 0;
    queue_.assign(1, sink);
    for (std::size_t k = 0; k < queue_.size() && distance_[source] == kFar; ++k) {
      const Index u = queue_[k];
      for (Index i = begin_[u]; i < begin_[u + 1]; ++i) {
        const Index v = to_[edges_[i]];
        if (distance_[v] != kFar || left_[edges_[i] ^ 1] == 0) continue;
        distance_[v] = distance_[u] + 1;
        queue_.push_back(v);
      }
    }
    return distance_[source] != kFar;
  }

  // Saturates every shortest path. next_[v] is the first edge of v that may still lead on.
  Flow block(Index source, Index sink) {
    next_.assign(begin_.begin(), begin_.end() - 1);
    path_.clear();
    Flow total = 0;
    Index u = source;
    while (true) {
      if (u == sink) {
        total += saturate(&u);
      } else if (const Index e = onward(u); e >= 0) {
        path_.push_back(e);
        u = to_[e];
      } else if (u == source) {
        return total;
      } else {
        u = to_[path_.back() ^ 1];
        path_.pop_back();
        ++next_[u];
      }
    }
  }

  Index onward(Index u) {
    for (Index& i = next_[u]; i < begin_[u + 1]; ++i) {
      const Index e = edges_[i];
      if (left_[e] > 0 && distance_[to_[e]] == distance_[u] - 1) return e;
    }
    return -1;
  }

  // Pushes what the path can take and cuts it back to before the first edge that is full.
  Flow saturate(Index* end) {
    Flow amount = kInfinite;
    std::size_t first = 0;
    for (std::size_t k = 0; k < path_.size(); ++k) {
      if (left_[path_[k]] < amount) {
        amount = left_[path_[k]];
        first = k;
      }
    }
    for (const Index e : path_) {
      if (left_[e] < kInfinite) left_[e] -= amount;
      if (left_[e ^ 1] < kInfinite) left_[e ^ 1] += amount;
    }
    *end = to_[path_[first] ^ 1];
    path_.resize(first);
    return amount;
  }

  static constexpr Index kFar = std::numeric_limits<Index>::max();

  Index num_nodes_;
  std::vector<Index> to_;     // (edges) node at the end of each
  std::vector<Flow> left_;    // (edges) kInfinite stays kInfinite
  std::vector<Index> begin_;  // (num_nodes + 1) edges of v: edges_[begin_[v], begin_[v + 1])
  std::vector<Index> edges_;
  std::vector<Index> distance_, next_, queue_, path_;
};

inline void check(Index num_nodes, Index num_arcs, const Index* tail, const Index* head,
                  const Flow* lower, const Flow* upper, Index source, Index sink) {
  const auto inside = [num_nodes](Index v) { return 0 <= v && v < num_nodes; };
  if (!inside(source) || !inside(sink) || source == sink) {
    throw std::invalid_argument("source and sink must be two nodes of the graph");
  }
  if (num_arcs < 0 || num_arcs > std::numeric_limits<Index>::max() / 2 - num_nodes - 2) {
    throw std::invalid_argument("the number of arcs is out of range");
  }
  Flow total = 0;
  for (Index a = 0; a < num_arcs; ++a) {
    if (!inside(tail[a]) || !inside(head[a])) {
      throw std::invalid_argument("arc " + std::to_string(a) + " ends outside the graph");
    }
    if (lower[a] < 0 || lower[a] > upper[a]) {
      throw std::invalid_argument("arc " + std::to_string(a) + " needs 0 <= lower <= upper");
    }
    const Flow limited = upper[a] < kInfinite ? upper[a] : 0;
    if (lower[a] >= kMaxTotal || limited >= kMaxTotal || lower[a] + limited >= kMaxTotal - total) {
      throw std::overflow_error("the bounds add up to 2^60 or more");
    }
    total += lower[a] + limited;
  }
}

}  // namespace detail

inline Result solve(Index num_nodes, Index num_arcs, const Index* tail, const Index* head,
                    const Flow* lower, const Flow* upper, Index source, Index sink, Flow* flow_out,
                    std::uint8_t* source_side_out) {
  detail::check(num_nodes, num_arcs, tail, head, lower, upper, source, sink);
  const Index super_source = num_nodes, super_sink = num_nodes + 1;
  detail::Residual graph(num_nodes + 2);
  std::vector<Flow> supply(num_nodes, 0);
  for (Index a = 0; a < num_arcs; ++a) {
    graph.add(tail[a], head[a], upper[a] < kInfinite ? upper[a] - lower[a] : kInfinite);
    supply[head[a]] += lower[a];
    supply[tail[a]] -= lower[a];
  }
  // The first flow need not be conserved at the source and the sink, only at both together.
  graph.add(source, sink, kInfinite);
  graph.add(sink, source, kInfinite);
  Flow needed = 0;
  for (Index v = 0; v < num_nodes; ++v) {
    if (supply[v] > 0) graph.add(super_source, v, supply[v]);
    if (supply[v] < 0) graph.add(v, super_sink, -supply[v]);
    needed += std::max<Flow>(supply[v], 0);
  }
  graph.index();

  std::vector<std::uint8_t> side;
  const auto report = [&](Status status, Flow value) {
    std::copy_n(side.begin(), num_nodes, source_side_out);
    const bool feasible = status != Status::kInfeasible;
    for (Index a = 0; a < num_arcs; ++a) flow_out[a] = feasible ? lower[a] + graph.pushed(a) : 0;
    return Result{status, value};
  };

  const Flow met = graph.augment(super_source, super_sink);
  if (met < needed) {
    graph.reach(super_source, 1, &side);
    return report(Status::kInfeasible, needed - met);
  }
  graph.close_from(num_arcs);
  graph.reach(source, kInfinite, &side);
  if (side[sink]) return report(Status::kUnbounded, kInfinite);

  graph.augment(source, sink);
  graph.reach(source, 1, &side);
  Flow value = 0;
  for (Index a = 0; a < num_arcs; ++a) {
    if (side[tail[a]] && !side[head[a]]) value += upper[a];
    if (!side[tail[a]] && side[head[a]]) value -= lower[a];
  }
  return report(Status::kOptimal, value);
}

}  // namespace envplan::maxflow
