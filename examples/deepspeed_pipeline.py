"""A small model trained by DeepSpeed's pipeline engine under a frequency plan, on GPUs or CPUs.

    envplan solve a40-gpt3-1.3b-4stage --microbatches 8
    envplan apply plan.json
    torchrun --nproc-per-node 4 examples/deepspeed_pipeline.py run.freqplan.json

Where there is no NVIDIA GPU, `--backend modelled` lets it follow the plan on modelled ones. The
model is not that of the profile: see envplan profile for how to measure your own.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from envplan.runtime.deepspeed import follow

try:
    import deepspeed
    from deepspeed.pipe import PipelineModule
except ImportError as error:
    sys.exit(f"this example needs DeepSpeed ({error}): pip install deepspeed")

WIDTH, MICROBATCHES, MICROBATCH_SIZE = 256, 8, 8


def main() -> None:
    options = arguments()
    engine = pipeline_engine()
    data = batches()

    # These two lines are all that envplan needs: the plan, and the engine that follows it.
    with follow(options.plan, engine, **backend(options.backend)) as shim:
        for step in range(options.steps):
            loss = engine.train_batch(data)
            if dist.get_rank() == 0 and step % 10 == 0:
                print(f"step {step}: loss {float(loss):.4f}")
    if shim.mismatches or shim.clock_errors:
        print(f"rank {shim.rank}: {shim.mismatches} mismatches, {shim.clock_errors} clock errors")
    dist.destroy_process_group()


def pipeline_engine() -> Any:
    """DeepSpeed's engine for a model of one layer a stage."""
    if not torch.cuda.is_available():
        # Saves compiling an extension for collectives on CPUs, which a pipeline does not use.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(0)
    stages = dist.get_world_size()
    layers = [
        torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()) for _ in range(stages)
    ]
    model = PipelineModule(layers, num_stages=stages, loss_fn=torch.nn.functional.mse_loss)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        config={
            "train_micro_batch_size_per_gpu": MICROBATCH_SIZE,
            "gradient_accumulation_steps": MICROBATCHES,
        },
    )
    return engine


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Microbatches without end: inputs, and the zeros that the model learns to answer."""
    while True:
        inputs = torch.randn(MICROBATCH_SIZE, WIDTH)
        yield inputs, torch.zeros_like(inputs)


def backend(name: str) -> dict[str, Any]:
    """Options that say where clocks are set; none are needed for NVML."""
    if name == "nvml":
        return {}
    return {"backend": name, "gpu": "a40", "count": dist.get_world_size()}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("plan", nargs="?", default="run.freqplan.json")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--backend", choices=("nvml", "modelled"), default="nvml")
    return parser.parse_args()


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    main()
