from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envplan.devices import spaced_clocks
from envplan.errors import InputError
from envplan.profile import Profile
from envplan.profiling.modelled import modelled_profile
from envplan.profiling.models import WORKLOADS, model_of
from envplan.profiling.training_job import TrainingJob
from envplan.profiling.transformer import TransformerModel

NAME = "a40-gpt3-1.3b-4stage"
JOB = TrainingJob(model=WORKLOADS["gpt"], num_stages=4)


def modelled(step: int = 0, **changes: Any) -> Profile:
    return modelled_profile(replace(JOB, **changes), "a40", name=NAME, step=step)


def rows(profile: Profile, instruction: str, stage: int = 1) -> dict[int, tuple[int, int]]:
    """Time (ns) and energy (10 fJ) by clock."""
    return {
        clock: (ns, energy_10fj)
        for clock, _, ns, energy_10fj in profile.table(stage, instruction).options()
    }


def test_without_a_step_the_rows_are_those_of_the_built_in_profile(tmp_path: Path) -> None:
    """Those of waiting, too: it is the same file."""
    made, built = modelled(), Profile.builtin(NAME)
    made.save_csv(tmp_path / "made.csv")
    assert built.path is not None
    assert (tmp_path / "made.csv").read_text() == built.path.read_text()
    assert made.blocking_power_w == built.blocking_power_w


def test_the_parts_of_a_backward_take_what_the_whole_takes() -> None:
    split, whole = modelled(split_backward=True), modelled()
    assert split.instructions == ("forward", "backward_input", "backward_weight")
    assert rows(split, "forward") == rows(whole, "forward")
    for stage in range(4):
        inputs, weights = (rows(split, f"backward_{of}", stage) for of in ("input", "weight"))
        for clock, (time_ns, energy_10fj) in rows(whole, "backward", stage).items():
            assert inputs[clock][0] + weights[clock][0] == pytest.approx(time_ns, abs=2)
            assert inputs[clock][1] + weights[clock][1] == pytest.approx(energy_10fj, abs=3e9)
    assert any("backward is split" in text for text in split.metadata.extra["assumptions"])


def test_a_step_keeps_some_of_the_rows() -> None:
    few, all_of_them = rows(modelled(100), "forward"), rows(modelled(), "forward")
    assert few.items() < all_of_them.items()
    assert max(few) == 1740


def test_sizes_left_out_leave_the_workload_as_it_is() -> None:
    assert all(model_of(name) is model for name, model in WORKLOADS.items())


def test_a_new_width_keeps_the_width_of_a_head() -> None:
    model = model_of("gpt", hidden_size=1024)
    assert isinstance(model, TransformerModel)
    assert model.num_heads == 8


@pytest.mark.parametrize(
    ("workload", "sizes", "words"),
    [
        ("gpt", {"image_size": 224}, "--image-size does not go with workload gpt"),
        ("wide-resnet", {"heads": 2}, "--heads does not go with workload wide-resnet"),
        ("t5", {"width_factor": 2}, "--width-factor does not go with workload t5"),
        ("bert", {"hidden_size": 1000, "heads": 3}, "does not divide into 3 heads"),
        ("wide-resnet", {"image_size": 8}, "--image-size must be 32 to"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(
    workload: str, sizes: dict[str, int], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        model_of(workload, **sizes)


@given(st.lists(st.integers(1, 3000), min_size=1, unique=True), st.integers(0, 500))
def test_spaced_clocks_begin_at_the_highest_and_keep_their_distance(
    clocks: list[int], step: int
) -> None:
    taken = spaced_clocks(clocks, step)
    assert taken[0] == max(clocks)
    assert set(taken) <= set(clocks)
    assert all(a - b >= max(step, 1) for a, b in pairwise(taken))
    if step == 0:
        assert sorted(taken) == sorted(clocks)
