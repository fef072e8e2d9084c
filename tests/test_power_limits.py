"""Power limits in the place of clocks, and the power that a job draws."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from cli_helpers import done, envplan, small_profile, told
from envplan import Plan, Profile, trace_frontier
from envplan.enforce.apply import apply_plan
from envplan.enforce.power_limits import PowerLimits, power_limits
from envplan.enforce.topology import Topology
from envplan.plan import replay_plan
from envplan.units import POWER_UNITS_PER_W


def solved(profile: Profile, slowdown: float = 0.02) -> Plan:
    return trace_frontier(profile.pipeline(), profile).plan(slowdown=slowdown)


def limited(plan: Plan, profile: Profile, dp: int = 1) -> PowerLimits:
    applied = apply_plan(plan, profile, topology=Topology.for_job(plan.job, dp=dp))
    return power_limits(plan, profile, applied)


def simulated(profile: Profile, plan: Plan, limits_w: tuple[int, ...]) -> tuple[int, int]:
    """Time (ns) and energy (10 fJ) under limits, by the words of the module's first lines."""
    problem = plan.job.problem(profile)
    rows = []
    for number, stage in zip(problem.table.tolist(), problem.stage.tolist(), strict=True):
        table = problem.tables[number]
        powers_w = table.energy_10fj / table.time_ns / POWER_UNITS_PER_W
        within = np.flatnonzero(powers_w <= limits_w[stage] + 0.01)
        if len(within):
            rows.append(int(within[np.argmin(table.time_ns[within])]))
        else:
            rows.append(int(np.argmin(powers_w)))
    replay = problem.replay(np.array(rows, np.int32))
    return replay.makespan_ns, replay.energy_until(plan.target.deadline_ns)


@pytest.mark.parametrize("slowdown", [0.0, 0.02, 0.1, 0.3])
def test_limits_are_in_time_and_no_others_of_two_stages_use_much_less(slowdown: float) -> None:
    profile = small_profile()
    plan = solved(profile, slowdown)
    found = limited(plan, profile)
    time_ns, energy_10fj = simulated(profile, plan, tuple(found.limits_w))
    assert time_ns == round(found.iteration_time_s * 1e9) <= plan.target.deadline_ns
    powers_w = range(90, 290, 4)
    others = [simulated(profile, plan, limits) for limits in product(powers_w, powers_w)]
    least_10fj = min(energy for time, energy in others if time <= plan.target.deadline_ns)
    assert energy_10fj <= least_10fj * 1.01


def test_clocks_use_no_more_than_limits() -> None:
    profile = small_profile(stages=4, microbatches=8)
    found = limited(solved(profile), profile)
    assert found.more_energy_percent >= 0
    assert found.clocks_energy_j < found.energy_j


def test_power_of_a_job_is_that_of_its_replay() -> None:
    profile = small_profile(blocking=70.0)
    plan = solved(profile)
    found = limited(plan, profile, dp=2)
    replay = replay_plan(plan, profile)
    job = found.clocks_power.job
    assert job.steady_w == pytest.approx(2 * plan.energy / plan.iteration_time)
    assert job.peak_w == pytest.approx(2 * replay.peak_10uw / POWER_UNITS_PER_W)
    assert found.clocks_power.node == job  # of four GPUs on one node
    assert found.clocks_power.gpu.peak_w <= max(found.applied.stage_power[0].highest_w, 1e3)
    assert found.clocks_power.gpu.steady_w < job.steady_w


def test_the_command_writes_limits_and_a_line(folder: Path) -> None:
    done("solve --slowdown 2")
    out = done("apply plan.json --format power-limits")
    assert "power limit (W)" in out
    document = json.loads((folder / "run.power.json").read_text())
    assert [gpu["rank"] for gpu in document["gpus"]] == [0, 1]
    assert all(isinstance(gpu["power_limit_w"], int) for gpu in document["gpus"])
    assert told("apply plan.json --format power-limits")["more_energy_percent"] >= 0
    done("apply plan.json --format job-power --dp 4 -o job.jsonl")
    (line,) = (folder / "job.jsonl").read_text().splitlines()
    power = json.loads(line)
    assert power["enforced_by"] == "clocks"
    for what in ("gpu", "node", "job"):
        assert 0 < power[what]["steady_w"] <= power[what]["peak_w"]
        assert power[what]["ramp_w_per_s"] >= 0


def test_dry_run_writes_nothing(folder: Path) -> None:
    done("solve --slowdown 2")
    done("apply plan.json --format power-limits --dry-run")
    assert not (folder / "run.power.json").exists()
    assert envplan("apply", "plan.json", "--format", "watts").code == 2
