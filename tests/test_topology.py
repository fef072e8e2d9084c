from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envplan.enforce.topology import Topology
from envplan.errors import InputError
from envplan.plan import Job


def job(gpus_per_stage: int = 1, replicas: int = 1, stages: int = 2) -> Job:
    return Job(
        schedule="1f1b",
        stages=stages,
        microbatches=4,
        chunks=1,
        p2p_latency_s=0.0,
        gpus_per_stage=gpus_per_stage,
        replicas=replicas,
        blocking_power_w=[70.0] * stages,
        blocking_power_source="default",
    )


@pytest.mark.parametrize(
    ("planned", "given", "sizes"),
    [
        ((4, 3), {}, (4, 1, 3)),
        ((4, 3), {"cp": 4}, (1, 4, 3)),
        ((4, 3), {"tp": 2}, (2, 2, 3)),
        # A plan for one replica or one GPU a stage does for any number.
        ((2, 1), {"dp": 3}, (2, 1, 3)),
        ((1, 1), {"tp": 4, "cp": 2, "dp": 3}, (4, 2, 3)),
        ((1, 1), {"cp": 4}, (1, 4, 1)),
    ],
)
def test_sizes_default_to_those_of_the_job(
    planned: tuple[int, int], given: dict[str, int], sizes: tuple[int, int, int]
) -> None:
    topology = Topology.for_job(job(*planned), **given)
    assert (topology.tp, topology.cp, topology.dp) == sizes
    assert topology.world_size == 2 * math.prod(sizes)


@pytest.mark.parametrize(
    ("order", "stages", "pipelines"),
    [
        ("tp-cp-ep-dp-pp", [0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 0, 0, 1, 1]),
        ("tp-cp-ep-pp-dp", [0, 0, 1, 1, 0, 0, 1, 1], [0, 0, 0, 0, 1, 1, 1, 1]),
        ("pp-tp-dp", [0, 1, 0, 1, 0, 1, 0, 1], [0, 0, 0, 0, 1, 1, 1, 1]),
        ("dp-tp-pp", [0, 0, 0, 0, 1, 1, 1, 1], [0, 1, 0, 1, 0, 1, 0, 1]),
        ("dp-pp-tp", [0, 0, 1, 1, 0, 0, 1, 1], [0, 1, 0, 1, 0, 1, 0, 1]),
    ],
)
def test_rank_order_decides_which_rank_runs_which_stage_of_which_pipeline(
    order: str, stages: list[int], pipelines: list[int]
) -> None:
    topology = Topology.for_job(job(2, 2), rank_order=order)
    assert [topology.stage_of(rank) for rank in range(8)] == stages
    assert topology.pipelines == pipelines
    assert Topology.for_job(job(), rank_order="pp").pipelines == [0, 0]


@given(
    sizes=st.tuples(*[st.integers(1, 4)] * 3),
    stages=st.integers(1, 4),
    order=st.permutations(["tp", "cp", "ep", "dp", "pp"]),
)
def test_any_order_gives_every_stage_the_same_number_of_ranks(
    sizes: tuple[int, int, int], stages: int, order: list[str]
) -> None:
    tp, cp, dp = sizes
    topology = Topology.for_job(
        job(tp * cp, dp, stages), tp=tp, cp=cp, dp=dp, rank_order="-".join(order)
    )
    counts = Counter(map(topology.stage_of, range(topology.world_size)))
    assert counts == dict.fromkeys(range(stages), tp * cp * dp)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"tp": 0}, ["--tp must be at least 1, not 0"]),
        ({"cp": 0}, ["--cp must be at least 1"]),
        ({"dp": -1}, ["--dp must be at least 1, not -1"]),
        ({"tp": 8}, ["8 GPUs a stage", "for 4", "must be 4", "again with --tp 8 --cp 1"]),
        ({"tp": 3}, ["3 GPUs a stage", "must be 4"]),
        ({"tp": 2, "cp": 1}, ["2 GPUs a stage", "for 4"]),
        ({"cp": 3}, ["3 GPUs a stage"]),
        ({"dp": 2}, ["--dp 2", "for --dp 3", "again with --dp 2"]),
        ({"rank_order": "tp-dp"}, ["leaves out pp", "2 ranks"]),
        ({"rank_order": "tp-tp-dp-pp"}, ["names tp twice"]),
        ({"rank_order": "tp,dp,pp"}, ["'tp,dp,pp'", "once each"]),
        ({"rank_order": ""}, ["''", "once each"]),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_what_would(
    sizes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(InputError) as refused:
        Topology.for_job(job(4, 3), **sizes)
    for word in words:
        assert word in str(refused.value)
