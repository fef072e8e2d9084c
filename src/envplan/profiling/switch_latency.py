"""The moment at which a change of clock has settled, from the durations of equal slices of work.

A kernel does equal work in slices of less than 1 ms while the clock is changed. A slice's duration
tells the clock that it ran at. The slices are those of Velička, Vysocký and Říha, "Methodology for
GPU Frequency Switching Latency Measurement" (arXiv 2502.20075); the statistics are envplan's own.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["settled_after"]

_LEAST_SHARE_AT_TARGET: Final = 0.8  # of the slices after the change

FloatArray = npt.NDArray[np.float64]


def settled_after(
    begins_s: FloatArray,
    durations_s: FloatArray,
    *,
    requested_s: float,
    target_duration_s: float,
    tolerance_s: float,
) -> float | None:
    """Time from a request until slices last as long as at the target clock, in s.

    The change is put where it contradicts the fewest slices: one before it contradicts it with a
    duration within the tolerance of the target's, one after it with a duration outside. So ramps
    count as not settled. A single outlier moves the change by a slice at most, and only where it is
    the first slice at the target. The first of equal places is taken.

    Args:
        begins_s: when each slice began, ascending, on the clock of `requested_s`.
        durations_s: of each slice.
        requested_s: when the change was asked for.
        target_duration_s: of a slice at the target clock, measured while that is locked.
        tolerance_s: how far from it a slice at the target clock may be.

    Returns:
        The time, to within a slice; None where the slices do not settle.
    """
    after_request = begins_s >= requested_s
    begins_s = begins_s[after_request]
    at_target = np.abs(durations_s[after_request] - target_duration_s) <= tolerance_s
    num_slices = len(at_target)
    if num_slices == 0:
        return None
    at_target_before = np.concatenate([[0], np.cumsum(at_target)])
    away_after = np.concatenate([np.cumsum(~at_target[::-1])[::-1], [0]])
    first_settled = int(np.argmin(at_target_before + away_after))
    if first_settled == num_slices:
        return None
    if at_target[first_settled:].mean() < _LEAST_SHARE_AT_TARGET:
        return None
    return float(begins_s[first_settled] - requested_s)
