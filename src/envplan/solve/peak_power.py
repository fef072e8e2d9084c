"""Choices under a cap on the power of all GPUs at every moment.

No efficient exact method is known: scheduling under a cap on a shared resource is NP-hard. The way
here is to give operations power limits of their own and to plan as ever with the options that these
leave: the frontier of what is left is exact, and its plans are rounded as all plans are.

Limits start at one level for all: each operation may use the same share of the span between its
options of least and of most power. Then they are repaired: wherever the replay is over the cap,
those operations that run there are slowed down, the one first that costs least for each watt it
saves, at the price of time that the dual solution puts on it (its flow), and what is left is
planned anew, until nothing is over the cap. The search in local_search.py goes on from there.

Prices of time are in uW, for 1 uW is 1 fJ a ns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from envplan.frontier import Relaxation, build_network
from envplan.frontier.warm_starts import WarmStarts
from envplan.replay import Machine, Replay, Rows
from envplan.solve.rounding import Rounding
from envplan.units import w_from_uw

_MAX_REPAIRS: Final = 8  # one to four do, as a rule
_LEVELS: Final = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0)
#: With more operations than this, fewer levels are tried.
_OPERATIONS_FOR_ALL_LEVELS: Final = 512
_MAX_STARTING_POINTS: Final = 2
_TEMPERATURES: Final = (0.5, 0.1)

IntArray = NDArray[np.int64]


class _RelaxedChoice(NamedTuple):
    """The rounded relaxed optimum of a deadline.

    Attributes:
        choice: option indices, int32 (N,).
        price_uw: what a ns less for each operation is worth, int64 (N,).
    """

    choice: Rows
    price_uw: IntArray


class _Slowdown(NamedTuple):
    """An option of less power for an operation.

    Attributes:
        cost_per_uw: effective cost for each uW saved, fJ / uW.
    """

    cost_per_uw: float
    operation: int
    option: int


class PeakPowerHeuristic:
    """Choices of one frontier under one cap.

    Args:
        frontier: of the pipeline without the cap.
        machine: how clocks follow requests.
        cap_uw: most power of one GPU a stage together, uW.

    Attributes:
        least_power_choice: for each operation its option of least power, int32 (N,).
    """

    def __init__(self, frontier: Relaxation, machine: Machine, cap_uw: int) -> None:
        self._frontier = frontier
        self._machine = machine
        self._cap_uw = cap_uw
        problem = frontier.problem
        #: The most that each option of each table draws, uW.
        self._option_powers_uw = [table.peak_uw for table in problem.tables]
        least_uw = np.array([powers.min() for powers in self._option_powers_uw], np.int64)
        most_uw = np.array([powers.max() for powers in self._option_powers_uw], np.int64)
        least_options = np.array([powers.argmin() for powers in self._option_powers_uw], np.int32)
        self._least_uw = least_uw[problem.table]
        self._most_uw = most_uw[problem.table]
        self.least_power_choice: Rows = least_options[problem.table]
        self._waiting_uw = problem.blocking_power_uw[problem.stage]
        self._levels = _LEVELS[:: 1 + len(problem.table) // _OPERATIONS_FOR_ALL_LEVELS]

    def cheapest_choices(self, deadline_ns: int) -> list[Rows]:
        """The choices of least energy found under the cap for a deadline, ns.

        The one of least power, which may be late, where none was found.
        """
        replays = self._replays_under_cap(deadline_ns)
        replays.sort(key=lambda replay: (replay.energy_fj, replay.makespan_ns))
        return self._best_choices(replays)

    def fastest_choices(self) -> list[Rows]:
        """The fastest choices found under the cap; the one of least power where none was found."""
        replays = self._replays_under_cap(None)
        replays.sort(key=lambda replay: (replay.makespan_ns, replay.energy_fj))
        return self._best_choices(replays)

    def _best_choices(self, replays: Sequence[Replay]) -> list[Rows]:
        """The choices of the first few replays; that of least power where there are none."""
        choices = [replay.rows for replay in replays[:_MAX_STARTING_POINTS]]
        return choices or [self.least_power_choice]

    def refusal(self, replay: Replay) -> str:
        """Why there is no plan, in words.

        Args:
            replay: that draws least of those found.
        """
        num_gpus = self._frontier.num_gpus
        least_power = self._frontier.problem.replay(self.least_power_choice, self._machine)
        least_w = w_from_uw(min(replay.peak_uw, least_power.peak_uw) * num_gpus)
        return (
            f"no plan was found that stays under {float(w_from_uw(self._cap_uw * num_gpus)):.6g} "
            f"W; the least peak found is {least_w:.10g} W, and none can be below "
            f"{w_from_uw(self.least_peak_uw * num_gpus):.10g} W"
        )

    @property
    def least_peak_uw(self) -> int:
        """A power that every plan reaches at some moment, uW, of one GPU a stage together.

        At some moment of an operation it draws at least the peak of its option of least power,
        and every other stage then draws at least its blocking power or the least power of any of
        its options.
        """
        problem = self._frontier.problem
        table_floor_uw = np.array(
            [table.segments.power_uw.min() for table in problem.tables], np.int64
        )
        stage_floor_uw = problem.blocking_power_uw.copy()
        np.minimum.at(stage_floor_uw, problem.stage, table_floor_uw[problem.table])
        stage_peak_uw = np.zeros_like(problem.blocking_power_uw)
        np.maximum.at(stage_peak_uw, problem.stage, self._least_uw)
        other_stages_uw = stage_floor_uw.sum() - stage_floor_uw
        return int((other_stages_uw + stage_peak_uw).max())

    def _replays_under_cap(self, deadline_ns: int | None) -> list[Replay]:
        """One replay for each level whose limits could be repaired; None: as fast as can be."""
        replays = []
        for level in self._levels:
            choice = self._repaired(level, deadline_ns)
            if choice is not None:
                replays.append(self._frontier.problem.replay(choice, self._machine))
        return replays

    def _repaired(self, level: float, deadline_ns: int | None) -> Rows | None:
        """Plan, replay, and tighten the limits of a level until nothing is over the cap.

        Returns:
            The choice; None where there is none in time, or after too many repairs.
        """
        span_uw = self._most_uw - self._least_uw
        limits_uw = self._least_uw + (level * span_uw).astype(np.int64)
        for _ in range(_MAX_REPAIRS):
            relaxed = self._plan_within(limits_uw, deadline_ns)
            if relaxed is None:
                return None
            replay = self._frontier.problem.replay(relaxed.choice)
            if replay.peak_uw <= self._cap_uw:
                return relaxed.choice
            tightened_uw = self._tightened(limits_uw, replay, relaxed.price_uw)
            if tightened_uw is None:
                return None
            limits_uw = tightened_uw
        return None

    def _plan_within(self, limits_uw: IntArray, deadline_ns: int | None) -> _RelaxedChoice | None:
        """Plan with the options that power limits leave, (N,); None if even those are too slow."""
        frontier = self._frontier
        pipeline, profile = frontier.pipeline, frontier.profile
        waiting_uw = frontier.blocking_power_uw
        network = build_network(pipeline, profile, waiting_uw, limits_uw.tolist())
        t_min_ns = network.solver().min_time
        time_ns = t_min_ns if deadline_ns is None else deadline_ns
        if time_ns < t_min_ns:
            return None
        solver = WarmStarts(pipeline, profile, waiting_uw, network).solver_at_flow(sum(waiting_uw))
        trace = solver.trace(sum(waiting_uw))
        t_star_ns = trace.end_time
        time_ns = min(time_ns, t_star_ns)
        trace.extend(time_ns)
        event_times, flows = trace.optimum_at(time_ns)
        rounding = Rounding(pipeline, network, event_times, time_ns)
        rounding.anneal(_TEMPERATURES)
        return _RelaxedChoice(rounding.choice, flows[: len(limits_uw)])

    def _tightened(
        self, limits_uw: IntArray, replay: Replay, price_uw: IntArray
    ) -> IntArray | None:
        """Limits with the cheapest slow-downs at each moment over the cap; None if there is none.

        The worst moments come first; what is slowed down for them counts at the others.
        """
        problem = self._frontier.problem
        tightened_uw, choice = limits_uw.copy(), replay.rows.copy()
        is_tighter = False
        times_ns, drawn_uw = replay.power_steps
        over_cap = np.flatnonzero(drawn_uw > self._cap_uw)
        worst_first = over_cap[np.argsort(-drawn_uw[over_cap], kind="stable")]
        for step in worst_first.tolist():
            running = _running_at(replay, times_ns[step])
            options = problem.first_row[running]
            replayed_uw = problem.power_uw[options + replay.rows[running]]
            slowed_uw = problem.power_uw[options + choice[running]]
            saved_uw = int((replayed_uw - slowed_uw).sum())
            excess_uw = int(drawn_uw[step]) - self._cap_uw - saved_uw
            while excess_uw > 0:
                slowdown = self._cheapest_slowdown(running, choice, price_uw, excess_uw)
                if slowdown is None:
                    break
                i, option = slowdown.operation, slowdown.option
                powers_uw = self._option_powers_uw[problem.table[i]]
                excess_uw -= int(powers_uw[choice[i]] - powers_uw[option])
                choice[i] = option
                tightened_uw[i] = int(powers_uw[option])
                is_tighter = True
        return tightened_uw if is_tighter else None

    def _cheapest_slowdown(
        self, running: IntArray, choice: Rows, price_uw: IntArray, excess_uw: int
    ) -> _Slowdown | None:
        """The option of less power that costs least for each uW saved, among some operations.

        Args:
            running: the operations, (n,).
            choice: the options of all, (N,).
            price_uw: of time, (N,).
            excess_uw: saving more than this is worth nothing.
        """
        problem = self._frontier.problem
        cheapest: _Slowdown | None = None
        for i in running.tolist():
            table, option = problem.tables[problem.table[i]], int(choice[i])
            powers_uw = self._option_powers_uw[problem.table[i]]
            saved_uw = (powers_uw[option] - powers_uw).astype(np.float64)
            if saved_uw.max() <= 0:
                continue
            longer_ns = (table.time_ns - table.time_ns[option]).astype(np.float64)
            dearer_fj = (table.energy_fj - table.energy_fj[option]).astype(np.float64)
            price = float(price_uw[i] - self._waiting_uw[i])
            cost_fj = np.maximum(dearer_fj + price * longer_ns, 0.0) + 1.0
            worth_uw = np.clip(saved_uw, 1.0, excess_uw)
            cost_per_uw = np.where(saved_uw > 0, cost_fj / worth_uw, np.inf)
            best = int(np.argmin(cost_per_uw))
            if cheapest is None or cost_per_uw[best] < cheapest.cost_per_uw:
                cheapest = _Slowdown(float(cost_per_uw[best]), i, best)
        return cheapest


def _running_at(replay: Replay, time_ns: int) -> IntArray:
    """Operations that run at a time, (n,)."""
    return np.flatnonzero((replay.starts_ns <= time_ns) & (time_ns < replay.finishes_ns))
