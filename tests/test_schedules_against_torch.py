"""PyTorch's own schedule classes, CSV files and loaders against ours, operation by operation."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from envplan.errors import InputError
from envplan.pipeline import Pipeline
from envplan.pipeline.imports.torch_csv import (
    as_torch_csv,
    pipeline_from_torch,
    read_torch_csv,
    read_torch_schedule,
)
from envplan.pipeline.operations import short_name
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
SHAPES = [
    *((name, 1) for name in SINGLE_STAGE),
    *((name, chunks) for name in list(MULTI_STAGE)[:3] for chunks in (1, 2, 3, 4)),
    ("zb-h1", 1),
    ("zb-v", 2),
    ("dualpipe-v", 2),
]


class Stage:
    """As much of a pipeline stage as a schedule looks at; it notes what it is told to compute."""

    submod = None
    is_first = is_last = False
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


def stages(ranks: int, chunks: int, rank: int = 0) -> list[Any]:
    return [Stage(rank, ranks, rank + chunk * ranks, ranks * chunks) for chunk in range(chunks)]


def live(name: str, ranks: int, chunks: int, microbatches: int, rank: int = 0) -> Any:
    """An object of PyTorch's class; ValueError where it refuses the shape."""
    return MULTI_STAGE[name](stages(ranks, chunks, rank), microbatches, loss_fn=lambda a, b: a - b)


def held(schedule: Any) -> list[list[str]]:
    """What a schedule object holds for each rank, without idle steps; the two parts of an
    overlapped forward and backward in their order.
    """
    orders = []
    for _, actions in sorted(schedule.pipeline_order.items()):
        present = [action for action in actions if action is not None]
        orders.append([str(p) for action in present for p in (action.sub_actions or [action])])
    return orders


def torch_orders(name: str, ranks: int, chunks: int, microbatches: int) -> list[list[str]]:
    """What PyTorch's class runs on each rank; ValueError where it refuses the shape."""
    if name in SINGLE_STAGE:
        return [ran_by(name, rank, ranks, microbatches) for rank in range(ranks)]
    return held(live(name, ranks, chunks, microbatches))


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


def named(orders: Iterable[Iterable[Any]]) -> list[list[str]]:
    return [list(map(short_name, order)) for order in orders]


def ours(name: str, ranks: int, chunks: int, microbatches: int) -> list[list[str]]:
    return named(orders_of(Pipeline(name, ranks, microbatches, num_chunks=chunks)))


@pytest.mark.parametrize(("name", "chunks"), SHAPES)
def test_every_rank_runs_the_same_operations_in_the_same_order(name: str, chunks: int) -> None:
    compared = 0
    for ranks in RANKS:
        for microbatches in MICROBATCHES:
            try:
                theirs = torch_orders(name, ranks, chunks, microbatches)
            except ValueError:
                continue
            assert ours(name, ranks, chunks, microbatches) == theirs, (ranks, microbatches)
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
                    ours(name, ranks, 2, microbatches)
                refused += 1
    assert refused >= 15


@pytest.mark.parametrize(("name", "chunks"), SHAPES)
def test_csv_and_live_objects_are_read_and_written_as_pytorch_does(
    name: str, chunks: int, tmp_path: Path
) -> None:
    path = tmp_path / "schedule.csv"
    for ranks, microbatches in ((1, 4), (2, 8), (3, 9), (4, 8)):
        pipeline = Pipeline(name, ranks, microbatches, num_chunks=chunks)
        order = named(orders_of(pipeline))
        if name in SINGLE_STAGE:
            for cls in (SINGLE_STAGE[name], type("Mine", (SINGLE_STAGE[name],), {})):
                theirs = cls(*stages(ranks, 1), microbatches, loss_fn=lambda a, b: a - b)
                assert pipeline_from_torch(theirs).operations == pipeline.operations
        else:
            theirs = live(name, ranks, chunks, microbatches)
            other_rank = live(name, ranks, chunks, microbatches, ranks - 1)
            assert named(read_torch_schedule(other_rank).orders) == order
            taken = pipeline_from_torch(theirs, p2p_latency=0.001)
            assert taken.operations == pipeline.operations
            assert taken.p2p_latency_ns == 1_000_000
            for form in ("compute_only", "compute_comms"):
                theirs._dump_csv(path, form)
                assert named(read_torch_csv(path).orders) == order
        for loader in ("_PipelineScheduleRuntime", "PipelineScheduleMulti"):
            path.write_text(as_torch_csv(pipeline))
            loaded = getattr(torch_schedules, loader)(
                stages(ranks, chunks), microbatches, loss_fn=lambda a, b: a - b
            )
            loaded._load_csv(path)
            assert held(loaded) == order
            if loader == "_PipelineScheduleRuntime":
                loaded._dump_csv(path, "compute_comms")
                assert named(read_torch_csv(path).orders) == order


def test_changed_order_becomes_a_dag() -> None:
    theirs = live("looped-bfs", 2, 1, 2)
    row = theirs.pipeline_order[1]
    row[-2], row[-1] = row[-1], row[-2]
    pipeline = pipeline_from_torch(theirs)
    assert pipeline.schedule == "dag"
    assert [op.microbatch for op in pipeline.operations[-2:]] == [0, 1]
    row[-1] = "1BW0"
    with pytest.raises(InputError, match='line 2, column 5: "1BW0" is no action'):
        pipeline_from_torch(theirs)


def test_object_that_is_no_such_schedule_is_refused() -> None:
    class Loop:
        def _step_microbatches(self) -> None: ...

    forward_only = torch_schedules._ScheduleForwardOnly(stages(2, 1)[0], 4)
    for thing in (object(), Loop(), forward_only, None):
        with pytest.raises(InputError, match="is no schedule of torch"):
            pipeline_from_torch(thing)
