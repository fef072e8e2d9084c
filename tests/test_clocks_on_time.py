"""Clocks that a GPU changes late are asked for ahead of their operations, and come on time."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from envplan.enforce.freqplan import FrequencyPlan, StageTimes, Switching
from envplan.pipeline import Pipeline
from envplan.runtime import Shim
from envplan.runtime.clock_requester import RequestedClock
from envplan.runtime.operation_clocks import OperationClocks
from envplan.runtime.rank_schedule import RankSchedule, rank_schedules
from fake_nvml import FakeNvml, fake_nvml
from shim_helpers import frequency_plan

__all__ = ["fake_nvml"]

PIPELINE = Pipeline("1f1b", num_stages=1, num_microbatches=12)
FORWARD_S, BACKWARD_S = 0.03, 0.06
#: Less than this does not count as late, s.
ON_TIME_S = 1e-3


class Ran(NamedTuple):
    """An operation that ran: its clock, and when it began and ended."""

    mhz: int
    begin_s: float
    end_s: float


class Sent(NamedTuple):
    """A request that a GPU got."""

    at_s: float
    mhz: int


def duration_s(instruction: str) -> float:
    return FORWARD_S if instruction == "forward" else BACKWARD_S


def planned(latency_s: float, ask: str = "ahead") -> FrequencyPlan:
    """A plan whose clocks come late, with the times of its operations."""
    plan = frequency_plan(PIPELINE)
    durations_s = [duration_s(operation.instruction) for operation in plan.ranks[0].operations]
    times = StageTimes(waits_s=[0.0] * len(durations_s), durations_s=durations_s)
    fields: dict[str, Any] = {"ask": ask, "latency_s": latency_s, "source": "a test"}
    return plan.model_copy(update={"switching": Switching(**fields, times=[[times]])})


def share_on_time(
    operations: Sequence[Ran], sent: Iterable[Sent], latency_s: float, jitter_s: float
) -> float:
    """The share of operations that run at their clock from 1 ms after their begin on.

    Args:
        operations: that ran.
        sent: the requests.
        latency_s: from a request until the clock changes, at most.
        jitter_s: by which a clock may come sooner than that.
    """
    chance = random.Random(7)
    arrivals = sorted(
        (request.at_s + latency_s - chance.uniform(0, jitter_s), request.mhz) for request in sent
    )
    on_time = 0
    for operation in operations:
        there = [mhz for at_s, mhz in arrivals if at_s <= operation.begin_s + ON_TIME_S]
        on_time += bool(there) and there[-1] == operation.mhz
    return on_time / len(operations)


class Simulated:
    """A requester whose time is simulated: `now_ns` is what it is told."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.last_requested_mhz = 0
        self.sent: list[Sent] = []
        self._last_id = 0
        self._waiting: dict[int, tuple[int, int]] = {}  # when it is due, and the clock

    def advance(self, now_ns: int) -> None:
        for request_id, (due_ns, mhz) in sorted(self._waiting.items()):
            if due_ns <= now_ns:
                del self._waiting[request_id]
                self.sent.append(Sent(due_ns / 1e9, mhz))
        self.now_ns = now_ns

    def request(self, mhz: int, delay_ns: int = 0) -> RequestedClock:
        self._last_id += 1
        self.last_requested_mhz = mhz
        return RequestedClock(self._last_id, 0, mhz, delay_ns)

    def forget_last_clock(self) -> None:
        self.last_requested_mhz = 0

    def pass_on(
        self,
        at_ns: int,
        wanted: RequestedClock | None,
        ahead: RequestedClock | None = None,
    ) -> None:
        if wanted is not None and (not wanted.due_ns or wanted.request_id in self._waiting):
            self._waiting = {}  # those made before are overtaken
            self._ask(wanted, at_ns)
        if ahead is not None:
            self._ask(ahead, at_ns + ahead.delay_ns)
        self.advance(at_ns)

    def _ask(self, request: RequestedClock, due_ns: int) -> None:
        request.due_ns = due_ns
        self._waiting[request.request_id] = (due_ns, request.target)

    def call_after_requests(self, callback: Callable[[], None]) -> None:
        callback()


def simulate(
    schedule: RankSchedule, latency_s: float, *, noise: float, steps: int, pause_s: float = 0.0
) -> tuple[list[Ran], list[Sent]]:
    """Run steps in simulated time, with durations that differ from step to step."""
    chance = random.Random(11)
    requester = Simulated()
    clocks = OperationClocks(
        requester,  # type: ignore[arg-type]
        max_clock_mhz=1740,
        latency_ns=round(1e9 * latency_s),
    )
    operations = []
    for _ in range(steps):
        for position, operation in enumerate(schedule.operations):
            begin_ns = requester.now_ns
            clocks.begin(schedule, position, begin_ns)
            length_s = duration_s(operation.key.instruction) * chance.gauss(1, noise)
            requester.advance(begin_ns + round(1e9 * length_s))
            clocks.end(schedule, position, requester.now_ns)
            operations.append(Ran(operation.frequency_mhz, begin_ns / 1e9, requester.now_ns / 1e9))
        if pause_s:
            operations.append(Ran(1740, requester.now_ns / 1e9, requester.now_ns / 1e9 + pause_s))
        requester.advance(requester.now_ns + round(1e9 * pause_s))
    return operations, requester.sent


@pytest.mark.parametrize("pause_s", [0.0, 0.15])
@pytest.mark.parametrize(("latency_ms", "least"), [(5, 0.99), (20, 0.99), (50, 0.25)])
def test_clocks_that_come_late_are_there_in_time(
    latency_ms: int, least: float, pause_s: float
) -> None:
    latency_s = latency_ms / 1000
    plan = planned(latency_s)
    (schedule,) = rank_schedules(plan, plan.ranks[0])
    operations, sent = simulate(schedule, latency_s, noise=0.005, steps=40, pause_s=pause_s)
    after_the_first_step = operations[len(operations) // 40 :]
    share = share_on_time(after_the_first_step, sent, latency_s, jitter_s=latency_s / 5)
    assert share >= least


def test_clocks_asked_for_at_the_start_are_late() -> None:
    plan = planned(0.02, ask="start")
    (schedule,) = rank_schedules(plan, plan.ranks[0])
    operations, sent = simulate(schedule, 0.02, noise=0.0, steps=10)
    assert share_on_time(operations, sent, 0.02, jitter_s=0.004) == 0


def test_shim_asks_ahead_and_the_log_says_when(fake_nvml: FakeNvml, tmp_path: Path) -> None:
    seen: list[Any] = []
    plan = planned(0.02)
    with Shim(plan, rank=0, world_size=1, log=tmp_path / "run.jsonl", on_step=seen.append) as shim:
        operations = train(shim, 6)
    sent = [Sent(call.time, call.mhz) for call in fake_nvml.calls(kind="lock")]
    share = share_on_time(operations, sent, 0.02, jitter_s=0.004)
    print(f"{share:.1%} of {len(operations)} operations on time")
    assert share > 0.1  # the host may be very busy; asked for at the start, none would be
    changes = [change for step in seen for change in step.changes]
    ahead = [change for change in changes if change.asked_s < change.wanted_s - 0.005]
    assert len(changes) > 100
    assert len(ahead) > len(changes) / 5
    assert all(change.seen_s > change.asked_s for change in changes if change.seen_s is not None)


def train(shim: Shim, steps: int) -> list[Ran]:
    """Run steps in real time whose operations take as long as planned."""
    operations = []
    for _ in range(steps):
        for instruction, microbatch, chunk, mhz in shim.plan.ranks[0].operations:
            begin_s = time.monotonic()
            shim.begin(instruction, microbatch, chunk)
            time.sleep(max(0.0, begin_s + duration_s(instruction) - time.monotonic()))
            shim.end(instruction, microbatch, chunk)
            operations.append(Ran(mhz, begin_s, time.monotonic()))
        shim.step()
    return operations


class QueueingDevice:
    """A device that works through what the training thread has queued, in real time."""

    def __init__(self) -> None:
        self.idle_at_s = time.perf_counter()

    def run(self, seconds: float) -> None:
        self.idle_at_s = max(self.idle_at_s, time.perf_counter()) + seconds

    def event(self) -> DeviceMoment:
        return DeviceMoment(self)


class DeviceMoment:
    """A moment in the queue of a device."""

    def __init__(self, device: QueueingDevice) -> None:
        self._device = device
        self.at_s = 0.0

    def record(self) -> None:
        self.at_s = max(self._device.idle_at_s, time.perf_counter())

    def synchronize(self) -> None:
        time.sleep(max(0.0, self.at_s - time.perf_counter()))

    def elapsed_time(self, end: DeviceMoment) -> float:
        return 1e3 * (end.at_s - self.at_s)


def test_clocks_are_asked_ahead_of_the_device_and_not_of_the_training_thread(
    fake_nvml: FakeNvml, tmp_path: Path
) -> None:
    device = QueueingDevice()
    plan = planned(0.02)
    operations = []
    with Shim(plan, rank=0, world_size=1, log=tmp_path / "run.jsonl", marker=device.event) as shim:
        for _ in range(6):
            for instruction, microbatch, chunk, mhz in plan.ranks[0].operations:
                shim.begin(instruction, microbatch, chunk)
                begin_s = max(device.idle_at_s, time.perf_counter())
                device.run(duration_s(instruction))
                operations.append(Ran(mhz, begin_s, device.idle_at_s))
                shim.end(instruction, microbatch, chunk)
            shim.step()
            time.sleep(max(0.0, device.idle_at_s - time.perf_counter() - 0.1))  # as a loss is read
        time.sleep(max(0.0, device.idle_at_s - time.perf_counter()))
    assert shim.mismatches == 0
    sent = [Sent(call.time, call.mhz) for call in fake_nvml.calls(kind="lock")]
    share = share_on_time(operations, sent, 0.02, jitter_s=0.004)
    print(f"{share:.1%} of {len(operations)} operations on time")
    assert share > 0.1  # as above
