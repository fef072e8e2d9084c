"""Independent ways to compute what the kernel computes."""

from __future__ import annotations

import numpy as np
from ortools.graph.python.min_cost_flow import SimpleMinCostFlow
from scipy.optimize import linprog
from scipy.sparse import csr_matrix

from envplan.frontier.network import Network


def relaxed_cost_by_lp(network: Network, time_ns: int) -> float:
    """Least sum of effective costs, 10 fJ, of finishing by time_ns: HiGHS on the primal LP.

    Variables: every event's time, and how much of each segment each operation is sped up by.
    """
    events = network.num_nodes
    rows, columns, values, bounds_below = [], [], [], []
    costs, upper = [0.0] * events, [float(time_ns)] * events
    for row, (tail, head, curve) in enumerate(
        zip(network.tail.tolist(), network.head.tolist(), network.curve.tolist(), strict=True)
    ):
        begin, end = network.costs.begin[curve], network.costs.begin[curve + 1]
        duration = network.costs.duration_ns[begin:end].tolist()
        # time[head] - time[tail] + sum of speed-ups >= slowest duration
        rows += [row, row]
        columns += [head, tail]
        values += [1.0, -1.0]
        bounds_below.append(float(duration[0]))
        for level in range(len(duration) - 1):
            rows.append(row)
            columns.append(len(costs))
            values.append(1.0)
            costs.append(float(network.costs.slope_10uw[begin + level]))
            upper.append(float(duration[level] - duration[level + 1]))
    matrix = csr_matrix((values, (rows, columns)), (len(bounds_below), len(costs)))
    scale, dearest = max(upper), max(1.0, *costs)  # HiGHS wants numbers near one
    result = linprog(
        np.array(costs) / dearest,
        A_ub=-matrix,
        b_ub=-np.array(bounds_below) / scale,
        bounds=np.column_stack([np.zeros(len(costs)), np.array(upper) / scale]),
        method="highs",
        options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
    )
    assert result.status == 0, result.message
    return network.base_cost_10fj + float(result.fun) * dearest * scale


def relaxed_dual_by_min_cost_flow(network: Network, flow_10uw: int) -> int:
    """Min over T of (sum of effective costs at T) + flow x T, 10 fJ, exactly: SimpleMinCostFlow.

    Each operation is a bundle of parallel arcs; the cost of an arc is minus its duration.
    """
    tails, heads, capacities, costs = [], [], [], []
    for tail, head, curve in zip(
        network.tail.tolist(), network.head.tolist(), network.curve.tolist(), strict=True
    ):
        begin, end = network.costs.begin[curve], network.costs.begin[curve + 1]
        below = 0
        for level in range(begin, end):
            limit = min(int(network.costs.slope_10uw[level]), below + flow_10uw)
            tails.append(tail)
            heads.append(head)
            capacities.append(limit - below)
            costs.append(-int(network.costs.duration_ns[level]))
            below = limit
    solver = SimpleMinCostFlow()
    solver.add_arcs_with_capacity_and_unit_cost(
        np.array(tails), np.array(heads), np.array(capacities), np.array(costs)
    )
    solver.set_nodes_supplies(
        np.array([network.source, network.sink]), np.array([flow_10uw, -flow_10uw])
    )
    assert solver.solve() == solver.OPTIMAL
    # Strong duality: the dual's value is the longest flow's length. Summed here in unbounded
    # integers, for the solver's own sum stops at 64 bits.
    flows = solver.flows(np.arange(len(costs))).tolist()
    return network.base_cost_10fj - sum(f * c for f, c in zip(flows, costs, strict=True))
