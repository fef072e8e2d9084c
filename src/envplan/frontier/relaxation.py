"""The exact relaxed time-energy frontier of a pipeline: a lower bound on every plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from operator import sub
from typing import Any, Final, Literal, Self

import numpy as np
from numpy.typing import NDArray

from envplan._kernel import Trace
from envplan.cores import side_by_side
from envplan.errors import InputError, NoAnswerError
from envplan.frontier.network import Network, build_network, replayed_events
from envplan.frontier.start import Start
from envplan.frontier.stretch import Progress, Stretch
from envplan.pipeline import Pipeline
from envplan.profile import DEFAULT_BLOCKING_POWER_W, Profile
from envplan.replay import Problem
from envplan.units import MAX_INTEGER, j_from_fj, ns_from_s_floor, s_from_ns, uw_from_w, w_from_uw

BlockingPowerSource = Literal["profile", "argument", "default"]

# The walk from T_max to T_star grows faster with the pipeline than the rest. With more operations
# than this it starts where going slower saves an eighth of what it saves at T_star.
_WALK_FROM_T_MAX: Final = 2048
_PART: Final = 8
# Where single times are asked for, at most so many stretches are walked instead of the whole
# frontier, each as far at a time as this part of the way from T_star to T_min.
_FEW_STRETCHES: Final = 2
_AT_A_TIME: Final = 1 / 64
# The whole frontier of a long pipeline is walked in pieces, one for so many operations. Of optima
# that are alike, which one is found depends on where its piece began. So the pieces are always the
# same, and plans do not depend on the number of cores.
_OF_A_PIECE: Final = 4096
_DENSITY: Final = 1.75  # work lies denser towards T_min
_MOST_PIECES: Final = 4


class Relaxation:
    """The exact relaxed frontier: a lower bound on energy at every iteration time.

    It knows no plan. Made by `trace`. All energies are joules per iteration over all GPUs. What has
    not been walked is walked when somebody asks for it: all of it where breakpoints are wanted, for
    a single time only what is near.

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
        traced_once: what others work out from the trace alone; copies of a frontier share it.
        asked_once: what others work out from what this frontier was asked; each copy has its own.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        profile: Profile,
        blocking_power_uw: Sequence[int],
        blocking_power_source: BlockingPowerSource,
        gpus_per_stage: int,
        replicas: int,
        network: Network,
        *,
        from_flow: int | None = None,
    ) -> None:
        self.pipeline = pipeline
        self.profile = profile
        self.blocking_power_uw = tuple(blocking_power_uw)
        self.blocking_power_source = blocking_power_source
        self.gpus_per_stage = gpus_per_stage
        self.replicas = replicas
        self.network = network
        self.traced_once: dict[Any, Any] = {}
        self.asked_once: dict[Any, Any] = {}
        self.total_power_uw: int = sum(blocking_power_uw)
        self._start = Start(pipeline, profile, blocking_power_uw, network)
        flow = self.total_power_uw if from_flow is None else from_flow
        trace = network.trace() if flow < 0 else self._start.at_flow(flow)
        self.min_time_ns: int = trace.min_time
        self.slowest_time_ns: int = trace.max_time
        self._main = self._stretch_from(trace, flow)
        self._stretches: list[Stretch] = []
        self.max_time_ns = self._main.last_ns

    def _stretch_from(self, trace: Trace, from_flow: int) -> Stretch:
        return Stretch(
            trace,
            from_flow,
            self.network.base_cost_fj,
            self.total_power_uw,
            self.profile.path,
        )

    @classmethod
    def trace(
        cls,
        pipeline: Pipeline,
        profile: Profile,
        *,
        blocking_power: float | None = None,
        gpus_per_stage: int = 1,
        replicas: int = 1,
        full: bool = False,
        whole: bool = True,
        progress: Progress | None = None,
    ) -> Self:
        """Trace the whole relaxed frontier between T_min and T_star, exactly.

        The linear time-cost tradeoff problem (Kelley 1961; Fulkerson 1961; Phillips and Dessouky
        1977) on effective costs (Perseus, SOSP 2024), walked cut by cut without a time quantum.

        Args:
            blocking_power: W drawn by a waiting GPU, on every stage; default: the profile's
                blocking rows, else 70 W.
            gpus_per_stage: GPUs that run each stage together (tensor x context parallel).
            replicas: data-parallel replicas.
            full: also record the frontier from T_star to T_max, where waiting costs more than
                running.
            whole: now; else what is asked for, when it is.
            progress: called now and then with (time now, T_min), ns, the former falling to the
                latter.

        Raises:
            InputError: the profile does not fit the pipeline, an argument is out of range, or
                numbers outgrow exact 64-bit arithmetic.
        """
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
        powers, source = _blocking_powers(pipeline, profile, blocking_power)
        network = build_network(pipeline, profile, powers)
        try:
            traced = cls(
                pipeline,
                profile,
                powers,
                source,
                gpus_per_stage,
                replicas,
                network,
                from_flow=-1 if full else None,
            )
            if whole or full:
                traced._walk(progress)
        except (ValueError, OverflowError) as error:
            raise InputError(
                f"{error}; check that times are in seconds, energies in joules and powers in watts",
                path=profile.path,
            ) from error
        return traced

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

    def walk_to(self, time_ns: int, progress: Progress | None = None) -> None:
        """Trace around a time from T_min on, ns, as far as that has not been done yet.

        Args:
            progress: as for trace.

        Raises:
            InputError: as for trace.
        """
        self._stretch(min(time_ns, self.max_time_ns), progress)

    @property
    def _whole(self) -> Stretch:
        self._walk()
        return self._main

    def _walk(self, progress: Progress | None = None) -> None:
        """Walk all that is missing, side by side in pieces where it is long."""
        if self._main.first_ns > self.min_time_ns:
            ends = [*self._times_between(), self.min_time_ns]
            walk = _Pieces(progress, ends, self.max_time_ns)

            def one(k: int) -> Stretch | None:
                stretch = self._main if k == 0 else self._started(ends[k - 1])
                if stretch is not None:
                    stretch.reach(ends[k], walk.progress(k))
                return stretch

            begins_ns = self._main.last_ns
            for earlier in side_by_side(one, range(len(ends)))[1:]:
                if earlier is not None and earlier.last_ns < begins_ns:
                    begins_ns = earlier.last_ns
                    self._main.go_on_with(earlier, progress)
            self._main.reach(self.min_time_ns, progress)

    def _times_between(self) -> list[int]:
        """The times, ns, descending, that part the walk into pieces of about the same work."""
        pieces = min(_MOST_PIECES, len(self.pipeline.operations) // _OF_A_PIECE)
        if not self._start.can_begin_late:
            return []
        span = self._main.last_ns - self.min_time_ns
        parts = ((k / pieces) ** _DENSITY for k in range(pieces - 1, 0, -1))
        return [self.min_time_ns + int(part * span) for part in parts]

    def _started(self, time_ns: int) -> Stretch | None:
        """A stretch from a little after a time on; None where none is found quickly."""
        trace = self._start.at_time(time_ns)
        return None if trace is None else self._stretch_from(trace, -1)

    @property
    def times_ns(self) -> NDArray[np.int64]:
        """Breakpoints, whole ns, ascending, int64 (n,)."""
        return self._whole.times_ns

    @property
    def slopes_uw(self) -> list[int]:
        """-dC/dT of the relaxed effective cost on the interval below each breakpoint, uW, (n,):
        what the cheapest ns costs that is saved next. Meaningless for the first."""
        return self._whole.slopes_uw

    @cached_property
    def min_energy_time_ns(self) -> int:
        """T_star in whole ns."""
        if self._main.slopes_uw[-1] > self.total_power_uw or len(self._main.times_ns) == 1:
            return self.max_time_ns
        return int(self.times_ns[np.argmin(np.array(self._whole.energies_fj, dtype=object))])

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
        return np.array([j_from_fj(e * self.num_gpus) for e in self._whole.energies_fj])

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
        return self._relaxed_fj(min(time_ns, self.min_energy_time_ns))

    def waiting_bound_fj(self, time_ns: int) -> int:
        """Least relaxed energy if everybody waits until a time, one GPU a stage, in fJ.

        Args:
            time_ns: not below T_min; beyond T_star, the first call takes a further trace.
        """
        return self.effective_bound_fj(time_ns) + self.total_power_uw * time_ns

    def effective_bound_fj(self, time_ns: int) -> int:
        """Least relaxed effective cost of an iteration that ends by a time: what it uses above
        what waiting for as long would, one GPU a stage, fJ. Not below T_min; falls up to T_max."""
        slow = self if time_ns <= self.max_time_ns else self.beyond
        last = min(time_ns, slow.max_time_ns)
        # Effective costs are convex in time and least at T_max.
        effective = slow._relaxed_fj(last) - self.total_power_uw * last
        effective -= self.total_power_uw // _PART * (time_ns - last)
        return max(self.network.base_cost_fj, effective)

    def _relaxed_fj(self, time_ns: int) -> int:
        return self._stretch(time_ns).energy_fj(time_ns)

    def slope_uw(self, time_ns: int) -> int:
        """What a ns more saves around a time, uW; the power of all waiting GPUs from T_star on."""
        if self.min_time_ns == self.max_time_ns:
            return self.total_power_uw
        _, slope = self._below(min(max(self.min_time_ns + 1, time_ns), self.max_time_ns))
        return max(slope, self.total_power_uw)

    def intervals_below(self, time_ns: int) -> Iterator[tuple[int, int, int]]:
        """What the frontier consists of below a time up to max_time_ns: (from, to, slope in
        between), ns, ns, uW, the latest first, down to T_min. An interval may come in pieces."""
        while time_ns > self.min_time_ns:
            first, slope = self._below(time_ns)
            yield first, time_ns, slope
            time_ns = first

    def _below(self, time_ns: int) -> tuple[int, int]:
        stretch = self._stretch(time_ns - 1)
        # The next stretch may end right here.
        return stretch.below(min(time_ns, stretch.last_ns))

    def _stretch(self, time_ns: int, progress: Progress | None = None) -> Stretch:
        """One that has a time from T_min to max_time_ns."""
        step = max(1, int((self.max_time_ns - self.min_time_ns) * _AT_A_TIME))
        for stretch in (self._main, *self._stretches):
            if stretch.first_ns - step <= time_ns < stretch.last_ns or time_ns == stretch.last_ns:
                if stretch.first_ns > time_ns:
                    stretch.reach(time_ns - step, progress)
                return stretch
        if len(self._stretches) < _FEW_STRETCHES:
            found = self._started(time_ns)
            if found is not None:
                self._stretches.append(found)
            stretch = found or self._main
            stretch.reach(time_ns - step, progress)
            return stretch
        self._walk(progress)
        return self._main

    def earliest_under_power_ns(self, power_uw: int) -> int:
        """The earliest time at which the relaxed average power is at most so many uW of one GPU a
        stage together; T_max where it never is. The relaxed power falls with time."""
        return self._earliest(lambda time, energy: energy <= power_uw * time, self.slowest_time_ns)

    def earliest_within_energy_ns(self, energy_fj: int) -> int:
        """The earliest time at which the relaxed energy is at most so many fJ of one GPU a stage;
        T_star where it never is."""
        # Beyond T_star energy rises again.
        return self._earliest(lambda _, energy: energy <= energy_fj, self.min_energy_time_ns)

    def _earliest(self, holds: Callable[[int, int], bool], latest_ns: int) -> int:
        low, high = self.min_time_ns - 1, latest_ns
        while high - low > 1:
            middle = (low + high) // 2
            bound = (
                self.lower_bound_fj(middle)
                if middle <= self.min_energy_time_ns
                else self.waiting_bound_fj(middle)
            )
            low, high = (low, middle) if holds(middle, bound) else (middle, high)
        return high

    @cached_property
    def beyond(self) -> Relaxation:
        """The same frontier beyond T_star: up to T_max, or in large pipelines a part of the way."""
        if self.max_time_ns == self.slowest_time_ns:
            return self
        large = len(self.pipeline.operations) > _WALK_FROM_T_MAX
        return Relaxation(
            self.pipeline,
            self.profile,
            self.blocking_power_uw,
            self.blocking_power_source,
            self.gpus_per_stage,
            self.replicas,
            self.network,
            from_flow=self.total_power_uw // _PART if large else -1,
        )

    def state_at(self, time_ns: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Event times (nodes,), ns, and flows (arcs,), uW, of the relaxed optimum at a time.

        Args:
            time_ns: from T_min to T_max, ns.
        """
        slow = self if time_ns <= self.max_time_ns else self.beyond
        last, slowest = slow.max_time_ns, self.slowest_time_ns
        events, flows = slow._stretch(min(time_ns, last)).state_at(min(time_ns, last))
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
        count = len(self.pipeline.operations)
        curves = [self.network.cost_curves[c] for c in self.network.curve[:count].tolist()]
        time_ns = np.array([curve.hull_time_ns[0] for curve in curves], np.int64)
        return replayed_events(self.pipeline, time_ns)

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


class _Pieces:
    """The progress of pieces that are walked at the same time, as of one walk."""

    def __init__(self, progress: Progress | None, ends_ns: Sequence[int], first_ns: int) -> None:
        self._progress = progress
        self._ends_ns = ends_ns
        self._now_ns = [first_ns, *ends_ns[:-1]]

    def progress(self, piece: int) -> Progress | None:
        """What the walk of a piece is to call."""
        report = self._progress
        if report is None:
            return None

        def said(now_ns: int, _: int) -> None:
            self._now_ns[piece] = max(now_ns, self._ends_ns[piece])
            left = sum(map(sub, self._now_ns, self._ends_ns))
            report(self._ends_ns[-1] + left, self._ends_ns[-1])

        return said


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
