// Random bytes as networks, problems and loads: every one is refused with an exception, or solved
// such that what the headers promise holds. A libFuzzer target (Clang), under AddressSanitizer and
// UndefinedBehaviorSanitizer.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <stdexcept>
#include <vector>

#include "../annealing.hpp"
#include "../frontier_trace.hpp"
#include "../parts.hpp"
#include "../rounding.hpp"
#include "../serving/replay.hpp"
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
  const Machine machine{in->any(200), in->raw<std::uint8_t>() < 128};
  const Time min_dwell = in->any(200);
  test::Rows rows(40);
  for (Index& row : rows) row = static_cast<Index>(in->any(5));
  Replay kept = test::replayed(problem, rows, machine, min_dwell);
  std::vector<Time> tail;
  kept.tails(&tail);
  for (std::int64_t left = in->between(0, 8); left > 0; --left) {
    const auto i = static_cast<Index>(in->between(0, 39));
    const auto row = static_cast<Index>(in->between(0, 5));
    const bool done = kept.change({{i, row}}, Budget{1e300, kFar, tail.data(), 0, 0});
    if (!done || in->raw<std::uint8_t>() < 64) kept.undo();
    test::Rows now(40);
    kept.chosen(now.data());
    const Replay anew = test::replayed(problem, now, machine, min_dwell);
    PROMISE(kept.makespan() == anew.makespan() && kept.cost() == anew.cost());
    PROMISE(kept.shortage() == anew.shortage());
  }
}

void anneal(Bytes* in) {
  std::mt19937 random(in->raw<std::uint32_t>());
  const Problem problem = test::random_shape(random).problem();
  test::Rows rows(40);
  for (Index& row : rows) row = static_cast<Index>(in->any(5));
  Limits limits{};
  limits.machine = {in->any(200), in->raw<std::uint8_t>() < 128};
  limits.deadline = in->any(5000);
  limits.min_dwell = in->any(200);
  limits.peak = in->raw<std::uint8_t>() < 128 ? -1 : in->any(10000);
  limits.waits = in->raw<std::uint8_t>() < 128;
  limits.price = in->any(100000);
  const Score before = score(problem, limits, rows.data());
  const double heat = static_cast<double>(in->between(0, 4)) / 2;
  Annealing annealing(problem, limits, rows.data(), in->between(0, 300), heat,
                      in->raw<std::uint64_t>());
  while (annealing.run(1 + static_cast<std::uint64_t>(in->between(0, 1000)))) {
  }
  annealing.best(rows.data());
  const Score after = score(problem, limits, rows.data());
  PROMISE(!(before < after));
  PROMISE(after.excess == annealing.best_score().excess);
  PROMISE(after.energy == annealing.best_score().energy);
}

// Options of one table from bytes; `sound` ones ascend in time and descend in cost.
void add_table(Bytes* in, bool sound, std::vector<Time>* time, std::vector<std::int64_t>* cost) {
  Time t = in->between(1, 50);
  std::int64_t c = in->between(0, 5000);
  for (std::int64_t left = in->between(1, 5); left > 0; --left) {
    time->push_back(sound ? t : in->any(100));
    cost->push_back(sound ? c : in->any(100));
    t += in->between(1, 20);
    c -= in->between(1, 100);
  }
}

void round(Bytes* in, bool sound) {
  const auto count = static_cast<Index>(in->between(1, 30));
  std::vector<Index> pred_begin{0}, pred, table, option_begin{0}, choice(count);
  std::vector<Time> lag, time, finish;
  std::vector<std::int64_t> cost;
  const auto tables = static_cast<Index>(in->between(1, 4));
  for (Index t = 0; t < tables; ++t) {
    add_table(in, sound, &time, &cost);
    option_begin.push_back(static_cast<Index>(time.size()));
  }
  Time deadline = 0;
  for (Index i = 0; i < count; ++i) {
    table.push_back(static_cast<Index>(sound ? in->between(0, tables - 1) : in->any(tables - 1)));
    Time start = 0;
    for (std::int64_t left = i > 0 ? in->between(0, 3) : 0; left > 0; --left) {
      pred.push_back(static_cast<Index>(sound ? in->between(0, i - 1) : in->any(count)));
      lag.push_back(sound ? in->between(0, 5) : in->any(5));
      if (sound) start = std::max(start, finish[pred.back()] + lag.back());
    }
    pred_begin.push_back(static_cast<Index>(pred.size()));
    // The fastest option fits before every relaxed finish.
    const Time fastest = sound ? time[option_begin[table.back()]] : 1;
    finish.push_back(start + fastest + in->between(0, 60));
    deadline = std::max(deadline, finish.back());
  }
  const RoundingProblem problem{count,
                                static_cast<Index>(pred.size()),
                                tables,
                                static_cast<Index>(time.size()),
                                pred_begin.data(),
                                pred.data(),
                                lag.data(),
                                table.data(),
                                option_begin.data(),
                                time.data(),
                                cost.data(),
                                finish.data(),
                                deadline};
  const auto keeps_deadline = [&] {
    std::vector<Time> end(count);
    for (Index i = 0; i < count; ++i) {
      Time start = 0;
      for (Index e = pred_begin[i]; e < pred_begin[i + 1]; ++e) {
        start = std::max(start, end[pred[e]] + lag[e]);
      }
      end[i] = start + time[option_begin[table[i]] + choice[i]];
    }
    return *std::max_element(end.begin(), end.end()) <= deadline;
  };
  round_to_options(problem, choice.data());
  PROMISE(!sound || keeps_deadline());
  const std::int64_t moves = in->between(1, 300);
  improve_options(problem, moves, 1, in->raw<std::uint64_t>(), choice.data());
  PROMISE(!sound || keeps_deadline());
}

void parts(Bytes* in, bool sound) {
  const auto num_parts = static_cast<Index>(in->between(1, 4));
  const auto num_clocks = static_cast<Index>(in->between(1, 3));
  std::vector<Index> begin{0};
  std::vector<Time> time;
  std::vector<std::int64_t> energy;
  for (Index k = 0; k < num_parts * num_clocks; ++k) {
    for (std::int64_t left = in->between(sound ? 1 : 0, 3); left > 0; --left) {
      time.push_back(sound ? in->between(1, 300) : in->any(300));
      energy.push_back(sound ? in->between(0, 3000) : in->any(3000));
    }
    begin.push_back(static_cast<Index>(sound ? time.size() : in->any(time.size())));
  }
  std::vector<std::uint8_t> asks(num_parts);
  for (std::uint8_t& a : asks) a = in->raw<std::uint8_t>() < 200;
  const PartsProblem problem{num_parts,    num_clocks,   static_cast<Index>(time.size()),
                             begin.data(), time.data(),  energy.data(),
                             asks.data(),  in->any(100), in->any(100),
                             in->any(20),  in->any(1000)};
  const std::vector<Composed> found = compose(problem, 20000);
  for (std::size_t k = 0; k < found.size(); ++k) {
    Time sum = 0;
    std::int64_t total = 0;
    PROMISE(found[k].options.size() == static_cast<std::size_t>(num_parts));
    for (const Index o : found[k].options) {
      sum += time[o];
      total += energy[o];
    }
    PROMISE(found[k].time == sum && found[k].energy == total);
    if (k == 0) continue;
    const std::int64_t saved = problem.waiting * (found[k].time - found[k - 1].time) -
                               (found[k].energy - found[k - 1].energy);
    PROMISE(found[k].time > found[k - 1].time && saved > 0);
  }
}

void serve(Bytes* in) {
  namespace s = serving;
  const auto count = in->between(1, 20);
  std::vector<double> arrival;
  std::vector<std::int32_t> input, output;
  std::vector<std::uint8_t> known, taken;
  double now = 0;
  for (std::int64_t k = 0; k < count; ++k) {
    arrival.push_back(now += static_cast<double>(in->between(0, 300)) / 100);
    input.push_back(static_cast<std::int32_t>(in->between(0, 4000)));
    output.push_back(static_cast<std::int32_t>(in->between(0, 50)));
    known.push_back(static_cast<std::uint8_t>(in->between(0, 8)));
    taken.push_back(static_cast<std::uint8_t>(in->between(0, 8)));
  }
  std::vector<s::Tables> tables;
  for (const double slower : {2.0, 1.0}) {
    s::Tables table{100, {}, {}, 500, {}, {}, 1e-7, 300};
    for (int k = 0; k < 6; ++k) {
      table.step_s.push_back(slower * (0.02 + 0.005 * k));
      table.step_w.push_back(300 + 10 * k);
      table.prompt_s.push_back(slower * 0.05 * k);
      table.prompt_w.push_back(600);
    }
    tables.push_back(table);
  }
  const auto chunk = static_cast<std::int32_t>(in->any(2000));
  const auto configuration = static_cast<std::int32_t>(in->any(1));
  const s::Size size{static_cast<double>(in->between(0, 9000)), chunk, {configuration, 1}};
  std::vector<s::Slo> slos;
  for (std::size_t k = 0; k < 9; ++k) {
    slos.push_back({static_cast<double>(in->between(1, 40)) / 10, 0.1});
  }
  const s::Service service(
      {count, arrival.data(), input.data(), output.data(), known.data(), taken.data()}, tables,
      {size}, slos, std::vector<double>(9, 20), in->raw<std::uint8_t>() < 128 ? 3000.0 : 1e300);
  const s::Need need = service.required_instances(0, 60, 0x1ff, 0, 0.01);
  PROMISE(need.instances >= 0 && need.busy >= 0);
  const auto scheduler = in->raw<std::uint8_t>() < 128 ? s::Policy::kEdf : s::Policy::kFcfs;
  s::Replay replay(service, {0.01, 1, 0.1, 0.5, 5, 10, 100, scheduler, {0.01, 100}});
  for (std::int64_t left = in->between(0, 30); left > 0; --left) {
    const auto a = static_cast<std::int32_t>(in->any(4)), b = static_cast<std::int32_t>(in->any(2));
    const bool flag = in->raw<std::uint8_t>() < 128;
    try {
      switch (in->between(0, 6)) {
        case 0:
          replay.start(a, b, static_cast<std::int32_t>(in->any(1)), flag, replay.now() + b);
          break;
        case 1:
          replay.retire(a);
          break;
        case 2:
          replay.move(a, b, static_cast<std::int32_t>(in->any(1)), flag);
          break;
        case 3:
          replay.route(a, b, {static_cast<std::int32_t>(in->any(3))});
          break;
        case 4:
          replay.set_pack(a, flag);
          break;
        case 5:
          replay.hand_over(a, b);
          break;
        default:
          replay.advance(replay.now() + static_cast<double>(in->between(0, 1000)) / 50);
      }
    } catch (const std::out_of_range&) {
    }
  }
  replay.advance(100);
  replay.finish();
  std::int64_t finished = 0;
  for (const s::Counts& counts : replay.tally().counts()) finished += counts.requests;
  PROMISE(finished + replay.too_long() == count);
  for (const double joules : replay.series().energy()) PROMISE(joules >= 0);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Bytes in(data, size);
  try {
    switch (in.raw<std::uint8_t>() % 9) {
      case 0:
        walk(&in, true);
        break;
      case 1:
        walk(&in, false);
        break;
      case 2:
        anneal(&in);
        break;
      case 3:
        round(&in, true);
        break;
      case 4:
        round(&in, false);
        break;
      case 5:
        parts(&in, true);
        break;
      case 6:
        parts(&in, false);
        break;
      case 7:
        serve(&in);
        break;
      default:
        replay(&in);
    }
  } catch (const std::invalid_argument&) {
  } catch (const std::overflow_error&) {
  }
  return 0;
}
