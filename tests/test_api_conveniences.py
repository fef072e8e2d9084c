"""What makes the Python API short: data frames in, pictures and savings out."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from cli_helpers import small_profile
from envplan import Frontier, InputError, Pipeline, Profile, simulate, trace_frontier
from envplan.profile import ProfileMetadata


@pytest.fixture(scope="module")
def frontier() -> Frontier:
    return trace_frontier(Pipeline("1f1b", 2, 4), small_profile(2))


def test_a_data_frame_is_the_same_profile_as_its_file(tmp_path: Path) -> None:
    small_profile(2, blocking=70).save_csv(tmp_path / "profile.csv")
    frame = pd.read_csv(tmp_path / "profile.csv")
    made = Profile.from_dataframe(frame, name="mine", metadata=ProfileMetadata(source="measured"))
    assert (made.name, made.metadata.source) == ("mine", "measured")
    read = Profile.read_csv(tmp_path / "profile.csv")
    assert [table.options() for table in made.tables()] == [
        table.options() for table in read.tables()
    ]
    # Cells may be empty, and wrong ones are named.
    some = frame.assign(config=["wide" if k else None for k in range(len(frame))])
    assert Profile.from_dataframe(some).num_stages == 2
    with pytest.raises(InputError, match="line 3, column time"):
        Profile.from_dataframe(frame.assign(time=[0.1, *[-1.0] * (len(frame) - 1)]))


def test_values_are_frames_of_breakpoints_operations_and_what_ran(frontier: Frontier) -> None:
    frame = frontier.to_dataframe()
    assert list(frame) == ["iteration_time_s", "energy_lower_bound_j"]
    assert frame["iteration_time_s"].tolist() == frontier.times.tolist()
    assert frame["energy_lower_bound_j"].iloc[-1] == frontier.energy_at(frontier.min_energy_time)
    plan = frontier.plan()
    frame = plan.to_dataframe()
    assert len(frame) == 2 * 2 * 4
    for stage, frequencies in enumerate(plan.frequencies):
        assert frame.loc[frame["stage"] == stage, "frequency_mhz"].tolist() == frequencies
    timeline = simulate(plan, frontier.profile)
    frame = timeline.to_dataframe()
    assert frame["finish_s"].max() == timeline.iteration_time
    assert frame["critical_path"].sum() == len(timeline.critical_path)


def test_a_frontier_draws_itself(frontier: Frontier, tmp_path: Path) -> None:
    figure = frontier.plot(tmp_path / "frontier.svg", plans=3)
    assert "T_min" in (tmp_path / "frontier.svg").read_text()
    assert figure.axes
    with pytest.raises(InputError):
        frontier.plot(tmp_path / "missing" / "frontier.png", plans=3)


def test_values_say_in_a_line_what_they_are(frontier: Frontier) -> None:
    plan = frontier.plan(slowdown=0.05)
    for value in (frontier, plan, simulate(plan, frontier.profile)):
        assert "\n" not in repr(value)
        assert len(repr(value)) < 100
    saved = plan.savings
    assert saved.joules == pytest.approx(plan.predicted.baseline.energy_j - plan.energy)


def test_notebooks_show_pictures_and_tables(frontier: Frontier) -> None:
    plan = frontier.plan()
    for picture in (frontier._repr_png_(), simulate(plan, frontier.profile)._repr_png_()):
        assert picture.startswith(b"\x89PNG")
    table = plan._repr_html_()
    assert "modelled" in table
    assert f"{plan.predicted.savings_percent:.2f}" in table


@pytest.mark.parametrize("name", ["target_time", "slowdown", "power_cap", "switch_latency"])
def test_what_is_no_number_is_refused_by_name(frontier: Frontier, name: str) -> None:
    field = {"target_time": "time_s", "power_cap": "power_w"}.get(name, name)
    with pytest.raises(InputError, match=f'{field}.* should be a valid number, not "x"'):
        frontier.plan(**{name: "x"})
