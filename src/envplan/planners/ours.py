"""Our own planner: the frontier's plan, never worse than a plan it is shown."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from envplan.units import ns_from_s, s_from_ns

if TYPE_CHECKING:
    from envplan.frontier import Frontier
    from envplan.plan import Plan


class FrontierPlanner:
    """The exact relaxation, rounded: Frontier.plan behind the planners' protocol."""

    name: Final = "frontier"
    takes_target: Final = True

    def plan(self, frontier: Frontier, target_time_ns: int | None = None) -> Plan:
        """Raises: NoAnswerError: the target is below T_min."""
        if target_time_ns is None:
            return frontier.plan()
        return frontier.plan(s_from_ns(target_time_ns))


def plan_in_view_of(frontier: Frontier, time_ns: int, others: Iterable[Plan]) -> Plan:
    """Our plan for a time, given what other planners make of the same pipeline.

    Rounding is a heuristic: once in a while another planner's choice happens to lie closer to the
    bound than what it finds. Then the same local search starts again from that choice, and what
    comes out uses at most as much energy.

    Args:
        time_ns: when the iteration must be over, not below T_min, ns.
        others: plans of the same pipeline; those that are slower are passed over.
    """
    best = frontier.plan(s_from_ns(time_ns))
    for other in others:
        taken_ns = ns_from_s(other.iteration_time)
        if taken_ns > time_ns or other.energy >= best.energy:
            continue
        star_ns = frontier.min_energy_time_ns
        deadline_ns = max(taken_ns, min(time_ns, star_ns))
        # Beyond T_star the relaxed plan waits for nobody, but a discrete one may be lucky there.
        kind = "time" if deadline_ns <= star_ns else "planner"
        best = frontier.priced_plan(
            search_from(frontier, options_of(frontier, other), deadline_ns),
            {"kind": kind, "time_s": s_from_ns(time_ns if kind == "time" else deadline_ns)},
            deadline_ns,
        )
    return best


def plan_to_wait_in_view_of(frontier: Frontier, time_ns: int, others: Iterable[Plan]) -> Plan:
    """Likewise, where everybody waits until time_ns however early they are: beyond T_star, too."""
    target: dict[str, float | str] = {"kind": "sync-time", "time_s": s_from_ns(time_ns)}
    best = frontier.plan_for_sync(s_from_ns(time_ns))
    for other in others:
        if ns_from_s(other.iteration_time) <= time_ns and other.beats_where_there_is_time(best):
            latest_ns = min(time_ns, frontier.slowest_time_ns)
            deadline_ns = max(latest_ns, ns_from_s(other.iteration_time))
            found = search_from(frontier, options_of(frontier, other), deadline_ns)
            best = frontier.priced_plan(found, target, time_ns)
    return best


def search_from(
    frontier: Frontier, options: NDArray[np.int32], deadline_ns: int
) -> NDArray[np.int32]:
    """Local search from a choice of options that meets the deadline.

    The choice's own replay takes the place of the relaxed optimum: diffusion lets each operation
    use what its predecessors left it, until the finish it had, so no operation gets dearer.

    Returns:
        Options, (N,), that meet the deadline and cost no more.
    """
    from envplan.frontier.network import build_network, replayed_events
    from envplan.frontier.rounding import Rounding
    from envplan.plan import option_tables

    pipeline = frontier.pipeline
    tables = option_tables(pipeline, frontier.profile)
    time_ns = np.array(
        [table.time_ns[row] for table, row in zip(tables, options.tolist(), strict=True)], np.int64
    )
    network = build_network(pipeline, frontier.profile, frontier.blocking_power_uw)
    rounding = Rounding(pipeline, network, replayed_events(pipeline, time_ns), deadline_ns)
    rounding.anneal()
    return rounding.options


def options_of(frontier: Frontier, plan: Plan) -> NDArray[np.int32]:
    """For each operation the row of its option table that a plan of this pipeline chose, (N,)."""
    from envplan.plan import rows_by_knobs

    planned = (operation for stage in plan.stages for operation in stage)
    knobs = rows_by_knobs(frontier.pipeline, frontier.profile)
    chosen = [
        rows[operation.frequency_mhz, operation.config]
        for operation, rows in zip(planned, knobs, strict=True)
    ]
    return np.array(chosen, np.int32)
