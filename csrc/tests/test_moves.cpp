// Tests of moves.hpp, named by what moves promise. Exits non-zero if any check fails.
#include <algorithm>
#include <random>
#include <set>
#include <vector>

#include "../moves.hpp"
#include "check.hpp"
#include "problems.hpp"

namespace {

using namespace envplan;
using test::chain;
using test::Rows;

constexpr int kDraws = 20000;

Rows random_rows(const Problem& problem, std::mt19937* random) {
  Rows rows;
  for (const Problem::Operation& op : problem.operations) {
    rows.push_back(op.first_row + static_cast<Index>((*random)() % (op.end_row - op.first_row)));
  }
  return rows;
}

void make(const std::vector<Change>& changes, Rows* rows) {
  for (const auto& [operation, row] : changes) (*rows)[operation] = row;
}

// Operations and rows that there are, none twice, and none that stays as it is.
void check_contract(const Problem& problem, const Rows& rows, const std::vector<Change>& changes) {
  std::set<Index> named;
  for (const auto& [operation, row] : changes) {
    CHECK(operation >= 0 && operation < problem.num_operations);
    const Problem::Operation& op = problem.operations[operation];
    CHECK(row >= op.first_row && row < op.end_row);
    CHECK(row != rows[operation]);
    CHECK(named.insert(operation).second);
  }
}

void test_no_operation_is_named_twice_or_stays_as_it_is() {
  std::mt19937 random(1);
  for (const bool runs : {false, true}) {
    const Problem problem = test::random_shape(random).problem();
    Moves moves(problem, runs);
    Random draws(7);
    Rows rows = random_rows(problem, &random);
    for (int draw = 0; draw < kDraws; ++draw) {
      check_contract(problem, rows, moves.propose(rows, &draws));
      make(moves.changes(), &rows);
    }
  }
}

void test_no_operation_of_a_long_run_is_named_twice() {
  test::Shape shape = chain(3000);
  shape.time = {100, 150, 200};
  shape.power = {300, 200, 100};
  const Problem problem = shape.problem();
  Moves moves(problem, true);
  Random draws(7);
  const Rows rows(3000, 1);  // a clock may rise or fall
  for (int draw = 0; draw < kDraws; ++draw) {
    check_contract(problem, rows, moves.propose(rows, &draws));
  }
}

void test_every_choice_is_reached() {
  const Problem problem = chain(3).problem();
  for (const bool runs : {false, true}) {
    Moves moves(problem, runs);
    Random draws(3);
    Rows rows(3, 0);
    std::set<Rows> reached;
    for (int draw = 0; draw < 1000; ++draw) {
      make(moves.propose(rows, &draws), &rows);
      reached.insert(rows);
    }
    CHECK(reached.size() == 8);
  }
}

void test_operations_with_one_row_are_left_alone() {
  test::Shape shape = chain(3);
  shape.time = {100};
  shape.power = {300};
  const Problem problem = shape.problem();
  CHECK(Moves(problem, true).movable().empty());
}

void test_the_same_seed_gives_the_same_moves() {
  std::mt19937 random(2);
  const Problem problem = test::random_shape(random).problem();
  Rows one = random_rows(problem, &random), other = one;
  Moves moves_of_one(problem, true), moves_of_other(problem, true);
  Random draws_of_one(5), draws_of_other(5);
  for (int draw = 0; draw < kDraws; ++draw) {
    make(moves_of_one.propose(one, &draws_of_one), &one);
    make(moves_of_other.propose(other, &draws_of_other), &other);
  }
  CHECK(one == other);
}

// How many operations the largest move of many changes, from one clock for a whole stage.
std::size_t largest_move(Index size, bool runs) {
  const Problem problem = chain(size).problem();
  Moves moves(problem, runs);
  Random draws(1);
  const Rows rows(size, 0);
  std::size_t largest = 0;
  for (int draw = 0; draw < kDraws; ++draw) {
    largest = std::max(largest, moves.propose(rows, &draws).size());
  }
  return largest;
}

void test_a_run_changes_as_a_whole_up_to_a_length() {
  CHECK(largest_move(100, false) == 100);
  CHECK(largest_move(100, true) == 100);
  CHECK(largest_move(3000, true) == 1025);  // kLongestRun to each side
}

// From two runs of one clock each: a move that takes several operations at the end of the first run
// into the second one.
void test_the_border_between_two_runs_moves() {
  const Problem problem = chain(40).problem();
  Moves moves(problem, true);
  Random draws(1);
  Rows rows(40, 0);
  std::fill(rows.begin() + 20, rows.end(), 1);
  bool has_moved = false;
  for (int draw = 0; draw < kDraws; ++draw) {
    std::set<Index> named;
    for (const Change& change : moves.propose(rows, &draws)) named.insert(change.operation);
    const Index size = static_cast<Index>(named.size());
    has_moved |= size >= 5 && size < 20 && *named.begin() == 20 - size && *named.rbegin() == 19;
  }
  CHECK(has_moved);
}

}  // namespace

int main() {
  test_no_operation_is_named_twice_or_stays_as_it_is();
  test_no_operation_of_a_long_run_is_named_twice();
  test_every_choice_is_reached();
  test_operations_with_one_row_are_left_alone();
  test_the_same_seed_gives_the_same_moves();
  test_a_run_changes_as_a_whole_up_to_a_length();
  test_the_border_between_two_runs_moves();
  return test::summary("moves");
}
