"""Pipelines as graphs: their exact replay, and orders of operations that a user brings."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from envplan.errors import InputError
from envplan.pipeline import Pipeline
from envplan.pipeline.dependencies import check_orders, describe_operation
from envplan.pipeline.operations import short_name
from schedule_oracles import dependency_graph, longest_path, orders_of, rank
from strategies import dags, schedules


def edges(pipeline: Pipeline) -> dict[tuple[int, int], int]:
    return {
        (i, int(pipeline.succ[k])): int(pipeline.succ_lag_ns[k])
        for i in range(len(pipeline.operations))
        for k in range(pipeline.succ_begin[i], pipeline.succ_begin[i + 1])
    }


def longest_paths(pipeline: Pipeline, times: list[int]) -> tuple[list[int], int]:
    """Start times and makespan by networkx, from the operations and edges alone."""
    graph = nx.DiGraph()
    for i, time in enumerate(times):
        graph.add_edge("source", ("in", i), weight=0)
        graph.add_edge(("in", i), ("out", i), weight=time)
        graph.add_edge(("out", i), "sink", weight=0)
    for (i, j), lag in edges(pipeline).items():
        graph.add_edge(("out", i), ("in", j), weight=lag)
    start = []
    for i in range(len(times)):
        ancestors = nx.ancestors(graph, ("in", i)) | {("in", i)}
        start.append(nx.dag_longest_path_length(graph.subgraph(ancestors)))
    return start, nx.dag_longest_path_length(graph)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (1, 4), (3, 2), (4, 8)])
def test_equal_stages_take_the_textbook_makespan(
    schedule: str, stages: int, microbatches: int
) -> None:
    pipeline = Pipeline(schedule, num_stages=stages, num_microbatches=microbatches)
    times = np.array([3 if op.instruction == "forward" else 6 for op in pipeline.operations])
    # (M + S - 1) (t_f + t_b): Narayanan et al. 2021, section 2.2.1.
    assert pipeline.earliest_starts(times)[1] == (microbatches + stages - 1) * 9


@given(st.one_of(dags(1), dags(3, 14), schedules(None, 3, 3)), st.data())
def test_replay_agrees_with_longest_paths(pipeline: Pipeline, data: st.DataObject) -> None:
    count = len(pipeline.operations)
    # Up to 10 ms, as latencies are 2 or 3 ms.
    drawn = st.lists(st.integers(0, 10**7), min_size=count, max_size=count)
    times, spare = np.array(data.draw(drawn)), data.draw(st.integers(0, 20))
    start, makespan = pipeline.earliest_starts(times)
    assert (start.tolist(), makespan) == longest_paths(pipeline, times.tolist())
    latest = pipeline.latest_finishes(times, makespan + spare)
    assert start.dtype == latest.dtype == np.int64
    assert (latest - times - start).min() == spare
    ends = [[makespan + spare] for _ in times]
    for (i, j), lag in edges(pipeline).items():
        ends[i].append(latest[j] - times[j] - lag)
    assert latest.tolist() == list(map(min, ends))
    place = {int(i): k for k, i in enumerate(pipeline.order)}
    assert sorted(place) == list(range(count))
    assert all(place[i] < place[j] for i, j in edges(pipeline))
    # Types are those of the kernel.
    assert pipeline.succ_lag_ns.dtype == np.int64
    for array in (pipeline.stage_begin, pipeline.succ_begin, pipeline.succ, pipeline.order):
        assert array.dtype == np.int32
        assert not array.flags.writeable


def test_iterations_are_exact_up_to_62_bits_and_refused_beyond() -> None:
    pipeline = Pipeline("1f1b", 1, 2)
    times = np.array([2**60, 2**60, 2**60 - 1, 3])
    assert pipeline.earliest_starts(times)[1] == 3 * 2**60 + 2
    assert pipeline.latest_finishes(times, 2**62)[0] == 2**62 - 2 * 2**60 - 2
    for replay in (pipeline.earliest_starts, lambda times: pipeline.latest_finishes(times, 0)):
        with pytest.raises(InputError, match="146 years"):
            replay(times + 2**60)


@pytest.mark.parametrize("field", ["num_stages", "num_microbatches", "num_chunks"])
@pytest.mark.parametrize("value", [0, 2.0, True, "4", 10**4000, np.ones(2)])
def test_bad_counts_are_named(field: str, value: object) -> None:
    arguments: dict[str, object] = {"num_stages": 2, "num_microbatches": 2, field: value}
    words = f"{field.removeprefix('num_')} should be .*, not "
    with pytest.raises(InputError, match=words) as error:
        Pipeline("interleaved", **arguments)  # type: ignore[arg-type]
    assert "\n" not in error.value.message


@pytest.mark.parametrize(
    "latency",
    [
        *(-1e-3, math.nan, math.inf, 1e300, 10**400, "1", None, True),
        *([], [0.1], [0.1, 0.1, 0.1], [0.1, -1.0], [0.1, "x"]),
    ],
)
def test_bad_latency_is_refused(latency: Any) -> None:
    pipeline = Pipeline("1f1b", 3, 2)
    with pytest.raises(InputError, match="p2p_latency_s"):
        Pipeline("1f1b", 3, 2, p2p_latency=latency)
    with pytest.raises(InputError, match="p2p_latency_s"):
        Pipeline.from_orders(orders_of(pipeline), p2p_latency=latency)


def test_a_slow_network_between_two_stages_delays_only_them() -> None:
    pipeline = Pipeline("1f1b", 3, 2, p2p_latency=[0.001, 0.05])
    time = np.full(len(pipeline.operations), 10**8)
    starts, makespan = pipeline.earliest_starts(time)
    start = dict(zip(pipeline.operations, starts.tolist(), strict=True))
    forwards = {op: at for op, at in start.items() if op.instruction == "forward"}
    first = {op.stage: at for op, at in forwards.items() if op.microbatch == 0}
    assert first == {0: 0, 1: 101_000_000, 2: 251_000_000}
    assert makespan > Pipeline("1f1b", 3, 2, p2p_latency=0.001).earliest_starts(time)[1]
    # From the last rank to the first, the longest latency counts.
    wrapped = Pipeline("interleaved", 3, 3, num_chunks=2, p2p_latency=[0.001, 0.05])
    ranks = [op.stage for op in wrapped.operations]
    lags = {(ranks[i], ranks[j]): lag for (i, j), lag in edges(wrapped).items()}
    assert (lags[0, 1], lags[1, 2], lags[2, 0]) == (10**6, 5 * 10**7, 5 * 10**7)


def test_stages_that_take_turns_never_work_at_the_same_time() -> None:
    """In the steady state of 1F1B, between the first backward of one and the last of the other."""
    pipeline = Pipeline("1f1b", 4, 16, p2p_latency=1e-6, in_turn=[1])
    times = np.array([1000 + 700 * (op.instruction == "backward") for op in pipeline.operations])
    starts, makespan = pipeline.earliest_starts(times)
    spans = [
        [
            (int(start), int(start + time))
            for op, start, time in zip(pipeline.operations, starts, times, strict=True)
            if op.stage == stage and 4 <= op.microbatch < 12
        ]
        for stage in (1, 2)
    ]
    assert all(a[1] <= b[0] or b[1] <= a[0] for a in spans[0] for b in spans[1])
    side_by_side = Pipeline("1f1b", 4, 16, p2p_latency=1e-6).earliest_starts(times)[1]
    assert makespan > side_by_side + 10 * 2700


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
    assert f"misses an operation: {describe_operation(missing)}" in error.value.message


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
