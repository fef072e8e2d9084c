"""A training for tests/test_slurm.py: follows a plan without a framework, some iterations long.

    torchrun ... slurm_training.py

Each iteration is appended to $RECORD as a line "job rank iteration".
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from envplan.runtime import Shim


def main() -> None:
    rank = int(os.environ["RANK"])
    iterations = int(os.environ.get("ITERATIONS", "20"))
    record = Path(os.environ["RECORD"])
    with Shim(os.environ["PLAN"], log=record.with_suffix(f".rank{rank}.jsonl")) as shim:
        for iteration in range(iterations):
            for key in shim.operations:
                shim.begin(*key)
                time.sleep(0.01)
                shim.end(*key)
            shim.step()
            with record.open("a") as file:
                file.write(f"{os.environ['SLURM_JOB_ID']} {rank} {iteration}\n")


if __name__ == "__main__":
    main()
