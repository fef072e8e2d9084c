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
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from envplan.serving.classes import FloatArray

#: Degrees of freedom of the noise, and its scale, a relative error.
_FREEDOM: Final = 3.0
_MAX_ROUNDS: Final = 30
_MAX_CHANGE: Final = 0.6  # of a logarithm, in one round
_TOLERANCE: Final = 3e-3
_NEVER: Final = 1e12  # precision of what does not deviate
#: Spread of the logarithms of factors that all rows have in common, where no centre is given.
_CENTRE_SPREAD: Final = 2.0

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


class _MeasuredGroups(NamedTuple):
    """The groups of a level that have measured rows; only these deviate.

    Attributes:
        number: of each row's group among them, (rows,); -1 where the group has no measured row.
        num_groups: how many they are.
    """

    number: Groups
    num_groups: int


class _Unknowns:
    """The deviations that are to be found, numbered.

    Number 0 belongs to no group and stays 0: it stands for groups without measured rows.
    """

    def __init__(self) -> None:
        self._count = 1
        self._precisions: list[FloatArray] = [np.full(1, _NEVER)]

    @property
    def precision(self) -> FloatArray:
        """Of each deviation around 0: one over its variance, (unknowns,)."""
        return np.concatenate(self._precisions)

    def add_by_term(self, groups: _MeasuredGroups, num_terms: int, spread: float) -> Groups:
        """A deviation for each term of each group.

        Returns:
            The numbers of those of each row, (rows, terms).
        """
        first_of_row = self._count + num_terms * groups.number
        numbers = first_of_row[:, None] + np.arange(num_terms)
        is_known = groups.number >= 0
        self._add(num_terms * groups.num_groups, spread)
        return np.where(is_known[:, None], numbers, 0)

    def add_common(self, groups: _MeasuredGroups, spread: float) -> Groups:
        """A deviation of all terms together for each group.

        Returns:
            The number of that of each row, (rows,).
        """
        numbers = self._count + groups.number
        is_known = groups.number >= 0
        self._add(groups.num_groups, spread)
        return np.where(is_known, numbers, 0)

    def _add(self, count: int, spread: float) -> None:
        self._precisions.append(np.full(count, spread**-2))
        self._count += count


class _Problem:
    """Rows, and the unknown deviations that their times depend on.

    The unknowns are deviations: by level, group and term, then by level and group.
    """

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
        self._centre = centre
        if centre is None:
            self._centre = np.zeros(num_terms)
            everything = Level(np.zeros(num_rows, np.intp), _CENTRE_SPREAD)
            levels = [everything, *levels]
        unknowns = _Unknowns()
        by_term: list[Groups] = []
        common: list[Groups] = [np.zeros(num_rows, np.intp)]
        for level in levels:
            groups = self._measured_groups(level)
            if level.spread:
                by_term.append(unknowns.add_by_term(groups, num_terms, level.spread))
            if level.common_spread:
                common.append(unknowns.add_common(groups, level.common_spread))
        self._by_term = np.stack(by_term)  # (levels, rows, terms)
        self._common = np.stack(common)  # (levels, rows)
        self._precision = unknowns.precision

    def _measured_groups(self, level: Level) -> _MeasuredGroups:
        with_rows = np.unique(level.group[self._known])
        number_of_group = np.full(int(level.group.max()) + 1, -1, dtype=np.intp)
        number_of_group[with_rows] = np.arange(len(with_rows))
        return _MeasuredGroups(number_of_group[level.group], len(with_rows))

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
        by_term = deviations[self._by_term].sum(axis=0)
        common = deviations[self._common].sum(axis=0)
        factors: FloatArray = np.exp(self._centre + by_term + common[:, None])
        return factors

    def _gauss_newton_step(self, deviations: FloatArray) -> FloatArray:
        """The change of all deviations that solves the problem as it looks nearby."""
        all_times_s = self._terms * self._factors(deviations)
        times_s = all_times_s[self._known]
        total_s = times_s.sum(axis=1)
        residual = self._log_measured - np.log(total_s)
        derivative = self._derivative(times_s / total_s[:, None])
        weighted = derivative * self._weight(residual)[:, None]
        matrix = weighted.T @ derivative + np.diag(self._precision)
        gradient = weighted.T @ residual - self._precision * deviations
        step: FloatArray = np.linalg.solve(matrix, gradient)
        return step

    def _weight(self, residual: FloatArray) -> FloatArray:
        """Of each known row: the farther off it is, the less it counts (Student's t)."""
        scaled = residual / self._noise
        weight: FloatArray = (_FREEDOM + 1) / (_FREEDOM + scaled**2) / self._noise**2
        return weight

    def _derivative(self, share: FloatArray) -> FloatArray:
        """Of the logarithm of each known row's time by each deviation, (known rows, unknowns).

        Args:
            share: of each term in the row's time, (known rows, terms).
        """
        num_known = len(self._known)
        rows = np.arange(num_known)
        derivative = np.zeros((num_known, len(self._precision)))
        for numbers in self._by_term:
            derivative[rows[:, None], numbers[self._known]] += share
        for numbers in self._common:
            derivative[rows, numbers[self._known]] += 1.0
        return derivative
