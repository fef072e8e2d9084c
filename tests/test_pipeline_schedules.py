from __future__ import annotations

import json
import math
from itertools import pairwise

import pytest
from hypothesis import given, settings

from envplan.errors import InputError
from envplan.pipeline import SCHEDULES, Operation, Pipeline
from strategies import schedules

SHAPES = [(1, 1), (1, 5), (2, 1), (3, 2), (4, 4), (4, 9), (5, 3), (8, 16)]

LETTER = {
    "forward": "f",
    "backward": "b",
    "backward_input": "i",
    "backward_weight": "w",
    "load": "l",
}


def orders(pipeline: Pipeline) -> list[list[Operation]]:
    """The operations of each stage."""
    begin = pipeline.stage_begin
    return [list(pipeline.operations[a:b]) for a, b in pairwise(begin)]


def words(stage: list[Operation]) -> str:
    """`f2b` is the forward of microbatch 2 on chunk b; i and w are the parts of a backward."""
    return " ".join(f"{LETTER[op.instruction]}{op.microbatch}{'abc'[op.chunk]}" for op in stage)


def plain(stage: list[Operation]) -> str:
    return words(stage).replace("a", "")


def greedy(
    num_stages: int, num_microbatches: int, *, in_flight: list[int], backward_first: bool
) -> list[str]:
    """Unit-time simulation of stages that take whatever is ready, without knowing a schedule.

    A stage starts no forward while `in_flight` of its microbatches wait for their backward, and
    unless `backward_first` no backward before its last forward.
    """
    done: dict[tuple[str, int, int], int] = {}
    order: list[list[str]] = [[] for _ in range(num_stages)]
    for now in range(4 * (num_stages + num_microbatches)):
        started = []
        for stage in range(num_stages):
            f = sum(word[0] == "f" for word in order[stage])
            b = len(order[stage]) - f
            above = ("f", stage - 1, f)
            below = ("b", stage + 1, b) if stage + 1 < num_stages else ("f", stage, b)
            can_forward = f < num_microbatches and f - b < in_flight[stage]
            can_backward = b < f and (backward_first or f == num_microbatches)
            if can_backward and done.get(below, math.inf) <= now:
                started.append(("b", stage, b))
            elif can_forward and (stage == 0 or done.get(above, math.inf) <= now):
                started.append(("f", stage, f))
        for kind, stage, microbatch in started:
            done[kind, stage, microbatch] = now + 1
            order[stage].append(f"{kind}{microbatch}")
    return [" ".join(stage) for stage in order]


def test_1f1b_of_two_stages_and_three_microbatches() -> None:
    first, last = orders(Pipeline("1f1b", 2, 3))
    assert plain(first) == "f0 f1 b0 f2 b1 b2"
    assert plain(last) == "f0 b0 f1 b1 f2 b2"


def test_1f1b_of_four_stages_and_five_microbatches() -> None:
    assert [plain(stage) for stage in orders(Pipeline("1f1b", 4, 5))] == [
        "f0 f1 f2 f3 b0 f4 b1 b2 b3 b4",
        "f0 f1 f2 b0 f3 b1 f4 b2 b3 b4",
        "f0 f1 b0 f2 b1 f3 b2 f4 b3 b4",
        "f0 b0 f1 b1 f2 b2 f3 b3 f4 b4",
    ]


def test_1f1b_with_fewer_microbatches_than_stages() -> None:
    assert [plain(stage) for stage in orders(Pipeline("1f1b", 4, 2))] == [
        "f0 f1 b0 b1",
        "f0 f1 b0 b1",
        "f0 f1 b0 b1",
        "f0 b0 f1 b1",
    ]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_one_microbatch_runs_forward_then_backward(schedule: str) -> None:
    assert [plain(stage) for stage in orders(Pipeline(schedule, 3, 1))] == ["f0 b0"] * 3


def test_gpipe_runs_every_forward_before_any_backward() -> None:
    assert [plain(stage) for stage in orders(Pipeline("gpipe", 2, 3))] == ["f0 f1 f2 b0 b1 b2"] * 2


@pytest.mark.parametrize(("stages", "microbatches"), SHAPES)
def test_1f1b_is_what_stages_with_limited_memory_do_by_themselves(
    stages: int, microbatches: int
) -> None:
    limits = [stages - stage for stage in range(stages)]
    simulated = greedy(stages, microbatches, in_flight=limits, backward_first=True)
    assert [plain(stage) for stage in orders(Pipeline("1f1b", stages, microbatches))] == simulated


@pytest.mark.parametrize(("stages", "microbatches"), SHAPES)
def test_gpipe_is_what_stages_that_prefer_forwards_do_by_themselves(
    stages: int, microbatches: int
) -> None:
    simulated = greedy(
        stages, microbatches, in_flight=[microbatches] * stages, backward_first=False
    )
    assert [plain(stage) for stage in orders(Pipeline("gpipe", stages, microbatches))] == simulated


def test_interleaved_two_ranks_two_chunks_in_megatron_order() -> None:
    first, last = orders(Pipeline("interleaved", 2, 4, num_chunks=2))
    assert words(first) == "f0a f1a f0b f1b f2a b0b f3a b1b f2b b0a f3b b1a b2b b3b b2a b3a"
    assert words(last) == "f0a f1a f0b b0b f1b b1b f2a b0a f3a b1a f2b b2b f3b b3b b2a b3a"


def test_interleaved_four_ranks_two_chunks_in_megatron_order() -> None:
    assert [words(stage) for stage in orders(Pipeline("interleaved", 4, 8, num_chunks=2))] == [
        "f0a f1a f2a f3a f0b f1b f2b f3b f4a f5a "
        "f6a b0b f7a b1b f4b b2b f5b b3b f6b b0a f7b b1a "
        "b2a b3a b4b b5b b6b b7b b4a b5a b6a b7a",
        "f0a f1a f2a f3a f0b f1b f2b f3b "
        "f4a b0b f5a b1b f6a b2b f7a b3b f4b b0a f5b b1a f6b b2a f7b b3a "
        "b4b b5b b6b b7b b4a b5a b6a b7a",
        "f0a f1a f2a f3a f0b f1b "
        "f2b b0b f3b b1b f4a b2b f5a b3b f6a b0a f7a b1a f4b b2a f5b b3a f6b b4b f7b b5b "
        "b6b b7b b4a b5a b6a b7a",
        "f0a f1a f2a f3a "
        "f0b b0b f1b b1b f2b b2b f3b b3b f4a b0a f5a b1a f6a b2a f7a b3a f4b b4b f5b b5b "
        "f6b b6b f7b b7b "
        "b4a b5a b6a b7a",
    ]


def test_interleaved_times_each_chunk_by_its_own_profile_stage() -> None:
    pipeline = Pipeline("interleaved", 2, 2, num_chunks=3)
    assert pipeline.num_profile_stages == 6
    assert {(op.stage, op.chunk, op.profile_stage) for op in pipeline.operations} == {
        (0, 0, 0), (1, 0, 1), (0, 1, 2), (1, 1, 3), (0, 2, 4), (1, 2, 5),
    }  # fmt: skip


def test_interleaved_with_one_chunk_runs_twice_as_far_ahead_as_1f1b() -> None:
    first, last = orders(Pipeline("interleaved", 2, 5))
    assert plain(first) == "f0 f1 f2 b0 f3 b1 f4 b2 b3 b4"
    assert plain(last) == "f0 b0 f1 b1 f2 b2 f3 b3 f4 b4"


def test_interleaved_groups_grow_where_microbatches_are_no_multiple_of_stages() -> None:
    first, last = orders(Pipeline("interleaved", 2, 3, num_chunks=2))
    assert words(first) == "f0a f1a f2a f0b f1b f2b b0b b1b b2b b0a b1a b2a"
    assert words(last) == "f0a f1a f2a f0b b0b f1b b1b f2b b2b b0a b1a b2a"


def test_looped_bfs_runs_all_microbatches_through_a_chunk_and_back_from_the_last() -> None:
    first, last = orders(Pipeline("looped-bfs", 2, 3, num_chunks=2))
    assert words(first) == words(last) == "f0a f1a f2a f0b f1b f2b b2b b1b b0b b2a b1a b0a"


def test_zb_h1_puts_weights_off_by_a_microbatch_a_stage() -> None:
    assert [plain(stage) for stage in orders(Pipeline("zb-h1", 3, 4))] == [
        "f0 f1 f2 i0 w0 f3 i1 w1 i2 w2 i3 w3",
        "f0 f1 i0 f2 i1 w0 f3 i2 w1 i3 w2 w3",
        "f0 i0 f1 i1 f2 i2 w0 f3 i3 w1 w2 w3",
    ]


@pytest.mark.parametrize(("stages", "microbatches"), SHAPES)
def test_zb_h1_holds_as_many_activations_as_the_first_stage_of_1f1b(
    stages: int, microbatches: int
) -> None:
    for stage in orders(Pipeline("zb-h1", stages, microbatches)):
        held = most = 0
        for op in stage:
            held += {"forward": 1, "backward_input": 0, "backward_weight": -1}[op.instruction]
            most = max(most, held)
        assert most == min(stages, microbatches)


def test_interleaved_zero_bubble_of_two_stages_and_two_chunks() -> None:
    first, last = orders(Pipeline("interleaved-zb", 2, 2, num_chunks=2))
    assert words(first) == "f0a f1a f0b f1b i0b w0b i1b w1b i0a w0a i1a w1a"
    assert words(last) == "f0a f1a f0b i0b f1b i1b w0b i0a w1b i1a w0a w1a"


def test_zb_v_of_two_stages() -> None:
    first, last = orders(Pipeline("zb-v", 2, 4))
    assert words(first) == (
        "f0a f1a f2a f0b i0b w0b f1b i1b w1b "
        "f3a i0a w0a f2b i2b w2b i1a w1a f3b i3b w3b i2a w2a i3a w3a"
    )
    assert words(last) == (
        "f0a f0b f1a f1b i0b w0b "
        "f2a i0a w0a f2b i1b w1b f3a i1a w1a f3b i2b w2b i2a i3b i3a w2a w3b w3a"
    )


def test_dualpipe_v_of_two_stages_mixes_whole_and_split_backwards() -> None:
    first, last = orders(Pipeline("dualpipe-v", 2, 4))
    assert words(first) == (
        "f0a f1a f2a f0b i0b w0b f1b f3a b1b f2b b0a b2b f3b b1a b3b i2a w2a i3a w3a"
    )
    assert words(last) == (
        "f0a f0b f1a f1b f2a b0b f2b b0a f3a b1b f3b b1a b2b b2a i3b i3a w3b w3a"
    )


@pytest.mark.parametrize("schedule", ["zb-v", "dualpipe-v"])
def test_v_schedules_turn_round_on_the_last_stage(schedule: str) -> None:
    pipeline = Pipeline(schedule, 3, 6)
    assert (pipeline.num_chunks, pipeline.num_profile_stages) == (2, 6)
    assert {(op.stage, op.chunk, op.profile_stage) for op in pipeline.operations} == {
        (0, 0, 0), (1, 0, 1), (2, 0, 2), (2, 1, 3), (1, 1, 4), (0, 1, 5),
    }  # fmt: skip


@pytest.mark.parametrize("schedule", ["zb-v", "dualpipe-v"])
def test_no_transfer_is_waited_for_where_a_v_turns_round(schedule: str) -> None:
    assert len(Pipeline(schedule, 1, 4, p2p_latency=0.5).succ_lag_ns.nonzero()[0]) == 0
    pipeline = Pipeline(schedule, 2, 4, p2p_latency=0.5)
    before = [i for i, op in enumerate(pipeline.operations) for _ in range(edges_of(pipeline, i))]
    across = {
        (pipeline.operations[i].profile_stage, pipeline.operations[j].profile_stage)
        for i, j, lag in zip(before, pipeline.succ, pipeline.succ_lag_ns, strict=True)
        if lag
    }
    assert across == {(0, 1), (2, 3), (1, 0), (3, 2)}


def edges_of(pipeline: Pipeline, i: int) -> int:
    return int(pipeline.succ_begin[i + 1] - pipeline.succ_begin[i])


@given(schedules())
@settings(max_examples=150, deadline=None)
def test_every_operation_is_there_exactly_once_and_after_what_it_needs(pipeline: Pipeline) -> None:
    when = {
        (op.instruction, op.microbatch, op.profile_stage): place
        for place, op in enumerate(pipeline.operations[i] for i in pipeline.order)
    }
    assert len(when) == len(pipeline.operations)
    last = pipeline.num_profile_stages - 1
    for m in range(pipeline.num_microbatches):
        passed = -1
        for at in range(last + 1):
            here = when.pop(("forward", m, at))
            assert passed < here
            passed = here
        for at in reversed(range(last + 1)):
            if ("backward", m, at) in when:
                here = when.pop(("backward", m, at))
            else:
                here = when.pop(("backward_input", m, at))
                assert here < when.pop(("backward_weight", m, at))
            assert passed < here
            passed = here
    assert not when


def test_unknown_schedule_lists_the_known_ones() -> None:
    with pytest.raises(InputError, match='unknown schedule "1f2b"; known: 1f1b, gpipe, interl'):
        Pipeline("1f2b", 2, 2)


@pytest.mark.parametrize("schedule", [None, 3, ["1f1b"]])
def test_schedule_that_is_no_name_is_unknown(schedule: object) -> None:
    with pytest.raises(InputError, match="unknown schedule"):
        Pipeline(schedule, 2, 2)  # type: ignore[arg-type]


def test_schedule_dag_points_to_the_file() -> None:
    with pytest.raises(InputError, match="from_dag_file"):
        Pipeline("dag", 2, 2)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "envpipe", "zb-h1"])
def test_chunks_are_refused_by_schedules_without_them(schedule: str) -> None:
    with pytest.raises(InputError, match=f"{schedule} runs one model chunk.*interleaved"):
        Pipeline(schedule, 2, 2, num_chunks=2)


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


def test_dualpipe_v_says_how_many_microbatches_it_needs() -> None:
    with pytest.raises(InputError, match="8 for 4 pipeline stages, not 7"):
        Pipeline("dualpipe-v", 4, 7)


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_schedules_survive_being_written_into_a_job(schedule: str) -> None:
    pipeline = Pipeline(schedule, 2, 4, p2p_latency=0.001)
    again = Pipeline.from_job(json.loads(json.dumps(pipeline.to_job())))
    assert again.operations == pipeline.operations
    assert again.to_job() == pipeline.to_job()
    assert pipeline.with_microbatches(6).operations == Pipeline(schedule, 2, 6).operations


def test_a_registered_schedule_can_be_used_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward_only(stages: int, microbatches: int, chunks: int) -> list[list[Operation]]:
        return [
            [Operation(s, "load", 0, 0, s)]
            + [Operation(s, "forward", m, 0, s) for m in range(microbatches)]
            for s in range(stages)
        ]

    monkeypatch.setitem(SCHEDULES, "inference", forward_only)
    pipeline = Pipeline("inference", 2, 3)
    assert [plain(stage) for stage in orders(pipeline)] == ["l0 f0 f1 f2"] * 2
    assert len(pipeline.succ) == 3 + 3 + 3
