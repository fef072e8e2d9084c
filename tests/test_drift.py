"""Measured times against planned ones, and plans made anew from them."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli_helpers import assert_refused, envplan, small_profile
from envplan.check.plans import verify_plan
from envplan.errors import InputError, NoAnswerError
from envplan.pipeline import Pipeline
from envplan.plan import Plan
from envplan.profile import Profile
from envplan.runtime import Shim
from envplan.runtime.drift import measure_drift, replan, rescale
from envplan.runtime.run_log_reader import (
    LoggedStep,
    iterations_of_plan,
    parse_line,
    read_run_log,
)
from envplan.solve import trace_frontier
from fake_nvml import FakeNvml, fake_nvml

__all__ = ["fake_nvml"]

PROFILE = small_profile(blocking=70.0)
PIPELINE = Pipeline("1f1b", num_stages=2, num_microbatches=4)
FACTORS = {(0, "forward"): 1.1, (0, "backward"): 0.9, (1, "forward"): 1.0, (1, "backward"): 1.25}


@pytest.fixture(scope="module")
def plan() -> Plan:
    return trace_frontier(PIPELINE, PROFILE).plan(slowdown=0.1)


def step_line(*operations: list[Any], stage: int = 0, step: int = 3) -> dict[str, Any]:
    """A line as the shim writes it, of operations: instruction, chunk, MHz, count, mean, least."""
    return {
        "event": "step",
        "rank": stage,
        "stage": stage,
        "step": step,
        "operations": list(operations),
    }


def run_steps(plan: Plan) -> list[LoggedStep]:
    return list(iterations_of_plan(map(parse_line, run_lines(plan)), "ab" * 32))


def parsed(line: dict[str, Any]) -> LoggedStep:
    step = parse_line(line)
    assert isinstance(step, LoggedStep)
    return step


def run_lines(plan: Plan, steps: int = 4) -> Iterator[dict[str, Any]]:
    """Of a run where every kind takes FACTORS as long as planned, and more in the first step."""
    for rank, stage in enumerate(plan.stages):
        yield {"event": "start", "rank": rank, "plan_sha256": "ab" * 32}
        for step in range(steps):
            slow = 50.0 if step == 0 else 1.0
            operations = [
                [op.instruction, op.chunk, op.frequency_mhz, 1, slow * op.time_s * factor, 0.0]
                for op in stage
                for factor in [FACTORS[rank, op.instruction]]
            ]
            yield step_line(*operations, stage=rank, step=step)


def test_factors_are_found_without_the_first_step(plan: Plan) -> None:
    drifts = measure_drift(plan, PROFILE, run_steps(plan))
    found = {(drift.stage, drift.instruction): drift.factor for drift in drifts}
    assert found == pytest.approx(FACTORS)
    assert all(drift.samples == 3 * 4 for drift in drifts)


def test_rescaled_profile_has_the_measured_times_and_the_same_power(plan: Plan) -> None:
    refined = rescale(PROFILE, measure_drift(plan, PROFILE, run_steps(plan)))
    for (stage, instruction), factor in FACTORS.items():
        before, after = PROFILE.table(stage, instruction), refined.table(stage, instruction)
        assert after.time_ns.tolist() == pytest.approx((before.time_ns * factor).tolist(), abs=1)
        powers = [t.energy_10fj / t.time_ns for t in (before, after)]
        assert powers[1].tolist() == pytest.approx(powers[0].tolist())
    assert refined.blocking_power_w == PROFILE.blocking_power_w


def test_new_plan_holds_and_keeps_the_target(plan: Plan) -> None:
    refined = rescale(PROFILE, measure_drift(plan, PROFILE, run_steps(plan)))
    new = replan(plan, refined)
    verify_plan(new, refined)
    assert new.target.kind == "slowdown"
    assert new.target.slowdown == plan.target.slowdown
    assert new.iteration_time > plan.iteration_time


def test_target_that_cannot_be_met_any_more_says_what_can(plan: Plan) -> None:
    frontier = trace_frontier(PIPELINE, PROFILE)
    tight = frontier.plan(target_time=frontier.min_time)
    refined = rescale(PROFILE, measure_drift(tight, PROFILE, run_steps(tight)))
    with pytest.raises(NoAnswerError, match="T_min"):
        replan(tight, refined)


def test_plan_of_another_planner_is_refused(plan: Plan) -> None:
    with pytest.raises(InputError, match="not of envpipe"):
        replan(plan.model_copy(update={"planner": "envpipe"}), PROFILE)


def test_clock_between_those_of_the_profile_is_interpolated(plan: Plan) -> None:
    table = PROFILE.table(0, "forward")
    clocks, times = table.frequency_mhz.tolist(), table.time_ns.tolist()
    mhz = round(2 / (1 / clocks[0] + 1 / clocks[1]))
    twice = (times[0] + times[1]) / 1e9
    # An operation too short for its clock does not count.
    line = step_line(["forward", 0, mhz, 5, twice, twice], ["backward", 0, 1260, 1, 0.0, 0.0])
    (drift,) = measure_drift(plan, PROFILE, [parsed(line)])
    assert (drift.instruction, drift.factor) == ("forward", pytest.approx(2, rel=1e-3))


def test_time_is_compared_with_that_of_the_config_that_ran(plan: Plan) -> None:
    rows: list[tuple[object, ...]] = []
    for stage in range(PROFILE.num_stages):
        for instruction in ("forward", "backward"):
            rows += [(stage, instruction, 1260, 0.1, 20.0, "quick")]
            rows += [(stage, instruction, 1260, 0.3, 10.0, "frugal")]
    profile = Profile.from_rows(rows)
    for config, factor in (("quick", 6.0), ("frugal", 2.0), ("unheard of", 6.0)):
        line = step_line(["forward", 0, 1260, 5, 0.6, 0.6, config])
        (drift,) = measure_drift(plan, profile, [parsed(line)])
        assert drift.factor == pytest.approx(factor)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (step_line(["forward", 0, 0, 1, 0.1, 0.1]), "no measured times"),
        (step_line(["forward", 0, 1260, 1, 0.1, 0.1], stage=7), "stage 7"),
    ],
)
def test_lines_without_clocks_or_of_another_job_are_refused(
    plan: Plan, line: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        measure_drift(plan, PROFILE, [parsed(line)])


def test_only_runs_of_the_plan_count(plan: Plan) -> None:
    lines = list(map(parse_line, run_lines(plan)))
    assert len(list(iterations_of_plan(lines, "ab" * 32))) == 8
    assert list(iterations_of_plan(lines, "cd" * 32)) == []


def test_cut_last_line_of_a_log_is_passed_over_but_a_broken_one_is_named(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    log.write_text('{"event": "end", "rank": 0}\n{"event": "st')
    assert len(list(read_run_log([log]))) == 1
    log.write_text('{"event": "end", "rank": 0}\n[]\n')
    with pytest.raises(InputError, match=r"run\.jsonl:2"):
        list(read_run_log([log]))


@pytest.mark.parametrize(
    "change",
    [
        {"stage": 1.7},
        {"stage": True},
        {"step": "1"},
        {"step": -1},
        {"operations": None},
        {"operations": [["forward", 0, 1260, 1, 0.1]]},
        {"operations": [["forward", 0, -1260, 1, 0.1, 0.1]]},
        {"operations": [["forward", 0, 1260, 1e308, 0.1, 0.1]]},
        *(
            {"operations": [["forward", 0, 1260, 1, mean, 0.1]]}
            for mean in (math.nan, math.inf, -1.0, 1e300, None, "0.1", [])
        ),
        {"operations": [["forward", 0, 1260, 1, 0.1, 0.1, 3]]},
    ],
    ids=str,
)
def test_step_that_the_shim_did_not_write_is_named(tmp_path: Path, change: dict[str, Any]) -> None:
    step = step_line()
    log = tmp_path / "run.jsonl"
    log.write_text(json.dumps(step) + "\n" + json.dumps(step | change) + "\n")
    with pytest.raises(InputError, match=r"run\.jsonl:2: is not a line"):
        list(read_run_log([log]))


def written(folder: Path) -> Plan:
    """profile.csv, plan.json and the log of a run under it."""
    import hashlib

    PROFILE.save_csv(folder / "profile.csv")
    assert envplan("solve", "--slowdown", 10, "--ladder", 3, cwd=folder).code == 0
    sha256 = hashlib.sha256((folder / "plan.json").read_bytes()).hexdigest()
    plan = Plan.load(folder / "plan.json")
    lines = [{**line, "plan_sha256": sha256} for line in run_lines(plan)]
    (folder / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return plan


def test_refine_reads_the_log_that_the_shim_wrote(fake_nvml: FakeNvml, tmp_path: Path) -> None:
    rows = [
        (stage, instruction, mhz, 0.1 * work / mhz, 0.1 * work)
        for stage in (0, 1)
        for instruction, work in (("forward", 40), ("backward", 80))
        for mhz in (1740, 1500, 1260, 1020)
    ]
    Profile.from_rows(rows, name="quick").save_csv(tmp_path / "profile.csv")
    for command in (("solve", "-m", "4", "--slowdown", "10"), ("apply",)):
        assert envplan(*command, cwd=tmp_path).code == 0
    plan = Plan.load(tmp_path / "plan.json")
    for rank, stage in enumerate(plan.stages):
        file = tmp_path / "run.freqplan.json"
        with Shim(file, rank=rank, world_size=2, every_request=True) as shim:
            for _ in range(3):
                for op in stage:
                    shim.begin(op.instruction, op.microbatch, op.chunk)
                    time.sleep(2 * op.time_s)
                    shim.end(op.instruction, op.microbatch, op.chunk)
                shim.step()
    ran = envplan("refine", "plan.json", "run.jsonl", "--json", cwd=tmp_path)
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    measured = [(drift["stage"], drift["instruction"]) for drift in found["drift"]]
    assert measured == sorted(FACTORS)
    assert found["unmeasured_stages"] == []
    assert all(drift["factor"] >= 2 for drift in found["drift"])
    assert all(drift["samples"] == 8 for drift in found["drift"])
    assert found["after"]["iteration_time_s"] >= 2 * found["before"]["iteration_time_s"]
    for command in (("check", "plan.refined.json"), ("apply", "plan.refined.json")):
        again = envplan(*command, cwd=tmp_path)
        assert again.code == 0, again.err


def test_refine_says_what_was_measured_and_what_no_log_has(tmp_path: Path) -> None:
    old = written(tmp_path)
    ran = envplan("refine", "plan.json", "run.jsonl", cwd=tmp_path)
    assert "+25.00" in ran.out
    assert "nothing measured" not in ran.out
    new = Plan.load(tmp_path / "plan.refined.json")
    assert new.ladder
    assert new.iteration_time > old.iteration_time
    lines = (tmp_path / "run.jsonl").read_text().splitlines()
    kept = [line for line in lines if json.loads(line).get("stage") != 1]
    assert len(kept) < len(lines)
    (tmp_path / "run.jsonl").write_text("".join(f"{line}\n" for line in kept))
    ran = envplan("refine", "plan.json", "run.jsonl", cwd=tmp_path)
    assert ran.code == 0, ran.err
    assert "nothing measured of stage 1: its times stay as planned" in " ".join(ran.out.split())
    ran = envplan("refine", "plan.json", "run.jsonl", "--json", cwd=tmp_path)
    assert json.loads(ran.out)["unmeasured_stages"] == [1]


def test_refine_refuses_a_log_of_another_plan_and_to_overwrite(tmp_path: Path) -> None:
    written(tmp_path)
    ran = envplan("refine", "plan.json", "run.jsonl", "-o", "plan.json", cwd=tmp_path)
    assert_refused(ran, 2, "choose another output file")
    (tmp_path / "plan.json").write_text((tmp_path / "plan.json").read_text() + "\n")
    ran = envplan("refine", "plan.json", "run.jsonl", cwd=tmp_path)
    assert_refused(ran, 2, "no measured iteration")
    assert not (tmp_path / "profile.refined.csv").exists()
