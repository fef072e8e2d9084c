"""Choices of rows under a cap on the power of all GPUs at every moment.

Under a cap at every moment no efficient exact method is known: scheduling under a cap on a shared
resource is NP-hard. The way here is to give operations power limits of their own and to plan as
ever with the options that these leave: the frontier of what is left is exact, and its plans are
rounded as all plans are.

Limits start at one level for all: each operation may use the same share of the span between its
thriftiest and its hungriest option. Then they are repaired: wherever the replay is over the cap,
those operations that run there are slowed down, the one first that costs least for each watt it
saves, at the price of time that the dual solution puts on it (its flow), and what is left is
planned anew, until nothing is over the cap. The search in local_search.py goes on from there.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from envplan.frontier import Relaxation, build_network
from envplan.frontier.start import Start
from envplan.replay import Machine, Replay, Rows
from envplan.solve.rounding import Rounding
from envplan.units import w_from_uw

_ROUNDS: Final = 8  # of repair; one to four do, as a rule
_LEVELS: Final = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0)
#: With more operations than this, fewer levels are tried.
_FEW_OPERATIONS: Final = 512
_BEST: Final = 2  # of the levels' plans, to go on from
_HEATS: Final = (0.5, 0.1)

Limits = NDArray[np.int64]


class PowerLimited:
    """Choices of one frontier under one cap.

    Args:
        cap_uw: most power of one GPU a stage together, uW.
    """

    def __init__(self, frontier: Relaxation, machine: Machine, cap_uw: int) -> None:
        self._frontier = frontier
        self._machine = machine
        self._cap_uw = cap_uw
        problem = frontier.problem
        self._powers = [table.peak_uw for table in problem.tables]
        ends = np.array([(one.min(), one.max(), one.argmin()) for one in self._powers], np.int64)
        self._least, self._most, row = ends[problem.table].T
        #: For each operation its row of least power, (N,).
        self.thriftiest: Rows = row.astype(np.int32)
        self._waiting = problem.blocking_power_uw[problem.stage]
        self._levels = _LEVELS[:: 1 + len(problem.table) // _FEW_OPERATIONS]

    def by(self, deadline_ns: int | None) -> list[Rows]:
        """The best rows found under the cap that end by a deadline, ns; None: as fast as can be."""
        found: list[tuple[int, int, Rows]] = []
        for level in self._levels:
            rows = self._repaired(level, deadline_ns)
            if rows is not None:
                replay = self._frontier.problem.replay(rows, self._machine)
                key = (replay.makespan_ns, replay.energy_fj)
                found.append((*(key if deadline_ns is None else key[::-1]), rows))
        found.sort(key=lambda one: one[:2])
        return [rows for _, _, rows in found[:_BEST]] or [self.thriftiest]

    def refusal(self, replay: Replay) -> str:
        """Why there is no plan, given the replay that draws least of those found."""
        gpus = self._frontier.num_gpus
        thriftiest = self._frontier.problem.replay(self.thriftiest, self._machine)
        least_w = w_from_uw(min(replay.peak_uw, thriftiest.peak_uw) * gpus)
        return (
            f"no plan was found that stays under {float(w_from_uw(self._cap_uw * gpus)):.6g} W; "
            f"the least peak found is {least_w:.10g} W, and none can be below "
            f"{w_from_uw(self.least_peak_uw * gpus):.10g} W"
        )

    @property
    def least_peak_uw(self) -> int:
        """A power that every plan reaches at some moment, uW, of one GPU a stage together.

        At some moment of an operation it draws at least the most power of its thriftiest option,
        and every other stage then draws at least its blocking power or the least power of any of
        its options.
        """
        problem = self._frontier.problem
        floors = np.array([table.segments.power_uw.min() for table in problem.tables], np.int64)
        highest, floor = np.zeros_like(problem.blocking_power_uw), problem.blocking_power_uw.copy()
        np.maximum.at(highest, problem.stage, self._least)
        np.minimum.at(floor, problem.stage, floors[problem.table])
        return int((floor.sum() - floor + highest).max())

    def _repaired(self, level: float, deadline_ns: int | None) -> Rows | None:
        """The rows of a level once its limits are repaired; None where there are none in time."""
        limits = self._least + (level * (self._most - self._least)).astype(np.int64)
        for _ in range(_ROUNDS):
            planned = self._planned(limits, deadline_ns)
            if planned is None:
                return None
            rows, price_uw = planned
            replay = self._frontier.problem.replay(rows)
            if replay.peak_uw <= self._cap_uw:
                return rows
            if not self._tighten(limits, replay, price_uw):
                return None
        return None

    def _planned(
        self, limits: Limits, deadline_ns: int | None
    ) -> tuple[Rows, NDArray[np.int64]] | None:
        """The rows for a deadline with what the limits leave, and what a ns less for each operation
        is worth, fJ / ns, (N,); None if that is too slow."""
        frontier = self._frontier
        pipeline, profile = frontier.pipeline, frontier.profile
        powers = frontier.blocking_power_uw
        network = build_network(pipeline, profile, powers, limits.tolist())
        least_ns = network.trace().min_time
        time_ns = least_ns if deadline_ns is None else deadline_ns
        if time_ns < least_ns:
            return None
        trace = Start(pipeline, profile, powers, network).at_flow(sum(powers))
        trace.run(sum(powers), until=time_ns)
        times, _, _ = trace.breakpoints()
        time_ns = min(time_ns, int(times[0]))
        events, flows = trace.state_at(time_ns)
        rounding = Rounding(pipeline, network, events, time_ns)
        rounding.anneal(_HEATS)
        return rounding.rows, flows[: len(limits)]

    def _tighten(self, limits: Limits, replay: Replay, price_uw: NDArray[np.int64]) -> bool:
        """Lower the limits of operations where power is over the cap; whether any could be."""
        problem, chosen, tightened = self._frontier.problem, replay.rows.copy(), False
        times_ns, drawn_uw = replay.power_steps
        over = np.flatnonzero(drawn_uw > self._cap_uw)
        for k in over[np.argsort(-drawn_uw[over], kind="stable")].tolist():
            at = times_ns[k]
            running = np.flatnonzero((replay.starts_ns <= at) & (at < replay.finishes_ns))
            first = problem.first_row[running]
            was, now = (problem.power_uw[first + one[running]] for one in (replay.rows, chosen))
            excess = int(drawn_uw[k]) - self._cap_uw - int((was - now).sum())
            while excess > 0:
                step = self._cheapest_step(running, chosen, price_uw, excess)
                if step is None:
                    break
                i, row = step
                powers = self._powers[problem.table[i]]
                excess -= int(powers[chosen[i]] - powers[row])
                chosen[i], limits[i] = row, int(powers[row])
                tightened = True
        return tightened

    def _cheapest_step(
        self, running: NDArray[np.int64], chosen: Rows, price_uw: NDArray[np.int64], excess: int
    ) -> tuple[int, int] | None:
        """The operation, and its row of less power, that cost least for each uW saved."""
        problem = self._frontier.problem
        best: tuple[float, int, int] | None = None
        for i in running.tolist():
            table, row = problem.tables[problem.table[i]], int(chosen[i])
            powers = self._powers[problem.table[i]]
            saved = (powers[row] - powers).astype(np.float64)
            if saved.max() <= 0:
                continue
            slower = (table.time_ns - table.time_ns[row]).astype(np.float64)
            dearer = (table.energy_fj - table.energy_fj[row]).astype(np.float64)
            price = float(price_uw[i] - self._waiting[i])
            cost = np.maximum(dearer + price * slower, 0.0) + 1.0
            ratio = np.where(saved > 0, cost / np.clip(saved, 1.0, excess), np.inf)
            k = int(np.argmin(ratio))
            if best is None or ratio[k] < best[0]:
                best = float(ratio[k]), i, k
        return None if best is None else best[1:]
