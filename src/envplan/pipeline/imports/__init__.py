"""Schedules from elsewhere: PyTorch's CSV and objects, Megatron's configurations, recorded traces.

A reader, a module each, finds in order the steps of model stages that each rank runs, and the names
of what else there is and is left out. Here they become operations; Pipeline.from_orders then gives
them the data dependencies of a generated schedule, and refuses what could not run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, NamedTuple

from envplan.errors import InputError
from envplan.pipeline.dependencies import placement
from envplan.pipeline.schedules import FORWARD, LETTERS, SCHEDULES, Operation

MAX_FILE_BYTES: Final = 64 * 2**20
#: Microbatches and model stages beyond this are a slip, not a schedule.
MOST_DIGITS: Final = 7


class Step(NamedTuple):
    """One computation, before it is known which chunk of its rank it belongs to.

    Attributes:
        model_stage: in model order, from 0, over all ranks.
    """

    instruction: str
    microbatch: int
    model_stage: int


@dataclass(frozen=True)
class ImportedSchedule:
    """A schedule from elsewhere: the operations of each rank in execution order.

    Attributes:
        orders: for each rank, its operations.
        skipped: what the source has beside operations, and how often, by the source's names.
        facts: what else the source says of the pipeline, in JSON types.
    """

    orders: tuple[tuple[Operation, ...], ...]
    skipped: Mapping[str, int] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

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


def scheduled(ranks: Iterable[Iterable[Step | str]]) -> ImportedSchedule:
    """The schedule of what all ranks run. A rank's model stages are its chunks, in model order.

    Args:
        ranks: for each rank, in execution order, its steps, and names of what is left out.

    Raises:
        InputError: names a rank without steps, a step that comes twice, or a model stage that is
            on two ranks or on none.
    """
    orders: list[tuple[Operation, ...]] = []
    skipped: Counter[str] = Counter()
    for rank, found in enumerate(map(list, ranks)):
        skipped.update(one for one in found if isinstance(one, str))
        steps = [one for one in found if not isinstance(one, str)]
        stages = sorted({step.model_stage for step in steps})
        orders.append(tuple(Operation(rank, i, m, stages.index(at), at) for i, m, at in steps))
    placement(orders)
    return ImportedSchedule(tuple(orders), skipped)
