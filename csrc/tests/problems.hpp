// Small problems for the tests of replay.hpp and annealing.hpp.
#pragma once

#include <algorithm>
#include <random>
#include <vector>

#include "../replay.hpp"

namespace envplan::test {

using Rows = std::vector<Index>;

// One table of rows for all operations: row k has clock rows - 1 - k, the fastest first. Operations
// are numbered by stage; each waits for the one before on its stage and for `waits_for`. The first
// `num_moving` rows change clocks within themselves: they leave the lowest, and other rows stand
// for them at every clock. Their last slice is a third of their time.
struct Shape {
  std::vector<Index> stage_begin;
  std::vector<std::pair<Index, Index>> waits_for;  // (earlier, later), on other stages
  std::vector<Time> time;
  std::vector<Power> power;
  std::vector<Power> waiting;
  std::vector<Index> order;
  Index num_moving = 0;

  Problem problem() const {
    const Index n = stage_begin.back(), rows = static_cast<Index>(time.size());
    std::vector<std::vector<Index>> after(n);
    for (std::size_t s = 0; s + 1 < stage_begin.size(); ++s) {
      for (Index i = stage_begin[s]; i + 1 < stage_begin[s + 1]; ++i) after[i].push_back(i + 1);
    }
    for (const auto& [a, b] : waits_for) after[a].push_back(b);
    Rows begin{0}, succ, table(n, 0), table_begin{0, rows}, clock, leaves, nearest, slice_begin{0};
    std::vector<Time> slice_time;
    std::vector<Power> slice_power;
    for (const auto& others : after) {
      succ.insert(succ.end(), others.begin(), others.end());
      begin.push_back(static_cast<Index>(succ.size()));
    }
    std::vector<std::int64_t> lag(succ.size(), 0), energy;
    for (Index k = 0; k < rows; ++k) {
      energy.push_back(power[k] * time[k]);
      clock.push_back(rows - 1 - k);
      const bool is_moving = k < num_moving;
      leaves.push_back(is_moving ? 0 : clock.back());
      for (Index c = 0; c < rows; ++c) nearest.push_back(std::max(rows - 1 - c, num_moving));
      if (is_moving) {
        slice_time.push_back(time[k] - time[k] / 3);
        slice_power.push_back(power[k]);
      }
      slice_time.push_back(is_moving ? time[k] / 3 : time[k]);
      slice_power.push_back(power[k]);
      slice_begin.push_back(static_cast<Index>(slice_time.size()));
    }
    return Problem({n,
                    static_cast<Index>(waiting.size()),
                    1,
                    rows,
                    rows,
                    static_cast<Index>(succ.size()),
                    static_cast<Index>(slice_time.size()),
                    order.data(),
                    stage_begin.data(),
                    begin.data(),
                    succ.data(),
                    lag.data(),
                    table.data(),
                    table_begin.data(),
                    time.data(),
                    energy.data(),
                    clock.data(),
                    leaves.data(),
                    nearest.data(),
                    waiting.data(),
                    slice_begin.data(),
                    slice_time.data(),
                    slice_power.data()});
  }
};

// Half the time at thrice the power: 100 ns fast, 200 ns slow. One stage.
inline Shape chain(Index count) {
  Shape shape{{0, count}, {}, {100, 200}, {300, 100}, {10}, {}};
  for (Index i = 0; i < count; ++i) shape.order.push_back(i);
  return shape;
}

// Forty operations on two stages, six rows, and random waits from one stage to the other.
inline Shape random_shape(std::mt19937& random) {
  Shape shape{{0, 20, 40}, {}, {}, {}, {20, 20}, {}};
  Power power = 4000;
  Time time = 40 + static_cast<Time>(random() % 20);
  for (int k = 0; k < 6; ++k) {
    shape.time.push_back(time);
    shape.power.push_back(power);
    time += 1 + static_cast<Time>(random() % 12);
    power = power * 4 / 5;
  }
  Index next[2] = {0, 20};
  while (next[0] < 20 || next[1] < 40) {
    const int s = next[1] == 40 || (next[0] < 20 && random() % 2) ? 0 : 1;
    const Index other = next[1 - s] - 1;
    if (other >= 20 * (1 - s) && random() % 2) shape.waits_for.emplace_back(other, next[s]);
    shape.order.push_back(next[s]++);
  }
  return shape;
}

inline Replay replayed(const Problem& problem, const Rows& rows, Machine machine,
                       Time min_dwell = 0) {
  Replay replay(problem, machine, min_dwell);
  replay.choose(rows.data());
  replay.run();
  return replay;
}

}  // namespace envplan::test
