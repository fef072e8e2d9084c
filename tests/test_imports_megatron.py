"""Megatron's configurations as schedules: objects, and files of NeMo and Megatron-Bridge."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cli_helpers import envplan
from envplan.errors import InputError
from envplan.pipeline import Pipeline
from envplan.pipeline.imports import layers_per_stage, read_megatron_file

#: As Megatron-Bridge writes its run_config.yaml.
BRIDGE = """
model:
  _target_: megatron.bridge.models.gpt_provider.GPTModelProvider
  num_layers: 30
  pipeline_model_parallel_size: 4
  virtual_pipeline_model_parallel_size: 2
  microbatch_group_size_per_vp_stage: 6
  account_for_embedding_in_pipeline_split: true
  account_for_loss_in_pipeline_split: true
  overlap_moe_expert_parallel_comm: false
  overlap_p2p_comm: true
train:
  micro_batch_size: 1
  global_batch_size: 64
dataset:
  data_parallel_size: 1
"""
#: The names that decide in the configuration of Kareus's artifact, which is NeMo's.
NEMO = """
trainer: {devices: 8, num_nodes: 2}
model:
  micro_batch_size: 8
  global_batch_size: 64
  tensor_model_parallel_size: 8
  pipeline_model_parallel_size: 2
  context_parallel_size: 1
  virtual_pipeline_model_parallel_size: null
  num_layers_in_first_pipeline_stage: 15
  num_layers: 28
"""
TWO = {"pipeline_model_parallel_size": 2}


def test_a_file_of_megatron_bridge_is_a_schedule(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    (tmp_path / "run_config.yaml").write_text(BRIDGE)
    done = envplan(
        *["schedule", "import", "run_config.yaml", "--format", "megatron"],
        *["--microbatches", "16", "--json"],
        cwd=tmp_path,
    )
    said = json.loads(done.out)
    assert (said["known_as"], said["microbatch_group"]) == ("interleaved", 6)
    assert said["layers_per_stage"] == [3, 4, 4, 4, 4, 4, 4, 3]
    assert said["overlap_p2p"]
    written = Pipeline.from_dag_file(tmp_path / "pipeline.dag.json")
    assert (
        written.operations
        == Pipeline("interleaved", 4, 16, num_chunks=2, microbatch_group=6).operations
    )
    refused = envplan("schedule", "import", "run_config.yaml", "--format", "megatron", cwd=tmp_path)
    assert refused.code == 2
    assert "give --microbatches M" in refused.err


def test_batch_sizes_and_gpus_tell_the_microbatches(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    (tmp_path / "conf.yaml").write_text(NEMO)
    schedule = read_megatron_file(tmp_path / "conf.yaml")
    assert (schedule.known_as, schedule.num_microbatches) == ("1f1b", 8)
    assert schedule.facts == {"layers_per_stage": [15, 13], "overlap_p2p": False}


def test_an_object_in_memory_is_a_schedule() -> None:
    config = SimpleNamespace(
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        microbatch_group_size_per_vp_stage=3,
    )
    assert Pipeline.from_megatron(config, 5).microbatch_group == 3


@pytest.mark.parametrize(
    ("stages", "config", "layers"),
    [
        (4, {"num_layers": 8}, [2, 2, 2, 2]),
        (
            4,
            {
                "num_layers": 14,
                "num_layers_in_first_pipeline_stage": 4,
                "num_layers_in_last_pipeline_stage": 2,
                "virtual_pipeline_model_parallel_size": 2,
            },
            [2, 2, 2, 1] * 2,
        ),
        (2, {"num_layers": 7, "account_for_loss_in_pipeline_split": True}, [4, 3]),
        (2, {}, []),
        (1, {"pipeline_model_parallel_layout": "Ett,|(tt|)*2,t|mL"}, [2, 2, 2, 1, 0]),
        (1, {"pipeline_model_parallel_layout": [["embedding", "decoder"], ["loss"]]}, [1, 0]),
    ],
)
def test_layers_are_shared_out_as_megatron_does(
    stages: int, config: dict[str, Any], layers: list[int]
) -> None:
    assert layers_per_stage({"pipeline_model_parallel_size": stages, **config}) == layers


def test_layers_are_those_that_megatron_builds() -> None:
    block = pytest.importorskip("megatron.core.transformer.transformer_block")
    config = SimpleNamespace(
        num_layers=22,
        pipeline_model_parallel_size=4,
        virtual_pipeline_model_parallel_size=2,
        num_layers_in_first_pipeline_stage=None,
        num_layers_in_last_pipeline_stage=None,
        account_for_embedding_in_pipeline_split=True,
        account_for_loss_in_pipeline_split=True,
        pipeline_model_parallel_layout=None,
    )
    built = [
        block.get_num_layers_to_build(config, vp_stage=chunk, pp_rank=rank)
        for chunk in range(2)
        for rank in range(4)
    ]
    assert layers_per_stage(config) == built


@pytest.mark.parametrize("layout", ["Et*3|(tt|)*5t*2|tL", "E|t|(t*2|)*5tL", "Ettt|tt|tt|ttL"])
def test_layouts_are_those_that_megatron_builds(layout: str) -> None:
    module = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    theirs = module.PipelineParallelLayerLayout(layout, 4)
    config = {"pipeline_model_parallel_size": 4, "pipeline_model_parallel_layout": theirs}
    built = [
        [kind.name for kind in theirs.layout[rank][chunk]].count("decoder")
        for chunk in range(theirs.virtual_pipeline_model_parallel_size)
        for rank in range(4)
    ]
    assert layers_per_stage(config) == built
    chunks = theirs.virtual_pipeline_model_parallel_size
    assert Pipeline.from_megatron(config, 8).num_chunks == chunks


def test_order_of_groups_is_megatrons() -> None:
    schedules = pytest.importorskip("megatron.core.pipeline_parallel.schedules")
    for ranks, microbatches, chunks, group in ((2, 5, 2, 3), (4, 14, 3, 5), (3, 9, 2, 9)):
        table = schedules.get_schedule_table(microbatches, chunks, group)
        shape = (ranks, microbatches)
        pipeline = Pipeline("interleaved", *shape, num_chunks=chunks, microbatch_group=group)
        for rank in range(ranks):
            mine = [op for op in pipeline.operations if op.stage == rank]
            for instruction in ("forward", "backward"):
                blocks = [
                    (op.microbatch, op.chunk if instruction == "forward" else chunks - 1 - op.chunk)
                    for op in mine
                    if op.instruction == instruction
                ]
                assert blocks == table
            ahead = min(2 * (ranks - rank - 1) + (chunks - 1) * group, len(table))
            first = [op.instruction for op in mine].index("backward")
            assert first == min(ahead + 1, len(table))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "says no pipeline_model_parallel_size"),
        ({"pipeline_model_parallel_size": 0}, "at least 1"),
        ({"pipeline_model_parallel_size": "4"}, "must be a whole number"),
        ({**TWO, "pipeline_model_parallel_layout": "Et|t|tL"}, "has 3 stages for 2 ranks"),
        ({**TWO, "pipeline_model_parallel_layout": "E(t|)*99999L"}, "is too long"),
        ({**TWO, "overlap_moe_expert_parallel_comm": True}, "a forward and a backward together"),
        (
            {
                **TWO,
                "virtual_pipeline_model_parallel_size": 2,
                "microbatch_group_size_per_vp_stage": 7,
            },
            "at least as many as there are stages",
        ),
        (
            {**TWO, "model": {"pipeline_model_parallel_size": 3}},
            "says two things under pipeline_model_parallel_size",
        ),
    ],
)
def test_what_megatron_cannot_run_is_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Pipeline.from_megatron(config, 8)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- 1\n", "must hold a configuration's names"),
        ("a: [\n", "is not YAML"),
        ("{", "JSON"),
        ("pipeline_model_parallel_size: 2\nnum_layers: 5\n", "cannot be shared out"),
    ],
)
def test_unusable_file_is_refused(text: str, words: str, tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    (tmp_path / "conf.yaml").write_text(text)
    with pytest.raises(InputError, match=words):
        read_megatron_file(tmp_path / "conf.yaml", 8)
