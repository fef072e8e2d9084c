"""The measuring loop, on a modelled GPU in virtual time."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envplan.devices import DeviceError
from envplan.devices.modelled import ModelledDevice, gpu
from envplan.errors import InputError
from envplan.profile import BLOCKING, Profile, ProfileMetadata
from envplan.profiling import sweep as sweeping
from envplan.profiling.block_statistics import Block, summarize
from envplan.profiling.remarks import summarize_profile
from envplan.profiling.sweep import Settings, sweep
from envplan.profiling.sweep_file import Row, SweepFile
from envplan.profiling.timers import EventTimer
from envplan.units import ENERGY_UNITS_PER_J

T = TypeVar("T")

PERIOD = 0.1
FAST = Settings(step=60, time_limit=8.0)
COARSE = Settings(step=700, time_limit=8.0)


TIMES = {"forward": 1.0, "backward": 2.0, "backward_input": 1.25, "backward_weight": 0.75}


class Killed(BaseException):
    """What a test raises in the middle of a sweep."""


class Gpu(ModelledDevice):
    """A modelled A40 in virtual time whose counter moves ten times a second."""

    def __init__(self) -> None:
        self.time = 0  # ns
        self.activity: float | None = None  # 1 for dense products; None while it waits
        super().__init__(gpu("a40"), 0, lambda: self.time)
        self.locks: list[int] = []
        self.resets = 0
        self.reasons: tuple[str, ...] = ()
        self._shown = 0
        self._next = 0

    def now(self) -> float:
        return self.time / 1e9

    def power(self) -> float:
        clock = self.apparent_locked_clock() or 1740
        if self.activity is None:
            return self.model.blocking_power_w(clock)
        return self.model.power_w(clock, self.activity)

    def spend(self, seconds: float, activity: float | None) -> None:
        """Work in steps no longer than what the counter needs to be seen."""
        super().energy()
        self.activity = activity
        left = round(seconds * 1e9)
        while left > 0:
            step = min(left, self._next - self.time) if self._next > self.time else left
            step = max(1, min(step, left))
            self.time += step
            left -= step
            if self.time >= self._next:
                self._shown = super().energy()
                self._next = (self.time // 100_000_000 + 1) * 100_000_000

    def energy(self) -> int:
        return self._shown

    def lock_clock(self, mhz: int) -> None:
        self.locks.append(mhz)
        super().lock_clock(mhz)

    def reset_clock(self) -> None:
        self.resets += 1
        super().reset_clock()

    def throttle_reasons(self) -> tuple[str, ...]:
        return self.reasons


@dataclass
class Stages:
    """Stages of growing work; forward (TFLOP, GB) and twice that backward."""

    device: Gpu
    num_stages: int = 2
    description: str = "two stages of growing work"
    calls: int = 0
    kill_at: int | None = None
    hiccups: frozenset[int] = frozenset()
    jitter: float = 0.0
    order: list[tuple[int, str]] = field(default_factory=list)
    _random: random.Random = field(default_factory=lambda: random.Random(1))

    def __getattr__(self, name: str) -> Callable[[int], None]:
        if name not in TIMES:
            raise AttributeError(name)
        return lambda stage: self._run(stage, name)

    def wait(self, seconds: float) -> None:
        self._note(0, BLOCKING)
        self.device.spend(seconds, None)

    def synchronize(self) -> None:
        pass

    def exact(self, stage: int, instruction: str, clock: int) -> tuple[float, float]:
        """Time and energy by the model."""
        model, work = self.device.model, TIMES[instruction] * (1 + 0.3 * stage)
        seconds = model.time_s(2e12 * work, 2e9 * work, clock)
        return seconds, seconds * model.power_w(clock)

    def _run(self, stage: int, instruction: str) -> None:
        self._note(stage, instruction)
        seconds, _ = self.exact(stage, instruction, self.device.apparent_locked_clock() or 1740)
        seconds *= 9 if self.calls in self.hiccups else self._random.gauss(1.0, self.jitter)
        self.device.spend(seconds, 1.0)

    def _note(self, stage: int, instruction: str) -> None:
        self.calls += 1
        if self.order[-1:] != [(stage, instruction)]:
            self.order.append((stage, instruction))
        if self.calls == self.kill_at:
            raise Killed


def run(path: Path, stages: Stages, how: Settings = FAST, **more: object) -> Profile:
    return sweep(stages, stages.device, path, how, now=stages.device.now, **more)  # type: ignore[arg-type]


@pytest.fixture
def stages() -> Stages:
    return Stages(Gpu())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "profile.csv"


def worst(profile: Profile, stages: Stages, instruction: str, stage: int = 0) -> list[float]:
    """How far times and energies are off the model, relative to it, at worst."""
    table = profile.table(stage, instruction)
    off = []
    for clock, _, ns, energy_10fj in table.options():
        seconds, joules = stages.exact(stage, instruction, clock)
        off.append(
            (abs(ns / 1e9 / seconds - 1), abs(energy_10fj / ENERGY_UNITS_PER_J / joules - 1))
        )
    return [max(column) for column in zip(*off, strict=True)]


def test_a_sweep_finds_time_and_energy_of_the_model_and_gives_the_clock_back(
    path: Path, stages: Stages
) -> None:
    profile = run(path, stages)
    for stage in range(2):
        for instruction in ("forward", "backward"):
            time_off, energy_off = worst(profile, stages, instruction, stage)
            assert time_off < 1e-6
            assert energy_off < 0.04
    assert profile.blocking_power_w is not None
    assert profile.blocking_power_w[0] == pytest.approx(70, abs=8)
    assert (stages.device.resets, stages.device.apparent_locked_clock()) == (1, 0)


def test_the_parts_of_a_backward_are_measured_apart(path: Path, stages: Stages) -> None:
    split = replace(FAST, step=300, split_backward=True)
    profile = run(path, stages, split)
    assert profile.instructions == ("forward", "backward_input", "backward_weight")
    for instruction in profile.instructions:
        assert worst(profile, stages, instruction, 1)[0] < 1e-6
    whole = run(path.parent / "whole.csv", Stages(Gpu()), replace(FAST, step=300))
    for parts, one in zip(summarize_profile(profile), summarize_profile(whole), strict=True):
        assert parts.energy_at_highest == pytest.approx(one.energy_at_highest, rel=0.04)
    with pytest.raises(InputError, match="split_backward True, not False"):
        run(path, Stages(Gpu()), replace(FAST, step=300))


def test_a_workload_that_cannot_split_its_backward_is_refused(path: Path) -> None:
    class Whole:
        description, num_stages = "whole", 1

    with pytest.raises(InputError, match="whole cannot split its backward"):
        sweep(
            Whole(),  # type: ignore[arg-type]
            Gpu(),
            path,
            Settings(split_backward=True),
        )
    assert not list(path.parent.iterdir())


class Event:
    """An event of a GPU in virtual time whose queue is never behind."""

    def __init__(self, device: Gpu) -> None:
        self.device = device
        self.at = 0.0

    def record(self) -> None:
        self.at = self.device.now()

    def elapsed_time(self, later: Event) -> float:
        return 1e3 * (later.at - self.at)


def test_events_on_the_gpu_leave_out_what_the_host_takes(tmp_path: Path, stages: Stages) -> None:
    class SlowHost(Stages):
        def synchronize(self) -> None:
            self.device.spend(0.05, None)

    few = replace(FAST, step=500)
    slow = SlowHost(Gpu())
    slow.timer = EventTimer(partial(Event, slow.device))  # type: ignore[attr-defined]
    by_events = run(tmp_path / "events.csv", slow, few)
    by_host = run(tmp_path / "host.csv", SlowHost(Gpu()), few)
    assert worst(by_events, slow, "forward")[0] < 1e-6
    assert worst(by_host, slow, "forward")[0] > 0.01
    assert by_events.metadata.extra["times"] == "CUDA events"
    assert by_host.metadata.extra["times"] == "host clock"


def test_clocks_go_down_and_stop_five_rises_below_the_valley(path: Path, stages: Stages) -> None:
    precise = replace(FAST, target_error=0.004, time_limit=30.0)
    profile = run(path, stages, precise)
    for stage, summary in enumerate(summarize_profile(profile)):
        clocks = sorted(profile.table(stage, "forward").frequency_mhz.tolist(), reverse=True)
        assert clocks == list(range(1740, clocks[-1] - 1, -60))
        assert clocks.index(summary.valley) <= len(clocks) - 6
        assert summary.ends_below
        assert clocks[-1] > 210
    first = stages.device.locks
    assert first[: len(set(first)) // 2] == sorted(first[: len(set(first)) // 2], reverse=True)


def test_noise_where_energy_is_flat_does_not_end_a_sweep(path: Path, stages: Stages) -> None:
    stages.jitter = 0.1
    hurried = replace(FAST, step=15, target_error=0.05, time_limit=2.0)
    for summary in summarize_profile(run(path, stages, hurried)):
        assert summary.valley < 1300  # from 1740 down to 1470 the power limit holds the clock


def test_each_stage_has_its_turn_and_forward_goes_before_backward(
    path: Path, stages: Stages
) -> None:
    run(path, stages, replace(FAST, step=400))
    tried, order = stages.order[:4], stages.order[4:]
    assert tried == [(stage, name) for stage in (0, 1) for name in ("forward", "backward")]
    turns = [stage for stage, name in order if name != BLOCKING]
    assert turns == sorted(turns)
    for before, after in pairwise(order):
        if after[1] == "backward":
            assert before == (after[0], "forward")


def test_what_fails_the_first_time_fails_before_a_clock_is_touched(
    path: Path, stages: Stages
) -> None:
    stages.kill_at = 4  # the last stage's backward
    with pytest.raises(Killed):
        run(path, stages)
    assert stages.device.locks == []
    assert stages.device.resets == 0
    assert not list(path.parent.iterdir())


def test_the_clock_is_given_back_when_a_workload_fails(path: Path, stages: Stages) -> None:
    stages.kill_at = 200
    with pytest.raises(Killed):
        run(path, stages)
    assert stages.device.locks
    assert stages.device.apparent_locked_clock() == 0


@settings(max_examples=12, deadline=None)
@given(kill_at=st.integers(1, 1500))
def test_a_killed_sweep_continues_with_the_rows_it_has(
    tmp_path_factory: pytest.TempPathFactory, kill_at: int
) -> None:
    path = tmp_path_factory.mktemp("killed") / "profile.csv"
    few = replace(FAST, step=400, time_limit=3.0)
    killed = Stages(Gpu(), kill_at=kill_at)
    try:
        run(path, killed, few)
    except Killed:
        sidecar = path.with_suffix(".meta.json")
        assert path.exists() == sidecar.exists()
        assert not (path.exists() and json.loads(sidecar.read_text())["complete"])
    before = path.read_bytes() if path.exists() else b""
    again = Stages(Gpu())
    profile = run(path, again, few)
    assert path.read_bytes().startswith(before)
    assert json.loads(path.with_suffix(".meta.json").read_text())["complete"]
    whole = Stages(Gpu())
    expected = run(path.with_name("whole.csv"), whole, few)
    for stage in range(2):
        found = profile.table(stage, "backward").frequency_mhz.tolist()
        assert found == expected.table(stage, "backward").frequency_mhz.tolist()
    assert len(path.read_text().splitlines()) == len(set(path.read_text().splitlines()))


def test_a_sweep_goes_on_with_what_is_lacking(path: Path, stages: Stages) -> None:
    few = replace(FAST, step=400)
    run(path, stages, few)
    content, again = path.read_bytes(), Stages(Gpu())
    run(path, again, few)
    assert (again.calls, again.device.locks, path.read_bytes()) == (0, [], content)
    # Half a row is cut off.
    rows = path.read_text().splitlines()
    path.write_text("\n".join(rows[:-1]) + "\n" + rows[-1][:7])
    run(path, Stages(Gpu()), few)
    lines = path.read_text().splitlines()
    assert lines[:-1] == rows[:-1]
    assert lines[-1].split(",")[:3] == rows[-1].split(",")[:3]
    # A file without a row stands in no way.
    path.write_text(rows[0] + "\n")
    run(path, stages, replace(FAST, step=500))
    assert json.loads(path.with_suffix(".meta.json").read_text())["sweep"]["step"] == 500


def test_a_sweep_of_other_settings_or_another_workload_is_refused(
    path: Path, stages: Stages
) -> None:
    run(path, stages, COARSE)
    content = path.read_bytes()
    another = Stages(Gpu(), description="another")
    for changed, how, words in (
        (stages, replace(COARSE, step=500), "step 700, not 500"),
        (stages, replace(COARSE, target_error=0.05), "target_error"),
        (stages, replace(COARSE, lock=False), "lock True, not False"),
        (another, COARSE, "workload two stages of growing work, not another"),
    ):
        with pytest.raises(InputError) as refused:
            run(path, changed, how)
        assert all(word in str(refused.value) for word in (str(path), "-o", words))
    assert path.read_bytes() == content


def test_a_file_that_is_not_of_a_sweep_is_left_alone(path: Path, stages: Stages) -> None:
    path.write_text("stage,instruction,frequency,time,energy\n")
    with pytest.raises(InputError, match="not of a sweep"):
        run(path, stages)
    assert path.read_text() == "stage,instruction,frequency,time,energy\n"
    assert stages.device.locks == []
    path.unlink()
    run(path, stages, COARSE)
    with path.open("a") as file:
        file.write("0,forward,fast\n")
    lines = len(path.read_text().splitlines())
    with pytest.raises(InputError, match=f"{path}:{lines}: is not a row of a sweep"):
        run(path, stages, COARSE)


def test_two_sweeps_cannot_share_a_file(path: Path, stages: Stages) -> None:
    stages.kill_at = 1000
    with pytest.raises(Killed):
        run(path, stages)
    parameters = json.loads(path.with_suffix(".meta.json").read_text())["sweep"]
    with SweepFile(path, parameters, ProfileMetadata()):
        stages.kill_at = None
        with pytest.raises(InputError, match="another sweep"):
            run(path, stages)


def test_without_locks_each_operation_is_measured_once_at_one_clock(
    path: Path, stages: Stages
) -> None:
    profile = run(path, stages, replace(FAST, lock=False))
    assert stages.device.locks == []
    assert stages.device.resets == 0
    clocks = {
        clock
        for stage in range(2)
        for name in ("forward", "backward")
        for clock in profile.table(stage, name).frequency_mhz.tolist()
    }
    assert len(clocks) == 1


def test_the_sidecar_says_what_was_measured_on_what_and_how(path: Path, stages: Stages) -> None:
    stages.device.reasons = ("power cap", "hardware thermal slowdown")
    profile = run(path, stages, COARSE)
    rows = (path).read_text().splitlines()
    assert all(row.endswith(",hardware thermal slowdown+power cap") for row in rows[1:])
    metadata = profile.metadata
    assert metadata.extra["rows_throttled"] == len(rows) - 1
    assert (metadata.gpu, metadata.workload) == ("NVIDIA A40", "two stages of growing work")
    assert "spins idly" in metadata.extra["blocking_power"]
    stages.waiting = "of a GPU that waits for the bus"  # type: ignore[attr-defined]
    again = run(path.parent / "again.csv", stages, COARSE)
    assert again.metadata.extra["blocking_power"] == "of a GPU that waits for the bus"
    hurried = replace(COARSE, target_error=1e-6, time_limit=1.0)
    late = run(path.with_name("late.csv"), Stages(Gpu()), hurried)
    assert late.metadata.extra["rows_over_target_error"] > 0


def test_a_hiccup_is_dropped(path: Path, stages: Stages) -> None:
    stages.hiccups = frozenset(range(150, 4000, 190))
    profile = run(path, stages, replace(FAST, step=700, target_error=0.004))
    assert worst(profile, stages, "forward")[0] < 0.02


@pytest.mark.parametrize(("lock", "first"), [(True, "1740 MHz"), (False, "current clocks")])
def test_progress_grows_to_the_end_and_tells_where_it_is(
    path: Path, stages: Stages, lock: bool, first: str
) -> None:
    seen: list[tuple[float, str]] = []
    few = replace(FAST, step=400, lock=lock)
    run(path, stages, few, progress=lambda *one: seen.append(one))
    assert seen[0] == (0, f"stage 0 of 2, {first}")
    total = 20 if lock else 5
    assert [share for share, _ in seen] == pytest.approx([k / total for k in range(total)])


def test_a_step_wider_than_the_clocks_is_refused(path: Path, stages: Stages) -> None:
    with pytest.raises(InputError, match="--step 2000"):
        run(path, stages, replace(FAST, step=2000))


def test_readings_of_the_counter_cancel_over_consecutive_blocks() -> None:
    few = summarize([Block(10, 0.5, 100.0)] * 4, PERIOD)
    many = summarize([Block(10, 0.5, 100.0)] * 16, PERIOD)
    assert few.energy_error == pytest.approx(4 * many.energy_error)  # not twice
    assert many.energy_error / many.energy == pytest.approx((2 / 12) ** 0.5 * 0.1 / 8)


def test_real_variation_is_not_taken_for_that_of_the_readings() -> None:
    blocks = [Block(1, 0.5, 100.0 + (30 if k % 2 else -30)) for k in range(64)]
    found = summarize(blocks, 0.001)
    assert found.energy == pytest.approx(100.0)
    assert found.energy_error == pytest.approx(30 / 8, rel=0.05)


def test_one_block_far_off_in_time_or_power_is_left_out() -> None:
    usual = [Block(10, 0.5 + 1e-4 * (k % 3), 100.0) for k in range(9)]
    for odd in (Block(10, 1.5, 300.0), Block(10, 0.5, 400.0)):
        found = summarize([*usual[:4], odd, *usual[4:]], PERIOD)
        assert found.samples == 9
        assert found.time == pytest.approx(0.05, rel=1e-3)
        assert found.energy == pytest.approx(10.0)


@given(
    st.lists(
        st.tuples(st.integers(1, 50), st.floats(0.01, 5), st.floats(0, 500)),
        min_size=1,
        max_size=20,
    )
)
def test_means_lie_within_the_blocks(raw: list[tuple[int, float, float]]) -> None:
    blocks = [Block(*values) for values in raw]
    found = summarize(blocks, PERIOD)
    slack = 1 + 1e-9
    assert min(b.seconds / b.repetitions for b in blocks) <= found.time * slack
    assert found.time <= max(b.seconds / b.repetitions for b in blocks) * slack
    assert found.energy <= max(b.joules / b.repetitions for b in blocks) * slack
    assert 1 <= found.samples <= len(blocks)
    assert found.time_std >= 0
    assert found.energy_error >= 0


def test_a_row_goes_through_its_file_unchanged(tmp_path: Path) -> None:
    measured = {"time": 0.123456789, "energy": 45.678, "time_std": 1e-7, "energy_std": 0.0123}
    seen = {"frequency": 1200, "clock": 1185, "throttle": "power cap", "samples": 7}
    row = Row(stage=1, instruction="backward", **measured, **seen)  # type: ignore[arg-type]
    metadata = ProfileMetadata()
    with SweepFile(tmp_path / "a.csv", {"step": 0}, metadata) as file:
        file.append(row)
    with SweepFile(tmp_path / "a.csv", {"step": 0}, metadata) as file:
        assert file.rows == [row]


# ---- drivers that fail


def failing(times: int, method: Callable[[], T], after: int = 0) -> Callable[[], T]:
    """A method that fails so many times, once it has been called `after` times."""
    calls = count()

    def call() -> T:
        if after <= next(calls) < after + times:
            raise DeviceError("GPU 0: Timeout; check nvidia-smi")
        return method()

    return call


def test_a_clock_is_given_back_in_the_end_or_it_is_said(
    path: Path, stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeping, "_PAUSE_S", 0.0)
    reset = stages.device.reset_clock
    monkeypatch.setattr(stages.device, "reset_clock", failing(3, reset))
    run(path, stages, COARSE)
    assert stages.device.apparent_locked_clock() == 0
    monkeypatch.setattr(stages.device, "reset_clock", failing(10**9, reset))
    with pytest.raises(
        DeviceError, match=r"not be given back.*may stay at 330 MHz until `envplan reset`: GPU 0"
    ):
        run(path.parent / "again.csv", stages, COARSE)


@pytest.mark.parametrize("after", [0, 1, 7, 40])
def test_a_reading_of_energy_that_fails_now_and_then_costs_nothing_but_time(
    path: Path, stages: Stages, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    monkeypatch.setattr(sweeping, "_PAUSE_S", 0.0)
    monkeypatch.setattr(stages.device, "energy", failing(2, stages.device.energy, after))
    profile = run(path, stages, COARSE)
    assert worst(profile, stages, "forward")[1] < 0.04


@pytest.mark.parametrize(
    ("counter", "words"),
    [
        (lambda energy: lambda: 0, "stood still"),
        (lambda energy: failing(10**9, energy, 40), "Timeout"),
        (
            lambda energy: partial(next, count(10**9, -(10**3))),
            "fell or could not be read 11 times in a row",
        ),
    ],
)
def test_a_counter_that_tells_nothing_ends_the_sweep(
    path: Path, stages: Stages, monkeypatch: pytest.MonkeyPatch, counter: Any, words: str
) -> None:
    monkeypatch.setattr(sweeping, "_PAUSE_S", 0.0)
    monkeypatch.setattr(stages.device, "energy", counter(stages.device.energy))
    with pytest.raises(DeviceError, match=words):
        run(path, stages)
    assert stages.device.apparent_locked_clock() == 0


def test_throttle_reasons_that_the_driver_does_not_tell_stand_in_no_way(
    path: Path, stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    untold = failing(10**9, stages.device.throttle_reasons)
    monkeypatch.setattr(stages.device, "throttle_reasons", untold)
    profile = run(path, stages, COARSE)
    assert "Timeout" in profile.metadata.extra["throttle_untold"]
    assert profile.metadata.extra["rows_throttled"] == 0


@pytest.mark.parametrize("at", [3.0, 3.3, 11.0, 16.2])
def test_a_counter_that_is_reset_is_noticed_and_spoils_no_row(
    path: Path, stages: Stages, monkeypatch: pytest.MonkeyPatch, at: float
) -> None:
    device = stages.device
    energy = device.energy
    monkeypatch.setattr(
        device, "energy", lambda: energy() + (50_000_000 if device.now() < at else 0)
    )
    precise = replace(FAST, step=700, target_error=0.004, time_limit=20.0, preheat=1.0)
    profile = run(path, stages, precise)
    assert profile.metadata.extra["counter_resets"] == 1
    for instruction in ("forward", "backward"):
        assert worst(profile, stages, instruction)[1] < 0.012
