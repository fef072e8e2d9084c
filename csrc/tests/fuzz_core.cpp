// Random bytes as networks and problems: every one is refused with an exception, or solved
// such that what the headers promise holds. A libFuzzer target (Clang), under AddressSanitizer and
// UndefinedBehaviorSanitizer.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <stdexcept>
#include <vector>

#include "../frontier_trace.hpp"
#include "problems.hpp"

namespace {

using namespace envplan;

#define PROMISE(condition)                                                  \
  do {                                                                      \
    if (!(condition)) {                                                     \
      std::fprintf(stderr, "broken: %s (line %d)\n", #condition, __LINE__); \
      std::abort();                                                         \
    }                                                                       \
  } while (false)

// Numbers from bytes; zeros when they have run out.
class Bytes {
 public:
  Bytes(const std::uint8_t* data, std::size_t size) : at_(data), end_(data + size) {}

  template <class T>
  T raw() {
    T value{};
    const std::size_t left = std::min<std::size_t>(sizeof value, end_ - at_);
    if (left > 0) std::memcpy(&value, at_, left);
    at_ += left;
    return value;
  }
  // From low to high, both included.
  std::int64_t between(std::int64_t low, std::int64_t high) {
    const auto range = static_cast<std::uint64_t>(high) - static_cast<std::uint64_t>(low) + 1;
    return low + static_cast<std::int64_t>(range == 0 ? raw<std::uint64_t>()
                                                      : raw<std::uint64_t>() % range);
  }
  // Mostly small; now and then anything.
  std::int64_t any(std::int64_t most) {
    return raw<std::uint8_t>() < 8 ? raw<std::int64_t>() : between(0, most);
  }

 private:
  const std::uint8_t *at_, *end_;
};

struct Drawn {
  std::vector<Index> tail, head, curve, curve_begin{0};
  std::vector<Time> duration;
  std::vector<Power> slope;
  Network net;
};

// A network; `sound` ones are such that the kernel takes them, unless numbers are too large.
Drawn network(Bytes* in, bool sound) {
  Drawn d;
  const auto nodes = static_cast<Index>(in->between(2, 12));
  const auto curves = static_cast<Index>(in->between(1, 4));
  for (Index c = 0; c < curves; ++c) {
    const std::int64_t levels = in->between(1, 4);
    Time length = in->between(0, 100) << in->between(0, 20);
    Power power = 0;
    std::vector<Time> falling;
    for (std::int64_t k = 0; k < levels; ++k) {
      falling.push_back(sound ? length : in->any(1000));
      length -= in->between(1, 50);
      power += in->between(1, 1000);
      d.slope.push_back(k + 1 == levels ? kInfinite : sound ? power : in->any(1000));
    }
    // Durations descend and none is below 0.
    const Time low = sound ? std::min<Time>(0, falling.back()) : 0;
    for (Time t : falling) d.duration.push_back(t - low);
    d.curve_begin.push_back(static_cast<Index>(d.duration.size()));
  }
  const auto arcs = static_cast<Index>(in->between(1, 30));
  for (Index a = 0; a < arcs + nodes - 1; ++a) {
    // Every node is on a way from the first to the last one.
    Index from = a < nodes - 1 ? a : static_cast<Index>(in->between(0, nodes - 2));
    Index to = a < nodes - 1 ? a + 1 : static_cast<Index>(in->between(from + 1, nodes - 1));
    if (!sound) {
      from = static_cast<Index>(in->any(nodes - 1));
      to = static_cast<Index>(in->any(nodes - 1));
    }
    d.tail.push_back(from);
    d.head.push_back(to);
    d.curve.push_back(static_cast<Index>(sound ? in->between(0, curves - 1) : in->any(curves - 1)));
  }
  d.net = {nodes,
           static_cast<Index>(d.tail.size()),
           d.tail.data(),
           d.head.data(),
           d.curve.data(),
           curves,
           d.curve_begin.data(),
           static_cast<Index>(d.duration.size()),
           d.duration.data(),
           d.slope.data(),
           0,
           nodes - 1};
  return d;
}

void walk(Bytes* in, bool sound) {
  const Drawn d = network(in, sound);
  ParametricFlow begin(d.net);
  FrontierTrace trace(begin, -1);
  while (trace.extend(1 + static_cast<std::uint64_t>(in->between(0, 100)))) {
  }
  const auto& times = trace.times();
  PROMISE(times.front() <= begin.max_time() && times.back() == begin.min_time());
  std::vector<Time> at(d.net.num_nodes);
  for (std::size_t k = 1; k < times.size(); ++k) {
    PROMISE(times[k] < times[k - 1]);
    PROMISE(trace.flows()[k] >= trace.flows()[k - 1]);
    // Cost is the slope times the step: exact.
    const Energy rise = static_cast<Energy>(trace.flows()[k - 1]) * (times[k - 1] - times[k]);
    PROMISE(trace.costs()[k] - trace.costs()[k - 1] == rise);
    const Time middle = times[k] + (times[k - 1] - times[k]) / 2;
    const ParametricFlow& state = trace.optimum_at(middle);
    PROMISE(state.time() == middle);
    state.event_times(at.data());
    for (Index a = 0; a < d.net.num_arcs; ++a) {
      const Index last = d.curve_begin[d.curve[a] + 1] - 1;
      PROMISE(at[d.head[a]] - at[d.tail[a]] >= d.duration[last]);
    }
  }
}

void replay(Bytes* in) {
  std::mt19937 random(in->raw<std::uint32_t>());
  test::Shape shape = test::random_shape(random);
  if (in->raw<std::uint8_t>() < 32) shape.time[in->between(0, 5)] = in->raw<std::int64_t>();
  if (in->raw<std::uint8_t>() < 32) shape.power[in->between(0, 5)] = in->any(1 << 20);
  // The products that the shape makes of them must not be what overflows.
  for (std::size_t k = 0; k < shape.time.size(); ++k) {
    std::int64_t product;
    if (__builtin_mul_overflow(shape.power[k], shape.time[k], &product)) return;
  }
  const Problem problem = shape.problem();
  const Time latency = in->any(200), min_dwell = in->any(200);
  test::Rows rows(40);
  for (Index& row : rows) row = static_cast<Index>(in->any(5));
  Replay kept = test::replayed(problem, rows, latency, min_dwell);
  std::vector<Time> tail;
  kept.tails(&tail);
  for (std::int64_t left = in->between(0, 8); left > 0; --left) {
    const auto i = static_cast<Index>(in->between(0, 39));
    const auto row = static_cast<Index>(in->between(0, 5));
    const bool done = kept.change({{i, row}}, Budget{1e300, kFar, tail.data(), 0, 0});
    if (!done || in->raw<std::uint8_t>() < 64) kept.undo();
    test::Rows now(40);
    kept.chosen(now.data());
    const Replay anew = test::replayed(problem, now, latency, min_dwell);
    PROMISE(kept.makespan() == anew.makespan() && kept.cost() == anew.cost());
    PROMISE(kept.shortage() == anew.shortage());
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Bytes in(data, size);
  try {
    switch (in.raw<std::uint8_t>() % 3) {
      case 0:
        walk(&in, true);
        break;
      case 1:
        walk(&in, false);
        break;
      default:
        replay(&in);
    }
  } catch (const std::invalid_argument&) {
  } catch (const std::overflow_error&) {
  }
  return 0;
}
