#include "kernel.hpp"

namespace envplan {

namespace {

constexpr Time kInputLimit = Time{1} << 58;
// Farther than any residual path, and nearer than any way back over an arc without flow.
constexpr Time kAnywhere = kFar / 2;
static_assert(3 * kInputLimit < kAnywhere && kAnywhere <= kFar - 2 * kInputLimit);
constexpr Power kScaling = 4;  // between the amounts that start() settles first and next

void require(bool ok, const char* message) {
  if (!ok) throw std::invalid_argument(message);
}

}  // namespace

Walk::Walk(const Network& net)
    : duration_(net.duration, net.duration + net.curve_begin[net.num_curves]),
      limit_(net.limit, net.limit + net.curve_begin[net.num_curves]) {
  require(net.num_nodes >= 2 && net.source != net.sink, "a network needs a source and a sink");
  require(net.num_arcs <= std::numeric_limits<Index>::max() / 2, "there are too many activities");
  Time widest = 0;
  for (Index c = 0; c < net.num_curves; ++c) {
    const Index begin = net.curve_begin[c], end = net.curve_begin[c + 1];
    require(begin < end && limit_[end - 1] == kInfinite, "a curve ends with an infinite level");
    Power below = 0;
    for (Index l = begin; l < end; ++l) {
      require(duration_[l] >= 0 && duration_[l] <= kInputLimit, "a duration is out of range");
      require(l == begin || duration_[l] < duration_[l - 1], "durations of a curve must decrease");
      require(limit_[l] > below, "slopes of a curve must increase from above zero");
      require(l == end - 1 || limit_[l] < kInfinite / 2, "a slope is out of range");
      below = limit_[l];
    }
    widest = std::max(widest, duration_[begin]);
  }
  // Any path has at most num_nodes - 1 arcs, so this bounds every event time and every distance.
  require(static_cast<Energy>(widest) * net.num_nodes <= kInputLimit,
          "the durations add up to more than the integer range");
  number_nodes(net);

  const Index n = net.num_nodes, m = net.num_arcs;
  source_ = position_[net.source];
  sink_ = position_[net.sink];
  duration_.push_back(0);  // of the way back
  limit_.push_back(kInfinite);
  const auto tail = [&](Index a) { return a < m ? position_[net.tail[a]] : sink_; };
  const auto head = [&](Index a) { return a < m ? position_[net.head[a]] : source_; };
  nodes_.assign(n + 1, Node{0, 0, 0, 0, 0, 0});
  arcs_.resize(m + 1);
  links_.resize(2 * arcs_.size());
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
  for (Index a = 0; a <= m; ++a) {
    const Index original = by_tail[a];
    const Index first = original < m ? net.curve_begin[net.curve[original]] : duration_.size() - 1;
    const Index last =
        original < m ? net.curve_begin[net.curve[original] + 1] - 1 : duration_.size() - 1;
    arcs_[a] = Arc{fill[tail(original)]++, fill[head(original)]++, first, last, first, original, 0};
    links_[arcs_[a].out] = Link{head(original), a, kFar, kFar};
    links_[arcs_[a].in] = Link{tail(original), ~a, kFar, kFar};
    if (original < m) set_flow(a, 0);
  }

  std::vector<Time> at(n);
  min_time_ = longest_path(true, &at);
  max_time_ = longest_path(false, &at);
  for (Index v = 0; v < n; ++v) nodes_[v].y = at[v] - max_time_;
}

// Our numbers follow the events' earliest times, so that a search sweeps through memory.
void Walk::number_nodes(const Network& net) {
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

Time Walk::longest_path(bool fastest, std::vector<Time>* at) const {
  std::fill(at->begin(), at->end(), 0);
  for (Index v = 0; v < static_cast<Index>(at->size()); ++v) {
    for (Index l = nodes_[v].begin; l < nodes_[v + 1].begin; ++l) {
      if (links_[l].arc < 0 || links_[l].arc == num_arcs()) continue;
      const Arc& arc = arcs_[links_[l].arc];
      Time& head = (*at)[links_[l].other];
      head = std::max(head, (*at)[v] + duration_[fastest ? arc.last_level : arc.first_level]);
    }
  }
  return (*at)[sink_];
}

void Walk::start(const Power* flow, const Time* times, bool rough, Power total) {
  guess(flow, times, max_time_);
  repair(total, rough);
}

// At a time the flow value is free: an arc back from the sink to the source takes it, at a duration
// that leaves the two as far apart as they are.
void Walk::start_at(const Power* flow, const Time* times, Time at) {
  at = std::clamp(at, min_time_, max_time_);
  guess(flow, times, at);
  nodes_[sink_].y = at;
  Power total = 0;
  for (Index l = nodes_[source_].begin; l < nodes_[source_ + 1].begin; ++l) {
    if (links_[l].arc >= 0) total += arcs_[links_[l].arc].flow;
  }
  const Index back = num_arcs();
  duration_.back() = -at;
  set_flow(back, total);
  repair(total, false);
  flow_ = arcs_[back].flow;
  for (const Index l : {arcs_[back].out, arcs_[back].in}) links_[l].ahead = links_[l].behind = kFar;
}

// Takes a flow, and event times as far as the fastest durations and the latest time allow; or those
// that the flow means.
void Walk::guess(const Power* flow, const Time* times, Time latest) {
  for (Index a = 0; a < num_arcs(); ++a) set_flow(a, flow[arcs_[a].original]);
  const auto each_arc_from = [&](Index v, auto visit) {
    for (Index l = nodes_[v].begin; l < nodes_[v + 1].begin; ++l) {
      const Link& link = links_[l];
      if (link.arc < 0 || link.arc == num_arcs()) continue;
      visit(link, times == nullptr ? -link.ahead : duration_[arcs_[link.arc].last_level]);
    }
  };
  std::vector<Time> until(num_nodes(), latest);
  for (Index v = num_nodes() - 1; v >= 0; --v) {
    each_arc_from(v, [&](const Link& link, Time takes) {
      until[v] = std::min(until[v], until[link.other] - takes);
    });
    nodes_[v].y = times == nullptr ? 0 : std::clamp<Time>(times[order_[v]], 0, until[v]);
  }
  nodes_[source_].y = 0;
  for (Index v = 0; v < num_nodes(); ++v) {
    each_arc_from(v, [&](const Link& link, Time takes) {
      nodes_[link.other].y = std::max(nodes_[link.other].y, nodes_[v].y + takes);
    });
  }
}

// Goes to the least total cost with so much flow from the source to the sink, or what the way back
// makes of it, from any flow and from any event times that durations allow.
void Walk::repair(Power total, bool rough) {
  const Index n = num_nodes();
  std::vector<Power> excess(n, 0);
  excess[source_] += total;
  excess[sink_] -= total;
  for (Index a = 0; a < num_arcs(); ++a) {
    const Arc& arc = arcs_[a];
    const Index tail = links_[arc.in].other, head = links_[arc.out].other;
    // Complementary slackness: at duration d the flow lies between the limits around d.
    const Time d = nodes_[head].y - nodes_[tail].y;
    Index level = arc.first_level;
    while (duration_[level] > d) ++level;
    const Power least = level > arc.first_level ? limit_[level - 1] : 0;
    const Power most = duration_[level] == d ? limit_[level] : least;
    set_flow(a, std::clamp(arc.flow, least, most));
    excess[tail] -= arc.flow;
    excess[head] += arc.flow;
  }
  // From the last event back, and after a rough guess large amounts first (Edmonds and Karp 1972):
  // both only make the searches end sooner, for shortest augmentations lead to the optimum in any
  // order. After a good guess large amounts would travel far past the small ones next to them.
  Power least = 1;
  while (rough && least <= *std::max_element(excess.begin(), excess.end()) / kScaling) {
    least *= kScaling;
  }
  for (; least > 0; least /= kScaling) {
    const auto lacks = [&](Index v) { return excess[v] <= -least; };
    Index lacking = 0;
    for (Index v = 0; v < n; ++v) lacking += lacks(v);
    for (Index v = n - 1; v >= 0; --v) {
      while (lacking > 0 && excess[v] >= least) {
        const Time by = search<true>(v, kAnywhere, lacks);
        if (by < 0) break;
        lower(by);
        for (const Meeting meeting : meetings_) {
          const Index to = links_[meeting.link].other;
          if (excess[v] < least || !lacks(to)) continue;
          const Power sent = send(v, meeting, to, std::min(excess[v], -excess[to]));
          excess[v] -= sent;
          excess[to] += sent;
          lacking -= !lacks(to);
        }
      }
    }
  }
  const Time end = nodes_[sink_].y;
  for (Index v = 0; v < n; ++v) nodes_[v].y -= end;
  flow_ = total;
  cost_ = 0;
  for (Index a = 0; a < num_arcs(); ++a) {
    const Arc& arc = arcs_[a];
    const Time d = nodes_[links_[arc.out].other].y - nodes_[links_[arc.in].other].y;
    for (Index l = arc.first_level; duration_[l] > d; ++l) {
      const Time saved = duration_[l] - std::max(duration_[l + 1], d);
      cost_ += static_cast<Energy>(limit_[l]) * saved;
    }
  }
}

bool Walk::step(Time floor) {
  const Time bound = time() - std::max(floor, min_time_);
  if (bound <= 0) return false;
  // The far side: what reaches the sink without slack. It need not be complete, nor is it where the
  // source belongs to it, which means that paths of the current length are left.
  search<false>(sink_, 0, [this](Index v) { return v == source_; });
  const std::uint32_t far = stamp_;
  const Time by = search<true>(source_, bound - 1, [&](Index v) { return nodes_[v].stamp == far; });
  lower(by < 0 ? bound : by);
  // The network is acyclic, so no arc carries more than the total: checking it keeps all in range.
  for (const Meeting meeting : meetings_) {
    flow_ += send(source_, meeting, sink_, kInfinite / 2 - flow_);
  }
  if (flow_ >= kInfinite / 2) throw std::overflow_error("a marginal cost is out of range");
  return by >= 0;
}

// Shortest slack distances from `from` (backward: to it), as far as the nearest target. Returns its
// distance, or -1 where none is within `most`. Leaves in meetings_ where nodes nearer than that
// meet a target at that distance. Nodes without slack between them are settled breadth first; only
// the others go through the heap.
template <bool kForward, class IsTarget>
Time Walk::search(Index from, Time most, IsTarget is_target) {
  const std::uint32_t stamp = ++stamp_;
  if (stamp == 0) throw std::overflow_error("too many steps");
  touched_ += near_.size();
  near_.clear();
  heap_.clear();
  meetings_.clear();
  const auto settle = [&](Index v) {
    nodes_[v].rank = static_cast<Index>(near_.size());
    nodes_[v].next = nodes_[v].begin;
    near_.push_back(v);
    __builtin_prefetch(&links_[nodes_[v].begin]);  // its turn comes when others have had theirs
  };
  nodes_[from].stamp = stamp;
  nodes_[from].dist = 0;
  settle(from);
  Time now = 0;
  for (std::size_t k = 0;;) {
    for (; k < near_.size(); ++k) {
      const Index v = near_[k], end = nodes_[v + 1].begin;
      const Time base = kForward ? now - nodes_[v].y : now + nodes_[v].y;
      for (Index l = nodes_[v].begin; l < end; ++l) {
        const Link& link = links_[l];
        Node& other = nodes_[link.other];
        const Time dist = kForward ? base + other.y + link.ahead : base - other.y + link.behind;
        if (dist > most || (other.stamp == stamp && other.dist <= dist)) continue;
        if (is_target(link.other)) {
          if (dist < most) meetings_.clear();
          most = dist;  // nothing farther matters any more
          meetings_.push_back({v, l});
          continue;
        }
        other.stamp = stamp;
        other.dist = dist;
        if (dist == now) {
          settle(link.other);
        } else {
          other.rank = kUnsettled;
          push(dist, link.other);
        }
      }
      if (!meetings_.empty() && most == now) return most;
    }
    Index v;
    do {
      if (heap_.empty()) return meetings_.empty() ? -1 : most;
      v = pop(&now);
      if (!meetings_.empty() && now >= most) return most;
    } while (nodes_[v].dist != now || nodes_[v].rank != kUnsettled);
    settle(v);
  }
}

// Moves the events nearer than `by`: the cut's near side. T falls by `by`.
void Walk::lower(Time by) {
  cost_ += static_cast<Energy>(flow_) * by;
  for (const Index v : near_) {
    if (nodes_[v].dist >= by) break;
    nodes_[v].y += by - nodes_[v].dist;
  }
}

// Sends what paths without slack over one meeting take, at most `most`, until one side has no way
// left. Returns how much that was. Sides are what the last searches settled: back from the meeting
// to `from`, and on from it to `to`. On either side a path goes down in rank, so that none runs in
// a circle and a node that leads nowhere is given up for good (Dinic 1970).
Power Walk::send(Index from, Meeting meeting, Index to, Power most) {
  const Link& link = links_[meeting.link];
  const auto is_tight = [&] { return nodes_[link.other].y + link.ahead == nodes_[meeting.node].y; };
  path_back_.clear();
  path_on_.clear();
  Power sent = 0;
  while (sent < most && is_tight() && extend<false>(&path_back_, meeting.node, from) &&
         extend<true>(&path_on_, link.other, to)) {
    Power amount = std::min(most - sent, room(link.arc));
    for (const Index l : path_back_) amount = std::min(amount, room(~links_[l].arc));
    for (const Index l : path_on_) amount = std::min(amount, room(links_[l].arc));
    // What the amount fills ends the part of a path that the next one shares.
    const auto fill = [&](std::vector<Index>* path, bool forward) {
      std::size_t open = path->size();
      for (std::size_t k = path->size(); k-- > 0;) {
        const Index arc = links_[(*path)[k]].arc;
        if (room(forward ? arc : ~arc) == amount) open = k;
        add(forward ? arc : ~arc, amount);
      }
      path->resize(open);
    };
    fill(&path_back_, false);
    fill(&path_on_, true);
    add(link.arc, amount);
    sent += amount;
  }
  return sent;
}

// Takes a path of links from `start` on to `goal`; false if no way is left at all.
template <bool kForward>
bool Walk::extend(std::vector<Index>* path, Index start, Index goal) {
  Index v = path->empty() ? start : links_[path->back()].other;
  while (v != goal) {
    const Index link = way_on<kForward>(v);
    if (link >= 0) {
      path->push_back(link);
      v = links_[link].other;
    } else if (path->empty()) {
      return false;
    } else {
      path->pop_back();
      v = path->empty() ? start : links_[path->back()].other;
      ++nodes_[v].next;
    }
  }
  return true;
}

// The first link of a node that may still lead to where its search began, or -1.
template <bool kForward>
Index Walk::way_on(Index v) {
  Node& node = nodes_[v];
  for (const Index end = nodes_[v + 1].begin; node.next < end; ++node.next) {
    const Link& link = links_[node.next];
    const Node& other = nodes_[link.other];
    const Time slack = kForward ? other.y - node.y + link.ahead : node.y - other.y + link.behind;
    if (slack == 0 && other.stamp == node.stamp && other.rank < node.rank) return node.next;
  }
  return -1;
}

// Flow that an arc takes (~a: gives back) at the duration it has.
Power Walk::room(Index arc) const {
  const Arc& of = arcs_[arc >= 0 ? arc : ~arc];
  return arc >= 0 ? limit_[of.level] - of.flow : of.flow - floor_of(of);
}

void Walk::add(Index arc, Power amount) {
  if (arc >= 0) {
    set_flow(arc, arcs_[arc].flow + amount);
  } else {
    set_flow(~arc, arcs_[~arc].flow - amount);
  }
}

// Flow below which the arc gives up the level that holds its last unit.
Power Walk::floor_of(const Arc& arc) const {
  const auto below = [&](Index level) { return level > arc.first_level ? limit_[level - 1] : 0; };
  const Power floor = below(arc.level);
  return arc.flow > floor ? floor : below(arc.level - 1);
}

void Walk::set_flow(Index a, Power flow) {
  Arc& arc = arcs_[a];
  arc.flow = flow;
  while (limit_[arc.level] <= flow) ++arc.level;
  while (arc.level > arc.first_level && limit_[arc.level - 1] > flow) --arc.level;
  Index holding = arc.level;  // the last unit of flow; arc.level takes the next
  if (holding > arc.first_level && limit_[holding - 1] == flow) --holding;
  Link &out = links_[arc.out], &in = links_[arc.in];
  out.ahead = in.behind = -duration_[arc.level];
  in.ahead = out.behind = flow > 0 ? duration_[holding] : kFar;
}

// The optimal event times are all those without negative slack on a residual arc, so an event can
// be earlier by its slack distance from the two that stay.
void Walk::event_times(Time* out) const {
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
      const Link& link = links_[l];
      reach(link.other, d + (nodes_[link.other].y - nodes_[v].y) + link.ahead);
    }
  }
  for (Index v = 0; v < num_nodes(); ++v) {
    out[order_[v]] = nodes_[v].y + time() - dist[v];
  }
}

void Walk::arc_flows(Power* out) const {
  for (Index a = 0; a < num_arcs(); ++a) out[arcs_[a].original] = arcs_[a].flow;
}

std::vector<Walk::Pair> Walk::own(std::vector<Pair> pairs) const {
  std::vector<Index> arc(num_arcs());
  for (Index a = 0; a < num_arcs(); ++a) arc[arcs_[a].original] = a;
  for (Pair& p : pairs) {
    p = {arc[p.arc], arc[p.later], position_[p.tail], position_[p.later_tail], position_[p.head]};
  }
  return pairs;
}

Time Walk::period(const std::vector<Pair>& pairs) const {
  Time period = -1;
  for (const Pair& p : pairs) {
    const Power flow = arcs_[p.arc].flow;
    const Time own = nodes_[p.later_tail].y - nodes_[p.tail].y;
    if (flow != arcs_[p.later].flow || (flow > 0 && period >= 0 && own != period)) return -1;
    if (flow > 0) period = own;
  }
  for (const Pair& p : pairs) {
    const Time takes = nodes_[p.head].y + period - nodes_[p.later_tail].y;
    if (arcs_[p.arc].flow == 0 && takes < duration_[arcs_[p.arc].first_level]) return -1;
  }
  return period;
}

Walk::Snapshot Walk::snapshot() const {
  Snapshot s;
  s.y.reserve(num_nodes());
  for (Index v = 0; v < num_nodes(); ++v) s.y.push_back(nodes_[v].y);
  s.flow.reserve(num_arcs());
  for (Index a = 0; a < num_arcs(); ++a) s.flow.push_back(arcs_[a].flow);
  s.total = flow_;
  s.cost = cost_;
  return s;
}

void Walk::restore(const Snapshot& s) {
  for (Index v = 0; v < num_nodes(); ++v) nodes_[v].y = s.y[v];
  for (Index a = 0; a < num_arcs(); ++a) set_flow(a, s.flow[a]);
  flow_ = s.total;
  cost_ = s.cost;
}

void Walk::push(Time key, Index node) {
  heap_.emplace_back(key, node);
  std::push_heap(heap_.begin(), heap_.end(), std::greater<>());
}

Index Walk::pop(Time* key) {
  std::pop_heap(heap_.begin(), heap_.end(), std::greater<>());
  const auto [top, node] = heap_.back();
  heap_.pop_back();
  *key = top;
  return node;
}

bool Trace::run(std::uint64_t work, Time until) {
  const std::uint64_t end = walk_.touched() + work;
  if (times_.empty() && from_flow_ < 0) record();
  while (walk_.touched() < end) {
    const bool more = walk_.step(times_.empty() ? 0 : until);
    if (walk_.flow() > from_flow_ || !more) record();
    if (!more || (!pairs_.empty() && !periods_.empty() && periods_.back() < 0)) return false;
  }
  return true;
}

std::size_t Trace::most_snapshots() const {
  const std::size_t bytes = walk_.num_nodes() * sizeof(Time) + walk_.num_arcs() * sizeof(Power);
  return std::clamp(kSnapshotBytes / bytes, kMinSnapshots, kMaxSnapshots) / 2 * 2;
}

void Trace::record() {
  if (!times_.empty() && times_.back() == walk_.time()) {
    flows_.back() = walk_.flow();
    periods_.back() = walk_.period(pairs_);
    return;
  }
  if (times_.size() % stride_ == 0) {
    if (snapshots_.size() == most_snapshots()) {
      for (std::size_t k = 0; 2 * k < snapshots_.size(); ++k) {
        if (k > 0) snapshots_[k] = std::move(snapshots_[2 * k]);
      }
      snapshots_.resize(snapshots_.size() / 2);
      stride_ *= 2;
    }
    snapshots_.push_back(walk_.snapshot());
  }
  times_.push_back(walk_.time());
  flows_.push_back(walk_.flow());
  costs_.push_back(walk_.cost());
  periods_.push_back(walk_.period(pairs_));
}

void Trace::watch(const std::vector<Walk::Pair>& pairs) {
  pairs_ = walk_.own(pairs);
  if (!times_.empty() && times_.back() == walk_.time()) periods_.back() = walk_.period(pairs_);
}

const Walk& Trace::at(Time t) {
  const auto corner = std::upper_bound(times_.begin(), times_.end(), t, std::greater<>());
  if (corner == times_.begin() || t < times_.back()) throw std::out_of_range("no such time");
  const std::size_t k = (corner - times_.begin() - 1) / stride_;
  if (cursor_.time() < t || cursor_.time() > times_[k * stride_]) cursor_.restore(snapshots_[k]);
  while (cursor_.time() > t && cursor_.step(t)) {
  }
  return cursor_;
}

}  // namespace envplan
