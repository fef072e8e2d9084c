"""Proving a plan from nothing but its file and its profile.

The proof is a list of small ones. Each yields a sentence for everything that it proves, and refuses
the plan at the first thing that is not so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from envplan._io.documents import check_stated
from envplan._io.words import counted
from envplan.costs.model import Run
from envplan.errors import InputError, NoAnswerError
from envplan.frontier import Progress
from envplan.plan import Plan, Rung, as_referenced, check_reference, replay_plan, rung_rows
from envplan.plan.build import check_cost, predict, until_straggler
from envplan.plan.costs import check_costs
from envplan.plan.target import Target, clock_timing_of, target_of
from envplan.profile import Profile
from envplan.replay import Replay
from envplan.replay.noise import NoisyRun
from envplan.request import Request
from envplan.request.limits import HoldsWithProbability, LimitContext, StatedResults
from envplan.solve import Frontier, trace_job
from envplan.solve.late_bound import (
    ClockLimits,
    FlowPrices,
    late_clock_bound_10fj,
    late_waiting_bound_10fj,
)
from envplan.units import (
    FINER_UNITS_TOLERANCE,
    MAX_INTEGER,
    in_10fj,
    j_from_10fj,
    ns_from_s_floor,
    s_from_ns,
)

__all__ = ["verify_plan"]

#: How far stated bounds, percentages and averages may lie from their recomputation: they were
#: rounded to floats.
_TOLERANCE: Final = 1e-9
#: The same in files of envplan 0.1 whose blocking powers lie between two of our units: savings are
#: small differences of large numbers.
_OLD_SAVINGS_TOLERANCE: Final = 1e-5


@dataclass(frozen=True)
class ProofContext:
    """A plan that is to be proved, with what proofs share.

    Attributes:
        plan: as its file states it.
        measured: its profile, as it was measured.
        force: go on though the profile has changed since the plan was made.
        progress: as for trace_frontier.
    """

    plan: Plan
    measured: Profile
    force: bool
    progress: Progress | None

    @cached_property
    def profile(self) -> Profile:
        """The profile with the adjustments that the plan was made with."""
        return as_referenced(self.plan.profile, self.measured)

    @cached_property
    def replay(self) -> Replay:
        """The replay of the plan's clocks."""
        return replay_plan(self.plan, self.profile, force=self.force)

    @cached_property
    def frontier(self) -> Frontier:
        """The frontier of the plan's job, traced again."""
        return trace_job(self.plan.job, self.profile, self.progress, whole=False)

    @property
    def clock_limits(self) -> ClockLimits:
        """How late the clocks of the plan's job come, and how long they are held."""
        return ClockLimits.of_job(self.plan.job)

    @property
    def tolerance(self) -> float:
        """How far figures may lie from their recomputation, relatively."""
        return _TOLERANCE if self.plan.job.is_in_whole_units else _OLD_SAVINGS_TOLERANCE

    @property
    def request(self) -> Request:
        """The plan's request."""
        return self.plan.request

    @property
    def is_limited(self) -> bool:
        """Whether clocks come late or anything but the time is limited."""
        return bool(self.request.limits or self.request.latency_ns)


Proof = Callable[[ProofContext], Iterator[str]]


def verify_plan(
    plan: Plan,
    profile: Profile,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> list[str]:
    """Prove a plan from nothing but itself and its profile.

    Args:
        plan: what is to be proved.
        profile: what it was made from.
        force: go on though the profile has changed since the plan was made.
        progress: as for trace_frontier, which is run again to prove the lower bound.

    Returns:
        A sentence for everything that was proved, in order.

    Raises:
        InputError: the first thing that is not so.
    """
    context = ProofContext(plan, profile, force, progress)
    sentences: list[str] = []
    for proof in PROOFS:
        sentences += proof(context)
    return sentences


def prove_profile(context: ProofContext) -> Iterator[str]:
    """The profile is the one that the plan was made from, with the adjustments it states."""
    yield check_reference(context.plan.profile, context.measured, context.force)
    adjustments = context.profile.adjustments
    for line in adjustments.in_words():
        yield f"derived from the profile: {line}"
    by_parts = adjustments.by_parts
    if by_parts is not None:
        name, job = "profile.adjustments.by_parts", context.plan.job
        latency_s, dwell_s = job.switch_latency_s or 0.0, job.min_dwell_s or 0.0
        check_stated(f"{name}.switch_latency_s", by_parts.switch_latency_s, latency_s)
        check_stated(f"{name}.min_hold_s", by_parts.min_hold_s, dwell_s)


def prove_request(context: ProofContext) -> Iterator[str]:
    """The plan repeats what its request says; files of old have no request."""
    plan, request = context.plan, context.plan.stated_request
    if request is None:
        return
    timing = clock_timing_of(request)
    check_repeated("job.switch_latency_s", plan.job.switch_latency_s, timing.switch_latency_s)
    check_repeated("job.ask", plan.job.ask, timing.ask)
    check_repeated("job.min_dwell_s", plan.job.min_dwell_s, timing.min_dwell_s)
    if request.limit(HoldsWithProbability) is None:
        check_repeated("predicted.robustness", plan.predicted.robustness, None)
    _check_run(plan, request.run)
    _check_objective(request)
    yield from ()


def _check_run(plan: Plan, run: Run | None) -> None:
    """Refuse costs of another run than the request's.

    Raises:
        InputError: names the field that differs.
    """
    if run is None:
        return
    if plan.costs is None:
        raise InputError("costs are missing, though request.run asks for them")
    stated = plan.costs.of_run()
    for name in Run.model_fields:
        if name != "minimize":
            check_repeated(f"costs.{name}", getattr(stated, name), getattr(run, name))
    minimized = None if run.deadline_s is None else run.minimized
    check_repeated("costs.minimized", plan.costs.minimize, minimized)


def _check_objective(request: Request) -> None:
    """Refuse a request whose objective and deadline contradict each other.

    Raises:
        InputError: they do.
    """
    has_deadline = request.deadline.kind != "any"
    if has_deadline != (request.objective == "energy"):
        raise InputError(
            f"request.objective {request.objective} contradicts request.deadline.kind "
            f"{request.deadline.kind}"
        )


def check_repeated(name: str, stated: object, requested: object) -> None:
    """Check that a plan repeats its request.

    Raises:
        InputError: it does not; names the field.
    """
    if stated != requested:
        raise InputError(f"{name} is {stated!r}; the request means {requested!r}")


def prove_operations(context: ProofContext) -> Iterator[str]:
    """Its operations are those of the schedule, at clocks of the profile."""
    num_operations, job = len(context.replay.rows), context.plan.job
    yield (
        f"{num_operations} operations on {job.stages} stages, in the order of schedule "
        f"{job.schedule}"
    )
    yield f"all {num_operations} frequencies, times and energies are rows of the profile"


def prove_prediction(context: ProofContext) -> Iterator[str]:
    """Times and energies are those of the replay, and all else that is predicted follows."""
    plan, stated = context.plan, context.plan.predicted
    check_cost("predicted.", stated, context.replay, plan.job)
    bound_j = stated.energy_lower_bound_j
    if bound_j > stated.energy_j:
        raise InputError(
            f"predicted.energy_lower_bound_j {bound_j!r} lies above energy_j {stated.energy_j!r}"
        )
    predicted = predict(context.replay, plan.job.num_gpus, in_10fj(bound_j), stated.bound)
    proved_elsewhere = {
        "robustness": stated.robustness,
        "late_clock_prices": stated.late_clock_prices,
        "until_straggler": stated.until_straggler,
    }
    check_stated(
        "predicted", stated, predicted.model_copy(update=proved_elsewhere), context.tolerance
    )
    yield (
        f"replayed, the iteration takes {plan.iteration_time!r} s and every operation starts when "
        "stated"
    )
    yield f"energy recomputed from the profile is {plan.energy!r} J, as stated"
    latency_s = plan.job.switch_latency_s
    if latency_s is not None:
        yield (
            f"so it is though every clock comes {latency_s!r} s after it is asked for, which is "
            f"done {plan.job.machine.ask_in_words}"
        )
    yield f"lower bound {bound_j!r} J <= energy; gap {100 * stated.gap:.4f}%"
    yield (
        f"savings {stated.savings_percent:.4f}%, slowdown {stated.slowdown_percent:.4f}% against "
        "maximum frequency everywhere"
    )


def prove_target(context: ProofContext) -> Iterator[str]:
    """The iteration is over by the target."""
    target, makespan_ns = context.plan.target, context.replay.makespan_ns
    time_s = s_from_ns(makespan_ns)
    targets_s = [target.deadline_s]
    if target.time_s is not None:
        targets_s.append(target.time_s)
    for target_s in targets_s:
        if makespan_ns > ns_from_s_floor(target_s):
            raise InputError(
                f"replayed, the iteration takes {time_s!r} s, more than the target of "
                f"{target_s!r} s"
            )
    yield f"{time_s!r} s <= target {min(targets_s)!r} s, to the nanosecond"


def prove_ladder(context: ProofContext) -> Iterator[str]:
    """Every rung takes and uses what it states, and keeps the limits that moves can mend."""
    plan = context.plan
    if plan.ladder is None:
        return
    previous = context.replay
    for number, rung in enumerate(plan.ladder):
        previous = _prove_rung(context, f"ladder[{number}]", rung, previous)
    yield (
        f"{counted(len(plan.ladder), 'slower plan')} in the ladder: time and energy as stated, and "
        "each saves on those before it where there is time"
    )
    for limit in context.request.limits:
        complaint = limit.explain_waiting(plan.job.waiting_10uw)
        if complaint is not None:
            raise InputError(complaint)
        sentence = limit.prove_ladder()
        if sentence is not None:
            yield sentence


def _prove_rung(context: ProofContext, name: str, rung: Rung, previous: Replay) -> Replay:
    """The replay of a rung that is as stated.

    Args:
        context: of the plan.
        name: what to call the rung in an error.
        rung: as the plan states it.
        previous: the replay of the rung before it, or of the plan.

    Raises:
        InputError: it is not.
    """
    plan, problem = context.plan, previous.problem
    replay = problem.replay(rung_rows(name, rung, problem), previous.machine)
    check_cost(f"{name}.", rung, replay, plan.job)
    if replay.makespan_ns <= previous.makespan_ns:
        raise InputError(f"{name} is not slower than the plan before it")
    # What each uses above waiting for as long; files have rounded numbers.
    if replay.effective_10fj > previous.effective_10fj + _TOLERANCE * replay.energy_10fj:
        raise InputError(
            f"{name} uses more than the plan before it even where there is time for both"
        )
    limit_context = LimitContext(plan.job.num_gpus, replay.makespan_ns, context.profile)
    for limit in context.request.limits:
        if limit.is_repairable_by_moves and limit.violation(replay, limit_context):
            raise InputError(f"{name}: {limit.explain_violation(replay, limit_context)}")
    return replay


def prove_limits(context: ProofContext) -> Iterator[str]:
    """The plan keeps every limit of its request."""
    plan, target = context.plan, context.plan.target
    # A plan for a straggler is made for a later deadline than the one that it has to hold.
    deadline_s = target.deadline_s if target.time_s is None else target.time_s
    limit_context = LimitContext(
        plan.job.num_gpus,
        ns_from_s_floor(deadline_s),
        context.profile,
        sync_ns=context.request.sync_ns,
    )
    for limit in context.request.limits:
        yield limit.prove(_stated_results(plan), context.replay, limit_context)


def _stated_results(plan: Plan) -> StatedResults:
    """The results that a plan states, for its limits to prove."""
    costs, run = plan.costs, None
    if costs is not None and costs.iterations is not None and costs.deadline_s is not None:
        run = NoisyRun(costs.iterations, ns_from_s_floor(costs.deadline_s))
    return StatedResults(plan.energy, plan.average_power, plan.predicted.robustness, run)


def prove_costs(context: ProofContext) -> Iterator[str]:
    """Costs follow from time, energy and rates."""
    yield from check_costs(context.plan)


def prove_deadline(context: ProofContext) -> Iterator[str]:
    """The target, and the deadline that the plan was made for, are those that the request means."""
    target = context.plan.target
    if context.plan.stated_request is not None:
        _check_target(context)
    meant_ns = _deadline_ns(context)
    if meant_ns is not None and target.deadline_s != s_from_ns(meant_ns):
        raise InputError(
            f"target.deadline_s is {target.deadline_s!r}; {target.kind} means "
            f"{s_from_ns(meant_ns)!r}"
        )
    yield from ()


def _check_target(context: ProofContext) -> None:
    """Refuse a target that repeats another request than the plan's.

    Raises:
        InputError: names the field that differs.
    """
    target, request = context.plan.target, context.request
    t_min_ns = context.frontier.min_time_ns
    expected = target_of(request, target.deadline_ns, least_ns=t_min_ns)
    if target == expected:
        return
    straggler_s = request.straggler_time_s
    if straggler_s is not None and _uses_straggler_time(target, straggler_s):
        # The plan uses the time that a straggler leaves, and its target says so.
        answered = request.with_deadline(straggler_s, waits=target.kind == "sync-time")
        expected = target_of(answered, target.deadline_ns, least_ns=t_min_ns)
        expected = expected.model_copy(update={"straggler_time_s": straggler_s})
    for name in type(target).model_fields:
        check_repeated(f"target.{name}", getattr(target, name), getattr(expected, name))


def _uses_straggler_time(target: Target, straggler_s: float) -> bool:
    return target.kind in ("time", "sync-time") and target.time_s == straggler_s


def _deadline_ns(context: ProofContext) -> int | None:
    """The deadline that a plan's target means, ns; None where the planner was free to choose it."""
    target, request, frontier = context.plan.target, context.request, context.frontier
    t_star_ns, stated_ns = frontier.min_energy_time_ns, target.deadline_ns
    match target.kind:
        case "no-slowdown" if context.is_limited:
            # T_min may be out of reach: the least time found then.
            meant_ns = max(frontier.min_time_ns, stated_ns)
        case "no-slowdown":
            meant_ns = frontier.min_time_ns
        case "slowdown":
            meant_ns = request.deadline.resolve_ns(frontier.min_time_ns) or 0
        case "time" | "sync-time" | "planner":
            time_s = context.plan.iteration_time if target.time_s is None else target.time_s
            meant_ns = ns_from_s_floor(time_s)
        case "min-energy" if not context.is_limited:
            meant_ns = t_star_ns
        case _:
            return None
    # Nothing uses less later than T_star, unless it is kept from using that little by then. Where
    # a plan is later all the same, as one with a single clock a stage may be, it says when it ends.
    if target.kind in ("slowdown", "time") and not (context.is_limited and stated_ns == meant_ns):
        ends_ns = context.replay.makespan_ns
        is_late = t_star_ns < ends_ns == stated_ns <= meant_ns
        meant_ns = ends_ns if is_late else min(meant_ns, t_star_ns)
    if target.straggler_time_s is not None:
        # The time that a straggler leaves may be used.
        meant_ns = max(meant_ns, min(ns_from_s_floor(target.straggler_time_s), stated_ns))
    return meant_ns


def prove_bound(context: ProofContext) -> Iterator[str]:
    """No plan by the deadline uses less than the lower bound, by the frontier traced again."""
    plan, deadline_s = context.plan, context.plan.target.deadline_s
    stated_j = plan.energy_lower_bound
    if plan.predicted.bound == "cp-sat":
        yield f"lower bound {stated_j!r} J is CP-SAT's; it was not proved again"
        return
    try:
        # Slopes are rounded down, which may bring the bound of what costs nothing below zero.
        least_j = max(0.0, context.frontier.energy_at(deadline_s))
    except NoAnswerError as error:
        raise InputError(f"target.deadline_s: {error}") from None
    knows_late_clocks = plan.predicted.bound == "late-clocks"
    if knows_late_clocks:
        least_j = max(least_j, _late_clock_bound_j(context))
    _check_provable("predicted", stated_j, least_j)
    plans = "plan with clocks as late and held as stated" if knows_late_clocks else "plan"
    yield f"lower bound proved: no {plans} by {deadline_s!r} s uses less than {least_j!r} J"


def _late_clock_bound_j(context: ProofContext) -> float:
    """The bound of late and held clocks at the prices that the plan states, J."""
    plan, frontier = context.plan, context.frontier
    stated, prices = plan.predicted.late_clock_prices, None
    if stated is not None:
        prices = FlowPrices.of_arcs(frontier.pipeline, stated.arcs_10uw(frontier.pipeline))
    bound_10fj = late_clock_bound_10fj(
        frontier, plan.target.deadline_ns, context.clock_limits, prices
    )
    return j_from_10fj(bound_10fj * plan.job.num_gpus)


def prove_waiting(context: ProofContext) -> Iterator[str]:
    """Energy until a straggler has finished is as stated, and the least possible is no less."""
    plan, frontier = context.plan, context.frontier
    until, straggler_s = plan.predicted.until_straggler, plan.target.straggler_time_s
    if until is None:
        return
    name, stated_j = "predicted.until_straggler", until.energy_lower_bound_j
    if straggler_s is None or not plan.iteration_time < straggler_s <= MAX_INTEGER:
        raise InputError(f"{name} goes with a target.straggler_time_s to wait for")
    straggler_ns = ns_from_s_floor(straggler_s)
    bound_10fj = max(0, frontier.waiting_bound_10fj(straggler_ns))
    if plan.predicted.bound == "late-clocks":
        late_10fj = late_waiting_bound_10fj(frontier, straggler_ns, context.clock_limits)
        bound_10fj = max(bound_10fj, late_10fj)
    least_j = j_from_10fj(bound_10fj * plan.job.num_gpus)
    _check_provable(name, stated_j, least_j)
    expected = until_straggler(plan, straggler_s, stated_j)
    check_stated(name, until, expected, context.tolerance)
    yield (
        f"until the straggler has finished at {straggler_s!r} s, {until.energy_j!r} J are used; no "
        f"plan in time for it uses less than {least_j!r} J"
    )


def _check_provable(name: str, stated_j: float, least_j: float) -> None:
    """Refuse a stated lower bound that is above the one that can be proved.

    Slopes of the relaxation are rounded down to whole units of power. Those of envplan 0.1 were
    finer, so its bounds are higher by less than that.

    Raises:
        InputError: it is.
    """
    if stated_j > least_j * (1 + FINER_UNITS_TOLERANCE):
        raise InputError(
            f"{name}.energy_lower_bound_j is {stated_j!r}; only {least_j!r} can be proved"
        )


PROOFS: Final[tuple[Proof, ...]] = (
    prove_profile,
    prove_operations,
    prove_prediction,
    prove_request,
    prove_ladder,
    prove_target,
    prove_limits,
    prove_costs,
    prove_deadline,
    prove_bound,
    prove_waiting,
)
