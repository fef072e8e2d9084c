"""Every planner's plan on one profile, each beside our own plan for the same time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from time import perf_counter
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Protocol

from envplan._io.documents import Model
from envplan.errors import InputError, naming
from envplan.pipeline import SCHEDULES, Pipeline
from envplan.pipeline.generate import ENVPIPE
from envplan.plan import Plan
from envplan.plan.build import percent, until_straggler
from envplan.plan.model import Baseline
from envplan.planners.advice import Advice, advice_for, advise
from envplan.planners.base import FrontierPlanner, MaxFrequency, Planner
from envplan.planners.envpipe import EnvPipe, EnvPipeRun, forwards_ahead
from envplan.planners.registry import PLANNERS
from envplan.planners.zeus import ZeusPlanner
from envplan.profile import Profile
from envplan.request import Request
from envplan.solve import Frontier
from envplan.units import j_from_10fj, ns_from_s, ns_from_s_floor, s_from_ns

if TYPE_CHECKING:
    import pandas as pd

Point = Literal["T_min", "T_star", "straggler"]

#: A schedule is worth a mention if it saves so much more, or takes so much less time, percent.
_NOTABLE_PERCENT: Final = 0.1
#: Planners that `compare` treats in a way of its own: the baseline, EnvPipe's schedule, and ours.
_PLANNED_APART: Final = (MaxFrequency.name, EnvPipe.name, FrontierPlanner.name)


class Published(Model, extra="ignore"):
    """Savings that a paper states for this workload; measured there, on real GPUs.

    Attributes:
        savings_percent: of the energy at maximum frequency.
        slowdown_percent: None where it is not said.
        source: where it was published.
    """

    savings_percent: float
    slowdown_percent: float | None = None
    source: str


class _Sidecar(Model, extra="ignore"):
    published: Published | None = None


class TimeEnergy(NamedTuple):
    """A point of a planner's own frontier: s, and J over all GPUs."""

    time_s: float
    energy_j: float


@dataclass(frozen=True)
class StragglerOutcome:
    """A plan, counted until a straggler has finished.

    Attributes:
        extrinsic_bloat_j: what our plan for the same time, waiting included, uses above the best
            plan for the straggler that is known.
        energy_j: what the plan uses, waiting included.
        savings_percent: of the energy of maximum frequency that waits for the straggler.
        gap: above the least that any plan in time for it uses, as a fraction.
    """

    extrinsic_bloat_j: float
    energy_j: float
    savings_percent: float
    gap: float


@dataclass(frozen=True)
class Entry:
    """One planner's plan in a comparison. Energies are J per iteration over all GPUs.

    Attributes:
        point: which of our own planner's plans this is; None for all other planners.
        plan: the plan.
        ours: our plan of the same pipeline for the same time, which uses no more energy.
        slowdown_percent, savings_percent: against Comparison.baseline.
        intrinsic_bloat_j: energy of the plan above that of `ours`.
        planning_time_s: the frontier's trace included where the planner needs it.
        with_straggler: the same until a straggler has finished; None without one.
    """

    point: Point | None
    plan: Plan
    ours: Plan
    slowdown_percent: float
    savings_percent: float
    intrinsic_bloat_j: float
    planning_time_s: float
    with_straggler: StragglerOutcome | None = None

    def to_dict(self) -> dict[str, str | float | None]:
        """The entry as `envplan compare --json` prints it, with units in its keys."""
        straggler = self.with_straggler
        return {
            "planner": self.plan.planner,
            "point": self.point,
            "schedule": self.plan.job.schedule,
            "iteration_time_s": self.plan.iteration_time,
            "slowdown_percent": self.slowdown_percent,
            "energy_j": self.plan.energy,
            "savings_percent": self.savings_percent,
            "energy_lower_bound_j": self.plan.energy_lower_bound,
            "gap": self.plan.gap,
            "frontier_energy_j": self.ours.energy,
            "intrinsic_bloat_j": self.intrinsic_bloat_j,
            "extrinsic_bloat_j": None if straggler is None else straggler.extrinsic_bloat_j,
            "straggler_energy_j": None if straggler is None else straggler.energy_j,
            "straggler_savings_percent": None if straggler is None else straggler.savings_percent,
            "straggler_gap": None if straggler is None else straggler.gap,
            "planning_time_s": self.planning_time_s,
        }


@dataclass(frozen=True)
class Comparison:
    """All planners on one profile.

    Attributes:
        frontier: of the pipeline as given, which all planners but EnvPipe keep.
        envpipe_frontier: of EnvPipe's schedule; the same as frontier where EnvPipe could not
            reschedule.
        baseline: maximum frequency on the pipeline as given.
        entries: one for each planner, several for ours, the last of them on EnvPipe's schedule.
        curves: own frontiers by planner, for those that have one, ascending time.
        envpipe: the iterations of EnvPipe's planner.
        straggler_time: s; None without a straggler.
        published: what the profile's sidecar says of its workload; None where it says nothing.
    """

    frontier: Frontier
    envpipe_frontier: Frontier
    baseline: Baseline
    entries: tuple[Entry, ...]
    curves: Mapping[str, Sequence[TimeEnergy]]
    envpipe: EnvPipeRun
    straggler_time: float | None
    published: Published | None

    def to_frame(self) -> pd.DataFrame:
        """The entries as rows, with the columns of Entry.to_dict."""
        import pandas as pd

        return pd.DataFrame([entry.to_dict() for entry in self.entries])

    @cached_property
    def advice(self) -> tuple[Advice, ...]:
        """Schedules that beat the pipeline's own.

        Among EnvPipe's order and the best other schedule with as many chunks, those that are faster
        or save more than the pipeline as given.
        """
        pipeline = self.frontier.pipeline
        if pipeline.schedule not in SCHEDULES:
            return ()
        other_schedules = [name for name in SCHEDULES if name != ENVPIPE]
        advised = advise(
            self.frontier, schedules=other_schedules, chunks=[pipeline.num_chunks], best=1
        )
        job = next(advice for advice in advised if advice.is_job)
        assert job.at_equal_time is not None
        if self.envpipe_frontier is not self.frontier:
            advised.insert(0, advice_for(job.at_equal_time, self.frontier, self.envpipe_frontier))
        return tuple(
            advice for advice in advised if advice.gain_percent_over(job) >= _NOTABLE_PERCENT
        )


@dataclass(frozen=True)
class _PlannedEntry:
    """A plan that a comparison will show, before it is set beside ours.

    Attributes:
        frontier: that the plan was made on.
    """

    frontier: Frontier
    point: Point | None
    plan: Plan
    planning_time_s: float


class _OurPlan(Protocol):
    """Makes our plan on a frontier that ends by a time; one that waits uses least until then."""

    def __call__(self, frontier: Frontier, time_s: float, *, waits: bool) -> Plan:
        """The plan."""


class _Target(NamedTuple):
    """By when one of our plans is to end, ns, and what it is called."""

    time_ns: int
    point: Point


def compare(
    frontier: Frontier,
    *,
    reconfigure: str = "balanced",
    activation_slots: int | Sequence[int] | None = None,
    straggler_time: float | None = None,
    straggler_slowdown: float | None = None,
) -> Comparison:
    """Run every planner on a traced pipeline and set its plan beside ours for the same time.

    EnvPipe reschedules a 1F1B pipeline first; any other one it takes as it is.

    Args:
        frontier: of the pipeline and the profile.
        reconfigure: EnvPipe's, see EnvPipe.
        activation_slots: EnvPipe's, see forwards_ahead.
        straggler_time: s, when everyone is finished because some replica is that slow.
        straggler_slowdown: instead, as a fraction above the baseline's iteration time.

    Raises:
        InputError: an argument is out of range, or the sidecar's `published` is malformed.
    """
    if straggler_time is not None and straggler_slowdown is not None:
        raise InputError("give straggler_time or straggler_slowdown, not both")
    published = _published(frontier.profile)
    envpipe = EnvPipe(reconfigure)
    envpipe_frontier = _rescheduled_for_envpipe(frontier, activation_slots)

    max_frequency = _planned(MaxFrequency(), frontier)
    fastest = max_frequency.plan
    if straggler_slowdown is not None:
        straggler_time = fastest.iteration_time * (1 + straggler_slowdown)
    straggler_s = Request.from_options(straggler_time=straggler_time).straggler_time_s

    others = [planner for planner in PLANNERS.values() if planner.name not in _PLANNED_APART]
    envpipe_entry, envpipe_run = _planned_by_envpipe(envpipe, envpipe_frontier)
    # Rounding is a heuristic: once in a while EnvPipe's choice is closer to the bound than what it
    # finds; then that is our plan. One clock for each stage is a candidate anyway.
    envpipe_frontier.add_choice(envpipe_run.replay)
    our_plan = cache(_our_plan)  # several planners end at the same time
    planned = [
        max_frequency,
        *(_planned(planner, frontier) for planner in others),
        envpipe_entry,
        *_planned_by_us(our_plan, frontier, envpipe_frontier, straggler_s),
    ]
    return Comparison(
        frontier=frontier,
        envpipe_frontier=envpipe_frontier,
        baseline=fastest.predicted.baseline,
        entries=_entries(planned, our_plan, fastest, straggler_s),
        curves={
            planner.name: _own_frontier(planner, frontier)
            for planner in others
            if isinstance(planner, ZeusPlanner)
        },
        envpipe=envpipe_run,
        straggler_time=straggler_s,
        published=published,
    )


def _published(profile: Profile) -> Published | None:
    """Published savings of the sidecar's workload."""
    with naming(f"metadata of {profile.name}"):
        return _Sidecar.of(**profile.metadata.extra).published


def _rescheduled_for_envpipe(
    frontier: Frontier, activation_slots: int | Sequence[int] | None
) -> Frontier:
    """The frontier of EnvPipe's own order; that of the pipeline as it is where it is not 1F1B."""
    pipeline = frontier.pipeline
    if pipeline.schedule != "1f1b":
        if activation_slots is not None:
            raise InputError(
                "activation slots are for rescheduling 1f1b; this pipeline runs "
                f"{pipeline.schedule}"
            )
        return frontier
    if pipeline.in_turn:  # known of this order alone
        return frontier
    num_microbatches = pipeline.num_microbatches
    order = Pipeline(
        ENVPIPE,
        pipeline.num_stages,
        num_microbatches,
        p2p_latency=pipeline.p2p_latency,
        forwards_ahead=forwards_ahead(frontier.profile, num_microbatches, activation_slots),
        extras=pipeline.extras,
    )
    return frontier.retraced(order, frontier.profile)


def _our_plan(frontier: Frontier, time_s: float, *, waits: bool) -> Plan:
    if waits:
        return frontier.plan(sync_time=time_s, switch_latency=0.0)
    return frontier.plan(time_s, switch_latency=0.0)


def _planned(planner: Planner, frontier: Frontier) -> _PlannedEntry:
    """The plan that a planner makes without a target, and how long that takes."""
    begin_s = perf_counter()
    plan = planner.plan(frontier)
    return _PlannedEntry(frontier, None, plan, perf_counter() - begin_s)


def _planned_by_envpipe(planner: EnvPipe, frontier: Frontier) -> tuple[_PlannedEntry, EnvPipeRun]:
    """EnvPipe's plan, with the iterations that led to it."""
    begin_s = perf_counter()
    run = planner.run(frontier)
    plan = planner.plan_of_replay(frontier, run.replay)
    return _PlannedEntry(frontier, None, plan, perf_counter() - begin_s), run


def _planned_by_us(
    our_plan: _OurPlan, frontier: Frontier, envpipe_frontier: Frontier, straggler_s: float | None
) -> list[_PlannedEntry]:
    """Our plans at T_min, T_star and for a straggler, in the order of time, and on EnvPipe's order.

    A straggler that is no slower than T_min has no plan of its own.
    """

    def entry(traced: Frontier, target: _Target) -> _PlannedEntry:
        begin_s = perf_counter()
        waits = target.point == "straggler"
        plan = our_plan(traced, s_from_ns(target.time_ns), waits=waits)
        planning_time_s = perf_counter() - begin_s + traced.trace_seconds
        return _PlannedEntry(traced, target.point, plan, planning_time_s)

    t_min = _Target(frontier.min_time_ns, "T_min")
    t_star = _Target(frontier.min_energy_time_ns, "T_star")
    straggler = _Target(ns_from_s_floor(straggler_s or 0.0), "straggler")
    later = sorted(target for target in (t_star, straggler) if target.time_ns > t_min.time_ns)
    entries = [entry(frontier, target) for target in (t_min, *later)]
    if envpipe_frontier is not frontier:
        entries.append(entry(envpipe_frontier, _Target(envpipe_frontier.min_time_ns, "T_min")))
    return entries


def _entries(
    planned: Sequence[_PlannedEntry], our_plan: _OurPlan, fastest: Plan, straggler_s: float | None
) -> tuple[Entry, ...]:
    """Set every plan beside ours for the same time, and beside maximum frequency.

    Args:
        fastest: the plan of maximum frequency.
    """
    our_plans = [_ours_in_same_time(entry, our_plan) for entry in planned]
    baseline = fastest.predicted.baseline
    entries = []
    for entry, ours in zip(planned, our_plans, strict=True):
        time_s, energy_j = entry.plan.iteration_time, entry.plan.energy
        outcome = None
        if straggler_s is not None:
            # A plan that is slower than the straggler is one itself.
            end_s = max(straggler_s, time_s)
            rivals = [our_plan(entry.frontier, end_s, waits=True)]
            for rival, rival_plan in zip(planned, our_plans, strict=True):
                if rival.frontier is entry.frontier:
                    rivals.append(rival_plan)
            usual_j = _energy_until(fastest, straggler_s)
            outcome = _straggler_outcome(entry, ours, rivals, end_s, usual_j)
        slower_s = time_s - baseline.iteration_time_s
        entries.append(
            Entry(
                point=entry.point,
                plan=entry.plan,
                ours=ours,
                slowdown_percent=percent(slower_s, baseline.iteration_time_s),
                savings_percent=percent(baseline.energy_j - energy_j, baseline.energy_j),
                intrinsic_bloat_j=energy_j - ours.energy,
                planning_time_s=entry.planning_time_s,
                with_straggler=outcome,
            )
        )
    return tuple(entries)


def _ours_in_same_time(entry: _PlannedEntry, our_plan: _OurPlan) -> Plan:
    """Our plan for the time of an entry's, which is the entry's own where that is ours."""
    if entry.point is not None:
        return entry.plan
    return our_plan(entry.frontier, entry.plan.iteration_time, waits=False)


def _straggler_outcome(
    entry: _PlannedEntry, ours: Plan, rivals: Iterable[Plan], end_s: float, usual_j: float
) -> StragglerOutcome:
    """A plan until everybody is finished.

    Args:
        ours: our plan for the time of the entry's.
        rivals: plans of the same pipeline, of which the best in time is the least bloated.
        end_s: when everybody is finished, s.
        usual_j: what maximum frequency uses until the straggler has finished, J.
    """
    frontier = entry.frontier
    least_j = min(_energy_until(plan, end_s) for plan in rivals if plan.iteration_time <= end_s)
    bound_10fj = max(0, frontier.waiting_bound_10fj(ns_from_s(end_s)))
    until = until_straggler(entry.plan, end_s, j_from_10fj(bound_10fj * frontier.num_gpus))
    return StragglerOutcome(
        extrinsic_bloat_j=_energy_until(ours, end_s) - least_j,
        energy_j=until.energy_j,
        savings_percent=percent(usual_j - until.energy_j, usual_j),
        gap=until.gap,
    )


def _energy_until(plan: Plan, sync_time_s: float) -> float:
    """J until everyone is finished: the plan, and its waiting for a straggler."""
    return plan.energy + plan.waiting_energy(sync_time_s)


def _own_frontier(planner: ZeusPlanner, frontier: Frontier) -> list[TimeEnergy]:
    """The frontier of a planner that has one of its own, ascending time."""
    return [
        TimeEnergy(
            s_from_ns(replay.makespan_ns), j_from_10fj(replay.energy_10fj * frontier.num_gpus)
        )
        for replay in planner.undominated_replays(frontier)
    ]
