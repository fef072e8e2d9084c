"""The run_config.yaml that NeMo's Megatron-Bridge writes for a recipe of its own."""

from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cli_helpers import envplan
from envplan.pipeline.imports.megatron import layers_per_stage, read_megatron

if find_spec("megatron") is None or find_spec("megatron.bridge") is None:
    pytest.skip("megatron-bridge is not installed", allow_module_level=True)

import torch

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
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (torch.nn.Module,), {})


@pytest.fixture(scope="module")
def recipe() -> Any:
    """The configuration of a recipe, PP=8 and VP=2, as Bridge's own code makes it."""
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


def test_objects_in_memory_are_read_as_megatron_builds_them(recipe: Any) -> None:
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
