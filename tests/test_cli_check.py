from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli_helpers import done, put, refused, says
from envplan.plan.frontier_file import COLUMNS


@pytest.fixture
def folder(folder: Path) -> Path:
    done("solve --quiet --slowdown 5")
    return folder


def test_rates_of_a_spreadsheet_are_checked_as_rates(folder: Path) -> None:
    Path("day.csv").write_text("hour;price\n0;0.1\n1;0.2\n")
    says(done("check", "day.csv"), "price: 0.1500 a kWh", ", holds\n")


#: A command, a file that it writes or reads, what `check` says of that, and what to do with it.
#: Plans, frequency plans, DAGs, rates and sweep configurations are in tests/golden/check.txt.
FILES = """
solve -o plan.json | profile.csv | 20 options | frontier profile.csv
solve -o plan.json | profile.meta.json | it goes with profile.csv |
apply --format csv | run.freqplan.csv | clocks of 2 stages, 16 in all | solve PROFILE --clocks
apply --format zeus | run.freqplan.py | clocks of 2 stages, 16 in all | solve PROFILE --clocks
frontier -o frontier.csv | frontier.csv | slower and cheaper | solve PROFILE
frontier -o frontier.json | frontier.json | traced again | solve profile.csv
schedule export zb-v -s 2 -m 4 | schedule.csv | 48 operations on 2 ranks | schedule import
simulate --trace trace.json | trace.json | 16 operations of 4 microbatches on 2 stages |
sweep sweep.toml | sweep.csv | 1 point, 0 of them failed |
sweep sweep.toml -o sweep.parquet | sweep.parquet | no plan uses less |
serving simulate --trace rows.csv --policy static -o hour.csv | hour.csv | 2 minutes, every cell |
serving profile -o serving.csv | serving.csv | no holes | serving solve serving.csv
serving profile -o serving.csv | serving.meta.json | it goes with serving.csv |
serving profile | rows.csv | 40 requests over | serving compare --trace rows.csv
simulate --dp 2 --straggler-trace slow.csv | slow.csv | 2 iterations | simulate plan.json
"""


@pytest.mark.parametrize("row", FILES.strip().splitlines())
def test_what_holds_comes_with_what_to_do_with_it(folder: Path, row: str) -> None:
    if "parquet" in row:
        pytest.importorskip("pyarrow")
    line, file, words, following = (part.strip() for part in row.split("|"))
    Path("sweep.toml").write_text('[grid]\nprofiles = ["profile.csv"]\n')
    Path("rows.csv").write_text(
        "timestamp,class\n" + "".join(f"{k},MM\n" for k in range(80, 160, 2))
    )
    Path("slow.csv").write_text("iteration,replica,slowdown\n0,0,1.2\n1,1,1.3\n")
    done(line, "--quiet")
    out = done("check", file)
    says(out, f"{file}: ", ", holds\n", words)
    assert out.splitlines()[-1].startswith(f"next: envplan {following}" if following else "  ")


@pytest.mark.parametrize(
    ("line", "file", "old", "new", "words"),
    [
        ("apply --format csv", "run.freqplan.csv", "1740", "fast", "run.freqplan.csv:2, column f"),
        ("apply --format zeus", "run.freqplan.py", "1740", "-1", "no clock in MHz"),
        ("sweep sweep.toml", "sweep.csv", "False", "perhaps", "sweep.csv:2, column recompute"),
        ("sweep sweep.toml", "sweep.csv", ",frontier,slowdown", ",frontier,fast", "column target"),
        ("simulate --trace t.json", "t.json", '"ts": 0.0', '"ts": 1e6', "overlap on rank 0"),
        ("schedule export 1f1b -s 2 -m 2", "schedule.csv", "0F0", "0F1", "schedule.csv"),
    ],
)
def test_what_does_not_hold_is_said_of_outputs_too(
    folder: Path, line: str, file: str, old: str, new: str, words: str
) -> None:
    Path("sweep.toml").write_text('[grid]\nprofiles = ["profile.csv"]\n')
    done(line, "--quiet")
    text = Path(file).read_text()
    assert old in text
    Path(file).write_text(text.replace(old, new, 1))
    refused(f"check {file}", file, words)


def test_a_sweep_with_a_plan_below_its_bound_does_not_hold(folder: Path) -> None:
    Path("sweep.toml").write_text('[grid]\nprofiles = ["profile.csv"]\n')
    done("sweep sweep.toml --quiet")
    names, cells = (line.split(",") for line in Path("sweep.csv").read_text().splitlines())
    cells[names.index("energy_j")] = "1.0"
    Path("sweep.csv").write_text(",".join(names) + "\n" + ",".join(cells) + "\n")
    refused("check sweep.csv", "sweep.csv: point 1: energy_lower_bound_j lies above energy_j")


@pytest.mark.parametrize(
    ("where", "value", "words"),
    [
        ("plans.1.energy_j", 1.0, "plan 2 | lower_bound_j lies above"),
        ("plans.1.frequencies_mhz.0.0", 780, "plan 2: energy_j is | recomputed it is"),
        ("plans.1.frequencies_mhz.0.0", 7, "plan 2: the profile has no row | at 7 MHz"),
        ("plans.1.gap", 0.5, "plan 2: gap is 0.5; recomputed"),
        ("plans.1.average_power_w", 0.5, "plan 2 | average_power_w"),
        ("plans", lambda plans: plans[::-1], "plan 2 | slower and cheaper"),
        ("plans", [], "plans"),
        ("t_min_s", 1.0, "t_min_s | 1.0"),
        ("breakpoints.energy_j", lambda joules: joules[:-1], "breakpoints.energy_j | values"),
        ("breakpoints.energy_j.1", 9.0, "energy_j | 9.0"),
        ("job", None, "job should be"),
        ("profile.sha256", "0" * 64, "has changed | --force"),
        ("job.blocking_power_w", [1.0, 2.0], "blocking_power_w"),
    ],
)
def test_any_change_to_a_frontier_is_found(
    folder: Path, where: str, value: Any, words: str
) -> None:
    done("frontier --quiet -o f.json")
    document = json.loads(Path("f.json").read_text())
    put(document, where, value)
    Path("f.json").write_text(json.dumps(document))
    refused("check f.json", "f.json", *words.split(" | "))


def test_changed_profile_is_refused_and_force_checks_against_it(folder: Path) -> None:
    text = Path("profile.csv").read_text()
    Path("profile.csv").write_text(text + "\n")
    refused("check plan.json", "plan.json", "--force")
    assert "HAS CHANGED" in done("check --force plan.json")
    Path("profile.csv").write_text(text.replace("0.08,", "0.09,"))
    refused("check --force plan.json", "plan.json", "recomputed it is")


def test_moved_profile_can_be_named(folder: Path) -> None:
    Path("profile.csv").rename("moved.csv")
    refused("check plan.json", "profile.csv is not found", "--profile")
    done("check plan.json --profile moved.csv")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"{", "not valid JSON"),
        (b"{}", "is no file of envplan"),
        (b'{"schema": "other/v1"}', "other/v1"),
        (b'{"schema": ["envplan/plan/v1"]}', "is no file of envplan"),
        (b"[1, 2]", "is no file of envplan"),
        (b"hello, world", "column stage"),
        (b"iteration_time_s,energy_j\n1,2\n", "f:1 | header"),
        (b"HEAD\n", "no rows"),
        (b"HEAD\n1,2,3\n", "f:2 | gap | is empty"),
        (b"HEAD\n1,2,nan,0,1,1,1\n", "f:2 | lower_bound_j | finite"),
        (b"HEAD\n1,2,3,0,1,1,1\n", "plan 1 | lies above"),
    ],
)
def test_file_of_another_kind_or_a_bad_frontier_table_is_refused(
    tmp_path: Path, content: bytes, words: str
) -> None:
    (tmp_path / "f").write_bytes(content.replace(b"HEAD", ",".join(COLUMNS).encode()))
    refused(f"check {tmp_path}/f", *words.split(" | "))
