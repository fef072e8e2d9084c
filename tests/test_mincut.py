"""Minimum cuts: each proves itself, and where there is none, Hoffman's theorem does."""

from __future__ import annotations

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


@given(ARCS, st.booleans())
def test_cut_proves_the_flow_and_lower_bounds_are_kept_where_they_can_be(
    arcs: list[tuple[int, int, int, int]], bounded: bool
) -> None:
    arcs = [(t, h, low * bounded, more) for t, h, low, more in arcs]
    tail, head, lower, more = np.array(arcs, np.int64).reshape(-1, 4).T
    upper, bounds = lower + more, {"lower": lower} if bounded else {}
    try:
        cut = minimum_cut(tail, head, upper, source=0, sink=5, num_nodes=6, **bounds)
    except NoAnswerError:
        assert not _feasible(arcs)
        return
    assert np.all(lower <= cut.flow)
    assert np.all(cut.flow <= upper)
    net = np.zeros(6, np.int64)
    np.subtract.at(net, tail, cut.flow)
    np.add.at(net, head, cut.flow)
    assert net.tolist() == [-cut.value, 0, 0, 0, 0, cut.value]
    inside = cut.source_side
    assert inside[[0, 5]].tolist() == [True, False]
    leaving, entering = inside[tail] & ~inside[head], inside[head] & ~inside[tail]
    # No flow is greater than any cut (Ford and Fulkerson 1962).
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
