"""Caps on the average power that no plan up to T_star keeps.

Beyond T_star energy rises again, but by less than the time does, so that the average power goes on
falling up to T_max, the end of the frontier. The power of some rows is lower still, though waiting
instead would use less energy; they come last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

from envplan.errors import NoAnswerError
from envplan.power import option_powers_uw
from envplan.units import w_from_uw

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from envplan.frontier.trace import Frontier
    from envplan.plan import Plan
    from envplan.profile import OptionTable

__all__ = ["least_average_uw", "slow_plan_under_cap"]

_STEPS: Final = 1000  # of the time between T_star and T_max


def slow_plan_under_cap(frontier: Frontier, watts: float, target: dict[str, float | str]) -> Plan:
    """The fastest plan found beyond T_star whose average power over all GPUs is at most `watts`.

    Args:
        target: what was asked.

    Raises:
        NoAnswerError: none is known; says what every plan draws at least, and the least found.
    """
    thrifty = _thriftiest_rows(frontier)
    proven = w_from_uw(least_average_uw(frontier) * frontier.gpus_per_stage * frontier.replicas)
    least = frontier.priced_plan(thrifty, target, _makespan_ns(frontier, thrifty))
    if proven <= watts:
        star, slowest = frontier.min_energy_time_ns, frontier.slowest_time_ns

        def at(time_ns: int) -> Plan:
            return frontier.priced_plan(frontier.rounding_at(time_ns).options, target, time_ns)

        found = _first_that_meets(at, watts, star, slowest, max(1, (slowest - star) // _STEPS))
        if found is not None:
            return found
        usual = frontier.rounding_at(slowest).options
        position = np.argsort(frontier.pipeline.order)

        def with_thrifty(count: int) -> Plan:
            """The first `count` operations by their thriftiest rows."""
            options = np.where(position < count, thrifty, usual).astype(np.int32)
            return frontier.priced_plan(options, target, _makespan_ns(frontier, options))

        found = _first_that_meets(with_thrifty, watts, 0, len(thrifty), 1)
        if found is not None:
            return found
        least = min(at(slowest), least, key=lambda plan: plan.average_power)
    raise NoAnswerError(
        f"no plan draws {watts:.10g} W or less on average: every plan draws {proven:.10g} W or "
        f"more; the least found is {least.average_power:.10g} W at {least.iteration_time:.9f} s"
    )


def least_average_uw(frontier: Frontier) -> int:
    """A power that no plan is below on average, uW, of one GPU a stage.

    Energy is that of waiting all the time and what running costs beyond that. The latter is least
    with each operation's cheapest row, and is spread over no more time than the slowest rows take.
    """
    from envplan.plan import option_tables

    pipeline, powers = frontier.pipeline, frontier.blocking_power_uw
    tables = option_tables(pipeline, frontier.profile)
    least: dict[tuple[int, int], int] = {}
    cost_fj = 0
    for op, table in zip(pipeline.operations, tables, strict=True):
        key = (id(table), powers[op.stage])
        if key not in least:
            least[key] = int((table.energy_fj - powers[op.stage] * table.time_ns).min())
        cost_fj += least[key]
    longest = np.array([int(table.time_ns.max()) for table in tables], np.int64)
    slowest_ns = pipeline.earliest_starts(longest)[1]
    spread = cost_fj // (slowest_ns if cost_fj > 0 else frontier.min_time_ns)
    return max(0, sum(powers) + spread)


def _first_that_meets(
    plan_at: Callable[[int], Plan], watts: float, low: int, high: int, step: int
) -> Plan | None:
    """The plan of the least number found, after `low` and up to `high`; None if high's does not."""
    best = plan_at(high)
    if best.average_power > watts:
        return None
    while high - low > step:
        middle = (low + high) // 2
        plan = plan_at(middle)
        if plan.average_power <= watts:
            best, high = plan, middle
        else:
            low = middle
    return best


def _thriftiest_rows(frontier: Frontier) -> NDArray[np.int32]:
    """For each operation a row, so that every stage draws least on average while it runs, (N,)."""
    from envplan.plan import option_tables

    tables = option_tables(frontier.pipeline, frontier.profile)
    bounds = pairwise(frontier.pipeline.stage_begin.tolist())
    rows = [row for begin, end in bounds for row in _least_ratio(tables[begin:end])]
    return np.array(rows, np.int32)


def _least_ratio(tables: Sequence[OptionTable]) -> list[int]:
    """The row of each table with which energy over time, of all together, is least.

    Dinkelbach ("On Nonlinear Fractional Programming", Management Science 13, 1967): take the rows
    that are cheapest at the power so far, and their power next, until it falls no more.
    """
    distinct = {id(table): table for table in tables}
    first = {key: int(option_powers_uw(table).argmin()) for key, table in distinct.items()}
    rows = [first[id(table)] for table in tables]
    while True:
        energy, time = _sums(tables, rows)
        cheapest = {key: _cheapest(table, energy, time) for key, table in distinct.items()}
        better = [cheapest[id(table)] for table in tables]
        least, longer = _sums(tables, better)
        if least * time >= energy * longer:
            return rows
        rows = better


def _cheapest(table: OptionTable, energy_fj: int, time_ns: int) -> int:
    """The row of least cost where time costs energy_fj / time_ns."""
    costs = [
        time_ns * e - energy_fj * t
        for e, t in zip(table.energy_fj.tolist(), table.time_ns.tolist(), strict=True)
    ]
    return costs.index(min(costs))


def _sums(tables: Sequence[OptionTable], rows: Sequence[int]) -> tuple[int, int]:
    """Energy in fJ and time in ns of the rows together."""
    pairs = list(zip(tables, rows, strict=True))
    return (
        sum(int(table.energy_fj[row]) for table, row in pairs),
        sum(int(table.time_ns[row]) for table, row in pairs),
    )


def _makespan_ns(frontier: Frontier, options: NDArray[np.int32]) -> int:
    from envplan.plan import price

    pipeline, profile = frontier.pipeline, frontier.profile
    return price(pipeline, profile, options, frontier.blocking_power_uw).makespan_ns
