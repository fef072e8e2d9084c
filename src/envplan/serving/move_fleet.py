"""A new fleet on the GPUs of an old one, such that the fewest weights are moved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from envplan.errors import InputError
from envplan.serving.apply import Instance, ServingApplied
from envplan.serving.transfers import (
    PARTS,
    Transfer,
    TransferPlan,
    cheapest_assignment,
    transfer_plan,
)


@dataclass(frozen=True)
class NodeChange:
    """The change of a node: its instances before and after, and what GPUs send each other.

    Attributes:
        node: its number.
        old_tps: TPs of the instances it had.
        new_tps: TPs of the instances it has.
        plan: GPUs of the new instances, and what GPUs send each other; None where nothing is sent
            from GPU to GPU, because the node had no instance, or has none.
    """

    node: int
    old_tps: tuple[int, ...]
    new_tps: tuple[int, ...]
    plan: TransferPlan | None

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """The parts that the node's GPUs send each other, by their numbers there."""
        return () if self.plan is None else self.plan.transfers


@dataclass(frozen=True)
class MovedFleet:
    """A fleet that takes over from another one.

    Attributes:
        applied: the new fleet on its nodes and GPUs.
        changes: on each node, in their order.
    """

    applied: ServingApplied
    changes: list[NodeChange]

    @property
    def copies_moved(self) -> float:
        """Weights that are sent from GPU to GPU, in whole copies of the model."""
        return sum(len(change.transfers) for change in self.changes) / PARTS


def move_fleet(old: ServingApplied, new: ServingApplied) -> MovedFleet:
    """A new fleet put where the old one's weights are.

    Which node of the old fleet becomes which of the new one, and on it which GPU becomes which
    rank, is chosen such that the fewest parts of the weights are moved.

    Args:
        old: the fleet that runs.
        new: the fleet that is to run, on nodes of as many GPUs.

    Raises:
        InputError: the nodes have different numbers of GPUs.
    """
    num_gpus = new.gpus_per_node
    if old.gpus_per_node != num_gpus:
        raise InputError(
            f"the fleets' nodes have {old.gpus_per_node} and {num_gpus} GPUs; they must be the same"
        )
    nodes = range(max(old.nodes, new.nodes))
    old_nodes = [old.instances_on(node) for node in nodes]
    new_nodes = [new.instances_on(node) for node in nodes]
    instances: list[Instance] = []
    changes: list[NodeChange] = []
    for new_node, node in enumerate(_assign_nodes(old_nodes, new_nodes, num_gpus)):
        change = _change_node(node, old_nodes[node], new_nodes[new_node], num_gpus)
        instances += _move_instances(new_nodes[new_node], change)
        changes.append(change)
    instances.sort(key=lambda instance: instance.instance)
    changes.sort(key=lambda change: change.node)
    num_nodes = max(instance.node for instance in instances) + 1
    applied = new.model_copy(update={"instances": instances, "nodes": num_nodes})
    return MovedFleet(applied, changes)


def _tps(instances: Sequence[Instance]) -> tuple[int, ...]:
    return tuple(instance.tp for instance in instances)


def _assign_nodes(
    old_nodes: Sequence[Sequence[Instance]], new_nodes: Sequence[Sequence[Instance]], num_gpus: int
) -> list[int]:
    """For each node of the new fleet the node of the old one that it becomes."""
    costs = np.zeros((len(new_nodes), len(old_nodes)), dtype=np.int64)
    for row, new in enumerate(new_nodes):
        for column, old in enumerate(old_nodes):
            costs[row, column] = _parts_moved(_tps(old), _tps(new), num_gpus)
    return cheapest_assignment(costs)


def _parts_moved(old_tps: tuple[int, ...], new_tps: tuple[int, ...], num_gpus: int) -> int:
    """Parts of the weights that a node's GPUs send each other.

    Without an old instance all weights come from elsewhere, which counts as twice as much.
    """
    plan = _transfers_on_node(old_tps, new_tps, num_gpus)
    return 2 * PARTS * len(new_tps) if plan is None else len(plan.transfers)


def _transfers_on_node(
    old_tps: tuple[int, ...], new_tps: tuple[int, ...], num_gpus: int
) -> TransferPlan | None:
    if not (old_tps and new_tps):
        return None
    return transfer_plan(old_tps, new_tps, num_gpus - sum(old_tps))


def _change_node(
    node: int, old: Sequence[Instance], new: Sequence[Instance], num_gpus: int
) -> NodeChange:
    """The change of a node, with GPUs by their device numbers."""
    plan = _transfers_on_node(_tps(old), _tps(new), num_gpus)
    if plan is not None:
        # A transfer plan counts GPUs through the old instances, then those that hold nothing.
        devices: list[int] = []
        for instance in old:
            devices += instance.devices
        devices += sorted(set(range(num_gpus)) - set(devices))
        plan = _by_device(plan, devices)
    return NodeChange(node, _tps(old), _tps(new), plan)


def _by_device(plan: TransferPlan, devices: Sequence[int]) -> TransferPlan:
    """The same transfer plan with its GPUs renumbered."""
    gpus = [tuple(devices[gpu] for gpu in ranks) for ranks in plan.gpus]
    transfers = []
    for transfer in plan.transfers:
        source, target = devices[transfer.source], devices[transfer.target]
        transfers.append(Transfer(transfer.part, source, target))
    return TransferPlan(tuple(gpus), tuple(transfers))


def _move_instances(instances: Sequence[Instance], change: NodeChange) -> list[Instance]:
    """The instances on the node of a change, each on the GPUs that it gets there."""
    if change.plan is None:
        return [instance.model_copy(update={"node": change.node}) for instance in instances]
    return [
        instance.model_copy(update={"node": change.node, "devices": list(gpus)})
        for instance, gpus in zip(instances, change.plan.gpus, strict=True)
    ]
