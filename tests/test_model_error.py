"""The range that a modelled plan's savings are in, by the error of the model."""

from __future__ import annotations

import math

import numpy as np
import pytest

from envplan import Pipeline, Plan, Profile, trace_frontier
from envplan.plan.model_error import savings_by_model_error
from envplan.profiling.modelled import modelled_profile
from envplan.profiling.models import PRESETS
from envplan.profiling.training_job import TrainingJob
from envplan.units import ENERGY_UNITS_PER_J

_DRAWS = 20_000


@pytest.fixture(scope="module")
def profile() -> Profile:
    job = TrainingJob(model=PRESETS["llama3-8b"], num_stages=4, microbatch_size=1)
    return modelled_profile(job, "h200", name="llama", step=120)


@pytest.fixture(scope="module")
def plan(profile: Profile) -> Plan:
    return trace_frontier(Pipeline("1f1b", 4, 8), profile).plan(slowdown=0.05)


def test_the_range_is_that_of_plans_replayed_on_drawn_models(profile: Profile, plan: Plan) -> None:
    between_clocks = profile.metadata.model_error_between_clocks
    assert between_clocks is not None
    rng = np.random.default_rng(0)
    factors: dict[tuple[str, int], np.ndarray] = {}

    def factor(instruction: str, stage: int, mhz: int) -> np.ndarray:
        """One of all clocks of an instruction, times one of this clock."""
        spread = profile.energy_spreads[stage, instruction, mhz, ""]  # type: ignore[index]
        common = math.sqrt(spread**2 - between_clocks**2)
        for key, deviation in (((instruction, 0), common), ((instruction, mhz), between_clocks)):
            if key not in factors:
                factors[key] = 1 + deviation * rng.standard_normal(_DRAWS)
        return factors[instruction, 0] * factors[instruction, mhz]

    waiting = plan.energy
    waiting_of_baseline = plan.predicted.baseline.energy_j
    energy = np.zeros(_DRAWS)
    baseline = np.zeros(_DRAWS)
    for stage, operations in enumerate(plan.stages):
        for op in operations:
            fastest = profile.table(stage, op.instruction).options()[0]
            fastest_j = fastest.energy_10fj / ENERGY_UNITS_PER_J
            energy += op.energy_j * factor(op.instruction, stage, op.frequency_mhz)
            baseline += fastest_j * factor(op.instruction, stage, fastest.frequency_mhz)
            waiting -= op.energy_j
            waiting_of_baseline -= fastest_j
    savings = 100 * (1 - (energy + waiting) / (baseline + waiting_of_baseline))
    found = savings_by_model_error(plan, profile)
    assert found is not None
    deviation = (found.high_percent - found.low_percent) / 2
    assert deviation == pytest.approx(savings.std(), rel=0.05)
    middle = (found.high_percent + found.low_percent) / 2
    assert middle == pytest.approx(plan.predicted.savings_percent)


def test_a_plan_at_the_highest_clock_saves_nothing_whatever_the_model(profile: Profile) -> None:
    frontier = trace_frontier(Pipeline("1f1b", 1, 4), profile_of_one_stage())
    plan = frontier.plan()
    found = savings_by_model_error(plan, frontier.profile)
    assert found is not None
    assert found.high_percent - found.low_percent < 15
    assert found.low_percent <= plan.predicted.savings_percent <= found.high_percent
    assert profile.metadata.model_error_between_clocks == 0.04


def profile_of_one_stage() -> Profile:
    job = TrainingJob(model=PRESETS["llama3-8b"], num_stages=1, microbatch_size=1)
    return modelled_profile(job, "h200", name="llama", step=600)


def test_profiles_without_a_known_error_have_no_range() -> None:
    profile = Profile.builtin("a40-gpt3-1.3b-4stage")
    plan = trace_frontier(Pipeline("1f1b", 4, 8), profile).plan()
    assert savings_by_model_error(plan, profile) is None
