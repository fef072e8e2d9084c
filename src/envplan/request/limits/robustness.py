"""How sure a plan holds its deadline though times vary: what was drawn, and what that proves."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field

from envplan._io.documents import Model
from envplan.costs.model import Iterations


class Robustness(Model):
    """How sure it is that a plan holds its target under noise.

    Each operation's time is multiplied by a lognormal factor of its own with mean 1.
    """

    probability: Annotated[float, Field(gt=0, lt=1)] = Field(description="asked for")
    noise: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None,
        description="standard deviation of times, as a fraction of them; absent: by the profile's "
        "column time_std",
    )
    seed: Annotated[int, Field(ge=0, lt=2**31)]
    runs: Annotated[int, Field(ge=1, le=10**6)] = Field(
        description="replays with noise drawn from the seed"
    )
    held_runs: Annotated[int, Field(ge=0, lt=2**31)] = Field(
        description="those of them that ended by the target"
    )
    confidence: Annotated[float, Field(gt=0, lt=1)]
    share_at_least: Annotated[float, Field(ge=0, le=1)] = Field(
        description="the probability that this proves with the confidence (Clopper and Pearson; of "
        "a run by Cantelli's inequality)"
    )
    iterations: Iterations | None = Field(
        None,
        description="what is sure to be over by the deadline under costs is a run of so many; "
        "absent: one iteration by the target",
    )

    @property
    def percent_at_least(self) -> str:
        """share_at_least in percent, rounded down."""
        return f"{math.floor(1e4 * self.share_at_least) / 100:.2f}%"
