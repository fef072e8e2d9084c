"""Conditions under which a plan is replayed: noise, late clocks, and others who finish later."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Annotated, Final, Self, TypedDict

import numpy as np
from pydantic import Field, model_validator

from envplan._io.documents import Model
from envplan.plan import Job
from envplan.replay import Ask, Machine, Replay
from envplan.replay.noise import time_factors
from envplan.request.request import MAX_LATENCY_S
from envplan.units import MAX_INTEGER, ns_from_s, s_from_ns

__all__ = ["PLANNED", "ConditionFields", "Conditions"]

MAX_RUNS: Final = 100_000


class ConditionFields(TypedDict, total=False):
    """The fields of Conditions, as keyword arguments."""

    noise: float
    seed: int
    switch_latency: float | None
    ask: Ask | None
    runs: int
    sync_time: float | None


class Conditions(Model):
    """Conditions that a plan meets when it is replayed, besides those that it was made for.

    Attributes:
        noise: standard deviation of times, as a fraction of them, 0 to 1.
        seed: of the noise, not negative; the same seed gives the same runs.
        switch_latency: s from a clock request until the clock changes, up to 3600; None: that which
            the plan was made for, 0 if it does not say.
        ask: whether clocks are asked for "ahead", or as operations "start"; None: as the plan was
            made for; ahead where it was made for clocks that come at once.
        runs: how many times to replay with other noise, 1 to 100000.
        sync_time: s; when the iteration is over for everybody, if that is later than for this
            plan: its GPUs wait until then. In noisy runs, too.
    """

    noise: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: Annotated[int, Field(ge=0)] = 0
    switch_latency: Annotated[float, Field(ge=0, le=MAX_LATENCY_S)] | None = None
    ask: Ask | None = None
    runs: Annotated[int, Field(ge=1, le=MAX_RUNS)] = 1
    sync_time: Annotated[float, Field(ge=0, le=s_from_ns(MAX_INTEGER))] | None = None

    @model_validator(mode="after")
    def _runs_differ(self) -> Self:
        if self.runs > 1 and self.noise == 0:
            raise ValueError(f"without noise all {self.runs} runs are the same; give a noise")
        return self

    @property
    def sync_ns(self) -> int:
        """sync_time in whole ns; 0 without one."""
        return ns_from_s(self.sync_time or 0.0)

    def machine(self, job: Job) -> Machine:
        """How the clocks of a job follow requests."""
        planned = job.machine
        latency_ns = planned.latency_ns
        if self.switch_latency is not None:
            latency_ns = ns_from_s(self.switch_latency)
        return Machine.of(latency_ns, self.ask or planned.ask)

    def replays(self, exact: Replay) -> Iterator[Replay]:
        """An exact replay under noise, run by run; without noise the exact one itself."""
        if self.noise == 0:
            yield exact
            return
        spreads = np.full(len(exact.rows), self.noise)
        for factors in chain.from_iterable(time_factors(spreads, self.seed, self.runs)):
            yield exact.problem.replay(exact.rows, exact.machine, factors)


#: The plan's own conditions.
PLANNED: Final = Conditions()
