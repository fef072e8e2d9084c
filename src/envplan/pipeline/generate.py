"""Pipelines of named schedules: arguments checked, operations generated and connected."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from envplan._io.words import enumerated
from envplan.errors import InputError, shown, unknown
from envplan.pipeline.dependencies import Dag, check_orders, connect
from envplan.pipeline.operations import EXTRAS
from envplan.pipeline.schedules import (
    SCHEDULES,
    fitting_ahead,
    schedules_of_any_chunks,
    traits,
    with_extras,
)
from envplan.pipeline.spec import DAG_SCHEDULE, PipelineSpec, refuse_too_large
from envplan.units import ns_from_s

#: The schedule that runs some forwards earlier than 1F1B.
ENVPIPE: Final = "envpipe"
#: The schedule in which microbatches go through a chunk in groups of a length of choice.
INTERLEAVED: Final = "interleaved"


@dataclass(frozen=True, kw_only=True)
class ScheduleArguments:
    """The arguments that a pipeline was generated with, checked; see Pipeline.

    Attributes:
        schedule: its name; DAG_SCHEDULE with no other arguments for a custom DAG.
        p2p_latency_ns: of every transfer, or of each pair of neighbouring stages.
        forwards_ahead: of each stage; empty but for envpipe.
        microbatch_group: as it was given.
        extras: model stages of each extra operation, ascending.
        in_turn: stages that take turns with the next one, ascending.
    """

    schedule: str
    p2p_latency_ns: int | tuple[int, ...] = 0
    forwards_ahead: tuple[int, ...] = ()
    microbatch_group: int | None = None
    extras: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    in_turn: tuple[int, ...] = ()


@dataclass(frozen=True)
class GeneratedSchedule:
    """The operations of a named schedule, and the arguments they were generated with."""

    dag: Dag
    arguments: ScheduleArguments


def generate(spec: PipelineSpec) -> GeneratedSchedule:
    """Generate the schedule that a spec names.

    Raises:
        InputError: there is no such schedule or it has no such shape, an argument is out of range,
            or a schedule of the caller's own deadlocks or misses an operation.
    """
    num_chunks = _check_shape(spec)
    _check_arguments_of_one_schedule(spec)
    forwards_ahead = _checked_forwards_ahead(spec)
    extras = _checked_extras(spec, spec.stages * num_chunks)
    latency_ns = latencies_ns(spec)
    in_turn = _checked_in_turn(spec, num_chunks)
    arguments = ScheduleArguments(
        schedule=spec.schedule,
        p2p_latency_ns=latency_ns,
        forwards_ahead=forwards_ahead,
        microbatch_group=spec.microbatch_group,
        extras=extras,
        in_turn=in_turn,
    )
    own_arguments: dict[str, object] = {}
    if spec.schedule == ENVPIPE:
        own_arguments["forwards_ahead"] = forwards_ahead
    if spec.microbatch_group is not None:
        own_arguments["microbatch_group"] = spec.microbatch_group
    generator = SCHEDULES[spec.schedule]
    orders = generator(spec.stages, spec.microbatches, num_chunks, **own_arguments)
    check_orders(orders, spec.microbatches)
    dag = connect(with_extras(orders, extras), latency_ns, in_turn)
    return GeneratedSchedule(dag, arguments)


def latencies_ns(spec: PipelineSpec) -> int | tuple[int, ...]:
    """The latency of transfers in whole ns, or that of each pair of neighbouring stages.

    Raises:
        InputError: a list has another length.
    """
    latency_s = spec.p2p_latency_s
    if not isinstance(latency_s, list):
        return ns_from_s(latency_s)
    if len(latency_s) == spec.stages - 1 > 0:
        return tuple(map(ns_from_s, latency_s))
    raise InputError(
        f"p2p_latency_s must be one number, or a list of {spec.stages - 1}, one for each pair of "
        "neighbouring stages"
    )


def _check_shape(spec: PipelineSpec) -> int:
    """The number of chunks of each stage.

    Raises:
        InputError: there is no such schedule, or not with so many chunks or operations.
    """
    name = spec.schedule
    if name == DAG_SCHEDULE:
        raise InputError('schedule "dag" is that of a DAG file: use Pipeline.from_dag_file')
    if name not in SCHEDULES:
        raise InputError(unknown("schedule", name, SCHEDULES))
    usual = traits(name)
    num_chunks = spec.chunks or usual.chunks
    if num_chunks != usual.chunks and not usual.any_chunks:
        runs = "one model chunk" if usual.chunks == 1 else "two model chunks"
        raise InputError(
            f"schedule {name} runs {runs} per stage, not {num_chunks}; "
            f"schedules {enumerated(schedules_of_any_chunks())} run several"
        )
    refuse_too_large(usual.passes * spec.stages * num_chunks * spec.microbatches)
    return num_chunks


def _check_arguments_of_one_schedule(spec: PipelineSpec) -> None:
    if spec.forwards_ahead is not None and spec.schedule != ENVPIPE:
        raise InputError(f"forwards_ahead goes with schedule {ENVPIPE}, not {spec.schedule}")
    if spec.microbatch_group is not None and spec.schedule != INTERLEAVED:
        raise InputError(f"microbatch_group goes with schedule {INTERLEAVED}, not {spec.schedule}")


def _checked_forwards_ahead(spec: PipelineSpec) -> tuple[int, ...]:
    """The forwards ahead of each stage; empty for other schedules than envpipe."""
    if spec.schedule != ENVPIPE:
        return ()
    ahead = spec.forwards_ahead or [0] * spec.stages
    if len(ahead) != spec.stages:
        raise InputError(f"forwards_ahead must be a list of {spec.stages} numbers, one a stage")
    for stage, fitting in enumerate(fitting_ahead(ahead, spec.microbatches)):
        if ahead[stage] > fitting:
            raise InputError(
                f"forwards_ahead[{stage}] must be at most {fitting}, not {ahead[stage]}: "
                "what the microbatches and the stage before allow"
            )
    return tuple(ahead)


def _checked_extras(spec: PipelineSpec, num_model_stages: int) -> dict[str, tuple[int, ...]]:
    """The model stages of each extra operation, ascending, in the order of EXTRAS."""
    extras = spec.extras or {}
    for name, stages in extras.items():
        if name not in EXTRAS:
            raise InputError(f"{shown(name)} is no extra operation; known: {', '.join(EXTRAS)}")
        if not stages or max(stages) >= num_model_stages:
            raise InputError(
                f"extras: {name} must list the stages that have it, of 0 to {num_model_stages - 1}"
            )
    return {name: tuple(sorted(set(extras[name]))) for name in EXTRAS if name in extras}


def _checked_in_turn(spec: PipelineSpec, num_chunks: int) -> tuple[int, ...]:
    """The stages that take turns with the next one, ascending."""
    in_turn = tuple(sorted(set(spec.in_turn or ())))
    if in_turn and (num_chunks > 1 or in_turn[-1] > spec.stages - 2):
        raise InputError(
            "in_turn goes with one chunk per stage, and names stages that have a next one"
        )
    return in_turn
