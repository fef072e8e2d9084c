"""Orders: a running job changes to the ordered rung at the ordered iteration, and to no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from envplan._io.files import open_regular
from envplan.enforce.order_file import MAX_ORDER_BYTES, ORDER_SCHEMA, Order
from envplan.pipeline import Pipeline
from envplan.runtime.metric_families import prometheus_text
from envplan.runtime.node_metrics import NodeMetrics
from envplan.runtime.order_reader import OrderFollowed, OrderReader, OrderRefused
from envplan.runtime.run_records import RunEvent
from envplan.runtime.shim import Shim
from fake_nvml import FakeNvml, fake_nvml, wait_for
from shim_helpers import A40, frequency_plan, logged_lines

__all__ = ["fake_nvml"]

PLAN = frequency_plan(Pipeline("1f1b", 2, 4), gpu=A40, rung_times=(1.5, 2.0, 3.0))


def order(sequence: int = 1, **fields: Any) -> Order:
    known = {"rung": 1, "iteration_time_s": 1.5, "power_w": 100.0, "job": "a", **fields}
    plan_sha256 = known.pop("plan_sha256", PLAN.plan_sha256)
    return Order(schema=ORDER_SCHEMA, plan_sha256=plan_sha256, sequence=sequence, **known)


class Reader:
    """A reader of a file of orders, and what it logs."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "a.order.json"
        self.logged: list[RunEvent] = []
        self.reader = OrderReader(self.path, PLAN, rank=1, log=self.logged.append)

    def rungs(self, first: int, last: int) -> list[int]:
        return [self.reader.rung_for(iteration) for iteration in range(first, last + 1)]


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    return Reader(tmp_path)


def test_without_a_file_the_plan_itself_is_followed(reader: Reader) -> None:
    assert reader.rungs(0, 3) == [0, 0, 0, 0]
    assert reader.logged == []


def test_an_order_counts_from_the_iteration_that_it_names(reader: Reader) -> None:
    reader.rungs(0, 9)
    order(from_iteration=12, lead=2, rung=2).save(reader.path)
    assert reader.rungs(10, 14) == [0, 0, 2, 2, 2]
    (followed,) = reader.logged
    assert isinstance(followed, OrderFollowed)
    assert (followed.sequence, followed.step, followed.rung, followed.late) == (1, 12, 2, 0)


def test_an_order_that_comes_while_one_is_opened_is_read_once(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    order(1).save(reader.path)

    def opened_late(path: str) -> BinaryIO:
        order(2, rung=2).save(reader.path)
        monkeypatch.undo()
        return open_regular(path)

    monkeypatch.setattr("envplan.runtime.order_reader.open_regular", opened_late)
    assert reader.rungs(0, 3) == [2, 2, 2, 2]
    assert [type(event) for event in reader.logged] == [OrderFollowed]


def test_a_late_reader_follows_at_once_and_says_how_late(reader: Reader) -> None:
    reader.rungs(0, 19)
    order(from_iteration=15, lead=2).save(reader.path)
    assert reader.rungs(20, 21) == [1, 1]
    (followed,) = reader.logged
    assert isinstance(followed, OrderFollowed)
    assert followed.late == 5


def test_an_order_that_is_there_from_the_start_counts_from_the_first_iteration(
    reader: Reader,
) -> None:
    order(from_iteration=50, lead=2).save(reader.path)
    assert reader.rungs(0, 1) == [1, 1]
    (followed,) = reader.logged
    assert isinstance(followed, OrderFollowed)
    assert followed.late == 0


def test_an_order_that_counts_an_earlier_run_is_followed_at_once(reader: Reader) -> None:
    reader.rungs(0, 4)
    order(from_iteration=90_000, lead=2).save(reader.path)
    assert reader.rungs(5, 5) == [1]


def test_a_newer_order_takes_the_place_of_one_that_waits(reader: Reader) -> None:
    reader.rungs(0, 4)
    order(1, from_iteration=8, lead=2, rung=1).save(reader.path)
    reader.rungs(5, 5)
    order(2, from_iteration=9, lead=2, rung=3).save(reader.path)
    assert reader.rungs(6, 9) == [0, 0, 0, 3]


BROKEN = {
    "empty": b"",
    "cut short": order(2, rung=3).to_json().encode()[:-20],
    "not JSON": b"rung 3",
    "another schema": b'{"schema": "envplan/plan/v1"}',
    "too long": order(2, rung=3).to_json().encode() + b" " * MAX_ORDER_BYTES,
    "for another plan": order(2, rung=3, plan_sha256="12" * 32).to_json().encode(),
    "beyond the ladder": order(2, rung=4).to_json().encode(),
    "stale": order(1, rung=3).to_json().encode(),
    "deeply nested": b"[" * 8000,
    "bytes": bytes(range(256)),
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_a_broken_order_leaves_the_last_one_in_force(reader: Reader, content: bytes) -> None:
    order(1, rung=2).save(reader.path)
    assert reader.rungs(0, 1) == [2, 2]
    reader.path.write_bytes(content)
    assert reader.rungs(2, 9) == [2] * 8
    refused = [event for event in reader.logged if isinstance(event, OrderRefused)]
    assert len(refused) == 1
    assert "\n" not in refused[0].message
    order(3, rung=1).save(reader.path)
    assert reader.rungs(10, 10) == [1]


def test_a_lost_order_leaves_the_last_one_in_force(reader: Reader) -> None:
    order(1, rung=2).save(reader.path)
    reader.rungs(0, 1)
    reader.path.unlink()
    assert reader.rungs(2, 5) == [2] * 4
    reader.path.mkdir()
    assert reader.rungs(6, 9) == [2] * 4
    refused = [event for event in reader.logged if isinstance(event, OrderRefused)]
    assert len(refused) == 1


@given(st.floats(0, 1), st.integers(0, 1000), st.integers(1, 400))
def test_rungs_alternate_evenly(share: float, first: int, count: int) -> None:
    alternating = order(rung=3, faster_rung=1, faster_share=share)
    rungs = [alternating.rung_at(first + k) for k in range(count)]
    assert set(rungs) <= {1, 3}
    assert abs(rungs.count(1) - share * count) < 1 + 1e-9


def test_an_order_names_no_faster_rung_that_is_slower() -> None:
    with pytest.raises(ValidationError, match="faster rung"):
        order(rung=1, faster_rung=1, faster_share=0.5)


def train(shim: Shim, steps: int) -> list[float]:
    """Run steps as the plan has them; the iteration time of the plan that each one followed."""
    followed = []
    for _ in range(steps):
        for key in shim.operations:
            shim.begin(*key)
            shim.end(*key)
        followed.append(shim.followed_time)
        shim.step()
    return followed


def test_the_shim_follows_orders_and_logs_it(fake_nvml: FakeNvml, tmp_path: Path) -> None:
    path, log = tmp_path / "a.order.json", tmp_path / "run.jsonl"
    with Shim(PLAN, rank=0, orders=path, log=log) as shim:
        assert train(shim, 3) == [1.0, 1.0, 1.0]
        order(1, from_iteration=5, lead=2, rung=2).save(path)
        assert train(shim, 4) == [1.0, 1.0, 2.0, 2.0]
        assert shim.orders is not None
        assert shim.orders.in_force is not None
        assert shim.orders.in_force.sequence == 1
    lines = logged_lines(log)
    (acknowledged,) = [line for line in lines if line["event"] == "order"]
    assert (acknowledged["rank"], acknowledged["step"], acknowledged["sequence"]) == (0, 5, 1)
    assert fake_nvml.wait_until_free(10) is not None


def test_of_orders_and_stragglers_the_slower_counts(fake_nvml: FakeNvml, tmp_path: Path) -> None:
    path = tmp_path / "a.order.json"
    order(1, rung=2).save(path)
    with Shim(PLAN, rank=0, orders=path, log=None) as shim:
        assert train(shim, 1) == [2.0]
        shim.set_straggler_time(1.6)
        assert train(shim, 2) == [2.0, 2.0]
        shim.set_straggler_time(9.0)
        assert train(shim, 2) == [2.0, 3.0]
        shim.set_straggler_time(None)
        assert train(shim, 2) == [3.0, 2.0]
        order(2, rung=0).save(path)
        assert train(shim, 2) == [2.0, 1.0]


def test_the_metrics_tell_which_order_is_followed(fake_nvml: FakeNvml, tmp_path: Path) -> None:
    path = tmp_path / "a.order.json"
    order(7, rung=2).save(path)
    with Shim(PLAN, rank=0, orders=path, log=None) as shim:
        train(shim, 1)
        path.write_text("rung 3")
        train(shim, 1)
        uuid = f'uuid="{fake_nvml.gpu(0).uuid.decode()}"'

        def value(name: str) -> list[str]:
            lines = prometheus_text(NodeMetrics("nvml").collect()).splitlines()
            return [line.split()[-1] for line in lines if line.startswith(name) and uuid in line]

        wait_for(lambda: value("envplan_orders_refused_total") == ["1.0"])
        assert value("envplan_order{") == ["7.0"]
        assert value("envplan_order_rung{") == ["2.0"]
