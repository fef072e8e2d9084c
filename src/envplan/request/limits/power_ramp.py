"""The steepest change of power (`--ramp-limit`): grid operators ask large consumers for one.

The power of the whole job is averaged over windows of a given length. A ramp is the change from one
window to the next, which begins where the first ends, divided by that length. Iterations follow
each other, so windows go on into the next iteration, and may be longer than one.

Let E(t) be the energy used until t and w the length of a window. The ramp at t is

    (E(t + w) - 2 E(t) + E(t - w)) / w^2

Power is constant between two events of the replay, so E is linear there, and so is the ramp
between two times that are an event, or lie w before or after one. It is steepest at one of these
times. Over whole iterations E grows by the same energy everywhere, so only the remainder of w
counts: a window of exactly one iteration has no ramp at all.

Where no plan that is found keeps the limit, operations in the hungrier of the two windows get
options of less power, step by step, which takes time and makes the change less steep.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from envplan._io.words import significant
from envplan.quantities import POWER, TIME
from envplan.request.limits.base import (
    FastestKind,
    Limit,
    LimitContext,
    LimitOption,
    StatedResults,
    SweepKey,
    WholeJob,
)
from envplan.request.limits.peak_power import share_of_peak
from envplan.units import POWER_UNITS_PER_W, ns_from_s, s_from_ns, w_from_10uw

if TYPE_CHECKING:
    from envplan.frontier import Relaxation
    from envplan.replay import Replay, Rows

_NS_PER_S: Final = 10**9
_LONGEST_WINDOW_S: Final = 3600
#: So that a ramp that is shown can be asked for: more than its rounding to ten digits.
_ROUNDED_UP: Final = 1 + 1e-9


@dataclass(frozen=True)
class SteepestChange:
    """Two neighbouring windows whose energies differ most.

    Attributes:
        change_10fj: by how much, 10 fJ.
        begin_ns: within an iteration, when the one that uses more begins, ns.
        length_ns: for how long it uses more, ns: no longer than half an iteration.
    """

    change_10fj: int
    begin_ns: int
    length_ns: int


@dataclass(frozen=True)
class PowerOverTime:
    """Power of one iteration, constant between events; iterations follow each other.

    Attributes:
        times_ns: of the events, ascending from 0 to the end of the iteration, int64 (k + 1,).
        power_10uw: from each event to the next, int64 (k,).
    """

    times_ns: NDArray[np.int64]
    power_10uw: NDArray[np.int64]

    @property
    def period_ns(self) -> int:
        """How long an iteration takes, ns."""
        return int(self.times_ns[-1])

    @classmethod
    def of_replay(cls, replay: Replay, sync_ns: int) -> Self:
        """The power of one GPU a stage together.

        Args:
            replay: of a plan.
            sync_ns: until then everybody waits, ns; no later than its end: nobody does.
        """
        times_ns, power_10uw = replay.power_steps
        if sync_ns > replay.makespan_ns:
            waiting_10uw = replay.problem.blocking_power_10uw.sum()
            times_ns = np.append(times_ns, sync_ns)
            power_10uw = np.append(power_10uw, waiting_10uw)
        return cls(times_ns, power_10uw)

    def times(self, num_gpus: int) -> PowerOverTime:
        """The same of so many GPUs together."""
        return PowerOverTime(self.times_ns, self.power_10uw * num_gpus)

    @classmethod
    def sum(cls, powers: Sequence[PowerOverTime]) -> Self:
        """The sum of several powers over one period."""
        times_ns = _distinct(np.concatenate([power.times_ns for power in powers]))
        total_10uw = np.zeros(len(times_ns) - 1, np.int64)
        for power in powers:
            step = np.searchsorted(power.times_ns, times_ns[:-1], "right") - 1
            total_10uw += power.power_10uw[step]
        return cls(times_ns, total_10uw)

    def steepest_change(self, window_ns: int) -> SteepestChange:
        """Where the energies of two neighbouring windows differ most.

        Args:
            window_ns: length of a window, ns, positive.
        """
        # Over whole iterations, and the other way around, windows differ alike.
        length_ns = min(window_ns % self.period_ns, -window_ns % self.period_ns)
        energy = _EnergyOverTime(self, length_ns)
        # The ramp bends where one of the windows begins or ends at an event.
        events_ns = self.times_ns[:-1]
        shifted_ns = np.concatenate([events_ns, events_ns + length_ns, events_ns - length_ns])
        bends_ns = _distinct(shifted_ns % self.period_ns)
        earlier_ns = (bends_ns - length_ns) % self.period_ns
        changes_10fj = energy.of_windows_10fj(bends_ns) - energy.of_windows_10fj(earlier_ns)
        steepest = int(np.argmax(np.abs(changes_10fj)))
        change_10fj = int(changes_10fj[steepest])
        hungrier_ns = bends_ns if change_10fj > 0 else earlier_ns
        return SteepestChange(abs(change_10fj), int(hungrier_ns[steepest]), length_ns)


def _distinct(times_ns: NDArray[np.int64]) -> NDArray[np.int64]:
    """Times in ascending order, each once: as np.unique, which takes twice as long."""
    ascending = np.sort(times_ns)
    is_new = np.ones(len(ascending), bool)
    is_new[1:] = ascending[1:] != ascending[:-1]
    return ascending[is_new]


@lru_cache(maxsize=8)
def _steepest_change_of(replay: Replay, sync_ns: int, window_ns: int) -> SteepestChange:
    """Where the energies of neighbouring windows differ most, for one GPU a stage.

    Of one replay it is asked for several times: how much the limit is broken, and where.

    Args:
        replay: of a plan.
        sync_ns: until then everybody waits, ns.
        window_ns: length of a window, ns.
    """
    return PowerOverTime.of_replay(replay, sync_ns).steepest_change(window_ns)


class _EnergyOverTime:
    """Energy of windows of one length, above what the least power uses in that time.

    The least power adds the same to every window, so it changes no difference; without it numbers
    are small. They are 64-bit where the energy of a window fits, and Python's else. Sums from the
    beginning on may wrap around 64 bits: energies of windows are differences of them, and right.

    Args:
        power: of an iteration.
        length_ns: of a window, ns: less than an iteration.
    """

    def __init__(self, power: PowerOverTime, length_ns: int) -> None:
        self._times_ns = power.times_ns
        self._period_ns = power.period_ns
        self._length_ns = length_ns
        power_10uw: NDArray[Any] = power.power_10uw - power.power_10uw.min()
        if int(power_10uw.max()) * length_ns >= 2**63:
            power_10uw = power_10uw.astype(object)
        self._power_10uw = power_10uw
        # Until each event, (k + 1,).
        step_energies_10fj = power_10uw * np.diff(power.times_ns)
        self._used_10fj = np.concatenate([[0 * power_10uw[0]], np.cumsum(step_energies_10fj)])

    def of_windows_10fj(self, begin_ns: NDArray[np.int64]) -> NDArray[Any]:
        """Energy of the windows that begin at some times within an iteration, (n,), 10 fJ."""
        end_ns = begin_ns + self._length_ns
        ends_in_next = (end_ns >= self._period_ns).astype(self._used_10fj.dtype)
        iteration_10fj = self._used_10fj[-1]
        end_10fj = self._used_until_10fj(end_ns % self._period_ns) + ends_in_next * iteration_10fj
        windows_10fj: NDArray[Any] = end_10fj - self._used_until_10fj(begin_ns)
        return windows_10fj

    def _used_until_10fj(self, time_ns: NDArray[np.int64]) -> NDArray[Any]:
        """Energy from the beginning of the iteration until some times in it, (n,), 10 fJ."""
        step = np.searchsorted(self._times_ns, time_ns, "right") - 1
        since_event_ns = time_ns - self._times_ns[step]
        used_10fj: NDArray[Any] = self._used_10fj[step] + self._power_10uw[step] * since_event_ns
        return used_10fj


class PowerRamp(Limit):
    """The largest change of the average power between two neighbouring windows, over their length.

    A violation is in 10 fJ of all GPUs by which the energies of two windows differ too much.
    """

    options: ClassVar = (
        LimitOption(
            field="ramp_w_per_s",
            keyword="ramp_limit",
            flag="ramp-limit",
            quantity=POWER,
            metavar="W",
            help="Power over all GPUs changes by at most W watts a second, on average over "
            "windows of --ramp-window; without a target: shortest such iteration.",
            panel="Target",
            sweep=SweepKey(phrase="{:g} W/s"),
        ),
        LimitOption(
            field="window_s",
            keyword="ramp_window",
            flag="ramp-window",
            quantity=TIME.within(1e-9, _LONGEST_WINDOW_S),
            metavar="TIME",
            help="Length of the windows of --ramp-limit, as in 1s or 100ms; default: 1s.",
            panel="Target",
            sweep=SweepKey(column_suffix="_s", phrase="windows of {:g} s"),
        ),
    )
    stated_as: ClassVar[FastestKind | None] = "fastest"
    obstacle: ClassVar = "power may not change so fast"
    eases_beyond_t_star: ClassVar = True
    counts_all_gpus: ClassVar = True
    can_relieve: ClassVar = True

    kind: Literal["power-ramp"] = "power-ramp"
    ramp_w_per_s: Annotated[float, Field(ge=0, le=1e15)]
    window_s: Annotated[float, Field(ge=1e-9, le=_LONGEST_WINDOW_S)] = 1.0

    @property
    def window_ns(self) -> int:
        """Length of a window, ns."""
        return ns_from_s(self.window_s)

    @property
    def allowed_10fj(self) -> int:
        """By how much the energies of two neighbouring windows may differ, all GPUs, 10 fJ."""
        return int(Fraction(self.ramp_w_per_s) * POWER_UNITS_PER_W * self.window_ns**2 / _NS_PER_S)

    def violation(self, replay: Replay, context: LimitContext) -> int:
        return max(0, self._change_10fj(replay, context) - self.allowed_10fj)

    def relieve(self, replay: Replay, context: LimitContext) -> Rows | None:
        # Operations in the hungrier window get an option of less power each; where none of them
        # has one, those in the other window get one of more.
        steepest = self._steepest_change(replay, context)
        period_ns = max(replay.makespan_ns, context.sync_ns)
        begin_ns, length_ns = steepest.begin_ns, steepest.length_ns
        hungry = _running(replay, begin_ns, length_ns, period_ns)
        choice = _with_less_power(replay, hungry)
        if choice is not None:
            return choice
        # The hungrier window may be the earlier or the later one: its neighbours on both sides.
        thrifty = _running(replay, begin_ns - length_ns, length_ns, period_ns)
        thrifty |= _running(replay, begin_ns + length_ns, length_ns, period_ns)
        return _with_more_power(replay, thrifty & ~hungry)

    def share(self, kind: Relaxation, kinds: Sequence[Relaxation]) -> Self:
        # The ramp of a sum is no steeper than the sum of the ramps.
        share = share_of_peak(kind, kinds)
        return self.model_copy(update={"ramp_w_per_s": self.ramp_w_per_s * share})

    def explain_violation(self, replay: Replay, context: LimitContext) -> str:
        ramp = self._ramp_w_per_s(self._change_10fj(replay, context))
        return (
            f"power changes by {ramp * _ROUNDED_UP:.10g} W/s between two windows of "
            f"{self.window_s:g} s, more than the {self.ramp_w_per_s:.10g} W/s allowed"
        )

    def explain_refusal(self, replay: Replay, context: LimitContext, frontier: Relaxation) -> str:
        least = self._ramp_w_per_s(self._change_10fj(replay, context)) * _ROUNDED_UP
        return (
            f"no plan was found whose power changes by at most {self.ramp_w_per_s:.10g} W/s "
            f"between two windows of {self.window_s:g} s; the least found is {least:.10g} W/s"
        )

    def explain_whole_violation(self, job: WholeJob) -> str | None:
        powers = []
        for kind in job.replays():
            power = PowerOverTime.of_replay(kind.replay, job.sync_ns)
            powers.append(power.times(kind.num_gpus))
        change_10fj = PowerOverTime.sum(powers).steepest_change(self.window_ns).change_10fj
        if change_10fj <= self.allowed_10fj:
            return None
        least = self._ramp_w_per_s(change_10fj) * _ROUNDED_UP
        return (
            f"no plans were found within {self.ramp_w_per_s:.10g} W/s: by "
            f"{s_from_ns(job.sync_ns):.9f} s the least found is {least:.10g} W/s"
        )

    def explain_kept(self, stated: StatedResults, replay: Replay, context: LimitContext) -> str:
        ramp = self._ramp_w_per_s(self._change_10fj(replay, context))
        return (
            f"power changes by at most {ramp!r} W/s between two windows of {self.window_s!r} s "
            f"<= {self.ramp_w_per_s!r} W/s"
        )

    def notes(self, replay: Replay, context: LimitContext) -> Iterator[str]:
        ramp = self._ramp_w_per_s(self._change_10fj(replay, context))
        yield (
            f"its power changes by at most {significant(ramp)} W/s between two windows of "
            f"{self.window_s:g} s, of {self.ramp_w_per_s:g} W/s allowed; the gap is to a lower "
            "bound without that limit"
        )

    def _steepest_change(self, replay: Replay, context: LimitContext) -> SteepestChange:
        """Where the energies of neighbouring windows differ most, for one GPU a stage."""
        return _steepest_change_of(replay, context.sync_ns, self.window_ns)

    def _change_10fj(self, replay: Replay, context: LimitContext) -> int:
        """The most by which the energies of two neighbouring windows differ, all GPUs, 10 fJ."""
        return self._steepest_change(replay, context).change_10fj * context.num_gpus

    def _ramp_w_per_s(self, change_10fj: int) -> float:
        """The ramp of a difference of energies, W/s."""
        return w_from_10uw(change_10fj * _NS_PER_S) / self.window_ns**2


def _running(replay: Replay, begin_ns: int, length_ns: int, period_ns: int) -> NDArray[np.bool_]:
    """Which operations run in a window, (N,); it may begin or end in a neighbouring iteration."""
    begin_ns %= period_ns
    end_ns = begin_ns + length_ns
    runs = (replay.starts_ns < end_ns) & (replay.finishes_ns > begin_ns)
    runs_in_next = replay.starts_ns < end_ns - period_ns
    return runs | runs_in_next


def _with_less_power(replay: Replay, operations: NDArray[np.bool_]) -> Rows | None:
    """The choice with the next slower option of less power for some operations, (N,).

    Options of a table are sorted by time, and those of less power are slower as a rule.

    Returns:
        None where none of them has such an option.
    """
    choice = replay.rows.copy()
    for operation in np.flatnonzero(operations).tolist():
        powers_10uw, option = _option_powers_10uw(replay, operation), choice[operation]
        thriftier = np.flatnonzero(powers_10uw[option:] < powers_10uw[option])
        if len(thriftier):
            choice[operation] = option + thriftier[0]
    return None if np.array_equal(choice, replay.rows) else choice


def _with_more_power(replay: Replay, operations: NDArray[np.bool_]) -> Rows | None:
    """The choice with the next faster option of more power for some operations, (N,).

    Returns:
        None where none of them has such an option.
    """
    choice = replay.rows.copy()
    for operation in np.flatnonzero(operations).tolist():
        powers_10uw, option = _option_powers_10uw(replay, operation), choice[operation]
        hungrier = np.flatnonzero(powers_10uw[:option] > powers_10uw[option])
        if len(hungrier):
            choice[operation] = hungrier[-1]
    return None if np.array_equal(choice, replay.rows) else choice


def _option_powers_10uw(replay: Replay, operation: int) -> NDArray[np.int64]:
    """The most that each option of an operation draws, 10 uW, (n,)."""
    problem = replay.problem
    powers_10uw: NDArray[np.int64] = problem.tables[problem.table[operation]].peak_10uw
    return powers_10uw
