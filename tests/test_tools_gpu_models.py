"""Reading measured points, fitting the GPU model to them, and what the documentation says of it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from envplan.devices.modelled import GPUS, ModelledGpu, gpu
from envplan.errors import InputError

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.document import block, markdown_table, update_block
from tools.gpu_models import (
    DEVICES,
    FITTED,
    Curve,
    Parameters,
    committed,
    fit_gpu,
    judge,
    main,
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


def curves_of_the_model(device: ModelledGpu) -> list[Curve]:
    """Points that the model itself makes under limits of 100 to 250 W."""
    parameters = committed(device)
    static = parameters.static_power_w
    limits = np.arange(250.0, 99.0, -25.0)
    clocks = np.linspace(device.clocks_mhz[-1], device.clocks_mhz[0], 5000)
    dynamic = np.array([device.uncapped_power_w(f) - static for f in clocks.tolist()])
    curves = []
    for memory, compute, waits, activity in (
        (0.2, 900.0, 0.05, 1.0),
        (0.5, 600.0, 0.1, 1.0),
        (0.4, 500.0, 0.4, 0.7),
    ):
        powers = static + activity * dynamic
        settled = np.array([clocks[max(0, np.searchsorted(powers, limit) - 1)] for limit in limits])
        busy = memory + compute / settled
        joules = np.interp(settled, clocks, powers) * busy + parameters.gap_power_w * waits
        name, source = f"bert-{len(curves)}", "summary_power_v100.csv"
        points = limits, busy + waits, joules
        curves.append(Curve("V100", source, name, name, *points))
    return curves


def test_points_of_the_model_are_met_almost_exactly() -> None:
    device = gpu("v100-pcie")
    for judgement in judge(device, curves_of_the_model(device)):
        assert np.abs(judgement.time_error).max() < 0.005
        assert np.abs(judgement.limit_energy_error).max() < 0.005
        assert judgement.modelled_valley_w == judgement.measured_valley_w
        assert judgement.valley_loss == 0


def test_judging_finds_activity_and_shares_again() -> None:
    device = gpu("v100-pcie")
    dense, _, waiting = judge(device, curves_of_the_model(device))
    assert dense.activity == pytest.approx(1.0, rel=0.1)
    assert waiting.activity == pytest.approx(0.7, rel=0.1)
    assert waiting.gap_share > dense.gap_share


def test_fit_meets_points_of_the_model_and_has_no_random_part() -> None:
    device = gpu("v100-pcie")
    curves = curves_of_the_model(device)
    fit = fit_gpu(device, curves)
    for judgement in judge(device, curves, fit):
        assert np.sqrt(np.mean(judgement.energy_error**2)) < 0.03
    assert fit_gpu(device, curves) == fit


def test_worse_parameters_are_judged_worse() -> None:
    device = gpu("v100-pcie")
    curves = curves_of_the_model(device)
    wrong = Parameters(90.0, 0.05, 1300.0, 0.0, 80.0)

    def error(parameters: Parameters | None) -> float:
        return max(np.abs(j.energy_error).max() for j in judge(device, curves, parameters))

    assert error(wrong) > 5 * error(None)


@pytest.mark.parametrize("name", DEVICES)
def test_every_measured_gpu_has_committed_parameters(name: str) -> None:
    assert committed(gpu(DEVICES[name])).gap_power_w > 0


def test_gpus_that_were_not_measured_have_none() -> None:
    for key in GPUS.keys() - set(DEVICES.values()) - {"v100"}:
        with pytest.raises(InputError, match="nothing was measured"):
            committed(gpu(key))


WINDOWS = """start_time,window_name,elapsed_time,gpu0_energy,gpu1_energy
1.0,__GlobalPowerLimitOptimizer_100,4.0,300.0,500.0
9.0,__GlobalPowerLimitOptimizer_300,2.0,500.0,700.0
"""
SUMMARY = """dataset,network,batch_size,optimizer,power_limit,time_per_epoch,average_power
d,n,8,adam,125,4.0,100.0
d,n,16,adam,125,3.0,110.0
d,n,8,adam,250,2.0,150.0
"""


def test_windows_are_sorted_by_limit_and_averaged_over_gpus(tmp_path: Path) -> None:
    (tmp_path / "A40+net+gpu0,1.csv").write_text(WINDOWS)
    [curve] = read_measured(tmp_path)
    assert (curve.gpu, curve.network, curve.workload) == ("A40", "net", "net, 2 GPUs")
    assert curve.limit_w.tolist() == [300, 100]
    assert curve.time_s.tolist() == [2.0, 4.0]
    assert curve.energy_j.tolist() == [600.0, 400.0]


def test_summary_gives_a_curve_for_each_workload(tmp_path: Path) -> None:
    (tmp_path / "summary_power_p100.csv").write_text(SUMMARY)
    one, two = sorted(read_measured(tmp_path), key=lambda curve: len(curve.limit_w))
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
def test_file_that_is_none_of_these_is_named(
    tmp_path: Path, name: str, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(content)
    assert main([str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert name in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["one", "two", "three"], ["/nowhere/at/all"]])
def test_script_refuses_wrong_arguments_with_one_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_block_of_a_document_is_replaced_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "a\n<!-- x: begin -->\nold\n<!-- x: end -->\nb\n<!-- y: begin --><!-- y: end -->"
    )
    update_block(page, "x", markdown_table(["h"], [["1"]]))
    assert block(page.read_text(), "x") == "| h |\n| --- |\n| 1 |"
    assert block(page.read_text(), "y") == ""
    assert page.read_text().startswith("a\n")


def test_document_without_the_block_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing here")
    with pytest.raises(InputError, match="no block"):
        update_block(page, "x", "new")
    with pytest.raises(InputError, match="cannot be read"):
        update_block(tmp_path / "none.md", "x", "new")


@pytest.fixture(scope="module")
def measured() -> list[Curve]:
    return read_measured(MEASURED)


@needs_measured
def test_all_four_gpus_are_read(measured: list[Curve]) -> None:
    assert {curve.gpu for curve in measured} == set(DEVICES)
    assert {curve.source for curve in measured} == {path.name for path in MEASURED.glob("*.csv")}


@needs_measured
@pytest.mark.parametrize("name", DEVICES)
def test_the_fit_finds_nothing_better_than_the_committed_parameters(
    name: str, measured: list[Curve]
) -> None:
    device = gpu(DEVICES[name])
    curves = [c for c in measured if c.gpu == name and c.source.startswith("summary")]
    fit, held = fit_gpu(device, curves), committed(device)
    if name in FITTED:
        best = misfit(device, curves, fit)
        assert misfit(device, curves, held) == pytest.approx(best, rel=0.02)
    else:  # the A40's come from a sweep of clocks, but for its waits
        assert fit.gap_power_w == pytest.approx(held.gap_power_w, abs=0.5)


@needs_measured
def test_residuals_in_the_documentation_are_current(measured: list[Curve]) -> None:
    # What the search says of the A40 may end elsewhere on another machine, and is left out.
    fits = {"A40": committed(gpu("a40"))}
    written = block((ROOT / "docs" / "profiles.md").read_text(encoding="utf-8"), "residuals")
    for old, new in zip(written.splitlines(), report(measured, fits).splitlines(), strict=True):
        if old.startswith("| A40, for comparison"):
            continue
        assert NUMBER.sub("#", old) == NUMBER.sub("#", new)
        for before, after in zip(NUMBER.findall(old), NUMBER.findall(new), strict=True):
            assert float(before) == pytest.approx(float(after), rel=0.02, abs=0.2)


@needs_measured
@pytest.mark.parametrize("name", ["V100", "A40", "P100"])
def test_transformers_that_a_limit_slows_are_met_within_five_percent(
    name: str, measured: list[Curve]
) -> None:
    curves = [
        curve
        for curve in measured
        if curve.gpu == name
        and curve.network.startswith("bert")
        and curve.energy_j[0] > curve.limit_w[-1] * curve.time_s[0]
    ]
    errors = np.concatenate([j.energy_error for j in judge(gpu(DEVICES[name]), curves)])
    assert np.sqrt(np.mean(errors**2)) < 0.05
