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
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

import numpy as np

from envplan.errors import InputError, shown
from envplan.pipeline import Pipeline
from envplan.pipeline.schedules import fitting_ahead
from envplan.pipeline.spec import whole_number
from envplan.planners.base import Planner
from envplan.profile import Profile
from envplan.replay import Problem, Replay, Rows
from envplan.solve import Frontier
from envplan.solve.uniform_clocks import ClockOptions, all_clocks

Reconfigure = Literal["balanced", "greedy"]
Stop = Literal["outer envelope", "highest clocks"]

#: How many clocks `greedy` raises an operation by.
_GREEDY_STEPS = 3


@dataclass(frozen=True)
class EnvPipeRun:
    """The iterations of EnvPipe's planner.

    Attributes:
        choices: the options of each iteration, (N,), before it raised a clock.
        stopped: why the last iteration was the last: the critical path was the outer envelope, or
            had no clock left to raise.
        replay: of the last iteration.
    """

    choices: tuple[Rows, ...]
    stopped: Stop
    replay: Replay


class EnvPipe(Planner):
    """EnvPipe's planner; it takes the pipeline as it is, rescheduled or not.

    It keeps to the highest clocks' time.

    Args:
        reconfigure: which clocks of the critical path are raised: `balanced`, by one step, those of
            all operations at the path's lowest clock; `greedy`, by three steps, that of the last
            operation that is not at its highest clock yet.
    """

    name = "envpipe"

    def __init__(self, reconfigure: str = "balanced") -> None:
        if reconfigure not in get_args(Reconfigure):
            names = ", ".join(get_args(Reconfigure))
            raise InputError(f"unknown way to reconfigure {shown(reconfigure)}; known: {names}")
        self.reconfigure = reconfigure

    def choose(self, frontier: Frontier, target_time_ns: int | None) -> Replay:
        """Choose the clocks of the last iteration."""
        return self.run(frontier).replay

    def run(self, frontier: Frontier) -> EnvPipeRun:
        """Iterate until the critical path is the outer envelope or has only highest clocks."""
        problem, pipeline = frontier.problem, frontier.pipeline
        clocks = OperationClocks(problem)
        on_envelope = _on_outer_envelope(pipeline)
        levels = _first_levels(problem, clocks, on_envelope)
        choices: list[Rows] = []
        while True:
            choices.append(clocks.choice_at(levels))
            replay = problem.replay(choices[-1])
            path = replay.critical_path
            if all(on_envelope[i] for i in path):
                return EnvPipeRun(tuple(choices), "outer envelope", replay)
            raisable = [i for i in path if levels[i] < clocks.of_operation[i].top]
            if not raisable:
                return EnvPipeRun(tuple(choices), "highest clocks", replay)
            self._raise_clocks(levels, clocks, raisable)

    def _raise_clocks(
        self, levels: list[int], clocks: OperationClocks, raisable: Sequence[int]
    ) -> None:
        """Raise levels, in place, of some operations of the critical path.

        Args:
            raisable: those below their highest clock, in the order of time.
        """
        steps = 1
        if self.reconfigure == "greedy":
            steps = _GREEDY_STEPS
            raised = [raisable[-1]]
        else:
            lowest_mhz = min(clocks.mhz_at(i, levels[i]) for i in raisable)
            raised = [i for i in raisable if clocks.mhz_at(i, levels[i]) == lowest_mhz]
        for i in raised:
            levels[i] = min(levels[i] + steps, clocks.of_operation[i].top)


class OperationClocks:
    """The clocks of every operation, numbered from its lowest: a level is such a number.

    Attributes:
        of_operation: the clocks of each operation, (N,).
    """

    def __init__(self, problem: Problem) -> None:
        of_table = [ClockOptions.of(table) for table in problem.tables]
        self.of_operation: list[ClockOptions] = [of_table[k] for k in problem.table.tolist()]

    def mhz_at(self, operation: int, level: int) -> int:
        """The clock of an operation at a level, MHz."""
        return self.of_operation[operation].mhz[level]

    def choice_at(self, levels: Sequence[int]) -> Rows:
        """The options of all operations at their levels, int32 (N,)."""
        choice = np.empty(len(levels), np.int32)
        for i, level in enumerate(levels):
            choice[i] = self.of_operation[i].option[level]
        return choice


def _on_outer_envelope(pipeline: Pipeline) -> list[bool]:
    """Whether each operation is on the last stage or is the first or last of its stage, (N,)."""
    on_envelope = [op.stage == pipeline.num_stages - 1 for op in pipeline.operations]
    for begin, end in pairwise(pipeline.stage_begin.tolist()):
        on_envelope[begin] = True
        on_envelope[end - 1] = True
    return on_envelope


def _first_levels(
    problem: Problem, clocks: OperationClocks, on_envelope: Sequence[bool]
) -> list[int]:
    """The outer envelope at the highest clocks, everything else at its stage's valley, (N,)."""
    valleys_mhz = []
    for begin, end in pairwise(problem.pipeline.stage_begin.tolist()):
        # Operations that share a table share its clocks, one object.
        operations_by_clocks = Counter(clocks.of_operation[begin:end])
        valleys_mhz.append(_valley_mhz(list(operations_by_clocks.items())))
    levels = []
    for i, stage in enumerate(problem.stage.tolist()):
        operation_clocks = clocks.of_operation[i]
        if on_envelope[i]:
            levels.append(operation_clocks.top)
        else:
            levels.append(operation_clocks.at_least(valleys_mhz[stage]))
    return levels


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
    num_stages = profile.num_stages
    stage_slots = _slots_of_stages(num_stages, num_microbatches, activation_slots)
    fitting = []
    for stage, slots in enumerate(stage_slots):
        needed = min(num_stages - stage, num_microbatches)
        if whole_number(slots, f"activation slots of stage {stage}", least=0) < needed:
            raise InputError(
                f"activation slots: stage {stage} has {slots}, but 1F1B alone keeps {needed} "
                "microbatches there"
            )
        forward = ClockOptions.of(profile.table(stage, "forward"))
        backward = ClockOptions.of(profile.table(stage, "backward"))
        valley = forward.at_least(_valley_mhz([(forward, 1), (backward, 1)]))
        wait_ns = backward.time_ns[backward.top] * (num_stages - stage - 1)
        fitting.append(min(wait_ns // forward.time_ns[valley], slots - needed))
    return tuple(fitting_ahead(fitting, num_microbatches))


def _slots_of_stages(
    num_stages: int, num_microbatches: int, activation_slots: int | Sequence[int] | None
) -> list[int]:
    """Activation slots of each stage, (num_stages,)."""
    if activation_slots is None:
        return [num_microbatches] * num_stages
    if isinstance(activation_slots, int):
        return [activation_slots] * num_stages
    slots = list(activation_slots)
    if len(slots) == 1:
        return slots * num_stages
    if len(slots) != num_stages:
        raise InputError(
            f"activation slots: {len(slots)} numbers for {num_stages} stages; give one for all or "
            "one for each"
        )
    return slots


def _valley_mhz(operations: Sequence[tuple[ClockOptions, int]]) -> int:
    """The clock at which operations use least energy together; of several the highest, MHz.

    Args:
        operations: clocks, and how many operations have them.
    """

    def energy_10fj(mhz: int) -> int:
        return sum(count * clocks.energy_10fj[clocks.at_least(mhz)] for clocks, count in operations)

    clocks_mhz = all_clocks(clocks for clocks, _ in operations)
    return min(reversed(clocks_mhz), key=energy_10fj)
