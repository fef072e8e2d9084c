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

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from envplan.profile.part_costs import CostsByOperation, OperationKey, PartCosts
from envplan.units import ENERGY_UNITS_PER_J, in_10fj, ns_from_s

FloatArray = npt.NDArray[np.float64]

#: A step against the shape by less than this part may come from rounding.
_WRONG: Final = 2e-4
#: So many wrong steps of a table are no accident.
_FEWEST_WRONG: Final = 2
#: A table of fewer clocks tells too little.
_FEWEST_CLOCKS: Final = 8
#: Correlation of log time with log clock up to which a table tells of noise. Noise of several
#: percent in every row leaves -0.7 where a sweep without it has -0.95.
_FALLING: Final = -0.5
_ANY_CORRELATION: Final = 0.0
#: Rows below and above a jump that have to agree on it, and those that tell how large it is.
_BELOW, _ABOVE, _LEVEL = 3, 5, 8
#: Rows within a jump: they belong to neither side.
_WITHIN: Final = 3
#: A jump is this many times the noise of a row, and at least this part of the time.
_JUMP_NOISE: Final = 8.0
_JUMP: Final = 0.01
#: The standard deviation of a normal variable over its median absolute deviation.
_STD_PER_MAD: Final = 1.4826
#: Curves that are off their shape by less than this part are as files round them.
_ROUNDING: Final = 1e-6


class ClockSweep(NamedTuple):
    """Time and energy of one operation over many clocks.

    Attributes:
        clocks_mhz: above 0, strictly ascending, shape (n,).
        times_s: above 0, shape (n,).
        energies_j: above 0, shape (n,).
    """

    clocks_mhz: FloatArray
    times_s: FloatArray
    energies_j: FloatArray


class SmoothCurve(NamedTuple):
    """Times and energies of one operation that have the shape of physics.

    Attributes:
        times_s: of each clock, shape (n,).
        energies_j: of each clock, shape (n,).
    """

    times_s: FloatArray
    energies_j: FloatArray


def wrong_steps(
    clocks: FloatArray, times: FloatArray, energies: FloatArray, waiting_w: float
) -> int:
    """The number of steps in one operation's table that go against physics.

    Args:
        clocks: MHz, all different, shape (n,).
        times: s, shape (n,).
        energies: J, shape (n,).
        waiting_w: power of the waiting GPU, W.
    """
    by_clock = np.argsort(clocks)
    time = times[by_clock]
    energy = energies[by_clock]
    time_change = np.diff(time) / time[1:]
    is_slower = time_change > _WRONG

    cost = energy - waiting_w * time
    cost_change = np.diff(cost) / energy[1:]
    valley = int(cost.argmin())
    rises_before_valley = cost_change[:valley] > _WRONG
    falls_after_valley = cost_change[valley:] < -_WRONG
    is_away_from_valley = np.concatenate([rises_before_valley, falls_after_valley])
    is_wrong = is_slower | is_away_from_valley
    return int(is_wrong.sum())


def noise_is_clear(measured_costs: CostsByOperation, waiting_w: Sequence[float]) -> bool:
    """Whether half of the tables that are sweeps of an operation have steps against physics.

    Args:
        measured_costs: of all operations.
        waiting_w: power of the waiting GPU on each stage, W.
    """
    num_sweeps = 0
    num_noisy = 0
    for operation, sweep in _sweeps(measured_costs, _FALLING):
        num_sweeps += 1
        num_wrong = wrong_steps(*sweep, waiting_w[operation.stage])
        if num_wrong >= _FEWEST_WRONG:
            num_noisy += 1
    return num_sweeps > 0 and 2 * num_noisy >= num_sweeps


def jump_clocks(measured_costs: CostsByOperation) -> dict[str, int]:
    """The highest clock below a jump, MHz, of each instruction that has one on some stage."""
    highest_mhz: dict[str, int] = {}
    for operation, sweep in _sweeps(measured_costs, _ANY_CORRELATION):
        below = jumps(sweep.times_s)
        if below:
            clock_mhz = int(sweep.clocks_mhz[below[-1]])
            instruction = operation.instruction
            highest_mhz[instruction] = max(clock_mhz, highest_mhz.get(instruction, 0))
    return highest_mhz


def without_noise(measured_costs: CostsByOperation) -> dict[OperationKey, PartCosts]:
    """The same costs with the noise taken out of each operation without parts that is a sweep."""
    costs = dict(measured_costs)
    for operation, sweep in _sweeps(measured_costs, _ANY_CORRELATION):
        if costs[operation].is_split:
            continue
        clocks_mhz = tuple(sweep.clocks_mhz.tolist())
        times_s = tuple(sweep.times_s.tolist())
        energies_j = tuple(sweep.energies_j.tolist())
        smooth = _smooth_sweep(clocks_mhz, times_s, energies_j)

        times_ns = [ns_from_s(time_s) for time_s in smooth.times_s.tolist()]
        energies_10fj = [in_10fj(energy_j) for energy_j in smooth.energies_j.tolist()]
        costs[operation] = replace(
            costs[operation],
            time_ns=_one_part(times_ns),
            energy_10fj=_one_part(energies_10fj),
        )
    return costs


def _one_part(values: list[int]) -> npt.NDArray[np.int64]:
    """Values of the rows of an operation that has no parts, int64 (rows, 1)."""
    return np.array(values)[:, np.newaxis]


@lru_cache(maxsize=256)  # stages of one model are often measured once
def _smooth_sweep(
    clocks_mhz: tuple[float, ...], times_s: tuple[float, ...], energies_j: tuple[float, ...]
) -> SmoothCurve:
    """The curve of smooth_curve, kept for equal sweeps."""
    clocks = np.array(clocks_mhz)
    times = np.array(times_s)
    energies = np.array(energies_j)
    return smooth_curve(clocks, times, energies)


def _sweeps(
    measured_costs: CostsByOperation, highest_correlation: float
) -> Iterator[tuple[OperationKey, ClockSweep]]:
    """Operations whose clock was swept, with their sweeps.

    Args:
        measured_costs: of all operations.
        highest_correlation: that log time and log clock may have.
    """
    for operation, parts in measured_costs.items():
        sweep = _sweep_or_none(parts)
        if sweep is None:
            continue
        log_clock = np.log(sweep.clocks_mhz)
        log_time = np.log(sweep.times_s)
        correlation = np.corrcoef(log_clock, log_time)[0, 1]
        if correlation <= highest_correlation:
            yield operation, sweep


def _sweep_or_none(parts: PartCosts) -> ClockSweep | None:
    """An operation's costs as a sweep; None where too few clocks or no clocks alone tell them."""
    mhz = parts.frequency_mhz
    whole = parts.whole
    is_controlled = mhz[0] > 0
    has_configs = not np.diff(mhz).all()
    if len(mhz) < _FEWEST_CLOCKS or not is_controlled or has_configs:
        return None
    times_ns = whole.time_ns[:, 0].astype(np.float64)
    energies_10fj = whole.energy_10fj[:, 0].astype(np.float64)
    sweep = ClockSweep(
        clocks_mhz=mhz.astype(np.float64),
        times_s=times_ns * 1e-9,
        energies_j=energies_10fj / ENERGY_UNITS_PER_J,
    )
    is_constant_time = np.ptp(sweep.times_s) == 0
    if is_constant_time or not sweep.energies_j.all():
        return None
    return sweep


def jumps(times: FloatArray) -> list[int]:
    """Rows above which time jumps up with the clock and stays there.

    Each of the next five clocks takes longer than the usual one of the last three, though it should
    take less, and by far more than rows differ by chance. An outlier alone is no jump.

    Args:
        times: s, by ascending clock, shape (n,).

    Returns:
        Indices of the last row below each jump, ascending.
    """
    log_times = np.log(times)
    steps = np.diff(log_times)
    smallest_jump = max(_JUMP_NOISE * _row_noise(steps), _JUMP)
    candidates: list[_Jump] = []
    first_row = _BELOW - 1
    last_row = len(steps) - _ABOVE
    for row in range(first_row, last_row + 1):
        first_above = row + 1
        rows_below = log_times[first_above - _BELOW : first_above]
        rows_above = log_times[first_above : first_above + _ABOVE]
        usual_below = np.median(rows_below)
        fastest_above = rows_above.min()
        if fastest_above - usual_below > smallest_jump:
            candidates.append(_Jump(float(steps[row]), row))
    return _rows_of_highest(candidates)


class _Jump(NamedTuple):
    """A jump of the logarithm of time, and the last row below it."""

    step: float
    row: int


def _rows_of_highest(candidates: Iterable[_Jump]) -> list[int]:
    """Rows of jumps, ascending; those near to each other are one, at the highest step."""
    chosen: list[int] = []
    for jump in sorted(candidates, reverse=True):
        distances = [abs(jump.row - chosen_row) for chosen_row in chosen]
        if min(distances, default=_ABOVE) >= _ABOVE:
            chosen.append(jump.row)
    return sorted(chosen)


def _row_noise(steps: FloatArray) -> float:
    """Standard deviation of a row, from the bends between steps, robust against outliers."""
    bends = np.diff(steps)
    usual_bend = np.median(bends)
    deviations = np.abs(bends - usual_bend)
    usual_deviation = float(np.median(deviations))
    # A bend is made of three rows, with weights 1, -2 and 1.
    return _STD_PER_MAD * usual_deviation / 6**0.5


def smooth_curve(clocks: FloatArray, times: FloatArray, energies: FloatArray) -> SmoothCurve:
    """The nearest times and energies of the shape that physics gives, of one operation.

    Args:
        clocks: SM clocks, MHz, all different and above 0, in any order; n >= 3 of them.
        times: s, above 0, shape (n,).
        energies: J, above 0, shape (n,).

    Returns:
        The curve, in the order of the clocks.
    """
    falling = np.argsort(-clocks)
    # From the highest clock down, so that minus the clock's logarithm ascends.
    slowness = -np.log(clocks[falling])
    log_time = np.log(times[falling])
    log_energy = np.log(energies[falling])
    num_clocks = len(slowness)
    if num_clocks >= _FEWEST_CLOCKS:
        # At its own power, so that energy grows as time does.
        scale = _joining_scale(slowness, log_time)
        log_time = log_time + scale
        log_energy = log_energy + scale

    smooth_time = _convex(slowness, log_time, rising=True)
    exact_time = _with_exact_shape(slowness, smooth_time, rising=True)
    smooth_energy = _convex(exact_time, log_energy, rising=False)

    smooth = SmoothCurve(np.empty(num_clocks), np.empty(num_clocks))
    smooth.times_s[falling] = np.exp(smooth_time)
    smooth.energies_j[falling] = np.exp(smooth_energy)
    return smooth


def _joining_scale(x: FloatArray, y: FloatArray) -> FloatArray:
    """Summands by which the part of y beyond each jump goes on from the part before it, (n,).

    Args:
        x: ascending, so that clocks fall, shape (n,).
        y: log of times, shape (n,).
    """
    scale = np.zeros(len(x))
    times_by_clock = np.exp(y[::-1])
    for last_below in reversed(jumps(times_by_clock)):
        first_beyond = len(x) - 1 - last_below
        end_before = max(first_beyond - _WITHIN, 2)
        begin_before = max(first_beyond - _WITHIN - _LEVEL, 0)
        rows_before = slice(begin_before, end_before)
        rows_beyond = slice(first_beyond, first_beyond + _LEVEL)

        joined = y + scale
        line_before = np.polyfit(x[rows_before], joined[rows_before], deg=1)
        line_beyond = np.polyfit(x[rows_beyond], joined[rows_beyond], deg=1)
        y_before = np.polyval(line_before, x[first_beyond])
        y_beyond = np.polyval(line_beyond, x[first_beyond])
        scale[first_beyond:] += y_before - y_beyond
    return scale


def _convex(x: FloatArray, y: FloatArray, *, rising: bool) -> FloatArray:
    """The nearest y, by absolute deviations, that is convex over x.

    Where x stands still, at its beginning, y falls.

    Args:
        x: ascending, shape (n,); only its first values may be equal.
        y: shape (n,).
        rising: whether y shall nowhere fall.
    """
    if _has_shape(x, y, rising):
        return y
    fit = _LeastAbsoluteFit(y)
    lowest_slope = 0.0 if rising else -fit.infinity
    previous_slope = None
    for row, step in enumerate(_steps_of_mean_one(x).tolist()):
        value = fit.values[row]
        next_value = fit.values[row + 1]
        if step == 0.0:
            fit.require(-fit.infinity, 0.0, (next_value, 1.0), (value, -1.0))
            continue
        slope = fit.variable(lowest_slope)
        # next_value = value + slope * step, and slopes ascend.
        fit.require(0.0, 0.0, (next_value, 1.0), (value, -1.0), (slope, -step))
        if previous_slope is not None:
            fit.require(0.0, fit.infinity, (slope, 1.0), (previous_slope, -1.0))
        previous_slope = slope
    nearest = fit.solve()
    return _with_exact_shape(x, nearest, rising)


def _steps_of_mean_one(x: FloatArray) -> FloatArray:
    """Steps from each x to the next, in units of the mean of those that are above 0, (n - 1,)."""
    steps = np.diff(x)
    forward = steps[steps > 0]
    return steps / np.mean(forward) if len(forward) else steps


class _LeastAbsoluteFit:
    """A linear program: the values nearest to some targets that fulfil linear conditions.

    Rows are made without operators on variables, which take longer than the solution.

    Attributes:
        values: a variable for each target.
        infinity: the bound of what has none.
    """

    def __init__(self, targets: FloatArray) -> None:
        from ortools.linear_solver import pywraplp

        self._solver: Any = pywraplp.Solver.CreateSolver("GLOP")
        self.infinity: float = self._solver.infinity()
        self.values = [self.variable(-self.infinity) for _ in targets]
        self._distances = [self.variable(0.0) for _ in targets]
        rows = zip(self.values, self._distances, targets.tolist(), strict=True)
        for value, distance, target in rows:
            self.require(-target, self.infinity, (distance, 1.0), (value, -1.0))
            self.require(target, self.infinity, (distance, 1.0), (value, 1.0))

    def variable(self, lower: float) -> Any:
        """A new variable with a lower bound."""
        return self._solver.NumVar(lower, self.infinity, "")

    def require(self, lower: float, upper: float, *terms: tuple[Any, float]) -> None:
        """Keep a sum of weighted variables within bounds."""
        row = self._solver.RowConstraint(lower, upper, "")
        for variable, weight in terms:
            row.SetCoefficient(variable, weight)

    def solve(self) -> FloatArray:
        """The values, with the least sum of distances to their targets."""
        objective = self._solver.Objective()
        for distance in self._distances:
            objective.SetCoefficient(distance, 1.0)
        objective.SetMinimization()
        status = self._solver.Solve()
        assert status == self._solver.OPTIMAL, "a convex fit always exists"
        return np.array([value.solution_value() for value in self.values])


def _with_exact_shape(x: FloatArray, y: FloatArray, rising: bool) -> FloatArray:
    """The same y with the solver's tolerances taken out: slopes that truly ascend."""
    num_level = _count_level(x)
    level = np.minimum.accumulate(y[:num_level])
    if num_level == len(x):
        return level
    last_level = num_level - 1
    steps = np.diff(x[last_level:])
    rises = np.diff(y[last_level:])
    slopes = np.maximum.accumulate(rises / steps)
    if rising:
        slopes[slopes < _ROUNDING] = 0.0
    ascending = level[-1] + np.cumsum(slopes * steps)
    return np.concatenate([level, ascending])


def _has_shape(x: FloatArray, y: FloatArray, rising: bool) -> bool:
    """Whether y is convex over x already, up to the rounding of files."""
    num_level = _count_level(x)
    changes = np.diff(y)
    level_changes = changes[: num_level - 1]
    if np.any(level_changes > _ROUNDING):
        return False
    if rising and np.any(changes < -_ROUNDING):
        return False
    # Each point between two others lies on or below their chord.
    inner = np.arange(num_level, len(x) - 1)
    left = inner - 1
    right = inner + 1
    rise = y[right] - y[left]
    run = x[right] - x[left]
    part_of_run = (x[inner] - x[left]) / run
    chord = y[left] + rise * part_of_run
    above_chord = y[inner] - chord
    return not np.any(above_chord > _ROUNDING)


def _count_level(x: FloatArray) -> int:
    """The number of equal values at the beginning of x."""
    return int(np.searchsorted(x, x[0], side="right"))
