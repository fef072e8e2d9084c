"""Orders for the jobs of a site: one file for each, written whole, that its ranks read."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

from envplan._io.documents import read_json
from envplan.enforce.order_file import MAX_ORDER_BYTES, ORDER_SCHEMA, Order
from envplan.errors import InputError
from envplan.site.jobs import SiteJob
from envplan.site.model import JobAssignment, SiteInterval
from envplan.site.run_progress import RunProgress

__all__ = ["SAFE_LEAD", "OrderWriter", "WrittenOrder", "orderable"]

#: An order names the iteration that is so many after the running one. A rank may be an iteration
#: ahead of those that have logged theirs, and reads its order when the iteration that it runs ends.
SAFE_LEAD: Final = 2
_SUFFIX: Final = ".order.json"
#: Longer names of files are refused by file systems.
_MAX_NAME_BYTES: Final = 255


class WrittenOrder(NamedTuple):
    """An order that a job has just got.

    Attributes:
        job: that it is for.
        order: what the file says.
        path: of the file.
    """

    job: SiteJob
    order: Order
    path: Path


def orderable(jobs: Sequence[SiteJob]) -> list[SiteJob]:
    """The jobs as orders can have them: none pauses, for a rank that trains does not stand still.

    Raises:
        InputError: a job has no frequency plan, or a name that no file can have.
    """
    for job in jobs:
        if job.ladder is None:
            raise InputError(
                f"job {job.name} has no frequency plan, so no order can name its plans; give "
                f"freqplan = FILE, or {job.name}.freqplan.json in the folder (envplan apply)"
            )
        file_name = f"{job.name}{_SUFFIX}"
        if Path(file_name).name != file_name or len(file_name.encode()) > _MAX_NAME_BYTES:
            raise InputError(f"job {job.name!r} cannot be the name of a file, which orders need")
    return [replace(job, may_pause=False) for job in jobs]


class OrderWriter:
    """Writes the orders of a site's jobs.

    Args:
        folder: that the ranks of all jobs see.
        jobs: of the site, as `orderable` has them.
        lead_s: how long it takes until every rank sees a file that was written, such as the time
            for which a network file system caches a file's attributes.
    """

    def __init__(self, folder: Path, jobs: Sequence[SiteJob], *, lead_s: float = 0.0) -> None:
        self._folder = folder
        self._jobs = jobs
        self._lead_s = lead_s
        self._last: dict[str, Order] = {}
        self._runs: dict[str, RunProgress] = {}
        for job in jobs:
            assert job.run_log is not None
            self._runs[job.name] = RunProgress(job.run_log)
            order = _order_or_none(self.path_of(job))
            if order is not None:
                self._last[job.name] = order

    def path_of(self, job: SiteJob) -> Path:
        """The file of a job's orders."""
        return self._folder / f"{job.name}{_SUFFIX}"

    def run_progress(self, job: SiteJob) -> RunProgress:
        """How far a job is now."""
        progress = self._runs[job.name]
        progress.update()
        return progress

    def write(self, interval: SiteInterval) -> Iterator[WrittenOrder]:
        """Write an order for each job that shall do something else than its last order says.

        Yields:
            Each order as soon as it is written.

        Raises:
            InputError: a file cannot be written.
        """
        for job, assignment in zip(self._jobs, interval.jobs, strict=True):
            last = self._last.get(job.name)
            order = self._order(job, assignment, last)
            if last is not None and _says_the_same(order, last):
                continue
            path = self.path_of(job)
            order.save(path)
            self._last[job.name] = order
            yield WrittenOrder(job, order, path)

    def rewrite_lost(self) -> list[WrittenOrder]:
        """Write the last order of each job again whose file does not hold it any more.

        Raises:
            InputError: a file cannot be written.
        """
        written = []
        for job in self._jobs:
            last = self._last.get(job.name)
            path = self.path_of(job)
            if last is None or _order_or_none(path) == last:
                continue
            from_iteration, lead = self._from_iteration(job)
            changes = {
                "sequence": last.sequence + 1,
                "from_iteration": from_iteration,
                "lead": lead,
            }
            order = last.model_copy(update=changes)
            order.save(path)
            self._last[job.name] = order
            written.append(WrittenOrder(job, order, path))
        return written

    def _order(self, job: SiteJob, assignment: JobAssignment, last: Order | None) -> Order:
        """The order by which a job does what the plan says."""
        assert job.ladder is not None
        assert assignment.plan is not None
        assert assignment.iteration_time_s is not None
        # Orders of an earlier site are older, unless their clock was wrong.
        sequence = max(time.time_ns() // 10**6, 0 if last is None else last.sequence + 1)
        from_iteration, lead = self._from_iteration(job)
        return Order(
            schema=ORDER_SCHEMA,
            job=job.name,
            plan_sha256=job.ladder.freqplan.plan_sha256,
            sequence=sequence,
            from_iteration=from_iteration,
            lead=lead,
            rung=assignment.plan,
            faster_rung=assignment.faster_plan,
            faster_share=assignment.faster_share,
            iteration_time_s=assignment.iteration_time_s,
            power_w=assignment.power_w,
        )

    def _from_iteration(self, job: SiteJob) -> tuple[int | None, int]:
        """The first iteration that follows an order written now, and how far ahead that is.

        None: it is not known how far the job is, so its ranks follow as soon as they read.
        """
        progress = self.run_progress(job)
        if progress.last_iteration < 0:
            return None, 0
        running = progress.last_iteration + 1
        lead = SAFE_LEAD
        if self._lead_s:
            lead += math.ceil(self._lead_s / max(progress.iteration_time_s, 1e-9))
        return running + lead, lead


def _order_or_none(path: Path) -> Order | None:
    """The order in a file; None where there is none that can be read."""
    try:
        return Order.from_document(read_json(path, MAX_ORDER_BYTES))
    except InputError:
        return None


def _says_the_same(order: Order, other: Order) -> bool:
    """Whether two orders of a job have it follow the same plans."""
    for_one_plan = order.plan_sha256 == other.plan_sha256
    same_rungs = (order.rung, order.faster_rung) == (other.rung, other.faster_rung)
    return for_one_plan and same_rungs and order.faster_share == other.faster_share
