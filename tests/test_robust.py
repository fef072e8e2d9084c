from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import beta

from cli_helpers import done, refused, says, small_profile
from envplan.check.plans import verify_plan
from envplan.costs import Run
from envplan.errors import InputError, NoAnswerError
from envplan.pipeline import Pipeline
from envplan.plan import Plan
from envplan.profile import Profile
from envplan.replay.noise import (
    CONFIDENCE,
    NoisyRun,
    clopper_pearson_lower,
    fewest_successes,
    spreads,
)
from envplan.request.limits import LimitContext, StatedResults
from envplan.request.limits.probability import RUNS, proved_share
from envplan.runtime.drift import replan
from envplan.solve import Frontier, trace_frontier
from plan_checks import rows_of


@given(st.integers(1, 20_000), st.floats(0, 1), st.sampled_from([0.9, 0.99, 0.995]))
def test_the_share_proved_is_that_of_clopper_and_pearson(
    runs: int, part: float, confidence: float
) -> None:
    held = round(runs * part)
    known = beta.ppf(1 - confidence, held, runs - held + 1) if held else 0.0
    assert clopper_pearson_lower(held, runs, confidence) == pytest.approx(
        known, rel=1e-6, abs=1e-12
    )


@given(st.integers(1, 5000), st.floats(0.001, 0.999))
def test_the_fewest_that_prove_a_share_are_the_fewest(runs: int, share: float) -> None:
    needed = fewest_successes(share, runs, CONFIDENCE)
    if needed <= runs:
        assert clopper_pearson_lower(needed, runs, CONFIDENCE) >= share
    if needed > 0:
        assert clopper_pearson_lower(needed - 1, runs, CONFIDENCE) < share


@given(st.lists(st.integers(10**9, 10**9 + 20), min_size=1, max_size=30), st.integers(-1, 21))
def test_runs_that_end_a_nanosecond_late_are_late(makespans: list[int], after: int) -> None:
    deadline = 10**9 + after
    context = LimitContext(1, deadline, small_profile(1))
    held, share = proved_share(np.array(makespans), context, CONFIDENCE)
    assert held == len([end for end in makespans if end <= deadline])
    assert share == clopper_pearson_lower(held, len(makespans), CONFIDENCE)


@pytest.fixture(scope="module")
def a40() -> Frontier:
    return trace_frontier(Pipeline("1f1b", 4, 4), Profile.builtin("a40-gpt3-1.3b-4stage"))


def test_being_surer_takes_more_energy_and_never_less_than_an_exact_plan(a40: Frontier) -> None:
    exact = a40.plan(slowdown=0.04)
    energies = [
        a40.plan(probability=probability, slowdown=0.04, noise=0.02).energy
        for probability in (0.5, 0.9, 0.999)
    ]
    assert energies == sorted(energies)
    assert energies[0] >= exact.energy * 0.999
    assert energies[-1] < a40.max_frequency_plan().energy


def test_noise_and_late_clocks_together_take_more_than_either(a40: Frontier) -> None:
    slow = {"slowdown": 0.04, "switch_latency": 0.02, "moves": 0.2}
    both = a40.plan(probability=0.95, noise=0.02, **slow)
    assert both.energy > a40.plan(**slow).energy
    # Late clocks are searched for longer than those that follow at once.
    assert both.energy > 0.999 * a40.plan(probability=0.95, slowdown=0.04, noise=0.02).energy
    assert both.gap < 0.03
    assert replan(both, a40.profile) == both
    # What is proved is proved of replays with the latency.
    replay = a40.problem.replay(np.array(rows_of(a40, both), np.int32))
    (limit,) = both.request.limits
    context = LimitContext(1, both.target.deadline_ns, a40.profile)
    stated = StatedResults(both.energy, both.average_power, both.predicted.robustness)
    with pytest.raises(InputError, match="held_runs is"):
        limit.prove(stated, replay, context)


def test_where_t_min_is_too_late_operations_off_the_critical_path_get_faster(
    a40: Frontier,
) -> None:
    # Just above what T_min's plan holds: its slack is spent, and has to be given back.
    tight = a40.plan(probability=0.95, slowdown=0.011, noise=0.02)
    assert tight.iteration_time == a40.min_time
    assert tight.energy > a40.plan().energy


@pytest.mark.parametrize("iterations", [None, 1000])
def test_what_no_plan_holds_says_what_the_fastest_could(
    a40: Frontier, iterations: int | None
) -> None:
    sure = {"probability": 0.95, "noise": 0.05}

    def plan(time_s: float) -> Plan:
        if iterations is None:
            return a40.plan(time_s, **sure)
        return a40.plan(run=Run(iterations=iterations, deadline_s=time_s), **sure)

    with pytest.raises(NoAnswerError, match=r"replays( do)?;.* ([0-9.]+) s could be held") as info:
        plan(1.001 * a40.min_time * (iterations or 1))
    could = plan(1.001 * float(str(info.value).split(" s could be held")[0].split()[-1]))
    assert could.predicted.robustness is not None
    assert could.predicted.robustness.share_at_least >= 0.95
    verify_plan(could, a40.profile)


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
    bare = trace_frontier(Pipeline("1f1b", 2, 2), small_profile(2))
    with pytest.raises(InputError, match="column time_std"):
        bare.plan(probability=0.9, slowdown=0.1)
    frontier = trace_frontier(Pipeline("1f1b", 1, 6), profile)
    plan = frontier.plan(probability=0.9, slowdown=0.2)
    assert plan.predicted.robustness is not None
    assert plan.predicted.robustness.noise is None
    known = spreads(None, frontier.problem, profile, np.array(rows_of(frontier, plan)))
    assert sorted(set(np.round(known, 9))) == [0.001, 0.1]
    verify_plan(plan, profile)


@given(
    st.sampled_from([1, 2, 7, 60]),
    st.floats(0.001, 0.3),
    st.floats(0.2, 0.999),
    st.integers(0, 99),
)
def test_a_run_is_at_least_as_sure_as_its_iterations_prove(
    iterations: int, spread: float, probability: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    known = np.rint(1e9 * np.exp(spread * rng.standard_normal(RUNS))).astype(np.int64)
    latest = NoisyRun(iterations, 0).provable_deadline_ns(known, probability, CONFIDENCE)
    run = NoisyRun(iterations, latest)
    share = run.cantelli_lower(known, CONFIDENCE)
    assert share == pytest.approx(probability, abs=1e-3)
    sums = (1e9 * np.exp(spread * rng.standard_normal((4000, iterations)))).sum(axis=1)
    # Five standard deviations: what chance may do.
    by_chance = 5 * (probability * (1 - probability) / 4000) ** 0.5
    assert (sums <= latest).mean() >= probability - by_chance
    assert replace(run, deadline_ns=int(known.mean()) * iterations).cantelli_lower(known, 0.99) == 0


def test_a_run_costs_less_than_being_sure_of_each_iteration(a40: Frontier) -> None:
    each = a40.min_time * 1.04
    run = Run(iterations=10**5, deadline_s=each * 10**5)
    plan = a40.plan(run=run, probability=0.95, noise=0.02)
    sure = a40.plan(probability=0.95, target_time=each, noise=0.02)
    exact = a40.plan(each)
    assert exact.energy < plan.energy < sure.energy
    assert exact.iteration_time > plan.iteration_time
    assert replan(plan, a40.profile) == plan


def test_nearly_certain_is_not_said_to_be_certain(a40: Frontier) -> None:
    run = Run(iterations=10**6, deadline_s=10**6 * a40.min_time * 1.3)
    plan = a40.plan(run=run, probability=0.9, noise=0.01)
    stated = plan.predicted.robustness
    assert stated is not None
    assert 0.99999 < stated.share_at_least < 1
    assert stated.percent_at_least == "99.99%"
    assert any("at least 99.99%" in line for line in verify_plan(plan, a40.profile))


def test_derived_rows_have_no_spread_of_their_own(folder: Path) -> None:
    rows = [
        (0, name, mhz, time, 9.0, 0.01)
        for name in ("forward", "backward")
        for mhz, time in ((1500, 0.1), (1000, 0.2))
    ]
    columns = ("stage", "instruction", "frequency", "time", "energy", "time_std")
    text = "\n".join(",".join(map(str, row)) for row in (columns, *rows))
    (folder / "profile.csv").write_text(text + "\n")
    (folder / "profile.meta.json").unlink()
    noisy = "solve -m 2 --slowdown 20 --robust 90"
    refused(f"{noisy} --recompute", "derived rows", "--noise")
    done(noisy)
    done(f"{noisy} --recompute --noise 2")


@pytest.mark.parametrize(
    ("asked", "said", "proved"),
    [
        (
            "--slowdown 6",
            "of 10000 replays end by | more than a plan for exact times",
            "replays with noise end by",
        ),
        (
            "--iterations 20000 --deadline 8h15m --price 0.3",
            "20000 iterations end by the deadline, as 10000 replays show",
            "20000 iterations end by 29700.0 s with a probability of at least",
        ),
    ],
)
def test_check_proves_what_solve_says_and_no_other_claim(
    folder: Path, asked: str, said: str, proved: str
) -> None:
    says(done(f"solve {asked} --robust 90 --noise 3"), said)
    says(done("check plan.json"), proved)
    text = (folder / "plan.json").read_text()
    sure = json.loads(text)["predicted"]["robustness"]
    assert (sure["probability"], sure["runs"]) == (0.9, RUNS)
    assert sure["share_at_least"] >= 0.9
    for field, value, words in (
        ("held_runs", 9999, "held_runs is 9999; recomputed it is"),
        ("probability", 0.9999, "robustness.probability is 0.9999"),
        ("noise", 0.2, "recomputed it is"),
        ("runs", 100, "held_runs is"),
        ("iterations", 30_000, "robustness.iterations goes with costs of as many iterations"),
    ):
        document = json.loads(text)
        document["predicted"]["robustness"][field] = value
        (folder / "plan.json").write_text(json.dumps(document))
        refused("check plan.json", words)


@pytest.mark.parametrize("probability", [0.05, 0.4])
def test_a_cap_that_t_max_just_breaks_is_kept_with_a_proof(
    a40: Frontier, probability: float
) -> None:
    slowest = a40.plan(sync_time=a40.slowest_time)
    cap_w = slowest.average_power * (1 - 1e-9)
    plan = a40.plan(power_cap=cap_w, probability=probability, noise=0.02)
    assert plan.iteration_time > slowest.iteration_time
    assert plan.predicted.robustness is not None
    verify_plan(plan, a40.profile)


def test_a_probability_of_one_and_a_single_replay_prove_nothing() -> None:
    run = NoisyRun(10, 1000)
    with pytest.raises(InputError, match="no number of replays proves a probability of 1"):
        run.provable_deadline_ns(np.array([90, 95, 100]), 1.0, CONFIDENCE)
    with pytest.raises(InputError, match="two replays at least"):
        run.cantelli_lower(np.array([90]), CONFIDENCE)
