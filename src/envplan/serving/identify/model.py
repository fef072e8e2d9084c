"""Times of any benchmark row, by factors of what is known about its engine, GPU and model.

Two fits follow each other. The general one has few factors: of each engine, of each engine on each
GPU, and of each model. Rows of the same software on the same kind of GPU then get factors of their
own around these, and each of their parallelisms around those. A model on a GPU where nobody
measured it has the general factors alone, of a fit to software that was measured often: a handful
of rows may be of one odd setting, which says nothing about other models and GPUs.
What these leave of the rows of a software is shared among its like loads (`neighbours`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from envplan.serving.classes import FloatArray
from envplan.serving.identify.benchmark import Benchmark
from envplan.serving.identify.fit import Groups, Level, fit_factors, grouped
from envplan.serving.identify.neighbours import shared_residuals
from envplan.serving.identify.terms import first_token_terms, step_terms

#: Spreads of logarithms of factors (fit.Level): chosen by the rows that tools/serving keeps aside.
_ENGINE_SPREAD: Final = 0.3
_ENGINE_ON_GPU_SPREAD: Final = 0.15
_MODEL_SPREAD: Final = 0.1
_MODEL_COMMON_SPREAD: Final = 0.2
_SOFTWARE_IN_GENERAL_COMMON_SPREAD: Final = 0.25
_SOFTWARE_SPREAD: Final = 1.0
_SOFTWARE_COMMON_SPREAD: Final = 0.3
_PARALLELISM_SPREAD: Final = 0.3
_PARALLELISM_COMMON_SPREAD: Final = 0.2
_GENERAL_NOISE: Final = 0.12
#: Rows that a software must have for pairs of model and GPU that nobody measured to learn from it.
_MANY_ROWS: Final = 10
INTERVAL_NOISE: Final = 0.06
_FIRST_TOKEN_NOISE: Final = 0.08
#: Noise of single rows around what rows of like loads have in common beside the terms.
_INTERVAL_RESIDUAL: Final = 0.04
_FIRST_TOKEN_RESIDUAL: Final = 0.1


@dataclass(frozen=True, eq=False)
class Prediction:
    """Times of some rows, and the factors that they follow from.

    Attributes:
        token_interval_s: time between tokens, (rows,).
        first_token_s: time to the first token, (rows,).
        step_factors: of the terms of the former, (rows, terms).
        first_token_factors: of the terms of the latter, (rows, terms).
    """

    token_interval_s: FloatArray
    first_token_s: FloatArray
    step_factors: FloatArray
    first_token_factors: FloatArray


def predict(rows: Sequence[Benchmark]) -> Prediction:
    """Times of all rows, fitted to those that state what was measured."""
    terms = step_terms(rows)
    measured_s = _measured([row.token_interval_s for row in rows])
    step_factors = _factors(rows, terms, measured_s, INTERVAL_NOISE)
    token_interval_s = _times_s(rows, terms, step_factors, measured_s, _INTERVAL_RESIDUAL)
    terms = first_token_terms(rows, token_interval_s)
    measured_s = _measured([row.first_token_s for row in rows])
    first_token_factors = _factors(rows, terms, measured_s, _FIRST_TOKEN_NOISE)
    first_token_s = _times_s(rows, terms, first_token_factors, measured_s, _FIRST_TOKEN_RESIDUAL)
    return Prediction(token_interval_s, first_token_s, step_factors, first_token_factors)


def _times_s(
    rows: Sequence[Benchmark],
    terms: FloatArray,
    factors: FloatArray,
    measured_s: FloatArray,
    noise: float,
) -> FloatArray:
    """Sums of terms, times what rows of like loads have in common beside them."""
    sums_s = (terms * factors).sum(axis=1)
    shared = shared_residuals(rows, np.log(measured_s / sums_s), noise)
    times_s: FloatArray = sums_s * np.exp(shared)
    return times_s


def _measured(times_s: Sequence[float | None]) -> FloatArray:
    return np.array([np.nan if time_s is None else time_s for time_s in times_s])


def _factors(
    rows: Sequence[Benchmark], terms: FloatArray, measured_s: FloatArray, noise: float
) -> FloatArray:
    software = grouped([row.software for row in rows])
    general = _centre(rows, software, terms, measured_s)
    factors = np.empty_like(general)
    for number in range(int(software.max()) + 1):
        members = np.flatnonzero(software == number)
        factors[members] = fit_factors(
            terms[members],
            measured_s[members],
            own_levels([rows[int(member)] for member in members]),
            centre=np.log(general[members]),
            noise=noise,
        )
    return factors


def _centre(
    rows: Sequence[Benchmark], software: Groups, terms: FloatArray, measured_s: FloatArray
) -> FloatArray:
    """General factors that each row's own deviate from, (rows, terms)."""
    centre = general_factors(rows, terms, measured_s)
    is_measured = np.isfinite(measured_s)
    pair = grouped([(row.pair, row.disaggregated) for row in rows])
    is_new = np.bincount(pair, weights=is_measured)[pair] == 0
    is_often = np.bincount(software, weights=is_measured)[software] >= _MANY_ROWS
    if is_new.any() and is_often.any():
        measured_often_s = np.where(is_often, measured_s, np.nan)
        centre[is_new] = general_factors(rows, terms, measured_often_s)[is_new]
    return centre


def general_factors(
    rows: Sequence[Benchmark], terms: FloatArray, measured_s: FloatArray
) -> FloatArray:
    """Factors of each row's terms that follow from its engine, GPU and model, (rows, terms).

    Args:
        rows: the benchmarks.
        terms: of each, s, (rows, terms).
        measured_s: of each; NaN where it is not known.
    """
    return fit_factors(terms, measured_s, _general_levels(rows), noise=_GENERAL_NOISE)


def _general_levels(rows: Sequence[Benchmark]) -> list[Level]:
    engines = grouped([(row.engine, row.disaggregated) for row in rows])
    engines_on_gpu = grouped([(row.engine, row.disaggregated, row.gpu.key) for row in rows])
    models = grouped([row.model.key for row in rows])
    software = grouped([row.software for row in rows])
    return [
        Level(engines, _ENGINE_SPREAD),
        Level(engines_on_gpu, _ENGINE_ON_GPU_SPREAD),
        Level(models, _MODEL_SPREAD, _MODEL_COMMON_SPREAD),
        Level(software, 0.0, _SOFTWARE_IN_GENERAL_COMMON_SPREAD),
    ]


def own_levels(rows: Sequence[Benchmark]) -> list[Level]:
    """Groups of rows of the same software on the same kind of GPU."""
    everything = np.zeros(len(rows), dtype=np.intp)
    parallelisms = grouped([row.parallelism for row in rows])
    return [
        Level(everything, _SOFTWARE_SPREAD, _SOFTWARE_COMMON_SPREAD),
        Level(parallelisms, _PARALLELISM_SPREAD, _PARALLELISM_COMMON_SPREAD),
    ]
