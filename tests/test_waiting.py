"""Two processes of which one waits for the other, on the CPU."""

from __future__ import annotations

import os
import time

import pytest

pytest.importorskip("torch", reason="torch is not installed (extra: torch)")

from envplan.devices import DeviceError
from envplan.profiling.waiting import Peers


def test_one_process_waits_for_the_other_as_long_as_asked_until_one_dies() -> None:
    with Peers(backend="gloo", device="cpu") as peers:
        for seconds in (0.2, 0.01):
            begin = time.monotonic()
            peers.wait(seconds)
            assert time.monotonic() - begin >= seconds
        assert "receive from another through gloo" in peers.description
        pids = [process.pid for process in peers._processes]
        peers._processes[1].kill()
        peers._processes[1].join()
        with pytest.raises(DeviceError, match="cannot wait for each other"):
            peers.wait(0.01)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_backend_that_is_not_there_is_said_in_a_line() -> None:
    with pytest.raises(DeviceError, match=r"cannot wait for each other: .*nosuch") as refused:
        Peers(backend="nosuch", device="cpu")
    assert "\n" not in str(refused.value)
