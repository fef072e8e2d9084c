"""Following a plan, profiling and recording, for all frameworks on torch.distributed.

A framework's module says where operations begin and end, in a function `attach`, and makes a Job of
what its users have, such as an engine; `entry_points` makes its `follow`, `profile` and `record` of
that.
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
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
import torch.distributed as dist

from envplan.devices import Counted
from envplan.enforce.freqplan import OperationKey
from envplan.errors import InputError
from envplan.runtime.observer import OperationObserver
from envplan.runtime.parts import hook_parts
from envplan.runtime.preflight import Status, check_frameworks
from envplan.runtime.shim import Shim
from envplan.runtime.stragglers import StragglerDetector

if TYPE_CHECKING:  # nodes that only follow a plan load no planning and no profiler
    from envplan.enforce.freqplan import FrequencyPlan
    from envplan.pipeline import Pipeline
    from envplan.pipeline.imports import Computation
    from envplan.profile import ProfileMetadata
    from envplan.runtime.profiler import Profiler

__all__ = ["EntryPoints", "Hooks", "Job", "JobDescription", "entry_points", "named_type"]

#: After so many further iterations the times of an iteration are used.
_EXCHANGE_ITERATIONS: Final = 2

_logger = logging.getLogger("envplan.runtime")


class Hooks(ExitStack):
    """Functions of a framework that are replaced by ones that tell an observer, until it is closed.

    Args:
        observer: that is told.
        entry: what runs an iteration, by the name that users know.

    Attributes:
        training: whether a training iteration runs, and no evaluation.
        after_iteration: called after each training iteration.
    """

    def __init__(self, observer: OperationObserver, entry: str) -> None:
        super().__init__()
        self.training = False
        self.after_iteration: Callable[[], None] | None = None
        self._is_iterating = False  # of either kind
        self._observer = observer
        self._entry = entry

    def replace(self, owner: Any, name: str, function: Any) -> None:
        """Replace an attribute of an object or a module, until the hooks are closed."""
        if name in vars(owner):
            self.callback(setattr, owner, name, vars(owner)[name])
        else:
            self.callback(delattr, owner, name)
        setattr(owner, name, function)

    def iteration(self, run: Callable[[], Any], *, training: bool) -> Any:
        """Run an iteration and tell of its end; an evaluation runs at full speed."""
        if training:
            self._observer.iteration_begins()
        else:
            self._observer.full_speed()
        self._is_iterating, self.training = True, training
        try:
            result = run()
        finally:
            self._is_iterating = self.training = False
        if training:
            self._observer.step()
            if self.after_iteration is not None:
                self.after_iteration()
        return result

    def operation(
        self, run: Callable[[], Any], instruction: str, microbatch: int, chunk: int = 0
    ) -> Any:
        """Run an operation and tell of its begin and end."""
        if not self._is_iterating:
            self._observer.missed(
                f"{self._entry} was taken before this was entered; enter it before"
            )
        if not self.training:
            return run()
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            self._observer.missed(
                "operations are captured in a CUDA graph, and when it is replayed nobody tells of "
                "them; train without CUDA graphs (torchtitan: --training.disable_cuda_graphs)"
            )
            return run()
        self._observer.begin(instruction, microbatch, chunk)
        result = run()
        self._observer.end(instruction, microbatch, chunk)
        return result


@dataclass(frozen=True)
class JobDescription:
    """The part of a model that a rank runs, as only a running job can say it.

    Attributes:
        stages: the model stage of each chunk of this rank.
        num_stages: of the model.
        metadata: for a profile's sidecar.
    """

    stages: Sequence[int]
    num_stages: int
    metadata: ProfileMetadata


@dataclass(frozen=True)
class Job:
    """A framework's training job on this rank.

    Attributes:
        attach: lets the framework tell an observer what it does.
        device: that this rank computes on.
        describe: the description, asked for when it is needed.
        model_chunks: the modules that this rank runs, for clocks by part; none where only the user
            has them.
    """

    attach: Callable[[OperationObserver], Hooks]
    device: torch.device
    describe: Callable[[], JobDescription]
    model_chunks: Sequence[torch.nn.Module] = ()


class EntryPoints(NamedTuple):
    """The functions of a framework's module that users call. Every rank must enter them."""

    follow: Callable[..., AbstractContextManager[Shim]]
    profile: Callable[..., AbstractContextManager[Profiler]]
    record: Callable[..., AbstractContextManager[Recorder]]


def _warn_of_unknown_versions() -> None:
    """Say which frameworks are of versions that envplan was not tested with."""
    for remark in check_frameworks():
        if remark.status is Status.WARNING:
            _logger.warning("%s", remark.detail)


def entry_points(make_job: Callable[[Any], Job]) -> EntryPoints:
    """Make a framework's `follow`, `profile` and `record`.

    Args:
        make_job: of what the framework runs a job by, such as its schedule or engine.
    """

    @contextmanager
    def follow(
        plan: FrequencyPlan | str | os.PathLike[str],
        engine: Any = None,
        *,
        stragglers: bool = True,
        model: Sequence[torch.nn.Module] = (),
        **options: Any,
    ) -> Iterator[Shim]:
        """Run a job under a frequency plan, while the context lasts.

        torch.distributed must have been initialized.

        Args:
            plan: a frequency plan, or the path of one.
            engine: the framework's, or its schedule.
            stragglers: look for slow pipelines, where the plan has a ladder and there are several.
            model: chunks of the model that this rank runs, where the job does not know them.
            options: for Shim; raises as that does.
        """
        job = make_job(engine)
        rank_options = _options_of_rank(job.device, is_device_given="device" in options)
        with Shim(plan, **(rank_options | options)) as shim, job.attach(shim) as hooks:
            if shim.rank == 0:
                _warn_of_unknown_versions()
            if stragglers and shim.has_ladder and shim.plan.layout.dp > 1:
                hooks.after_iteration = StragglerWatch(shim).after_iteration
            with hook_parts(shim, model or job.model_chunks):
                yield shim

    @contextmanager
    def profile(
        engine: Any,
        path: str | os.PathLike[str] = "profile.csv",
        *,
        model: Sequence[torch.nn.Module] = (),
        **options: Any,
    ) -> Iterator[Profiler]:
        """Measure the profile of a job while it trains; see envplan.runtime.profiler.

        Args:
            engine: as for follow.
            path: of the profile, in a folder that all ranks see.
            model: as for follow.
            options: for Profiler; raises as that does.
        """
        from envplan.runtime.profiler import Profiler

        job = make_job(engine)
        description = job.describe()
        options = {
            **_options_of_rank(job.device, is_device_given="device" in options),
            "stages": description.stages,
            "num_stages": description.num_stages,
            "metadata": description.metadata,
            **options,
        }
        with (
            Profiler(path, **options) as profiler,
            job.attach(profiler),
            hook_parts(profiler, model or job.model_chunks),
        ):
            yield profiler

    @contextmanager
    def record(
        engine: Any, path: str | os.PathLike[str] = "pipeline.dag.json"
    ) -> Iterator[Recorder]:
        """Write the order of a job's first training iteration, as it really runs, as a DAG file.

        Args:
            engine: as for follow.
            path: of the DAG file, which rank 0 writes.
        """
        job = make_job(engine)
        recorder = Recorder(path, job.describe)
        with job.attach(recorder):
            yield recorder

    return EntryPoints(follow, profile, record)


class Recorder(OperationObserver):
    """Records the operations that each rank runs in one training iteration, on rank 0.

    Nothing that goes wrong with it ends training: it is logged, and there is no file.

    Args:
        path: of the DAG file.
        describe: as in Job.

    Attributes:
        pipeline: that was recorded, on rank 0 after the iteration; None before.
    """

    _consequence = "nothing is recorded"

    def __init__(
        self, path: str | os.PathLike[str], describe: Callable[[], JobDescription]
    ) -> None:
        self.pipeline: Pipeline | None = None
        self.rank = dist.get_rank()
        self._path, self._describe = path, describe
        self._order: list[OperationKey] = []
        self._is_done = False

    def begin(self, instruction: str, microbatch: int, chunk: int = 0) -> None:
        """An operation begins."""
        if not self._is_done:
            self._order.append(OperationKey(instruction, microbatch, chunk))

    def step(self) -> None:
        """An iteration is over: the first one is written."""
        if self._is_done:
            return
        self._is_done = True
        stages = self._describe().stages
        order = [(key.instruction, key.microbatch, stages[key.chunk]) for key in self._order]
        orders_of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(orders_of_ranks, order)
        if self.rank == 0:
            try:
                self._write(orders_of_ranks)
            except InputError as error:
                _logger.warning("%s is not written: %s", self._path, error.message)

    def missed(self, reason: str) -> None:
        """Operations run that it cannot be told of; said unless there is a file already."""
        if not self._is_done:
            self._is_done = True
            super().missed(reason)

    def _write(self, orders_of_ranks: list[list[tuple[str, int, int]]]) -> None:
        """Write the DAG file.

        Args:
            orders_of_ranks: (instruction, microbatch, model stage) of each rank's operations.
        """
        from envplan.pipeline import Pipeline
        from envplan.pipeline.imports import Computation, scheduled

        # Ranks that share stages, as tensor- and data-parallel ones do, run the same.
        order_by_stage: dict[int, list[Computation]] = {}
        for rank_order in orders_of_ranks:
            order = [Computation(*fields) for fields in rank_order]
            if order:
                first_stage = min(computation.model_stage for computation in order)
                order_by_stage[first_stage] = order
        by_stage = [order for _, order in sorted(order_by_stage.items())]
        self.pipeline = Pipeline.from_imported(scheduled(by_stage))
        self.pipeline.save_dag(self._path)
        _logger.warning("%s: %r", self._path, self.pipeline)


def _options_of_rank(device: torch.device, *, is_device_given: bool) -> dict[str, Any]:
    """The options for a Shim or a Profiler that a running job knows itself.

    Args:
        device: that this rank computes on.
        is_device_given: whether the user says which GPU's clock is set.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise InputError(
            "torch.distributed is not initialized yet; call init_process_group (or the "
            "framework's own) before this"
        )
    options: dict[str, Any] = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    if device.type == "cuda":
        # Blocking: else a thread that waits for one spins, on a core that training may need.
        options["marker"] = partial(torch.cuda.Event, enable_timing=True, blocking=True)
        if not is_device_given:
            options["device"] = (
                torch.cuda.current_device() if device.index is None else device.index
            )
            options["counted"] = Counted.BY_CUDA
    return options


def named_type(value: object) -> str:
    """A value for an error: the name of its type, or None."""
    return "None" if value is None else f"a {type(value).__name__}"


class StragglerWatch:
    """Finds slow pipelines by the times that all ranks exchange, and tells the shim.

    The exchange is a gloo all-gather of one number per rank and iteration. Its result is used a
    fixed number of iterations later, so that all ranks of a pipeline change plans at the same one:
    by then every rank has sent its number, for they train together, and nobody waits long. Every
    rank must make one and call after_iteration() after each of its iterations. Times are those
    before gradients can meet other replicas' (`num_before_reduction`): from there on all pipelines
    look alike.

    Args:
        shim: whose plan has a ladder.
    """

    def __init__(self, shim: Shim) -> None:
        self._detector = StragglerDetector()
        self._shim = shim
        self._pipelines = shim.plan.layout.pipelines
        self._group = dist.new_group(backend="gloo")
        self._exchanges: deque[_Exchange] = deque()
        self._has_failed = False

    def after_iteration(self) -> None:
        """Send this rank's latest time, and use those of _EXCHANGE_ITERATIONS before."""
        if self._has_failed:
            return
        try:
            self._exchanges.append(self._send_own_time())
            if len(self._exchanges) <= _EXCHANGE_ITERATIONS:
                return
            exchange = self._exchanges.popleft()
            exchange.work.wait()
        except RuntimeError as error:  # a rank is gone, which training itself will notice
            _logger.warning("stragglers are not looked for any more: %s", error)
            self._has_failed = True
            return
        self._follow_plan_for([float(time_s) for time_s in exchange.times_s])

    def _send_own_time(self) -> _Exchange:
        """Send this rank's time to all ranks and begin to receive theirs."""
        own_time_s = torch.tensor([self._time_at_full_speed_s()], dtype=torch.float64)
        times_s = [torch.empty_like(own_time_s) for _ in self._pipelines]
        work = dist.all_gather(times_s, own_time_s, group=self._group, async_op=True)
        return _Exchange(work, times_s)

    def _time_at_full_speed_s(self) -> float:
        """Our last iteration's time, had it followed the fastest plan; NaN before one."""
        iteration = self._shim.last_iteration
        if iteration is None:
            return math.nan
        return iteration.measured_s * self._shim.planned_time / iteration.planned_s

    def _follow_plan_for(self, times_s: Sequence[float]) -> None:
        """Decide, by the times of all ranks in one iteration, which plan to follow after it.

        Args:
            times_s: by rank; NaN of one that has not measured an iteration yet.
        """
        pipeline_times_s: dict[int, float] = {}
        for pipeline, time_s in zip(self._pipelines, times_s, strict=True):
            # A pipeline takes as long as the longest of its ranks sees it take.
            pipeline_times_s[pipeline] = max(pipeline_times_s.get(pipeline, 0.0), time_s)
        own_time_s = pipeline_times_s.pop(self._pipelines[self._shim.rank])
        all_measured = not any(map(math.isnan, times_s))
        if not all_measured or own_time_s <= 0:
            return
        slowdown = self._detector.observe(own_time_s, max(pipeline_times_s.values()))
        straggler_time_s = slowdown * self._shim.planned_time
        self._shim.set_straggler_time(straggler_time_s if slowdown > 1 else None)


class _Exchange(NamedTuple):
    """A gather of one time per rank that is on its way.

    Attributes:
        work: torch's handle of it.
        times_s: where they arrive.
    """

    work: Any
    times_s: list[torch.Tensor]
