"""Rates as options give them: a number, or the path of a CSV file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, Protocol

from pydantic import BaseModel, BeforeValidator, Field, create_model

from envplan._io.files import read_bounded
from envplan._io.tables import Table, header_names, parse_table
from envplan.costs.rates import MAX_PER_KWH, Kind, Rate
from envplan.errors import InputError

MAX_RATE_BYTES: Final = 16 * 2**20

#: Rows of a file may be rounded to so many seconds: 0.333 hours stand for 20 minutes.
_ROUNDING_S: Final = 5.0
_HOUR_S: Final = 3600.0
#: What an option takes beside a file.
_EXAMPLES: Final[dict[Kind, str]] = {
    "price": "a number per kWh",
    "carbon": "a number per kWh",
    "power": "a power, such as 600kW,",
}


def read_rate(text: str, kind: Kind, *, start: str | None = None, repeats: bool = False) -> Rate:
    """The rate that an option gives: a number, or the path of a CSV file.

    The file has a column `time` (ISO 8601) or `hour` (hours since the run's start), a column named
    as `kind`, and perhaps others. A row holds from its time until the next row's, the last one as
    long as all others; where rows differ in length, a column `end` says until when each holds. A
    power may also stand as `power_w` beside `time_s` (seconds since the run's start), as in the
    files of `envplan serving simulate -o`.

    Args:
        text: the option.
        kind: "price", currency units per kWh, "carbon", gCO2 per kWh, or "power", W.
        start: ISO 8601; when the run starts, for files with `time`. Default: with the file.
        repeats: after its end the file begins again.

    Raises:
        InputError: it is neither, or the file has a gap, an overlap, disorder or a bad value; names
            the line.
    """
    start_time = None if start is None else _parse_start(start)
    try:
        per_kwh = float(text)
    except ValueError:
        return _read_file(Path(text), kind, start_time, repeats)
    if not abs(per_kwh) <= MAX_PER_KWH:
        raise InputError(f"{kind} must be a number, not {per_kwh:g}")
    if kind == "carbon" and per_kwh < 0:
        raise InputError(f"carbon must not be negative, not {per_kwh:g}")
    return Rate.fixed(per_kwh)


class _Clock(Protocol):
    """How a file of rates tells time."""

    def seconds(self, cell: Any) -> float:
        """A cell as s on the rate's own clock.

        Raises:
            TypeError: it has a time zone and others have none.
        """

    def text(self, seconds: float) -> str:
        """A time as it would stand in the file."""


class _Hours:
    """Hours since the run's start."""

    def seconds(self, cell: float) -> float:
        return float(cell * _HOUR_S)

    def text(self, seconds: float) -> str:
        return f"hour {seconds / _HOUR_S:g}"


class _Seconds:
    """Seconds since the run's start."""

    def seconds(self, cell: float) -> float:
        return float(cell)

    def text(self, seconds: float) -> str:
        return f"{seconds:g} s"


#: Clocks of columns of numbers.
_NUMBERS: Final[dict[str, _Clock]] = {"hour": _Hours(), "time_s": _Seconds()}


@dataclass(frozen=True)
class _Calendar:
    """Times of day, counted from the first of the file."""

    zero: datetime

    def seconds(self, cell: datetime) -> float:
        return float((cell - self.zero).total_seconds())

    def text(self, seconds: float) -> str:
        return (self.zero + timedelta(seconds=seconds)).isoformat()


class _Span(NamedTuple):
    """The seconds for which a row holds, on the rate's own clock."""

    begin_s: float
    end_s: float


def _read_file(path: Path, kind: Kind, start: datetime | None, repeats: bool) -> Rate:
    try:
        content = read_bounded(path, MAX_RATE_BYTES)
    except InputError as error:
        hint = f"; --{kind} takes {_EXAMPLES[kind]} or a CSV file"
        raise InputError(error.message + hint, path=path) from None
    header, newline, rows = content.partition(b"\n")
    header = header.lower()
    names = header_names(header.decode("utf-8-sig", "replace"))
    has_times = "time" in names
    clock_column = "time" if has_times else "hour"
    value_column: str = kind
    if kind == "power" and {"time_s", "power_w"} <= set(names) and not has_times:
        clock_column, value_column = "time_s", "power_w"
    table = parse_table(
        header + newline + rows,
        _row_model(clock_column, kind, value_column),
        path=path,
        kind="a table of rates, with times or with hours,",
    )
    begins = table.columns[clock_column]
    clock: _Clock = _Calendar(zero=begins[0]) if has_times else _NUMBERS[clock_column]
    start_s = 0.0
    try:
        spans = _spans(clock, begins, table.columns["end"])
        _check_complete(table, spans, clock)
        if has_times and start is not None:
            start_s = clock.seconds(start)
    except TypeError:
        problem = "some times have a time zone, and others (or --start) none"
        raise InputError(problem, path=path) from None
    first_s, end_s = spans[0].begin_s, spans[-1].end_s
    if not first_s <= start_s < end_s:
        reach = f"{clock.text(first_s)} to {clock.text(end_s)}"
        problem = f"reaches from {reach}, and the run starts at {clock.text(start_s)}"
        raise InputError(problem, path=path)
    return Rate.of(
        begins_s=[span.begin_s for span in spans],
        per_kwh=list(table.columns[value_column]),
        end_s=end_s,
        start_s=start_s,
        repeats=repeats,
        file=path.as_posix(),
    )


def _spans(clock: _Clock, begins: Sequence[Any], ends: Sequence[Any]) -> list[_Span]:
    """When each row holds; one without an end holds as long as the first one until the second."""
    begins_s = [clock.seconds(begin) for begin in begins]
    usual_length_s = begins_s[1] - begins_s[0] if len(begins_s) > 1 else 0.0
    spans = []
    for begin_s, end in zip(begins_s, ends, strict=True):
        end_s = begin_s + usual_length_s if end is None else clock.seconds(end)
        spans.append(_Span(begin_s, end_s))
    return spans


def _check_complete(table: Table[Any], spans: Sequence[_Span], clock: _Clock) -> None:
    """Refuse rows with gaps, overlaps or disorder between them."""
    covered_until_s = spans[0].begin_s
    for row, (begin_s, end_s) in enumerate(spans):
        follows_on = abs(begin_s - covered_until_s) <= _ROUNDING_S
        if not follows_on or end_s <= begin_s:
            raise table.error(
                row,
                f"holds from {clock.text(begin_s)} to {clock.text(end_s)}, and all before it until "
                f"{clock.text(covered_until_s)}: rows must ascend in time and leave nothing out; a "
                "single row needs a column end, and so do rows that differ in length",
            )
        covered_until_s = end_s


def _parse_start(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise InputError(f"--start must be as in 2026-12-01T00:00, not {text}") from None


def _parse_time(text: str | None) -> datetime:
    """The time in a cell; None: it is empty."""
    try:
        return datetime.fromisoformat(text or "")
    except ValueError:
        raise ValueError("is no time") from None


def _row_model(clock: str, kind: Kind, value_column: str) -> type[BaseModel]:
    """The columns of a file of rates.

    Args:
        clock: the column by which the file tells time, "time", "hour" or "time_s".
        kind: of the values.
        value_column: that holds them.
    """
    most = 1e7 * _HOUR_S if clock == "time_s" else 1e7
    cell: Any = Annotated[float, Field(ge=-most, le=most, allow_inf_nan=False)]
    expected = "a number of seconds" if clock == "time_s" else "a number of hours"
    if clock == "time":
        cell = Annotated[datetime, BeforeValidator(_parse_time)]
        expected = "one as in 2026-12-01T00:00"
    min_value = -MAX_PER_KWH if kind == "price" else 0.0  # prices may be negative
    expected_value = "power, W" if kind == "power" else f"{kind} per kWh"
    value = Field(ge=min_value, le=MAX_PER_KWH, allow_inf_nan=False, description=expected_value)
    columns: Any = {
        clock: (cell, Field(description=expected)),
        "end": (cell | None, Field(None, description=expected)),
        value_column: (float, value),
    }
    return create_model("RateRow", **columns)
