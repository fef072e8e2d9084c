"""Every planner on one profile, side by side; and clocks by part beside one an operation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from time import perf_counter
from typing import Final, Literal, NamedTuple

from envplan._model import Model
from envplan.errors import InputError, NoAnswerError, naming
from envplan.pipeline import SCHEDULES, Pipeline
from envplan.pipeline.graph import ENVPIPE
from envplan.plan import Plan
from envplan.plan.build import percent, until_straggler
from envplan.plan.model import Baseline
from envplan.planners.advice import Advice, advise, beside
from envplan.planners.base import ZeusGlobal, ZeusPerStage
from envplan.planners.envpipe import EnvPipe, EnvPipeRun, forwards_ahead
from envplan.request import Request
from envplan.solve import Frontier
from envplan.solve.search import remember
from envplan.units import j_from_fj, ns_from_s, ns_from_s_floor, s_from_ns

Point = Literal["T_min", "T_star", "straggler"]

_NOTABLE_PERCENT: Final = 0.1
#: Switch latencies that are tried, s.
LATENCIES_S: Final = (0.0, 0.001, 0.005, 0.01, 0.02)
#: How much slower than maximum frequency both may be, so that clocks that come late find a plan.
_SLOWDOWN: Final = 0.02


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

    @cache
    def by(own: Frontier, time: float, waits: bool = False) -> Plan:
        """Our plan that ends by a time, s; one that `waits` saves most until that time."""
        return own.plan(sync_time=time) if waits else own.plan(time)

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
    # Rounding is a heuristic: once in a while EnvPipe's choice is closer to the bound than what it
    # finds; then that is our plan. One clock for each stage is a candidate anyway.
    remember(rescheduled, envpipe.run(rescheduled).replay)
    least, star = frontier.min_time_ns, frontier.min_energy_time_ns
    latest = ns_from_s_floor(sync or 0.0)
    later: list[tuple[int, Point]] = [(star, "T_star"), (latest, "straggler")]
    for at_ns, where in [(least, "T_min"), *sorted(one for one in later if one[0] > least)]:
        make = partial(by, frontier, s_from_ns(at_ns), where == "straggler")
        add(frontier, where, make, frontier.trace_seconds)
    if rescheduled is not frontier:
        make = partial(by, rescheduled, rescheduled.min_time)
        add(rescheduled, "T_min", make, rescheduled.trace_seconds)
    baseline = fastest.predicted.baseline
    entries = []
    ours = [(own, plan if point else by(own, plan.iteration_time)) for own, point, plan, _ in made]
    for (own, point, plan, seconds), (_, mine) in zip(made, ours, strict=True):
        time, energy = plan.iteration_time, plan.energy
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
            known = [*ours, (own, by(own, end, waits=True))]
            in_time = (one for of, one in known if of is own and one.iteration_time <= end)
            best = min(_until(one, end) for one in in_time)
            bound_fj = max(0, own.waiting_bound_fj(ns_from_s(end)))
            waited = until_straggler(plan, end, j_from_fj(bound_fj * frontier.num_gpus))
            entry = replace(
                entry,
                extrinsic_j=_until(mine, end) - best,
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


class PartsRow(NamedTuple):
    """Both ways of planning at one switch latency, by the same time; all GPUs.

    Attributes:
        switch_latency_s: from a request until the clock changes.
        deadline_s: that both keep: so much later than maximum frequency ends.
        baseline_j: energy at maximum frequency.
        one_clock_j: of the plan with one clock an operation; None where none was found in time.
        by_parts_j: of the plan with clocks by part, or of the former where that uses no more.
    """

    switch_latency_s: float
    deadline_s: float
    baseline_j: float
    one_clock_j: float | None
    by_parts_j: float | None

    def saved_percent(self, energy_j: float | None) -> float | None:
        """What one of both saves, of the energy at maximum frequency."""
        return None if energy_j is None else percent(self.baseline_j - energy_j, self.baseline_j)

    @property
    def gained_percent(self) -> float:
        """What clocks by part save on top, of the energy at maximum frequency."""
        one, parts = self.one_clock_j, self.by_parts_j
        return 0.0 if one is None or parts is None else percent(one - parts, self.baseline_j)


def beside_one_clock(frontier: Frontier) -> list[PartsRow]:
    """Plans with clocks by part and with one clock an operation, for each switch latency; none
    where the profile's operations have no parts."""
    profile, rows = frontier.profile, list[PartsRow]()
    if profile.adjustments.by_parts is None:
        return rows
    alone = frontier.retraced(frontier.pipeline, profile.derived(by_parts=None))
    fastest = alone.max_frequency_plan()
    deadline = fastest.iteration_time * (1 + _SLOWDOWN)
    for latency in LATENCIES_S:
        found: list[float | None] = []
        for own in (alone, frontier):
            least = min((one for one in found if one is not None), default=None)
            with suppress(NoAnswerError):
                energy = own.plan(deadline, switch_latency=latency).energy
                least = energy if least is None else min(least, energy)
            found.append(least)
        rows.append(PartsRow(latency, deadline, fastest.energy, *found))
    return rows
