"""Parts of a profile: what each rank of a job measured, and how the profile is made of them."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import ClassVar, Final

from pydantic import Field

from envplan._io.documents import Document
from envplan.errors import InputError
from envplan.profile import BLOCKING, Profile, ProfileMetadata
from envplan.profiling.sweep_file import COLUMNS
from envplan.runtime.metering import METHOD, PartRow

__all__ = ["Part", "merge_parts", "part_path"]

#: A power while waiting that is less sure than this, relative to it, is not written.
_SURE: Final = 0.2
#: One that is less sure than this says next to nothing.
_TELLING: Final = 0.5


class Part(Document, frozen=False, strict=False):
    """What one rank measured: a file beside the profile, once there is nothing more to come.

    Attributes:
        rank: which; world_size: of how many.
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
    """Write the profile of a job from the parts of its ranks, and remove them.

    Ranks that ran the same stage, as data- and tensor-parallel ones do, are averaged; one of them
    is enough.

    Args:
        path: of the profile.

    Raises:
        InputError: parts are missing or damaged, or make no profile.
    """
    path = Path(path)
    first = Part.load(part_path(path, 0))
    parts = [first, *(Part.load(part_path(path, rank)) for rank in range(1, first.world_size))]
    rows = [row for part in parts for row in part.rows]
    if len({row.stage for row in rows}) < first.num_stages:
        rank = next((rank for rank, part in enumerate(parts) if not part.rows), 0)
        raise InputError(
            f"rank {rank} measured nothing: {parts[rank].problem or 'the job ended too soon'}",
            path=part_path(path, rank),
        )
    columns = [*COLUMNS, *(["part"] if any(row.part for row in rows) else [])]
    extra = {
        "measured": "inside a training job",
        "energy_method": METHOD,
        "energy_source": first.energy_source,
    }
    profile = Profile.from_rows(
        [tuple(getattr(row, name) for name in columns) for row in _averaged(_sure(rows))],
        columns=columns,
        name=path.stem,
        metadata=replace(first.metadata, num_microbatches=first.num_microbatches, extra=extra),
    )
    profile.save_csv(path)
    for rank in range(len(parts)):
        part_path(path, rank).unlink(missing_ok=True)
    return profile


def _sure(rows: Sequence[PartRow]) -> list[PartRow]:
    """The same without powers while waiting that are not sure; if none is, one of them together.

    A few iterations at a clock may tell too little of the waits between operations, while those at
    all clocks on all ranks tell enough of what is about the same everywhere.
    """
    waiting = [row for row in rows if row.instruction == BLOCKING]
    others = [row for row in rows if row.instruction != BLOCKING]
    sure = [row for row in waiting if row.energy_std <= _SURE * row.energy]
    telling = [row for row in waiting if row.energy_std <= _TELLING * row.energy]
    if not sure and telling:
        # Each counts by its inverse variance.
        precision = [row.energy_std**-2 for row in telling]
        energy, error = fmean([row.energy for row in telling], precision), sum(precision) ** -0.5
        if error <= _SURE * energy:
            sure = [replace(telling[0], energy=energy, energy_std=error, samples=len(telling))]
    return others + sure


def _averaged(rows: Iterable[PartRow]) -> Iterator[PartRow]:
    """One row for each stage, instruction, clock and part, from the rows of all ranks; parts in the
    order in which they ran."""
    groups: dict[tuple[int, str, int, str], list[PartRow]] = defaultdict(list)
    for row in rows:
        groups[row.stage, row.instruction, -row.frequency, row.part].append(row)
    for key in sorted(groups, key=lambda key: key[:3]):
        same = groups[key]
        samples = [row.samples for row in same]
        reasons = {reason for row in same for reason in row.throttle.split("+")} - {""}
        yield replace(
            same[0],
            time=fmean([row.time for row in same], samples),
            energy=fmean([row.energy for row in same], samples),
            time_std=math.sqrt(fmean([row.time_std**2 for row in same], samples)),
            energy_std=math.sqrt(fmean([row.energy_std**2 for row in same], samples)),
            samples=sum(samples),
            clock=round(median(row.clock for row in same)),
            throttle="+".join(sorted(reasons)),
        )


def part_path(path: Path, rank: int) -> Path:
    """Where the part of a rank is."""
    return path.with_name(f"{path.stem}.rank{rank}.part.json")
