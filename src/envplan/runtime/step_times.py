"""The times of a step's operations and of its changes of clock, as the run log has them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import NamedTuple

from envplan.runtime.ask_ahead import WaitAndDuration
from envplan.runtime.runlog import ChangeTimes, OperationTimes
from envplan.runtime.step_accounting import AccountedStep, OperationSpan
from envplan.runtime.timestamps import seconds_between

__all__ = ["SpanTime", "change_times", "span_times", "times_by_kind", "waits_and_durations"]


class SpanTime(NamedTuple):
    """When an operation began and ended, s from the begin of its step."""

    begin_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        """How long it took."""
        return self.end_s - self.begin_s


def span_times(spans: Sequence[OperationSpan]) -> list[SpanTime]:
    """The times of a step's operations; waits until the device has passed the last."""
    step_begin = spans[0].begin
    seconds_between(step_begin, spans[-1].end)  # from here on there is nothing to wait for
    times = []
    for span in spans:
        begin_s = seconds_between(step_begin, span.begin)
        times.append(SpanTime(begin_s, begin_s + seconds_between(span.begin, span.end)))
    return times


def waits_and_durations(times: Sequence[SpanTime]) -> list[WaitAndDuration]:
    """The times of a step's operations, as timers count them."""
    shown = []
    previous_end_s = 0.0
    for time in times:
        wait_ns = max(0, round(1e9 * (time.begin_s - previous_end_s)))
        shown.append(WaitAndDuration(wait_ns, round(1e9 * time.duration_s)))
        previous_end_s = time.end_s
    return shown


def times_by_kind(
    accounted: AccountedStep, times: Sequence[SpanTime], late: Collection[int]
) -> list[OperationTimes]:
    """The times of a step's operations, one for each instruction, chunk, clock and config.

    Args:
        accounted: the step.
        times: of its operations.
        late: positions of the operations whose clock came too late: they count as without one.
    """
    times_s: dict[tuple[str, int, int, str], list[float]] = defaultdict(list)
    operations = zip(accounted.step.schedule.operations, accounted.clocks_mhz, times, strict=True)
    for position, (operation, mhz, time) in enumerate(operations):
        key = operation.key
        clock_mhz = 0 if position in late else mhz
        kind = (key.instruction, key.chunk, clock_mhz, operation.config)
        times_s[kind].append(time.duration_s)
    return [
        OperationTimes(
            instruction=instruction,
            chunk=chunk,
            frequency_mhz=mhz,
            num_operations=len(kind_s),
            mean_s=sum(kind_s) / len(kind_s),
            min_s=min(kind_s),
            config=config,
        )
        for (instruction, chunk, mhz, config), kind_s in times_s.items()
    ]


def change_times(accounted: AccountedStep, times: Sequence[SpanTime]) -> list[ChangeTimes]:
    """The times of a step's changes of clock, to the microsecond."""
    changes = []
    for change in accounted.changes:
        wanted_s = times[change.position].begin_s
        seen_s = None
        if change.seen_after_s is not None:
            seen_s = round(wanted_s + change.seen_after_s, 6)
        changes.append(
            ChangeTimes(
                position=change.position,
                frequency_mhz=change.frequency_mhz,
                wanted_s=round(wanted_s, 6),
                asked_s=round(wanted_s + change.asked_after_s, 6),
                seen_s=seen_s,
            )
        )
    return changes
