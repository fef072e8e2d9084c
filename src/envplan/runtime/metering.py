"""Rows of a profile from operations as they ran and an energy counter read meanwhile.

Operations may be shorter than the time between two updates of the counter. A thread therefore
reads it again and again (energy_log.py), what the GPU worked on is laid out in time
(work_timeline.py), and the powers of the kinds of work are told apart by a regression
(power_regression.py).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from envplan.profile import BLOCKING
from envplan.profiling.sweep_file import Row
from envplan.runtime.energy_log import Observations
from envplan.runtime.power_regression import PowerEstimate, estimate_powers
from envplan.runtime.work_timeline import OtherWork, Span, WorkKind, work_timeline

__all__ = ["METHOD", "MeasuredWindow", "PartRow", "measure_window"]

METHOD: Final = (
    "energy counter read while training runs; power of each kind of work by linear regression of "
    "the readings on the time spent on each, towards their mean where the readings do not tell"
)


@dataclass(frozen=True)
class PartRow(Row):
    """A row of an operation, or of a part of it."""

    part: str = ""


@dataclass(frozen=True)
class MeasuredWindow:
    """The measurements of some iterations at one clock.

    Attributes:
        rows: of the profile.
        energy_j: of the rank's operations in an iteration.
        energy_error_j: its standard error.
        busy_s: time of the same.
        num_microbatches: of an iteration.
    """

    rows: list[PartRow]
    energy_j: float
    energy_error_j: float
    busy_s: float
    num_microbatches: int


def measure_window(
    iterations: Sequence[Sequence[Span[float]]],
    observations: Observations,
    stages: Sequence[int],
    clock_mhz: int | None,
) -> MeasuredWindow | None:
    """Make rows of iterations at one clock; None if the counter has not told anything.

    Args:
        iterations: the operations of each, in order.
        observations: of the GPU meanwhile.
        stages: the model stage of each chunk.
        clock_mhz: as asked for; None: as observed.

    Raises:
        InputError: an operation is of a chunk that has no stage.
    """
    timeline = work_timeline(iterations, stages)
    kinds = list(timeline.durations_s)
    # Operations come first, in order of appearance: so do their powers in the estimate.
    all_work = [*kinds, *OtherWork]
    number_of = {work: number for number, work in enumerate(all_work)}
    numbers = [number_of[work] for work in timeline.work]
    estimate = estimate_powers(observations, timeline.edges_s, numbers, len(all_work))
    frequency_mhz = clock_mhz or observations.clock_mhz
    if estimate is None or not frequency_mhz:
        return None
    powers_w = estimate.powers_w.tolist()
    errors_w = np.sqrt(np.diag(estimate.covariance)).tolist()
    measurements = []
    for number, kind in enumerate(kinds):
        durations_s = timeline.durations_s[kind]
        measurements.append(_operation_row(kind, durations_s, powers_w[number], errors_w[number]))
    energy = _energy_of_iteration(measurements, estimate, len(iterations))
    waiting = number_of[OtherWork.WAITING]
    measurements.append(_waiting_row(kinds[0].stage, powers_w[waiting], errors_w[waiting]))
    num_microbatches = sum(
        span.instruction == "forward" and span.chunk == 0 for span in iterations[0]
    )
    return MeasuredWindow(
        rows=[_in_window(row, frequency_mhz, observations) for row in measurements],
        energy_j=energy.mean_j,
        energy_error_j=energy.error_j,
        busy_s=energy.busy_s,
        num_microbatches=num_microbatches,
    )


class _KindRow(NamedTuple):
    """The measurements of one kind of work, whatever the clock."""

    kind: WorkKind
    samples: int
    time_s: float
    time_std_s: float
    energy_j: float
    energy_std_j: float


class _IterationEnergy(NamedTuple):
    """The energy of the rank's operations in an iteration.

    Attributes:
        mean_j: over the iterations.
        error_j: standard error of that.
        busy_s: time of the same.
    """

    mean_j: float
    error_j: float
    busy_s: float


def _energy_of_iteration(
    measurements: Sequence[_KindRow], estimate: PowerEstimate, num_iterations: int
) -> _IterationEnergy:
    """The energy of an iteration's operations, and how sure it is.

    Its variance is that of the powers, by their covariance, and that of the mean of operations that
    take longer or shorter.

    Args:
        measurements: of the K kinds of operations.
        estimate: of their powers, which come before those of other work.
        num_iterations: that were measured.
    """
    num_kinds = len(measurements)
    seconds = np.array([row.time_s * row.samples / num_iterations for row in measurements])
    powers_w = estimate.powers_w[:num_kinds]
    covariance = estimate.covariance[:num_kinds, :num_kinds]
    time_variance = 0.0
    for row, power_w in zip(measurements, powers_w, strict=True):
        time_variance += (power_w * row.time_std_s) ** 2 * row.samples / num_iterations**2
    variance = seconds @ covariance @ seconds + time_variance
    return _IterationEnergy(
        mean_j=float(powers_w @ seconds),
        error_j=math.sqrt(variance),
        busy_s=float(seconds.sum()),
    )


def _operation_row(
    kind: WorkKind, durations_s: Sequence[float], power_w: float, error_w: float
) -> _KindRow:
    mean_s = statistics.fmean(durations_s)
    spread_s = statistics.pstdev(durations_s)
    samples = len(durations_s)
    # The error of the power is the same for all samples: it does not become less by averaging.
    energy_std_j = math.hypot(power_w * spread_s, error_w * mean_s * math.sqrt(samples))
    return _KindRow(kind, samples, mean_s, spread_s, power_w * mean_s, energy_std_j)


def _waiting_row(stage: int, power_w: float, error_w: float) -> _KindRow:
    """The row of waiting, of which only energy over time counts."""
    return _KindRow(WorkKind(stage, BLOCKING, ""), 1, 1.0, 0.0, power_w, error_w)


def _in_window(row: _KindRow, frequency_mhz: int, observations: Observations) -> PartRow:
    return PartRow(
        stage=row.kind.stage,
        instruction=row.kind.instruction,
        part=row.kind.part,
        frequency=frequency_mhz,
        samples=row.samples,
        time=row.time_s,
        energy=row.energy_j,
        time_std=row.time_std_s,
        energy_std=row.energy_std_j,
        clock=observations.clock_mhz,
        throttle="+".join(sorted(observations.throttle)),
    )
