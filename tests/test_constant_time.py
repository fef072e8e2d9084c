"""Operations that take the same time at any clock, from the schedule to the frequency plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli_helpers import assert_refused, envplan, small_profile
from envplan import Pipeline, Profile, trace_frontier
from envplan.errors import InputError
from envplan.pipeline.dependencies import short_name
from schedule_oracles import orders_of

ALL = {"load": [0], "all_reduce": [0, 1], "optimizer": [0, 1]}


def with_constant_rows(stages: int = 2, seconds: float = 0.02) -> Profile:
    """The small profile, loading on stage 0, an all-reduce and an optimizer step everywhere."""
    measured = small_profile(stages, blocking=70.0)
    rows = [
        (stage, name, int(mhz), t / 1e9, e / 1e15)
        for stage in range(stages)
        for name in ("forward", "backward")
        for table in [measured.table(stage, name)]
        for mhz, t, e in zip(table.frequency_mhz, table.time_ns, table.energy_fj, strict=True)
    ]
    rows.append((0, "load", 0, seconds, 90 * seconds))
    rows += [(stage, "all_reduce", 0, 2 * seconds, 100 * seconds) for stage in range(stages)]
    rows += [(stage, "optimizer", 1740, seconds, 150 * seconds) for stage in range(stages)]
    rows += [(stage, "blocking", 1740, 1.0, 70.0) for stage in range(stages)]
    return Profile.from_rows(rows)


def test_loads_come_before_their_forward_and_the_rest_at_the_end() -> None:
    first, second = orders_of(Pipeline("1f1b", 2, 2, extras=ALL))
    assert " ".join(map(short_name, first)) == (
        "0load0 0F0 0load1 0F1 0B0 0B1 0all_reduce0 0optimizer0"
    )
    assert [op.instruction for op in second[-2:]] == ["all_reduce", "optimizer"]
    assert "load" not in {op.instruction for op in second}


def test_every_chunk_of_a_rank_has_its_own_optimizer_step() -> None:
    pipeline = Pipeline("interleaved", 2, 2, num_chunks=2, extras={"optimizer": [0, 1, 2, 3]})
    steps = [op for op in pipeline.operations if op.instruction == "optimizer"]
    placed = [(op.stage, op.chunk, op.profile_stage) for op in steps]
    assert placed == [(0, 0, 0), (0, 1, 2), (1, 0, 1), (1, 1, 3)]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "envpipe"])
def test_extras_survive_the_job_and_a_change_of_microbatches(schedule: str) -> None:
    pipeline = Pipeline(schedule, 2, 4, extras=ALL)
    again = Pipeline.from_job(json.loads(json.dumps(pipeline.to_job())))
    assert again.operations == pipeline.operations
    assert again.succ.tolist() == pipeline.succ.tolist()
    assert pipeline.with_microbatches(3).extras == pipeline.extras
    assert "extras" not in Pipeline(schedule, 2, 4).to_job()


@pytest.mark.parametrize(
    ("extras", "complaint"),
    [
        ({"coffee": [0]}, "no extra operation; known: load, all_reduce, reduce_sc"),
        ({"load": []}, "must list the stages"),
        ({"load": [2]}, "names stage 2; there are 2"),
        ({"load": [-1]}, "at least 0"),
        (["load"], "must be an object"),
    ],
)
def test_extras_that_cannot_be_are_refused(extras: Any, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        Pipeline("1f1b", 2, 2, extras=extras)


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
    assert_refused(envplan("check", "plan.json", cwd=tmp_path), 2, "next comes optimizer")


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
