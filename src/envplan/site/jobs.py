"""The jobs of a site: their frontiers, and what each may lose.

A site's file is TOML with a table for each job:

    [[jobs]]
    name = "chat-70b"
    frontier = "chat.frontier.json"      # of `envplan frontier -o`; or a profile:
    profile = "h100-gpt3-175b-8stage"    # with microbatches, schedule, tp, dp as in a sweep
    replicas = 4                         # data-parallel replicas; default: as traced
    freqplan = "chat.freqplan.json"      # that it trains by (envplan apply); for orders
    log = "chat.jsonl"                   # its run log; default: beside the frequency plan
    weight = 2.0                         # default: 1; or money = 0.8, of an iteration
    flexible = "25%"                     # of its throughput it may lose; default: no limit
    may_pause = true                     # default: false
    iterations = 5000                    # that it must have made
    by = "8h"                            # by this time

Instead of a file, a folder of frontier files is a site whose jobs all count alike. NAME.json is
then a job's frontier, and NAME.freqplan.json, where there is one, its frequency plan.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Final, Self

import numpy as np
from pydantic import AliasChoices, BeforeValidator, Field, model_validator

from envplan._io.documents import MAX_DOCUMENT_BYTES, Count, GpuCount, Model
from envplan._io.files import AnyPath, exists, parse_json, read_bounded
from envplan._io.markup import read_toml
from envplan.enforce.freqplan import FrequencyPlan
from envplan.errors import InputError, naming
from envplan.plan import Rung
from envplan.plan.frontier_file import (
    FRONTIER_SCHEMA,
    FrontierFile,
    StoredPlan,
    distinct,
    less_powerful,
)
from envplan.planners.job import JobSpec
from envplan.profile import Profile
from envplan.quantities import PERCENT, TIME
from envplan.runtime.run_log_file import log_beside
from envplan.site.curve import OperatingPoint, PowerCurve
from envplan.site.ladder import JobLadder

__all__ = ["SiteJob", "frontier_sha256", "read_frontier", "read_jobs", "read_ladder"]

MAX_JOBS: Final = 10_000
#: Plans along the frontier of a job that is given by its profile.
_NUM_PLANS: Final = 33
_FREQPLAN_SUFFIX: Final = ".freqplan.json"


def _fraction(value: object) -> object:
    """The fraction that a percentage such as "25%" gives; a number is a fraction already."""
    if not isinstance(value, str):
        return value
    return PERCENT.within(0, 100).parse(value, "flexible") / 100


def _seconds(value: object) -> object:
    """The seconds that a time such as "8h" gives."""
    return TIME.parse(value, "by") if isinstance(value, str) else value


class JobEntry(Model):
    """A table of a site's file, as it is written."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    frontier: str | None = None
    profile: str | None = None
    microbatches: Count | None = None
    schedule: str | None = None
    chunks: Count | None = Field(None, validation_alias=AliasChoices("chunks", "vp"))
    gpus_per_stage: GpuCount | None = Field(
        None, validation_alias=AliasChoices("gpus_per_stage", "tp")
    )
    replicas: GpuCount | None = Field(None, validation_alias=AliasChoices("replicas", "dp"))
    freqplan: str | None = None
    log: str | None = None
    weight: Annotated[float, Field(gt=0, le=1e9)] | None = None
    money: Annotated[float, Field(gt=0, le=1e12)] | None = None
    flexible: Annotated[float, Field(ge=0, le=1), BeforeValidator(_fraction)] = 1.0
    may_pause: bool = False
    iterations: Count | None = None
    by: Annotated[float, Field(gt=0, le=1e9), BeforeValidator(_seconds)] | None = None

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        contradiction = self._contradiction()
        if contradiction is not None:
            raise ValueError(contradiction)
        return self

    def _contradiction(self) -> str | None:
        """Keys that do not go together, for an error; None where all do."""
        if (self.frontier is None) == (self.profile is None):
            return "needs either a frontier or a profile"
        if self.weight is not None and self.money is not None:
            return "has both a weight and money: a job has one value"
        if (self.iterations is None) != (self.by is None):
            return "needs both iterations and by, or neither: they are its deadline"
        if self.log is not None and self.freqplan is None:
            return "has a run log and no frequency plan"
        if self.frontier is not None:
            for key in ("microbatches", "schedule", "chunks", "gpus_per_stage"):
                if getattr(self, key) is not None:
                    return f"has {key}, which its frontier says already; leave it out"
        return None


class SiteFile(Model):
    """A site's file, as it is written."""

    jobs: list[JobEntry] = Field(min_length=1, max_length=MAX_JOBS)


@dataclass(frozen=True, eq=False)
class SiteJob:
    """A job that shares a site's power with others.

    Attributes:
        name: for people; no two jobs of a site have the same.
        frontier: its frontier and the plans along it.
        source: where its frontier was read; None where it was traced from a profile.
        sha256: of the frontier's file.
        replicas: data-parallel replicas; the frontier's energies are scaled to them.
        ladder: what it can change between while it runs; None: the plans of its frontier.
        run_log: that its ranks write; None where it has no frequency plan.
        weight: value of its relative throughput; ignored where money counts.
        money: value of an iteration, currency units; None: relative throughput counts.
        flexible: share of its throughput that it may lose, 0 to 1.
        may_pause: it may stand still for a part of the time.
        iterations, by_s: it must have made so many by this time, s; None: no deadline.
    """

    name: str
    frontier: FrontierFile
    source: Path | None = None
    sha256: str = ""
    replicas: int = 1
    ladder: JobLadder | None = None
    run_log: Path | None = None
    weight: float = 1.0
    money: float | None = None
    flexible: float = 1.0
    may_pause: bool = False
    iterations: int | None = None
    by_s: float | None = None

    @property
    def scale(self) -> float:
        """Energy of the job over that of its frontier, which was traced for other replicas."""
        return self.replicas / self.frontier.job.replicas

    @property
    def num_gpus(self) -> int:
        """GPUs of all stages and replicas."""
        job = self.frontier.job
        return job.stages * job.gpus_per_stage * self.replicas

    @property
    def num_gpus_of_stage(self) -> int:
        """GPUs of one stage, in all replicas."""
        return self.frontier.job.gpus_per_stage * self.replicas

    @property
    def waiting_w(self) -> float:
        """The power of all its GPUs while it pauses, W."""
        job = self.frontier.job
        return sum(job.blocking_power_w) * job.gpus_per_stage * self.replicas

    @property
    def full_throughput(self) -> float:
        """Iterations a second at T_min."""
        return 1 / self.frontier.t_min_s

    @property
    def value_per_iteration(self) -> float:
        """The value of an iteration: money, or its weight's share of full throughput."""
        return self.weight / self.full_throughput if self.money is None else self.money

    @cached_property
    def least_throughput(self) -> float:
        """Iterations a second that it keeps whatever the budget is.

        A job that trains by slower plans than that keeps the throughput of the fastest of them.
        """
        least = (1 - self.flexible) * self.full_throughput
        return least if self.ladder is None else min(least, self.fastest_throughput)

    @property
    def fastest_throughput(self) -> float:
        """Iterations a second of the fastest plan that it can follow."""
        return max(point.throughput for point in self.plan_points())

    @cached_property
    def relaxed_curve(self) -> PowerCurve:
        """The least power at each throughput: no plan undercuts it.

        Where the frontier ends at T_star, slower plans are bounded by T_star's energy, the least of
        all: by the line from standing still at no power.
        """
        file = self.frontier
        parts = [file.breakpoints]
        if file.slower is not None:
            parts.append(file.slower.breakpoints)
        time_s = np.concatenate([part.iteration_time_s for part in parts])
        energy_j = np.concatenate([part.energy_j for part in parts])
        # T_star stands in both parts.
        ascending = np.append(True, np.diff(time_s) > 0)
        curve = PowerCurve.of_frontier(time_s[ascending], energy_j[ascending] * self.scale)
        if file.slower is None:
            curve = curve.with_pause(0.0)
        elif self.may_pause:
            curve = curve.with_pause(self.waiting_w)
        return curve.from_throughput(self.least_throughput)

    @cached_property
    def plans(self) -> Sequence[Rung | StoredPlan]:
        """The plans that it can follow, by ascending time.

        They are the plan and the rungs that it trains by, if these are known; else the plans of its
        frontier, those beyond T_star included.
        """
        if self.ladder is not None:
            return self.ladder.rungs
        if self.frontier.slower is None:
            return list(self.frontier.plans)
        return [*self.frontier.plans, *self.frontier.slower.plans]

    def plan_points(self) -> list[OperatingPoint]:
        """Throughput and power of each of its plans, in their order."""
        scale = self.scale if self.ladder is None else 1.0
        return [
            OperatingPoint(1 / plan.iteration_time_s, plan.energy_j * scale / plan.iteration_time_s)
            for plan in self.plans
        ]

    def pause(self) -> list[OperatingPoint]:
        """The point at which it stands still, if it may."""
        return [OperatingPoint(0.0, self.waiting_w)] if self.may_pause else []


def read_jobs(path: AnyPath, progress: Callable[[int, int], None] | None = None) -> list[SiteJob]:
    """Read the jobs of a site: a TOML file, or a folder of frontier files.

    Args:
        path: of the file or folder.
        progress: called with (jobs read, jobs in all).

    Raises:
        InputError: it is neither, a table is wrong (names it), two jobs have one name, some jobs
            have money as their value and others have not, or a frontier or profile cannot be read.
    """
    if Path(path).is_dir():
        return _jobs_of_folder(Path(path), progress)
    entries = _read_entries(path)
    jobs = []
    for number, entry in enumerate(entries, start=1):
        with naming(path):
            jobs.append(_job_of_entry(entry, Path(path).parent))
        if progress is not None:
            progress(number, len(entries))
    return jobs


def _jobs_of_folder(folder: Path, progress: Callable[[int, int], None] | None) -> list[SiteJob]:
    """A job for every frontier file of a folder, by name; other JSON files are left alone."""
    files = [
        path for path in sorted(folder.glob("*.json")) if not path.name.endswith(_FREQPLAN_SUFFIX)
    ]
    jobs = []
    for number, path in enumerate(files, start=1):
        content = _Content.read(path)
        if content.is_frontier:
            name = path.name.removesuffix(".json")
            job = _job_of_frontier(name, content, replicas=None)
            freqplan = path.with_name(f"{name}{_FREQPLAN_SUFFIX}")
            if freqplan.exists():
                job = _with_ladder(job, freqplan, log=None, stated_replicas=None)
            jobs.append(job)
        if progress is not None:
            progress(number, len(files))
    if not jobs:
        raise InputError("holds no frontier files (envplan frontier -o NAME.json)", path=folder)
    return jobs


@dataclass(frozen=True)
class _Content:
    """A JSON file, read once.

    Attributes:
        path: where it was read.
        document: its JSON value.
        sha256: of its content.
    """

    path: Path
    document: object
    sha256: str

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file.

        Raises:
            InputError: it cannot be read, or is not JSON.
        """
        data = read_bounded(path, MAX_DOCUMENT_BYTES)
        return cls(path, parse_json(data, path), hashlib.sha256(data).hexdigest())

    @property
    def is_frontier(self) -> bool:
        """Whether it says that it is a frontier."""
        return isinstance(self.document, dict) and self.document.get("schema") == FRONTIER_SCHEMA

    def as_frontier(self) -> FrontierFile:
        """The frontier.

        Raises:
            InputError: it is none.
        """
        return FrontierFile.from_document(self.document, path=self.path)


def _read_entries(path: AnyPath) -> list[JobEntry]:
    """The tables of a site's file.

    Raises:
        InputError: it cannot be read, is no TOML, or its tables do not go together.
    """
    tables = read_toml(path)
    with naming(path):
        entries = SiteFile.of(**tables).jobs
        uses_of_names = Counter(entry.name for entry in entries)
        for name, num_uses in uses_of_names.items():
            if num_uses > 1:
                raise InputError(f"two jobs are called {name}")
        valued_in_money = [entry for entry in entries if entry.money is not None]
        if 0 < len(valued_in_money) < len(entries):
            raise InputError(
                f"job {valued_in_money[0].name} has money as its value and others have not; give "
                "it for all jobs, or weights"
            )
    return entries


def _job_of_entry(entry: JobEntry, folder: Path) -> SiteJob:
    """The job of a table; paths start from the file's folder."""
    if entry.frontier is not None:
        path = folder / entry.frontier
        job = _job_of_frontier(entry.name, _Content.read(path), entry.replicas)
    else:
        frontier = _trace_profile(entry, folder)
        job = SiteJob(entry.name, frontier, replicas=frontier.job.replicas)
    if entry.freqplan is not None:
        log = None if entry.log is None else folder / entry.log
        job = _with_ladder(job, folder / entry.freqplan, log, entry.replicas)
    return replace(
        job,
        weight=1.0 if entry.weight is None else entry.weight,
        money=entry.money,
        flexible=entry.flexible,
        may_pause=entry.may_pause,
        iterations=entry.iterations,
        by_s=entry.by,
    )


def _job_of_frontier(name: str, content: _Content, replicas: int | None) -> SiteJob:
    """The job of a frontier file, with as many replicas as it was traced for or as given."""
    frontier = content.as_frontier()
    return SiteJob(
        name,
        frontier,
        source=content.path,
        sha256=content.sha256,
        replicas=frontier.job.replicas if replicas is None else replicas,
    )


def _with_ladder(
    job: SiteJob, freqplan: Path, log: Path | None, stated_replicas: int | None
) -> SiteJob:
    """A job that trains by a frequency plan.

    Args:
        job: without one.
        freqplan: path of the frequency plan.
        log: of the run; None: beside the frequency plan.
        stated_replicas: what the site's file says of replicas, if anything.
    """
    ladder = read_ladder(freqplan)
    return replace(
        job,
        ladder=ladder,
        replicas=ladder.replicas_of(job.frontier, stated_replicas),
        run_log=log_beside(freqplan) if log is None else log,
    )


def read_ladder(path: Path) -> JobLadder:
    """The frequency plan in a file, with its ladder.

    Raises:
        InputError: it cannot be read, or is none.
    """
    content = _Content.read(path)
    freqplan = FrequencyPlan.from_document(content.document, path=path)
    return JobLadder(freqplan, path, content.sha256)


def _trace_profile(entry: JobEntry, folder: Path) -> FrontierFile:
    """The frontier of a job that is given by its profile, and plans along it."""
    assert entry.profile is not None
    near = folder / entry.profile
    profile = Profile.open(str(near) if exists(near) else entry.profile)
    metadata = profile.metadata
    spec = JobSpec(
        schedule=entry.schedule,
        num_microbatches=entry.microbatches,
        chunks=entry.chunks,
        gpus_per_stage=metadata.gpus_per_stage_with(entry.gpus_per_stage, None),
        replicas=entry.replicas or metadata.job.replicas,
    )
    frontier = spec.trace(profile, full=True)
    plans = distinct(frontier.sample_plans(_NUM_PLANS))
    slower = less_powerful(frontier.sample_plans(_NUM_PLANS, beyond=True), plans[-1])
    return FrontierFile.from_plans(frontier, plans, slower)


def read_frontier(path: Path) -> tuple[FrontierFile, str]:
    """The frontier in a file, and the SHA-256 of that file's content.

    Raises:
        InputError: it cannot be read, or is none.
    """
    content = _Content.read(path)
    return content.as_frontier(), content.sha256


def frontier_sha256(frontier: FrontierFile) -> str:
    """The SHA-256 of the file that saving a frontier writes."""
    return hashlib.sha256(frontier.to_json().encode()).hexdigest()
