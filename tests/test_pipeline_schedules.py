"""Generated schedules: their orders as the papers draw them, and the shapes that they refuse."""

from __future__ import annotations

import json
import math
from itertools import accumulate

import pytest
from hypothesis import given, settings

from envplan.errors import InputError
from envplan.pipeline import SCHEDULES, Operation, Pipeline
from schedule_oracles import orders_of
from strategies import schedules

SHAPES = [(1, 1), (1, 5), (2, 1), (3, 2), (4, 4), (4, 9), (5, 3), (8, 16)]
LETTER = {"backward_input": "i", "backward_weight": "w"}


def words(stage: list[Operation], chunks: str = "abc") -> str:
    """`f2b` is the forward of microbatch 2 on chunk b; i and w are the parts of a backward."""
    return " ".join(
        f"{LETTER.get(op.instruction, op.instruction[0])}{op.microbatch}{chunks[op.chunk]}"
        for op in stage
    )


def plain(pipeline: Pipeline) -> list[str]:
    return [words(stage, " ").replace("  ", " ").strip() for stage in orders_of(pipeline)]


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


@pytest.mark.parametrize(
    ("name", "shape", "stages"),
    [
        (
            "1f1b",
            (4, 5),
            [
                "f0 f1 f2 f3 b0 f4 b1 b2 b3 b4",
                "f0 f1 f2 b0 f3 b1 f4 b2 b3 b4",
                "f0 f1 b0 f2 b1 f3 b2 f4 b3 b4",
                "f0 b0 f1 b1 f2 b2 f3 b3 f4 b4",
            ],
        ),
        ("1f1b", (4, 2), [*["f0 f1 b0 b1"] * 3, "f0 b0 f1 b1"]),
        ("1f1b", (3, 1), ["f0 b0"] * 3),
        ("gpipe", (2, 3), ["f0 f1 f2 b0 b1 b2"] * 2),
        # With one chunk it runs twice as far ahead as 1F1B.
        ("interleaved", (2, 5), ["f0 f1 f2 b0 f3 b1 f4 b2 b3 b4", "f0 b0 f1 b1 f2 b2 f3 b3 f4 b4"]),
        (
            "zb-h1",
            (3, 4),
            [
                "f0 f1 f2 i0 w0 f3 i1 w1 i2 w2 i3 w3",
                "f0 f1 i0 f2 i1 w0 f3 i2 w1 i3 w2 w3",
                "f0 i0 f1 i1 f2 i2 w0 f3 i3 w1 w2 w3",
            ],
        ),
    ],
)
def test_order_with_one_chunk(name: str, shape: tuple[int, int], stages: list[str]) -> None:
    assert plain(Pipeline(name, *shape)) == stages


@pytest.mark.parametrize(
    ("name", "shape", "stages"),
    [
        (  # Megatron's order
            "interleaved",
            (2, 4),
            [
                "f0a f1a f0b f1b f2a b0b f3a b1b f2b b0a f3b b1a b2b b3b b2a b3a",
                "f0a f1a f0b b0b f1b b1b f2a b0a f3a b1a f2b b2b f3b b3b b2a b3a",
            ],
        ),
        (
            "interleaved",
            (4, 8),
            [
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
            ],
        ),
        (  # groups grow where microbatches are no multiple of stages
            "interleaved",
            (2, 3),
            [
                "f0a f1a f2a f0b f1b f2b b0b b1b b2b b0a b1a b2a",
                "f0a f1a f2a f0b b0b f1b b1b f2b b2b b0a b1a b2a",
            ],
        ),
        ("looped-bfs", (2, 3), ["f0a f1a f2a f0b f1b f2b b2b b1b b0b b2a b1a b0a"] * 2),
        (
            "interleaved-zb",
            (2, 2),
            [
                "f0a f1a f0b f1b i0b w0b i1b w1b i0a w0a i1a w1a",
                "f0a f1a f0b i0b f1b i1b w0b i0a w1b i1a w0a w1a",
            ],
        ),
        (
            "zb-v",
            (2, 4),
            [
                "f0a f1a f2a f0b i0b w0b f1b i1b w1b "
                "f3a i0a w0a f2b i2b w2b i1a w1a f3b i3b w3b i2a w2a i3a w3a",
                "f0a f0b f1a f1b i0b w0b "
                "f2a i0a w0a f2b i1b w1b f3a i1a w1a f3b i2b w2b i2a i3b i3a w2a w3b w3a",
            ],
        ),
        (
            "dualpipe-v",
            (2, 4),
            [
                "f0a f1a f2a f0b i0b w0b f1b f3a b1b f2b b0a b2b f3b b1a b3b i2a w2a i3a w3a",
                "f0a f0b f1a f1b f2a b0b f2b b0a f3a b1b f3b b1a b2b b2a i3b i3a w3b w3a",
            ],
        ),
    ],
)
def test_order_with_two_chunks(name: str, shape: tuple[int, int], stages: list[str]) -> None:
    pipeline = Pipeline(name, *shape, num_chunks=2)
    assert list(map(words, orders_of(pipeline))) == stages


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("stages", "microbatches"), SHAPES)
def test_1f1b_and_gpipe_are_what_stages_do_by_themselves(
    name: str, stages: int, microbatches: int
) -> None:
    """Of 1F1B stages whose memory is limited, of GPipe stages that prefer forwards."""
    limited = [stages - stage for stage in range(stages)]
    in_flight = limited if name == "1f1b" else [microbatches] * stages
    simulated = greedy(stages, microbatches, in_flight=in_flight, backward_first=name == "1f1b")
    assert plain(Pipeline(name, stages, microbatches)) == simulated


@pytest.mark.parametrize(("stages", "microbatches"), SHAPES)
def test_zb_h1_holds_as_many_activations_as_the_first_stage_of_1f1b(
    stages: int, microbatches: int
) -> None:
    held = {"forward": 1, "backward_input": 0, "backward_weight": -1}
    for stage in orders_of(Pipeline("zb-h1", stages, microbatches)):
        most = max(accumulate(held[op.instruction] for op in stage))
        assert most == min(stages, microbatches)


@pytest.mark.parametrize(
    ("name", "chunks", "model_stages"),
    [
        ("interleaved", 3, [[0, 3, 6], [1, 4, 7], [2, 5, 8]]),
        ("zb-v", None, [[0, 5], [1, 4], [2, 3]]),
        ("dualpipe-v", None, [[0, 5], [1, 4], [2, 3]]),
    ],
)
def test_each_chunk_is_timed_by_its_own_profile_stage(
    name: str, chunks: int | None, model_stages: list[list[int]]
) -> None:
    pipeline = Pipeline(name, 3, 6, num_chunks=chunks)
    assert pipeline.num_profile_stages == sum(map(len, model_stages))
    assert {(op.stage, op.chunk, op.profile_stage) for op in pipeline.operations} == {
        (rank, chunk, stage)
        for rank, stages in enumerate(model_stages)
        for chunk, stage in enumerate(stages)
    }


@pytest.mark.parametrize("schedule", ["zb-v", "dualpipe-v"])
def test_no_transfer_is_waited_for_where_a_v_turns_round(schedule: str) -> None:
    assert not Pipeline(schedule, 1, 4, p2p_latency=0.5).succ_lag_ns.any()
    document = Pipeline(schedule, 2, 4, p2p_latency=0.5).to_dag()["operations"]
    stage = {entry["id"]: entry["profile_stage"] for entry in document}
    across = {(stage[w["id"]], stage[e["id"]]) for e in document for w in e["after"]}
    assert across == {(0, 1), (2, 3), (1, 0), (3, 2)}


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
        way = [when.pop(("forward", m, at)) for at in range(last + 1)]
        for at in reversed(range(last + 1)):
            if ("backward", m, at) in when:
                way.append(when.pop(("backward", m, at)))
            else:
                way.append(when.pop(("backward_input", m, at)))
                assert way[-1] < when.pop(("backward_weight", m, at))
        assert way == sorted(way)
    assert not when


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ("1f2b", 'unknown schedule "1f2b"; known: 1f1b, gpipe, interl'),
        (None, "unknown schedule"),
        (["1f1b"], "unknown schedule"),
        ("dag", "from_dag_file"),
    ],
)
def test_what_is_no_schedule_is_refused(schedule: object, words: str) -> None:
    with pytest.raises(InputError, match=words):
        Pipeline(schedule, 2, 2)  # type: ignore[arg-type]


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
    assert plain(pipeline) == ["l0 f0 f1 f2"] * 2
    assert len(pipeline.succ) == 3 + 3 + 3
