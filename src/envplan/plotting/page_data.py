"""The data of the charts on a page.

Each class here is an object that the script of a page draws. Its `to_dict` has the keys that the
type of the same name in assets/data.js lists. Nothing is planned or replayed here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NamedTuple

from envplan.planners import TimeEnergy
from envplan.plotting.frontier import ENVPIPE_BOUND_LABEL, look_of
from envplan.plotting.titles import T_MIN_LABEL, T_STAR_LABEL, with_unit
from envplan.units import POWER_UNITS_PER_W, s_from_ns

if TYPE_CHECKING:
    from envplan.plan import Plan
    from envplan.planners import Comparison, Entry
    from envplan.simulation.iteration import Timeline
    from envplan.simulation.results import PowerSteps, Slice, StageUse
    from envplan.solve import Frontier

__all__ = [
    "ExplorerChart",
    "FrontierChart",
    "OperationColumns",
    "PartSpan",
    "PlanPoint",
    "PlannerCurve",
    "StageFigures",
    "TimelineBubble",
    "TimelineChart",
    "TimelineData",
    "entry_name",
]

#: Points of a curve at most; JSON has each as a pair.
MAX_CURVE_POINTS: Final = 1500
#: Columns that say which operation it is.
_NAMING_COLUMNS: Final = frozenset({"microbatch", "chunk", "stage", "kind"})
#: The time by which an iteration that takes none is divided, s.
_TINY_S: Final = 1e-9


@dataclass(frozen=True, slots=True)
class PlanPoint:
    """A plan as a point of the frontier chart.

    Attributes:
        planner: who made it; "this_plan" for the plan that a page is about.
        label: what the legend calls it.
        time_s, energy_j, power_w: of an iteration; power is the average of all GPUs.
        saved_percent, slower_percent: against maximum frequency.
        gap: the certified gap; None where it says nothing.
    """

    planner: str
    label: str
    time_s: float
    energy_j: float
    saved_percent: float
    slower_percent: float
    gap: float | None
    power_w: float

    @classmethod
    def of_plan(cls, plan: Plan) -> PlanPoint:
        """The point of one of several plans along a frontier."""
        return cls(
            planner=plan.planner,
            label="plan",
            time_s=plan.iteration_time,
            energy_j=plan.energy,
            saved_percent=plan.predicted.savings_percent,
            slower_percent=plan.predicted.slowdown_percent,
            gap=plan.gap,
            power_w=plan.average_power,
        )

    @classmethod
    def of_slower_plan(cls, plan: Plan) -> PlanPoint:
        """The point of a plan beyond T_star.

        Its gap is against plans that nobody waits after, which says nothing here.
        """
        return replace(cls.of_plan(plan), gap=None)

    @classmethod
    def of_this_plan(cls, plan: Plan) -> PlanPoint:
        """The point of the plan that a page is about."""
        label = f"this plan ({plan.planner})"
        return replace(cls.of_plan(plan), planner="this_plan", label=label)

    @classmethod
    def of_max_frequency(cls, plan: Plan) -> PlanPoint:
        """The point of maximum frequency everywhere, against which a plan is measured."""
        baseline = plan.predicted.baseline
        return cls(
            planner="max_frequency",
            label="maximum frequency everywhere",
            time_s=baseline.iteration_time_s,
            energy_j=baseline.energy_j,
            saved_percent=0.0,
            slower_percent=0.0,
            gap=None,
            power_w=baseline.average_power_w,
        )

    @classmethod
    def of_rival(cls, entry: Entry, schedule: str) -> PlanPoint:
        """The point of another planner, or of ours on another schedule than the page's."""
        label = entry_name(entry.plan.planner, entry.point)
        if entry.plan.job.schedule != schedule:
            label += f" (schedule {entry.plan.job.schedule})"
        return replace(
            cls.of_plan(entry.plan),
            label=label,
            saved_percent=entry.savings_percent,
            slower_percent=entry.slowdown_percent,
        )

    def to_dict(self) -> dict[str, object]:
        """The point as the script reads it."""
        return {
            "planner": self.planner,
            "label": self.label,
            "time": self.time_s,
            "energy": self.energy_j,
            "saved": self.saved_percent,
            "slower": self.slower_percent,
            "gap": self.gap,
            "power": self.power_w,
        }


@dataclass(frozen=True, slots=True)
class PlannerCurve:
    """A curve of another planner or schedule, beside the frontier.

    Attributes:
        planner: whose it is.
        label: what its end and the legend call it.
        points: by ascending time.
        is_bound: whether it is a lower bound, not a line through plans.
    """

    planner: str
    label: str
    points: Sequence[TimeEnergy]
    is_bound: bool

    def to_dict(self) -> dict[str, object]:
        """The curve as the script reads it."""
        return {
            "planner": self.planner,
            "label": self.label,
            "points": self.points,
            "bound": self.is_bound,
        }


@dataclass(frozen=True)
class FrontierChart:
    """Energy against time: the curve, plans on it, planners beside it, a time to move.

    Attributes:
        curve: the exact relaxed frontier.
        curves: further curves.
        plans: along the frontier, by ascending time.
        slower: plans beyond T_star, for stragglers.
        points: single plans with marks of their own.
        baseline: maximum frequency everywhere.
        t_min_s, t_star_s, t_max_s: the ends of the frontier, and the slowest there is.
        waiting_w: what all GPUs draw while they wait.
        straggler_s: the straggler's time when the page opens; None: there is none.
        is_modelled: whether the figures are of a model.
    """

    curve: Sequence[TimeEnergy]
    curves: Sequence[PlannerCurve]
    plans: Sequence[PlanPoint]
    slower: Sequence[PlanPoint]
    points: Sequence[PlanPoint]
    baseline: PlanPoint
    t_min_s: float
    t_star_s: float
    t_max_s: float
    waiting_w: float
    straggler_s: float | None
    is_modelled: bool

    @classmethod
    def of(
        cls,
        frontier: Frontier,
        along: Sequence[Plan],
        *,
        slower: Sequence[Plan] = (),
        comparison: Comparison | None = None,
        this_plan: Plan | None = None,
    ) -> FrontierChart:
        """The chart of a frontier.

        Args:
            frontier: whose curve it shows.
            along: plans along it, at least one, by ascending time.
            slower: plans beyond T_star to look up for stragglers.
            comparison: planners to show beside it.
            this_plan: the plan that the page is about; its straggler is there when the page opens.
        """
        baseline = PlanPoint.of_max_frequency(along[0])
        points = [baseline]
        if comparison is not None:
            points += _rivals(comparison)
        if this_plan is not None:
            points.append(PlanPoint.of_this_plan(this_plan))
        stages_waiting_w = sum(frontier.blocking_power_w)
        return cls(
            curve=_curve(frontier),
            curves=[] if comparison is None else _planner_curves(comparison),
            plans=[PlanPoint.of_plan(plan) for plan in along],
            slower=[PlanPoint.of_slower_plan(plan) for plan in slower],
            points=points,
            baseline=baseline,
            t_min_s=frontier.min_time,
            t_star_s=frontier.min_energy_time,
            t_max_s=frontier.slowest_time,
            waiting_w=stages_waiting_w * frontier.gpus_per_stage * frontier.replicas,
            straggler_s=None if this_plan is None else this_plan.target.straggler_time_s,
            is_modelled=frontier.profile.metadata.source == "modelled",
        )

    def to_dict(self) -> dict[str, object]:
        """The chart as the script reads it."""
        return {
            "curve": self.curve,
            "curves": [curve.to_dict() for curve in self.curves],
            "plans": [plan.to_dict() for plan in self.plans],
            "slower": [plan.to_dict() for plan in self.slower],
            "points": [point.to_dict() for point in self.points],
            "baseline": self.baseline.to_dict(),
            "t_min": self.t_min_s,
            "t_star": self.t_star_s,
            "ends": [T_MIN_LABEL, T_STAR_LABEL],
            "t_max": self.t_max_s,
            "waiting_w": self.waiting_w,
            "straggler": self.straggler_s,
            "modelled": self.is_modelled,
        }


def _rivals(comparison: Comparison) -> list[PlanPoint]:
    """The points of other planners, and of ours on other schedules.

    Maximum frequency and our plans on the page's schedule are on every chart anyway.
    """
    schedule = comparison.frontier.pipeline.schedule
    points = []
    for entry in comparison.entries:
        is_ours = entry.plan.planner == "frontier" and entry.plan.job.schedule == schedule
        if entry.plan.planner != "max_frequency" and not is_ours:
            points.append(PlanPoint.of_rival(entry, schedule))
    return points


def entry_name(planner: str, point: str | None) -> str:
    """The name of a planner's plan, such as "envplan at T_min"."""
    name = look_of(planner).name
    return f"{name} at {point}" if point in ("T_min", "T_star") else name


def _planner_curves(comparison: Comparison) -> list[PlannerCurve]:
    """All plans of planners that have several, and the frontier of EnvPipe's schedule."""
    curves = []
    for planner, points in comparison.curves.items():
        name = look_of(planner).name
        curves.append(PlannerCurve(planner, name, _thinned(points), is_bound=False))
    if comparison.envpipe_frontier is not comparison.frontier:
        points = _curve(comparison.envpipe_frontier)
        curves.append(PlannerCurve("envpipe", ENVPIPE_BOUND_LABEL, points, is_bound=True))
    return curves


def _curve(frontier: Frontier) -> list[TimeEnergy]:
    """The relaxed frontier's breakpoints."""
    breakpoints = map(TimeEnergy, frontier.times.tolist(), frontier.energies.tolist())
    return _thinned(list(breakpoints))


def _thinned(points: Sequence[TimeEnergy]) -> list[TimeEnergy]:
    """Points of a curve with its ends; of very many, enough that no eye sees the difference."""
    step = max(1, math.ceil(len(points) / MAX_CURVE_POINTS))
    return [*points[:-1:step], *points[-1:]]


@dataclass(frozen=True)
class OperationColumns:
    """The operations of a timeline, column by column, all (N,).

    Attributes:
        microbatches, chunks, stages: which operation it is.
        kinds: its instruction, an index into TimelineData.instructions.
        starts_s, times_s: when it begins, and how long it takes.
        frequencies_mhz: its clock; 0 where it controls none.
        power_w: its average on one GPU.
        slacks_s: how much longer it could take.
        critical: 1 on the critical path, else 0.
    """

    microbatches: Sequence[int]
    chunks: Sequence[int]
    stages: Sequence[int]
    kinds: Sequence[int]
    starts_s: Sequence[float]
    times_s: Sequence[float]
    frequencies_mhz: Sequence[int]
    power_w: Sequence[float]
    slacks_s: Sequence[float]
    critical: Sequence[int]

    @classmethod
    def of(cls, timeline: Timeline, instructions: Sequence[str]) -> OperationColumns:
        """The columns of a timeline, its instructions numbered as in a list of them."""
        runs, replay = timeline.operations, timeline.replay
        times_ns = (replay.finishes_ns - replay.starts_ns).tolist()
        energies_10fj = replay.energies_10fj.tolist()
        number = {instruction: index for index, instruction in enumerate(instructions)}
        return cls(
            microbatches=[run.microbatch for run in runs],
            chunks=[run.chunk for run in runs],
            stages=[run.stage for run in runs],
            kinds=[number[run.instruction] for run in runs],
            starts_s=[run.start_s for run in runs],
            times_s=list(map(s_from_ns, times_ns)),
            frequencies_mhz=[run.frequency_mhz for run in runs],
            power_w=list(map(_average_power_w, energies_10fj, times_ns)),
            slacks_s=[run.could_stretch_s for run in runs],
            critical=[int(run.critical_path) for run in runs],
        )

    def to_dict(self) -> dict[str, object]:
        """The columns as the script reads them."""
        return {
            "microbatch": self.microbatches,
            "chunk": self.chunks,
            "start": self.starts_s,
            "mhz": self.frequencies_mhz,
            "slack": self.slacks_s,
            "stage": self.stages,
            "kind": self.kinds,
            "time": self.times_s,
            "watts": self.power_w,
            "critical": self.critical,
        }

    def to_dict_without_names(self) -> dict[str, object]:
        """The columns that differ between plans of one pipeline, as the script reads them."""
        columns = self.to_dict()
        return {name: columns[name] for name in columns if name not in _NAMING_COLUMNS}


class PartSpan(NamedTuple):
    """A part of an operation at a clock of its own; JSON has it as a list."""

    begin_s: float
    end_s: float
    frequency_mhz: int
    power_w: float
    part: str


class TimelineBubble(NamedTuple):
    """A gap of a stage; JSON has it as a list.

    Attributes:
        stage: whose gap it is.
        begin_s, end_s: when it begins and ends.
        usable_s: how much of it the operation before it could fill.
    """

    stage: int
    begin_s: float
    end_s: float
    usable_s: float


@dataclass(frozen=True)
class TimelineData:
    """One timeline of a chart.

    Attributes:
        name: what it is called, such as "plan" or "maximum frequency".
        title: over it: its name, time and energy.
        num_chunks, num_stages: of its pipeline.
        instructions: those that occur.
        operations: in the order of the pipeline.
        parts: by operation, of those whose parts have clocks of their own.
        bubbles: of all stages.
        power: of all GPUs over time.
        average_power_w: of all GPUs.
    """

    name: str
    title: str
    num_chunks: int
    num_stages: int
    instructions: Sequence[str]
    operations: OperationColumns
    parts: Mapping[int, Sequence[PartSpan]]
    bubbles: Sequence[TimelineBubble]
    power: PowerSteps
    average_power_w: float

    @classmethod
    def of(cls, timeline: Timeline, name: str) -> TimelineData:
        """A timeline under a name."""
        instructions = list(dict.fromkeys(run.instruction for run in timeline.operations))
        return cls(
            name=name,
            title=f"{name}: {timeline.iteration_time:#.4g} s, {with_unit(timeline.energy, 'J')}",
            num_chunks=timeline.pipeline.num_chunks,
            num_stages=timeline.pipeline.num_stages,
            instructions=instructions,
            operations=OperationColumns.of(timeline, instructions),
            parts=_parts(timeline.slices),
            bubbles=_bubbles(timeline.stages),
            power=timeline.power,
            average_power_w=timeline.average_power,
        )

    def to_dict(self) -> dict[str, object]:
        """The timeline as the script reads it."""
        return {
            "name": self.name,
            "title": self.title,
            "chunks": self.num_chunks,
            "stages": self.num_stages,
            "kinds": self.instructions,
            "ops": self.operations.to_dict(),
            "parts": self.parts,
            "bubbles": self.bubbles,
            "power": self.power_dict(),
            "average_w": self.average_power_w,
        }

    def power_dict(self) -> dict[str, list[float]]:
        """The steps of power as the script reads them."""
        return {
            "times": list(map(s_from_ns, self.power.times_ns.tolist())),
            "watts": self.power.power_w.round(3).tolist(),
        }


def _bubbles(stages: Sequence[StageUse]) -> list[TimelineBubble]:
    """The bubbles of all stages."""
    bubbles: list[TimelineBubble] = []
    for stage in stages:
        for bubble in stage.bubbles:
            fields = (stage.stage, bubble.start_s, bubble.finish_s, bubble.could_fill_s)
            bubbles.append(TimelineBubble(*fields))
    return bubbles


def _parts(slices: Sequence[Slice]) -> dict[int, list[PartSpan]]:
    """The parts that have clocks of their own, by operation."""
    parts: dict[int, list[PartSpan]] = {}
    for piece in slices:
        if piece.part:
            parts.setdefault(piece.operation, []).append(_part_span(piece))
    return parts


def _part_span(piece: Slice) -> PartSpan:
    return PartSpan(
        begin_s=s_from_ns(piece.start_ns),
        end_s=s_from_ns(piece.finish_ns),
        frequency_mhz=piece.frequency_mhz,
        power_w=_average_power_w(piece.energy_10fj, piece.finish_ns - piece.start_ns),
        part=piece.part,
    )


def _average_power_w(energy_10fj: int, time_ns: int) -> float:
    """Average power to the milliwatt; 0 of what takes no time."""
    return round(energy_10fj / (time_ns * POWER_UNITS_PER_W), 3) if time_ns else 0.0


@dataclass(frozen=True)
class TimelineChart:
    """Timelines one above the other on one time axis.

    Attributes:
        timelines: from the top.
        span_s: the length of the axis.
    """

    timelines: Sequence[TimelineData]
    span_s: float

    @classmethod
    def of(cls, timelines: Mapping[str, Timeline]) -> TimelineChart:
        """The chart of timelines by name."""
        return cls(
            timelines=[TimelineData.of(timeline, name) for name, timeline in timelines.items()],
            span_s=max(timeline.sync_time for timeline in timelines.values()),
        )

    def to_dict(self) -> dict[str, object]:
        """The chart as the script reads it."""
        return {
            "timelines": [timeline.to_dict() for timeline in self.timelines],
            "span": self.span_s,
        }


class StageFigures(NamedTuple):
    """What a plan makes of a stage; JSON has it as a list.

    Attributes:
        energy_j: of the stage's GPUs in all replicas.
        saved_percent: of what it uses at maximum frequency; None where that is nothing.
        waits_percent: the share of the iteration in which it waits.
        mean_clock_mhz: by time, over operations that control a clock; None where none does.
        clock_changes: of an iteration.
    """

    energy_j: float
    saved_percent: float | None
    waits_percent: float
    mean_clock_mhz: float | None
    clock_changes: int

    @classmethod
    def of_all(cls, before: Timeline, timeline: Timeline) -> list[StageFigures]:
        """The figures of all stages in a timeline, beside that of maximum frequency."""
        return [cls.of(stage, timeline) for stage in before.stages]

    @classmethod
    def of(cls, before: StageUse, timeline: Timeline) -> StageFigures:
        """The figures of a stage in a timeline, beside its use at maximum frequency."""
        now = timeline.stages[before.stage]
        saved = 100 * (1 - now.energy_j / before.energy_j) if before.energy_j else None
        return cls(
            energy_j=now.energy_j,
            saved_percent=saved,
            waits_percent=waits_percent(now, timeline),
            mean_clock_mhz=_mean_clock_mhz(now),
            clock_changes=len(now.clock_changes) - 1,
        )


def waits_percent(stage: StageUse, timeline: Timeline) -> float:
    """The share of an iteration in which a stage waits, in percent."""
    return 100 * stage.blocked_s / max(_TINY_S, timeline.sync_time)


def _mean_clock_mhz(stage: StageUse) -> float | None:
    """The mean clock that a stage asks for, by time; None where it controls none."""
    controlled = [run for run in stage.operations if run.frequency_mhz]
    busy_s = sum(run.duration_s for run in controlled)
    if not busy_s:
        return None
    return sum(run.frequency_mhz * run.duration_s for run in controlled) / busy_s


@dataclass(frozen=True)
class ExplorerChart:
    """The frontier with a time that one accepts: its plan's timeline, power and stages.

    Attributes:
        frontier: the frontier.
        frames: a timeline for each of its plans, then for each of its slower ones; none where
            they would be too large for a page.
        stages: for each frame, figures of each stage.
        before: the timeline of maximum frequency; None without frames.
    """

    frontier: FrontierChart
    frames: Sequence[TimelineData] = ()
    stages: Sequence[Sequence[StageFigures]] = ()
    before: TimelineData | None = None

    @classmethod
    def of(cls, frontier: FrontierChart, timelines: Sequence[Timeline]) -> ExplorerChart:
        """The chart of a frontier, with timelines of all its plans or none."""
        if not timelines:
            return cls(frontier)
        before = timelines[0].at_max_frequency()
        return cls(
            frontier=frontier,
            frames=[TimelineData.of(timeline, "plan") for timeline in timelines],
            stages=[StageFigures.of_all(before, timeline) for timeline in timelines],
            before=TimelineData.of(before, "maximum frequency"),
        )

    def to_dict(self) -> dict[str, object]:
        """The chart as the script reads it.

        Columns that say which operation it is are alike in all frames: the first alone has them.
        """
        frames = [frame.to_dict() for frame in self.frames]
        for frame, data in zip(frames[1:], self.frames[1:], strict=True):
            frame["ops"] = data.operations.to_dict_without_names()
        before = self.before
        power = None if before is None else before.power_dict()
        return {
            "frontier": self.frontier.to_dict(),
            "frames": frames,
            "stages": self.stages,
            "power_before": power,
            "average_before_w": None if before is None else before.average_power_w,
        }
