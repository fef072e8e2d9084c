"""Work of pipeline stages and the split of layers over them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from fractions import Fraction

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
from envplan.profiling.workloads import Model, StageWork, Work, partition, stage_works


def stages(num_stages: int, **arguments: int) -> list[StageWork]:
    return stage_works(
        GPT3_1_3B,
        num_stages=num_stages,
        microbatch_size=arguments.get("microbatch_size", 4),
        tensor_parallel=arguments.get("tensor_parallel", 1),
        cost=lambda work: work.flops / 100e12 + work.traffic / 600e9,
    )


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


def layers(number: int, *, first: float = 0.0, last: float = 0.0) -> list[float]:
    costs = [1.0] * number
    costs[0] += first
    costs[-1] += last
    return costs


def test_layers_split_evenly_where_nothing_is_added() -> None:
    assert partition(layers(24), 4) == [6, 6, 6, 6]
    assert partition(layers(24), 1) == [24]
    assert partition(layers(7), 2) == [3, 4]


def test_heavy_head_takes_layers_off_the_last_stage() -> None:
    assert partition(layers(24, last=1.7), 4) == [6, 6, 7, 5]
    assert partition(layers(24, last=1.7), 8) == [3, 3, 3, 3, 3, 3, 4, 2]


def test_unequal_layers_split_by_cost_and_not_by_number() -> None:
    assert partition([1, 1, 1, 1, 4, 4], 3) == [4, 1, 1]


def test_of_equally_imbalanced_splits_the_most_alike_wins() -> None:
    assert partition(layers(7), 4) == [1, 2, 2, 2]


@pytest.mark.parametrize("num_stages", [0, -1, 25])
def test_impossible_number_of_stages_is_refused(num_stages: int) -> None:
    with pytest.raises(InputError, match="choose 1 to 24 stages"):
        stages(num_stages)


def test_every_layer_lands_on_one_stage() -> None:
    for num_stages in range(1, 25):
        assert sum(stage.num_layers for stage in stages(num_stages)) == 24


@pytest.mark.parametrize("num_stages", [1, 2, 4, 8, 24])
def test_total_work_does_not_depend_on_the_split(num_stages: int) -> None:
    whole = stages(1)[0]
    parts = stages(num_stages)
    assert sum(s.forward.flops for s in parts) == pytest.approx(whole.forward.flops)
    assert sum(s.forward.traffic for s in parts) == pytest.approx(whole.forward.traffic)
    assert sum(s.backward.traffic for s in parts) == pytest.approx(whole.backward.traffic)


def test_forward_flops_are_those_of_the_published_formula() -> None:
    b, s, h, layers, v = 4, 2048, 2048, 24, 50304
    expected = 24 * b * s * layers * h**2 * (1 + s / (6 * h)) + 2 * b * s * h * v
    assert stages(1)[0].forward.flops == pytest.approx(expected)


def test_backward_computes_twice_what_the_forward_does() -> None:
    for stage in stages(4):
        assert stage.backward.flops == 2 * stage.forward.flops
        assert stage.backward.traffic > stage.forward.traffic


def test_embedding_and_head_make_the_outer_stages_different() -> None:
    first, second, third, last = stages(4)
    assert first.num_layers == second.num_layers
    assert first.forward.flops == second.forward.flops
    assert first.forward.traffic > second.forward.traffic
    per_layer = third.forward.flops / third.num_layers
    assert last.forward.flops - last.num_layers * per_layer > per_layer


def test_work_grows_with_the_microbatch_and_shrinks_with_tensor_parallelism() -> None:
    one, two = stages(1)[0], stages(1, microbatch_size=8)[0]
    assert two.forward.flops == 2 * one.forward.flops
    half = stages(1, tensor_parallel=2)[0]
    assert half.forward.flops == pytest.approx(one.forward.flops / 2)
    assert one.forward.traffic / 2 < half.forward.traffic < one.forward.traffic


def test_longer_sequences_cost_more_than_in_proportion() -> None:
    longer = replace(GPT3_1_3B, sequence_length=4096)
    [double] = stage_works(longer, num_stages=1, microbatch_size=4, cost=lambda work: work.flops)
    assert double.forward.flops > 2 * stages(1)[0].forward.flops


def test_works_add_up() -> None:
    assert Work(1.0, 2.0) + Work(3.0, 4.0) == Work(4.0, 6.0)


def whole(model: Model, **arguments: object) -> StageWork:
    [stage] = stage_works(
        model,
        num_stages=1,
        microbatch_size=1,
        cost=lambda work: work.flops + work.traffic,
        **arguments,  # type: ignore[arg-type]
    )
    return stage


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


def test_single_precision_moves_twice_the_bytes() -> None:
    half, single = whole(GPT3_1_3B), whole(GPT3_1_3B, precision="single")
    assert single.forward == Work(half.forward.flops, 2 * half.forward.traffic)


def test_fused_attention_moves_less_and_computes_the_same() -> None:
    fused, plain = whole(GPT3_175B), whole(replace(GPT3_175B, fused_attention=False))
    assert fused.forward.flops == plain.forward.flops
    assert fused.forward.traffic < plain.forward.traffic


def test_model_without_vocabulary_has_equal_units() -> None:
    units = BERT_336M.units(4, 1)
    assert len(units) == 24
    assert len(set(units)) == 1


def test_decoder_layer_of_t5_does_more_than_an_encoder_layer() -> None:
    units = T5_3B.units(4, 1)
    assert len(units) == 48
    encoder, decoder = units[1], units[25]
    h, inner, tokens = 1024, 32 * 128, 4 * 512
    cross = 8 * tokens * h * inner + 4 * tokens * 512 * inner
    assert decoder.forward.flops - encoder.forward.flops == pytest.approx(cross)
    assert decoder.forward.traffic > encoder.forward.traffic


def test_t5_puts_more_encoder_than_decoder_layers_on_a_stage() -> None:
    first, *_, last = stage_works(
        T5_3B, num_stages=4, microbatch_size=4, cost=lambda work: work.flops
    )
    assert first.num_layers > last.num_layers


def test_resnet_152_computes_what_is_published_of_it_at_full_resolution() -> None:
    # 11.5 billion products at 224 x 224 (He et al., 2016) with stem and pooling, which divide
    # each side by 4; EnvPipe's stem does not.
    forward = whole(replace(RESNET_152, downsampling_stem=True)).forward
    assert forward.flops / 2 == pytest.approx(11.5e9, rel=0.02)
    assert whole(RESNET_152).forward.flops == pytest.approx(16 * forward.flops, rel=0.05)


def test_wide_resnet_has_one_and_a_half_billion_weights() -> None:
    # Two microbatches tell traffic of activations, which doubles, from that of weights.
    one, two = (
        whole(WIDE_RESNET_101_8),
        stage_works(
            WIDE_RESNET_101_8, num_stages=1, microbatch_size=2, cost=lambda work: work.flops
        )[0],
    )
    weight_bytes = 2 * one.forward.traffic - two.forward.traffic
    assert weight_bytes / 2 == pytest.approx(1.5e9, rel=0.05)
    assert one.num_layers == 33


def test_resnet_is_not_split_over_tensor_parallel_gpus() -> None:
    with pytest.raises(InputError, match="leave --tp"):
        RESNET_152.units(1, 2)


@pytest.mark.parametrize("model", [BERT_336M, GPT3_175B, T5_3B, RESNET_152])
def test_models_describe_their_sizes(model: Model) -> None:
    assert any(character.isdigit() for character in model.describe())
    assert not model.describe().endswith(".")
