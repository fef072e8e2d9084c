#include "serving.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <stdexcept>

#include "types.hpp"

namespace envplan::serving {
namespace {

constexpr double kNever = 1e300;
constexpr int32_t kMaxPools = 1 << 16;
constexpr double kMaxSlots = 1 << 27;
constexpr double kTiny = 1e-9;
constexpr double kFull = 1e9;         // s: a wait that tells that there is no place
constexpr double kTbtShare = 0.8;     // of the SLO that a batch without prompts may take
constexpr int32_t kLeast = 128;       // prompt tokens of an iteration, at least
constexpr double kBlocked = 0.25;     // of the TTFT SLO that a slow iteration may take
constexpr double kBin = 0.1;          // s
constexpr double kFine = 1.005;       // precision of a need
constexpr double kSteadyBin = 600.0;  // s over which iterations may stay full
constexpr double kAsQuick = 1.1;      // times the time of a prompt's token: makes no difference
constexpr double kLong = 0.99;  // quantile of the prompts whose own time a deadline must leave
constexpr double kLeastSlack = 0.02;  // s
constexpr double kLeastFree = 0.1;    // of an instance is left by stricter requests
constexpr double kMemoryBin = 5.0;    // s over which contexts are averaged
constexpr double kMemoryShare = 0.6;  // of memory that can be filled: contexts come in large pieces
constexpr double kShortestBin = 1e-4;  // s: the end of the first bin of TimeCounts
constexpr double kBinGrowth = 1.01;    // from the end of each to that of the next
constexpr int kLooked = 8;             // prompts whose deadlines a managed clock is held against

struct LaterDeadline {
  bool operator()(const Waiting& a, const Waiting& b) const { return a.deadline > b.deadline; }
};
struct LaterLeave {
  bool operator()(const Decoding& a, const Decoding& b) const { return a.leaves > b.leaves; }
};

double between(const std::vector<double>& values, double at) {
  const std::size_t last = values.size() - 1;
  const std::size_t k = std::min(static_cast<std::size_t>(at), last - 1);
  return values[k] + (at - static_cast<double>(k)) * (values[k + 1] - values[k]);
}

}  // namespace

double Tables::prompt_time(double tokens) const { return between(prompt_s, tokens / grid); }

double Tables::prompt_power(double tokens) const {
  return between(prompt_w, std::min(tokens / grid, static_cast<double>(prompt_w.size() - 1)));
}

Service::Service(Requests requests, std::vector<Tables> tables, std::vector<Size> sizes,
                 std::vector<Slo> slos)
    : requests(requests),
      tables(std::move(tables)),
      sizes(std::move(sizes)),
      slos(std::move(slos)) {
  check();
  double tbt = this->slos.front().tbt_s;
  for (const Slo& slo : this->slos) tbt = std::min(tbt, slo.tbt_s);
  for (Size& size : this->sizes) {
    const Tables& table = this->tables[size.tables.back()];
    size.shared_chunk = max_chunk_tokens(size, table, kTbtShare * tbt);
    const double quick = kAsQuick * table.prompt_time(size.shared_chunk) / size.shared_chunk;
    for (const double step_s : table.step_s) {
      const int32_t tokens =
          max_chunk_tokens(size, table, kTbtShare * tbt - (step_s - table.step_s[1]));
      const bool slower = table.prompt_time(tokens) / tokens > quick;
      size.chunk_beside.push_back(slower ? tokens : size.shared_chunk);
    }
    for (const Slo& slo : this->slos)
      size.most_batch.push_back(batch_beside(table, kLeast, slo.tbt_s));
  }
}

void Service::check() const {
  require(requests.count > 0, "requests must be there");
  for (int64_t k = 0; k < requests.count; ++k) {
    require(std::isfinite(requests.arrival[k]), "an arrival is no number");
    require(k == 0 || requests.arrival[k - 1] <= requests.arrival[k], "arrivals must ascend");
    require(requests.input[k] >= 0 && requests.output[k] >= 0, "tokens must not be negative");
    require(requests.known[k] < kClasses && requests.taken[k] < kClasses, "there are nine classes");
  }
  require(slos.size() == kClasses, "there are nine classes");
  for (const Tables& table : tables) {
    require(table.step_s.size() >= 2 && table.step_s.size() == table.step_w.size(),
            "steps need two times and powers at least");
    require(table.prompt_s.size() >= 2 && table.prompt_s.size() == table.prompt_w.size(),
            "prompts need two times and powers at least");
    require(table.grid > 0, "the grid of prompts must be positive");
    for (const double step : table.step_s) require(step > 0, "a step must take time");
  }
  for (const Size& size : sizes) {
    require(size.chunk >= 1 && !size.tables.empty(), "a size needs a chunk and a configuration");
    for (const int32_t k : size.tables) {
      require(k >= 0 && static_cast<std::size_t>(k) < tables.size(),
              "a size names no configuration");
    }
  }
}

std::size_t Service::batch_beside(const Tables& table, int32_t tokens, double tbt) const {
  double most = kTbtShare * tbt;
  // Where an iteration with prompts is too long whatever the batch is, only the steps count.
  if (table.prompt_time(tokens) < most) most += table.step_s[1] - table.prompt_time(tokens);
  std::size_t batch = table.step_s.size() - 1;
  while (batch > 1 && table.step_s[batch] > most) --batch;
  return batch;
}

double Service::own_time(const Size& size, const Tables& table, double tokens) const {
  return std::max(table.prompt_time(tokens), tokens / size.chunk * table.prompt_time(size.chunk));
}

int32_t Service::max_chunk_tokens(const Size& size, const Tables& table, double most) const {
  int32_t tokens = size.chunk;
  while (tokens > kLeast && table.prompt_time(tokens) > most) tokens -= kLeast;
  return tokens;
}

Replay::Replay(const Service& service, Options options)
    : service_(service),
      requests_(service.requests),
      tables_(service.tables),
      sizes_(service.sizes),
      slos_(service.slos),
      options_(options),
      home_(slos_.size(), -1),
      helpers_(slos_.size()) {
  require(
      options_.slot_s > 0 && options_.end_s >= 0 && options_.end_s / options_.slot_s < kMaxSlots,
      "slots must be positive, and not too many");
  std::vector<double> strict;
  for (const Slo& slo : slos_) strict.push_back(slo.ttft_s);
  std::sort(strict.begin(), strict.end());
  strict.erase(std::unique(strict.begin(), strict.end()), strict.end());
  levels_[0] = strict.front();
  levels_[1] = strict[strict.size() / 2];
  const auto slots = static_cast<std::size_t>(std::ceil(options_.end_s / options_.slot_s)) + 1;
  slot_energy_.assign(slots, 0.0);
  slot_attained_.assign(slots, 0);
}

const Tables& Replay::tables(const Instance& i) const {
  return tables_[sizes_[i.size].tables[i.clock]];
}

const Tables& Replay::fastest(const Instance& i) const {
  return tables_[sizes_[i.size].tables.back()];
}

int Replay::level(int32_t request) const {
  const double ttft = slos_[requests_.known[request]].ttft_s;
  return ttft <= levels_[0] ? 0 : ttft <= levels_[1] ? 1 : 2;
}

int32_t Replay::chunk_beside(const Instance& i, std::size_t times) const {
  const std::vector<int32_t>& chunks = sizes_[i.size].chunk_beside;
  return chunks[std::min(times * i.decoding.size(), chunks.size() - 1)];
}

double Replay::context(int32_t request) const {
  return static_cast<double>(requests_.input[request]) + requests_.output[request];
}

Instance& Replay::instance(int32_t id) {
  if (id < 0 || static_cast<std::size_t>(id) >= instances_.size()) {
    throw std::out_of_range("there is no such instance");
  }
  return instances_[id];
}

void Replay::check_pool(int32_t pool) const {
  if (pool < 0 || pool >= kMaxPools) throw std::out_of_range("there is no such pool");
}

void Replay::check_clock(int32_t size, int32_t clock) const {
  if (size < 0 || static_cast<std::size_t>(size) >= sizes_.size()) {
    throw std::out_of_range("there is no such size");
  }
  if (clock < 0 || static_cast<std::size_t>(clock) >= sizes_[size].tables.size()) {
    throw std::out_of_range("the size has no such clock");
  }
}

int32_t Replay::start(int32_t pool, int32_t size, int32_t clock, bool managed, double ready_at) {
  check_pool(pool);
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
  const auto id = static_cast<int32_t>(instances_.size());
  ensure_pool(pool);
  instances_.push_back(std::move(i));
  schedule(instances_[id], ready_at);
  if (ready_at <= now_) handle_event(instances_[id]);
  return id;
}

void Replay::ensure_pool(int32_t pool) {
  const auto least = static_cast<std::size_t>(pool) + 1;
  members_.resize(std::max(members_.size(), least));
  pack_.resize(std::max(pack_.size(), least), false);
  strict_.resize(pack_.size(), kNever);
}

void Replay::retire(int32_t id) {
  Instance& i = instance(id);
  if (i.phase == Phase::kGone || i.leaving) return;
  i.leaving = true;
  auto& mine = members_[i.pool];
  mine.erase(std::remove(mine.begin(), mine.end(), id), mine.end());
  if (i.phase == Phase::kStarting || i.phase == Phase::kIdle) {
    pass_time(i);
    i.phase = Phase::kGone;
    i.watts = 0;
    ++i.version;
  }
}

void Replay::move(int32_t id, int32_t pool, int32_t clock, bool managed) {
  Instance& i = instance(id);
  check_pool(pool);
  check_clock(i.size, clock);
  ensure_pool(pool);
  auto& mine = members_[i.pool];
  const bool serving = std::find(mine.begin(), mine.end(), id) != mine.end();
  mine.erase(std::remove(mine.begin(), mine.end(), id), mine.end());
  i.pool = pool;
  i.managed = managed;
  i.preferred = clock;
  if (!managed) i.asked_clock = clock;
  if (serving) members_[pool].push_back(id);
}

void Replay::route(int32_t klass, int32_t pool, std::vector<int32_t> helpers) {
  if (klass < 0 || static_cast<std::size_t>(klass) >= home_.size()) {
    throw std::out_of_range("there is no such class");
  }
  check_pool(pool);
  for (const int32_t helper : helpers) check_pool(helper);
  ensure_pool(pool);
  for (const int32_t helper : helpers) ensure_pool(helper);
  home_[klass] = pool;
  strict_.assign(strict_.size(), kNever);
  for (std::size_t k = 0; k < home_.size(); ++k)
    if (home_[k] >= 0) strict_[home_[k]] = std::min(strict_[home_[k]], slos_[k].ttft_s);
  helpers_[klass] = std::move(helpers);
}

void Replay::set_pack(int32_t pool, bool pack) {
  check_pool(pool);
  ensure_pool(pool);
  pack_[pool] = pack;
}

void Replay::pass_time(Instance& i) {
  if (i.watts > 0) book_energy(i.watts, i.since, std::min(now_, options_.end_s));
  if (i.phase == Phase::kStepping) i.progress += (now_ - i.since) / i.step;
  i.since = now_;
}

// Adds the energy of a span of time to the slots that it lies in.
void Replay::book_energy(double watts, double from, double until) {
  const std::size_t last = slot_energy_.size() - 1;
  while (from < until) {
    auto slot = static_cast<std::size_t>(from / options_.slot_s);
    // A quotient that is rounded down may name the slot that ends here.
    if (static_cast<double>(slot + 1) * options_.slot_s <= from) ++slot;
    const double slot_end = static_cast<double>(slot + 1) * options_.slot_s;
    const double to = slot < last ? std::min(until, slot_end) : until;
    slot_energy_[std::min(slot, last)] += watts * (to - from);
    from = to;
  }
}

void Replay::schedule(Instance& i, double at) {
  i.next = at;
  ++i.version;
  if (at >= kNever) return;
  const auto later = [](const Event& a, const Event& b) { return a.at > b.at; };
  events_.push_back({at, static_cast<int32_t>(&i - instances_.data()), i.version});
  std::push_heap(events_.begin(), events_.end(), later);
}

void Replay::advance(double until) {
  require(!std::isnan(until), "a time is no number");
  const auto later = [](const Event& a, const Event& b) { return a.at > b.at; };
  for (;;) {
    const double arrival = following_ < requests_.count ? requests_.arrival[following_] : kNever;
    const double event = events_.empty() ? kNever : events_.front().at;
    if (std::min(arrival, event) >= until) break;
    if (event <= arrival) {
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
  for (Instance& i : instances_)
    if (i.phase != Phase::kGone) pass_time(i);
}

void Replay::finish() {
  // What is in the instances ends by itself; no queue can be served for ever.
  double until = now_;
  for (int k = 0; k < 10000 && !events_.empty(); ++k) advance(until += options_.slot_s);
  for (const Instance& i : instances_) {
    for (const Decoding& d : i.decoding)
      count_finished(d.request, d.first_token - requests_.arrival[d.request], kNever);
    for (const Piece& piece : i.pieces) count_finished(piece.prompt.request, kNever, kNever);
    for (const Waiting& w : i.waiting) count_finished(w.request, kNever, kNever);
    for (std::size_t k = i.late_begin; k < i.late.size(); ++k)
      count_finished(i.late[k].request, kNever, kNever);
  }
  for (const int32_t request : stranded_) count_finished(request, kNever, kNever);
}

void Replay::handle_event(Instance& i) {
  pass_time(i);
  if (i.phase == Phase::kStarting) {
    i.phase = Phase::kIdle;
    if (!i.leaving) {
      members_[i.pool].push_back(static_cast<int32_t>(&i - instances_.data()));
      std::vector<int32_t> waiting;
      waiting.swap(stranded_);
      start_next(i);
      for (const int32_t request : waiting) arrive(request);
      return;
    }
  } else if (i.phase == Phase::kPrompts) {
    end_prompts(i);
  } else if (i.phase == Phase::kStepping) {
    i.progress = std::round(i.progress);  // events lie on whole tokens
    end_decoding(i);
  }
  start_next(i);
}

void Replay::start_next(Instance& i) {
  choose_clock(i);
  if (begin_prompts(i)) return;
  const Tables& table = tables(i);
  if (i.decoding.empty()) {
    i.phase = Phase::kIdle;
    i.watts = table.idle_w;
    if (i.leaving && i.waiting.empty() && i.late_begin == i.late.size()) {
      i.phase = Phase::kGone;
      i.watts = 0;
    }
    schedule(i, kNever);
    return;
  }
  const std::size_t batch = std::min(i.decoding.size(), table.step_s.size() - 1);
  i.phase = Phase::kStepping;
  i.step = table.step_s[batch];
  i.watts = table.step_w[batch];
  // At least one token at a time: what has happened may let a prompt in at the next one.
  const double steps = std::max(1.0, std::round(i.decoding.front().leaves - i.progress));
  schedule(i, now_ + steps * i.step);
}

// Moves prompts whose deadlines have passed from those that wait to the late ones.
void Replay::move_late_prompts(Instance& i) {
  while (!i.waiting.empty() && i.waiting.front().deadline < now_) {
    std::pop_heap(i.waiting.begin(), i.waiting.end(), LaterDeadline());
    // One that has been begun holds memory: it is the next of the late ones.
    const bool begun = i.waiting.back().done > 0;
    i.late.insert(begun ? i.late.begin() + i.late_begin : i.late.end(), i.waiting.back());
    i.waiting.pop_back();
  }
}

// Gives up late prompts that have not been begun and are too late to be worth it.
void Replay::squash_late_prompts(Instance& i) {
  while (i.late_begin < i.late.size() && i.late[i.late_begin].done == 0 &&
         i.late[i.late_begin].deadline + options_.squash_s < now_) {
    const int32_t request = i.late[i.late_begin++].request;
    i.queued[level(request)] -= std::max(1, requests_.input[request]);
    i.claimed -= context(request);
    ++squashed_;
    count_finished(request, kNever, kNever);
  }
}

bool Replay::take_prompt(Instance& i, Waiting& prompt) {
  move_late_prompts(i);
  squash_late_prompts(i);
  const bool begun = i.late_begin < i.late.size() && i.late[i.late_begin].done > 0;
  bool late = i.waiting.empty();
  if (late && i.late_begin == i.late.size()) return false;
  prompt = late ? i.late[i.late_begin] : i.waiting.front();
  if (prompt.done == 0) {  // it needs a place in memory
    const double kv = context(prompt.request);
    const std::size_t inside = i.decoding.size() + i.pieces.size();
    const Size& size = sizes_[i.size];
    const bool fits = i.kv + kv <= size.kv_tokens && inside + 1 < tables(i).step_s.size() &&
                      inside < size.most_batch[requests_.known[prompt.request]];
    if (!fits && i.kv > 0) {
      if (!begun) return false;
      late = true;  // it holds the memory that is lacking
      prompt = i.late[i.late_begin];
    } else {
      i.kv += kv;
    }
  }
  if (late) {
    if (++i.late_begin == i.late.size()) i.late.clear(), i.late_begin = 0;
  } else {
    std::pop_heap(i.waiting.begin(), i.waiting.end(), LaterDeadline());
    i.waiting.pop_back();
  }
  return true;
}

// How long an iteration may take, s. With a batch, it keeps the batch's tokens apart by no more
// than a share of the SLO. Below the highest clock, a request that comes meanwhile must still be in
// time.
double Replay::iteration_limit(const Instance& i, const Tables& table) const {
  double most = kNever;
  if (i.managed && &table != &fastest(i)) most = kBlocked * strict_[i.pool];
  if (i.decoding.empty()) return most;
  const std::size_t batch = std::min(i.decoding.size(), table.step_s.size() - 1);
  return std::min(most, kTbtShare * slos_[requests_.known[i.decoding.front().request]].tbt_s -
                            (table.step_s[batch] - table.step_s[1]));
}

bool Replay::begin_prompts(Instance& i) {
  i.pieces.clear();
  if (i.waiting.empty() && i.late_begin == i.late.size()) return false;
  const Tables& table = tables(i);
  const double most = iteration_limit(i, table);
  int32_t room = service_.max_chunk_tokens(sizes_[i.size], table, most);
  double growth = 0, whole = 0;
  Waiting prompt;
  while (room > 0 && take_prompt(i, prompt)) {
    const int32_t length = std::max(1, requests_.input[prompt.request]);
    int32_t tokens = std::min(room, length - prompt.done);
    const double before = table.prompt_time(prompt.done);
    if (most < kNever)  // long contexts take longer
      while (tokens > kLeast && growth + table.prompt_time(prompt.done + tokens) - before > most)
        tokens -= kLeast;
    growth += table.prompt_time(prompt.done + tokens) - before;
    room -= tokens;
    whole += tokens;
    i.pieces.push_back({prompt, tokens});
    i.queued[level(prompt.request)] -= tokens;
    if (growth > most) break;
  }
  if (i.pieces.empty()) return false;
  const std::size_t batch = std::min(i.decoding.size(), table.step_s.size() - 1);
  const double more = batch > 0 ? table.step_s[batch] - table.step_s[1] : 0.0;
  i.phase = Phase::kPrompts;
  i.watts = std::max(table.prompt_power(whole), batch > 0 ? table.step_w[batch] : 0.0);
  schedule(i, now_ + std::max(growth, table.prompt_time(whole)) + more);
  return true;
}

void Replay::end_prompts(Instance& i) {
  i.progress += 1;
  end_decoding(i);
  for (const Piece& piece : i.pieces) {
    Waiting prompt = piece.prompt;
    prompt.done += piece.tokens;
    if (prompt.done >= requests_.input[prompt.request]) {
      first_token(i, piece);
    } else {
      i.waiting.push_back(prompt);
      std::push_heap(i.waiting.begin(), i.waiting.end(), LaterDeadline());
    }
  }
  i.pieces.clear();
}

void Replay::first_token(Instance& i, const Piece& piece) {
  const int32_t request = piece.prompt.request;
  const int32_t output = requests_.output[request];
  if (output <= 1) {
    i.kv -= context(request);
    i.claimed -= context(request);
    count_finished(request, now_ - requests_.arrival[request], 0.0);
    return;
  }
  i.decoding.push_back({i.progress + output - 1, now_, request});
  std::push_heap(i.decoding.begin(), i.decoding.end(), LaterLeave());
}

void Replay::end_decoding(Instance& i) {
  while (!i.decoding.empty() && i.decoding.front().leaves <= i.progress + 1e-6) {
    std::pop_heap(i.decoding.begin(), i.decoding.end(), LaterLeave());
    const Decoding gone = i.decoding.back();
    i.decoding.pop_back();
    const int32_t request = gone.request, output = requests_.output[request];
    i.kv -= context(request);
    i.claimed -= context(request);
    count_finished(request, gone.first_token - requests_.arrival[request],
                   (now_ - gone.first_token) / (output - 1));
  }
}

std::vector<double> TimeCounts::ends() {
  std::vector<double> ends(kBins);
  for (std::size_t k = 0; k < kBins; ++k)
    ends[k] = kShortestBin * std::pow(kBinGrowth, static_cast<double>(k));
  ends.back() = std::numeric_limits<double>::infinity();
  return ends;
}

void TimeCounts::add(double seconds) {
  static const double growth = std::log(kBinGrowth);
  const double bins_up = std::log(std::max(seconds, kShortestBin) / kShortestBin) / growth;
  ++counts_[static_cast<std::size_t>(std::min(std::ceil(bins_up - kTiny), kBins - 1.0))];
}

void Replay::count_finished(int32_t request, double first_token_s, double token_interval_s) {
  const uint8_t klass = requests_.known[request];
  const bool first_ok = first_token_s <= slos_[klass].ttft_s + kTiny;
  const bool tokens_ok = token_interval_s <= slos_[klass].tbt_s + kTiny;
  first_token_times_[klass].add(first_token_s);
  token_intervals_[klass].add(token_interval_s);
  ++counts_.requests[klass];
  counts_.first_in_time[klass] += first_ok;
  counts_.tokens_in_time[klass] += tokens_ok;
  if (!first_ok || !tokens_ok) return;
  ++counts_.attained[klass];
  const auto slot = static_cast<std::size_t>(requests_.arrival[request] / options_.slot_s);
  ++slot_attained_[std::min(slot, slot_attained_.size() - 1)];
}

// Takes over a clock that has come, and asks for another one where it is managed. The clock goes up
// at once, but for the delay, and down after a while.
void Replay::choose_clock(Instance& i) {
  if (i.asked_clock != i.clock && now_ >= i.asked_at + options_.clock_delay_s) {
    i.clock = i.asked_clock;
    ++clock_changes_;
  }
  if (!i.managed) return;
  const int32_t wanted = clock_for_steps(i, clock_for_prompts(i));
  if (wanted == i.asked_clock) return;
  if (wanted < i.asked_clock && now_ < i.asked_at + options_.clock_hold_s) return;
  i.asked_clock = wanted;
  i.asked_at = now_;
  if (i.decoding.empty() && i.phase == Phase::kIdle && options_.clock_delay_s <= 0) {
    i.clock = wanted;
    ++clock_changes_;
  }
}

// The preferred clock, or the lowest above it at which every prompt that waits is in time.
int32_t Replay::clock_for_prompts(const Instance& i) const {
  const int32_t top = top_clock(i);
  if (i.waiting.size() > kLooked || i.late_begin < i.late.size()) return top;
  if (i.waiting.empty()) return i.preferred;
  Waiting by_deadline[kLooked];
  Waiting* const end = std::copy(i.waiting.begin(), i.waiting.end(), by_deadline);
  std::sort(by_deadline, end,
            [](const Waiting& a, const Waiting& b) { return a.deadline < b.deadline; });
  int32_t clock = i.preferred;
  while (clock < top && !prompts_are_in_time(i, clock, by_deadline, end)) ++clock;
  return clock;
}

// Whether prompts, one after the other at a clock, are all in time. The present iteration may run
// at the old clock until the new one comes.
bool Replay::prompts_are_in_time(const Instance& i, int32_t clock, const Waiting* begin,
                                 const Waiting* end) const {
  const Tables& table = tables_[sizes_[i.size].tables[clock]];
  const int32_t room = service_.max_chunk_tokens(sizes_[i.size], table, iteration_limit(i, table));
  const double token_s = table.prompt_time(room) / room;
  double at = now_ + options_.clock_delay_s;
  for (const Waiting* prompt = begin; prompt != end; ++prompt) {
    const double tokens = requests_.input[prompt->request] - prompt->done;
    at += std::max(table.prompt_time(std::min(tokens, double(room))), tokens * token_s);
    const double ttft = slos_[requests_.known[prompt->request]].ttft_s;
    if (!(at <= prompt->deadline - options_.clock_margin * ttft)) return false;
  }
  return true;
}

// The lowest clock, from a least one on, at which the steps of the batch keep tokens together.
int32_t Replay::clock_for_steps(const Instance& i, int32_t least) const {
  const std::size_t batch = i.decoding.size();
  if (batch == 0) return least;
  const double tbt = slos_[requests_.known[i.decoding.front().request]].tbt_s;
  int32_t clock = least;
  for (; clock < top_clock(i); ++clock) {
    const Tables& table = tables_[sizes_[i.size].tables[clock]];
    if (table.step_s[std::min(batch, table.step_s.size() - 1)] <= kTbtShare * tbt) break;
  }
  return clock;
}

int32_t Replay::top_clock(const Instance& i) const {
  return static_cast<int32_t>(sizes_[i.size].tables.size()) - 1;
}

// What a request means to instances of a size at their highest clock.
struct Replay::Estimate {
  int32_t size = -1, chunk = 0;          // prompt tokens of an iteration with a batch
  double alone_s, shared_s;              // its own prompt, without and with a batch
  double alone_token_s, shared_token_s;  // of prompts before it
};

// How long a request would wait for its first token there, s, at the highest clock; kFull and more
// if it has no place.
double Replay::wait_at(const Instance& i, int32_t request, Estimate& estimate) const {
  const Size& size = sizes_[i.size];
  const Tables& table = fastest(i);
  const double own = requests_.input[request];
  const int32_t chunk = chunk_beside(i, 1);
  if (estimate.size != i.size || estimate.chunk != chunk) {
    const auto time = [&](int32_t room, double& token_s, double& own_s) {
      token_s = table.prompt_time(room) / room;
      own_s = std::max(table.prompt_time(std::min(own, double(room))), own * token_s);
    };
    estimate.size = i.size;
    estimate.chunk = chunk;
    time(size.chunk, estimate.alone_token_s, estimate.alone_s);
    time(chunk, estimate.shared_token_s, estimate.shared_s);
  }
  double ahead = 0;
  for (int k = 0; k <= level(request); ++k) ahead += i.queued[k];
  const std::size_t batch = i.decoding.size() + i.waiting.size() + i.pieces.size() + 1;
  const bool full = i.claimed + context(request) > size.kv_tokens ||
                    batch > size.most_batch[requests_.known[request]];
  if (full) return kFull + ahead + static_cast<double>(batch);
  const double rest = i.phase == Phase::kPrompts ? std::max(0.0, i.next - now_) : 0.0;
  if (i.decoding.empty()) return rest + ahead * estimate.alone_token_s + estimate.alone_s;
  return rest + ahead * estimate.shared_token_s + table.step_s[1] + estimate.shared_s;
}

int32_t Replay::best_of(int32_t pool, int32_t request, double* wait) const {
  const double promised = slos_[requests_.known[request]].ttft_s;
  Estimate estimate;
  int32_t best = -1;
  double least = 0;
  for (const int32_t id : members_[pool]) {
    const Instance& i = instances_[id];
    const double waits = wait_at(i, request, estimate);
    // Where prompts always wait, twice as many decode at a time.
    if (pack_[pool] && chunk_beside(i, 2) == sizes_[i.size].shared_chunk &&
        waits <= options_.pack_share * promised) {
      *wait = waits;
      return id;
    }
    // Of two that are equally quick, the one with fewer requests.
    const double key = waits + 1e-4 * static_cast<double>(i.decoding.size());
    if (best < 0 || key < least) {
      best = id;
      least = key;
      *wait = waits;
    }
  }
  return best;
}

void Replay::arrive(int32_t request) {
  const uint8_t klass = requests_.taken[request];
  double wait = kNever;
  int32_t chosen = home_[klass] < 0 ? -1 : best_of(home_[klass], request, &wait);
  const double left = requests_.arrival[request] + slos_[requests_.known[request]].ttft_s - now_;
  if (chosen < 0 || wait > left) {
    for (const int32_t pool : helpers_[klass]) {
      double there = kNever;
      const int32_t other = best_of(pool, request, &there);
      if (other >= 0 && (chosen < 0 || there <= left)) {
        chosen = other;
        wait = there;
        ++helped_;
        if (there <= left) break;
      }
    }
  }
  if (chosen < 0) {
    stranded_.push_back(request);
    return;
  }
  Instance& i = instances_[chosen];
  i.waiting.push_back(
      {requests_.arrival[request] + slos_[requests_.known[request]].ttft_s, request, 0});
  std::push_heap(i.waiting.begin(), i.waiting.end(), LaterDeadline());
  i.queued[level(request)] += std::max(1, requests_.input[request]);
  i.claimed += context(request);
  if (i.phase == Phase::kIdle) {
    pass_time(i);
    start_next(i);
  } else if (i.phase == Phase::kStepping) {
    // Prompts come in at the end of the present step.
    const double progress = i.progress + (now_ - i.since) / i.step;
    const double at = now_ + (std::ceil(progress - 1e-9) - progress) * i.step;
    if (at < i.next - kTiny) schedule(i, std::max(now_, at));
  }
}

std::array<int64_t, kClasses> Service::counts(double begin, double end) const {
  std::array<int64_t, kClasses> found{};
  const double* last = requests.arrival + requests.count;
  const auto from = std::lower_bound(requests.arrival, last, begin) - requests.arrival;
  const auto to = std::lower_bound(requests.arrival, last, end) - requests.arrival;
  for (auto k = from; k < to; ++k) ++found[requests.taken[k]];
  return found;
}

namespace {

// How long requests of a level may wait for others' work.
struct Level {
  double ttft_s;     // SLO
  double least_s;    // that any of them may wait, whatever its own prompt takes
  double stricter;   // instances that stricter levels keep busy
  double longest_s;  // of its prompts, each alone, but for the few that take longer still

  // A prompt is in one instance only, where stricter ones go first: its own time is stretched.
  double slack(double own_s, double instances) const {
    const double free = std::max(kLeastFree, 1 - stricter / instances);
    return std::max(least_s, ttft_s - own_s / free);
  }
};

// Work in bins, by how strict its SLO is, and how long it may wait.
struct Queues {
  static constexpr std::size_t kMost = kClasses + 1;  // levels
  std::size_t bins, levels;
  std::vector<double> work;         // of a bin and level: of this and all stricter ones, s
  std::vector<std::size_t> begins;  // of a bin and level: where its prompts begin in own_s
  std::vector<double> own_s;        // of each prompt alone
  std::vector<Level> limits;        // of a level
  double allowed;                   // requests that may be late

  bool too_late(double instances) const {
    switch (levels) {  // the usual numbers, so that the compiler knows them
      case 1:
        return too_late_of<1>(instances);
      case 2:
        return too_late_of<2>(instances);
      case 3:
        return too_late_of<3>(instances);
      default:
        return too_late_of<kMost>(instances);
    }
  }

  template <std::size_t kLevels>
  bool too_late_of(double instances) const {
    const std::size_t count = kLevels < kMost ? kLevels : levels;
    double queue[kLevels] = {}, shortest[kLevels];  // that all prompts of a level may wait
    for (std::size_t l = 0; l < count; ++l)
      shortest[l] = instances * limits[l].slack(limits[l].longest_s, instances);
    const double served = instances * kBin;
    double missed = 0;
    for (std::size_t bin = 0; bin < bins; ++bin)
      for (std::size_t l = 0; l < count; ++l) {
        queue[l] = std::max(0.0, queue[l] + work[bin * count + l] - served);
        if (queue[l] <= shortest[l]) continue;
        missed += late_prompts(bin * count + l, limits[l], queue[l], instances);
        if (missed > allowed) return true;
      }
    return false;
  }

  // The prompts of a bin and level that may wait less than it takes to do other prompts' work.
  double late_prompts(std::size_t cell, const Level& level, double queue_s,
                      double instances) const {
    double late = 0;
    for (std::size_t k = begins[cell]; k < begins[cell + 1]; ++k) {
      const double slack_s = level.slack(std::min(own_s[k], level.longest_s), instances);
      if (queue_s - own_s[k] > instances * slack_s) ++late;
    }
    return late;
  }

  // The least number of instances at which it is not too late, to a half percent.
  double least(double mean) const {
    double low = 0, high = std::max(1e-3, mean);
    while (too_late(high)) low = high, high *= 2;
    while (high > kFine * low && high > 1e-3) {
      const double middle = 0.5 * (low + high);
      (too_late(middle) ? low : high) = middle;
    }
    return high;
  }
};

// What a share of the values does not exceed.
double quantile(std::vector<double>& values, double share) {
  const auto place =
      static_cast<std::ptrdiff_t>(std::ceil(share * static_cast<double>(values.size() - 1)));
  std::nth_element(values.begin(), values.begin() + place, values.end());
  return values[place];
}

// A prompt that can be in time: its bin and level, and how long it takes alone.
struct Prompt {
  std::size_t cell;
  double own_s;
};

// The instances of one size that a stretch of requests needs: demand is put into bins, and each of
// three bounds is taken from them. Times in s, tokens as counts.
class Capacity {
 public:
  // The requests from `from` to `to` that are taken for one of `classes`.
  Capacity(const Service& service, const Size& size, double begin, double duration, int64_t from,
           int64_t to, uint32_t classes)
      : service_(service),
        requests_(service.requests),
        size_(size),
        table_(service.tables[size.tables.back()]),
        begin_(begin),
        duration_(duration) {
    for (auto k = from; k < to; ++k) {
      if (classes >> requests_.taken[k] & 1) chosen_.push_back(k);
    }
  }

  Need need(double late) {
    if (chosen_.empty()) return {0, 0, 0, 0};
    find_levels();
    measure_costs();
    bin_demand();
    limit_queues(late);
    const double memory = memory_bound(late);
    const double busy = busy_s_ / duration_;  // so many have time for all the work
    const double fewest = std::max({busy, queues_.least(busy), quantile_of_steady_bounds(late)});
    const double prompts = std::accumulate(arrived_.begin(), arrived_.end(), 0.0);
    return {std::max(fewest, memory), busy, stays_s_ / duration_,
            1 - static_cast<double>(hopeful_) / prompts};
  }

 private:
  // The different TTFT SLOs of the classes that are there, strictest first, and the least TBT SLO.
  void find_levels() {
    uint32_t present = 0;
    for (const int64_t k : chosen_) present |= 1u << requests_.known[k];
    const std::vector<Slo>& slos = service_.slos;
    for (std::size_t c = 0; c < slos.size(); ++c) {
      if (!(present >> c & 1)) continue;
      ttft_s_.push_back(slos[c].ttft_s);
      tbt_s_ = std::min(tbt_s_, slos[c].tbt_s);
    }
    std::sort(ttft_s_.begin(), ttft_s_.end());
    ttft_s_.erase(std::unique(ttft_s_.begin(), ttft_s_.end()), ttft_s_.end());
    ttft_s_.push_back(kNever);  // the level of work that is late in any case
    for (std::size_t c = 0; c < slos.size(); ++c) {
      level_of_class_[c] =
          std::lower_bound(ttft_s_.begin(), ttft_s_.end(), slos[c].ttft_s) - ttft_s_.begin();
    }
  }

  // What a token of a prompt takes, a request more in the batch, and a step at a usual batch.
  void measure_costs() {
    chunk_ = service_.max_chunk_tokens(size_, table_, kTbtShare * tbt_s_);
    token_s_ = table_.prompt_time(chunk_) / chunk_;
    const auto batches = static_cast<double>(table_.step_s.size() - 2);
    batch_s_ = (table_.step_s.back() - table_.step_s[1]) / std::max(1.0, batches);
    step_s_ = table_.step_s[std::min<std::size_t>(kUsualBatch, table_.step_s.size() - 1)];
  }

  // Work by level in fine bins, contexts in memory bins, tokens in steady bins.
  void bin_demand() {
    const std::size_t levels = ttft_s_.size();
    queues_.levels = levels;
    queues_.bins = static_cast<std::size_t>(duration_ / kBin) + 2;
    queues_.work.assign(queues_.bins * levels, 0.0);
    queues_.begins.assign(queues_.bins * levels + 1, 0);
    held_tokens_.assign(static_cast<std::size_t>(duration_ / kMemoryBin) + 1, 0.0);
    const auto steady_bins = static_cast<std::size_t>(std::ceil(duration_ / kSteadyBin));
    input_tokens_.assign(steady_bins, 0.0);
    output_tokens_.assign(steady_bins, 0.0);
    inputs_.assign(levels, 0.0);
    arrived_.assign(levels, 0.0);
    work_s_.assign(levels, 0.0);
    for (const int64_t k : chosen_) bin_request(k);
    list_prompts();
  }

  // The times of the prompts that can be in time, by bin and level. `begins` holds their numbers.
  void list_prompts() {
    std::vector<std::size_t>& begins = queues_.begins;
    std::partial_sum(begins.begin(), begins.end(), begins.begin());
    queues_.own_s.resize(begins.back());
    std::vector<std::size_t> next(begins.begin(), begins.end() - 1);
    for (const Prompt& prompt : prompts_) queues_.own_s[next[prompt.cell]++] = prompt.own_s;
  }

  void bin_request(int64_t k) {
    const double at = requests_.arrival[k] - begin_, input = requests_.input[k],
                 output = requests_.output[k];
    const double work = input * token_s_ + output * batch_s_, stay = work + output * step_s_;
    const std::size_t level = level_of_class_[requests_.known[k]];
    const std::size_t bin = std::min(static_cast<std::size_t>(at / kBin), queues_.bins - 1);
    const std::size_t cell = bin * queues_.levels + level;
    const double own_s = service_.own_time(size_, table_, requests_.input[k]);
    busy_s_ += work;
    stays_s_ += stay;
    inputs_[level] += input;
    arrived_[level] += 1;
    if (input + output <= size_.kv_tokens) hold_memory(at, stay, input + output);
    if (own_s > ttft_s_[level]) {
      // It is in nobody's way once it is late: from then on it waits behind all others.
      const double in_time_s = std::min(work, ttft_s_[level]);
      queues_.work[cell] += in_time_s;
      work_s_[level] += in_time_s;
      queues_.work[bin * queues_.levels + queues_.levels - 1] += work - in_time_s;
      return;
    }
    ++hopeful_;
    queues_.work[cell] += work;
    work_s_[level] += work;
    ++queues_.begins[cell + 1];
    prompts_.push_back({cell, std::max(own_s, input * token_s_)});
    const std::size_t steady_bins = input_tokens_.size();
    const auto steady_bin =
        std::min(static_cast<std::size_t>(at / duration_ * static_cast<double>(steady_bins)),
                 steady_bins - 1);
    input_tokens_[steady_bin] += input;
    output_tokens_[steady_bin] += output;
  }

  // Counts a request's context in each of the bins that it stays in, by the part that it stays.
  void hold_memory(double from, double stay, double tokens) {
    const double until = from + stay;
    const std::size_t last = held_tokens_.size() - 1;
    auto bin = std::min(static_cast<std::size_t>(from / kMemoryBin), last);
    for (; bin <= last && static_cast<double>(bin) * kMemoryBin < until; ++bin) {
      const double begin = static_cast<double>(bin) * kMemoryBin;
      const double part = std::min(until, begin + kMemoryBin) - std::max(from, begin);
      held_tokens_[bin] += tokens * std::max(0.0, part) / kMemoryBin;
    }
  }

  // How long each level may wait, and its work with that of all stricter ones.
  void limit_queues(double late) {
    queues_.allowed = late * static_cast<double>(hopeful_);
    double stricter = 0;
    for (std::size_t level = 0; level < queues_.levels; ++level) {
      // The prompts that all instances are at do not wait: of each, half is left on average.
      const double prompt_s = inputs_[level] * token_s_ / std::max(1.0, arrived_[level]);
      queues_.limits.push_back({ttft_s_[level] - table_.prompt_time(1) - 0.5 * kBin,
                                std::max(kLeastSlack, 0.5 * prompt_s), stricter,
                                longest_prompt_s(level)});
      stricter += work_s_[level] / duration_;
    }
    for (std::size_t bin = 0; bin < queues_.bins; ++bin) {
      for (std::size_t level = 1; level < queues_.levels; ++level) {
        const std::size_t k = bin * queues_.levels + level;
        queues_.work[k] += queues_.work[k - 1];
      }
    }
  }

  // The time alone that a share kLong of a level's prompts does not exceed.
  double longest_prompt_s(std::size_t level) const {
    std::vector<double> own_s;
    for (const Prompt& prompt : prompts_)
      if (prompt.cell % queues_.levels == level) own_s.push_back(prompt.own_s);
    return own_s.empty() ? 0 : quantile(own_s, kLong);
  }

  double memory_bound(double late) {
    return quantile(held_tokens_, 1 - late) / (kMemoryShare * size_.kv_tokens);
  }

  // Where prompts always wait, every iteration is as long as it may be. Then the batch, by Little's
  // law, and the prompt tokens that leave room for it must be what comes: otherwise batches grow,
  // prompts get slower, and the fleet falls behind though it could serve the same load in calm.
  double quantile_of_steady_bounds(double late) const {
    std::vector<double> steady(input_tokens_.size(), kFull);
    for (int32_t piece = chunk_; piece > 0; piece -= kLeast) {
      const std::size_t batch = service_.batch_beside(table_, piece, tbt_s_);
      const double beside_s = table_.step_s[batch] - table_.step_s[1];
      const double iteration_s =
          std::max(table_.prompt_time(piece) + beside_s, table_.step_s[batch]);
      const double full = iteration_s * static_cast<double>(steady.size()) / duration_;
      for (std::size_t k = 0; k < steady.size(); ++k) {
        const double most =
            std::max(input_tokens_[k] / piece, output_tokens_[k] / static_cast<double>(batch));
        steady[k] = std::min(steady[k], most * full);
      }
    }
    return quantile(steady, 1 - late);
  }

  static constexpr std::size_t kUsualBatch = 16;
  const Service& service_;
  const Requests& requests_;
  const Size& size_;
  const Tables& table_;
  const double begin_, duration_;
  std::vector<int64_t> chosen_;
  // Levels, strictest first.
  std::vector<double> ttft_s_;
  double tbt_s_ = kNever;
  std::array<std::size_t, kClasses> level_of_class_{};
  // Costs.
  int32_t chunk_ = 0;
  double token_s_ = 0, batch_s_ = 0, step_s_ = 0;
  // Demand.
  Queues queues_;
  std::vector<Prompt> prompts_;  // that can be in time
  std::vector<double> held_tokens_, input_tokens_, output_tokens_;
  std::vector<double> inputs_, arrived_, work_s_;  // of a level
  double busy_s_ = 0, stays_s_ = 0;
  int64_t hopeful_ = 0;  // requests that are in time if they are alone
};

}  // namespace

Need Service::required_instances(double begin, double end, uint32_t classes, int32_t size_index,
                                 double late) const {
  if (size_index < 0 || static_cast<std::size_t>(size_index) >= sizes.size()) {
    throw std::out_of_range("there is no such size");
  }
  require(begin < end, "a stretch must end after it begins");
  const double* last = requests.arrival + requests.count;
  const auto from = std::lower_bound(requests.arrival, last, begin) - requests.arrival;
  const auto to = std::lower_bound(requests.arrival, last, end) - requests.arrival;
  return Capacity(*this, sizes[size_index], begin, end - begin, from, to, classes).need(late);
}

}  // namespace envplan::serving
