"""The compiled replay: against a slow oracle, and case by case where the answer is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envplan._serving import Replay, Service

IDLE, STEP_W, PROMPT_W = 100.0, 300.0, 700.0
STEP, TOKEN = 0.02, 0.0001  # s: a decode step, a prompt token
BATCH = 4


def table(slower: float = 1.0) -> tuple[Any, ...]:
    """Prompts take time by their tokens; steps are alike for every batch up to BATCH."""
    grid = 100.0 * np.arange(0, 102)
    return (IDLE, np.full(BATCH + 2, slower * STEP), np.full(BATCH + 2, STEP_W), 100.0,
            slower * TOKEN * grid, np.full(len(grid), PROMPT_W), 0.0, 0.0)  # fmt: skip


def service(
    requests: list[tuple[float, int, int]], *, classes: list[int] | None = None,
    ttft: tuple[float, ...] = (1.0,), chunk: int = 1000, kv: float = 1e6,
) -> Service:  # fmt: skip
    """What is served; requests are (arrival, input, output)."""
    arrival, input_tokens, output_tokens = (
        np.array(column) for column in zip(*requests, strict=True)
    )
    class_index = np.array(classes or [0] * len(requests), dtype=np.uint8)
    return Service(
        arrival.astype(float),
        input_tokens.astype(np.int32),
        output_tokens.astype(np.int32),
        class_index,
        class_index,
        tables=[table(2.0), table()],
        sizes=[(kv, chunk, [0, 1], 1e12)],
        slos=[(ttft[min(k, len(ttft) - 1)], 1.0) for k in range(9)],
        usual_output=[100.0] * 9,
        expected=output_tokens.astype(np.int32),
    )


def replay(
    requests: list[tuple[float, int, int]], *, running: int = 1, squash: float = 1e9,
    pack: bool = False, **of: Any,
) -> Replay:  # fmt: skip
    """A fleet of so many instances, all in pool 0 and at the highest clock."""
    engine = Replay(service(requests, **of), 0.0, 1.0, 0.0, 0.5, squash, 60.0, 60.0)
    engine.set_pack(0, pack)
    for k in range(9):
        engine.route(k, 0, [1])
    for _ in range(running):
        engine.start(0, 0, 1, False, 0.0)
    return engine


def outcome(engine: Replay, end: float = 60.0) -> tuple[float, list[int]]:
    """Energy, and [requests, first in time, tokens in time, both]."""
    engine.advance(end)
    engine.finish()
    energy, _, by_class, *_ = engine.results()
    return float(energy.sum()), by_class.sum(axis=0).tolist()


def test_one_request_takes_its_prompt_and_its_steps() -> None:
    engine = replay([(0.0, 1000, 11)])
    energy, counts = outcome(engine)
    prompt, steps = 1000 * TOKEN, 10 * STEP
    assert energy == pytest.approx(
        PROMPT_W * prompt + STEP_W * steps + IDLE * (60 - prompt - steps)
    )
    assert counts == [1, 1, 1, 1]


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 400), st.integers(1, 10).map(lambda n: 1000 * n)),
        min_size=1, max_size=25,
    )
)  # fmt: skip
def test_prompts_alone_are_a_queue(drawn: list[tuple[int, int]]) -> None:
    requests = sorted((at / 10 + 1e-3 * k, size) for k, (at, size) in enumerate(drawn))
    engine = replay([(at, size, 1) for at, size in requests], ttft=(1e6,))
    busy, counts = outcome(engine, 600.0)
    work = sum(size * TOKEN for _, size in requests)
    assert counts[3] == len(requests)
    drawn_w = PROMPT_W * min(work, 60.0) + IDLE * max(0.0, 60 - work)
    assert busy <= drawn_w + 1e-6
    if requests[-1][0] + work < 60:
        assert busy == pytest.approx(drawn_w)


TWO = [(0.0, 10000, 1), (0.05, 100, 1)]  # a prompt of one second, and a short one
DEADLINES = {"classes": [8, 0], "ttft": (0.2, *[5.0] * 8)}  # that of the second is the nearest
ALIKE = [(0.0, 100, 101), (0.0, 100, 101)]


@pytest.mark.parametrize(
    ("requests", "how", "first"),
    [
        pytest.param(TWO, DEADLINES, 2, id="the nearest deadline goes first, between chunks"),
        pytest.param(TWO, DEADLINES | {"chunk": 10000}, 1, id="but not within a chunk"),
        # At 1 s the first is through, late; the second has missed its deadline; the third makes it.
        pytest.param([(0.0, 10000, 1), (0.01, 5000, 1), (1.0, 4000, 1)], {"ttft": (0.95,)}, 1,
                     id="what is late already goes behind what is not"),
        pytest.param([(0.0, 20000, 1), (1.0, 3000, 1)], {"ttft": (0.5,)}, 1,
                     id="a long prompt that is late makes way though it has begun"),
        # The first is late at 0.5 s, half through. The second comes then, and the memory is full.
        pytest.param([(0.0, 10000, 1), (0.7, 1000, 1)], {"ttft": (0.5,), "kv": 10500}, 1,
                     id="a late prompt that holds memory goes on where others do not fit"),
        # While a long prompt runs, three with long outputs come: the third does not fit there.
        pytest.param([(0.0, 10000, 1), *[(0.1, 100, 2000)] * 3],
                     {"ttft": (10.0,), "running": 2, "chunk": 10000, "kv": 15000, "pack": True}, 4,
                     id="what waits has its place in memory too"),
        pytest.param(ALIKE, {"ttft": (1.5,)}, 2, id="two fit into memory"),
        pytest.param(ALIKE, {"ttft": (1.5,), "kv": 250}, 1, id="the second waits for two seconds"),
    ],
)  # fmt: skip
def test_whose_first_token_is_in_time(
    requests: list[tuple[float, int, int]], how: dict[str, Any], first: int
) -> None:
    """`first` of them; further tokens always are."""
    assert outcome(replay(requests, **how))[1] == [len(requests), first, len(requests), first]


def test_an_instance_serves_when_it_is_ready_and_finishes_what_it_has_when_it_goes() -> None:
    engine = replay([(0.0, 100, 51), (30.0, 100, 51)], ttft=(12.0,), running=0)
    engine.start(0, 0, 1, False, 10.0)
    engine.advance(10.5)
    assert engine.instances()[0][4:] == (False, 1)
    engine.retire(0)
    assert engine.instances() == []
    assert engine.gpus() == {0: 1}
    engine.advance(20.0)
    assert engine.gpus() == {}
    _, counts = outcome(engine)
    assert counts == [2, 1, 1, 1]  # nobody is there for the second


def test_a_request_that_would_be_late_goes_to_another_pool() -> None:
    requests = [(0.0, 10000, 1), (0.01, 1000, 1)]
    engine = replay(requests, ttft=(1.05,), chunk=10000)
    assert outcome(engine)[1][3] == 1
    helped = replay(requests, ttft=(1.05,), chunk=10000)
    helped.start(1, 0, 1, False, 0.0)
    assert outcome(helped)[1][3] == 2
    assert helped.results()[4] == 1


@pytest.mark.parametrize(("ttft", "changes"), [(0.5, 0), (0.15, 1)])
def test_a_managed_clock_rises_only_where_the_slow_one_would_be_late(
    ttft: float, changes: int
) -> None:
    engine = replay([(1.0, 1000, 1)], ttft=(ttft,), running=0)
    engine.start(0, 0, 0, True, 0.0)
    _, counts = outcome(engine)
    assert counts == [1, 1, 1, 1]
    assert (engine.results()[3] > 0) == bool(changes)


def test_packed_instances_are_filled_one_after_another() -> None:
    requests = [(0.1 * k, 100, 101) for k in range(4)]
    for pack, inside in ((True, [4, 0]), (False, [2, 2])):
        engine = replay(requests, running=2, pack=pack)
        engine.advance(1.0)
        assert sorted((i[5] for i in engine.instances()), reverse=True) == inside


def test_what_is_far_too_late_is_given_up_and_costs_nothing_more() -> None:
    requests = [(0.0, 10000, 1), *[(0.1, 10000, 1)] * 5]
    runs = [replay(requests, ttft=(0.5,), squash=squash) for squash in (1e9, 1.0)]
    (kept, first), (given_up, second) = (outcome(engine) for engine in runs)
    assert first == second == [6, 0, 6, 0] or (first[0], second[0]) == (6, 6)
    assert runs[0].results()[5] == 0
    squashed = runs[1].results()[5]
    assert 0 < squashed < 6
    assert kept - given_up == pytest.approx(squashed * (PROMPT_W - IDLE) * 10000 * TOKEN)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 9.9), st.integers(1, 150)), min_size=1, max_size=30),
    st.sampled_from([0.0, 0.1, 0.5]),
)
def test_the_least_number_of_instances_leaves_just_enough_in_time(
    drawn: list[tuple[float, int]], late: float
) -> None:
    requests = [(at, 100 * size, 0) for at, size in sorted(drawn)]
    served = service(requests, ttft=(3.0,))
    instances, busy, *_ = served.need(0.0, 10.0, 1, 0, late)
    arrival, tokens = (np.array(column) for column in list(zip(*requests, strict=True))[:2])
    longest = np.sort(tokens)[int(np.ceil(0.99 * (len(tokens) - 1)))]
    slacks = 3.0 - np.minimum(tokens, longest) * TOKEN - TOKEN - 0.05  # each prompt leaves its own

    def missed(instances: float) -> int:
        queue, count = 0.0, 0
        for k in range(102):
            mine = (arrival / 0.1).astype(int) == k
            queue = max(0.0, queue + tokens[mine].sum() * TOKEN - 0.1 * instances)
            count += (queue - tokens[mine] * TOKEN > instances * slacks[mine]).sum()
        return count

    assert busy == pytest.approx(tokens.sum() * TOKEN / 10)
    assert missed(instances * 1.0001) <= late * len(arrival)
    assert (
        instances < 2e-3
        or instances <= 1.01 * busy
        or missed(instances * 0.99) > late * len(arrival)
    )


def test_memory_and_batches_are_needed_and_what_is_hopeless_is_not() -> None:
    usual = [(0.1 * k, 1000, 1) for k in range(100)]
    long = [(at + 0.05, 20000, 1) for at, *_ in usual[::10]]
    stay = [(0.1 * k, 100, 500) for k in range(100)]  # each for ten seconds
    short = [(0.1 * k, 100, 100) for k in range(100)]  # for two: 20 at a time, a batch has five
    wide, narrow, batch, late = (
        service(sorted(requests), kv=kv).need(0.0, 10.0, 1, 0, 0.0)
        for requests, kv in ((stay, 1e9), (stay, 1e3), (short, 1e6), (usual + long, 1e6))
    )
    assert narrow[1:] == wide[1:]
    assert narrow[0] > 2 * wide[0]
    assert batch[0] == pytest.approx(4)
    assert (late[1], late[3]) == (pytest.approx(3), pytest.approx(10 / 110))
    assert 2.9 <= late[0] < 4


def test_only_the_classes_that_are_asked_for_count() -> None:
    served = service([(0.0, 100, 1), (1.0, 100, 1), (2.0, 100, 1)], classes=[0, 1, 1])
    assert served.counts(0.0, 10.0) == [1, 2, *[0] * 7]
    assert served.counts(0.5, 1.5) == [0, 1, *[0] * 7]
    one, both = (served.need(0.0, 10.0, mask, 0, 0.0) for mask in (1, 3))
    assert both[1] == pytest.approx(3 * one[1])
    assert served.need(5.0, 10.0, 3, 0, 0.0) == (0.0, 0.0, 0.0, 0.0)


def test_arrays_of_different_lengths_and_unknown_classes_are_refused() -> None:
    of_two, ints, bytes_ = np.zeros(2), np.zeros(2, dtype=np.int32), np.zeros(2, dtype=np.uint8)
    rest: Any = ([table()], [(1e6, 1000, [0], 1e12)], [(1.0, 1.0)] * 9, [100.0] * 9)
    with pytest.raises(ValueError, match="one length"):
        Service(np.zeros(3), ints, ints, bytes_, bytes_, *rest)
    with pytest.raises(ValueError, match="has no class"):
        Service(of_two, ints, ints, bytes_ + np.uint8(9), bytes_, *rest)


def test_instances_and_services_that_are_not_there_are_refused() -> None:
    fleet = replay([(0.0, 100, 1)])
    for call in (
        lambda: fleet.retire(1_000_000),
        lambda: fleet.move(-1, 0, 0, False),
        lambda: fleet.start(0, 7, 0, False, 0.0),
        lambda: fleet.route(9, 0, []),
    ):
        with pytest.raises(IndexError, match="there is no such"):
            call()
    nothing: Any = None
    with pytest.raises(TypeError, match="None"):
        Replay(nothing, 0.0, 1.0, 0.0, 0.5, 1e9, 60.0, 60.0)
