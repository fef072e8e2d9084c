"""Fleets over time: energy adds up, changes take their time, emergencies go by the rules."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envplan.errors import InputError, NoAnswerError
from envplan.serving import policies
from envplan.serving.classes import CLASSES, Slo
from envplan.serving.exact import TIME_LIMIT_S, exact_plan
from envplan.serving.plan import Fleet
from envplan.serving.policies import POLICIES, Settings, compare_policies, simulate
from envplan.serving.profile import ServingProfile
from envplan.serving.simulation import (
    FleetSpec,
    Offered,
    Overheads,
    PoolSpec,
    Simulation,
    Simulator,
    offer,
    spec_of,
)
from envplan.serving.trace import Trace
from serving_helpers import QUICK, Scripted, fleet, offered_of, small_serving_profile


def profile_of_one() -> ServingProfile:
    """SS and SM on 1 or 2 GPUs at two clocks: 100 tokens/s at 1000 MHz, 150 at 2000, per GPU."""
    curves = {}
    for name in ("SS", "SM"):
        for tp in (1, 2):
            curves[name, tp, 1000] = [(0, 10.0 * tp), (10 * tp, 110.0 * tp)]
            curves[name, tp, 2000] = [(0, 20.0 * tp), (15 * tp, 320.0 * tp)]
    return small_serving_profile(curves)


def replay(
    offered: Offered, *fleets: FleetSpec, gpus: int = 64, epoch_slots: int = 1
) -> Simulation:
    return Simulator(
        profile_of_one(),
        offered,
        Scripted(*fleets),
        gpus=gpus,
        epoch_slots=epoch_slots,
        overheads=QUICK,
    ).run()


def test_energy_is_power_by_the_profile_times_time() -> None:
    offered = offered_of(profile_of_one(), 60.0, SS=[100.0, 50.0])
    result = replay(offered, fleet(("SS", {(1, 1000): 1})), epoch_slots=9)
    assert result.series.power_w.tolist() == pytest.approx([110.0, 60.0])
    assert result.energy_j == pytest.approx(60 * 170)
    assert result.attainment == 1.0
    assert result.requests == pytest.approx(offered.requests.sum())


def test_the_gpu_manager_follows_the_load_and_its_changes_are_counted() -> None:
    offered = offered_of(profile_of_one(), 60.0, SS=[50.0, 140.0, 50.0])
    result = replay(offered, fleet(("SS", {(1, None): 1})), epoch_slots=9)
    assert result.series.power_w.tolist() == pytest.approx([60.0, 300.0, 60.0])
    assert result.clock_changes == 2
    assert result.attainment == 1.0


def test_a_new_instance_draws_while_it_starts_and_serves_only_then() -> None:
    offered = offered_of(profile_of_one(), 120.0, SS=[100.0, 100.0, 100.0])
    small, large = fleet(("SS", {(1, 1000): 1})), fleet(("SS", {(1, 1000): 2}))
    result = replay(offered, small, large)
    # From 120 s on it starts for 90 s (new VM and engine), drawing 10 W; then both share the load.
    assert QUICK.start == 90
    second = (90 * (110 + 10) + 30 * 2 * 60) / 120
    assert result.series.power_w.tolist() == pytest.approx([110.0, second, 120.0])
    assert result.series.gpus.tolist() == [1, 2, 2]
    assert result.started == 1


def test_an_instance_is_given_back_at_once() -> None:
    offered = offered_of(profile_of_one(), 60.0, SS=[50.0, 50.0])
    result = replay(offered, fleet(("SS", {(1, 1000): 2})), fleet(("SS", {(1, 1000): 1})))
    assert result.series.power_w.tolist() == pytest.approx([70.0, 60.0])
    assert result.switches == 0


def test_an_instance_changes_pools_without_starting_anew() -> None:
    offered = offered_of(profile_of_one(), 60.0, SS=[50.0, 50.0], SM=[50.0, 50.0])
    before = fleet(("SS", {(1, 1000): 2}), ("SM", {(1, 1000): 1}))
    after = fleet(("SS", {(1, 1000): 1}), ("SM", {(1, 1000): 2}))
    assert replay(offered, before, after).switches == 0


def test_in_an_emergency_clocks_are_raised_first() -> None:
    offered = offered_of(profile_of_one(), 60.0, SS=[140.0])
    result = replay(offered, fleet(("SS", {(1, 1000): 1})))
    assert (result.raised, result.spilled) == (1, 0)
    assert result.attainment == 1.0
    assert result.energy_j == pytest.approx(60 * 300)


def test_then_requests_go_to_a_higher_pool_with_room() -> None:
    offered = offered_of(profile_of_one(), 60.0, SS=[200.0], SM=[50.0])
    result = replay(offered, fleet(("SS", {(1, 1000): 1}), ("SM", {(1, 1000): 1})))
    # 150 of 200 tokens/s stay; a request is two tokens.
    assert result.spilled == pytest.approx(60 * 50 / 2)
    assert result.attainment == 1.0


def test_what_finds_no_room_waits_and_misses_its_slo() -> None:
    offered = offered_of(profile_of_one(), 60.0, SS=[300.0, 0.0])
    result = replay(offered, fleet(("SS", {(1, None): 1})))
    # Served at 150 of 300 tokens/s: those that can still make it come first.
    assert 0.4 < result.attainment < 0.6
    assert result.energy_j == pytest.approx(2 * 60 * 320, rel=0.02)


def test_the_nearest_deadline_goes_first() -> None:
    names = {"SS": Slo(0.5, 1.0), "SM": Slo(30.0, 1.0)}
    profile = profile_of_one()
    classes = {
        name: dataclasses.replace(known, slo=names.get(name, known.slo))
        for name, known in profile.classes.items()
    }
    profile = dataclasses.replace(profile, classes=classes)
    slo = Slo.strictest(names.values())
    key = ("SM", slo)
    both = FleetSpec(
        {key: PoolSpec("SM", slo, {(1, None): 1})}, {"SS": ((key, 1.0),), "SM": ((key, 1.0),)}
    )
    offered = offered_of(profile, 20.0, SS=[100.0, 0.0], SM=[100.0, 0.0])
    result = Simulator(
        profile, offered, Scripted(both), gpus=8, epoch_slots=1, overheads=QUICK
    ).run()
    # 200 tokens/s come and 150 are served, yet all of both classes are in time: SS at once, and SM
    # within its 30 s.
    assert result.attainment == pytest.approx(1.0)


def test_without_room_beside_it_a_change_takes_the_place_of_what_runs() -> None:
    offered = offered_of(profile_of_one(), 120.0, SS=[150.0, 150.0, 150.0])
    result = replay(offered, fleet(("SS", {(1, None): 2})), fleet(("SS", {(2, None): 1})), gpus=2)
    assert result.series.gpus.max() == 2
    assert result.attainment < 1.0


def test_too_large_a_fleet_is_refused() -> None:
    offered = offered_of(profile_of_one(), 60.0, SS=[10.0])
    with pytest.raises(NoAnswerError, match="needs 4 GPUs, 2 more than the 2"):
        replay(offered, fleet(("SS", {(2, None): 2})), gpus=2)


def test_a_class_without_a_pool_goes_upward() -> None:
    offered = offered_of(profile_of_one(), 60.0, SS=[50.0])
    assert replay(offered, fleet(("SM", {(1, 1000): 1}))).attainment == 1.0


def with_ttft_slos(profile: ServingProfile, **seconds: float) -> ServingProfile:
    classes = {
        name: dataclasses.replace(known, slo=Slo(seconds.get(name, known.slo.ttft_s), 1.0))
        for name, known in profile.classes.items()
    }
    return dataclasses.replace(profile, classes=classes)


def test_a_class_that_only_a_slower_pool_could_take_misses_its_slo_there() -> None:
    profile = with_ttft_slos(profile_of_one(), SS=0.5)
    offered = offered_of(profile, 60.0, SS=[30.0], SM=[50.0])
    slow, quick = Slo(1.0, 1.0), Slo(0.5, 1.0)
    both = {("SM", slo): PoolSpec("SM", slo, {(1, 1000): 1}) for slo in (slow, quick)}
    for pools, met in ((both, 1.0), ({("SM", slow): both["SM", slow]}, 50 / 80)):
        spec = FleetSpec(pools, {"SM": ((("SM", slow), 1.0),)})
        run = Simulator(profile, offered, Scripted(spec), gpus=8, epoch_slots=1, overheads=QUICK)
        assert run.run().attainment == pytest.approx(met)


def test_a_queue_whose_pool_goes_is_served_on_but_in_time_only_by_a_pool_that_can() -> None:
    # 20 s of 200 tokens/s at 150: from 15 s on, others must serve what waits.
    profile = with_ttft_slos(profile_of_one(), SS=40.0, SM=50.0)
    slow, quick = Slo(50.0, 1.0), Slo(40.0, 1.0)
    offered = offered_of(profile, 20.0, SS=[200.0, 0.0, 0.0])
    first = FleetSpec(
        {("SS", quick): PoolSpec("SS", quick, {(1, None): 1})}, {"SS": ((("SS", quick), 1.0),)}
    )

    def after(name: str, slo: Slo) -> float:
        later = FleetSpec({(name, slo): PoolSpec(name, slo, {(1, None): 1})}, {})
        policy = Scripted(first, later)
        run = Simulator(profile, offered, policy, gpus=8, epoch_slots=1, overheads=QUICK).run()
        # The queue is worked off at full power; what follows is idle, at the lower clock.
        busy = 20 + 1000 / 150
        assert run.energy_j == pytest.approx(busy * 320 + (60 - busy) * 10)
        return run.attainment

    assert after("SM", quick) == pytest.approx(1.0)
    assert after("SM", slow) == pytest.approx(0.75, abs=0.02)


def test_waiting_counts_beside_the_time_that_the_first_token_takes_itself() -> None:
    def attainment(ttft_s: float) -> float:
        profile = with_ttft_slos(profile_of_one(), SS=10.0)
        curves = {
            key: dataclasses.replace(curve, ttft_s=(ttft_s, ttft_s))
            for key, curve in profile.curves.items()
        }
        profile = dataclasses.replace(profile, curves=curves)
        slo = Slo(10.0, 1.0)
        spec = FleetSpec(
            {("SS", slo): PoolSpec("SS", slo, {(1, None): 1})}, {"SS": ((("SS", slo), 1.0),)}
        )
        offered = offered_of(profile, 10.0, SS=[300.0, 0.0, 0.0])
        run = Simulator(profile, offered, Scripted(spec), gpus=8, epoch_slots=1, overheads=QUICK)
        return run.run().attainment

    # 10 s of 300 tokens/s at 150: the last would wait 10 s. Half of them wait for 5 s at most.
    assert attainment(0.1) > 0.9
    assert 0.6 < attainment(5.0) < 0.85
    assert attainment(9.9) < attainment(5.0)


#: Tokens/s: any, but for what is as good as nothing and whose shares are lost in rounding.
RATES = st.just(0.0) | st.floats(1e-6, 500)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(RATES, min_size=2, max_size=6),
    st.lists(RATES, min_size=2, max_size=6),
    st.integers(1, 3),
)
def test_nothing_is_served_twice(ss: list[float], sm: list[float], count: int) -> None:
    slots = min(len(ss), len(sm))
    offered = offered_of(profile_of_one(), 30.0, SS=ss[:slots], SM=sm[:slots])
    pools = fleet(("SS", {(1, 1000): count}), ("SM", {(2, None): 1}))
    result = replay(offered, pools)
    assert result.series.attained.sum() <= offered.requests.sum() * (1 + 1e-9)
    most = count * 320 + 640
    assert result.series.power_w.max() <= most * (1 + 1e-9)
    room = max(x + y for x, y in zip(ss, sm, strict=False))
    if room <= 100:
        assert result.attainment == pytest.approx(1.0)


def test_mispredicted_requests_run_in_both_pools() -> None:
    profile = ServingProfile.builtin()
    requests, ml = np.zeros((50, 9)), CLASSES.index("ML")
    requests[:, ml] = 1000
    tokens = requests * profile.classes["ML"].tokens
    right = offer(requests, tokens, 60.0, profile, mispredicted=0.0, seed=1)
    wrong = offer(requests, tokens, 60.0, profile, mispredicted=0.1, seed=1)
    again = offer(requests, tokens, 60.0, profile, mispredicted=0.1, seed=1)
    assert right.moves == 0
    assert wrong.moves == again.moves == pytest.approx(5000, rel=0.1)
    assert wrong.requests.sum() == pytest.approx(requests.sum())
    mm = CLASSES.index("MM")
    assert wrong.tokens[:, mm].sum() == pytest.approx(wrong.moves * profile.classes["MM"].tokens)
    # What was predicted right and what moved make up all of ML's tokens again.
    assert (wrong.tokens + wrong.moved)[:, ml].sum() == pytest.approx(tokens.sum())


def short_trace(days: float = 2.0) -> Trace:
    trace = Trace.open("conversation-week")
    slots = round(days * 288)
    return Trace("short", trace.step_s, trace.requests[:slots], trace.lengths[:slots])


def test_policies_save_energy_and_keep_slos_and_can_be_repeated() -> None:
    profile = ServingProfile.builtin()
    results = {r.policy: r for r in compare_policies(profile, short_trace())}
    assert list(results) == list(POLICIES)
    worst = results["max_frequency"].energy_j
    for name, result in results.items():
        assert result.attainment > 0.995
        assert name == "max_frequency" or result.energy_j < worst
    assert results["frequency_only"].series.gpus.tolist() == (
        results["max_frequency"].series.gpus.tolist()
    )
    assert results["static"].switches == results["max_frequency"].switches == 0
    assert results["hierarchical"].energy_j < results["static"].energy_j
    assert results["exact"].energy_j < results["static"].energy_j
    again = simulate(profile, short_trace(), "hierarchical")
    assert again.energy_j == results["hierarchical"].energy_j
    other = simulate(profile, short_trace(), "hierarchical", Settings(seed=1))
    assert other.energy_j != again.energy_j


def test_changes_that_cost_more_than_they_save_are_not_made() -> None:
    profile = ServingProfile.builtin()
    cheap = simulate(profile, short_trace(), "hierarchical")
    long = Overheads(new_vm=1500.0)
    dear = simulate(profile, short_trace(), "hierarchical", Settings(overheads=long))
    assert dear.switches < cheap.switches


def test_merging_at_every_epoch_saves_at_night() -> None:
    profile, night = ServingProfile.builtin(), short_trace(0.05)
    apart = simulate(profile, night, "exact")
    merged = simulate(profile, night, "exact", Settings(merge=True))
    assert merged.energy_j < apart.energy_j
    assert merged.attainment > 0.99


def test_every_policy_that_merges_serves_a_class_without_configurations_of_its_own() -> None:
    profile = small_serving_profile({("SM", 1, 1000): [(0, 10), (10, 20)]})
    offered = offered_of(profile, 300.0, SS=[50.0] * 4)
    trace = Trace("short", 300.0, offered.requests, offered.tokens)
    for policy in ("static", "exact", "hierarchical"):
        assert simulate(profile, trace, policy, Settings(mispredicted=0.0)).attainment == 1.0
    with pytest.raises(NoAnswerError, match="max_frequency: class SS has no configuration"):
        simulate(profile, trace, "max_frequency")


def test_the_overheads_are_the_published_ones() -> None:
    known = Overheads()
    assert 60 <= known.new_vm <= 120
    assert (known.distributed_setup, known.download) == (120, 180)
    assert (known.engine_setup, known.install) == (18, 15)
    assert known.start == known.new_vm + 120 + 180 + 18 + 15
    assert 6 * 60 <= known.start <= 8 * 60
    assert known.reshard == 33


@settings(max_examples=60, deadline=None)
@given(st.floats(1, 1500), st.floats(0, 300), st.floats(10, 90), st.integers(1, 40))
def test_a_change_is_made_only_if_it_saves_more_energy_than_it_costs(
    start: float, idle: float, load: float, minutes: int
) -> None:
    # One instance on TP2 draws 600 W, whatever it carries; one on TP1 between `idle` and 500 W.
    profile = small_serving_profile(
        {("SS", 2, 1000): [(0, 600.0), (10, 600.0)], ("SS", 1, 1000): [(0, idle), (10, 500.0)]}
    )
    rates = offered_of(profile, 60.0, SS=[load] * (minutes + 1))
    chosen = Settings(epoch_s=60.0 * minutes, overheads=dataclasses.replace(QUICK, new_vm=start))
    room = policies._Room(profile, rates, chosen, minutes)
    now, wanted = fleet(("SS", {(2, 1000): 1})), fleet(("SS", {(1, 1000): 1}))
    change, epoch = start + 30, 60.0 * minutes
    after = idle + (500 - idle) * load / 100
    cost = change * (600 + idle) + max(0.0, epoch - change) * after
    if abs(600 * epoch - cost) > 1e-6 * cost:
        taken = room.worth(now, wanted, rates.rates)
        assert (taken is wanted) == (600 * epoch > cost)
    # What could not carry the load is changed whatever that costs.
    small = fleet(("SS", {(1, 1000): 1}))
    heavy = offered_of(profile, 60.0, SS=[2 * load + 100.0] * (minutes + 1)).rates
    assert room.worth(small, now, heavy) is now


def test_the_instance_manager_reshards_between_epochs() -> None:
    # Four GPUs serve cheaply when busy, one when idle; the load falls within an epoch.
    profile = small_serving_profile(
        {("SS", 4, 1000): [(0, 400.0), (40, 500.0)], ("SS", 1, 1000): [(0, 5.0), (8, 220.0)]}
    )
    offered = offered_of(profile, 300.0, SS=[760.0] * 3 + [60.0] * 9)
    trace = Trace("falling", 300.0, offered.requests, offered.tokens)
    chosen = Settings(gpus=16, epoch_s=6000.0, headroom=0.0, mispredicted=0.0)
    result = simulate(profile, trace, "hierarchical", chosen)
    assert result.started == 0
    assert result.resharded == 1
    assert result.series.gpus[0] == 8
    assert result.series.gpus[-1] == 1
    assert result.series.power_w[-1] == pytest.approx(5 + 215 * 6 / 8)
    assert result.attainment == 1.0


def test_the_static_plan_is_the_same_on_a_slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    usual, limits = policies.exact_fleet, []

    def watched(*arguments: Any, time_limit: float = TIME_LIMIT_S, **options: Any) -> Fleet:
        limits.append(time_limit)
        return usual(*arguments, time_limit=time_limit, **options)

    monkeypatch.setattr(policies, "exact_fleet", watched)
    simulate(ServingProfile.builtin(), short_trace(0.05), "static")
    # A week's peak takes seconds: within a plan's usual limit, a slow machine would find another.
    assert limits == [10 * TIME_LIMIT_S]


def test_unknown_policies_and_empty_traces_are_refused() -> None:
    profile = ServingProfile.builtin()
    with pytest.raises(InputError, match="no policy 'best'; there are: max_frequency"):
        simulate(profile, short_trace(0.1), "best")
    empty = Trace("empty", 60.0, np.zeros((3, 9)), np.zeros((3, 9)))
    with pytest.raises(InputError, match="no requests"):
        simulate(profile, empty)
    with pytest.raises(InputError, match="at least one GPU"):
        simulate(profile, short_trace(0.1), settings=Settings(gpus=0))
    with pytest.raises(NoAnswerError, match="GPUs"):
        simulate(profile, short_trace(0.1), settings=Settings(gpus=8))


def test_a_planned_fleet_becomes_pools_and_routes() -> None:
    plan = exact_plan(ServingProfile.builtin(), {"SS": 5.0, "SM": 9000.0}, 64)
    spec = spec_of(Fleet(plan.planner, tuple(plan.pools)), managed=False)
    assert spec.gpus == plan.gpus
    for shares in spec.routes.values():
        assert sum(share for _, share in shares) == pytest.approx(1.0)
