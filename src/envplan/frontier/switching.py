"""Plans for GPUs whose clocks follow requests late, or must not be changed too often.

Where a clock comes `latency` after it is asked for, an operation begins at the clock of the one
before: how long it takes depends on its neighbours, and a plan made without regard to that misses
its deadline. So options are chosen anew by a search that replays every move with the latency
(csrc/annealing.hpp), and what comes out is what `envplan.simulate` says of it, to the nanosecond.

**The relaxed bound still holds.** An operation that does a share x of its work at one clock and
1 - x at another takes x t_a + (1 - x) t_b and has the effective cost x c_a + (1 - x) c_b: a point
between two options of its table, so on or above their lower convex hull, which is all that the
relaxation knows of it. Any number of clocks gives a point in the convex hull likewise. An idle
clock change costs nothing in the simulator, and precedences are the same; so durations and costs of
a replay are feasible in the relaxed problem, whose least energy by the deadline they cannot
undercut; nor the least effective cost, where everybody waits until the deadline anyway. Two
roundings are left. The last part of an operation takes a whole number of ns, up to
one more than its share: at the power of its clock, p, this adds p - P to the effective cost, which
is more than -P for one ns, while the relaxed curve does not rise with time. And each part's energy
is rounded, by half a fJ at most. `bound_allowance_fj` adds both up: some 1e-7 J an operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from envplan.errors import InputError, NoAnswerError
from envplan.frontier.rounding import Rounding
from envplan.replay import Machine, Problem, Search
from envplan.units import ns_from_s, ns_from_s_ceil, s_from_ns

if TYPE_CHECKING:
    from envplan.frontier.trace import Frontier
    from envplan.pipeline import Pipeline
    from envplan.plan import Plan
    from envplan.profile import Profile
    from envplan.simulation import Timeline

#: Longest latency and dwell, s: as for envplan.simulate.
MAX_SECONDS: Final = 3600.0

# Annealings from the usual plan and from one clock a stage: hot enough to leave their pattern.
_ROUNDED_HEATS: Final = (1.5, 0.6)
_CONSTANT_HEATS: Final = (4.0,)
_LAST_HEAT: Final = 0.25  # once more, from the best of them; and from a plan that is in time
_MOVES_PER_OPERATION: Final = 120
_FURTHER_MOVES: Final = 350_000  # or this many an operation, where that is less:
_FURTHER_MOVES_PER_OPERATION: Final = 2_000
_MOST_WORK: Final = 6 * 10**8  # moves x operations: a move may replay them all
_LATE_PRICE: Final = 1.1  # of what a ns saves at the deadline
_HURRY: Final = 20.0  # the same where nothing but time counts, or little time is to be had
_TIGHTENINGS: Final = 5


@dataclass(frozen=True)
class Switching:
    """How the clock of a stage may change.

    Attributes:
        latency_ns: from a request until the clock changes, ns.
        dwell_ns: least time between two requests for another clock, ns; from the last one of an
            iteration to the first of the next, too, which begins when this one ends.
    """

    latency_ns: int = 0
    dwell_ns: int = 0

    @classmethod
    def from_seconds(cls, latency: float, dwell: float) -> Switching:
        """Both in s.

        Raises:
            InputError: one is out of range.
        """
        for name, value in (("switch_latency", latency), ("min_dwell", dwell)):
            if not 0 <= value <= MAX_SECONDS:
                raise InputError(f"{name} must be between 0 and {MAX_SECONDS:g} s, not {value}")
        return cls(ns_from_s(latency), ns_from_s_ceil(dwell))

    def __bool__(self) -> bool:
        return self.latency_ns > 0 or self.dwell_ns > 0


class Replay(NamedTuple):
    """A replay for one GPU per stage.

    Attributes:
        makespan_ns: when the last operation ends, ns.
        energy_fj: of all operations and all waiting until then, fJ, as a float; beyond T_star
            without what waiting throughout would take.
        too_soon_ns: by how much clocks last too short, all added up, ns.
    """

    makespan_ns: int
    energy_fj: float
    too_soon_ns: int


class NoPlanInTimeError(NoAnswerError):
    """No plan was found that finishes in time although clocks follow late.

    Attributes:
        least_ns: the least time that was found, ns.
    """

    def __init__(self, deadline_ns: int, least_ns: int) -> None:
        self.least_ns = least_ns
        super().__init__(
            f"no plan was found that finishes in {s_from_ns(deadline_ns):.9f} s with clocks that "
            f"change so slowly; the least time found is {s_from_ns(least_ns):.9f} s"
        )


def plan_with_switching(
    frontier: Frontier,
    rounding: Rounding,
    switching: Switching,
    deadline_ns: int,
    target: dict[str, float | str],
    *,
    stated_ns: int | None = None,
    moves_share: float = 1.0,
) -> Plan:
    """The plan of least energy found that meets a deadline although clocks follow late.

    What it states is its replay with the latency, to the last ns and fJ. Beyond T_star the energy
    is that used until the deadline, when everybody has waited.

    Args:
        rounding: the problem without switching, rounded.
        deadline_ns: when everything must be finished, not below T_min, ns.
        target: what was asked: `kind` and the number that goes with it.
        stated_ns: the deadline that the plan states, if a later one, ns.
        moves_share: of the usual effort.

    Raises:
        NoPlanInTimeError: none was found; says the least time that was.
    """
    search = SwitchingSearch(frontier, rounding, switching, deadline_ns, moves_share)
    options = search.solve()
    stricter_ns = 0
    for _ in range(_TIGHTENINGS):
        plan = replayed_plan(frontier, options, switching, stated_ns or deadline_ns, target)
        over_ns = ns_from_s(plan.iteration_time) - deadline_ns
        if over_ns <= 0 and not _changes_too_soon(plan, frontier.profile, switching):
            return plan
        # The search's replay may round an operation with several changes by a ns.
        stricter_ns += max(over_ns, 1)
        options = search.tightened(options, stricter_ns)
    raise NoPlanInTimeError(deadline_ns, ns_from_s(plan.iteration_time))


def _changes_too_soon(plan: Plan, profile: Profile, switching: Switching) -> bool:
    from envplan.simulation import simulate

    if switching.dwell_ns == 0:
        return False
    timeline = simulate(plan, profile)
    return (
        clock_that_changes_too_soon(
            timeline.pipeline,
            [timed.frequency_mhz for timed in timeline.operations],
            [timed.start_ns for timed in timeline.operations],
            timeline.iteration_time_ns,
            switching.dwell_ns,
        )
        is not None
    )


def replayed_plan(
    frontier: Frontier,
    options: NDArray[np.int32],
    switching: Switching,
    deadline_ns: int,
    target: dict[str, float | str],
) -> Plan:
    """The plan of a choice of options, as its replay with the latency has it.

    Args:
        options: for each operation the row of its option table, (N,).
        deadline_ns: the time that was planned for, not below T_min, ns.
        target: what was asked: `kind` and the number that goes with it.
    """
    from envplan.plan import predict
    from envplan.simulation import simulate

    plan = frontier.priced_plan(options, target, deadline_ns)
    job = plan.job.model_copy(
        update={
            "switch_latency_s": s_from_ns(switching.latency_ns) if switching.latency_ns else None,
            "min_dwell_s": s_from_ns(switching.dwell_ns) if switching.dwell_ns else None,
        }
    )
    plan = plan.model_copy(update={"job": job})
    timeline = simulate(plan, frontier.profile)
    gpus = frontier.gpus_per_stage * frontier.replicas
    bound_fj = frontier.lower_bound_fj(min(deadline_ns, frontier.min_energy_time_ns))
    predicted = predict(
        timeline.iteration_time_ns,
        timeline.energy_fj,
        max(0, bound_fj - bound_allowance_fj(timeline, frontier.blocking_power_uw)) * gpus,
        "relaxation",
        plan.predicted.baseline,
    )
    starts = iter(timeline.operations)
    stages = [
        [op.model_copy(update={"start_s": s_from_ns(next(starts).start_ns)}) for op in stage]
        for stage in plan.stages
    ]
    return plan.model_copy(update={"predicted": predicted, "stages": stages})


def bound_allowance_fj(timeline: Timeline, blocking_power_uw: Sequence[int]) -> int:
    """What rounding may take off the relaxed bound in a replay, for one GPU a stage, fJ."""
    return sum(
        blocking_power_uw[timed.operation.stage] + len(timed.slices)
        for timed in timeline.operations
        if len(timed.slices) > 1
    )


def clock_that_changes_too_soon(
    pipeline: Pipeline,
    mhz: Sequence[int],
    starts_ns: Sequence[int],
    makespan_ns: int,
    dwell_ns: int,
) -> str | None:
    """The first clock in a replay that a stage keeps for less than dwell_ns, in words.

    Args:
        mhz: of each operation, (N,); 0 where it asks for none.
        starts_ns: when each starts, (N,), ns.
        makespan_ns: when the next iteration begins, ns.
    """
    for stage, (first, last) in enumerate(pairwise(pipeline.stage_begin.tolist())):
        asking = [i for i in range(first, last) if mhz[i]]
        # An iteration begins with the clock that the one before it has left.
        before = [*asking[-1:], *asking[:-1]]
        requests = [
            starts_ns[now]
            for earlier, now in zip(before, asking, strict=True)
            if mhz[now] != mhz[earlier]
        ]
        following = [*requests[1:], *(at + makespan_ns for at in requests[:1])]
        for at, until in zip(requests, following, strict=True):
            if until - at < dwell_ns:
                return (
                    f"stage {stage} asks for a clock at {s_from_ns(at)!r} s and for another one "
                    f"{s_from_ns(until - at)!r} s later"
                )
    return None


class SwitchingSearch:
    """One deadline's choice of options where clocks follow late.

    Args:
        rounding: the problem without switching, rounded: its numbering and one of the starts.
        deadline_ns: when everything must be finished, ns.
        moves_share: of the usual number of moves.
    """

    def __init__(
        self,
        frontier: Frontier,
        rounding: Rounding,
        switching: Switching,
        deadline_ns: int,
        moves_share: float = 1.0,
    ) -> None:
        self._frontier = frontier
        self._problem = Problem(frontier.pipeline, frontier.profile, frontier.blocking_power_uw)
        self._start = rounding.options
        count = len(self._start)
        # About when operations start: any numbers in the same order will do.
        self._starts_ns = np.empty(count, np.int64)
        self._starts_ns[rounding.order] = np.arange(count)
        self._switching = switching
        self._deadline_ns = deadline_ns
        self._price_uw = _price_uw(frontier, deadline_ns)
        wanted = count * _MOVES_PER_OPERATION + min(
            _FURTHER_MOVES, count * _FURTHER_MOVES_PER_OPERATION
        )
        self._moves = max(1, int(min(wanted, _MOST_WORK // count) * moves_share))

    def solve(self) -> NDArray[np.int32]:
        """The best options found, (N,): for each operation the row of its option table.

        Raises:
            NoAnswerError: none finishes in time; says the least time found.
        """
        search = self._search(self._deadline_ns, _LATE_PRICE)
        constant = search.constant(by_table=False)
        starts = [(self._start, heat) for heat in _ROUNDED_HEATS]
        starts += [(constant, heat) for heat in _CONSTANT_HEATS]
        starts += [(earlier, _LAST_HEAT) for earlier in self._made_for_earlier(search)]
        found = [
            search.improve(start, self._moves, heat, seed)
            for seed, (start, heat) in enumerate(starts)
        ]
        if not any(search.score(rows).holds for rows in found[: len(_ROUNDED_HEATS)]):
            stiff = self._search(self._deadline_ns, _HURRY)
            found.append(stiff.improve(self._start, self._moves, _ROUNDED_HEATS[0], 0))
        best = min([*found, constant], key=search.score)
        if not search.score(best).holds:
            best = search.improve(self._hurried(best), self._moves, _LAST_HEAT, len(starts))
        best = search.improve(best, self._moves, _LAST_HEAT, len(starts) + 1)
        if not search.score(best).holds:
            raise NoPlanInTimeError(self._deadline_ns, self.replay(self._hurried(best)).makespan_ns)
        return best

    def fastest(self) -> NDArray[np.int32]:
        """The fastest options found whose clocks last long enough, (N,)."""
        return self._hurried(self._start)

    def tightened(self, options: NDArray[np.int32], by_ns: int) -> NDArray[np.int32]:
        """Options found from others, with a deadline and a dwell stricter by so many ns."""
        search = self._search(self._deadline_ns - by_ns, _LATE_PRICE, by_ns)
        return search.improve(options, self._moves, 0.0, 0)

    def replay(self, options: NDArray[np.int32]) -> Replay:
        """What options, (N,), come to."""
        replay = self._problem.replay(options, Machine(self._switching.latency_ns))
        too_soon_ns = replay.hold_shortage_ns(self._switching.dwell_ns)
        energy_fj = replay.energy_fj
        if self._waits:
            energy_fj = replay.energy_until(0)
        return Replay(replay.makespan_ns, float(energy_fj), too_soon_ns)

    @property
    def _waits(self) -> bool:
        """Whether everybody waits until the deadline, however early the last one is."""
        return self._deadline_ns > self._frontier.min_energy_time_ns

    def _search(self, deadline_ns: int, price: float, stricter_ns: int = 0) -> Search:
        latency_ns, dwell_ns = self._switching.latency_ns, self._switching.dwell_ns
        return Search(
            self._problem,
            self._starts_ns,
            deadline_ns,
            price_uw=int(price * self._price_uw),
            machine=Machine(latency_ns),
            hold_ns=dwell_ns + (stricter_ns if dwell_ns else 0),
            waits=self._waits,
        )

    def _made_for_earlier(self, search: Search) -> list[NDArray[np.int32]]:
        """The usual plan for a deadline earlier by what the usual plan is late, if there is one."""
        late_ns = search.score(self._start).late_ns
        earlier_ns = self._deadline_ns - late_ns
        if late_ns <= 0 or earlier_ns < self._frontier.min_time_ns:
            return []
        return [self._frontier.rounding_at(earlier_ns).options]

    def _hurried(self, choice: NDArray[np.int32]) -> NDArray[np.int32]:
        """The fastest choice found whose clocks last long enough: one clock a stage is one."""
        hurry = self._search(0, _HURRY)
        starts = (choice, hurry.constant(by_table=False))
        found = [hurry.improve(start, self._moves, 1.0, seed) for seed, start in enumerate(starts)]
        scores = [hurry.score(rows) for rows in found]
        best = min(scores, key=lambda score: (score.shortage_ns > 0, score.late_ns))
        return found[scores.index(best)]


def _price_uw(frontier: Frontier, deadline_ns: int) -> float:
    """About what a ns more saves around a deadline, uW."""
    last = len(frontier.times_ns) - 1
    k = min(max(1, int(np.searchsorted(frontier.times_ns, deadline_ns))), last)
    # The slope of the first breakpoint says nothing.
    slope = frontier.slopes_uw[k] if k > 0 else 0
    return float(max(slope, sum(frontier.blocking_power_uw), 1))
