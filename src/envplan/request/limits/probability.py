"""A plan holds its deadline with a probability though times vary.

A plan is judged by replays with noise whose draws its choice has not seen. The share of them in
time is stated with what it proves: the lower end of its one-sided confidence interval must reach
the probability asked for.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from envplan._io.documents import check_stated
from envplan.errors import InputError
from envplan.replay.noise import (
    CONFIDENCE,
    least_held,
    share_at_least,
    spreads,
    time_factors,
)
from envplan.request.limits.base import Limit, Setting, StatedResults
from envplan.request.limits.robustness import Robustness
from envplan.units import s_from_ns

if TYPE_CHECKING:
    from envplan.replay import Replay

#: Fresh replays that prove a share; so many can prove up to 0.999.
RUNS: Final = 10_000
#: Replays that the search looks at for each candidate; the same draws for all of them.
SEARCH_RUNS: Final = 2_000


class HoldsWithProbability(Limit):
    """An iteration, or a run of them, ends by its deadline with a probability."""

    kind: Literal["probability"] = "probability"
    probability: Annotated[float, Field(gt=0, le=0.999)]
    noise: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None,
        description="standard deviation of times, as a fraction of them; absent: by the profile's "
        "column time_std",
    )
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0

    def makespans(
        self, replay: Replay, setting: Setting, seed: int, runs: int
    ) -> NDArray[np.int64]:
        """Iteration times with noise drawn from a seed, (runs,), ns."""
        problem, rows = replay.problem, replay.rows
        each = spreads(self.noise, problem, setting.profile, rows)
        return np.concatenate(
            [
                problem.makespans(rows, replay.machine, factors)
                for factors in time_factors(each, seed, runs)
            ]
        )

    def excess(self, replay: Replay, setting: Setting, attempt: int = 0) -> int:
        """How many more of SEARCH_RUNS replays would have to be in time; 0: a proof is likely.

        Args:
            attempt: how many proofs have failed so far; each time the search aims higher.
        """
        makespans = self.makespans(replay, setting, self.seed, SEARCH_RUNS)
        confidence = _confidence(attempt)
        if setting.run is not None:
            # With fewer replays the limits are wider: no further margin is needed.
            return int(setting.run.share_at_least(makespans, confidence) < self.probability)
        needed = least_held(self.probability, RUNS, confidence) / RUNS
        spread = math.sqrt(self.probability * (1 - self.probability) / SEARCH_RUNS)
        aim = min(needed + (attempt + 1) * spread, 1.0)
        held = int((makespans <= setting.deadline_ns).sum())
        return max(0, math.ceil(aim * SEARCH_RUNS) - held)

    def evidence(self, replay: Replay, setting: Setting, attempt: int = 0) -> Robustness | None:
        """What fresh replays prove; None where it is not enough.

        Each attempt draws anew and takes half of the risk of error that is left, so that all of
        them together keep to the confidence stated.
        """
        seed = self.seed + 1 + attempt
        shown = self.shown(replay, setting, seed, RUNS, _confidence(attempt))
        return None if shown.share_at_least < self.probability else shown

    def shown(
        self, replay: Replay, setting: Setting, seed: int, runs: int, confidence: float
    ) -> Robustness:
        """What so many replays with noise drawn from a seed show."""
        makespans = self.makespans(replay, setting, seed, runs)
        held, share = proved_share(makespans, setting, confidence)
        return Robustness(
            probability=self.probability,
            noise=self.noise,
            seed=seed,
            runs=runs,
            held_runs=held,
            confidence=confidence,
            share_at_least=share,
            iterations=None if setting.run is None else setting.run.iterations,
        )

    def broken(self, replay: Replay, setting: Setting) -> str:
        """As Limit.broken: what this replay's choice holds, and what it could hold."""
        makespans = np.sort(self.makespans(replay, setting, self.seed + 1, RUNS))
        percent = f"{100 * self.probability:g} percent"
        if setting.run is not None:
            could_ns = setting.run.could_hold_ns(makespans, self.probability, CONFIDENCE)
            mean_s = s_from_ns(round(float(makespans.mean())))
            return (
                f"no plan ends {setting.run.iterations} iterations by "
                f"{s_from_ns(setting.run.deadline_ns):.9g} s with a probability of {percent}: with "
                f"every operation as fast as can be an iteration takes {mean_s:.9f} s on average "
                f"of {RUNS} replays; a deadline of {s_from_ns(could_ns):.9g} s could be held"
            )
        share = float((makespans <= setting.deadline_ns).mean())
        could_ns = int(makespans[least_held(self.probability, RUNS, CONFIDENCE) - 1])
        return (
            f"no plan holds {s_from_ns(setting.deadline_ns):.9f} s with a probability of "
            f"{percent}: with every operation as fast as can be {100 * share:.2f} percent of "
            f"{RUNS} replays do; {s_from_ns(could_ns):.9f} s could be held"
        )

    def prove(self, stated: StatedResults, replay: Replay, setting: Setting) -> str:
        """As Limit.prove: by the replays that the stated robustness names."""
        robustness, name = stated.robustness, "predicted.robustness"
        if robustness is None:
            raise InputError(f"{name} is missing, though a probability was asked for")
        run = None
        if robustness.iterations is not None:
            run = stated.run
            if run is None or run.iterations != robustness.iterations:
                raise InputError(
                    f"{name}.iterations goes with costs of as many iterations and a deadline"
                )
        setting = replace(setting, run=run)
        told = HoldsWithProbability.of(probability=robustness.probability, noise=robustness.noise)
        true = told.shown(replay, setting, robustness.seed, robustness.runs, robustness.confidence)
        held, share = true.held_runs, true.share_at_least
        check_stated(name, robustness, true, 1e-9)
        if share < self.probability:
            raise InputError(
                f"{name}: {held} of {robustness.runs} replays in time prove a probability of "
                f"{share!r}, less than {self.probability!r}"
            )
        sure = (
            f"with a probability of at least {robustness.percent_at_least}, with a confidence of "
            f"{100 * robustness.confidence:g}%"
        )
        if setting.run is not None:
            return (
                f"by {robustness.runs} replays with noise, {setting.run.iterations} iterations "
                f"end by {s_from_ns(setting.run.deadline_ns)!r} s {sure}"
            )
        by = s_from_ns(setting.deadline_ns)
        return f"{held} of {robustness.runs} replays with noise end by {by!r} s: {sure[5:]}"


def proved_share(
    makespans: NDArray[np.int64], setting: Setting, confidence: float
) -> tuple[int, float]:
    """How many replays end in time, and the probability that they prove."""
    run = setting.run
    latest_ns = setting.deadline_ns if run is None else run.each_ns
    held = int((makespans <= latest_ns).sum())
    if run is None:
        return held, share_at_least(held, len(makespans), confidence)
    return held, run.share_at_least(makespans, confidence)


def _confidence(attempt: int) -> float:
    return 1 - (1 - CONFIDENCE) / float(2 ** (attempt + 1))
