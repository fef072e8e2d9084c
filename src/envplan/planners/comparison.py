"""Every planner on one profile, side by side."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final, Literal

from envplan.errors import InputError, shown
from envplan.pipeline import SCHEDULES, Pipeline
from envplan.pipeline.graph import ENVPIPE
from envplan.plan import Baseline, Plan, gap_over
from envplan.plan.build import percent
from envplan.planners.advice import Advice, advise, beside
from envplan.planners.baselines import (
    MaxFrequency,
    ZeusGlobal,
    ZeusPerStage,
    cheapest_in_time,
)
from envplan.planners.envpipe import EnvPipe, EnvPipeRun, forwards_ahead
from envplan.planners.ours import FrontierPlanner, best_plan_beside
from envplan.profile import Profile
from envplan.replay import Replay
from envplan.solve import Frontier
from envplan.units import j_from_fj, ns_from_s, ns_from_s_floor, s_from_ns

Point = Literal["T_min", "T_star", "straggler"]

_MAX_STRAGGLER_S: Final = 1e9
_NOTABLE_PERCENT: Final = 0.1


@dataclass(frozen=True)
class Published:
    """What a paper says was saved on this workload; measured there, on real GPUs.

    Attributes:
        savings_percent: of the energy at maximum frequency.
        slowdown_percent: None where it is not said.
        source: where it was published.
    """

    savings_percent: float
    slowdown_percent: float | None
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
        slowdown_percent, savings_percent: against Comparison.baseline.
        straggler_time: s, when a straggler is finished; None without one.
        straggler_energy: J until the straggler is finished; None without one.
        straggler_savings_percent: likewise, against the baseline waiting for the same straggler.
        straggler_gap: straggler_energy over the least that any plan in time for it uses, less 1.
    """

    planner: str
    point: Point | None
    plan: Plan
    planning_time: float
    slowdown_percent: float
    savings_percent: float
    straggler_time: float | None
    straggler_energy: float | None
    straggler_savings_percent: float | None
    straggler_gap: float | None
    _frontier: Frontier = field(repr=False, compare=False)
    _known: _OurPlans = field(repr=False, compare=False)

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
        if self.straggler_time is None:
            return 0.0
        # A plan that is slower than the straggler is one itself.
        sync = max(self.straggler_time, self.plan.iteration_time)
        return until(self.ours, sync) - self._known.least_until(self._frontier, sync)


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
    baseline = MaxFrequency().plan(frontier)
    seconds = time.perf_counter() - begin
    others = [_Made(MaxFrequency.name, None, baseline, seconds, frontier)]
    sync = _sync_time(baseline, straggler_time, straggler_slowdown)
    points: dict[str, list[Replay]] = {}
    for planner in (ZeusGlobal(), ZeusPerStage()):
        begin = time.perf_counter()
        points[planner.name] = planner.candidates(frontier)
        plan = cheapest_in_time(planner.name, frontier, points[planner.name], None)
        seconds = time.perf_counter() - begin
        others.append(_Made(planner.name, None, plan, seconds, frontier))
    begin = time.perf_counter()
    run = envpipe.run(rescheduled)
    seconds = time.perf_counter() - begin
    others.append(_Made(EnvPipe.name, None, run.plan(rescheduled), seconds, rescheduled))
    ours = _OurPlans(others)
    own = _our_entries(frontier, ours, sync)
    if rescheduled is not frontier:
        least = rescheduled.min_time_ns
        own.append(_our_entry(rescheduled, ours, least, "T_min"))
    return Comparison(
        frontier=frontier,
        envpipe_frontier=rescheduled,
        baseline=baseline.predicted.baseline,
        entries=tuple(_entry(made, ours, baseline, sync) for made in (*others, *own)),
        curves={
            name: [
                (s_from_ns(one.makespan_ns), j_from_fj(one.energy_fj * frontier.num_gpus))
                for one in replays
            ]
            for name, replays in points.items()
        },
        envpipe=run,
        straggler_time=sync,
        published=published,
    )


@dataclass(frozen=True)
class _Made:
    """A plan, what made it in how many seconds, and on which pipeline."""

    planner: str
    point: Point | None
    plan: Plan
    seconds: float
    frontier: Frontier


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
    ahead = forwards_ahead(frontier.profile, pipeline.num_microbatches, activation_slots)
    rescheduled = Pipeline(
        "envpipe",
        pipeline.num_stages,
        pipeline.num_microbatches,
        p2p_latency=pipeline.p2p_latency,
        forwards_ahead=ahead,
        extras=pipeline.extras,
        in_turn=pipeline.in_turn,
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


def until(plan: Plan, sync_time: float | None) -> float:
    """J until everyone is finished: the plan, and its waiting for a straggler if there is one."""
    return plan.energy + (0.0 if sync_time is None else plan.waiting_energy(sync_time))


class _OurPlans:
    """Our plans for any time, each made once and beside all other planners' plans."""

    def __init__(self, others: Sequence[_Made]) -> None:
        self._others = others
        self._known: dict[tuple[int, int, bool], Plan] = {}

    def plan(self, frontier: Frontier, time_ns: int, *, waits: bool = False) -> Plan:
        """Our plan that ends by a time; one that `waits` saves most until that time."""
        key = (id(frontier), time_ns, waits)
        if key not in self._known:
            rivals = [made.plan for made in self._others if made.frontier is frontier]
            self._known[key] = best_plan_beside(frontier, time_ns, rivals, waits=waits)
        return self._known[key]

    def least_until(self, frontier: Frontier, sync_time: float) -> float:
        """J until then of the best plan that we know to be in time."""
        for made in self._others:
            if made.frontier is frontier:
                self.plan(frontier, ns_from_s(made.plan.iteration_time))
        latest = ns_from_s_floor(sync_time)
        if latest >= frontier.min_time_ns:
            self.plan(frontier, latest, waits=True)
        return min(
            until(plan, sync_time)
            for (owner, *_), plan in self._known.items()
            if owner == id(frontier) and plan.iteration_time <= sync_time
        )


def _our_entries(frontier: Frontier, ours: _OurPlans, sync_time: float | None) -> list[_Made]:
    """Our plans at T_min, at T_star, and for a straggler that leaves more time than T_min."""
    least, star = frontier.min_time_ns, frontier.min_energy_time_ns
    points: list[tuple[int, Point]] = [(least, "T_min")]
    points += [(star, "T_star")] if star > least else []
    if sync_time is not None and ns_from_s_floor(sync_time) > least:
        points.append((ns_from_s_floor(sync_time), "straggler"))
    points.sort(key=lambda entry: entry[0])
    return [_our_entry(frontier, ours, at, point) for at, point in points]


def _our_entry(frontier: Frontier, ours: _OurPlans, time_ns: int, point: Point) -> _Made:
    begin = time.perf_counter()
    plan = ours.plan(frontier, time_ns, waits=point == "straggler")
    seconds = time.perf_counter() - begin + frontier.trace_seconds
    return _Made(FrontierPlanner.name, point, plan, seconds, frontier)


def _entry(made: _Made, ours: _OurPlans, baseline: Plan, straggler: float | None) -> Entry:
    plan, frontier = made.plan, made.frontier
    entry = Entry(
        planner=made.planner,
        point=made.point,
        plan=plan,
        planning_time=made.seconds,
        slowdown_percent=percent(
            plan.iteration_time - baseline.iteration_time, baseline.iteration_time
        ),
        savings_percent=percent(baseline.energy - plan.energy, baseline.energy),
        straggler_time=straggler,
        straggler_energy=None,
        straggler_savings_percent=None,
        straggler_gap=None,
        _frontier=frontier,
        _known=ours,
    )
    if straggler is None:
        return entry
    sync = max(straggler, plan.iteration_time)
    spent, without = until(plan, sync), until(baseline, straggler)
    bound_fj = max(0, frontier.waiting_bound_fj(ns_from_s(sync))) * frontier.num_gpus
    return replace(
        entry,
        straggler_energy=spent,
        straggler_savings_percent=percent(without - spent, without),
        straggler_gap=gap_over(spent, j_from_fj(bound_fj)),
    )


def _published(profile: Profile) -> Published | None:
    """The published figure that a profile's sidecar names.

    Raises:
        InputError: it has a wrong form.
    """
    said = profile.metadata.extra.get("published")
    if said is None:
        return None
    if not isinstance(said, dict):
        raise InputError(f"metadata of {profile.name}: published must be an object")
    numbers = {
        name: _published_number(profile, name, said.get(name))
        for name in ("savings_percent", "slowdown_percent")
        if name == "savings_percent" or said.get(name) is not None
    }
    source = said.get("source")
    if not isinstance(source, str):
        raise InputError(
            f"metadata of {profile.name}: published.source must say where, not {shown(source)}"
        )
    return Published(numbers["savings_percent"], numbers.get("slowdown_percent"), source)


def _published_number(profile: Profile, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InputError(
            f"metadata of {profile.name}: published.{name} must be a number, not {shown(value)}"
        )
    return float(value)
