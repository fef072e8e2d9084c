// Tests of kernel.hpp, named by the shape of the network. Exits non-zero if any check fails.
#include <algorithm>
#include <random>
#include <stdexcept>
#include <vector>

#include "../frontier_trace.hpp"
#include "check.hpp"

namespace {

using envplan::Energy;
using envplan::FrontierTrace;
using envplan::Index;
using envplan::kInfinite;
using envplan::ParametricFlow;
using envplan::Power;
using envplan::Time;

struct Curve {
  std::vector<Time> durations;  // descending
  std::vector<Power> slopes;    // ascending, one fewer
};

struct Arc {
  Index tail, head, curve;
};

ParametricFlow make(Index nodes, const std::vector<Arc>& arcs, const std::vector<Curve>& curves) {
  std::vector<Index> tail, head, curve, begin{0};
  std::vector<Time> duration;
  std::vector<Power> slope;
  for (const Arc& arc : arcs) {
    tail.push_back(arc.tail);
    head.push_back(arc.head);
    curve.push_back(arc.curve);
  }
  for (const Curve& c : curves) {
    duration.insert(duration.end(), c.durations.begin(), c.durations.end());
    slope.insert(slope.end(), c.slopes.begin(), c.slopes.end());
    slope.push_back(kInfinite);
    begin.push_back(static_cast<Index>(duration.size()));
  }
  return ParametricFlow({nodes, static_cast<Index>(arcs.size()), tail.data(), head.data(),
                         curve.data(), static_cast<Index>(curves.size()), begin.data(),
                         static_cast<Index>(duration.size()), duration.data(), slope.data(), 0,
                         nodes - 1});
}

FrontierTrace traced(const ParametricFlow& walk, Power from_flow = -1) {
  FrontierTrace trace(walk, from_flow);
  while (trace.extend(1)) {
  }
  return trace;
}

bool throws(Index nodes, const std::vector<Arc>& arcs, const std::vector<Curve>& curves) {
  try {
    make(nodes, arcs, curves);
  } catch (const std::invalid_argument&) {
    return true;
  }
  return false;
}

void test_one_operation() {
  const FrontierTrace trace = traced(make(2, {{0, 1, 0}}, {{{10, 6, 5}, {2, 7}}}));
  CHECK((trace.times() == std::vector<Time>{10, 6, 5}));
  CHECK((trace.flows() == std::vector<Power>{2, 7, 7}));
  CHECK(trace.costs()[1] == 8 && trace.costs()[2] == 15);
}

void test_everything_constant() {
  const FrontierTrace trace = traced(make(3, {{0, 1, 0}, {1, 2, 0}}, {{{4}, {}}}));
  CHECK((trace.times() == std::vector<Time>{8}));
  CHECK(trace.costs()[0] == 0);
}

void test_two_parallel_chains_pay_together() {
  // Both must get faster at once: 3 + 5 a ns, then the first is at its end.
  const FrontierTrace trace =
      traced(make(2, {{0, 1, 0}, {0, 1, 1}}, {{{10, 4}, {3}}, {{10, 7}, {5}}}));
  CHECK((trace.times() == std::vector<Time>{10, 7}));
  CHECK(trace.flows()[0] == 8);
  CHECK(trace.costs()[1] == 24);
}

void test_slack_is_used_before_anything_is_paid() {
  const FrontierTrace trace =
      traced(make(2, {{0, 1, 0}, {0, 1, 1}}, {{{10, 4}, {3}}, {{6, 5}, {9}}}));
  CHECK((trace.times() == std::vector<Time>{10, 6, 5}));
  CHECK(trace.flows()[0] == 3 && trace.flows()[1] == 12);
  CHECK(trace.costs()[2] == 4 * 3 + 12);
}

void test_all_ties_in_series_make_one_breakpoint() {
  const FrontierTrace trace =
      traced(make(5, {{0, 1, 0}, {1, 2, 0}, {2, 3, 0}, {3, 4, 0}}, {{{10, 7, 5}, {2, 3}}}));
  CHECK((trace.times() == std::vector<Time>{40, 28, 20}));
  CHECK((trace.flows() == std::vector<Power>{2, 3, 3}));
}

void test_cheaper_operation_of_a_series_goes_first() {
  const FrontierTrace trace =
      traced(make(3, {{0, 1, 0}, {1, 2, 1}}, {{{10, 5}, {4}}, {{10, 5}, {1}}}));
  CHECK((trace.times() == std::vector<Time>{20, 15, 10}));
  CHECK((trace.flows() == std::vector<Power>{1, 4, 4}));
}

void test_many_equal_chains_pay_together() {
  std::vector<Arc> arcs;
  const Index chains = 50, length = 20, sink = chains * (length - 1) + 1;
  for (Index c = 0; c < chains; ++c) {
    const Index first = c * (length - 1) + 1, last = first + length - 2;
    arcs.push_back({0, first, 0});
    for (Index v = first; v < last; ++v) arcs.push_back({v, v + 1, 0});
    arcs.push_back({last, sink, 0});
  }
  const FrontierTrace trace = traced(make(sink + 1, arcs, {{{10, 7, 5}, {2, 3}}}));
  CHECK((trace.times() == std::vector<Time>{200, 140, 100}));
  CHECK((trace.flows() == std::vector<Power>{100, 150, 150}));
  CHECK(trace.costs()[2] == 60 * 100 + 40 * 150);
}

// Equal operations (s, m) after (s - 1, m) and (s, m - 1): every way through is critical, always.
ParametricFlow lattice(Index stages, Index microbatches) {
  std::vector<Arc> arcs;
  const auto begin = [&](Index s, Index m) { return 2 * (m * stages + s); };
  for (Index m = 0; m < microbatches; ++m) {
    for (Index s = 0; s < stages; ++s) {
      arcs.push_back({begin(s, m), begin(s, m) + 1, 0});
      if (s + 1 < stages) arcs.push_back({begin(s, m) + 1, begin(s + 1, m), 1});
      if (m + 1 < microbatches) arcs.push_back({begin(s, m) + 1, begin(s, m + 1), 1});
    }
  }
  return make(2 * stages * microbatches, arcs, {{{10, 7, 5}, {2, 3}}, {{0}, {}}});
}

void test_all_ties_in_a_lattice() {
  // A diagonal of k operations costs 2 k a ns for 3 ns, then 3 k for 2; cheapest diagonals first.
  const FrontierTrace trace = traced(lattice(3, 6));
  CHECK((trace.times() == std::vector<Time>{80, 74, 70, 64, 48, 40}));
  CHECK((trace.flows() == std::vector<Power>{2, 3, 4, 6, 9, 9}));
}

// 1F1B on equal stages but a heavier last one: operation (s, m, 0) is a forward, (s, m, 1) its
// backward.
ParametricFlow equal_stages(Index stages, Index microbatches) {
  const auto begin = [&](Index s, Index m, Index back) {
    return 1 + 2 * ((s * microbatches + m) * 2 + back);
  };
  const Index sink = 1 + 4 * stages * microbatches;
  std::vector<Arc> arcs;
  for (Index s = 0; s < stages; ++s) {
    std::vector<Index> order;  // begins of the stage's operations
    const Index ahead = std::min(stages - s, microbatches);
    for (Index k = 0; k < microbatches + ahead; ++k) {
      if (k < microbatches) order.push_back(begin(s, k, 0));
      if (k + 1 >= ahead && k + 1 - ahead < microbatches)
        order.push_back(begin(s, k + 1 - ahead, 1));
    }
    for (std::size_t k = 0; k < order.size(); ++k) {
      arcs.push_back({k == 0 ? 0 : order[k - 1] + 1, order[k], 2});
    }
    arcs.push_back({order.back() + 1, sink, 2});
    for (Index m = 0; m < microbatches; ++m) {
      const Index last = s + 1 == stages ? 3 : 0;
      arcs.push_back({begin(s, m, 0), begin(s, m, 0) + 1, last});
      arcs.push_back({begin(s, m, 1), begin(s, m, 1) + 1, last + 1});
      if (s + 1 < stages) {
        arcs.push_back({begin(s, m, 0) + 1, begin(s + 1, m, 0), 2});
        arcs.push_back({begin(s + 1, m, 1) + 1, begin(s, m, 1), 2});
      } else {
        arcs.push_back({begin(s, m, 0) + 1, begin(s, m, 1), 2});
      }
    }
  }
  const auto curve = [](Time fastest) {
    Curve c{{fastest}, {}};
    for (Power level = 1; level <= 12; ++level) {
      c.durations.insert(c.durations.begin(), c.durations.front() + fastest * (10 + level) / 400);
      c.slopes.insert(c.slopes.begin(), fastest * 64 / (level * level));
    }
    return c;
  };
  return make(sink + 1, arcs,
              {curve(56000), curve(133000), {{0}, {}}, curve(65000), curve(152000)});
}

// A step that fills one path at a time takes more searches, the more microbatches there are.
void test_work_with_equal_stages_grows_with_the_pipeline() {
  const auto work = [](Index microbatches) {
    return static_cast<double>(traced(equal_stages(6, microbatches)).walk().touched());
  };
  CHECK(work(96) < 2.5 * work(48));
}

void test_walk_ends_where_it_is_told() {
  const ParametricFlow walk = lattice(4, 8);
  FrontierTrace whole = traced(walk);
  for (Time t = walk.min_time(); t <= walk.max_time(); ++t) {
    FrontierTrace ended(walk, -1);
    while (ended.extend(1, t)) {
    }
    CHECK(ended.times().back() == t);
    std::vector<Time> here(walk.num_nodes()), there(walk.num_nodes());
    ended.walk().event_times(here.data());
    whole.optimum_at(t).event_times(there.data());
    CHECK(here == there);
    CHECK(ended.walk().cost() == whole.optimum_at(t).cost());
  }
  FrontierTrace first(walk, 2);  // one breakpoint is recorded, wherever it is to end
  while (first.extend(1, walk.max_time())) {
  }
  CHECK(first.times().size() == 1 && first.times()[0] < walk.max_time());
}

// The bridge of Phillips and Dessouky: speeding up both ends lets the middle slow down again.
void test_bridge_relaxes_the_middle() {
  const ParametricFlow walk = make(4, {{0, 1, 0}, {0, 2, 1}, {1, 2, 2}, {1, 3, 1}, {2, 3, 0}},
                                   {{{10, 5}, {3}}, {{18, 9}, {4}}, {{9, 1}, {2}}});
  const FrontierTrace trace = traced(walk);
  CHECK(trace.times().front() == 29);
  CHECK(trace.times().back() == walk.min_time());
  for (std::size_t k = 1; k < trace.times().size(); ++k) {
    CHECK(trace.flows()[k] >= trace.flows()[k - 1]);
    CHECK(trace.costs()[k] - trace.costs()[k - 1] ==
          static_cast<Energy>(trace.flows()[k - 1]) * (trace.times()[k - 1] - trace.times()[k]));
  }
}

void test_start_at_a_flow_meets_the_walk() {
  const ParametricFlow walk = make(4, {{0, 1, 0}, {0, 2, 1}, {1, 2, 2}, {1, 3, 1}, {2, 3, 0}},
                                   {{{10, 8, 5}, {3, 6}}, {{18, 9}, {4}}, {{9, 4, 1}, {2, 5}}});
  const FrontierTrace all = traced(walk);
  for (Power flow = 0; flow <= 12; ++flow) {
    for (Power guessed = 0; guessed <= 8; guessed += 4) {
      ParametricFlow jumped = walk;
      const std::vector<Power> guess(5, guessed);
      const std::vector<Time> times{0, guessed, 3 * guessed, 30};
      jumped.solve_at_flow(guess.data(), flow % 3 ? times.data() : nullptr, flow % 2 == 0, flow);
      CHECK(jumped.flow() == flow);
      const FrontierTrace rest = traced(jumped, flow);
      std::size_t k = 0;
      while (k + 1 < all.times().size() && all.flows()[k] <= flow) ++k;
      CHECK((rest.times() == std::vector<Time>(all.times().begin() + k, all.times().end())));
      CHECK((rest.costs() == std::vector<Energy>(all.costs().begin() + k, all.costs().end())));
    }
  }
}

void test_start_at_a_time_meets_the_walk() {
  const ParametricFlow walk = lattice(4, 8);
  FrontierTrace all = traced(walk);
  std::mt19937 random(2);
  ParametricFlow jumped = walk;
  for (Time t = walk.min_time() - 1; t <= walk.max_time() + 1; ++t) {
    std::vector<Power> guess(walk.num_arcs());
    std::vector<Time> times(walk.num_nodes());
    for (Power& flow : guess) flow = random() % 20;
    for (Time& time : times) time = random() % (2 * walk.max_time());
    if (random() % 3 == 0) jumped = walk;  // else from where it stands
    jumped.solve_at_time(guess.data(), times.data(), t);
    const Time at = std::clamp(t, walk.min_time(), walk.max_time());
    CHECK(jumped.time() == at && jumped.cost() == all.optimum_at(at).cost());
    const FrontierTrace rest = traced(jumped);  // from there on it goes the same way
    std::size_t k = all.times().size();
    while (k > 0 && all.times()[k - 1] < at) --k;
    const auto tail = [&](const auto& values, std::size_t first) {
      return std::vector(values.begin() + first, values.end());
    };
    const std::size_t own = rest.times().size() - (all.times().size() - k);
    CHECK(tail(rest.times(), own) == tail(all.times(), k));
    CHECK(tail(rest.costs(), own) == tail(all.costs(), k));
    if (at > walk.min_time()) CHECK(tail(rest.flows(), own) == tail(all.flows(), k));
  }
}

void test_any_time_is_rebuilt_from_its_snapshot() {
  std::vector<Curve> curves;
  std::vector<Arc> arcs;
  std::mt19937 random(1);
  for (Index v = 0; v < 40; ++v) {  // a ladder with enough breakpoints for the stride to double
    std::vector<Time> durations{10000};
    std::vector<Power> slopes;
    for (int level = 0; level < 30; ++level) {
      durations.push_back(durations.back() - 1 - static_cast<Time>(random() % 300));
      slopes.push_back((slopes.empty() ? 0 : slopes.back()) + 1 +
                       static_cast<Power>(random() % 99));
    }
    curves.push_back({durations, slopes});
    arcs.push_back({v, v + 1, v});
    if (v + 2 <= 40) arcs.push_back({v, v + 2, v});
  }
  const ParametricFlow walk = make(41, arcs, curves);
  FrontierTrace trace = traced(walk);
  CHECK(trace.times().size() > 512);
  for (int look = 0; look < 300; ++look) {
    const Time span = walk.max_time() - walk.min_time();
    const Time t = walk.min_time() + static_cast<Time>(random()) % (span + 1);
    const ParametricFlow& there = trace.optimum_at(t);
    CHECK(there.time() == t);
    std::size_t k = 0;
    while (k + 1 < trace.times().size() && trace.times()[k + 1] >= t) ++k;
    CHECK(there.cost() ==
          trace.costs()[k] + static_cast<Energy>(trace.flows()[k]) * (trace.times()[k] - t));
    std::vector<Time> at(41);
    there.event_times(at.data());
    CHECK(at[0] == 0 && at[40] == t);
    Energy paid = 0;
    for (const Arc& arc : arcs) {
      const Time d = at[arc.head] - at[arc.tail];
      const Curve& curve = curves[arc.curve];
      CHECK(d >= curve.durations.back());
      for (std::size_t l = 0; curve.durations[l] > d; ++l) {
        paid += static_cast<Energy>(curve.slopes[l]) *
                (curve.durations[l] - std::max(curve.durations[l + 1], d));
      }
    }
    CHECK(paid == there.cost());
  }
}

template <class Thrown>
bool refuses_to_start(ParametricFlow walk, Power guessed, Power flow) {
  const std::vector<Power> guess(walk.num_arcs(), guessed);
  const std::vector<Time> times(walk.num_nodes(), 0);
  try {
    walk.solve_at_flow(guess.data(), times.data(), false, flow);
  } catch (const Thrown&) {
    return true;
  }
  return false;
}

void test_guesses_beyond_the_integer_range_are_refused() {
  const ParametricFlow walk =
      make(2, std::vector<Arc>(40, {0, 1, 0}), {{{10, 5}, {(Power{1} << 60) + 1}}});
  const Power most = kInfinite / 4 - 1;
  CHECK(refuses_to_start<std::overflow_error>(walk, most, 7));  // 40 of them outgrow 64 bits
  CHECK(refuses_to_start<std::invalid_argument>(walk, most + 1, 7));
  CHECK(refuses_to_start<std::invalid_argument>(walk, -1, 7));
  CHECK(refuses_to_start<std::invalid_argument>(walk, 0, most + 1));
  CHECK(!refuses_to_start<std::exception>(make(2, {{0, 1, 0}}, {{{10, 5}, {3}}}), most, 7));
}

void test_arcs_that_are_not_there_are_not_watched() {
  FrontierTrace trace = traced(lattice(2, 2));
  bool refused = false;
  try {
    trace.watch({{0, 1000}});
  } catch (const std::invalid_argument&) {
    refused = true;
  }
  CHECK(refused);
}

void test_levels_that_rise_and_fall_are_refused() {
  const Index tail = 0, head = 1, curve = 0;
  const std::vector<Index> begin{0, 1000, 2};
  const std::vector<Time> duration{2, 1};
  const std::vector<Power> slope{1, kInfinite};
  bool refused = false;
  try {
    const ParametricFlow walk(
        {2, 1, &tail, &head, &curve, 2, begin.data(), 2, duration.data(), slope.data(), 0, 1});
  } catch (const std::invalid_argument&) {
    refused = true;
  }
  CHECK(refused);
}

void test_what_is_not_a_network_is_refused() {
  const std::vector<Curve> constant{{{1}, {}}};
  CHECK(throws(3, {{0, 1, 0}, {1, 0, 0}, {1, 2, 0}}, constant));  // a cycle
  CHECK(throws(4, {{0, 3, 0}, {1, 2, 0}, {2, 3, 0}}, constant));  // two sources
  CHECK(throws(3, {{0, 1, 0}, {0, 2, 0}}, constant));             // a dead end
  CHECK(throws(2, {{0, 5, 0}}, constant));                        // no such node
  CHECK(throws(2, {{0, 1, 0}}, {{{5, 5}, {1}}}));                 // durations do not fall
  CHECK(throws(2, {{0, 1, 0}}, {{{5, 4, 3}, {2, 2}}}));           // slopes do not rise
  CHECK(throws(2, {{0, 1, 0}}, {{{Time{1} << 61}, {}}}));         // out of range
  CHECK(throws(2, {{0, 1, 0}}, {{{5, 4}, {kInfinite - 1}}}));     // out of range
}

}  // namespace

int main() {
  test_one_operation();
  test_everything_constant();
  test_two_parallel_chains_pay_together();
  test_slack_is_used_before_anything_is_paid();
  test_all_ties_in_series_make_one_breakpoint();
  test_cheaper_operation_of_a_series_goes_first();
  test_many_equal_chains_pay_together();
  test_all_ties_in_a_lattice();
  test_work_with_equal_stages_grows_with_the_pipeline();
  test_walk_ends_where_it_is_told();
  test_bridge_relaxes_the_middle();
  test_start_at_a_flow_meets_the_walk();
  test_start_at_a_time_meets_the_walk();
  test_any_time_is_rebuilt_from_its_snapshot();
  test_guesses_beyond_the_integer_range_are_refused();
  test_arcs_that_are_not_there_are_not_watched();
  test_levels_that_rise_and_fall_are_refused();
  test_what_is_not_a_network_is_refused();
  return envplan::test::summary("kernel");
}
