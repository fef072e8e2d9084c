"""Running a sweep: what is left of it, on processes or on Ray, into the journal."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from envplan import __version__
from envplan._files import AnyPath, is_file
from envplan.cores import cores
from envplan.errors import EnvplanError
from envplan.pipeline import traits
from envplan.profile import Profile
from envplan.sweep.journal import open_journal
from envplan.sweep.work import Group, Task, failed_row
from envplan.sweep.workers import run_on_processes, run_on_ray

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


def journal_of(output: AnyPath) -> Path:
    """Where the journal of a sweep with this output lies: beside it."""
    return Path(f"{os.fspath(output)}.journal")


def run_sweep(
    config: SweepConfig,
    journal: AnyPath,
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
    begin, tell = time.monotonic(), progress or (lambda *_: None)

    @cache
    def opened(name: str) -> Profile | EnvplanError:
        """The profile that the sweep calls so, read once; or why there is none."""
        there = config.folder / name
        try:
            return Profile.open(there if is_file(there) else name)
        except EnvplanError as error:
            return error

    rows: dict[int, Row] = {}
    groups: dict[tuple[object, ...], Group] = {}
    count, resumed = len(config.points), 0
    with open_journal(journal, fresh=fresh) as book:
        for place, point in enumerate(config.points):
            profile = opened(point.profile)
            if isinstance(profile, EnvplanError):
                rows[place] = failed_row(point, None, str(profile))
                continue
            filled = _filled(point, profile)
            task = Task(place, _key(filled, profile), filled)
            if task.key in book.rows:
                rows[place] = book.rows[task.key]
                resumed += 1
            else:
                new = Group(profile, deque())
                groups.setdefault(filled.frontier_key, new).tasks.append(task)
        computed = count - len(rows)
        outcomes = run_on_processes([*groups.values()], jobs or cores())
        if groups and ray is not None:
            outcomes = run_on_ray([*groups.values()], ray)
        failed = sum(row.error is not None for row in rows.values())
        tell(len(rows), count, failed)
        with closing(outcomes):
            for task, done in outcomes:
                book.append(task.key, done.row, final=done.final)
                rows[task.place] = done.row
                failed += done.row.error is not None
                tell(len(rows), count, failed)
    ordered = tuple(rows[place] for place in range(count))
    return SweepResult(ordered, computed, resumed, time.monotonic() - begin)


def _filled(point: Point, profile: Profile) -> Point:
    """The point with what the profile's sidecar says where it says nothing itself."""
    metadata, job = profile.metadata, profile.metadata.job
    usual = "interleaved" if (point.chunks or 1) > 1 else metadata.schedule or "1f1b"
    schedule = point.schedule or usual
    chunks = point.chunks or (job.chunks if point.schedule is None else None)
    return point.model_copy(
        update={
            "microbatches": point.microbatches or metadata.num_microbatches,
            "schedule": schedule,
            "chunks": chunks or traits(schedule).chunks,
            "gpus_per_stage": metadata.gpus_per_stage_with(point.gpus_per_stage, point.cp),
            "cp": None,
            "replicas": point.replicas or job.replicas,
        }
    )


def _key(point: Point, profile: Profile) -> str:
    """What decides a point's outcome: what it says, its profile and the version of envplan."""
    document = [__version__, profile.sha256, point.model_dump(exclude_defaults=True)]
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
