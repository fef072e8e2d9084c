"""Noise: times that vary, and what replays under it prove.

Each operation's time is multiplied by a factor drawn for it alone, lognormal with mean 1. Under
such noise an iteration is on average longer than its plan says, for it waits for the slowest of
what runs in parallel.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from envplan.errors import InputError

if TYPE_CHECKING:
    from envplan.profile import Profile
    from envplan.replay import Problem

#: The confidence with which a stated probability is proved.
CONFIDENCE: Final = 0.99

_CHUNK: Final = 2**21  # numbers drawn at a time; the last few chunks are cached
_BISECTIONS: Final = 60  # of an interval of length 1, to the precision of a double


def spreads(
    noise: float | None, problem: Problem, profile: Profile, rows: NDArray[np.int32]
) -> NDArray[np.float64]:
    """Standard deviation of each operation's time as a fraction of it, (N,).

    Args:
        noise: the same for all; None: as the profile's column time_std says, row by row.
        rows: for each operation the row of its option table, (N,).

    Raises:
        InputError: the profile does not say.
    """
    if noise is not None:
        return np.full(len(rows), noise)
    keys = [
        (operation.profile_stage, operation.instruction, row)
        for operation, row in zip(problem.pipeline.operations, rows.tolist(), strict=True)
    ]
    spread_of_key = {key: _spread(profile, *key) for key in dict.fromkeys(keys)}
    return np.array([spread_of_key[key] for key in keys])


def _spread(profile: Profile, stage: int, instruction: str, row: int) -> float:
    table = profile.table(stage, instruction)
    mhz, config = int(table.frequency_mhz[row]), table.config[row]
    spread = profile.time_spread(stage, instruction, mhz, config)
    if spread is not None:
        return spread
    derived = ""
    if profile.adjustments.makes_operations:
        derived = f", for it has derived rows ({'; '.join(profile.adjustments.in_words())})"
    raise InputError(
        f"profile {profile.name} does not say how much the time of {instruction} on stage {stage} "
        f"at {mhz} MHz varies (column time_std){derived}; say how much times vary with --noise PCT"
    )


def time_factors(
    spreads: NDArray[np.float64], seed: int, runs: int
) -> Iterator[NDArray[np.float64]]:
    """Factors of operation times in `runs` replays, (some runs, N) at a time.

    They are lognormal with mean 1: exp(s z - s^2 / 2) with z standard normal and s^2 = log(1 +
    spread^2). Run k draws the same numbers whatever the number of runs and the plan.

    Args:
        spreads: standard deviations as fractions, (N,).
    """
    num_operations = len(spreads)
    log_variance = np.log1p(spreads**2)
    runs_per_chunk = max(1, _CHUNK // num_operations)
    for begin in range(0, runs, runs_per_chunk):
        end = min(runs, begin + runs_per_chunk)
        normal = _standard_normal(num_operations, seed, begin, end)
        yield np.exp(np.sqrt(log_variance) * normal - log_variance / 2)


@lru_cache(maxsize=8)
def _standard_normal(num_operations: int, seed: int, begin: int, end: int) -> NDArray[np.float64]:
    """Standard normal numbers of runs from begin to end, (runs, N)."""
    normal = np.empty((end - begin, num_operations))
    for k, run in enumerate(range(begin, end)):
        normal[k] = np.random.default_rng([seed, run]).standard_normal(num_operations)
    return normal


def clopper_pearson_lower(successes: int, runs: int, confidence: float) -> float:
    """The probability that successes in trials prove with a confidence.

    The one-sided lower limit of Clopper and Pearson (Biometrika 26, 1934): the probability under
    which so many successes, or more, would be as rare as 1 - confidence.
    """
    if successes == 0:
        return 0.0
    k = np.arange(successes, runs + 1)
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, runs + 1)))])
    log_ways = log_factorial[runs] - log_factorial[k] - log_factorial[runs - k]

    def tail(p: float) -> float:
        """The probability of so many successes or more, each of probability p."""
        return float(np.exp(log_ways + k * math.log(p) + (runs - k) * math.log1p(-p)).sum())

    low, high = 0.0, successes / runs
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if tail(middle) > 1 - confidence:
            high = middle
        else:
            low = middle
    return low


def fewest_successes(probability: float, runs: int, confidence: float) -> int:
    """The fewest successes in `runs` trials that prove a probability; runs + 1 where none do."""

    def proved_probability(successes: int) -> float:
        return clopper_pearson_lower(successes, runs, confidence)

    return bisect_left(range(runs + 1), probability, key=proved_probability)


@dataclass(frozen=True)
class NoisyRun:
    """A training run whose iterations are noisy independently.

    Its iterations' mean counts, and little above it. Replays bound the mean and the variance of an
    iteration from above (large-sample limits, half of the risk each), and Cantelli's inequality,
    which holds for any distribution, bounds the probability that their sum is late.

    Attributes:
        iterations: how many.
        deadline_ns: when all must be over, ns.
    """

    iterations: int
    deadline_ns: int

    @property
    def iteration_deadline_ns(self) -> int:
        """The deadline's equal share for each iteration, ns."""
        return self.deadline_ns // self.iterations

    def cantelli_lower(self, makespans: NDArray[np.int64], confidence: float) -> float:
        """The probability of being over in time that replays of an iteration prove.

        Cantelli's inequality: with mean m and variance v of an iteration, the sum of n of them is
        over by n (m + d) with probability at least n d^2 / (v + n d^2).
        """
        bounds = _upper_bounds(makespans, confidence)
        margin_ns = self.deadline_ns / self.iterations - bounds.mean_ns
        if margin_ns <= 0:
            return 0.0
        n_times_d2 = self.iterations * margin_ns**2
        return n_times_d2 / (bounds.variance_ns2 + n_times_d2)

    def provable_deadline_ns(
        self, makespans: NDArray[np.int64], probability: float, confidence: float
    ) -> int:
        """The earliest deadline for which these replays prove a probability below 1, ns.

        Raises:
            InputError: the probability is 1, which no number of replays proves.
        """
        if probability >= 1:
            raise InputError("no number of replays proves a probability of 1")
        bounds = _upper_bounds(makespans, confidence)
        odds = probability / (1 - probability)
        margin_ns = math.sqrt(bounds.variance_ns2 * odds / self.iterations)
        return math.ceil((bounds.mean_ns + margin_ns) * self.iterations)


class _Moments(NamedTuple):
    """Mean and variance of an iteration's time."""

    mean_ns: float
    variance_ns2: float


def _upper_bounds(makespans: NDArray[np.int64], confidence: float) -> _Moments:
    """Upper bounds of mean and variance, which both hold with the confidence.

    Large-sample limits; each takes half of the risk (Bonferroni).

    Raises:
        InputError: there are fewer than two replays.
    """
    if len(makespans) < 2:
        raise InputError("two replays at least are needed to bound a variance")
    times_ns = makespans.astype(np.float64)
    quantile = NormalDist().inv_cdf(1 - (1 - confidence) / 2)
    mean, variance = float(times_ns.mean()), float(times_ns.var(ddof=1))
    fourth_moment = float(((times_ns - mean) ** 4).mean())
    variance_of_variance = max(0.0, fourth_moment - variance**2)
    error_of_mean = math.sqrt(variance / len(times_ns))
    error_of_variance = math.sqrt(variance_of_variance / len(times_ns))
    return _Moments(
        mean_ns=mean + quantile * error_of_mean,
        variance_ns2=variance + quantile * error_of_variance,
    )
