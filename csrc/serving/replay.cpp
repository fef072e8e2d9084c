#include "replay.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <utility>

#include "../types.hpp"

namespace envplan::serving {
namespace {

constexpr double kRounding = 1e-9;        // s
constexpr int kMaxSlotsToFinish = 10000;  // no queue can be served for ever

}  // namespace

Replay::Replay(const Service& service, Options options)
    : service_(service),
      requests_(service.requests),
      options_(options),
      scheduler_(make_scheduler(options.scheduler)),
      router_(service, *scheduler_, options.pack_share),
      clocks_(service, *scheduler_,
              {options.clock_delay_s, options.clock_hold_s, options.clock_margin}),
      series_(options.slot_s, options.end_s),
      tally_(service.slos.size()),
      lengths_(service),
      transfers_(options.transfers) {}

const Tables& Replay::tables(const Instance& i) const {
  return service_.tables[service_.sizes[i.size].tables[i.clock]];
}

double Replay::deadline(int32_t request) const {
  return requests_.arrival[request] + service_.slos[requests_.taken[request]].ttft_s;
}

Instance& Replay::instance(int32_t id) {
  if (id < 0 || static_cast<std::size_t>(id) >= instances_.size()) {
    throw std::out_of_range("there is no such instance");
  }
  return instances_[id];
}

void Replay::check_clock(int32_t size, int32_t clock) const {
  if (size < 0 || static_cast<std::size_t>(size) >= service_.sizes.size()) {
    throw std::out_of_range("there is no such size");
  }
  if (clock < 0 || static_cast<std::size_t>(clock) >= service_.sizes[size].tables.size()) {
    throw std::out_of_range("the size has no such clock");
  }
}

int32_t Replay::start(int32_t pool, int32_t size, int32_t clock, bool managed, double ready_at) {
  make_pool(pool);
  check_clock(size, clock);
  require(!std::isnan(ready_at), "a time is no number");
  Instance i;
  i.pool = pool;
  i.size = size;
  i.managed = managed;
  i.clock = i.preferred = i.asked_clock = clock;
  i.phase = Phase::kStarting;
  i.since = now_;
  i.watts = tables(i).idle_w;
  i.sends.bytes_s = i.receives.bytes_s = service_.sizes[size].link_bytes_s;
  i.queued.assign(service_.num_levels, 0.0);
  i.prompts = scheduler_->make_queue();
  i.decoding_of_class.assign(service_.slos.size(), 0);
  const auto id = static_cast<int32_t>(instances_.size());
  instances_.push_back(std::move(i));
  schedule(instances_[id], ready_at);
  if (ready_at <= now_) handle_event(instances_[id]);
  return id;
}

void Replay::make_pool(int32_t pool) {
  Router::check_pool(pool);
  router_.ensure_pool(pool);
  const auto pools = static_cast<std::size_t>(pool) + 1;
  if (pool_energy_.size() < pools) pool_energy_.resize(pools, 0.0);
}

void Replay::retire(int32_t id) {
  Instance& i = instance(id);
  if (i.phase == Phase::kGone || i.leaving) return;
  i.leaving = true;
  router_.remove(id, i.pool);
  if (i.phase == Phase::kStarting || (i.phase == Phase::kIdle && i.is_empty())) {
    pass_time(i);
    i.phase = Phase::kGone;
    i.watts = 0;
    ++i.version;
  }
}

void Replay::move(int32_t id, int32_t pool, int32_t clock, bool managed) {
  Instance& i = instance(id);
  make_pool(pool);
  check_clock(i.size, clock);
  const bool serves = router_.remove(id, i.pool);
  i.pool = pool;
  i.managed = managed;
  i.preferred = clock;
  if (!managed) i.asked_clock = clock;
  if (serves) router_.add(id, pool);
}

void Replay::route(int32_t klass, int32_t pool, std::vector<int32_t> helpers) {
  router_.route(klass, pool, std::move(helpers));
}

void Replay::set_pack(int32_t pool, bool pack) { router_.set_pack(pool, pack); }

void Replay::hand_over(int32_t pool, int32_t decode_pool) { router_.hand_over(pool, decode_pool); }

void Replay::pass_time(Instance& i) {
  double watts = i.watts;
  if (i.phase == Phase::kStepping && now_ > i.since) {
    const double seconds = now_ - i.since;
    const double steps = i.batch.steps_in(seconds);
    i.batch.advance(steps);
    if (i.batch.context_w() > 0) {
      const double computing_s = std::min(seconds, steps * i.batch.step_s());
      const double joules = computing_s * watts + (seconds - computing_s) * i.batch.context_w();
      watts = joules / seconds;
    }
  }
  if (watts > 0) {
    series_.add_energy(watts, i.since, now_);
    const double until = std::min(now_, options_.end_s);
    if (i.since < until)
      pool_energy_[static_cast<std::size_t>(i.pool)] += watts * (until - i.since);
  }
  i.since = now_;
}

void Replay::schedule(Instance& i, double at) {
  i.next = at;
  ++i.version;
  if (at >= kNever) return;
  const auto later = [](const Event& a, const Event& b) { return a.at > b.at; };
  events_.push_back({at, number(i), i.version});
  std::push_heap(events_.begin(), events_.end(), later);
}

void Replay::advance(double until) {
  require(!std::isnan(until), "a time is no number");
  const auto later = [](const Event& a, const Event& b) { return a.at > b.at; };
  for (;;) {
    const double arrival = following_ < requests_.count ? requests_.arrival[following_] : kNever;
    const double event = events_.empty() ? kNever : events_.front().at;
    const double transfer = transfers_.next();
    if (std::min({arrival, event, transfer}) >= until) break;
    if (transfer <= std::min(arrival, event)) {
      now_ = std::max(now_, transfer);
      end_transfer();
    } else if (event <= arrival) {
      const Event due = events_.front();
      std::pop_heap(events_.begin(), events_.end(), later);
      events_.pop_back();
      Instance& i = instances_[due.instance];
      if (due.version != i.version) continue;
      now_ = std::max(now_, due.at);
      handle_event(i);
    } else {
      now_ = std::max(now_, arrival);
      arrive(static_cast<int32_t>(following_++));
    }
  }
  now_ = std::max(now_, until);
  for (Instance& i : instances_) {
    if (i.phase != Phase::kGone) pass_time(i);
  }
}

void Replay::finish() {
  double until = now_;
  for (int k = 0; k < kMaxSlotsToFinish; ++k) {
    if (events_.empty() && transfers_.next() >= kNever) break;
    advance(until += options_.slot_s);
  }
  const auto count_decoding = [this](int32_t request, double first_token) {
    count_finished(request, first_token - requests_.arrival[request], kNever);
  };
  const auto count_prompt = [&](const Prompt& prompt) {
    if (prompt.generated > 0) return count_decoding(prompt.request, prompt.first_token);
    count_finished(prompt.request, kNever, kNever);
  };
  for (const Instance& i : instances_) {
    for (const Decoding& d : i.batch.requests()) count_decoding(d.request, d.first_token);
    for (const Piece& piece : i.pieces) count_prompt(piece.prompt);
    for (const Prompt& prompt : i.prompts->all()) count_prompt(prompt);
    for (const Handover& handover : i.handovers) count_prompt(handover.prompt);
    for (const Handover& handover : i.arrived) count_prompt(handover.prompt);
  }
  for (const Transfer& transfer : transfers_.running()) count_prompt(transfer.handover.prompt);
  for (const Unplaced& unplaced : unplaced_) count_prompt(unplaced.prompt);
  for (const int32_t request : stranded_) count_finished(request, kNever, kNever);
}

void Replay::handle_event(Instance& i) {
  pass_time(i);
  if (i.phase == Phase::kStarting) {
    i.phase = Phase::kIdle;
    if (!i.leaving) {
      router_.add(number(i), i.pool);
      std::vector<int32_t> waiting;
      waiting.swap(stranded_);
      start_next(i);
      for (const int32_t request : waiting) arrive(request);
      std::vector<Unplaced> unplaced;
      unplaced.swap(unplaced_);
      for (const Unplaced& one : unplaced) {
        --instances_[one.from].going;
        hand_over(instances_[one.from], one.prompt, one.pool);
      }
      return;
    }
  } else if (i.phase == Phase::kPrompts) {
    end_prompts(i);
  } else if (i.phase == Phase::kStepping) {
    i.batch.round_progress();
    end_decoding(i);
  }
  start_next(i);
}

void Replay::arrive(int32_t request) {
  if (service_.is_too_long(request)) {
    ++too_long_;
    return;
  }
  const Router::Arrival arrival{request, static_cast<double>(requests_.input[request]),
                                lengths_.output(request)};
  const Router::Choice choice = router_.choose(arrival, instances_, now_);
  if (choice.instance < 0 && choice.is_too_small) {
    drop_unservable(request, kNever);
    return;
  }
  if (choice.instance < 0) {
    stranded_.push_back(request);
    return;
  }
  helped_ += choice.helps;
  Instance& i = instances_[choice.instance];
  Prompt prompt{deadline(request), request, 0};
  prompt.reserve = router_.reserve(i.pool, arrival);
  add_prompt(i, prompt);
  wake(i);
}

void Replay::wake(Instance& i) {
  if (i.phase == Phase::kIdle) {
    pass_time(i);
    start_next(i);
  } else if (i.phase == Phase::kStepping) {
    // What came is looked at when the present step ends.
    const double at = now_ + i.batch.rest_of_step(now_ - i.since);
    if (at < i.next - kRounding) schedule(i, std::max(now_, at));
  }
}

void Replay::count_finished(int32_t request, double first_token_s, double token_interval_s) {
  const uint8_t klass = requests_.known[request];
  const bool attained = tally_.add(klass, service_.slos[klass], first_token_s, token_interval_s);
  if (attained) series_.add_attained(requests_.arrival[request]);
}

}  // namespace envplan::serving
