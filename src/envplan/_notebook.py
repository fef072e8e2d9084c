"""How values show themselves in a notebook: drawn by envplan.plotting when that is asked for.

The planning core imports no plotting; the drawing is found by name when a notebook shows a value.
"""

from __future__ import annotations

from importlib import import_module


def html_of(kind: str, value: object) -> str:
    """The HTML of a value of a kind: "frontier", "plan" or "timeline"."""
    html: str = getattr(import_module("envplan.plotting.notebook"), f"{kind}_html")(value)
    return html
