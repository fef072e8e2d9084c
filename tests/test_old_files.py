"""Plan files written before requests stood in them: read, proved and solved for again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from envplan import Plan, verify_plan
from envplan.plan import find_profile
from envplan.solve import trace_job

FILES = sorted(
    file
    for file in (Path(__file__).parent / "fixtures" / "v1").glob("*.json")
    if "meta" not in file.name
)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_an_old_plan_is_proved_and_can_be_solved_for_again(file: Path) -> None:
    assert "request" not in json.loads(file.read_text())
    plan = Plan.load(file)
    profile = find_profile(plan.profile, file)
    assert verify_plan(plan, profile)
    new = trace_job(plan.job, profile).solve(plan.request)
    assert new.request == plan.request
    assert verify_plan(new, profile)
    assert new.iteration_time <= plan.target.deadline_s
    assert new.energy <= 1.002 * plan.energy
    for field in ("kind", "slowdown", "energy_j", "power_w", "peak_power_w", "straggler_time_s"):
        assert getattr(new.target, field) == getattr(plan.target, field)
    told = (plan.ladder, plan.costs, plan.predicted.robustness, plan.job.switch_latency_s)
    again = (new.ladder, new.costs, new.predicted.robustness, new.job.switch_latency_s)
    assert [one is None for one in told] == [one is None for one in again]
