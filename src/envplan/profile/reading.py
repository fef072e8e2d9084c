"""Reading a profile's CSV: every row checked once and turned into integers; ranks put together."""

from __future__ import annotations

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BaseModel, Field

from envplan._io.tables import Table, parse_table
from envplan.errors import InputError
from envplan.profile.options import BACKWARDS, BLOCKING, INSTRUCTIONS, NAME, Key, Knob, PartCosts
from envplan.profile.parts import scaled
from envplan.units import fj_from_j, ns_from_s

#: What was measured, in a profile whose times and energies were smoothed.
RAW_COLUMNS: Final = ("raw_time", "raw_energy")

#: A rank that takes so many times as long as the others of its stage is said to straggle.
_STRAGGLES: Final = 1.05

#: Times, and energies, of rows that measure one thing again lie no further apart than that.
_APART: Final = 1.5

#: The halves of a backward.
SPLIT_BACKWARD: Final = frozenset(BACKWARDS[1:])
#: Standard deviation of a measured time or energy where the file does not say, as a fraction.
_USUAL_NOISE: Final = 0.01


def _name(text: str) -> str:
    if not text.isidentifier():
        raise ValueError("is not a name")
    return text


def _part(text: str) -> str:
    if text and not NAME.fullmatch(text):
        raise ValueError("has a space or one of @ = / , in it")
    return text


def _config(text: str) -> str:
    if text.startswith("@"):
        raise ValueError("begins with @, which stands for clocks by part")
    return text


Seconds = Annotated[float, Field(ge=1e-9, le=1e9, allow_inf_nan=False)]
Joules = Annotated[float, Field(ge=0, le=9e3, allow_inf_nan=False)]
Spread = Annotated[float, Field(ge=0, allow_inf_nan=False)]

_SECONDS: Final = "seconds from 1e-9 to 1e9"
_JOULES: Final = "joules an operation from 0 to 9000"
_SPREAD: Final = "a number from 0 up, or nothing"


class ProfileRow(BaseModel):
    """A row of a profile; its fields are the columns. Energies are per GPU."""

    stage: int = Field(ge=0, le=10**6, description="a stage number from 0 up")
    instruction: Annotated[str, AfterValidator(_name)] = Field(
        description="one such as forward or backward"
    )
    frequency: int = Field(
        ge=0, le=10**6, description="an SM clock in MHz, or 0 for a constant time"
    )
    time: Seconds = Field(description=_SECONDS)
    energy: Joules = Field(description=_JOULES)
    config: Annotated[str, AfterValidator(_config)] = Field("", description="a label")
    part: Annotated[str, AfterValidator(_part)] = Field(
        "", description="the name of a part of the operation, such as a module's, or nothing"
    )
    time_std: Spread | None = Field(None, description=_SPREAD)
    energy_std: Spread | None = Field(None, description=_SPREAD)
    samples: Spread | None = Field(None, description=_SPREAD)
    raw_time: Seconds | None = Field(None, description=_SECONDS)
    raw_energy: Joules | None = Field(None, description=_JOULES)
    rank: Annotated[int, Field(ge=0)] | None = Field(None, description="a global rank, from 0 up")


#: Columns of Kareus's profiles: how the parts of an operation overlap with communication. All of a
#: row together are its config.
_KNOB: Final = re.compile(r"(recompute_)?(attention|mlp)_configs|(fwd|bwd)_[a-z_]+")

#: What every profile has.
COLUMNS: Final = tuple(name for name, f in ProfileRow.model_fields.items() if f.is_required())


Option = tuple[int, str, int, str]  # stage, instruction, MHz, config
#: Rows by option and part, and by rank.
Groups = dict[tuple[int, str, int, str, str], dict[int | None, int]]


@dataclass
class Contents:
    """What the CSV of a profile says.

    Attributes:
        num_stages: S; the profile's stages are 0 .. S - 1.
        instructions: names of its operations, known ones first; `blocking` is not one of them.
        measured: what operations take, by stage and instruction.
        spreads: relative standard deviation of a row's time, where the file tells.
        blocking_power_w: W per stage, the mean of energy / time over the stage's `blocking` rows;
            a stage without such rows takes the mean of those that have some. None where the
            file has no such rows at all.
        notes: what a reader of figures should know of the rows, a phrase each: that some were put
            together, of the same or of several ranks, and which of these are slower than others.
    """

    num_stages: int
    instructions: tuple[str, ...]
    measured_costs: dict[Key, PartCosts]
    spreads: dict[Option, float]
    blocking_power_w: tuple[float, ...] | None
    notes: list[str]


def parse_contents(content: bytes, path: Path | None) -> Contents:
    """What a profile's CSV says.

    Rows of several ranks make one: the largest time, which is when the stage is done, the mean
    energy, which is per GPU, and the spread of times over the ranks beside the rows' own. Before
    that, rows that measure one option of one rank again make one: the medians, and their spread.

    Raises:
        InputError: naming file, line, column and what to do.
    """
    table = parse_table(content, ProfileRow, path=path, kind="a profile")
    knobs = [texts for name, texts in table.texts.items() if _KNOB.fullmatch(name)]
    if knobs and "config" not in table.texts:
        table.columns["config"] = [" ".join(filter(None, row)) for row in zip(*knobs, strict=True)]
    stages = table.columns["stage"]
    num_stages = 1 + max(stages)
    if gaps := set(range(num_stages)).difference(stages):
        after = min(stage for stage in stages if stage > min(gaps))
        problem = f"stage {min(gaps)} has no rows but stage {after} has; number them without gaps"
        raise table.error(stages.index(after), problem, "stage")
    groups, repeated = _groups(table)
    for first, rows_again in repeated.items():
        _put_together(table, first, rows_again)
    times, energies, stds = (table.columns[name] for name in ("time", "energy", "time_std"))
    # Of each operation its parts, in the order of first appearance.
    rows: defaultdict[Key, dict[str, dict[Knob, tuple[int, int]]]] = defaultdict(dict)
    powers: defaultdict[int, list[float]] = defaultdict(list)
    spreads: dict[Option, float] = {}
    for (stage, instruction, mhz, config, part), ranked in groups.items():
        members = list(ranked.values())
        time = max(times[row] for row in members)
        energy = math.fsum(energies[row] for row in members) / len(members)
        # Over runs and over ranks.
        known = [stds[row] ** 2 for row in members if stds[row] is not None]
        if not part and (known or len(members) > 1):
            over_ranks = statistics.variance(times[r] for r in members) if members[1:] else 0.0
            spread = math.sqrt(statistics.fmean(known or [0.0]) + over_ranks)
            spreads[stage, instruction, mhz, config] = spread / time
        if instruction == BLOCKING:
            powers[stage] += [energies[row] / times[row] for row in members]
        own = rows[stage, instruction].setdefault(part, {})
        own[mhz, config] = ns_from_s(time), fj_from_j(energy)
    measured = {}
    for key, by_name in sorted(rows.items()):
        where = f"stage {key[0]} {key[1]}"
        whole = by_name.pop("", None) if len(by_name) > 1 else None
        measured[key] = PartCosts.from_rows(where, by_name)
        if whole:
            noise = _noise(table, groups, key, whole, measured[key].names)
            measured[key] = scaled(measured[key], whole, noise, where)
    for stage in range(num_stages):
        present = known_first(name for of, name in measured if of == stage)
        if "forward" not in present or not ("backward" in present or {*present} >= SPLIT_BACKWARD):
            raise InputError(
                f"stage {stage} has rows for {', '.join(present)} only; every stage needs forward, "
                "and backward or both backward_input and backward_weight",
                path=path,
                column="instruction",
            )
    means = {stage: math.fsum(watts) / len(watts) for stage, watts in powers.items()}
    elsewhere = math.fsum(means.values()) / max(1, len(means))
    return Contents(
        num_stages=num_stages,
        instructions=known_first(name for _, name in measured),
        measured_costs=measured,
        spreads=spreads,
        blocking_power_w=tuple(means.get(stage, elsewhere) for stage in range(num_stages))
        if means
        else None,
        notes=_notes(table, groups, 1 + max(map(len, repeated.values()), default=0)),
    )


def _put_together(table: Table[ProfileRow], first: int, again: Sequence[int]) -> None:
    """Let the first of several rows that measure one thing say what all of them say.

    Raises:
        InputError: they cannot be measurements of one thing; names the line.
    """
    for name in ("time", "energy"):
        column: list[Any] = table.columns[name]  # type: ignore[assignment]
        values = [column[row] for row in (first, *again)]
        for row in again:
            if max(column[first], column[row]) > _APART * min(column[first], column[row]):
                raise table.error(
                    row,
                    f"repeats line {table.lines[first]} with quite another {name}, "
                    f"{column[row]:g} instead of {column[first]:g}; keep one of the two, or tell "
                    "them apart in a config column",
                    name,
                )
        stds: list[Any] = table.columns[f"{name}_std"]  # type: ignore[assignment]
        stds[first] = statistics.stdev(values)
        column[first] = statistics.median(values)


def _groups(table: Table[ProfileRow]) -> tuple[Groups, dict[int, list[int]]]:
    """Rows by option; and rows that measure again what a row before them does.

    Raises:
        InputError: a part has several rows, which are not of different ranks, or parts come in
            another order at some clock; names the line.
    """
    names = ("stage", "instruction", "frequency", "config", "part", "rank")
    groups: Groups = {}
    orders: defaultdict[tuple[int, str], dict[str, int]] = defaultdict(dict)
    last: dict[tuple[Any, ...], str] = {}
    repeated: defaultdict[int, list[int]] = defaultdict(list)
    for row, key in enumerate(zip(*(table.columns[name] for name in names), strict=True)):
        stage, instruction, mhz, config, part, rank = key
        first = groups.setdefault(key[:5], {}).setdefault(rank, row)
        if first != row and part:
            raise table.error(
                row,
                f"repeats line {table.lines[first]}: part {part} of stage {stage} {instruction} at "
                f"{mhz} MHz; keep one of the two, or tell them apart in a config column",
            )
        if first != row:
            repeated[first].append(row)
        if not part:
            continue
        if instruction == BLOCKING:
            raise table.error(row, "blocking is no operation and has no parts", "part")
        order = orders[stage, instruction]
        place = order.setdefault(part, len(order))
        before = last.get((stage, instruction, mhz, config, rank), part)
        if order[before] > place:
            raise table.error(
                row,
                f"part {part} of stage {stage} {instruction} comes after {before} at {mhz} MHz, "
                "but before it at another clock; parts must come in one order, that of execution",
                "part",
            )
        last[stage, instruction, mhz, config, rank] = part
    return groups, repeated


def _noise(
    table: Table[ProfileRow], groups: Groups, key: Key, knobs: Iterable[Knob], parts: Sequence[str]
) -> dict[Knob, tuple[float, float]]:
    """By clock and config, how far sums of parts may lie from the operation, in time and energy.

    Three standard deviations, as a fraction; where a std is not known, the usual noise.
    """

    def noise(what: str, rows: Sequence[int]) -> float:
        values, stds = table.columns[what], table.columns[f"{what}_std"]
        known = (_USUAL_NOISE * values[r] if stds[r] is None else stds[r] for r in rows)
        return 3 * math.hypot(*known) / values[rows[0]] if values[rows[0]] else 0.0

    found = {}
    for knob in knobs:
        each = (groups.get((*key, *knob, part)) for part in ("", *parts))
        rows = [next(iter(ranked.values())) for ranked in each if ranked]
        found[knob] = noise("time", rows), noise("energy", rows)
    return found


def _notes(table: Table[ProfileRow], groups: Groups, repeats: int) -> list[str]:
    """That rows or ranks were put together, and which ranks take longer than the others, which the
    lower median of their stage stands for."""
    notes = [f"medians of up to {repeats} rows of the same"] if repeats > 1 else []
    if ranks := {*table.columns["rank"]} - {None}:
        notes.append(
            f"largest times and mean energies per GPU of {len(ranks)} ranks, whose times' spread "
            "is the noise"
        )
    times = table.columns["time"]
    ratios: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for (stage, instruction, *_), ranked in groups.items():
        if instruction != BLOCKING and len(ranked) > 1:
            usual = statistics.median_low(times[row] for row in ranked.values())
            for rank, row in ranked.items():
                ratios[stage, rank or 0].append(times[row] / usual)
    return notes + [
        f"rank {rank} straggles: it takes {slower:.2f} times as long as other ranks of stage "
        f"{stage}"
        for (stage, rank), found in sorted(ratios.items())
        if (slower := statistics.median(found)) > _STRAGGLES
    ]


def known_first(names: Iterable[str]) -> tuple[str, ...]:
    """Names of operations, those that schedules know first, in their order; no others twice."""
    listed = dict.fromkeys(names)
    known = [name for name in INSTRUCTIONS if name in listed]
    return (*known, *(name for name in listed if name not in (*INSTRUCTIONS, BLOCKING)))
