"""The options of an operation, what they are made of, and the names of instructions.

An option with clocks by part is known by a config that says which part runs at which clock:

    @attention=1410 @mlp=990

means: ask for 1410 MHz as `attention` starts and for 990 MHz as `mlp` starts. Clocks that come late
are asked for ahead, so `@attention=990+2000000ns` means: 2 ms after `attention` starts.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from envplan.errors import InputError
from envplan.units import MAX_INTEGER

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
Knob = tuple[int, str]  # MHz, config
Key = tuple[int, str]  # stage, instruction

#: Instructions that schedules know. A profile may hold others: any identifier will do.
INSTRUCTIONS: Final = (
    "forward",
    "backward",
    "backward_input",
    "backward_weight",
    "optimizer",
    "load",
    "recompute",
    "all_reduce",
    "reduce_scatter",
    "all_gather",
)

#: A backward, and its halves: gradients of inputs, and of weights.
BACKWARDS: Final = ("backward", "backward_input", "backward_weight")

#: The instruction name of rows that give the power while waiting; not an operation.
BLOCKING: Final = "blocking"

#: W that a GPU draws while it waits for a neighbour, where neither the profile nor the user says.
DEFAULT_BLOCKING_POWER_W: Final = 70.0

#: Field of a sidecar that says, if it is true, that `backward` rows include recomputation.
INCLUDES_RECOMPUTATION: Final = "recompute"


#: What is a name of a part.
NAME: Final = re.compile(r"[^\s@=/,\"]+")
_TOKEN: Final = re.compile(rf"@({NAME.pattern})=(\d+)(?:\+(\d+)ns)?(?:/(.*))?")


class ClockRequest(NamedTuple):
    """Which clock is asked for as a part begins, or so long after that; its config from then on."""

    part: str
    frequency_mhz: int
    config: str
    delay_ns: int = 0

    def __str__(self) -> str:
        """What stands for it in a config."""
        part, mhz, config, wait = self
        return f"@{part}={mhz}" + (f"+{wait}ns" if wait else "") + (f"/{config}" if config else "")


@lru_cache(maxsize=65536)
def parse_clock_requests(config: str) -> tuple[ClockRequest, ...]:
    """The clocks within an operation that a config stands for; none where it is a plain label.

    Raises:
        InputError: it begins as such, but does not go on so.
    """
    if not config.startswith("@"):
        return ()
    found = [_TOKEN.fullmatch(token) for token in re.split(" (?=@)", config)]
    if not all(found):
        raise InputError(f"{config!r} does not say clocks by part, as in @attention=1410 @mlp=990")
    return tuple(ClockRequest(m[1], int(m[2]), m[4] or "", int(m[3] or 0)) for m in found if m)


def knob_in_words(mhz: int, config: str) -> str:
    """Such as "1410 MHz config big"."""
    return f"{mhz} MHz" + (f" config {config}" if config else "")


@dataclass(frozen=True, eq=False)
class PartCosts:
    """What an operation consists of, in order of execution, and what each part takes at each knob.

    An operation that nothing splits is one part without a name.

    Attributes:
        names: of the parts, P of them.
        asks: whether a part follows the clock, shape (P,); others are the same at every knob.
        knobs: MHz and config, K of them, ascending; 0 MHz where no clock is controlled.
        time_ns: ns, shape (K, P), at least 1.
        energy_fj: fJ, shape (K, P).
    """

    names: tuple[str, ...]
    follows_clock: BoolArray
    settings: tuple[Knob, ...]
    time_ns: IntArray
    energy_fj: IntArray

    @classmethod
    def from_rows(cls, where: str, rows: Mapping[str, Mapping[Knob, tuple[int, int]]]) -> Self:
        """The parts with these rows.

        Args:
            where: what to call the operation in errors.
            rows: of each part by name, ns and fJ by knob. Beside others, a part of 0 MHz has one.

        Raises:
            InputError: a part has no row at a clock that another one has, or all together use more
                than 4600 J.
        """
        follows = {
            name: own for name, own in rows.items() if len(rows) == 1 or any(k[0] for k in own)
        }
        knobs = sorted({knob for own in follows.values() for knob in own}) or [(0, "")]
        for knob in knobs:
            has, lacks = ([n for n in follows if (knob in rows[n]) is one] for one in (True, False))
            if lacks:
                raise InputError(
                    f"{where}: part {lacks[0]} has no row at {knob_in_words(*knob)}, which part "
                    f"{has[0]} has; every part needs the same clocks, or one row at 0 MHz"
                )
        least = {name: min(own.values()) for name, own in rows.items()}
        taken = [[rows[n][k] if n in follows else least[n] for n in rows] for k in knobs]
        asks = [any(mhz for mhz, _ in own) for own in rows.values()]
        times, energies = np.moveaxis(np.array(taken, np.int64), 2, 0)
        made = cls(tuple(rows), np.array(asks), tuple(knobs), times, energies)
        if len(rows) > 1 and made.energy_fj.sum(axis=1, dtype=float).max() > MAX_INTEGER:
            raise InputError(f"{where}: its parts use more than 4600 J together")
        return made

    @property
    def mhz(self) -> IntArray:
        """The clock of each knob, MHz, shape (K,)."""
        return np.array([mhz for mhz, _ in self.settings], np.int64)

    @property
    def split(self) -> bool:
        """Whether parts are told apart."""
        return self.names != ("",)

    @property
    def whole(self) -> PartCosts:
        """All of them as one part."""
        times, energies = (
            each.sum(axis=1, keepdims=True) for each in (self.time_ns, self.energy_fj)
        )
        return PartCosts(
            ("",), np.array([self.follows_clock.any()]), self.settings, times, energies
        )


#: What a profile says of each operation.
Measured = Mapping[Key, PartCosts]


class PowerSegments(NamedTuple):
    """What options take and use as they run, in order: as one, or for each part.

    Attributes:
        begin: first slice of each option, int64 (n + 1,).
        time_ns: int64 (k,), ns.
        energy_fj: int64 (k,), fJ.
    """

    begin: IntArray
    time_ns: IntArray
    energy_fj: IntArray

    @property
    def power_uw(self) -> IntArray:
        """Average of each, rounded up, int64 (k,), uW."""
        return -(-self.energy_fj // self.time_ns)

    def of_option(self, k: int) -> list[tuple[int, int]]:
        """ns and fJ of an option's slices."""
        own = slice(self.begin[k], self.begin[k + 1])
        return list(zip(self.time_ns[own].tolist(), self.energy_fj[own].tolist(), strict=True))


@dataclass(frozen=True, eq=False)
class OptionTable:
    """All options of one instruction on one stage, sorted by time, energy, falling frequency.

    Attributes:
        stage: 0-based stage of the profile.
        instruction: its name.
        parts: what it consists of.
        knob: which knob each part has in each option, shape (n, P).
        slices: how long each option draws how much.
        latency_ns: from a request until the clock changes, ns, that options with clocks by part
            are made for.
    """

    stage: int
    instruction: str
    parts: PartCosts
    knob: IntArray
    segments: PowerSegments
    latency_ns: int = 0

    @classmethod
    def of(
        cls, stage: int, instruction: str, parts: PartCosts, knob: IntArray, latency_ns: int = 0
    ) -> Self:
        """The table of some options, (n, P), in any order."""
        count, each = knob.shape
        columns = np.arange(each)
        times, energies = parts.time_ns[knob, columns], parts.energy_fj[knob, columns]
        first = parts.mhz[knob[:, int(np.argmax(parts.follows_clock))]]
        order = np.lexsort((-first, energies.sum(axis=1), times.sum(axis=1)))
        begin = np.arange(0, count * each + 1, each, dtype=np.int64)
        slices = PowerSegments(begin, times[order].ravel(), energies[order].ravel())
        return cls(stage, instruction, parts, knob[order], slices, latency_ns)

    def __len__(self) -> int:
        return len(self.knob)

    @cached_property
    def time_ns(self) -> IntArray:
        """Of each option, ns, shape (n,), ascending."""
        return frozen(np.add.reduceat(self.segments.time_ns, self.segments.begin[:-1]))

    @cached_property
    def energy_fj(self) -> IntArray:
        """Of each option, fJ, shape (n,)."""
        return frozen(np.add.reduceat(self.segments.energy_fj, self.segments.begin[:-1]))

    @cached_property
    def _asking(self) -> IntArray:
        """Knobs of the parts that follow the clock, of the first one where none does."""
        asks = self.parts.follows_clock
        return self.knob[:, asks] if asks.any() else self.knob[:, :1]

    @cached_property
    def frequency_mhz(self) -> IntArray:
        """SM clock of each option as it starts, MHz, shape (n,); 0: no clock is controlled."""
        return frozen(self.parts.mhz[self._asking[:, 0]])

    @cached_property
    def end_mhz(self) -> IntArray:
        """SM clock of each option as it ends, MHz, shape (n,)."""
        return frozen(self.parts.mhz[self._asking[:, -1]])

    @cached_property
    def changes_clock(self) -> BoolArray:
        """Whether each option runs its parts at clocks of their own, shape (n,)."""
        changes: BoolArray = (self._asking != self._asking[:, :1]).any(axis=1)
        return changes

    @cached_property
    def start_config(self) -> tuple[str, ...]:
        """The second knob of each option as it starts, n of them, "" where there is none."""
        return tuple(self.parts.settings[k][1] for k in self._asking[:, 0].tolist())

    @cached_property
    def config(self) -> Sequence[str]:
        """What tells options of one frequency apart, n of them: the second knob, or for clocks by
        part what these are; the latter are made when they are asked for."""
        mixed, first = self.changes_clock, self.start_config
        if not mixed.any():
            return first

        def label(k: int) -> str:
            return " ".join(map(str, self.clock_requests(k))) if mixed[k] else first[k]

        return _Labels(label, len(self))

    def clock_requests(self, k: int) -> list[ClockRequest]:
        """What an option asks for when, so that each part begins with its own clock."""
        found: list[ClockRequest] = []
        starts: list[int] = []
        now, before = 0, (0, "")
        parts = self.parts
        for p, row in enumerate(self.knob[k].tolist()):
            starts.append(now)
            mhz, config = knob = parts.settings[row] if parts.follows_clock[p] else before
            if not parts.follows_clock[p]:
                pass
            elif found and mhz != before[0] and self.latency_ns:
                # Asked for so long after the last part that begins by then.
                due = now - self.latency_ns
                asking = bisect_right(starts, due) - 1
                found.append(
                    ClockRequest(parts.names[asking], mhz, before[1], due - starts[asking])
                )
                if config != before[1]:
                    found.append(ClockRequest(parts.names[p], mhz, config))
            elif not found or knob != before:
                found.append(ClockRequest(parts.names[p], mhz, config))
            before = knob
            now += int(parts.time_ns[row, p])
        return found

    @property
    def max_frequency_option(self) -> int:
        """Index of the row at the highest frequency all along; of several, the fastest, then
        cheapest."""
        # The first of equals, and rows are sorted so.
        return int(np.argmax(np.where(self.changes_clock, -1, self.frequency_mhz)))

    @cached_property
    def peak_uw(self) -> IntArray:
        """The most power that each option draws, uW, shape (n,)."""
        return frozen(np.maximum.reduceat(self.segments.power_uw, self.segments.begin[:-1]))

    def rows(self) -> list[tuple[int, str, int, int]]:
        """MHz, config, ns and fJ of each option."""
        columns = (self.frequency_mhz.tolist(), self.config, self.time_ns.tolist())
        return list(zip(*columns, self.energy_fj.tolist(), strict=True))


class _Labels(Sequence[str]):
    """Strings that are made when they are asked for."""

    def __init__(self, make: Callable[[int], str], count: int) -> None:
        self._make, self._count = cache(make), count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, k: int) -> str:  # type: ignore[override]  # nobody takes slices
        if not 0 <= k < self._count:  # as iteration ends
            raise IndexError(k)
        return self._make(k)


def frozen(values: npt.ArrayLike) -> IntArray:
    """An array of integers that cannot be changed."""
    array = np.array(values, dtype=np.int64)
    array.flags.writeable = False
    return array
