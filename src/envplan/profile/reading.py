"""Reading a profile's CSV: every value checked once, errors with file, line and column."""

from __future__ import annotations

import io
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from envplan._files import decimal, read_bounded
from envplan.errors import InputError
from envplan.profile.options import BLOCKING, INSTRUCTIONS, OptionTable, frozen
from envplan.units import fj_from_j, ns_from_s

COLUMNS: Final = ("stage", "instruction", "frequency", "time", "energy")
_SPREAD_COLUMNS: Final = ("time_std", "energy_std", "samples")
#: What was measured, in a profile whose times and energies were smoothed.
RAW_COLUMNS: Final = ("raw_time", "raw_energy")
_SOME_STAGES_ONLY: Final = frozenset({"optimizer", "load", "recompute", "all_reduce", BLOCKING})

MAX_BYTES: Final = 256 * 2**20
_MAX_TIME_S: Final = 1e9
_MAX_ENERGY_J: Final = 9e3
_MAX_FREQUENCY_MHZ: Final = 1_000_000
_MAX_STAGE: Final = 1_000_000


def read_cells(path: Path) -> list[dict[str, str]]:
    """The text of every cell of a profile's rows, by column.

    Raises:
        InputError: it is no such table.
    """
    content = read_bounded(path, MAX_BYTES)
    return [dict(cells.texts) for cells in _read_cells(_decoded(content, path), path)]


class _Row(NamedTuple):
    line: int
    stage: int
    instruction: str
    frequency: int
    config: str
    time_s: float
    energy_j: float
    time_std_s: float | None


@dataclass(frozen=True)
class _Cells:
    """The text of one line by column name, and how to complain about it."""

    path: Path | None
    line: int
    texts: Mapping[str, str]

    def error(self, column: str, message: str) -> InputError:
        return InputError(message, path=self.path, line=self.line, column=column)

    def number(self, column: str, meaning: str) -> float:
        text = self.texts[column]
        if not text:
            raise self.error(column, f"is empty; expected {meaning}")
        try:
            value = decimal(text)
        except ValueError:
            message = f"{_shown(text)} is not a number; expected {meaning}"
            raise self.error(column, message) from None
        if math.isinf(value) and re.search(r"\d", text):
            raise self.error(column, f"{_shown(text)} overflows the range; expected {meaning}")
        if not math.isfinite(value):
            raise self.error(column, f"{_shown(text)} is not finite; expected {meaning}")
        return value

    def whole(self, column: str, meaning: str, largest: int) -> int:
        value = self.number(column, meaning)
        text = _shown(self.texts[column])
        if not value.is_integer():
            raise self.error(column, f"{text} is not a whole number; expected {meaning}")
        if value < 0:
            raise self.error(column, f"{text} is negative; expected {meaning}")
        if value > largest:
            raise self.error(column, f"{text} is above the limit of {largest}; expected {meaning}")
        return int(value)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")


def read_rows(content: bytes, path: Path | None) -> list[_Row]:
    """Every data line of a profile, each value checked by itself and for duplicates."""
    lines = _read_cells(_decoded(content, path), path)
    rows: list[_Row] = []
    seen: dict[tuple[int, str, int, str], int] = {}
    for cells in lines:
        row = _parse_row(cells)
        first = seen.setdefault((row.stage, row.instruction, row.frequency, row.config), row.line)
        if first != row.line:
            label = f" config {row.config}" if row.config else ""
            raise InputError(
                f"repeats line {first}: stage {row.stage} {row.instruction} at {row.frequency} "
                f"MHz{label}; keep one of the two, or tell them apart in a config column",
                path=path,
                line=row.line,
            )
        rows.append(row)
    if not rows:
        raise InputError("has a header but no rows; profile the stages first", path=path)
    return rows


def _decoded(content: bytes, path: Path | None) -> str:
    expected = f"expected a CSV file with the header {','.join(COLUMNS)}"
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if not text.strip():
        raise InputError(f"is empty; {expected}", path=path)
    if "\0" in text:
        raise InputError(f"is not UTF-8 text; {expected}", path=path)
    if text.lstrip().startswith(("{", "[")):
        raise InputError(f"is JSON, not CSV; {expected}", path=path)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _read_cells(text: str, path: Path | None) -> list[_Cells]:
    """The non-blank lines below the header."""
    skipped = text[: len(text) - len(text.lstrip())].count("\n")
    table = _split(text.lstrip(), skipped, path)
    header = [name.strip() for name in table[0]]
    _check_header(header, skipped + 1, path)
    lines: list[_Cells] = []
    for line, values in enumerate(table[1:], start=skipped + 2):
        texts = {name: value.strip() for name, value in zip(header, values, strict=True)}
        if any(texts.values()):
            lines.append(_Cells(path, line, texts))
    return lines


def _split(text: str, skipped: int, path: Path | None) -> list[list[str]]:
    """Lines and cells of a CSV text; `skipped` lines of the file come before it."""
    import pandas as pd

    try:
        frame = pd.read_csv(
            io.StringIO(text),
            header=None,
            dtype=object,
            keep_default_na=False,
            skip_blank_lines=False,
            skipinitialspace=True,
        )
    except pd.errors.ParserError as error:
        message = str(error)
        if ragged := re.search(r"Expected (\d+) fields in line (\d+), saw (\d+)", message):
            expected, line, found = map(int, ragged.groups())
            raise InputError(
                f"has {found} values where the header has {expected}; check its commas",
                path=path,
                line=line + skipped,
            ) from error
        if quote := re.search(r"EOF inside string starting at row (\d+)", message):
            raise InputError(
                "opens a quote that is never closed",
                path=path,
                line=int(quote[1]) + 1 + skipped,
            ) from error
        raise InputError(f"is not a CSV file ({message.strip()})", path=path) from error
    table: list[list[str]] = frame.to_numpy().tolist()
    for line, values in enumerate(table, start=skipped + 1):
        if any("\n" in value for value in values):
            raise InputError("has a quoted value with a line break in it", path=path, line=line)
    return table


def _check_header(header: list[str], line: int, path: Path | None) -> None:
    for name in COLUMNS:
        if name not in header:
            found = _shown(",".join(header))
            raise InputError(
                f"the column is missing from the header {found}; a profile needs "
                f"{','.join(COLUMNS)}",
                path=path,
                line=line,
                column=name,
            )
    for name in (*COLUMNS, "config", *_SPREAD_COLUMNS, *RAW_COLUMNS):
        if header.count(name) > 1:
            raise InputError(
                "the header names this column twice; remove one",
                path=path,
                line=line,
                column=name,
            )


def _parse_row(cells: _Cells) -> _Row:
    instruction = cells.texts["instruction"]
    if not instruction.isidentifier():
        raise cells.error(
            "instruction",
            f"{_shown(instruction)} is not a name; expected one such as forward or backward",
        )
    for column in _SPREAD_COLUMNS:
        if cells.texts.get(column) and cells.number(column, "a number or nothing") < 0:
            raise cells.error(column, "is negative; expected a number from 0 up or nothing")
    for column, parse in (("raw_time", _parse_time), ("raw_energy", _parse_energy)):
        if cells.texts.get(column):
            parse(cells, column)
    return _Row(
        line=cells.line,
        stage=cells.whole("stage", "a stage number from 0 up", _MAX_STAGE),
        instruction=instruction,
        frequency=cells.whole(
            "frequency", "an SM clock in MHz, or 0 for a constant time", _MAX_FREQUENCY_MHZ
        ),
        config=cells.texts.get("config", ""),
        time_s=_parse_time(cells),
        energy_j=_parse_energy(cells),
        time_std_s=cells.number("time_std", "seconds") if cells.texts.get("time_std") else None,
    )


def _parse_time(cells: _Cells, column: str = "time") -> float:
    value = cells.number(column, "seconds above 0")
    shown = _shown(cells.texts[column])
    if value <= 0:
        raise cells.error(column, f"{shown} is not above 0; expected the seconds it takes")
    if value > _MAX_TIME_S:
        raise cells.error(
            column, f"{shown} overflows the integer range (1e9 s); expected seconds, check the unit"
        )
    if ns_from_s(value) == 0:
        raise cells.error(column, f"{shown} is below a nanosecond; expected seconds")
    return value


def _parse_energy(cells: _Cells, column: str = "energy") -> float:
    value = cells.number(column, "joules from 0 up")
    shown = _shown(cells.texts[column])
    if value < 0:
        raise cells.error(column, f"{shown} is negative; expected joules from 0 up")
    if value > _MAX_ENERGY_J:
        raise cells.error(
            column,
            f"{shown} overflows the integer range (9000 J an operation); expected joules, check "
            "the unit",
        )
    return value


def check_stages(rows: Sequence[_Row], path: Path | None) -> int:
    stages = {row.stage for row in rows}
    for expected in range(len(stages)):
        if expected not in stages:
            beyond = next(row for row in rows if row.stage > expected)
            raise InputError(
                f"stage {expected} has no rows but stage {beyond.stage} has; stages must be "
                "numbered 0, 1, 2, ... without gaps",
                path=path,
                line=beyond.line,
                column="stage",
            )
    return len(stages)


def check_instructions(rows: Sequence[_Row], num_stages: int, path: Path | None) -> tuple[str, ...]:
    """Names of all operations, known ones first, once every stage is seen to have what it needs."""
    names: dict[str, None] = dict.fromkeys(row.instruction for row in rows)
    present = {(row.stage, row.instruction) for row in rows}
    needed = {"forward"} | (names.keys() - _SOME_STAGES_ONLY)
    if not {"backward_input", "backward_weight"} <= needed:
        needed.add("backward")
    for stage in range(num_stages):
        lacking = sorted(name for name in needed if (stage, name) not in present)
        if lacking:
            raise InputError(
                f"stage {stage} has no rows for {', '.join(lacking)}; every stage needs "
                f"{', '.join(sorted(needed))} (backward may be split on all stages into "
                "backward_input and backward_weight)",
                path=path,
                column="instruction",
            )
    return known_first(name for name in names if name != BLOCKING)


def known_first(names: Iterable[str]) -> tuple[str, ...]:
    listed = list(names)
    known = [name for name in INSTRUCTIONS if name in listed]
    return (*known, *(name for name in listed if name not in INSTRUCTIONS))


def blocking_power(rows: Sequence[_Row], num_stages: int) -> tuple[float, ...] | None:
    samples: defaultdict[int, list[float]] = defaultdict(list)
    for row in rows:
        if row.instruction == BLOCKING:
            samples[row.stage].append(row.energy_j / row.time_s)
    if not samples:
        return None
    means = {stage: math.fsum(powers) / len(powers) for stage, powers in samples.items()}
    elsewhere = math.fsum(means.values()) / len(means)
    return tuple(means.get(stage, elsewhere) for stage in range(num_stages))


def tables(rows: Sequence[_Row]) -> dict[tuple[int, str], OptionTable]:
    groups: defaultdict[tuple[int, str], list[tuple[int, int, int, str]]] = defaultdict(list)
    for row in rows:
        groups[row.stage, row.instruction].append(
            (ns_from_s(row.time_s), fj_from_j(row.energy_j), -row.frequency, row.config)
        )
    tables = {}
    for (stage, instruction), options in sorted(groups.items()):
        options.sort()
        tables[stage, instruction] = OptionTable(
            stage=stage,
            instruction=instruction,
            frequency_mhz=frozen([-option[2] for option in options]),
            config=tuple(option[3] for option in options),
            time_ns=frozen([option[0] for option in options]),
            energy_fj=frozen([option[1] for option in options]),
        )
    return tables
