"""Frequency plans for torch.distributed.pipelining, in two lines.

    from envplan.runtime.torch import follow

    with follow("run.freqplan.json", schedule):
        for x, y in batches:
            schedule.step(x, target=y)
            optimizer.step()

`schedule` is one of torch.distributed.pipelining, whose plan was made with the --schedule that
SCHEDULE_NAMES gives for its class. Nothing about the computation changes: the stages' forward
and backward of one microbatch are told to the shim, on the GPU's own time where there is one.

`profile` instead of `follow` measures a profile over the job's first iterations:

    from envplan.runtime.torch import profile

    with profile(schedule, "profile.csv"):
        ...
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
import torch.distributed as dist

from envplan.devices import DeviceError, backend
from envplan.devices.visible import visible_gpus
from envplan.profile import ProfileMetadata
from envplan.runtime.profiler import Profiler
from envplan.runtime.shim import Shim
from envplan.runtime.stragglers import StragglerDetector

if TYPE_CHECKING:
    from envplan.enforce.freqplan import FrequencyPlan

__all__ = [
    "SCHEDULE_NAMES",
    "Attach",
    "Listener",
    "StragglerWatch",
    "attach",
    "follow",
    "followed",
    "profile",
    "profiled",
]

#: What --schedule is for each of torch's classes.
SCHEDULE_NAMES: Final = {
    "ScheduleGPipe": "gpipe",
    "Schedule1F1B": "1f1b",
    "ScheduleInterleaved1F1B": "interleaved",
    "ScheduleLoopedBFS": "looped-bfs",
    "ScheduleInterleavedZeroBubble": "interleaved-zb",
    "ScheduleZBVZeroBubble": "zb-v",
    "ScheduleDualPipeV": "dualpipe-v",
}


class Listener(Protocol):
    """What is told of operations as they come: a Shim or a Profiler."""

    def begin(self, instruction: str, microbatch: int, chunk: int = 0) -> None:
        """An operation begins."""

    def end(self, instruction: str, microbatch: int, chunk: int = 0) -> None:
        """It has ended."""

    def step(self) -> None:
        """An iteration is over."""

    def full_speed(self) -> None:
        """Something else runs until the next operation begins."""


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
    with followed(
        plan,
        partial(attach, schedule=schedule),
        device=_stages(schedule)[0].device,
        stragglers=stragglers,
        **options,
    ) as shim:
        yield shim


@contextmanager
def profile(
    schedule: Any, path: str | os.PathLike[str] = "profile.csv", **options: Any
) -> Iterator[Profiler]:
    """Measure the profile of a job while it trains; see envplan.runtime.profiler.

    torch.distributed must have been initialized, and every rank must do this.

    Args:
        schedule: of torch.distributed.pipelining.
        path: of the profile, in a folder that all ranks see.
        options: for Profiler.

    Raises:
        InputError: as for Profiler.
    """
    stages = _stages(schedule)
    metadata = ProfileMetadata(schedule=SCHEDULE_NAMES.get(type(schedule).__name__))
    known = {
        "stages": [stage.stage_index for stage in stages],
        "num_stages": stages[0].num_stages,
        "metadata": metadata,
    }
    with profiled(
        path, partial(attach, schedule=schedule), device=stages[0].device, **{**known, **options}
    ) as profiler:
        yield profiler


class Attach(Protocol):
    """Lets a framework tell a listener what it does; returns what undoes that."""

    def __call__(
        self, listener: Listener, *, after_step: Callable[[], None] | None = None
    ) -> Callable[[], None]: ...


@contextmanager
def followed(
    plan: FrequencyPlan | str | os.PathLike[str],
    attach: Attach,
    *,
    device: torch.device,
    stragglers: bool,
    **options: Any,
) -> Iterator[Shim]:
    """Run any framework on torch.distributed under a frequency plan.

    Args:
        plan: a frequency plan, or the path of one.
        attach: to the framework.
        device: that this rank computes on.
        stragglers: look for slow pipelines, where the plan has a ladder and there are several.
        options: for Shim.

    Raises:
        InputError: as for Shim.
    """
    known = _known(device, options.get("backend", "nvml"))
    with Shim(plan, **{**known, **options}) as shim:
        watch = None
        if stragglers and shim.has_ladder and len(set(shim.pipelines)) > 1:
            watch = StragglerWatch(shim)
        detach = attach(shim, after_step=watch.step if watch else None)
        try:
            yield shim
        finally:
            detach()


@contextmanager
def profiled(
    path: str | os.PathLike[str], attach: Attach, *, device: torch.device, **options: Any
) -> Iterator[Profiler]:
    """Profile any framework on torch.distributed while it trains.

    Args:
        path: of the profile, in a folder that all ranks see.
        attach: to the framework.
        device: that this rank computes on.
        options: for Profiler.

    Raises:
        InputError: as for Profiler.
    """
    with Profiler(path, **{**_known(device, "nvml"), **options}) as profiler:
        detach = attach(profiler)
        try:
            yield profiler
        finally:
            detach()


def attach(
    listener: Listener, schedule: Any, *, after_step: Callable[[], None] | None = None
) -> Callable[[], None]:
    """Tell a shim or a profiler what a pipeline schedule does; evaluation runs at full speed.

    Args:
        listener: who is told.
        schedule: of torch.distributed.pipelining.
        after_step: called after each training step.

    Returns:
        What undoes it.
    """
    stages = _stages(schedule)
    for chunk, stage in enumerate(stages):
        _hook(listener, stage, chunk, "forward_one_chunk", "forward")
        _hook(listener, stage, chunk, "backward_one_chunk", "backward")
        _hook(listener, stage, chunk, "backward_weight_one_chunk", "backward_weight")
    run = schedule.step

    def step(*args: Any, **kwargs: Any) -> Any:
        if not schedule._has_backward:
            listener.full_speed()
            return run(*args, **kwargs)
        result = run(*args, **kwargs)
        listener.step()
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
    """The schedule's stages on this rank, by chunk: in the order of the model."""
    if not hasattr(schedule, "_stages"):
        return [schedule._stage]
    return sorted(schedule._stages, key=lambda stage: stage.stage_index)


def _known(device: torch.device, backend_name: str) -> dict[str, Any]:
    """Options that a running job knows itself."""
    on_gpu = device.type == "cuda"
    return {
        "rank": dist.get_rank(),
        "world_size": dist.get_world_size(),
        "marker": _cuda_event if on_gpu else None,
        "device": _driver_index(device) if on_gpu and backend_name == "nvml" else None,
    }


def _driver_index(device: torch.device) -> int | None:
    """Which GPU it is as the driver counts; None if the driver does not say."""
    number = torch.cuda.current_device() if device.index is None else device.index
    try:
        source = backend("nvml")
    except DeviceError:
        return None
    try:
        visible = visible_gpus(source.devices())
    except DeviceError:
        return None
    finally:
        source.close()
    return visible[number] if number < len(visible) else None


def _hook(listener: Listener, stage: Any, chunk: int, method: str, instruction: str) -> None:
    """Surround a method of a stage, whose first argument is the microbatch, by begin and end."""
    run = getattr(stage, method)

    def hooked(microbatch: int, *args: Any, **kwargs: Any) -> Any:
        if not stage.has_backward:
            return run(microbatch, *args, **kwargs)
        name = instruction if kwargs.get("full_backward", True) else "backward_input"
        listener.begin(name, microbatch, chunk)
        result = run(microbatch, *args, **kwargs)
        listener.end(name, microbatch, chunk)
        return result

    setattr(stage, method, hooked)


def _cuda_event() -> Any:
    # Blocking: else a thread that waits for one spins, on a core that training may need.
    return torch.cuda.Event(enable_timing=True, blocking=True)


class StragglerWatch:
    """Finds slow pipelines by the times that all ranks exchange, and tells the shim.

    The exchange is a gloo all-gather of one number per rank and step that nobody waits for: its
    result is used at the first step after which it has arrived. Every rank must make one, after
    torch.distributed has been initialized, and call step() after each of its steps.

    A pipeline's time is taken from its first forward until the first backward that may reduce
    gradients over replicas, as DistributedDataParallel does within the last one of each chunk:
    from there on everybody waits for the straggler and all pipelines look alike.

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
