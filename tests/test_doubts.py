"""Warnings about values that are probably not meant."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

from cli_helpers import envplan, says, small_profile
from envplan import DoubtWarning, Pipeline, Profile, builtin_profiles, trace_frontier
from envplan.cli import app


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--slowdown", "200"], "a slowdown of 200% makes iterations 3 times as long as T_min"),
        (["--p2p-latency", "2"], "--p2p-latency takes units, as in 2ms"),
        (["--switch-latency", "20s"], "--switch-latency takes units, as in 20ms"),
        (["--blocking-power", "3"], "a waiting GPU draws 3 W"),
        (["--slowdown", "0.01"], "a slowdown of 0.01% is next to none; 1% is --slowdown 1"),
        (["--switch-latency", "2"], "2 is read as 2ms; say so: 2ms"),
        (["--min-dwell", "20"], "20 is read as 20ms; say so: 20ms"),
    ],
)
def test_a_doubt_is_one_line_and_the_plan_is_made(
    tmp_path: Path, arguments: list[str], words: str
) -> None:
    small_profile(2).save_csv(tmp_path / "profile.csv")
    ran = envplan("solve", *arguments, cwd=tmp_path)
    assert ran.code == 0
    assert ran.err.startswith("envplan: warning: ")
    assert words in ran.err
    assert ran.err.count("\n") == 1
    assert (tmp_path / "plan.json").exists()


def test_a_plan_that_takes_hours_is_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("envplan.cli.job_options._MANY_OPERATIONS", 32)
    monkeypatch.chdir(tmp_path)
    for microbatches, words in (("4", ""), ("5", "40 operations: planning may take hours")):
        arguments = ["solve", "a40-gpt3-1.3b-4stage", "-m", microbatches]
        assert app.run(arguments) == 0
        assert words in capsys.readouterr().err


def test_an_error_stands_alone(tmp_path: Path) -> None:
    small_profile(2).save_csv(tmp_path / "profile.csv")
    ran = envplan("solve", "--power-cap", "5", cwd=tmp_path)
    assert ran.code == 1
    assert ran.err.startswith("envplan: error: ")
    assert ran.err.count("\n") == 1


def test_python_is_told_that_slowdown_is_a_fraction() -> None:
    frontier = trace_frontier(Pipeline("1f1b", 2, 4), small_profile(2))
    with pytest.warns(DoubtWarning, match=r"2% is .* slowdown=0\.02 in Python"):
        frontier.plan(slowdown=2)


def test_a_warning_points_at_the_line_of_the_caller() -> None:
    with pytest.warns(DoubtWarning) as of_job:
        frontier = trace_frontier(Pipeline("1f1b", 2, 4), small_profile(2), blocking_power=3)
    with pytest.warns(DoubtWarning) as of_request:
        frontier.plan(slowdown=2)
    told = [*of_job, *of_request]
    assert {warning.filename for warning in told} == {__file__}
    assert len({warning.lineno for warning in told}) == 2


@pytest.mark.parametrize("option", ["--switch-latency 20ms", "--switch-latency 0", "--slowdown 1"])
def test_units_and_nothing_are_not_doubted(tmp_path: Path, option: str) -> None:
    small_profile(2).save_csv(tmp_path / "profile.csv")
    ran = envplan("solve", *option.split(), cwd=tmp_path)
    assert (ran.code, ran.err) == (0, "")


def test_profiles_in_milliseconds_or_kilojoules_are_doubted() -> None:
    rows = [
        (0, instruction, mhz, 30 * time, 1e-3 * time)
        for instruction in ("forward", "backward")
        for mhz, time in ((1000, 1.0), (900, 1.2))
    ]
    with pytest.warns(DoubtWarning) as told:
        trace_frontier(Pipeline("1f1b", 1, 100), Profile.from_rows(rows))
    text = " ".join(str(one.message) for one in told)
    says(text, "are its energies in joules", "are the profile's times in seconds")


def test_a_highest_clock_that_is_slower_is_doubted() -> None:
    rows = [(0, "forward", 1000, 1.05, 200.0), (0, "forward", 900, 1.0, 180.0)]
    profile = Profile.from_rows([*rows, (0, "backward", 1000, 1.0, 200.0)])
    words = r"stage 0 forward takes 5\.0% longer at its highest clock, 1000 MHz, than at 900 MHz in"
    with pytest.warns(DoubtWarning, match=words):
        trace_frontier(Pipeline("1f1b", 1, 4), profile)


@pytest.mark.parametrize(
    ("joules", "words"),
    [
        (0.0, "stage 0 forward at 900 MHz draws 0 W in profile profile; was its energy measured?"),
        (
            3000.0,
            "an operation of profile profile draws 3,000 W; are its energies in joules",
        ),
    ],
)
def test_rows_of_powers_that_no_gpu_draws_are_doubted(
    joules: float, words: str, tmp_path: Path
) -> None:
    rows = [(0, "forward", 1000, 1.0, 200.0), (0, "backward", 1000, 1.0, 200.0)]
    profile = Profile.from_rows([*rows, (0, "forward", 900, 1.0, joules)])
    with pytest.warns(DoubtWarning, match=re.escape(words)):
        trace_frontier(Pipeline("1f1b", 1, 4), profile)
    profile.save_csv(tmp_path / "profile.csv")
    ran = envplan("check", "profile.csv", cwd=tmp_path)
    assert ran.code == 0
    assert words in ran.err


def test_built_in_profiles_raise_no_doubt() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", DoubtWarning)
        for profile in builtin_profiles():
            job = profile.pipeline()
            shape = {"num_chunks": job.num_chunks, "p2p_latency": job.p2p_latency}
            trace_frontier(Pipeline(job.schedule, job.num_stages, 2, **shape), profile)
