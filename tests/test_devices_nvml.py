"""The NVML backend through the real nvidia-ml-py, over the fake library."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from envplan.devices import Device, DeviceError, PermissionDeniedError, backend
from envplan.devices.modelled import ModelledBackend, gpu
from envplan.devices.nvml import is_administrator
from envplan.errors import InputError
from fake_nvml import GPU_IS_LOST, NOT_SUPPORTED, FakeNvml


@pytest.fixture
def devices(fake_nvml: FakeNvml) -> Iterator[list[Device]]:
    source = backend("nvml")
    yield list(source.devices())
    source.close()


def message(device: Device) -> str:
    refusal = device.lock_refusal(probe=True)
    assert refusal is not None
    assert "\n" not in refusal
    return refusal


def test_says_what_a_gpu_is(devices: list[Device]) -> None:
    assert len(devices) == 4
    info = devices[1].info
    assert (info.index, info.name, info.driver) == (1, "NVIDIA A40", "550.54.14")
    assert info.supported_clocks == tuple(range(210, 1741, 15))
    assert (info.max_clock, info.power_limit) == (1740, 300.0)
    assert (info.source, info.energy_source, info.mig) == ("measured", "counter", False)
    assert len({device.info.uuid for device in devices}) == 4


def test_clock_stays_where_it_is_locked_until_it_is_given_back(
    fake_nvml: FakeNvml, devices: list[Device]
) -> None:
    devices[2].lock_clock(1005)
    assert devices[2].clock() == fake_nvml.locked(2) == 1005
    assert devices[1].clock() == 1740
    devices[2].reset_clock()
    assert devices[2].clock() == 1740
    devices[2].reset_clock()
    assert fake_nvml.clock_changes(2) == [1005, 0, 0]


def test_processes_that_compute_are_told(fake_nvml: FakeNvml, devices: list[Device]) -> None:
    assert devices[1].compute_processes() == ()
    fake_nvml.compute(4711, 4712, index=1)
    assert devices[1].compute_processes() == (4711, 4712)
    assert devices[0].compute_processes() == ()


def test_energy_is_power_times_time(devices: list[Device]) -> None:
    device = devices[0]
    device.lock_clock(1005)
    assert device.power() == pytest.approx(gpu("a40").power_w(1005), abs=1e-3)
    begin, energy = time.monotonic(), device.energy()
    time.sleep(0.1)
    used, took = device.energy() - energy, time.monotonic() - begin
    assert 0 < used <= device.power() * took * 1e3 + 1


def test_without_a_counter_power_is_integrated(fake_nvml: FakeNvml, devices: list[Device]) -> None:
    fake_nvml.gpu(0).energy_counter = 0
    assert devices[0].info.energy_source == "integrated power"
    begin = time.monotonic()
    first = devices[0].energy()
    fake_nvml.fail("power")
    time.sleep(0.06)
    with pytest.raises(DeviceError, match="GPU 0: "):  # of one reading; the integral goes on
        devices[0].energy()
    fake_nvml.fail("power", 0)
    time.sleep(0.06)
    used, took = devices[0].energy() - first, time.monotonic() - begin
    assert 0.12 * 300e3 <= used <= took * 300e3 + 1
    fake_nvml.gpu(1).energy_counter = 0
    fake_nvml.fail("power", NOT_SUPPORTED, index=1)
    with pytest.raises(DeviceError, match="GPU 1: the driver tells nobody the power"):
        devices[1].energy()


def test_throttling_is_named_and_a_lock_is_none(fake_nvml: FakeNvml, devices: list[Device]) -> None:
    assert devices[0].throttle_reasons() == ()
    fake_nvml.gpu(0).throttle = 0x1 | 0x2
    assert devices[0].throttle_reasons() == ()
    fake_nvml.gpu(0).throttle = 0x2 | 0x4 | 0x40
    assert devices[0].throttle_reasons() == ("power cap", "hardware thermal slowdown")


def test_older_drivers_name_the_reasons_differently(
    fake_nvml: FakeNvml, devices: list[Device]
) -> None:
    fake_nvml.gpu(0).throttle = 0x4
    fake_nvml.fail("throttle", 13, times=1)  # function not found
    assert devices[0].throttle_reasons() == ("power cap",)
    fake_nvml.fail("throttle", NOT_SUPPORTED)
    with pytest.raises(DeviceError, match="Not Supported"):
        devices[0].throttle_reasons()


@pytest.mark.parametrize("settable", [True, False])
def test_permission_is_asked_for_without_touching_a_clock(
    fake_nvml: FakeNvml,
    devices: list[Device],
    monkeypatch: pytest.MonkeyPatch,
    settable: bool,
) -> None:
    if not settable:  # a card whose limit nobody may set: the user's capabilities decide
        fake_nvml.fail("limit", NOT_SUPPORTED)
    for allowed in (True, False):
        fake_nvml.gpu(0).permission = int(allowed)
        monkeypatch.setattr("envplan.devices.nvml.is_administrator", lambda a=allowed: a)
        for probe in (False, True):
            refusal = devices[0].lock_refusal(probe=probe)
            assert (refusal is None) == allowed
            assert allowed or "run as root" in str(refusal)
            assert probe or fake_nvml.calls(kind="limit") == []
        fake_nvml.state.log_size = 0
    assert fake_nvml.clock_changes() == []
    assert fake_nvml.gpu(0).power_limit == 300.0


def test_an_administrator_is_told_by_its_capabilities() -> None:
    status = Path("/proc/self/status").read_text()
    effective = int(status.split("CapEff:")[1].split()[0], 16)
    assert is_administrator() == bool(effective & 1 << 21)


def test_denied_permission_names_the_remedy(fake_nvml: FakeNvml, devices: list[Device]) -> None:
    fake_nvml.gpu(3).permission = 0
    with pytest.raises(PermissionDeniedError, match=r"GPU 3: .*run as root.*SYS_ADMIN"):
        devices[3].lock_clock(1005)
    with pytest.raises(PermissionDeniedError, match="GPU 3: "):
        devices[3].reset_clock()


def test_mig_is_refused_and_the_remedy_named(fake_nvml: FakeNvml, devices: list[Device]) -> None:
    fake_nvml.gpu(1).mig = 1
    assert devices[1].info.mig
    assert "nvidia-smi -i 1 -mig 0" in message(devices[1])
    with pytest.raises(DeviceError, match="MIG is on"):
        devices[1].lock_clock(1005)
    assert fake_nvml.calls(1) == []


def test_a_lost_gpu_says_which(fake_nvml: FakeNvml, devices: list[Device]) -> None:
    for kind in ("lock", "reset", "energy", "power", "clock", "throttle", "limit"):
        fake_nvml.fail(kind, GPU_IS_LOST, index=2)
    device = devices[2]
    assert "lost" in message(device)
    for call in (
        lambda: device.lock_clock(1005),
        device.reset_clock,
        device.energy,
        device.power,
        device.clock,
        device.throttle_reasons,
    ):
        with pytest.raises(DeviceError, match=r"GPU 2: .*lost"):
            call()


def test_a_lost_gpu_leaves_the_others_usable(fake_nvml: FakeNvml) -> None:
    fake_nvml.fail("handle", GPU_IS_LOST, index=2)
    source = backend("nvml")
    devices = source.devices()
    assert devices[3].lock_refusal(probe=True) is None
    assert "lost" in message(devices[2])
    source.close()


def test_no_gpu_and_no_loaded_driver_say_so(
    fake_nvml: FakeNvml,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_nvml.state.num_gpus = 0
    source = backend("nvml")
    with pytest.raises(DeviceError, match=r"sees no GPU.*--backend modelled"):
        source.devices()
    source.close()
    fake_nvml.fail("init")
    with pytest.raises(DeviceError, match="does not start"):
        backend("nvml")
    monkeypatch.setenv("ENVPLAN_FAKE_NVML", "")
    with pytest.raises(DeviceError, match=r"not loaded.*--backend modelled"):
        backend("nvml")


def test_no_driver_installed_says_so(tmp_path: Path) -> None:
    # What is no library hides the one a machine may have.
    (tmp_path / "libnvidia-ml.so.1").write_bytes(b"")
    script = (
        "from envplan.devices import DeviceError, backend\n"
        "try:\n    backend('nvml')\nexcept DeviceError as error:\n    print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "no NVIDIA driver is installed" in done.stdout


def test_modelled_gpu_uses_energy_as_time_passes_and_says_when_its_limit_holds_it() -> None:
    ticks = iter([0, 0, 10**9, 10**9, 2 * 10**9, 2 * 10**9])
    device = ModelledBackend("a40", now=lambda: next(ticks)).devices()[0]
    assert device.lock_refusal(probe=True) is None
    assert (device.info.source, device.info.driver) == ("modelled", "modelled")
    device.lock_clock(1012)
    assert (device.clock(), device.apparent_locked_clock(), device.throttle_reasons()) == (
        1005,
        1005,
        (),
    )
    assert device.energy() == pytest.approx(gpu("a40").power_w(1005) * 1e3, abs=1)
    device.reset_clock()
    assert device.clock() < device.info.max_clock
    assert device.throttle_reasons() == ("power cap",)
    assert device.power() == pytest.approx(300)
    assert device.energy() == pytest.approx((300 + gpu("a40").power_w(1005)) * 1e3, abs=1)


def test_unknown_backends_and_modelled_gpus_are_refused() -> None:
    with pytest.raises(InputError, match="nvml, zeusd, amdsmi, modelled"):
        backend("cuda")
    with pytest.raises(InputError, match="there is no modelled GPU 'a41'"):
        backend("modelled", gpu="a41")
    with pytest.raises(InputError, match="at least one"):
        backend("modelled", count=0)
    with pytest.raises(DeviceError, match="0 MHz"):
        backend("modelled").devices()[0].lock_clock(0)


def test_a_late_clock_keeps_the_earlier_one_until_it_comes(
    fake_nvml: FakeNvml, devices: list[Device]
) -> None:
    fake_nvml.gpu().clock_delay_ns = 50_000_000
    fake_nvml.gpu().clock_jitter_ns = 5_000_000
    devices[0].lock_clock(1005)
    assert fake_nvml.locked() == 1005
    (call,) = fake_nvml.calls(kind="lock")
    assert 0.045 <= call.due - call.time <= 0.055
    assert call.before == 1740
    while (clock_mhz := devices[0].clock()) == 1740:
        pass
    assert clock_mhz == 1005
    assert time.monotonic() >= call.due - 1e-6


def test_a_stuck_clock_stays_where_it_is(fake_nvml: FakeNvml, devices: list[Device]) -> None:
    fake_nvml.gpu().stuck = 600
    devices[0].lock_clock(1005)
    assert devices[0].clock() == 600
