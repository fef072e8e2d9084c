"""Regenerates what ships for serving: python -m envplan.serving.builtin OUTDIR.

One profile, whose energies at 2,000 tokens/s are DynamoLLM's table for Llama2-70B on H100 and whose
everything else is modelled, and two modelled traces of a week. The same code gives the same bytes.
docs/serving.md says how the modelled parts come about.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from envplan._files import atomic_write
from envplan.errors import EnvplanError
from envplan.serving.classes import CLASSES, DEFAULT_CLASSES
from envplan.serving.profile import BUILTIN, ENERGY, POWER, save_csv

__all__ = ["CLOCKS_MHZ", "TABLE_LOAD", "TABLE_WH", "TRACES", "main", "profile_rows", "sidecar"]

CLOCKS_MHZ: Final = (800, 1200, 1600, 2000)
#: tokens/s of one instance at which the table was taken.
TABLE_LOAD: Final = 2000.0
_: Final = None
#: Wh per request of Llama2-70B on H100 at TABLE_LOAD (DynamoLLM), by class and TP, a column for
#: each of CLOCKS_MHZ; None where the SLO is violated.
TABLE_WH: Final[dict[str, dict[int, tuple[float | None, ...]]]] = {
    "SS": {2: (_, 0.77, 0.97, 1.03), 4: (0.94, 0.79, 0.91, 1.01), 8: (1.35, 1.19, 1.29, 1.49)},
    "SM": {2: (_, 2.78, 3.45, 3.68), 4: (3.39, 2.82, 3.37, 3.81), 8: (4.55, 4.15, 4.43, 4.74)},
    "SL": {2: (_, _, _, _), 4: (4.84, 4.17, 4.97, 5.52), 8: (6.37, 5.62, 5.59, 6.95)},
    "MS": {2: (_, _, 1.02, 1.09), 4: (_, 1.08, 1.07, 1.20), 8: (1.51, 1.29, 1.34, 1.73)},
    "MM": {2: (_, _, _, _), 4: (_, 4.23, 3.91, 4.08), 8: (5.34, 4.39, 4.56, 5.44)},
    "ML": {2: (_, _, _, _), 4: (_, 4.99, 4.66, 4.53), 8: (6.86, 5.79, 6.52, 7.12)},
    "LS": {2: (_, _, _, _), 4: (_, 1.51, 1.64, 1.76), 8: (2.55, 2.53, 2.83, 2.94)},
    "LM": {2: (_, _, _, _), 4: (_, _, _, _), 8: (_, 7.71, 8.81, 9.17)},
    "LL": {2: (_, _, _, _), 4: (_, _, _, _), 8: (_, 12.99, 11.89, 13.21)},
}

_J_PER_WH: Final = 3600.0
_LOADS: Final = (500.0, 1000.0, 1500.0, 2000.0, 3000.0, 4000.0, 6000.0, 8000.0, 12000.0)

# Everything from here to the traces is modelled.
_IDLE_W: Final = 60.0  # a GPU with the model loaded and nothing to do, whatever its clock
_LIMIT_W: Final = 700.0  # TDP of an H100 SXM
_REFERENCE_W: Final = 1600.0  # an instance on TP8 at 2.0 GHz under TABLE_LOAD, in every class

# How much an instance can take before TTFT, and TBT, reach the SLO: TABLE_LOAD x capability / need.
# Capability for prefill is tp x GHz^1.2, for decoding tp x GHz^0.5; needs are such that a cell of
# the table is blank exactly where one of the two lies below TABLE_LOAD.
_PREFILL_NEED: Final = {"S": 2.2, "M": 3.3, "L": 4.8}
_DECODE_NEED: Final = {
    "SS": 1.5, "SM": 2.1, "SL": 3.2,
    "MS": 2.4, "MM": 3.6, "ML": 4.0,
    "LS": 3.0, "LM": 7.5, "LL": 8.2,
}  # fmt: skip

_PARAMETERS: Final = 70e9
_FLOPS: Final = 0.5 * 989e12  # of one GPU at 1.98 GHz in bfloat16, half of the peak
_BANDWIDTH: Final = 0.7 * 3.35e12  # B/s of one GPU's memory, of which decoding sees 70%
_OVERHEAD_S: Final = 0.02


def profile_rows() -> Iterator[dict[str, Any]]:
    """The rows of the built-in profile."""
    for name in CLASSES:
        for tp, cells in TABLE_WH[name].items():
            for clock, wh in zip(CLOCKS_MHZ, cells, strict=True):
                if wh is not None:
                    yield from _curve_rows(name, tp, clock, wh * _J_PER_WH)


def _curve_rows(name: str, tp: int, clock: int, energy: float) -> Iterator[dict[str, Any]]:
    request = DEFAULT_CLASSES[name]
    per_request = request.tokens * _shared_by(name)
    idle = tp * _IDLE_W
    slope = energy / per_request - idle / TABLE_LOAD  # W per token/s
    by_prefill = TABLE_LOAD * tp * (clock / 1e3) ** 1.2 / _PREFILL_NEED[name[0]]
    by_decode = TABLE_LOAD * tp * (clock / 1e3) ** 0.5 / _DECODE_NEED[name]
    by_power = (tp * _LIMIT_W - idle) / slope
    most = math.floor(min(by_prefill, by_decode, by_power) / 10) * 10.0
    head = {"class": name, "tp": tp, "frequency": clock}
    for load in (0.0, *(known for known in _LOADS if known < most), most):
        row = head | {
            "load": f"{load:g}",
            "ttft_s": _latency(_prefill_s(name, tp, clock), request.slo.ttft_s, load / by_prefill),
            "tbt_s": _latency(_decode_s(tp, clock), request.slo.tbt_s, load / by_decode),
        }
        if load == 0:
            yield row | {POWER: f"{idle:g}"}
        else:
            exact = energy if load == TABLE_LOAD else per_request * (idle / load + slope)
            yield row | {ENERGY: f"{exact:.9g}"}


def _shared_by(name: str) -> float:
    """Requests in an instance at once: what makes the reference draw _REFERENCE_W."""
    reference = TABLE_WH[name][8][-1]
    assert reference is not None
    per_second = TABLE_LOAD / DEFAULT_CLASSES[name].tokens
    return float(f"{reference * _J_PER_WH * per_second / _REFERENCE_W:.3g}")


def _prefill_s(name: str, tp: int, clock: int) -> float:
    work = 2 * _PARAMETERS * DEFAULT_CLASSES[name].input_tokens
    return _OVERHEAD_S + work / (tp * _FLOPS * clock / 1980)


def _decode_s(tp: int, clock: int) -> float:
    return 2 * _PARAMETERS / (tp * _BANDWIDTH) + 0.4 * _OVERHEAD_S * 2000 / clock


def _latency(unloaded: float, slo: float, utilization: float) -> str:
    """A queue's latency, unloaded / (1 - x), that reaches the SLO at utilization 1.

    Rounded down, so that it still meets the SLO there.
    """
    saturation = 1 / (1 - unloaded / slo)
    value = unloaded / (1 - min(1.0, utilization) / saturation)
    return f"{math.floor(value * 1e6) / 1e6:.6f}"


def sidecar() -> dict[str, Any]:
    """The sidecar of the built-in profile."""
    return {
        "gpu": "NVIDIA H100 80GB HBM3",
        "model": "Llama2-70B",
        "source": "modelled",
        "modelled": (
            "energy_per_request_j at 2000 tokens/s is DynamoLLM's table; all other loads, all "
            "powers, TTFT, TBT, request lengths and shared_by are modelled (docs/serving.md)"
        ),
        "classes": {
            name: {
                "input_tokens": known.input_tokens,
                "output_tokens": known.output_tokens,
                "ttft_slo_s": known.slo.ttft_s,
                "tbt_slo_s": known.slo.tbt_s,
                "shared_by": _shared_by(name),
            }
            for name, known in DEFAULT_CLASSES.items()
        },
        "date": "2026-11-21",
    }


_SLOT_S: Final = 300
_SLOTS: Final = 7 * 24 * 12
_NOISE: Final = 0.04  # of the rate, standard deviation, fading within half an hour
_MEMORY: Final = 0.85

#: By name: requests/s at the peak; share of each class; how deep nights are; and weekends, both as
#: a share of the peak; the hours between which a day is busy; seed.
TRACES: Final[dict[str, dict[str, Any]]] = {
    "coding-week": {
        "peak": 24.0,
        "mix": {"SS": 0.10, "SM": 0.08, "MS": 0.25, "MM": 0.15, "LS": 0.30, "LM": 0.12},
        "night": 0.10,
        "weekend": 0.30,
        "busy": (9.0, 18.0),
        "seed": 7,
    },
    "conversation-week": {
        "peak": 30.0,
        "mix": {
            "SS": 0.10, "SM": 0.17, "SL": 0.10, "MS": 0.05,
            "MM": 0.20, "ML": 0.16, "LM": 0.12, "LL": 0.10,
        },
        "night": 0.35,
        "weekend": 0.80,
        "busy": (10.0, 22.0),
        "seed": 11,
    },
}  # fmt: skip


def trace_rows(name: str) -> Iterator[tuple[int, str, int]]:
    """(timestamp in s since Monday 0:00, class, requests) of a modelled trace."""
    made = TRACES[name]
    random = np.random.default_rng(made["seed"])
    wander = 0.0
    for slot in range(_SLOTS):
        wander = _MEMORY * wander + math.sqrt(1 - _MEMORY**2) * random.normal(0.0, _NOISE)
        hours = slot * _SLOT_S / 3600
        rate = made["peak"] * _activity(made, hours) * math.exp(wander)
        for known, share in made["mix"].items():
            count = int(random.poisson(rate * share * _SLOT_S))
            if count:
                yield slot * _SLOT_S, known, count


def _activity(made: dict[str, Any], hours: float) -> float:
    """Share of the peak rate at an hour of the week: a smooth plateau by day."""
    begin, end = made["busy"]
    hour = hours % 24
    busy = max(
        (math.tanh((hour + day - begin) / 1.5) - math.tanh((hour + day - end) / 1.5)) / 2
        for day in (-24, 0, 24)
    )
    height = 1.0 if hours < 5 * 24 else made["weekend"]
    return float(made["night"] * height + (1 - made["night"]) * height * max(0.0, busy))


def main(folder: str) -> None:
    """Write all files."""
    save_csv(Path(folder) / f"{BUILTIN}.csv", profile_rows(), sidecar())
    for name in TRACES:
        lines = [f"{at},{known},{count}\n" for at, known, count in trace_rows(name)]
        atomic_write(Path(folder) / f"{name}.csv", "timestamp,class,requests\n" + "".join(lines))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m envplan.serving.builtin OUTDIR")
    try:
        main(sys.argv[1])
    except EnvplanError as problem:
        sys.exit(str(problem))
