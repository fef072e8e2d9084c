"""Stands in for megatron.core.pipeline_parallel.schedules: the same names call each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def forward_step(
    forward_step_func: Callable[..., Any],
    data_iterator: Any,
    model: Any,
    num_microbatches: int,
    **_: Any,
) -> tuple[Any, int]:
    return forward_step_func(data_iterator, model), num_microbatches


def backward_step(
    input_tensor: Any, output_tensor: Any, output_tensor_grad: Any, model_type: Any, config: Any
) -> Any:
    return output_tensor


def forward_backward_no_pipelining(**_: Any) -> None:
    return None


def forward_backward_pipelining_without_interleaving(
    *,
    order: Sequence[tuple[str, int, int]],
    models: Sequence[object],
    forward_only: bool = False,
) -> list[Any]:
    waiting: list[list[Any]] = [[] for _ in models]
    done = []
    for instruction, _, chunk in order:
        if instruction == "forward":
            output, _ = forward_step(lambda _data, _model: [object()], None, models[chunk], 8)
            waiting[chunk].append(output)
        elif not forward_only:
            done.append(backward_step(None, waiting[chunk].pop(0), None, None, None))
    return done


forward_backward_pipelining_with_interleaving = forward_backward_pipelining_without_interleaving
