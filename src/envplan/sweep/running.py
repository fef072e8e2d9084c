"""Running a sweep: what its journal lacks, on processes or on Ray, point by point into the journal.

A journal is JSON lines: a header, then for each finished point its key and its row. It is only ever
appended to, and every line is on the disk before the next point is reported. A process that is
killed leaves at most a torn last line, which is cut off when the journal is opened again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from envplan._io.documents import Model
from envplan._io.files import AnyPath, append_whole, check_writable, is_file
from envplan.errors import EnvplanError, InputError
from envplan.pipeline import traits
from envplan.profile import Profile
from envplan.profile.sidecar import Workload
from envplan.replay.cores import cores
from envplan.sweep.table import Row
from envplan.sweep.work import Group, Task, failed_row, run_on_processes, run_on_ray

if TYPE_CHECKING:
    from envplan.sweep.config import Point, SweepConfig

__all__ = ["Journal", "SweepResult", "journal_of", "open_journal", "run_sweep"]

_HEADER: Final = b'{"schema": "envplan/sweep-journal/v1"}\n'


class SweepResult(NamedTuple):
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


class _Entry(Model):
    """A finished point; where it is final, the same point would end the same way again."""

    key: str
    final: bool
    row: Row


class Journal(NamedTuple):
    """An open journal, which no other process can write to at the same time.

    Attributes:
        rows: by key, of all points that need not be done again.
    """

    file: FileIO
    rows: dict[str, Row]

    def append(self, line: bytes) -> None:
        """Put a line on the disk; when this returns, it is there."""
        try:
            append_whole(self.file.fileno(), line)
        except OSError as error:
            reason = f"cannot be written ({error.strerror})"
            raise InputError(reason, path=self.file.name) from error


@contextmanager
def open_journal(path: AnyPath, *, fresh: bool = False) -> Iterator[Journal]:
    """The journal at a path, which is created where there is none.

    Args:
        fresh: forget what an earlier sweep has done.

    Raises:
        InputError: the file cannot be written, another sweep has it open, or it is no journal
            (names the line).
    """
    check_writable(path)
    with Path(path).open("a+b", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            words = "another sweep is writing to it; wait for it, or choose another output"
            raise InputError(words, path=path) from None
        file.seek(0)
        lines = file.readall().splitlines(keepends=True) or [b""]
        whole = [line for line in lines if line.endswith(b"\n")]
        read: list[_Entry] = []
        bad = 0 if _HEADER.startswith(lines[0]) else 1
        try:
            read.extend(map(_Entry.model_validate_json, [] if bad else whole[1:]))
        except ValueError:
            bad = len(read) + 2
        if bad:
            words = "is not a line of a sweep's journal; choose another output, or delete this file"
            raise InputError(f"{words} to start anew", path=path, line=bad)
        if fresh:
            whole, read = [], []
        file.truncate(sum(map(len, whole)))
        journal = Journal(file, {one.key: one.row for one in read if one.final})
        if not whole:
            journal.append(_HEADER)
        yield journal


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
    progress: Callable[[int, int, int], None] = lambda *_: None,
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
    count, resumed, failed = len(config.points), 0, 0
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
                groups.setdefault(filled.frontier_key, Group(profile, deque())).tasks.append(task)
        computed, shared = count - len(rows), [*groups.values()]
        run = run_on_processes(shared, jobs or cores())
        failed = sum(row.error is not None for row in rows.values())
        progress(len(rows), count, failed)
        with closing(run_on_ray(shared, ray) if shared and ray is not None else run) as outcomes:
            for task, (row, final) in outcomes:
                entry = _Entry(key=task.key, final=final, row=row)
                book.append(entry.model_dump_json(exclude_none=True).encode() + b"\n")
                rows[task.place] = row
                failed += row.error is not None
                progress(len(rows), count, failed)
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
    """What decides a point's outcome: the version of envplan, the profile, what the point says and
    what its sidecar says of the job besides."""
    document = [version("envplan"), profile.sha256, point.model_dump(exclude_defaults=True)]
    if profile.metadata.job != Workload():
        document.append(asdict(profile.metadata.job))
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
