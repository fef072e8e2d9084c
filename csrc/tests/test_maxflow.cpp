// Tests of maxflow.hpp, named by the shape of the graph. Exits non-zero if any check fails.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <stdexcept>
#include <vector>

#include "../maxflow.hpp"
#include "check.hpp"

namespace {

using envplan::maxflow::Flow;
using envplan::maxflow::Index;
using envplan::maxflow::kInfinite;
using envplan::maxflow::kMaxTotal;
using envplan::maxflow::Status;

struct Arc {
  Index tail, head;
  Flow lower, upper;
};

struct Solved {
  Status status;
  Flow value;
  std::vector<Flow> flow;
  std::vector<std::uint8_t> side;
};

Solved solve(Index num_nodes, const std::vector<Arc>& arcs, Index source, Index sink) {
  std::vector<Index> tail, head;
  std::vector<Flow> lower, upper;
  for (const Arc& arc : arcs) {
    tail.push_back(arc.tail);
    head.push_back(arc.head);
    lower.push_back(arc.lower);
    upper.push_back(arc.upper);
  }
  Solved out{Status::kOptimal, 0, std::vector<Flow>(arcs.size(), -7),
             std::vector<std::uint8_t>(num_nodes, 7)};
  const auto result = envplan::maxflow::solve(num_nodes, static_cast<Index>(arcs.size()),
                                              tail.data(), head.data(), lower.data(), upper.data(),
                                              source, sink, out.flow.data(), out.side.data());
  out.status = result.status;
  out.value = result.value;
  return out;
}

// Upper bounds out of the set minus lower bounds into it; kInfinite if it has an unlimited way out.
Flow capacity(const std::vector<Arc>& arcs, const std::vector<std::uint8_t>& side) {
  Flow sum = 0;
  bool unlimited = false;
  for (const Arc& arc : arcs) {
    if (side[arc.tail] && !side[arc.head]) {
      unlimited |= arc.upper >= kInfinite;
      if (arc.upper < kInfinite) sum += arc.upper;
    }
    if (!side[arc.tail] && side[arc.head]) sum -= arc.lower;
  }
  return unlimited ? kInfinite : sum;
}

bool keeps_bounds(Index num_nodes, const std::vector<Arc>& arcs, Index source, Index sink,
                  const std::vector<Flow>& flow) {
  std::vector<Flow> net(num_nodes, 0);
  for (std::size_t a = 0; a < arcs.size(); ++a) {
    if (flow[a] < arcs[a].lower || flow[a] > arcs[a].upper) return false;
    net[arcs[a].tail] += flow[a];
    net[arcs[a].head] -= flow[a];
  }
  for (Index v = 0; v < num_nodes; ++v) {
    if (v != source && v != sink && net[v] != 0) return false;
  }
  return true;
}

Flow net_out(const std::vector<Arc>& arcs, Index node, const std::vector<Flow>& flow) {
  Flow sum = 0;
  for (std::size_t a = 0; a < arcs.size(); ++a) {
    sum += (arcs[a].tail == node ? flow[a] : 0) - (arcs[a].head == node ? flow[a] : 0);
  }
  return sum;
}

// Whatever the answer is, it must prove itself.
bool proves_itself(Index num_nodes, const std::vector<Arc>& arcs, Index source, Index sink,
                   const Solved& s) {
  if (s.status == Status::kInfeasible) {
    return s.value > 0 && s.side[source] == s.side[sink] && capacity(arcs, s.side) == -s.value;
  }
  if (!keeps_bounds(num_nodes, arcs, source, sink, s.flow)) return false;
  if (s.status == Status::kUnbounded) return s.value == kInfinite && s.side[sink];
  return s.side[source] && !s.side[sink] && s.value == capacity(arcs, s.side) &&
         s.value == net_out(arcs, source, s.flow);
}

void test_one_arc() {
  const std::vector<Arc> arcs = {{0, 1, 0, 5}};
  const Solved s = solve(2, arcs, 0, 1);
  CHECK(s.status == Status::kOptimal && s.value == 5);
  CHECK((s.flow == std::vector<Flow>{5}));
  CHECK((s.side == std::vector<std::uint8_t>{1, 0}));
}

void test_no_arcs() {
  const Solved s = solve(2, {}, 0, 1);
  CHECK(s.status == Status::kOptimal && s.value == 0);
  CHECK((s.side == std::vector<std::uint8_t>{1, 0}));
}

void test_two_parallel_arcs() {
  const std::vector<Arc> arcs = {{0, 1, 1, 5}, {0, 1, 0, 4}};
  const Solved s = solve(2, arcs, 0, 1);
  CHECK(s.value == 9 && proves_itself(2, arcs, 0, 1, s));
}

void test_chain_is_cut_at_its_narrowest_arc() {
  const std::vector<Arc> arcs = {{0, 1, 0, 9}, {1, 2, 0, 3}, {2, 3, 0, 7}};
  const Solved s = solve(4, arcs, 0, 3);
  CHECK(s.value == 3 && proves_itself(4, arcs, 0, 3, s));
  CHECK((s.side == std::vector<std::uint8_t>{1, 1, 0, 0}));
}

void test_tied_cuts_give_the_smallest_source_side() {
  const std::vector<Arc> arcs = {{0, 1, 0, 3}, {1, 2, 0, 3}, {2, 3, 0, 3}};
  CHECK((solve(4, arcs, 0, 3).side == std::vector<std::uint8_t>{1, 0, 0, 0}));
}

void test_crossed_diamond_takes_flow_back() {
  // The shortest path 0-1-4-5 must be partly undone for the maximum of 2.
  const std::vector<Arc> arcs = {{0, 1, 0, 1}, {0, 2, 0, 1}, {1, 4, 0, 1}, {1, 3, 0, 1},
                                 {2, 4, 0, 1}, {3, 5, 0, 1}, {4, 5, 0, 1}};
  const Solved s = solve(6, arcs, 0, 5);
  CHECK(s.value == 2 && proves_itself(6, arcs, 0, 5, s));
}

void test_sink_out_of_reach() {
  const std::vector<Arc> arcs = {{0, 1, 0, 5}, {2, 1, 0, 5}};
  const Solved s = solve(3, arcs, 0, 2);
  CHECK(s.value == 0 && proves_itself(3, arcs, 0, 2, s));
}

void test_zero_capacity() {
  const std::vector<Arc> arcs = {{0, 1, 0, 0}};
  CHECK(solve(2, arcs, 0, 1).value == 0);
}

void test_loop_carries_its_lower_bound() {
  const std::vector<Arc> arcs = {{0, 0, 2, 5}, {0, 1, 0, 4}, {1, 1, 0, kInfinite}};
  const Solved s = solve(2, arcs, 0, 1);
  CHECK(s.value == 4 && s.flow[0] == 2 && proves_itself(2, arcs, 0, 1, s));
}

void test_lower_bound_behind_the_cut_is_paid_back() {
  // 1 must return 2 to 0's side of the cut: the cut {0, 2} is worth 5 - 2.
  const std::vector<Arc> arcs = {{0, 1, 0, 5}, {1, 2, 2, 4}, {2, 0, 0, 9}, {1, 3, 0, 9}};
  const Solved s = solve(4, arcs, 0, 3);
  CHECK(s.value == 3 && s.flow[1] == 2 && proves_itself(4, arcs, 0, 3, s));
}

void test_lower_bound_equal_to_upper_bound() {
  const std::vector<Arc> arcs = {{0, 1, 3, 3}, {1, 2, 0, 2}, {1, 2, 1, 1}};
  const Solved s = solve(3, arcs, 0, 2);
  CHECK(s.value == 3 && proves_itself(3, arcs, 0, 2, s));
}

void test_flow_forced_from_sink_to_source_is_negative() {
  const std::vector<Arc> arcs = {{1, 0, 5, 9}, {0, 1, 0, 2}};
  const Solved s = solve(2, arcs, 0, 1);
  CHECK(s.status == Status::kOptimal && s.value == -3 && proves_itself(2, arcs, 0, 1, s));
}

void test_circulation_apart_from_source_and_sink() {
  const std::vector<Arc> arcs = {{0, 1, 0, 1}, {2, 3, 4, 6}, {3, 2, 0, 5}};
  const Solved s = solve(4, arcs, 0, 1);
  CHECK(s.value == 1 && s.flow[1] >= 4 && proves_itself(4, arcs, 0, 1, s));
}

void test_lower_bound_that_nothing_can_carry_on() {
  const std::vector<Arc> arcs = {{0, 1, 5, 8}, {1, 2, 0, 3}};
  const Solved s = solve(3, arcs, 0, 2);
  CHECK(s.status == Status::kInfeasible && s.value == 2);
  CHECK((s.side == std::vector<std::uint8_t>{0, 1, 0}));
  CHECK((s.flow == std::vector<Flow>{0, 0}));
}

void test_lower_bound_that_nothing_can_feed() {
  const std::vector<Arc> arcs = {{0, 1, 0, 3}, {1, 2, 5, kInfinite}};
  const Solved s = solve(3, arcs, 0, 2);
  CHECK(s.status == Status::kInfeasible && s.value == 2);
  CHECK(proves_itself(3, arcs, 0, 2, s));
}

void test_unlimited_path() {
  const std::vector<Arc> arcs = {{0, 1, 2, kInfinite}, {1, 2, 3, kInfinite}, {0, 2, 0, 1}};
  const Solved s = solve(3, arcs, 0, 2);
  CHECK(s.status == Status::kUnbounded && proves_itself(3, arcs, 0, 2, s));
}

void test_infeasible_and_unlimited_is_infeasible() {
  const std::vector<Arc> arcs = {{0, 1, 0, kInfinite}, {0, 2, 1, 1}};
  CHECK(solve(3, arcs, 0, 1).status == Status::kInfeasible);
}

void test_unlimited_arcs_around_one_limited() {
  const std::vector<Arc> arcs = {{0, 1, 0, kInfinite}, {1, 2, 0, 7}, {2, 3, 0, kInfinite}};
  const Solved s = solve(4, arcs, 0, 3);
  CHECK(s.value == 7 && proves_itself(4, arcs, 0, 3, s));
}

void test_upper_bound_beyond_infinite_is_unlimited() {
  const std::vector<Arc> arcs = {{0, 1, 0, std::numeric_limits<Flow>::max()}};
  CHECK(solve(2, arcs, 0, 1).status == Status::kUnbounded);
}

void test_capacities_at_the_edge_of_the_range() {
  const std::vector<Arc> arcs = {{0, 1, 0, kMaxTotal / 2},
                                 {1, 2, 0, kInfinite},
                                 {2, 1, 0, kInfinite},
                                 {2, 3, 0, kMaxTotal / 2 - 1},
                                 {3, 0, 0, kInfinite}};
  const Solved s = solve(4, arcs, 0, 3);
  CHECK(s.value == kMaxTotal / 2 - 1 && proves_itself(4, arcs, 0, 3, s));
}

template <class Error>
bool throws(Index num_nodes, const std::vector<Arc>& arcs, Index source, Index sink) {
  try {
    solve(num_nodes, arcs, source, sink);
  } catch (const Error&) {
    return true;
  }
  return false;
}

void test_bounds_whose_sum_could_overflow() {
  const Flow half = kMaxTotal / 2;
  CHECK((throws<std::overflow_error>(2, {{0, 1, 0, half}, {0, 1, 0, half}}, 0, 1)));
  CHECK((throws<std::overflow_error>(2, {{0, 1, half, half}}, 0, 1)));
  CHECK((throws<std::overflow_error>(2, {{0, 1, 0, kInfinite - 1}}, 0, 1)));
  CHECK((throws<std::overflow_error>(2, {{0, 1, kInfinite, kInfinite}}, 0, 1)));
}

void test_arguments_out_of_range() {
  CHECK((throws<std::invalid_argument>(2, {{0, 2, 0, 1}}, 0, 1)));
  CHECK((throws<std::invalid_argument>(2, {{-1, 1, 0, 1}}, 0, 1)));
  CHECK((throws<std::invalid_argument>(2, {{0, 1, -1, 1}}, 0, 1)));
  CHECK((throws<std::invalid_argument>(2, {{0, 1, 2, 1}}, 0, 1)));
  CHECK((throws<std::invalid_argument>(2, {{0, 1, 0, 1}}, 0, 0)));
  CHECK((throws<std::invalid_argument>(2, {{0, 1, 0, 1}}, 0, 2)));
}

// The maximum and whether it exists, from all 2^n cuts (Hoffman's theorem).
Status by_all_cuts(Index num_nodes, const std::vector<Arc>& arcs, Index source, Index sink,
                   Flow* value) {
  std::vector<std::uint8_t> side(num_nodes);
  *value = kInfinite;
  bool feasible = true;
  for (unsigned set = 0; set < 1u << num_nodes; ++set) {
    for (Index v = 0; v < num_nodes; ++v) side[v] = set >> v & 1;
    const Flow c = capacity(arcs, side);
    if (side[source] == side[sink]) feasible &= c >= 0;
    if (side[source] && !side[sink]) *value = std::min(*value, c);
  }
  if (!feasible) return Status::kInfeasible;
  return *value == kInfinite ? Status::kUnbounded : Status::kOptimal;
}

void test_random_graphs_against_all_cuts() {
  std::mt19937 random(20261121);
  const auto below = [&random](int n) { return static_cast<int>(random() % n); };
  int seen[3] = {0, 0, 0};
  for (int round = 0; round < 4000; ++round) {
    const Index num_nodes = 2 + below(6);
    const int with_lower = below(3);
    std::vector<Arc> arcs(below(3 * num_nodes + 1));
    for (Arc& arc : arcs) {
      const Flow low = with_lower && below(3) < with_lower ? below(4) : 0;
      arc = {below(num_nodes), below(num_nodes), low, below(6) ? low + below(9) : kInfinite};
    }
    const Solved s = solve(num_nodes, arcs, 0, 1);
    Flow value = 0;
    const Status status = by_all_cuts(num_nodes, arcs, 0, 1, &value);
    ++seen[static_cast<int>(status)];
    CHECK(s.status == status);
    CHECK(status != Status::kOptimal || s.value == value);
    CHECK(proves_itself(num_nodes, arcs, 0, 1, s));
  }
  CHECK(seen[0] > 500 && seen[1] > 500 && seen[2] > 50);
}

void test_same_graph_same_answer() {
  const std::vector<Arc> arcs = {{0, 1, 0, 2}, {0, 2, 1, 2}, {1, 3, 0, 2},
                                 {2, 3, 0, 2}, {1, 2, 0, 2}, {2, 1, 0, 2}};
  const Solved one = solve(4, arcs, 0, 3), other = solve(4, arcs, 0, 3);
  CHECK(one.flow == other.flow && one.side == other.side);
}

void test_long_chain_needs_no_deep_stack() {
  const Index n = 300000;
  std::vector<Arc> arcs;
  for (Index v = 0; v + 1 < n; ++v) arcs.push_back({v, v + 1, v == n / 2 ? 2 : 0, 5 + v % 3});
  const Solved s = solve(n, arcs, 0, n - 1);
  CHECK(s.value == 5 && proves_itself(n, arcs, 0, n - 1, s));
}

void test_grid_like_a_pipeline() {
  // 16 stages x 512 microbatches, each operation waiting for the one above and the one before.
  const Index stages = 16, microbatches = 512, n = stages * microbatches;
  std::vector<Arc> arcs;
  std::mt19937 random(7);
  for (Index s = 0; s < stages; ++s) {
    for (Index m = 0; m < microbatches; ++m) {
      const Index v = 2 * (s * microbatches + m);
      const Flow low = static_cast<Flow>(random() % 3);
      arcs.push_back({v, v + 1, low, low + 1000 + static_cast<Flow>(random() % 1000)});
      if (m + 1 < microbatches) arcs.push_back({v + 1, v + 2, 0, kInfinite});
      if (s + 1 < stages) arcs.push_back({v + 1, v + 2 * microbatches, 0, kInfinite});
      arcs.push_back({2 * n, v, 0, kInfinite});
      arcs.push_back({v + 1, 2 * n + 1, 0, m % 64 == 63 ? kInfinite : 0});
    }
  }
  const Solved s = solve(2 * n + 2, arcs, 2 * n, 2 * n + 1);
  CHECK(s.status == Status::kOptimal && s.value > 0);
  CHECK(proves_itself(2 * n + 2, arcs, 2 * n, 2 * n + 1, s));
}

}  // namespace

int main() {
  test_one_arc();
  test_no_arcs();
  test_two_parallel_arcs();
  test_chain_is_cut_at_its_narrowest_arc();
  test_tied_cuts_give_the_smallest_source_side();
  test_crossed_diamond_takes_flow_back();
  test_sink_out_of_reach();
  test_zero_capacity();
  test_loop_carries_its_lower_bound();
  test_lower_bound_behind_the_cut_is_paid_back();
  test_lower_bound_equal_to_upper_bound();
  test_flow_forced_from_sink_to_source_is_negative();
  test_circulation_apart_from_source_and_sink();
  test_lower_bound_that_nothing_can_carry_on();
  test_lower_bound_that_nothing_can_feed();
  test_unlimited_path();
  test_infeasible_and_unlimited_is_infeasible();
  test_unlimited_arcs_around_one_limited();
  test_upper_bound_beyond_infinite_is_unlimited();
  test_capacities_at_the_edge_of_the_range();
  test_bounds_whose_sum_could_overflow();
  test_arguments_out_of_range();
  test_random_graphs_against_all_cuts();
  test_same_graph_same_answer();
  test_long_chain_needs_no_deep_stack();
  test_grid_like_a_pipeline();
  return envplan::test::summary("maxflow");
}
