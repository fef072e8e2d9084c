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

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

import torch

from envplan.errors import InputError
from envplan.runtime.frameworks import Hooks, Job, JobDescription, entry_points, named_type
from envplan.runtime.observer import OperationObserver

__all__ = ["attach", "follow", "profile", "record"]

_SCHEDULES: Final = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
)


def _job(engine: object) -> Job:
    if engine is not None:
        raise InputError(
            "Megatron is followed by the plan alone: leave out the second argument, "
            f"{named_type(engine)}"
        )
    _schedules()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return Job(attach, device, _describe)


def _describe() -> JobDescription:
    from megatron.core import parallel_state  # type: ignore[import-not-found, unused-ignore]

    from envplan.profile import ProfileMetadata

    ranks = parallel_state.get_pipeline_model_parallel_world_size()
    rank = parallel_state.get_pipeline_model_parallel_rank()
    chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
    return JobDescription(
        stages=[chunk * ranks + rank for chunk in range(chunks)],
        num_stages=ranks * chunks,
        metadata=ProfileMetadata(
            schedule="1f1b" if chunks == 1 else "interleaved",
            tensor_parallel=parallel_state.get_tensor_model_parallel_world_size(),
        ),
    )


follow, _profile, _record = entry_points(_job)
profile, record = partial(_profile, None), partial(_record, None)


class _Microbatch(NamedTuple):
    """A microbatch of a model chunk."""

    number: int
    chunk: int


def attach(observer: OperationObserver) -> Hooks:
    """Tell an observer what Megatron does, until the hooks are closed.

    Raises:
        InputError: Megatron is not installed.
    """
    schedules = _schedules()
    hooks = Hooks(observer, "what get_forward_backward_func returns")
    forward, backward = schedules.forward_step, schedules.backward_step
    chunk_of: dict[int, int] = {}  # by the id of a model
    num_forwards: Counter[int] = Counter()  # so far in this iteration, by chunk
    microbatch_of: dict[int, _Microbatch] = {}  # by the id of an output

    def forward_step(func: Any, data: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        # Every schedule starts with chunk 0 and goes through the chunks in order.
        chunk = chunk_of.setdefault(id(model), len(chunk_of))
        microbatch = _Microbatch(num_forwards[chunk], chunk)
        num_forwards[chunk] += 1
        run = partial(forward, func, data, model, *args, **kwargs)
        result = hooks.operation(run, "forward", microbatch.number, chunk)
        if hooks.training:
            output = _tensor(result[0] if isinstance(result, tuple) else result)
            microbatch_of[id(output)] = microbatch
        return result

    def backward_step(input_tensor: Any, output_tensor: Any, *args: Any, **kwargs: Any) -> Any:
        run = partial(backward, input_tensor, output_tensor, *args, **kwargs)
        microbatch = microbatch_of.pop(id(_tensor(output_tensor)), None)
        if microbatch is None:
            return run()
        return hooks.operation(run, "backward", microbatch.number, microbatch.chunk)

    def hooked(run: Callable[..., Any]) -> Callable[..., Any]:
        def iteration(*args: Any, **kwargs: Any) -> Any:
            for of_iteration in (chunk_of, num_forwards, microbatch_of):
                of_iteration.clear()
            training = not kwargs.get("forward_only", False)
            return hooks.iteration(partial(run, *args, **kwargs), training=training)

        return iteration

    hooks.replace(schedules, "forward_step", forward_step)
    hooks.replace(schedules, "backward_step", backward_step)
    for name in _SCHEDULES:
        hooks.replace(schedules, name, hooked(getattr(schedules, name)))
    return hooks


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
