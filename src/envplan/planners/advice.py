"""Advice on schedules: every one that could run a job's batch on its GPUs, beside the job's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from pydantic import JsonValue

from envplan.errors import InputError, NoAnswerError
from envplan.pipeline import SCHEDULES, Pipeline
from envplan.pipeline.generate import ENVPIPE
from envplan.plan import Plan
from envplan.plan.build import percent
from envplan.planners.envpipe import forwards_ahead
from envplan.profile import Profile
from envplan.profile.memory import memory_by_rank
from envplan.solve import Frontier


@dataclass(frozen=True)
class Advice:
    """A schedule for a job, against the job's plan without slowdown.

    Attributes:
        frontier: of the schedule, with its stages, chunks, microbatches and replicas.
        is_job: this is the job as it was given.
        model_share: parts of the model on a GPU, as a multiple of the job's.
        memory_gb: of the GPU that needs most, GB, an estimate; None: the profile does not say.
        at_equal_time: least energy found in the time of the job's plan; None: no plan is as fast.
        at_equal_energy: fastest plan found with no more energy than the job's; None: there is none.
        saved_percent: of the energy of the job at maximum frequency, by at_equal_time.
        faster_percent: time that at_equal_energy saves of the job's.
    """

    frontier: Frontier
    is_job: bool
    model_share: float
    memory_gb: float | None
    at_equal_time: Plan | None
    at_equal_energy: Plan | None
    saved_percent: float | None
    faster_percent: float | None

    def gain_percent_over(self, job: Advice) -> float:
        """Percent of energy or of time saved above a job's own schedule, whichever is more."""
        gains = [] if self.faster_percent is None else [self.faster_percent]
        if self.saved_percent is not None:
            gains.append(self.saved_percent - (job.saved_percent or 0.0))
        return max(gains, default=-math.inf)

    def to_dict(self) -> dict[str, JsonValue]:
        """The schedule's shape and savings, as `envplan advise --json` prints them."""
        pipeline, adjustments = self.frontier.pipeline, self.frontier.profile.adjustments
        return {
            "schedule": pipeline.schedule,
            "is_job": self.is_job,
            "stages": pipeline.num_stages,
            "chunks": pipeline.num_chunks,
            "microbatches": pipeline.num_microbatches,
            "replicas": self.frontier.replicas,
            "model_share": self.model_share,
            "memory_gb": self.memory_gb,
            "adjustments": adjustments.model_dump(exclude_defaults=True),
            "saved_percent": self.saved_percent,
            "faster_percent": self.faster_percent,
            "at_equal_time": _time_and_energy(self.at_equal_time),
            "at_equal_energy": _time_and_energy(self.at_equal_energy),
        }


def _time_and_energy(plan: Plan | None) -> dict[str, JsonValue] | None:
    if plan is None:
        return None
    return {"iteration_time_s": plan.iteration_time, "energy_j": plan.energy}


class _JobShape(NamedTuple):
    """A pipeline that runs a job's batch on its GPUs, in so many replicas."""

    pipeline: Pipeline
    replicas: int


def advise(
    frontier: Frontier,
    *,
    schedules: Sequence[str] | None = None,
    chunks: Sequence[int] | None = None,
    activation_slots: int | Sequence[int] | None = None,
    best: int = 3,
    memory_gb: float | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Advice]:
    """Rank the schedules that suit a job best, and the job itself, by energy at equal time.

    All run the job's batch on as many GPUs as the job has: with twice the chunks half the stages,
    twice the replicas, and half the microbatches in each. Each is traced; those that come first in
    energy at equal time or in time at equal energy by their relaxed frontiers are planned.
    Schedules that split the backward take its halves from the profile, or assume that they are
    equal; `frontier.profile.adjustments` says so. Of profiles that say what a stage takes of a
    GPU's memory, schedules that need more than there is are left out; the job stays.

    Args:
        frontier: of the job as it is.
        schedules: names in SCHEDULES; default: all.
        chunks: model chunks of a stage; default: the job's and twice as many.
        activation_slots: of EnvPipe's order, see forwards_ahead.
        best: how many to plan of each ranking and number of chunks.
        memory_gb: that a GPU has for the job, GB; default: no schedule is left out.
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
    report = progress or (lambda done, count: None)
    shapes = [
        shape
        for shape in _other_shapes(frontier, schedules or list(SCHEDULES), chunks, activation_slots)
        if memory_gb is None or (_memory_gb(shape.pipeline, frontier.profile) or 0.0) <= memory_gb
    ]
    alternatives = []
    for done, shape in enumerate(shapes, start=1):
        alternatives.append(_traced(frontier, shape))
        report(done, len(shapes) + 1)

    reference = frontier.plan(switch_latency=0.0)
    promising = _promising(frontier, alternatives, energy_j=reference.energy, count=best)
    total = len(shapes) + 1 + len(promising)
    advised = []
    for done, candidate in enumerate([frontier, *promising], start=len(shapes) + 1):
        advised.append(advice_for(reference, frontier, candidate))
        report(done, total)
    return sorted(advised, key=_by_savings)


def _memory_gb(pipeline: Pipeline, profile: Profile) -> float | None:
    """The memory of the GPU that needs most, GB; None where the profile does not say."""
    ranks = memory_by_rank(pipeline, profile)
    return None if ranks is None else max(rank.total_gb for rank in ranks)


def in_envpipe_order(frontier: Frontier) -> Frontier | None:
    """The frontier of a 1F1B job whose forwards run as early as EnvPipe has them.

    Operations, GPUs and batch stay; some activations are kept for longer.

    Returns:
        None where the job runs another schedule, or its order is the same.
    """
    pipeline = frontier.pipeline
    if pipeline.schedule != "1f1b" or pipeline.num_chunks > 1 or pipeline.in_turn:
        return None
    shape = _shape_with_chunks(frontier, ENVPIPE, 1, None)
    if shape is None or shape.pipeline.operations == pipeline.operations:
        return None
    return _traced(frontier, shape)


def _by_savings(advice: Advice) -> float:
    """A key that sorts most savings first, none at the end."""
    return math.inf if advice.saved_percent is None else -advice.saved_percent


def _traced(job: Frontier, shape: _JobShape) -> Frontier:
    """The frontier of another shape of a job."""
    adjustments = job.profile.adjustments
    profile = job.profile.fitted(
        {op.instruction for op in shape.pipeline.operations},
        recompute=adjustments.recompute,
        by_parts=adjustments.by_parts,
    )
    return job.retraced(shape.pipeline, profile, replicas=shape.replicas)


def _promising(
    job: Frontier, alternatives: Sequence[Frontier], *, energy_j: float, count: int
) -> list[Frontier]:
    """Frontiers with the least relaxed energy at T_min of a job, or the least time at its energy.

    Those with other shares of the model on a GPU are ranked apart: not all may fit into memory.

    Args:
        energy_j: of the job's plan, J.
        count: how many of each ranking.
    """

    def energy_at_equal_time(alternative: Frontier) -> float:
        return alternative.energy_at(job.min_time)

    def time_at_equal_energy(alternative: Frontier) -> float:
        # np.interp wants ascending abscissas, and energies descend.
        return float(np.interp(-energy_j, -alternative.energies, alternative.times))

    promising: list[Frontier] = []
    for num_chunks in sorted({alternative.pipeline.num_chunks for alternative in alternatives}):
        as_fast: list[Frontier] = []
        as_thrifty: list[Frontier] = []
        for alternative in alternatives:
            if alternative.pipeline.num_chunks != num_chunks:
                continue
            if alternative.min_time_ns <= job.min_time_ns:
                as_fast.append(alternative)
            if alternative.energies.min() <= energy_j:
                as_thrifty.append(alternative)
        promising += sorted(as_fast, key=energy_at_equal_time)[:count]
        promising += sorted(as_thrifty, key=time_at_equal_energy)[:count]
    return list(dict.fromkeys(promising))


def advice_for(reference: Plan, job: Frontier, alternative: Frontier) -> Advice:
    """Set a frontier's plans beside the plan without slowdown of a job of the same batch and GPUs.

    Args:
        reference: the job's plan without slowdown.
        job: the job's frontier.
        alternative: the frontier of another schedule, or the job's own.
    """
    at_equal_time = at_equal_energy = reference if alternative is job else None
    if alternative is not job:
        if alternative.min_time_ns <= job.min_time_ns:
            at_equal_time = alternative.plan(job.min_time, switch_latency=0.0)
        with suppress(NoAnswerError):
            at_equal_energy = alternative.plan(energy_budget=reference.energy, switch_latency=0.0)
    usual_j = reference.predicted.baseline.energy_j
    saved_percent = faster_percent = None
    if at_equal_time is not None:
        saved_percent = percent(usual_j - at_equal_time.energy, usual_j)
    if at_equal_energy is not None:
        faster_percent = percent(job.min_time - at_equal_energy.iteration_time, job.min_time)
    return Advice(
        frontier=alternative,
        is_job=alternative is job,
        model_share=alternative.pipeline.num_chunks / job.pipeline.num_chunks,
        memory_gb=_memory_gb(alternative.pipeline, alternative.profile),
        at_equal_time=at_equal_time,
        at_equal_energy=at_equal_energy,
        saved_percent=saved_percent,
        faster_percent=faster_percent,
    )


def _other_shapes(
    job: Frontier,
    schedules: Sequence[str],
    chunks: Sequence[int] | None,
    activation_slots: int | Sequence[int] | None,
) -> Iterator[_JobShape]:
    """Pipelines other than the job's that run its batch on its GPUs."""
    pipeline = job.pipeline
    if pipeline.in_turn:  # known of the job's own order alone
        return
    seen = {pipeline.operations}
    for num_chunks in chunks or (pipeline.num_chunks, 2 * pipeline.num_chunks):
        # Of several names for one order the shortest is the plainest.
        for schedule in sorted(schedules, key=len):
            shape = _shape_with_chunks(job, schedule, num_chunks, activation_slots)
            if shape is not None and shape.pipeline.operations not in seen:
                seen.add(shape.pipeline.operations)
                yield shape


def _shape_with_chunks(
    job: Frontier,
    schedule: str,
    num_chunks: int,
    activation_slots: int | Sequence[int] | None,
) -> _JobShape | None:
    """A schedule with so many chunks a stage; None where it does not fit the job's batch and GPUs.

    Raises:
        InputError: activation_slots do not fit.
    """
    pipeline = job.pipeline
    num_ranks = pipeline.num_stages * job.replicas
    batch = pipeline.num_microbatches * job.replicas
    num_stages, uneven = divmod(pipeline.num_profile_stages, num_chunks)
    if uneven or num_ranks % num_stages or batch % (num_ranks // num_stages):
        return None
    replicas = num_ranks // num_stages
    num_microbatches = batch // replicas
    latency = pipeline.p2p_latency
    if isinstance(latency, list) and len(latency) != num_stages - 1:
        latency = max(latency)
    ahead = None
    if schedule == ENVPIPE and num_chunks == 1:
        recompute = job.profile.adjustments.recompute
        profile = job.profile.fitted(("backward",), recompute=recompute)
        ahead = forwards_ahead(profile, num_microbatches, activation_slots)
    with suppress(InputError):  # schedules that have no such shape
        shaped = Pipeline(
            schedule,
            num_stages,
            num_microbatches,
            num_chunks=num_chunks,
            p2p_latency=latency,
            forwards_ahead=ahead,
            extras=pipeline.extras,
        )
        return _JobShape(shaped, replicas)
    return None
