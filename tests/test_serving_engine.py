"""The compiled replay against the slow oracle: memory, contexts, schedulers, roles."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from envplan._serving import Replay, Service
from serving_oracle import Costs, Oracle, Request

END_S = 120.0
COSTS = Costs()
CHUNK = 500


@dataclass(frozen=True)
class Case:
    """Requests of one class, and what serves them."""

    requests: tuple[tuple[float, int, int, int], ...]  # arrival, input, output, expected
    scheduler: str = "fcfs"
    kv_tokens: int = 100_000
    ttft_s: float = 1.0
    tbt_s: float = 1e4
    senders: int = 0
    transfer_s: float = 0.0
    token_transfer_s: float = 0.0
    token_receive_s: float = 0.0
    costs: Costs = COSTS
    chunk: int = CHUNK

    def oracle(self) -> Oracle:
        requests = [Request(k, *fields) for k, fields in enumerate(self.requests)]
        oracle = Oracle(
            requests, self.costs, self.scheduler, self.chunk, self.kv_tokens, self.ttft_s, END_S,
            self.senders, self.transfer_s, self.token_transfer_s, self.token_receive_s,
        )  # fmt: skip
        oracle.run()
        return oracle

    def engine(self, max_context: float = 1e300) -> Replay:
        costs = self.costs
        batches = np.arange(costs.max_batch + 1)
        grid = 100.0
        prompts = grid * np.arange(300)
        table = (
            costs.idle_w, costs.step_s + costs.request_s * batches,
            np.full(len(batches), costs.step_w), grid, costs.token_s * prompts,
            np.full(len(prompts), costs.prompt_w), costs.context_s, costs.context_w,
        )  # fmt: skip
        arrival, inputs, outputs, expected = (np.array(c) for c in zip(*self.requests, strict=True))
        pools = max(1, self.senders)  # each has a class, and an instance
        classes = np.arange(len(arrival)).astype(np.uint8) % pools
        send_s, receive_s = self.token_transfer_s or 1.0, self.token_receive_s or 1.0
        sizes = [(self.kv_tokens, self.chunk, [0], 1 / token_s) for token_s in (send_s, receive_s)]
        service = Service(
            arrival.astype(float), inputs.astype(np.int32), outputs.astype(np.int32), classes,
            classes, [table], sizes, [(self.ttft_s, self.tbt_s)] * pools, [100.0] * pools,
            expected.astype(np.int32), max_context,
        )  # fmt: skip
        engine = Replay(
            service, 0.0, 1.0, 0.0, 0.5, 1e9, END_S, END_S, self.scheduler, self.transfer_s,
            1.0 if self.token_transfer_s else 0.0,
        )  # fmt: skip
        for pool in range(pools):
            engine.route(pool, pool, [])
            engine.start(pool, 0, 0, False, 0.0)
            if self.senders:
                engine.hand_over(pool, self.senders)
        if self.senders:
            engine.start(self.senders, 1, 0, False, 0.0)
        engine.advance(END_S)
        engine.finish()
        return engine

    def check(self) -> Oracle:
        """Hold the engine against the oracle."""
        oracle, engine = self.oracle(), self.engine()
        energy_j, _, by_class, *_ = engine.results()
        _, unservable, preempted, transferred, _ = engine.apart()
        served = [r for r in oracle.requests if not r.is_unservable]
        assert oracle.most_used <= self.kv_tokens
        assert sum(unservable) == len(oracle.requests) - len(served)
        assert preempted == oracle.preempted
        assert transferred == oracle.transferred
        of_all = by_class.sum(axis=0)
        assert of_all[0] == len(oracle.requests)
        first = [r.first_token - r.arrival for r in oracle.requests]
        assert of_all[1] == sum(time_s <= self.ttft_s + 1e-9 for time_s in first)
        assert of_all[2] == len(served)
        assert energy_j.sum() == pytest.approx(oracle.energy_j, rel=1e-7)
        first_counts, interval_counts = engine.times()
        intervals = [(r.finished - r.first_token) / max(1, r.output - 1) for r in served]
        _check_counts(first_counts.sum(axis=0), first)
        _check_counts(interval_counts.sum(axis=0), [*intervals, *[np.inf] * sum(unservable)])
        return oracle


def _check_counts(counts: np.ndarray, times_s: list[float]) -> None:
    """That times lie in the bins where they belong; a bin is 1% wide, and rounding may move one."""
    from envplan._serving import time_bin_ends

    ends = time_bin_ends()
    bins = np.repeat(np.arange(len(ends)), counts)
    for bin_, time_s in zip(bins, np.sort(times_s), strict=True):
        assert time_s <= ends[bin_] * (1 + 1e-9)
        assert bin_ == 0 or time_s >= ends[bin_ - 1] * (1 - 1e-9)


@st.composite
def drawn_requests(draw: st.DrawFn) -> tuple[tuple[float, int, int, int], ...]:
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    count = draw(st.integers(1, 14))
    arrival = np.sort(random.uniform(0, draw(st.sampled_from([0.5, 4.0])), count))
    inputs = random.integers(1, draw(st.sampled_from([60, 900])), count)
    outputs = random.integers(1, draw(st.sampled_from([4, 300])), count)
    error = random.uniform(0.3, 1.7, count) if draw(st.booleans()) else 1.0
    expected = np.maximum(1, np.rint(outputs * error))
    columns = (arrival.tolist(), inputs.tolist(), outputs.tolist(), expected.astype(int).tolist())
    return tuple(zip(*columns, strict=True))


@settings(max_examples=150, deadline=None)
@given(
    requests=drawn_requests(),
    scheduler=st.sampled_from(["fcfs", "edf"]),
    kv_tokens=st.sampled_from([200, 700, 1500, 100_000]),
    ttft_s=st.sampled_from([0.1, 0.5, 30.0]),
)
def test_an_instance_equals_the_oracle(
    requests: tuple[tuple[float, int, int, int], ...], scheduler: str, kv_tokens: int, ttft_s: float
) -> None:
    oracle = Case(requests, scheduler, kv_tokens, ttft_s).check()
    event(f"preempted: {oracle.preempted > 0}")
    event(f"unservable: {any(r.is_unservable for r in oracle.requests)}")


@settings(max_examples=100, deadline=None)
@given(
    requests=drawn_requests(),
    kv_tokens=st.sampled_from([1000, 1500, 100_000]),
    transfer_s=st.sampled_from([0.0011, 0.0123]),
    token_transfer_s=st.sampled_from([1.1e-5, 1.3e-4]),
    token_receive_s=st.sampled_from([0.7e-5, 1.7e-4, 1.1e-3]),
    senders=st.integers(1, 3),
)
def test_prefill_and_decode_apart_equal_the_oracle(
    requests: tuple[tuple[float, int, int, int], ...],
    kv_tokens: int,
    transfer_s: float,
    token_transfer_s: float,
    token_receive_s: float,
    senders: int,
) -> None:
    oracle = Case(
        requests, "fcfs", kv_tokens, 0.5, senders=senders, transfer_s=transfer_s,
        token_transfer_s=token_transfer_s, token_receive_s=token_receive_s,
    ).check()  # fmt: skip
    event(f"preempted: {oracle.preempted > 0}")


def test_long_contexts_take_their_time_to_read() -> None:
    """Sixteen contexts of 16,000 tokens, of which each step reads all."""
    costs = Costs(step_s=0.0179, request_s=0.0, context_s=6.6e-3 / (16 * 16_000), max_batch=64)
    requests = tuple((1e-3 * k, 16_000, 101, 101) for k in range(16))
    case = Case(requests, kv_tokens=10**6, costs=costs, chunk=16 * 16_000)
    oracle = case.check()
    last = oracle.requests[-1]
    assert (last.finished - last.first_token) / 100 == pytest.approx(0.0245, rel=0.01)


def test_a_request_longer_than_the_memory_is_not_served() -> None:
    """Neither one whose prompt is too long, nor one that outgrows the memory alone."""
    requests = ((0.0, 5000, 10, 10), (1.0, 100, 2000, 10), (2.0, 100, 10, 10))
    engine = Case(requests, kv_tokens=1000).engine()
    assert engine.apart()[1] == [2]
    assert engine.results()[2].tolist() == [[3, 2, 1, 1]]


def test_a_request_longer_than_the_model_takes_counts_apart() -> None:
    requests = ((0.0, 5000, 10, 10), (1.0, 100, 2000, 10), (2.0, 100, 10, 10))
    engine = Case(requests).engine(max_context=2048)
    assert engine.apart()[0] == 2
    assert engine.results()[2].tolist() == [[1, 1, 1, 1]]


def test_what_a_request_gets_does_not_depend_on_what_it_would_get_later() -> None:
    """Two runs that differ only in outputs are alike until the first of these ends."""
    runs = []
    for output in (200, 2000):
        requests = tuple((0.01 * k, 300, output, 100) for k in range(6))
        oracle = Case(requests, kv_tokens=1500, ttft_s=0.2).check()
        runs.append([round(r.first_token, 9) for r in oracle.requests if r.first_token < 1.0])
    assert runs[0] == runs[1]
    assert len(runs[0]) >= 2


def test_who_outgrows_the_memory_begins_again_and_ends() -> None:
    """Outputs are five times as long as expected: the last to come make way, and all end."""
    requests = tuple((0.01 * k, 100, 250, 50) for k in range(8))
    oracle = Case(requests, kv_tokens=1300, ttft_s=60.0).check()
    assert oracle.preempted > 0
    assert not any(request.is_unservable for request in oracle.requests)


@pytest.mark.parametrize("chunk", [0, 2**20 + 1, 2**31 - 1])
def test_a_chunk_that_no_engine_has_is_refused(chunk: int) -> None:
    # Limits are found by going through all chunks: these took seconds.
    with pytest.raises(ValueError, match="a chunk must have between 1 and 1048576 tokens"):
        Case(((0.0, 100, 10, 10),), chunk=chunk).engine()
