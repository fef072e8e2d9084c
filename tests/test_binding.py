"""The compiled core refuses what it cannot use; no argument kills the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from envplan import _kernel

FUZZ = Path(__file__).with_name("fuzz_binding.py")


def survive(seconds: int, seed: int) -> None:
    command = [sys.executable, "-X", "faulthandler", str(FUZZ), str(seconds), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.splitlines()[-1]) > 10


def test_wrong_arguments_do_not_kill_the_process() -> None:
    survive(5, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 8))
def test_many_wrong_arguments_do_not_kill_the_process(seed: int) -> None:
    survive(20, seed)


def parallel_arcs(num_arcs: int) -> _kernel.ParametricFlow:
    """Two events, and activities between them with two levels each."""
    return _kernel.ParametricFlow(
        2,
        np.zeros(num_arcs, np.int32),
        np.ones(num_arcs, np.int32),
        np.zeros(num_arcs, np.int32),
        np.array([0, 2], np.int32),
        np.array([10, 5], np.int64),
        np.array([3, _kernel.INFINITE], np.int64),
        0,
        1,
    )


def test_guessed_flow_beyond_the_integers_is_refused() -> None:
    guess = np.full(40, 2**60 - 2, np.int64)
    with pytest.raises(OverflowError, match="flow to start from"):
        parallel_arcs(40).solve_at_flow(guess, None, 7)
