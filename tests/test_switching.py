from __future__ import annotations

import sys
from itertools import islice, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cli_helpers import done, refused, says, told
from envplan.check.plans import verify_plan
from envplan.enforce.apply import apply_plan
from envplan.enforce.freqplan import FrequencyPlan
from envplan.enforce.topology import Topology
from envplan.errors import InputError, NoAnswerError
from envplan.pipeline import Pipeline
from envplan.plan import Plan
from envplan.plan.build import rounding_allowance_10fj
from envplan.profile import Profile
from envplan.replay import Ask, Machine
from envplan.simulation.cluster import simulate_cluster
from envplan.simulation.iteration import simulate
from envplan.solve import Frontier, trace_frontier
from envplan.solve.cache import PlanCache
from envplan.solve.candidates import GridCandidates
from envplan.solve.conditions import SearchConditions
from envplan.solve.fewer_changes import FREE_CHANGES
from envplan.solve.local_search import START_LATENCIES_NS
from envplan.units import j_from_10fj, ns_from_s
from plan_checks import bound_until, until
from strategies import falling_profiles

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.switching import compare

#: Fastest at another clock forward than backward: T_min needs a change that takes no time.
AT_TWO_CLOCKS = [
    (0, "forward", 1000, 1.0, 100.0),
    (0, "forward", 2000, 1.1, 150.0),
    (0, "backward", 1000, 2.2, 200.0),
    (0, "backward", 2000, 2.0, 300.0),
]


@pytest.fixture(scope="module")
def a40() -> Frontier:
    profile = Profile.builtin("a40-gpt3-1.3b-4stage")
    return trace_frontier(Pipeline("1f1b", 4, 4), profile)


def test_no_slowdown_is_against_what_such_clocks_can_do() -> None:
    profile = Profile.from_rows(AT_TWO_CLOCKS)
    frontier = trace_frontier(Pipeline("1f1b", 1, 2), profile)
    plan = frontier.plan(switch_latency=0.4)
    assert plan.iteration_time > frontier.min_time
    assert plan.iteration_time <= frontier.max_frequency_plan().iteration_time
    assert plan.target.deadline_s >= plan.iteration_time
    verify_plan(plan, profile)
    with pytest.raises(NoAnswerError, match="the least time found is"):
        frontier.plan(frontier.min_time, switch_latency=0.4)


@pytest.mark.parametrize("limit", [{"power_cap": 900.0}, {"energy_budget": 1e6}])
def test_a_limit_that_t_min_keeps_gives_a_plan_of_t_min(
    a40: Frontier, limit: dict[str, float]
) -> None:
    plan = a40.plan(switch_latency=0.005, **limit)
    assert plan.iteration_time == a40.min_time
    verify_plan(plan, a40.profile)


def test_t_star_a_few_ns_after_t_min_is_no_trouble() -> None:
    rows = [
        (0, "forward", 1000, 1.000000004, 99.0),
        (0, "forward", 2000, 1.0, 100.0),
        (0, "backward", 2000, 2.0, 300.0),
    ]
    frontier = trace_frontier(Pipeline("1f1b", 1, 1), Profile.from_rows(rows), blocking_power=50)
    assert frontier.min_energy_time_ns == frontier.min_time_ns + 4
    for deadline_ns in range(frontier.min_time_ns, frontier.min_energy_time_ns + 1):
        plan = frontier.plan(deadline_ns / 1e9, switch_latency=0.01)
        assert ns_from_s(plan.iteration_time) <= deadline_ns


def solved(folder: Path, *options: object) -> Plan:
    done("solve --quiet", *options)
    return Plan.load(folder / "plan.json")


def test_apply_writes_clocks_that_meet_the_deadline_with_the_latency(a40: Frontier) -> None:
    # One that is late if replayed without it.
    plans = (
        a40.plan(slowdown=percent / 100, switch_latency=0.05, ask="start")
        for percent in range(1, 9)
    )
    plan = next(
        one
        for one in plans
        if simulate(one, a40.profile, switch_latency=0.0).iteration_time > one.target.deadline_s
    )
    applied = apply_plan(plan, a40.profile, topology=Topology.for_job(plan.job))
    assert (applied.iteration_time_s, applied.energy_j) == (plan.iteration_time, plan.energy)


def test_a_tampered_plan_does_not_pass_as_one_for_slow_clocks(folder: Path) -> None:
    plan = solved(folder, "--slowdown", 5)
    for stated, words in (
        ({"switch_latency_s": 0.02}, ["start_s is", "recomputed it is"]),
        ({"min_dwell_s": 30.0}, ["the least time of 30.0 s"]),
    ):
        job = plan.job.model_copy(update=stated)
        changed = {"job": job, "stated_request": None}
        plan.model_copy(update=changed).save(folder / "plan.json")
        refused("check plan.json", *words)


def test_slower_than_t_star_is_worth_it_with_slow_clocks_too(a40: Frontier) -> None:
    straggler = 1.5 * a40.min_time
    plan = a40.plan(sync_time=straggler, switch_latency=0.02)
    star = a40.plan(min_energy=True, switch_latency=0.02)
    assert plan.iteration_time > a40.min_energy_time
    assert until(plan, straggler) < 0.98 * until(star, straggler)
    assert until(plan, straggler) < 1.005 * bound_until(a40, straggler)


def test_at_t_min_clocks_off_the_critical_path_are_lower_than_the_highest() -> None:
    frontier = trace_frontier(Pipeline("1f1b", 4, 16), Profile.builtin("a40-gpt3-1.3b-4stage"))
    plan = frontier.plan(switch_latency=0.02)
    assert plan.iteration_time <= frontier.min_time
    assert plan.gap < 0.02
    assert plan.energy < 0.9 * frontier.max_frequency_plan().energy


@pytest.mark.parametrize(
    ("options", "said", "proved"),
    [
        (
            "--slowdown 5 --switch-latency 20 --min-dwell 150",
            "every clock comes 20 ms after it is asked for",
            "0.02 s after it is asked for | no stage asks for another clock within 0.15 s",
        ),
        (
            "--peak-power-cap 350",
            "of 350 W allowed",
            "at the peak of the replay <= 350.0 W | none of them ever draws more than 350.0 W",
        ),
    ],
)
def test_limits_go_from_solve_to_the_frequency_plan(
    folder: Path, options: str, said: str, proved: str
) -> None:
    says(done(f"solve --ladder 5 {options}"), said)
    plan = Plan.load(folder / "plan.json")
    assert plan.ladder
    checked = done("check plan.json")
    says(checked, proved)
    says(checked, f"{len(plan.ladder)} slower plans in the ladder")
    says(done("simulate"), "time and energy are exactly what the plan states")
    assert told("simulate")["peak_power_w"] <= (plan.target.peak_power_w or 1e9) + 1e-9
    done("simulate -q --replicas 4 --straggler 1.2")
    done("apply -q")
    applied = FrequencyPlan.load(folder / "run.freqplan.json")
    assert [(r.iteration_time_s, r.energy_j) for r in applied.ladder or ()] == [
        (r.iteration_time_s, r.energy_j) for r in plan.ladder
    ]
    if plan.job.switch_latency_s is not None:
        assert (plan.job.switch_latency_s, plan.job.min_dwell_s) == (0.02, 0.15)
        assert "the plan states" not in done("simulate --switch-latency 0")
        # Replayed at once, a rung is faster or slower than it states.
        hasty = plan.job.model_copy(
            update={"switch_latency_s": None, "ask": None, "min_dwell_s": None}
        )
        with pytest.raises(InputError, match=r"recomputed it is|the request means"):
            verify_plan(plan.model_copy(update={"job": hasty}), Profile.read_csv("profile.csv"))


def test_rung_whose_clocks_change_too_soon_is_refused(a40: Frontier) -> None:
    profile = a40.profile
    plan = a40.plan(slowdown=0.01, switch_latency=0.02, min_dwell=0.5, moves=0.2)
    often = a40.ladder(4, switch_latency=0.02, moves=0.2, changes="free")
    hasty = [rung.as_rung() for rung in often[1:]]
    with pytest.raises(InputError, match=r"ladder\[0\]: stage \d asks for .* the least time of"):
        verify_plan(plan.model_copy(update={"ladder": hasty}), profile)
    topology = Topology.for_job(plan.job)
    applied = apply_plan(plan.model_copy(update={"ladder": hasty}), profile, topology=topology)
    assert applied.ladder == []


def test_apply_refuses_clocks_that_change_sooner_than_the_plan_keeps(a40: Frontier) -> None:
    plan = a40.plan(slowdown=0.03)
    job = plan.job.model_copy(update={"min_dwell_s": 0.5})
    plan = plan.model_copy(update={"job": job, "stated_request": None})
    with pytest.raises(InputError, match=r"the GPU has, stage \d asks for a clock at"):
        apply_plan(plan, a40.profile, topology=Topology.for_job(plan.job))


def test_straggler_that_such_clocks_cannot_be_in_time_for_leaves_the_plan(folder: Path) -> None:
    Profile.from_rows(AT_TWO_CLOCKS).save_csv(folder / "profile.csv")
    slow = ("-m", 2, "--switch-latency", 400)
    least = solved(folder, *slow)
    straggler = (6.0 + least.iteration_time) / 2
    plan = solved(folder, *slow, "--straggler-time", straggler)
    assert plan.iteration_time == least.iteration_time > straggler
    assert plan.predicted.until_straggler is None
    done("check -q plan.json")


def test_replicas_that_wait_look_up_plans_for_the_same_clocks(a40: Frontier) -> None:
    plan = a40.plan(slowdown=0.01, switch_latency=0.05)
    report = simulate_cluster(plan, a40.profile, a40, slowdowns=[{0: 1.2}], replicas=4)
    (iteration,) = report.iterations
    assert plan.iteration_time < iteration.followed_time_s <= iteration.sync_time_s
    looked_up = a40.plan(sync_time=iteration.sync_time_s, switch_latency=0.05)
    assert iteration.followed_time_s == looked_up.iteration_time


@pytest.mark.parametrize("latency", [0.005, 0.02, 0.05])
def test_no_worse_than_one_clock_or_the_usual_plan_made_for_an_earlier_deadline(
    a40: Frontier, latency: float
) -> None:
    ways = compare(a40, int(a40.min_time_ns * 1.08), latency)
    assert ways.earlier is not None
    assert ways.constant is not None
    assert 0 <= ways.ours <= min(ways.earlier, ways.constant)


@given(
    st.integers(1, 3).flatmap(falling_profiles),
    st.sampled_from([1e-6, 1e-4, 5e-4, 0.002, 0.01]),
    st.sampled_from([0.0, 0.01, 0.03, 0.1]),
)
@settings(max_examples=20)
def test_candidates_for_sooner_clocks_never_use_more_than_later_ones_that_are_in_time(
    profile: Profile, latency: float, slowdown: float
) -> None:
    # By the deadline that both are made for. A plan's own deadline may lie just before that: what
    # then ends in time for later clocks may be the candidate that for sooner ones ends too late.
    frontier = trace_frontier(Pipeline("1f1b", profile.num_stages, 3), profile)
    cache, latency_ns = PlanCache(), ns_from_s(latency)

    def candidates(latency_ns: int) -> GridCandidates:
        machine = Machine(latency_ns)
        conditions = SearchConditions(machine, moves_share=0.05, changes=FREE_CHANGES)
        found = cache.candidates(frontier, conditions)
        assert isinstance(found, GridCandidates)
        return found

    slower_ns = int(frontier.min_time_ns * (1 + slowdown))
    latest_ns = min(slower_ns, frontier.min_energy_time_ns)
    # One in four deadlines has a full search; those between have a shorter one.
    for deadline_ns in islice(candidates(latency_ns).grid_deadlines(latest_ns), 4):
        for later_ns in START_LATENCIES_NS:
            if later_ns <= latency_ns:
                continue
            try:
                later = candidates(later_ns).at(deadline_ns)
            except NoAnswerError:
                continue
            sooner = candidates(latency_ns).replay(later.rows)
            if sooner.makespan_ns <= deadline_ns:
                assert candidates(latency_ns).at(deadline_ns).energy_10fj <= sooner.energy_10fj


@pytest.mark.parametrize(
    ("ask", "deadline", "least_j"),
    [
        ("start", 2.5, {0.0: 60.0, 0.5: 60.0, 1.0: 50.0, 1.5: 50.0, 2.0: 60.0}),
        ("ahead", 3.25, {0.0: 40.0, 0.25: 37.5, 0.5: 35.0}),
    ],
)
def test_clocks_that_come_sooner_may_save_less_than_any_later_ones(
    ask: Ask, deadline: float, least_j: dict[float, float]
) -> None:
    # An operation whose clock comes late does a part of its work at the clock before, and so takes
    # a time that none of its rows has. So even all choices there are have less energy later.
    rows = [(0, name, mhz, time, energy) for name in ("forward", "backward")
            for mhz, time, energy in ((1000, 2.0, 10.0), (2000, 1.0, 30.0))]  # fmt: skip
    frontier = trace_frontier(Pipeline("1f1b", 1, 1), Profile.from_rows(rows), blocking_power=0)
    for latency, energy_j in least_j.items():
        machine = Machine(ns_from_s(latency), ask)
        choices = (np.array(rows, np.int32) for rows in product(range(2), repeat=2))
        replays = [frontier.problem.replay(rows, machine) for rows in choices]
        in_time = [one.energy_10fj for one in replays if one.makespan_ns <= ns_from_s(deadline)]
        assert j_from_10fj(min(in_time)) == energy_j
        plan = frontier.plan(deadline, switch_latency=latency, ask=ask)
        assert plan.energy == energy_j


def _nanoseconds(options: dict[str, list[tuple[int, float]]], blocking: float) -> Frontier:
    """One stage, one microbatch, operations of a few ns: (ns, nJ) by clock, the highest first."""
    rows = [
        (0, name, 1400 - 100 * k, ns / 1e9, nj / 1e9)
        for name, some in options.items()
        for k, (ns, nj) in enumerate(some)
    ]
    profile = Profile.from_rows(rows, name="tiny")
    return trace_frontier(Pipeline("1f1b", 1, 1), profile, blocking_power=blocking)


ASKS: st.SearchStrategy[Ask] = st.sampled_from(["ahead", "start"])
SHORT = st.lists(
    st.tuples(st.integers(2, 20), st.floats(0, 900)),
    min_size=1,
    max_size=3,
    unique_by=lambda o: o[0],
).map(sorted)


@given(SHORT, SHORT, st.sampled_from([1.0, 30.0, 100.0]), st.integers(1, 9), ASKS)
@example(
    [(3, 0.12209679312150479), (4, 0.033208192364903605), (7, 0.06782654178475364)],
    [(8, 0.059131654623231916), (9, 0.03953606129149392)],
    1.0,
    8,
    "start",
)
def test_the_bound_less_its_allowance_holds_where_clocks_come_late(
    forward: list[tuple[int, float]],
    backward: list[tuple[int, float]],
    blocking: float,
    latency_ns: int,
    ask: Ask,
) -> None:
    frontier = _nanoseconds({"forward": forward, "backward": backward}, blocking)
    problem, below = frontier.problem, 0
    for rows in product(*(range(len(problem.tables[n].time_ns)) for n in problem.table.tolist())):
        replay = problem.replay(np.array(rows, np.int32), Machine(latency_ns, ask))
        if replay.makespan_ns >= frontier.min_time_ns:
            above = replay.energy_10fj - frontier.lower_bound_10fj(replay.makespan_ns)
            assert above >= -rounding_allowance_10fj(replay)
            below += above < 0
    if (latency_ns, ask) == (8, "start") and forward[0] == (3, 0.12209679312150479):
        assert below  # so the allowance is needed


def test_a_clock_asked_for_ahead_is_in_time_where_operations_last_longer_than_it_takes() -> None:
    latency_s = 0.02
    profile = Profile.builtin("sosp24-a100sxm-gpt3-175b-8stage")
    plan = trace_frontier(Pipeline("1f1b", 8, 24), profile).plan(slowdown=0.01)
    late = simulate(plan, profile, switch_latency=latency_s, ask="start")
    ahead = simulate(plan, profile, switch_latency=latency_s)
    assert late.iteration_time > 1.01 * plan.iteration_time
    assert (ahead.iteration_time, ahead.energy) == (plan.iteration_time, plan.energy)


@pytest.mark.parametrize("name", ["h100-gpt3-175b-8stage", "sosp24-a40-gpt3-175b-8stage"])
def test_asked_for_ahead_no_clock_is_late_but_that_of_the_iterations_first_operation(
    name: str,
) -> None:
    """Nothing tells the machine before an iteration begins that it will."""
    frontier = trace_frontier(Pipeline("1f1b", 8, 24), Profile.builtin(name))
    at_once_free = SearchConditions(changes=FREE_CHANGES)
    candidates = PlanCache().candidates(frontier, at_once_free)
    rows = candidates.near(round(1.01 * frontier.min_time_ns)).rows
    at_once = frontier.problem.replay(rows)
    ahead = frontier.problem.replay(rows, Machine.of(8 * 10**6, "ahead"))
    times_ns = at_once.finishes_ns - at_once.starts_ns
    late_times_ns = ahead.finishes_ns - ahead.starts_ns
    assert np.flatnonzero(times_ns != late_times_ns).tolist() in ([], [0])
    assert abs(late_times_ns[0] - times_ns[0]) < 8 * 10**6


def test_a_plan_says_when_its_clocks_are_asked_for_and_files_of_old_ask_at_the_start(
    folder: Path,
) -> None:
    slow = ("-m", 8, "--slowdown", 2, "--switch-latency", "20ms")
    plan = solved(folder, *slow)
    assert plan.job.ask == plan.request.ask == "ahead"
    assert "is asked for ahead" in done("simulate plan.json")
    assert "asked for as its operation starts" in done("simulate plan.json --ask start")
    assert "done ahead" in done("check plan.json")
    not_said = plan.job.model_copy(update={"ask": None})
    plan.model_copy(update={"job": not_said}).save(folder / "plan.json")
    refused("check plan.json")
    at_start = solved(folder, *slow, "--ask", "start")
    assert at_start.job.ask == at_start.request.ask == "start"
    at_start.model_copy(update={"job": not_said, "stated_request": None}).save(folder / "plan.json")
    of_old = Plan.load(folder / "plan.json")
    assert of_old.request.machine == at_start.job.machine
    assert "as its operation starts" in done("check plan.json")
    refused("solve -m 8 --slowdown 2 --ask start", "--switch-latency")
