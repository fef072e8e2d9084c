"""What all frameworks on torch.distributed share: following a plan, profiling, recording the order
of operations, and stragglers.

A framework's module says where operations begin and end, in a function `attach`, and makes a Job of
what its users have; `uses` makes its `follow`, `profile` and `record` of that.
"""

from __future__ import annotations

import logging
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from envplan.devices import Counted
from envplan.errors import InputError
from envplan.pipeline import Pipeline
from envplan.pipeline.imports import Step, scheduled
from envplan.runtime.observer import OperationObserver
from envplan.runtime.parts import hook_parts
from envplan.runtime.profiler import Profiler
from envplan.runtime.shim import IterationTime, Shim
from envplan.runtime.stragglers import StragglerDetector

if TYPE_CHECKING:
    from envplan.enforce.freqplan import FrequencyPlan

__all__ = ["Hooks", "Job", "uses"]

_logger = logging.getLogger("envplan.runtime")


class Hooks(ExitStack):
    """Functions of a framework that are replaced by ones that tell a observer, until it is closed.

    Args:
        observer: who is told.
        entry: what runs an iteration, by the name that users know.

    Attributes:
        training: whether a training iteration runs.
        after_step: called after each training step.
    """

    def __init__(self, observer: OperationObserver, entry: str) -> None:
        super().__init__()
        self.training = False
        self.after_step: Callable[[], None] | None = None
        self._inside = False
        self._listener = observer
        self._entry = entry

    def replace(self, owner: Any, name: str, function: Any) -> None:
        """Put something in the place of an attribute of an object or a module."""
        if name in vars(owner):
            self.callback(setattr, owner, name, vars(owner)[name])
        else:
            self.callback(delattr, owner, name)
        setattr(owner, name, function)

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
            if self.after_step is not None:
                self.after_step()
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


@dataclass(frozen=True)
class Job:
    """What all three uses of a framework need to know of it.

    Attributes:
        attach: lets the framework tell a observer what it does.
        device: that this rank computes on.
        known: what only a running job can say, asked when it is needed: `stages` of this rank, by
            chunk, `num_stages` of the model, and `metadata` for a profile's sidecar.
        model: what this rank runs of it, by chunk, for clocks by part; none where only the user
            has it.
    """

    attach: Callable[[OperationObserver], Hooks]
    device: torch.device
    known: Callable[[], dict[str, Any]]
    model: Sequence[torch.nn.Module] = ()


def uses(
    job: Callable[[Any], Job],
) -> tuple[
    Callable[..., AbstractContextManager[Shim]],
    Callable[..., AbstractContextManager[Profiler]],
    Callable[..., AbstractContextManager[Recorder]],
]:
    """A framework's `follow`, `profile` and `record`. Every rank must enter them.

    Args:
        job: the job of what the framework runs it by, such as its schedule or engine.
    """

    @contextmanager
    def follow(
        plan: FrequencyPlan | str | os.PathLike[str],
        runs: Any = None,
        *,
        stragglers: bool = True,
        model: Sequence[torch.nn.Module] = (),
        **options: Any,
    ) -> Iterator[Shim]:
        """Run a job under a frequency plan, while the context lasts.

        torch.distributed must have been initialized.

        Args:
            plan: a frequency plan, or the path of one.
            runs: the framework's schedule or engine.
            stragglers: look for slow pipelines, where the plan has a ladder and there are several.
            model: chunks of the model that this rank runs, where the job does not know them.
            options: for Shim; raises as that does.
        """
        one = job(runs)
        with Shim(plan, **_with_known(one.device, options)) as shim, one.attach(shim) as hooks:
            if stragglers and shim.has_ladder and shim.plan.layout.dp > 1:
                hooks.after_step = StragglerWatch(shim).step
            with hook_parts(shim, model or one.model):
                yield shim

    @contextmanager
    def profile(
        runs: Any,
        path: str | os.PathLike[str] = "profile.csv",
        *,
        model: Sequence[torch.nn.Module] = (),
        **options: Any,
    ) -> Iterator[Profiler]:
        """Measure the profile of a job while it trains; see envplan.runtime.profiler.

        Args:
            path: of the profile, in a folder that all ranks see.
            runs, model: as for follow.
            options: for Profiler; raises as that does.
        """
        one = job(runs)
        with (
            Profiler(path, **_with_known(one.device, one.known() | options)) as profiler,
            one.attach(profiler),
            hook_parts(profiler, model or one.model),
        ):
            yield profiler

    @contextmanager
    def record(runs: Any, path: str | os.PathLike[str] = "pipeline.dag.json") -> Iterator[Recorder]:
        """Write the order of a job's first training iteration, as it really runs, as a DAG file.

        Args:
            runs: as for follow.
            path: of the DAG file, which rank 0 writes.
        """
        one = job(runs)
        recorder = Recorder(path, one.known)
        with one.attach(recorder):
            yield recorder

    return follow, profile, record


class Recorder(OperationObserver):
    """Takes down what each rank runs in one training iteration, and gathers it on rank 0.

    Nothing that goes wrong with it ends training: it is logged, and there is no file.

    Args:
        path: of the DAG file.
        known: as in Job.

    Attributes:
        pipeline: what was recorded, on rank 0 once there is something.
    """

    _consequence = "nothing is recorded"

    def __init__(self, path: str | os.PathLike[str], known: Callable[[], dict[str, Any]]) -> None:
        self.pipeline: Pipeline | None = None
        self.rank = dist.get_rank()
        self._path, self._known = path, known
        self._order: list[tuple[str, int, int]] = []
        self._done = False

    def begin(self, instruction: str, microbatch: int, chunk: int = 0) -> None:
        if not self._done:
            self._order.append((instruction, microbatch, chunk))

    def step(self) -> None:
        """An iteration is over: the first one is written."""
        if self._done:
            return
        self._done = True
        stages = self._known()["stages"]
        mine = [(instruction, m, stages[chunk]) for instruction, m, chunk in self._order]
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, mine)
        if self.rank == 0:
            try:
                self._write(everybody)
            except InputError as error:
                _logger.warning("%s is not written: %s", self._path, error.message)

    def missed(self, reason: str) -> None:
        """As OperationObserver.missed; nothing is to be said once there is a file."""
        if not self._done:
            self._done = True
            super().missed(reason)

    def _write(self, everybody: list[list[tuple[str, int, int]]]) -> None:
        # Ranks that share stages, as tensor- and data-parallel ones do, run the same.
        orders = {min(stage for *_, stage in order): order for order in everybody if order}
        ranks = ((Step(*each) for each in order) for _, order in sorted(orders.items()))
        self.pipeline = Pipeline.from_imported(scheduled(ranks))
        self.pipeline.save_dag(self._path)
        _logger.warning("%s: %r", self._path, self.pipeline)


def _with_known(device: torch.device, options: dict[str, Any]) -> dict[str, Any]:
    """Options, and those that a running job knows itself."""
    known: dict[str, Any] = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    if device.type == "cuda":
        # Blocking: else a thread that waits for one spins, on a core that training may need.
        known["marker"] = partial(torch.cuda.Event, enable_timing=True, blocking=True)
        if "device" not in options:
            number = torch.cuda.current_device() if device.index is None else device.index
            known |= {"device": number, "counted": Counted.BY_CUDA}
    return known | options


class StragglerWatch:
    """Finds slow pipelines by the times that all ranks exchange, and tells the shim.

    The exchange is a gloo all-gather of one number per rank and step that nobody waits for: its
    result is used at the first step after which it has arrived. Every rank must make one and call
    step() after each of its steps. Times are those before gradients can meet other replicas'
    (`num_before_reduction`): from there on all pipelines look alike.

    Args:
        shim: whose plan has a ladder.
    """

    def __init__(self, shim: Shim) -> None:
        self._detector = StragglerDetector()
        self._shim = shim
        self._pipelines = shim.plan.layout.pipelines
        self._group = dist.new_group(backend="gloo")
        self._flying: deque[tuple[Any, list[torch.Tensor]]] = deque()

    def step(self) -> None:
        """Send this rank's latest time, and use what has arrived."""
        # Our last measured step as it would have been under the fastest plan, s.
        last_iteration = self._shim.last_iteration or IterationTime(1.0, math.nan)
        measured_s, planned_s = last_iteration.measured_s, last_iteration.planned_s
        natural = measured_s * self._shim.planned_time / planned_s
        mine = torch.tensor([natural], dtype=torch.float64)
        everybody = [torch.empty_like(mine) for _ in self._pipelines]
        work = dist.all_gather(everybody, mine, group=self._group, async_op=True)
        self._flying.append((work, everybody))
        while self._flying and self._flying[0][0].is_completed():
            _, arrived = self._flying.popleft()
            self._use([float(time) for time in arrived])

    def _use(self, times: Sequence[float]) -> None:
        slowest: dict[int, float] = {}
        for pipeline, time in zip(self._pipelines, times, strict=True):
            # A pipeline takes as long as the longest of its ranks sees it take.
            slowest[pipeline] = max(slowest.get(pipeline, 0.0), time)
        ours = slowest.pop(self._pipelines[self._shim.rank])
        if math.isnan(sum(times)) or ours <= 0:
            return
        late = self._detector.observe(ours, max(slowest.values()))
        self._shim.set_straggler_time(late * self._shim.planned_time if late > 1 else None)
