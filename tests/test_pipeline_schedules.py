"""Generated schedules: their orders as the papers draw them, and the shapes that they refuse.

Those that PyTorch has are compared with its own, in many shapes, in
test_schedules_against_torch.py.
"""

from __future__ import annotations

import json
from itertools import accumulate, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envplan.errors import InputError
from envplan.pipeline import SCHEDULES, Pipeline
from schedule_oracles import orders_of, rank

ALL = {"load": [0], "all_reduce": [0, 1], "optimizer": [0, 1]}
LETTER = {"backward_input": "i", "backward_weight": "w"}


def drawn(pipeline: Pipeline) -> list[str]:
    """`f2b` is the forward of microbatch 2 on chunk b; i and w are the parts of a backward."""
    chunks = "abc" if pipeline.num_chunks > 1 else [""]
    return [
        " ".join(
            f"{LETTER.get(op.instruction, op.instruction[0])}{op.microbatch}{chunks[op.chunk]}"
            for op in stage
        )
        for stage in orders_of(pipeline)
    ]


DRAWN = [
    (
        Pipeline("1f1b", 4, 5),
        """f0 f1 f2 f3 b0 f4 b1 b2 b3 b4
        f0 f1 f2 b0 f3 b1 f4 b2 b3 b4
        f0 f1 b0 f2 b1 f3 b2 f4 b3 b4
        f0 b0 f1 b1 f2 b2 f3 b3 f4 b4""",
    ),
    (
        Pipeline("envpipe", 3, 5, forwards_ahead=[2, 1, 0]),
        """f0 f1 f2 f3 f4 b0 b1 b2 b3 b4
        f0 f1 f2 b0 f3 b1 f4 b2 b3 b4
        f0 b0 f1 b1 f2 b2 f3 b3 f4 b4""",
    ),
    (
        Pipeline("zb-h1", 3, 4),
        """f0 f1 f2 i0 w0 f3 i1 w1 i2 w2 i3 w3
        f0 f1 i0 f2 i1 w0 f3 i2 w1 i3 w2 w3
        f0 i0 f1 i1 f2 i2 w0 f3 i3 w1 w2 w3""",
    ),
    (  # Megatron's order
        Pipeline("interleaved", 2, 4, num_chunks=2),
        """f0a f1a f0b f1b f2a b0b f3a b1b f2b b0a f3b b1a b2b b3b b2a b3a
        f0a f1a f0b b0b f1b b1b f2a b0a f3a b1a f2b b2b f3b b3b b2a b3a""",
    ),
    (  # with operations beside them
        Pipeline("1f1b", 2, 2, extras=ALL),
        "l0 f0 l1 f1 b0 b1 a0 o0\n f0 b0 f1 b1 a0 o0",
    ),
    (
        Pipeline("interleaved", 2, 2, num_chunks=2, extras={"optimizer": [0, 1, 3]}),
        """f0a f1a f0b f1b b0b b1b b0a b1a o0a
        f0a f1a f0b b0b f1b b1b b0a b1a o0a o0b""",
    ),
]


@pytest.mark.parametrize(("pipeline", "stages"), DRAWN, ids=str)
def test_order_is_as_drawn(pipeline: Pipeline, stages: str) -> None:
    assert drawn(pipeline) == [line.strip() for line in stages.splitlines()]


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 5), (2, 1), (4, 9), (5, 3), (8, 16)])
def test_zb_h1_holds_as_many_activations_as_the_first_stage_of_1f1b(
    stages: int, microbatches: int
) -> None:
    held = {"forward": 1, "backward_input": 0, "backward_weight": -1}
    for stage in orders_of(Pipeline("zb-h1", stages, microbatches)):
        most = max(accumulate(held[op.instruction] for op in stage))
        assert most == min(stages, microbatches)


@st.composite
def allowed(draw: st.DrawFn) -> tuple[int, int, list[int]]:
    """Stages, microbatches, and forwards ahead that the rules of EnvPipe's schedule allow.

    At most M - (S - s), falling, but for stages capped by that.
    """
    stages, microbatches = draw(st.integers(1, 5)), draw(st.integers(1, 10))
    ahead: list[int] = []
    capped = True
    for stage in range(stages):
        most = max(0, microbatches - (stages - stage)) if stage < stages - 1 else 0
        ahead.append(draw(st.integers(0, most if capped else min(most, ahead[-1]))))
        capped = ahead[-1] == most
    return stages, microbatches, ahead


@given(allowed(), st.integers(1, 12))
def test_a_stage_holds_as_many_more_activations_as_it_runs_forwards_ahead(
    case: tuple[int, int, list[int]], other: int
) -> None:
    stages, microbatches, ahead = case
    pipeline = Pipeline("envpipe", stages, microbatches, forwards_ahead=ahead)
    for stage, order in enumerate(orders_of(pipeline)):
        steps = [1 if op.instruction == "forward" else -1 for op in order]
        assert np.cumsum(steps).max() == min(stages - stage, microbatches) + ahead[stage]
    assert Pipeline.from_job(pipeline.to_job()).operations == pipeline.operations
    changed = pipeline.with_microbatches(other)
    assert changed.num_microbatches == other
    assert all(new <= old for new, old in zip(changed.forwards_ahead, ahead, strict=True))
    assert list(pipeline.with_microbatches(microbatches).forwards_ahead) == ahead


@pytest.mark.parametrize("schedule", ["zb-v", "dualpipe-v"])
def test_no_transfer_is_waited_for_where_a_v_turns_round(schedule: str) -> None:
    assert not Pipeline(schedule, 1, 4, p2p_latency=0.5).succ_lag_ns.any()
    document = Pipeline(schedule, 2, 4, p2p_latency=0.5).to_dag()["operations"]
    stage = {entry["id"]: entry["profile_stage"] for entry in document}
    across = {(stage[w["id"]], stage[e["id"]]) for e in document for w in e["after"]}
    assert across == {(0, 1), (2, 3), (1, 0), (3, 2)}


#: Schedule, further arguments for 3 stages and 8 microbatches, and words of the refusal.
REFUSED = r"""
"1f2b" | {} | unknown schedule "1f2b"; known: 1f1b, gpipe, interl
null | {} | unknown schedule
["1f1b"] | {} | unknown schedule
"dag" | {} | from_dag_file
"zb-h1" | {"num_chunks": 2} | zb-h1 runs one model chunk.*interleaved
"zb-v" | {"num_chunks": 3} | zb-v runs two model chunks per stage, not 3
"dualpipe-v" | {"num_chunks": 1} | dualpipe-v runs two model chunks per stage, not 1
"dualpipe-v" | {"num_microbatches": 5} | 6 for 3 pipeline stages, not 5
"gpipe" | {"forwards_ahead": [0, 0, 0]} | goes with schedule envpipe, not gpipe
"envpipe" | {"forwards_ahead": [1, 0]} | list of 3 numbers
"envpipe" | {"forwards_ahead": 7} | forwards_ahead should be a valid list
"envpipe" | {"forwards_ahead": [-1, 0, 0]} | ahead\[0\] should be greater than or equal to 0
"envpipe" | {"forwards_ahead": [1.5, 0, 0]} | ahead\[0\] should be a valid integer
"envpipe" | {"forwards_ahead": [6, 0, 0]} | ahead\[0\] must be at most 5, not 6
"envpipe" | {"forwards_ahead": [1, 2, 0]} | ahead\[1\] must be at most 1, not 2
"envpipe" | {"forwards_ahead": [1, 1, 1]} | ahead\[2\] must be at most 0
"1f1b" | {"microbatch_group": 2} | goes with schedule interleaved
"interleaved" | {"num_chunks": 2, "microbatch_group": 2} | groups of 2 micro
"interleaved" | {"num_chunks": 2, "microbatch_group": 9} | groups of 9 micro
"interleaved" | {"num_chunks": 2, "microbatch_group": 7} | groups of 7 micro
"1f1b" | {"extras": {"coffee": [0]}} | no extra operation; known: load, all_reduce, red
"1f1b" | {"extras": {"load": []}} | must list the stages
"1f1b" | {"extras": {"load": [3]}} | load must list the stages that have it, of 0 to 2
"1f1b" | {"extras": {"load": [-1]}} | greater than or equal to 0
"1f1b" | {"extras": ["load"]} | extras should be an object
"1f1b" | {"in_turn": [2]} | in_turn .*stages that have a next one
"1f1b" | {"in_turn": "1"} | in_turn should be a valid list
"looped-bfs" | {"num_chunks": 2, "in_turn": [0]} | in_turn goes with one chunk
"1f1b" | {"num_stages": null} | stages should be a valid integer, not null
"1f1b" | {"num_stages": 1048576, "num_microbatches": 1048576} | at most 2097152
"""


@pytest.mark.parametrize("row", REFUSED.strip().splitlines())
def test_what_cannot_be_scheduled_is_refused(row: str) -> None:
    schedule, arguments, words = row.split(" | ")
    shape = {"num_stages": 3, "num_microbatches": 8}
    with pytest.raises(InputError, match=words):
        Pipeline(json.loads(schedule), **shape | json.loads(arguments))


@pytest.mark.parametrize("schedule", ["interleaved", "interleaved-zb"])
@pytest.mark.parametrize(
    ("microbatches", "nearest"),
    [(9, "8 and 10"), (11, "10 and 12"), (13, "12 and 15"), (17, "16 and 20"), (27, "24 and 28")],
)
def test_interleaved_names_the_nearest_microbatches_it_can_run(
    schedule: str, microbatches: int, nearest: str
) -> None:
    with pytest.raises(InputError, match=f"{microbatches} do not divide.* 4 stages.*: {nearest}$"):
        Pipeline(schedule, 4, microbatches, num_chunks=2)
    for valid in nearest.split(" and "):
        assert Pipeline(schedule, 4, int(valid), num_chunks=2)


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ("0B0 0F0 0F1 0B1", "deadlock"),
        ("0F0 0B0", "misses an operation: forward of microbatch 1"),
        ("0F0 0F1 0F2", "microbatch 2 is mentioned, but there are only 2"),
    ],
)
def test_a_schedule_of_ones_own_can_be_used_by_name_and_is_checked(
    order: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SCHEDULES, "own", lambda *_shape: [rank(0, order)])
    with pytest.raises(InputError, match=words):
        Pipeline("own", 1, 2)
    monkeypatch.setitem(SCHEDULES, "own", lambda *_shape: [rank(0, "0L0 0F0 0F1")])
    assert drawn(Pipeline("own", 1, 2)) == ["l0 f0 f1"]


def test_1f1b_is_what_deepspeeds_train_schedule_says_of_microbatches() -> None:
    """Forwards take microbatches in order; a backward is that of the one in its buffer."""
    schedule = pytest.importorskip("deepspeed.runtime.pipe.schedule", reason="needs deepspeed")
    for stages, microbatches in product((1, 2, 3, 4, 6, 8), (1, 2, 3, 5, 8, 13)):
        for stage, ours in enumerate(orders_of(Pipeline("1f1b", stages, microbatches))):
            train = schedule.TrainSchedule(
                micro_batches=microbatches, stages=stages, stage_id=stage
            )
            order: list[tuple[str, int]] = []
            held: dict[int, int] = {}
            for command in (command for step in train.steps() for command in step):
                if isinstance(command, schedule.ForwardPass):
                    held[command.buffer_id] = sum(name == "forward" for name, _ in order)
                    order.append(("forward", held[command.buffer_id]))
                elif isinstance(command, schedule.BackwardPass):
                    order.append(("backward", held.pop(command.buffer_id)))
            assert order == [(op.instruction, op.microbatch) for op in ours]
