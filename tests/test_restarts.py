"""Trainings that their launcher starts again after a rank was killed: torchrun's elastic restart,
and Ray Train's. Both are the real ones, and train with PyTorch on CPUs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from envplan.pipeline import Pipeline
from fake_nvml import FakeNvml, fake_nvml
from shim_helpers import A40, frequency_plan, logged_lines

pytest.importorskip("torch", reason="torch is not installed: pip install torch")

from restarted_training import KILLED_STEP, STEPS
from torch_worker import MICROBATCHES

__all__ = ["fake_nvml"]

RANKS = 2
PIPELINE = Pipeline("1f1b", num_stages=RANKS, num_microbatches=MICROBATCHES)
HERE = Path(__file__).parent


#: A store for each attempt: in one that attempts share, gloo finds addresses of the one before.
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def with_torchrun(folder: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    options = ["--nproc-per-node", str(RANKS), "--max-restarts", "1"]
    done = subprocess.run(
        [*launcher, *options, str(HERE / "restarted_training.py"), str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **OWN_STORE},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-8000:]


RAY_TRAINING = """
import sys
from pathlib import Path

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

def train(config):
    sys.path.insert(0, config["tests"])
    from restarted_training import train
    train(Path(config["folder"]))

folder, tests, ranks = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
ray.init(num_cpus=ranks + 1, include_dashboard=False, log_to_driver=False)
TorchTrainer(
    train,
    train_loop_config={"folder": str(folder), "tests": tests},
    torch_config=TorchConfig(backend="gloo", timeout_s=60),
    scaling_config=ScalingConfig(num_workers=ranks),
    run_config=RunConfig(
        storage_path=str(folder / "ray"), failure_config=FailureConfig(max_failures=1)
    ),
).fit()
"""


def with_ray(folder: Path) -> None:
    if find_spec("ray") is None:
        pytest.skip("ray is not installed: pip install 'ray[train]'")
    done = subprocess.run(
        [sys.executable, "-c", RAY_TRAINING, str(folder), str(HERE), str(RANKS)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-8000:]


@pytest.mark.slow
@pytest.mark.parametrize("launch", [with_torchrun, with_ray])
def test_a_job_that_is_started_again_follows_again(
    fake_nvml: FakeNvml, tmp_path: Path, launch: Callable[[Path], None]
) -> None:
    frequency_plan(PIPELINE, gpu=A40).save(tmp_path / "run.freqplan.json")
    launch(tmp_path)
    assert (tmp_path / "killed").exists()
    for rank in range(RANKS):
        assert (tmp_path / f"done.{rank}").exists()
        of_rank = [line for line in logged_lines(tmp_path / "run.jsonl") if line["rank"] == rank]
        starts = [line for line in of_rank if line["event"] == "start"]
        assert len(starts) == 2
        steps = [line for line in of_rank if line["event"] == "step"]
        # The rank that is killed loses what it has not yet written of its first attempt.
        assert [line["step"] for line in steps[-STEPS:]] == list(range(STEPS))
        assert len(steps) - STEPS <= KILLED_STEP
        assert {line["mismatches"] for line in steps} == {0}
        assert {line["asked"] for line in steps[-STEPS:]} == {len(PIPELINE.operations) // RANKS}
    assert fake_nvml.wait_until_free(10) is not None
