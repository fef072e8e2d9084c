"""Times that vary: what is drawn, and what so many replays prove.

Each operation's time is multiplied by a factor drawn for it alone, lognormal with mean 1. Under
such noise an iteration is on average longer than its plan says, for it waits for the slowest of
what runs side by side.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from envplan.errors import InputError

if TYPE_CHECKING:
    from envplan.profile import Profile
    from envplan.replay import Problem

#: How sure a stated share is.
CONFIDENCE: Final = 0.99

_CHUNK: Final = 2**21  # numbers drawn at a time; the last few lots of them are kept


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
    operations = zip(problem.pipeline.operations, rows.tolist(), strict=True)
    keys = [(op.profile_stage, op.instruction, row) for op, row in operations]
    known = {key: _spread(profile, *key) for key in dict.fromkeys(keys)}
    return np.array([known[key] for key in keys])


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
    """What times are multiplied by in `runs` replays: lognormal with mean 1, (some runs, N) a time.

    Run k draws the same numbers whatever the number of runs and the plan.

    Args:
        spreads: standard deviations as fractions, (N,).
    """
    variance, count = np.log1p(spreads**2), len(spreads)
    at_once = max(1, _CHUNK // count)
    for first in range(0, runs, at_once):
        normal = _drawn(count, seed, first, min(runs, first + at_once))
        yield np.exp(np.sqrt(variance) * normal - variance / 2)


@lru_cache(maxsize=8)
def _drawn(count: int, seed: int, first: int, last: int) -> NDArray[np.float64]:
    runs = range(first, last)
    return np.array([np.random.default_rng([seed, k]).standard_normal(count) for k in runs])


def share_at_least(held: int, runs: int, confidence: float) -> float:
    """What probability `held` successes in `runs` trials prove with a confidence.

    The one-sided lower limit of Clopper and Pearson (Biometrika 26, 1934): the probability under
    which so many successes, or more, would be as rare as 1 - confidence.
    """
    if held == 0:
        return 0.0
    k = np.arange(held, runs + 1)
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, runs + 1)))])
    log_ways = log_factorial[runs] - log_factorial[k] - log_factorial[runs - k]

    def tail(p: float) -> float:
        return float(np.exp(log_ways + k * math.log(p) + (runs - k) * math.log1p(-p)).sum())

    low, high = 0.0, held / runs
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if tail(middle) > 1 - confidence else (middle, high)
    return low


def least_held(share: float, runs: int, confidence: float) -> int:
    """The fewest successes in `runs` trials that prove a probability; runs + 1 where none do."""
    return bisect_left(
        range(runs + 1), share, key=lambda held: share_at_least(held, runs, confidence)
    )


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
    def each_ns(self) -> int:
        """What the deadline leaves for an iteration, ns."""
        return self.deadline_ns // self.iterations

    def share_at_least(self, makespans: NDArray[np.int64], confidence: float) -> float:
        """What probability of being over in time replays of an iteration prove."""
        mean, variance = _upper_limits(makespans, confidence)
        room = self.deadline_ns / self.iterations - mean
        if room <= 0:
            return 0.0
        return self.iterations * room**2 / (variance + self.iterations * room**2)

    def could_hold_ns(
        self, makespans: NDArray[np.int64], probability: float, confidence: float
    ) -> int:
        """The least deadline for which these replays prove a probability, ns."""
        mean, variance = _upper_limits(makespans, confidence)
        room = math.sqrt(variance * probability / (1 - probability) / self.iterations)
        return math.ceil((mean + room) * self.iterations)


def _upper_limits(makespans: NDArray[np.int64], confidence: float) -> tuple[float, float]:
    """Upper limits of mean (ns) and variance (ns2), both hold with the confidence."""
    times = makespans.astype(np.float64)
    sure = NormalDist().inv_cdf(1 - (1 - confidence) / 2)
    mean, variance = float(times.mean()), float(times.var(ddof=1))
    fourth = float(((times - mean) ** 4).mean())
    most = mean + sure * math.sqrt(variance / len(times))
    return most, variance + sure * math.sqrt(max(0.0, fourth - variance**2) / len(times))
