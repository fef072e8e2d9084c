"""Planners: ways to choose a frequency for every operation, all behind one protocol.

EnvPipe (Choi et al., "EnvPipe: Performance-preserving DNN Training Framework for Saving Energy",
USENIX ATC 2023) brings its own schedule, which lets early stages run further ahead, so that bubbles
lie where they can be used. Its planner begins with the outer envelope (all of the last stage, each
stage's first forward and last backward) at the highest clock and everything else at its stage's
valley, the clock of least energy. Then, iteration by iteration, it finds the critical path and
raises clocks on it, until the path is the outer envelope or has no clock left to raise. EnvPipe
runs the iterations; here they are replayed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import ClassVar, Final, Literal, NamedTuple, get_args

import numpy as np

from envplan.costs import priced
from envplan.errors import InputError, NoAnswerError, shown, unknown
from envplan.pipeline.formats import whole_number
from envplan.pipeline.schedules import fitting_ahead
from envplan.plan import Plan, build_plan, replay_plan
from envplan.plan.build import note_straggler
from envplan.plan.model import Target, TargetKind
from envplan.profile import Profile
from envplan.replay import Replay, Rows
from envplan.request import Effort, Request
from envplan.solve import Frontier
from envplan.solve.single_clocks import ClockRows, StageClocks, all_clocks
from envplan.units import ns_from_s_floor, s_from_ns

Reconfigure = Literal["balanced", "greedy"]
Stop = Literal["outer envelope", "highest clocks"]

_GREEDY_STEPS = 3


class Planner:
    """Chooses a frequency for every operation of a traced pipeline.

    Attributes:
        name: what the user calls it, and plan.json's `planner`.
        takes_target: whether plan() can be asked for a time; if not, it settles on one of its own.
        target_kind: what plan.json calls what it aims at.
    """

    name: ClassVar[str]
    takes_target: ClassVar[bool] = False
    target_kind: ClassVar[TargetKind] = "planner"

    def plan(self, frontier: Frontier, target_time_ns: int | None = None) -> Plan:
        """The planner's plan, replayed, priced and set against the frontier's lower bound.

        Args:
            target_time_ns: when the iteration must be over, ns; default: as fast as it can.

        Raises:
            NoAnswerError: the planner has no plan that fast; says its fastest.
            InputError: a target was given and the planner takes none.
        """
        if target_time_ns is not None and not self.takes_target:
            raise InputError(
                f"planner {self.name} takes no target: it settles on an iteration time of its own"
            )
        replay = self.choose(frontier, target_time_ns)
        deadline_ns = replay.makespan_ns if target_time_ns is None else target_time_ns
        target = Target(
            kind=self.target_kind,
            time_s=None if target_time_ns is None else s_from_ns(deadline_ns),
            deadline_s=s_from_ns(deadline_ns),
        )
        return build_plan(frontier, replay, target=target, planner=self.name)

    def choose(self, frontier: Frontier, target_time_ns: int | None) -> Replay:
        """The replay of what it chooses; the arguments are those of plan."""
        raise NotImplementedError


class MaxFrequency(Planner):
    """Every operation at its highest frequency: what happens without any planning."""

    name = "max_frequency"
    target_kind = "max-frequency"

    def choose(self, frontier: Frontier, target_time_ns: int | None) -> Replay:
        """That of all the highest clocks."""
        return frontier.problem.replay(frontier.problem.max_frequency_rows)


class _SingleClocks(Planner):
    """Plans of one clock a stage.

    Attributes:
        choices: rows to choose from.
    """

    takes_target = True
    choices: ClassVar[Callable[[StageClocks], Iterator[Rows]]]

    def candidates(self, frontier: Frontier) -> list[Replay]:
        """This planner's frontier, those that no other one beats: ascending time, descending
        energy."""
        problem, kept = frontier.problem, list[Replay]()
        replays = (problem.replay(rows) for rows in type(self).choices(StageClocks(problem)))
        for replay in sorted(replays, key=lambda one: (one.makespan_ns, one.energy_fj)):
            if not kept or replay.energy_fj < kept[-1].energy_fj:
                kept.append(replay)
        return kept

    def choose(self, frontier: Frontier, target_time_ns: int | None) -> Replay:
        """The slowest in time, which is the cheapest; without a target, the fastest."""
        fastest, *slower = self.candidates(frontier)
        deadline_ns = fastest.makespan_ns if target_time_ns is None else target_time_ns
        if fastest.makespan_ns > deadline_ns:
            raise NoAnswerError(
                f"planner {self.name} has no plan that finishes in {s_from_ns(deadline_ns):.9f} "
                f"s; its fastest takes {s_from_ns(fastest.makespan_ns):.9f} s"
            )
        return [fastest, *(one for one in slower if one.makespan_ns <= deadline_ns)][-1]


class ZeusGlobal(_SingleClocks):
    """One frequency for all stages: the ZeusGlobal baseline of Perseus (SOSP 2024).

    Perseus scans power limits, we scan clocks: each clock of the profile is one point of this
    planner's own frontier.
    """

    name = "zeus_global"
    choices = StageClocks.one_for_all


class ZeusPerStage(_SingleClocks):
    """A frequency for each stage that balances forward times: the ZeusPerStage baseline of Perseus
    (SOSP 2024).

    The stage whose fastest forward is the slowest sets the pace: each of its clocks is one point.
    All other stages take their lowest clock at which a forward takes no longer than there.
    Backwards run at their stage's clock; they need not balance, which is why this planner can be
    slower than maximum frequency everywhere.
    """

    name = "zeus_per_stage"
    choices = StageClocks.balanced


class FrontierPlanner(Planner):
    """The exact relaxation, rounded: Frontier.plan as a planner."""

    name = "frontier"
    takes_target = True

    def plan(self, frontier: Frontier, target_time_ns: int | None = None) -> Plan:
        """Raises: NoAnswerError: the target is below T_min."""
        return frontier.plan(None if target_time_ns is None else s_from_ns(target_time_ns))


class EnvPipeRun(NamedTuple):
    """What the planner did.

    Attributes:
        choices: the rows of each iteration, (N,), before it raised anything.
        stopped: why the last one was the last: the critical path was the outer envelope, or it had
            nothing but highest clocks.
        replay: of the last iteration.
    """

    choices: tuple[Rows, ...]
    stopped: Stop
    replay: Replay


class EnvPipe(Planner):
    """EnvPipe's planner; it takes the pipeline as it is, rescheduled or not.

    It keeps to the highest clocks' time.

    Args:
        reconfigure: what is raised on the critical path: `balanced`, by a step, all operations of
            the path's lowest clock; `greedy`, by three steps, the last one that can be raised.
    """

    name = "envpipe"

    def __init__(self, reconfigure: str = "balanced") -> None:
        if reconfigure not in get_args(Reconfigure):
            known = ", ".join(get_args(Reconfigure))
            raise InputError(f"unknown way to reconfigure {shown(reconfigure)}; known: {known}")
        self.reconfigure = reconfigure

    def choose(self, frontier: Frontier, target_time_ns: int | None) -> Replay:
        """The last replay of a run."""
        return self.run(frontier).replay

    def run(self, frontier: Frontier) -> EnvPipeRun:
        """Plan, once for a frontier, and keep what each iteration chose."""
        key = (self.name, self.reconfigure)
        known: EnvPipeRun | None = frontier.asked_once.get(key)
        if known is not None:
            return known
        problem, pipeline = frontier.problem, frontier.pipeline
        tables = [ClockRows.of(table) for table in problem.tables]
        clocks = [tables[number] for number in problem.table.tolist()]
        # All of the last stage, and the first and last operation of every stage.
        ends = {*pipeline.stage_begin[:-1].tolist(), *(pipeline.stage_begin[1:] - 1).tolist()}
        last_stage = pipeline.num_stages - 1
        on_envelope = [
            op.stage == last_stage or i in ends for i, op in enumerate(pipeline.operations)
        ]
        valleys = [
            _valley(list(Counter(clocks[first:last]).items()))
            for first, last in pairwise(pipeline.stage_begin.tolist())
        ]
        level = [
            own.top if envelope else own.at_least(valleys[stage])
            for own, envelope, stage in zip(
                clocks, on_envelope, problem.stage.tolist(), strict=True
            )
        ]
        choices: list[Rows] = []
        while True:
            choices.append(
                np.array([own.row[k] for own, k in zip(clocks, level, strict=True)], np.int32)
            )
            replay = problem.replay(choices[-1])
            path = replay.critical_path[::-1]
            mhz = {i: clocks[i].mhz[level[i]] for i in path if level[i] < clocks[i].top}
            outer = all(on_envelope[i] for i in path)
            if outer or not mhz:
                stopped: Stop = "outer envelope" if outer else "highest clocks"
                done = EnvPipeRun(tuple(choices), stopped, replay)
                frontier.asked_once[key] = done
                return done
            if self.reconfigure == "greedy":
                steps, raised = _GREEDY_STEPS, list(mhz)[:1]
            else:
                steps, raised = 1, [i for i in mhz if mhz[i] == min(mhz.values())]
            for i in raised:
                level[i] = min(level[i] + steps, clocks[i].top)


def forwards_ahead(
    profile: Profile,
    num_microbatches: int,
    activation_slots: int | Sequence[int] | None = None,
) -> tuple[int, ...]:
    """How many forwards more than in 1F1B each stage runs before its first backward.

    r_s = floor(t_backward(f_max) x (S - s - 1) / t_forward(f_valley)): as many forwards at the
    valley as fit into the wait for the first backward to come back. At most the stage's free
    activation slots and M - (S - s); never more than the stage before unless that one has no
    microbatches left; none on the last stage.

    Args:
        activation_slots: how many microbatches' activations fit into the memory of each stage, one
            number for all or one a stage; default: enough. 1F1B alone needs S - s of them.

    Raises:
        InputError: too few slots for 1F1B, or the profile lacks forward or backward.
    """
    stages = profile.num_stages
    given = num_microbatches if activation_slots is None else activation_slots
    slots = [given] if isinstance(given, int) else [*given]
    slots *= stages if len(slots) == 1 else 1
    if len(slots) != stages:
        raise InputError(
            f"activation slots: {len(slots)} numbers for {stages} stages; give one for all or "
            "one for each"
        )
    wanted = []
    for stage, own in enumerate(slots):
        needed = min(stages - stage, num_microbatches)
        if whole_number(own, f"activation slots of stage {stage}", least=0) < needed:
            raise InputError(
                f"activation slots: stage {stage} has {own}, but 1F1B alone keeps {needed} "
                "microbatches there"
            )
        forward = ClockRows.of(profile.table(stage, "forward"))
        backward = ClockRows.of(profile.table(stage, "backward"))
        valley = forward.at_least(_valley([(forward, 1), (backward, 1)]))
        wait_ns = backward.time_ns[backward.top] * (stages - stage - 1)
        wanted.append(min(wait_ns // forward.time_ns[valley], own - needed))
    return tuple(fitting_ahead(wanted, num_microbatches))


def _valley(work: Sequence[tuple[ClockRows, int]]) -> int:
    """The clock, MHz, at which some operations, each done so many times, use least energy.

    Of several such clocks the highest.
    """
    return min(
        reversed(all_clocks(clocks for clocks, _ in work)),
        key=lambda mhz: sum(n * clocks.energy_fj[clocks.at_least(mhz)] for clocks, n in work),
    )


#: Every planner by name, in the order in which they are compared.
PLANNERS: Final[dict[str, Planner]] = {
    planner.name: planner
    for planner in (MaxFrequency(), ZeusGlobal(), ZeusPerStage(), EnvPipe(), FrontierPlanner())
}


def planner_named(name: str) -> Planner:
    """The planner of that name.

    Raises:
        InputError: there is none; lists those there are.
    """
    if name not in PLANNERS:
        raise InputError(unknown("planner", name, PLANNERS))
    return PLANNERS[name]


def answer(planner: Planner, frontier: Frontier, request: Request) -> Plan:
    """A planner's plan for what a request says of times and costs.

    A straggler leaves those planners that take a target until it has finished.

    Raises:
        NoAnswerError: the planner has no plan that fast; says its fastest.
        InputError: more is asked for than the planner knows, a target where it takes none, or a
            rate ends before the run does.
    """
    if planner.name == "frontier":
        return frontier.solve(request)
    straggler_s, deadline = request.straggler_time_s, request.deadline
    beyond = request.limits or request.switch_latency_s or request.objective != "energy"
    if beyond or request.effort != Effort():
        raise InputError(
            f"planner {planner.name} knows times only: no limits, late clocks, cheapest runs, "
            "polishing or ladders; planner frontier does"
        )
    target_ns = None
    if deadline.kind != "no-slowdown":
        asked_ns = deadline.asked_ns(frontier.min_time_ns)
        target_ns = frontier.min_energy_time_ns if asked_ns is None else asked_ns
    plan = planner.plan(frontier, target_ns)
    if straggler_s is not None:
        if planner.takes_target:
            until_ns = max(ns_from_s_floor(straggler_s), plan.target.deadline_ns)
            plan = planner.plan(frontier, until_ns)
        replay = replay_plan(plan, frontier.profile)
        plan = note_straggler(plan, frontier, replay, straggler_s)
    return plan if request.run is None else priced(plan, request.run)
