"""Recomputation and split backwards derived from a profile, from the CLI down to `check`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cli_helpers import assert_refused, envplan, small_profile
from envplan import Pipeline, Profile, simulate, trace_frontier
from envplan.check.plans import verify_plan
from envplan.enforce.apply import apply_plan
from envplan.enforce.topology import Topology
from envplan.errors import InputError
from envplan.profile import INCLUDES_RECOMPUTATION, Adjustments, ProfileMetadata
from envplan.runtime.drift import measure_drift, rescale
from envplan.runtime.run_log_reader import LoggedStep, parse_line
from envplan.units import ENERGY_UNITS_PER_J
from strategies import falling_profiles, profiles

Row = tuple[int, str, int, float, float]


def two_clocks(*instructions: str) -> Profile:
    rows: list[Row] = []
    for n, instruction in enumerate(instructions, start=1):
        rows += [
            (0, instruction, 1740, 0.1 * n, 30.0 * n),
            (0, instruction, 1500, 0.12 * n, 20 * n),
        ]
    return Profile.from_rows(rows)


def costs(profile: Profile, instruction: str, stage: int = 0) -> dict[int, tuple[int, int]]:
    """MHz -> (ns, 10 fJ)."""
    table = profile.table(stage, instruction)
    numbers = zip(table.time_ns.tolist(), table.energy_10fj.tolist(), strict=True)
    return dict(zip(table.frequency_mhz.tolist(), numbers, strict=True))


def split_document(stages: int = 2) -> dict[str, object]:
    """Forwards down, then for each stage backward_input up and backward_weight beside it."""
    last = stages - 1
    operations = [("f", s, "forward", f"f{s - 1}" if s else None) for s in range(stages)]
    for s in reversed(range(stages)):
        operations.append(("i", s, "backward_input", f"f{s}" if s == last else f"i{s + 1}"))
        operations.append(("w", s, "backward_weight", f"i{s}"))
    return {
        "schema": "envplan/dag/v1",
        "operations": [
            {"id": f"{kind}{s}", "stage": s, "instruction": instruction, "microbatch": 0}
            | ({"after": [after]} if after else {})
            for kind, s, instruction, after in operations
        ],
    }


def split_dag() -> Pipeline:
    return Pipeline.from_dag(split_document())


def rows_at(stage: int, instruction: str, *clocks: tuple[int, float, float]) -> list[Row]:
    """Rows of an operation at (MHz, s, J)."""
    return [(stage, instruction, *clock) for clock in clocks]


def test_recomputation_adds_the_forward_to_the_backward_at_each_clock() -> None:
    adjusted = two_clocks("forward", "backward").adjusted(recompute=True)
    assert costs(adjusted, "backward") == {
        1740: (300_000_000, 90 * ENERGY_UNITS_PER_J),
        1500: (360_000_000, 60 * ENERGY_UNITS_PER_J),
    }
    assert costs(adjusted, "forward")[1740] == (100_000_000, 30 * ENERGY_UNITS_PER_J)
    assert adjusted.adjustments == Adjustments(recompute=True)
    # It goes to the input half of a split backward.
    measured = two_clocks("forward", "backward_input", "backward_weight")
    adjusted = measured.adjusted(recompute=True)
    assert costs(adjusted, "backward_input")[1740] == (300_000_000, 90 * ENERGY_UNITS_PER_J)
    assert costs(adjusted, "backward_weight") == costs(measured, "backward_weight")
    # What was measured of it is taken rather than the forward.
    adjusted = two_clocks("forward", "backward", "recompute").adjusted(recompute=True)
    assert costs(adjusted, "backward")[1740] == (500_000_000, 150 * ENERGY_UNITS_PER_J)


def test_only_clocks_that_both_tables_have_survive_a_sum_which_is_sorted() -> None:
    forward = rows_at(0, "forward", (1740, 0.1, 30.0), (1500, 0.12, 20.0))
    backward = rows_at(0, "backward", (1500, 0.3, 50.0), (1260, 0.4, 40.0))
    adjusted = Profile.from_rows(forward + backward).adjusted(recompute=True)
    assert costs(adjusted, "backward") == {1500: (420_000_000, 70 * ENERGY_UNITS_PER_J)}
    rows = rows_at(0, "forward", (1740, 0.5, 30.0), (1500, 0.1, 20.0))
    rows += rows_at(0, "backward", (1740, 0.1, 30.0), (1500, 0.2, 50.0))
    table = Profile.from_rows(rows).adjusted(recompute=True).table(0, "backward")
    assert table.frequency_mhz.tolist() == [1500, 1740]


ALONE = [(0, name, 1740, 0.1, 30.0) for name in ("forward", "backward")]


@pytest.mark.parametrize(
    ("rows", "measured", "words"),
    [
        ([(*row[:3], 1.0, 24000.0) for row in ALONE], False, "forward together .* 46116"),
        ([*ALONE, (1, "forward", 1740, 0.1, 30.0), (1, "backward", 1500, 0.1, 30.0)], False,
         "stage 1: backward and forward have no frequency"),
        (ALONE, True, "includes recomputation already"),
    ],
)  # fmt: skip
def test_recomputation_that_cannot_be_added_is_refused(
    rows: list[Row], measured: bool, words: str
) -> None:
    metadata = ProfileMetadata(extra={INCLUDES_RECOMPUTATION: True} if measured else {})
    with pytest.raises(InputError, match=words):
        Profile.from_rows(rows, metadata=metadata).adjusted(recompute=True)


@given(profiles(2), st.floats(0.01, 0.99))
@settings(max_examples=40, deadline=None)
def test_the_parts_of_a_split_backward_add_up_to_it(profile: Profile, share: float) -> None:
    split = profile.adjusted(backward_input_share=share)
    for stage in range(2):
        first, second = (costs(split, f"backward_{half}", stage) for half in ("input", "weight"))
        whole = costs(profile, "backward", stage)
        assert {m: tuple(map(sum, zip(first[m], second[m], strict=True))) for m in first} == whole


def test_measured_parts_are_joined_for_a_schedule_with_whole_backwards() -> None:
    profile = two_clocks("forward", "backward_input", "backward_weight")
    with pytest.raises(InputError, match=r"Profile\.fitted"):
        trace_frontier(Pipeline("1f1b", 1, 2), profile)
    joined = profile.fitted(["forward", "backward"])
    assert joined.adjustments == Adjustments(joined_backward=True)
    assert costs(joined, "backward")[1740] == (500_000_000, 150 * ENERGY_UNITS_PER_J)
    assert trace_frontier(Pipeline("1f1b", 1, 2), joined).min_time == pytest.approx(1.2)


def test_python_says_how_to_derive_a_split_backward() -> None:
    with pytest.raises(InputError, match=r"Profile\.fitted"):
        trace_frontier(split_dag(), small_profile())


def test_nothing_is_derived_that_the_rows_already_say() -> None:
    split = ["forward", "backward_input", "backward_weight"]
    assert not small_profile().fitted(["forward", "backward"]).adjustments
    assert not two_clocks(*split).fitted(split).adjustments


@pytest.mark.parametrize("share", [0.0, 1.0, -1.0, float("nan")])
def test_a_share_must_lie_between_nothing_and_everything(share: float) -> None:
    with pytest.raises(InputError, match="backward_input_share should be"):
        small_profile().adjusted(backward_input_share=share)


def test_adjustments_replace_each_other_and_leave_the_file_alone(tmp_path: Path) -> None:
    profile = small_profile()
    twice = profile.adjusted(recompute=True).adjusted(recompute=True)
    assert costs(twice, "backward") == costs(profile.adjusted(recompute=True), "backward")
    assert twice.sha256 == profile.sha256
    assert not twice.adjusted().adjustments
    twice.save_csv(tmp_path / "again.csv")
    assert costs(Profile.read_csv(tmp_path / "again.csv"), "backward") == costs(profile, "backward")


@given(falling_profiles(2, max_options=6), st.booleans(), st.floats(0.0, 0.3))
@settings(max_examples=30, deadline=None)
def test_plans_from_derived_rows_are_proved_from_the_measured_ones(
    measured: Profile, recompute: bool, slowdown: float
) -> None:
    pipeline = split_dag()
    profile = measured.fitted({op.instruction for op in pipeline.operations}, recompute=recompute)
    plan = trace_frontier(pipeline, profile).plan(slowdown=slowdown)
    timeline = simulate(plan, measured)
    assert timeline.iteration_time == plan.iteration_time <= plan.target.deadline_s
    assert timeline.energy == plan.energy >= plan.energy_lower_bound
    assert any("assumed: backward_input takes 50%" in line for line in verify_plan(plan, measured))


def test_check_rejects_a_plan_whose_adjustments_were_changed() -> None:
    profile = small_profile()
    pipeline = Pipeline("1f1b", 2, 4)
    plan = trace_frontier(pipeline, profile.adjusted(recompute=True)).plan(slowdown=0.1)
    verify_plan(plan, profile)
    bare = plan.profile.model_copy(update={"adjustments": None})
    with pytest.raises(InputError, match="recomputed it is"):
        verify_plan(plan.model_copy(update={"profile": bare}), profile)
    with pytest.raises(InputError, match="in another way than for the plan"):
        simulate(plan, profile.adjusted(backward_input_share=0.5))


def test_apply_and_refine_derive_the_rows_again() -> None:
    profile = small_profile()
    plan = trace_frontier(split_dag(), profile.adjusted(True, 0.5)).plan(slowdown=0.1)
    applied = apply_plan(plan, profile, topology=Topology.for_job(plan.job))
    assert applied.iteration_time_s <= plan.iteration_time
    planned = plan.stages[0][1]
    times = ["backward_input", 0, planned.frequency_mhz, 1, 2 * planned.time_s, 0.0]
    line = {"event": "step", "rank": 0, "stage": 0, "step": 3, "operations": [times]}
    step = parse_line(line)
    assert isinstance(step, LoggedStep)
    drifts = measure_drift(plan, profile, [step])
    assert drifts[0].factor == pytest.approx(2.0)
    refined = rescale(profile.adjusted(True, 0.5), drifts)
    assert refined.has(0, "backward_input")
    assert not refined.adjustments
    with pytest.raises(InputError, match="includes recomputation already"):
        refined.adjusted(recompute=True)


def test_solve_says_what_it_assumed_and_check_derives_it_again(tmp_path: Path) -> None:
    small_profile().save_csv(tmp_path / "profile.csv")
    (tmp_path / "split.json").write_text(json.dumps(split_document()))
    solved = envplan("solve", "--dag", "split.json", "--recompute", cwd=tmp_path)
    assert solved.code == 0, solved.err
    assert "assumed: backward_input takes 50%" in solved.out
    assert "with recomputation" in solved.out
    stated = json.loads((tmp_path / "plan.json").read_text())["profile"]["adjustments"]
    assert stated == {
        "recompute": True,
        "backward_input_share": 0.5,
        "joined_backward": False,
        "smoothed": False,
    }
    for command in (("check",), ("simulate",), ("apply",)):
        again = envplan(*command, "plan.json", cwd=tmp_path)
        assert again.code == 0, again.err
    text = (tmp_path / "plan.json").read_text().replace('"recompute": true', '"recompute": false')
    (tmp_path / "plan.json").write_text(text)
    assert_refused(envplan("check", "plan.json", cwd=tmp_path), 2, "recomputed it is")
