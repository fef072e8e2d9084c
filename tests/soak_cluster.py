"""A day of a job of 8 ranks on two nodes, in which everything is killed again and again.

Two services `envplan guard` run all the time, one for each node. Ranks fail in iterations, are
killed alone, with their guards, or lose these, and whole nodes are cancelled as Slurm does it.
Whatever ended is started again until every rank has done its iterations.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from cli_helpers import COMMAND
from envplan.devices.locks import LockFile
from envplan.pipeline import Pipeline
from fake_nvml import FakeNvml
from shim_helpers import frequency_plan, logged_lines

RANKS = 8
RANKS_PER_NODE = 4
#: A day of iterations of 8 s, as large models have them.
DAY = 10_800
#: From SIGTERM to SIGKILL, s; Slurm waits longer.
CANCEL_S = 0.3
WORKER = Path(__file__).with_name("soak_rank.py")


class Run(NamedTuple):
    """A run of a rank as its log tells it.

    Attributes:
        num_steps: that have a line.
        end: its last line; None where it was killed.
        num_iterations: by its last line, or by the first one of the next run where it was killed;
            None: nothing says it.
    """

    num_steps: int = 0
    end: dict[str, object] | None = None
    num_iterations: int | None = None


class Cluster:
    """The ranks of a job, their guards, and two services."""

    def __init__(self, folder: Path, num_iterations: int, chance: random.Random) -> None:
        self.events: Counter[str] = Counter()
        self._folder = folder
        self._num_iterations = num_iterations
        self._chance = chance
        plan = frequency_plan(Pipeline("1f1b", num_stages=RANKS, num_microbatches=2))
        plan.save(folder / "run.freqplan.json")
        self._errors = (folder / "errors").open("w")
        self.services = [self._run([str(COMMAND), "guard"]) for _ in range(2)]
        self._ranks = [self._start(rank) for rank in range(RANKS)]

    def _run(self, command: list[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command, cwd=self._folder, stdout=subprocess.DEVNULL, stderr=self._errors
        )

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        arguments = ["run.freqplan.json", str(rank), str(self._num_iterations)]
        return self._run([sys.executable, str(WORKER), *arguments])

    def ledger(self, rank: int) -> list[str]:
        path = self._folder / f"{rank}.ledger"
        return path.read_text().splitlines() if path.exists() else []

    def is_done(self) -> bool:
        """Start what has ended too early; whether everything is done."""
        for rank, process in enumerate(self._ranks):
            ended_early = process.poll() is not None and not self._has_finished(rank)
            if ended_early:
                self._ranks[rank] = self._start(rank)
                self.events["restarts"] += 1
        return all(self._has_finished(rank) for rank in range(RANKS))

    def _has_finished(self, rank: int) -> bool:
        return len(self.ledger(rank)) >= self._num_iterations

    def strike(self) -> None:
        """Let something happen."""
        what = self._chance.choice(
            ["rank killed", "guard killed", "both killed", "rank asked to end", "scancel"]
        )
        rank = self._chance.randrange(RANKS)
        self.events[what] += 1
        if what == "scancel":
            self._cancel(rank // RANKS_PER_NODE)
            return
        pid = self._ranks[rank].pid
        guards = _children(pid)
        if what in ("guard killed", "both killed"):
            _signal(guards, signal.SIGKILL)
        if what in ("rank killed", "both killed"):
            _signal([pid], signal.SIGKILL)
        if what == "rank asked to end":
            _signal([pid], signal.SIGTERM)

    def _cancel(self, node: int) -> None:
        """End all processes of a node's ranks as Slurm does: ask all, and kill what is left."""
        ranks = range(RANKS)[node * RANKS_PER_NODE : (node + 1) * RANKS_PER_NODE]
        pids = [self._ranks[rank].pid for rank in ranks]
        everything = [*pids, *(child for pid in pids for child in _children(pid))]
        _signal(everything, signal.SIGTERM)
        time.sleep(CANCEL_S)
        _signal(everything, signal.SIGKILL)

    def close(self) -> bool:
        """Wait for the ranks, and end the services; whether all of these still ran."""
        for process in self._ranks:
            process.wait(120)
        return all(service.poll() is None for service in self.services)

    def end_services(self) -> None:
        for service in self.services:
            service.terminate()
        for service in self.services:
            service.wait(60)
        self._errors.close()

    def errors(self) -> str:
        return (self._folder / "errors").read_text()

    def runs(self, rank: int) -> list[Run]:
        """The runs of a rank, as its log tells them."""
        runs: list[Run] = []
        for event in logged_lines(self._folder / f"{rank}.jsonl"):
            if event["event"] == "start":
                runs.append(Run())
            elif event["event"] == "step":
                runs[-1] = runs[-1]._replace(num_steps=runs[-1].num_steps + 1)
            elif event["event"] == "end":
                num_iterations = sum(event["iterations"].values())
                runs[-1] = runs[-1]._replace(end=event, num_iterations=num_iterations)
            elif event["event"] == "killed":
                runs[-1] = runs[-1]._replace(num_iterations=sum(event["iterations"].values()))
        return runs


def _children(pid: int) -> list[int]:
    """The children of all threads of a process."""
    children: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                children += map(int, (task / "children").read_text().split())
    return children


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def soak_cluster(
    folder: Path, fake: FakeNvml, num_iterations: int, promise: Callable[[bool, str], None]
) -> None:
    """Run it, and say of each promise whether it was kept."""
    chance = random.Random(17)
    folder.mkdir()
    cluster = Cluster(folder, num_iterations, chance)
    next_strike = time.monotonic() + 5.0
    while not cluster.is_done():
        time.sleep(0.2)
        if time.monotonic() >= next_strike:
            cluster.strike()
            next_strike = time.monotonic() + chance.uniform(0.5, 12.0)
    services_lived = cluster.close()
    free_after = fake.wait_until_free(60.0)
    cluster.end_services()

    events = ", ".join(f"{count} {what}" for what, count in sorted(cluster.events.items()))
    counts = [Counter(cluster.ledger(rank)) for rank in range(RANKS)]
    num_failed = sum(count["failed"] for count in counts)
    promise(
        all(count.total() == num_iterations for count in counts),
        f"{RANKS} ranks, {num_iterations} iterations each, {num_failed} failed by an exception; "
        f"{events}",
    )
    runs = [cluster.runs(rank) for rank in range(RANKS)]
    ended = [run for of_rank in runs for run in of_rank if run.end is not None]
    promise(
        all(map(_is_whole, ended)),
        f"{len(ended)} runs that ended by themselves have every iteration in their log"
        f"{''.join(f'; not: {run}' for run in ended if not _is_whole(run))}",
    )
    num_killed = sum(map(len, runs)) - len(ended)
    num_logged = sum(run.num_steps for of_rank in runs for run in of_rank)
    lost = sum(count["followed"] for count in counts) - num_logged
    promise(
        lost <= 200 * max(1, num_killed),
        f"{num_killed} runs that were killed: {lost} followed iterations have no line of their own",
    )
    num_unknown = sum(run.num_iterations is None for of_rank in runs for run in of_rank)
    num_counted = sum(run.num_iterations or 0 for of_rank in runs for run in of_rank)
    num_in_ledgers = sum(count.total() for count in counts)
    # A run that ends between an iteration and its line in the ledger does it once more.
    promise(
        num_unknown == 0 and 0 <= num_counted - num_in_ledgers <= sum(map(len, runs)),
        f"{num_in_ledgers} iterations are in the ledgers, {num_counted} are counted in the logs; "
        f"{num_unknown} runs without a count",
    )
    promise(services_lived, "both services lived on")
    promise("Traceback" not in cluster.errors(), "no traceback of any process")
    promise(free_after is not None, "no clock was left")
    promise(not _marks(fake), "no mark was left")


def _is_whole(run: Run) -> bool:
    """Whether a log that has an end has everything: all iterations by outcome, and their lines.

    SIGTERM ends a rank by an exception, which may come while `step` counts: one iteration is then
    counted by its outcome only.
    """
    assert run.end is not None
    iterations = run.end["iterations"]
    assert isinstance(iterations, dict)
    steps, dropped = run.end["steps"], run.end["dropped"]
    assert isinstance(steps, int)
    assert isinstance(dropped, int)
    num_counted_only = sum(iterations.values()) - steps
    num_missing = iterations.get("followed", 0) - run.num_steps - dropped
    return num_counted_only in (0, 1) and 0 <= num_missing <= num_counted_only


def _marks(fake: FakeNvml) -> list[str]:
    left = []
    for index in range(RANKS):
        uuid = fake.gpu(index).uuid.decode()
        with LockFile(uuid) as lock:
            left += [uuid] if lock.mark is not None else []
    return left
