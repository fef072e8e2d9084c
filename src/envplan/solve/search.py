"""One search for every request: the relaxation, rounding, and what limits ask for on top."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from envplan.costs import Run, TimeAndEnergy
from envplan.costs.pricing import check_span, price_run
from envplan.errors import NoAnswerError
from envplan.frontier import Progress, Relaxation
from envplan.plan import Plan, build_plan
from envplan.plan.build import note_straggler, target_of
from envplan.plan.costs import priced
from envplan.replay import Machine, Replay, Rows
from envplan.replay.noise import NoisyRun
from envplan.request import Request
from envplan.request.limits import (
    HoldsWithProbability,
    Limit,
    LimitContext,
    MinDwell,
    Robustness,
)
from envplan.solve.candidates import Candidates
from envplan.solve.local_search import LocalSearch
from envplan.solve.solution import KnownChoice, NoPlanInTimeError
from envplan.units import (
    J_PER_KWH,
    duration_text,
    j_from_fj,
    ns_from_s,
    ns_from_s_floor,
    s_from_ns,
)

_RESOLUTION: Final = 1000  # of a search over the time, as a part of its span
_STEPS: Final = _RESOLUTION.bit_length()
_FEW_STEPS: Final = 6  # of it, where each takes long
#: Local minima of the relaxed cost that are made to plans, at most.
_MAX_MINIMA: Final = 8
_PLACES: Final = 750  # of choices under noise, from the slowest to T_min's,
_FASTER_PLACES: Final = 250  # and from there to the fastest
_ATTEMPTS: Final = 4  # at a proof that a probability holds


def solve(frontier: Relaxation, request: Request, progress: Progress | None = None) -> Plan:
    """The best plan found for a request.

    Args:
        frontier: of the pipeline, the profile and the GPUs.
        progress: called now and then with (steps to go, 0), the former falling.

    Raises:
        NoAnswerError: no plan was found that keeps the deadline and all limits; says what can be
            had.
        InputError: the profile does not say how times vary, or a rate ends before the run.
    """
    frontier = with_late_parts(frontier, request)
    search = _Search(frontier, request, progress)
    match request.objective:
        case "energy":
            frontier.walk(search.asked_ns(), progress)
            found = search.least_energy()
        case "time":
            found = search.fastest()
        case "cost":
            found = search.cheapest() if request.straggler_time_s is None else search.in_time()
    plan = search.plan(found)
    if request.effort.ladder:
        plan = plan.with_ladder(ladder(frontier, request, progress))
    return plan if request.run is None else priced(plan, request.run)


def with_late_parts(frontier: Relaxation, request: Request) -> Relaxation:
    """The frontier, or where operations have clocks by part and the request's clocks come late or
    must be held, that of the options which are left then."""
    how, dwell = frontier.profile.adjustments.by_parts, request.limit(MinDwell)
    if how is None:
        return frontier
    late = {
        "switch_latency_s": request.switch_latency_s,
        "min_hold_s": 0.0 if dwell is None else dwell.time_s,
    }
    asked = how.model_copy(update=late)
    if asked == how:
        return frontier
    known = frontier.asked_once
    if asked not in known:
        adjustments = frontier.profile.adjustments.model_copy(update={"by_parts": asked})
        profile = frontier.profile.with_adjustments(adjustments)
        known[asked] = frontier.retraced(frontier.pipeline, profile)
    found: Relaxation = known[asked]
    return found


def ladder(frontier: Relaxation, request: Request, progress: Progress | None = None) -> list[Plan]:
    """Plans for stragglers, as `plans_by`, from T_min to T_max with T_star's among them.

    Each saves about as much on the one before as all others do.

    Args:
        request: its effort says how many at most; its deadline does not matter.
        progress: as for plans_by.

    Raises:
        NoAnswerError: waiting alone breaks a limit, such as a cap on power.
    """
    frontier = with_late_parts(frontier, request)
    for limit in request.limits:
        complaint = limit.explain_waiting(frontier.total_power_uw * frontier.num_gpus)
        if complaint is not None:
            raise NoAnswerError(complaint)
    first, *later = spread_times(frontier, frontier.min_time_ns, max(1, request.effort.ladder))
    star = frontier.min_energy_time_ns
    if later:  # T_star's plan stands in for the one next to it
        later.remove(min(later, key=lambda time_ns: abs(time_ns - star)))
        later.append(star)
    return plans_by(frontier, request, sorted({first, *later}), progress)


def plans_by(
    frontier: Relaxation,
    request: Request,
    times_ns: Sequence[int],
    progress: Progress | None = None,
) -> list[Plan]:
    """Plans by some times, ascending in time: each beats all faster ones where there is time.

    Args:
        request: whose limits all keep; times that no plan is found for are left out.
        times_ns: ascending, ns. Beyond T_star everybody waits until then.
        progress: called with (plans to go, 0), the former falling to the latter.
    """
    search, plans = _Search(frontier, request), list[Plan]()
    for made, time_ns in enumerate(times_ns):
        if progress is not None:
            progress(len(times_ns) - made, 0)
        try:
            plan = search.one_of_many(time_ns)
        except NoAnswerError:
            continue
        if not plans or plan.effective_fj < plans[-1].effective_fj:
            plans.append(plan)
    return plans


def spread_times(frontier: Relaxation, first_ns: int, count: int) -> list[int]:
    """Times up to T_max between which the relaxed effective cost falls alike, ns, ascending."""
    times = [t for t in frontier.beyond.times_ns.tolist() if t >= first_ns]
    times += [t for t in frontier.times_ns.tolist() if first_ns <= t < times[0]] if times else []
    times = sorted({*times, first_ns, frontier.slowest_time_ns})
    costs = [frontier.effective_bound_fj(t) for t in times]
    saved = [float(costs[0] - cost) for cost in costs]
    wanted = np.linspace(0.0, saved[-1], count)
    return sorted({round(t) for t in np.interp(wanted, saved, times).tolist()})


def remember(frontier: Relaxation, replay: Replay) -> None:
    """Let plain requests of this frontier choose what somebody else has found, too."""
    key = ("found", Machine(), (), 1.0)
    frontier.asked_once.setdefault(key, []).append(KnownChoice.of(replay))


Answer = TypeVar("Answer")


class Curve(Protocol):
    """A relaxed frontier, of one pipeline or of several together."""

    @property
    def min_time_ns(self) -> int: ...
    @property
    def min_energy_time_ns(self) -> int: ...
    @property
    def slowest_time_ns(self) -> int: ...
    @property
    def times_ns(self) -> NDArray[np.int64]: ...
    def energy_at(self, time: float) -> float: ...


class Deadlines(Generic[Answer]):
    """What answers a request by each deadline; whoever inherits says what, and what it takes.

    Args:
        gpus: of all stages and replicas.
    """

    def __init__(
        self, curve: Curve, request: Request, gpus: int, progress: Progress | None = None
    ) -> None:
        self.curve = curve
        self.request = request
        self._gpus = gpus
        self._progress = progress

    def by(self, time_ns: int, *, waits: bool = False) -> Answer:
        """The answer of least energy found that ends by a time and keeps all limits.

        Args:
            waits: everybody waits until then, so what counts is used until then.

        Raises:
            NoAnswerError: none was found; says why.
        """
        raise NotImplementedError

    def taken(self, answer: Answer) -> tuple[float, float]:
        """Its time and energy, s and J, all GPUs."""
        raise NotImplementedError

    def fastest(self) -> Answer:
        """The fastest answer found that keeps all limits.

        Raises:
            NoAnswerError: there is none.
        """
        curve = self.curve
        found = self.soonest(curve.min_time_ns, curve.min_energy_time_ns)
        return found or self.by(curve.slowest_time_ns)

    def tried(self, time_ns: int) -> Answer | None:
        """The answer by a time, until which everybody waits beyond T_star; None: there is none."""
        try:
            return self.by(time_ns, waits=time_ns > self.curve.min_energy_time_ns)
        except NoAnswerError:
            return None

    def soonest(self, first_ns: int, middle_ns: int, steps: int = _STEPS) -> Answer | None:
        """The answer of the least time found from a first one on: up to a middle, else up to T_max.

        Args:
            steps: bisections at most.
        """
        spans = (first_ns - 1, middle_ns), (middle_ns, self.curve.slowest_time_ns)
        found = (first_between(*span, self.tried, steps, self._progress) for span in spans)
        return next((answer for answer in found if answer is not None), None)

    def cheapest(self) -> Answer:
        """The answer whose run costs least of those that meet the run's deadline.

        Raises:
            NoAnswerError: there is none.
        """
        run = self.request.run
        assert run is not None
        assert run.iterations is not None
        found: list[tuple[float, Answer]] = []
        refusal: NoAnswerError | None = None

        def add(answer: Answer) -> None:
            cost = price_run(TimeAndEnergy(*self.taken(answer)), run, self._gpus).amount(
                run.minimized
            )
            found.append((cost, answer))

        for least, time_ns in cheapest_times(self.curve, run, self._gpus):
            if found and least >= min(cost for cost, _ in found):
                break
            try:
                add(self.by(time_ns))
            except NoAnswerError as error:
                refusal = refusal or error
        if refusal is not None:
            # Between two of these times, what keeps the limits soonest may be cheapest.
            with suppress(NoAnswerError):
                soonest = self.fastest()
                each_ns = ns_from_s_floor(run.deadline_s or 0.0) // run.iterations
                if ns_from_s(self.taken(soonest)[0]) <= each_ns:
                    add(soonest)
            if not found:
                raise refusal
        return min(found, key=lambda one: one[0])[1]


class _Found(NamedTuple):
    """A choice that answers a request.

    Attributes:
        deadline_ns: that it was made for, ns; what plan.json states.
        target: what it answers, where that is not the request but using a straggler's time.
        robustness: how sure it is, where that was asked for.
        bound_fj: a lower bound that CP-SAT proved, one GPU a stage, fJ.
    """

    replay: Replay
    deadline_ns: int
    target: Request | None = None
    robustness: Robustness | None = None
    bound_fj: int | None = None


class _Search(Deadlines[_Found]):
    """One request on one frontier.

    A limit that moves can mend is kept by every candidate; the others are conditions on the whole
    plan, which the search over the time keeps.
    """

    def __init__(
        self, frontier: Relaxation, request: Request, progress: Progress | None = None
    ) -> None:
        gpus = frontier.num_gpus * frontier.pipeline.num_stages
        super().__init__(frontier, request, gpus, progress)
        self.frontier = frontier
        self._probability = request.limit(HoldsWithProbability)
        self._exact = [one for one in request.limits if one is not self._probability]
        self._local = [limit for limit in request.limits if limit.is_repairable_by_moves]
        self._global = [limit for limit in request.limits if not limit.is_repairable_by_moves]
        self._eases_beyond_t_star = any(limit.eases_beyond_t_star for limit in request.limits)
        machine, moves = Machine(request.latency_ns), request.effort.moves
        kind = LocalSearch if request.latency_ns or self._local else Candidates
        self._candidates = kind.of(frontier, machine, self._local, moves)
        # What was found under the same conditions before, for later deadlines.
        key = (machine, tuple(request.limits), moves)
        self._remembered: list[KnownChoice] = frontier.asked_once.setdefault(("found", *key), [])

    def least_energy(self) -> _Found:
        """The choice of least energy by the request's deadline."""
        star, asked_ns = self.frontier.min_energy_time_ns, self.asked_ns()
        kind, straggler_s = self.request.deadline.kind, self.request.straggler_time_s or 0.0
        if kind == "sync-time":
            return self.by(asked_ns, waits=asked_ns > star)
        until_ns = ns_from_s_floor(straggler_s)
        if until_ns > asked_ns:
            waits = until_ns > star
            with suppress(NoAnswerError):
                target = self.request.with_deadline(straggler_s, waits=waits)
                return self.by(until_ns, waits=waits)._replace(target=target)
            if waits and set(self._global) - {self._probability}:
                # What uses all of the straggler's time takes more energy than T_star does, perhaps
                # more than a budget. The latest time before is the least of their negatives.
                slower = first_between(-until_ns, -star, lambda at: self.tried(-at), _FEW_STEPS)
                if slower is not None:
                    return slower
        # With limits or late clocks a plan slower than T_star may be the best, or the only one.
        stated_ns = min(asked_ns, star) if self._is_plain else asked_ns
        try:
            return self.by(stated_ns)
        except NoPlanInTimeError as error:
            if kind != "no-slowdown":
                raise
            # T_min needs clocks to change in no time; the least time found does not.
            return self.by(error.least_ns)
        except NoAnswerError:
            if not self._eases_beyond_t_star or stated_ns <= star:
                raise
            # Power goes on falling beyond T_star: what keeps the cap soonest uses least there.
            found = self.fastest()
            if found.replay.makespan_ns > stated_ns:
                raise
            return found._replace(deadline_ns=stated_ns)

    def in_time(self) -> _Found:
        """The choice of least energy while everybody waits for a straggler, which sets the time of
        the run.

        Raises:
            NoAnswerError: the straggler makes the run too long.
        """
        found, run = self.least_energy(), self._whole_run
        straggler_ns = ns_from_s_floor(self.request.straggler_time_s or 0.0)
        taken_ns = max(straggler_ns, found.replay.makespan_ns) * run.iterations
        if taken_ns > run.deadline_ns:
            raise NoAnswerError(
                f"with the straggler {run.iterations} iterations take "
                f"{duration_text(s_from_ns(taken_ns))}, longer than the deadline of "
                f"{duration_text(s_from_ns(run.deadline_ns))}"
            )
        return found

    def fastest(self) -> _Found:
        """The fastest choice found that keeps all limits.

        Energy and power fall along the frontier, but for rounding.
        """
        frontier, limits = self.frontier, self.request.limits
        middle, steps = frontier.min_energy_time_ns, _STEPS
        earliest = max((one.earliest_ns(frontier) for one in limits), default=frontier.min_time_ns)
        if not self._candidates.is_plain:
            middle, steps = max(middle, self._candidates.fastest.makespan_ns), _FEW_STEPS
        found = self.soonest(min(earliest, frontier.slowest_time_ns), middle, steps)
        if found is not None:
            if self._probability is not None:
                return found  # a sooner one would have to be proved anew
            sooner = self._candidates.sooner(found.replay)
            broken = self._broken(sooner, self._context(sooner.makespan_ns), self._exact)
            return found if broken else _Found(sooner, sooner.makespan_ns)
        # Options that draw less on average than waiting does take more energy than any others.
        safest = self._safest_choice
        return self.by(frontier.min_energy_time_ns) if safest is None else self._morphed_to(safest)

    def taken(self, answer: _Found) -> tuple[float, float]:
        """Its time and energy, s and J, all GPUs."""
        replay = answer.replay
        return s_from_ns(replay.makespan_ns), j_from_fj(replay.energy_fj * self.frontier.num_gpus)

    def by(self, deadline_ns: int, *, waits: bool = False) -> _Found:
        """The choice of least energy found that ends by a deadline and keeps all limits.

        Args:
            waits: everybody waits until then, so what counts is used until then.

        Raises:
            NoAnswerError: none was found; says by how much the best breaks a limit.
        """
        context = self._context(deadline_ns)
        power_uw = self.frontier.total_power_uw if waits else 0
        best: _Found | None = None
        least, refusal = math.inf, None
        try:
            best = self._searched(context, waits)
            self._keep(best.replay, context, self._exact)
            least = best.replay.energy_fj - power_uw * best.replay.makespan_ns
        except NoAnswerError as error:
            best, refusal = None, error
        for known in (*self._candidates.single_clocks, *self._remembered):
            value = known.energy_fj - power_uw * known.makespan_ns
            if known.makespan_ns > deadline_ns or value >= least:
                continue
            replay = self._replayed(known.choice)
            if self._broken(replay, context, self._exact):
                continue
            robustness = self._evidence(replay, context)
            if robustness is None and self._probability is not None:
                continue
            best = best or _Found(replay, deadline_ns)
            best, least = best._replace(replay=replay, robustness=robustness), value
        if best is None:
            assert refusal is not None
            raise refusal
        if self._global:
            self._remembered.append(KnownChoice.of(best.replay))
        return best

    def one_of_many(self, time_ns: int) -> Plan:
        """A plan by a time, until which everybody waits if it is beyond T_star."""
        waits = time_ns > self.frontier.min_energy_time_ns
        if self._is_plain:
            found = _Found(self._candidates.near(time_ns), time_ns)
        else:
            found = self.by(time_ns, waits=waits)
        return self._built(found, self.request.with_deadline(s_from_ns(time_ns), waits=waits))

    def plan(self, found: _Found) -> Plan:
        """What was found, as a plan."""
        plan, straggler_s = self._built(found, self.request), self.request.straggler_time_s
        if straggler_s is None:
            return plan
        return note_straggler(plan, self.frontier, found.replay, straggler_s)

    def _built(self, found: _Found, request: Request) -> Plan:
        least_ns = self.frontier.min_time_ns
        plan = build_plan(
            self.frontier,
            found.replay,
            target=target_of(found.target or request, found.deadline_ns, least_ns=least_ns),
            request=request,
            bound_fj=found.bound_fj,
            bound="relaxation" if found.bound_fj is None else "cp-sat",
        )
        if found.robustness is None:
            return plan
        predicted = plan.predicted.model_copy(update={"robustness": found.robustness})
        return plan.model_copy(update={"predicted": predicted})

    @property
    def _whole_run(self) -> NoisyRun:
        """How many iterations there are, and when they are to be over."""
        run = self.request.run
        assert run is not None
        assert run.iterations is not None
        return NoisyRun(run.iterations, ns_from_s_floor(run.deadline_s or 0.0))

    @property
    def _is_plain(self) -> bool:
        """Whether clocks follow at once and nothing but the time is limited."""
        return not self.request.limits and self.request.latency_ns == 0

    def asked_ns(self) -> int:
        """The deadline that the request means, ns.

        Raises:
            NoAnswerError: it is below T_min; says T_min.
        """
        frontier, deadline = self.frontier, self.request.deadline
        asked = deadline.resolve_ns(frontier.min_time_ns)
        if asked is None:
            return frontier.min_energy_time_ns if self._is_plain else frontier.slowest_time_ns
        return asked if deadline.time_s is None else frontier.checked_ns(asked)

    def _context(self, deadline_ns: int) -> LimitContext:
        run = self._whole_run if self.request.objective == "cost" else None
        return LimitContext(
            self.frontier.num_gpus,
            deadline_ns,
            self.frontier.profile,
            run=run,
            sync_ns=self.request.sync_ns,
        )

    def _replayed(self, rows: Rows) -> Replay:
        return self.frontier.problem.replay(rows, Machine(self.request.latency_ns))

    def _broken(
        self, replay: Replay, context: LimitContext, limits: Iterable[Limit]
    ) -> Limit | None:
        """The first of some limits that a replay breaks."""
        return next((limit for limit in limits if limit.violation(replay, context)), None)

    def tried(self, time_ns: int) -> _Found | None:
        """As Deadlines.tried."""
        found = super().tried(time_ns)
        return found and found._replace(deadline_ns=max(found.replay.makespan_ns, time_ns))

    @property
    def _safest_choice(self) -> Rows | None:
        """The choice that keeps one of the limits best, whatever it costs; None: none is known."""
        problem = self.frontier.problem
        choices = (limit.safest_choice(problem) for limit in self.request.limits)
        return next((choice for choice in choices if choice is not None), None)

    def _morphed_to(self, safest: Rows) -> _Found:
        """The choice with as few of the safest options as keep all limits.

        Such options may take more energy than waiting would. Operations get them in the order of
        the schedule, all others their options of T_max.

        Raises:
            NoAnswerError: even all of them do not.
        """
        usual = self._at_place(0, waits=True).rows
        order, count = self.frontier.problem.pipeline.order, len(safest)

        def tried(num_safest: int) -> _Found | None:
            rows = usual.copy()
            rows[order[:num_safest]] = safest[order[:num_safest]]
            replay = self._replayed(rows)
            context = self._context(replay.makespan_ns)
            broken = self._broken(replay, context, self.request.limits)
            return None if broken else _Found(replay, replay.makespan_ns)

        found = first_between(0, count, tried, count.bit_length())
        if found is None:
            replay = self._replayed(safest)
            self._keep(replay, self._context(replay.makespan_ns), self.request.limits)
        assert found is not None
        return found

    def _keep(self, replay: Replay, context: LimitContext, limits: Iterable[Limit]) -> None:
        """Raises: NoAnswerError: a replay breaks one of some limits; says by how much."""
        broken = self._broken(replay, context, limits)
        if broken is None:
            return
        raise NoAnswerError(broken.explain_refusal(replay, context, self.frontier))

    def _searched(self, context: LimitContext, waits: bool) -> _Found:
        """What the search finds by a deadline; conditions on the whole plan may be broken."""
        if self._probability is not None:
            return self._sure(self._probability, context, waits)
        deadline_ns, seconds = context.deadline_ns, self.request.effort.polish_s

        def keeps(replay: Replay) -> bool:
            return not self._broken(replay, context, self._global)

        replay = self._candidates.best_by(deadline_ns, waits=waits, keeps=keeps)
        bound_fj: int | None = None
        if seconds:
            polished = self._candidates.polished(replay, deadline_ns, waits, seconds)
            replay, bound_fj = polished.replay, polished.bound_fj
        return _Found(replay, deadline_ns, bound_fj=bound_fj)

    def _sure(self, limit: HoldsWithProbability, context: LimitContext, waits: bool) -> _Found:
        """The choice of least energy found that holds its deadline with a probability.

        Under noise an iteration is on average longer than its plan says, for it waits for the
        slowest of what runs side by side. So the choice is one for an earlier deadline than the one
        it has to hold, or, where even T_min's is too slow for that, T_min's with operations made
        faster. All of these stand in one order, whatever the deadline is, and the first of those
        that hold is found by bisection, every candidate meeting the same draws. What holds a
        deadline holds a later one, so a later deadline never leads further down that order. Fresh
        draws prove what comes out; where they do not, the next attempt aims higher.
        """
        last = _PLACES + _FASTER_PLACES
        fastest = self._at_place(last, waits)

        def keeps_local(replay: Replay) -> bool:
            late = replay.makespan_ns > context.deadline_ns
            return not late and not self._broken(replay, context, self._local)

        for attempt in range(_ATTEMPTS):

            def holding(place: int, attempt: int = attempt) -> Replay | None:
                if self._time_at_place(place, waits) > context.deadline_ns:
                    return None
                replay = self._at_place(place, waits)
                holds = keeps_local(replay) and not limit.violation(
                    replay, context, attempt=attempt
                )
                return replay if holds else None

            best = first_between(-1, last, holding, _STEPS, self._progress) or fastest
            evidence = limit.certify(best, context, attempt=attempt)
            if evidence is not None and keeps_local(best):
                return _Found(best, context.deadline_ns, robustness=evidence)
        raise NoAnswerError(limit.explain_violation(fastest, context))

    def _evidence(self, replay: Replay, context: LimitContext) -> Robustness | None:
        """The proof that a choice is in time as surely as asked; None where there is none."""
        limit = self._probability
        if limit is None or limit.violation(replay, context):
            return None
        attempts = (limit.certify(replay, context, attempt=attempt) for attempt in range(_ATTEMPTS))
        return next((evidence for evidence in attempts if evidence is not None), None)

    def _time_at_place(self, place: int, waits: bool) -> int:
        """The deadline of a place, ns, from the slowest worth having at 0 to T_min at _PLACES."""
        frontier = self.frontier
        slowest = frontier.slowest_time_ns if waits else frontier.min_energy_time_ns
        return slowest - (slowest - frontier.min_time_ns) * min(place, _PLACES) // _PLACES

    def _at_place(self, place: int, waits: bool) -> Replay:
        """The choice for a place's deadline; after _PLACES, T_min's with ever faster rows."""
        candidates = self._candidates
        try:
            replay = candidates.best_by(self._time_at_place(place, waits), waits=waits)
        except NoPlanInTimeError:
            replay = candidates.fastest
        if place <= _PLACES:
            return replay
        # Rows of a table stand by time, the fastest first.
        part = (place - _PLACES) / _FASTER_PLACES
        steps = np.floor((candidates.fastest_rows - replay.rows) * part).astype(np.int32)
        return self._replayed(replay.rows + steps)


def first_between(
    low: int,
    high: int,
    tried: Callable[[int], Answer | None],
    steps: int,
    progress: Progress | None = None,
) -> Answer | None:
    """The answer of the least number found, after `low` and up to `high`; None if high has none.

    Args:
        tried: the answer of a number, None where it has none.
        steps: bisections at most.
    """
    if high <= low:
        return None
    first = tried(low + 1)
    if first is not None:
        return first
    best = tried(high)
    if best is None:
        return None
    low += 1
    resolution = max(1, (high - low) // _RESOLUTION)
    for step in range(steps):
        if high - low <= resolution:
            break
        if progress is not None:
            progress(steps - step, 0)
        middle = (low + high) // 2
        answer = tried(middle)
        if answer is None:
            low = middle
        else:
            best, high = answer, middle
    return best


def cheapest_times(frontier: Curve, run: Run, gpus: int) -> list[tuple[float, int]]:
    """(cost, time in ns) of the local minima of a run's relaxed cost, least first.

    The relaxed cost is exact: between breakpoints of the frontier and changes of the rate it is
    (a + b T)(c + d T) / T + k T, where k is what time costs beside energy; its least value is
    known. Iterations between T_min and T_star are looked at: not slower ones, and no pauses until
    an hour is cheaper.

    Args:
        run: with iterations and a deadline.
        gpus: of all replicas.

    Raises:
        NoAnswerError: even at T_min the run takes longer; says how long.
        InputError: a rate ends before the longest run that is looked at.
    """
    assert run.iterations is not None
    assert run.deadline_s is not None
    least_ns = frontier.min_time_ns * run.iterations
    deadline_ns = ns_from_s_floor(run.deadline_s)
    if deadline_ns < least_ns:
        raise NoAnswerError(
            f"{run.iterations} iterations take at least {duration_text(s_from_ns(least_ns))} "
            f"({s_from_ns(least_ns):.9g} s, at T_min), longer than the deadline of "
            f"{duration_text(run.deadline_s)}"
        )
    latest_ns = min(frontier.min_energy_time_ns, deadline_ns // run.iterations)
    for rate in (run.price, run.carbon):
        if rate is not None:
            check_span(rate, s_from_ns(latest_ns * run.iterations))
    rate, iterations = run.minimized_rate, run.iterations
    more = run.overheads
    beside = run.minimized_overhead(1.0, gpus) * iterations
    if rate.is_fixed and rate.per_kwh[0] > 0 and not (more.host_power or beside):
        return [(0.0, latest_ns)]  # energy only falls until T_star

    def energy(time_ns: int) -> float:
        time_s = s_from_ns(time_ns)
        return more.site_energy_j(time_s, frontier.energy_at(time_s), gpus)

    def integral(time_ns: int) -> float:
        return rate.integral(s_from_ns(time_ns) * iterations)

    first_ns = frontier.min_time_ns
    changes = rate.changes(s_from_ns(least_ns), s_from_ns(latest_ns) * iterations)
    bends = {*frontier.times_ns.tolist(), *(ns_from_s(one / iterations) for one in changes)}
    inner = (time_ns for time_ns in bends if first_ns < time_ns < latest_ns)
    points: list[int] = []
    for begin, end in pairwise(sorted({first_ns, latest_ns, *inner})):
        # (a + b T)(c + d T) / T + k T is least at sqrt(ac / (bd + k)), where that lies inside.
        t0, t1 = s_from_ns(begin), s_from_ns(end)
        b = (energy(end) - energy(begin)) / (t1 - t0)
        d = (integral(end) - integral(begin)) / (t1 - t0)
        a, c = energy(begin) - b * t0, integral(begin) - d * t0
        points.append(begin)
        rise = b * d + beside * J_PER_KWH
        if a * c > 0 and rise > 0:
            turn = ns_from_s(math.sqrt(a * c / rise))
            points += [turn] if begin < turn < end else []
    points.append(latest_ns)
    costs = [
        energy(t) / s_from_ns(t) * integral(t) / J_PER_KWH + beside * s_from_ns(t) for t in points
    ]
    around = zip(points, [math.inf, *costs], costs, [*costs[1:], math.inf], strict=False)
    minima = [(here, point) for point, before, here, after in around if before > here <= after]
    return sorted(minima)[:_MAX_MINIMA]
