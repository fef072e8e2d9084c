"""A schedule from elsewhere, as the readers in envplan.pipeline.imports hand it over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from envplan.errors import InputError
from envplan.pipeline.operations import FORWARD, LETTERS, Operation
from envplan.pipeline.schedules import SCHEDULES


class _Generated(NamedTuple):
    """A named schedule, and its microbatch group where that has to be told."""

    name: str
    microbatch_group: int | None


@dataclass(frozen=True)
class ImportedSchedule:
    """The operations of each rank in execution order, as another framework runs them.

    Attributes:
        orders: for each rank, its operations.
        skipped: what the source has beside operations, and how often, by the source's names.
        rank_labels: what a recorded trace calls each rank.
        layers_per_stage: layers of each model stage, where a configuration says so.
        overlap_p2p: whether ranks compute during transfers, where a configuration says so.
    """

    orders: tuple[tuple[Operation, ...], ...]
    skipped: Mapping[str, int] = field(default_factory=dict)
    rank_labels: tuple[str, ...] | None = None
    layers_per_stage: tuple[int, ...] | None = None
    overlap_p2p: bool | None = None

    @property
    def known_as(self) -> str | None:
        """The generated schedule with this very order of forwards and backwards, if any."""
        return None if self._generated is None else self._generated.name

    @property
    def microbatch_group(self) -> int | None:
        """Microbatches of a chunk before the next one, where that schedule has to be told."""
        return None if self._generated is None else self._generated.microbatch_group

    @cached_property
    def _generated(self) -> _Generated | None:
        passes = [[op for op in order if op.instruction in LETTERS] for order in self.orders]
        # Every schedule runs all microbatches on every rank. What names one that is far beyond the
        # operations there are would else have schedules generated that are far longer than it.
        if self.num_microbatches > min(map(len, passes)):
            return None
        candidates = [_Generated(name, None) for name in SCHEDULES]
        candidates.append(_Generated("interleaved", _group_length(passes[0])))
        for candidate in candidates:
            with suppress(InputError):
                if self._generate(candidate) == passes:
                    return candidate
        return None

    def _generate(self, schedule: _Generated) -> list[list[Operation]]:
        generator = SCHEDULES[schedule.name]
        shape = (len(self.orders), self.num_microbatches, self.num_chunks)
        if schedule.microbatch_group is None:
            return generator(*shape)
        return generator(*shape, microbatch_group=schedule.microbatch_group)

    @property
    def num_chunks(self) -> int:
        """The most model chunks that a rank has."""
        return max(op.chunk for order in self.orders for op in order) + 1

    @property
    def num_microbatches(self) -> int:
        """The number of microbatches, from 0 on."""
        return max(op.microbatch for order in self.orders for op in order) + 1


def _group_length(order: Sequence[Operation]) -> int | None:
    """How many forwards a rank runs before the first one of its second chunk, if there is one."""
    chunks = [op.chunk for op in order if op.instruction == FORWARD]
    return chunks.index(1) if 1 in chunks else None
