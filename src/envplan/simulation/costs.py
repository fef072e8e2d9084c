"""Costs of a plan as it was replayed."""

from __future__ import annotations

from envplan.costs.model import Run, RunCosts
from envplan.costs.pricing import price_iteration_and_run
from envplan.simulation.iteration import Timeline
from envplan.units import j_from_10fj, ns_from_s, s_from_ns


def price_replays(run: Run, timeline: Timeline, sync_time: float | None = None) -> RunCosts:
    """Cost of an iteration, on average of all replays of a timeline, and of the run.

    Args:
        run: the training run, with the rates of energy.
        timeline: the replays.
        sync_time: s; an iteration is over only then.

    Raises:
        InputError: a rate ends before the run does.
    """
    plan, num_runs = timeline.plan, len(timeline.run_times_ns)
    sync_ns = ns_from_s(sync_time or 0.0)
    total_ns = sum(max(time_ns, sync_ns) for time_ns in timeline.run_times_ns)
    total_10fj = sum(timeline.run_energies_10fj)
    iteration = plan.until(
        plan.target.straggler_time_s or 0.0,
        s_from_ns(total_ns) / num_runs,
        j_from_10fj(total_10fj) / num_runs,
    )
    return price_iteration_and_run(iteration, run, plan.job.all_gpus)
