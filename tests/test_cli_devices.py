"""`envplan devices` and `envplan reset`."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from cli_helpers import COMMAND, done, envplan, refused, says, told
from envplan.cli import app
from envplan.devices import backend
from envplan.devices.modelled import GPUS
from envplan.devices.nvml import is_administrator
from envplan.profile import Profile, ProfileMetadata
from envplan.profiling.switch_latency import LatencySettings
from envplan.runtime import Guard
from fake_nvml import GPU_IS_LOST, NOT_SUPPORTED, FakeNvml, wait_for


def test_devices_lists_gpus_and_touches_no_clock(fake_nvml: FakeNvml, tmp_path: Path) -> None:
    fake_nvml.gpu(1).locked = 1005
    out = done("devices", cwd=tmp_path)
    assert out.count("NVIDIA A40") == 4
    says(
        out,
        "550.54.14",
        "210-1740",
        "1005",
        "300",
        "counter",
        "yes" if is_administrator() else "run as root",
    )
    assert fake_nvml.locked(1) == 1005
    assert fake_nvml.clock_changes(1) == []


def test_devices_says_how_to_be_allowed(
    fake_nvml: FakeNvml,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("envplan.devices.nvml.is_administrator", lambda: False)
    fake_nvml.gpu(1).mig = 1
    says(done("devices"), "GPU 0: this user may not set clocks; run as root", "GPU 1: MIG is on")


def test_devices_lists_the_gpus_beside_a_lost_one(fake_nvml: FakeNvml, tmp_path: Path) -> None:
    fake_nvml.fail("handle", GPU_IS_LOST, index=1)
    out = done("devices", cwd=tmp_path)
    assert out.count("NVIDIA A40") == 3
    assert "GPU 1: GPU is lost" in out
    found = told("devices")["gpus"]
    assert [entry["name"] for entry in found] == ["NVIDIA A40", None, "NVIDIA A40", "NVIDIA A40"]
    assert found[0].keys() == found[1].keys()
    assert found[1]["refusal"].startswith("GPU 1: GPU is lost")


def test_a_gpu_that_tells_no_power_is_listed_all_the_same(fake_nvml: FakeNvml) -> None:
    fake_nvml.fail("power", NOT_SUPPORTED)
    (first, *_) = told("devices")["gpus"]
    assert (first["name"], first["power_w"]) == ("NVIDIA A40", None)


def test_devices_json_has_all_clocks(fake_nvml: FakeNvml) -> None:
    fake_nvml.gpu(2).throttle = 0x4
    found = told("devices")["gpus"]
    assert [entry["index"] for entry in found] == [0, 1, 2, 3]
    assert found[0]["supported_clocks_mhz"] == list(range(210, 1741, 15))
    assert (found[0]["refusal"] is None) == is_administrator()
    assert found[2]["throttle_reasons"] == ["power cap"]


def test_modelled_devices_need_no_driver(tmp_path: Path) -> None:
    out = done("devices --backend modelled", cwd=tmp_path)
    for key in GPUS:
        assert key in out
    (one,) = told("devices --backend modelled --gpu a40")["gpus"]
    assert (one["name"], one["clock_mhz"]) == ("NVIDIA A40", None)


def test_devices_refuses_to_be_empty(fake_nvml: FakeNvml) -> None:
    fake_nvml.state.num_gpus = 0
    refused("devices", "no GPU")


def test_reset_gives_every_clock_back(fake_nvml: FakeNvml, tmp_path: Path) -> None:
    source = backend("nvml")
    for device in source.devices():
        device.lock_clock(1005)
    done("reset", cwd=tmp_path)
    assert [fake_nvml.locked(k) for k in range(4)] == [None] * 4
    source.close()


def test_reset_says_when_a_training_still_runs(
    fake_nvml: FakeNvml,
) -> None:
    with Guard.start("nvml", 1) as guard:
        out = done("reset")
        assert f"its guard is process {guard.pid}" in out.splitlines()[1]
        outcomes = told("reset")["gpus"]
    assert [outcome["guard"] for outcome in outcomes] == [None, guard.pid, None, None]


@pytest.mark.parametrize("lost", [False, True])
def test_reset_says_which_gpu_refuses_and_does_the_rest(fake_nvml: FakeNvml, lost: bool) -> None:
    for index in range(4):
        fake_nvml.gpu(index).locked = 1005
    if lost:
        fake_nvml.fail("handle", GPU_IS_LOST, index=1)
    else:
        fake_nvml.gpu(1).permission = 0
    said = "GPU is lost" if lost else "this user may not set clocks; run as root"
    ran = envplan("reset", "--wait", "0.2s")
    assert (ran.code, ran.err.count("\n")) == (1, 1)
    assert f"GPU 1: {said}" in ran.err
    assert [fake_nvml.locked(k) for k in range(4)] == [None, 1005, None, None]


@pytest.mark.parametrize("trouble", ["squatted", "full"])
def test_reset_needs_no_place_for_locks(
    fake_nvml: FakeNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    squatted = tmp_path / "squatted"
    squatted.mkdir(mode=0o777)
    squatted.chmod(0o777)
    monkeypatch.setattr(
        "envplan.devices.locks.default_lock_folders", lambda _: [tmp_path / trouble / "x"]
    )
    if trouble == "squatted":
        monkeypatch.setattr("envplan.devices.locks.default_lock_folders", lambda _: [squatted])
    fake_nvml.gpu(1).locked = 1005
    done("reset")
    assert fake_nvml.locked(1) is None


@pytest.mark.parametrize("command", ["devices", "reset"])
def test_gpu_that_hangs_stops_only_itself(
    fake_nvml: FakeNvml,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    monkeypatch.setattr("envplan.devices.locks.HANG_MARGIN_S", 1.9)
    monkeypatch.setattr("envplan.devices.GPU_TIMEOUT_S", 2.0)
    fake_nvml.hang("handle", index=1)
    for index in (0, 2, 3):
        fake_nvml.gpu(index).locked = 1005
    code = app.run([command] if command == "devices" else [command, "--wait", "0.1s"])
    fake_nvml.hang(index=1)
    said = capsys.readouterr()
    assert "GPU 1: no answer within 2 s; the driver hangs" in (said.out + said.err)
    if command == "devices":
        assert (code, said.out.count("NVIDIA A40")) == (0, 3), said.out
    else:
        assert code == 1
        assert [fake_nvml.locked(k) for k in range(4)] == [None] * 4


LATE = "--measure-latency --slices late_slices:make"


@pytest.fixture
def late_nvml(fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """Stand-in GPUs whose clocks come 20 ms late, and fewer changes than usual."""
    fake_nvml.gpu().clock_delay_ns = 20_000_000
    fake_nvml.gpu().clock_jitter_ns = 2_000_000
    quick = LatencySettings(rounds=3, steady_s=0.1, window_s=0.06)
    monkeypatch.setattr("envplan.profiling.switch_latency.LatencySettings", lambda: quick)
    return fake_nvml


def test_the_latency_of_a_stand_in_is_found(late_nvml: FakeNvml) -> None:
    told_all = told(f"devices {LATE}")
    assert (told_all["gpu"], told_all["name"], told_all["written"]) == (0, "NVIDIA A40", [])
    latency = told_all["switch_latency"]
    assert latency["source"] == "measured"
    assert list(latency["by_mhz"]) == ["210", "975", "1740"]
    calls = late_nvml.calls(0, "lock")[-18:]
    for mhz, to_clock in latency["by_mhz"].items():
        true_s = sorted(call.due - call.time for call in calls if call.mhz == int(mhz))
        assert abs(to_clock["median_s"] - statistics.median(true_s)) < 0.001
    assert late_nvml.locked() is None


def test_measured_latency_goes_into_the_sidecar(late_nvml: FakeNvml, tmp_path: Path) -> None:
    path = tmp_path / "profile.csv"
    metadata = ProfileMetadata(gpu="NVIDIA A40", extra={"switch_latency_unknown": "no slices"})
    rows = [(0, name, mhz, 1.0, 200.0) for name in ("forward", "backward") for mhz in (900, 1740)]
    Profile.from_rows(rows, metadata=metadata).save_csv(path)
    says(
        done(f"devices {LATE} --profile", path),
        "1740",
        "95th percentile (ms)",
        "to plan with: ",
        "solve plans with it from now on",
    )
    profile = Profile.read_csv(path)
    assert profile.switch_latency is not None
    assert sorted(profile.switch_latency.by_mhz) == [900, 1740]
    assert profile.metadata.extra == {}
    assert {call.mhz for call in late_nvml.calls(0, "lock")} == {900, 1740}


def test_measuring_latency_refuses_what_cannot_be(
    fake_nvml: FakeNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused("devices --slices a:b", "--slices goes with --measure-latency")
    refused("devices --device 0", "--device goes with --measure-latency")
    refused("devices --measure-latency --backend modelled", "--backend nvml or zeusd")
    refused("devices --measure-latency --slices nowhere:f", "nowhere does not import")
    refused("devices --measure-latency --slices os:getcwd", "methods now() and run()")
    refused("devices --measure-latency --device 7", "no GPU 7")
    refused("devices --measure-latency", "this torch cannot use the GPU")
    monkeypatch.setitem(sys.modules, "torch", None)
    refused("devices --measure-latency", "torch is not installed")
    path = tmp_path / "profile.csv"
    rows = [(0, name, 1740, 1.0, 200.0) for name in ("forward", "backward")]
    Profile.from_rows(rows, metadata=ProfileMetadata(gpu="NVIDIA H200")).save_csv(path)
    refused(f"devices {LATE} --profile {path}", "is of the NVIDIA H200, but GPU 0 is")
    fake_nvml.gpu().permission = 0
    refused(f"devices {LATE}", "this user may not set clocks")
    assert fake_nvml.clock_changes() == []


def test_a_clock_that_does_not_follow_is_said_and_given_back(late_nvml: FakeNvml) -> None:
    late_nvml.gpu().stuck = 960
    refused(f"devices {LATE}", "the clock of GPU 0 does not follow")
    assert late_nvml.locked() is None
    late_nvml.gpu().stuck = 0
    late_nvml.fail("lock", times=2)
    refused(f"devices {LATE}", "GPU 0: Unknown Error")
    assert late_nvml.locked() is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_measurement_that_is_killed_gives_the_clock_back(
    fake_nvml: FakeNvml, number: signal.Signals
) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    process = subprocess.Popen(
        [COMMAND, "devices", *LATE.split()],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(lambda: fake_nvml.locked() or process.poll() is not None)
    assert fake_nvml.locked()
    process.send_signal(number)
    process.wait(60)
    assert fake_nvml.wait_until_free(60.0) is not None
    if number == signal.SIGTERM:
        assert process.returncode == 130
        assert process.stderr is not None
        assert process.stderr.read() == "envplan: error: interrupted\n"
