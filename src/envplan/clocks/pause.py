"""How long something must take to get a clock of its own."""

from __future__ import annotations

from typing import Final

#: Where what follows an iteration takes less, no clock is set for it, ns: GPUs take 5 to 25 ms to
#: change theirs (arXiv 2502.20075).
MIN_PAUSE_NS: Final = 10_000_000
