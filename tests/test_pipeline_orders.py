"""Orders of operations that a user brings: which ones run, and what is said of the others."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise

import networkx as nx
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from envplan.errors import InputError
from envplan.pipeline import SCHEDULES, Operation, Pipeline
from envplan.pipeline.dependencies import check_orders, described, short_name
from schedule_oracles import dependency_graph, longest_path, orders_of
from strategies import schedules

INSTRUCTION = {
    "F": "forward",
    "B": "backward",
    "I": "backward_input",
    "W": "backward_weight",
    "L": "load",
}


def rank(number: int, text: str) -> list[Operation]:
    """`rank(1, "1F0 1B0")`: model stage, instruction and microbatch of what rank 1 runs."""
    words = [re.fullmatch(r"(\d+)([A-Z])(\d+)", word) for word in text.split()]
    return [
        Operation(number, INSTRUCTION[word[2]], int(word[3]), 0, int(word[1]))
        for word in words
        if word
    ]


def refusal(*ranks: str, **arguments: int) -> str:
    def run() -> None:
        orders = [rank(number, text) for number, text in enumerate(ranks)]
        check_orders(orders, **arguments)
        Pipeline.from_orders(orders)

    with pytest.raises(InputError) as error:
        run()
    assert "\n" not in error.value.message
    return error.value.message


def test_a_missing_operation_is_named() -> None:
    assert refusal("0F0 0F1 0B0 0B1", "1F0 1B0 1F1") == (
        "the order misses an operation: backward of microbatch 1 on model stage 1 (rank 1)"
    )
    assert "misses an operation: forward of microbatch 0 on model stage 0" in refusal("0F1 0B0 0B1")


def test_half_a_backward_misses_the_other_half() -> None:
    assert "backward_weight of microbatch 0 on model stage 0 (rank 0)" in refusal("0F0 0I0")
    assert "backward_input of microbatch 0 on model stage 0 (rank 0)" in refusal("0F0 0W0")


def test_many_missing_operations_are_counted() -> None:
    assert refusal("0F0 0F1 0F2 0B0", "1F0").endswith(
        "backward of microbatch 1 on model stage 0 (rank 0), "
        "backward of microbatch 2 on model stage 0 (rank 0), "
        "backward of microbatch 0 on model stage 1 (rank 1), and 4 more"
    )


def test_microbatches_nobody_mentions_are_missed_where_their_number_is_known() -> None:
    assert "forward of microbatch 1 on model stage 0" in refusal("0F0 0B0", num_microbatches=2)
    assert refusal("0F0 0F2000000000 0B0 0B2000000000") == (
        "the order misses an operation: forward of microbatch 1 on model stage 0 (rank 0), and all "
        "others of that microbatch"
    )
    assert refusal("0F0 0F1 0B0 0B1", num_microbatches=1) == (
        "microbatch 1 is mentioned, but there are only 1, from 0 on"
    )


def test_forwards_alone_are_an_order_of_inference() -> None:
    pipeline = Pipeline.from_orders([rank(0, "0F0 0F1"), rank(1, "1F0 1F1")])
    assert len(pipeline.succ) == 4


def test_an_operation_that_is_there_twice_is_named() -> None:
    assert refusal("0F0 0B0 0B0") == (
        "backward of microbatch 0 on model stage 0 (rank 0) is there twice"
    )


def test_a_backward_cannot_be_whole_and_in_parts() -> None:
    assert refusal("0F0 0B0 0W0") == (
        "backward of microbatch 0 on model stage 0 (rank 0) is there whole and in parts"
    )


@pytest.mark.parametrize(
    ("ranks", "cycle"),
    [
        (["0F0 0B0 0F1 0B1", "1B0 1F0 1F1 1B1"], "1F0 1B0"),
        (["0F0 0W0 0I0"], "0I0 0W0"),
        (["1F0 0F0 1B0 0B0"], "0F0 1F0"),
        (["0F0 1F0 0B0 1I0 1W0"], "1I0 0B0"),
        (["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"], "0B0 0F1 1F1 1B0"),
    ],
)
def test_operations_that_wait_for_each_other_deadlock(ranks: list[str], cycle: str) -> None:
    """On one rank, or on several."""
    found = re.findall(r'"(\w+)"', refusal(*ranks))
    assert found[0] == found[-1]
    names = cycle.split()
    assert tuple(pairwise(found)) in (
        tuple(pairwise([*names[k:], *names[: k + 1]])) for k in range(len(names))
    )


def test_a_circle_of_many_ranks_is_cut_short() -> None:
    ranks = ["0F0 10F0 0B0 10B0", *(f"{s}F0 {s}B0" for s in range(1, 10))]
    complaint = refusal(*ranks)
    assert re.search(r"\(\d+ more\)", complaint)
    assert complaint.count(" -> ") == 9


@pytest.mark.parametrize(
    ("ranks", "complaint"),
    [
        ([], "there are no operations"),
        (["0F0 0B0", ""], "rank 1 has no operations"),
        (["0F0 0B0 1F0 1B0", "1F1 1B1"], "runs model stage 1 on rank 1, but rank 0 runs it, too"),
        (["0F0 0B0", "2F0 2B0"], "model stage 1 is on no rank, but model stage 2 is"),
    ],
)
def test_ranks_that_are_none_are_refused(ranks: list[str], complaint: str) -> None:
    assert complaint in refusal(*ranks)


def test_an_operation_in_another_ranks_order_is_named() -> None:
    with pytest.raises(InputError, match=r"forward of .*\(rank 0\) stands in the order of rank 1"):
        check_orders([rank(0, "0F0 0B0"), rank(0, "1F0 1B0")])


def test_negative_numbers_are_refused() -> None:
    operation = replace(rank(0, "0F0")[0], microbatch=-1)
    with pytest.raises(InputError, match=r"microbatch -1 .* negative"):
        Pipeline.from_orders([[operation]])


def test_ranks_may_have_more_model_stages_than_others() -> None:
    orders = [rank(0, "0F0 2F0 2B0 0B0"), rank(1, "1F0 1B0")]
    assert Pipeline.from_orders(orders).num_profile_stages == 3


def test_other_instructions_wait_for_their_turn_alone() -> None:
    pipeline = Pipeline.from_orders([rank(0, "0L0 0F0 0L1 0B0"), rank(1, "1F0 1B0 1L5")])
    assert [short_name(op) for op in pipeline.operations[:3]] == ["0load0", "0F0", "0load1"]
    assert len(pipeline.succ) == 3 + 2 + 2


def test_transfers_take_the_given_time_between_ranks_only() -> None:
    pipeline = Pipeline.from_orders(
        [rank(0, "0F0 3F0 3B0 0B0"), rank(1, "1F0 2F0 2B0 1B0")], p2p_latency=0.5
    )
    _, makespan = pipeline.earliest_starts(np.full(8, 10**9))
    assert makespan == 8 * 10**9 + 4 * 5 * 10**8


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ("0B0 0F0 0F1 0B1", "deadlock"),
        ("0F0 0B0", "misses an operation: forward of microbatch 1"),
    ],
)
def test_a_schedule_of_ones_own_is_checked(
    order: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SCHEDULES, "own", lambda *_shape: [rank(0, order)])
    with pytest.raises(InputError, match=words):
        Pipeline("own", 1, 2)


@given(schedules(), st.data())
@settings(max_examples=60, deadline=None)
def test_an_order_taken_from_a_schedule_is_the_same_pipeline(
    pipeline: Pipeline, data: st.DataObject
) -> None:
    latency = pipeline.p2p_latency_ns * 1e-9
    taken = Pipeline.from_orders(orders_of(pipeline), p2p_latency=latency)
    again = Pipeline.from_job(json.loads(json.dumps(taken.to_job())))
    assert again.to_job() == taken.to_job()
    count = len(taken.operations)
    times = data.draw(st.lists(st.integers(1, 10**6), min_size=count, max_size=count))
    starts, makespan = pipeline.earliest_starts(np.array(times))
    for other in (taken, again):
        assert other.operations == pipeline.operations
        assert other.num_profile_stages == pipeline.num_profile_stages
        same_starts, same_makespan = other.earliest_starts(np.array(times))
        assert same_makespan == makespan
        assert np.array_equal(same_starts, starts)


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
@settings(max_examples=100, deadline=None)
def test_a_shuffled_order_is_refused_exactly_where_it_cannot_run(
    pipeline: Pipeline, data: st.DataObject
) -> None:
    orders = orders_of(pipeline)
    for order in orders:
        for _ in range(data.draw(st.integers(0, 3))):
            i, j = (data.draw(st.integers(0, len(order) - 1)) for _ in range(2))
            order[i], order[j] = order[j], order[i]
    graph = dependency_graph(orders, pipeline.p2p_latency_ns)
    if nx.is_directed_acyclic_graph(graph):
        taken = Pipeline.from_orders(orders, p2p_latency=pipeline.p2p_latency_ns * 1e-9)
        times = {op: 3 + i for i, op in enumerate(taken.operations)}
        _, makespan = taken.earliest_starts(np.array(list(times.values())))
        assert makespan == longest_path(graph, times)
    else:
        with pytest.raises(InputError, match="deadlock"):
            Pipeline.from_orders(orders)
