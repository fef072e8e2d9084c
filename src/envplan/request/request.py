"""What is wanted of a plan: one frozen value that every way of asking carries.

The command line, a sweep, `refine`, the Python API and plan.json all hold a Request, so a plan can
be made again from its own file.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import Field, model_validator

from envplan._io.documents import Model
from envplan.costs.model import Run
from envplan.errors import InputError
from envplan.request.limits import (
    AnyLimit,
    AveragePower,
    EnergyBudget,
    HoldsWithProbability,
    Limit,
    MinHold,
    PeakPower,
)
from envplan.units import ns_from_s, ns_from_s_floor

__all__ = ["MAX_SECONDS", "Deadline", "Effort", "Request"]

#: Longest time, and longest switch latency, that can be asked for, s.
MAX_SECONDS: Final = 1e9
MAX_LATENCY_S: Final = 3600.0

Seconds = Annotated[float, Field(ge=0, le=MAX_SECONDS)]
AskedLimit = TypeVar("AskedLimit", bound=Limit)
#: What `Request.asking` calls a deadline, and its kind.
_KINDS: Final = {
    "target_time": "time",
    "slowdown": "slowdown",
    "min_energy": "min-energy",
    "sync_time": "sync-time",
    "the run's deadline": "any",
}


class Deadline(Model):
    """When an iteration must be over.

    `no-slowdown`: at T_min. `time`: by time_s. `slowdown`: at most that fraction above T_min.
    `min-energy`: at T_star. `sync-time`: at time_s everybody has waited, so what is used until
    then is to be least. `any`: whenever the objective wants it.
    """

    kind: Literal["no-slowdown", "time", "slowdown", "min-energy", "sync-time", "any"]
    time_s: Seconds | None = None
    slowdown: Annotated[float, Field(ge=0, le=1e6)] | None = Field(
        None, description="fraction of T_min"
    )

    @model_validator(mode="after")
    def _has_its_number(self) -> Self:
        if (self.kind in ("time", "sync-time")) != (self.time_s is not None):
            raise ValueError(f"time_s goes with kind time or sync-time, not {self.kind}")
        if (self.kind == "slowdown") != (self.slowdown is not None):
            raise ValueError("slowdown goes with kind slowdown")
        return self

    def asked_ns(self, least_ns: int) -> int | None:
        """By when an iteration must be over where T_min is so many ns; None: at T_star."""
        if self.kind == "min-energy":
            return None
        if self.time_s is not None:
            return ns_from_s_floor(self.time_s)
        return least_ns + int(least_ns * (self.slowdown or 0.0))


class Effort(Model):
    """How much is done for a plan."""

    polish_s: Annotated[float, Field(ge=0, le=1e6)] = Field(
        0.0, description="seconds of further search, by CP-SAT where it can say the question"
    )
    moves: Annotated[float, Field(gt=0, le=100)] = Field(
        1.0, description="share of the usual moves of the search"
    )
    ladder: Annotated[int, Field(ge=0, le=10_000)] = Field(
        0, description="slower plans to carry along for stragglers, at most"
    )


class Request(Model):
    """What is wanted.

    Attributes:
        objective: what is least: `energy`; `time`, for the fastest that keeps all limits; `cost`,
            for the cheapest run.
        deadline: when an iteration must be over.
        straggler_time_s: some replica takes that long anyway, so the time until then may be used.
        switch_latency_s: from a clock request until the clock changes.
        limits: what the plan keeps besides its deadline.
        run: whose costs are wanted; with a deadline of its own, what is to be cheapest.
        effort: how much is done.
    """

    objective: Literal["energy", "time", "cost"] = "energy"
    deadline: Deadline = Deadline(kind="no-slowdown")
    straggler_time_s: Seconds | None = None
    switch_latency_s: Annotated[float, Field(ge=0, le=MAX_LATENCY_S)] = 0.0
    limits: Annotated[tuple[AnyLimit, ...], Field(strict=False)] = ()
    run: Run | None = None
    effort: Effort = Effort()

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        kinds = [limit.kind for limit in self.limits]
        if len(set(kinds)) < len(kinds):
            raise ValueError("a limit of each kind can be given once")
        if self.objective == "cost" and (self.run is None or self.run.deadline_s is None):
            raise ValueError("the cheapest run needs a deadline (--deadline)")
        return self

    @classmethod
    def asking(
        cls,
        target_time: float | None = None,
        *,
        slowdown: float | None = None,
        min_energy: bool = False,
        sync_time: float | None = None,
        straggler_time: float | None = None,
        energy_budget: float | None = None,
        power_cap: float | None = None,
        peak_power_cap: float | None = None,
        probability: float | None = None,
        noise: float | None = None,
        seed: int = 0,
        switch_latency: float = 0.0,
        min_hold: float = 0.0,
        run: Run | None = None,
        polish: float = 0.0,
        moves: float = 1.0,
        ladder: int = 0,
    ) -> Self:
        """A request in the words of the command line and of `Frontier.plan`.

        Args:
            target_time: least energy with an iteration of at most so many s.
            slowdown: instead, at most that fraction above T_min.
            min_energy: instead, least energy of all, at T_star.
            sync_time: instead, least energy until so many s, when everybody has waited.
                Without one of these: no slowdown; with a budget or a cap, the fastest that keeps
                it; with a run that has a deadline, the cheapest.
            straggler_time: s, as for Request.
            energy_budget: J of an iteration over all GPUs.
            power_cap: W over all GPUs on average.
            peak_power_cap: W over all GPUs at any moment.
            probability: of the deadline being held though times vary, up to 0.999.
            noise: standard deviation of times as a fraction of them; None: by the profile.
            seed: of the draws.
            switch_latency: s from a clock request until the clock changes.
            min_hold: least s between two requests of a stage for another clock.
            run: as for Request.
            polish, moves, ladder: as for Effort.

        Raises:
            InputError: two deadlines are given, or a number is out of range.
        """
        own = None if run is None else run.deadline_s
        deadlines = (target_time, slowdown, min_energy or None, sync_time, own)
        given = [name for name, one in zip(_KINDS, deadlines, strict=True) if one is not None]
        if len(given) > 1:
            raise InputError(f"{given[0]} and {given[1]} exclude each other; give one of them")
        if noise is not None and probability is None:
            raise InputError("noise goes with a probability (--robust PCT)")
        limits: list[Limit] = [
            kind.of(**{field: _float(value)} | more)
            for kind, field, value, more in (
                (MinHold, "time_s", min_hold or None, {}),
                (PeakPower, "power_w", peak_power_cap, {}),
                (AveragePower, "power_w", power_cap, {}),
                (EnergyBudget, "energy_j", energy_budget, {}),
                (HoldsWithProbability, "probability", probability, {"noise": noise, "seed": seed}),
            )
            if value is not None
        ]
        fastest = any(one is not None for one in (energy_budget, power_cap, peak_power_cap))
        objective, kind = "energy", _KINDS.get("".join(given), "no-slowdown")
        if kind == "any":
            objective = "cost"
        elif not given and straggler_time is None and fastest:
            objective, kind = "time", "any"
        return cls.of(
            objective=objective,
            deadline=Deadline.of(
                kind=kind,
                time_s=_float(sync_time if target_time is None else target_time),
                slowdown=_float(slowdown),
            ),
            straggler_time_s=_float(straggler_time),
            switch_latency_s=_float(switch_latency),
            limits=tuple(limits),
            run=run,
            effort=Effort.of(polish_s=_float(polish), moves=_float(moves), ladder=ladder),
        )

    def by(self, time_s: float, *, waits: bool = False) -> Self:
        """The same for an iteration of at most so many s, or, where everybody `waits`, for what is
        used until then."""
        deadline = Deadline.of(kind="sync-time" if waits else "time", time_s=time_s)
        asked = {"objective": "energy", "deadline": deadline, "straggler_time_s": None}
        return self.model_copy(update=asked)

    @property
    def latency_ns(self) -> int:
        """ns from a clock request until the clock changes."""
        return ns_from_s(self.switch_latency_s)

    def limit(self, kind: type[AskedLimit]) -> AskedLimit | None:
        """The limit of a kind; None where there is none."""
        return next((limit for limit in self.limits if isinstance(limit, kind)), None)


def _float(value: Any) -> Any:
    """A number as a float; anything else as it is, for the value that holds it to refuse."""
    with suppress(TypeError, ValueError):
        return float(value)
    return value
