"""Reading a profile's CSV: repeats and ranks are put together, parts assembled, units made exact.

The rows of a table become, step by step,

    samples      a rank's measurement of a part at a setting: the medians of rows that repeat it
    costs        of a part at a setting over all ranks: the largest time, which is when the stage is
                 done, and the mean energy, which is per GPU
    part costs   of an operation, in exact units
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple

from envplan._io.tables import Table, parse_table
from envplan.errors import InputError
from envplan.profile.instructions import BACKWARD_HALVES, BLOCKING, in_usual_order
from envplan.profile.part_costs import (
    ClockSetting,
    CostsByOperation,
    ExactCost,
    OperationKey,
    PartCosts,
    scale_to_operation,
)
from envplan.profile.rows import COLUMNS, KAREUS_COLUMN, RAW_COLUMNS, ProfileRow
from envplan.units import in_10fj, ns_from_s

__all__ = ["COLUMNS", "RAW_COLUMNS", "OptionKey", "ProfileContents", "ProfileRow", "parse_profile"]

#: A rank that takes so many times as long as the others of its stage is said to straggle.
_STRAGGLES: Final = 1.05
#: Times, and energies, of rows that measure one thing again lie no further apart than that.
_APART: Final = 1.5
#: Standard deviation of a measured time or energy where the file does not say, as a fraction.
_USUAL_NOISE: Final = 0.01
#: Parts may add up to less than their operation by so many standard deviations.
_TOLERATED_STDS: Final = 3


class OptionKey(NamedTuple):
    """An option of a profile's operation."""

    stage: int
    instruction: str
    frequency_mhz: int
    config: str


@dataclass(frozen=True, kw_only=True)
class ProfileContents:
    """The content of a profile's CSV.

    Attributes:
        num_stages: S; the profile's stages are 0 .. S - 1.
        instructions: names of its operations, usual ones first; `blocking` is not one of them.
        measured_costs: costs of each operation's parts.
        spreads: relative standard deviation of a row's time, where the file tells.
        energy_spreads: the same of its energy, of rows that are no part and of one rank.
        blocking_power_w: W per stage, the mean of energy / time over the stage's `blocking` rows;
            a stage without such rows takes the mean of those that have some. None where the
            file has no such rows at all.
        notes: what a reader of figures should know of the rows, a phrase each: that some were put
            together, of the same or of several ranks, and which of these are slower than others.
    """

    num_stages: int
    instructions: tuple[str, ...]
    measured_costs: CostsByOperation
    spreads: Mapping[OptionKey, float]
    energy_spreads: Mapping[OptionKey, float]
    blocking_power_w: tuple[float, ...] | None
    notes: tuple[str, ...]


def parse_profile(content: bytes, path: Path | None) -> ProfileContents:
    """Read the CSV of a profile.

    Raises:
        InputError: naming file, line, column and what to do.
    """
    table = parse_table(content, ProfileRow, path=path, kind="a profile")
    _join_kareus_configs(table)
    num_stages = _count_stages(table)
    samples = _merge_repeats(table, _samples_of_rows(table))
    measured_costs = _part_costs(samples)
    _check_every_stage(measured_costs, num_stages, path)
    return ProfileContents(
        num_stages=num_stages,
        instructions=in_usual_order(instruction for _, instruction in measured_costs),
        measured_costs=measured_costs,
        spreads=_time_spreads(samples),
        energy_spreads=_energy_spreads(samples),
        blocking_power_w=_blocking_power_w(samples, num_stages),
        notes=(*_merge_notes(samples), *_straggler_notes(samples)),
    )


# Large files have many rows of few operations and settings.
_operation = lru_cache(maxsize=4096)(OperationKey)
_setting = lru_cache(maxsize=4096)(ClockSetting)


class _Sample(NamedTuple):
    """One rank's measurement of a part at one setting; None where a deviation is not known.

    Attributes:
        row: its row of the table; of several, the first.
        rank: global rank; None where its rows do not say.
        num_rows: rows that it is the median of.
    """

    row: int
    time_s: float
    energy_j: float
    time_std_s: float | None
    energy_std_j: float | None
    rank: int | None
    num_rows: int = 1


# A large profile holds its samples in nested dictionaries with shared keys, not in one with a key
# for each row: objects that live on cost the garbage collector a third of the time of reading.
#: The samples of a part at each setting: of all rows, or of all ranks, in order.
_SamplesBySetting = Mapping[ClockSetting, Sequence[_Sample]]
#: The samples of each part of an operation; the part "" is the whole operation.
_SamplesByPart = Mapping[str, _SamplesBySetting]
#: The samples of every operation, and of `blocking`.
_Samples = Mapping[OperationKey, _SamplesByPart]


class _Measurement(NamedTuple):
    """All samples of a part of an operation at one setting, at least one."""

    operation: OperationKey
    part: str
    setting: ClockSetting
    samples: Sequence[_Sample]


def _measurements(samples: _Samples) -> Iterator[_Measurement]:
    """The samples of all operations, part by part and setting by setting."""
    for operation, by_part in samples.items():
        for part, by_setting in by_part.items():
            for setting, of_ranks in by_setting.items():
                yield _Measurement(operation, part, setting, of_ranks)


def _join_kareus_configs(table: Table[ProfileRow]) -> None:
    """Let the columns of a Kareus profile be the config of its rows, where it has no other."""
    columns = [texts for name, texts in table.texts.items() if KAREUS_COLUMN.fullmatch(name)]
    if columns and "config" not in table.texts:
        cells = zip(*columns, strict=True)
        table.columns["config"] = [" ".join(filter(None, texts)) for texts in cells]


def _count_stages(table: Table[ProfileRow]) -> int:
    """The number of stages.

    Raises:
        InputError: their numbers have a gap.
    """
    stages = table.columns["stage"]
    num_stages: int = 1 + max(stages)
    absent = set(range(num_stages)).difference(stages)
    if absent:
        gap = min(absent)
        beyond = min(stage for stage in stages if stage > gap)
        problem = f"stage {gap} has no rows but stage {beyond} has; number them without gaps"
        raise table.error(stages.index(beyond), problem, "stage")
    return num_stages


def _samples_of_rows(table: Table[ProfileRow]) -> _Samples:
    """A sample for each row of the table, by what it measures.

    Raises:
        InputError: a part has several rows, which are not of different ranks, or parts come in
            another order at some clock; names the line.
    """
    columns = table.columns
    of_rows = map(
        _Sample,
        range(len(table)),
        columns["time"],
        columns["energy"],
        columns["time_std"],
        columns["energy_std"],
        columns["rank"],
    )
    names = ("stage", "instruction", "frequency", "config", "part")
    keys = zip(*(columns[name] for name in names), strict=True)
    samples: defaultdict[OperationKey, dict[str, dict[ClockSetting, list[_Sample]]]]
    samples = defaultdict(dict)
    check = _PartCheck(table)
    for sample, (stage, instruction, mhz, config, part) in zip(of_rows, keys, strict=True):
        operation, setting = _operation(stage, instruction), _setting(mhz, config)
        of_part = samples[operation].setdefault(part, {})
        of_part.setdefault(setting, []).append(sample)
        if part:
            check.see(sample, operation, setting, part)
    return samples


class _PartCheck:
    """Checks that parts have one row for each setting and rank, and come in one order at all."""

    def __init__(self, table: Table[ProfileRow]) -> None:
        self._table = table
        #: Of each operation, the position of each part in the order of first appearance.
        self._positions: defaultdict[OperationKey, dict[str, int]] = defaultdict(dict)
        #: Of each operation, setting and rank, the row of each part, in order.
        self._rows: defaultdict[_RankSetting, dict[str, int]] = defaultdict(dict)

    def see(
        self, sample: _Sample, operation: OperationKey, setting: ClockSetting, part: str
    ) -> None:
        """Check the next row of a part.

        Raises:
            InputError: the part has such a row already, is one of `blocking`, or comes after a part
                that it came before at another clock.
        """
        row = sample.row
        stage, instruction = operation
        mhz = setting.frequency_mhz
        rows = self._rows[operation, setting, sample.rank]
        if part in rows:
            raise self._table.error(
                row,
                f"repeats line {self._table.lines[rows[part]]}: part {part} of stage {stage} "
                f"{instruction} at {mhz} MHz; keep one of the two, or tell them apart in a config "
                "column",
            )
        if instruction == BLOCKING:
            raise self._table.error(row, "blocking is no operation and has no parts", "part")
        positions = self._positions[operation]
        position = positions.setdefault(part, len(positions))
        previous = next(reversed(rows), part)
        if positions[previous] > position:
            raise self._table.error(
                row,
                f"part {part} of stage {stage} {instruction} comes after {previous} at {mhz} MHz, "
                "but before it at another clock; parts must come in one order, that of execution",
                "part",
            )
        rows[part] = row


#: An operation, a setting and a rank, if rows say one.
_RankSetting = tuple[OperationKey, ClockSetting, int | None]


def _merge_repeats(table: Table[ProfileRow], samples: _Samples) -> _Samples:
    """The sample of each rank: medians of rows that measure one thing again, and their spread.

    Raises:
        InputError: they cannot be measurements of one thing; names the line.
    """
    repeated: list[Sequence[_Sample]] = []
    for measurement in _measurements(samples):
        # Rows of a part are of different ranks, as was checked.
        if len(measurement.samples) > 1 and not measurement.part:
            repeated += [same for same in _by_rank(measurement.samples) if len(same) > 1]
    for same in sorted(repeated, key=lambda same: same[1].row):
        _check_alike(table, "time", same)
        _check_alike(table, "energy", same)
    if not repeated:
        return samples
    return {
        operation: {part: _medians(by_setting) for part, by_setting in by_part.items()}
        for operation, by_part in samples.items()
    }


def _medians(samples: _SamplesBySetting) -> _SamplesBySetting:
    """The sample of each rank at each setting."""
    medians = {}
    for setting, of_rows in samples.items():
        medians[setting] = [_median(of_rank) for of_rank in _by_rank(of_rows)]
    return medians


def _by_rank(samples: Sequence[_Sample]) -> list[list[_Sample]]:
    """Samples in groups of one rank each."""
    groups: defaultdict[int | None, list[_Sample]] = defaultdict(list)
    for sample in samples:
        groups[sample.rank].append(sample)
    return list(groups.values())


def _check_alike(table: Table[ProfileRow], name: str, repeats: Sequence[_Sample]) -> None:
    """Refuse rows that repeat the first of them with quite another time or energy.

    Args:
        table: of the rows.
        name: of the column, "time" or "energy".
        repeats: samples of the rows.

    Raises:
        InputError: names the line.
    """
    values: Sequence[float] = table.columns[name]
    first_row = repeats[0].row
    for sample in repeats[1:]:
        smaller, larger = sorted((values[first_row], values[sample.row]))
        if larger > _APART * smaller:
            raise table.error(
                sample.row,
                f"repeats line {table.lines[first_row]} with quite another {name}, "
                f"{values[sample.row]:g} instead of {values[first_row]:g}; keep one of the two, or "
                "tell them apart in a config column",
                name,
            )


def _median(repeats: Sequence[_Sample]) -> _Sample:
    """Medians of samples of one thing, and their spread; a sample alone stays as it is."""
    if len(repeats) == 1:
        return repeats[0]
    times_s = [sample.time_s for sample in repeats]
    energies_j = [sample.energy_j for sample in repeats]
    return _Sample(
        row=repeats[0].row,
        time_s=statistics.median(times_s),
        energy_j=statistics.median(energies_j),
        time_std_s=math.sqrt(_variance(times_s)),
        energy_std_j=math.sqrt(_variance(energies_j)),
        rank=repeats[0].rank,
        num_rows=len(repeats),
    )


def _variance(values: Sequence[float]) -> float:
    """The variance of a sample of two values or more, as statistics.variance has it.

    That one counts in fractions, which is most of the time that a profile of many ranks takes. Here
    values are counted from the first of them, so that equal ones have a variance of 0.
    """
    deviations = [value - values[0] for value in values]
    mean = math.fsum(deviations) / len(values)
    return math.fsum((deviation - mean) ** 2 for deviation in deviations) / (len(values) - 1)


def _part_costs(samples: _Samples) -> dict[OperationKey, PartCosts]:
    """The costs of every operation, by stage and name.

    Raises:
        InputError: parts lack rows, or do not add up to their operation.
    """
    operations = sorted(operation for operation in samples if operation.instruction != BLOCKING)
    return {operation: _assemble(operation, samples[operation]) for operation in operations}


def _costs_over_ranks(samples: _SamplesBySetting) -> dict[ClockSetting, ExactCost]:
    """The cost of a part at each setting."""
    return {setting: _cost_over_ranks(of_ranks) for setting, of_ranks in samples.items()}


def _cost_over_ranks(samples: Sequence[_Sample]) -> ExactCost:
    """The largest time and the mean energy, in exact units."""
    if len(samples) == 1:
        return ExactCost(ns_from_s(samples[0].time_s), in_10fj(samples[0].energy_j))
    time_s = max(sample.time_s for sample in samples)
    energy_j = math.fsum(sample.energy_j for sample in samples) / len(samples)
    return ExactCost(ns_from_s(time_s), in_10fj(energy_j))


def _assemble(operation: OperationKey, samples: _SamplesByPart) -> PartCosts:
    """The parts of an operation; where it has rows of its own, parts add up to these.

    Args:
        operation: whose samples they are.
        samples: their costs, and their deviations, which tell how far the sum of parts may lie
            from the whole.
    """
    where = f"stage {operation.stage} {operation.instruction}"
    costs = {part: _costs_over_ranks(by_setting) for part, by_setting in samples.items()}
    if len(costs) == 1 or "" not in costs:
        return PartCosts.from_rows(where, costs)
    whole = costs.pop("")
    parts = PartCosts.from_rows(where, costs)
    noise = {setting: _noise_of_sum(setting, parts.names, samples) for setting in whole}
    return scale_to_operation(parts, whole, noise, where)


def _noise_of_sum(
    setting: ClockSetting, parts: Sequence[str], samples: _SamplesByPart
) -> tuple[float, float]:
    """How far the sum of parts may lie from the operation in time and in energy, fractions."""
    by_setting = [samples[part] for part in ("", *parts)]
    # Of ranks the first stands for all; parts without a clock have no row at this setting.
    present = [of_part[setting][0] for of_part in by_setting if setting in of_part]
    times = [(sample.time_s, sample.time_std_s) for sample in present]
    energies = [(sample.energy_j, sample.energy_std_j) for sample in present]
    return _tolerance(times), _tolerance(energies)


def _tolerance(measured: Sequence[tuple[float, float | None]]) -> float:
    """Three standard deviations of a sum of values, as a fraction of the first of them.

    Args:
        measured: values and their standard deviations; None: the usual noise.
    """
    whole, _ = measured[0]
    if not whole:
        return 0.0
    stds = [_USUAL_NOISE * value if std is None else std for value, std in measured]
    return _TOLERATED_STDS * math.hypot(*stds) / whole


def _time_spreads(samples: _Samples) -> dict[OptionKey, float]:
    """Relative standard deviation of times over runs and over ranks, where either is known."""
    spreads = {}
    for operation, part, setting, of_ranks in _measurements(samples):
        stds = [sample.time_std_s for sample in of_ranks if sample.time_std_s is not None]
        if part or (not stds and len(of_ranks) == 1):
            continue
        times = [sample.time_s for sample in of_ranks]
        over_runs = statistics.fmean(std**2 for std in stds) if stds else 0.0
        over_ranks = _variance(times) if len(times) > 1 else 0.0
        spread_s = math.sqrt(over_runs + over_ranks)
        spreads[OptionKey(*operation, *setting)] = spread_s / max(times)
    return spreads


def _energy_spreads(samples: _Samples) -> dict[OptionKey, float]:
    """Relative standard deviation of energies of whole operations, where a row tells."""
    spreads = {}
    for operation, part, setting, of_ranks in _measurements(samples):
        std_j = of_ranks[0].energy_std_j
        if not part and len(of_ranks) == 1 and std_j is not None and of_ranks[0].energy_j > 0:
            spreads[OptionKey(*operation, *setting)] = std_j / of_ranks[0].energy_j
    return spreads


def _blocking_power_w(samples: _Samples, num_stages: int) -> tuple[float, ...] | None:
    """The mean power of each stage's blocking rows; see ProfileContents."""
    powers: defaultdict[int, list[float]] = defaultdict(list)
    for operation, _, _, of_ranks in _measurements(samples):
        if operation.instruction == BLOCKING:
            powers[operation.stage] += [sample.energy_j / sample.time_s for sample in of_ranks]
    if not powers:
        return None
    means = {stage: math.fsum(watts) / len(watts) for stage, watts in powers.items()}
    elsewhere = math.fsum(means.values()) / len(means)
    return tuple(means.get(stage, elsewhere) for stage in range(num_stages))


def _check_every_stage(costs: CostsByOperation, num_stages: int, path: Path | None) -> None:
    """Refuse a stage without a forward, or without a backward as a whole or in halves."""
    names: list[list[str]] = [[] for _ in range(num_stages)]
    for stage, instruction in costs:
        names[stage].append(instruction)
    for stage, present in enumerate(map(in_usual_order, names)):
        has_backward = "backward" in present or set(present).issuperset(BACKWARD_HALVES)
        if "forward" not in present or not has_backward:
            raise InputError(
                f"stage {stage} has rows for {', '.join(present)} only; every stage needs forward, "
                "and backward or both backward_input and backward_weight",
                path=path,
                column="instruction",
            )


def _merge_notes(samples: _Samples) -> Iterator[str]:
    """Phrases that say which rows were put together."""
    repeats = 1
    ranks: set[int | None] = set()
    for measurement in _measurements(samples):
        for sample in measurement.samples:
            repeats = max(repeats, sample.num_rows)
            ranks.add(sample.rank)
    ranks.discard(None)
    if repeats > 1:
        yield f"medians of up to {repeats} rows of the same"
    if ranks:
        yield (
            f"largest times and mean energies per GPU of {len(ranks)} ranks, whose times' spread "
            "is the noise"
        )


def _straggler_notes(samples: _Samples) -> Iterator[str]:
    """A phrase for each rank that takes longer than the others of its stage.

    The lower median of the stage's ranks stands for the others.
    """
    slowdowns: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for operation, _, _, of_ranks in _measurements(samples):
        if operation.instruction == BLOCKING or len(of_ranks) == 1:
            continue
        usual_s = statistics.median_low(sample.time_s for sample in of_ranks)
        for sample in of_ranks:
            if sample.rank is not None:
                slowdowns[operation.stage, sample.rank].append(sample.time_s / usual_s)
    for (stage, rank), ratios in sorted(slowdowns.items()):
        slowdown = statistics.median(ratios)
        if slowdown > _STRAGGLES:
            yield (
                f"rank {rank} straggles: it takes {slowdown:.2f} times as long as other ranks of "
                f"stage {stage}"
            )
