"""Requests on their way to the guard: when the device gets there, or a planned time after that."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from envplan.devices.guard_protocol import Request
from envplan.runtime.clock_requester import ClockRequester
from fake_nvml import wait_for


class GuardThatRecords:
    """Takes requests as they are then, and knows which came together."""

    def __init__(self) -> None:
        self.packets: list[list[Request]] = []

    def send(self, requests: Sequence[Request]) -> None:
        self.packets.append(Request.from_packets(Request.packet(requests)))

    def problems(self) -> list[str]:
        return []

    def close(self) -> None:
        pass

    @property
    def requests(self) -> list[Request]:
        return [request for packet in self.packets for request in packet]


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


HOST_AND_DEVICE = pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
HOUR_NS = 3600 * 10**9


@HOST_AND_DEVICE
def test_requests_of_one_moment_go_to_the_guard_together(on_device: bool) -> None:
    requester, guard = made(passed_event if on_device else None)
    before_ns = time.perf_counter_ns()
    wanted = requester.request(900)
    ahead = requester.request(1200, 5_000_000)
    requester.pass_on(requester.record_event(), wanted, ahead)
    requester.pass_on(requester.record_event(), None)  # there is nothing more
    wait_for(lambda: guard.packets)
    requester.close()
    ((now, later),) = guard.packets
    assert (now.request_id, now.target) == (1, 900)
    assert (later.request_id, later.target) == (2, 1200)
    assert before_ns <= now.due_ns <= time.perf_counter_ns()
    assert later.due_ns == now.due_ns + 5_000_000


@HOST_AND_DEVICE
def test_a_request_made_ahead_is_sent_again_only_if_its_operation_begins_sooner(
    on_device: bool,
) -> None:
    requester, guard = made(passed_event if on_device else None)
    early = requester.request(900, 1_000_000)
    requester.pass_on(requester.record_event(), None, early)
    wait_for(lambda: guard.requests)
    time.sleep(0.002)
    late = requester.request(1200, HOUR_NS)
    requester.pass_on(requester.record_event(), early, late)  # the first one was due
    requester.pass_on(requester.record_event(), late)
    wait_for(lambda: len(guard.requests) == 3)
    requester.close()
    assert [request.request_id for request in guard.requests] == [1, 2, 2]
    assert guard.requests[2].due_ns <= time.perf_counter_ns() < guard.requests[1].due_ns
    assert 0 < early.due_ns < early.wanted_ns
    assert 0 < late.due_ns == late.wanted_ns


def test_after_a_request_ahead_whose_operation_does_not_come_any_clock_is_requested() -> None:
    requester, _ = made()
    requester.request(900, HOUR_NS)
    assert requester.last_requested_mhz == 900
    requester.forget_last_clock()
    assert requester.last_requested_mhz == 0


def test_a_device_that_hangs_holds_up_requests_and_close_does_not_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("envplan.runtime.clock_requester.THREAD_TIMEOUT_S", 0.1)
    event = Event()
    requester, guard = made(lambda: event)
    requester.pass_on(requester.record_event(), requester.request(900))
    requester.close()
    event.passed.set()
    time.sleep(0.02)
    assert guard.requests == []


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

    requester.pass_on(requester.record_event(), requester.request(900))
    for number in range(4):
        requester.call_after_requests(callback(number))
    requester.close()
    wait_for(lambda: len(finished) == 4)
    assert finished == [0, 1, 2, 3]
    assert guard.requests == []
