from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli_helpers import done, envplan, refused
from envplan.check.plans import verify_plan
from envplan.plan import Plan, find_profile


def solved(line: str = "") -> Plan:
    """The verified plan of a quiet run."""
    done(f"solve --quiet {line}")
    plan = Plan.load("plan.json")
    assert verify_plan(plan, find_profile(plan.profile, Path("plan.json")))
    return plan


@pytest.fixture
def ends(folder: Path) -> tuple[float, float]:
    """T_min and T_star of the folder's profile, s."""
    return solved().target.deadline_s, solved("--min-energy").target.deadline_s


def test_without_a_target_it_is_the_least_energy_at_no_slowdown(folder: Path) -> None:
    plan = solved()
    assert (plan.target.kind, plan.ladder) == ("no-slowdown", None)
    assert plan.predicted.slowdown_percent <= 0
    assert plan.predicted.savings_percent > 1


def test_target_below_t_min_has_no_answer_and_says_a_t_min_that_can_be_pasted_back(
    ends: tuple[float, float],
) -> None:
    before = Path("plan.json").read_bytes()
    for line in ("solve --target-time 0.5", "solve --target-time 0.5 --straggler-time 2"):
        refused(line, f"T_min is {ends[0]:.9f} s", code=1)
    assert Path("plan.json").read_bytes() == before
    printed = envplan("solve", "--target-time", "1ms").err.split("T_min is ")[1].split(" s")[0]
    assert solved(f"--target-time {printed}").target.deadline_s == float(printed)


@pytest.mark.parametrize(
    ("target", "straggler", "deadline"),
    # Where times lie: 0 is T_min, 1 is T_star.
    [
        (0.5, None, 0.5),
        (3.0, None, 1.0),
        (None, -1.0, 0.0),
        (None, 0.5, 0.5),
        (None, 3.0, 3.0),
        (0.25, 0.5, 0.5),
        (0.5, 0.25, 0.5),
    ],
)
def test_a_time_is_that_of_the_target_or_of_a_slower_straggler(
    ends: tuple[float, float], target: float | None, straggler: float | None, deadline: float
) -> None:
    least, star = ends
    at = {"target": target, "straggler": straggler}
    line = " ".join(
        f"--{name}-time {least + part * (star - least)!r}"
        for name, part in at.items()
        if part is not None
    )
    plan = solved(line)
    assert plan.target.deadline_s == pytest.approx(least + deadline * (star - least), abs=1e-8)
    assert plan.iteration_time <= plan.target.deadline_s
    waits = plan.target.kind == "sync-time"
    assert waits == (plan.iteration_time > star) == ((straggler or 0) > 1)
    until = plan.predicted.until_straggler
    if waits:
        assert until.energy_lower_bound_j <= until.energy_j < until.baseline_energy_j
        at_star, end = solved("--min-energy"), plan.target.straggler_time_s
        assert until.energy_j < at_star.energy + at_star.waiting_energy(end)
    elif straggler is None:
        assert until is None
    assert ("beyond T_star" in done(f"solve {line}")) == ((target or 0) > 1)


def test_slowdowns_budgets_and_caps_are_kept(ends: tuple[float, float]) -> None:
    assert solved("--slowdown 5").target.deadline_s == pytest.approx(1.05 * ends[0], abs=1e-8)
    fast, least = solved(), solved("--min-energy")
    joules = (fast.energy + least.energy) / 2
    assert least.energy <= solved(f"--energy-budget {joules!r}").energy <= joules
    watts = (fast.average_power + least.average_power) / 2
    assert solved(f"--power-cap {watts!r}").average_power <= watts


def test_a_builtin_profile_and_a_dag_of_ones_own_are_planned(folder: Path) -> None:
    plan = solved("a40-gpt3-1.3b-4stage -m 4")
    assert (plan.profile.name, plan.profile.path) == ("a40-gpt3-1.3b-4stage", None)
    operations = [
        {"id": "a", "stage": 0, "instruction": "forward"},
        {"id": "b", "stage": 1, "instruction": "forward", "after": ["a"]},
        {"id": "c", "stage": 0, "instruction": "backward", "after": ["a"]},
    ]
    document = {"schema": "envplan/dag/v1", "operations": operations}
    Path("dag.json").write_text(json.dumps(document))
    assert [len(stage) for stage in solved("--dag dag.json").stages] == [2, 1]


def test_ladder_is_stored_proved_and_slower_rung_by_rung(folder: Path) -> None:
    plan = solved("--ladder 6")
    times = [rung.iteration_time_s for rung in plan.ladder or ()]
    assert times
    assert times == sorted(set(times))
    assert times[0] > plan.iteration_time


def test_the_number_of_cores_changes_no_byte(folder: Path) -> None:
    written = []
    for jobs in (1, 2):
        slow = solved(f"--slowdown 2 --switch-latency 2ms --jobs {jobs}")
        done(f"frontier -q -o frontier.json --jobs {jobs}")
        frontier = json.loads(Path("frontier.json").read_text())
        written.append((slow.model_dump(exclude={"created"}), frontier))
    assert written[0] == written[1]
