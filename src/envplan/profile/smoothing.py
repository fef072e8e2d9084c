"""Noise in measured tables: when it is clear, and the nearest curves of the shape of physics.

Over the logarithm of the clock the logarithm of an operation's time falls and is convex: it goes
from 1/f where arithmetic bounds it to constant where memory or the power limit does. Over the
logarithm of time the logarithm of energy is convex, too, with one valley: dynamic power falls
faster than time grows, until static power over a longer time outweighs it. Where time does not
change with the clock, energy does not rise when the clock falls.

A planner works on the lower hull of cost over time, so it picks out exactly the rows that are too
fast or too cheap by chance. Worst is the top of a GPU at its power limit: neither clock nor time
change anything any more there, and one row is 1% too fast.

**When noise is clear.** A step from one clock to the next is wrong if time rises, or cost (energy
less what waiting as long would draw) goes away from its valley, by more than rounding. One wrong
step may be true. Noise is clear where time falls over the whole table, and half of a profile's
tables have two wrong steps or more. Modelled tables have none, tables identified from many runs
have them here and there, raw sweeps have them everywhere.

**How it is taken out.** Curves are fitted by least absolute deviations, a linear program: a row far
off, as a throttled one is, moves them no more than any other. What has the shape already stays as
it is, and so do constant-time rows and those of `blocking`.

**Jumps.** A dozen rows in sequence may be faster than all rows of higher clocks next to them: they
were measured in another state of the GPU or with other kernels. That is no noise, but nothing tells
which of the two a job will see. The part below the jump is scaled in time, at its own power, to go
on from the part above, so no plan promises what only the faster state could keep. What that costs
where the faster state lasts is measured in docs/results.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from envplan.profile.options import Key, Measured, PartCosts
from envplan.units import fj_from_j, ns_from_s

FloatArray = npt.NDArray[np.float64]
Sweep = tuple[FloatArray, FloatArray, FloatArray]

#: A step against the shape by less than this part may come from rounding.
_WRONG: Final = 2e-4
#: So many wrong steps of a table are no accident.
_FEWEST_WRONG: Final = 2
#: A sweep: a table of fewer clocks tells too little.
_SWEEP: Final = 8
#: Correlation of log time with log clock up to which a table tells of noise. Noise of several
#: percent in every row leaves -0.7 where a sweep without it has -0.95.
_FALLS: Final = -0.5
#: Rows below and above a jump that have to agree on it, and those that tell how large it is.
_BELOW, _ABOVE, _LEVEL = 3, 5, 8
#: Rows within a jump: they belong to neither side.
_WITHIN: Final = 3
#: A jump is this many times the noise of a row, and at least this part of the time.
_JUMP_NOISE: Final = 8.0
_JUMP: Final = 0.01
# Curves that are off their shape by less than this part are as files round them.
_ROUNDING: Final = 1e-6


def wrong_steps(
    clocks: FloatArray, times: FloatArray, energies: FloatArray, waiting_w: float
) -> int:
    """How many steps of one operation's table go against physics.

    Args:
        clocks: MHz, all different, (n).
        times: s, (n).
        energies: J, (n).
        waiting_w: power of the waiting GPU, W.
    """
    rising = np.argsort(clocks)
    time, energy = times[rising], energies[rising]
    slower = np.diff(time) / time[1:] > _WRONG
    cost = energy - waiting_w * time
    valley = int(cost.argmin())
    change = np.diff(cost) / energy[1:]
    away = np.concatenate([change[:valley] > _WRONG, change[valley:] < -_WRONG])
    return int((slower | away).sum())


def noise_is_clear(measured: Measured, waiting_w: Mapping[int, float]) -> bool:
    """Whether half of the tables that are sweeps of an operation have steps against physics.

    Args:
        waiting_w: of each stage, W.
    """
    noisy = [
        wrong_steps(*arrays, waiting_w[stage]) >= _FEWEST_WRONG
        for (stage, _), arrays in _sweeps(measured, _FALLS)
    ]
    return bool(noisy) and 2 * sum(noisy) >= len(noisy)


def jump_clocks(measured: Measured) -> dict[str, int]:
    """The highest clock below a jump, MHz, of each instruction that has one on some stage."""
    found: dict[str, int] = {}
    for (_, instruction), (clocks, times, _) in _sweeps(measured):
        if below := jumps(times):
            found[instruction] = max(int(clocks[below[-1]]), found.get(instruction, 0))
    return found


def smoothed(measured: Measured) -> dict[Key, PartCosts]:
    """The same with the noise taken out of each operation without parts that is a sweep."""
    found = dict(measured)
    for key, arrays in _sweeps(measured):
        if not measured[key].split:
            times, energies = _smoothed(*(tuple(one.tolist()) for one in arrays))
            found[key] = replace(
                measured[key],
                time_ns=np.array([[ns_from_s(time)] for time in times.tolist()]),
                energy_fj=np.array([[fj_from_j(energy)] for energy in energies.tolist()]),
            )
    return found


@lru_cache(maxsize=256)  # stages of one model are often measured once
def _smoothed(*columns: tuple[float, ...]) -> tuple[FloatArray, FloatArray]:
    """What smooth_curve makes of clocks, times and energies."""
    return smooth_curve(*map(np.array, columns))


def _sweeps(measured: Measured, most: float = 0.0) -> Iterator[tuple[Key, Sweep]]:
    """Clocks (MHz), ascending, times (s) and energies (J) of operations whose clock was swept.

    Args:
        most: the correlation that log time and log clock may have.
    """
    for key, parts in measured.items():
        mhz, whole = parts.mhz, parts.whole
        if len(mhz) < _SWEEP or not mhz[0] or not np.diff(mhz).all():
            continue
        columns = np.hstack([mhz[:, None] * 1.0, whole.time_ns * 1e-9, whole.energy_fj * 1e-15])
        clocks, times, energies = columns.T
        sweeps = energies.all() and np.ptp(times)
        if sweeps and np.corrcoef(np.log(clocks), np.log(times))[0, 1] <= most:
            yield key, (clocks, times, energies)


def jumps(times: FloatArray) -> list[int]:
    """Where time jumps up with the clock and stays there.

    Each of the next five clocks takes longer than the usual one of the last three, though it should
    take less, and by far more than rows differ by chance. An outlier alone is no jump.

    Args:
        times: s, by ascending clock, (n).

    Returns:
        Indices of the last row below each jump, ascending.
    """
    log = np.log(times)
    steps = np.diff(log)
    bends = np.diff(steps)
    # A bend is made of three rows, with weights 1, -2 and 1.
    noise = 1.4826 * float(np.median(np.abs(bends - np.median(bends)))) / 6**0.5
    least = max(_JUMP_NOISE * noise, _JUMP)
    found = [
        (float(steps[k]), k)
        for k in range(_BELOW - 1, len(steps) - _ABOVE + 1)
        if log[k + 1 : k + 1 + _ABOVE].min() - np.median(log[k + 1 - _BELOW : k + 1]) > least
    ]
    taken: list[int] = []
    for _, k in sorted(found, reverse=True):
        if all(abs(k - other) >= _ABOVE for other in taken):
            taken.append(k)
    return sorted(taken)


def smooth_curve(
    clocks: FloatArray, times: FloatArray, energies: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """The nearest times and energies of the shape that physics gives, of one operation.

    Args:
        clocks: SM clocks, MHz, all different and above 0, in any order; n >= 3 of them.
        times: s, above 0, shape (n,).
        energies: J, above 0, shape (n,).

    Returns:
        Times (s) and energies (J), shape (n,) each, in the order of the clocks.
    """
    falling = np.argsort(-clocks)
    # From the highest clock down, so that x, minus the clock's logarithm, ascends.
    x = -np.log(clocks[falling])
    logs = np.log([times[falling], energies[falling]])
    if len(x) >= _SWEEP:
        logs += _joined(x, logs[0])
    slower = _convex(x, logs[0], rising=True)
    dearer = _convex(_exact(x, slower, rising=True), logs[1], rising=False)
    smooth = np.empty((2, len(x)))
    smooth[:, falling] = np.exp([slower, dearer])
    return smooth[0], smooth[1]


def _joined(x: FloatArray, y: FloatArray) -> FloatArray:
    """What to add to y so that the part beyond each jump goes on from the part before it, (n,).

    Args:
        x: ascending, so that clocks fall, (n,).
        y: log of times, (n,).
    """
    scale = np.zeros(len(x))
    for k in reversed(jumps(np.exp(y[::-1]))):
        first = len(x) - 1 - k  # the first row beyond the jump
        before = slice(max(first - _WITHIN - _LEVEL, 0), max(first - _WITHIN, 2))
        beyond = slice(first, first + _LEVEL)
        lines = [np.polyfit(x[part], (y + scale)[part], 1) for part in (before, beyond)]
        scale[first:] += np.polyval(lines[0], x[first]) - np.polyval(lines[1], x[first])
    return scale


def _convex(x: FloatArray, y: FloatArray, *, rising: bool) -> FloatArray:
    """The nearest y that is convex over x; where x stands still, at its beginning, y falls.

    Args:
        x: ascending, shape (n,); only its first values may be equal.
        y: shape (n,).
        rising: whether y shall nowhere fall.
    """
    if _has_shape(x, y, rising):
        return y
    from ortools.linear_solver import pywraplp

    solver = pywraplp.Solver.CreateSolver("GLOP")
    infinity = solver.infinity()
    steps = np.diff(x)
    scale = float(np.mean(steps[steps > 0])) if np.any(steps > 0) else 1.0
    fitted = [solver.NumVar(-infinity, infinity, "") for _ in y]
    off = [solver.NumVar(0.0, infinity, "") for _ in y]

    # Rows are made without operators on variables, which take longer than the solution.
    def bound(least: float, most: float, *terms: tuple[Any, float]) -> None:
        row = solver.RowConstraint(least, most, "")
        for variable, weight in terms:
            row.SetCoefficient(variable, weight)

    for value, distance, target in zip(fitted, off, y.tolist(), strict=True):
        bound(-target, infinity, (distance, 1.0), (value, -1.0))
        bound(target, infinity, (distance, 1.0), (value, 1.0))
    slope = None
    for k, step in enumerate((steps / scale).tolist()):
        if step == 0.0:
            bound(-infinity, 0.0, (fitted[k + 1], 1.0), (fitted[k], -1.0))
            continue
        before, slope = slope, solver.NumVar(0.0 if rising else -infinity, infinity, "")
        bound(0.0, 0.0, (fitted[k + 1], 1.0), (fitted[k], -1.0), (slope, -step))
        if before is not None:
            bound(0.0, infinity, (slope, 1.0), (before, -1.0))
    objective = solver.Objective()
    for distance in off:
        objective.SetCoefficient(distance, 1.0)
    objective.SetMinimization()
    if solver.Solve() != pywraplp.Solver.OPTIMAL:
        raise AssertionError("a convex fit always exists")
    return _exact(x, np.array([value.solution_value() for value in fitted]), rising)


def _exact(x: FloatArray, y: FloatArray, rising: bool) -> FloatArray:
    """The same with the solver's tolerances taken out: slopes that ascend in earnest."""
    flat = int(np.searchsorted(x, x[0], side="right"))
    top = np.minimum.accumulate(y[:flat])
    if flat == len(x):
        return top
    steps = np.diff(x[flat - 1 :])
    slopes = np.maximum.accumulate(np.diff(y[flat - 1 :]) / steps)
    if rising:
        slopes[slopes < _ROUNDING] = 0.0
    return np.concatenate([top, top[-1] + np.cumsum(slopes * steps)])


def _has_shape(x: FloatArray, y: FloatArray, rising: bool) -> bool:
    flat = int(np.searchsorted(x, x[0], side="right"))
    if np.any(np.diff(y[:flat]) > _ROUNDING) or (rising and np.any(np.diff(y) < -_ROUNDING)):
        return False
    left, middle, right = x[flat - 1 : -2], x[flat:-1], x[flat + 1 :]
    if not len(middle):
        return True
    low, high = y[flat - 1 : -2], y[flat + 1 :]
    chord = low + (high - low) * (middle - left) / (right - left)
    return not np.any(y[flat:-1] - chord > _ROUNDING)
