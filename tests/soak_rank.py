"""A rank of the long run in soak.py: it trains on from where it was, however it was ended.

    python soak_rank.py PLAN RANK NUM_ITERATIONS

Every iteration that is over is a line in RANK.ledger, written at once: "followed", or "failed" for
one that an exception ended. The run log is RANK.jsonl.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

from envplan.runtime import Shim

#: Of an exception in an iteration.
FAILURE_PROBABILITY = 0.005
OPERATION_S = 0.0005


class TrainingError(Exception):
    """Training failed in an iteration, and goes on with the next."""


def train_iteration(shim: Shim, fails: bool) -> None:
    for number, key in enumerate(shim.operations):
        shim.begin(*key)
        time.sleep(OPERATION_S)
        if fails and number == len(shim.operations) // 2:
            raise TrainingError
        shim.end(*key)


def main(plan: str, rank: int, num_iterations: int) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    ledger = os.open(f"{rank}.ledger", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    num_done = Path(f"{rank}.ledger").read_text().count("\n")
    chance = random.Random(1000 * rank + num_done)
    with Shim(plan, rank=rank, log=f"{rank}.jsonl") as shim:
        for _ in range(num_done, num_iterations):
            outcome = b"followed\n"
            try:
                train_iteration(shim, fails=chance.random() < FAILURE_PROBABILITY)
            except TrainingError:
                outcome = b"failed\n"
            shim.step()
            os.write(ledger, outcome)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
