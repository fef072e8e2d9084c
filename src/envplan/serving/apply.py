"""From a serving plan to clocks on GPUs: which instance runs where, and at which clock.

`envplan serving apply` writes serving.clocks.json ("envplan/serving-clocks/v1"): each instance with
its node, its GPUs on that node and the clock these shall run at; hold.py holds these clocks.

When a fleet follows another, its GPUs are re-sharded in place: `move_fleet` says which GPU sends
which part of the weights to which. An instance on n GPUs cuts the weights into n equal shards, one
for each rank. Cut into eighths, a GPU of a TP8 instance holds one of them, of TP4 two, of TP2 four.
Each new rank goes to the GPU that already holds most of it: an assignment problem, which is solved
exactly. What a GPU still lacks comes from one that held it, the one that has sent the least so far.
(DynamoLLM, section IV-B, names the problem; its unit of time is that of an eighth.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Final, Literal, NamedTuple, Self

import numpy as np
from pydantic import Field, model_validator

from envplan._io.documents import Count, Document, Index, Model
from envplan.enforce.freqplan import StageClocks
from envplan.enforce.supported_clocks import named_clocks
from envplan.errors import InputError
from envplan.serving.plan import ServingPlan
from envplan.serving.profile import ServingProfile

#: Equal parts of the weights in which transfers are counted: all shards are made of whole ones.
PARTS: Final = 8
#: A clock this little above the GPU's highest is taken for it: 2.0 GHz is 1,980 MHz on an H100.
_NOMINAL: Final = 0.02


class Instance(Model):
    """One instance of the model.

    Attributes:
        instance: number, from 0.
        pool: class whose pool it belongs to.
        serves: classes that are routed to this pool.
        tp: tensor-parallel degree, its number of GPUs.
        node: number of its machine, from 0.
        devices: its GPUs there, as the driver counts.
        planned_mhz: clock of the plan.
        clock_mhz: clock to be set, one that the GPU has.
        load_tokens_s: what it is planned to carry.
        slo_proven: whether the profile shows that its SLO is kept at clock_mhz. Below the plan's
            clock it does if the SLO is kept at the highest measured clock up to clock_mhz.
    """

    instance: Index
    pool: str
    serves: list[str]
    tp: Count
    node: Index
    devices: list[Index]
    planned_mhz: Count
    clock_mhz: Count
    load_tokens_s: Annotated[float, Field(ge=0)]
    slo_proven: bool = True


class ServingApplied(Document):
    """The file: all instances, and what they come from."""

    kind: ClassVar[str] = "file of serving clocks"
    schema_name: ClassVar[str] = "envplan/serving-clocks/v1"
    writes_null: ClassVar[bool] = True

    schema_id: Literal["envplan/serving-clocks/v1"] = Field(alias="schema")
    plan_sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    profile_sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    gpu: str | None
    clocks_source: str
    gpus_per_node: Count
    nodes: Count
    instances: list[Instance]

    @model_validator(mode="after")
    def _has_gpus(self) -> Self:
        taken = set[tuple[int, int]]()
        for each in self.instances:
            gpus = {(each.node, device) for device in each.devices}
            there = each.node < self.nodes and max(each.devices, default=0) < self.gpus_per_node
            if not there or not len(gpus) == len(each.devices) == each.tp or gpus & taken:
                raise ValueError(
                    f"instance {each.instance} is to have {each.tp} different GPUs, which no other "
                    f"has, of one of {self.nodes} nodes with {self.gpus_per_node} each, not "
                    f"{each.devices} of node {each.node}"
                )
            taken |= gpus
        return self

    def clocks_of(self, node: int) -> dict[int, int]:
        """The clock of each GPU of a node, MHz, by device.

        Raises:
            InputError: there is no such node.
        """
        if not 0 <= node < self.nodes:
            raise InputError(f"there is no node {node}; the file has nodes 0 to {self.nodes - 1}")
        return {
            device: instance.clock_mhz
            for instance in self.instances
            if instance.node == node
            for device in instance.devices
        }


def apply_serving_plan(
    plan: ServingPlan,
    profile: ServingProfile,
    *,
    clocks: StageClocks | None = None,
    gpus_per_node: int = 8,
    force: bool = False,
    plan_sha256: str | None = None,
) -> ServingApplied:
    """Put the instances of a plan on nodes and their clocks on what the GPUs have.

    Instances are placed largest first; with degrees of 1, 2, 4 and 8 that leaves no node with a
    hole. A clock the GPU lacks is replaced by the next one above. One up to 2% above the GPU's
    highest becomes that; the instance then says whether its SLO is still proven.

    Args:
        plan: what to do; it is checked first.
        profile: what it was made from.
        clocks: what the GPUs can be set to; default: the clocks of the GPU that the profile names
            or, if it is not a known one, those in the profile.
        gpus_per_node: of a machine.
        force: go on though the profile has changed since.
        plan_sha256: of the plan's file; default: of its text.

    Raises:
        InputError: the plan does not hold, an instance is larger than a node, or the GPU has no
            clock as high as the plan's.
    """
    plan.check(profile, force=force)
    measured = (frequency for _, _, frequency in profile.curves)
    known = clocks or named_clocks(profile.gpu, measured)
    instances: list[Instance] = []
    free: list[int] = []  # the next free device of each node
    for pool, group in sorted(plan.instances(), key=lambda pair: -pair[1].tp):
        if group.tp > gpus_per_node:
            raise InputError(
                f"an instance on {group.tp} GPUs does not fit into a node with {gpus_per_node}"
            )
        most = gpus_per_node - group.tp
        node = next((node for node, used in enumerate(free) if used <= most), len(free))
        free += [0] if node == len(free) else []
        clock = _supported(group.frequency_mhz, known)
        # Above the plan's clock the SLO is kept; below it if it is at the next measured one below.
        slower = [c for c in profile.of(pool.request_class, group.tp) if c.frequency_mhz <= clock]
        shown = bool(slower) and slower[-1].meets(pool.slo, group.load_tokens_s)
        instances.append(
            Instance(
                instance=len(instances),
                pool=pool.request_class,
                serves=pool.classes,
                tp=group.tp,
                node=node,
                devices=list(range(free[node], free[node] + group.tp)),
                planned_mhz=group.frequency_mhz,
                clock_mhz=clock,
                load_tokens_s=group.load_tokens_s,
                slo_proven=shown or clock >= group.frequency_mhz,
            )
        )
        free[node] += group.tp
    return ServingApplied(
        schema="envplan/serving-clocks/v1",
        plan_sha256=plan_sha256 or hashlib.sha256(plan.model_dump_json().encode()).hexdigest(),
        profile_sha256=plan.profile.sha256,
        gpu=known.gpu,
        clocks_source=known.clocks_source,
        gpus_per_node=gpus_per_node,
        nodes=len(free),
        instances=instances,
    )


def _supported(mhz: int, known: StageClocks) -> int:
    clocks = known.supported_clocks_mhz
    if above := [clock for clock in clocks if clock >= mhz]:
        return above[0]
    if clocks[-1] >= mhz * (1 - _NOMINAL):
        return clocks[-1]
    raise InputError(
        f"the plan wants {mhz} MHz, but {known.gpu or 'the GPU'} reaches {clocks[-1]} only; "
        "plan with a profile of that GPU"
    )


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

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """What the node's GPUs send each other, by their numbers there."""
        return () if self.plan is None else self.plan.transfers


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
