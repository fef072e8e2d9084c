"""Many replicas of a pipeline, some of them slower than the rest.

A straggler makes every replica finish at T' (Perseus, SOSP 2024). Replicas that have time to spare
can then follow the frontier's plan for T' instead of waiting: that saves extrinsic bloat, on top of
the intrinsic bloat that the plan itself saves. Replicas that do the same are counted, not simulated
again, so a cluster costs no more than one of its pipelines.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Annotated, Any, Final

from pydantic import BaseModel, Field

from envplan._io.documents import GpuCount, Model
from envplan._io.tables import read_table
from envplan.costs import Run
from envplan.costs.model import RunComparison, TimeAndEnergy
from envplan.costs.pricing import compare_costs
from envplan.errors import InputError
from envplan.frontier import Progress
from envplan.plan import Plan, as_referenced, check_reference, replay_plan, rung_rows
from envplan.plan.build import percent
from envplan.profile import Profile
from envplan.replay import Replay
from envplan.request import Effort
from envplan.simulation.iteration import PLANNED, Conditions
from envplan.solve import Frontier, trace_job
from envplan.solve.frontier import LADDER
from envplan.units import j_from_fj, s_from_ns

__all__ = [
    "ClusterReport",
    "Slowdowns",
    "read_slowdowns",
    "simulate_cluster",
    "strong_scaling",
]

#: Slowdown of each straggler in an iteration, by replica; all others keep to the plan's time.
Slowdowns = Mapping[int, float]

#: Up to so many straggler times are planned for one by one; for more, a whole ladder is made.
MOST_OWN_RUNGS: Final = 8

_Whole = Annotated[int, Field(ge=0, le=10**9, description="a whole number from 0 up")]
_Factor = Annotated[
    float,
    Field(gt=0, le=1e6, allow_inf_nan=False, description="a factor above 0 and up to 1e+06"),
]


class _Slowdown(BaseModel):
    iteration: _Whole
    replica: _Whole
    slowdown: _Factor


class _Cluster(Model):
    """What is asked of a cluster."""

    replicas: GpuCount
    gpus_per_stage: GpuCount
    slowdowns: Annotated[list[dict[int, _Factor]], Field(min_length=1)]


@dataclass(frozen=True)
class ClusterReport:
    """What a cluster uses over some iterations, and where the savings come from. Energies are
    joules over all GPUs and all iterations.

    Attributes:
        replicas, num_stages, gpus_per_stage: the shape of the cluster.
        num_microbatches: of one pipeline.
        iterations: one or more, each in three ways of running it, in JSON types: how many
            `stragglers` are slower than the plan; `sync_time_s`, when the last replica has finished
            with it; `followed_time_s`, iteration time of the plan that the other replicas follow;
            `baseline_energy_j` and `baseline_time_s`, all at maximum frequency; `plan_energy_j`,
            all with the plan, the others waiting for the stragglers; `energy_j`, the others with
            the plan looked up for T'.
        time, baseline_time: s that all iterations take with the plan, and at maximum frequency.
        baseline_energy: with everything at maximum frequency.
        plan_energy: with the plan everywhere, whoever straggles.
        energy: with the plan, and with those looked up while somebody straggles.
    """

    replicas: int
    num_stages: int
    gpus_per_stage: int
    num_microbatches: int
    iterations: tuple[dict[str, Any], ...]
    time: float
    baseline_time: float
    baseline_energy: float
    plan_energy: float
    energy: float

    @property
    def num_gpus(self) -> int:
        """GPUs of the whole cluster."""
        return self.replicas * self.num_stages * self.gpus_per_stage

    @property
    def intrinsic_savings(self) -> float:
        """J that the plan saves."""
        return self.baseline_energy - self.plan_energy

    @property
    def extrinsic_savings(self) -> float:
        """J that looking plans up for the stragglers' time saves on top."""
        return self.plan_energy - self.energy

    def costs(self, run: Run) -> RunComparison:
        """What an iteration costs on average, and what a run of many does.

        Raises:
            InputError: a rate ends before the run does.
        """
        count = len(self.iterations)
        before = TimeAndEnergy(self.baseline_time / count, self.baseline_energy / count)
        after = TimeAndEnergy(self.time / count, self.energy / count)
        return compare_costs(before, after, run, self.num_gpus)

    def percent(self, joules: float) -> float:
        """Joules as percent of the baseline's."""
        return percent(joules, self.baseline_energy)

    def to_dict(self) -> dict[str, Any]:
        """In JSON types; iterations that are alike are listed one by one."""
        saved = {"intrinsic": self.intrinsic_savings, "extrinsic": self.extrinsic_savings}
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
            **{f"{kind}_savings_j": joules for kind, joules in saved.items()},
            **{f"{kind}_savings_percent": self.percent(one) for kind, one in saved.items()},
            "iterations": [
                {name: value for name, value in one.items() if name != "baseline_time_s"}
                for one in self.iterations
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
        frontier: of the plan's job; default: traced where it is needed.
        slowdowns: for each iteration its stragglers.
        replicas: default: those of the plan's job.
        gpus_per_stage: likewise.
        conditions: what all replicas meet; with several runs each iteration is run so often. Noise
            is drawn alike for all replicas.
        force: go on though the profile has changed since the plan was made.
        progress: as for trace_frontier.

    Raises:
        InputError: a number is out of range, a straggler is no replica of the cluster, or as for
            simulate.
    """
    job, machine = plan.job, conditions.machine(plan.job)
    cluster = _Cluster.of(
        replicas=job.replicas if replicas is None else replicas,
        gpus_per_stage=job.gpus_per_stage if gpus_per_stage is None else gpus_per_stage,
        slowdowns=list(map(dict, slowdowns)),
    )
    for replica in chain.from_iterable(cluster.slowdowns):
        if not 0 <= replica < cluster.replicas:
            raise InputError(
                f"there is no replica {replica} to straggle; the cluster has replicas 0 to "
                f"{cluster.replicas - 1}"
            )
    stragglers = [
        tuple(sorted(x for x in factors.values() if x > 1)) for factors in cluster.slowdowns
    ]
    own = replay_plan(plan, profile, force=force, machine=machine)
    known_end_ns = {  # from the start on
        factors: max(conditions.sync_ns, math.ceil(own.makespan_ns * max((1.0, *factors))))
        for factors in dict.fromkeys(stragglers)
    }
    waits = sorted({*known_end_ns.values()} - {own.makespan_ns})
    rungs = plan.ladder or []
    if plan.ladder is None and waits:
        frontier = frontier or trace_job(job, as_referenced(plan.profile, profile), progress)
        # Whatever the plan keeps, those looked up keep with the request's clocks and limits.
        asked = {"straggler_time_s": None, "run": None, "effort": Effort(ladder=LADDER)}
        request = plan.request.model_copy(update=asked)
        if len(waits) > MOST_OWN_RUNGS:
            looked_up = frontier.ladder_for(request)
        else:
            looked_up = frontier.plans_at(request, waits)
        rungs = [one.as_rung() for one in looked_up]
    problem = replay_plan(plan, profile, force=force, machine=machine, rungs=rungs).problem
    fastest = problem.replay(problem.max_frequency_rows)
    rows = [rung_rows(f"ladder[{n}]", rung, problem) for n, rung in enumerate(rungs)]
    ways = [own, *(problem.replay(one, machine) for one in rows)]
    waiting_uw = int(problem.blocking_power_uw.sum())

    @cache
    def runs(way: Replay) -> list[Replay]:
        return list(conditions.replays(way))

    def until_all(way: Replay, slow: Replay, times: Sequence[int]) -> tuple[float, float]:
        """When all have finished, s, and what all GPUs draw until then, J.

        A straggler takes its time at the average power that it has without straggling.
        """
        others = cluster.replicas - len(times)
        end_ns = max(conditions.sync_ns, way.makespan_ns if others else 0, *times)
        straggling_fj = sum(slow.energy_fj * time // slow.makespan_ns for time in times)
        waited_ns = cluster.replicas * end_ns - others * way.makespan_ns - sum(times)
        all_fj = others * way.energy_fj + straggling_fj + waiting_uw * waited_ns
        return s_from_ns(end_ns), j_from_fj(all_fj * cluster.gpus_per_stage)

    found: dict[tuple[float, ...], list[dict[str, Any]]] = {}
    for factors, end_ns in known_end_ns.items():
        in_time = [way for way in ways if way.makespan_ns <= end_ns]
        best = min(in_time, key=lambda way: way.energy_until(end_ns))
        found[factors] = []
        for highest, usual, followed in zip(runs(fastest), runs(own), runs(best), strict=True):
            times = [math.ceil(usual.makespan_ns * factor) for factor in factors]
            # A straggler takes its time whatever it runs, but not less than maximum frequency does.
            slowed = [max(time, highest.makespan_ns) for time in times]
            baseline_s, baseline_j = until_all(highest, highest, slowed)
            sync_s, energy_j = until_all(followed, usual, times)
            found[factors].append(
                {
                    "stragglers": len(factors),
                    "sync_time_s": sync_s,
                    "followed_time_s": s_from_ns(followed.makespan_ns),
                    "baseline_energy_j": baseline_j,
                    "plan_energy_j": until_all(usual, usual, times)[1],
                    "energy_j": energy_j,
                    "baseline_time_s": baseline_s,
                }
            )
    listed = tuple(chain.from_iterable(found[factors] for factors in stragglers))

    def total(name: str) -> float:
        return math.fsum(one[name] for one in listed)

    return ClusterReport(
        replicas=cluster.replicas,
        num_stages=job.stages,
        gpus_per_stage=cluster.gpus_per_stage,
        num_microbatches=job.microbatches,
        iterations=listed,
        time=total("sync_time_s"),
        baseline_time=total("baseline_time_s"),
        baseline_energy=total("baseline_energy_j"),
        plan_energy=total("plan_energy_j"),
        energy=total("energy_j"),
    )


def strong_scaling(
    plan: Plan,
    profile: Profile,
    replicas: Sequence[int],
    *,
    global_batch: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
    **how: Any,
) -> list[ClusterReport]:
    """The same global batch on more or fewer replicas, so with fewer or more microbatches each.

    Each shape is traced and planned anew, by this library's own planner, for a deadline as far
    above its T_min as the plan's is above its own; this is how Perseus (SOSP 2024) emulates
    clusters of up to 8,192 GPUs.

    Args:
        replicas: for each shape, how many pipelines.
        global_batch: microbatches of all pipelines together; default: those of the plan's job.
        force, progress: as for simulate_cluster.
        how: slowdowns, gpus_per_stage and conditions of every shape, as for simulate_cluster.

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
    own = trace_job(plan.job, profile, progress)
    slowdown = max(0.0, plan.target.deadline_s / own.min_time - 1)
    reports = []
    for count in replicas:
        shape = {"microbatches": total // count, "replicas": count}
        frontier = trace_job(plan.job.model_copy(update=shape), profile, progress)
        planned = frontier.plan(slowdown=slowdown)
        reports.append(simulate_cluster(planned, profile, frontier, **how))
    return reports


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
        known = f"is unknown; the cluster has replicas 0 to {replicas - 1}"
        if row.replica >= replicas:
            raise table.error(number, f"{row.replica} {known}", "replica")
        stragglers = iterations.setdefault(row.iteration, {})
        if row.replica in stragglers:
            raise table.error(number, f"repeats replica {row.replica} of iteration {row.iteration}")
        stragglers[row.replica] = row.slowdown
    missing = next((k for k in range(len(iterations)) if k not in iterations), None)
    if missing is not None:
        raise InputError(
            f"has a gap: no row for iteration {missing}, but one for {max(iterations)}; give "
            "an iteration without stragglers a row with slowdown 1",
            path=path,
        )
    return [iterations[k] for k in range(len(iterations))]
