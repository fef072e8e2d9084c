"""GPUs: how fast they compute, what they draw at each clock, and how to set their clocks.

NVML and a modelled GPU look alike to their users: a `Backend` is a source of `Device`s.

Enters: indices of GPUs, clocks to set. Leaves: clocks, powers, energies; and clocks given back,
whatever dies (guard.py). Knows no profile and no plan; whoever touches a GPU imports it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Protocol, TypeVar

from envplan.errors import EnvplanError, InputError, unknown

if TYPE_CHECKING:
    from pydantic import JsonValue

T = TypeVar("T")

#: Backends by name. A new one is one module and one line here.
_CLASSES: Final = {
    "nvml": ("envplan.devices.nvml", "NvmlBackend"),
    "zeusd": ("envplan.devices.zeusd", "ZeusdBackend"),
    "amdsmi": ("envplan.devices.amd", "AmdsmiBackend"),
    "modelled": ("envplan.devices.modelled", "ModelledBackend"),
}
BACKENDS: Final = tuple(_CLASSES)
#: As with Zeus, whoever names zeusd's socket has zeusd set clocks.
DEFAULT_BACKEND: Final = "zeusd" if os.environ.get("ZEUSD_SOCK_PATH") else "nvml"

#: How long a driver may take to start or to stop, s.
START_TIMEOUT_S: Final = 30.0
STOP_TIMEOUT_S: Final = 5.0
#: How long one GPU may take to answer, s.
GPU_TIMEOUT_S: Final = 10.0


class DeviceError(EnvplanError):
    """A GPU or its driver refused or failed; says which, why and what to do."""


class LeftSetError(DeviceError):
    """A clock could not be given back; says which GPU is left at which clock, and what to do."""

    exit_code = 1


class PermissionDeniedError(DeviceError):
    """This user may not set clocks; says how to allow it. Trying again does not help."""


@dataclass(frozen=True)
class DeviceInfo:
    """The properties of a GPU that do not change.

    Attributes:
        index: as the driver counts, from 0.
        name: such as "NVIDIA A40".
        uuid: of this very card.
        driver: version of its driver; "modelled" where there is none.
        supported_clocks: SM clocks that may be asked for, MHz, ascending.
        max_clock: the highest of them, MHz.
        power_limit: W; 0 where the driver does not say.
        source: "measured" or "modelled": what energies read from it are.
        mig: whether it is split into instances (MIG), which share its clock.
        energy_source: "counter", "integrated power" (sampled while the process runs) or
            "modelled".
    """

    index: int
    name: str
    uuid: str
    driver: str
    supported_clocks: tuple[int, ...]
    max_clock: int
    power_limit: float
    source: Literal["measured", "modelled"]
    mig: bool = False
    energy_source: str = "counter"


class Device(Protocol):
    """One GPU. All methods raise DeviceError when the driver refuses."""

    @property
    def info(self) -> DeviceInfo:
        """Its properties that do not change."""

    def lock_clock(self, mhz: int) -> None:
        """Run at this SM clock, whoever asks for what, until reset_clock.

        Raises:
            PermissionDeniedError: this user may not.
        """

    def reset_clock(self) -> None:
        """Give the clock back to the driver. Harmless when it was not locked."""

    def give_back_clock(self, previous_mhz: int = 0) -> None:
        """Leave the clock as it was before: at a clock, MHz, or for 0 to the driver.

        Raises:
            PermissionDeniedError: this user may not.
        """
        if previous_mhz:
            self.lock_clock(previous_mhz)
        else:
            self.reset_clock()

    def lock_refusal(self, *, probe: bool = False) -> str | None:
        """Why this user may not lock clocks and what to do, in one line; None if he may.

        Args:
            probe: ask the driver by writing a setting to what it is; without it nothing is written.
        """

    def clock(self) -> int:
        """The SM clock now, MHz."""

    def apparent_locked_clock(self) -> int:
        """The clock that somebody seems to have locked it at, MHz; 0: none, or nobody can tell."""

    def energy(self) -> int:
        """Energy used since some moment long ago, mJ; only differences mean anything."""

    def power(self) -> float:
        """Power drawn now, W."""

    def throttle_reasons(self) -> Sequence[str]:
        """Why the clock is lower than asked for, now; empty if it is not."""

    def compute_processes(self) -> Sequence[int] | None:
        """The processes that compute on it now, as the driver numbers them; None: it cannot tell.

        In a container these may be the host's numbers, or none.
        """
        return ()


def call_with_timeout(timeout_s: float, call: Callable[[], T], who: str) -> T:
    """Call a driver that may hang, in a thread, which is then left behind.

    Args:
        timeout_s: to wait for the answer.
        call: the driver.
        who: is called, for the error.

    Returns:
        What the call returns.

    Raises:
        DeviceError: there was no answer in time.
    """
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:  # it is raised where the answer is waited for
            answer.set_exception(error)

    threading.Thread(target=run, name="envplan-ask", daemon=True).start()
    try:
        return answer.result(timeout_s)
    except TimeoutError:
        raise DeviceError(
            f"{who}: no answer within {timeout_s:g} s; the driver hangs, see dmesg"
        ) from None


class Backend(Protocol):
    """A source of devices. It may raise DeviceError when it is made: there is no driver.

    Attributes:
        name: as on the command line.
        real: whether its GPUs are this machine's, which can be measured and which CUDA may hide.
        visibility: environment variables that hide GPUs from a process: each tuple leaves some of
            those that the one before has left; of its variables the first that is set counts.
        socket: of the daemon that sets clocks; "" where none does.
    """

    name: ClassVar[str]
    real: ClassVar[bool]
    visibility: ClassVar[Sequence[tuple[str, ...]]] = (("CUDA_VISIBLE_DEVICES",),)
    socket: str = ""

    def environment_of(self, device: Device) -> dict[str, str]:
        """Variables with which a process sees one GPU alone."""
        # CUDA and NVML number GPUs differently.
        return {"CUDA_VISIBLE_DEVICES": device.info.uuid}

    def devices(self) -> Sequence[Device]:
        """All GPUs, by index.

        Raises:
            DeviceError: there is no GPU; says so and what to do.
        """

    @classmethod
    def models(cls) -> Sequence[str]:
        """Values of its option `gpu`, such as "a40"; none where the GPUs are this machine's."""
        return ()

    def close(self) -> None:
        """Let go of the driver. Locked clocks stay locked: give them back first."""
        return


def spaced_clocks(clocks: Sequence[int], step: int) -> list[int]:
    """Clocks from the highest down, neighbours at least `step` apart.

    Args:
        clocks: supported SM clocks, MHz, in any order.
        step: MHz; 0 takes all of them.
    """
    spaced: list[int] = []
    for clock in sorted(clocks, reverse=True):
        if not spaced or spaced[-1] - clock >= step:
            spaced.append(clock)
    return spaced


def backend_class(name: str = DEFAULT_BACKEND) -> type[Backend]:
    """The class of a backend, without starting it.

    Raises:
        InputError: there is no such backend.
    """
    if name not in _CLASSES:
        raise InputError(unknown("backend", name, BACKENDS))
    module, class_name = _CLASSES[name]
    backend_type: type[Backend] = getattr(import_module(module), class_name)
    return backend_type


def backend(name: str = DEFAULT_BACKEND, **options: Any) -> Backend:
    """A source of GPUs, ready for use. Close it when done.

    Args:
        name: "nvml" for the GPUs of this machine, "zeusd" for the same with clocks set by the
            Zeus daemon, "amdsmi" for AMD's (untried on hardware), "modelled" for GPUs that are
            not there.
        options: see the backend's class.

    Raises:
        DeviceError: there is no driver, or it does not work; says what to do.
        InputError: there is no such backend, or no such modelled GPU.
    """
    return backend_class(name)(**options)


@contextmanager
def opened(name: str = DEFAULT_BACKEND, **options: Any) -> Iterator[Backend]:
    """A source of GPUs for as long as the context lasts; a driver that hangs is not waited for.

    Raises:
        DeviceError: as for `backend`, or the driver does not start in time.
        InputError: as for `backend`.
    """
    source = call_with_timeout(START_TIMEOUT_S, lambda: backend(name, **options), "the driver")
    try:
        yield source
    finally:
        with suppress(DeviceError):
            call_with_timeout(STOP_TIMEOUT_S, source.close, "the driver")


@dataclass(frozen=True, kw_only=True)
class GpuState:
    """A GPU as it is now; of one that is lost or hangs, only why nothing is known.

    Attributes:
        gpu: the modelled GPU that was asked for, such as "a40"; None for any other.
        index: as the driver counts, from 0.
        info: what stays the same about it; None where the driver does not say.
        clock_mhz: the SM clock now.
        power_w: drawn now.
        throttle_reasons: why the clock is lower than asked for; empty if it is not.
        refusal: why its clock may not be set, in one line; None if this user may set it.
    """

    gpu: str | None
    index: int
    info: DeviceInfo | None = None
    clock_mhz: int | None = None
    power_w: float | None = None
    throttle_reasons: tuple[str, ...] = ()
    refusal: str | None = None

    def to_dict(self) -> dict[str, JsonValue]:
        """The state in JSON types, with the same keys for every GPU."""
        info = self.info
        return {
            "gpu": self.gpu,
            "index": self.index,
            "name": info.name if info else None,
            "uuid": info.uuid if info else None,
            "driver": info.driver if info else None,
            "source": info.source if info else None,
            "supported_clocks_mhz": list(info.supported_clocks) if info else None,
            "power_limit_w": info.power_limit if info else None,
            "clock_mhz": self.clock_mhz,
            "power_w": self.power_w,
            "throttle_reasons": list(self.throttle_reasons) if info else None,
            "energy_source": info.energy_source if info else None,
            "mig": info.mig if info else None,
            "refusal": self.refusal,
        }


def describe_gpus(name: str, **options: Any) -> list[GpuState]:
    """GPUs of a backend as they are now. No clock is changed.

    Args:
        name: of the backend.
        options: for the backend.

    Raises:
        DeviceError: as for `opened`, or there is no GPU.
        InputError: as for `opened`.
    """
    states: list[GpuState] = []
    with opened(name, **options) as source:
        for index, device in enumerate(source.devices()):
            state = GpuState(gpu=options.get("gpu"), index=index)
            try:
                state = call_with_timeout(
                    GPU_TIMEOUT_S, partial(_read_state, device, state), f"GPU {index}"
                )
            except DeviceError as error:
                state = replace(state, refusal=str(error))
            states.append(state)
    return states


def _read_state(device: Device, state: GpuState) -> GpuState:
    info = device.info
    state = replace(state, index=info.index, info=info)
    if info.source == "measured":  # modelled GPUs run nothing now
        # Some cards do not say all of these.
        with suppress(DeviceError):
            state = replace(state, clock_mhz=device.clock())
        with suppress(DeviceError):
            state = replace(state, power_w=device.power())
        with suppress(DeviceError):
            state = replace(state, throttle_reasons=tuple(device.throttle_reasons()))
    return replace(state, refusal=device.lock_refusal())


class Counted(StrEnum):
    """Who counts GPUs: the index space that a GPU's number belongs to.

    CUDA counts the GPUs that CUDA_VISIBLE_DEVICES names, HIP those of HIP_VISIBLE_DEVICES; the
    driver's indices stay what they are. A clock set by the wrong count is that of somebody else's
    GPU. (CUDA's order is taken for the driver's, as it is where all GPUs are alike or
    CUDA_DEVICE_ORDER is PCI_BUS_ID.)
    """

    BY_DRIVER = "driver"
    BY_PLAN = "plan"
    BY_CUDA = "cuda"


def choose(source: Backend, number: int, counted: Counted) -> Device:
    """The GPU of a number, as the driver, a plan or CUDA count them.

    Where this process has one GPU only, a plan and CUDA mean that one.

    Raises:
        DeviceError: there is none, or CUDA hides it from this process.
    """
    devices = source.devices()
    settings = visibility_settings(source) if source.real else {}
    if counted is Counted.BY_DRIVER or not settings:
        if 0 <= number < len(devices):
            return devices[number]
        raise _no_such_gpu(number, len(devices))

    visible = visible_gpus(source)
    setting = ", ".join(f"{name}={value}" for name, value in settings.items())
    if len(visible) == 1:
        return devices[visible[0]]
    if counted is Counted.BY_CUDA:
        if 0 <= number < len(visible):
            return devices[visible[number]]
        raise _no_such_gpu(number, len(visible), f", with {setting}")
    if number in visible:
        return devices[number]
    raise DeviceError(
        f"GPU {number}, which the plan names, is hidden by {setting}; name this job's GPUs "
        "with envplan apply --devices, or this rank's with device="
    )


def _no_such_gpu(number: int, count: int, condition: str = "") -> DeviceError:
    """The error that there is no GPU of a number.

    Args:
        number: that was asked for.
        count: GPUs that it could have meant.
        condition: under which there are so many.
    """
    return DeviceError(f"there is no GPU {number}; there are {count}, counted from 0{condition}")


def visibility_settings(source: Backend) -> dict[str, str]:
    """The variables that hide GPUs of a source from this process, in the order that they count."""
    settings: dict[str, str] = {}
    for alternatives in source.visibility:
        name = next((name for name in alternatives if name in os.environ), None)
        if name is not None:
            settings[name] = os.environ[name]
    return settings


def visible_gpus(source: Backend) -> list[int]:
    """Driver indices of the GPUs that CUDA or HIP shows this process, as these count them."""
    devices = source.devices()
    visible = list(range(len(devices)))
    for names in visibility_settings(source).values():
        visible = _gpus_named(names, devices, visible)
    return visible


def _gpus_named(names: str, devices: Sequence[Device], left: Sequence[int]) -> list[int]:
    """Driver indices of the GPUs that a variable names.

    Args:
        names: what it says.
        devices: all GPUs, by driver index.
        left: driver indices of the GPUs that it counts.
    """
    counted = [devices[index] for index in left]
    named: list[int] = []
    for name in names.split(","):
        place = _index_of(counted, name.strip())
        if place is None:  # CUDA, too, takes no notice of what follows
            break
        named.append(left[place])
    return named


def _index_of(devices: Sequence[Device], name: str) -> int | None:
    """The place of a GPU among others by its number, its UUID or the beginning of that.

    None: there is no such GPU, or several have that beginning.
    """
    if name.isdecimal():
        return int(name) if int(name) < len(devices) else None
    if not name.startswith("GPU-"):
        return None
    matching = [index for index, device in enumerate(devices) if uuid_of(device).startswith(name)]
    return matching[0] if len(matching) == 1 else None


def uuid_of(device: Device) -> str:
    """A GPU's UUID, or "" for one that does not tell it."""
    try:
        return device.info.uuid
    except DeviceError:  # it is lost, so nobody uses it
        return ""
