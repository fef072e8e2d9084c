"""Looking plans up for stragglers."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envplan.check.plans import verify_plan
from envplan.errors import InputError
from envplan.frontier import relaxation
from envplan.pipeline import Pipeline
from envplan.plan import Plan, build_plan
from envplan.plan.target import Target
from envplan.profile import Profile
from envplan.solve import Frontier, trace_frontier
from envplan.units import s_from_ns
from plan_checks import bound_until, until
from strategies import falling_profiles, pipelines, profiles


@pytest.fixture(scope="module")
def frontier() -> Frontier:
    return trace_frontier(Pipeline("1f1b", 4, 8), Profile.builtin("a40-gpt3-1.3b-4stage"))


def test_ladder_climbs_in_time_and_saves_on_every_rung(frontier: Frontier) -> None:
    ladder = frontier.ladder(16)
    assert frontier.ladder(1)[0].stages == frontier.plan_for_straggler(0.0).stages
    assert frontier.ladder(1)[0].iteration_time <= frontier.min_time
    times = [plan.iteration_time for plan in ladder]
    assert times == sorted(set(times))
    late = 2 * frontier.slowest_time
    energies = [until(plan, late) for plan in ladder]
    assert energies == sorted(set(energies), reverse=True)
    # They save alike, and T_star's is one.
    steps = [a - b for a, b in pairwise(energies)]
    even = sum(steps) / len(steps)
    assert all(0.4 * even < step < 1.8 * even for step in steps)
    assert frontier.plan(min_energy=True).frequencies in [plan.frequencies for plan in ladder]


def test_looked_up_plan_is_in_time_and_the_next_is_not(frontier: Frontier) -> None:
    ladder = frontier.ladder()
    for part in (0.1, 0.33, 0.9):
        span = frontier.slowest_time - frontier.min_time
        straggler = frontier.min_time + part * span
        plan = frontier.plan_for_straggler(straggler)
        assert plan.iteration_time <= straggler
        later = ladder[ladder.index(plan) + 1]
        assert later.iteration_time > straggler


def test_straggler_beyond_t_max_keeps_the_t_max_plan(frontier: Frontier) -> None:
    plan = frontier.plan_for_straggler(100 * frontier.slowest_time)
    assert plan == frontier.ladder()[-1]
    assert frontier.min_energy_time < plan.iteration_time <= frontier.slowest_time
    # Every operation is at its least effective cost, but for what fewer changes of clock may take.
    least = bound_until(frontier, 10.0)
    assert least <= until(plan, 10.0) <= 1.001 * least
    fastest_to_wait = frontier.ladder(changes="free")[-1]
    assert until(fastest_to_wait, 10.0) == pytest.approx(least, rel=1e-9)


def test_slower_plans_lie_between_t_star_and_t_max(frontier: Frontier) -> None:
    slower = frontier.sample_plans(5, beyond=True)
    times = [frontier.min_energy_time, *(p.iteration_time for p in slower), frontier.slowest_time]
    assert len(slower) == 5
    assert times == sorted(times)


@st.composite
def small_frontiers(draw: st.DrawFn) -> Frontier:
    pipeline = draw(pipelines(max_stages=3, max_microbatches=4))
    stages = pipeline.num_profile_stages
    profile = draw(st.one_of(falling_profiles(stages), profiles(stages)))
    power = draw(st.sampled_from([0.0, 20.0, 200.0]))
    return trace_frontier(pipeline, profile, blocking_power=power)


@given(small_frontiers(), st.floats(0.8, 2.5), st.floats(0.8, 2.5))
def test_the_later_the_straggler_the_slower_and_cheaper_the_plan(
    frontier: Frontier, one: float, other: float
) -> None:
    early, late = (frontier.plan_for_straggler(x * frontier.min_time) for x in sorted((one, other)))
    assert early.iteration_time <= late.iteration_time
    late_enough = 3 * frontier.slowest_time
    assert until(late, late_enough) <= until(early, late_enough)


def test_copies_of_a_frontier_share_what_is_traced_beyond_t_star() -> None:
    pipeline, profile = Pipeline("1f1b", 4, 8), Profile.builtin("a40-gpt3-1.3b-4stage")
    assert trace_frontier(pipeline, profile).beyond is trace_frontier(pipeline, profile).beyond


@given(small_frontiers(), st.floats(0.0, 1.1))
def test_a_large_pipeline_is_traced_only_in_part_and_its_bound_holds(
    frontier: Frontier, part: float
) -> None:
    star, slowest = frontier.min_energy_time_ns, frontier.slowest_time_ns
    time_ns = star + round(part * (slowest - star))
    exact = frontier.waiting_bound_10fj(time_ns)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relaxation, "MAX_OPERATIONS_FROM_T_MAX", 0)
        large = Frontier(  # traced by nobody before
            frontier.pipeline, frontier.profile, blocking_power=frontier.blocking_power_w[0]
        )
        assert large.waiting_bound_10fj(time_ns) <= exact
        if time_ns <= large.beyond.max_time_ns or time_ns >= slowest:
            assert large.waiting_bound_10fj(time_ns) == exact
        straggler = s_from_ns(time_ns)
        plan = large.plan(sync_time=straggler)
    assert plan.iteration_time <= straggler
    assert until(plan, straggler) <= until(frontier.plan(min_energy=True), straggler) * (1 + 1e-12)


def test_plan_with_a_ladder_is_proved_rung_by_rung(frontier: Frontier) -> None:
    plan = frontier.plan().with_ladder(frontier.ladder(6))
    assert plan.ladder
    plan = Plan.from_document(plan.model_dump(by_alias=True, exclude_none=True))
    assert any("ladder" in line for line in verify_plan(plan, frontier.profile))
    assert plan.ladder
    rung = plan.ladder[0]
    for change, message in (
        ({"energy_j": rung.energy_j + 1}, "ladder\\[0\\].energy_j"),
        ({"iteration_time_s": rung.iteration_time_s - 1e-6}, "ladder\\[0\\].iteration_time_s"),
        ({"frequencies_mhz": rung.frequencies_mhz[:-1]}, "one entry for every operation"),
        ({"frequencies_mhz": [[1] * 16] * 4}, "no row for forward on stage 0 at 1 MHz"),
    ):
        broken = plan.model_copy(update={"ladder": [rung.model_copy(update=change)]})
        with pytest.raises(InputError, match=message):
            verify_plan(broken, frontier.profile)


def test_ladder_that_ends_at_t_star_is_still_proved(frontier: Frontier) -> None:
    plan = frontier.plan()
    slower = [p for p in frontier.sample_plans(6) if p.iteration_time > plan.iteration_time]
    old = [p.as_rung() for p in slower if p.energy < plan.energy]
    assert len(old) > 3
    verify_plan(plan.model_copy(update={"ladder": old}), frontier.profile)


def test_just_beyond_t_star_its_plan_may_still_be_the_best() -> None:
    frontier = trace_frontier(Pipeline("1f1b", 4, 8), Profile.builtin("a40-gpt3-1.3b-4stage"))
    star = frontier.plan(min_energy=True)
    straggler = frontier.min_energy_time + 1e-9
    plan = frontier.plan(sync_time=straggler)
    assert until(plan, straggler) <= until(star, straggler)
    assert plan.frequencies == star.frequencies


def test_large_pipeline_is_planned_between_what_was_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline, profile = Pipeline("1f1b", 4, 8), Profile.builtin("a40-gpt3-1.3b-4stage")
    exact = trace_frontier(pipeline, profile)
    monkeypatch.setattr(relaxation, "MAX_OPERATIONS_FROM_T_MAX", 0)
    large = Frontier(pipeline, profile)  # traced by nobody before
    traced, slowest = large.beyond.max_time_ns, large.slowest_time_ns
    assert large.min_energy_time_ns < traced < slowest
    for part in (0.1, 0.5, 0.9):
        time_ns = traced + round(part * (slowest - traced))
        straggler = s_from_ns(time_ns)
        assert large.waiting_bound_10fj(time_ns) <= exact.waiting_bound_10fj(time_ns)
        plan = large.plan(sync_time=straggler)
        assert traced < plan.iteration_time * 1e9 <= time_ns
        assert until(plan, straggler) <= 1.004 * bound_until(large, straggler)
    assert large.waiting_bound_10fj(2 * slowest) == exact.waiting_bound_10fj(2 * slowest)


def test_ladder_keeps_only_what_saves_where_there_is_time(frontier: Frontier) -> None:
    ladder = frontier.ladder(6)
    plan = frontier.plan(min_energy=True).with_ladder(ladder)
    star = frontier.min_energy_time
    assert plan.ladder
    # They use more by their own end, and less by that of a straggler.
    assert all(rung.energy_j > plan.energy for rung in plan.ladder)
    assert all(rung.iteration_time_s > star for rung in plan.ladder)
    assert any("saves on those before it" in line for line in verify_plan(plan, frontier.profile))
    assert frontier.plan().with_ladder([ladder[3], ladder[2], ladder[4]]).ladder == [
        ladder[3].as_rung(),
        ladder[4].as_rung(),
    ]


def test_rung_that_saves_nothing_is_refused(frontier: Frontier) -> None:
    problem = frontier.problem
    slow = np.array([table.time_ns.argmax() for table in problem.tables], np.int32)[problem.table]
    target = Target(kind="max-frequency", deadline_s=1000.0)
    wasteful = build_plan(frontier, problem.replay(slow), target=target)
    slowest = frontier.ladder(changes="free")[-1]
    plan = frontier.plan().model_copy(update={"ladder": [slowest.as_rung(), wasteful.as_rung()]})
    with pytest.raises(InputError, match="ladder\\[1\\] uses more than the plan before it"):
        verify_plan(plan, frontier.profile)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"energy_j": 1.0}, "until_straggler.energy_j is 1.0; recomputed it is"),
        ({"gap": 0.5}, "until_straggler.gap is 0.5; recomputed"),
        ({"baseline_energy_j": 1.0}, "until_straggler.baseline_energy_j is 1.0"),
        ({"energy_lower_bound_j": 1e9}, "energy_lower_bound_j is .* only .* can be proved"),
    ],
)
def test_what_a_plan_states_about_its_straggler_is_proved(
    frontier: Frontier, change: dict[str, float], message: str
) -> None:
    straggler = 1.5 * frontier.min_time
    plan = frontier.plan(sync_time=straggler, straggler_time=straggler)
    assert any("until the straggler" in line for line in verify_plan(plan, frontier.profile))
    stated = plan.predicted.until_straggler
    assert stated is not None
    predicted = plan.predicted.model_copy(
        update={"until_straggler": stated.model_copy(update=change)}
    )
    with pytest.raises(InputError, match=message):
        verify_plan(plan.model_copy(update={"predicted": predicted}), frontier.profile)
    alone = plan.target.model_copy(update={"straggler_time_s": None})
    with pytest.raises(InputError, match=r"target\.straggler_time_s is None; the request means"):
        verify_plan(plan.model_copy(update={"target": alone}), frontier.profile)
