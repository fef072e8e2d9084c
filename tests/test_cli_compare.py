"""`envplan compare` and `envplan solve --planner`, through the installed command and in process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli_helpers import assert_refused, envplan, small_profile
from envplan.cli import app
from envplan.plan import Plan
from envplan.planners import PLANNERS
from envplan.plotting.frontier import LOOKS
from envplan.profile import Profile, ProfileMetadata
from envplan.verify import verify_plan


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    small_profile(3, blocking=70.0, microbatches=6).save_csv(tmp_path / "profile.csv")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def compared(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert app._run(["compare", "--json", *arguments]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_table_shows_every_planner(folder: Path) -> None:
    ran = envplan("compare", cwd=folder)
    assert ran.code == 0, ran.err
    for name in PLANNERS:
        assert name in ran.out
    for header in ("slower (%)", "saved (%)", "gap (%)", "intrinsic (%)", "planned in (s)"):
        assert header in ran.out
    assert "envpipe stopped after" in ran.out
    assert "modelled" in ran.out
    assert "extrinsic" not in ran.out
    assert "published" not in ran.out


def test_plot_alone_draws_compare_png(folder: Path) -> None:
    ran = envplan("compare", "profile.csv", "--straggler-slowdown", "3", "--plot", cwd=folder)
    assert ran.code == 0, ran.err
    assert "wrote compare.png" in ran.out
    assert (folder / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_svg_names_all_planners_and_is_the_same_again(folder: Path) -> None:
    assert app._run(["compare", "-q", "--plot", "a.svg"]) == 0
    first = (folder / "a.svg").read_text()
    for name in PLANNERS:
        assert LOOKS[name].name in first
    assert app._run(["compare", "-q", "--plot", "a.svg"]) == 0
    assert (folder / "a.svg").read_text() == first


def test_json_has_what_the_table_has(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = compared(capsys)
    assert document["straggler_time_s"] is None
    assert document["published"] is None
    assert {entry["planner"] for entry in document["planners"]} == set(PLANNERS)
    for entry in document["planners"]:
        assert entry["energy_lower_bound_j"] <= entry["frontier_energy_j"] <= entry["energy_j"]
        assert entry["extrinsic_bloat_j"] is None
    assert document["envpipe"]["stopped"] in ("outer envelope", "highest clocks")


def test_straggler_by_time_and_by_slowdown_is_the_same(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    by_slowdown = compared(capsys, "--straggler-slowdown", "3")
    time = by_slowdown["straggler_time_s"]
    assert time == pytest.approx(1.03 * by_slowdown["baseline"]["iteration_time_s"])
    by_time = compared(capsys, "--straggler-time", repr(time))
    for one, other in zip(by_slowdown["planners"], by_time["planners"], strict=True):
        assert one["extrinsic_bloat_j"] == other["extrinsic_bloat_j"]
        assert one["straggler_energy_j"] >= one["energy_j"]


def test_straggler_table_stands_below_the_other(folder: Path) -> None:
    ran = envplan("compare", "--straggler-slowdown", "3", cwd=folder)
    assert "Until a straggler is finished at" in ran.out
    assert "extrinsic (%)" in ran.out
    assert "frontier for straggler" in ran.out


def test_straggler_faster_than_maximum_frequency_is_none_and_this_is_said(folder: Path) -> None:
    ran = envplan("compare", "--straggler-time", "0.01", cwd=folder)
    assert ran.code == 0
    assert "it is no straggler" in ran.out


def test_published_figure_is_labelled_as_such(folder: Path) -> None:
    metadata = ProfileMetadata(
        num_microbatches=4,
        extra={"published": {"savings_percent": 25.2, "slowdown_percent": 1, "source": "a paper"}},
    )
    rows = [(0, name, mhz, 90 / mhz, 5.0 + mhz / 300) for name in ("forward", "backward")
            for mhz in (900, 1200)]  # fmt: skip
    Profile.from_rows(rows, metadata=metadata).save_csv(folder / "known.csv")
    ran = envplan("compare", "known.csv", cwd=folder)
    assert ran.code == 0, ran.err
    assert "published" in ran.out
    assert "not here: 25.2% saved at 1% slowdown (a paper)" in ran.out


def test_activation_slots_hold_envpipe_back(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compared(capsys)["envpipe"]["forwards_ahead"][0] > 0
    assert compared(capsys, "--activation-slots", "3")["envpipe"]["forwards_ahead"] == [0, 0, 0]
    capped = compared(capsys, "--schedule", "envpipe", "--activation-slots", "4,2,1")
    assert capped["envpipe"]["forwards_ahead"] == [1, 0, 0]
    assert {entry["schedule"] for entry in capped["planners"]} == {"envpipe"}


@pytest.mark.parametrize("name", sorted(PLANNERS))
def test_solve_with_any_planner_writes_a_plan_that_check_proves(folder: Path, name: str) -> None:
    assert app._run(["solve", "-q", "--planner", name]) == 0
    plan = Plan.load(folder / "plan.json")
    assert plan.planner == name
    assert plan.job.schedule == ("envpipe" if name == "envpipe" else "1f1b")
    assert verify_plan(plan, Profile.read_csv("profile.csv"))
    assert app._run(["check", "-q", "plan.json"]) == 0


def test_solve_keeps_the_schedule_named_for_envpipe(folder: Path) -> None:
    assert app._run(["solve", "-q", "--planner", "envpipe", "--schedule", "1f1b"]) == 0
    assert Plan.load(folder / "plan.json").job.schedule == "1f1b"


def test_envpipe_plan_carries_its_schedule(folder: Path) -> None:
    ran = envplan("solve", "--planner", "envpipe", "--activation-slots", "4", cwd=folder)
    assert ran.code == 0, ran.err
    plan = Plan.load(folder / "plan.json")
    assert plan.job.forwards_ahead == [1, 1, 0]
    assert list(plan.job.pipeline().forwards_ahead) == [1, 1, 0]


@pytest.mark.parametrize("how", ["balanced", "greedy"])
def test_explain_prints_each_iteration(folder: Path, how: str) -> None:
    arguments = ("solve", "--planner", "envpipe", "--reconfigure", how, "--explain")
    ran = envplan(*arguments, cwd=folder)
    assert ran.code == 0, ran.err
    assert "EnvPipe's iterations" in ran.out
    assert "MHz" in ran.out
    assert "EnvPipe stopped: the critical path" in ran.out
    document = json.loads(envplan(*arguments, "--json", cwd=folder).out)["envpipe"]
    assert document["iterations"][-1]["raised"] == []
    assert all(step["raised"] for step in document["iterations"][:-1])
    energy = Plan.load(folder / "plan.json").energy
    assert document["iterations"][-1]["energy_j"] == energy


def test_zeus_takes_targets_and_stragglers(folder: Path) -> None:
    assert app._run(["solve", "-q", "--planner", "zeus_global"]) == 0
    fast = Plan.load(folder / "plan.json")
    for target in (
        ["--slowdown", "60"],
        ["--target-time", repr(1.6 * fast.iteration_time)],
        ["--straggler-time", repr(1.6 * fast.iteration_time)],
    ):
        assert app._run(["solve", "-q", "--planner", "zeus_global", *target]) == 0
        slow = Plan.load(folder / "plan.json")
        assert slow.energy < fast.energy
        assert verify_plan(slow, Profile.read_csv("profile.csv"))


def test_target_too_early_for_a_planner_has_no_answer(folder: Path) -> None:
    ran = envplan("solve", "--planner", "zeus_per_stage", "--target-time", "0.1", cwd=folder)
    assert_refused(ran, 1, "zeus_per_stage", "fastest takes")


def _assert_one_line(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("envplan: error: ")
    assert captured.err.count("\n") == 1
    for word in words:
        assert word in captured.err
