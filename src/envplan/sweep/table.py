"""The result of a sweep: a row for each point, and the files they are written to."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from pydantic import BaseModel, ConfigDict

from envplan._files import atomic_write
from envplan.errors import InputError

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["COLUMNS", "TABLE_TYPES", "Row", "check_table", "write_table"]

TABLE_TYPES: Final = (".csv", ".parquet")


class Row(BaseModel):
    """One point and what came of it; energies are joules per iteration over all GPUs.

    Attributes:
        target: what target_value counts: s ("time"), percent above T_min ("slowdown"), J
            ("energy-budget"), W ("power-cap", "peak-power-cap"); "min-energy" is T_star, "own" a
            planner's own choice.
        assumed: what was derived from the profile rather than measured.
        replayed_time_s, replayed_energy_j: of one replay with noise.
        trace_s: seconds it took to trace the frontier, which points of one pipeline share.
        wall_s: seconds it took to plan this point.
        error: why there is no plan.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    profile: str
    source: Literal["measured", "modelled"] | None = None
    stages: int | None = None
    microbatches: int | None = None
    schedule: str | None = None
    chunks: int
    planner: str
    target: Literal[
        "time", "slowdown", "min-energy", "energy-budget", "power-cap", "peak-power-cap", "own"
    ]
    target_value: float | None = None
    p2p_latency_s: float
    blocking_power_w: float | None = None
    gpus_per_stage: int
    replicas: int
    recompute: bool
    extra: str | None = None
    one_clock: bool = False
    parts_within_percent: float | None = None
    switch_latency_ms: float | None = None
    min_dwell_ms: float | None = None
    robust_percent: float | None = None
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
        return [
            words.format(value)
            for words, value in (
                ("with {}", self.extra),
                ("one clock an operation", True if self.one_clock else None),
                ("parts within {:g}%", self.parts_within_percent),
                ("clocks {:g} ms late", self.switch_latency_ms),
                ("clocks for {:g} ms", self.min_dwell_ms),
                ("{:g}% sure", self.robust_percent),
            )
            if value is not None
        ]


COLUMNS: Final = tuple(Row.model_fields)


def check_table(path: Path) -> None:
    """Refuse a table that could not be written, before the work is done.

    Raises:
        InputError: the name ends in neither .csv nor .parquet, or pyarrow is missing.
    """
    if path.suffix.lower() not in TABLE_TYPES:
        raise InputError(
            f"must end in {' or '.join(TABLE_TYPES)}; choose one of the two", path=path
        )
    if path.suffix.lower() == ".parquet" and find_spec("pyarrow") is None:
        raise InputError(
            "needs pyarrow: pip install 'envplan[parquet]', or choose a name that ends in .csv",
            path=path,
        )


def write_table(rows: Sequence[Row], path: str | os.PathLike[str]) -> None:
    """Write rows to a .csv or .parquet file, whole or not at all; no value is an empty cell.

    Raises:
        InputError: as for check_table, or the file cannot be written.
    """
    check_table(Path(path))
    text_or_bytes = _csv(rows) if Path(path).suffix.lower() == ".csv" else _parquet(rows)
    atomic_write(path, text_or_bytes)


def _csv(rows: Sequence[Row]) -> str:
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows([_cell(getattr(row, name)) for name in COLUMNS] for row in rows)
    return buffer.getvalue()


def _cell(value: object) -> object:
    return repr(value) if isinstance(value, float) else value


def _parquet(rows: Sequence[Row]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {name: [getattr(row, name) for row in rows] for name in COLUMNS}
    table = pa.table(columns, schema=_schema(pa))
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    return buffer.getvalue()


def _schema(arrow: Any) -> pa.Schema:
    types = {float: arrow.float64(), int: arrow.int64(), bool: arrow.bool_()}

    def of(annotation: object) -> Any:
        kinds = set(get_args(annotation)) or {annotation}
        return next((types[kind] for kind in (float, int, bool) if kind in kinds), arrow.string())

    return arrow.schema([(name, of(field.annotation)) for name, field in Row.model_fields.items()])
