"""EnvPipe's planner and schedule.

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
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple, get_args

import numpy as np

from envplan.errors import InputError, shown
from envplan.pipeline.schedules import fitting_ahead
from envplan.pipeline.spec import whole_number
from envplan.planners.base import Planner
from envplan.profile import Profile
from envplan.replay import Replay, Rows
from envplan.solve import Frontier
from envplan.solve.single_clocks import ClockRows, all_clocks

Reconfigure = Literal["balanced", "greedy"]
Stop = Literal["outer envelope", "highest clocks"]

_GREEDY_STEPS = 3


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
