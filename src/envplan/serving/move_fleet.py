"""A new fleet on the GPUs of an old one, such that the fewest weights are moved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

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

#: A part of the weights that no GPU of the node has costs as much as so many that one has.
_COST_FROM_ELSEWHERE: Final = 2


@dataclass(frozen=True)
class NodeChange:
    """The change of a node: its old and its new instances, and what its GPUs send each other.

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
    # Both fleets get as many nodes, so that each node of one can become one of the other.
    nodes = range(max(old.nodes, new.nodes))
    old_nodes = [old.instances_on(node) for node in nodes]
    new_nodes = [new.instances_on(node) for node in nodes]
    assigned_nodes = _assign_nodes(old_nodes, new_nodes, num_gpus)
    instances: list[Instance] = []
    changes: list[NodeChange] = []
    for node, new_instances in zip(assigned_nodes, new_nodes, strict=True):
        change = _change_node(node, old_nodes[node], new_instances, num_gpus)
        instances += _move_instances(new_instances, change)
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
    """For each node of the new fleet the node of the old one on whose GPUs it is put."""
    costs = np.zeros((len(new_nodes), len(old_nodes)), dtype=np.int64)
    for new_node, new in enumerate(new_nodes):
        for old_node, old in enumerate(old_nodes):
            costs[new_node, old_node] = _cost_of_move(_tps(old), _tps(new), num_gpus)
    return cheapest_assignment(costs)


def _cost_of_move(old_tps: tuple[int, ...], new_tps: tuple[int, ...], num_gpus: int) -> int:
    """Parts of the weights that a node is sent, those from elsewhere counted several times."""
    plan = _transfers_on_node(old_tps, new_tps, num_gpus)
    if plan is not None:
        return len(plan.transfers)
    return _COST_FROM_ELSEWHERE * PARTS * len(new_tps)


def _transfers_on_node(
    old_tps: tuple[int, ...], new_tps: tuple[int, ...], num_gpus: int
) -> TransferPlan | None:
    """What a node's GPUs send each other; None if it has no old instance, or no new one."""
    if not (old_tps and new_tps):
        return None
    return transfer_plan(old_tps, new_tps, num_gpus - sum(old_tps))


def _change_node(
    node: int, old: Sequence[Instance], new: Sequence[Instance], num_gpus: int
) -> NodeChange:
    """The change of a node, with GPUs by their device numbers."""
    old_tps, new_tps = _tps(old), _tps(new)
    plan = _transfers_on_node(old_tps, new_tps, num_gpus)
    if plan is not None:
        plan = _by_device(plan, _devices_in_order_of_plan(old, num_gpus))
    return NodeChange(node, old_tps, new_tps, plan)


def _devices_in_order_of_plan(old: Sequence[Instance], num_gpus: int) -> list[int]:
    """Devices as a transfer plan counts GPUs: those of the old instances, then the idle ones."""
    devices: list[int] = []
    for instance in old:
        devices += instance.devices
    idle_devices = set(range(num_gpus)) - set(devices)
    return devices + sorted(idle_devices)


def _by_device(plan: TransferPlan, devices: Sequence[int]) -> TransferPlan:
    """The same transfer plan, with GPU k numbered as devices[k]."""
    gpus = [tuple(devices[gpu] for gpu in instance_gpus) for instance_gpus in plan.gpus]
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
