from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from cli_helpers import small_profile
from envplan.pipeline import Pipeline
from envplan.planners.comparison import compare
from envplan.plotting.figures import figure, save_figure
from envplan.plotting.frontier import frontier_figure
from envplan.profile import Profile
from envplan.solve import Frontier, trace_frontier


def traced(profile: Profile) -> Frontier:
    return trace_frontier(Pipeline("1f1b", 2, 4), profile)


#: In the last one the highest frequency is slower than others: the baseline is far from T_min.
PROFILES = {
    "usual": small_profile(),
    "measured": small_profile(source="measured"),
    "one clock": small_profile(clocks=(1740,)),
    "baseline not at T_min": Profile.from_rows(
        [
            (stage, instruction, mhz, work * time, work * energy)
            for stage in (0, 1)
            for instruction, work in (("forward", 1), ("backward", 2))
            for mhz, time, energy in (
                *((2000, 0.13, 30), (1800, 0.1, 26), (1500, 0.104, 15), (9, 0.2, 14.9)),
            )
        ]
    ),
}


def boxes(figure: Figure) -> list[Bbox]:
    """Where the legend and every note stand, in pixels."""
    axes = figure.axes[0]
    (legend,) = figure.legends
    texts = [text.get_window_extent() for text in axes.texts if text.get_text()]
    return [legend.get_window_extent(), *texts]


@pytest.mark.parametrize("kind", PROFILES)
def test_notes_and_legend_hide_no_point_nor_each_other_and_all_points_are_inside(kind: str) -> None:
    frontier = traced(PROFILES[kind])
    figure = frontier_figure(frontier, frontier.sample_plans(12))
    figure.savefig(io.BytesIO())
    axes, found = figure.axes[0], boxes(figure)
    for k, one in enumerate(found):
        assert not any(one.overlaps(other) for other in found[k + 1 :])
    for line in axes.lines:
        points = axes.transData.transform(np.column_stack(line.get_data()))
        assert all(axes.bbox.contains(x, y) for x, y in points)
        assert not any(box.contains(x, y) for box in found for x, y in points)
    for label, unit in ((axes.get_xlabel(), "(s)"), (axes.get_ylabel(), "(J)")):
        assert unit in label
        assert "does not start at 0" in label
    assert ("modelled" in axes.get_title(loc="left")) == (kind in ("usual", "one clock"))


def test_curve_is_the_exact_one_with_its_ends_marked() -> None:
    frontier = traced(PROFILES["usual"])
    sampled = frontier.sample_plans(5)
    axes = frontier_figure(frontier, sampled).axes[0]
    texts = [text.get_text() for text in axes.texts]
    assert f"{sampled[0].predicted.savings_percent:.1f}% saved,\nno slowdown" in texts
    curve, plans, baseline, *ends = axes.lines
    assert np.array_equal(curve.get_xdata(), frontier.times)
    assert np.array_equal(curve.get_ydata(), frontier.energies)
    assert len(np.atleast_1d(plans.get_xdata())) == 5
    assert baseline.get_label() == "maximum frequency"
    assert [np.ravel(end.get_xdata())[0] for end in ends] == [
        frontier.min_time,
        frontier.min_energy_time,
    ]


def test_beside_other_planners_are_our_plans_and_both_ends() -> None:
    frontier = traced(PROFILES["usual"])
    plans = frontier.sample_plans(5)
    axes = frontier_figure(frontier, plans, compare(frontier)).axes[0]
    ours = next(
        line for line in axes.lines if line.get_label() == "plans, one frequency per operation"
    )
    assert list(ours.get_xdata()) == [plan.iteration_time for plan in plans]
    texts = " ".join(text.get_text() for text in axes.texts)
    assert "T_min, fastest: " in texts
    assert "T_star, least energy: " in texts
    whole = axes.figure
    assert isinstance(whole, Figure)
    whole.savefig(io.BytesIO())
    (legend,) = whole.legends
    assert not legend.get_window_extent().overlaps(axes.bbox)


@pytest.mark.parametrize(
    ("kind", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")]
)
def test_the_same_figure_gives_the_same_file_of_the_type_its_name_says(
    kind: str, start: bytes, tmp_path: Path
) -> None:
    files = tmp_path / f"one.{kind}", tmp_path / f"two.{kind}"
    for path in files:
        with figure(2, 2) as tiny:
            tiny.add_subplot().plot([1, 2], label="one")
            tiny.legend()
        save_figure(tiny, path)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert files[0].read_bytes().startswith(start)
