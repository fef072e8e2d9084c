// The exact parametric walk along a time-energy frontier.
//
// Problem. A directed acyclic network of events (nodes) and activities (arcs). Activity a may take
// any duration d in [l_a, u_a] at a convex, decreasing, piecewise-linear cost c_a(d). For every T
// find the least total cost such that the longest path from source to sink is at most T.
//
// Idea. The dual is a flow: activity a is a bundle of parallel arcs, and the flow value at T is
// -dC/dT. Flow is sent along longest residual paths first; when no path of the current length T is
// left, the minimum cut says which activities get faster and by how much until the next event.
// (Fulkerson 1961, Kelley 1961, Phillips and Dessouky 1977.) Here that is a primal-dual walk that
// never starts over: event times stay dual feasible, the flow of the last step stays feasible.
//
// Ties. Where activities are alike, many paths get critical at once. So a step takes two searches
// that meet: back from the sink over arcs without slack, which settles the cut's far side, and on
// from the source by slack, which settles the near side and ends where it meets the far one. Then
// every path over a meeting that goes straight, by the order in which both sides were settled, is
// filled at once: a blocking flow (Dinic 1970) for which nothing more is searched. Together the two
// sides are about as many nodes as one search from end to end would settle. Paths that turn back
// between the sides are left to the next step, which then lowers T by nothing.
//
// Arithmetic is exact: times in ns, flow (marginal cost) in uW, cost in fJ = uW * ns. No epsilon.
//
// Curves. A curve is a run of levels j = 0..k with strictly decreasing durations D_0 = u, ...,
// D_k = l and strictly increasing limits s_1, ..., s_k, kInfinite: the activity keeps duration D_j
// while its flow lies strictly between limit[j-1] and limit[j], and may take any duration in
// [D_j, D_(j-1)] when its flow equals limit[j-1]. A constant duration is a curve of one level.
//
// Contract: arrays are copied by the constructor and may be freed after it. Nothing is allocated
// by step() but amortized growth of the record.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <stdexcept>
#include <utility>
#include <vector>

namespace envplan {

using Time = std::int64_t;   // ns
using Power = std::int64_t;  // uW
using Energy = __int128;     // fJ
using Index = std::int32_t;

constexpr Power kInfinite = std::numeric_limits<Power>::max() / 2;
constexpr Time kFar = std::numeric_limits<Time>::max() / 4;  // no sum of two of them overflows

// Borrowed arrays that describe a network; sizes are given in parentheses.
struct Network {
  Index num_nodes;
  Index num_arcs;
  const Index* tail;   // (num_arcs)
  const Index* head;   // (num_arcs)
  const Index* curve;  // (num_arcs) index of the arc's curve
  Index num_curves;
  const Index* curve_begin;  // (num_curves + 1) first level of each curve
  const Time* duration;      // (levels)
  const Power* limit;        // (levels)
  Index source;
  Index sink;
};

class Walk {
 public:
  explicit Walk(const Network& net);

  // Moves to the least total cost at flow value `total` without walking there: takes a guess as far
  // as durations and complementary slackness allow and repairs what is left over. Exact whatever
  // the guess; a good one makes it quick, and saying whether its flow is a rough one makes it
  // quicker. flow: (num_arcs), non-negative; times: of the events, (num_nodes), or null for those
  // that the flow means; both in the caller's numbering.
  void start(const Power* flow, const Time* times, bool rough, Power total);

  // The same at time `at`, or as near to it as T_min or T_max is, from a guess with times.
  void start_at(const Power* flow, const Time* times, Time at);

  // One event of the walk: find the nearest cut or path, lower T (never below `floor`; by
  // nothing where paths of the current length are left), send flow.
  // Returns false when T has reached max(floor, T_min).
  bool step(Time floor);

  Time time() const { return -nodes_[source_].y; }
  Time min_time() const { return min_time_; }
  Time max_time() const { return max_time_; }
  Power flow() const { return flow_; }
  Energy cost() const { return cost_; }
  Index num_nodes() const { return static_cast<Index>(position_.size()); }
  Index num_arcs() const { return static_cast<Index>(arcs_.size()) - 1; }
  std::uint64_t touched() const { return touched_; }

  // Event times in the caller's numbering, source at 0: of all optimal ones those with every event
  // as early as can be. out: (num_nodes)
  void event_times(Time* out) const;
  // Flow on each arc in the caller's numbering. out: (num_arcs)
  void arc_flows(Power* out) const;

  // An arc, another that may be the same a round later, and where they begin and the former ends,
  // in the caller's numbering.
  struct Pair {
    Index arc, later, tail, later_tail, head;
  };
  // The same in our numbering.
  std::vector<Pair> own(std::vector<Pair> pairs) const;
  // How much later the later arcs begin, if they carry the same flow as the others and all begin as
  // much later, those without flow up to their slack; else -1. Pairs are in our numbering.
  Time period(const std::vector<Pair>& pairs) const;

  // A state that restore() returns to exactly.
  struct Snapshot {
    std::vector<Time> y;
    std::vector<Power> flow;
    Power total;
    Energy cost;
  };
  Snapshot snapshot() const;
  void restore(const Snapshot& s);

 private:
  struct alignas(32) Node {  // two to a cache line
    Time y;     // event time relative to the sink (sink 0, source -T): far nodes never move
    Time dist;  // slack distance from where the last search that reached the node began
    std::uint32_t stamp;  // that search
    Index rank;           // position among the nodes that it settled; kUnsettled before
    Index next;           // link that the next path tries first
    Index begin;          // links of the node: links_[begin, next node's begin)
  };
  // An arc as one of its ends sees it, with all that a search needs.
  struct Link {
    Index other;
    Index arc;    // a at the tail of arc a, ~a at its head
    Time ahead;   // slack of sending one unit more to the other end, less y there, plus y here
    Time behind;  // the same the other way; kFar where it would take flow from an arc without
  };
  struct Arc {
    Index out, in;  // its links at the tail and at the head
    Index first_level, last_level, level;
    Index original;
    Power flow;
  };
  // Where the last search met a target: the node before it and the link between them.
  struct Meeting {
    Index node, link;
  };
  static constexpr Index kUnsettled = std::numeric_limits<Index>::max();

  void number_nodes(const Network& net);
  void guess(const Power* flow, const Time* times, Time latest);
  void repair(Power total, bool rough);
  template <bool kForward, class IsTarget>
  Time search(Index from, Time most, IsTarget is_target);
  void lower(Time by);
  Power send(Index from, Meeting meeting, Index to, Power most);
  template <bool kForward>
  bool extend(std::vector<Index>* path, Index start, Index goal);
  template <bool kForward>
  Index way_on(Index v);
  Power room(Index arc) const;
  void add(Index arc, Power amount);
  void set_flow(Index a, Power flow);
  Power floor_of(const Arc& arc) const;
  Time longest_path(bool fastest, std::vector<Time>* at) const;

  void push(Time key, Index node);
  Index pop(Time* key);

  std::vector<Node> nodes_;     // num_nodes + 1: the last one only ends the links
  std::vector<Link> links_;     // sorted by the node that they belong to
  std::vector<Arc> arcs_;       // num_arcs + 1: the last leads back, from the sink to the source
  std::vector<Time> duration_;  // levels
  std::vector<Power> limit_;
  std::vector<Index> position_;  // caller's node -> ours
  std::vector<Index> order_;     // ours -> caller's
  std::vector<Index> near_;      // nodes settled by the last search, nearest first
  std::vector<Meeting> meetings_;
  std::vector<Index> path_back_, path_on_;  // links
  std::vector<std::pair<Time, Index>> heap_;
  Index source_, sink_;
  std::uint32_t stamp_ = 0;
  Time min_time_ = 0, max_time_ = 0;
  Power flow_ = 0;
  Energy cost_ = 0;
  std::uint64_t touched_ = 0;
};

// A walk with its record: every breakpoint of the frontier, and enough snapshots to return to any
// T.
class Trace {
 public:
  // Records from the first breakpoint whose flow below it is more than `from_flow` (T_star where
  // from_flow is the power that waiting draws), or from where the walk stands if that is negative.
  Trace(const Walk& walk, Power from_flow) : walk_(walk), cursor_(walk), from_flow_(from_flow) {}

  // Walks on until about `work` nodes have been touched. Returns false when it has come to `until`
  // and recorded a breakpoint at least, or to T_min. May be called again with an earlier `until`.
  bool run(std::uint64_t work, Time until = 0);

  const Walk& walk() const { return walk_; }
  // Corners by descending time: at time[k] the cost above all-slowest is cost[k], and flow[k] is
  // the slope -dC/dT just below it (at T_min there is nothing below). The last may be no corner
  // but where the walk was told to end.
  const std::vector<Time>& times() const { return times_; }
  const std::vector<Power>& flows() const { return flows_; }
  const std::vector<Energy>& costs() const { return costs_; }

  // From now on run() ends at a corner where pairs have no period. Without pairs it does at none.
  void watch(const std::vector<Walk::Pair>& pairs);
  // The period of the pairs at each corner, and -1 where there were none.
  const std::vector<Time>& periods() const { return periods_; }

  // The optimal state at any T between the last recorded corner and the first; no solving from
  // zero. The reference is good until the next call.
  const Walk& at(Time t);

 private:
  void record();

  // Fewer of a large network: a GiB of them together, but 8 at least.
  static constexpr std::size_t kMaxSnapshots = 256, kMinSnapshots = 8, kSnapshotBytes = 1 << 30;
  std::size_t most_snapshots() const;
  Walk walk_, cursor_;
  Power from_flow_;
  std::vector<Time> times_;
  std::vector<Power> flows_;
  std::vector<Energy> costs_;
  std::vector<Walk::Snapshot> snapshots_;  // of corner 0, stride_, 2 stride_, ...
  std::size_t stride_ = 1;
  std::vector<Walk::Pair> pairs_;
  std::vector<Time> periods_;
};

}  // namespace envplan
