"""Who is a straggler, and for how long: the decision, without the exchange of times.

Perseus (SOSP 2024, section 4.2) slows the other pipelines down when one of them is late, because
they would wait for it anyway. A pipeline that has been slowed must not take its own slowness, or
that of others slowed alike, for a straggler: times are compared as if each pipeline followed its
fastest plan.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from envplan.enforce.freqplan import OperationKey

#: Others must take so many times as long as we do, in _ITERATIONS_TO_BELIEVE iterations in a row;
#: then they are late until they take less than _LEAVE_RATIO times as long.
_ENTER_RATIO: Final = 1.05
_LEAVE_RATIO: Final = 1.02
_ITERATIONS_TO_BELIEVE: Final = 3
#: Relative change of a straggler's time that is not worth another plan.
BAND: Final = 0.02


class StragglerDetector:
    """Decides with hysteresis: slow to believe in a straggler, quick to believe that it has gone.

    Attributes:
        slowdown: the believed ratio of the straggler's time to ours; 1 without a straggler.
    """

    def __init__(self) -> None:
        self.slowdown = 1.0
        self._recent_ratios: deque[float] = deque(maxlen=_ITERATIONS_TO_BELIEVE)

    def observe(self, own_time_s: float, slowest_other_s: float) -> float:
        """Take the times of one iteration into account.

        Args:
            own_time_s: of our pipeline, as if it followed its fastest plan.
            slowest_other_s: of the slowest of the others, likewise.

        Returns:
            The slowdown that can be relied on; 1 without a straggler.
        """
        ratio = slowest_other_s / own_time_s
        self._recent_ratios.append(ratio)
        if ratio < self.slowdown * (1 - BAND):
            # Running slower than the slowest costs everybody time: mend it at once.
            self.slowdown = ratio if ratio >= _LEAVE_RATIO else 1.0
        elif len(self._recent_ratios) == _ITERATIONS_TO_BELIEVE:
            lowest_ratio = min(self._recent_ratios)
            if lowest_ratio >= max(_ENTER_RATIO, self.slowdown * (1 + BAND)):
                self.slowdown = lowest_ratio
        return self.slowdown


def num_before_reduction(operations: Sequence[OperationKey]) -> int:
    """How many operations, from the first on, come before gradients can meet other replicas'.

    DistributedDataParallel and its like reduce a chunk's gradients within its last backward, which
    therefore waits for the slowest replica, as does all that comes after it. What comes before
    takes as long as this pipeline makes it. All of them count where nothing comes before.

    Args:
        operations: in execution order.
    """
    last_backward = {
        operation.chunk: position
        for position, operation in enumerate(operations)
        if operation.instruction.startswith("backward")
    }
    num_before = min(last_backward.values(), default=0)
    return num_before if num_before > 0 else len(operations)
