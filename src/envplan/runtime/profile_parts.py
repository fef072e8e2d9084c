"""The measurements of each rank of a job, and the profile that is made of them."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import fmean, median
from typing import ClassVar, Final, NamedTuple

from pydantic import Field

from envplan._io.documents import Document
from envplan.errors import InputError
from envplan.profile import BLOCKING, Profile, ProfileMetadata
from envplan.profiling.sweep_file import COLUMNS
from envplan.runtime.metering import METHOD, PartRow

__all__ = ["RankProfile", "merge_parts", "part_path"]

#: A power while waiting that is less sure than this, relative to it, is not written.
_MAX_RELATIVE_ERROR: Final = 0.2
#: One that is less sure than this says next to nothing.
_MAX_TELLING_ERROR: Final = 0.5


class RankProfile(Document, frozen=False, strict=False):
    """The measurements of one rank: a file beside the profile, written when it is done.

    Attributes:
        rank: global rank.
        world_size: ranks of the job.
        num_stages: model stages of the job.
        problem: why there is not more.
        num_microbatches: of an iteration; None before it was measured.
        energy_source: as in DeviceInfo.
        metadata: for the profile's sidecar.
        rows: what was measured.
    """

    kind: ClassVar[str] = "part of a profile"
    schema_name: ClassVar[str] = "envplan/profile-part/v1"

    schema_id: str = Field("envplan/profile-part/v1", alias="schema")
    rank: int
    world_size: int
    num_stages: int
    problem: str | None = None
    num_microbatches: int | None = None
    energy_source: str = ""
    metadata: ProfileMetadata = ProfileMetadata()
    rows: list[PartRow] = Field(default_factory=list)


def merge_parts(path: str | os.PathLike[str]) -> Profile:
    """Write the profile of a job from the files of its ranks, and remove them.

    Ranks that ran the same stage, as data- and tensor-parallel ones do, are averaged; one of them
    is enough.

    Args:
        path: of the profile.

    Raises:
        InputError: files are missing or damaged, or make no profile.
    """
    path = Path(path)
    parts = _load_parts(path)
    _require_all_stages(path, parts)
    measured_rows = list(chain.from_iterable(part.rows for part in parts))
    rows = _average_over_ranks(_with_sure_waiting_powers(measured_rows))
    columns = list(COLUMNS)
    if any(row.part for row in measured_rows):
        columns.append("part")
    first_part = parts[0]
    metadata = replace(
        first_part.metadata,
        num_microbatches=first_part.num_microbatches,
        extra={
            "measured": "inside a training job",
            "energy_method": METHOD,
            "energy_source": first_part.energy_source,
        },
    )
    profile = Profile.from_rows(
        [tuple(getattr(row, name) for name in columns) for row in rows],
        columns=columns,
        name=path.stem,
        metadata=metadata,
    )
    profile.save_csv(path)
    for part in parts:
        part_path(path, part.rank).unlink(missing_ok=True)
    return profile


def _load_parts(path: Path) -> list[RankProfile]:
    """The files of all ranks, by rank; rank 0's says how many there are.

    Args:
        path: of the profile.

    Raises:
        InputError: files are missing or damaged.
    """
    first_part = RankProfile.load(part_path(path, 0))
    other_ranks = range(1, first_part.world_size)
    other_parts = [RankProfile.load(part_path(path, rank)) for rank in other_ranks]
    return [first_part, *other_parts]


def _require_all_stages(path: Path, parts: Sequence[RankProfile]) -> None:
    """Raises: InputError: a stage was not measured; says why, of the first rank without rows."""
    measured_stages: set[int] = set()
    for part in parts:
        measured_stages.update(row.stage for row in part.rows)
    if len(measured_stages) >= parts[0].num_stages:
        return
    ranks_without_rows = [rank for rank, part in enumerate(parts) if not part.rows]
    rank = ranks_without_rows[0] if ranks_without_rows else 0
    raise InputError(
        f"rank {rank} measured nothing: {parts[rank].problem or 'the job ended too soon'}",
        path=part_path(path, rank),
    )


def _with_sure_waiting_powers(rows: Sequence[PartRow]) -> list[PartRow]:
    """The rows without powers while waiting that are not sure; if none is, one of them together.

    A few iterations at a clock may tell too little of the waits between operations, while those at
    all clocks on all ranks tell enough of what is about the same everywhere.
    """
    operations = [row for row in rows if row.instruction != BLOCKING]
    waiting = [row for row in rows if row.instruction == BLOCKING]
    sure = _surer_than(_MAX_RELATIVE_ERROR, waiting)
    if not sure:
        telling = _surer_than(_MAX_TELLING_ERROR, waiting)
        combined = [_inverse_variance_mean(telling)] if telling else []
        sure = _surer_than(_MAX_RELATIVE_ERROR, combined)
    return operations + sure


def _surer_than(max_relative_error: float, rows: Sequence[PartRow]) -> list[PartRow]:
    return [row for row in rows if row.energy_std <= max_relative_error * row.energy]


class _RowKey(NamedTuple):
    """The columns by which rows of several ranks are alike."""

    stage: int
    instruction: str
    frequency_mhz: int
    part: str


def _inverse_variance_mean(rows: Sequence[PartRow]) -> PartRow:
    """One row for several of the same power, each counted by its inverse variance."""
    precisions = [row.energy_std**-2 for row in rows]
    energy_j = fmean([row.energy for row in rows], precisions)
    error_j = sum(precisions) ** -0.5
    return replace(rows[0], energy=energy_j, energy_std=error_j, samples=len(rows))


def _average_over_ranks(rows: Iterable[PartRow]) -> list[PartRow]:
    """One row for each stage, instruction, clock and part, from the rows of all ranks.

    Parts are in the order in which they ran, clocks from the highest down.
    """
    groups: dict[_RowKey, list[PartRow]] = defaultdict(list)
    for row in rows:
        key = _RowKey(row.stage, row.instruction, row.frequency, row.part)
        groups[key].append(row)
    # Sorting keeps the order of parts.
    keys = sorted(groups, key=lambda key: (key.stage, key.instruction, -key.frequency_mhz))
    return [_average(groups[key]) for key in keys]


def _average(rows: Sequence[PartRow]) -> PartRow:
    """One row for several of the same operation at the same clock."""
    samples = [row.samples for row in rows]
    reasons: set[str] = set()
    for row in rows:
        reasons.update(row.throttle.split("+"))
    return replace(
        rows[0],
        time=fmean([row.time for row in rows], samples),
        energy=fmean([row.energy for row in rows], samples),
        time_std=math.sqrt(fmean([row.time_std**2 for row in rows], samples)),
        energy_std=math.sqrt(fmean([row.energy_std**2 for row in rows], samples)),
        samples=sum(samples),
        clock=round(median(row.clock for row in rows)),
        throttle="+".join(sorted(reasons - {""})),
    )


def part_path(path: Path, rank: int) -> Path:
    """The path of the file of a rank, beside that of the profile."""
    return path.with_name(f"{path.stem}.rank{rank}.part.json")
