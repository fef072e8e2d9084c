"""Who is a straggler, and for how long: the decision, without the exchange of times.

Perseus (SOSP 2024, section 4.2) slows the other pipelines down when one of them is late, because
they would wait for it anyway. A pipeline that has been slowed must not take its own slowness, or
that of others slowed likewise, for a straggler: times are compared as if each pipeline followed
its fastest plan.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

#: Others must take so many times as long as we do, _PATIENCE steps in a row; then they are late
#: until they take less than _LEAVE times as long.
_ENTER: Final = 1.05
_LEAVE: Final = 1.02
_PATIENCE: Final = 3
#: Relative change of a straggler's time that is not worth another plan.
BAND: Final = 0.02


class StragglerDetector:
    """Hysteresis: slow to believe that there is a straggler, quick to believe that it has gone.

    Attributes:
        slowdown: what is believed now: the straggler's time over ours; 1 without one.
    """

    def __init__(self) -> None:
        self.slowdown = 1.0
        self._seen: deque[float] = deque(maxlen=_PATIENCE)

    def observe(self, ours: float, slowest: float) -> float:
        """Take note of one step, and say what to believe.

        Args:
            ours: time of our pipeline, as if it followed its fastest plan, s.
            slowest: that of the slowest of the others, s.

        Returns:
            The straggler's time over ours that can be relied on; 1 without a straggler.
        """
        late = slowest / ours
        self._seen.append(late)
        if late < self.slowdown * (1 - BAND):
            # Running slower than the slowest costs everybody time: mend it at once.
            self.slowdown = late if late >= _LEAVE else 1.0
        elif len(self._seen) == _PATIENCE:
            surely = min(self._seen)
            if surely >= max(_ENTER, self.slowdown * (1 + BAND)):
                self.slowdown = surely
        return self.slowdown


def before_reduction(operations: Sequence[tuple[str, int, int]]) -> int:
    """How many operations, from the first on, come before gradients can meet other replicas'.

    DistributedDataParallel and its like reduce a chunk's gradients within its last backward, which
    therefore waits for the slowest replica, as does all that comes after it. What comes before
    takes as long as this pipeline makes it. All of them count where nothing comes before.

    Args:
        operations: (instruction, microbatch, chunk) in execution order.
    """
    last = {
        chunk: position
        for position, (instruction, _, chunk) in enumerate(operations)
        if instruction.startswith("backward")
    }
    return min(last.values(), default=0) or len(operations)
