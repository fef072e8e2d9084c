"""The options of an operation: every admissible setting with its time and energy."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from envplan.clocks import ClockRequest
from envplan.profile.part_costs import BoolArray, ClockSetting, ExactCost, IntArray, PartCosts


class PowerSegments(NamedTuple):
    """Spans of constant power, one after the other, of which the options of a table consist.

    Attributes:
        begin: the first segment of each option and, at the end, the number of all, int64 (n + 1,).
        time_ns: how long each lasts, int64 (k,), ns.
        energy_10fj: energy of each, int64 (k,), 10 fJ.
    """

    begin: IntArray
    time_ns: IntArray
    energy_10fj: IntArray

    @property
    def power_10uw(self) -> IntArray:
        """The average power of each segment, rounded up, int64 (k,), 10 uW."""
        return -(-self.energy_10fj // self.time_ns)

    def of_option(self, option: int) -> list[ExactCost]:
        """The segments of one option, in order."""
        span = slice(self.begin[option], self.begin[option + 1])
        times, energies = self.time_ns[span].tolist(), self.energy_10fj[span].tolist()
        return list(map(ExactCost, times, energies))


class Option(NamedTuple):
    """One admissible setting of an operation, with its time and energy on one GPU."""

    frequency_mhz: int
    config: str
    time_ns: int
    energy_10fj: int


@dataclass(frozen=True, eq=False)
class OptionTable:
    """All options of one instruction on one stage.

    Options ascend by time; of equal times by energy, then by falling frequency. So option 0 is a
    fastest one and the last option a slowest one.

    Attributes:
        stage: stage of the profile, from 0.
        instruction: its name.
        parts: costs of the operation's P parts.
        setting_of_part: index into parts.settings of each part in each option, shape (n, P).
        segments: how long each option draws how much.
        latency_ns: from a request until the clock changes, ns, that options with clocks by part
            are made for.
    """

    stage: int
    instruction: str
    parts: PartCosts
    setting_of_part: IntArray
    segments: PowerSegments
    latency_ns: int = 0

    def __post_init__(self) -> None:
        count = len(self)
        assert count > 0
        assert self.setting_of_part.shape == (count, len(self.parts.names))
        assert len(self.segments.begin) == count + 1
        assert (np.diff(self.time_ns) >= 0).all(), "options ascend by time"

    @classmethod
    def from_settings(
        cls,
        stage: int,
        instruction: str,
        parts: PartCosts,
        setting_of_part: IntArray,
        *,
        latency_ns: int = 0,
    ) -> Self:
        """The table of options whose parts run at these settings, (n, P), in any order."""
        count, num_parts = setting_of_part.shape
        columns = np.arange(num_parts)
        times = parts.time_ns[setting_of_part, columns]
        energies = parts.energy_10fj[setting_of_part, columns]
        clocked_part = int(np.argmax(parts.follows_clock))
        start_mhz = parts.frequency_mhz[setting_of_part[:, clocked_part]]
        order = np.lexsort((-start_mhz, energies.sum(axis=1), times.sum(axis=1)))
        segments = PowerSegments(
            begin=np.arange(0, count * num_parts + 1, num_parts, dtype=np.int64),
            time_ns=times[order].ravel(),
            energy_10fj=energies[order].ravel(),
        )
        return cls(stage, instruction, parts, setting_of_part[order], segments, latency_ns)

    def __len__(self) -> int:
        return len(self.setting_of_part)

    @cached_property
    def time_ns(self) -> IntArray:
        """Time of each option, ns, shape (n,), ascending."""
        return frozen(np.add.reduceat(self.segments.time_ns, self.segments.begin[:-1]))

    @cached_property
    def energy_10fj(self) -> IntArray:
        """Energy of each option, 10 fJ, shape (n,)."""
        return frozen(np.add.reduceat(self.segments.energy_10fj, self.segments.begin[:-1]))

    @cached_property
    def peak_10uw(self) -> IntArray:
        """The most power that each option draws, 10 uW, shape (n,)."""
        return frozen(np.maximum.reduceat(self.segments.power_10uw, self.segments.begin[:-1]))

    @cached_property
    def _clocked_settings(self) -> IntArray:
        """Settings of the parts that follow the clock; of the first part where none does."""
        follows_clock = self.parts.follows_clock
        if not follows_clock.any():
            return self.setting_of_part[:, :1]
        return self.setting_of_part[:, follows_clock]

    @cached_property
    def frequency_mhz(self) -> IntArray:
        """SM clock of each option as it starts, MHz, shape (n,); 0: no clock is controlled."""
        return frozen(self.parts.frequency_mhz[self._clocked_settings[:, 0]])

    @cached_property
    def end_mhz(self) -> IntArray:
        """SM clock of each option as it ends, MHz, shape (n,)."""
        return frozen(self.parts.frequency_mhz[self._clocked_settings[:, -1]])

    @cached_property
    def changes_clock(self) -> BoolArray:
        """Whether each option runs its parts at clocks of their own, shape (n,)."""
        settings = self._clocked_settings
        changes: BoolArray = (settings != settings[:, :1]).any(axis=1)
        return changes

    @cached_property
    def start_config(self) -> tuple[str, ...]:
        """The config of each option as it starts, n of them, "" where there is none."""
        settings = self.parts.settings
        return tuple(settings[row].config for row in self._clocked_settings[:, 0].tolist())

    @cached_property
    def config(self) -> Sequence[str]:
        """The config of each option, n of them, which tells options of one frequency apart.

        It is the label of a second setting, or stands for clocks by part (see clocks/requests.py);
        the latter are made as they are looked up.
        """
        start_config, changes_clock = self.start_config, self.changes_clock
        if not changes_clock.any():
            return start_config

        def config_of(option: int) -> str:
            if changes_clock[option]:
                return " ".join(map(str, self.clock_requests(option)))
            return start_config[option]

        return _LazyTexts(config_of, len(self))

    def clock_requests(self, option: int) -> list[ClockRequest]:
        """The requests of an option that give each part its own setting as it begins.

        A change of the clock is requested `latency_ns` ahead of the part that needs it, but after
        the operation's first request; the config changes as the part begins.
        """
        parts = self.parts
        requests: list[ClockRequest] = []
        begins_ns: list[int] = []
        begin_ns = 0
        current: ClockSetting | None = None
        for part, row in enumerate(self.setting_of_part[option].tolist()):
            begins_ns.append(begin_ns)
            setting = parts.settings[row]
            if parts.follows_clock[part] and setting != current:
                requests += self._requests_to_change(current, setting, begins_ns)
                current = setting
            begin_ns += int(parts.time_ns[row, part])
        return requests

    def _requests_to_change(
        self, current: ClockSetting | None, setting: ClockSetting, begins_ns: Sequence[int]
    ) -> list[ClockRequest]:
        """The requests that change the setting as a part begins.

        Args:
            current: the setting until then; None before the first request.
            setting: that of the part.
            begins_ns: when each part up to this one begins, ns.
        """
        names = self.parts.names
        at_begin = ClockRequest(names[len(begins_ns) - 1], *setting)
        changes_clock = current is not None and setting.frequency_mhz != current.frequency_mhz
        if current is None or not changes_clock or not self.latency_ns:
            return [at_begin]
        due_ns = begins_ns[-1] - self.latency_ns
        running = bisect_right(begins_ns, due_ns) - 1
        ahead = ClockRequest(
            part=names[running],
            frequency_mhz=setting.frequency_mhz,
            config=current.config,
            delay_ns=due_ns - begins_ns[running],
        )
        return [ahead] if setting.config == current.config else [ahead, at_begin]

    @property
    def max_frequency_option(self) -> int:
        """The option at the highest frequency all along; of several, the fastest, then cheapest."""
        # argmax takes the first of equals, and options are sorted so.
        return int(np.argmax(np.where(self.changes_clock, -1, self.frequency_mhz)))

    def options(self) -> list[Option]:
        """The options one by one, in order."""
        times, energies = self.time_ns.tolist(), self.energy_10fj.tolist()
        return list(map(Option, self.frequency_mhz.tolist(), self.config, times, energies))


class _LazyTexts(Sequence[str]):
    """Texts that are made as they are looked up, and kept."""

    def __init__(self, make: Callable[[int], str], count: int) -> None:
        self._make, self._count = cache(make), count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> str:  # type: ignore[override]  # nobody takes slices
        if not 0 <= index < self._count:  # as iteration ends
            raise IndexError(index)
        return self._make(index)


def frozen(values: npt.ArrayLike) -> IntArray:
    """An array of integers that cannot be changed."""
    array = np.array(values, dtype=np.int64)
    array.flags.writeable = False
    return array
