"""How values show themselves in a notebook: drawn by envplan.plotting when that is asked for.

The planning core imports no plotting; the drawing is found by name when a value is shown.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def drawing(name: str) -> Any:
    """A module of envplan.plotting."""
    return import_module(f"envplan.plotting.{name}")


def png_of(figure: Any) -> bytes:
    """A figure as a notebook shows it."""
    png: bytes = drawing("figures").render(figure, "png", dpi=90)
    return png
