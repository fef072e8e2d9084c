from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli_helpers import done, envplan, refused, says
from envplan.plan import Plan, find_profile
from envplan.verify import verify_plan


def solved(folder: Path, *arguments: str) -> Plan:
    """The verified plan of a quiet run."""
    done("solve --quiet", *arguments)
    plan = Plan.load(folder / "plan.json")
    assert verify_plan(plan, find_profile(plan.profile, folder / "plan.json"))
    return plan


def t_min_and_t_star(folder: Path) -> tuple[float, float]:
    solved(folder)
    t_min = Plan.load(folder / "plan.json").target.deadline_s
    solved(folder, "--min-energy")
    return t_min, Plan.load(folder / "plan.json").target.deadline_s


def test_without_a_target_it_is_the_least_energy_at_no_slowdown(folder: Path) -> None:
    says(done("solve"), "max frequency", "certified gap", "T_min", "modelled", "wrote plan.json")
    plan = Plan.load(folder / "plan.json")
    assert plan.target.kind == "no-slowdown"
    assert plan.predicted.slowdown_percent <= 0
    assert plan.predicted.savings_percent > 1


def test_t_min_as_refusals_state_it_can_be_pasted_back(folder: Path) -> None:
    printed = envplan("solve", "--target-time", "1ms").err.split("T_min is ")[1].split(" s")[0]
    assert solved(folder, "--target-time", printed).target.deadline_s == float(printed)


def test_target_below_t_min_has_no_answer_and_says_t_min(folder: Path) -> None:
    t_min, _ = t_min_and_t_star(folder)
    (folder / "plan.json").unlink()
    refused("solve --target-time 0.5", f"T_min is {t_min:.9f} s", code=1)
    refused("solve --target-time 0.5 --straggler-time 2", "T_min", code=1)


def test_target_above_t_star_gives_the_t_star_plan_and_says_so(folder: Path) -> None:
    least = solved(folder, "--min-energy")
    assert "beyond T_star" in done("solve --target-time 1000")
    assert Plan.load(folder / "plan.json").stages == least.stages


def test_slowdown_is_percent_of_t_min(folder: Path) -> None:
    t_min, _ = t_min_and_t_star(folder)
    plan = solved(folder, "--slowdown", "5")
    assert plan.target.deadline_s == pytest.approx(1.05 * t_min, rel=1e-8)
    assert plan.iteration_time <= 1.05 * t_min


def test_energy_budget_and_power_cap_are_kept(folder: Path) -> None:
    fast = solved(folder)
    least = solved(folder, "--min-energy")
    joules = (fast.energy + least.energy) / 2
    assert least.energy <= solved(folder, "--energy-budget", repr(joules)).energy <= joules
    watts = (fast.average_power + least.average_power) / 2
    assert solved(folder, "--power-cap", repr(watts)).average_power <= watts


def test_straggler_leaves_time_beyond_t_star(folder: Path) -> None:
    t_min, t_star = t_min_and_t_star(folder)
    middle = (t_min + t_star) / 2
    for straggler, deadline in (
        (t_min / 2, t_min),
        (middle, middle),
        (2 * t_star, 2 * t_star),
    ):
        plan = solved(folder, "--straggler-time", repr(straggler))
        assert plan.target.deadline_s == pytest.approx(deadline, abs=1e-9)
        assert plan.target.straggler_time_s == straggler
    assert plan.target.kind == "sync-time"
    assert plan.iteration_time > t_star
    until = plan.predicted.until_straggler
    assert until is not None
    assert until.energy_lower_bound_j <= until.energy_j < until.baseline_energy_j
    at_star = solved(folder, "--min-energy")
    assert until.energy_j < at_star.energy + at_star.waiting_energy(2 * t_star)
    done("check plan.json")


def test_target_time_beyond_t_star_is_no_straggler(folder: Path) -> None:
    _, t_star = t_min_and_t_star(folder)
    plan = solved(folder, "--target-time", repr(2 * t_star))
    assert plan.target.deadline_s == pytest.approx(t_star, abs=1e-9)
    assert plan.iteration_time <= t_star
    assert plan.predicted.until_straggler is None


def test_straggler_slower_than_the_target_wins_and_a_faster_one_does_not(folder: Path) -> None:
    t_min, t_star = t_min_and_t_star(folder)
    early, late = t_min + (t_star - t_min) / 4, t_min + (t_star - t_min) / 2
    for target, straggler in ((early, late), (late, early)):
        plan = solved(folder, "--target-time", repr(target), "--straggler-time", repr(straggler))
        assert plan.target.deadline_s == pytest.approx(late, abs=1e-9)


def test_builtin_profile_is_planned_by_name(folder: Path) -> None:
    plan = solved(folder, "a40-gpt3-1.3b-4stage", "-m", "4")
    assert plan.profile.name == "a40-gpt3-1.3b-4stage"
    assert plan.profile.path is None


def test_dag_of_ones_own_is_planned(folder: Path) -> None:
    operations = [
        {"id": "a", "stage": 0, "instruction": "forward"},
        {"id": "b", "stage": 1, "instruction": "forward", "after": ["a"]},
        {"id": "c", "stage": 0, "instruction": "backward", "after": ["a"]},
    ]
    document = {"schema": "envplan/dag/v1", "operations": operations}
    (folder / "dag.json").write_text(json.dumps(document))
    plan = solved(folder, "--dag", "dag.json")
    assert [len(stage) for stage in plan.stages] == [2, 1]


def test_old_plan_survives_a_run_that_fails(folder: Path) -> None:
    solved(folder)
    before = (folder / "plan.json").read_bytes()
    refused("solve --target-time 0.01", "T_min", code=1)
    assert (folder / "plan.json").read_bytes() == before


def test_ladder_is_stored_proved_and_slower_rung_by_rung(folder: Path) -> None:
    plan = solved(folder, "--ladder", "6")
    assert plan.ladder
    times = [rung.iteration_time_s for rung in plan.ladder]
    assert times == sorted(set(times))
    assert times[0] > plan.iteration_time
    assert solved(folder).ladder is None


def test_the_number_of_cores_changes_no_byte(folder: Path) -> None:
    written = []
    for jobs in ("1", "2"):
        slow = solved(folder, "--slowdown", "2", "--switch-latency", "2ms", "--jobs", jobs)
        done("frontier -q -o frontier.json --jobs", jobs)
        frontier = json.loads((folder / "frontier.json").read_text())
        written.append((slow.model_dump(exclude={"created"}), frontier))
    assert written[0] == written[1]
