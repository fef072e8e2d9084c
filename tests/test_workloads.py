"""Work of pipeline stages and the split of layers over them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envplan.errors import InputError
from envplan.profiling.workloads import GPT3_1_3B, StageWork, Work, partition, stage_works


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


@given(
    st.integers(1, 9),
    st.integers(1, 9),
    st.floats(0, 4),
    st.floats(0, 4),
)
def test_no_split_is_less_imbalanced(layers: int, parts: int, first: float, last: float) -> None:
    def imbalance(split: list[int]) -> float:
        costs = [float(count) for count in split]
        costs[0] += first
        costs[-1] += last
        return max(costs) / min(costs)

    if parts > layers:
        with pytest.raises(InputError, match=f"{layers} layers cannot be split"):
            partition(layers, parts, layer=1.0, first=first, last=last)
        return
    found = partition(layers, parts, layer=1.0, first=first, last=last)
    assert sum(found) == layers
    assert len(found) == parts
    assert min(found) >= 1
    assert imbalance(found) == min(map(imbalance, compositions(layers, parts)))


def test_layers_split_evenly_where_nothing_is_added() -> None:
    assert partition(24, 4, layer=1.0) == [6, 6, 6, 6]
    assert partition(24, 1, layer=1.0) == [24]
    assert partition(7, 2, layer=1.0) == [3, 4]


def test_heavy_head_takes_layers_off_the_last_stage() -> None:
    assert partition(24, 4, layer=1.0, last=1.7) == [6, 6, 7, 5]
    assert partition(24, 8, layer=1.0, last=1.7) == [3, 3, 3, 3, 3, 3, 4, 2]


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
