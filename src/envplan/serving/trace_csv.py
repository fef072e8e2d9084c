"""Reading traces: CSV files, plain or gzipped, in order of time.

A row is a request or, with a column `requests`, many alike, spread evenly from its timestamp to the
next one: then all timestamps are equally far apart. docs/serving.md ("Traces") names the columns.
`timestamp` is in seconds, or a date and time as in 2026-11-16T09:00:00, with or without fractions
and zone. Files are read in pieces: 27 million requests take about half a gigabyte, and nothing else
grows.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np
import numpy.typing as npt

from envplan._io.files import ReadLimits, refuse_slip, stream
from envplan.errors import InputError, shown
from envplan.serving.classes import (
    CLASSES,
    ClassIndices,
    FloatArray,
    IntArray,
    classify_requests,
)

if TYPE_CHECKING:
    from pandas import DataFrame

_ROWS_PER_PIECE: Final = 500_000
_LIMITS: Final = ReadLimits(max_bytes=16 * 2**30, longest_line=2**16)
_MAX_SILENCE_S: Final = 6 * 3600.0
_MAX_DURATION_S: Final = 200_000 * 60.0
_MAX_REQUESTS: Final = 100_000_000
_MAX_TOKENS: Final = 10_000_000  # and the most requests of a row
_MAX_TIMESTAMP_S: Final = 1e11  # beyond any date in seconds since 1970, before all in milliseconds
_EVEN_STEPS: Final = 1e-6  # relative difference of steps that are still equally long

_TIMESTAMP: Final = "timestamp"
_CLASS: Final = "class"
_INPUT_TOKENS: Final = "input_tokens"
_OUTPUT_TOKENS: Final = "output_tokens"
_REQUESTS: Final = "requests"
_LENGTHS: Final = (_INPUT_TOKENS, _OUTPUT_TOKENS)
_COLUMNS: Final = (_TIMESTAMP, _CLASS, *_LENGTHS, _REQUESTS)

#: How others name the columns: a dictionary for each source of traces.
_FOREIGN_COLUMNS: Final[Mapping[str, Mapping[str, str]]] = {
    "Azure": {"ContextTokens": _INPUT_TOKENS, "GeneratedTokens": _OUTPUT_TOKENS},
    "BurstGPT": {"Request tokens": _INPUT_TOKENS, "Response tokens": _OUTPUT_TOKENS},
    "Vidur": {
        "arrived_at": _TIMESTAMP,
        "num_prefill_tokens": _INPUT_TOKENS,
        "num_decode_tokens": _OUTPUT_TOKENS,
    },
    "splitwise-sim": {
        "arrival_timestamp": _TIMESTAMP,
        "prompt_size": _INPUT_TOKENS,
        "token_size": _OUTPUT_TOKENS,
    },
}
_FOREIGN_NAMES: Final = [name for columns in _FOREIGN_COLUMNS.values() for name in columns]
_OUR_NAMES: Final = {
    foreign.lower(): ours
    for columns in _FOREIGN_COLUMNS.values()
    for foreign, ours in columns.items()
}

#: The columns of a file, by our names, as the file writes them.
WrittenNames = Mapping[str, str]
AnyScalar = TypeVar("AnyScalar", bound=np.generic)


@dataclass(frozen=True, eq=False)
class RequestTable:
    """Requests in order of time, (n,) each.

    Attributes:
        arrival_s: since the first of them, ascending.
        class_index: of each.
        input_tokens: of each; None where the file gives classes instead.
        output_tokens: the same.
        duration_s: how long the file covers; None: up to its last request.
    """

    arrival_s: FloatArray
    class_index: ClassIndices
    input_tokens: IntArray | None
    output_tokens: IntArray | None
    duration_s: float | None = None


def read_requests(path: Path) -> RequestTable:
    """Read and check the requests of a trace.

    Raises:
        InputError: naming file, line, column and what to do.
    """
    rows = _Rows(path)
    _read_in_pieces(path, rows)
    if not len(rows):
        raise InputError("has no rows", path=path)
    table = rows.table()
    span_s = table.arrival_s[-1]
    if span_s > _MAX_DURATION_S:
        raise InputError(
            f"spans {span_s:g} s; at most {_MAX_DURATION_S:g} can be replayed", path=path
        )
    if rows.request_counts is None:
        return table
    return _expand(table, rows.request_counts, path)


def _read_in_pieces(path: Path, rows: _Rows) -> None:
    """Read a file into rows.

    Raises:
        InputError: it cannot be read, is no CSV table, or a row is refused.
    """
    import pandas as pd

    try:
        with stream(path, _LIMITS) as file, warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # cells without a column
            pieces = pd.read_csv(
                file, chunksize=_ROWS_PER_PIECE, skipinitialspace=True, index_col=False
            )
            for frame in pieces:
                rows.append(frame)
    except pd.errors.EmptyDataError:
        pass  # there are no rows
    except (EOFError, OSError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot be read to its end ({reason})", path=path) from None
    except UnicodeDecodeError:
        raise InputError("is not a text file in UTF-8", path=path) from None
    except (ValueError, pd.errors.ParserWarning) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"is not a CSV table ({reason})", path=path) from None


@dataclass(frozen=True, eq=False)
class _Piece:
    """Some rows of a file, checked; arrays of one length.

    Attributes:
        time_s: since 1970, or since whenever the file counts.
        class_index: of each row.
        input_tokens: of each row; None where the file gives classes instead.
        output_tokens: the same.
        request_counts: requests that each row stands for; None: one.
    """

    time_s: FloatArray
    class_index: ClassIndices
    input_tokens: IntArray | None
    output_tokens: IntArray | None
    request_counts: FloatArray | None


class _Rows:
    """The rows of a file, put together from pieces without ever being in memory twice."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._names: WrittenNames = {}
        self._length = 0
        self._time_s = np.empty(0, np.float64)
        self._class_index = np.empty(0, np.uint8)
        self._input_tokens = np.empty(0, np.int32)
        self._output_tokens = np.empty(0, np.int32)
        self._request_counts = np.empty(0, np.float64)

    def __len__(self) -> int:
        return self._length

    @property
    def request_counts(self) -> FloatArray | None:
        """Requests that each row stands for; None: one."""
        return self._request_counts if _REQUESTS in self._names else None

    def append(self, frame: DataFrame) -> None:
        """Check and add some rows.

        Raises:
            InputError: a column or a row is refused, or there are too many rows.
        """
        self._names = self._names or _named_columns(frame.columns, self._path)
        frame.columns = list(self._names)
        if frame.empty:
            return
        previous_s = self._time_s[-1] if self._length else None
        first_line = self._length + 2  # the header is the first
        piece = _PieceReader(frame, self._names, self._path, first_line).read(previous_s)
        self._length += len(frame)
        self._extend(self._time_s, piece.time_s)
        self._extend(self._class_index, piece.class_index)
        self._extend(self._input_tokens, piece.input_tokens)
        self._extend(self._output_tokens, piece.output_tokens)
        self._extend(self._request_counts, piece.request_counts)
        if self._length > _MAX_REQUESTS:
            raise InputError(f"has more than {_MAX_REQUESTS} rows", path=self._path)

    def _extend(
        self, column: npt.NDArray[AnyScalar], values: npt.NDArray[AnyScalar] | None
    ) -> None:
        """Grow a column in place to the new length."""
        if values is not None:
            column.resize(self._length, refcheck=False)
            column[-len(values) :] = values

    def table(self) -> RequestTable:
        """The rows as requests; their times start at 0."""
        self._time_s -= self._time_s[0]
        has_lengths = len(self._input_tokens) > 0
        return RequestTable(
            arrival_s=self._time_s,
            class_index=self._class_index,
            input_tokens=self._input_tokens if has_lengths else None,
            output_tokens=self._output_tokens if has_lengths else None,
        )


def _named_columns(columns: Iterable[str], path: Path) -> WrittenNames:
    """The columns of a file by our names for them, which are foreign or ours in the file."""
    names: dict[str, str] = {}
    for written in map(str.strip, columns):
        name = _OUR_NAMES.get(written.lower(), written.lower())
        if name in names:
            raise InputError(f"column {written!r} is there twice", path=path, line=1)
        names[name] = written
    for name, written in names.items():
        if name not in _COLUMNS:
            refuse_slip(written, (*_COLUMNS, *_FOREIGN_NAMES), path, 1)
    header = f"its first line is {shown(','.join(names.values()))}"
    needed = f"a column class, or both {' and '.join(_LENGTHS)} (or as Azure names them)"
    if _TIMESTAMP not in names:
        raise InputError(
            f"has no column timestamp; it needs that and {needed}; {header}", path=path, line=1
        )
    if _CLASS not in names and not names.keys() >= set(_LENGTHS):
        raise InputError(f"needs {needed}; {header}", path=path, line=1)
    return names


class _PieceReader:
    """Checks some rows of a file and turns them into arrays.

    Args:
        frame: the rows, numbers as such and all else as text; columns by our names.
        names: the columns as the file writes them.
        path: of the file.
        first_line: of the rows in the file.
    """

    def __init__(self, frame: DataFrame, names: WrittenNames, path: Path, first_line: int) -> None:
        self._frame, self._names = frame, names
        self._path, self._first_line = path, first_line

    def read(self, previous_s: float | None) -> _Piece:
        """The rows as arrays.

        Args:
            previous_s: time of the row before; None if there is none.

        Raises:
            InputError: a cell is blank or wrong, or time runs backwards or stands still.
        """
        self._refuse_blanks()
        time_s = self._times()
        self._refuse_gaps(time_s, previous_s)
        request_counts = self._numbers(_REQUESTS) if _REQUESTS in self._frame else None
        if _CLASS in self._frame:
            return _Piece(time_s, self._classes(), None, None, request_counts)
        input_tokens = self._token_counts(_INPUT_TOKENS)
        output_tokens = self._token_counts(_OUTPUT_TOKENS)
        class_index = classify_requests(input_tokens, output_tokens)
        return _Piece(time_s, class_index, input_tokens, output_tokens, request_counts)

    def _refuse(self, is_bad: npt.ArrayLike, column: str, complaint: str) -> None:
        """Refuse the first row that is bad; `complaint` may name its cell as {cell}."""
        bad_rows = np.flatnonzero(np.asarray(is_bad))
        if not len(bad_rows):
            return
        row = int(bad_rows[0])
        cell = self._frame[column].iloc[row]
        if isinstance(cell, np.generic):
            cell = cell.item()
        raise InputError(
            complaint.format(cell=shown(cell)),
            path=self._path,
            line=self._first_line + row,
            column=self._names.get(column),
        )

    def _refuse_blanks(self) -> None:
        for column in self._names:
            if column in _COLUMNS:
                self._refuse(
                    self._frame[column].isna(), column, "is blank; the table must have no holes"
                )

    def _times(self) -> FloatArray:
        """The column timestamp in seconds."""
        import pandas as pd

        column = self._frame[_TIMESTAMP]
        if pd.api.types.is_numeric_dtype(column):
            time_s: FloatArray = column.to_numpy(np.float64, copy=True)
            self._refuse(
                ~((time_s >= 0) & (time_s < _MAX_TIMESTAMP_S)),
                _TIMESTAMP,
                "must be seconds from 0 up, not {cell}, which may be milliseconds",
            )
            return time_s
        dates = pd.to_datetime(column, format="ISO8601", utc=True, errors="coerce")
        self._refuse(
            dates.isna(),
            _TIMESTAMP,
            "must be seconds from 0 up, or a time as in 2026-11-16T09:00:00, not {cell}",
        )
        dates_us = dates.dt.tz_localize(None).to_numpy("datetime64[us]")
        since_1970_s: FloatArray = dates_us.astype(np.int64) / 1e6
        return since_1970_s

    def _refuse_gaps(self, time_s: FloatArray, previous_s: float | None) -> None:
        """Refuse times that run backwards and, where rows are requests, long silences."""
        gaps_s = np.diff(time_s, prepend=time_s[0] if previous_s is None else previous_s)
        self._refuse(
            gaps_s < 0,
            _TIMESTAMP,
            "comes before the line above it ({cell}); sort the trace by time",
        )
        if _REQUESTS in self._frame:
            return
        self._refuse(
            gaps_s > _MAX_SILENCE_S,
            _TIMESTAMP,
            f"the trace has a gap: no request for {gaps_s.max():.0f} s before {{cell}}; cut it "
            "there, or give counts in a column requests, 0 where there are none",
        )

    def _numbers(self, column: str) -> FloatArray:
        import pandas as pd

        cells = self._frame[column]
        if cells.dtype == object:
            cells = cells.astype(str)  # whole numbers of any length, which are no floats
        values: FloatArray = pd.to_numeric(cells, errors="coerce").to_numpy(np.float64)
        self._refuse(
            ~((values >= 0) & (values <= _MAX_TOKENS)),
            column,
            f"must be a number from 0 to {_MAX_TOKENS}, not {{cell}}",
        )
        return values

    def _token_counts(self, column: str) -> IntArray:
        """Whole tokens, at least one."""
        tokens: IntArray = np.maximum(1, self._numbers(column)).astype(np.int32)
        return tokens

    def _classes(self) -> ClassIndices:
        import pandas as pd

        indices = pd.Index(CLASSES).get_indexer(self._frame[_CLASS])
        self._refuse(
            indices < 0,
            _CLASS,
            f"there is no class {{cell}}; the classes are {', '.join(CLASSES)} (input then output)",
        )
        class_index: ClassIndices = indices.astype(np.uint8)
        return class_index


def _expand(table: RequestTable, request_counts: FloatArray, path: Path) -> RequestTable:
    """The requests that the rows of a file stand for, spread evenly over the time of each row.

    Raises:
        InputError: rows are not equally far apart, or there are no or too many requests.
    """
    row_times_s = np.unique(table.arrival_s)
    step_s = _row_step_s(table.arrival_s, row_times_s, path)
    counts = np.rint(request_counts).astype(np.int64)
    if not 0 < counts.sum() <= _MAX_REQUESTS:
        raise InputError(f"must have 1 to {_MAX_REQUESTS} requests, not {counts.sum()}", path=path)
    row_of_request = np.repeat(np.arange(len(counts)), counts)
    first_request_of_row = np.cumsum(counts) - counts
    number_in_row = np.arange(len(row_of_request)) - first_request_of_row[row_of_request]
    offset_s = (number_in_row + 0.5) / counts[row_of_request] * step_s
    arrival_s = table.arrival_s[row_of_request] + offset_s
    order = np.argsort(arrival_s, kind="stable")
    rows = row_of_request[order]
    return RequestTable(
        arrival_s=arrival_s[order],
        class_index=table.class_index[rows],
        input_tokens=None if table.input_tokens is None else table.input_tokens[rows],
        output_tokens=None if table.output_tokens is None else table.output_tokens[rows],
        duration_s=float(row_times_s[-1]) + step_s,
    )


def _row_step_s(time_s: FloatArray, different_s: FloatArray, path: Path) -> float:
    """Seconds from each timestamp to the next.

    Args:
        time_s: of each row, ascending.
        different_s: the same without repetitions: rows of one time may be of different classes.
        path: of the file, for errors.

    Raises:
        InputError: there is one timestamp only, or they are not equally far apart.
    """
    if len(different_s) < 2:
        raise InputError("needs at least two different timestamps", path=path)
    steps_s = np.diff(different_s)
    step_s = float(steps_s.min())
    uneven = np.flatnonzero(abs(steps_s - step_s) > _EVEN_STEPS * step_s)
    if len(uneven):
        gap_begin_s, gap_end_s = different_s[uneven[0] : uneven[0] + 2]
        raise InputError(
            f"the trace has a gap: nothing between {gap_begin_s:.10g} and {gap_end_s:.10g} s, "
            f"though rows are {step_s:g} s apart; add a row with 0 requests for every such step",
            path=path,
            line=int(np.searchsorted(time_s, gap_end_s)) + 2,
            column=_TIMESTAMP,
        )
    return step_s
