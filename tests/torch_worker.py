"""One rank of a training job on CPUs, run in a process of its own by test_runtime_torch.py."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn.parallel import DistributedDataParallel

from envplan.runtime.shim import Shim
from envplan.runtime.torch import SCHEDULE_NAMES, follow, profile, record

WIDTH, MICROBATCHES, STEPS = 16, 8, 2
PROFILED = (1740, 1500, 1200, 900)
SCHEDULES = {name: getattr(schedules, cls) for cls, name in SCHEDULE_NAMES.items()}
#: Those of several chunks on a rank, the second going back the way the first came.
FOLDED = ("zb-v", "dualpipe-v")
CHUNKED = ("interleaved", "looped-bfs", "interleaved-zb", *FOLDED)


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)
        self.pause = 0.0
        self.backward_pause = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.pause)
        y = torch.tanh(self.linear(x))
        if self.backward_pause and y.requires_grad:
            y.register_hook(lambda _: time.sleep(self.backward_pause))
        return y


class Job:
    """A pipeline over a group of ranks; the same every time it is made."""

    def __init__(self, name: str, chunks: int = 1, group: Any = None, replicas: Any = None) -> None:
        place, stages = dist.get_rank(group), dist.get_world_size(group)
        torch.manual_seed(7)
        layers = [Layer() for _ in range(stages * chunks)]
        indices = [chunk * stages + place for chunk in range(chunks)]
        if name in FOLDED:
            indices = [place, 2 * stages - 1 - place]
        self.mine = [layers[index] for index in indices]
        self.is_first, self.is_last = 0 in indices, len(layers) - 1 in indices
        parts = [
            PipelineStage(
                layer
                if replicas is None
                else DistributedDataParallel(layer, process_group=replicas),
                index,
                len(layers),
                torch.device("cpu"),
                group=group,
            )
            for index, layer in zip(indices, self.mine, strict=True)
        ]
        self.schedule = SCHEDULES[name](
            parts if chunks > 1 else parts[0],
            MICROBATCHES,
            loss_fn=torch.nn.functional.mse_loss,
        )
        parameters = [p for layer in self.mine for p in layer.parameters()]
        self.optimizer = torch.optim.SGD(parameters, lr=0.1)

    def step(self, step: int) -> list[float]:
        """Losses of one training step, on the last rank."""
        random = torch.Generator().manual_seed(step)
        x = torch.randn(2 * MICROBATCHES, WIDTH, generator=random)
        y = torch.randn(2 * MICROBATCHES, WIDTH, generator=random)
        losses: list[torch.Tensor] = []
        self.optimizer.zero_grad()
        if self.is_last:
            self.schedule.step(*([x] if self.is_first else []), target=y, losses=losses)
        else:
            self.schedule.step(*([x] if self.is_first else []))
        self.optimizer.step()
        return [float(loss) for loss in losses]

    def weights(self) -> list[float]:
        return [float(w) for layer in self.mine for p in layer.parameters() for w in p.flatten()]


def compare(folder: Path) -> dict[str, Any]:
    """Every schedule without and with the shim, which goes with a recorder."""
    results: dict[str, Any] = {}
    for name in SCHEDULES:
        for shimmed in (False, True):
            job = Job(name, chunks=2 if name in CHUNKED else 1)
            shim: Shim | None = None
            with ExitStack() as plan:
                if shimmed:
                    file = folder / f"{name}.freqplan.json"
                    plan.enter_context(record(job.schedule, folder / f"{name}.dag.json"))
                    shim = plan.enter_context(follow(file, job.schedule, every_request=True))
                losses = [job.step(step) for step in range(STEPS)]
                results[f"{name} {'with' if shimmed else 'without'}"] = {
                    "losses": losses,
                    "weights": job.weights(),
                    "mismatches": shim.mismatches if shim else 0,
                }
    return results


def evaluate(folder: Path) -> dict[str, Any]:
    """Training, evaluation, training; then the schedule as if nothing had been."""
    job = Job("1f1b")
    with follow(folder / "1f1b.freqplan.json", job.schedule) as shim:
        job.step(0)
        x = torch.zeros(2 * MICROBATCHES, WIDTH)
        job.schedule.eval(*([x] if job.is_first else []), **({"target": x} if job.is_last else {}))
        asked = shim.requested_mhz
        job.step(1)
        mismatches = shim.mismatches
    job.step(2)
    return {"mismatches": mismatches, "asked": asked, "steps": shim.steps}


def straggle(folder: Path) -> dict[str, Any]:
    """Two pipelines of two stages that reduce gradients; the second is late from the 4th to the
    14th step.
    """
    pipelines = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    stages = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    rank = dist.get_rank()
    job = Job("1f1b", group=pipelines[rank // 2], replicas=stages[rank % 2])
    followed = []
    with follow(folder / "ladder.freqplan.json", job.schedule) as shim:
        for step in range(24):
            # As on a real GPU, operations take longer under a slower plan.
            late = 4.0 if rank == 3 and 4 <= step < 14 else 1.0
            job.mine[0].pause = 0.01 * late * shim.followed_time
            job.step(step)
            dist.barrier()
            followed.append(shim.followed_time)
    return {"followed": followed}


def profile_itself(folder: Path) -> dict[str, Any]:
    """Four stages on two ranks measure themselves; operations take as long as their clock says."""
    job = Job("interleaved", chunks=2)
    with profile(
        job.schedule,
        folder / "profile.csv",
        frequencies=PROFILED,
        iterations_per_frequency=4,
    ) as profiler:
        steps, left = 0, torch.ones(1)
        while left:  # all go on until all are done
            for chunk, layer in enumerate(job.mine):
                layer.pause = duration(2 * chunk + dist.get_rank(), profiler.frequency)
                layer.backward_pause = 2 * layer.pause
            job.step(steps)
            steps += 1
            left = torch.tensor([0.0 if profiler.done else 1.0])
            dist.all_reduce(left)
    return {"steps": steps}


def duration(stage: int, mhz: int) -> float:
    """Of a forward, s."""
    return (0.5 + 0.25 * stage) * 1e-3 * (1 + 1740 / (mhz or 1740))


def run_on(folder: Path) -> dict[str, Any]:
    """Train until killed."""
    job = Job("1f1b")
    with follow(folder / "1f1b.freqplan.json", job.schedule):
        for step in range(10**9):
            job.step(step)
            if step == 2:
                (folder / f"running.{dist.get_rank()}").touch()
    return {}


def follow_orders(folder: Path) -> dict[str, Any]:
    """Follow the orders of a site until a file says that it is over, and write down each step.

    The folder is called as the job; beside it is that of the orders.
    """
    name, rank = folder.name, dist.get_rank()
    orders = folder.parent / "orders" / f"{name}.order.json"
    freqplan = folder.parent / "jobs" / f"{name}.freqplan.json"
    device = int((folder / "first_gpu").read_text()) + rank
    job = Job("1f1b")
    steps, goes_on = 0, torch.ones(1)
    with (
        follow(freqplan, job.schedule, device=device, orders=orders) as shim,
        (folder / f"steps.{rank}").open("w") as file,
    ):
        while goes_on:
            row = [steps, time.monotonic(), time.time(), shim.followed_time]
            file.write(json.dumps(row) + "\n")
            file.flush()
            # As on a real GPU, operations take longer under a slower plan.
            job.mine[0].pause = 0.01 * shim.followed_time / shim.planned_time
            job.mine[0].backward_pause = 2 * job.mine[0].pause
            job.step(steps)
            steps += 1
            goes_on = torch.tensor([0.0 if (folder / "stop").exists() else 1.0])
            dist.all_reduce(goes_on, op=dist.ReduceOp.MIN)
        mismatches = shim.mismatches
    return {"steps": steps, "mismatches": mismatches}


TASKS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "compare": compare,
    "evaluate": evaluate,
    "straggle": straggle,
    "profile_itself": profile_itself,
    "run_on": run_on,
    "follow_orders": follow_orders,
}


def work(task: str, folder: Path, rank: int, size: int) -> None:
    """Be a rank: do a task and write what it says to TASK.RANK.json."""
    with (folder / f"{task}.err").open("ab") as errors:
        os.dup2(errors.fileno(), 2)
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"store.{task}"), size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=240)
    )
    result = TASKS[task](folder)
    (folder / f"{task}.{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
