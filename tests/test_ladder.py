"""Looking plans up for stragglers."""

from __future__ import annotations

import pytest

from envplan.errors import InputError
from envplan.frontier import Frontier, trace_frontier
from envplan.pipeline import Pipeline
from envplan.plan import Plan
from envplan.profile import Profile
from envplan.verify import verify_plan


@pytest.fixture(scope="module")
def frontier() -> Frontier:
    return trace_frontier(Pipeline("1f1b", 4, 8), Profile.builtin("a40-gpt3-1.3b-4stage"))


def test_ladder_climbs_in_time_and_saves_on_every_rung(frontier: Frontier) -> None:
    ladder = frontier.ladder(16)
    times = [plan.iteration_time for plan in ladder]
    assert times == sorted(set(times))
    late = 2 * frontier.min_energy_time
    until = [plan.energy + plan.waiting_energy(late) for plan in ladder]
    assert until == sorted(set(until), reverse=True)


def test_looked_up_plan_is_in_time_and_the_next_is_not(frontier: Frontier) -> None:
    ladder = frontier.ladder()
    for part in (0.1, 0.33, 0.9):
        span = frontier.min_energy_time - frontier.min_time
        straggler = frontier.min_time + part * span
        plan = frontier.plan_for_straggler(straggler)
        assert plan.iteration_time <= straggler
        later = ladder[ladder.index(plan) + 1]
        assert later.iteration_time > straggler


def test_straggler_beyond_t_star_keeps_the_t_star_plan(frontier: Frontier) -> None:
    plan = frontier.plan_for_straggler(100 * frontier.min_energy_time)
    assert plan is frontier.ladder()[-1]
    assert plan.iteration_time <= frontier.min_energy_time


def test_straggler_faster_than_t_min_is_none(frontier: Frontier) -> None:
    assert frontier.plan_for_straggler(0.0).iteration_time <= frontier.min_time


def test_looking_up_does_not_solve(frontier: Frontier, monkeypatch: pytest.MonkeyPatch) -> None:
    frontier.plan_for_straggler(frontier.min_time)
    monkeypatch.delattr(frontier, "_trace")
    assert frontier.plan_for_straggler(frontier.min_energy_time)


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
        ({"frequencies_mhz": [[1] * 16] * 4}, "1 MHz for forward 0 of stage 0 is not a row"),
    ):
        broken = plan.model_copy(update={"ladder": [rung.model_copy(update=change)]})
        with pytest.raises(InputError, match=message):
            verify_plan(broken, frontier.profile)
