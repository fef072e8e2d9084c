#include "parts.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <utility>

namespace envplan {

namespace {

using std::int64_t;
using std::size_t;

constexpr Index kMaxParts = 10000;  // extend_run() recurses once a part
constexpr double kUnreachable = std::numeric_limits<double>::infinity();
constexpr double kMargin = 1e-11;       // of weights of paths, which are about 1
constexpr size_t kFewEdgesPerPart = 6;  // as many the dynamic program takes at once
constexpr Index kEmptyRun = 0;          // of edges through no part
// Options between vertices are first looked for in so much of the triangle.
constexpr double kTriangleShares[] = {1.0 / 16, 1.0 / 4, 1};

[[noreturn]] void too_many() {
  throw std::overflow_error("an operation has more options by parts than can be kept");
}

struct Point {
  Time time;
  int64_t cost;
};

struct PartOption {
  Time time;
  int64_t cost;
  Index option;
};

// Some parts at one clock; none where the clock may now change.
struct Edge {
  Time time;
  int64_t cost;
  Index tail, head;  // nodes
  Index run;         // index into runs_
};
using Edges = std::vector<Edge>;

// A path from the first node to another one: the path of a label before, then the last edge.
struct Label {
  Time time;
  int64_t cost;
  Index previous;  // index into labels_
  Index run;       // of the last edge
};

// A path from the first node to the last one.
struct Choice {
  Time time;
  int64_t cost;
  Index options;  // index into options_of_choice_
};

struct LabelRange {
  Index begin, end;
};

struct Weights {
  double time, cost;
  // The weighted sum of something's time and cost.
  template <class HasTimeAndCost>
  double weigh(const HasTimeAndCost& item) const {
    return time * static_cast<double>(item.time) + cost * static_cast<double>(item.cost);
  }
};

// Sorts by time, and drops each item that costs no less than a faster one less the slack.
template <class HasTimeAndCost>
void keep_best(std::vector<HasTimeAndCost>* items, int64_t slack) {
  auto& all = *items;
  std::sort(all.begin(), all.end(), [](const HasTimeAndCost& a, const HasTimeAndCost& b) {
    return a.time != b.time ? a.time < b.time : a.cost < b.cost;
  });
  size_t size = 0;
  for (const HasTimeAndCost& item : all) {
    if (size == 0 || item.cost < all[size - 1].cost - slack) all[size++] = item;
  }
  all.resize(size);
}

// Sorts by time, and keeps the vertices of the lower hull.
template <class HasTimeAndCost>
void keep_hull(std::vector<HasTimeAndCost>* items) {
  keep_best(items, 0);
  auto& all = *items;
  size_t size = 0;
  for (const HasTimeAndCost& next : all) {
    while (size >= 2) {
      const HasTimeAndCost &a = all[size - 2], &b = all[size - 1];
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
  Composition(const PartsProblem& problem, int64_t max_choices)
      : problem_(problem),
        max_choices_(max_choices),
        min_request_spacing_(std::max(problem.latency, problem.min_dwell)),
        num_clocks_kept_(min_request_spacing_ == 0 ? 0 : problem.num_clocks),
        end_node_(start_node(problem.num_parts)),
        labels_of_node_(static_cast<size_t>(end_node_) + 1),
        edges_into_(labels_of_node_.size()),
        unit_(unit_weights()) {
    runs_.emplace_back();  // kEmptyRun
    for (Index part = 0; part < problem_.num_parts; ++part) add_edges_from(part);
  }

  std::vector<Composed> options() {
    std::vector<Choice> choices;
    const std::vector<Choice> hull = vertices();
    for (size_t k = 0; k < hull.size(); ++k) {
      if (k > 0) append_choices_between(hull[k - 1], hull[k], &choices);
      choices.push_back(hull[k]);
    }
    std::vector<Composed> options;
    for (const Choice& choice : choices) {
      const int64_t energy = choice.cost + problem_.waiting * choice.time;
      options.push_back({choice.time, energy, std::move(options_of_choice_[choice.options])});
    }
    return options;
  }

 private:
  // One end of a stretch of the hull: a vertex that weighs least by some weights.
  struct HullEnd {
    Weights weights;
    Point vertex;
    double weight;                // of the vertex
    std::vector<double> through;  // (edges) of the lightest path through each
  };

  // A limit on what a path, completed by the lightest one to the last node, may weigh.
  struct Bound {
    Weights weights;
    double max_weight;
    std::vector<double> to_end;  // (nodes) of the lightest path from each to the last one
    bool allows(const Label& label, Index node) const {
      return weights.weigh(label) + to_end[node] <= max_weight;
    }
  };

  // Parts one after the other at one clock, at least as long as it has to be kept.
  struct ClockRun {
    Index from;  // node
    Index clock;
    Time min_time;
    Time min_time_at_end;  // where the operation ends with it
  };

  // Nodes. Parts are independent where no clocks have to be kept: then they have start nodes only.
  bool parts_are_independent() const { return num_clocks_kept_ == 0; }
  Index start_node(Index part) const { return clock_node(part, num_clocks_kept_); }
  Index clock_node(Index part, Index clock) const { return part * (num_clocks_kept_ + 1) + clock; }

  Index option_begin(Index part, Index clock) const {
    return problem_.option_begin[static_cast<int64_t>(part) * problem_.num_clocks + clock];
  }
  int64_t option_cost(Index option) const {
    return problem_.energy[option] - problem_.waiting * problem_.time[option];
  }

  // Weights by which the slowest path and the dearest one weigh about 1.
  Weights unit_weights() const {
    double time = 0, cost = 0;
    for (Index part = 0; part < problem_.num_parts; ++part) {
      double max_time = 0, max_cost = 0;
      for (Index o = option_begin(part, 0); o < option_begin(part + 1, 0); ++o) {
        max_time = std::max(max_time, static_cast<double>(problem_.time[o]));
        const auto cost_of_option = static_cast<double>(option_cost(o));
        max_cost = std::max(max_cost, cost_of_option < 0 ? -cost_of_option : cost_of_option);
      }
      time += max_time;
      cost += max_cost;
    }
    return {1 / time, 1 / std::max(1.0, cost)};
  }

  // Weights in the ratio of these, by which paths weigh about 1.
  Weights normalized(double time, double cost) const {
    const double x = time / unit_.time, y = cost / unit_.cost;
    return {unit_.time * x / (x + y), unit_.cost * y / (x + y)};
  }

  // The weights by which two points weigh the same.
  template <class HasTimeAndCost>
  Weights along(const HasTimeAndCost& faster, const HasTimeAndCost& cheaper) const {
    return normalized(static_cast<double>(faster.cost - cheaper.cost),
                      static_cast<double>(cheaper.time - faster.time));
  }

  // All edges from the nodes of a part, by node. Edges are in topological order: by their tails.
  void add_edges_from(Index part) {
    if (parts_are_independent()) {
      add_edge_for_each_option(part);
      return;
    }
    if (part > 0) add_edges_from_kept_clocks(part);
    if (part == 0 || problem_.asks[part]) add_edges_from_clock_change(part);
  }

  void add_edge_for_each_option(Index part) {
    std::vector<PartOption> options;
    for (Index o = option_begin(part, 0); o < option_begin(part + 1, 0); ++o) {
      options.push_back({problem_.time[o], option_cost(o), o});
    }
    keep_best(&options, 0);
    for (const PartOption& option : options) {
      add_edge(start_node(part), start_node(part + 1), {option.time, option.cost}, {option.option});
    }
  }

  void add_edges_from_kept_clocks(Index part) {
    std::vector<Index> run;
    for (Index clock = 0; clock < num_clocks_kept_; ++clock) {
      const Index node = clock_node(part, clock);
      if (problem_.asks[part]) edges_.push_back({0, 0, node, start_node(part), kEmptyRun});
      extend_run({node, clock, 1, 1}, part, {0, 0}, &run);  // ends after one part
    }
  }

  void add_edges_from_clock_change(Index part) {
    // The first clock is asked for as it is needed, the others before.
    const Time min_time = part > 0 ? min_request_spacing_ : min_request_spacing_ + problem_.latency;
    const Time min_time_at_end = part > 0 ? problem_.min_dwell : 0;
    std::vector<Index> run;
    for (Index clock = 0; clock < num_clocks_kept_; ++clock) {
      extend_run({start_node(part), clock, min_time, min_time_at_end}, part, {0, 0}, &run);
    }
  }

  // Adds an edge for each way to go on from the start of a part until the run is long enough.
  // `options` are those so far, and `total` is theirs.
  void extend_run(const ClockRun& run, Index part, Point total, std::vector<Index>* options) {
    if (part == problem_.num_parts) {
      if (total.time >= run.min_time_at_end) add_edge(run.from, end_node_, total, *options);
      return;
    }
    if (total.time >= run.min_time) {
      add_edge(run.from, clock_node(part, run.clock), total, *options);
      return;
    }
    for (Index o = option_begin(part, run.clock); o < option_begin(part, run.clock + 1); ++o) {
      options->push_back(o);
      const Point longer{total.time + problem_.time[o], total.cost + option_cost(o)};
      extend_run(run, part + 1, longer, options);
      options->pop_back();
    }
  }

  void add_edge(Index tail, Index head, Point total, const std::vector<Index>& options) {
    if (static_cast<int64_t>(runs_.size()) >= max_choices_) too_many();
    edges_.push_back({total.time, total.cost, tail, head, static_cast<Index>(runs_.size())});
    runs_.push_back(options);
  }

  // Writes what the lightest path through each edge weighs. Leaves to_end_ and lightest_edge_.
  void weigh_paths(const Edges& edges, Weights weights, std::vector<double>* through) {
    to_end_.assign(labels_of_node_.size(), kUnreachable);
    to_end_[end_node_] = 0;
    for (size_t k = edges.size(); k-- > 0;) {
      const Edge& edge = edges[k];
      to_end_[edge.tail] = std::min(to_end_[edge.tail], weights.weigh(edge) + to_end_[edge.head]);
    }
    from_start_.assign(labels_of_node_.size(), kUnreachable);
    from_start_[start_node(0)] = 0;
    lightest_edge_.resize(labels_of_node_.size());
    through->resize(edges.size());
    for (size_t k = 0; k < edges.size(); ++k) {
      const Edge& edge = edges[k];
      const double weight = from_start_[edge.tail] + weights.weigh(edge);
      if (weight < from_start_[edge.head]) {
        from_start_[edge.head] = weight;
        lightest_edge_[edge.head] = k;
      }
      (*through)[k] = weight + to_end_[edge.head];
    }
  }

  // The vertex of the hull that weighs least.
  HullEnd lightest_vertex(const Edges& edges, Weights weights) {
    HullEnd end{weights, {0, 0}, 0, {}};
    weigh_paths(edges, weights, &end.through);
    for (Index node = end_node_; node != start_node(0);) {
      const Edge& edge = edges[lightest_edge_[node]];
      end.vertex = {end.vertex.time + edge.time, end.vertex.cost + edge.cost};
      node = edge.tail;
    }
    end.weight = weights.weigh(end.vertex);
    return end;
  }

  // The vertices of the hull, the fastest first.
  std::vector<Choice> vertices() {
    const HullEnd fastest = lightest_vertex(edges_, {unit_.time, 0});
    const HullEnd cheapest = lightest_vertex(edges_, {0, unit_.cost});
    std::vector<Choice> choices;
    append_vertices(fastest, cheapest, edges_, &choices);
    keep_hull(&choices);
    return choices;
  }

  // Appends the vertices from one to another, and some other choices, over the edges that may lead
  // below the line between them.
  void append_vertices(const HullEnd& faster, const HullEnd& cheaper, const Edges& edges,
                       std::vector<Choice>* choices) {
    const double room_faster = faster.weights.weigh(cheaper.vertex) - faster.weight + kMargin;
    const double room_cheaper = cheaper.weights.weigh(faster.vertex) - cheaper.weight + kMargin;
    Edges remaining;
    remaining.reserve(edges.size());
    HullEnd begin{faster.weights, faster.vertex, faster.weight, {}};
    HullEnd end{cheaper.weights, cheaper.vertex, cheaper.weight, {}};
    for (size_t k = 0; k < edges.size(); ++k) {
      const double over_faster = (faster.through[k] - faster.weight - kMargin) / room_faster;
      const double over_cheaper = (cheaper.through[k] - cheaper.weight - kMargin) / room_cheaper;
      if (over_faster + over_cheaper > 1) continue;
      remaining.push_back(edges[k]);
      begin.through.push_back(faster.through[k]);
      end.through.push_back(cheaper.through[k]);
    }
    const bool are_distinct =
        begin.vertex.time < end.vertex.time && begin.vertex.cost > end.vertex.cost;
    const size_t few_edges = kFewEdgesPerPart * static_cast<size_t>(problem_.num_parts);
    if (are_distinct && remaining.size() > few_edges) {
      const Weights line = along(begin.vertex, end.vertex);
      const HullEnd middle = lightest_vertex(remaining, line);
      if (line.weigh(begin.vertex) - middle.weight > kMargin) {
        append_vertices(begin, middle, remaining, choices);
        append_vertices(middle, end, remaining, choices);
        return;
      }
    }
    const auto keep = [&](std::vector<Label>* labels, Index) {
      keep_hull_between(begin.weights, end.weights, labels);
    };
    append_paths(remaining, {}, keep, choices);
  }

  // Keeps the vertices of the hull that weigh least by weights between two.
  static void keep_hull_between(Weights faster, Weights cheaper, std::vector<Label>* labels) {
    keep_hull(labels);
    const std::vector<Label>& all = *labels;
    size_t begin = 0, end = all.size();
    while (begin + 1 < end && faster.weigh(all[begin + 1]) < faster.weigh(all[begin]) - kMargin) {
      ++begin;
    }
    while (end > begin + 1 && cheaper.weigh(all[end - 2]) < cheaper.weigh(all[end - 1]) - kMargin) {
      --end;
    }
    labels->resize(end);
    labels->erase(labels->begin(), labels->begin() + static_cast<std::ptrdiff_t>(begin));
  }

  // Appends choices between two vertices such that every other one saves no more than the slack on
  // one of these or on the faster vertex that is no slower than it.
  void append_choices_between(const Choice& faster, const Choice& cheaper,
                              std::vector<Choice>* choices) {
    std::vector<Choice> kept{faster, cheaper};
    const Weights line = along(faster, cheaper);
    const double weight_on_line = line.weigh(faster);
    for (const double share : kTriangleShares) {
      if (problem_.slack == 0 && share < 1) continue;
      std::vector<Choice> more;
      for (size_t k = 1; k < kept.size(); ++k) {
        const Point corner{kept[k].time, kept[k - 1].cost - problem_.slack};
        if (corner.cost <= kept[k].cost || line.weigh(corner) < weight_on_line - kMargin) continue;
        append_choices_in_triangle(kept[k - 1], kept[k], line, weight_on_line, share, &more);
      }
      for (const Choice& choice : more) {
        // By the error of floating point, points outside the triangle come too, such as a vertex.
        const bool is_between = faster.time < choice.time && choice.time < cheaper.time &&
                                faster.cost > choice.cost && choice.cost > cheaper.cost;
        if (is_between) kept.push_back(choice);
      }
      keep_best(&kept, 0);
    }
    choices->insert(choices->end(), kept.begin() + 1, kept.end() - 1);
  }

  // Appends choices between two others in a share of the triangle above a line between vertices,
  // given as weights and what its points weigh by them. With the whole share these are all, but for
  // half of the slack on the path and half of it at the end.
  void append_choices_in_triangle(const Choice& faster, const Choice& cheaper, Weights line,
                                  double weight_on_line, double share,
                                  std::vector<Choice>* choices) {
    const Point corner{cheaper.time, faster.cost - problem_.slack / 2};
    std::vector<Bound> bounds;
    Edges remaining = edges_;
    const auto add_bound = [&](Weights weights, double max_weight) {
      std::vector<double> through;
      weigh_paths(remaining, weights, &through);
      size_t size = 0;
      for (size_t k = 0; k < remaining.size(); ++k) {
        if (through[k] <= max_weight) remaining[size++] = remaining[k];
      }
      remaining.resize(size);
      bounds.push_back({weights, max_weight, to_end_});
    };
    add_bound(line, weight_on_line + share * (line.weigh(corner) - weight_on_line) + kMargin);
    for (const auto& [x, y] : {std::pair{4.0, 1.0}, {1.0, 4.0}, {1.0, 0.0}, {0.0, 1.0}}) {
      const Weights weights = normalized(x * line.time, y * line.cost);
      add_bound(weights, weights.weigh(corner) + kMargin);
    }
    // Paths have up to two nodes a part.
    const int64_t slack_at_node =
        share < 1 ? problem_.slack / 8 : problem_.slack / 4 / problem_.num_parts;
    const auto keep = [&](std::vector<Label>* labels, Index node) {
      keep_best(labels, node == end_node_ ? problem_.slack / 2 : slack_at_node);
    };
    append_paths(remaining, bounds, keep, choices);
  }

  // The dynamic program: appends the choices that remain of all paths over some edges within the
  // bounds. keep(labels, node) drops some of a node's labels.
  template <class Keep>
  void append_paths(const Edges& edges, const std::vector<Bound>& bounds, Keep keep,
                    std::vector<Choice>* choices) {
    constexpr Index kNoLabel = -1;
    labels_.assign(1, {0, 0, kNoLabel, kEmptyRun});  // label 0: the start
    labels_of_node_[start_node(0)] = {0, 1};
    labels_of_node_[end_node_] = {0, 0};
    const auto label_node = [&](Index node) {
      merge_labels(edges, node, bounds);
      keep(&merged_, node);
      const auto begin = static_cast<Index>(labels_.size());
      labels_.insert(labels_.end(), merged_.begin(), merged_.end());
      labels_of_node_[node] = {begin, static_cast<Index>(labels_.size())};
      if (static_cast<int64_t>(labels_.size() + options_of_choice_.size()) > max_choices_) {
        too_many();
      }
    };
    Index node = start_node(0);
    for (size_t k = 0; k < edges.size(); ++k) {
      if (edges[k].tail != node) {
        node = edges[k].tail;
        label_node(node);
      }
      edges_into_[edges[k].head].push_back(static_cast<Index>(k));
    }
    if (!edges.empty()) label_node(end_node_);
    for (const Edge& edge : edges) edges_into_[edge.head].clear();
    const auto [begin, end] = labels_of_node_[end_node_];
    for (Index k = begin; k < end; ++k) choices->push_back(traced_back(k));
  }

  // Extends the labels at the tails of a node's edges to the node, within the bounds, in merged_.
  void merge_labels(const Edges& edges, Index node, const std::vector<Bound>& bounds) {
    merged_.clear();
    for (const Index k : edges_into_[node]) {
      const Edge& edge = edges[k];
      const auto [begin, end] = labels_of_node_[edge.tail];
      for (Index previous = begin; previous < end; ++previous) {
        const Label label{labels_[previous].time + edge.time, labels_[previous].cost + edge.cost,
                          previous, edge.run};
        const bool is_allowed = std::all_of(bounds.begin(), bounds.end(), [&](const Bound& bound) {
          return bound.allows(label, node);
        });
        if (is_allowed) merged_.push_back(label);
      }
    }
  }

  // The choice that a label of the last node stands for, with its options.
  Choice traced_back(Index last_label) {
    std::vector<Index> options;
    for (Index label = last_label; label > 0; label = labels_[label].previous) {
      const std::vector<Index>& run = runs_[labels_[label].run];
      options.insert(options.end(), run.rbegin(), run.rend());
    }
    std::reverse(options.begin(), options.end());
    const auto number = static_cast<Index>(options_of_choice_.size());
    options_of_choice_.push_back(std::move(options));
    return {labels_[last_label].time, labels_[last_label].cost, number};
  }

  const PartsProblem& problem_;
  const int64_t max_choices_;
  const Time min_request_spacing_;
  const Index num_clocks_kept_;  // nodes of a part beside its start; 0 where parts are independent
  const Index end_node_;
  Edges edges_;                           // by tail, which is a topological order
  std::vector<std::vector<Index>> runs_;  // options of an edge, one a part

  std::vector<std::vector<Index>> options_of_choice_;  // one a part

  // Scratch of the pass over the edges that runs; arrays by node.
  std::vector<LabelRange> labels_of_node_;
  std::vector<std::vector<Index>> edges_into_;
  std::vector<double> to_end_, from_start_;
  std::vector<size_t> lightest_edge_;
  std::vector<Label> labels_, merged_;

  const Weights unit_;
};

void check(const PartsProblem& p) {
  require(p.num_parts > 0 && p.num_parts <= kMaxParts && p.num_clocks > 0,
          "there must be parts, and not too many, and clocks");
  require(static_cast<int64_t>(p.num_parts) * p.num_clocks < std::numeric_limits<Index>::max(),
          "there are too many clocks");
  require_offsets(p.option_begin, p.num_parts * p.num_clocks, p.num_options,
                  "option_begin must ascend from 0 and span the options");
  require(p.latency >= 0 && p.min_dwell >= 0 && p.waiting >= 0 && p.slack >= 0,
          "latency, dwell, blocking power and slack must not be negative");
  constexpr __int128 kLimit = kMostEnergy;
  static_assert(kMostEnergy == kMostTime);
  __int128 time = 0, energy = 0;
  for (Index part = 0; part < p.num_parts; ++part) {
    int64_t max_time = 0, max_energy = 0;
    for (Index o = p.option_begin[part * p.num_clocks];
         o < p.option_begin[(part + 1) * p.num_clocks]; ++o) {
      require(p.time[o] >= 1 && p.energy[o] >= 0, "an option is out of range");
      max_time = std::max(max_time, p.time[o]);
      max_energy = std::max(max_energy, p.energy[o]);
    }
    require(max_time > 0, "a part has no options");
    time += max_time;
    energy += max_energy;
  }
  if (energy >= kLimit || time >= kLimit || time * p.waiting >= kLimit ||
      std::max(p.latency, p.min_dwell) >= kLimit / 2 || p.slack >= kLimit) {
    throw std::overflow_error("times or energies of parts are out of range");
  }
}

}  // namespace

std::vector<Composed> compose(const PartsProblem& problem, int64_t max_choices) {
  check(problem);
  max_choices = std::min<int64_t>(max_choices, std::numeric_limits<Index>::max());
  return Composition(problem, max_choices).options();
}

}  // namespace envplan
