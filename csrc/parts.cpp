#include "parts.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>

namespace envplan {

namespace {

using std::int64_t;
using Wide = unsigned __int128;

constexpr int64_t kHullOnly = std::numeric_limits<int64_t>::max();
constexpr int64_t kMostRuns = 20'000'000;
constexpr int64_t kFew = 4096;    // candidates that are sorted without a filter before
constexpr Index kBuckets = 8192;  // of the filter

[[noreturn]] void too_many() {
  throw std::overflow_error("an operation has more options by parts than can be kept");
}

// A choice for the next few parts, and what it takes.
struct Run {
  Time time;
  int64_t cost;
  std::vector<Index> options;
};

// A choice for all parts so far: that of another node, then a run.
struct Node {
  Time time;
  int64_t cost;
  Index before, run;
};

// Nodes from one number to another, by ascending time and falling cost.
struct Front {
  Index begin = 0, end = 0;
  bool empty() const { return begin == end; }
};

// Nodes of a front, each with a run after it.
struct Candidates {
  Front front;
  Index run;
};

int64_t share(int64_t energy, Time part, Time whole) {
  const Wide twice = 2 * static_cast<Wide>(energy) * static_cast<Wide>(part);
  return static_cast<int64_t>((twice + static_cast<Wide>(whole)) / (2 * static_cast<Wide>(whole)));
}

// Sorts, and leaves out what another beats or, unless on the lower hull, nearly does.
void keep_best(std::vector<Node>* nodes, int64_t slack) {
  std::sort(nodes->begin(), nodes->end(), [](const Node& a, const Node& b) {
    return a.time != b.time ? a.time < b.time : a.cost < b.cost;
  });
  std::size_t size = 0;
  for (const Node& node : *nodes) {
    if (size == 0 || node.cost < (*nodes)[size - 1].cost) (*nodes)[size++] = node;
  }
  nodes->resize(size);
  if (slack == 0) return;
  std::vector<std::size_t> hull;
  const auto& all = *nodes;
  for (std::size_t k = 0; k < all.size(); ++k) {
    while (hull.size() >= 2) {
      const Node &a = all[hull[hull.size() - 2]], &b = all[hull.back()];
      if (static_cast<__int128>(b.cost - a.cost) * (all[k].time - a.time) <
          static_cast<__int128>(all[k].cost - a.cost) * (b.time - a.time)) {
        break;
      }
      hull.pop_back();
    }
    hull.push_back(k);
  }
  std::vector<Node> kept;
  std::size_t vertex = 0;
  for (std::size_t k = 0; k < all.size(); ++k) {
    const bool on_hull = vertex < hull.size() && hull[vertex] == k;
    vertex += on_hull;
    if (on_hull || (slack != kHullOnly && all[k].cost < kept.back().cost - slack)) {
      kept.push_back(all[k]);
    }
  }
  nodes->swap(kept);
}

class Composition {
 public:
  Composition(const PartsProblem& problem, int64_t slack, int64_t most)
      : p_(problem),
        slack_(slack == kHullOnly ? kHullOnly : slack / 2 / problem.num_parts),
        most_(most),
        free_(problem.latency == 0 && problem.hold == 0),
        states_(free_ ? 1 : problem.num_clocks),
        fronts_(static_cast<std::size_t>(problem.num_parts + 1) * states_),
        candidates_(fronts_.size()) {
    nodes_.push_back({0, 0, -1, -1});
    const Front root{0, 1};
    if (free_) {
      at(0, 0) = root;
    } else {
      for (Index clock = 0; clock < p_.num_clocks; ++clock) {
        extend({0, 0, {}}, root, 0, clock, std::max(p_.latency, p_.hold), true);
      }
    }
    for (Index part = 0; part <= p_.num_parts; ++part) {
      for (Index state = 0; state < states_; ++state) {
        merge(part, state);
        if (part < p_.num_parts && !at(part, state).empty()) leave(part, state);
      }
    }
  }

  // The options of the operation, whatever clock they end at.
  std::vector<Composed> options() {
    std::vector<Candidates> all;
    runs_.push_back({0, 0, {}});
    const auto nothing = static_cast<Index>(runs_.size() - 1);
    for (Index state = 0; state < states_; ++state) {
      all.push_back({at(p_.num_parts, state), nothing});
    }
    const Front best = thinned(all, slack_ == kHullOnly ? kHullOnly : p_.slack / 2);
    std::vector<Composed> found;
    for (Index node = best.begin; node < best.end; ++node) found.push_back(traced(node));
    return found;
  }

 private:
  Front& at(Index part, Index state) {
    return fronts_[static_cast<std::size_t>(part) * states_ + state];
  }
  Index first_option(Index part, Index clock) const {
    return p_.option_begin[static_cast<int64_t>(part) * p_.num_clocks + clock];
  }
  int64_t cost(Index option) const { return p_.energy[option] - p_.waiting * p_.time[option]; }
  Index end_option(Index part, Index clock) const { return first_option(part, clock + 1); }

  void add(Front from, Index part, Index state, Run run) {
    if (static_cast<int64_t>(runs_.size()) >= kMostRuns) too_many();
    runs_.push_back(std::move(run));
    const auto number = static_cast<Index>(runs_.size() - 1);
    candidates_[static_cast<std::size_t>(part) * states_ + state].push_back({from, number});
  }

  // Goes on at a clock until it has been kept for `missing` more, from the start of a part.
  void extend(const Run& run, Front from, Index part, Index clock, Time missing, bool may_end) {
    if (missing <= 0 || part == p_.num_parts) {
      if (missing <= 0 || may_end) add(from, part, free_ ? 0 : clock, run);
      return;
    }
    for (Index o = first_option(part, clock); o < end_option(part, clock); ++o) {
      Run longer{run.time + p_.time[o], run.cost + cost(o), run.options};
      longer.options.push_back(o);
      extend(longer, from, part + 1, clock, missing - p_.time[o], may_end);
    }
  }

  // All ways on from a front at the start of a part.
  void leave(Index part, Index state) {
    const Front from = at(part, state);
    if (free_) {
      std::vector<Node> options;
      for (Index o = first_option(part, 0); o < end_option(part, p_.num_clocks - 1); ++o) {
        options.push_back({p_.time[o], cost(o), o, -1});
      }
      keep_best(&options, slack_ == kHullOnly ? kHullOnly : 0);
      for (const Node& o : options) add(from, part + 1, 0, {o.time, o.cost, {o.before}});
      return;
    }
    for (Index o = first_option(part, state); o < end_option(part, state); ++o) {
      add(from, part + 1, state, {p_.time[o], cost(o), {o}});
      if (!p_.asks[part] || p_.time[o] < p_.latency) continue;
      for (Index clock = 0; clock < p_.num_clocks; ++clock) {
        if (clock == state) continue;
        for (Index n = first_option(part, clock); n < end_option(part, clock); ++n) {
          if (p_.config[n] != p_.config[o]) continue;
          const Run run = late(o, n);
          extend(run, from, part + 1, clock, p_.hold - run.time, false);
        }
      }
    }
  }

  // A part that begins by one option and goes on by another once its clock has come.
  Run late(Index before, Index after) const {
    const Time whole = p_.time[before], left = whole - p_.latency;
    const auto product = static_cast<Wide>(left) * static_cast<Wide>(p_.time[after]);
    const auto rest =
        static_cast<Time>((product + static_cast<Wide>(whole - 1)) / static_cast<Wide>(whole));
    const int64_t energy =
        share(p_.energy[before], p_.latency, whole) + share(p_.energy[after], rest, p_.time[after]);
    return {p_.latency + rest, energy - p_.waiting * (p_.latency + rest), {after}};
  }

  void merge(Index part, Index state) {
    auto& all = candidates_[static_cast<std::size_t>(part) * states_ + state];
    if (all.empty()) return;
    at(part, state) = thinned(all, slack_);
    std::vector<Candidates>().swap(all);
  }

  template <class Each>
  void each_of(const std::vector<Candidates>& all, Each each) const {
    for (const Candidates& some : all) {
      const Run& run = runs_[some.run];
      for (Index node = some.front.begin; node < some.front.end; ++node) {
        each(Node{nodes_[node].time + run.time, nodes_[node].cost + run.cost, node, some.run});
      }
    }
  }

  // Those of all candidates that nothing beats, less what slack leaves out.
  Front thinned(const std::vector<Candidates>& all, int64_t slack) {
    std::vector<Node> kept;
    int64_t count = 0;
    Time least = std::numeric_limits<Time>::max(), longest = 0;
    for (const Candidates& some : all) {
      const Front& front = some.front;
      if (front.empty()) continue;
      count += front.end - front.begin;
      least = std::min(least, nodes_[front.begin].time + runs_[some.run].time);
      longest = std::max(longest, nodes_[front.end - 1].time + runs_[some.run].time);
    }
    if (count <= kFew) {
      each_of(all, [&](const Node& node) { kept.push_back(node); });
    } else {
      // Of each stretch of time the least cost: what a stretch before undercuts is beaten.
      std::vector<int64_t> least_cost(kBuckets + 1, std::numeric_limits<int64_t>::max());
      const double scale = kBuckets / (static_cast<double>(longest - least) + 1);
      const auto bucket = [&](Time time) {
        return 1 + static_cast<Index>(static_cast<double>(time - least) * scale);
      };
      each_of(all, [&](const Node& node) {
        int64_t& best = least_cost[std::min(kBuckets, bucket(node.time))];
        best = std::min(best, node.cost);
      });
      for (Index b = 1; b <= kBuckets; ++b)
        least_cost[b] = std::min(least_cost[b], least_cost[b - 1]);
      each_of(all, [&](const Node& node) {
        if (node.cost < least_cost[std::min(kBuckets, bucket(node.time)) - 1]) kept.push_back(node);
      });
    }
    keep_best(&kept, slack);
    if (static_cast<int64_t>(nodes_.size() + kept.size()) > most_) too_many();
    const auto begin = static_cast<Index>(nodes_.size());
    nodes_.insert(nodes_.end(), kept.begin(), kept.end());
    return {begin, static_cast<Index>(nodes_.size())};
  }

  Composed traced(Index node) const {
    const Time time = nodes_[node].time;
    Composed found{time, nodes_[node].cost + p_.waiting * time, {}};
    for (Index at = node; at > 0; at = nodes_[at].before) {
      const auto& options = runs_[nodes_[at].run].options;
      found.options.insert(found.options.end(), options.rbegin(), options.rend());
    }
    std::reverse(found.options.begin(), found.options.end());
    return found;
  }

  const PartsProblem& p_;
  const int64_t slack_, most_;  // slack of the fronts after each part: together half of all
  const bool free_;
  const Index states_;
  std::vector<Front> fronts_;
  std::vector<std::vector<Candidates>> candidates_;
  std::vector<Node> nodes_;
  std::vector<Run> runs_;
};

// The options on the lower hull where parts are independent: it is the sum of their hulls, whose
// segments follow each other by what they save a ns.
std::vector<Composed> sum_of_hulls(const PartsProblem& p) {
  struct Segment {
    Time time;
    int64_t saved;
    Index part, option;
  };
  std::vector<Segment> segments;
  Composed at{0, 0, {}};
  for (Index part = 0; part < p.num_parts; ++part) {
    const Index* begin = p.option_begin + static_cast<int64_t>(part) * p.num_clocks;
    std::vector<Node> hull;
    for (Index o = begin[0]; o < begin[p.num_clocks]; ++o) {
      hull.push_back({p.time[o], p.energy[o] - p.waiting * p.time[o], o, -1});
    }
    keep_best(&hull, kHullOnly);
    at.time += hull[0].time;
    at.energy += p.energy[hull[0].before];
    at.options.push_back(hull[0].before);
    for (std::size_t k = 1; k < hull.size(); ++k) {
      const Time time = hull[k].time - hull[k - 1].time;
      segments.push_back({time, hull[k - 1].cost - hull[k].cost, part, hull[k].before});
    }
  }
  std::stable_sort(segments.begin(), segments.end(), [](const Segment& a, const Segment& b) {
    return static_cast<__int128>(a.saved) * b.time > static_cast<__int128>(b.saved) * a.time;
  });
  std::vector<Composed> found{at};
  for (const Segment& next : segments) {
    at.energy += p.energy[next.option] - p.energy[at.options[next.part]];
    at.time += next.time;
    at.options[next.part] = next.option;
    found.push_back(at);
  }
  return found;
}

}  // namespace

std::vector<Composed> compose(const PartsProblem& problem, int64_t most) {
  if (problem.slack > 0) {
    // Often the options on the hull lie close enough.
    const bool free = problem.latency == 0 && problem.hold == 0;
    std::vector<Composed> found =
        free ? sum_of_hulls(problem) : Composition(problem, kHullOnly, most).options();
    int64_t widest = 0;
    for (std::size_t k = 1; k < found.size(); ++k) {
      const Time later = found[k].time - found[k - 1].time;
      widest = std::max(widest, found[k - 1].energy - found[k].energy + problem.waiting * later);
    }
    if (widest <= problem.slack) return found;
  }
  return Composition(problem, problem.slack, most).options();
}

}  // namespace envplan
