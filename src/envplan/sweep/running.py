"""Running a sweep: what is left of it, on processes or on Ray, into the journal."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
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
    profiles = _Profiles(config.folder)
    tasks, rows = _prepared(config, profiles)
    count = len(tasks) + len(rows)
    with Journal(journal, fresh=fresh) as book:
        rows |= {task.index: book.rows[task.key] for task in tasks if task.key in book.rows}
        missing = [task for task in tasks if task.index not in rows]
        resumed = len(tasks) - len(missing)
        failed = sum(row.error is not None for row in rows.values())
        if progress is not None:
            progress(len(rows), count, failed)
        with closing(_run(_groups(missing, profiles), jobs, ray)) as outcomes:
            for task, done in outcomes:
                book.append(task.key, done.row, final=done.final)
                rows[task.index] = done.row
                failed += done.row.error is not None
                if progress is not None:
                    progress(len(rows), count, failed)
    return SweepResult(
        tuple(rows[index] for index in range(count)),
        len(missing),
        resumed,
        time.monotonic() - begin,
    )


def _run(
    groups: Sequence[Group], jobs: int | None, ray: str | None
) -> Generator[tuple[Task, Done], None, None]:
    if not groups:
        return
    if ray is not None:
        from envplan.sweep.on_ray import run_on_ray

        yield from run_on_ray(groups, ray)
    else:
        yield from run_on_processes(groups, jobs or cores())


class _Profiles:
    """Profiles by the name a sweep gives them, each read once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, Profile | EnvplanError] = {}

    def named(self, name: str) -> Profile:
        """Raises: EnvplanError: there is none, or it is not valid."""
        if name not in self._known:
            beside = self._folder / name
            try:
                self._known[name] = Profile.open(beside if is_file(beside) else name)
            except EnvplanError as error:
                self._known[name] = error
        known = self._known[name]
        if isinstance(known, EnvplanError):
            raise known
        return known


def _prepared(config: SweepConfig, profiles: _Profiles) -> tuple[list[Task], dict[int, Row]]:
    """What can be computed, and the rows of points that cannot, by their place."""
    from importlib.metadata import version

    tasks: list[Task] = []
    refused: dict[int, Row] = {}
    installed = version("envplan")
    for index, point in enumerate(config.all_points()):
        profile = None
        try:
            profile = profiles.named(point.profile)
            filled = _filled(point, profile)
        except EnvplanError as error:
            refused[index] = failed_row(point, profile, str(error))
        else:
            tasks.append(Task(index, _key(filled, profile, installed), filled))
    return tasks, refused


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


def _key(point: Point, profile: Profile, installed: str) -> str:
    """What decides a point's outcome: what it says, its profile and the version of envplan."""
    document = [installed, profile.sha256, point.model_dump(exclude_defaults=True)]
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _groups(tasks: Sequence[Task], profiles: _Profiles) -> list[Group]:
    """Tasks by the frontier they share, in order of the first of each."""
    shared: dict[tuple[object, ...], list[Task]] = {}
    for task in tasks:
        shared.setdefault(group_key(task.point), []).append(task)
    return [Group(profiles.named(same[0].point.profile), tuple(same)) for same in shared.values()]
