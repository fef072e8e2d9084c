// Search for the rows of least energy that keep to local limits.
//
// Problem. Choose a row for each operation (replay.hpp) so that the replay ends by a deadline, no
// stage asks for clocks too soon after each other, power stays under a cap, and energy is least.
//
// Idea. Every limit has a price, and the excess of a choice is what it owes for breaking them:
//   excess = price * (lateness + shortage of min_dwell) + energy above the cap   (10 fJ).
// Annealing (Kirkpatrick et al. 1983) minimizes energy + g * excess, where g grows from 1 to 16,
// so that by the end no choice with any excess is worth keeping. Every move is replayed exactly.
// What comes out is the best choice seen: of least excess, and among those of least energy.
// Requests for another clock may have a price, which then counts as energy. Or there is an
// allowance of energy, within which fewer requests are better: then their price is adjusted on the
// way, so that the energy of the choice stays near the allowance: it goes above, and may end there.
// Or the allowance is strict: that price is fixed, and energy above the allowance has one as well.
//
// Arithmetic: scores are exact integers, and equal to those of a replay from the start. Only
// temperatures, and so whether a move is taken, are floating point.
//
// Deterministic: results depend on the arguments only. Long searches are cut into pieces of work,
// so that the caller can stop between two.
#pragma once

#include <cstdint>
#include <vector>

#include "clock_changes.hpp"
#include "moves.hpp"
#include "random.hpp"
#include "replay.hpp"

namespace envplan {

// Ranges: the machine's latency, deadline and min_dwell as for Replay; price in [0, kMostPower], so
// that an excess stays below 2^126.
struct Limits {
  Machine machine;
  Time deadline;
  Time min_dwell;  // least time between two requests of a stage, ns; 0: none
  Power peak;      // cap on the power of one GPU a stage together, 10 uW; negative: none
  // Energy is that used until the deadline, when everybody has waited, not until the makespan.
  bool waits;
  Power price;                    // what a ns late, or of shortage, costs, 10 uW
  std::int64_t change_price = 0;  // what a request for another clock costs, 10 fJ
  // Rows that use no more than this are the better the fewer requests they make; negative: energy
  // and price of changes count together.
  Energy allowance = -1;
};

struct Score {
  Energy excess = 0, energy = 0;  // 10 fJ
  Time late = 0, shortage = 0;    // ns
  Energy over = 0;                // energy above the cap, 10 fJ
  Index changes = 0;              // requests for another clock
  Energy cost = 0;                // what is compared where there is no excess, 10 fJ

  bool operator<(const Score& other) const {
    if (excess != other.excess) return excess < other.excess;
    return cost != other.cost ? cost < other.cost : energy < other.energy;
  }
};

// Of a replay whose energy above the cap and requests are known.
Score score(const Limits& limits, const Replay& replay, Energy over, Index changes);
// Of rows, one an operation, in the caller's numbering. Throws std::invalid_argument where a limit
// is out of range or there is no such row; so do both searches below.
Score score(const Problem& problem, const Limits& limits, const Index* rows);

// Anneals from rows in the caller's numbering. `heat` is the first temperature in units of the mean
// cost between neighbouring rows: 4 forgets the start, 0.25 refines; 0 descends, at g = 16. The
// problem must outlive this.
class Annealing {
 public:
  Annealing(const Problem& problem, const Limits& limits, const Index* rows, std::int64_t moves,
            double heat, std::uint64_t seed, bool strict_allowance = false);

  // About `work` replays of an operation more. Returns whether there are moves left.
  bool run(std::uint64_t work);

  const Score& best_score() const { return best_score_; }
  void best(Index* rows) const;

 private:
  double mean_step() const;
  void step();
  bool is_hopeless(double most) const;
  bool attempt(double most);
  double growth_since(const Score& before) const;
  double above_allowance(const Score& score) const;
  void adjust_change_price();

  const Problem& problem_;
  const Limits limits_;
  Replay replay_;
  ClockChanges changes_;
  Moves moves_;
  Random random_;
  std::vector<Time> tail_;
  std::vector<Index> best_;
  Score score_, best_score_;
  const std::int64_t num_moves_;
  const bool strict_allowance_;
  std::int64_t move_ = 0, accepted_ = 0;
  double heat_, first_temperature_, temperature_, cooling_, pricing_ = 1, dearer_;
  double change_price_;
};

// Looks for one clock for each stage by descent. The problem must outlive this.
class ConstantClocks {
 public:
  // Begins with all stages in step: of all paces the best, every stage at the slowest clock that
  // keeps up.
  ConstantClocks(const Problem& problem, const Limits& limits);

  // Tries every clock on one stage; whether that got better.
  bool improve(Index stage);

  void best(Index* rows) const;

 private:
  void fill_row_at();
  void start_in_step();
  std::vector<Time> work_by_clock(Index stage) const;
  Index row_at(Index table, Index clock) const {
    return row_at_[static_cast<std::int64_t>(table) * problem_.num_clocks + clock];
  }
  void set_clock(Index stage, Index clock);
  bool keep_if_better();
  void back_to_best();

  const Problem& problem_;
  const Limits limits_;
  Replay replay_;
  std::vector<Index> row_at_;  // (tables * clocks) the row of each table nearest to each clock
  std::vector<Index> best_;
  Score best_score_;
};

}  // namespace envplan
