"""Factors of terms, fitted to measured times: a maximum a posteriori estimate.

A time is a sum of terms x_k, each taking f_k times as long as its data sheet says:

    log t = log sum_k f_k x_k + noise,      log f_k = centre_k + sum of deviations

Rows are in groups of several levels, such as the engine, or the engine on one GPU. Each group
deviates in all terms together and in each alone, by normal deviations around 0 whose spread
belongs to the level: groups of many rows get factors of their own, groups of few stay near the
others, and a group without any has the factors of its level above. Noise is of Student's t
distribution, so that single rows that contradict all others move nothing.

The estimate is found by Gauss-Newton: the derivative of log t by log f_k is the term's share of t.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from envplan.serving.classes import FloatArray

#: Degrees of freedom of the noise, and its scale, a relative error.
_FREEDOM: Final = 3.0
_MAX_ROUNDS: Final = 30
_MAX_CHANGE: Final = 0.6  # of a logarithm, in one round
_TOLERANCE: Final = 3e-3
_NEVER: Final = 1e12  # precision of what does not deviate

Groups = npt.NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class Level:
    """Groups of rows, and how much factors of groups deviate.

    Attributes:
        group: of each row, (rows,), from 0.
        spread: standard deviation of a group's deviation in a single term, as a logarithm; 0: none.
        common_spread: the same of its deviation in all terms together; 0: none.
    """

    group: Groups
    spread: float
    common_spread: float = 0.0


def grouped(keys: Sequence[Hashable]) -> Groups:
    """The group of each row whose keys are given: equal keys are one group."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.intp)


def fit_factors(
    terms: FloatArray,
    measured_s: FloatArray,
    levels: Sequence[Level],
    centre: FloatArray | None = None,
    noise: float = 0.1,
) -> FloatArray:
    """Factors of each row's terms, (rows, terms).

    Args:
        terms: of each row, s, (rows, terms), none below 0, and not all 0.
        measured_s: time of each row, (rows,); NaN where it is to be predicted only.
        levels: groups, from the largest down.
        centre: logarithms of the factors that groups deviate from, (rows, terms) or (terms,);
            None: found with the rest, around 0.
        noise: scale of relative errors of single rows.
    """
    problem = _Problem(terms, measured_s, levels, centre, noise)
    return problem.solve()


class _Problem:
    """The unknowns are deviations: by level, group and term, then by level and group."""

    def __init__(
        self,
        terms: FloatArray,
        measured_s: FloatArray,
        levels: Sequence[Level],
        centre: FloatArray | None,
        noise: float,
    ) -> None:
        self._terms = terms
        self._noise = noise
        self._known = np.flatnonzero(np.isfinite(measured_s))
        self._log_measured = np.log(measured_s[self._known])
        num_rows, num_terms = terms.shape
        self._centre = np.zeros(num_terms) if centre is None else centre
        everything = [] if centre is not None else [Level(np.zeros(num_rows, np.intp), 2.0)]
        # Deviations by term, and of all terms together; the first unknown belongs to no group and
        # stays 0.
        precisions: list[FloatArray] = [np.full(1, _NEVER)]
        columns: list[npt.NDArray[np.intp]] = []
        common: list[npt.NDArray[np.intp]] = []
        num_unknowns = 1
        for level in [*everything, *levels]:
            group, num_groups = self._measured_groups(level)
            is_known = group >= 0
            if level.spread:
                first = num_unknowns + group[:, None] * num_terms + np.arange(num_terms)
                columns.append(np.where(is_known[:, None], first, 0))
                precisions.append(np.full(num_groups * num_terms, level.spread**-2))
                num_unknowns += num_groups * num_terms
            if level.common_spread:
                common.append(np.where(is_known, num_unknowns + group, 0))
                precisions.append(np.full(num_groups, level.common_spread**-2))
                num_unknowns += num_groups
        self._columns = np.stack(columns, axis=1)  # (rows, levels, terms)
        no_columns = np.empty((num_rows, 0), dtype=np.intp)
        self._common = np.stack(common, axis=1) if common else no_columns
        self._precision = np.concatenate(precisions)

    def _measured_groups(self, level: Level) -> tuple[Groups, int]:
        """The number of each row's group among those with measured rows, or -1, and how many."""
        with_rows = np.unique(level.group[self._known])
        numbers = np.full(int(level.group.max()) + 1, -1, dtype=np.intp)
        numbers[with_rows] = np.arange(len(with_rows))
        return numbers[level.group], len(with_rows)

    def solve(self) -> FloatArray:
        """Factors of each row's terms."""
        deviations = np.zeros(len(self._precision))
        if not len(self._known):
            return self._factors(deviations)
        for _ in range(_MAX_ROUNDS):
            change = self._gauss_newton_step(deviations)
            deviations = deviations + np.clip(change, -_MAX_CHANGE, _MAX_CHANGE)
            if np.max(np.abs(change)) < _TOLERANCE:
                break
        return self._factors(deviations)

    def _factors(self, deviations: FloatArray) -> FloatArray:
        by_term = deviations[self._columns].sum(axis=1)
        together = deviations[self._common].sum(axis=1)[:, None]
        factors: FloatArray = np.exp(self._centre + by_term + together)
        return factors

    def _gauss_newton_step(self, deviations: FloatArray) -> FloatArray:
        known = self._known
        times_s = (self._terms * self._factors(deviations))[known]
        total_s = times_s.sum(axis=1)
        share = times_s / total_s[:, None]
        residual = self._log_measured - np.log(total_s)
        scaled = residual / self._noise
        weight = (_FREEDOM + 1) / (_FREEDOM + scaled**2) / self._noise**2
        derivative = np.zeros((len(known), len(deviations)))
        rows = np.arange(len(known))
        for number in range(self._columns.shape[1]):
            derivative[rows[:, None], self._columns[known, number]] += share
        for number in range(self._common.shape[1]):
            derivative[rows, self._common[known, number]] += 1.0
        weighted = derivative * weight[:, None]
        matrix = weighted.T @ derivative + np.diag(self._precision)
        gradient = weighted.T @ residual - self._precision * deviations
        step: FloatArray = np.linalg.solve(matrix, gradient)
        return step
