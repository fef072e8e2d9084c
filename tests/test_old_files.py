"""Files of earlier versions: read, proved and gone on with."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from envplan import Plan, verify_plan
from envplan.check.files import check_file
from envplan.enforce.freqplan import FrequencyPlan
from envplan.plan import find_profile
from envplan.runtime.drift import measure_drift
from envplan.runtime.run_log_reader import iterations_of_plan, read_run_log
from envplan.solve import trace_job
from envplan.sweep import read_config, run_sweep

ROOT = Path(__file__).parent.parent

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


RELEASED = Path(__file__).parent / "fixtures" / "v0.1"


@pytest.mark.parametrize(
    "file",
    [
        *("profile.csv", "plan.json", "frontier.json", "frontier.csv", "run.freqplan.json"),
        *("job.dag.json", "serving-plan.json", "serving.clocks.json"),
        *("parts/profile.csv", "parts/plan.json", "parts/run.freqplan.json"),
    ],
)
def test_a_file_of_a_release_is_proved(file: str) -> None:
    assert check_file(RELEASED / file).proved


def test_logs_and_sweeps_of_a_release_go_on(tmp_path: Path) -> None:
    copy = shutil.copytree(RELEASED, tmp_path / "copy")
    plan = Plan.load(copy / "plan.json")
    frequency_plan = FrequencyPlan.load(copy / "run.freqplan.json")
    followed = list(
        iterations_of_plan(read_run_log([copy / "run.jsonl"]), frequency_plan.plan_sha256)
    )
    assert measure_drift(plan, find_profile(plan.profile, copy / "plan.json"), followed)
    swept = run_sweep(read_config(copy / "sweep.toml"), copy / "sweep.csv.journal", jobs=1)
    assert (swept.computed, swept.failures) == (0, [])


def test_versions_of_files_are_those_that_are_documented() -> None:
    named = set(re.findall(r"envplan/[a-z-]+/v\d+", (ROOT / "docs/releases.md").read_text()))
    written = {"envplan/savings/v1"}  # as every command's
    for file in (ROOT / "src").rglob("*.py"):
        written |= set(re.findall(r'"(envplan/[a-z-]+/v\d+)"', file.read_text()))
    assert written == named
