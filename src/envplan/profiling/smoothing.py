"""A profile's file with the noise taken out (see envplan.profile.smoothing)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from envplan._io.documents import parse_document
from envplan._io.tables import Table, read_table
from envplan.errors import InputError
from envplan.profile import BLOCKING, RAW_COLUMNS, Profile, ProfileRow
from envplan.profile.smoothing import smooth_curve

__all__ = ["Smoothing", "nine_digits", "smooth_profile"]

_METHOD: Final = (
    "least absolute deviations in log space: time falls and is convex over the clock, energy is "
    "convex over time"
)

_MIN_CLOCKS: Final = 3
_DIGITS: Final = 9
# A value that moves by less than this part has not moved.
_LEAST_CHANGE: Final = 1e-9

FloatArray = npt.NDArray[np.float64]
#: Cells of each column of a file, as text, (n,) each.
Cells = dict[str, npt.NDArray[np.object_]]


@dataclass(frozen=True, kw_only=True)
class Smoothing:
    """How far rows have moved: the field `smoothed` of a sidecar.

    Attributes:
        method: in words.
        rows_moved: how many.
        largest_change_of_time: relative to the measured time.
        largest_change_of_energy: relative to the measured energy.
    """

    method: str
    rows_moved: int
    largest_change_of_time: float
    largest_change_of_energy: float

    @classmethod
    def from_sidecar(cls, field: Mapping[str, object]) -> Smoothing:
        """The smoothing that a sidecar states.

        Raises:
            InputError: it is something else.
        """
        return parse_document(dict(field), cls, kind="sidecar's field smoothed")


class _Operation(NamedTuple):
    """The values that rows of one operation have in common, in columns of these names."""

    stage: int
    instruction: str
    config: str
    rank: int


class _Change(NamedTuple):
    """New values of some rows in one column.

    Attributes:
        column: "time" or "energy".
        rows: their indices, (k,).
        values: (k,).
        relative: how far each moves, relative to its measured value, (k,).
    """

    column: str
    rows: npt.NDArray[np.int_]
    values: FloatArray
    relative: FloatArray


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
    cells = _with_measured_columns(table)
    operations = _rows_by_operation(table)
    changes: list[_Change] = []
    for number, (operation, rows) in enumerate(operations.items(), start=1):
        changes += _smooth_operation(operation, np.array(rows), cells)
        if progress is not None:
            progress(number, len(operations), 0)
    if not changes:
        raise InputError(
            f"no operation has rows for {_MIN_CLOCKS} clocks; there is nothing to smooth",
            path=path,
        )
    smoothing = _apply(changes, cells)
    extra = {**source.metadata.extra, "smoothed": asdict(smoothing)}
    return Profile.from_rows(
        zip(*cells.values(), strict=True),
        columns=list(cells),
        name=source.name,
        metadata=replace(source.metadata, extra=extra),
    )


def _with_measured_columns(table: Table[ProfileRow]) -> Cells:
    """The cells of a file; time and energy are the measured ones, and stand once more as such."""
    cells = {name: np.array(texts, dtype=object) for name, texts in table.texts.items()}
    for name, raw_name in zip(("time", "energy"), RAW_COLUMNS, strict=True):
        measured = cells[name]
        if raw_name in cells:  # the file is smoothed already, or some rows of it
            raw = cells.pop(raw_name)
            measured = np.where(raw == "", measured, raw)
        cells[raw_name] = measured
        cells[name] = measured.copy()
    return cells


def _rows_by_operation(table: Table[ProfileRow]) -> dict[_Operation, list[int]]:
    """The rows of each operation, at all its clocks."""
    key_columns = [table.columns[name] for name in _Operation._fields]
    rows: dict[_Operation, list[int]] = {}
    for row, key in enumerate(zip(*key_columns, strict=True)):
        rows.setdefault(_Operation(*key), []).append(row)
    return rows


def _smooth_operation(
    operation: _Operation, rows: npt.NDArray[np.int_], cells: Cells
) -> Iterator[_Change]:
    """The smooth time and energy of an operation whose clock was varied, and that has energies.

    Rows that measure it again at a clock have one smooth value: that of their median.
    """
    frequencies = cells["frequency"][rows].astype(float)
    times = cells["time"][rows].astype(float)
    energies = cells["energy"][rows].astype(float)
    clocks, clock_of_row = np.unique(frequencies, return_inverse=True)
    was_varied = operation.instruction != BLOCKING and len(clocks) >= _MIN_CLOCKS
    has_clocks_and_energies = frequencies.all() and energies.all()
    if not (was_varied and has_clocks_and_energies):
        return
    median_times = _medians(times, clock_of_row, len(clocks))
    median_energies = _medians(energies, clock_of_row, len(clocks))
    smooth_times, smooth_energies = smooth_curve(clocks, median_times, median_energies)
    yield _change("time", rows, times, smooth_times[clock_of_row])
    yield _change("energy", rows, energies, smooth_energies[clock_of_row])


def _change(
    column: str, rows: npt.NDArray[np.int_], measured: FloatArray, smooth: FloatArray
) -> _Change:
    return _Change(column, rows, smooth, relative=np.abs(smooth / measured - 1))


def _medians(values: FloatArray, clock_of_row: npt.NDArray[np.int_], count: int) -> FloatArray:
    """The median of the values at each clock."""
    return np.array([np.median(values[clock_of_row == clock]) for clock in range(count)])


def _apply(changes: list[_Change], cells: Cells) -> Smoothing:
    """Write new values into the cells of rows that move."""
    largest = {"time": 0.0, "energy": 0.0}
    moved = set[int]()
    for change in changes:
        largest[change.column] = max(largest[change.column], float(change.relative.max()))
        is_moved = change.relative > _LEAST_CHANGE
        for row, value in zip(change.rows[is_moved], change.values[is_moved], strict=True):
            cells[change.column][row] = nine_digits(value)
            moved.add(int(row))
    return Smoothing(
        method=_METHOD,
        rows_moved=len(moved),
        largest_change_of_time=round(largest["time"], 6),
        largest_change_of_energy=round(largest["energy"], 6),
    )


def nine_digits(value: float) -> str:
    """A number with nine significant digits and no exponent."""
    return np.format_float_positional(value, precision=_DIGITS, fractional=False, trim="-")
