"""Plans whose clocks change seldom, for next to no energy.

Many plans cost nearly the same, and most of them change clocks at every operation. Every change
less is a clock that cannot be late and a call that cannot disturb anything else. So, among plans
that stay within an allowance of energy, the one with the fewest changes is looked for: annealing
(csrc/annealing.hpp) in which a change has a price. The price rises while the energy stays within
its allowance, and falls while it does not, so that what comes out uses about all of it. Where few
changes are left, annealings that keep to the allowance follow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from envplan.frontier import Relaxation
from envplan.replay import Replay, Rows, Search
from envplan.replay.window import GivenTimes, Window, tails_ns
from envplan.request.request import ChangePolicy
from envplan.units import in_10fj, ns_from_s

#: Energy that fewer changes may cost at most: one part in so many of the least found.
ENERGY_PER_ALLOWANCE: Final = 1000
#: Annealings one after the other, each from the result of the one before.
_TEMPERATURES: Final = (1.0, 0.5, 0.5)
#: One longer annealing besides, from the first rows again.
_LONG_TEMPERATURE: Final = 2.0
_LONG_MOVES_SHARE: Final = 3.0
_LONG_SEED: Final = len(_TEMPERATURES)
#: Some from the best of these, which keep to the allowance and find what lies close by. They are
#: of use where most changes are gone: at most one in so many operations is left.
_OPERATIONS_PER_CHANGE: Final = 8
_STRICT_TEMPERATURES: Final = (0.25, 0.25, 0.25, 0.25)
_MOVES_PER_OPERATION: Final = 200
_MAX_MOVES: Final = 150_000  # of an annealing
_MAX_WORK: Final = 10**8  # moves x operations: a move may replay them all
#: The first price of a change, in what one may cost if all changes together use the allowance.
_FIRST_PRICE: Final = 15
#: Longer pipelines are searched in windows of so many operations.
WINDOW_OPERATIONS: Final = 512
_WINDOW_MOVES_SHARE: Final = 0.6  # of the usual moves

#: Makes a search from the price of a change, 10 fJ, and the energy allowed, 10 fJ.
SearchMaker = Callable[[int, int], Search]


@dataclass(frozen=True)
class ChangeWeight:
    """How changes of clock weigh against energy.

    Attributes:
        policy: `fewest`: as few as can be for 0.1% of energy; `free`: they count for nothing.
        cost_j: of a change, J of one GPU; above 0 it counts in place of the policy.
        stall_s: for which a change stops its GPU, which draws blocking power then; likewise.
    """

    policy: ChangePolicy = "fewest"
    cost_j: float = 0.0
    stall_s: float = 0.0

    def price_10fj(self, blocking_10uw: Sequence[int]) -> int:
        """What a change costs on average over the stages, 10 fJ.

        Args:
            blocking_10uw: what a waiting GPU draws on each stage, 10 uW.
        """
        mean_10uw = sum(blocking_10uw) // len(blocking_10uw)
        return in_10fj(self.cost_j) + ns_from_s(self.stall_s) * mean_10uw

    @property
    def is_priced(self) -> bool:
        """Whether a change has a price that was asked for."""
        return self.cost_j > 0 or self.stall_s > 0

    @property
    def is_fewest(self) -> bool:
        """Whether there are to be as few as can be for next to no energy."""
        return self.policy == "fewest" and not self.is_priced


#: Changes that count for nothing.
FREE_CHANGES: Final = ChangeWeight("free")


def num_moves(num_operations: int, share: float = 1.0) -> int:
    """How many moves an annealing for fewer changes tries."""
    wanted = min(num_operations * _MOVES_PER_OPERATION, _MAX_MOVES)
    return max(1, int(min(wanted, _MAX_WORK / num_operations) * share))


def with_fewest_changes(
    make_search: SearchMaker,
    rows: Rows,
    *,
    spared_10fj: int,
    allowance_10fj: int,
    moves: int,
    is_thorough: bool = True,
) -> Rows:
    """The rows with the fewest changes found that use no more than an allowance.

    Args:
        make_search: for the deadline and the limits.
        rows: to start from; they keep the limits, int32 (N,).
        spared_10fj: the allowance less what the rows use.
        allowance_10fj: energy that the result may use.
        moves: of an annealing.
        is_thorough: goes on after an annealing that brought nothing, tries a longer one, too, and
            may end with some that keep to the allowance.
    """
    judge = make_search(0, allowance_10fj)
    changes = judge.score(rows).changes

    def improved(
        start: Rows, temperature: float, seed: int, share: float = 1.0, is_strict: bool = False
    ) -> Rows:
        changes = judge.score(start).changes
        if changes == 0:
            return start
        search = make_search(_FIRST_PRICE * max(0, spared_10fj) // changes, allowance_10fj)
        return search.improve(
            start, int(moves * share), temperature, seed, strict_allowance=is_strict
        )

    if changes == 0:
        return rows
    stepwise = rows
    for seed, temperature in enumerate(_TEMPERATURES):
        start = stepwise
        stepwise = improved(start, temperature, seed)
        is_better = judge.score(stepwise).changes < judge.score(start).changes
        if not is_better and not is_thorough:
            break
    if not is_thorough:
        return stepwise
    at_once = improved(rows, _LONG_TEMPERATURE, _LONG_SEED, _LONG_MOVES_SHARE)
    best = min(stepwise, at_once, key=judge.score)
    if judge.score(best).changes > len(rows) // _OPERATIONS_PER_CHANGE:
        return best
    for seed, temperature in enumerate(_STRICT_TEMPERATURES):
        best = improved(best, temperature, seed, is_strict=True)
    return best


def with_priced_changes(search: Search, starts: Sequence[Rows], moves: int) -> Rows:
    """The rows found whose energy and price of changes are least together.

    Args:
        search: that knows the price.
        starts: the best of them is annealed.
        moves: of an annealing.
    """
    rows = min(starts, key=search.score)
    for seed, temperature in enumerate(_TEMPERATURES):
        rows = search.improve(rows, moves, temperature, seed)
    return rows


def with_fewest_changes_by_windows(
    frontier: Relaxation,
    replay: Replay,
    deadline_ns: int,
    *,
    price_10uw: int,
    spared_10fj: int,
    moves_share: float,
) -> Rows:
    """The same for a long pipeline, window by window from the beginning on.

    Clocks follow at once, and nothing but the time is limited. A window's share of the energy that
    may be spent is that of its operations; what it does not use, the next one may.

    Args:
        frontier: of the pipeline.
        replay: of the rows to start from.
        deadline_ns: beyond T_star everybody waits until then.
        price_10uw: of a ns late.
        spared_10fj: energy that fewer changes may cost.
        moves_share: of the usual moves.
    """
    problem = frontier.problem
    rows, finishes_ns = replay.rows.copy(), replay.finishes_ns.copy()
    tails = tails_ns(replay)
    position = np.argsort(problem.pipeline.order)
    by_start = np.lexsort((position, replay.starts_ns))
    rank = np.argsort(by_start)
    num_windows = -(-len(rows) // WINDOW_OPERATIONS)
    waits = deadline_ns > frontier.min_energy_time_ns
    left_10fj = 0
    for members in np.array_split(by_start, num_windows):
        inside = np.zeros(len(rows), bool)
        inside[members] = True
        window = Window(problem, rows, inside, GivenTimes(finishes_ns, tails, rank))

        def search(price_10fj: int, allowance_10fj: int, window: Window = window) -> Search:
            return window.search(
                deadline_ns,
                price_10uw=price_10uw,
                waits=waits,
                price_10fj=price_10fj,
                allowance_10fj=allowance_10fj,
            )

        left_10fj += spared_10fj // num_windows
        before_10fj = search(0, 0).score(window.rows).energy_10fj
        improved = with_fewest_changes(
            search,
            window.rows,
            spared_10fj=left_10fj,
            allowance_10fj=before_10fj + left_10fj,
            moves=num_moves(len(window.rows), moves_share * _WINDOW_MOVES_SHARE),
            is_thorough=False,
        )
        left_10fj -= search(0, 0).score(improved).energy_10fj - before_10fj
        rows[window.changeable] = window.rows_of_changeable(improved)
        finishes_ns[window.changeable] = window.finishes_ns(improved)
    return rows
