"""Every planner on one profile, side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from time import perf_counter
from typing import Final, Literal

from envplan._model import Model
from envplan.errors import InputError, naming
from envplan.pipeline import SCHEDULES, Pipeline
from envplan.pipeline.graph import ENVPIPE
from envplan.plan import Plan
from envplan.plan.build import percent, until_straggler
from envplan.plan.model import Baseline
from envplan.planners.advice import Advice, advise, beside
from envplan.planners.base import FrontierPlanner, ZeusGlobal, ZeusPerStage
from envplan.planners.envpipe import EnvPipe, EnvPipeRun, forwards_ahead
from envplan.request import Request
from envplan.solve import Frontier
from envplan.units import j_from_fj, ns_from_s, ns_from_s_floor, s_from_ns

Point = Literal["T_min", "T_star", "straggler"]

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


class _Sidecar(Model, extra="ignore"):
    published: Published | None = None


@dataclass(frozen=True)
class Entry:
    """One planner's plan in a comparison.

    Energies are J per iteration over all GPUs; percentages are against Comparison.baseline.

    Attributes:
        planner: its name.
        point: which of our own planner's plans this is; None for all other planners.
        plan: the plan.
        planning_time: s, the frontier's trace included where the planner needs it.
        ours: our plan of the same pipeline for the same time, which uses no more energy.
        slowdown_percent, savings_percent: of the plan.
        extrinsic_j: what ours for the same time, waiting included, uses above the best that we know
            for the straggler (extrinsic bloat); 0 without one.
        straggler_energy: J until the straggler is finished; None without one, as what follows.
        straggler_savings_percent: against the baseline waiting for the same straggler.
        straggler_gap: straggler_energy over the least that any plan in time for it uses, less 1.
    """

    planner: str
    point: Point | None
    plan: Plan
    planning_time: float
    ours: Plan
    slowdown_percent: float
    savings_percent: float
    extrinsic_j: float = 0.0
    straggler_energy: float | None = None
    straggler_savings_percent: float | None = None
    straggler_gap: float | None = None

    @property
    def intrinsic_j(self) -> float:
        """What the plan uses above ours for the same time (intrinsic bloat)."""
        return self.plan.energy - self.ours.energy


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

        def gains(row: Advice) -> float:
            saves = (row.saved_percent or -math.inf) - (job.saved_percent or 0.0)
            return max(saves, row.faster_percent or -math.inf)

        return tuple(row for row in rows if gains(row) >= _NOTABLE_PERCENT)


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
    with naming(f"metadata of {frontier.profile.name}"):
        published = _Sidecar.of(**frontier.profile.metadata.extra).published
    envpipe, rescheduled = EnvPipe(reconfigure), _rescheduled(frontier, activation_slots)
    made: list[tuple[Frontier, Point | None, Plan, float]] = []

    def add(own: Frontier, point: Point | None, make: Callable[[], Plan], spent: float = 0) -> Plan:
        begin = perf_counter()
        plan = make()
        made.append((own, point, plan, perf_counter() - begin + spent))
        return plan

    fastest = add(frontier, None, frontier.max_frequency_plan)
    sync = _sync_time(fastest, straggler_time, straggler_slowdown)
    zeus = (ZeusGlobal(), ZeusPerStage())
    for planner in zeus:
        add(frontier, None, partial(planner.plan, frontier))
    add(rescheduled, None, partial(envpipe.plan, rescheduled))
    ours = _OurPlans([(own, plan) for own, _, plan, _ in made])
    points = [(frontier, *point) for point in _points(frontier, sync)]
    if rescheduled is not frontier:
        points.append((rescheduled, rescheduled.min_time_ns, "T_min"))
    for own, at_ns, where in points:
        add(own, where, partial(ours.by, own, at_ns, where == "straggler"), own.trace_seconds)
    baseline = fastest.predicted.baseline
    entries = []
    for own, point, plan, seconds in made:
        time, energy = plan.iteration_time, plan.energy
        mine = plan if point else ours.by(own, ns_from_s(time))
        entry = Entry(
            planner=plan.planner,
            point=point,
            plan=plan,
            planning_time=seconds,
            ours=mine,
            slowdown_percent=percent(time - baseline.iteration_time_s, baseline.iteration_time_s),
            savings_percent=percent(baseline.energy_j - energy, baseline.energy_j),
        )
        if sync is not None:
            # A plan that is slower than the straggler is one itself.
            end, without = max(sync, time), _until(fastest, sync)
            bound_fj = max(0, own.waiting_bound_fj(ns_from_s(end)))
            waited = until_straggler(plan, end, j_from_fj(bound_fj * frontier.num_gpus))
            entry = replace(
                entry,
                extrinsic_j=_until(mine, end) - ours.least_until(own, end),
                straggler_energy=waited.energy_j,
                straggler_savings_percent=percent(without - waited.energy_j, without),
                straggler_gap=waited.gap,
            )
        entries.append(entry)
    return Comparison(
        frontier=frontier,
        envpipe_frontier=rescheduled,
        baseline=baseline,
        entries=tuple(entries),
        curves={
            planner.name: [
                (s_from_ns(one.makespan_ns), j_from_fj(one.energy_fj * frontier.num_gpus))
                for one in planner.candidates(frontier)
            ]
            for planner in zeus
        },
        envpipe=envpipe.run(rescheduled),
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
    rescheduled = Pipeline(
        "envpipe",
        pipeline.num_stages,
        pipeline.num_microbatches,
        p2p_latency=pipeline.p2p_latency,
        forwards_ahead=forwards_ahead(
            frontier.profile, pipeline.num_microbatches, activation_slots
        ),
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
    return Request.asking(straggler_time=straggler_time).straggler_time_s


def _until(plan: Plan, sync_time: float) -> float:
    """J until everyone is finished: the plan, and its waiting for a straggler."""
    return plan.energy + plan.waiting_energy(sync_time)


class _OurPlans:
    """Our plans for any time, each made once and beside all other planners' plans.

    Rounding is a heuristic: once in a while another planner's choice for the same pipeline happens
    to lie closer to the bound than what it finds; then that is our plan.

    Args:
        rivals: the plans of other planners, with the frontier that they are on.
    """

    def __init__(self, rivals: Sequence[tuple[Frontier, Plan]]) -> None:
        self._rivals = rivals
        self._known: dict[tuple[Frontier, int, bool], Plan] = {}

    def by(self, frontier: Frontier, time_ns: int, waits: bool = False) -> Plan:
        """Our plan that ends by a time; one that `waits` saves most until that time."""
        key, time_s = (frontier, time_ns, waits), s_from_ns(time_ns)
        if key not in self._known:
            best = frontier.plan(sync_time=time_s) if waits else frontier.plan(time_s)
            for own, rival in self._rivals:
                less = rival.energy < best.energy
                if waits:
                    less = rival.uses_less_until_any_time_after(best)
                if own is frontier and less and rival.iteration_time <= time_s:
                    best = rival.model_copy(update={"planner": FrontierPlanner.name})
            self._known[key] = best
        return self._known[key]

    def least_until(self, frontier: Frontier, sync_time: float) -> float:
        """J until then of the best plan that we know to be in time."""
        for own, plan in self._rivals:
            if own is frontier:
                self.by(own, ns_from_s(plan.iteration_time))
        latest = ns_from_s_floor(sync_time)
        if latest >= frontier.min_time_ns:
            self.by(frontier, latest, waits=True)
        return min(
            _until(plan, sync_time)
            for (own, *_), plan in self._known.items()
            if own is frontier and plan.iteration_time <= sync_time
        )


def _points(frontier: Frontier, sync_time: float | None) -> list[tuple[int, Point]]:
    """Times of our plans, ns, ascending: T_min, T_star, and that of a straggler that leaves more
    time than T_min."""
    least, latest = frontier.min_time_ns, ns_from_s_floor(sync_time or 0.0)
    later: list[tuple[int, Point]] = [
        (frontier.min_energy_time_ns, "T_star"),
        (latest, "straggler"),
    ]
    return [(least, "T_min"), *sorted(point for point in later if point[0] > least)]
