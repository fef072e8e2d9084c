"""The kernel against independent solvers: SimpleMinCostFlow exactly, an LP to 1e-9, networkx."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envplan.frontier import Relaxation, periodic, tracer, warm_starts
from envplan.frontier.extended_trace import ExtendedTrace
from envplan.frontier.network import build_network
from envplan.pipeline import SCHEDULES, Pipeline
from envplan.profile import Profile
from envplan.replay.cores import use_cores
from envplan.solve import Frontier, trace_frontier
from envplan.units import ENERGY_UNITS_PER_J, in_10uw
from oracles import relaxed_cost_by_lp, relaxed_dual_by_min_cost_flow
from schedule_oracles import dependency_graph, longest_path, orders_of
from strategies import (
    EVERY_INSTRUCTION,
    dags,
    equal_profiles,
    falling_profiles,
    noisy,
    profiles,
    schedules,
)

POWER = 70.0
PARTS = (0.0, 0.07, 0.31, 0.62, 0.95, 1.0)
CHUNKS = dict.fromkeys(("interleaved", "looped-bfs", "interleaved-zb", "zb-v", "dualpipe-v"), 2)


def built_in(stages: int, even: bool = False) -> Profile:
    """A profile of all instructions whose stages are all alike, or all different."""
    profile = noisy(Profile.builtin(f"a40-gpt3-1.3b-{stages}stage"))
    profile = profile.adjusted(backward_input_share=0.5)
    return Profile.from_rows(
        [
            (stage, name, mhz, time / 1e9, energy / ENERGY_UNITS_PER_J)
            for name in EVERY_INSTRUCTION
            for stage in range(stages)
            for mhz, _, time, energy in profile.table(1 if even else stage, name).options()
        ]
    )


def drawn(name: str, data: st.DataObject, most: int) -> tuple[Pipeline, Profile]:
    """A pipeline of a schedule and so many microbatches at most, a custom DAG, or a 1F1B of stages
    that are all alike.
    """
    if name == "dag":
        pipeline = data.draw(st.integers(1, 3).flatmap(dags))
    else:
        pipeline = data.draw(schedules("1f1b" if name == "even" else name, 3, most))
    stages = pipeline.num_profile_stages
    if name == "even":
        return pipeline, data.draw(equal_profiles(stages))
    kind = data.draw(st.sampled_from([profiles, falling_profiles]))
    used = {op.instruction for op in pipeline.operations} | {"forward", "backward"}
    return pipeline, data.draw(kind(stages, 6, instructions=sorted(used)))


def assert_exact(pipeline: Pipeline, profile: Profile, power: float = POWER) -> Frontier:
    """The full frontier, which an LP and a flow prove at several times and slopes."""
    powers = [in_10uw(power)] * pipeline.num_stages
    network = build_network(pipeline, profile, powers)
    full = trace_frontier(pipeline, profile, blocking_power=power, full=True)
    span = full.max_time_ns - full.min_time_ns
    for part in PARTS:
        time_ns = full.min_time_ns + int(span * part)
        by_lp = pytest.approx(relaxed_cost_by_lp(network, time_ns), rel=1e-9, abs=1e6)
        assert full.effective_bound_10fj(time_ns) == by_lp
    slopes = full.slopes_10uw
    for flow in sorted({1, sum(powers), *slopes[:: max(1, len(slopes) // 5)], max(slopes)}):
        least = min(full.effective_bound_10fj(t) + flow * t for t in full.times_ns.tolist())
        assert least == relaxed_dual_by_min_cost_flow(network, flow)
    return full


def assert_walks_agree(pipeline: Pipeline, profile: Profile, power: float = POWER) -> None:
    """The start at T_star, or from a shorter pipeline, leads where the walk from T_max does."""
    quick = trace_frontier(pipeline, profile, blocking_power=power)
    full = trace_frontier(pipeline, profile, blocking_power=power, full=True)
    assert quick.min_time_ns == full.min_time_ns
    assert quick.min_energy_time_ns == full.min_energy_time_ns
    known = full.times_ns <= full.min_energy_time_ns
    assert np.array_equal(quick.times_ns, full.times_ns[known])
    for time_ns in quick.times_ns[:: max(1, len(quick.times_ns) // 100)].tolist():
        assert quick.lower_bound_10fj(time_ns) == full.lower_bound_10fj(time_ns)


def assert_same(one: Relaxation, other: Relaxation) -> None:
    assert np.array_equal(one.times_ns, other.times_ns)
    assert one.slopes_10uw[1:] == other.slopes_10uw[1:]
    assert np.array_equal(one.energies, other.energies)


@pytest.mark.parametrize("name", [*SCHEDULES, "dag", "even"])
@given(data=st.data())
@settings(max_examples=25)
def test_frontier_equals_lp_min_cost_flow_and_the_walk_from_t_max(
    name: str, data: st.DataObject
) -> None:
    pipeline, profile = drawn(name, data, 6)
    power = data.draw(st.sampled_from([0.0, 35.0, POWER, 400.0]))
    full = assert_exact(pipeline, profile, power)
    assert_walks_agree(*drawn(name, data, 24), power)
    if name != "dag":
        graph = dependency_graph(orders_of(pipeline), pipeline.p2p_latency_ns)
        tables = {op: profile.table(op.profile_stage, op.instruction) for op in pipeline.operations}
        fastest = {op: int(table.time_ns.min()) for op, table in tables.items()}
        assert full.min_time_ns == longest_path(graph, fastest)


@pytest.mark.parametrize(
    ("schedule", "stages", "microbatches"),
    [("1f1b", 4, 8), ("gpipe", 4, 6), ("interleaved", 4, 8), ("1f1b", 8, 12)],
)
def test_built_in_profile_equals_lp_and_min_cost_flow(
    schedule: str, stages: int, microbatches: int
) -> None:
    chunks = CHUNKS.get(schedule, 1)
    profile = Profile.builtin(f"a40-gpt3-1.3b-{stages * chunks}stage")
    assert_exact(Pipeline(schedule, stages, microbatches, num_chunks=chunks), profile)


@pytest.mark.parametrize(
    ("schedule", "stages", "microbatches"),
    [
        *[("1f1b", 4, 261), ("gpipe", 4, 259), ("interleaved", 4, 132), ("1f1b", 8, 131)],
        *[("looped-bfs", 2, 83), ("interleaved-zb", 2, 84), ("zb-h1", 4, 83), ("zb-v", 2, 82)],
        ("dualpipe-v", 2, 83),
    ],
)
def test_long_pipeline_started_from_a_short_one_is_the_same(
    schedule: str, stages: int, microbatches: int
) -> None:
    chunks = CHUNKS.get(schedule, 1)
    pipeline = Pipeline(schedule, stages, microbatches, num_chunks=chunks, p2p_latency=0.001)
    assert_walks_agree(pipeline, built_in(stages * chunks))


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "envpipe"])
@pytest.mark.parametrize("rounds", [1, 2, 3, 4, 5, 6])
def test_pipeline_of_any_length_may_start_from_a_shorter_one(
    schedule: str, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages, chunks = 4, CHUNKS.get(schedule, 1)
    monkeypatch.setattr(periodic, "FEW_OPERATIONS", 0)
    monkeypatch.setattr(warm_starts, "FEW_OPERATIONS", 0)
    monkeypatch.setattr(periodic, "MIN_WHOLE_ROUNDS", min(2, chunks))
    microbatches = max(rounds, chunks) * stages + (0 if "inter" in schedule else rounds % stages)
    pipeline = Pipeline(schedule, stages, microbatches, num_chunks=chunks)
    assert_walks_agree(pipeline, built_in(stages * chunks))


@given(st.data())
def test_walk_that_ends_at_a_deadline_is_there_as_the_whole_walk_is(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["1f1b", "gpipe", "interleaved", "even"]))
    pipeline, profile = drawn(name, data, 12)
    network = build_network(pipeline, profile, [in_10uw(POWER)] * pipeline.num_stages)
    whole, ended = network.solver().trace(), network.solver().trace()
    whole.extend()
    deadline_ns = data.draw(st.integers(whole.min_time, whole.max_time))
    ended.extend(deadline_ns)
    count = int((whole.breakpoints()[0] > deadline_ns).sum())
    assert ended.breakpoints()[0][-1] == deadline_ns
    for part, known in zip(ended.breakpoints(), whole.breakpoints(), strict=True):
        assert list(part[:count]) == list(known[:count])
    assert np.array_equal(ended.optimum_at(deadline_ns)[0], whole.optimum_at(deadline_ns)[0])


def test_slopes_around_a_breakpoint_do_not_depend_on_what_was_asked_before() -> None:
    pipeline = Pipeline("1f1b", 4, 64)
    profile = Profile.builtin("a40-gpt3-1.3b-4stage")
    whole = Relaxation(pipeline, profile).walk()
    slopes = dict(zip(whole.times_ns.tolist(), [None, *whole.slopes_10uw[1:]], strict=True))
    breakpoints = whole.times_ns.tolist()
    for k in range(1, len(breakpoints) - 1, len(breakpoints) // 12):
        asked = Relaxation(pipeline, profile)
        asked.state_at(breakpoints[k])  # a trace begins there
        assert asked.slope_10uw(breakpoints[k] + 1) == slopes[breakpoints[k + 1]]
        assert asked.slope_10uw(breakpoints[k]) == slopes[breakpoints[k]]
        above = next(iter(asked.intervals_below(breakpoints[k] + 1)))
        assert above.slope_10uw == slopes[breakpoints[k + 1]]


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize(
    ("schedule", "microbatches"),
    [
        *[("1f1b", 24), ("interleaved", 24), ("zb-h1", 24), ("gpipe", 24)],
        *[("1f1b", 5), ("interleaved", 8), ("dualpipe-v", 8)],  # no shorter one stands for them
    ],
)
def test_state_of_one_deadline_is_that_of_the_frontier(
    schedule: str, microbatches: int, even: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(periodic, "FEW_OPERATIONS", 0)
    monkeypatch.setattr(warm_starts, "FEW_OPERATIONS", 0)
    monkeypatch.setattr(warm_starts, "MIN_LEVELS", 3)
    chunks = CHUNKS.get(schedule, 1)
    pipeline, profile = (
        Pipeline(schedule, 4, microbatches, num_chunks=chunks),
        built_in(4 * chunks, even),
    )
    job: dict[str, Any] = {"blocking_power": POWER}
    frontier = trace_frontier(pipeline, profile, **job)
    least, span = frontier.min_time_ns, frontier.min_energy_time_ns - frontier.min_time_ns
    for part in (0.0, 0.1, 0.6, 1.0):
        deadline_ns = least + int(span * part)
        single = Relaxation(pipeline, profile, **job)  # walked by nobody before
        assert single.min_time_ns == least
        assert single.min_energy_time_ns == least + span
        events, flows = single.state_at(deadline_ns)
        assert single.lower_bound_10fj(deadline_ns) == frontier.lower_bound_10fj(deadline_ns)
        assert np.array_equal(events, frontier.state_at(deadline_ns)[0])
        assert (flows >= 0).all()
        balance = np.zeros(single.network.num_nodes, np.int64)
        np.subtract.at(balance, single.network.tail, flows)
        np.add.at(balance, single.network.head, flows)
        assert not balance[:-2].any()
        k = int(np.searchsorted(frontier.times_ns, deadline_ns))
        if frontier.times_ns[k] != deadline_ns:  # between two breakpoints there is one slope
            assert balance[-1] == frontier.slopes_10uw[k]
        assert_same(single, frontier)

    monkeypatch.setattr(tracer, "OPERATIONS_PER_PIECE", len(pipeline.operations) // 3)
    pieces = []
    for cores in (1, 2):
        use_cores(cores)
        pieces.append(Relaxation(pipeline, profile, **job).walk())
        assert_same(pieces[-1], frontier)
    use_cores(None)
    one, two = pieces
    # No walk starts in the middle where all of one kind comes first.
    assert len(one.tracer.main.traces) == (1 if schedule == "gpipe" else 3)
    for part in PARTS:
        events, flows = one.state_at(least + int(span * part))
        assert np.array_equal(events, frontier.state_at(least + int(span * part))[0])
        assert np.array_equal(flows, two.state_at(least + int(span * part))[1])


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize(
    ("schedule", "microbatches"), [("1f1b", 40), ("zb-h1", 31), ("interleaved", 48)]
)
def test_frontier_that_a_short_pipeline_proves_is_that_of_the_walk(
    schedule: str, microbatches: int, even: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(periodic, "FEW_OPERATIONS", 0)
    monkeypatch.setattr(periodic, "FEW_ROUNDS", 0)
    chunks = CHUNKS.get(schedule, 1)
    pipeline = Pipeline(schedule, 4, microbatches, num_chunks=chunks)
    found = []
    for longer, part in ((10**9, 0.05), (1, 0)):
        monkeypatch.setattr(warm_starts, "MUCH_LONGER", longer)
        monkeypatch.setattr(warm_starts, "MIN_INTERVAL_FRACTION", part)
        profile = built_in(4 * chunks, even)
        found.append(Relaxation(pipeline, profile, blocking_power=POWER).walk())
    walked, proved = found
    lifted = [trace for trace in proved.tracer.main.traces if isinstance(trace, ExtendedTrace)]
    if schedule == "1f1b":  # of the others nothing is alike from round to round here
        assert sum(len(trace.breakpoints()[0]) for trace in lifted) > len(walked.times_ns) / 4
    assert_same(proved, walked)
    for part in PARTS:
        time_ns = walked.min_time_ns + int((walked.max_time_ns - walked.min_time_ns) * part)
        assert np.array_equal(proved.state_at(time_ns)[0], walked.state_at(time_ns)[0])
