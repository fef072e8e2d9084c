"""The frontier as users hold it: the relaxation, and plans made on it by one call."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from envplan._io.completion import names_for_users
from envplan._io.files import atomic_write
from envplan._io.notebook import drawing, png_of
from envplan.costs.model import Run
from envplan.errors import InputError
from envplan.frontier import Progress, Relaxation
from envplan.pipeline import Pipeline
from envplan.plan import Job, Plan, build_plan
from envplan.plan.target import Target
from envplan.profile import Profile
from envplan.replay import Ask, Replay
from envplan.request import Request
from envplan.request.request import ChangePolicy
from envplan.solve.cache import PlanCache
from envplan.solve.conditions import SearchConditions
from envplan.solve.doubts import doubt_job, doubt_request
from envplan.solve.solver import admissible_frontier, solve
from envplan.solve.straggler_ladder import plans_at, straggler_ladder, times_of_equal_savings
from envplan.units import in_10uw, s_from_ns

if TYPE_CHECKING:
    import os

    import pandas as pd
    from matplotlib.figure import Figure

#: Names of a frontier that the library alone uses.
_INNER_NAMES: Final = (
    "add_choice", "beyond", "intervals_below", "ladder_for", "network", "optimum_anew", "plans_at",
    "plans_to_draw", "problem", "retraced", "slower_plans_to_draw", "state_at", "trace",
    "trace_seconds", "tracer", "walk",
)  # fmt: skip
#: How many plans a ladder for stragglers has, where nobody says.
LADDER: Final = 32
#: Up to so many operations plans to draw are searched for as long as others.
_FULL_SEARCH_OPERATIONS: Final = 2000
#: How many plans beyond T_star a page has, and how many operations jobs with such plans at most.
_SLOWER_PLANS: Final = 12
_MAX_OPERATIONS_FOR_SLOWER: Final = 8000


class Frontier(Relaxation):
    """The exact relaxed frontier of a pipeline, and plans on it. Made by `trace_frontier`.

    All energies are joules per iteration over all GPUs. Threads may share a frontier and its
    copies: they read the curve and make plans as one thread alone would, plans one after another.

    Attributes:
        min_time, min_energy_time, slowest_time: T_min, T_star and T_max, s.
        times, energies: breakpoints of the relaxed frontier, s and J, ascending time; a lower
            bound on every plan.
    """

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
        super().__init__(
            pipeline,
            profile,
            blocking_power=blocking_power,
            gpus_per_stage=gpus_per_stage,
            replicas=replicas,
            full=full,
        )
        self._plan_cache = PlanCache()

    def __copy__(self) -> Self:
        """The same frontier, whose plans do not depend on what this one was asked."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin._plan_cache = self._plan_cache.for_copy()
        return twin

    def plan(
        self,
        target_time: float | None = None,
        *,
        slowdown: float | None = None,
        min_energy: bool = False,
        sync_time: float | None = None,
        straggler_time: float | None = None,
        run: Run | None = None,
        energy_budget: float | None = None,
        power_cap: float | None = None,
        peak_power_cap: float | None = None,
        ramp_limit: float | None = None,
        ramp_window: float | None = None,
        probability: float | None = None,
        noise: float | None = None,
        seed: int | None = None,
        switch_latency: float | None = None,
        ask: Ask = "ahead",
        min_dwell: float | None = None,
        min_hold: float | None = None,
        changes: ChangePolicy = "fewest",
        change_cost: float = 0.0,
        change_stall: float = 0.0,
        polish: float = 0.0,
        moves: float = 1.0,
        ladder: int = 0,
        progress: Progress | None = None,
    ) -> Plan:
        """The best plan found for a target and limits. All of them combine.

        Args:
            target_time: least energy with an iteration of at most so many s; above T_star the
                T_star plan is returned.
            slowdown: instead, at most that fraction above T_min.
            min_energy: instead, least energy of all, at T_star.
            sync_time: instead, least energy until so many s, when everybody has waited.
                Without any of these: no slowdown.
            straggler_time: some replica takes so many s anyway, so the time until then may be used.
            run: whose costs are wanted; with a deadline of its own, the cheapest.
            energy_budget: J of an iteration at most; without a target, the fastest plan within it.
            power_cap: W on average at most; likewise.
            peak_power_cap: W at any time at most; likewise.
            ramp_limit: by how many W a second the power may change.
            ramp_window: s over which it is averaged for that.
            probability: that the target is held though times vary, 0 to 1.
            noise: standard deviation of times, as a fraction; default: the profile's time_std.
            seed: of the noise that is drawn.
            switch_latency: s from a clock request until the clock changes; default: what the
                profile's sidecar says was measured, and 0 where it says nothing.
            ask: for late clocks `ahead` of time, or as operations `start`.
            min_dwell: s between two requests of a stage for another clock, at least.
            min_hold: the older name of min_dwell.
            changes: of clock: the `fewest` for 0.1% of energy, or `free`, as many as it takes.
            change_cost: J that a change costs; above 0 it counts in place of `changes`.
            change_stall: s for which a change stops its GPU; likewise.
            polish: s of further search.
            moves: share of the usual moves of the search.
            ladder: slower plans to carry along for stragglers, at most.
            progress: called now and then with (steps to go, 0), the former falling.

        Raises:
            NoAnswerError: there is no such plan; says what can be had.
            InputError: a number is out of range, or two arguments exclude each other.
        """
        if switch_latency is None:
            switch_latency = self.profile.measured_latency_s or 0.0
        request = Request.from_options(
            target_time,
            slowdown=slowdown,
            min_energy=min_energy,
            sync_time=sync_time,
            straggler_time=straggler_time,
            run=run,
            energy_budget=energy_budget,
            power_cap=power_cap,
            peak_power_cap=peak_power_cap,
            ramp_limit=ramp_limit,
            ramp_window=ramp_window,
            probability=probability,
            noise=noise,
            seed=seed,
            switch_latency=switch_latency,
            ask=ask,
            min_dwell=min_dwell,
            min_hold=min_hold,
            changes=changes,
            change_cost=change_cost,
            change_stall=change_stall,
            polish=polish,
            moves=moves,
            ladder=ladder,
        )
        return self.solve(request, progress=progress)

    def solve(
        self, request: Request, *, progress: Progress | None = None, doubts: bool = True
    ) -> Plan:
        """The best plan found for a request, such as another plan's `request`.

        Args:
            request: what is asked.
            progress: as for plan.
            doubts: warn (DoubtWarning) of a request that no training has.

        Raises:
            NoAnswerError: there is no such plan; says what can be had.
            InputError: the profile does not say how times vary, or a rate ends before the run.
        """
        if doubts:
            doubt_request(self, request)
        with self._plan_cache.lock:
            return solve(self, request, self._plan_cache, progress)

    def max_frequency_plan(self) -> Plan:
        """The plan of every operation at its highest frequency: what happens without planning."""
        replay = self.problem.replay(self.problem.max_frequency_rows)
        target = Target(kind="max-frequency", deadline_s=s_from_ns(replay.makespan_ns))
        return build_plan(self, replay, target=target, planner="max_frequency")

    def ladder(
        self, count: int = LADDER, *, progress: Progress | None = None, **options: Any
    ) -> list[Plan]:
        """Plans for stragglers, ascending in time: each beats all faster ones where there is time.

        They lie between T_min and T_max, T_star's among them.

        Args:
            count: at most so many, from 1 up.
            progress: called with (plans to go, 0), the former falling to the latter.
            options: limits that every plan keeps, as for plan.

        Raises:
            InputError: a number is out of range.
            NoAnswerError: waiting alone draws more than a cap on the peak.
        """
        return self.ladder_for(Request.from_options(ladder=count, **options), progress=progress)

    def ladder_for(self, request: Request, *, progress: Progress | None = None) -> list[Plan]:
        """The ladder whose plans all keep the limits of a request. As for ladder."""
        with self._plan_cache.lock:
            frontier, cache = admissible_frontier(self, request, self._plan_cache)
            return straggler_ladder(frontier, request, cache, progress)

    def plans_at(self, request: Request, times_ns: Sequence[int]) -> list[Plan]:
        """Plans for stragglers at some times, ascending: each beats all faster ones in time.

        Args:
            request: whose limits all keep; times that no plan is found for are left out.
            times_ns: ascending, ns. Beyond T_star everybody waits until then.
        """
        with self._plan_cache.lock:
            frontier, cache = admissible_frontier(self, request, self._plan_cache)
            return plans_at(frontier, request, times_ns, cache)

    def add_choice(self, replay: Replay) -> None:
        """Let plans without limits use a choice that somebody else has found.

        Args:
            replay: of the choice, on clocks that follow at once.
        """
        with self._plan_cache.lock:
            self._plan_cache.add_choice(SearchConditions(), replay)

    def plan_for_straggler(self, time: float) -> Plan:
        """The plan to follow while a straggler makes everyone finish at `time` s.

        The slowest worthwhile plan that is still in time: looked up in the ladder, not solved for,
        as Perseus (SOSP 2024) does. A straggler faster than T_min is none: the T_min plan. Beyond
        T_star a slower plan uses more energy than T_star's by its own end, but less by the
        straggler's; beyond T_max the rest is waited out.
        """
        rung = bisect_right(self._ladder, time, key=lambda plan: plan.iteration_time)
        return self._ladder[max(0, rung - 1)]

    @cached_property
    def _ladder(self) -> list[Plan]:
        return self.ladder()

    def sample_plans(
        self,
        count: int,
        *,
        beyond: bool = False,
        moves: float = 1.0,
        progress: Progress | None = None,
    ) -> list[Plan]:
        """Plans at `count` times spread over [T_min, T_star], ascending; for pictures and tables.

        Args:
            count: at most so many.
            beyond: instead, over [T_star, T_max], without T_star's: worth following only while a
                straggler makes everyone wait.
            moves: share of the usual moves of the search.
            progress: called with (plans to go, 0), the former falling to the latter.
        """
        request = Request.from_options(moves=moves, changes="free")
        t_min_ns, t_star_ns = self.min_time_ns, self.min_energy_time_ns
        if beyond:
            times_ns = times_of_equal_savings(self, t_star_ns, count + 1)[1:]
        else:
            steps = max(1, count - 1)
            span_ns = t_star_ns - t_min_ns
            times_ns = sorted({t_min_ns + span_ns * k // steps for k in range(max(1, count))})
        with self._plan_cache.lock:
            plans = plans_at(self, request, times_ns, self._plan_cache, progress)
        if beyond:
            return [plan for plan in plans if plan.iteration_time > self.min_energy_time]
        return plans

    def plans_to_draw(self, max_plans: int, *, progress: Progress | None = None) -> list[Plan]:
        """Plans along the frontier for a picture or page.

        Of large jobs there are fewer, and those are less searched for.

        Args:
            max_plans: how many plans there are at most.
            progress: as for sample_plans.
        """
        count, moves = self._drawing_effort(max_plans)
        return self.sample_plans(count, moves=moves, progress=progress)

    def slower_plans_to_draw(self) -> list[Plan]:
        """Plans beyond T_star for a page on which a straggler's time can be moved.

        Large jobs have none, for they would take a further trace.
        """
        if len(self.pipeline.operations) > _MAX_OPERATIONS_FOR_SLOWER:
            return []
        count, moves = self._drawing_effort(_SLOWER_PLANS)
        return self.sample_plans(count, beyond=True, moves=moves)

    def _drawing_effort(self, max_plans: int) -> tuple[int, float]:
        """How many plans to draw, and the share of the usual moves to search them with."""
        moves_share = min(1.0, _FULL_SEARCH_OPERATIONS / len(self.pipeline.operations))
        num_plans = round(max_plans * min(1.0, 3 * moves_share))
        return max(3, num_plans), moves_share

    def to_dataframe(self) -> pd.DataFrame:
        """The breakpoints as columns iteration_time_s and energy_lower_bound_j."""
        import pandas as pd

        return pd.DataFrame({"iteration_time_s": self.times, "energy_lower_bound_j": self.energies})

    def plot(self, path: str | os.PathLike[str] | None = None, *, plans: int = 17) -> Figure:
        """The frontier's picture, a matplotlib figure, with so many plans on the curve.

        Of large jobs it has fewer, and those are less searched for.

        Args:
            path: where to save it as well: .png, .svg or .pdf; .html gets the page on which one
                moves along the curve.
            plans: at most so many on the curve.

        Raises:
            InputError: the file has another ending, or cannot be written.
        """
        drawn = self.plans_to_draw(plans)
        figure: Figure = drawing("frontier").frontier_figure(self, drawn)
        if path is not None and Path(path).suffix.lower() == ".html":
            slower = self.slower_plans_to_draw()
            atomic_write(path, drawing("report").frontier_page(self, drawn, slower=slower))
        elif path is not None:
            drawing("figures").save_figure(figure, path)
        return figure

    def __dir__(self) -> list[str]:
        """Names for a user: without exact integers and what the search uses."""
        return names_for_users(super().__dir__(), _INNER_NAMES)

    def __repr__(self) -> str:
        return (
            f"Frontier({self.profile.name!r}, {self.pipeline.schedule}, T_min {self.min_time:.6g} "
            f"s, T_star {self.min_energy_time:.6g} s)"
        )

    def _repr_png_(self) -> bytes:
        return png_of(self.plot())


def trace_frontier(
    pipeline: Pipeline,
    profile: Profile,
    *,
    blocking_power: float | None = None,
    gpus_per_stage: int = 1,
    replicas: int = 1,
    full: bool = False,
    whole: bool = True,
    progress: Progress | None = None,
) -> Frontier:
    """Trace the whole relaxed frontier between T_min and T_star, exactly.

    The linear time-cost tradeoff problem (Kelley 1961; Fulkerson 1961; Phillips and Dessouky 1977)
    on effective costs (Perseus, SOSP 2024), walked cut by cut without a time quantum. Warns
    (DoubtWarning) of times and powers that no training has.

    Args:
        pipeline: what runs in which order.
        profile: what operations cost.
        blocking_power: W drawn by a waiting GPU, on every stage; default: the profile's blocking
            rows, else 70 W.
        gpus_per_stage: GPUs that run each stage together (tensor x context parallel).
        replicas: data-parallel replicas.
        full: also record the frontier from T_star to T_max, where waiting costs more than running.
        whole: now; else what is asked for, when it is.
        progress: called now and then with (time now, T_min), ns, the former falling to the latter.

    Raises:
        InputError: the profile does not fit the pipeline, an argument is out of range, or numbers
            outgrow exact 64-bit arithmetic.
    """
    frontier = Frontier.trace(
        pipeline,
        profile,
        blocking_power=blocking_power,
        gpus_per_stage=gpus_per_stage,
        replicas=replicas,
        full=full,
        whole=whole,
        progress=progress,
    )
    doubt_job(frontier)
    return frontier


def trace_job(
    job: Job,
    profile: Profile,
    progress: Progress | None = None,
    *,
    full: bool = False,
    whole: bool = True,
) -> Frontier:
    """The frontier of a plan's job, traced anew.

    Args:
        job: of a plan.
        profile: what its operations cost.
        progress, full, whole: as for trace_frontier.

    Raises:
        InputError: the job or its blocking power does not fit the profile.
    """
    was_given = job.blocking_power_source == "argument" and job.blocking_power_w
    frontier = trace_frontier(
        job.pipeline(),
        profile,
        blocking_power=job.blocking_power_w[0] if was_given else None,
        gpus_per_stage=job.gpus_per_stage,
        replicas=job.replicas,
        full=full,
        whole=whole,
        progress=progress,
    )
    if list(frontier.blocking_power_10uw) != [in_10uw(power) for power in job.blocking_power_w]:
        raise InputError(
            f"job.blocking_power_w is not what its source, {job.blocking_power_source}, gives"
        )
    return frontier
