"""Small serving profiles and traces, and an oracle for fleets."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from envplan.serving.classes import DEFAULT_CLASSES, RequestClasses
from envplan.serving.profile import ServingProfile
from envplan.serving.steady_state import CurveKey, LoadCurve

#: Loads of small profiles are multiples of this, tokens/s.
UNIT = 10

#: (class, tp, MHz) -> [(load, W), ...], or with TTFT and TBT (s) that are not short
Curves = Mapping[tuple[str, int, int], Sequence[tuple[float, ...]]]

EQUAL = {"input_tokens": 1, "output_tokens": 1, "ttft_slo_s": 1.0, "tbt_slo_s": 1.0}
FAST = (0.1, 0.01)  # TTFT and TBT (s) that meet every SLO


def profile_of(
    curves: Curves, classes: Mapping[str, Mapping[str, float]] | None = None, unit: float = 1.0
) -> ServingProfile:
    """A profile of any curves; below the lowest load of a configuration they are flat.

    Args:
        classes: those that are not as short, and as patient, as all others.
        unit: tokens/s that a load counts.
    """
    made = {}
    for key, points in curves.items():
        rows = [(unit * load, *rest, *FAST[len(rest) - 1 :]) for load, *rest in points]
        if rows[0][0] > 0:
            rows.insert(0, (0.0, *rows[0][1:]))
        made[CurveKey(*key)] = LoadCurve(*key, *np.array(rows, dtype=float).T)
    stated = dict.fromkeys(DEFAULT_CLASSES, EQUAL) | (classes or {})
    known = RequestClasses(
        default.model_copy(update=stated[name]) for name, default in DEFAULT_CLASSES.items()
    )
    sha256 = hashlib.sha256(repr(curves).encode()).hexdigest()
    return ServingProfile("small", Path("small.csv"), sha256, made, known, {})


def small_serving_profile(curves: Curves) -> ServingProfile:
    """Configurations that answer at once, of classes that are all equally long; loads in units."""
    return profile_of(curves, unit=UNIT)


#: TTFT slope of a configuration, s per unit of load: where it meets STRICT and LOOSE.
Slopes = Mapping[tuple[str, int, int], float]
STRICT, LOOSE = 1 + 1e-7, 2 + 1e-7  # s; a little more, so that whole units are within them


def queueing_profile(curves: Curves, slopes: Slopes) -> ServingProfile:
    """SS, which must answer within STRICT, and LS within LOOSE; TTFT is proportional to load."""
    slower = {
        key: [(load, power, slopes[key] * load or 1e-9) for load, power in points]
        for key, points in curves.items()
    }
    slos = {"SS": STRICT, "LS": LOOSE}
    return profile_of(
        slower, {name: EQUAL | {"ttft_slo_s": slo} for name, slo in slos.items()}, UNIT
    )


def least_power(
    curves: Curves, demand: Mapping[str, int], gpus: int, slopes: Slopes | None = None
) -> float:
    """By brute force: every fleet for two classes whose instances carry whole units of load.

    The first class may be served by the second one's pools, as one of its own, but with `slopes`
    only by a strict pool. Powers are piecewise linear with all bends at whole units, so some best
    fleet is among these.
    """
    drawn = {
        key: np.interp(range(int(points[-1][0]) + 1), *zip(*points, strict=True)).tolist()
        for key, points in curves.items()
    }

    @cache
    def pool(name: str, load: int, left: int, slo: float) -> float:
        """Least power of a pool that carries this load on at most so many GPUs."""
        best = 0.0 if load == 0 else float("inf")
        for key, power in drawn.items():
            if key[0] == name and key[1] <= left:
                most = min(load, len(power) - 1, int(slo / slopes[key]) if slopes else load)
                for part in range(1, most + 1):
                    best = min(best, power[part] + pool(name, load - part, left - key[1], slo))
        return best

    (low, mine), (high, other) = demand.items()
    return min(
        pool(low, mine - merged, own, STRICT)
        + pool(high, merged + beside, mixed, STRICT)
        + pool(high, other - beside, gpus - own - mixed, LOOSE)
        for merged in range(mine + 1)
        for beside in (range(other + 1) if slopes else [other])
        for own in range(gpus + 1)
        for mixed in (range(gpus - own + 1) if slopes else [gpus - own])
    )


def write_profile(path: Path, lines: Iterable[str], **sidecar: Any) -> Path:
    """A profile CSV with these lines below the header, and its sidecar."""
    path.write_text("\n".join(["tp,frequency,phase,size,time_s,power_w", *lines]) + "\n")
    memory = {"kv_tokens": {str(tp): 1e5 for tp in (1, 2, 4)}}
    path.with_suffix(".meta.json").write_text(json.dumps(memory | sidecar))
    return path


def rows_for_roles(tps: Iterable[int]) -> list[str]:
    """Rows of a profile: prompts take half as long at the higher clock, decoding hardly less."""
    rows = []
    for tp in tps:
        for mhz, slower in ((1000, 2.0), (2000, 1.0)):
            watts = mhz / 10
            rows.append(f"{tp},{mhz},idle,0,0,{50 * tp}")
            prompt_w = tp * (200 + 2 * watts)
            for tokens in (10, 1000, 8000):
                time_s = 1e-4 * slower * tokens / tp
                rows.append(f"{tp},{mhz},prefill,{tokens},{time_s},{prompt_w}")
            for batch, step_s in ((1, 0.018), (64, 0.028)):
                time_s = (step_s + 0.002 * slower) / tp**0.5
                rows.append(f"{tp},{mhz},decode,{batch},{time_s},{tp * (100 + batch + watts)}")
    return rows
