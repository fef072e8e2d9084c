"""Noise taken out of profiles."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cli_helpers import assert_refused, envplan
from envplan.devices.modelled import gpu
from envplan.errors import InputError
from envplan.profile import Profile
from envplan.profile.smoothing import smooth_curve
from envplan.profiling.smoothing import smooth_profile

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import smoothing

GPUS = ("a40", "a100-sxm4-80gb", "v100", "h100-sxm")
ROUNDING = 2e-6


def truth(name: str, flops: float, traffic: float, step: int = 4) -> tuple[np.ndarray, ...]:
    """Clocks, times and energies of work on a modelled GPU."""
    model = gpu(name)
    clocks = np.array(model.clocks_mhz[::step][:60], dtype=float)
    times = np.array([model.time_s(flops, traffic, clock) for clock in clocks])
    powers = np.array([model.power_w(clock) for clock in clocks])
    return clocks, times, times * powers


def assert_shape(clocks: np.ndarray, times: np.ndarray, energies: np.ndarray) -> None:
    """Time falls and is convex over the clock, energy is convex over time, in log space."""
    falling = np.argsort(-clocks)
    x, t, e = -np.log(clocks[falling]), np.log(times[falling]), np.log(energies[falling])
    assert np.all(np.diff(t) >= -ROUNDING)
    assert_convex(x, t)
    flat = int(np.sum(t - t[0] < ROUNDING))
    assert np.all(np.diff(e[:flat]) <= ROUNDING)
    assert_convex(t[flat - 1 :], e[flat - 1 :])


def assert_convex(x: np.ndarray, y: np.ndarray) -> None:
    for k in range(1, len(x) - 1):
        part = (x[k] - x[k - 1]) / (x[k + 1] - x[k - 1])
        assert y[k] <= y[k - 1] + part * (y[k + 1] - y[k - 1]) + ROUNDING


def off(found: np.ndarray, true: np.ndarray) -> float:
    """Root mean square of the relative error."""
    return float(np.sqrt(np.mean((found / true - 1) ** 2)))


works = st.tuples(st.sampled_from(GPUS), st.floats(1e11, 1e14), st.floats(1e8, 1e11))


@settings(max_examples=40, deadline=None)
@given(works)
def test_what_has_the_shape_already_stays_as_it_is(work: tuple[str, float, float]) -> None:
    clocks, times, energies = truth(*work)
    found = smooth_curve(clocks, times, energies)
    np.testing.assert_allclose(found[0], times, rtol=1e-12)
    np.testing.assert_allclose(found[1], energies, rtol=1e-12)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(3, 40).flatmap(
        lambda n: st.tuples(
            st.lists(st.integers(1, 2000), min_size=n, max_size=n, unique=True),
            st.lists(st.floats(0.001, 10), min_size=n, max_size=n),
            st.lists(st.floats(0.1, 1000), min_size=n, max_size=n),
        )
    )
)
def test_whatever_comes_in_the_shape_comes_out(
    rows: tuple[list[int], list[float], list[float]],
) -> None:
    clocks, times, energies = (np.array(column, dtype=float) for column in rows)
    assert_shape(clocks, *smooth_curve(clocks, times, energies))


@pytest.mark.parametrize(
    ("name", "noise"),
    [("a40", 0.005), ("a100-sxm4-80gb", 0.02), ("v100", 0.05), ("h100-sxm", 0.02)],
)
def test_noise_is_reduced(name: str, noise: float) -> None:
    clocks, times, energies = truth(name, 1e13, 1e10, step=2)
    random = np.random.default_rng(7)
    raw, smooth = np.zeros(2), np.zeros(2)
    for _ in range(8):  # single draws may be lucky
        noisy = [
            true * np.exp(noise * random.standard_normal(len(true))) for true in (times, energies)
        ]
        found = smooth_curve(clocks, *noisy)
        assert_shape(clocks, *found)
        raw += [off(noisy[0], times), off(noisy[1], energies)]
        smooth += [off(found[0], times), off(found[1], energies)]
    assert np.all(smooth < 0.75 * raw)


def test_one_row_far_off_moves_no_other() -> None:
    clocks, times, energies = truth("a40", 1e13, 1e10)
    wrong_times, wrong_energies = times.copy(), energies.copy()
    wrong_times[20] *= 1.5
    wrong_energies[20] *= 1.5
    found = smooth_curve(clocks, wrong_times, wrong_energies)
    np.testing.assert_allclose(found[0], times, rtol=1e-3)
    np.testing.assert_allclose(found[1], energies, rtol=3e-3)


def test_where_time_does_not_change_energy_is_not_levelled() -> None:
    clocks = np.arange(600, 1500, 60, dtype=float)
    energies = 10 + (clocks / 1000) ** 3
    found = smooth_curve(clocks, np.full(len(clocks), 0.1), energies)
    np.testing.assert_allclose(found[0], 0.1)
    np.testing.assert_allclose(found[1], energies)


HEADER = "stage,instruction,frequency,time,energy,time_std,config,note\n"


def noisy_file(path: Path, seed: int = 1) -> Path:
    """A noisy profile of one stage, with constant-time and blocking rows."""
    random = np.random.default_rng(seed)
    lines = [HEADER]
    for instruction, flops in (("forward", 1e13), ("backward", 2e13)):
        for clock, time, energy in zip(*truth("a40", flops, 1e10), strict=True):
            noise = np.exp(0.02 * random.standard_normal(2))
            lines.append(
                f"0,{instruction},{clock:.0f},{time * noise[0]:.9f},{energy * noise[1]:.6f},"
                "0.001,,as measured\n"
            )
            lines.append(f"0,blocking,{clock:.0f},1,{60 + clock / 100:.6f},,{instruction},\n")
    lines.append("0,load,0,0.0123,4.56,,,\n")
    lines.append("0,optimizer,1740,0.0200,9.1,,,\n")
    lines.append("0,optimizer,1500,0.0100,9.9,,,\n")
    path.write_text("".join(lines))
    path.with_suffix(".meta.json").write_text(json.dumps({"gpu": "A40", "operator": "us"}))
    return path


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_the_file_keeps_every_measured_cell(tmp_path: Path) -> None:
    path = noisy_file(tmp_path / "profile.csv")
    smoothed = smooth_profile(path)
    smoothed.save_csv(tmp_path / "smooth.csv")
    before, after = rows_of(path), rows_of(tmp_path / "smooth.csv")
    moved = 0
    for old, new in zip(before, after, strict=True):
        assert (new["raw_time"], new["raw_energy"]) == (old["time"], old["energy"])
        assert all(new[name] == old[name] for name in old if name not in ("time", "energy"))
        moved += (new["time"], new["energy"]) != (old["time"], old["energy"])
        if new["instruction"] in ("load", "optimizer", "blocking"):
            assert (new["time"], new["energy"]) == (old["time"], old["energy"])
    sidecar = json.loads((tmp_path / "smooth.meta.json").read_text())
    assert sidecar["operator"] == "us"
    assert sidecar["smoothed"]["rows_moved"] == moved > 40
    assert 0.01 < sidecar["smoothed"]["largest_change_of_time"] < 0.2
    assert "least absolute deviations" in sidecar["smoothed"]["method"]


def test_a_file_is_smoothed_from_its_raw_values_however_it_is_written(tmp_path: Path) -> None:
    path = noisy_file(tmp_path / "profile.csv")
    smoothed = smooth_profile(path)
    smoothed.save_csv(tmp_path / "smooth.csv")
    assert smooth_profile(tmp_path / "smooth.csv").sha256 == smoothed.sha256
    path.write_bytes(b"\xef\xbb\xbf\n" + path.read_bytes().replace(b"\n", b"\r"))
    assert smooth_profile(path).sha256 == smoothed.sha256


@pytest.mark.parametrize("raw", ["abc", "0"])
def test_raw_times_are_checked_as_times_are(tmp_path: Path, raw: str) -> None:
    path = tmp_path / "profile.csv"
    path.write_text(
        "stage,instruction,frequency,time,energy,raw_time\n"
        f"0,forward,1740,1,1,{raw}\n0,backward,1740,1,1,\n"
    )
    with pytest.raises(InputError, match=r"profile\.csv:2, column raw_time: "):
        smooth_profile(path)


def test_a_profile_without_curves_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.csv"
    path.write_text(
        "stage,instruction,frequency,time,energy\n0,forward,1740,1,1\n0,backward,1740,1,1\n"
    )
    with pytest.raises(InputError, match="rows for 3 clocks"):
        smooth_profile(path)


def test_a_picture_of_parts_without_a_clock_in_common_is_refused(tmp_path: Path) -> None:
    rows = [
        (0, name, mhz + more, 100 / mhz, mhz / 100)
        for name, more in (("forward", 0), ("backward", 5))
        for mhz in (800, 900, 1000)
    ]
    Profile.from_rows(rows).save_csv(tmp_path / "profile.csv")
    ran = envplan("smooth", "--plot", cwd=tmp_path)
    assert_refused(ran, 2, "forward and backward of stage 0", "no clock in common")


def test_the_command_smooths_and_the_result_plans(tmp_path: Path) -> None:
    noisy_file(tmp_path / "profile.csv")
    ran = envplan("smooth", "--plot", cwd=tmp_path)
    assert ran.code == 0, ran.err
    for word in ("rows moved", "raw_time", "wrote smooth.csv", "wrote smooth.png"):
        assert word in ran.out
    planned = envplan("solve", "smooth.csv", "-m", "4", "--quiet", cwd=tmp_path)
    assert planned.code == 0, planned.err
    told = envplan("smooth", "--json", "-o", "profile.csv", cwd=tmp_path)
    assert json.loads(told.out)["rows_moved"] > 40
    assert "raw_energy" in (tmp_path / "profile.csv").read_text().splitlines()[0]
    ran = envplan("smooth", "a40-gpt3-1.3b-4stage", cwd=tmp_path)
    assert "no row moved" in ran.out, ran.err


def test_plans_from_the_smoothed_profile_waste_less(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["smoothing", "--draws", "2", "--noise", "2", "--microbatches", "4"]
    monkeypatch.setattr(sys, "argv", arguments)
    smoothing.main()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| 2 |")]
    measured, smooth = ([float(cell) for cell in line.split("|")[3:-1]] for line in lines)
    assert all(0 < better < worse for better, worse in zip(smooth, measured, strict=True))


def noisy_sweep(noise: float, repeats: int = 1) -> list[tuple[object, ...]]:
    """Rows of two stages that a power limit holds back at the top, with noise in every one."""
    random = np.random.default_rng(7)
    rows: list[tuple[object, ...]] = []
    for stage in (0, 1):
        for instruction, flops in (("forward", 1e13), ("backward", 2e13)):
            clocks, times, energies = truth("a40", flops, 2e10, step=1)
            for clock, *values in zip(clocks, times, energies, strict=True):
                for _ in range(repeats):
                    drawn = (value * np.exp(noise * random.standard_normal()) for value in values)
                    rows.append((stage, instruction, int(clock), *drawn))
    return rows


@pytest.mark.parametrize("noise", [0.03, 0.05, 0.1])
def test_noise_of_several_percent_in_every_row_is_taken_out(noise: float, tmp_path: Path) -> None:
    true = Profile.from_rows(noisy_sweep(0.0))
    Profile.from_rows(noisy_sweep(noise)).save_csv(tmp_path / "profile.csv")
    profile = Profile.read_csv(tmp_path / "profile.csv")
    assert not true.noisy
    assert profile.noisy
    for table, exact in zip(profile.tables(), true.tables(), strict=True):
        least = int(table.time_ns[0]) / int(exact.time_ns[0])
        assert abs(least - 1) < noise / 2  # the fastest of so many rows is two deviations off


def test_noise_is_taken_out_of_rows_that_others_are_derived_from(tmp_path: Path) -> None:
    Profile.from_rows(noisy_sweep(0.02)).save_csv(tmp_path / "profile.csv")
    for options in (["--schedule", "zb-h1"], ["--recompute"]):
        ran = envplan("solve", "profile.csv", "-m", 4, *options, cwd=tmp_path)
        assert (ran.code, ran.err) == (0, "")
        assert "on the rows as measured its clocks take" in ran.out
        assert envplan("check", "plan.json", cwd=tmp_path).code == 0


def test_rows_that_measure_again_have_one_smooth_value(tmp_path: Path) -> None:
    path = tmp_path / "profile.csv"
    Profile.from_rows(noisy_sweep(0.02, repeats=3)).save_csv(path)
    smoothed = smooth_profile(path)
    smoothed.save_csv(tmp_path / "smooth.csv")
    assert len(rows_of(tmp_path / "smooth.csv")) == len(rows_of(path))
    table, *_ = smoothed.tables()
    assert_shape(*np.array([(m, t, e) for m, _, t, e in table.options()], dtype=float).T)
