"""Serving profiles and traces that ship with envplan."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from envplan.profile import builtin_paths

#: The serving profile that ships with envplan.
BUILTIN: Final = "h100-llama2-70b"

#: Made weeks by name, and the recorded hour whose requests each is made of.
WEEKS: Final = {"coding-week": "azure-2023-code", "conversation-week": "azure-2023-conversation"}

_SIDECAR: Final = ".meta.json"
_TRACE: Final = ".csv.gz"
_WEEK_SHAPE: Final = ".shape.csv"


def builtin_folder() -> Path:
    """The folder of the serving profiles and traces that ship with envplan."""
    any_profile = next(iter(builtin_paths().values()))
    return any_profile.parent / "serving"


def builtin_profiles() -> dict[str, Path]:
    """The serving profiles that ship with envplan, by name."""
    folder = builtin_folder()
    names = [path.name.removesuffix(_SIDECAR) for path in sorted(folder.glob(f"*{_SIDECAR}"))]
    return {name: folder / f"{name}.csv" for name in names}


def builtin_traces() -> dict[str, Path]:
    """The traces that ship with envplan, by name: two real hours, two real-shaped weeks."""
    folder = builtin_folder()
    paths = [*folder.glob(f"*{_TRACE}"), *folder.glob(f"*{_WEEK_SHAPE}")]
    return {path.name.split(".", 1)[0]: path for path in sorted(paths)}


def week_shape_path(name: str) -> Path:
    """The file of requests by minute that a made week follows."""
    return builtin_folder() / f"{name}{_WEEK_SHAPE}"
