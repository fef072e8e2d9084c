"""What all GPUs draw at each moment of a replayed plan, in whole microwatts.

An operation draws its average power throughout, rounded up to a whole uW; a stage between two
operations draws its blocking power. Peaks reckoned so are never below the exact ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from envplan.pipeline import Pipeline
from envplan.profile import OptionTable

__all__ = ["PowerSteps", "least_peak_uw", "option_powers_uw", "peak_uw", "power_steps"]


class PowerSteps(NamedTuple):
    """Power as a step function of time, of one GPU a stage.

    Attributes:
        times_ns: when it changes, ascending from 0 to the makespan, (k + 1).
        power_uw: between each time and the next, uW, (k).
    """

    times_ns: NDArray[np.int64]
    power_uw: NDArray[np.int64]


def option_powers_uw(table: OptionTable) -> NDArray[np.int64]:
    """Average power of each option, rounded up, uW, (n)."""
    return -(-table.energy_fj // table.time_ns)


def power_steps(
    pipeline: Pipeline,
    starts_ns: NDArray[np.int64],
    time_ns: NDArray[np.int64],
    power_uw: NDArray[np.int64],
    blocking_power_uw: Sequence[int],
) -> PowerSteps:
    """Power over time of operations that start when they start.

    Args:
        starts_ns, time_ns, power_uw: of each operation, (N).
        blocking_power_uw: of each stage, (num_stages,), uW.
    """
    stage = np.repeat(np.arange(pipeline.num_stages), np.diff(pipeline.stage_begin))
    waiting = np.array(blocking_power_uw, np.int64)
    rises = power_uw - waiting[stage]
    times, places = np.unique(
        np.concatenate([[0], starts_ns, starts_ns + time_ns]), return_inverse=True
    )
    steps = np.zeros(len(times), np.int64)
    count = len(time_ns)
    np.add.at(steps, places[1 : count + 1], rises)
    np.subtract.at(steps, places[count + 1 :], rises)
    return PowerSteps(times, waiting.sum() + np.cumsum(steps)[:-1])


def peak_uw(
    pipeline: Pipeline,
    tables: Sequence[OptionTable],
    options: NDArray[np.int32],
    starts_ns: NDArray[np.int64],
    blocking_power_uw: Sequence[int],
) -> int:
    """The most that one GPU a stage draws together at a time, uW.

    Args:
        tables: the option table of each operation, (N).
        options: its row for each operation, (N).
        starts_ns: when each operation starts, (N).
        blocking_power_uw: of each stage, (num_stages,), uW.
    """
    rows = list(zip(tables, options.tolist(), strict=True))
    time = np.array([table.time_ns[row] for table, row in rows], np.int64)
    energy = np.array([table.energy_fj[row] for table, row in rows], np.int64)
    steps = power_steps(pipeline, starts_ns, time, -(-energy // time), blocking_power_uw)
    return int(steps.power_uw.max())


def least_peak_uw(
    pipeline: Pipeline, tables: Sequence[OptionTable], blocking_power_uw: Sequence[int]
) -> int:
    """A power that every plan reaches at some moment, uW, of one GPU a stage.

    While an operation runs it draws at least the power of its thriftiest option, and every other
    stage at least its blocking power or that of its thriftiest operation, whichever is less.
    """
    least: dict[int, int] = {}
    for table in tables:
        if id(table) not in least:
            least[id(table)] = int(option_powers_uw(table).min())
    highest = [0] * pipeline.num_stages
    floor = [int(power) for power in blocking_power_uw]
    for op, table in zip(pipeline.operations, tables, strict=True):
        power = least[id(table)]
        highest[op.stage] = max(highest[op.stage], power)
        floor[op.stage] = min(floor[op.stage], power)
    return max(sum(floor) - low + high for low, high in zip(floor, highest, strict=True))
