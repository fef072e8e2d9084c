"""torchtitan's own training under a frequency plan; tried with torchtitan 0.2.2 and 0.3.0.

    envplan solve h100-gpt3-175b-8stage --microbatches 8
    envplan apply plan.json
    PLAN=run.freqplan.json torchrun --nproc-per-node 8 examples/torchtitan_train.py \
        --module llama3 --config llama3_8b --parallelism.pipeline_parallel_degree 8 ...

All arguments are torchtitan's; 0.3 needs --training.disable_cuda_graphs, for nobody tells which
operation of a captured CUDA graph runs. torchtitan 0.3 builds the trainer that belongs to a
configuration, so that a subclass of Trainer is never used. What every trainer has is the method
`train`: it is wrapped here, in any version.
"""

from __future__ import annotations

import inspect
import logging
import os

import torchtitan.train
from torchtitan.train import Trainer

from envplan.runtime.torch import follow

PLAN = os.environ.get("PLAN", "run.freqplan.json")


def main(**options: object) -> None:
    """Train as torchtitan does.

    Args:
        options: for follow; none are needed on NVIDIA's GPUs.
    """
    train = Trainer.train

    def planned(trainer: Trainer) -> None:
        with follow(PLAN, trainer.pp_schedule, **options):
            train(trainer)

    Trainer.train = planned
    # Before 0.3, main asks for the class.
    wants_class = inspect.signature(torchtitan.train.main).parameters
    torchtitan.train.main(*([Trainer] if wants_class else []))


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    main()
