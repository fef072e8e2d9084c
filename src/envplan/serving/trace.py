"""Load traces: how many requests of which class come when.

A trace is a CSV file with one row per request, or per many alike,

    timestamp,class[,requests]
    timestamp,input_tokens,output_tokens[,requests]

in order of time. `timestamp` is in seconds, or a date and time as in 2026-11-16T09:00:00. With
`requests`, a row stands for so many of them, spread evenly from its timestamp to the next one there
is; all timestamps then are equally far apart.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from envplan.errors import InputError
from envplan.serving.classes import CLASSES, check_class, classify
from envplan.serving.profile import ServingProfile, builtin_folder, sidecar_path
from envplan.serving.tables import Row, exists, read_bytes, read_rows

__all__ = ["Trace", "builtin_traces"]

FloatArray = npt.NDArray[np.float64]

_SLOT_S: Final = 60.0  # into which single requests are counted
_LONGEST_SILENCE_S: Final = 3600.0
_MOST_SLOTS: Final = 200_000
_LENGTHS: Final = ("input_tokens", "output_tokens")


class _Arrival(NamedTuple):
    at: float
    place: int
    requests: float
    tokens: float  # of all of them; NaN where the trace does not say
    line: int


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests by slot and class.

    Attributes:
        name: the file's name without .csv.
        step_s: length of a slot, s.
        requests: float64 (slots, classes in the order of CLASSES).
        lengths: tokens of these requests, the same shape; NaN where the trace does not say.
    """

    name: str
    step_s: float
    requests: FloatArray
    lengths: FloatArray

    @property
    def duration_s(self) -> float:
        """From the first slot to the end of the last, s."""
        return self.step_s * len(self.requests)

    def tokens(self, profile: ServingProfile) -> FloatArray:
        """Tokens by slot and class, shape as `requests`; mean lengths where none are stated."""
        mean = np.array([profile.classes[name].tokens for name in CLASSES])
        usual: FloatArray = self.requests * mean
        return np.where(np.isnan(self.lengths), usual, self.lengths)

    @classmethod
    def read_csv(cls, path: str | os.PathLike[str]) -> Trace:
        """Read and check a trace.

        Raises:
            InputError: naming file, line, column and what to do.
        """
        file = Path(path)
        return _built(read_bytes(file), file.stem, file)

    @classmethod
    def open(cls, path_or_name: str) -> Trace:
        """The trace at a path or, where no such path exists, the built-in of that name.

        Raises:
            InputError: it is neither, or no valid trace.
        """
        if exists(path_or_name):
            return cls.read_csv(path_or_name)
        known = builtin_traces()
        if path_or_name in known:
            return cls.read_csv(known[path_or_name])
        raise InputError(
            "no such file, and no built-in trace of that name; give the path of a CSV or one of: "
            f"{', '.join(known)}",
            path=path_or_name,
        )


def builtin_traces() -> dict[str, Path]:
    """The traces that ship with envplan, by name."""
    found = sorted(builtin_folder().glob("*.csv"))
    return {p.stem: p for p in found if not sidecar_path(p).exists()}


def _built(content: bytes, name: str, path: Path | None) -> Trace:
    rows = list(read_rows(content, path, ("timestamp",), ("class", *_LENGTHS, "requests")))
    if not rows:
        raise InputError("has no rows", path=path)
    arrivals = list(_arrivals(rows, path))
    first = arrivals[0].at
    counted = "requests" in rows[0].cells
    step = _step(arrivals, path) if counted else _SLOT_S
    if not counted:
        _refuse_silence(arrivals, path)
    slots = round((arrivals[-1].at - first) // step) + 1
    if slots > _MOST_SLOTS:
        raise InputError(
            f"spans {slots} slots of {step:g} s; at most {_MOST_SLOTS} can be replayed", path=path
        )
    requests = np.zeros((slots, len(CLASSES)))
    tokens = np.zeros((slots, len(CLASSES)))
    for arrival in arrivals:
        place = (round((arrival.at - first) // step), arrival.place)
        requests[place] += arrival.requests
        tokens[place] += arrival.tokens
    return Trace(name, step, requests, tokens)


def _arrivals(rows: Sequence[Row], path: Path | None) -> Iterator[_Arrival]:
    before = -math.inf
    for row in rows:
        at = _time(row)
        if at < before:
            raise row.error(
                "timestamp",
                f"comes before the line above it ({at:g} after {before:g} s); sort the trace by "
                "time",
            )
        before = at
        requests = row.number("requests") if "requests" in row.cells else 1.0
        if "class" in row.cells:
            name = check_class(row.text("class"), path=path, line=row.line, column="class")
            tokens = math.nan if requests else 0.0
        elif all(column in row.cells for column in _LENGTHS):
            given, made = (row.number(column) for column in _LENGTHS)
            name, tokens = classify(given, made), requests * (given + made)
        else:
            raise InputError(
                "needs a column class, or both input_tokens and output_tokens", path=path, line=1
            )
        yield _Arrival(at, CLASSES.index(name), requests, tokens, row.line)


def _time(row: Row) -> float:
    text = row.text("timestamp")
    try:
        return row.number("timestamp")
    except InputError:
        try:
            when = datetime.fromisoformat(text)
        except ValueError:
            raise row.error(
                "timestamp",
                f"must be seconds from 0 up, or a time as in 2026-11-16T09:00:00, not {text!r}",
            ) from None
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()


def _step(arrivals: list[_Arrival], path: Path | None) -> float:
    """How far apart the timestamps of a counted trace are, s."""
    lines = {arrival.at: arrival.line for arrival in reversed(arrivals)}
    times = sorted(lines)
    if len(times) < 2:
        raise InputError("needs at least two different timestamps", path=path)
    step = min(after - before for before, after in pairwise(times))
    for before, after in pairwise(times):
        if abs(after - before - step) > 1e-6 * step:
            raise InputError(
                f"the trace has a gap: nothing between {before:.10g} and {after:.10g} s, though "
                f"rows are {step:g} s apart; add a row with 0 requests for every step without any",
                path=path,
                line=lines[after],
                column="timestamp",
            )
    return step


def _refuse_silence(arrivals: list[_Arrival], path: Path | None) -> None:
    for before, after in pairwise(arrivals):
        if after.at - before.at > _LONGEST_SILENCE_S:
            raise InputError(
                f"the trace has a gap: no request for {after.at - before.at:g} s; cut it there, or "
                "give counts in a column requests, 0 where there are none",
                path=path,
                line=after.line,
                column="timestamp",
            )
