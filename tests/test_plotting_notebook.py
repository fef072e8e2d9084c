from __future__ import annotations

import base64
import re

import pytest

from cli_helpers import small_profile
from envplan.pipeline import Pipeline
from envplan.simulation import simulate
from envplan.solve import Frontier, trace_frontier


@pytest.fixture(scope="module")
def frontier() -> Frontier:
    return trace_frontier(Pipeline("1f1b", 2, 3), small_profile(stages=2))


def test_a_frontier_is_a_frame_of_its_breakpoints(frontier: Frontier) -> None:
    frame = frontier.to_dataframe()
    assert list(frame) == ["iteration_time_s", "energy_lower_bound_j"]
    assert frame["iteration_time_s"].tolist() == frontier.times.tolist()
    assert frame["energy_lower_bound_j"].iloc[-1] == frontier.energy_at(frontier.min_energy_time)


def test_a_plan_is_a_frame_of_its_operations(frontier: Frontier) -> None:
    plan = frontier.plan()
    frame = plan.to_dataframe()
    assert len(frame) == 2 * 2 * 3
    for stage, frequencies in enumerate(plan.frequencies):
        assert frame.loc[frame["stage"] == stage, "frequency_mhz"].tolist() == frequencies


def test_a_timeline_is_a_frame_of_what_ran(frontier: Frontier) -> None:
    timeline = simulate(frontier.plan(), frontier.profile)
    frame = timeline.to_dataframe()
    assert frame["finish_s"].max() == timeline.iteration_time
    assert frame["critical_path"].sum() == len(timeline.critical_path)


def test_notebooks_show_pictures_and_tables(frontier: Frontier) -> None:
    plan = frontier.plan()
    for picture in (frontier._repr_html_(), simulate(plan, frontier.profile)._repr_html_()):
        found = re.fullmatch(r'<img alt="[^"]+" src="data:image/png;base64,([^"]+)">', picture)
        assert found is not None
        assert base64.b64decode(found[1]).startswith(b"\x89PNG")
    table = plan._repr_html_()
    assert "modelled" in table
    assert f"{plan.predicted.savings_percent:.2f}" in table
