"""Reading traces: tables or JSON lines, plain or gzipped, in order of time.

A row is a request or, with a column `requests`, many alike, spread evenly from its timestamp to the
next one: then all timestamps are equally far apart. trace_formats.py has what columns are called,
docs/serving.md ("Traces") says it to people. Timestamps are numbers, or dates and times as in
2026-11-16T09:00:00, with or without fractions and zone. Files are read in pieces: 27 million
requests take about half a gigabyte, and nothing else grows.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, TypeVar

import numpy as np
import numpy.typing as npt

from envplan._io.documents import read_json
from envplan._io.files import ReadLimits, refuse_slip, stream
from envplan.errors import InputError, shown
from envplan.serving.classes import (
    MAX_CLASSES,
    ClassIndices,
    FloatArray,
    IntArray,
    RequestClasses,
    is_class_name,
)
from envplan.serving.trace_formats import (
    CLASS,
    ERROR,
    FORMATS,
    INPUT_TOKENS,
    OUTPUT_TOKENS,
    OWN,
    PREFIX_HASHES,
    REQUESTS,
    TIME_UNITS,
    TIMESTAMP,
    TraceFormat,
    all_names,
    format_of,
)

if TYPE_CHECKING:
    from pandas import DataFrame, Series

_ROWS_PER_PIECE: Final = 500_000
_LIMITS: Final = ReadLimits(max_bytes=16 * 2**30, longest_line=2**16)
_MAX_SILENCE_S: Final = 6 * 3600.0
_MAX_DURATION_S: Final = 200_000 * 60.0
_MAX_REQUESTS: Final = 100_000_000
_MAX_TOKENS: Final = 10_000_000  # and the most requests of a row
_MAX_TIMESTAMP_S: Final = 1e11  # beyond any date in seconds since 1970, before all in milliseconds
_EVEN_STEPS: Final = 1e-6  # relative difference of steps that are still equally long

_LENGTHS: Final = (INPUT_TOKENS, OUTPUT_TOKENS)
_COLUMNS: Final = (TIMESTAMP, CLASS, *_LENGTHS, REQUESTS, PREFIX_HASHES, ERROR)
#: Columns that may have holes: an error stands beside requests that failed.
_MAY_BE_BLANK: Final = (ERROR,)
_SNIFFED_BYTES: Final = 2**14
_MAX_SHOWN: Final = 40  # bytes of a line in an error
#: A trace this long and this thin may be in a smaller unit than seconds.
_LONG_S: Final = 86_400.0
_THIN_S: Final = 10.0  # between requests, on average

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
        cached_tokens: tokens at the begin of each input that an earlier request of the file had,
            too; None where the file does not say.
        num_failed: requests that failed when they were recorded; they are not in the table.
    """

    arrival_s: FloatArray
    class_index: ClassIndices
    input_tokens: IntArray | None
    output_tokens: IntArray | None
    duration_s: float | None = None
    cached_tokens: IntArray | None = None
    num_failed: int = 0


def read_requests(path: Path, time_unit: str | None, classes: RequestClasses) -> RequestTable:
    """Read and check the requests of a trace.

    Args:
        path: of the file.
        time_unit: of its timestamps, a key of TIME_UNITS; None: as its format has it.
        classes: of its requests.

    Raises:
        InputError: naming file, line, column and what to do.
    """
    rows = _Rows(path, time_unit, classes)
    _read_in_pieces(path, rows)
    if not len(rows):
        raise InputError("has no rows", path=path)
    table = rows.table()
    span_s = table.arrival_s[-1]
    if span_s > _MAX_DURATION_S:
        raise InputError(
            f"spans {span_s:g} s; at most {_MAX_DURATION_S:g} can be replayed", path=path
        )
    if rows.request_counts is not None:
        return _expand(table, rows.request_counts, path)
    is_thin = span_s > _THIN_S * len(table.arrival_s)
    if rows.has_unstated_unit and span_s > _LONG_S and is_thin:
        hours, ms_hours = span_s / 3600, span_s / 3600 * TIME_UNITS["ms"]
        raise InputError(
            f"the numbers in its timestamps are {hours:.4g} hours as seconds and {ms_hours:.4g} "
            "hours as milliseconds: say --time-unit s or --time-unit ms",
            path=path,
        )
    return table


def read_class_names(path: Path) -> list[str]:
    """The classes that a trace names, in the order of their first rows; none if it gives lengths.

    Raises:
        InputError: it cannot be read, or has a name that no class can have, or too many of them.
    """
    found = _ClassNames(path)
    _read_in_pieces(path, found)
    if len(found.names) > MAX_CLASSES:
        raise InputError(
            f"has {len(found.names)} classes; there can be at most {MAX_CLASSES}", path=path
        )
    return list(found.names)


class _ClassNames:
    """The classes that the rows of a file name.

    Args:
        path: of the file.

    Attributes:
        names: in the order of their first rows; the values say nothing.
    """

    def __init__(self, path: Path) -> None:
        self.names: dict[str, None] = {}
        self._path = path
        self._num_read = 0

    def append(self, frame: DataFrame) -> None:
        """Look at some more rows.

        Raises:
            InputError: a name is none that a class can have.
        """
        for column in frame.columns:
            if column.strip().lower() == CLASS:
                self._append_column(frame[column])
        self._num_read += len(frame)

    def _append_column(self, cells: Series[str]) -> None:
        for name in cells.unique():
            if not isinstance(name, str) or not is_class_name(name):
                row = self._num_read + int(np.flatnonzero(cells.isin([name]))[0])
                raise InputError(
                    f"{shown(name)} is no name of a class",
                    path=self._path,
                    line=row + 2,
                    column=CLASS,
                )
            self.names[name] = None


def _read_in_pieces(path: Path, rows: _Rows | _ClassNames) -> None:
    """Read a file into rows.

    Raises:
        InputError: it cannot be read, is no table, or a row is refused.
    """
    import pandas as pd

    try:
        with stream(path, _LIMITS) as file, warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # cells without a column
            for frame in _frames(path, file):
                rows.append(frame)
    except pd.errors.EmptyDataError:
        pass  # there are no rows
    except (EOFError, OSError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot be read to its end ({reason})", path=path) from None
    except UnicodeDecodeError:
        raise InputError("is not a text file in UTF-8", path=path) from None
    except (ValueError, TypeError, RecursionError, pd.errors.ParserWarning) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"is not a CSV table or JSON lines ({reason})", path=path) from None


def _frames(path: Path, file: IO[bytes]) -> Iterator[DataFrame]:
    """The rows of a file in pieces: those of a CSV table, of JSON lines, or of lists in JSON."""
    import pandas as pd

    start = _first_line(file)
    if not start.startswith(b"{"):
        yield from pd.read_csv(
            file, chunksize=_ROWS_PER_PIECE, skipinitialspace=True, index_col=False
        )
    elif start.rstrip().endswith(b"}") and not _has_lists(start):
        while lines := list(islice(file, _ROWS_PER_PIECE)):
            yield pd.DataFrame([_object_of(line) for line in lines if line.strip()])
    else:
        yield _frame_of_lists(path)


def _object_of(line: bytes) -> dict[str, object]:
    """The JSON object on a line.

    Raises:
        TypeError: there is something else.
    """
    value = json.loads(line)
    if not isinstance(value, dict):
        raise TypeError(f"{shown(line[:_MAX_SHOWN].decode())} is no JSON object")
    return value


def _first_line(file: IO[bytes]) -> bytes:
    """As much of the first line as is at hand. It is not taken away."""
    peek = getattr(file, "peek", None)
    start = peek(_SNIFFED_BYTES) if peek is not None else b""
    return bytes(start[:_SNIFFED_BYTES]).lstrip().split(b"\n")[0]


def _has_lists(line: bytes) -> bool:
    """Whether a line has a list for each column, as a file on a single line may."""
    return any(
        all(f'"{name}"'.encode() in line for name in candidate.columns)
        for candidate in FORMATS
        if candidate.lists_by_field
    )


def _frame_of_lists(path: Path) -> DataFrame:
    """The rows of a JSON object that has a list for each column, in order of time.

    Raises:
        InputError: it is of no format that has that, or its lists are of different lengths.
    """
    import pandas as pd

    document = read_json(path)
    names = document.keys() if isinstance(document, dict) else ()
    trace_format = format_of(names)
    if trace_format is None or not trace_format.lists_by_field:
        raise InputError(
            "is no trace: JSON has a row on each line, or is a result of vLLM", path=path
        )
    columns = {name: document[name] for name in trace_format.all_columns if name in document}
    if not all(isinstance(column, list) for column in columns.values()):
        raise InputError(f"{', '.join(columns)} must be lists", path=path)
    if len({len(column) for column in columns.values()}) > 1:
        raise InputError(f"{', '.join(columns)} must be lists of one length", path=path)
    frame = pd.DataFrame(columns)
    timestamp = next(name for name, ours in trace_format.columns.items() if ours == TIMESTAMP)
    return frame.sort_values(timestamp, kind="stable", ignore_index=True)


@dataclass(frozen=True, eq=False)
class _Piece:
    """Some rows of a file, checked; arrays of one length.

    Attributes:
        time_s: since 1970, or since whenever the file counts.
        class_index: of each row.
        input_tokens: of each row; None where the file gives classes instead.
        output_tokens: the same.
        request_counts: requests that each row stands for; None: one.
        prefix_hashes: of each row, from the begin of its input; None: not stated.
        num_failed: rows that are left out.
    """

    time_s: FloatArray
    class_index: ClassIndices
    input_tokens: IntArray | None
    output_tokens: IntArray | None
    request_counts: FloatArray | None
    prefix_hashes: Sequence[object] | None = None
    num_failed: int = 0


class _Rows:
    """The rows of a file, put together from pieces without ever being in memory twice.

    Args:
        path: of the file.
        time_unit: of its timestamps; None: as its format has it.
        classes: of its requests.
    """

    def __init__(self, path: Path, time_unit: str | None, classes: RequestClasses) -> None:
        self._path = path
        self._time_unit = time_unit
        self._classes = classes
        self._format = OWN
        self._names: WrittenNames = {}
        self._length = 0
        self._num_read = 0
        self._num_failed = 0
        self._last_s: float | None = None
        self._has_numbers = False
        self._seen_blocks: set[object] = set()
        self._time_s = np.empty(0, np.float64)
        self._class_index = np.empty(0, np.uint8)
        self._input_tokens = np.empty(0, np.int32)
        self._output_tokens = np.empty(0, np.int32)
        self._cached_tokens = np.empty(0, np.int32)
        self._request_counts = np.empty(0, np.float64)

    def __len__(self) -> int:
        return self._length

    @property
    def request_counts(self) -> FloatArray | None:
        """Requests that each row stands for; None: one."""
        return self._request_counts if REQUESTS in self._names else None

    @property
    def has_unstated_unit(self) -> bool:
        """Whether timestamps are numbers whose unit neither the format nor the user says."""
        return self._has_numbers and not (self._time_unit or self._format.time_unit)

    def append(self, frame: DataFrame) -> None:
        """Check and add some rows.

        Raises:
            InputError: a column or a row is refused, or there are too many rows.
        """
        if not self._names:
            self._format = format_of(frame.columns) or OWN
            self._names = _named_columns(frame.columns, self._format, self._path)
        frame.columns = [self._format.our_name(name.strip()) for name in frame.columns]
        if frame.empty:
            return
        first_line = self._num_read + (1 if PREFIX_HASHES in self._names else 2)
        reader = _PieceReader(frame, self._names, self._format, self._path, first_line)
        piece = reader.read(self._last_s, self._time_unit, self._classes)
        self._has_numbers = reader.has_numbers
        self._num_read += len(frame)
        self._num_failed += piece.num_failed
        if not len(piece.time_s):
            return
        self._last_s = float(piece.time_s[-1])
        self._length += len(piece.time_s)
        self._extend(self._time_s, piece.time_s)
        self._extend(self._class_index, piece.class_index)
        self._extend(self._input_tokens, piece.input_tokens)
        self._extend(self._output_tokens, piece.output_tokens)
        self._extend(self._request_counts, piece.request_counts)
        self._extend(self._cached_tokens, self._cached(piece))
        if self._length > _MAX_REQUESTS:
            raise InputError(f"has more than {_MAX_REQUESTS} rows", path=self._path)

    def _cached(self, piece: _Piece) -> IntArray | None:
        """Tokens of each input that begin as an earlier one does, by whole blocks."""
        if piece.prefix_hashes is None or piece.input_tokens is None:
            return None
        cached = np.zeros(len(piece.time_s), dtype=np.int32)
        for row, hashes in enumerate(piece.prefix_hashes):
            blocks = hashes if isinstance(hashes, list) else []
            for block in blocks:
                if block not in self._seen_blocks:
                    break
                cached[row] += self._format.block_tokens
            self._seen_blocks.update(blocks)
        at_most: IntArray = np.minimum(cached, piece.input_tokens - 1)  # one token is always run
        return at_most

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
            cached_tokens=self._cached_tokens if len(self._cached_tokens) else None,
            num_failed=self._num_failed,
        )


def _named_columns(columns: Iterable[str], trace_format: TraceFormat, path: Path) -> WrittenNames:
    """The columns of a file by our names for them."""
    names: dict[str, str] = {}
    for written in map(str.strip, columns):
        name = trace_format.our_name(written)
        if name in names:
            raise InputError(f"column {written!r} is there twice", path=path, line=1)
        names[name] = written
    known = [*_COLUMNS, *all_names()]
    for name, written in names.items():
        if name not in _COLUMNS and written not in known:
            refuse_slip(written, known, path, 1)
    header = f"its first line is {shown(','.join(names.values()))}"
    needed = f"a column class, or both {' and '.join(_LENGTHS)} (or as Azure names them)"
    if TIMESTAMP not in names:
        raise InputError(
            f"has no column timestamp; it needs that and {needed}; {header}", path=path, line=1
        )
    if CLASS not in names and not names.keys() >= set(_LENGTHS):
        raise InputError(f"needs {needed}; {header}", path=path, line=1)
    return names


class _PieceReader:
    """Checks some rows of a file and turns them into arrays.

    Args:
        frame: the rows, numbers as such and all else as text; columns by our names.
        names: the columns as the file writes them.
        trace_format: of the file.
        path: of the file.
        first_line: of the rows in the file.
    """

    def __init__(
        self,
        frame: DataFrame,
        names: WrittenNames,
        trace_format: TraceFormat,
        path: Path,
        first_line: int,
    ) -> None:
        self._frame, self._names, self._format = frame, names, trace_format
        self._path, self._first_line = path, first_line
        #: Whether timestamps are numbers.
        self.has_numbers = False

    def read(
        self, previous_s: float | None, time_unit: str | None, classes: RequestClasses
    ) -> _Piece:
        """The rows as arrays.

        Args:
            previous_s: time of the row before; None if there is none.
            time_unit: of timestamps; None: as the format has it.
            classes: of requests.

        Raises:
            InputError: a cell is blank or wrong, or time runs backwards or stands still.
        """
        self._refuse_blanks()
        time_s = self._times(time_unit)
        self._refuse_gaps(time_s, previous_s, time_unit)
        request_counts = self._numbers(REQUESTS) if REQUESTS in self._frame else None
        if CLASS in self._frame:
            return _Piece(time_s, self._class_column(classes), None, None, request_counts)
        answered = np.flatnonzero(~self._failed())
        input_tokens = self._token_counts(INPUT_TOKENS)[answered]
        output_tokens = self._token_counts(OUTPUT_TOKENS)[answered]
        prefix_hashes = None
        if PREFIX_HASHES in self._frame:
            prefix_hashes = list(self._frame[PREFIX_HASHES].iloc[answered])
        return _Piece(
            time_s[answered],
            classes.classify(input_tokens, output_tokens),
            input_tokens,
            output_tokens,
            None if request_counts is None else request_counts[answered],
            prefix_hashes=prefix_hashes,
            num_failed=len(time_s) - len(answered),
        )

    def _failed(self) -> npt.NDArray[np.bool_]:
        """Which rows are requests that failed when they were recorded."""
        failed = np.zeros(len(self._frame), dtype=bool)
        if self._format.no_output_is_failure:
            failed |= self._numbers(OUTPUT_TOKENS) == 0
        if ERROR in self._frame:
            errors = self._frame[ERROR]
            failed |= (errors.notna() & (errors.astype(str) != "")).to_numpy()
        return failed

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
            if column in _COLUMNS and column not in _MAY_BE_BLANK:
                self._refuse(
                    self._frame[column].isna(), column, "is blank; the table must have no holes"
                )

    def _times(self, time_unit: str | None) -> FloatArray:
        """The column timestamp in seconds."""
        import pandas as pd

        column = self._frame[TIMESTAMP]
        if pd.api.types.is_numeric_dtype(column):
            self.has_numbers = True
            unit_s = TIME_UNITS[time_unit or self._format.time_unit or "s"]
            time_s: FloatArray = column.to_numpy(np.float64, copy=True) * unit_s
            self._refuse(
                ~((time_s >= 0) & (time_s < _MAX_TIMESTAMP_S)),
                TIMESTAMP,
                "must be seconds from 0 up, not {cell}, which may be milliseconds: "
                "say --time-unit ms if it is",
            )
            return time_s
        dates = pd.to_datetime(column, format="ISO8601", utc=True, errors="coerce")
        self._refuse(
            dates.isna(),
            TIMESTAMP,
            "must be seconds from 0 up, or a time as in 2026-11-16T09:00:00, not {cell}",
        )
        dates_us = dates.dt.tz_localize(None).to_numpy("datetime64[us]")
        since_1970_s: FloatArray = dates_us.astype(np.int64) / 1e6
        return since_1970_s

    def _refuse_gaps(
        self, time_s: FloatArray, previous_s: float | None, time_unit: str | None
    ) -> None:
        """Refuse times that run backwards and, where rows are requests, long silences."""
        gaps_s = np.diff(time_s, prepend=time_s[0] if previous_s is None else previous_s)
        self._refuse(
            gaps_s < 0,
            TIMESTAMP,
            "comes before the line above it ({cell}); sort the trace by time",
        )
        if REQUESTS in self._frame:
            return
        is_stated = time_unit or self._format.time_unit or not self.has_numbers
        unit = "" if is_stated else "; if timestamps are milliseconds, say --time-unit ms"
        self._refuse(
            gaps_s > _MAX_SILENCE_S,
            TIMESTAMP,
            f"the trace has a gap: no request for {gaps_s.max():.0f} s before {{cell}}; cut it "
            f"there, or give counts in a column requests, 0 where there are none{unit}",
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

    def _class_column(self, classes: RequestClasses) -> ClassIndices:
        import pandas as pd

        indices = pd.Index(classes.names).get_indexer(self._frame[CLASS])
        self._refuse(indices < 0, CLASS, classes.no_class_text("{cell}"))
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
            column=TIMESTAMP,
        )
    return step_s
