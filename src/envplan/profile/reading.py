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
from envplan.units import fj_from_j, ns_from_s

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
    """What the CSV of a profile says.

    Attributes:
        num_stages: S; the profile's stages are 0 .. S - 1.
        instructions: names of its operations, usual ones first; `blocking` is not one of them.
        measured_costs: costs of each operation's parts.
        spreads: relative standard deviation of a row's time, where the file tells.
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
    samples = _merge_repeats(table, _rows_by_part(table))
    measured_costs = _part_costs(samples)
    _check_every_stage(measured_costs, num_stages, path)
    return ProfileContents(
        num_stages=num_stages,
        instructions=in_usual_order(instruction for _, instruction in measured_costs),
        measured_costs=measured_costs,
        spreads=_time_spreads(samples),
        blocking_power_w=_blocking_power_w(samples, num_stages),
        notes=(*_merge_notes(samples), *_straggler_notes(samples)),
    )


class _PartKey(NamedTuple):
    """A part of an operation at one setting; the part "" is the whole operation."""

    stage: int
    instruction: str
    frequency_mhz: int
    config: str
    part: str


# Large files have many rows of few operations and settings.
_operation = lru_cache(maxsize=4096)(OperationKey)
_setting = lru_cache(maxsize=4096)(ClockSetting)


class _Sample(NamedTuple):
    """One rank's measurement of a part at one setting; None where a deviation is not known.

    Attributes:
        rank: global rank; None where its rows do not say.
        num_rows: rows that it is the median of.
    """

    time_s: float
    energy_j: float
    time_std_s: float | None
    energy_std_j: float | None
    rank: int | None
    num_rows: int = 1


#: Rows of the table, in order, by what they measure.
_Rows = Mapping[_PartKey, Sequence[int]]
#: The samples of all ranks, in order, by what they measure.
_Samples = Mapping[_PartKey, Sequence[_Sample]]


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


def _rows_by_part(table: Table[ProfileRow]) -> _Rows:
    """Rows of the table by what they measure.

    Raises:
        InputError: a part has several rows, which are not of different ranks, or parts come in
            another order at some clock; names the line.
    """
    names = ("stage", "instruction", "frequency", "config", "part")
    fields = zip(*(table.columns[name] for name in names), strict=True)
    rows: dict[_PartKey, list[int]] = {}
    check = _PartCheck(table)
    for row, key in enumerate(map(_PartKey._make, fields)):
        rows.setdefault(key, []).append(row)
        if key.part:
            check.see(row, key)
    return rows


class _PartCheck:
    """Checks that parts have one row for each setting and rank, and come in one order at all."""

    def __init__(self, table: Table[ProfileRow]) -> None:
        self._table = table
        self._ranks = table.columns["rank"]
        self._first_row: dict[tuple[_PartKey, int | None], int] = {}
        self._positions: defaultdict[tuple[int, str], dict[str, int]] = defaultdict(dict)
        self._previous: dict[tuple[int, str, int, str, int | None], str] = {}

    def see(self, row: int, key: _PartKey) -> None:
        """Check the next row of a part.

        Raises:
            InputError: the part has such a row already, is one of `blocking`, or comes after a part
                that it came before at another clock.
        """
        rank = self._ranks[row]
        stage, instruction, mhz, config, part = key
        first_row = self._first_row.setdefault((key, rank), row)
        if first_row != row:
            raise self._table.error(
                row,
                f"repeats line {self._table.lines[first_row]}: part {part} of stage {stage} "
                f"{instruction} at {mhz} MHz; keep one of the two, or tell them apart in a config "
                "column",
            )
        if instruction == BLOCKING:
            raise self._table.error(row, "blocking is no operation and has no parts", "part")
        positions = self._positions[stage, instruction]
        position = positions.setdefault(part, len(positions))
        option = (stage, instruction, mhz, config, rank)
        previous = self._previous.get(option, part)
        if positions[previous] > position:
            raise self._table.error(
                row,
                f"part {part} of stage {stage} {instruction} comes after {previous} at {mhz} MHz, "
                "but before it at another clock; parts must come in one order, that of execution",
                "part",
            )
        self._previous[option] = part


def _merge_repeats(table: Table[ProfileRow], rows: _Rows) -> _Samples:
    """The sample of each rank: medians of rows that measure one thing again, and their spread.

    Raises:
        InputError: they cannot be measurements of one thing; names the line.
    """
    by_rank = {key: _by_rank(table, same) for key, same in rows.items() if len(same) > 1}
    repeated = [again for groups in by_rank.values() for again in groups if len(again) > 1]
    for again in sorted(repeated, key=lambda again: again[1]):
        _check_alike(table, "time", table.columns["time"], again)
        _check_alike(table, "energy", table.columns["energy"], again)
    names = ("time", "energy", "time_std", "energy_std", "rank")
    of_rows = list(map(_Sample, *(table.columns[name] for name in names)))
    samples = {}
    for key, same in rows.items():
        if len(same) == 1:
            samples[key] = [of_rows[same[0]]]
        else:
            samples[key] = [_median([of_rows[row] for row in again]) for again in by_rank[key]]
    return samples


def _by_rank(table: Table[ProfileRow], rows: Sequence[int]) -> list[list[int]]:
    """Rows in groups of one rank each."""
    ranks = table.columns["rank"]
    groups: defaultdict[int | None, list[int]] = defaultdict(list)
    for row in rows:
        groups[ranks[row]].append(row)
    return list(groups.values())


def _check_alike(
    table: Table[ProfileRow], name: str, values: Sequence[float], rows: Sequence[int]
) -> None:
    first = rows[0]
    for row in rows[1:]:
        smaller, larger = sorted((values[first], values[row]))
        if larger > _APART * smaller:
            raise table.error(
                row,
                f"repeats line {table.lines[first]} with quite another {name}, "
                f"{values[row]:g} instead of {values[first]:g}; keep one of the two, or tell "
                "them apart in a config column",
                name,
            )


def _median(repeats: Sequence[_Sample]) -> _Sample:
    """Medians of samples of one thing, and their spread; a sample alone stays as it is."""
    if len(repeats) == 1:
        return repeats[0]
    times_s = [sample.time_s for sample in repeats]
    energies_j = [sample.energy_j for sample in repeats]
    return _Sample(
        time_s=statistics.median(times_s),
        energy_j=statistics.median(energies_j),
        time_std_s=statistics.stdev(times_s),
        energy_std_j=statistics.stdev(energies_j),
        rank=repeats[0].rank,
        num_rows=len(repeats),
    )


def _part_costs(samples: _Samples) -> dict[OperationKey, PartCosts]:
    """The costs of every operation, by stage and name.

    Raises:
        InputError: parts lack rows, or do not add up to their operation.
    """
    rows: defaultdict[OperationKey, dict[str, dict[ClockSetting, ExactCost]]] = defaultdict(dict)
    for (stage, instruction, mhz, config, part), of_ranks in samples.items():
        if instruction != BLOCKING:
            part_rows = rows[_operation(stage, instruction)].setdefault(part, {})
            part_rows[_setting(mhz, config)] = _cost_over_ranks(of_ranks)
    return {operation: _assemble(operation, rows[operation], samples) for operation in sorted(rows)}


def _cost_over_ranks(samples: Sequence[_Sample]) -> ExactCost:
    """The largest time and the mean energy, in exact units."""
    if len(samples) == 1:
        return ExactCost(ns_from_s(samples[0].time_s), fj_from_j(samples[0].energy_j))
    time_s = max(sample.time_s for sample in samples)
    energy_j = math.fsum(sample.energy_j for sample in samples) / len(samples)
    return ExactCost(ns_from_s(time_s), fj_from_j(energy_j))


def _assemble(
    operation: OperationKey,
    rows: Mapping[str, Mapping[ClockSetting, ExactCost]],
    samples: _Samples,
) -> PartCosts:
    """The parts of an operation; where it has rows of its own, parts add up to these.

    Args:
        operation: whose rows they are.
        rows: by part and setting; the part "" is the whole operation.
        samples: of all operations; their deviations tell how far sums may lie from the whole.
    """
    where = f"stage {operation.stage} {operation.instruction}"
    if len(rows) == 1 or "" not in rows:
        return PartCosts.from_rows(where, rows)
    whole = rows[""]
    parts = PartCosts.from_rows(where, {name: rows[name] for name in rows if name})
    noise = {setting: _noise_of_sum(operation, setting, parts.names, samples) for setting in whole}
    return scale_to_operation(parts, whole, noise, where)


def _noise_of_sum(
    operation: OperationKey, setting: ClockSetting, parts: Sequence[str], samples: _Samples
) -> tuple[float, float]:
    """How far the sum of parts may lie from the operation in time and in energy, fractions."""
    keys = [_PartKey(*operation, *setting, part) for part in ("", *parts)]
    # Of ranks the first stands for all; parts without a clock have no row at this setting.
    present = [samples[key][0] for key in keys if key in samples]
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
    for key, of_ranks in samples.items():
        stds = [sample.time_std_s for sample in of_ranks if sample.time_std_s is not None]
        if key.part or (not stds and len(of_ranks) == 1):
            continue
        times = [sample.time_s for sample in of_ranks]
        over_runs = statistics.fmean(std**2 for std in stds) if stds else 0.0
        over_ranks = statistics.variance(times) if len(times) > 1 else 0.0
        spreads[OptionKey(*key[:4])] = math.sqrt(over_runs + over_ranks) / max(times)
    return spreads


def _blocking_power_w(samples: _Samples, num_stages: int) -> tuple[float, ...] | None:
    """The mean power of each stage's blocking rows; see ProfileContents."""
    powers: defaultdict[int, list[float]] = defaultdict(list)
    for key, of_ranks in samples.items():
        if key.instruction == BLOCKING:
            powers[key.stage] += [sample.energy_j / sample.time_s for sample in of_ranks]
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
    listed = [sample for of_ranks in samples.values() for sample in of_ranks]
    repeats = max(sample.num_rows for sample in listed)
    if repeats > 1:
        yield f"medians of up to {repeats} rows of the same"
    ranks = {sample.rank for sample in listed} - {None}
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
    for key, of_ranks in samples.items():
        if key.instruction == BLOCKING or len(of_ranks) == 1:
            continue
        usual_s = statistics.median_low(sample.time_s for sample in of_ranks)
        for sample in of_ranks:
            if sample.rank is not None:
                slowdowns[key.stage, sample.rank].append(sample.time_s / usual_s)
    for (stage, rank), ratios in sorted(slowdowns.items()):
        slowdown = statistics.median(ratios)
        if slowdown > _STRAGGLES:
            yield (
                f"rank {rank} straggles: it takes {slowdown:.2f} times as long as other ranks of "
                f"stage {stage}"
            )
