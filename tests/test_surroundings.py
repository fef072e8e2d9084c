"""Trainings in bad surroundings go on to their end, with a line at most, and leave no clock."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from envplan.pipeline import Pipeline
from fake_nvml import FakeNvml
from shim_helpers import frequency_plan

#: A training: {before}, five steps with {between} after the second, {after}.
_TRAINING = """
import os, signal, sys, time
from pathlib import Path
from envplan.runtime import Shim

plan, rank = "run.freqplan.json", 0
{before}

def train(shim, steps):
    for _ in range(steps):
        for key in shim.operations:
            shim.begin(*key)
            time.sleep(0.002)
            shim.end(*key)
        shim.step()

with Shim(plan, rank=rank{options}) as shim:
    train(shim, 2)
    {between}
    train(shim, 3)
{after}
print("trained", shim.steps, shim.mismatches, flush=True)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "job"
    folder.mkdir()
    plan = frequency_plan(Pipeline("1f1b", num_stages=2, num_microbatches=3))
    plan.save(folder / "run.freqplan.json")
    return folder


def train(
    folder: Path,
    fake: FakeNvml,
    *,
    before: str = "",
    between: str = "",
    after: str = "",
    options: str = "",
    mount: str = "",
) -> str:
    """Run a training; what it wrote to stderr. It must end well, and its clock be given back.

    Args:
        mount: shell commands that make it a file system of its own.
    """
    script = _TRAINING.format(before=before, between=between, after=after, options=options)
    command = [sys.executable, "-c", script]
    if mount:
        if shutil.which("unshare") is None:
            pytest.skip("needs unshare")
        command = ["unshare", "--mount", "sh", "-ec", f'{mount}\nexec "$0" "$@"', *command]
    ran = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, timeout=120
    )
    if mount and "unshare failed" in ran.stderr:
        pytest.skip("this user may not mount anything")
    assert ran.returncode == 0, ran.stderr
    assert "Traceback" not in ran.stderr
    assert ran.stdout.splitlines()[-1] == "trained 5 0", ran.stderr
    assert fake.wait_until_free(60) is not None
    return ran.stderr


def test_full_disk_costs_the_log_and_nothing_else(folder: Path, fake_nvml: FakeNvml) -> None:
    said = train(
        folder,
        fake_nvml,
        mount="mkdir logs; mount -t tmpfs -o size=4k none logs; "
        "head -c 4096 /dev/zero > logs/filler || true",
        options=", log='logs/run.jsonl'",
    )
    assert "No space left" in said
    assert len(fake_nvml.clock_changes()) > 2


@pytest.mark.parametrize("lock_file", ["new", "old"])
def test_full_lock_folder_costs_the_clocks_and_nothing_else(
    folder: Path, fake_nvml: FakeNvml, lock_file: str
) -> None:
    uuid = fake_nvml.gpu().uuid.decode()
    make = "mkdir -m 700 /run/envplan; "
    if lock_file == "old":
        make += f": > /run/envplan/{uuid}.lock; "
    size = "nr_inodes=2" if lock_file == "new" else "size=4k"
    said = train(
        folder,
        fake_nvml,
        mount=f"mount -t tmpfs -o {size} none /run; {make}"
        "head -c 4096 /dev/zero > /run/filler || true",
    )
    assert said.count("clocks are left alone: ") == 1
    assert "No space left" in said
    assert fake_nvml.clock_changes() == []


@pytest.mark.parametrize("kind", ["without a reader", "with one that is slow"])
def test_fifo_as_a_log_does_not_hold_up_training(
    folder: Path, fake_nvml: FakeNvml, kind: str
) -> None:
    before = "os.mkfifo('run.jsonl')"
    if kind != "without a reader":
        before += "; reader = os.open('run.jsonl', os.O_RDONLY | os.O_NONBLOCK)"
    said = train(folder, fake_nvml, before=before)
    assert "run.jsonl" in said
    assert len(fake_nvml.clock_changes()) > 2


def test_read_only_home_and_folder(folder: Path, fake_nvml: FakeNvml) -> None:
    said = train(
        folder,
        fake_nvml,
        mount='mount --bind . .; mount -o remount,ro,bind . .; cd "$PWD"',
        before="os.environ['HOME'] = os.getcwd()",
    )
    assert "run.jsonl" in said
    assert len(fake_nvml.clock_changes()) > 2


def test_descriptors_that_were_closed(folder: Path, fake_nvml: FakeNvml) -> None:
    said = train(folder, fake_nvml, between="os.closerange(3, 256)")
    assert "the run log is given up" in said


def test_standard_streams_that_were_closed(folder: Path, fake_nvml: FakeNvml) -> None:
    between = "keep = os.dup(1); os.close(0); os.close(1); os.close(2)"
    train(folder, fake_nvml, between=between, after="os.dup2(keep, 1); os.dup2(keep, 2)")


@pytest.mark.parametrize("seconds", [-86_400, 86_400])
def test_a_clock_that_jumps(folder: Path, fake_nvml: FakeNvml, seconds: int) -> None:
    between = (
        f"now = time.time; time.time = lambda: now() + {seconds}; "
        f"ns = time.time_ns; time.time_ns = lambda: ns() + {seconds} * 10**9"
    )
    train(folder, fake_nvml, between=between)
    assert len(fake_nvml.clock_changes()) > 2


@pytest.mark.parametrize("end", ["os._exit(0)", "sys.exit(0)", "shim.close(); os._exit(0)"])
def test_a_fork_after_follow_changes_nothing_for_the_training(
    folder: Path, fake_nvml: FakeNvml, end: str
) -> None:
    between = f"""
    child = os.fork()
    if not child:
        train(shim, 2)
        {end}
    _, status = os.waitpid(child, 0)
    assert status == 0, status
    """
    train(folder, fake_nvml, between=between)
    assert len(fake_nvml.clock_changes()) > 2


def test_two_shims_in_one_process_that_want_one_gpu(folder: Path, fake_nvml: FakeNvml) -> None:
    between = """
    other = Shim(plan, rank=0, log="other.jsonl")
    train(other, 2)
    other.close()
    """
    said = train(folder, fake_nvml, between=between)
    assert said.count("clocks are left alone: GPU 0: another training process of this user") == 1


def test_two_shims_in_one_process_of_two_gpus(folder: Path, fake_nvml: FakeNvml) -> None:
    between = """
    other = Shim(plan, rank=1, log="other.jsonl")
    train(other, 2)
    """
    train(folder, fake_nvml, between=between, after="train(other, 2); other.close()")
    assert len(fake_nvml.clock_changes(1)) > 2
    assert fake_nvml.locked(1) is None
