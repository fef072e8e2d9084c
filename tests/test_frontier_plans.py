"""Plans on the frontier: deadlines, bounds, look-up, polish; and plans of every schedule."""

from __future__ import annotations

import threading
import time
from collections import Counter
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli_helpers import assert_refused, envplan
from envplan import simulate
from envplan.check.plans import verify_plan
from envplan.errors import InputError, NoAnswerError
from envplan.pipeline import Pipeline
from envplan.plan import Plan
from envplan.profile import Profile
from envplan.request.limits.average_power import least_average_10uw
from envplan.solve import Frontier, trace_frontier
from envplan.units import POWER_UNITS_PER_W, ns_from_s_floor, w_from_10uw
from strategies import EVERY_INSTRUCTION, noisy, profiles


@pytest.fixture(scope="module")
def frontier() -> Frontier:
    return trace_frontier(Pipeline("1f1b", 4, 8), Profile.builtin("a40-gpt3-1.3b-4stage"))


def test_targets_outside_the_frontier(frontier: Frontier) -> None:
    with pytest.raises(NoAnswerError, match=f"T_min is {frontier.min_time:.9f} s"):
        frontier.plan(frontier.min_time - 1e-9)
    late, star = frontier.plan(10 * frontier.min_energy_time), frontier.plan(min_energy=True)
    assert (late.energy, late.frequencies) == (star.energy, star.frequencies)


def test_energy_budget_gives_the_fastest_plan_that_keeps_it(frontier: Frontier) -> None:
    middle = (frontier.plan().energy + frontier.plan(min_energy=True).energy) / 2
    plan = frontier.plan(energy_budget=middle)
    assert plan.energy <= middle
    faster = frontier.plan(max(frontier.min_time, plan.iteration_time * 0.99))
    assert faster.energy > middle
    with pytest.raises(NoAnswerError, match="within the budget"):
        frontier.plan(energy_budget=frontier.energies[-1] * 0.99)


@given(profiles(1, max_options=3), st.integers(1, 2), st.floats(0.0, 1.0))
def test_a_cap_on_one_stage_is_refused_only_where_no_choice_of_all_keeps_it(
    profile: Profile, microbatches: int, share: float
) -> None:
    pipeline = Pipeline("1f1b", 1, microbatches)
    frontier = trace_frontier(pipeline, profile)
    problem = frontier.problem
    sizes = [len(problem.tables[number]) for number in problem.table.tolist()]
    replays = [problem.replay(np.array(rows, np.int32)) for rows in product(*map(range, sizes))]
    powers = [replay.energy_10fj / replay.makespan_ns / POWER_UNITS_PER_W for replay in replays]
    assert w_from_10uw(least_average_10uw(frontier)) <= min(powers) * (1 + 1e-9)
    cap = min(powers) + share * (max(powers) - min(powers))
    try:
        # Powers are whole 10 uW.
        assert frontier.plan(power_cap=cap).average_power <= cap + 1 / POWER_UNITS_PER_W
    except NoAnswerError:
        assert min(powers) >= cap * (1 - 1e-9)


def test_a_cap_below_what_t_star_draws_is_kept_by_going_slower(frontier: Frontier) -> None:
    cap = 0.85 * frontier.plan(min_energy=True).average_power
    plan = frontier.plan(power_cap=cap)
    assert plan.average_power <= cap
    assert plan.iteration_time > frontier.min_energy_time
    faster = trace_frontier(frontier.pipeline, frontier.profile, full=True).plan(
        sync_time=plan.iteration_time * 0.99
    )
    assert faster.average_power > cap
    assert verify_plan(plan, frontier.profile)
    assert frontier.plan(power_cap=1e5).iteration_time <= frontier.min_time
    with pytest.raises(NoAnswerError, match="no plan draws less than"):
        frontier.plan(power_cap=10.0)


def test_a_cap_that_needs_rows_dearer_than_waiting_is_kept_with_as_few_as_possible() -> None:
    profile = Profile.builtin("h100-gpt3-175b-8stage")
    frontier = trace_frontier(Pipeline("1f1b", 8, 8), profile)
    slow, slower = (frontier.plan(power_cap=watts) for watts in (1550.0, 1450.0))
    assert slow.average_power <= 1550
    assert slower.average_power <= 1450
    assert frontier.min_energy_time < slow.iteration_time < slower.iteration_time
    assert verify_plan(slower, profile)


def test_energy_at_interpolates_breakpoints_and_rests_beyond_t_star(frontier: Frontier) -> None:
    assert list(map(frontier.energy_at, frontier.times)) == frontier.energies.tolist()
    middle = ns_from_s_floor((frontier.times[3] + frontier.times[4]) / 2) / 1e9
    between = np.interp(middle, frontier.times, frontier.energies)
    assert frontier.energy_at(middle) == pytest.approx(between, rel=1e-12)
    assert frontier.energy_at(1e6) == frontier.energy_at(frontier.min_energy_time)
    with pytest.raises(NoAnswerError):
        frontier.energy_at(frontier.min_time * 0.999)


def test_one_frequency_only_leaves_one_point() -> None:
    rows = [(s, i, 1000, 0.1, 20.0) for s in range(2) for i in ("forward", "backward")]
    frontier = trace_frontier(Pipeline("1f1b", 2, 3), Profile.from_rows(rows))
    assert frontier.times.tolist() == [frontier.min_time] == [frontier.min_energy_time]
    plan = frontier.plan()
    assert plan.gap == 0
    assert plan.energy == frontier.max_frequency_plan().energy


def test_waiting_that_costs_nothing_makes_slow_best_and_dear_waiting_makes_fast_best() -> None:
    profile = Profile.builtin("a40-gpt3-1.3b-4stage")
    pipeline = Pipeline("1f1b", 4, 4)
    free = trace_frontier(pipeline, profile, blocking_power=0)
    dear = trace_frontier(pipeline, profile, blocking_power=3e3)
    assert free.min_energy_time > trace_frontier(pipeline, profile).min_energy_time
    assert dear.min_energy_time == dear.min_time


@pytest.mark.parametrize("microbatches", [3, 20])
def test_polish_keeps_the_deadline_and_never_makes_it_worse(microbatches: int) -> None:
    profile = noisy(Profile.builtin("a40-gpt3-1.3b-4stage"))
    frontier = trace_frontier(Pipeline("1f1b", 4, microbatches), profile)
    plain, polished = frontier.plan(slowdown=0.01), frontier.plan(slowdown=0.01, polish=3)
    assert polished.energy <= plain.energy
    assert polished.energy_lower_bound >= plain.energy_lower_bound
    assert polished.gap <= plain.gap
    assert verify_plan(polished, profile)


def test_what_cannot_be_traced_is_refused() -> None:
    with pytest.raises(InputError, match="has 4 stages and the pipeline needs 6"):
        trace_frontier(Pipeline("1f1b", 6, 8), Profile.builtin("a40-gpt3-1.3b-4stage"))
    options = ((1000, 9e8, 1.0), (1200, 8e8, 2.0))
    rows = [(0, name, *option) for name in ("forward", "backward") for option in options]
    with pytest.raises(InputError, match=r"range|64-bit"):
        trace_frontier(Pipeline("1f1b", 1, 10_000), Profile.from_rows(rows), blocking_power=0)


def test_progress_falls_to_t_min_and_an_exception_in_it_ends_the_trace() -> None:
    pipeline, profile = Pipeline("1f1b", 8, 64), Profile.builtin("a40-gpt3-1.3b-8stage")
    seen: list[tuple[int, int]] = []
    trace_frontier(pipeline, profile, progress=lambda now, least: seen.append((now, least)))
    assert len(seen) > 2
    assert seen == sorted(seen, reverse=True)
    assert seen[-1][0] == seen[-1][1]

    class Stop(Exception):  # noqa: N818
        pass

    def stop(now: int, least: int) -> None:
        raise Stop

    with pytest.raises(Stop):
        trace_frontier(Pipeline("1f1b", 8, 63), profile, progress=stop)


def test_other_threads_run_while_a_frontier_is_traced() -> None:
    pipeline, profile = Pipeline("1f1b", 8, 64), Profile.builtin("a40-gpt3-1.3b-8stage")
    traced = threading.Thread(
        target=trace_frontier, args=(pipeline, profile), kwargs={"full": True}
    )
    traced.start()
    ticks = 0
    while traced.is_alive():
        ticks += 1
        time.sleep(0.001)
    assert ticks > 5


BUILT_IN = "a40-gpt3-1.3b-8stage"


def with_waiting(num_stages: int, watts: float) -> Profile:
    """Every operation takes 0.1 s and 10 J on any model stage; waiting draws the given power."""
    rows = [
        (stage, name, 1000, 0.1, 10.0) for stage in range(num_stages) for name in EVERY_INSTRUCTION
    ]
    rows += [(stage, "blocking", 1000, 1.0, watts) for stage in range(num_stages)]
    return Profile.from_rows(rows)


@pytest.mark.parametrize(
    ("name", "chunks"),
    [("interleaved", 2), ("looped-bfs", 3), ("interleaved-zb", 2), ("zb-v", 2), ("dualpipe-v", 2)],
)
def test_a_gpu_with_several_model_stages_waits_once(name: str, chunks: int) -> None:
    pipeline = Pipeline(name, 2, 4, num_chunks=chunks)
    frontier = trace_frontier(pipeline, with_waiting(2 * chunks, 50.0), gpus_per_stage=3)
    assert frontier.blocking_power_w == (50.0, 50.0)
    plan = frontier.max_frequency_plan()
    computing = 10.0 * len(pipeline.operations)
    waiting = 50.0 * (2 * plan.iteration_time - 0.1 * len(pipeline.operations))
    assert plan.energy == pytest.approx(3 * (computing + waiting))
    timeline = simulate(plan, frontier.profile)
    assert timeline.blocking_energy == pytest.approx(3 * waiting)


def test_a_profile_without_split_backwards_says_how_to_split_them() -> None:
    profile = Profile.builtin("a40-gpt3-1.3b-4stage")
    with pytest.raises(InputError, match=r"no rows for backward_input on stage 3.*derive"):
        trace_frontier(Pipeline("zb-v", 2, 4), profile)


@pytest.mark.parametrize(
    ("name", "stages", "chunks"),
    [
        *((name, 8, 1) for name in ("looped-bfs", "interleaved-zb", "zb-h1")),
        *((name, 4, 2) for name in ("zb-v", "dualpipe-v")),
    ],
)
def test_a_schedule_is_solved_for_and_checked_by_name_alone(
    name: str, stages: int, chunks: int, tmp_path: Path
) -> None:
    solved = envplan(
        "solve", BUILT_IN, "--schedule", name, "-m", "8", "--slowdown", "1", cwd=tmp_path
    )
    assert solved.code == 0, solved.err
    for command in ("check plan.json", "apply plan.json", "check run.freqplan.json", "simulate"):
        ran = envplan(*command.split(), cwd=tmp_path)
        assert (ran.code, ran.err) == (0, ""), command
    plan = Plan.load(tmp_path / "plan.json")
    assert (plan.job.schedule, plan.job.stages, plan.job.chunks) == (name, stages, chunks)
    counts = Counter(op.instruction for stage in plan.stages for op in stage)
    assert counts["forward"] == counts["backward"] + counts["backward_input"] == 8 * 8
    assert counts["backward_weight"] == counts["backward_input"]


@pytest.mark.parametrize("name", ["zb-v", "dualpipe-v"])
def test_a_v_needs_two_chunks_of_an_even_number_of_model_stages(name: str, tmp_path: Path) -> None:
    with_waiting(3, 50.0).save_csv(tmp_path / "profile.csv")
    ran = envplan("frontier", "--schedule", name, "-m", "8", cwd=tmp_path)
    assert_refused(ran, 2, f"{name} with 2 chunks", "3 stages")
