// Tests of switching.hpp, named by the shape of the problem. Exits non-zero if any check fails.
#include <algorithm>
#include <cmath>
#include <random>
#include <utility>
#include <vector>

#include "../switching.hpp"
#include "check.hpp"

namespace {

using envplan::SwitchingProblem;
using envplan::SwitchingReplay;
using Choice = std::vector<std::int32_t>;

// One table of options for all operations: option k has clock clocks - 1 - k, the fastest first.
struct Problem {
  std::vector<std::vector<std::int32_t>> preds;
  std::vector<std::int32_t> stage;
  std::vector<std::int64_t> time;
  std::vector<double> power;  // uW
  std::vector<double> blocking;
  std::int64_t latency, dwell, deadline;
};

// Arrays that a SwitchingProblem borrows.
struct Packed {
  std::vector<std::int32_t> pred_begin{0}, pred, table, option_begin, clock, nearest;
  std::vector<std::int64_t> lag;
  std::vector<double> energy;
  SwitchingProblem problem;

  explicit Packed(const Problem& p) {
    const auto count = static_cast<std::int32_t>(p.time.size());
    for (const auto& preds : p.preds) {
      pred.insert(pred.end(), preds.begin(), preds.end());
      pred_begin.push_back(static_cast<std::int32_t>(pred.size()));
    }
    lag.assign(pred.size(), 0);
    table.assign(p.preds.size(), 0);
    option_begin = {0, count};
    for (std::int32_t k = 0; k < count; ++k) {
      energy.push_back(p.power[k] * static_cast<double>(p.time[k]));
      clock.push_back(count - 1 - k);
      for (std::int32_t c = 0; c < count; ++c) nearest.push_back(count - 1 - c);
    }
    problem = {static_cast<std::int32_t>(p.preds.size()),
               static_cast<std::int32_t>(p.blocking.size()),
               1,
               count,
               pred_begin.data(),
               pred.data(),
               lag.data(),
               p.stage.data(),
               table.data(),
               option_begin.data(),
               p.time.data(),
               energy.data(),
               clock.data(),
               nearest.data(),
               p.blocking.data(),
               p.latency,
               p.dwell,
               p.deadline,
               1000.0};
  }
};

SwitchingReplay replayed(const Problem& p, const Choice& choice,
                         std::vector<std::int64_t>* start = nullptr) {
  const Packed packed(p);
  if (start != nullptr) start->resize(choice.size());
  return envplan::replay_switching(packed.problem, choice.data(),
                                   start == nullptr ? nullptr : start->data());
}

Problem chain(int count) {
  // Half the time at thrice the power: 100 ns fast, 200 ns slow.
  Problem p{{}, {}, {100, 200}, {300, 100}, {10}, 0, 0, 1000};
  for (int i = 0; i < count; ++i) {
    p.preds.push_back(i > 0 ? Choice{i - 1} : Choice{});
    p.stage.push_back(0);
  }
  return p;
}

void test_without_latency_every_operation_has_its_own_clock() {
  const SwitchingReplay r = replayed(chain(2), {0, 1});
  CHECK(r.makespan == 300);
  CHECK(r.energy == 300 * 100 + 100 * 200);
}

void test_an_operation_is_split_where_its_clock_changes() {
  Problem p = chain(2);
  p.latency = 50;
  std::vector<std::int64_t> start;
  // The first begins at the slow clock that the second has left: a quarter done in 50 ns.
  const SwitchingReplay r = replayed(p, {0, 1}, &start);
  CHECK(start[1] == 50 + 75);
  CHECK(r.makespan == 125 + 50 + 100);
  CHECK(std::abs(r.energy - (50 * 100 + 75 * 300 + 50 * 300 + 100 * 100)) < 1e-6);
}

void test_a_late_clock_lands_in_a_later_operation() {
  Problem p = chain(3);
  p.latency = 250;
  // Slow at first. The fast clock asked for at 0 comes at 250, a quarter into the second; the slow
  // one asked for at 200 would come at 450, when all is done but a part of the third.
  const SwitchingReplay r = replayed(p, {0, 1, 1});
  CHECK(r.makespan == 200 + 50 + 75 + 100);
}

void test_changes_closer_than_the_dwell_are_added_up() {
  Problem p = chain(3);
  p.dwell = 250;
  // Requests at 0 (the third has left the slow clock), 100 and, next iteration, at 500.
  CHECK(replayed(p, {0, 1, 1}).too_soon == 150);
  CHECK(replayed(p, {1, 1, 1}).too_soon == 0);
}

void test_one_clock_for_a_stage_is_the_slowest_in_time() {
  Problem p = chain(3);
  p.latency = 30;
  for (const auto& [deadline, option] : {std::pair{600, 1}, std::pair{599, 0}}) {
    p.deadline = deadline;
    const Packed packed(p);
    Choice choice(3, -1);
    envplan::choose_constant(packed.problem, false, choice.data());
    CHECK((choice == Choice{option, option, option}));
  }
}

Problem random_problem(std::mt19937& random) {
  Problem p{{}, {}, {}, {}, {20, 20}, 0, 0, 0};
  double power = 400;
  std::int64_t time = 40 + random() % 20;
  for (int k = 0; k < 6; ++k) {
    p.time.push_back(time);
    p.power.push_back(power);
    time += 1 + random() % 12;
    power *= 0.8;
  }
  std::int32_t last[2] = {-1, -1};
  for (std::int32_t i = 0; i < 40; ++i) {
    const auto s = static_cast<std::int32_t>(random() % 2);
    Choice preds;
    if (last[s] >= 0) preds.push_back(last[s]);
    if (last[1 - s] >= 0 && random() % 2) preds.push_back(last[1 - s]);
    p.preds.push_back(preds);
    p.stage.push_back(s);
    last[s] = i;
  }
  p.latency = random() % 120;
  p.dwell = random() % 2 ? random() % 300 : 0;
  return p;
}

void test_random_problems_only_get_better_and_are_replayed_as_searched() {
  std::mt19937 random(5);
  for (int round = 0; round < 40; ++round) {
    Problem p = random_problem(random);
    const SwitchingReplay fastest = replayed(p, Choice(40, 0));
    CHECK(fastest.too_soon == 0);
    p.deadline = fastest.makespan + random() % 200;
    const Packed packed(p);
    Choice choice(40, 0);
    double energy = fastest.energy;
    for (const double heat : {1.0, 0.0}) {
      const bool changed =
          envplan::improve_switching(packed.problem, 20000, heat, 1, choice.data());
      const SwitchingReplay r = replayed(p, choice);
      CHECK(r.makespan <= p.deadline);
      CHECK(r.too_soon == 0);
      CHECK(changed ? r.energy < energy : r.energy == energy);
      energy = r.energy;
    }
  }
}

void test_a_late_start_is_brought_into_time() {
  Problem p = chain(10);
  p.latency = 20;
  p.deadline = 1500;
  const Packed packed(p);
  Choice choice(10, 1);
  CHECK(envplan::improve_switching(packed.problem, 20000, 1.0, 3, choice.data()));
  CHECK(replayed(p, choice).makespan <= 1500);
}

void test_same_seed_same_result() {
  std::mt19937 random(3);
  Problem p = random_problem(random);
  p.deadline = 2000;
  const Packed packed(p);
  Choice a(40, 0), b(40, 0);
  envplan::improve_switching(packed.problem, 20000, 1.0, 11, a.data());
  envplan::improve_switching(packed.problem, 20000, 1.0, 11, b.data());
  CHECK(a == b);
}

}  // namespace

int main() {
  test_without_latency_every_operation_has_its_own_clock();
  test_an_operation_is_split_where_its_clock_changes();
  test_a_late_clock_lands_in_a_later_operation();
  test_changes_closer_than_the_dwell_are_added_up();
  test_one_clock_for_a_stage_is_the_slowest_in_time();
  test_random_problems_only_get_better_and_are_replayed_as_searched();
  test_a_late_start_is_brought_into_time();
  test_same_seed_same_result();
  return envplan::test::summary("switching");
}
