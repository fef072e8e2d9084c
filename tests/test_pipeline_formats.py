from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envplan.errors import InputError
from envplan.pipeline import SCHEDULES, Operation, Pipeline

DIAMOND: dict[str, Any] = {
    "schema": "envplan/dag/v1",
    "operations": [
        {"id": "f0", "stage": 0, "instruction": "forward"},
        {
            "id": "f1",
            "stage": 1,
            "instruction": "forward",
            "after": [{"id": "f0", "latency": 0.001}],
        },
        {"id": "b1", "stage": 1, "instruction": "backward"},
        {"id": "b0", "stage": 0, "instruction": "backward", "after": ["b1", {"id": "f1"}]},
    ],
}


def diamond(**changes: Any) -> dict[str, Any]:
    """DIAMOND with fields of its operation f1 (listed as number 1) replaced."""
    document = copy.deepcopy(DIAMOND)
    document["operations"][1].update(changes)
    return document


def refused(document: object) -> str:
    """The message that refuses the document, short and on one line whatever it quotes."""
    with pytest.raises(InputError) as error:
        Pipeline.from_dag(document)
    assert len(error.value.message) < 250
    assert len(error.value.message.encode().splitlines()) == 1
    return error.value.message


def same(one: Pipeline, other: Pipeline, *, job: bool = True) -> bool:
    arrays = ("stage_begin", "succ_begin", "succ", "succ_lag_ns", "order")
    return (
        one.operations == other.operations
        and (one.to_job() == other.to_job() or not job)
        and all(np.array_equal(getattr(one, name), getattr(other, name)) for name in arrays)
    )


def test_dag_runs_a_stage_in_the_order_listed_and_waits_for_after() -> None:
    """However stages are listed among each other; what is not said has a default."""
    f0, f1, b1, b0 = DIAMOND["operations"]
    for operations in ([f0, f1, b1, b0], [f1, b1, f0, b0]):
        pipeline = Pipeline.from_dag({**DIAMOND, "operations": operations})
        assert pipeline.operations == (
            Operation(0, "forward", 0, 0, 0),
            Operation(0, "backward", 0, 0, 0),
            Operation(1, "forward", 0, 0, 1),
            Operation(1, "backward", 0, 0, 1),
        )
        start, makespan = pipeline.earliest_starts(np.array([10, 20, 30, 40]))
        assert start.tolist() == [0, 1_000_080, 1_000_010, 1_000_040]
        assert makespan == 1_000_100
    shape = (pipeline.num_stages, pipeline.num_microbatches, pipeline.num_chunks)
    assert (*shape, pipeline.num_profile_stages, pipeline.p2p_latency_ns) == (2, 1, 1, 2, 0)
    # A latency within a stage counts, and of several the longest.
    twice = [{"id": "f1", "latency": 2e-9}, "f1", {"id": "f1", "latency": 5e-9}]
    late = Pipeline.from_dag({**DIAMOND, "operations": [f0, f1, {**b1, "after": twice}, b0]})
    assert late.earliest_starts(np.array([1, 1, 1, 1]))[0].tolist()[3] == 1_000_007


@pytest.mark.parametrize(
    "pipeline",
    [
        *(Pipeline(name, 2, 4, p2p_latency=1.5e-3) for name in SCHEDULES),
        Pipeline("gpipe", np.int64(2), np.int32(1)),  # type: ignore[arg-type]
        Pipeline("interleaved", 2, 6, num_chunks=3, p2p_latency=[1e-9]),
        Pipeline("interleaved", 2, 5, num_chunks=2, microbatch_group=3),
        Pipeline("1f1b", 4, 6, in_turn=[1], extras={"load": [0], "optimizer": [0, 3]}),
        Pipeline("envpipe", 3, 8, forwards_ahead=[4, 3, 0]),
        Pipeline.from_dag(DIAMOND),
        Pipeline.from_dag(diamond(after=[{"id": "f0", "latency": 123456.123456789}])),
    ],
    ids=str,
)
def test_job_survives_a_round_trip_through_json_and_a_change_of_microbatches(
    pipeline: Pipeline,
) -> None:
    job = json.loads(json.dumps(pipeline.to_job(), allow_nan=False))
    assert job == pipeline.to_job()
    assert same(Pipeline.from_job(job), pipeline)
    assert same(Pipeline.from_dag(pipeline.to_dag()), pipeline, job=False)
    if "dag" in job:
        with pytest.raises(InputError, match="custom DAG"):
            pipeline.with_microbatches(2)
    else:
        assert job.keys() - {"forwards_ahead", "microbatch_group", "extras", "in_turn"} == {
            *("schedule", "stages", "microbatches", "chunks", "p2p_latency_s")
        }
        shape = ", ".join(f"{n}={job[n[4:]]}" for n in ("num_stages", "num_microbatches"))
        assert repr(pipeline).startswith(f"Pipeline({pipeline.schedule!r}, {shape}")
        assert same(eval(repr(pipeline), {"Pipeline": Pipeline}), pipeline)
        changed = pipeline.with_microbatches(8)
        assert same(changed, Pipeline.from_job({**job, "microbatches": 8}))


def test_dag_file_is_read_with_or_without_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "dag.json"
    for mark in (b"", b"\xef\xbb\xbf"):
        path.write_bytes(mark + json.dumps(DIAMOND).encode())
        assert same(Pipeline.from_dag_file(path), Pipeline.from_dag(DIAMOND))
    for content, line, words in (
        (b'{"schema": "envplan/dag/v1",\n "operations" []}', 2, "not valid JSON"),
        (b'{\n"schema":\n"\xff"}', 3, "is not UTF-8 text"),
    ):
        path.write_bytes(content)
        with pytest.raises(InputError, match=f"{words}") as error:
            Pipeline.from_dag_file(path)
        assert (error.value.path, error.value.line) == (str(path), line)


@pytest.mark.parametrize(
    ("document", "complaint"),
    [
        ([], "must hold one JSON object"),
        ({"operations": []}, 'its schema is null, not "envplan/dag/v1"'),
        ({"schema": "envplan/dag/v1"}, "operations is missing"),
        ({"schema": "envplan/dag/v1", "operations": []}, "should have at least 1 item"),
        ({"schema": "envplan/dag/v1", "operations": [3]}, "[0] should be an object, not 3"),
        ({**DIAMOND, "stages": 2}, "stages is not a field of a DAG"),
        (diamond(id=""), "operations[1].id String should have at least 1 character"),
        (diamond(id="f0"), 'operation 1 has the id "f0" of operation 0'),
        (diamond(stage=-1), "operations[1].stage should be greater than or equal to 0, not -1"),
        (diamond(stage=1.0), "operations[1].stage should be a valid integer, not 1.0"),
        (diamond(stage=10**30), "less than 2147483648, not a number beyond 1e18"),
        (diamond(stage=2**31 - 1), "stage 2 has no operations"),
        (diamond(instruction="two words"), 'a name such as "forward", not "two words"'),
        (diamond(micro_batch=1), "operations[1].micro_batch is not a field of a DAG"),
        (diamond(after="f0"), 'operations[1].after should be a valid list, not "f0"'),
        (diamond(after=[{"latency": 1}]), "operations[1].after[0].id is missing"),
        (diamond(after=["f9"]), 'operation 1 ("f1") waits for "f9", no operation\'s id'),
        (diamond(after=["f1"]), 'operation 1 ("f1") waits for itself'),
        (diamond(after=[{"id": "f0", "latency": -1}]), "latency should be greater than"),
        (diamond(after=[{"id": "f0", "latency": 1e10}]), "latency should be less than"),
        (diamond(id="line\nbreak\u2028\ud800" * 1000, stage=-1), "should be a valid string"),
    ],
)
def test_wrong_documents_are_refused_naming_operation_and_field(
    document: object, complaint: str
) -> None:
    assert complaint in refused(document)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 3),
    st.sampled_from(
        ["id", "stage", "instruction", "microbatch", "chunk", "profile_stage", "after"]
    ),
    JSON | st.lists(st.fixed_dictionaries({"id": st.just("f0"), "latency": JSON})),
)
def test_whatever_a_field_holds_it_is_used_or_refused_in_one_line(
    operation: int, field: str, value: object
) -> None:
    document = copy.deepcopy(DIAMOND)
    document["operations"][operation][field] = value
    try:
        pipeline = Pipeline.from_dag(document)
    except InputError:
        refused(document)
    else:
        assert same(Pipeline.from_job(json.loads(json.dumps(pipeline.to_job()))), pipeline)


SHAPE = {"schedule": "1f1b", "stages": 2, "microbatches": 3}
OWN = Pipeline.from_dag(DIAMOND).to_job()


def test_job_may_have_further_fields_and_leave_out_the_optional_ones() -> None:
    job = {**SHAPE, "gpus_per_stage": 8, "dag": None}
    assert same(Pipeline.from_job(job), Pipeline("1f1b", 2, 3))


@pytest.mark.parametrize(
    ("job", "complaint"),
    [
        ([], "is not a job: must hold one JSON object"),
        ({}, "schedule is missing"),
        ({**SHAPE, "schedule": "nope"}, 'unknown schedule "nope"'),
        ({"schedule": "1f1b", "microbatches": 2}, "stages is missing"),
        ({**SHAPE, "microbatches": 0}, "microbatches should be greater"),
        ({**SHAPE, "chunks": "1"}, "chunks should be"),
        ({**SHAPE, "p2p_latency_s": -1}, "should be greater than or equal to 0, not -1"),
        ({**SHAPE, "schedule": "dag"}, "go together"),
        ({**SHAPE, "dag": DIAMOND}, "go together"),
        ({**SHAPE, "schedule": "dag", "dag": {}}, "is not a DAG"),
        ({**OWN, "stages": 3}, "stages is 3, but its DAG means 2"),
        ({**OWN, "p2p_latency_s": 1}, "p2p_latency_s is 1.0, but"),
    ],
)
def test_bad_jobs_are_refused(job: object, complaint: str) -> None:
    with pytest.raises(InputError) as error:
        Pipeline.from_job(job)
    assert complaint in error.value.message
