"""How a running fleet goes over to another one: what starts, what is re-sharded, what leaves.

A change never takes away what serves. What is too much leaves at once if nothing else changes.
Otherwise GPUs are re-sharded in place, batch after batch: as many GPUs as are re-sharded at a time
are started beforehand, unless there are more than enough, and serve meanwhile. Where too few GPUs
are free for that, a batch leaves without a substitute.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from envplan.serving.settings import Settings
from envplan.serving.transfers import transfer_plan

#: Batches in which a fleet is re-sharded, one after another, each at least an instance.
_RESHARD_BATCHES: Final = 8


class InstanceStart(NamedTuple):
    """An instance that is to be started.

    Attributes:
        pool: the engine's number of its pool.
        size: the engine's number of its size.
        clock: the engine's number of its clock, among those of its size.
        dynamic_clock: whether the clock follows the load.
        gpus: of the instance.
    """

    pool: int
    size: int
    clock: int
    dynamic_clock: bool
    gpus: int


class SurplusInstance(NamedTuple):
    """A running instance that no pool wants: the engine's number of it, and its GPUs."""

    number: int
    gpus: int


@dataclass(frozen=True)
class TransitionStep:
    """A part of a change.

    Attributes:
        time_s: when.
        retire: instances that leave, by the engine's numbers.
        start: what their GPUs become.
    """

    time_s: float
    retire: list[int] = field(default_factory=list)
    start: list[InstanceStart] = field(default_factory=list)


@dataclass(frozen=True)
class Transition:
    """A change from one fleet to another.

    Attributes:
        fresh_starts: instances that start on free GPUs at once.
        steps: what follows, in order of time.
        copies_moved: weights that GPUs send each other, in whole copies of the model.
        num_unstarted: instances that are still missing when all is done; there were too few GPUs.
    """

    fresh_starts: list[InstanceStart]
    steps: list[TransitionStep]
    copies_moved: float
    num_unstarted: int


def plan_transition(
    missing: Sequence[InstanceStart],
    surplus: Sequence[SurplusInstance],
    *,
    num_free_gpus: int,
    now_s: float,
    settings: Settings,
) -> Transition:
    """Plan a change: fresh starts first, then re-sharding in batches, then the surplus retires.

    Args:
        missing: instances that the new fleet lacks.
        surplus: running instances that it does not want.
        num_free_gpus: GPUs of the fleet without an instance.
        now_s: when the change begins.
        settings: how long starts and re-sharding take.
    """
    batch_gpus = _batch_gpus(missing, surplus)
    lacking_gpus = _total_gpus(missing) - _total_gpus(surplus)
    fresh_gpus = min(max(0, lacking_gpus + batch_gpus), num_free_gpus)
    num_fresh = _num_that_fit(missing, fresh_gpus)
    fresh_starts, to_reshard = list(missing[:num_fresh]), list(missing[num_fresh:])
    # Re-sharding waits until the fresh instances serve in place of the batch.
    step_time_s = now_s + settings.startup_s if fresh_starts else now_s
    remaining = list(surplus)
    steps: list[TransitionStep] = []
    copies_moved = 0.0
    while to_reshard:
        retiring = _take_gpus(remaining, batch_gpus)
        num_starting = _num_that_fit(to_reshard, _total_gpus(retiring))
        if num_starting == 0:
            unused_gpus = num_free_gpus - _total_gpus(fresh_starts) + _total_gpus(retiring)
            if to_reshard[0].gpus <= unused_gpus:
                # With free GPUs they make an instance, which starts when they have left.
                steps.append(TransitionStep(step_time_s, _numbers(retiring)))
            break  # otherwise these serve on until the next change
        starting, to_reshard = to_reshard[:num_starting], to_reshard[num_starting:]
        copies_moved += _copies_moved(retiring, starting)
        steps.append(TransitionStep(step_time_s, _numbers(retiring), starting))
        step_time_s += settings.reshard_s
    steps.append(TransitionStep(step_time_s, _numbers(remaining)))
    return Transition(fresh_starts, steps, copies_moved, num_unstarted=len(to_reshard))


def _numbers(instances: Sequence[SurplusInstance]) -> list[int]:
    return [instance.number for instance in instances]


def _total_gpus(instances: Sequence[InstanceStart] | Sequence[SurplusInstance]) -> int:
    return sum(instance.gpus for instance in instances)


def _batch_gpus(missing: Sequence[InstanceStart], surplus: Sequence[SurplusInstance]) -> int:
    """GPUs that are re-sharded at a time; 0 if nothing is."""
    if not (missing and surplus):
        return 0
    largest = max(_largest_gpus(missing), _largest_gpus(surplus))
    return max(largest, math.ceil(_total_gpus(missing) / _RESHARD_BATCHES))


def _largest_gpus(instances: Sequence[InstanceStart] | Sequence[SurplusInstance]) -> int:
    return max(instance.gpus for instance in instances)


def _num_that_fit(starts: Sequence[InstanceStart], num_gpus: int) -> int:
    """How many of the first instances fit on so many GPUs together."""
    num_fitting = 0
    for start in starts:
        if start.gpus > num_gpus:
            break
        num_gpus -= start.gpus
        num_fitting += 1
    return num_fitting


def _take_gpus(instances: list[SurplusInstance], num_gpus: int) -> list[SurplusInstance]:
    """Remove instances from the list's begin until they have so many GPUs, or all are removed."""
    taken_gpus = num_taken = 0
    while num_taken < len(instances) and taken_gpus < num_gpus:
        taken_gpus += instances[num_taken].gpus
        num_taken += 1
    batch = instances[:num_taken]
    del instances[:num_taken]
    return batch


def _copies_moved(retiring: Sequence[SurplusInstance], starting: Sequence[InstanceStart]) -> float:
    old_tps = sorted((instance.gpus for instance in retiring), reverse=True)
    new_tps = sorted((start.gpus for start in starting), reverse=True)
    return transfer_plan(tuple(old_tps), tuple(new_tps)).copies_moved
