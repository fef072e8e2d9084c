// Options of an operation from those of its parts.
#include <algorithm>
#include <stdexcept>

#include "../parts.hpp"
#include "check.hpp"

using namespace envplan;

namespace {

// Two parts at two clocks: slow at 0, fast at 1. The second does not care much.
struct Shape {
  std::vector<Index> option_begin{0, 1, 2, 3, 4};
  std::vector<Time> time{200, 100, 110, 100};
  std::vector<std::int64_t> energy{100, 180, 60, 150};
  std::vector<std::uint8_t> asks{1, 1};

  PartsProblem problem(Time latency, Time min_dwell, Power waiting, std::int64_t slack) const {
    const auto num_options = static_cast<Index>(time.size());
    return {2,           2,
            num_options, option_begin.data(),
            time.data(), energy.data(),
            asks.data(), latency,
            min_dwell,   waiting,
            slack};
  }
};

void independent_parts_add_up() {
  const Shape shape;
  const auto found = compose(shape.problem(0, 0, 0, 0), 1000);
  CHECK(found.size() == 3);  // both fast; the second slow; both slow
  CHECK(found[0].time == 200 && found[0].energy == 330);
  CHECK(found[1].time == 210 && found[1].energy == 240);
  CHECK((found[1].options == std::vector<Index>{1, 2}));
  CHECK(found[2].time == 310 && found[2].energy == 160);
}

void clocks_are_asked_for_ahead() {
  const Shape shape;
  // While the first part runs, the first clock has to come, and the second one after that.
  CHECK(compose(shape.problem(50, 0, 0, 0), 1000)[1].time == 210);
  CHECK(compose(shape.problem(51, 0, 0, 0), 1000)[1].time == 300);
  CHECK(compose(shape.problem(101, 0, 0, 0), 1000)[1].time == 310);
}

void clocks_are_held() {
  const Shape shape;
  CHECK(compose(shape.problem(0, 100, 0, 0), 1000).size() == 3);
  CHECK(compose(shape.problem(0, 101, 0, 0), 1000).size() == 2);  // the first part lasts 100
}

void waiting_makes_slower_options_worth_having() {
  Shape shape;
  shape.energy[0] = 185;  // more than the fast one, but less than waiting as long on top
  CHECK(compose(shape.problem(0, 0, 0, 0), 1000).size() == 2);
  CHECK(compose(shape.problem(0, 0, 1, 0), 1000).size() == 3);
}

void slack_keeps_the_hull() {
  const Shape shape;
  CHECK(compose(shape.problem(0, 0, 0, 1000), 1000).size() == 3);
  CHECK(compose(shape.problem(50, 0, 0, 1000), 1000).size() >= 2);
}

void a_slack_beyond_all_energies_is_refused() {
  const Shape shape;
  bool refused = false;
  try {
    compose(shape.problem(0, 0, 0, std::int64_t{1} << 62), 1000);
  } catch (const std::overflow_error&) {
    refused = true;
  }
  CHECK(refused);
  CHECK(compose(shape.problem(0, 0, 0, (std::int64_t{1} << 62) - 1), 1000).size() >= 1);
}

void an_option_of_days_leaves_the_short_ones_as_they_are() {
  // Beside the long one, the short ones take the same in floating point, but for its error.
  const std::vector<Index> option_begin{0, 3};
  const std::vector<Time> time{562949835980550, 50, 267};
  const std::vector<std::int64_t> energy{878, 2942, 2343};
  const std::uint8_t asks = 0;
  const auto found = compose(
      {1, 1, 3, option_begin.data(), time.data(), energy.data(), &asks, 56, 78, 15, 318}, 1000);
  CHECK(found.size() == 3);
  const std::vector<Index> fastest_first{1, 2, 0};
  for (std::size_t k = 0; k < found.size(); ++k) {
    const Index option = fastest_first[std::min<std::size_t>(k, 2)];
    CHECK(found[k].options == std::vector<Index>{option});
    CHECK(found[k].time == time[option] && found[k].energy == energy[option]);
  }
}

void too_many_options_are_refused() {
  const Shape shape;
  bool refused = false;
  try {
    compose(shape.problem(0, 0, 0, 0), 2);
  } catch (const std::overflow_error&) {
    refused = true;
  }
  CHECK(refused);
}

void options_that_contradict_each_other_are_refused() {
  Shape rising_and_falling;
  rising_and_falling.option_begin = {0, 1, 1000, 3, 4};
  Shape without_time;
  without_time.time[0] = 0;
  for (const Shape& shape : {rising_and_falling, without_time}) {
    bool refused = false;
    try {
      compose(shape.problem(0, 0, 0, 0), 1000);
    } catch (const std::invalid_argument&) {
      refused = true;
    }
    CHECK(refused);
  }
}

}  // namespace

int main() {
  independent_parts_add_up();
  clocks_are_asked_for_ahead();
  clocks_are_held();
  waiting_makes_slower_options_worth_having();
  slack_keeps_the_hull();
  a_slack_beyond_all_energies_is_refused();
  an_option_of_days_leaves_the_short_ones_as_they_are();
  too_many_options_are_refused();
  options_that_contradict_each_other_are_refused();
  return envplan::test::summary("parts");
}
