from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envplan.errors import InputError
from envplan.pipeline import SCHEDULES, Pipeline
from envplan.plotting.figures import render
from envplan.plotting.schedule import schedule_figure, schedule_layout


def test_without_a_profile_a_forward_takes_one_unit_and_a_backward_two() -> None:
    layout = schedule_layout(Pipeline("1f1b", 2, 2, p2p_latency=5.0))
    names = [f"{op.stage} {layout.label(op)}" for op in layout.pipeline.operations]
    assert names == ["0 F0", "0 F1", "0 B0", "0 B1", "1 F0", "1 B0", "1 F1", "1 B1"]
    assert layout.start.tolist() == [0, 1, 4, 7, 1, 2, 4, 5]
    assert layout.time.tolist() == [1, 1, 2, 2, 1, 2, 1, 2]
    assert layout.makespan == 9
    assert layout.bubble_share == pytest.approx(1 - 12 / 18)


@given(
    name=st.sampled_from(sorted(SCHEDULES)),
    ranks=st.integers(1, 5),
    microbatches=st.integers(1, 10),
    chunks=st.integers(1, 2),
)
@settings(max_examples=40, deadline=None)
def test_rows_of_text_are_equally_long_and_in_order(
    name: str, ranks: int, microbatches: int, chunks: int
) -> None:
    try:
        layout = schedule_layout(Pipeline(name, ranks, microbatches, num_chunks=chunks))
    except InputError:
        return
    width = 1 + max(len(layout.label(op)) for op in layout.pipeline.operations)
    for rank, row in enumerate(layout.rows()):
        assert len(row) == width * layout.makespan
        mine = layout.of_rank(rank)
        assert row.replace("-", "").replace(".", "").split() == [
            layout.label(layout.pipeline.operations[i]) for i in mine
        ]
        assert len(row.split(".")) - 1 == layout.makespan - layout.time[list(mine)].sum()


def test_activations_are_held_until_the_weights_have_their_gradient() -> None:
    layout = schedule_layout(Pipeline("1f1b", 4, 8))
    assert [layout.activations(rank) for rank in range(4)] == [4, 3, 2, 1]
    assert schedule_layout(Pipeline("gpipe", 4, 8)).activations(3) == 8
    assert schedule_layout(Pipeline("zb-h1", 4, 8)).activations(3) == 4


def test_every_forward_and_backward_is_labelled() -> None:
    pipeline = Pipeline("1f1b", 8, 16)
    text = render(schedule_figure(schedule_layout(pipeline)), "svg").decode()
    for letter in "FB":
        for microbatch in range(16):
            assert len(re.findall(f">{letter}{microbatch}</text>", text)) == 8
    assert "8 ranks, 16 microbatches" in text


@pytest.mark.parametrize(("name", "chunks"), [("zb-v", 2), ("interleaved", 2), ("1f1b", 1)])
def test_no_two_labels_touch(name: str, chunks: int) -> None:
    figure = schedule_figure(schedule_layout(Pipeline(name, 4, 12, num_chunks=chunks)))
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    rows: dict[float, list[tuple[float, float]]] = {}
    for box in boxes:
        rows.setdefault(round(box.y0 + box.y1), []).append((box.x0, box.x1))
    assert len(rows) == 4
    for row in rows.values():
        row.sort()
        assert all(end < begin for (_, end), (begin, _) in pairwise(row))
