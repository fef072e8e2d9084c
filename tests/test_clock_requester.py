"""Requests on their way to the guard: when the device gets there, or a planned time after that."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from envplan.runtime.clock_requester import ClockRequester
from fake_nvml import wait_for


class GuardThatRecords:
    """Takes requests, and knows when."""

    def __init__(self) -> None:
        self.requests: list[tuple[int, int]] = []
        self.times_ns: list[int] = []

    def request(self, mhz: int, request_id: int) -> None:
        self.requests.append((request_id, mhz))
        self.times_ns.append(time.perf_counter_ns())

    def problems(self) -> list[str]:
        return []

    def close(self) -> None:
        pass

    @property
    def clocks(self) -> list[int]:
        return [mhz for _, mhz in self.requests]


class Event:
    """A device event that passes when it is told to."""

    def __init__(self) -> None:
        self.passed = threading.Event()

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        self.passed.wait(60)

    def elapsed_time(self, end: Any) -> float:
        return 0.0


def passed_event() -> Event:
    event = Event()
    event.passed.set()
    return event


def made(
    marker: Callable[[], Event] | None = None,
) -> tuple[ClockRequester, GuardThatRecords]:
    guard = GuardThatRecords()
    return ClockRequester(guard, marker), guard  # type: ignore[arg-type]


def host_time(requester: ClockRequester) -> int:
    begin = requester.record_event()
    assert isinstance(begin, int)
    return begin


def test_a_delayed_request_is_made_when_it_is_due() -> None:
    requester, guard = made()
    begin = host_time(requester)
    requester.request(900, begin, 5_000_000)
    wait_for(lambda: guard.clocks == [900])
    assert guard.times_ns[0] >= begin + 5_000_000
    requester.request(600, host_time(requester), 3600 * 10**9)
    requester.close()  # does not wait for it, and asks for nothing more
    assert guard.clocks == [900]


def test_callbacks_run_one_at_a_time_though_a_hanging_device_answers_during_close(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("envplan.runtime.clock_requester.THREAD_TIMEOUT_S", 0.1)
    event = Event()
    requester, guard = made(lambda: event)
    running: list[int] = []
    finished: list[int] = []

    def callback(number: int) -> Callable[[], None]:
        def call() -> None:
            running.append(number)
            event.passed.set()
            time.sleep(0.05)
            assert running == [number]
            running.remove(number)
            finished.append(number)

        return call

    requester.request(900, requester.record_event())
    for number in range(4):
        requester.call_after_requests(callback(number))
    requester.close()
    wait_for(lambda: len(finished) == 4)
    assert finished == [0, 1, 2, 3]
    assert guard.clocks == []


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_a_delayed_request_does_not_hold_up_the_next_one(on_device: bool) -> None:
    requester, guard = made(passed_event if on_device else None)
    requester.request(900, requester.record_event(), 300_000_000)
    begin_ns = time.perf_counter_ns()
    requester.request(1200, requester.record_event())
    wait_for(lambda: guard.clocks == [1200])
    assert guard.times_ns[0] - begin_ns < 200_000_000
    time.sleep(0.4)
    assert guard.requests == [(2, 1200)]  # the other one was overtaken
    requester.close()


def test_delayed_requests_are_made_in_the_order_in_which_they_are_due() -> None:
    requester, guard = made()
    begin = host_time(requester)
    for delay_ms, mhz in ((10, 900), (60, 1200), (30, 1050)):
        requester.request(mhz, begin, delay_ms * 1_000_000)
    wait_for(lambda: guard.clocks == [900, 1050])
    time.sleep(0.1)
    assert guard.clocks == [900, 1050]  # 1200 was requested before 1050, and due after it
    requester.close()


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_a_request_made_ahead_is_sent_once_by_its_timer_or_when_its_operation_begins(
    on_device: bool,
) -> None:
    requester, guard = made(passed_event if on_device else None)
    early = requester.request_ahead(900, requester.record_event(), 20_000_000)
    wait_for(lambda: guard.clocks == [900])  # the timer was first
    requester.confirm(early, requester.record_event())
    late = requester.request_ahead(1200, requester.record_event(), 3600 * 10**9)
    requester.confirm(late, requester.record_event())  # the operation is
    wait_for(lambda: guard.clocks == [900, 1200])
    requester.close()
    assert guard.clocks == [900, 1200]
    assert requester.sent_ns[early.request_id] < requester.wanted_ns[early.request_id]
    assert requester.sent_ns[late.request_id] >= requester.wanted_ns[late.request_id]


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_a_cancelled_request_is_not_sent(on_device: bool) -> None:
    requester, guard = made(passed_event if on_device else None)
    ahead = requester.request_ahead(900, requester.record_event(), 50_000_000)
    requester.cancel(ahead)
    time.sleep(0.1)
    assert guard.clocks == []
    requester.request(1740, requester.record_event())
    wait_for(lambda: guard.clocks == [1740])
    requester.close()
