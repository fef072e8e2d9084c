from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import pytest

from envplan.errors import InputError
from envplan.pipeline import SCHEDULES, Operation, Pipeline

SHAPES = [(1, 1), (1, 5), (2, 1), (3, 2), (4, 4), (4, 9), (5, 3), (8, 16)]


def orders(pipeline: Pipeline) -> list[list[Operation]]:
    """The operations of each stage."""
    begin = pipeline.stage_begin
    return [list(pipeline.operations[a:b]) for a, b in pairwise(begin)]


def words(stage: list[Operation]) -> str:
    """`f2b` is the forward of microbatch 2 on chunk b."""
    return " ".join(f"{op.instruction[0]}{op.microbatch}{'abc'[op.chunk]}" for op in stage)


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


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (3, 2), (4, 6)])
def test_interleaved_with_one_chunk_is_1f1b(stages: int, microbatches: int) -> None:
    one = Pipeline("interleaved", stages, microbatches)
    assert one.operations == Pipeline("1f1b", stages, microbatches).operations


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@pytest.mark.parametrize(("stages", "microbatches"), SHAPES)
def test_every_operation_is_there_exactly_once(
    schedule: str, stages: int, microbatches: int
) -> None:
    pipeline = Pipeline(schedule, stages, microbatches)
    count = Counter((op.stage, op.instruction, op.microbatch) for op in pipeline.operations)
    assert set(count.values()) == {1}
    assert len(count) == 2 * stages * microbatches


@pytest.mark.parametrize(("stages", "chunks"), [(1, 2), (2, 2), (2, 5), (4, 2), (4, 3)])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_every_interleaved_operation_is_there_once_and_after_what_it_needs(
    stages: int, chunks: int, groups: int
) -> None:
    pipeline = Pipeline("interleaved", stages, groups * stages, num_chunks=chunks)
    last = stages * chunks - 1
    when = {
        (op.instruction, op.microbatch, op.profile_stage): place
        for place, op in enumerate(pipeline.operations[i] for i in pipeline.order)
    }
    assert len(when) == len(pipeline.operations) == 2 * stages * chunks * groups * stages
    for instruction, microbatch, at in when:
        here = when[instruction, microbatch, at]
        if instruction == "backward":
            assert when["forward", microbatch, at] < here
            assert at == last or when["backward", microbatch, at + 1] < here
        else:
            assert at == 0 or when["forward", microbatch, at - 1] < here


def test_each_microbatch_runs_its_forward_before_its_backward_on_every_stage() -> None:
    for schedule in SCHEDULES:
        for stage in orders(Pipeline(schedule, 4, 8)):
            place = {(op.instruction, op.microbatch): i for i, op in enumerate(stage)}
            assert all(place["forward", m] < place["backward", m] for m in range(8))


def test_unknown_schedule_lists_the_known_ones() -> None:
    with pytest.raises(
        InputError, match='unknown schedule "1f2b"; known: 1f1b, gpipe, interleaved'
    ):
        Pipeline("1f2b", 2, 2)


@pytest.mark.parametrize("schedule", [None, 3, ["1f1b"]])
def test_schedule_that_is_no_name_is_unknown(schedule: object) -> None:
    with pytest.raises(InputError, match="unknown schedule"):
        Pipeline(schedule, 2, 2)  # type: ignore[arg-type]


def test_schedule_dag_points_to_the_file() -> None:
    with pytest.raises(InputError, match="from_dag_file"):
        Pipeline("dag", 2, 2)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_chunks_are_refused_by_schedules_without_them(schedule: str) -> None:
    with pytest.raises(InputError, match=f"{schedule} runs one model chunk.*interleaved"):
        Pipeline(schedule, 2, 2, num_chunks=2)


@pytest.mark.parametrize(
    ("microbatches", "nearest"), [(10, "8 and 12"), (5, "4 and 8"), (3, "4"), (1, "4")]
)
def test_interleaved_names_the_nearest_microbatches_it_can_run(
    microbatches: int, nearest: str
) -> None:
    with pytest.raises(InputError, match=f"{microbatches} is not a multiple of 4.*: {nearest}$"):
        Pipeline("interleaved", 4, microbatches, num_chunks=2)


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
