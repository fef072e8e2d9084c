"""AMD GPUs through AMD SMI, as ROCm installs it.

Untried on hardware: in the tests a stand-in answers. Clocks are set as Zeus does
(zeus.device.gpu.amd): a range of GFX clocks whose two ends are the same, and back to the range of
the hardware. Setting them needs root.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from importlib import import_module
from typing import Any, ClassVar, Final

from envplan.devices import Backend, Device, DeviceError, DeviceInfo, PermissionDeniedError

__all__ = ["AmdsmiBackend", "AmdsmiDevice"]

#: AMD SMI's code for what this user may not do.
_NO_PERMISSION: Final = 10
#: The driver takes any clock of its range; these are offered, MHz apart.
_STEP_MHZ: Final = 25
_UW_PER_W: Final = 1e6
_UJ_PER_MJ: Final = 1e3


class AmdsmiBackend(Backend):
    """The AMD GPUs of this machine.

    Raises:
        DeviceError: AMD SMI is not installed, or finds no driver.
    """

    name: ClassVar = "amdsmi"
    real: ClassVar = True
    #: HIP counts what ROCm's runtime leaves, and takes CUDA's variable where its own is not set.
    visibility: ClassVar = (
        ("ROCR_VISIBLE_DEVICES",),
        ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    )

    def __init__(self) -> None:
        try:
            self._smi: Any = import_module("amdsmi")
        except (ImportError, OSError, KeyError) as error:  # it is installed, but its library is not
            raise DeviceError(
                f"AMD SMI does not load ({error}); it comes with ROCm, in /opt/rocm/share/amd_smi"
            ) from error
        with _errors(self._smi, "AMD SMI"):
            self._smi.amdsmi_init()
        self._devices: tuple[AmdsmiDevice, ...] = ()

    def devices(self) -> Sequence[AmdsmiDevice]:
        """All AMD GPUs of this machine, by AMD SMI's index."""
        if not self._devices:
            with _errors(self._smi, "AMD SMI"):
                handles = self._smi.amdsmi_get_processor_handles()
            if not handles:
                raise DeviceError(
                    "AMD SMI sees no GPU; check amd-smi list, or use the modelled backend: "
                    "--backend modelled"
                )
            self._devices = tuple(
                AmdsmiDevice(self._smi, handle, index) for index, handle in enumerate(handles)
            )
        return self._devices

    def environment_of(self, device: Device) -> dict[str, str]:
        """Variables with which a process sees one GPU alone: HIP knows GPUs by number."""
        return {
            "ROCR_VISIBLE_DEVICES": str(device.info.index),
            "HIP_VISIBLE_DEVICES": "0",
        }

    def close(self) -> None:
        """Let go of the driver."""
        with suppress(self._smi.AmdSmiException):
            self._smi.amdsmi_shut_down()


class AmdsmiDevice(Device):
    """One AMD GPU.

    Args:
        smi: AMD SMI's Python module.
        handle: of the GPU.
        index: of it.
    """

    def __init__(self, smi: Any, handle: Any, index: int) -> None:
        self._smi = smi
        self._handle = handle
        self._index = index
        self._name = f"GPU {index}"

    @cached_property
    def info(self) -> DeviceInfo:
        """Its properties that do not change."""
        lowest, highest = self._range_mhz
        clocks = {highest, *range(lowest, highest, _STEP_MHZ)}
        return DeviceInfo(
            index=self._index,
            name=str(self._ask("amdsmi_get_gpu_asic_info")["market_name"]),
            uuid=str(self._ask("amdsmi_get_gpu_device_uuid")),
            driver=str(self._ask("amdsmi_get_gpu_driver_info")["driver_version"]),
            supported_clocks=tuple(sorted(clocks)),
            max_clock=highest,
            power_limit=self._ask("amdsmi_get_power_cap_info")["power_cap"] / _UW_PER_W,
            source="measured",
        )

    @cached_property
    def _range_mhz(self) -> tuple[int, int]:
        """The lowest and the highest GFX clock, as the hardware has them."""
        clocks = self._ask("amdsmi_get_clk_freq", self._smi.AmdSmiClkType.GFX)["frequency"]
        mhz = [round(hz / 1e6) for hz in clocks if hz]
        return min(mhz), max(mhz)

    def lock_clock(self, mhz: int) -> None:
        """Hold the GFX clock at so many MHz."""
        if mhz <= 0:
            raise DeviceError(f"{self._name}: cannot run at {mhz} MHz")
        self._set_range(mhz, mhz)

    def reset_clock(self) -> None:
        """Give the whole range back to the driver."""
        self._set_range(*self._range_mhz)

    def _set_range(self, lowest_mhz: int, highest_mhz: int) -> None:
        gfx = self._smi.AmdSmiClkType.GFX
        self._ask("amdsmi_set_gpu_clk_range", lowest_mhz, highest_mhz, gfx)

    def lock_refusal(self, *, probe: bool = False) -> str | None:
        """Why this user may not lock clocks, in one line; None if he may.

        Only root may; whether the card lets its clocks be set is known once that is tried.
        """
        del probe  # nothing can be written that changes nothing
        if os.geteuid() == 0:
            return None
        return f"{self._name}: AMD SMI lets root alone set clocks; run as root"

    def clock(self) -> int:
        """The GFX clock now, MHz."""
        return int(self._clock_info()["clk"])

    def apparent_locked_clock(self) -> int:
        """The clock that both ends of its range are at, MHz; 0: they differ."""
        clock = self._clock_info()
        lowest, highest = int(clock["min_clk"]), int(clock["max_clk"])
        return highest if lowest == highest else 0

    def _clock_info(self) -> dict[str, Any]:
        answer: dict[str, Any] = self._ask("amdsmi_get_clock_info", self._smi.AmdSmiClkType.GFX)
        return answer

    def energy(self) -> int:
        """Energy by its accumulator, mJ."""
        counter = self._ask("amdsmi_get_energy_count")
        # The field was called power before ROCm 6.
        ticks = counter.get("energy_accumulator", counter.get("power"))
        return int(ticks * counter["counter_resolution"] / _UJ_PER_MJ)

    def power(self) -> float:
        """Power of its socket now, W."""
        power = self._ask("amdsmi_get_power_info")
        for field in ("current_socket_power", "average_socket_power"):
            if isinstance(power.get(field), int | float):
                return float(power[field])
        raise DeviceError(f"{self._name}: AMD SMI does not tell its power")

    def throttle_reasons(self) -> Sequence[str]:
        """What holds the clock back by AMD SMI's violation status; empty where it has none."""
        try:
            status = self._ask("amdsmi_get_violation_status")
        except DeviceError:  # before MI300
            return ()
        active = {"active_ppt_pwr": "power cap", "active_socket_thrm": "temperature"}
        return tuple(reason for field, reason in active.items() if status.get(field) is True)

    def compute_processes(self) -> Sequence[int] | None:
        """The processes on it now."""
        try:
            found = self._ask("amdsmi_get_gpu_process_list")
        except DeviceError:
            return None
        return tuple(int(process["pid"]) for process in found)

    def _ask(self, function: str, *arguments: Any) -> Any:
        """What a function of AMD SMI says of this GPU.

        Raises:
            PermissionDeniedError: this user may not ask for that.
            DeviceError: it fails.
        """
        ask: Callable[..., Any] = getattr(self._smi, function)
        with _errors(self._smi, self._name):
            return ask(self._handle, *arguments)


@contextmanager
def _errors(smi: Any, who: str) -> Iterator[None]:
    """AMD SMI's exceptions as ours.

    Raises:
        PermissionDeniedError: this user may not do that.
        DeviceError: anything else failed.
    """
    try:
        yield
    except smi.AmdSmiException as error:
        code = getattr(error, "get_error_code", lambda: None)()
        if code is not None and abs(code) == _NO_PERMISSION:
            raise PermissionDeniedError(f"{who}: AMD SMI lets root alone do that") from error
        raise DeviceError(f"{who}: AMD SMI: {error}; check amd-smi list") from error
