"""Serving plans on GPUs: places, clocks and guards, and the fewest weights moved."""

from __future__ import annotations

import json
from functools import reduce
from itertools import permutations
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envplan.devices import DeviceError
from envplan.enforce.supported_clocks import parse_clocks
from envplan.errors import InputError
from envplan.serving.apply import (
    Instance,
    ServingApplied,
    apply_serving_plan,
)
from envplan.serving.exact_planner import exact_plan
from envplan.serving.hold import hold_clocks
from envplan.serving.move_fleet import move_fleet
from envplan.serving.plan import ServingPlan
from envplan.serving.profile import ServingProfile
from envplan.serving.transfers import PARTS, transfer_plan
from fake_nvml import FakeNvml
from serving_helpers import queueing_profile, small_serving_profile
from test_guard import wait_for

CURVES = {
    ("SS", 4, 1005): [(0, 1.0), (10, 10.0)],
    ("SM", 2, 900): [(0, 1.0), (10, 8.0)],
    ("LL", 1, 600): [(0, 1.0), (10, 4.0)],
}


def small_plan(**loads: float) -> tuple[ServingPlan, ServingProfile]:
    profile = small_serving_profile(CURVES)
    return exact_plan(profile, loads, 512, merge=False), profile


@settings(max_examples=20, deadline=None)
@given(st.floats(1, 900), st.floats(1, 900), st.floats(1, 900), st.sampled_from([4, 8]))
def test_no_two_instances_share_a_gpu_and_no_node_has_a_hole(
    ss: float, sm: float, ll: float, per_node: int
) -> None:
    plan, profile = small_plan(SS=ss, SM=sm, LL=ll)
    applied = apply_serving_plan(plan, profile, gpus_per_node=per_node)
    places = [(i.node, device) for i in applied.instances for device in i.devices]
    assert len(set(places)) == len(places) == plan.gpus
    assert all(len(i.devices) == i.tp for i in applied.instances)
    assert all(device < per_node for _, device in places)
    assert applied.nodes == -(-plan.gpus // per_node)


def test_a_clock_the_gpu_lacks_becomes_the_next_one_above() -> None:
    plan, profile = small_plan(SS=10.0, SM=10.0)
    applied = apply_serving_plan(plan, profile, clocks=parse_clocks("210-1980:30", "some GPU"))
    assert {i.planned_mhz: i.clock_mhz for i in applied.instances} == {1005: 1020, 900: 900}
    just_below = apply_serving_plan(plan, profile, clocks=parse_clocks("900,990"))
    assert {i.clock_mhz for i in just_below.instances} == {990, 900}
    with pytest.raises(InputError, match="wants 1005 MHz, but the GPU reaches 900"):
        apply_serving_plan(plan, profile, clocks=parse_clocks("210-900:30"))
    builtin = ServingProfile.builtin()
    applied = apply_serving_plan(exact_plan(builtin, {"LL": 3000.0}, 64), builtin)
    assert applied.gpu == "NVIDIA H100 80GB HBM3"
    assert all(i.clock_mhz == i.planned_mhz for i in applied.instances)  # it has all of them


def test_a_clock_below_the_plans_is_held_against_the_slo_again() -> None:
    # At 2000 MHz up to 100 tokens/s are within the SLO of 1 s, at 1500 MHz up to 50.
    profile = queueing_profile(
        {("LS", 2, 1500): [(0, 60), (10, 110)], ("LS", 2, 2000): [(0, 10), (10, 20)]},
        {("LS", 2, 1500): 0.4, ("LS", 2, 2000): 0.2},
    )
    clocks = parse_clocks("1500,1980,2100")
    for load, proven in ((50.0, True), (51.0, False)):
        plan = exact_plan(profile, {"LS": load}, 2)
        assert plan.pools[0].groups[0].frequency_mhz == 2000
        (raised,) = apply_serving_plan(plan, profile, clocks=clocks).instances
        assert (raised.clock_mhz, raised.slo_proven) == (2100, True)
        (lowered,) = apply_serving_plan(plan, profile, clocks=parse_clocks("1500,1980")).instances
        assert (lowered.clock_mhz, lowered.slo_proven) == (1980, proven)
    # Without a measured clock below, nothing is proven.
    plan, profile = small_plan(SM=10.0)
    (instance,) = apply_serving_plan(plan, profile, clocks=parse_clocks("890")).instances
    assert (instance.planned_mhz, instance.clock_mhz, instance.slo_proven) == (900, 890, False)


def test_a_file_in_which_instances_share_a_gpu_is_refused(tmp_path: Path) -> None:
    plan, profile = small_plan(SS=10.0, SM=10.0)
    path, applied = tmp_path / "c.json", apply_serving_plan(plan, profile)
    applied.save(path)
    assert ServingApplied.load(path) == applied
    document = json.loads(path.read_text())
    words = "instance 1 is to have 2 different GPUs, which no other"
    for devices, node, said in (
        ([3, 4], 0, words), ([4, 4], 0, words), ([4], 0, words), ([4, 5, 6], 0, words),
        ([7, 8], 0, words), ([0, 1], 1, words), (["x"], 0, "instances"),
    ):  # fmt: skip
        document["instances"][1] |= {"devices": devices, "node": node}
        path.write_text(json.dumps(document))
        with pytest.raises(InputError, match=said):
            ServingApplied.load(path)


POOL, GROUP = ("pools", 0), ("pools", 0, "groups", 0)


@pytest.mark.parametrize(
    ("where", "change", "words"),
    [
        (GROUP, {"load_tokens_s": 101.0}, "violate the SLO"),
        (GROUP, {"load_tokens_s": 5.0}, "draws another power"),
        (GROUP, {"frequency_mhz": 7}, "no such configuration"),
        ((*POOL, "serves", 0), {"load_tokens_s": 1.0}, "carry 10"),
        ((*POOL, "serves", 0), {"request_class": "LL"}, "cannot serve LL"),
        (("predicted",), {"power_w": 1.0}, "as stated"),
        (("predicted",), {"gpus": 3}, "4 GPUs"),
        (("asked", "loads_tokens_s"), {"SS": 20.0}, "not what was asked"),
        ((*POOL, "slo"), {"ttft_s": 9.0}, "does not promise"),
        (POOL, {"request_class": "ZZ"}, "no class 'ZZ'"),
        ((), {"extra": 1}, "extra"),
    ],
)
def test_a_plan_that_does_not_hold_is_refused(
    tmp_path: Path, where: tuple[str | int, ...], change: dict[str, object], words: str
) -> None:
    plan, profile = small_plan(SS=10.0)
    plan.save(tmp_path / "p.json")
    assert ServingPlan.load(tmp_path / "p.json") == plan
    document = json.loads((tmp_path / "p.json").read_text())
    part: Any = reduce(getitem, where, document)
    part.update(change)
    (tmp_path / "p.json").write_text(json.dumps(document))
    with pytest.raises(InputError, match=words):
        ServingPlan.load(tmp_path / "p.json").check(profile)


def test_a_changed_profile_is_refused_unless_forced() -> None:
    plan, _ = small_plan(SS=10.0)
    changed = small_serving_profile({**CURVES, ("LL", 1, 600): [(0, 1.0), (10, 5.0)]})
    with pytest.raises(InputError, match="another profile"):
        apply_serving_plan(plan, changed)
    assert apply_serving_plan(plan, changed, force=True).instances


def test_guards_hold_the_clocks_of_a_node_and_give_them_back(fake_nvml: FakeNvml) -> None:
    plan, profile = small_plan(SS=10.0, SM=10.0)
    applied = apply_serving_plan(plan, profile, gpus_per_node=4)
    assert applied.clocks_of(0) == dict.fromkeys(range(4), 1005)
    with hold_clocks(applied, 1) as guards:
        assert len(guards) == 2
        wait_for(lambda: [fake_nvml.locked(0), fake_nvml.locked(1)] == [900, 900])
        assert fake_nvml.locked(2) is None
    assert fake_nvml.locked(0) is None
    assert fake_nvml.locked(1) is None


def test_a_gpu_that_is_not_there_leaves_no_clock_set(fake_nvml: FakeNvml) -> None:
    plan, profile = small_plan(SS=600.0)
    applied = apply_serving_plan(plan, profile, gpus_per_node=64)
    with pytest.raises(DeviceError), hold_clocks(applied, 0):
        pass
    assert fake_nvml.locked(0) is None
    with pytest.raises(InputError, match="no node 7"), hold_clocks(applied, 7):
        pass


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
def test_every_gpu_gets_what_it_lacks_from_one_that_had_it_and_no_assignment_moves_less(
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
    if len(held) <= 6:
        assert len(plan.transfers) == min(
            sum(len(need - held[gpu]) for gpu, need in zip(order, shards(after), strict=True))
            for order in permutations(range(len(held)), sum(after))
        )


def test_the_longest_transfer_counts() -> None:
    for after, moved, longest in (((4, 4), 1.0, 1), ((2, 2, 2, 2), 3.0, 3), ((8,), 0.0, 0)):
        plan = transfer_plan((8,), after)
        assert (plan.copies_moved, plan.max_parts_of_gpu) == (moved, longest)


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
    moved = move_fleet(fleet([8], [4, 4], []), fleet([4, 4], [], [8]))
    assert [instance.node for instance in moved.applied.instances] == [1, 1, 0]
    copies = [change.plan.copies_moved if change.plan else None for change in moved.changes]
    assert copies == [0.0, 0.0, None]
    grown = move_fleet(fleet([4]), fleet([2, 2], [8]))
    assert [change.node for change in grown.changes] == [0, 1]
    halves = grown.applied.instances[:2]
    assert sorted(device for i in halves for device in i.devices) == [0, 1, 2, 3]
    with pytest.raises(InputError, match="nodes have 8 and 4 GPUs"):
        move_fleet(fleet([8]), fleet([4], gpus=4))
