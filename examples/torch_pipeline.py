"""A small model trained with torch.distributed.pipelining under a frequency plan, on GPUs or CPUs.

    envplan solve a40-gpt3-1.3b-4stage --microbatches 8
    envplan apply plan.json
    torchrun --nproc-per-node 4 examples/torch_pipeline.py run.freqplan.json

Where there is no NVIDIA GPU, `--backend modelled` lets it follow the plan on modelled ones. The
model is not that of the profile: see envplan profile for how to measure your own.
"""

from __future__ import annotations

import argparse
import logging
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from envplan.runtime.torch import follow

WIDTH, MICROBATCHES = 256, 8


def main() -> None:
    options = arguments()
    dist.init_process_group()
    rank, stages = dist.get_rank(), dist.get_world_size()
    device = local_device()
    torch.manual_seed(0)
    layers = [
        torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()) for _ in range(stages)
    ]
    model = layers[rank].to(device)
    stage = PipelineStage(model, rank, stages, device)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=torch.nn.functional.mse_loss)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    # These two lines are all that envplan needs: the plan, and the schedule that follows it.
    with follow(options.plan, schedule, **backend(options.backend, stages)) as shim:
        for step in range(options.steps):
            loss = train_step(schedule, optimizer, rank, stages, device)
            if loss is not None and step % 10 == 0:
                print(f"step {step}: loss {loss:.4f}")
    if shim.mismatches or shim.clock_errors:
        print(f"rank {rank}: {shim.mismatches} mismatches, {shim.clock_errors} clock errors")
    dist.destroy_process_group()


def train_step(
    schedule: Schedule1F1B,
    optimizer: torch.optim.Optimizer,
    rank: int,
    stages: int,
    device: torch.device,
) -> float | None:
    """One step; its mean loss on the last rank."""
    batch = torch.randn(8 * MICROBATCHES, WIDTH, device=device)
    losses: list[torch.Tensor] = []
    optimizer.zero_grad()
    if rank == 0:
        schedule.step(batch)
    elif rank == stages - 1:
        schedule.step(target=torch.zeros_like(batch), losses=losses)
    else:
        schedule.step()
    optimizer.step()
    return float(torch.stack(losses).detach().mean()) if losses else None


def backend(name: str, gpus: int) -> dict[str, Any]:
    """Options that say where clocks are set; none are needed for NVML."""
    return {"backend": name, "gpu": "a40", "count": gpus} if name == "modelled" else {}


def local_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("plan", nargs="?", default="run.freqplan.json")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--backend", choices=("nvml", "modelled"), default="nvml")
    return parser.parse_args()


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    main()
