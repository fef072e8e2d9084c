"""The exact relaxed time-energy frontier of a pipeline, and plans on it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from envplan.errors import InputError, NoAnswerError
from envplan.frontier.network import Network, build_network, replayed_events
from envplan.frontier.rounding import HEATS, Rounding
from envplan.frontier.start import start_at_t_star
from envplan.frontier.switching import (
    NoPlanInTimeError,
    Switching,
    bound_allowance_fj,
    plan_with_switching,
)
from envplan.pipeline import Pipeline
from envplan.profile import Profile
from envplan.units import (
    MAX_INTEGER,
    j_from_fj,
    ns_from_s_floor,
    s_from_ns,
    uw_from_w,
    w_from_uw,
)

if TYPE_CHECKING:
    import pandas as pd

    from envplan._kernel import Trace
    from envplan.plan import Baseline, BlockingPowerSource, Plan

#: W that a GPU draws while it waits for a neighbour, where neither the profile nor the user says.
DEFAULT_BLOCKING_POWER_W = 70.0

# Annealing of plans that are one of many: enough to come close.
_SAMPLE_HEATS = (0.5,)
_SAMPLE_MOVES_SHARE = 0.25  # of the moves of a search with slow clocks

_AT_ONCE = Switching()

# The walk from T_max to T_star grows faster with the pipeline than the rest. With more operations
# than this it starts where going slower saves an eighth of what it saves at T_star.
_WALK_FROM_T_MAX = 2048
_PART = 8

Progress = Callable[[int, int], None]


def trace_frontier(
    pipeline: Pipeline,
    profile: Profile,
    *,
    blocking_power: float | None = None,
    gpus_per_stage: int = 1,
    replicas: int = 1,
    full: bool = False,
    progress: Progress | None = None,
) -> Frontier:
    """Trace the whole relaxed frontier between T_min and T_star, exactly.

    The linear time-cost tradeoff problem (Kelley 1961; Fulkerson 1961; Phillips and Dessouky 1977)
    on effective costs (Perseus, SOSP 2024), walked cut by cut without a time quantum.

    Args:
        blocking_power: W drawn by a waiting GPU, on every stage; default: the profile's blocking
            rows, else 70 W.
        gpus_per_stage: GPUs that run each stage together (tensor x context parallel).
        replicas: data-parallel replicas.
        full: also record the frontier from T_star to T_max, where waiting costs more than running.
        progress: called now and then with (time now, T_min), ns, the former falling to the latter.

    Raises:
        InputError: the profile does not fit the pipeline, an argument is out of range, or numbers
            outgrow exact 64-bit arithmetic.
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
    total_power = sum(powers)
    try:
        trace = network.trace()
        if not full:
            start_at_t_star(trace, pipeline, profile, powers, network)
        trace.run(-1 if full else total_power, progress)
    except (ValueError, OverflowError) as error:
        raise InputError(
            f"{error}; check that times are in seconds, energies in joules and powers in watts",
            path=profile.path,
        ) from error
    return Frontier(pipeline, profile, powers, source, gpus_per_stage, replicas, network, trace)


class Frontier:
    """The exact relaxed frontier: a lower bound on energy at every iteration time, and its plans.

    Made by trace_frontier. All energies are joules per iteration over all GPUs.

    Attributes:
        pipeline, profile, gpus_per_stage, replicas: what was traced.
        blocking_power_w: W of a waiting GPU on each stage, (num_stages,).
        blocking_power_source: "argument", "profile" or "default".
        min_time_ns, min_energy_time_ns: T_min and T_star in whole ns.
        slowest_time_ns: T_max, where every operation is at its least effective cost: a straggler
            slower than that leaves no more time worth using. Whole ns.
        times_ns: breakpoints, whole ns, ascending, int64 (n,).
        slopes_uw: -dC/dT of the relaxed effective cost on the interval below each breakpoint, uW,
            (n,): what the cheapest ns costs that is saved next. Meaningless for the first.
        times: breakpoints, s, ascending from T_min to T_star, (n,).
        energies: least relaxed energy at each of them, J, (n,).
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
        trace: Trace,
    ) -> None:
        self.pipeline = pipeline
        self.profile = profile
        self.blocking_power_uw = tuple(blocking_power_uw)
        self.blocking_power_source = blocking_power_source
        self.gpus_per_stage = gpus_per_stage
        self.replicas = replicas
        self._network = network
        self._trace = trace
        times, slopes, costs = trace.breakpoints()
        power = sum(blocking_power_uw)
        self.times_ns: NDArray[np.int64] = times[::-1].copy()
        self.slopes_uw: list[int] = slopes[::-1].tolist()
        self._power_uw = power
        self._energies_fj = [
            network.base_cost_fj + cost + power * time
            for cost, time in zip(costs[::-1], self.times_ns.tolist(), strict=True)
        ]
        self._ladders: dict[tuple[int, Switching, float | None], list[Plan]] = {}
        self.slowest_time_ns: int = trace.max_time
        self._star = int(np.argmin(np.array(self._energies_fj, dtype=object)))

    @property
    def blocking_power_w(self) -> tuple[float, ...]:
        return tuple(w_from_uw(p) for p in self.blocking_power_uw)

    @property
    def min_time_ns(self) -> int:
        return int(self.times_ns[0])

    @property
    def max_time_ns(self) -> int:
        """The last breakpoint: T_star, or T_max where the full frontier was traced."""
        return int(self.times_ns[-1])

    @property
    def min_energy_time_ns(self) -> int:
        return int(self.times_ns[self._star])

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
        return np.array([s_from_ns(t) for t in self.times_ns.tolist()])

    @cached_property
    def energies(self) -> NDArray[np.float64]:
        gpus = self.gpus_per_stage * self.replicas
        return np.array([j_from_fj(e * gpus) for e in self._energies_fj])

    def energy_at(self, time: float) -> float:
        """Least relaxed energy of an iteration that ends by `time` s, in J: no plan can use less.

        Constant beyond T_star, where ending early and waiting for nobody is best.

        Raises:
            NoAnswerError: time is below T_min.
        """
        bound = self.lower_bound_fj(self._within(ns_from_s_floor(_finite(time, "time"))))
        return j_from_fj(bound * self.gpus_per_stage * self.replicas)

    def to_dataframe(self) -> pd.DataFrame:
        """The breakpoints as columns iteration_time_s and energy_lower_bound_j."""
        from envplan.plotting.notebook import frontier_frame

        return frontier_frame(self)

    def _repr_html_(self) -> str:
        from envplan.plotting.notebook import frontier_html

        return frontier_html(self)

    def lower_bound_fj(self, time_ns: int) -> int:
        """Least relaxed energy at T_min <= time_ns <= max_time_ns, one GPU a stage, in fJ."""
        k = int(np.searchsorted(self.times_ns, time_ns))  # first breakpoint not before time_ns
        behind = int(self.times_ns[k]) - time_ns
        energy: int = self._energies_fj[k]
        return energy + (self.slopes_uw[k] - self._power_uw) * behind

    def waiting_bound_fj(self, time_ns: int) -> int:
        """Least relaxed energy if everybody waits until time_ns, one GPU a stage, in fJ.

        Args:
            time_ns: not below T_min; beyond T_star, the first call takes a further trace.
        """
        slow = self if time_ns <= self.max_time_ns else self._beyond
        last = min(time_ns, slow.max_time_ns)
        # Effective costs are convex in time and least at T_max.
        effective = slow.lower_bound_fj(last) - self._power_uw * last
        effective -= self._power_uw // _PART * (time_ns - last)
        return max(self._network.base_cost_fj, effective) + self._power_uw * time_ns

    @cached_property
    def _beyond(self) -> Frontier:
        """The same frontier beyond T_star: up to T_max, or in large pipelines a part of the way."""
        if self.max_time_ns == self.slowest_time_ns:
            return self
        trace, flow = self._network.trace(), -1
        if len(self.pipeline.operations) > _WALK_FROM_T_MAX:
            powers = self.blocking_power_uw
            start_at_t_star(trace, self.pipeline, self.profile, powers, self._network, _PART)
            flow = self._power_uw // _PART
        trace.run(flow)
        return Frontier(
            self.pipeline,
            self.profile,
            self.blocking_power_uw,
            self.blocking_power_source,
            self.gpus_per_stage,
            self.replicas,
            self._network,
            trace,
        )

    def _state_at(self, time_ns: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Event times, ns, and flows, uW, of the relaxed optimum between T_min and T_max."""
        slow = self if time_ns <= self.max_time_ns else self._beyond
        last, slowest = slow.max_time_ns, self.slowest_time_ns
        events, flows = slow._trace.state_at(min(time_ns, last))
        if time_ns > last:
            # Not traced so far. A mean of two optima is in time, and by convexity near the optimum.
            # Rounded down, precedences of whole ns still hold.
            near, far = events.astype(object), self._slowest_events.astype(object)
            mean = (near * (slowest - time_ns) + far * (time_ns - last)) // (slowest - last)
            events = mean.astype(np.int64)
        return events, flows

    @property
    def _slowest_events(self) -> NDArray[np.int64]:
        """Event times at T_max, ns, each as early as can be."""
        count = len(self.pipeline.operations)
        curves = [self._network.cost_curves[c] for c in self._network.curve[:count].tolist()]
        time_ns = np.array([curve.hull_time_ns[0] for curve in curves], np.int64)
        return replayed_events(self.pipeline, time_ns)

    def plan(
        self,
        target_time: float | None = None,
        *,
        slowdown: float | None = None,
        polish: float = 0.0,
        switch_latency: float = 0.0,
        min_dwell: float = 0.0,
    ) -> Plan:
        """Choose frequencies so that an iteration ends by a time, at the least energy we can find.

        Args:
            target_time: s. Above T_star the T_star plan is returned.
            slowdown: instead of target_time, a fraction of T_min to be slower by.
                Neither: no slowdown, T_min.
            polish: seconds to spend on improving the plan with CP-SAT.
            switch_latency: s from a clock request until the clock changes. The plan meets its
                target when replayed with it, and states that replay. Without a target: no slowdown
                against the least time found with it.
            min_dwell: s, least time between two requests of a stage for another clock.

        Raises:
            NoAnswerError: the target is below T_min, or no plan with such clocks was found in time.
            InputError: a number is out of range, or two arguments exclude each other.
        """
        switching = Switching.from_seconds(switch_latency, min_dwell)
        target, asked = self._asked(target_time, slowdown)
        try:
            return self._plan_at(self._within(asked), target, polish, switching=switching)
        except NoPlanInTimeError as error:
            if target["kind"] != "no-slowdown":
                raise
            # T_min needs clocks to change in no time; the least time found does not.
            target["time_s"] = s_from_ns(error.least_ns)
            return self._plan_at(error.least_ns, target, polish, switching=switching)

    def _asked(
        self, target_time: float | None, slowdown: float | None
    ) -> tuple[dict[str, float | str], int]:
        """A plan's target and the deadline that it means, ns.

        Raises:
            InputError: a number is out of range, or both targets are given.
        """
        if target_time is not None and slowdown is not None:
            raise InputError("give target_time or slowdown, not both")
        if slowdown is not None:
            if _finite(slowdown, "slowdown") < 0:
                raise InputError(f"slowdown must not be negative, not {slowdown}")
            asked = self.min_time_ns + int(self.min_time_ns * slowdown)
            return {"kind": "slowdown", "slowdown": slowdown, "time_s": s_from_ns(asked)}, asked
        if target_time is not None:
            asked = ns_from_s_floor(_finite(target_time, "target time"))
            return {"kind": "time", "time_s": target_time}, asked
        return {"kind": "no-slowdown", "time_s": self.min_time}, self.min_time_ns

    def robust_plan(
        self,
        probability: float,
        target_time: float | None = None,
        *,
        slowdown: float | None = None,
        noise: float | None = None,
        switch_latency: float = 0.0,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> Plan:
        """Choose frequencies so that an iteration ends by a time with a probability.

        Each operation's time is noisy by itself, as in envplan.simulate. The plan states how many
        fresh replays with noise ended in time and what that proves, and its gap is against the
        relaxed bound of the same target without noise.

        Args:
            probability: above 0 and up to 0.999; proved with 99% confidence.
            target_time: as for plan.
            slowdown: as for plan.
            noise: standard deviation of times, as a fraction of them, up to 1; default: by the
                profile's column time_std.
            switch_latency: as for plan; the replays with noise are with it, too.
            seed: of the draws, not negative.
            progress: called now and then with (steps to go, 0).

        Raises:
            NoAnswerError: no plan is that robust; says what the fastest holds and could hold.
            InputError: a number is out of range, or the profile does not say how times vary.
        """
        from envplan.frontier.robust import Noise, robust_plan

        target, asked = self._asked(target_time, slowdown)
        self._within(asked)
        return robust_plan(
            self,
            asked,
            target,
            probability,
            Noise(noise),
            latency_ns=Switching.from_seconds(switch_latency, 0.0).latency_ns,
            seed=seed,
            progress=progress,
        )

    def rounding_at(self, time_ns: int) -> Rounding:
        """The rounding problem of a deadline between T_min and T_max, ns, solved."""
        event_times, _ = self._state_at(time_ns)
        rounding = Rounding(self.pipeline, self._network, event_times, time_ns)
        rounding.anneal()
        return rounding

    def min_energy_plan(
        self, *, polish: float = 0.0, switch_latency: float = 0.0, min_dwell: float = 0.0
    ) -> Plan:
        """The plan of least energy: T_star. Arguments and errors: as for plan."""
        target: dict[str, float | str] = {"kind": "min-energy", "time_s": self.min_energy_time}
        switching = Switching.from_seconds(switch_latency, min_dwell)
        return self._plan_at(self.min_energy_time_ns, target, polish, switching=switching)

    def max_frequency_plan(self) -> Plan:
        """What happens without a plan: every operation at its highest frequency."""
        from envplan.plan import max_frequency_options, price

        options = max_frequency_options(self.pipeline, self.profile)
        priced = price(self.pipeline, self.profile, options, self.blocking_power_uw)
        return self.priced_plan(
            options, {"kind": "max-frequency"}, priced.makespan_ns, planner="max_frequency"
        )

    def sample_plans(self, count: int, *, progress: Progress | None = None) -> list[Plan]:
        """Plans at `count` times evenly spread over [T_min, T_star], ascending.

        Made with less effort each than plan() takes, for pictures and tables of many.

        Args:
            progress: called with (plans to go, 0), the former falling to the latter.
        """
        span = self.min_energy_time_ns - self.min_time_ns
        steps = max(1, count - 1)
        times = sorted({self.min_time_ns + span * k // steps for k in range(max(1, count))})
        plans: list[Plan] = []
        for time_ns in times:
            if progress is not None:
                progress(len(times) - len(plans), 0)
            target: dict[str, float | str] = {"kind": "time", "time_s": s_from_ns(time_ns)}
            plans.append(self._plan_at(time_ns, target, 0.0, heats=_SAMPLE_HEATS))
        return plans

    def ladder(
        self,
        count: int = 32,
        *,
        switch_latency: float = 0.0,
        min_dwell: float = 0.0,
        peak_power_cap: float | None = None,
        progress: Progress | None = None,
    ) -> list[Plan]:
        """Plans for stragglers, ascending in time: each beats all faster ones where there is time.

        They lie between T_min and T_max, T_star's among them, and each saves about as much on the
        one before as all others do. Made once, then kept.

        Args:
            count: at most so many, from 1 up.
            switch_latency, min_dwell: as for plan; of every plan.
            peak_power_cap: W that all GPUs together never draw more than, waiting for a straggler
                included; not with slow clocks. Times that no plan is found for, with such clocks
                or under the cap, are left out.
            progress: called with (plans to go, 0), the former falling to the latter.

        Raises:
            InputError: a number is out of range, or two do not go together.
            NoAnswerError: waiting alone draws more than the cap.
        """
        switching = Switching.from_seconds(switch_latency, min_dwell)
        make = partial(self._rung, switching=switching)
        if peak_power_cap is not None:
            if switching:
                raise InputError("a cap on the peak goes with clocks that change at once")
            make = partial(self._rung_under_cap, cap_uw=self._cap_to_wait_under(peak_power_cap))
        key = (count, switching, peak_power_cap)
        if key not in self._ladders:
            first, *later = self._spread(self.min_time_ns, count)
            star = self.min_energy_time_ns
            if later:  # T_star's plan stands in for the one next to it
                later[min(range(len(later)), key=lambda k: abs(later[k] - star))] = star
            times = sorted({first, *later})
            self._ladders[key] = self._rungs(times, progress, make)
        return self._ladders[key]

    def slower_plans(self, count: int) -> list[Plan]:
        """At most `count` plans between T_star and T_max, ascending in time, as in a ladder.

        Worth following only while a straggler makes everyone wait.
        """
        times = self._spread(self.min_energy_time_ns, count + 1)
        return self._rungs(times, None, self._rung)[1:]

    def _rungs(
        self, times: Sequence[int], progress: Progress | None, make: Callable[[int], Plan]
    ) -> list[Plan]:
        """Plans for times in ns, ascending, without those that save nothing on one before."""
        rungs: list[Plan] = []
        for made, time_ns in enumerate(times):
            if progress is not None:
                progress(len(times) - made, 0)
            try:
                plan = make(time_ns)
            except NoAnswerError:
                continue
            if not rungs or plan.beats_where_there_is_time(rungs[-1]):
                rungs.append(plan)
        return rungs

    def _spread(self, first_ns: int, count: int) -> list[int]:
        """Times from one to T_max between which the effective cost falls alike, ns, ascending."""
        times = [t for t in self._beyond.times_ns.tolist() if t >= first_ns]
        times.append(self.slowest_time_ns)
        costs = [self.waiting_bound_fj(t) - self._power_uw * t for t in times]
        saved = [float(costs[0] - cost) for cost in costs]
        wanted = np.linspace(0.0, saved[-1], max(1, count))
        return sorted({round(t) for t in np.interp(wanted, saved, times).tolist()})

    def _rung(self, time_ns: int, switching: Switching = _AT_ONCE) -> Plan:
        kind = "time" if time_ns <= self.min_energy_time_ns else "sync-time"
        target: dict[str, float | str] = {"kind": kind, "time_s": s_from_ns(time_ns)}
        heats = HEATS if time_ns == self.min_energy_time_ns else _SAMPLE_HEATS
        return self._plan_at(time_ns, target, 0.0, heats=heats, switching=switching)

    def _rung_under_cap(self, time_ns: int, cap_uw: int) -> Plan:
        from envplan.frontier.peak_power import peak_of_plan_uw, plan_under_peak

        plan = self._rung(time_ns)
        if peak_of_plan_uw(self, plan) <= cap_uw:
            return plan
        found = plan_under_peak(self, cap_uw, time_ns)
        target: dict[str, float | str] = {"kind": "sync-time", "time_s": s_from_ns(time_ns)}
        return self.priced_plan(found.options, target, time_ns)

    def _cap_to_wait_under(self, watts: float) -> int:
        """A cap over all GPUs in W as one of a GPU a stage, uW, which waiting GPUs keep to."""
        cap_uw = self._peak_cap_uw(watts)
        if self._power_uw > cap_uw:
            least = w_from_uw(self._power_uw * self.gpus_per_stage * self.replicas)
            raise NoAnswerError(
                f"GPUs that wait for a straggler draw {least:.10g} W, more than the cap of "
                f"{watts:.10g} W"
            )
        return cap_uw

    def _peak_cap_uw(self, watts: float) -> int:
        """A cap over all GPUs in W as one of a GPU a stage, uW."""
        if not 0 <= _finite(watts, "peak power cap") <= 1e12:
            raise InputError(f"peak power cap must be between 0 and 1e12 W, not {watts}")
        return uw_from_w(watts) // (self.gpus_per_stage * self.replicas)

    def plan_for_straggler(self, time: float) -> Plan:
        """The plan to follow while a straggler makes everyone finish at `time` s.

        The slowest worthwhile plan that is still in time: looked up in the ladder, not solved for,
        as Perseus (SOSP 2024) does. A straggler faster than T_min is none: the T_min plan. Beyond
        T_star a slower plan uses more energy than T_star's by its own end, but less by the
        straggler's; beyond T_max the rest is waited out.
        """
        ladder = self.ladder()
        _finite(time, "straggler time")
        rung = bisect_right(ladder, time, key=lambda plan: plan.iteration_time)
        return ladder[max(0, rung - 1)]

    def with_straggler(self, plan: Plan, time: float) -> Plan:
        """A plan of this pipeline, noting a straggler that it waits for, and what both cost.

        The lower bound on the energy until then is that of all plans that are in time for it.

        Args:
            time: when the straggler has finished, s.
        """
        asked = ns_from_s_floor(_finite(time, "straggler time"))
        if time <= plan.iteration_time or asked < self.min_time_ns:
            return plan.with_straggler(time)
        bound = self.waiting_bound_fj(asked)
        if plan.job.switch_latency_s is not None:
            from envplan.simulation import simulate

            bound -= bound_allowance_fj(simulate(plan, self.profile), self.blocking_power_uw)
        gpus = self.gpus_per_stage * self.replicas
        return plan.with_straggler(time, j_from_fj(max(0, bound) * gpus))

    def plan_for_energy_budget(self, joules: float, *, polish: float = 0.0) -> Plan:
        """The fastest plan found that uses at most `joules` per iteration over all GPUs.

        Raises:
            NoAnswerError: no plan is known that does; says the least energy of any.
        """
        _finite(joules, "energy budget")
        return self._fastest(
            lambda plan: plan.energy <= joules,
            {"kind": "energy-budget", "energy_j": joules},
            polish,
            lambda plan: (
                f"no plan uses {joules:.10g} J or less; the least is {plan.energy:.10g} J "
                f"at {plan.iteration_time:.9f} s"
            ),
        )

    def plan_for_power_cap(self, watts: float, *, polish: float = 0.0) -> Plan:
        """The fastest plan found whose average power over all GPUs is at most `watts`.

        It may be slower than T_star: energy rises from there on, but power goes on falling. Such
        plans are not polished.

        Args:
            polish: as for plan().

        Raises:
            NoAnswerError: no plan is known that does; says the least average power found.
        """
        if _finite(watts, "power cap") < 0:
            raise InputError(f"power cap must not be negative, not {watts}")
        target: dict[str, float | str] = {"kind": "power-cap", "power_w": watts}
        try:
            return self._fastest(
                lambda plan: plan.average_power <= watts,
                target,
                polish,
                lambda plan: f"{plan.average_power:.10g} W at T_star is above {watts:.10g} W",
            )
        except NoAnswerError:
            from envplan.frontier.average_power import slow_plan_under_cap

            return slow_plan_under_cap(self, watts, target)

    def plan_for_sync(
        self,
        time: float,
        *,
        polish: float = 0.0,
        switch_latency: float = 0.0,
        min_dwell: float = 0.0,
    ) -> Plan:
        """The plan of least energy if everybody waits until `time` s whoever is ready earlier.

        Unlike plan(), it goes beyond T_star, up to T_max: what is saved by finishing early is spent
        on waiting.

        Args:
            polish, switch_latency, min_dwell: as for plan.

        Raises:
            NoAnswerError: time is below T_min, or no plan with such clocks was found in time.
        """
        switching = Switching.from_seconds(switch_latency, min_dwell)
        asked, star = ns_from_s_floor(_finite(time, "time")), self.min_energy_time_ns
        self._within(asked)
        target: dict[str, float | str] = {"kind": "sync-time", "time_s": time}
        time_ns = min(asked, self.slowest_time_ns)
        plan = self._plan_at(time_ns, target, polish, switching=switching, deadline_ns=asked)
        if time_ns > star:
            try:
                early = self._plan_at(star, target, 0.0, switching=switching, deadline_ns=asked)
            except NoPlanInTimeError:
                return plan
            if early.beats_where_there_is_time(plan):
                return early
        return plan

    def plan_for_peak_power_cap(
        self,
        watts: float,
        *,
        target_time: float | None = None,
        slowdown: float | None = None,
        min_energy: bool = False,
        progress: Progress | None = None,
    ) -> Plan:
        """A plan that draws at most `watts` over all GPUs at every moment of its replay.

        The fastest found or, with a target, that of least energy found in time. The lower bound on
        energy is that of the frontier without the cap; see envplan.frontier.peak_power.

        Args:
            target_time: as for plan().
            slowdown: as for plan().
            min_energy: any time will do.
            progress: called with (rounds to go, 0), the former falling.

        Raises:
            NoAnswerError: no such plan was found; says the least peak, or the least time, that was.
            InputError: a number is out of range, or two targets are given.
        """
        from envplan.frontier.peak_power import plan_under_peak

        if (target_time is not None) + (slowdown is not None) + min_energy > 1:
            raise InputError("give one of target_time, slowdown and min_energy")
        cap_uw = self._peak_cap_uw(watts)
        if target_time is None and slowdown is None:
            kind = "min-energy" if min_energy else "peak-power-cap"
            found = plan_under_peak(self, cap_uw, MAX_INTEGER if min_energy else None, progress)
            target: dict[str, float | str] = {"kind": kind, "peak_power_w": watts}
            return self.priced_plan(found.options, target, found.makespan_ns)
        target, asked = self._asked(target_time, slowdown)
        self._within(asked)
        found = plan_under_peak(self, cap_uw, asked, progress)
        return self.priced_plan(found.options, {**target, "peak_power_w": watts}, asked)

    def _fastest(
        self,
        meets: Callable[[Plan], bool],
        target: dict[str, float | str],
        polish: float,
        refusal: Callable[[Plan], str],
    ) -> Plan:
        """Bisects the times: energy and power fall along the frontier, but for rounding.

        Only the plan that comes out is polished, or T_star's if polishing may yet make it meet.
        """
        low, high = self.min_time_ns, self.min_energy_time_ns
        best_ns, best = low, self._plan_at(low, target, 0.0)
        if not meets(best):
            best_ns, best = high, self._plan_at(high, target, 0.0)
            resolution = max(1, (high - low) // 1000)
            while meets(best) and high - low > resolution:
                middle = (low + high) // 2
                plan = self._plan_at(middle, target, 0.0)
                if meets(plan):
                    best_ns, best, high = middle, plan, middle
                else:
                    low = middle
        if polish > 0:
            polished = self._plan_at(best_ns, target, polish)
            if meets(polished):
                return polished
        if not meets(best):
            raise NoAnswerError(refusal(best))
        return best

    def _plan_at(
        self,
        time_ns: int,
        target: dict[str, float | str],
        polish: float,
        heats: Sequence[float] = HEATS,
        switching: Switching | None = None,
        deadline_ns: int | None = None,
    ) -> Plan:
        """The plan for a time between T_min and T_max, as if everybody waited until then.

        Args:
            deadline_ns: what the plan states; default: that time.
        """
        event_times, flows = self._state_at(time_ns)
        rounding = Rounding(self.pipeline, self._network, event_times, time_ns)
        rounding.anneal(heats)
        # Beyond T_star only what is used until the deadline counts, however early the last one is.
        waits = time_ns > self.min_energy_time_ns
        stated_ns = deadline_ns or time_ns
        if switching:
            if polish > 0:
                raise InputError("polish goes with clocks that change at once and at any time")
            return plan_with_switching(
                self,
                rounding,
                switching,
                stated_ns if waits else time_ns,
                target,
                stated_ns=stated_ns,
                moves_share=1.0 if heats is HEATS else _SAMPLE_MOVES_SHARE,
            )
        power, least_fj = self._power_uw, self.waiting_bound_fj(time_ns)
        if waits:
            power, least_fj = 0, least_fj - self._power_uw * time_ns
        bound_fj, bound = None if waits else least_fj, "relaxation"
        if polish > 0:
            from envplan.frontier.polish import polish_plan

            proved = polish_plan(rounding, self._network, flows, power, least_fj, polish)
            if proved > least_fj and not waits:
                bound_fj, bound = proved, "cp-sat"
        return self.priced_plan(rounding.options, target, stated_ns, bound_fj=bound_fj, bound=bound)

    def priced_plan(
        self,
        options: NDArray[np.int32],
        target: dict[str, float | str],
        deadline_ns: int,
        *,
        bound_fj: int | None = None,
        bound: str = "relaxation",
        planner: str = "frontier",
    ) -> Plan:
        """The plan of a choice of options, replayed, priced and set against the lower bound.

        Args:
            options: int32 (N,), for each operation the row of its option table.
            target: what was asked: `kind` and the number that goes with it.
            deadline_ns: the time that was planned for, not below T_min, ns.
            bound_fj: least energy possible by then for one GPU a stage, fJ; default: the relaxed.
            bound: what that follows from, "relaxation" or "cp-sat".
            planner: what chose the options.
        """
        from envplan.plan import build_plan

        if bound_fj is None:
            bound_fj = self.lower_bound_fj(min(deadline_ns, self.min_energy_time_ns))
        return build_plan(
            self.pipeline,
            self.profile,
            options,
            blocking_power_uw=self.blocking_power_uw,
            blocking_power_source=self.blocking_power_source,
            gpus_per_stage=self.gpus_per_stage,
            replicas=self.replicas,
            target=target,
            lower_bound_fj=bound_fj,
            bound=bound,
            planner=planner,
            deadline_ns=deadline_ns,
            baseline=self._baseline,
        )

    @cached_property
    def _baseline(self) -> Baseline:
        from envplan.plan import max_frequency_baseline

        return max_frequency_baseline(
            self.pipeline,
            self.profile,
            blocking_power_uw=self.blocking_power_uw,
            gpus_per_stage=self.gpus_per_stage,
            replicas=self.replicas,
        )

    def _within(self, time_ns: int) -> int:
        if time_ns < self.min_time_ns:
            raise NoAnswerError(
                f"no plan finishes in {s_from_ns(time_ns):.9f} s; T_min is {self.min_time:.9f} s"
            )
        return min(time_ns, self.min_energy_time_ns)


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
