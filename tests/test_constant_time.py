"""Operations that take the same time at any clock, from the schedule to the frequency plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli_helpers import assert_refused, envplan, small_profile
from envplan import Pipeline, Profile, trace_frontier
from envplan.units import ENERGY_UNITS_PER_J

ALL = {"load": [0], "all_reduce": [0, 1], "optimizer": [0, 1]}


def with_constant_rows(stages: int = 2, seconds: float = 0.02) -> Profile:
    """The small profile, loading on stage 0, an all-reduce and an optimizer step everywhere."""
    rows = [
        (table.stage, table.instruction, mhz, ns / 1e9, energy_10fj / ENERGY_UNITS_PER_J)
        for table in small_profile(stages, blocking=70.0).tables()
        for mhz, _, ns, energy_10fj in table.options()
    ]
    rows.append((0, "load", 0, seconds, 90 * seconds))
    rows += [(stage, "all_reduce", 0, 2 * seconds, 100 * seconds) for stage in range(stages)]
    rows += [(stage, "optimizer", 1740, seconds, 150 * seconds) for stage in range(stages)]
    rows += [(stage, "blocking", 1740, 1.0, 70.0) for stage in range(stages)]
    return Profile.from_rows(rows)


def test_the_long_pipeline_is_traced_like_the_short_one() -> None:
    profile = with_constant_rows()
    long = trace_frontier(Pipeline("1f1b", 2, 96, extras=ALL), profile)
    whole = trace_frontier(Pipeline("1f1b", 2, 96, extras=ALL), profile, full=True)
    assert long.min_time_ns == whole.min_time_ns
    assert long.min_energy_time_ns == whole.min_energy_time_ns
    middle = (long.min_time + long.min_energy_time) / 2
    assert long.energy_at(middle) == whole.energy_at(middle)


def test_a_constant_operation_delays_everything_by_its_time() -> None:
    profile = with_constant_rows(1, seconds=0.25)
    plain = trace_frontier(Pipeline("1f1b", 1, 1), profile)
    loaded = trace_frontier(Pipeline("1f1b", 1, 1, extras={"load": [0]}), profile)
    assert loaded.min_time_ns == plain.min_time_ns + 250_000_000
    bound = plain.energy_at(plain.min_time) + 90 * 0.25
    assert loaded.energy_at(loaded.min_time) == pytest.approx(bound)


def test_solve_adds_what_it_is_asked_to_and_says_what_it_left_out(tmp_path: Path) -> None:
    with_constant_rows().save_csv(tmp_path / "profile.csv")
    bare = envplan("solve", "-m", "4", cwd=tmp_path)
    assert "rows for load, all_reduce, optimizer are not used; --extra adds them" in bare.out
    solved = envplan("solve", "-m", "4", "--extra", "load,all-reduce", cwd=tmp_path)
    assert solved.code == 0, solved.err
    assert "rows for optimizer are not used" in solved.out
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["job"]["extras"] == {"load": [0], "all_reduce": [0, 1]}
    assert plan["stages"][0][0]["frequency_mhz"] == 0
    for command in ("check", "simulate", "apply"):
        ran = envplan(command, "plan.json", cwd=tmp_path)
        assert ran.code == 0, ran.err
    compared = envplan("compare", "-m", "4", "--extra", "load,optimizer", cwd=tmp_path)
    assert compared.code == 0, compared.err
    shape = ("schedule", "export", "1f1b", "--stages", 2, "-m", 4, "--format", "dag")
    assert envplan(*shape, "-o", "own.dag.json", cwd=tmp_path).code == 0
    own = envplan("solve", "--dag", "own.dag.json", cwd=tmp_path)
    assert "rows for load, all_reduce, optimizer are not used; the DAG file has none" in own.out


def test_check_of_a_profile_tells_clocks_from_constant_times(tmp_path: Path) -> None:
    with_constant_rows().save_csv(tmp_path / "profile.csv")
    checked = envplan("check", "profile.csv", cwd=tmp_path)
    assert "between 780 and 1740 MHz" in checked.out
    assert "3 of the operations take the same time at any clock" in checked.out


def test_check_rejects_a_plan_that_forgets_an_extra_operation(tmp_path: Path) -> None:
    with_constant_rows().save_csv(tmp_path / "profile.csv")
    envplan("solve", "-m", "2", "--extra", "optimizer", cwd=tmp_path)
    plan = json.loads((tmp_path / "plan.json").read_text())
    plan["stages"][1].pop()
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    assert_refused(
        envplan("check", "plan.json", cwd=tmp_path), 2, "stages[1] is a list of 4 values"
    )


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("optimizer", ("no rows for optimizer", "0 MHz")),
        ("coffee", ("load, all_reduce, reduce_scatter, optimizer, all_gather",)),
    ],
)
def test_extras_the_profile_does_not_time_are_refused(
    name: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    small_profile().save_csv(tmp_path / "profile.csv")
    assert_refused(envplan("solve", "--extra", name, cwd=tmp_path), 2, *words)
