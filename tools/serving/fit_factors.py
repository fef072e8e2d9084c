"""Fits times and power of serving to published benchmarks, and makes the built-in profiles.

    python -m tools.serving.fit_factors SERVING KERNELS ROOT     fit, write factors and profiles
    python -m tools.serving.fit_factors SERVING --judge [FILE]   print errors of rows kept aside

SERVING holds silicon.csv.gz and ml_energy_v3.csv; KERNELS holds the measured kernels. FILE is a
table like silicon.csv.gz whose rows are predicted from all of silicon.csv.gz. Without it a fifth of
all configurations is kept aside in each of five turns, so that every row is predicted once from
others; then the same with whole series of loads; then, one after the other, some pairs of model
and GPU are kept aside. Repeated measurements count once, and rows that others contradict do not
count (`identify.agreement`), neither where the fit learns nor where it is judged. Before that come
errors of rows that other rows predict without any model (`measured_spread`). Below ROOT,
profiles/serving gets factors.json and a profile for each of PROFILES.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
from tools.serving.measured_spread import print_spread

from envplan._io.files import atomic_write
from envplan.serving.identify.agreement import contradictory, distinct
from envplan.serving.identify.benchmark import Benchmark
from envplan.serving.identify.build import fit_sweep, power_shares, save_profile
from envplan.serving.identify.catalogue import catalogue, language_model, serving_gpu
from envplan.serving.identify.factors import (
    OTHER_ENGINE,
    SCHEMA,
    Factors,
    PowerFactors,
    TimeFactors,
)
from envplan.serving.identify.fit import Level, fit_factors, grouped
from envplan.serving.identify.model import general_factors, predict
from envplan.serving.identify.sweep_files import read_sweep
from envplan.serving.identify.terms import first_token_terms, step_terms

FloatArray = npt.NDArray[np.float64]

_ENGINES: Final = ("vllm", "sglang", "trtllm")
#: A model that no row of the table is of: its factors are those of the engine alone.
_STRANGER: Final = "llama-3.1-405b"
_KEPT_ASIDE: Final = 5  # of so many rows of power one is kept aside
_TURNS: Final = 5
_WORST: Final = 40  # rows that are listed
_SERIES: Final = [
    "model", "gpu", "engine", "version", "precision", "gpus", "groups", "experts", "input", "output"
]  # fmt: skip
_NEW_PAIRS: Final = (
    ("llama-3.1-70b", "h100"),
    ("gpt-oss-120b", "h200"),
    ("qwen3-32b", "h100"),
    ("minimax-m2.5", "b200"),
    ("kimi-k2.5", "b200"),
    ("deepseek-r1", "h200"),
    ("qwen3.5-397b-a17b", "h200"),
    ("llama-3.1-8b", "h100"),
)
#: Tokens of an input, of each task of ML.ENERGY: it does not state them; assumed.
_INPUT_TOKENS: Final = {"lm-arena-chat": 250.0, "gpqa": 300.0, "sourcegraph-fim": 1000.0}
_PRECISIONS: Final = {"bfloat16": "bf16", "fp8": "fp8", "mxfp4": "fp4"}
#: About what each of the terms of power takes, as a share of the power limit.
_POWER_SCALE: Final = np.array([0.45, 0.3, 0.8])
#: Sizes of matrices whose products stand for those of a prompt.
_WIDE: Final = 4096


class Recipe(NamedTuple):
    """Which rows a built-in profile is made of; None: any."""

    model: str
    gpu: str
    engine: str
    precision: str
    version: str | None = None


PROFILES: Final = {
    "h100-llama-3.1-70b": Recipe("llama-3.1-70b", "h100", "vllm", "fp8"),
    "b200-llama-3.1-70b": Recipe("llama-3.1-70b", "b200", "vllm", "fp8"),
    "h100-gpt-oss-120b": Recipe("gpt-oss-120b", "h100", "vllm", "fp4", "0.18.0"),
    "h200-gpt-oss-120b": Recipe("gpt-oss-120b", "h200", "vllm", "fp4", "0.18.0"),
    "h100-qwen3-32b": Recipe("qwen3-32b", "h100", "vllm", "bf16", "0.12.0"),
    "h200-deepseek-r1": Recipe("deepseek-r1", "h200", "sglang", "fp8", "0.5.9"),
    "b200-deepseek-r1": Recipe("deepseek-r1", "b200", "sglang", "fp8", "0.5.9"),
}


def rms(errors: FloatArray) -> float:
    """Root mean square."""
    return float(np.sqrt(np.mean(errors**2)))


def times_s(rows: Sequence[Benchmark]) -> tuple[FloatArray, FloatArray]:
    """Measured times between tokens and to the first token of rows that state both."""
    intervals = np.array([row.token_interval_s or np.nan for row in rows])
    first_tokens = np.array([row.first_token_s or np.nan for row in rows])
    return intervals, first_tokens


def time_factors(rows: Sequence[Benchmark]) -> tuple[TimeFactors, TimeFactors]:
    """General factors of times between tokens and to the first token."""
    aggregated = [row for row in rows if not row.disaggregated]
    strangers: list[Benchmark] = []
    keys: list[tuple[str, str, str]] = []
    template = aggregated[0].unmeasured()
    for engine in (*_ENGINES, OTHER_ENGINE):
        for gpu_key in catalogue().gpus:
            for model_key in (_STRANGER, *_models(aggregated)):
                keys.append((engine, gpu_key, model_key))
                strangers.append(
                    replace(
                        template,
                        model=language_model(model_key),
                        gpu=serving_gpu(gpu_key),
                        engine=engine,
                        version="none",
                    )
                )
    everything = [*aggregated, *strangers]
    intervals, first_tokens = times_s(everything)
    terms = step_terms(everything)
    step = general_factors(everything, terms, intervals)
    predicted_s = (terms * step).sum(axis=1)
    first_terms = first_token_terms(everything, predicted_s)
    first = general_factors(everything, first_terms, first_tokens)
    return _shipped(keys, step[len(aggregated) :]), _shipped(keys, first[len(aggregated) :])


def _models(rows: Sequence[Benchmark]) -> list[str]:
    return sorted({row.model.key for row in rows})


def _shipped(keys: Sequence[tuple[str, str, str]], factors: FloatArray) -> TimeFactors:
    by_engine: dict[str, dict[str, list[float]]] = defaultdict(dict)
    by_model: dict[str, list[float]] = {}
    logs = dict(zip(keys, np.log(factors), strict=True))
    for (engine, gpu_key, model_key), log in logs.items():
        alone = logs[engine, gpu_key, _STRANGER]
        if model_key == _STRANGER:
            by_engine[engine][gpu_key] = [round(value, 4) for value in log.tolist()]
        elif model_key not in by_model:
            by_model[model_key] = [round(value, 4) for value in (log - alone).tolist()]
    return TimeFactors(by_engine=dict(by_engine), by_model=by_model)


class PowerRow(NamedTuple):
    """A row of ML.ENERGY: a batch that decodes, how long its steps take, and the power of a GPU."""

    benchmark: Benchmark
    step_s: float
    gpu_w: float


def power_rows(path: Path) -> list[PowerRow]:
    """The rows of ml_energy_v3.csv."""
    rows = []
    for row in pd.read_csv(path).itertuples():
        groups = max(1.0, float(row.data_parallel))
        benchmark = Benchmark(
            model=language_model(row.model),
            gpu=serving_gpu(row.gpu),
            engine="vllm",
            version="ML.ENERGY",
            precision=_PRECISIONS[row.weight_precision],
            input_tokens=_INPUT_TOKENS[row.task],
            output_tokens=row.avg_output_len,
            concurrency=row.avg_batch_size,
            num_gpus=float(row.num_gpus),
            attention_groups=min(groups, float(row.num_gpus)),
            prefill_gpus=float(row.num_gpus),
        )
        gpu_w = row.avg_power_w / row.num_gpus
        rows.append(PowerRow(benchmark, row.median_itl_ms / 1e3, gpu_w))
    return rows


def fitted_power(rows: Sequence[PowerRow], is_known: npt.NDArray[np.bool_]) -> FloatArray:
    """Watts of each row's terms (`build.power_shares`), (rows, 3), fitted to the known rows.

    As for times: factors of a GPU, of a model on it, and of an instance of that.
    """
    limits = np.array([row.benchmark.gpu.power_limit_w for row in rows])
    shares = np.array([power_shares(row.benchmark, row.step_s) for row in rows])
    terms = limits[:, None] * shares * _POWER_SCALE
    measured_w = np.where(is_known, [row.gpu_w for row in rows], np.nan)
    benchmarks = [row.benchmark for row in rows]
    levels = [
        Level(grouped([row.gpu.key for row in benchmarks]), 0.7),
        Level(grouped([row.model.key for row in benchmarks]), 0.0, 0.2),
        Level(grouped([row.pair for row in benchmarks]), 0.4, 0.2),
        Level(grouped([row.parallelism for row in benchmarks]), 0.3, 0.15),
    ]
    factors = fit_factors(terms, measured_w, levels, noise=0.05)
    watts: FloatArray = limits[:, None] * _POWER_SCALE * factors
    return watts


def fit_power(rows: Sequence[PowerRow]) -> dict[str, PowerFactors]:
    """Power of each GPU, and of each model on it: means of the rows' factors."""
    watts = fitted_power(rows, np.ones(len(rows), dtype=bool))
    of_key: dict[str, list[FloatArray]] = defaultdict(list)
    for row, of_row in zip(rows, watts, strict=True):
        of_key[row.benchmark.gpu.key].append(of_row)
        of_key[" ".join(row.benchmark.pair)].append(of_row)
    found = {}
    for key in sorted(of_key):
        base_w, memory_w, arithmetic_w = np.exp(np.log(of_key[key]).mean(axis=0)).round(1).tolist()
        found[key] = PowerFactors(base_w=base_w, memory_w=memory_w, arithmetic_w=arithmetic_w)
    return found


def power_errors(rows: Sequence[PowerRow], watts: FloatArray) -> FloatArray:
    """Relative errors of the power of rows, by the watts of their terms."""
    shares = np.array([power_shares(row.benchmark, row.step_s) for row in rows])
    limits = np.array([row.benchmark.gpu.power_limit_w for row in rows])
    predicted_w = np.minimum(limits, (shares * watts).sum(axis=1))
    measured_w = np.array([row.gpu_w for row in rows])
    errors: FloatArray = predicted_w / measured_w - 1
    return errors


def prompt_power(kernels: Path) -> tuple[list[float], list[float]]:
    """Tokens, and the share of the H200's power limit that wide matrix products of them draw."""
    table = pd.read_csv(kernels / "h200_sxm_gemm_perf.csv.gz")
    wide = table[(table.k >= _WIDE) & (table.n >= _WIDE)]
    tokens, shares = [], []
    for size in (128, 256, 512, 1024, 2048, 4096, 8192):
        of_size = wide[wide.m == size]
        if len(of_size):
            tokens.append(float(size))
            shares.append(float((of_size.power / of_size.power_limit).median()))
    highest = np.minimum(1.0, np.maximum.accumulate(shares))
    return tokens, [round(share, 3) for share in highest.tolist()]


def chosen(rows: Sequence[Benchmark], recipe: Recipe) -> list[Benchmark]:
    """The rows of a profile."""
    found = []
    for row in rows:
        facts = (row.model.key, row.gpu.key, row.engine, row.precision)
        is_version = recipe.version in (None, row.version)
        if facts == recipe[:4] and is_version and not row.disaggregated:
            found.append(row)
    return found


def make(serving: Path, kernels: Path, root: Path) -> None:
    """Fit everything, and write factors and profiles."""
    rows = measured_rows(serving / "silicon.csv.gz")
    step, first_token = time_factors(rows)
    measured_power = power_rows(serving / "ml_energy_v3.csv")
    power = fit_power(measured_power)
    tokens, shares = prompt_power(kernels)
    factors = Factors(
        step=step, first_token=first_token, power=power, prompt_tokens=tokens, prompt_power=shares
    )
    folder = root / "profiles" / "serving"
    document = {"schema": SCHEMA, **factors.model_dump()}
    atomic_write(folder / "factors.json", json.dumps(document, indent=1) + "\n")
    for name, recipe in PROFILES.items():
        sweep = fit_sweep(chosen(rows, recipe), factors)
        source = "InferenceX, by aiconfigurator's table"
        save_profile(sweep, factors, folder / f"{name}.csv", source)
        print(
            f"{name}: {len(sweep.rows)} rows, TP {sorted(sweep.factors)}, rms error "
            f"{100 * sweep.token_interval_error:.1f}% of times between tokens, "
            f"{100 * sweep.first_token_error:.1f}% of times to the first token"
        )
    print_power_errors(measured_power)


def print_power_errors(rows: Sequence[PowerRow]) -> None:
    """Errors of rows kept aside, by model and GPU, worst first."""
    fold = np.arange(len(rows)) % _KEPT_ASIDE
    errors = np.empty(len(rows))
    for number in range(_KEPT_ASIDE):
        members = fold == number
        watts = fitted_power(rows, ~members)
        errors[members] = power_errors(rows, watts)[members]
    fitted = power_errors(rows, fitted_power(rows, np.ones(len(rows), dtype=bool)))
    table = pd.DataFrame({"pair": [" ".join(row.benchmark.pair) for row in rows], "error": errors})
    groups = table.groupby("pair").error
    by_pair = pd.DataFrame({"rows": groups.size(), "rms": groups.agg(lambda e: rms(e.to_numpy()))})
    print(by_pair.sort_values("rms", ascending=False).round(3).to_string())
    print(f"power: rms of fitted rows {rms(fitted):.3f}, of rows kept aside {rms(errors):.3f}")


def measured_rows(path: Path) -> list[Benchmark]:
    """The rows of a table that are fitted and judged; prints how many are not."""
    rows = read_sweep(path)
    once = distinct(rows)
    is_contradicted = contradictory(once)
    for mode in ("agg", "disagg"):
        of_mode = [row for row in rows if mode_of(row).startswith(mode)]
        once_of_mode = [row for row in once if mode_of(row).startswith(mode)]
        pairs = zip(once, is_contradicted, strict=True)
        contradicted = sum(out for row, out in pairs if mode_of(row).startswith(mode))
        print(
            f"{mode}: {len(of_mode)} rows, {len(once_of_mode)} distinct measurements, "
            f"{contradicted} of them contradicted by others"
        )
    return [row for row, out in zip(once, is_contradicted, strict=True) if not out]


def mode_of(row: Benchmark) -> str:
    """Whether prefill has GPUs of its own, and how much is known of them."""
    if not row.disaggregated:
        return "agg"
    return "disagg, workers stated" if row.workers_known else "disagg, workers not stated"


def judge(serving: Path, other: Path | None) -> None:
    """Print errors of rows that the fit has not seen."""
    rows = measured_rows(serving / "silicon.csv.gz")
    if other is not None:
        unseen = read_sweep(other)
        kept = np.arange(len(rows) + len(unseen)) >= len(rows)
        report("given rows", *predicted_apart([*rows, *unseen], [kept]))
        return
    series = [repr((row.parallelism, row.input_tokens, row.output_tokens)) for row in rows]
    loads = [f"{name}, {row.concurrency}" for name, row in zip(series, rows, strict=True)]
    print_spread("all distinct measurements", distinct(read_sweep(serving / "silicon.csv.gz")))
    print_spread("judged rows", rows)
    report("kept aside", *predicted_apart(rows, turns(loads)), num_worst=_WORST)
    report("series kept aside", *predicted_apart(rows, turns(series)))
    aggregated = [row for row in rows if not row.disaggregated]
    for pair in _NEW_PAIRS:
        kept = np.array([row.pair == pair for row in aggregated])
        report(" ".join(pair), *predicted_apart(aggregated, [kept]))


def turns(names: Sequence[str]) -> list[npt.NDArray[np.bool_]]:
    """Which rows are kept aside in each turn: those of one name together."""
    turn = np.array([zlib.crc32(name.encode()) % _TURNS for name in names])
    return [turn == number for number in range(_TURNS)]


def predicted_apart(
    rows: Sequence[Benchmark], kept_aside: Sequence[npt.NDArray[np.bool_]]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Rows that are kept aside in some turn, and their times as the others predict them.

    Returns:
        What the rows are, and measured and predicted times, s, with relative errors.
    """
    intervals, first_tokens = times_s(rows)
    parts = []
    for is_kept in kept_aside:
        known = [row.unmeasured() if kept else row for row, kept in zip(rows, is_kept, strict=True)]
        found = predict(known)
        times = pd.DataFrame(
            {
                "interval_s": intervals,
                "predicted_interval_s": found.token_interval_s,
                "interval": found.token_interval_s / intervals - 1,
                "first_s": first_tokens,
                "predicted_first_s": found.first_token_s,
                "first": found.first_token_s / first_tokens - 1,
            }
        )
        parts.append(times[is_kept])
    predicted = pd.concat(parts).sort_index()
    described = pd.DataFrame([description(row) for row in rows]).loc[predicted.index]
    described["of_series"] = described.groupby(["mode", *_SERIES], dropna=False).requests.transform(
        "size"
    )
    return described, predicted


def description(row: Benchmark) -> dict[str, object]:
    """What a row is, for tables."""
    return {
        "mode": mode_of(row),
        "model": row.model.key,
        "gpu": row.gpu.key,
        "engine": row.engine,
        "version": row.version,
        "precision": row.precision,
        "gpus": row.num_gpus,
        "groups": row.attention_groups,
        "experts": row.layout,
        "input": row.input_tokens,
        "output": row.output_tokens,
        "requests": row.concurrency,
    }


def report(
    title: str, described: pd.DataFrame, predicted: pd.DataFrame, num_worst: int = 0
) -> None:
    """Print errors in all, by group, and of the worst rows, worst first."""
    for mode, of_mode in predicted.groupby(described["mode"]):
        for name in ("interval", "first"):
            errors = np.sort(np.abs(of_mode[name].to_numpy()))
            best = errors[: max(1, int(0.95 * len(errors)))]
            print(
                f"{title}, {mode}, {name}: {len(errors)} rows, rms {rms(errors):.3f}, without the "
                f"worst twentieth {rms(best):.3f}, median {np.median(errors):.3f}"
            )
    table = described.join(predicted)
    groups = table.groupby(["mode", "model", "gpu", "engine"])[["interval", "first"]]
    by_group = groups.agg(lambda errors: rms(errors.to_numpy()))
    by_group.insert(0, "rows", groups.size())
    print(by_group.sort_values("interval", ascending=False).round(3).to_string())
    for name in ("interval", "first"):
        of_agg = table[table["mode"] == "agg"]
        worst = of_agg.reindex(of_agg[name].abs().sort_values(ascending=False).index)
        if num_worst:
            print(worst.head(num_worst).drop(columns="mode").round(4).to_string())


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if "--judge" in arguments:
        judge(Path(arguments[0]), Path(arguments[2]) if len(arguments) > 2 else None)
    elif len(arguments) == 3:
        make(*map(Path, arguments))
    else:
        sys.exit(__doc__)
