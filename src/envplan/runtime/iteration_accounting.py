"""Joins the iterations that followed the plan with the clocks that the guard has set for them.

An iteration is decided once its last clock request is carried out, or will not be soon: then it is
known of each of its operations whether it ran at its clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from envplan.runtime.clock_requester import ClockRequester, RequestedClock
from envplan.runtime.iteration_energy import EnergyTotals, IterationEnergyMeter
from envplan.runtime.rank_schedule import RankSchedule
from envplan.runtime.timestamps import Timestamp

__all__ = ["AccountedIteration", "FollowedIteration", "IterationAccounting", "IterationSpans"]


class IterationSpans:
    """When an iteration's operations began and ended, and the clock requests that they ran under.

    Three lists, for to make an object at each operation takes longer than to add to all of them.

    Attributes:
        begins: of the operations, in execution order.
        ends: of the operations.
        requests: that set the clock each ran at; None: there was none.
    """

    __slots__ = ("begins", "ends", "requests")

    def __init__(self) -> None:
        self.begins: list[Timestamp] = []
        self.ends: list[Timestamp] = []
        self.requests: list[RequestedClock | None] = []

    def add(self, begin: Timestamp, end: Timestamp, request: RequestedClock | None) -> None:
        """An operation has ended."""
        self.begins.append(begin)
        self.ends.append(end)
        self.requests.append(request)

    @property
    def last_request_id(self) -> int:
        """The number of the request that the last operation ran under; 0: there was none."""
        last = self.requests[-1] if self.requests else None
        return 0 if last is None else last.request_id


@dataclass(frozen=True)
class FollowedIteration:
    """An iteration that followed its schedule to the end.

    Attributes:
        number: from 0.
        schedule: that it followed.
        spans: of its operations, in execution order.
        begin_ns: when the first of them was begun by the training thread, perf_counter_ns.
        end_ns: when the iteration was over for it.
        request_ids: the numbers of the requests that were made for its operations.
    """

    number: int
    schedule: RankSchedule
    spans: IterationSpans
    begin_ns: int
    end_ns: int
    request_ids: range


@dataclass(frozen=True)
class AccountedIteration:
    """A followed iteration with the clocks that were in force.

    Attributes:
        iteration: the iteration.
        lags_ns: from when the request of each operation was due until its clock was set; None: it
            was overtaken, or not set, or there is none.
        max_lag_s: the longest time from a request to the set clock.
        planned_s: iteration time of the plan that the clocks in force belong to: the followed one,
            though newer requests may have overtaken some; the fastest where clocks were not set.
        energy: of all iterations so far.
    """

    iteration: FollowedIteration
    lags_ns: list[int | None]
    max_lag_s: float
    planned_s: float
    energy: EnergyTotals

    @property
    def clocks_mhz(self) -> list[int]:
        """Those of its operations; 0 where the planned clock was not set, or there is none."""
        operations = zip(self.iteration.schedule.operations, self.lags_ns, strict=True)
        return [
            0 if lag_ns is None else operation.frequency_mhz for operation, lag_ns in operations
        ]


class IterationAccounting:
    """Knows which of a rank's iterations are decided. Not thread-safe.

    Args:
        requester: whose guard sets the clocks.
        fastest: the plan itself, without stragglers.
        energy: counts the iterations that followed it.
    """

    def __init__(
        self, requester: ClockRequester, fastest: RankSchedule, energy: IterationEnergyMeter
    ) -> None:
        self._requester = requester
        self._guard = requester.guard
        self._fastest = fastest
        self._energy = energy
        self._undecided: deque[FollowedIteration] = deque()

    def add(self, iteration: FollowedIteration) -> None:
        """An iteration has been followed to its end."""
        self._undecided.append(iteration)

    def pass_over(self, last_request_id: int) -> None:
        """An iteration has not been followed to its end.

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

    def decided_iterations(self) -> Iterator[AccountedIteration]:
        """Take out the iterations that are decided, in their order."""
        while self._undecided and self._is_decided(self._undecided[0]):
            iteration = self._undecided.popleft()
            yield self._account(iteration)
            self._forget_requests_before(iteration.request_ids.stop - 1)

    @property
    def num_undecided(self) -> int:
        """Iterations that wait for the guard."""
        return len(self._undecided)

    def _is_decided(self, iteration: FollowedIteration) -> bool:
        guard = self._guard
        if guard is None or guard.reports_closed or guard.failing:
            return True
        return guard.done >= iteration.request_ids.stop - 1

    def _account(self, iteration: FollowedIteration) -> AccountedIteration:
        guard = self._guard
        all_lags_ns = {} if guard is None or guard.lost else guard.lags
        lags_ns = [
            None if request is None else all_lags_ns.get(request.request_id)
            for request in iteration.spans.requests
        ]
        own_lags_ns = [all_lags_ns.get(request_id, 0) for request_id in iteration.request_ids]
        if iteration.schedule is self._fastest:
            self._energy.add_iteration(iteration.begin_ns, iteration.end_ns)
        in_force = iteration.schedule if self._had_its_clocks(iteration) else self._fastest
        return AccountedIteration(
            iteration=iteration,
            lags_ns=lags_ns,
            max_lag_s=max(own_lags_ns, default=0) / 1e9,
            planned_s=in_force.iteration_time_s,
            energy=self._energy.totals,
        )

    def _had_its_clocks(self, iteration: FollowedIteration) -> bool:
        """Whether every request that an operation ran under was carried out, or overtaken."""
        last_done = 0 if self._guard is None or self._guard.lost else self._guard.done
        operations = zip(iteration.schedule.operations, iteration.spans.requests, strict=True)
        return all(
            operation.frequency_mhz == 0
            or (request is not None and request.request_id <= last_done)
            for operation, request in operations
        )

    def _forget_requests_before(self, request_id: int) -> None:
        """Forget when clocks were set, before the one that may still be in force."""
        if self._guard is not None:
            lags = self._guard.lags
            for old_id in [number for number in lags if number < request_id]:
                del lags[old_id]
