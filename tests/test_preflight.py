"""`envplan preflight`: what would keep a plan from being followed is found before training."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from cli_helpers import Ran, envplan, told
from envplan.enforce.freqplan import StagePower
from envplan.pipeline import Pipeline
from envplan.runtime.preflight import TESTED, Status, check_frameworks
from fake_nvml import GPU_IS_LOST, FakeNvml
from shim_helpers import A40, end, frequency_plan, holding, training

PIPELINE = Pipeline("1f1b", num_stages=2, num_microbatches=3)


@pytest.fixture
def plan_file(tmp_path: Path, fake_nvml: FakeNvml) -> Path:
    return saved(tmp_path)


def saved(folder: Path, **options: Any) -> Path:
    plan = frequency_plan(PIPELINE, gpu=options.pop("gpu", A40), **options)
    power = [StagePower(highest_w=250.0, profile_limit_w=300.0)] * 2
    path = folder / "run.freqplan.json"
    plan.model_copy(update={"stage_power": power}).save(path)
    return path


def failed(path: Path, *options: object) -> list[str]:
    """The checks that fail, with the GPU."""
    ran = envplan("preflight", path, *options)
    document = told_anyway(path, *options)
    assert ran.code == (0 if document["would_follow"] else 1)
    return [f"{c['gpu']}: {c['name']}" for c in document["checks"] if c["status"] == "failed"]


def told_anyway(path: Path, *options: object) -> Any:
    import json

    return json.loads(envplan("preflight", path, *options, "--json").out)


def detail(path: Path, name: str, gpu: int | None = 0) -> str:
    checks = told_anyway(path)["checks"]
    (found,) = [c["detail"] for c in checks if c["name"] == name and c["gpu"] == gpu]
    return str(found)


def test_a_node_on_which_the_plan_would_be_followed(plan_file: Path, fake_nvml: FakeNvml) -> None:
    ran = envplan("preflight", plan_file)
    assert ran.code == 0, ran.err
    assert ran.out.splitlines()[-1] == "the plan would be followed"
    assert failed(plan_file) == []
    assert fake_nvml.calls(kind="lock") == fake_nvml.calls(kind="reset") == []


def test_no_rights(plan_file: Path, fake_nvml: FakeNvml) -> None:
    fake_nvml.gpu(1).permission = 0
    assert failed(plan_file) == ["1: rights"]
    assert "this user may not set clocks" in detail(plan_file, "rights", 1)


def test_no_driver(plan_file: Path, fake_nvml: FakeNvml) -> None:
    fake_nvml.fail("init")
    assert failed(plan_file) == ["None: driver"]


def test_a_gpu_that_is_lost_does_not_hide_the_others(plan_file: Path, fake_nvml: FakeNvml) -> None:
    fake_nvml.fail("handle", GPU_IS_LOST, index=1)
    fake_nvml.gpu(0).mig = 1
    assert failed(plan_file) == ["0: MIG", "1: GPU"]


def test_another_gpu_model(tmp_path: Path, fake_nvml: FakeNvml) -> None:
    path = saved(tmp_path, gpu="NVIDIA A100-SXM4-80GB")
    assert failed(path) == ["0: model and clocks", "1: model and clocks"]


def test_a_clock_that_the_gpu_does_not_have(tmp_path: Path, fake_nvml: FakeNvml) -> None:
    path = saved(tmp_path, clocks=(1740, 1501))
    assert "1501 MHz" in detail(path, "model and clocks")


def test_fewer_gpus_than_the_plan_uses(plan_file: Path, fake_nvml: FakeNvml) -> None:
    fake_nvml.state.num_gpus = 1
    assert failed(plan_file) == ["1: GPU"]


def test_a_power_limit_that_is_too_low(plan_file: Path, fake_nvml: FakeNvml) -> None:
    fake_nvml.gpu(0).power_limit = 280.0
    assert failed(plan_file) == []
    assert "lower than the profile's 300 W" in detail(plan_file, "power limit")
    fake_nvml.gpu(0).power_limit = 200.0
    assert failed(plan_file) == ["0: power limit"]


def test_somebody_elses_process(plan_file: Path, fake_nvml: FakeNvml) -> None:
    fake_nvml.compute(1, index=1)
    assert failed(plan_file) == ["1: other processes"]
    assert detail(plan_file, "other processes", 1).startswith("process 1 of root computes on it")
    fake_nvml.compute(2**22 + 1, index=1)
    assert detail(plan_file, "other processes", 1).startswith(f"process {2**22 + 1} computes")


def test_another_training_of_ours(plan_file: Path, fake_nvml: FakeNvml) -> None:
    guard = holding(fake_nvml, 1)
    assert failed(plan_file) == ["1: other locks"]
    assert f"its guard is process {guard.pid}" in detail(plan_file, "other locks", 1)
    guard.close()
    assert failed(plan_file) == []


def test_a_clock_that_a_killed_training_left(plan_file: Path, fake_nvml: FakeNvml) -> None:
    import signal

    process, guard = training(fake_nvml)
    os.kill(process.pid, signal.SIGSTOP)
    os.kill(guard, signal.SIGKILL)
    end(process)
    assert fake_nvml.locked() == 1005
    assert failed(plan_file) == []
    assert "the next guard gives it back" in detail(plan_file, "other locks")


def test_an_administrators_lock_is_said(plan_file: Path, fake_nvml: FakeNvml) -> None:
    fake_nvml.gpu(0).locked = 1005
    assert failed(plan_file) == []
    assert "1005 MHz" in detail(plan_file, "other locks")


def test_the_file_is_the_one_that_was_sent(plan_file: Path, fake_nvml: FakeNvml) -> None:
    sha256 = hashlib.sha256(plan_file.read_bytes()).hexdigest()
    assert failed(plan_file, "--sha256", sha256) == []
    assert failed(plan_file, "--sha256", "0" * 64) == ["None: file"]


def test_a_node_is_checked_for_its_own_ranks(
    tmp_path: Path, fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = frequency_plan(PIPELINE, dp=2, gpu=A40)
    ranks = [rank.model_copy(update={"device": rank.rank % 2}) for rank in plan.ranks]
    path = tmp_path / "run.freqplan.json"
    plan.model_copy(update={"ranks": ranks}).save(path)
    assert told("preflight", path, cwd=tmp_path)["ranks"] == [0, 1, 2, 3]
    assert told("preflight --node 1", path)["ranks"] == [2, 3]
    monkeypatch.setenv("SLURM_NODEID", "0")
    assert told("preflight", path)["ranks"] == [0, 1]
    ran = envplan("preflight", path, "--node", 2)
    assert ran.code == 2
    assert "has 2 nodes of 2 GPUs" in ran.err


def test_what_is_no_frequency_plan_is_one_line(tmp_path: Path, fake_nvml: FakeNvml) -> None:
    (tmp_path / "x.json").write_text("{}")
    ran: Ran = envplan("preflight", tmp_path / "x.json")
    assert ran.code == 2
    assert ran.err.count("\n") == 1


def test_a_framework_that_was_not_tested_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TESTED, "torch", ((1, 0), (1, 1)))
    (check,) = [c for c in check_frameworks() if c.detail.startswith("torch ")]
    assert check.status is Status.WARNING
    assert f"torch {version('torch')} is not known" in check.detail


def test_tested_versions_are_those_of_the_page() -> None:
    page = (Path(__file__).parents[1] / "docs" / "compatibility.md").read_text(encoding="utf-8")
    names = {"PyTorch": "torch", "torchtitan": "torchtitan"}
    names |= {"Megatron-core": "megatron-core", "DeepSpeed": "deepspeed"}
    versions: dict[str, list[tuple[int, int]]] = {}
    for name, major, minor in re.findall(r"^\| (\S+) \| (\d+)\.(\d+)", page, re.MULTILINE):
        if name in names:
            versions.setdefault(names[name], []).append((int(major), int(minor)))
    assert {name: (min(found), max(found)) for name, found in versions.items()} == TESTED


def test_preflight_needs_no_numpy(plan_file: Path) -> None:
    code = (
        "import sys\n"
        "from envplan.cli.app import run\n"
        f"assert run(['preflight', {str(plan_file)!r}, '--quiet']) == 0\n"
        "print([name for name in ('numpy', 'envplan._kernel', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_following_says_which_framework_was_not_tested(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("torch")
    from envplan.runtime import frameworks

    def version_of(name: str) -> str:
        if name == "torch":
            return "9.1"
        raise PackageNotFoundError(name)

    monkeypatch.setattr("envplan.runtime.preflight.version", version_of)
    frameworks._warn_of_unknown_versions()
    (line,) = [record.message for record in caplog.records]
    assert line.startswith("torch 9.1 is not known: tested from")
