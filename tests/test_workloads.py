"""Work of pipeline stages and the split of layers over them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from fractions import Fraction
from functools import reduce
from operator import add
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envplan.errors import InputError
from envplan.profiling.models import (
    BERT_336M,
    GPT3_1_3B,
    GPT3_175B,
    RESNET_152,
    T5_3B,
    WIDE_RESNET_101_8,
)
from envplan.profiling.partition import partition
from envplan.profiling.training_job import Model, TrainingJob
from envplan.profiling.work import ModuleWork, StageWork


def stages(num_stages: int, **more: Any) -> list[StageWork]:
    job = TrainingJob(model=GPT3_1_3B, num_stages=num_stages, **more)
    return job.stages(lambda work: work.flops / 100e12 + work.traffic / 600e9)


def whole(model: Model, **more: Any) -> ModuleWork:
    job = TrainingJob(model=model, num_stages=1, **{"microbatch_size": 1, **more})
    return job.stages(lambda work: work.flops)[0].whole


def compositions(total: int, parts: int) -> list[list[int]]:
    cuts = itertools.combinations(range(1, total), parts - 1)
    return [[high - low for low, high in itertools.pairwise((0, *cut, total))] for cut in cuts]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=9), st.integers(1, 9))
def test_no_split_is_less_imbalanced(costs: list[int], parts: int) -> None:
    def imbalance(split: list[int]) -> Fraction:
        ends = list(itertools.accumulate(split))
        sums = [sum(costs[end - count : end]) for end, count in zip(ends, split, strict=True)]
        return Fraction(max(sums), min(sums))

    if parts > len(costs):
        with pytest.raises(InputError, match=f"{len(costs)} layers cannot be split"):
            partition(costs, parts)
        return
    found = partition(costs, parts)
    assert sum(found) == len(costs)
    assert len(found) == parts
    assert min(found) >= 1
    best = min(map(imbalance, compositions(len(costs), parts)))
    assert float(imbalance(found)) == pytest.approx(float(best), rel=1e-9)


def layers(number: int, *, last: float = 0.0) -> list[float]:
    return [*[1.0] * (number - 1), 1.0 + last]


@pytest.mark.parametrize(
    ("costs", "num_stages", "expected"),
    [
        (layers(24), 4, [6, 6, 6, 6]),
        (layers(24), 1, [24]),
        (layers(7), 2, [3, 4]),
        (layers(7), 4, [1, 2, 2, 2]),  # of equally imbalanced splits the most alike
        (layers(24, last=1.7), 4, [6, 6, 7, 5]),
        (layers(24, last=1.7), 8, [3, 3, 3, 3, 3, 3, 4, 2]),
        ([1, 1, 1, 1, 4, 4], 3, [4, 1, 1]),
    ],
)
def test_layers_are_split_by_cost(costs: list[float], num_stages: int, expected: list[int]) -> None:
    assert partition(costs, num_stages) == expected


@pytest.mark.parametrize("num_stages", [0, -1, 25])
def test_impossible_number_of_stages_is_refused(num_stages: int) -> None:
    with pytest.raises(InputError, match="choose 1 to 24 stages"):
        stages(num_stages)


@pytest.mark.parametrize("num_stages", [2, 4, 8, 24])
def test_total_work_does_not_depend_on_the_split(num_stages: int) -> None:
    one, parts = whole(GPT3_1_3B, microbatch_size=4), stages(num_stages)
    assert sum(stage.num_layers for stage in parts) == 24
    for find in (
        lambda work: work.forward.flops,
        lambda work: work.forward.traffic,
        lambda work: work.backward.traffic,
    ):
        assert sum(find(stage.whole) for stage in parts) == pytest.approx(find(one))


def test_forward_flops_are_those_of_the_published_formula() -> None:
    b, s, h, layers, v = 4, 2048, 2048, 24, 50304
    expected = 24 * b * s * layers * h**2 * (1 + s / (6 * h)) + 2 * b * s * h * v
    assert whole(GPT3_1_3B, microbatch_size=b).forward.flops == pytest.approx(expected)


def test_backward_computes_twice_what_the_forward_does() -> None:
    for stage in stages(4):
        assert stage.whole.backward.flops == 2 * stage.whole.forward.flops
        assert stage.whole.backward.traffic > stage.whole.forward.traffic


def test_embedding_and_head_make_the_outer_stages_different() -> None:
    made = stages(4)
    assert made[0].num_layers == made[1].num_layers
    first, second, third, last = (stage.whole.forward for stage in made)
    assert first.flops == second.flops
    assert first.traffic > second.traffic
    per_layer = third.flops / made[2].num_layers
    assert last.flops - made[3].num_layers * per_layer > per_layer


def test_work_grows_with_the_microbatch_and_shrinks_with_tensor_parallelism() -> None:
    one, two, half = (
        whole(GPT3_1_3B, **more).forward
        for more in ({}, {"microbatch_size": 2}, {"tensor_parallel": 2})
    )
    assert two.flops == 2 * one.flops
    assert half.flops == pytest.approx(one.flops / 2)
    assert one.traffic / 2 < half.traffic < one.traffic


def test_recomputation_does_the_forward_over_again() -> None:
    plain, again = whole(GPT3_1_3B), whole(GPT3_1_3B, recompute=True)
    assert again.forward == plain.forward
    assert again.backward.flops == plain.backward.flops + plain.forward.flops
    assert again.backward.traffic == pytest.approx(plain.backward.traffic + plain.forward.traffic)


@pytest.mark.parametrize("model", [GPT3_1_3B, T5_3B, WIDE_RESNET_101_8])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_parts_of_a_backward_make_the_whole(model: Model, recompute: bool) -> None:
    stage = whole(model, recompute=recompute)
    assert stage.backward_input + stage.backward_weight == stage.backward
    again = stage.forward.flops if recompute else 0.0
    assert stage.backward_weight.flops <= stage.backward_input.flops - again
    assert 0 < stage.backward_weight.traffic < stage.backward.traffic


def test_only_attentions_core_makes_the_parts_of_a_backward_differ() -> None:
    stage = whole(replace(GPT3_1_3B, vocabulary_size=0))
    core = 4 * 2048**2 * 2048 * 24
    difference = stage.backward_input.flops - stage.backward_weight.flops
    assert difference == pytest.approx(2 * core, rel=1e-12)


def test_fused_attention_moves_less_and_computes_the_same() -> None:
    fused, plain = whole(GPT3_175B), whole(replace(GPT3_175B, fused_attention=False))
    assert fused.forward.flops == plain.forward.flops
    assert fused.forward.traffic < plain.forward.traffic


def test_model_without_vocabulary_has_equal_units() -> None:
    units = BERT_336M.units(4, 1)
    assert len(units) == 24
    assert all(unit == units[0] for unit in units)


def test_decoder_layer_of_t5_does_more_than_an_encoder_layer() -> None:
    units = T5_3B.units(4, 1)
    assert len(units) == 48
    encoder, decoder = (reduce(add, units[number]) for number in (1, 25))
    h, inner, tokens = 1024, 32 * 128, 4 * 512
    cross = 8 * tokens * h * inner + 4 * tokens * 512 * inner
    assert decoder.forward.flops - encoder.forward.flops == pytest.approx(cross)
    assert decoder.forward.traffic > encoder.forward.traffic


def test_resnet_152_computes_what_is_published_of_it_at_full_resolution() -> None:
    # 11.5 billion products at 224 x 224 (He et al., 2016) with stem and pooling, which divide
    # each side by 4; EnvPipe's stem does not.
    forward = whole(replace(RESNET_152, downsampling_stem=True)).forward
    assert forward.flops / 2 == pytest.approx(11.5e9, rel=0.02)
    assert whole(RESNET_152).forward.flops == pytest.approx(16 * forward.flops, rel=0.05)


def test_wide_resnet_has_one_and_a_half_billion_weights() -> None:
    # Two microbatches tell traffic of activations, which doubles, from that of weights.
    one, two = (whole(WIDE_RESNET_101_8, microbatch_size=n).forward for n in (1, 2))
    assert (2 * one.traffic - two.traffic) / 2 == pytest.approx(1.5e9, rel=0.05)
    assert len(WIDE_RESNET_101_8.units(1, 1)) == 33
