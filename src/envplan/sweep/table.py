"""A sweep's result: a row for each point, its files, and summaries of many rows."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, get_args

from pydantic import AfterValidator, create_model

from envplan._io.documents import Model
from envplan._io.files import atomic_write, read_bounded
from envplan._io.tables import MAX_ROWS, MAX_TABLE_BYTES, parse_table
from envplan.errors import InputError
from envplan.replay import Ask
from envplan.request.limits import LIMIT_OPTIONS
from envplan.sweep.config import LIMIT_TARGETS
from envplan.units import J_PER_KWH

__all__ = [
    "COLUMNS",
    "SweepRow",
    "ValueSummary",
    "best_rows",
    "cheapest_row",
    "check_table",
    "read_rows",
    "summarize_values",
    "varying",
    "write_table",
]

#: A cell of a row.
Cell = str | float | bool | None


#: Phrases for targets, by their kind.
_TARGET_PHRASES: Final = {
    "time": "{:g} s",
    "slowdown": "+{:g}%",
    "min-energy": "T_star",
    "own": "its own",
    **{option.flag: option.sweep.phrase for option in LIMIT_TARGETS.values() if option.sweep},
}
#: Phrases for columns of limits that are not targets.
_LIMIT_PHRASES: Final = {
    option.parameter + option.sweep.column_suffix: option.sweep.phrase
    for option in LIMIT_OPTIONS
    if option.sweep is not None and option.sweep.column_suffix
}
#: Phrases for columns that say conditions.
_CONDITION_PHRASES: Final = {
    "extra": "with {}",
    "one_clock": "one clock an operation",
    "parts_within_percent": "parts within {:g}%",
    "switch_latency_ms": "clocks {:g} ms late",
    "ask": "asked for: {}",
    **_LIMIT_PHRASES,
}


def _check_target(kind: str) -> str:
    if kind not in _TARGET_PHRASES:
        raise ValueError(f"should be one of {', '.join(_TARGET_PHRASES)}")
    return kind


class _RowOfJob(Model):
    """The job and the target of a row; SweepRow says the rest."""

    profile: str
    source: Literal["measured", "modelled"] | None = None
    stages: int | None = None
    microbatches: int | None = None
    schedule: str | None = None
    chunks: int
    planner: str
    target: Annotated[str, AfterValidator(_check_target)]
    target_value: float | None = None
    p2p_latency_s: float = 0.0
    blocking_power_w: float | None = None
    gpus_per_stage: int = 1
    replicas: int = 1
    recompute: bool
    extra: str | None = None
    one_clock: bool = False
    parts_within_percent: float | None = None
    switch_latency_ms: float | None = None
    ask: Ask | None = None


if TYPE_CHECKING:

    class _RowOfLimitedJob(_RowOfJob):
        """A row with the columns of limits."""

else:
    _RowOfLimitedJob = create_model(
        "_RowOfLimitedJob",
        __base__=_RowOfJob,
        **dict.fromkeys(_LIMIT_PHRASES, (float | None, None)),
    )


class SweepRow(_RowOfLimitedJob):
    """One point and its plan; energies are joules per iteration over all GPUs.

    Attributes:
        target: what target_value counts: s ("time"), percent above T_min ("slowdown"), J
            ("energy-budget"), W ("power-cap", "peak-power-cap"), or what another limit counts in;
            "min-energy" is T_star, "own" a planner's own choice.
        assumed: what was derived from the profile rather than measured.
        replayed_time_s, replayed_energy_j: of one replay with noise.
        trace_s: seconds it took to trace the frontier, which points of one pipeline share.
        wall_s: seconds it took to plan this point.
        error: why there is no plan.
    """

    noise_percent: float | None = None
    seed: int
    assumed: str | None = None
    t_min_s: float | None = None
    t_star_s: float | None = None
    iteration_time_s: float | None = None
    energy_j: float | None = None
    average_power_w: float | None = None
    energy_lower_bound_j: float | None = None
    gap_percent: float | None = None
    savings_percent: float | None = None
    slowdown_percent: float | None = None
    replayed_time_s: float | None = None
    replayed_energy_j: float | None = None
    trace_s: float | None = None
    wall_s: float | None = None
    error: str | None = None

    @property
    def conditions(self) -> list[str]:
        """A phrase for each condition of the plan, and for what it has beside its schedule."""
        phrases = []
        for name, phrase in _CONDITION_PHRASES.items():
            value = getattr(self, name)
            if value is not None and value is not False:
                phrases.append(phrase.format(value))
        return phrases

    @property
    def request(self) -> str:
        """The target and the conditions in words, such as "+2%", "14 s" or "T_star"."""
        target = _TARGET_PHRASES[self.target].format(self.target_value or 0.0)
        seed = "" if self.noise_percent is None else f", seed {self.seed}"
        return ", ".join([target, *self.conditions]) + seed


COLUMNS: Final = tuple(SweepRow.model_fields)
#: Columns that do not vary by themselves: sources and stages go with profiles, and the target's
#: value is part of the target in words.
_DEPENDENT_COLUMNS: Final = ("source", "stages", "target_value")
#: The columns of what was asked for come first.
_REQUEST_COLUMNS: Final = COLUMNS[: COLUMNS.index("assumed")]
#: The columns that a sweep may vary.
_VARIABLE_COLUMNS: Final = [name for name in _REQUEST_COLUMNS if name not in _DEPENDENT_COLUMNS]


def check_table(path: Path) -> None:
    """Refuse a table that could not be written, before the work is done.

    Raises:
        InputError: the name ends in .parquet, and pyarrow is missing.
    """
    if _is_parquet(path) and find_spec("pyarrow") is None:
        reason = "needs pyarrow: pip install 'envplan[parquet]', or a name that ends in .csv"
        raise InputError(reason, path=path)


def _is_parquet(path: Path) -> bool:
    return path.suffix.lower() == ".parquet"


def write_table(rows: Sequence[SweepRow], path: str | os.PathLike[str]) -> None:
    """Write rows to a .parquet file or else as CSV, whole or not at all; no value is an empty cell.

    Raises:
        InputError: as for check_table, or the file cannot be written.
    """
    check_table(Path(path))
    as_bytes = _as_parquet if _is_parquet(Path(path)) else _as_csv
    atomic_write(path, as_bytes(rows))


def _as_csv(rows: Sequence[SweepRow]) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(dict(row) for row in rows)
    return text.getvalue().encode()


def _as_parquet(rows: Sequence[SweepRow]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    arrow_types = {float: pa.float64(), int: pa.int64(), bool: pa.bool_()}

    def arrow_type(annotation: Any) -> Any:
        """The type of a column, whose annotation is a type or a union of one and None."""
        for python_type in [*get_args(annotation), annotation]:
            if python_type in arrow_types:
                return arrow_types[python_type]
        return pa.string()

    fields = [(name, arrow_type(field.annotation)) for name, field in SweepRow.model_fields.items()]
    buffer = io.BytesIO()
    cells = [dict(row) for row in rows]
    pq.write_table(pa.Table.from_pylist(cells, schema=pa.schema(fields)), buffer)
    return buffer.getvalue()


def read_rows(path: Path) -> list[SweepRow]:
    """Read the rows of a table that write_table wrote.

    Raises:
        InputError: it is no such table; says line and column.
    """
    check_table(path)
    content = read_bounded(path, MAX_TABLE_BYTES)
    if _is_parquet(path):
        content = _csv_from_parquet(content, path)
    return list(parse_table(content, SweepRow, path=path, kind="a sweep's table").rows())


def _csv_from_parquet(content: bytes, path: Path) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(io.BytesIO(content))
        if file.metadata.num_rows > MAX_ROWS:
            raise InputError(f"has more than {MAX_ROWS} rows", path=path)
        csv_text: str = file.read().to_pandas().to_csv(index=False)
    except (pa.ArrowException, LookupError, OSError, OverflowError, ValueError) as error:
        # Damage shows anywhere in Arrow, under many names and in words of several lines.
        reason = " ".join(str(error).split())[:100]
        raise InputError(f"is no table in Parquet's format: {reason}", path=path) from None
    return csv_text.encode()


def varying(rows: Sequence[SweepRow]) -> dict[str, list[Cell]]:
    """The columns in which points differ, by name; a value for each row.

    A target and its conditions are one column, in words.
    """
    columns: dict[str, list[Cell]] = {}
    for name in _VARIABLE_COLUMNS:
        columns[name] = [getattr(row, name) for row in rows]
    columns["target"] = [row.request for row in rows]
    return {name: cells for name, cells in columns.items() if len(set(cells)) > 1}


def best_rows(rows: Sequence[SweepRow], count: int) -> list[SweepRow]:
    """The points that save most; where they save alike, in the order of the table."""
    planned = [row for row in rows if row.savings_percent is not None]
    return sorted(planned, key=lambda row: -(row.savings_percent or 0.0))[:count]


def cost_saved(row: SweepRow, *, price: float, gpu_hour: float) -> float:
    """The share of an iteration's cost at maximum frequency that a planned point saves.

    Args:
        row: of a point that was planned.
        price: of a kWh.
        gpu_hour: what an hour of a GPU costs besides energy.
    """
    time_s, energy_j = row.iteration_time_s or 0.0, row.energy_j or 0.0
    usual_time_s = time_s / (1 + (row.slowdown_percent or 0.0) / 100)
    usual_energy_j = energy_j / (1 - (row.savings_percent or 0.0) / 100)
    num_gpus = (row.stages or 1) * row.gpus_per_stage * row.replicas

    def cost(time_s: float, energy_j: float) -> float:
        return num_gpus * time_s / 3600 * gpu_hour + energy_j / J_PER_KWH * price

    usual = cost(usual_time_s, usual_energy_j)
    return 1 - cost(time_s, energy_j) / usual if usual else 0.0


def cheapest_row(rows: Sequence[SweepRow], *, price: float, gpu_hour: float) -> SweepRow | None:
    """The point that saves most of the cost, not just of the energy; None: none was planned."""
    planned = [row for row in rows if row.savings_percent is not None]
    saved = partial(cost_saved, price=price, gpu_hour=gpu_hour)
    return max(planned, key=saved, default=None)


@dataclass(frozen=True, slots=True)
class ValueSummary:
    """The points of a sweep that share a value.

    Attributes:
        name: the column that varies.
        value: the value that they share, as text.
        points: how many there are.
        slowdown_percent, savings_percent: on average.
        most_percent: the most that one of them saves.
    """

    name: str
    value: str
    points: int
    slowdown_percent: float
    savings_percent: float
    most_percent: float

    def to_dict(self) -> dict[str, object]:
        """The summary in JSON types."""
        return {
            "name": self.name,
            "value": self.value,
            "points": self.points,
            "slowdown_percent": self.slowdown_percent,
            "savings_percent": self.savings_percent,
            "most_percent": self.most_percent,
        }


def summarize_values(rows: Sequence[SweepRow]) -> list[ValueSummary]:
    """A summary for each value of each column in which the planned points differ."""
    planned = [row for row in rows if row.savings_percent is not None]
    summaries: list[ValueSummary] = []
    for name, cells in varying(planned).items():
        summaries += _summaries_of_column(name, cells, planned)
    return summaries


def _summaries_of_column(
    name: str, cells: Sequence[Cell], rows: Sequence[SweepRow]
) -> Iterator[ValueSummary]:
    """A summary for each value of one column."""
    for value in dict.fromkeys(cells):
        sharing = [row for row, cell in zip(rows, cells, strict=True) if cell == value]
        savings = [row.savings_percent or 0.0 for row in sharing]
        yield ValueSummary(
            name=name,
            value=_cell_text(value),
            points=len(sharing),
            slowdown_percent=fmean(row.slowdown_percent or 0.0 for row in sharing),
            savings_percent=fmean(savings),
            most_percent=max(savings),
        )


def _cell_text(value: Cell) -> str:
    if value is None:
        return "-"
    return f"{value:g}" if isinstance(value, float) else str(value)
