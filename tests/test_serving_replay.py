"""The compiled replay: against a slow oracle, and case by case where the answer is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envplan._serving import Replay, instances_needed

IDLE, STEP_W, PROMPT_W = 100.0, 300.0, 700.0
STEP, TOKEN = 0.02, 0.0001  # s: a decode step, a prompt token
BATCH = 4


def table(slower: float = 1.0) -> tuple[Any, ...]:
    """Prompts take time by their tokens; steps are alike for every batch up to BATCH."""
    grid = 100.0 * np.arange(0, 102)
    return (IDLE, np.full(BATCH + 2, slower * STEP), np.full(BATCH + 2, STEP_W), 100.0,
            slower * TOKEN * grid, np.full(len(grid), PROMPT_W))  # fmt: skip


def replay(
    requests: list[tuple[float, int, int]], *, classes: list[int] | None = None,
    ttft: tuple[float, ...] = (1.0,), chunk: int = 1000, kv: float = 1e6, end: float = 60.0,
) -> Replay:  # fmt: skip
    """A fleet without instances; requests are (arrival, input, output)."""
    arrival, given, output = (np.array(column) for column in zip(*requests, strict=True))
    known = np.array(classes or [0] * len(requests), dtype=np.uint8)
    slos = [(ttft[min(k, len(ttft) - 1)], 1.0) for k in range(9)]
    made = Replay(
        arrival.astype(float), given.astype(np.int32), output.astype(np.int32), known, known,
        [table(2.0), table()], [(2, kv, chunk, [0, 1])], slos, 0.0, 1.0, 0.0, 0.5, 60.0, end,
    )  # fmt: skip
    for k in range(9):
        made.route(k, [(0, 1.0)], [1])
    return made


def outcome(made: Replay, end: float = 60.0) -> tuple[float, list[int]]:
    """Energy, and [requests, first in time, tokens in time, both]."""
    made.advance(end)
    made.finish()
    energy, _, by_class, _, _ = made.results()
    return float(energy.sum()), by_class.sum(axis=0).tolist()


def test_one_request_takes_its_prompt_and_its_steps() -> None:
    made = replay([(0.0, 1000, 11)])
    made.start(0, 0, 1, False, 0.0)
    energy, counts = outcome(made)
    prompt, steps = 1000 * TOKEN, 10 * STEP
    assert energy == pytest.approx(
        PROMPT_W * prompt + STEP_W * steps + IDLE * (60 - prompt - steps)
    )
    assert counts == [1, 1, 1, 1]


def one_by_one(requests: list[tuple[float, int]], ttft: float) -> int:
    """First tokens in time on one instance if outputs are one token: a queue by arrival."""
    free, in_time = 0.0, 0
    for arrival, tokens in requests:
        free = max(free, arrival) + tokens * TOKEN
        in_time += free - arrival <= ttft + 1e-9
    return in_time


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 400), st.integers(1, 10).map(lambda n: 1000 * n)),
        min_size=1, max_size=25,
    )
)  # fmt: skip
def test_prompts_alone_are_a_queue(drawn: list[tuple[int, int]]) -> None:
    requests = sorted((at / 10 + 1e-3 * k, size) for k, (at, size) in enumerate(drawn))
    made = replay([(at, size, 1) for at, size in requests], ttft=(1e6,))
    made.start(0, 0, 1, False, 0.0)
    busy, counts = outcome(made, 600.0)
    work = sum(size * TOKEN for _, size in requests)
    assert counts[3] == len(requests) == one_by_one(requests, 1e6)
    drawn_w = PROMPT_W * min(work, 60.0) + IDLE * max(0.0, 60 - work)
    assert busy <= drawn_w + 1e-6
    if requests[-1][0] + work < 60:
        assert busy == pytest.approx(drawn_w)


def test_the_nearest_deadline_goes_first_and_long_prompts_make_way_in_between() -> None:
    # A prompt of one second in chunks of a tenth; a short one with a near deadline comes after.
    requests = [(0.0, 10000, 1), (0.05, 100, 1)]
    made = replay(requests, classes=[8, 0], ttft=(0.2, *[5.0] * 8))
    made.start(0, 0, 1, False, 0.0)
    assert outcome(made)[1] == [2, 2, 2, 2]
    whole = replay(requests, classes=[8, 0], ttft=(0.2, *[5.0] * 8), chunk=10000)
    whole.start(0, 0, 1, False, 0.0)
    assert outcome(whole)[1] == [2, 1, 2, 1]


def test_what_is_late_already_goes_behind_what_is_not() -> None:
    requests = [(0.0, 10000, 1), (0.01, 5000, 1), (1.0, 4000, 1)]
    made = replay(requests, ttft=(0.95,))
    made.start(0, 0, 1, False, 0.0)
    # At 1.0 s the first is through, late; the second has missed its deadline; the third makes it.
    assert outcome(made)[1][1] == 1


def test_requests_that_do_not_fit_into_memory_wait_for_those_that_leave() -> None:
    requests = [(0.0, 100, 101), (0.0, 100, 101)]
    together, apart = replay(requests, ttft=(1.5,)), replay(requests, ttft=(1.5,), kv=250)
    for made in (together, apart):
        made.start(0, 0, 1, False, 0.0)
    assert outcome(together)[1] == [2, 2, 2, 2]
    assert outcome(apart)[1] == [2, 1, 2, 1]  # the second waits for two seconds


def test_an_instance_serves_when_it_is_ready_and_finishes_what_it_has_when_it_goes() -> None:
    made = replay([(0.0, 100, 51), (30.0, 100, 51)], ttft=(12.0,))
    made.start(0, 0, 1, False, 10.0)
    made.advance(10.5)
    assert made.instances()[0][4:] == (False, 1)
    made.retire(0)
    assert made.instances() == []
    assert made.gpus() == {0: 1}
    made.advance(20.0)
    assert made.gpus() == {}
    _, counts = outcome(made)
    assert counts == [2, 1, 1, 1]  # nobody is there for the second


def test_a_request_that_would_be_late_goes_to_another_pool() -> None:
    requests = [(0.0, 10000, 1), (0.01, 1000, 1)]
    made = replay(requests, ttft=(1.05,), chunk=10000)
    made.start(0, 0, 1, False, 0.0)
    assert outcome(made)[1][3] == 1
    helped = replay(requests, ttft=(1.05,), chunk=10000)
    for pool in (0, 1):
        helped.start(pool, 0, 1, False, 0.0)
    assert outcome(helped)[1][3] == 2
    assert helped.results()[4] == 1


@pytest.mark.parametrize(("ttft", "changes"), [(0.5, 0), (0.15, 1)])
def test_a_managed_clock_rises_only_where_the_slow_one_would_be_late(
    ttft: float, changes: int
) -> None:
    made = replay([(1.0, 1000, 1)], ttft=(ttft,))
    made.start(0, 0, 0, True, 0.0)
    _, counts = outcome(made)
    assert counts == [1, 1, 1, 1]
    assert (made.results()[3] > 0) == bool(changes)


def test_packed_instances_are_filled_one_after_another() -> None:
    requests = [(0.1 * k, 100, 101) for k in range(4)]
    for pack, inside in ((True, [4, 0]), (False, [2, 2])):
        made = replay(requests)
        made.set_pack(0, pack)
        for _ in range(2):
            made.start(0, 0, 1, False, 0.0)
        made.advance(1.0)
        assert sorted((i[5] for i in made.instances()), reverse=True) == inside


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 9.9), st.floats(0.01, 2)), min_size=1, max_size=30),
    st.sampled_from([0.0, 0.1, 0.5]),
)
def test_the_least_number_of_instances_leaves_just_enough_in_time(
    drawn: list[tuple[float, float]], late: float
) -> None:
    arrival, work = (np.array(column) for column in zip(*sorted(drawn), strict=True))
    level, slack = np.zeros(len(arrival), dtype=np.uint8), 0.5

    def missed(instances: float) -> int:
        queue, count = 0.0, 0
        for k in range(101):
            mine = (arrival / 0.1).astype(int) == k
            queue = max(0.0, queue + work[mine].sum() - 0.1 * instances)
            count += mine.sum() * (queue > instances * slack)
        return count

    found = instances_needed(arrival, work, level, [slack], 10.0, late)
    assert missed(found * 1.0001) <= late * len(arrival)
    assert (
        found <= 1e-3
        or missed(found * 0.999) > late * len(arrival)
        or found < 1.01 * work.sum() / 10
    )


def test_arrays_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="one length"):
        instances_needed(np.zeros(2), np.zeros(3), np.zeros(2, dtype=np.uint8), [1.0], 1.0, 0.0)
