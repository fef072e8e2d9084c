#include "kernel.hpp"

namespace envplan {

namespace {

constexpr Time kInputLimit = Time{1} << 58;
// Farther than any residual path, and nearer than any way back over an arc without flow.
constexpr Time kAnywhere = kFar / 2;
static_assert(3 * kInputLimit < kAnywhere && kAnywhere <= kFar - 2 * kInputLimit);
constexpr Power kScaling = 16;  // between the amounts that start() settles first and next

void require(bool ok, const char* message) {
  if (!ok) throw std::invalid_argument(message);
}

}  // namespace

Walk::Walk(const Network& net)
    : duration_(net.duration, net.duration + net.curve_begin[net.num_curves]),
      limit_(net.limit, net.limit + net.curve_begin[net.num_curves]) {
  require(net.num_nodes >= 2 && net.source != net.sink, "a network needs a source and a sink");
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
  nodes_.assign(n + 1, Node{0, 0, 0, 0, 0, 0});
  arcs_.resize(m);
  out_.resize(m);
  in_.resize(m);
  std::vector<Index> by_tail(m), in_fill(n + 1, 0);
  for (Index a = 0; a < m; ++a) {
    by_tail[a] = a;
    ++nodes_[position_[net.tail[a]] + 1].out_begin;
    ++nodes_[position_[net.head[a]] + 1].in_begin;
  }
  for (Index v = 0; v < n; ++v) {
    nodes_[v + 1].out_begin += nodes_[v].out_begin;
    nodes_[v + 1].in_begin += nodes_[v].in_begin;
    in_fill[v] = nodes_[v].in_begin;
  }
  std::stable_sort(by_tail.begin(), by_tail.end(), [&](Index a, Index b) {
    return position_[net.tail[a]] < position_[net.tail[b]];
  });
  for (Index a = 0; a < m; ++a) {
    const Index original = by_tail[a];
    const Index tail = position_[net.tail[original]], head = position_[net.head[original]];
    const Index level = net.curve_begin[net.curve[original]], slot = in_fill[head]++;
    arcs_[a] = Arc{tail, head, level, level, slot, original, 0};
    out_[a] = Out{head, duration_[level]};
    in_[slot] = In{tail, a, kFar};
  }
  source_ = position_[net.source];
  sink_ = position_[net.sink];

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
    for (Index a = nodes_[v].out_begin; a < nodes_[v + 1].out_begin; ++a) {
      Index level = arcs_[a].first_level;
      while (fastest && limit_[level] != kInfinite) ++level;
      Time& head = (*at)[arcs_[a].head];
      head = std::max(head, (*at)[v] + duration_[level]);
    }
  }
  return (*at)[sink_];
}

void Walk::start(const Power* guess, Power total, bool rough) {
  const Index n = num_nodes();
  std::vector<Time> at(n, 0);
  for (Index a = 0; a < static_cast<Index>(arcs_.size()); ++a)
    set_flow(a, guess[arcs_[a].original]);
  for (Index v = 0; v < n; ++v) {
    for (Index a = nodes_[v].out_begin; a < nodes_[v + 1].out_begin; ++a) {
      at[out_[a].head] = std::max(at[out_[a].head], at[v] + out_[a].duration);
    }
  }
  for (Index v = 0; v < n; ++v) nodes_[v].y = at[v];

  std::vector<Power> excess(n, 0);
  excess[source_] += total;
  excess[sink_] -= total;
  for (Index a = 0; a < static_cast<Index>(arcs_.size()); ++a) {
    Arc& arc = arcs_[a];
    // Complementary slackness: at duration d the flow lies between the limits around d.
    const Time d = at[arc.head] - at[arc.tail];
    Index level = arc.first_level;
    while (duration_[level] > d) ++level;
    const Power least = level > arc.first_level ? limit_[level - 1] : 0;
    const Power most = duration_[level] == d ? limit_[level] : least;
    set_flow(a, std::clamp(arc.flow, least, most));
    excess[arc.tail] -= arc.flow;
    excess[arc.head] += arc.flow;
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
        const Index to = search(v, kAnywhere, lacks);
        if (to < 0) break;
        lower(nodes_[to].dist);
        const Power sent = augment(v, to, std::min(excess[v], -excess[to]));
        excess[v] -= sent;
        excess[to] += sent;
        lacking -= !lacks(to);
      }
    }
  }
  const Time end = nodes_[sink_].y;
  for (Index v = 0; v < n; ++v) nodes_[v].y -= end;
  flow_ = total;
  cost_ = 0;
  for (const Arc& arc : arcs_) {
    const Time d = nodes_[arc.head].y - nodes_[arc.tail].y;
    for (Index l = arc.first_level; duration_[l] > d; ++l) {
      const Time saved = duration_[l] - std::max(duration_[l + 1], d);
      cost_ += static_cast<Energy>(limit_[l]) * saved;
    }
  }
}

bool Walk::step(Time floor) {
  const Time bound = time() - std::max(floor, min_time_);
  if (bound <= 0) return false;
  if (search(source_, bound, [this](Index v) { return v == sink_; }) < 0) {
    lower(bound);
    return false;
  }
  lower(nodes_[sink_].dist);
  // The network is acyclic, so no arc carries more than the total: checking it keeps all in range.
  flow_ += augment(source_, sink_, kInfinite / 2 - flow_);
  if (flow_ >= kInfinite / 2) throw std::overflow_error("a marginal cost is out of range");
  return true;
}

// Shortest slack distances from `from`, as far as the nearest target and nearer than `bound`.
// Returns that target, or -1 where none is nearer than `bound`. Arcs without slack are followed at
// once; only the others go through the heap.
template <class IsTarget>
Index Walk::search(Index from, Time bound, IsTarget is_target) {
  const std::uint32_t stamp = ++stamp_;
  if (stamp == 0) throw std::overflow_error("too many steps");
  near_.clear();
  heap_.clear();
  stack_.clear();
  nodes_[from].dist = 0;
  nodes_[from].stamp = stamp;
  stack_.push_back(from);
  Time now = 0;
  Index target = -1;
  const auto reach = [&](Index w, Time dist, Index parent) {
    Node& node = nodes_[w];
    if (node.stamp == stamp && node.dist <= dist) return;
    node.stamp = stamp;
    node.dist = dist;
    node.parent = parent;
    if (is_target(w)) {
      bound = dist;  // nothing as far as that matters any more
      target = w;
    } else if (dist == now) {
      stack_.push_back(w);
    } else {
      push(dist, w);
    }
  };
  for (;;) {
    while (!stack_.empty()) {
      const Index v = stack_.back();
      stack_.pop_back();
      near_.push_back(v);
      const Node& node = nodes_[v];
      const Time base = now - node.y;
      const Index out_end = nodes_[v + 1].out_begin, in_end = nodes_[v + 1].in_begin;
      for (Index a = node.out_begin; a < out_end; ++a) {
        const Time dist = base + nodes_[out_[a].head].y - out_[a].duration;
        if (dist < bound) reach(out_[a].head, dist, a);
      }
      for (Index k = node.in_begin; k < in_end; ++k) {
        const Time dist = base + nodes_[in_[k].tail].y + in_[k].duration;
        if (dist < bound) reach(in_[k].tail, dist, ~in_[k].arc);
      }
      if (bound == now) return target;
    }
    Index v;
    do {
      if (heap_.empty()) return target;
      v = pop(&now);
    } while (nodes_[v].dist != now);
    if (now >= bound) return target;
    stack_.push_back(v);
  }
}

// Moves the events nearer than `by`: the cut's near side. T falls by `by`.
void Walk::lower(Time by) {
  cost_ += static_cast<Energy>(flow_) * by;
  for (const Index v : near_) {
    if (nodes_[v].dist >= by) break;
    nodes_[v].y += by - nodes_[v].dist;
  }
  touched_ += near_.size();
}

// Sends what the path found by the last search takes, at most `most`. Returns it.
Power Walk::augment(Index from, Index to, Power most) {
  for (Index v = to; v != from;) {
    const Index p = nodes_[v].parent;
    const Arc& arc = arcs_[p >= 0 ? p : ~p];
    most = std::min(most, p >= 0 ? limit_[arc.level] - arc.flow : arc.flow - floor_of(arc));
    v = p >= 0 ? arc.tail : arc.head;
  }
  for (Index v = to; v != from;) {
    const Index p = nodes_[v].parent;
    const Index a = p >= 0 ? p : ~p;
    set_flow(a, arcs_[a].flow + (p >= 0 ? most : -most));
    v = p >= 0 ? arcs_[a].tail : arcs_[a].head;
  }
  return most;
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
  out_[a].duration = duration_[arc.level];
  Index holding = arc.level;
  if (holding > arc.first_level && limit_[holding - 1] == flow) --holding;
  in_[arc.in_slot].duration = flow > 0 ? duration_[holding] : kFar;
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
    for (Index a = nodes_[v].out_begin; a < nodes_[v + 1].out_begin; ++a) {
      const Time length = nodes_[out_[a].head].y - nodes_[v].y;
      reach(out_[a].head, d + length - out_[a].duration);
    }
    for (Index k = nodes_[v].in_begin; k < nodes_[v + 1].in_begin; ++k) {
      const Time length = nodes_[v].y - nodes_[in_[k].tail].y;
      reach(in_[k].tail, d + in_[k].duration - length);
    }
  }
  for (Index v = 0; v < num_nodes(); ++v) {
    out[order_[v]] = nodes_[v].y + time() - dist[v];
  }
}

void Walk::arc_flows(Power* out) const {
  for (const Arc& arc : arcs_) out[arc.original] = arc.flow;
}

Walk::Snapshot Walk::snapshot() const {
  Snapshot s;
  s.y.reserve(num_nodes());
  for (Index v = 0; v < num_nodes(); ++v) s.y.push_back(nodes_[v].y);
  s.flow.reserve(arcs_.size());
  for (const Arc& arc : arcs_) s.flow.push_back(arc.flow);
  s.total = flow_;
  s.cost = cost_;
  return s;
}

void Walk::restore(const Snapshot& s) {
  for (Index v = 0; v < num_nodes(); ++v) nodes_[v].y = s.y[v];
  for (std::size_t a = 0; a < arcs_.size(); ++a) set_flow(static_cast<Index>(a), s.flow[a]);
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

bool Trace::run(std::uint64_t work) {
  const std::uint64_t end = walk_.touched() + work;
  while (walk_.touched() < end) {
    const bool more = walk_.step(0);
    if (walk_.flow() > from_flow_ || !more) record();
    if (!more) return false;
  }
  return true;
}

void Trace::record() {
  if (!times_.empty() && times_.back() == walk_.time()) {
    flows_.back() = walk_.flow();
    return;
  }
  if (times_.size() % stride_ == 0) {
    if (snapshots_.size() == kMaxSnapshots) {
      for (std::size_t k = 0; 2 * k < snapshots_.size(); ++k) {
        if (k > 0) snapshots_[k] = std::move(snapshots_[2 * k]);
      }
      snapshots_.resize(kMaxSnapshots / 2);
      stride_ *= 2;
    }
    snapshots_.push_back(walk_.snapshot());
  }
  times_.push_back(walk_.time());
  flows_.push_back(walk_.flow());
  costs_.push_back(walk_.cost());
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
