"""Plans side by side: every planner on one profile, every schedule that fits the same batch and
GPUs, and clocks by part beside one an operation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property, partial
from time import perf_counter
from typing import Any, Final, Literal

import numpy as np

from envplan._io.documents import Model
from envplan.errors import InputError, NoAnswerError, naming
from envplan.pipeline import SCHEDULES, Pipeline
from envplan.pipeline.graph import ENVPIPE
from envplan.plan import Plan
from envplan.plan.build import percent, until_straggler
from envplan.plan.model import Baseline
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

    Attributes:
        point: which of our own planner's plans this is; None for all other planners.
        plan: the plan.
        ours: our plan of the same pipeline for the same time, which uses no more energy.
        row: what JSON says of them: times in s; energies in J per iteration over all GPUs;
            percentages against Comparison.baseline; `intrinsic_bloat_j`, what the plan uses above
            ours; and where there is a straggler, else None, `extrinsic_bloat_j`, what ours for the
            same time, waiting included, uses above the best that we know for it, and what the plan
            uses until it is finished, saves on the baseline that waits for it, and loses to the
            least that any plan in time for it uses; `planning_time_s`, the frontier's trace
            included where the planner needs it.
    """

    point: Point | None
    plan: Plan
    ours: Plan
    row: dict[str, Any]


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
    if straggler_time is not None and straggler_slowdown is not None:
        raise InputError("give straggler_time or straggler_slowdown, not both")
    with naming(f"metadata of {frontier.profile.name}"):
        published = _Sidecar.of(**frontier.profile.metadata.extra).published
    envpipe, pipeline, rescheduled = EnvPipe(reconfigure), frontier.pipeline, frontier
    if pipeline.schedule == "1f1b" and not pipeline.in_turn:  # that is known of this order alone
        stages, microbatches = pipeline.num_stages, pipeline.num_microbatches
        order = Pipeline(
            ENVPIPE,
            stages,
            microbatches,
            p2p_latency=pipeline.p2p_latency,
            forwards_ahead=forwards_ahead(frontier.profile, microbatches, activation_slots),
            extras=pipeline.extras,
        )
        rescheduled = frontier.retraced(order, frontier.profile)
    elif pipeline.schedule != "1f1b" and activation_slots is not None:
        raise InputError(
            f"activation slots are for rescheduling 1f1b; this pipeline runs {pipeline.schedule}"
        )
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
    if straggler_slowdown is not None:
        straggler_time = fastest.iteration_time * (1 + straggler_slowdown)
    sync = Request.from_options(straggler_time=straggler_time).straggler_time_s
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
    before_s, before_j = baseline.iteration_time_s, baseline.energy_j
    entries = []
    ours = [(own, plan if point else by(own, plan.iteration_time)) for own, point, plan, _ in made]
    for (own, point, plan, seconds), (_, mine) in zip(made, ours, strict=True):
        time, energy = plan.iteration_time, plan.energy
        row = {
            "planner": plan.planner,
            "point": point,
            "schedule": plan.job.schedule,
            "iteration_time_s": time,
            "slowdown_percent": percent(time - before_s, before_s),
            "energy_j": energy,
            "savings_percent": percent(before_j - energy, before_j),
            "energy_lower_bound_j": plan.energy_lower_bound,
            "gap": plan.gap,
            "frontier_energy_j": mine.energy,
            "intrinsic_bloat_j": energy - mine.energy,
            "extrinsic_bloat_j": None,
            "straggler_energy_j": None,
            "straggler_savings_percent": None,
            "straggler_gap": None,
            "planning_time_s": seconds,
        }
        if sync is not None:
            # A plan that is slower than the straggler is one itself.
            end, without = max(sync, time), _until(fastest, sync)
            known = [*ours, (own, by(own, end, waits=True))]
            in_time = (one for of, one in known if of is own and one.iteration_time <= end)
            bound_fj = max(0, own.waiting_bound_fj(ns_from_s(end)))
            waited = until_straggler(plan, end, j_from_fj(bound_fj * frontier.num_gpus))
            row |= {
                "extrinsic_bloat_j": _until(mine, end) - min(_until(one, end) for one in in_time),
                "straggler_energy_j": waited.energy_j,
                "straggler_savings_percent": percent(without - waited.energy_j, without),
                "straggler_gap": waited.gap,
            }
        entries.append(Entry(point, plan, mine, row))
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


def _until(plan: Plan, sync_time: float) -> float:
    """J until everyone is finished: the plan, and its waiting for a straggler."""
    return plan.energy + plan.waiting_energy(sync_time)


def beside_one_clock(frontier: Frontier) -> list[dict[str, Any]]:
    """Plans with clocks by part and with one clock an operation, for each switch latency; none
    where the profile's operations have no parts.

    Returns:
        For each `switch_latency_s` (s) the `deadline_s` that both keep, so much later than maximum
        frequency ends; `one_clock_energy_j` and `by_parts_energy_j` over all GPUs, None where no
        plan was found in time, the latter of the former where clocks by part use no less; what
        both save, and what the latter gains, in percent of the energy at maximum frequency.
    """
    profile, rows = frontier.profile, list[dict[str, Any]]()
    if profile.adjustments.by_parts is None:
        return rows
    alone = frontier.retraced(frontier.pipeline, profile.with_adjustments(by_parts=None))
    fastest = alone.max_frequency_plan()
    deadline = fastest.iteration_time * (1 + _SLOWDOWN)
    for latency in LATENCIES_S:
        found: list[float] = []
        row: dict[str, Any] = {"switch_latency_s": latency, "deadline_s": deadline}
        for name, own in (("one_clock", alone), ("by_parts", frontier)):
            with suppress(NoAnswerError):
                found.append(own.plan(deadline, switch_latency=latency).energy)
            row[f"{name}_energy_j"] = least = min(found, default=None)
            row[f"{name}_saved_percent"] = (
                None if least is None else percent(fastest.energy - least, fastest.energy)
            )
        one, ours = row["one_clock_energy_j"], row["by_parts_energy_j"]
        row["gained_percent"] = 0.0 if one is None else percent(one - ours, fastest.energy)
        rows.append(row)
    return rows


@dataclass(frozen=True)
class Advice:
    """A schedule for a job, against the job's plan without slowdown.

    Attributes:
        frontier: of the schedule, with its stages, chunks, microbatches and replicas.
        is_job: this is the job as it was given.
        model_share: parts of the model on a GPU, as a multiple of the job's.
        at_equal_time: least energy found in the time of the job's plan; None: no plan is as fast.
        at_equal_energy: fastest plan found with no more energy than the job's; None: there is none.
        saved_percent: of the energy of the job at maximum frequency, by at_equal_time.
        faster_percent: time that at_equal_energy saves of the job's.
    """

    frontier: Frontier
    is_job: bool
    model_share: float
    at_equal_time: Plan | None
    at_equal_energy: Plan | None
    saved_percent: float | None
    faster_percent: float | None


def advise(
    frontier: Frontier,
    *,
    schedules: Sequence[str] | None = None,
    chunks: Sequence[int] | None = None,
    activation_slots: int | Sequence[int] | None = None,
    best: int = 3,
    progress: Callable[[int, int], None] | None = None,
) -> list[Advice]:
    """The schedules that suit a job best, by energy at equal time, and the job itself.

    All run the job's batch on as many GPUs as the job has: with twice the chunks half the stages,
    twice the replicas, and half the microbatches in each. Each is traced; those that come first in
    energy at equal time or in time at equal energy by their relaxed frontiers are planned.
    Schedules that split the backward take its halves from the profile, or assume that they are
    equal; `frontier.profile.adjustments` says so. Memory is not looked at.

    Args:
        frontier: of the job as it is.
        schedules: names in SCHEDULES; default: all.
        chunks: model chunks of a stage; default: the job's and twice as many.
        activation_slots: of EnvPipe's order, see forwards_ahead.
        best: how many to plan of each ranking and number of chunks.
        progress: called with (done, of how many) for each schedule traced or planned; how many
            are planned is known once all are traced.

    Raises:
        InputError: the job runs no generated schedule, or activation_slots do not fit.
    """
    if frontier.pipeline.schedule not in SCHEDULES:
        raise InputError(
            f"the job runs {frontier.pipeline.schedule}, not a schedule that others can be set "
            f"beside: {', '.join(SCHEDULES)}"
        )
    shapes = list(_shapes(frontier, schedules or list(SCHEDULES), chunks, activation_slots))
    show = progress or (lambda done, count: None)
    traced, adjusted = [frontier], frontier.profile.adjustments
    for done, (pipeline, replicas) in enumerate(shapes, 1):
        profile = frontier.profile.fitted(
            {op.instruction for op in pipeline.operations},
            recompute=adjusted.recompute,
            by_parts=adjusted.by_parts,
        )
        traced.append(frontier.retraced(pipeline, profile, replicas=replicas))
        show(done, len(shapes) + 1)
    reference, chosen, rows = frontier.plan(), [frontier], list[Advice]()
    joules = reference.energy
    # Those with other parts of the model on a GPU are ranked apart: not all may fit into memory.
    for count in sorted({one.pipeline.num_chunks for one in traced[1:]}):
        alike = [one for one in traced[1:] if one.pipeline.num_chunks == count]
        in_time = [one for one in alike if one.min_time_ns <= frontier.min_time_ns]
        within = [one for one in alike if one.energies.min() <= joules]
        in_time.sort(key=lambda one: one.energy_at(frontier.min_time))
        within.sort(key=lambda one: float(np.interp(-joules, -one.energies, one.times)))
        chosen += [*in_time[:best], *within[:best]]
    chosen = list({id(one): one for one in chosen}.values())
    for done, one in enumerate(chosen, len(shapes) + 1):
        rows.append(beside(reference, frontier, one))
        show(done, len(shapes) + len(chosen))
    return sorted(
        rows, key=lambda row: math.inf if row.saved_percent is None else -row.saved_percent
    )


def beside(reference: Plan, job: Frontier, other: Frontier) -> Advice:
    """A frontier's plans beside the plan without slowdown of a job of the same batch and GPUs."""
    thrifty = fast = reference if other is job else None
    if other is not job:
        if other.min_time_ns <= job.min_time_ns:
            thrifty = other.plan(job.min_time)
        with suppress(NoAnswerError):
            fast = other.plan(energy_budget=reference.energy)
    before = reference.predicted.baseline.energy_j
    return Advice(
        frontier=other,
        is_job=other is job,
        model_share=other.pipeline.num_chunks / job.pipeline.num_chunks,
        at_equal_time=thrifty,
        at_equal_energy=fast,
        saved_percent=None if thrifty is None else percent(before - thrifty.energy, before),
        faster_percent=None
        if fast is None
        else percent(job.min_time - fast.iteration_time, job.min_time),
    )


def _shapes(
    job: Frontier,
    schedules: Sequence[str],
    chunks: Sequence[int] | None,
    activation_slots: int | Sequence[int] | None,
) -> Iterator[tuple[Pipeline, int]]:
    """Pipelines other than the job's that run its batch on its GPUs, with their replicas."""
    own = job.pipeline
    ranks, batch = own.num_stages * job.replicas, own.num_microbatches * job.replicas
    seen = {own.operations}
    if own.in_turn:  # known of the job's own order alone
        return
    for count in chunks or (own.num_chunks, 2 * own.num_chunks):
        stages, rest = divmod(own.num_profile_stages, count)
        if rest or ranks % stages or batch % (ranks // stages):
            continue
        replicas, latency = ranks // stages, own.p2p_latency
        if isinstance(latency, list) and len(latency) != stages - 1:
            latency = max(latency)
        # The plainest of several names for one order is the shortest.
        for name in sorted(schedules, key=len):
            ahead = None
            if name == ENVPIPE and count == 1:
                recompute = job.profile.adjustments.recompute
                profile = job.profile.fitted(("backward",), recompute=recompute)
                ahead = forwards_ahead(profile, batch // replicas, activation_slots)
            with suppress(InputError):  # schedules that have no such shape
                pipeline = Pipeline(
                    name,
                    stages,
                    batch // replicas,
                    num_chunks=count,
                    p2p_latency=latency,
                    forwards_ahead=ahead,
                    extras=own.extras,
                )
                if pipeline.operations not in seen:
                    seen.add(pipeline.operations)
                    yield pipeline, replicas
