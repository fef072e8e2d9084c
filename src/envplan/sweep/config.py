"""The TOML file of a sweep, and the points it asks for."""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Iterable, Iterator, Sequence, Sized
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, cast

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from envplan._documents import first_problem
from envplan._files import decoded, read_bounded
from envplan.errors import InputError
from envplan.pipeline import SCHEDULES
from envplan.pipeline.extras import EXTRAS
from envplan.planners import PLANNERS

__all__ = ["Grid", "Point", "SweepConfig", "read_config"]

MAX_CONFIG_BYTES: Final = 16 * 2**20
MAX_POINTS: Final = 1_000_000

#: Where a name of a profile has the number of stages.
_STAGES: Final = "{stages}"

TargetKind = Literal[
    "time", "slowdown", "min-energy", "energy-budget", "power-cap", "peak-power-cap", "own"
]
#: Targets of a time, which other planners and slow clocks can be given, and all kinds.
_TIMELY: Final = ("slowdown", "target_time", "min_energy")
_TARGETS: Final = (*_TIMELY, "energy_budget", "power_cap", "peak_power_cap")
_CONDITIONS: Final = ("switch_latency", "min_dwell", "robust")


def _known_schedule(name: str) -> str:
    return _one_of(name, SCHEDULES)


def _known_planner(name: str) -> str:
    return _one_of(name, PLANNERS)


def _known_extras(names: str) -> str:
    for name in names.split(","):
        _one_of(name.strip().replace("-", "_"), EXTRAS)
    return names


def _one_of(name: str, known: Iterable[str]) -> str:
    names = list(known)
    if name not in names:
        listed = ", ".join(names)
        raise PydanticCustomError("unknown", "should be one of {names}", {"names": listed})
    return name


Name = Annotated[str, Field(min_length=1)]
ScheduleName = Annotated[str, AfterValidator(_known_schedule)]
PlannerName = Annotated[str, AfterValidator(_known_planner)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
GpuCount = Annotated[int, Field(ge=1, le=10**6)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Seconds = Annotated[float, Field(ge=0)]
Watts = Annotated[float, Field(ge=0, le=1e5)]
Percent = Annotated[float, Field(ge=0)]
NoisePercent = Annotated[float, Field(ge=0, le=100)]
SurePercent = Annotated[float, Field(gt=0, le=99.9)]
Milliseconds = Annotated[float, Field(ge=0, le=3.6e6)]
Joules = Annotated[float, Field(ge=0)]
AllWatts = Annotated[float, Field(ge=0, le=1e12)]
ExtraNames = Annotated[str, Field(min_length=1), AfterValidator(_known_extras)]


def _named(name: str, other: str) -> Any:
    """A field that a file may call by either name."""
    return Field(None, validation_alias=AliasChoices(name, other))


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class _Job(_Model):
    """What a point has one of, and all points of a grid share."""

    p2p_latency: Seconds | None = None
    blocking_power: Watts | None = None
    gpus_per_stage: GpuCount | None = _named("gpus_per_stage", "tp")
    cp: GpuCount | None = None
    replicas: GpuCount | None = _named("replicas", "dp")
    recompute: bool = False
    extra: ExtraNames | None = None
    one_clock: bool = False
    parts_within: Percent | None = None
    switch_latency: Milliseconds | None = None
    min_dwell: Milliseconds | None = None
    robust: SurePercent | None = None
    noise: NoisePercent | None = None

    @property
    def condition(self) -> str | None:
        """The first given of what clocks and times are planned for; None without any."""
        return next((name for name in _CONDITIONS if getattr(self, name) is not None), None)

    def refuse_together(self, planners: Iterable[str], targets: Iterable[str]) -> None:
        """Raises: PydanticCustomError: a planner or a target does not go with the rest."""
        planners, targets = list(planners), list(targets)
        ours = self.condition or next((name for name in targets if name not in _TIMELY), None)
        other = next((name for name in planners if name != "frontier"), None)
        if ours is not None and other is not None:
            raise PydanticCustomError(
                "planner",
                "has {one}, which goes with planner frontier, not {other}",
                _pair([ours, other]),
            )


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
        given = [name for name in _TARGETS if getattr(self, name) not in (None, False)]
        if len(given) > 1:
            raise PydanticCustomError(
                "targets", "has both {one} and {other}: a point has one target", _pair(given)
            )
        if given and not PLANNERS[self.planner].takes_target:
            raise PydanticCustomError(
                "target",
                "has {one}, but planner {other} takes no target",
                _pair([given[0], self.planner]),
            )
        self.refuse_together([self.planner], given)
        if self.seed and self.noise is None:
            raise PydanticCustomError("seed", "has a seed, but no noise for it")
        return self

    @property
    def target(self) -> tuple[TargetKind, float | None]:
        """Kind and number: s, percent, J or W.

        Without a target ours is T_min, and "own" what another planner does by itself.
        """
        if self.target_time is not None:
            return "time", self.target_time
        if self.min_energy:
            return "min-energy", None
        for kind, value in (
            ("energy-budget", self.energy_budget),
            ("power-cap", self.power_cap),
            ("peak-power-cap", self.peak_power_cap),
        ):
            if value is not None:
                return cast(TargetKind, kind), value
        if self.slowdown is None and self.planner != "frontier":
            return "own", None
        return "slowdown", self.slowdown or 0.0


def _pair(names: list[str]) -> dict[str, str]:
    return {"one": names[0], "other": names[1]}


class Grid(_Job):
    """Lists of which every combination is a point."""

    profiles: list[Name] = Field(min_length=1)
    stages: list[Count] | None = Field(
        None, min_length=1, validation_alias=AliasChoices("stages", "pp")
    )
    microbatches: list[Count] | None = Field(None, min_length=1)
    schedules: list[ScheduleName] | None = Field(None, min_length=1)
    chunks: list[Count] | None = Field(
        None, min_length=1, validation_alias=AliasChoices("chunks", "vp")
    )
    planners: list[PlannerName] = Field(["frontier"], min_length=1)
    slowdowns: list[Percent] = []
    target_times: list[Seconds] = []
    min_energy: bool = False
    energy_budgets: list[Joules] = []
    power_caps: list[AllWatts] = []
    peak_power_caps: list[AllWatts] = []
    seeds: list[Seed] = Field([0], min_length=1)

    @model_validator(mode="after")
    def _stages_are_used(self) -> Self:
        used = any(_STAGES in profile for profile in self.profiles)
        if used != (self.stages is not None):
            raise PydanticCustomError(
                "stages",
                "should have a list `stages` if and only if a name in `profiles` has {stages} "
                "where it goes",
                {"stages": _STAGES},
            )
        if self.noise is None and len(self.seeds) > 1:
            raise PydanticCustomError("seeds", "has several seeds, but no noise for them")
        self.refuse_together(self.planners, [name for one in self._targets() for name in one])
        return self

    def size(self) -> int:
        """How many points there are, at most."""
        lists: tuple[Sized | None, ...] = (
            self.profiles,
            self.stages,
            self.microbatches,
            self.schedules,
            self.chunks,
            self.planners,
            self._targets(),
            self.seeds,
        )
        return math.prod(len(one) for one in lists if one)

    def points(self) -> Iterator[Point]:
        """Every combination once, the last lists varying fastest."""
        shared = {name: getattr(self, name) for name in _Job.model_fields}
        microbatch_counts: Sequence[int | None] = self.microbatches or [None]
        schedules: Sequence[str | None] = self.schedules or [None]
        chunk_counts: Sequence[int | None] = self.chunks or [None]
        for profile, microbatches, schedule, chunks, planner in product(
            self._profiles(), microbatch_counts, schedules, chunk_counts, self.planners
        ):
            takes_target = PLANNERS[planner].takes_target
            for target, seed in product((takes_target and self._targets()) or [{}], self.seeds):
                yield Point.model_validate(
                    {
                        **shared,
                        "profile": profile,
                        "microbatches": microbatches,
                        "schedule": schedule,
                        "chunks": chunks,
                        "planner": planner,
                        "seed": seed,
                        **target,
                    }
                )

    def _profiles(self) -> Iterator[str]:
        for profile in self.profiles:
            if _STAGES in profile:
                yield from (profile.replace(_STAGES, str(n)) for n in self.stages or [])
            else:
                yield profile

    def _targets(self) -> list[dict[str, float | bool]]:
        targets: list[dict[str, float | bool]] = []
        targets += ({"slowdown": percent} for percent in self.slowdowns)
        targets += ({"target_time": seconds} for seconds in self.target_times)
        targets += [{"min_energy": True}] if self.min_energy else []
        targets += ({"energy_budget": joules} for joules in self.energy_budgets)
        targets += ({"power_cap": watts} for watts in self.power_caps)
        targets += ({"peak_power_cap": watts} for watts in self.peak_power_caps)
        return targets


class SweepConfig(_Model):
    """What a sweep's file says.

    Attributes:
        grid: lists of which every combination is a point.
        points: further points, one by one.
    """

    grid: Grid | None = None
    points: list[Point] = []
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


def read_config(path: str | os.PathLike[str]) -> SweepConfig:
    """Read and check a sweep's file.

    Raises:
        InputError: it cannot be read, is not TOML (says line and column), or a key is unknown,
            missing or wrong (names it).
    """
    text = decoded(read_bounded(path, MAX_CONFIG_BYTES), path)
    try:
        config = SweepConfig.model_validate(tomllib.loads(text))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(f"is not valid TOML: {error}", path=path) from None
    except ValidationError as error:
        raise InputError(_problem(error), path=path) from None
    config._folder = Path(path).parent
    try:
        config.all_points()
    except InputError as error:
        raise InputError(error.message, path=path) from None
    return config


def _problem(error: ValidationError) -> str:
    """As for other files; a complaint about a whole table does not show the table."""
    first = error.errors(include_url=False)[0]
    if not isinstance(first["input"], dict) or first["type"] in ("missing", "extra_forbidden"):
        return first_problem(error, "sweep")
    where = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"])
    return f"{where.removeprefix('.')} {first['msg']}"
