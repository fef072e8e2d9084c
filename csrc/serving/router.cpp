#include "router.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace envplan::serving {
namespace {

constexpr int32_t kMaxPools = 1 << 16;
constexpr double kFull = 1e9;  // s: a wait that tells that there is no place
constexpr double kPerRequest =
    1e-4;  // s: of two that are equally quick, the one with fewer requests

}  // namespace

Router::Router(const Service& service, const Scheduler& scheduler, double pack_share)
    : service_(service),
      scheduler_(scheduler),
      pack_share_(pack_share),
      home_(service.slos.size(), -1),
      helpers_(service.slos.size()) {}

void Router::check_pool(int32_t pool) {
  if (pool < 0 || pool >= kMaxPools) throw std::out_of_range("there is no such pool");
}

void Router::ensure_pool(int32_t pool) {
  const auto least = static_cast<std::size_t>(pool) + 1;
  members_.resize(std::max(members_.size(), least));
  pack_.resize(std::max(pack_.size(), least), false);
  strictest_.resize(pack_.size(), kNever);
  decode_pool_.resize(pack_.size(), -1);
}

void Router::hand_over(int32_t pool, int32_t decode_pool) {
  check_pool(pool);
  check_pool(decode_pool);
  if (pool == decode_pool) throw std::out_of_range("a pool cannot hand over to itself");
  ensure_pool(std::max(pool, decode_pool));
  decode_pool_[pool] = decode_pool;
}

double Router::reserve(int32_t pool, const Arrival& arrival) const {
  if (decode_pool_[pool] >= 0) return arrival.input + 1;
  return arrival.input + std::max(1.0, arrival.output);
}

void Router::route(int32_t klass, int32_t pool, std::vector<int32_t> helpers) {
  if (klass < 0 || static_cast<std::size_t>(klass) >= home_.size()) {
    throw std::out_of_range("there is no such class");
  }
  check_pool(pool);
  for (const int32_t helper : helpers) check_pool(helper);
  ensure_pool(pool);
  for (const int32_t helper : helpers) ensure_pool(helper);
  home_[klass] = pool;
  helpers_[klass] = std::move(helpers);
  strictest_.assign(strictest_.size(), kNever);
  for (std::size_t k = 0; k < home_.size(); ++k) {
    if (home_[k] < 0) continue;
    strictest_[home_[k]] = std::min(strictest_[home_[k]], service_.slos[k].ttft_s);
  }
}

void Router::set_pack(int32_t pool, bool pack) {
  check_pool(pool);
  ensure_pool(pool);
  pack_[pool] = pack;
}

void Router::add(int32_t instance, int32_t pool) {
  ensure_pool(pool);
  members_[pool].push_back(instance);
}

bool Router::remove(int32_t instance, int32_t pool) {
  ensure_pool(pool);
  auto& members = members_[pool];
  const auto begin = std::remove(members.begin(), members.end(), instance);
  const bool was_there = begin != members.end();
  members.erase(begin, members.end());
  return was_there;
}

// What a request means to instances of a size at their highest clock.
struct Router::Estimate {
  int32_t size = -1, chunk = 0;          // prompt tokens of an iteration with a batch
  double alone_s, shared_s;              // its own prompt, without and with a batch
  double alone_token_s, shared_token_s;  // of prompts before it
};

// How long a request would wait for its first token there, s, at the highest clock; kFull and more
// if it has no place.
double Router::wait_at(const Instance& i, const Arrival& arrival, double now,
                       Estimate& estimate) const {
  const Size& size = service_.sizes[i.size];
  const Tables& table = service_.fastest(i.size);
  const uint8_t klass = service_.requests.taken[arrival.request];
  const double own = arrival.input;
  const int32_t chunk = scheduler_.usual_chunk(service_, i.size, i.batch.size());
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
  const int32_t last_level =
      scheduler_.by_deadline() ? service_.levels[klass] : service_.num_levels - 1;
  double ahead = 0;
  for (int32_t k = 0; k <= last_level; ++k) ahead += i.queued[k];
  const std::size_t batch = i.batch.size() + i.waiting + i.pieces.size() + 1;
  const bool full = i.memory.claimed + reserve(i.pool, arrival) > size.kv_tokens ||
                    batch > scheduler_.most_batch(service_, i.size, klass);
  if (full) return kFull + ahead + static_cast<double>(batch);
  const double rest = i.phase == Phase::kPrompts ? std::max(0.0, i.next - now) : 0.0;
  if (i.batch.empty()) return rest + ahead * estimate.alone_token_s + estimate.alone_s;
  return rest + ahead * estimate.shared_token_s + table.step_s[1] + estimate.shared_s;
}

Router::Choice Router::best_of(int32_t pool, const Arrival& arrival,
                               const std::vector<Instance>& instances, double now,
                               double* wait) const {
  const double promised = service_.slos[service_.requests.taken[arrival.request]].ttft_s;
  Estimate estimate;
  Choice best{-1, false, false};
  double least = 0;
  for (const int32_t id : members_[pool]) {
    const Instance& i = instances[id];
    if (arrival.input + 1 > service_.sizes[i.size].kv_tokens) {
      best.is_too_small = true;
      continue;
    }
    const double waits = wait_at(i, arrival, now, estimate);
    // Where prompts always wait, twice as many decode at a time.
    if (pack_[pool] && scheduler_.is_small(service_, i.size, 2 * i.batch.size()) &&
        waits <= pack_share_ * promised) {
      *wait = waits;
      return {id, false, false};
    }
    const double key = waits + kPerRequest * static_cast<double>(i.batch.size());
    if (best.instance < 0 || key < least) {
      best.instance = id;
      least = key;
      *wait = waits;
    }
  }
  return best;
}

Router::Choice Router::choose(const Arrival& arrival, const std::vector<Instance>& instances,
                              double now) const {
  const Requests& requests = service_.requests;
  const uint8_t klass = requests.taken[arrival.request];
  double wait = kNever;
  Choice chosen{-1, false, false};
  if (home_[klass] >= 0) chosen = best_of(home_[klass], arrival, instances, now, &wait);
  const double left = requests.arrival[arrival.request] + service_.slos[klass].ttft_s - now;
  if (chosen.instance >= 0 && wait <= left) return chosen;
  for (const int32_t pool : helpers_[klass]) {
    double there = kNever;
    const Choice other = best_of(pool, arrival, instances, now, &there);
    chosen.is_too_small |= other.is_too_small;
    if (other.instance < 0 || (chosen.instance >= 0 && there > left)) continue;
    chosen = {other.instance, true, false};
    if (there <= left) break;
  }
  return chosen;
}

Router::Choice Router::choose_to_decode(int32_t pool, const Arrival& arrival,
                                        const std::vector<Instance>& instances) const {
  const uint8_t klass = service_.requests.taken[arrival.request];
  Choice best{-1, false, false};
  double least = 0;
  for (const int32_t id : members_[pool]) {
    const Instance& i = instances[id];
    const double kv_tokens = service_.sizes[i.size].kv_tokens;
    if (arrival.input + 2 > kv_tokens) {
      best.is_too_small = true;
      continue;
    }
    const bool full = i.memory.claimed + reserve(pool, arrival) > kv_tokens ||
                      i.decoding() >= scheduler_.most_decoding(service_, i.size, klass);
    if (!full && pack_[pool]) return {id, false, false};
    const double key = (full ? kFull : 0.0) + static_cast<double>(i.decoding());
    if (best.instance < 0 || key < least) {
      best.instance = id;
      least = key;
    }
  }
  return best;
}

}  // namespace envplan::serving
