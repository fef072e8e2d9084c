"""Kernels one by one: their time and power by clock, and what they make of a layer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tools.kernels import judge, read_measured

from envplan.devices.modelled import gpu
from envplan.profiling.kernel_model import KernelModel, kernel_model, read_kernel_models
from envplan.profiling.kernels import Attention, ElementWise, ExpertProducts, Kernel, MatrixProduct
from envplan.profiling.modelled import modelled_profile
from envplan.profiling.models import PRESETS
from envplan.profiling.training_job import TrainingJob
from envplan.units import POWER_UNITS_PER_W

MEASURED = Path(__file__).parents[2] / "shared" / "data" / "kernels"

sizes = st.integers(1, 20_000)
kernels: st.SearchStrategy[Kernel] = st.one_of(
    st.builds(MatrixProduct, sizes, sizes, sizes),
    st.builds(
        Attention,
        sequences=st.integers(1, 64),
        tokens=sizes,
        heads=st.integers(1, 128),
        key_value_heads=st.integers(1, 8),
        key_size=st.integers(1, 512),
        value_size=st.integers(1, 512),
        window=st.integers(0, 4096),
        is_backward=st.booleans(),
    ),
    st.builds(
        ExpertProducts,
        tokens=sizes,
        hidden_size=sizes,
        expert_size=sizes,
        per_token=st.integers(1, 8),
        experts=st.integers(8, 512),
        local_experts=st.integers(1, 8),
    ),
    st.builds(ElementWise, st.floats(1.0, 1e11)),
)
models = st.sampled_from(sorted(read_kernel_models().values(), key=lambda model: model.gpu.key))


def model_of(key: str) -> KernelModel:
    model = kernel_model(gpu(key))
    assert model is not None
    return model


@given(models, kernels)
def test_a_higher_clock_is_never_slower_and_never_draws_less(
    model: KernelModel, kernel: Kernel
) -> None:
    clocks = np.array(model.gpu.clocks_mhz[::-1], dtype=np.float64)
    cost = model.cost(kernel, clocks)
    assert (np.diff(cost.time_s) <= 1e-12 * cost.time_s[1:]).all()
    assert (np.diff(cost.power_w) >= -1e-6).all()


@given(models, kernels)
def test_power_keeps_to_the_limit(model: KernelModel, kernel: Kernel) -> None:
    cost = model.cost(kernel, model.gpu.clocks_mhz[0])
    assert float(cost.power_w) <= model.limit_share * model.gpu.power_limit_w + 0.01
    lowest, highest = model.gpu.clocks_mhz[-1], model.gpu.clocks_mhz[0]
    assert lowest <= float(cost.clock_mhz) <= highest


@given(models, kernels)
def test_a_lower_limit_is_never_faster(model: KernelModel, kernel: Kernel) -> None:
    capped = replace(model, gpu=replace(model.gpu, power_limit_w=0.8 * model.gpu.power_limit_w))
    highest = model.gpu.clocks_mhz[0]
    slow, fast = capped.cost(kernel, highest).time_s, model.cost(kernel, highest).time_s
    assert float(slow) >= float(fast)


def test_many_kernels_at_once_cost_what_each_costs_alone() -> None:
    model, rows = model_of("h200"), [1024, 4096, 5000]
    together = model.cost(MatrixProduct(np.array(rows), 4096, 1024), 1980)
    for row, time_s in zip(rows, together.time_s, strict=True):
        assert float(model.cost(MatrixProduct(row, 4096, 1024), 1980).time_s) == time_s


def test_a_window_of_all_tokens_is_no_window() -> None:
    model = model_of("b200")
    whole = Attention(1, 4096, 32, 8, 128, 128)
    assert model.cost(whole, 1965) == model.cost(replace(whole, window=4096), 1965)
    assert model.cost(replace(whole, window=512), 1965).time_s < model.cost(whole, 1965).time_s


#: Matrix products and attention of one layer of Llama 3 8B, 8,192 tokens, forward: the sum of the
#: measured kernels (the widest product between its measured neighbours), ms and W.
LAYERS = [("h200", 6.3, 691), ("b200", 3.1, 976)]


@pytest.mark.parametrize(("key", "kernels_ms", "power_w"), LAYERS)
def test_a_layer_of_llama_takes_what_its_kernels_take(
    key: str, kernels_ms: float, power_w: float
) -> None:
    job = TrainingJob(model=PRESETS["llama3-8b"], num_stages=32, microbatch_size=1)
    profile = modelled_profile(job, key, name="llama", step=300)
    option = profile.table(5, "forward").options()[0]  # a layer without embedding and head
    # Element-wise kernels add 5 to 10%.
    assert 1.05 * kernels_ms * 0.9 < option.time_ns / 1e6 < 1.10 * kernels_ms * 1.1
    assert option.energy_10fj / option.time_ns / POWER_UNITS_PER_W == pytest.approx(
        power_w, rel=0.08
    )


def test_a_modelled_profile_says_how_far_off_it_may_be() -> None:
    job = TrainingJob(model=PRESETS["llama3-8b"], num_stages=4, microbatch_size=1)
    profile = modelled_profile(job, "h200", name="llama", step=300)
    assert profile.metadata.model_error_between_clocks == 0.04
    spreads = list(profile.energy_spreads.values())
    assert len(spreads) == 4 * 2 * len(profile.clocks_mhz)
    assert all(0.04 < spread < 0.2 for spread in spreads)
    # It is no spread from run to run.
    assert profile.time_spread(0, "forward", max(profile.clocks_mhz)) is None


#: Kinds that miss the aim of 15% in time: of heads of 256 on GB200 four rows that are kept aside
#: claim more than three quarters of the peak.
BEYOND_AIM = {("gb200", "attention_256")}


@pytest.mark.skipif(not MEASURED.is_dir(), reason="the measured kernels are not here")
@pytest.mark.parametrize("key", ["h200", "b200", "gb200"])
def test_kernels_kept_aside_are_met(key: str) -> None:
    for measured in read_measured(MEASURED, key):
        residuals = judge(model_of(key), measured, aside=True)
        if measured.kind == "element_wise":  # what reading tells of them is power alone
            continue
        aim = 0.16 if (key, measured.kind) in BEYOND_AIM else 0.15
        assert residuals.time_rms < aim, measured.kind
        if measured.kind == "matrix_product":
            assert residuals.steady_power_rms < 0.08
            if key != "gb200":
                assert residuals.power_rms < 0.08


@pytest.mark.skipif(not MEASURED.is_dir(), reason="the measured kernels are not here")
def test_the_first_products_of_a_series_ran_after_a_pause() -> None:
    products = next(read_measured(MEASURED, "gb200"))
    assert isinstance(products.kernel, MatrixProduct)
    rows, columns = np.asarray(products.kernel.rows), np.asarray(products.kernel.columns)
    begins = np.flatnonzero((np.diff(rows) != 0) | (np.diff(columns) != 0)) + 1
    assert products.is_after_pause[begins].all()
    assert not products.is_after_pause[begins[np.diff(begins, append=len(rows)) > 2] + 2].any()
    # They drew less than what came after them, of the same rows and columns.
    is_long = products.latency_ms > 0.1
    first = products.power_w[products.is_after_pause & is_long]
    others = products.power_w[~products.is_after_pause & is_long]
    assert np.median(first) < 0.95 * np.median(others)
