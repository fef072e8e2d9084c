#include "kernel.hpp"

namespace envplan {

namespace {

constexpr Time kInputLimit = Time{1} << 58;
// Farther than any residual path, and nearer than any way back over an arc without flow. A slack
// distance is at most the difference of two event times, each within kInputLimit, and one length.
constexpr Time kAnywhere = kFar / 2;
static_assert(3 * kInputLimit < kAnywhere && kAnywhere <= kFar - 2 * kInputLimit);
constexpr Power kScaling = 4;  // between the amounts that a rough guess settles first and next
constexpr Power kMaxGuess = kInfinite / 4;
// An arc's flow is at most what it is clamped to, below kInfinite / 2, and all excess together.
constexpr Power kMaxExcess = kInfinite / 2;

}  // namespace

ParametricFlow::ParametricFlow(const Network& net) {
  require(net.num_nodes >= 2 && net.source != net.sink, "a network needs a source and a sink");
  require(
      net.source >= 0 && net.source < net.num_nodes && net.sink >= 0 && net.sink < net.num_nodes,
      "source and sink must be nodes");
  require(net.num_arcs <= std::numeric_limits<Index>::max() / 2, "there are too many activities");
  copy_curves(net);
  number_nodes(net);
  build_residual_arcs(net);

  std::vector<Time> at(net.num_nodes);
  min_time_ = longest_path(true, &at);
  max_time_ = longest_path(false, &at);
  for (Index v = 0; v < net.num_nodes; ++v) nodes_[v].potential = at[v] - max_time_;
}

void ParametricFlow::copy_curves(const Network& net) {
  require_offsets(net.curve_begin, net.num_curves, net.num_levels,
                  "curve_begin must ascend from 0 and span duration and slope");
  duration_.assign(net.duration, net.duration + net.num_levels);
  slope_.assign(net.slope, net.slope + net.num_levels);
  Time longest = 0;
  for (Index c = 0; c < net.num_curves; ++c) {
    const Index begin = net.curve_begin[c], end = net.curve_begin[c + 1];
    require(begin < end && slope_[end - 1] == kInfinite, "a curve ends with an infinite level");
    Power below = 0;
    for (Index l = begin; l < end; ++l) {
      require(duration_[l] >= 0 && duration_[l] <= kInputLimit, "a duration is out of range");
      require(l == begin || duration_[l] < duration_[l - 1], "durations of a curve must decrease");
      require(slope_[l] > below, "slopes of a curve must increase from above zero");
      require(l == end - 1 || slope_[l] < kInfinite / 2, "a slope is out of range");
      below = slope_[l];
    }
    longest = std::max(longest, duration_[begin]);
  }
  // Any path has at most num_nodes - 1 arcs, so this bounds every event time and every distance.
  require(static_cast<Energy>(longest) * net.num_nodes <= kInputLimit,
          "the durations add up to more than the integer range");
  // Of the arc that leads back from the sink to the source.
  duration_.push_back(0);
  slope_.push_back(kInfinite);
}

// Our numbers follow the events' earliest times, so that a search sweeps through memory.
void ParametricFlow::number_nodes(const Network& net) {
  const Index n = net.num_nodes, m = net.num_arcs;
  std::vector<Index> begin(n + 1, 0), arcs(m), missing(n, 0), queue;
  for (Index a = 0; a < m; ++a) {
    require(net.tail[a] >= 0 && net.tail[a] < n && net.head[a] >= 0 && net.head[a] < n,
            "an arc names a node that is not there");
    require(net.curve[a] >= 0 && net.curve[a] < net.num_curves, "an arc names an unknown curve");
    ++begin[net.tail[a] + 1];
    ++missing[net.head[a]];
  }
  for (Index v = 0; v < n; ++v) begin[v + 1] += begin[v];
  std::vector<Index> fill(begin.begin(), begin.end() - 1);
  for (Index a = 0; a < m; ++a) arcs[fill[net.tail[a]]++] = a;

  queue.reserve(n);
  std::vector<Time> at(n, 0);
  for (Index v = 0; v < n; ++v) {
    if (missing[v] == 0) queue.push_back(v);
  }
  require(queue.size() == 1 && queue[0] == net.source, "only the source may lack predecessors");
  for (std::size_t q = 0; q < queue.size(); ++q) {
    const Index v = queue[q];
    require(v == net.sink || begin[v] < begin[v + 1], "only the sink may lack successors");
    for (Index k = begin[v]; k < begin[v + 1]; ++k) {
      const Index a = arcs[k], w = net.head[a];
      at[w] = std::max(at[w], at[v] + duration_[net.curve_begin[net.curve[a]]]);
      if (--missing[w] == 0) queue.push_back(w);
    }
  }
  require(static_cast<Index>(queue.size()) == n, "the network has a cycle");
  order_ = std::move(queue);
  // Kahn's order breaks ties, so the new order is topological where arcs have duration zero.
  std::stable_sort(order_.begin(), order_.end(), [&](Index a, Index b) { return at[a] < at[b]; });
  position_.resize(n);
  for (Index v = 0; v < n; ++v) position_[order_[v]] = v;
}

// Sorts all arcs, and the one that leads back, by our number of their tails.
void ParametricFlow::build_residual_arcs(const Network& net) {
  const Index n = net.num_nodes, m = net.num_arcs;
  source_ = position_[net.source];
  sink_ = position_[net.sink];
  const auto tail = [&](Index a) { return a < m ? position_[net.tail[a]] : sink_; };
  const auto head = [&](Index a) { return a < m ? position_[net.head[a]] : source_; };
  nodes_.assign(n + 1, Node{0, 0, 0, 0, 0, 0});
  arcs_.resize(m + 1);
  residual_arcs_.resize(2 * arcs_.size());
  std::vector<Index> by_tail(m + 1), fill(n);
  for (Index a = 0; a <= m; ++a) {
    by_tail[a] = a;
    ++nodes_[tail(a) + 1].begin;
    ++nodes_[head(a) + 1].begin;
  }
  for (Index v = 0; v < n; ++v) {
    nodes_[v + 1].begin += nodes_[v].begin;
    fill[v] = nodes_[v].begin;
  }
  // The sink's only arc stays the last.
  std::stable_sort(by_tail.begin(), by_tail.end(),
                   [&](Index a, Index b) { return tail(a) < tail(b); });
  const auto return_level = static_cast<Index>(duration_.size()) - 1;
  for (Index a = 0; a <= m; ++a) {
    const Index original = by_tail[a];
    const bool leads_back = original == m;
    const Index first = leads_back ? return_level : net.curve_begin[net.curve[original]];
    const Index last = leads_back ? return_level : net.curve_begin[net.curve[original] + 1] - 1;
    arcs_[a] = Arc{fill[tail(original)]++, fill[head(original)]++, first, last, first, original, 0};
    residual_arcs_[arcs_[a].out] = ResidualArc{head(original), a, kFar, kFar};
    residual_arcs_[arcs_[a].in] = ResidualArc{tail(original), ~a, kFar, kFar};
    if (!leads_back) set_flow(a, 0);
  }
}

Time ParametricFlow::longest_path(bool fastest, std::vector<Time>* at) const {
  std::fill(at->begin(), at->end(), 0);
  for (Index v = 0; v < static_cast<Index>(at->size()); ++v) {
    for (Index l = nodes_[v].begin; l < nodes_[v + 1].begin; ++l) {
      if (residual_arcs_[l].arc < 0 || residual_arcs_[l].arc == num_arcs()) continue;
      const Arc& arc = arcs_[residual_arcs_[l].arc];
      Time& head = (*at)[residual_arcs_[l].other];
      head = std::max(head, (*at)[v] + duration_[fastest ? arc.last_level : arc.first_level]);
    }
  }
  return (*at)[sink_];
}

void ParametricFlow::solve_at_flow(const Power* flow, const Time* times, bool is_rough,
                                   Power total) {
  require(total >= 0 && total < kMaxGuess, "flow is out of range");
  check_guess(flow);
  load_guess(flow, times, max_time_);
  repair(total, is_rough);
}

// At a time the flow value is free: the arc that leads back takes it.
void ParametricFlow::solve_at_time(const Power* flow, const Time* times, Time at) {
  require(times != nullptr, "a start at a time needs times");
  check_guess(flow);
  at = std::clamp(at, min_time_, max_time_);
  load_guess(flow, times, at);
  nodes_[sink_].potential = at;
  Energy total = 0;
  for (Index l = nodes_[source_].begin; l < nodes_[source_ + 1].begin; ++l) {
    if (residual_arcs_[l].arc >= 0) total += arcs_[residual_arcs_[l].arc].flow;
  }
  if (total >= kMaxGuess) throw std::overflow_error("the flow to start from is out of range");
  open_return_arc(at, static_cast<Power>(total));
  repair(static_cast<Power>(total), false);
  flow_ = arcs_[num_arcs()].flow;
  close_return_arc();
}

void ParametricFlow::check_guess(const Power* flow) const {
  for (Index a = 0; a < num_arcs(); ++a) {
    require(flow[a] >= 0 && flow[a] < kMaxGuess, "flow is out of range");
  }
}

// The arc from the sink to the source has a constant duration of -at, which keeps the two as far
// apart as they are.
void ParametricFlow::open_return_arc(Time at, Power flow) {
  duration_.back() = -at;
  set_flow(num_arcs(), flow);
}

void ParametricFlow::close_return_arc() {
  const Arc& back = arcs_[num_arcs()];
  for (const Index l : {back.out, back.in}) {
    residual_arcs_[l].length_out = residual_arcs_[l].length_in = kFar;
  }
}

// Takes a flow, and event times as far as the fastest durations and the latest time allow; or those
// that the flow means. Two sweeps: back for the latest time of each event, on for the earliest.
void ParametricFlow::load_guess(const Power* flow, const Time* times, Time latest) {
  for (Index a = 0; a < num_arcs(); ++a) set_flow(a, flow[arcs_[a].original]);
  const auto each_arc_from = [&](Index v, auto visit) {
    for (Index l = nodes_[v].begin; l < nodes_[v + 1].begin; ++l) {
      const ResidualArc& out = residual_arcs_[l];
      if (out.arc < 0 || out.arc == num_arcs()) continue;
      const Time fastest = duration_[arcs_[out.arc].last_level];
      visit(out.other, times == nullptr ? -out.length_out : fastest);
    }
  };
  std::vector<Time> until(num_nodes(), latest);
  for (Index v = num_nodes() - 1; v >= 0; --v) {
    each_arc_from(v, [&](Index other, Time duration) {
      until[v] = std::min(until[v], until[other] - duration);
    });
    nodes_[v].potential = times == nullptr ? 0 : std::clamp<Time>(times[order_[v]], 0, until[v]);
  }
  nodes_[source_].potential = 0;
  for (Index v = 0; v < num_nodes(); ++v) {
    each_arc_from(v, [&](Index other, Time duration) {
      Time& potential = nodes_[other].potential;
      potential = std::max(potential, nodes_[v].potential + duration);
    });
  }
}

// Goes to the least total cost with so much flow from the source to the sink, or what the way back
// makes of it, from any flow and from any event times that durations allow.
void ParametricFlow::repair(Power total, bool is_rough) {
  std::vector<Power> excess = clamp_to_complementary_slackness(total);
  // After a rough guess large amounts go first (Edmonds and Karp 1972). After a good guess they
  // would travel far past the small ones next to them.
  Power amount = 1;
  while (is_rough && amount <= *std::max_element(excess.begin(), excess.end()) / kScaling) {
    amount *= kScaling;
  }
  cancel_excess(&excess, amount);
  const Time end = nodes_[sink_].potential;
  for (Index v = 0; v < num_nodes(); ++v) nodes_[v].potential -= end;
  flow_ = total;
  cost_ = cost_of_potentials();
}

// Puts every arc's flow between the slopes around its duration. Returns what each node then has too
// much (or, negative, too little) of, `total` being wanted from the source to the sink.
std::vector<Power> ParametricFlow::clamp_to_complementary_slackness(Power total) {
  std::vector<Energy> exact(num_nodes(), 0);
  exact[source_] += total;
  exact[sink_] -= total;
  for (Index a = 0; a < num_arcs(); ++a) {
    const Arc& arc = arcs_[a];
    const Index tail = tail_of(arc), head = head_of(arc);
    const Time d = nodes_[head].potential - nodes_[tail].potential;
    Index level = arc.first_level;
    while (duration_[level] > d) ++level;
    const Power least = level > arc.first_level ? slope_[level - 1] : 0;
    const Power most = duration_[level] == d ? slope_[level] : least;
    set_flow(a, std::clamp(arc.flow, least, most));
    exact[tail] -= arc.flow;
    exact[head] += arc.flow;
  }
  Energy sum = 0;
  for (const Energy e : exact) sum += std::max<Energy>(0, e);
  if (sum >= kMaxExcess) throw std::overflow_error("the flow to start from is out of range");
  return std::vector<Power>(exact.begin(), exact.end());
}

// Successive shortest paths from nodes with excess to nodes that lack flow, in amounts of at least
// `amount` first, then of less and less. From the last event back, which only makes the searches
// end sooner, for shortest augmentations lead to the optimum in any order.
void ParametricFlow::cancel_excess(std::vector<Power>* all_excess, Power amount) {
  std::vector<Power>& excess = *all_excess;
  const Index n = num_nodes();
  for (; amount > 0; amount /= kScaling) {
    const auto lacks = [&](Index v) { return excess[v] <= -amount; };
    Index lacking = 0;
    for (Index v = 0; v < n; ++v) lacking += lacks(v);
    for (Index v = n - 1; v >= 0; --v) {
      while (lacking > 0 && excess[v] >= amount) {
        const Time by = shortest_slack_paths<true>(v, kAnywhere, lacks);
        if (by < 0) break;
        shift_potentials(by);
        for (const CrossingArc crossing : crossing_) {
          const Index to = residual_arcs_[crossing.residual_arc].other;
          if (excess[v] < amount || !lacks(to)) continue;
          const Power sent = augment_through(v, crossing, to, std::min(excess[v], -excess[to]));
          excess[v] -= sent;
          excess[to] += sent;
          lacking -= !lacks(to);
        }
      }
    }
  }
}

// The cost of all durations, above every activity at its slowest.
Energy ParametricFlow::cost_of_potentials() const {
  Energy cost = 0;
  for (Index a = 0; a < num_arcs(); ++a) {
    const Arc& arc = arcs_[a];
    const Time d = nodes_[head_of(arc)].potential - nodes_[tail_of(arc)].potential;
    for (Index l = arc.first_level; duration_[l] > d; ++l) {
      const Time saved = duration_[l] - std::max(duration_[l + 1], d);
      cost += static_cast<Energy>(slope_[l]) * saved;
    }
  }
  return cost;
}

bool ParametricFlow::step(Time floor) {
  const Time bound = time() - std::max(floor, min_time_);
  if (bound <= 0) return false;
  // The far side: what reaches the sink without slack. It need not be complete, nor is it where the
  // source belongs to it, which means that paths of the current length are left.
  shortest_slack_paths<false>(sink_, 0, [this](Index v) { return v == source_; });
  const std::uint32_t far = stamp_;
  const Time by = shortest_slack_paths<true>(source_, bound - 1,
                                             [&](Index v) { return nodes_[v].stamp == far; });
  shift_potentials(by < 0 ? bound : by);
  // The network is acyclic, so no arc carries more than the total: checking it keeps all in range.
  for (const CrossingArc crossing : crossing_) {
    flow_ += augment_through(source_, crossing, sink_, kInfinite / 2 - flow_);
  }
  if (flow_ >= kInfinite / 2) throw std::overflow_error("a marginal cost is out of range");
  return by >= 0;
}

// Dijkstra's algorithm on slacks from `root` (backward: to it), as far as the nearest target.
// Returns its distance, or -1 where none is within `bound`. Leaves settled_ by distance, and in
// crossing_ the arcs from nodes nearer than that to targets at that distance. Nodes without slack
// between them are settled breadth first; only the others go through the heap.
template <bool kForward, class IsTarget>
Time ParametricFlow::shortest_slack_paths(Index root, Time bound, IsTarget is_target) {
  const std::uint32_t stamp = ++stamp_;
  if (stamp == 0) throw std::overflow_error("too many steps");
  touched_ += settled_.size();
  settled_.clear();
  heap_.clear();
  crossing_.clear();
  const auto settle = [&](Index v) {
    nodes_[v].rank = static_cast<Index>(settled_.size());
    nodes_[v].next = nodes_[v].begin;
    settled_.push_back(v);
    __builtin_prefetch(
        &residual_arcs_[nodes_[v].begin]);  // its turn comes when others have had theirs
  };
  nodes_[root].stamp = stamp;
  nodes_[root].dist = 0;
  settle(root);
  Time now = 0;
  for (std::size_t k = 0;;) {
    for (; k < settled_.size(); ++k) {
      const Index v = settled_[k], end = nodes_[v + 1].begin;
      const Time base = kForward ? now - nodes_[v].potential : now + nodes_[v].potential;
      for (Index l = nodes_[v].begin; l < end; ++l) {
        const ResidualArc& out = residual_arcs_[l];
        Node& other = nodes_[out.other];
        const Time dist = kForward ? base + other.potential + out.length_out
                                   : base - other.potential + out.length_in;
        if (dist > bound || (other.stamp == stamp && other.dist <= dist)) continue;
        if (is_target(out.other)) {
          if (dist < bound) crossing_.clear();
          bound = dist;  // nothing farther matters any more
          crossing_.push_back({v, l});
          continue;
        }
        other.stamp = stamp;
        other.dist = dist;
        if (dist == now) {
          settle(out.other);
        } else {
          other.rank = kUnsettled;
          push(dist, out.other);
        }
      }
      if (!crossing_.empty() && bound == now) return bound;
    }
    Index v;
    do {
      if (heap_.empty()) return crossing_.empty() ? -1 : bound;
      v = pop(&now);
      if (!crossing_.empty() && now >= bound) return bound;
    } while (nodes_[v].dist != now || nodes_[v].rank != kUnsettled);
    settle(v);
  }
}

// Moves the events nearer than `by`: the cut's near side. T falls by `by`.
void ParametricFlow::shift_potentials(Time by) {
  cost_ += static_cast<Energy>(flow_) * by;
  for (const Index v : settled_) {
    if (nodes_[v].dist >= by) break;
    nodes_[v].potential += by - nodes_[v].dist;
  }
}

// Sends what paths without slack over one crossing arc take, at most `at_most`, until one side has
// no way left. Returns how much that was. Sides are what the last searches settled: back from the
// crossing arc to `root`, and on from it to `goal`. On either side a path goes down in rank, so
// that none runs in a circle and a node that leads nowhere is given up for good (Dinic 1970).
Power ParametricFlow::augment_through(Index root, CrossingArc crossing, Index goal, Power at_most) {
  const ResidualArc& middle = residual_arcs_[crossing.residual_arc];
  const auto is_tight = [&] {
    return nodes_[middle.other].potential + middle.length_out == nodes_[crossing.node].potential;
  };
  path_to_root_.clear();
  path_to_goal_.clear();
  Power sent = 0;
  while (sent < at_most && is_tight() &&
         advance_or_retreat<false>(&path_to_root_, crossing.node, root) &&
         advance_or_retreat<true>(&path_to_goal_, middle.other, goal)) {
    Power amount = std::min(at_most - sent, residual_capacity(middle.arc));
    // Residual arcs towards the root are seen against the direction of the flow.
    for (const Index l : path_to_root_) {
      amount = std::min(amount, residual_capacity(~residual_arcs_[l].arc));
    }
    for (const Index l : path_to_goal_) {
      amount = std::min(amount, residual_capacity(residual_arcs_[l].arc));
    }
    augment(false, &path_to_root_, amount);
    augment(true, &path_to_goal_, amount);
    push_flow(middle.arc, amount);
    sent += amount;
  }
  return sent;
}

// Sends an amount along a path, and cuts the path off where that fills it: the rest is the part
// that the next path shares.
void ParametricFlow::augment(bool forward, std::vector<Index>* path, Power amount) {
  std::size_t open = path->size();
  for (std::size_t k = path->size(); k-- > 0;) {
    const Index arc = residual_arcs_[(*path)[k]].arc;
    const Index direction = forward ? arc : ~arc;
    if (residual_capacity(direction) == amount) open = k;
    push_flow(direction, amount);
  }
  path->resize(open);
}

// Advances a path of residual arcs from `start` to `goal`, and retreats from dead ends (Dinic
// 1970); false if no way is left at all.
template <bool kForward>
bool ParametricFlow::advance_or_retreat(std::vector<Index>* path, Index start, Index goal) {
  Index v = path->empty() ? start : residual_arcs_[path->back()].other;
  while (v != goal) {
    const Index next = next_admissible<kForward>(v);
    if (next >= 0) {
      path->push_back(next);
      v = residual_arcs_[next].other;
    } else if (path->empty()) {
      return false;
    } else {
      path->pop_back();
      v = path->empty() ? start : residual_arcs_[path->back()].other;
      ++nodes_[v].next;
    }
  }
  return true;
}

// The first residual arc of a node that may still lead to where its search began, or -1.
template <bool kForward>
Index ParametricFlow::next_admissible(Index v) {
  Node& node = nodes_[v];
  for (const Index end = nodes_[v + 1].begin; node.next < end; ++node.next) {
    const ResidualArc& out = residual_arcs_[node.next];
    const Node& other = nodes_[out.other];
    const Time slack = kForward ? other.potential - node.potential + out.length_out
                                : node.potential - other.potential + out.length_in;
    if (slack == 0 && other.stamp == node.stamp && other.rank < node.rank) return node.next;
  }
  return -1;
}

// Flow that an arc takes (~a: gives back) at the duration it has.
Power ParametricFlow::residual_capacity(Index direction) const {
  if (direction >= 0) {
    const Arc& arc = arcs_[direction];
    return slope_[arc.level] - arc.flow;
  }
  const Arc& arc = arcs_[~direction];
  return arc.flow - min_flow_at_duration(arc);
}

void ParametricFlow::push_flow(Index direction, Power amount) {
  if (direction >= 0) {
    set_flow(direction, arcs_[direction].flow + amount);
  } else {
    set_flow(~direction, arcs_[~direction].flow - amount);
  }
}

// Flow below which the arc gives up the level that holds its last unit.
Power ParametricFlow::min_flow_at_duration(const Arc& arc) const {
  const auto below = [&](Index level) { return level > arc.first_level ? slope_[level - 1] : 0; };
  const Power least = below(arc.level);
  return arc.flow > least ? least : below(arc.level - 1);
}

// Sets an arc's flow, and what it makes of its level and of its residual arcs' lengths.
void ParametricFlow::set_flow(Index a, Power flow) {
  Arc& arc = arcs_[a];
  arc.flow = flow;
  while (slope_[arc.level] <= flow) ++arc.level;
  while (arc.level > arc.first_level && slope_[arc.level - 1] > flow) --arc.level;
  Index holding = arc.level;  // the last unit of flow; arc.level takes the next
  if (holding > arc.first_level && slope_[holding - 1] == flow) --holding;
  ResidualArc &out = residual_arcs_[arc.out], &in = residual_arcs_[arc.in];
  out.length_out = in.length_in = -duration_[arc.level];
  in.length_out = out.length_in = flow > 0 ? duration_[holding] : kFar;
}

// The optimal event times are all those without negative slack on a residual arc, so an event can
// be earlier by its slack distance from the two that stay.
void ParametricFlow::event_times(Time* out) const {
  std::vector<Time> dist(num_nodes(), kFar);
  std::vector<std::pair<Time, Index>> heap;
  const auto reach = [&](Index v, Time d) {
    if (d >= dist[v]) return;
    dist[v] = d;
    heap.emplace_back(d, v);
    std::push_heap(heap.begin(), heap.end(), std::greater<>());
  };
  reach(source_, 0);
  reach(sink_, 0);
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), std::greater<>());
    const auto [d, v] = heap.back();
    heap.pop_back();
    if (d > dist[v]) continue;
    for (Index l = nodes_[v].begin; l < nodes_[v + 1].begin; ++l) {
      const ResidualArc& out = residual_arcs_[l];
      reach(out.other, d + (nodes_[out.other].potential - nodes_[v].potential) + out.length_out);
    }
  }
  for (Index v = 0; v < num_nodes(); ++v) {
    out[order_[v]] = nodes_[v].potential + time() - dist[v];
  }
}

void ParametricFlow::arc_flows(Power* out) const {
  for (Index a = 0; a < num_arcs(); ++a) out[arcs_[a].original] = arcs_[a].flow;
}

std::vector<ParametricFlow::ShiftedArc> ParametricFlow::to_internal_numbering(
    std::vector<ShiftedArc> arcs) const {
  std::vector<Index> internal(num_arcs());
  for (Index a = 0; a < num_arcs(); ++a) internal[arcs_[a].original] = a;
  for (ShiftedArc& pair : arcs) {
    require(pair.arc >= 0 && pair.arc < num_arcs() && pair.later >= 0 && pair.later < num_arcs(),
            "there is no such arc");
    pair = {internal[pair.arc], internal[pair.later]};
  }
  return arcs;
}

Time ParametricFlow::period(const std::vector<ShiftedArc>& arcs) const {
  const auto shift = [this](const ShiftedArc& pair) {
    return nodes_[tail_of(arcs_[pair.later])].potential -
           nodes_[tail_of(arcs_[pair.arc])].potential;
  };
  Time period = kNoPeriod;
  for (const ShiftedArc& pair : arcs) {
    const Power flow = arcs_[pair.arc].flow;
    if (flow != arcs_[pair.later].flow) return kNoPeriod;
    if (flow == 0) continue;
    if (period != kNoPeriod && shift(pair) != period) return kNoPeriod;
    period = shift(pair);
  }
  for (const ShiftedArc& pair : arcs) {
    const Arc& arc = arcs_[pair.arc];
    // Between the later tail and the earlier head, a period later, the arc must have its time.
    const Time available =
        nodes_[head_of(arc)].potential + period - nodes_[tail_of(arcs_[pair.later])].potential;
    if (arc.flow == 0 && available < duration_[arc.first_level]) return kNoPeriod;
  }
  return period;
}

ParametricFlow::Snapshot ParametricFlow::snapshot() const {
  Snapshot s;
  s.potential.reserve(num_nodes());
  for (Index v = 0; v < num_nodes(); ++v) s.potential.push_back(nodes_[v].potential);
  s.flow.reserve(num_arcs());
  for (Index a = 0; a < num_arcs(); ++a) s.flow.push_back(arcs_[a].flow);
  s.total = flow_;
  s.cost = cost_;
  return s;
}

void ParametricFlow::restore(const Snapshot& s) {
  for (Index v = 0; v < num_nodes(); ++v) nodes_[v].potential = s.potential[v];
  for (Index a = 0; a < num_arcs(); ++a) set_flow(a, s.flow[a]);
  flow_ = s.total;
  cost_ = s.cost;
}

void ParametricFlow::push(Time key, Index node) {
  heap_.emplace_back(key, node);
  std::push_heap(heap_.begin(), heap_.end(), std::greater<>());
}

Index ParametricFlow::pop(Time* key) {
  std::pop_heap(heap_.begin(), heap_.end(), std::greater<>());
  const auto [top, node] = heap_.back();
  heap_.pop_back();
  *key = top;
  return node;
}

}  // namespace envplan
