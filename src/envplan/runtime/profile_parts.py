"""Parts of a profile: what each rank of a job measured, and how the profile is made of them."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from envplan._files import atomic_write
from envplan.errors import InputError
from envplan.profile import BLOCKING, Profile, ProfileMetadata
from envplan.profiling.sweep_file import COLUMNS
from envplan.runtime.metering import METHOD
from envplan.runtime.windows import PartRow

__all__ = ["Part", "merge_parts", "unfinished_parts"]

#: A power while waiting that is less sure than this, relative to it, is not written.
_SURE: Final = 0.2
#: One that is less sure than this says next to nothing.
_TELLING: Final = 0.5

PART_SCHEMA: Final = "envplan/profile-part/v1"


class Part:
    """The file with what one rank measured, written anew after every clock."""

    def __init__(self, path: Path, rank: int, world_size: int, num_stages: int) -> None:
        self.profile = path
        self.rank = rank
        self.world_size = world_size
        self.rows: list[PartRow] = []
        self.facts: dict[str, Any] = {"world_size": world_size, "num_stages": num_stages}
        self._path = _part_path(path, rank)
        self._write(complete=False, problem=None)  # a part that an earlier job left is no more

    def add(self, rows: Iterable[PartRow]) -> None:
        """Keep the rows of one more clock.

        Raises:
            InputError: the file cannot be written.
        """
        self.rows += rows
        self._write(complete=False, problem=None)

    def finish(self, problem: str | None) -> None:
        """There is nothing more to come.

        Raises:
            InputError: the file cannot be written.
        """
        self._write(complete=True, problem=problem)

    def remove(self) -> None:
        """There will be no profile."""
        self._path.unlink(missing_ok=True)

    def _write(self, *, complete: bool, problem: str | None) -> None:
        document = {
            "schema": PART_SCHEMA,
            "rank": self.rank,
            "complete": complete,
            "problem": problem,
            **self.facts,
            "rows": [asdict(row) for row in self.rows],
        }
        atomic_write(self._path, json.dumps(document) + "\n")


def merge_parts(path: str | os.PathLike[str]) -> Profile:
    """Write the profile of a job from the parts of its ranks, and remove them.

    Ranks that ran the same stage, as data- and tensor-parallel ones do, are averaged; one of them
    is enough.

    Args:
        path: of the profile.

    Raises:
        InputError: parts are missing, not complete or damaged, or make no profile.
    """
    path = Path(path)
    first = _read_part(path, 0)
    parts = [first, *(_read_part(path, rank) for rank in range(1, first["world_size"]))]
    for rank, part in enumerate(parts):
        if not part["complete"]:
            raise InputError(
                f"rank {rank} has not finished it; let the job go on",
                path=_part_path(path, rank),
            )
    rows = [row for rank, part in enumerate(parts) for row in _rows(path, rank, part)]
    if len({row.stage for row in rows}) < first["num_stages"]:
        rank = next((rank for rank, part in enumerate(parts) if not part["rows"]), 0)
        raise InputError(
            f"rank {rank} measured nothing: {parts[rank]['problem'] or 'the job ended too soon'}",
            path=_part_path(path, rank),
        )
    columns = [*COLUMNS, "part"]
    if not any(row.part for row in rows):
        columns.remove("part")
    profile = Profile.from_rows(
        [tuple(getattr(row, name) for name in columns) for row in _averaged(_sure(rows))],
        columns=columns,
        name=path.stem,
        metadata=_merged_metadata(first),
    )
    profile.save_csv(path)
    for rank in range(len(parts)):
        _part_path(path, rank).unlink(missing_ok=True)
    return profile


def _rows(path: Path, rank: int, part: Mapping[str, Any]) -> list[PartRow]:
    try:
        return [PartRow(**row) for row in part["rows"]]
    except TypeError:
        raise InputError("is damaged; profile again", path=_part_path(path, rank)) from None


def _sure(rows: Sequence[PartRow]) -> list[PartRow]:
    """The same without powers while waiting that are not sure; if none is, one of them together.

    A few iterations at a clock may tell too little of the waits between operations, while those at
    all clocks on all ranks tell enough of what is about the same everywhere.
    """
    waiting = [row for row in rows if row.instruction == BLOCKING]
    others = [row for row in rows if row.instruction != BLOCKING]
    sure = [row for row in waiting if row.energy_std <= _SURE * row.energy]
    return others + (sure or _pooled(waiting))


def _pooled(rows: Sequence[PartRow]) -> list[PartRow]:
    """One row of all, each counted by its inverse variance; none if it is not sure either."""
    rows = [row for row in rows if row.energy_std <= _TELLING * row.energy]
    if not rows:
        return []
    precision = math.fsum(row.energy_std**-2 for row in rows)
    energy = math.fsum(row.energy * row.energy_std**-2 for row in rows) / precision
    error = precision**-0.5
    row = replace(rows[0], energy=energy, energy_std=error, samples=len(rows))
    return [row] if error <= _SURE * energy else []


def _averaged(rows: Iterable[PartRow]) -> list[PartRow]:
    """One row for each stage, instruction, clock and part, from the rows of all ranks; parts in the
    order in which they ran."""
    groups: dict[tuple[int, str, int, str], list[PartRow]] = defaultdict(list)
    for row in rows:
        groups[row.stage, row.instruction, -row.frequency, row.part].append(row)
    return [_mean(groups[key]) for key in sorted(groups, key=lambda key: key[:3])]


def _mean(rows: Sequence[PartRow]) -> PartRow:
    total = sum(row.samples for row in rows)
    reasons = [reason for row in rows for reason in row.throttle.split("+")]

    def mean(value: Callable[[PartRow], float]) -> float:
        return math.fsum(value(row) * row.samples for row in rows) / total

    return PartRow(
        stage=rows[0].stage,
        instruction=rows[0].instruction,
        frequency=rows[0].frequency,
        time=mean(lambda row: row.time),
        energy=mean(lambda row: row.energy),
        time_std=math.sqrt(mean(lambda row: row.time_std**2)),
        energy_std=math.sqrt(mean(lambda row: row.energy_std**2)),
        samples=total,
        clock=round(statistics.median(row.clock for row in rows)),
        throttle="+".join(sorted({reason for reason in reasons if reason})),
        part=rows[0].part,
    )


def _merged_metadata(part: Mapping[str, Any]) -> ProfileMetadata:
    return ProfileMetadata(
        **part["metadata"],
        num_microbatches=part["num_microbatches"],
        extra={
            "measured": "inside a training job",
            "energy_method": METHOD,
            "energy_source": part["energy_source"],
        },
    )


def _read_part(path: Path, rank: int) -> dict[str, Any]:
    part = _part_path(path, rank)
    try:
        document = json.loads(part.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", path=part) from None
    except ValueError:
        raise InputError("is damaged; profile again", path=part) from None
    if not isinstance(document, dict) or document.get("schema") != PART_SCHEMA:
        raise InputError("is not a part of a profile of this version; profile again", path=part)
    return document


def unfinished_parts(path: Path, world_size: int) -> list[int]:
    """Ranks whose parts are not there yet, or not complete."""
    missing = []
    for rank in range(world_size):
        try:
            complete = _read_part(path, rank)["complete"]
        except InputError:
            complete = False
        if not complete:
            missing.append(rank)
    return missing


def _part_path(path: Path, rank: int) -> Path:
    return path.with_name(f"{path.stem}.rank{rank}.part.json")
