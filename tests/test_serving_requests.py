"""An hour request by request: as a slow oracle and the textbooks have it, and near the flows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import pytest
from envplan.serving.requests import Excerpt, _Replay, replay_requests
from hypothesis import given, settings
from hypothesis import strategies as st

from envplan.errors import InputError
from envplan.serving.classes import CLASSES, Slo
from envplan.serving.policies import Settings, simulate
from envplan.serving.profile import ServingProfile
from envplan.serving.simulation import FleetSpec, Offered, PoolSpec, Simulator
from envplan.serving.trace import Trace
from serving_helpers import QUICK, SLO, Scripted, fleet, offered_of, row


def profile_of(ttft: Sequence[float], watts: Sequence[float], **more: float) -> ServingProfile:
    """SS and SM on one GPU, carrying up to 100 tokens/s at 1000 MHz; `more` at 2000 MHz.

    A request has one token of input and one of output, so it stays for its TTFT.
    """
    rows = [
        row(name, 1, clock, load * scale, power_w=power * scale, ttft_s=first)
        for name in ("SS", "SM")
        for clock, scale in ((1000, 1.0), *((2000, more["faster"]) for _ in more))
        for load, power, first in zip((0.0, 100.0), watts, ttft, strict=True)
    ]
    one = {"input_tokens": 1, "output_tokens": 1, "ttft_slo_s": 1.0, "tbt_slo_s": 1.0}
    return ServingProfile.from_rows(rows, sidecar={"classes": dict.fromkeys(CLASSES, one)})


def replay(
    profile: ServingProfile, offered: Offered, *fleets: FleetSpec, epoch_slots: int = 99
) -> Excerpt:
    policy = Scripted(*fleets)
    simulator = Simulator(
        profile, offered, policy, gpus=64, epoch_slots=epoch_slots, overheads=QUICK
    )
    return replay_requests(simulator.run(), profile, begin_s=0.0, duration_s=1e9)


def places_of(n: int, ttft: Sequence[float]) -> float:
    """The load at which n requests of two tokens are there: 2 n = x (a + b x)."""
    a, b = ttft[0], (ttft[1] - ttft[0]) / 100
    return 2 * n / a if b == 0 else (math.sqrt(a * a + 8 * b * n) - a) / (2 * b)


def oracle(
    times: Sequence[float],
    end: float,
    instances: int,
    ttft: Sequence[float],
    watts: Sequence[float],
) -> tuple[int, float]:
    """Requests in time and joules, going from event to event and over everybody each time."""
    places = math.floor(100 * ttft[1] / 2 + 1e-9)
    load = [0.0, *(places_of(n, ttft) for n in range(1, places + 1))]
    first = [ttft[0] + (ttft[1] - ttft[0]) * x / 100 for x in load]
    power = [watts[0] + (watts[1] - watts[0]) * x / 100 for x in load]
    stay = [1.0, *(2 * n / load[n] for n in range(1, places + 1))]
    inside: list[list[float]] = [[] for _ in range(instances)]
    waiting: list[float] = []
    late: list[float] = []
    coming, now, joules, attained = [*times], 0.0, 0.0, 0
    while True:
        leaving = [now + min(left) * stay[len(left)] for left in inside if left]
        then = min([end, *leaving, *coming[:1]])
        for k, left in enumerate(inside):
            joules += (then - now) * power[len(left)]
            rest = [share - (then - now) / stay[len(left)] for share in left]
            inside[k] = [share for share in rest if share > 1e-9]
        now = then
        if now == end:
            return attained, joules
        if coming and coming[0] == now:
            waiting.append(coming.pop(0))
        late += [at for at in waiting if at + 1.0 - first[-1] < now]
        waiting = [at for at in waiting if at + 1.0 - first[-1] >= now]
        for line in (waiting, late):
            while line and min(len(left) for left in inside) < places:
                at, emptiest = line.pop(0), min(inside, key=len)
                emptiest.append(1.0)
                attained += now - at + first[len(emptiest)] <= 1.0


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 3),
    st.floats(0.05, 0.5),
    st.floats(0.0, 0.45),
    st.floats(0.2, 1.3),
    st.integers(0, 9),
)
def test_every_request_fares_as_in_a_slow_oracle(
    instances: int, first: float, more: float, utilization: float, seed: int
) -> None:
    ttft, watts = (first, first + more), (50.0, 450.0)
    profile = profile_of(ttft, watts)
    offered = offered_of(profile, 5.0, SS=[100.0 * instances * utilization] * 2)
    policy = Scripted(fleet(("SS", {(1, 1000): instances})))
    simulation = Simulator(profile, offered, policy, gpus=64, epoch_slots=99, overheads=QUICK).run()
    found = replay_requests(simulation, profile, begin_s=0.0, seed=seed)
    times = [r.at for r in _Replay(simulation, profile, 0.0, 10.0, seed)._arrivals()]
    attained, joules = oracle(times, 10.0, instances, ttft, watts)
    assert found.requests == len(times)
    assert found.attained == pytest.approx(attained, abs=1)
    assert found.energy_j == pytest.approx(joules, rel=1e-3)


def test_a_single_place_is_the_queue_of_the_textbooks() -> None:
    # M/D/1: a request stays for 30 ms, 20 come in a second, so 60% find the place taken.
    profile = profile_of((0.03, 0.03), (50.0, 450.0))
    offered = offered_of(profile, 600.0, SS=[40.0] * 6)
    found = replay(profile, offered, fleet(("SS", {(1, 1000): 1})))
    assert found.requests == pytest.approx(72_000, abs=1)
    assert found.waited / found.requests == pytest.approx(0.6, abs=0.01)
    # Power is straight in load, so by Little's law it is on average that of the average load.
    assert found.energy_j == pytest.approx(found.flow_energy_j, rel=0.01)
    assert found.attainment == found.flow_attainment == 1.0


def test_a_clock_is_raised_for_as_long_as_an_instance_is_full() -> None:
    profile = profile_of((0.2, 0.2), (50.0, 450.0), faster=2.0)
    offered = offered_of(profile, 600.0, SS=[70.0])
    fixed = replay(profile, offered, fleet(("SS", {(1, 1000): 1})))
    assert fixed.raised > 0
    slow = profile_of((0.2, 0.2), (50.0, 450.0))
    alone = replay(slow, offered, fleet(("SS", {(1, 1000): 1})))
    assert alone.raised == 0
    assert alone.waited > 10 * fixed.waited
    assert fixed.energy_j < 600 * 2 * 450


def test_what_finds_no_place_goes_to_a_higher_pool_and_only_then_waits() -> None:
    profile = profile_of((0.2, 0.2), (50.0, 450.0))
    offered = offered_of(profile, 300.0, SS=[140.0], SM=[10.0])
    both = fleet(("SS", {(1, 1000): 1}), ("SM", {(1, 1000): 2}))
    helped = replay(profile, offered, both)
    assert helped.spilled > 0.25 * helped.requests
    assert helped.attainment > 0.99
    alone = fleet(("SS", {(1, 1000): 1}), ("SM", {(1, 1000): 1}))
    lower = replay(profile, offered_of(profile, 300.0, SS=[10.0], SM=[140.0]), alone)
    assert lower.spilled == 0
    assert lower.attainment < 0.9


def test_the_nearest_deadline_goes_first_and_the_late_last() -> None:
    profile = profile_of((0.2, 0.2), (50.0, 450.0))
    patient = dataclasses.replace(profile.classes["SM"], slo=Slo(60.0, 1.0))
    profile = dataclasses.replace(profile, classes={**profile.classes, "SM": patient})
    pools = {("SM", SLO): PoolSpec("SM", SLO, {(1, 1000): 1})}
    spec = FleetSpec(pools, dict.fromkeys(("SS", "SM"), ((("SM", SLO), 1.0),)))
    # 80 + 80 tokens/s at 100: SS alone is too much for no place, so SM waits, within its minute.
    offered = offered_of(profile, 30.0, SS=[60.0, 0.0], SM=[90.0, 0.0])
    found = replay(profile, offered, spec)
    assert found.waited > 0.3 * found.requests
    assert found.attainment > 0.97


def test_instances_start_draw_meanwhile_and_finish_what_they_have() -> None:
    profile = profile_of((0.2, 0.2), (50.0, 450.0))
    offered = offered_of(profile, 120.0, SS=[40.0, 40.0, 40.0, 40.0])
    one, two = fleet(("SS", {(1, 1000): 1})), fleet(("SS", {(1, 1000): 2}))
    found = replay(profile, offered, one, two, one, epoch_slots=1)
    still = replay(profile, offered, one)
    # The second starts for 90 s and runs for 30 s at least, and draws 50 W all that time.
    assert found.energy_j - still.energy_j == pytest.approx(120 * 50, rel=0.15)
    assert found.energy_j == pytest.approx(found.flow_energy_j, rel=0.02)
    assert found.attainment == 1.0


def test_a_longer_output_than_predicted_is_served_in_both_pools() -> None:
    profile = profile_of((0.2, 0.2), (50.0, 450.0))
    usual = offered_of(profile, 600.0, SS=[50.0], SM=[0.0])
    wrong, moved = np.zeros_like(usual.tokens), np.zeros_like(usual.tokens)
    place = CLASSES.index("SM")
    wrong[0, place], moved[0, place] = 3000, 3000 * 4.0  # of 15,000, each twice as long
    both = fleet(("SS", {(1, 1000): 1}), ("SM", {(1, 1000): 1}))
    found = replay(profile, usual._replace(wrong=wrong, moved=moved), both)
    assert found.requests == pytest.approx(15_000, abs=1)
    # Each of those that move is 4 tokens there: 20 tokens/s, at 4 W each, beside what there was.
    assert found.energy_j == pytest.approx(600 * (50 + 200 + 50 + 80), rel=0.02)
    assert found.energy_j == pytest.approx(found.flow_energy_j, rel=0.02)


def short_week(hours: int) -> Trace:
    trace = Trace.open("coding-week")
    slots = hours * 12
    return Trace("short", trace.step_s, trace.requests[:slots], trace.lengths[:slots])


@pytest.mark.parametrize(("policy", "most"), [("max_frequency", 0.003), ("hierarchical", 0.03)])
def test_the_flows_come_near_single_requests(policy: str, most: float) -> None:
    profile = ServingProfile.builtin()
    simulation = simulate(profile, short_week(9), policy)
    found = replay_requests(simulation, profile, begin_s=7 * 3600.0)
    arrived = simulation.series.requests[84:96].sum()
    assert found.requests == pytest.approx(arrived, abs=12 * 9)
    assert found.energy_j == pytest.approx(found.flow_energy_j, rel=most)
    assert found.attainment > 0.97
    part = simulation.series.power_w[84:96].sum() * 300
    assert found.flow_energy_j == pytest.approx(part)


def test_a_seed_decides_what_happens() -> None:
    profile = ServingProfile.builtin()
    simulation = simulate(profile, short_week(2), "hierarchical", Settings(seed=3))
    first, again, other = (
        replay_requests(simulation, profile, begin_s=3600.0, duration_s=900.0, seed=seed)
        for seed in (1, 1, 2)
    )
    assert first == again
    assert first.energy_j != other.energy_j
    assert (first.begin_s, first.duration_s) == (3600.0, 900.0)


def test_beyond_the_trace_there_is_nothing() -> None:
    profile = ServingProfile.builtin()
    simulation = simulate(profile, short_week(1), "max_frequency")
    last = replay_requests(simulation, profile, begin_s=3400.0)
    assert (last.begin_s, last.duration_s) == (3300.0, 300.0)
    for begin in (3600.0, -1.0):
        with pytest.raises(InputError, match="it lasts 3600 s"):
            replay_requests(simulation, profile, begin_s=begin)
