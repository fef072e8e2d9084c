"""Every planner on one profile, side by side."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, Literal

from pydantic import ValidationError

from envplan._documents import first_problem
from envplan._model import Model
from envplan.errors import InputError
from envplan.pipeline import SCHEDULES, Pipeline
from envplan.pipeline.graph import ENVPIPE
from envplan.plan import Baseline, Plan, gap_over
from envplan.plan.build import percent
from envplan.planners.advice import Advice, advise, beside
from envplan.planners.baselines import ZeusGlobal, ZeusPerStage
from envplan.planners.envpipe import EnvPipe, EnvPipeRun, forwards_ahead
from envplan.planners.ours import best_plan_beside
from envplan.profile import Profile
from envplan.solve import Frontier
from envplan.units import j_from_fj, ns_from_s, ns_from_s_floor, s_from_ns

Point = Literal["T_min", "T_star", "straggler"]

_MAX_STRAGGLER_S: Final = 1e9
_NOTABLE_PERCENT: Final = 0.1


class Published(Model, extra="ignore"):
    """What a paper says was saved on this workload; measured there, on real GPUs.

    Attributes:
        savings_percent: of the energy at maximum frequency.
        slowdown_percent: None where it is not said.
        source: where it was published.
    """

    savings_percent: float
    slowdown_percent: float | None = None
    source: str


@dataclass(frozen=True)
class Entry:
    """One planner's plan in a comparison.

    Energies are J per iteration over all GPUs.

    Attributes:
        planner: its name.
        point: which of our own planner's plans this is; None for all other planners.
        plan: the plan.
        planning_time: s, the frontier's trace included where the planner needs it.
        straggler_time: s, when a straggler is finished; None without one.
    """

    planner: str
    point: Point | None
    plan: Plan
    planning_time: float
    straggler_time: float | None
    _frontier: Frontier = field(repr=False, compare=False)
    _known: _OurPlans = field(repr=False, compare=False)

    @property
    def slowdown_percent(self) -> float:
        """Against Comparison.baseline."""
        before = self._known.baseline.iteration_time_s
        return percent(self.plan.iteration_time - before, before)

    @property
    def savings_percent(self) -> float:
        """Likewise."""
        before = self._known.baseline.energy_j
        return percent(before - self.plan.energy, before)

    @property
    def _sync_time(self) -> float | None:
        # A plan that is slower than the straggler is one itself.
        straggler = self.straggler_time
        return None if straggler is None else max(straggler, self.plan.iteration_time)

    @property
    def straggler_energy(self) -> float | None:
        """J until the straggler is finished; None without one."""
        return None if self._sync_time is None else until(self.plan, self._sync_time)

    @property
    def straggler_savings_percent(self) -> float | None:
        """Against the baseline waiting for the same straggler; None without one."""
        if self.straggler_time is None or self.straggler_energy is None:
            return None
        before = self._known.baseline
        waiting = self.plan.waiting_energy(self.straggler_time, since=before.iteration_time_s)
        without = before.energy_j + waiting
        return percent(without - self.straggler_energy, without)

    @property
    def straggler_gap(self) -> float | None:
        """straggler_energy over the least that any plan in time for it uses, less 1; None without
        one."""
        if self._sync_time is None or self.straggler_energy is None:
            return None
        bound_fj = max(0, self._frontier.waiting_bound_fj(ns_from_s(self._sync_time)))
        return gap_over(self.straggler_energy, j_from_fj(bound_fj * self._frontier.num_gpus))

    @cached_property
    def ours(self) -> Plan:
        """Our plan of the same pipeline for the same time, which uses no more energy. It is made
        when it is asked for."""
        if self.point:
            return self.plan
        return self._known.plan(self._frontier, ns_from_s(self.plan.iteration_time))

    @property
    def intrinsic_j(self) -> float:
        """What the plan uses above ours for the same time (intrinsic bloat)."""
        return self.plan.energy - self.ours.energy

    @cached_property
    def extrinsic_j(self) -> float:
        """What ours for the same time, waiting included, uses above the best that we know for the
        straggler (extrinsic bloat); 0 without one."""
        if self._sync_time is None:
            return 0.0
        best = self._known.least_until(self._frontier, self._sync_time)
        return until(self.ours, self._sync_time) - best


@dataclass(frozen=True)
class Comparison:
    """All planners on one profile.

    Attributes:
        frontier: of the pipeline as given, which all planners but EnvPipe keep.
        envpipe_frontier: of EnvPipe's schedule; the same as frontier where EnvPipe could not
            reschedule.
        baseline: maximum frequency on the pipeline as given.
        entries: one for each planner, several for ours, the last of them on EnvPipe's schedule.
        curves: the own frontiers of planners that have one: planner -> (s, J), ascending time.
        envpipe: what EnvPipe did.
        straggler_time: s; None without a straggler.
        published: what the profile's sidecar says of its workload; None where it says nothing.
    """

    frontier: Frontier
    envpipe_frontier: Frontier
    baseline: Baseline
    entries: tuple[Entry, ...]
    curves: Mapping[str, Sequence[tuple[float, float]]]
    envpipe: EnvPipeRun
    straggler_time: float | None
    published: Published | None

    @cached_property
    def advice(self) -> tuple[Advice, ...]:
        """EnvPipe's order and the best other schedule with as many chunks, as far as they are
        faster or save more than the pipeline as given."""
        pipeline = self.frontier.pipeline
        if pipeline.schedule not in SCHEDULES:
            return ()
        others = [name for name in SCHEDULES if name != ENVPIPE]
        rows = advise(self.frontier, schedules=others, chunks=[pipeline.num_chunks], best=1)
        job = next(row for row in rows if row.is_job)
        assert job.at_equal_time is not None
        if self.envpipe_frontier is not self.frontier:
            rows.insert(0, beside(job.at_equal_time, self.frontier, self.envpipe_frontier))
        return tuple(row for row in rows if _is_better(row, job))


def _is_better(row: Advice, job: Advice) -> bool:
    saves = (row.saved_percent or -math.inf) - (job.saved_percent or 0.0)
    return max(saves, row.faster_percent or -math.inf) >= _NOTABLE_PERCENT


def compare(
    frontier: Frontier,
    *,
    reconfigure: str = "balanced",
    activation_slots: int | Sequence[int] | None = None,
    straggler_time: float | None = None,
    straggler_slowdown: float | None = None,
) -> Comparison:
    """Run every planner on a traced pipeline and set its plan against ours for the same time.

    EnvPipe reschedules a 1F1B pipeline first; any other one it takes as it is.

    Args:
        reconfigure: EnvPipe's, see EnvPipe.
        activation_slots: EnvPipe's, see forwards_ahead.
        straggler_time: s, when everyone is finished because some replica is that slow.
        straggler_slowdown: instead, as a fraction above the baseline's iteration time.

    Raises:
        InputError: an argument is out of range, or the sidecar's `published` is malformed.
    """
    published = _published(frontier.profile)
    envpipe = EnvPipe(reconfigure)
    rescheduled = _rescheduled(frontier, activation_slots)
    begin = time.perf_counter()
    baseline = frontier.max_frequency_plan()
    seconds = time.perf_counter() - begin
    sync = _sync_time(baseline, straggler_time, straggler_slowdown)
    ours, entries = _OurPlans(baseline.predicted.baseline), list[Entry]()

    def add(plan: Plan, seconds: float, own: Frontier, point: Point | None = None) -> None:
        entries.append(Entry(plan.planner, point, plan, seconds, sync, own, ours))

    add(baseline, seconds, frontier)
    zeus = (ZeusGlobal(), ZeusPerStage())
    for planner in zeus:
        begin = time.perf_counter()
        plan = planner.plan(frontier)
        add(plan, time.perf_counter() - begin, frontier)
    begin = time.perf_counter()
    run = envpipe.run(rescheduled)
    seconds = time.perf_counter() - begin
    add(run.plan(rescheduled), seconds, rescheduled)
    ours.rivals = [(entry._frontier, entry.plan) for entry in entries]
    points = [(frontier, *point) for point in _points(frontier, sync)]
    if rescheduled is not frontier:
        points.append((rescheduled, rescheduled.min_time_ns, "T_min"))
    for own, at_ns, point in points:
        begin = time.perf_counter()
        plan = ours.plan(own, at_ns, waits=point == "straggler")
        add(plan, time.perf_counter() - begin + own.trace_seconds, own, point)
    return Comparison(
        frontier=frontier,
        envpipe_frontier=rescheduled,
        baseline=ours.baseline,
        entries=tuple(entries),
        curves={
            planner.name: [
                (s_from_ns(one.makespan_ns), j_from_fj(one.energy_fj * frontier.num_gpus))
                for one in planner.candidates(frontier)
            ]
            for planner in zeus
        },
        envpipe=run,
        straggler_time=sync,
        published=published,
    )


def _rescheduled(frontier: Frontier, activation_slots: int | Sequence[int] | None) -> Frontier:
    """The frontier of EnvPipe's schedule for a 1F1B pipeline; any other frontier as it is."""
    pipeline = frontier.pipeline
    if pipeline.schedule != "1f1b":
        if activation_slots is not None:
            raise InputError(
                "activation slots are for rescheduling 1f1b; this pipeline runs "
                f"{pipeline.schedule}"
            )
        return frontier
    if pipeline.in_turn:  # known of this order alone
        return frontier
    ahead = forwards_ahead(frontier.profile, pipeline.num_microbatches, activation_slots)
    rescheduled = Pipeline(
        "envpipe",
        pipeline.num_stages,
        pipeline.num_microbatches,
        p2p_latency=pipeline.p2p_latency,
        forwards_ahead=ahead,
        extras=pipeline.extras,
    )
    return frontier.retraced(rescheduled, frontier.profile)


def _sync_time(
    baseline: Plan, straggler_time: float | None, straggler_slowdown: float | None
) -> float | None:
    """When a straggler is finished, s.

    Raises:
        InputError: both are given, or the time is not finite and positive.
    """
    if straggler_time is not None and straggler_slowdown is not None:
        raise InputError("give straggler_time or straggler_slowdown, not both")
    if straggler_slowdown is not None:
        straggler_time = baseline.iteration_time * (1 + straggler_slowdown)
    if straggler_time is not None and not 0 <= straggler_time <= _MAX_STRAGGLER_S:
        raise InputError(
            f"a straggler's time must lie between 0 and {_MAX_STRAGGLER_S:.0e} s, not "
            f"{straggler_time:g}"
        )
    return straggler_time


def until(plan: Plan, sync_time: float) -> float:
    """J until everyone is finished: the plan, and its waiting for a straggler."""
    return plan.energy + plan.waiting_energy(sync_time)


class _OurPlans:
    """Our plans for any time, each made once and beside all other planners' plans.

    Attributes:
        baseline: maximum frequency on the pipeline as given.
        rivals: the plans of other planners, with the frontier that they are on.
    """

    def __init__(self, baseline: Baseline) -> None:
        self.baseline = baseline
        self.rivals: list[tuple[Frontier, Plan]] = []
        self._known: dict[tuple[int, int, bool], Plan] = {}

    def plan(self, frontier: Frontier, time_ns: int, *, waits: bool = False) -> Plan:
        """Our plan that ends by a time; one that `waits` saves most until that time."""
        key = (id(frontier), time_ns, waits)
        if key not in self._known:
            rivals = self._rivals(frontier)
            self._known[key] = best_plan_beside(frontier, time_ns, rivals, waits=waits)
        return self._known[key]

    def least_until(self, frontier: Frontier, sync_time: float) -> float:
        """J until then of the best plan that we know to be in time."""
        for plan in self._rivals(frontier):
            self.plan(frontier, ns_from_s(plan.iteration_time))
        latest = ns_from_s_floor(sync_time)
        if latest >= frontier.min_time_ns:
            self.plan(frontier, latest, waits=True)
        return min(
            until(plan, sync_time)
            for (owner, *_), plan in self._known.items()
            if owner == id(frontier) and plan.iteration_time <= sync_time
        )

    def _rivals(self, frontier: Frontier) -> list[Plan]:
        return [plan for own, plan in self.rivals if own is frontier]


def _points(frontier: Frontier, sync_time: float | None) -> list[tuple[int, Point]]:
    """Times of our plans, ns, ascending: T_min, T_star, and that of a straggler that leaves more
    time than T_min."""
    least, star = frontier.min_time_ns, frontier.min_energy_time_ns
    points: list[tuple[int, Point]] = [(least, "T_min")]
    points += [(star, "T_star")] if star > least else []
    if sync_time is not None and ns_from_s_floor(sync_time) > least:
        points.append((ns_from_s_floor(sync_time), "straggler"))
    return sorted(points, key=lambda entry: entry[0])


def _published(profile: Profile) -> Published | None:
    """The published figure that a profile's sidecar names.

    Raises:
        InputError: it has a wrong form.
    """
    said = profile.metadata.extra.get("published")
    if said is None:
        return None
    try:
        return Published.model_validate(said)
    except ValidationError as error:
        raise InputError(
            f"metadata of {profile.name}: published: {first_problem(error, 'published figure')}"
        ) from None
