"""Ranks of training jobs on Megatron and DeepSpeed, for torch_jobs; each imports its framework."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from envplan.runtime.shim import Shim
from torch_worker import TASKS

WIDTH, MICROBATCHES, STEPS = 16, 8, 3
#: Megatron's second iteration only evaluates.
EVALUATION = 1


PROFILED = (1740, 1500)
PROFILING: dict[str, Any] = {"frequencies": PROFILED, "iterations_per_frequency": 20}
#: Warm-up, and at each clock some that count and one before; and a few to spare.
PROFILED_STEPS = 3 + 2 * 21 + 5


def told(shim: Any) -> dict[str, int]:
    """What a shim counted."""
    if not isinstance(shim, Shim):
        return {"mismatches": 0, "steps": 0}
    return {"mismatches": shim.mismatches, "steps": shim.steps}


class OnCpu(TorchFunctionMode):
    """Makes on the CPU what is asked for on a GPU: Megatron's schedules do not ask where."""

    def __torch_function__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


class Part(torch.nn.Module):
    """A model chunk as Megatron wants it."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.linear = torch.nn.Linear(WIDTH, WIDTH)
        self.given: torch.Tensor | None = None

    def set_input_tensor(self, tensors: list[torch.Tensor]) -> None:
        self.given = tensors[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x if self.given is None else self.given))


#: Samples of a microbatch.
SAMPLES = 2
#: Megatron's ramp-up of the batch size: first size, increment, and over how many samples, by which
#: iterations have 2, then 5, then all 8 microbatches.
RAMP_UP = [2 * SAMPLES, 3 * SAMPLES, 16 * SAMPLES]
RAMP_UP_STEPS = 10

#: Microbatches that go through a chunk before the next in a job that overlaps its transfers, too.
GROUP = 3


def megatron(
    folder: Path,
    *,
    chunks: int,
    profiled: bool = False,
    grouped: bool = False,
    ramp_up: bool = False,
) -> dict[str, Any]:
    """Megatron's own pipeline schedules, without and with the shim."""
    from megatron.core import parallel_state
    from megatron.core.enums import ModelType
    from megatron.core.num_microbatches_calculator import (
        get_num_microbatches,
        init_num_microbatches_calculator,
        unset_num_microbatches_calculator,
        update_num_microbatches,
    )
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer import TransformerConfig

    from envplan.runtime.megatron import follow, profile, record

    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *_: None
    stages, place = dist.get_world_size(), dist.get_rank()
    virtual = chunks if chunks > 1 else None
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=stages, virtual_pipeline_model_parallel_size=virtual
    )
    config = TransformerConfig(
        num_layers=stages * chunks,
        hidden_size=WIDTH,
        num_attention_heads=1,
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=virtual,
        pipeline_dtype=torch.float32,
        deallocate_pipeline_outputs=True,
        microbatch_group_size_per_vp_stage=GROUP if grouped else None,
        overlap_p2p_comm=grouped,
        batch_p2p_comm=not grouped,
    )

    def batches(seed: int) -> Iterator[torch.Tensor]:
        random = torch.Generator().manual_seed(seed)
        while True:
            yield torch.randn(4, SAMPLES, WIDTH, generator=random)

    def forward_step(data: Any, model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        output = model(next(data))
        return output, lambda y: (y.square().mean(), {"loss": float(y.square().mean())})

    def train(plan: AbstractContextManager[Any]) -> dict[str, Any]:
        torch.manual_seed(7)
        parts = [Part(config) for _ in range(stages * chunks)]
        mine = [parts[chunk * stages + place] for chunk in range(chunks)]
        for part in mine:
            part.model_type = ModelType.encoder_or_decoder
        optimizer = torch.optim.SGD([p for part in mine for p in part.parameters()], lr=0.1)
        losses = []
        sizes = []
        init_num_microbatches_calculator(
            rank=place,
            rampup_batch_size=RAMP_UP if ramp_up else None,
            global_batch_size=MICROBATCHES * SAMPLES,
            micro_batch_size=SAMPLES,
            data_parallel_size=1,
        )
        num_steps = RAMP_UP_STEPS if ramp_up else PROFILED_STEPS if profiled else STEPS + 1
        with plan as shim, OnCpu():
            run = get_forward_backward_func()
            for step in range(num_steps):
                update_num_microbatches(SAMPLES * sum(sizes), consistency_check=False)
                sizes.append(get_num_microbatches())
                optimizer.zero_grad()
                losses += run(
                    forward_step_func=forward_step,
                    data_iterator=[batches(step) for _ in mine] if virtual else batches(step),
                    model=mine if virtual else mine[0],
                    num_microbatches=sizes[-1],
                    seq_length=4,
                    micro_batch_size=SAMPLES,
                    forward_only=step == EVALUATION,
                )
                if step != EVALUATION:
                    optimizer.step()
        unset_num_microbatches_calculator()
        weights = [float(w) for part in mine for p in part.parameters() for w in p.flatten()]
        return {"losses": losses, "weights": weights, "sizes": sizes, **told(shim)}

    if profiled:
        return train(profile(folder / "profile.csv", **PROFILING))
    if ramp_up:
        return train(
            follow(folder / "run.freqplan.json", every_request=True, log=folder / "run.jsonl")
        )
    return {
        "without": train(record(folder / "pipeline.dag.json")),
        "with": train(follow(folder / "run.freqplan.json", every_request=True)),
    }


def deepspeed(folder: Path, *, profiled: bool = False) -> dict[str, Any]:
    """DeepSpeed's own pipeline engine, without and with the shim."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    import deepspeed
    from deepspeed.pipe import PipelineModule

    from envplan.runtime.deepspeed import follow, profile, record

    # It would compile this one with the machine's C++ compiler, and does without.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        random = torch.Generator().manual_seed(0)
        while True:
            yield torch.randn(2, WIDTH, generator=random), torch.randn(2, WIDTH, generator=random)

    def train(shimmed: bool) -> dict[str, Any]:
        torch.manual_seed(7)
        layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(dist.get_world_size())]
        model = PipelineModule(layers, num_stages=len(layers), loss_fn=torch.nn.functional.mse_loss)
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            config={
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": MICROBATCHES,
            },
        )
        plan: AbstractContextManager[Any] = nullcontext()
        if profiled:
            plan = profile(engine, folder / "profile.csv", **PROFILING)
        elif shimmed:
            plan = follow(folder / "run.freqplan.json", engine, every_request=True)
        else:
            plan = record(engine, folder / "pipeline.dag.json")
        data = batches()
        losses = []
        with plan as shim:
            for step in range(PROFILED_STEPS if profiled else STEPS):
                losses.append(float(engine.train_batch(data)))
                if step == 0:
                    engine.eval_batch(batches())
        return {
            "losses": losses,
            "weights": [float(w) for p in model.parameters() for w in p.flatten()],
            **told(shim),
        }

    if profiled:
        return train(False)
    return {"without": train(False), "with": train(True)}


TASKS["megatron"] = lambda folder: megatron(folder, chunks=1)
TASKS["megatron-interleaved"] = lambda folder: megatron(folder, chunks=2)
TASKS["megatron-ramp-up"] = lambda folder: megatron(folder, chunks=1, ramp_up=True)
TASKS["megatron-grouped"] = lambda folder: megatron(folder, chunks=2, grouped=True)
TASKS["deepspeed"] = deepspeed
TASKS["megatron-interleaved-profiled"] = lambda folder: megatron(folder, chunks=2, profiled=True)
TASKS["deepspeed-profiled"] = lambda folder: deepspeed(folder, profiled=True)
