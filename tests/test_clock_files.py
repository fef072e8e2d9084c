"""Clocks that somebody else has chosen: what they cost, and files that are refused."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from cli_helpers import Ran, envplan
from envplan import Plan, Profile, plan_from_clocks
from envplan.enforce.clock_files import count_clocks

NAME = "sosp24-a100-gpt3-xl-4stage"  # with operations of constant time
JOB = (NAME, "--microbatches", "8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan and what `apply` makes of it in each format."""
    path = tmp_path_factory.mktemp("clocks")
    assert envplan("solve", *JOB, "--slowdown", "1", "-o", "plan.json", cwd=path).code == 0
    for kind, name in (("envplan", "plan.freqplan.json"), ("zeus", "freqs.py"), ("csv", "all.csv")):
        applied = envplan("apply", "plan.json", "--dp", "2", "--format", kind, "-o", name, cwd=path)
        assert applied.code == 0
    return path


@pytest.mark.parametrize("name", ["plan.freqplan.json", "freqs.py", "all.csv"])
def test_what_apply_writes_comes_back_as_the_same_plan(folder: Path, name: str) -> None:
    ran = envplan("solve", *JOB, "--clocks", name, "-o", "given.json", cwd=folder)
    assert ran.code == 0
    plan, given = (Plan.load(folder / file) for file in ("plan.json", "given.json"))
    assert given.planner == "clocks"
    assert (given.iteration_time, given.energy) == (plan.iteration_time, plan.energy)
    assert given.frequencies == plan.frequencies
    assert envplan("check", "given.json", cwd=folder).code == 0


@pytest.mark.parametrize("with_constant", [True, False], ids=["all", "those with a clock"])
def test_lists_from_python_may_leave_out_operations_of_constant_time(
    folder: Path, with_constant: bool
) -> None:
    profile, plan = Profile.builtin(NAME), Plan.load(folder / "plan.json")
    clocks = [[mhz for mhz in stage if mhz or with_constant] for stage in plan.frequencies]
    given = plan_from_clocks(plan.job.pipeline(), profile, clocks)
    assert (given.iteration_time, given.energy) == (plan.iteration_time, plan.energy)


def refused(folder: Path, content: str, name: str) -> str:
    (folder / name).write_text(content)
    ran: Ran = envplan("solve", *JOB, "--clocks", name, "-o", "refused.json", cwd=folder)
    assert ran.code == 2
    assert ran.err.count("\n") == 1
    assert not (folder / "refused.json").exists()
    return ran.err


def test_a_clock_that_the_profile_lacks_is_named(folder: Path) -> None:
    text = (folder / "freqs.py").read_text().replace("('forward', 1", "('forward', 9", 1)
    assert "is not a clock of profile" in refused(folder, text, "lacks.py")


@pytest.mark.parametrize("change", ["too few", "too many"])
def test_a_wrong_number_of_operations_is_named(folder: Path, change: str) -> None:
    rows = list(csv.DictReader((folder / "all.csv").open()))
    rows = [row for row in rows if row["rank"] == "0"]
    picked = rows[:-1] if change == "too few" else [*rows, {**rows[-1], "position": len(rows)}]
    lines = ["stage,position,frequency"]
    lines += [f"{row['stage']},{row['position']},{row['frequency_mhz']}" for row in picked]
    words = "no clock is given for" if change == "too few" else "stage 0 has no such operation"
    assert words in refused(folder, "\n".join(lines) + "\n", "number.csv")


def test_a_missing_row_does_not_move_the_clocks_of_other_operations(folder: Path) -> None:
    """As many rows as operations that control a clock, but one of them is for another."""
    rows = list(csv.DictReader((folder / "all.csv").open()))
    first_clocked = next(row for row in rows if row["frequency_mhz"] != "0")
    place = (first_clocked["stage"], first_clocked["position"])
    lines = ["stage,position,frequency"]
    lines += [
        f"{row['stage']},{row['position']},{row['frequency_mhz']}"
        for row in rows
        if (row["stage"], row["position"]) != place
    ]
    err = refused(folder, "\n".join(lines) + "\n", "moved.csv")
    microbatch = first_clocked["microbatch"]
    assert f"no clock is given for {first_clocked['instruction']} {microbatch} of stage 0" in err


def test_a_table_may_leave_out_operations_of_constant_time(folder: Path) -> None:
    rows = list(csv.DictReader((folder / "all.csv").open()))
    lines = ["stage,position,frequency"]
    lines += [
        f"{row['stage']},{row['position']},{row['frequency_mhz']}"
        for row in rows
        if row["frequency_mhz"] != "0"
    ]
    (folder / "clocked.csv").write_text("\n".join(lines) + "\n")
    ran = envplan("solve", *JOB, "--clocks", "clocked.csv", "-o", "clocked.json", cwd=folder)
    assert ran.code == 0
    plan, given = (Plan.load(folder / file) for file in ("plan.json", "clocked.json"))
    assert given.frequencies == plan.frequencies


def test_two_clocks_for_one_operation_are_refused(folder: Path) -> None:
    content = "stage,position,frequency\n0,1,1410\n0,1,1395\n"
    assert "twice.csv:3: says another clock" in refused(folder, content, "twice.csv")


def test_code_is_not_run(folder: Path) -> None:
    assert "not run" in refused(folder, "[[open('ran', 'w')]]\n", "code.py")
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("name", ["list.txt", "list.lst"])
def test_a_list_is_known_by_its_content(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("[[900, 900], [1200]]\n")
    assert count_clocks(tmp_path / name) == [2, 1]


def test_clocks_of_a_microbatchs_chunks_are_counted_one_by_one(tmp_path: Path) -> None:
    table = tmp_path / "clocks.csv"
    table.write_text(
        "stage,instruction,microbatch,chunk,frequency\n"
        "0,forward,0,0,900\n"
        "0,forward,0,1,900\n"
        "1,forward,0,,900\n"
        "1,forward,0,0,900\n"
    )
    assert count_clocks(table) == [2, 1]
