"""For tests of sites whose jobs run: folders of frontiers and of the plans that jobs train by."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from pathlib import Path
from queue import Empty, Queue
from typing import Any, NamedTuple

from cli_helpers import COMMAND, done
from envplan.profile import Profile, ProfileMetadata
from fake_nvml import FakeNvml

__all__ = ["Iteration", "Watch", "add_job", "one_stage_profile", "read_iterations"]


def add_job(folder: Path, name: str, profile: Profile, microbatches: int, *, rungs: int) -> None:
    """Put NAME.json, a frontier, and NAME.freqplan.json, from T_min to T_max, into a folder."""
    csv = folder.parent / f"{name}.csv"
    profile.save_csv(csv)
    plan = folder.parent / f"{name}.plan.json"
    done(f"frontier {csv} -m {microbatches} --slower -o {folder / name}.json")
    done(f"solve {csv} -m {microbatches} --slowdown 0 --ladder {rungs} -o {plan}")
    done(f"apply {plan} -o {folder / name}.freqplan.json")


def one_stage_profile(
    fake: FakeNvml, activity: float, scale_s: float, clocks: tuple[int, ...], *, stages: int = 1
) -> Profile:
    """A profile of operations that draw what fake GPUs of an activity draw.

    Args:
        fake: whose model is profiled.
        activity: of its GPUs.
        scale_s: of a forward at the highest clock.
        clocks: MHz, descending.
        stages: of the pipeline, all alike.
    """
    waiting_w = fake.model.uncapped_power_w(clocks[-1], activity)
    rows: list[tuple[object, ...]] = []
    for stage in range(stages):
        for instruction, work in (("forward", 1.0), ("backward", 2.0)):
            for mhz in clocks:
                time_s = round(scale_s * work * (0.3 + 0.7 * clocks[0] / mhz), 6)
                power_w = fake.model.uncapped_power_w(mhz, activity)
                rows.append((stage, instruction, mhz, time_s, round(power_w * time_s, 6)))
        rows.append((stage, "blocking", clocks[0], 1.0, waiting_w))
    metadata = ProfileMetadata(source="measured", gpu=fake.model.name)
    return Profile.from_rows(rows, name="live", metadata=metadata)


class Iteration(NamedTuple):
    """An iteration of a job, as its worker wrote it down."""

    number: int
    begin_s: float  # CLOCK_MONOTONIC
    begin_time: float  # since 1970
    followed_s: float


def read_iterations(path: Path) -> list[Iteration]:
    """The iterations in a worker's file, as far as lines are whole."""
    text = path.read_text() if path.exists() else ""
    whole_lines, _, _ = text.rpartition("\n")
    return [Iteration(*json.loads(line)) for line in whole_lines.splitlines()]


class Watch:
    """`envplan site --watch --json` in a process of its own."""

    def __init__(self, folder: Path, power_w: float, *more: str) -> None:
        command = [str(COMMAND), "site", "jobs", "--power", f"{power_w}W", "--orders", "orders"]
        command += ["--watch", "signal", "--every", "0.1", "--json", *more]
        self._errors = (folder / "watch.err").open("w")
        self.process = subprocess.Popen(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )
        self._events: Queue[dict[str, Any]] = Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._events.put(json.loads(line))

    def wait_for(self, kind: str) -> dict[str, Any]:
        """The next event of a kind; others before it are passed over."""
        while True:
            try:
                event = self._events.get(timeout=120)
            except Empty:
                raise AssertionError(f"no {kind} event") from None
            if event["event"] == kind:
                return event

    def interrupt(self) -> int:
        """Ctrl-C; the exit code."""
        self.process.send_signal(signal.SIGINT)
        code = self.process.wait(60)
        self._reader.join(10)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._errors.close()
        return code
