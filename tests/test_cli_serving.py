"""`envplan serving`, as a user runs it."""

from __future__ import annotations

import csv
import gzip
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cli_helpers import COMMAND, Ran, assert_refused, done, envplan, says, told
from envplan.check.files import check_file
from envplan.errors import InputError
from envplan.serving.profile import ServingProfile
from fake_nvml import FakeNvml, fake_nvml
from serving_helpers import rows_for_roles, write_profile
from test_guard import wait_for

__all__ = ["fake_nvml"]

LOAD = "SS=9000,MM=3000"
HELD = 795  # MHz, of the plan that is held


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def inside(*arguments: object) -> Ran:
    return envplan("serving", *arguments)


def answered(*arguments: object) -> Any:
    """The document of a command."""
    return told("serving", *arguments)


def test_a_trace_with_classes_of_ones_own_is_proved(tmp_path: Path) -> None:
    rows = ["0,chat", "1,rest", "2,chat"]
    (tmp_path / "own.csv").write_text("\n".join(["timestamp,class", *rows]) + "\n")
    assert (
        "3 requests over 60 s, in order of time, of chat (2) and rest (1)"
        in envplan("check", "own.csv").out
    )
    (tmp_path / "odd.csv").write_text("timestamp,class\n0,chat\n1,a=b\n")
    assert_refused(envplan("check", "odd.csv"), 2, "odd.csv:3, column class", "a=b")
    (tmp_path / "back.csv").write_text("timestamp,class\n1,chat\n0,chat\n")
    assert_refused(envplan("check", "back.csv"), 2, "back.csv:3")
    many = [f"{number},c{number}" for number in range(65)]
    (tmp_path / "many.csv").write_text("\n".join(["timestamp,class", *many]) + "\n")
    assert_refused(envplan("check", "many.csv"), 2, "many.csv", "65 classes", "64")


@pytest.mark.parametrize("suffix", ["toml", "json"])
def test_a_file_of_classes_is_known_as_such(tmp_path: Path, suffix: str) -> None:
    classes = [{"name": "all", "input_tokens": 500, "output_tokens": 50, "ttft_slo_s": 1}]
    text = json.dumps({"classes": classes})
    if suffix == "toml":
        text = "[[classes]]\n" + "\n".join(f"{k} = {json.dumps(v)}" for k, v in classes[0].items())
    file = f"mine.{suffix}"
    (tmp_path / file).write_text(text)
    assert "1 request class, all, and each request is of one" in envplan("check", file).out
    assert_refused(
        envplan("solve", file),
        2,
        f"{file}: is a list of request classes; solve takes a profile",
        f"did you mean envplan serving solve --classes {file}?",
    )
    (tmp_path / file).write_text(text.replace("ttft_slo_s", "ttft_s"))
    assert_refused(envplan("check", file), 2, file, "ttft_s")


def test_every_command_is_named() -> None:
    named = inside().out
    for command in ("profile", "solve", "simulate", "compare", "apply", "reshard", "hold"):
        assert f"  {command} " in named


def test_a_profile_is_printed_drawn_copied_out_and_read_again(tmp_path: Path) -> None:
    out = done("serving profile --plot -o my.csv")
    profile = ServingProfile.builtin()
    energy = profile.energy_per_request(profile.curves["LL", 8, 1980], 2000) / 3600
    (row,) = [line.split() for line in out.splitlines() if line.startswith("LL ")]
    assert row[-1] == f"{energy:.2f}"
    assert (tmp_path / "serving-profile.png").stat().st_size > 10_000
    document = answered("profile", "my.csv", "--load", "1000", "--plot", "p.svg")
    assert "1000 tokens/s per instance" in (tmp_path / "p.svg").read_text()
    assert document["source"] == "identified"
    assert len(document["configurations"]) == len(profile.curves)
    assert document["classes"]["LL"]["ttft_slo_s"] == 2
    assert check_file(Path("my.csv")).kind == "serving profile"
    assert_refused(inside("profile", "my.csv", "-o", "my.csv"), 2, "my.csv", " itself")


def rows_without_tokens_in_time_at_2000_mhz(shortest_prompt: int) -> list[str]:
    rows = []
    for mhz, step_s in ((1000, 0.02), (2000, 10.0)):
        rows += [f"1,{mhz},idle,0,0,50"]
        for tokens in (shortest_prompt, 1000):
            rows.append(f"1,{mhz},prefill,{tokens},{tokens / 1e4},300")
        rows += [f"1,{mhz},decode,1,{step_s},200", f"1,{mhz},decode,64,{step_s},300"]
    return rows


def test_a_class_that_every_replay_refuses_is_one_line(tmp_path: Path) -> None:
    # A prompt takes 0.09 s, however short: more than there is time for between two tokens.
    write_profile(tmp_path / "odd.csv", rows_without_tokens_in_time_at_2000_mhz(900))
    refused = inside("solve", "odd.csv", "--load", "SS=100", "--gpus", 4)
    assert_refused(refused, 1, "no configuration carries any load of SS within its SLO")


def test_a_lone_fleet_at_a_lower_clock_is_not_called_that_at_the_highest(tmp_path: Path) -> None:
    write_profile(tmp_path / "odd.csv", rows_without_tokens_in_time_at_2000_mhz(10))
    out = inside("solve", "odd.csv", "--load", "SS=100", "--gpus", 4).out
    assert "the best fleet on up to 4 GPUs at one lower clock, 1000 MHz: 1 GPU" in out
    assert "at the highest clock" not in out


def test_solve_apply_and_hold_in_a_row(tmp_path: Path) -> None:
    solve = ("solve", "--load", LOAD, "--gpus", 32, "--time-limit", 0.5)
    solved = inside(*solve, "--plot")
    assert "certified gap" in solved.out or "with no proof" in solved.out  # on a busy machine
    assert (tmp_path / "serving-plan.png").exists()
    document = answered(*solve)
    assert document.pop("plan") == "serving-plan.json"
    assert document.pop("next") == "envplan serving apply serving-plan.json"
    split = document.pop("savings_split")
    plan = json.loads((tmp_path / "serving-plan.json").read_text())
    assert document == plan
    lower, highest = sorted(
        plan["predicted"]["one_clock"], key=lambda fleet: fleet["frequency_mhz"]
    )
    largest_w = plan["predicted"]["baseline"]["power_w"]
    assert sum(split.values()) == pytest.approx(plan["predicted"]["savings_percent"])
    by_tp_w = largest_w - highest["power_w"]
    assert split["parallelism_percent"] == pytest.approx(100 * by_tp_w / largest_w)
    by_clock_w = max(0.0, highest["power_w"] - lower["power_w"])
    assert split["clocks_percent"] == pytest.approx(100 * by_clock_w / largest_w)
    assert "\nof these, by TP " in solved.out
    assert plan["schema"] == "envplan/serving-plan/v1"
    assert inside("apply").code == 0
    clocks = json.loads((tmp_path / "serving.clocks.json").read_text())
    assert sum(i["tp"] for i in clocks["instances"]) == plan["predicted"]["gpus"]
    held = envplan("serving", "hold", "--backend", "modelled", "--seconds", 0.1, cwd=tmp_path)
    first = next(i for i in clocks["instances"] if i["node"] == 0 and 0 in i["devices"])
    assert held.code == 0
    assert f"GPU 0: {first['clock_mhz']} MHz" in held.out
    for name, kind in (("serving-plan.json", "plan"), ("serving.clocks.json", "clocks")):
        proved = check_file(tmp_path / name)
        assert proved.kind == f"serving {kind}"
        assert len(proved.proved) >= 2
    broken = (tmp_path / "serving-plan.json").read_text().replace('"power_w": ', '"power_w": 1', 1)
    (tmp_path / "serving-plan.json").write_text(broken)
    with pytest.raises(InputError, match=r"the pools draw .* as stated"):
        check_file(tmp_path / "serving-plan.json")


def test_a_fleet_with_roles_is_planned_applied_proved_and_replayed(tmp_path: Path) -> None:
    write_profile(tmp_path / "my.csv", rows_for_roles([1]), kv_bytes_per_token=1e5)
    solved = inside("solve", "my.csv", "--load", "MM=5000", "--gpus", 30, "--disaggregated")
    says(solved.out, "pool and role", "MM prefill", "MM decode", "apart draws", "% less")
    plan = json.loads((tmp_path / "serving-plan.json").read_text())
    assert plan["asked"]["kv_link_bytes_s"] == 50e9
    assert plan["predicted"]["apart"]["power_w"] < plan["predicted"]["together"]["power_w"]
    assert check_file(tmp_path / "serving-plan.json").kind == "serving plan"
    done("serving apply --clocks 1000,2000 -q")
    clocks = json.loads((tmp_path / "serving.clocks.json").read_text())
    assert [instance["role"] for instance in clocks["instances"]] == ["prefill", "decode"]
    trace = ["timestamp,input_tokens,output_tokens"]
    trace += [f"{second / 4:g},600,220" for second in range(400)]
    (tmp_path / "trace.csv").write_text("\n".join(trace) + "\n")
    replayed = answered(
        *("simulate", "my.csv", "--trace", "trace.csv", "--fleet", "serving-plan.json"),
        *("--gpus", 30),
    )
    assert replayed["slo_attainment"] > 0.99
    answer = answered("apply", "--format", "dynamo", "--model", "m", "--clocks", "1000,2000")
    types = [component["type"] for component in answer["document"]["spec"]["components"]]
    assert types == ["frontend", "prefill", "decode"]
    refused = inside("apply", "--format", "keda", "--clocks", "1000,2000")
    assert_refused(refused, 2, "--format dynamo writes such plans")


def test_apply_warns_where_a_slower_clock_leaves_an_slo_unproven() -> None:
    done("serving solve --load SS=1000 --time-limit 0.5 -q")
    ran = inside("apply", "--clocks", "790")
    assert f"{HELD} MHz becomes 790 MHz, which the GPU has" in ran.out.splitlines()
    says(ran.err.splitlines()[-1], "at 790 MHz, slower than planned", "SLO of instances 0 (1 of 1)")
    instances = answered("apply", "--clocks", "790")["instances"]
    assert [i["slo_proven"] for i in instances] == [False]
    assert inside("apply", "--clocks", "790,810").err == ""


def test_a_new_fleet_is_put_where_the_old_ones_weights_are(tmp_path: Path) -> None:
    for name, load in (("old", "LL=9000"), ("new", "SS=2000")):
        done(f"serving solve --load {load} --planner hierarchical -q -o {name}.json")
        done(f"serving apply {name}.json -q -o {name}.clocks.json")
    files = ("old.clocks.json", "new.clocks.json")
    document = answered("reshard", *files, "-o", "moved.clocks.json")
    moved, new = (
        [i["tp"] for i in json.loads((tmp_path / name).read_text())["instances"]]
        for name in ("moved.clocks.json", files[1])
    )
    assert moved == new
    assert document["moved_copies"] == len(document["transfers"]) / 8
    table = inside("reshard", *files).out
    assert "copies of the weights in all\nwrote new.clocks.json\n" in table
    assert table.count(" sends eighth ") == len(document["transfers"])
    assert_refused(inside("reshard", *files, "-o", files[0]), 2, "itself")
    assert_refused(inside("reshard", "old.json", files[1]), 2, "old.json")


def holding() -> subprocess.Popen[str]:
    done("serving solve --load SS=1000 --time-limit 0.5 -q")
    done("serving apply -q")
    process = subprocess.Popen(
        [str(COMMAND), "serving", "hold"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == f"GPU 0: {HELD} MHz\n"
    return process


def test_clocks_that_cannot_be_set_while_holding_are_told(
    fake_nvml: FakeNvml, tmp_path: Path
) -> None:
    fake_nvml.fail("lock", times=3)
    process = holding()
    assert process.stderr is not None
    assert process.stderr.readline().startswith("envplan: warning: GPU 0: ")
    wait_for(lambda: fake_nvml.locked(0) == HELD)
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=300)
    assert rest.endswith("clocks given back\nnext: envplan devices\n")
    assert process.returncode == 0
    assert fake_nvml.locked(0) is None

    fake_nvml.fail("lock")
    ran = envplan("serving", "hold", "--seconds", 1, cwd=tmp_path)
    assert ran.code == 2
    assert ran.err.splitlines()[-1].startswith("envplan: error: GPU 0: ")


def test_holding_ends_if_a_guard_does(fake_nvml: FakeNvml) -> None:
    process = holding()
    wait_for(lambda: fake_nvml.locked(0) == HELD)
    for guard in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        os.kill(int(guard), signal.SIGKILL)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 2
    assert err.endswith("envplan: error: a clock guard has ended; start holding again\n")
    assert fake_nvml.locked(0) is None


def trace_of(folder: Path, *rows: str, header: str = "timestamp,class,requests") -> None:
    (folder / "trace.csv").write_text("\n".join([header, *rows]) + "\n")


def test_simulate_writes_what_happens_over_time(tmp_path: Path) -> None:
    trace_of(tmp_path, *(f"{300 * slot},SM,{300 + 40 * (slot % 20)}" for slot in range(12)))
    arguments = ("--trace", "trace.csv", "-o", "out.csv", "--plot", "out.svg")
    document = answered("simulate", *arguments)
    with (tmp_path / "out.csv").open() as stream:
        lines = list(csv.DictReader(stream))
    assert len(lines) == 60
    energy = sum(60 * float(line["power_w"]) for line in lines)
    assert energy == pytest.approx(document["energy_j"], rel=1e-6)
    assert 0.99 < document["slo_attainment"] <= 1
    assert "<svg" in (tmp_path / "out.svg").read_text()
    over = inside("simulate", "--trace", "trace.csv", "-o", "trace.csv")
    assert_refused(over, 2, "trace.csv", "is an input itself")
    table = inside("simulate", "--trace", "trace.csv", "--load-factor", "0.5")
    assert "energy (kWh)" in table.out


def test_fixed_fleets_are_looked_for_unless_they_are_not_wanted_or_take_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = "\n".join(f"{second},500,100" for second in range(60))
    (tmp_path / "t.csv").write_text(f"timestamp,input_tokens,output_tokens\n{rows}\n")
    command = ("simulate", "--trace", "t.csv")
    assert answered(*command)["fixed_fleets"]["highest_clock"]
    alone = answered(*command, "--no-baselines")
    assert not alone.keys() & {"fixed_fleets", "savings_split"}
    assert "never change" not in inside(*command, "--no-baselines").out
    monkeypatch.setattr("envplan.cli.serving.replay._MOST_WITH_BASELINES", 59)
    assert "60 requests: policies are not set beside" in inside(*command).err
    (policy,) = answered("compare", "--trace", "t.csv", "--policies", "envplan")["policies"]
    assert "fixed_fleets" not in policy
    assert answered(*command, "--baselines")["savings_split"]


def test_costs_count_gpu_hours_and_what_the_site_draws_besides() -> None:
    def cost(options: str) -> Any:
        rates = ("--price", "0.5", "--carbon", "400", *options.split())
        return answered("simulate", "--trace", "azure-2023-code", "--past", "45min", *rates)

    plain, hosts = cost(""), cost("--host-power 100")
    full = cost("--pue 1.5 --gpu-hour 2 --currency EUR")
    assert plain["requests"] < 8819 / 2
    assert full["energy_j"] == plain["energy_j"]
    kwh, hours = plain["energy_j"] / 3.6e6, plain["gpu_hours"]
    assert (plain["money"], plain["carbon_g"]) == pytest.approx((0.5 * kwh, 400 * kwh))
    assert full["EUR"] == pytest.approx(1.5 * 0.5 * kwh + 2 * hours)
    assert full["carbon_g"] == pytest.approx(1.5 * 400 * kwh)
    assert hosts["money"] == pytest.approx(0.5 * kwh + 0.5 * 0.1 * hours)


def test_compare_reads_azures_files_and_puts_policies_side_by_side(tmp_path: Path) -> None:
    rows = [
        f"2023-11-16 18:{17 + k // 60}:{k % 60:02d}.1250000,{300 + 40 * (k % 100)},{5 + k % 90}"
        for k in range(600)
    ]
    trace_of(tmp_path, *rows, header="TIMESTAMP,ContextTokens,GeneratedTokens")
    names = "SinglePool,MultiPool,DynamoLLM,envplan,exact"
    out = done("serving compare --trace trace.csv --plot page.html --policies", names)
    says(out, "on h100-llama2-70b (identified)", *names.split(","))
    assert "against SinglePool" in (tmp_path / "page.html").read_text()
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress((tmp_path / "trace.csv").read_bytes()))
    document = answered("compare", "--trace", "t.csv.gz", "--policies", names)
    assert [entry["policy"] for entry in document["policies"]] == names.split(",")
    assert document["policies"][0]["savings_percent"] == 0
    for entry in document["policies"]:
        assert entry["energy_j"] > 0
        assert 0.99 < entry["slo_attainment"] <= 1


def test_a_policy_that_cannot_run_is_left_out(tmp_path: Path) -> None:
    trace_of(tmp_path, *(f"{60 * s},SS,{40 + s}" for s in range(4)))
    strict = ("compare", "--trace", "trace.csv", "--gpus", "4")
    ran = inside(*strict, "--json")
    assert "SinglePool needs 8 GPUs, 4 more than the 4 there are (--gpus); it is left" in ran.err
    found = [entry["policy"] for entry in json.loads(ran.out)["policies"]]
    assert {"envplan", "exact"} <= set(found)
    assert "SinglePool" not in found
    for names, code, words in (
        ("SinglePool", 1, "SinglePool needs 8 GPUs"),
        ("best", 2, "no policy 'best'"),
        ("exact,exact", 2, "twice"),
    ):
        assert_refused(inside(*strict, "--policies", names), code, words)


def test_requests_that_no_fleet_can_answer_in_time_are_told(tmp_path: Path) -> None:
    rows = [f"{k},{100_000 if k % 10 == 0 else 100},50" for k in range(100)]
    trace_of(tmp_path, *rows, header="arrival_timestamp,prompt_size,token_size")
    ran = inside("simulate", "--trace", "trace.csv", "--json")
    assert "10 of 100 requests (10%) miss their SLOs on any fleet" in ran.err
    assert json.loads(ran.out)["requests_hopeless"] == 10


def test_requests_longer_than_the_model_takes_or_memory_holds_are_named(tmp_path: Path) -> None:
    lines = [
        "2,1000,idle,0,0,100", "2,1000,prefill,1000,0.1,700", "2,1000,decode,1,0.01,300",
        "2,1000,decode,64,0.01,300", "2,1000,context,100000,0.005,500",
    ]  # fmt: skip
    path = tmp_path / "small.csv"
    write_profile(path, lines, kv_tokens={"2": 5000}, max_context_tokens=8192)
    rows = [f"{k},{100 + 2000 * k},50" for k in range(6)]
    trace_of(tmp_path, *rows, header="arrival_timestamp,prompt_size,token_size")
    scheduled = ("--scheduler", "fcfs", "--chunk", "512")
    ran = inside("simulate", str(path), "--trace", "trace.csv", "--json", *scheduled)
    assert "1 request longer than the 8192 tokens that the model takes: not served" in ran.err
    assert "envplan: 2 requests longer than the memory of the instances" in ran.err
    document = json.loads(ran.out)
    assert document["requests"] == 5
    assert document["requests_too_long"] == 1
    assert document["requests_unservable"] == 2


def test_prefill_and_decode_apart_are_set_beside_both_together(tmp_path: Path) -> None:
    lines = [
        f"1,{mhz},{row},{mhz / 4 + watts}"
        for mhz, slower in ((1000, 2), (2000, 1))
        for row, watts in (
            ("idle,0,0", 0), ("prefill,10,0.001", 200), (f"prefill,4000,{0.2 * slower}", 200),
            ("decode,1,0.02", 100), ("decode,64,0.03", 200),
        )
    ]  # fmt: skip
    write_profile(tmp_path / "without.csv", lines)
    write_profile(tmp_path / "split.csv", lines, kv_bytes_per_token=1e5)
    trace_of(tmp_path, "0,MM,300", "60,MM,300")
    asked = ("--trace", "trace.csv", "--disaggregated", "--gpus", "20")
    assert_refused(inside("simulate", "without.csv", *asked), 2, "kv_bytes_per_token")
    ran = inside("simulate", "split.csv", *asked)
    assert "together: " in ran.out
    assert "% less than " in ran.out
    document = answered("simulate", "split.csv", *asked)
    assert "for prompts" in document["fleet"]
    assert document["together"]["energy_j"] > 0
    compared = answered("compare", "split.csv", *asked, "--policies", "envplan")
    names = [policy["policy"] for policy in compared["policies"]]
    assert names == ["envplan", "together", "disaggregated"]


def test_an_error_of_lengths_goes_with_true_lengths(tmp_path: Path) -> None:
    trace_of(tmp_path, "0,SS,1", "60,SS,1")
    known = ("simulate", "--trace", "trace.csv", "--length-error", "30%")
    assert_refused(inside(*known), 2, "goes with true lengths")
    assert inside(*known, "--predicted-lengths", "true").code == 0


#: Arguments of `solve` and `simulate` | exit code | words of the one line that is said.
REFUSED = """
solve --load SS | 2 | --load must be CLASS=TOKENS/S
solve --load SS=1,SS=2 | 2 | SS twice
solve --load SS=-1 | 2 | --load SS
solve | 2 | --load
solve --load SS=5 --gpus 0 | 2 | --gpus must be at least 1, not 0
solve --load LL=50000 --gpus 16 | 1 | more than the 16 | class LL
solve --load LL=50000 --gpus 16 --planner hierarchical | 1 | more than the 16 | class LL
solve --load LL=5 --slo LL=0.01,0.1 | 1 | LL its first token | the best
solve --load LL=5 --slo LL=2 | 2 | --slo must be CLASS=TTFT,TBT
solve --load LL=5 --slo LL=fast,1 | 2 | --slo LL must be a number
solve --load LL=5 --slo LL=0,1 | 2 | --slo LL must be at least
solve --load LL=5 --slo-scale 0 | 2 | --slo-scale
solve --load LL=5 --planner best | 2 | exact or hierarchical
solve --load LL=5 --plot a.txt | 2 | --plot | .png
solve nothing.csv --load LL=5 | 2 | nothing.csv | h100-llama2-70b
solve --load LL=5 --planner hierarchical --one-frequency | 2 | --one-frequency
simulate --gpus 0 | 2 | --gpus
simulate --policy SinglePool --gpus 2 | 1 | GPUs | more than the 2
simulate --slo-quantile 100 | 2 | --slo-quantile
simulate --load-factor 0 | 2 | --load-factor
simulate --price dear.csv | 2 | dear.csv
simulate --policy best | 2 | no policy 'best'
simulate --trace nothing | 2 | nothing | coding-week
simulate --epoch 0 | 2 | --epoch
simulate --mispredicted 101 | 2 | --mispredicted
simulate --headroom -1 | 2 | --headroom
simulate --ready vm,coffee | 2 | --ready must name some of vm, weights, snapshot
simulate --pools 0 | 2 | --pools
simulate --squash soon | 2 | --squash
simulate --gpu-hour -1 | 2 | --gpu-hour
simulate --carbon 400 --price 1 --currency carbon_g | 2 | --currency | carbon_g
simulate --price 1 --currency energy_j | 2 | --currency | energy_j
compare --price 1 --currency savings_percent | 2 | --currency | savings_percent
simulate --seed -1 | 2 | --seed
simulate --past 2h | 2 | no request comes after a past
simulate --slo LM=0.001,0.1 | 1 | LM its first token
"""


@pytest.mark.parametrize("line", REFUSED.strip().splitlines())
def test_what_cannot_be_done_is_one_line(tmp_path: Path, line: str) -> None:
    arguments, code, *words = line.split(" | ")
    assert_refused(inside(*arguments.split()), int(code), *words)
    assert list(tmp_path.iterdir()) == []


def test_files_with_mistakes_are_one_line(tmp_path: Path) -> None:
    write_profile(tmp_path / "p.csv", ["5,1000,idle,0,0,100"])
    trace_of(tmp_path, "5,SS,1", "4,SS,1")
    for arguments, words in (
        ("profile p.csv", ["p.csv:2, column tp", "1, 2, 4 or 8 GPUs"]),
        ("solve p.csv --load SS=5", ["p.csv:2, column tp"]),
        ("simulate --trace trace.csv", ["trace.csv:3, column timestamp", "sort the trace"]),
        ("compare --trace trace.csv", ["trace.csv:3, column timestamp"]),
    ):
        assert_refused(inside(*arguments.split()), 2, *words)


def test_apply_and_hold_refuse_what_they_cannot_use(tmp_path: Path) -> None:
    done("serving profile -o my.csv -q")
    done("serving solve my.csv --load LL=9000 --planner hierarchical -q")
    profile = Path("my.csv").read_text()
    for arguments, words in (
        ("no.json", ["no.json"]),
        ("my.csv", ["my.csv"]),
        ("--gpus-per-node 1", ["GPUs does not fit into a node with 1"]),
        ("--clocks 600,700", ["reaches 700"]),
        ("-o serving-plan.json", ["is an input itself"]),
        ("-o my.csv", ["my.csv: is an input itself"]),
    ):
        assert_refused(inside("apply", *arguments.split()), 2, *words)
    assert Path("my.csv").read_text() == profile
    Path("my.csv").write_text(profile.replace("prefill,1024", "prefill,1025"))
    assert_refused(inside("apply"), 2, "another profile", "--force")
    Path("my.csv").unlink()
    assert_refused(inside("apply"), 2, "--profile")
    assert not (tmp_path / "serving.clocks.json").exists()
    assert_refused(inside("hold"), 2, "serving.clocks.json")


def test_a_given_fleet_and_a_plans_fleet_are_replayed(tmp_path: Path) -> None:
    trace_of(tmp_path, *(f"{300 * slot},SM,300" for slot in range(12)))
    done("serving solve --load SM=2000 --planner hierarchical -q")
    shown = inside("simulate", "--trace", "trace.csv", "--fleet", "2xTP2@1200", "--plot")
    assert shown.out.startswith("2xTP2@1200: trace, 3,600 requests in 1 h on ")
    assert "first token, p50, p90, p99 (s)" in shown.out
    assert "wrote serving-trace-2xTP2@1200.png" in shown.out
    assert (tmp_path / "serving-trace-2xTP2@1200.png").exists()
    document = answered("simulate", "--trace", "trace.csv", "--fleet", "serving-plan.json")
    assert document["policy"] == "serving-plan"
    assert document["ttft_s"]["p50"] <= document["ttft_s"]["p99"]
    assert set(document["fixed_fleets"]) == {"largest_tp", "highest_clock", "lower_clock"}
    refused = inside("simulate", "--trace", "trace.csv", "--fleet", "3xTP3@7")
    assert_refused(refused, 2, "the profile has no TP3 at 7 MHz")


def test_a_fleet_that_is_too_small_does_what_it_can_and_says_so() -> None:
    ran = inside("simulate", "--trace", "azure-2023-conversation", "--gpus", "8")
    assert ran.code == 0
    says(ran.err, "envplan wants up to 12 GPUs", "4 more than the 8 there are", "it meets 99.9")
