"""Noise taken out of a measured profile: the nearest curves of the shape that physics gives.

Over the logarithm of the clock the logarithm of an operation's time falls and is convex: it goes
from 1/f where arithmetic bounds it to constant where memory or the power limit does. Over the
logarithm of time the logarithm of energy is convex, too, with one valley: dynamic power falls
faster than time grows, until static power over a longer time outweighs it. Where time does not
change with the clock, energy does not rise when the clock falls.

The curves are fitted by least absolute deviations, a linear program: a row far off, as a throttled
one is, moves them no more than any other. What has the shape already stays as it is, and so do
constant-time rows and those of `blocking`.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from envplan.errors import InputError
from envplan.profile import BLOCKING, RAW_COLUMNS, Profile, profile_table

__all__ = ["METHOD", "Change", "nine_digits", "smooth_curve", "smooth_profile"]

FloatArray = npt.NDArray[np.float64]

#: What the sidecar says of a smoothed profile.
METHOD: Final = (
    "least absolute deviations in log space: time falls and is convex over the clock, energy is "
    "convex over time"
)

# Curves that are off their shape by less than this part are as files round them.
_ROUNDING: Final = 1e-6
_FEWEST_CLOCKS: Final = 3
_DIGITS: Final = 9
# A value that moves by less than this part has not moved.
_SAME: Final = 1e-9


@dataclass(frozen=True)
class Change:
    """How far smoothing moved the rows of a profile.

    Attributes:
        rows: that have been moved.
        time: the largest relative change of a time.
        energy: the largest relative change of an energy.
    """

    rows: int
    time: float
    energy: float


def smooth_curve(
    clocks: Sequence[float], times: Sequence[float], energies: Sequence[float]
) -> tuple[FloatArray, FloatArray]:
    """The nearest times and energies of the shape that physics gives, of one operation.

    Args:
        clocks: SM clocks, MHz, all different and above 0, in any order; n >= 3 of them.
        times: s, above 0, shape (n,).
        energies: J, above 0, shape (n,).

    Returns:
        Times (s) and energies (J), shape (n,) each, in the order of the clocks.
    """
    falling = np.argsort(-np.asarray(clocks, dtype=np.float64))
    # From the highest clock down, so that x, minus the clock's logarithm, ascends.
    x = -np.log(np.asarray(clocks, dtype=np.float64)[falling])
    log_time = np.log(np.asarray(times, dtype=np.float64)[falling])
    log_energy = np.log(np.asarray(energies, dtype=np.float64)[falling])
    times_fitted = _convex(x, log_time, rising=True)
    over = _exact(x, times_fitted, rising=True)
    energies_fitted = _convex(over, log_energy, rising=False)
    smooth_times, smooth_energies = np.empty(len(x)), np.empty(len(x))
    smooth_times[falling] = np.exp(times_fitted)
    smooth_energies[falling] = np.exp(energies_fitted)
    return smooth_times, smooth_energies


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
    for value, distance, target in zip(fitted, off, y.tolist(), strict=True):
        solver.Add(distance >= value - target)
        solver.Add(distance >= target - value)
    slope = None
    for k, step in enumerate((steps / scale).tolist()):
        if step == 0.0:
            solver.Add(fitted[k + 1] <= fitted[k])
            continue
        before, slope = slope, solver.NumVar(0.0 if rising else -infinity, infinity, "")
        solver.Add(fitted[k + 1] - fitted[k] == step * slope)
        if before is not None:
            solver.Add(slope >= before)
    solver.Minimize(solver.Sum(off))
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


def smooth_profile(path: str | os.PathLike[str]) -> tuple[Profile, Change]:
    """A profile's smoothed version, with the measured values in columns of their own.

    All other cells stay as they are. A profile that is smoothed already is taken from its
    measured values.

    Args:
        path: of the profile CSV.

    Returns:
        The profile, not yet saved, and how far its rows have moved.

    Raises:
        InputError: it cannot be read, or no operation has rows for three clocks.
    """
    source = Profile.read_csv(path)
    table = profile_table(path)
    cells = {name: list(texts) for name, texts in table.texts.items()}
    for name, raw in zip(("time", "energy"), RAW_COLUMNS, strict=True):
        known = cells.pop(raw, [""] * len(table))
        cells[raw] = [text or now for text, now in zip(known, cells[name], strict=True)]
        cells[name] = list(cells[raw])
    groups: defaultdict[tuple[Any, ...], list[int]] = defaultdict(list)
    keys = (table.columns[name] for name in ("stage", "instruction", "config", "rank"))
    for row, key in enumerate(zip(*keys, strict=True)):
        groups[key].append(row)
    moved = [_smoothed(cells, rows) for rows in groups.values() if _varies(cells, rows)]
    if not moved:
        raise InputError(
            f"no operation has rows for {_FEWEST_CLOCKS} clocks; there is nothing to smooth",
            path=path,
        )
    change = Change(
        rows=sum(one.rows for one in moved),
        time=max(one.time for one in moved),
        energy=max(one.energy for one in moved),
    )
    said = {
        "method": METHOD,
        "rows_moved": change.rows,
        "largest_change_of_time": round(change.time, 6),
        "largest_change_of_energy": round(change.energy, 6),
    }
    smoothed = Profile.from_rows(
        zip(*cells.values(), strict=True),
        columns=list(cells),
        name=source.name,
        metadata=replace(source.metadata, extra={**source.metadata.extra, "smoothed": said}),
    )
    return smoothed, change


Cells = dict[str, list[str]]


def _varies(cells: Cells, rows: Sequence[int]) -> bool:
    """Whether rows are of an operation whose clock was varied, and has time and energy."""
    return (
        cells["instruction"][rows[0]] != BLOCKING
        and len(rows) >= _FEWEST_CLOCKS
        and all(float(cells[name][row]) > 0 for name in ("frequency", "energy") for row in rows)
    )


def _smoothed(cells: Cells, rows: Sequence[int]) -> Change:
    """Put smooth times and energies into the rows of one operation."""
    clocks, times, energies = (
        [float(cells[name][row]) for row in rows] for name in ("frequency", "time", "energy")
    )
    smooth = smooth_curve(clocks, times, energies)
    moved = set[int]()
    largest = []
    for name, before, after in (("time", times, smooth[0]), ("energy", energies, smooth[1])):
        changes = np.abs(after / np.array(before) - 1)
        for k in np.flatnonzero(changes > _SAME).tolist():
            cells[name][rows[k]] = nine_digits(after[k])
            moved.add(k)
        largest.append(float(changes.max()))
    return Change(len(moved), *largest)


def nine_digits(value: float) -> str:
    """With nine significant digits and no exponent."""
    return np.format_float_positional(value, precision=_DIGITS, fractional=False, trim="-")
