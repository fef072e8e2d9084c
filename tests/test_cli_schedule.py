from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from cli_helpers import done, refused, says, small_profile, told
from envplan.cli import output
from envplan.pipeline import SCHEDULES, Pipeline
from envplan.profile import Profile

EXAMPLES = Path(__file__).parents[1] / "examples" / "schedules"
ONE_1F1B = """\
rank 0  F0 F1 .  .  B0--- .  B1---
rank 1  .  F0 B0--- F1 B1--- .  .

F forward, B backward
9 units of time, a forward taking 1; ranks wait 33.3% of it
activations held at most, by rank: 2, 1
"""
THEN = "next: envplan frontier PROFILE --schedule 1f1b --pp 2 -m 2\n"


def test_list_has_every_schedule() -> None:
    table, listed = done("schedule list"), told("schedule list")["schedules"]
    assert [entry["name"] for entry in listed] == list(SCHEDULES)
    for entry in listed:
        assert entry["name"] in table
        assert len(entry["description"]) > 20


def test_grid_shows_who_runs_what_when(monkeypatch: pytest.MonkeyPatch) -> None:
    assert done("schedule show 1f1b --stages 2 --microbatches 2") == ONE_1F1B + THEN
    out = done("schedule show zb-v -s 2 -m 4")
    assert out.startswith("rank 0  0F0 0F1 0F2 3F0 3I0 3W0")
    assert "F forward, I backward_input, W backward_weight" in out
    # It is not cut where nobody looks, and goes on below on a terminal.
    lines = done("schedule show 1f1b -s 16 -m 64").splitlines()
    assert all(line.startswith(f"rank {rank:>2}  ") for rank, line in enumerate(lines[:16]))
    assert all("B63" in line for line in lines[:16])
    monkeypatch.setattr(output, "on_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "50")
    lines = done("schedule show 1f1b -s 2 -m 8").splitlines()
    grid = [line for line in lines if line.startswith("rank ")]
    assert len(grid) == 2 * 2
    assert grid[2].startswith("rank 0  -- F5")
    assert all(len(line) <= 50 for line in grid)
    assert "F7" in grid[-1]


def test_json_has_every_operation_with_its_time() -> None:
    layout = told("schedule show zb-h1 -s 3 -m 6")
    pipeline = Pipeline("zb-h1", 3, 6)
    assert [len(rank["operations"]) for rank in layout["ranks"]] == [18, 18, 18]
    first = layout["ranks"][2]["operations"][0]
    place = {"instruction": "forward", "microbatch": 0, "chunk": 0, "profile_stage": 2}
    assert first == place | {"start": 2.0, "time": 1.0}
    listed = [op["instruction"] for rank in layout["ranks"] for op in rank["operations"]]
    assert listed == [op.instruction for op in pipeline.operations]
    assert layout["time_unit"] == "unit"


def test_plot_is_drawn(folder: Path) -> None:
    out = done("schedule show 1f1b -s 2 -m 2 --plot")
    assert out == ONE_1F1B + "wrote schedule.png\n" + THEN
    assert Path("schedule.png").read_bytes().startswith(b"\x89PNG")
    assert done("schedule show dualpipe-v -s 2 -m 4 --plot v.svg --quiet") == ""
    assert Path("v.svg").read_text().startswith("<?xml")


def test_imported_csv_plans_like_the_schedule_it_is(folder: Path) -> None:
    small_profile(4).save_csv("profile.csv")
    says(
        done("schedule export zb-v -s 2 -m 4 -o zbv.csv"),
        "next: envplan frontier PROFILE --schedule zb-v --pp 2 -m 4\n",
    )
    done("schedule import zbv.csv --format torch-csv")
    plans = []
    for job in ("--dag pipeline.dag.json", "--schedule zb-v -m 4"):
        plans.append(told(f"solve {job} --slowdown 5")["predicted"])
        done("check plan.json")
    assert plans[0] == plans[1]


def test_imported_order_keeps_constant_operations(folder: Path) -> None:
    rows: list[tuple[Any, ...]] = []
    for stage in range(2):
        for mhz, time, energy in ((1500, 0.1, 30.0), (1000, 0.13, 24.0)):
            for k, name in ((1, "forward"), (2, "backward")):
                rows.append((stage, name, mhz, k * time, k * energy))
        rows += [(stage, "optimizer", 0, 0.05, 5.0), (stage, "load", 0, 0.01, 0.5)]
    Profile.from_rows(rows).save_csv("profile.csv")
    Pipeline("1f1b", 2, 8, extras={"load": [0, 1], "optimizer": [0, 1]}).save_dag("p.dag.json")
    grid = done("schedule show p.dag.json")
    assert grid.startswith("rank 0  l0 F0 l1 F1")
    assert "l load, o optimizer" in grid
    done("solve --dag p.dag.json --slowdown 10")
    plan = json.loads(Path("plan.json").read_text())
    assert plan["stages"][0][0]["instruction"] == "load"
    assert plan["stages"][0][0]["frequency_mhz"] == 0
    assert {op["frequency_mhz"] for op in plan["stages"][1]} == {0, 1000, 1500}


def test_trace_of_a_simulated_plan_comes_back_as_its_schedule(folder: Path) -> None:
    small_profile(4, source=None).save_csv("profile.csv")
    done("solve --schedule interleaved --chunks 2 -m 4")
    done("simulate --trace trace.json")
    rest = r" (?P<microbatch>\d+)( chunk (?P<chunk>\d+))?$"
    mapping = [f"--map={name}=^{name}{rest}" for name in ("forward", "backward")]
    out = done("schedule import trace.json --format chrome-trace", *mapping)
    says(out, "the order is that of schedule interleaved\n", "as the trace calls them: 1, 2\n")


def test_traces_of_all_ranks_make_one_schedule(folder: Path) -> None:
    names = {"forward": "F", "backward_input": "I", "backward_weight": "W"}
    mapping = [rf"--map={n}=^PP:(?P<stage>\d+){c}(?P<microbatch>\d+)$" for n, c in names.items()]
    files = [EXAMPLES / f"interleaved-zb-2x4.rank{rank}.json" for rank in range(2)]
    out = done("schedule import --format chrome-trace --within ^ProfilerStep#3$", *files, *mapping)
    assert "the order is that of schedule interleaved-zb\n" in out
    assert re.search(r"left out: operations of other iterations \(48\), .* others\n", out)


def test_exported_dag_is_the_pipeline(folder: Path) -> None:
    assert done("schedule export looped-bfs -s 2 -m 3 --chunks 2 --format dag --quiet") == ""
    pipeline = Pipeline.from_dag_file("pipeline.dag.json")
    assert pipeline.operations == Pipeline("looped-bfs", 2, 3, num_chunks=2).operations
    done("schedule export pipeline.dag.json")
    assert Path("schedule.csv").read_text().startswith("0F0,0F1,0F2,2F0,2F1,2F2,,,2B2,")


#: What is typed after `envplan schedule`, and words of the refusal.
REFUSED = """
show zb -s 2 -m 4 | unknown schedule "zb"; known: 1f1b
show 1f1b -m 4 | schedule 1f1b needs --pp
show 1f1b -s 2 | schedule 1f1b needs --microbatches
show 1f1b -s 0 -m 4 | --stages must be at least 1
show 1f1b -s 2 -m 4 --chunks 2 | one model chunk
show 1f1b -s 2 -m 4 --plot a.gif | a.gif
show gone.json | gone.json
show gone.json -s 2 | --pp goes with a schedule
import a.csv --format nemo | torch-csv, megatron or chrome-trace
import a.csv | --format
import gone.csv --format torch-csv | gone.csv: cannot be read
import a.csv --format torch-csv | a.csv:2, column 2: "1X0" is no action
import late.csv --format torch-csv | late.csv: operations deadlock
import a.csv b.csv --format torch-csv | torch-csv is one file, not 2
import a.csv --format torch-csv --map a=b | --map does not go with
import good.csv --format torch-csv -o good.csv | itself
import good.csv --format torch-csv --p2p-latency -1 | --p2p-latency must be at least 0, not -1
import t.json --format chrome-trace | --map 'forward=REGEX'
import t.json --format chrome-trace --map fwd | INSTRUCTION=REGEX
import t.json --format chrome-trace --map a=b --map a=c | --map a is given twice
import t.json --format chrome-trace --microbatches 4 | --microbatches does not go with
import t.json MAP --map forward=f --placement w | placement should be 'interleaved' or 'v'
import t.json MAP --map 'forward=f|x' | overlap on rank 0
export 1f1b -s 2 -m 4 --format csv | --format must be torch-csv or
export 1f1b -s 2 -m 4 -o no/where.csv | cannot be written
export good.dag.json --format dag -o good.dag.json | itself
"""


@pytest.mark.parametrize("row", REFUSED.strip().splitlines())
def test_bad_input_is_one_line_and_leaves_nothing(row: str, folder: Path) -> None:
    Path("a.csv").write_text("0F0,0B0\n1F0,1X0\n")
    Path("late.csv").write_text("0F0,0B0\n1B0,1F0\n")
    Path("good.csv").write_text("0F0,0B0\n1F0,1B0\n")
    events = [
        {"ph": "X", "name": name, "ts": at, "dur": 2, "pid": 1, "tid": 1}
        for at, name in ((0, "f"), (1, "x"), (2, "b"))
    ]
    Path("t.json").write_text(json.dumps(events))
    operations = [{"id": "f", "stage": 0, "instruction": "forward"}]
    document = {"schema": "envplan/dag/v1", "operations": operations}
    Path("good.dag.json").write_text(json.dumps(document))
    line, words = row.replace("MAP", "--format chrome-trace --map backward=b").split(" | ")
    refused(f"schedule {line}", words)
