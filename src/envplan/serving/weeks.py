"""Weeks with a real shape: requests per minute as digitized, made of the minutes of a real hour.

No week of requests ships, for its size. What ships is how many requests came per minute over the
week that DynamoLLM used (read off its published plots: the middle and the range of seven minutes,
every ten minutes) and every request of an hour of the same service half a year earlier. Each minute
of the made week lays randomly chosen minutes of the hour over each other until it has as many
requests as the shape says, so lengths and bursts within minutes are those of the hour. Days and
levels are real, single requests are not: such a week is "real-shaped".
"""

from __future__ import annotations

from typing import Final

import numpy as np

from envplan.serving.profile import builtin_folder
from envplan.serving.trace import Trace

__all__ = ["WEEKS", "make_week"]

#: The weeks by name, and the hour whose requests each is made of.
WEEKS: Final = {"coding-week": "azure-2023-code", "conversation-week": "azure-2023-conversation"}
_RANGE: Final = 2.7  # standard deviations between the least and the most of seven normal numbers
_MINUTE_S: Final = 60.0


def make_week(name: str, *, days: float = 7.0, seed: int = 0) -> Trace:
    """A real-shaped week, or its first days; the same for the same seed.

    Args:
        name: one of WEEKS.
        days: how much of it.
        seed: of what is drawn.
    """
    hour = Trace.open(WEEKS[name])
    assert hour.input_tokens is not None and hour.output_tokens is not None
    random = np.random.default_rng(seed)
    minute, middle, low, high = np.loadtxt(
        builtin_folder() / f"{name}.shape.csv", delimiter=",", skiprows=1
    ).T
    minutes = np.arange(round(days * 24 * 60))
    spread = np.interp(minutes, minute, (high - low) / _RANGE)
    wanted = np.interp(minutes, minute, middle) + spread * random.standard_normal(len(minutes))
    counts = np.maximum(1, np.rint(wanted)).astype(np.int64)
    latest = hour.arrival[-1] - _MINUTE_S
    at, rows = [], []
    for k, count in enumerate(counts):
        offsets, found = [], 0
        picked = []
        while found < count:
            begin = random.uniform(0.0, latest)
            first, last = np.searchsorted(hour.arrival, (begin, begin + _MINUTE_S))
            picked.append(np.arange(first, last))
            offsets.append(hour.arrival[first:last] - begin)
            found += last - first
        chosen = random.permutation(found)[:count]
        times = np.concatenate(offsets)[chosen]
        order = np.argsort(times)
        at.append(k * _MINUTE_S + times[order])
        rows.append(np.concatenate(picked)[chosen[order]].astype(np.int32))
    places = np.concatenate(rows)
    made = f"real-shaped: the digitized minutes of the week, made of the minutes of {hour.name}"
    return Trace(name, np.concatenate(at), hour.input_tokens[places], hour.output_tokens[places],
                 hour.known[places], made=made, lasts_s=len(counts) * _MINUTE_S)  # fmt: skip
