"""Which clocks were in force in an iteration, by what the guard has reported."""

from __future__ import annotations

from typing import Any

import pytest

from envplan.pipeline import Pipeline
from envplan.runtime.clock_requester import ClockRequester, RequestedClock
from envplan.runtime.iteration_accounting import (
    AccountedIteration,
    FollowedIteration,
    IterationAccounting,
    IterationSpans,
)
from envplan.runtime.iteration_energy import IterationEnergyMeter
from envplan.runtime.rank_schedule import RankSchedule, rank_schedules
from shim_helpers import frequency_plan

PLAN = frequency_plan(Pipeline("1f1b", 1, 1), rung_times=(1.5,))
FASTEST, RUNG = rank_schedules(PLAN, PLAN.ranks[0])


class ReportingGuard:
    """Has reported what it is made with."""

    def __init__(
        self, *, done: int, lags: dict[int, int], failing: bool = False, lost: bool = False
    ) -> None:
        self.done, self.lags, self.failing, self.lost = done, lags, failing, lost
        self.reports_closed = lost
        self.readings: list[Any] = []

    def problems(self) -> list[str]:
        return []


def accounted(
    guard: ReportingGuard | None, schedule: RankSchedule = RUNG
) -> list[AccountedIteration]:
    """A step of two operations, each with a request of its own."""
    requester = ClockRequester(guard, None)  # type: ignore[arg-type]
    accounting = IterationAccounting(requester, FASTEST, IterationEnergyMeter(None))
    spans = IterationSpans()
    spans.add(0, 10, RequestedClock(1, 0, 900, 0))
    spans.add(10, 20, RequestedClock(2, 0, 1200, 0))
    accounting.add(FollowedIteration(0, schedule, spans, 0, 20, range(1, 3)))
    return list(accounting.decided_iterations())


def test_a_step_is_decided_once_its_last_request_is_carried_out() -> None:
    assert accounted(ReportingGuard(done=1, lags={1: 5})) == []
    (step,) = accounted(ReportingGuard(done=2, lags={1: 5_000_000, 2: 3_000_000}))
    assert step.clocks_mhz == [operation.frequency_mhz for operation in RUNG.operations]
    assert step.max_lag_s == 0.005
    assert step.planned_s == 1.5


@pytest.mark.parametrize(
    "guard",
    [
        None,
        ReportingGuard(done=0, lags={}, failing=True),
        ReportingGuard(done=1, lags={1: 5}, failing=True),
        ReportingGuard(done=2, lags={1: 5, 2: 5}, lost=True),
    ],
    ids=["none", "failing", "failing later", "lost"],
)
def test_without_its_clocks_a_step_counts_as_one_of_the_fastest_plan(
    guard: ReportingGuard | None,
) -> None:
    (step,) = accounted(guard)
    assert 0 in step.clocks_mhz
    assert step.planned_s == FASTEST.iteration_time_s


def test_an_overtaken_request_makes_no_straggler_of_a_slowed_pipeline() -> None:
    (step,) = accounted(ReportingGuard(done=2, lags={2: 5}))
    assert step.clocks_mhz == [0, RUNG.operations[1].frequency_mhz]
    assert step.planned_s == 1.5  # clocks were set all the same
