"""Traces: which requests come when, one by one.

A trace is a CSV file, plain or gzipped, in order of time, with one row per request or, with a
column `requests`, per many alike, spread evenly from its timestamp to the next one: then all
timestamps are equally far apart. docs/serving.md ("Traces") names the columns. `timestamp` is in
seconds, or a date and time as in 2026-11-16T09:00:00, with or without fractions and zone.
Files are read in pieces: 27 million requests take about half a gigabyte, and nothing else grows.
"""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from envplan._io.files import named_file, refuse_slip, unzipped
from envplan.errors import InputError, shown
from envplan.serving.classes import CLASSES, FloatArray, classify_all
from envplan.serving.profile import ServingProfile, builtin_folder

IntArray = npt.NDArray[np.int32]

SLOT_S: Final = 60.0  # by which policies look at a trace
_PIECE: Final = 500_000  # rows read at once
_LONGEST_SILENCE_S: Final = 6 * 3600.0
_LONGEST_S: Final = 200_000 * SLOT_S
_MOST_REQUESTS: Final = 100_000_000
_MOST_TOKENS: Final = 10_000_000
_LATEST_S: Final = 1e11  # far beyond any date in seconds since 1970, and before all in milliseconds
_LENGTHS: Final = ("input_tokens", "output_tokens")
#: What others call a time of arrival in seconds or as a date, and the tokens: Azure, BurstGPT,
#: Vidur, splitwise-sim.
_OTHERS: Final = {
    "arrived_at": "timestamp",
    "arrival_timestamp": "timestamp",
    **dict.fromkeys(
        ("ContextTokens", "Request tokens", "num_prefill_tokens", "prompt_size"), _LENGTHS[0]
    ),
    **dict.fromkeys(
        ("GeneratedTokens", "Response tokens", "num_decode_tokens", "token_size"), _LENGTHS[1]
    ),
}
_COLUMNS: Final = ("timestamp", "class", *_LENGTHS, "requests")
_NAMES: Final = {name.lower(): known for name, known in _OTHERS.items()}

#: The weeks by name, and the hour whose requests each is made of.
WEEKS: Final = {"coding-week": "azure-2023-code", "conversation-week": "azure-2023-conversation"}
_RANGE: Final = 2.7  # standard deviations between the least and the most of seven normal numbers


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in order of time; arrays of one length.

    Attributes:
        name: the file's name without .csv and .gz.
        arrival: s since the first of them, ascending.
        input_tokens, output_tokens: of each; None where the trace gives classes instead.
        known: place in CLASSES of each.
        made: how it was made, in words; None for one that is as it was recorded.
        lasts_s: how long it covers, s; None: to the end of the last request's minute.
    """

    name: str
    arrival: FloatArray
    input_tokens: IntArray | None
    output_tokens: IntArray | None
    known: npt.NDArray[np.uint8]
    made: str | None = None
    lasts_s: float | None = None

    @property
    def duration_s(self) -> float:
        """From the beginning to the end of the last slot, s."""
        last = self.lasts_s or float(self.arrival[-1]) + 1e-9
        return SLOT_S * max(1, math.ceil(last / SLOT_S))

    def __len__(self) -> int:
        return len(self.arrival)

    @cached_property
    def counts(self) -> npt.NDArray[np.int64]:
        """Requests by slot and class, (slots, 9)."""
        shape = (round(self.duration_s / SLOT_S), len(CLASSES))
        found = np.zeros(shape[0] * shape[1], dtype=np.int64)
        for begin in range(0, len(self), _PIECE):  # in pieces, for memory
            part = slice(begin, begin + _PIECE)
            place = (self.arrival[part] / SLOT_S).astype(np.int64) * len(CLASSES) + self.known[part]
            found += np.bincount(place, minlength=len(found))
        return found.reshape(shape)

    def lengths(self, profile: ServingProfile) -> tuple[IntArray, IntArray]:
        """Tokens of each request's input and output; the class's means where none are stated."""
        if self.input_tokens is not None and self.output_tokens is not None:
            return self.input_tokens, self.output_tokens
        classes = [profile.classes[name] for name in CLASSES]
        means = [(known.input_tokens, known.output_tokens) for known in classes]
        given, made = np.maximum(1, np.rint(means)).astype(np.int32).T
        return given[self.known], made[self.known]

    def mean_lengths(self) -> dict[str, tuple[float, float]]:
        """Mean input and output of each class that is there, tokens; none if it gives classes."""
        if self.input_tokens is None:
            return {}
        number, given, made = (
            np.bincount(self.known, tokens, len(CLASSES))
            for tokens in (None, self.input_tokens, self.output_tokens)
        )
        there = np.flatnonzero(number)
        return {CLASSES[k]: (given[k] / number[k], made[k] / number[k]) for k in there}

    def part(self, kept: npt.NDArray[Any] | slice) -> Trace:
        """Those requests that a mask, a slice or an array of places selects, at the same times."""
        given, made = (
            None if tokens is None else tokens[kept]
            for tokens in (self.input_tokens, self.output_tokens)
        )
        return replace(self, arrival=self.arrival[kept], input_tokens=given, output_tokens=made,
                       known=self.known[kept], lasts_s=self.duration_s)  # fmt: skip

    def scaled(self, factor: float, seed: int = 0) -> Trace:
        """So many times the requests: some are left out, or copies are laid over, shifted in time.

        A copy is shifted around the trace's end by a few minutes, so that bursts add up as those of
        independent users do, and the course of the day stays.
        """
        random = np.random.default_rng(seed)
        copies, duration = math.ceil(factor), self.duration_s
        arrival = np.concatenate([self.arrival, *(
            (self.arrival + random.uniform(60.0, 600.0)) % duration for _ in range(copies - 1)
        )])  # fmt: skip
        kept = random.permutation(len(arrival))[: max(1, round(factor * len(self)))]
        kept = kept[np.argsort(arrival[kept], kind="stable")]
        chosen = replace(self.part(kept % len(self)), arrival=arrival[kept])
        return replace(chosen, name=f"{self.name} x{factor:g}", made=f"scaled by {factor:g}")

    @classmethod
    def read_csv(cls, path: str | os.PathLike[str]) -> Trace:
        """Read and check a trace.

        Raises:
            InputError: naming file, line, column and what to do.
        """
        import pandas as pd

        path = Path(path)
        columns: dict[str, Any] = {}
        named: dict[str, str] = {}
        seen = 0
        try:
            with unzipped(path) as file, warnings.catch_warnings():
                warnings.simplefilter("error", pd.errors.ParserWarning)  # cells without a column
                for frame in pd.read_csv(
                    file, chunksize=_PIECE, skipinitialspace=True, index_col=False
                ):
                    named = named or _named(frame.columns, path)
                    frame.columns = list(named)
                    if frame.empty:
                        continue
                    last = columns["at"][-1] if seen else None
                    for name, values in _checked(frame, named, path, seen + 2, last).items():
                        column = columns.setdefault(name, np.empty(0, values.dtype))
                        column.resize(seen + len(frame), refcheck=False)  # never there twice
                        column[seen:] = values
                    seen += len(frame)
                    if seen > _MOST_REQUESTS:
                        raise InputError(f"has more than {_MOST_REQUESTS} rows", path=path)
        except pd.errors.EmptyDataError:
            pass  # there are no rows
        except (EOFError, OSError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"cannot be read to its end ({reason})", path=path) from None
        except UnicodeDecodeError:
            raise InputError("is not a text file in UTF-8", path=path) from None
        except (ValueError, pd.errors.ParserWarning) as error:
            said = " ".join(str(error).split())
            raise InputError(f"is not a CSV table ({said})", path=path) from None
        if not seen:
            raise InputError("has no rows", path=path)
        at = columns["at"]
        at -= at[0]
        if at[-1] > _LONGEST_S:
            most = f"at most {_LONGEST_S:g} can be replayed"
            raise InputError(f"spans {at[-1]:g} s; {most}", path=path)
        name, number = re.sub(r"(\.csv)?(\.gz)?$", "", path.name), columns.get("requests")
        lengths = [columns.get(length) for length in _LENGTHS]
        trace = cls(name, at, lengths[0], lengths[1], columns["known"])
        return trace if number is None else _expanded(trace, number, path)

    @classmethod
    def open(cls, path_or_name: str) -> Trace:
        """The trace at a path or, where no such path exists, the built-in of that name.

        Raises:
            InputError: it is neither, or no valid trace.
        """
        path = named_file(path_or_name, builtin_traces(), "trace")
        week = path_or_name in WEEKS and path.parent == builtin_folder()
        return make_week(path_or_name) if week else cls.read_csv(path)


def make_week(name: str, *, days: float = 7.0, seed: int = 0) -> Trace:
    """A real-shaped week, or its first days; the same for the same seed.

    Args:
        name: one of WEEKS.
        days: how much of it.
        seed: of what is drawn.
    """
    hour = Trace.open(WEEKS[name])
    random = np.random.default_rng(seed)
    minute, middle, low, high = np.loadtxt(
        builtin_folder() / f"{name}.shape.csv", delimiter=",", skiprows=1
    ).T
    minutes = np.arange(round(days * 24 * 60))
    spread = np.interp(minutes, minute, (high - low) / _RANGE)
    wanted = np.interp(minutes, minute, middle) + spread * random.standard_normal(len(minutes))
    counts = np.maximum(1, np.rint(wanted)).astype(np.int64)
    latest = hour.arrival[-1] - SLOT_S
    at, rows = [], []
    for k, count in enumerate(counts):
        offsets, picked, found = [], [], 0
        while found < count:
            begin = random.uniform(0.0, latest)
            first, last = np.searchsorted(hour.arrival, (begin, begin + SLOT_S))
            picked.append(np.arange(first, last))
            offsets.append(hour.arrival[first:last] - begin)
            found += last - first
        chosen = random.permutation(found)[:count]
        times = np.concatenate(offsets)[chosen]
        order = np.argsort(times)
        at.append(k * SLOT_S + times[order])
        rows.append(np.concatenate(picked)[chosen[order]].astype(np.int32))
    made = f"real-shaped: the digitized minutes of the week, made of the minutes of {hour.name}"
    return replace(
        hour.part(np.concatenate(rows)), name=name, arrival=np.concatenate(at), made=made,
        lasts_s=len(counts) * SLOT_S,
    )  # fmt: skip


def builtin_traces() -> dict[str, Path]:
    """The traces that ship with envplan, by name: two real hours, two real-shaped weeks."""
    folder = builtin_folder()
    found = [*folder.glob("*.csv.gz"), *folder.glob("*.shape.csv")]
    return {path.name.split(".", 1)[0]: path for path in sorted(found)}


def _named(columns: Iterable[str], path: Path) -> dict[str, str]:
    """The columns by the names that this module has for them, as the file writes them."""
    named: dict[str, str] = {}
    for written in map(str.strip, columns):
        name = _NAMES.get(written.lower(), written.lower())
        if name in named:
            raise InputError(f"column {written!r} is there twice", path=path, line=1)
        named[name] = written
    for name, written in named.items():
        if name not in _COLUMNS:
            refuse_slip(written, (*_COLUMNS, *_OTHERS), path, 1)
    there = f"its first line is {shown(','.join(named.values()))}"
    both = f"a column class, or both {' and '.join(_LENGTHS)} (or as Azure names them)"
    if "timestamp" not in named:
        raise InputError(
            f"has no column timestamp; it needs that and {both}; {there}", path=path, line=1
        )
    if "class" not in named and not named.keys() >= set(_LENGTHS):
        raise InputError(f"needs {both}; {there}", path=path, line=1)
    return named


def _checked(
    frame: Any, named: Mapping[str, str], path: Path, line: int, last: float | None
) -> dict[str, Any]:
    """The columns of some rows: `at` (s), `known` (classes), and token counts and requests if any.

    Args:
        frame: the rows, numbers as such and all else as text.
        named: the columns as the file has them.
        line: of the first row.
        last: time of the row before, s; None if there is none.
    """
    import pandas as pd

    def refuse(bad: Any, column: str, message: str) -> None:
        """Raise for the first row that `bad` marks; {} stands for its cell."""
        if bad.any():
            row = int(np.argmax(np.asarray(bad)))
            cell = frame[column].iloc[row]
            cell = shown(cell.item() if isinstance(cell, np.generic) else cell)
            raise InputError(
                message.format(cell), path=path, line=line + row, column=named.get(column)
            )

    def numbers(column: str) -> FloatArray:
        values: FloatArray = pd.to_numeric(frame[column], errors="coerce").to_numpy(np.float64)
        bad = ~((values >= 0) & (values <= _MOST_TOKENS))
        refuse(bad, column, f"must be a number from 0 to {_MOST_TOKENS}, not {{}}")
        return values

    for column in [name for name in named if name in _COLUMNS]:
        refuse(frame[column].isna(), column, "is blank; the table must have no holes")
    times = frame["timestamp"]
    if not pd.api.types.is_numeric_dtype(times):  # s since 1970
        when = pd.to_datetime(times, format="ISO8601", utc=True, errors="coerce")
        wanted = "must be seconds from 0 up, or a time as in 2026-11-16T09:00:00, not {}"
        refuse(when.isna(), "timestamp", wanted)
        moments = when.dt.tz_localize(None).to_numpy("datetime64[us]")
        at: FloatArray = moments.astype(np.int64) / 1e6
    else:
        at = times.to_numpy(np.float64, copy=True)
        bad = ~((at >= 0) & (at < _LATEST_S))
        refuse(bad, "timestamp", "must be seconds from 0 up, not {}, which may be milliseconds")
    gaps = np.diff(at, prepend=at[0] if last is None else last)
    refuse(gaps < 0, "timestamp", "comes before the line above it ({}); sort the trace by time")
    found: dict[str, Any] = {"at": at}
    if "requests" in frame:
        found["requests"] = numbers("requests")
    else:
        refuse(
            gaps > _LONGEST_SILENCE_S, "timestamp",
            f"the trace has a gap: no request for {gaps.max():.0f} s before {{}}; cut it "
            "there, or give counts in a column requests, 0 where there are none",
        )  # fmt: skip
    if "class" in frame:
        place = pd.Index(CLASSES).get_indexer(frame["class"])
        words = f"{', '.join(CLASSES)} (input then output)"
        refuse(place < 0, "class", f"there is no class {{}}; the classes are {words}")
        found["known"] = place.astype(np.uint8)
    else:
        found |= {name: np.maximum(1, numbers(name)).astype(np.int32) for name in _LENGTHS}
        found["known"] = classify_all(*(found[name] for name in _LENGTHS))
    return found


def _expanded(trace: Trace, number: FloatArray, path: Path) -> Trace:
    """The requests that the rows of a trace stand for, so many each."""
    at, times = trace.arrival, np.unique(trace.arrival)
    if len(times) < 2:
        raise InputError("needs at least two different timestamps", path=path)
    steps = np.diff(times)
    step = float(steps.min())
    if (wide := np.flatnonzero(abs(steps - step) > 1e-6 * step)).size:
        before, after = times[wide[0] : wide[0] + 2]
        raise InputError(
            f"the trace has a gap: nothing between {before:.10g} and {after:.10g} s, though rows "
            f"are {step:g} s apart; add a row with 0 requests for every such step",
            path=path, line=int(np.searchsorted(at, after)) + 2, column="timestamp",
        )  # fmt: skip
    count = np.rint(number).astype(np.int64)
    if not 0 < count.sum() <= _MOST_REQUESTS:
        raise InputError(f"must have 1 to {_MOST_REQUESTS} requests, not {count.sum()}", path=path)
    row = np.repeat(np.arange(len(count)), count)
    place = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    arrival = at[row] + (place + 0.5) / count[row] * step
    order = np.argsort(arrival, kind="stable")
    return replace(trace.part(row[order]), arrival=arrival[order], lasts_s=float(times[-1]) + step)
