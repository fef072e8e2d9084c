"""A profile's file with the noise taken out (see envplan.profile.smoothing)."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from envplan.errors import InputError
from envplan.profile import BLOCKING, RAW_COLUMNS, Profile, profile_table
from envplan.profile.smoothing import smooth_curve

__all__ = ["METHOD", "Change", "nine_digits", "smooth_profile"]

#: What the sidecar says of a smoothed profile.
METHOD: Final = (
    "least absolute deviations in log space: time falls and is convex over the clock, energy is "
    "convex over time"
)

_FEWEST_CLOCKS: Final = 3
_DIGITS: Final = 9
# A value that moves by less than this part has not moved.
_SAME: Final = 1e-9


@dataclass(frozen=True)
class Change:
    """How far smoothing moved the rows of a profile.

    Attributes:
        rows: that have been moved.
        time: the largest relative change of a time.
        energy: the largest relative change of an energy.
    """

    rows: int
    time: float
    energy: float


def smooth_profile(
    path: str | os.PathLike[str], progress: Callable[[int, int, int], None] | None = None
) -> tuple[Profile, Change]:
    """A profile's smoothed version, with the measured values in columns of their own.

    All other cells stay as they are. A profile that is smoothed already is taken from its
    measured values.

    Args:
        path: of the profile CSV.
        progress: called after each operation with (done, of how many, failed).

    Returns:
        The profile, not yet saved, and how far its rows have moved.

    Raises:
        InputError: it cannot be read, or no operation has rows for three clocks.
    """
    source = Profile.read_csv(path, raw=True)
    table = profile_table(path)
    cells = {name: list(texts) for name, texts in table.texts.items()}
    for name, raw in zip(("time", "energy"), RAW_COLUMNS, strict=True):
        known = cells.pop(raw, [""] * len(table))
        cells[raw] = [text or now for text, now in zip(known, cells[name], strict=True)]
        cells[name] = list(cells[raw])
    groups: defaultdict[tuple[Any, ...], list[int]] = defaultdict(list)
    keys = (table.columns[name] for name in ("stage", "instruction", "config", "rank"))
    for row, key in enumerate(zip(*keys, strict=True)):
        groups[key].append(row)
    moved = []
    for done, rows in enumerate(groups.values(), 1):
        if _varies(cells, rows):
            moved.append(_smoothed(cells, rows))
        if progress is not None:
            progress(done, len(groups), 0)
    if not moved:
        raise InputError(
            f"no operation has rows for {_FEWEST_CLOCKS} clocks; there is nothing to smooth",
            path=path,
        )
    change = Change(
        rows=sum(one.rows for one in moved),
        time=max(one.time for one in moved),
        energy=max(one.energy for one in moved),
    )
    said = {
        "method": METHOD,
        "rows_moved": change.rows,
        "largest_change_of_time": round(change.time, 6),
        "largest_change_of_energy": round(change.energy, 6),
    }
    smoothed = Profile.from_rows(
        zip(*cells.values(), strict=True),
        columns=list(cells),
        name=source.name,
        metadata=replace(source.metadata, extra={**source.metadata.extra, "smoothed": said}),
    )
    return smoothed, change


Cells = dict[str, list[str]]


def _varies(cells: Cells, rows: Sequence[int]) -> bool:
    """Whether rows are of an operation whose clock was varied, and has time and energy."""
    return (
        cells["instruction"][rows[0]] != BLOCKING
        and len(rows) >= _FEWEST_CLOCKS
        and all(float(cells[name][row]) > 0 for name in ("frequency", "energy") for row in rows)
    )


def _smoothed(cells: Cells, rows: Sequence[int]) -> Change:
    """Put smooth times and energies into the rows of one operation."""
    clocks, times, energies = (
        np.array([float(cells[name][row]) for row in rows])
        for name in ("frequency", "time", "energy")
    )
    smooth = smooth_curve(clocks, times, energies)
    moved = set[int]()
    largest = []
    for name, before, after in (("time", times, smooth[0]), ("energy", energies, smooth[1])):
        changes = np.abs(after / before - 1)
        for k in np.flatnonzero(changes > _SAME).tolist():
            cells[name][rows[k]] = nine_digits(after[k])
            moved.add(k)
        largest.append(float(changes.max()))
    return Change(len(moved), *largest)


def nine_digits(value: float) -> str:
    """With nine significant digits and no exponent."""
    return np.format_float_positional(value, precision=_DIGITS, fractional=False, trim="-")
