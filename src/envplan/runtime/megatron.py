"""Frequency plans for Megatron-LM, in two lines.

    from envplan.runtime.megatron import follow

    with follow("run.freqplan.json"):
        pretrain(...)

or around any loop over what get_forward_backward_func() returns, which must be called inside. The
plan's schedule is 1f1b, or interleaved with virtual pipeline stages (--vp for their number, and
--microbatch-group for microbatch_group_size_per_vp_stage). Overlapped transfers
(overlap_p2p_comm) change nothing in that; `record` writes the order that a job really has.

Megatron's schedules call the functions forward_step and backward_step of their own module,
megatron.core.pipeline_parallel.schedules. There they are replaced, for as long as the plan is
followed, by ones that tell the shim and then call them. Microbatches are numbered in the order in
which each model chunk gets them; a backward is that of the forward whose output it is given.
Schedules that overlap the forward of one microbatch with the backward of another
(overlap_moe_expert_parallel_comm) do not call them and run at the clock there is.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from envplan.errors import InputError
from envplan.profile import ProfileMetadata
from envplan.runtime.frameworks import Hooks, Job, Listener, followed, profiled, recorded

if TYPE_CHECKING:
    from envplan.enforce.freqplan import FrequencyPlan
    from envplan.runtime.frameworks import Recorder
    from envplan.runtime.profiler import Profiler
    from envplan.runtime.shim import Shim

__all__ = ["attach", "follow", "profile", "record"]

_SCHEDULES: Final = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
)


def follow(
    plan: FrequencyPlan | str | os.PathLike[str], **options: Any
) -> AbstractContextManager[Shim]:
    """Run Megatron's pipeline schedules under a frequency plan; on every rank.

    torch.distributed must have been initialized.

    Args:
        plan: a frequency plan, or the path of one.
        options: as for followed: `stragglers=False`, and those of Shim.

    Raises:
        InputError: as for Shim, or Megatron is not installed.
    """
    return followed(plan, _job(), **options)


def profile(
    path: str | os.PathLike[str] = "profile.csv", **options: Any
) -> AbstractContextManager[Profiler]:
    """Measure the profile of a job while it trains; on every rank. Options are those of Profiler.

    Megatron's model parallelism must have been initialized.

    Raises:
        InputError: as for Profiler, or Megatron is not installed.
    """
    return profiled(path, _job(), **options)


def record(
    path: str | os.PathLike[str] = "pipeline.dag.json",
) -> AbstractContextManager[Recorder]:
    """Write the order in which a job really runs its operations as a DAG file.

    Raises:
        InputError: Megatron is not installed.
    """
    return recorded(path, _job())


def _job() -> Job:
    _schedules()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return Job(attach, device, _known)


def _known() -> dict[str, Any]:
    from megatron.core import parallel_state  # type: ignore[import-not-found, unused-ignore]

    ranks = parallel_state.get_pipeline_model_parallel_world_size()
    rank = parallel_state.get_pipeline_model_parallel_rank()
    chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
    return {
        "stages": [chunk * ranks + rank for chunk in range(chunks)],
        "num_stages": ranks * chunks,
        "metadata": ProfileMetadata(
            schedule="1f1b" if chunks == 1 else "interleaved",
            tensor_parallel=parallel_state.get_tensor_model_parallel_world_size(),
        ),
    }


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
    hooks = Hooks(listener, after_step, "what get_forward_backward_func returns")
    forward, backward = schedules.forward_step, schedules.backward_step
    chunks: dict[int, int] = {}  # of a model, by its id
    forwards: Counter[int] = Counter()  # so far, of a chunk
    places: dict[int, tuple[int, int]] = {}  # microbatch and chunk, by the id of an output

    def forward_step(func: Any, data: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        # Every schedule starts with chunk 0 and goes through the chunks in order.
        chunk = chunks.setdefault(id(model), len(chunks))
        place = forwards[chunk], chunk
        forwards[chunk] += 1
        run = partial(forward, func, data, model, *args, **kwargs)
        result = hooks.operation(run, "forward", *place)
        if hooks.training:
            places[id(_tensor(result[0] if isinstance(result, tuple) else result))] = place
        return result

    def backward_step(input_tensor: Any, output_tensor: Any, *args: Any, **kwargs: Any) -> Any:
        run = partial(backward, input_tensor, output_tensor, *args, **kwargs)
        place = places.pop(id(_tensor(output_tensor)), None)
        return run() if place is None else hooks.operation(run, "backward", *place)

    def hooked(run: Callable[..., Any]) -> Callable[..., Any]:
        def iteration(*args: Any, **kwargs: Any) -> Any:
            for known in (chunks, forwards, places):
                known.clear()
            training = not kwargs.get("forward_only", False)
            return hooks.iteration(partial(run, *args, **kwargs), training=training)

        return iteration

    hooks.replace(schedules, "forward_step", forward_step)
    hooks.replace(schedules, "backward_step", backward_step)
    for name in _SCHEDULES:
        hooks.replace(schedules, name, hooked(getattr(schedules, name)))
    return hooks.detach


def _tensor(value: Any) -> Any:
    """The first tensor of what may be a list of them."""
    return value[0] if isinstance(value, list) and value else value


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
