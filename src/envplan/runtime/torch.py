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

and `record` writes the order of operations of the first one as a DAG file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from envplan.profile import ProfileMetadata
from envplan.runtime.frameworks import Hooks, Job, Listener, followed, profiled, recorded

if TYPE_CHECKING:
    from envplan.enforce.freqplan import FrequencyPlan
    from envplan.runtime.frameworks import Recorder
    from envplan.runtime.profiler import Profiler
    from envplan.runtime.shim import Shim

__all__ = ["SCHEDULE_NAMES", "attach", "follow", "profile", "record"]

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

#: Operations by the methods of a stage that do them.
_OPERATIONS: Final = {
    "forward_one_chunk": "forward",
    "backward_one_chunk": "backward",
    "backward_weight_one_chunk": "backward_weight",
}


def follow(
    plan: FrequencyPlan | str | os.PathLike[str], schedule: Any, **options: Any
) -> AbstractContextManager[Shim]:
    """Run a pipeline schedule under a frequency plan, while the context lasts.

    torch.distributed must have been initialized, and every rank must do this.

    Args:
        plan: a frequency plan, or the path of one.
        schedule: of torch.distributed.pipelining.
        options: as for followed: `stragglers=False`, and those of Shim.

    Raises:
        InputError: as for Shim.
    """
    return followed(plan, _job(schedule), **options)


def profile(
    schedule: Any, path: str | os.PathLike[str] = "profile.csv", **options: Any
) -> AbstractContextManager[Profiler]:
    """Measure the profile of a job while it trains; see envplan.runtime.profiler.

    As follow; options are those of Profiler.

    Raises:
        InputError: as for Profiler.
    """
    return profiled(path, _job(schedule), **options)


def record(
    schedule: Any, path: str | os.PathLike[str] = "pipeline.dag.json"
) -> AbstractContextManager[Recorder]:
    """Write the order in which a job really runs its operations as a DAG file."""
    return recorded(path, _job(schedule))


def _job(schedule: Any) -> Job:
    stages = _stages(schedule)
    known = {
        "stages": [stage.stage_index for stage in stages],
        "num_stages": stages[0].num_stages,
        "metadata": ProfileMetadata(schedule=SCHEDULE_NAMES.get(type(schedule).__name__)),
    }
    return Job(
        partial(attach, schedule=schedule),
        stages[0].device,
        lambda: known,
        [stage.submod for stage in stages],
    )


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
    hooks = Hooks(listener, after_step, "the schedule's step")
    for chunk, stage in enumerate(_stages(schedule)):
        for method, instruction in _OPERATIONS.items():
            hooks.replace(stage, method, _hooked(hooks, getattr(stage, method), chunk, instruction))
    run = schedule.step

    def step(*args: Any, **kwargs: Any) -> Any:
        return hooks.iteration(partial(run, *args, **kwargs), training=schedule._has_backward)

    hooks.replace(schedule, "step", step)
    return hooks.detach


def _stages(schedule: Any) -> Sequence[Any]:
    """The schedule's stages on this rank, by chunk: in the order of the model."""
    if not hasattr(schedule, "_stages"):
        return [schedule._stage]
    return sorted(schedule._stages, key=lambda stage: stage.stage_index)


def _hooked(
    hooks: Hooks, run: Callable[..., Any], chunk: int, instruction: str
) -> Callable[..., Any]:
    """A method of a stage, whose first argument is the microbatch, as an operation."""

    def operation(microbatch: int, *args: Any, **kwargs: Any) -> Any:
        name = instruction if kwargs.get("full_backward", True) else "backward_input"
        return hooks.operation(partial(run, microbatch, *args, **kwargs), name, microbatch, chunk)

    return operation
