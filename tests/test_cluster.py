from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli_helpers import done, small_profile, told
from envplan.errors import InputError
from envplan.pipeline import Pipeline
from envplan.plan import Plan
from envplan.profile import Profile
from envplan.simulation.cluster import (
    MAX_SEPARATE_RUNGS,
    read_slowdowns,
    simulate_cluster,
    strong_scaling,
)
from envplan.simulation.conditions import Conditions
from envplan.simulation.iteration import simulate
from envplan.solve import Frontier, trace_frontier
from envplan.solve.frontier import LADDER
from envplan.units import j_from_10fj, s_from_ns
from plan_checks import until

HEADER = "iteration,replica,slowdown\n"


@pytest.fixture(scope="module")
def profile() -> Profile:
    return small_profile(stages=3)


@pytest.fixture(scope="module")
def frontier(profile: Profile) -> Frontier:
    return trace_frontier(Pipeline("1f1b", 3, 8), profile, gpus_per_stage=2, replicas=4)


@pytest.fixture(scope="module")
def plan(frontier: Frontier) -> Plan:
    return frontier.plan()


def test_without_stragglers_a_cluster_uses_what_the_plan_states(
    plan: Plan, profile: Profile
) -> None:
    report = simulate_cluster(plan, profile)
    assert (report.num_gpus, report.time) == (24, plan.iteration_time)
    assert report.baseline_energy == plan.predicted.baseline.energy_j
    assert report.percent(report.intrinsic_savings) == pytest.approx(plan.predicted.savings_percent)
    assert report.extrinsic_savings == 0
    large = simulate_cluster(plan, profile, replicas=1000, gpus_per_stage=8)
    assert large.num_gpus == 24_000
    assert large.energy == pytest.approx(plan.energy * 1000)


def test_replicas_other_than_the_straggler_follow_the_plan_for_its_time(
    plan: Plan, profile: Profile, frontier: Frontier
) -> None:
    report = simulate_cluster(plan, profile, frontier, slowdowns=[{2: 1.1}])
    assert simulate_cluster(plan, profile, slowdowns=[{2: 1.1}]) == report  # traced where needed
    (iteration,) = report.iterations
    sync_time = iteration.sync_time_s
    assert plan.iteration_time < iteration.followed_time_s <= sync_time
    followed = frontier.plan(target_time=sync_time)
    straggler = plan.energy / 4 * 1.1
    assert report.energy == pytest.approx(until(followed, sync_time) * 3 / 4 + straggler)
    assert report.extrinsic_savings > 0


def test_straggler_beyond_t_star_is_waited_for_up_to_t_max(
    plan: Plan, profile: Profile, frontier: Frontier
) -> None:
    report = simulate_cluster(plan, profile, frontier, slowdowns=[{0: 50.0}])
    (iteration,) = report.iterations
    assert frontier.min_energy_time < iteration.followed_time_s <= frontier.slowest_time
    sync_time = iteration.sync_time_s
    at_star = until(frontier.plan(min_energy=True), sync_time)
    assert report.energy < at_star * 3 / 4 + plan.energy / 4 * 50


def test_plans_are_looked_up_in_the_ladder_of_the_plan_without_a_trace(
    plan: Plan, profile: Profile, frontier: Frontier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envplan.simulation.cluster.trace_job", None)
    laddered = plan.with_ladder(frontier.ladder(5))
    report = simulate_cluster(laddered, profile, slowdowns=[{0: 1.15}])
    times = [rung.iteration_time_s for rung in laddered.ladder or ()]
    assert report.iterations[0].followed_time_s in times
    finer = simulate_cluster(plan, profile, frontier, slowdowns=[{0: 1.15}])
    assert 0 < report.extrinsic_savings <= finer.extrinsic_savings * (1 + 1e-3)


@pytest.fixture(scope="module")
def laddered(frontier: Frontier, plan: Plan) -> Plan:
    return plan.with_ladder(frontier.ladder(16))


@given(st.lists(st.dictionaries(st.integers(0, 3), st.floats(0.5, 3.0)), min_size=1, max_size=6))
def test_every_replica_takes_its_time_and_waits_for_the_slowest(
    laddered: Plan, profile: Profile, slowdowns: list[dict[int, float]]
) -> None:
    report, plan = simulate_cluster(laddered, profile, slowdowns=slowdowns), laddered
    used = 0.0
    for iteration, stragglers in zip(report.iterations, slowdowns, strict=True):
        factors = [max(1.0, stragglers.get(replica, 1.0)) for replica in range(4)]
        sync_time = max(factors) * plan.iteration_time
        used += sum(
            factor * plan.energy
            + plan.waiting_energy(sync_time, since=factor * plan.iteration_time)
            for factor in factors
        )
        assert iteration.sync_time_s == pytest.approx(sync_time)
        assert iteration.followed_time_s <= iteration.sync_time_s
        assert iteration.energy_j <= iteration.plan_energy_j
        assert iteration.stragglers == sum(factor > 1 for factor in factors)
        assert min(factors) == 1 or iteration.energy_j == iteration.plan_energy_j
    assert report.plan_energy == pytest.approx(used / 4)
    saved = report.intrinsic_savings + report.extrinsic_savings
    assert saved == pytest.approx(report.baseline_energy - report.energy)


def test_many_different_stragglers_share_one_ladder_and_alike_iterations_are_reckoned_once(
    plan: Plan, profile: Profile, frontier: Frontier
) -> None:
    slowdowns = [{k % 4: 1 + 0.01 * (k % 16)} for k in range(10_000)]
    assert len({max(stragglers.values()) for stragglers in slowdowns}) > MAX_SEPARATE_RUNGS
    report = simulate_cluster(plan, profile, frontier, slowdowns=slowdowns)
    rungs = {rung.iteration_time for rung in (plan, *frontier.ladder(LADDER))}
    assert {iteration.followed_time_s for iteration in report.iterations} <= rungs
    assert len(report.iterations) == 10_000
    assert len({id(iteration) for iteration in report.iterations}) == 16


def test_strong_scaling_keeps_the_global_batch_and_the_slowdown_over_t_min(
    plan: Plan, profile: Profile, frontier: Frontier
) -> None:
    reports = strong_scaling(plan, profile, [4, 8, 16], slowdowns=[{0: 1.1}])
    assert [report.num_microbatches for report in reports] == [8, 4, 2]
    assert [report.num_gpus for report in reports] == [24, 48, 96]
    times = [report.time for report in reports]
    assert times == sorted(times, reverse=True)
    assert all(report.extrinsic_savings > 0 for report in reports)
    (slower,) = strong_scaling(frontier.plan(slowdown=0.1), profile, [8])
    t_min = trace_frontier(Pipeline("1f1b", 3, 4), profile).min_time
    assert t_min * 1.05 < slower.time <= t_min * 1.1 * (1 + 1e-9)
    with pytest.raises(InputError, match="32 microbatches does not divide by 5 replicas"):
        strong_scaling(plan, profile, [5])


@pytest.mark.parametrize(
    "met",
    [
        {},
        {"switch_latency": 0.01},
        {"noise": 0.05, "seed": 3, "runs": 5},
        {"sync_time": 4.0},
        {"switch_latency": 0.01, "noise": 0.05, "sync_time": 4.0},
    ],
)
def test_a_cluster_meets_what_one_pipeline_meets_and_every_run_is_an_iteration(
    plan: Plan, profile: Profile, met: dict[str, Any]
) -> None:
    conditions, timeline = Conditions.of(**met), simulate(plan, profile, **met)
    report = simulate_cluster(plan, profile, slowdowns=[{}, {0: 1.2}], conditions=conditions)
    runs = len(timeline.run_times_ns)
    assert [iteration.stragglers for iteration in report.iterations] == [0] * runs + [1] * runs
    without_straggler = report.iterations[:runs]
    for iteration, time_ns, energy_10fj in zip(
        without_straggler, timeline.run_times_ns, timeline.run_energies_10fj, strict=True
    ):
        assert iteration.plan_energy_j == j_from_10fj(energy_10fj)
        if "sync_time" not in met:
            assert iteration.sync_time_s == s_from_ns(time_ns)
            assert iteration.energy_j == iteration.plan_energy_j
        else:  # the time that everybody waits is used for a slower plan
            assert iteration.followed_time_s > s_from_ns(time_ns)
            assert iteration.energy_j < iteration.plan_energy_j


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"replicas": 0}, "replicas should be greater than or equal to 1"),
        ({"gpus_per_stage": 0}, "gpus_per_stage should be greater than or equal to 1"),
        ({"slowdowns": []}, "slowdowns .*at least 1 item"),
        ({"slowdowns": [{4: 1.2}]}, "no replica 4 .* replicas 0 to 3"),
        ({"slowdowns": [{-1: 1.2}]}, "no replica -1"),
        ({"slowdowns": [{0: float("nan")}]}, "slowdowns.* should be a finite number"),
    ],
)
def test_impossible_clusters_are_refused(
    plan: Plan, profile: Profile, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        simulate_cluster(plan, profile, **arguments)


def test_trace_lists_the_stragglers_of_each_iteration(tmp_path: Path) -> None:
    file = tmp_path / "slowdowns.csv"
    file.write_text(HEADER + "1,0,1\n0,2,1.25\n0,3,1.5\n\n2,1,1.1\n")
    assert read_slowdowns(file, 4) == [{2: 1.25, 3: 1.5}, {0: 1.0}, {1: 1.1}]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty; expected a CSV file with the header iteration,replica,slowdown"),
        (HEADER + "0,0,1.1\n2,0,1.1\n", "has a gap: no row for iteration 1, but one for 2"),
        (HEADER + "1,0,1.1\n", "has a gap: no row for iteration 0"),
        (HEADER + "0,0,-1.1\n", ':2, column slowdown: "-1.1" should be greater than 0'),
        (HEADER + "0,4,1.1\n", ":2, column replica: 4 is unknown; .* replicas 0 to 3"),
        (HEADER + "0,-1,1.1\n", 'column replica: "-1" should be greater than or equal to 0'),
        (HEADER + "0,0,1.1\n0,0,1.2\n", ":3: repeats replica 0 of iteration 0"),
    ],
)
def test_bad_traces_are_refused_with_their_line(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "slowdowns.csv"
    file.write_text(text)
    with pytest.raises(InputError, match=words):
        read_slowdowns(file, 4)


@pytest.fixture
def solved(folder: Path) -> None:
    done("solve --quiet --slowdown 2 --replicas 4")
    Path("slow.csv").write_text(HEADER + "0,0,1\n1,3,1.2\n2,3,1.2\n")


@pytest.mark.usefixtures("solved")
@pytest.mark.parametrize(
    ("options", "stragglers"),
    [
        ("--straggler 0:1.1 --straggler 1.3 --straggler 3:1", [2]),
        ("--straggler-trace slow.csv", [0, 1, 1]),
        ("--straggler 1.2 --noise 3 --runs 4 --switch-latency 5", [1] * 4),
    ],
)
def test_stragglers_are_named_free_or_listed(options: str, stragglers: list[int]) -> None:
    document = told(f"simulate {options}")
    (cluster,) = document["cluster"]
    assert [one["stragglers"] for one in cluster["iterations"]] == stragglers
    assert cluster["extrinsic_savings_j"] > 0
    times = [one["sync_time_s"] for one in cluster["iterations"]]
    assert len(set(times)) == (4 if "noise" in options else len(set(stragglers)))
    assert (times[0] > document["iteration_time_s"]) == (stragglers[0] > 0)


@pytest.mark.usefixtures("solved")
def test_strong_scaling_adds_a_row_for_each_shape() -> None:
    clusters = told("simulate --replicas 4 --strong-scaling 8,16")["cluster"]
    assert [cluster["microbatches"] for cluster in clusters] == [4, 2, 1]
    assert [cluster["gpus"] for cluster in clusters] == [8, 16, 32]
