from __future__ import annotations

import math
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envplan.errors import InputError
from envplan.pipeline import Pipeline
from schedule_oracles import orders_of
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
