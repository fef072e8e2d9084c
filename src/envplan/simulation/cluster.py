"""Many replicas of a pipeline, some of them slower than the rest.

A straggler makes every replica finish at T' (Perseus, SOSP 2024). Replicas that have time to spare
can then follow the frontier's plan for T' instead of waiting: that saves extrinsic bloat, on top of
the intrinsic bloat that the plan itself saves. Replicas that do the same are counted, not simulated
again, so a cluster costs no more than one of its pipelines.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Annotated, Final, TypedDict, Unpack

from pydantic import BaseModel, Field

from envplan._io.documents import GpuCount, Model
from envplan._io.tables import read_table
from envplan.costs import Run
from envplan.costs.model import RunComparison, TimeAndEnergy
from envplan.costs.pricing import compare_costs
from envplan.errors import InputError
from envplan.frontier import Progress
from envplan.plan import Plan, Rung, as_referenced, check_reference, replay_plan, rung_rows
from envplan.plan.build import percent
from envplan.profile import Profile
from envplan.replay import Machine, Replay
from envplan.request import Effort
from envplan.simulation.conditions import PLANNED, Conditions
from envplan.solve import Frontier, trace_job
from envplan.solve.frontier import LADDER
from envplan.units import j_from_10fj, s_from_ns

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
#: The same by size: all above 1, ascending. Iterations with the same factors are alike.
Factors = tuple[float, ...]

#: Up to so many straggler times are planned for one by one; for more, a whole ladder is made.
MAX_SEPARATE_RUNGS: Final = 8

_Whole = Annotated[int, Field(ge=0, le=10**9, description="a whole number from 0 up")]
_Factor = Annotated[
    float,
    Field(gt=0, le=1e6, allow_inf_nan=False, description="a factor above 0 and up to 1e+06"),
]


class _SlowdownRow(BaseModel):
    """A row of a file of stragglers."""

    iteration: _Whole
    replica: _Whole
    slowdown: _Factor


class _Cluster(Model):
    """The shape of a cluster, and its stragglers in each iteration."""

    replicas: GpuCount
    gpus_per_stage: GpuCount
    slowdowns: Annotated[list[dict[int, _Factor]], Field(min_length=1)]

    def require_replicas(self) -> None:
        """Raise InputError unless every straggler is a replica of the cluster."""
        for replica in chain.from_iterable(self.slowdowns):
            if not 0 <= replica < self.replicas:
                raise InputError(
                    f"there is no replica {replica} to straggle; the cluster has replicas 0 to "
                    f"{self.replicas - 1}"
                )

    def straggler_factors(self) -> list[Factors]:
        """The slowdowns of each iteration, ascending, without those that slow nothing down."""
        factors_of_iterations = []
        for slowdowns in self.slowdowns:
            factors = [factor for factor in slowdowns.values() if factor > 1]
            factors_of_iterations.append(tuple(sorted(factors)))
        return factors_of_iterations


@dataclass(frozen=True, slots=True)
class ClusterIteration:
    """One iteration of a cluster, run in three ways; energies are those of all GPUs.

    Attributes:
        stragglers: how many replicas are slower than the plan.
        sync_time_s: when the last replica has finished, the others following the plan for it.
        followed_time_s: iteration time of the plan that the other replicas follow.
        baseline_energy_j, baseline_time_s: with everything at maximum frequency.
        plan_energy_j: with the plan everywhere, the others waiting for the stragglers.
        energy_j: with the plan looked up for the stragglers' time where nobody straggles.
    """

    stragglers: int
    sync_time_s: float
    followed_time_s: float
    baseline_energy_j: float
    plan_energy_j: float
    energy_j: float
    baseline_time_s: float

    def to_dict(self) -> dict[str, object]:
        """The iteration in JSON types."""
        return {
            "stragglers": self.stragglers,
            "sync_time_s": self.sync_time_s,
            "followed_time_s": self.followed_time_s,
            "baseline_energy_j": self.baseline_energy_j,
            "plan_energy_j": self.plan_energy_j,
            "energy_j": self.energy_j,
        }


@dataclass(frozen=True)
class ClusterReport:
    """Energy of a cluster over some iterations, and where the savings come from.

    Energies are joules over all GPUs and all iterations.

    Attributes:
        replicas, num_stages, gpus_per_stage: the shape of the cluster.
        num_microbatches: of one pipeline.
        iterations: one or more; those that are alike are the same object.
    """

    replicas: int
    num_stages: int
    gpus_per_stage: int
    num_microbatches: int
    iterations: tuple[ClusterIteration, ...]

    @property
    def num_gpus(self) -> int:
        """GPUs of the whole cluster."""
        return self.replicas * self.num_stages * self.gpus_per_stage

    @cached_property
    def time(self) -> float:
        """Time that all iterations take with the plan, s."""
        return math.fsum(iteration.sync_time_s for iteration in self.iterations)

    @cached_property
    def baseline_time(self) -> float:
        """Time that all iterations take at maximum frequency, s."""
        return math.fsum(iteration.baseline_time_s for iteration in self.iterations)

    @cached_property
    def baseline_energy(self) -> float:
        """Energy with everything at maximum frequency, J."""
        return math.fsum(iteration.baseline_energy_j for iteration in self.iterations)

    @cached_property
    def plan_energy(self) -> float:
        """Energy with the plan everywhere, whoever straggles, J."""
        return math.fsum(iteration.plan_energy_j for iteration in self.iterations)

    @cached_property
    def energy(self) -> float:
        """Energy with the plan, and with those looked up while somebody straggles, J."""
        return math.fsum(iteration.energy_j for iteration in self.iterations)

    @property
    def intrinsic_savings(self) -> float:
        """J that the plan saves."""
        return self.baseline_energy - self.plan_energy

    @property
    def extrinsic_savings(self) -> float:
        """J that looking plans up for the stragglers' time saves on top."""
        return self.plan_energy - self.energy

    def costs(self, run: Run) -> RunComparison:
        """Average cost of an iteration, and the cost of a run of many.

        Raises:
            InputError: a rate ends before the run does.
        """
        count = len(self.iterations)
        baseline = TimeAndEnergy(self.baseline_time / count, self.baseline_energy / count)
        planned = TimeAndEnergy(self.time / count, self.energy / count)
        return compare_costs(baseline, planned, run, self.num_gpus)

    def percent(self, joules: float) -> float:
        """Joules as percent of the baseline's."""
        return percent(joules, self.baseline_energy)

    def to_dict(self) -> dict[str, object]:
        """The report in JSON types; iterations that are alike are listed one by one."""
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
            "iterations": [iteration.to_dict() for iteration in self.iterations],
        }


def simulate_cluster(
    plan: Plan,
    profile: Profile,
    frontier: Frontier | None = None,
    *,
    slowdowns: Sequence[Slowdowns] = ({},),
    replicas: int | None = None,
    gpus_per_stage: int | None = None,
    conditions: Conditions = PLANNED,
    force: bool = False,
    progress: Progress | None = None,
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
        plan: the plan that all replicas follow while nobody straggles.
        profile: the profile that it was made from.
        frontier: of the plan's job; default: traced where it is needed.
        slowdowns: for each iteration its stragglers.
        replicas: default: those of the plan's job.
        gpus_per_stage: default: those of the plan's job.
        conditions: what all replicas meet; with several runs each iteration is run so often. Noise
            is drawn alike for all replicas.
        force: go on though the profile has changed since the plan was made.
        progress: as for trace_frontier.

    Raises:
        InputError: a number is out of range, a straggler is no replica of the cluster, or as for
            simulate.
    """
    cluster = _Cluster.of(
        replicas=plan.job.replicas if replicas is None else replicas,
        gpus_per_stage=plan.job.gpus_per_stage if gpus_per_stage is None else gpus_per_stage,
        slowdowns=[dict(iteration) for iteration in slowdowns],
    )
    cluster.require_replicas()
    machine = conditions.machine(plan.job)
    planned = replay_plan(plan, profile, force=force, machine=machine)
    highest = planned.problem.replay(planned.problem.max_frequency_rows)
    factors_of_iterations = cluster.straggler_factors()
    # Iterations with the same factors are alike: each kind is simulated once.
    announced_ns = {
        factors: _announced_end_ns(factors, planned, conditions)
        for factors in dict.fromkeys(factors_of_iterations)
    }
    rungs = plan.ladder
    if rungs is None:
        straggler_ends_ns = set(announced_ns.values()) - {planned.makespan_ns}
        rungs = _rungs_for(plan, profile, frontier, straggler_ends_ns, progress)
    replayed_rungs = _replays_of_rungs(plan, profile, rungs, machine=machine, force=force)
    simulation = _ClusterSimulation(
        cluster=cluster,
        sync_ns=conditions.sync_ns,
        planned=_ReplayedPlan(planned, conditions),
        rungs=[_ReplayedPlan(replay, conditions) for replay in replayed_rungs],
        at_max_frequency=_ReplayedPlan(highest, conditions),
    )
    outcomes = {
        factors: list(simulation.iterations(factors, end_ns))
        for factors, end_ns in announced_ns.items()
    }
    iterations: list[ClusterIteration] = []
    for factors in factors_of_iterations:
        iterations += outcomes[factors]
    return ClusterReport(
        replicas=cluster.replicas,
        num_stages=plan.job.stages,
        gpus_per_stage=cluster.gpus_per_stage,
        num_microbatches=plan.job.microbatches,
        iterations=tuple(iterations),
    )


def _announced_end_ns(factors: Factors, planned: Replay, conditions: Conditions) -> int:
    """T': when the last straggler will have finished, known from the iteration's start on."""
    slowest = max(factors, default=1.0)
    return max(conditions.sync_ns, math.ceil(planned.makespan_ns * slowest))


def _rungs_for(
    plan: Plan,
    profile: Profile,
    frontier: Frontier | None,
    ends_ns: Set[int],
    progress: Progress | None,
) -> list[Rung]:
    """Plans of the frontier to follow while somebody straggles.

    Args:
        plan: the plan of the job, which keeps its clocks and limits in all rungs.
        profile: the profile that it was made from.
        frontier: of the plan's job; None: traced.
        ends_ns: the times T' that stragglers make everybody finish at.
        progress: as for trace_frontier.
    """
    if not ends_ns:
        return []
    if frontier is None:
        frontier = trace_job(plan.job, as_referenced(plan.profile, profile), progress)
    request = plan.request.model_copy(
        update={"straggler_time_s": None, "run": None, "effort": Effort(ladder=LADDER)}
    )
    if len(ends_ns) > MAX_SEPARATE_RUNGS:
        plans = frontier.ladder_for(request)
    else:
        plans = frontier.plans_at(request, sorted(ends_ns))
    return [rung.as_rung() for rung in plans]


def _replays_of_rungs(
    plan: Plan, profile: Profile, rungs: Sequence[Rung], *, machine: Machine, force: bool
) -> list[Replay]:
    """The exact replay of each rung of a plan."""
    if not rungs:
        return []
    problem = replay_plan(plan, profile, force=force, machine=machine, rungs=rungs).problem
    return [
        problem.replay(rung_rows(f"ladder[{number}]", rung, problem), machine)
        for number, rung in enumerate(rungs)
    ]


@dataclass(frozen=True, eq=False)
class _ReplayedPlan:
    """A plan as it runs exactly, and under the conditions of a cluster."""

    exact: Replay
    conditions: Conditions

    @cached_property
    def runs(self) -> list[Replay]:
        """The plan under the conditions, run by run."""
        return list(self.conditions.replays(self.exact))


@dataclass(frozen=True)
class _ClusterSimulation:
    """Iterations of a cluster, from replays that were made beforehand.

    Attributes:
        cluster: its shape.
        sync_ns: no iteration is over before that.
        planned: the plan.
        rungs: the plans to look up.
        at_max_frequency: every operation at its highest frequency, clocks there from the start.
    """

    cluster: _Cluster
    sync_ns: int
    planned: _ReplayedPlan
    rungs: Sequence[_ReplayedPlan]
    at_max_frequency: _ReplayedPlan

    def iterations(self, factors: Factors, announced_ns: int) -> Iterator[ClusterIteration]:
        """An iteration for each run of the conditions.

        Args:
            factors: slowdowns of the stragglers.
            announced_ns: when the last of them will have finished.
        """
        followed = self._cheapest_in_time(announced_ns)
        for highest, planned, looked_up in zip(
            self.at_max_frequency.runs, self.planned.runs, followed.runs, strict=True
        ):
            times_ns = [math.ceil(planned.makespan_ns * factor) for factor in factors]
            # A straggler takes its time whatever it runs, but not less than maximum frequency does.
            highest_ns = [max(time_ns, highest.makespan_ns) for time_ns in times_ns]
            baseline = self._end(highest, stragglers=highest, times_ns=highest_ns)
            waited_for = self._end(planned, stragglers=planned, times_ns=times_ns)
            filled = self._end(looked_up, stragglers=planned, times_ns=times_ns)
            yield ClusterIteration(
                stragglers=len(factors),
                sync_time_s=filled.time_s,
                followed_time_s=s_from_ns(looked_up.makespan_ns),
                baseline_energy_j=baseline.energy_j,
                plan_energy_j=waited_for.energy_j,
                energy_j=filled.energy_j,
                baseline_time_s=baseline.time_s,
            )

    def _cheapest_in_time(self, end_ns: int) -> _ReplayedPlan:
        """The plan or rung of least energy, waiting included, that ends by a time."""
        plans = (self.planned, *self.rungs)
        in_time = [plan for plan in plans if plan.exact.makespan_ns <= end_ns]
        return min(in_time, key=lambda plan: plan.exact.energy_until(end_ns))

    @cached_property
    def _waiting_10uw(self) -> int:
        """Power of one waiting GPU of each stage, together, 10 uW."""
        return int(self.planned.exact.problem.blocking_power_10uw.sum())

    def _end(self, replay: Replay, *, stragglers: Replay, times_ns: Sequence[int]) -> _ClusterEnd:
        """The end of an iteration: when all have finished, and what all GPUs draw until then.

        A straggler takes its time at the average power that it has without straggling.

        Args:
            replay: what the replicas do that do not straggle.
            stragglers: what the stragglers would do without straggling.
            times_ns: how long each straggler takes.
        """
        num_replicas = self.cluster.replicas
        num_others = num_replicas - len(times_ns)
        others_end_ns = replay.makespan_ns if num_others else 0
        end_ns = max(self.sync_ns, others_end_ns, *times_ns)
        straggling_10fj = sum(
            stragglers.energy_10fj * time_ns // stragglers.makespan_ns for time_ns in times_ns
        )
        running_ns = num_others * replay.makespan_ns + sum(times_ns)
        waiting_ns = num_replicas * end_ns - running_ns
        waiting_10fj = self._waiting_10uw * waiting_ns
        energy_10fj = num_others * replay.energy_10fj + straggling_10fj + waiting_10fj
        return _ClusterEnd(
            s_from_ns(end_ns), j_from_10fj(energy_10fj * self.cluster.gpus_per_stage)
        )


@dataclass(frozen=True, slots=True)
class _ClusterEnd:
    """When an iteration is over for all replicas, and what all GPUs draw until then."""

    time_s: float
    energy_j: float


class ClusterFields(TypedDict, total=False):
    """Arguments of simulate_cluster that are the same for clusters of any shape."""

    slowdowns: Sequence[Slowdowns]
    gpus_per_stage: int | None
    conditions: Conditions


def strong_scaling(
    plan: Plan,
    profile: Profile,
    replicas: Sequence[int],
    *,
    global_batch: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
    **cluster: Unpack[ClusterFields],
) -> list[ClusterReport]:
    """Run the same global batch on more or fewer replicas, with fewer or more microbatches each.

    Each shape is traced and planned anew, by this library's own planner, for a deadline as far
    above its T_min as the plan's is above its own; this is how Perseus (SOSP 2024) emulates
    clusters of up to 8,192 GPUs.

    Args:
        plan: the plan whose job and slowdown are kept.
        profile: the profile that it was made from.
        replicas: for each shape, how many pipelines.
        global_batch: microbatches of all pipelines together; default: those of the plan's job.
        force: go on though the profile has changed since the plan was made.
        progress: as for trace_frontier.
        cluster: slowdowns, gpus_per_stage and conditions of every shape, as for simulate_cluster.

    Raises:
        InputError: the global batch does not divide by a number of replicas, the plan is of a
            custom DAG, or as for simulate_cluster and trace_frontier.
    """
    check_reference(plan.profile, profile, force)
    profile = as_referenced(plan.profile, profile)
    if plan.job.dag is not None:
        raise InputError("a custom DAG has a fixed number of microbatches; it cannot be scaled")
    total = global_batch or plan.job.microbatches * plan.job.replicas
    for count in replicas:
        if count < 1 or total % count:
            raise InputError(
                f"the global batch of {total} microbatches does not divide by {count} replicas"
            )
    unscaled = trace_job(plan.job, profile, progress)
    slowdown = max(0.0, plan.target.deadline_s / unscaled.min_time - 1)
    reports = []
    for count in replicas:
        shape = {"microbatches": total // count, "replicas": count}
        frontier = trace_job(plan.job.model_copy(update=shape), profile, progress)
        scaled = frontier.plan(slowdown=slowdown, switch_latency=0.0)
        reports.append(simulate_cluster(scaled, profile, frontier, **cluster))
    return reports


def read_slowdowns(path: str | os.PathLike[str], replicas: int) -> list[dict[int, float]]:
    """Read the stragglers of each iteration from a CSV file.

    Its header is `iteration,replica,slowdown`, iterations and replicas counting from 0. A replica
    without a row in an iteration keeps to the plan. Each iteration from 0 to the last has at least
    one row: where nobody straggles, one with slowdown 1.

    Args:
        path: the file.
        replicas: how many the cluster has.

    Returns:
        For each iteration the slowdowns by replica.

    Raises:
        InputError: the file cannot be read, an iteration is missing, a replica is unknown or twice
            in an iteration, or a slowdown is not above 0; says the line.
    """
    table = read_table(path, _SlowdownRow, kind="a table of stragglers")
    iterations: dict[int, dict[int, float]] = {}
    for row_index, row in enumerate(table.rows()):
        if row.replica >= replicas:
            words = f"{row.replica} is unknown; the cluster has replicas 0 to {replicas - 1}"
            raise table.error(row_index, words, "replica")
        stragglers = iterations.setdefault(row.iteration, {})
        if row.replica in stragglers:
            words = f"repeats replica {row.replica} of iteration {row.iteration}"
            raise table.error(row_index, words)
        stragglers[row.replica] = row.slowdown
    for number in range(len(iterations)):
        if number not in iterations:
            raise InputError(
                f"has a gap: no row for iteration {number}, but one for {max(iterations)}; give "
                "an iteration without stragglers a row with slowdown 1",
                path=path,
            )
    return [iterations[number] for number in range(len(iterations))]
