"""Fleets that never change: the best of them by brute force, and those that are given."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envplan.errors import InputError
from envplan.serving import hierarchical_plan
from envplan.serving.classes import DEFAULT_CLASSES as CLASSES
from envplan.serving.fixed_fleet_trials import single_pool
from envplan.serving.fixed_fleets import FixedFleets, Rivals, rivals_of
from envplan.serving.given_fleet import fleet_of_plan, parse_fleet, require_performance
from envplan.serving.instances import Instances
from envplan.serving.observed_trace import ObservedTrace, observe_trace
from envplan.serving.performance import Configuration
from envplan.serving.profile import ServingProfile
from envplan.serving.replay import replay_fixed, simulate
from envplan.serving.replayed_sizing import fewest_near
from envplan.serving.settings import Settings
from envplan.serving.simulation import Simulation
from envplan.serving.trace import Trace, make_week

PROFILE = ServingProfile.builtin()
TALK = Trace.open("azure-2023-conversation")


def least_energies_j(
    observed: ObservedTrace, settings: Settings, as_many: float
) -> dict[str, float]:
    """The least energy of the fleets that meet so many SLOs, J: all fleets are replayed."""
    energies_j: dict[str, list[float]] = {"largest_tp": [], "highest_clock": [], "lower_clock": []}
    for configuration in PROFILE.performance:
        for count in range(1, settings.max_gpus // configuration.tp + 1):
            fleet = Instances(configuration, count)
            result = replay_fixed(
                str(fleet), single_pool(fleet, PROFILE.classes), observed, settings
            )
            if result.slo_attainment < as_many:
                continue
            is_highest = configuration.frequency_mhz == observed.max_clock_mhz(configuration.tp)
            energies_j["highest_clock" if is_highest else "lower_clock"].append(result.energy_j)
            if is_highest and configuration.tp == 8:
                energies_j["largest_tp"].append(result.energy_j)
    return {name: min(candidates_j) for name, candidates_j in energies_j.items()}


def require_best(
    rivals: Rivals, observed: ObservedTrace, settings: Settings, as_many: float
) -> None:
    """Refuse rivals of which one is not the best there is."""
    for name, least_j in least_energies_j(observed, settings, as_many).items():
        rival: Simulation | None = getattr(rivals, name)
        assert rival is not None
        assert rival.slo_attainment >= as_many
        assert rival.energy_j == pytest.approx(least_j), name


@pytest.mark.parametrize("past_s", [0.0, 1800.0])
def test_a_policy_stands_beside_the_best_fixed_fleets_that_meet_as_many_slos(past_s: float) -> None:
    settings = Settings(max_gpus=24, past_s=past_s)
    observed = observe_trace(PROFILE, TALK, settings)
    policy = simulate(PROFILE, TALK, "envplan", settings)
    rivals = FixedFleets(observed, settings).beside(policy)
    require_best(rivals, observed, settings, policy.slo_attainment - 1e-4)
    split = rivals.split
    assert split is not None
    assert rivals.largest_tp is not None
    saved_percent = 100 * (1 - policy.energy_j / rivals.largest_tp.energy_j)
    assert sum(split) == pytest.approx(saved_percent)


def test_beside_a_long_trace_the_best_fleets_are_those_of_all_of_it() -> None:
    """Its busiest hours alone ask for others, because a few long requests are late on these."""
    settings = Settings(max_gpus=8, past_s=1800.0)
    day = make_week("conversation-week", days=0.25).scaled(0.15)
    observed = observe_trace(PROFILE, day, settings)
    assert observed.num_requests(settings.past_s, day.duration_s) > 60_000, "or all is searched"
    policy = simulate(PROFILE, day, "static", replace(settings, max_gpus=64))
    rivals = FixedFleets(observed, settings).beside(policy)
    require_best(rivals, observed, settings, policy.slo_attainment - 1e-4)


def test_one_replay_of_a_fleet_answers_every_policy() -> None:
    settings = Settings(max_gpus=24)
    observed = observe_trace(PROFILE, TALK, settings)
    replays: dict[str, Simulation] = {}
    policy = simulate(PROFILE, TALK, "envplan", settings)
    first = FixedFleets(observed, settings, replays=replays).beside(policy)
    assert first.highest_clock is not None
    assert replays[first.highest_clock.policy] is first.highest_clock
    known = set(replays)
    again = FixedFleets(observed, settings, replays=replays).beside(replace(policy, policy="other"))
    assert set(replays) == known
    assert again.highest_clock is first.highest_clock


@given(fewest=st.integers(1, 41), guess=st.integers(1, 40))
def test_the_fewest_are_found_from_any_guess(fewest: int, guess: int) -> None:
    tried: list[int] = []

    def passes(count: int) -> bool:
        tried.append(count)
        return count >= fewest

    assert fewest_near(passes, guess, most=40) == (fewest if fewest <= 40 else None)
    assert min(tried) >= 1
    assert max(tried) <= 40
    assert len(tried) <= 2 + 2 * (1 + abs(fewest - guess)).bit_length()


def test_where_no_fixed_fleet_does_there_is_none() -> None:
    settings = Settings(max_gpus=2)
    observed = observe_trace(PROFILE, TALK, settings)
    policy = simulate(PROFILE, TALK, "envplan")
    rivals = FixedFleets(observed, settings).beside(policy)
    assert (rivals.largest_tp, rivals.highest_clock, rivals.lower_clock) == (None, None, None)
    assert rivals.to_dict()["savings_split"] is None


def test_unlike_instances_of_a_given_fleet_share_what_comes() -> None:
    settings = Settings()
    observed = observe_trace(PROFILE, TALK, settings)
    alike = replay_fixed("", parse_fleet("3xTP4@1200", CLASSES), observed, settings)
    parted = replay_fixed("", parse_fleet("1xTP4@1200, 2xtp4@1200", CLASSES), observed, settings)
    assert parted.energy_j == pytest.approx(alike.energy_j)
    assert parted.slo_attainment == alike.slo_attainment
    assert parted.requests_helped == 0
    assert alike.ttft_s.p50 < alike.ttft_s.p90 < alike.ttft_s.p99
    mixed = parse_fleet("1xTP4@1200,1xTP8@1980", CLASSES)
    assert mixed.gpus == 12
    assert replay_fixed("", mixed, observed, settings).slo_attainment > 0.99


def test_a_plans_fleet_serves_a_trace() -> None:
    settings = Settings()
    plan = hierarchical_plan(PROFILE, {"SS": 1500.0, "LL": 4000.0}, 64)
    fleet = fleet_of_plan(plan)
    assert fleet.gpus == plan.gpus
    observed = observe_trace(PROFILE, TALK, settings)
    assert replay_fixed("plan", fleet, observed, settings).gpus_most == plan.gpus


@pytest.mark.parametrize("text", ["", "TP4@1200", "0xTP4@1200", "3xTP4", "3xTP4@1200,", "3xTP4@x"])
def test_what_is_no_fleet_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="a fleet is written as"):
        parse_fleet(text, CLASSES)


def test_instances_that_the_profile_does_not_know_are_named() -> None:
    with pytest.raises(InputError, match=r"no TP3 at 7 MHz; it has TP2 at .*; TP8 at "):
        require_performance(parse_fleet("1xTP3@7", CLASSES), PROFILE.performance)


def test_a_fleets_name_is_how_it_is_written() -> None:
    assert str(Instances(Configuration(4, 1200), 3)) == "3xTP4@1200"
    assert Path(str(Instances(Configuration(4, 1200), 3))).name == "3xTP4@1200"


def test_progress_of_the_search_goes_up_to_its_end() -> None:
    settings = Settings(max_gpus=24)
    observed = observe_trace(PROFILE, TALK, settings)
    policies = [simulate(PROFILE, TALK, name, settings) for name in ("envplan", "SinglePool")]
    told: list[tuple[int, int]] = []
    found = rivals_of(observed, settings, policies, lambda done, count: told.append((done, count)))
    assert [rivals.policy for rivals in found] == policies
    assert told == sorted(told)
    assert len({count for _, count in told}) == 1
    assert told[-1][0] == told[-1][1]
    assert len(told) > len(policies)
