"""PyTorch's schedule CSV, read and written without PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given, settings

from envplan.errors import InputError
from envplan.pipeline import Operation, Pipeline
from envplan.pipeline.imports.torch_csv import as_torch_csv, parse_rows, read_torch_csv
from envplan.pipeline.operations import short_name
from schedule_oracles import dependency_graph, orders_of
from strategies import schedules

EXAMPLES = Path(__file__).parents[1] / "examples" / "schedules"


def test_cells_become_operations_of_their_model_stage_overlapped_ones_in_turn() -> None:
    rows = [["0F0", "", "3F0", "3I0", "3W0", "0B0"], ["", "1F0", "2F0", "2B0", "1B0"]]
    first, second = parse_rows(rows).orders
    assert first == (
        Operation(0, "forward", 0, 0, 0),
        Operation(0, "forward", 0, 1, 3),
        Operation(0, "backward_input", 0, 1, 3),
        Operation(0, "backward_weight", 0, 1, 3),
        Operation(0, "backward", 0, 0, 0),
    )
    assert [(op.chunk, op.profile_stage) for op in second] == [(0, 1), (1, 2), (1, 2), (0, 1)]
    row = ["0F0", "0F1", "(0F2;0B0)OVERLAP_F_B", "( 0F3 ; 0B1 )OVERLAP_F_B", "0B2", "0B3"]
    (order,) = parse_rows([row]).orders
    assert " ".join(map(short_name, order)) == "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3"


def test_what_is_no_computation_is_left_out_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "comms.csv"
    path.write_text(
        "0UNSHARD,0F0,0SEND_F0,0WAIT_SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0RESHARD\n"
        "1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD,1RESHARD,1WAIT_REDUCE_GRAD,1NEW_THING7\n"
    )
    read = read_torch_csv(path)
    assert [len(order) for order in read.orders] == [2, 2]
    once = ("SEND_F", "RECV_F", "SEND_B", "RECV_B", "WAIT_SEND_F", "WAIT_REDUCE_GRAD", "NEW_THING")
    twice = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
    assert dict(read.skipped) == dict.fromkeys(once, 1) | dict.fromkeys(twice, 2)
    assert read.known_as == "1f1b"


@example(pipeline=Pipeline("interleaved", 2, 1, num_chunks=2))
@given(pipeline=schedules(max_stages=5, max_microbatches=10))
@settings(max_examples=60, deadline=None)
def test_exported_schedules_are_imported_as_they_were(pipeline: Pipeline) -> None:
    """And an action stands after those of other ranks that it waits for."""
    rows = [line.split(",") for line in as_torch_csv(pipeline).splitlines()]
    read = Pipeline.from_imported(parse_rows(rows), p2p_latency=1e-9 * pipeline.p2p_latency_ns)
    assert read.operations == pipeline.operations
    assert read.schedule != "dag"
    step = {cell: k for row in rows for k, cell in enumerate(row) if cell}
    graph = dependency_graph(orders_of(pipeline))
    assert all(step[short_name(a)] < step[short_name(b)] for a, b in graph.edges)


def test_instruction_that_pytorch_does_not_have_cannot_be_exported() -> None:
    operations = [
        {"id": "a", "stage": 0, "instruction": "forward"},
        {"id": "b", "stage": 0, "instruction": "optimizer"},
    ]
    pipeline = Pipeline.from_dag({"schema": "envplan/dag/v1", "operations": operations})
    with pytest.raises(InputError, match='no action for "optimizer"'):
        as_torch_csv(pipeline)


@pytest.mark.parametrize(
    ("text", "line", "column", "words"),
    [
        ("0F0,0B0\n1F0,1X0\n", 2, 2, '"1X0" is no action'),
        ("0F0,0b0\n", 1, 2, '"0b0" is no action'),
        ("0F0,0B\n", 1, 2, '"0B" is no action'),
        ("F0,B0\n", 1, 1, '"F0" is no action'),
        ("0F0,0BW0\n", 1, 2, "of another version of PyTorch"),
        ("0F0,0B0,0W0\n", None, None, "is there whole and in parts"),
        ("0F0,(0F1;0B0)OVERLAP_X\n", 1, 2, "no action"),
        ("0F0,(0F1;0SEND_F0)OVERLAP_F_B\n", 1, 2, "no action"),
        ("0F0,0F99999999999\n", 1, 2, "no action"),
        ("0F0,0B0,0F0\n", None, None, "microbatch 0 on model stage 0 (rank 0) is there twice"),
        ("0F0,0B0,1F0,1B0\n1F1,1B1\n", None, None, "runs model stage 1 on rank 1"),
        ("0F0,0B0\n\n1F0,1B0\n", None, None, "rank 1 has no operations"),
        ("0F0,0B0\n0SEND_F0\n", None, None, "rank 1 has no operations"),
        ("", None, None, "no operations"),
        ("0F0,0B0\n2F0,2B0\n", None, None, "model stage 1 is on no rank"),
        ("0F0,0B0,0F1\n", None, None, "backward of microbatch 1 on model stage 0"),
        ("0B0,0F0\n", None, None, "deadlock"),
        ("0F0,0B0\n1B0,1F0\n", None, None, "deadlock"),
    ],
)
def test_unusable_file_is_refused_saying_where(
    text: str, line: int | None, column: int | None, words: str, tmp_path: Path
) -> None:
    (tmp_path / "schedule.csv").write_text(text)
    with pytest.raises(InputError) as caught:
        Pipeline.from_imported(read_torch_csv(tmp_path / "schedule.csv"))
    error = caught.value
    assert "\n" not in str(error)
    assert (error.line, error.column) == (line, column)
    assert words in error.message


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"0F0,\xff\xfe\n", "UTF-8"), (b"0F0," + b"9" * 200_000, "not CSV|no action")],
)
def test_file_that_is_no_schedule_is_refused(content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "schedule.csv").write_bytes(content)
    with pytest.raises(InputError, match=words):
        read_torch_csv(tmp_path / "schedule.csv")


def test_example_is_a_schedule_that_envplan_has_no_name_for() -> None:
    read = read_torch_csv(EXAMPLES / "gpipe-in-halves-4x8.csv")
    assert read.known_as is None
    pipeline = Pipeline.from_imported(read)
    assert (pipeline.num_stages, pipeline.num_microbatches) == (4, 8)
    first = [op.microbatch for op in pipeline.operations[:16]]
    assert first == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 7]
