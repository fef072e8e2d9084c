"""Frequency plans for torch.distributed.pipelining, in two lines.

    from envplan.runtime.torch import follow

    with follow("run.freqplan.json", schedule):
        for x, y in batches:
            schedule.step(x, target=y)
            optimizer.step()

`schedule` is a ScheduleGPipe, Schedule1F1B or ScheduleInterleaved1F1B whose plan was made with
--schedule gpipe, 1f1b or interleaved. Nothing about the computation changes: the stages' forward
and backward of one microbatch are told to the shim, on the GPU's own time where there is one.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from envplan.runtime.shim import Shim
from envplan.runtime.stragglers import StragglerDetector

if TYPE_CHECKING:
    from envplan.freqplan import FrequencyPlan

__all__ = ["StragglerWatch", "attach", "follow"]


@contextmanager
def follow(
    plan: FrequencyPlan | str | os.PathLike[str],
    schedule: Any,
    *,
    stragglers: bool = True,
    **options: Any,
) -> Iterator[Shim]:
    """Run a pipeline schedule under a frequency plan.

    torch.distributed must have been initialized, and every rank must do this.

    Args:
        plan: a frequency plan, or the path of one.
        schedule: of torch.distributed.pipelining.
        stragglers: look for slow pipelines, where the plan has a ladder and there are several.
        options: for Shim.

    Raises:
        InputError: as for Shim.
    """
    cuda = _stages(schedule)[0].device.type == "cuda"
    options.setdefault("rank", dist.get_rank())
    options.setdefault("world_size", dist.get_world_size())
    options.setdefault("marker", _cuda_event if cuda else None)
    with Shim(plan, **options) as shim:
        watch = None
        if stragglers and shim.has_ladder and len(set(shim.pipelines)) > 1:
            watch = StragglerWatch(shim)
        detach = attach(shim, schedule, after_step=watch.step if watch else None)
        try:
            yield shim
        finally:
            detach()


def attach(
    shim: Shim, schedule: Any, *, after_step: Callable[[], None] | None = None
) -> Callable[[], None]:
    """Tell a shim what a pipeline schedule does; evaluation runs at the highest clock.

    Args:
        schedule: of torch.distributed.pipelining.
        after_step: called after each training step.

    Returns:
        What undoes it.
    """
    stages = _stages(schedule)
    for chunk, stage in enumerate(stages):
        _hook(shim, stage, chunk, "forward_one_chunk", "forward")
        _hook(shim, stage, chunk, "backward_one_chunk", "backward")
        _hook(shim, stage, chunk, "backward_weight_one_chunk", "backward_weight")
    run = schedule.step

    def step(*args: Any, **kwargs: Any) -> Any:
        if not schedule._has_backward:
            shim.full_speed()
            return run(*args, **kwargs)
        result = run(*args, **kwargs)
        shim.step()
        if after_step is not None:
            after_step()
        return result

    schedule.step = step

    def detach() -> None:
        del schedule.step
        for stage in stages:
            del stage.forward_one_chunk, stage.backward_one_chunk, stage.backward_weight_one_chunk

    return detach


def _stages(schedule: Any) -> Sequence[Any]:
    """The schedule's stages on this rank, by chunk."""
    return schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]


def _hook(shim: Shim, stage: Any, chunk: int, method: str, instruction: str) -> None:
    """Surround a method of a stage, whose first argument is the microbatch, by begin and end."""
    run = getattr(stage, method)

    def hooked(microbatch: int, *args: Any, **kwargs: Any) -> Any:
        if not stage.has_backward:
            return run(microbatch, *args, **kwargs)
        name = instruction if kwargs.get("full_backward", True) else "backward_input"
        shim.begin(name, microbatch, chunk)
        result = run(microbatch, *args, **kwargs)
        shim.end(name, microbatch, chunk)
        return result

    setattr(stage, method, hooked)


def _cuda_event() -> Any:
    return torch.cuda.Event(enable_timing=True)


class StragglerWatch:
    """Finds slow pipelines by the times that all ranks exchange, and tells the shim.

    The exchange is a gloo all-gather of one number per rank and step that nobody waits for: its
    result is used at the first step after which it has arrived. Every rank must make one, after
    torch.distributed has been initialized, and call step() after each of its steps.

    A pipeline's time is that of its forwards and backwards. Where gradients are reduced over
    replicas within a backward, as DistributedDataParallel does, everybody's backward waits for the
    straggler, all pipelines look alike and none is slowed down.

    Args:
        shim: whose plan has a ladder.
        detector: how sure to be; default: see StragglerDetector.
    """

    def __init__(self, shim: Shim, detector: StragglerDetector | None = None) -> None:
        self.detector = detector or StragglerDetector()
        self._shim = shim
        self._pipelines = shim.pipelines
        self._group = dist.new_group(backend="gloo")
        self._flying: deque[tuple[Any, list[torch.Tensor]]] = deque()

    def step(self) -> None:
        """Send this rank's latest time, and use what has arrived."""
        mine = torch.tensor([self._natural_time()], dtype=torch.float64)
        everybody = [torch.empty_like(mine) for _ in self._pipelines]
        work = dist.all_gather(everybody, mine, group=self._group, async_op=True)
        self._flying.append((work, everybody))
        while self._flying and self._flying[0][0].is_completed():
            _, arrived = self._flying.popleft()
            self._use([float(time) for time in arrived])

    def _natural_time(self) -> float:
        """Our last measured step as it would have been under the fastest plan, s."""
        if self._shim.last_iteration is None:
            return math.nan
        planned, measured = self._shim.last_iteration
        return measured * self._shim.planned_time / planned

    def _use(self, times: Sequence[float]) -> None:
        slowest: dict[int, float] = {}
        for pipeline, time in zip(self._pipelines, times, strict=True):
            # A pipeline takes as long as the longest of its ranks sees it take.
            slowest[pipeline] = max(slowest.get(pipeline, 0.0), time)
        ours = slowest.pop(self._pipelines[self._shim.rank])
        if math.isnan(sum(times)) or ours <= 0:
            return
        late = self.detector.observe(ours, max(slowest.values()))
        self._shim.set_straggler_time(late * self._shim.planned_time if late > 1 else None)
