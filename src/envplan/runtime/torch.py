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

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from envplan.errors import InputError
from envplan.runtime.frameworks import Hooks, Job, JobDescription, entry_points, named_type
from envplan.runtime.observer import OperationObserver

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


def _job(schedule: Any) -> Job:
    if not (hasattr(schedule, "_stages") or hasattr(schedule, "_stage")):
        raise InputError(
            "the second argument must be a schedule of torch.distributed.pipelining, such as a "
            f"Schedule1F1B, and not {named_type(schedule)}"
        )
    stages = _stages(schedule)
    return Job(
        attach=partial(attach, schedule=schedule),
        device=stages[0].device,
        describe=partial(_describe, schedule),
        model_chunks=[stage.submod for stage in stages],
    )


def _describe(schedule: Any) -> JobDescription:
    from envplan.profile import ProfileMetadata

    stages = _stages(schedule)
    return JobDescription(
        stages=[stage.stage_index for stage in stages],
        num_stages=stages[0].num_stages,
        metadata=ProfileMetadata(schedule=SCHEDULE_NAMES.get(type(schedule).__name__)),
    )


follow, profile, record = entry_points(_job)


def attach(observer: OperationObserver, schedule: Any) -> Hooks:
    """Tell an observer what a pipeline schedule does, until the hooks are closed.

    Args:
        observer: that is told.
        schedule: of torch.distributed.pipelining.
    """
    hooks = Hooks(observer, "the schedule's step")
    for chunk, stage in enumerate(_stages(schedule)):
        for method, instruction in _OPERATIONS.items():
            hooks.replace(stage, method, _hooked(hooks, getattr(stage, method), chunk, instruction))
    run = schedule.step
    _tell_of_pairs(observer, schedule)

    def step(*args: Any, **kwargs: Any) -> Any:
        _tell_of_pairs(observer, schedule)  # it may have been registered since
        return hooks.iteration(partial(run, *args, **kwargs), training=schedule._has_backward)

    hooks.replace(schedule, "step", step)
    return hooks


def _tell_of_pairs(observer: OperationObserver, schedule: Any) -> None:
    """Tell of a function that runs a forward and a backward at once, which hooks do not see.

    Without one, torch runs the two one after the other, by the stages' own methods.
    """
    functions = getattr(schedule, "_comp_type_to_function_map", None)
    if functions and any("OVERLAP_F_B" in str(getattr(kind, "name", kind)) for kind in functions):
        observer.missed(
            "the schedule runs forward and backward at once by a function that was registered for "
            "OVERLAP_F_B, so the two cannot be told apart, and iterations run at the highest "
            "clock, as without a plan; without that function torch runs one after the other, "
            "which can be followed"
        )


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
