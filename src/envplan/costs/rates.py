"""What a kilowatt-hour costs: fixed, or a step function of time that is read from a CSV file."""

from __future__ import annotations

import csv
import io
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Final, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from envplan._files import decimal, decoded, read_bounded, refuse_slip
from envplan._model import Model
from envplan.errors import InputError

__all__ = ["Kind", "Rate", "Steps", "read_rate"]

MAX_RATE_BYTES: Final = 16 * 2**20
MAX_RATE_ROWS: Final = 100_000

#: Rows of a file may be rounded to so many seconds: 0.333 hours stand for 20 minutes.
_ROUNDING_S: Final = 5.0
_HOUR_S: Final = 3600.0

MAX_PER_KWH: Final = 1e9

Kind = Literal["price", "carbon"]
ClockSeconds = Annotated[float, Field(ge=-1e12, le=1e12)]
PerKwh = Annotated[float, Field(ge=-MAX_PER_KWH, le=MAX_PER_KWH)]


class Rate(Model):
    """What a kWh costs, as a step function of time.

    Attributes:
        begins_s: when each value begins to hold, s on the rate's own clock, ascending.
        per_kwh: the values, currency units or gCO2 per kWh, as many.
        end_s: when the last value ceases to hold; None: never.
        start_s: when the run starts, on the same clock.
        repeats: after its end the rate begins again.
        file: where it was read; None for a fixed rate.
    """

    begins_s: list[ClockSeconds] = Field(min_length=1, max_length=MAX_RATE_ROWS)
    per_kwh: list[PerKwh] = Field(min_length=1, max_length=MAX_RATE_ROWS)
    end_s: ClockSeconds | None = None
    start_s: ClockSeconds = 0.0
    repeats: bool = False
    file: str | None = None

    @model_validator(mode="after")
    def _is_a_step_function(self) -> Self:
        if len(self.begins_s) != len(self.per_kwh):
            raise ValueError("begins_s and per_kwh should be of one length")
        ends = [*self.begins_s, math.inf if self.end_s is None else self.end_s]
        if any(later <= earlier for earlier, later in pairwise(ends)):
            raise ValueError("begins_s and then end_s should ascend")
        if self.end_s is None and len(self.begins_s) > 1:
            raise ValueError("end_s should say until when the last value holds")
        if not self.begins_s[0] <= self.start_s < ends[-1]:
            raise ValueError("start_s should lie where the rate is known")
        return self

    @classmethod
    def fixed(cls, per_kwh: float) -> Self:
        """The same rate at all times."""
        return cls(begins_s=[0.0], per_kwh=[per_kwh])

    @property
    def is_fixed(self) -> bool:
        return self.end_s is None

    @property
    def lasts_s(self) -> float:
        """How long a run can be before nothing is known any more, s."""
        if self.end_s is None or self.repeats:
            return math.inf
        return self.end_s - self.start_s

    @property
    def mean(self) -> float:
        """The average over the whole file, per kWh."""
        if self.end_s is None:
            return self.per_kwh[0]
        ends = [*self.begins_s[1:], self.end_s]
        steps = zip(self.per_kwh, self.begins_s, ends, strict=True)
        total = math.fsum(value * (end - begin) for value, begin, end in steps)
        return total / (self.end_s - self.begins_s[0])

    def steps(self) -> Steps:
        """This rate, ready for sums."""
        return Steps(self)


class Steps:
    """Integrals of a rate, from sums made once.

    Args:
        rate: of as many begins as values.
    """

    def __init__(self, rate: Rate) -> None:
        self._rate = rate
        self._first = rate.begins_s[0]
        self._period = None if rate.end_s is None else rate.end_s - self._first
        lengths = [later - earlier for earlier, later in pairwise(rate.begins_s)]
        areas = (v * length for v, length in zip(rate.per_kwh, lengths, strict=False))
        self._sums = list(accumulate(areas, initial=0.0))
        self._start = self._until(rate.start_s)

    def integral(self, seconds: float) -> float:
        """Of the rate over the first `seconds` of the run, units per kWh times s."""
        return self._until(self._rate.start_s + seconds) - self._start

    def _until(self, clock_s: float) -> float:
        whole = 0.0
        if self._rate.repeats and self._period is not None:
            rounds = math.floor((clock_s - self._first) / self._period)
            clock_s -= rounds * self._period
            whole = rounds * self._within(self._first + self._period)
        return whole + self._within(clock_s)

    def _within(self, clock_s: float) -> float:
        k = max(0, bisect_right(self._rate.begins_s, clock_s) - 1)
        return self._sums[k] + self._rate.per_kwh[k] * (clock_s - self._rate.begins_s[k])

    def changes(self, since: float, until: float) -> Iterator[float]:
        """When the rate changes, s since the run's start, strictly between two such times."""
        offset = self._first - self._rate.start_s
        first_round = last_round = 0
        if self._rate.repeats and self._period is not None:
            first_round = math.floor((since - offset) / self._period)
            last_round = math.floor((until - offset) / self._period)
        for rounds in range(first_round, last_round + 1):
            shift = rounds * (self._period or 0.0) - self._rate.start_s
            for begin in self._rate.begins_s:
                if since < begin + shift < until:
                    yield begin + shift


def read_rate(text: str, kind: Kind, *, start: str | None = None, repeats: bool = False) -> Rate:
    """The rate that an option gives: a number, or the path of a CSV file.

    The file has a column `hour` (hours since the run's start) or `time` (ISO 8601), a column named
    as `kind`, and perhaps others. A row holds from its time until the next row's, the last one as
    long as all others; where rows differ in length, a column `end` says until when each holds.

    Args:
        kind: "price", currency units per kWh, or "carbon", gCO2 per kWh.
        start: ISO 8601; when the run starts, for files with `time`. Default: with the file.
        repeats: after its end the file begins again.

    Raises:
        InputError: it is neither, or the file has a gap, an overlap, disorder or a bad value; names
            the line.
    """
    try:
        value = float(text)
    except ValueError:
        return _read_file(Path(text), kind, start, repeats)
    return Rate.fixed(_checked(value, kind, None, None))


def _checked(value: float, kind: Kind, path: Path | None, line: int | None) -> float:
    if not math.isfinite(value) or abs(value) > MAX_PER_KWH:
        raise InputError(f"{kind} must be a number, not {value:g}", path=path, line=line)
    if kind == "carbon" and value < 0:
        raise InputError(f"carbon must not be negative, not {value:g}", path=path, line=line)
    return value


class _Row(NamedTuple):
    line: int
    begin: float
    end: float | None
    value: float


def _read_file(path: Path, kind: Kind, start: str | None, repeats: bool) -> Rate:
    clock, rows = _read_rows(path, kind)
    ends = _ends(rows, path, clock)
    return Rate(
        begins_s=[row.begin for row in rows],
        per_kwh=[row.value for row in rows],
        end_s=ends[-1],
        start_s=_start(path, clock, rows[0].begin, ends[-1], start),
        repeats=repeats,
        file=path.as_posix(),
    )


class _Clock:
    """Reads and writes times of a file, s: hours as they are, timestamps from the first one on."""

    def __init__(self, path: Path, column: str) -> None:
        self._path = path
        self.column = column
        self.zero: datetime | None = None

    def seconds(self, text: str, line: int) -> float:
        if self.column == "hour":
            return self._hours(text, line) * _HOUR_S
        moment = self._moment(text, line)
        if self.zero is None:
            self.zero = moment
        if (moment.tzinfo is None) != (self.zero.tzinfo is None):
            raise InputError(
                "some times have a time zone and others none", path=self._path, line=line
            )
        return (moment - self.zero).total_seconds()

    def _hours(self, text: str, line: int) -> float:
        try:
            hours = decimal(text)
        except ValueError:
            hours = math.nan
        if not math.isfinite(hours) or abs(hours) > 1e7:
            raise InputError(f"hour must be a number, not {text!r}", path=self._path, line=line)
        return hours

    def _moment(self, text: str, line: int) -> datetime:
        try:
            return datetime.fromisoformat(text)
        except ValueError:
            raise InputError(
                f"time must be written as in 2026-12-01T00:00, not {text!r}",
                path=self._path,
                line=line,
            ) from None

    def text(self, seconds: float) -> str:
        """As it would stand in the file."""
        if self.zero is None:
            return f"hour {seconds / _HOUR_S:g}"
        return (self.zero + timedelta(seconds=seconds)).isoformat()


def _read_rows(path: Path, kind: Kind) -> tuple[_Clock, list[_Row]]:
    reader = csv.reader(io.StringIO(_text(path, kind), newline=""), strict=True)
    try:
        header = [name.strip().lower() for name in next(reader, [])]
        clock, columns = _columns(path, header, kind)
        rows = []
        for cells in reader:
            if not any(cell.strip() for cell in cells):
                continue
            if len(cells) != len(header):
                raise InputError(
                    f"has {len(cells)} cells and the header {len(header)}",
                    path=path,
                    line=reader.line_num,
                )
            rows.append(_row(cells, columns, clock, path, reader.line_num, kind))
            if len(rows) > MAX_RATE_ROWS:
                raise InputError(f"has more than {MAX_RATE_ROWS} rows", path=path)
    except csv.Error as error:
        raise InputError(f"is not valid CSV: {error}", path=path, line=reader.line_num) from None
    if not rows:
        raise InputError("has no rows", path=path)
    return clock, rows


def _text(path: Path, kind: Kind) -> str:
    try:
        data = read_bounded(path, MAX_RATE_BYTES)
    except InputError as error:
        hint = f"; --{kind} takes a number per kWh or a CSV file"
        raise InputError(error.message + hint, path=path) from None
    return decoded(data, path)


def _columns(path: Path, header: Sequence[str], kind: Kind) -> tuple[_Clock, dict[str, int]]:
    for name in ("hour", "time", "end", kind):
        if header.count(name) > 1:
            raise InputError("occurs twice", path=path, line=1, column=name)
    clocks = [name for name in ("hour", "time") if name in header]
    if len(clocks) != 1 or kind not in header:
        raise InputError(
            f"must have a column hour or time, and a column {kind}; it has "
            f"{', '.join(header) or 'none'}",
            path=path,
            line=1,
        )
    for name in header:
        if name not in ("end", *clocks, kind):
            refuse_slip(name, ["end"], path, 1)
    columns = {"begin": header.index(clocks[0]), "value": header.index(kind)}
    if "end" in header:
        columns["end"] = header.index("end")
    return _Clock(path, clocks[0]), columns


def _row(
    cells: Sequence[str], columns: dict[str, int], clock: _Clock, path: Path, line: int, kind: Kind
) -> _Row:
    value = cells[columns["value"]].strip()
    try:
        number = decimal(value)
    except ValueError:
        raise InputError(
            f"must be a number, not {value!r}", path=path, line=line, column=kind
        ) from (None)
    begin = clock.seconds(cells[columns["begin"]].strip(), line)
    end = clock.seconds(cells[columns["end"]].strip(), line) if "end" in columns else None
    return _Row(line, begin, end, _checked(number, kind, path, line))


def _ends(rows: Sequence[_Row], path: Path, clock: _Clock) -> list[float]:
    """Until when each row holds, s; half-open intervals that leave nothing out.

    Raises:
        InputError: they overlap, are in disorder, or leave something out; names line and times.
    """
    for before, row in pairwise(rows):
        if row.begin <= before.begin:
            raise InputError(
                f"{clock.text(row.begin)} does not come after {clock.text(before.begin)} in the "
                "row before: rows must ascend in time",
                path=path,
                line=row.line,
            )
    ends = [_end(rows, row, path) for row in rows]
    for row, end, following in zip(rows, ends, rows[1:], strict=False):
        if following.begin > end + _ROUNDING_S:
            raise InputError(
                f"nothing is said of the time from {clock.text(end)} to "
                f"{clock.text(following.begin)}; add what is missing",
                path=path,
                line=following.line,
            )
        if following.begin < end - _ROUNDING_S:
            raise InputError(
                f"begins at {clock.text(following.begin)}, before the row on line {row.line} is "
                f"over at {clock.text(end)}; rows that differ in length need a column end",
                path=path,
                line=following.line,
            )
    return ends


def _end(rows: Sequence[_Row], row: _Row, path: Path) -> float:
    if row.end is not None:
        if row.end <= row.begin:
            raise InputError("ends before it begins", path=path, line=row.line, column="end")
        return row.end
    if len(rows) == 1:
        raise InputError(
            "one row does not say how long it holds; add a column end, or more rows", path=path
        )
    return row.begin + (rows[1].begin - rows[0].begin)


def _start(path: Path, clock: _Clock, first: float, end: float, start: str | None) -> float:
    """When the run starts, s on the file's clock."""
    if clock.zero is None:
        if first > 0:
            raise InputError(
                f"nothing is said of the time from hour 0, the start of the run, to "
                f"{clock.text(first)}; add what is missing",
                path=path,
            )
        begin = 0.0
    elif start is None:
        begin = first
    else:
        begin = _started(start, clock.zero)
    if not first <= begin < end:
        raise InputError(
            f"reaches from {clock.text(first)} to {clock.text(end)}, and the run starts at "
            f"{clock.text(begin)}",
            path=path,
        )
    return begin


def _started(start: str, zero: datetime) -> float:
    try:
        moment = datetime.fromisoformat(start)
    except ValueError:
        raise InputError(f"--start must be written as in 2026-12-01T00:00, not {start}") from None
    if (moment.tzinfo is None) != (zero.tzinfo is None):
        having = (
            "no time zone and the file's times have one"
            if moment.tzinfo is None
            else ("a time zone and the file's times have none")
        )
        raise InputError(f"--start {start} has {having}; give both or neither")
    return (moment - zero).total_seconds()
