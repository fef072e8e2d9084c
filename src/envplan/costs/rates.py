"""The price or the carbon of a kilowatt-hour: fixed, or a step function of time."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate, pairwise
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
        repeats: after its end the rate begins again.
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
        return self.per_kwh[0] if self.end_s is None else self._within(self.end_s) / self._period_s

    def integral(self, seconds: float) -> float:
        """The integral over the first `seconds` of the run, units per kWh times s."""
        return self._until(self.start_s + seconds) - self._until(self.start_s)

    def _until(self, clock_s: float) -> float:
        """The integral from the first begin to a time on the rate's own clock."""
        if not self.repeats or self.end_s is None:
            return self._within(clock_s)
        rounds = math.floor((clock_s - self.begins_s[0]) / self._period_s)
        return rounds * self._within(self.end_s) + self._within(clock_s - rounds * self._period_s)

    def _within(self, clock_s: float) -> float:
        """The same within the first round."""
        step = max(0, bisect_right(self.begins_s, clock_s) - 1)
        return self._sums[step] + self.per_kwh[step] * (clock_s - self.begins_s[step])

    @cached_property
    def _sums(self) -> list[float]:
        """The integral from the first begin to each."""
        lengths = (later - earlier for earlier, later in pairwise(self.begins_s))
        areas = (value * length for value, length in zip(self.per_kwh, lengths, strict=False))
        return list(accumulate(areas, initial=0.0))

    @property
    def _period_s(self) -> float:
        return (self.end_s or 0.0) - self.begins_s[0]

    def at(self, seconds: float) -> float:
        """The value that holds at a time of the run, s since its start."""
        clock_s = self.start_s + seconds
        if self.repeats and self.end_s is not None:
            clock_s = self.begins_s[0] + (clock_s - self.begins_s[0]) % self._period_s
        return self.per_kwh[max(0, bisect_right(self.begins_s, clock_s) - 1)]

    def changes(self, since: float, until: float) -> Iterator[float]:
        """The times at which the rate changes, s since the run's start.

        Args:
            since: they lie strictly after this time, s since the run's start.
            until: and strictly before this one.
        """
        first_round = last_round = 0
        if self.repeats:
            offset = self.begins_s[0] - self.start_s
            first_round = math.floor((since - offset) / self._period_s)
            last_round = math.floor((until - offset) / self._period_s)
        for rounds in range(first_round, last_round + 1):
            shift = rounds * self._period_s - self.start_s
            for begin in self.begins_s:
                if since < begin + shift < until:
                    yield begin + shift
