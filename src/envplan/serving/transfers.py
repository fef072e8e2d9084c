"""Which GPU sends which part of the weights to which, when instances of other TPs take over.

An instance on n GPUs cuts the weights into n equal shards, one for each rank. Cut into eighths, a
GPU of a TP8 instance holds one of them, of TP4 two, of TP2 four. Each new rank goes to the GPU that
already holds most of it: an assignment problem, which is solved exactly. What a GPU still lacks
comes from one that held it, the one that has sent the least so far. (DynamoLLM, section IV-B, names
the problem; its unit of time is that of an eighth.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

#: Equal parts of the weights in which transfers are counted: all shards are made of whole ones.
PARTS: Final = 8

BoolArray = npt.NDArray[np.bool_]


class Transfer(NamedTuple):
    """One part of the weights that goes from a GPU to another."""

    part: int
    source: int
    target: int


@dataclass(frozen=True)
class TransferPlan:
    """How GPUs go over from some instances to others.

    Attributes:
        gpus: of each new instance, by rank: indices into the list of GPUs there were.
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
        _, sources, targets = np.array(self.transfers, dtype=np.int64).T
        return max(int(np.bincount(sources).max()), int(np.bincount(targets).max()))


@lru_cache(maxsize=4096)
def transfer_plan(
    old_tps: tuple[int, ...], new_tps: tuple[int, ...], num_idle: int = 0
) -> TransferPlan:
    """The plan that moves the fewest parts.

    Args:
        old_tps: TPs of the instances there are; GPUs are counted through them, by rank.
        new_tps: TPs of the instances to make of their GPUs.
        num_idle: GPUs beside them that hold nothing.

    Raises:
        ValueError: there are too few GPUs, or no instance to copy from.
    """
    num_gpus = sum(old_tps) + num_idle
    if sum(new_tps) > num_gpus or not old_tps:
        raise ValueError(f"{num_gpus} GPUs cannot become instances on {sum(new_tps)}")
    held, wanted = _parts_by_gpu(old_tps, num_gpus), _parts_by_gpu(new_tps, num_gpus)
    num_lacking = wanted.astype(np.int64) @ ~held.T  # (rank, GPU)
    gpu_of_rank = cheapest_assignment(num_lacking)
    transfers = _transfers(held, wanted, gpu_of_rank)
    ranks = iter(gpu_of_rank)
    return TransferPlan(
        gpus=tuple(tuple(islice(ranks, tp)) for tp in new_tps),
        transfers=tuple(sorted(transfers, key=lambda move: (move.source, move.target, move.part))),
    )


def _parts_by_gpu(tps: Sequence[int], num_gpus: int) -> BoolArray:
    """Whether each GPU holds each part, (num_gpus, PARTS); GPUs beyond the instances hold none."""
    shards = [np.repeat(np.eye(tp, dtype=bool), PARTS // tp, axis=1) for tp in tps]
    nothing = np.zeros((num_gpus - sum(tps), PARTS), dtype=bool)
    return np.concatenate([*shards, nothing])


def _transfers(held: BoolArray, wanted: BoolArray, gpu_of_rank: Sequence[int]) -> list[Transfer]:
    """Transfers of all that ranks' GPUs lack; parts that few GPUs held go first."""
    lacking = np.argwhere(wanted & ~held[gpu_of_rank]).tolist()
    num_holders = held.sum(axis=0)
    lacking.sort(key=lambda rank_and_part: num_holders[rank_and_part[1]])
    num_sent = [0] * len(held)
    transfers = []
    for rank, part in lacking:
        holders = np.flatnonzero(held[:, part]).tolist()
        source = min(holders, key=num_sent.__getitem__)
        num_sent[source] += 1
        transfers.append(Transfer(part, source, gpu_of_rank[rank]))
    return transfers


def cheapest_assignment(costs: npt.NDArray[np.int_]) -> list[int]:
    """A column for each row of a square matrix of whole numbers, all different, of least sum."""
    from ortools.graph.python.linear_sum_assignment import SimpleLinearSumAssignment

    rows, columns = np.indices(costs.shape)
    solver = SimpleLinearSumAssignment()
    solver.add_arcs_with_cost(rows.ravel(), columns.ravel(), costs.ravel())
    solver.solve()
    return [solver.right_mate(row) for row in range(len(costs))]
