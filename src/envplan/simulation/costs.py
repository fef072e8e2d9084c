"""What replays of a plan cost."""

from __future__ import annotations

from envplan.costs.model import Run, RunCosts
from envplan.costs.pricing import price_iteration_and_run
from envplan.simulation.iteration import Timeline
from envplan.units import j_from_fj, ns_from_s, s_from_ns


def spent_in_replays(run: Run, timeline: Timeline, sync_time: float | None = None) -> RunCosts:
    """What an iteration costs, on average of all replays of a timeline, and what the run does.

    Args:
        sync_time: s; an iteration is over only then.

    Raises:
        InputError: a rate ends before the run does.
    """
    runs, least_ns, plan = len(timeline.run_times_ns), ns_from_s(sync_time or 0.0), timeline.plan
    time_s = s_from_ns(sum(max(time, least_ns) for time in timeline.run_times_ns)) / runs
    energy_j = j_from_fj(sum(timeline.run_energies_fj)) / runs
    until_s = plan.target.straggler_time_s or 0.0
    iteration = plan.until(until_s, time_s, energy_j)
    return price_iteration_and_run(iteration, run, plan.job.all_gpus)
