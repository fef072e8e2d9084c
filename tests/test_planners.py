"""What each planner answers: the registry, the baselines, and EnvPipe's order and iterations."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cli_helpers import small_profile
from envplan.check.plans import verify_plan
from envplan.errors import InputError, NoAnswerError
from envplan.pipeline import Pipeline
from envplan.plan import Plan
from envplan.planners import (
    PLANNERS,
    EnvPipe,
    EnvPipeRun,
    ZeusGlobal,
    forwards_ahead,
    planner_named,
)
from envplan.profile import Profile
from envplan.request import Request
from envplan.solve import Frontier, trace_frontier
from envplan.solve.uniform_clocks import ClockOptions
from envplan.units import ns_from_s
from strategies import falling_profiles, frontiers, pipelines

# Two stages, the second twice as slow: 100 ms against 50 ms forward at the top.
LOPSIDED = [
    (stage, name, mhz, 0.05 * (stage + 1) * work * 1500 / mhz, energy * work * (stage + 1))
    for stage in (0, 1)
    for name, work in (("forward", 1), ("backward", 2))
    for mhz, energy in ((500, 6.0), (750, 7.0), (1000, 9.0), (1500, 14.0))
]


def of_rows(rows: list[tuple[Any, ...]], *shape: int, power: float | None = None) -> Frontier:
    return trace_frontier(Pipeline("1f1b", *shape), Profile.from_rows(rows), blocking_power=power)


def lopsided() -> Frontier:
    return of_rows(LOPSIDED, 2, 3, power=60)


def used(plan: Plan) -> list[set[int]]:
    return [set(stage) for stage in plan.frequencies]


def test_unknown_planner_lists_the_known_ones() -> None:
    with pytest.raises(InputError, match=r'unknown planner "zeus"; known: max_frequency, zeus_gl'):
        planner_named("zeus")
    assert all(planner_named(name).name == name for name in PLANNERS)


@pytest.mark.parametrize("name", sorted(PLANNERS))
@given(frontier=frontiers(3, 4), data=st.data())
@settings(max_examples=15)
def test_every_plan_of_every_planner_is_proved_by_check(
    name: str, frontier: Frontier, data: st.DataObject
) -> None:
    planner = PLANNERS[name]
    plan = planner.plan(frontier)
    assert plan.planner == name
    assert verify_plan(plan, frontier.profile)
    if planner.takes_target:
        later = int(ns_from_s(plan.iteration_time) * data.draw(st.sampled_from([1.0, 1.1, 3.0])))
        slower = planner.plan(frontier, later)
        assert ns_from_s(slower.iteration_time) <= later
        assert slower.energy <= plan.energy
        assert verify_plan(slower, frontier.profile)


@pytest.mark.parametrize("name", sorted(PLANNERS))
def test_target_that_is_too_early_has_no_answer_and_some_planners_take_none(name: str) -> None:
    error, words = NoAnswerError, r"0\.100000000 s"
    if not PLANNERS[name].takes_target:
        error, words = InputError, f"planner {name} takes no target"
    with pytest.raises(error, match=words):
        PLANNERS[name].plan(lopsided(), 10**8)


@pytest.mark.parametrize(
    ("name", "share", "clocks"),
    [
        ("zeus_global", 1.4999, [{1500}, {1500}]),
        ("zeus_global", 1.5, [{1000}, {1000}]),
        # At 500 MHz operations save less than the longer wait costs.
        ("zeus_global", 100, [{750}, {750}]),
        ("zeus_per_stage", 1, [{750}, {1500}]),
        # At 1000 MHz stage 1's forward takes 150 ms, as long as stage 0's at 500 MHz.
        ("zeus_per_stage", 1.5, [{500}, {1000}]),
    ],
)
def test_zeus_takes_the_cheapest_clocks_in_time(
    name: str, share: float, clocks: list[set[int]]
) -> None:
    planner, frontier = PLANNERS[name], lopsided()
    fastest = ns_from_s(planner.plan(frontier).iteration_time)
    assert used(planner.plan(frontier, int(fastest * share))) == clocks


def test_clocks_that_cost_time_and_energy_are_not_on_zeus_frontier() -> None:
    rows = [(0, name, mhz, t, e) for name in ("forward", "backward")
            for mhz, t, e in ((600, 0.3, 9.0), (900, 0.2, 10.0), (1200, 0.2, 12.0))]  # fmt: skip
    frontier = of_rows(rows, 1, 2)
    assert used(ZeusGlobal().plan(frontier)) == [{900}]
    assert used(PLANNERS["max_frequency"].plan(frontier)) == [{1200}]


def test_missing_clock_is_replaced_by_the_next_higher_one() -> None:
    options = {"forward": ((900, 0.2, 3.0), (1200, 0.1, 5.0))}
    options["backward"] = ((1000, 0.3, 6.0), (1100, 0.2, 9.0))
    rows = [(0, name, *row) for name, listed in options.items() for row in listed]
    frontier = of_rows(rows, 1, 1, power=0)
    planner = ZeusGlobal()
    found = [
        planner.plan(frontier, replay.makespan_ns).frequencies
        for replay in planner.undominated_replays(frontier)
    ]
    assert found == [[[1200, 1100]], [[1200, 1000]], [[900, 1000]]]


def test_clock_of_several_configs_is_the_fastest_one() -> None:
    options = [(0.3, 1.0, "slow"), (0.2, 3.0, "fast"), (0.2, 4.0, "dear")]
    rows = [(0, "forward", 900, *option) for option in options]
    table = Profile.from_rows([*rows, (0, "backward", 900, 0.1, 1.0, "")]).table(0, "forward")
    clocks = ClockOptions.of(table)
    assert clocks.mhz == (900,)
    assert table.config[clocks.option[0]] == "fast"


def test_operation_without_clock_control_runs_as_it_is() -> None:
    rows = [row for row in LOPSIDED if row[:2] != (0, "forward")]
    frontier = of_rows([*rows, (0, "forward", 0, 0.05, 3.0)], 2, 2)
    for planner in PLANNERS.values():
        assert 0 in planner.plan(frontier).frequencies[0]


@pytest.mark.parametrize(
    "asked",
    [
        {"power_cap": 500.0},
        {"energy_budget": 500.0},
        {"switch_latency": 0.01, "target_time": 9.0},
        {"polish": 1.0},
        {"ladder": 2},
    ],
)
def test_other_planners_refuse_what_they_do_not_know(asked: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="planner zeus_global knows times only"):
        ZeusGlobal().solve(lopsided(), Request.from_options(**asked))


def test_our_planner_answers_whole_requests_and_others_their_times() -> None:
    frontier = lopsided()
    for asked in ({"slowdown": 0.2, "min_dwell": 0.5}, {"min_energy": True}, {"straggler_time": 9}):
        request = Request.from_options(**asked)
        assert PLANNERS["frontier"].solve(frontier, request) == frontier.solve(request)
    star = ZeusGlobal().solve(frontier, Request.from_options(min_energy=True))
    assert star == ZeusGlobal().plan(frontier, frontier.min_energy_time_ns)
    waiting = ZeusGlobal().solve(frontier, Request.from_options(straggler_time=9))
    assert waiting.iteration_time > ZeusGlobal().plan(frontier).iteration_time
    assert waiting.predicted.until_straggler is not None


# EnvPipe

# Valley at 1200 MHz: forward 20 + backward 40 J there, 25 + 50 J at the top.
ROWS = [
    (name, mhz, work * time, work * energy)
    for name, work in (("forward", 1), ("backward", 2))
    for mhz, time, energy in ((900, 0.30, 22.0), (1200, 0.20, 20.0), (1500, 0.10, 25.0))
]


def even_profile(stages: int) -> Profile:
    return Profile.from_rows([(s, *row) for s in range(stages) for row in ROWS])


def even(stages: int, microbatches: int, schedule: str = "1f1b", **more: Any) -> Frontier:
    pipeline = Pipeline(schedule, stages, microbatches, **more)
    return trace_frontier(pipeline, even_profile(stages), blocking_power=60.0)


def steps(frontier: Frontier, run: EnvPipeRun) -> list[tuple[list[int], list[int], dict[int, int]]]:
    """Of each iteration the MHz of all operations, the critical path, from its last operation, and
    what was raised: operation -> MHz after.
    """
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
        (32, 3, "stage 0 has 3, but 1F1B alone keeps 4 microbatches there"),
        (32, [4, 2, 2, 1], "stage 1 has 2, but 1F1B alone keeps 3"),
        (32, [4, 3, 2, 0], "stage 3 has 0, but 1F1B alone keeps 1"),
        (32, [4, 3], "2 numbers for 4 stages"),
        (32, -1, "must be at least 0"),
        (32, [4, 3, 2.5, 1], "stage 2 must be a whole number"),
    ],
)
def test_forwards_ahead_fit_into_the_wait_the_microbatches_and_the_free_slots(
    microbatches: int, slots: Any, ahead: tuple[int, ...] | str
) -> None:
    if isinstance(ahead, str):
        with pytest.raises(InputError, match=ahead):
            forwards_ahead(even_profile(4), microbatches, slots)
    else:
        assert forwards_ahead(even_profile(4), microbatches, slots) == ahead


def test_forwards_ahead_rounds_down() -> None:
    rows = [(s, *row) for s in range(3) for row in ROWS if row[:2] != ("backward", 1500)]
    rows += [(s, "backward", 1500, 0.299999999, 50.0) for s in range(3)]
    assert forwards_ahead(Profile.from_rows(rows), 32) == (2, 1, 0)  # 2.99... and 1.49...


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
    frontier = even(3, 4)
    (first, *_), *_, (last, *_) = steps(frontier, EnvPipe().run(frontier))
    ends = {("forward", 0), ("backward", 3)}
    for op, mhz in zip(frontier.pipeline.operations, first, strict=True):
        top = op.stage == 2 or (op.instruction, op.microbatch) in ends
        assert mhz == (1500 if top else 1200)
    assert set(last) <= {1200, 1500}  # the valley, or one step up: the top


def test_envpipe_stops_at_the_outer_envelope_or_at_its_highest_clocks_without_slowdown() -> None:
    ahead = forwards_ahead(even_profile(4), 12)
    frontier = even(4, 12, "envpipe", forwards_ahead=ahead)
    run, plan = EnvPipe().run(frontier), EnvPipe().plan(frontier)
    assert run.stopped == "outer envelope"
    for op in (frontier.pipeline.operations[i] for i in run.replay.critical_path):
        assert op.stage == 3 or (op.instruction, op.microbatch) in {
            ("forward", 0),
            ("backward", 11),
        }
    assert plan.predicted.slowdown_percent == 0 < plan.predicted.savings_percent
    slow_middle = [
        (s, name, mhz, time * (1.6 if s == 1 else 1), energy)
        for s in range(3)
        for name, mhz, time, energy in ROWS
    ]
    frontier = of_rows(slow_middle, 3, 8)
    assert EnvPipe().run(frontier).stopped == "highest clocks"
    assert EnvPipe().plan(frontier).predicted.slowdown_percent == 0


def test_critical_path_goes_along_a_stage_where_nothing_waits_and_else_to_the_neighbour() -> None:
    frontier = even(2, 2)
    *_, (_, last, _) = steps(frontier, EnvPipe().run(frontier))
    path = [frontier.pipeline.operations[i] for i in last]
    assert [(op.stage, f"{op.instruction[0]}{op.microbatch}") for op in path] == [
        (0, "b1"), (1, "b1"), (1, "f1"), (1, "b0"), (1, "f0"), (0, "f0"),
    ]  # fmt: skip


@pytest.mark.parametrize(("how", "by"), [("balanced", 1), ("greedy", 3)])
def test_balanced_raises_the_lowest_clock_by_a_step_and_greedy_the_last_one_by_three(
    how: str, by: int
) -> None:
    frontier = trace_frontier(Pipeline("1f1b", 3, 6), small_profile(3, blocking=70.0))
    clock = (780, 1020, 1260, 1500, 1740)
    for mhz, path, raised in steps(frontier, EnvPipe(how).run(frontier))[:-1]:
        raisable = [i for i in path if mhz[i] < 1740]
        lowest = min(mhz[i] for i in raisable)
        wanted = raisable[:1] if how == "greedy" else [i for i in path if mhz[i] == lowest]
        assert sorted(raised) == sorted(wanted)
        for i, after in raised.items():
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
