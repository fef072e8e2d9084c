"""Re-sharding in place: which GPU sends which part of the weights to which, with the least moved.

An instance on n GPUs cuts the weights into n equal shards, one for each rank. Cut into eighths, a
GPU of a TP8 instance holds one of them, of TP4 two, of TP2 four. When GPUs go over to instances of
other TPs, each new rank goes to the GPU that already holds most of it: an assignment problem, which
is solved exactly. What a GPU still lacks comes from one that held it, the one that has sent the
least so far. (DynamoLLM, section IV-B, names the problem; its unit of time is that of an eighth.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from envplan.errors import InputError

if TYPE_CHECKING:
    from envplan.serving.apply import Instance, ServingApplied

#: Equal parts of the weights in which transfers are counted: all shards are made of whole ones.
PARTS: Final = 8


class Transfer(NamedTuple):
    """One part of the weights that goes from a GPU to another."""

    part: int
    source: int
    target: int


@dataclass(frozen=True)
class TransferPlan:
    """How GPUs go over from some instances to others.

    Attributes:
        gpus: of each new instance, by rank: places in the list of GPUs there were.
        transfers: what is sent; those of different sources and targets at the same time.
    """

    gpus: tuple[tuple[int, ...], ...]
    transfers: tuple[Transfer, ...]

    @property
    def moved(self) -> float:
        """Weights that are sent, in whole copies of the model."""
        return len(self.transfers) / PARTS

    @property
    def longest(self) -> int:
        """Parts that the busiest GPU sends or receives; the time of the transfers, in parts."""
        sent = Counter(transfer.source for transfer in self.transfers)
        received = Counter(transfer.target for transfer in self.transfers)
        return max([*sent.values(), *received.values()], default=0)


def _shards(tps: Sequence[int]) -> list[frozenset[int]]:
    """The parts that each rank of instances holds."""
    shares = [(PARTS // tp, rank) for tp in tps for rank in range(tp)]
    return [frozenset(range(rank * each, (rank + 1) * each)) for each, rank in shares]


@lru_cache(maxsize=4096)
def transfer_plan(before: Sequence[int], after: Sequence[int], idle: int = 0) -> TransferPlan:
    """The plan that moves the fewest parts.

    Args:
        before: TPs of the instances there are, as a tuple; GPUs are counted through them, by rank.
        after: TPs of the instances to make of their GPUs, as a tuple.
        idle: GPUs beside them that hold nothing.

    Raises:
        ValueError: there are too few GPUs, or no instance to copy from.
    """
    held = _shards(before) + [frozenset()] * idle
    wanted = _shards(after)
    if len(wanted) > len(held) or not before:
        raise ValueError(f"{len(held)} GPUs cannot become instances on {len(wanted)}")
    place = _cheapest([[len(need - have) for have in held] for need in wanted])
    sources = {part: [g for g, parts in enumerate(held) if part in parts] for part in range(PARTS)}
    lacking = [
        (part, target)
        for need, target in zip(wanted, place, strict=True)
        for part in need - held[target]
    ]
    sent, transfers = [0] * len(held), []
    for part, target in sorted(lacking, key=lambda lack: len(sources[lack[0]])):
        source = min(sources[part], key=lambda gpu: sent[gpu])
        sent[source] += 1
        transfers.append(Transfer(part, source, target))
    ranks = iter(place)
    gpus = tuple(tuple(next(ranks) for _ in range(tp)) for tp in after)
    return TransferPlan(gpus, tuple(sorted(transfers, key=lambda t: (t.source, t.target, t.part))))


def _cheapest(costs: Sequence[Sequence[int]]) -> list[int]:
    """A column for each row, all different, with the least sum of costs."""
    from ortools.graph.python.linear_sum_assignment import SimpleLinearSumAssignment

    if not costs:
        return []
    square = np.zeros((len(costs[0]), len(costs[0])), dtype=np.int64)
    square[: len(costs)] = costs
    rows, columns = np.indices(square.shape)
    solver = SimpleLinearSumAssignment()
    solver.add_arcs_with_cost(rows.ravel(), columns.ravel(), square.ravel())
    solver.solve()
    return [solver.right_mate(row) for row in range(len(costs))]


class NodeChange(NamedTuple):
    """What happens on a machine: TPs there were and are, and what its GPUs send each other.

    `plan` is None where nothing is sent from GPU to GPU: the node had no instance, or has none.
    """

    node: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    plan: TransferPlan | None


def move_fleet(
    before: ServingApplied, after: ServingApplied
) -> tuple[ServingApplied, list[NodeChange]]:
    """A new fleet put where the old one's weights are, and what its GPUs then send each other.

    Which node of the old fleet becomes which of the new one, and on it which GPU becomes which
    rank, is chosen such that the fewest parts of the weights are moved.

    Args:
        before: the fleet that runs.
        after: the fleet that is to run, on nodes of as many GPUs.

    Returns:
        `after` on other nodes and GPUs, and what changes on each node.

    Raises:
        InputError: the nodes have different numbers of GPUs.
    """
    size = after.gpus_per_node
    if before.gpus_per_node != size:
        raise InputError(
            f"the fleets' nodes have {before.gpus_per_node} and {size} GPUs; they must be the same"
        )
    count = max(before.nodes, after.nodes)
    old, new = (
        [[i for i in fleet.instances if i.node == node] for node in range(count)]
        for fleet in (before, after)
    )

    def change(node: int, there: list[Instance]) -> NodeChange:
        was, now = (tuple(instance.tp for instance in each) for each in (old[node], there))
        plan = transfer_plan(was, now, size - sum(was)) if was and now else None
        return NodeChange(node, was, now, plan)

    def cost(node: int, there: list[Instance]) -> int:
        found = change(node, there)  # without an old instance, all weights come from elsewhere
        return len(found.plan.transfers) if found.plan else 2 * PARTS * len(there)

    places = _cheapest([[cost(node, there) for node in range(count)] for there in new])
    moved, changes = [], []
    for there, node in zip(new, places, strict=True):
        devices = [device for instance in old[node] for device in instance.devices]
        devices += [device for device in range(size) if device not in devices]
        found = change(node, there)
        plan = found.plan
        for k, instance in enumerate(there):
            gpus = [devices[g] for g in plan.gpus[k]] if plan else instance.devices
            moved.append(instance.model_copy(update={"node": node, "devices": gpus}))
        if plan:
            transfers = (Transfer(part, devices[a], devices[b]) for part, a, b in plan.transfers)
            plan = replace(plan, transfers=tuple(transfers))
        changes.append(found._replace(plan=plan))
    nodes = max(instance.node for instance in moved) + 1
    moved.sort(key=lambda instance: instance.instance)
    return after.model_copy(update={"instances": moved, "nodes": nodes}), sorted(changes)
