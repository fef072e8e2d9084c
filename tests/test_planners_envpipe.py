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


def clocks(frontier: Frontier, run: EnvPipeRun) -> list[list[int]]:
    return run.plan(frontier).frequencies


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
    run = EnvPipe().run(frontier)
    first = run.iterations[0]
    raised = {i for step in run.iterations for i, _, _ in step.raised}
    pipeline = frontier.pipeline
    for i, op in enumerate(pipeline.operations):
        ends = {("forward", 0), ("backward", 3)}
        if op.stage == 2 or (op.instruction, op.microbatch) in ends:
            assert i not in raised
    untouched = [row for stage in clocks(frontier, run) for row in stage]
    assert all(mhz in (1200, 1500) for mhz in untouched)  # the valley, or one step up: the top
    assert first.iteration_time >= run.iterations[-1].iteration_time


def test_even_stages_end_with_the_outer_envelope_at_no_slowdown() -> None:
    ahead = forwards_ahead(even_profile(4), 12)
    frontier = traced(4, 12, "envpipe", forwards_ahead=ahead)
    run = EnvPipe().run(frontier)
    assert run.stopped == "outer envelope"
    envelope = {
        (op.stage, op.instruction, op.microbatch)
        for op in (frontier.pipeline.operations[i] for i in run.iterations[-1].critical_path)
    }
    assert all(
        stage == 3 or (instruction, microbatch) in {("forward", 0), ("backward", 11)}
        for stage, instruction, microbatch in envelope
    )
    plan = run.plan(frontier)
    assert plan.predicted.slowdown_percent == 0
    assert plan.predicted.savings_percent > 0


def test_slow_middle_stage_ends_at_its_highest_clocks() -> None:
    rows = [
        (s, name, mhz, time * (1.6 if s == 1 else 1), energy)
        for s in range(3)
        for name, mhz, time, energy in ROWS
    ]
    frontier = trace_frontier(Pipeline("1f1b", 3, 8), Profile.from_rows(rows))
    run = EnvPipe().run(frontier)
    assert run.stopped == "highest clocks"
    assert run.iterations[-1].raised == ()
    assert run.plan(frontier).predicted.slowdown_percent == 0


def test_critical_path_goes_along_a_stage_where_nothing_waits_and_else_to_the_neighbour() -> None:
    frontier = traced(2, 2)
    run = EnvPipe().run(frontier)
    path = [frontier.pipeline.operations[i] for i in run.iterations[-1].critical_path]
    assert [(op.stage, f"{op.instruction[0]}{op.microbatch}") for op in path] == [
        (0, "b1"), (1, "b1"), (1, "f1"), (1, "b0"), (1, "f0"), (0, "f0"),
    ]  # fmt: skip


def test_balanced_raises_all_of_the_lowest_clock_by_one_step() -> None:
    frontier = trace_frontier(Pipeline("1f1b", 2, 4), small_profile(2, blocking=70.0))
    for step in EnvPipe("balanced").run(frontier).iterations[:-1]:
        assert len({before for _, before, _ in step.raised}) == 1
        on_path = set(step.critical_path)
        assert all(i in on_path for i, _, _ in step.raised)


def test_greedy_raises_the_last_one_that_can_be_raised_by_three_steps() -> None:
    frontier = trace_frontier(Pipeline("1f1b", 3, 6), small_profile(3, blocking=70.0))
    clock = (780, 1020, 1260, 1500, 1740)
    now: dict[int, int] = {}
    for step in EnvPipe("greedy").run(frontier).iterations[:-1]:
        ((i, before, after),) = step.raised
        assert clock.index(after) == min(clock.index(before) + 3, 4)
        later = step.critical_path[: step.critical_path.index(i)]
        assert all(now.get(j, 1740) == 1740 for j in later if j in now)
        now[i] = after


@given(frontiers(4, 6), st.sampled_from(["balanced", "greedy"]))
def test_every_run_ends_and_states_what_a_replay_gives(
    frontier: Frontier, reconfigure: str
) -> None:
    run = EnvPipe(reconfigure).run(frontier)
    last = run.iterations[-1]
    assert ns_from_s(last.iteration_time) == run.replay.makespan_ns
    plan = run.plan(frontier)
    assert last.energy == plan.energy
    assert last.raised == ()
    assert all(step.raised for step in run.iterations[:-1])
    assert verify_plan(plan, frontier.profile)
    # The path is tight: its operations follow each other without a gap, from 0 to the makespan.
    path = last.critical_path
    assert run.replay.starts_ns[path[-1]] == 0
    assert run.replay.finishes_ns[path[0]] == run.replay.makespan_ns


@given(st.data())
def test_never_slower_than_highest_clocks_where_these_are_the_fastest(data: st.DataObject) -> None:
    pipeline = data.draw(pipelines())
    profile = data.draw(falling_profiles(pipeline.num_profile_stages))
    frontier = trace_frontier(pipeline, profile)
    assert EnvPipe().plan(frontier).predicted.slowdown_percent <= 0
