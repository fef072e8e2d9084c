"""What a sweep found: its best points, and what each thing that varies makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any, Final, NamedTuple

from envplan.sweep.table import Row

__all__ = ["Share", "best_rows", "by_what_varies", "target_in_words", "varying"]

#: What a sweep may vary, as rows have it.
_VARIED: Final = (
    *("profile", "schedule", "planner", "target", "microbatches", "chunks", "gpus_per_stage"),
    *("replicas", "p2p_latency_s", "blocking_power_w", "recompute", "extra"),
    *("one_clock", "parts_within_percent"),
    *("switch_latency_ms", "min_dwell_ms", "robust_percent", "noise_percent", "seed"),
)


class Share(NamedTuple):
    """The points that have one value of what varies.

    Attributes:
        name, value: such as "schedule" and "1f1b".
        points: how many.
        slowdown_percent, savings_percent: on average.
        most_percent: the most that a point saves.
    """

    name: str
    value: str
    points: int
    slowdown_percent: float
    savings_percent: float
    most_percent: float


def target_in_words(row: Row) -> str:
    """What a point asks for: "+2%", "14 s", "T_star"."""
    seed = f", seed {row.seed}" if row.noise_percent is not None else ""
    value = row.target_value or 0.0
    words = {
        "time": f"{value:g} s",
        "slowdown": f"+{value:g}%",
        "min-energy": "T_star",
        "energy-budget": f"{value:g} J",
        "power-cap": f"{value:g} W",
        "peak-power-cap": f"{value:g} W at the peak",
        "own": "its own",
    }
    return ", ".join([words[row.target], *row.conditions]) + seed


def _value(row: Row, name: str) -> Any:
    return target_in_words(row) if name == "target" else getattr(row, name)


def varying(rows: Sequence[Row]) -> list[str]:
    """Names of what is not the same in all points."""
    return [name for name in _VARIED if len({_value(row, name) for row in rows}) > 1]


def best_rows(rows: Sequence[Row], count: int) -> list[Row]:
    """The points that save most, the first in the table first where they save alike."""
    planned = [row for row in rows if row.savings_percent is not None]
    return sorted(planned, key=lambda row: -(row.savings_percent or 0.0))[:count]


def by_what_varies(rows: Sequence[Row]) -> list[Share]:
    """For each thing that varies and each of its values, what the points with it save."""
    planned = [row for row in rows if row.savings_percent is not None]
    shares = []
    for name in varying(planned):
        for value in dict.fromkeys(_value(row, name) for row in planned):
            alike = [row for row in planned if _value(row, name) == value]
            saved = [row.savings_percent or 0.0 for row in alike]
            slower = fmean(row.slowdown_percent or 0.0 for row in alike)
            text = "-" if value is None else f"{value:g}" if isinstance(value, float) else value
            shares.append(Share(name, str(text), len(alike), slower, fmean(saved), max(saved)))
    return shares
