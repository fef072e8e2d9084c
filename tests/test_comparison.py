"""Plans side by side: nobody beats ours, what bloat means, and which schedule suits a job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cli_helpers import done, refused, says, small_profile, told
from envplan.check.plans import verify_plan
from envplan.errors import InputError
from envplan.frontier.network import Network
from envplan.pipeline import SCHEDULES, Pipeline
from envplan.plan import Plan
from envplan.planners import PLANNERS, Comparison, Entry, advise, compare
from envplan.plotting.frontier import LOOKS
from envplan.profile import Profile, ProfileMetadata, builtin_paths
from envplan.solve import Frontier, trace_frontier
from strategies import frontiers


def traced(schedule: str = "1f1b", stages: int = 3, microbatches: int = 6) -> Frontier:
    pipeline = Pipeline(schedule, stages, microbatches)
    return trace_frontier(pipeline, small_profile(stages, blocking=70.0))


def entry(comparison: Comparison, planner: str, point: str | None = None) -> Entry:
    return next(e for e in comparison.entries if (e.plan.planner, e.point) == (planner, point))


def assert_nobody_beats_ours(comparison: Comparison) -> None:
    base, sync = comparison.entries[0].plan, comparison.straggler_time
    assert comparison.baseline == base.predicted.baseline
    for e in comparison.entries:
        assert e.ours.energy <= e.plan.energy
        assert e.ours.iteration_time <= e.plan.iteration_time
        assert e.plan.energy_lower_bound <= e.ours.energy
        assert e.ours.planner == "frontier"
        assert e.intrinsic_bloat_j == e.plan.energy - e.ours.energy
        time = e.plan.iteration_time / base.iteration_time - 1
        assert e.slowdown_percent == pytest.approx(100 * time)
        saved = 1 - e.plan.energy / base.energy if base.energy else 0
        assert e.savings_percent == pytest.approx(100 * saved)
        if sync is None:
            assert e.with_straggler is None
            continue
        assert e.with_straggler is not None
        assert e.with_straggler.extrinsic_bloat_j >= 0
        without, used = (plan.energy + plan.waiting_energy(sync) for plan in (base, e.plan))
        assert e.with_straggler.energy_j == pytest.approx(used)
        saved = 1 - used / without if without else 0
        assert e.with_straggler.savings_percent == pytest.approx(100 * saved)
        if e.plan.iteration_time <= sync:
            assert e.with_straggler.gap >= 0


@given(
    frontiers(3, 5),
    st.sampled_from(["balanced", "greedy"]),
    st.sampled_from([None, -0.9, 0.0, 0.03, 0.5]),
)
@settings(max_examples=12)
def test_no_planner_beats_ours_on_any_profile(
    frontier: Frontier, reconfigure: str, slowdown: float | None
) -> None:
    comparison = compare(frontier, reconfigure=reconfigure, straggler_slowdown=slowdown)
    assert_nobody_beats_ours(comparison)
    for e in comparison.entries:
        assert verify_plan(e.plan, frontier.profile)
        assert verify_plan(e.ours, frontier.profile)


@pytest.mark.parametrize("name", sorted(builtin_paths()))
def test_no_planner_beats_ours_on_a_built_in_profile(name: str) -> None:
    profile = Profile.builtin(name)
    microbatches = min(profile.metadata.num_microbatches or 8, 2 * profile.num_stages)
    frontier = trace_frontier(Pipeline("1f1b", profile.num_stages, microbatches), profile)
    comparison = compare(frontier, straggler_slowdown=0.05)
    assert_nobody_beats_ours(comparison)
    assert entry(comparison, "frontier", "T_min").slowdown_percent <= 0
    assert all(
        0 <= e.plan.gap < 0.005 for e in comparison.entries if e.point in ("T_min", "T_star")
    )
    assert entry(comparison, "envpipe").slowdown_percent < 1


def test_a_comparison_is_a_table_with_a_row_for_each_plan() -> None:
    comparison = compare(traced(), straggler_slowdown=0.1)
    table = comparison.to_frame()
    assert list(table["planner"]) == [entry.plan.planner for entry in comparison.entries]
    assert list(table["energy_j"]) == [entry.plan.energy for entry in comparison.entries]
    assert (table["straggler_energy_j"] >= table["energy_j"]).all()


def test_envpipe_reschedules_1f1b_alone_as_far_as_slots_allow() -> None:
    pipeline = Pipeline("1f1b", 3, 6, p2p_latency=0.001)
    job = {"blocking_power": 33.0, "replicas": 2}
    comparison = compare(trace_frontier(pipeline, small_profile(3, blocking=70.0), **job))
    other = comparison.envpipe_frontier
    assert other.pipeline.forwards_ahead[0] > 0
    assert other.blocking_power_w == comparison.frontier.blocking_power_w == (33.0,) * 3
    assert (other.pipeline.p2p_latency_ns, other.replicas) == (pipeline.p2p_latency_ns, 2)
    found = [(e.plan.planner, e.point, e.plan.job.schedule) for e in comparison.entries]
    others = [(name, None, "1f1b") for name in ("max_frequency", "zeus_global", "zeus_per_stage")]
    assert found == [
        *others,
        ("envpipe", None, "envpipe"),
        ("frontier", "T_min", "1f1b"),
        ("frontier", "T_star", "1f1b"),
        ("frontier", "T_min", "envpipe"),
    ]
    capped = compare(traced(), activation_slots=3)
    assert capped.envpipe_frontier.pipeline.forwards_ahead == (0, 0, 0)
    kept = compare(traced("gpipe"))
    assert kept.envpipe_frontier is kept.frontier
    assert {e.plan.job.schedule for e in kept.entries} == {"gpipe"}
    with pytest.raises(InputError, match=r"rescheduling 1f1b.*gpipe"):
        compare(traced("gpipe"), activation_slots=9)


@pytest.mark.parametrize("slow", [0.9, 10.0])
def test_the_plan_for_a_straggler_has_no_extrinsic_bloat(slow: float) -> None:
    frontier = traced()
    comparison = compare(frontier, straggler_time=slow * frontier.min_energy_time)
    assert_nobody_beats_ours(comparison)
    ours = entry(comparison, "frontier", "straggler")
    assert ours.plan.iteration_time <= slow * frontier.min_energy_time
    assert ours.plan.iteration_time <= frontier.slowest_time
    assert (ours.plan.iteration_time > frontier.min_energy_time) == (slow > 1)
    assert ours.with_straggler.extrinsic_bloat_j == 0
    assert ours.with_straggler.gap == pytest.approx(0.0, abs=1e-3 if slow > 1 else 1e-2)
    for e in comparison.entries:
        if e.plan.job.schedule == "1f1b" and e.plan.iteration_time <= comparison.straggler_time:
            above = e.with_straggler.energy_j - ours.with_straggler.energy_j
            bloat = e.intrinsic_bloat_j + e.with_straggler.extrinsic_bloat_j
            assert bloat == pytest.approx(above, abs=1e-3 * e.plan.energy)
            assert e.with_straggler.gap >= ours.with_straggler.gap
    assert entry(comparison, "frontier", "T_min").with_straggler.extrinsic_bloat_j > 0


def published(value: object) -> Profile:
    metadata = ProfileMetadata(extra={} if value is None else {"published": value})
    rows = [
        (0, name, mhz, 90 / mhz, 5.0 + mhz / 300)
        for name in ("forward", "backward")
        for mhz in (900, 1200)
    ]
    return Profile.from_rows(rows, metadata=metadata)


PUBLISHED = {"savings_percent": 25.2, "slowdown_percent": 1.0, "source": "a paper"}


@pytest.mark.parametrize(
    ("value", "options", "words"),
    [
        (None, {"straggler_time": 1.0, "straggler_slowdown": 0.1}, "not both"),
        (None, {"straggler_time": float("nan")}, "straggler_time_s should be"),
        (None, {"straggler_time": -1.0}, "straggler_time_s should be"),
        (None, {"straggler_slowdown": float("inf")}, "straggler_time_s should be"),
        (None, {"reconfigure": "quick"}, "known: balanced, greedy"),
        (None, {"activation_slots": 0}, "1F1B alone keeps"),
        (3, {}, "should be an object"),
        ({"source": "x"}, {}, "savings_percent is missing"),
        (PUBLISHED | {"savings_percent": True}, {}, "savings_percent should be a valid number"),
        (PUBLISHED | {"slowdown_percent": "2"}, {}, "slowdown_percent"),
        ({"savings_percent": 1}, {}, "published.source is missing"),
    ],
)
def test_bad_arguments_and_sidecars_are_refused(
    value: object, options: dict[str, Any], words: str
) -> None:
    frontier = trace_frontier(Pipeline("1f1b", 1, 2), published(value))
    with pytest.raises(InputError, match=words):
        compare(frontier, **options)


def test_nothing_is_traced_twice_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = []
    begin = Network.solver
    monkeypatch.setattr(Network, "solver", lambda self: traces.append(1) or begin(self))
    profile = small_profile(stages=3)

    def plans() -> list[tuple[float, float]]:
        comparison = compare(trace_frontier(Pipeline("1f1b", 3, 7), profile))
        assert comparison.advice is not None
        return [(entry.plan.energy, entry.ours.energy) for entry in comparison.entries]

    first, count = plans(), len(traces)
    assert plans() == first
    assert len(traces) == count > 1


# Schedules

MICROBATCHES = 8


@pytest.fixture(scope="module")
def job() -> Frontier:
    return trace_frontier(Pipeline("1f1b", 4, MICROBATCHES), small_profile(4), replicas=3)


def even_profile(*, split: bool) -> Profile:
    """Four equal stages of one clock: forward 1 s, backward 2 s, 100 W."""
    times = {"forward": 1.0, "backward": 2.0}
    times |= dict.fromkeys(("backward_input", "backward_weight"), 1.0) if split else {}
    rows = [(s, name, 1000, time, 100 * time) for s in range(4) for name, time in times.items()]
    return Profile.from_rows(rows, name="even")


@pytest.mark.parametrize("split", [True, False])
def test_zero_bubble_is_as_much_faster_as_its_paper_says(split: bool) -> None:
    pipeline = Pipeline("1f1b", 4, MICROBATCHES)
    frontier = trace_frontier(pipeline, even_profile(split=split), blocking_power=50)
    best, *others = advise(frontier, schedules=["1f1b", "gpipe", "zb-h1"], chunks=[1])
    # 1F1B takes (M + S - 1)(F + B) = 33 s; ZB-H1 M (F + B) + (S - 1)(F + B_input - B_weight) = 27.
    assert best.frontier.pipeline.schedule == "zb-h1"
    assert best.faster_percent == pytest.approx(100 * 6 / 33)
    # On each of 4 GPUs 24 s at 100 W, and waiting at 50 W for 9 s or 3 s.
    assert best.saved_percent == pytest.approx(100 * (2850 - 2550) / 2850)
    found = {row.frontier.pipeline.schedule: row for row in others}
    assert found.keys() == {"1f1b", "gpipe"}
    for name, row in found.items():
        assert (row.faster_percent, row.saved_percent, row.is_job) == (0, 0, name == "1f1b")
    assumed = best.frontier.profile.adjustments.backward_input_share
    assert assumed == (None if split else 0.5)


def test_all_run_the_same_batch_on_as_many_gpus_and_keep_the_time_or_the_energy_of_the_job(
    job: Frontier,
) -> None:
    seen: list[tuple[int, int]] = []
    rows = advise(
        job, chunks=[1, 2, 3, 4], best=2, progress=lambda done, count: seen.append((done, count))
    )
    assert [done for done, _ in seen] == list(range(1, len(seen) + 1))
    assert seen[-1][0] == seen[-1][1]
    own = next(row for row in rows if row.is_job)
    assert own.at_equal_time is not None
    before = own.at_equal_time.predicted.baseline.energy_j
    assert {row.frontier.pipeline.num_chunks for row in rows} == {1, 2, 4}
    for row in rows:
        pipeline, replicas = row.frontier.pipeline, row.frontier.replicas
        assert pipeline.num_stages * replicas == 12
        assert pipeline.num_microbatches * replicas == MICROBATCHES * 3
        assert row.model_share == pipeline.num_chunks
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
    best = advise(job, chunks=[1], best=1)[0]
    assert best.at_equal_time is not None
    for name in SCHEDULES:
        try:
            pipeline = Pipeline(name, 4, MICROBATCHES, num_chunks=1)
        except InputError:
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
    assert [row.is_job for row in advise(fast, schedules=["1f1b"], chunks=[1])] == [True]
    fast = trace_frontier(Pipeline("gpipe", 4, 8, p2p_latency=0.05), clocks, blocking_power=20)
    first, slow = advise(fast, schedules=["1f1b"], chunks=[1])
    assert first.is_job
    assert slow.at_equal_time is slow.saved_percent is None
    assert slow.faster_percent < 0


def test_a_schedule_that_saves_nothing_gains_on_a_job_that_saves_less_than_nothing(
    job: Frontier,
) -> None:
    (own,) = (advice for advice in advise(job, schedules=["1f1b"], chunks=[1]) if advice.is_job)
    losing = replace(own, saved_percent=-1.5, faster_percent=0.0)
    saving_nothing = replace(own, saved_percent=0.0, faster_percent=None)
    assert saving_nothing.gain_percent_over(losing) == 1.5
    assert losing.gain_percent_over(losing) == 0
    assert replace(losing, saved_percent=None).gain_percent_over(losing) == 0
    assert replace(losing, faster_percent=None).gain_percent_over(own) < 0


def test_a_dag_has_no_other_schedules() -> None:
    operations = [{"id": "a", "stage": 0, "instruction": "forward"}]
    pipeline = Pipeline.from_dag({"schema": "envplan/dag/v1", "operations": operations})
    with pytest.raises(InputError, match="not a schedule"):
        advise(trace_frontier(pipeline, small_profile(1)))


# Commands


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    small_profile(4, blocking=70.0, microbatches=8).save_csv(tmp_path / "profile.csv")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_compare_prints_what_its_json_has(folder: Path) -> None:
    out, document = done("compare"), told("compare")
    says(
        out,
        "slower (%) | saved (%) | gap (%) | intrinsic (%) | planned in (s)",
        "envpipe stopped after | modelled",
        *PLANNERS,
    )
    assert "extrinsic" not in out
    assert "published" not in out
    assert document["straggler_time_s"] is document["published"] is None
    assert {entry["planner"] for entry in document["planners"]} == set(PLANNERS)
    for one in document["planners"]:
        assert one["energy_lower_bound_j"] <= one["frontier_energy_j"] <= one["energy_j"]
        assert one["extrinsic_bloat_j"] is None
    assert document["envpipe"]["stopped"] in ("outer envelope", "highest clocks")
    # One line says what other schedules gain.
    (line,) = (one for one in out.splitlines() if "faster at the same savings" in one)
    assert "zb-h1 (halves of backward assumed): " in line
    advised = next(row for row in document["advice"] if row["schedule"] == "zb-h1")
    assert f"{advised['faster_percent']:.1f}% faster" in line


def test_plot_alone_draws_compare_png_and_svg_is_the_same_again(folder: Path) -> None:
    assert "wrote compare.png" in done("compare profile.csv --straggler-slowdown 3 --plot")
    assert (folder / "compare.png").read_bytes().startswith(b"\x89PNG")
    texts = []
    for name in ("a.svg", "b.svg"):
        done("compare -q --plot", name)
        texts.append((folder / name).read_text())
    assert texts[0] == texts[1]
    assert all(LOOKS[name].name in texts[0] for name in PLANNERS)


def test_straggler_by_time_and_by_slowdown_is_the_same(folder: Path) -> None:
    by_slowdown = told("compare --straggler-slowdown 3")
    time = by_slowdown["straggler_time_s"]
    assert time == pytest.approx(1.03 * by_slowdown["baseline"]["iteration_time_s"])
    by_time = told("compare --straggler-time", repr(time))
    for one, other in zip(by_slowdown["planners"], by_time["planners"], strict=True):
        assert one["extrinsic_bloat_j"] == other["extrinsic_bloat_j"]
        assert one["straggler_energy_j"] >= one["energy_j"]


def test_published_figure_comes_from_the_sidecar_and_is_labelled_as_such(folder: Path) -> None:
    published(PUBLISHED).save_csv(folder / "known.csv")
    assert told("compare known.csv -m 4")["published"] == PUBLISHED
    said = "not here: 25.2% saved at 1% slowdown (a paper)"
    says(done("compare known.csv -m 4"), "published", said)


def test_activation_slots_hold_envpipe_back(folder: Path) -> None:
    assert told("compare --activation-slots 4")["envpipe"]["forwards_ahead"] == [0] * 4
    capped = told("compare --schedule envpipe --activation-slots 5,3,2,1")
    assert capped["envpipe"]["forwards_ahead"] == [1, 0, 0, 0]
    assert {entry["schedule"] for entry in capped["planners"]} == {"envpipe"}


@pytest.mark.parametrize("name", sorted(PLANNERS))
def test_solve_with_any_planner_writes_a_plan_that_check_proves(folder: Path, name: str) -> None:
    slots = ("--activation-slots", 5) if name == "envpipe" else ()
    done("solve -q --planner", name, *slots)
    plan = Plan.load(folder / "plan.json")
    assert (plan.planner, plan.job.schedule) == (name, name if name == "envpipe" else "1f1b")
    if name == "envpipe":
        assert plan.job.forwards_ahead == [1, 1, 1, 0]
        assert list(plan.job.pipeline().forwards_ahead) == [1, 1, 1, 0]
    done("check -q plan.json")


def test_advise_prints_tables_json_and_the_next_command(folder: Path) -> None:
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
