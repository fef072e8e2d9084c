"""How long an operation takes at each clock, from the measured operations of real runs.

Three things stand between a measured time and the time at a clock:

- An operation after a change of clock begins at the old one. It has run for the switching latency d
  at the old clock, so its time is t(f) + d (1 - t(f) / t(f0)). The latency is found from operations
  after changes that make a difference, and the times of all operations are corrected for it.
- Under the power limit a clock that is asked for is not reached, and the time stops falling. The
  curve has a plateau there; nothing is extrapolated beyond what was measured.
- Most stages ran at few clocks. Stages of one model are made of the same layers, so the logarithm
  of time against the clock has the same shape on all of them: the shape is found from all stages
  together, and each stage's own measurements move it to where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from scipy.optimize import isotonic_regression, nnls

from tools.sosp24.data import FloatArray, Runs

__all__ = [
    "SwitchLatency",
    "TimeCurves",
    "clocks_of",
    "find_switch_latency",
    "find_times",
    "switch_latencies",
]

STEP_MHZ: Final = 15

# Relative standard deviations: of one operation, of a clock's mean from run to run, and of a
# stage's shape from the shape of all stages.
_OPERATION: Final = 0.004
_RUN: Final = 0.001
_SHAPE: Final = 0.01
# Of the shape's slope from one knot to the next; keeps it smooth where nothing was measured.
_BEND: Final = 0.3
# An operation further off than this from the median of its clock ran into something else.
_OUTLIER: Final = 0.04
# Changes of the time that tell something about the latency.
_TELLING: Final = 0.03
_FEWEST_SETTLED: Final = 3


@dataclass(frozen=True)
class SwitchLatency:
    """From a request for a clock until it is there, s.

    Attributes:
        seconds: median of the workloads' medians.
        low, high: the least and the largest of these.
        operations: how many they are from.
    """

    seconds: float
    low: float
    high: float
    operations: int


@dataclass(frozen=True)
class TimeCurves:
    """Times of a workload's operations by clock.

    Attributes:
        clocks_mhz: ascending, (F).
        time_s: of stage, instruction (0 forward, 1 backward) and clock, (S, 2, F); nowhere rising.
        error: standard error of each, as a fraction of it, (S, 2, F).
        count: operations measured at each clock, (S, 2, F).
    """

    clocks_mhz: npt.NDArray[np.int64]
    time_s: FloatArray
    error: FloatArray
    count: npt.NDArray[np.int64]


def find_switch_latency(workloads: Sequence[Runs]) -> SwitchLatency:
    """How late a lower clock comes on a GPU, from the runs of all its workloads."""
    late = [switch_latencies(runs) for runs in workloads]
    medians = [float(np.median(one)) for one in late]
    count = sum(map(len, late))
    return SwitchLatency(float(np.median(medians)), min(medians), max(medians), count)


def switch_latencies(runs: Runs) -> FloatArray:
    """How late a lower clock comes, s, one for each forward after a change downwards.

    An operation that runs for d at the old clock, where all of it would take t0, and then at the
    new one, where all would take t1 > t0, takes t = d + (1 - d / t0) t1. Only forwards and only
    changes downwards tell d: a clock that is raised meets the power limit, which lets a GPU that
    waited run faster for a while than it can for long, and so do long operations at high clocks.
    Both t0 and t1 are medians of operations of the same table whose clock was there before.
    """
    previous = _previous(runs)
    settled = previous == runs.frequency_mhz
    late: list[float] = []
    for _, backward, operations in runs.kinds:
        if backward:
            continue
        clocks, times = runs.frequency_mhz[:, operations], runs.time_s[:, operations]
        calm, before = settled[:, operations], previous[:, operations]
        medians = {
            int(clock): float(np.median(times[calm & (clocks == clock)]))
            for clock in np.unique(clocks[calm])
            if (calm & (clocks == clock)).sum() >= _FEWEST_SETTLED
        }
        changes = zip(
            before[~calm].tolist(), clocks[~calm].tolist(), times[~calm].tolist(), strict=True
        )
        late += [
            (time - medians[new]) / (1 - medians[new] / medians[old])
            for old, new, time in changes
            if old > new
            and {old, new} <= medians.keys()
            and medians[new] / medians[old] > 1 + _TELLING
        ]
    return np.array(late)


def clocks_of(runs: Runs) -> npt.NDArray[np.int64]:
    """Every clock of the GPU from the lowest to the highest that the runs had, (F)."""
    return np.arange(runs.frequency_mhz.min(), runs.frequency_mhz.max() + 1, STEP_MHZ)


def find_times(
    runs: Runs, latency_s: float, clocks: npt.NDArray[np.int64] | None = None
) -> TimeCurves:
    """The time of each operation at every clock; default: from the runs' lowest to the highest."""
    clocks = clocks_of(runs) if clocks is None else clocks
    shape = (runs.workload.num_stages, 2, len(clocks))
    mean, error = np.full(shape, np.nan), np.full(shape, np.inf)
    count = np.zeros(shape, np.int64)
    curves: TimeCurves | None = None
    for _ in range(2):  # the correction for late clocks needs the curves
        times = runs.time_s if curves is None else _settled(runs, curves, latency_s)
        for stage, backward, operations in runs.kinds:
            cells = _cells(clocks, runs.frequency_mhz[:, operations], times[:, operations])
            mean[stage, backward], error[stage, backward], count[stage, backward] = cells
        fitted = np.empty(shape), np.empty(shape)
        for backward in (0, 1):
            pooled = _pooled(clocks, mean[:, backward], error[:, backward])
            fitted[0][:, backward], fitted[1][:, backward] = pooled
        curves = TimeCurves(clocks, *fitted, count)
    assert curves is not None
    return curves


def _previous(runs: Runs) -> npt.NDArray[np.int64]:
    """The clock before each operation on its stage, (R, N): of an iteration's first, its last."""
    previous = np.roll(runs.frequency_mhz, 1, axis=1)
    for stage in range(runs.workload.num_stages):
        mine = np.flatnonzero(runs.stage == stage)
        previous[:, mine[0]] = runs.frequency_mhz[:, mine[-1]]
    return previous


def _settled(runs: Runs, curves: TimeCurves, latency_s: float) -> FloatArray:
    """The measured times less what the old clock did to them, (R, N)."""
    now, before = (
        runs.by_clock(curves.time_s, curves.clocks_mhz, asked)
        for asked in (runs.frequency_mhz, _previous(runs))
    )
    late = np.minimum(latency_s, before)
    corrected: FloatArray = runs.time_s - late * (1 - now / before)
    return corrected


def _cells(
    clocks: npt.NDArray[np.int64], asked: npt.NDArray[np.int64], times: FloatArray
) -> tuple[FloatArray, FloatArray, npt.NDArray[np.int64]]:
    """Of one table: mean time, relative standard error and number of operations at each clock."""
    mean, error = np.full(len(clocks), np.nan), np.full(len(clocks), np.inf)
    count = np.zeros(len(clocks), np.int64)
    for k, clock in enumerate(clocks.tolist()):
        which = asked == clock
        if not which.any():
            continue
        usual = np.median(times[which])
        which &= np.abs(times / usual - 1) < _OUTLIER
        in_runs = int(which.any(axis=1).sum())
        count[k] = int(which.sum())
        mean[k] = times[which].mean()
        error[k] = np.sqrt(_RUN**2 / in_runs + _OPERATION**2 / count[k])
    return mean, error, count


def _pooled(
    clocks: npt.NDArray[np.int64], mean: FloatArray, error: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Times at all clocks of all stages for one instruction, (S, F), and their relative errors."""
    x = np.log(clocks / clocks[-1])
    shape = _shape(x, np.log(mean), error)
    times, errors = np.empty(mean.shape), np.empty(mean.shape)
    for stage in range(len(mean)):
        seen = np.isfinite(mean[stage])
        residual = np.log(mean[stage, seen]) - shape[seen]
        weight = 1 / (error[stage, seen] ** 2 + _SHAPE**2)
        level = float((weight * residual).sum() / weight.sum())
        trust = _SHAPE**2 / (_SHAPE**2 + error[stage, seen] ** 2)
        own = np.interp(x, x[seen], trust * (residual - level))
        fitted = shape + level + own
        # How far a clock is from those measured widens its error, up to that of the shape.
        distance = np.abs(clocks[:, None] - clocks[seen][None, :]).min(1)
        spread = np.interp(x, x[seen], error[stage, seen])
        errors[stage] = np.hypot(spread, _SHAPE * (1 - np.exp(-distance / 60.0)))
        falling = isotonic_regression(fitted, weights=errors[stage] ** -2, increasing=False)
        times[stage] = np.exp(falling.x)
    return times, errors


def _shape(x: FloatArray, y: FloatArray, error: FloatArray) -> FloatArray:
    """What log time has in common against log clock: falling and convex, up to a stage's level.

    y ~ level of the stage + sum of w_k (x_k - x)+, w >= 0, so that the slopes are the sums of w; a
    penalty on w keeps them from jumping where nothing was measured.

    Args:
        x: ascending, 0 at the highest clock, (F).
        y: log of measured times, nan where there are none, (S, F).
        error: relative standard errors, (S, F).
    """
    hinges = np.maximum(x[None, 1:] - x[:, None], 0)  # (F, F - 1): falls with x
    stage, clock = np.nonzero(np.isfinite(y))
    weight = 1 / np.hypot(error[stage, clock], _SHAPE / 3)
    levels = np.zeros((len(stage), len(y)))
    levels[np.arange(len(stage)), stage] = 1
    shift = float(np.nanmin(y)) - 1  # levels are not negative
    design = np.hstack([hinges[clock], levels]) * weight[:, None]
    target = (y[stage, clock] - shift) * weight
    ridge = np.hstack([np.eye(hinges.shape[1]) / _BEND, np.zeros((hinges.shape[1], len(y)))])
    found, _ = nnls(
        np.vstack([design, ridge]), np.concatenate([target, np.zeros(len(ridge))]), maxiter=10_000
    )
    fitted: FloatArray = hinges @ found[: hinges.shape[1]]
    return fitted
