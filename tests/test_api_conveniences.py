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
    read = Profile.read_csv(tmp_path / "profile.csv")
    frame = pd.read_csv(tmp_path / "profile.csv")
    made = Profile.from_dataframe(frame, name="mine", metadata=ProfileMetadata(source="measured"))
    assert (made.name, made.metadata.source) == ("mine", "measured")
    for one, other in zip(made.tables(), read.tables(), strict=True):
        assert one.time_ns.tolist() == other.time_ns.tolist()
        assert one.energy_fj.tolist() == other.energy_fj.tolist()


def test_cells_of_a_data_frame_may_be_empty_and_wrong_ones_are_named() -> None:
    rows = {"stage": [0, 0], "instruction": ["forward", "backward"], "frequency": [1000, 1000]}
    frame = pd.DataFrame({**rows, "time": [0.1, 0.2], "energy": [10.0, 20.0]})
    assert Profile.from_dataframe(frame.assign(config=["wide", None])).num_stages == 1
    with pytest.raises(InputError, match="line 3, column time"):
        Profile.from_dataframe(frame.assign(time=[0.1, -1.0]))


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
