"""The TOML file of a sweep, and the points it asks for."""

from __future__ import annotations

import math
import tomllib
from collections import ChainMap
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    AfterValidator,
    AliasChoices,
    Field,
    PrivateAttr,
    ValidationError,
    model_validator,
)

from envplan._documents import first_problem
from envplan._files import AnyPath, decoded, read_bounded
from envplan._model import Count, GpuCount, Joules, Model, Seconds
from envplan.errors import InputError
from envplan.pipeline import SCHEDULES
from envplan.pipeline.schedules import EXTRAS
from envplan.planners import PLANNERS

__all__ = ["Grid", "Point", "SweepConfig", "read_config"]

MAX_CONFIG_BYTES: Final = 16 * 2**20
MAX_POINTS: Final = 1_000_000

#: Where a name of a profile has the number of stages.
_STAGES: Final = "{stages}"

TargetKind = Literal[
    "slowdown", "time", "min-energy", "energy-budget", "power-cap", "peak-power-cap", "own"
]
#: Targets by the field of a point that says them, in the order of a grid, which has lists of all
#: but min_energy. The first are times, which other planners can be given, too.
TARGETS: Final[dict[str, TargetKind]] = {
    "slowdown": "slowdown",
    "target_time": "time",
    "min_energy": "min-energy",
    "energy_budget": "energy-budget",
    "power_cap": "power-cap",
    "peak_power_cap": "peak-power-cap",
}
_TIMELY: Final = ("slowdown", "target_time", "min_energy")
#: What clocks and times a plan can be made for, by our planner alone.
_CONDITIONS: Final = ("switch_latency", "min_dwell", "robust")
#: What points with one frontier may differ in.
_ABOVE_A_FRONTIER: Final = {*TARGETS, *_CONDITIONS, "planner", "noise", "seed"}


def _known_extras(names: str) -> str:
    for name in names.split(","):
        _one_of(name.strip().replace("-", "_"), EXTRAS)
    return names


def _one_of(name: str, known: Iterable[str]) -> str:
    if name not in known:
        raise ValueError(f"should be one of {', '.join(known)}")
    return name


Name = Annotated[str, Field(min_length=1)]
ScheduleName = Annotated[str, AfterValidator(lambda name: _one_of(name, SCHEDULES))]
PlannerName = Annotated[str, AfterValidator(lambda name: _one_of(name, PLANNERS))]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Watts = Annotated[float, Field(ge=0, le=1e5)]
Percent = Annotated[float, Field(ge=0)]
NoisePercent = Annotated[float, Field(ge=0, le=100)]
SurePercent = Annotated[float, Field(gt=0, le=99.9)]
Milliseconds = Annotated[float, Field(ge=0, le=3.6e6)]
AllWatts = Annotated[float, Field(ge=0, le=1e12)]
ExtraNames = Annotated[str, Field(min_length=1), AfterValidator(_known_extras)]


_NONE: Any = Field(default_factory=list)


def _named(name: str, other: str, **more: Any) -> Any:
    """A field that a file may call by either name."""
    return Field(None, validation_alias=AliasChoices(name, other), **more)


def _told(name: str) -> Any:
    """A field that a table of results calls so."""
    return Field(None, serialization_alias=name)


class _Job(Model):
    """What a point has one of, and all points of a grid share."""

    p2p_latency: Seconds | None = _told("p2p_latency_s")
    blocking_power: Watts | None = _told("blocking_power_w")
    gpus_per_stage: GpuCount | None = _named("gpus_per_stage", "tp")
    cp: GpuCount | None = None
    replicas: GpuCount | None = _named("replicas", "dp")
    recompute: bool = False
    extra: ExtraNames | None = None
    one_clock: bool = False
    parts_within: Percent | None = _told("parts_within_percent")
    switch_latency: Milliseconds | None = _told("switch_latency_ms")
    min_dwell: Milliseconds | None = _told("min_dwell_ms")
    robust: SurePercent | None = _told("robust_percent")
    noise: NoisePercent | None = _told("noise_percent")


class Point(_Job):
    """One plan to make.

    Attributes:
        profile: path, or the name of a built-in profile.
        microbatches: None: what the profile's sidecar says.
        schedule: None: what the sidecar says, else interleaved with chunks and 1f1b without.
        chunks: model chunks per stage; None: the fewest the schedule has.
        planner: its name.
        slowdown: target, percent above T_min.
        target_time: target, s.
        min_energy: target: T_star. Without any target: T_min.
        energy_budget: target, J per iteration over all GPUs.
        power_cap, peak_power_cap: target, W over all GPUs, on average or at every moment.
        p2p_latency: s; None: what the profile's sidecar says.
        blocking_power: W; None: what the profile says, else 70.
        gpus_per_stage, cp, replicas: multiply energies (in a file also `tp` and `dp`); None: what
            the sidecar says.
        recompute: activations are recomputed.
        extra: operations beside forwards and backwards, as for `envplan solve --extra`.
        one_clock: every operation has one clock, though the profile splits some into parts.
        parts_within: percent, as for `envplan solve --parts-within`.
        switch_latency, min_dwell: ms; the plan keeps its target with such clocks.
        robust: percent; the plan keeps its target with this probability, given the noise or the
            profile's own.
        noise: percent by which times vary when the plan is replayed; None: no such replay.
        seed: of that noise.
    """

    profile: Name
    microbatches: Count | None = None
    schedule: ScheduleName | None = None
    chunks: Count | None = _named("chunks", "vp")
    planner: PlannerName = "frontier"
    slowdown: Percent | None = None
    target_time: Seconds | None = None
    min_energy: bool = False
    energy_budget: Joules | None = None
    power_cap: AllWatts | None = None
    peak_power_cap: AllWatts | None = None
    seed: Seed = 0

    @model_validator(mode="after")
    def _has_one_target(self) -> Self:
        targets = list(self._targets())
        conditions = [name for name in _CONDITIONS if getattr(self, name)]
        ours = [name for name in (*targets, *conditions) if name not in _TIMELY]
        if len(targets) > 1:
            raise ValueError(f"has both {targets[0]} and {targets[1]}: a point has one target")
        if targets and not PLANNERS[self.planner].takes_target:
            raise ValueError(f"has {targets[0]}, but planner {self.planner} takes no target")
        if ours and self.planner != "frontier":
            raise ValueError(f"has {ours[0]}, which goes with planner frontier, not {self.planner}")
        if self.seed and self.noise is None:
            raise ValueError("has a seed, but no noise for it")
        return self

    @property
    def target(self) -> tuple[TargetKind, float | None]:
        """Kind and number: s, percent, J or W.

        Without a target ours is T_min, and "own" what another planner does by itself.
        """
        for name, value in self._targets().items():
            return TARGETS[name], None if value is True else value
        return ("slowdown", 0.0) if self.planner == "frontier" else ("own", None)

    def _targets(self) -> dict[str, Any]:
        """The targets that it has, by their fields."""
        known = {name: getattr(self, name) for name in TARGETS}
        return {
            name: value for name, value in known.items() if value is not None and value is not False
        }

    @property
    def frontier_key(self) -> tuple[object, ...]:
        """What points with one frontier have in common."""
        return tuple(self.model_dump(exclude=_ABOVE_A_FRONTIER).values())


class Grid(_Job):
    """Lists of which every combination is a point."""

    profiles: list[Name] = Field(min_length=1)
    stages: list[Count] | None = _named("stages", "pp", min_length=1)
    microbatches: list[Count] | None = Field(None, min_length=1)
    schedules: list[ScheduleName] | None = Field(None, min_length=1)
    chunks: list[Count] | None = _named("chunks", "vp", min_length=1)
    planners: list[PlannerName] = Field(["frontier"], min_length=1)
    slowdowns: list[Percent] = _NONE
    target_times: list[Seconds] = _NONE
    min_energy: bool = False
    energy_budgets: list[Joules] = _NONE
    power_caps: list[AllWatts] = _NONE
    peak_power_caps: list[AllWatts] = _NONE
    seeds: list[Seed] = Field([0], min_length=1)

    @model_validator(mode="after")
    def _stages_are_used(self) -> Self:
        used = any(_STAGES in profile for profile in self.profiles)
        if used != (self.stages is not None):
            raise ValueError(
                f"should have a list `stages` if and only if a name in `profiles` has {_STAGES} "
                "where it goes"
            )
        return self

    def _lists(self) -> list[list[dict[str, Any]]]:
        """What varies: for each thing its values, as fields of a point."""
        profiles = [
            profile.replace(_STAGES, str(count))
            for profile in self.profiles
            for count in (self.stages if self.stages and _STAGES in profile else [0])
        ]
        targets: list[dict[str, Any]] = []
        for name in TARGETS:
            values = [True] * self.min_energy if name == "min_energy" else getattr(self, f"{name}s")
            targets += [{name: value} for value in values]
        varied = {
            "profile": profiles,
            "microbatches": self.microbatches,
            "schedule": self.schedules,
            "chunks": self.chunks,
            "planner": self.planners,
        }
        lists = [
            [{name: value} for value in values or ()] or [{}] for name, values in varied.items()
        ]
        return [*lists, targets or [{}], [{"seed": seed} for seed in self.seeds]]

    def size(self) -> int:
        """How many points there are, at most."""
        return math.prod(map(len, self._lists()))

    def points(self) -> Iterator[Point]:
        """Every combination, the last lists varying fastest.

        Those of a planner that takes no target come once for each target, without it.

        Raises:
            InputError: what is combined does not go together.
        """
        shared = {name: getattr(self, name) for name in _Job.model_fields}
        for *chosen, target, seed in product(*self._lists()):
            fields: dict[str, Any] = dict(ChainMap(*chosen, seed, shared))
            if PLANNERS[fields["planner"]].takes_target:
                fields |= target
            try:
                yield Point(**fields)
            except ValidationError as error:
                problem = first_problem(error, "sweep")
                raise InputError(f"a point of grid {problem}") from None


class SweepConfig(Model):
    """What a sweep's file says.

    Attributes:
        grid: lists of which every combination is a point.
        points: further points, one by one.
    """

    grid: Grid | None = None
    points: list[Point] = _NONE
    _folder: Path = PrivateAttr(default=Path())

    @property
    def folder(self) -> Path:
        """Where paths of profiles start from."""
        return self._folder

    def all_points(self) -> list[Point]:
        """The points in order, each once.

        Raises:
            InputError: there are none, or more than a million.
        """
        size = len(self.points) + (self.grid.size() if self.grid else 0)
        if not 1 <= size <= MAX_POINTS:
            raise InputError(
                f"asks for {size} points; a sweep has 1 to {MAX_POINTS}, from a table [grid] and "
                "tables [[points]]"
            )
        return list(dict.fromkeys([*(self.grid.points() if self.grid else ()), *self.points]))


def read_config(path: AnyPath) -> SweepConfig:
    """Read and check a sweep's file.

    Raises:
        InputError: it cannot be read, is not TOML (says line and column), or a key is unknown,
            missing or wrong (names it).
    """
    text = decoded(read_bounded(path, MAX_CONFIG_BYTES), path)
    try:
        config = SweepConfig.model_validate(tomllib.loads(text))
        config.all_points()
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(f"is not valid TOML: {error}", path=path) from None
    except ValidationError as error:
        raise InputError(first_problem(error, "sweep"), path=path) from None
    except InputError as error:
        raise InputError(error.message, path=path) from None
    config._folder = Path(path).parent
    return config
