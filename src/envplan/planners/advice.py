"""Which schedule: the same batch on the same GPUs under every schedule that fits, side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from envplan.errors import InputError, NoAnswerError
from envplan.pipeline import SCHEDULES, Pipeline
from envplan.pipeline.graph import ENVPIPE
from envplan.plan import Plan
from envplan.plan.build import percent
from envplan.planners.envpipe import forwards_ahead
from envplan.solve import Frontier

__all__ = ["Advice", "advise"]


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
    reference, rows = frontier.plan(), list[Advice]()
    chosen = _first(traced, reference, best)
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


def _first(traced: Sequence[Frontier], reference: Plan, best: int) -> list[Frontier]:
    """The job, and of the others the first of both rankings by the relaxed frontiers.

    Those with different parts of the model on a GPU are ranked apart: not all may fit into memory.
    """
    job, *others = traced
    joules = reference.energy

    def energy(one: Frontier) -> float:
        return one.energy_at(job.min_time)

    def time(one: Frontier) -> float:
        return float(np.interp(-joules, -one.energies, one.times))

    chosen = [job]
    for count in sorted({one.pipeline.num_chunks for one in others}):
        alike = [one for one in others if one.pipeline.num_chunks == count]
        in_time = [one for one in alike if one.min_time_ns <= job.min_time_ns]
        within = [one for one in alike if one.energies.min() <= joules]
        chosen += [*sorted(in_time, key=energy)[:best], *sorted(within, key=time)[:best]]
    return list({id(one): one for one in chosen}.values())
