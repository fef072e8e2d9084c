"""A plan holds its deadline with a probability though times vary.

A plan is judged by replays with noise whose draws its choice has not seen. The share of them in
time is stated with what it proves: the lower end of its one-sided confidence interval must reach
the probability asked for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from envplan._io.documents import check_stated
from envplan.errors import InputError
from envplan.quantities import PERCENT, WHOLE
from envplan.replay.noise import (
    CONFIDENCE,
    NoisyRun,
    clopper_pearson_lower,
    fewest_successes,
    spreads,
    time_factors,
)
from envplan.request.limits.base import (
    Limit,
    LimitContext,
    LimitOption,
    StatedResults,
    SweepKey,
)
from envplan.request.limits.robustness import Robustness
from envplan.units import s_from_ns

if TYPE_CHECKING:
    from envplan.frontier import Relaxation
    from envplan.replay import Replay

#: Fresh replays that prove a share; so many can prove up to 0.999.
RUNS: Final = 10_000
#: Seeds begin anew after the last.
_SEEDS: Final = 2**31
#: Replays that the search looks at for each candidate; the same draws for all of them.
SEARCH_RUNS: Final = 2_000


class HoldsWithProbability(Limit):
    """An iteration, or a run of them, ends by its deadline with a probability.

    A violation is in replays that would have to be in time and are not.
    """

    options: ClassVar = (
        LimitOption(
            field="probability",
            keyword="probability",
            flag="robust",
            quantity=PERCENT.within(0.001, 99.9),
            divisor=100,
            metavar="PCT",
            help="Hold the target with a probability of PCT percent, though times vary.",
            panel="Noise",
            sweep=SweepKey(column_suffix="_percent", divisor=100, phrase="{:g}% sure"),
        ),
        LimitOption(
            field="noise",
            keyword="noise",
            flag="noise",
            quantity=PERCENT.within(0, 100),
            divisor=100,
            metavar="PCT",
            help="Standard deviation of times; with --robust, default: the profile's column "
            "time_std.",
            panel="Noise",
        ),
        LimitOption(field="seed", keyword="seed", quantity=WHOLE),
    )
    kept_by_sooner_ends: ClassVar = True

    kind: Literal["probability"] = "probability"
    probability: Annotated[float, Field(gt=0, le=0.999)]
    noise: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None,
        description="standard deviation of times, as a fraction of them; absent: by the profile's "
        "column time_std",
    )
    seed: Annotated[int, Field(ge=0, lt=_SEEDS)] = 0

    def makespans(
        self, replay: Replay, context: LimitContext, seed: int, runs: int
    ) -> NDArray[np.int64]:
        """Iteration times with noise drawn from a seed, (runs,), ns."""
        problem, choice = replay.problem, replay.rows
        deviations = spreads(self.noise, problem, context.profile, choice)
        return np.concatenate(
            [
                problem.makespans(choice, replay.machine, factors)
                for factors in time_factors(deviations, seed, runs)
            ]
        )

    def violation(self, replay: Replay, context: LimitContext, *, attempt: int = 0) -> int:
        """How many more of SEARCH_RUNS replays would have to be in time; 0: a proof is likely.

        Args:
            replay: of a plan.
            context: its deadline, or its run.
            attempt: how many proofs have failed so far; each time the search aims higher.
        """
        makespans = self.makespans(replay, context, self.seed, SEARCH_RUNS)
        confidence = _confidence(attempt)
        if context.run is not None:
            # With fewer replays the limits are wider: no further margin is needed.
            return int(context.run.cantelli_lower(makespans, confidence) < self.probability)
        needed = fewest_successes(self.probability, RUNS, confidence) / RUNS
        spread = math.sqrt(self.probability * (1 - self.probability) / SEARCH_RUNS)
        aim = min(needed + (attempt + 1) * spread, 1.0)
        held_runs = int((makespans <= context.deadline_ns).sum())
        return max(0, math.ceil(aim * SEARCH_RUNS) - held_runs)

    def certify(
        self, replay: Replay, context: LimitContext, *, attempt: int = 0
    ) -> Robustness | None:
        """The proof by fresh replays; None where it is not enough.

        Each attempt draws anew and takes half of the risk of error that is left, so that all of
        them together keep to the confidence stated.
        """
        seed = self._proof_seed(attempt)
        robustness = self.measure(replay, context, seed, RUNS, confidence=_confidence(attempt))
        return None if robustness.share_at_least < self.probability else robustness

    def measure(
        self, replay: Replay, context: LimitContext, seed: int, runs: int, *, confidence: float
    ) -> Robustness:
        """The result of so many replays with noise drawn from a seed."""
        makespans = self.makespans(replay, context, seed, runs)
        held_runs, share = proved_share(makespans, context, confidence)
        return Robustness(
            probability=self.probability,
            noise=self.noise,
            seed=seed,
            runs=runs,
            held_runs=held_runs,
            confidence=confidence,
            share_at_least=share,
            iterations=None if context.run is None else context.run.iterations,
        )

    def share(self, kind: Relaxation, kinds: Sequence[Relaxation]) -> Self:
        # All are in time if each is, and their times vary independently.
        return self.model_copy(update={"probability": self.probability ** (1 / len(kinds))})

    def explain_violation(self, replay: Replay, context: LimitContext) -> str:
        """How often the fastest choice is in time, and by when it would be often enough."""
        makespans = np.sort(self.makespans(replay, context, self._proof_seed(0), RUNS))
        percent = f"{100 * self.probability:g} percent"
        if context.run is not None:
            could_ns = context.run.provable_deadline_ns(makespans, self.probability, CONFIDENCE)
            mean_s = s_from_ns(round(float(makespans.mean())))
            return (
                f"no plan ends {context.run.iterations} iterations by "
                f"{s_from_ns(context.run.deadline_ns):.9g} s with a probability of {percent}: with "
                f"every operation as fast as can be an iteration takes {mean_s:.9f} s on average "
                f"of {RUNS} replays; a deadline of {s_from_ns(could_ns):.9g} s could be held"
            )
        share = float((makespans <= context.deadline_ns).mean())
        could_ns = int(makespans[fewest_successes(self.probability, RUNS, CONFIDENCE) - 1])
        return (
            f"no plan holds {s_from_ns(context.deadline_ns):.9f} s with a probability of "
            f"{percent}: with every operation as fast as can be {100 * share:.2f} percent of "
            f"{RUNS} replays do; {s_from_ns(could_ns):.9f} s could be held"
        )

    def prove(self, stated: StatedResults, replay: Replay, context: LimitContext) -> str:
        """By the replays that the stated robustness names; as Limit.prove."""
        robustness, name = stated.robustness, "predicted.robustness"
        if robustness is None:
            raise InputError(f"{name} is missing, though a probability was asked for")
        context = replace(context, run=_run_of(stated, robustness))
        measured = self.measure(
            replay, context, robustness.seed, robustness.runs, confidence=robustness.confidence
        )
        check_stated(name, robustness, measured, 1e-9)
        if measured.share_at_least < self.probability:
            raise InputError(
                f"{name}: {measured.held_runs} of {robustness.runs} replays in time prove a "
                f"probability of {measured.share_at_least!r}, less than {self.probability!r}"
            )
        return self.explain_kept(stated, replay, context)

    def explain_kept(self, stated: StatedResults, replay: Replay, context: LimitContext) -> str:
        robustness = stated.robustness
        assert robustness is not None
        probability = (
            f"a probability of at least {robustness.percent_at_least}, with a confidence of "
            f"{100 * robustness.confidence:g}%"
        )
        if context.run is not None:
            return (
                f"by {robustness.runs} replays with noise, {context.run.iterations} iterations "
                f"end by {s_from_ns(context.run.deadline_ns)!r} s with {probability}"
            )
        return (
            f"{robustness.held_runs} of {robustness.runs} replays with noise end by "
            f"{s_from_ns(context.deadline_ns)!r} s: {probability}"
        )

    def _proof_seed(self, attempt: int) -> int:
        """The seed of fresh draws for a proof; the search's own is `seed`."""
        return (self.seed + 1 + attempt) % _SEEDS


def _run_of(stated: StatedResults, robustness: Robustness) -> NoisyRun | None:
    """The run that a stated robustness is about; None where it is about one iteration.

    Raises:
        InputError: the plan states no such run.
    """
    if robustness.iterations is None:
        return None
    run = stated.run
    if run is None or run.iterations != robustness.iterations:
        raise InputError(
            "predicted.robustness.iterations goes with costs of as many iterations and a deadline"
        )
    return run


def proved_share(
    makespans: NDArray[np.int64], context: LimitContext, confidence: float
) -> tuple[int, float]:
    """How many replays end in time, and the probability that they prove."""
    run = context.run
    latest_ns = context.deadline_ns if run is None else run.iteration_deadline_ns
    held_runs = int((makespans <= latest_ns).sum())
    if run is None:
        return held_runs, clopper_pearson_lower(held_runs, len(makespans), confidence)
    return held_runs, run.cantelli_lower(makespans, confidence)


def _confidence(attempt: int) -> float:
    """The confidence of each attempt at a proof, so that all together keep to CONFIDENCE."""
    return 1 - (1 - CONFIDENCE) / float(2 ** (attempt + 1))
