"""The operations of one rank in their planned order, with the clocks to request for them.

The clock of an operation is asked for as it begins, or ahead of that. Those of its parts are asked
for as each begins, or a planned time after that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import MappingProxyType

from envplan.clocks import ClockRequest, parse_clock_requests
from envplan.enforce.freqplan import FrequencyPlan, OperationKey, RankPlan
from envplan.runtime.ask_ahead import TimerTable, operation_times
from envplan.units import ns_from_s

__all__ = ["RankSchedule", "ScheduledOperation", "rank_schedules"]


@dataclass(frozen=True, slots=True)
class ScheduledOperation:
    """An operation with the clocks to request for it.

    Attributes:
        key: which operation.
        is_backward: whether it is a backward, or one of the two halves of one.
        frequency_mhz: the clock that it begins with; 0 leaves the clock as it is.
        config: as the plan has it; of an operation by parts, the clocks of these.
        first_config: the config that training runs it with at its begin.
        part_requests: made as a part of it begins, by the part's name.
    """

    key: OperationKey
    is_backward: bool
    frequency_mhz: int
    config: str
    first_config: str
    part_requests: Mapping[str, tuple[ClockRequest, ...]]


@dataclass(frozen=True)
class RankSchedule:
    """One of the plans that a rank may follow: the plan itself or a rung of its ladder.

    Attributes:
        iteration_time_s: planned, s.
        operations: in execution order.
        timer_table: when clocks are asked for ahead; None: as operations begin.
    """

    iteration_time_s: float
    operations: tuple[ScheduledOperation, ...]
    timer_table: TimerTable | None = None

    @cached_property
    def num_microbatches(self) -> int:
        """How many microbatches an iteration has."""
        return 1 + max((operation.key.microbatch for operation in self.operations), default=-1)

    @cached_property
    def kinds(self) -> frozenset[tuple[str, int]]:
        """Instruction and chunk of its operations."""
        return frozenset(
            (operation.key.instruction, operation.key.chunk) for operation in self.operations
        )

    @cached_property
    def num_clocked(self) -> int:
        """How many of its operations have a clock."""
        return sum(operation.frequency_mhz > 0 for operation in self.operations)

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
    operations = [_scheduled_operations(keys, rank.frequencies, rank.configs)]
    times_s = [plan.iteration_time_s]
    for rung in plan.ladder or []:
        frequencies = rung.frequencies_mhz[rank.stage]
        configs = rung.configs_of(rank.stage)
        operations.append(_scheduled_operations(keys, frequencies, configs))
        times_s.append(rung.iteration_time_s)
    return [
        RankSchedule(time_s, of_schedule, _timer_table(plan, number, rank.stage, of_schedule))
        for number, (time_s, of_schedule) in enumerate(zip(times_s, operations, strict=True))
    ]


def _timer_table(
    plan: FrequencyPlan, number: int, stage: int, operations: Sequence[ScheduledOperation]
) -> TimerTable | None:
    """When the clocks of a schedule are asked for ahead; None: they are not.

    Args:
        plan: the frequency plan.
        number: of the schedule, 0 for the plan itself.
        stage: of the pipeline.
        operations: of the schedule.
    """
    switching = plan.switching
    if switching is None:
        return None
    times = switching.times_of(number, stage)
    if times is None:
        return None
    latencies_s = [switching.latency_to(operation.frequency_mhz) for operation in operations]
    latencies_s.append(switching.latency_s)  # for the highest clock after the last
    return TimerTable(operation_times(times), [ns_from_s(latency_s) for latency_s in latencies_s])


def _scheduled_operations(
    keys: Sequence[OperationKey], frequencies: Sequence[int], configs: Sequence[str] | None
) -> tuple[ScheduledOperation, ...]:
    all_configs = configs or [""] * len(keys)
    return tuple(map(_scheduled_operation, keys, frequencies, all_configs))


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
        part_requests=part_requests,
    )


@lru_cache(maxsize=65536)
def _part_requests(config: str) -> Mapping[str, tuple[ClockRequest, ...]]:
    """The requests of each part that a config names, in its order; none of a plain label."""
    requests: dict[str, list[ClockRequest]] = {}
    for request in parse_clock_requests(config):
        requests.setdefault(request.part, []).append(request)
    return MappingProxyType({part: tuple(of_part) for part, of_part in requests.items()})
