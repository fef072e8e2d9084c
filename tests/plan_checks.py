"""Whether a plan answers a request, judged by plain integers (replay_oracle.py) and fresh draws."""

from __future__ import annotations

import json
from fractions import Fraction
from itertools import chain, pairwise

import numpy as np

import replay_oracle as oracle
from envplan import Plan, simulate, verify_plan
from envplan.request import Request
from envplan.request.limits import (
    AveragePower,
    EnergyBudget,
    HoldsWithProbability,
    MinDwell,
    PeakPower,
    PowerRamp,
)
from envplan.solve import Frontier, trace_job
from envplan.units import (
    ENERGY_UNITS_PER_J,
    POWER_UNITS_PER_W,
    in_10fj,
    in_10uw,
    j_from_10fj,
    ns_from_s,
    ns_from_s_ceil,
    ns_from_s_floor,
    s_from_ns,
)

_RUNS = 1000


def rows_of(frontier: Frontier, plan: Plan) -> list[int]:
    """The row of each operation's table that a plan names, found without the library."""
    rows = []
    for op, planned in zip(frontier.pipeline.operations, chain(*plan.stages), strict=True):
        table = frontier.profile.table(op.profile_stage, op.instruction)
        settings = list(zip(table.frequency_mhz.tolist(), table.config, strict=True))
        rows.append(settings.index((planned.frequency_mhz, planned.config)))
    return rows


def until(plan: Plan, sync_time: float) -> float:
    """J until everyone has waited for a straggler."""
    return plan.energy + plan.waiting_energy(sync_time)


def bound_until(frontier: Frontier, sync_time: float) -> float:
    """J that no plan in time for a straggler uses less than until then."""
    return (
        frontier.waiting_bound_10fj(ns_from_s_floor(sync_time))
        * frontier.num_gpus
        / ENERGY_UNITS_PER_J
    )


def keeps(frontier: Frontier, request: Request, rows: list[int]) -> bool:
    """Whether a choice of rows keeps the request's deadline and limits, whatever chance does."""
    return not _broken(frontier, request, rows, latest_ns(frontier, request), sure=1)


class _Replayed:
    """What rows come to, by plain integers; energy of all GPUs."""

    def __init__(self, frontier: Frontier, request: Request, rows: list[int]) -> None:
        machine = request.machine
        self.parts, self.requests = oracle.replayed_with_requests(
            frontier.pipeline,
            frontier.profile,
            rows,
            machine.latency_ns,
            ask=machine.ask,
        )
        self.stage = [op.stage for op in frontier.pipeline.operations]
        self.powers = [in_10uw(power) for power in frontier.blocking_power_w]
        self.makespan = max(part.end_ns for part in self.parts)
        begins = {part.operation: part.begin_ns for part in reversed(self.parts)}
        self.starts = [begins[i] for i in range(len(rows))]
        energy = oracle.energy_10fj(self.parts, self.stage, self.powers, self.makespan)
        self.energy = energy * frontier.num_gpus


def assert_answers(frontier: Frontier, request: Request, plan: Plan) -> None:
    """The plan replays to the ns and 10 fJ, keeps every limit, is proved by its file, and its file
    leads to it again.
    """
    rows, profile = rows_of(frontier, plan), frontier.profile
    found = _Replayed(frontier, request, rows)
    makespan, energy = found.makespan, found.energy
    assert plan.iteration_time == s_from_ns(makespan)
    assert plan.energy == j_from_10fj(energy)
    assert [op.start_s for op in chain(*plan.stages)] == list(map(s_from_ns, found.starts))
    timeline = simulate(plan, profile)
    assert (timeline.iteration_time_ns, timeline.energy_10fj) == (makespan, energy)

    deadline_ns = ns_from_s_floor(plan.target.deadline_s)
    asked_ns = latest_ns(frontier, request)
    assert not _broken(frontier, request, rows, deadline_ns)
    assert asked_ns is None or makespan <= asked_ns
    assert plan.energy_lower_bound <= plan.energy
    until = plan.predicted.until_straggler
    assert until is None or until.energy_lower_bound_j <= until.energy_j
    slower = [plan.iteration_time, *(rung.iteration_time_s for rung in plan.ladder or ())]
    assert slower == sorted(set(slower))
    assert len(slower) - 1 <= request.effort.ladder

    assert verify_plan(plan, profile)
    assert plan.request == request
    read = Plan.from_document(json.loads(plan.to_json()))
    assert read == plan
    if not request.effort.polish_s:
        assert trace_job(read.job, profile).solve(read.request) == plan


def latest_ns(frontier: Frontier, request: Request) -> int | None:
    """By when the request says that an iteration must be over, ns; None where it does not say."""
    deadline, run = request.deadline, request.run
    if request.objective == "cost":
        return ns_from_s_floor(run.deadline_s) // (run.iterations or 1)
    asked: int | None = None
    if deadline.time_s is not None:
        asked = ns_from_s_floor(deadline.time_s)
    elif deadline.slowdown is not None:
        asked = frontier.min_time_ns + int(frontier.min_time_ns * deadline.slowdown)
    elif deadline.kind == "no-slowdown" and not request.latency_ns and not request.limits:
        asked = frontier.min_time_ns
    if asked is None or request.straggler_time_s is None:
        return asked
    return max(asked, ns_from_s_floor(request.straggler_time_s))


def _broken(
    frontier: Frontier, request: Request, rows: list[int], deadline_ns: int | None, sure: int = -1
) -> list[str]:
    """What rows break of the deadline and the request's limits."""
    found, gpus = _Replayed(frontier, request, rows), frontier.num_gpus
    makespan, energy = found.makespan, found.energy
    broken = ["deadline"] if deadline_ns is not None and makespan > deadline_ns else []
    for limit in request.limits:
        match limit:
            case MinDwell():
                times = (found.requests, makespan, ns_from_s_ceil(limit.time_s))
                kept = not any(oracle.hold_shortages(frontier.pipeline, *times))
            case PeakPower():
                moments = {at for part in found.parts for at in (part.begin_ns, part.end_ns)}
                drawn = (
                    oracle.power_10uw(found.parts, found.stage, found.powers, at)
                    for at in {0, *moments} - {makespan}
                )
                kept = max(drawn) * gpus <= in_10uw(limit.power_w)
            case PowerRamp():
                period = max(makespan, request.sync_ns)
                change = _steepest_change(found, period, ns_from_s(limit.window_s))
                allowed = Fraction(limit.ramp_w_per_s) * ns_from_s(limit.window_s) ** 2
                kept = change * gpus * 1000 <= allowed
            case AveragePower():
                kept = energy <= limit.power_w * POWER_UNITS_PER_W * makespan * (1 + 1e-12)
            case EnergyBudget():
                kept = energy <= in_10fj(limit.energy_j)
            case HoldsWithProbability():
                kept = _holds_often_enough(frontier, request, rows, limit, deadline_ns, sure)
            case _:
                raise AssertionError(f"no check of {limit}")
        broken += [] if kept else [limit.kind]
    return broken


def _steepest_change(found: _Replayed, period: int, window: int) -> int:
    """The most by which the energies of two neighbouring windows differ, one GPU a stage, 10 fJ."""
    ends = {at for part in found.parts for at in (part.begin_ns, part.end_ns)}
    events = sorted({0, found.makespan, period, *ends})
    steps = []
    for begin, end in pairwise(events):
        power = oracle.power_10uw(found.parts, found.stage, found.powers, begin)
        steps.append((begin, end, power if begin < found.makespan else sum(found.powers)))

    def used(until: int) -> int:
        """Energy from 0 to a time in any iteration, before or after."""
        rounds, rest = divmod(until, period)
        whole = sum((end - begin) * power for begin, end, power in steps)
        begun = [(begin, min(rest, end), power) for begin, end, power in steps if begin < rest]
        return rounds * whole + sum((end - begin) * power for begin, end, power in begun)

    times = {event + shift for event in events for shift in (-window, 0, window)}
    return max(abs(used(at + window) - 2 * used(at) + used(at - window)) for at in times)


def _holds_often_enough(
    frontier: Frontier,
    request: Request,
    rows: list[int],
    limit: HoldsWithProbability,
    deadline_ns: int | None,
    sure: int,
) -> bool:
    """Whether enough replays that nobody has seen are in time; `sure` 1: surely, -1: maybe."""
    spread = np.sqrt(np.log1p(limit.noise**2))
    normal = np.random.default_rng(12345).standard_normal((_RUNS, len(rows)))
    makespans = frontier.problem.makespans(
        np.array(rows, np.int32),
        request.machine,
        np.exp(spread * normal - spread**2 / 2),
    )
    run = request.run
    if request.objective == "cost" and run is not None:
        # The mean counts: five of its standard errors are what chance may do.
        each = ns_from_s(run.deadline_s or 0.0) / (run.iterations or 1)
        mean, error = makespans.mean(), makespans.std() / np.sqrt(_RUNS)
        if (run.iterations or 1) < 100:
            return bool((makespans <= each).mean() >= 0.3 or mean <= each)
        return bool(mean - 5 * error <= each)
    share = float((makespans <= deadline_ns).mean())
    p = limit.probability
    return share >= p + sure * 5 * (p * (1 - p) / _RUNS) ** 0.5
