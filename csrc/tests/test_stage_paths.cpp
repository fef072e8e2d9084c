// Tests of stage_paths.hpp, named by the shape of the problem. Exits non-zero if any check fails.
#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "../stage_paths.hpp"
#include "check.hpp"
#include "problems.hpp"

namespace {

using namespace envplan;
using test::chain;
using test::Rows;

// Prices of a chain of operations, and what does not depend on it.
struct Prices {
  std::vector<double> time, wait;
  Time latency = 0, min_dwell = 0;
  bool asks_ahead = true;
  double change = 0;

  Prices(Index size, double time_price, double wait_price)
      : time(size, time_price), wait(size + 1, wait_price) {}

  StagePath path(const Problem& problem) const {
    return cheapest_stage_path(problem, 0,
                               {latency, min_dwell, asks_ahead, change, time.data(), wait.data()});
  }

  double paid(const StagePath& path) const {
    double sum = path.energy + path.changes * change;
    sum += std::inner_product(time.begin(), time.end(), path.times.begin(), 0.0);
    return sum + std::inner_product(wait.begin(), wait.end(), path.waits.begin(), 0.0);
  }
};

// Time is cheap for the first half of a chain and dear for the second, so that one change pays.
Prices cheap_then_dear(Index size) {
  Prices prices(size, 0, 1000);
  for (Index k = size / 2; k < size; ++k) prices.time[k] = 1000;
  return prices;
}

void test_an_empty_stage_costs_nothing() {
  test::Shape shape = chain(2);
  shape.stage_begin = {0, 0, 2};
  shape.waiting = {0, 0};
  const Problem problem = shape.problem();
  CHECK(Prices(0, 0, 0).path(problem).bound == 0);
}

void test_dear_time_takes_the_fastest_rows() {
  const Problem problem = chain(4).problem();
  CHECK((Prices(4, 1e6, 0).path(problem).rows == Rows(4, 0)));
  CHECK((Prices(4, 0, 0).path(problem).rows == Rows(4, 1)));
}

void test_a_path_costs_its_bound() {
  const Problem problem = chain(6).problem();
  for (const Time latency : {0, 30, 500}) {
    for (const Time min_dwell : {0, 350, 5000}) {
      for (const bool asks_ahead : {false, true}) {
        Prices prices = cheap_then_dear(6);
        prices.latency = latency;
        prices.min_dwell = min_dwell;
        prices.asks_ahead = asks_ahead;
        prices.change = 100;
        const StagePath path = prices.path(problem);
        CHECK(path.bound <= prices.paid(path));
        CHECK(prices.paid(path) - path.bound < 100);
      }
    }
  }
}

void test_a_dear_change_is_not_made() {
  const Problem problem = chain(6).problem();
  Prices prices = cheap_then_dear(6);
  const StagePath free = prices.path(problem);
  CHECK((free.rows == Rows{1, 1, 1, 0, 0, 0}));
  prices.change = 1e9;
  const StagePath priced = prices.path(problem);
  CHECK(priced.changes == 0);
  CHECK(priced.bound > free.bound);
}

void test_a_clock_asked_for_at_the_start_is_late() {
  const Problem problem = chain(6).problem();
  Prices prices = cheap_then_dear(6);
  prices.latency = 50;
  const double ahead = prices.path(problem).bound;
  prices.asks_ahead = false;
  const StagePath late = prices.path(problem);
  CHECK(ahead < late.bound);
  // The operation that asks for the fast clock does a quarter of its work at the slow one.
  CHECK(std::count(late.times.begin(), late.times.end(), 125) == 1);
}

void test_a_longer_dwell_never_costs_less() {
  const Problem problem = chain(12).problem();
  Prices prices(12, 0, 10);
  for (Index k = 0; k < 12; k += 2) prices.time[k] = 1000;
  double before = prices.path(problem).bound;
  const double free = before;
  for (const Time min_dwell : {150, 300, 600, 1200}) {
    prices.min_dwell = min_dwell;
    const double bound = prices.path(problem).bound;
    CHECK(before <= bound + 1e-3);
    before = bound;
  }
  CHECK(free < before);
}

void test_negative_prices_and_rows_that_change_clocks_are_refused() {
  const auto is_refused = [](const Problem& problem, double price) {
    try {
      Prices(4, price, 0).path(problem);
    } catch (const std::invalid_argument&) {
      return true;
    }
    return false;
  };
  CHECK(is_refused(chain(4).problem(), -1));
  CHECK(!is_refused(chain(4).problem(), 1));
  test::Shape moving = chain(4);
  moving.num_moving = 1;
  CHECK(is_refused(moving.problem(), 1));
}

}  // namespace

int main() {
  test_an_empty_stage_costs_nothing();
  test_dear_time_takes_the_fastest_rows();
  test_a_path_costs_its_bound();
  test_a_dear_change_is_not_made();
  test_a_clock_asked_for_at_the_start_is_late();
  test_a_longer_dwell_never_costs_less();
  test_negative_prices_and_rows_that_change_clocks_are_refused();
  return test::summary("stage_paths");
}
