"""Minimum cuts against networkx."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envplan.errors import InputError, NoAnswerError
from envplan.frontier.mincut import UNLIMITED, minimum_cut

ARCS = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 9), st.integers(0, 9)),
    max_size=14,
)


@given(ARCS)
def test_value_and_side_equal_networkx(arcs: list[tuple[int, int, int, int]]) -> None:
    graph = nx.DiGraph()
    graph.add_nodes_from(range(6))
    for tail, head, capacity, _ in arcs:
        before = graph.get_edge_data(tail, head, {"capacity": 0})["capacity"]
        graph.add_edge(tail, head, capacity=before + capacity)
    tail, head, upper, _ = zip(*arcs, strict=True) if arcs else ((), (), (), ())
    cut = minimum_cut(tail, head, upper, source=0, sink=5, num_nodes=6)
    assert cut.value == nx.maximum_flow_value(graph, 0, 5)
    leaving = sum(c for t, h, c, _ in arcs if cut.source_side[t] and not cut.source_side[h])
    assert leaving == cut.value


@given(ARCS)
def test_lower_bounds_are_kept_or_a_violated_cut_is_named(
    arcs: list[tuple[int, int, int, int]],
) -> None:
    tail, head, lower, more = np.array(arcs, np.int64).reshape(-1, 4).T
    upper = lower + more
    try:
        cut = minimum_cut(tail, head, upper, lower=lower, source=0, sink=5, num_nodes=6)
    except NoAnswerError:
        assert not _feasible(arcs)
        return
    assert np.all(lower <= cut.flow)
    assert np.all(cut.flow <= upper)
    net = np.zeros(6, np.int64)
    np.subtract.at(net, tail, cut.flow)
    np.add.at(net, head, cut.flow)
    assert net[0] == -cut.value
    assert net[5] == cut.value
    assert np.all(net[1:5] == 0)
    inside = cut.source_side
    leaving, entering = inside[tail] & ~inside[head], inside[head] & ~inside[tail]
    assert upper[leaving].sum() - lower[entering].sum() == cut.value


def _feasible(arcs: list[tuple[int, int, int, int]]) -> bool:
    """Hoffman's circulation theorem with an unlimited arc between sink and source, both ways."""
    for side in range(2**6):
        inside = [side >> v & 1 for v in range(6)]
        if inside[0] != inside[5]:
            continue
        entering = sum(low for t, h, low, _ in arcs if inside[h] and not inside[t])
        leaving = sum(low + m for t, h, low, m in arcs if inside[t] and not inside[h])
        if entering > leaving:
            return False
    return True


def test_unlimited_path_has_no_answer() -> None:
    with pytest.raises(NoAnswerError, match="unbounded"):
        minimum_cut([0, 1], [1, 2], [UNLIMITED, UNLIMITED], source=0, sink=2)


def test_lower_bound_that_nothing_feeds_has_no_answer() -> None:
    with pytest.raises(NoAnswerError, match="must bring 3 more"):
        minimum_cut([0, 1], [1, 2], [2, 9], lower=[0, 5], source=0, sink=2)


@pytest.mark.parametrize(
    ("tail", "head", "upper"), [([0], [9], [1]), ([-1], [1], [1]), ([0], [1], [-1])]
)
def test_what_is_not_a_graph_is_refused(tail: list[int], head: list[int], upper: list[int]) -> None:
    with pytest.raises(InputError):
        minimum_cut(tail, head, upper, source=0, sink=1, num_nodes=2)
