#include "annealing.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>

namespace envplan {

namespace {

using std::int64_t;
using std::uint64_t;

constexpr int64_t kMovesPerTemperature = 256;
constexpr int64_t kAcceptsPerTail = 8;  // moves accepted between two backward passes
constexpr double kCooling = 0.02;       // last temperature over first
constexpr double kPriceStep = 1.1;      // of the price of a change, between two temperatures
constexpr double kSettled = 0.2;        // of all moves, until that price is adjusted
constexpr double kHotRoom = 0.001;      // of the energy, by which heat alone may raise it at first
constexpr double kAboveAllowance = 8;   // price of energy above a strict allowance at first
constexpr double kDearer = 16;          // last price over first
constexpr double kSureShare = 0.1;      // of what rows cost more at their clocks, at least
constexpr std::size_t kPaces = 256;     // at most so many are tried

const Limits& checked(const Limits& limits) {
  require(limits.price >= 0 && limits.price <= kMostPower, "the price is out of range");
  return limits;
}

// Whether it matters how often clocks change.
bool changes_count(const Limits& limits) {
  const bool have_a_price = limits.change_price > 0 || limits.allowance >= 0;
  return have_a_price || limits.machine.latency > 0 || limits.min_dwell > 0;
}

// Chooses rows, and returns them by number.
const std::vector<Index>& choose(const Index* rows, Replay* replay) {
  replay->choose(rows);
  return replay->rows();
}

Energy energy_over(const Limits& limits, const Replay& replay) {
  return limits.peak < 0 ? 0 : replay.energy_above_cap(limits.peak, 0, replay.makespan());
}

}  // namespace

Score score(const Limits& limits, const Replay& replay, Energy over, Index changes) {
  Score s;
  s.late = std::max<Time>(0, replay.makespan() - limits.deadline);
  s.shortage = replay.shortage();
  s.over = over;
  s.excess = static_cast<Energy>(limits.price) * (static_cast<Energy>(s.late) + s.shortage) + over;
  s.energy = replay.energy_until(limits.waits ? limits.deadline : replay.makespan());
  s.changes = changes;
  s.cost = limits.allowance < 0
               ? s.energy + static_cast<Energy>(limits.change_price) * changes
               : std::max(s.energy, limits.allowance) + changes;  // a change counts as one unit
  return s;
}

Score score(const Problem& problem, const Limits& limits, const Index* rows) {
  checked(limits);
  Replay replay(problem, limits.machine, limits.min_dwell);
  replay.choose(rows);
  replay.run();
  const ClockChanges changes(problem, replay.rows());
  return score(limits, replay, energy_over(limits, replay), changes.count());
}

Annealing::Annealing(const Problem& problem, const Limits& limits, const Index* rows, int64_t moves,
                     double heat, uint64_t seed, bool strict_allowance)
    : problem_(problem),
      limits_(checked(limits)),
      replay_(problem, limits.machine, limits.min_dwell),
      changes_(problem, choose(rows, &replay_)),
      moves_(problem, changes_count(limits)),
      random_(seed),
      num_moves_(moves_.movable().empty() ? 0 : moves),
      strict_allowance_(strict_allowance && limits.allowance >= 0),
      heat_(heat),
      change_price_(static_cast<double>(limits.change_price)) {
  replay_.run();
  replay_.tails(&tail_);
  best_ = replay_.rows();
  best_score_ = score_ = score(limits_, replay_, energy_over(limits_, replay_), changes_.count());
  const auto blocks = static_cast<double>(std::max<int64_t>(1, moves / kMovesPerTemperature));
  cooling_ = std::pow(kCooling, 1 / blocks);
  dearer_ = std::pow(kDearer, 1 / blocks);
  first_temperature_ = temperature_ = heat * mean_step();
  if (heat == 0) pricing_ = kDearer;
}

bool Annealing::run(uint64_t work) {
  const uint64_t until = replay_.touched() + work;
  const int64_t most = work < static_cast<uint64_t>(num_moves_ - move_)
                           ? move_ + static_cast<int64_t>(work)
                           : num_moves_;
  while (move_ < most && replay_.touched() < until) step();
  return move_ < num_moves_;
}

void Annealing::best(Index* rows) const {
  for (Index i = 0; i < problem_.num_operations; ++i) {
    rows[problem_.order[i]] = best_[i] - problem_.operations[i].first_row;
  }
}

// The mean over operations of what lies between two neighbouring rows, 10 fJ.
double Annealing::mean_step() const {
  double sum = 0;
  for (const Index i : moves_.movable()) {
    const Problem::Operation& op = problem_.operations[i];
    const Problem::Row &first = problem_.rows[op.first_row], &last = problem_.rows[op.end_row - 1];
    const auto waiting = static_cast<double>(problem_.waiting[op.stage]);
    const double cost = static_cast<double>(last.energy - first.energy) -
                        waiting * static_cast<double>(last.time - first.time);
    sum += std::abs(cost) / (op.end_row - op.first_row - 1);
  }
  return sum / static_cast<double>(std::max<std::size_t>(1, moves_.movable().size()));
}

void Annealing::step() {
  if (++move_ % kMovesPerTemperature == 0 && heat_ > 0) {
    temperature_ *= cooling_;
    pricing_ *= dearer_;
    adjust_change_price();
    replay_.tails(&tail_);
  }
  const Time makespan = replay_.makespan();
  if (moves_.propose(replay_.rows(), &random_).empty()) return;
  if (!attempt(-temperature_ * std::log(random_.uniform()))) return;
  // Tails that are too long hide good moves.
  if (++accepted_ % kAcceptsPerTail == 0 || replay_.makespan() < makespan) replay_.tails(&tail_);
  if (score_ < best_score_) {
    best_score_ = score_;
    best_ = replay_.rows();
  }
}

// Growth of what is minimized since a score.
double Annealing::growth_since(const Score& before) const {
  return static_cast<double>(score_.energy - before.energy) +
         change_price_ * (score_.changes - before.changes) +
         pricing_ * (above_allowance(score_) - above_allowance(before)) +
         pricing_ * static_cast<double>(score_.excess - before.excess);
}

// What energy above a strict allowance costs at first, 10 fJ.
double Annealing::above_allowance(const Score& score) const {
  if (!strict_allowance_) return 0;
  return kAboveAllowance *
         static_cast<double>(std::max<Energy>(0, score.energy - limits_.allowance));
}

// The price of a change rises while energy is within its allowance, and falls while it is not.
void Annealing::adjust_change_price() {
  const bool has_settled = static_cast<double>(move_) >= kSettled * static_cast<double>(num_moves_);
  if (limits_.allowance < 0 || strict_allowance_ || !has_settled) return;
  const double heat_left = temperature_ / first_temperature_;
  const double allowed = static_cast<double>(limits_.allowance) * (1 + kHotRoom * heat_left);
  const bool is_within = static_cast<double>(score_.energy) <= allowed;
  change_price_ *= is_within ? kPriceStep : 1 / kPriceStep;
}

// Whether the changes proposed are not worth a replay, which takes longest where operations get
// faster: were all clocks there at once, they would cost more by so much that neither clocks that
// come late nor an earlier end are likely to make up for it.
bool Annealing::is_hopeless(double most) const {
  Energy dearer = 0;
  for (const auto& [i, row] : moves_.changes()) {
    const Problem::Row &now = problem_.rows[replay_.rows()[i]], &then = problem_.rows[row];
    const Energy waiting = problem_.waiting[problem_.operations[i].stage];
    dearer += then.energy - now.energy - waiting * (then.time - now.time);
  }
  const double owed = pricing_ * static_cast<double>(score_.excess);
  return kSureShare * static_cast<double>(dearer) > most + owed;
}

// Makes the changes proposed if what is minimized grows by no more than `most`.
bool Annealing::attempt(double most) {
  const Score before = score_;
  if (change_price_ == 0 && is_hopeless(most)) return false;
  changes_.apply(moves_.changes());
  const double saved = change_price_ * (before.changes - changes_.count());
  // What has not been counted yet can at best fall to nothing.
  const double uncounted = static_cast<double>(before.over);
  const double allowed = most + pricing_ * (uncounted + above_allowance(before));
  const double price = pricing_ * static_cast<double>(limits_.price);
  const double waiting = limits_.waits ? 0 : static_cast<double>(problem_.total_waiting);
  const Budget budget{allowed + saved, std::max(replay_.makespan(), limits_.deadline), tail_.data(),
                      waiting + price, price};
  bool good = replay_.change(moves_.changes(), budget);
  if (good) {
    score_ = score(limits_, replay_, before.over, changes_.count());
    good = growth_since(before) <= most + pricing_ * uncounted;
  }
  if (good && limits_.peak >= 0) {
    const auto [from, to] = replay_.changed_span();
    Energy over = before.over + replay_.energy_above_cap(limits_.peak, from, to);
    replay_.undo();
    over -= replay_.energy_above_cap(limits_.peak, from, to);
    replay_.redo();
    score_ = score(limits_, replay_, over, changes_.count());
    good = growth_since(before) <= most;
  }
  if (good) return true;
  replay_.undo();
  changes_.revert();
  score_ = before;
  return false;
}

ConstantClocks::ConstantClocks(const Problem& problem, const Limits& limits)
    : problem_(problem),
      limits_(checked(limits)),
      replay_(problem, limits.machine, limits.min_dwell) {
  fill_row_at();
  best_ = replay_.rows();
  best_score_.excess = Energy{1} << 126;  // more than any: no choice has been tried
  start_in_step();
}

// Of the rows of each table that keep their clock all along, the one nearest to each clock.
void ConstantClocks::fill_row_at() {
  for (Index t = 0; t < problem_.num_tables; ++t) {
    for (Index clock = 0; clock < problem_.num_clocks; ++clock) {
      const auto distance = [&](Index row) { return std::abs(problem_.rows[row].clock - clock); };
      Index nearest = problem_.table_begin[t];
      // Of several the first, which is the fastest.
      for (Index row = nearest; row < problem_.table_begin[t + 1]; ++row) {
        const bool is_nearer = problem_.steady(row) && distance(row) < distance(nearest);
        if (!problem_.steady(nearest) || is_nearer) nearest = row;
      }
      row_at_.push_back(nearest);
    }
  }
}

// Tries paces: every stage at the lowest clock at which its operations take no longer in all.
void ConstantClocks::start_in_step() {
  std::vector<std::vector<Time>> work;  // (stages, clocks)
  std::vector<Time> paces;
  for (Index s = 0; s < problem_.num_stages; ++s) {
    work.push_back(work_by_clock(s));
    paces.insert(paces.end(), work.back().begin(), work.back().end());
  }
  std::sort(paces.begin(), paces.end());
  paces.erase(std::unique(paces.begin(), paces.end()), paces.end());
  const std::size_t stride = std::max<std::size_t>(1, paces.size() / kPaces);
  for (std::size_t q = 0; q < paces.size(); q += stride) {
    const auto keeps_up = [&](Time stage_work) { return stage_work <= paces[q]; };
    for (Index s = 0; s < problem_.num_stages; ++s) {
      auto clock = std::find_if(work[s].begin(), work[s].end(), keeps_up);
      if (clock == work[s].end()) clock = std::min_element(work[s].begin(), work[s].end());
      set_clock(s, static_cast<Index>(clock - work[s].begin()));
    }
    keep_if_better();
  }
  back_to_best();
}

// How long all operations of a stage take together at each clock, (clocks).
std::vector<Time> ConstantClocks::work_by_clock(Index stage) const {
  std::vector<Time> work(problem_.num_clocks, 0);
  for (Index m = problem_.stage_begin[stage]; m < problem_.stage_begin[stage + 1]; ++m) {
    const Index table = problem_.operations[problem_.number_of[m]].table;
    for (Index clock = 0; clock < problem_.num_clocks; ++clock) {
      work[clock] += problem_.rows[row_at(table, clock)].time;
    }
  }
  return work;
}

void ConstantClocks::best(Index* rows) const { replay_.chosen(rows); }

bool ConstantClocks::improve(Index stage) {
  bool is_better = false;
  for (Index clock = 0; clock < problem_.num_clocks; ++clock) {
    set_clock(stage, clock);
    is_better |= keep_if_better();
  }
  back_to_best();
  return is_better;
}

void ConstantClocks::set_clock(Index stage, Index clock) {
  for (Index m = problem_.stage_begin[stage]; m < problem_.stage_begin[stage + 1]; ++m) {
    const Index i = problem_.number_of[m];
    replay_.set_row(i, row_at(problem_.operations[i].table, clock));
  }
}

bool ConstantClocks::keep_if_better() {
  replay_.run();
  const Score now = score(limits_, replay_, energy_over(limits_, replay_), 0);
  if (!(now < best_score_)) return false;
  best_score_ = now;
  best_ = replay_.rows();
  return true;
}

void ConstantClocks::back_to_best() {
  for (Index i = 0; i < problem_.num_operations; ++i) replay_.set_row(i, best_[i]);
}

}  // namespace envplan
