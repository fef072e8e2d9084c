"""Megatron's configurations as schedules: objects, and files of NeMo and Megatron-Bridge."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cli_helpers import envplan
from envplan.errors import InputError
from envplan.pipeline import Pipeline
from envplan.pipeline.imports.megatron import layers_per_stage, read_megatron_file

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
#: The arguments of Megatron-LM in a script.
SCRIPT = """#!/bin/bash
# --pipeline-model-parallel-size 64 was slower
PP=4
VP=${1:-2}
torchrun --nproc_per_node 8 --nnodes=$NODES pretrain_gpt.py \\
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size ${PP} \\
    --num-virtual-stages-per-pipeline-rank ${VP:-2} --sequence-parallel \\
    --num-layers 30 --account-for-embedding-in-pipeline-split \\
    --account-for-loss-in-pipeline-split --lr 6.0e-5 # nothing else
"""
#: What Megatron-LM prints when it starts, here with the launcher's rank in front.
PRINTED = """0: ------------------------ arguments ------------------------
0:   account_for_embedding_in_pipeline_split ......... True
0:   account_for_loss_in_pipeline_split .............. True
0:   data_parallel_size .............................. 2
0:   decoder_last_pipeline_num_layers ................ None
0:   global_batch_size ............................... 32
0:   micro_batch_size ................................ 2
0:   num_layers ...................................... 30
0:   num_layers_per_virtual_pipeline_stage ........... 4
0:   overlap_p2p_comm ................................ True
0:   pipeline_model_parallel_size .................... 4
0:   virtual_pipeline_model_parallel_size ............ 2
0: -------------------- end of arguments ---------------------
"""
#: The arguments in a file of its tests.
CASE = """
ENV_VARS:
  CUDA_DEVICE_MAX_CONNECTIONS: 1
MODEL_ARGS:
  --num-layers: 30
  --log-params-norm: true
  --pipeline-model-parallel-size: 4
  --num-layers-per-virtual-pipeline-stage: 4
  --account-for-embedding-in-pipeline-split: true
  --account-for-loss-in-pipeline-split: true
"""
#: A file of GPT-NeoX is YAML that looks like JSON.
NEOX = """{
  # parallelism settings
  "pipe-parallel-size": 4, "model_parallel_size": 2,
  "num_layers": 44,
  "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 32,
}
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


@pytest.mark.parametrize("text", [SCRIPT, PRINTED, CASE])
def test_arguments_of_megatron_lm_are_a_schedule(text: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(text)
    schedule = read_megatron_file(tmp_path / "file", None if text is PRINTED else 8)
    assert (schedule.known_as, len(schedule.orders)) == ("interleaved", 4)
    assert (schedule.num_chunks, schedule.num_microbatches) == (2, 8)
    layers = [3, 4, 4, 4, 4, 4, 4, 3]
    assert schedule.facts == {"layers_per_stage": layers, "overlap_p2p": True}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (("PP=4", "read PP"), 'pipeline_model_parallel_size must be a whole number, not "${PP}"'),
        (("--lr", "--pipeline-model-parallel-size 8 --lr"), "says two things under --pipe"),
    ],
)
def test_a_script_that_does_not_say_is_refused(
    changed: tuple[str, str], words: str, tmp_path: Path
) -> None:
    (tmp_path / "train.sh").write_text(SCRIPT.replace(*changed))
    with pytest.raises(InputError, match=re.escape(words)):
        read_megatron_file(tmp_path / "train.sh", 8)


def test_layers_of_a_chunk_tell_how_many_chunks(tmp_path: Path) -> None:
    config = {**TWO, "num_layers": 12, "num_layers_per_virtual_pipeline_stage": 3}
    assert Pipeline.from_megatron(config, 4).num_chunks == 2
    for wrong in ({"num_layers": 13}, {"num_layers": None}):
        with pytest.raises(InputError, match=r"no num_layers|13 layers do not make"):
            Pipeline.from_megatron({**config, **wrong}, 4)


def test_a_pattern_of_layers_tells_how_many_chunks() -> None:
    config = {**TWO, "hybrid_layer_pattern": "M-M|M*-|M-M-|M*/*E"}
    assert Pipeline.from_megatron(config, 4).num_chunks == 2
    assert layers_per_stage(config) == [3, 3, 4, 2]
    plain = {**TWO, "hybrid_layer_pattern": "M-M-"}
    assert Pipeline.from_megatron(plain, 4).num_chunks == 1


def test_a_file_of_gpt_neox_is_a_schedule(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    (tmp_path / "20B.yml").write_text(NEOX)
    schedule = read_megatron_file(tmp_path / "20B.yml")
    assert (schedule.known_as, schedule.num_microbatches) == ("1f1b", 32)
    assert schedule.facts["layers_per_stage"] == [11] * 4


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
        ({**TWO, "pipeline_model_parallel_layout": "Et|t|tL"}, "of 3 model stages for 2 ranks"),
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
        ("a: [\n", "is neither JSON nor YAML"),
        ("{", "JSON"),
        ("pipeline_model_parallel_size: 2\nnum_layers: 5\n", "cannot be shared out"),
    ],
)
def test_unusable_file_is_refused(text: str, words: str, tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    (tmp_path / "conf.yaml").write_text(text)
    with pytest.raises(InputError, match=words):
        read_megatron_file(tmp_path / "conf.yaml", 8)
