"""Megatron's configurations as schedules: objects, and files of NeMo and Megatron-Bridge."""

from __future__ import annotations

import json
import re
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from cli_helpers import envplan
from envplan.errors import InputError
from envplan.pipeline import Pipeline
from envplan.pipeline.imports.megatron import (
    layers_per_stage,
    pipeline_from_megatron,
    read_megatron,
    read_megatron_file,
)

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
LAYERS = [3, 4, 4, 4, 4, 4, 4, 3]


@pytest.mark.parametrize(
    ("text", "microbatches", "shape", "layers"),
    [
        (BRIDGE, 16, (4, 2, 16), LAYERS),
        (NEMO, None, (2, 1, 8), [15, 13]),  # batch sizes and GPUs tell the microbatches
        (SCRIPT, 8, (4, 2, 8), LAYERS),
        (PRINTED, None, (4, 2, 8), LAYERS),
        (CASE, 8, (4, 2, 8), LAYERS),
        (NEOX, None, (4, 1, 32), [11] * 4),
    ],
)
def test_a_file_is_a_schedule(
    text: str,
    microbatches: int | None,
    shape: tuple[int, int, int],
    layers: list[int],
    tmp_path: Path,
) -> None:
    pytest.importorskip("yaml")
    (tmp_path / "file").write_text(text)
    schedule = read_megatron_file(tmp_path / "file", microbatches)
    assert schedule.known_as == ("interleaved" if shape[1] > 1 else "1f1b")
    assert (len(schedule.orders), schedule.num_chunks, schedule.num_microbatches) == shape
    assert schedule.layers_per_stage == tuple(layers)
    assert schedule.overlap_p2p == (shape[1] > 1)


def test_a_file_of_megatron_bridge_is_imported(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    (tmp_path / "run_config.yaml").write_text(BRIDGE)
    command = ["schedule", "import", "run_config.yaml", "--format", "megatron", "--json"]
    said = json.loads(envplan(*command, "--microbatches", "16", cwd=tmp_path).out)
    assert (said["known_as"], said["microbatch_group"]) == ("interleaved", 6)
    assert said["layers_per_stage"] == LAYERS
    written = Pipeline.from_dag_file(tmp_path / "pipeline.dag.json")
    meant = Pipeline("interleaved", 4, 16, num_chunks=2, microbatch_group=6)
    assert written.operations == meant.operations
    refused = envplan(*command, cwd=tmp_path)
    assert refused.code == 2
    assert "give --microbatches M" in refused.err


@pytest.mark.parametrize(
    ("config", "chunks", "layers"),
    [
        ({"num_layers": 12, "num_layers_per_virtual_pipeline_stage": 3}, 2, [3] * 4),
        ({"hybrid_layer_pattern": "M-M|M*-|M-M-|M*/*E"}, 2, [3, 3, 4, 2]),
        ({"hybrid_layer_pattern": "M-M-"}, 1, []),
        ({"num_layers": 8}, 1, [4, 4]),
        (
            {
                "num_layers": 14,
                "num_layers_in_first_pipeline_stage": 8,
                "num_layers_in_last_pipeline_stage": 6,
                "virtual_pipeline_model_parallel_size": 2,
            },
            2,
            [4, 3] * 2,
        ),
        ({"num_layers": 7, "account_for_loss_in_pipeline_split": True}, 1, [4, 3]),
        ({}, 1, []),
        ({"pipeline_model_parallel_layout": "Ett,|(tt|)*2,t|m|L"}, 3, [2, 2, 2, 1, 0, 0]),
        ({"pipeline_model_parallel_layout": [["embedding", "decoder"], ["loss"]]}, 1, [1, 0]),
    ],
)
def test_chunks_and_layers_are_shared_out_as_megatron_does(
    config: dict[str, Any], chunks: int, layers: list[int]
) -> None:
    """Of mappings and of objects in memory."""
    for known in (TWO | config, SimpleNamespace(**TWO, **config)):
        assert layers_per_stage(known) == layers
        assert pipeline_from_megatron(known, 4).num_chunks == chunks


def test_layers_are_those_that_megatron_builds() -> None:
    block = pytest.importorskip("megatron.core.transformer.transformer_block")
    config = SimpleNamespace(
        num_layers=22,
        pipeline_model_parallel_size=4,
        virtual_pipeline_model_parallel_size=2,
        account_for_embedding_in_pipeline_split=True,
        account_for_loss_in_pipeline_split=True,
        num_layers_in_first_pipeline_stage=None,
        num_layers_in_last_pipeline_stage=None,
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
    assert pipeline_from_megatron(config, 8).num_chunks == chunks


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
        ({"pipeline_model_parallel_size": None}, "says no pipeline_model_parallel_size"),
        ({"pipeline_model_parallel_size": 0}, "at least 1"),
        ({"pipeline_model_parallel_size": "4"}, "must be a whole number"),
        ({"pipeline_model_parallel_layout": "Et|t|tL"}, "of 3 model stages for 2 ranks"),
        ({"pipeline_model_parallel_layout": "E(t|)*99999L"}, "is too long"),
        ({"pipeline_model_parallel_size": 131_000}, "make 131000 model stages; at most 4096"),
        ({"virtual_pipeline_model_parallel_size": 22_222}, "at most 4096"),
        ({"overlap_moe_expert_parallel_comm": True}, "a forward and a backward together"),
        ({"num_layers": 13, "num_layers_per_virtual_pipeline_stage": 3}, "13 layers do not make"),
        ({"num_layers_per_virtual_pipeline_stage": 3}, "no num_layers"),
        (
            {"virtual_pipeline_model_parallel_size": 2, "microbatch_group_size_per_vp_stage": 7},
            "at least as many as there are stages",
        ),
        ({"model": {"pipeline_model_parallel_size": 3}}, "two things under pipeline_model_par"),
    ],
)
def test_what_megatron_cannot_run_is_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        pipeline_from_megatron(TWO | config, 8)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- 1\n", "must hold a configuration's names"),
        ("a: [\n", "is neither JSON nor YAML"),
        ("{", "JSON"),
        ("pipeline_model_parallel_size: 2\nnum_layers: 5\n", "cannot be shared out"),
        (SCRIPT.replace("PP=4", "read PP"), 'must be a whole number, not "${PP}"'),
        (SCRIPT.replace("--lr", "--pipeline-model-parallel-size 8 --lr"), "two things under --pip"),
    ],
)
def test_unusable_file_is_refused(text: str, words: str, tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    (tmp_path / "file").write_text(text)
    with pytest.raises(InputError, match=re.escape(words)):
        read_megatron_file(tmp_path / "file", 8)


#: The sizes of Llama 3.1 405B, which the recipe would ask Hugging Face for.
SIZES: dict[str, Any] = {
    "num_hidden_layers": 126,
    "hidden_size": 16384,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "intermediate_size": 53248,
    "vocab_size": 128256,
}


class StandIn(ModuleType):
    """A module that has a class of any name."""

    def __getattr__(self, name: str) -> Any:
        import torch

        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (torch.nn.Module,), {})


@pytest.fixture(scope="module")
def recipe() -> Any:
    """The configuration of a recipe, PP=8 and VP=2, as Bridge's own code makes it."""
    if find_spec("megatron") is None or find_spec("megatron.bridge") is None:
        pytest.skip("megatron-bridge is not installed")
    # What cannot be imported without a GPU: layers of Transformer Engine, and recipes for images.
    for name in ("megatron.bridge.peft.lora", "megatron.bridge.peft.lora_layers"):
        module = StandIn(name)
        module.__spec__ = ModuleSpec(name, None)
        sys.modules[name] = module
    import megatron.bridge

    recipes = ModuleType("megatron.bridge.recipes")
    recipes.__path__ = [f"{megatron.bridge.__path__[0]}/recipes"]
    sys.modules[recipes.__name__] = recipes
    from megatron.bridge import AutoBridge
    from megatron.bridge.recipes.llama import llama3
    from transformers import LlamaConfig

    config = LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"])
    AutoBridge.from_hf_pretrained = lambda *_, **__: AutoBridge.from_hf_config(config)
    return llama3.llama31_405b_pretrain_config()


def test_recipe_that_bridge_writes_is_read(recipe: Any, tmp_path: Path) -> None:
    recipe.to_yaml(str(tmp_path / "run_config.yaml"))
    command = ["schedule", "import", "run_config.yaml", "--format", "megatron", "--json"]
    refused = envplan(*command, cwd=tmp_path)
    assert refused.code == 2
    assert "give --microbatches M" in refused.err  # it does not say on how many GPUs it will run
    said = json.loads(envplan(*command, "--microbatches", "64", cwd=tmp_path).out)
    assert (said["ranks"], said["chunks"], said["known_as"]) == (8, 2, "interleaved")
    assert said["layers_per_stage"] == [7, *[8] * 14, 7]


def test_recipe_in_memory_is_read_as_megatron_builds_it(recipe: Any) -> None:
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    model = recipe.model
    model.apply_rope_fusion = False  # it is Transformer Engine's
    model.finalize()
    assert read_megatron(model, 64).num_chunks == 2
    assert layers_per_stage(model) == [
        get_num_layers_to_build(model, vp_stage=chunk, pp_rank=rank)
        for chunk in range(2)
        for rank in range(8)
    ]
