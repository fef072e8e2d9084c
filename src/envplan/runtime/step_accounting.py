"""Joins the steps that followed the plan with the clocks that the guard has set for them.

A step is decided once its last clock request is carried out, or will not be soon: then it is known
of each of its operations whether it ran at its clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from envplan.runtime.clock_requester import ClockRequester
from envplan.runtime.rank_schedule import RankSchedule
from envplan.runtime.step_energy import EnergyTotals, StepEnergyMeter
from envplan.runtime.timestamps import Timestamp

__all__ = ["AccountedStep", "ClockChange", "FollowedStep", "OperationSpan", "StepAccounting"]


class OperationSpan(NamedTuple):
    """When an operation began and ended, and the clock request that it ran under.

    Attributes:
        begin: of the operation.
        end: of the operation.
        request_id: the number of the request that set the clock it ran at; 0: there was none.
    """

    begin: Timestamp
    end: Timestamp
    request_id: int


@dataclass(frozen=True)
class FollowedStep:
    """A step that followed its schedule to the end.

    Attributes:
        number: from 0.
        schedule: that it followed.
        spans: of its operations, in execution order.
        begin_ns: when the first of them was begun by the training thread, perf_counter_ns.
        end_ns: when the step was over for it.
        request_ids: the numbers of the requests that were made for its operations.
    """

    number: int
    schedule: RankSchedule
    spans: list[OperationSpan]
    begin_ns: int
    end_ns: int
    request_ids: range


class ClockChange(NamedTuple):
    """A change of clock that was made for an operation.

    Attributes:
        position: of the operation in its schedule.
        frequency_mhz: the clock.
        asked_after_s: from the begin of the operation until the clock was asked for, s; negative
            where that was ahead.
        seen_after_s: the same until the driver had set it; None: it was overtaken, or not set.
    """

    position: int
    frequency_mhz: int
    asked_after_s: float
    seen_after_s: float | None


@dataclass(frozen=True)
class AccountedStep:
    """A followed step with the clocks that were in force.

    Attributes:
        step: the step.
        clocks_mhz: of its operations; 0 where the planned clock was not set, or there is none.
        num_requested: operations with a planned clock.
        num_in_force: operations that had it.
        max_lag_s: the longest time from a request to the set clock.
        planned_s: iteration time of the plan that the clocks in force belong to: the followed one,
            though newer requests may have overtaken some; the fastest where clocks were not set.
        energy: of all steps so far.
        changes: of clocks that were sent to the guard, in execution order.
    """

    step: FollowedStep
    clocks_mhz: list[int]
    num_requested: int
    num_in_force: int
    max_lag_s: float
    planned_s: float
    energy: EnergyTotals
    changes: list[ClockChange]


class StepAccounting:
    """Knows which of a rank's steps are decided. Not thread-safe.

    Args:
        requester: whose guard sets the clocks.
        fastest: the plan itself, without stragglers.
        energy: counts the steps that followed it.
    """

    def __init__(
        self, requester: ClockRequester, fastest: RankSchedule, energy: StepEnergyMeter
    ) -> None:
        self._requester = requester
        self._guard = requester.guard
        self._fastest = fastest
        self._energy = energy
        self._undecided: deque[FollowedStep] = deque()

    def add(self, step: FollowedStep) -> None:
        """A step has been followed to its end."""
        self._undecided.append(step)

    def pass_over(self, last_request_id: int) -> None:
        """A step has not been followed to its end.

        Args:
            last_request_id: that was made until its end.
        """
        if not self._undecided:
            self._forget_requests_before(last_request_id)

    def read_reports(self) -> list[str]:
        """Read what the guard reports: its problems, a line each."""
        problems = self._requester.read_problems()
        if self._guard is not None:
            for reading in self._guard.readings:
                self._energy.add_reading(reading)
            self._guard.readings.clear()
        return problems

    def decided_steps(self) -> Iterator[AccountedStep]:
        """Take out the steps that are decided, in their order."""
        while self._undecided and self._is_decided(self._undecided[0]):
            step = self._undecided.popleft()
            yield self._account(step)
            self._forget_requests_before(step.request_ids.stop - 1)

    @property
    def num_undecided(self) -> int:
        """Steps that wait for the guard."""
        return len(self._undecided)

    def _is_decided(self, step: FollowedStep) -> bool:
        guard = self._guard
        if guard is None or guard.reports_closed or guard.failing:
            return True
        return guard.done >= step.request_ids.stop - 1

    def _account(self, step: FollowedStep) -> AccountedStep:
        guard = self._guard
        lags_ns = {} if guard is None or guard.lost else guard.lags
        operations = step.schedule.operations
        clocks_mhz = [
            operation.frequency_mhz if span.request_id in lags_ns else 0
            for operation, span in zip(operations, step.spans, strict=True)
        ]
        num_requested = sum(operation.frequency_mhz > 0 for operation in operations)
        num_in_force = sum(mhz > 0 for mhz in clocks_mhz)
        if step.schedule is self._fastest:
            self._energy.add_step(step.begin_ns, step.end_ns)
        in_force = step.schedule if self._had_its_clocks(step) else self._fastest
        step_lags_ns = [lags_ns.get(request_id, 0) for request_id in step.request_ids]
        return AccountedStep(
            step=step,
            clocks_mhz=clocks_mhz,
            num_requested=num_requested,
            num_in_force=num_in_force,
            max_lag_s=max(step_lags_ns, default=0) / 1e9,
            planned_s=in_force.iteration_time_s,
            energy=self._energy.totals,
            changes=list(self._changes(step, lags_ns)),
        )

    def _changes(self, step: FollowedStep, lags_ns: Mapping[int, int]) -> Iterator[ClockChange]:
        """The changes of clock of a step, each with the operation that it was made for."""
        due_ns, wanted_ns = self._requester.due_ns, self._requester.wanted_ns
        last_id = step.request_ids.start - 1
        operations = zip(step.schedule.operations, step.spans, strict=True)
        for position, (operation, span) in enumerate(operations):
            request_id = span.request_id
            is_new = request_id > last_id
            last_id = max(last_id, request_id)
            if not is_new or request_id not in due_ns or request_id not in wanted_ns:
                continue
            asked_after_ns = due_ns[request_id] - wanted_ns[request_id]
            lag_ns = lags_ns.get(request_id)
            seen_after_ns = None if lag_ns is None else asked_after_ns + lag_ns
            yield ClockChange(
                position=position,
                frequency_mhz=operation.frequency_mhz,
                asked_after_s=asked_after_ns / 1e9,
                seen_after_s=None if seen_after_ns is None else seen_after_ns / 1e9,
            )

    def _had_its_clocks(self, step: FollowedStep) -> bool:
        """Whether every request that an operation ran under was carried out, or overtaken."""
        last_done = 0 if self._guard is None or self._guard.lost else self._guard.done
        return all(
            operation.frequency_mhz == 0 or 0 < span.request_id <= last_done
            for operation, span in zip(step.schedule.operations, step.spans, strict=True)
        )

    def _forget_requests_before(self, request_id: int) -> None:
        """Forget when requests were due, wanted and set, before one that may still be in force."""
        if self._guard is not None:
            lags = self._guard.lags
            for old_id in [number for number in lags if number < request_id]:
                del lags[old_id]
        self._requester.forget_before(request_id)
