"""A site's power is shared exactly, its plans hold, and what it says is proved."""

from __future__ import annotations

import hashlib
import itertools
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_rgba
from scipy.optimize import linprog

from cli_helpers import done, envplan, says, small_profile, told
from envplan import FrontierFile, InputError, NoAnswerError, Pipeline, Profile, trace_frontier
from envplan._io import files
from envplan.plan.frontier_file import distinct, less_powerful
from envplan.plotting.site import site_figure
from envplan.replay import Replay
from envplan.site import Budget, SiteJob, SitePlan, plan_site, read_budget, read_jobs
from envplan.site.budget import Interval
from envplan.site.curve import OperatingPoint, PowerCurve
from envplan.site.jobs import frontier_sha256
from envplan.site.peaks import peak_powers_w
from envplan.site.plan import SiteOverheads
from envplan.site.sharing import Demand, Market, Slot, allocate_over_time
from envplan.site.shedding import shed_curve
from envplan.units import POWER_UNITS_PER_W

HOUR_S = 3600.0


@cache
def frontier_file(stages: int, microbatches: int) -> FrontierFile:
    profile = small_profile(stages, blocking=60.0)
    frontier = trace_frontier(Pipeline("1f1b", stages, microbatches), profile, full=True)
    plans = distinct(frontier.sample_plans(7))
    slower = less_powerful(frontier.sample_plans(4, beyond=True), plans[-1])
    return FrontierFile.from_plans(frontier, plans, slower)


def job(name: str = "a", stages: int = 2, microbatches: int = 4, **more: object) -> SiteJob:
    file = frontier_file(stages, microbatches)
    return replace(SiteJob(name, file, sha256=frontier_sha256(file)), **more)  # type: ignore[arg-type]


@cache
def measured_frontier(name: str, microbatches: int) -> FrontierFile:
    profile = Profile.builtin(name)
    pipeline = Pipeline("1f1b", profile.num_stages, microbatches)
    frontier = trace_frontier(pipeline, profile, full=True)
    plans = distinct(frontier.sample_plans(7))
    slower = less_powerful(frontier.sample_plans(4, beyond=True), plans[-1])
    return FrontierFile.from_plans(frontier, plans, slower)


def measured_jobs(**more: object) -> list[SiteJob]:
    """Jobs of built-in profiles, which are found again where peaks are replayed."""
    jobs = []
    for name, stages, replicas in (("a", 4, 1), ("b", 8, 2)):
        file = measured_frontier(f"a40-gpt3-1.3b-{stages}stage", 6)
        plain = SiteJob(name, file, sha256=frontier_sha256(file), replicas=replicas)
        jobs.append(replace(plain, **more))  # type: ignore[arg-type]
    return jobs


def three_jobs(**more: object) -> list[SiteJob]:
    return [
        job("a", 2, 4, **more),
        job("b", 3, 5, weight=2.0, replicas=2, **more),
        job("c", 4, 6, **more),
    ]


def full_power_w(jobs: list[SiteJob]) -> float:
    return sum(job.relaxed_curve.fastest.power_w for job in jobs)


def least_power_w(jobs: list[SiteJob]) -> float:
    return sum(job.relaxed_curve.slowest.power_w for job in jobs)


def hours(*powers_w: float) -> Budget:
    return Budget(
        tuple(
            Interval(hour * HOUR_S, (hour + 1) * HOUR_S, power_w, 0.0)
            for hour, power_w in enumerate(powers_w)
        )
    )


@st.composite
def curves(draw: st.DrawFn) -> PowerCurve:
    """Convex curves of one to five pieces, some with a pause."""
    widths = draw(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=5))
    slopes = sorted(
        draw(st.lists(st.floats(1.0, 500.0), min_size=len(widths), max_size=len(widths)))
    )
    start = OperatingPoint(draw(st.floats(0.0, 2.0)), draw(st.floats(1.0, 100.0)))
    points = [start]
    for width, slope in zip(widths, slopes, strict=True):
        slower = points[-1]
        points.append(OperatingPoint(slower.throughput + width, slower.power_w + width * slope))
    return PowerCurve.through(points)


def best_value_by_modes(demands: list[Demand], power_w: float) -> float:
    """The best use of a budget, by a linear program over shares of time at each corner.

    It knows nothing of slopes, pieces or prices.
    """
    value, power, job_of = [], [], []
    for index, demand in enumerate(demands):
        value += (demand.value * demand.curve.throughput).tolist()
        power += demand.curve.power_w.tolist()
        job_of += [index] * len(demand.curve.throughput)
    all_time = np.array([[float(j == index) for j in job_of] for index in range(len(demands))])
    result = linprog(
        -np.array(value),
        A_ub=[power],
        b_ub=[power_w],
        A_eq=all_time,
        b_eq=np.ones(len(demands)),
        method="highs",
    )
    assert result.success
    return -float(result.fun)


@given(
    st.lists(st.builds(Demand, curves(), st.floats(0.1, 10.0)), min_size=1, max_size=6),
    st.floats(0.0, 1.1),
)
def test_no_use_of_a_budget_is_worth_more(demands: list[Demand], part: float) -> None:
    least_w = sum(float(demand.curve.power_w[0]) for demand in demands)
    full_w = sum(float(demand.curve.power_w[-1]) for demand in demands)
    power_w = least_w + part * (full_w - least_w)
    market = Market(demands)
    allocation = market.allocate(power_w)
    assert allocation.power_w <= power_w * (1 + 1e-12)
    assert allocation.value == pytest.approx(best_value_by_modes(demands, power_w), rel=1e-9)
    assert allocation.value == pytest.approx(market.best_value(power_w), rel=1e-12)
    for demand, throughput in zip(demands, allocation.throughput.tolist(), strict=True):
        assert demand.curve.throughput[0] <= throughput <= demand.curve.throughput[-1] * (1 + 1e-12)


@given(
    st.lists(st.builds(Demand, curves(), st.floats(0.1, 10.0)), min_size=1, max_size=4),
    st.floats(0.05, 0.95),
)
def test_the_price_is_what_the_next_watt_is_worth(demands: list[Demand], part: float) -> None:
    market = Market(demands)
    full_w = sum(float(demand.curve.power_w[-1]) for demand in demands)
    power_w = market.least_power_w + part * (full_w - market.least_power_w)
    more_w = 1e-6 * (full_w - market.least_power_w)
    price = market.allocate(power_w).price
    assert market.allocate(power_w + more_w).price == price, assume(False)
    gained = market.best_value(power_w + more_w) - market.best_value(power_w)
    assert gained == pytest.approx(price * more_w, rel=1e-3)


@given(curves(), st.integers(2, 4))
def test_a_bound_of_fewer_pieces_lies_nowhere_above_its_curve(curve: PowerCurve, most: int) -> None:
    bound = curve.bounded_below(most)
    assert len(bound.throughput) <= most + 1
    for throughput in np.linspace(curve.throughput[0], curve.throughput[-1], 50).tolist():
        assert bound.power_at(throughput) <= curve.power_at(throughput) * (1 + 1e-9)


@settings(max_examples=20)
@given(st.data())
def test_deadlines_are_kept_at_the_least_loss(data: st.DataObject) -> None:
    demands = data.draw(
        st.lists(st.builds(Demand, curves(), st.floats(0.1, 10.0)), min_size=1, max_size=3)
    )
    least_w = sum(float(demand.curve.power_w[0]) for demand in demands)
    full_w = sum(float(demand.curve.power_w[-1]) for demand in demands)
    parts = data.draw(st.lists(st.floats(0.2, 1.0), min_size=2, max_size=3))
    slots = [
        Slot(10.0 * k, 10.0 * (k + 1), least_w + part * (full_w - least_w))
        for k, part in enumerate(parts)
    ]
    free = allocate_over_time(demands, slots)
    by_s = 10.0 * (len(slots) - 1)
    made = sum(10.0 * float(allocation.throughput[0]) for allocation in free[:-1])
    most = 10.0 * float(demands[0].curve.throughput[-1]) * (len(slots) - 1)
    iterations = made + 0.3 * (most - made)
    hurried = [replace(demands[0], iterations=iterations, by_s=by_s), *demands[1:]]
    try:
        allocations = allocate_over_time(hurried, slots)
    except NoAnswerError:
        return  # the budget is too small for it
    kept = sum(10.0 * float(allocation.throughput[0]) for allocation in allocations[:-1])
    assert kept >= iterations * (1 - 1e-9)
    assert all(s.power_w <= slot.power_w for s, slot in zip(allocations, slots, strict=True))
    assert sum(s.value for s in allocations) <= sum(s.value for s in free) * (1 + 1e-9)


@pytest.mark.parametrize("may_pause", [False, True])
@pytest.mark.parametrize("part", [0.15, 0.5, 0.85])
def test_plans_of_three_jobs_against_all_combinations(part: float, may_pause: bool) -> None:
    jobs = three_jobs(may_pause=may_pause)
    running_w = least_power_w(three_jobs())
    power_w = running_w + part * (full_power_w(jobs) - running_w)
    best = 0.0
    for plans in itertools.product(*(job.plan_points() for job in jobs)):
        if sum(point.power_w for point in plans) <= power_w:
            pairs = zip(jobs, plans, strict=True)
            best = max(best, sum(j.value_per_iteration * p.throughput for j, p in pairs))
    full = sum(job.value_per_iteration * job.full_throughput for job in jobs)

    def value(plan: SitePlan) -> float:
        return full * (1 - plan.intervals[0].throughput_loss_percent / 100)

    alternating = plan_site(jobs, hours(power_w))
    alone = plan_site(jobs, hours(power_w), alternates=False)
    assert value(alone) <= value(alternating) * (1 + 1e-12)
    assert value(alternating) >= best * (1 - 1e-12)
    for plan in (alternating, alone):
        assert best <= value(plan) * (1 + plan.intervals[0].gap) * (1 + 1e-12)
    assert value(alone) >= 0.99 * best
    if not may_pause:
        assert value(alone) <= best * (1 + 1e-12)
        assert all(assignment.faster_plan is None for assignment in alone.intervals[0].jobs)


@pytest.mark.parametrize("alternates", [True, False])
def test_what_a_job_does_gives_the_power_and_time_that_are_stated(alternates: bool) -> None:
    jobs = three_jobs(may_pause=True)
    for part in np.linspace(0.0, 1.0, 23).tolist():
        power_w = least_power_w(jobs) + part * (full_power_w(jobs) - least_power_w(jobs))
        interval = plan_site(jobs, hours(power_w), alternates=alternates).intervals[0]
        assert interval.power_w <= power_w * (1 + 1e-9)
        for site_job, assignment in zip(jobs, interval.jobs, strict=True):
            if assignment.plan is None:
                assert assignment.power_w == pytest.approx(site_job.waiting_w)
                assert assignment.paused_share == 1.0
                continue
            plans = site_job.plans
            faster = plans[
                assignment.plan if assignment.faster_plan is None else assignment.faster_plan
            ]
            slower = plans[assignment.plan]
            of_faster = assignment.faster_share
            time_s = (1 - of_faster) * slower.iteration_time_s + of_faster * faster.iteration_time_s
            energy_j = (1 - of_faster) * slower.energy_j + of_faster * faster.energy_j
            running_w = energy_j * site_job.scale / time_s
            mean_w = (
                assignment.paused_share * site_job.waiting_w
                + (1 - assignment.paused_share) * running_w
            )
            assert assignment.iteration_time_s == pytest.approx(time_s)
            assert assignment.power_w == pytest.approx(mean_w)


def test_a_tier_is_kept_whatever_the_budget() -> None:
    jobs = [job("firm", 2, 4, flexible=0.0), job("soft", 3, 5, flexible=0.5, may_pause=True)]
    firm_w = jobs[0].plan_points()[0].power_w
    soft_w = jobs[1].relaxed_curve.slowest.power_w
    plan = plan_site(jobs, hours(full_power_w(jobs), firm_w + 1.01 * soft_w))
    for interval in plan.intervals:
        assert interval.jobs[0].iteration_time_s == pytest.approx(jobs[0].frontier.t_min_s)
        assert interval.jobs[0].paused_share == 0.0
    soft = plan.intervals[1].jobs[1]
    assert soft.iteration_time_s is not None
    throughput = (1 - soft.paused_share) / soft.iteration_time_s
    assert throughput == pytest.approx(0.5 * jobs[1].full_throughput, rel=0.05)


def test_without_room_it_says_what_is_missing() -> None:
    jobs = three_jobs()
    power_w = least_power_w(jobs) - 100.0
    with pytest.raises(NoAnswerError, match=r"0\.1\d* kW more than the budget"):
        plan_site(jobs, hours(power_w))


def test_overheads_and_others_come_out_of_the_budget() -> None:
    jobs = three_jobs(may_pause=True)
    gpus = sum(job.num_gpus for job in jobs)
    gpu_power_w = 0.9 * full_power_w(jobs)
    plain = plan_site(jobs, hours(gpu_power_w)).intervals[0]
    overheads = SiteOverheads(pue=1.25, host_power_w=40.0, fixed_power_w=500.0)
    budget_w = 1.25 * (gpu_power_w + 40.0 * gpus) + 500.0 + 200.0
    with_others = Budget((Interval(0.0, HOUR_S, budget_w, 200.0),))
    loaded = plan_site(jobs, with_others, overheads=overheads).intervals[0]
    assert loaded.throughput_loss_percent == pytest.approx(plain.throughput_loss_percent)
    assert loaded.power_w == pytest.approx(budget_w)
    assert loaded.price_percent_per_kw == pytest.approx(plain.price_percent_per_kw / 1.25)


def test_money_decides_where_jobs_have_it() -> None:
    cheap, dear = job("cheap", money=0.01), job("dear", money=1.0)
    power_w = 0.97 * full_power_w([cheap, dear])
    interval = plan_site([cheap, dear], hours(power_w)).intervals[0]
    assert interval.jobs[0].power_w < interval.jobs[1].power_w
    assert interval.price_money_per_kwh is not None
    assert interval.price_money_per_kwh > 0


def test_a_deadline_moves_power_to_the_job_that_has_one() -> None:
    jobs = three_jobs(may_pause=True)
    full_w = full_power_w(jobs)
    budget = hours(0.8 * full_w, 0.8 * full_w, full_w)
    late = plan_site(jobs, budget).jobs[2]
    assert late.iterations_made is None
    needed = round(1.98 * HOUR_S * jobs[2].full_throughput)
    hurried = [*jobs[:2], replace(jobs[2], iterations=needed, by_s=2 * HOUR_S)]
    plan = plan_site(hurried, budget)
    assert plan.jobs[2].iterations_made is not None
    assert plan.jobs[2].iterations_made >= needed * (1 - 1e-9)
    assert all(i.power_w <= i.budget_w * (1 + 1e-9) for i in plan.intervals)
    assert max(interval.gap for interval in plan.intervals) < 0.01


def test_jobs_that_may_lose_nothing_have_deadlines() -> None:
    """The linear program of the day then has no variables."""
    rigid = job(flexible=0.0, iterations=10, by_s=HOUR_S)
    plan = plan_site([rigid], hours(2 * full_power_w([rigid])))
    assert plan.throughput_loss_percent == pytest.approx(0.0, abs=1e-9)
    assert plan.jobs[0].iterations_made == pytest.approx(HOUR_S * rigid.full_throughput)


@pytest.mark.parametrize(
    ("iterations", "by_s", "error", "words"),
    [
        (10**6, HOUR_S, NoAnswerError, "at most"),
        (10, 9 * HOUR_S, InputError, "known until 1 h"),
    ],
)
def test_a_deadline_out_of_reach_is_said(
    iterations: int, by_s: float, error: type[Exception], words: str
) -> None:
    hurried = job(iterations=iterations, by_s=by_s)
    with pytest.raises(error, match=words):
        plan_site([hurried], hours(full_power_w([hurried])))


def test_shedding_by_price_never_costs_more(folder: Path) -> None:
    (folder / "site.toml").write_text(
        '[[jobs]]\nname = "a"\nprofile = "a40-gpt3-1.3b-4stage"\nmicrobatches = 4\n'
        "may_pause = true\n"
        '[[jobs]]\nname = "b"\nprofile = "a40-gpt3-1.3b-8stage"\nmicrobatches = 8\n'
        "weight = 0.5\n"
    )
    curve = shed_curve(read_jobs("site.toml"), SiteOverheads())
    assert curve[0].shared_percent == pytest.approx(0.0, abs=1e-9)
    for point in curve:
        assert point.shared_percent <= point.alike_percent + 1e-9
        for without_plans in (point.paused_percent, point.capped_percent):
            assert without_plans is None or point.shared_percent <= without_plans + 1e-2
    lost = [point.shared_percent for point in curve]
    assert lost == sorted(lost)


def test_a_job_called_as_a_layer_has_a_colour_of_its_own_in_the_figure() -> None:
    jobs = [job("reserved"), job("b", 3, 5)]
    drawn = site_figure(plan_site(jobs, hours(full_power_w(jobs))))
    handles, labels = drawn.axes[0].get_legend_handles_labels()
    colours = {label: handle.get_facecolor() for label, handle in zip(labels, handles, strict=True)}
    assert colours["reserved"] != to_rgba("0.55")
    assert colours["reserved"] != colours["b"]


def write_jobs(folder: Path) -> Path:
    (folder / "jobs").mkdir()
    for name, stages, microbatches in (("a", 2, 4), ("b", 3, 5)):
        frontier_file(stages, microbatches).save(folder / "jobs" / f"{name}.json")
    return folder / "jobs"


def test_a_folder_of_frontiers_is_a_site(folder: Path) -> None:
    write_jobs(folder)
    document = told("site jobs --power 1400W")
    assert document["schema"] == "envplan/site/v1"
    (interval,) = document["intervals"]
    for key in ("start_s", "power_w", "budget_w", "throughput_loss_percent", "gap"):
        assert key in interval
    assert interval["power_w"] <= 1400 * (1 + 1e-9)
    assert {"name", "plan", "iteration_time_s", "power_w", "paused_share"} <= interval["jobs"][
        0
    ].keys()
    assert SitePlan.load("site.json").intervals[0].power_w == interval["power_w"]


def test_a_file_of_jobs_over_a_day(folder: Path) -> None:
    write_jobs(folder)
    (folder / "site.toml").write_text(
        '[[jobs]]\nname = "a"\nfrontier = "jobs/a.json"\nflexible = "10%"\n'
        '[[jobs]]\nname = "b"\nprofile = "a40-gpt3-1.3b-4stage"\nmicrobatches = 4\n'
        "may_pause = true\n"
    )
    (folder / "power.csv").write_text("hour,power\n0,2000\n1,1500\n2,2000\n")
    out = done("site site.toml --power power.csv --plot day.png -o day.json")
    says(out, "from (h)", "wrote day.json", "wrote day.png", "next: envplan check day.json")
    assert (folder / "day.png").read_bytes().startswith(b"\x89PNG")
    assert len(SitePlan.load("day.json").intervals) == 3
    assert (folder / "day.frontiers" / "1.json").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("jobs = 3", "jobs"),
        ("[[jobs]]\nname = 'a'", "needs either a frontier or a profile"),
        ("[[jobs]]\nname = 'a'\nfrontier = 'jobs/a.json'\nprofile = 'x'", "needs either"),
        ("[[jobs]]\nname = 'a'\nfrontier = 'jobs/a.json'\nflexible = 'much'", "flexible"),
        ("[[jobs]]\nname = 'a'\nfrontier = 'jobs/a.json'\nby = '8h'", "both iterations and by"),
        ("[[jobs]]\nname = 'a'\nfrontier = 'jobs/a.json'\nwieght = 2", "wieght"),
        ("[[jobs]]\nname = 'a'\nfrontier = 'jobs/a.json'\ntp = 8", "gpus_per_stage"),
        ("[[jobs]]\nname = 'a'\nfrontier = 'jobs/a.json'\n" * 2, "two jobs are called a"),
        ("[[jobs]]\nname = 'a'\nfrontier = 'jobs/none.json'", "none.json"),
        ("not toml", "is not valid TOML"),
    ],
)
def test_a_wrong_file_of_jobs_is_one_line(folder: Path, text: str, words: str) -> None:
    write_jobs(folder)
    (folder / "site.toml").write_text(text)
    ran = envplan("site", "site.toml", "--power", "2kW")
    assert ran.code == 2
    assert words in ran.err
    assert ran.err.count("\n") == 1
    assert not (folder / "site.json").exists()


def test_some_values_in_money_and_others_not_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_text(
        "[[jobs]]\nname = 'a'\nfrontier = 'a.json'\nmoney = 1.0\n"
        "[[jobs]]\nname = 'b'\nfrontier = 'b.json'\n"
    )
    with pytest.raises(InputError, match="job a has money"):
        read_jobs(path)


@pytest.mark.parametrize("power", ["-5", "many", "5 parsecs", "none.csv"])
def test_a_wrong_power_is_one_line(folder: Path, power: str) -> None:
    write_jobs(folder)
    ran = envplan("site", "jobs", f"--power={power}")
    assert ran.code == 2
    assert "--power" in ran.err


def test_budgets_and_what_is_reserved_have_common_intervals(tmp_path: Path) -> None:
    power, reserved = tmp_path / "power.csv", tmp_path / "reserved.csv"
    power.write_text("hour,power\n0,1000\n2,800\n")
    reserved.write_text("hour,power\n0,100\n1,50\n2,100\n3,50\n")
    budget = read_budget(str(power), str(reserved))
    told_by_hour = [(i.start_s / HOUR_S, i.budget_w, i.reserved_w) for i in budget.intervals]
    assert told_by_hour == [(0, 1000, 100), (1, 1000, 50), (2, 800, 100), (3, 800, 50)]
    assert budget.intervals[-1].end_s == 4 * HOUR_S


def test_check_proves_a_site_plan_and_notices_edits(folder: Path) -> None:
    write_jobs(folder)
    full_w = full_power_w([job("a", 2, 4), job("b", 3, 5)])
    done(f"site jobs --power {0.96 * full_w:.3f}W")
    says(done("check site.json"), "site plan, holds")
    for name, edit in EDITS.items():
        document = json.loads((folder / "site.json").read_text())
        edit(document)
        (folder / "edited.json").write_text(json.dumps(document))
        ran = envplan("check", "edited.json")
        assert ran.code == 2, name


def _set(*path: str | int, factor: float) -> object:
    def edit(document: object) -> None:
        *parents, last = path
        for step in parents:
            document = document[step]  # type: ignore[index]
        document[last] = document[last] * factor  # type: ignore[index]

    return edit


EDITS = {
    "power": _set("intervals", 0, "power_w", factor=0.99),
    "loss": _set("intervals", 0, "throughput_loss_percent", factor=0.5),
    "price": _set("intervals", 0, "price_percent_per_kw", factor=0.5),
    "budget": _set("intervals", 0, "budget_w", factor=0.8),
    "a job's power": _set("intervals", 0, "jobs", 0, "power_w", factor=0.9),
    "a job's time": _set("intervals", 0, "jobs", 0, "iteration_time_s", factor=0.9),
    "full power": _set("jobs", 0, "full_power_w", factor=0.9),
    "GPUs": _set("jobs", 0, "gpus", factor=2),
}


def test_a_bound_of_nearly_parallel_pieces_is_a_curve() -> None:
    throughput = np.array([0.0, 0.75009282, 1.75009282, 2.50018565, 3.31972764, 3.81972764])
    curve = PowerCurve(throughput, 1.0 + throughput)
    for most in (2, 3, 4):
        bound = curve.bounded_below(most)
        for x in np.linspace(0.0, throughput[-1], 50).tolist():
            assert bound.power_at(x) == pytest.approx(curve.power_at(x), rel=1e-12)


def test_without_an_answer_nothing_is_written(folder: Path) -> None:
    (folder / "site.toml").write_text(
        '[[jobs]]\nname = "b"\nprofile = "a40-gpt3-1.3b-4stage"\nmicrobatches = 4\n'
    )
    ran = envplan("site", "site.toml", "--power", "1W")
    assert ran.code == 1
    assert not list(folder.glob("site*.json"))
    assert not (folder / "site.frontiers").exists()


def test_each_file_of_a_folder_is_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jobs(folder)
    (folder / "jobs" / "other.json").write_text("{}")
    opened: list[str] = []

    open_file = files._opened

    def opened_and_noted(path: Path) -> Any:
        opened.append(path.name)
        return open_file(path)

    monkeypatch.setattr(files, "_opened", opened_and_noted)
    jobs = read_jobs(folder / "jobs")
    assert [job.name for job in jobs] == ["a", "b"]
    assert sorted(opened) == ["a.json", "b.json", "other.json"]
    digest = hashlib.sha256((folder / "jobs" / "a.json").read_bytes()).hexdigest()
    assert jobs[0].sha256 == digest


def test_peaks_of_plans_keep_within_the_budget_where_they_count() -> None:
    jobs = measured_jobs()
    peaks_w = peak_powers_w(jobs)
    highest_w = sum(max(of_job) for of_job in peaks_w)
    for part in (0.98, 0.9, 0.8):
        interval = plan_site(jobs, hours(part * highest_w), plan_power="peak").intervals[0]
        drawn_w = 0.0
        for of_job, assignment in zip(peaks_w, interval.jobs, strict=True):
            assert assignment.plan is not None
            assert assignment.faster_plan is None
            assert assignment.paused_share == 0.0
            assert assignment.power_w == of_job[assignment.plan]
            drawn_w += assignment.power_w
        assert interval.power_w == pytest.approx(drawn_w)
        assert drawn_w <= part * highest_w


def test_a_peak_is_the_highest_step_of_the_replay() -> None:
    jobs = measured_jobs()
    for job_, peaks_w in zip(jobs, peak_powers_w(jobs), strict=True):
        file = job_.frontier
        problem = file.job.problem(Profile.builtin(file.profile.name))
        for plan, peak_w in zip(job_.plans, peaks_w, strict=True):
            replay = plan.replayed("plan", problem)
            at_ns = sorted({*replay.starts_ns.tolist(), *replay.finishes_ns.tolist()})
            highest = 0.0
            for begin_ns in at_ns[:-1]:
                highest = max(highest, power_at(replay, begin_ns, file.job.blocking_power_w))
            assert peak_w == pytest.approx(highest * job_.replicas, rel=1e-6)
            assert peak_w >= plan.energy_j / plan.iteration_time_s * job_.scale * (1 - 1e-9)


def test_an_optimizer_between_iterations_counts_at_the_highest_clock(tmp_path: Path) -> None:
    rows = [
        (0, "forward", 1740, 0.1, 20.0),
        (0, "forward", 870, 0.15, 15.0),
        (0, "backward", 1740, 0.2, 40.0),
        (0, "backward", 870, 0.3, 30.0),
        (0, "optimizer", 1740, 0.01, 3.0),
        (0, "optimizer", 870, 0.01, 1.0),
    ]
    for name, its_rows, expected_w in (("without", rows[:4], None), ("with", rows, 300.0)):
        path = tmp_path / f"{name}.csv"
        Profile.from_rows(its_rows).save_csv(path)
        profile = Profile.read_csv(path)
        frontier = trace_frontier(Pipeline("1f1b", 1, 2), profile, full=True)
        file = FrontierFile.from_plans(frontier, distinct(frontier.sample_plans(3)))
        file.save(tmp_path / f"{name}.json")
        job_ = SiteJob(name, file, sha256=frontier_sha256(file), source=tmp_path / f"{name}.json")
        (peaks_w,) = peak_powers_w([job_])
        if expected_w is None:
            assert max(peaks_w) == pytest.approx(200.0)
        else:
            assert peaks_w == pytest.approx([expected_w] * len(peaks_w))


def power_at(replay: Replay, time_ns: int, blocking_w: list[float]) -> float:
    """The power of one GPU a stage together at a moment, from the operations that run then."""
    power_w = 0.0
    for stage, waiting_w in enumerate(blocking_w):
        running = [
            number
            for number, operation in enumerate(replay.problem.pipeline.operations)
            if operation.stage == stage
            and replay.starts_ns[number] <= time_ns < replay.finishes_ns[number]
        ]
        for k in running:
            duration_ns = replay.finishes_ns[k] - replay.starts_ns[k]
            power_w += replay.energies_10fj[k] / duration_ns / POWER_UNITS_PER_W
        power_w += 0.0 if running else waiting_w
    return power_w


@pytest.mark.parametrize("part", [0.95, 0.85, 0.75])
def test_plans_by_peak_against_all_combinations(part: float) -> None:
    jobs = measured_jobs()
    peaks_w = peak_powers_w(jobs)
    power_w = part * sum(max(of_job) for of_job in peaks_w)
    throughputs = [[1 / plan.iteration_time_s for plan in job.plans] for job in jobs]
    best = 0.0
    for choice in itertools.product(*(range(len(job.plans)) for job in jobs)):
        if sum(of_job[k] for of_job, k in zip(peaks_w, choice, strict=True)) <= power_w:
            chosen = zip(jobs, throughputs, choice, strict=True)
            best = max(best, sum(job.value_per_iteration * xs[k] for job, xs, k in chosen))
    interval = plan_site(jobs, hours(power_w), plan_power="peak").intervals[0]
    full = sum(job.value_per_iteration * job.full_throughput for job in jobs)
    value = full * (1 - interval.throughput_loss_percent / 100)
    assert 0.9999 * best <= value <= best * (1 + 1e-12)
    assert best <= value * (1 + interval.gap) * (1 + 1e-12)


def test_check_proves_a_plan_by_peaks_from_the_profiles(folder: Path) -> None:
    (folder / "site.toml").write_text(
        '[[jobs]]\nname = "a"\nprofile = "a40-gpt3-1.3b-4stage"\nmicrobatches = 4\n'
    )
    says(done("site site.toml --power 1200W --plan-power peak"), "all peaks at once")
    says(
        done("check site.json"),
        "peaks, replayed with the profiles",
        "no plans of these ladders and frontier files",
    )
    document = json.loads((folder / "site.json").read_text())
    document["plan_power"] = "average"
    (folder / "edited.json").write_text(json.dumps(document))
    assert envplan("check", "edited.json").code == 2
    ran = envplan("site", "site.toml", "--power", "1200W", "--plan-power", "peak", "--shed")
    assert ran.code == 2
    assert "--shed compares mean powers" in ran.err


def test_a_plan_by_peaks_is_proved_from_another_folder(folder: Path) -> None:
    (folder / "elsewhere").mkdir()
    done("profile --backend modelled --gpu a40 --model llama3-8b --pp 2 -o p.csv")
    done("frontier p.csv -m 4 -o a.json")
    (folder / "site.toml").write_text('[[jobs]]\nname = "a"\nfrontier = "a.json"\n')
    done("site site.toml --power 9kW --plan-power peak")
    for name in ("a.json", "site.json"):
        ran = envplan("check", f"../{name}", cwd=folder / "elsewhere")
        assert ran.code == 0, ran.err


def test_the_power_of_a_serving_fleet_is_reserved_as_its_replay_writes_it(folder: Path) -> None:
    write_jobs(folder)
    done("serving simulate --gpus 64 --policy static -o hour.csv")
    fleet = pd.read_csv("hour.csv")
    highest_w = fleet.power_w.max()
    document = told(f"site jobs --power {highest_w + 900:.0f}W --reserved hour.csv")
    assert [i["reserved_w"] for i in document["intervals"]] == fleet.power_w.tolist()
    assert [i["start_s"] for i in document["intervals"]] == fleet.time_s.tolist()
    assert document["intervals"][-1]["end_s"] == 2 * fleet.time_s.iloc[-1] - fleet.time_s.iloc[-2]
    assert all(i["power_w"] <= i["budget_w"] * (1 + 1e-9) for i in document["intervals"])
