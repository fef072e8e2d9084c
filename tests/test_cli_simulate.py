from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli_helpers import done, refused, small_profile, told
from envplan.plan import Plan


@pytest.fixture
def folder(folder: Path) -> Path:
    done("solve --quiet --slowdown 2 --replicas 4")
    return folder


def test_json_has_every_operation_and_bubble(folder: Path) -> None:
    document = told("simulate plan.json")
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
    assert "wrote out.json" in done("simulate plan.json --trace out.json --plot")
    assert json.loads((folder / "out.json").read_text())["traceEvents"]
    assert (folder / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_noisy_runs_give_percentiles(folder: Path) -> None:
    document = told("simulate --noise 3 --runs 20 --seed 5")
    times = document["runs"]["iteration_time_s"]
    assert times == sorted(times)
    assert times[0] < times[-1]
    assert document == told("simulate --noise 3 --runs 20 --seed 5")


def test_switch_latency_is_in_milliseconds_and_sync_time_adds_waiting(folder: Path) -> None:
    late = told("simulate --switch-latency 5")["stages"][0]["clock_changes"]
    prompt = told("simulate")["stages"][0]["clock_changes"]
    assert late[1]["frequency_mhz"] in {change["frequency_mhz"] for change in prompt}
    assert late[1]["at_s"] >= 0.005
    document, plan = told("simulate --sync-time 30"), Plan.load(folder / "plan.json")
    assert document["sync_time_s"] == 30
    assert document["energy_j"] == pytest.approx(plan.energy + plan.waiting_energy(30))
    early = told("simulate --sync-time 0.1")
    assert early["notes"] == ["the plan takes longer than --sync-time, so nobody waits"]


def test_stragglers_take_named_and_free_replicas(folder: Path) -> None:
    (cluster,) = told("simulate --straggler 0:1.1 --straggler 1.3 --straggler 3:1")["cluster"]
    assert cluster["iterations"][0]["stragglers"] == 2
    assert cluster["extrinsic_savings_j"] > 0


def test_a_trace_of_slowdowns_is_followed(folder: Path) -> None:
    rows = "iteration,replica,slowdown\n0,0,1\n1,3,1.2\n2,3,1.2\n"
    (folder / "slow.csv").write_text(rows)
    (cluster,) = told("simulate --straggler-trace slow.csv")["cluster"]
    assert [iteration["stragglers"] for iteration in cluster["iterations"]] == [0, 1, 1]


def test_a_cluster_meets_noise_and_slow_clocks(folder: Path) -> None:
    document = told("simulate --straggler 1.2 --noise 3 --runs 4 --switch-latency 5")
    times = [one["sync_time_s"] for one in document["cluster"][0]["iterations"]]
    assert len(set(times)) == 4
    assert all(time > document["iteration_time_s"] for time in times[:1])


def test_strong_scaling_adds_a_row_for_each_shape(folder: Path) -> None:
    clusters = told("simulate --replicas 4 --strong-scaling 8,16")["cluster"]
    assert [cluster["microbatches"] for cluster in clusters] == [4, 2, 1]
    assert [cluster["gpus"] for cluster in clusters] == [8, 16, 32]


def test_a_changed_profile_is_refused_and_another_statement_is_pointed_out(folder: Path) -> None:
    document = json.loads((folder / "plan.json").read_text())
    document["predicted"]["energy_j"] += 1
    (folder / "plan.json").write_text(json.dumps(document))
    assert "envplan check" in told("simulate")["notes"][0]
    small_profile(clocks=(1740, 1500, 1260, 1020, 780, 600)).save_csv(folder / "profile.csv")
    refused("simulate", "has changed since", "--force")
    done("simulate --force")
