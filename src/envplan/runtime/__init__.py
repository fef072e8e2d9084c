"""What runs beside training: clocks set to a plan, and always given back."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from envplan.runtime.guard import Guard
    from envplan.runtime.profiler import Profiler
    from envplan.runtime.shim import Shim

__all__ = ["Guard", "Profiler", "Shim"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{name.lower()}"), name)
