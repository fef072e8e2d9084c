"""The profiler inside a running job: what it writes, and that training goes on whatever happens."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli_helpers import envplan
from envplan.devices.modelled import ModelledDevice, gpu
from envplan.errors import InputError
from envplan.profile import Profile, ProfileMetadata
from envplan.profiling.energy_minimum import EnergyMinimum
from envplan.runtime import Profiler
from envplan.runtime.energy_log import EnergyLog, Observations
from envplan.runtime.metering import measure_window
from envplan.runtime.power_regression import estimate_powers
from envplan.runtime.profile_parts import merge_parts
from envplan.runtime.work_timeline import Span
from fake_nvml import NOT_SUPPORTED, FakeNvml, fake_nvml, wait_for

__all__ = ["fake_nvml"]

CLOCKS = (1740, 1500, 1260)
MICROBATCHES = 4
FORWARD_S, BACKWARD_S = 0.002, 0.004


def started(folder: Path, **options: Any) -> Profiler:
    defaults = {
        "num_stages": 1,
        "rank": 0,
        "world_size": 1,
        "frequencies": CLOCKS,
        "warm_up": 1,
        "iterations_per_frequency": 2,
    }
    return Profiler(folder / "profile.csv", **{**defaults, **options})


def train(profiler: Profiler, steps: int = 200, before: Callable[[int], None] | None = None) -> int:
    """Train until the profiler is done; how many steps that took."""
    for step in range(steps):
        if profiler.done:
            return step
        if before is not None:
            before(step)
        for microbatch in range(MICROBATCHES):
            for instruction, seconds in (("forward", FORWARD_S), ("backward", BACKWARD_S)):
                profiler.begin(instruction, microbatch)
                time.sleep(seconds)
                profiler.end(instruction, microbatch)
                time.sleep(0.0005)
        profiler.step()
    return steps


def test_every_clock_gets_rows_and_the_clock_goes_back(
    fake_nvml: FakeNvml, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.INFO, "envplan.runtime"),
        started(tmp_path, metadata=ProfileMetadata(workload="sleep")) as profiler,
    ):
        # Warm-up; two each; one to settle after a change, and more where the guard is kept waiting.
        assert 1 + 2 * 3 + 2 <= train(profiler) < 50
    assert fake_nvml.clock_changes() == [*CLOCKS, 0]
    profile = Profile.read_csv(tmp_path / "profile.csv")
    for instruction, seconds in (("forward", FORWARD_S), ("backward", BACKWARD_S)):
        table = profile.table(0, instruction)
        assert set(table.frequency_mhz.tolist()) == set(CLOCKS)
        assert (table.time_ns >= seconds * 1e9).all()
    assert profile.metadata.num_microbatches == MICROBATCHES
    assert profile.metadata.source == "measured"
    assert profile.metadata.workload == "sleep"
    assert [clock for clock in CLOCKS if f"profiled at {clock} MHz" in caplog.text] == list(CLOCKS)
    assert envplan("check", "profile.csv", cwd=tmp_path).code == 0
    files = sorted(tmp_path.glob("profile*"))
    assert [file.name for file in files] == ["profile.csv", "profile.meta.json"]
    header = "stage,instruction,frequency,time,energy,time_std,energy_std,samples,clock,throttle"
    assert files[0].read_text().startswith(header + "\n")


@pytest.mark.parametrize("lock", [True, False], ids=["without permission", "not asked for"])
def test_clocks_are_left_alone_and_the_current_one_is_measured(
    fake_nvml: FakeNvml, tmp_path: Path, caplog: pytest.LogCaptureFixture, lock: bool
) -> None:
    fake_nvml.gpu(0).permission = not lock
    with started(tmp_path, lock=lock) as profiler:
        train(profiler)
    assert ("at the current clock only" in caplog.text) == lock
    assert fake_nvml.clock_changes() == []
    assert len(Profile.read_csv(tmp_path / "profile.csv").table(0, "forward").time_ns) == 1


def test_gpu_is_one_that_cuda_leaves_to_the_job(
    fake_nvml: FakeNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with started(tmp_path) as profiler:
        train(profiler, steps=3)
    assert {call.gpu for call in fake_nvml.calls()} == {3}


def test_killed_guard_ends_profiling_and_not_training(fake_nvml: FakeNvml, tmp_path: Path) -> None:
    def kill(step: int) -> None:
        if step == 4:
            guard = profiler.guard
            assert guard is not None
            os.kill(guard.pid, signal.SIGKILL)
            wait_for(lambda: not guard.alive)

    with started(tmp_path, frequencies=None) as profiler:
        assert train(profiler, before=kill) < 200
    assert fake_nvml.locked() is None
    # It has the clocks that were got to.
    profile = Profile.read_csv(tmp_path / "profile.csv")
    assert set(profile.table(0, "forward").frequency_mhz.tolist()) == {1740}


def test_clock_that_cannot_be_set_has_no_rows(
    fake_nvml: FakeNvml, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def before(step: int) -> None:
        fake_nvml.fail("lock", probability=1.0 if profiler.measured_frequency == 1500 else 0.0)

    with started(tmp_path) as profiler:
        train(profiler, before=before)
    clocks = set(Profile.read_csv(tmp_path / "profile.csv").table(0, "forward").frequency_mhz)
    assert clocks == {1740, 1260}
    assert "while profiling" in caplog.text


def test_energy_counter_that_fails_leaves_training_alone(
    fake_nvml: FakeNvml, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with started(tmp_path) as profiler:
        fake_nvml.fail("energy")
        train(profiler)
    assert profiler.done
    assert "was passed over" in caplog.text
    assert "measured nothing" in caplog.text
    assert not (tmp_path / "profile.csv").exists()
    assert fake_nvml.locked() is None


@pytest.mark.parametrize("kind", ["init", "handle", "limit"])
def test_driver_that_hangs_at_the_start_leaves_training_alone(
    fake_nvml: FakeNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("envplan.devices.START_TIMEOUT_S", 0.3)
    monkeypatch.setattr("envplan.runtime.profiler.OPEN_TIMEOUT_S", 0.3)
    monkeypatch.setattr("envplan.devices.guard.START_TIMEOUT_S", 0.5)
    fake_nvml.hang(kind)
    with started(tmp_path) as profiler:
        train(profiler, steps=3)
    fake_nvml.hang()
    assert fake_nvml.calls(kind="lock") == []


def test_driver_that_hangs_at_the_end_does_not_keep_training(
    fake_nvml: FakeNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envplan.devices.guard.CLOSE_TIMEOUT_S", 0.3)
    monkeypatch.setattr("envplan.devices.guard.TERMINATE_TIMEOUT_S", 0.1)
    monkeypatch.setattr("envplan.runtime.profiler.JOB_END_TIMEOUT_S", 0.2)
    with started(tmp_path) as profiler:
        train(profiler, steps=4)
        fake_nvml.hang("energy", "reset")
    assert fake_nvml.locked() is not None
    fake_nvml.hang()
    assert fake_nvml.wait_until_free(60) is not None


def test_failed_training_does_not_wait_for_the_parts_of_others(
    fake_nvml: FakeNvml, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    part = tmp_path / "profile.rank0.part.json"
    part.write_text("of an earlier job")

    def fail(step: int) -> None:
        assert not part.exists()
        if step == 4:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), started(tmp_path, world_size=2) as profiler:
        train(profiler, before=fail)
    assert "the parts of ranks 1 are not there" in caplog.text
    assert fake_nvml.locked() is None
    assert part.exists()


def test_gpu_without_a_counter_is_measured_by_its_power(
    fake_nvml: FakeNvml, tmp_path: Path
) -> None:
    fake_nvml.gpu(0).energy_counter = 0
    fake_nvml.fail("energy", NOT_SUPPORTED)
    fake_nvml.fail("throttle")  # reasons that cannot be read cost no reading
    with started(tmp_path) as profiler:
        train(profiler)
    profile = Profile.read_csv(tmp_path / "profile.csv")
    assert profile.metadata.extra["energy_source"] == "integrated power"


def test_chunk_without_a_stage_ends_profiling_and_not_training(
    fake_nvml: FakeNvml, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with started(tmp_path, warm_up=0, iterations_per_frequency=1) as profiler:
        for microbatch in range(4):
            profiler.begin("forward", microbatch, 1)
            time.sleep(0.02)
            profiler.end("forward", microbatch, 1)
            profiler.step()
    assert "forward came for chunk 1" in caplog.text
    assert fake_nvml.locked() is None


def test_no_gpu_is_one_line_and_training_goes_on(
    fake_nvml: FakeNvml, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with started(tmp_path, device=7) as profiler:
        assert profiler.done
        train(profiler)
    (said,) = caplog.messages
    assert "nothing is profiled: there is no GPU 7" in said


def test_evaluation_in_between_starts_a_clock_again(fake_nvml: FakeNvml, tmp_path: Path) -> None:
    def evaluate(step: int) -> None:
        if step == 2:
            profiler.full_speed()

    with started(tmp_path, frequencies=[1500]) as profiler:
        # A warm-up, one that is lost, one to settle, two that count.
        assert 5 <= train(profiler, before=evaluate) < 50


def test_iterations_before_a_clock_is_in_force_do_not_count(
    fake_nvml: FakeNvml, tmp_path: Path
) -> None:
    fake_nvml.gpu(0).lock_delay_ns = 200_000_000  # several iterations
    with started(tmp_path) as profiler:
        train(profiler)
    rows = pd.read_csv(tmp_path / "profile.csv").query("instruction == 'backward'")
    assert set(rows.frequency) == set(CLOCKS)
    for row in rows.itertuples():
        watts = fake_nvml.model.uncapped_power_w(row.frequency, 1.0)
        expected = min(watts, fake_nvml.model.power_limit_w)
        # Where other work keeps the machine busy, a row says that it is less sure.
        error = row.energy_std / row.samples**0.5 / row.time
        assert row.energy / row.time == pytest.approx(expected, abs=0.1 * expected + 4 * error)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"frequencies": [1741]}, "1741 MHz, which the NVIDIA A40 does not support"),
        ({"iterations_per_frequency": 0}, "must be at least 1"),
        ({"stages": [3]}, "has stage 3 of 1"),
    ],
)
def test_bad_arguments_are_refused_and_leave_nothing(
    fake_nvml: FakeNvml, tmp_path: Path, options: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(InputError, match=complaint):
        started(tmp_path, **options)
    assert list(tmp_path.glob("profile*")) == []
    with pytest.raises(InputError, match="cannot be written"):
        started(tmp_path / "missing")
    assert fake_nvml.calls(kind="lock") == []


def part_row(rank: int, instruction: str, **changes: Any) -> dict[str, Any]:
    row = {"stage": 0, "instruction": instruction, "frequency": 1740, "clock": 1740}
    row |= {"time": 0.1 + 0.1 * rank, "energy": 10.0, "time_std": 0.01, "energy_std": 1.0}
    return {**row, "samples": 1 + 2 * rank, "throttle": "power cap" if rank else "", **changes}


def write_part(folder: Path, rank: int, **changes: Any) -> None:
    part = {
        "schema": "envplan/profile-part/v1",
        "rank": rank,
        "problem": None,
        "world_size": 2,
        "num_stages": 1,
        "num_microbatches": 8,
        "energy_source": "counter",
        "metadata": {"gpu": "NVIDIA A40"},
        "rows": [part_row(rank, name) for name in ("forward", "backward")],
    }
    path = folder / f"profile.rank{rank}.part.json"
    path.write_text(json.dumps({**part, **changes}))


def test_ranks_of_one_stage_are_averaged_and_one_is_enough(tmp_path: Path) -> None:
    for rank in (0, 1):
        write_part(tmp_path, rank)
    profile = merge_parts(tmp_path / "profile.csv")
    assert profile.table(0, "forward").time_ns.tolist() == [175_000_000]  # (1 * 0.1 + 3 * 0.2) / 4
    assert "power cap" in (tmp_path / "profile.csv").read_text()
    assert list(tmp_path.glob("*.part.json")) == []
    write_part(tmp_path, 0)
    write_part(tmp_path, 1, rows=[], problem="GPU 1: lost")
    assert merge_parts(tmp_path / "profile.csv").table(0, "forward").time_ns.tolist() == [10**8]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"rows": [], "problem": "GPU 1: lost"}, "rank 1 measured nothing: GPU 1: lost"),
        ({"schema": "envplan/profile-part/v0"}, "is not a part of a profile: its schema is"),
        ({"rows": [{"stage": 0}]}, r"rows\[0\]\.\w+ is missing"),
    ],
)
def test_parts_that_make_no_profile_are_refused(
    tmp_path: Path, changes: dict[str, Any], complaint: str
) -> None:
    write_part(tmp_path, 0, num_stages=2)
    with pytest.raises(InputError, match=r"profile\.rank1\.part\.json.*cannot be read"):
        merge_parts(tmp_path / "profile.csv")
    write_part(tmp_path, 1, **changes)
    with pytest.raises(InputError, match=complaint):
        merge_parts(tmp_path / "profile.csv")
    assert not (tmp_path / "profile.csv").exists()


@pytest.mark.parametrize(
    ("waits", "power"),
    [
        ([(50.0, 5.0), (90.0, 36.0)], 50.0),  # what is not sure is not needed
        ([(50.0, 15.0), (70.0, 21.0), (60.0, 18.0), (300.0, 200.0)], 57.8),
        ([(50.0, 24.0), (70.0, 34.0)], None),  # not sure even together
        ([(50.0, 26.0)] * 100, None),  # what says nothing does not say more for being many
    ],
)
def test_powers_while_waiting_are_taken_together_where_none_is_sure(
    tmp_path: Path, waits: list[tuple[float, float]], power: float | None
) -> None:
    rows = [part_row(0, name) for name in ("forward", "backward")]
    for k, (energy, error) in enumerate(waits):
        waited = {"time": 1.0, "energy": energy, "energy_std": error}
        rows.append(part_row(0, "blocking", frequency=1740 - 15 * k, **waited))
    write_part(tmp_path, 0, world_size=1, rows=rows)
    found = merge_parts(tmp_path / "profile.csv").blocking_power_w
    assert found == (None if power is None else pytest.approx([power], abs=0.1))


def test_sweep_ends_at_five_rises_in_a_row_that_are_no_noise() -> None:
    minimum = EnergyMinimum(5)
    energies = [10.0, 9.0, 9.5, 9.4, 8.0, 8.05, 9.0, 9.0, 9.0, 9.0, 9.0]
    assert [minimum.is_passed_at(energy, 0.1) for energy in energies] == [False] * 10 + [True]


def seen_at(
    times: Sequence[float], joules: Sequence[float], unsure: Sequence[float] | None = None
) -> Observations:
    errors = [0.003] * len(times) if unsure is None else unsure
    return Observations(*map(np.array, (times, errors, joules)), 1000, frozenset())


@given(
    watts=st.lists(st.floats(50, 400), min_size=2, max_size=4),
    seed=st.integers(0, 2**32),
)
def test_powers_of_kinds_that_alternate_slowly_are_found(watts: list[float], seed: int) -> None:
    chance = np.random.default_rng(seed)
    kinds = [int(k) for k in np.tile(np.arange(len(watts)), 20)]
    edges = [0.0, *np.cumsum(chance.uniform(0.1, 0.3, len(kinds)))]
    counter = [0.0, *np.cumsum([watts[k] * s for k, s in zip(kinds, np.diff(edges), strict=True)])]
    times = np.arange(0.0, edges[-1], 0.05)
    seen = seen_at(times, np.interp(times, edges, counter))
    found = estimate_powers(seen, edges, kinds, len(watts))
    assert found is not None
    assert found.powers_w == pytest.approx(watts, rel=0.03)
    assert (np.sqrt(np.diag(found.covariance)) < 0.1 * np.array(watts)).all()


@given(place=st.integers(20, 60), late=st.floats(0.2, 1.0))
def test_reading_that_came_late_and_is_known_to_spoils_nothing(place: int, late: float) -> None:
    kinds, edges = [0, 1] * 10, [0.2 * k for k in range(21)]
    times = np.arange(0.0, edges[-1], 0.05)
    counter = np.interp(times, edges, [0.0, *np.cumsum([20.0, 60.0] * 10)])
    moved = times.copy()
    moved[place] += late
    order = np.argsort(moved)
    unsure = np.where(np.arange(len(times)) == place, 2.0, 0.003)
    found = estimate_powers(seen_at(moved[order], counter[order], unsure[order]), edges, kinds, 2)
    assert found is not None
    assert found.powers_w == pytest.approx([100.0, 300.0], rel=0.03)


@pytest.mark.parametrize(
    ("scale", "known"),
    [(0.2, False), (1.0, True), (10.0, True)],  # of operations of 20 and 40 ms, waits of 4 ms
)
def test_wait_of_one_length_after_every_operation_is_not_claimed_to_be_known(
    scale: float, known: bool
) -> None:
    order = [0] * 4 + [0, 1] * 28 + [1] * 4
    spans = [(scale * (0.02, 0.04)[kind], kind) for kind in 3 * order]
    spans = [pair for operation in spans for pair in (operation, (scale * 0.004, 2))]
    edges = [0.0, *np.cumsum([seconds for seconds, _ in spans])]
    kinds = [kind for _, kind in spans]
    watts = np.array([200.0, 250.0, 80.0])
    chance = np.random.default_rng(1)
    polls = np.cumsum(0.01 + np.abs(chance.normal(0, 0.001, int(edges[-1] / 0.011))))
    counter = np.interp(polls, edges, [0.0, *np.cumsum(watts[kinds] * np.diff(edges))])
    gaps = np.diff(polls)  # the counter has its value at the poll, not between it and the last
    found = estimate_powers(
        seen_at(polls[1:] - gaps / 2, counter[1:], gaps / np.sqrt(12)), edges, kinds, len(watts)
    )
    assert found is not None
    error = np.sqrt(np.diag(found.covariance))
    assert (np.abs(found.powers_w - watts) < 2.5 * error).all()
    assert (error[2] < 0.5 * found.powers_w[2]) == known


def test_counter_that_is_set_back_starts_anew() -> None:
    joules = iter([50.0, 60.0, 70.0, 0.5, *(float(k) for k in range(1, 10**6))])

    class Counter(ModelledDevice):
        def energy(self) -> int:
            return int(1e3 * next(joules))

    log = EnergyLog(Counter(gpu("a40"), 0, time.monotonic_ns), poll_s=0.001)
    begin = time.perf_counter()
    while not (seen := log.pop_window(begin, math.inf)).energy_j.size or 50.0 in seen.energy_j:
        time.sleep(0.001)
    log.close()
    assert max(seen.energy_j) - min(seen.energy_j) < 50.0
    assert (np.diff(seen.energy_j) >= 0).all()


def test_kinds_that_readings_cannot_tell_apart_share_the_energy_by_time() -> None:
    kinds = [0, 1] * 500
    edges = [0.001 * k for k in range(1001)]
    times = [0.0, 0.5, 1.0]
    found = estimate_powers(seen_at(times, [0.0, 50.0, 100.0]), edges, kinds, 2)
    assert found is not None
    assert found.powers_w == pytest.approx([100.0, 100.0])
    total = np.array([0.5, 0.5])
    assert total @ found.covariance @ total < 0.01 * np.trace(found.covariance)
    assert (
        estimate_powers(seen_at([0.0, 1.0], [5.0, 5.0]), [0.0, 1.0], [0], 1) is None
    )  # it stood still


def test_backward_that_may_hold_an_all_reduce_is_not_timed() -> None:
    spans = [("forward", 0, 0.0, 0.1), ("backward", 0, 0.1, 0.3)]
    spans += [("forward", 0, 0.3, 0.4), ("backward", 0, 0.4, 5.0)]
    seen = seen_at([0.0, 2.5, 5.0], [0.0, 250.0, 500.0])
    measured = measure_window([[Span(*span) for span in spans]], seen, [0], 1740)
    assert measured is not None
    times = {row.instruction: row.time for row in measured.rows if row.instruction != "blocking"}
    assert times == pytest.approx({"forward": 0.1, "backward": 0.2})
    assert measured.num_microbatches == 2


class DeviceMoment:
    """A moment in the queue of a device, which gets there a while after the training thread."""

    LATE_S = 0.02

    def record(self) -> None:
        self.at = time.perf_counter() + self.LATE_S

    def synchronize(self) -> None:
        time.sleep(max(0.0, self.at - time.perf_counter()))

    def elapsed_time(self, end: DeviceMoment) -> float:
        return 1e3 * (end.at - self.at)


def test_operations_are_timed_on_the_device_that_training_runs_ahead_of(
    fake_nvml: FakeNvml, tmp_path: Path
) -> None:
    with started(tmp_path, marker=DeviceMoment) as profiler:
        train(profiler)
    assert fake_nvml.clock_changes() == [*CLOCKS, 0]
    table = Profile.read_csv(tmp_path / "profile.csv").table(0, "backward")
    assert set(table.frequency_mhz.tolist()) == set(CLOCKS)
    assert (table.time_ns >= 0.99e9 * BACKWARD_S).all()
