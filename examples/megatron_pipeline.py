"""A small model trained by Megatron's pipeline schedules under a frequency plan, on GPUs.

    envplan solve a40-gpt3-1.3b-4stage --microbatches 8
    envplan apply plan.json
    torchrun --nproc-per-node 4 examples/megatron_pipeline.py run.freqplan.json

With --vp it runs the interleaved schedule, --microbatch-group microbatches at a time. Megatron's
schedules run on GPUs only. The model is not that of the profile: see envplan profile for how to
measure your own. In Megatron-LM's own pretrain_gpt.py, the two lines go around the call of
pretrain, which then needs torch.distributed to be initialized before.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from envplan.runtime.megatron import follow

try:
    from megatron.core import parallel_state
    from megatron.core.enums import ModelType
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer import TransformerConfig
except ImportError as error:
    sys.exit(f"this example needs Megatron ({error}): pip install megatron-core")

WIDTH, MICROBATCH_SIZE, LENGTH = 256, 8, 16


class Stage(torch.nn.Module):
    """One layer, with what Megatron's schedules ask of a model."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.model_type = ModelType.encoder_or_decoder
        self.linear = torch.nn.Linear(WIDTH, WIDTH)
        self.given: torch.Tensor | None = None

    def set_input_tensor(self, tensors: list[torch.Tensor]) -> None:
        self.given = tensors[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x if self.given is None else self.given))


def main(**how: Any) -> None:
    """Train. What it is given is for follow; nothing is needed on NVIDIA's GPUs."""
    options = arguments()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    stages, virtual = dist.get_world_size(), options.vp if options.vp > 1 else None
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=stages, virtual_pipeline_model_parallel_size=virtual
    )
    torch.manual_seed(dist.get_rank())
    config = TransformerConfig(
        num_layers=stages * options.vp,
        hidden_size=WIDTH,
        num_attention_heads=1,
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=virtual,
        microbatch_group_size_per_vp_stage=options.microbatch_group,
        pipeline_dtype=torch.float32,
    )
    model = torch.nn.ModuleList(Stage(config) for _ in range(options.vp)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    # These two lines are all that envplan needs: the plan, and the training that follows it.
    with follow(options.plan, **how) as shim:
        train(model, optimizer, options)
    if shim.mismatches or shim.clock_errors:
        print(f"rank {shim.rank}: {shim.mismatches} mismatches, {shim.clock_errors} clock errors")
    dist.destroy_process_group()


def train(
    chunks: torch.nn.ModuleList, optimizer: torch.optim.Optimizer, options: argparse.Namespace
) -> None:
    interleaved = len(chunks) > 1
    forward_backward = get_forward_backward_func()
    for step in range(options.steps):
        optimizer.zero_grad()
        losses = forward_backward(
            forward_step_func=forward_step,
            data_iterator=[batches() for _ in chunks] if interleaved else batches(),
            model=list(chunks) if interleaved else chunks[0],
            num_microbatches=options.microbatches,
            seq_length=LENGTH,
            micro_batch_size=MICROBATCH_SIZE,
            forward_only=False,
        )
        optimizer.step()
        if losses and step % 10 == 0:
            print(f"step {step}: loss {sum(loss['loss'] for loss in losses) / len(losses):.4f}")


def forward_step(
    data: Iterator[torch.Tensor], model: Stage
) -> tuple[torch.Tensor, Callable[..., Any]]:
    """As Megatron's training scripts have it: the output, and what makes a loss of it."""

    def loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
        mean = output.square().mean()
        return mean, {"loss": float(mean)}

    return model(next(data)), loss


def batches() -> Iterator[torch.Tensor]:
    """Microbatches without end."""
    while True:
        yield torch.randn(LENGTH, MICROBATCH_SIZE, WIDTH, device="cuda")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("plan", nargs="?", default="run.freqplan.json")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--vp", type=int, default=1)
    parser.add_argument("--microbatch-group", type=int)
    return parser.parse_args()


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    if not torch.cuda.is_available():
        sys.exit("this example needs an NVIDIA GPU for each rank: Megatron's schedules run on GPUs")
    main()
