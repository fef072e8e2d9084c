"""A sweep's result: a row for each point, its files, and what one wants to know of many rows."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, get_args

from pydantic import AfterValidator, create_model

from envplan._io.documents import Model
from envplan._io.files import atomic_write, read_bounded
from envplan._io.tables import MAX_TABLE_BYTES, parse_table
from envplan.errors import InputError
from envplan.request.limits import LIMIT_OPTIONS
from envplan.sweep.config import LIMIT_TARGETS

__all__ = ["COLUMNS", "Row", "check_table", "read_rows", "write_table"]


#: Phrases of what a point asks for, by the kind of its target.
_TARGETS: Final = {
    "time": "{:g} s",
    "slowdown": "+{:g}%",
    "min-energy": "T_star",
    "own": "its own",
    **{option.flag: option.sweep.phrase for option in LIMIT_TARGETS.values() if option.sweep},
}
#: Columns of limits that are not targets, with their phrases.
_LIMIT_COLUMNS: Final = {
    option.parameter + option.sweep.column_suffix: option.sweep.phrase
    for option in LIMIT_OPTIONS
    if option.sweep is not None and option.sweep.column_suffix
}
_CONDITIONS: Final = {
    "extra": "with {}",
    "one_clock": "one clock an operation",
    "parts_within_percent": "parts within {:g}%",
    "switch_latency_ms": "clocks {:g} ms late",
    **_LIMIT_COLUMNS,
}


def _check_target(kind: str) -> str:
    if kind not in _TARGETS:
        raise ValueError(f"should be one of {', '.join(_TARGETS)}")
    return kind


class _RowOfJob(Model):
    """The job and the target of a row; Row says the rest."""

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


if TYPE_CHECKING:

    class _RowOfLimitedJob(_RowOfJob):
        """A row with the columns of limits."""

else:
    _RowOfLimitedJob = create_model(
        "_RowOfLimitedJob",
        __base__=_RowOfJob,
        **dict.fromkeys(_LIMIT_COLUMNS, (float | None, None)),
    )


class Row(_RowOfLimitedJob):
    """One point and what came of it; energies are joules per iteration over all GPUs.

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
        """A phrase for each thing that the plan was made to bear, or has beside its schedule."""
        known = ((text, getattr(self, name)) for name, text in _CONDITIONS.items())
        return [text.format(one) for text, one in known if one is not None and one is not False]

    @property
    def asked(self) -> str:
        """What the point asks for: "+2%", "14 s", "T_star"."""
        words = [_TARGETS[self.target].format(self.target_value or 0.0), *self.conditions]
        return ", ".join(words) + ("" if self.noise_percent is None else f", seed {self.seed}")


COLUMNS: Final = tuple(Row.model_fields)
#: What a sweep may vary.
_ASKED: Final = [
    name
    for name in COLUMNS[: COLUMNS.index("assumed")]
    if name not in ("source", "stages", "target_value")
]


def check_table(path: Path) -> None:
    """Refuse a table that could not be written, before the work is done.

    Raises:
        InputError: the name ends in .parquet, and pyarrow is missing.
    """
    if path.suffix.lower() == ".parquet" and find_spec("pyarrow") is None:
        reason = "needs pyarrow: pip install 'envplan[parquet]', or a name that ends in .csv"
        raise InputError(reason, path=path)


def write_table(rows: Sequence[Row], path: str | os.PathLike[str]) -> None:
    """Write rows to a .parquet file or else as CSV, whole or not at all; no value is an empty cell.

    Raises:
        InputError: as for check_table, or the file cannot be written.
    """
    check_table(Path(path))
    cells, buffer = [dict(row) for row in rows], io.BytesIO()
    if Path(path).suffix.lower() != ".parquet":
        text = io.TextIOWrapper(buffer, encoding="utf-8", newline="", write_through=True)
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(cells)
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        types = {float: pa.float64(), int: pa.int64(), bool: pa.bool_()}
        fields = []
        for name, field in Row.model_fields.items():
            kinds = [*get_args(field.annotation), field.annotation]
            fields.append((name, next((types[one] for one in kinds if one in types), pa.string())))
        pq.write_table(pa.Table.from_pylist(cells, schema=pa.schema(fields)), buffer)
    atomic_write(path, buffer.getvalue())


def read_rows(path: Path) -> list[Row]:
    """The rows of a table that write_table wrote.

    Raises:
        InputError: it is no such table; says line and column.
    """
    check_table(path)
    content = read_bounded(path, MAX_TABLE_BYTES)
    if path.suffix.lower() == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            read = pq.read_table(io.BytesIO(content))
        except pa.ArrowException as error:
            raise InputError(f"is no table in Parquet's format: {error}", path=path) from None
        content = read.to_pandas().to_csv(index=False).encode()
    return list(parse_table(content, Row, path=path, kind="a sweep's table").rows())


def varying(rows: Sequence[Row]) -> dict[str, list[Any]]:
    """What is not the same in all points: by its name its value in each."""
    asked = {name: [getattr(row, name) for row in rows] for name in _ASKED}
    asked["target"] = [row.asked for row in rows]
    return {name: values for name, values in asked.items() if len(set(values)) > 1}


def best_rows(rows: Sequence[Row], count: int) -> list[Row]:
    """The points that save most, the first in the table first where they save alike."""
    planned = [row for row in rows if row.savings_percent is not None]
    return sorted(planned, key=lambda row: -(row.savings_percent or 0.0))[:count]


def by_what_varies(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """For each thing that varies and each of its values, how many points have it and what they
    save: on average, at what slowdown, and at most, in percent."""
    planned = [row for row in rows if row.savings_percent is not None]
    shares = []
    for name, values in varying(planned).items():
        for value in dict.fromkeys(values):
            alike = [row for row, its in zip(planned, values, strict=True) if its == value]
            saved = [row.savings_percent or 0.0 for row in alike]
            shown = "-" if value is None else value
            share: dict[str, Any] = {
                "name": name,
                "value": f"{shown:g}" if isinstance(shown, float) else str(shown),
                "points": len(alike),
                "slowdown_percent": fmean(row.slowdown_percent or 0.0 for row in alike),
                "savings_percent": fmean(saved),
                "most_percent": max(saved),
            }
            shares.append(share)
    return shares
