"""A schedule from elsewhere, as the readers in envplan.pipeline.imports hand it over."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property

from envplan.errors import InputError
from envplan.pipeline.schedules import FORWARD, LETTERS, SCHEDULES, Operation


@dataclass(frozen=True)
class ImportedSchedule:
    """A schedule from elsewhere: the operations of each rank in execution order.

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
        return self._known[0]

    @property
    def microbatch_group(self) -> int | None:
        """Microbatches of a chunk before the next one, where that schedule has to be told."""
        return self._known[1]

    @cached_property
    def _known(self) -> tuple[str | None, int | None]:
        orders = [[op for op in order if op.instruction in LETTERS] for order in self.orders]
        chunks = [op.chunk for op in orders[0] if op.instruction == FORWARD]
        group = chunks.index(1) if 1 in chunks else None
        for name, length in (*dict.fromkeys(SCHEDULES).items(), ("interleaved", group)):
            more = {} if length is None else {"microbatch_group": length}
            with suppress(InputError):
                shape = (len(orders), self.num_microbatches, self.num_chunks)
                if SCHEDULES[name](*shape, **more) == orders:
                    return name, length
        return None, None

    @property
    def num_chunks(self) -> int:
        """The most model chunks that a rank has."""
        return max(op.chunk for order in self.orders for op in order) + 1

    @property
    def num_microbatches(self) -> int:
        """How many there are, from 0 on."""
        return max(op.microbatch for order in self.orders for op in order) + 1
