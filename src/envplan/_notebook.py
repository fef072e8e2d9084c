"""How values show themselves: drawn by envplan.plotting when that is asked for.

The planning core imports no plotting; the drawing is found by name when a value is shown.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def drawing(name: str) -> Any:
    """A module of envplan.plotting."""
    return import_module(f"envplan.plotting.{name}")


def html_of(kind: str, value: object) -> str:
    """The HTML of a value of a kind: "frontier", "plan" or "timeline"."""
    html: str = getattr(drawing("notebook"), f"{kind}_html")(value)
    return html
