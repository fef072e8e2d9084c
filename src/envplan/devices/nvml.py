"""NVIDIA GPUs through NVML, with the binding that NVIDIA publishes (nvidia-ml-py)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar, cast

import pynvml  # type: ignore[import-untyped]

from envplan.devices import (
    Backend,
    Device,
    DeviceError,
    DeviceInfo,
    PermissionDeniedError,
)

__all__ = ["NvmlBackend", "NvmlDevice", "once"]

T = TypeVar("T")

#: Between two samples of power, s.
_SAMPLE_S: Final = 0.02

#: The reason that one driver gives where a user's setting holds the clock.
_USERS_SETTING: Final = 0x2
#: Its bit among a process's capabilities, as in linux/capability.h.
_CAP_SYS_ADMIN: Final = 21

# Bits of nvmlDeviceGetCurrentClocksEventReasons that mean "slower than asked for". Idle (0x1) and
# a clock set by a user (0x2), which is what locking does, do not.
_THROTTLE_REASONS: Final = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
    0x100: "display clock",
}


class _UnsupportedError(DeviceError):
    """The card, or its driver, does not have what was asked for."""


def once(ask: Callable[[Any], T]) -> T:
    """A property that is asked for when it is first needed, and again where that failed.

    Not functools.cached_property, which until Python 3.12 has one lock for all objects: a GPU that
    hangs would hold up the others.
    """

    def get(self: NvmlDevice) -> T:
        if ask not in self._answers:
            self._answers[ask] = ask(self)
        answer: T = self._answers[ask]
        return answer

    return cast(T, property(get))


class NvmlBackend(Backend):
    """The GPUs of this machine.

    Raises:
        DeviceError: no driver is installed or loaded.
    """

    name: ClassVar = "nvml"
    real: ClassVar = True

    def __init__(self) -> None:
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise DeviceError(_no_driver(error)) from error
        self._devices: tuple[NvmlDevice, ...] = ()

    def devices(self) -> Sequence[NvmlDevice]:
        """All GPUs of this machine, by the driver's index."""
        if not self._devices:
            try:
                count = pynvml.nvmlDeviceGetCount()
            except pynvml.NVMLError as error:
                raise DeviceError(f"the NVIDIA driver: {error}; check nvidia-smi") from error
            if count == 0:
                raise DeviceError(
                    "the NVIDIA driver sees no GPU; check nvidia-smi, "
                    "or use the modelled backend: --backend modelled"
                )
            self._devices = tuple(self._device(index) for index in range(count))
        return self._devices

    def _device(self, index: int) -> NvmlDevice:
        return NvmlDevice(index)

    def close(self) -> None:
        """Stop sampling, and let go of the driver."""
        for device in self._devices:
            device.close()
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


class NvmlDevice(Device):
    """One NVIDIA GPU."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._name = f"GPU {index}"
        self._integral: _PowerIntegral | None = None
        self._answers: dict[object, Any] = {}  # see `once`

    def lock_clock(self, mhz: int) -> None:
        """Lock the SM clock, MHz; refused where it is shared (MIG)."""
        if self._mig:
            raise DeviceError(self._mig_remedy())
        self._set_clock(mhz)

    def reset_clock(self) -> None:
        """Give the clock back to the driver."""
        self._set_clock(0)

    def lock_refusal(self, *, probe: bool = False) -> str | None:
        """Why this user may not lock clocks and what to do, in one line; None if he may.

        NVML cannot be asked for this. Without `probe` it is told from the user's capabilities, and
        nothing is written. With it, for those about to set clocks anyway, a setting with the same
        permission is written that changes nothing: the power limit, to what it is.
        """
        try:
            return self._mig_remedy() if self._mig else self._permission_refusal(probe=probe)
        except DeviceError as error:
            return str(error)

    def clock(self) -> int:
        """The SM clock now, MHz."""
        return int(self._ask(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_SM))

    def apparent_locked_clock(self) -> int:
        """The clock that somebody seems to have locked it at, MHz; 0: none, or it cannot be told.

        NVML does not tell locks. But a GPU that is locked gives no reason for a clock below its
        highest one, not even that it is idle; one or the other driver names the user's setting.
        """
        with suppress(DeviceError):
            clock = self.clock()
            if clock < self.info.max_clock and self._event_reasons() in (0, _USERS_SETTING):
                return clock
        return 0

    def energy(self) -> int:
        """Energy used, mJ, as Device has it.

        The GPU's own counter, which drivers update every 20 to 100 ms. GPUs before Volta have
        none: there power is sampled from the first call on and integrated.
        """
        if self.info.energy_source == "counter":
            return int(self._ask(pynvml.nvmlDeviceGetTotalEnergyConsumption))
        if self._integral is None:
            self._integral = _PowerIntegral(self.power)
        return self._integral.sample()

    def power(self) -> float:
        """Power drawn now, W."""
        try:
            milliwatts = self._ask(pynvml.nvmlDeviceGetPowerUsage)
        except _UnsupportedError:
            raise DeviceError(
                f"{self._name}: the driver tells nobody the power of this card, so without an "
                "energy counter its energy cannot be measured"
            ) from None
        return float(milliwatts) / 1e3

    def throttle_reasons(self) -> Sequence[str]:
        """Why the clock is lower than asked for, now."""
        bits = self._event_reasons()
        return tuple(reason for bit, reason in _THROTTLE_REASONS.items() if bits & bit)

    def compute_processes(self) -> Sequence[int] | None:
        """The processes that compute on it now, as Device has it."""
        running: Sequence[Any] | None = self._ask_or(
            None, pynvml.nvmlDeviceGetComputeRunningProcesses
        )
        return None if running is None else tuple(int(process.pid) for process in running)

    def close(self) -> None:
        """Stop sampling power, where that was needed."""
        if self._integral is not None:
            self._integral.stop()

    @once
    def _handle(self) -> Any:
        # When first needed: one GPU that is lost shall not take the others with it.
        with self._errors():
            return pynvml.nvmlDeviceGetHandleByIndex(self._index)

    @once
    def _mig(self) -> bool:
        handle = self._handle
        with suppress(pynvml.NVMLError):  # too old a card or a driver to know of it
            return bool(pynvml.nvmlDeviceGetMigMode(handle)[0])
        return False

    @once
    def info(self) -> DeviceInfo:
        """The properties of the card, asked for once."""
        clocks = self._supported_clocks()
        with self._errors():
            driver = pynvml.nvmlSystemGetDriverVersion()
        power_limit_mw = self._ask_or(0, pynvml.nvmlDeviceGetPowerManagementLimit)
        return DeviceInfo(
            index=self._index,
            name=self._ask(pynvml.nvmlDeviceGetName),
            uuid=self._ask(pynvml.nvmlDeviceGetUUID),
            driver=driver,
            supported_clocks=clocks,
            max_clock=clocks[-1],
            power_limit=power_limit_mw / 1e3,
            source="measured",
            mig=self._mig,
            energy_source="counter" if self._has_counter() else "integrated power",
        )

    def _supported_clocks(self) -> tuple[int, ...]:
        """SM clocks beside the highest memory clock, which is the one CUDA work gets."""
        memory_mhz = self._ask_or((), pynvml.nvmlDeviceGetSupportedMemoryClocks)
        if memory_mhz:
            sm_clocks = pynvml.nvmlDeviceGetSupportedGraphicsClocks
            clocks_mhz = self._ask_or((), sm_clocks, max(memory_mhz))
            if clocks_mhz:
                return tuple(sorted(set(clocks_mhz)))
        # Some cards name no clocks but have a highest one.
        highest_mhz = self._ask(pynvml.nvmlDeviceGetMaxClockInfo, pynvml.NVML_CLOCK_SM)
        return (int(highest_mhz),)

    def _has_counter(self) -> bool:
        try:
            self._ask(pynvml.nvmlDeviceGetTotalEnergyConsumption)
        except _UnsupportedError:
            return False
        except DeviceError:  # it is there and fails now
            return True
        return True

    def _event_reasons(self) -> int:
        try:
            bits = self._ask(pynvml.nvmlDeviceGetCurrentClocksEventReasons)
        except _UnsupportedError:  # its older name, in drivers before 535
            bits = self._ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons)
        return int(bits)

    def _set_clock(self, mhz: int) -> None:
        """Lock the clock; 0: give it back."""
        if mhz:
            self._ask(pynvml.nvmlDeviceSetGpuLockedClocks, mhz, mhz)
        else:
            self._ask(pynvml.nvmlDeviceResetGpuLockedClocks)

    def _permission_refusal(self, *, probe: bool) -> str | None:
        """Why this user may not lock the clock of a card that has one of its own; None if he may.

        Raises:
            DeviceError: the driver refuses the probe, or fails.
        """
        if probe:
            with suppress(_UnsupportedError):  # then the capabilities decide
                limit_mw = self._ask(pynvml.nvmlDeviceGetPowerManagementLimit)
                self._ask(pynvml.nvmlDeviceSetPowerManagementLimit, limit_mw)
                return None
        return None if is_administrator() else self._permission_remedy()

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Ask the driver about this GPU.

        Args:
            function: of pynvml, that takes a handle first.
            arguments: that follow.

        Raises:
            PermissionDeniedError: this user may not.
            _UnsupportedError: the card or the driver has no such thing.
            DeviceError: the driver fails.
        """
        handle = self._handle
        with self._errors():
            return function(handle, *arguments)

    def _ask_or(self, default: T, function: Callable[..., T], *arguments: Any) -> T:
        """Ask the driver; the default where the card or the driver has no such thing.

        Raises:
            DeviceError: as for _ask.
        """
        try:
            answer: T = self._ask(function, *arguments)
        except _UnsupportedError:
            return default
        return answer

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise DeviceErrors that name the GPU in the place of pynvml's errors."""
        try:
            yield
        except pynvml.NVMLError_NoPermission as error:
            raise PermissionDeniedError(self._permission_remedy()) from error
        except pynvml.NVMLError as error:
            unsupported = (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound)
            error_type = _UnsupportedError if isinstance(error, unsupported) else DeviceError
            raise error_type(f"{self._name}: {error}; check nvidia-smi") from error

    def _permission_remedy(self) -> str:
        return (
            f"{self._name}: this user may not set clocks; run as root, in a container with "
            "--cap-add SYS_ADMIN, or let zeusd set them ($ZEUSD_SOCK_PATH)"
        )

    def _mig_remedy(self) -> str:
        return (
            f"{self._name}: MIG is on, so its clock and energy are shared by all parts; turn it "
            f"off as root with: nvidia-smi -i {self._index} -mig 0"
        )


class _PowerIntegral:
    """Energy by sampling power in a thread, for GPUs without a counter.

    Power between two samples is taken to lie on a straight line.

    Args:
        power_w: reads power; raises DeviceError.
    """

    def __init__(self, power_w: Callable[[], float]) -> None:
        self._read_power_w = power_w
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._energy_mj = 0.0
        self._last_sample_s = time.monotonic()
        self._last_power_w = power_w()
        threading.Thread(target=self._run, name="envplan-power", daemon=True).start()

    def stop(self) -> None:
        """Sample no more."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(_SAMPLE_S):
            # A sample that fails leaves a longer trapezoid, and whoever asks next is told.
            with suppress(DeviceError):
                self.sample()

    def sample(self) -> int:
        """Energy since it was created, mJ.

        Raises:
            DeviceError: power cannot be read now.
        """
        with self._lock:
            power_w = self._read_power_w()
            now_s = time.monotonic()
            mean_power_w = (self._last_power_w + power_w) / 2
            self._energy_mj += (now_s - self._last_sample_s) * mean_power_w * 1e3
            self._last_sample_s = now_s
            self._last_power_w = power_w
            return int(self._energy_mj)


def _no_driver(error: Exception) -> str:
    message = f"the NVIDIA driver does not start: {error}; see nvidia-smi and dmesg"
    if isinstance(error, pynvml.NVMLError_LibraryNotFound):
        message = (
            "no NVIDIA driver is installed here (libnvidia-ml.so.1 was not found); install it "
            "(in a container: start it with --gpus all)"
        )
    if isinstance(error, pynvml.NVMLError_DriverNotLoaded):
        message = "the NVIDIA driver is installed but not loaded; see nvidia-smi and dmesg"
    return f"{message}, or use the modelled backend: --backend modelled"


def is_administrator() -> bool:
    """Whether this process has CAP_SYS_ADMIN, which is what the driver asks for."""
    with suppress(OSError, IndexError):
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        _, _, effective = status.partition("CapEff:")
        capabilities = int(effective.split()[0], base=16)
        return bool(capabilities & 1 << _CAP_SYS_ADMIN)
    return False
