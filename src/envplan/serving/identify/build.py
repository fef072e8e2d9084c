"""A serving profile from a sweep: fits the terms to it and writes the profile's two files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from envplan._io.files import atomic_write
from envplan.errors import InputError
from envplan.profile.sidecar import sidecar_path
from envplan.serving.classes import FloatArray
from envplan.serving.identify.benchmark import Benchmark
from envplan.serving.identify.catalogue import serving_gpu
from envplan.serving.identify.clocks import power_at, profile_clocks, term_slowness
from envplan.serving.identify.factors import Factors, PowerFactors
from envplan.serving.identify.fit import fit_factors
from envplan.serving.identify.model import INTERVAL_NOISE, own_levels
from envplan.serving.identify.terms import (
    STEP_TERMS,
    context_token_s,
    first_token_terms,
    prompt_arithmetic,
    step_terms,
)

SCHEMA: Final = "envplan/serving-profile/v1"
#: GPUs of an instance that a profile may have.
_TPS: Final = (1, 2, 4, 8)
_BATCHES: Final = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512)
_PROMPTS: Final = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
_CHUNK_TOKENS: Final = 2048
#: Of a GPU that holds the weights and does nothing, as a share of its power limit: assumed.
_IDLE_SHARE: Final = 0.14
#: The context whose reading states the time and power of contexts.
_CONTEXT_TOKENS: Final = 65536
#: Of GPUs whose power was not measured, those whose was.
_MEASURED_RELATIVES: Final = {"b300": "b200", "gb200": "b200", "gb300": "b200"}
_PROMPT_TERMS: Final = ("prompts", "expert_prompts", "prompt_software")


@dataclass(frozen=True)
class FittedSweep:
    """A sweep, and the factors of its terms.

    Attributes:
        rows: all of the same model, GPU, engine and precision.
        factors: of the terms of times between tokens, by GPUs of an instance, (terms,).
        token_interval_s: fitted time between tokens of each row, (rows,).
        first_token_s: fitted time to the first token of each row, (rows,).
    """

    rows: Sequence[Benchmark]
    factors: Mapping[int, FloatArray]
    token_interval_s: FloatArray
    first_token_s: FloatArray

    @property
    def token_interval_error(self) -> float:
        """Root mean square of the relative errors of times between tokens."""
        measured = [row.token_interval_s for row in self.rows]
        return _rms_error(self.token_interval_s, measured)

    @property
    def first_token_error(self) -> float:
        """The same of times to the first token."""
        measured = [row.first_token_s for row in self.rows]
        return _rms_error(self.first_token_s, measured)


def _rms_error(fitted_s: FloatArray, measured_s: Sequence[float | None]) -> float:
    known = np.array([np.nan if time_s is None else time_s for time_s in measured_s])
    return float(np.sqrt(np.nanmean((fitted_s / known - 1) ** 2)))


def fit_sweep(rows: Sequence[Benchmark], factors: Factors) -> FittedSweep:
    """Fit the terms to a sweep, around the factors of its engine, GPU and model elsewhere.

    Args:
        rows: of one model, GPU, engine and precision, prefill and decode on the same GPUs.
        factors: what is known from elsewhere.

    Raises:
        InputError: no row is of an instance that a profile can have.
    """
    tps = sorted({int(row.num_gpus) for row in rows if row.num_gpus in _TPS})
    if not tps:
        raise InputError("has no results of instances on 1, 2, 4 or 8 GPUs")
    terms = step_terms(rows)
    centre = np.array([factors.step.centre(row) for row in rows])
    measured_s = np.array([row.token_interval_s or np.nan for row in rows])
    step_factors = fit_factors(terms, measured_s, own_levels(rows), centre, INTERVAL_NOISE)
    token_interval_s = (terms * step_factors).sum(axis=1)
    first_terms = first_token_terms(rows, token_interval_s)
    first_centre = np.array([factors.first_token.centre(row) for row in rows])
    first_measured_s = np.array([row.first_token_s or np.nan for row in rows])
    first_factors = fit_factors(
        first_terms, first_measured_s, own_levels(rows), first_centre, INTERVAL_NOISE
    )
    by_tp = {}
    for tp in tps:
        of_tp = [number for number, row in enumerate(rows) if row.num_gpus == tp]
        by_tp[tp] = np.exp(np.log(step_factors[of_tp]).mean(axis=0))
    return FittedSweep(
        rows=rows,
        factors=by_tp,
        token_interval_s=token_interval_s,
        first_token_s=(first_terms * first_factors).sum(axis=1),
    )


def save_profile(sweep: FittedSweep, factors: Factors, path: Path, source: str) -> None:
    """Write a profile's CSV and its sidecar.

    Args:
        sweep: fitted.
        factors: for power.
        path: of the CSV.
        source: where the sweep is from, in words.

    Raises:
        InputError: the weights fit into the memory of no instance, or a file cannot be written.
    """
    instances = [_Instance(sweep, tp, factors) for tp in sweep.factors]
    instances = [instance for instance in instances if instance.kv_tokens > 0]
    if not instances:
        raise InputError("the weights fit into the memory of none of the sweep's instances")
    lines = ["tp,frequency,phase,size,time_s,power_w"]
    for instance in instances:
        lines += instance.lines()
    atomic_write(path, "\n".join(lines) + "\n")
    sidecar = json.dumps(_sidecar(sweep, instances, source), indent=2) + "\n"
    atomic_write(sidecar_path(path), sidecar)


class _Instance:
    """An instance on some GPUs, as a fitted sweep describes it."""

    def __init__(self, sweep: FittedSweep, tp: int, factors: Factors) -> None:
        row = next(row for row in sweep.rows if row.num_gpus == tp)
        # One request without context: other loads are made from it.
        self.row = replace(row, input_tokens=1.0, output_tokens=1.0, num_workers=1.0)
        self.tp = tp
        self._step_factors = sweep.factors[tp]
        self._factors = factors
        self._gpu = row.gpu
        self._device = row.gpu.device

    @property
    def kv_tokens(self) -> int:
        """Tokens of context that fit into its memory."""
        return int(self.row.kv_capacity_tokens)

    def lines(self) -> list[str]:
        """Rows of the profile's CSV."""
        lines = []
        for clock_mhz in profile_clocks(self._device):
            slowness = term_slowness(self._device, clock_mhz)
            lines.append(self._line(clock_mhz, "idle", 0, 0.0, self._idle_w))
            prompt_w = self._prompt_gpu_w(np.array(_PROMPTS, dtype=np.float64))
            for tokens, gpu_w in zip(_PROMPTS, self._clocked(prompt_w, clock_mhz), strict=True):
                prompt_s = self._prompt_s(tokens, slowness)
                lines.append(self._line(clock_mhz, "prefill", tokens, prompt_s, self.tp * gpu_w))
            step_w = np.array([self._step_gpu_w(batch_size) for batch_size in _BATCHES])
            for size, gpu_w in zip(_BATCHES, self._clocked(step_w, clock_mhz), strict=True):
                step_s = float((self._step_s(size) * slowness).sum())
                lines.append(self._line(clock_mhz, "decode", size, step_s, self.tp * gpu_w))
            lines.append(self._context_line(clock_mhz))
        return lines

    def _line(self, clock_mhz: int, phase: str, size: int, time_s: float, power_w: float) -> str:
        time = f"{time_s:.6g}" if time_s else "0"
        return f"{self.tp},{clock_mhz},{phase},{size},{time},{power_w:.1f}"

    @property
    def _idle_w(self) -> float:
        return self.tp * _IDLE_SHARE * self._gpu.power_limit_w

    def _clocked(self, gpu_w: FloatArray, clock_mhz: int) -> FloatArray:
        return power_at(self._device, self._gpu.power_limit_w, gpu_w, clock_mhz)

    def _step_s(self, batch_size: float) -> FloatArray:
        """Times of the terms of a decode step without context or prompts, s, (terms,)."""
        row = replace(self.row, concurrency=batch_size)
        times_s: FloatArray = step_terms([row])[0] * self._step_factors
        for name in ("context", *_PROMPT_TERMS):
            times_s[STEP_TERMS.index(name)] = 0.0
        return times_s

    def _prompt_s(self, tokens: int, slowness: FloatArray) -> float:
        """Time that a prompt takes from its instance, s: what it adds to the steps beside it."""
        arithmetic = prompt_arithmetic(self.row, tokens, self.row.num_gpus)
        software_s = step_terms([replace(self.row, concurrency=1.0)])[0]
        times_s = (
            arithmetic.dense_s,
            arithmetic.expert_s,
            software_s[STEP_TERMS.index("prompt_software")],
        )
        total_s = 0.0
        for name, time_s in zip(_PROMPT_TERMS, times_s, strict=True):
            number = STEP_TERMS.index(name)
            total_s += float(time_s * self._step_factors[number] * slowness[number])
        # A prompt alone also reads the weights, and starts the kernels of every layer.
        alone_s = float((self._step_s(1) * slowness).sum())
        return max(total_s, alone_s) if tokens < _CHUNK_TOKENS else total_s

    def _step_gpu_w(self, batch_size: float) -> float:
        """Power of a GPU in a decode step at the highest clock, W."""
        row = replace(self.row, concurrency=batch_size)
        return step_power_w(row, float(self._step_s(batch_size).sum()), self._power)

    @property
    def _power(self) -> PowerFactors:
        return power_factors(self._factors, self.row)

    def _prompt_gpu_w(self, tokens: FloatArray) -> FloatArray:
        share = np.interp(tokens, self._factors.prompt_tokens, self._factors.prompt_power)
        gpu_w: FloatArray = share * self._gpu.power_limit_w
        return gpu_w

    def _context_line(self, clock_mhz: int) -> str:
        """What contexts add to a step: the GPUs read memory, and little else."""
        factor = self._step_factors[STEP_TERMS.index("context")]
        time_s = float(_CONTEXT_TOKENS * context_token_s(self.row) * factor)
        power = self._power
        highest_w = power.base_w + power.memory_w / max(1.0, factor)
        gpu_w = self._clocked(np.array([highest_w]), clock_mhz)[0]
        limited_w = min(float(gpu_w), self._gpu.power_limit_w)
        return self._line(clock_mhz, "context", _CONTEXT_TOKENS, time_s, self.tp * limited_w)


def power_factors(factors: Factors, row: Benchmark) -> PowerFactors:
    """Power of a row's model on its GPU, as far as it was measured.

    Otherwise that of the GPU, or of its nearest relative, by the ratio of their power limits.
    """
    for key in (" ".join(row.pair), row.gpu.key):
        if key in factors.power:
            return factors.power[key]
    relative = serving_gpu(_MEASURED_RELATIVES.get(row.gpu.key, "h100"))
    known = factors.power[relative.key]
    ratio = row.gpu.power_limit_w / relative.power_limit_w
    return PowerFactors(
        base_w=ratio * known.base_w,
        memory_w=ratio * known.memory_w,
        arithmetic_w=ratio * known.arithmetic_w,
    )


def power_shares(row: Benchmark, step_s: float) -> FloatArray:
    """What PowerFactors are multiplied with, for steps of a row's batch that take so long, (3,)."""
    terms = dict(zip(STEP_TERMS, step_terms([row])[0], strict=True))
    memory_share = min(1.0, (terms["weights"] + terms["context"]) / step_s)
    arithmetic_share = min(1.0, terms["arithmetic"] / step_s)
    return np.array([1.0, memory_share, arithmetic_share])


def step_power_w(row: Benchmark, step_s: float, power: PowerFactors) -> float:
    """Power of one GPU in steps of a row's batch that take so long, W."""
    watts = np.array([power.base_w, power.memory_w, power.arithmetic_w])
    gpu_w = float((power_shares(row, step_s) * watts).sum())
    return min(row.gpu.power_limit_w, gpu_w)


def _sidecar(sweep: FittedSweep, instances: Sequence[_Instance], source: str) -> dict[str, object]:
    row = sweep.rows[0]
    model = row.model
    modelled = (
        f"times at the highest clock are identified from {len(sweep.rows)} benchmarks ({source}; "
        f"rms error of times between tokens {100 * sweep.token_interval_error:.1f}%); power is "
        "identified from other benchmarks of the GPU, or its relatives; what lower clocks do is "
        "modelled; idle power is assumed (docs/serving-profile.md)"
    )
    return {
        "schema": SCHEMA,
        "gpu": row.gpu.title,
        "model": model.names[0],
        "source": "identified",
        "modelled": modelled,
        "engine": " ".join(word for word in (row.engine, row.version) if word),
        "precision": row.precision,
        "weights_bytes": model.weight_bytes(row.precision),
        "kv_bytes_per_token": row.kv_bytes_per_token,
        "max_context_tokens": model.max_context_tokens,
        "kv_tokens": {str(instance.tp): instance.kv_tokens for instance in instances},
        "chunk_tokens": {str(instance.tp): _CHUNK_TOKENS for instance in instances},
    }
