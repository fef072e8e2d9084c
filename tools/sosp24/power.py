"""What an operation draws at each clock, identified from the energies of whole iterations.

A rank's energy in an iteration is the sum over its operations of power x time, plus the waiting
power for the rest of the iteration. Times are measured, the waiting power is known, and the runs
had many different clocks, so the powers follow from least squares over all runs and ranks. A power
is a curve over the clock for each stage and instruction, linear between knots and nowhere falling
(dynamic power grows with clock and voltage; under the power limit it stays level).

The runs leave something open: a stage that ran at three clocks says nothing of a fourth, and
forwards and backwards of a stage were mostly slowed down together. Three priors decide there:
neighbouring slopes of a curve are alike, stages of one model draw alike, and so do forwards and
backwards. They are weak beside what the runs do tell. One more thing is known: Perseus measured
each operation at each clock, and its slowest plan runs each where it is cheapest, waiting power
taken off. So the lowest clock that its plans gave an operation is the valley of
(power - waiting power) x time.

The waiting power is one figure, but a GPU whose clock is high while it waits draws more. What it
draws more is given to its operations, so at the top powers can lie some percent above the limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from tools.sosp24.data import FloatArray, Runs
from tools.sosp24.times import TimeCurves

__all__ = ["PowerCurves", "find_powers"]

KNOT_MHZ: Final = 45

#: Standard deviation of a rank's energy, as a fraction of it, from run to run at the same clocks.
_ENERGY: Final = 0.003
#: Of what neighbouring slopes differ by, W at a knot.
_BEND_W: Final = 6.0
#: Of a curve's level against those of all stages, or of the other instruction, and of its steps, W.
_LEVEL_W, _STEP_W = 15.0, 3.0
#: How far on both sides of a valley the cost is held level, MHz, and how level, W.
_VALLEY_MHZ, _VALLEY_W = 60, 3.0


@dataclass(frozen=True)
class PowerCurves:
    """Powers of a workload's operations by clock.

    Attributes:
        clocks_mhz: ascending, (F).
        power_w: of stage, instruction (0 forward, 1 backward) and clock, (S, 2, F); never falling.
        error_w: standard error of each, W, (S, 2, F), priors included.
        residual: root mean square of what the runs' rank energies are off, as a fraction.
    """

    clocks_mhz: npt.NDArray[np.int64]
    power_w: FloatArray
    error_w: FloatArray
    residual: float


def find_powers(runs: Runs, times: TimeCurves) -> PowerCurves:
    """The power of each operation at every clock that its time is known at."""
    stages, clocks_mhz = runs.workload.num_stages, times.clocks_mhz
    number = max(2, round((clocks_mhz[-1] - clocks_mhz[0]) / KNOT_MHZ) + 1)
    knots = np.linspace(clocks_mhz[0], clocks_mhz[-1], number)
    # Unknown: the first power of each curve and its steps from knot to knot, all of them 0 or more.
    steps = np.tril(np.ones((number, number)))
    share = _shares(clocks_mhz.astype(float), knots) @ steps  # of each step in the power at a clock

    energy, design = _measured(runs, knots, steps)
    weight = 1 / (_ENERGY * energy)
    prior = _priors(stages, number)
    valleys, level = _valleys(runs, times, share)
    waiting = _waiting(runs)
    rows = np.vstack([design * weight[:, None], prior, valleys])
    target = np.concatenate([weight * (energy - waiting), np.zeros(len(prior)), level])
    found, _ = nnls(rows, target, maxiter=20_000)

    covariance = np.linalg.inv(rows.T @ rows)
    blocks = found.reshape(stages, 2, number)
    power = blocks @ share.T
    error = np.empty(power.shape)
    for block in range(stages * 2):
        mine = slice(block * number, (block + 1) * number)
        part = share @ covariance[mine, mine]
        error[block // 2, block % 2] = np.sqrt((part * share).sum(1))
    off = (design @ found + waiting) / energy - 1
    return PowerCurves(clocks_mhz, power, error, float(np.sqrt((off**2).mean())))


def _shares(clocks: FloatArray, knots: FloatArray) -> FloatArray:
    """Weight of each knot in the linear interpolation at each clock, (F, K)."""
    left = np.clip(np.searchsorted(knots, clocks, side="right") - 1, 0, len(knots) - 2)
    part = (clocks - knots[left]) / (knots[left + 1] - knots[left])
    shares = np.zeros((len(clocks), len(knots)))
    shares[np.arange(len(clocks)), left] = 1 - part
    shares[np.arange(len(clocks)), left + 1] = part
    return shares


def _waiting(runs: Runs) -> FloatArray:
    """Energy of each rank while it runs no operation, J, (R * S)."""
    stages = range(runs.workload.num_stages)
    busy = np.stack([runs.time_s[:, runs.stage == stage].sum(1) for stage in stages], 1)
    waiting: FloatArray = runs.workload.waiting_w * (runs.iteration_time_s[:, None] - busy)
    return waiting.ravel()


def _measured(runs: Runs, knots: FloatArray, steps: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Each rank's energy, (R * S), and how much each unknown counts in it, (R * S, S * 2 * K)."""
    stages, number = runs.workload.num_stages, len(knots)
    design = np.zeros((len(runs), stages, stages, 2, number))
    for stage, backward, which in runs.kinds:
        for run in range(len(runs)):
            shares = _shares(runs.frequency_mhz[run, which].astype(float), knots)
            design[run, stage, stage, backward] = (runs.time_s[run, which] @ shares) @ steps
    return runs.rank_energy_j.ravel(), design.reshape(len(runs) * stages, -1)


def _valleys(runs: Runs, times: TimeCurves, share: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Rows and right sides that put each curve's valley where Perseus measured it.

    At the valley v the cost (power - waiting power) x time is level: it is the same a little above
    and a little below.
    """
    stages, number = runs.workload.num_stages, share.shape[1]
    rows, level = np.zeros((stages * 2, stages * 2 * number)), np.zeros(stages * 2)
    planned = runs.planned
    if not planned.any():  # warm-ups and EnvPipe's plan tell of no valley
        return rows, level
    reach = round(_VALLEY_MHZ / (times.clocks_mhz[1] - times.clocks_mhz[0]))
    for block, (stage, backward, which) in enumerate(runs.kinds):
        lowest = int(runs.frequency_mhz[planned][:, which].min())
        valley = int(np.searchsorted(times.clocks_mhz, lowest))
        below, above = max(valley - reach, 0), min(valley + reach, len(times.clocks_mhz) - 1)
        time = times.time_s[stage, backward]
        scale = _VALLEY_W * time[valley]
        rows[block, block * number : (block + 1) * number] = (
            share[above] * time[above] - share[below] * time[below]
        ) / scale
        level[block] = runs.workload.waiting_w * (time[above] - time[below]) / scale
    return rows, level


def _priors(stages: int, number: int) -> FloatArray:
    """Rows that pull the unknowns together, each over its standard deviation, (n, S * 2 * K)."""
    size = stages * 2 * number

    def unknown(stage: int, backward: int, step: int) -> FloatArray:
        row = np.zeros(size)
        row[(stage * 2 + backward) * number + step] = 1
        return row

    rows = []
    for backward in (0, 1):
        for step in range(number):
            all_stages = [unknown(stage, backward, step) for stage in range(stages)]
            mean = np.mean(all_stages, axis=0)
            deviation = _STEP_W if step else _LEVEL_W
            rows += [(one - mean) / deviation for one in all_stages]
    for stage in range(stages):
        for step in range(number):
            apart = unknown(stage, 0, step) - unknown(stage, 1, step)
            rows.append(apart / (_STEP_W if step else _LEVEL_W))
        for backward in (0, 1):
            rows += [
                (unknown(stage, backward, step + 1) - unknown(stage, backward, step)) / _BEND_W
                for step in range(1, number - 1)
            ]
    return np.array(rows)
