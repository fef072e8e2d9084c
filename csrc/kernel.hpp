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
// never starts over: event times are node potentials that stay dual feasible, the flow of the last
// step stays feasible. The slack of a residual arc is its reduced cost under these potentials; the
// walk is Dijkstra's search on slacks, then Dinic's blocking flow where slack is zero.
//
// Invariant. Between calls of public members the potentials are dual feasible (no residual arc has
// negative slack) and, with the flow, keep complementary slackness: the state is the optimum at
// time(). load_guess() establishes feasibility of durations alone,
// clamp_to_complementary_slackness() gives up flow conservation for slackness, and cancel_excess()
// restores conservation.
//
// Ties. Where activities are alike, many paths get critical at once. So a step takes two searches
// that meet: back from the sink over arcs without slack, which settles the cut's far side, and on
// from the source by slack, which settles the near side and ends where it meets the far one. Then
// every path over a crossing arc that goes straight, by the order in which both sides were settled,
// is filled at once: a blocking flow (Dinic 1970) for which nothing more is searched. Together the
// two sides are about as many nodes as one search from end to end would settle. Paths that turn
// back between the sides are left to the next step, which then lowers T by nothing.
//
// Arithmetic is exact: times in ns, flow (marginal cost) in units of 10 uW, cost in units of
// 10 fJ = 10 uW * 1 ns. No epsilon.
// Durations times nodes are at most 2^58 ns, so that no sum of times overflows; flow stays below
// kInfinite. What would outgrow that throws std::overflow_error.
//
// Curves. A curve is a run of levels j = 0..k with strictly decreasing durations D_0 = u, ...,
// D_k = l and strictly increasing slopes s_1, ..., s_k, kInfinite: the activity keeps duration D_j
// while its flow lies strictly between slope[j-1] and slope[j], and may take any duration in
// [D_j, D_(j-1)] when its flow equals slope[j-1]. A constant duration is a curve of one level.
//
// Contract. Arrays are copied by the constructor and may be freed after it. step() allocates
// nothing but amortized growth of its scratch. An object may be used by one thread at a time;
// different objects share nothing.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <stdexcept>
#include <utility>
#include <vector>

#include "types.hpp"

namespace envplan {

constexpr Power kInfinite = std::numeric_limits<Power>::max() / 2;
constexpr Time kFar = std::numeric_limits<Time>::max() / 4;  // no sum of two of them overflows
constexpr Time kNoPeriod = -1;

// Borrowed arrays that describe a network; sizes are given in parentheses.
struct Network {
  Index num_nodes;
  Index num_arcs;
  const Index* tail;   // (num_arcs)
  const Index* head;   // (num_arcs)
  const Index* curve;  // (num_arcs) index of the arc's curve
  Index num_curves;
  const Index* curve_begin;  // (num_curves + 1) first level of each curve
  Index num_levels;
  const Time* duration;  // (num_levels)
  const Power* slope;    // (num_levels)
  Index source;
  Index sink;
};

// The optimum at one time of the frontier, which moves.
class ParametricFlow {
 public:
  // Stands at T_max. Throws std::invalid_argument where the arrays contradict each other, the
  // network has a cycle or several sources or sinks, or numbers are out of range.
  explicit ParametricFlow(const Network& net);

  // Moves to the least total cost at flow value `total`, 10 uW, without walking there: takes a
  // guess as far as durations and complementary slackness allow and repairs what is left over.
  // Exact whatever the guess; a good one makes it quick, and saying whether its flow is a rough one
  // makes it quicker.
  //   flow:  (num_arcs), 10 uW, each in [0, kInfinite / 4), in the caller's numbering.
  //   times: of the events, (num_nodes), ns from any origin, in the caller's numbering; or null for
  //          those that the flow means.
  //   total: in [0, kInfinite / 4).
  // Throws std::invalid_argument where these are out of range, and std::overflow_error where what
  // the guess lacks adds up to kInfinite / 2 or more.
  void solve_at_flow(const Power* flow, const Time* times, bool is_rough, Power total);

  // The same at time `at`, ns, or as near to it as T_min or T_max is, from a guess with times.
  void solve_at_time(const Power* flow, const Time* times, Time at);

  // One event of the walk: finds the nearest cut or path, lowers T (never below `floor`; by
  // nothing where paths of the current length are left), and sends flow. Returns false when T has
  // reached max(floor, T_min). Throws std::overflow_error where the flow outgrows kInfinite / 2.
  bool step(Time floor);

  Time time() const { return -nodes_[source_].potential; }
  Time min_time() const { return min_time_; }
  Time max_time() const { return max_time_; }
  Power flow() const { return flow_; }
  Energy cost() const { return cost_; }  // above every activity at its slowest
  Index num_nodes() const { return static_cast<Index>(position_.size()); }
  Index num_arcs() const { return static_cast<Index>(arcs_.size()) - 1; }
  std::uint64_t touched() const { return touched_; }  // nodes settled by all searches so far

  // Event times in the caller's numbering, source at 0: of all optimal ones those with every event
  // as early as can be. out: (num_nodes)
  void event_times(Time* out) const;
  // Flow on each arc in the caller's numbering. out: (num_arcs)
  void arc_flows(Power* out) const;

  // An arc and another that may be the same a round later.
  struct ShiftedArc {
    Index arc, later;
  };
  // Arcs in the caller's numbering as period() takes them. Throws std::invalid_argument where there
  // is no such arc.
  std::vector<ShiftedArc> to_internal_numbering(std::vector<ShiftedArc> arcs) const;
  // How much later the later arcs begin, ns, if they carry the same flow as the others and all
  // begin as much later, those without flow up to their slack; else kNoPeriod. Arcs are in our
  // numbering.
  Time period(const std::vector<ShiftedArc>& arcs) const;

  // A state that restore() returns to exactly.
  struct Snapshot {
    std::vector<Time> potential;
    std::vector<Power> flow;
    Power total;
    Energy cost;
  };
  Snapshot snapshot() const;
  void restore(const Snapshot& s);

 private:
  struct alignas(32) Node {  // two to a cache line
    Time potential;  // event time relative to the sink (sink 0, source -T): far nodes never move
    Time dist;       // slack distance from where the last search that reached the node began
    std::uint32_t stamp;  // that search
    Index rank;           // position among the nodes that it settled; kUnsettled before
    Index next;           // residual arc that the next path tries first
    Index begin;          // residual arcs of the node: [begin, next node's begin)
  };
  // An arc as one of its ends sees it, with all that a search needs. The slack of sending one unit
  // more to the other end is potential(other) - potential(here) + length_out, and the other way
  // potential(here) - potential(other) + length_in.
  struct ResidualArc {
    Index other;
    Index arc;  // a at the tail of arc a, ~a at its head
    Time length_out;
    Time length_in;  // kFar where it would take flow from an arc without
  };
  struct Arc {
    Index out, in;  // its residual arcs at the tail and at the head
    Index first_level, last_level, level;
    Index original;
    Power flow;
  };
  // Where the last search met a target: the node before it and the residual arc between them.
  struct CrossingArc {
    Index node, residual_arc;
  };
  static constexpr Index kUnsettled = std::numeric_limits<Index>::max();

  void copy_curves(const Network& net);
  void number_nodes(const Network& net);
  void build_residual_arcs(const Network& net);
  Index tail_of(const Arc& arc) const { return residual_arcs_[arc.in].other; }
  Index head_of(const Arc& arc) const { return residual_arcs_[arc.out].other; }
  Time longest_path(bool fastest, std::vector<Time>* at) const;

  // Warm start.
  void check_guess(const Power* flow) const;
  void load_guess(const Power* flow, const Time* times, Time latest);
  void repair(Power total, bool is_rough);
  std::vector<Power> clamp_to_complementary_slackness(Power total);
  void cancel_excess(std::vector<Power>* excess, Power first_amount);
  Energy cost_of_potentials() const;
  void open_return_arc(Time at, Power flow);
  void close_return_arc();

  // Search and blocking flow.
  template <bool kForward, class IsTarget>
  Time shortest_slack_paths(Index root, Time bound, IsTarget is_target);
  void shift_potentials(Time by);
  Power augment_through(Index root, CrossingArc crossing, Index goal, Power at_most);
  void augment(bool forward, std::vector<Index>* path, Power amount);
  template <bool kForward>
  bool advance_or_retreat(std::vector<Index>* path, Index start, Index goal);
  template <bool kForward>
  Index next_admissible(Index v);

  // Flow. A direction is an arc's index a forward, ~a backward.
  Power residual_capacity(Index direction) const;
  void push_flow(Index direction, Power amount);
  void set_flow(Index a, Power flow);
  Power min_flow_at_duration(const Arc& arc) const;

  void push(Time key, Index node);
  Index pop(Time* key);

  std::vector<Node> nodes_;                 // num_nodes + 1: the last one only ends the arcs
  std::vector<ResidualArc> residual_arcs_;  // sorted by the node that they belong to
  std::vector<Arc> arcs_;       // num_arcs + 1: the last leads back, from the sink to the source
  std::vector<Time> duration_;  // levels
  std::vector<Power> slope_;
  std::vector<Index> position_;  // caller's node -> ours
  std::vector<Index> order_;     // ours -> caller's
  std::vector<Index> settled_;   // nodes settled by the last search, nearest first
  std::vector<CrossingArc> crossing_;
  std::vector<Index> path_to_root_, path_to_goal_;  // residual arcs
  std::vector<std::pair<Time, Index>> heap_;
  Index source_, sink_;
  std::uint32_t stamp_ = 0;
  Time min_time_ = 0, max_time_ = 0;
  Power flow_ = 0;
  Energy cost_ = 0;
  std::uint64_t touched_ = 0;
};

}  // namespace envplan
