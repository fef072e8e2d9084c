"""Time and energy of the parts of an operation at every clock setting, as a profile's rows say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from envplan.errors import InputError
from envplan.units import ENERGY_UNITS_PER_J, MAX_OPERATION_J

#: The most energy of an operation, its parts together.
_MAX_10FJ: Final = MAX_OPERATION_J * ENERGY_UNITS_PER_J

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


class OperationKey(NamedTuple):
    """An operation of a profile: a stage, from 0, and an instruction."""

    stage: int
    instruction: str


class ClockSetting(NamedTuple):
    """A setting that an operation, or a part of one, runs at.

    Attributes:
        frequency_mhz: SM clock, MHz; 0 where no clock is controlled.
        config: label of a second setting; "" where there is none.
    """

    frequency_mhz: int
    config: str

    def in_words(self) -> str:
        """The setting as errors name it, such as "1410 MHz config big"."""
        label = f" config {self.config}" if self.config else ""
        return f"{self.frequency_mhz} MHz{label}"


#: The setting of operations that no clock controls.
UNCONTROLLED: Final = ClockSetting(0, "")


class ExactCost(NamedTuple):
    """Time, ns, and energy, 10 fJ, of one GPU."""

    time_ns: int
    energy_10fj: int


#: Costs of each part of an operation, by its name and setting.
CostsByPart = Mapping[str, Mapping[ClockSetting, ExactCost]]


@dataclass(frozen=True, eq=False)
class PartCosts:
    """Time and energy of each part of an operation at each setting.

    Parts stand in order of execution. An operation that nothing splits is one part without a name.

    Attributes:
        names: of the P parts.
        follows_clock: whether a part follows the clock, shape (P,); the others have the same costs
            at every setting.
        settings: K of them, strictly ascending.
        time_ns: ns, shape (K, P), at least 1.
        energy_10fj: 10 fJ, shape (K, P).
    """

    names: tuple[str, ...]
    follows_clock: BoolArray
    settings: tuple[ClockSetting, ...]
    time_ns: IntArray
    energy_10fj: IntArray

    def __post_init__(self) -> None:
        shape = (len(self.settings), len(self.names))
        assert self.time_ns.shape == self.energy_10fj.shape == shape
        assert self.follows_clock.shape == shape[1:]
        assert self.time_ns.min() >= 1

    @classmethod
    def from_rows(cls, where: str, rows: CostsByPart) -> Self:
        """The costs of parts from the rows of a profile.

        Args:
            where: what to call the operation in errors.
            rows: of each part, in order of execution. A part beside others has either a row at
                every setting, or one at 0 MHz.

        Raises:
            InputError: a part has no row at a setting that another one has, or all together use
                more than MAX_OPERATION_J.
        """
        swept = [name for name in rows if len(rows) == 1 or _has_clock(rows[name])]
        settings = sorted({setting for name in swept for setting in rows[name]}) or [UNCONTROLLED]
        for setting in settings:
            _check_all_have(setting, swept, rows, where)
        costs = [_costs_at(settings, part_rows, name in swept) for name, part_rows in rows.items()]
        times_ns = [[cost.time_ns for cost in part] for part in costs]
        energies_10fj = [[cost.energy_10fj for cost in part] for part in costs]
        part_costs = cls(
            names=tuple(rows),
            follows_clock=np.array([_has_clock(part_rows) for part_rows in rows.values()]),
            settings=tuple(settings),
            time_ns=np.ascontiguousarray(np.array(times_ns, np.int64).T),
            energy_10fj=np.ascontiguousarray(np.array(energies_10fj, np.int64).T),
        )
        if len(rows) > 1 and part_costs.energy_10fj.sum(axis=1, dtype=float).max() > _MAX_10FJ:
            raise InputError(f"{where}: its parts use more than {MAX_OPERATION_J} J together")
        return part_costs

    @property
    def frequency_mhz(self) -> IntArray:
        """The clock of each setting, MHz, shape (K,)."""
        return np.array([setting.frequency_mhz for setting in self.settings], np.int64)

    @property
    def is_split(self) -> bool:
        """Whether parts are told apart."""
        return self.names != ("",)

    @property
    def whole(self) -> PartCosts:
        """The same operation as a single part."""
        return PartCosts(
            names=("",),
            follows_clock=np.array([self.follows_clock.any()]),
            settings=self.settings,
            time_ns=self.time_ns.sum(axis=1, keepdims=True),
            energy_10fj=self.energy_10fj.sum(axis=1, keepdims=True),
        )


#: The costs of every operation of a profile.
CostsByOperation = Mapping[OperationKey, PartCosts]


def scale_to_operation(
    parts: PartCosts,
    operation: Mapping[ClockSetting, ExactCost],
    noise: Mapping[ClockSetting, tuple[float, float]],
    where: str,
) -> PartCosts:
    """Parts that add up to what was measured of their operation, each keeping its share.

    Args:
        parts: as they were measured.
        operation: the operation itself, by setting.
        noise: by setting, how much less the parts may take and use, fractions.
        where: what to call the operation in errors.

    Raises:
        InputError: clocks differ, or the parts add up to less by more than the noise.
    """
    rows = {setting: row for row, setting in enumerate(parts.settings)}
    if not parts.follows_clock.any():
        rows = dict.fromkeys(operation, 0)
    _check_same_settings(operation, rows, where)
    settings = tuple(sorted(rows))
    listed = [rows[setting] for setting in settings]
    times_ns = _shares(
        _Measured("take", 1e9, "s", [operation[setting].time_ns for setting in settings]),
        parts.time_ns[listed],
        settings,
        [noise[setting][0] for setting in settings],
        where,
    )
    energies_10fj = _shares(
        _Measured(
            "use", ENERGY_UNITS_PER_J, "J", [operation[setting].energy_10fj for setting in settings]
        ),
        parts.energy_10fj[listed],
        settings,
        [noise[setting][1] for setting in settings],
        where,
    )
    has_clock = any(setting.frequency_mhz for setting in settings)
    return PartCosts(
        names=parts.names,
        follows_clock=np.full(len(parts.names), has_clock),
        settings=settings,
        time_ns=np.maximum(1, times_ns),
        energy_10fj=energies_10fj,
    )


class _Measured(NamedTuple):
    """Measured times or energies of an operation at each setting, in ns or 10 fJ.

    Attributes:
        verb: how its parts do so, "take" or "use".
        per_unit: ns or 10 fJ in a unit of errors.
        unit: of errors, "s" or "J".
    """

    verb: str
    per_unit: float
    unit: str
    amounts: Sequence[int]


def _shares(
    measured: _Measured,
    of_parts: IntArray,
    settings: Sequence[ClockSetting],
    noise: Sequence[float],
    where: str,
) -> IntArray:
    """Amounts of parts, (K, P), scaled so that those of a setting add up to what was measured.

    Raises:
        InputError: they add up to less by more than the noise; of the highest setting.
    """
    exact = of_parts.astype(object)  # products outgrow 64 bits
    sums = exact.sum(axis=1)
    for row in reversed(range(len(settings))):
        total = sums[row] / measured.per_unit
        needed = measured.amounts[row] / measured.per_unit
        if total < needed * (1 - noise[row]):
            unit = measured.unit
            raise InputError(
                f"{where} at {settings[row].in_words()}: its parts {measured.verb} {total:.6g} "
                f"{unit} together, {needed - total:.6g} {unit} "
                f"({100 * (1 - total / needed):.1f}%) less than was measured of it; some part is "
                "missing, or leave out the rows of the operation itself"
            )
    amounts = np.array(measured.amounts, object)
    ends = amounts[:, None] * exact.cumsum(axis=1) // np.maximum(1, sums)[:, None]
    shares: IntArray = np.diff(ends, axis=1, prepend=0).astype(np.int64)
    return shares


def _check_same_settings(
    operation: Mapping[ClockSetting, ExactCost], parts: Mapping[ClockSetting, int], where: str
) -> None:
    differing = operation.keys() ^ parts.keys()
    if not differing:
        return
    setting = max(differing)
    present, absent = "the operation itself", "its parts"
    if setting not in operation:
        present, absent = absent, present
    raise InputError(
        f"{where}: at {setting.in_words()} there are rows for {present} and none for {absent}"
    )


def _has_clock(rows: Mapping[ClockSetting, ExactCost]) -> bool:
    return any(frequency_mhz for frequency_mhz, _ in rows)


def _check_all_have(
    setting: ClockSetting, swept: Sequence[str], rows: CostsByPart, where: str
) -> None:
    lacking = [name for name in swept if setting not in rows[name]]
    if not lacking:
        return
    having = next(name for name in swept if setting in rows[name])
    raise InputError(
        f"{where}: part {lacking[0]} has no row at {setting.in_words()}, which part {having} has; "
        "every part needs the same clocks, or one row at 0 MHz"
    )


def _costs_at(
    settings: Sequence[ClockSetting], rows: Mapping[ClockSetting, ExactCost], is_swept: bool
) -> list[ExactCost]:
    """A part's costs at each setting; the same at all where its clock was not swept."""
    if is_swept:
        return [rows[setting] for setting in settings]
    return [min(rows.values())] * len(settings)
