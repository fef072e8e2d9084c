"""Rows that differ in config: options are frequency x config, and plans name both."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from cli_helpers import done, refused, says, told
from envplan import Pipeline, Plan, Profile, trace_frontier
from envplan.check.plans import verify_plan
from envplan.enforce.apply import _ClockFitter, _ClockSetting
from envplan.enforce.freqplan import FrequencyPlan
from envplan.enforce.supported_clocks import stage_clocks
from envplan.errors import InputError
from envplan.units import ENERGY_UNITS_PER_J

CLOCKS = (1740, 1500, 1260, 1020)


def two_configs(stages: int = 2, *, narrow_from_mhz: int = 0) -> Profile:
    """`wide` is faster at high clocks, `narrow` draws less and loses little at low ones."""
    rows: list[tuple[object, ...]] = []
    for stage in range(stages):
        for instruction, work in (("forward", 1.0), ("backward", 2.0)):
            for mhz in CLOCKS:
                for config, speed, watts in (("wide", 1.0, 60.0), ("narrow", 1.08, 20.0)):
                    if config == "narrow" and mhz < narrow_from_mhz:
                        continue
                    time = round(work * speed * (0.01 + 0.07 * 1740 / mhz), 6)
                    power = watts + 90 + 190 * (mhz / 1740) ** 2.6
                    rows.append((stage, instruction, mhz, time, round(power * time, 6), config))
    return Profile.from_rows(rows)


def test_a_second_config_never_costs_energy_and_its_fastest_is_the_baseline() -> None:
    both = two_configs()
    rows = [
        (table.stage, table.instruction, mhz, ns / 1e9, energy_10fj / ENERGY_UNITS_PER_J)
        for table in both.tables()
        for mhz, config, ns, energy_10fj in table.options()
        if config == "wide"
    ]
    pipeline = Pipeline("1f1b", 2, 6)
    alone, with_both = (trace_frontier(pipeline, p) for p in (Profile.from_rows(rows), both))
    assert with_both.min_time == alone.min_time
    for slowdown in (0.0, 0.05, 0.2):
        time = alone.min_time * (1 + slowdown)
        assert with_both.energy_at(time) <= alone.energy_at(time)
    fastest = with_both.max_frequency_plan()
    assert {(op.frequency_mhz, op.config) for stage in fastest.stages for op in stage} == {
        (1740, "wide")
    }
    assert fastest.predicted.savings_percent == 0
    chosen = {op.config for stage in with_both.plan(slowdown=0.1).stages for op in stage}
    assert chosen == {"wide", "narrow"}


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


def test_the_whole_way_on_the_command_line_names_both_configs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_configs().save_csv(tmp_path / "profile.csv")
    monkeypatch.chdir(tmp_path)
    says(done("solve -m 4 --slowdown 10 --ladder 2"), "operations by config: narrow")
    plan = Plan.load("plan.json")
    assert all(rung.configs for rung in plan.ladder)
    done("check plan.json")
    says(done("simulate plan.json"), "operations by config: narrow")
    compared = told("compare -m 4")["planners"]
    assert all(sum(entry["configs"].values()) == 16 for entry in compared)
    assert "narrow" not in next(e for e in compared if e["planner"] == "max_frequency")["configs"]
    assert all("narrow" in e["configs"] for e in compared if e["planner"] == "frontier")
    says(done("compare -m 4"), "config narrow")

    says(done("apply plan.json"), "config is in the frequency plan")
    written = FrequencyPlan.load("run.freqplan.json")
    assert [rank.configs for rank in written.ranks] == [
        [op.config for op in stage] for stage in plan.stages
    ]
    assert all(rung.configs for rung in written.ladder)
    rows = list(csv.DictReader(io.StringIO(written.to_csv())))
    assert [row["config"] for row in rows if row["rank"] == "0"] == written.ranks[0].configs
    done("apply plan.json --format csv -o run.csv")
    for name in ("run.freqplan.json", "run.csv"):
        done(f"solve -m 4 --clocks {name} -o given.json")
        given = Plan.load("given.json")
        assert given.stages == plan.stages
        assert given.energy == plan.energy
    says(done("apply plan.json --format zeus -o zeus.txt"), "configs are left out")
    for where in ("ranks", "ladder"):
        document = json.loads(written.to_json())
        configs = document[where][0]["configs"]
        (configs if where == "ranks" else configs[0]).pop()
        (tmp_path / "few.json").write_text(json.dumps(document))
        refused("check few.json", f"{where}[0] does not have one config")


def test_a_config_that_is_known_at_higher_clocks_only_is_no_option_below_them() -> None:
    profile = two_configs(narrow_from_mhz=1500)
    plan = trace_frontier(Pipeline("1f1b", 2, 4), profile).plan(slowdown=0.1)
    problem = plan.job.problem(profile)
    clocks = stage_clocks(profile, problem.pipeline, None)
    fitter = _ClockFitter(problem, plan.job.machine, clocks)
    assert fitter._find_option(0, _ClockSetting(1260, "narrow")) is None
    assert fitter._find_option(0, _ClockSetting(1260, "wide")) is not None
    assert fitter._find_option(0, _ClockSetting(1700, "narrow")) is not None
