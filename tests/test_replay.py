"""The exact replay and its search, against plain integers (tests/replay_oracle.py)."""

from __future__ import annotations

import signal
import sys
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import replay_oracle as oracle
from envplan import _kernel
from envplan.errors import InputError
from envplan.pipeline import Pipeline
from envplan.profile import Profile
from envplan.replay import Ask, Machine, Problem, Search
from envplan.replay.cores import parallel_map
from envplan.units import ENERGY_UNITS_PER_J, in_10uw
from strategies import dags, falling_profiles, pipelines, profiles, profiles_with_configs

LATENCIES = [0, 0, 1, 7, 3_000_000, 20_000_000, 30_000_003, 300_000_000, 5_000_000_000]


class Case(NamedTuple):
    problem: Problem
    profile: Profile
    rows: NDArray[np.int32]
    machine: Machine

    @property
    def stage(self) -> list[int]:
        return self.problem.stage.tolist()

    @property
    def powers(self) -> list[int]:
        return self.problem.blocking_power_10uw.tolist()

    def parts(self, factors: list[float] | None = None) -> list[oracle.Part]:
        return self.replayed(factors).parts

    def replayed(self, factors: list[float] | None = None) -> oracle.Replayed:
        return oracle.replayed_with_requests(
            self.problem.pipeline,
            self.profile,
            self.rows.tolist(),
            self.machine.latency_ns,
            factors,
            self.machine.ask,
        )


@st.composite
def cases(draw: Any) -> Case:
    """Any pipeline with any choice of rows on any machine."""
    pipeline = draw(st.one_of(pipelines(max_stages=3, max_microbatches=4), dags(num_stages=2)))
    kind = draw(st.sampled_from([profiles, falling_profiles, profiles_with_configs, tiny_profiles]))
    profile = draw(kind(pipeline.num_profile_stages, max_options=6))
    power = st.sampled_from([0, 1, 7_500_000, 10**8])
    powers = [draw(power) for _ in range(pipeline.num_stages)]
    problem = Problem(pipeline, profile, powers)
    asks: list[Ask] = ["ahead", "start"]
    machine = Machine(draw(st.sampled_from(LATENCIES)), draw(st.sampled_from(asks)))
    return Case(problem, profile, draw(rows_of(problem)), machine)


@st.composite
def tiny_profiles(draw: Any, num_stages: int, max_options: int) -> Profile:
    """Times of a few ns, so that every rounding shows and an operation meets several clocks."""
    rows = [
        (
            stage,
            name,
            mhz,
            draw(st.integers(1, 60)) * 1e-9,
            draw(st.integers(0, 2000)) / ENERGY_UNITS_PER_J,
        )
        for stage in range(num_stages)
        for name in ("forward", "backward")
        for mhz in draw(st.sets(st.integers(1, 9), min_size=1, max_size=max_options))
    ]
    return Profile.from_rows(rows)


@st.composite
def rows_of(draw: Any, problem: Problem) -> NDArray[np.int32]:
    sizes = [len(problem.tables[table]) for table in problem.table.tolist()]
    return np.array([draw(st.integers(0, size - 1)) for size in sizes], np.int32)


@settings(max_examples=80, deadline=None)
@given(cases(), st.data())
def test_replay_is_that_of_the_oracle(case: Case, data: st.DataObject) -> None:
    count = len(case.rows)
    factor = st.one_of(st.just(1.0), st.floats(0.2, 4.0))
    drawn = data.draw(st.none() | st.lists(factor, min_size=count, max_size=count))
    factors = None if drawn is None else np.array(drawn)
    parts, requests = case.replayed(drawn)
    replay = case.problem.replay(case.rows, case.machine, factors)
    makespan = max(part.end_ns for part in parts)
    assert replay.makespan_ns == makespan
    found = replay.parts
    assert [p[:5] for p in parts] == list(zip(*(c.tolist() for c in found), strict=True))
    firsts = np.unique(found.operation, return_index=True)[1]
    assert replay.starts_ns.tolist() == found.begin_ns[firsts].tolist()
    assert replay.finishes_ns.tolist() == [
        max(p.end_ns for p in parts if p.operation == i) for i in range(count)
    ]
    assert replay.energies_10fj.tolist() == [
        sum(p.energy_10fj for p in parts if p.operation == i) for i in range(count)
    ]
    assert replay.requests_ns.tolist() == [-1 if at is None else at for at in requests]
    made = [(at, start) for at, start in zip(requests, replay.starts_ns.tolist(), strict=True)]
    late = [at for at, start in made if at is not None and at + case.machine.latency_ns > start]
    assert replay.num_late_requests == len(late)
    assert replay.energy_10fj == oracle.energy_10fj(parts, case.stage, case.powers, makespan)
    later = makespan + 12345
    assert replay.energy_until(later) == oracle.energy_10fj(parts, case.stage, case.powers, later)
    assert sum(replay.busy_ns.tolist()) == sum(p.end_ns - p.begin_ns for p in parts)


@settings(max_examples=80, deadline=None)
@given(cases(), st.sampled_from([1, 20, 4_000_000, 10**8, 10**10]))
def test_power_over_time_and_spacing_are_those_of_the_oracle(case: Case, hold_ns: int) -> None:
    (parts, requests), replay = case.replayed(), case.problem.replay(case.rows, case.machine)
    times, power = replay.power_steps
    assert (times[0], times[-1]) == (0, replay.makespan_ns)
    assert np.all(np.diff(times) > 0)
    # Wherever it may change, and just before.
    ends = {at for p in parts for at in (p.begin_ns, p.end_ns)}
    moments = {at for end in ends for at in (end - 1, end) if 0 <= at < replay.makespan_ns}
    drawn = {at: oracle.power_10uw(parts, case.stage, case.powers, at) for at in moments}
    for at, power_10uw in drawn.items():
        assert power[int(np.searchsorted(times, at, side="right")) - 1] == power_10uw
    assert replay.peak_10uw == max(drawn.values())
    pipeline = case.problem.pipeline
    shortages = oracle.hold_shortages(pipeline, requests, replay.makespan_ns, hold_ns)
    short = [hold_ns - held for *_, held in replay.short_dwells(hold_ns)]
    assert sorted(short) == sorted(shortage for shortage in shortages if shortage)


@settings(max_examples=40, deadline=None)
@given(cases(), st.integers(1, 19), st.integers(0, 2**32))
def test_noisy_makespans_are_those_of_single_replays(case: Case, runs: int, seed: int) -> None:
    normal = np.random.default_rng(seed).standard_normal((runs, len(case.rows)))
    factors = np.exp(0.3 * normal)
    found = case.problem.makespans(case.rows, case.machine, factors)
    assert found.tolist() == [
        case.problem.replay(case.rows, case.machine, one).makespan_ns for one in factors
    ]


@st.composite
def searches(draw: Any) -> tuple[Case, dict[str, Any]]:
    """A case, and limits for a search that some choices keep and some do not."""
    case = draw(cases())
    replay = case.problem.replay(case.rows, case.machine)
    fastest = case.problem.replay(np.zeros_like(case.rows)).makespan_ns
    limits = {
        "machine": case.machine,
        "deadline_ns": int(fastest * draw(st.sampled_from([0.5, 1.0, 1.1, 2.0, 20.0]))),
        "min_dwell_ns": draw(st.sampled_from([0, 0, 10, 50_000_000, 400_000_000])),
        "peak_10uw": draw(st.none() | st.just(int(replay.peak_10uw * draw(st.floats(0.3, 1.0))))),
        "waits": draw(st.booleans()),
        "price_10uw": draw(st.sampled_from([1, 30_000_000])),
    }
    return case, limits


def check_score(case: Case, rows: NDArray[np.int32], limits: dict[str, Any], search: Search) -> Any:
    """The score of rows, once it is seen to be that of their replay."""
    replay = case.problem.replay(rows, limits["machine"])
    score = search.score(rows)
    assert score.late_ns == max(0, replay.makespan_ns - limits["deadline_ns"])
    short = replay.short_dwells(limits["min_dwell_ns"])
    assert score.shortage_ns == sum(limits["min_dwell_ns"] - held for *_, held in short)
    over = 0
    if limits["peak_10uw"] is not None:
        parts = case._replace(rows=rows).parts()
        over = oracle.over_10fj(parts, case.stage, case.powers, limits["peak_10uw"])
    assert score.over_10fj == over
    late = score.late_ns + score.shortage_ns
    assert score.excess_10fj == limits["price_10uw"] * late + over
    until = limits["deadline_ns"] if limits["waits"] else replay.makespan_ns
    assert score.energy_10fj == replay.energy_until(until)
    return score


@settings(max_examples=80, deadline=None)
@given(searches(), st.sampled_from([0.0, 0.3, 4.0]), st.integers(0, 99))
def test_search_never_gets_worse_and_scores_as_the_replay(
    drawn: tuple[Case, dict[str, Any]], heat: float, seed: int
) -> None:
    case, limits = drawn
    starts = case.problem.replay(case.rows).starts_ns
    search = Search(case.problem, starts, **limits)
    before = check_score(case, case.rows, limits, search)
    best = search.improve(case.rows, 700, heat, seed)
    after = check_score(case, best, limits, search)
    assert after[:2] <= before[:2]
    assert (best == case.rows).all() or after[:2] < before[:2]
    assert (search.improve(case.rows, 700, heat, seed) == best).all()


@settings(max_examples=40, deadline=None)
@given(searches())
def test_one_clock_a_stage_is_one_clock_a_stage(drawn: tuple[Case, dict[str, Any]]) -> None:
    case, limits = drawn
    problem = case.problem
    search = Search(problem, problem.replay(case.rows).starts_ns, **limits)
    constant = search.constant()
    check_score(case, constant, limits, search)
    for stage in range(problem.pipeline.num_stages):
        tables, rows = (each[problem.stage == stage] for each in (problem.table, constant))
        assert len({*zip(tables, rows, strict=True)}) == len({*tables})


def of_a_model() -> tuple[Problem, NDArray[np.int32]]:
    """A problem, and its rows at maximum frequency."""
    profile = Profile.builtin("a100-gpt3-1.3b-4stage")
    problem = Problem(Pipeline("1f1b", 4, 8), profile, [in_10uw(75.0)] * 4)
    return problem, problem.max_frequency_rows


def test_search_keeps_power_under_a_cap_that_it_can_keep() -> None:
    problem, rows = of_a_model()
    fastest = problem.replay(rows)
    cap, deadline = int(0.8 * fastest.peak_10uw), int(1.15 * fastest.makespan_ns)
    limits = {"price_10uw": 10**8, "peak_10uw": cap}
    search = Search(problem, fastest.starts_ns, deadline, **limits)
    found = search.improve(rows, 60_000, 1.5, 0)
    assert search.score(found).holds
    assert problem.replay(found).peak_10uw <= cap


@pytest.mark.parametrize("searches", [1, 3])
def test_long_searches_can_be_interrupted(searches: int) -> None:
    problem, rows = of_a_model()
    search = Search(problem, problem.replay(rows).starts_ns, 10**10, price_10uw=10**9)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    turns_s = sys.getswitchinterval()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            parallel_map(lambda seed: search.improve(rows, 10**15, 1.0, seed), range(searches))
        assert sys.getswitchinterval() == turns_s
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_what_is_left_is_carried_over_in_whole_ns() -> None:
    # 10 ns at the clock left over, 7 ns at the one asked for; it comes after 3, and with 7 of 10
    # left that is 4.9 ns, so 5.
    profile = Profile.from_rows(
        [
            (0, "forward", 2, 7e-9, 70e-14),
            (0, "backward", 1, 10e-9, 50e-14),
            (0, "forward", 1, 10e-9, 50e-14),
        ]
    )
    problem = Problem(Pipeline("1f1b", 1, 1), profile, [2])
    replay = problem.replay(problem.rows_at([(2, ""), (1, "")]), Machine(3, "start"))
    assert replay.parts.end_ns.tolist()[:2] == [3, 8]
    assert replay.parts.energy_10fj.tolist()[:2] == [15, 50]
    assert replay.parts.frequency_mhz.tolist()[:2] == [1, 2]
    assert replay.requests(0)[0].tolist() == [0, 8]


def test_rows_by_their_settings() -> None:
    profile = Profile.from_rows(
        [
            (0, "forward", 900, 0.1, 3.0, "b"),
            (0, "forward", 900, 0.2, 2.0, ""),
            (0, "backward", 0, 0.3, 1.0, ""),
        ]
    )
    problem = Problem(Pipeline("1f1b", 1, 1), profile, [0])
    assert problem.rows_at([(900, ""), (0, "")]).tolist() == [1, 0]
    with pytest.raises(InputError, match="no row for forward on stage 0 at 900 MHz with config c"):
        problem.rows_at([(900, "c"), (0, "")])


def test_iteration_of_more_than_146_years_is_refused() -> None:
    rows = [(0, name, mhz, 1e9 / mhz, 1.0) for name in ("forward", "backward") for mhz in (1, 2)]
    problem = Problem(Pipeline("1f1b", 1, 3), Profile.from_rows(rows), [0])
    slow, fast = (problem.rows_at([(mhz, "")] * 6) for mhz in (1, 2))
    assert problem.replay(fast).makespan_ns == 3 * 10**18
    for machine in (Machine(0), Machine(5)):
        with pytest.raises(InputError, match="146 years"):
            problem.replay(slow, machine)
        with pytest.raises(InputError, match="146 years"):
            problem.makespans(fast, machine, np.full((3, 6), 2.0))


def test_least_effective_rows_are_exact_whatever_the_blocking_power() -> None:
    rows = [
        (0, name, mhz, 150.0 * 1000 / mhz, 5.0)
        for name in ("forward", "backward")
        for mhz in range(1000, 2000, 100)
    ]
    problem = Problem(Pipeline("1f1b", 1, 2), Profile.from_rows(rows), [in_10uw(100_000.0)])
    costs = [
        energy_10fj - in_10uw(100_000.0) * time_ns
        for energy_10fj, time_ns in zip(
            problem.tables[0].energy_10fj.tolist(), problem.tables[0].time_ns.tolist(), strict=True
        )
    ]
    assert set(problem.least_effective_rows.tolist()) == {costs.index(min(costs))}


def test_search_refuses_a_negative_price() -> None:
    problem, rows = of_a_model()
    search = Search(problem, problem.replay(rows).starts_ns, 10**9, price_10uw=-1)
    for look in (lambda: search.score(rows), lambda: search.improve(rows, 1, 0.0, 0)):
        with pytest.raises(ValueError, match="price is out of range"):
            look()
    with pytest.raises(ValueError, match="price is out of range"):
        search.constant()


def kernel_arrays() -> dict[str, Any]:
    """Two operations on one stage, one table of two rows."""
    return {
        "order": np.array([0, 1], np.int32),
        "stage_begin": np.array([0, 2], np.int32),
        "succ_begin": np.array([0, 1, 1], np.int32),
        "succ": np.array([1], np.int32),
        "succ_lag": np.array([0], np.int64),
        "table": np.array([0, 0], np.int32),
        "table_begin": np.array([0, 2], np.int32),
        "time": np.array([5, 9], np.int64),
        "energy": np.array([7, 6], np.int64),
        "clock": np.array([1, 0], np.int32),
        "leaves": np.array([1, 0], np.int32),
        "nearest": np.array([[1, 0], [1, 0]], np.int32),
        "waiting": np.array([1], np.int64),
    }


@pytest.mark.parametrize(
    ("name", "values", "complaint"),
    [
        ("order", [1, 0], "topological"),
        ("order", [0, 0], "every operation once"),
        ("order", [0], "one entry an operation"),
        ("stage_begin", [0, 1], "span the operations"),
        ("succ", [0], "topological"),
        ("succ", [7], "topological"),
        ("succ_lag", [-1], "lag is out of range"),
        ("succ_begin", [0, 0, 0], "span succ"),
        ("succ_begin", [0, 10**6, 1], "must ascend"),
        ("table_begin", [0, 10**6, 2], "must ascend"),
        ("table", [0, 1], "table is out of range"),
        ("time", [0, 9], "time is out of range"),
        ("energy", [-1, 6], "energy is out of range"),
        ("clock", [2, 0], "clock is out of range"),
        ("clock", [1], "one entry a row"),
        ("leaves", [2, 0], "clock that a row leaves"),
        ("leaves", [1], "one entry a row"),
        ("nearest", [[1, 2], [1, 0]], "nearest must name"),
        ("waiting", [-1], "blocking power is out of range"),
    ],
)
def test_kernel_refuses_arrays_that_contradict_each_other(
    name: str, values: list[Any], complaint: str
) -> None:
    arrays = kernel_arrays()
    assert _kernel.Problem(**arrays).num_operations == 2
    arrays[name] = np.array(values, arrays[name].dtype)
    with pytest.raises(ValueError, match=complaint):
        _kernel.Problem(**arrays)


def test_kernel_refuses_slices_that_rise_and_fall() -> None:
    slices = {"slice_time": np.array([5, 9], np.int64), "slice_power": np.array([1, 1], np.int64)}
    one_each = np.array([0, 1, 2], np.int32)
    assert _kernel.Problem(**kernel_arrays(), slice_begin=one_each, **slices).num_operations == 2
    with pytest.raises(ValueError, match="slice_begin must ascend"):
        _kernel.Problem(**kernel_arrays(), slice_begin=np.array([0, 10**6, 2], np.int32), **slices)


@pytest.mark.parametrize("name", kernel_arrays())
def test_kernel_refuses_none_for_an_array(name: str) -> None:
    with pytest.raises(TypeError, match="None"):
        _kernel.Problem(**{**kernel_arrays(), name: None})
    with pytest.raises(TypeError, match="None"):
        _kernel.Problem(**kernel_arrays()).replay(None, 0, True)


def test_kernel_refuses_arrays_of_another_type_or_size() -> None:
    arrays = kernel_arrays()
    problem, rows = _kernel.Problem(**arrays), np.zeros(2, np.int32)
    with pytest.raises(ValueError, match="dtype mismatch"):
        _kernel.Problem(**{**arrays, "time": arrays["time"].astype(np.int32)})
    for given_rows, complaint in (
        (rows.astype(np.int64), "dtype mismatch"),
        (np.zeros(3, np.int32), "one entry an operation"),
        (np.array([0, 2], np.int32), "no such row"),
    ):
        with pytest.raises(ValueError, match=complaint):
            problem.replay(given_rows, 0, True)
    with pytest.raises(ValueError, match="factors must have"):
        problem.replay(rows, 0, True, np.ones(1))
    with pytest.raises(ValueError, match="one column an operation"):
        problem.makespans(rows, 0, True, np.ones((4, 1)))
