"""What a worker does: trace a frontier once, and plan every point on it."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from envplan.errors import DoubtWarning, EnvplanError
from envplan.pipeline import Pipeline, traits
from envplan.pipeline.described import described_pipeline, parse_extras
from envplan.plan import Plan
from envplan.planners import PLANNERS, forwards_ahead
from envplan.profile import Profile
from envplan.simulation import simulate
from envplan.solve import Frontier, trace_frontier
from envplan.sweep.config import Point
from envplan.sweep.table import Row
from envplan.units import ns_from_s_floor

__all__ = ["Done", "Group", "Task", "compute", "failed_row", "group_key"]

#: What points with one frontier have in common.
_SHARED: Final = (
    *("profile", "microbatches", "schedule", "chunks", "p2p_latency", "blocking_power"),
    *("gpus_per_stage", "replicas", "recompute", "extra", "one_clock", "parts_within"),
)
#: What a row says of its point, by the point's name for it where that is another.
_SAID: Final = {
    **{name: name for name in ("profile", "microbatches", "schedule", "planner", "recompute")},
    **{name: name for name in ("extra", "one_clock", "seed")},
    "blocking_power_w": "blocking_power",
    "parts_within_percent": "parts_within",
    "switch_latency_ms": "switch_latency",
    "min_dwell_ms": "min_dwell",
    "robust_percent": "robust",
    "noise_percent": "noise",
}


@dataclass(frozen=True)
class Task:
    """A point to be computed.

    Attributes:
        index: its place in the sweep.
        key: what the journal knows it by.
        point: with its microbatches and schedule filled in.
    """

    index: int
    key: str
    point: Point


@dataclass(frozen=True)
class Group:
    """Tasks that share a frontier."""

    profile: Profile
    tasks: tuple[Task, ...]


class Done(NamedTuple):
    """A task's outcome.

    Attributes:
        final: doing it again would end the same way.
    """

    row: Row
    final: bool


def group_key(point: Point) -> tuple[object, ...]:
    """What points with one frontier have in common."""
    return tuple(getattr(point, name) for name in _SHARED)


def failed_row(point: Point, profile: Profile | None, error: str) -> Row:
    """The row of a point without a plan."""
    return Row(**_inputs(point, profile), error=error)


def compute(group: Group) -> Iterator[Done]:
    """The outcome of each task, in order; an error is an outcome, too."""
    warnings.simplefilter("ignore", DoubtWarning)  # of each of many points
    traced: tuple[Frontier, dict[str, Any]] | Exception
    try:
        traced = _traced(group.profile, group.tasks[0].point)
    except Exception as error:  # a group must not take the others with it
        traced = error
    last: tuple[Point, Plan] | None = None
    for task in group.tasks:
        row = _inputs(task.point, group.profile)
        try:
            if isinstance(traced, Exception):
                raise traced
            frontier, facts = traced
            row |= facts
            begin = time.perf_counter()
            asked = task.point.model_copy(update={"seed": 0})
            if last is None or last[0] != asked:
                last = asked, _plan(frontier, asked)
            row |= _found(last[1], frontier.profile, task.point)
            row["wall_s"] = time.perf_counter() - begin
            yield Done(Row(**row), final=True)
        except EnvplanError as error:
            yield Done(Row(**row, error=str(error)), final=True)
        except Exception as error:  # nor a point
            yield Done(Row(**row, error=f"{type(error).__name__}: {error}"), final=False)


def _inputs(point: Point, profile: Profile | None) -> dict[str, Any]:
    kind, value = point.target
    chunks = point.chunks or traits(point.schedule or "").chunks
    latency = point.p2p_latency
    if latency is None and profile is not None:
        of_job = profile.metadata.job.p2p_latency_s
        latency = max(of_job) if isinstance(of_job, list) else of_job
    return {
        **{name: getattr(point, said) for name, said in _SAID.items()},
        "source": None if profile is None else profile.metadata.source,
        "stages": None if profile is None else profile.num_stages // chunks or None,
        "chunks": chunks,
        "target": kind,
        "target_value": value,
        "p2p_latency_s": latency or 0.0,
        "gpus_per_stage": point.gpus_per_stage or 1,
        "replicas": point.replicas or 1,
    }


def _traced(profile: Profile, point: Point) -> tuple[Frontier, dict[str, Any]]:
    """The frontier of a group, and what all of its rows say of it."""
    begin = time.perf_counter()
    pipeline = _pipeline(point, profile)
    by_parts = profile.by_parts(
        one_clock=point.one_clock,
        within_percent=point.parts_within,
        blocking_power_w=point.blocking_power,
    )
    needed = {op.instruction for op in pipeline.operations}
    fitted = profile.fitted(needed, recompute=point.recompute, by_parts=by_parts)
    frontier = trace_frontier(
        pipeline,
        fitted,
        blocking_power=point.blocking_power,
        gpus_per_stage=point.gpus_per_stage or 1,
        replicas=point.replicas or 1,
    )
    return frontier, {
        "assumed": "; ".join(fitted.adjustments.in_words()) or None,
        "t_min_s": frontier.min_time,
        "t_star_s": frontier.min_energy_time,
        "trace_s": time.perf_counter() - begin,
    }


def _pipeline(point: Point, profile: Profile) -> Pipeline:
    def ahead(microbatches: int) -> tuple[int, ...]:
        timed = profile.fitted(("backward",), recompute=point.recompute)
        return forwards_ahead(timed, microbatches, None)

    return described_pipeline(
        profile,
        schedule=point.schedule,
        num_microbatches=point.microbatches,
        chunks=point.chunks,
        p2p_latency=point.p2p_latency,
        extras=parse_extras(point.extra, profile),
        forwards_ahead=ahead,
    )


def _plan(frontier: Frontier, point: Point) -> Plan:
    kind, value = point.target
    number = value or 0.0
    if point.planner != "frontier":
        least = frontier.min_time_ns
        target_ns = {
            "time": ns_from_s_floor(number),
            "slowdown": least + int(least * number / 100),
            "min-energy": frontier.min_energy_time_ns,
        }.get(kind)
        return PLANNERS[point.planner].plan(frontier, target_ns)
    return frontier.plan(
        value if kind == "time" else None,
        # The least time that slow clocks allow is asked for by no target at all.
        slowdown=None if point.slowdown is None else number / 100,
        min_energy=kind == "min-energy",
        energy_budget=value if kind == "energy-budget" else None,
        power_cap=value if kind == "power-cap" else None,
        peak_power_cap=value if kind == "peak-power-cap" else None,
        probability=None if point.robust is None else point.robust / 100,
        noise=None if point.robust is None or point.noise is None else point.noise / 100,
        switch_latency=(point.switch_latency or 0.0) / 1000,
        min_hold=(point.min_dwell or 0.0) / 1000,
    )


def _found(plan: Plan, profile: Profile, point: Point) -> dict[str, Any]:
    """What came of a point."""
    found = {
        "iteration_time_s": plan.iteration_time,
        "energy_j": plan.energy,
        "average_power_w": plan.average_power,
        "energy_lower_bound_j": plan.energy_lower_bound,
        "gap_percent": 100 * plan.gap,
        "savings_percent": plan.predicted.savings_percent,
        "slowdown_percent": plan.predicted.slowdown_percent,
    }
    if point.noise is not None:
        timeline = simulate(plan, profile, noise=point.noise / 100, seed=point.seed)
        found["replayed_time_s"] = timeline.iteration_time
        found["replayed_energy_j"] = timeline.energy
    return found
