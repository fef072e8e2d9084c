"""Many replicas of a pipeline, some of them slower than the rest.

A straggler makes every replica finish at T' (Perseus, SOSP 2024). Replicas that have time to spare
can then follow the frontier's plan for T' instead of waiting: that saves extrinsic bloat, on top of
the intrinsic bloat that the plan itself saves. Replicas that do the same are counted, not simulated
again, so a cluster costs no more than one of its pipelines.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Final, NamedTuple

from pydantic import BaseModel, Field

from envplan._tables import read_table
from envplan.costs import Pair, Run, pairs
from envplan.errors import InputError, NoAnswerError
from envplan.frontier import Progress
from envplan.plan import Job, Plan, as_referenced, check_reference, replay_plan
from envplan.profile import Profile
from envplan.request import Deadline, Effort, Request
from envplan.solve import LADDER, Frontier, ladder, solve, trace_job
from envplan.units import fj_from_j, j_from_fj, ns_from_s, s_from_ns

__all__ = [
    "ClusterIteration",
    "ClusterReport",
    "Slowdowns",
    "read_slowdowns",
    "simulate_cluster",
    "strong_scaling",
]

#: Slowdown of each straggler in an iteration, by replica; all others keep to the plan's time.
Slowdowns = Mapping[int, float]

MAX_REPLICAS: Final = 10**6
#: Up to so many straggler times are planned for one by one; for more, a whole ladder is made.
MOST_OWN_RUNGS: Final = 8
MAX_SLOWDOWN: Final = 1e6


class _Slowdown(BaseModel):
    iteration: Annotated[int, Field(ge=0, le=10**9, description="a whole number from 0 up")]
    replica: Annotated[int, Field(ge=0, le=10**9, description="a whole number from 0 up")]
    slowdown: Annotated[
        float,
        Field(
            gt=0,
            le=MAX_SLOWDOWN,
            allow_inf_nan=False,
            description=f"a factor above 0 and up to {MAX_SLOWDOWN:g}",
        ),
    ]


@dataclass(frozen=True, slots=True)
class ClusterIteration:
    """One iteration of the whole cluster, in three ways of running it.

    Attributes:
        stragglers: how many replicas are slower than the plan.
        baseline_time_ns: when the last replica has finished, all at maximum frequency; ns.
        sync_time_ns: the same with the plan; ns.
        followed_time_ns: iteration time of the plan that the other replicas follow, ns.
        baseline_fj: all at maximum frequency, fJ.
        plan_fj: all with the plan, the others waiting for the stragglers, fJ.
        energy_fj: the others with the plan looked up for T', fJ.
    """

    stragglers: int
    baseline_time_ns: int
    sync_time_ns: int
    followed_time_ns: int
    baseline_fj: int
    plan_fj: int
    energy_fj: int


@dataclass(frozen=True)
class ClusterReport:
    """What a cluster uses over some iterations, and where the savings come from. Energies are
    joules over all GPUs and all iterations.

    Attributes:
        replicas, num_stages, gpus_per_stage: the shape of the cluster.
        num_microbatches: of one pipeline.
        iterations: one or more.
        notes: what a reader should know, a sentence each.
    """

    replicas: int
    num_stages: int
    gpus_per_stage: int
    num_microbatches: int
    iterations: tuple[ClusterIteration, ...]
    notes: tuple[str, ...]

    @property
    def num_gpus(self) -> int:
        """GPUs of the whole cluster."""
        return self.replicas * self.num_stages * self.gpus_per_stage

    @property
    def time(self) -> float:
        """s that all iterations take with the plan."""
        return s_from_ns(sum(iteration.sync_time_ns for iteration in self.iterations))

    @property
    def baseline_energy(self) -> float:
        """J with everything at maximum frequency."""
        return j_from_fj(sum(iteration.baseline_fj for iteration in self.iterations))

    @property
    def plan_energy(self) -> float:
        """J with the plan everywhere, whoever straggles."""
        return j_from_fj(sum(iteration.plan_fj for iteration in self.iterations))

    @property
    def energy(self) -> float:
        """J with the plan, and with those looked up while somebody straggles."""
        return j_from_fj(sum(iteration.energy_fj for iteration in self.iterations))

    @property
    def intrinsic_savings(self) -> float:
        """J that the plan saves."""
        return j_from_fj(sum(it.baseline_fj - it.plan_fj for it in self.iterations))

    @property
    def extrinsic_savings(self) -> float:
        """J that looking plans up for the stragglers' time saves on top."""
        return j_from_fj(sum(it.plan_fj - it.energy_fj for it in self.iterations))

    def costs(self, run: Run) -> tuple[Pair, Pair | None]:
        """What an iteration costs on average, and what a run of many does.

        Raises:
            InputError: a rate ends before the run does.
        """
        count = len(self.iterations)
        usual_s = s_from_ns(sum(iteration.baseline_time_ns for iteration in self.iterations))
        return pairs(
            (usual_s / count, self.baseline_energy / count),
            (self.time / count, self.energy / count),
            run,
            self.num_gpus,
        )

    def percent(self, joules: float) -> float:
        """Joules as percent of the baseline's."""
        return 100 * joules / self.baseline_energy if self.baseline_energy else 0.0

    def to_dict(self) -> dict[str, Any]:
        """In JSON types; iterations that are alike are listed one by one."""
        return {
            "gpus": self.num_gpus,
            "replicas": self.replicas,
            "stages": self.num_stages,
            "gpus_per_stage": self.gpus_per_stage,
            "microbatches": self.num_microbatches,
            "time_s": self.time,
            "baseline_energy_j": self.baseline_energy,
            "plan_energy_j": self.plan_energy,
            "energy_j": self.energy,
            "intrinsic_savings_j": self.intrinsic_savings,
            "extrinsic_savings_j": self.extrinsic_savings,
            "intrinsic_savings_percent": self.percent(self.intrinsic_savings),
            "extrinsic_savings_percent": self.percent(self.extrinsic_savings),
            "iterations": [
                {
                    "stragglers": iteration.stragglers,
                    "sync_time_s": s_from_ns(iteration.sync_time_ns),
                    "followed_time_s": s_from_ns(iteration.followed_time_ns),
                    "baseline_energy_j": j_from_fj(iteration.baseline_fj),
                    "plan_energy_j": j_from_fj(iteration.plan_fj),
                    "energy_j": j_from_fj(iteration.energy_fj),
                }
                for iteration in self.iterations
            ],
        }


def simulate_cluster(
    plan: Plan,
    profile: Profile,
    frontier: Frontier | None = None,
    *,
    slowdowns: Sequence[Slowdowns] = ({},),
    replicas: int | None = None,
    gpus_per_stage: int | None = None,
    force: bool = False,
) -> ClusterReport:
    """Run a plan on data-parallel replicas, in iterations of which each has its stragglers.

    A slowdown x says that this replica's iteration takes x times as long as the plan's. The
    straggler keeps to the plan (or to maximum frequency, in the baseline) as fast as it can, at the
    average power it has without straggling. When the last straggler has finished, at T', everybody
    has; until then those that are done wait at their blocking power. T' is known from the
    iteration's start on, and every replica that is no straggler follows the plan looked up for it,
    or its own where no other would save energy. A slowdown of at most 1 is none: such a replica
    is as fast as the plan.

    Plans are looked up in the plan's own ladder. Where it has none, rungs are made beforehand from
    the frontier: one for each T' if there are few, else a ladder.

    Args:
        frontier: of the plan's job, for a plan without a ladder; not needed where nobody straggles.
        slowdowns: for each iteration its stragglers.
        replicas: default: those of the plan's job.
        gpus_per_stage: likewise.
        force: go on though the profile has changed since the plan was made.

    Raises:
        InputError: a number is out of range, a straggler is no replica of the cluster, there is
            nothing to look plans up in, or as for simulate.
    """
    replicas = _count("replicas", plan.job.replicas if replicas is None else replicas)
    gpus = _count(
        "GPUs per stage", plan.job.gpus_per_stage if gpus_per_stage is None else gpus_per_stage
    )
    stragglers, notes = _stragglers(slowdowns, replicas)
    paces = _Paces(plan, profile, frontier, force)
    paces.prepare({factors[-1] for factors in stragglers if factors})
    known: dict[tuple[float, ...], ClusterIteration] = {}
    iterations = []
    for factors in stragglers:
        if factors not in known:
            known[factors] = _iteration(paces, factors, replicas, gpus)
        iterations.append(known[factors])
    return ClusterReport(
        replicas=replicas,
        num_stages=plan.job.stages,
        gpus_per_stage=gpus,
        num_microbatches=plan.job.microbatches,
        iterations=tuple(iterations),
        notes=tuple(notes),
    )


def strong_scaling(
    plan: Plan,
    profile: Profile,
    replicas: Sequence[int],
    *,
    global_batch: int | None = None,
    slowdowns: Sequence[Slowdowns] = ({},),
    gpus_per_stage: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> list[ClusterReport]:
    """The same global batch on more or fewer replicas, so with fewer or more microbatches each.

    Each shape is traced and planned anew, by this library's own planner, for a deadline as far
    above its T_min as the plan's is above its own; this is how Perseus (SOSP 2024) emulates
    clusters of up to 8,192 GPUs.

    Args:
        replicas: for each shape, how many pipelines.
        global_batch: microbatches of all pipelines together; default: those of the plan's job.
        slowdowns: as for simulate_cluster, for every shape.
        gpus_per_stage: default: those of the plan's job.
        force: go on though the profile has changed since the plan was made.
        progress: as for trace_frontier.

    Raises:
        InputError: the global batch does not divide by a number of replicas, the plan is of a
            custom DAG, or as for simulate_cluster and trace_frontier.
    """
    check_reference(plan.profile, profile, force)
    profile = as_referenced(plan.profile, profile)
    if plan.job.dag is not None:
        raise InputError("a custom DAG has a fixed number of microbatches; it cannot be scaled")
    total = global_batch or plan.job.microbatches * plan.job.replicas
    jobs = []
    for count in replicas:
        if total % _count("replicas", count):
            raise InputError(
                f"the global batch of {total} microbatches does not divide by {count} replicas"
            )
        shape = {"microbatches": total // count, "replicas": count}
        jobs.append(plan.job.model_copy(update=shape))
    own = trace_job(plan.job, profile, progress)
    slowdown = max(0.0, plan.target.deadline_s / own.min_time - 1)
    return [_scaled(job, profile, progress, slowdown, slowdowns, gpus_per_stage) for job in jobs]


def _scaled(
    job: Job,
    profile: Profile,
    progress: Progress | None,
    slowdown: float,
    slowdowns: Sequence[Slowdowns],
    gpus_per_stage: int | None,
) -> ClusterReport:
    frontier = trace_job(job, profile, progress)
    return simulate_cluster(
        frontier.plan(slowdown=slowdown),
        profile,
        frontier,
        slowdowns=slowdowns,
        gpus_per_stage=gpus_per_stage,
    )


def read_slowdowns(path: str | os.PathLike[str], replicas: int) -> list[dict[int, float]]:
    """The stragglers of each iteration, from a CSV file.

    Its header is `iteration,replica,slowdown`, iterations and replicas counting from 0. A replica
    without a row in an iteration keeps to the plan. Each iteration from 0 to the last has at least
    one row: where nobody straggles, one with slowdown 1.

    Args:
        replicas: how many the cluster has.

    Raises:
        InputError: the file cannot be read, an iteration is missing, a replica is unknown or twice
            in an iteration, or a slowdown is not above 0; says the line.
    """
    table = read_table(path, _Slowdown, kind="a table of stragglers")
    iterations: dict[int, dict[int, float]] = {}
    for number, row in enumerate(table.rows()):
        if row.replica >= replicas:
            raise table.error(
                number,
                f"{row.replica} is unknown; the cluster has replicas 0 to {replicas - 1}",
                "replica",
            )
        stragglers = iterations.setdefault(row.iteration, {})
        if row.replica in stragglers:
            raise table.error(number, f"repeats replica {row.replica} of iteration {row.iteration}")
        stragglers[row.replica] = row.slowdown
    for expected in range(len(iterations)):
        if expected not in iterations:
            raise InputError(
                f"has a gap: no row for iteration {expected}, but one for {max(iterations)}; give "
                "an iteration without stragglers a row with slowdown 1",
                path=path,
            )
    return [iterations[k] for k in range(len(iterations))]


def check_slowdown(factor: float) -> float:
    """`factor`, if it can be a slowdown.

    Raises:
        InputError: it is not above 0, or too large.
    """
    if not 0 < factor <= MAX_SLOWDOWN:
        raise InputError(f"a slowdown must be above 0 and at most {MAX_SLOWDOWN:g}, not {factor:g}")
    return factor


def _count(name: str, count: int) -> int:
    if not 1 <= count <= MAX_REPLICAS:
        raise InputError(f"{name} must be between 1 and {MAX_REPLICAS}, not {count}")
    return count


def _stragglers(
    slowdowns: Sequence[Slowdowns], replicas: int
) -> tuple[list[tuple[float, ...]], list[str]]:
    """The slowdowns above 1 of each iteration, ascending; and what to say about the others."""
    if not slowdowns:
        raise InputError("give the slowdowns of at least one iteration")
    faster: dict[int, float] = {}
    stragglers = []
    for factors in slowdowns:
        for replica, factor in factors.items():
            check_slowdown(factor)
            if not 0 <= replica < replicas:
                raise InputError(
                    f"there is no replica {replica} to straggle; the cluster has replicas 0 to "
                    f"{replicas - 1}"
                )
            if factor < 1:
                faster.setdefault(replica, factor)
        stragglers.append(tuple(sorted(factor for factor in factors.values() if factor > 1)))
    notes = []
    if faster:
        replica, factor = next(iter(faster.items()))
        more = f" (and {len(faster) - 1} more)" if len(faster) > 1 else ""
        notes.append(
            f"replica {replica}{more} at {factor:g} times the plan's time is faster than the plan, "
            "so it is no straggler and waits like all others"
        )
    return stragglers, notes


class _Pace(NamedTuple):
    """What one GPU a stage of one replica takes for an iteration, ns, and draws until then, fJ."""

    time_ns: int
    energy_fj: int


class _Paces:
    """The paces that replicas can go at."""

    def __init__(
        self, plan: Plan, profile: Profile, frontier: Frontier | None, force: bool
    ) -> None:
        replay = replay_plan(plan, profile, force=force)
        problem = replay.problem
        self._power_uw = sum(problem.blocking_power_uw.tolist())
        self.plan = _Pace(replay.makespan_ns, replay.energy_fj)
        fastest = problem.replay(problem.max_frequency_rows)
        self.baseline = _Pace(fastest.makespan_ns, fastest.energy_fj)
        # Whatever a plan looked up keeps, it keeps with the request's clocks and limits.
        self._request = plan.request
        self._frontier = frontier
        self._ladder = [
            _pace(rung.iteration_time_s, rung.energy_j, plan.job.num_gpus)
            for rung in plan.ladder or ()
        ]
        self._has_ladder = plan.ladder is not None

    def sync_ns(self, factor: float) -> int:
        """When a straggler of a slowdown has finished."""
        return math.ceil(self.plan.time_ns * factor)

    def prepare(self, factors: Iterable[float]) -> None:
        """Make the rungs to look up for stragglers of these slowdowns.

        Raises:
            InputError: there is no ladder, and no frontier to make them from.
        """
        times = sorted({self.sync_ns(factor) for factor in factors})
        if self._has_ladder or not times:
            return
        if self._frontier is None:
            raise InputError("give the plan's frontier, or a plan with a ladder, to look up in")
        frontier = self._frontier
        if len(times) <= MOST_OWN_RUNGS:
            plans = []
            for time in times:
                # Where there is no such plan, everybody keeps to the one that there is.
                with suppress(NoAnswerError):
                    plans.append(solve(frontier, self._until(time)))
        else:
            plans = ladder(frontier, self._until(times[-1], LADDER))
        self._ladder = [_pace(p.iteration_time, p.energy, p.job.num_gpus) for p in plans]

    def _until(self, time_ns: int, rungs: int = 0) -> Request:
        """The plan's request for when everybody waits until a time, ns."""
        return self._request.model_copy(
            update={
                "objective": "energy",
                "deadline": Deadline(kind="sync-time", time_s=s_from_ns(time_ns)),
                "straggler_time_s": None,
                "run": None,
                "effort": Effort(ladder=rungs),
            }
        )

    def until(self, pace: _Pace, sync_ns: int) -> int:
        """fJ of a replica that goes at a pace and then waits until sync_ns."""
        waiting_fj: int = self._power_uw * (sync_ns - pace.time_ns)
        return pace.energy_fj + waiting_fj

    def stretched(self, pace: _Pace, time_ns: int) -> int:
        """fJ of a replica that takes time_ns for it, at the same average power."""
        return pace.energy_fj * time_ns // pace.time_ns

    def for_sync_at(self, sync_ns: int) -> _Pace:
        """The cheapest way for a replica to be ready by then: the plan, or one looked up."""
        in_time = [pace for pace in self._ladder if pace.time_ns <= sync_ns]
        return min([self.plan, *in_time], key=lambda pace: self.until(pace, sync_ns))


def _pace(time_s: float, energy_j: float, num_gpus: int) -> _Pace:
    return _Pace(ns_from_s(time_s), fj_from_j(energy_j) // num_gpus)


def _iteration(
    paces: _Paces, factors: Sequence[float], replicas: int, gpus: int
) -> ClusterIteration:
    """One iteration with stragglers of these slowdowns, ascending, all above 1."""
    plan, baseline = paces.plan, paces.baseline
    own_ns = [paces.sync_ns(factor) for factor in factors]
    sync_ns = own_ns[-1] if own_ns else plan.time_ns
    followed = paces.for_sync_at(sync_ns) if own_ns else plan
    others = replicas - len(own_ns)
    # A straggler takes its time whatever it runs, but not less than maximum frequency does.
    at_maximum = [max(time, baseline.time_ns) for time in own_ns]
    baseline_ns = max(baseline.time_ns, *at_maximum, 0)
    slow_baseline = sum(
        paces.until(_Pace(time, paces.stretched(baseline, time)), baseline_ns)
        for time in at_maximum
    )
    slow = sum(paces.until(_Pace(time, paces.stretched(plan, time)), sync_ns) for time in own_ns)
    return ClusterIteration(
        stragglers=len(own_ns),
        baseline_time_ns=baseline_ns,
        sync_time_ns=sync_ns,
        followed_time_ns=followed.time_ns,
        baseline_fj=(others * paces.until(baseline, baseline_ns) + slow_baseline) * gpus,
        plan_fj=(others * paces.until(plan, sync_ns) + slow) * gpus,
        energy_fj=(others * paces.until(followed, sync_ns) + slow) * gpus,
    )
