"""Plans that hold their deadline with a probability when times are noisy.

Each operation's time is multiplied by a factor drawn for it alone, lognormal with mean 1, as in
`envplan.simulate`. Under such noise an iteration is on average longer than its plan says, for it
waits for the slowest of what runs side by side. So the plan is made for an earlier deadline than
the one it has to hold, or, where even T_min is too late for that, from T_min's plan by making
operations faster step by step until all are as fast as can be. How much earlier is found by
bisection, every candidate meeting the same draws.

The plan that comes out is replayed with fresh draws, which its choice has not seen, and the share
in time is stated with what it proves: the lower end of its one-sided confidence interval (Clopper
and Pearson, Biometrika 1934) must reach the probability asked for. Should it not, the next attempt
aims higher and draws anew, with half the risk of error left, so that all attempts together keep to
the confidence stated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from envplan.errors import InputError, NoAnswerError
from envplan.units import MAX_INTEGER, ns_from_s_floor, s_from_ns

if TYPE_CHECKING:
    from envplan.frontier.trace import Frontier
    from envplan.pipeline import Pipeline
    from envplan.plan import Plan
    from envplan.profile import OptionTable, Profile

#: How sure a stated share is.
CONFIDENCE: Final = 0.99
#: Fresh replays that prove it; the most percent that so many can prove.
RUNS: Final = 10_000
MAX_PERCENT: Final = 99.9

_SEARCH_RUNS: Final = 2_000
_STEPS: Final = 12  # of the bisection
_ATTEMPTS: Final = 4
_CHUNK: Final = 2**22  # factors drawn at a time
_KEPT: Final = 2**24  # of those that the search draws, kept from step to step

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Noise:
    """How much times vary.

    Attributes:
        fraction: standard deviation of every time as a fraction of it; None: as the profile's
            column time_std says, row by row.
    """

    fraction: float | None

    def __post_init__(self) -> None:
        if self.fraction is not None and not 0 < self.fraction <= 1:
            raise InputError(f"noise must be a fraction above 0 and up to 1, not {self.fraction}")

    def spreads(
        self, pipeline: Pipeline, profile: Profile, options: NDArray[np.int32]
    ) -> NDArray[np.float64]:
        """Standard deviation of each operation's time as a fraction of it, (N,).

        Args:
            options: for each operation the row of its option table, (N,).

        Raises:
            InputError: a row does not say.
        """
        if self.fraction is not None:
            return np.full(len(options), self.fraction)
        known: dict[tuple[int, str, int], float] = {}
        found = []
        for op, row in zip(pipeline.operations, options.tolist(), strict=True):
            key = (op.profile_stage, op.instruction, row)
            if key not in known:
                known[key] = _spread(profile, *key)
            found.append(known[key])
        return np.array(found)


def _spread(profile: Profile, stage: int, instruction: str, row: int) -> float:
    table = profile.table(stage, instruction)
    mhz, config = int(table.frequency_mhz[row]), table.config[row]
    spread = profile.time_spread(stage, instruction, mhz, config)
    if spread is None and profile.adjustments:
        raise InputError(
            f"how much times vary is not known of a profile with derived rows "
            f"({'; '.join(profile.adjustments.in_words())}): its column time_std is about the "
            "measured ones; give the noise in percent (--noise)"
        )
    if spread is None:
        raise InputError(
            f"profile {profile.name} does not say how much the time of {instruction} on stage "
            f"{stage} at {mhz} MHz varies (column time_std); give the noise in percent (--noise)"
        )
    return spread


def noise_draws(count: int, seed: int, runs: int) -> Iterator[NDArray[np.float64]]:
    """Standard normal numbers for `runs` replays of `count` operations, (some runs, count) a time.

    Run k draws what run k of envplan.simulate draws with the same seed.
    """
    at_once = max(1, _CHUNK // count)
    for first in range(0, runs, at_once):
        some = range(first, min(runs, first + at_once))
        yield np.array([np.random.default_rng([seed, k]).standard_normal(count) for k in some])


def noisy_makespans(
    pipeline: Pipeline,
    time_ns: NDArray[np.int64],
    spreads: NDArray[np.float64],
    draws: Iterable[NDArray[np.float64]],
) -> NDArray[np.int64]:
    """Iteration times under noise, (runs,), ns: many runs at once, operation by operation.

    Args:
        time_ns: time of each operation, (N,), ns.
        spreads: standard deviation of each as a fraction of it, (N,).
        draws: as noise_draws gives them.
    """
    return np.concatenate([_makespans(pipeline, time_ns, spreads, some) for some in draws])


def _replayed(
    pipeline: Pipeline,
    profile: Profile,
    tables: Sequence[OptionTable],
    options: NDArray[np.int32],
    noise: Noise,
    draws: Iterable[NDArray[np.float64]],
) -> NDArray[np.int64]:
    """Iteration times of a choice of options under noise, (runs,), ns."""
    time_ns = [table.time_ns[row] for table, row in zip(tables, options.tolist(), strict=True)]
    spreads = noise.spreads(pipeline, profile, options)
    return noisy_makespans(pipeline, np.array(time_ns, np.int64), spreads, draws)


def _makespans(
    pipeline: Pipeline,
    time_ns: NDArray[np.int64],
    spreads: NDArray[np.float64],
    normal: NDArray[np.float64],
) -> NDArray[np.int64]:
    variance = np.log1p(spreads**2)
    factors = np.exp(np.sqrt(variance) * normal - variance / 2)
    times = np.clip(np.rint(time_ns * factors), 1, MAX_INTEGER).astype(np.int64).T.copy()
    starts = np.zeros_like(times)
    begins, after = pipeline.succ_begin.tolist(), pipeline.succ.tolist()
    lags = pipeline.succ_lag_ns.tolist()
    makespan = np.zeros(len(normal), np.int64)
    for i in pipeline.order.tolist():
        finish = starts[i] + times[i]
        if begins[i] == begins[i + 1]:
            np.maximum(makespan, finish, out=makespan)
        for k in range(begins[i], begins[i + 1]):
            row = starts[after[k]]
            np.maximum(row, finish + lags[k] if lags[k] else finish, out=row)
    return makespan


def share_at_least(held: int, runs: int, confidence: float) -> float:
    """What probability `held` successes in `runs` trials prove with a confidence.

    The one-sided lower limit of Clopper and Pearson: the probability under which so many successes,
    or more, would be as rare as 1 - confidence.
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
    low, high = math.ceil(share * runs) - 1, runs + 1
    while high - low > 1:
        middle = (low + high) // 2
        if share_at_least(middle, runs, confidence) >= share:
            high = middle
        else:
            low = middle
    return high


def robust_plan(
    frontier: Frontier,
    deadline_ns: int,
    target: dict[str, float | str],
    probability: float,
    noise: Noise,
    *,
    seed: int = 0,
    progress: Progress | None = None,
) -> Plan:
    """The plan of least energy found that ends by a deadline with a probability.

    Args:
        deadline_ns: what it has to hold, not below T_min, ns.
        target: what was asked: `kind` and the number that goes with it.
        probability: above 0, up to MAX_PERCENT / 100.
        seed: of all draws, not negative; the same seed gives the same plan.
        progress: called with (attempts at a plan to go at most, 0).

    Raises:
        InputError: a number is out of range, or the profile does not say how times vary.
        NoAnswerError: no plan holds it; says what the fastest one does.
    """
    if not 0 < probability <= MAX_PERCENT / 100:
        raise InputError(
            f"the probability must be above 0 and up to {MAX_PERCENT:g} percent, not "
            f"{100 * probability:g} percent"
        )
    if seed < 0:
        raise InputError(f"seed must not be negative, not {seed}")
    family = _Family(frontier, deadline_ns, noise, seed)
    for attempt in range(_ATTEMPTS):
        confidence = 1 - (1 - CONFIDENCE) / 2 ** (attempt + 1)
        needed = least_held(probability, RUNS, confidence)
        spread = math.sqrt(probability * (1 - probability) / _SEARCH_RUNS)
        aim = min(needed / RUNS + (attempt + 1) * spread, 1.0)
        options = family.slowest_that_holds(aim, progress)
        fresh = seed + 1 + attempt
        draws = noise_draws(len(options), fresh, RUNS)
        held = int((family.makespans(options, draws) <= deadline_ns).sum())
        if held >= needed:
            return _stated(
                frontier, options, target, deadline_ns, probability, noise, fresh, held, confidence
            )
    raise _not_held(family, deadline_ns, probability, seed + 1)


class _Family:
    """Plans from the slowest worth having, at 0, by T_min's, at 1, to the fastest of all, at 2."""

    def __init__(self, frontier: Frontier, deadline_ns: int, noise: Noise, seed: int) -> None:
        from envplan.plan import option_tables

        self.deadline_ns = deadline_ns
        self._frontier = frontier
        self._noise = noise
        self._tables = option_tables(frontier.pipeline, frontier.profile)
        self._seed = seed
        self._kept: list[NDArray[np.float64]] = []

    def options(self, place: float) -> NDArray[np.int32]:
        """For each operation the row of its option table, (N,)."""
        frontier = self._frontier
        least = frontier.min_time_ns
        most = min(self.deadline_ns, frontier.min_energy_time_ns)
        rounding = frontier.rounding_at(most - round((most - least) * min(place, 1.0)))
        if place > 1:
            # Options stand by time, the fastest first.
            rounding.choice[:] = np.floor(rounding.choice * (2 - place))
        return rounding.options

    def makespans(
        self, options: NDArray[np.int32], draws: Iterable[NDArray[np.float64]]
    ) -> NDArray[np.int64]:
        """Iteration times under noise, (runs,), ns."""
        pipeline, profile = self._frontier.pipeline, self._frontier.profile
        return _replayed(pipeline, profile, self._tables, options, self._noise, draws)

    def slowest_that_holds(self, aim: float, progress: Progress | None) -> NDArray[np.int32]:
        """Options of the slowest plan found that holds the deadline in a share `aim` of the draws;
        the fastest, where none does."""
        best = self.options(0.0)
        if self._holds(best, aim):
            return best
        low, high, best = 0.0, 2.0, self.options(2.0)
        for step in range(_STEPS):
            if progress is not None:
                progress(_STEPS - step, 0)
            middle = (low + high) / 2
            options = self.options(middle)
            if self._holds(options, aim):
                high, best = middle, options
            else:
                low = middle
        return best

    def _holds(self, options: NDArray[np.int32], aim: float) -> bool:
        draws: Iterable[NDArray[np.float64]] = noise_draws(len(options), self._seed, _SEARCH_RUNS)
        if len(options) * _SEARCH_RUNS <= _KEPT:
            self._kept = self._kept or list(draws)
            draws = self._kept
        makespans = self.makespans(options, draws)
        return float((makespans <= self.deadline_ns).mean()) >= aim


def _stated(
    frontier: Frontier,
    options: NDArray[np.int32],
    target: dict[str, float | str],
    deadline_ns: int,
    probability: float,
    noise: Noise,
    seed: int,
    held: int,
    confidence: float,
) -> Plan:
    """The plan, with what its fresh replays prove."""
    from envplan.plan import Robustness

    plan = frontier.priced_plan(options, target, min(deadline_ns, frontier.min_energy_time_ns))
    robustness = Robustness(
        probability=probability,
        noise=noise.fraction,
        seed=seed,
        runs=RUNS,
        held_runs=held,
        confidence=confidence,
        share_at_least=share_at_least(held, RUNS, confidence),
    )
    predicted = plan.predicted.model_copy(update={"robustness": robustness})
    return plan.model_copy(update={"predicted": predicted})


def _not_held(family: _Family, deadline_ns: int, probability: float, seed: int) -> NoAnswerError:
    """What the fastest plan holds, and what it could."""
    options = family.options(2.0)
    makespans = np.sort(family.makespans(options, noise_draws(len(options), seed, RUNS)))
    share = float((makespans <= deadline_ns).mean())
    could_ns = int(makespans[least_held(probability, RUNS, CONFIDENCE) - 1])
    return NoAnswerError(
        f"no plan holds {s_from_ns(deadline_ns):.9f} s with a probability of {100 * probability:g} "
        f"percent: with every operation as fast as can be {100 * share:.2f} percent of {RUNS} "
        f"replays do; {s_from_ns(could_ns):.9f} s could be held"
    )


def check_robustness(
    plan: Plan, pipeline: Pipeline, profile: Profile, options: NDArray[np.int32]
) -> list[str]:
    """That a plan holds its deadline as its `robustness` states, by the replays that it names.

    Args:
        options: for each operation the row of its option table, (N,).

    Raises:
        InputError: it does not.
    """
    from envplan.plan import option_tables

    stated = plan.predicted.robustness
    if stated is None:
        return []
    if stated.held_runs > stated.runs:
        raise InputError("predicted.robustness.held_runs are more than its runs")
    asked = plan.target.deadline_s if plan.target.time_s is None else plan.target.time_s
    tables = option_tables(pipeline, profile)
    draws = noise_draws(len(options), stated.seed, stated.runs)
    makespans = _replayed(pipeline, profile, tables, options, Noise(stated.noise), draws)
    held = int((makespans <= ns_from_s_floor(asked)).sum())
    proved = share_at_least(held, stated.runs, stated.confidence)
    for field, found, true in (
        ("held_runs", stated.held_runs, held),
        ("share_at_least", stated.share_at_least, proved),
    ):
        if not math.isclose(found, true, rel_tol=1e-9):
            raise InputError(f"predicted.robustness.{field} is {found!r}; replayed it is {true!r}")
    if proved < stated.probability:
        raise InputError(
            f"predicted.robustness: {held} of {stated.runs} replays in time prove a probability of "
            f"{proved!r}, less than {stated.probability!r}"
        )
    return [
        f"{held} of {stated.runs} replays with noise end by {asked!r} s: a probability of at least "
        f"{100 * proved:.2f}%, with a confidence of {100 * stated.confidence:g}%"
    ]
