"""EnvPipe: how far stages run ahead, its valley, its envelope and its iterations."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli_helpers import small_profile
from envplan.errors import InputError
from envplan.pipeline import Pipeline
from envplan.planners import EnvPipe, EnvPipeRun, forwards_ahead
from envplan.profile import Profile
from envplan.solve import Frontier, trace_frontier
from envplan.units import ns_from_s
from envplan.verify import verify_plan
from strategies import falling_profiles, frontiers, pipelines

# Valley at 1200 MHz: forward 20 + backward 40 J there, 25 + 50 J at the top.
ROWS = [
    ("forward", 900, 0.30, 22.0),
    ("forward", 1200, 0.20, 20.0),
    ("forward", 1500, 0.10, 25.0),
    ("backward", 900, 0.60, 44.0),
    ("backward", 1200, 0.40, 40.0),
    ("backward", 1500, 0.20, 50.0),
]


def even_profile(stages: int) -> Profile:
    return Profile.from_rows([(s, *row) for s in range(stages) for row in ROWS])


def traced(stages: int, microbatches: int, schedule: str = "1f1b", **more: Any) -> Frontier:
    pipeline = Pipeline(schedule, stages, microbatches, **more)
    return trace_frontier(pipeline, even_profile(stages), blocking_power=60.0)


def steps(frontier: Frontier, run: EnvPipeRun) -> list[tuple[list[int], list[int], dict[int, int]]]:
    """Of each iteration the MHz of all operations, the critical path, from its last operation, and
    what was raised: operation -> MHz after."""
    replays = [frontier.problem.replay(rows) for rows in run.choices]
    clocks = [replay.frequency_mhz.tolist() for replay in replays]
    raised = [
        {i: mhz for i, mhz in enumerate(after) if mhz != before[i]}
        for before, after in zip(clocks, [*clocks[1:], clocks[-1]], strict=True)
    ]
    paths = [[*replay.critical_path[::-1]] for replay in replays]
    return list(zip(clocks, paths, raised, strict=True))


@pytest.mark.parametrize(
    ("microbatches", "slots", "ahead"),
    [
        (32, None, (3, 2, 1, 0)),  # floor(0.2 s x (S - s - 1) / 0.2 s)
        (5, None, (1, 2, 1, 0)),
        (2, None, (0, 0, 0, 0)),
        (2, 2, (0, 0, 0, 0)),
        (32, 6, (2, 2, 1, 0)),
        (32, 4, (0, 0, 0, 0)),
        (32, [7, 4, 9, 1], (3, 1, 1, 0)),
        (32, [5, 9, 9, 9], (1, 1, 1, 0)),
    ],
)
def test_forwards_ahead_fit_into_the_wait_the_microbatches_and_the_free_slots(
    microbatches: int, slots: Any, ahead: tuple[int, ...]
) -> None:
    assert forwards_ahead(even_profile(4), microbatches, slots) == ahead


def test_forwards_ahead_rounds_down() -> None:
    rows = [(s, *row) for s in range(3) for row in ROWS if row[:2] != ("backward", 1500)]
    rows += [(s, "backward", 1500, 0.299999999, 50.0) for s in range(3)]
    assert forwards_ahead(Profile.from_rows(rows), 32) == (2, 1, 0)  # 2.99... and 1.49...


@pytest.mark.parametrize(
    ("slots", "words"),
    [
        (3, "stage 0 has 3, but 1F1B alone keeps 4 microbatches there"),
        ([4, 2, 2, 1], "stage 1 has 2, but 1F1B alone keeps 3"),
        ([4, 3, 2, 0], "stage 3 has 0, but 1F1B alone keeps 1"),
        ([4, 3], "2 numbers for 4 stages"),
        (-1, "must be at least 0"),
        ([4, 3, 2.5, 1], "stage 2 must be a whole number"),
    ],
)
def test_too_few_slots_for_1f1b_are_refused(slots: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        forwards_ahead(even_profile(4), 32, slots)


@given(st.data())
def test_forwards_ahead_always_makes_a_schedule_within_the_slots(data: st.DataObject) -> None:
    stages, microbatches = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 12))
    profile = data.draw(falling_profiles(stages))
    slots = data.draw(st.none() | st.integers(min(stages, microbatches), 2 * stages))
    ahead = forwards_ahead(profile, microbatches, slots)
    Pipeline("envpipe", stages, microbatches, forwards_ahead=ahead)
    for stage, count in enumerate(ahead):
        assert slots is None or count <= slots - min(stages - stage, microbatches)


def test_first_iteration_has_the_envelope_at_the_top_and_the_rest_in_the_valley() -> None:
    frontier = traced(3, 4)
    (first, *_), *_, (last, *_) = steps(frontier, EnvPipe().run(frontier))
    ends = {("forward", 0), ("backward", 3)}
    for op, mhz in zip(frontier.pipeline.operations, first, strict=True):
        top = op.stage == 2 or (op.instruction, op.microbatch) in ends
        assert mhz == (1500 if top else 1200)
    assert set(last) <= {1200, 1500}  # the valley, or one step up: the top


def test_even_stages_end_with_the_outer_envelope_at_no_slowdown() -> None:
    ahead = forwards_ahead(even_profile(4), 12)
    frontier = traced(4, 12, "envpipe", forwards_ahead=ahead)
    run = EnvPipe().run(frontier)
    assert run.stopped == "outer envelope"
    for op in (frontier.pipeline.operations[i] for i in run.replay.critical_path):
        ends = {("forward", 0), ("backward", 11)}
        assert op.stage == 3 or (op.instruction, op.microbatch) in ends
    plan = EnvPipe().plan(frontier)
    assert plan.predicted.slowdown_percent == 0
    assert plan.predicted.savings_percent > 0


def test_slow_middle_stage_ends_at_its_highest_clocks() -> None:
    rows = [
        (s, name, mhz, time * (1.6 if s == 1 else 1), energy)
        for s in range(3)
        for name, mhz, time, energy in ROWS
    ]
    frontier = trace_frontier(Pipeline("1f1b", 3, 8), Profile.from_rows(rows))
    assert EnvPipe().run(frontier).stopped == "highest clocks"
    assert EnvPipe().plan(frontier).predicted.slowdown_percent == 0


def test_critical_path_goes_along_a_stage_where_nothing_waits_and_else_to_the_neighbour() -> None:
    frontier = traced(2, 2)
    *_, (_, last, _) = steps(frontier, EnvPipe().run(frontier))
    path = [frontier.pipeline.operations[i] for i in last]
    assert [(op.stage, f"{op.instruction[0]}{op.microbatch}") for op in path] == [
        (0, "b1"), (1, "b1"), (1, "f1"), (1, "b0"), (1, "f0"), (0, "f0"),
    ]  # fmt: skip


def test_balanced_raises_the_lowest_clock_by_a_step_and_greedy_the_last_one_by_three() -> None:
    frontier = trace_frontier(Pipeline("1f1b", 3, 6), small_profile(3, blocking=70.0))
    clock = (780, 1020, 1260, 1500, 1740)
    for how in ("balanced", "greedy"):
        run = EnvPipe(how).run(frontier)
        for mhz, path, raised in steps(frontier, run)[:-1]:
            raisable = [i for i in path if mhz[i] < 1740]
            lowest = min(mhz[i] for i in raisable)
            wanted = raisable[:1] if how == "greedy" else [i for i in path if mhz[i] == lowest]
            assert sorted(raised) == sorted(wanted)
            for i, after in raised.items():
                by = 3 if how == "greedy" else 1
                assert clock.index(after) == min(clock.index(mhz[i]) + by, 4)


@given(frontiers(4, 6), st.sampled_from(["balanced", "greedy"]))
def test_every_run_ends_and_states_what_a_replay_gives(
    frontier: Frontier, reconfigure: str
) -> None:
    run = EnvPipe(reconfigure).run(frontier)
    *earlier, (_, path, _) = steps(frontier, run)
    assert all(raised for *_, raised in earlier)
    plan = EnvPipe(reconfigure).plan(frontier)
    assert ns_from_s(plan.iteration_time) == run.replay.makespan_ns
    assert verify_plan(plan, frontier.profile)
    # The path is tight: its operations follow each other without a gap, from 0 to the makespan.
    assert run.replay.starts_ns[path[-1]] == 0
    assert run.replay.finishes_ns[path[0]] == run.replay.makespan_ns


@given(st.data())
def test_never_slower_than_highest_clocks_where_these_are_the_fastest(data: st.DataObject) -> None:
    pipeline = data.draw(pipelines())
    profile = data.draw(falling_profiles(pipeline.num_profile_stages))
    frontier = trace_frontier(pipeline, profile)
    assert EnvPipe().plan(frontier).predicted.slowdown_percent <= 0
