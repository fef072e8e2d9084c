"""The run log: whatever a line meets, the others are written."""

from __future__ import annotations

from pathlib import Path

import pytest

from envplan.runtime.runlog import ClockError, RunEnded, RunLog, RunRecord, read_run_log
from envplan.runtime.step_energy import EnergyTotals

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
