"""Threads that share one frontier get what one thread alone gets."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from random import Random
from threading import Barrier
from typing import ClassVar, TypeVar

import pytest

from envplan import Frontier, Pipeline, Profile, trace_frontier
from envplan.frontier.cache import TraceCache
from envplan.frontier.tracer import FrontierCurve

THREADS = 8
Item = TypeVar("Item")
Answer = TypeVar("Answer")
PIPELINE = Pipeline("1f1b", 8, 24)


def fresh() -> Frontier:
    """A frontier of which nothing but its last breakpoint is traced, and which nobody else has."""
    return Frontier(PIPELINE, Profile.builtin("a40-gpt3-1.3b-8stage"))


@pytest.fixture
def switching_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def at_once(work: Callable[[Item], Answer], items: list[Item]) -> list[Answer]:
    """What threads that begin together make of items."""
    together = Barrier(THREADS)

    def share(first: int) -> list[Answer]:
        together.wait()
        return [work(item) for item in items[first::THREADS]]

    with ThreadPoolExecutor(THREADS) as pool:
        shares = list(pool.map(share, range(THREADS)))
    return [shares[k % THREADS][k // THREADS] for k in range(len(items))]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.usefixtures("switching_often")
def test_threads_that_extend_one_frontier_read_the_same_energies(seed: int) -> None:
    alone, shared = fresh(), fresh()
    random = Random(seed)
    span_s = alone.min_energy_time - alone.min_time
    times = [alone.min_time + span_s * (1 - random.random() ** 3) for _ in range(400)]
    expected = [alone.energy_at(time) for time in times]
    assert at_once(shared.energy_at, times) == expected


@pytest.mark.usefixtures("switching_often")
def test_threads_that_trace_all_of_one_frontier_see_the_same_breakpoints() -> None:
    alone, shared = fresh(), fresh()
    expected = alone.times.tolist()
    for times in at_once(lambda _: shared.times.tolist(), list(range(THREADS))):
        assert times == expected


class Disturbed(FrontierCurve):
    """A curve in the middle of whose reading another thread goes on tracing."""

    disturb: ClassVar[Callable[[], None]]

    def first_breakpoint_from(self, time_ns: int) -> int:
        Disturbed.disturb()
        return super().first_breakpoint_from(time_ns)


def test_an_energy_is_read_while_another_thread_extends_the_interval() -> None:
    alone, shared = fresh(), fresh()
    late_ns = shared.max_time_ns - (shared.max_time_ns - shared.min_time_ns) // 50
    expected = alone.lower_bound_10fj(late_ns)
    interval = shared.tracer.interval_at(late_ns)
    interval._curve = Disturbed(*interval.curve)

    def extend() -> None:
        threading.Thread(target=interval.extend_to, args=(shared.min_time_ns,)).start()
        time.sleep(0.2)  # whether it is over by then or waits, the energy is the same

    Disturbed.disturb = extend
    assert interval.energy_10fj(late_ns) == expected


SLOWDOWNS = [0.0, 0.01, 0.02, 0.03, 0.05, 0.08, 0.1, 0.15]


def small() -> Frontier:
    return Frontier(Pipeline("1f1b", 4, 6), Profile.builtin("a40-gpt3-1.3b-4stage"))


@pytest.mark.usefixtures("switching_often")
def test_plans_that_threads_make_on_one_frontier_are_those_of_one_thread() -> None:
    expected = [small().plan(slowdown=slowdown).to_json() for slowdown in SLOWDOWNS]
    shared = small()
    assert at_once(lambda s: shared.plan(slowdown=s).to_json(), SLOWDOWNS) == expected


@pytest.mark.usefixtures("switching_often")
def test_plans_that_threads_make_on_copies_for_late_clocks_are_those_of_one_thread() -> None:
    traced = small()

    def late_plan(slowdown: float) -> str:
        return copy(traced).plan(slowdown=slowdown, switch_latency=0.02).to_json()

    expected = [small().plan(slowdown=s, switch_latency=0.02).to_json() for s in SLOWDOWNS]
    assert at_once(late_plan, SLOWDOWNS) == expected


@pytest.mark.usefixtures("switching_often")
def test_threads_may_share_the_cache_of_traces() -> None:
    cache: TraceCache[int] = TraceCache(max_operations=50)

    def use(number: int) -> bool:
        key = number % 40
        found = cache.get(key)
        cache.put(key, key, 7)
        return found in (None, key)

    assert all(at_once(use, list(range(4000))))


def test_threads_that_ask_for_one_profile_get_one_frontier() -> None:
    profile = Profile.builtin("a40-gpt3-1.3b-4stage")
    pipeline = Pipeline("1f1b", 4, 5)
    energies = at_once(
        lambda _: trace_frontier(pipeline, profile).energies.tolist(), list(range(THREADS))
    )
    assert all(found == energies[0] for found in energies)
