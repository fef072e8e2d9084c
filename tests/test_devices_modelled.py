"""The modelled GPUs: clocks, power, time, and the measured points they were fitted to."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envplan.devices.modelled import GPUS, ModelledGpu, gpu
from envplan.errors import InputError

every_gpu = pytest.mark.parametrize("device", GPUS.values(), ids=GPUS)


def share(device: ModelledGpu, memory_share: float) -> tuple[float, float]:
    """FLOPs and bytes of an operation of one second at the capped clock."""
    rate = device.compute_efficiency * device.peak_flops_per_mhz * device.capped_clock_mhz
    traffic = memory_share * device.memory_efficiency * device.bandwidth
    return (1 - memory_share) * rate, traffic


@pytest.mark.parametrize(
    ("key", "lowest", "highest", "number", "memory", "limit"),
    [
        ("v100", 135, 1530, 187, 877, 300),
        ("p100", 544, 1328, 63, 715, 250),
        ("a40", 210, 1740, 103, 7251, 300),
        ("a100-sxm4-80gb", 210, 1410, 81, 1593, 400),
        ("h100-sxm", 345, 1980, 110, 2619, 700),
    ],
)
def test_clocks_and_limits_are_those_of_the_data_sheet(
    key: str, lowest: int, highest: int, number: int, memory: int, limit: int
) -> None:
    device = gpu(key)
    assert (device.clocks_mhz[-1], device.clocks_mhz[0]) == (lowest, highest)
    assert len(device.clocks_mhz) == number
    assert (device.memory_clock_mhz, device.power_limit_w) == (memory, limit)
    steps = {one - other for one, other in itertools.pairwise(device.clocks_mhz)}
    assert len(steps) == 1 or max(steps) - min(steps) == 1  # of V100 and P100: 7.5 and 12.66


def test_names_are_found_in_any_case_and_unknown_ones_listed() -> None:
    assert gpu("A40") is GPUS["a40"]
    with pytest.raises(InputError, match="did you mean a40"):
        gpu("a41")


@every_gpu
def test_clocks_above_what_the_limit_affords_change_nothing(device: ModelledGpu) -> None:
    powers = [device.power_w(clock) for clock in device.clocks_mhz]
    times = [device.time_s(1e12, 1e9, clock) for clock in device.clocks_mhz]
    assert max(powers) <= device.power_limit_w
    assert min(powers) > device.static_power_w
    assert all(device.blocking_power_w(f) < device.power_w(f) for f in device.clocks_mhz)
    for k, (high, low) in enumerate(itertools.pairwise(device.clocks_mhz)):
        assert powers[k] >= powers[k + 1]
        if low >= device.capped_clock_mhz:
            assert times[k] == times[k + 1]
        elif high <= device.capped_clock_mhz:
            assert times[k] < times[k + 1]


@every_gpu
def test_capped_clock_draws_the_limit(device: ModelledGpu) -> None:
    if device.key == "p100":  # its fit stays below its limit
        assert device.capped_clock_mhz == device.clocks_mhz[0]
        return
    assert device.uncapped_power_w(device.capped_clock_mhz) == pytest.approx(device.power_limit_w)


@pytest.mark.parametrize(
    "device",
    # No limit measured on the P100 reaches its knee: its model has none, nor always a valley.
    [device for device in GPUS.values() if device.key != "p100"],
    ids=lambda device: device.key,
)
@given(memory_share=st.floats(0.1, 0.7))
def test_energy_has_a_valley_inside_the_range(device: ModelledGpu, memory_share: float) -> None:
    flops, traffic = share(device, memory_share)
    energies = [
        device.time_s(flops, traffic, clock) * device.power_w(clock) for clock in device.clocks_mhz
    ]
    valley = energies.index(min(energies))
    assert 0 < valley < len(energies) - 1
    assert energies[valley] < energies[0]


@pytest.mark.parametrize(
    ("key", "clock", "watts"),
    [  # Perseus artifact, forward of a GPT-3 175B stage: energy over time
        ("a40", 855, 176.7),
        ("a40", 1020, 194.6),
        ("a40", 1200, 223.7),
        ("a40", 1350, 266.3),
        ("a40", 1650, 297.5),
        ("a40", 675, 162.0),  # Zeus documentation, last stage's backward
        ("a100-sxm4-80gb", 855, 234.6),
        ("a100-sxm4-80gb", 1065, 279.2),
        ("a100-sxm4-80gb", 1200, 343.6),
        ("a100-sxm4-80gb-480w", 1350, 455.7),
        ("a100-sxm4-80gb-480w", 1410, 474.6),
    ],
)
def test_power_meets_measured_points_within_four_percent(
    key: str, clock: int, watts: float
) -> None:
    assert gpu(key).power_w(clock) == pytest.approx(watts, rel=0.04)


@pytest.mark.parametrize("key", ["a100-pcie-80gb", "a100-sxm4-80gb"])
def test_a_waiting_a100_draws_what_was_measured(key: str) -> None:
    assert gpu(key).blocking_power_w(1410) == pytest.approx(83.64, rel=0.005)


@pytest.mark.parametrize(
    ("clock", "seconds"),
    [(1740, 0.1125), (1500, 0.1142), (1350, 0.1177), (1200, 0.1274), (1020, 0.1423), (855, 0.1644)],
)
def test_a_plus_b_over_f_with_a_cap_meets_measured_a40_times(clock: int, seconds: float) -> None:
    a40 = gpu("a40")
    modelled = 0.0402 + 105.15 / a40.settled_clock_mhz(clock)
    assert modelled == pytest.approx(seconds, rel=0.02)


@pytest.mark.parametrize("key", ["a40", "a100-pcie-40gb", "a100-pcie-80gb", "rtx3090", "v100"])
def test_waiting_draws_what_was_seen_on_waits(key: str) -> None:
    device = gpu(key)
    assert all(46 <= device.blocking_power_w(clock) <= 90 for clock in device.clocks_mhz)


def test_single_precision_is_slower_and_known_for_the_v100_alone() -> None:
    v100 = gpu("v100")
    assert v100.time_s(1e12, 0.0, 1200, "single") > 5 * v100.time_s(1e12, 0.0, 1200)
    assert v100.time_s(0.0, 1e9, 1200, "single") == 2 * v100.time_s(0.0, 1e9, 1200)
    with pytest.raises(InputError, match="single precision is not modelled for the NVIDIA A40"):
        gpu("a40").time_s(1e12, 0.0, 1200, "single")
