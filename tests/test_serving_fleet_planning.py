"""Fleets for steady loads: what is stated was replayed, and holds when it is replayed again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envplan._serving import time_bin_ends
from envplan.enforce.supported_clocks import parse_clocks
from envplan.errors import InputError, NoAnswerError
from envplan.serving import (
    Planning,
    ServingPlan,
    ServingProfile,
    fleet_planning,
    plan_fleet,
    plan_replay,
    split_fleet_planning,
)
from envplan.serving.apply import apply_serving_plan
from envplan.serving.classes import Slo
from envplan.serving.exact_planner import exact_plan
from envplan.serving.fleet_controller import RequestCounts, TimeCounts
from envplan.serving.instances import Instances
from envplan.serving.performance import Configuration
from envplan.serving.phase_curves import RequestMix
from envplan.serving.plan_replay import (
    NUM_DRAWS,
    ClassReplay,
    PlanDraws,
    PlanReplay,
    replay_group,
    replay_plan,
)
from envplan.serving.plan_request import PlanRequest
from envplan.serving.pool_sites import possible_promises
from envplan.serving.profile import MeanLengths
from envplan.serving.replayed_curves import Promise, highest_load, replay_curves
from envplan.serving.split_fleet import SplitFleet
from envplan.serving.split_fleet_planning import fleets_apart, shared_fleet
from envplan.serving.steady_replay import SteadyLoad, SteadyReplay, replay_steadily
from serving_helpers import rows_for_roles, write_profile

#: Seconds of a prompt's token, and of a decode step, at the highest clock of one GPU.
PROMPT_TOKEN_S, STEP_S = 1e-4, 0.02
MEMORY_TOKENS = 30_000.0


@cache
def small_profile() -> ServingProfile:
    """One or two GPUs at two clocks, with little memory; decoding slows down with the batch."""
    rows = []
    for tp in (1, 2):
        for mhz, slower in ((1000, 1.4), (1500, 1.0)):
            rows.append(f"{tp},{mhz},idle,0,0,{100 * tp}")
            for tokens in (100, 1000, 4000):
                time_s = slower * PROMPT_TOKEN_S * tokens / tp
                rows.append(f"{tp},{mhz},prefill,{tokens},{time_s},{tp * 600 / slower}")
            for batch in (1, 16, 64):
                time_s = slower * STEP_S * (1 + batch / 64) / tp
                rows.append(f"{tp},{mhz},decode,{batch},{time_s},{tp * (200 + batch) / slower}")
    memory = {"1": MEMORY_TOKENS, "2": 3 * MEMORY_TOKENS}
    with TemporaryDirectory() as folder:
        path = write_profile(Path(folder, "small.csv"), rows, kv_tokens=memory)
        return ServingProfile.read_csv(path)


@cache
def roles_profile() -> ServingProfile:
    """Clocks that prompts need and decoding does not; contexts have a size."""
    rows = rows_for_roles([1, 2])
    with TemporaryDirectory() as folder:
        path = write_profile(Path(folder, "roles.csv"), rows, kv_bytes_per_token=1e5)
        return ServingProfile.read_csv(path)


PLANNING = Planning(merge=False)


def assert_ten_other_draws_meet(
    profile: ServingProfile, load: SteadyLoad, stated_share: float
) -> None:
    """Each of ten draws that no plan has seen meets at least the share that is stated."""
    duration_s = max(3600.0, load.duration_for(4000))
    for seed in range(10):
        replay = replay_steadily(profile, load, duration_s=duration_s, seed=seed)
        assert replay.attainment >= stated_share


@settings(max_examples=6, deadline=None)
@given(
    st.fixed_dictionaries(
        {},
        optional={name: st.floats(20, 6000) for name in ("SS", "MM", "LL")},
    ).filter(bool),
    st.sampled_from([95.0, 99.0]),
)
def test_no_plan_meets_less_than_it_states_in_ten_other_draws(
    loads: dict[str, float], quantile: float
) -> None:
    profile = small_profile()
    plan = plan_fleet(profile, loads, 1000, Planning(merge=False, slo_quantile=quantile))
    for pool, loads_of_groups in zip(plan.pools, plan.group_loads(profile), strict=True):
        for group, load in zip(pool.groups, loads_of_groups, strict=True):
            assert group.attainment is not None
            assert group.attainment >= quantile / 100
            assert_ten_other_draws_meet(profile, load, group.attainment)


@settings(max_examples=3, deadline=None)
@given(
    loads=st.fixed_dictionaries(
        {},
        optional={name: st.floats(50, 3000) for name in ("SS", "MM", "LL")},
    ).filter(bool),
    quantile=st.sampled_from([95.0, 99.0]),
    merge=st.booleans(),
)
def test_no_fleet_with_roles_meets_less_than_it_states_in_ten_other_draws(
    loads: dict[str, float], quantile: float, merge: bool
) -> None:
    profile = roles_profile()
    requests_s = {name: load / profile.classes[name].tokens for name, load in loads.items()}
    fleets = fleets_apart(
        profile, requests_s, 1000, slo_quantile=quantile, link_bytes_s=1e9, merge=merge
    )
    assert [name for held in fleets for name in held.requests_s] == list(loads)
    for held in fleets:
        (stated, _) = held.replay.groups[0]
        assert stated.attainment >= quantile / 100
        assert held.fleet.decode is not None
        mix = RequestMix(held.requests_s, 1e9)
        load = mix.load(held.fleet.first, held.fleet.decode)
        assert_ten_other_draws_meet(profile, load, stated.attainment)


@settings(max_examples=3, deadline=None)
@given(
    loads=st.fixed_dictionaries(
        {},
        optional={name: st.floats(50, 3000) for name in ("SS", "MM", "LL")},
    ).filter(bool)
)
def test_no_shared_fleet_meets_less_than_it_states_in_ten_other_draws(
    loads: dict[str, float],
) -> None:
    profile = roles_profile()
    requests_s = {name: load / profile.classes[name].tokens for name, load in loads.items()}
    held = shared_fleet(profile, requests_s, 1000, slo_quantile=99.0)
    ((stated,),) = held.replay.groups
    assert held.fleet.decode is None
    load = RequestMix(requests_s, 1e9).load(held.fleet.first, None)
    assert stated.attainment >= 0.99
    assert_ten_other_draws_meet(profile, load, stated.attainment)


def test_a_pair_that_curves_of_its_phases_do_not_promise_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    profile = ServingProfile.builtin()
    loads = {"SS": 20_000.0, "MM": 8_000.0, "LL": 3_000.0}
    requests_s = {name: load / profile.classes[name].tokens for name, load in loads.items()}

    def least_w() -> float:
        (held,) = fleets_apart(profile, requests_s, 64, slo_quantile=99.0, link_bytes_s=5e10)
        return held.power_w

    found_w = least_w()
    monkeypatch.setattr(split_fleet_planning, "_TRIED_IN_VAIN", 0)
    assert found_w < 0.98 * least_w()


def test_a_fleet_with_roles_is_found_where_there_are_just_enough_gpus() -> None:
    profile = ServingProfile.builtin()
    loads = {"SS": 20_000.0, "MM": 8_000.0, "LL": 3_000.0}
    requests_s = {name: load / profile.classes[name].tokens for name, load in loads.items()}
    (held,) = fleets_apart(profile, requests_s, 64, slo_quantile=99.0, link_bytes_s=5e10)
    gpus = held.fleet.gpus
    (tight,) = fleets_apart(profile, requests_s, gpus, slo_quantile=99.0, link_bytes_s=5e10)
    assert tight.fleet.gpus <= gpus
    assert tight.power_w < 1.05 * held.power_w


def test_no_fleet_with_roles_has_more_gpus_than_there_are(tmp_path: Path) -> None:
    """At the lower clock prompts take less energy, but on more instances."""
    rows = [
        row.replace(",400.0", ",150.0") if ",1000,prefill," in row else row
        for row in rows_for_roles([1])
    ]
    path = write_profile(tmp_path / "thrifty.csv", rows, kv_bytes_per_token=1e5)
    profile = ServingProfile.read_csv(path)
    requests_s = {"MM": 7000 / profile.classes["MM"].tokens}

    def prefill_with(gpus: int) -> Instances:
        (held,) = fleets_apart(profile, requests_s, gpus, slo_quantile=99.0, link_bytes_s=1e9)
        assert held.fleet.gpus <= gpus
        return held.fleet.first

    assert prefill_with(4) == Instances(Configuration(1, 1000), 3)
    assert prefill_with(3).configuration == Configuration(1, 2000)


@pytest.mark.parametrize("loads", [{"SS": 3000.0}, {"SS": 900.0, "MM": 2500.0, "LL": 1200.0}])
def test_no_number_of_instances_that_holds_draws_less_than_the_shared_fleet(
    loads: dict[str, float],
) -> None:
    profile = roles_profile()
    requests_s = {name: load / profile.classes[name].tokens for name, load in loads.items()}
    mix = RequestMix(requests_s, 1e9)
    least_w = np.inf
    for configuration in profile.performance:
        for count in range(1, 13):
            replay = replay_plan(profile, [[mix.load(Instances(configuration, count), None)]])
            if replay.attainment >= 0.99:
                least_w = min(least_w, count * replay.groups[0][0].power_w)
    held = shared_fleet(profile, requests_s, 1000, slo_quantile=99.0)
    assert held.power_w == pytest.approx(least_w, rel=1e-9)


@pytest.mark.parametrize(
    ("profile", "loads", "gpus", "configuration"),
    [
        # By their curves, four instances are needed: the fifth best configuration. Three hold.
        ("b200-deepseek-r1", {"SS": 20e3, "MM": 8e3, "LL": 3e3}, 64, Configuration(8, 982)),
        # Four, which are too many, are what its curve says.
        ("b200-deepseek-r1", {"SS": 20e3, "MM": 8e3, "LL": 3e3}, 24, Configuration(8, 982)),
    ],
)
def test_a_shared_fleet_of_fewer_instances_than_its_curve_says_is_found(
    profile: str, loads: dict[str, float], gpus: int, configuration: Configuration
) -> None:
    opened = ServingProfile.open(profile)
    requests_s = {name: load / opened.classes[name].tokens for name, load in loads.items()}
    held = shared_fleet(opened, requests_s, gpus, slo_quantile=99.0)
    assert held.fleet.first.configuration == configuration
    assert held.fleet.gpus <= gpus


@pytest.mark.parametrize("planner", ["exact", "hierarchical"])
@pytest.mark.parametrize("merge", [False, True])
def test_a_plan_at_one_lower_clock_is_compared_with_fleets_at_all_clocks(
    planner: str, merge: bool
) -> None:
    profile, loads = roles_profile(), {"MM": 300.0}
    plan = plan_fleet(profile, loads, 8, Planning(planner=planner, merge=merge))
    (clock_mhz,) = {group.frequency_mhz for pool in plan.pools for group in pool.groups}
    assert clock_mhz < max(configuration.frequency_mhz for configuration in profile.performance)
    (promise,) = possible_promises(profile, PlanRequest.create(profile, loads, 8))
    curves = replay_curves(profile, [promise], 0.01)
    highest = curves.curves_of("MM")[-1]
    baseline = plan.predicted.baseline
    assert baseline is not None
    count = baseline.gpus / highest.tp
    assert baseline.power_w == pytest.approx(count * highest.power_at(300 / count))
    assert plan.planner == planner
    if planner == "exact":
        by_curves = exact_plan(curves, loads, 8).predicted
        assert by_curves.power_lower_bound_w is not None
        bound_w = plan.predicted.power_lower_bound_w
        assert bound_w is not None
        assert bound_w <= by_curves.power_lower_bound_w


@given(
    st.integers(1, 60),
    st.none() | st.integers(1, 60),
    st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=6),
)
def test_every_fleet_between_is_tried_once_the_smallest_first(
    first: int, decode: int | None, steps: list[tuple[bool, int]]
) -> None:
    configuration = Configuration(1, 1000)
    shrinking = [(first, decode)]
    for of_decode, less in steps:
        first, decode = shrinking[-1]
        if of_decode and decode is not None:
            shrinking.append((first, max(1, decode - less)))
        else:
            shrinking.append((max(1, first - less), decode))
        if shrinking[-1] == shrinking[-2]:
            shrinking.pop()
    fleets = [
        SplitFleet(
            Instances(configuration, first),
            None if decode is None else Instances(configuration, decode),
        )
        for first, decode in shrinking
    ]
    growing = list(split_fleet_planning._growing_by_one(fleets))
    assert growing[0] == fleets[-1]
    assert growing[-1] == fleets[0]
    for smaller, larger in pairwise(growing):
        assert larger.gpus == smaller.gpus + 1
    assert [fleet for fleet in growing if fleet in fleets] == fleets[::-1]


def test_fleets_that_are_dropped_early_would_not_have_been_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loads = {"SS": 900.0, "MM": 2500.0, "LL": 1200.0}
    plan = plan_fleet(roles_profile(), loads, 40)
    monkeypatch.setattr(fleet_planning, "_CURVE_MARGIN", np.inf)
    monkeypatch.setattr(split_fleet_planning, "_POWER_MARGIN", np.inf)
    assert plan_fleet(roles_profile(), loads, 40) == plan


#: One request in 45 is long.
RARE_LONG = {"SS": 1000.0, "LL": 200.0}


def draws_of(num_draws: int, requests: int, late: Sequence[int]) -> list[RequestCounts]:
    """Draws of as many requests each, of which some are late."""
    late_by_draw = [*late, *[0] * (num_draws - len(late))]
    in_time = [requests - num_late for num_late in late_by_draw]
    return [RequestCounts(requests, attained, attained, attained) for attained in in_time]


@pytest.mark.parametrize(
    ("requests", "late", "is_missing"),
    [
        (4000, [40] * 16, True),  # 99% of them, which may be less in the long run
        (4000, [20] * 16, False),
        (10, [1], False),  # 99.4% of 160: too few to ask for more
        (10, [1, 1], True),
    ],
)
def test_a_class_is_judged_by_its_long_run_where_enough_of_its_requests_came(
    requests: int, late: list[int], is_missing: bool
) -> None:
    replayed = ClassReplay.of(draws_of(16, requests, late))
    assert replayed.num_requests == 16 * requests
    assert replayed.attainment < replayed.long_run < replayed.mean
    assert PlanReplay([], {"LL": replayed}).missing_classes(0.99) == ["LL"] * is_missing


def test_a_rare_class_has_the_share_in_the_long_run_that_is_stated() -> None:
    profile = roles_profile()
    requests_s = {name: load / profile.classes[name].tokens for name, load in RARE_LONG.items()}
    held = shared_fleet(profile, requests_s, 100, slo_quantile=99.0)
    stated = held.replay.classes
    assert stated["LL"].attainment < 0.99 <= stated["LL"].long_run
    load = RequestMix(requests_s, 1e9).load(held.fleet.first, None)
    counts: dict[str, list[RequestCounts]] = {"SS": [], "LL": []}
    for seed in range(40):
        replay = replay_steadily(profile, load, duration_s=3600.0, seed=seed)
        for name, of_class in replay.counts.items():
            counts[name].append(of_class)
    for name, replayed in stated.items():
        assert RequestCounts.sum(counts[name]).attainment >= replayed.long_run


def test_draws_are_replayed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = []

    def replay_and_count(*args: Any, seed: int, **options: Any) -> SteadyReplay:
        seeds.append(seed)
        return replay_steadily(*args, seed=seed, **options)

    monkeypatch.setattr(plan_replay, "replay_steadily", replay_and_count)
    rates = {"SS": 0.5, "MM": 0.5}
    loads = [
        [SteadyLoad(configuration=Configuration(1, 1000), num_instances=2, requests_s=rates)],
        [SteadyLoad(configuration=Configuration(2, 1500), num_instances=1, requests_s={})],
    ]
    draws = PlanDraws(small_profile(), loads)
    few, all_draws = draws.replay(3), draws.replay(NUM_DRAWS)
    assert few == draws.replay(3)
    assert few != all_draws
    assert len(seeds) == len(set(seeds)) == NUM_DRAWS
    assert all_draws == replay_plan(small_profile(), loads)


def test_classes_may_share_alike_instances_where_that_draws_less() -> None:
    loads = {"SS": 300.0, "MM": 800.0}
    planning = Planning(planner="hierarchical", disaggregated=True)
    plan = plan_fleet(roles_profile(), loads, 6, planning)
    alone = plan_fleet(roles_profile(), loads, 6, Planning(planner="hierarchical"))
    together = plan.predicted.together
    assert together is not None
    assert plan.power <= together.power_w <= alone.power
    assert plan.check(roles_profile())


@cache
def plan_of_roles(link_bytes_s: float = 50e9) -> ServingPlan:
    planning = Planning(merge=False, disaggregated=True, kv_link_bytes_s=link_bytes_s)
    return plan_fleet(roles_profile(), {"MM": 5_000.0}, 30, planning)


def test_the_better_of_both_is_planned_and_says_what_the_other_takes() -> None:
    plan = plan_of_roles()
    predicted = plan.predicted
    assert predicted.together is not None
    assert predicted.apart is not None
    assert plan.power == min(predicted.together.power_w, predicted.apart.power_w)
    assert plan.pools[0].has_roles == (predicted.apart.power_w < predicted.together.power_w)


def test_prompts_run_fast_and_decoding_slowly() -> None:
    plan = plan_of_roles()
    (pool,) = plan.pools
    assert [group.role for group in pool.groups] == ["prefill", "decode"]
    prefill, decode = pool.groups
    assert prefill.frequency_mhz == 2000
    assert decode.frequency_mhz == 1000
    assert plan.check(roles_profile())[0].startswith("served within their SLOs, when replayed")


@pytest.mark.parametrize(
    ("place", "changes", "words"),
    [
        (0, {"role": None}, "a group for prefill, then one for decode"),
        (1, {"role": "prefill"}, "a group for prefill, then one for decode"),
        (1, {"load_tokens_s": 1.0}, "its instances that decode carry"),
        (1, {"power_w": 1.0}, "for decode: power_w is"),
        (0, {"attainment": 1.0}, "for prefill: attainment is"),
    ],
)
def test_roles_and_their_figures_are_proved(
    tmp_path: Path, place: int, changes: dict[str, Any], words: str
) -> None:
    plan = plan_of_roles()
    document = json.loads(plan.model_dump_json(by_alias=True))
    document["pools"][0]["groups"][place].update(changes)
    path = tmp_path / "p.json"
    path.write_text(json.dumps(document))
    with pytest.raises(InputError, match=words):
        ServingPlan.load(path).check(roles_profile())


def test_a_slow_network_costs_a_plan_its_roles() -> None:
    """Contexts of 600 tokens take 60 s each at 1 MB/s: tokens come too late."""
    plan = plan_of_roles(link_bytes_s=1e6)
    assert not plan.pools[0].has_roles
    assert plan.predicted.apart is None


def test_roles_want_the_size_of_contexts() -> None:
    with pytest.raises(InputError, match="kv_bytes_per_token"):
        plan_fleet(small_profile(), {"SS": 100.0}, 8, Planning(disaggregated=True))


def test_roles_are_applied_and_a_lower_clock_is_proved_with_both() -> None:
    profile = roles_profile()
    plan = plan_of_roles()
    applied = apply_serving_plan(plan, profile, clocks=parse_clocks("1000,2000"))
    assert {instance.role for instance in applied.instances} == {"prefill", "decode"}
    prefill, decode = plan.pools[0].groups
    assert len(applied.instances) == prefill.instances + decode.instances
    slower = apply_serving_plan(plan, profile, clocks=parse_clocks("1000,1960"))
    by_role = {instance.role: instance.slo_proven for instance in slower.instances}
    assert by_role["decode"]
    (load,) = plan.group_loads(profile)[0]
    at_1000 = replace(load, configuration=Configuration(prefill.tp, 1000))
    assert by_role["prefill"] == (replay_group(profile, at_1000).attainment >= 0.99)


def test_memory_limits_what_an_instance_carries() -> None:
    """The queueing model fills memory with the mean of the contexts; the replay knows the peaks."""
    profile = small_profile()
    long_answers = Promise("LL", profile.classes["LL"].slo)
    replayed = replay_curves(profile, [long_answers], max_late_share=0.01)
    for model, curve in zip(profile.curves_of("LL"), replayed.curves_of("LL"), strict=True):
        carried = curve.capacity(long_answers.slo)
        assert 0 < carried <= model.max_load
        assert carried in curve.load_tokens_s
        assert (np.diff(curve.power_w) > 0).all()


@given(
    limit=st.floats(1.0, 1e4),
    begin=st.floats(1.0, 1e4),
    most=st.floats(1e4, 2e4),
)
def test_the_highest_load_is_found_within_a_percent(
    limit: float, begin: float, most: float
) -> None:
    least = 0.02 * begin
    found = highest_load(lambda load: load <= limit, begin=begin, least=least, most=most)
    if found:
        assert limit / 1.01 <= found <= limit
    else:
        assert limit < begin


@given(st.lists(st.floats(2e-4, 1e4), min_size=1, max_size=50), st.floats(0.01, 1.0))
def test_a_quantile_of_counted_times_is_known_to_a_percent(
    times_s: list[float], share: float
) -> None:
    counts = np.zeros(len(time_bin_ends()), np.int64)
    np.add.at(counts, np.searchsorted(time_bin_ends(), times_s), 1)
    exact_s = float(np.quantile(times_s, share, method="inverted_cdf"))
    assert exact_s <= TimeCounts(counts).quantile_s(share) * (1 + 1e-9) <= exact_s * 1.0101


def test_no_times_and_times_that_never_come() -> None:
    counts = TimeCounts.none()
    assert counts.quantile_s(0.99) == 0
    counts.counts[-1] = 1
    assert counts.quantile_s(0.99) == float("inf")


@settings(max_examples=20, deadline=None)
@given(utilization=st.floats(0.05, 0.8), seed=st.integers(0, 1000))
def test_prompts_at_one_instance_wait_as_in_a_queue(utilization: float, seed: int) -> None:
    """Lindley's recursion, 1952: a wait is the last one's wait and service less the gap."""
    configuration = Configuration(1, 1500)
    prompt_tokens = float(small_profile().performance[configuration].chunk_tokens)
    profile = small_profile().with_slos({"LS": Slo(1e6, 1e6)})
    profile = profile.with_lengths({"LS": MeanLengths(prompt_tokens, 1.0)})
    service_s = float(profile.performance[configuration].prompt_s_at(prompt_tokens))
    load = SteadyLoad(
        configuration=configuration,
        num_instances=1,
        requests_s={"LS": utilization / service_s},
    )
    duration_s = load.duration_for(2000)
    replay = replay_steadily(profile, load, duration_s=duration_s, seed=seed)
    random = np.random.default_rng((seed, 0))
    expected = load.total_requests_s * duration_s
    gaps = random.exponential(size=int(np.ceil(expected + 8 * np.sqrt(expected) + 40)))
    arrivals = np.cumsum(gaps) / load.total_requests_s
    arrivals = arrivals[arrivals < duration_s]
    wait_s, answered_s = 0.0, []
    for gap_s in np.diff(arrivals, prepend=arrivals[0]):
        wait_s = max(0.0, wait_s - gap_s)
        answered_s.append(wait_s + service_s)
        wait_s += service_s
    for share in (0.5, 0.9, 0.99):
        exact_s = float(np.quantile(answered_s, share, method="inverted_cdf"))
        shown_s = replay.first_token_times.quantile_s(share)
        assert exact_s * (1 - 1e-6) <= shown_s <= exact_s * 1.011


@pytest.fixture(scope="module")
def plan() -> ServingPlan:
    return plan_fleet(small_profile(), {"SS": 3000.0, "LL": 1500.0}, 100, PLANNING)


def test_a_check_repeats_the_replay(plan: ServingPlan) -> None:
    assert plan.check(small_profile())[0].startswith("served within their SLOs, when replayed")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("attainment", 1.0, "attainment is .* when it is replayed, not 1.0 as stated"),
        ("power_w", 1.0, "power_w is"),
        ("ttft_s", 0.001, "ttft_s is"),
        ("tbt_s", 0.001, "tbt_s is"),
        ("frequency_mhz", 7, "no such configuration"),
        ("instances", 1000, "carry"),
    ],
)
def test_a_group_that_states_something_else_is_refused(
    plan: ServingPlan, tmp_path: Path, field: str, value: float, words: str
) -> None:
    document = json.loads(plan.model_dump_json(by_alias=True))
    document["pools"][0]["groups"][0][field] = value
    path = tmp_path / "p.json"
    path.write_text(json.dumps(document))
    with pytest.raises(InputError, match=words):
        ServingPlan.load(path).check(small_profile())


def test_attainments_of_classes_and_the_quantile_are_proved(
    plan: ServingPlan, tmp_path: Path
) -> None:
    for where, value, words in [
        ("predicted", {"attainment_by_class": {"SS": 1.0, "LL": 1.0}}, "attainment_by_class"),
        ("asked", {"slo_quantile_percent": 99.9999}, "less than"),
    ]:
        document = json.loads(plan.model_dump_json(by_alias=True))
        document[where].update(value)
        path = tmp_path / "p.json"
        path.write_text(json.dumps(document))
        with pytest.raises(InputError, match=words):
            ServingPlan.load(path).check(small_profile())


def test_the_best_fleets_at_one_clock_are_stated_within_the_gpus(plan: ServingPlan) -> None:
    fleets = plan.predicted.one_clock
    assert fleets is not None
    assert [fleet.frequency_mhz for fleet in fleets] == [1000, 1500]
    for fleet in fleets:
        assert fleet.gpus <= plan.request.gpus
        assert plan.power <= fleet.power_w


def test_a_planner_that_is_not_there_is_named() -> None:
    with pytest.raises(InputError, match="no planner 'best'"):
        plan_fleet(small_profile(), {"SS": 10.0}, 8, Planning(planner="best"))


def test_too_few_gpus_are_said() -> None:
    with pytest.raises(NoAnswerError, match="GPUs"):
        plan_fleet(small_profile(), {"LL": 50_000.0}, 2, PLANNING)


@pytest.mark.parametrize(("load_tokens_s", "is_proven"), [(300.0, True), (6000.0, False)])
def test_a_lower_clock_than_planned_is_proved_by_a_replay(
    load_tokens_s: float, is_proven: bool
) -> None:
    """The plan is for 1500 MHz; of what lies below, only 1000 MHz is measured."""
    profile = small_profile()
    at_1500 = {key: curve for key, curve in profile.curves.items() if key.frequency_mhz == 1500}
    plan = plan_fleet(replace(profile, curves=at_1500), {"LL": load_tokens_s}, 1000, PLANNING)
    (loads,) = plan.group_loads(profile)
    for number, load in enumerate(loads):
        slower = replace(load, configuration=Configuration(load.configuration.tp, 1000))
        is_met = replay_group(profile, slower).attainment >= 0.99
        group = plan.pools[0].groups[number]
        applied = apply_serving_plan(plan, profile, clocks=parse_clocks("1480"))
        proven = {i.slo_proven for i in applied.instances if i.tp == group.tp}
        assert is_met in proven
    assert all(i.slo_proven for i in applied.instances) == is_proven
