from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envplan.errors import InputError
from envplan.profile import BLOCKING, Profile
from envplan.profiling.modelled import (
    WORKLOADS,
    ModelledJob,
    Sizes,
    model_of,
    modelled_profile,
    spaced_clocks,
)
from envplan.profiling.workloads import TransformerModel

JOB = ModelledJob(
    name="a40-gpt3-1.3b-4stage",
    gpu="a40",
    model=WORKLOADS["gpt"],
    num_stages=4,
    num_microbatches=32,
)


def rows(profile: Profile, instruction: str) -> list[tuple[int, int, int]]:
    table = profile.table(1, instruction)
    return list(
        zip(
            table.frequency_mhz.tolist(),
            table.time_ns.tolist(),
            table.energy_fj.tolist(),
            strict=True,
        )
    )


def test_without_a_step_the_rows_are_those_of_the_built_in_profile() -> None:
    made, built = modelled_profile(JOB), Profile.builtin(JOB.name)
    for instruction in ("forward", "backward", BLOCKING):
        assert rows(made, instruction) == rows(built, instruction)


def test_the_parts_of_a_backward_take_what_the_whole_takes() -> None:
    split, whole = modelled_profile(replace(JOB, split_backward=True)), modelled_profile(JOB)
    assert split.instructions == ("forward", "backward_input", "backward_weight")
    assert rows(split, "forward") == rows(whole, "forward")
    for stage in range(4):
        one = at_clocks(whole, stage, "backward")
        inputs = at_clocks(split, stage, "backward_input")
        weights = at_clocks(split, stage, "backward_weight")
        for clock, (time_ns, energy_fj) in one.items():
            assert inputs[clock][0] + weights[clock][0] == pytest.approx(time_ns, abs=2)
            assert inputs[clock][1] + weights[clock][1] == pytest.approx(energy_fj, abs=3e9)
    assert any("backward is split" in text for text in split.metadata.extra["assumptions"])


def at_clocks(profile: Profile, stage: int, instruction: str) -> dict[int, tuple[int, int]]:
    table = profile.table(stage, instruction)
    values = zip(table.time_ns.tolist(), table.energy_fj.tolist(), strict=True)
    return dict(zip(table.frequency_mhz.tolist(), values, strict=True))


def test_a_step_keeps_some_of_the_rows() -> None:
    few, all_of_them = modelled_profile(JOB, step=100), modelled_profile(JOB)
    assert set(rows(few, "forward")) < set(rows(all_of_them, "forward"))
    assert max(rows(few, "forward"))[0] == 1740


def test_sizes_left_out_leave_the_workload_as_it_is() -> None:
    for name, model in WORKLOADS.items():
        assert model_of(name, Sizes()) is model


def test_a_new_width_keeps_the_width_of_a_head() -> None:
    model = model_of("gpt", Sizes(hidden_size=1024))
    assert isinstance(model, TransformerModel)
    assert model.num_heads == 8


@pytest.mark.parametrize(
    ("workload", "sizes", "words"),
    [
        ("gpt", Sizes(image_size=224), "--image-size does not go with workload gpt"),
        ("wide-resnet", Sizes(heads=2), "--heads does not go with workload wide-resnet"),
        ("t5", Sizes(width_factor=2), "--width-factor does not go with workload t5"),
        ("bert", Sizes(layers=0), "--layers must be 1 to 1000"),
        ("bert", Sizes(hidden_size=1000, heads=3), "does not divide into 3 heads"),
        ("wide-resnet", Sizes(image_size=8), "--image-size must be 32 to"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(workload: str, sizes: Sizes, words: str) -> None:
    with pytest.raises(InputError, match=words):
        model_of(workload, sizes)


@given(st.lists(st.integers(1, 3000), min_size=1, unique=True), st.integers(0, 500))
def test_spaced_clocks_begin_at_the_highest_and_keep_their_distance(
    clocks: list[int], step: int
) -> None:
    taken = spaced_clocks(tuple(clocks), step)
    assert taken[0] == max(clocks)
    assert set(taken) <= set(clocks)
    assert all(a - b >= max(step, 1) for a, b in pairwise(taken))
    if step == 0:
        assert sorted(taken) == sorted(clocks)
