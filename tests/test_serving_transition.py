"""Transitions between fleets: nothing that serves leaves before its substitute is there."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from envplan.serving.classes import CLASSES
from envplan.serving.fleet import Fleet, PoolSpec
from envplan.serving.fleet_controller import FleetController
from envplan.serving.observed_trace import ObservedTrace
from envplan.serving.profile import ServingProfile
from envplan.serving.settings import Settings
from envplan.serving.trace import Trace
from envplan.serving.transition import (
    InstanceStart,
    SurplusInstance,
    Transition,
    plan_transition,
)

SETTINGS = Settings()
NOW_S = 600.0
TPS = st.lists(st.sampled_from([1, 2, 4, 8]), max_size=12)


def transition(missing_tps: list[int], surplus_tps: list[int], num_free_gpus: int) -> Transition:
    """From running instances on so many GPUs each to others."""
    missing = [InstanceStart(0, 0, 0, dynamic_clock=False, gpus=tp) for tp in missing_tps]
    surplus = [SurplusInstance(number, tp) for number, tp in enumerate(surplus_tps)]
    return plan_transition(
        missing, surplus, num_free_gpus=num_free_gpus, now_s=NOW_S, settings=SETTINGS
    )


def test_surplus_instances_leave_at_once_if_nothing_is_missing() -> None:
    change = transition([], [4, 4], 0)
    assert change.fresh_starts == []
    assert [(step.time_s, step.retire, step.start) for step in change.steps] == [
        (NOW_S, [0, 1], [])
    ]


def test_missing_instances_start_on_free_gpus_if_nothing_is_left_over() -> None:
    change = transition([8, 8], [], 64)
    assert [start.gpus for start in change.fresh_starts] == [8, 8]
    assert change.copies_moved == 0


def test_a_batch_is_started_beforehand_and_the_others_follow_when_it_serves() -> None:
    # 16 instances on TP8 become 32 on TP4: an eighth of their GPUs at a time.
    change = transition([4] * 32, [8] * 16, 1024)
    assert sum(start.gpus for start in change.fresh_starts) == 16
    batches = [step for step in change.steps if step.start]
    assert [sum(start.gpus for start in step.start) for step in batches] == [16] * 7
    assert batches[0].time_s == NOW_S + SETTINGS.startup_s
    assert batches[1].time_s - batches[0].time_s == SETTINGS.reshard_s
    assert change.copies_moved == 14.0  # each half of a TP8 instance gets the other half


def test_without_free_gpus_a_batch_leaves_without_a_substitute() -> None:
    change = transition([4, 4], [8], 0)
    assert change.fresh_starts == []
    assert (change.steps[0].time_s, change.steps[0].retire) == (NOW_S, [0])
    assert [start.gpus for start in change.steps[0].start] == [4, 4]


def test_instances_too_small_for_a_missing_one_serve_on() -> None:
    change = transition([8], [2, 2], 0)
    assert change.fresh_starts == []
    assert [(step.retire, step.start) for step in change.steps] == [([], [])]


def test_instances_that_make_room_only_with_free_gpus_leave_and_the_rest_is_tried_again() -> None:
    change = transition([8], [2, 2], 4)
    assert change.fresh_starts == []
    assert [(step.retire, step.start) for step in change.steps] == [([0, 1], []), ([], [])]
    assert change.num_unstarted == 1


def test_a_fleet_becomes_what_is_wanted_once_its_gpus_are_free() -> None:
    """Two instances on two GPUs each and four free ones become one on eight."""
    profile, hour = ServingProfile.builtin(), Trace.open("azure-2023-conversation")
    observed = ObservedTrace(hour, profile, hour.class_index)
    controller = FleetController(observed, replace(SETTINGS, max_gpus=8))
    for tp, count in ((2, 2), (8, 1)):
        pool = PoolSpec("LL", frozenset(CLASSES), tp, observed.max_clock_mhz(tp), count)
        controller.reconcile(Fleet({"pool": pool}), 0.0, prewarmed=tp == 2)
    controller.advance(300.0)
    assert controller.lacks_instances
    assert controller.gpus_in_use() == 0
    controller.reconcile(Fleet({"pool": pool}), 300.0)
    assert not controller.lacks_instances
    assert controller.gpus_in_use() == 8


@given(TPS, TPS, st.integers(0, 64))
def test_gpus_are_never_used_twice(missing: list[int], surplus: list[int], free: int) -> None:
    change = transition(missing, surplus, free)
    fresh = sum(start.gpus for start in change.fresh_starts)
    assert fresh <= free
    retired: list[int] = []
    for step in change.steps:
        leaving = sum(surplus[number] for number in step.retire)
        assert sum(start.gpus for start in step.start) <= leaving
        retired += step.retire
    assert len(set(retired)) == len(retired)
    times_s = [step.time_s for step in change.steps]
    assert times_s == sorted(times_s)
    started = len(change.fresh_starts) + sum(len(step.start) for step in change.steps)
    assert started + change.num_unstarted == len(missing)
