"""Predictions held against real runs: the page says what the code finds."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from benchmarks import validate
from benchmarks.validate import Outcome, left_out
from tools.sosp24.clocks import replay_clocks
from tools.sosp24.data import WORKLOADS, read_runs
from tools.sosp24.overheads import Replay
from tools.sosp24.times import SwitchLatency
from tools.sosp24.workloads import identify

import envplan
from envplan import Profile

NAME = "a100-bert-huge-uncased-4stage"
LATENCY = SwitchLatency(0.0046, 0.0026, 0.0047, 428)
DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "validation.md"


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return left_out(NAME, LATENCY)


def test_runs_left_out_are_predicted_within_the_aim_and_as_the_page_says(outcome: Outcome) -> None:
    planned = outcome.runs.planned
    time, energy = outcome.time_error[planned], outcome.energy_error[planned]
    rms = np.sqrt((time**2).mean())
    assert rms < validate.TIME_AIM
    assert np.sqrt((energy**2).mean()) < validate.ENERGY_AIM
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    line = next(line for line in lines if line.startswith(f"| `{NAME}`"))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert int(cells[1]) == planned.sum()
    assert [float(cell) for cell in cells[2:4]] == pytest.approx([time.mean(), rms], abs=0.02)


def test_the_page_names_every_workload_and_its_pictures_are_there() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert all(f"`{name}`" in text for name in WORKLOADS)
    pictures = re.findall(r"\((validation-\w+\.png)\)", text)
    assert len(pictures) == 3
    assert all((DOCUMENT.parent / picture).stat().st_size > 10_000 for picture in pictures)


def test_a_run_is_not_in_the_profile_that_predicts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[tuple[str, int]]] = []

    def noted(runs, *arguments):  # type: ignore[no-untyped-def]
        seen.append(set(runs.keys))
        return identify(runs, *arguments)

    monkeypatch.setattr(validate, "identify", noted)
    runs = left_out(NAME, LATENCY, folds=2).runs
    assert not set(runs.keys) - (seen[0] | seen[1])
    assert not seen[0] & seen[1]


def test_replayed_clocks_cost_what_a_plan_of_them_costs() -> None:
    profile = Profile.builtin(f"sosp24-{NAME}")
    pipeline = profile.pipeline().with_microbatches(6)
    plan = envplan.trace_frontier(pipeline, profile).plan(slowdown=0.02)
    clocks = [[mhz for mhz in stage if mhz] for stage in plan.frequencies]
    time, energy = replay_clocks(pipeline, profile, clocks)
    assert time == pytest.approx(plan.iteration_time, abs=2e-9)
    assert energy == pytest.approx(plan.energy)
    late = envplan.simulate(plan, profile, switch_latency=0.005, ask="start")
    assert replay_clocks(pipeline, profile, clocks, 0.005) == pytest.approx(
        (late.iteration_time, late.energy)
    )


def test_replaying_a_run_on_its_profile_is_replaying_the_profile_s_times() -> None:
    runs = read_runs(NAME)
    model = identify(runs, LATENCY.seconds)
    profile = validate.workload_profile(model, LATENCY, len(runs))
    times = runs.by_clock(model.times.time_s, model.times.clocks_mhz)
    expected = Replay(runs.workload)(times, model.overheads)
    time, _ = replay_clocks(profile.pipeline(), profile, runs.clocks(5))
    assert time == pytest.approx(expected[5], rel=1e-5)


def test_two_stages_of_t5_work_one_after_the_other() -> None:
    """An iteration is longer by a second for each second that both are busy longer."""
    rms, slope = validate.busy_fit(read_runs("a40-t5-3b-8stage"), in_turn=True)
    assert rms < 1
    assert slope == pytest.approx(1, abs=0.1)


def test_pictures_show_a_panel_for_each_workload(outcome: Outcome) -> None:
    for draw in (validate._draw_time, validate._draw_energy, validate._draw_shape):
        figure = draw({NAME: outcome, "again": outcome})
        assert [axes.get_title() for axes in figure.axes] == [NAME, "again"]
