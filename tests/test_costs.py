from __future__ import annotations

import functools
import math
import operator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli_helpers import small_profile
from envplan import Frontier, Pipeline, trace_frontier
from envplan.costs import Overheads, Run, priced
from envplan.costs.rates import Rate, read_rate
from envplan.costs.spending import check_costs, tokens_per_iteration
from envplan.errors import InputError, NoAnswerError
from envplan.plan import Plan
from envplan.profile import Profile, ProfileMetadata
from envplan.solve.search import cheapest_times
from envplan.units import duration_text, s_from_ns
from strategies import falling_profiles, rates

HOUR = 3600.0


@pytest.fixture(scope="module")
def frontier() -> Frontier:
    return trace_frontier(Pipeline("1f1b", 2, 4), small_profile(), replicas=3)


def csv_file(folder: Path, text: str, name: str = "rates.csv") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def hourly(folder: Path, values: list[float], column: str = "price") -> str:
    rows = "".join(f"{hour},{value!r}\n" for hour, value in enumerate(values))
    return csv_file(folder, f"hour,{column}\n{rows}", f"{column}.csv")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.25, "0.25 s"),
        (90, "1 m 30 s"),
        (86400 + 3 * 3600 + 1700, "1 d 3 h"),
        (86399.9, "24 h"),
    ],
)
def test_durations_are_shown_in_two_units(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_numbers_are_fixed_rates_and_only_prices_may_be_negative() -> None:
    rate = read_rate("0.25", "price")
    assert (rate.is_fixed, rate.lasts_s, rate.integral(7200)) == (True, math.inf, 0.25 * 7200)
    assert read_rate("-0.01", "price").per_kwh == [-0.01]
    with pytest.raises(InputError, match="carbon must not be negative"):
        read_rate("-1", "carbon")
    for text in ("nan", "-inf", "1e300"):
        with pytest.raises(InputError, match="price must be a number"):
            read_rate(text, "price")


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


TIMES = "time,price\n2026-12-01T00:00,1\n2026-12-01T01:00,2\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        # Gaps
        (
            "hour,price\n0,1\n1,1\n4,1\n",
            [":4:", "from hour 4 to hour 5, and all before it until hour 2"],
        ),
        (
            TIMES + "2026-12-01T03:00,3\n",
            [":4:", "from 2026-12-01T03:00:00", "before it until 2026-12-01T02:00:00"],
        ),
        ("hour,price\n2,1\n3,1\n", ["from hour 2 to hour 4", "starts at hour 0"]),
        # Disorder and overlaps
        ("hour,price\n0,1\n2,1\n1,1\n", [":4:", "rows must ascend"]),
        ("hour,price\n0,1\n1,1\n1.5,1\n", [":4:", "column end"]),
        ("hour,end,price\n0,2,1\n1,3,1\n", [":3:", "from hour 1", "until hour 2"]),
        ("hour,end,price\n0,0,1\n", [":2", "from hour 0 to hour 0"]),
        # Cells
        ("time,price\nyesterday,1\n", [":2", '"yesterday" is no time', "2026-12-01T00:00"]),
        (TIMES.replace(":00,2", ":00Z,2"), ["time zone"]),
        (
            "hour,carbon\n0,-5\n1,1\n",
            [":2, column carbon", "should be greater than or equal to 0"],
        ),
        # Columns and rows
        ("hour,cost\n0,1\n", [":1, column price", '"hour,cost"', "needs hour,price"]),
        ("when,price\n0,1\n", [":1, column hour", "with times or with hours"]),
        ("hour,price\n0,1\n", ["a single row needs a column end"]),
    ],
)
def test_a_bad_file_of_rates_is_refused(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        read_rate(csv_file(tmp_path, text), "carbon" if "carbon" in text else "price")
    for word in ("rates.csv", *words):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("start", "words"),
    [
        ("2026-12-05T00:00", "to 2026-12-01T02:00:00, and the run starts at 2026-12-05"),
        ("2026-11-30T23:00", "starts at 2026-11-30T23:00:00"),
        ("2026-12-01T00:00Z", "some times have a time zone"),
        ("tomorrow", "--start must be as in"),
    ],
)
def test_a_start_outside_of_the_file_is_refused(tmp_path: Path, start: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        read_rate(csv_file(tmp_path, TIMES), "price", start=start)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nothere\.csv: cannot be read .*--price takes a number"):
        read_rate(str(tmp_path / "nothere.csv"), "price")


def value_at(rate: Rate, clock_s: float) -> float:
    inside = clock_s % rate.end_s if rate.repeats else clock_s
    return rate.per_kwh[sum(begin <= inside for begin in rate.begins_s) - 1]


@given(rates(), st.floats(0, 1))
def test_the_integral_is_the_sum_over_pieces(rate: Rate, share: float) -> None:
    span = 20_000.0 if rate.repeats else rate.lasts_s
    until = share * span
    cuts = [0.0, *rate.changes(0.0, until), until]
    pieces = ((b - a) * value_at(rate, rate.start_s + (a + b) / 2) for a, b in pairwise(cuts))
    assert rate.integral(until) == pytest.approx(sum(pieces), abs=1e-6)


def test_a_fixed_price_costs_price_times_energy(frontier: Frontier) -> None:
    plan = priced(
        frontier.plan(slowdown=0.05),
        Run(iterations=1000, price=Rate.fixed(0.3), carbon=Rate.fixed(400)),
    )
    costs = plan.costs
    assert costs.iteration.plan.energy_kwh == pytest.approx(plan.energy / 3.6e6)
    assert costs.run.plan.energy_kwh == pytest.approx(1000 * plan.energy / 3.6e6)
    assert costs.run.plan.money == pytest.approx(0.3 * 1000 * plan.energy / 3.6e6)
    assert costs.run.plan.carbon_g == pytest.approx(400 * 1000 * plan.energy / 3.6e6)
    baseline = plan.predicted.baseline.energy_j
    assert costs.run.max_frequency.money == pytest.approx(0.3 * 1000 * baseline / 3.6e6)


def test_without_iterations_one_iteration_is_reckoned(frontier: Frontier) -> None:
    costs = priced(frontier.plan(), Run(price=Rate.fixed(1.0))).costs
    assert costs.run is None
    with pytest.raises(InputError, match="--iterations or --tokens"):
        Run.of(price=Rate(begins_s=[0.0], per_kwh=[1.0], end_s=10.0))


def test_a_run_that_outlasts_its_prices_is_refused_unless_they_repeat(
    frontier: Frontier, tmp_path: Path
) -> None:
    path = hourly(tmp_path, [0.1, 0.4])
    plan = frontier.plan()
    iterations = math.ceil(2.5 * HOUR / plan.iteration_time)
    with pytest.raises(InputError, match=r"price\.csv: lasts 2 h .* the run 2 h 30 m"):
        priced(plan, Run(iterations=iterations, price=read_rate(path, "price")))
    repeated = Run(iterations=iterations, price=read_rate(path, "price", repeats=True))
    costs = priced(plan, repeated).costs
    kw = plan.average_power / 1000
    last = iterations * plan.iteration_time - 2 * HOUR
    assert costs.run.plan.money == pytest.approx(kw * (0.1 + 0.4 + 0.1 * last / HOUR))


def test_a_deadline_before_t_min_says_the_least_time(frontier: Frontier) -> None:
    least = 1000 * frontier.min_time
    run = Run(iterations=1000, deadline_s=least - 1e-6)
    with pytest.raises(NoAnswerError) as caught:
        frontier.plan(run=run)
    assert duration_text(least) in str(caught.value)
    assert f"{least:.9g} s" in str(caught.value)
    assert frontier.plan(run=Run(iterations=1000, deadline_s=least)).iteration_time == (
        pytest.approx(frontier.min_time)
    )


def test_with_a_fixed_price_the_cheapest_is_the_least_energy_in_time(frontier: Frontier) -> None:
    middle = (frontier.min_time + frontier.min_energy_time) / 2
    run = Run(iterations=1000, deadline_s=1000 * middle, price=Rate.fixed(0.2))
    plan = frontier.plan(run=run)
    assert plan.energy == frontier.plan(s_from_ns(int(middle * 1e9))).energy
    assert 1000 * plan.iteration_time <= 1000 * middle
    lazy = frontier.plan(run=Run(iterations=1000, deadline_s=1e6))
    assert lazy.energy == frontier.plan(min_energy=True).energy


def test_a_price_about_to_rise_is_worth_hurrying_for(frontier: Frontier) -> None:
    iterations = 10_000
    cheap_s = iterations * (0.7 * frontier.min_time + 0.3 * frontier.min_energy_time)
    price = Rate(begins_s=[0.0, cheap_s], per_kwh=[0.1, 5.0], end_s=10 * cheap_s)
    run = Run(iterations=iterations, price=price, deadline_s=10 * cheap_s)
    plan = frontier.plan(run=run)
    assert iterations * plan.iteration_time <= cheap_s
    assert iterations * plan.iteration_time >= 0.98 * cheap_s
    assert plan.iteration_time < frontier.plan(min_energy=True).iteration_time
    least = {"carbon": Rate.fixed(300), "minimize": "carbon"}  # of carbon, not of money
    carbon = frontier.plan(run=run.model_copy(update=least))
    assert carbon.energy == frontier.plan(min_energy=True).energy


def test_when_energy_pays_there_is_no_hurry_to_save_it(frontier: Frontier) -> None:
    run = Run(iterations=10, price=Rate.fixed(-1.0), deadline_s=1e6)
    plan = frontier.plan(run=run)
    costs = priced(plan, run).costs
    star = frontier.plan(min_energy=True)
    assert costs.run.plan.money < -10 * star.energy / 3.6e6


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
    run = Run(
        iterations=iterations,
        price=rate,
        deadline_s=s_from_ns(latest_ns * iterations),
        overheads=more,
    )
    gpus = data.draw(st.integers(1, 64))
    best, best_ns = cheapest_times(frontier, run, gpus)[0]
    assert frontier.min_time_ns <= best_ns <= latest_ns
    for time in np.linspace(frontier.min_time, s_from_ns(latest_ns), 200):
        at = min(max(float(time), frontier.min_time), s_from_ns(latest_ns))
        joules = more.pue * (frontier.energy_at(at) + more.host_power * gpus * at)
        cost = joules / at * rate.integral(at * iterations) / 3.6e6
        cost += more.gpu_hour * gpus * at * iterations / 3600
        assert best <= cost * (1 + 1e-7)


@given(st.data())
def test_the_cheapest_plan_is_in_time_and_near_the_relaxed_minimum(data: st.DataObject) -> None:
    profile = data.draw(falling_profiles(2))
    frontier = trace_frontier(Pipeline("1f1b", 2, 2), profile)
    rate = data.draw(rates(least=0.01, repeats=True))
    iterations = data.draw(st.integers(1, 100_000))
    slack = data.draw(st.floats(1.0, 1.5))
    deadline = iterations * frontier.min_time * slack + 1e-6
    run = Run(iterations=iterations, price=rate, deadline_s=deadline)
    latency = data.draw(st.sampled_from([0.0, 0.001, 0.05]))
    try:
        plan = frontier.plan(run=run, switch_latency=latency)
    except NoAnswerError:
        assert latency > 0
        return
    costs = plan.costs
    assert iterations * plan.iteration_time <= deadline
    assert costs.minimized == "money"
    least, _ = cheapest_times(frontier, run, frontier.pipeline.num_stages)[0]
    assert costs.run.plan.money >= least * (1 - 1e-6)
    assert len(check_costs(plan)) == 2


def test_costs_survive_the_file_and_are_proved_from_it(frontier: Frontier, tmp_path: Path) -> None:
    rate = read_rate(hourly(tmp_path, [0.3, 0.1] * 12), "price")
    run = Run(iterations=1000, price=rate, carbon=Rate.fixed(350.5), currency="EUR", deadline_s=9e4)
    frontier.plan(run=run).save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    proved = check_costs(loaded)
    assert "costs follow" in proved[0]
    assert "deadline 90000.0 s" in proved[1]
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
    place = functools.reduce(operator.getitem, path, document["costs"])
    place[last] *= 1.001 if path else 1e-6
    with pytest.raises(InputError, match=words):
        check_costs(Plan.from_document(document))


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


def test_tokens_come_from_the_sidecar() -> None:
    plain = small_profile()
    metadata = ProfileMetadata(microbatch_size=2, extra={"sequence_length": 512})
    rows = [
        (stage, name, 1000, 0.1, 10.0) for stage in range(2) for name in ("forward", "backward")
    ]
    known = Profile.from_rows(rows, metadata=metadata)
    pipeline = Pipeline("1f1b", 2, 8)
    assert tokens_per_iteration(trace_frontier(pipeline, known, replicas=3)) == 2 * 512 * 8 * 3
    with pytest.raises(InputError, match=r"--tokens-per-iteration .*microbatch_size"):
        tokens_per_iteration(trace_frontier(pipeline, plain))
