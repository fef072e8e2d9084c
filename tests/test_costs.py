"""What runs cost and plans save: rates, the library, `--price` and its kin, `envplan savings`."""

from __future__ import annotations

import functools
import math
import operator
import shlex
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import envplan
from cli_helpers import done, refused, says, small_profile, told
from envplan import Frontier, Pipeline, trace_frontier
from envplan.cli.given import as_typed
from envplan.cli.job_options import JobOptions
from envplan.cli.types import Numbers
from envplan.costs import Overheads, Run
from envplan.costs.rate_file import read_rate
from envplan.costs.rates import Rate
from envplan.errors import InputError, NoAnswerError
from envplan.plan import Plan
from envplan.plan.costs import check_costs, priced, tokens_per_iteration
from envplan.profile import Profile, ProfileMetadata
from envplan.solve.relaxed_cost import relaxed_cost_minima
from envplan.solve.savings import Site
from envplan.units import duration_text, s_from_ns
from strategies import falling_profiles, rates

HOUR = 3600.0
KWH = 3.6e6


@pytest.fixture(scope="module")
def frontier() -> Frontier:
    return trace_frontier(Pipeline("1f1b", 2, 4), small_profile(), replicas=3)


@pytest.fixture
def folder(folder: Path) -> Path:
    """The current folder, with a day of rates beside the profile."""
    rows = "".join(f"{hour},{0.1 if hour < 6 else 0.4},{300 + hour}\n" for hour in range(24))
    (folder / "day.csv").write_text(f"hour,price,carbon\n{rows}")
    return folder


def csv_file(folder: Path, text: str, name: str = "rates.csv") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


# ---- rates


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.25, "0.25 s"), (90, "1 m 30 s"), (86400 + 3 * 3600 + 1700, "1 d 3 h"), (86399.9, "24 h")],
)
def test_durations_are_shown_in_two_units(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


@pytest.mark.parametrize("delimiter", [";", "\t"])
def test_rates_may_be_delimited_as_spreadsheets_do(tmp_path: Path, delimiter: str) -> None:
    text = "time,price\n2026-12-01T00:00,0.1\n2026-12-01T01:00,0.2\n".replace(",", delimiter)
    rate = read_rate(csv_file(tmp_path, text), "price")
    assert (rate.begins_s, rate.per_kwh) == ([0.0, HOUR], [0.1, 0.2])


def test_start_that_is_no_time_is_refused_whatever_the_rate(tmp_path: Path) -> None:
    hours = csv_file(tmp_path, "hour,price\n0,0.1\n1,0.2\n")
    for rate in ("0.25", hours):
        with pytest.raises(InputError, match="--start must be as in 2026-12-01T00:00, not soon"):
            read_rate(rate, "price", start="soon")


def test_row_of_rates_without_a_time_is_refused(tmp_path: Path) -> None:
    text = "time,price\n2026-12-01T00:00,0.1\n,0.2\n"
    with pytest.raises(InputError) as caught:
        read_rate(csv_file(tmp_path, text), "price")
    assert (caught.value.line, caught.value.column) == (3, "time")
    assert caught.value.message == "is empty; expected one as in 2026-12-01T00:00"


def test_numbers_are_fixed_rates_and_only_prices_may_be_negative() -> None:
    rate = read_rate("0.25", "price")
    assert (rate.is_fixed, rate.lasts_s, rate.integral(7200)) == (True, math.inf, 0.25 * 7200)
    assert read_rate("-0.01", "price").per_kwh == [-0.01]
    with pytest.raises(InputError, match="carbon must not be negative"):
        read_rate("-1", "carbon")
    for text in ("nan", "-inf", "1e300"):
        with pytest.raises(InputError, match="price must be a number"):
            read_rate(text, "price")
    with pytest.raises(InputError, match=r"nothere\.csv: cannot be read .*--price takes a number"):
        read_rate("nothere.csv", "price")


DATED = "\ufeffTime,price\n2026-12-01T00:00,1\n2026-12-01T01:00,2\n2026-12-01T02:00,3\n"
ZONED = "time,price\n2026-12-01T00:00Z,1\n2026-12-01T02:00+01:00,2\n"


@pytest.mark.parametrize(
    ("text", "start", "lasts", "sums"),
    [
        # Rows hold until the next, the last as long as the others.
        ("hour,price\n0,1\n1,2\n2,4\n", None, 3, {1: 1, 1.5: 2, 3: 7}),
        # A byte order mark, capitals, blanks and other columns.
        ("\ufeffHour, Price ,carbon,note\n0,1,300,a\n\n1,2,400,b\n", None, 2, {1: 1, 2: 3}),
        # Times begin with the file, or when told; zones are understood.
        (DATED, None, 3, {1: 1}),
        (DATED, "2026-12-01T01:30", 1.5, {1: 0.5 * 2 + 0.5 * 3}),
        (ZONED, "2026-12-01T03:00+02:00", 1, {1: 2}),
        # Rows of several lengths say until when.
        ("hour,end,price\n0,6,1\n6,22,3\n22,24,1\n", None, 24, {24: 6 + 16 * 3 + 2}),
        # Thirds of an hour may be rounded.
        ("hour,price\n0,1\n0.333,1\n0.667,1\n1,1\n", None, 1.333, {1: 1}),
    ],
)
def test_a_file_of_rates(
    tmp_path: Path, text: str, start: str | None, lasts: float, sums: dict[float, float]
) -> None:
    rate = read_rate(csv_file(tmp_path, text), "price", start=start)
    assert rate.lasts_s == pytest.approx(lasts * HOUR)
    for hours, total in sums.items():
        assert rate.integral(hours * HOUR) == pytest.approx(total * HOUR)
    if "carbon" in text:
        assert read_rate(rate.file or "", "carbon").per_kwh == [300, 400]


TIMES = "time,price 2026-12-01T00:00,1 2026-12-01T01:00,2"
#: What stands in a file, its lines parted by blanks, when the run starts, and words of the refusal.
WRONG = f"""
hour,price 0,1 1,1 4,1 | | :4: | from hour 4 to hour 5, and all before it until hour 2
{TIMES} 2026-12-01T03:00,3 | | :4: | from 2026-12-01T03:00:00 | before it until 2026-12-01T02:00:00
hour,price 2,1 3,1 | | from hour 2 to hour 4 | starts at hour 0
hour,price 0,1 2,1 1,1 | | :4: | rows must ascend
hour,price 0,1 1,1 1.5,1 | | :4: | column end
hour,end,price 0,2,1 1,3,1 | | :3: | from hour 1 | until hour 2
hour,end,price 0,0,1 | | :2 | from hour 0 to hour 0
time,price yesterday,1 | | :2 | "yesterday" is no time | 2026-12-01T00:00
{TIMES.replace(":00,2", ":00Z,2")} | | time zone
hour,carbon 0,-5 1,1 | | :2, column carbon | should be greater than or equal to 0
hour,cost 0,1 | | :1, column price | "hour,cost" | needs hour,price
when,price 0,1 | | :1, column hour | with times or with hours
hour,price 0,1 | | a single row needs a column end
{TIMES} | 2026-12-05T00:00 | to 2026-12-01T02:00:00, and the run starts at 2026-12-05
{TIMES} | 2026-11-30T23:00 | starts at 2026-11-30T23:00:00
{TIMES} | 2026-12-01T00:00Z | some times have a time zone
{TIMES} | tomorrow | --start must be as in
"""


@pytest.mark.parametrize("row", WRONG.strip().splitlines())
def test_a_bad_file_of_rates_is_refused(tmp_path: Path, row: str) -> None:
    text, start, *words = (part.strip() for part in row.split("|"))
    path = csv_file(tmp_path, "\n".join(text.split()) + "\n")
    with pytest.raises(InputError) as caught:
        read_rate(path, "carbon" if "carbon" in text else "price", start=start or None)
    for word in words:
        assert word in str(caught.value)
    assert "rates.csv" in str(caught.value) or "--start" in str(caught.value)


def value_at(rate: Rate, clock_s: float) -> float:
    inside = clock_s % rate.end_s if rate.repeats else clock_s
    return rate.per_kwh[sum(begin <= inside for begin in rate.begins_s) - 1]


@given(rates(), st.floats(0, 1))
def test_the_integral_is_the_sum_over_pieces_and_the_mean_that_of_the_file(
    rate: Rate, share: float
) -> None:
    span = 20_000.0 if rate.repeats else rate.lasts_s
    until = share * span
    cuts = [0.0, *rate.changes(0.0, until), until]
    pieces = ((b - a) * value_at(rate, rate.start_s + (a + b) / 2) for a, b in pairwise(cuts))
    assert rate.integral(until) == pytest.approx(sum(pieces), abs=1e-6)
    ends = [*rate.begins_s, rate.end_s or 0.0]
    whole = sum(x * (b - a) for x, (a, b) in zip(rate.per_kwh, pairwise(ends), strict=True))
    assert rate.mean == pytest.approx(whole / (ends[-1] - ends[0]), abs=1e-9)


@pytest.mark.parametrize(
    "rate",
    [
        {"begins_s": [0.0, 1.0], "per_kwh": [1.0], "end_s": 2.0},
        {"begins_s": [0.0, 3.0], "per_kwh": [1.0] * 2, "end_s": 2.0},
        {"begins_s": [0.0], "per_kwh": [1.0], "end_s": 2.0, "start_s": 5.0},
        {"begins_s": [0.0], "per_kwh": [1e300]},
    ],
)
def test_a_rate_in_a_file_that_is_no_step_function_is_refused(
    frontier: Frontier, rate: dict[str, object]
) -> None:
    plan = priced(frontier.plan(), Run(iterations=10, price=Rate.fixed(0.3)))
    document = plan.model_dump(by_alias=True, exclude_none=True)
    document["costs"]["price"] = rate
    with pytest.raises(InputError, match=r"costs\.price"):
        Plan.from_document(document)


# ---- what runs cost


def test_a_fixed_price_costs_price_times_energy(frontier: Frontier) -> None:
    run = Run(iterations=1000, price=Rate.fixed(0.3), carbon=Rate.fixed(400))
    plan = priced(frontier.plan(slowdown=0.05), run)
    costs = plan.costs
    for pair, count in ((costs.iteration, 1), (costs.run, 1000)):
        for spent, one in ((pair.plan, plan), (pair.max_frequency, plan.predicted.baseline)):
            kwh = count * (one.energy if one is plan else one.energy_j) / KWH
            known = (spent.energy_kwh, spent.money, spent.carbon_g)
            assert known == pytest.approx((kwh, 0.3 * kwh, 400 * kwh))
    assert priced(frontier.plan(), Run(price=Rate.fixed(1.0))).costs.run is None
    with pytest.raises(InputError, match="--iterations or --tokens"):
        Run.of(price=Rate(begins_s=[0.0], per_kwh=[1.0], end_s=10.0))


def test_a_run_that_outlasts_its_prices_is_refused_unless_they_repeat(
    frontier: Frontier, tmp_path: Path
) -> None:
    path = csv_file(tmp_path, "hour,price\n0,0.1\n1,0.4\n")
    plan = frontier.plan()
    iterations = math.ceil(2.5 * HOUR / plan.iteration_time)
    with pytest.raises(InputError, match=r"rates\.csv: lasts 2 h .* the run 2 h 30 m"):
        priced(plan, Run(iterations=iterations, price=read_rate(path, "price")))
    repeated = Run(iterations=iterations, price=read_rate(path, "price", repeats=True))
    costs = priced(plan, repeated).costs
    kw = plan.average_power / 1000
    last = iterations * plan.iteration_time - 2 * HOUR
    assert costs.run.plan.money == pytest.approx(kw * (0.1 + 0.4 + 0.1 * last / HOUR))


def test_a_deadline_before_t_min_says_the_least_time(frontier: Frontier) -> None:
    least = 1000 * frontier.min_time
    with pytest.raises(NoAnswerError) as caught:
        frontier.plan(run=Run(iterations=1000, deadline_s=least - 1e-6))
    says(str(caught.value), duration_text(least), f"{least:.9g} s")
    fastest = frontier.plan(run=Run(iterations=1000, deadline_s=least))
    assert fastest.iteration_time == pytest.approx(frontier.min_time)


def test_the_cheapest_waits_for_no_saving_that_does_not_pay(frontier: Frontier) -> None:
    star = frontier.plan(min_energy=True)
    # At a fixed price it is the least energy in time.
    middle = (frontier.min_time + frontier.min_energy_time) / 2
    run = Run(iterations=1000, deadline_s=1000 * middle, price=Rate.fixed(0.2))
    plan = frontier.plan(run=run)
    assert plan.energy == frontier.plan(s_from_ns(int(middle * 1e9))).energy
    assert 1000 * plan.iteration_time <= 1000 * middle
    assert frontier.plan(run=Run(iterations=1000, deadline_s=1e6)).energy == star.energy
    # A price about to rise is worth hurrying for, if money counts.
    iterations = 10_000
    cheap_s = iterations * (0.7 * frontier.min_time + 0.3 * frontier.min_energy_time)
    price = Rate(begins_s=[0.0, cheap_s], per_kwh=[0.1, 5.0], end_s=10 * cheap_s)
    run = Run(iterations=iterations, price=price, deadline_s=10 * cheap_s)
    hurried = frontier.plan(run=run)
    assert 0.98 * cheap_s <= iterations * hurried.iteration_time <= cheap_s
    assert hurried.iteration_time < star.iteration_time
    least = {"carbon": Rate.fixed(300), "minimize": "carbon"}
    assert frontier.plan(run=run.model_copy(update=least)).energy == star.energy
    # When energy pays there is no hurry to save it.
    run = Run(iterations=10, price=Rate.fixed(-1.0), deadline_s=1e6)
    assert priced(frontier.plan(run=run), run).costs.run.plan.money < -10 * star.energy / KWH


@given(st.data())
def test_no_time_on_the_relaxed_frontier_costs_less_than_its_minimum(data: st.DataObject) -> None:
    profile = data.draw(falling_profiles(2))
    frontier = trace_frontier(Pipeline("1f1b", 2, 2), profile)
    rate = data.draw(rates(least=0.01, repeats=True))
    longest = data.draw(st.floats(0.2, 3)) * (rate.end_s or 0.0)
    iterations = max(1, int(longest / frontier.min_energy_time))
    span = frontier.min_energy_time_ns - frontier.min_time_ns
    latest_ns = frontier.min_time_ns + int(span * data.draw(st.floats(0, 1)))
    more = Overheads(
        pue=data.draw(st.floats(1, 3)),
        host_power=data.draw(st.sampled_from([0.0, 150.0])),
        gpu_hour=data.draw(st.sampled_from([0.0, 2.0])),
    )
    deadline = s_from_ns(latest_ns * iterations)
    run = Run(iterations=iterations, price=rate, deadline_s=deadline, overheads=more)
    gpus = data.draw(st.integers(1, 64))
    best, best_ns = relaxed_cost_minima(frontier, run, gpus)[0]
    assert frontier.min_time_ns <= best_ns <= latest_ns
    for time in np.linspace(frontier.min_time, s_from_ns(latest_ns), 200):
        at = min(max(float(time), frontier.min_time), s_from_ns(latest_ns))
        joules = more.pue * (frontier.energy_at(at) + more.host_power * gpus * at)
        cost = joules / at * rate.integral(at * iterations) / KWH
        cost += more.gpu_hour * gpus * at * iterations / 3600
        assert best <= cost * (1 + 1e-7)


@given(st.data())
def test_the_cheapest_plan_is_in_time_and_near_the_relaxed_minimum(data: st.DataObject) -> None:
    profile = data.draw(falling_profiles(2))
    frontier = trace_frontier(Pipeline("1f1b", 2, 2), profile)
    rate = data.draw(rates(least=0.01, repeats=True))
    iterations = data.draw(st.integers(1, 100_000))
    deadline = iterations * frontier.min_time * data.draw(st.floats(1.0, 1.5)) + 1e-6
    run = Run(iterations=iterations, price=rate, deadline_s=deadline)
    latency = data.draw(st.sampled_from([0.0, 0.001, 0.05]))
    try:
        plan = frontier.plan(run=run, switch_latency=latency)
    except NoAnswerError:
        assert latency > 0
        return
    assert iterations * plan.iteration_time <= deadline
    assert plan.costs.minimized == "money"
    least, _ = relaxed_cost_minima(frontier, run, frontier.pipeline.num_stages)[0]
    assert plan.costs.run.plan.money >= least * (1 - 1e-6)
    assert len(check_costs(plan)) == 2


def test_costs_survive_the_file_and_are_proved_from_it(frontier: Frontier, tmp_path: Path) -> None:
    hours = "".join(f"{hour},{0.1 if hour % 2 else 0.3}\n" for hour in range(24))
    rate = read_rate(csv_file(tmp_path, f"hour,price\n{hours}"), "price")
    run = Run(iterations=1000, price=rate, carbon=Rate.fixed(350.5), currency="EUR", deadline_s=9e4)
    frontier.plan(run=run).save(tmp_path / "plan.json")
    proved = check_costs(Plan.load(tmp_path / "plan.json"))
    says(" ".join(proved), "costs follow", "deadline 90000.0 s")
    assert check_costs(frontier.plan()) == []


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (("run", "plan", "money"), r"costs\.run\.plan\.money"),
        (("run", "plan", "time_s"), r"costs\.run\.plan\.time_s"),
        (("iteration", "max_frequency", "energy_kwh"), r"costs\.iteration\.max_frequency\.energy"),
        (("deadline_s",), r"more than the deadline of 1\.0 s"),
    ],
)
def test_costs_that_do_not_follow_are_refused(
    frontier: Frontier, keys: tuple[str, ...], words: str
) -> None:
    run = Run(iterations=1000, price=Rate.fixed(0.3), deadline_s=1e6)
    document = priced(frontier.plan(), run).model_dump(by_alias=True, exclude_none=True)
    *path, last = keys
    functools.reduce(operator.getitem, path, document["costs"])[last] *= 1.001 if path else 1e-6
    with pytest.raises(InputError, match=words):
        check_costs(Plan.from_document(document))


def test_tokens_come_from_the_sidecar_or_an_option(folder: Path) -> None:
    metadata = ProfileMetadata(microbatch_size=2, extra={"sequence_length": 512})
    rows = [(k, name, 1000, 0.1, 10.0) for k in range(2) for name in ("forward", "backward")]
    known, pipeline = Profile.from_rows(rows, metadata=metadata), Pipeline("1f1b", 2, 8)
    assert tokens_per_iteration(trace_frontier(pipeline, known, replicas=3)) == 2 * 512 * 8 * 3
    with pytest.raises(InputError, match=r"--tokens-per-iteration .*microbatch_size"):
        tokens_per_iteration(trace_frontier(pipeline, small_profile()))
    costs = solved("--tokens 1e6 --tokens-per-iteration 3000 --price 0.3").costs
    assert costs is not None
    assert (costs.iterations, costs.tokens) == (334, 1_000_000)
    refused("solve --tokens 1e6", "--tokens-per-iteration", "sidecar")


# ---- on the command line


def solved(line: str) -> Plan:
    """The plan of a quiet run, its costs proved."""
    done(f"solve --quiet {line}")
    plan = Plan.load("plan.json")
    check_costs(plan)
    return plan


def test_with_a_straggler_costs_are_until_it_has_finished(folder: Path) -> None:
    rates = "--price 0.3 --iterations 1000"
    assert "until the straggler has finished" in done(f"solve --straggler-time 2.5 {rates}")
    plan = solved(f"{rates} --straggler-time 2.5")
    until, run = plan.predicted.until_straggler, plan.costs.run
    for spent, joules in (
        (run.plan, until.energy_j),
        (run.max_frequency, until.baseline_energy_j),
    ):
        kwh = 1000 * joules / KWH
        known = (spent.time_s, spent.energy_kwh, spent.money)
        assert known == pytest.approx((2500.0, kwh, 0.3 * kwh))
    assert "costs follow from" in done("check plan.json")
    alone = plan.request.model_copy(update={"straggler_time_s": None})
    with pytest.raises(InputError, match=r"costs\.iteration"):
        check_costs(plan.model_copy(update={"stated_request": alone}))
    # One that is not slower than the plan changes nothing.
    assert solved(f"{rates} --straggler-time 0.5").costs == solved(rates).costs


def test_the_cheapest_plan_in_time_is_recorded_and_less_time_costs_more(folder: Path) -> None:
    document = told("solve --deadline 12h --price day.csv --iterations 20000")
    costs, day = document["costs"], 12 * 3600
    assert (costs["price"]["file"], costs["minimized"]) == ("day.csv", "money")
    assert costs["run"]["plan"]["time_s"] <= day == costs["deadline_s"]
    assert costs["run"]["plan"]["money"] < costs["run"]["max_frequency"]["money"]
    says(document["notes"][-1], "least money", "12 h")
    plan = Plan.load("plan.json")
    assert len(check_costs(plan)) == 2
    assert plan.iteration_time * 20000 <= day
    fast = solved("--price 1 --iterations 20000 --deadline 8h")
    assert fast.iteration_time * 20000 <= 8 * 3600
    assert fast.energy > solved("--price 1 --iterations 20000 --deadline 1d12h").energy


def test_the_same_hours_at_another_start_cost_something_else(folder: Path) -> None:
    rows = "".join(f"2026-12-01T{h:02d}:00,{0.1 if h < 6 else 0.4}\n" for h in range(24))
    csv_file(folder, f"time,price\n{rows}", "dated.csv")
    work = "--price dated.csv --iterations 5000 --slowdown 1"
    night, day = solved(work).costs, solved(f"{work} --start 2026-12-01T08:00").costs
    assert day.iteration.plan.money == pytest.approx(4 * night.iteration.plan.money)


def test_a_deadline_is_met_with_clocks_that_follow_late(folder: Path) -> None:
    usual = solved("--iterations 1000 --deadline 1500s")
    late = solved("--iterations 1000 --deadline 1500s --switch-latency 20")
    assert late.job.switch_latency_s == 0.02
    assert late.iteration_time * 1000 <= 1500
    assert late.energy >= usual.energy_lower_bound
    done("check plan.json")


PRICES = "--price 0.2 --carbon 400 --iterations 1000"


def test_replays_are_priced_on_average_and_waiting_too(folder: Path) -> None:
    costs = solved(PRICES).costs
    exact = told(f"simulate {PRICES}")["costs"]
    assert exact["run"] == pytest.approx(costs.run.plan.model_dump())
    assert exact["iteration"] == pytest.approx(costs.iteration.plan.model_dump())
    waited = told(f"simulate {PRICES} --sync-time 3")
    assert waited["costs"]["iteration"]["time_s"] == 3
    assert waited["costs"]["run"]["money"] == pytest.approx(waited["energy_j"] / KWH * 200)
    noisy = told(f"simulate {PRICES} --noise 5 --runs 7")
    assert noisy["costs"]["iteration"]["energy_kwh"] != noisy["energy_j"] / KWH
    says(done(f"simulate {PRICES} --currency EUR"), "1,000 iterations cost ", " EUR")


def test_planners_are_compared_by_what_their_runs_cost(folder: Path) -> None:
    line = "compare --price day.csv --carbon 400 --iterations 5000"
    says(done(line), "The run: 5,000 iterations, all GPUs, modelled", "cost (USD)", "CO2")
    spent = {one["planner"]: one["costs"]["run"]["plan"] for one in told(line)["planners"]}
    for amount in ("money", "carbon_g"):
        assert spent["frontier"][amount] < spent["max_frequency"][amount]
    # Where there is a straggler, until that has finished.
    said = told("compare --price 0.2 --straggler-slowdown 30")
    for entry in said["planners"]:
        pair = entry["costs"]["iteration"]
        assert pair["plan"]["money"] == pytest.approx(0.2 * entry["straggler_energy_j"] / KWH)
        assert pair["plan"]["time_s"] == max(said["straggler_time_s"], entry["iteration_time_s"])
        assert pair["max_frequency"]["time_s"] == said["straggler_time_s"]


def test_clusters_and_unlike_replicas_are_priced_as_a_whole(folder: Path) -> None:
    solved("")
    line = f"simulate {PRICES} --dp 4 --straggler 1.3"
    whole = told(f"{line} --strong-scaling 1,2")["cluster"]
    assert len(whole) == 3
    for report in whole:
        plan, before = (report["costs"]["run"][key] for key in ("plan", "max_frequency"))
        assert plan["money"] == pytest.approx(200 * report["energy_j"] / KWH)
        assert plan["time_s"] == pytest.approx(1000 * report["time_s"])
        assert before["carbon_g"] == pytest.approx(4e5 * report["baseline_energy_j"] / KWH)
    both = told(f"simulate {PRICES} --replica plan.json")["replicas"]
    assert both["costs"]["plan"]["money"] == pytest.approx(200 * both["energy_j"] / KWH)
    assert "The run: 1,000 iterations, all GPUs" in done(f"{line} --currency EUR")


# ---- what a year saves, against figures computed by hand


@pytest.fixture(scope="module")
def single() -> Frontier:
    """One operation on one GPU: 1 s and 360 J, 1.25 s and 270 J, or 1.5 s and 255 J; waiting 40 W.

    At 1.25 s and 40 W of waiting power energy still falls towards 1.5 s.
    """
    options = [(1000, 1.0, 360.0), (800, 1.25, 270.0), (600, 1.5, 255.0)]
    rows = [
        (0, name, mhz, time / 2, joules / 2)
        for name in ("forward", "backward")
        for mhz, time, joules in options
    ]
    profile = Profile.from_rows(rows, name="one", metadata=ProfileMetadata(source="measured"))
    return trace_frontier(Pipeline("1f1b", 1, 1), profile, blocking_power=40.0)


def test_a_year_at_t_star_is_that_of_a_calculation_by_hand(single: Frontier) -> None:
    site = {"price": 0.1, "pue": 1.25, "carbon": 400, "utilization": 0.5}
    none, best, star = envplan.savings(single, gpus=64, **site)
    # 64 GPUs x 360 W x 4380 h x 1.25 = 126,144 kWh.
    assert none.spent == pytest.approx((126_144, 12_614.4, 50.4576))
    assert none.year.kwh == 0
    # 255 of 360 J are left: 105 / 360 are saved.
    assert star.plan.iteration_time == 1.5
    saved = 105 / 360
    assert star.year == pytest.approx((126_144 * saved, 12_614.4 * saved, 50.4576 * saved))
    assert star.month == pytest.approx([amount / 12 for amount in star.year])
    assert best.plan.energy == star.plan.energy


@pytest.mark.parametrize(
    ("gpu_hour", "time"),
    # A kWh costs 1: of 3.6e6 J. From 1 s to 1.25 s 360 J are saved a second, from there on 60.
    [(0.0, 1.5), (0.05, 1.5), (0.07, 1.25), (0.35, 1.25), (0.37, 1.0)],
)
def test_best_money_weighs_energy_against_gpu_hours(
    single: Frontier, gpu_hour: float, time: float
) -> None:
    none, best, star = envplan.savings(single, price=1.0, gpu_hour=gpu_hour)
    assert best.plan.iteration_time == time
    assert best.year.money >= max(none.year.money, star.year.money)
    # 8760 h at maximum frequency are 8760 x 1.5 h at T_star.
    lost = 8760 * 0.5 * gpu_hour
    assert star.year.money == pytest.approx(8760 * 0.36 * 105 / 360 - lost)


def test_hosts_embodied_carbon_and_waiting_count_for_the_time_that_is_lost(
    single: Frontier,
) -> None:
    site = {"price": 1.0, "pue": 2.0, "host_power": 100, "carbon": 500}
    _, best, star = envplan.savings(single, **site, embodied=175.2, lifetime=4)
    kwh = 2 * 8760 * ((360 + 100) - (255 + 150)) / 1000
    assert star.year.kwh == pytest.approx(kwh)
    # 175.2 kg over 4 x 8760 h are 5 g an hour; 4380 h more are taken.
    assert star.year.carbon_t == pytest.approx(500 * kwh / 1e6 - 0.0219)
    assert best.plan.iteration_time == 1.25  # from there on the host draws more than is saved
    # 360 J and 40 W for 1 s, against 255 J and 40 W for half a second, every 2 s.
    spent, saved = Site.of(price=1.0).year(single.plan(straggler_time=2.0))
    assert spent.kwh == pytest.approx(8760 * 400 / 2 / 1000)
    assert saved.kwh == pytest.approx(8760 * (400 - 275) / 2 / 1000)


def test_two_jobs_on_twice_the_gpus_save_twice_as_much() -> None:
    shape = {"gpus_per_stage": 2, "replicas": 2}
    frontier = trace_frontier(Pipeline("1f1b", 3, 4), small_profile(3), **shape)
    own, twice = envplan.savings(frontier), envplan.savings(frontier, gpus=24)
    for one, two in zip(own, twice, strict=True):
        assert two.year.kwh == pytest.approx(2 * one.year.kwh)
    plan, before = own[0].plan, own[0].plan.predicted.baseline
    assert own[0].spent.kwh == pytest.approx(before.energy_j / before.iteration_time_s * 8.76)
    assert plan.savings.joules == pytest.approx(before.energy_j - plan.energy)
    assert plan.savings.percent == pytest.approx(100 * plan.savings.joules / before.energy_j)


@pytest.mark.parametrize(
    "wrong", [{"pue": 0.9}, {"utilization": 0.0}, {"utilization": 2.0}, {"gpus": 0}, {"fuel": 1}]
)
def test_numbers_out_of_range_are_refused(single: Frontier, wrong: dict[str, float]) -> None:
    with pytest.raises(InputError):
        envplan.savings(single, **wrong)


def test_a_table_says_what_is_assumed_and_what_to_type_next(folder: Path) -> None:
    out = done("savings --gpus 6k")
    says(out, "0.12 USD a kWh (assumed", "6,000 GPUs, energies modelled")
    assert "t CO2" not in out
    assert out.splitlines()[-1] == "next: envplan solve"
    out = done(
        "savings --price 0.3 --currency EUR --carbon 380 -m 8 --gpu-hour 1e-3 --utilization 80%"
    )
    says(out, "EUR a month", "t CO2 a year", "80% of the time")
    following = out.splitlines()[-1]
    assert following.startswith("next: envplan solve --microbatches 8")
    done("", *shlex.split(following)[2:])


def test_json_is_what_the_library_says(folder: Path) -> None:
    document = told("savings --pue 1.3 --carbon 380")
    assert document["schema"] == "envplan/savings/v1"
    assert (document["gpus"], document["energies_are"]) == (2, "modelled")
    profile = Profile.read_csv("profile.csv")
    rows = envplan.savings(trace_frontier(profile.pipeline(), profile), pue=1.3, carbon=380)
    for said, row in zip(document["savings"], rows, strict=True):
        assert said["point"] == row.point
        assert said["year"]["carbon_t"] == row.year.carbon_t
        assert said["month"]["kwh"] == row.month.kwh


def test_energies_identified_from_measurements_are_called_so() -> None:
    identified = ProfileMetadata(source="measured", extra={"identified": {"energy": "..."}})
    assert identified.energies_are == "identified"
    for source in ("measured", "modelled"):
        assert ProfileMetadata(source=source).energies_are == source


def test_solve_says_what_a_year_saves_with_all_that_is_paid(folder: Path) -> None:
    last = done("solve").splitlines()[-1]
    assert " USD at 0.12 a kWh (assumed; --price says yours)" in last
    last = done("solve --price 0.5 --currency EUR").splitlines()[-1]
    assert last.startswith("a year of it on the job's GPUs saves ")
    assert " EUR at 0.5 a kWh, modelled; next: envplan report plan.json" in last
    said = done("solve --price 0.5 --pue 1.5 --host-power 200 --carbon 400")
    assert "PUE 1.5, hosts of 200 W a GPU" in said.splitlines()[-1]
    plan = Plan.load("plan.json")
    spent, gpus = plan.costs.iteration.plan, plan.job.num_gpus * plan.job.stages
    kwh = 1.5 * (plan.energy + 200 * gpus * plan.iteration_time) / KWH
    assert (spent.energy_kwh, spent.money) == pytest.approx((kwh, 0.5 * kwh))
    done("check plan.json")


def test_options_can_be_typed_again() -> None:
    job = JobOptions(profile="a b.csv", microbatches=8, vp=2, recompute=True, p2p_latency=0.002)
    words = ["a b.csv", "--microbatches", "8", "--vp", "2", "--p2p-latency", "0.002", "--recompute"]
    assert as_typed(job) == words
    assert as_typed(JobOptions(activation_slots=Numbers([8, 7]))) == ["--activation-slots", "8,7"]
    assert as_typed(JobOptions()) == []


def test_fixed_rate_that_repeats_never_changes() -> None:
    rate = Rate(begins_s=[0.0], per_kwh=[0.1], repeats=True)
    assert list(rate.changes(0.0, 3600.0)) == []
