// Tests of replay.hpp, named by what is replayed. Exits non-zero if any check fails.
#include <algorithm>
#include <random>
#include <vector>

#include "../replay.hpp"
#include "check.hpp"
#include "problems.hpp"

namespace {

using namespace envplan;
using test::chain;
using test::replayed;
using test::Rows;

Machine asking_at_start(Time latency) { return {latency, false}; }
Machine asking_ahead(Time latency) { return {latency, true}; }

void test_without_latency_every_operation_has_its_own_clock() {
  const Problem problem = chain(2).problem();
  const Replay replay = replayed(problem, {0, 1}, asking_at_start(0));
  CHECK(replay.makespan() == 300);
  CHECK(replay.energy_until(300) == 300 * 100 + 100 * 200);
  CHECK(replay.energy_until(400) == 300 * 100 + 100 * 200 + 10 * 100);
}

void test_an_operation_is_split_where_its_clock_changes() {
  const Problem problem = chain(2).problem();
  // The first begins at the slow clock that the second has left: a quarter done in 50 ns.
  const Replay replay = replayed(problem, {0, 1}, asking_at_start(50));
  CHECK(replay.start(1) == 50 + 75);
  CHECK(replay.makespan() == 125 + 50 + 100);
  CHECK(replay.energy_until(275) == 50 * 100 + 75 * 300 + 50 * 300 + 100 * 100);
  std::vector<Part> parts;
  replay.parts(1, &parts);
  CHECK(parts.size() == 2);
  CHECK(parts[0].clock == 1 && parts[0].begin == 125 && parts[0].end == 175);
  CHECK(parts[1].clock == 0 && parts[1].energy == 100 * 100);
}

void test_a_late_clock_lands_in_a_later_operation() {
  const Problem problem = chain(3).problem();
  // Slow at first. The fast clock asked for at 0 comes at 250, a quarter into the second; the slow
  // one asked for at 200 would come at 450, when all is done but a part of the third.
  CHECK(replayed(problem, {0, 1, 1}, asking_at_start(250)).makespan() == 200 + 50 + 75 + 100);
}

void test_a_clock_asked_for_ahead_is_there_as_its_operation_starts() {
  const Problem problem = chain(2).problem();
  const Replay replay = replayed(problem, {0, 1}, asking_ahead(50));
  // Nothing comes before the iteration begins, so the first is late: a quarter done in 50 ns.
  CHECK(replay.request_time(0) == 0);
  CHECK(replay.start(1) == 50 + 75);
  CHECK(replay.request_time(1) == 125 - 50);
  CHECK(replay.makespan() == 125 + 200);
}

void test_no_clock_is_asked_for_before_the_operation_before_starts() {
  const Problem problem = chain(3).problem();
  // Slow at first, for 200 ns; the fast clock would have come then. The slow one comes in the end.
  const Replay replay = replayed(problem, {0, 1, 1}, asking_ahead(250));
  CHECK(replay.request_time(0) == 0 && replay.request_time(1) == 0);
  CHECK(!replay.makes_request(2));
  // Both have come at 250, so the second and third stay slow.
  CHECK(replay.makespan() == 600);
}

void test_a_clock_is_not_asked_for_before_the_last_slice_of_a_row_that_changes_clocks() {
  test::Shape shape = chain(3);
  shape.time.insert(shape.time.begin(), 90);
  shape.power.insert(shape.power.begin(), 350);
  shape.num_moving = 1;
  const Problem problem = shape.problem();
  // Row 0 runs 90 ns and leaves the lowest clock; row 1 wants the middle one.
  const Replay replay = replayed(problem, {1, 0, 1}, asking_ahead(50));
  CHECK(replay.makes_request(2));
  CHECK(replay.request_time(2) == replay.finish(1) - 30);
}

void test_noise_makes_clocks_asked_for_ahead_come_early_or_late() {
  const Problem problem = chain(3).problem();
  Replay replay = replayed(problem, {0, 0, 1}, asking_ahead(40));
  const Time planned = replay.start(2);
  CHECK(replay.request_time(2) == planned - 40);
  // The second takes twice as long. The slow clock that the third wants comes 100 ns after the
  // second has begun, so that the other half runs slowly: for 200 ns in place of 100.
  const double slow[] = {1, 2, 1};
  replay.run(slow);
  CHECK(replay.request_time(2) == planned - 40);
  CHECK(replay.start(2) == planned + 200);
  CHECK(replay.energy(1) == 100 * 300 + 200 * 100);
  // The second takes half as long: it has ended before the timer fires.
  const double fast[] = {1, 0.5, 1};
  replay.run(fast);
  CHECK(replay.start(2) == planned - 50 && replay.request_time(2) == planned - 50);
  CHECK(replay.finish(2) == planned - 50 + 40 + 120);
  Time out[2];
  const Rows rows{0, 0, 1};
  const double runs[] = {1, 2, 1, 1, 0.5, 1};
  makespans(problem, rows.data(), asking_ahead(40), runs, 2, out);
  CHECK(out[0] == planned + 400 && out[1] == planned - 50 + 160);
}

void test_requests_closer_than_the_hold_are_added_up() {
  const Problem problem = chain(3).problem();
  // Requests at 0 (the third has left the slow clock), 100 and, next iteration, at 500.
  CHECK(replayed(problem, {0, 1, 1}, asking_at_start(0), 250).shortage() == 150);
  CHECK(replayed(problem, {1, 1, 1}, asking_at_start(0), 250).shortage() == 0);
}

void test_power_over_time_of_two_stages() {
  test::Shape shape = chain(2);
  shape.stage_begin = {0, 1, 2};
  shape.waiting = {10, 20};
  const Problem problem = shape.problem();
  const Replay replay = replayed(problem, {0, 1}, asking_at_start(0));
  std::vector<Time> times;
  std::vector<Power> power;
  replay.power_steps(&times, &power);
  CHECK((times == std::vector<Time>{0, 100, 200}));
  CHECK((power == std::vector<Power>{400, 110}));
  CHECK(replay.energy_above_cap(300, 0, 200) == 100 * 100);
  CHECK(replay.energy_above_cap(100, 50, 150) == 300 * 50 + 10 * 50);
  CHECK(replay.energy_above_cap(400, 0, 200) == 0);
}

void test_noise_scales_time_and_energy_and_not_power() {
  const Problem problem = chain(2).problem();
  const double factors[] = {1.5, 0.001};
  Replay replay = replayed(problem, {0, 0}, asking_at_start(0));
  replay.run(factors);
  CHECK(replay.finish(0) == 150 && replay.energy(0) == 150 * 300);
  CHECK(replay.makespan() == 151 && replay.energy(1) == 300);
  Time out[3];
  const Rows rows{0, 0};
  const double runs[] = {1.5, 0.001, 1, 1, 2, 3};
  makespans(problem, rows.data(), asking_at_start(0), runs, 3, out);
  CHECK(out[0] == 151 && out[1] == 200 && out[2] == 500);
}

void test_changes_are_replayed_as_from_the_start_and_undone() {
  std::mt19937 random(7);
  for (int round = 0; round < 300; ++round) {
    test::Shape shape = test::random_shape(random);
    shape.num_moving = random() % 3 == 0 ? 2 : 0;
    const Problem problem = shape.problem();
    const Time latency = random() % 3 ? random() % 300 : 0, min_dwell = random() % 2 ? 0 : 150;
    const Machine machine{latency, random() % 2 == 0};
    Rows rows(40, 2);
    Replay replay = replayed(problem, rows, machine, min_dwell);
    std::vector<Time> tail;
    replay.tails(&tail);
    for (int step = 0; step < 10; ++step) {
      const Replay before = replay;
      std::vector<Change> changes;
      for (Index i = 0; i < 40; ++i) {
        if (random() % 8 == 0) changes.push_back({i, static_cast<Index>(random() % 6)});
      }
      const double most = random() % 2 ? 1e18 : 0;
      const bool done = replay.change(changes, {most, before.makespan(), tail.data(), 1e3, 1e3});
      if (done) {
        Rows now(40);
        replay.chosen(now.data());
        const Replay again = replayed(problem, now, machine, min_dwell);
        CHECK(again.makespan() == replay.makespan() && again.cost() == replay.cost());
        CHECK(again.shortage() == replay.shortage());
        for (Index i = 0; i < 40; ++i) {
          CHECK(again.finish(i) == replay.finish(i));
          CHECK(again.makes_request(i) == replay.makes_request(i));
          CHECK(again.request_time(i) == replay.request_time(i));
        }
        const auto [from, to] = replay.changed_span();
        const Time end = std::max(before.makespan(), replay.makespan());
        CHECK(replay.energy_above_cap(4000, 0, end) - before.energy_above_cap(4000, 0, end) ==
              replay.energy_above_cap(4000, from, to) - before.energy_above_cap(4000, from, to));
      }
      if (!done || random() % 2) {
        replay.undo();
        CHECK(before.makespan() == replay.makespan() && before.cost() == replay.cost());
        CHECK(before.shortage() == replay.shortage() && before.rows() == replay.rows());
        for (Index i = 0; i < 40; ++i) {
          CHECK(before.finish(i) == replay.finish(i));
          CHECK(before.request_time(i) == replay.request_time(i));
        }
      }
    }
  }
}

bool is_refused(const test::Shape& shape) {
  try {
    shape.problem();
    return false;
  } catch (const std::invalid_argument&) {
    return true;
  }
}

void test_an_energy_at_the_limit_is_taken_and_one_above_it_refused() {
  test::Shape shape = chain(2);
  shape.waiting = {0};
  shape.time = {Time{1} << 31, Time{1} << 32};
  shape.power = {Power{1} << 31, 1};
  const Problem problem = shape.problem();
  const Replay replay = replayed(problem, {0, 0}, asking_at_start(0));
  CHECK(replay.energy(0) == kMostEnergy);
  CHECK(replay.energy_until(replay.makespan()) == 2 * Energy{kMostEnergy});
  shape.power[0] += 1;
  CHECK(is_refused(shape));
}

void test_blocking_powers_at_the_limit_are_taken_and_above_it_refused() {
  test::Shape shape = chain(2);
  shape.stage_begin = {0, 1, 2};
  shape.waiting = {kMostPower / 2, kMostPower / 2};
  const Problem problem = shape.problem();
  const Replay replay = replayed(problem, {0, 0}, asking_at_start(0));
  CHECK(replay.energy_until(kMostTime) - replay.cost() == Energy{kMostPower} * kMostTime);
  shape.waiting[1] += 1;
  CHECK(is_refused(shape));
}

void test_ten_thousand_operations_of_10_kJ_on_each_of_128_stages_add_up() {
  constexpr Index kStages = 128, kEach = 10'000;
  test::Shape shape{{0}, {}, {10'000'000'000}, {100'000'000}, {}, {}};  // 10 s at 1 kW
  for (Index s = 0; s < kStages; ++s) {
    shape.stage_begin.push_back((s + 1) * kEach);
    shape.waiting.push_back(0);
  }
  for (Index i = 0; i < kStages * kEach; ++i) shape.order.push_back(i);
  const Problem problem = shape.problem();
  const Replay replay = replayed(problem, Rows(kStages * kEach, 0), asking_at_start(0));
  CHECK(replay.makespan() == kEach * shape.time[0]);
  CHECK(replay.cost() == Energy{kStages} * kEach * 10'000 * kUnitsPerJoule);
}

}  // namespace

int main() {
  test_without_latency_every_operation_has_its_own_clock();
  test_an_operation_is_split_where_its_clock_changes();
  test_a_late_clock_lands_in_a_later_operation();
  test_a_clock_asked_for_ahead_is_there_as_its_operation_starts();
  test_no_clock_is_asked_for_before_the_operation_before_starts();
  test_a_clock_is_not_asked_for_before_the_last_slice_of_a_row_that_changes_clocks();
  test_noise_makes_clocks_asked_for_ahead_come_early_or_late();
  test_requests_closer_than_the_hold_are_added_up();
  test_power_over_time_of_two_stages();
  test_noise_scales_time_and_energy_and_not_power();
  test_changes_are_replayed_as_from_the_start_and_undone();
  test_an_energy_at_the_limit_is_taken_and_one_above_it_refused();
  test_blocking_powers_at_the_limit_are_taken_and_above_it_refused();
  test_ten_thousand_operations_of_10_kJ_on_each_of_128_stages_add_up();
  return envplan::test::summary("replay");
}
