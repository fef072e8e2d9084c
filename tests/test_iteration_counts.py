"""Iterations are counted, though their process is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from envplan.pipeline import Pipeline
from envplan.runtime import Shim
from envplan.runtime.iteration_counts import IterationCounts
from envplan.runtime.plan_follower import IterationOutcome
from envplan.runtime.run_log_reader import iteration_counts_of_plan, read_run_log
from fake_nvml import FakeNvml, fake_nvml, wait_for
from shim_helpers import frequency_plan, logged_lines

__all__ = ["fake_nvml"]

#: Runs three iterations and one without operations, says so, and waits to be killed.
TRAINING = """
import sys, time
from envplan.runtime import Shim

shim = Shim("run.freqplan.json", rank=0, world_size=1)
for _ in range(3):
    for key in shim.operations:
        shim.begin(*key)
        shim.end(*key)
    shim.step()
shim.step()
print("ran", flush=True)
time.sleep(600)
"""


def test_the_iterations_of_a_killed_run_are_told_by_the_next_one(
    fake_nvml: FakeNvml, tmp_path: Path
) -> None:
    frequency_plan(Pipeline("1f1b", 1, 2)).save(tmp_path / "run.freqplan.json")
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINING], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ran\n"
    log = tmp_path / "run.jsonl"
    wait_for(lambda: '"start"' in log.read_text())  # a thread writes it
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with Shim(tmp_path / "run.freqplan.json", rank=0, world_size=1) as shim:
        for key in shim.operations:
            shim.begin(*key)
            shim.end(*key)
        shim.step()
    lines = logged_lines(tmp_path / "run.jsonl")
    kinds = [line["event"] for line in lines if line["event"] != "step"]
    assert kinds == ["start", "killed", "start", "end"]
    (killed,) = [line for line in lines if line["event"] == "killed"]
    assert killed["iterations"] == {"followed": 3, "no operation": 1}
    read = list(read_run_log([tmp_path / "run.jsonl"]))
    assert iteration_counts_of_plan(read, "ab" * 32) == {"followed": 4, "no operation": 1}
    with Shim(tmp_path / "run.freqplan.json", rank=0, world_size=1):
        pass  # the last run was not killed
    assert [line["event"] for line in logged_lines(tmp_path / "run.jsonl")].count("killed") == 1


def test_counts_are_shared_by_no_two_living_runs(tmp_path: Path) -> None:
    path = tmp_path / "counts"
    first = IterationCounts(path)
    first.add(IterationOutcome.FOLLOWED)
    second = IterationCounts(path)
    assert second.of_killed_run is None
    second.add(IterationOutcome.CUT_SHORT)
    assert second.by_outcome() == {"cut short": 1}
    assert first.by_outcome() == {"followed": 1}
    second.close()
    assert path.exists()
    first.close()
    assert not path.exists()


@pytest.mark.parametrize("content", [b"", b"envplan1", bytes(48), bytes(4096), b"x" * 48])
def test_a_file_of_something_else_counts_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "counts").write_bytes(content)
    counts = IterationCounts(tmp_path / "counts")
    assert counts.of_killed_run is None
    counts.add(IterationOutcome.FOLLOWED)
    assert counts.by_outcome() == {"followed": 1}


def test_without_a_place_iterations_are_counted_all_the_same(tmp_path: Path) -> None:
    for path in (None, tmp_path / "missing" / "counts", tmp_path):
        counts = IterationCounts(path)
        counts.add(IterationOutcome.OTHER_ORDER)
        assert counts.by_outcome() == {"other order of operations": 1}
        counts.close()
