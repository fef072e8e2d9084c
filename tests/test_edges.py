"""The edges of arithmetic: the largest and the smallest, one of everything, all alike."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cli_helpers import envplan, small_profile
from envplan import Pipeline, Profile, trace_frontier
from envplan.units import MAX_OPERATION_J

Rows = list[tuple[str, float, float, float]]

HEADER = "stage,instruction,frequency,time,energy\n"
ONE: Rows = [("forward", 1000, 1, 10), ("backward", 1000, 2, 20)]
PLANNED: dict[str, Rows] = {
    "the shortest there are": [("forward", 1000, 1e-9, 1e-14), ("backward", 1000, 1e-9, 0)],
    "without energy": [("forward", 1000, 1, 0), ("backward", 900, 1, 0)],
    "one option": ONE,
    "all equal": [(name, mhz, 1, 10) for name in ("forward", "backward") for mhz in (900, 1000)],
    "all but one dominated": [
        (name, mhz, 1 + k, 10 + k)
        for name in ("forward", "backward")
        for k, mhz in enumerate((1000, 900, 800))
    ],
}
#: More than 2**63 units of energy together.
LARGEST = [("forward", 1000, 20, MAX_OPERATION_J), ("backward", 1000, 20, MAX_OPERATION_J)]

REFUSED: dict[str, tuple[Rows, str]] = {
    "longer than can be": ([("forward", 1000, 1.1e9, 1), ONE[1]], "profile.csv:2, column time"),
    "shorter than can be": ([("forward", 1000, 9e-10, 1), ONE[1]], "profile.csv:2, column time"),
    "more than can be": (
        [("forward", 1000, 1, MAX_OPERATION_J + 1), ONE[1]],
        "profile.csv:2, column energy",
    ),
    "a higher clock": ([("forward", 1e6 + 1, 1, 1), ONE[1]], "profile.csv:2, column frequency"),
    "waiting for too long": (
        [("forward", 1000, 1e9, 4.6e3), ("backward", 1000, 1e9, 4.6e3)],
        "stage 0 forward: costs or their slopes are too large",
    ),
    "too long together": (
        [("forward", 1000, 1e8, 4.6e3), ("forward", 900, 2e8, 4e3), ONE[1]],
        "profile.csv: the durations add up to more than",
    ),
}


def written(folder: Path, rows: Rows) -> Path:
    lines = [f"0,{','.join(map(str, row))}\n" for row in rows]
    path = folder / "profile.csv"
    path.write_text(HEADER + "".join(lines))
    return path


@pytest.mark.parametrize("case", PLANNED)
def test_one_stage_is_planned_and_proved(case: str, tmp_path: Path) -> None:
    written(tmp_path, PLANNED[case])
    for extra in (["--blocking-power", "0"], ["--switch-latency", "1h"]):
        ran = envplan("solve", "-m", 1, *extra, "-q", cwd=tmp_path)
        assert ran.code == 0, ran.err
        assert envplan("check", "plan.json", cwd=tmp_path).code == 0


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_too_large_or_too_small_is_named(case: str, tmp_path: Path) -> None:
    rows, words = REFUSED[case]
    written(tmp_path, rows)
    power = ["--blocking-power", "0"] if "together" in case else []
    ran = envplan("solve", "-m", 4, *power, cwd=tmp_path)
    assert ran.code == 2
    assert words in ran.err
    assert ran.err.count("\n") == 1
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 2048), (2, 2048), (128, 1), (128, 8)])
def test_many_stages_are_planned_and_proved(stages: int, microbatches: int, tmp_path: Path) -> None:
    small_profile(stages, clocks=(1740, 1260, 780)).save_csv(tmp_path / "profile.csv")
    ran = envplan("solve", "-m", microbatches, "-q", cwd=tmp_path)
    assert ran.code == 0, ran.err
    assert envplan("check", "plan.json", cwd=tmp_path).code == 0


def test_operations_of_the_largest_energy_are_planned_proved_and_replayed(tmp_path: Path) -> None:
    slower = [(name, 900, 21.0, 0.9 * energy) for name, _, _, energy in LARGEST]
    rows = [(stage, *row) for stage in range(4) for row in LARGEST + slower]
    lines = [",".join(map(str, row)) for row in rows]
    (tmp_path / "profile.csv").write_text("\n".join([HEADER.strip(), *lines]) + "\n")
    latency = ["--switch-latency", "20ms"]
    ran = envplan("solve", "-m", 16, "--slowdown", 3, *latency, "--dp", 64, "-q", cwd=tmp_path)
    assert ran.code == 0, ran.err
    for command in (["check", "plan.json"], ["simulate", "plan.json"], ["apply", "plan.json"]):
        ran = envplan(*command, cwd=tmp_path)
        assert ran.code == 0, ran.err
    plan = json.loads((tmp_path / "plan.json").read_text())
    fastest_j = 4 * 32 * 64 * MAX_OPERATION_J
    assert 0.9 * fastest_j < plan["predicted"]["energy_j"] < 1.2 * fastest_j


def test_noise_beyond_the_largest_energy_is_one_line(tmp_path: Path) -> None:
    written(tmp_path, LARGEST)
    assert envplan("solve", "-m", 2, cwd=tmp_path).code == 0
    noisy = ["--noise", 100, "--runs", 20]
    ran = envplan("simulate", "plan.json", *noisy, cwd=tmp_path)
    assert ran.code == 2
    assert ran.err.count("\n") == 1
    assert "kJ under noise" in ran.err


def test_more_operations_than_can_be_are_refused_at_once(tmp_path: Path) -> None:
    small_profile(128, clocks=(1740, 780)).save_csv(tmp_path / "profile.csv")
    ran = envplan("solve", "-m", 8193, cwd=tmp_path)
    assert ran.code == 2
    assert "make 2097408 operations; at most 2097152 are possible" in ran.err
    assert ran.err.count("\n") == 1


#: Commands whose files are compared, each after the one before.
COMMANDS = (
    "solve a40-gpt3-1.3b-4stage --microbatches 4 --slowdown 2 --ladder 3 -o plan.json",
    "solve sosp24-a100-gpt3-xl-4stage --microbatches 4 --switch-latency 5ms -o late.json",
    "apply plan.json -o run.freqplan.json",
    "frontier a40-gpt3-1.3b-4stage --microbatches 4 -o frontier.json",
)


#: Runs its arguments, a command line each, with "--quiet".
SCRIPT = "import sys; from envplan.cli.app import run\n" + (
    "for line in sys.argv[1:]: assert run([*line.split(), '--quiet']) == 0"
)


def files_of(python: Path, folder: Path, **environment: str) -> dict[str, bytes]:
    """What the commands write, by name."""
    folder.mkdir()
    run = [python, "-c", SCRIPT, *COMMANDS]
    subprocess.run(run, cwd=folder, env={**os.environ, **environment}, check=True)
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_threads_do_not_change_a_byte(tmp_path: Path) -> None:
    pipeline = Pipeline("1f1b", num_stages=4, num_microbatches=6)
    profile = Profile.builtin("a40-gpt3-1.3b-4stage")

    def plan(_: int) -> str:
        found = trace_frontier(pipeline, profile).plan(slowdown=0.02)
        return found.to_json()

    with ThreadPoolExecutor(8) as pool:
        assert len({*pool.map(plan, range(8))}) == 1
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    files = [
        files_of(Path(sys.executable), tmp_path / n, **dict.fromkeys(names, n), PYTHONHASHSEED=n)
        for n in ("1", "8")
    ]
    assert files[0] == files[1]


def python_of(version: str) -> str | None:
    """An interpreter of a version, of pyenv or on the path."""
    places = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    return str(places[-1]) if places else shutil.which(f"python{version}")


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13", "3.14"])
def test_versions_of_python_do_not_change_a_byte(version: str, tmp_path: Path) -> None:
    python = python_of(version)
    if python is None:
        pytest.skip(f"there is no Python {version} here")
    subprocess.run([python, "-m", "venv", tmp_path / "venv"], check=True)
    other = tmp_path / "venv" / "bin" / "python"
    root = Path(__file__).parents[1]
    subprocess.run([other, "-m", "pip", "install", "--quiet", root], check=True)
    there = files_of(other, tmp_path / "there")
    assert there == files_of(Path(sys.executable), tmp_path / "here")
