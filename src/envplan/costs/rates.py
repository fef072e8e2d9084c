"""The price or the carbon of a kilowatt-hour: fixed, or a step function of time."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from envplan._io.documents import Model

MAX_RATE_ROWS: Final = 100_000
MAX_PER_KWH: Final = 1e9

Kind = Literal["price", "carbon", "power"]
ClockSeconds = Annotated[float, Field(ge=-1e12, le=1e12)]
PerKwh = Annotated[float, Field(ge=-MAX_PER_KWH, le=MAX_PER_KWH)]


class Rate(Model):
    """The price or the carbon of a kWh, as a step function of time.

    Attributes:
        begins_s: when each value begins to hold, s on the rate's own clock, ascending.
        per_kwh: the values, currency units or gCO2 per kWh, as many.
        end_s: when the last value ceases to hold; None: never.
        start_s: when the run starts, on the same clock.
        repeats: after its end the rate begins again; its times up to there are a round.
        file: where it was read; None for a fixed rate.
    """

    begins_s: list[ClockSeconds] = Field(min_length=1, max_length=MAX_RATE_ROWS)
    per_kwh: list[PerKwh] = Field(min_length=1, max_length=MAX_RATE_ROWS)
    end_s: ClockSeconds | None = None
    start_s: ClockSeconds = 0.0
    repeats: bool = False
    file: str | None = None

    @model_validator(mode="after")
    def _is_a_step_function(self) -> Self:
        bounds = [*self.begins_s, math.inf if self.end_s is None else self.end_s]
        if len(self.begins_s) != len(self.per_kwh):
            raise ValueError("begins_s and per_kwh should be of one length")
        if any(later <= earlier for earlier, later in pairwise(bounds)):
            raise ValueError("begins_s and then end_s should ascend")
        if self.end_s is None and len(self.begins_s) > 1:
            raise ValueError("end_s should say when the last value ends")
        if not bounds[0] <= self.start_s < bounds[-1]:
            raise ValueError("start_s should lie where the rate is known")
        return self

    @classmethod
    def fixed(cls, per_kwh: float) -> Self:
        """The same rate at all times."""
        return cls(begins_s=[0.0], per_kwh=[per_kwh])

    @property
    def is_fixed(self) -> bool:
        """Whether it is the same at all times."""
        return self.end_s is None

    @property
    def lasts_s(self) -> float:
        """How long a run can be before nothing is known any more, s."""
        if self.end_s is None or self.repeats:
            return math.inf
        return self.end_s - self.start_s

    @property
    def mean(self) -> float:
        """The average over the whole file, per kWh."""
        if self.end_s is None:
            return self.per_kwh[0]
        return self._integral_in_first_round(self.end_s) / self._period_s

    def integral(self, seconds: float) -> float:
        """The integral over the first `seconds` of the run, units per kWh times s."""
        return self._integral_until(self.start_s + seconds) - self._integral_until(self.start_s)

    def _integral_until(self, clock_s: float) -> float:
        """The integral from the first begin to a time on the rate's own clock."""
        if not self.repeats or self.end_s is None:
            return self._integral_in_first_round(clock_s)
        num_rounds = math.floor((clock_s - self.begins_s[0]) / self._period_s)
        whole_rounds = num_rounds * self._integral_in_first_round(self.end_s)
        return whole_rounds + self._integral_in_first_round(clock_s - num_rounds * self._period_s)

    def _integral_in_first_round(self, clock_s: float) -> float:
        """The same, for a time before the rate begins again."""
        step = self._step_at(clock_s)
        since_begin_s = clock_s - self.begins_s[step]
        return self._integrals_at_begins[step] + self.per_kwh[step] * since_begin_s

    @cached_property
    def _integrals_at_begins(self) -> list[float]:
        """The integral from the first begin to each begin."""
        integrals = [0.0]
        for per_kwh, (begin_s, end_s) in zip(self.per_kwh, pairwise(self.begins_s), strict=False):
            integrals.append(integrals[-1] + per_kwh * (end_s - begin_s))
        return integrals

    def _step_at(self, clock_s: float) -> int:
        """The index of the value that holds at a time; the first one where all begin later."""
        return max(0, bisect_right(self.begins_s, clock_s) - 1)

    @property
    def _period_s(self) -> float:
        """The length of a round; only of a rate that ends."""
        return (self.end_s or 0.0) - self.begins_s[0]

    def at(self, seconds: float) -> float:
        """The value that holds at a time of the run, s since its start."""
        clock_s = self.start_s + seconds
        if self.repeats and self.end_s is not None:
            clock_s = self.begins_s[0] + (clock_s - self.begins_s[0]) % self._period_s
        return self.per_kwh[self._step_at(clock_s)]

    def changes(self, since: float, until: float) -> Iterator[float]:
        """The times at which the rate changes, s since the run's start.

        Args:
            since: they lie strictly after this time, s since the run's start.
            until: and strictly before this one.
        """
        first_round = last_round = 0
        if self.repeats and self.end_s is not None:
            first_begin_s = self.begins_s[0] - self.start_s
            first_round = math.floor((since - first_begin_s) / self._period_s)
            last_round = math.floor((until - first_begin_s) / self._period_s)
        for round_number in range(first_round, last_round + 1):
            shift_s = round_number * self._period_s - self.start_s
            for begin_s in self.begins_s:
                change_s = begin_s + shift_s
                if since < change_s < until:
                    yield change_s
