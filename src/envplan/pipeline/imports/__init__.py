"""Schedules from elsewhere: PyTorch's CSV and objects, Megatron's configurations, recorded traces.

A reader, a module each, finds in order the computations of model stages that each rank runs, and
the names of what else there is and is left out. Here they become operations; Pipeline.from_orders
then gives them the data dependencies of a generated schedule, and refuses what could not run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Final, NamedTuple

from envplan.pipeline.dependencies import ranks_of_stages
from envplan.pipeline.imported import ImportedSchedule
from envplan.pipeline.operations import Operation


class ImportFormat(StrEnum):
    """Sources that schedules can be imported from: a reader each."""

    TORCH_CSV = "torch-csv"
    MEGATRON = "megatron"
    CHROME_TRACE = "chrome-trace"


MAX_FILE_BYTES: Final = 64 * 2**20
#: Microbatches and model stages beyond this are a slip, not a schedule.
MOST_DIGITS: Final = 7


class Computation(NamedTuple):
    """One computation, before it is known which chunk of its rank it belongs to.

    Attributes:
        model_stage: in model order, from 0, over all ranks.
    """

    instruction: str
    microbatch: int
    model_stage: int


def scheduled(ranks: Iterable[Iterable[Computation | str]]) -> ImportedSchedule:
    """The schedule of what all ranks run. A rank's model stages are its chunks, in model order.

    Args:
        ranks: for each rank, in execution order, its computations, and names of what is left out.

    Raises:
        InputError: names a rank without computations, one that comes twice, or a model stage that
            is on two ranks or on none.
    """
    orders: list[tuple[Operation, ...]] = []
    skipped: Counter[str] = Counter()
    for rank, items in enumerate(map(list, ranks)):
        skipped.update(item for item in items if isinstance(item, str))
        computations = [item for item in items if not isinstance(item, str)]
        orders.append(tuple(_operations(rank, computations)))
    ranks_of_stages(orders)
    return ImportedSchedule(tuple(orders), skipped)


def _operations(rank: int, computations: Sequence[Computation]) -> Iterator[Operation]:
    """The operations of a rank, whose model stages are its chunks in model order."""
    stages = sorted({computation.model_stage for computation in computations})
    chunk_of = {stage: chunk for chunk, stage in enumerate(stages)}
    for instruction, microbatch, stage in computations:
        yield Operation(rank, instruction, microbatch, chunk_of[stage], stage)
