"""What load to expect next: the same time a week ago, or a day ago, scaled to the last epoch.

For each class, the load of a slot to come is what it was a week earlier, or a day where the trace
is not that old, times how much the last epoch differed from its own counterpart back then, by a
factor of at most two either way. Where there is no such past, it is what the last epoch had.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Expected", "expect"]

FloatArray = npt.NDArray[np.float64]

_DAY_S: Final = 86_400.0
_SEASONS_S: Final = (7 * _DAY_S, _DAY_S)
_MOST: Final = 2.0  # factor between the last epoch and its counterpart


class Expected(NamedTuple):
    """Load by class over some slots to come, tokens/s: on average, and at its peak."""

    mean: FloatArray
    peak: FloatArray


def expect(seen: FloatArray, ahead: int, epoch: int, step_s: float) -> Expected:
    """What to expect of the next slots.

    Args:
        seen: tokens/s so far, (slots, classes), at least one slot.
        ahead: slots to look ahead.
        epoch: slots of an epoch, as the last ones of `seen`.
        step_s: length of a slot, s.
    """
    now = len(seen)
    last = seen[-epoch:]
    for season in _SEASONS_S:
        back = round(season / step_s)
        if back >= ahead and now - back - len(last) >= 0:
            then = seen[now - back : now - back + ahead]
            counterpart = seen[now - back - len(last) : now - back].mean(axis=0)
            level = last.mean(axis=0)
            known = counterpart > 0
            factor = np.ones_like(level)
            factor[known] = np.clip(level[known] / counterpart[known], 1 / _MOST, _MOST)
            slots = then * factor
            return Expected(slots.mean(axis=0), slots.max(axis=0))
    return Expected(last.mean(axis=0), last.max(axis=0))
