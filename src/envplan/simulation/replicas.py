"""Data-parallel replicas on different hardware: a profile, a frontier and a plan for each.

All replicas end an iteration together, for gradients are exchanged then: who is ready earlier waits
at blocking power. So a common time costs every replica what its own frontier says of it, waiting
included, and the frontier of the whole is the sum of the replicas' at equal times. The slowest
replica's T_min is that of all; the others use the time that it leaves them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from envplan.costs import Run
from envplan.costs.model import CostComparison, TimeAndEnergy
from envplan.costs.pricing import compare_costs
from envplan.errors import NoAnswerError
from envplan.plan import Plan, replay_plan
from envplan.plan.build import gap_over, percent, predict
from envplan.planners import Planner
from envplan.profile import Adjustments, Profile
from envplan.request import Deadline, Request
from envplan.request.limits import KindReplay, WholeJob
from envplan.simulation.conditions import PLANNED, Conditions
from envplan.solve import Frontier, trace_frontier
from envplan.solve.deadline_solver import DeadlineSolver
from envplan.units import j_from_10fj, ns_from_s, ns_from_s_floor, s_from_ns

__all__ = [
    "ReplicaKind",
    "ReplicaPlans",
    "plan_beside",
    "plan_replicas",
    "replay_replicas",
]


@dataclass(frozen=True, slots=True)
class ReplicaKind:
    """Replicas on the same hardware; energies are those of all their GPUs.

    Attributes:
        profile_name: what their hardware was profiled as.
        num_replicas: how many there are.
        iteration_time_s, energy_j: of their plan, until it ends.
        waiting_energy_j: while they wait for the slowest kind.
    """

    profile_name: str
    num_replicas: int
    iteration_time_s: float
    energy_j: float
    waiting_energy_j: float

    def to_dict(self) -> dict[str, object]:
        """The kind in JSON types."""
        return {
            "profile": self.profile_name,
            "count": self.num_replicas,
            "iteration_time_s": self.iteration_time_s,
            "energy_j": self.energy_j,
            "waiting_energy_j": self.waiting_energy_j,
        }


@dataclass(frozen=True)
class ReplicaPlans:
    """One iteration of replicas of several kinds; energies are J over all GPUs.

    Attributes:
        plans: one for each kind; its job says how many replicas follow it.
        energy_lower_bound: least energy of any plans that all end by the deadline; None where
            nobody planned for one.
        run: the training run, where costs are wanted.
        until: s; the iteration is over for nobody before that.
    """

    plans: tuple[Plan, ...]
    energy_lower_bound: float | None = None
    run: Run | None = None
    until: float = 0.0

    @property
    def sync_time(self) -> float:
        """When the slowest replica has finished, s."""
        return max(self.until, *(plan.iteration_time for plan in self.plans))

    @property
    def waiting_energies(self) -> list[float]:
        """For each kind, J that its GPUs draw while they wait for the slowest."""
        return [plan.waiting_energy(self.sync_time) for plan in self.plans]

    @property
    def kinds(self) -> tuple[ReplicaKind, ...]:
        """Time and energy of each kind."""
        return tuple(
            ReplicaKind(
                profile_name=plan.profile.name,
                num_replicas=plan.job.replicas,
                iteration_time_s=plan.iteration_time,
                energy_j=plan.energy,
                waiting_energy_j=waiting_energy_j,
            )
            for plan, waiting_energy_j in zip(self.plans, self.waiting_energies, strict=True)
        )

    @property
    def energy(self) -> float:
        """Energy of all replicas until the slowest has finished, J."""
        return math.fsum([*(plan.energy for plan in self.plans), *self.waiting_energies])

    @property
    def gap(self) -> float | None:
        """The energy above the lower bound, as a fraction of it; None without a bound."""
        if self.energy_lower_bound is None:
            return None
        return gap_over(self.energy, self.energy_lower_bound)

    @property
    def baseline_time(self) -> float:
        """Time of an iteration with everything at maximum frequency, s."""
        times_s = [plan.predicted.baseline.iteration_time_s for plan in self.plans]
        return max(self.until, *times_s)

    @property
    def baseline_energy(self) -> float:
        """Energy with everything at maximum frequency, waiting included, J."""
        end_s = self.baseline_time
        energies_j = []
        for plan in self.plans:
            baseline = plan.predicted.baseline
            iteration = plan.until(end_s, baseline.iteration_time_s, baseline.energy_j)
            energies_j.append(iteration.energy_j)
        return math.fsum(energies_j)

    @property
    def savings_percent(self) -> float:
        """Energy saved, of the baseline's."""
        return percent(self.baseline_energy - self.energy, self.baseline_energy)

    @property
    def costs(self) -> CostComparison | None:
        """Cost of the run, all replicas together; of one iteration, where no number is known."""
        if self.run is None:
            return None
        baseline = TimeAndEnergy(self.baseline_time, self.baseline_energy)
        planned = TimeAndEnergy(self.sync_time, self.energy)
        gpus = sum(plan.job.all_gpus for plan in self.plans)
        costs = compare_costs(baseline, planned, self.run, gpus)
        return costs.run or costs.iteration

    def to_dict(self) -> dict[str, object]:
        """All of it in JSON types, without what is not known."""
        document = {
            "sync_time_s": self.sync_time,
            "energy_j": self.energy,
            "energy_lower_bound_j": self.energy_lower_bound,
            "gap": self.gap,
            "baseline": {"sync_time_s": self.baseline_time, "energy_j": self.baseline_energy},
            "savings_percent": self.savings_percent,
            "costs": None if self.costs is None else self.costs.model_dump(exclude_none=True),
            "replicas": [kind.to_dict() for kind in self.kinds],
        }
        return {key: value for key, value in document.items() if value is not None}


def plan_replicas(
    frontiers: Sequence[Frontier], request: Request | None = None, planner: Planner | None = None
) -> ReplicaPlans:
    """Plan replicas of several kinds so that all end by a common time.

    Args:
        frontiers: one for each kind; each says how many replicas it is for.
        request: what is wanted of all together; default: no slowdown against the slowest kind. A
            budget and caps are on all GPUs of all kinds; a cap on the peak is shared out by what
            the kinds draw at maximum frequency; a probability is that all are in time.
        planner: that plans every kind; default: our own. Others know no limits.

    Raises:
        NoAnswerError: the slowest kind cannot be that fast, or a limit cannot be kept.
    """
    together = _Together(frontiers, request or Request())
    if planner is not None:
        return together.planned_by(planner)
    match together.request.objective:
        case "energy":
            return together.least_energy()
        case "time":
            return together.fastest()
        case "cost":
            return together.cheapest()


class _Together(DeadlineSolver[ReplicaPlans]):
    """Several kinds of replicas as one: a common time costs the sum of what it costs each."""

    def __init__(self, frontiers: Sequence[Frontier], request: Request) -> None:
        num_gpus = sum(frontier.num_gpus * frontier.pipeline.num_stages for frontier in frontiers)
        super().__init__(self, request, num_gpus)
        self.frontiers = frontiers
        #: T_min and T_max of all together, ns: those of the slowest.
        self.min_time_ns = max(frontier.min_time_ns for frontier in frontiers)
        self.slowest_time_ns = max(frontier.slowest_time_ns for frontier in frontiers)

    @cached_property
    def times_ns(self) -> NDArray[np.int64]:
        """Where the sum of the relaxed curves bends, from T_min up, ns, ascending."""
        curves_ns = [np.array([self.min_time_ns])]
        for frontier in self.frontiers:
            curves_ns += [frontier.times_ns, frontier.beyond.times_ns]
        bends_ns = np.unique(np.concatenate(curves_ns))
        return bends_ns[bends_ns >= self.min_time_ns]

    @cached_property
    def min_energy_time_ns(self) -> int:
        """Where all together use least, ns: a sum of convex curves is least at one of its bends."""
        bends_ns: list[int] = self.times_ns.tolist()

        def rises_after(bend: int) -> bool:
            return self.bound_10fj(bends_ns[bend + 1]) >= self.bound_10fj(bends_ns[bend])

        # The sum falls up to its least value and rises from there on.
        lowest_bend = bisect_left(range(len(bends_ns) - 1), True, key=rises_after)
        return bends_ns[lowest_bend]

    def bound_10fj(self, time_ns: int) -> int:
        """Least relaxed energy if all wait until a time, all GPUs, 10 fJ."""
        return sum(
            frontier.waiting_bound_10fj(time_ns) * frontier.num_gpus for frontier in self.frontiers
        )

    def energy_at(self, time: float) -> float:
        """The same in J, at a time in s."""
        return j_from_10fj(self.bound_10fj(ns_from_s_floor(time)))

    def requested_ns(self) -> int:
        """The common deadline that the request means, ns.

        Raises:
            NoAnswerError: the slowest kind cannot be that fast.
        """
        deadline_ns = self.request.deadline.resolve_ns(self.min_time_ns)
        if deadline_ns is None:
            deadline_ns = self.min_energy_time_ns
        if deadline_ns < self.min_time_ns:
            slowest = max(self.frontiers, key=lambda frontier: frontier.min_time_ns)
            raise NoAnswerError(
                f"no plans finish in {s_from_ns(deadline_ns):.9f} s; T_min of the slowest replica, "
                f"that of profile {slowest.profile.name}, is {s_from_ns(self.min_time_ns):.9f} s"
            )
        straggler_ns = ns_from_s_floor(self.request.straggler_time_s or 0.0)
        if straggler_ns > deadline_ns:
            return straggler_ns
        if self.request.deadline.kind == "sync-time":
            return deadline_ns
        return min(deadline_ns, self.min_energy_time_ns)

    def least_energy(self) -> ReplicaPlans:
        """Plans of least energy by the request's deadline.

        Plans that use all the time that a straggler leaves may break a limit on the whole that
        plans with an earlier end keep.
        """
        deadline_ns = self.requested_ns()
        try:
            return self.solve_by(deadline_ns)
        except NoAnswerError:
            if self.request.straggler_time_s is None:
                raise
            earlier_plans = self.solve_by_or_none(min(deadline_ns, self.min_energy_time_ns))
            if earlier_plans is None:
                earlier_plans = self.fastest()
            if ns_from_s(earlier_plans.sync_time) > deadline_ns:
                raise
            return earlier_plans

    def solve_by(self, deadline_ns: int, *, idle_until_deadline: bool = False) -> ReplicaPlans:
        """Plans of least energy that end by a deadline; replicas always wait for each other."""
        request = self.request.with_deadline(s_from_ns(deadline_ns), waits=True)
        request = request.model_copy(update={"run": None})
        plans = []
        for frontier in self.frontiers:
            shares = [limit.share(frontier, self.frontiers) for limit in self.request.limits]
            limits = tuple(share for share in shares if share is not None)
            shared = request.model_copy(update={"limits": limits})
            plans.append(frontier.solve(shared, doubts=False))
        # What all use until the slowest has finished; waiting longer for a straggler costs more.
        bound_10fj = self.bound_10fj(min(deadline_ns, self.min_energy_time_ns))
        planned = ReplicaPlans(tuple(plans), j_from_10fj(bound_10fj), self.request.run)
        self._require_limits(planned)
        return planned

    def _require_limits(self, planned: ReplicaPlans) -> None:
        """Refuse plans that break a limit all together.

        Raises:
            NoAnswerError: they break one.
        """

        def replays() -> list[KindReplay]:
            kinds = []
            for plan, frontier in zip(planned.plans, self.frontiers, strict=True):
                # Late or held clocks may leave other options by parts than the frontier has.
                adjustments = plan.profile.adjustments or Adjustments()
                profile = frontier.profile.with_adjustments(adjustments)
                replay = replay_plan(plan, profile)
                kinds.append(KindReplay(replay, frontier.num_gpus))
            return kinds

        job = WholeJob(planned.energy, ns_from_s(planned.sync_time), replays)
        for limit in self.request.limits:
            complaint = limit.explain_whole_violation(job)
            if complaint is not None:
                raise NoAnswerError(complaint)

    def planned_by(self, planner: Planner) -> ReplicaPlans:
        """The plans that another planner makes, each for one kind, by the common deadline.

        Raises:
            NoAnswerError: the slowest kind, or the planner for one of them, is not that fast.
        """
        deadline = self.request.deadline
        if deadline.kind in ("time", "slowdown"):
            deadline = Deadline(kind="time", time_s=s_from_ns(self.requested_ns()))
        request = self.request.model_copy(update={"deadline": deadline, "run": None})
        plans = tuple(planner.solve(frontier, request) for frontier in self.frontiers)
        sync_time_s = max(plan.iteration_time for plan in plans)
        bound_10fj = self.bound_10fj(ns_from_s(sync_time_s))
        return ReplicaPlans(plans, j_from_10fj(bound_10fj), self.request.run)

    def time_and_energy(self, answer: ReplicaPlans) -> TimeAndEnergy:
        """Time and energy of an iteration, until the slowest has finished."""
        return TimeAndEnergy(answer.sync_time, answer.energy)


def plan_beside(plan: Plan, profile: Profile, count: int) -> Plan:
    """A plan for further replicas on other hardware, to end when a plan does, or else soonest.

    Args:
        plan: of the replicas there are.
        profile: of the further ones, as it was measured.
        count: how many further replicas there are.

    Raises:
        InputError: the profile does not fit the plan's pipeline.
    """
    pipeline, adjustments = plan.job.pipeline(), plan.profile.adjustments
    blocking_power = None
    if plan.job.blocking_power_source == "argument":
        blocking_power = plan.job.blocking_power_w[0]
    fitted_profile = profile.fitted(
        {operation.instruction for operation in pipeline.operations},
        recompute=adjustments is not None and adjustments.recompute,
        by_parts=None if adjustments is None else adjustments.by_parts,
    )
    frontier = trace_frontier(
        pipeline,
        fitted_profile,
        blocking_power=blocking_power,
        gpus_per_stage=plan.job.gpus_per_stage,
        replicas=count,
        full=True,
    )
    sync_time_s = max(plan.iteration_time, frontier.min_time)
    return frontier.plan(sync_time=sync_time_s, switch_latency=0.0)


def replay_replicas(
    replicas: Sequence[tuple[Plan, Profile]],
    *,
    conditions: Conditions = PLANNED,
    force: bool = False,
) -> ReplicaPlans:
    """Replay replicas of several kinds, each of which follows its own plan.

    Args:
        replicas: a plan for each kind, with the profile that it was made from.
        conditions: what all of them meet; of several runs the first is taken. Noise is drawn alike
            for the operations of all kinds.
        force: go on though a profile has changed since its plan was made.

    Raises:
        InputError: as for simulate.
    """
    plans = []
    for plan, profile in replicas:
        machine = conditions.machine(plan.job)
        exact = replay_plan(plan, profile, force=force, machine=machine)
        replayed = predict(next(conditions.replays(exact)), plan.job.num_gpus)
        plans.append(plan.model_copy(update={"predicted": replayed}))
    return ReplicaPlans(tuple(plans), until=conditions.sync_time or 0.0)
