"""Orders of operations that a user brings: which ones run, and what is said of the others."""

from __future__ import annotations

import re
from dataclasses import replace

import networkx as nx
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from envplan.errors import InputError
from envplan.pipeline import Pipeline
from envplan.pipeline.dependencies import check_orders, described, short_name
from schedule_oracles import dependency_graph, longest_path, orders_of, rank
from strategies import schedules


def refusal(*ranks: str) -> str:
    with pytest.raises(InputError) as error:
        Pipeline.from_orders([rank(number, text) for number, text in enumerate(ranks)])
    assert "\n" not in error.value.message
    return error.value.message


#: The order of each rank, and words of the refusal.
REFUSED = """
0F0 0F1 0B0 0B1; 1F0 1B0 1F1 | misses an operation: backward of microbatch 1 on model stage 1
0F1 0B0 0B1 | misses an operation: forward of microbatch 0 on model stage 0
0F0 0I0 | backward_weight of microbatch 0 on model stage 0 (rank 0)
0F0 0W0 | backward_input of microbatch 0 on model stage 0 (rank 0)
0F0 0F1 0F2 0B0; 1F0 | misses an operation: backward of microbatch 0 on model stage 1 (rank 1)
0F0 0F2000000000 0B0 0B2000000000 | forward of microbatch 1 on model stage 0 (rank 0)
0F0 0B0 0B0 | backward of microbatch 0 on model stage 0 (rank 0) is there twice
0F0 0B0 0W0 | backward of microbatch 0 on model stage 0 (rank 0) is there whole and
0F0 0B0; | rank 1 has no operations
0F0 0B0 1F0 1B0; 1F1 1B1 | runs model stage 1 on rank 1, but rank 0 runs it, too
0F0 0B0; 2F0 2B0 | model stage 1 is on no rank, but model stage 2 is
"""


@pytest.mark.parametrize("row", REFUSED.strip().splitlines())
def test_an_order_that_is_not_whole_says_what_is_wrong(row: str) -> None:
    ranks, complaint = row.split(" | ")
    assert complaint in refusal(*ranks.split(";"))


def test_operations_that_cannot_be_there_are_named() -> None:
    assert refusal() == "there are no operations"
    with pytest.raises(InputError, match=r"forward of .*\(rank 0\) stands in the order of rank 1"):
        check_orders([rank(0, "0F0 0B0"), rank(0, "1F0 1B0")])
    operation = replace(rank(0, "0F0")[0], microbatch=-1)
    with pytest.raises(InputError, match=r"microbatch -1 .* negative"):
        Pipeline.from_orders([[operation]])


#: The order of each rank, and the circle.
DEADLOCKS = """
0F0 0B0 0F1 0B1; 1B0 1F0 1F1 1B1 | 1F0 1B0
0F0 0W0 0I0 | 0I0 0W0
1F0 0F0 1B0 0B0 | 0F0 1F0
0F0 1F0 0B0 1I0 1W0 | 1I0 0B0
0F0 0B0 0F1 0B1; 1F0 1F1 1B0 1B1 | 0B0 0F1 1F1 1B0
"""


@pytest.mark.parametrize("row", DEADLOCKS.strip().splitlines())
def test_operations_that_wait_for_each_other_deadlock(row: str) -> None:
    """On one rank, or on several."""
    ranks, circle = row.split(" | ")
    found = re.findall(r'"(\w+)"', refusal(*ranks.split(";")))
    assert found[0] == found[-1]
    names = circle.split()
    assert found[:-1] in [names[k:] + names[:k] for k in range(len(names))]


def test_a_circle_of_many_ranks_is_cut_short() -> None:
    complaint = refusal("0F0 10F0 0B0 10B0", *(f"{s}F0 {s}B0" for s in range(1, 10)))
    assert re.search(r"\(\d+ more\)", complaint)
    assert complaint.count(" -> ") == 9


def test_inference_and_other_instructions_and_uneven_ranks_can_be() -> None:
    assert len(Pipeline.from_orders([rank(0, "0F0 0F1"), rank(1, "1F0 1F1")]).succ) == 4
    orders = [rank(0, "0F0 2F0 2B0 0B0"), rank(1, "1F0 1B0")]
    assert Pipeline.from_orders(orders).num_profile_stages == 3
    # Other instructions wait for their turn alone.
    pipeline = Pipeline.from_orders([rank(0, "0L0 0F0 0L1 0B0"), rank(1, "1F0 1B0 1L5")])
    assert [short_name(op) for op in pipeline.operations[:3]] == ["0load0", "0F0", "0load1"]
    assert len(pipeline.succ) == 3 + 2 + 2


@given(schedules(), st.data())
@settings(max_examples=60, deadline=None)
def test_whatever_operation_is_left_out_is_named(pipeline: Pipeline, data: st.DataObject) -> None:
    assume(len(pipeline.operations) > 4)
    orders = orders_of(pipeline)
    missing = data.draw(st.sampled_from(pipeline.operations))
    orders[missing.stage].remove(missing)
    with pytest.raises(InputError) as error:
        check_orders(orders, num_microbatches=pipeline.num_microbatches)
    assert f"misses an operation: {described(missing)}" in error.value.message


@given(schedules(max_stages=3, max_microbatches=4), st.data())
@settings(max_examples=120, deadline=None)
def test_a_shuffled_order_is_refused_exactly_where_it_cannot_run(
    pipeline: Pipeline, data: st.DataObject
) -> None:
    """And else takes as long as networkx says; unshuffled, it is the schedule."""
    orders = orders_of(pipeline)
    swaps = st.integers(0, data.draw(st.integers(0, 3)))
    for order in orders:
        for _ in range(data.draw(swaps)):
            i, j = (data.draw(st.integers(0, len(order) - 1)) for _ in range(2))
            order[i], order[j] = order[j], order[i]
    graph = dependency_graph(orders, pipeline.p2p_latency_ns)
    latency = pipeline.p2p_latency_ns * 1e-9
    if nx.is_directed_acyclic_graph(graph):
        taken = Pipeline.from_orders(orders, p2p_latency=latency)
        times = {op: 3 + i for i, op in enumerate(taken.operations)}
        starts, makespan = taken.earliest_starts(np.array(list(times.values())))
        assert makespan == longest_path(graph, times)
        if orders == orders_of(pipeline):
            own = pipeline.earliest_starts(np.array(list(times.values())))
            assert (starts.tolist(), makespan) == (own[0].tolist(), own[1])
            assert taken.num_profile_stages == pipeline.num_profile_stages
    else:
        with pytest.raises(InputError, match="deadlock"):
            Pipeline.from_orders(orders)
