from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli_helpers import done, envplan, refused, says, small_profile


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    small_profile().save_csv(tmp_path / "profile.csv")
    monkeypatch.chdir(tmp_path)
    done("solve --quiet --slowdown 5")
    return tmp_path


def edited(path: Path, change: Callable[[Any], None]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def test_what_holds_comes_with_what_to_do_with_it(folder: Path) -> None:
    assert envplan("apply", "-q", cwd=folder).code == 0
    assert envplan("frontier", "-q", "-o", "frontier.csv", cwd=folder).code == 0
    dag = ("schedule", "export", "1f1b", "-s", 2, "-m", 2, "--format", "dag", "-q")
    assert envplan(*dag, cwd=folder).code == 0
    for file, following in (
        ("plan.json", "apply plan.json"),
        ("profile.csv", "frontier profile.csv"),
        ("run.freqplan.json", "devices"),
        ("frontier.csv", "solve PROFILE"),
        ("pipeline.dag.json", "frontier PROFILE --dag pipeline.dag.json"),
    ):
        ran = envplan("check", file, cwd=folder)
        assert ran.out.endswith(f"\nnext: envplan {following}\n"), ran.out + ran.err


def test_plan_is_found_from_another_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    done("check ../plan.json")


@pytest.mark.parametrize("name", ["f.csv", "f.json"])
def test_frontier_file_holds(folder: Path, name: str) -> None:
    done("frontier --quiet -o", name)
    out = done("check", name)
    says(out, f"{name}: frontier, holds", "largest gap")
    assert ("traced again" in out) == (name == "f.json")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d["plans"][1].update(energy_j=1.0), ["plan 2", "lower_bound_j lies above"]),
        (
            lambda d: d["plans"][1]["frequencies_mhz"][0].__setitem__(0, 780),
            ["plan 2: energy_j is", "recomputed it is"],
        ),
        (
            lambda d: d["plans"][1]["frequencies_mhz"][0].__setitem__(0, 7),
            ["plan 2: the profile has no row for forward on stage 0 at 7 MHz"],
        ),
        (lambda d: d["plans"][1].update(gap=0.5), ["plan 2: gap is 0.5; recomputed"]),
        (lambda d: d["plans"][1].update(average_power_w=0.5), ["plan 2", "average_power_w"]),
        (lambda d: d["plans"].reverse(), ["plan 2", "slower and cheaper"]),
        (lambda d: d["plans"].clear(), ["plans"]),
        (lambda d: d.update(t_min_s=1.0), ["t_min_s", "1.0"]),
        (lambda d: d["breakpoints"]["energy_j"].pop(), ["breakpoints.energy_j", "values"]),
        (lambda d: d["breakpoints"]["energy_j"].__setitem__(1, 9.0), ["energy_j", "9.0"]),
        (lambda d: d.pop("job"), ["job is missing"]),
        (lambda d: d["profile"].update(sha256="0" * 64), ["has changed", "--force"]),
        (lambda d: d["job"].update(blocking_power_w=[1.0, 2.0]), ["blocking_power_w"]),
    ],
)
def test_any_change_to_a_frontier_is_found(
    folder: Path,
    change: Callable[[Any], None],
    words: list[str],
) -> None:
    done("frontier --quiet -o f.json")
    edited(Path("f.json"), change)
    refused("check f.json", "f.json", *words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("iteration_time_s,energy_j\n1,2\n", ["f.csv:1", "header"]),
        ("HEAD\n", ["no rows"]),
        ("HEAD\n1,2,3\n", ["f.csv:2", "gap", "is empty"]),
        ("HEAD\n1,2,nan,0,1,1,1\n", ["f.csv:2", "lower_bound_j", "finite"]),
        ("HEAD\n1,2,3,0,1,1,1\n", ["plan 1", "lies above"]),
    ],
)
def test_bad_frontier_csv_names_the_line(folder: Path, text: str, words: list[str]) -> None:
    from envplan.frontier_file import COLUMNS

    Path("f.csv").write_text(text.replace("HEAD", ",".join(COLUMNS)))
    refused("check f.csv", *words)


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


def test_truncated_plan_is_refused_with_line_and_column(folder: Path) -> None:
    text = Path("plan.json").read_text()
    Path("plan.json").write_text(text[: len(text) // 2])
    refused("check plan.json", "plan.json:", "column")


@pytest.mark.parametrize("number", ["1e999", "9" * 5000])
def test_huge_numbers_in_a_plan_are_refused(folder: Path, number: str) -> None:
    text = Path("plan.json").read_text()
    Path("plan.json").write_text(text.replace('"replicas": 1', f'"replicas": {number}'))
    refused("check plan.json", "plan.json")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["is empty"]),
        (b"\xff\xfe\x00", ["not UTF-8"]),
        (b"{", ["not valid JSON"]),
        (b"{}", ["is no file of envplan"]),
        (b'{"schema": "other/v1"}', ["other/v1"]),
        (b'{"schema": ["envplan/plan/v1"]}', ["is no file of envplan"]),
        (b"[1, 2]", ["is no file of envplan"]),
        (b"hello, world", ["column stage"]),
    ],
)
def test_file_of_another_kind_is_refused(tmp_path: Path, content: bytes, words: list[str]) -> None:
    (tmp_path / "f").write_bytes(content)
    refused(f"check {tmp_path}/f", *words)
