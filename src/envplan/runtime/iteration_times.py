"""The times of an iteration's operations and of its changes of clock, as the run log has them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass

from envplan.runtime.iteration_accounting import AccountedIteration, IterationSpans
from envplan.runtime.run_records import ChangeTimes, OperationTimes
from envplan.runtime.timestamps import ns_between

__all__ = ["MeasuredIteration", "change_times", "measure_iteration", "times_by_kind"]


@dataclass(frozen=True)
class MeasuredIteration:
    """The times of an iteration's operations, in execution order.

    Attributes:
        begins_ns: of each, from the begin of the first.
        durations_ns: of each.
    """

    begins_ns: list[int]
    durations_ns: list[int]

    def end_s(self, position: int) -> float:
        """When an operation ended, s from the begin of the first."""
        return (self.begins_ns[position] + self.durations_ns[position]) / 1e9

    def waits_ns(self) -> list[int]:
        """From the end of the operation before until each began."""
        waits_ns = []
        previous_end_ns = 0
        for begin_ns, duration_ns in zip(self.begins_ns, self.durations_ns, strict=True):
            wait_ns = begin_ns - previous_end_ns
            waits_ns.append(wait_ns if wait_ns > 0 else 0)
            previous_end_ns = begin_ns + duration_ns
        return waits_ns


def measure_iteration(spans: IterationSpans) -> MeasuredIteration:
    """The times of an iteration's operations; waits until the device has passed the last."""
    iteration_begin = spans.begins[0]
    ns_between(iteration_begin, spans.ends[-1])  # from here on there is nothing to wait for
    begins_ns = [ns_between(iteration_begin, begin) for begin in spans.begins]
    durations_ns = list(map(ns_between, spans.begins, spans.ends))
    return MeasuredIteration(begins_ns, durations_ns)


def times_by_kind(
    accounted: AccountedIteration, times: MeasuredIteration, late: Collection[int]
) -> list[OperationTimes]:
    """The times of an iteration's operations, one for each instruction, chunk, clock and config.

    Args:
        accounted: the iteration.
        times: of its operations.
        late: positions of the operations whose clock came too late: they count as without one.
    """
    durations_ns: dict[tuple[str, int, int, str], list[int]] = defaultdict(list)
    clocks_mhz = accounted.clocks_mhz
    for position in late:
        clocks_mhz[position] = 0
    operations = zip(
        accounted.iteration.schedule.operations, clocks_mhz, times.durations_ns, strict=True
    )
    for operation, mhz, duration_ns in operations:
        instruction, _, chunk = operation.key
        durations_ns[instruction, chunk, mhz, operation.config].append(duration_ns)
    return [
        OperationTimes(
            instruction=instruction,
            chunk=chunk,
            frequency_mhz=mhz,
            num_operations=len(of_kind_ns),
            mean_s=sum(of_kind_ns) / len(of_kind_ns) / 1e9,
            min_s=min(of_kind_ns) / 1e9,
            config=config,
        )
        for (instruction, chunk, mhz, config), of_kind_ns in durations_ns.items()
    ]


def change_times(accounted: AccountedIteration, times: MeasuredIteration) -> list[ChangeTimes]:
    """The times of an iteration's changes of clock that were sent, to the microsecond."""
    changes = []
    iteration = accounted.iteration
    last_id = iteration.request_ids.start - 1
    for position, request in enumerate(iteration.spans.requests):
        is_new = request is not None and request.request_id > last_id
        if request is None or not is_new:
            continue
        last_id = request.request_id
        if not request.due_ns or not request.wanted_ns:
            continue  # the device has not got there
        wanted_ns = times.begins_ns[position]
        asked_ns = wanted_ns + request.due_ns - request.wanted_ns
        lag_ns = accounted.lags_ns[position]
        changes.append(
            ChangeTimes(
                position=position,
                frequency_mhz=iteration.schedule.operations[position].frequency_mhz,
                wanted_s=_to_microseconds(wanted_ns),
                asked_s=_to_microseconds(asked_ns),
                seen_s=None if lag_ns is None else _to_microseconds(asked_ns + lag_ns),
            )
        )
    return changes


def _to_microseconds(time_ns: int) -> float:
    """A time in s, rounded to whole microseconds."""
    return (time_ns + 500) // 1000 / 1e6
