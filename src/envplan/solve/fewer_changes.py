"""Plans whose clocks change seldom, for next to no energy.

Many plans cost nearly the same, and most of them change clocks at every operation. Every change
less is a clock that cannot be late and a call that cannot disturb anything else. So, of plans that
use at most 0.1% more than the best one found, that with the fewest changes is looked for: annealing
(csrc/annealing.hpp) in which a change has a price. The price rises while the energy stays within
its allowance, and falls while it does not, so that what comes out uses about all of it.
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
from envplan.units import fj_from_j, ns_from_s

#: Energy that fewer changes may cost, as a part of it: one in so many.
_ENERGY_PER_TOLERANCE: Final = 1100
#: Energy between the deadlines that such plans are made for, as a part of it; and where there are
#: more operations than so many.
_STEP_SHARE: Final = 5e-4
_STEP_SHARE_IF_LONG: Final = 1e-3
_LONG: Final = 8192
#: First temperatures of annealings, each from the result of the one before, and their moves.
_TEMPERATURES: Final = (1.0, 0.5, 0.5, 0.5)
_MOVES_PER_OPERATION: Final = 200
_MAX_MOVES: Final = 150_000  # of a pass
#: The first price of a change, in what one may cost if all changes together use the allowance.
_FIRST_PRICE: Final = 15
#: Longer pipelines are searched in windows of so many operations.
_WINDOW: Final = 512
#: What a ns late costs, in what a ns saves at the deadline.
_LATENESS_PRICE: Final = 1.1


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

    def price_fj(self, blocking_uw: Sequence[int]) -> int:
        """What a change costs on average over the stages, fJ.

        Args:
            blocking_uw: what a waiting GPU draws on each stage, uW.
        """
        mean_uw = sum(blocking_uw) // len(blocking_uw)
        return fj_from_j(self.cost_j) + ns_from_s(self.stall_s) * mean_uw

    @property
    def is_priced(self) -> bool:
        """Whether a change has a price that was asked for."""
        return self.cost_j > 0 or self.stall_s > 0

    @property
    def is_fewest(self) -> bool:
        """Whether there are to be as few as can be for next to no energy."""
        return self.policy == "fewest" and not self.is_priced


def step_share(num_operations: int) -> float:
    """Energy from one deadline to the next that plans are made for, as a part of it."""
    return _STEP_SHARE if num_operations <= _LONG else _STEP_SHARE_IF_LONG


#: Changes that count for nothing.
FREE_CHANGES: Final = ChangeWeight("free")


class FewerChanges:
    """Makes changes of clock fewer where clocks follow at once, and nothing is limited.

    Args:
        frontier: of the pipeline.
        replay: of a choice in time.
        deadline_ns: that it is made for; beyond T_star everybody waits until then.
        weight: of changes against energy.
        others: rows to start from instead, where they have few changes already.
        moves_share: of the usual moves.
    """

    def __init__(
        self,
        frontier: Relaxation,
        replay: Replay,
        deadline_ns: int,
        weight: ChangeWeight,
        *,
        others: Sequence[Rows] = (),
        moves_share: float = 1.0,
    ) -> None:
        self._weight = weight
        self._others = others
        self._problem = frontier.problem
        self._replay = replay
        self._deadline_ns = deadline_ns
        self._waits = deadline_ns > frontier.min_energy_time_ns
        self._price_uw = max(1, int(_LATENESS_PRICE * frontier.slope_uw(deadline_ns)))
        num_operations = len(replay.rows)
        moves = min(num_operations * _MOVES_PER_OPERATION, _MAX_MOVES) * moves_share
        self._moves_per_operation = moves / num_operations

    def rows(self, spared_fj: int | None = None) -> Rows:
        """The rows found: with the fewest changes, or of the least energy and price of changes.

        Args:
            spared_fj: energy that fewer changes may cost at most; None: 0.1%.
        """
        if self._weight.is_priced:
            return self._priced()
        replay = self._replay
        energy_fj = replay.energy_until(self._deadline_ns) if self._waits else replay.energy_fj
        if spared_fj is None:
            spared_fj = energy_fj // _ENERGY_PER_TOLERANCE
        search = self._search(0, energy_fj + spared_fj)
        rows = min([replay.rows, *self._others], key=search.score)
        if rows is replay.rows and len(rows) > _WINDOW:
            return self._fewest_by_windows(spared_fj)
        return self._improved(self._search, rows, spared_fj, energy_fj + spared_fj)

    def _priced(self) -> Rows:
        price_fj = self._weight.price_fj(self._problem.blocking_power_uw.tolist())
        search = self._search(price_fj, None)
        rows = min([self._replay.rows, *self._others], key=search.score)
        for seed, temperature in enumerate(_TEMPERATURES):
            rows = search.improve(rows, self._num_moves(len(rows)), temperature, seed)
        return rows

    def _search(self, price_fj: int, allowance_fj: int | None) -> Search:
        return Search(
            self._problem,
            self._replay.starts_ns,
            self._deadline_ns,
            price_uw=self._price_uw,
            waits=self._waits,
            change_price_fj=price_fj,
            allowance_fj=allowance_fj,
        )

    def _num_moves(self, num_operations: int) -> int:
        return max(1, int(num_operations * self._moves_per_operation))

    def _improved(
        self,
        make_search: Callable[[int, int], Search],
        rows: Rows,
        spared_fj: int,
        allowance_fj: int,
    ) -> Rows:
        """Rows with fewer changes, by annealings one after the other."""
        moves = self._num_moves(len(rows))
        changes = make_search(0, allowance_fj).score(rows).changes
        for seed, temperature in enumerate(_TEMPERATURES):
            if changes == 0:
                break
            search = make_search(_FIRST_PRICE * max(0, spared_fj) // changes, allowance_fj)
            rows = search.improve(rows, moves, temperature, seed)
            changes = search.score(rows).changes
        return rows

    def _fewest_by_windows(self, spared_fj: int) -> Rows:
        """Rows with fewer changes, found window by window from the beginning on.

        A window's share of the energy that may be spent is that of its operations; what it does
        not use, the next one may.
        """
        rows = self._replay.rows.copy()
        finishes_ns, tails = self._replay.finishes_ns.copy(), tails_ns(self._replay)
        position = np.argsort(self._problem.pipeline.order)
        by_start = np.lexsort((position, self._replay.starts_ns))
        rank = np.argsort(by_start)
        num_windows = -(-len(rows) // _WINDOW)
        left_fj = 0
        for members in np.array_split(by_start, num_windows):
            inside = np.zeros(len(rows), bool)
            inside[members] = True
            window = Window(self._problem, rows, inside, GivenTimes(finishes_ns, tails, rank))

            def search(price_fj: int, allowance_fj: int, window: Window = window) -> Search:
                return window.search(
                    self._deadline_ns,
                    price_uw=self._price_uw,
                    waits=self._waits,
                    price_fj=price_fj,
                    allowance_fj=allowance_fj,
                )

            left_fj += spared_fj // num_windows
            before_fj = search(0, 0).score(window.rows).energy_fj
            improved = self._improved(search, window.rows, left_fj, before_fj + left_fj)
            left_fj -= search(0, 0).score(improved).energy_fj - before_fj
            rows[window.changeable] = window.rows_of_changeable(improved)
            finishes_ns[window.changeable] = window.finishes_ns(improved)
        return rows
