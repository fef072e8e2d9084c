// Tests of the parts of the serving replay: batch.hpp, scheduler.hpp, counts.hpp.
#include <cmath>
#include <vector>

#include "../serving/batch.hpp"
#include "../serving/counts.hpp"
#include "../serving/scheduler.hpp"
#include "check.hpp"

namespace {

using namespace envplan::serving;

bool near(double a, double b) { return std::abs(a - b) <= 1e-9 * std::max(1.0, std::abs(b)); }

Tables table(double context_s) {
  Tables t{100, {}, {}, 100, {0, 0.01}, {700, 700}, context_s, 400};
  for (int b = 0; b <= 8; ++b) {
    t.step_s.push_back(0.02 + 0.001 * b);
    t.step_w.push_back(300);
  }
  return t;
}

Batch batch_of(const std::vector<double>& contexts, const Tables& tables) {
  Batch batch;
  int32_t request = 0;
  for (const double context : contexts) {
    batch.add(request, 0, context, 101 + request, context);
    ++request;
  }
  batch.set_pace(tables);
  return batch;
}

void test_steps_get_longer_as_contexts_grow() {
  const Tables tables = table(1e-6);
  const Batch batch = batch_of({1000, 5000, 20}, tables);
  double sum = 0, context = 6020;
  for (int step = 0; step < 50; ++step, context += 3) sum += 0.023 + 1e-6 * context;
  CHECK(near(batch.duration(50), sum));
  CHECK(near(batch.steps_in(sum), 50));
  CHECK(near(batch.context_time(tables), 6020e-6));
}

void test_progress_is_the_same_in_one_go_or_in_many() {
  const Tables tables = table(1e-6);
  Batch batch = batch_of({1000, 5000, 20}, tables);
  const double whole = batch.steps_in(1.7);
  for (int k = 0; k < 17; ++k) batch.advance(batch.steps_in(0.1));
  CHECK(near(batch.progress(), whole));
}

void test_a_step_ends_when_its_rest_has_passed() {
  const Tables tables = table(1e-6);
  const Batch batch = batch_of({1000, 5000}, tables);
  for (const double after : {0.005, 0.05, 0.33}) {
    const double end = after + batch.rest_of_step(after);
    CHECK(near(batch.steps_in(end), std::ceil(batch.steps_in(after))));
  }
}

void test_without_contexts_all_steps_are_alike() {
  const Batch batch = batch_of({1000, 5000}, table(0));
  CHECK(batch.duration(10) == 10 * 0.022);
  CHECK(batch.steps_in(0.22) == 0.22 / 0.022);
}

void test_who_leaves_takes_its_context_along() {
  Batch batch = batch_of({1000, 5000}, table(0));
  batch.advance(101);
  CHECK(near(batch.context(), 6202));
  CHECK(batch.pop().request == 0);
  CHECK(near(batch.context(), 5101));
  CHECK(batch.size() == 1);
}

void test_the_latest_is_preempted_first() {
  Batch batch = batch_of({1000, 5000, 20}, table(0));
  CHECK(batch.pop_latest().request == 2);
  CHECK(batch.pop_latest().request == 1);
  CHECK(near(batch.context(), 1000));
  CHECK(batch.front().request == 0);
}

std::vector<int32_t> order(Policy policy, std::vector<Prompt> prompts, double now) {
  const auto queue = make_scheduler(policy)->make_queue();
  for (const Prompt& prompt : prompts) queue->push(prompt);
  std::vector<int32_t> requests;
  while (queue->next(now) != nullptr) requests.push_back(queue->pop().request);
  return requests;
}

void test_the_nearest_deadline_is_first_and_what_is_late_is_last() {
  const std::vector<Prompt> prompts{{9, 0, 0}, {2, 1, 0}, {5, 2, 0}, {7, 3, 0}};
  CHECK((order(Policy::kEdf, prompts, 0) == std::vector<int32_t>{1, 2, 3, 0}));
  CHECK((order(Policy::kEdf, prompts, 6) == std::vector<int32_t>{3, 0, 1, 2}));
}

void test_first_come_is_first_served_and_goes_on_first() {
  CHECK((order(Policy::kFcfs, {{9, 0, 0}, {2, 1, 0}, {5, 2, 0}}, 6) ==
         std::vector<int32_t>{0, 1, 2}));
  CHECK((order(Policy::kFcfs, {{9, 4, 0}, {2, 3, 128}}, 6) == std::vector<int32_t>{3, 4}));
  CHECK((order(Policy::kFcfs, {{9, 4, 0}, {9, 5, 0}, {2, 1, 0}}, 6) ==
         std::vector<int32_t>{1, 4, 5}));
}

void test_only_edf_gives_up_what_is_too_late() {
  for (const Policy policy : {Policy::kEdf, Policy::kFcfs}) {
    const auto queue = make_scheduler(policy)->make_queue();
    queue->push({1, 0, 0});
    Prompt prompt;
    CHECK(!queue->pop_squashed(10, 60, &prompt));
    CHECK(queue->pop_squashed(62, 60, &prompt) == (policy == Policy::kEdf));
    CHECK(queue->empty() == (policy == Policy::kEdf));
  }
}

void test_energy_lies_in_its_slots_and_ends_with_the_trace() {
  SlotSeries series(10, 25);
  series.add_energy(2, 5, 40);
  CHECK(near(series.energy()[0], 10) && near(series.energy()[1], 20));
  CHECK(near(series.energy()[2], 10) && near(series.energy()[3], 0));
}

void test_a_quantile_is_known_to_one_percent() {
  TimeCounts times;
  times.add(0.123);
  const std::vector<double> ends = TimeCounts::ends();
  for (std::size_t k = 0; k < ends.size(); ++k) {
    if (times.counts()[k] == 0) continue;
    CHECK(ends[k] >= 0.123 && ends[k] <= 0.123 * 1.0101);
  }
}

}  // namespace

int main() {
  test_steps_get_longer_as_contexts_grow();
  test_progress_is_the_same_in_one_go_or_in_many();
  test_a_step_ends_when_its_rest_has_passed();
  test_without_contexts_all_steps_are_alike();
  test_who_leaves_takes_its_context_along();
  test_the_latest_is_preempted_first();
  test_the_nearest_deadline_is_first_and_what_is_late_is_last();
  test_first_come_is_first_served_and_goes_on_first();
  test_only_edf_gives_up_what_is_too_late();
  test_energy_lies_in_its_slots_and_ends_with_the_trace();
  test_a_quantile_is_known_to_one_percent();
  return envplan::test::summary("serving_parts");
}
