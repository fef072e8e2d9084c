"""Plans of every schedule: deadlines, energies, bounds, and one GPU for all model stages on it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from cli_helpers import assert_refused
from cli_helpers import envplan as run
from envplan import simulate
from envplan.errors import InputError
from envplan.pipeline import Pipeline
from envplan.plan import Plan
from envplan.profile import Profile
from envplan.solve import trace_frontier
from strategies import EVERY_INSTRUCTION

BUILT_IN = "a40-gpt3-1.3b-8stage"


def with_waiting(num_stages: int, watts: float) -> Profile:
    """Every operation takes 0.1 s and 10 J on any model stage; waiting draws the given power."""
    rows = [
        (stage, name, 1000, 0.1, 10.0) for stage in range(num_stages) for name in EVERY_INSTRUCTION
    ]
    rows += [(stage, "blocking", 1000, 1.0, watts) for stage in range(num_stages)]
    return Profile.from_rows(rows)


@pytest.mark.parametrize(
    ("name", "chunks"),
    [("interleaved", 2), ("looped-bfs", 3), ("interleaved-zb", 2), ("zb-v", 2), ("dualpipe-v", 2)],
)
def test_a_gpu_with_several_model_stages_waits_once(name: str, chunks: int) -> None:
    pipeline = Pipeline(name, 2, 4, num_chunks=chunks)
    frontier = trace_frontier(pipeline, with_waiting(2 * chunks, 50.0), gpus_per_stage=3)
    assert frontier.blocking_power_w == (50.0, 50.0)
    plan = frontier.max_frequency_plan()
    computing = 10.0 * len(pipeline.operations)
    waiting = 50.0 * (2 * plan.iteration_time - 0.1 * len(pipeline.operations))
    assert plan.energy == pytest.approx(3 * (computing + waiting))
    timeline = simulate(plan, frontier.profile)
    assert timeline.blocking_energy == pytest.approx(3 * waiting)


def test_a_profile_without_split_backwards_says_how_to_split_them() -> None:
    profile = Profile.builtin("a40-gpt3-1.3b-4stage")
    with pytest.raises(InputError, match=r"no rows for backward_input on stage 3.*derive"):
        trace_frontier(Pipeline("zb-v", 2, 4), profile)


@pytest.mark.parametrize(
    ("name", "stages", "chunks"),
    [
        *((name, 8, 1) for name in ("looped-bfs", "interleaved-zb", "zb-h1")),
        *((name, 4, 2) for name in ("zb-v", "dualpipe-v")),
    ],
)
def test_a_schedule_is_solved_for_and_checked_by_name_alone(
    name: str, stages: int, chunks: int, tmp_path: Path
) -> None:
    solved = run("solve", BUILT_IN, "--schedule", name, "-m", "8", "--slowdown", "1", cwd=tmp_path)
    assert solved.code == 0, solved.err
    for command in ("check plan.json", "apply plan.json", "check run.freqplan.json", "simulate"):
        ran = run(*command.split(), cwd=tmp_path)
        assert (ran.code, ran.err) == (0, ""), command
    plan = Plan.load(tmp_path / "plan.json")
    assert (plan.job.schedule, plan.job.stages, plan.job.chunks) == (name, stages, chunks)
    counts = Counter(op.instruction for stage in plan.stages for op in stage)
    assert counts["forward"] == counts["backward"] + counts["backward_input"] == 8 * 8
    assert counts["backward_weight"] == counts["backward_input"]


@pytest.mark.parametrize("name", ["zb-v", "dualpipe-v"])
def test_a_v_needs_two_chunks_of_an_even_number_of_model_stages(name: str, tmp_path: Path) -> None:
    with_waiting(3, 50.0).save_csv(tmp_path / "profile.csv")
    ran = run("frontier", "--schedule", name, "-m", "8", cwd=tmp_path)
    assert_refused(ran, 2, f"{name} with 2 chunks", "3 stages")
