"""Starts for a search under late and held clocks: every stage's cheapest way at some prices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from envplan.errors import InputError
from envplan.frontier import Relaxation
from envplan.replay import Rows
from envplan.solve.late_bound import ClockLimits, FlowPrices, cheapest_stage_paths

#: Stages keep to their prices, not to each other's times, so together they are late: by 0.6 to 3%
#: of a typical deadline. Prices that are higher by so much make up for that.
PRICE_FACTORS: Final[tuple[float, ...]] = (1.0, 1.2, 1.5)


def stage_path_starts(
    relaxation: Relaxation,
    deadline_ns: int,
    clocks: ClockLimits,
    *,
    change_10fj: float = 0.0,
    price_factors: Sequence[float] = PRICE_FACTORS,
) -> list[Rows]:
    """Choices of rows to start a search from: each stage's cheapest one, at prices of a deadline.

    A stage holds its clocks as `clocks` says and knows what late ones cost. It does not know when
    the others are done, so a choice may end somewhat late or early: it is to be repaired by a
    search on the exact replay.

    Args:
        relaxation: of the pipeline.
        deadline_ns: that plans are searched for, ns.
        clocks: how late they come and how long they are held.
        price_factors: of the deadline's prices, in the order of the starts.
        change_10fj: what each request for another clock costs, 10 fJ: with more, there are fewer.

    Returns:
        The rows of each operation's table, int32 (N,), all different. None
        where clocks change within operations, or the deadline is before T_min.
    """
    if deadline_ns < relaxation.min_time_ns:
        return []
    starts: list[Rows] = []
    known: set[bytes] = set()
    relaxed = FlowPrices.relaxed(relaxation, deadline_ns)
    for factor in price_factors:
        prices = relaxed.scaled_to(int(relaxed.total_10uw * factor), relaxation.pipeline)
        try:
            rows = cheapest_stage_paths(
                relaxation.problem,
                prices,
                clocks.machine,
                min_dwell_ns=clocks.min_dwell_ns,
                change_10fj=change_10fj,
            ).rows
        except InputError:
            return []
        if rows.tobytes() not in known:
            known.add(rows.tobytes())
            starts.append(rows)
    return starts
