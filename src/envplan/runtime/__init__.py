"""Following a plan in training: clocks set as planned, logged, and always given back.

Enters: a frequency plan and a framework's schedule. Leaves: clocks, run logs, measured profiles.
Checks of run logs and the command line may import it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from envplan.devices.guard import Guard
    from envplan.runtime.profiler import Profiler
    from envplan.runtime.shim import Shim

__all__ = ["Guard", "Profiler", "Shim"]

_HOME = {
    "Guard": "envplan.devices.guard",
    "Profiler": "envplan.runtime.profiler",
    "Shim": "envplan.runtime.shim",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
