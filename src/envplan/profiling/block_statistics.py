"""Means and standard errors of an operation that was run in consecutive blocks.

Energy comes from a counter that the driver updates about ten times a second, so operations are run
back to back in blocks and the counter is read between blocks. Over consecutive blocks the
uncertainty of the readings cancels but for the first and the last one: its share of the standard
error falls with the time measured, that of real variation with the square root of the blocks. Both
are counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from envplan.profiling.sweep_file import Measurement

__all__ = ["Block", "summarize"]

# A block further from the median than this many standard deviations, as the median deviation
# estimates them, is not of the same distribution (Iglewicz and Hoaglin, 1993).
_OUTLIER_DEVIATIONS: Final = 3.5
_STD_PER_MEDIAN_DEVIATION: Final = 1.4826
_RELATIVE_RESOLUTION: Final = 1e-3  # blocks that differ by less are alike

# Two readings, each late by anything up to a period of the counter: a uniform distribution has a
# twelfth of its squared width as variance.
_READINGS_VARIANCE: Final = 2 / 12

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


class Block(NamedTuple):
    """Repetitions of one operation, run back to back and timed together.

    Attributes:
        repetitions: how many.
        seconds: of all of them.
        joules: of all of them, as the counter has it.
    """

    repetitions: int
    seconds: float
    joules: float


def summarize(blocks: Sequence[Block], counter_period_s: float) -> Measurement:
    """Means and standard errors of consecutive blocks of one operation.

    Args:
        blocks: at least one, in the order they ran in, with no pause between them.
        counter_period_s: of the energy counter.
    """
    repetitions, time_s, energy_j = np.array(blocks).T  # in the order of Block's fields
    time_of_one_s = time_s / repetitions
    energy_of_one_j = energy_j / repetitions

    # Standard deviation of the energy between two readings: that of their delay, times the power.
    reading_delay_std_s = math.sqrt(_READINGS_VARIANCE) * counter_period_s
    reading_std_j = reading_delay_std_s * energy_j.sum() / time_s.sum()
    power_std_w = reading_std_j / time_s.min()
    used = _is_typical(time_of_one_s) & _is_typical(energy_j / time_s, power_std_w)
    num_blocks = int(used.sum())
    num_repetitions = repetitions[used].sum()

    # Variation between blocks beyond what the readings explain is the operation's own.
    energy_variance = _variance(energy_of_one_j[used])
    readings_variance = (reading_std_j * num_blocks / num_repetitions) ** 2
    own_variance_of_mean = max(0.0, energy_variance - readings_variance) / num_blocks
    # Each run of blocks without a gap begins and ends with a reading.
    readings_std_of_mean_j = reading_std_j * math.sqrt(_num_runs(used)) / num_repetitions
    variance_of_mean = own_variance_of_mean + readings_std_of_mean_j**2
    return Measurement(
        time=float(time_s[used].sum() / num_repetitions),
        energy=float(energy_j[used].sum() / num_repetitions),
        time_std=math.sqrt(_variance(time_of_one_s[used])),
        energy_std=math.sqrt(variance_of_mean * num_blocks),
        samples=num_blocks,
    )


def _is_typical(values: FloatArray, noise: float = 0.0) -> BoolArray:
    """Whether each value is no outlier.

    Args:
        values: of blocks, (n,).
        noise: standard deviation that the values have anyway.
    """
    median = np.median(values)
    deviations = np.abs(values - median)
    spread = _STD_PER_MEDIAN_DEVIATION * np.median(deviations)
    least_spread = noise + _RELATIVE_RESOLUTION * median
    is_typical: BoolArray = deviations <= _OUTLIER_DEVIATIONS * max(spread, least_spread)
    return is_typical


def _num_runs(used: BoolArray) -> int:
    """Runs of consecutive blocks that are used."""
    return 1 + int((np.diff(np.flatnonzero(used)) > 1).sum())


def _variance(values: FloatArray) -> float:
    """Sample variance; 0 of a single value."""
    return float(np.var(values, ddof=1)) if len(values) > 1 else 0.0
