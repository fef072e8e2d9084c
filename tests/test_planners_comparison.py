"""All planners side by side: nobody beats ours, and what bloat means."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cli_helpers import small_profile
from envplan.errors import InputError
from envplan.frontier.network import Network
from envplan.pipeline import Pipeline
from envplan.planners import PLANNERS, Comparison, Entry, compare
from envplan.profile import Profile, ProfileMetadata, builtin_paths
from envplan.solve import Frontier, trace_frontier
from envplan.verify import verify_plan
from strategies import frontiers


def traced(schedule: str = "1f1b", stages: int = 3, microbatches: int = 6) -> Frontier:
    pipeline = Pipeline(schedule, stages, microbatches)
    return trace_frontier(pipeline, small_profile(stages, blocking=70.0))


def entry(comparison: Comparison, planner: str, point: str | None = None) -> Entry:
    return next(e for e in comparison.entries if (e.planner, e.point) == (planner, point))


def assert_nobody_beats_ours(comparison: Comparison) -> None:
    base, sync = comparison.entries[0].plan, comparison.straggler_time
    for e in comparison.entries:
        assert e.ours.energy <= e.plan.energy
        assert e.ours.iteration_time <= e.plan.iteration_time
        assert e.plan.energy_lower_bound <= e.ours.energy
        assert e.ours.planner == "frontier"
        assert e.intrinsic_j == e.plan.energy - e.ours.energy
        assert e.extrinsic_j >= 0
        time = e.plan.iteration_time / base.iteration_time - 1
        assert e.slowdown_percent == pytest.approx(100 * time)
        saved = 1 - e.plan.energy / base.energy if base.energy else 0
        assert e.savings_percent == pytest.approx(100 * saved)
        if sync is None:
            assert (e.extrinsic_j, e.straggler_energy, e.straggler_gap) == (0, None, None)
            continue
        without, used = (plan.energy + plan.waiting_energy(sync) for plan in (base, e.plan))
        assert e.straggler_energy == pytest.approx(used)
        saved = 1 - used / without if without else 0
        assert e.straggler_savings_percent == pytest.approx(100 * saved)
        if e.plan.iteration_time <= sync:
            assert e.straggler_gap >= 0


@given(
    frontiers(3, 5),
    st.sampled_from(["balanced", "greedy"]),
    st.sampled_from([None, -0.9, 0.0, 0.03, 0.5]),
)
@settings(max_examples=12)
def test_no_planner_beats_ours_on_any_profile(
    frontier: Frontier, reconfigure: str, slowdown: float | None
) -> None:
    comparison = compare(frontier, reconfigure=reconfigure, straggler_slowdown=slowdown)
    assert_nobody_beats_ours(comparison)
    for e in comparison.entries:
        assert verify_plan(e.plan, frontier.profile)
        assert verify_plan(e.ours, frontier.profile)


@pytest.mark.parametrize("name", sorted(builtin_paths()))
def test_no_planner_beats_ours_on_a_built_in_profile(name: str) -> None:
    profile = Profile.builtin(name)
    microbatches = min(profile.metadata.num_microbatches or 8, 2 * profile.num_stages)
    frontier = trace_frontier(Pipeline("1f1b", profile.num_stages, microbatches), profile)
    comparison = compare(frontier, straggler_slowdown=0.05)
    assert_nobody_beats_ours(comparison)
    fastest = entry(comparison, "frontier", "T_min")
    assert fastest.slowdown_percent <= 0
    assert all(
        0 <= e.plan.gap < 0.005 for e in comparison.entries if e.point in ("T_min", "T_star")
    )
    assert entry(comparison, "envpipe").slowdown_percent < 1


def test_every_planner_has_an_entry_and_ours_several() -> None:
    comparison = compare(traced())
    found = [(e.planner, e.point, e.plan.job.schedule) for e in comparison.entries]
    assert found == [
        ("max_frequency", None, "1f1b"),
        ("zeus_global", None, "1f1b"),
        ("zeus_per_stage", None, "1f1b"),
        ("envpipe", None, "envpipe"),
        ("frontier", "T_min", "1f1b"),
        ("frontier", "T_star", "1f1b"),
        ("frontier", "T_min", "envpipe"),
    ]
    assert {planner for planner, _, _ in found} == set(PLANNERS)
    assert comparison.baseline == comparison.entries[0].plan.predicted.baseline


def test_envpipe_reschedules_1f1b_alone_as_far_as_slots_allow() -> None:
    assert compare(traced()).envpipe_frontier.pipeline.forwards_ahead[0] > 0
    capped = compare(traced(), activation_slots=3)
    assert capped.envpipe_frontier.pipeline.forwards_ahead == (0, 0, 0)
    other = compare(traced("gpipe"))
    assert other.envpipe_frontier is other.frontier
    assert {e.plan.job.schedule for e in other.entries} == {"gpipe"}
    with pytest.raises(InputError, match=r"rescheduling 1f1b.*gpipe"):
        compare(traced("gpipe"), activation_slots=9)


def test_blocking_power_given_holds_for_both_schedules() -> None:
    pipeline = Pipeline("1f1b", 2, 4, p2p_latency=0.001)
    frontier = trace_frontier(
        pipeline, small_profile(2, blocking=70.0), blocking_power=33.0, replicas=2
    )
    other = compare(frontier).envpipe_frontier
    assert other.blocking_power_w == frontier.blocking_power_w == (33.0, 33.0)
    assert other.pipeline.p2p_latency_ns == pipeline.p2p_latency_ns
    assert other.replicas == 2


@pytest.mark.parametrize("slow", [0.9, 10.0])
def test_the_plan_for_a_straggler_has_no_extrinsic_bloat(slow: float) -> None:
    frontier = traced()
    comparison = compare(frontier, straggler_time=slow * frontier.min_energy_time)
    assert_nobody_beats_ours(comparison)
    ours = entry(comparison, "frontier", "straggler")
    assert ours.plan.iteration_time <= slow * frontier.min_energy_time
    assert ours.plan.iteration_time <= frontier.slowest_time
    assert (ours.plan.iteration_time > frontier.min_energy_time) == (slow > 1)
    assert ours.extrinsic_j == 0
    assert ours.straggler_gap == pytest.approx(0.0, abs=1e-3 if slow > 1 else 1e-2)
    for e in comparison.entries:
        if e.plan.job.schedule == "1f1b" and e.plan.iteration_time <= comparison.straggler_time:
            above = e.straggler_energy - ours.straggler_energy
            assert e.intrinsic_j + e.extrinsic_j == pytest.approx(above, abs=1e-3 * e.plan.energy)
            assert e.straggler_gap >= ours.straggler_gap
    assert entry(comparison, "frontier", "T_min").extrinsic_j > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"straggler_time": 1.0, "straggler_slowdown": 0.1}, "not both"),
        ({"straggler_time": float("nan")}, "straggler_time_s should be"),
        ({"straggler_time": -1.0}, "straggler_time_s should be"),
        ({"straggler_slowdown": float("inf")}, "straggler_time_s should be"),
        ({"reconfigure": "quick"}, "known: balanced, greedy"),
        ({"activation_slots": 1}, "1F1B alone keeps"),
    ],
)
def test_bad_argument_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        compare(traced(), **options)


def published(value: object) -> Comparison:
    metadata = ProfileMetadata(extra={} if value is None else {"published": value})
    rows = [(0, name, 900, 0.1, 5.0) for name in ("forward", "backward")]
    profile = Profile.from_rows(rows, metadata=metadata)
    return compare(trace_frontier(Pipeline("1f1b", 1, 2), profile))


def test_published_figure_comes_from_the_sidecar() -> None:
    said = {"savings_percent": 25.2, "slowdown_percent": 0.9, "source": "EnvPipe, ATC 2023"}
    assert published(said).published.model_dump() == said  # type: ignore[union-attr]
    assert published(None).published is None


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (3, "should be an object"),
        ({"source": "x"}, "savings_percent is missing"),
        ({"savings_percent": True, "source": "x"}, "savings_percent should be a valid number"),
        ({"savings_percent": 1, "slowdown_percent": "2", "source": "x"}, "slowdown_percent"),
        ({"savings_percent": 1}, "published.source is missing"),
    ],
)
def test_malformed_published_figure_is_refused(value: object, words: str) -> None:
    with pytest.raises(InputError, match=words):
        published(value)


def test_nothing_is_traced_twice_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = []
    begin = Network.trace
    monkeypatch.setattr(Network, "trace", lambda self: traces.append(1) or begin(self))
    profile = small_profile(stages=3)

    def plans() -> list[tuple[float, float]]:
        comparison = compare(trace_frontier(Pipeline("1f1b", 3, 7), profile))
        assert comparison.advice is not None
        return [(entry.plan.energy, entry.ours.energy) for entry in comparison.entries]

    first, count = plans(), len(traces)
    assert plans() == first
    assert len(traces) == count > 1
