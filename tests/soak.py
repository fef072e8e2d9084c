"""Long runs: `make soak`. Half an hour, or as long as --minutes says; 0.5 is the short form.

For a third of the time a shim follows a plan, for 50,000 iterations or more in half an hour, over
fake GPUs whose driver fails at random, hangs now and then and is slow, with a log that is rotated.
Then a job of 8 ranks on two nodes trains for a day's worth of iterations, and is killed in all ways
meanwhile (soak_cluster.py). After that sweeps of 10,000 points are killed every minute or sooner,
each of them until it is done. Prints a line for each promise and exits with 1 if one is broken.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from itertools import count
from pathlib import Path

import pytest

from cli_helpers import COMMAND, small_profile
from envplan.pipeline import Pipeline
from envplan.runtime import Shim
from envplan.runtime.run_log_reader import read_run_log
from envplan.sweep import SweepResult, read_config, run_sweep
from envplan.sweep.running import journal_of
from fake_nvml import FakeNvml, open_fake_nvml
from shim_helpers import frequency_plan
from soak_cluster import DAY, RANKS, soak_cluster

#: In the third of half an hour.
ITERATIONS = 50_000
POINTS = 10_000
LOG_LIMIT = 4 * 2**20
#: What a process may take more at the end than after the first tenth, KiB.
GROWTH_KIB = 2048

broken = 0


def promise(kept: bool, words: str) -> None:
    global broken
    broken += not kept
    print(f"{'kept  ' if kept else 'BROKEN'}  {words}", flush=True)


def resident_kib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0])  # not the state of the stand-in, a file


def trouble(fake: FakeNvml, stop: threading.Event, chance: random.Random) -> None:
    """Let the driver hang for a while every few seconds, and be slow otherwise."""
    while not stop.wait(chance.uniform(2, 6)):
        fake.gpu().lock_delay_ns = chance.choice([0, 0, 1_000_000, 20_000_000])
        fake.hang("lock")
        stop.wait(chance.uniform(0, 1.5))
        fake.hang()


def follow(folder: Path, fake: FakeNvml, seconds: float) -> None:
    chance = random.Random(17)
    for kind in ("lock", "reset", "energy", "clock"):
        fake.fail(kind, probability=0.02)
    plan = frequency_plan(Pipeline("1f1b", num_stages=2, num_microbatches=3))
    stop = threading.Event()
    troubler = threading.Thread(target=trouble, args=(fake, stop, chance))
    troubler.start()
    threads = set(threading.enumerate())
    log = folder / "run.jsonl"
    heard = 0

    def on_step(_: object) -> None:
        nonlocal heard
        heard += 1

    deadline = time.monotonic() + seconds
    early: list[int] = []
    with Shim(plan, rank=0, log=log, log_limit=LOG_LIMIT, on_step=on_step) as shim:
        guard = shim.guard
        assert guard is not None
        keys = shim.operations
        pids = {"shim": os.getpid(), "guard": guard.pid}
        while time.monotonic() < deadline:
            for key in keys:
                shim.begin(*key)
                time.sleep(0.0002)
                shim.end(*key)
            shim.step()
            if not early and time.monotonic() > deadline - 0.8 * seconds:
                early = [resident_kib(pid) for pid in pids.values()]
        late = [resident_kib(pid) for pid in pids.values()]
        waiting = shim.num_undecided_steps + len(guard.lags) + len(guard.readings)
    stop.set()
    troubler.join()
    for who, before, after in zip(pids, early, late, strict=True):
        grown = after - before
        promise(grown < GROWTH_KIB, f"{who}: {before} KiB after a fifth, {grown:+d} KiB at the end")
    least = int(min(1.0, seconds / 600) * ITERATIONS)
    promise(shim.steps >= least, f"{shim.steps} steps, {least} or more in {seconds:.0f} s")
    promise(waiting < 1000, f"{waiting} steps, requests and readings waited at the end")
    deadline = time.monotonic() + 10.0
    while (left := set(threading.enumerate()) - threads) and time.monotonic() < deadline:
        time.sleep(0.01)
    promise(not left, f"{len(left)} threads left {[thread.name for thread in left]}")
    promise(fake.wait_until_free(10.0) is not None, "the clock was given back")
    dropped = shim.dropped_lines  # events as well
    promise(
        shim.steps - dropped <= heard <= shim.steps,
        f"{heard} of {shim.steps} steps handed over, {dropped} lines of the log dropped",
    )
    files = sorted(folder.glob("run.jsonl*"))
    lines = sum(1 for _ in read_run_log(files))
    size = max(file.stat().st_size for file in files)
    promise(
        size < LOG_LIMIT + 2**16, f"{lines} lines in {len(files)} logs, the largest {size} bytes"
    )
    promise(shim.mismatches == 0, f"{shim.mismatches} mismatches, {shim.clock_errors} clock errors")


def sweep(folder: Path, seconds: float, points: int) -> None:
    """One sweep after the other, each killed at random moments until it is done."""
    chance = random.Random(17)
    folder.mkdir()
    small_profile(clocks=(1740, 1260, 780)).save_csv(folder / "profile.csv")
    config = folder / "sweep.toml"
    slowdowns = [k / 100 for k in range(points // 2)]
    lists = {"profiles": ["profile.csv"], "microbatches": [1, 2], "slowdowns": slowdowns}
    lines = [f"{name} = {json.dumps(values)}\n" for name, values in lists.items()]
    config.write_text("".join(["[grid]\n", *lines]))
    whole = _table(run_sweep(read_config(config), folder / "whole.journal", jobs=2))
    command = [str(COMMAND), "sweep", config.name, "--jobs", "2", "--quiet"]
    sweeps, kills, same, deadline = 0, 0, True, time.monotonic() + seconds
    while not sweeps or time.monotonic() < deadline:
        journal_of(folder / "sweep.csv").unlink(missing_ok=True)
        status = -signal.SIGKILL
        # Each time it has longer, so that it comes to its end.
        for limit in count(1):
            process = subprocess.Popen(command, cwd=folder, start_new_session=True)
            try:
                status = process.wait(chance.uniform(0.1, 1.0) * min(60.0, limit * seconds / 100))
                break
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                kills += 1
        killed = run_sweep(read_config(config), journal_of(folder / "sweep.csv"), jobs=2)
        same &= (status, killed.computed) == (0, 0) and _table(killed) == whole
        sweeps += 1
    promise(
        same and kills > 0,
        f"{sweeps} sweeps of {points} points, killed {kills} times, end with the table of one that "
        "was not",
    )


def _table(swept: SweepResult) -> list[dict[str, object]]:
    return [row.model_dump(exclude={"trace_s", "wall_s"}) for row in swept.rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    seconds = 60 * parser.parse_args().minutes
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        fake = open_fake_nvml(folder, patch)
        follow(folder, fake, seconds / 3)
        fake.close()
        (folder / "nodes").mkdir()
        fake = open_fake_nvml(folder / "nodes", patch, count=RANKS)
        soak_cluster(folder / "job", fake, int(min(1.0, seconds / 1800) * DAY), promise)
        fake.close()
        points = min(POINTS, int(seconds * 20))
        sweep(folder / "sweep", seconds / 3, points)
    return min(broken, 1)


if __name__ == "__main__":
    sys.exit(main())
