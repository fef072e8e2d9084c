// Tests of serving/replay.hpp and serving/service.hpp, named by the fleet and its load. Exits
// non-zero if any check fails.
#include <cmath>
#include <stdexcept>
#include <utility>
#include <vector>

#include "../serving/replay.hpp"
#include "check.hpp"

namespace {

using namespace envplan::serving;

constexpr std::size_t kClasses = 9;
constexpr double kIdleW = 100, kStepS = 0.05, kStepW = 300, kTokenS = 1e-4, kPromptW = 700;
constexpr int kBatch = 4;

bool near(double a, double b) { return std::abs(a - b) <= 1e-9 * std::max(1.0, std::abs(b)); }

// Prompts take time by their tokens; steps are alike for every batch up to kBatch.
Tables table(double slower) {
  Tables t{kIdleW, {}, {}, 100, {}, {}};
  t.step_s.assign(kBatch + 2, slower * kStepS);
  t.step_w.assign(kBatch + 2, kStepW);
  for (int k = 0; k <= 100; ++k) {
    t.prompt_s.push_back(slower * kTokenS * 100 * k);
    t.prompt_w.push_back(kPromptW);
  }
  return t;
}

// Requests all of class 0, and one size with a slow and a fast configuration.
struct Load {
  std::vector<double> arrival;
  std::vector<int32_t> input, output;
  std::vector<uint8_t> classes{};
  std::vector<Tables> tables{table(2), table(1)};
  Size size{1e6, 1000, {0, 1}};

  Service service() {
    classes.assign(arrival.size(), 0);
    const Requests requests{static_cast<int64_t>(arrival.size()),
                            arrival.data(),
                            input.data(),
                            output.data(),
                            classes.data(),
                            classes.data()};
    return Service(requests, tables, {size}, std::vector<Slo>(kClasses, Slo{1, 1}),
                   std::vector<double>(kClasses, 100));
  }
};

constexpr Options kOptions{0, 1, 0, 0.5, 1e9, 10, 100};

// A fleet of so many instances in pool 0, at the highest clock.
Replay fleet(const Service& service, int instances) {
  Replay replay(service, kOptions);
  for (int32_t k = 0; k < static_cast<int32_t>(kClasses); ++k) replay.route(k, 0, {});
  for (int k = 0; k < instances; ++k) replay.start(0, 0, 1, false, 0);
  return replay;
}

double total(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value;
  return sum;
}

void test_one_request_takes_its_prompt_and_its_steps() {
  Load load{{1}, {1000}, {11}};
  const Service service = load.service();
  Replay replay = fleet(service, 1);
  replay.advance(100);
  const double prompt_s = 1000 * kTokenS, steps_s = 10 * kStepS;
  CHECK(near(total(replay.series().energy()),
             prompt_s * kPromptW + steps_s * kStepW + (100 - prompt_s - steps_s) * kIdleW));
  CHECK(replay.tally().counts()[0].requests == 1 && replay.tally().counts()[0].attained == 1);
  CHECK(replay.series().attained()[0] == 1);
}

void test_a_request_beyond_its_slo_is_not_attained() {
  Load load{{0, 0.001}, {9000, 9000}, {1, 1}};  // 0.9 s each, one after the other
  const Service service = load.service();
  Replay replay = fleet(service, 1);
  replay.advance(100);
  CHECK(replay.tally().counts()[0].requests == 2 && replay.tally().counts()[0].first_in_time == 1);
}

void test_without_an_instance_requests_wait_and_count_as_late() {
  Load load{{0}, {100}, {1}};
  const Service service = load.service();
  Replay replay = fleet(service, 0);
  replay.advance(100);
  CHECK(replay.tally().counts()[0].requests == 0);
  replay.finish();
  CHECK(replay.tally().counts()[0].requests == 1 && replay.tally().counts()[0].attained == 0);
}

void test_a_retired_instance_finishes_what_it_has_and_draws_nothing_more() {
  Load load{{0}, {1000}, {2}};
  const Service service = load.service();
  Replay replay = fleet(service, 1);
  replay.advance(0.01);
  replay.retire(0);
  replay.advance(100);
  CHECK(replay.tally().counts()[0].attained == 1);
  CHECK(replay.instances()[0].phase == Phase::kGone);
  CHECK(near(total(replay.series().energy()), 0.1 * kPromptW + kStepS * kStepW));
}

void test_a_request_decodes_where_its_pool_hands_over_though_its_instance_moves() {
  Load load{{0}, {1000}, {3}};
  const Service service = load.service();
  Replay replay = fleet(service, 1);
  replay.hand_over(0, 1);
  replay.advance(0.5);  // its prompt is through, and no instance decodes
  replay.move(0, 2, 1, false);
  const int32_t decoding = replay.start(1, 0, 1, false, 0.5);
  replay.advance(100);
  CHECK(replay.tally().counts()[0].requests == 1 && replay.tally().counts()[0].attained == 1);
  CHECK(near(replay.instances()[decoding].batch.progress(), 2));
}

void test_an_instance_that_leaves_may_move_to_a_pool_that_is_new() {
  Load load{{0}, {1000}, {2}};
  const Service service = load.service();
  Replay replay = fleet(service, 1);
  replay.advance(0.01);
  replay.retire(0);
  replay.move(0, 50, 1, false);
  replay.advance(100);
  CHECK(replay.tally().counts()[0].attained == 1);
}

void test_energy_lies_in_the_slots_in_which_it_is_used() {
  Load load{{0}, {0}, {1}};
  const Service service = load.service();
  Replay one = fleet(service, 1), many = fleet(service, 1);
  one.advance(95);
  for (int k = 1; k <= 19; ++k) many.advance(5 * k);
  for (std::size_t slot = 0; slot < one.series().energy().size(); ++slot) {
    CHECK(near(one.series().energy()[slot], many.series().energy()[slot]));
  }
  CHECK(near(one.series().energy()[4], 10 * kIdleW));
}

void test_a_request_that_never_ends_is_counted_in_the_end() {
  Load load{{0}, {1}, {2000000000}};
  const Service service = load.service();
  Replay replay = fleet(service, 1);
  replay.advance(100);
  replay.finish();
  CHECK(replay.tally().counts()[0].requests == 1 && replay.tally().counts()[0].tokens_in_time == 0);
  CHECK(replay.tally().counts()[0].first_in_time == 1);
}

void test_twice_the_load_needs_twice_the_instances() {
  Load load;
  for (int k = 0; k < 1000; ++k) {
    load.arrival.push_back(0.1 * k);
    load.input.push_back(1000);
    load.output.push_back(1);
  }
  const Service service = load.service();
  const Need alone = service.required_instances(0, 100, 1, 0, 0.01);
  CHECK(near(alone.busy, 1));
  for (int32_t& tokens : load.input) tokens = 2000;
  const Service heavier = load.service();
  CHECK(near(heavier.required_instances(0, 100, 1, 0, 0.01).busy, 2));
  CHECK(alone.instances > 0.9 && alone.hopeless == 0);
  CHECK(service.required_instances(0, 100, 2, 0, 0.01).instances == 0);  // of another class: none
}

template <class Thrown, class Call>
bool throws(Call call) {
  try {
    call();
  } catch (const Thrown&) {
    return true;
  }
  return false;
}

void test_what_is_not_there_is_refused() {
  Load load{{0}, {1}, {1}};
  const Service service = load.service();
  Replay replay = fleet(service, 1);
  using Range = std::out_of_range;
  CHECK(throws<Range>([&] { replay.retire(1); }));
  CHECK(throws<Range>([&] { replay.retire(-1); }));
  CHECK(throws<Range>([&] { replay.move(0, -1, 0, false); }));
  CHECK(throws<Range>([&] { replay.move(0, 0, 2, false); }));
  CHECK(throws<Range>([&] { replay.move(7, 0, 0, false); }));
  CHECK(throws<Range>([&] { replay.start(0, 1, 0, false, 0); }));
  CHECK(throws<Range>([&] { replay.start(0, 0, -1, false, 0); }));
  CHECK(throws<Range>([&] { replay.start(1 << 30, 0, 0, false, 0); }));
  CHECK(throws<Range>([&] { replay.route(9, 0, {}); }));
  CHECK(throws<Range>([&] { replay.route(0, 0, {-1}); }));
  CHECK(throws<Range>([&] { replay.set_pack(-1, true); }));
  CHECK(throws<Range>([&] { service.required_instances(0, 1, 1, 1, 0); }));
}

void test_tables_that_are_none_are_refused() {
  using Invalid = std::invalid_argument;
  Load short_steps{{0}, {1}, {1}};
  short_steps.tables[0].step_s.resize(1);
  CHECK(throws<Invalid>([&] { short_steps.service(); }));
  Load no_grid{{0}, {1}, {1}};
  no_grid.tables[0].grid = 0;
  CHECK(throws<Invalid>([&] { no_grid.service(); }));
  Load no_table{{0}, {1}, {1}};
  no_table.size.tables = {5};
  CHECK(throws<Invalid>([&] { no_table.service(); }));
  Load backwards{{1, 0}, {1, 1}, {1, 1}};
  CHECK(throws<Invalid>([&] { backwards.service(); }));
}

}  // namespace

int main() {
  test_one_request_takes_its_prompt_and_its_steps();
  test_a_request_beyond_its_slo_is_not_attained();
  test_without_an_instance_requests_wait_and_count_as_late();
  test_a_retired_instance_finishes_what_it_has_and_draws_nothing_more();
  test_a_request_decodes_where_its_pool_hands_over_though_its_instance_moves();
  test_an_instance_that_leaves_may_move_to_a_pool_that_is_new();
  test_energy_lies_in_the_slots_in_which_it_is_used();
  test_a_request_that_never_ends_is_counted_in_the_end();
  test_twice_the_load_needs_twice_the_instances();
  test_what_is_not_there_is_refused();
  test_tables_that_are_none_are_refused();
  return envplan::test::summary("serving");
}
