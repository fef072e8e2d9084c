"""Choices of rows under a cap on the power of all GPUs at every moment.

No efficient exact method is known: scheduling under a cap on a shared resource is NP-hard. The way
here is to give all operations power limits at one level, the same share of the span between each
one's thriftiest and its hungriest option, and to plan as ever with the options that these leave:
the frontier of what is left is exact, and its plans are rounded as all plans are. The highest level
whose plan stays under the cap is found by bisection. The search in local_search.py goes on from
there.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from envplan.frontier import Relaxation, build_network
from envplan.frontier.start import Start
from envplan.replay import Machine, Replay, Rows
from envplan.solve.rounding import Rounding
from envplan.units import w_from_uw

_STEPS: Final = 7  # of the bisection
_BEST: Final = 4  # of the plans found, to go on from
_HEATS: Final = (0.5, 0.1)


class PowerLimited:
    """Choices of one frontier under one cap.

    Args:
        cap_uw: most power of one GPU a stage together, uW.
    """

    def __init__(self, frontier: Relaxation, machine: Machine, cap_uw: int) -> None:
        self._frontier = frontier
        self._machine = machine
        self._cap_uw = cap_uw
        powers = [table.peak_uw for table in frontier.problem.tables]
        ends = np.array([(one.min(), one.max(), one.argmin()) for one in powers], np.int64)
        self._least, self._most, row = ends[frontier.problem.table].T
        #: For each operation its row of least power, (N,).
        self.thriftiest: Rows = row.astype(np.int32)

    def by(self, deadline_ns: int | None) -> list[Rows]:
        """The best rows found under the cap that end by a deadline, ns; None: as fast as can be."""
        low, high, found = 0.0, 1.0, list[Rows]()
        for _ in range(_STEPS):
            level = (low + high) / 2
            rows = self._planned(level, deadline_ns)
            if rows is not None and self._frontier.problem.replay(rows).peak_uw > self._cap_uw:
                high = level
            else:
                low = level
                found += [] if rows is None else [rows]
        return found[-_BEST:] or [self.thriftiest]

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
        floors = np.array([table.slices.power_uw.min() for table in problem.tables], np.int64)
        highest, floor = np.zeros_like(problem.blocking_power_uw), problem.blocking_power_uw.copy()
        np.maximum.at(highest, problem.stage, self._least)
        np.minimum.at(floor, problem.stage, floors[problem.table])
        return int((floor.sum() - floor + highest).max())

    def _planned(self, level: float, deadline_ns: int | None) -> Rows | None:
        """The rows for a deadline with what a level leaves; None if that is too slow."""
        frontier = self._frontier
        pipeline, profile = frontier.pipeline, frontier.profile
        powers = frontier.blocking_power_uw
        limits = self._least + (level * (self._most - self._least)).astype(np.int64)
        network = build_network(pipeline, profile, powers, limits.tolist())
        least_ns = network.trace().min_time
        time_ns = least_ns if deadline_ns is None else deadline_ns
        if time_ns < least_ns:
            return None
        trace = Start(pipeline, profile, powers, network).at_flow(sum(powers))
        trace.run(sum(powers), until=time_ns)
        times, _, _ = trace.breakpoints()
        time_ns = min(time_ns, int(times[0]))
        rounding = Rounding(pipeline, network, trace.state_at(time_ns)[0], time_ns)
        rounding.anneal(_HEATS)
        return rounding.rows
