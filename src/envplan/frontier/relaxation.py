"""The exact relaxed time-energy frontier of a pipeline: a lower bound on every plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from functools import cached_property
from time import perf_counter
from typing import Any, Final, Literal, Self

import numpy as np
from numpy.typing import NDArray

from envplan.errors import InputError, NoAnswerError
from envplan.frontier.network import build_network, network_events
from envplan.frontier.start import Start
from envplan.frontier.walk import Progress, Walk, naming_units
from envplan.pipeline import Pipeline
from envplan.profile import DEFAULT_BLOCKING_POWER_W, Profile
from envplan.replay import Problem
from envplan.units import MAX_INTEGER, j_from_fj, ns_from_s_floor, s_from_ns, uw_from_w, w_from_uw

BlockingPowerSource = Literal["profile", "argument", "default"]

# The walk from T_max to T_star grows faster with the pipeline than the rest. With more operations
# than this it starts where going slower saves an eighth of what it saves at T_star.
_WALK_FROM_T_MAX: Final = 2048
_PART: Final = 8

#: Frontiers traced, the last one last, with so many operations together.
_TRACED: dict[tuple[object, ...], Any] = {}
_MOST_KEPT: Final = 50_000


class Relaxation:
    """The exact relaxed frontier: a lower bound on energy at every iteration time.

    It knows no plan. All energies are joules per iteration over all GPUs. What has not been walked
    is walked when somebody asks for it: all of it where breakpoints are wanted, for a single time
    only what is near.

    Args:
        blocking_power, gpus_per_stage, replicas, full: as for `envplan.trace_frontier`, which
            raises as this does.

    Attributes:
        pipeline, profile, gpus_per_stage, replicas: what was traced.
        blocking_power_uw: uW of a waiting GPU on each stage, (num_stages,).
        blocking_power_source: "argument", "profile" or "default".
        total_power_uw: the sum of blocking_power_uw.
        min_time_ns: T_min in whole ns.
        max_time_ns: the last breakpoint: T_star, or T_max where the full frontier was traced.
        slowest_time_ns: T_max, where every operation is at its least effective cost: a straggler
            slower than that leaves no more time worth using. Whole ns.
        network: the activity network that was traced.
        trace_seconds: what the trace took, s.
    """

    trace_seconds = 0.0

    def __init__(
        self,
        pipeline: Pipeline,
        profile: Profile,
        *,
        blocking_power: float | None = None,
        gpus_per_stage: int = 1,
        replicas: int = 1,
        full: bool = False,
    ) -> None:
        for name, value in (("gpus_per_stage", gpus_per_stage), ("replicas", replicas)):
            if not 1 <= value <= 10**6:
                raise InputError(f"{name} must be between 1 and 1000000, not {value}")
        if profile.num_stages != pipeline.num_profile_stages:
            raise InputError(
                f"the profile has {profile.num_stages} stages and the pipeline needs "
                f"{pipeline.num_profile_stages} ({pipeline.num_stages} stages x "
                f"{pipeline.num_chunks} chunks)",
                path=profile.path,
            )
        self.pipeline = pipeline
        self.profile = profile
        powers, source = _blocking_powers(pipeline, profile, blocking_power)
        self.blocking_power_uw = tuple(powers)
        self.blocking_power_source: BlockingPowerSource = source
        self.gpus_per_stage = gpus_per_stage
        self.replicas = replicas
        self.total_power_uw: int = sum(powers)
        with naming_units(profile.path):
            self.network = build_network(pipeline, profile, powers)
            self._start = Start(pipeline, profile, powers, self.network)
        self._walk = Walk(self._start, -1 if full else self.total_power_uw, profile.path)
        self.min_time_ns = self._walk.min_time_ns
        self.max_time_ns = self._walk.max_time_ns
        self.slowest_time_ns = self._walk.slowest_time_ns

    @classmethod
    def trace(
        cls,
        pipeline: Pipeline,
        profile: Profile,
        *,
        whole: bool = True,
        progress: Progress | None = None,
        **setup: Any,
    ) -> Self:
        """As `envplan.trace_frontier`. What was traced last in this process is not traced again."""
        # What is walked at first makes no difference: the rest is walked when it is asked for.
        about = (pipeline.to_job(), profile.path, profile.name, profile.metadata)
        key = (cls, profile.sha256, repr((*about, profile.adjustments, sorted(setup.items()))))
        known = _TRACED.pop(key, None)
        if known is None:
            begin = perf_counter()
            known = cls(pipeline, profile, **setup)
            if whole or setup.get("full"):
                known.walk(progress=progress)
            known.trace_seconds = perf_counter() - begin
        _TRACED[key] = known
        while len(_TRACED) > 1 and (
            sum(len(one.pipeline.operations) for one in _TRACED.values()) > _MOST_KEPT
        ):
            _TRACED.pop(next(iter(_TRACED)))
        frontier: Self = copy(known)
        return frontier

    def retraced(
        self, pipeline: Pipeline, profile: Profile, *, replicas: int | None = None
    ) -> Self:
        """The frontier of another pipeline or profile, with GPUs and blocking power as here."""
        given = self.blocking_power_source == "argument"
        return self.trace(
            pipeline,
            profile,
            blocking_power=self.blocking_power_w[0] if given else None,
            gpus_per_stage=self.gpus_per_stage,
            replicas=self.replicas if replicas is None else replicas,
        )

    @cached_property
    def problem(self) -> Problem:
        """The pipeline with its option tables, as the replay takes it."""
        return Problem(self.pipeline, self.profile, self.blocking_power_uw)

    @property
    def num_gpus(self) -> int:
        """GPUs that each operation stands for."""
        return self.gpus_per_stage * self.replicas

    @property
    def blocking_power_w(self) -> tuple[float, ...]:
        """W of a waiting GPU on each stage, (num_stages,)."""
        return tuple(w_from_uw(p) for p in self.blocking_power_uw)

    def walk(self, time_ns: int | None = None, progress: Progress | None = None) -> Self:
        """This frontier, walked around a time from T_min on, ns, or whole; what has been done is
        not done again.

        Args:
            progress: as for trace_frontier.

        Raises:
            InputError: numbers outgrow exact 64-bit arithmetic.
        """
        if time_ns is None:
            self._walk.whole(progress)
        else:
            self._walk.near(min(time_ns, self.max_time_ns), progress)
        return self

    @property
    def times_ns(self) -> NDArray[np.int64]:
        """Breakpoints, whole ns, ascending, int64 (n,)."""
        return self._walk.whole().times_ns

    @property
    def slopes_uw(self) -> list[int]:
        """-dC/dT of the relaxed effective cost on the interval below each breakpoint, uW, (n,):
        what the cheapest ns costs that is saved next. Meaningless for the first."""
        return self._walk.whole().slopes_uw

    @cached_property
    def min_energy_time_ns(self) -> int:
        """T_star in whole ns."""
        walked = self._walk.main.record
        if walked.slopes_uw[-1] > self.total_power_uw or len(walked.times_ns) == 1:
            return self.max_time_ns
        energies = np.array(self._walk.whole().energies_fj, dtype=object)
        return int(self.times_ns[np.argmin(energies)])

    @property
    def min_time(self) -> float:
        """T_min, s: no choice of options finishes earlier."""
        return s_from_ns(self.min_time_ns)

    @property
    def min_energy_time(self) -> float:
        """T_star, s: where the relaxed energy is least; slower costs time and energy."""
        return s_from_ns(self.min_energy_time_ns)

    @property
    def slowest_time(self) -> float:
        """T_max, s: beyond it, a straggler leaves no more time that would be worth using."""
        return s_from_ns(self.slowest_time_ns)

    @cached_property
    def times(self) -> NDArray[np.float64]:
        """Breakpoints, s, ascending from T_min to T_star, (n,)."""
        return np.array([s_from_ns(t) for t in self.times_ns.tolist()])

    @cached_property
    def energies(self) -> NDArray[np.float64]:
        """Least relaxed energy at each breakpoint, J, (n,)."""
        return np.array([j_from_fj(e * self.num_gpus) for e in self._walk.whole().energies_fj])

    def energy_at(self, time: float) -> float:
        """Least relaxed energy of an iteration that ends by `time` s, in J: no plan can use less.

        Constant beyond T_star, where ending early and waiting for nobody is best.

        Raises:
            NoAnswerError: time is below T_min.
        """
        time_ns = self.checked_ns(ns_from_s_floor(_finite(time, "time")))
        return j_from_fj(self.lower_bound_fj(time_ns) * self.num_gpus)

    def lower_bound_fj(self, time_ns: int) -> int:
        """Least relaxed energy of an iteration that ends by a time, one GPU a stage, in fJ.

        Args:
            time_ns: not below T_min, ns.
        """
        time_ns = min(time_ns, self.min_energy_time_ns)
        return self._walk.near(time_ns).energy_fj(time_ns)

    def waiting_bound_fj(self, time_ns: int) -> int:
        """Least relaxed energy if everybody waits until a time, one GPU a stage, in fJ.

        Args:
            time_ns: not below T_min; beyond T_star, the first call takes a further trace.
        """
        return self.effective_bound_fj(time_ns) + self.total_power_uw * time_ns

    def effective_bound_fj(self, time_ns: int) -> int:
        """Least relaxed effective cost of an iteration that ends by a time: what it uses above
        what waiting for as long would, one GPU a stage, fJ. Not below T_min; falls up to T_max."""
        walk = self._walk if time_ns <= self.max_time_ns else self.beyond
        last = min(time_ns, walk.max_time_ns)
        # Effective costs are convex in time and least at T_max.
        effective = walk.near(last).energy_fj(last) - self.total_power_uw * last
        effective -= self.total_power_uw // _PART * (time_ns - last)
        return max(self.network.base_cost_fj, effective)

    def slope_uw(self, time_ns: int) -> int:
        """What a ns more saves around a time, uW; the power of all waiting GPUs from T_star on."""
        if self.min_time_ns == self.max_time_ns:
            return self.total_power_uw
        _, slope = self._walk.below(min(max(self.min_time_ns + 1, time_ns), self.max_time_ns))
        return max(slope, self.total_power_uw)

    def intervals_below(self, time_ns: int) -> Iterator[tuple[int, int, int]]:
        """What the frontier consists of below a time: (from, to, slope in between), ns, ns, uW, the
        latest first, down to T_min. An interval may come in pieces; one ends at T_star."""
        star = self.min_energy_time_ns
        while time_ns > self.min_time_ns:
            walk, least = (self._walk, 0) if time_ns <= star else (self.beyond, star)
            first, slope = walk.below(time_ns)
            yield max(first, least), time_ns, slope
            time_ns = max(first, least)

    def earliest_ns(self, holds: Callable[[int, int], bool], latest_ns: int) -> int:
        """The earliest time at which something holds; the latest where it does not before.

        Args:
            holds: of a time, ns, and the relaxed energy of one GPU a stage then, fJ; once it holds,
                it holds for later times up to latest_ns.
        """
        low, high = self.min_time_ns - 1, latest_ns
        while high - low > 1:
            middle = (low + high) // 2
            slow = middle > self.min_energy_time_ns
            bound = (self.waiting_bound_fj if slow else self.lower_bound_fj)(middle)
            low, high = (low, middle) if holds(middle, bound) else (middle, high)
        return high

    @cached_property
    def beyond(self) -> Walk:
        """The frontier beyond T_star: up to T_max, or in large pipelines a part of the way."""
        if self.max_time_ns == self.slowest_time_ns:
            return self._walk
        large = len(self.pipeline.operations) > _WALK_FROM_T_MAX
        return Walk(self._start, self.total_power_uw // _PART if large else -1, self.profile.path)

    def state_at(self, time_ns: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Event times (nodes,), ns, and flows (arcs,), uW, of the relaxed optimum at a time.

        Args:
            time_ns: from T_min to T_max, ns.
        """
        walk = self._walk if time_ns <= self.max_time_ns else self.beyond
        last, slowest = walk.max_time_ns, self.slowest_time_ns
        events, flows = walk.near(min(time_ns, last)).state_at(min(time_ns, last))
        if time_ns > last:
            # Not traced so far. A mean of two optima is in time, and by convexity near the optimum.
            # Rounded down, precedences of whole ns still hold.
            near, far = events.astype(object), self._slowest_events.astype(object)
            mean = (near * (slowest - time_ns) + far * (time_ns - last)) // (slowest - last)
            events = mean.astype(np.int64)
        return events, flows

    @cached_property
    def _slowest_events(self) -> NDArray[np.int64]:
        """Event times at T_max, ns, each as early as can be."""
        slowest = np.array([c.hull_time_ns[0] for c in self.network.cost_curves], np.int64)
        time_ns = slowest[self.network.curve[: len(self.pipeline.operations)]]
        starts, _ = self.pipeline.earliest_starts(time_ns)
        return network_events(starts, starts + time_ns)

    def checked_ns(self, time_ns: int) -> int:
        """A time, if a plan could be that fast.

        Raises:
            NoAnswerError: it is below T_min; says T_min.
        """
        if time_ns < self.min_time_ns:
            raise NoAnswerError(
                f"no plan finishes in {s_from_ns(time_ns):.9f} s; T_min is {self.min_time:.9f} s "
                "(leave the target out for no slowdown)"
            )
        return time_ns


def _blocking_powers(
    pipeline: Pipeline, profile: Profile, argument: float | None
) -> tuple[list[int], BlockingPowerSource]:
    """uW per pipeline stage and where it comes from."""
    if argument is not None:
        if not 0 <= _finite(argument, "blocking power") <= 1e5:
            raise InputError(f"blocking power must be between 0 and 100000 W, not {argument}")
        return [uw_from_w(argument)] * pipeline.num_stages, "argument"
    if profile.blocking_power_w is None:
        return [uw_from_w(DEFAULT_BLOCKING_POWER_W)] * pipeline.num_stages, "default"
    first = {op.stage: op.profile_stage for op in reversed(pipeline.operations)}
    powers = profile.blocking_power_w
    return [uw_from_w(powers[first[stage]]) for stage in range(pipeline.num_stages)], "profile"


def _finite(value: float, what: str) -> float:
    if not np.isfinite(value) or abs(value) > MAX_INTEGER:
        raise InputError(f"{what} must be a finite number, not {value}")
    return value
