"""Frequency plans for Megatron-LM, in two lines.

    from envplan.runtime.megatron import follow

    with follow("run.freqplan.json"):
        pretrain(...)

or around any loop over what get_forward_backward_func() returns, which must be called inside. The
plan's schedule is 1f1b, or interleaved with virtual pipeline stages (--chunks for their number).

Megatron's schedules call the functions forward_step and backward_step of their own module,
megatron.core.pipeline_parallel.schedules. There they are replaced, for as long as the plan is
followed, by ones that tell the shim and then call them. Microbatches are numbered in the order in
which each model chunk gets them; a backward is that of the forward whose output it is given.
Schedules that overlap the forward of one microbatch with the backward of another
(overlap_moe_expert_parallel_comm) do not call them and run at the clock there is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch

from envplan.errors import InputError
from envplan.profile import ProfileMetadata
from envplan.runtime.torch import Listener, followed, profiled

if TYPE_CHECKING:
    from envplan.enforce.freqplan import FrequencyPlan
    from envplan.runtime.profiler import Profiler
    from envplan.runtime.shim import Shim

__all__ = ["attach", "follow", "profile"]

_SCHEDULES: Final = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
)


@contextmanager
def follow(
    plan: FrequencyPlan | str | os.PathLike[str], *, stragglers: bool = True, **options: Any
) -> Iterator[Shim]:
    """Run Megatron's pipeline schedules under a frequency plan; every rank must do this.

    torch.distributed must have been initialized.

    Args:
        plan: a frequency plan, or the path of one.
        stragglers: look for slow pipelines, where the plan has a ladder and there are several.
        options: for Shim.

    Raises:
        InputError: as for Shim, or Megatron is not installed.
    """
    _schedules()
    with followed(plan, attach, device=_device(), stragglers=stragglers, **options) as shim:
        yield shim


@contextmanager
def profile(path: str | os.PathLike[str] = "profile.csv", **options: Any) -> Iterator[Profiler]:
    """Measure the profile of a job while it trains; every rank must do this.

    Megatron's model parallelism must have been initialized.

    Args:
        path: of the profile, in a folder that all ranks see.
        options: for Profiler.

    Raises:
        InputError: as for Profiler, or Megatron is not installed.
    """
    _schedules()
    from megatron.core import parallel_state  # type: ignore[import-not-found, unused-ignore]

    ranks = parallel_state.get_pipeline_model_parallel_world_size()
    rank = parallel_state.get_pipeline_model_parallel_rank()
    chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
    known = {
        "stages": [chunk * ranks + rank for chunk in range(chunks)],
        "num_stages": ranks * chunks,
        "metadata": ProfileMetadata(
            schedule="1f1b" if chunks == 1 else "interleaved",
            tensor_parallel=parallel_state.get_tensor_model_parallel_world_size(),
        ),
    }
    with profiled(path, attach, device=_device(), **{**known, **options}) as profiler:
        yield profiler


def attach(
    listener: Listener, *, after_step: Callable[[], None] | None = None
) -> Callable[[], None]:
    """Tell a shim or a profiler what Megatron does; evaluation runs at full speed.

    Args:
        listener: who is told.
        after_step: called after each training step.

    Returns:
        What undoes it.

    Raises:
        InputError: Megatron is not installed.
    """
    schedules = _schedules()
    names = ("forward_step", "backward_step", *_SCHEDULES)
    originals = {name: getattr(schedules, name) for name in names}
    steps = _Steps(listener, originals["forward_step"], originals["backward_step"], after_step)
    schedules.forward_step = steps.forward_step
    schedules.backward_step = steps.backward_step
    for name in _SCHEDULES:
        setattr(schedules, name, steps.schedule(originals[name]))

    def detach() -> None:
        for name, function in originals.items():
            setattr(schedules, name, function)

    return detach


class _Steps:
    """What stands in for Megatron's functions."""

    def __init__(
        self,
        listener: Listener,
        forward: Callable[..., Any],
        backward: Callable[..., Any],
        after_step: Callable[[], None] | None,
    ) -> None:
        self._listener = listener
        self._forward = forward
        self._backward = backward
        self._after_step = after_step
        self._training = False
        self._chunks: dict[int, int] = {}  # of a model, by its id
        self._forwards: dict[int, int] = {}  # so far, of a chunk
        self._open: dict[int, tuple[int, int]] = {}  # microbatch and chunk, by id of the output

    def forward_step(
        self, forward_step_func: Any, data_iterator: Any, model: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """In the place of schedules.forward_step."""
        if not self._training:
            return self._forward(forward_step_func, data_iterator, model, *args, **kwargs)
        # Every schedule starts with chunk 0 and goes through the chunks in order.
        chunk = self._chunks.setdefault(id(model), len(self._chunks))
        microbatch = self._forwards.get(chunk, 0)
        self._forwards[chunk] = microbatch + 1
        self._listener.begin("forward", microbatch, chunk)
        result = self._forward(forward_step_func, data_iterator, model, *args, **kwargs)
        self._listener.end("forward", microbatch, chunk)
        output = result[0] if isinstance(result, tuple) else result
        self._open[id(_tensor(output))] = microbatch, chunk
        return result

    def backward_step(
        self, input_tensor: Any, output_tensor: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """In the place of schedules.backward_step."""
        place = self._open.pop(id(_tensor(output_tensor)), None)
        if place is None:
            return self._backward(input_tensor, output_tensor, *args, **kwargs)
        self._listener.begin("backward", *place)
        result = self._backward(input_tensor, output_tensor, *args, **kwargs)
        self._listener.end("backward", *place)
        return result

    def schedule(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """In the place of one of the schedules."""

        def iteration(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("forward_only", False):
                self._listener.full_speed()
                return run(*args, **kwargs)
            self._chunks.clear()
            self._forwards.clear()
            self._open.clear()
            self._training = True
            try:
                result = run(*args, **kwargs)
            finally:
                self._training = False
            self._listener.step()
            if self._after_step is not None:
                self._after_step()
            return result

        return iteration


def _tensor(value: Any) -> Any:
    """The first tensor of what may be a list of them."""
    return value[0] if isinstance(value, list) and value else value


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _schedules() -> Any:
    """Megatron's module of pipeline schedules.

    Raises:
        InputError: Megatron is not installed.
    """
    try:
        from megatron.core.pipeline_parallel import (  # type: ignore[import-not-found, unused-ignore]
            schedules,
        )
    except ImportError as error:
        raise InputError(
            f"Megatron cannot be imported ({error}); install it with: pip install megatron-core"
        ) from None
    return schedules
