"""The kernel against independent solvers: SimpleMinCostFlow exactly, an LP to 1e-9, brute force."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envplan.cores import use_cores
from envplan.frontier import Relaxation, repeat, start, walk
from envplan.frontier.network import build_network
from envplan.pipeline import Pipeline
from envplan.profile import Profile
from envplan.solve import Frontier, trace_frontier
from envplan.units import uw_from_w
from oracles import relaxed_cost_by_lp, relaxed_dual_by_min_cost_flow
from strategies import dags, equal_profiles, falling_profiles, noisy, pipelines, profiles

POWER = 70.0
CHUNKS = {
    "1f1b": 1,
    "gpipe": 1,
    "zb-h1": 1,
    "interleaved": 2,
    "looped-bfs": 2,
    "interleaved-zb": 2,
    "zb-v": 2,
    "dualpipe-v": 2,
}


def total_power(pipeline: Pipeline) -> int:
    return uw_from_w(POWER) * pipeline.num_stages


def cost_at(frontier: Frontier, time_ns: int) -> int:
    """Sum of effective costs, fJ: energy without what waiting draws."""
    return frontier.effective_bound_fj(time_ns)


def assert_exact(pipeline: Pipeline, profile: Profile) -> None:
    network = build_network(pipeline, profile, [uw_from_w(POWER)] * pipeline.num_stages)
    full = trace_frontier(pipeline, profile, blocking_power=POWER, full=True)
    span = full.max_time_ns - full.min_time_ns
    for part in (0, 0.1, 0.37, 0.5, 0.83, 1):
        time_ns = full.min_time_ns + int(span * part)
        assert cost_at(full, time_ns) == pytest.approx(
            relaxed_cost_by_lp(network, time_ns), rel=1e-9, abs=1e6
        )
    slopes = full.slopes_uw
    flows = {1, total_power(pipeline), max(slopes, default=1), *slopes[:: max(1, len(slopes) // 5)]}
    for flow in sorted(flows):
        least = min(cost_at(full, t) + flow * t for t in full.times_ns.tolist())
        assert least == relaxed_dual_by_min_cost_flow(network, flow)


def assert_walks_agree(pipeline: Pipeline, profile: Profile, power: float = POWER) -> None:
    """The start at T_star, or from a shorter pipeline, leads where the walk from T_max does."""
    quick = trace_frontier(pipeline, profile, blocking_power=power)
    full = trace_frontier(pipeline, profile, blocking_power=power, full=True)
    assert quick.min_time_ns == full.min_time_ns
    assert quick.min_energy_time_ns == full.min_energy_time_ns
    known = full.times_ns <= full.min_energy_time_ns
    assert np.array_equal(quick.times_ns, full.times_ns[known])
    for time_ns in quick.times_ns[:: max(1, len(quick.times_ns) // 100)].tolist():
        assert quick.lower_bound_fj(time_ns) == full.lower_bound_fj(time_ns)


@pytest.mark.parametrize("drawn", [pipelines(), st.integers(1, 3).flatmap(dags)], ids=["", "dag"])
@given(data=st.data())
def test_pipelines_and_dags_equal_lp_and_min_cost_flow(drawn: Any, data: st.DataObject) -> None:
    pipeline = data.draw(drawn)
    kind = data.draw(st.sampled_from([profiles, falling_profiles, equal_profiles]))
    assert_exact(pipeline, data.draw(kind(pipeline.num_profile_stages)))


@given(st.data())
@settings(max_examples=15)
def test_equal_stages_equal_lp_and_min_cost_flow(data: st.DataObject) -> None:
    stages = data.draw(st.integers(2, 6))
    microbatches = data.draw(st.integers(stages, 3 * stages))
    assert_exact(Pipeline("1f1b", stages, microbatches), data.draw(equal_profiles(stages)))


@pytest.mark.parametrize(
    ("schedule", "stages", "microbatches", "chunks"),
    [("1f1b", 4, 8, 1), ("gpipe", 4, 6, 1), ("interleaved", 4, 8, 2), ("1f1b", 8, 12, 1)],
)
def test_built_in_profile_equals_lp_and_min_cost_flow(
    schedule: str, stages: int, microbatches: int, chunks: int
) -> None:
    profile = Profile.builtin(f"a40-gpt3-1.3b-{stages * chunks}stage")
    assert_exact(Pipeline(schedule, stages, microbatches, num_chunks=chunks), profile)


@given(st.data())
def test_start_at_t_star_gives_the_same_frontier_as_the_walk_from_t_max(
    data: st.DataObject,
) -> None:
    pipeline = data.draw(pipelines(max_stages=3, max_microbatches=24))
    kind = data.draw(st.sampled_from([falling_profiles, equal_profiles]))
    profile = data.draw(kind(pipeline.num_profile_stages))
    power = data.draw(st.sampled_from([0.0, 35.0, 70.0, 400.0]))
    assert_walks_agree(pipeline, profile, power)


@pytest.mark.parametrize(
    ("schedule", "stages", "microbatches", "chunks"),
    [("1f1b", 4, 261, 1), ("gpipe", 4, 259, 1), ("interleaved", 4, 132, 2), ("1f1b", 8, 131, 1)],
)
def test_long_pipeline_started_from_a_short_one_is_the_same(
    schedule: str, stages: int, microbatches: int, chunks: int
) -> None:
    profile = noisy(Profile.builtin(f"a40-gpt3-1.3b-{stages * chunks}stage"))
    pipeline = Pipeline(schedule, stages, microbatches, num_chunks=chunks, p2p_latency=0.001)
    assert_walks_agree(pipeline, profile)


@pytest.mark.parametrize("schedule", CHUNKS)
@pytest.mark.parametrize("rounds", [1, 2, 3, 4, 5, 6])
def test_pipeline_of_any_length_may_start_from_a_shorter_one(
    schedule: str, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeat, "_FEW_OPERATIONS", 0)
    monkeypatch.setattr(start, "_FEWEST_OPERATIONS", 0)
    monkeypatch.setattr(repeat, "_FEWEST_ROUNDS", min(2, CHUNKS[schedule]))
    stages, chunks = 4, CHUNKS[schedule]
    microbatches = max(rounds, chunks) * stages + (0 if "inter" in schedule else rounds % stages)
    profile = noisy(Profile.builtin(f"a40-gpt3-1.3b-{stages * chunks}stage"))
    profile = profile.adjusted(backward_input_share=0.5)
    pipeline = Pipeline(schedule, stages, microbatches, num_chunks=chunks)
    assert_walks_agree(pipeline, profile)


@given(st.data())
def test_walk_that_ends_at_a_deadline_is_there_as_the_whole_walk_is(data: st.DataObject) -> None:
    pipeline = data.draw(pipelines(max_stages=3, max_microbatches=12))
    kind = data.draw(st.sampled_from([falling_profiles, equal_profiles]))
    powers = [uw_from_w(POWER)] * pipeline.num_stages
    network = build_network(pipeline, data.draw(kind(pipeline.num_profile_stages)), powers)
    whole, ended = network.trace(), network.trace()
    whole.run()
    deadline_ns = data.draw(st.integers(whole.min_time, whole.max_time))
    ended.run(until=deadline_ns)
    times, slopes, costs = ended.breakpoints()
    known = whole.breakpoints()
    count = int((known[0] > deadline_ns).sum())
    assert times[-1] == deadline_ns
    assert [part[:count] for part in (times.tolist(), slopes.tolist(), costs)] == [
        part[:count] for part in (known[0].tolist(), known[1].tolist(), known[2])
    ]
    assert np.array_equal(ended.state_at(deadline_ns)[0], whole.state_at(deadline_ns)[0])


def alike_or_noisy(stages: int, even: bool) -> Profile:
    """A profile whose stages are all alike, or all different."""
    profile = noisy(Profile.builtin(f"a40-gpt3-1.3b-{stages}stage"))
    profile = profile.adjusted(backward_input_share=0.5)
    if not even:
        return profile
    return Profile.from_rows(
        [
            (stage, name, mhz, time / 1e9, energy / 1e15)
            for name in ("forward", "backward", "backward_input", "backward_weight")
            for stage in range(stages)
            for mhz, time, energy in zip(
                *(
                    getattr(profile.table(1, name), column).tolist()
                    for column in ("frequency_mhz", "time_ns", "energy_fj")
                ),
                strict=True,
            )
        ]
    )


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
    monkeypatch.setattr(repeat, "_FEW_OPERATIONS", 0)
    monkeypatch.setattr(start, "_FEWEST_OPERATIONS", 0)
    monkeypatch.setattr(start, "_FEWEST_LEVELS", 3)
    chunks = CHUNKS[schedule]
    profile = alike_or_noisy(4 * chunks, even)
    pipeline = Pipeline(schedule, 4, microbatches, num_chunks=chunks)
    frontier = trace_frontier(pipeline, profile, blocking_power=POWER)
    span = frontier.min_energy_time_ns - frontier.min_time_ns
    for part in (0.0, 0.1, 0.6, 1.0):
        deadline_ns = frontier.min_time_ns + int(span * part)
        single = Relaxation(pipeline, profile, blocking_power=POWER)  # walked by nobody before
        assert single.min_time_ns == frontier.min_time_ns
        assert single.min_energy_time_ns == frontier.min_energy_time_ns
        events, flows = single.state_at(deadline_ns)
        assert single.lower_bound_fj(deadline_ns) == frontier.lower_bound_fj(deadline_ns)
        assert np.array_equal(events, frontier.state_at(deadline_ns)[0])
        assert (flows >= 0).all()
        network = single.network
        balance = np.zeros(network.num_nodes, np.int64)
        np.subtract.at(balance, network.tail, flows)
        np.add.at(balance, network.head, flows)
        assert not balance[:-2].any()
        k = int(np.searchsorted(frontier.times_ns, deadline_ns))
        if frontier.times_ns[k] != deadline_ns:  # between two breakpoints there is one slope
            assert balance[-1] == frontier.slopes_uw[k]
        assert np.array_equal(single.times_ns, frontier.times_ns)
        assert single.slopes_uw[1:] == frontier.slopes_uw[1:]

    monkeypatch.setattr(walk, "_OF_A_PIECE", len(pipeline.operations) // 3)
    pieces = []
    for cores in (1, 2):
        use_cores(cores)
        pieces.append(Relaxation(pipeline, profile, blocking_power=POWER).walk())
    use_cores(None)
    one, two = pieces
    # No walk starts in the middle where all of one kind comes first.
    assert len(one._walk.main._traces) == (1 if schedule == "gpipe" else 3)
    for found in pieces:
        assert np.array_equal(found.times_ns, frontier.times_ns)
        assert found.slopes_uw[1:] == frontier.slopes_uw[1:]
        assert np.array_equal(found.energies, frontier.energies)
    for part in (0.0, 0.05, 0.3, 0.6, 0.95, 1.0):
        time_ns = frontier.min_time_ns + int(span * part)
        assert np.array_equal(one.state_at(time_ns)[0], frontier.state_at(time_ns)[0])
        assert np.array_equal(one.state_at(time_ns)[1], two.state_at(time_ns)[1])


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize(
    ("schedule", "microbatches"), [("1f1b", 40), ("zb-h1", 31), ("interleaved", 48)]
)
def test_frontier_that_a_short_pipeline_proves_is_that_of_the_walk(
    schedule: str, microbatches: int, even: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeat, "_FEW_OPERATIONS", 0)
    monkeypatch.setattr(repeat, "_FEW_ROUNDS", 0)
    chunks = CHUNKS[schedule]
    pipeline = Pipeline(schedule, 4, microbatches, num_chunks=chunks)
    profile = alike_or_noisy(4 * chunks, even)
    monkeypatch.setattr(start, "_MUCH_LONGER", 10**9)
    walked = Relaxation(pipeline, profile, blocking_power=POWER).walk()
    monkeypatch.setattr(start, "_MUCH_LONGER", 1)
    monkeypatch.setattr(start, "_LEAST_PART", 0)
    proved = Relaxation(pipeline, profile, blocking_power=POWER).walk()
    lifted = [trace for trace in proved._walk.main._traces if isinstance(trace, repeat.Lifted)]
    if schedule == "1f1b":  # of the others nothing is alike from round to round here
        assert sum(len(trace.breakpoints()[0]) for trace in lifted) > len(walked.times_ns) / 4
    assert np.array_equal(proved.times_ns, walked.times_ns)
    assert proved.slopes_uw[1:] == walked.slopes_uw[1:]
    assert np.array_equal(proved.energies, walked.energies)
    span = walked.max_time_ns - walked.min_time_ns
    for part in (0.0, 0.07, 0.31, 0.62, 0.93, 1.0):
        time_ns = walked.min_time_ns + int(span * part)
        assert np.array_equal(proved.state_at(time_ns)[0], walked.state_at(time_ns)[0])
