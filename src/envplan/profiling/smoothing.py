"""A profile's file with the noise taken out (see envplan.profile.smoothing)."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import numpy as np

from envplan._io.tables import read_table
from envplan.errors import InputError
from envplan.profile import BLOCKING, RAW_COLUMNS, Profile, ProfileRow
from envplan.profile.smoothing import smooth_curve

__all__ = ["nine_digits", "smooth_profile"]

_METHOD: Final = (
    "least absolute deviations in log space: time falls and is convex over the clock, energy is "
    "convex over time"
)

_FEWEST_CLOCKS: Final = 3
_DIGITS: Final = 9
# A value that moves by less than this part has not moved.
_SAME: Final = 1e-9


def smooth_profile(
    path: str | os.PathLike[str], progress: Callable[[int, int, int], None] | None = None
) -> Profile:
    """A profile's smoothed version, with the measured values in columns of their own.

    All other cells stay as they are. A profile that is smoothed already is taken from its
    measured values. The field `smoothed` of the sidecar says how far rows have moved.

    Args:
        path: of the profile CSV.
        progress: called after each operation with (done, of how many, failed).

    Returns:
        The profile, not yet saved.

    Raises:
        InputError: it cannot be read, or no operation has rows for three clocks.
    """
    source = Profile.read_csv(path, raw=True)
    table = read_table(path, ProfileRow, kind="a profile")
    cells = {name: np.array(texts, dtype=object) for name, texts in table.texts.items()}
    for name, raw in zip(("time", "energy"), RAW_COLUMNS, strict=True):
        known = cells.pop(raw, "")
        cells[raw] = np.where(known == "", cells[name], known)
        cells[name] = cells[raw].copy()
    groups: defaultdict[tuple[Any, ...], list[int]] = defaultdict(list)
    keys = (table.columns[name] for name in ("stage", "instruction", "config", "rank"))
    for row, key in enumerate(zip(*keys, strict=True)):
        groups[key].append(row)
    largest: dict[str, float] = {}
    moved = set[int]()
    for done, (key, rows) in enumerate(groups.items(), 1):
        frequencies, times, energies = (
            cells[name][rows].astype(float) for name in ("frequency", "time", "energy")
        )
        clocks, of = np.unique(frequencies, return_inverse=True)
        # An operation whose clock was varied, and that has energies.
        if key[1] != BLOCKING and len(clocks) >= _FEWEST_CLOCKS and (frequencies * energies).all():
            # Rows that measure it again have one smooth value: that of their median.
            middle = [
                np.array([np.median(values[of == k]) for k in range(len(clocks))])
                for values in (times, energies)
            ]
            smooth = smooth_curve(clocks, *middle)
            for name, before, after in (
                ("time", times, smooth[0][of]),
                ("energy", energies, smooth[1][of]),
            ):
                changes = np.abs(after / before - 1)
                largest[name] = max(largest.get(name, 0.0), float(changes.max()))
                for k in np.flatnonzero(changes > _SAME).tolist():
                    cells[name][rows[k]] = nine_digits(after[k])
                    moved.add(rows[k])
        if progress is not None:
            progress(done, len(groups), 0)
    if not largest:
        raise InputError(
            f"no operation has rows for {_FEWEST_CLOCKS} clocks; there is nothing to smooth",
            path=path,
        )
    said = {
        "method": _METHOD,
        "rows_moved": len(moved),
        "largest_change_of_time": round(largest["time"], 6),
        "largest_change_of_energy": round(largest["energy"], 6),
    }
    return Profile.from_rows(
        zip(*cells.values(), strict=True),
        columns=list(cells),
        name=source.name,
        metadata=replace(source.metadata, extra={**source.metadata.extra, "smoothed": said}),
    )


def nine_digits(value: float) -> str:
    """With nine significant digits and no exponent."""
    return np.format_float_positional(value, precision=_DIGITS, fractional=False, trim="-")
