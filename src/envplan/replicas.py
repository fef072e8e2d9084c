"""Data-parallel replicas on different hardware: a profile, a frontier and a plan for each.

All replicas end an iteration together, for gradients are exchanged then: who is ready earlier waits
at blocking power. So a common time costs every replica what its own frontier says of it, waiting
included, and the frontier of the whole is the sum of the replicas' at equal times. The slowest
replica's T_min is that of all; the others use the time that it leaves them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from envplan.errors import InputError, NoAnswerError
from envplan.plan import Plan, gap_over
from envplan.units import fj_from_j, j_from_fj, ns_from_s_floor, s_from_ns

if TYPE_CHECKING:
    from envplan.frontier import Frontier
    from envplan.profile import Profile

__all__ = [
    "ReplicaPlans",
    "common_min_time_ns",
    "plan_beside",
    "plan_replicas",
    "replay_replicas",
]


@dataclass(frozen=True)
class ReplicaPlans:
    """What replicas of several kinds do in one iteration. Energies are J over all GPUs.

    Attributes:
        plans: one for each kind; its job says how many replicas follow it.
        energy_lower_bound: least energy of any plans that all end by the deadline; None where
            nobody planned for one.
    """

    plans: tuple[Plan, ...]
    energy_lower_bound: float | None = None

    @property
    def sync_time(self) -> float:
        """When the slowest replica has finished, s."""
        return max(plan.iteration_time for plan in self.plans)

    @property
    def waiting_energies(self) -> list[float]:
        """For each kind, J that its GPUs draw while they wait for the slowest."""
        return [plan.waiting_energy(self.sync_time) for plan in self.plans]

    @property
    def energy(self) -> float:
        """J of all replicas until the slowest has finished."""
        return _exact_sum([*(plan.energy for plan in self.plans), *self.waiting_energies])

    @property
    def gap(self) -> float | None:
        """energy / energy_lower_bound - 1; None without a bound."""
        least = self.energy_lower_bound
        return None if least is None else gap_over(self.energy, least)

    @property
    def baseline_time(self) -> float:
        """s that an iteration takes with everything at maximum frequency."""
        return max(plan.predicted.baseline.iteration_time_s for plan in self.plans)

    @property
    def baseline_energy(self) -> float:
        """J with everything at maximum frequency, waiting included."""
        parts = []
        for plan in self.plans:
            baseline = plan.predicted.baseline
            waiting = plan.waiting_energy(self.baseline_time, since=baseline.iteration_time_s)
            parts += [baseline.energy_j, waiting]
        return _exact_sum(parts)

    @property
    def savings_percent(self) -> float:
        """Energy saved, of the baseline's."""
        before = self.baseline_energy
        return 100 * (before - self.energy) / before if before else 0.0

    def to_dict(self) -> dict[str, Any]:
        """In JSON types."""
        document: dict[str, Any] = {
            "sync_time_s": self.sync_time,
            "energy_j": self.energy,
            "energy_lower_bound_j": self.energy_lower_bound,
            "gap": self.gap,
            "baseline": {"sync_time_s": self.baseline_time, "energy_j": self.baseline_energy},
            "savings_percent": self.savings_percent,
            "replicas": [
                {
                    "profile": plan.profile.name,
                    "count": plan.job.replicas,
                    "iteration_time_s": plan.iteration_time,
                    "energy_j": plan.energy,
                    "waiting_energy_j": waiting,
                }
                for plan, waiting in zip(self.plans, self.waiting_energies, strict=True)
            ],
        }
        return {key: value for key, value in document.items() if value is not None}


def _exact_sum(joules: Sequence[float]) -> float:
    return j_from_fj(sum(map(fj_from_j, joules)))


def common_min_time_ns(frontiers: Sequence[Frontier]) -> int:
    """T_min of all together, ns: that of the slowest."""
    return max(frontier.min_time_ns for frontier in frontiers)


def plan_replicas(
    frontiers: Sequence[Frontier],
    target_time: float | None = None,
    *,
    slowdown: float | None = None,
    min_energy: bool = False,
) -> ReplicaPlans:
    """Plans for replicas of several kinds so that all end by a common time, at the least energy.

    Args:
        frontiers: one for each kind, traced with `full`; each says how many replicas it is for.
        target_time: s.
        slowdown: instead, a fraction of the common T_min to be slower by.
        min_energy: instead, the time at which all together use least.
            None of them: the common T_min.

    Raises:
        NoAnswerError: the slowest kind cannot be that fast.
        InputError: two targets are given, or one is out of range.
    """
    if (target_time is not None) + (slowdown is not None) + min_energy > 1:
        raise InputError("give one of target_time, slowdown and min_energy")
    if slowdown is not None and not 0 <= slowdown <= 1e6:
        raise InputError(f"slowdown must be a fraction from 0 up, not {slowdown}")
    if target_time is not None and not 0 <= target_time <= 1e9:
        raise InputError(f"target time must be seconds from 0 up, not {target_time}")
    least = common_min_time_ns(frontiers)
    star = _common_star_ns(frontiers)
    asked = least
    if target_time is not None:
        asked = ns_from_s_floor(target_time)
    elif slowdown is not None:
        asked = least + int(least * slowdown)
    elif min_energy:
        asked = star
    if asked < least:
        slowest = max(frontiers, key=lambda frontier: frontier.min_time_ns)
        raise NoAnswerError(
            f"no plans finish in {s_from_ns(asked):.9f} s; T_min of the slowest replica, that of "
            f"profile {slowest.profile.name}, is {s_from_ns(least):.9f} s"
        )
    time_ns = min(asked, star)
    return ReplicaPlans(
        tuple(frontier.plan_for_sync(s_from_ns(time_ns)) for frontier in frontiers),
        j_from_fj(sum(_energy_fj(frontier, time_ns) for frontier in frontiers)),
    )


def _common_star_ns(frontiers: Sequence[Frontier]) -> int:
    """Where all together use least, ns: the sum of convex curves is least at one of their bends."""
    least = common_min_time_ns(frontiers)
    bends = {least}.union(*(frontier.times_ns.tolist() for frontier in frontiers))
    later = sorted(time for time in bends if time >= least)
    low, high = 0, len(later) - 1
    while low < high:
        middle = (low + high) // 2
        here, next_ = (
            sum(_energy_fj(frontier, later[k]) for frontier in frontiers)
            for k in (middle, middle + 1)
        )
        if next_ < here:
            low = middle + 1
        else:
            high = middle
    return later[low]


def _energy_fj(frontier: Frontier, time_ns: int) -> int:
    """Least relaxed energy of a kind's replicas if all wait until time_ns, all GPUs, fJ."""
    return frontier.waiting_bound_fj(time_ns) * frontier.gpus_per_stage * frontier.replicas


def plan_beside(plan: Plan, profile: Profile, count: int) -> Plan:
    """A plan for further replicas on other hardware, to end when a plan does, or else soonest.

    Args:
        plan: of the replicas there are.
        profile: of the further ones, as it was measured.
        count: how many further replicas there are.

    Raises:
        InputError: the profile does not fit the plan's pipeline.
    """
    from envplan.frontier import trace_frontier

    pipeline, applied = plan.job.pipeline(), plan.profile.adjustments
    given = plan.job.blocking_power_source == "argument" and plan.job.blocking_power_w
    frontier = trace_frontier(
        pipeline,
        profile.fitted(
            {op.instruction for op in pipeline.operations},
            recompute=applied is not None and applied.recompute,
        ),
        blocking_power=plan.job.blocking_power_w[0] if given else None,
        gpus_per_stage=plan.job.gpus_per_stage,
        replicas=count,
        full=True,
    )
    return frontier.plan_for_sync(max(plan.iteration_time, frontier.min_time))


def replay_replicas(
    replicas: Sequence[tuple[Plan, Profile]], *, force: bool = False
) -> ReplicaPlans:
    """What replicas of several kinds do if each follows its own plan, each replayed.

    Args:
        replicas: a plan for each kind, with the profile that it was made from.
        force: go on though a profile has changed since its plan was made.

    Raises:
        InputError: as for simulate, or a plan states another time or energy than its replay.
    """
    from envplan.simulation import simulate

    for plan, profile in replicas:
        timeline = simulate(plan, profile, force=force)
        if (timeline.iteration_time, timeline.energy) != (plan.iteration_time, plan.energy):
            raise InputError(
                f"the plan from profile {plan.profile.name} states another time or energy than its "
                "replay; envplan check says which is wrong"
            )
    return ReplicaPlans(tuple(plan for plan, _ in replicas))
