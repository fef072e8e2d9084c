"""Plans whose power stays under a cap at every moment, not only on average.

No efficient exact method is known: scheduling under a cap on a shared resource is NP-hard. The way
here is to give operations power limits of their own and to plan as ever with the options that
these leave: the frontier of what is left is exact, and its plans are rounded as all plans are.

Limits start at one level for all: each operation may use the same share of the span between its
thriftiest and its hungriest option. Then they are repaired: wherever the replay is over the cap,
those operations that run there are slowed down, the one first that costs least for each watt it
saves, at the price of time that the dual solution puts on it (its flow), and what is left is
planned anew, until nothing is over the cap. Many levels are tried, and the best plan wins. At the
end single operations are moved to neighbouring options as long as that helps.

The lower bound on energy stays that of the frontier without a cap, which is valid with one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from envplan.errors import NoAnswerError
from envplan.frontier.network import build_network
from envplan.frontier.rounding import Rounding
from envplan.frontier.start import start_at_t_star
from envplan.power import PowerSteps, least_peak_uw, option_powers_uw, peak_uw, power_steps
from envplan.units import s_from_ns, w_from_uw

if TYPE_CHECKING:
    from envplan.frontier.trace import Frontier
    from envplan.plan import Plan

Options = NDArray[np.int32]
Limits = NDArray[np.int64]

_ROUNDS: Final = 8  # of repair; one to four do, as a rule
_LEVELS: Final = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0)
_DEADLINES: Final = 4  # bisections of the fastest plan's time
_LEVELS_BY_DEADLINE: Final = (1.0, 0.6, 0.3)
#: With more operations than this, fewer levels are tried.
_FEW_OPERATIONS: Final = 512
_HEATS: Final = (0.5, 0.1)
#: How many operations the final moves replay in all.
_WORK: Final = 3_000_000
_PASSES: Final = 4
_STEPS: Final = (1, -1, 2, -2, 4, -4)

Progress = Callable[[int, int], None]


class Capped(NamedTuple):
    """A choice of options under a peak power cap.

    Attributes:
        options: for each operation the row of its option table, (N).
        makespan_ns: replayed.
        energy_fj: of all operations and all waiting, of one GPU a stage.
        peak_uw: of one GPU a stage.
    """

    options: Options
    makespan_ns: int
    energy_fj: int
    peak_uw: int


def plan_under_peak(
    frontier: Frontier,
    cap_uw: int,
    deadline_ns: int | None,
    progress: Progress | None = None,
) -> Capped:
    """The least energy found by a deadline, or the fastest found, whose peak is at most a cap.

    Args:
        cap_uw: uW of one GPU a stage together.
        deadline_ns: None: as fast as possible.
        progress: called with (rounds to go, 0), the former falling.

    Raises:
        NoAnswerError: no such plan was found; says the least peak, or the least time, that was.
    """
    search = _Search(frontier, cap_uw, deadline_ns)
    if cap_uw < search.least_peak_uw:
        raise NoAnswerError(
            f"no plan stays under {search.cap_in_words} W: every plan draws "
            f"{search.watts(search.least_peak_uw)} W or more at its peak; the least peak found is "
            f"{search.watts(search.thriftiest().peak_uw)} W"
        )
    free = search.free()
    if free is not None:
        return free
    fastest = search.fastest(progress)
    if fastest is None:
        raise NoAnswerError(
            f"no plan was found that stays under {search.cap_in_words} W; the least peak found "
            f"is {search.watts(search.thriftiest().peak_uw)} W, and none can be below "
            f"{search.watts(search.least_peak_uw)} W"
        )
    if deadline_ns is None:
        return search.improved(fastest)
    found = search.cheapest(deadline_ns, search.levels, progress)
    candidates = [c for c in (found, fastest) if c is not None and c.makespan_ns <= deadline_ns]
    if not candidates:
        raise NoAnswerError(
            f"no plan was found that stays under {search.cap_in_words} W and ends by "
            f"{s_from_ns(deadline_ns):.9f} s; the fastest found under that cap takes "
            f"{s_from_ns(search.improved(fastest).makespan_ns):.9f} s, and none takes less than "
            f"{s_from_ns(search.least_time_ns):.9f} s"
        )
    return min(map(search.improved, candidates), key=search.rank)


def peak_of_plan_uw(frontier: Frontier, plan: Plan) -> int:
    """The most that a plan of this pipeline draws at a time, uW of one GPU a stage together."""
    from envplan.plan import option_tables, price
    from envplan.verify import chosen_options

    pipeline, profile = frontier.pipeline, frontier.profile
    options = chosen_options(plan, pipeline, profile)
    starts = price(pipeline, profile, options, frontier.blocking_power_uw).starts_ns
    tables = option_tables(pipeline, profile)
    return peak_uw(pipeline, tables, options, starts, frontier.blocking_power_uw)


class _Limited(NamedTuple):
    """A plan with the options that power limits leave, and the price of time it was made at.

    Attributes:
        options: (N).
        price_uw: what a ns less for each operation is worth, fJ / ns, (N).
    """

    options: Options
    price_uw: NDArray[np.int64]


class _Search:
    """The plans of one frontier under one cap."""

    def __init__(self, frontier: Frontier, cap_uw: int, deadline_ns: int | None) -> None:
        from envplan.plan import option_tables

        self.cap_uw = cap_uw
        self._frontier = frontier
        self._deadline_ns = deadline_ns
        self._pipeline = frontier.pipeline
        self._powers = frontier.blocking_power_uw
        self._tables = option_tables(frontier.pipeline, frontier.profile)
        known = {id(table): table for table in self._tables}
        self._power_of = {key: option_powers_uw(table) for key, table in known.items()}
        sizes = np.cumsum([0] + [len(table) for table in known.values()])
        first = dict(zip(known, sizes.tolist(), strict=False))
        self._first = np.array([first[id(table)] for table in self._tables], np.int64)
        self._time = np.concatenate([table.time_ns for table in known.values()])
        self._energy = np.concatenate([table.energy_fj for table in known.values()])
        stages = [op.stage for op in self._pipeline.operations]
        self._waiting = np.array(self._powers, np.int64)[stages]
        self.levels = _LEVELS[:: 1 + len(stages) // _FEW_OPERATIONS]
        self._least = self._bound_of(np.min)
        self._most = self._bound_of(np.max)
        self.least_peak_uw = least_peak_uw(self._pipeline, self._tables, self._powers)

    @property
    def cap_in_words(self) -> str:
        """The cap over all GPUs in W, as it was given before it was shared out."""
        return f"{float(self.watts(self.cap_uw)):.6g}"

    def watts(self, uw: int) -> str:
        """Power of all GPUs in W, for messages."""
        frontier = self._frontier
        return f"{w_from_uw(uw * frontier.gpus_per_stage * frontier.replicas):.10g}"

    def rank(self, found: Capped) -> tuple[int, int]:
        """What is to be as small as possible."""
        if self._deadline_ns is None:
            return found.makespan_ns, found.energy_fj
        return found.energy_fj, found.makespan_ns

    def thriftiest(self) -> Capped:
        """Every operation at its least power, and of those the fastest."""
        options = np.array(
            [int(np.argmin(self._power_of[id(table)])) for table in self._tables], np.int32
        )
        return self._replayed(options)

    def free(self) -> Capped | None:
        """The plan without any limits, if it stays under the cap anyway."""
        limited = self._planned(self._most, self._deadline_ns)
        if limited is None:
            return None
        found = self._replayed(limited.options)
        return found if found.peak_uw <= self.cap_uw else None

    def fastest(self, progress: Progress | None) -> Capped | None:
        """The fastest plan found: of any level without a deadline, then with closer deadlines."""
        best = self.cheapest(None, self.levels, progress)
        if best is None:
            thriftiest = self.thriftiest()
            return thriftiest if thriftiest.peak_uw <= self.cap_uw else None
        too_soon = self.least_time_ns
        for _ in range(_DEADLINES):
            deadline_ns = (too_soon + best.makespan_ns) // 2
            found = self.cheapest(deadline_ns, _LEVELS_BY_DEADLINE, None)
            if found is None:
                too_soon = deadline_ns
            else:
                best = found
        return best

    def cheapest(
        self, deadline_ns: int | None, levels: Sequence[float], progress: Progress | None
    ) -> Capped | None:
        """The best plan of some levels once their limits are repaired; None if none is in time.

        Args:
            deadline_ns: None: each as fast as possible.
        """
        found: list[Capped] = []
        for to_go, level in zip(range(len(levels), 0, -1), levels, strict=True):
            if progress is not None:
                progress(to_go, 0)
            repaired = self._repaired(level, deadline_ns)
            if repaired is not None:
                found.append(repaired)
        if deadline_ns is None:
            return min(found, key=lambda c: (c.makespan_ns, c.energy_fj), default=None)
        return min(found, key=lambda c: (c.energy_fj, c.makespan_ns), default=None)

    @property
    def least_time_ns(self) -> int:
        """No plan under the cap is faster, ns: it must stay under it on average, too.

        The relaxed energy falls with time up to T_star, so its quotient by time does, too.
        """
        low, high = self._frontier.min_time_ns, self._frontier.min_energy_time_ns
        if self._frontier.lower_bound_fj(low) <= self.cap_uw * low:
            return low
        while high - low > 1:
            middle = (low + high) // 2
            if self._frontier.lower_bound_fj(middle) <= self.cap_uw * middle:
                high = middle
            else:
                low = middle
        return low

    def _repaired(self, level: float, deadline_ns: int | None) -> Capped | None:
        """The plan of a level once its limits are repaired; None if there is none in time."""
        span = (self._most - self._least).astype(np.float64)
        limits = self._least + (level * span).astype(np.int64)
        for _ in range(_ROUNDS):
            limited = self._planned(limits, deadline_ns)
            if limited is None:
                return None
            replayed = self._replayed(limited.options)
            if replayed.peak_uw <= self.cap_uw:
                return replayed
            if not self._tighten(limits, limited):
                return None
        return None

    def improved(self, found: Capped) -> Capped:
        """With single operations moved to neighbouring options, as long as that helps."""
        replays = _WORK // len(self._tables)
        for _ in range(_PASSES):
            before = found
            for i, table in enumerate(self._tables):
                for step in _STEPS:  # rows are sorted by time
                    row = int(found.options[i]) + step
                    if not 0 <= row < len(table) or replays == 0:
                        continue
                    options = found.options.copy()
                    options[i] = row
                    replays -= 1
                    moved = self._replayed(options)
                    if self._holds(moved) and self.rank(moved) < self.rank(found):
                        found = moved
            if found is before:
                break
        return found

    def _holds(self, found: Capped) -> bool:
        late = self._deadline_ns is not None and found.makespan_ns > self._deadline_ns
        return not late and found.peak_uw <= self.cap_uw

    def _bound_of(self, extreme: Callable[[NDArray[np.int64]], np.int64]) -> Limits:
        """The least or most power of each operation's options, (N), uW."""
        bounds = {key: int(extreme(powers)) for key, powers in self._power_of.items()}
        return np.array([bounds[id(table)] for table in self._tables], np.int64)

    def _planned(self, limits: Limits, deadline_ns: int | None) -> _Limited | None:
        """The plan for a deadline with what the limits leave; None if that is too slow."""
        network = build_network(
            self._pipeline, self._frontier.profile, self._powers, limits.tolist()
        )
        trace = network.trace()
        start_at_t_star(trace, self._pipeline, self._frontier.profile, self._powers, network)
        trace.run(sum(self._powers))
        times, _, _ = trace.breakpoints()
        time_ns = trace.min_time if deadline_ns is None else deadline_ns
        if time_ns < trace.min_time:
            return None
        time_ns = min(time_ns, int(times[0]))
        event_times, flows = trace.state_at(time_ns)
        rounding = Rounding(self._pipeline, network, event_times, time_ns)
        rounding.anneal(_HEATS)
        return _Limited(rounding.options, flows[: len(self._tables)])

    def _replayed(self, options: Options) -> Capped:
        time, energy, power = self._costs(options)
        starts, makespan = self._pipeline.earliest_starts(time)
        steps = power_steps(self._pipeline, starts, time, power, self._powers)
        busy = np.add.reduceat(time, self._pipeline.stage_begin[:-1]).tolist()
        waits = zip(self._powers, busy, strict=True)
        total = sum(energy.tolist()) + sum(uw * (makespan - ns) for uw, ns in waits)
        return Capped(options, makespan, total, int(steps.power_uw.max()))

    def _costs(
        self, options: Options
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Time (ns), energy (fJ) and power (uW) of each operation, (N)."""
        time, energy = self._time[self._first + options], self._energy[self._first + options]
        return time, energy, -(-energy // time)

    def _tighten(self, limits: Limits, limited: _Limited) -> bool:
        """Lower the limits of operations where power is over the cap; whether any could be."""
        time, _, power = self._costs(limited.options)
        starts, _ = self._pipeline.earliest_starts(time)
        steps = power_steps(self._pipeline, starts, time, power, self._powers)
        chosen = limited.options.copy()
        tightened = False
        over = np.flatnonzero(steps.power_uw > self.cap_uw)
        for k in over[np.argsort(-steps.power_uw[over], kind="stable")].tolist():
            running = _running(starts, time, steps, k)
            excess = int(steps.power_uw[k]) - self.cap_uw
            excess -= int((power[running] - self._power_at(chosen, running)).sum())
            while excess > 0:
                move = self._cheapest(chosen, running, limited.price_uw, excess)
                if move is None:
                    break
                i, row = move
                powers = self._power_of[id(self._tables[i])]
                excess -= int(powers[chosen[i]] - powers[row])
                chosen[i], limits[i] = row, int(powers[row])
                tightened = True
        return tightened

    def _power_at(self, options: Options, which: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.array(
            [self._power_of[id(self._tables[i])][options[i]] for i in which.tolist()], np.int64
        )

    def _cheapest(
        self, chosen: Options, running: NDArray[np.int64], price_uw: NDArray[np.int64], excess: int
    ) -> tuple[int, int] | None:
        """The operation and the option of less power that cost least for each watt saved."""
        best: tuple[float, int, int] | None = None
        for i in running.tolist():
            table, row = self._tables[i], int(chosen[i])
            powers = self._power_of[id(table)]
            saved = (powers[row] - powers).astype(np.float64)
            if saved.max() <= 0:
                continue
            slower = (table.time_ns - table.time_ns[row]).astype(np.float64)
            dearer = (table.energy_fj - table.energy_fj[row]).astype(np.float64)
            price = float(price_uw[i] - self._waiting[i])
            cost = np.maximum(dearer + price * slower, 0.0) + 1.0
            ratio = np.where(saved > 0, cost / np.clip(saved, 1.0, excess), np.inf)
            option = int(np.argmin(ratio))
            if best is None or ratio[option] < best[0]:
                best = float(ratio[option]), i, option
        return None if best is None else best[1:]


def _running(
    starts: NDArray[np.int64], time: NDArray[np.int64], steps: PowerSteps, k: int
) -> NDArray[np.int64]:
    """Operations that run during a step."""
    at = steps.times_ns[k]
    return np.flatnonzero((starts <= at) & (starts + time > at))
