// Tests of annealing.hpp, named by the shape of the problem. Exits non-zero if any check fails.
#include <random>
#include <utility>
#include <vector>

#include "../annealing.hpp"
#include "check.hpp"
#include "problems.hpp"

namespace {

using namespace envplan;
using test::chain;
using test::Rows;

constexpr Limits kNone{{0, false}, 0, 0, -1, false, 1000};

Rows annealed(const Problem& problem, const Limits& limits, const Rows& rows, double heat,
              std::uint64_t work = 1000) {
  Annealing annealing(problem, limits, rows.data(), 20000, heat, 1);
  while (annealing.run(work)) {
  }
  Rows best(rows.size());
  annealing.best(best.data());
  const Score again = score(problem, limits, best.data());
  CHECK(again.excess == annealing.best_score().excess);
  CHECK(again.energy == annealing.best_score().energy);
  return best;
}

void test_one_clock_for_a_stage_is_the_slowest_in_time() {
  const Problem problem = chain(3).problem();
  for (const auto& [deadline, row] : {std::pair{600, 1}, std::pair{599, 0}}) {
    Limits limits = kNone;
    limits.machine.latency = 30;
    limits.deadline = deadline;
    ConstantClocks clocks(problem, limits);
    clocks.improve(0);
    Rows rows(3, -1);
    clocks.best(rows.data());
    CHECK((rows == Rows{row, row, row}));
  }
}

void test_a_late_start_is_brought_into_time() {
  const Problem problem = chain(10).problem();
  Limits limits = kNone;
  limits.machine.latency = 20;
  limits.deadline = 1500;
  const Rows best = annealed(problem, limits, Rows(10, 1), 1);
  CHECK(score(problem, limits, best.data()).excess == 0);
}

void test_power_is_brought_under_a_cap() {
  test::Shape shape = chain(4);
  shape.stage_begin = {0, 2, 4};
  shape.waiting = {10, 10};
  const Problem problem = shape.problem();
  Limits limits = kNone;
  limits.deadline = 400;
  limits.peak = 450;  // one fast and one slow at a time
  const Rows best = annealed(problem, limits, Rows(4, 0), 1);
  CHECK(score(problem, limits, best.data()).excess == 0);
  CHECK(score(problem, limits, Rows(4, 0).data()).over == 150 * 200);
}

void test_one_row_for_everything_leaves_nothing_to_try() {
  test::Shape shape = chain(3);
  shape.time = {100};
  shape.power = {300};
  const Problem problem = shape.problem();
  CHECK((annealed(problem, kNone, Rows(3, 0), 1) == Rows{0, 0, 0}));
}

void test_random_problems_only_get_better_however_they_are_cut() {
  std::mt19937 random(5);
  for (int round = 0; round < 30; ++round) {
    const Problem problem = test::random_shape(random).problem();
    Limits limits = kNone;
    limits.machine = {static_cast<Time>(random() % 120), random() % 2 == 0};
    limits.min_dwell = random() % 2 ? random() % 300 : 0;
    limits.peak = random() % 2 ? 7000 : -1;
    Rows rows(40, 0);
    limits.deadline = test::replayed(problem, rows, limits.machine).makespan() + random() % 200;
    for (const double heat : {1.0, 0.0}) {
      const Rows best = annealed(problem, limits, rows, heat);
      CHECK(best == annealed(problem, limits, rows, heat, 1 << 30));
      CHECK(best == rows ||
            score(problem, limits, best.data()) < score(problem, limits, rows.data()));
      rows = best;
    }
  }
}

}  // namespace

int main() {
  test_one_clock_for_a_stage_is_the_slowest_in_time();
  test_a_late_start_is_brought_into_time();
  test_power_is_brought_under_a_cap();
  test_one_row_for_everything_leaves_nothing_to_try();
  test_random_problems_only_get_better_however_they_are_cut();
  return envplan::test::summary("annealing");
}
