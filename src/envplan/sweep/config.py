"""The TOML file of a sweep, and the points it asks for."""

from __future__ import annotations

import math
import sys
import tomllib
from collections import ChainMap
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, Self

from pydantic import AfterValidator, AliasChoices, Field, create_model, model_validator

from envplan._io.documents import Count, GpuCount, Model, Seconds
from envplan._io.files import AnyPath, decoded, read_bounded
from envplan.errors import InputError, naming
from envplan.pipeline import SCHEDULES
from envplan.planners import PLANNERS
from envplan.request.limits import LIMIT_OPTIONS, LIMITS, LimitOption

__all__ = ["Point", "SweepConfig", "read_config"]

MAX_CONFIG_BYTES: Final = 16 * 2**20
MAX_POINTS: Final = 1_000_000

#: Where a name of a profile has the number of stages.
_STAGES: Final = "{stages}"

#: Numbers of limits that a point may have.
_LIMIT_OPTIONS: Final = tuple(option for option in LIMIT_OPTIONS if option.sweep is not None)
#: Those that are targets: the fastest plan that keeps a limit.
LIMIT_TARGETS: Final = {
    limit.options[0].parameter: limit.options[0]
    for limit in reversed(LIMITS)
    if limit.stated_as is not None
}
_TIMES: Final = {"slowdown": "slowdown", "target_time": "time", "min_energy": "min-energy"}
#: Kinds of targets by the field of a point that says them, in the order of a grid, which has lists
#: of all but min_energy. The first are times, which other planners can be given, too.
TARGETS: Final[dict[str, str]] = _TIMES | {
    name: option.flag for name, option in LIMIT_TARGETS.items()
}
#: What clocks and times a plan can be made for, by our planner alone.
_CONDITIONS: Final = (
    "switch_latency",
    *(one.parameter for one in _LIMIT_OPTIONS if one.parameter not in LIMIT_TARGETS),
)
#: What points with one frontier may differ in.
_ABOVE_A_FRONTIER: Final = {*TARGETS, *_CONDITIONS, "planner", "noise", "seed"}


def _one_of(known: Iterable[str]) -> AfterValidator:
    def check(name: str) -> str:
        if name not in known:
            raise ValueError(f"should be one of {', '.join(known)}")
        return name

    return AfterValidator(check)


Percent = Annotated[float, Field(ge=0)]
Milliseconds = Annotated[float, Field(ge=0, le=3.6e6)]


def _named(name: str, other: str) -> Any:
    """A field that a file may call by either name."""
    return Field(None, validation_alias=AliasChoices(name, other))


def _told(name: str) -> Any:
    """A field that a table of results calls so."""
    return Field(None, serialization_alias=name)


def _limit_field(option: LimitOption) -> tuple[Any, Any]:
    """Type and default of a point's field for a number of a limit."""
    assert option.sweep is not None
    scale = option.sweep.divisor / option.divisor
    least, most = option.quantity.least * scale, option.quantity.most * scale
    number = Annotated[float, Field(ge=least, le=min(most, sys.float_info.max))]
    suffix = option.sweep.column_suffix
    default = _told(option.parameter + suffix) if suffix else None
    return number | None, default


class _Job(Model):
    """The job of a point, who plans it, and how late clocks come; Point says the rest."""

    profile: Annotated[str, Field(min_length=1)]
    microbatches: Count | None = None
    schedule: Annotated[str, _one_of(SCHEDULES)] | None = None
    chunks: Count | None = _named("chunks", "vp")
    planner: Annotated[str, _one_of(PLANNERS)] = "frontier"
    p2p_latency: Seconds | None = _told("p2p_latency_s")
    blocking_power: Annotated[float, Field(ge=0, le=1e5)] | None = _told("blocking_power_w")
    gpus_per_stage: GpuCount | None = _named("gpus_per_stage", "tp")
    cp: GpuCount | None = None
    replicas: GpuCount | None = _named("replicas", "dp")
    recompute: bool = False
    extra: Annotated[str, Field(min_length=1)] | None = None
    one_clock: bool = False
    parts_within: Percent | None = _told("parts_within_percent")
    switch_latency: Milliseconds | None = _told("switch_latency_ms")


if TYPE_CHECKING:

    class _LimitedJob(_Job):
        """A job with the numbers of limits."""

else:
    _LimitedJob = create_model(
        "_LimitedJob",
        __base__=_Job,
        **{option.parameter: _limit_field(option) for option in _LIMIT_OPTIONS},
    )


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
        noise: percent by which times vary when the plan is replayed; None: no such replay.
        slowdown: target, percent above T_min.
        target_time: target, s.
        min_energy: target: T_star. Without any target: T_min.
        seed: of that noise.

    It also has a field for each number of a limit that a sweep can give (LIMIT_OPTIONS), such as
    energy_budget, min_dwell and robust: those that ask for the fastest plan are targets.
    """

    noise: Annotated[float, Field(ge=0, le=100)] | None = _told("noise_percent")
    slowdown: Percent | None = None
    target_time: Seconds | None = None
    min_energy: bool = False
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        targets = self._targets()
        ours = [name for name in targets if name not in _TIMES]
        ours += [name for name in _CONDITIONS if getattr(self, name)]
        wrong = ""
        if len(targets) > 1:
            wrong = f"both {targets[0]} and {targets[1]}: a point has one target"
        elif targets and not PLANNERS[self.planner].takes_target:
            wrong = f"{targets[0]}, but planner {self.planner} takes no target"
        elif ours and self.planner != "frontier":
            wrong = f"{ours[0]}, which goes with planner frontier, not {self.planner}"
        elif self.seed and self.noise is None:
            wrong = "a seed, but no noise for it"
        if wrong:
            raise ValueError(f"has {wrong}")
        return self

    @property
    def target(self) -> tuple[str, float | None]:
        """Kind and number: s, percent, or what a limit counts in.

        Without a target ours is T_min, and "own" what another planner does by itself.
        """
        for name in self._targets():
            return TARGETS[name], None if name == "min_energy" else getattr(self, name)
        return ("slowdown", 0.0) if self.planner == "frontier" else ("own", None)

    def _targets(self) -> list[str]:
        """The fields of the targets that it has."""
        none = (None, False)
        return [name for name in TARGETS if all(getattr(self, name) is not one for one in none)]

    def limit_options(self) -> dict[str, float]:
        """The numbers of its limits as keyword arguments of `Request.from_options`."""
        options = {}
        for option in _LIMIT_OPTIONS:
            number = getattr(self, option.parameter)
            if option.sweep is not None and number is not None:
                options[option.keyword] = number / option.sweep.divisor
        return options

    @property
    def frontier_key(self) -> tuple[object, ...]:
        """What points with one frontier have in common."""
        return tuple(self.model_dump(exclude=_ABOVE_A_FRONTIER).values())


#: What a grid calls the values of a field, where that is another name.
_SINGULAR: Final = {"vp": "chunks", "pp": "stages"} | {
    f"{name}s": name for name in ("profile", "schedule", "planner", "seed", *TARGETS)
}
#: What varies, the last fastest; then the seed, and all else.
_ORDER: Final = ("profile", "microbatches", "schedule", "chunks", "planner", "target", "seed")


def _axes(grid: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """For each key of a grid its values, as fields of points; all targets are one axis."""
    lists = {
        _SINGULAR.get(key, key): value if isinstance(value, list) else [value]
        for key, value in grid.items()
    }
    names = list(map(str, lists.get("profile", [])))
    if any(_STAGES in name for name in names):
        counts = lists.pop("stages", [_STAGES])
        filled = (name.replace(_STAGES, str(count)) for name in names for count in counts)
        lists["profile"] = list(dict.fromkeys(filled))
    axes = {name: [{name: value} for value in values] for name, values in lists.items() if values}
    targets = [one for name in TARGETS for one in axes.pop(name, [])]
    axes["target"] = [one for one in targets if one != {"min_energy": False}]
    return [axes[name] or [{}] for name in dict.fromkeys(_ORDER) | axes if name in axes]


def _points(axes: list[list[dict[str, Any]]]) -> Iterator[Point]:
    """Every combination. Those of a planner that takes no target come once for each target, without
    it.

    Raises:
        InputError: a key or a value is wrong, or what is combined does not go together.
    """
    for chosen in product(*axes):
        fields = dict(ChainMap(*chosen))
        planner = PLANNERS.get(str(fields.get("planner")))
        if planner is not None and not planner.takes_target:
            fields = {name: value for name, value in fields.items() if name not in TARGETS}
        try:
            yield Point.of(**fields)
        except InputError as error:
            raise InputError(f"a point of grid: {error}") from None


class Sweep(Model):
    """The file itself."""

    grid: dict[str, Any] = Field({})
    points: list[Point] = Field([])


class SweepConfig(NamedTuple):
    """What a sweep's file says.

    Attributes:
        points: to be made, in order, each once.
        folder: where paths of profiles start from.
    """

    points: tuple[Point, ...]
    folder: Path


def read_config(path: AnyPath) -> SweepConfig:
    """Read and check a sweep's file: every combination of the lists in its table `grid` is a point,
    and each of its tables `points` is one more.

    Raises:
        InputError: it cannot be read, is not TOML (says line and column), a key is unknown, missing
            or wrong (names it), or there are no points, or more than a million.
    """
    text = decoded(read_bounded(path, MAX_CONFIG_BYTES), path)
    with naming(path):
        try:
            file = Sweep.of(**tomllib.loads(text))
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise InputError(f"is not valid TOML: {error}") from None
        axes = _axes(file.grid) if file.grid else [[]]
        size = len(file.points) + math.prod(map(len, axes))
        if not 1 <= size <= MAX_POINTS:
            raise InputError(
                f"asks for {size} points; a sweep has 1 to {MAX_POINTS}, from a table [grid] and "
                "tables [[points]]"
            )
        points = dict.fromkeys([*_points(axes), *file.points])
    return SweepConfig(tuple(points), Path(path).parent)
