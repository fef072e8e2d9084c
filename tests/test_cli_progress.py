"""Progress: what is done, how much of it, and how long it will still take."""

from __future__ import annotations

import io
import re
import sys
import time

import pytest

from envplan.cli import progress as module
from envplan.cli.invocation import Invocation
from envplan.cli.progress import Progress, progress


class Terminal(io.StringIO):
    """A stderr that somebody looks at."""

    def isatty(self) -> bool:
        return True


def test_work_that_cannot_be_counted_says_how_long_it_has_gone_on() -> None:
    assert re.fullmatch(r"drawing: \d+ s so far", Progress("drawing").describe())


def test_things_are_counted_with_failures() -> None:
    work = Progress("points")
    work.items(1, 4)
    work.items(2, 4, failed=1)
    told = r"2 of 4 points, 1 failed: 50\.0% done after \d+ s, about \d+ s left"
    assert re.fullmatch(told, work.describe())


def test_what_an_earlier_run_did_does_not_count_as_fast() -> None:
    work = Progress("points")
    work.items(3, 4)
    assert re.fullmatch(r"3 of 4 points: 75\.0% done after \d+ s", work.describe())


def test_a_walk_is_done_where_the_least_time_is_reached() -> None:
    work = Progress("walk")
    work.frontier_step(200, 100)
    work.frontier_step(125, 100)
    assert work.part == 0.75


def test_a_terminal_shows_a_bar_that_vanishes(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(module, "_BAR_DELAY_S", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    with progress("points") as work:
        work.items(1, 2)
        while "1 of 2 points: 50.0% done" not in terminal.getvalue():
            time.sleep(0.01)
    assert terminal.getvalue().endswith("\x1b[2K")  # the line is erased


def test_short_work_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress("points") as work:
        work.items(1, 2)
    assert terminal.getvalue() == ""


def test_quiet_work_shows_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "_LOG_PERIOD_S", 0.001)
    with Invocation(quiet=True).running(), progress("points"):
        time.sleep(0.05)
    assert capsys.readouterr().err == ""
