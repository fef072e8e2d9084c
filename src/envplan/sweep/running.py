"""Running a sweep: what is left of it, on processes or on Ray, into the journal."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from envplan._files import is_file
from envplan.cores import cores
from envplan.errors import EnvplanError, InputError
from envplan.pipeline import traits
from envplan.profile import Profile
from envplan.sweep.journal import Journal
from envplan.sweep.processes import run_on_processes
from envplan.sweep.work import Done, Group, Task, failed_row, group_key

if TYPE_CHECKING:
    from envplan.sweep.config import Point, SweepConfig
    from envplan.sweep.table import Row

__all__ = ["SweepResult", "journal_of", "run_sweep"]


@dataclass(frozen=True)
class SweepResult:
    """A finished sweep.

    Attributes:
        rows: of all points, in the order of the sweep's file.
        computed: how many were computed now, failures included.
        resumed: how many an earlier run had done.
        wall_s: how long it took, s.
    """

    rows: tuple[Row, ...]
    computed: int
    resumed: int
    wall_s: float

    @property
    def failures(self) -> list[Row]:
        """The rows of points that have no plan."""
        return [row for row in self.rows if row.error is not None]


def journal_of(output: str | os.PathLike[str]) -> Path:
    """Where the journal of a sweep with this output lies: beside it."""
    return Path(f"{os.fspath(output)}.journal")


def run_sweep(
    config: SweepConfig,
    journal: str | os.PathLike[str],
    *,
    jobs: int | None = None,
    ray: str | None = None,
    fresh: bool = False,
    progress: Callable[[int, int, int], None] | None = None,
) -> SweepResult:
    """Compute every point that the journal does not have, and put it there as soon as it is done.

    Called from a script, it starts processes, so the script needs `if __name__ == "__main__":`.

    Args:
        journal: its path; journal_of says where the command line has it.
        jobs: processes at most; default: one for each core.
        ray: address of a Ray cluster to run on instead.
        fresh: do everything again.
        progress: called with (points done, all points, failed points) at the start and after each.

    Raises:
        InputError: the journal cannot be used, or the cluster not be reached. What is wrong with a
            single point is in its row instead.
    """
    begin = time.monotonic()
    profiles: dict[str, Profile | EnvplanError] = {}
    tasks: list[Task] = []
    rows: dict[int, Row] = {}
    for index, point in enumerate(config.all_points()):
        profile = None
        try:
            profile = _opened(point.profile, config.folder, profiles)
            filled = _filled(point, profile)
            tasks.append(Task(index, _key(filled, profile), filled))
        except EnvplanError as error:
            rows[index] = failed_row(point, profile, str(error))
    count = len(tasks) + len(rows)
    with Journal(journal, fresh=fresh) as book:
        rows |= {task.index: book.rows[task.key] for task in tasks if task.key in book.rows}
        missing = [task for task in tasks if task.index not in rows]
        failed = sum(row.error is not None for row in rows.values())
        if progress is not None:
            progress(len(rows), count, failed)
        # Tasks by the frontier they share, in order of the first of each.
        shared: dict[tuple[object, ...], list[Task]] = {}
        for task in missing:
            shared.setdefault(group_key(task.point), []).append(task)
        groups = [
            Group(_opened(same[0].point.profile, config.folder, profiles), tuple(same))
            for same in shared.values()
        ]
        with closing(_outcomes(groups, jobs, ray)) as outcomes:
            for task, done in outcomes:
                book.append(task.key, done.row, final=done.final)
                rows[task.index] = done.row
                failed += done.row.error is not None
                if progress is not None:
                    progress(len(rows), count, failed)
    return SweepResult(
        tuple(rows[index] for index in range(count)),
        len(missing),
        len(tasks) - len(missing),
        time.monotonic() - begin,
    )


def _outcomes(
    groups: Sequence[Group], jobs: int | None, ray: str | None
) -> Generator[tuple[Task, Done], None, None]:
    if groups and ray is not None:
        from envplan.sweep.on_ray import run_on_ray

        yield from run_on_ray(groups, ray)
    elif groups:
        yield from run_on_processes(groups, jobs or cores())


def _opened(name: str, folder: Path, known: dict[str, Profile | EnvplanError]) -> Profile:
    """The profile that a sweep calls so, read once.

    Raises:
        EnvplanError: there is none, or it is not valid.
    """
    if name not in known:
        try:
            known[name] = Profile.open(folder / name if is_file(folder / name) else name)
        except EnvplanError as error:
            known[name] = error
    profile = known[name]
    if isinstance(profile, EnvplanError):
        raise profile
    return profile


def _filled(point: Point, profile: Profile) -> Point:
    """The point with what the profile's sidecar says where it says nothing itself."""
    microbatches = point.microbatches or profile.metadata.num_microbatches
    if microbatches is None:
        raise InputError(
            f"how many microbatches has an iteration? Profile {profile.name} does not say"
        )
    usual = "interleaved" if (point.chunks or 1) > 1 else profile.metadata.schedule or "1f1b"
    schedule = point.schedule or usual
    job = profile.metadata.job
    chunks = point.chunks or (job.chunks if point.schedule is None else None)
    chunks = chunks or traits(schedule).chunks
    if profile.num_stages % chunks:
        raise InputError(
            f"{chunks} chunks do not divide the {profile.num_stages} stages of profile "
            f"{profile.name}"
        )
    gpus = profile.metadata.gpus_per_stage_with(point.gpus_per_stage, point.cp)
    return point.model_copy(
        update={
            "microbatches": microbatches,
            "schedule": schedule,
            "chunks": chunks,
            "gpus_per_stage": gpus,
            "cp": None,
            "replicas": point.replicas or job.replicas,
        }
    )


def _key(point: Point, profile: Profile) -> str:
    """What decides a point's outcome: what it says, its profile and the version of envplan."""
    document = [_version(), profile.sha256, point.model_dump(exclude_defaults=True)]
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


@cache
def _version() -> str:
    return version("envplan")
