"""Re-sharding in place: which GPU sends which part of the weights to which, with the least moved.

An instance on n GPUs cuts the weights into n equal shards, one for each rank. Cut into eighths, a
GPU of a TP8 instance holds one of them, of TP4 two, of TP2 four. When GPUs go over to instances of
other TPs, each new rank goes to the GPU that already holds most of it: an assignment problem, which
is solved exactly. What a GPU still lacks comes from one that held it, the one that has sent the
least so far. (DynamoLLM, section IV-B, names the problem; its unit of time is that of an eighth.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

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
        ends = np.array(self.transfers, dtype=np.int64).reshape(-1, 3)[:, 1:].T
        return max(int(np.bincount(gpus, minlength=1).max()) for gpus in ends)


def _shards(tps: Sequence[int], gpus: int) -> Any:
    """Whether each of so many GPUs holds each part, (gpus, PARTS) bool; those left hold none."""
    ranks = [np.repeat(np.eye(tp, dtype=bool), PARTS // tp, axis=1) for tp in tps]
    return np.concatenate([*ranks, np.zeros((gpus - sum(tps), PARTS), dtype=bool)])


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
    gpus = sum(before) + idle
    if sum(after) > gpus or not before:
        raise ValueError(f"{gpus} GPUs cannot become instances on {sum(after)}")
    held, wanted = _shards(before, gpus), _shards(after, gpus)
    place = _cheapest(wanted.astype(np.int64) @ ~held.T)
    sent, transfers = [0] * gpus, []
    lacking = np.argwhere(wanted & ~held[place]).tolist()
    for rank, part in sorted(lacking, key=lambda lack: held[:, lack[1]].sum()):
        source = min(np.flatnonzero(held[:, part]).tolist(), key=sent.__getitem__)
        sent[source] += 1
        transfers.append(Transfer(part, source, place[rank]))
    ranks = iter(place)
    made = tuple(tuple(next(ranks) for _ in range(tp)) for tp in after)
    return TransferPlan(made, tuple(sorted(transfers, key=lambda t: (t.source, t.target, t.part))))


def _cheapest(costs: Any) -> list[int]:
    """A column for each row of a square of whole numbers, all different, with the least sum."""
    from ortools.graph.python.linear_sum_assignment import SimpleLinearSumAssignment

    rows, columns = np.indices(costs.shape)
    solver = SimpleLinearSumAssignment()
    solver.add_arcs_with_cost(rows.ravel(), columns.ravel(), costs.ravel())
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
    nodes = range(max(before.nodes, after.nodes))
    old, new = ([[i for i in fleet.instances if i.node == node] for node in nodes]
                for fleet in (before, after))  # fmt: skip

    def change(node: int, there: list[Instance]) -> NodeChange:
        was, now = (tuple(instance.tp for instance in each) for each in (old[node], there))
        plan = transfer_plan(was, now, size - sum(was)) if was and now else None
        return NodeChange(node, was, now, plan)

    def cost(node: int, there: list[Instance]) -> int:
        plan = change(node, there).plan  # without an old instance, all weights come from elsewhere
        return len(plan.transfers) if plan else 2 * PARTS * len(there)

    costs = np.array([[cost(node, there) for node in nodes] for there in new])
    moved, changes = [], []
    for there, node in zip(new, _cheapest(costs), strict=True):
        devices = [device for instance in old[node] for device in instance.devices]
        devices += [device for device in range(size) if device not in devices]
        found = change(node, there)
        if plan := found.plan:
            gpus = [[devices[g] for g in ranks] for ranks in plan.gpus]
            sent = (Transfer(part, devices[a], devices[b]) for part, a, b in plan.transfers)
            found = found._replace(plan=replace(plan, transfers=tuple(sent)))
        else:
            gpus = [instance.devices for instance in there]
        for instance, own in zip(there, gpus, strict=True):
            moved.append(instance.model_copy(update={"node": node, "devices": own}))
        changes.append(found)
    moved.sort(key=lambda instance: instance.instance)
    count = max(instance.node for instance in moved) + 1
    return after.model_copy(update={"instances": moved, "nodes": count}), sorted(changes)
