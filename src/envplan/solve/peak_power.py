"""Choices under a cap on the power of all GPUs at every moment.

No efficient exact method is known: scheduling under a cap on a shared resource is NP-hard. The way
here is to give operations power limits of their own and to plan as ever with the options that these
leave: the frontier of what is left is exact, and its plans are rounded as all plans are.

Limits start at one level for all: each operation may use the same share of the span between its
options of least and of most power. Then they are repaired: wherever the replay is over the cap,
those operations that run there are slowed down, the one first that costs least for each watt it
saves, at the price of time that the dual solution puts on it (its flow), and what is left is
planned anew, until nothing is over the cap. The search in local_search.py goes on from there.

Prices of time are in units of 10 uW, which are units of 10 fJ a ns.
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
from envplan.units import w_from_10uw

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
        price_10uw: what a ns less for each operation is worth, int64 (N,).
    """

    choice: Rows
    price_10uw: IntArray


class _Slowdown(NamedTuple):
    """An option of less power for an operation.

    Attributes:
        cost_per_10uw: effective cost for each 10 uW saved, 10 fJ / 10 uW.
        operation, option: which operation gets which option index.
        power_10uw: the most that the option draws.
        saved_10uw: how much less that is than now, positive.
    """

    cost_per_10uw: float
    operation: int
    option: int
    power_10uw: int
    saved_10uw: int


class _Moment(NamedTuple):
    """A moment of a replay from which on power is constant for a while.

    Attributes:
        power_10uw: of one GPU a stage together.
    """

    time_ns: int
    power_10uw: int


class PeakPowerHeuristic:
    """Choices of one frontier under one cap.

    Args:
        frontier: of the pipeline without the cap.
        machine: how clocks follow requests.
        cap_10uw: most power of one GPU a stage together, 10 uW.

    Attributes:
        least_power_choice: for each operation its option of least power, int32 (N,).
    """

    def __init__(self, frontier: Relaxation, machine: Machine, cap_10uw: int) -> None:
        self._frontier = frontier
        self._machine = machine
        self._cap_10uw = cap_10uw
        problem = frontier.problem
        # By table, then by operation: (N,).
        powers_10uw = [table.peak_10uw for table in problem.tables]
        least_10uw = np.array([table_10uw.min() for table_10uw in powers_10uw], np.int64)
        most_10uw = np.array([table_10uw.max() for table_10uw in powers_10uw], np.int64)
        least_options = np.array([table_10uw.argmin() for table_10uw in powers_10uw], np.int32)
        self._least_10uw = least_10uw[problem.table]
        self._most_10uw = most_10uw[problem.table]
        self.least_power_choice: Rows = least_options[problem.table]
        self._waiting_10uw = problem.blocking_power_10uw[problem.stage]
        self._levels = _LEVELS[:: 1 + len(problem.table) // _OPERATIONS_FOR_ALL_LEVELS]

    def cheapest_choices(self, deadline_ns: int) -> list[Rows]:
        """The choices of least energy found under the cap for a deadline, ns.

        The one of least power, which may be late, where none was found.
        """
        replays = self._replays_under_cap(deadline_ns)
        replays.sort(key=lambda replay: (replay.energy_10fj, replay.makespan_ns))
        return self._best_choices(replays)

    def fastest_choices(self) -> list[Rows]:
        """The fastest choices found under the cap; the one of least power where none was found."""
        replays = self._replays_under_cap(None)
        replays.sort(key=lambda replay: (replay.makespan_ns, replay.energy_10fj))
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
        least_found_10uw = min(replay.peak_10uw, least_power.peak_10uw)
        cap_w = w_from_10uw(self._cap_10uw * num_gpus)
        least_found_w = w_from_10uw(least_found_10uw * num_gpus)
        least_possible_w = w_from_10uw(self.least_peak_10uw * num_gpus)
        return (
            f"no plan was found that stays under {cap_w:.6g} W; the least peak found is "
            f"{least_found_w:.10g} W, and none can be below {least_possible_w:.10g} W"
        )

    @property
    def least_peak_10uw(self) -> int:
        """A power that every plan reaches at some moment, 10 uW, of one GPU a stage together.

        At some moment of an operation it draws at least the peak of its option of least power,
        and every other stage then draws at least its blocking power or the least power of any of
        its options.
        """
        problem = self._frontier.problem
        table_floors_10uw = [table.segments.power_10uw.min() for table in problem.tables]
        table_floor_10uw = np.array(table_floors_10uw, np.int64)
        stage_floor_10uw = problem.blocking_power_10uw.copy()
        np.minimum.at(stage_floor_10uw, problem.stage, table_floor_10uw[problem.table])
        stage_peak_10uw = np.zeros_like(problem.blocking_power_10uw)
        np.maximum.at(stage_peak_10uw, problem.stage, self._least_10uw)
        other_stages_10uw = stage_floor_10uw.sum() - stage_floor_10uw
        return int((other_stages_10uw + stage_peak_10uw).max())

    def _replays_under_cap(self, deadline_ns: int | None) -> list[Replay]:
        """One replay for each level whose limits could be repaired.

        Args:
            deadline_ns: None: as fast as the limits allow.
        """
        replays = []
        for level in self._levels:
            choice = self._choice_under_cap(level, deadline_ns)
            if choice is not None:
                replays.append(self._frontier.problem.replay(choice, self._machine))
        return replays

    def _choice_under_cap(self, level: float, deadline_ns: int | None) -> Rows | None:
        """Plan, replay, and tighten the limits of a level until nothing is over the cap.

        Args:
            level: part of the span between least and most power that operations may use at first.
            deadline_ns: None: as fast as the limits allow.

        Returns:
            None where there is no choice in time, or after too many repairs.
        """
        span_10uw = self._most_10uw - self._least_10uw
        limits_10uw = self._least_10uw + (level * span_10uw).astype(np.int64)
        for _ in range(_MAX_REPAIRS):
            relaxed = self._plan_within(limits_10uw, deadline_ns)
            if relaxed is None:
                return None
            replay = self._frontier.problem.replay(relaxed.choice)
            if replay.peak_10uw <= self._cap_10uw:
                return relaxed.choice
            tightened_10uw = self._tightened(limits_10uw, replay, relaxed.price_10uw)
            if tightened_10uw is None:
                return None
            limits_10uw = tightened_10uw
        return None

    def _plan_within(self, limits_10uw: IntArray, deadline_ns: int | None) -> _RelaxedChoice | None:
        """Plan with the options that power limits leave.

        Args:
            limits_10uw: the most that each operation may draw, (N,).
            deadline_ns: None: as fast as the limits allow.

        Returns:
            None where even the fastest of these options are too slow.
        """
        frontier = self._frontier
        pipeline, profile = frontier.pipeline, frontier.profile
        waiting_10uw = frontier.blocking_power_10uw
        network = build_network(pipeline, profile, waiting_10uw, limits_10uw.tolist())
        t_min_ns = network.solver().min_time
        if deadline_ns is None:
            deadline_ns = t_min_ns
        if deadline_ns < t_min_ns:
            return None
        # The walk begins at T_star, where a ns is worth what all GPUs draw while they wait.
        t_star_flow_10uw = sum(waiting_10uw)
        warm_starts = WarmStarts(pipeline, profile, waiting_10uw, network)
        trace = warm_starts.solver_at_flow(t_star_flow_10uw).trace(t_star_flow_10uw)
        t_star_ns = trace.end_time
        time_ns = min(deadline_ns, t_star_ns)
        trace.extend(time_ns)
        event_times_ns, flows_10uw = trace.optimum_at(time_ns)
        rounding = Rounding(pipeline, network, event_times_ns, time_ns)
        rounding.anneal(_TEMPERATURES)
        # The network's first arcs are the operations.
        return _RelaxedChoice(rounding.choice, price_10uw=flows_10uw[: network.num_operations])

    def _tightened(
        self, limits_10uw: IntArray, replay: Replay, price_10uw: IntArray
    ) -> IntArray | None:
        """Limits with the cheapest slow-downs at each moment over the cap.

        The worst moments come first; what is slowed down for them counts at the others.

        Args:
            limits_10uw: of each operation, (N,).
            replay: over the cap.
            price_10uw: of time, (N,).

        Returns:
            None where nothing that runs at those moments has an option of less power.
        """
        tightened_10uw, choice = limits_10uw.copy(), replay.rows.copy()
        for moment in self._moments_over_cap(replay):
            running = _running_at(replay, moment.time_ns)
            replayed_10uw = self._power_10uw(running, replay.rows)
            saved_10uw = replayed_10uw - self._power_10uw(running, choice)
            excess_10uw = moment.power_10uw - saved_10uw - self._cap_10uw
            while excess_10uw > 0:
                slowdown = self._cheapest_slowdown(running, choice, price_10uw, excess_10uw)
                if slowdown is None:
                    break
                choice[slowdown.operation] = slowdown.option
                tightened_10uw[slowdown.operation] = slowdown.power_10uw
                excess_10uw -= slowdown.saved_10uw
        return None if np.array_equal(choice, replay.rows) else tightened_10uw

    def _moments_over_cap(self, replay: Replay) -> list[_Moment]:
        """The moments at which a replay draws more than the cap, those of most power first."""
        times_ns, powers_10uw = replay.power_steps
        over_cap = np.flatnonzero(powers_10uw > self._cap_10uw)
        most_first = over_cap[np.argsort(-powers_10uw[over_cap], kind="stable")]
        return [_Moment(int(times_ns[step]), int(powers_10uw[step])) for step in most_first]

    def _power_10uw(self, operations: IntArray, choice: Rows) -> int:
        """The most that some operations, (n,), draw together with the options of a choice, (N,)."""
        problem = self._frontier.problem
        options = problem.first_row[operations] + choice[operations]
        return int(problem.power_10uw[options].sum())

    def _cheapest_slowdown(
        self, running: IntArray, choice: Rows, price_10uw: IntArray, excess_10uw: int
    ) -> _Slowdown | None:
        """The slow-down that costs least for each 10 uW saved, among some operations.

        Args:
            running: the operations, (n,).
            choice: the options of all, (N,).
            price_10uw: of time, (N,).
            excess_10uw: saving more than this is worth nothing.

        Returns:
            None where all of them have their options of least power already.
        """
        cheapest: _Slowdown | None = None
        for operation in running.tolist():
            slowdown = self._slowdown_of(
                operation, int(choice[operation]), int(price_10uw[operation]), excess_10uw
            )
            if slowdown is None:
                continue
            if cheapest is None or slowdown.cost_per_10uw < cheapest.cost_per_10uw:
                cheapest = slowdown
        return cheapest

    def _slowdown_of(
        self, operation: int, option: int, price_10uw: int, excess_10uw: int
    ) -> _Slowdown | None:
        """The option of less power that costs least for each 10 uW saved; None where there is none.

        Args:
            operation: which gets it.
            option: that it has now.
            price_10uw: of a ns more for it.
            excess_10uw: saving more than this is worth nothing.
        """
        problem = self._frontier.problem
        table = problem.tables[problem.table[operation]]
        saved_10uw = table.peak_10uw[option] - table.peak_10uw
        if saved_10uw.max() <= 0:
            return None
        longer_ns = (table.time_ns - table.time_ns[option]).astype(np.float64)
        dearer_10fj = (table.energy_10fj - table.energy_10fj[option]).astype(np.float64)
        # While the operation runs longer, its GPU does not wait.
        net_price_10uw = float(price_10uw - self._waiting_10uw[operation])
        cost_10fj = np.maximum(dearer_10fj + net_price_10uw * longer_ns, 0.0) + 1.0
        worth_10uw = np.clip(saved_10uw.astype(np.float64), 1.0, excess_10uw)
        cost_per_10uw = np.where(saved_10uw > 0, cost_10fj / worth_10uw, np.inf)
        cheapest = int(np.argmin(cost_per_10uw))
        return _Slowdown(
            cost_per_10uw=float(cost_per_10uw[cheapest]),
            operation=operation,
            option=cheapest,
            power_10uw=int(table.peak_10uw[cheapest]),
            saved_10uw=int(saved_10uw[cheapest]),
        )


def _running_at(replay: Replay, time_ns: int) -> IntArray:
    """Operations that run at a time, (n,)."""
    return np.flatnonzero((replay.starts_ns <= time_ns) & (time_ns < replay.finishes_ns))
