"""From a serving plan to clocks on GPUs: which instance runs where, and at which clock.

`envplan serving apply` writes serving.clocks.json ("envplan/serving-clocks/v1"): each instance with
its node, its GPUs on that node and the clock these shall run at; hold.py holds these clocks.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import cache
from typing import Annotated, ClassVar, Final, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from envplan._io.documents import Count, Document, Index, Model
from envplan.enforce.freqplan import StageClocks
from envplan.enforce.supported_clocks import named_clocks
from envplan.errors import InputError
from envplan.serving.instances import Instances
from envplan.serving.performance import Configuration
from envplan.serving.plan import DECODE, Group, Pool, Role, ServingPlan
from envplan.serving.plan_replay import replay_group
from envplan.serving.profile import ServingProfile

#: A clock this little above the GPU's highest is taken for it: 2.0 GHz is 1,980 MHz on an H100.
_NOMINAL_ROUNDING: Final = 0.02


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
        load_tokens_s: load that it is planned to carry.
        slo_proven: whether the profile shows that its SLO is kept at clock_mhz. Below the plan's
            clock it does if the SLO is kept at the highest measured clock up to clock_mhz.
        role: phase of requests that it runs; None: both.
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
    role: Role | None = None


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
    def _every_instance_has_gpus_of_its_own(self) -> Self:
        used = set[tuple[int, int]]()
        for instance in self.instances:
            gpus = {(instance.node, device) for device in instance.devices}
            node_exists = instance.node < self.nodes
            devices_exist = max(instance.devices, default=0) < self.gpus_per_node
            are_as_many_as_tp = len(gpus) == len(instance.devices) == instance.tp
            are_free = not gpus & used
            if not (node_exists and devices_exist and are_as_many_as_tp and are_free):
                raise ValueError(
                    f"instance {instance.instance} is to have {instance.tp} different GPUs, which "
                    f"no other has, of one of {self.nodes} nodes with {self.gpus_per_node} each, "
                    f"not {instance.devices} of node {instance.node}"
                )
            used |= gpus
        return self

    def instances_on(self, node: int) -> list[Instance]:
        """The instances on a node; none on one that the file does not have."""
        return [instance for instance in self.instances if instance.node == node]

    def clocks_of(self, node: int) -> dict[int, int]:
        """The clock of each GPU of a node, MHz, by device.

        Raises:
            InputError: there is no such node.
        """
        if not 0 <= node < self.nodes:
            raise InputError(f"there is no node {node}; the file has nodes 0 to {self.nodes - 1}")
        return {
            device: instance.clock_mhz
            for instance in self.instances_on(node)
            for device in instance.devices
        }


class _PlannedInstance(NamedTuple):
    """One instance of a plan: its pool, and the group of alike instances that it is one of."""

    pool: Pool
    group: Group


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

    A clock the GPU lacks is replaced by the next one above. One up to 2% above the GPU's highest
    becomes that; the instance then says whether its SLO is still proven.

    Args:
        plan: the plan; it is checked first.
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
    if clocks is None:
        clocks = named_clocks(profile.gpu, (key.frequency_mhz for key in profile.curves))
    nodes = _Nodes(gpus_per_node)
    instances: list[Instance] = []
    proofs = _SloProofs(plan, profile)
    for pool, group in _largest_first(plan):
        allocation = nodes.allocate(group.tp)
        clock_mhz = _supported_clock(group.frequency_mhz, clocks)
        instances.append(
            Instance(
                instance=len(instances),
                pool=pool.request_class,
                serves=pool.classes,
                tp=group.tp,
                node=allocation.node,
                devices=allocation.devices,
                planned_mhz=group.frequency_mhz,
                clock_mhz=clock_mhz,
                load_tokens_s=group.load_tokens_s,
                slo_proven=proofs.slo_is_proven(pool, group, clock_mhz),
                role=group.role,
            )
        )
    return ServingApplied(
        schema="envplan/serving-clocks/v1",
        plan_sha256=plan_sha256 or hashlib.sha256(plan.model_dump_json().encode()).hexdigest(),
        profile_sha256=plan.profile.sha256,
        gpu=clocks.gpu,
        clocks_source=clocks.clocks_source,
        gpus_per_node=gpus_per_node,
        nodes=nodes.count,
        instances=instances,
    )


def _largest_first(plan: ServingPlan) -> list[_PlannedInstance]:
    instances = []
    for pool in plan.pools:
        for group in pool.groups:
            instances += [_PlannedInstance(pool, group)] * group.instances
    return sorted(instances, key=lambda instance: -instance.group.tp)


class _Allocation(NamedTuple):
    """Devices for an instance, all on one node."""

    node: int
    devices: list[int]


class _Nodes:
    """Machines that are filled with instances, one after another.

    Placed largest first, instances on 1, 2, 4 and 8 GPUs leave no node with a hole.
    """

    def __init__(self, gpus_per_node: int) -> None:
        self._gpus_per_node = gpus_per_node
        self._num_used: list[int] = []  # devices of each node

    @property
    def count(self) -> int:
        """How many nodes have an instance."""
        return len(self._num_used)

    def allocate(self, tp: int) -> _Allocation:
        """Devices for an instance on so many GPUs, on the first node that has them free.

        Raises:
            InputError: no node has as many GPUs.
        """
        if tp > self._gpus_per_node:
            raise InputError(
                f"an instance on {tp} GPUs does not fit into a node with {self._gpus_per_node}"
            )
        node = self._first_node_with(tp)
        first_device = self._num_used[node]
        self._num_used[node] += tp
        return _Allocation(node, list(range(first_device, first_device + tp)))

    def _first_node_with(self, num_free: int) -> int:
        for node, num_used in enumerate(self._num_used):
            if num_used + num_free <= self._gpus_per_node:
                return node
        self._num_used.append(0)
        return self.count - 1


def _supported_clock(planned_mhz: int, clocks: StageClocks) -> int:
    """The lowest clock of the GPU that is not below the plan's, MHz.

    Raises:
        InputError: all are below.
    """
    supported_mhz = clocks.supported_clocks_mhz
    for clock_mhz in supported_mhz:
        if clock_mhz >= planned_mhz:
            return clock_mhz
    highest_mhz = supported_mhz[-1]
    if highest_mhz >= planned_mhz * (1 - _NOMINAL_ROUNDING):
        return highest_mhz
    raise InputError(
        f"the plan wants {planned_mhz} MHz, but {clocks.gpu or 'the GPU'} reaches {highest_mhz} "
        "only; plan with a profile of that GPU"
    )


class _SloProofs:
    """Whether a profile shows that the instances of a plan keep their SLOs at other clocks.

    Above the plan's clock they do. Below it they do if they do at the next measured clock below: in
    a replay of the group, or by load curves where the plan was not replayed itself.
    """

    def __init__(self, plan: ServingPlan, profile: ServingProfile) -> None:
        self._plan = plan
        self._profile = profile.with_slos(plan.request.slos)
        self._replayed_attainment = cache(self._replay_attainment)

    def slo_is_proven(self, pool: Pool, group: Group, clock_mhz: int) -> bool:
        """Whether the instances of a group keep the pool's SLO at a clock."""
        if clock_mhz >= group.frequency_mhz:
            return True
        slower_curves = [
            curve
            for curve in self._profile.curves_of(pool.request_class, group.tp)
            if curve.frequency_mhz <= clock_mhz
        ]
        if not slower_curves:
            return False
        next_below = slower_curves[-1]  # curves come by clock
        quantile_percent = self._plan.request.slo_quantile_percent
        if quantile_percent is None:
            return next_below.meets(pool.slo, group.load_tokens_s)
        place = self._place_of(group)
        attainment = self._replayed_attainment(place, next_below.frequency_mhz)
        return attainment >= quantile_percent / 100

    def _place_of(self, group: Group) -> tuple[int, int]:
        """Numbers of a group's pool, and of the group in it."""
        for pool_number, pool in enumerate(self._plan.pools):
            for group_number, candidate in enumerate(pool.groups):
                if candidate is group:
                    return pool_number, group_number
        raise AssertionError("the group is one of the plan's")

    def _replay_attainment(self, place: tuple[int, int], clock_mhz: int) -> float:
        """Share of the requests of a group that meet their SLOs at another clock, at least."""
        pool_number, group_number = place
        group = self._plan.pools[pool_number].groups[group_number]
        slower = Configuration(group.tp, clock_mhz)
        loads = self._plan.group_loads(self._profile)[pool_number]
        if group.role == DECODE:
            load = replace(loads[0], decode=Instances(slower, group.instances))
        else:
            load = replace(loads[group_number], configuration=slower)
        return replay_group(self._profile, load).attainment
