"""`envplan advise`, and what `compare` says of other schedules."""

from __future__ import annotations

from pathlib import Path

import pytest

import envplan as package
from cli_helpers import done, refused, says, small_profile, told
from envplan.pipeline import SCHEDULES, Pipeline
from envplan.profile import Profile
from envplan.solve import Frontier, trace_frontier

MICROBATCHES = 8


@pytest.fixture(scope="module")
def job() -> Frontier:
    return trace_frontier(Pipeline("1f1b", 4, MICROBATCHES), small_profile(4), replicas=3)


def even_profile(*, split: bool) -> Profile:
    """Four equal stages of one clock: forward 1 s, backward 2 s, 100 W."""
    whole = [("forward", 1.0), ("backward", 2.0)]
    halves = [("backward_input", 1.0), ("backward_weight", 1.0)]
    return Profile.from_rows(
        [
            (stage, name, 1000, time, 100 * time)
            for stage in range(4)
            for name, time in (whole + halves if split else whole)
        ],
        name="even",
    )


@pytest.mark.parametrize("split", [True, False])
def test_zero_bubble_is_as_much_faster_as_its_paper_says(split: bool) -> None:
    frontier = trace_frontier(
        Pipeline("1f1b", 4, MICROBATCHES), even_profile(split=split), blocking_power=50
    )
    rows = package.advise(frontier, schedules=["1f1b", "gpipe", "zb-h1"], chunks=[1])
    best, *others = rows
    # 1F1B takes (M + S - 1)(F + B) = 33 s; ZB-H1 M (F + B) + (S - 1)(F + B_input - B_weight) = 27.
    assert best.frontier.pipeline.schedule == "zb-h1"
    assert best.faster_percent == pytest.approx(100 * 6 / 33)
    # On each of 4 GPUs 24 s at 100 W, and waiting at 50 W for 9 s or 3 s.
    assert best.saved_percent == pytest.approx(100 * (2850 - 2550) / 2850)
    assert {row.frontier.pipeline.schedule for row in others} == {"1f1b", "gpipe"}
    for row in others:
        assert row.faster_percent == 0
        assert row.saved_percent == 0
        assert row.is_job == (row.frontier.pipeline.schedule == "1f1b")
    assumed = best.frontier.profile.adjustments.backward_input_share
    assert assumed == (None if split else 0.5)


def test_all_run_the_same_batch_on_as_many_gpus(job: Frontier) -> None:
    rows = package.advise(job, chunks=[1, 2, 3, 4], best=2)
    assert {row.frontier.pipeline.num_chunks for row in rows} == {1, 2, 4}
    for row in rows:
        pipeline, replicas = row.frontier.pipeline, row.frontier.replicas
        assert pipeline.num_stages * replicas == 12
        assert pipeline.num_microbatches * replicas == MICROBATCHES * 3
        assert row.model_share == pipeline.num_chunks


def test_plans_keep_the_time_or_the_energy_of_the_job(job: Frontier) -> None:
    rows = package.advise(job)
    own = next(row for row in rows if row.is_job)
    assert own.at_equal_time is not None
    before = own.at_equal_time.predicted.baseline.energy_j
    for row in rows:
        if row.at_equal_time is not None:
            assert row.at_equal_time.iteration_time <= job.min_time
            saved = 100 * (1 - row.at_equal_time.energy / before)
            assert row.saved_percent == pytest.approx(saved)
        if row.at_equal_energy is not None:
            assert row.at_equal_energy.energy <= own.at_equal_time.energy
            faster = 100 * (1 - row.at_equal_energy.iteration_time / job.min_time)
            assert row.faster_percent == pytest.approx(faster, abs=1e-6)
    known = [row.saved_percent for row in rows if row.saved_percent is not None]
    assert known == sorted(known, reverse=True)


def test_none_of_all_schedules_saves_more_than_the_first(job: Frontier) -> None:
    best = package.advise(job, chunks=[1], best=1)[0]
    assert best.at_equal_time is not None
    for name in SCHEDULES:
        try:
            pipeline = Pipeline(name, 4, MICROBATCHES, num_chunks=1)
        except package.InputError:
            continue
        profile = job.profile.fitted({op.instruction for op in pipeline.operations})
        other = job.retraced(pipeline, profile)
        if other.min_time_ns <= job.min_time_ns:
            # Ranked by the relaxation: rounding may turn around what is closer than this.
            assert best.at_equal_time.energy <= 1.005 * other.plan(job.min_time).energy


def test_a_slower_schedule_is_ranked_by_time_alone_or_not_at_all() -> None:
    # With slow links 1F1B waits for each answer: 49 s, and GPipe 39 s.
    one_clock, clocks = even_profile(split=False), small_profile(4)
    fast = trace_frontier(Pipeline("gpipe", 4, 8, p2p_latency=1.0), one_clock)
    assert [row.is_job for row in package.advise(fast, schedules=["1f1b"], chunks=[1])] == [True]
    fast = trace_frontier(Pipeline("gpipe", 4, 8, p2p_latency=0.05), clocks, blocking_power=20)
    job, slow = package.advise(fast, schedules=["1f1b"], chunks=[1])
    assert job.is_job
    assert slow.at_equal_time is None
    assert slow.saved_percent is None
    assert slow.faster_percent is not None
    assert slow.faster_percent < 0


def test_progress_counts_to_the_end(job: Frontier) -> None:
    seen: list[tuple[int, int]] = []
    package.advise(job, best=1, progress=lambda done, count: seen.append((done, count)))
    assert [done for done, _ in seen] == list(range(1, len(seen) + 1))
    assert seen[-1][0] == seen[-1][1]


def test_a_dag_has_no_other_schedules() -> None:
    operations = [{"id": "a", "stage": 0, "instruction": "forward"}]
    pipeline = Pipeline.from_dag({"schema": "envplan/dag/v1", "operations": operations})
    frontier = trace_frontier(pipeline, small_profile(1))
    with pytest.raises(package.InputError, match="not a schedule"):
        package.advise(frontier)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    small_profile(4, blocking=70.0, microbatches=8).save_csv(tmp_path / "profile.csv")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_tables_json_and_the_next_command(folder: Path) -> None:
    printed = done("advise")
    says(
        printed,
        "Energy at equal time, modelled | Time at equal energy, modelled | 1f1b (the job)",
        "split backwards: assumed: backward_input takes 50%",
    )
    last = printed.splitlines()[-1]
    assert last == "next: envplan solve --schedule zb-h1"
    done(last.removeprefix("next: envplan "))
    document = told("advise --best 1")
    assert (document["schema"], document["source"]) == ("envplan/advice/v1", "modelled")
    (own,) = (row for row in document["schedules"] if row["is_job"])
    assert own["schedule"] == "1f1b"
    assert own["at_equal_time"]["iteration_time_s"] <= document["t_min_s"]
    refused("advise --dag dag.json", "--dag")


def test_compare_says_in_one_line_what_other_schedules_gain(folder: Path) -> None:
    printed, document = done("compare"), told("compare")
    (line,) = (one for one in printed.splitlines() if "faster at the same savings" in one)
    assert "zb-h1 (halves of backward assumed): " in line
    advised = next(row for row in document["advice"] if row["schedule"] == "zb-h1")
    assert f"{advised['faster_percent']:.1f}% faster" in line
