"""`envplan -v` and ENVPLAN_LOG show what the packages log, on stderr and nowhere else."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from cli_helpers import assert_refused, envplan, says
from envplan.cli.logs import log_level, logging_to_stderr

pytestmark = pytest.mark.usefixtures("folder")

JOB = ("solve", "a40-gpt3-1.3b-4stage", "-m", "2", "-q")


def test_a_level_of_the_environment_goes_before_that_of_verbose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ENVPLAN_LOG", raising=False)
    assert log_level(verbose=False) is None
    assert log_level(verbose=True) == "info"
    monkeypatch.setenv("ENVPLAN_LOG", "DEBUG")
    assert log_level(verbose=False) == log_level(verbose=True) == "debug"


def test_messages_of_our_loggers_are_shown_while_it_lasts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logger = logging.getLogger("envplan.solve.solver")
    level = logging.getLogger("envplan").level
    with logging_to_stderr("info"):
        logger.info("a deadline of %d ns", 7)
        logger.debug("a detail")
        logging.getLogger("matplotlib").warning("not ours")
    logger.info("too late")
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.endswith(" INFO envplan.solve.solver: a deadline of 7 ns\n")
    assert logging.getLogger("envplan").level == level


def test_a_level_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENVPLAN_LOG", "loud")
    assert_refused(envplan(*JOB), 2, "ENVPLAN_LOG must be debug, info, warning or error, not loud")


def test_without_verbose_nothing_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ENVPLAN_LOG", raising=False)
    assert envplan(*JOB).err == ""


def test_verbose_logs_what_frontier_and_solve_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ENVPLAN_LOG", raising=False)
    ran = envplan("-v", *JOB, "--blocking-power", "71.5", "--slowdown", "1")
    assert (ran.code, ran.out) == (0, "")
    says(ran.err, "INFO envplan.frontier.relaxation: traced a40-gpt3-1.3b-4stage, 1f1b with")
    says(ran.err, "INFO envplan.solve.solver: plan for least energy by ", "gap ", "candidates: ")


def test_a_search_logs_its_deadlines_and_in_detail_its_candidates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ENVPLAN_LOG", "info")
    logged = envplan("solve", "a40-gpt3-1.3b-4stage", "-m", "3", "-q").err
    assert "envplan.solve.deadline_search: deadline" in logged
    assert "candidate for" not in logged
    monkeypatch.setenv("ENVPLAN_LOG", "debug")
    # Candidates are made once in a process, so this is another pipeline.
    logged = envplan("solve", "a40-gpt3-1.3b-4stage", "-m", "37", "-q").err
    assert "envplan.solve.candidates: candidate for" in logged
