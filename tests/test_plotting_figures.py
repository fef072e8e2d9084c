"""The pictures of frontiers, timelines and profiles."""

from __future__ import annotations

import io
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from cli_helpers import small_profile
from envplan.pipeline import Pipeline
from envplan.planners import compare
from envplan.plotting.figures import figure, render, save_figure
from envplan.plotting.frontier import frontier_figure
from envplan.plotting.profile import plateau, profile_figure
from envplan.plotting.timeline import timeline_figure
from envplan.profile import Profile
from envplan.simulation.iteration import Timeline, simulate
from envplan.solve import Frontier, trace_frontier


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


# ---- frontiers


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


@pytest.mark.parametrize("kind", PROFILES)
def test_notes_and_legend_hide_no_point_nor_each_other_and_all_points_are_inside(kind: str) -> None:
    frontier = traced(PROFILES[kind])
    figure = frontier_figure(frontier, frontier.sample_plans(12))
    figure.savefig(io.BytesIO())
    axes, (legend,) = figure.axes[0], figure.legends
    texts = [text.get_window_extent() for text in axes.texts if text.get_text()]
    boxes = [legend.get_window_extent(), *texts]
    for box, further_box in combinations(boxes, 2):
        assert not box.overlaps(further_box)
    for line in axes.lines:
        points = axes.transData.transform(np.column_stack(line.get_data()))
        assert all(axes.bbox.contains(x, y) for x, y in points)
        assert not any(box.contains(x, y) for box in boxes for x, y in points)
    for label, unit in ((axes.get_xlabel(), "(s)"), (axes.get_ylabel(), "(J)")):
        assert unit in label
        assert "does not start at 0" in label
    assert ("modelled" in axes.get_title(loc="left")) == (kind in ("usual", "one clock"))


def test_curve_is_the_exact_one_with_its_ends_marked_also_beside_other_planners() -> None:
    frontier = traced(PROFILES["usual"])
    sampled = frontier.sample_plans(5)
    axes = frontier_figure(frontier, sampled).axes[0]
    texts = [text.get_text() for text in axes.texts]
    assert f"{sampled[0].predicted.savings_percent:.1f}% saved,\nno slowdown" in texts
    curve, plans, baseline, *ends = axes.lines
    assert np.array_equal(curve.get_xdata(), frontier.times)
    assert np.array_equal(curve.get_ydata(), frontier.energies)
    assert baseline.get_label() == "maximum frequency"
    marked = [np.ravel(end.get_xdata())[0] for end in ends]
    assert marked == [frontier.min_time, frontier.min_energy_time]
    whole = frontier_figure(frontier, sampled, compare(frontier))
    (axes,), words = whole.axes, "plans, one frequency per operation"
    ours = next(line for line in axes.lines if line.get_label() == words)
    for drawn in (plans, ours):
        assert list(drawn.get_xdata()) == [plan.iteration_time for plan in sampled]
    texts = [text.get_text().partition(": ")[0] for text in axes.texts]
    assert {"T_min, fastest", "T_star, least energy"} <= set(texts)
    whole.savefig(io.BytesIO())
    (legend,) = whole.legends
    assert not legend.get_window_extent().overlaps(axes.bbox)


def dense(line: Line2D) -> NDArray[np.float64]:
    """Points along a line, no more than a pixel from each other."""
    corners = line.get_transform().transform(np.column_stack(line.get_data()))
    far = np.abs(np.diff(corners, axis=0)).max(axis=1, initial=0)
    parts = [
        np.linspace(begin, end, int(steps) + 2)
        for begin, end, steps in zip(corners[:-1], corners[1:], far, strict=True)
    ]
    return np.concatenate([corners[:1], *parts])


@pytest.mark.parametrize("job", ["a40-gpt3-1.3b-4stage", "h100-gpt3-175b-8stage"])
def test_names_beside_planners_cover_no_line_and_no_mark_has_two_meanings(job: str) -> None:
    frontier = trace_frontier(Pipeline("1f1b", int(job[-6]), 8), Profile.builtin(job))
    figure = frontier_figure(frontier, frontier.plans_to_draw(9), compare(frontier))
    figure.savefig(io.BytesIO())
    axes, (legend,) = figure.axes[0], figure.legends
    names = {text.get_text(): text.get_window_extent() for text in axes.texts}
    assert {"envplan", "Zeus, one clock for all"} & names.keys()
    for box, further_box in combinations(names.values(), 2):
        assert not box.overlaps(further_box)
    for line in axes.lines:
        if len(line.get_xdata()):
            for text, box in names.items():
                assert not any(box.contains(x, y) for x, y in dense(line)), text
    # Each mark with a shape of its own is in the legend once, and no other is drawn.
    diamonds = [line for line in axes.lines if line.get_marker() == "D"]
    assert [line.get_label() for line in diamonds] == ["envplan, EnvPipe's order"]
    entries = {text.get_text() for text in legend.get_texts()}
    zeus = {"Zeus, one clock for all", "Zeus, one clock a stage"}
    assert zeus <= entries
    for handle in legend.legend_handles:
        if handle is not None and handle.get_label() in zeus:
            assert isinstance(handle, Line2D)
            assert handle.get_linestyle() == "-"


# ---- timelines


def timeline_of(pipeline: Pipeline, **machine: float) -> Timeline:
    profile = small_profile(stages=pipeline.num_profile_stages)
    return simulate(trace_frontier(pipeline, profile).plan(slowdown=0.05), profile, **machine)


def headline(figure: Figure) -> str:
    return figure.legends[0].get_title().get_text()


def test_every_stage_has_a_row_and_power_lies_below() -> None:
    timeline = timeline_of(Pipeline("1f1b", 3, 4), switch_latency=0.01)
    figure = timeline_figure(timeline)
    assert headline(figure).endswith("(modelled): 1f1b, 3 stages, 4 microbatches, 3 GPUs")
    stages, power, *_ = figure.axes
    labels = [label.get_text() for label in stages.get_yticklabels()]
    assert labels == ["stage 0", "stage 1", "stage 2"]
    assert power.get_xlim() == (0, timeline.sync_time)
    assert power.get_ylim()[1] > timeline.peak_power
    assert render(timeline_figure(timeline), "svg") == render(figure, "svg")


def test_before_and_after_share_an_axis_and_say_what_is_saved() -> None:
    timeline = timeline_of(Pipeline("1f1b", 3, 4))
    figure = timeline_figure(timeline, before=timeline.at_max_frequency())
    above, below, power, *_ = figure.axes
    assert above.get_xlim() == below.get_xlim() == power.get_xlim()
    assert above.get_title(loc="left").startswith("Maximum frequency: ")
    predicted = timeline.plan.predicted
    assert below.get_title(loc="left").endswith(
        f"{predicted.savings_percent:.1f}% saved, {predicted.slowdown_percent:.1f}% slower"
    )


@pytest.mark.parametrize(
    "pipeline", [Pipeline("1f1b", 3, 6), Pipeline("interleaved", 2, 4, num_chunks=2)]
)
def test_numbers_stay_inside_their_bars_and_tell_chunks_apart(pipeline: Pipeline) -> None:
    timeline = timeline_of(pipeline)
    figure = timeline_figure(timeline)
    figure.savefig(io.BytesIO())
    axes = figure.axes[0]
    if pipeline.num_chunks > 1:
        assert {"3₀", "3₁"} <= {text.get_text() for text in axes.texts}
        assert "chunk 1" in [text.get_text() for text in figure.legends[0].get_texts()]
        assert "2 stages x 2 chunks" in headline(figure)
    bars = [
        axes.transData.transform([(run.start_s, 0), (run.finish_s, 0)])[:, 0]
        for run in timeline.operations
    ]
    assert len(axes.texts) > 10
    for text in axes.texts:
        box = text.get_window_extent()
        middle = (box.x0 + box.x1) / 2
        left, right = min(bars, key=lambda bar: abs(sum(bar) / 2 - middle))
        assert left <= box.x0 < box.x1 <= right


def test_a_single_clock_has_the_colour_of_the_highest_and_the_only_tick() -> None:
    profile = small_profile(stages=1, clocks=(1740,))
    timeline = simulate(trace_frontier(Pipeline("1f1b", 1, 1), profile).plan(), profile)
    figure = timeline_figure(timeline)
    assert headline(figure).endswith("1 stage, 1 microbatch, 1 GPU")
    collections = figure.axes[0].collections
    bars = [collection for collection in collections if collection.get_zorder() == 2]
    colours = [bar.get_facecolor()[0].tolist() for bar in bars]
    assert colours == [pytest.approx(colormaps["cividis"](1.0))] * 2  # forwards, backwards
    assert figure.axes[-1].get_yticks().tolist() == [1740]


def test_of_very_many_operations_the_first_and_the_last_are_drawn_and_it_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("envplan.plotting.timeline._MAX_DRAWN", 10)
    monkeypatch.setattr("envplan.plotting.timeline._EXCERPT", 5)
    timeline = timeline_of(Pipeline("1f1b", 3, 4))
    figure = timeline_figure(timeline, before=timeline)
    head, tail = (axes.get_xlim() for axes in figure.axes[:2])
    assert head[0] == 0 < head[1] < tail[0] < tail[1] == timeline.sync_time
    hidden = sum(head[1] < run.start_s < tail[0] for run in timeline.operations)
    assert f"{hidden} of {len(timeline.operations)} operations" in headline(figure)


# ---- profiles


def test_each_stage_is_a_curve_with_its_valley_named() -> None:
    figure = profile_figure(small_profile(stages=3))
    axes, (legend,) = figure.axes[0], figure.legends
    labels = [text.get_text().split(",") for text in legend.get_texts()]
    assert [stage for stage, _ in labels] == ["stage 0", "stage 1", "stage 2"]
    assert all("valley at" in valley for _, valley in labels)
    assert "(modelled)" in axes.get_title(loc="left")
    assert "MHz" in axes.get_xlabel()
    # Of many stages a bar says whose colour is whose.
    axes, bar = profile_figure(small_profile(stages=12)).axes
    assert not axes.get_figure().legends
    assert bar.get_ylabel().startswith("Stage")
    assert bar.get_ylim() == (-0.5, 11.5)


def test_stages_of_the_same_energies_are_one_curve() -> None:
    stage_of = [0, 1, 1, 1, 0, 2]
    rows = [
        (stage, instruction, mhz, 100 / mhz, 10.0 + like + mhz / 1000)
        for stage, like in enumerate(stage_of)
        for mhz in (1000, 1200)
        for instruction in ("forward", "backward")
    ]
    figure = profile_figure(Profile.from_rows(rows))
    labels = [text.get_text().rpartition(",")[0] for text in figure.legends[0].get_texts()]
    assert labels == ["stages 0, 4", "stages 1 to 3", "stage 5"]
    assert len(figure.axes[0].lines) == 2 * 3  # and a diamond each


def test_the_plateau_under_the_power_limit_is_named() -> None:
    def profile(limit_w: float) -> Profile:
        rows = []
        for mhz in range(900, 1800, 75):
            clock = min(mhz, 1350) if limit_w else mhz
            power = 300 * (clock / 1350) ** 2
            for instruction, work in (("forward", 1.0), ("backward", 2.0)):
                time = work * 1350 / clock * (1 - 1e-6 * mhz)
                rows.append((0, instruction, mhz, time, power * time))
        return Profile.from_rows(rows)

    assert plateau(profile(300.0)) == (1350, 1725, pytest.approx(300))
    assert plateau(profile(0.0)) is None
    labels = profile_figure(profile(300.0)).legends[0].get_texts()
    assert "power limit, about 300 W" in labels[-1].get_text()
