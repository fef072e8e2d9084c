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

Where clocks follow late, every replay is with the latency, and the plans to choose from are those
of envplan.frontier.switching.

A run of many iterations has a deadline of its own. Its iterations are noisy independently, so what
counts is their mean, and little above it. The fresh replays bound the mean and the variance of an
iteration from above (large-sample limits, half of the risk each), and Cantelli's inequality, which
holds for any distribution, bounds the probability that their sum is late.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from statistics import NormalDist
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from envplan.errors import InputError, NoAnswerError
from envplan.frontier.switching import (
    NoPlanInTimeError,
    Switching,
    SwitchingSearch,
    replayed_plan,
)
from envplan.units import MAX_INTEGER, ns_from_s, ns_from_s_floor, s_from_ns

if TYPE_CHECKING:
    from envplan.frontier.trace import Frontier
    from envplan.pipeline import Pipeline
    from envplan.plan import Plan, Robustness
    from envplan.profile import OptionTable, Profile

#: How sure a stated share is.
CONFIDENCE: Final = 0.99
#: Fresh replays that prove it; the most percent that so many can prove.
RUNS: Final = 10_000
MAX_PERCENT: Final = 99.9

_SEARCH_RUNS: Final = 2_000
_STEPS: Final = 12  # of the bisection
_ATTEMPTS: Final = 4
_MOVES_SHARE: Final = 0.25  # of the usual effort, where clocks follow late
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
    latency_ns: int,
) -> NDArray[np.int64]:
    """Iteration times of a choice of options under noise, (runs,), ns."""
    spreads = noise.spreads(pipeline, profile, options)
    if latency_ns > 0:
        from envplan.frontier.late_noise import late_makespans

        late = (
            late_makespans(pipeline, tables, options, _factors(spreads, some), latency_ns)
            for some in draws
        )
        return np.concatenate(list(late))
    time_ns = [table.time_ns[row] for table, row in zip(tables, options.tolist(), strict=True)]
    return noisy_makespans(pipeline, np.array(time_ns, np.int64), spreads, draws)


def _factors(spreads: NDArray[np.float64], normal: NDArray[np.float64]) -> NDArray[np.float64]:
    """What times are multiplied by: lognormal with mean 1, (runs, N)."""
    variance = np.log1p(spreads**2)
    return np.exp(np.sqrt(variance) * normal - variance / 2)


def _makespans(
    pipeline: Pipeline,
    time_ns: NDArray[np.int64],
    spreads: NDArray[np.float64],
    normal: NDArray[np.float64],
) -> NDArray[np.int64]:
    factors = _factors(spreads, normal)
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


class NoisyRun(NamedTuple):
    """A training run whose iterations are noisy independently.

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
        mean, variance = _most_moments(makespans, confidence)
        room = self.deadline_ns / self.iterations - mean
        if room <= 0:
            return 0.0
        return self.iterations * room**2 / (variance + self.iterations * room**2)

    def could_hold_ns(
        self, makespans: NDArray[np.int64], probability: float, confidence: float
    ) -> int:
        """The least deadline for which these replays prove a probability, ns."""
        mean, variance = _most_moments(makespans, confidence)
        room = math.sqrt(variance * probability / (1 - probability) / self.iterations)
        return math.ceil((mean + room) * self.iterations)


def _most_moments(makespans: NDArray[np.int64], confidence: float) -> tuple[float, float]:
    """Upper limits of mean (ns) and variance (ns2), both hold with the confidence."""
    times = makespans.astype(np.float64)
    sure = NormalDist().inv_cdf(1 - (1 - confidence) / 2)
    mean, variance = float(times.mean()), float(times.var(ddof=1))
    fourth = float(((times - mean) ** 4).mean())
    most = mean + sure * math.sqrt(variance / len(times))
    return most, variance + sure * math.sqrt(max(0.0, fourth - variance**2) / len(times))


def robust_plan(
    frontier: Frontier,
    deadline_ns: int,
    target: dict[str, float | str],
    probability: float,
    noise: Noise,
    *,
    run: NoisyRun | None = None,
    latency_ns: int = 0,
    seed: int = 0,
    progress: Progress | None = None,
) -> Plan:
    """The plan of least energy found that ends by a deadline with a probability.

    Args:
        deadline_ns: what it has to hold, not below T_min, ns.
        target: what was asked: `kind` and the number that goes with it.
        probability: above 0, up to MAX_PERCENT / 100.
        run: what has to hold its deadline instead, with iterations that take up to deadline_ns
            where times are exact.
        latency_ns: from a clock request until the clock changes, ns.
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
    make = _LateFamily if latency_ns > 0 else _Family
    family = make(frontier, deadline_ns, noise, seed, latency_ns)
    for attempt in range(_ATTEMPTS):
        confidence = 1 - (1 - CONFIDENCE) / 2 ** (attempt + 1)
        goal = _Goal(deadline_ns, probability, confidence, run)
        options = family.slowest_that_holds(partial(goal.promises, attempt=attempt), progress)
        fresh = seed + 1 + attempt
        makespans = family.makespans(options, noise_draws(len(options), fresh, RUNS))
        robustness = goal.proved(makespans, noise, fresh)
        if robustness.share_at_least >= probability and family.in_time(options):
            plan = family.plan(options, target)
            predicted = plan.predicted.model_copy(update={"robustness": robustness})
            return plan.model_copy(update={"predicted": predicted})
    raise _not_held(family, goal, seed + 1)


@dataclass(frozen=True)
class _Goal:
    """What noisy replays have to prove, of an iteration or of a run."""

    deadline_ns: int
    probability: float
    confidence: float
    run: NoisyRun | None

    def promises(self, makespans: NDArray[np.int64], *, attempt: int) -> bool:
        """Whether the few replays of the search let expect that the proof will succeed."""
        if self.run is not None:
            # With fewer replays the limits are wider: no further margin is needed.
            return self.run.share_at_least(makespans, self.confidence) >= self.probability
        needed = least_held(self.probability, RUNS, self.confidence)
        spread = math.sqrt(self.probability * (1 - self.probability) / _SEARCH_RUNS)
        aim = min(needed / RUNS + (attempt + 1) * spread, 1.0)
        return float((makespans <= self.deadline_ns).mean()) >= aim

    def proved(self, makespans: NDArray[np.int64], noise: Noise, seed: int) -> Robustness:
        """What fresh replays drawn from a seed prove."""
        from envplan.plan import Robustness

        held, share = _proved(makespans, self.deadline_ns, self.confidence, self.run)
        return Robustness(
            probability=self.probability,
            noise=noise.fraction,
            seed=seed,
            runs=len(makespans),
            held_runs=held,
            confidence=self.confidence,
            share_at_least=share,
            iterations=None if self.run is None else self.run.iterations,
        )


def _proved(
    makespans: NDArray[np.int64], deadline_ns: int, confidence: float, run: NoisyRun | None
) -> tuple[int, float]:
    """How many replays end in time, and the probability that they prove."""
    latest_ns = deadline_ns if run is None else run.each_ns
    held = int((makespans <= latest_ns).sum())
    if run is None:
        return held, share_at_least(held, len(makespans), confidence)
    return held, run.share_at_least(makespans, confidence)


class _Family:
    """Plans from the slowest worth having, at 0, by T_min's, at 1, to the fastest of all, at 2."""

    def __init__(
        self, frontier: Frontier, deadline_ns: int, noise: Noise, seed: int, latency_ns: int
    ) -> None:
        from envplan.plan import option_tables

        self.latest_ns = min(deadline_ns, frontier.min_energy_time_ns)
        self._latency_ns = latency_ns
        self._frontier = frontier
        self._noise = noise
        self._tables = option_tables(frontier.pipeline, frontier.profile)
        self._seed = seed
        self._kept: list[NDArray[np.float64]] = []

    def options(self, place: float) -> NDArray[np.int32]:
        """For each operation the row of its option table, (N,)."""
        rounding = self._frontier.rounding_at(self._deadline_at(place))
        if place > 1:
            # Options stand by time, the fastest first.
            rounding.choice[:] = np.floor(rounding.choice * (2 - place))
        return rounding.options

    def plan(self, options: NDArray[np.int32], target: dict[str, float | str]) -> Plan:
        """The plan of such options for what was asked."""
        return self._frontier.priced_plan(options, target, self.latest_ns)

    def in_time(self, options: NDArray[np.int32]) -> bool:
        """Whether they meet the deadline where times are exact; faster ones always do."""
        return True

    def _deadline_at(self, place: float) -> int:
        least = self._frontier.min_time_ns
        return self.latest_ns - round((self.latest_ns - least) * min(place, 1.0))

    def makespans(
        self, options: NDArray[np.int32], draws: Iterable[NDArray[np.float64]]
    ) -> NDArray[np.int64]:
        """Iteration times under noise, (runs,), ns."""
        pipeline, profile = self._frontier.pipeline, self._frontier.profile
        return _replayed(
            pipeline, profile, self._tables, options, self._noise, draws, self._latency_ns
        )

    def slowest_that_holds(
        self, holds: Callable[[NDArray[np.int64]], bool], progress: Progress | None
    ) -> NDArray[np.int32]:
        """Options of the slowest plan found whose iteration times in the draws hold; the fastest,
        where none does."""
        best = self.options(0.0)
        if self.in_time(best) and holds(self._drawn(best)):
            return best
        low, high, best = 0.0, 2.0, self.options(2.0)
        for step in range(_STEPS):
            if progress is not None:
                progress(_STEPS - step, 0)
            middle = (low + high) / 2
            options = self.options(middle)
            if self.in_time(options) and holds(self._drawn(options)):
                high, best = middle, options
            else:
                low = middle
        return best

    def _drawn(self, options: NDArray[np.int32]) -> NDArray[np.int64]:
        draws: Iterable[NDArray[np.float64]] = noise_draws(len(options), self._seed, _SEARCH_RUNS)
        if len(options) * _SEARCH_RUNS <= _KEPT:
            self._kept = self._kept or list(draws)
            draws = self._kept
        return self.makespans(options, draws)


class _LateFamily(_Family):
    """The same where clocks follow late: from the slowest worth having by that of the least time
    which a search finds, at 1, to the fastest choice that it knows, at 2."""

    @cached_property
    def _fastest(self) -> NDArray[np.int32]:
        return self._search(self._frontier.min_time_ns).fastest()

    @cached_property
    def _at_least_time(self) -> NDArray[np.int32]:
        return self._found(self._frontier.min_time_ns)

    def options(self, place: float) -> NDArray[np.int32]:
        """For each operation the row of its option table, (N,)."""
        if place <= 1:
            return self._found(self._deadline_at(place))
        # Rows stand by time, the fastest first.
        start = self._at_least_time
        steps: NDArray[np.int32] = np.floor((self._fastest - start) * (place - 1)).astype(np.int32)
        return start + steps

    def plan(self, options: NDArray[np.int32], target: dict[str, float | str]) -> Plan:
        """The plan of such options for what was asked, as its replay with the latency has it."""
        switching = Switching(self._latency_ns)
        return replayed_plan(self._frontier, options, switching, self.latest_ns, target)

    def in_time(self, options: NDArray[np.int32]) -> bool:
        """Whether they meet the deadline where times are exact."""
        return self._replayed_ns(options) <= self.latest_ns

    def _replayed_ns(self, options: NDArray[np.int32]) -> int:
        from envplan.simulation import price_with_latency

        pipeline, profile = self._frontier.pipeline, self._frontier.profile
        powers = self._frontier.blocking_power_uw
        return price_with_latency(pipeline, profile, options, powers, self._latency_ns).makespan_ns

    def _found(self, deadline_ns: int) -> NDArray[np.int32]:
        """Options found for a deadline; the fastest where none are."""
        try:
            return self._search(deadline_ns).solve()
        except NoPlanInTimeError:
            return self._fastest

    def _search(self, deadline_ns: int) -> SwitchingSearch:
        rounding = self._frontier.rounding_at(deadline_ns)
        switching = Switching(self._latency_ns)
        return SwitchingSearch(self._frontier, rounding, switching, deadline_ns, _MOVES_SHARE)


def _not_held(family: _Family, goal: _Goal, seed: int) -> NoAnswerError:
    """What the fastest plan holds, and what it could."""
    options, probability, run = family.options(2.0), goal.probability, goal.run
    makespans = np.sort(family.makespans(options, noise_draws(len(options), seed, RUNS)))
    if run is not None:
        mean_s = s_from_ns(round(float(makespans.mean())))
        could_ns = run.could_hold_ns(makespans, probability, CONFIDENCE)
        return NoAnswerError(
            f"no plan ends {run.iterations} iterations by {s_from_ns(run.deadline_ns):.9g} s with "
            f"a probability of {100 * probability:g} percent: with every operation as fast as can "
            f"be an iteration takes {mean_s:.9f} s on average of {RUNS} replays; a deadline of "
            f"{s_from_ns(could_ns):.9g} s could be held"
        )
    share = float((makespans <= goal.deadline_ns).mean())
    could_ns = int(makespans[least_held(probability, RUNS, CONFIDENCE) - 1])
    return NoAnswerError(
        f"no plan holds {s_from_ns(goal.deadline_ns):.9f} s with a probability of "
        f"{100 * probability:g} percent: with every operation as fast as can be {100 * share:.2f} "
        f"percent of {RUNS} replays do; {s_from_ns(could_ns):.9f} s could be held"
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
    run = _run_of(plan, stated)
    asked = plan.target.deadline_s if plan.target.time_s is None else plan.target.time_s
    tables = option_tables(pipeline, profile)
    draws = noise_draws(len(options), stated.seed, stated.runs)
    latency_ns = ns_from_s(plan.job.switch_latency_s or 0.0)
    noise = Noise(stated.noise)
    makespans = _replayed(pipeline, profile, tables, options, noise, draws, latency_ns)
    held, proved = _proved(makespans, ns_from_s_floor(asked), stated.confidence, run)
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
    if run is not None:
        return [
            f"by {stated.runs} replays with noise, {run.iterations} iterations end by "
            f"{s_from_ns(run.deadline_ns)!r} s with a probability of at least "
            f"{stated.percent_at_least}, with a confidence of {100 * stated.confidence:g}%"
        ]
    return [
        f"{held} of {stated.runs} replays with noise end by {asked!r} s: a probability of at least "
        f"{stated.percent_at_least}, with a confidence of {100 * stated.confidence:g}%"
    ]


def _run_of(plan: Plan, stated: Robustness) -> NoisyRun | None:
    """The run that a plan is sure to end in time; None where it is one iteration.

    Raises:
        InputError: the plan's costs are of another run.
    """
    if stated.iterations is None:
        return None
    costs = plan.costs
    if costs is None or costs.deadline_s is None or costs.iterations != stated.iterations:
        raise InputError(
            "predicted.robustness.iterations goes with costs of as many iterations and a deadline"
        )
    return NoisyRun(stated.iterations, ns_from_s_floor(costs.deadline_s))
