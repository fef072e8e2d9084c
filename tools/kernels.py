"""Fits and judges the model of kernels: python -m tools.kernels FOLDER [--fit] [DOCUMENT ...].

FOLDER holds kernels measured on H200, B200 and GB200, as NVIDIA's aiconfigurator publishes them
(ai-dynamo/aiconfigurator, systems/data): GPU_gemm_perf.csv.gz and so on, with latency (ms) and
power (W) of one kernel a row, at the highest clock that the power limit leaves.

Without --fit, the coefficients that ship are held against every row of the files. With it they are
fitted anew and written to src/envplan/profiling/kernels.toml; one row in ten, by a hash of its
sizes, is kept aside, and all that is printed is of these. With DOCUMENT (docs/profiles.md) the
table is written there, too.

What is fitted, by least squares of logarithms that outliers cannot move (soft_l1): for each GPU and
kind of kernels the coefficients of `KernelKind`, on kernels in half precision with at least 1,024
tokens. The clock cannot be seen in the files, but some products of several milliseconds were over
before the limit took hold: they drew less than it and were up to a fifth faster than their like.
They are taken to have run at the highest clock, which tells how far the limit lowers it for the
others. Power by clock is that of gpus.toml, which the files say nothing of.

Power is that of a window that short kernels do not fill: the same product with one row more differs
in power by 40% below 30 microseconds, by 5% above 100. So power is fitted and judged above 100.
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.optimize import least_squares

from envplan.devices.modelled import gpu
from envplan.errors import InputError
from envplan.profiling.kernel_model import KernelModel, read_kernel_models
from envplan.profiling.kernels import (
    Attention,
    ElementWise,
    ExpertProducts,
    Kernel,
    KernelKind,
    MatrixProduct,
)
from tools.document import markdown_table, update_block

__all__ = ["Measured", "Residuals", "judge", "main", "read_measured"]

FloatArray = npt.NDArray[np.float64]

#: The GPUs of the files, as gpus.toml calls them, and their multiprocessors.
DEVICES: Final = {"h200": ("h200_sxm", 132), "b200": ("b200_sxm", 148), "gb200": ("gb200", 152)}
HEAD_WIDTHS: Final = (64, 128, 192, 256, 512)
COEFFICIENTS: Final = Path(__file__).parents[1] / "src/envplan/profiling/kernels.toml"

_SOURCE: Final = "kernels measured by ai-dynamo/aiconfigurator (Apache-2.0), vLLM 0.22, 2026-08-21"
_LEAST_TOKENS: Final = 1024
#: Below, power is that of a window that the kernel does not fill, ms.
_POWER_IS_TOLD_MS: Final = 0.1
#: A product this long that drew less than this share of the limit was over before it took hold.
_COLD_MS: Final = 0.3
_COLD_SHARE: Final = 0.92
_KEPT_ASIDE: Final = 10  # one row in so many
_MOST_ROWS: Final = 4000  # of a fit
#: Twice what the GPUs have whose curves were measured (tools.gpu_models: energy at equal limit of
#: transformers, 1.7 to 2.6%): assumed, as these files have one clock.
_ERROR_BETWEEN_CLOCKS: Final = 0.04
_POWER_WEIGHT: Final = 1.5
_COLD_WEIGHT: Final = 3.0
_PULL: Final = 0.03  # towards the start, for what the rows do not tell
#: Heights of an attention's tiles that are tried for wide heads; others have the usual one.
_TILE_ROWS: Final = (16.0, 32.0, 64.0, 128.0, 256.0)
_WIDE_HEAD: Final = 192
#: Products of a series that ran after a pause in which tensors were made.
_AFTER_PAUSE: Final = 2


@dataclass(frozen=True)
class Measured:
    """Kernels of a kind on a GPU.

    Attributes:
        device: the GPU's short name.
        kind: of the kernels.
        kernel: all of them, their sizes as arrays.
        latency_ms: of each.
        power_w: of each.
        is_aside: whether each is kept aside from the fit.
        is_after_pause: whether each ran after a pause, which the window of its power has in it.
    """

    device: str
    kind: str
    kernel: Kernel
    latency_ms: FloatArray
    power_w: FloatArray
    is_aside: npt.NDArray[np.bool_]
    is_after_pause: npt.NDArray[np.bool_]


# --- reading -------------------------------------------------------------------------------------


def read_measured(folder: Path, device: str) -> Iterator[Measured]:
    """All kinds of kernels that the files of a GPU have.

    Raises:
        InputError: a file is missing.
    """
    products = _read(folder, device, "gemm")
    products = products[(products.gemm_dtype == "bfloat16") & (products.m >= _LEAST_TOKENS)]
    yield _measured(device, "matrix_product", products, _matrix_product)

    attention = _read(folder, device, "context_attention")
    in_half = (attention.attn_dtype == "bfloat16") & (attention.kv_cache_dtype == "bfloat16")
    attention = attention[in_half & (attention.isl >= _LEAST_TOKENS)]
    for width in HEAD_WIDTHS:
        of_width = attention[attention.head_dim == width]
        if len(of_width):
            yield _measured(device, f"attention_{width}", of_width, _attention)

    experts = _read(folder, device, "moe")
    in_half = (experts.moe_dtype == "bfloat16") & (experts.distribution == "balanced")
    on_one_gpu = experts.moe_ep_size == 1
    experts = experts[in_half & on_one_gpu & (experts.num_tokens >= _LEAST_TOKENS)]
    yield _measured(device, "experts", experts, _experts)

    # Attention of one token to many does what element-wise kernels do: it moves data.
    decode = _read(folder, device, "generation_attention")
    in_half = (decode.attn_dtype == "bfloat16") & (decode.kv_cache_dtype == "bfloat16")
    decode = decode[in_half & (decode.window_size == 0) & (decode.head_dim == 128)]
    long = decode.batch_size * decode.step * decode.num_key_value_heads >= 2**20
    yield _measured(device, "element_wise", decode[long], _moved)


def _read(folder: Path, device: str, kernels: str) -> pd.DataFrame:
    path = folder / f"{DEVICES[device][0]}_{kernels}_perf.csv.gz"
    if not path.exists():
        raise InputError("there is no such file of measured kernels", path=path)
    return pd.read_csv(path)


def _measured(
    device: str, kind: str, rows: pd.DataFrame, kernel_of: Callable[[pd.DataFrame], Kernel]
) -> Measured:
    sizes = rows.drop(columns=["latency", "power"])
    hashes = [zlib.crc32(str(row).encode()) for row in sizes.itertuples(index=False, name=None)]
    return Measured(
        device=device,
        kind=kind,
        kernel=kernel_of(rows),
        latency_ms=rows.latency.to_numpy(),
        power_w=rows.power.to_numpy(),
        is_aside=np.array([number % _KEPT_ASIDE == 0 for number in hashes]),
        is_after_pause=_is_after_pause(rows),
    )


def _is_after_pause(rows: pd.DataFrame) -> npt.NDArray[np.bool_]:
    """Whether each row was measured after a pause, as far as the order of rows tells, (N,).

    Products were measured in series of the same rows and columns, in the order of the file. Of the
    other kinds the order says nothing.
    """
    if "k" not in rows:
        return np.zeros(len(rows), bool)
    begins_series = (rows[["m", "n"]].diff() != 0).any(axis=1)
    place_in_series = rows.groupby(begins_series.cumsum()).cumcount()
    return (place_in_series < _AFTER_PAUSE).to_numpy()


def _matrix_product(rows: pd.DataFrame) -> Kernel:
    return MatrixProduct(rows.m.to_numpy(), rows.n.to_numpy(), rows.k.to_numpy())


def _attention(rows: pd.DataFrame) -> Kernel:
    return Attention(
        sequences=rows.batch_size.to_numpy(),
        tokens=rows.isl.to_numpy(),
        heads=rows.num_heads.to_numpy(),
        key_value_heads=rows.num_key_value_heads.to_numpy(),
        key_size=rows.head_dim.to_numpy(),
        value_size=rows.head_dim.to_numpy(),
        window=rows.window_size.to_numpy(),
    )


def _experts(rows: pd.DataFrame) -> Kernel:
    return ExpertProducts(
        tokens=rows.num_tokens.to_numpy(),
        hidden_size=rows.hidden_size.to_numpy(),
        expert_size=(rows.inter_size // rows.moe_tp_size).to_numpy(),
        per_token=rows.topk.to_numpy(),
        experts=rows.num_experts.to_numpy(),
        local_experts=(rows.num_experts // rows.moe_ep_size).to_numpy(),
    )


def _moved(rows: pd.DataFrame) -> Kernel:
    keys_and_values = 2 * rows.num_key_value_heads * rows.head_dim
    return ElementWise((2 * rows.batch_size * rows.step * keys_and_values).to_numpy())


# --- fitting -------------------------------------------------------------------------------------

#: Where the fit of each kind starts; the other coefficients are as in _FIXED.
_STARTS: Final[Mapping[str, Mapping[str, float]]] = {
    "matrix_product": {
        "efficiency": 0.78,
        "memory_efficiency": 0.8,
        "start_us": 2.0,
        "sharpness": 3.0,
        "depth_overhead": 100.0,
        "wave_overhead": 0.3,
        "math_weight": 0.85,
        "memory_weight": 0.25,
    },
    "attention": {
        "efficiency": 0.6,
        "memory_efficiency": 0.8,
        "start_us": 5.0,
        "depth_overhead": 100.0,
        "wave_overhead": 0.3,
        "math_weight": 0.3,
        "memory_weight": 0.1,
    },
    "experts": {
        "efficiency": 0.45,
        "memory_efficiency": 0.8,
        "start_us": 20.0,
        "sharpness": 3.0,
        "depth_overhead": 100.0,
        "tokens_overhead": 4.0,
        "math_weight": 0.4,
        "memory_weight": 0.2,
    },
    "element_wise": {"memory_efficiency": 0.85, "start_us": 5.0, "memory_weight": 0.2},
}
_FIXED: Final[Mapping[str, float]] = {
    "efficiency": 1.0,
    "sharpness": 2.0,
    "math_weight": 0.0,
    "time_error": 0.0,
    "power_error": 0.0,
}
#: What reading for attention does not tell of element-wise kernels, which write, too: assumed.
_ELEMENT_WISE: Final = {"memory_efficiency": 0.85, "start_us": 3.0, "time_error": 0.1}
_GPU_START: Final = {"base_activity": 0.15, "limit_share": 0.985}


def fit(measured: Sequence[Measured]) -> KernelModel:
    """The model of a GPU's kernels that meets its rows best, but for those kept aside.

    The matrix products tell what is the GPU's: its base activity, and how near to its limit it
    goes. The other kinds are fitted after that.

    Args:
        measured: its kinds of kernels, matrix products first.
    """
    device = measured[0].device
    model = KernelModel(
        gpu=gpu(device),
        multiprocessors=DEVICES[device][1],
        kinds={},
        error_between_clocks=_ERROR_BETWEEN_CLOCKS,
        source=_SOURCE,
        **_GPU_START,
    )
    for rows in measured:
        model = _fit_kind(model, rows)
        residuals = judge(model, rows, aside=True)
        kind = replace(
            model.kinds[rows.kind],
            time_error=residuals.time_rms,
            power_error=residuals.power_rms,
        )
        if rows.kind == "element_wise":
            kind = replace(kind, **_ELEMENT_WISE)
        model = replace(model, kinds={**model.kinds, rows.kind: _rounded(kind)})
    return model


def _fit_kind(model: KernelModel, measured: Measured) -> KernelModel:
    """The model with the kind of the rows fitted; for attention with the best height of tiles."""
    if not isinstance(measured.kernel, Attention):
        return _fit_with_tiles(model, measured, _STARTS[measured.kind], {}).model
    start = _STARTS["attention"]
    if np.max(measured.kernel.key_size) < _WIDE_HEAD:
        return _fit_with_tiles(model, measured, start, {}).model
    fits = [
        _fit_with_tiles(model, measured, start, {"tile_rows": tile_rows})
        for tile_rows in _TILE_ROWS
    ]
    return min(fits, key=lambda fit: fit.cost).model


class _Fit(NamedTuple):
    """A model, and half the sum of its losses over the rows that it was fitted to."""

    model: KernelModel
    cost: float


def _fit_with_tiles(
    model: KernelModel,
    measured: Measured,
    usual_start: Mapping[str, float],
    tiles: Mapping[str, float],
) -> _Fit:
    start = dict(usual_start)
    if measured.kind == "matrix_product":
        start |= _GPU_START
    names = list(start)
    origin = np.log(list(start.values()))
    rows = np.flatnonzero(~measured.is_aside)
    rows = rows[:: -(-len(rows) // _MOST_ROWS)]
    some = _select(measured, rows)
    highest_mhz = model.gpu.clocks_mhz[0]
    drew_little = some.power_w < _COLD_SHARE * model.gpu.power_limit_w
    is_cold = drew_little & (some.latency_ms > _COLD_MS) & (measured.kind == "matrix_product")
    tells_power = (some.latency_ms > _POWER_IS_TOLD_MS) & ~is_cold

    def fitted(point: FloatArray) -> KernelModel:
        values = dict(zip(names, np.exp(point).tolist(), strict=True))
        shared = {name: values.pop(name) for name in _GPU_START if name in values}
        kind = KernelKind(**{**_FIXED, **tiles, **values})
        return replace(model, kinds={**model.kinds, measured.kind: kind}, **shared)

    def residuals(point: FloatArray) -> FloatArray:
        candidate = fitted(point)
        cost = candidate.cost(some.kernel, highest_mhz)
        at_highest = candidate.cost_without_limit(some.kernel, highest_mhz)
        time_s = np.where(is_cold, at_highest.time_s, cost.time_s)
        of_time = np.log(1e3 * time_s / some.latency_ms) * np.where(is_cold, _COLD_WEIGHT, 1.0)
        of_power = _POWER_WEIGHT * np.log(cost.power_w / some.power_w)[tells_power]
        return np.concatenate([of_time, of_power, _PULL * (point - origin)])

    found = least_squares(residuals, origin, loss="soft_l1", f_scale=0.1, max_nfev=60)
    return _Fit(fitted(found.x), float(found.cost))


def _select(measured: Measured, rows: npt.NDArray[np.int64]) -> Measured:
    sizes = {name: _taken(value, rows) for name, value in vars(measured.kernel).items()}
    return replace(
        measured,
        kernel=replace(measured.kernel, **sizes),  # type: ignore[type-var]
        latency_ms=measured.latency_ms[rows],
        power_w=measured.power_w[rows],
        is_aside=measured.is_aside[rows],
        is_after_pause=measured.is_after_pause[rows],
    )


def _taken(value: object, rows: npt.NDArray[np.int64]) -> object:
    return value[rows] if isinstance(value, np.ndarray) else value


def _rounded(kind: KernelKind) -> KernelKind:
    """With as many digits as a reader wants."""
    return KernelKind(**{name: float(f"{value:.3g}") for name, value in vars(kind).items()})


# --- judging -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Residuals:
    """How far modelled kernels are from measured ones, as fractions.

    Attributes:
        num_kernels: whose times are compared.
        time_rms: root mean square of the logarithm of modelled over measured time.
        time_mean: mean of it.
        num_powers: kernels whose power is told.
        power_rms: the same of power.
        power_mean: mean of it.
        steady_power_rms: the same of kernels that did not run after a pause.
    """

    num_kernels: int
    time_rms: float
    time_mean: float
    num_powers: int
    power_rms: float
    power_mean: float
    steady_power_rms: float


def judge(model: KernelModel, measured: Measured, *, aside: bool = False) -> Residuals:
    """Hold a model against measured kernels: all, or those kept aside from its fit."""
    if aside:
        measured = _select(measured, np.flatnonzero(measured.is_aside))
    cost = model.cost(measured.kernel, model.gpu.clocks_mhz[0])
    of_time = np.log(1e3 * cost.time_s / measured.latency_ms)
    tells_power = measured.latency_ms > _POWER_IS_TOLD_MS
    of_power = np.log(cost.power_w / measured.power_w)[tells_power]
    is_steady = ~measured.is_after_pause[tells_power]
    return Residuals(
        num_kernels=len(of_time),
        time_rms=_rms(of_time),
        time_mean=float(of_time.mean()),
        num_powers=len(of_power),
        power_rms=_rms(of_power),
        power_mean=float(of_power.mean()),
        steady_power_rms=_rms(of_power[is_steady]),
    )


def _rms(errors: FloatArray) -> float:
    return float(np.sqrt(np.mean(errors**2)))


_HEADERS: Final = (
    *("GPU", "kernels", "kept aside", "time, rms", "time, mean"),
    *("of 0.1 ms and more", "power, rms", "power, mean", "power, not after a pause, rms"),
)


def _row(measured: Measured, residuals: Residuals) -> list[str]:
    return [
        measured.device.upper(),
        measured.kind.replace("_", " "),
        f"{residuals.num_kernels:,}",
        f"{residuals.time_rms:.1%}",
        f"{residuals.time_mean:+.1%}",
        f"{residuals.num_powers:,}",
        f"{residuals.power_rms:.1%}",
        f"{residuals.power_mean:+.1%}",
        f"{residuals.steady_power_rms:.1%}" if measured.is_after_pause.any() else "-",
    ]


# --- writing -------------------------------------------------------------------------------------

_HEAD: Final = """\
# How long kernels take and what they draw: coefficients of KernelKind in
# envplan.profiling.kernels, which says what each means. `python -m tools.kernels FOLDER --fit`
# writes this file. time_error and power_error are of kernels kept aside from the fit.
#
# H100, B300 and GB300 are not among the measured GPUs. They take the kernels of the same chip,
# with the clocks, rates, bandwidths and limits of their own data sheets. In serving as measured end
# to end (silicon_sample.csv in the same repository), pairs of runs that differ in the GPU alone,
# median: time to the first token 0.97 on H100 of that on H200 (36 pairs), 0.98 on GB300 of GB200
# (29), 0.86 on B300 of B200 (158); time between tokens 1.04, 0.98, 0.97.

[h100-sxm]
like = "h200"

[h100-pcie]
like = "h200"
multiprocessors = 114

[b300]
like = "b200"

[gb300]
like = "gb200"
"""


#: Values that KernelKind has by itself.
_UNWRITTEN: Final = {"tile_rows": 128.0}


def _as_toml(models: Sequence[KernelModel]) -> str:
    parts = [_HEAD]
    for model in models:
        key = model.gpu.key
        parts.append(
            f"[{key}]\n"
            f'source = "{model.source}"\n'
            f"multiprocessors = {model.multiprocessors}\n"
            f"base_activity = {model.base_activity:.3g}\n"
            f"limit_share = {model.limit_share:.4g}\n"
            f"error_between_clocks = {model.error_between_clocks:g}\n"
        )
        for name, kind in model.kinds.items():
            lines = [
                f"{field} = {value:g}"
                for field, value in vars(kind).items()
                if value and value != _UNWRITTEN.get(field)
            ]
            parts.append("\n".join([f"[{key}.kinds.{name}]", *_with_zeros(kind, lines)]) + "\n")
    return "\n".join(parts)


def _with_zeros(kind: KernelKind, lines: list[str]) -> list[str]:
    """The lines of coefficients that have no default, though they are 0."""
    needed = ("math_weight", "memory_weight")
    return lines + [f"{name} = 0.0" for name in needed if not getattr(kind, name)]


def main() -> None:
    """Fit if that is asked for, judge, print; write the block of documents where some are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("documents", nargs="*", type=Path)
    parser.add_argument("--fit", action="store_true")
    asked = parser.parse_intermixed_args()
    rows, models = [], []
    for device in DEVICES:
        measured = list(read_measured(asked.folder, device))
        model = fit(measured) if asked.fit else read_kernel_models()[device]
        models.append(model)
        rows += [_row(kind, judge(model, kind, aside=asked.fit)) for kind in measured]
    content = markdown_table(_HEADERS, rows)
    print(content)
    if asked.fit:
        COEFFICIENTS.write_text(_as_toml(models), encoding="utf-8")
    for document in asked.documents:
        update_block(document, "kernels", content)


if __name__ == "__main__":
    main()
