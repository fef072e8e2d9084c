from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import beta

from cli_helpers import assert_refused, envplan, small_profile
from envplan.errors import InputError, NoAnswerError
from envplan.frontier import trace_frontier
from envplan.frontier.robust import (
    CONFIDENCE,
    RUNS,
    Noise,
    least_held,
    noise_draws,
    noisy_makespans,
    share_at_least,
)
from envplan.frontier.trace import Frontier
from envplan.pipeline import Pipeline
from envplan.plan import Plan
from envplan.planners.ours import options_of
from envplan.profile import Profile
from envplan.runtime.drift import replan
from envplan.simulation import simulate
from envplan.verify import verify_plan
from strategies import falling_profiles, pipelines


def makespans(frontier: Frontier, plan: Plan, noise: float, seed: int, runs: int) -> Any:
    pipeline, profile = frontier.pipeline, frontier.profile
    options = options_of(frontier, plan)
    tables = [profile.table(op.profile_stage, op.instruction) for op in pipeline.operations]
    times = [table.time_ns[row] for table, row in zip(tables, options, strict=True)]
    spreads = Noise(noise).spreads(pipeline, profile, options)
    draws = noise_draws(len(times), seed, runs)
    return noisy_makespans(pipeline, np.array(times), spreads, draws)


@settings(max_examples=30, deadline=None)
@given(pipelines(max_stages=3, max_microbatches=4), st.floats(0.001, 0.5), st.data())
def test_all_runs_at_once_are_the_runs_of_the_simulator(
    pipeline: Pipeline, noise: float, data: st.DataObject
) -> None:
    frontier = trace_frontier(
        pipeline, data.draw(falling_profiles(pipeline.num_profile_stages, max_options=5))
    )
    plan, seed = frontier.plan(slowdown=0.05), data.draw(st.integers(0, 99))
    one_by_one = simulate(plan, frontier.profile, noise=noise, seed=seed, runs=9).run_times_ns
    at_once = makespans(frontier, plan, noise, seed, 9)
    # Logarithms may differ in the last place, and then a time by a ns.
    assert np.abs(at_once - np.array(one_by_one)).max() <= len(pipeline.operations)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 20_000), st.floats(0, 1), st.sampled_from([0.9, 0.99, 0.995]))
def test_the_share_proved_is_that_of_clopper_and_pearson(
    runs: int, part: float, confidence: float
) -> None:
    held = round(runs * part)
    known = beta.ppf(1 - confidence, held, runs - held + 1) if held else 0.0
    assert share_at_least(held, runs, confidence) == pytest.approx(known, rel=1e-6, abs=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5000), st.floats(0.001, 0.999))
def test_the_fewest_that_prove_a_share_are_the_fewest(runs: int, share: float) -> None:
    needed = least_held(share, runs, CONFIDENCE)
    if needed <= runs:
        assert share_at_least(needed, runs, CONFIDENCE) >= share
    if needed > 0:
        assert share_at_least(needed - 1, runs, CONFIDENCE) < share


@settings(max_examples=10, deadline=None)
@given(
    pipelines(max_stages=3, max_microbatches=4),
    st.sampled_from([0.5, 0.8, 0.95, 0.999]),
    st.sampled_from([0.005, 0.03]),
    st.data(),
)
def test_plan_holds_its_target_in_replays_that_it_has_not_seen(
    pipeline: Pipeline, probability: float, noise: float, data: st.DataObject
) -> None:
    profile = data.draw(falling_profiles(pipeline.num_profile_stages))
    frontier = trace_frontier(pipeline, profile)
    slowdown = data.draw(st.floats(0.0, 0.3))
    try:
        plan = frontier.robust_plan(probability, slowdown=slowdown, noise=noise)
    except NoAnswerError:
        return  # as test_what_no_plan_holds_says_what_the_fastest_could has it
    target_ns = frontier.min_time_ns + int(frontier.min_time_ns * slowdown)
    runs = 4000
    held = int((makespans(frontier, plan, noise, 12345, runs) <= target_ns).sum())
    # Five standard deviations: what chance may do.
    assert held / runs >= probability - 5 * (probability * (1 - probability) / runs) ** 0.5
    assert plan.iteration_time <= plan.target.deadline_s
    assert plan.energy_lower_bound <= plan.energy
    proved = verify_plan(plan, profile)
    assert any("replays with noise end by" in line for line in proved)


@pytest.fixture(scope="module")
def a40() -> Frontier:
    return trace_frontier(Pipeline("1f1b", 4, 8), Profile.builtin("a40-gpt3-1.3b-4stage"))


def test_being_surer_takes_more_energy_and_never_less_than_an_exact_plan(a40: Frontier) -> None:
    exact = a40.plan(slowdown=0.04)
    energies = [
        a40.robust_plan(probability, slowdown=0.04, noise=0.02).energy
        for probability in (0.5, 0.9, 0.999)
    ]
    assert energies == sorted(energies)
    assert energies[0] >= exact.energy * 0.999
    assert energies[-1] < a40.max_frequency_plan().energy


def test_where_t_min_is_too_late_operations_off_the_critical_path_get_faster(
    a40: Frontier,
) -> None:
    # Just above what T_min's plan holds: its slack is spent, and has to be given back.
    tight = a40.robust_plan(0.95, slowdown=0.011, noise=0.02)
    assert tight.iteration_time == a40.min_time
    assert tight.energy > a40.plan().energy


def test_what_no_plan_holds_says_what_the_fastest_could(a40: Frontier) -> None:
    with pytest.raises(NoAnswerError, match=r"10000 replays do; ([0-9.]+) s could be held") as info:
        a40.robust_plan(0.95, slowdown=0.001, noise=0.05)
    could = float(str(info.value).split("; ")[1].split()[0])
    plan = a40.robust_plan(0.95, could * 1.001, noise=0.05)
    assert plan.predicted.robustness is not None
    assert plan.predicted.robustness.share_at_least >= 0.95


def test_noise_by_the_profiles_own_spread() -> None:
    rows = [
        (0, name, mhz, time, energy, time * spread)
        for name, spread in (("forward", 0.001), ("backward", 0.1))
        for mhz, time, energy in ((2000, 0.5, 150.0), (1500, 0.6, 120.0), (1000, 1.0, 110.0))
    ]
    columns = ("stage", "instruction", "frequency", "time", "energy", "time_std")
    profile = Profile.from_rows(rows, columns=columns)
    assert profile.time_spread(0, "backward", 1500) == pytest.approx(0.1)
    assert profile.time_spread(0, "backward", 1600) is None
    frontier = trace_frontier(Pipeline("1f1b", 1, 6), profile)
    plan = frontier.robust_plan(0.9, slowdown=0.2)
    assert plan.predicted.robustness is not None
    assert plan.predicted.robustness.noise is None
    spreads = Noise(None).spreads(frontier.pipeline, profile, options_of(frontier, plan))
    assert sorted(set(np.round(spreads, 9))) == [0.001, 0.1]
    verify_plan(plan, profile)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"probability": 0.0}, "above 0 and up to 99.9 percent"),
        ({"probability": 0.9999}, "above 0 and up to 99.9 percent"),
        ({"probability": float("nan")}, "above 0 and up to 99.9 percent"),
        ({"probability": 0.9, "noise": 0.0}, "noise must be a fraction above 0"),
        ({"probability": 0.9, "noise": 1.5}, "noise must be a fraction above 0"),
        ({"probability": 0.9, "noise": 0.1, "seed": -1}, "seed must not be negative"),
        ({"probability": 0.9}, "column time_std"),
    ],
)
def test_arguments_out_of_range_are_refused(
    a40: Frontier, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        a40.robust_plan(**{"slowdown": 0.1, **arguments})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    small_profile().save_csv(tmp_path / "profile.csv")
    return tmp_path


def test_derived_rows_have_no_spread_of_their_own(tmp_path: Path) -> None:
    rows = [
        (0, name, mhz, time, 9.0, 0.01)
        for name in ("forward", "backward")
        for mhz, time in ((1500, 0.1), (1000, 0.2))
    ]
    columns = ("stage", "instruction", "frequency", "time", "energy", "time_std")
    text = "\n".join(",".join(map(str, row)) for row in (columns, *rows))
    (tmp_path / "profile.csv").write_text(text + "\n")
    noisy = ("solve", "-m", 2, "--slowdown", 20, "--robust", 90)
    assert envplan(*noisy, cwd=tmp_path).code == 0
    refused = envplan(*noisy, "--recompute", cwd=tmp_path)
    assert_refused(refused, 2, "derived rows", "--noise")
    assert envplan(*noisy, "--recompute", "--noise", 2, cwd=tmp_path).code == 0


def test_solve_says_what_it_proved_and_check_proves_it_again(folder: Path) -> None:
    ran = envplan("solve", "--slowdown", 6, "--robust", 90, "--noise", 3, cwd=folder)
    assert ran.code == 0, ran.err
    assert "of 10000 replays end by" in ran.out
    assert "more than a plan for exact times" in ran.out
    checked = envplan("check", "plan.json", cwd=folder)
    assert checked.code == 0, checked.err
    assert "replays with noise end by" in checked.out
    document = json.loads((folder / "plan.json").read_text())
    sure = document["predicted"]["robustness"]
    assert sure["probability"] == 0.9
    assert sure["runs"] == RUNS
    assert sure["share_at_least"] >= 0.9


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("held_runs", 9999, "held_runs is 9999; replayed it is"),
        ("probability", 0.9999, "prove a probability of"),
        ("noise", 0.2, "replayed it is"),
        ("runs", 100, "more than its runs"),
    ],
)
def test_a_tampered_claim_does_not_pass(folder: Path, field: str, value: float, words: str) -> None:
    ran = envplan("solve", "-q", "--slowdown", 6, "--robust", 90, "--noise", 3, cwd=folder)
    assert ran.code == 0, ran.err
    document = json.loads((folder / "plan.json").read_text())
    document["predicted"]["robustness"][field] = value
    (folder / "plan.json").write_text(json.dumps(document))
    assert_refused(envplan("check", "plan.json", cwd=folder), 2, words)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--noise", 2], "--noise goes with --robust"),
        (["--robust", 95, "--switch-latency", 5], "--switch-latency and --robust"),
        (["--robust", 95, "--min-energy"], "--robust and --min-energy"),
        (["--robust", 95, "--polish", 1], "--robust and --polish"),
        (["--robust", 100, "--noise", 1], "up to 99.9 percent"),
        (["--robust", 95], "column time_std"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    folder: Path, options: list[object], words: str
) -> None:
    assert_refused(envplan("solve", *options, cwd=folder), 2, words)


def test_a_target_nobody_can_hold_leaves_no_plan(folder: Path) -> None:
    ran = envplan("solve", "--robust", 99, "--noise", 5, cwd=folder)
    assert_refused(ran, 1, "could be held")
    assert not (folder / "plan.json").exists()


def test_a_plan_made_anew_from_another_profile_is_as_sure(a40: Frontier) -> None:
    for plan in (
        a40.robust_plan(0.9, slowdown=0.04, noise=0.02),
        a40.robust_plan(0.9, a40.min_time * 1.04, noise=0.02),
    ):
        assert replan(plan, a40.profile) == plan
