"""AMD GPUs: a stand-in for AMD SMI's Python module answers, for there is no AMD GPU here."""

from __future__ import annotations

import enum
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from envplan.devices import (
    Counted,
    Device,
    DeviceError,
    PermissionDeniedError,
    choose,
    opened,
    visible_gpus,
)
from envplan.devices.modelled import gpu


class AmdSmiClkType(enum.Enum):
    GFX = 0


class StandInError(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(f"error {code}")
        self._code = code

    def get_error_code(self) -> int:
        return self._code


class StandIn(SimpleNamespace):
    """AMD SMI as its documentation describes it, with GPUs that run at what they are set to."""

    AmdSmiClkType = AmdSmiClkType
    AmdSmiException = StandInError

    def __init__(self, count: int = 2) -> None:
        super().__init__()
        self.gpus = [[132, 2100] for _ in range(count)]
        self.is_root = True
        self.is_open = False

    def amdsmi_init(self) -> None:
        self.is_open = True

    def amdsmi_shut_down(self) -> None:
        self.is_open = False

    def amdsmi_get_processor_handles(self) -> list[int]:
        return list(range(len(self.gpus)))

    def amdsmi_get_gpu_asic_info(self, handle: int) -> dict[str, Any]:
        return {"market_name": "AMD Instinct MI300X"}

    def amdsmi_get_gpu_device_uuid(self, handle: int) -> str:
        return f"uuid-{handle}"

    def amdsmi_get_gpu_driver_info(self, handle: int) -> dict[str, Any]:
        return {"driver_version": "6.12"}

    def amdsmi_get_power_cap_info(self, handle: int) -> dict[str, Any]:
        return {"power_cap": 750_000_000}

    def amdsmi_get_clk_freq(self, handle: int, kind: AmdSmiClkType) -> dict[str, Any]:
        return {"num_supported": 2, "current": 1, "frequency": [132_000_000, 2_100_000_000]}

    def amdsmi_get_clock_info(self, handle: int, kind: AmdSmiClkType) -> dict[str, Any]:
        lowest, highest = self.gpus[handle]
        return {"clk": highest, "min_clk": lowest, "max_clk": highest}

    def amdsmi_set_gpu_clk_range(
        self, handle: int, lowest: int, highest: int, kind: AmdSmiClkType
    ) -> None:
        if not self.is_root:
            raise StandInError(10)
        if not 132 <= lowest <= highest <= 2100:
            raise StandInError(1)
        self.gpus[handle] = [lowest, highest]

    def amdsmi_get_energy_count(self, handle: int) -> dict[str, Any]:
        return {"energy_accumulator": 1_000_000, "counter_resolution": 15.3, "timestamp": 0}

    def amdsmi_get_power_info(self, handle: int) -> dict[str, Any]:
        return {"current_socket_power": 412, "average_socket_power": "N/A"}

    def amdsmi_get_violation_status(self, handle: int) -> dict[str, Any]:
        return {"active_ppt_pwr": True, "active_socket_thrm": False}

    def amdsmi_get_gpu_process_list(self, handle: int) -> list[dict[str, Any]]:
        return [{"pid": 4711}]


@pytest.fixture
def smi(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    monkeypatch.setitem(sys.modules, "amdsmi", stand_in)  # type: ignore[arg-type]
    return stand_in


def test_a_gpu_says_what_it_is(smi: StandIn) -> None:
    with opened("amdsmi") as source:
        first, second = source.devices()
        assert first.info.name == gpu("mi300x").name
        assert (second.info.index, second.info.uuid) == (1, "uuid-1")
        assert first.info.supported_clocks[0] == 132
        assert first.info.max_clock == first.info.supported_clocks[-1] == 2100
        assert first.info.power_limit == 750
        assert first.energy() == 15_300
        assert first.power() == 412
        assert first.throttle_reasons() == ("power cap",)
        assert first.compute_processes() == (4711,)
    assert not smi.is_open


def test_a_clock_is_held_and_given_back(smi: StandIn) -> None:
    with opened("amdsmi") as source:
        device: Device = source.devices()[1]
        assert device.apparent_locked_clock() == 0
        device.lock_clock(1300)
        assert (device.clock(), device.apparent_locked_clock()) == (1300, 1300)
        assert smi.gpus == [[132, 2100], [1300, 1300]]
        device.give_back_clock()
        assert smi.gpus[1] == [132, 2100]
        with pytest.raises(DeviceError, match="cannot run at 0 MHz"):
            device.lock_clock(0)
        with pytest.raises(DeviceError, match="GPU 1: AMD SMI: error 1"):
            device.lock_clock(5000)


def test_whoever_may_not_set_clocks_is_told(smi: StandIn) -> None:
    smi.is_root = False
    with opened("amdsmi") as source, pytest.raises(PermissionDeniedError, match="root alone"):
        source.devices()[0].lock_clock(1300)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0, 1, 2, 3]),
        ({"HIP_VISIBLE_DEVICES": "2,0"}, [2, 0]),
        ({"CUDA_VISIBLE_DEVICES": "3"}, [3]),
        ({"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "3"}, [1]),
        ({"ROCR_VISIBLE_DEVICES": "3,1,2"}, [3, 1, 2]),
        ({"ROCR_VISIBLE_DEVICES": "3,1,2", "HIP_VISIBLE_DEVICES": "2,0"}, [2, 3]),
        ({"ROCR_VISIBLE_DEVICES": "3,1", "HIP_VISIBLE_DEVICES": "0,2"}, [3]),
    ],
)
def test_a_process_has_the_gpus_that_rocm_and_hip_leave(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], expected: list[int]
) -> None:
    monkeypatch.setitem(sys.modules, "amdsmi", StandIn(count=4))  # type: ignore[arg-type]
    for system in ("CUDA", "HIP", "ROCR"):
        monkeypatch.delenv(f"{system}_VISIBLE_DEVICES", raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with opened("amdsmi") as source:
        assert visible_gpus(source) == expected
        assert choose(source, 0, Counted.BY_CUDA).info.index == expected[0]
        # A process that is to see that GPU alone sees it, whatever was set.
        for name, value in source.environment_of(source.devices()[2]).items():
            monkeypatch.setenv(name, value)
        assert visible_gpus(source) == [2]


def test_a_hidden_gpu_is_named_with_the_variables_that_hide_it(
    smi: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1,0")
    words = "there are 2, .*with ROCR_VISIBLE_DEVICES=0,1, HIP_VISIBLE_DEVICES=1,0"
    with opened("amdsmi") as source, pytest.raises(DeviceError, match=words):
        choose(source, 2, Counted.BY_CUDA)


def test_without_rocm_the_error_says_where_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    with pytest.raises(DeviceError, match="it comes with ROCm"), opened("amdsmi"):
        pass


def test_without_a_gpu_the_error_says_so(smi: StandIn) -> None:
    smi.gpus = []
    with opened("amdsmi") as source, pytest.raises(DeviceError, match="sees no GPU"):
        source.devices()


@pytest.mark.parametrize("key", ["mi300x", "mi325x"])
def test_dense_products_hold_the_modelled_card_at_its_limit(key: str) -> None:
    device = gpu(key)
    assert device.capped_clock_mhz < device.clocks_mhz[0]
    assert device.power_w(2100) == pytest.approx(device.power_limit_w, rel=1e-6)
