"""Fits and judges the GPU model: python -m tools.gpu_models MEASURED_DIR [DOCUMENT].

Prints parameters and residuals; with DOCUMENT (docs/profiles.md) also writes them there.

MEASURED_DIR holds time and energy under power limits as the Zeus repository publishes them:

- GPU+workload+gpuN.csv: a window per power limit, with its seconds and its joules per GPU;
- summary_power_GPU.csv: seconds and watts of an epoch for each workload and power limit.

All points of one workload make a curve. Under a limit L a GPU runs at the highest clock f with
P(f) <= L, but never below its lowest clock, and the model of a curve is

    t(L) = a + b / f + c,      E(L) = P(f) (a + b / f) + P_gap c

with P of `devices.modelled`: a is memory-bound, b compute-bound, c time in which the GPU waits for
its host at P_gap. What belongs to the GPU (P_static, k, knee, g, P_gap) is shared by its curves;
a, b, c and the activity of the work belong to a curve. Given all else, a, b and c are a linear
least-squares problem with three unknowns that may not be negative, solved here for all curves and
many activities at once; the shared parameters are found by the simplex search of Nelder and Mead
(scipy), which comes out better than Powell's here. Nothing is random: on one machine the same files
give the same digits. Another one may round differently, and where quite different parameters fit
about as well, the search may then end elsewhere.

The power limit says nothing of absolute activity, so k is scaled such that the median activity of
the transformers is 1: those are what the built-in profiles are mostly made of.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.optimize import minimize

from envplan.devices.modelled import ModelledGpu, gpu
from envplan.errors import InputError
from tools.document import markdown_table, update_block

__all__ = [
    "Curve",
    "Judgement",
    "fit_gpu",
    "fitted_gpus",
    "judge",
    "main",
    "misfit",
    "read_measured",
    "report",
]

FloatArray = npt.NDArray[np.float64]

#: The GPUs of the measured files, as `devices.modelled` calls them.
DEVICES: Final = {"V100": "v100-pcie", "A40": "a40", "P100": "p100", "RTX6000": "rtx6000"}

#: GPUs whose parameters are the outcome of this fit; the A40's come from a sweep of clocks.
FITTED: Final = ("V100", "P100", "RTX6000")

_TRANSFORMERS: Final = "bert"
_ACTIVITIES: Final = np.geomspace(0.25, 2.0, 49)
_FINE_ACTIVITIES: Final = 41

# Bounds of the search and where it starts: P_static (W), knee as a share of the highest clock,
# voltage rise between the knee and the highest clock, and P_gap as a share of P_static.
_LOWEST: Final = np.array([10.0, 0.35, 0.0, 0.2])
_HIGHEST: Final = np.array([110.0, 0.95, 1.5, 1.2])
_STARTS: Final = tuple(np.array([60.0, knee, 0.4, 0.8]) for knee in (0.45, 0.6, 0.75))
_TOLERANCES: Final = {"xatol": 0.05, "fatol": 1e-4, "adaptive": True, "maxfev": 600}


@dataclass(frozen=True)
class Curve:
    """One workload on one GPU under falling power limits.

    Attributes:
        gpu: key of DEVICES.
        source: name of the file.
        workload: what ran, for people.
        network: the model's name.
        limit_w: power limits, descending, W.
        time_s: time of the same work under each, s.
        energy_j: its energy on one GPU, J.
    """

    gpu: str
    source: str
    workload: str
    network: str
    limit_w: FloatArray
    time_s: FloatArray
    energy_j: FloatArray


@dataclass(frozen=True)
class Judgement:
    """How the model meets one curve.

    Attributes:
        curve: the measured points.
        activity: of the work, 1 being that of a transformer.
        memory_share: a / (a + b / f) at the highest clock.
        gap_share: c / t under the highest limit.
        energy_error: modelled over measured energy at the time of each point, minus 1.
        limit_energy_error: modelled over measured energy under each limit, minus 1.
        time_error: modelled over measured time under each limit, minus 1.
        measured_valley_w: limit of least measured energy, W.
        modelled_valley_w: limit of least modelled energy among the measured limits, W.
        valley_loss: measured energy at the modelled valley over that at the measured one, minus 1.
    """

    curve: Curve
    activity: float
    memory_share: float
    gap_share: float
    energy_error: FloatArray
    limit_energy_error: FloatArray
    time_error: FloatArray
    measured_valley_w: float
    modelled_valley_w: float
    valley_loss: float


# --- reading -------------------------------------------------------------------------------------


def read_measured(folder: str | Path) -> list[Curve]:
    """All curves of the measured files in a folder, in the order of file names.

    Raises:
        InputError: the folder has no such files, or one of them cannot be read.
    """
    folder = Path(folder)
    curves: list[Curve] = []
    for path in sorted(folder.glob("*.csv")):
        try:
            if path.name.startswith("summary_power_"):
                curves += _read_summary(path)
            elif "+" in path.name:
                curves.append(_read_windows(path))
        except (OSError, KeyError, ValueError, TypeError) as error:
            raise InputError(f"is not a file of measured points ({error!r})", path=path) from error
    if not curves:
        raise InputError(
            "has no measured points; expected GPU+workload+gpuN.csv or summary_power_GPU.csv",
            path=folder,
        )
    return curves


def _read_windows(path: Path) -> Curve:
    device, network, gpus = path.stem.split("+")
    table = pd.read_csv(path)
    limit = table["window_name"].str.rsplit("_", n=1).str[1].astype(float)
    joules = table.filter(regex="_energy$").mean(axis="columns")
    count = len(gpus.removeprefix("gpu").split(","))
    workload = network if count == 1 else f"{network}, {count} GPUs"
    return _curve(path, device, workload, network, limit, table["elapsed_time"], joules)


def _read_summary(path: Path) -> Iterator[Curve]:
    device = path.stem.removeprefix("summary_power_").upper()
    table = pd.read_csv(path, dtype={"batch_size": str})
    for (dataset, network, batch, optimizer), rows in table.groupby(
        ["dataset", "network", "batch_size", "optimizer"]
    ):
        workload = f"{network} {dataset} batch {batch} {optimizer}"
        seconds = rows["time_per_epoch"]
        joules = seconds * rows["average_power"]
        yield _curve(path, device, workload, str(network), rows["power_limit"], seconds, joules)


def _curve(path: Path, device: str, workload: str, network: str, *points: pd.Series) -> Curve:
    if device not in DEVICES:
        raise ValueError(f"no model of a {device}")
    limit, time, energy = np.array(sorted(zip(*points, strict=True), reverse=True), dtype=float).T
    return Curve(device, path.name, workload, network, limit, time, energy)


# --- the model of a curve ------------------------------------------------------------------------


@dataclass(frozen=True)
class _Batch:
    """Curves of one GPU as arrays (curves, points); points that a curve lacks have weight 0."""

    limit_w: FloatArray
    time_s: FloatArray
    energy_j: FloatArray
    weight: FloatArray

    @classmethod
    def of(cls, curves: Sequence[Curve]) -> _Batch:
        width = max(len(curve.limit_w) for curve in curves)

        def padded(arrays: list[FloatArray]) -> FloatArray:
            return np.array([np.pad(array, (0, width - len(array)), "edge") for array in arrays])

        weight = [np.pad(np.ones(len(c.limit_w)), (0, width - len(c.limit_w))) for c in curves]
        return cls(
            limit_w=padded([curve.limit_w for curve in curves]),
            time_s=padded([curve.time_s for curve in curves]),
            energy_j=padded([curve.energy_j for curve in curves]),
            weight=np.array(weight),
        )


class _Power:
    """Power of a GPU and the clocks it settles at, on a grid of clocks."""

    def __init__(self, device: ModelledGpu) -> None:
        self.static_w = device.static_power_w
        self.gap_w = device.host_wait_power_w or 0.0
        self.clocks = np.linspace(device.clocks_mhz[-1], device.clocks_mhz[0], 400)
        voltage = 1 + device.voltage_slope_per_mhz * np.maximum(0, self.clocks - device.knee_mhz)
        self.dynamic = device.dynamic_power_w_per_mhz * self.clocks * voltage**2

    def settle(self, limit_w: FloatArray, activity: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Clock (MHz) and power (W) under a limit."""
        room = (limit_w - self.static_w) / activity
        clock = np.interp(room, self.dynamic, self.clocks)
        drawn = np.interp(clock, self.clocks, self.dynamic)
        return clock, self.static_w + activity * drawn


def _columns(
    power: _Power, batch: _Batch, activity: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Time and energy of a unit of a, b and c at each point.

    Args:
        power: the GPU.
        batch: curves (C) and points (N).
        activity: (A, C).

    Returns:
        times and energies (A, C, N, 3), and the clock (A, C, N).
    """
    clock, watts = power.settle(batch.limit_w, activity[..., None])
    one = np.ones_like(clock)
    times = np.stack([one, 1 / clock, one], axis=-1)
    energies = np.stack([watts, watts / clock, power.gap_w * one], axis=-1)
    return times, energies, clock


def _solve(power: _Power, batch: _Batch, activity: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Least squares of relative errors in time and energy, with a, b, c from 0 up.

    Args:
        power: the GPU.
        batch: curves (C).
        activity: (A, C).

    Returns:
        a, b, c (A, C, 3) and the sum of squares (A, C).
    """
    times, energies, clock = _columns(power, batch, activity)
    scale = np.array([1.0, clock.mean(), 1.0])  # the same magnitude for all three
    weight = batch.weight[..., None]
    rows = np.concatenate(
        [
            times * scale * weight / batch.time_s[..., None],
            energies * scale * weight / batch.energy_j[..., None],
        ],
        axis=-2,
    )
    wanted = np.concatenate([batch.weight, batch.weight], axis=-1)
    gram = np.swapaxes(rows, -1, -2) @ rows
    right = np.einsum("acnj,cn->acj", rows, wanted)
    ridge = 1e-9 * np.trace(gram, axis1=-2, axis2=-1)[..., None, None] * np.eye(3)
    total = wanted.sum(axis=-1)
    best = np.zeros(right.shape)
    least = np.broadcast_to(total, right.shape[:-1]).copy()
    for bits in range(1, 8):  # every set of the three that is above 0
        kept = np.array([bits & 1, bits >> 1 & 1, bits >> 2 & 1], dtype=np.float64)
        matrix = (gram + ridge) * np.outer(kept, kept) + np.diag(1 - kept)
        found = np.linalg.solve(matrix, (right * kept)[..., None])[..., 0]
        left = (
            total
            - 2 * np.einsum("acj,acj->ac", found, right)
            + np.einsum("acj,acjk,ack->ac", found, gram, found)
        )
        better = (found >= 0).all(axis=-1) & (left < least)
        best[better] = found[better]
        least[better] = left[better]
    return best * scale, least


def _fit_curves(
    power: _Power, batch: _Batch, *, fine: bool
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Activity (C), a, b, c (C, 3) and sum of squares (C) of every curve."""
    curves = np.arange(len(batch.limit_w))
    grid = np.repeat(_ACTIVITIES[:, None], len(curves), axis=1)
    found, left = _solve(power, batch, grid)
    row = left.argmin(axis=0)
    if fine:
        step = _ACTIVITIES[1] / _ACTIVITIES[0]
        around = np.geomspace(1 / step, step, _FINE_ACTIVITIES)
        grid = grid[row, curves] * around[:, None]
        found, left = _solve(power, batch, grid)
        row = left.argmin(axis=0)
    return grid[row, curves], found[row, curves], left[row, curves]


# --- the parameters of a GPU ---------------------------------------------------------------------


def fit_gpu(device: ModelledGpu, curves: Sequence[Curve]) -> ModelledGpu:
    """The GPU with the parameters with which the model meets its curves best.

    They have more digits than the points can tell.

    Args:
        device: gives the range of clocks; its own parameters play no part.
        curves: of that GPU.
    """
    batch = _Batch.of(curves)
    top = device.clocks_mhz[0]

    def fitted(point: FloatArray) -> ModelledGpu:
        static, knee, rise, gap = (float(value) for value in point)
        # Activity 1 draws 1.1 times the highest limit at the highest clock: a scale for the scan.
        return replace(
            device,
            static_power_w=static,
            dynamic_power_w_per_mhz=float(
                (1.1 * batch.limit_w.max() - static) / (top * (1 + rise) ** 2)
            ),
            knee_mhz=knee * top,
            voltage_slope_per_mhz=rise / (top * (1 - knee)),
            host_wait_power_w=gap * static,
        )

    def loss(point: FloatArray) -> float:
        _, _, left = _fit_curves(_Power(fitted(point)), batch, fine=False)
        return float(left.sum())

    bounds = list(zip(_LOWEST, _HIGHEST, strict=True))
    ends = [
        minimize(loss, start, method="Nelder-Mead", bounds=bounds, options=_TOLERANCES)
        for start in _STARTS
    ]
    found = fitted(min(ends, key=lambda end: float(end.fun)).x)
    activity, _, _ = _fit_curves(_Power(found), batch, fine=True)
    typical = [
        value
        for value, curve in zip(activity, curves, strict=True)
        if curve.network.startswith(_TRANSFORMERS)
    ]
    scale = float(np.median(typical or activity))
    return replace(
        found,
        static_power_w=round(found.static_power_w, 1),
        dynamic_power_w_per_mhz=round(found.dynamic_power_w_per_mhz * scale, 4),
        knee_mhz=float(round(found.knee_mhz)),
        voltage_slope_per_mhz=round(found.voltage_slope_per_mhz, 6),
        host_wait_power_w=round(found.host_wait_power_w or 0.0, 1),
    )


def misfit(device: ModelledGpu, curves: Sequence[Curve]) -> float:
    """What `fit_gpu` minimizes: squared relative errors in time and energy, over all points."""
    _, _, left = _fit_curves(_Power(device), _Batch.of(curves), fine=True)
    return float(left.sum())


# --- judging -------------------------------------------------------------------------------------


def judge(device: ModelledGpu, curves: Sequence[Curve]) -> list[Judgement]:
    """How a GPU's model meets each of its curves, with a, b, c and activity of its own for each."""
    power = _Power(device)
    activity, found, _ = _fit_curves(power, _Batch.of(curves), fine=True)
    return [
        _judgement(power, curve, float(activity[row]), found[row])
        for row, curve in enumerate(curves)
    ]


def _judgement(power: _Power, curve: Curve, activity: float, found: FloatArray) -> Judgement:
    def modelled(limit_w: FloatArray) -> tuple[FloatArray, FloatArray]:
        clock, watts = power.settle(limit_w, np.array(activity))
        busy = found[0] + found[1] / clock
        return busy + found[2], watts * busy + power.gap_w * found[2]

    time, energy = modelled(curve.limit_w)
    limits = np.linspace(curve.limit_w[0] + 50, max(curve.limit_w[-1] - 25, 1.0), 2000)
    along_time, along_energy = modelled(limits)
    at_time = np.interp(curve.time_s, along_time, along_energy)
    busy = found[0] + found[1] / power.clocks[-1]
    measured, chosen = int(curve.energy_j.argmin()), int(energy.argmin())
    return Judgement(
        curve=curve,
        activity=activity,
        memory_share=float(found[0] / busy) if busy > 0 else 1.0,
        gap_share=float(found[2] / time[0]),
        energy_error=at_time / curve.energy_j - 1,
        limit_energy_error=energy / curve.energy_j - 1,
        time_error=time / curve.time_s - 1,
        measured_valley_w=float(curve.limit_w[measured]),
        modelled_valley_w=float(curve.limit_w[chosen]),
        valley_loss=float(curve.energy_j[chosen] / curve.energy_j[measured] - 1),
    )


# --- reporting -----------------------------------------------------------------------------------


def fitted_gpus(curves: Sequence[Curve]) -> dict[str, ModelledGpu]:
    """The fit of every GPU, to its summary file alone: what comes in windows is for judging."""
    return {
        name: fit_gpu(gpu(key), [c for c in curves if c.gpu == name and _in_summary(c)])
        for name, key in DEVICES.items()
    }


def report(curves: Sequence[Curve], fits: dict[str, ModelledGpu]) -> str:
    """Parameters and residuals as Markdown: the block that docs/profiles.md shows.

    Args:
        curves: all measured points.
        fits: of every GPU.
    """
    held = {name: gpu(key) for name, key in DEVICES.items()}
    judged = {
        name: judge(device, [curve for curve in curves if curve.gpu == name])
        for name, device in held.items()
    }
    refitted = judge(fits["A40"], [curve for curve in curves if curve.gpu == "A40"])
    return "\n\n".join(
        [
            "Parameters (P_static and P_gap in W, k in W/MHz, knee in MHz, g per MHz):",
            _parameter_table(held, fits),
            "All points of a GPU, root mean square in percent:",
            _gpu_table(judged, refitted),
            "Each file, with the workloads of a summary file taken together by network:",
            _file_table(judged),
        ]
    )


def _parameter_table(held: dict[str, ModelledGpu], fits: dict[str, ModelledGpu]) -> str:
    rows = [
        [name, *_shown(held[name]), "the fit" if name in FITTED else "a sweep of clocks; P_gap fit"]
        for name in DEVICES
    ]
    rows.append(["A40, for comparison", *_shown(fits["A40"]), "the fit; not used"])
    headers = ("GPU", "P_static", "k", "knee", "g", "P_gap", "from")
    return markdown_table(headers, rows)


def _shown(device: ModelledGpu) -> list[str]:
    return [
        f"{device.static_power_w:.1f}",
        f"{device.dynamic_power_w_per_mhz:.4f}",
        f"{device.knee_mhz:.0f}",
        f"{device.voltage_slope_per_mhz:.6f}",
        f"{device.host_wait_power_w:.1f}",
    ]


def _gpu_table(judged: dict[str, list[Judgement]], refitted: list[Judgement]) -> str:
    rows = []
    for name, all_of_it in [*judged.items(), ("A40, for comparison", refitted)]:
        limited = [judgement for judgement in all_of_it if _limited(judgement.curve)]
        transformers = [j for j in limited if j.curve.network.startswith(_TRANSFORMERS)]
        for words, group in (
            ("", all_of_it),
            (", limited", limited),
            (", limited transformers", transformers),
        ):
            rows.append([f"{name}{words}", str(len(group)), *_figures(group), _aim(group)])
    return markdown_table(("GPU", "curves", *_FIGURES, "aim of 5%"), rows)


def _file_table(judged: dict[str, list[Judgement]]) -> str:
    groups: defaultdict[tuple[str, str, str], list[Judgement]] = defaultdict(list)
    for name, judgements in judged.items():
        for judgement in judgements:
            curve = judgement.curve
            in_fit = name in FITTED and _in_summary(curve)
            groups[curve.source, curve.network, "fit" if in_fit else "held out"].append(judgement)
    rows = [
        [
            f"`{source}`",
            network,
            role,
            str(len(group)),
            *_figures(group),
            f"{np.median([j.activity for j in group]):.2f}",
            f"{np.median([j.memory_share for j in group]):.2f}",
            f"{np.median([j.gap_share for j in group]):.2f}",
        ]
        for (source, network, role), group in groups.items()
    ]
    headers = ("file", "network", "role", "curves", *_FIGURES, "activity", "memory", "waits")
    return markdown_table(headers, rows)


_FIGURES: Final = (
    "energy at equal slowdown",
    "energy at equal limit",
    "time at equal limit",
    "valley at the same limit",
    "within a step",
    "cost of its place, worst",
)


def _figures(judgements: Sequence[Judgement]) -> list[str]:
    same = sum(j.modelled_valley_w == j.measured_valley_w for j in judgements)
    near = sum(_steps_apart(j) <= 1 for j in judgements)
    return [
        f"{_rms([j.energy_error for j in judgements]):.1%}",
        f"{_rms([j.limit_energy_error for j in judgements]):.1%}",
        f"{_rms([j.time_error for j in judgements]):.1%}",
        f"{same} of {len(judgements)}",
        f"{near} of {len(judgements)}",
        f"{max(j.valley_loss for j in judgements):.1%}",
    ]


def _aim(judgements: Sequence[Judgement]) -> str:
    return "met" if _rms([j.energy_error for j in judgements]) < 0.05 else "not met"


def _rms(errors: Sequence[FloatArray]) -> float:
    return float(np.sqrt(np.mean(np.concatenate(errors) ** 2)))


def _steps_apart(judgement: Judgement) -> int:
    limits = judgement.curve.limit_w.tolist()
    apart = limits.index(judgement.modelled_valley_w) - limits.index(judgement.measured_valley_w)
    return abs(int(apart))


def _limited(curve: Curve) -> bool:
    """Whether the lowest limit binds: under the highest the workload draws more than that."""
    return bool(curve.energy_j[0] > curve.limit_w[-1] * curve.time_s[0])


def _in_summary(curve: Curve) -> bool:
    return curve.source.startswith("summary_")


def main(measured: str, *documents: str) -> None:
    """Fit, judge, print; write the block of documents where some are named."""
    curves = read_measured(measured)
    content = report(curves, fitted_gpus(curves))
    print(content)
    for document in documents:
        update_block(Path(document), "residuals", content)


if __name__ == "__main__":
    main(*sys.argv[1:])
