"""One point of the frontier from ortools' minimum-cost flow, on the same activity network."""

from __future__ import annotations

import numpy as np
from ortools.graph.python.min_cost_flow import SimpleMinCostFlow

from envplan.frontier import Network


class FlowPoint:
    """The network of one solve: a bundle of parallel arcs for each activity.

    An activity whose curve has durations D_0 > D_1 > ... and marginal costs s_1 < s_2 < ... gets
    arcs of duration D_0 with capacity s_1, D_1 with s_2 - s_1, and so on, the last without limit.
    The flow of a given value that is longest, its durations weighed, then is the dual optimum of
    least cost + flow value x iteration time (Phillips and Dessouky, Management Science 1977).

    Args:
        flow_10uw: flow value, 10 uW. At the power of all waiting GPUs the optimum is E(T_star).
    """

    def __init__(self, network: Network, flow_10uw: int) -> None:
        costs = network.costs
        begin, end = costs.begin[network.curve], costs.begin[network.curve + 1]
        count = end - begin
        first = np.repeat(np.cumsum(count) - count, count)
        level = np.repeat(begin, count) + np.arange(len(first)) - first
        limit = np.minimum(costs.slope_10uw, flow_10uw)
        starts = np.zeros(len(limit), bool)
        starts[costs.begin[:-1]] = True
        width = limit - np.where(starts, 0, np.roll(limit, 1))
        self._duration = costs.duration_ns[level]
        self._base_cost_10fj = network.base_cost_10fj
        self._solver = SimpleMinCostFlow()
        self._arcs = self._solver.add_arcs_with_capacity_and_unit_cost(
            np.repeat(network.tail, count),
            np.repeat(network.head, count),
            width[level],
            -self._duration,
        )
        self._solver.set_node_supply(network.source, flow_10uw)
        self._solver.set_node_supply(network.sink, -flow_10uw)

    def solve(self) -> None:
        """What is timed."""
        if (status := self._solver.solve()) != self._solver.OPTIMAL:
            raise RuntimeError(f"SimpleMinCostFlow ends with {status}")

    def energy_10fj(self) -> int:
        """Least cost + flow value x iteration time, 10 fJ.

        The flow's cost outgrows ortools' int64.
        """
        flows = self._solver.flows(self._arcs).tolist()
        used = zip(flows, self._duration.tolist(), strict=True)
        total: int = sum(flow * duration for flow, duration in used if flow)
        return self._base_cost_10fj + total
