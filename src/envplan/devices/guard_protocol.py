"""The messages between a training process and the guard of its GPU.

Requests go to the guard through a pipe, 20 bytes each. What the guard reports comes back as lines.
Those that say that a clock was set are of three words, as their owner reads thousands; the others
are of JSON. A line that is none of these messages, such as what a library prints, is ignored.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from envplan.devices import Counted, DeviceInfo

if TYPE_CHECKING:
    from pydantic import JsonValue

__all__ = [
    "READ_BYTES",
    "RESET",
    "SHUT_DOWN",
    "ClockFailed",
    "ClockSet",
    "CounterReading",
    "GpuFound",
    "GuardConfig",
    "GuardEnded",
    "Message",
    "Ready",
    "Recovered",
    "Refused",
    "Request",
    "message_line",
    "parse_message",
]

#: In the place of a clock: give it back, and end after giving it back.
RESET: Final = 0
SHUT_DOWN: Final = 2**32 - 1

_REQUEST: Final = struct.Struct("<QQI")
#: What the guard reads at once at most: whole requests.
READ_BYTES: Final = 200 * _REQUEST.size

#: What the line of a ClockSet begins with.
_CLOCK_SET: Final = b"set "


@dataclass(slots=True)
class Request:
    """A clock that is wanted.

    Attributes:
        request_id: its number, from 1. A request with a higher one overtakes it.
        due_ns: when the clock shall be set, perf_counter_ns; at once where that is past.
        target: MHz, or RESET, or SHUT_DOWN.
    """

    request_id: int
    due_ns: int
    target: int

    @staticmethod
    def packet(requests: Iterable[Request]) -> bytes:
        """A few requests, to be written at once."""
        packets = [
            _REQUEST.pack(request.request_id, request.due_ns, request.target)
            for request in requests
        ]
        return b"".join(packets)

    @classmethod
    def from_packets(cls, packet: bytes) -> list[Self]:
        """The requests of one packet, or of several."""
        return [cls(*fields) for fields in _REQUEST.iter_unpack(packet)]


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """The configuration that a guard is started with.

    Attributes:
        backend: through which it sets clocks.
        device: which GPU.
        counted: by whom.
        options: for the backend.
        every_request: set every clock, in order, instead of the newest only.
        reads_energy: whether it reads the energy counter, too.
        owner_pid: the process that it works for.
        handover_s: how long it waits for the guard of a training that has ended.
        shares: whether it sets the clock of a GPU that others compute on.
        recovers: do nothing but give the clock back in the place of a guard that was killed.
    """

    backend: str
    device: int
    counted: Counted
    options: Mapping[str, JsonValue]
    every_request: bool
    reads_energy: bool
    owner_pid: int
    handover_s: float
    shares: bool = False
    recovers: bool = False

    def to_json(self) -> str:
        """The guard's argument."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The configuration in the guard's argument."""
        fields = json.loads(text)
        return cls(**{**fields, "counted": Counted(fields["counted"])})


# What a guard reports


@dataclass(frozen=True)
class GpuFound:
    """The guard has opened the driver and found its GPU, and has changed nothing yet."""

    info: DeviceInfo


@dataclass(frozen=True)
class Ready:
    """The GPU is the guard's: it takes requests."""


@dataclass(frozen=True)
class Refused:
    """The guard ends without having changed anything, and says why."""

    reason: str


class ClockSet(NamedTuple):
    """A request is carried out.

    Attributes:
        request_id: its number.
        lag_ns: from when it was due until the clock was set.
    """

    request_id: int
    lag_ns: int


@dataclass(frozen=True)
class ClockFailed:
    """A request could not be carried out; the guard tries again.

    Attributes:
        problem: why, in a line.
        is_repeated: whether the request before failed for the same reason.
    """

    problem: str
    is_repeated: bool


@dataclass(frozen=True)
class CounterReading:
    """The GPU's energy counter, mJ, at a moment of perf_counter_ns."""

    time_ns: int
    energy_mj: int


@dataclass(frozen=True)
class GuardEnded:
    """The guard is about to end; why the clock could not be given back, or None."""

    problem: str | None


@dataclass(frozen=True)
class Recovered:
    """The clock that a killed guard had left is given back."""


Message = (
    GpuFound | Ready | Refused | ClockSet | ClockFailed | CounterReading | GuardEnded | Recovered
)

_KINDS: Final[dict[str, type[Message]]] = {
    kind.__name__: kind
    for kind in (
        GpuFound,
        Ready,
        Refused,
        ClockFailed,
        CounterReading,
        GuardEnded,
        Recovered,
    )
}


def message_line(message: Message) -> bytes:
    """A message as a line of its own, whatever stood before it."""
    if isinstance(message, ClockSet):
        return b"\n%s%d %d\n" % (_CLOCK_SET, message.request_id, message.lag_ns)
    fields = {"kind": type(message).__name__, **asdict(message)}
    return b"\n" + json.dumps(fields).encode() + b"\n"


def parse_message(line: bytes) -> Message | None:
    """The message in a line; None: it is none."""
    if not line:
        return None
    if line.startswith(_CLOCK_SET):
        return _clock_set(line)
    try:
        fields = json.loads(line)
    except ValueError:
        return None
    kind = _KINDS.get(fields.pop("kind", "")) if isinstance(fields, dict) else None
    if kind is None:
        return None
    if kind is GpuFound:
        return GpuFound(_device_info(fields["info"]))
    return kind(**fields)


def _clock_set(line: bytes) -> ClockSet | None:
    try:
        _, request_id, lag_ns = line.split()
        return ClockSet(int(request_id), int(lag_ns))
    except ValueError:
        return None


def _device_info(fields: dict[str, Any]) -> DeviceInfo:
    clocks = tuple(fields["supported_clocks"])
    return DeviceInfo(**{**fields, "supported_clocks": clocks})
