"""`envplan serving`, as a user runs it."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from envplan.serving.builtin import TABLE_WH

from cli_helpers import COMMAND, Ran, assert_refused, envplan
from envplan.cli import app
from fake_nvml import FakeNvml, fake_nvml
from serving_helpers import write_profile
from test_guard import wait_for

__all__ = ["fake_nvml"]

LOAD = "SS=9000,MM=3000"


class Inside:
    """The command run in this process, which is quicker, in a folder of its own."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: object) -> Ran:
        code = app._run([str(argument) for argument in ("serving", *arguments)])
        out, err = self._capsys.readouterr()
        return Ran(code, out, err)


@pytest.fixture
def inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Inside:
    monkeypatch.chdir(tmp_path)
    return Inside(capsys)


@pytest.mark.parametrize("command", ["profile", "solve", "simulate", "compare", "apply", "hold"])
def test_every_command_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app._run(["serving", command, "--help"]) == 0
    assert f"Example:\n    envplan serving {command}" in capsys.readouterr().out


def test_without_a_command_it_says_what_there_is(tmp_path: Path) -> None:
    ran = envplan("serving", cwd=tmp_path)
    assert ran.code == 0
    for word in ("profile", "solve", "simulate", "compare", "apply"):
        assert word in ran.out


def test_the_built_in_profile_prints_the_published_table(tmp_path: Path) -> None:
    ran = envplan("serving", "profile", "--plot", cwd=tmp_path)
    assert ran.code == 0
    assert "modelled" in ran.out
    lines = [line.split() for line in ran.out.splitlines()]
    assert ["SS", "0.25", "0.1", "-", "0.77", "0.97", "1.03"] in [line[:7] for line in lines]
    assert ["LL", "2", "0.1", *["-"] * 9, "12.99", "11.89", "13.21"] in lines
    assert (tmp_path / "serving-profile.png").stat().st_size > 10_000


def test_a_profile_is_copied_out_and_read_again(inside: Inside) -> None:
    assert inside("profile", "-o", "my.csv", "--quiet").out == ""
    ran = inside("profile", "my.csv", "--json")
    document = json.loads(ran.out)
    assert document["source"] == "modelled"
    cells = [wh for by_degree in TABLE_WH.values() for row in by_degree.values() for wh in row]
    assert len(document["configurations"]) == sum(wh is not None for wh in cells)
    assert document["classes"]["LL"]["ttft_slo_s"] == 2
    again = inside("profile", "my.csv", "-o", "my.csv")
    assert_refused(again, 2, "my.csv", "the profile itself")


def test_solve_apply_and_hold_in_a_row(tmp_path: Path) -> None:
    solved = envplan("serving", "solve", "--load", LOAD, "--gpus", 32, "--plot", cwd=tmp_path)
    assert solved.code == 0, solved.err
    assert "optimal" in solved.out
    assert "modelled" in solved.out
    plan = json.loads((tmp_path / "serving-plan.json").read_text())
    assert plan["schema"] == "envplan/serving-plan/v1"
    assert (tmp_path / "serving-plan.png").exists()
    applied = envplan("serving", "apply", cwd=tmp_path)
    assert applied.code == 0, applied.err
    clocks = json.loads((tmp_path / "serving.clocks.json").read_text())
    assert sum(i["tp"] for i in clocks["instances"]) == plan["predicted"]["gpus"]
    held = envplan("serving", "hold", "--backend", "modelled", "--seconds", 0.1, cwd=tmp_path)
    assert held.code == 0, held.err
    assert "GPU 0: 1200 MHz" in held.out
    assert held.out.endswith("clocks given back\n")


def test_apply_warns_where_a_slower_clock_leaves_an_slo_unproven(inside: Inside) -> None:
    assert inside("solve", "--load", "SS=4520,MM=3140", "--no-merge", "-q").code == 0
    lines = inside("apply").out.splitlines()
    assert "2000 MHz becomes 1980 MHz, which NVIDIA H100 80GB HBM3 has" in lines
    (warning,) = [line for line in lines if line.startswith("warning:")]
    assert "at 1980 MHz, slower than planned" in warning
    instances = json.loads(inside("apply", "--json").out)["instances"]
    unproven = [i["instance"] for i in instances if not i["slo_proven"]]
    assert unproven == [i["instance"] for i in instances if i["planned_mhz"] == 2000]
    assert f"SLO of instances {', '.join(map(str, unproven))} (" in warning
    assert f"({len(unproven)} of {len(instances)})" in warning
    # ML at 2000 tokens/s keeps its SLO at 1600 MHz, too.
    inside("solve", "--load", "ML=2000", "-q")
    assert "warning" not in inside("apply").out


def test_holding_ends_well_when_told_to(tmp_path: Path) -> None:
    process = holding(tmp_path, "--backend", "modelled")
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=300)
    assert rest.endswith("clocks given back\n")
    assert process.returncode == 0


def holding(folder: Path, *options: str) -> subprocess.Popen[str]:
    envplan("serving", "solve", "--load", "SS=1000", "-q", cwd=folder)
    envplan("serving", "apply", "-q", cwd=folder)
    process = subprocess.Popen(
        [str(COMMAND), "serving", "hold", *options],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "GPU 0: 1200 MHz\n"
    return process


def test_clocks_that_cannot_be_set_while_holding_are_told(
    fake_nvml: FakeNvml, tmp_path: Path
) -> None:
    fake_nvml.fail("lock", times=3)
    process = holding(tmp_path)
    assert process.stderr is not None
    assert process.stderr.readline().startswith("envplan: warning: GPU 0: ")
    wait_for(lambda: fake_nvml.locked(0) == 1200)
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=300)
    assert rest.endswith("clocks given back\n")
    assert process.returncode == 0
    assert fake_nvml.locked(0) is None

    fake_nvml.fail("lock")
    ran = envplan("serving", "hold", "--seconds", 1, cwd=tmp_path)
    assert ran.code == 2
    assert ran.err.splitlines()[-1].startswith("envplan: error: GPU 0: ")


def test_holding_ends_if_a_guard_does(fake_nvml: FakeNvml, tmp_path: Path) -> None:
    process = holding(tmp_path)
    wait_for(lambda: fake_nvml.locked(0) == 1200)
    for guard in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        os.kill(int(guard), signal.SIGKILL)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 2
    assert err.endswith("envplan: error: a clock guard has ended; start holding again\n")
    assert fake_nvml.locked(0) is None


def test_json_says_the_same_as_the_file(inside: Inside, tmp_path: Path) -> None:
    ran = inside("solve", "--load", LOAD, "--json", "-o", "p.json")
    document = json.loads(ran.out)
    assert document.pop("plan") == "p.json"
    assert document == json.loads((tmp_path / "p.json").read_text())


def test_the_hierarchical_planner_draws_no_less_than_the_exact_one(inside: Inside) -> None:
    power = {}
    for planner in ("exact", "hierarchical"):
        arguments = ("--load", LOAD, "--planner", planner, "--json")
        ran = inside("solve", *arguments)
        power[planner] = json.loads(ran.out)["predicted"]["power_w"]
    assert power["exact"] <= power["hierarchical"]


def test_simulate_writes_what_happens_over_time(inside: Inside, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = [f"{300 * slot},SM,{300 + 40 * (slot % 20)}" for slot in range(60)]
    trace.write_text("\n".join(["timestamp,class,requests", *rows]) + "\n")
    arguments = ("--trace", "trace.csv", "-o", "out.csv", "--plot", "out.svg", "--json")
    ran = inside("simulate", *arguments)
    assert ran.code == 0, ran.err
    document = json.loads(ran.out)
    with (tmp_path / "out.csv").open() as stream:
        lines = list(csv.DictReader(stream))
    assert len(lines) == 60
    energy = sum(300 * float(line["power_w"]) for line in lines)
    assert energy == pytest.approx(document["energy_j"], rel=1e-6)
    assert 0.9 < document["slo_attainment"] <= 1
    assert "<svg" in (tmp_path / "out.svg").read_text()
    over = inside("simulate", "--trace", "trace.csv", "-o", "trace.csv")
    assert_refused(over, 2, "trace.csv", "the trace itself")
    table = inside("simulate", "--trace", "trace.csv")
    assert "energy (kWh)" in table.out


def test_an_hour_is_replayed_request_by_request(inside: Inside, tmp_path: Path) -> None:
    rows = [f"{300 * slot},SM,{900 + 40 * (slot % 5)}" for slot in range(30)]
    (tmp_path / "t.csv").write_text("\n".join(["timestamp,class,requests", *rows]) + "\n")
    ran = inside("simulate", "--trace", "t.csv", "--requests", "1.5")
    assert ran.code == 0, ran.err
    assert "hours 1.5 to 2.5 again, " in ran.out
    assert "one by one" in ran.out
    document = json.loads(inside("simulate", "--trace", "t.csv", "--requests", "0", "--json").out)
    found = document["requests_one_by_one"]
    assert found["requests"] == sum(900 + 40 * (slot % 5) for slot in range(12))
    assert found["attained"] <= found["requests"]
    assert found["energy_j"] == pytest.approx(found["flow_energy_j"], rel=0.05)
    beyond = inside("simulate", "--trace", "t.csv", "--requests", "2.5")
    assert_refused(beyond, 2, "--requests 2.5 lies beyond the trace, which lasts 2.5 hours")
    assert_refused(inside("simulate", "--trace", "t.csv", "--requests", "-1"), 2, "--requests")


def test_compare_puts_all_policies_side_by_side(inside: Inside, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = [f"{300 * s},{name},{200 + s}" for s in range(40) for name in ("SS", "ML")]
    trace.write_text("\n".join(["timestamp,class,requests", *rows]) + "\n")
    ran = inside("compare", "--trace", "trace.csv", "--plot")
    assert ran.code == 0, ran.err
    for policy in ("max_frequency", "static", "frequency_only", "exact", "hierarchical"):
        assert policy in ran.out
    assert "modelled" in ran.out
    assert (tmp_path / "serving-week.png").stat().st_size > 10_000
    document = json.loads(inside("compare", "--trace", "trace.csv", "--json").out)
    saved = {entry["policy"]: entry["savings_percent"] for entry in document["policies"]}
    assert saved["max_frequency"] == 0
    assert saved["static"] > 0


def test_a_policy_that_cannot_run_may_be_left_out(inside: Inside, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = [f"{300 * s},SS,{400 + s}" for s in range(8)]
    trace.write_text("\n".join(["timestamp,class,requests", *rows]) + "\n")
    strict = ("compare", "--trace", "trace.csv", "--gpus", "4")
    assert_refused(inside(*strict), 1, "max_frequency needs 8 GPUs, 4 more", "--policies")
    ran = inside(*strict, "--policies", "static,exact", "--json", "--plot", "page.html")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)["policies"]
    assert [entry["policy"] for entry in found] == ["static", "exact"]
    assert found[0]["savings_percent"] == 0
    assert "against static" in (tmp_path / "page.html").read_text()
    assert_refused(inside(*strict, "--policies", "best"), 2, "no policy 'best'", "frequency_only")
    assert_refused(inside(*strict, "--policies", "exact,exact"), 2, "twice")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--load", "XX=5"], 2, ["no class 'XX'", "SS, SM"]),
        (["--load", "SS"], 2, ["--load must be CLASS=TOKENS/S"]),
        (["--load", "SS=1,SS=2"], 2, ["SS twice"]),
        (["--load", "SS=-1"], 2, ["--load SS"]),
        (["--load", "SS=0"], 2, ["no load"]),
        ([], 2, ["--load"]),
        (["--load", "SS=5", "--gpus", "0"], 2, ["--gpus must be at least 1, not 0"]),
        (["--load", "LL=50000", "--gpus", "16"], 1, ["more than the 16", "class LL"]),
        (
            ["--load", "LL=50000", "--gpus", "16", "--planner", "hierarchical"],
            1,
            ["more than the 16", "class LL"],
        ),
        (["--load", "LL=5", "--slo", "LL=0.01,0.1"], 1, ["LL its first token", "the best takes"]),
        (["--load", "LL=5", "--slo-scale", "0.01"], 1, ["LL"]),
        (["--load", "LL=5", "--slo", "LL=fast"], 2, ["--slo must be CLASS=TTFT,TBT"]),
        (["--load", "LL=5", "--slo", "LL=0,1"], 2, ["above 0"]),
        (["--load", "LL=5", "--slo-scale", "0"], 2, ["--slo-scale"]),
        (["--load", "LL=5", "--planner", "best"], 2, ["exact or hierarchical"]),
        (["--load", "LL=5", "--plot", "a.txt"], 2, ["--plot", ".png"]),
        (["nothing.csv", "--load", "LL=5"], 2, ["nothing.csv", "h100-llama2-70b"]),
        (
            ["--load", "LL=5", "--planner", "hierarchical", "--one-frequency"],
            2,
            ["--one-frequency"],
        ),
    ],
)
def test_what_cannot_be_solved_is_one_line(
    inside: Inside, tmp_path: Path, arguments: list[str], code: int, words: list[str]
) -> None:
    assert_refused(inside("solve", *arguments), code, *words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["XL5,2,1000,0,,100,0.1,0.01"], ["p.csv:2, column class", "no class 'XL5'"]),
        (["SS,2,1000,0,,100,,0.01"], ["p.csv:2, column ttft_s", "no holes"]),
        (
            [
                "SS,2,1000,0,,1,0.1,0.01",
                "SS,2,3000,0,,1,0.1,0.01",
                "SM,2,2000,0,,1,0.1,0.01",
            ],
            ["p.csv:3, column frequency", "hole"],
        ),
    ],
)
def test_a_profile_with_mistakes_is_one_line(
    inside: Inside, tmp_path: Path, lines: list[str], words: list[str]
) -> None:
    write_profile(tmp_path / "p.csv", lines)
    for command in (["profile"], ["solve", "--load", "SS=5"]):
        ran = inside(command[0], "p.csv", *command[1:])
        assert_refused(ran, 2, *words)


def test_a_missing_highest_clock_is_said_with_everything_that_builds_on_it(
    inside: Inside, tmp_path: Path
) -> None:
    lines = [
        f"{name},2,1000,{load},,{100 + load},0.1,0.01" for name in ("SS", "SM") for load in (0, 90)
    ]
    lines += [f"SS,2,2000,{load},,{200 + load},0.1,0.01" for load in (0, 150)]
    write_profile(tmp_path / "p.csv", lines)
    rows = [f"{60 * slot},SM,9" for slot in range(4)]
    (tmp_path / "t.csv").write_text("\n".join(["timestamp,class,requests", *rows]) + "\n")
    for command in (
        ["profile", "p.csv"],
        ["solve", "p.csv", "--load", "SS=5"],
        ["simulate", "p.csv", "--trace", "t.csv"],
        ["compare", "p.csv", "--trace", "t.csv"],
    ):
        ran = inside(*command)
        assert ran.code == 0, ran.err
        (warning,) = [line for line in ran.out.splitlines() if line.startswith("warning:")]
        assert "no rows for SM on TP2 at 2000 MHz, but for fewer GPUs or a lower clock" in warning
    document = json.loads(inside("profile", "p.csv", "--json").out)
    assert document["gaps"] == [{"class": "SM", "tp": 2, "frequency_mhz": 2000}]
    assert "warning" not in inside("profile").out


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["5,SS,1", "4,SS,1"], ["t.csv:3, column timestamp", "sort the trace"]),
        (["0,SS,1", "60,SS,1", "180,SS,1"], ["t.csv:4, column timestamp", "gap"]),
        (["0,QQ,1", "60,SS,1"], ["t.csv:2, column class", "no class 'QQ'"]),
    ],
)
@pytest.mark.parametrize("command", ["simulate", "compare"])
def test_a_trace_with_mistakes_is_one_line(
    inside: Inside, tmp_path: Path, command: str, lines: list[str], words: list[str]
) -> None:
    (tmp_path / "t.csv").write_text("\n".join(["timestamp,class,requests", *lines]) + "\n")
    assert_refused(inside(command, "--trace", "t.csv"), 2, *words)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--gpus", "0"], 2, ["--gpus"]),
        (["--gpus", "16"], 1, ["GPUs", "more than the 16"]),
        (["--policy", "best"], 2, ["no policy 'best'"]),
        (["--trace", "nothing"], 2, ["nothing", "coding-week"]),
        (["--epoch", "0"], 2, ["--epoch"]),
        (["--mispredicted", "101"], 2, ["--mispredicted"]),
        (["--headroom", "-1"], 2, ["--headroom"]),
        (["--seed", "-1"], 2, ["--seed"]),
        (["--slo", "LM=0.001,0.1"], 1, ["LM its first token"]),
    ],
)
def test_what_cannot_be_simulated_is_one_line(
    inside: Inside, arguments: list[str], code: int, words: list[str]
) -> None:
    assert_refused(inside("simulate", *arguments), code, *words)


def test_apply_and_hold_refuse_what_they_cannot_use(inside: Inside, tmp_path: Path) -> None:
    inside("profile", "-o", "my.csv", "-q")
    inside("solve", "my.csv", "--load", "LL=9000", "-q")
    assert_refused(inside("apply", "no.json"), 2, "no.json")
    assert_refused(inside("apply", "my.csv"), 2, "my.csv")
    few = inside("apply", "--gpus-per-node", 4)
    assert_refused(few, 2, "8 GPUs does not fit into a node with 4")
    slow = inside("apply", "--clocks", "600,900")
    assert_refused(slow, 2, "reaches 900")
    over = inside("apply", "-o", "serving-plan.json")
    assert_refused(over, 2, "the plan itself")
    (tmp_path / "my.csv").write_text((tmp_path / "my.csv").read_text().replace(",480,", ",481,"))
    assert_refused(inside("apply"), 2, "another profile", "--force")
    (tmp_path / "my.csv").unlink()
    assert_refused(inside("apply"), 2, "--profile")
    assert not (tmp_path / "serving.clocks.json").exists()
    assert_refused(inside("hold"), 2, "serving.clocks.json")


def test_check_knows_the_files_of_serving(tmp_path: Path) -> None:
    for arguments in (
        ("profile", "-o", "my.csv"),
        ("solve", "--load", "SS=4000", "--gpus", "16"),
        ("apply", "serving-plan.json"),
    ):
        assert envplan("serving", *arguments, cwd=tmp_path).code == 0
    for name, kind in (
        ("my.csv", "serving profile"),
        ("serving-plan.json", "serving plan"),
        ("serving.clocks.json", "serving clocks"),
    ):
        ran = envplan("check", name, cwd=tmp_path)
        assert ran.code == 0, ran.err
        assert f"{name}: {kind}, holds" in ran.out
    plan = tmp_path / "serving-plan.json"
    plan.write_text(plan.read_text().replace('"power_w": ', '"power_w": 1', 1))
    assert_refused(envplan("check", plan, cwd=tmp_path), 2, "the pools draw", "as stated")
