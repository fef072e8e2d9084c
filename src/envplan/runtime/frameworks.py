"""What all frameworks on torch.distributed share: following a plan, profiling, and stragglers.

A framework's module says where operations begin and end, in a function `attach`; everything else is
here. A further framework is one module with `attach`, `follow` and `profile`.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from envplan.devices.visible import Counted
from envplan.runtime.parts import hook_parts
from envplan.runtime.profiler import Profiler
from envplan.runtime.shim import Shim
from envplan.runtime.stragglers import StragglerDetector

if TYPE_CHECKING:
    from envplan.enforce.freqplan import FrequencyPlan

__all__ = ["Attach", "Hooks", "Listener", "StragglerWatch", "followed", "profiled"]


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

    def missed(self, why: str) -> None:
        """Operations run that it cannot be told of."""


class Attach(Protocol):
    """Lets a framework tell a listener what it does; returns what undoes that."""

    def __call__(
        self, listener: Listener, *, after_step: Callable[[], None] | None = None
    ) -> Callable[[], None]: ...


class Hooks:
    """Functions of a framework that are replaced for a while by ones that tell a listener.

    Args:
        listener: who is told.
        after_step: called after each training step.
        entry: what runs an iteration, by the name that users know.

    Attributes:
        training: whether a training iteration runs.
    """

    def __init__(
        self, listener: Listener, after_step: Callable[[], None] | None, entry: str
    ) -> None:
        self.training = False
        self._inside = False
        self._listener = listener
        self._after_step = after_step
        self._entry = entry
        self._undo: list[Callable[[], None]] = []

    def replace(self, owner: Any, name: str, function: Any) -> None:
        """Put something in the place of an attribute of an object or a module."""
        if name in vars(owner):
            self._undo.append(partial(setattr, owner, name, vars(owner)[name]))
        else:
            self._undo.append(partial(delattr, owner, name))
        setattr(owner, name, function)

    def detach(self) -> None:
        """Put everything back."""
        while self._undo:
            self._undo.pop()()

    def iteration(self, run: Callable[[], Any], *, training: bool) -> Any:
        """Run an iteration and tell of its end; an evaluation runs at full speed."""
        if not training:
            self._listener.full_speed()
        self._inside, self.training = True, training
        try:
            result = run()
        finally:
            self._inside = self.training = False
        if training:
            self._listener.step()
            if self._after_step is not None:
                self._after_step()
        return result

    def operation(
        self, run: Callable[[], Any], instruction: str, microbatch: int, chunk: int = 0
    ) -> Any:
        """Run an operation and tell of its begin and end."""
        if not self._inside:
            self._listener.missed(
                f"{self._entry} was taken before this was entered; enter it before"
            )
        if not self.training:
            return run()
        self._listener.begin(instruction, microbatch, chunk)
        result = run()
        self._listener.end(instruction, microbatch, chunk)
        return result


@contextmanager
def followed(
    plan: FrequencyPlan | str | os.PathLike[str],
    attach: Attach,
    *,
    device: torch.device,
    stragglers: bool,
    model: Sequence[torch.nn.Module] = (),
    **options: Any,
) -> Iterator[Shim]:
    """Run any framework on torch.distributed under a frequency plan.

    Args:
        plan: a frequency plan, or the path of one.
        attach: to the framework.
        device: that this rank computes on.
        stragglers: look for slow pipelines, where the plan has a ladder and there are several.
        model: what this rank runs of it, for plans with clocks by part.
        options: for Shim.

    Raises:
        InputError: as for Shim, or a part of the plan is no module of the model.
    """
    with Shim(plan, **_with_known(device, options)) as shim:
        watch = None
        if stragglers and shim.has_ladder and len(set(shim.pipelines)) > 1:
            watch = StragglerWatch(shim)
        detach = attach(shim, after_step=watch.step if watch else None)
        try:
            with hook_parts(shim, model):
                yield shim
        finally:
            detach()


@contextmanager
def profiled(
    path: str | os.PathLike[str],
    attach: Attach,
    *,
    device: torch.device,
    model: Sequence[torch.nn.Module] = (),
    **options: Any,
) -> Iterator[Profiler]:
    """Profile any framework on torch.distributed while it trains.

    Args:
        path: of the profile, in a folder that all ranks see.
        attach: to the framework.
        device: that this rank computes on.
        model: what this rank runs of it, for parts=.
        options: for Profiler.

    Raises:
        InputError: as for Profiler, or a part is no module of the model.
    """
    with Profiler(path, **_with_known(device, options)) as profiler:
        detach = attach(profiler)
        try:
            with hook_parts(profiler, model):
                yield profiler
        finally:
            detach()


def _with_known(device: torch.device, options: dict[str, Any]) -> dict[str, Any]:
    """Options, and those that a running job knows itself."""
    known: dict[str, Any] = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    if device.type == "cuda":
        known["marker"] = _cuda_event
        if "device" not in options:
            number = torch.cuda.current_device() if device.index is None else device.index
            known |= {"device": number, "counted": Counted.BY_CUDA}
    return known | options


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
