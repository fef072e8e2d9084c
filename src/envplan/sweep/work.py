"""What a worker does: trace a frontier once, and plan every point on it."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from envplan.errors import DoubtWarning, EnvplanError
from envplan.pipeline import Pipeline, traits
from envplan.pipeline.described import described_pipeline
from envplan.pipeline.extras import parse_extras
from envplan.plan import Plan
from envplan.planners import PLANNERS, forwards_ahead
from envplan.profile import Profile
from envplan.simulation import simulate
from envplan.solve import Frontier, trace_frontier
from envplan.sweep.config import Point
from envplan.sweep.table import Row
from envplan.units import j_from_fj, ns_from_s_floor, s_from_ns

__all__ = ["Done", "Group", "Task", "compute", "failed_row", "group_key"]


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
    return (
        point.profile,
        point.microbatches,
        point.schedule,
        point.chunks,
        point.p2p_latency,
        point.blocking_power,
        point.gpus_per_stage,
        point.replicas,
        point.recompute,
        point.extra,
        point.one_clock,
        point.parts_within,
    )


def failed_row(point: Point, profile: Profile | None, error: str) -> Row:
    """The row of a point without a plan."""
    return Row(**_inputs(point, profile), error=error)


def compute(group: Group) -> Iterator[Done]:
    """The outcome of each task, in order; an error is an outcome, too."""
    warnings.simplefilter("ignore", DoubtWarning)  # of each of many points
    shared = _Shared(group.profile, group.tasks[0].point)
    for task in group.tasks:
        row = _inputs(task.point, group.profile)
        try:
            row |= shared.traced()
            begin = time.perf_counter()
            row |= shared.planned(task.point)
            row["wall_s"] = time.perf_counter() - begin
            yield Done(Row(**row), final=True)
        except EnvplanError as error:
            yield Done(Row(**row, error=str(error)), final=True)
        except Exception as error:  # a point must not take the others with it
            yield Done(Row(**row, error=f"{type(error).__name__}: {error}"), final=False)


def _inputs(point: Point, profile: Profile | None) -> dict[str, Any]:
    kind, value = point.target
    chunks = point.chunks or traits(point.schedule or "").chunks
    return {
        "profile": point.profile,
        "source": None if profile is None else profile.metadata.source,
        "stages": None if profile is None else profile.num_stages // chunks or None,
        "microbatches": point.microbatches,
        "schedule": point.schedule,
        "chunks": chunks,
        "planner": point.planner,
        "target": kind,
        "target_value": _float(value),
        "p2p_latency_s": _transfers(point, profile),
        "blocking_power_w": _float(point.blocking_power),
        "gpus_per_stage": point.gpus_per_stage or 1,
        "replicas": point.replicas or 1,
        "recompute": point.recompute,
        "extra": point.extra,
        "one_clock": point.one_clock,
        "parts_within_percent": _float(point.parts_within),
        "switch_latency_ms": _float(point.switch_latency),
        "min_dwell_ms": _float(point.min_dwell),
        "robust_percent": _float(point.robust),
        "noise_percent": _float(point.noise),
        "seed": point.seed,
    }


def _transfers(point: Point, profile: Profile | None) -> float:
    """What the longest transfer takes, s."""
    known = point.p2p_latency
    if known is None and profile is not None:
        of_job = profile.metadata.job.p2p_latency_s
        known = max(of_job) if isinstance(of_job, list) else of_job
    return float(known or 0.0)


def _float(value: float | None) -> float | None:
    """As JSON and TOML may give a whole number."""
    return None if value is None else float(value)


class _Shared:
    """The frontier of a group, traced when it is first needed, and the last plan made on it."""

    def __init__(self, profile: Profile, point: Point) -> None:
        self._profile = profile
        self._point = point
        self._frontier: Frontier | None = None
        self._facts: dict[str, Any] = {}
        self._refusal: EnvplanError | None = None
        self._last: tuple[object, Plan] | None = None

    def traced(self) -> dict[str, Any]:
        """What all rows of the group say.

        Raises:
            EnvplanError: the frontier cannot be traced, now or before.
        """
        if self._refusal is not None:
            raise self._refusal
        if self._frontier is None:
            try:
                self._trace()
            except EnvplanError as error:
                self._refusal = error
                raise
        return self._facts

    def _trace(self) -> None:
        point = self._point
        begin = time.perf_counter()
        pipeline = _pipeline(point, self._profile)
        needed = {op.instruction for op in pipeline.operations}
        by_parts = self._profile.by_parts(
            one_clock=point.one_clock,
            within_percent=point.parts_within,
            blocking_power_w=point.blocking_power,
        )
        profile = self._profile.fitted(needed, recompute=point.recompute, by_parts=by_parts)
        frontier = trace_frontier(
            pipeline,
            profile,
            blocking_power=point.blocking_power,
            gpus_per_stage=point.gpus_per_stage or 1,
            replicas=point.replicas or 1,
        )
        self._frontier = frontier
        self._facts = {
            "assumed": "; ".join(profile.adjustments.in_words()) or None,
            "t_min_s": frontier.min_time,
            "t_star_s": frontier.min_energy_time,
            "trace_s": time.perf_counter() - begin,
        }

    def planned(self, point: Point) -> dict[str, Any]:
        """What came of a point."""
        assert self._frontier is not None
        asked = point.model_copy(update={"seed": 0})
        if self._last is None or self._last[0] != asked:
            self._last = asked, _plan(self._frontier, point)
        plan = self._last[1]
        predicted = plan.predicted
        return {
            "iteration_time_s": plan.iteration_time,
            "energy_j": plan.energy,
            "average_power_w": plan.average_power,
            "energy_lower_bound_j": plan.energy_lower_bound,
            "gap_percent": 100 * plan.gap,
            "savings_percent": predicted.savings_percent,
            "slowdown_percent": predicted.slowdown_percent,
            **_replayed(plan, self._frontier.profile, point),
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


def _replayed(plan: Plan, profile: Profile, point: Point) -> dict[str, Any]:
    if point.noise is None:
        return {}
    timeline = simulate(plan, profile, noise=point.noise / 100, seed=point.seed)
    return {
        "replayed_time_s": s_from_ns(timeline.run_times_ns[0]),
        "replayed_energy_j": j_from_fj(timeline.run_energies_fj[0]),
    }
