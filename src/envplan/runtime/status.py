"""The status of a run, as its training process tells it to whoever watches the node.

A rank that follows a plan keeps a small JSON file in its user's folder of lock files. It is
replaced every few seconds, and removed when the run ends. `envplan guard --metrics-file` reads the
files of all ranks of a node; see `metrics`. A file that is not replaced any more counts as none:
its process is gone.

What a status counts comes from the records of the run log, in the log's thread. The file is written
by a thread of its own, and nothing that goes wrong with it touches training.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal, NamedTuple

from pydantic import Field

from envplan._io.documents import Document, Index, Joules, Seconds
from envplan.devices.locks import lock_folders
from envplan.enforce.freqplan import FrequencyPlan, MegahertzOrNone, RankPlan, Sha256
from envplan.errors import EnvplanError
from envplan.runtime.clock_requester import ClockRequester
from envplan.runtime.order_reader import OrderFollowed, OrderRefused
from envplan.runtime.run_records import ClockError, Mismatch, RunRecord, StepRecord

__all__ = ["LIFETIME_S", "Requests", "RunStatus", "StatusFile", "job_id", "read_statuses"]

#: How often a status is written, s.
_PERIOD_S: Final = 2.0
#: A status that was not written for so long is that of a process which is gone, s.
LIFETIME_S: Final = 15.0
#: A file that was not written for so long is removed by whoever finds it, s.
_RUBBISH_S: Final = 3600.0
_MAX_BYTES: Final = 64 * 1024
_MAX_FILES: Final = 1024
#: A change that came so long after the begin of its operation was late, s.
_ON_TIME_S: Final = 1e-3
_SUFFIX: Final = ".status.json"
#: Variables in which schedulers and operators name a job, the first one that is set counts.
_JOB_VARIABLES: Final = ("ENVPLAN_JOB", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_NAME")

_ShortText = Annotated[str, Field(max_length=200)]
_Total = Annotated[int, Field(ge=0, lt=2**63)]


class RunStatus(Document):
    """The status of one rank.

    Attributes:
        rank: global rank.
        stage: that it runs.
        uuid: of its GPU; empty where the guard was refused.
        device: index of its GPU, as the plan has it.
        plan_sha256: of the plan.json.
        job: as the scheduler names it; empty where none does.
        clocks: whether clocks are set; not where the guard was refused or is gone.
        wanted_mhz: the clock requested last; 0: none.
        followed: iterations that followed the plan.
        unfollowed: iterations that did not, by reason.
        changes: of clocks that were requested.
        late_changes: those that came after their operation had begun, or never.
        clock_errors: that the guard has told of.
        order: the sequence number of the order that it follows; None: it follows none.
        order_rung: the rung of the ladder that this order names; of two the slower one.
        orders_refused: files of orders that it did not follow.
        iteration_s: the last iteration that was measured.
        planned_s: the planned time of that one.
        total_iteration_s: of all iterations that were measured.
        total_planned_s: the planned times of these.
        used_j: energy of the GPU in iterations that followed the plan itself, and not a slower one
            of its ladder, by its counter.
        planned_j: the same by the profile.
        baseline_j: by the profile at the highest clocks.
    """

    kind: ClassVar[str] = "status of a run"
    schema_name: ClassVar[str] = "envplan/status/v1"

    schema_id: Literal["envplan/status/v1"] = Field(default="envplan/status/v1", alias="schema")
    rank: Index
    stage: Index
    uuid: _ShortText = ""
    device: Index
    plan_sha256: Sha256
    job: _ShortText = ""
    clocks: bool
    wanted_mhz: MegahertzOrNone = 0
    followed: _Total = 0
    unfollowed: Annotated[dict[_ShortText, _Total], Field(max_length=32)] = Field(
        default_factory=dict
    )
    changes: _Total = 0
    late_changes: _Total = 0
    clock_errors: _Total = 0
    order: _Total | None = None
    order_rung: Index | None = None
    orders_refused: _Total = 0
    iteration_s: Seconds | None = None
    planned_s: Seconds | None = None
    total_iteration_s: Seconds = 0.0
    total_planned_s: Seconds = 0.0
    used_j: Joules | None = None
    planned_j: Joules | None = None
    baseline_j: Joules | None = None


def job_id(environment: Mapping[str, str] = os.environ) -> str:
    """The job that this process belongs to, as the scheduler names it; "" where none does."""
    names = (environment.get(variable, "") for variable in _JOB_VARIABLES)
    return next((name[:200] for name in names if name), "")


class Requests(NamedTuple):
    """The clocks that a run has requested until now; fields as in RunStatus."""

    changes: int
    wanted_mhz: int
    clocks: bool


class StatusFile:
    """Keeps the status of this rank in a file, until it is closed.

    Args:
        status: at the begin of the run.
        requests: says, from any thread, which clocks were requested.

    Attributes:
        status: as it is now.
    """

    def __init__(self, status: RunStatus, requests: Callable[[], Requests]) -> None:
        self.status = status
        self._requests = requests
        self._unfollowed: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._path = _new_path()
        self._thread: threading.Thread | None = None
        if self._path is not None:
            self._thread = threading.Thread(target=self._run, name="envplan-status", daemon=True)
            self._thread.start()

    @classmethod
    def of_rank(cls, plan: FrequencyPlan, rank: RankPlan, requester: ClockRequester) -> StatusFile:
        """The status file of a rank that begins to follow a plan.

        Args:
            plan: the frequency plan.
            rank: the part of it that is the rank's.
            requester: of its clocks.
        """
        guard = requester.guard

        def requests() -> Requests:
            return Requests(
                changes=requester.last_request_id,
                wanted_mhz=requester.last_requested_mhz,
                clocks=guard is not None and guard.alive,
            )

        status = RunStatus(
            rank=rank.rank,
            stage=rank.stage,
            uuid="" if guard is None else guard.info.uuid,
            device=rank.device if guard is None else guard.info.index,
            plan_sha256=plan.plan_sha256,
            job=job_id(),
            clocks=guard is not None,
        )
        return cls(status, requests)

    def record(self, record: RunRecord) -> None:
        """Count what a line of the run log says. Runs in the thread of the run log."""
        match record:
            case StepRecord():
                self._count_step(record)
            case ClockError():
                self._set(clock_errors=self.status.clock_errors + 1)
            case OrderFollowed():
                self._set(order=record.sequence, order_rung=record.rung)
            case OrderRefused():
                self._set(orders_refused=self.status.orders_refused + 1)
            case Mismatch():
                pass  # only the first one is logged; steps say how many there were

    def count_unfollowed(self, reason: str) -> None:
        """An iteration did not follow the plan."""
        self._unfollowed[reason] += 1
        self._set(unfollowed=dict(self._unfollowed))

    def close(self) -> None:
        """Remove the file. Harmless when done before."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join(_PERIOD_S)
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)

    def _count_step(self, step: StepRecord) -> None:
        status = self.status
        num_late = sum(
            change.seen_s is None or change.seen_s - change.wanted_s > _ON_TIME_S
            for change in step.changes
        )
        self._set(
            followed=status.followed + 1,
            late_changes=status.late_changes + num_late,
            iteration_s=step.iteration_s,
            planned_s=step.planned_s,
            total_iteration_s=status.total_iteration_s + step.iteration_s,
            total_planned_s=status.total_planned_s + step.planned_s,
            used_j=step.energy.used_j,
            planned_j=step.energy.planned_j,
            baseline_j=step.energy.baseline_j,
        )

    def _set(self, **changes: object) -> None:
        # The threads of training and of the run log count, and that of the file notes requests.
        with self._lock:
            self.status = self.status.model_copy(update=changes)

    def _run(self) -> None:
        while True:
            self._set(**self._requests()._asdict())
            with suppress(OSError):
                self._write()
            if self._is_over.wait(_PERIOD_S):
                return

    def _write(self) -> None:
        assert self._path is not None
        scratch = self._path.with_suffix(".new")
        scratch.write_text(self.status.to_json(), encoding="utf-8")
        scratch.replace(self._path)


def _new_path() -> Path | None:
    """A new file in this user's folder of lock files, cleared of old ones; None: there is none."""
    folders = lock_folders(os.geteuid())
    if not folders:
        return None
    for path in folders[0].glob(f"*{_SUFFIX}"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _RUBBISH_S:
                path.unlink()
    return folders[0] / f"{secrets.token_hex(8)}{_SUFFIX}"


def read_statuses(user: int) -> Iterator[RunStatus]:
    """The statuses of a user's ranks that run on this node, the one written last at the end.

    What a user has written is not trusted: a file counts only if it is his, small, and right.
    """
    for folder in lock_folders(user):
        oldest_first = sorted(folder.glob(f"*{_SUFFIX}"), key=_modified_time)
        for path in oldest_first[-_MAX_FILES:]:
            with suppress(OSError, EnvplanError, ValueError, RecursionError):
                status = _read_status(path, user)
                if status is not None:
                    yield status


def _modified_time(path: Path) -> float:
    """When a file was modified, s since 1970; 0 where it is gone."""
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0


def _read_status(path: Path, user: int) -> RunStatus | None:
    """The status in a file; None: its process is gone, or it is no file of this user's.

    Raises:
        OSError: it cannot be read.
        EnvplanError: it is no status.
        ValueError: it is no text or no JSON.
        RecursionError: it is nested too deeply.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        is_his = stat.S_ISREG(found.st_mode) and found.st_uid == user
        if not is_his or found.st_size > _MAX_BYTES or time.time() - found.st_mtime > LIFETIME_S:
            return None
        text = os.read(descriptor, _MAX_BYTES).decode()
    finally:
        os.close(descriptor)
    return RunStatus.from_document(json.loads(text))
