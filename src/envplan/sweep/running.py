"""Running a sweep: the points that its journal lacks, on processes or on Ray.

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
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import version
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from envplan._io.documents import Model
from envplan._io.files import (
    AnyPath,
    append_whole,
    check_writable,
    exists,
    is_file,
    read_bounded,
)
from envplan._io.tables import MAX_TABLE_BYTES
from envplan.errors import EnvplanError, InputError
from envplan.pipeline import traits
from envplan.profile import Profile
from envplan.profile.job import shape_of_job
from envplan.profile.sidecar import Workload
from envplan.replay.cores import cores
from envplan.sweep.table import COLUMNS, SweepRow
from envplan.sweep.work import (
    FinishedTask,
    Group,
    Task,
    failed_row,
    run_on_processes,
    run_on_ray,
)

if TYPE_CHECKING:
    import pandas as pd

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

    rows: tuple[SweepRow, ...]
    computed: int
    resumed: int
    wall_s: float

    @property
    def failures(self) -> list[SweepRow]:
        """The rows of points that have no plan."""
        return [row for row in self.rows if row.error is not None]

    def to_dataframe(self) -> pd.DataFrame:
        """One row a point, in the order of the sweep's file."""
        import pandas as pd

        return pd.DataFrame([dict(row) for row in self.rows], columns=list(COLUMNS))


class _Entry(Model):
    """A finished point in a journal.

    Attributes:
        key: a hash of all that decides the point's outcome.
        final: whether the same point would end the same way again.
        row: the outcome.
    """

    key: str
    final: bool
    row: SweepRow

    def to_line(self) -> bytes:
        """The entry as a line of a journal."""
        return self.model_dump_json(exclude_none=True).encode() + b"\n"


class Journal(NamedTuple):
    """An open journal, which no other process can write to at the same time.

    Attributes:
        file: where it lies on the disk.
        rows: by key, of all points that need not be done again.
    """

    file: FileIO
    rows: dict[str, SweepRow]

    def append(self, line: bytes) -> None:
        """Put a line on the disk; when this returns, it is there."""
        try:
            append_whole(self.file.fileno(), line)
        except OSError as error:
            reason = f"cannot be written ({error.strerror})"
            raise InputError(reason, path=self.file.name) from error


@contextmanager
def open_journal(path: AnyPath, *, fresh: bool = False) -> Iterator[Journal]:
    """Open the journal at a path, which is created where there is none.

    Args:
        path: where it lies.
        fresh: forget what an earlier sweep has done.

    Raises:
        InputError: the file cannot be written, another sweep has it open, or it is no journal
            (names the line).
    """
    check_writable(path)
    if exists(path) and not is_file(path):
        raise InputError("is a pipe or a device; a journal is a regular file", path=path)
    with Path(path).open("a+b", buffering=0) as file:
        _lock(file, path)
        file.seek(0)
        lines = file.readall().splitlines(keepends=True)
        if lines and not _HEADER.startswith(lines[0]):
            raise _not_a_journal(path, 1)
        # A line without its end was torn off when a process was killed.
        whole_lines = [line for line in lines if line.endswith(b"\n")]
        entries = _read_entries(whole_lines, path)
        if fresh:
            whole_lines, entries = [], []
        file.truncate(sum(map(len, whole_lines)))
        final_rows = {entry.key: entry.row for entry in entries if entry.final}
        journal = Journal(file, final_rows)
        if not whole_lines:
            journal.append(_HEADER)
        yield journal


def read_journal(path: AnyPath) -> list[SweepRow]:
    """The rows in a journal, which is left as it is; a line that was torn off is none.

    Raises:
        InputError: it is no journal (names the line).
    """
    lines = read_bounded(path, MAX_TABLE_BYTES).splitlines(keepends=True)
    whole_lines = [line for line in lines if line.endswith(b"\n")]
    if whole_lines[:1] != [_HEADER]:
        raise _not_a_journal(path, 1)
    return [entry.row for entry in _read_entries(whole_lines, path)]


def _lock(file: FileIO, path: AnyPath) -> None:
    """Keep a journal from other sweeps until it is closed."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        words = "another sweep is writing to it; wait for it, or choose another output"
        raise InputError(words, path=path) from None


def _read_entries(lines: Sequence[bytes], path: AnyPath) -> list[_Entry]:
    """The entries of a journal's lines, the first of which is its header.

    Raises:
        InputError: a line is no entry; names it.
    """
    entries = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            entries.append(_Entry.model_validate_json(line))
        except ValueError:
            raise _not_a_journal(path, number) from None
    return entries


def _not_a_journal(path: AnyPath, line: int) -> InputError:
    words = "is not a line of a sweep's journal; choose another output, or delete this file"
    return InputError(f"{words} to start anew", path=path, line=line)


def journal_of(output: AnyPath) -> Path:
    """Where the journal of a sweep with this output lies: beside it."""
    return Path(f"{os.fspath(output)}.journal")


#: Sweeps that these releases began are gone on with; their rows hold, and `--fresh` plans anew.
_EARLIER_RELEASES: Final = ("0.1.0",)


@dataclass
class _Agenda:
    """The points of a sweep, done and to be computed; each has a row or is in a group.

    Attributes:
        num_points: how many there are.
        rows: by the point's position in the sweep, of those that are done.
        groups: of those to be computed, by their frontier_key.
        resumed: how many of the rows an earlier run had made.
        failed: how many of the rows have no plan.
    """

    num_points: int
    rows: dict[int, SweepRow] = field(default_factory=dict)
    groups: dict[tuple[object, ...], Group] = field(default_factory=dict)
    resumed: int = 0
    failed: int = 0

    def finish(self, position: int, row: SweepRow) -> None:
        """Give a point its row."""
        self.rows[position] = row
        self.failed += row.error is not None

    def add(self, task: Task, profile: Profile) -> None:
        """Add a point to those that share its frontier."""
        group = self.groups.setdefault(task.point.frontier_key, Group(profile, deque()))
        group.tasks.append(task)

    def ordered_rows(self) -> tuple[SweepRow, ...]:
        """The rows in the order of the sweep's file, when all points have one."""
        return tuple(self.rows[position] for position in range(self.num_points))


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
        config: the points.
        journal: its path; journal_of says where the command line has it.
        jobs: processes at most; default: one for each core.
        ray: address of a Ray cluster to run on instead.
        fresh: do everything again.
        progress: called with (points done, all points, failed points) at the start and after each.

    Raises:
        InputError: the journal cannot be used, or the cluster not be reached. What is wrong with a
            single point is in its row instead.
    """
    begin_s = time.monotonic()
    with open_journal(journal, fresh=fresh) as book:
        agenda = _agenda(config, book)
        num_computed = agenda.num_points - len(agenda.rows)
        progress(len(agenda.rows), agenda.num_points, agenda.failed)
        with closing(_outcomes(list(agenda.groups.values()), jobs, ray)) as outcomes:
            for finished in outcomes:
                entry = _Entry(key=finished.task.key, final=finished.is_final, row=finished.row)
                book.append(entry.to_line())
                agenda.finish(finished.task.position, finished.row)
                progress(len(agenda.rows), agenda.num_points, agenda.failed)
    wall_s = time.monotonic() - begin_s
    return SweepResult(agenda.ordered_rows(), num_computed, agenda.resumed, wall_s)


def _agenda(config: SweepConfig, book: Journal) -> _Agenda:
    """The agenda of a sweep.

    Points whose profile cannot be opened have failed already, and those in the journal are done.
    """

    @cache
    def open_profile(name: str) -> Profile | EnvplanError:
        """The profile that the sweep calls so, read once; or why there is none."""
        path = config.folder / name
        try:
            return Profile.open(path if is_file(path) else name)
        except EnvplanError as error:
            return error

    agenda = _Agenda(len(config.points))
    for position, point in enumerate(config.points):
        profile = open_profile(point.profile)
        if isinstance(profile, EnvplanError):
            agenda.finish(position, failed_row(point, None, str(profile)))
            continue
        completed = _completed(point, profile)
        task = Task(position, _key(completed, profile, version("envplan")), completed)
        row = book.rows.get(task.key)
        for release in _EARLIER_RELEASES:
            row = row or book.rows.get(_key(completed, profile, release))
        if row is not None:
            agenda.finish(position, row)
            agenda.resumed += 1
        else:
            agenda.add(task, profile)
    return agenda


def _outcomes(
    groups: Sequence[Group], jobs: int | None, ray: str | None
) -> Generator[FinishedTask, None, None]:
    """The outcomes of all tasks, on Ray where there are any and an address is given."""
    if groups and ray is not None:
        return run_on_ray(groups, ray)
    return run_on_processes(groups, jobs or cores())


def _completed(point: Point, profile: Profile) -> Point:
    """A point with what the profile's sidecar says where it says nothing itself."""
    metadata, job = profile.metadata, profile.metadata.job
    chunks = point.chunks
    if chunks is None and point.schedule is not None:
        # A grid names schedules of many shapes; the sidecar's chunks go with its own schedule.
        chunks = traits(point.schedule).chunks
    shape = shape_of_job(profile, schedule=point.schedule, chunks=chunks)
    return point.model_copy(
        update={
            "microbatches": point.microbatches or metadata.num_microbatches,
            "schedule": shape.schedule,
            "chunks": shape.num_chunks,
            "gpus_per_stage": metadata.gpus_per_stage_with(point.gpus_per_stage, point.cp),
            "cp": None,
            "replicas": point.replicas or job.replicas,
        }
    )


def _key(point: Point, profile: Profile, release: str) -> str:
    """A hash of all that decides a point's outcome.

    That is the version of envplan that planned it, the profile, what the point says, and what the
    profile's sidecar says of the job besides.
    """
    document = [release, profile.sha256, point.model_dump(exclude_defaults=True)]
    if profile.metadata.job != Workload():
        document.append(asdict(profile.metadata.job))
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
