"""Serving profiles from benchmarks: factors are found again, files of several tools are read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tools.serving.measured_spread import (
    nearest_loads,
    other_versions,
    relative_errors,
    same_configuration,
)

from cli_helpers import envplan
from envplan.errors import InputError
from envplan.serving.builtin import builtin_profiles
from envplan.serving.identify.agreement import contradictory, distinct
from envplan.serving.identify.benchmark import Benchmark
from envplan.serving.identify.catalogue import language_model, serving_gpu
from envplan.serving.identify.fit import Level, fit_factors
from envplan.serving.identify.model import predict
from envplan.serving.identify.neighbours import shared_residuals
from envplan.serving.identify.sweep_files import SweepFacts, read_sweep, rows_of_one_profile
from envplan.serving.identify.terms import first_token_terms
from envplan.serving.performance import Configuration
from envplan.serving.profile import ServingProfile

MODEL = "meta-llama/Llama-3.1-70B-Instruct"
NEW_PROFILES = [
    "b200-deepseek-r1",
    "b200-llama-3.1-70b",
    "h100-gpt-oss-120b",
    "h100-llama-3.1-70b",
    "h100-qwen3-32b",
    "h200-deepseek-r1",
    "h200-gpt-oss-120b",
]


def vllm_result(concurrency: int, ttft_ms: float, tpot_ms: float) -> dict[str, object]:
    return {
        "model_id": MODEL,
        "backend": "vllm",
        "max_concurrency": concurrency,
        "completed": 10,
        "total_input_tokens": 10240,
        "total_output_tokens": 10240,
        "median_ttft_ms": ttft_ms,
        "median_tpot_ms": tpot_ms,
    }


#: Llama-3.1-70B in fp8 on 4 H100, 1,024 tokens in and out (rows of aiconfigurator's table).
LOADS = [(4, 80.5, 11.8), (8, 96.3, 12.1), (16, 121.4, 13.2), (32, 174.8, 16.5)]


def sweep_file(folder: Path) -> Path:
    path = folder / "bench.jsonl"
    path.write_text("".join(json.dumps(vllm_result(*load)) + "\n" for load in LOADS))
    return path


@settings(max_examples=20, deadline=None)
@given(
    factors=st.lists(st.floats(0.4, 2.5), min_size=2, max_size=3), seed=st.integers(0, 2**32 - 1)
)
def test_factors_that_made_the_times_are_found_again(factors: list[float], seed: int) -> None:
    terms = np.random.default_rng(seed).uniform(0.01, 1.0, size=(60, len(factors)))
    times_s = terms @ np.array(factors)
    level = Level(np.zeros(60, dtype=np.intp), spread=3.0)
    found = fit_factors(terms, times_s, [level], centre=np.zeros(len(factors)), noise=0.01)
    assert (terms * found).sum(axis=1) == pytest.approx(times_s, rel=0.01)
    assert found[0] == pytest.approx(factors, rel=0.05)


def test_a_group_that_nobody_measured_has_the_factors_of_the_level_above() -> None:
    random = np.random.default_rng(1)
    terms = random.uniform(0.1, 1.0, size=(40, 2))
    measured_s = (terms * [2.0, 0.5]).sum(axis=1)
    measured_s[30:] = np.nan
    group = np.repeat([0, 1], [30, 10]).astype(np.intp)
    found = fit_factors(terms, measured_s, [Level(group, spread=0.01)], noise=0.01)
    assert found[35] == pytest.approx(found[0], rel=0.05)


def test_one_row_that_contradicts_all_others_moves_nothing() -> None:
    terms = np.random.default_rng(2).uniform(0.1, 1.0, size=(40, 2))
    measured_s = (terms * [2.0, 0.5]).sum(axis=1)
    measured_s[7] *= 20
    level = Level(np.zeros(40, dtype=np.intp), spread=2.0)
    found = fit_factors(terms, measured_s, [level], centre=np.zeros(2), noise=0.02)
    assert found[0] == pytest.approx([2.0, 0.5], rel=0.05)


def test_results_of_vllm_and_sglang_need_what_they_do_not_say(tmp_path: Path) -> None:
    path = sweep_file(tmp_path)
    with pytest.raises(InputError, match=r":1: the file does not say tp: give it with --tp"):
        read_sweep(path)
    rows = read_sweep(path, SweepFacts(gpu="h100", tp=4, precision="fp8"))
    assert [row.concurrency for row in rows] == [4, 8, 16, 32]
    assert rows[0].token_interval_s == pytest.approx(0.0118)
    fields = vllm_result(*LOADS[0])
    del fields["model_id"]
    path.write_text(json.dumps(fields))
    row = read_sweep(path, SweepFacts(model="qwen3-32b", gpu="H100", tp=1))[0]
    assert (row.engine, row.precision, row.input_tokens) == ("sglang", "bf16", 1024)


def test_tables_of_several_models_are_narrowed_down(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    header = "backend,model_path,system,precision,mode,isl,osl,concurrency,tp_size,ttft_ms,tpot_ms"
    rows = [
        f"vllm,{MODEL},h100_sxm,fp8,agg,1024,1024,4,4,80,11.8",
        "vllm,Qwen/Qwen3-32B,h100_sxm,fp8,agg,1024,1024,4,1,90,14",
    ]
    path.write_text("\n".join([header, *rows]) + "\n")
    with pytest.raises(InputError, match="2 combinations of model, GPU, engine and precision"):
        rows_of_one_profile(read_sweep(path), SweepFacts(), path)
    facts = SweepFacts(model="qwen3-32b")
    assert len(rows_of_one_profile(read_sweep(path, facts), facts, path)) == 1
    path.write_text("\n".join([header, rows[0].replace("80,", "-1,")]) + "\n")
    with pytest.raises(InputError, match=":2: "):
        read_sweep(path)
    path.write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match="is no sweep that envplan knows"):
        read_sweep(path)


def test_a_result_of_inferencex_is_read(tmp_path: Path) -> None:
    path = tmp_path / "agg.json"
    result = {
        "hw": "h200-nb", "model": "openai/gpt-oss-120b", "framework": "vllm", "precision": "fp4",
        "conc": 8, "tp": 2, "isl": 1024, "osl": 1024, "median_ttft": 0.05, "median_tpot": 0.005,
    }  # fmt: skip
    path.write_text(json.dumps([result]))
    row = read_sweep(path)[0]
    assert (row.pair, row.num_gpus) == (("gpt-oss-120b", "h200"), 2)


def test_unknown_models_and_gpus_name_the_nearest() -> None:
    with pytest.raises(InputError, match=r"llama-3\.1-70b"):
        language_model("llama-3.1-71b")
    with pytest.raises(InputError, match="there is no GPU for serving"):
        serving_gpu("tpu")


def test_a_profile_of_ones_own_sweep_has_its_times(tmp_path: Path) -> None:
    arguments = ("--gpu", "h100", "--tp", "4", "--precision", "fp8", "-o", "mine.csv", "--json")
    sweep_file(tmp_path)
    run = envplan("serving", "profile", "--from-sweep", "bench.jsonl", *arguments, cwd=tmp_path)
    assert run.code == 0, run.err
    assert "is identified from 4 results" in run.err
    performance = ServingProfile.read_csv(tmp_path / "mine.csv").performance
    highest = performance[Configuration(4, 1980)]
    # Steps at concurrency 4, without the share of the others' prompts: 11.8 ms were measured.
    context_s = float(highest.context_s_at(4 * 1536))
    assert float(highest.step_s_at(4)) + context_s == pytest.approx(0.0115, rel=0.1)


@pytest.mark.parametrize("name", NEW_PROFILES)
def test_the_built_in_profiles_of_todays_models_hold_together(name: str) -> None:
    profile = ServingProfile.builtin(name)
    assert profile.source == "identified"
    assert profile.max_context_tokens
    assert profile.kv_bytes_per_token
    for (tp, _), performance in profile.performance.items():
        assert (np.diff(performance.step_s) > 0).all()
        assert (np.diff(performance.prompt_s) >= 0).all()
        assert performance.step_w.max() <= tp * 1000
        assert performance.context_token_s > 0
    assert profile.curves


def test_the_list_of_built_in_profiles_has_todays_models() -> None:
    assert set(NEW_PROFILES) < set(builtin_profiles())


def table_row(tmp_path: Path, model: str, precision: str, tp: int, concurrency: int) -> Benchmark:
    path = tmp_path / "table.csv"
    header = "backend,model_path,system,precision,mode,isl,osl,concurrency,tp_size,ttft_ms,tpot_ms"
    row = f"sglang,{model},b200_sxm,{precision},agg,8192,1024,{concurrency},{tp},1480,34"
    path.write_text(f"{header}\n{row}\n")
    return read_sweep(path)[0]


@pytest.mark.parametrize(
    ("model", "precision"),
    [
        ("Qwen/Qwen3-32B", "bf16"),
        ("Qwen/Qwen3-32B-FP8", "fp8"),
        ("openai/gpt-oss-120b", "fp4"),
        ("deepseek-ai/DeepSeek-R1", "fp8"),
    ],
)
def test_weights_are_as_published_where_a_row_does_not_say(
    tmp_path: Path, model: str, precision: str
) -> None:
    assert table_row(tmp_path, model, "", tp=8, concurrency=4).precision == precision


def test_requests_that_were_served_did_not_wait_for_memory_that_nobody_knows(
    tmp_path: Path,
) -> None:
    """89% of four B200 are less than the weights of DeepSeek-R1, and 32 requests ran on them."""
    row = table_row(tmp_path, "deepseek-ai/DeepSeek-R1", "fp8", tp=4, concurrency=32)
    assert row.max_batch == row.batch_size == 32
    larger = table_row(tmp_path, "deepseek-ai/DeepSeek-R1", "fp8", tp=8, concurrency=512)
    assert larger.batch_size == larger.max_batch < 512


def configurator_row(folder: Path, **stated: object) -> Benchmark:
    """A row of aiconfigurator's table: MiniMax-M2.5 on B200, where it is not stated otherwise."""
    fields: dict[str, object] = {
        "backend": "vllm", "model_path": "MiniMaxAI/MiniMax-M2.5", "system": "b200_sxm",
        "precision": "fp8", "mode": "agg", "isl": 1024, "osl": 1024, "concurrency": 64,
        "tp_size": 4, "silicon_ttft_ms": 200, "silicon_tpot_ms": 20,
    }  # fmt: skip
    fields |= stated
    path = folder / "row.csv"
    path.write_text(",".join(fields) + "\n" + ",".join(map(str, fields.values())) + "\n")
    return read_sweep(path)[0]


@pytest.mark.parametrize(
    "stated",
    [
        {"tp_size": 4, "attention_dp_size": 1, "moe_tp_size": 1, "moe_ep_size": 4},
        {"tp_size": 4, "attention_dp_size": 4, "moe_tp_size": 1, "moe_ep_size": 16},
        {"tp_size": 16, "attention_dp_size": 1, "moe_tp_size": 4, "moe_ep_size": 4},
        {"tp_size": 1, "attention_dp_size": 16, "moe_tp_size": 4, "moe_ep_size": 4},
    ],
)
def test_products_of_parallelisms_are_not_counted_as_gpus(
    tmp_path: Path, stated: dict[str, object]
) -> None:
    """The table states the same times of each of these: four GPUs, experts split over all."""
    row = configurator_row(tmp_path, **stated)
    assert (row.num_gpus, row.layout) == (4, "1x4")


def test_requests_of_one_instance_beside_all_tell_how_many_instances_there_were(
    tmp_path: Path,
) -> None:
    row = configurator_row(tmp_path, concurrency=448, batch_size=14)
    assert (row.num_workers, row.instance_concurrency) == (32, 14)
    of_groups = configurator_row(
        tmp_path, concurrency=448, batch_size=112, tp_size=1, attention_dp_size=4
    )
    assert (of_groups.num_workers, of_groups.attention_groups) == (1, 4)
    assert configurator_row(tmp_path, concurrency=64, batch_size=64).num_workers == 1


def test_the_first_token_of_alike_instances_is_that_of_one(tmp_path: Path) -> None:
    one = configurator_row(tmp_path, concurrency=14, batch_size=14)
    many = configurator_row(tmp_path, concurrency=448, batch_size=14)
    terms = first_token_terms([one, many], np.full(2, 0.02))
    assert terms[1] == pytest.approx(terms[0])


def test_a_pair_that_nobody_measured_is_not_predicted_from_an_odd_handful_of_rows() -> None:
    usual = [
        replace(row_of_length(2.0**power), first_token_s=2.0**power / 1e4, token_interval_s=0.02)
        for power in range(7, 14)
    ]
    usual += [replace(row, concurrency=16, token_interval_s=0.022) for row in usual]
    odd = [
        replace(row, version="odd", first_token_s=30.0, token_interval_s=0.5) for row in usual[:4]
    ]
    new = replace(row_of_length(1024), gpu=serving_gpu("h200"))
    without_odd = predict([*usual, new])
    with_odd = predict([*usual, *odd, new])
    assert with_odd.token_interval_s[-1] == pytest.approx(without_odd.token_interval_s[-1], 1e-3)
    assert with_odd.first_token_s[-1] == pytest.approx(without_odd.first_token_s[-1], 1e-3)


def test_tensor_parallelism_that_no_model_can_be_split_by_is_a_sum_of_workers(
    tmp_path: Path,
) -> None:
    row = configurator_row(tmp_path, system="gb200", tp_size=72, moe_tp_size=72, moe_ep_size=1)
    assert row.disaggregated
    assert not row.workers_known
    assert row.max_batch == row.concurrency  # nothing is said about memory
    stated = configurator_row(
        tmp_path, mode="disagg", decode_tp_size=4, decode_num_workers=2, prefill_num_workers=1
    )
    assert stated.workers_known
    assert stated.instance_concurrency == 32


def test_engines_fill_memory_in_their_own_ways(tmp_path: Path) -> None:
    """Measured: 30 requests of 9,216 tokens on two H100 of vLLM, 110 on two B200.

    The first from a wait of 59.2 s beside 53.7 s of decoding at 64 requests (Llama-3.1-70B), the
    second from 63.9 beside 48.1 s at 256 (MiniMax-M2.5).
    """
    llama = {"model_path": MODEL, "tp_size": 2, "isl": 8192, "osl": 1024}
    on_h100 = configurator_row(tmp_path, system="h100_sxm", **llama)
    assert on_h100.max_batch == pytest.approx(30.4, rel=0.1)
    on_b200 = configurator_row(tmp_path, tp_size=2, isl=8192, osl=1024)
    assert on_b200.max_batch == pytest.approx(110, rel=0.1)
    # The KV cache is in 16 bit on Hopper, but for TensorRT-LLM.
    of_trtllm = configurator_row(tmp_path, system="h100_sxm", backend="trtllm", **llama)
    assert on_h100.kv_bytes_per_token == 2 * of_trtllm.kv_bytes_per_token


def test_a_measurement_counts_once_with_what_says_most_of_it(tmp_path: Path) -> None:
    stated = {"mode": "disagg", "decode_tp_size": 4, "silicon_ttft_ms": 208.553}
    unclear = configurator_row(tmp_path, **stated)
    clear = configurator_row(tmp_path, **{**stated, "decode_num_workers": 4, "decode_tp_size": 8})
    rounded = configurator_row(tmp_path, **{**stated, "silicon_ttft_ms": 208.55})
    other = configurator_row(tmp_path, **{**stated, "silicon_ttft_ms": 250})
    assert distinct([unclear, clear, rounded, other]) == [clear, other]


def series(folder: Path, times_ms: dict[int, tuple[float, float]]) -> list[Benchmark]:
    """Rows of one series: times to the first token and between tokens by requests at once."""
    return [
        configurator_row(
            folder, concurrency=requests, silicon_ttft_ms=first, silicon_tpot_ms=interval
        )
        for requests, (first, interval) in times_ms.items()
    ]


def test_rows_that_most_others_contradict_are_found_by_what_was_measured(tmp_path: Path) -> None:
    sound = {4: (100.0, 10.0), 8: (120.0, 11.0), 16: (95.0, 14.0), 32: (150.0, 18.0)}
    assert not any(contradictory(series(tmp_path, sound)))
    slow = series(tmp_path, sound | {8: (120.0, 30.0)})
    assert contradictory(slow) == [False, True, False, False]
    late = series(tmp_path, sound | {4: (9000.0, 10.0)})
    assert contradictory(late) == [True, False, False, False]
    # Nobody knows which of two is wrong.
    pair = series(tmp_path, {8: (120.0, 60.0), 16: (120.0, 14.0)})
    assert contradictory(pair) == [True, True]


def test_runs_of_one_configuration_that_differ_by_half_are_all_doubted(tmp_path: Path) -> None:
    """Rows do not say whether tokens were speculated: 14.7 and 6.8 ms of one configuration."""
    plain, speculated = (
        configurator_row(tmp_path, silicon_ttft_ms=first, silicon_tpot_ms=interval)
        for first, interval in ((179, 14.7), (313, 6.8))
    )
    again = configurator_row(tmp_path, silicon_tpot_ms=21)
    assert contradictory([plain, speculated]) == [True, True]
    assert contradictory([configurator_row(tmp_path), again]) == [False, False]


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.lists(st.integers(7, 13), min_size=3, max_size=6, unique=True),
    seed=st.integers(0, 2**32 - 1),
)
def test_residuals_are_shared_as_by_regression_with_equal_weights(
    tokens: list[int], seed: int
) -> None:
    """Against the formula written out, where no residual is odd: weights of all are near alike."""
    rows = [row_of_length(2**power) for power in tokens]
    residual = np.random.default_rng(seed).normal(0, 1e-4, len(rows))
    residual[-1] = np.nan
    noise = 0.05
    found = shared_residuals(rows, residual, noise)
    known = residual[:-1]
    distance = np.subtract.outer(np.array(tokens, float), np.array(tokens, float)) / 1.5
    covariance = (2.5 * noise) ** 2 * np.exp(-0.5 * distance**2)
    inverse = np.linalg.inv(covariance[:-1, :-1] + np.eye(len(known)) * noise**2 * 3 / 4)
    assert found == pytest.approx(covariance[:, :-1] @ inverse @ known, rel=1e-3, abs=1e-9)


def row_of_length(tokens: float) -> Benchmark:
    return Benchmark(
        model=language_model("qwen3-32b"), gpu=serving_gpu("h100"), engine="vllm",
        precision="bf16", input_tokens=tokens, output_tokens=512, concurrency=8, num_gpus=4,
        prefill_gpus=4,
    )  # fmt: skip


def test_residuals_are_not_shared_with_other_software_or_far_loads() -> None:
    near, far = row_of_length(1024), row_of_length(2**20)
    other = replace(near, version="another")
    residual = np.array([0.2, np.nan, np.nan, np.nan])
    found = shared_residuals([near, near, far, other], residual, noise=0.05)
    assert found[1] == found[0] > 0.05
    assert found[2] == pytest.approx(0, abs=1e-6)
    assert found[3] == 0


def test_measured_rows_predict_each_other_by_what_differs() -> None:
    few, row, many = (
        replace(
            row_of_length(1024), concurrency=requests, first_token_s=first, token_interval_s=0.02
        )
        for requests, first in ((4, 0.1), (8, 0.3), (16, 0.4))
    )
    again = replace(row, first_token_s=0.2)
    newer = replace(row, version="newer", first_token_s=0.6)
    rows = [few, row, many, again, newer]
    assert same_configuration(rows) == [[], [3], [], [1], []]
    assert other_versions(rows) == [[], [4], [], [4], [1, 3]]
    assert nearest_loads(rows) == [[], [0, 2], [], [0, 2], []]
    first_tokens = relative_errors(rows, nearest_loads(rows))[:, 1]
    assert first_tokens == pytest.approx([0.0, 1 / 3])
