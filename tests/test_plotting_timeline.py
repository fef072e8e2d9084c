from __future__ import annotations

import io

import pytest
from matplotlib import colormaps
from matplotlib.figure import Figure

from cli_helpers import small_profile
from envplan.pipeline import Pipeline
from envplan.plotting.figures import made
from envplan.plotting.timeline import timeline_figure
from envplan.simulation import Timeline, simulate
from envplan.solve import trace_frontier


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    profile = small_profile(stages=3)
    plan = trace_frontier(Pipeline("1f1b", 3, 4), profile).plan()
    return simulate(plan, profile, switch_latency=0.01)


def test_every_stage_has_a_row_and_power_lies_below(timeline: Timeline) -> None:
    figure = timeline_figure(timeline)
    assert headline(figure).endswith("(modelled): 1f1b, 3 stages, 4 microbatches, 3 GPUs")
    stages, power, *_ = figure.axes
    labels = [label.get_text() for label in stages.get_yticklabels()]
    assert labels == ["stage 0", "stage 1", "stage 2"]
    assert power.get_xlim() == (0, timeline.sync_time)
    assert power.get_ylim()[1] > timeline.peak_power


def headline(figure: Figure) -> str:
    return figure.legends[0].get_title().get_text()


def timelines(pipeline: Pipeline) -> tuple[Timeline, Timeline]:
    """At maximum frequency and under a plan."""
    profile = small_profile(stages=pipeline.num_profile_stages)
    frontier = trace_frontier(pipeline, profile)
    plan = frontier.plan(slowdown=0.05)
    return simulate(frontier.max_frequency_plan(), profile), simulate(plan, profile)


def test_before_and_after_share_an_axis_and_say_what_is_saved() -> None:
    before, after = timelines(Pipeline("1f1b", 3, 4))
    figure = timeline_figure(after, before=before)
    above, below, power, *_ = figure.axes
    assert above.get_xlim() == below.get_xlim() == power.get_xlim()
    assert above.get_title(loc="left").startswith("Maximum frequency: ")
    predicted = after.plan.predicted
    assert below.get_title(loc="left").endswith(
        f"{predicted.savings_percent:.1f}% saved, {predicted.slowdown_percent:.1f}% slower"
    )


@pytest.mark.parametrize(
    "pipeline", [Pipeline("1f1b", 3, 6), Pipeline("interleaved", 2, 4, num_chunks=2)]
)
def test_numbers_stay_inside_their_bars_and_tell_chunks_apart(pipeline: Pipeline) -> None:
    _, timeline = timelines(pipeline)
    figure = timeline_figure(timeline)
    figure.savefig(io.BytesIO())
    axes = figure.axes[0]
    if pipeline.num_chunks > 1:
        assert {"3₀", "3₁"} <= {text.get_text() for text in axes.texts}
        assert "chunk 1" in [text.get_text() for text in figure.legends[0].get_texts()]
        assert "2 stages x 2 chunks" in headline(figure)
    bars = [
        axes.transData.transform([(row["start_s"], 0), (row["finish_s"], 0)])[:, 0]
        for row in timeline.rows
    ]
    assert len(axes.texts) > 10
    for text in axes.texts:
        box = text.get_window_extent()
        middle = (box.x0 + box.x1) / 2
        own = min(bars, key=lambda bar: abs(sum(bar) / 2 - middle))
        assert own[0] <= box.x0 < box.x1 <= own[1]


def test_a_single_clock_has_the_colour_of_the_highest_and_the_only_tick() -> None:
    profile = small_profile(stages=1, clocks=(1740,))
    timeline = simulate(trace_frontier(Pipeline("1f1b", 1, 1), profile).plan(), profile)
    figure = timeline_figure(timeline)
    assert headline(figure).endswith("1 stage, 1 microbatch, 1 GPU")
    bars = [each for each in figure.axes[0].collections if each.get_zorder() == 2]
    colours = [each.get_facecolor()[0].tolist() for each in bars]
    assert colours == [pytest.approx(colormaps["cividis"](1.0))] * 2  # forwards, backwards
    assert figure.axes[-1].get_yticks().tolist() == [1740]


def test_the_same_timeline_gives_the_same_file(timeline: Timeline) -> None:
    assert made(timeline_figure(timeline), "svg") == made(timeline_figure(timeline), "svg")


def test_of_very_many_operations_the_first_and_the_last_are_drawn_and_it_says_so(
    timeline: Timeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envplan.plotting.timeline._MOST_DRAWN", 10)
    monkeypatch.setattr("envplan.plotting.timeline._WINDOW", 5)
    figure = timeline_figure(timeline, before=timeline)
    left, right = figure.axes[:2]
    begin, first = left.get_xlim()
    last, end = right.get_xlim()
    assert begin == 0 < first < last < end == timeline.sync_time
    hidden = sum(first < row["start_s"] < last for row in timeline.rows)
    assert f"{hidden} of {len(timeline.rows)} operations" in headline(figure)
