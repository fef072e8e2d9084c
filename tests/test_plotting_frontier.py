from __future__ import annotations

import io
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from cli_helpers import small_profile
from envplan.errors import InputError
from envplan.pipeline import Pipeline
from envplan.planners import compare
from envplan.plotting.figures import save_figure
from envplan.plotting.frontier import frontier_figure
from envplan.profile import Profile
from envplan.solve import Frontier, trace_frontier


def traced(profile: Profile | None = None) -> Frontier:
    return trace_frontier(Pipeline("1f1b", 2, 4), profile or small_profile())


def odd_profile() -> Profile:
    """Highest frequency slower than others: the baseline is far from T_min."""
    rows = [
        (stage, instruction, mhz, work * time, work * energy)
        for stage in (0, 1)
        for instruction, work in (("forward", 1), ("backward", 2))
        for mhz, time, energy in (
            (2000, 0.13, 30),
            (1800, 0.1, 26),
            (1500, 0.104, 15),
            (9, 0.2, 14.9),
        )
    ]
    return Profile.from_rows(rows)


def drawn(profile: Profile | None = None) -> Figure:
    frontier = traced(profile)
    figure = frontier_figure(frontier, frontier.sample_plans(12))
    figure.savefig(io.BytesIO())
    return figure


def boxes(figure: Figure) -> list[Bbox]:
    """Where the legend and every note stand, in pixels."""
    axes = figure.axes[0]
    (legend,) = figure.legends
    texts = [text.get_window_extent() for text in axes.texts if text.get_text()]
    return [legend.get_window_extent(), *texts]


PROFILES = {
    "usual": small_profile(),
    "one clock": small_profile(clocks=(1740,)),
    "baseline not at T_min": odd_profile(),
}


@pytest.mark.parametrize("kind", PROFILES)
def test_notes_and_legend_do_not_overlap(kind: str) -> None:
    found = boxes(drawn(PROFILES[kind]))
    for k, one in enumerate(found):
        assert not any(one.overlaps(other) for other in found[k + 1 :])


@pytest.mark.parametrize("kind", PROFILES)
def test_no_point_is_hidden_by_legend_or_notes_and_all_are_inside(kind: str) -> None:
    figure = drawn(PROFILES[kind])
    axes = figure.axes[0]
    for line in axes.lines:
        points = axes.transData.transform(np.column_stack(line.get_data()))
        assert all(axes.bbox.contains(x, y) for x, y in points)
        assert not any(box.contains(x, y) for box in boxes(figure) for x, y in points)


def test_curve_is_the_exact_one_with_its_ends_marked() -> None:
    frontier = traced()
    axes = frontier_figure(frontier, frontier.sample_plans(5)).axes[0]
    curve, plans, baseline, *ends = axes.lines
    assert np.array_equal(curve.get_xdata(), frontier.times)
    assert np.array_equal(curve.get_ydata(), frontier.energies)
    assert len(np.atleast_1d(plans.get_xdata())) == 5
    assert baseline.get_label() == "maximum frequency"
    assert [np.ravel(end.get_xdata())[0] for end in ends] == [
        frontier.min_time,
        frontier.min_energy_time,
    ]


def test_words_have_units_and_say_what_is_modelled_and_what_does_not_start_at_0() -> None:
    axes = drawn().axes[0]
    for label, unit in ((axes.get_xlabel(), "(s)"), (axes.get_ylabel(), "(J)")):
        assert unit in label
        assert "does not start at 0" in label
    assert "modelled" in axes.get_title(loc="left")
    assert "modelled" not in drawn(small_profile(source="measured")).axes[0].get_title(loc="left")


def test_savings_are_those_of_the_plans() -> None:
    frontier = traced()
    plans = frontier.sample_plans(5)
    texts = [t.get_text() for t in frontier_figure(frontier, plans).axes[0].texts]
    assert f"{plans[0].predicted.savings_percent:.1f}% saved,\nno slowdown" in texts


def test_beside_other_planners_are_our_plans_and_both_ends() -> None:
    frontier = traced()
    plans = frontier.sample_plans(5)
    axes = frontier_figure(frontier, plans, compare(frontier)).axes[0]
    ours = next(
        line for line in axes.lines if line.get_label() == "plans, one frequency per operation"
    )
    assert list(ours.get_xdata()) == [plan.iteration_time for plan in plans]
    texts = " ".join(text.get_text() for text in axes.texts)
    assert "T_min, fastest: " in texts
    assert "T_star, least energy: " in texts
    figure = axes.figure
    assert isinstance(figure, Figure)
    figure.savefig(io.BytesIO())
    (legend,) = figure.legends
    assert not legend.get_window_extent().overlaps(axes.bbox)


def test_svg_is_well_formed_and_the_same_every_time(tmp_path: Path) -> None:
    frontier = traced()
    for name in ("one.svg", "two.svg"):
        save_figure(frontier_figure(frontier, frontier.sample_plans(5)), tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert ElementTree.parse(tmp_path / "one.svg").getroot().tag.endswith("svg")


def test_unwritable_place_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    frontier = traced()
    with pytest.raises(InputError, match="cannot be written"):
        save_figure(
            frontier_figure(frontier, frontier.sample_plans(2)), tmp_path / "missing" / "f.png"
        )
    assert list(tmp_path.iterdir()) == []
