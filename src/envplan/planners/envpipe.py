"""EnvPipe (Choi et al., "EnvPipe: Performance-preserving DNN Training Framework for Saving
Energy", USENIX ATC 2023): its schedule and its planner.

The schedule lets early stages run further ahead, so that bubbles lie where they can be used. The
planner begins with the outer envelope (all of the last stage, each stage's first forward and last
backward) at the highest clock and everything else at its stage's valley, the clock of least energy.
Then, iteration by iteration, it finds the critical path and raises clocks on it, until the path is
the outer envelope or has no clock left to raise. EnvPipe runs the iterations; here they are
replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from envplan.errors import InputError, shown
from envplan.pipeline import Pipeline
from envplan.pipeline.formats import whole_number
from envplan.pipeline.graph import predecessors
from envplan.pipeline.schedules import fitting_ahead
from envplan.plan import Plan, build_plan
from envplan.plan.model import Target
from envplan.planners.base import all_clocks, clocks_of_operations, refuse_target
from envplan.profile import Profile
from envplan.replay import Replay
from envplan.solve import Frontier
from envplan.solve.single_clocks import ClockRows
from envplan.units import j_from_fj, s_from_ns

Reconfigure = Literal["balanced", "greedy"]
Stop = Literal["outer envelope", "highest clocks"]

_GREEDY_STEPS = 3


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
    slots = _slots_by_stage(activation_slots, stages, num_microbatches)
    wanted = []
    for stage in range(stages):
        forward = ClockRows.of(profile.table(stage, "forward"))
        backward = ClockRows.of(profile.table(stage, "backward"))
        valley = forward.at_least(_valley([(forward, 1), (backward, 1)]))
        wait_ns = backward.time_ns[backward.top] * (stages - stage - 1)
        fitting = wait_ns // forward.time_ns[valley]
        free = slots[stage] - min(stages - stage, num_microbatches)
        wanted.append(min(fitting, free))
    return tuple(fitting_ahead(wanted, num_microbatches))


def _slots_by_stage(
    activation_slots: int | Sequence[int] | None, stages: int, microbatches: int
) -> list[int]:
    if activation_slots is None:
        return [microbatches] * stages
    listed = [activation_slots] * stages if isinstance(activation_slots, int) else activation_slots
    if len(listed) != stages:
        raise InputError(
            f"activation slots: {len(listed)} numbers for {stages} stages; give one for all or "
            "one for each"
        )
    for stage, slots in enumerate(listed):
        needed = min(stages - stage, microbatches)
        if whole_number(slots, f"activation slots of stage {stage}", least=0) < needed:
            raise InputError(
                f"activation slots: stage {stage} has {slots}, but 1F1B alone keeps {needed} "
                "microbatches there"
            )
    return list(listed)


def _valley(work: Sequence[tuple[ClockRows, int]]) -> int:
    """The clock, MHz, at which some operations, each done so many times, use least energy.

    Of several such clocks the highest.
    """
    return min(
        reversed(all_clocks([clocks for clocks, _ in work])),
        key=lambda mhz: sum(n * clocks.energy_fj[clocks.at_least(mhz)] for clocks, n in work),
    )


@dataclass(frozen=True)
class Iteration:
    """One iteration of the planner, before it raised anything.

    Attributes:
        iteration_time: replayed makespan, s.
        energy: over all GPUs, J.
        critical_path: indices of the operations on it, from the last to the first.
        raised: (operation, MHz before, MHz after) of each operation raised; none in the last
            iteration.
    """

    iteration_time: float
    energy: float
    critical_path: tuple[int, ...]
    raised: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class EnvPipeRun:
    """What the planner did.

    Attributes:
        iterations: all of them, in order.
        stopped: why the last one was the last: the critical path was the outer envelope, or it had
            nothing but highest clocks.
        replay: of the last iteration.
    """

    iterations: tuple[Iteration, ...]
    stopped: Stop
    replay: Replay

    @property
    def name(self) -> str:
        return EnvPipe.name

    @property
    def takes_target(self) -> bool:
        return False

    def to_dict(self, pipeline: Pipeline) -> dict[str, Any]:
        """Its iterations in JSON types; pipeline is the one that was planned."""
        operations = pipeline.operations
        return {
            "forwards_ahead": list(pipeline.forwards_ahead),
            "stopped": self.stopped,
            "iterations": [
                {
                    "iteration_time_s": iteration.iteration_time,
                    "energy_j": iteration.energy,
                    "critical_path": len(iteration.critical_path),
                    "raised": [
                        {
                            "stage": operations[i].stage,
                            "instruction": operations[i].instruction,
                            "microbatch": operations[i].microbatch,
                            "chunk": operations[i].chunk,
                            "from_mhz": before,
                            "to_mhz": after,
                        }
                        for i, before, after in iteration.raised
                    ],
                }
                for iteration in self.iterations
            ],
        }

    def plan(self, frontier: Frontier, target_time_ns: int | None = None) -> Plan:
        """The outcome as a plan; raises as EnvPipe.plan does."""
        refuse_target(self.name, target_time_ns)
        target = Target(kind="planner", deadline_s=s_from_ns(self.replay.makespan_ns))
        return build_plan(frontier, self.replay, target=target, planner=EnvPipe.name)


class EnvPipe:
    """EnvPipe's planner; it takes the pipeline as it is, rescheduled or not.

    Args:
        reconfigure: what is raised on the critical path: `balanced`, by a step, all operations of
            the path's lowest clock; `greedy`, by three steps, the last one that can be raised.
    """

    name: Final = "envpipe"
    takes_target: Final = False

    def __init__(self, reconfigure: str = "balanced") -> None:
        if reconfigure not in get_args(Reconfigure):
            known = ", ".join(get_args(Reconfigure))
            raise InputError(f"unknown way to reconfigure {shown(reconfigure)}; known: {known}")
        self.reconfigure = reconfigure

    def plan(self, frontier: Frontier, target_time_ns: int | None = None) -> Plan:
        """Raises: InputError: a target was given; EnvPipe keeps to the highest clocks' time."""
        refuse_target(self.name, target_time_ns)
        return self.run(frontier).plan(frontier)

    def run(self, frontier: Frontier) -> EnvPipeRun:
        """Plan, and keep what each iteration did."""
        state = _State(frontier)
        iterations: list[Iteration] = []
        while True:
            replay = frontier.problem.replay(state.rows())
            path = state.critical_path(replay)
            on_envelope = all(state.on_envelope[i] for i in path)
            raised = () if on_envelope else self._raise(state, path)
            energy = j_from_fj(replay.energy_fj * frontier.num_gpus)
            iterations.append(Iteration(s_from_ns(replay.makespan_ns), energy, tuple(path), raised))
            state.set_clocks(raised)
            if not raised:
                stopped: Stop = "outer envelope" if on_envelope else "highest clocks"
                return EnvPipeRun(tuple(iterations), stopped, replay)

    def _raise(self, state: _State, path: list[int]) -> tuple[tuple[int, int, int], ...]:
        """(operation, MHz before, MHz after) of what goes up."""
        raisable = [i for i in path if state.level[i] < state.clocks[i].top]
        if not raisable:
            return ()
        if self.reconfigure == "greedy":
            return (state.step(raisable[0], _GREEDY_STEPS),)
        lowest = min(state.mhz(i) for i in raisable)
        return tuple(state.step(i, 1) for i in raisable if state.mhz(i) == lowest)


class _State:
    """The clock of each operation, and what follows from it.

    Attributes:
        clocks: of each operation, (N).
        level: index into them, (N).
        on_envelope: whether each operation is part of the outer envelope, (N).
    """

    def __init__(self, frontier: Frontier) -> None:
        pipeline = frontier.pipeline
        self._stage = [op.stage for op in pipeline.operations]
        self._before = predecessors(pipeline)
        self.clocks = clocks_of_operations(pipeline, frontier.profile)
        self.on_envelope = _outer_envelope(pipeline)
        valleys = _valleys(pipeline, self.clocks)
        self.level = [
            clocks.top if envelope else clocks.at_least(valleys[stage])
            for clocks, envelope, stage in zip(
                self.clocks, self.on_envelope, self._stage, strict=True
            )
        ]

    def mhz(self, i: int) -> int:
        return self.clocks[i].mhz[self.level[i]]

    def step(self, i: int, steps: int) -> tuple[int, int, int]:
        """(i, its clock, the clock so many steps up, or the top)."""
        clocks = self.clocks[i]
        return i, self.mhz(i), clocks.mhz[min(self.level[i] + steps, clocks.top)]

    def set_clocks(self, raised: Sequence[tuple[int, int, int]]) -> None:
        for i, _, mhz in raised:
            self.level[i] = self.clocks[i].mhz.index(mhz)

    def rows(self) -> NDArray[np.int32]:
        """For each operation the row of its option table, (N,)."""
        rows = [one.row[level] for one, level in zip(self.clocks, self.level, strict=True)]
        return np.array(rows, np.int32)

    def critical_path(self, replay: Replay) -> list[int]:
        """From the operation that ends last (the first stage's last backward) backwards.

        An operation that did not wait comes after the one before it on its stage, any other one
        after the neighbour it waited for.
        """
        starts, finish = replay.starts_ns.tolist(), replay.finishes_ns.tolist()
        i = finish.index(max(finish))
        path = [i]
        while starts[i] > 0:
            if i and self._stage[i - 1] == self._stage[i] and finish[i - 1] == starts[i]:
                i -= 1
            else:
                i = next(j for j, lag in self._before[i] if finish[j] + lag == starts[i])
            path.append(i)
        return path


def _outer_envelope(pipeline: Pipeline) -> list[bool]:
    """Whether each operation is on the last stage, or the first or last one of its stage (its first
    forward, its last backward)."""
    first = set(pipeline.stage_begin[:-1].tolist())
    last = set((pipeline.stage_begin[1:] - 1).tolist())
    return [
        op.stage == pipeline.num_stages - 1 or i in first or i in last
        for i, op in enumerate(pipeline.operations)
    ]


def _valleys(pipeline: Pipeline, clocks: list[ClockRows]) -> list[int]:
    """The clock of least energy of each stage, MHz, (num_stages)."""
    counts: list[dict[ClockRows, int]] = [{} for _ in range(pipeline.num_stages)]
    for op, one in zip(pipeline.operations, clocks, strict=True):
        counts[op.stage][one] = counts[op.stage].get(one, 0) + 1
    return [_valley(list(stage.items())) for stage in counts]
