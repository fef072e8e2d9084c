"""Frontier files: `envplan frontier -o frontier.csv|.json`, written and checked."""

from __future__ import annotations

import csv
import io
import math
import os
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from envplan._files import atomic_write, decimal, decoded, read_bounded
from envplan.errors import InputError
from envplan.plan import (
    MAX_PLAN_BYTES,
    Baseline,
    Job,
    Plan,
    ProfileReference,
    first_problem,
    readable_json,
)

if TYPE_CHECKING:
    from envplan.solve import Frontier

FRONTIER_SCHEMA: Final = "envplan/frontier/v1"
_TOLERANCE: Final = 1e-9

Positive = Annotated[float, Field(ge=0)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Row(_Model):
    """A discrete plan on the frontier, over all GPUs; one row of the CSV."""

    iteration_time_s: Positive
    energy_j: Positive
    lower_bound_j: Positive
    gap: float
    average_power_w: Positive
    slowdown_percent: float
    savings_percent: float

    @classmethod
    def of(cls, plan: Plan) -> Self:
        return cls(
            iteration_time_s=plan.iteration_time,
            energy_j=plan.energy,
            lower_bound_j=plan.energy_lower_bound,
            gap=plan.gap,
            average_power_w=plan.average_power,
            slowdown_percent=plan.predicted.slowdown_percent,
            savings_percent=plan.predicted.savings_percent,
        )


COLUMNS: Final = tuple(Row.model_fields)


class Breakpoints(_Model):
    """The exact relaxed frontier: straight between these points, both lists of one length."""

    iteration_time_s: list[Positive]
    energy_j: list[Positive]


class FrontierFile(_Model):
    """frontier.json: what was traced, discrete plans along it and the curve itself."""

    schema_id: Literal["envplan/frontier/v1"] = Field(alias="schema")
    job: Job
    profile: ProfileReference
    t_min_s: Positive
    t_star_s: Positive
    baseline: Baseline
    plans: list[Row] = Field(min_length=1)
    breakpoints: Breakpoints

    @classmethod
    def of(cls, frontier: Frontier, plans: list[Plan]) -> Self:
        """The file of a frontier and some of its plans, by ascending time."""
        return cls(
            schema=FRONTIER_SCHEMA,
            job=plans[0].job,
            profile=plans[0].profile,
            t_min_s=frontier.min_time,
            t_star_s=frontier.min_energy_time,
            baseline=plans[0].predicted.baseline,
            plans=[Row.of(plan) for plan in plans],
            breakpoints=Breakpoints(
                iteration_time_s=frontier.times.tolist(), energy_j=frontier.energies.tolist()
            ),
        )

    def to_json(self) -> str:
        return readable_json(self.model_dump(by_alias=True, exclude_none=True))

    def save_json(self, path: str | os.PathLike[str]) -> None:
        atomic_write(path, self.to_json())

    def save_csv(self, path: str | os.PathLike[str]) -> None:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(row.model_dump().values() for row in self.plans)
        atomic_write(path, text.getvalue())

    @classmethod
    def from_document(cls, document: object, path: Path) -> Self:
        """Raises: InputError: it is not a frontier; names the field."""
        try:
            return cls.model_validate(document)
        except ValidationError as error:
            raise InputError(first_problem(error, "frontier"), path=path) from None


def read_rows(path: Path) -> list[Row]:
    """The rows of a frontier CSV.

    Raises:
        InputError: it cannot be read or is not one; says the line.
    """
    try:
        text = decoded(read_bounded(path, MAX_PLAN_BYTES), path)
        lines = list(csv.reader(io.StringIO(text)))
    except csv.Error as error:
        raise InputError(f"cannot be read as CSV ({error})", path=path) from None
    if not lines or tuple(lines[0]) != COLUMNS:
        raise InputError(f"the header must be {','.join(COLUMNS)}", path=path, line=1)
    rows = []
    for number, cells in enumerate(lines[1:], start=2):
        try:
            values = dict(zip(COLUMNS, map(decimal, cells), strict=True))
            rows.append(Row.model_validate(values))
        except ValidationError as error:
            raise InputError(first_problem(error, "frontier"), path=path, line=number) from None
        except ValueError:
            raise InputError(f"must hold {len(COLUMNS)} numbers", path=path, line=number) from None
    if not rows:
        raise InputError("has a header but no rows", path=path)
    return rows


def check_rows(rows: list[Row], path: Path) -> list[str]:
    """That the rows are a frontier and agree with themselves.

    Returns:
        A sentence for everything that was proved.

    Raises:
        InputError: the first thing that is not so; plans count from 1.
    """
    for number, row in enumerate(rows, start=1):
        if row.lower_bound_j > row.energy_j:
            raise InputError(f"plan {number}: lower_bound_j lies above energy_j", path=path)
        if not _close(row.gap * row.lower_bound_j, row.energy_j - row.lower_bound_j, row.energy_j):
            raise InputError(f"plan {number}: gap is not energy_j / lower_bound_j - 1", path=path)
        if not _close(row.average_power_w * row.iteration_time_s, row.energy_j, row.energy_j):
            raise InputError(
                f"plan {number}: average_power_w is not energy_j / iteration_time_s", path=path
            )
    for number, (one, other) in enumerate(pairwise(rows), start=2):
        if not (one.iteration_time_s < other.iteration_time_s and one.energy_j > other.energy_j):
            raise InputError(
                f"plan {number} is not both slower and cheaper than the one before it", path=path
            )
    worst = max(row.gap for row in rows)
    return [
        f"{len(rows)} plans, each slower and cheaper than the one before",
        f"every lower bound is at most the energy; the largest gap is {100 * worst:.4f}%",
        "gaps and average powers follow from times and energies",
    ]


def check_curve(file: FrontierFile, frontier: Frontier, path: Path) -> list[str]:
    """That the relaxed curve of a file is the one traced again, to 1e-9.

    Raises:
        InputError: it is not; says where.
    """
    expected = FrontierFile.of(frontier, [frontier.plan()])
    for name, stated, true in (
        ("t_min_s", [file.t_min_s], [expected.t_min_s]),
        ("t_star_s", [file.t_star_s], [expected.t_star_s]),
        ("baseline.energy_j", [file.baseline.energy_j], [expected.baseline.energy_j]),
        (
            "baseline.iteration_time_s",
            [file.baseline.iteration_time_s],
            [expected.baseline.iteration_time_s],
        ),
        (
            "breakpoints.iteration_time_s",
            file.breakpoints.iteration_time_s,
            expected.breakpoints.iteration_time_s,
        ),
        ("breakpoints.energy_j", file.breakpoints.energy_j, expected.breakpoints.energy_j),
    ):
        if len(stated) != len(true):
            raise InputError(
                f"{name} has {len(stated)} values; traced again there are {len(true)}", path=path
            )
        for found, right in zip(stated, true, strict=True):
            if not _close(found, right, right):
                raise InputError(
                    f"{name} has {found!r} where tracing again gives {right!r}", path=path
                )
    for number, row in enumerate(file.plans, start=1):
        if row.iteration_time_s < frontier.min_time:
            raise InputError(f"plan {number}: faster than T_min", path=path)
        if row.lower_bound_j > frontier.energy_at(row.iteration_time_s) * (1 + _TOLERANCE):
            raise InputError(f"plan {number}: lower_bound_j lies above the curve", path=path)
    return [
        f"T_min, T_star, the baseline and all {len(file.breakpoints.energy_j)} breakpoints are "
        "those of the frontier traced again"
    ]


def _close(found: float, right: float, scale: float) -> bool:
    return math.isclose(found, right, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE * abs(scale))
