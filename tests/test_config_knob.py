"""Rows that differ in config: options are frequency x config, and plans name both."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from cli_helpers import assert_refused, envplan
from envplan import Pipeline, Plan, Profile, trace_frontier
from envplan.enforce.freqplan import FrequencyPlan
from envplan.errors import InputError
from envplan.verify import verify_plan

CLOCKS = (1740, 1500, 1260, 1020)


def two_configs(stages: int = 2) -> Profile:
    """`wide` is faster at high clocks, `narrow` draws less and loses little at low ones."""
    rows: list[tuple[object, ...]] = []
    for stage in range(stages):
        for instruction, work in (("forward", 1.0), ("backward", 2.0)):
            for mhz in CLOCKS:
                for config, speed, watts in (("wide", 1.0, 60.0), ("narrow", 1.08, 20.0)):
                    time = round(work * speed * (0.01 + 0.07 * 1740 / mhz), 6)
                    power = watts + 90 + 190 * (mhz / 1740) ** 2.6
                    rows.append((stage, instruction, mhz, time, round(power * time, 6), config))
    return Profile.from_rows(rows)


def test_a_second_knob_never_costs_energy() -> None:
    both = two_configs()
    rows = [
        (table.stage, table.instruction, mhz, ns / 1e9, fj / 1e15)
        for table in both.tables()
        for mhz, config, ns, fj in table.rows()
        if config == "wide"
    ]
    pipeline = Pipeline("1f1b", 2, 6)
    alone, with_both = (trace_frontier(pipeline, p) for p in (Profile.from_rows(rows), both))
    assert with_both.min_time == alone.min_time
    for slowdown in (0.0, 0.05, 0.2):
        time = alone.min_time * (1 + slowdown)
        assert with_both.energy_at(time) <= alone.energy_at(time)
    chosen = {op.config for stage in with_both.plan(slowdown=0.1).stages for op in stage}
    assert chosen == {"wide", "narrow"}


def test_the_baseline_is_the_fastest_config_at_the_highest_clock() -> None:
    plan = trace_frontier(Pipeline("1f1b", 2, 4), two_configs()).max_frequency_plan()
    assert {(op.frequency_mhz, op.config) for stage in plan.stages for op in stage} == {
        (1740, "wide")
    }
    assert plan.predicted.savings_percent == 0


@pytest.mark.parametrize("config", ["narrow", "wide", "unknown", ""])
def test_check_rejects_a_plan_whose_config_was_changed(config: str) -> None:
    profile = two_configs()
    plan = trace_frontier(Pipeline("1f1b", 2, 4), profile).plan(slowdown=0.1)
    verify_plan(plan, profile)
    document = json.loads(plan.to_json())
    victim = next(op for op in document["stages"][0] if op["config"] != config)
    victim["config"] = config
    with pytest.raises(InputError, match=r"recomputed it is|has no row"):
        verify_plan(Plan.from_document(document), profile)


def test_the_whole_way_on_the_command_line_names_both_knobs(tmp_path: Path) -> None:
    two_configs().save_csv(tmp_path / "profile.csv")
    solved = envplan("solve", "-m", "4", "--slowdown", "10", "--ladder", "2", cwd=tmp_path)
    assert "operations by config: narrow" in solved.out
    plan = Plan.load(tmp_path / "plan.json")
    assert all(rung.configs for rung in plan.ladder)
    assert envplan("check", "plan.json", cwd=tmp_path).code == 0
    assert "operations by config: narrow" in envplan("simulate", "plan.json", cwd=tmp_path).out
    compared = json.loads(envplan("compare", "-m", "4", "--json", cwd=tmp_path).out)["planners"]
    assert all(sum(entry["configs"].values()) == 16 for entry in compared)
    assert "narrow" not in next(e for e in compared if e["planner"] == "max_frequency")["configs"]
    assert all("narrow" in e["configs"] for e in compared if e["planner"] == "frontier")
    assert "config narrow" in envplan("compare", "-m", "4", cwd=tmp_path).out

    applied = envplan("apply", "plan.json", cwd=tmp_path)
    assert "config is in the frequency plan" in applied.out
    written = FrequencyPlan.load(tmp_path / "run.freqplan.json")
    assert [rank.configs for rank in written.ranks] == [
        [op.config for op in stage] for stage in plan.stages
    ]
    assert all(rung.configs for rung in written.ladder)
    rows = list(csv.DictReader(io.StringIO(written.to_csv())))
    assert [row["config"] for row in rows if row["rank"] == "0"] == written.ranks[0].configs
    zeus = envplan("apply", "plan.json", "--format", "zeus", cwd=tmp_path)
    assert "configs are left out" in zeus.out


def test_a_frequency_plan_with_too_few_configs_is_refused(tmp_path: Path) -> None:
    two_configs().save_csv(tmp_path / "profile.csv")
    envplan("solve", "-m", "2", "--slowdown", "10", "--ladder", "2", cwd=tmp_path)
    envplan("apply", "plan.json", cwd=tmp_path)
    file = tmp_path / "run.freqplan.json"
    whole = file.read_text()
    for where, complaint in (("ranks", "ranks[0]"), ("ladder", "ladder[0]")):
        document = json.loads(whole)
        configs = document[where][0]["configs"]
        (configs if where == "ranks" else configs[0]).pop()
        file.write_text(json.dumps(document))
        refused = envplan("check", "run.freqplan.json", cwd=tmp_path)
        assert_refused(refused, 2, f"{complaint} does not have one config")
