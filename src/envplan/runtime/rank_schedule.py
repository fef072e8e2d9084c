"""The operations of one rank in their planned order, with the clocks to request for them.

Operations and parts of operations are alike here: each has requests that are made as it begins, or
a planned time after that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Final

from envplan.clocks import ClockRequest, parse_clock_requests
from envplan.enforce.freqplan import FrequencyPlan, OperationKey, RankPlan

__all__ = ["RankSchedule", "ScheduledOperation", "rank_schedules"]

#: The part of requests that are made for an operation as a whole.
_WHOLE_OPERATION: Final = ""


@dataclass(frozen=True, slots=True)
class ScheduledOperation:
    """An operation with the clocks to request for it.

    Attributes:
        key: which operation.
        is_backward: whether it is a backward, or one of the two halves of one.
        frequency_mhz: the clock that it begins with; 0 leaves the clock as it is.
        config: as the plan has it; of an operation by parts, the clocks of these.
        first_config: the config that training runs it with at its begin.
        begin_requests: made as it begins.
        part_requests: made as a part of it begins, by the part's name.
    """

    key: OperationKey
    is_backward: bool
    frequency_mhz: int
    config: str
    first_config: str
    begin_requests: tuple[ClockRequest, ...]
    part_requests: Mapping[str, tuple[ClockRequest, ...]]


@dataclass(frozen=True)
class RankSchedule:
    """One of the plans that a rank may follow: the plan itself or a rung of its ladder.

    Attributes:
        iteration_time_s: planned, s.
        operations: in execution order.
    """

    iteration_time_s: float
    operations: tuple[ScheduledOperation, ...]

    @property
    def part_names(self) -> frozenset[str]:
        """The parts of operations at whose begin it has requests."""
        names: set[str] = set()
        for operation in self.operations:
            names.update(operation.part_requests)
        return frozenset(names)


def rank_schedules(plan: FrequencyPlan, rank: RankPlan) -> list[RankSchedule]:
    """The schedules of a rank, by ascending iteration time: the plan, then its ladder.

    Args:
        plan: the frequency plan.
        rank: the part of it that is the rank's.
    """
    keys = [operation.key for operation in rank.operations]
    schedules = [_schedule(plan.iteration_time_s, keys, rank.frequencies, rank.configs)]
    for rung in plan.ladder or []:
        frequencies = rung.frequencies_mhz[rank.stage]
        configs = rung.configs_of(rank.stage)
        schedules.append(_schedule(rung.iteration_time_s, keys, frequencies, configs))
    return schedules


def _schedule(
    iteration_time_s: float,
    keys: Sequence[OperationKey],
    frequencies: Sequence[int],
    configs: Sequence[str] | None,
) -> RankSchedule:
    all_configs = configs or [""] * len(keys)
    operations = map(_scheduled_operation, keys, frequencies, all_configs)
    return RankSchedule(iteration_time_s, tuple(operations))


def _scheduled_operation(key: OperationKey, mhz: int, config: str) -> ScheduledOperation:
    part_requests = _part_requests(config)
    first_part = next(iter(part_requests.values()), None)
    first_config = config if first_part is None else first_part[0].config
    return ScheduledOperation(
        key=key,
        is_backward=key.instruction.startswith("backward"),
        frequency_mhz=mhz,
        config=config,
        first_config=first_config,
        begin_requests=(ClockRequest(_WHOLE_OPERATION, mhz, config),) if mhz else (),
        part_requests=part_requests,
    )


@lru_cache(maxsize=65536)
def _part_requests(config: str) -> Mapping[str, tuple[ClockRequest, ...]]:
    """The requests of each part that a config names, in its order; none of a plain label."""
    requests: dict[str, list[ClockRequest]] = {}
    for request in parse_clock_requests(config):
        requests.setdefault(request.part, []).append(request)
    return MappingProxyType({part: tuple(of_part) for part, of_part in requests.items()})
