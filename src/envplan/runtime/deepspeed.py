"""Frequency plans for DeepSpeed's pipeline engine, in two lines.

    from envplan.runtime.deepspeed import follow

    with follow("run.freqplan.json", engine):
        for _ in range(steps):
            engine.train_batch(batches)

`engine` is what deepspeed.initialize returned for a PipelineModule; its training schedule is 1F1B,
and so must the plan's be. DeepSpeed executes a schedule, a list of instructions, each by the method
that the engine's _INSTRUCTION_MAP has for its class: the engine gets a map of its own in which a
forward and a backward tell the shim. Microbatches are numbered in the order they come in. Gradients
that are reduced and the optimizer's step are no operations of a plan. This module does not import
DeepSpeed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from envplan.errors import InputError
from envplan.runtime.frameworks import Hooks, Job, JobDescription, entry_points, named_type
from envplan.runtime.observer import OperationObserver

__all__ = ["attach", "follow", "profile", "record"]

#: Operations by the names of DeepSpeed's instructions.
_OPERATIONS: Final = {"ForwardPass": "forward", "BackwardPass": "backward"}
#: The class of schedules that evaluate.
_EVALUATION: Final = "InferenceSchedule"


def _job(engine: Any) -> Job:
    if not (hasattr(engine, "_exec_schedule") and hasattr(engine, "_INSTRUCTION_MAP")):
        raise InputError(
            "the second argument must be the engine that deepspeed.initialize returns for a "
            f"PipelineModule, and not {named_type(engine)}"
        )
    return Job(
        attach=partial(attach, engine=engine),
        device=engine.device,
        describe=partial(_describe, engine),
        model_chunks=[engine.module],
    )


def _describe(engine: Any) -> JobDescription:
    from envplan.profile import ProfileMetadata

    return JobDescription(
        stages=[engine.stage_id],
        num_stages=engine.num_stages,
        metadata=ProfileMetadata(schedule="1f1b"),
    )


follow, profile, record = entry_points(_job)


def attach(observer: OperationObserver, engine: Any) -> Hooks:
    """Tell an observer what a pipeline engine does, until the hooks are closed.

    This is where the engine executes a schedule, which a train_batch that was taken before does,
    too.

    Args:
        observer: that is told.
        engine: a deepspeed.PipelineEngine.
    """
    hooks = Hooks(observer, "the engine's train_batch")
    num_begun: Counter[str] = Counter()  # in this iteration, by operation
    execute = engine._exec_schedule

    def hooked(run: Callable[..., Any], operation: str) -> Callable[..., Any]:
        def instruction(self: Any, *args: Any, **kwargs: Any) -> Any:
            microbatch = num_begun[operation]
            num_begun[operation] += 1
            return hooks.operation(partial(run, self, *args, **kwargs), operation, microbatch)

        return instruction

    def execute_schedule(schedule: Any) -> Any:
        num_begun.clear()
        names = {kind.__name__ for kind in type(schedule).__mro__}
        return hooks.iteration(partial(execute, schedule), training=_EVALUATION not in names)

    instructions = {
        kind: hooked(run, _OPERATIONS[kind.__name__]) if kind.__name__ in _OPERATIONS else run
        for kind, run in engine._INSTRUCTION_MAP.items()
    }
    hooks.replace(engine, "_INSTRUCTION_MAP", instructions)
    hooks.replace(engine, "_exec_schedule", execute_schedule)
    return hooks
