"""The test of changing clocks beside all-reduces, over gloo on CPUs and stand-in GPUs."""

from __future__ import annotations

import pytest
from tools.changing_clocks import Setting, measure, section, two_clocks

from envplan.devices import DeviceError
from fake_nvml import FakeNvml

QUICK = Setting(communication="gloo", elements=64, seconds=0.4, intervals_s=(None, 0.1, 0.01, None))


def test_clocks_change_beside_all_reduces_and_are_given_back(fake_nvml: FakeNvml) -> None:
    rows = measure(QUICK)
    assert [row.interval_s for row in rows] == [None, 0.1, 0.01, None]
    assert [row.changes > 0 for row in rows] == [False, True, True, False]
    assert all(row.reductions >= 100 for row in rows)
    assert all(0 < row.median_s <= row.p99_s for row in rows)
    for index in range(2):
        assert fake_nvml.locked(index) is None
        assert set(fake_nvml.clock_changes(index)) == {1305, 1290, 0}
        locks = fake_nvml.calls(index, "lock")
        assert len(locks) >= sum(row.changes for row in rows)
    assert fake_nvml.calls(2) == []
    text = section(rows)
    assert text.count("locked") == 2
    assert "10 ms" in text


def test_one_gpu_and_missing_rights_are_said(fake_nvml: FakeNvml) -> None:
    fake_nvml.gpu(1).permission = 0
    with pytest.raises(DeviceError, match="GPU 1: this user may not set clocks"):
        measure(QUICK)
    fake_nvml.state.num_gpus = 1
    with pytest.raises(DeviceError, match="two GPUs"):
        measure(QUICK)
    assert fake_nvml.clock_changes() == []


def test_a_process_that_fails_is_an_error_and_gives_clocks_back(fake_nvml: FakeNvml) -> None:
    fake_nvml.fail("lock", index=1)
    with pytest.raises(DeviceError, match="all-reduces: "):
        measure(QUICK)
    assert fake_nvml.wait_until_free(60.0) is not None


def test_two_neighbouring_clocks() -> None:
    assert two_clocks(range(210, 1741, 15)) == (1305, 1290)
