"""Frontier files: `envplan frontier -o frontier.csv|.json`, written, read and looked up.

frontier.csv has a row for each plan along the frontier. frontier.json holds the exact relaxed curve
and each plan's clocks as well, so that a plan for any time can be had from it and the profile
without tracing again:

    plan = envplan.FrontierFile.load("frontier.json").plan(target_time=14.2)
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PrivateAttr

from envplan._io.documents import Document, Index, Model
from envplan._io.files import AnyPath, atomic_write
from envplan.errors import NoAnswerError
from envplan.frontier import Relaxation
from envplan.plan import Job, Plan, Rung, as_referenced, check_reference, find_profile, rung_rows
from envplan.plan.build import plan_of
from envplan.plan.model import Baseline, ProfileReference
from envplan.plan.target import target_of
from envplan.profile import Profile
from envplan.replay import Problem, Replay
from envplan.request import Request
from envplan.units import in_10fj, ns_from_s_floor

FRONTIER_SCHEMA: Final = "envplan/frontier/v1"
_TOLERANCE: Final = 1e-9

Finite = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Row(Model):
    """A discrete plan on the frontier, over all GPUs; one row of the CSV."""

    iteration_time_s: Positive = Field(description="seconds")
    energy_j: Positive = Field(description="joules")
    lower_bound_j: Positive = Field(description="joules")
    gap: Finite = Field(description="energy_j / lower_bound_j - 1")
    average_power_w: Positive = Field(description="watts")
    slowdown_percent: Finite = Field(description="percent of maximum frequency's time")
    savings_percent: Finite = Field(description="percent of maximum frequency's energy")


COLUMNS: Final = tuple(Row.model_fields)


class Breakpoints(Model):
    """The exact relaxed frontier: straight between these points, both lists of one length."""

    iteration_time_s: list[Positive]
    energy_j: list[Positive]


class StoredPlan(Row):
    """A row with the clocks that the plan says."""

    frequencies_mhz: list[list[Index]] = Field(
        description="MHz of each stage's operations in execution order"
    )
    configs: list[list[str]] | None = Field(
        None, description="likewise their configs; absent where no operation has one"
    )

    def replayed(self, name: str, problem: Problem) -> Replay:
        """Its replay.

        Args:
            name: what to call it in an error.

        Raises:
            InputError: its clocks do not fit the job.
        """
        rung = Rung(**{field: getattr(self, field) for field in Rung.model_fields})
        return problem.replay(rung_rows(name, rung, problem))


class SlowerFrontier(Model):
    """The frontier beyond T_star, up to T_max: iterations take more time and energy, less power.

    Such plans are worth following while a straggler makes everyone wait, or where power is short.

    Attributes:
        plans: by ascending time, each of less average power than the one before.
        breakpoints: the exact relaxed frontier from T_star to T_max.
    """

    plans: list[StoredPlan]
    breakpoints: Breakpoints


class FrontierFile(Document):
    """frontier.json: what was traced, discrete plans along it and the curve itself.

    Attributes:
        plans: by ascending time, each of less energy than the one before.
        breakpoints: the exact relaxed frontier, a lower bound on every plan's energy.
        slower: the same beyond T_star, where it was traced.
    """

    kind: ClassVar[str] = "frontier"
    schema_name: ClassVar[str] = FRONTIER_SCHEMA

    schema_id: Literal["envplan/frontier/v1"] = Field(alias="schema")
    job: Job
    profile: ProfileReference
    t_min_s: Positive
    t_star_s: Positive
    baseline: Baseline
    plans: list[StoredPlan] = Field(min_length=1)
    breakpoints: Breakpoints
    slower: SlowerFrontier | None = None

    #: Where it was read from: a relative path of the profile starts there.
    _file: AnyPath | None = PrivateAttr(None)

    @classmethod
    def from_document(cls, document: object, *, path: AnyPath | None = None) -> Self:
        """The frontier of a JSON value, as Document.from_document, which remembers its file."""
        frontier = super().from_document(document, path=path)
        frontier._file = path
        return frontier

    def __eq__(self, other: object) -> bool:
        """Whether both state the same, wherever they were read from."""
        return isinstance(other, FrontierFile) and self.model_dump() == other.model_dump()

    @classmethod
    def from_plans(
        cls, frontier: Relaxation, plans: Sequence[Plan], slower: Sequence[Plan] | None = None
    ) -> Self:
        """The file of a frontier and some of its plans, by ascending time.

        Args:
            frontier: traced up to T_max where there are slower plans.
            plans: between T_min and T_star.
            slower: plans beyond T_star; None: the file ends at T_star.
        """
        t_star = frontier.min_energy_time
        slower_frontier = None
        if slower is not None:
            slower_frontier = SlowerFrontier(
                plans=[_stored(plan) for plan in slower],
                breakpoints=_breakpoints(frontier, frontier.times >= t_star),
            )
        return cls(
            schema=FRONTIER_SCHEMA,
            job=plans[0].job,
            profile=plans[0].profile,
            t_min_s=frontier.min_time,
            t_star_s=t_star,
            baseline=plans[0].predicted.baseline,
            plans=[_stored(plan) for plan in plans],
            breakpoints=_breakpoints(frontier, frontier.times <= t_star),
            slower=slower_frontier,
        )

    def save(self, path: AnyPath) -> None:
        """Write frontier.json, or, at a path that ends in .csv, its plans as a table.

        Raises:
            InputError: it cannot be written there.
        """
        if Path(path).suffix.lower() == ".csv":
            text = io.StringIO()
            writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            writer.writerows(row.model_dump() for row in self.plans)
            atomic_write(path, text.getvalue())
        else:
            super().save(path)

    def energy_at(self, time: float) -> float:
        """The curve's energy at a time, J: no plan by then uses less. From T_star on, the least.

        Raises:
            NoAnswerError: the time is below T_min.
        """
        if time < self.t_min_s:
            raise NoAnswerError(f"T_min is {self.t_min_s!r} s; nothing takes {time!r} s")
        curve = self.breakpoints
        return float(np.interp(time, curve.iteration_time_s, curve.energy_j))

    def plan(self, target_time: float, profile: Profile | None = None) -> Plan:
        """The plan of least energy in time, looked up: nothing is traced, one replay prices it.

        Args:
            target_time: s.
            profile: what the frontier was traced from; default: the one that the file names.

        Raises:
            NoAnswerError: no plan of the file ends by then.
            InputError: the profile is not found or is another one.
        """
        in_time = [row for row in self.plans if row.iteration_time_s <= target_time]
        if not in_time:
            raise NoAnswerError(
                f"no plan of the file ends by {target_time!r} s; the fastest takes "
                f"{self.plans[0].iteration_time_s!r} s, T_min is {self.t_min_s!r} s"
            )
        source = find_profile(self.profile, self._file) if profile is None else profile
        check_reference(self.profile, source, force=False)
        problem = self.job.problem(as_referenced(self.profile, source))
        request = Request.from_options(target_time)
        # Nothing uses less later than T_star.
        deadline_s = min(target_time, self.t_star_s)
        return plan_of(
            in_time[-1].replayed("the plan", problem),
            self.job,
            in_10fj(self.energy_at(deadline_s)),
            profile=self.profile,
            target=target_of(request, ns_from_s_floor(deadline_s)),
            planner="frontier",
            request=request,
        )


def _stored(plan: Plan) -> StoredPlan:
    """A plan as a frontier file lists it."""
    figures = plan.predicted.model_dump(include={*COLUMNS})
    clocks = dict(plan.as_rung())
    return StoredPlan(**figures | clocks, lower_bound_j=plan.energy_lower_bound)


def _breakpoints(frontier: Relaxation, is_included: NDArray[np.bool_]) -> Breakpoints:
    """Some of the breakpoints of a frontier."""
    return Breakpoints(
        iteration_time_s=frontier.times[is_included].tolist(),
        energy_j=frontier.energies[is_included].tolist(),
    )


def evenly_chosen(plans: Sequence[Plan], count: int) -> list[Plan]:
    """At most `count` of the plans, evenly along them; of two and more the first and the last."""
    if len(plans) <= count:
        return list(plans)
    if count < 2:
        return list(plans[:count])
    last_index = len(plans) - 1
    return [plans[k * last_index // (count - 1)] for k in range(count)]


def distinct(plans: Sequence[Plan]) -> list[Plan]:
    """The plans without those that another one beats or equals in both time and energy."""
    unbeaten: list[Plan] = []
    for plan in sorted(plans, key=lambda plan: (plan.iteration_time, plan.energy)):
        if not unbeaten or plan.energy < unbeaten[-1].energy:
            unbeaten.append(plan)
    return unbeaten


def less_powerful(plans: Sequence[Plan], fastest: Plan) -> list[Plan]:
    """The plans that are slower than one and draw less, each less than the one before."""
    chosen = [fastest]
    for plan in sorted(plans, key=lambda plan: plan.iteration_time):
        is_slower = plan.iteration_time > chosen[-1].iteration_time
        if is_slower and plan.average_power < chosen[-1].average_power:
            chosen.append(plan)
    return chosen[1:]
