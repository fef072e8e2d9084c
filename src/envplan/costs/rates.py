"""What a kilowatt-hour costs: fixed, or a step function of time that is read from a CSV file."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from datetime import datetime, timedelta
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, create_model, model_validator

from envplan._io.documents import Model
from envplan._io.files import read_bounded
from envplan._io.tables import parse_table
from envplan.errors import InputError

__all__ = ["Kind", "Rate", "read_rate"]

MAX_RATE_BYTES: Final = 16 * 2**20
MAX_RATE_ROWS: Final = 100_000

#: Rows of a file may be rounded to so many seconds: 0.333 hours stand for 20 minutes.
_ROUNDING_S: Final = 5.0
_HOUR_S: Final = 3600.0

MAX_PER_KWH: Final = 1e9

Kind = Literal["price", "carbon", "power"]
#: What an option takes beside a file.
_EXAMPLES: Final[dict[Kind, str]] = {
    "price": "a number per kWh",
    "carbon": "a number per kWh",
    "power": "a power, such as 600kW,",
}
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
        ends = [*self.begins_s, math.inf if self.end_s is None else self.end_s]
        for wrong, words in (
            (len(ends) != len(self.per_kwh) + 1, "begins_s and per_kwh should be of one length"),
            (any(b <= a for a, b in pairwise(ends)), "begins_s and then end_s should ascend"),
            (self.end_s is None and len(ends) > 2, "end_s should say when the last value ends"),
            (not ends[0] <= self.start_s < ends[-1], "start_s should lie where the rate is known"),
        ):
            if wrong:
                raise ValueError(words)
        return self

    @classmethod
    def fixed(cls, per_kwh: float) -> Self:
        """The same rate at all times."""
        return cls(begins_s=[0.0], per_kwh=[per_kwh])

    @property
    def is_fixed(self) -> bool:
        """Whether it is the same at all times."""
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
        return self.per_kwh[0] if self.end_s is None else self._within(self.end_s) / self._period_s

    def integral(self, seconds: float) -> float:
        """Of the rate over the first `seconds` of the run, units per kWh times s."""
        return self._until(self.start_s + seconds) - self._until(self.start_s)

    def _until(self, clock_s: float) -> float:
        if not self.repeats or self.end_s is None:
            return self._within(clock_s)
        rounds = math.floor((clock_s - self.begins_s[0]) / self._period_s)
        return rounds * self._within(self.end_s) + self._within(clock_s - rounds * self._period_s)

    def _within(self, clock_s: float) -> float:
        k = max(0, bisect_right(self.begins_s, clock_s) - 1)
        return self._sums[k] + self.per_kwh[k] * (clock_s - self.begins_s[k])

    @cached_property
    def _sums(self) -> list[float]:
        """The integral from the first begin to each."""
        lengths = (later - earlier for earlier, later in pairwise(self.begins_s))
        areas = (value * length for value, length in zip(self.per_kwh, lengths, strict=False))
        return list(accumulate(areas, initial=0.0))

    @property
    def _period_s(self) -> float:
        return (self.end_s or 0.0) - self.begins_s[0]

    def at(self, seconds: float) -> float:
        """The value that holds at a time of the run, s since its start."""
        clock_s = self.start_s + seconds
        if self.repeats and self.end_s is not None:
            clock_s = self.begins_s[0] + (clock_s - self.begins_s[0]) % self._period_s
        return self.per_kwh[max(0, bisect_right(self.begins_s, clock_s) - 1)]

    def changes(self, since: float, until: float) -> Iterator[float]:
        """When the rate changes, s since the run's start, strictly between two such times."""
        first_round = last_round = 0
        if self.repeats:
            offset = self.begins_s[0] - self.start_s
            first_round = math.floor((since - offset) / self._period_s)
            last_round = math.floor((until - offset) / self._period_s)
        for rounds in range(first_round, last_round + 1):
            shift = rounds * self._period_s - self.start_s
            for begin in self.begins_s:
                if since < begin + shift < until:
                    yield begin + shift


def read_rate(text: str, kind: Kind, *, start: str | None = None, repeats: bool = False) -> Rate:
    """The rate that an option gives: a number, or the path of a CSV file.

    The file has a column `time` (ISO 8601) or `hour` (hours since the run's start), a column named
    as `kind`, and perhaps others. A row holds from its time until the next row's, the last one as
    long as all others; where rows differ in length, a column `end` says until when each holds.

    Args:
        kind: "price", currency units per kWh, "carbon", gCO2 per kWh, or "power", W.
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
    if not abs(value) <= MAX_PER_KWH:
        raise InputError(f"{kind} must be a number, not {value:g}")
    if kind == "carbon" and value < 0:
        raise InputError(f"carbon must not be negative, not {value:g}")
    return Rate.fixed(value)


def _read_file(path: Path, kind: Kind, start: str | None, repeats: bool) -> Rate:
    try:
        content = read_bounded(path, MAX_RATE_BYTES)
    except InputError as error:
        hint = f"; --{kind} takes {_EXAMPLES[kind]} or a CSV file"
        raise InputError(error.message + hint, path=path) from None
    header, newline, rows = content.partition(b"\n")
    header = header.lower()
    names = [name.strip() for name in header.decode("utf-8-sig", "replace").split(",")]
    clock = "time" if "time" in names else "hour"
    words = "a table of rates, with times or with hours,"
    table = parse_table(header + newline + rows, _row_model(clock, kind), path=path, kind=words)
    zero = table.columns[clock][0]

    def seconds(when: Any) -> float:
        """Of a cell, since the first of a file with times, or since the run's start."""
        try:
            return float((when - zero).total_seconds() if clock == "time" else when * _HOUR_S)
        except TypeError:
            words = "some times have a time zone, and others (or --start) none"
            raise InputError(words, path=path) from None

    def text(seconds: float) -> str:
        """A time as it would stand in the file."""
        if clock == "time":
            return str((zero + timedelta(seconds=seconds)).isoformat())
        return f"hour {seconds / _HOUR_S:g}"

    begins = list(map(seconds, table.columns[clock]))
    over, usual = begins[0], begins[1] - begins[0] if len(begins) > 1 else 0.0
    for row, (begin, given) in enumerate(zip(begins, table.columns["end"], strict=True)):
        end = begin + usual if given is None else seconds(given)
        if abs(begin - over) > _ROUNDING_S or end <= begin:
            raise table.error(
                row,
                f"holds from {text(begin)} to {text(end)}, and all before it until {text(over)}: "
                "rows must ascend in time and leave nothing out; a single row needs a column end, "
                "and so do rows that differ in length",
            )
        over = end
    begin = 0.0
    if clock == "time" and start is not None:
        try:
            begin = seconds(_moment(start))
        except ValueError:
            raise InputError(f"--start must be as in 2026-12-01T00:00, not {start}") from None
    if not begins[0] <= begin < over:
        reach = f"{text(begins[0])} to {text(over)}, and the run starts at {text(begin)}"
        raise InputError(f"reaches from {reach}", path=path)
    known: Any = {"begins_s": begins, "per_kwh": list(table.columns[kind]), "end_s": over}
    return Rate.of(**known, start_s=begin, repeats=repeats, file=path.as_posix())


def _moment(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise ValueError("is no time") from None


def _row_model(clock: str, kind: Kind) -> type[BaseModel]:
    when: Any = Annotated[float, Field(ge=-1e7, le=1e7, allow_inf_nan=False)]
    example = "a number of hours"
    if clock == "time":
        when, example = Annotated[datetime, BeforeValidator(_moment)], "one as in 2026-12-01T00:00"
    least = -MAX_PER_KWH if kind == "price" else 0.0
    description = "power, W" if kind == "power" else f"{kind} per kWh"
    value = Field(ge=least, le=MAX_PER_KWH, allow_inf_nan=False, description=description)
    begins, ends = Field(description=example), Field(None, description=example)
    fields: Any = {clock: (when, begins), "end": (when | None, ends), kind: (float, value)}
    return create_model("RateRow", **fields)
