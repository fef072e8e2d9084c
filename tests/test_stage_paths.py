"""The bound of a stage at given prices: no exact replay of any choice costs less."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product
from typing import Literal

import numpy as np
import pytest

import envplan
from envplan.replay import Machine, Problem, Rows, Search
from envplan.solve.late_bound import ClockLimits, late_clock_bound_10fj
from envplan.units import ENERGY_UNITS_PER_J, POWER_UNITS_PER_W

_MS = 10**6
_CHOICES = 300
_MACHINES = [
    Machine(),
    *(Machine(ms * _MS, ask) for ms in (3, 9, 25) for ask in ("ahead", "start")),
]


def _problem(
    rng: np.random.Generator, num_stages: int, num_microbatches: int, num_clocks: int
) -> Problem:
    """A pipeline of operations of 4 to 30 ms, whose tables have clocks of their own."""
    rows: list[tuple[int, str, int, float, float]] = []
    shared_mhz = [900, 1500]  # else few choices hold their clocks
    for stage, instruction in product(range(num_stages), ("forward", "backward")):
        others_mhz = rng.choice(np.arange(1000, 1500, 100), num_clocks - 2, replace=False)
        clocks_mhz = np.concatenate([shared_mhz, others_mhz])
        work_ms = rng.uniform(4, 12)
        for mhz in sorted(clocks_mhz.tolist()):
            time_s = work_ms * rng.uniform(0.9, 1.1) * 1500 / mhz / 1000
            energy_j = time_s * rng.uniform(150, 400)
            rows.append((stage, instruction, mhz, time_s, energy_j))
    profile = envplan.Profile.from_rows(rows)
    pipeline = envplan.Pipeline("1f1b", num_stages, num_microbatches)
    powers_10uw = rng.integers(0, 80 * POWER_UNITS_PER_W, num_stages).tolist()
    return Problem(pipeline, profile, powers_10uw)


def _choices(rng: np.random.Generator, problem: Problem) -> Iterator[Rows]:
    """Choices that change clocks now and then, and others that do so all the time."""
    num_rows = np.array([len(table) for table in problem.tables])[problem.table]
    size = len(num_rows)
    mhz = problem.clocks_mhz
    for draw in range(_CHOICES):
        if draw % 2:
            yield rng.integers(0, num_rows).astype(np.int32)
            continue
        wanted_mhz = np.repeat(rng.choice(mhz, size), rng.integers(1, 6, size))[:size]
        rows = []
        for table, clock in zip(problem.table.tolist(), wanted_mhz.tolist(), strict=True):
            rows.append(int(np.argmin(np.abs(problem.tables[table].frequency_mhz - clock))))
        yield np.array(rows, np.int32)


def _priced_replay(
    problem: Problem,
    rows: Rows,
    machine: Machine,
    change_10fj: float,
    time_prices: np.ndarray,
    wait_prices: np.ndarray,
    end_prices: np.ndarray,
) -> list[float]:
    """What each stage costs in a replay, 10 fJ."""
    replay = problem.replay(rows, machine)
    clocks = problem.frequency_mhz[problem.over_all(rows)]
    costs = []
    for stage, (first, last) in enumerate(pairwise(problem.pipeline.stage_begin.tolist())):
        of_stage = slice(first, last)
        starts, finishes = replay.starts_ns[of_stage], replay.finishes_ns[of_stage]
        times = (finishes - starts).astype(float)
        waits = starts - np.concatenate([[0], finishes[:-1]])
        changes = np.count_nonzero(clocks[of_stage] != np.roll(clocks[of_stage], 1))
        costs.append(
            float(replay.energies_10fj[of_stage].sum())
            - float(problem.blocking_power_10uw[stage]) * times.sum()
            + time_prices[of_stage] @ times
            + wait_prices[of_stage] @ waits.astype(float)
            + end_prices[stage] * float(replay.makespan_ns - finishes[-1])
            + change_10fj * changes
        )
    return costs


def _bounds(
    problem: Problem,
    machine: Machine,
    min_dwell_ns: int,
    change_10fj: float,
    time_prices: np.ndarray,
    wait_prices: np.ndarray,
    end_prices: np.ndarray,
) -> list[float]:
    bounds = []
    for stage, (first, last) in enumerate(pairwise(problem.pipeline.stage_begin.tolist())):
        path = problem._kernel.cheapest_stage_path(
            stage,
            machine.latency_ns,
            machine.asks_ahead,
            min_dwell_ns,
            change_10fj,
            time_prices[first:last],
            np.append(wait_prices[first:last], end_prices[stage]),
        )
        bound_10fj, energy_10fj, changes, rows, times_ns, waits_ns = path
        assert len(rows) == last - first
        priced_10fj = (
            energy_10fj
            + time_prices[first:last] @ times_ns
            + np.append(wait_prices[first:last], end_prices[stage]) @ waits_ns
            + change_10fj * changes
        )
        assert bound_10fj == pytest.approx(priced_10fj, rel=1e-6)
        assert bound_10fj < priced_10fj
        bounds.append(bound_10fj)
    return bounds


def _prices(
    rng: np.random.Generator, problem: Problem
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Prices of time, of waiting before operations and after each stage's last, 10 fJ a ns.

    Some waits are free.
    """
    size, num_stages = len(problem.table), problem.pipeline.num_stages
    time_prices = rng.uniform(0, 5e8, size)
    end_prices = rng.uniform(0, 5e8, num_stages) * rng.choice([0, 1], num_stages)
    return time_prices, time_prices * rng.choice([0, 0.3, 1], size), end_prices


@pytest.mark.parametrize("machine", _MACHINES, ids=lambda m: f"{m.ask}-{m.latency_ns // _MS}")
@pytest.mark.parametrize("seed", range(12))
def test_no_choice_of_rows_costs_less_than_the_bound(machine: Machine, seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = _problem(rng, 2, 2, 3)
    prices = _prices(rng, problem)
    change_10fj = float(rng.choice([0, 1e14]))
    bounds = _bounds(problem, machine, 0, change_10fj, *prices)
    for rows in _choices(rng, problem):
        costs = _priced_replay(problem, rows, machine, change_10fj, *prices)
        assert all(bound <= cost for bound, cost in zip(bounds, costs, strict=True)), rows


@pytest.mark.parametrize("machine", _MACHINES, ids=lambda m: f"{m.ask}-{m.latency_ns // _MS}")
@pytest.mark.parametrize("min_dwell_ms", [15, 40, 70])
@pytest.mark.parametrize("seed", range(4))
def test_no_choice_that_holds_its_clocks_costs_less(
    machine: Machine, min_dwell_ms: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    problem = _problem(rng, 2, 2, 3)
    min_dwell_ns = min_dwell_ms * _MS
    prices = _prices(rng, problem)
    bounds = _bounds(problem, machine, min_dwell_ns, 0.0, *prices)
    starts_ns = problem.replay(problem.max_frequency_rows).starts_ns
    search = Search(
        problem, starts_ns, 10**12, price_10uw=1, machine=machine, min_dwell_ns=min_dwell_ns
    )
    num_held = 0
    for rows in _choices(rng, problem):
        if search.score(rows).shortage_ns > 0:
            continue
        num_held += 1
        costs = _priced_replay(problem, rows, machine, 0.0, *prices)
        assert all(bound <= cost for bound, cost in zip(bounds, costs, strict=True)), rows
    assert num_held > 0


@pytest.mark.parametrize("change_10fj", [0.0, 1e12, 1e14])
@pytest.mark.parametrize("seed", range(5))
def test_without_latency_the_path_costs_its_bound(change_10fj: float, seed: int) -> None:
    """Only a stage's first clock is free, and it is the one that its last request leaves."""
    rng = np.random.default_rng(seed)
    problem = _problem(rng, 1, 6, 4)
    size = len(problem.table)
    time_prices, _, _ = _prices(rng, problem)
    bound_10fj, _, _, path, _, _ = problem._kernel.cheapest_stage_path(
        0, 0, True, 0, change_10fj, time_prices, np.zeros(size + 1)
    )
    rows = (path - problem.first_row).astype(np.int32)
    (cost,) = _priced_replay(
        problem, rows, Machine(), change_10fj, time_prices, np.zeros(size), np.zeros(1)
    )
    assert bound_10fj <= cost <= bound_10fj + change_10fj + 1e-6 * abs(cost)


@pytest.mark.parametrize("ask", ["ahead", "start"])
@pytest.mark.parametrize("limits", [(20, 0), (20, 100), (0, 300)])
def test_bound_lies_between_the_relaxed_one_and_a_plan(
    ask: Literal["ahead", "start"], limits: tuple[int, int]
) -> None:
    latency_ms, min_dwell_ms = limits
    profile = envplan.Profile.builtin("sosp24-a100sxm-gpt3-175b-8stage")
    pipeline = envplan.Pipeline("1f1b", 8, 12)
    frontier = envplan.trace_frontier(pipeline, profile)
    deadline_ns = round(frontier.min_time_ns * 1.01)
    machine = Machine.of(latency_ms * _MS, ask)
    clocks = ClockLimits(machine, min_dwell_ms * _MS)
    bound_10fj = late_clock_bound_10fj(frontier, deadline_ns, clocks)
    relaxed_10fj = frontier.lower_bound_10fj(deadline_ns)
    plan = frontier.plan(
        slowdown=0.01,
        switch_latency=latency_ms / 1000,
        min_dwell=min_dwell_ms / 1000,
        ask=ask if latency_ms else None,
        moves=0.1,
    )
    assert relaxed_10fj * (1 - 1e-7) <= bound_10fj <= plan.energy * ENERGY_UNITS_PER_J
    if min_dwell_ms or ask == "start":
        assert bound_10fj > relaxed_10fj * 1.001
        assert plan.predicted.bound == "late-clocks"
        assert plan.energy_lower_bound >= bound_10fj / ENERGY_UNITS_PER_J


def test_without_late_clocks_the_bound_is_the_relaxed_one() -> None:
    profile = envplan.Profile.builtin("a40-gpt3-1.3b-4stage")
    frontier = envplan.trace_frontier(envplan.Pipeline("1f1b", 4, 8), profile)
    for percent in (0, 1, 5):
        deadline_ns = round(frontier.min_time_ns * (1 + percent / 100))
        bound_10fj = late_clock_bound_10fj(frontier, deadline_ns, ClockLimits(Machine()))
        assert bound_10fj == pytest.approx(frontier.lower_bound_10fj(deadline_ns), rel=1e-6)
