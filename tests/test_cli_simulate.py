from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli_helpers import assert_refused, envplan, small_profile
from envplan.cli import app
from envplan.plan import Plan


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    small_profile().save_csv(tmp_path / "profile.csv")
    monkeypatch.chdir(tmp_path)
    assert app._run(["solve", "--quiet", "--slowdown", "2", "--replicas", "4"]) == 0
    return tmp_path


def printed_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert app._run(["simulate", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert app._run(["simulate", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("envplan: error: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_a_plan_is_replayed_as_it_states(folder: Path) -> None:
    ran = envplan("simulate", cwd=folder)
    assert ran.code == 0, ran.err
    for word in ("busy (s)", "usable", "critical path", "blocking", "at the peak", "modelled"):
        assert word in ran.out
    assert "time and energy are exactly what the plan states" in ran.out


def test_json_has_every_operation_and_bubble(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = printed_json(capsys, "plan.json")
    plan = Plan.load(folder / "plan.json")
    assert document["iteration_time_s"] == plan.iteration_time
    assert document["energy_j"] == plan.energy
    for shown, planned in zip(document["stages"], plan.stages, strict=True):
        starts = [operation["start_s"] for operation in shown["operations"]]
        assert starts == [operation.start_s for operation in planned]
        assert shown["bubbles"]
        assert all(b["usable"] == (b["could_stretch_s"] > 0) for b in shown["bubbles"])
    assert "runs" not in document
    assert "cluster" not in document


def test_trace_and_plot_are_written(folder: Path) -> None:
    ran = envplan("simulate", "plan.json", "--trace", "out.json", "--plot", cwd=folder)
    assert ran.code == 0, ran.err
    assert "wrote out.json" in ran.out
    assert json.loads((folder / "out.json").read_text())["traceEvents"]
    assert (folder / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_noisy_runs_give_percentiles(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = printed_json(capsys, "--noise", "3", "--runs", "20", "--seed", "5")
    times = document["runs"]["iteration_time_s"]
    assert times == sorted(times)
    assert times[0] < times[-1]
    assert document == printed_json(capsys, "--noise", "3", "--runs", "20", "--seed", "5")


def test_percentiles_are_shown_as_a_table(folder: Path) -> None:
    ran = envplan("simulate", "--noise", "3", "--runs", "20", "--switch-latency", "5", cwd=folder)
    assert ran.code == 0, ran.err
    assert "20 runs" in ran.out
    assert "first run" in ran.out


def test_switch_latency_is_in_milliseconds(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    late = printed_json(capsys, "--switch-latency", "5")["stages"][0]["clock_changes"]
    prompt = printed_json(capsys)["stages"][0]["clock_changes"]
    assert late[1]["frequency_mhz"] in {change["frequency_mhz"] for change in prompt}
    assert late[1]["at_s"] >= 0.005


def test_sync_time_adds_waiting(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = printed_json(capsys, "--sync-time", "30")
    plan = Plan.load(folder / "plan.json")
    assert document["sync_time_s"] == 30
    assert document["energy_j"] == pytest.approx(plan.energy + plan.waiting_energy(30))
    early = printed_json(capsys, "--sync-time", "0.1")
    assert early["notes"] == ["the plan takes longer than --sync-time, so nobody waits"]


def test_a_cluster_with_a_straggler_saves_both_ways(folder: Path) -> None:
    ran = envplan("simulate", "--replicas", "128", "--straggler", "1.2", cwd=folder)
    assert ran.code == 0, ran.err
    for word in ("intrinsic saved", "extrinsic saved", "with look-up", "T' is"):
        assert word in ran.out


def test_stragglers_take_named_and_free_replicas(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--straggler", "0:1.1", "--straggler", "1.3", "--straggler", "3:0.7"]
    document = printed_json(capsys, *arguments)
    (cluster,) = document["cluster"]
    assert cluster["iterations"][0]["stragglers"] == 2
    assert cluster["extrinsic_savings_j"] > 0
    assert any("replica 3" in note and "no straggler" in note for note in document["notes"])


def test_a_trace_of_slowdowns_is_followed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = "iteration,replica,slowdown\n0,0,1\n1,3,1.2\n2,3,1.2\n"
    (folder / "slow.csv").write_text(rows)
    (cluster,) = printed_json(capsys, "--straggler-trace", "slow.csv")["cluster"]
    assert [iteration["stragglers"] for iteration in cluster["iterations"]] == [0, 1, 1]


def test_strong_scaling_adds_a_row_for_each_shape(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clusters = printed_json(capsys, "--replicas", "4", "--strong-scaling", "8,16")["cluster"]
    assert [cluster["microbatches"] for cluster in clusters] == [4, 2, 1]
    assert [cluster["gpus"] for cluster in clusters] == [8, 16, 32]


def test_a_ladder_in_the_plan_saves_the_trace(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from envplan import verify
    from envplan.solve import trace_frontier

    plan = Plan.load(folder / "plan.json")
    frontier = trace_frontier(plan.job.pipeline(), small_profile(), replicas=4)
    plan.with_ladder(frontier.ladder(8)).save(folder / "plan.json")
    monkeypatch.setattr(verify, "trace_job", None)
    (cluster,) = printed_json(capsys, "--straggler", "1.2")["cluster"]
    assert cluster["extrinsic_savings_j"] > 0


def test_quiet_prints_nothing_and_still_writes(folder: Path) -> None:
    ran = envplan("simulate", "--quiet", "--trace", "out.json", cwd=folder)
    assert (ran.code, ran.out, ran.err) == (0, "", "")
    assert (folder / "out.json").exists()


def test_a_changed_profile_is_refused_unless_forced(folder: Path) -> None:
    small_profile(clocks=(1740, 1500, 1260, 1020, 780, 600)).save_csv(folder / "profile.csv")
    assert_refused(envplan("simulate", cwd=folder), 2, "has changed since", "--force")
    assert envplan("simulate", "--force", cwd=folder).code == 0


def test_a_plan_that_states_something_else_is_pointed_out(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = json.loads((folder / "plan.json").read_text())
    document["predicted"]["energy_j"] += 1
    (folder / "plan.json").write_text(json.dumps(document))
    assert "envplan check" in printed_json(capsys)["notes"][0]


def test_a_missing_plan_is_refused(folder: Path) -> None:
    assert_refused(envplan("simulate", "none.json", cwd=folder), 2, "none.json: cannot be read")


def test_a_file_that_is_no_plan_is_refused(folder: Path) -> None:
    assert_refused(envplan("simulate", "profile.csv", cwd=folder), 2, "profile.csv", "JSON")
