from __future__ import annotations

import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

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


@pytest.fixture
def ends(folder: Path) -> tuple[float, float]:
    """T_min and T_star of the folder's profile, s."""
    return solved(folder).target.deadline_s, solved(folder, "--min-energy").target.deadline_s


def test_without_a_target_it_is_the_least_energy_at_no_slowdown(folder: Path) -> None:
    says(done("solve"), "max frequency", "certified gap", "T_min", "modelled", "wrote plan.json")
    plan = Plan.load(folder / "plan.json")
    assert plan.target.kind == "no-slowdown"
    assert plan.predicted.slowdown_percent <= 0
    assert plan.predicted.savings_percent > 1


def test_target_below_t_min_has_no_answer_and_says_a_t_min_that_can_be_pasted_back(
    folder: Path, ends: tuple[float, float]
) -> None:
    before = (folder / "plan.json").read_bytes()
    for line in ("solve --target-time 0.5", "solve --target-time 0.5 --straggler-time 2"):
        refused(line, f"T_min is {ends[0]:.9f} s", code=1)
    assert (folder / "plan.json").read_bytes() == before
    printed = envplan("solve", "--target-time", "1ms").err.split("T_min is ")[1].split(" s")[0]
    assert solved(folder, "--target-time", printed).target.deadline_s == float(printed)


@pytest.mark.parametrize(
    ("options", "deadline"),
    [
        ({"slowdown": "5"}, lambda least, star: 1.05 * least),
        ({"target": 0.5}, lambda least, star: (least + star) / 2),
        ({"target": 3.0}, lambda least, star: star),
        ({"straggler": -1.0}, lambda least, star: least),
        ({"straggler": 0.5}, lambda least, star: (least + star) / 2),
        ({"straggler": 3.0}, lambda least, star: 3 * star - 2 * least),
        ({"target": 0.25, "straggler": 0.5}, lambda least, star: (least + star) / 2),
        ({"target": 0.5, "straggler": 0.25}, lambda least, star: (least + star) / 2),
    ],
)
def test_a_time_is_that_of_the_target_or_of_a_slower_straggler(
    folder: Path,
    ends: tuple[float, float],
    options: dict[str, Any],
    deadline: Callable[[float, float], float],
) -> None:
    least, star = ends
    given = [
        (f"--{name}-time", repr(least + part * (star - least)))
        if name != "slowdown"
        else ("--slowdown", part)
        for name, part in options.items()
    ]
    plan = solved(folder, *chain(*given))
    assert plan.target.deadline_s == pytest.approx(deadline(least, star), abs=1e-8)
    assert plan.iteration_time <= plan.target.deadline_s
    waits = plan.target.kind == "sync-time"
    assert waits == (options.get("straggler", 0) > 1)
    assert (plan.iteration_time > star) == waits
    until = plan.predicted.until_straggler
    if waits:
        assert until.energy_lower_bound_j <= until.energy_j < until.baseline_energy_j
        at_star, end = solved(folder, "--min-energy"), plan.target.straggler_time_s
        assert until.energy_j < at_star.energy + at_star.waiting_energy(end)
    elif "straggler" not in options:
        assert until is None
    assert ("beyond T_star" in done("solve", *chain(*given))) == (options.get("target", 0) > 1)


def test_energy_budget_and_power_cap_are_kept(folder: Path) -> None:
    fast = solved(folder)
    least = solved(folder, "--min-energy")
    joules = (fast.energy + least.energy) / 2
    assert least.energy <= solved(folder, "--energy-budget", repr(joules)).energy <= joules
    watts = (fast.average_power + least.average_power) / 2
    assert solved(folder, "--power-cap", repr(watts)).average_power <= watts


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
