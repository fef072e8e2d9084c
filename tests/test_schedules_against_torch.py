"""Every schedule's order, operation by operation, against PyTorch's own classes."""

from __future__ import annotations

from typing import Any

import pytest

from envplan.errors import InputError
from envplan.pipeline import Pipeline
from envplan.pipeline.dependencies import short_name
from schedule_oracles import orders_of

pytest.importorskip("torch", reason="torch is not installed: pip install torch")

from torch.distributed.pipelining import schedules as torch_schedules

from envplan.runtime.torch import SCHEDULE_NAMES

MULTI_STAGE = {name: getattr(torch_schedules, cls) for cls, name in SCHEDULE_NAMES.items()}
SINGLE_STAGE = {name: MULTI_STAGE.pop(name) for name in ("gpipe", "1f1b")}
# PyTorch has no class of that name.
MULTI_STAGE["zb-h1"] = MULTI_STAGE["interleaved-zb"]
RANKS = (1, 2, 3, 4, 6, 8)
MICROBATCHES = range(1, 21)


class Stage:
    """As much of a pipeline stage as a schedule looks at; it notes what it is told to compute."""

    submod = None
    is_last = False
    has_backward = True

    def __init__(self, rank: int, ranks: int, index: int, stages: int) -> None:
        self.group_rank, self.group_size = rank, ranks
        self.stage_index, self.num_stages = index, stages
        self.ran: list[str] = []

    def forward_one_chunk(self, microbatch: int, *_: Any, **__: Any) -> None:
        self.ran.append(f"{self.stage_index}F{microbatch}")

    def backward_one_chunk(self, microbatch: int, *_: Any, **__: Any) -> None:
        self.ran.append(f"{self.stage_index}B{microbatch}")

    def perform_reduce_grad(self, _: int) -> None:
        """Gradients are not followed here, nor is what was sent."""

    release_fwd_send_outputs = release_bwd_send_outputs = perform_reduce_grad

    def _no_transfers(self, _: int) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = _no_transfers


def torch_orders(name: str, ranks: int, chunks: int, microbatches: int) -> list[list[str]]:
    """What PyTorch's class runs on each rank; ValueError where it refuses the shape."""
    if name in SINGLE_STAGE:
        return [ran_by(name, rank, ranks, microbatches) for rank in range(ranks)]
    stages = [Stage(0, ranks, chunk * ranks, ranks * chunks) for chunk in range(chunks)]
    order = MULTI_STAGE[name](stages, microbatches).pipeline_order
    return [computations(order[rank]) for rank in range(ranks)]


def computations(actions: list[Any]) -> list[str]:
    """Without idle steps; the two parts of an overlapped forward and backward in their order."""
    present = [action for action in actions if action is not None]
    flat = [part for action in present for part in (action.sub_actions or [action])]
    return [str(part) for part in flat]


def ran_by(name: str, rank: int, ranks: int, microbatches: int) -> list[str]:
    """What the schedule's own loop has the stage compute.

    Not pipeline_order: PyTorch 2.13 does not run these two by it, and for 1F1B it counts the last
    rank's forwards from 1.
    """
    stage = Stage(rank, ranks, rank, ranks)
    schedule = SINGLE_STAGE[name](stage, max(ranks, microbatches))
    schedule._n_microbatches = microbatches  # 1F1B's loop can run fewer, its constructor cannot
    schedule._initialize_stage = lambda *_: None
    schedule._step_microbatches()
    return stage.ran


def our_orders(name: str, ranks: int, chunks: int, microbatches: int) -> list[list[str]]:
    orders = orders_of(Pipeline(name, ranks, microbatches, num_chunks=chunks))
    return [list(map(short_name, order)) for order in orders]


@pytest.mark.parametrize(
    ("name", "chunks"),
    [
        *((name, 1) for name in SINGLE_STAGE),
        *((name, chunks) for name in list(MULTI_STAGE)[:3] for chunks in (1, 2, 3, 4)),
        ("zb-h1", 1),
        ("zb-v", 2),
        ("dualpipe-v", 2),
    ],
)
def test_every_rank_runs_the_same_operations_in_the_same_order(name: str, chunks: int) -> None:
    compared = 0
    for ranks in RANKS:
        for microbatches in MICROBATCHES:
            try:
                theirs = torch_orders(name, ranks, chunks, microbatches)
            except ValueError:
                continue
            assert our_orders(name, ranks, chunks, microbatches) == theirs, (ranks, microbatches)
            compared += 1
    assert compared >= 70


@pytest.mark.parametrize("name", ["interleaved", "interleaved-zb", "dualpipe-v"])
def test_shapes_that_pytorch_refuses_are_refused(name: str) -> None:
    refused = 0
    for ranks in RANKS:
        for microbatches in MICROBATCHES:
            try:
                torch_orders(name, ranks, 2, microbatches)
            except ValueError:
                with pytest.raises(InputError, match=f"schedule {name}"):
                    our_orders(name, ranks, 2, microbatches)
                refused += 1
    assert refused >= 15


@pytest.mark.parametrize("name", ["zb-v", "dualpipe-v"])
@pytest.mark.parametrize("chunks", [1, 3])
def test_v_schedules_have_two_chunks_here_as_in_pytorch(name: str, chunks: int) -> None:
    with pytest.raises(ValueError, match="exactly 2 stages per rank"):
        torch_orders(name, 2, chunks, 8)
    with pytest.raises(InputError, match=f"{name} runs two model chunks per stage, not {chunks}"):
        our_orders(name, 2, chunks, 8)
