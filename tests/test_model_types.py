"""Today's model types: parameters as transformers counts them, and the work of their layers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from envplan.errors import InputError
from envplan.profiling.huggingface import MODEL_TYPES, read_model
from envplan.profiling.language_model import LanguageModel
from envplan.profiling.model_types import LAYERED_TYPES
from envplan.profiling.modelled import modelled_profile
from envplan.profiling.models import named_model
from envplan.profiling.training_job import TrainingJob
from envplan.profiling.transformer import TransformerModel

FIXTURES = Path(__file__).parent / "fixtures"

#: A config.json of each type, with the sizes of a published model where there is one.
CONFIGS: dict[str, dict[str, Any]] = json.loads((FIXTURES / "model_types.json").read_text())

#: The same of types whose layers are all alike, and of the biases and norms that a file may ask
#: for, with few layers.
UNIFORM_CONFIGS: dict[str, dict[str, Any]] = json.loads(
    (FIXTURES / "uniform_model_types.json").read_text()
)
ALL_CONFIGS = {**CONFIGS, **UNIFORM_CONFIGS}

#: Parameters as transformers 5.24 counts them on the meta device: `make compat` counts again.
COUNTED: dict[str, int] = {
    name: fields.pop("counted_parameters") for name, fields in ALL_CONFIGS.items()
}

#: Types that transformers does not have, or not as a model of text alone, and the type that has the
#: same norms and biases.
LIKE = {
    "deepseek": "llama",
    "kimi_k2": "deepseek_v3, num_hidden_layers=5",
    "chatglm": "phi3",
    "mimo": "qwen2",
    "internlm2": "phi3",
    "baichuan": "phi3",
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "dots1": "qwen3_moe",
}

Write = Callable[[dict[str, Any]], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(fields: dict[str, Any]) -> Path:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(fields))
        return path

    return written


@pytest.mark.parametrize("name", ALL_CONFIGS)
def test_parameters_are_those_of_transformers(name: str, write: Write) -> None:
    model = read_model(write(ALL_CONFIGS[name]))
    assert isinstance(model, LanguageModel if name in CONFIGS else TransformerModel)
    assert model.parameters == COUNTED[name]


@pytest.mark.parametrize("name", LIKE)
def test_a_type_that_transformers_lacks_counts_as_its_like(name: str, write: Write) -> None:
    fields = UNIFORM_CONFIGS[LIKE[name]]
    model = read_model(write({**fields, "model_type": name}))
    assert isinstance(model, TransformerModel)
    assert model.parameters == COUNTED[LIKE[name]]


@pytest.mark.parametrize("name", ALL_CONFIGS)
def test_transformers_still_counts_as_many(name: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    fields = dict(ALL_CONFIGS[name])
    kind = fields.pop("model_type")
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    config = transformers.CONFIG_MAPPING[kind](**fields).get_text_config()
    with torch.device("meta"):
        model = _causal_model(transformers, config)
    model.tie_weights()
    weights = {id(weight): weight for weight in model.parameters()}
    assert sum(weight.numel() for weight in weights.values()) == COUNTED[name]


def _causal_model(transformers: Any, config: Any) -> Any:
    """The type's model for text; Mistral 4's is known by its class alone."""
    if config.model_type == "mistral4":
        return transformers.Mistral4ForCausalLM(config)
    return transformers.AutoModelForCausalLM.from_config(config)


def test_every_type_is_tried() -> None:
    tried = {fields["model_type"] for fields in CONFIGS.values()}
    # A type's other names are those of a model that also sees.
    others = {"qwen3_5", "qwen3_5_moe", "gemma4", "llama4"}
    assert tried == LAYERED_TYPES.keys() - others
    uniform = {fields["model_type"] for fields in UNIFORM_CONFIGS.values()}
    assert uniform | LIKE.keys() == set(MODEL_TYPES) - LAYERED_TYPES.keys()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_token_costs_about_two_flops_for_each_weight_that_it_meets(
    name: str, write: Write
) -> None:
    model = read_model(write(CONFIGS[name]))
    assert isinstance(model, LanguageModel)
    flops = sum(module.forward.flops for unit in model.units(1, 1) for module in unit)
    met = _weights_met(model)
    per_weight = flops / model.sequence_length / met
    # Attention, scans and the indexer come on top of the products with weights.
    assert 1.99 < per_weight < 2.9


def _weights_met(model: LanguageModel) -> float:
    """Weights that a token meets: of the experts only those that it takes; no look-up."""
    met = float(model.parameters)
    if not model.tied:
        met -= model.vocabulary_size * model.hidden_size
    for layer in model.layers:
        for block in layer.blocks:
            unused = getattr(block, "count", 0) - getattr(block, "per_token", 0)
            width = getattr(block, "latent_size", 0) or model.hidden_size
            products = 3 if getattr(block, "is_gated", True) else 2
            met -= unused * products * width * getattr(block, "width", 0) * (unused > 0)
    return met - _looked_up(model)


def _looked_up(model: LanguageModel) -> float:
    """Embeddings of each layer's own, which are looked up, too."""
    width = sum(
        block.width  # type: ignore[attr-defined]
        for layer in model.layers
        for block in layer.blocks
        if block.name == "per_layer_input"
    )
    return 262_144.0 * width


@pytest.mark.parametrize("name", ["qwen3_next", "nemotron_h", "deepseek_v32"])
def test_a_profile_is_modelled(name: str, write: Write) -> None:
    model = read_model(write(CONFIGS[name]))
    job = TrainingJob(model=model, num_stages=4, microbatch_size=1, tensor_parallel=8)
    for gpu in ("h200", "a100"):
        profile = modelled_profile(job, gpu, name=name, step=600)
        assert profile.num_stages == 4
        assert profile.metadata.extra["parameters"] == model.parameters


def test_prediction_of_further_tokens_is_work_of_the_last_stage(write: Write) -> None:
    plain = read_model(write(CONFIGS["deepseek_v32"]))
    further = read_model(write({**CONFIGS["deepseek_v32"], "num_nextn_predict_layers": 1}))
    assert further.parameters == plain.parameters
    assert further.units(1, 8)[:-1] == plain.units(1, 8)[:-1]
    assert len(further.units(1, 8)[-1]) > len(plain.units(1, 8)[-1])


def test_other_sizes_repeat_the_pattern(write: Write) -> None:
    path = write(CONFIGS["qwen3_next"])
    model = named_model(str(path), None, layers=8, sequence_length=8192)
    assert isinstance(model, LanguageModel)
    kinds = [layer.blocks[0].name for layer in model.layers]
    assert kinds == [*["linear_attention"] * 3, "core_attention"] * 2
    assert model.sequence_length == 8192


def test_an_unknown_type_names_the_nearest_and_offers_another(write: Write) -> None:
    fields = {**CONFIGS["exaone4"], "model_type": "exaone5"}
    with pytest.raises(InputError, match=r"did you mean exaone4.*--as llama"):
        read_model(write(fields))
    assert "llama" in MODEL_TYPES
    read = read_model(write(fields), as_type="exaone4")
    assert read.parameters == COUNTED["exaone4"]


def test_a_kind_of_layer_that_is_not_known_is_refused(write: Write) -> None:
    fields = {**CONFIGS["lfm2"], "layer_types": ["conv"] * 31 + ["quantum"]}
    with pytest.raises(InputError, match="quantum"):
        read_model(write(fields))
