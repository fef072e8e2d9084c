"""What the highest clocks between iterations save and cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli_helpers import done, says, small_profile, told
from envplan.errors import InputError
from envplan.pipeline import Pipeline
from envplan.profile import Profile
from envplan.simulation.between_iterations import BetweenIterations, between_iterations
from envplan.simulation.iteration import simulate
from strategies import pipelines, profiles
from test_simulation import planned

FORWARD_BACKWARD = [
    (stage, instruction, mhz, time_s, energy_j)
    for stage in range(2)
    for instruction in ("forward", "backward")
    for mhz, time_s, energy_j in ((1740, 0.1, 30.0), (870, 0.15, 20.0))
]
OPTIMIZER = [
    (0, "optimizer", 1740, 0.2, 50.0),
    (0, "optimizer", 870, 0.25, 30.0),
    (1, "optimizer", 1740, 0.3, 60.0),
    (1, "optimizer", 1305, 0.3, 45.0),
]


def between(
    rows: list[tuple[Any, ...]], options: list[int], time_s: float | None = None, **extras: Any
) -> BetweenIterations | None:
    """For one microbatch on two stages; options are of the operations by stage, 0 the fastest."""
    profile = Profile.from_rows(rows)
    pipeline = Pipeline("1f1b", num_stages=2, num_microbatches=1, **extras)
    plan = planned(pipeline, profile, options, gpus_per_stage=4)
    return between_iterations(simulate(plan, profile), profile, time_s)


def test_rows_of_an_optimizer_that_is_not_scheduled_say_what_the_clocks_cost() -> None:
    found = between(FORWARD_BACKWARD + OPTIMIZER, [0, 1, 0, 1])
    assert found is not None
    assert found.instructions == ("optimizer",)
    assert found.last_clocks_mhz == (870, 870)
    assert found.source == "profile"
    # Stage 1 has no row at 870 MHz: the next one above counts. Stage 0 waits for it at 70 W.
    assert found.at_last_clocks == pytest.approx((0.3, 4 * (30 + 45 + 70 * 0.05)))
    assert found.at_highest_clocks == pytest.approx((0.3, 4 * (50 + 60 + 70 * 0.1)))
    assert found.time_saved_s == 0
    assert found.extra_energy_j == pytest.approx(4 * (35 + 3.5))
    assert found.gets_own_clocks


def test_without_rows_a_given_time_scales_as_the_last_operations_do() -> None:
    found = between(FORWARD_BACKWARD, [1, 1, 1, 0], 0.3)
    assert found is not None
    assert found.source == "modelled"
    assert found.last_clocks_mhz == (870, 1740)
    assert found.at_highest_clocks == pytest.approx((0.3, 4 * 2 * 0.3 * 300))
    slow_j = 0.45 * 20 / 0.15 + 0.3 * 300 + 70 * 0.15
    assert found.at_last_clocks == pytest.approx((0.45, 4 * slow_j))


def test_nothing_is_said_where_nothing_is_known_or_the_optimizer_is_scheduled() -> None:
    assert between(FORWARD_BACKWARD, [0, 0, 0, 0]) is None
    rows = FORWARD_BACKWARD + OPTIMIZER
    assert between(rows, [0, 0, 0, 0, 0, 0], extras={"optimizer": [0, 1]}) is None


def test_a_time_beside_rows_is_refused() -> None:
    with pytest.raises(InputError, match="has rows for optimizer, which run between"):
        between(FORWARD_BACKWARD + OPTIMIZER, [0, 0, 0, 0], 0.3)


def test_what_is_too_short_for_a_change_gets_no_clock() -> None:
    found = between(FORWARD_BACKWARD, [1, 1, 1, 1], 0.009)
    assert found is not None
    assert not found.gets_own_clocks


@given(st.data(), st.floats(0.01, 100))
def test_at_the_highest_clocks_it_takes_the_given_time_and_no_longer_at_others(
    data: Any, time_s: float
) -> None:
    pipeline = data.draw(pipelines(max_stages=3, max_microbatches=3))
    profile = data.draw(profiles(pipeline.num_profile_stages, max_options=4))
    highest = [
        profile.table(op.profile_stage, op.instruction).max_frequency_option
        for op in pipeline.operations
    ]
    plan = planned(pipeline, profile, highest)
    found = between_iterations(simulate(plan, profile), profile, time_s)
    assert found is not None
    assert found.at_highest_clocks.time_s == pytest.approx(time_s)
    assert found.at_last_clocks == pytest.approx(found.at_highest_clocks)


def test_simulate_says_what_runs_between_iterations(tmp_path: Path) -> None:
    small_profile().save_csv(tmp_path / "profile.csv")
    done("solve profile.csv -m 4 --slowdown 20", cwd=tmp_path)
    assert "between iterations" not in done("simulate plan.json", cwd=tmp_path)
    said = done("simulate plan.json --between 300ms", cwd=tmp_path)
    says(said, "between iterations (modelled as scaling with the clock | s sooner for")
    document = told("simulate plan.json --between 300ms", cwd=tmp_path)["between_iterations"]
    assert document["at_highest_clocks"]["time_s"] == pytest.approx(0.3)
    assert document["time_saved_s"] > 0
