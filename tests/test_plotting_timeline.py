from __future__ import annotations

from pathlib import Path

import pytest

from cli_helpers import small_profile
from envplan.errors import InputError
from envplan.frontier import trace_frontier
from envplan.pipeline import Pipeline
from envplan.plotting.timeline import plot_timeline, timeline_figure
from envplan.simulation import Timeline, simulate


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    profile = small_profile(stages=3)
    plan = trace_frontier(Pipeline("1f1b", 3, 4), profile).plan()
    return simulate(plan, profile, switch_latency=0.01)


def test_every_stage_has_a_row_and_power_lies_below(timeline: Timeline) -> None:
    stages, power, *_ = timeline_figure(timeline).axes
    assert [label.get_text() for label in stages.get_yticklabels()] == [
        "stage 0",
        "stage 1",
        "stage 2",
    ]
    assert power.get_xlim() == (0, timeline.sync_time)
    assert power.get_ylim()[1] > timeline.peak_power


def test_modelled_profiles_are_labelled_so(timeline: Timeline) -> None:
    assert "(modelled)" in timeline_figure(timeline).axes[0].get_title(loc="left")


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_the_same_timeline_gives_the_same_file(
    timeline: Timeline, tmp_path: Path, ending: str
) -> None:
    one, other = tmp_path / f"one.{ending}", tmp_path / f"other.{ending}"
    plot_timeline(timeline, one)
    plot_timeline(timeline, other)
    assert one.read_bytes() == other.read_bytes()


def test_an_unwritable_place_is_refused(timeline: Timeline, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be written"):
        plot_timeline(timeline, tmp_path / "none" / "timeline.png")


def test_one_clock_and_one_stage_can_be_drawn(tmp_path: Path) -> None:
    profile = small_profile(stages=1, clocks=(1740,))
    plan = trace_frontier(Pipeline("1f1b", 1, 1), profile).plan()
    plot_timeline(simulate(plan, profile), tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").stat().st_size > 0
