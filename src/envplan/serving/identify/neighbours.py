"""What the terms leave unexplained, shared among rows of like loads: Gaussian process regression.

Terms describe no engine wholly: chunks, captured graphs and schedulers have steps of their own
along a series of loads. The logarithm of measured over predicted time is taken for a smooth
function of the load, with a normal prior around 0 (kriging of residuals: Rasmussen and Williams,
Gaussian Processes for Machine Learning, chapter 2). So the nearest measured loads of the same
software decide what a prediction is multiplied with, and far from them it stays as it was.
Noise is of Student's t distribution, as in `fit`: single odd rows move nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from envplan.serving.classes import FloatArray
from envplan.serving.identify.benchmark import Benchmark
from envplan.serving.identify.fit import grouped

#: Standard deviation of what the terms leave, as a share of the noise's scale.
_SPREAD_PER_NOISE: Final = 2.5
#: Distances over which it changes: doublings of input, output, requests at once and GPUs.
_LENGTHS: Final = np.array([1.5, 1.5, 1.2, 1.0])
#: Correlation between instances of other GPUs or parallelism under the same load.
_OTHER_PARALLELISM: Final = 0.8
_FREEDOM: Final = 3.0
_ROUNDS: Final = 8


def shared_residuals(rows: Sequence[Benchmark], residual: FloatArray, noise: float) -> FloatArray:
    """Expected residual of every row, (rows,), from those of the same software that have one.

    Args:
        rows: of any software.
        residual: logarithm of measured over predicted time, (rows,); NaN where not measured.
        noise: scale of relative errors of single rows.
    """
    found = np.zeros(len(rows))
    software = grouped([row.software for row in rows])
    for number in range(int(software.max()) + 1):
        members = np.flatnonzero(software == number)
        is_known = np.isfinite(residual[members])
        if is_known.any():
            of_software = [rows[int(member)] for member in members]
            found[members] = _expected(of_software, residual[members], is_known, noise)
    return found


def _expected(
    rows: Sequence[Benchmark], residual: FloatArray, is_known: FloatArray, noise: float
) -> FloatArray:
    known = np.flatnonzero(is_known)
    covariance = (_SPREAD_PER_NOISE * noise) ** 2 * _correlation(rows)
    among_known = covariance[np.ix_(known, known)]
    measured = residual[known]
    weight = np.ones(len(known))
    for _ in range(_ROUNDS):
        scaled = np.linalg.solve(among_known + np.diag(noise**2 / weight), measured)
        left = (measured - among_known @ scaled) / noise
        weight = (_FREEDOM + 1) / (_FREEDOM + left**2)
    expected: FloatArray = covariance[:, known] @ scaled
    return expected


def _correlation(rows: Sequence[Benchmark]) -> FloatArray:
    """Correlation of what the terms leave of each two rows, (rows, rows)."""
    loads = np.log2(
        [
            (row.input_tokens, row.output_tokens, row.instance_concurrency, row.num_gpus)
            for row in rows
        ]
    )
    distance = (loads[:, None, :] - loads[None, :, :]) / _LENGTHS
    parallelism = grouped([row.parallelism for row in rows])
    is_same = parallelism[:, None] == parallelism[None, :]
    nearness: FloatArray = np.exp(-0.5 * (distance**2).sum(axis=2))
    return nearness * np.where(is_same, 1.0, _OTHER_PARALLELISM)
