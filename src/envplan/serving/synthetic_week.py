"""Weeks of requests, made of a recorded hour's: as many a minute as a published figure shows."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from envplan._io.files import read_bounded
from envplan.serving.classes import FloatArray, IntArray

#: Standard deviations between the least and the most of seven normal numbers: a figure's band of a
#: minute is taken for the range of a week's seven days.
_RANGE_OF_SEVEN: Final = 2.7
_MINUTES_PER_DAY: Final = 24 * 60


@dataclass(frozen=True, eq=False)
class WeekShape:
    """Requests per minute as a figure shows them, (k,) each.

    Attributes:
        minute: from the beginning of the week, ascending.
        middle: requests in that minute.
        low: the lower end of the figure's band.
        high: its upper end.
    """

    minute: FloatArray
    middle: FloatArray
    low: FloatArray
    high: FloatArray


@dataclass(frozen=True, eq=False)
class DrawnWeek:
    """Requests of a week in order of time, (n,) each.

    Attributes:
        arrival_s: from the beginning of the week, ascending.
        hour_request: the request of the hour that each one repeats, an index.
        num_minutes: how long the week is.
    """

    arrival_s: FloatArray
    hour_request: IntArray
    num_minutes: int


def read_week_shape(path: Path) -> WeekShape:
    """The digitized figure of a week: a CSV file with the columns of WeekShape in its order."""
    table = io.BytesIO(read_bounded(path))
    minute, middle, low, high = np.loadtxt(table, delimiter=",", skiprows=1, unpack=True)
    return WeekShape(minute, middle, low, high)


class _DrawnMinute(NamedTuple):
    """Requests of a minute in order of time, (n,) each.

    Attributes:
        offset_s: since the begin of the minute, ascending.
        hour_request: the request of the hour that each one repeats, an index.
    """

    offset_s: FloatArray
    hour_request: IntArray


def draw_week(
    shape: WeekShape, hour_arrival_s: FloatArray, *, days: float, slot_s: float, seed: int
) -> DrawnWeek:
    """Draw the requests of each minute of a week from minutes of an hour that begin anywhere.

    Args:
        shape: requests per minute.
        hour_arrival_s: times of the recorded hour's requests, ascending.
        days: how much of the week.
        slot_s: a minute.
        seed: of what is drawn.
    """
    random = np.random.default_rng(seed)
    requests_by_minute = _draw_counts(shape, round(days * _MINUTES_PER_DAY), random)
    arrivals_s: list[FloatArray] = []
    hour_requests: list[IntArray] = []
    for minute, num_requests in enumerate(requests_by_minute):
        drawn = _draw_minute(hour_arrival_s, num_requests, slot_s, random)
        arrivals_s.append(minute * slot_s + drawn.offset_s)
        hour_requests.append(drawn.hour_request)
    return DrawnWeek(
        arrival_s=np.concatenate(arrivals_s),
        hour_request=np.concatenate(hour_requests),
        num_minutes=len(requests_by_minute),
    )


def _draw_minute(
    hour_arrival_s: FloatArray, num_requests: int, slot_s: float, random: np.random.Generator
) -> _DrawnMinute:
    """Choose the requests of a minute among those of some minutes of the hour laid over it."""
    latest_begin_s = hour_arrival_s[-1] - slot_s
    offsets_s: list[FloatArray] = []
    candidates: list[npt.NDArray[np.int64]] = []
    num_candidates = 0
    while num_candidates < num_requests:
        begin_s = random.uniform(0.0, latest_begin_s)
        start, stop = np.searchsorted(hour_arrival_s, (begin_s, begin_s + slot_s))
        candidates.append(np.arange(start, stop))
        offsets_s.append(hour_arrival_s[start:stop] - begin_s)
        num_candidates += stop - start
    chosen = random.permutation(num_candidates)[:num_requests]
    offset_s = np.concatenate(offsets_s)[chosen]
    hour_request = np.concatenate(candidates)[chosen].astype(np.int32)
    order = np.argsort(offset_s)
    return _DrawnMinute(offset_s[order], hour_request[order])


def _draw_counts(shape: WeekShape, num_minutes: int, random: np.random.Generator) -> IntArray:
    """Requests of each minute, at least one, (num_minutes,)."""
    minutes = np.arange(num_minutes)
    range_of_week = shape.high - shape.low
    deviation = np.interp(minutes, shape.minute, range_of_week / _RANGE_OF_SEVEN)
    middle = np.interp(minutes, shape.minute, shape.middle)
    drawn = middle + deviation * random.standard_normal(num_minutes)
    counts: IntArray = np.maximum(1, np.rint(drawn)).astype(np.int64)
    return counts
