#include "parts.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <utility>

namespace envplan {

namespace {

using std::int64_t;
using std::size_t;

constexpr Index kMaxParts = 10000;  // extend() recurses once a part
constexpr double kFar = std::numeric_limits<double>::infinity();
constexpr double kMargin = 1e-11;  // of weighted sums, which are about 1
constexpr size_t kFewEdges = 6;    // a part, that the dynamic program takes
// Options between vertices are first looked for in so much of the triangle.
constexpr double kShares[] = {1.0 / 16, 1.0 / 4, 1};

[[noreturn]] void too_many() {
  throw std::overflow_error("an operation has more options by parts than can be kept");
}

struct Point {
  Time time;
  int64_t cost;
};

// Some parts at one clock; none where the clock may now change.
struct Edge {
  Time time;
  int64_t cost;
  Index from, to;
  Index run;  // its options, one a part
};
using Edges = std::vector<Edge>;

// A way to a node: that to another node, then an edge.
struct Label {
  Time time;
  int64_t cost;
  Index before, run;
};

struct Weights {
  double time, cost;
  template <class Taken>
  double of(const Taken& taken) const {
    return time * static_cast<double>(taken.time) + cost * static_cast<double>(taken.cost);
  }
};

// Sorts, and leaves out what another beats or undercuts by no more than slack.
void keep_best(std::vector<Label>* labels, int64_t slack) {
  auto& all = *labels;
  std::sort(all.begin(), all.end(), [](const Label& a, const Label& b) {
    return a.time != b.time ? a.time < b.time : a.cost < b.cost;
  });
  size_t size = 0;
  for (const Label& label : all) {
    if (size == 0 || label.cost < all[size - 1].cost - slack) all[size++] = label;
  }
  all.resize(size);
}

// Sorts, and keeps the vertices of the lower hull.
void keep_hull(std::vector<Label>* labels) {
  keep_best(labels, 0);
  auto& all = *labels;
  size_t size = 0;
  for (const Label& next : all) {
    while (size >= 2) {
      const Label &a = all[size - 2], &b = all[size - 1];
      if (static_cast<__int128>(b.cost - a.cost) * (next.time - a.time) <
          static_cast<__int128>(next.cost - a.cost) * (b.time - a.time)) {
        break;
      }
      --size;
    }
    all[size++] = next;
  }
  all.resize(size);
}

class Composition {
 public:
  Composition(const PartsProblem& problem, int64_t most)
      : p_(problem),
        most_(most),
        apart_(std::max(problem.latency, problem.min_dwell)),
        clocks_(apart_ == 0 ? 0 : problem.num_clocks),
        last_(start(problem.num_parts)),
        at_(static_cast<size_t>(last_) + 1),
        arrivals_(at_.size()) {
    runs_.emplace_back();  // of edges through no part
    for (Index part = 0; part < p_.num_parts; ++part) leave(part);
    double time = 0, cost = 0;
    for (Index part = 0; part < p_.num_parts; ++part) {
      double longest = 0, dearest = 0;
      for (Index o = first(part, 0); o < first(part + 1, 0); ++o) {
        longest = std::max(longest, static_cast<double>(p_.time[o]));
        const auto own = static_cast<double>(option_cost(o));
        dearest = std::max(dearest, own < 0 ? -own : own);
      }
      time += longest;
      cost += dearest;
    }
    unit_ = {1 / time, 1 / std::max(1.0, cost)};
  }

  std::vector<Composed> options() {
    std::vector<Label> found;
    const std::vector<Label> hull = vertices();
    for (size_t k = 0; k < hull.size(); ++k) {
      if (k > 0) find_between(hull[k - 1], hull[k], &found);
      found.push_back(hull[k]);
    }
    std::vector<Composed> options;
    for (const Label& label : found) {
      const int64_t energy = label.cost + p_.waiting * label.time;
      options.push_back({label.time, energy, std::move(chosen_[label.before])});
    }
    return options;
  }

 private:
  // What is known of one end of a stretch of the hull.
  struct End {
    Weights weights;
    Point at;      // a vertex that is best by them
    double least;  // what it takes by them
  };

  // What a way and the least that may follow it may take.
  struct Bound {
    Weights weights;
    double most;
    std::vector<double> to_end;
    bool allows(const Label& label, Index node) const {
      return weights.of(label) + to_end[node] <= most;
    }
  };

  Index start(Index part) const { return part * (clocks_ + 1) + clocks_; }
  Index first(Index part, Index clock) const {
    return p_.option_begin[static_cast<int64_t>(part) * p_.num_clocks + clock];
  }
  int64_t option_cost(Index o) const { return p_.energy[o] - p_.waiting * p_.time[o]; }

  // All edges from the nodes of a part, by node.
  void leave(Index part) {
    std::vector<Index> run;
    if (clocks_ == 0) {
      std::vector<Label> options;
      for (Index o = first(part, 0); o < first(part + 1, 0); ++o) {
        options.push_back({p_.time[o], option_cost(o), o, 0});
      }
      keep_best(&options, 0);
      for (const Label& option : options) {
        run.assign(1, option.before);
        add(start(part), start(part + 1), {option.time, option.cost}, run);
      }
      return;
    }
    for (Index clock = 0; part > 0 && clock < clocks_; ++clock) {
      const Index node = part * (clocks_ + 1) + clock;
      if (p_.asks[part]) edges_.push_back({0, 0, node, start(part), 0});
      extend(node, part, clock, {0, 0}, 1, 1, &run);
    }
    if (part > 0 && !p_.asks[part]) return;
    // The first clock is asked for as it is needed, the others before.
    const Time least = part > 0 ? apart_ : apart_ + p_.latency;
    const Time least_at_end = part > 0 ? p_.min_dwell : 0;
    for (Index clock = 0; clock < clocks_; ++clock) {
      extend(start(part), part, clock, {0, 0}, least, least_at_end, &run);
    }
  }

  // Goes on at a clock from the start of a part until so much time has passed.
  void extend(Index from, Index part, Index clock, Point so_far, Time least, Time least_at_end,
              std::vector<Index>* run) {
    const bool ends = part == p_.num_parts;
    if (ends ? so_far.time < least_at_end : so_far.time < least) {
      if (ends) return;
    } else {
      add(from, ends ? last_ : part * (clocks_ + 1) + clock, so_far, *run);
      return;
    }
    for (Index o = first(part, clock); o < first(part, clock + 1); ++o) {
      run->push_back(o);
      const Point now{so_far.time + p_.time[o], so_far.cost + option_cost(o)};
      extend(from, part + 1, clock, now, least, least_at_end, run);
      run->pop_back();
    }
  }

  void add(Index from, Index to, Point taken, const std::vector<Index>& run) {
    if (static_cast<int64_t>(runs_.size()) >= most_) too_many();
    edges_.push_back({taken.time, taken.cost, from, to, static_cast<Index>(runs_.size())});
    runs_.push_back(run);
  }

  Weights scaled(double time, double cost) const {
    const double x = time / unit_.time, y = cost / unit_.cost;
    return {unit_.time * x / (x + y), unit_.cost * y / (x + y)};
  }

  // The least that ways through each edge take.
  void least_through(const Edges& edges, Weights weights, std::vector<double>* through) {
    to_end_.assign(at_.size(), kFar);
    to_end_[last_] = 0;
    for (size_t k = edges.size(); k-- > 0;) {
      const Edge& edge = edges[k];
      to_end_[edge.from] = std::min(to_end_[edge.from], weights.of(edge) + to_end_[edge.to]);
    }
    from_start_.assign(at_.size(), kFar);
    from_start_[start(0)] = 0;
    best_edge_.resize(at_.size());
    through->resize(edges.size());
    for (size_t k = 0; k < edges.size(); ++k) {
      const Edge& edge = edges[k];
      const double now = from_start_[edge.from] + weights.of(edge);
      if (now < from_start_[edge.to]) {
        from_start_[edge.to] = now;
        best_edge_[edge.to] = k;
      }
      (*through)[k] = now + to_end_[edge.to];
    }
  }

  // The end of a stretch by some weights, with what least_through says.
  End end_by(const Edges& edges, Weights weights, std::vector<double>* through) {
    least_through(edges, weights, through);
    Point at{0, 0};
    for (Index node = last_; node != start(0);) {
      const Edge& edge = edges[best_edge_[node]];
      at = {at.time + edge.time, at.cost + edge.cost};
      node = edge.from;
    }
    return {weights, at, weights.of(at)};
  }

  // The vertices of the hull. Of a label that was found, `before` is a number of chosen_.
  std::vector<Label> vertices() {
    std::vector<double> fast, cheap;
    const End a = end_by(edges_, {unit_.time, 0}, &fast);
    const End b = end_by(edges_, {0, unit_.cost}, &cheap);
    std::vector<Label> found;
    find_vertices(a, b, edges_, fast, cheap, &found);
    keep_hull(&found);
    return found;
  }

  // Those between two, and some other options, over the edges that may lead below the line between
  // them.
  void find_vertices(const End& a, const End& b, const Edges& edges,
                     const std::vector<double>& through_a, const std::vector<double>& through_b,
                     std::vector<Label>* found) {
    const double room_a = a.weights.of(b.at) - a.least + kMargin;
    const double room_b = b.weights.of(a.at) - b.least + kMargin;
    Edges left;
    std::vector<double> left_a, left_b;
    left.reserve(edges.size());
    for (size_t k = 0; k < edges.size(); ++k) {
      const double over_a = (through_a[k] - a.least - kMargin) / room_a;
      const double over_b = (through_b[k] - b.least - kMargin) / room_b;
      if (over_a + over_b > 1) continue;
      left.push_back(edges[k]);
      left_a.push_back(through_a[k]);
      left_b.push_back(through_b[k]);
    }
    const bool apart = a.at.time < b.at.time && a.at.cost > b.at.cost;
    if (apart && left.size() > kFewEdges * static_cast<size_t>(p_.num_parts)) {
      std::vector<double> through;
      const Weights line = along(a.at, b.at);
      const End middle = end_by(left, line, &through);
      if (line.of(a.at) - middle.least > kMargin) {
        find_vertices(a, middle, left, left_a, through, found);
        find_vertices(middle, b, left, through, left_b, found);
        return;
      }
    }
    run_through(
        left, {},
        [&](std::vector<Label>* labels, Index) {
          keep_hull(labels);
          // What no weights between those of the ends want.
          size_t begin = 0, end = labels->size();
          const Label* all = labels->data();
          while (begin + 1 < end &&
                 a.weights.of(all[begin + 1]) < a.weights.of(all[begin]) - kMargin)
            ++begin;
          while (end > begin + 1 &&
                 b.weights.of(all[end - 2]) < b.weights.of(all[end - 1]) - kMargin)
            --end;
          labels->resize(end);
          labels->erase(labels->begin(), labels->begin() + static_cast<std::ptrdiff_t>(begin));
        },
        found);
  }

  // The weights by which two points take the same.
  template <class Taken>
  Weights along(const Taken& a, const Taken& b) const {
    return scaled(static_cast<double>(a.cost - b.cost), static_cast<double>(b.time - a.time));
  }

  // Options between two vertices such that every other one saves no more than the slack on one of
  // these or on the faster vertex that is no slower than it.
  void find_between(const Label& a, const Label& b, std::vector<Label>* found) {
    std::vector<Label> kept{a, b};
    const Weights line = along(a, b);
    const double least = line.of(a);
    for (const double share : kShares) {
      if (p_.slack == 0 && share < 1) continue;
      std::vector<Label> more;
      for (size_t k = 1; k < kept.size(); ++k) {
        const Point corner{kept[k].time, kept[k - 1].cost - p_.slack};
        if (corner.cost <= kept[k].cost || line.of(corner) < least - kMargin) continue;
        look_between(kept[k - 1], kept[k], line, least, share, &more);
      }
      kept.insert(kept.end(), more.begin(), more.end());
      keep_best(&kept, 0);
    }
    found->insert(found->end(), kept.begin() + 1, kept.end() - 1);
  }

  // Options between two others near the line by some weights; with the whole share all, but for
  // half of the slack on the way and half of it at the end.
  void look_between(const Label& a, const Label& b, Weights line, double least, double share,
                    std::vector<Label>* found) {
    const Point corner{b.time, a.cost - p_.slack / 2};
    std::vector<Bound> bounds;
    Edges left = edges_;
    const auto bounded = [&](Weights weights, double most) {
      std::vector<double> through;
      least_through(left, weights, &through);
      size_t kept = 0;
      for (size_t k = 0; k < left.size(); ++k) {
        if (through[k] <= most) left[kept++] = left[k];
      }
      left.resize(kept);
      bounds.push_back({weights, most, to_end_});
    };
    bounded(line, least + share * (line.of(corner) - least) + kMargin);
    for (const auto& [x, y] : {std::pair{4.0, 1.0}, {1.0, 4.0}, {1.0, 0.0}, {0.0, 1.0}}) {
      const Weights weights = scaled(x * line.time, y * line.cost);
      bounded(weights, weights.of(corner) + kMargin);
    }
    // Ways have up to two nodes a part.
    const int64_t slack = share < 1 ? p_.slack / 8 : p_.slack / 4 / p_.num_parts;
    run_through(
        left, bounds,
        [&](std::vector<Label>* labels, Index node) {
          keep_best(labels, node == last_ ? p_.slack / 2 : slack);
        },
        found);
  }

  // The choices that are left of all ways over some edges that keep to the bounds.
  // keep(labels, node) leaves some of a node's labels out.
  template <class Keep>
  void run_through(const Edges& edges, const std::vector<Bound>& bounds, Keep keep,
                   std::vector<Label>* found) {
    labels_.assign(1, {0, 0, -1, 0});
    at_[start(0)] = {0, 1};
    at_[last_] = {0, 0};
    Index node = start(0);
    const auto merge = [&](Index next) {
      node = next;
      merge_into(edges, node, bounds);
      keep(&best_, node);
      const auto begin = static_cast<Index>(labels_.size());
      labels_.insert(labels_.end(), best_.begin(), best_.end());
      at_[node] = {begin, static_cast<Index>(labels_.size())};
      if (static_cast<int64_t>(labels_.size() + chosen_.size()) > most_) too_many();
    };
    for (size_t k = 0; k < edges.size(); ++k) {
      if (edges[k].from != node) merge(edges[k].from);
      arrivals_[edges[k].to].push_back(static_cast<Index>(k));
    }
    if (!edges.empty()) merge(last_);
    for (const Edge& edge : edges) arrivals_[edge.to].clear();
    for (Index k = at_[last_].first; k < at_[last_].second; ++k) {
      std::vector<Index> options;
      for (Index at = k; at > 0; at = labels_[at].before) {
        const auto& run = runs_[labels_[at].run];
        options.insert(options.end(), run.rbegin(), run.rend());
      }
      std::reverse(options.begin(), options.end());
      const auto number = static_cast<Index>(chosen_.size());
      found->push_back({labels_[k].time, labels_[k].cost, number, 0});
      chosen_.push_back(std::move(options));
    }
  }

  // All that arrives at a node within the bounds, into best_.
  void merge_into(const Edges& edges, Index node, const std::vector<Bound>& bounds) {
    best_.clear();
    for (const Index k : arrivals_[node]) {
      const Edge& edge = edges[k];
      for (Index n = at_[edge.from].first; n < at_[edge.from].second; ++n) {
        const Label now{labels_[n].time + edge.time, labels_[n].cost + edge.cost, n, edge.run};
        const bool allowed = std::all_of(bounds.begin(), bounds.end(),
                                         [&](const Bound& b) { return b.allows(now, node); });
        if (allowed) best_.push_back(now);
      }
    }
  }

  const PartsProblem& p_;
  const int64_t most_;
  const Time apart_;    // least time between two requests
  const Index clocks_;  // 0 where parts are independent
  const Index last_;    // node
  Weights unit_{1, 1};
  Edges edges_;
  std::vector<std::vector<Index>> runs_;

  std::vector<std::vector<Index>> chosen_;  // the option of each part, of what was found

  // Of the pass that runs, by node.
  std::vector<std::pair<Index, Index>> at_;  // its labels
  std::vector<std::vector<Index>> arrivals_;
  std::vector<double> to_end_, from_start_;
  std::vector<size_t> best_edge_;
  std::vector<Label> labels_, best_;
};

}  // namespace

namespace {

void check(const PartsProblem& p) {
  require(p.num_parts > 0 && p.num_parts <= kMaxParts && p.num_clocks > 0,
          "there must be parts, and not too many, and clocks");
  require(static_cast<int64_t>(p.num_parts) * p.num_clocks < std::numeric_limits<Index>::max(),
          "there are too many clocks");
  require_offsets(p.option_begin, p.num_parts * p.num_clocks, p.num_options,
                  "option_begin must ascend from 0 and span the options");
  require(p.latency >= 0 && p.min_dwell >= 0 && p.waiting >= 0 && p.slack >= 0,
          "latency, dwell, blocking power and slack must not be negative");
  constexpr __int128 kLimit = __int128{1} << 62;
  __int128 time = 0, energy = 0;
  for (Index part = 0; part < p.num_parts; ++part) {
    int64_t longest = 0, dearest = 0;
    for (Index o = p.option_begin[part * p.num_clocks];
         o < p.option_begin[(part + 1) * p.num_clocks]; ++o) {
      require(p.time[o] >= 1 && p.energy[o] >= 0, "an option is out of range");
      longest = std::max(longest, p.time[o]);
      dearest = std::max(dearest, p.energy[o]);
    }
    require(longest > 0, "a part has no options");
    time += longest;
    energy += dearest;
  }
  if (energy >= kLimit || time >= kLimit || time * p.waiting >= kLimit ||
      std::max(p.latency, p.min_dwell) >= kLimit / 2) {
    throw std::overflow_error("times or energies of parts are out of range");
  }
}

}  // namespace

std::vector<Composed> compose(const PartsProblem& problem, int64_t most) {
  check(problem);
  most = std::min<int64_t>(most, std::numeric_limits<Index>::max());
  return Composition(problem, most).options();
}

}  // namespace envplan
