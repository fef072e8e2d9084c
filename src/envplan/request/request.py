"""The request for a plan: one frozen value that every way of asking carries.

The command line, a sweep, `refine`, the Python API and plan.json all hold a Request, so a plan can
be made again from its own file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal, Self, TypeVar

from pydantic import Field, model_validator

from envplan._io.documents import Model
from envplan.costs.model import Run
from envplan.errors import InputError
from envplan.replay import Ask, Machine
from envplan.request.limits import LIMIT_OPTIONS, LIMITS, AnyLimit, Limit
from envplan.request.limits.base import as_float
from envplan.units import ns_from_s, ns_from_s_floor

__all__ = ["MAX_SECONDS", "Deadline", "Effort", "Request"]

#: Longest time, and longest switch latency, that can be asked for, s.
MAX_SECONDS: Final = 1e9
MAX_LATENCY_S: Final = 3600.0
#: Most that a change of clock may cost, J.
MAX_CHANGE_J: Final = 1000.0

Seconds = Annotated[float, Field(ge=0, le=MAX_SECONDS)]
Objective = Literal["energy", "time", "cost"]
ChangePolicy = Literal["fewest", "free"]
DeadlineKind = Literal["no-slowdown", "time", "slowdown", "min-energy", "sync-time", "any"]
SomeLimit = TypeVar("SomeLimit", bound=Limit)
#: The kind of each deadline that `Request.from_options` takes.
_DEADLINE_KINDS: Final[dict[str, DeadlineKind]] = {
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

    kind: DeadlineKind
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

    def resolve_ns(self, t_min_ns: int) -> int | None:
        """By when an iteration must be over, ns; None: whatever T_star is.

        Args:
            t_min_ns: T_min, ns.
        """
        if self.kind == "min-energy":
            return None
        if self.time_s is not None:
            return ns_from_s_floor(self.time_s)
        return t_min_ns + int(t_min_ns * (self.slowdown or 0.0))


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
    """The request for a plan.

    Attributes:
        objective: what is least: `energy`; `time`, for the fastest that keeps all limits; `cost`,
            for the cheapest run.
        deadline: when an iteration must be over.
        straggler_time_s: some replica takes that long anyway, so the time until then may be used.
        switch_latency_s: from a clock request until the clock changes.
        ask: where clocks come late, whether they are asked for so much `ahead`, or as operations
            `start`. None: as operations start, as all plans did whose files do not say.
        limits: what the plan keeps besides its deadline.
        run: whose costs are wanted; with a deadline of its own, what is to be cheapest.
        effort: how much is done.
        changes: of clocks: `fewest`, as few as can be for 0.1% of energy; `free`, as many as it
            takes.
        change_cost_j: what a change costs, J of one GPU; above 0 it counts in place of `changes`.
        change_stall_s: for how long a change stops its GPU, s; likewise.
    """

    objective: Objective = "energy"
    deadline: Deadline = Deadline(kind="no-slowdown")
    straggler_time_s: Seconds | None = None
    switch_latency_s: Annotated[float, Field(ge=0, le=MAX_LATENCY_S)] = 0.0
    ask: Ask | None = None
    limits: Annotated[tuple[AnyLimit, ...], Field(strict=False)] = ()
    run: Run | None = None
    effort: Effort = Effort()
    changes: ChangePolicy = "fewest"
    change_cost_j: Annotated[float, Field(ge=0, le=MAX_CHANGE_J)] = 0.0
    change_stall_s: Annotated[float, Field(ge=0, le=MAX_LATENCY_S)] = 0.0

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        kinds = [limit.kind for limit in self.limits]
        if len(set(kinds)) < len(kinds):
            raise ValueError("a limit of each kind can be given once")
        if self.objective == "cost" and (self.run is None or self.run.deadline_s is None):
            raise ValueError("the cheapest run needs a deadline (--deadline)")
        return self

    @classmethod
    def from_options(
        cls,
        target_time: float | None = None,
        *,
        slowdown: float | None = None,
        min_energy: bool = False,
        sync_time: float | None = None,
        straggler_time: float | None = None,
        switch_latency: float = 0.0,
        ask: Ask = "ahead",
        run: Run | None = None,
        polish: float = 0.0,
        moves: float = 1.0,
        ladder: int = 0,
        changes: ChangePolicy = "fewest",
        change_cost: float = 0.0,
        change_stall: float = 0.0,
        **limit_options: float | None,
    ) -> Self:
        """A request in the words of the command line and of `Frontier.plan`.

        Args:
            target_time: least energy with an iteration of at most so many s.
            slowdown: instead, at most that fraction above T_min.
            min_energy: instead, least energy of all, at T_star.
            sync_time: instead, least energy until so many s, when everybody has waited.
                Without one of these: no slowdown; with a limit that asks for the fastest plan, the
                fastest that keeps it; with a run that has a deadline, the cheapest.
            straggler_time: s, as for Request.
            switch_latency: s from a clock request until the clock changes.
            ask: where clocks come late, whether they are asked for "ahead", or at the "start" of
                the operations that want them.
            run: as for Request.
            polish: as polish_s of Effort.
            moves: as for Effort.
            ladder: as for Effort.
            changes: as for Request.
            change_cost: J of one GPU, as for Request.
            change_stall: s, as for Request.
            limit_options: the keywords of all limits (`envplan.request.limits.LIMIT_OPTIONS`), such
                as energy_budget (J), power_cap, peak_power_cap (W), min_dwell (s), probability.

        Raises:
            InputError: two deadlines are given, or a number is out of range.
            TypeError: there is no such keyword.
        """
        chosen = _chosen_deadline(target_time, slowdown, min_energy, sync_time, run)
        limits = limits_from_options(limit_options)
        objective: Objective = "energy"
        kind = "no-slowdown" if chosen is None else _DEADLINE_KINDS[chosen]
        if kind == "any":
            objective = "cost"
        elif chosen is None and straggler_time is None and any(map(_asks_for_fastest, limits)):
            objective, kind = "time", "any"
        return cls.of(
            objective=objective,
            deadline=Deadline.of(
                kind=kind,
                time_s=as_float(sync_time if target_time is None else target_time),
                slowdown=as_float(slowdown),
            ),
            straggler_time_s=as_float(straggler_time),
            switch_latency_s=as_float(switch_latency),
            ask=ask if switch_latency else None,
            limits=limits,
            run=run,
            effort=Effort.of(polish_s=as_float(polish), moves=as_float(moves), ladder=ladder),
            changes=changes,
            change_cost_j=as_float(change_cost),
            change_stall_s=as_float(change_stall),
        )

    def with_deadline(self, time_s: float, *, waits: bool = False) -> Self:
        """The same request for another deadline.

        Args:
            time_s: by when an iteration must be over, s.
            waits: everybody waits until then, so what is used until then is to be least.
        """
        deadline = Deadline.of(kind="sync-time" if waits else "time", time_s=time_s)
        changed = {"objective": "energy", "deadline": deadline, "straggler_time_s": None}
        return self.model_copy(update=changed)

    @property
    def latency_ns(self) -> int:
        """From a clock request until the clock changes, ns."""
        return ns_from_s(self.switch_latency_s)

    @property
    def machine(self) -> Machine:
        """How clocks follow requests."""
        return Machine.of(self.latency_ns, self.ask)

    @property
    def sync_ns(self) -> int:
        """Until when everybody waits, for a straggler or for other replicas, ns; 0: nobody does."""
        sync_s = self.straggler_time_s
        if self.deadline.kind == "sync-time":
            sync_s = self.deadline.time_s
        return 0 if sync_s is None else ns_from_s_floor(sync_s)

    def limit(self, kind: type[SomeLimit]) -> SomeLimit | None:
        """The limit of a kind; None where there is none."""
        return next((limit for limit in self.limits if isinstance(limit, kind)), None)


def limits_from_options(options: Mapping[str, float | None]) -> tuple[Limit, ...]:
    """The limits that keyword arguments ask for, in the order of LIMITS.

    Raises:
        InputError: a number is out of range, or goes with one that is not given.
        TypeError: there is no such keyword.
    """
    keywords = {option.keyword for option in LIMIT_OPTIONS}
    keywords |= {option.older_keyword for option in LIMIT_OPTIONS if option.older_keyword}
    for name in options:
        if name not in keywords:
            raise TypeError(f"there is no keyword argument {name!r}")
    limits = (limit.from_options(options) for limit in LIMITS)
    return tuple(limit for limit in limits if limit is not None)


def _chosen_deadline(
    target_time: float | None,
    slowdown: float | None,
    min_energy: bool,
    sync_time: float | None,
    run: Run | None,
) -> str | None:
    """The name of the one deadline that is given; None where none is.

    Raises:
        InputError: two are given.
    """
    deadlines = {
        "target_time": target_time,
        "slowdown": slowdown,
        "min_energy": min_energy or None,
        "sync_time": sync_time,
        "the run's deadline": None if run is None else run.deadline_s,
    }
    chosen = [name for name, value in deadlines.items() if value is not None]
    if len(chosen) > 1:
        raise InputError(f"{chosen[0]} and {chosen[1]} exclude each other; give one of them")
    return chosen[0] if chosen else None


def _asks_for_fastest(limit: Limit) -> bool:
    return limit.stated_as is not None
