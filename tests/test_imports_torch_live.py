"""PyTorch's own schedule classes, its CSV files and its loader against ours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from string import digits
from types import SimpleNamespace
from typing import Any

import pytest

from envplan.errors import InputError
from envplan.pipeline import Operation, Pipeline
from envplan.pipeline.imports import as_torch_csv, read_torch_csv, read_torch_schedule
from schedule_oracles import orders_of

pytest.importorskip("torch", reason="torch is not installed: pip install torch")

from torch.distributed.pipelining import schedules as torch_schedules

#: Class, stages per rank, and what envplan calls it.
CLASSES = [
    *(("ScheduleInterleaved1F1B", chunks, "interleaved") for chunks in (1, 2, 3)),
    *(("ScheduleLoopedBFS", chunks, "looped-bfs") for chunks in (1, 3)),
    ("ScheduleInterleavedZeroBubble", 2, "interleaved-zb"),
    ("ScheduleZBVZeroBubble", 2, "zb-v"),
    ("ScheduleDualPipeV", 2, "dualpipe-v"),
]
SHAPES = [(1, 4), (2, 4), (2, 8), (3, 6), (3, 9), (4, 12), (4, 8)]
LETTERS = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}


def stages(ranks: int, per_rank: int, *, rank: int = 0) -> list[Any]:
    """What PyTorch's schedules want to know of one rank's stages before they run."""
    return [
        SimpleNamespace(
            stage_index=index,
            is_first=False,
            is_last=False,
            num_stages=ranks * per_rank,
            group_size=ranks,
            group_rank=rank,
            submod=None,
        )
        for index in range(per_rank)
    ]


def loss(output: Any, target: Any) -> Any:
    return output - target


def schedule(name: str, ranks: int, per_rank: int, microbatches: int, *, rank: int = 0) -> Any:
    """An object of PyTorch's class; None for a shape that the class refuses."""
    cls = getattr(torch_schedules, name)
    try:
        return cls(stages(ranks, per_rank, rank=rank), microbatches, loss_fn=loss)
    except ValueError:
        return None


def held(order: dict[int, list[Any]]) -> list[list[tuple[int, str, int]]]:
    """The actions that a schedule object holds, by rank: model stage, instruction, microbatch."""
    ranks = []
    for rank in sorted(order):
        flat = [
            part
            for action in order[rank]
            if action is not None
            for part in (action.sub_actions or (action,))
        ]
        ranks.append(
            [(a.stage_index, LETTERS[str(a).strip(digits)], a.microbatch_index) for a in flat]
        )
    return ranks


def imported(orders: Sequence[Sequence[Operation]]) -> list[list[tuple[int, str, int]]]:
    return [[(op.profile_stage, op.instruction, op.microbatch) for op in o] for o in orders]


@pytest.mark.parametrize(("name", "per_rank", "known_as"), CLASSES)
def test_csv_and_live_schedule_are_the_order_that_the_class_holds(
    name: str, per_rank: int, known_as: str, tmp_path: Path
) -> None:
    path = tmp_path / "schedule.csv"
    compared = 0
    for ranks, microbatches in SHAPES:
        theirs = schedule(name, ranks, per_rank, microbatches)
        if theirs is None:
            continue
        for form in ("compute_only", "compute_comms"):
            theirs._dump_csv(path, form)
            read = read_torch_csv(path)
            assert imported(read.orders) == held(theirs.pipeline_order)
            assert read.num_chunks == per_rank
            compared += 1
        other_rank = schedule(name, ranks, per_rank, microbatches, rank=ranks - 1)
        assert read_torch_schedule(other_rank).orders == read.orders
        live = Pipeline.from_torch(theirs, p2p_latency=0.001)
        assert Pipeline.from_orders(read.orders).operations == live.operations
        assert live.p2p_latency_ns == 1_000_000
    assert live.schedule == known_as
    assert compared >= 8


@pytest.mark.parametrize(
    ("name", "known_as"), [("ScheduleGPipe", "gpipe"), ("Schedule1F1B", "1f1b")]
)
def test_live_schedule_of_one_stage_per_rank_is_known_by_its_class(
    name: str, known_as: str
) -> None:
    cls = getattr(torch_schedules, name)
    for ranks, microbatches in ((1, 3), (2, 2), (4, 8)):
        theirs = cls(stages(ranks, 1)[0], microbatches, loss_fn=loss)
        pipeline = Pipeline.from_torch(theirs)
        assert pipeline.operations == Pipeline(known_as, ranks, microbatches).operations
    derived = type("Mine", (cls,), {})(stages(4, 1)[0], 8, loss_fn=loss)
    assert Pipeline.from_torch(derived).schedule == known_as


def test_changed_order_becomes_a_dag() -> None:
    theirs = schedule("ScheduleLoopedBFS", 2, 1, 2)
    row = theirs.pipeline_order[1]
    row[-2], row[-1] = row[-1], row[-2]
    pipeline = Pipeline.from_torch(theirs)
    assert pipeline.schedule == "dag"
    assert [op.microbatch for op in pipeline.operations[-2:]] == [0, 1]


def test_reductions_of_gradients_can_be_kept() -> None:
    theirs = schedule("ScheduleInterleaved1F1B", 2, 2, 4)
    orders = read_torch_schedule(theirs, keep=("all_reduce",)).orders
    reduced = [
        op.profile_stage for order in orders for op in order if op.instruction == "all_reduce"
    ]
    assert sorted(reduced) == [0, 1, 2, 3]


def test_object_that_is_no_such_schedule_is_refused() -> None:
    class Loop:
        def _step_microbatches(self) -> None: ...

    forward_only = torch_schedules._ScheduleForwardOnly(stages(2, 1)[0], 4)
    for thing in (object(), Loop(), forward_only, None):
        with pytest.raises(InputError, match="is no schedule of torch"):
            Pipeline.from_torch(thing)


def test_action_of_another_version_is_refused() -> None:
    theirs = schedule("ScheduleLoopedBFS", 2, 1, 2)
    theirs.pipeline_order[1][-1] = "1BW0"
    with pytest.raises(InputError, match='rank 1, action 5: "1BW0" is no action'):
        Pipeline.from_torch(theirs)


@pytest.mark.parametrize(
    ("name", "chunks"),
    [
        *((name, 1) for name in ("1f1b", "gpipe", "zb-h1")),
        *((name, 2) for name in ("interleaved", "interleaved-zb", "zb-v", "dualpipe-v")),
        ("looped-bfs", 3),
    ],
)
def test_pytorch_loads_the_csv_that_envplan_exports(name: str, chunks: int, tmp_path: Path) -> None:
    path = tmp_path / "schedule.csv"
    for ranks, microbatches in ((2, 4), (4, 8)):
        pipeline = Pipeline(name, ranks, microbatches, num_chunks=chunks)
        path.write_text(as_torch_csv(pipeline))
        for loader in ("_PipelineScheduleRuntime", "PipelineScheduleMulti"):
            theirs = getattr(torch_schedules, loader)(
                stages(ranks, chunks), microbatches, loss_fn=loss
            )
            theirs._load_csv(path)
            assert held(theirs.pipeline_order) == imported(orders_of(pipeline))
            if loader == "_PipelineScheduleRuntime":
                theirs._dump_csv(path, "compute_comms")
                assert (
                    Pipeline.from_imported(read_torch_csv(path)).operations == pipeline.operations
                )
                path.write_text(as_torch_csv(pipeline))
