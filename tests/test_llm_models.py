"""Models by name and from config.json, against what is published of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli_helpers import assert_refused, envplan
from envplan.errors import InputError
from envplan.profile import Profile
from envplan.profiling.huggingface import LONGEST_SEQUENCE, MODEL_TYPES, read_model
from envplan.profiling.model_types import LAYERED_TYPES
from envplan.profiling.models import PRESETS, named_model
from envplan.profiling.transformer import TransformerModel

#: Billions of parameters, all and those that a token meets, as the models' cards state them.
PUBLISHED = {
    "llama3-8b": (8.03, 8.03),
    "llama3-70b": (70.6, 70.6),
    "llama3-405b": (405.9, 405.9),
    "qwen3-32b": (32.8, 32.8),
    "mixtral-8x7b": (46.7, 12.9),
    "deepseek-v3": (671.0, 37.0),
    "gpt3-175b": (175.0, 175.0),
}

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
FULL = ["full_attention"]
CONFIGS: dict[str, dict[str, Any]] = {
    "llama3-8b": LLAMA,
    "qwen3-32b": {
        "model_type": "qwen3",
        "hidden_size": 5120,
        "head_dim": 128,
        "intermediate_size": 25600,
        "num_attention_heads": 64,
        "num_hidden_layers": 64,
        "num_key_value_heads": 8,
        "vocab_size": 151936,
        "use_sliding_window": False,
        "sliding_window": None,
    },
    "mixtral-8x7b": {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 32000,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 129280,
    },
}
#: What the hub's files of other families say, and the billions of parameters that transformers
#: makes of them; some leave out what is usual, or say it by other names.
FAMILIES: dict[str, tuple[float, dict[str, Any]]] = {
    "Gemma 3 27B": (
        27.009,
        {
            "model_type": "gemma3",
            "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 5376,
                "intermediate_size": 21504,
                "num_attention_heads": 32,
                "num_key_value_heads": 16,
                "head_dim": 128,
                "num_hidden_layers": 62,
                "sliding_window": 1024,
            },
        },
    ),
    "gpt-oss 20B": (
        20.915,
        {
            "model_type": "gpt_oss",
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_hidden_layers": 24,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "vocab_size": 201088,
        },
    ),
    "Llama 4 Maverick": (
        400.712,
        {
            "model_type": "llama4",
            "text_config": {
                "model_type": "llama4_text",
                "hidden_size": 5120,
                "head_dim": 128,
                "intermediate_size": 8192,
                "intermediate_size_mlp": 16384,
                "interleave_moe_layer_step": 2,
                "num_local_experts": 128,
                "num_experts_per_tok": 1,
                "num_attention_heads": 40,
                "num_key_value_heads": 8,
                "num_hidden_layers": 48,
                "vocab_size": 202048,
                "attention_chunk_size": 8192,
                "max_position_embeddings": 10485760,
            },
        },
    ),
    "Qwen3-MoE, every second layer sparse, two dense": (
        16.370,
        {
            "model_type": "qwen3_moe",
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_hidden_layers": 48,
            "vocab_size": 151936,
            "decoder_sparse_step": 2,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "num_experts": 128,
            "mlp_only_layers": [0, 1],
        },
    ),
    "ERNIE 4.5 21B": (
        21.825,
        {
            "model_type": "ernie4_5_moe",
            "hidden_size": 2560,
            "intermediate_size": 12288,
            "num_attention_heads": 20,
            "num_key_value_heads": 4,
            "num_hidden_layers": 28,
            "moe_intermediate_size": 1536,
            "moe_k": 6,
            "moe_num_experts": 64,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "vocab_size": 103424,
        },
    ),
    "Falcon 7B": (
        6.922,
        {
            "model_type": "falcon",
            "hidden_size": 4544,
            "num_attention_heads": 71,
            "num_hidden_layers": 32,
            "num_kv_heads": 71,
            "multi_query": True,
            "new_decoder_architecture": False,
            "vocab_size": 65024,
        },
    ),
    "Falcon 40B": (
        41.303,
        {
            "model_type": "falcon",
            "hidden_size": 8192,
            "num_attention_heads": 128,
            "num_hidden_layers": 60,
            "num_kv_heads": 8,
            "multi_query": True,
            "new_decoder_architecture": True,
            "vocab_size": 65024,
        },
    ),
    "BLOOM 3B": (
        3.003,
        {
            "model_type": "bloom",
            "n_embed": 2560,
            "n_layer": 30,
            "num_attention_heads": 32,
            "seq_length": 2048,
            "vocab_size": 250880,
        },
    ),
    "OPT 66B": (
        65.720,
        {
            "model_type": "opt",
            "hidden_size": 9216,
            "ffn_dim": 36864,
            "num_attention_heads": 72,
            "num_hidden_layers": 64,
            "vocab_size": 50272,
            "word_embed_proj_dim": 9216,
        },
    ),
}


def written(folder: Path, **fields: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(fields))
    return path


def forward_flops(model: TransformerModel, tensor_parallel: int = 1, cp: int = 1) -> float:
    units = model.units(1, tensor_parallel, cp)
    return sum(module.forward.flops for unit in units for module in unit)


def attention_core(model: TransformerModel) -> float:
    """Products of queries with keys and of weights with values, of one sample, by the formula."""
    length = model.sequence_length
    if model.latent is not None:
        sizes = model.latent
        widths = sizes.key_size + sizes.rotary_size + sizes.value_size
    else:
        widths = 2 * (model.head_size or model.hidden_size // model.num_heads)
    return 2 * length * length * model.num_heads * widths * model.num_layers


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_number_of_parameters(name: str) -> None:
    assert PRESETS[name].parameters / 1e9 == pytest.approx(PUBLISHED[name][0], rel=0.003)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_token_costs_two_flops_for_each_parameter_that_it_meets(name: str) -> None:
    model = PRESETS[name]
    met = PUBLISHED[name][1] * 1e9 - model.vocabulary_size * model.hidden_size  # a look-up is free
    expected = 2 * met * model.sequence_length + attention_core(model)
    assert forward_flops(model) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_is_the_preset_of_the_same_model(name: str, tmp_path: Path) -> None:
    made = read_model(written(tmp_path, **CONFIGS[name]))
    assert made.parameters == PRESETS[name].parameters
    assert made.sequence_length == LONGEST_SEQUENCE
    preset = named_model(name, sequence_length=LONGEST_SEQUENCE)
    for tensor_parallel in (1, 8):
        assert made.units(2, tensor_parallel) == preset.units(2, tensor_parallel)
    assert read_model(tmp_path) == made  # of the folder


@pytest.mark.parametrize("name", FAMILIES)
def test_a_config_of_any_family_has_its_number_of_parameters(name: str, tmp_path: Path) -> None:
    billions, fields = FAMILIES[name]
    assert read_model(written(tmp_path, **fields)).parameters / 1e9 == pytest.approx(
        billions, rel=1e-3
    )


def test_a_preset_has_the_hubs_name_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert named_model("Qwen/Qwen3-32B") == PRESETS["qwen3-32b"]
    (tmp_path / "Qwen" / "Qwen3-32B").mkdir(parents=True)
    written(tmp_path / "Qwen" / "Qwen3-32B", **LLAMA)
    monkeypatch.chdir(tmp_path)
    assert named_model("Qwen/Qwen3-32B").num_layers == 32  # what lies here comes first


def test_tied_embeddings_count_once_and_work_alike(tmp_path: Path) -> None:
    untied = read_model(written(tmp_path, **LLAMA))
    tied = read_model(written(tmp_path, **{**LLAMA, "tie_word_embeddings": True}))
    assert untied.parameters - tied.parameters == 128256 * 4096
    assert tied.units(1, 1) == untied.units(1, 1)


def test_a_window_bounds_what_attention_costs(tmp_path: Path) -> None:
    mistral = {**LLAMA, "model_type": "mistral", "sliding_window": 1024}
    near, far = read_model(written(tmp_path, **mistral)), read_model(written(tmp_path, **LLAMA))
    saved = forward_flops(far) - forward_flops(near)
    assert saved == pytest.approx(attention_core(far) * (1 - 1024 / LONGEST_SEQUENCE))


@pytest.mark.parametrize(
    ("changed", "near"),
    [
        ({"model_type": "gemma2"}, 1 / 2),
        ({"model_type": "gemma3_text"}, 5 / 6),
        ({"model_type": "gemma2", "layer_types": ["sliding_attention"] * 2 + FULL * 28}, 2 / 30),
        ({"model_type": "qwen2"}, 0),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 10}, 2 / 3),
        ({"model_type": "phi3"}, 1),
    ],
)
def test_only_some_layers_may_have_a_window(
    changed: dict[str, Any], near: float, tmp_path: Path
) -> None:
    config = {**LLAMA, "num_hidden_layers": 30, "head_dim": 128}
    far = read_model(written(tmp_path, **config))
    model = read_model(written(tmp_path, **{**config, "sliding_window": 1024, **changed}))
    saved = forward_flops(far) - forward_flops(model)
    assert saved == pytest.approx(near * attention_core(far) * (1 - 1024 / LONGEST_SEQUENCE))
    assert ("attention to 1024" in model.describe()) == bool(near)


def test_gpus_of_a_stage_share_its_work() -> None:
    model = PRESETS["llama3-70b"]
    assert forward_flops(model, 8) == pytest.approx(forward_flops(model) / 8)
    assert forward_flops(model, 1, 4) == pytest.approx(forward_flops(model) / 4)
    # With more GPUs than heads of keys and values each has one, so the share is larger.
    assert forward_flops(model, 16) > forward_flops(model) / 16
    with pytest.raises(InputError, match="--cp 3 does not divide 8192 tokens"):
        model.units(1, 1, 3)


def test_experts_move_the_weights_of_all_and_compute_with_a_few() -> None:
    sparse, dense = (  # of the same widths
        PRESETS[name].units(1, 1)[1][-1] for name in ("mixtral-8x7b", "llama3-8b")
    )
    assert sparse.backward_weight.traffic > 7 * dense.backward_weight.traffic
    assert sparse.forward.flops < 3 * dense.forward.flops


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"model_type": "lama"}, "did you mean llama or"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers should be greater than or"),
        ({"num_attention_heads": "many"}, 'heads should be a valid integer, not "many"'),
        ({"vocab_size": 1e9}, "vocab_size"),
        ({"num_key_value_heads": True}, "not true"),
        ({"model_type": "rwkv7"}, "measure others with --entry"),
        ({"layer_types": ["linear_attention"] * 32}, "layers of linear_attention are not mod"),
        ({"layer_types": FULL * 31}, "layer_types are 31, but layers 32"),
        ({"word_embed_proj_dim": 512}, "word_embed_proj_dim is not hidden_size"),
        ({"hidden_size": 16, "num_attention_heads": 32}, "16 units do not make 32 heads"),
    ],
)
def test_a_bad_config_is_refused_with_its_field(
    tmp_path: Path, changed: dict[str, Any], words: str
) -> None:
    written(tmp_path, **{**LLAMA, **changed})
    ran = envplan("profile", "--model", "config.json", cwd=tmp_path)
    assert_refused(ran, 2, "config.json", words)
    assert not (tmp_path / "profile.csv").exists()


# Types whose layers differ have fields of their own; tests/test_model_types.py reads them.
@pytest.mark.parametrize("kind", [kind for kind in MODEL_TYPES if kind not in LAYERED_TYPES])
def test_every_type_that_is_named_is_read(kind: str, tmp_path: Path) -> None:
    assert read_model(written(tmp_path, **{**LLAMA, "model_type": kind})).num_layers == 32


def test_a_model_by_name_goes_all_the_way_to_a_plan(tmp_path: Path) -> None:
    shape = ["--pp", 4, "--vp", 2, "--tp", 8, "--cp", 2, "--dp", 3, "-m", 8]
    ran = envplan("profile", "--model", "llama3-70b", *shape, "--step", 120, cwd=tmp_path)
    assert (ran.code, ran.err) == (0, "")
    assert "70.55 billion parameters" in ran.out
    made = Profile.read_csv(tmp_path / "profile.csv")
    assert (made.num_stages, made.metadata.gpu) == (8, "NVIDIA H100 80GB HBM3")
    assert envplan("solve", cwd=tmp_path).code == 0
    job = json.loads((tmp_path / "plan.json").read_text())["job"]
    assert (job["schedule"], job["stages"], job["chunks"]) == ("interleaved", 4, 2)
    assert (job["gpus_per_stage"], job["replicas"], job["microbatches"]) == (16, 3, 8)
    assert envplan("check", "plan.json", cwd=tmp_path).code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--backend", "nvml"], "measure your model's stages with --entry"),
        (["--workload", "gpt"], "--workload and --model exclude each other"),
        (["--hidden-size", "64"], "--hidden-size does not go with --model"),
        (["--tp", "3"], "--tp 3 does not divide the 32 heads"),
        (["--pp", "40"], "32 layers cannot be split over 40 stages"),
    ],
)
def test_options_that_do_not_go_with_a_model_are_refused(
    tmp_path: Path, arguments: list[str], words: str
) -> None:
    ran = envplan("profile", "--model", "llama3-8b", *arguments, cwd=tmp_path)
    assert_refused(ran, 2, words)
