from __future__ import annotations

import ast
import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli_helpers import assert_refused, envplan, small_profile
from envplan.cli import app
from envplan.enforce.freqplan import FrequencyPlan
from envplan.profile import Profile
from fake_nvml import FakeNvml

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    small_profile().save_csv(tmp_path / "profile.csv")
    monkeypatch.chdir(tmp_path)
    solved = ["solve", "-q", "--gpus-per-stage", "2", "--replicas", "2", "--ladder", "3"]
    assert app._run(solved) == 0
    return tmp_path


def refused(arguments: list[str], capsys: Capture, *words: str) -> None:
    before = sorted(path.name for path in Path().iterdir())
    code = app._run(["apply", *arguments])
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    for word in ("envplan: error: ", *words):
        assert word in captured.err
    assert sorted(path.name for path in Path().iterdir()) == before


def edited(path: Path, change: Callable[[Any], None]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def test_plan_becomes_a_frequency_plan_with_nothing_added(folder: Path) -> None:
    ran = envplan("apply", "plan.json", cwd=folder)
    assert ran.code == 0, ran.err
    assert ran.err == ""
    for word in ("8 ranks", "tp-cp-ep-dp-pp", "wrote run.freqplan.json", "slower plans"):
        assert word in ran.out
    freqplan = FrequencyPlan.load(folder / "run.freqplan.json")
    assert freqplan.world_size == 8
    assert [rank.stage for rank in freqplan.ranks] == [0] * 4 + [1] * 4
    plan = json.loads((folder / "plan.json").read_text())
    for rank in freqplan.ranks:
        operations = [
            (op["instruction"], op["microbatch"], op["chunk"], op["frequency_mhz"])
            for op in plan["stages"][rank.stage]
        ]
        assert rank.operations == operations


def test_topology_and_devices_follow_the_options(folder: Path, capsys: Capture) -> None:
    layout = ["--tp", "1", "--cp", "2", "--dp", "2", "--rank-order", "cp-pp-dp"]
    assert app._run(["apply", "-q", *layout, "--gpus-per-node", "4"]) == 0
    freqplan = FrequencyPlan.load("run.freqplan.json")
    assert [rank.stage for rank in freqplan.ranks] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [rank.device for rank in freqplan.ranks] == [0, 1, 2, 3] * 2
    assert (freqplan.layout.cp, freqplan.layout.rank_order) == (2, "cp-pp-dp")
    assert app._run(["apply", "-q", "--devices", "7, 5"]) == 0
    assert [r.device for r in FrequencyPlan.load("run.freqplan.json").ranks] == [7, 5] * 4
    assert capsys.readouterr().out == ""


def test_zeus_format_is_a_list_for_every_stage(folder: Path, capsys: Capture) -> None:
    assert app._run(["apply", "--format", "zeus"]) == 0
    out = capsys.readouterr().out
    assert "wrote run.freqplan.py" in out
    assert "PointSolution3D" in out
    assert "ladder is left out" in out
    plan = json.loads(Path("plan.json").read_text())
    expected = [
        [(op["instruction"], op["frequency_mhz"]) for op in stage] for stage in plan["stages"]
    ]
    assert ast.literal_eval(Path("run.freqplan.py").read_text()) == expected
    assert app._run(["apply", "--format", "zeus", "-o", "schedule.txt"]) == 0
    assert "only files that end in .py" in capsys.readouterr().out


def test_csv_format_has_every_rank(folder: Path) -> None:
    assert app._run(["apply", "-q", "--format", "csv"]) == 0
    with Path("run.freqplan.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8 * 8
    assert {row["rank"] for row in rows} == {str(rank) for rank in range(8)}


def test_dry_run_prints_every_stage_and_writes_nothing(folder: Path, capsys: Capture) -> None:
    assert app._run(["apply", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "stage 0: forward" in out
    assert "stage 1: forward" in out
    assert "wrote" not in out
    assert not Path("run.freqplan.json").exists()
    assert app._run(["apply", "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["frequency_plan"] is None
    assert not Path("run.freqplan.json").exists()


def test_json_sums_up_what_was_done(folder: Path, capsys: Capture) -> None:
    assert app._run(["apply", "--json", "--clocks", "800-2000:100", "--min-dwell", "200"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["frequency_plan"] == "run.freqplan.json"
    assert summary["world_size"] == 8
    assert summary["clocks_source"] == "given"
    assert summary["dwell"]["min_dwell_s"] == 0.2
    assert summary["dwell"]["changes_too_fast"] == 0
    assert summary["iteration_time_s"] <= summary["deadline_s"]
    assert all(raised["applied_mhz"] > raised["planned_mhz"] for raised in summary["raised"])
    assert "ranks" not in summary


def test_raised_clocks_and_the_cost_of_dwell_are_said(folder: Path, capsys: Capture) -> None:
    assert app._run(["apply", "--clocks", "800-2000:100", "--min-dwell", "200"]) == 0
    out = capsys.readouterr().out
    assert "1740 MHz is not supported; 1800 MHz instead" in out
    assert "count with time and energy as planned" in out
    assert "--min-dwell 200: " in out
    assert "J per iteration" in out


def test_unknown_gpu_is_said_and_can_be_named(folder: Path, capsys: Capture) -> None:
    assert app._run(["apply"]) == 0
    assert "not known" in capsys.readouterr().out
    assert app._run(["apply", "--gpu", "a40"]) == 0
    assert "clocks from 210 to 1740 MHz of NVIDIA A40" in capsys.readouterr().out
    assert FrequencyPlan.load("run.freqplan.json").gpu == "NVIDIA A40"


def test_ladder_can_be_left_out_but_not_invented(folder: Path, capsys: Capture) -> None:
    assert app._run(["apply", "-q", "--no-ladder"]) == 0
    assert FrequencyPlan.load("run.freqplan.json").ladder is None
    assert app._run(["apply", "-q", "--ladder"]) == 0
    assert FrequencyPlan.load("run.freqplan.json").ladder
    edited(Path("plan.json"), lambda d: d.pop("ladder"))
    refused(["--ladder"], capsys, "plan.json", "no ladder", "--ladder N")
    refused(["--ladder", "--format", "csv"], capsys, "csv has no place for a ladder")


def test_same_input_writes_the_same_bytes(folder: Path) -> None:
    for name in ("a.json", "b.json"):
        assert app._run(["apply", "-q", "--min-dwell", "150", "-o", name]) == 0
    assert Path("a.json").read_bytes() == Path("b.json").read_bytes()


def test_sha256_is_that_of_the_plan_file(folder: Path) -> None:
    import hashlib

    assert app._run(["apply", "-q"]) == 0
    digest = hashlib.sha256(Path("plan.json").read_bytes()).hexdigest()
    assert FrequencyPlan.load("run.freqplan.json").plan_sha256 == digest


def test_a_plan_for_one_replica_is_applied_to_as_many_as_there_are(folder: Path) -> None:
    assert app._run(["solve", "-q", "--ladder", "3"]) == 0
    assert app._run(["apply", "-q", "-o", "one.json"]) == 0
    ran = envplan("apply", "--dp", "3", "--json", cwd=folder)
    assert ran.code == 0, ran.err
    one, three = FrequencyPlan.load("one.json"), FrequencyPlan.load("run.freqplan.json")
    assert [rank.stage for rank in three.ranks] == [0, 0, 0, 1, 1, 1]
    assert three.stage_operations() == one.stage_operations()
    assert three.iteration_time_s == one.iteration_time_s
    assert three.energy_j == pytest.approx(3 * one.energy_j, rel=1e-12)
    assert [rung.energy_j for rung in three.ladder or []] == pytest.approx(
        [3 * rung.energy_j for rung in one.ladder or []], rel=1e-12
    )
    assert app._run(["apply", "-q", "--tp", "2", "--cp", "2", "--dp", "3"]) == 0
    many = FrequencyPlan.load("run.freqplan.json")
    assert [many.layout.stage_of(rank) for rank in range(24)].count(1) == 12
    assert many.energy_j == pytest.approx(12 * one.energy_j, rel=1e-12)
    # The plan's own energy is shown for as many GPUs: nothing has changed.
    rows = envplan("apply", "--dp", "3", cwd=folder).out.splitlines()
    (energy,) = (row for row in rows if row.startswith("energy (J)"))
    assert energy.split()[-1] == "0.00"


@pytest.mark.parametrize(
    "target", [("--energy-budget", "1e6"), ("--power-cap", "1e6"), ("--peak-power-cap", "1e6")]
)
def test_joules_and_watts_of_one_replica_are_not_those_of_several(
    folder: Path, target: tuple[str, str], capsys: Capture
) -> None:
    assert app._run(["solve", "-q", *target]) == 0
    for topology in (["--dp", "3"], ["--tp", "3"]):
        refused(topology, capsys, "J or W", "3 GPUs", "--tp", "--dp")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(schema="envplan/plan/v0"), ["envplan/plan/v1", "v0"]),
        (lambda d: d.update(schema="envplan/freqplan/v1"), ["is not a plan"]),
        (lambda d: d["stages"].pop(), ["stages has 1 entries"]),
        (lambda d: d["stages"][0].pop(), ["stages[0] ends after 7"]),
        (lambda d: d["stages"][0].reverse(), ["stages[0][0]"]),
        (lambda d: d["stages"][0][0].update(frequency_mhz=1741), ["1741 MHz"]),
        (lambda d: d["ladder"][0]["frequencies_mhz"].pop(), ["ladder[0]"]),
        (lambda d: d["ladder"][0]["frequencies_mhz"][0].__setitem__(0, 9), ["ladder[0]", "9 MHz"]),
        (lambda d: d["job"].update(gpus_per_stage=0), ["gpus_per_stage"]),
        (lambda d: d["target"].update(deadline_s=0.1), ["deadline of 0.1 s"]),
        (lambda d: d["job"]["blocking_power_w"].pop(), ["blocking_power_w"]),
        (lambda d: d["job"].update(replicas=10**6, gpus_per_stage=10**6), ["holds at most"]),
    ],
)
def test_plan_that_does_not_hold_is_refused(
    folder: Path, change: Callable[[Any], None], words: list[str], capsys: Capture
) -> None:
    edited(Path("plan.json"), change)
    refused([], capsys, *words)


def test_truncated_plan_is_refused_with_line_and_column(folder: Path) -> None:
    text = Path("plan.json").read_text()
    Path("plan.json").write_text(text[: len(text) // 2])
    assert_refused(envplan("apply", cwd=folder), 2, "plan.json:", "column", "cut short")


def test_changed_profile_is_refused_and_force_goes_on(folder: Path, capsys: Capture) -> None:
    Path("profile.csv").write_text(Path("profile.csv").read_text() + "\n")
    refused([], capsys, "has changed", "--force")
    assert app._run(["apply", "--force"]) == 0
    assert "HAS CHANGED" in capsys.readouterr().out
    assert Path("run.freqplan.json").exists()


def test_moved_profile_can_be_named(folder: Path, capsys: Capture) -> None:
    Path("profile.csv").rename("moved.csv")
    refused([], capsys, "profile.csv is not found", "--profile")
    assert app._run(["apply", "-q", "--profile", "moved.csv"]) == 0


def test_plan_without_any_clock_sets_none(tmp_path: Path, capsys: Capture) -> None:
    rows = [(0, name, 0, 0.1, 5.0) for name in ("forward", "backward")]
    Profile.from_rows(rows).save_csv(tmp_path / "fixed.csv")
    plan, output = tmp_path / "p.json", tmp_path / "f.json"
    assert app._run(["solve", str(tmp_path / "fixed.csv"), "-m", "2", "-q", "-o", str(plan)]) == 0
    assert app._run(["apply", str(plan), "-o", str(output), "--min-dwell", "5"]) == 0
    assert "has a clock to set" in capsys.readouterr().out
    assert FrequencyPlan.load(output).ranks[0].frequencies == [0] * 4
    assert app._run(["apply", str(plan), "--format", "zeus", "-o", str(output)]) == 2
    assert "no operation with a clock" in capsys.readouterr().err


def named(gpu: str) -> None:
    Path("profile.meta.json").write_text(json.dumps({"gpu": gpu}))


def test_clocks_are_asked_of_the_gpus_here_and_none_is_set(
    folder: Path, fake_nvml: FakeNvml, capsys: Capture
) -> None:
    assert app._run(["apply", "--backend", "nvml"]) == 0
    out = capsys.readouterr().out
    assert (
        "checked against the 103 clocks from 210 to 1740 MHz that NVIDIA A40 supports here" in out
    )
    freqplan = FrequencyPlan.load("run.freqplan.json")
    assert (freqplan.gpu, freqplan.clocks_source) == ("NVIDIA A40", "nvml")
    freqplan.check_gpu("NVIDIA A40", freqplan.supported_clocks_mhz)
    assert all(fake_nvml.clock_changes(index) == [] for index in range(4))


def test_only_clocks_that_all_gpus_here_have_are_used(folder: Path, fake_nvml: FakeNvml) -> None:
    fake_nvml.gpu(2).num_clocks = 40
    assert app._run(["apply", "-q", "--backend", "nvml"]) == 0
    freqplan = FrequencyPlan.load("run.freqplan.json")
    assert len(freqplan.supported_clocks_mhz) == 40


def test_gpu_of_another_model_is_refused_unless_forced(
    folder: Path, fake_nvml: FakeNvml, capsys: Capture
) -> None:
    named("NVIDIA A100-SXM4-40GB")
    refused(["--backend", "nvml"], capsys, "of NVIDIA A100-SXM4-40GB", "has NVIDIA A40", "--force")
    assert app._run(["apply", "-q", "--backend", "nvml", "--force"]) == 0
    assert FrequencyPlan.load("run.freqplan.json").gpu == "NVIDIA A40"


def test_machine_with_different_or_no_gpus_is_refused(
    folder: Path, fake_nvml: FakeNvml, capsys: Capture
) -> None:
    fake_nvml.gpu(1).name = b"Tesla V100"
    refused(["--backend", "nvml"], capsys, "different GPUs", "Tesla V100", "--gpu")
    fake_nvml.state.num_gpus = 0
    refused(["--backend", "nvml"], capsys, "GPU")
