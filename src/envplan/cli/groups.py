"""Groups of options: frozen dataclasses whose fields are options."""

from __future__ import annotations

import dataclasses
from typing import Any


def options_given(group: Any, *names: str) -> list[str]:
    """The options of a group that differ from their defaults, as typed: `--time-limit`.

    Args:
        names: of the fields that are meant; default: all.
    """
    fields = [field for field in dataclasses.fields(group) if not names or field.name in names]
    return [
        f"--{field.name.replace('_', '-')}"
        for field in fields
        if getattr(group, field.name) != field.default
    ]
