"""The TOML file of a sweep, and its points."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, Self

from pydantic import AfterValidator, AliasChoices, Field, create_model, model_validator

from envplan._io.documents import Count, GpuCount, Model, Seconds
from envplan._io.files import AnyPath
from envplan._io.markup import read_toml
from envplan.errors import InputError, naming
from envplan.pipeline import SCHEDULES
from envplan.planners import PLANNERS
from envplan.replay import Ask
from envplan.request.limits import LIMIT_OPTIONS, LIMITS, LimitOption

__all__ = ["Point", "SweepConfig", "Target", "read_config"]

MAX_POINTS: Final = 1_000_000

#: Where a name of a profile has the number of stages.
_STAGES: Final = "{stages}"

#: Options of limits for which a point has a field, by the field.
_LIMIT_OPTIONS: Final = {
    option.parameter: option for option in LIMIT_OPTIONS if option.sweep is not None
}
#: Those whose field is a target: the fastest plan that keeps the limit.
LIMIT_TARGETS: Final = {
    limit.options[0].parameter: limit.options[0]
    for limit in reversed(LIMITS)
    if limit.stated_as is not None
}
#: Targets that are times, which other planners can be given, too, with the kind of each.
_TIME_TARGETS: Final = {"slowdown": "slowdown", "target_time": "time", "min_energy": "min-energy"}
_LIMIT_KINDS: Final = {name: option.flag for name, option in LIMIT_TARGETS.items()}
#: The fields of a point that say a target, in the order of a grid, with the kind of each.
TARGETS: Final[dict[str, str]] = _TIME_TARGETS | _LIMIT_KINDS
_LIMITS_BESIDE_TARGETS: Final = [name for name in _LIMIT_OPTIONS if name not in LIMIT_TARGETS]
#: Conditions on clocks and times that our planner alone can plan for.
_CONDITIONS: Final = ("switch_latency", "ask", *_LIMITS_BESIDE_TARGETS)
#: Fields in which points with one frontier may differ.
_NOT_OF_THE_FRONTIER: Final = {*TARGETS, *_CONDITIONS, "planner", "noise", "seed"}

#: A value of a field of a point, as TOML says it.
FieldValue = object
#: Fields of a point that are set together.
Fields = Mapping[str, FieldValue]


def _member_of(names: Iterable[str]) -> AfterValidator:
    """A validator of names that refuses others and lists those that there are."""

    def check(name: str) -> str:
        if name not in names:
            raise ValueError(f"should be one of {', '.join(names)}")
        return name

    return AfterValidator(check)


Text = Annotated[str, Field(min_length=1)]
ScheduleName = Annotated[str, _member_of(SCHEDULES)]
PlannerName = Annotated[str, _member_of(PLANNERS)]
Percent = Annotated[float, Field(ge=0)]
NoisePercent = Annotated[float, Field(ge=0, le=100)]
Milliseconds = Annotated[float, Field(ge=0, le=3.6e6)]
WaitingWatts = Annotated[float, Field(ge=0, le=1e5)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]


def _field_with_alias(name: str, alias: str) -> Any:
    """A field that a file may call by either name."""
    return Field(None, validation_alias=AliasChoices(name, alias))


def _column(name: str) -> Any:
    """A field that is another column of a table of results."""
    return Field(None, serialization_alias=name)


class Target(NamedTuple):
    """The target of a plan.

    Attributes:
        kind: its kind; "own": what a planner does by itself.
        value: s, percent, or what a limit counts in, by the kind; None for kinds without a number.
    """

    kind: str
    value: float | None


def _limit_field(option: LimitOption) -> tuple[Any, Any]:
    """Type and default of a point's field for a number of a limit."""
    assert option.sweep is not None
    scale = option.sweep.divisor / option.divisor
    min_number = option.quantity.least * scale
    max_number = min(option.quantity.most * scale, sys.float_info.max)
    number = Annotated[float, Field(ge=min_number, le=max_number)]
    default = None
    if option.sweep.column_suffix:
        default = _column(option.parameter + option.sweep.column_suffix)
    return number | None, default


class _Job(Model):
    """The job of a point, who plans it, and how late clocks come; Point says the rest."""

    profile: Text
    microbatches: Count | None = None
    schedule: ScheduleName | None = None
    chunks: Count | None = _field_with_alias("chunks", "vp")
    planner: PlannerName = "frontier"
    p2p_latency: Seconds | None = _column("p2p_latency_s")
    blocking_power: WaitingWatts | None = _column("blocking_power_w")
    gpus_per_stage: GpuCount | None = _field_with_alias("gpus_per_stage", "tp")
    cp: GpuCount | None = None
    replicas: GpuCount | None = _field_with_alias("replicas", "dp")
    recompute: bool = False
    extra: Text | None = None
    one_clock: bool = False
    parts_within: Percent | None = _column("parts_within_percent")
    switch_latency: Milliseconds | None = _column("switch_latency_ms")
    ask: Ask | None = None


if TYPE_CHECKING:

    class _LimitedJob(_Job):
        """A job with the numbers of limits."""

else:
    _limit_fields = {name: _limit_field(option) for name, option in _LIMIT_OPTIONS.items()}
    _LimitedJob = create_model("_LimitedJob", __base__=_Job, **_limit_fields)


class Point(_LimitedJob):
    """One plan to make.

    Attributes:
        profile: path, or the name of a built-in profile.
        microbatches: None: what the profile's sidecar says.
        schedule: None: what the sidecar says, else interleaved with chunks and 1f1b without.
        chunks: model chunks per stage; None: the fewest the schedule has.
        planner: its name.
        p2p_latency: s; None: what the profile's sidecar says.
        blocking_power: W; None: what the profile says, else 70.
        gpus_per_stage, cp, replicas: multiply energies (in a file also `tp` and `dp`); None: what
            the sidecar says.
        recompute: activations are recomputed.
        extra: operations beside forwards and backwards, as for `envplan solve --extra`.
        one_clock: every operation has one clock, though the profile splits some into parts.
        parts_within: percent, as for `envplan solve --parts-within`.
        switch_latency: ms; the plan keeps its target with such clocks.
        ask: "ahead" or "start", as for `envplan solve --ask`; None: ahead.
        noise: percent by which times vary when the plan is replayed; None: no such replay.
        slowdown: target, percent above T_min.
        target_time: target, s.
        min_energy: target: T_star. Without any target: T_min.
        seed: of that noise.

    Limits are fields, too, by the names of their options (LIMIT_OPTIONS), such as energy_budget,
    min_dwell and robust: those that ask for the fastest plan are targets.
    """

    noise: NoisePercent | None = _column("noise_percent")
    slowdown: Percent | None = None
    target_time: Seconds | None = None
    min_energy: bool = False
    seed: Seed = 0

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        contradiction = self._contradiction()
        if contradiction is not None:
            raise ValueError(f"has {contradiction}")
        return self

    def _contradiction(self) -> str | None:
        """Fields that do not go together, for an error; None where all do."""
        targets = self._target_fields()
        if len(targets) > 1:
            return f"both {targets[0]} and {targets[1]}: a point has one target"
        if targets and not PLANNERS[self.planner].takes_target:
            return f"{targets[0]}, but planner {self.planner} takes no target"
        only_of_frontier = [name for name in targets if name not in _TIME_TARGETS]
        only_of_frontier += [name for name in _CONDITIONS if getattr(self, name)]
        if only_of_frontier and self.planner != "frontier":
            return f"{only_of_frontier[0]}, which goes with planner frontier, not {self.planner}"
        if self.seed and self.noise is None:
            return "a seed, but no noise for it"
        return None

    @property
    def target(self) -> Target:
        """The target; without one T_min of our planner, and another planner's own choice."""
        fields = self._target_fields()
        if not fields:
            return Target("slowdown", 0.0) if self.planner == "frontier" else Target("own", None)
        name = fields[0]
        value = None if name == "min_energy" else getattr(self, name)
        return Target(TARGETS[name], value)

    def _target_fields(self) -> list[str]:
        """The fields of the targets that are set; 0 is set, None and False are not."""
        values = {name: getattr(self, name) for name in TARGETS}
        return [name for name, value in values.items() if value is not None and value is not False]

    def limit_options(self) -> dict[str, float]:
        """The numbers of its limits as keyword arguments of `Request.from_options`."""
        keywords = {}
        for name, option in _LIMIT_OPTIONS.items():
            number = getattr(self, name)
            if option.sweep is not None and number is not None:
                keywords[option.keyword] = number / option.sweep.divisor
        return keywords

    @property
    def frontier_key(self) -> tuple[object, ...]:
        """The values that points with one frontier have in common."""
        return tuple(self.model_dump(exclude=_NOT_OF_THE_FRONTIER).values())


#: Fields whose key in a grid may be their plural.
_WITH_PLURAL: Final = ("profile", "schedule", "planner", "seed", *TARGETS)
_FIELD_OF_PLURAL: Final = {f"{name}s": name for name in _WITH_PLURAL}
#: Keys of a grid that have another name than the field of a point.
_FIELD_OF_KEY: Final = {"vp": "chunks", "pp": "stages"} | _FIELD_OF_PLURAL
#: The axes of a grid from the one that varies slowest; then come all others.
_AXIS_ORDER: Final = ("profile", "microbatches", "schedule", "chunks", "planner", "target", "seed")


def _axes(grid: Mapping[str, FieldValue]) -> list[list[Fields]]:
    """The axes of a grid: for each the fields that it sets, one after the other.

    All targets are one axis.
    """
    values: dict[str, list[FieldValue]] = {}
    for key, value in grid.items():
        field = _FIELD_OF_KEY.get(key, key)
        values[field] = value if isinstance(value, list) else [value]
    _fill_in_stages(values)
    axes: dict[str, list[Fields]] = {}
    for name, choices in values.items():
        if choices and name not in TARGETS:
            axes[name] = [{name: value} for value in choices]
    # A grid without a target has the one choice of none.
    axes["target"] = _target_axis(values) or [{}]
    in_order = dict.fromkeys([*_AXIS_ORDER, *axes])
    return [axes[name] for name in in_order if name in axes]


def _fill_in_stages(values: dict[str, list[FieldValue]]) -> None:
    """Put each number of stages in the place for it in names of profiles."""
    names = [str(name) for name in values.get("profile", [])]
    if not any(_STAGES in name for name in names):
        return
    counts = values.pop("stages", [_STAGES])
    filled_names = [name.replace(_STAGES, str(count)) for name, count in product(names, counts)]
    values["profile"] = list(dict.fromkeys(filled_names))


def _target_axis(values: Mapping[str, list[FieldValue]]) -> list[Fields]:
    """The targets of a grid, kind by kind."""
    targets: list[Fields] = []
    for name in TARGETS:
        targets += [{name: value} for value in values.get(name, [])]
    return [target for target in targets if target != {"min_energy": False}]


def _points(axes: Iterable[Iterable[Fields]]) -> Iterator[Point]:
    """Every combination of the values of axes.

    Those of a planner that takes no target come once for each target, without it.

    Raises:
        InputError: a key or a value is wrong, or a combination does not go together.
    """
    for combination in product(*axes):
        fields: dict[str, Any] = {}
        for fields_of_axis in combination:
            fields.update(fields_of_axis)
        planner = PLANNERS.get(str(fields.get("planner")))
        if planner is not None and not planner.takes_target:
            for name in TARGETS:
                fields.pop(name, None)
        try:
            yield Point.of(**fields)
        except InputError as error:
            raise InputError(f"a point of grid: {error}") from None


class Sweep(Model):
    """The content of a sweep's file; errors call it a sweep."""

    grid: dict[str, Any] = Field({})
    points: list[Point] = Field([])


class SweepConfig(NamedTuple):
    """The points of a sweep.

    Attributes:
        points: to be made, in order, each once.
        folder: where paths of profiles start from.
    """

    points: tuple[Point, ...]
    folder: Path


def read_config(path: AnyPath) -> SweepConfig:
    """Read and check a sweep's file.

    Every combination of the lists in its table `grid` is a point, and each of its tables `points`
    is one more.

    Raises:
        InputError: it cannot be read, is not TOML (says line and column), a key is unknown, missing
            or wrong (names it), or there are no points, or more than a million.
    """
    tables = read_toml(path)
    with naming(path):
        file = Sweep.of(**tables)
        axes = _axes(file.grid) if file.grid else [[]]
        num_points = len(file.points) + math.prod(len(axis) for axis in axes)
        if not 1 <= num_points <= MAX_POINTS:
            raise InputError(
                f"asks for {num_points} points; a sweep has 1 to {MAX_POINTS}, from a table [grid] "
                "and tables [[points]]"
            )
        points = dict.fromkeys([*_points(axes), *file.points])
    return SweepConfig(tuple(points), Path(path).parent)
