from __future__ import annotations

import json
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli_helpers import done, refused, small_profile, told
from envplan.errors import InputError
from envplan.pipeline import Pipeline
from envplan.plan import Plan, build_plan
from envplan.plan.target import Target
from envplan.profile import Profile
from envplan.simulation.chrome_trace import save_chrome_trace
from envplan.simulation.iteration import Timeline, simulate
from envplan.solve import trace_frontier
from envplan.units import ENERGY_UNITS_PER_J, POWER_UNITS_PER_W, s_from_ns
from strategies import dags, pipelines, profiles

POWER = 70.0


def planned(
    pipeline: Pipeline,
    profile: Profile,
    options: list[int],
    *,
    gpus_per_stage: int = 1,
    replicas: int = 1,
) -> Plan:
    """The plan of any choice of options."""
    frontier = trace_frontier(
        pipeline, profile, blocking_power=POWER, gpus_per_stage=gpus_per_stage, replicas=replicas
    )
    replay = frontier.problem.replay(np.array(options, np.int32))
    target = Target(kind="max-frequency", deadline_s=s_from_ns(replay.makespan_ns))
    return build_plan(frontier, replay, target=target)


@st.composite
def plans(draw: Any) -> tuple[Plan, Profile]:
    """Any plan of any schedule or DAG, good or bad: what any planner could come up with."""
    pipeline = draw(st.one_of(pipelines(max_stages=3, max_microbatches=5), dags(num_stages=2)))
    profile = draw(profiles(pipeline.num_profile_stages, max_options=4))
    options = [
        draw(st.integers(0, len(profile.table(op.profile_stage, op.instruction)) - 1))
        for op in pipeline.operations
    ]
    shape = {"gpus_per_stage": draw(st.integers(1, 9)), "replicas": draw(st.integers(1, 1000))}
    return planned(pipeline, profile, options, **shape), profile


def one_stage(rows: list[tuple[Any, ...]], options: list[int]) -> tuple[Plan, Profile]:
    """A plan for as many microbatches as two options each need, on one stage: f b f b ..."""
    profile = Profile.from_rows(rows)
    return planned(Pipeline("1f1b", 1, len(options) // 2), profile, options), profile


#: Twice the clock, half the time, thrice the power. Rows are sorted by time: option 0 is 2000 MHz.
HALVING = [
    (0, "forward", 1000, 1.0, 100.0),
    (0, "forward", 2000, 0.5, 150.0),
    (0, "backward", 1000, 2.0, 200.0),
    (0, "backward", 2000, 1.0, 300.0),
]


def clocks(timeline: Timeline, operation: int) -> list[tuple[int, float, float]]:
    """MHz, s and J of the slices of an operation."""
    return [
        (
            piece.frequency_mhz,
            (piece.finish_ns - piece.start_ns) / 1e9,
            piece.energy_10fj / ENERGY_UNITS_PER_J,
        )
        for piece in timeline.slices
        if piece.operation == operation
    ]


PlanAndProfile = tuple[Plan, Profile]


@given(plans())
def test_without_noise_and_latency_a_replay_is_exactly_what_the_plan_states(
    planned: PlanAndProfile,
) -> None:
    plan, timeline = planned[0], simulate(*planned)
    assert timeline.iteration_time == timeline.sync_time == plan.iteration_time
    assert (timeline.energy, timeline.average_power) == (plan.energy, plan.average_power)
    starts = [operation.start_s for stage in plan.stages for operation in stage]
    assert [run.start_s for run in timeline.operations] == starts


@st.composite
def timelines(draw: Any) -> Timeline:
    """A plan as it runs with late clocks, or also with noise and a straggler."""
    plan, profile = draw(plans())
    latency = draw(st.sampled_from([0.0, 0.001, 0.05, 10.0]))
    if draw(st.booleans()):
        return simulate(plan, profile, switch_latency=latency, noise=0.1, sync_time=1.0)
    return simulate(plan, profile, switch_latency=latency)


@given(timelines())
def test_operations_and_bubbles_tile_every_stage(timeline: Timeline) -> None:
    end = timeline.sync_time
    for stage in timeline.stages:
        runs = [(run.start_s, run.finish_s) for run in stage.operations]
        gaps = [(bubble.start_s, bubble.finish_s) for bubble in stage.bubbles]
        spans = [(0, 0), *sorted(runs + gaps), (end, end)]
        assert all(span[1] == following[0] for span, following in pairwise(spans))
        assert stage.busy_s == pytest.approx(sum(run.duration_s for run in stage.operations))
        assert stage.blocked_s == pytest.approx(sum(gap.duration_s for gap in stage.bubbles))
        assert stage.busy_s + stage.blocked_s == pytest.approx(end)


@given(timelines())
def test_slices_tile_every_operation(timeline: Timeline) -> None:
    slices = timeline.slices
    assert {piece.operation for piece in slices} == set(range(len(timeline.operations)))
    for piece, following in pairwise(slices):
        if piece.operation == following.operation:
            assert piece.finish_ns == following.start_ns
        else:
            assert piece.operation + 1 == following.operation
            assert piece.finish_ns == timeline.replay.finishes_ns[piece.operation]
            assert following.start_ns == timeline.replay.starts_ns[following.operation]


@given(timelines())
def test_energies_of_stages_add_up_to_that_of_the_timeline(timeline: Timeline) -> None:
    computation_j = sum(stage.computation_energy_j for stage in timeline.stages)
    blocking_j = sum(stage.blocking_energy_j for stage in timeline.stages)
    assert computation_j == pytest.approx(timeline.computation_energy)
    assert blocking_j == pytest.approx(timeline.blocking_energy)
    assert computation_j + blocking_j == pytest.approx(timeline.energy)


@given(plans(), st.sampled_from([0.0, 0.001, 0.05, 10.0]))
def test_power_over_time_adds_up_to_the_energy(planned: PlanAndProfile, latency: float) -> None:
    timeline = simulate(*planned, switch_latency=latency)
    times_ns, power_w = timeline.power
    assert (times_ns[0], times_ns[-1]) == (0, timeline.sync_time_ns)
    assert float(power_w @ np.diff(times_ns)) / 1e9 == pytest.approx(timeline.energy)
    assert timeline.peak_power >= timeline.average_power * (1 - 1e-9)


@given(plans(), st.data())
def test_an_operation_can_stretch_by_what_is_said_and_no_more(
    planned: PlanAndProfile, data: st.DataObject
) -> None:
    timeline = simulate(*planned)
    times_ns = timeline.replay.finishes_ns - timeline.replay.starts_ns
    operation = data.draw(st.integers(0, len(times_ns) - 1))
    times_ns[operation] += timeline.stretch_ns[operation]
    assert timeline.pipeline.earliest_starts(times_ns)[1] == timeline.iteration_time_ns
    times_ns[operation] += 1
    assert timeline.pipeline.earliest_starts(times_ns)[1] == timeline.iteration_time_ns + 1


@given(plans())
def test_critical_path_is_a_chain_as_long_as_the_iteration(planned: PlanAndProfile) -> None:
    timeline = simulate(*planned)
    pipeline, path = timeline.pipeline, timeline.critical_path
    starts, finishes = timeline.replay.starts_ns, timeline.replay.finishes_ns
    assert (starts[path[0]], finishes[path[-1]]) == (0, timeline.iteration_time_ns)
    assert not timeline.stretch_ns[list(path)].any()
    critical = [i for i, run in enumerate(timeline.operations) if run.critical_path]
    assert critical == sorted(path)
    for operation, following in pairwise(path):
        begin, end = pipeline.succ_begin[operation], pipeline.succ_begin[operation + 1]
        successors, lags_ns = pipeline.succ[begin:end], pipeline.succ_lag_ns[begin:end]
        lag_ns = dict(zip(successors, lags_ns, strict=True))[following]
        assert finishes[operation] + lag_ns == starts[following]


def test_a_bubble_is_filled_no_further_than_the_clock_that_uses_least() -> None:
    profile = small_profile(stages=3)
    frontier = trace_frontier(Pipeline("1f1b", 3, 4), profile)
    timeline = simulate(frontier.max_frequency_plan(), profile)
    assert any(bubble.could_fill_s for use in timeline.stages for bubble in use.bubbles)
    for stage in timeline.stages:
        run_before = {run.finish_s: run for run in stage.operations}
        waiting_10uw = frontier.blocking_power_10uw[stage.stage]
        for bubble in stage.bubbles:
            assert bubble.usable == (bubble.could_stretch_s > 0)
            run = run_before.get(bubble.start_s)
            if run is None:  # the stage waits for its first operation
                assert bubble.could_stretch_s == bubble.could_fill_s == 0
                continue
            assert bubble.could_stretch_s == run.could_stretch_s
            table = profile.table(stage.stage, run.instruction)
            above_waiting = table.energy_10fj - waiting_10uw * table.time_ns
            longer_s = table.time_ns[above_waiting.argmin()] / 1e9 - run.duration_s
            useful_s = max(0, min(bubble.duration_s, bubble.could_stretch_s, longer_s))
            assert bubble.could_fill_s == pytest.approx(useful_s, abs=1e-12)


def test_at_maximum_frequency_a_timeline_is_that_of_the_frontiers_plan() -> None:
    profile = small_profile(stages=3, blocking=65.0)
    frontier = trace_frontier(Pipeline("1f1b", 3, 5), profile, gpus_per_stage=2, replicas=3)
    plan = frontier.plan(slowdown=0.05, switch_latency=0.002)
    timeline = simulate(plan, profile).at_max_frequency()
    of_frontier = simulate(frontier.max_frequency_plan(), profile)
    assert timeline.run_times_ns == of_frontier.run_times_ns
    assert timeline.run_energies_10fj == of_frontier.run_energies_10fj
    assert timeline.plan.frequencies == of_frontier.plan.frequencies
    assert timeline.plan.job == of_frontier.plan.job
    assert timeline.plan.energy_lower_bound <= of_frontier.plan.energy_lower_bound


def test_a_straggler_makes_all_wait_and_leaves_time_to_everybody() -> None:
    profile = small_profile()
    plan = planned(Pipeline("1f1b", 2, 2), profile, [0] * 8, gpus_per_stage=2, replicas=3)
    alone, waiting = simulate(plan, profile), simulate(plan, profile, sync_time=5.0)
    extra_ns = 5_000_000_000 - alone.iteration_time_ns
    assert waiting.iteration_time == alone.iteration_time
    assert waiting.energy == alone.energy + plan.waiting_energy(5.0)
    assert simulate(plan, profile, sync_time=0.01).energy == alone.energy
    assert (waiting.stretch_ns == alone.stretch_ns + extra_ns).all()


def test_the_same_seed_gives_the_same_runs_and_more_runs_begin_alike() -> None:
    profile = small_profile()
    plan = planned(Pipeline("1f1b", 2, 3), profile, [0] * 12)
    few, many = (simulate(plan, profile, noise=0.05, seed=7, runs=n) for n in (3, 8))
    assert few.run_times_ns == many.run_times_ns[:3]
    assert few.run_energies_10fj == many.run_energies_10fj[:3]
    assert len(set(many.run_times_ns)) == 8
    assert simulate(plan, profile, noise=0.05, seed=8).run_times_ns[0] != few.run_times_ns[0]


def test_noise_has_the_mean_and_spread_it_says_and_leaves_power_as_it_is() -> None:
    plan, profile = one_stage(HALVING, [0] * 4000)
    timeline = simulate(plan, profile, noise=0.1, seed=1)
    true = np.array([op.time_s for op in plan.stages[0]])
    times_ns = timeline.replay.finishes_ns - timeline.replay.starts_ns
    ratios = times_ns / 1e9 / true
    assert ratios.mean() == pytest.approx(1, abs=0.01)
    assert ratios.std() == pytest.approx(0.1, rel=0.1)
    assert timeline.replay.energies_10fj / times_ns == pytest.approx(300 * POWER_UNITS_PER_W)


def test_an_operation_is_split_where_its_clock_changes() -> None:
    # forward at 2000 MHz, backward at 1000: the iteration before has left 1000 MHz.
    timeline = simulate(*one_stage(HALVING, [0, 1]), switch_latency=0.25, ask="start")
    # 0.25 s at 1000 MHz are a quarter of the forward; three quarters at 2000 MHz take 0.375 s.
    assert clocks(timeline, 0) == [(1000, 0.25, 25.0), (2000, 0.375, 112.5)]
    # 0.25 s at 2000 MHz are a quarter of the backward; three quarters at 1000 MHz take 1.5 s.
    assert clocks(timeline, 1) == [(2000, 0.25, 75.0), (1000, 1.5, 150.0)]
    assert (timeline.iteration_time, timeline.energy) == (2.375, 362.5)
    changes = [(change.at_s, change.frequency_mhz) for change in timeline.stages[0].clock_changes]
    assert changes == [(0, 1000), (0.25, 2000), (0.875, 1000)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"noise": float("nan")}, "noise should be a finite number"),
        ({"switch_latency": -1.0}, "switch_latency should be greater"),
        ({"runs": 5}, "without noise all 5 runs are the same"),
        ({"jitter": 1}, "jitter is not a field of a conditions"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, Any], words: str) -> None:
    plan, profile = one_stage(HALVING, [0, 0])
    with pytest.raises(InputError, match=words):
        simulate(plan, profile, **arguments)


# What commands write

PHASES = {"M": {"args"}, "X": {"ts", "dur", "cat", "args"}, "C": {"ts", "args"}}


@pytest.mark.parametrize("met", [{}, {"noise": 0.05, "switch_latency": 0.03, "sync_time": 9.0}])
def test_a_trace_keeps_the_rules_of_viewers_and_says_what_the_timeline_does(
    met: dict[str, Any], tmp_path: Path
) -> None:
    profile = small_profile(stages=3)
    plan = trace_frontier(Pipeline("1f1b", 3, 5), profile).plan(slowdown=0.03)
    shown = simulate(plan, profile, **met)
    save_chrome_trace(shown, tmp_path / "trace.json")
    # Decimals, not floats: what a viewer makes of the text must not hang on its rounding.
    document = json.loads((tmp_path / "trace.json").read_text(), parse_float=Decimal)
    assert document["displayTimeUnit"] in ("ms", "ns")
    assert document["otherData"]["profile_source"] == "modelled"
    events = document["traceEvents"]
    for event in events:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert PHASES[event["ph"]] <= set(event)
        if event["ph"] == "X":
            assert isinstance(event["tid"], int)
            assert event["dur"] > 0
        for field in ("ts", "dur"):
            assert event.get(field, 0) >= 0
            assert event.get(field, Decimal(0)) % Decimal("0.001") == 0
    # Every stage has a named track with all its operations.
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(names.values()) == ["stage 0", "stage 1", "stage 2"]
    slices = [e for e in events if e["ph"] == "X"]
    columns = shown.pipeline.operations, shown.replay.starts_ns, shown.replay.finishes_ns
    for event, op, start, finish in zip(slices, *columns, strict=True):
        assert names[event["tid"]] == f"stage {op.stage}"
        assert (event["ts"] * 1000, event["dur"] * 1000) == (int(start), int(finish - start))
    for event, following in pairwise(slices):
        is_other_stage = event["tid"] != following["tid"]
        assert is_other_stage or event["ts"] + event["dur"] <= following["ts"]
    # Counters are numbers in time order.
    counters: dict[str, list[Any]] = {}
    for event in events:
        if event["ph"] == "C":
            counters.setdefault(event["name"], []).append(event)
    assert set(counters) == {*(f"stage {k} clock" for k in range(3)), "power of all GPUs"}
    for samples in counters.values():
        times = [sample["ts"] for sample in samples]
        assert times == sorted(times)
        assert (times[0], times[-1] * 1000) == (0, shown.sync_time_ns)
        values = [value for sample in samples for value in sample["args"].values()]
        assert len(values) == len(samples)
        assert {type(value) for value in values} <= {int, Decimal}


@pytest.fixture
def solved(folder: Path) -> Path:
    done("solve --quiet --slowdown 2 --replicas 4")
    return folder


def test_json_is_the_timeline_of_the_plan(solved: Path) -> None:
    document, plan = told("simulate plan.json"), Plan.load("plan.json")
    timeline = simulate(plan, Profile.read_csv("profile.csv")).to_dict()
    assert timeline.items() <= document.items()
    assert all(stage["bubbles"] for stage in document["stages"])
    assert not {"runs", "cluster"} & document.keys()
    assert "wrote out.json" in done("simulate plan.json --trace out.json --plot")
    assert json.loads((solved / "out.json").read_text())["traceEvents"]
    assert (solved / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_noisy_runs_give_percentiles(solved: Path) -> None:
    document = told("simulate --noise 3 --runs 20 --seed 5")
    times = document["runs"]["iteration_time_s"]
    assert times == sorted(times)
    assert times[0] < times[-1]
    assert document == told("simulate --noise 3 --runs 20 --seed 5")


def test_switch_latency_is_in_milliseconds_and_sync_time_adds_waiting(solved: Path) -> None:
    late = told("simulate --switch-latency 5")["stages"][0]["clock_changes"]
    prompt = told("simulate")["stages"][0]["clock_changes"]
    assert late[1]["frequency_mhz"] in {change["frequency_mhz"] for change in prompt}
    assert late[1]["at_s"] >= 0.005
    document, plan = told("simulate --sync-time 30"), Plan.load("plan.json")
    assert document["sync_time_s"] == 30
    assert document["energy_j"] == pytest.approx(plan.energy + plan.waiting_energy(30))
    early = told("simulate --sync-time 0.1")
    assert early["notes"] == ["the plan takes longer than --sync-time, so nobody waits"]


def test_a_changed_profile_is_refused_and_another_statement_is_pointed_out(solved: Path) -> None:
    document = json.loads((solved / "plan.json").read_text())
    document["predicted"]["energy_j"] += 1
    (solved / "plan.json").write_text(json.dumps(document))
    assert "envplan check" in told("simulate")["notes"][0]
    small_profile(clocks=(1740, 1500, 1260, 1020, 780, 600)).save_csv(solved / "profile.csv")
    refused("simulate", "has changed since", "--force")
    done("simulate --force")
