"""Frequency plans for DeepSpeed's pipeline engine, in two lines.

    from envplan.runtime.deepspeed import follow

    with follow("run.freqplan.json", engine):
        for _ in range(steps):
            engine.train_batch(batches)

`engine` is what deepspeed.initialize returned for a PipelineModule; its training schedule is 1F1B,
and so must the plan's be. DeepSpeed executes a list of instructions, each by the method that the
engine's _INSTRUCTION_MAP has for its class: the engine gets a map of its own in which a forward and
a backward tell the shim. Microbatches are numbered in the order they come in. Gradients that are
reduced and the optimizer's step are no operations of a plan. This module does not import DeepSpeed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from envplan.profile import ProfileMetadata
from envplan.runtime.torch import Listener, followed, profiled

if TYPE_CHECKING:
    from envplan.enforce.freqplan import FrequencyPlan
    from envplan.runtime.profiler import Profiler
    from envplan.runtime.shim import Shim

__all__ = ["attach", "follow", "profile"]

#: Operations by the names of DeepSpeed's instructions.
_OPERATIONS: Final = {"ForwardPass": "forward", "BackwardPass": "backward"}


@contextmanager
def follow(
    plan: FrequencyPlan | str | os.PathLike[str],
    engine: Any,
    *,
    stragglers: bool = True,
    **options: Any,
) -> Iterator[Shim]:
    """Run a pipeline engine under a frequency plan; every rank must do this.

    Args:
        plan: a frequency plan, or the path of one.
        engine: a deepspeed.PipelineEngine.
        stragglers: look for slow pipelines, where the plan has a ladder and there are several.
        options: for Shim.

    Raises:
        InputError: as for Shim.
    """
    with followed(
        plan,
        partial(attach, engine=engine),
        device=engine.device,
        stragglers=stragglers,
        **options,
    ) as shim:
        yield shim


@contextmanager
def profile(
    engine: Any, path: str | os.PathLike[str] = "profile.csv", **options: Any
) -> Iterator[Profiler]:
    """Measure the profile of a job while it trains; every rank must do this.

    Args:
        engine: a deepspeed.PipelineEngine.
        path: of the profile, in a folder that all ranks see.
        options: for Profiler.

    Raises:
        InputError: as for Profiler.
    """
    known = {
        "stages": [engine.stage_id],
        "num_stages": engine.num_stages,
        "metadata": ProfileMetadata(schedule="1f1b"),
    }
    with profiled(
        path, partial(attach, engine=engine), device=engine.device, **{**known, **options}
    ) as profiler:
        yield profiler


def attach(
    listener: Listener, *, engine: Any, after_step: Callable[[], None] | None = None
) -> Callable[[], None]:
    """Tell a shim or a profiler what a pipeline engine does; evaluation runs at full speed.

    Args:
        listener: who is told.
        engine: a deepspeed.PipelineEngine.
        after_step: called after each training step.

    Returns:
        What undoes it.
    """
    done = dict.fromkeys(_OPERATIONS.values(), 0)
    training = False

    def hooked(run: Callable[..., Any], operation: str) -> Callable[..., Any]:
        def instruction(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not training:
                return run(self, *args, **kwargs)
            microbatch = done[operation]
            listener.begin(operation, microbatch)
            result = run(self, *args, **kwargs)
            listener.end(operation, microbatch)
            done[operation] = microbatch + 1
            return result

        return instruction

    train_batch, eval_batch = engine.train_batch, engine.eval_batch

    def train(*args: Any, **kwargs: Any) -> Any:
        nonlocal training
        done.update(dict.fromkeys(done, 0))
        training = True
        try:
            result = train_batch(*args, **kwargs)
        finally:
            training = False
        listener.step()
        if after_step is not None:
            after_step()
        return result

    def evaluate(*args: Any, **kwargs: Any) -> Any:
        listener.full_speed()
        return eval_batch(*args, **kwargs)

    engine._INSTRUCTION_MAP = {
        kind: hooked(run, _OPERATIONS[kind.__name__]) if kind.__name__ in _OPERATIONS else run
        for kind, run in engine._INSTRUCTION_MAP.items()
    }
    engine.train_batch, engine.eval_batch = train, evaluate

    def detach() -> None:
        del engine._INSTRUCTION_MAP, engine.train_batch, engine.eval_batch

    return detach
