from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli_helpers import done, envplan, refused
from envplan.enforce.freqplan import FrequencyPlan
from envplan.profile import Profile
from fake_nvml import FakeNvml

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def folder(folder: Path) -> Path:
    done("solve -q --gpus-per-stage 2 --replicas 2 --ladder 3")
    return folder


def edited(path: Path, change: Callable[[Any], None]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def test_plan_becomes_a_frequency_plan_with_nothing_added(folder: Path) -> None:
    ran = envplan("apply", "plan.json")
    assert (ran.code, ran.err) == (0, "")
    freqplan = FrequencyPlan.load(folder / "run.freqplan.json")
    assert freqplan.world_size == 8
    assert freqplan.plan_sha256 == hashlib.sha256((folder / "plan.json").read_bytes()).hexdigest()
    assert [rank.stage for rank in freqplan.ranks] == [0] * 4 + [1] * 4
    plan = json.loads((folder / "plan.json").read_text())
    for rank in freqplan.ranks:
        operations = [
            (op["instruction"], op["microbatch"], op["chunk"], op["frequency_mhz"])
            for op in plan["stages"][rank.stage]
        ]
        assert rank.operations == operations


def test_topology_and_devices_follow_the_options(folder: Path) -> None:
    done("apply -q --tp 1 --cp 2 --dp 2 --rank-order cp-pp-dp --gpus-per-node 4")
    freqplan = FrequencyPlan.load("run.freqplan.json")
    assert [rank.stage for rank in freqplan.ranks] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [rank.device for rank in freqplan.ranks] == [0, 1, 2, 3] * 2
    assert (freqplan.layout.cp, freqplan.layout.rank_order) == (2, "cp-pp-dp")
    assert done("apply -q --devices '7, 5'") == ""
    assert [r.device for r in FrequencyPlan.load("run.freqplan.json").ranks] == [7, 5] * 4


def test_zeus_format_is_a_list_for_every_stage(folder: Path) -> None:
    done("apply --format zeus")
    plan = json.loads(Path("plan.json").read_text())
    expected = [
        [(op["instruction"], op["frequency_mhz"]) for op in stage] for stage in plan["stages"]
    ]
    assert ast.literal_eval(Path("run.freqplan.py").read_text()) == expected
    assert "only files that end in .py" in done("apply --format zeus -o schedule.txt")


def test_plan_for_asking_ahead_is_not_handed_to_zeus_in_silence(folder: Path) -> None:
    done("solve -q --slowdown 5 --switch-latency 20")
    ran = envplan("apply", "plan.json", "--format", "zeus")
    assert ran.code == 0
    warning = " ".join(ran.err.split())
    assert "Zeus asks for a clock as its operation starts" in warning
    assert envplan("apply", "plan.json").err == ""  # the shim asks ahead
    done("solve -q --slowdown 5 --switch-latency 20 --ask start")
    assert envplan("apply", "plan.json", "--format", "zeus").err == ""


def test_frequency_plan_has_the_times_that_clocks_are_asked_ahead_by(folder: Path) -> None:
    done("solve -q --slowdown 5 --switch-latency 20 --ladder 3")
    done("apply -q")
    plan = FrequencyPlan.load("run.freqplan.json")
    assert plan.switching is not None
    assert plan.switching.times is not None
    assert (plan.switching.ask, plan.switching.latency_s) == ("ahead", 0.02)
    assert len(plan.switching.times) == 1 + len(plan.ladder or [])
    lasts_s = [sum(stage.waits_s) + sum(stage.durations_s) for stage in plan.switching.times[0]]
    assert max(lasts_s) == pytest.approx(plan.iteration_time_s)
    document = json.loads(Path("run.freqplan.json").read_text())
    document["switching"]["times"][0][0]["waits_s"].pop()
    Path("run.freqplan.json").write_text(json.dumps(document))
    ran = envplan("check", "run.freqplan.json")
    assert ran.code != 0
    assert "does not have one wait and one duration for every operation" in ran.err
    done("solve -q --slowdown 5 --switch-latency 20 --ask start")
    done("apply -q")
    switching = FrequencyPlan.load("run.freqplan.json").switching
    assert switching is not None
    assert (switching.ask, switching.times) == ("start", None)
    done("solve -q --slowdown 5")
    done("apply -q")
    assert FrequencyPlan.load("run.freqplan.json").switching is None


def test_each_clock_is_asked_for_by_its_own_measured_latency(folder: Path) -> None:
    measured = {
        "780": {"median_s": 0.01, "p95_s": 0.012},
        "1740": {"median_s": 0.02, "p95_s": 0.03},
    }
    sidecar = Path("profile.meta.json")
    document = json.loads(sidecar.read_text()) if sidecar.exists() else {}
    document["switch_latency"] = {"source": "measured", "by_mhz": measured}
    sidecar.write_text(json.dumps(document))
    done("solve -q --slowdown 5 --switch-latency 20")
    done("apply -q")
    switching = FrequencyPlan.load("run.freqplan.json").switching
    assert switching is not None
    assert switching.source == "measured"
    assert [switching.latency_to(mhz) for mhz in (780, 1260, 1740)] == [0.012, 0.02, 0.03]
    done("solve -q --slowdown 5 --switch-latency 30")
    done("apply -q")
    switching = FrequencyPlan.load("run.freqplan.json").switching
    assert switching is not None
    assert (switching.source, switching.latency_to(780)) == ("given", 0.03)


def test_min_dwell_applies_the_plan_of_solves_own_min_dwell(folder: Path) -> None:
    done("solve -q --slowdown 10 --ladder 3")
    done("apply -q --min-dwell 150 -o again.json")
    done("solve -q --slowdown 10 --ladder 3 --min-dwell 150")
    done("apply -q")
    again, asked = (FrequencyPlan.load(name) for name in ("again.json", "run.freqplan.json"))
    assert (again.ranks, again.ladder) == (asked.ranks, asked.ladder)
    assert again.plan_sha256 != asked.plan_sha256


def test_a_plan_whose_clocks_last_longer_is_applied_as_it_is(folder: Path) -> None:
    done("solve -q --slowdown 10 --min-dwell 150")
    done("apply -q")
    asked = FrequencyPlan.load("run.freqplan.json")
    assert "each clock of the plan lasts 150 ms already" in done("apply --min-dwell 20")
    assert FrequencyPlan.load("run.freqplan.json") == asked
    done("apply --min-dwell 600")
    assert FrequencyPlan.load("run.freqplan.json") != asked


def test_min_dwell_keeps_to_the_time_of_clocks_that_somebody_else_chose(folder: Path) -> None:
    done("solve -q --slowdown 10")
    done("apply -q --format csv -o all.csv")
    done("solve -q --clocks all.csv -o given.json")
    done("apply -q given.json --min-dwell 150")
    again = FrequencyPlan.load("run.freqplan.json")
    asked = json.loads(Path("given.json").read_text())["target"]["deadline_s"]
    assert again.iteration_time_s <= again.deadline_s == asked
    done("apply -q given.json --min-dwell 0")
    plain = FrequencyPlan.load("run.freqplan.json").energy_j
    assert again.energy_j == pytest.approx(plain, rel=0.02)


def test_ladder_can_be_left_out_but_not_invented(folder: Path) -> None:
    done("apply -q --no-ladder")
    assert FrequencyPlan.load("run.freqplan.json").ladder is None
    done("apply -q --ladder")
    assert FrequencyPlan.load("run.freqplan.json").ladder
    edited(Path("plan.json"), lambda d: d.pop("ladder"))
    refused("apply --ladder", "plan.json", "no ladder", "--ladder N")
    refused("apply --ladder --format csv", "csv has no place for a ladder")


def test_a_plan_for_one_replica_is_applied_to_as_many_as_there_are(folder: Path) -> None:
    done("solve -q --ladder 3")
    done("apply -q -o one.json")
    rows = done("apply --dp 3").splitlines()
    one, three = FrequencyPlan.load("one.json"), FrequencyPlan.load("run.freqplan.json")
    assert [rank.stage for rank in three.ranks] == [0, 0, 0, 1, 1, 1]
    assert three.stage_operations() == one.stage_operations()
    assert three.iteration_time_s == one.iteration_time_s
    assert three.energy_j == pytest.approx(3 * one.energy_j, rel=1e-12)
    assert [rung.energy_j for rung in three.ladder or []] == pytest.approx(
        [3 * rung.energy_j for rung in one.ladder or []], rel=1e-12
    )
    done("apply -q --tp 2 --cp 2 --dp 3")
    many = FrequencyPlan.load("run.freqplan.json")
    assert [many.layout.stage_of(rank) for rank in range(24)].count(1) == 12
    assert many.energy_j == pytest.approx(12 * one.energy_j, rel=1e-12)
    # The plan's own energy is shown for as many GPUs: nothing has changed.
    (energy,) = (row for row in rows if row.startswith("energy (J)"))
    assert energy.split()[-1] == "0.00"


def test_changed_profile_is_refused_and_force_goes_on(folder: Path) -> None:
    Path("profile.csv").write_text(Path("profile.csv").read_text() + "\n")
    refused("apply", "has changed", "--force")
    assert "HAS CHANGED" in done("apply --force")
    assert Path("run.freqplan.json").exists()


def test_moved_profile_can_be_named(folder: Path) -> None:
    Path("profile.csv").rename("moved.csv")
    refused("apply", "profile.csv is not found", "--profile")
    done("apply -q --profile moved.csv")


def test_plan_without_any_clock_sets_none(folder: Path) -> None:
    rows = [(0, name, 0, 0.1, 5.0) for name in ("forward", "backward")]
    Profile.from_rows(rows).save_csv("fixed.csv")
    done("solve fixed.csv -m 2 -q -o p.json")
    assert "has a clock to set" in done("apply p.json -o f.json --min-dwell 5")
    assert FrequencyPlan.load("f.json").ranks[0].frequencies == [0] * 4
    refused("apply p.json --format zeus -o f.json", "no operation with a clock")


def named(gpu: str) -> None:
    Path("profile.meta.json").write_text(json.dumps({"gpu": gpu}))


def test_clocks_are_asked_of_the_gpus_here_and_none_is_set(
    folder: Path, fake_nvml: FakeNvml
) -> None:
    assert (
        "checked against the 103 clocks from 210 to 1740 MHz that NVIDIA A40 supports here"
        in done("apply --backend nvml")
    )
    freqplan = FrequencyPlan.load("run.freqplan.json")
    assert (freqplan.gpu, freqplan.clocks_source) == ("NVIDIA A40", "nvml")
    freqplan.check_gpu("NVIDIA A40", freqplan.supported_clocks_mhz, 0)
    assert all(fake_nvml.clock_changes(index) == [] for index in range(4))


def test_gpu_of_another_model_is_refused_unless_forced(folder: Path, fake_nvml: FakeNvml) -> None:
    named("NVIDIA A100-SXM4-40GB")
    refused("apply --backend nvml", "of NVIDIA A100-SXM4-40GB", "has NVIDIA A40", "--force")
    done("apply -q --backend nvml --force")
    assert FrequencyPlan.load("run.freqplan.json").gpu == "NVIDIA A40"


def test_machine_with_different_or_no_gpus_is_refused(folder: Path, fake_nvml: FakeNvml) -> None:
    fake_nvml.gpu(1).name = b"Tesla V100"
    refused("apply --backend nvml", "different GPUs", "Tesla V100", "--gpu")
    fake_nvml.state.num_gpus = 0
    refused("apply --backend nvml", "GPU")


def test_only_clocks_that_all_gpus_here_have_are_used(folder: Path, fake_nvml: FakeNvml) -> None:
    fake_nvml.gpu(2).num_clocks = 40
    done("apply -q --backend nvml")
    assert len(FrequencyPlan.load("run.freqplan.json").supported_clocks_mhz) == 40


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(schema="envplan/freqplan/v1"), ["is not a plan"]),
        (lambda d: d["stages"].pop(), ["stages is a list of 1 values"]),
        (lambda d: d["stages"][0].reverse(), ["stages[0][0]"]),
        (lambda d: d["ladder"][0]["frequencies_mhz"].pop(), ["ladder[0]"]),
        (lambda d: d["ladder"][0]["frequencies_mhz"][0].__setitem__(0, 9), ["ladder[0]", "9 MHz"]),
        (lambda d: d["target"].update(deadline_s=0.1), ["deadline of 0.1 s"]),
    ],
)
def test_plan_that_does_not_hold_is_refused(
    folder: Path, change: Callable[[Any], None], words: list[str]
) -> None:
    edited(Path("plan.json"), change)
    refused("apply", *words)
