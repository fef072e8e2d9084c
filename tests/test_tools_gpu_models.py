"""Reading measured points, fitting the GPU model to them, and what the documentation says of it."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from envplan.devices.modelled import GPUS, gpu
from envplan.errors import InputError

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.document import block, markdown_table, update_block
from tools.gpu_models import (
    DEVICES,
    FITTED,
    Curve,
    fit_gpu,
    fitted_gpus,
    judge,
    misfit,
    read_measured,
    report,
)

ROOT = Path(__file__).resolve().parents[1]
MEASURED = ROOT.parent / "shared" / "data" / "measured"

NUMBER = re.compile(r"\d+(?:\.\d+)?")

needs_measured = pytest.mark.skipif(
    not MEASURED.is_dir(),
    reason="the measured points of the Zeus repository are not next to this checkout",
)


V100 = gpu("v100-pcie")


def synthetic(number: int, memory: float, compute: float, waits: float, activity: float) -> Curve:
    """Points that the model itself makes under limits of 100 to 250 W."""
    limits = np.arange(250.0, 99.0, -25.0)
    clocks = np.linspace(V100.clocks_mhz[-1], V100.clocks_mhz[0], 5000)
    static = V100.static_power_w
    powers = np.array(
        [static + activity * (V100.uncapped_power_w(f) - static) for f in clocks.tolist()]
    )
    settled = np.array([clocks[max(0, np.searchsorted(powers, limit) - 1)] for limit in limits])
    drawn = np.interp(settled, clocks, powers)
    busy = memory + compute / settled
    energy_j = drawn * busy + (V100.host_wait_power_w or 0.0) * waits
    name = f"bert-{number}"
    return Curve("V100", "summary_power_v100.csv", name, name, limits, busy + waits, energy_j)


def curves_of_the_model() -> list[Curve]:
    shapes = [(0.2, 900.0, 0.05, 1.0), (0.5, 600.0, 0.1, 1.0), (0.4, 500.0, 0.4, 0.7)]
    return [synthetic(number, *shape) for number, shape in enumerate(shapes)]


def test_points_of_the_model_are_met_and_its_activities_and_shares_found_again() -> None:
    curves = curves_of_the_model()
    judged = judge(V100, curves)
    for judgement in judged:
        assert np.abs(judgement.time_error).max() < 0.005
        assert np.abs(judgement.limit_energy_error).max() < 0.005
        assert judgement.modelled_valley_w == judgement.measured_valley_w
        assert judgement.valley_loss == 0
    dense, _, waiting = judged
    assert dense.activity == pytest.approx(1.0, rel=0.1)
    assert waiting.activity == pytest.approx(0.7, rel=0.1)
    assert waiting.gap_share > dense.gap_share
    # Worse parameters are judged worse, and those of a fit nearly as well.
    wrong = replace(
        V100,
        static_power_w=90.0,
        dynamic_power_w_per_mhz=0.05,
        knee_mhz=1300.0,
        voltage_slope_per_mhz=0.0,
        host_wait_power_w=80.0,
    )
    worst, best = (
        max(np.abs(j.energy_error).max() for j in each) for each in (judge(wrong, curves), judged)
    )
    assert worst > 5 * best
    fitted = fit_gpu(V100, curves)
    for judgement in judge(fitted, curves):
        assert np.sqrt(np.mean(judgement.energy_error**2)) < 0.03
    assert fit_gpu(V100, curves_of_the_model()) == fitted


def test_measured_gpus_have_committed_parameters_and_no_others() -> None:
    measured = {key for key in GPUS if gpu(key).host_wait_power_w}
    assert measured == {*DEVICES.values(), "v100"}


WINDOWS = """start_time,window_name,elapsed_time,gpu0_energy,gpu1_energy
1.0,__GlobalPowerLimitOptimizer_100,4.0,300.0,500.0
9.0,__GlobalPowerLimitOptimizer_300,2.0,500.0,700.0
"""
SUMMARY = """dataset,network,batch_size,optimizer,power_limit,time_per_epoch,average_power
d,n,8,adam,125,4.0,100.0
d,n,16,adam,125,3.0,110.0
d,n,8,adam,250,2.0,150.0
"""


def test_windows_are_averaged_over_gpus_and_a_summary_has_a_curve_for_each_workload(
    tmp_path: Path,
) -> None:
    (tmp_path / "A40+net+gpu0,1.csv").write_text(WINDOWS)
    (tmp_path / "summary_power_p100.csv").write_text(SUMMARY)
    windows, one, two = sorted(
        read_measured(tmp_path), key=lambda curve: (curve.gpu, len(curve.limit_w))
    )
    assert (windows.gpu, windows.network, windows.workload) == ("A40", "net", "net, 2 GPUs")
    assert windows.limit_w.tolist() == [300, 100]
    assert windows.time_s.tolist() == [2.0, 4.0]
    assert windows.energy_j.tolist() == [600.0, 400.0]
    assert one.workload == "n d batch 16 adam"
    assert two.limit_w.tolist() == [250, 125]
    assert two.energy_j.tolist() == [300.0, 400.0]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("A40+net+gpu0.csv", "a,b\n1,2\n"),
        ("A40+net+gpu0.csv", WINDOWS.replace("_300", "_much")),
        ("T4+net+gpu0.csv", WINDOWS),
        ("summary_power_a40.csv", SUMMARY.replace("150.0", "warm")),
    ],
)
def test_file_that_is_none_of_these_is_named(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=re.escape(name)):
        read_measured(tmp_path)


def test_block_of_a_document_is_replaced_alone_and_one_that_is_not_there_refused(
    tmp_path: Path,
) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- x: begin -->\nold\n<!-- x: end -->\nb\n")
    update_block(page, "x", markdown_table(["h"], [["1"]]))
    assert block(page.read_text(), "x") == "| h |\n| --- |\n| 1 |"
    assert page.read_text().startswith("a\n")
    with pytest.raises(InputError, match="no block"):
        update_block(page, "z", "new")
    with pytest.raises(InputError, match="cannot be read"):
        update_block(tmp_path / "none.md", "x", "new")


@pytest.fixture(scope="module")
def measured() -> list[Curve]:
    return read_measured(MEASURED)


@needs_measured
@pytest.mark.slow
def test_the_fit_finds_nothing_better_than_the_committed_parameters(measured: list[Curve]) -> None:
    fits = fitted_gpus(measured)
    held = gpu("a40").host_wait_power_w
    assert fits["A40"].host_wait_power_w == pytest.approx(held, abs=0.5)
    for name in FITTED:
        device = gpu(DEVICES[name])
        curves = [c for c in measured if c.gpu == name and c.source.startswith("summary")]
        assert misfit(device, curves) == pytest.approx(misfit(fits[name], curves), rel=0.02)


@needs_measured
def test_residuals_in_the_documentation_are_current(measured: list[Curve]) -> None:
    assert {curve.source for curve in measured} == {path.name for path in MEASURED.glob("*.csv")}
    fits = {name: gpu(key) for name, key in DEVICES.items()}
    written = block((ROOT / "docs" / "profiles.md").read_text(encoding="utf-8"), "residuals")
    for old, new in zip(written.splitlines(), report(measured, fits).splitlines(), strict=True):
        if old.startswith("| A40, for comparison"):
            continue  # the outcome of a search, which may end elsewhere on another machine
        assert NUMBER.sub("#", old) == NUMBER.sub("#", new)
        for before, after in zip(NUMBER.findall(old), NUMBER.findall(new), strict=True):
            assert float(before) == pytest.approx(float(after), rel=0.02, abs=0.2)
