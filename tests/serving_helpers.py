"""Small serving profiles and traces, and an oracle for fleets."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from envplan.serving.classes import CLASSES, RequestClass, filled
from envplan.serving.profile import Curve, ServingProfile

#: Loads of small profiles are multiples of this, tokens/s.
UNIT = 10

#: (class, tp, MHz) -> [(load in units, W), ...]
Curves = Mapping[tuple[str, int, int], Iterable[tuple[int, float]]]

EQUAL = {"input_tokens": 1, "output_tokens": 1, "ttft_slo_s": 1.0, "tbt_slo_s": 1.0}


def small_serving_profile(curves: Curves) -> ServingProfile:
    """Configurations that answer at once, of classes that are all equally long."""
    return profile_of(
        row(name, tp, clock, load * UNIT, power_w=power)
        for (name, tp, clock), points in curves.items()
        for load, power in points
    )


def profile_of(
    rows: Iterable[Mapping[str, Any]], classes: Mapping[str, Mapping[str, float]] | None = None
) -> ServingProfile:
    """A profile of any curves; below the lowest load of a configuration they are flat."""
    points: dict[tuple[str, int, int], list[tuple[float, ...]]] = {}
    for each in rows:
        name, tp, clock, *values = each.values()
        mine = points.setdefault((name, tp, clock), [])
        if not mine and values[0] > 0:
            mine.append((0.0, *values[1:]))
        mine.append(tuple(values))
    curves = {key: Curve(*key, *np.array(mine, dtype=float).T) for key, mine in points.items()}
    known = {
        name: RequestClass(**lengths)
        for name, lengths in filled(dict.fromkeys(CLASSES, EQUAL) | (classes or {})).items()
    }
    sha256 = hashlib.sha256(repr(points).encode()).hexdigest()
    return ServingProfile("small", Path("small.csv"), sha256, curves, known, {})


def row(
    name: str, tp: int, clock: int, load: float, *, power_w: float, ttft_s: float = 0.1,
    tbt_s: float = 0.01,
) -> dict[str, Any]:  # fmt: skip
    """A point of a curve, fast enough for every SLO unless it says otherwise."""
    return {"class": name, "tp": tp, "frequency": clock, "load": load, "power_w": power_w,
            "ttft_s": ttft_s, "tbt_s": tbt_s}  # fmt: skip


#: TTFT slope of a configuration, s per unit of load: where it meets STRICT and LOOSE.
Slopes = Mapping[tuple[str, int, int], float]
STRICT, LOOSE = 1 + 1e-7, 2 + 1e-7  # s; a little more, so that whole units are within them


def queueing_profile(curves: Curves, slopes: Slopes) -> ServingProfile:
    """SS, which must answer within STRICT, and LS within LOOSE; TTFT is proportional to load."""
    rows = [
        row(*key, load * UNIT, power_w=power, ttft_s=slopes[key] * load or 1e-9)
        for key, points in curves.items()
        for load, power in points
    ]
    classes = {
        "SS": EQUAL | {"ttft_slo_s": STRICT},
        "LS": EQUAL | {"ttft_slo_s": LOOSE},
    }
    return profile_of(rows, classes)


class BruteForce:
    """Every fleet whose instances carry whole units of load.

    Powers are piecewise linear with all bends at whole units, so some best fleet is among them.

    Args:
        curves: of all configurations.
    """

    def __init__(self, curves: Curves) -> None:
        self._tables = {key: dict(points) for key, points in curves.items()}
        self.pool = cache(self._pool)

    def _power(self, key: tuple[str, int, int], load: int) -> float:
        knots = sorted(self._tables[key])
        return float(np.interp(load, knots, [self._tables[key][k] for k in knots]))

    def _pool(self, name: str, load: int, gpus: int, most: tuple[int, ...] = ()) -> float:
        """Least power of a pool that carries this load on at most so many GPUs.

        Args:
            most: units that an instance may carry, by configuration; default: as measured.
        """
        best = 0.0 if load == 0 else float("inf")
        for place, key in enumerate(self._tables):
            if key[0] == name and key[1] <= gpus:
                limit = min(load, max(self._tables[key]), most[place] if most else load)
                for part in range(1, limit + 1):
                    rest = self.pool(name, load - part, gpus - key[1], most)
                    best = min(best, self._power(key, part) + rest)
        return best


def least_power(curves: Curves, demand: Mapping[str, int], gpus: int) -> float:
    """By brute force; SS may be served by SM's pool, as one of its own."""
    force = BruteForce(curves)
    return min(
        force.pool("SS", demand.get("SS", 0) - merged, first)
        + force.pool("SM", demand.get("SM", 0) + merged, gpus - first)
        for merged in range(demand.get("SS", 0) + 1)
        for first in range(gpus + 1)
    )


def least_power_within_slos(
    curves: Curves, slopes: Slopes, demand: Mapping[str, int], gpus: int
) -> float:
    """By brute force; SS may be served by LS's pools, but only by a strict one."""
    force = BruteForce(curves)
    strict = tuple(int(STRICT / slopes[key]) for key in curves)
    loose = tuple(int(LOOSE / slopes[key]) for key in curves)
    ss, ls = demand["SS"], demand["LS"]
    return min(
        force.pool("SS", ss - merged, own, strict)
        + force.pool("LS", merged + beside, mixed, strict)
        + force.pool("LS", ls - beside, gpus - own - mixed, loose)
        for merged in range(ss + 1)
        for beside in range(ls + 1)
        for own in range(gpus + 1)
        for mixed in range(gpus - own + 1)
    )


def write_profile(path: Path, lines: Iterable[str], **sidecar: Any) -> Path:
    """A profile CSV with these lines below the header, and its sidecar."""
    path.write_text("\n".join(["tp,frequency,phase,size,time_s,power_w", *lines]) + "\n")
    memory = {"kv_tokens": {str(tp): 1e5 for tp in (1, 2, 4)}}
    path.with_suffix(".meta.json").write_text(json.dumps(memory | sidecar))
    return path
