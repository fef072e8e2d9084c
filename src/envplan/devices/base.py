"""What every GPU backend offers, so that NVML and a modelled GPU look alike to their users."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar

from envplan.errors import EnvplanError

T = TypeVar("T")


class DeviceError(EnvplanError):
    """A GPU or its driver refused or failed; says which, why and what to do."""


class PermissionDeniedError(DeviceError):
    """This user may not set clocks; says how to allow it. Trying again does not help."""


@dataclass(frozen=True)
class DeviceInfo:
    """What stays the same about a GPU.

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
    source: str
    mig: bool = False
    energy_source: str = "counter"


class Device(Protocol):
    """One GPU. All methods raise DeviceError when the driver refuses."""

    @property
    def info(self) -> DeviceInfo:
        """What stays the same about it."""

    def lock_clock(self, mhz: int) -> None:
        """Run at this SM clock, whoever asks for what, until reset_clock. Needs permission."""

    def reset_clock(self) -> None:
        """Give the clock back to the driver. Harmless when it was not locked."""

    def can_lock(self, *, probe: bool = False) -> str | None:
        """None if this user may lock clocks; else why not and what to do, in one line.

        Args:
            probe: ask the driver by writing a setting to what it is; without it nothing is written.
        """

    def clock(self) -> int:
        """The SM clock now, MHz."""

    def held_at(self) -> int:
        """The clock that somebody seems to have locked it at, MHz; 0: none, or nobody can tell."""

    def energy(self) -> int:
        """Energy used since some moment long ago, mJ; only differences mean anything."""

    def power(self) -> float:
        """Power drawn now, W."""

    def throttle_reasons(self) -> Sequence[str]:
        """Why the clock is lower than asked for, now; empty if it is not."""


def within(seconds: float, ask: Callable[[], T], who: str) -> T:
    """What a driver answers, unless it hangs: then the thread that asks is left behind.

    Args:
        seconds: how long to wait for it.
        ask: asks the driver.
        who: is asked, for the error.

    Raises:
        DeviceError: there was no answer in time.
    """
    answers: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(ask())
        except BaseException as error:  # it is raised below
            errors.append(error)

    thread = threading.Thread(target=run, name="envplan-ask", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not answers:
        raise DeviceError(f"{who}: no answer within {seconds:g} s; the driver hangs, see dmesg")
    return answers[0]


class Backend(Protocol):
    """A source of devices.

    Attributes:
        name: as on the command line.
        real: whether its GPUs are this machine's, which can be measured and which CUDA may hide.
    """

    name: ClassVar[str]
    real: ClassVar[bool]

    def devices(self) -> Sequence[Device]:
        """All GPUs, by index.

        Raises:
            DeviceError: there is no driver or no GPU; says so and what to do.
        """

    @classmethod
    def models(cls) -> Sequence[str]:
        """What its option `gpu` may be, such as "a40"; empty where the GPUs are those there are."""

    def close(self) -> None:
        """Let go of the driver. Locked clocks stay locked: give them back first."""


def spaced_clocks(clocks: Sequence[int], step: int) -> list[int]:
    """Clocks from the highest down, neighbours at least `step` apart.

    Args:
        clocks: supported SM clocks, MHz, in any order.
        step: MHz; 0 takes all of them.
    """
    taken: list[int] = []
    for clock in sorted(clocks, reverse=True):
        if not taken or taken[-1] - clock >= step:
            taken.append(clock)
    return taken
