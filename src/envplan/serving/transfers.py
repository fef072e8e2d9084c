"""Which GPU sends which part of the weights to which, when instances of other TPs take over.

An instance on n GPUs cuts the weights into n equal shards, one for each rank. Shards are counted in
parts, which are eighths of the weights: a GPU of a TP8 instance holds one part, of TP4 two, of TP2
four. Ranks are put on GPUs such that the fewest parts are lacking, an assignment problem that is
solved exactly. Each lacking part comes from a GPU that held it, the one that has sent the fewest so
far. (DynamoLLM, section IV-B, names the problem; its unit of time is that of a part.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

#: Equal parts of the weights in which transfers are counted. Every TP is a divisor of it, so all
#: shards are made of whole parts.
PARTS: Final = 8

#: Whether each GPU, or each rank, holds each part, (GPUs or ranks, PARTS).
HeldParts = npt.NDArray[np.bool_]


class Transfer(NamedTuple):
    """One part of the weights that goes from a GPU to another.

    Attributes:
        part: its number, 0 to PARTS - 1.
        source: number of the GPU that sends it.
        target: number of the GPU that receives it.
    """

    part: int
    source: int
    target: int


@dataclass(frozen=True)
class TransferPlan:
    """How GPUs go over from some instances to others.

    Attributes:
        gpus: for each new instance the numbers of its GPUs, by rank.
        transfers: by source, target and part; those of different sources and targets run at the
            same time.
    """

    gpus: tuple[tuple[int, ...], ...]
    transfers: tuple[Transfer, ...]

    @property
    def copies_moved(self) -> float:
        """Weights that are sent, in whole copies of the model."""
        return len(self.transfers) / PARTS

    @property
    def max_parts_of_gpu(self) -> int:
        """Parts that the busiest GPU sends or receives; the time of the transfers, in parts."""
        if not self.transfers:
            return 0
        num_sent = Counter(transfer.source for transfer in self.transfers)
        num_received = Counter(transfer.target for transfer in self.transfers)
        return max(*num_sent.values(), *num_received.values())


@lru_cache(maxsize=4096)
def transfer_plan(
    old_tps: tuple[int, ...], new_tps: tuple[int, ...], num_idle: int = 0
) -> TransferPlan:
    """The plan that moves the fewest parts.

    GPUs are numbered through the old instances, by rank; those that hold nothing come last.

    Args:
        old_tps: TPs of the instances there are.
        new_tps: TPs of the instances to make of their GPUs.
        num_idle: GPUs beside those of the old instances; they hold nothing.

    Raises:
        ValueError: there are too few GPUs, or no instance to copy from.
    """
    num_gpus = sum(old_tps) + num_idle
    if sum(new_tps) > num_gpus or not old_tps:
        raise ValueError(f"{num_gpus} GPUs cannot become instances on {sum(new_tps)}")
    held = _held_parts(old_tps, num_gpus)
    wanted = _held_parts(new_tps, num_gpus)
    gpu_of_rank = cheapest_assignment(_num_lacking(held, wanted))
    transfers = _transfers(held, wanted, gpu_of_rank)
    transfers.sort(key=lambda transfer: (transfer.source, transfer.target, transfer.part))
    return TransferPlan(_gpus_by_instance(gpu_of_rank, new_tps), tuple(transfers))


def _held_parts(tps: Sequence[int], num_gpus: int) -> HeldParts:
    """The parts that instances hold; GPUs beyond the instances hold none."""
    held = np.zeros((num_gpus, PARTS), dtype=bool)
    gpu = 0
    for tp in tps:
        parts_per_gpu = PARTS // tp
        for rank in range(tp):
            begin = rank * parts_per_gpu
            held[gpu, begin : begin + parts_per_gpu] = True
            gpu += 1
    return held


def _num_lacking(held: HeldParts, wanted: HeldParts) -> npt.NDArray[np.int64]:
    """How many parts each GPU would lack as each rank, (ranks, GPUs)."""
    is_lacking = wanted[:, np.newaxis, :] & ~held[np.newaxis, :, :]
    num_lacking: npt.NDArray[np.int64] = is_lacking.sum(axis=2, dtype=np.int64)
    return num_lacking


def _transfers(held: HeldParts, wanted: HeldParts, gpu_of_rank: Sequence[int]) -> list[Transfer]:
    """Transfers of all that ranks' GPUs lack; parts that few GPUs held go first."""
    is_lacking = wanted & ~held[gpu_of_rank]
    num_holders = held.sum(axis=0)
    num_sent = [0] * len(held)
    transfers = []
    # The sort is stable: parts with as many holders stay in the order of ranks and parts.
    ranks, parts = np.nonzero(is_lacking)
    for index in np.argsort(num_holders[parts], kind="stable").tolist():
        part = int(parts[index])
        holders = np.flatnonzero(held[:, part]).tolist()
        source = min(holders, key=num_sent.__getitem__)
        num_sent[source] += 1
        transfers.append(Transfer(part, source, gpu_of_rank[int(ranks[index])]))
    return transfers


def _gpus_by_instance(
    gpu_of_rank: Sequence[int], tps: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """The GPUs of each instance, whose ranks follow each other."""
    gpus = []
    begin = 0
    for tp in tps:
        gpus.append(tuple(gpu_of_rank[begin : begin + tp]))
        begin += tp
    return tuple(gpus)


def cheapest_assignment(costs: npt.NDArray[np.int_]) -> list[int]:
    """A column for each row of a square matrix of whole numbers, all different, of least sum."""
    from ortools.graph.python.linear_sum_assignment import SimpleLinearSumAssignment

    rows, columns = np.indices(costs.shape)
    solver = SimpleLinearSumAssignment()
    solver.add_arcs_with_cost(rows.ravel(), columns.ravel(), costs.ravel())
    solver.solve()
    return [solver.right_mate(row) for row in range(len(costs))]
