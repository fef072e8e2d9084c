"""A training of two ranks for tests/test_restarts.py: one rank is killed once, and all start again.

    torchrun --nproc-per-node 2 --max-restarts 1 restarted_training.py FOLDER

It trains with PyTorch's own 1F1B and follows FOLDER/run.freqplan.json.
"""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from envplan.runtime.torch import follow
from torch_worker import Job

STEPS, KILLED_RANK, KILLED_STEP = 6, 1, 3


def train(folder: Path) -> None:
    """Train; in the first of all attempts one rank kills itself in the middle.

    torch.distributed has been initialized, as training scripts do.
    """
    killed = folder / "killed"
    job = Job("1f1b")
    with follow(folder / "run.freqplan.json", job.schedule, every_request=True):
        for step in range(STEPS):
            if dist.get_rank() == KILLED_RANK and step == KILLED_STEP and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            job.step(step)
    (folder / f"done.{dist.get_rank()}").touch()


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    train(Path(sys.argv[1]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
