"""The run log: whatever a line meets, the others are written."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from envplan.runtime.iteration_energy import EnergyTotals
from envplan.runtime.run_log_reader import read_run_log
from envplan.runtime.run_records import ClockError, RunEnded, RunRecord
from envplan.runtime.runlog import RunLog

END = RunEnded(rank=0, steps=1, mismatches=0, clock_errors=0, energy=EnergyTotals(None, None, None))


def error(step: int) -> ClockError:
    return ClockError(rank=0, step=step, message="no clock")


def test_a_line_that_cannot_be_made_is_dropped_and_the_next_ones_are_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def device_fails() -> RunRecord:
        raise RuntimeError("the device is lost")

    log = RunLog(tmp_path / "run.jsonl", rank=0, max_bytes=10**6)
    log.write(error(0))
    log.write_later(device_fails)
    log.write_later(device_fails)
    log.write(error(1))
    log.close(END)
    assert [line.event for line in read_run_log([tmp_path / "run.jsonl"])] == [
        "clock_error",
        "clock_error",
        "end",
    ]
    assert '"dropped": 2' in (tmp_path / "run.jsonl").read_text()
    assert caplog.text.count("the device is lost") == 1


def test_closing_a_log_that_hangs_takes_no_longer_than_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envplan.runtime.runlog.CLOSE_TIMEOUT_S", 0.4)
    monkeypatch.setattr("envplan.runtime.runlog.MAX_WAITING_LINES", 1)
    hangs = threading.Event()

    def device_hangs() -> RunRecord:
        hangs.wait(0.3)
        return error(0)

    log = RunLog(tmp_path / "run.jsonl", rank=0, max_bytes=10**6)
    log.write_later(device_hangs)
    while not log.is_idle():
        time.sleep(0.001)
    log.write_later(device_hangs)
    begin = time.monotonic()
    log.close(END)
    assert time.monotonic() - begin < 0.6
    hangs.set()
