// Tests of rounding.hpp, named by the shape of the problem. Exits non-zero if any check fails.
#include <algorithm>
#include <random>
#include <stdexcept>
#include <vector>

#include "../rounding.hpp"
#include "check.hpp"

namespace {

using envplan::RoundingProblem;

struct Problem {
  std::vector<std::vector<std::int32_t>> preds;
  std::vector<std::int32_t> table;
  std::vector<std::vector<std::int64_t>> times, costs;  // per table
  std::vector<std::int64_t> finish;
  std::int64_t deadline;
};

// Arrays that a RoundingProblem borrows.
struct Packed {
  std::vector<std::int32_t> pred_begin{0}, pred, option_begin{0};
  std::vector<std::int64_t> lag, time, cost;
  RoundingProblem problem;

  explicit Packed(const Problem& p) {
    for (const auto& preds : p.preds) {
      pred.insert(pred.end(), preds.begin(), preds.end());
      pred_begin.push_back(static_cast<std::int32_t>(pred.size()));
    }
    lag.assign(pred.size(), 0);
    for (std::size_t t = 0; t < p.times.size(); ++t) {
      time.insert(time.end(), p.times[t].begin(), p.times[t].end());
      cost.insert(cost.end(), p.costs[t].begin(), p.costs[t].end());
      option_begin.push_back(static_cast<std::int32_t>(time.size()));
    }
    problem = {static_cast<std::int32_t>(p.preds.size()),
               static_cast<std::int32_t>(pred.size()),
               static_cast<std::int32_t>(p.times.size()),
               static_cast<std::int32_t>(time.size()),
               pred_begin.data(),
               pred.data(),
               lag.data(),
               p.table.data(),
               option_begin.data(),
               time.data(),
               cost.data(),
               p.finish.data(),
               p.deadline};
  }
};

std::int64_t makespan(const Problem& p, const std::vector<std::int32_t>& choice) {
  std::vector<std::int64_t> finish(p.preds.size());
  for (std::size_t i = 0; i < finish.size(); ++i) {
    for (const auto q : p.preds[i]) finish[i] = std::max(finish[i], finish[q]);
    finish[i] += p.times[p.table[i]][choice[i]];
  }
  return *std::max_element(finish.begin(), finish.end());
}

std::int64_t cost(const Problem& p, const std::vector<std::int32_t>& choice) {
  std::int64_t sum = 0;
  for (std::size_t i = 0; i < choice.size(); ++i) sum += p.costs[p.table[i]][choice[i]];
  return sum;
}

std::vector<std::int32_t> rounded(const Problem& p) {
  const Packed packed(p);
  std::vector<std::int32_t> choice(p.preds.size(), -1);
  envplan::round_to_options(packed.problem, choice.data());
  return choice;
}

void test_one_operation_takes_the_cheapest_that_fits() {
  Problem p{{{}}, {0}, {{4, 6, 9}}, {{30, 20, 10}}, {8}, 8};
  CHECK((rounded(p) == std::vector<std::int32_t>{1}));
}

void test_what_one_leaves_over_the_next_uses() {
  // Relaxed: 5 + 5. The first rounds down to 4, which leaves 6 for the second.
  Problem p{{{}, {0}}, {0, 0}, {{4, 6}}, {{30, 20}}, {5, 10}, 10};
  CHECK((rounded(p) == std::vector<std::int32_t>{0, 1}));
}

void test_nothing_to_choose() {
  Problem p{{{}, {0}}, {0, 0}, {{5}}, {{7}}, {5, 10}, 10};
  CHECK((rounded(p) == std::vector<std::int32_t>{0, 0}));
}

Problem random_problem(std::mt19937& random, std::int32_t num_operations = 60) {
  Problem p;
  for (int t = 0; t < 3; ++t) {
    std::vector<std::int64_t> times{10 + static_cast<int>(random() % 20)}, costs{1000};
    for (int o = 0; o < 6; ++o) {
      times.push_back(times.back() + 1 + random() % 9);
      costs.push_back(costs.back() - 1 - random() % 99);
    }
    p.times.push_back(times);
    p.costs.push_back(costs);
  }
  for (std::int32_t i = 0; i < num_operations; ++i) {
    std::vector<std::int32_t> preds;
    for (std::int32_t q = std::max(0, i - 4); q < i; ++q) {
      if (random() % 2) preds.push_back(q);
    }
    p.preds.push_back(preds);
    p.table.push_back(random() % 3);
    std::int64_t start = 0;
    for (const auto q : preds) start = std::max(start, p.finish[q]);
    p.finish.push_back(start + p.times[p.table[i]][0] + random() % 15);
  }
  p.deadline = *std::max_element(p.finish.begin(), p.finish.end());
  return p;
}

void test_random_problems_meet_the_deadline_and_only_get_cheaper() {
  std::mt19937 random(7);
  for (int round = 0; round < 50; ++round) {
    const Problem p = random_problem(random);
    const Packed packed(p);
    std::vector<std::int32_t> choice = rounded(p);
    CHECK(makespan(p, choice) <= p.deadline);
    for (int k = 0; k < 4; ++k) {
      const std::int64_t before = cost(p, choice);
      const bool better = envplan::improve_options(packed.problem, 5000, 0.5,
                                                   static_cast<std::uint64_t>(k), choice.data());
      CHECK(makespan(p, choice) <= p.deadline);
      CHECK(better ? cost(p, choice) < before : cost(p, choice) == before);
    }
    // No single operation can get cheaper within its slack.
    for (std::size_t i = 0; i < choice.size(); ++i) {
      if (choice[i] + 1 == static_cast<std::int32_t>(p.times[p.table[i]].size())) continue;
      ++choice[i];
      CHECK(makespan(p, choice) > p.deadline);
      --choice[i];
    }
  }
}

void test_long_problem_is_annealed_all_along() {
  std::mt19937 random(5);
  constexpr std::int32_t kSize = 21000;
  const Problem p = random_problem(random, kSize);
  const Packed packed(p);
  const std::vector<std::int32_t> before = rounded(p);
  std::vector<std::int32_t> after = before;
  CHECK(envplan::improve_options(packed.problem, 100 * kSize, 0.3, 0, after.data()));
  CHECK(makespan(p, after) <= p.deadline);
  constexpr std::int32_t kThird = kSize / 3;
  for (std::int32_t begin = 0; begin < kSize; begin += kThird) {
    CHECK(!std::equal(&before[begin], &before[begin] + kThird, &after[begin]));
  }
}

void test_same_seed_same_result() {
  std::mt19937 random(3);
  const Problem p = random_problem(random);
  const Packed packed(p);
  std::vector<std::int32_t> a = rounded(p), b = rounded(p);
  envplan::improve_options(packed.problem, 20000, 1.0, 11, a.data());
  envplan::improve_options(packed.problem, 20000, 1.0, 11, b.data());
  CHECK(a == b);
}

bool refused(const Problem& problem, std::int32_t option) {
  Packed packed(problem);
  std::vector<std::int32_t> choice(problem.preds.size(), option);
  try {
    envplan::improve_options(packed.problem, 10, 1, 0, choice.data());
  } catch (const std::invalid_argument&) {
    return true;
  }
  return false;
}

void test_what_is_no_problem_is_refused() {
  const Problem sound{{{}, {0}}, {0, 0}, {{5, 9}}, {{7, 4}}, {9, 18}, 18};
  CHECK(!refused(sound, 0));
  CHECK(refused(sound, 2));  // no such option
  Problem other = sound;
  other.preds = {{1}, {}};  // not in a topological order
  CHECK(refused(other, 0));
  other = sound;
  other.table[1] = 1;  // no such table
  CHECK(refused(other, 0));
  other = sound;
  other.costs = {{4, 7}};  // slower and dearer
  CHECK(refused(other, 0));
  constexpr std::int64_t most = std::int64_t{1} << 62;
  other = sound;
  other.times = {{-1, 9}};  // takes less than no time
  CHECK(refused(other, 0));
  other.times = {{5, most / 2}};  // two of these overflow
  CHECK(refused(other, 0));
  other.times = {{5, most / 2 - 1}};
  CHECK(!refused(other, 0));
  for (const std::int64_t time : {std::int64_t{-1}, most}) {
    other = sound;
    other.finish[0] = time;
    CHECK(refused(other, 0));
    other = sound;
    other.deadline = time;
    CHECK(refused(other, 0));
  }
}

}  // namespace

int main() {
  test_one_operation_takes_the_cheapest_that_fits();
  test_what_one_leaves_over_the_next_uses();
  test_nothing_to_choose();
  test_random_problems_meet_the_deadline_and_only_get_cheaper();
  test_long_problem_is_annealed_all_along();
  test_same_seed_same_result();
  test_what_is_no_problem_is_refused();
  return envplan::test::summary("rounding");
}
