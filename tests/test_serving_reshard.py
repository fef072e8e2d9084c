"""Plans of re-sharding: everybody ends up with the weights it needs, and the fewest are moved."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envplan.errors import InputError
from envplan.serving.apply import PARTS, Instance, ServingApplied, move_fleet, transfer_plan

FLEETS = st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=8).filter(
    lambda tps: sum(tps) <= 8
)


def shards(tps: list[int]) -> list[set[int]]:
    """The parts of each GPU, instance after instance."""
    return [
        set(range(rank * PARTS // tp, (rank + 1) * PARTS // tp)) for tp in tps for rank in range(tp)
    ]


@settings(max_examples=100, deadline=None)
@given(FLEETS, FLEETS)
def test_every_gpu_gets_what_it_lacks_from_one_that_had_it(
    before: list[int], after: list[int]
) -> None:
    idle = max(0, sum(after) - sum(before))
    plan = transfer_plan(tuple(before), tuple(after), idle)
    held = [*shards(before), *[set[int]() for _ in range(idle)]]
    has = [set(parts) for parts in held]
    for part, source, target in plan.transfers:
        assert part in held[source]
        assert part not in has[target]
        has[target].add(part)
    used = [gpu for instance in plan.gpus for gpu in instance]
    assert len(set(used)) == len(used) == sum(after)
    for gpu, wanted in zip(used, shards(after), strict=True):
        assert wanted <= has[gpu]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=5).filter(lambda t: sum(t) <= 5),
    st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=5).filter(lambda t: sum(t) <= 5),
)
def test_no_assignment_moves_less(before: list[int], after: list[int]) -> None:
    idle = max(0, sum(after) - sum(before))
    held = [*shards(before), *[set[int]() for _ in range(idle)]]
    least = min(
        sum(len(need - held[gpu]) for gpu, need in zip(order, shards(after), strict=True))
        for order in permutations(range(len(held)), sum(after))
    )
    assert len(transfer_plan(tuple(before), tuple(after), idle).transfers) == least


def test_the_longest_transfer_counts() -> None:
    for after, moved, longest in (((4, 4), 1.0, 1), ((2, 2, 2, 2), 3.0, 3), ((8,), 0.0, 0)):
        plan = transfer_plan((8,), after)
        assert (plan.moved, plan.longest) == (moved, longest)


def fleet(*nodes: list[int], gpus: int = 8) -> ServingApplied:
    instances = []
    for node, tps in enumerate(nodes):
        first = 0
        for tp in tps:
            instances.append(Instance(
                instance=len(instances), pool="LL", serves=["LL"], tp=tp, node=node,
                devices=list(range(first, first + tp)), planned_mhz=1980, clock_mhz=1980,
                load_tokens_s=1.0,
            ))  # fmt: skip
            first += tp
    return ServingApplied(schema="envplan/serving-clocks/v1", plan_sha256="0" * 64,
                          profile_sha256="0" * 64, gpu=None, clocks_source="profile",
                          gpus_per_node=gpus, nodes=len(nodes), instances=instances)  # fmt: skip


def test_a_fleet_stays_on_the_nodes_that_hold_its_weights() -> None:
    moved, changes = move_fleet(fleet([8], [4, 4], []), fleet([4, 4], [], [8]))
    assert [instance.node for instance in moved.instances] == [1, 1, 0]
    assert [change.plan.moved if change.plan else None for change in changes] == [0.0, 0.0, None]
    grown, changes = move_fleet(fleet([4]), fleet([2, 2], [8]))
    assert [change.node for change in changes] == [0, 1]
    assert sorted(device for i in grown.instances[:2] for device in i.devices) == [0, 1, 2, 3]
    with pytest.raises(InputError, match="nodes have 8 and 4 GPUs"):
        move_fleet(fleet([8]), fleet([4], gpus=4))
