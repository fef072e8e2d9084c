from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli_helpers import COMMAND, assert_refused, done, envplan, refused, says
from envplan import devices
from envplan.profile import Profile
from envplan.profiling.switch_latency import LatencySettings
from envplan.units import POWER_UNITS_PER_W
from fake_nvml import GPU_IS_LOST, NOT_SUPPORTED, FakeNvml, fake_nvml

__all__ = ["fake_nvml"]

TIMEOUT = 10  # as in nvml.h
PNG = b"\x89PNG\r\n\x1a\n"

STAGES = """
import time

class Stages:
    description = "two stages that sleep"
    num_stages = 2

    def forward(self, stage):
        time.sleep(0.001)

    def backward(self, stage):
        time.sleep(0.002)

    backward_input = backward_weight = forward

    def wait(self, seconds):
        time.sleep(seconds / 10)

    def synchronize(self):
        pass

def build():
    return Stages()

class OutOfMemoryError(RuntimeError):
    pass

def hungry():
    raise OutOfMemoryError("CUDA out of memory. Tried to allocate\\n20.00 GiB")

class Hungry(Stages):
    def backward(self, stage):
        if stage == 1:
            hungry()

class Tired(Stages):
    left = 4

    def backward(self, stage):
        if stage == 1:
            self.left -= 1
            if not self.left:
                raise RuntimeError("enough")
        time.sleep(0.002)

class Failing(Stages):
    def forward(self, stage):
        raise ValueError("wrong shape\\nof the input")

class Waiting(Stages):
    def __init__(self):
        from envplan.profiling.waiting import Peers

        self.peers = Peers(backend="gloo", device="cpu")
        self.waiting = self.peers.description

    def wait(self, seconds):
        self.peers.wait(seconds)

def broken():
    raise RuntimeError("no weights\\nhere")

def nothing():
    return 3

def late():
    yield from ()
    raise ValueError("a stage is missing")

def leaving():
    raise SystemExit(0)

class Leaving(Stages):
    def forward(self, stage):
        raise SystemExit(0)

class Sliced(Stages):
    @property
    def slices(self):
        import late_slices

        return late_slices.make()

class Uncounted(Stages):
    num_stages = "two"

class Empty(Stages):
    num_stages = 0

number = 4
"""
QUICK = "--step 500 --time-limit 0.03"
BUILD = f"profile --entry stages:build {QUICK}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where users' modules lie; what a run in this process imports of them is forgotten."""
    work = tmp_path / "work"
    work.mkdir()
    (work / "stages.py").write_text(STAGES)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(work)
    yield work
    for name in ("stages", "real", "small"):
        sys.modules.pop(name, None)


def rows_of(folder: Path) -> int:
    path = folder / "profile.csv"
    return path.read_bytes().count(b"\n") - 1 if path.exists() else 0


def wait_for_rows(process: subprocess.Popen[str], fake: FakeNvml, folder: Path) -> None:
    """Until a sweep is in the middle of its work."""
    deadline = time.monotonic() + 300
    while not (fake.locked() and rows_of(folder) > 2):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.002)


def made(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"stages.py", "__pycache__"}


def test_the_users_own_words_work_in_sequence(tmp_path: Path) -> None:
    ran = envplan("profile", "--backend", "modelled", "--step", "90", cwd=tmp_path)
    assert ran.code == 0, ran.err
    assert ran.err == ""
    assert envplan("frontier", "--plot", "--quiet", cwd=tmp_path).code == 0
    assert envplan("solve", "--target-time", "14.2", "--quiet", cwd=tmp_path).code == 0
    assert made(tmp_path) == {
        "profile.csv",
        "profile.meta.json",
        "frontier.png",
        "plan.json",
    }


@pytest.mark.parametrize(
    ("arguments", "workload", "layers"),
    [
        (("--workload", "gpt", "--layers", "12", "--hidden-size", "768"), "GPT of 12 layers", 12),
        (("--workload", "bert", "--sequence-length", "256"), "BERT of 24 layers", 24),
        (("--workload", "t5", "--layers", "6"), "T5 of 2 x 6 layers", 12),
        (("--workload", "wide-resnet", "--layers", "50"), "Wide-ResNet-50-8", 16),
    ],
)
def test_sizes_make_the_workload(
    tmp_path: Path, arguments: tuple[str, ...], workload: str, layers: int
) -> None:
    more = ("--stages", "2", "--microbatch-size", "2", "-m", "7", "--gpu", "v100", "-q")
    out = done("profile --backend modelled", *arguments, *more, "--step", "300", cwd=tmp_path)
    assert out == ""
    profile = Profile.read_csv(tmp_path / "profile.csv")
    assert profile.num_stages == 2
    assert workload in str(profile.metadata.workload)
    assert sum(profile.metadata.extra["layers_per_stage"]) == layers
    assert profile.metadata.num_microbatches == 7
    assert profile.metadata.microbatch_size == 2
    assert profile.metadata.gpu == "Tesla V100-SXM2-16GB"
    assert profile.blocking_power_w is not None


def test_layers_of_stages_are_as_given(tmp_path: Path) -> None:
    command = "profile --backend modelled --vp 2 --step 300 -q"
    done(command, "--layers-per-stage", "5,7,7,5", "--microbatch-group", "4", cwd=tmp_path)
    uneven = Profile.read_csv(tmp_path / "profile.csv")
    assert uneven.metadata.extra["layers_per_stage"] == [5, 7, 7, 5]
    assert "as given" in str(uneven.metadata.extra["assumptions"])
    assert uneven.pipeline().microbatch_group == 4
    five, *sevens = (uneven.table(stage, "forward").time_ns[0] for stage in range(3))
    assert sevens[0] == sevens[1] == pytest.approx(five * 7 / 5, rel=0.02)


@pytest.mark.parametrize("more", ["", "--parts", "--split-backward"])
def test_transfers_delay_the_next_stage_or_keep_the_sender_too(tmp_path: Path, more: str) -> None:
    profiles = []
    for overlap in ("", "--no-overlap-p2p"):
        command = f"profile --backend modelled --p2p-latency 2ms --step 300 -q {more} {overlap}"
        done(command, cwd=tmp_path)
        profiles.append(Profile.read_csv(tmp_path / "profile.csv"))
    assert [profile.metadata.job.p2p_latency_s for profile in profiles] == [0.002, 0]
    split = "split" in more
    for stage in range(4):
        for instruction, sends in (
            ("forward", stage < 3),
            ("backward_input" if split else "backward", stage > 0),
            *([("backward_weight", False)] if split else []),
        ):
            times = [profile.table(stage, instruction).time_ns.min() for profile in profiles]
            # Rows are rounded to ns, those of parts one by one.
            assert times[1] - times[0] == pytest.approx(2_000_000 if sends else 0, abs=20)


def test_a_modelled_profile_is_written_anew_but_a_measured_one_is_not(tmp_path: Path) -> None:
    command = ("profile", "--backend", "modelled", "--step", "300", "-q")
    assert envplan(*command, cwd=tmp_path).code == 0
    assert envplan(*command, "--stages", "2", cwd=tmp_path).code == 0
    assert Profile.read_csv(tmp_path / "profile.csv").num_stages == 2
    sidecar = tmp_path / "profile.meta.json"
    sidecar.write_text(json.dumps({"source": "measured"}))
    assert_refused(envplan(*command, cwd=tmp_path), 2, "profile.csv", "not a modelled profile")


def test_bare_plot_and_json(tmp_path: Path) -> None:
    out = done("profile --backend modelled --step 300 --plot --json", cwd=tmp_path)
    assert (tmp_path / "profile.png").read_bytes().startswith(PNG)
    document = json.loads(out)
    assert document["source"] == "modelled"
    assert len(document["stages"]) == 4
    assert document["stages"][0]["valley"] in range(600, 1741)


def test_without_a_driver_the_modelled_backend_is_named(tmp_path: Path) -> None:
    assert_refused(envplan("profile", cwd=tmp_path), 2, "driver", "--backend modelled")
    assert made(tmp_path) == set()


def test_a_measured_sweep_writes_a_profile_that_plans(fake_nvml: FakeNvml, folder: Path) -> None:
    says(
        done(f"{BUILD} --plot"),
        "NVIDIA A40, measured | valley | spins idly | wrote profile.png",
    )
    profile = Profile.read_csv(folder / "profile.csv")
    assert profile.num_stages == 2
    assert sorted(profile.table(1, "backward").frequency_mhz.tolist()) == [210, 720, 1230, 1740]
    power = profile.table(0, "forward")
    at_top = power.max_frequency_option
    watts = power.energy_10fj[at_top] / power.time_ns[at_top] / POWER_UNITS_PER_W
    assert 100 < watts < 30_000  # of a card of 300 W; a busy machine stretches its short blocks
    assert profile.metadata.driver == "550.54.14"
    assert fake_nvml.locked() is None
    changes = [mhz for mhz in fake_nvml.clock_changes() if mhz]
    assert changes == [1740, 1230, 720, 210] * 2
    done("solve -m 4 --quiet")


def test_a_sweep_measures_how_late_clocks_come(
    fake_nvml: FakeNvml, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nvml.gpu().clock_delay_ns = 20_000_000
    quick = LatencySettings(rounds=2, steady_s=0.1, window_s=0.06)
    monkeypatch.setattr("envplan.profiling.switch_latency.LatencySettings", lambda: quick)
    sliced = f"profile --entry stages:Sliced {QUICK}"
    assert "how late clocks come was not measured" not in done(sliced)
    latency = Profile.read_csv(folder / "profile.csv").switch_latency
    assert latency is not None
    assert sorted(latency.by_mhz) == [210, 1230, 1740]
    assert fake_nvml.locked() is None
    changes = fake_nvml.clock_changes()
    done(sliced)  # the sweep is complete
    assert Profile.read_csv(folder / "profile.csv").switch_latency == latency
    assert set(fake_nvml.clock_changes()[len(changes) :]) <= {0}


def test_a_sweep_says_why_it_does_not_know_how_late_clocks_come(
    fake_nvml: FakeNvml, folder: Path
) -> None:
    says(done(BUILD), "how late clocks come was not measured: the stages have no slices of work")
    (folder / "profile.csv").unlink()
    fake_nvml.gpu().stuck = 900
    sliced = done(f"profile --entry stages:Sliced {QUICK}")
    says(sliced, "was not measured: the clock of GPU 0 does not follow")
    assert Profile.read_csv(folder / "profile.csv").switch_latency is None


@pytest.mark.parametrize(
    ("number", "usual", "code", "said"),
    [
        (signal.SIGTERM, signal.SIG_DFL, 130, "envplan: error: interrupted\n"),
        (signal.SIGINT, signal.SIG_DFL, 130, "envplan: error: interrupted\n"),
        (signal.SIGHUP, signal.SIG_DFL, 130, "envplan: error: interrupted\n"),
        (signal.SIGKILL, None, -9, ""),
        (signal.SIGHUP, signal.SIG_IGN, 0, ""),  # under nohup it lives on
    ],
)
def test_a_sweep_that_is_killed_gives_the_clock_back_and_continues(
    fake_nvml: FakeNvml, folder: Path, number: signal.Signals, usual: Any, code: int, said: str
) -> None:
    process = subprocess.Popen(
        [str(COMMAND), *BUILD.split(), "--quiet"],
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
        # Who runs these tests in the background has them ignore some signals; the command must not.
        preexec_fn=lambda: usual is None or signal.signal(number, usual),
    )
    wait_for_rows(process, fake_nvml, folder)
    process.send_signal(number)
    _, errors = process.communicate(timeout=300)
    assert (process.returncode, errors) == (code, said)
    assert fake_nvml.wait_until_free(60.0) is not None
    sidecar, before = folder / "profile.meta.json", (folder / "profile.csv").read_bytes()
    assert json.loads(sidecar.read_text())["complete"] == (code == 0)
    done(f"{BUILD} -q")
    assert (folder / "profile.csv").read_bytes().startswith(before)
    assert json.loads(sidecar.read_text())["complete"]


def test_no_lock_touches_no_clock(fake_nvml: FakeNvml, folder: Path) -> None:
    fake_nvml.gpu().permission = 0
    refused(BUILD, "may not set clocks", "--no-lock")
    done(f"{BUILD} --no-lock -q")
    assert fake_nvml.clock_changes() == []
    assert Profile.read_csv(folder / "profile.csv").table(1, "forward").frequency_mhz[0] == 1740
    done("frontier -q")


def test_a_gpu_that_cuda_hides_is_not_measured(
    fake_nvml: FakeNvml, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    done(f"{BUILD} -q")
    assert {call.gpu for call in fake_nvml.calls()} == {2}
    assert fake_nvml.locked(2) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    refused(BUILD, "there are 0", "CUDA_VISIBLE_DEVICES")


def test_a_gpu_that_tells_no_energy_is_refused_with_its_clock_untouched(
    fake_nvml: FakeNvml, folder: Path
) -> None:
    fake_nvml.gpu().energy_counter = 0
    fake_nvml.fail("power", NOT_SUPPORTED)
    refused(BUILD, "GPU 0", "its energy cannot be measured")
    assert fake_nvml.clock_changes() == []
    assert made(folder) == set()


def test_another_gpu_that_is_lost_stands_in_no_way(fake_nvml: FakeNvml, folder: Path) -> None:
    fake_nvml.fail("handle", GPU_IS_LOST, index=1)
    done(f"{BUILD} -q")


def test_a_driver_that_hangs_at_start_is_not_waited_for(
    fake_nvml: FakeNvml, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "START_TIMEOUT_S", 0.2)
    fake_nvml.hang("init")
    refused(BUILD, "the driver")
    fake_nvml.hang()
    assert made(folder) == set()


def test_a_failing_driver_ends_the_sweep_in_one_line(fake_nvml: FakeNvml, folder: Path) -> None:
    fake_nvml.fail("lock")
    refused(BUILD, "GPU 0")
    assert fake_nvml.locked() is None


def test_a_clock_that_is_not_given_back_is_said(fake_nvml: FakeNvml, folder: Path) -> None:
    fake_nvml.fail("reset")
    ran = envplan(*BUILD.split())
    assert_refused(ran, 2, "could not be given back", "210 MHz", "envplan reset", "GPU 0")
    assert fake_nvml.locked() == 210
    fake_nvml.fail("reset", 0)
    done(f"{BUILD} -q")
    assert fake_nvml.locked() is None


def test_a_driver_that_times_out_now_and_then_and_tells_no_throttling_is_good_enough(
    fake_nvml: FakeNvml, folder: Path
) -> None:
    fake_nvml.fail("energy", TIMEOUT, probability=0.05)
    fake_nvml.fail("throttle", NOT_SUPPORTED)
    assert "does not tell why the clock is held back" in done(BUILD)


def test_a_split_gpu_and_a_missing_one_are_refused(fake_nvml: FakeNvml, folder: Path) -> None:
    refused(f"{BUILD} --device 7", "GPU 7", "4")
    fake_nvml.gpu().mig = 1
    for more in ((), ("--no-lock",)):
        ran = envplan(*BUILD.split(), *more)
        assert_refused(ran, 2, "MIG")
        assert "--no-lock" not in ran.err  # it would be refused as well
    assert fake_nvml.clock_changes() == []
    assert made(folder) == set()


#: What --entry names, and words of the refusal.
UNFIT = """
stages | package.module:function
nowhere:build | does not import | nowhere
stages:absent | no function absent
stages:number | no function number
stages:broken | broken() failed | no weights here
stages:late | late() failed | ValueError: a stage is missing
stages:hungry | hungry() | does not fit in memory
stages:nothing | pair | int
stages:leaving | leaving() failed | SystemExit
stages:Uncounted | num_stages | 'two'
stages:Empty | num_stages | not 0
stages:Hungry | backward(1) | does not fit in the GPU's memory | smaller microb
stages:Failing | forward(0) | ValueError: wrong shape of the input
stages:Leaving | forward(0) | SystemExit: 0
ending:build | does not import
"""


@pytest.mark.parametrize("row", UNFIT.strip().splitlines())
def test_an_entry_that_cannot_be_used_is_refused_with_clocks_untouched(
    fake_nvml: FakeNvml, folder: Path, row: str
) -> None:
    (folder / "ending.py").write_text("raise SystemExit(0)\n")
    entry, *words = row.split(" | ")
    refused(f"profile {QUICK} --entry {entry}", *words)
    assert fake_nvml.clock_changes() == []
    assert made(folder) == {"ending.py"}


def test_a_stage_that_fails_later_keeps_what_was_measured_and_gives_the_clock_back(
    fake_nvml: FakeNvml, folder: Path
) -> None:
    ran = envplan(*f"profile {QUICK} --entry stages:Tired".split())
    assert_refused(ran, 2, "backward(1)", "RuntimeError: enough")
    assert fake_nvml.clock_changes()[-1] == 0
    assert len((folder / "profile.csv").read_text().splitlines()) > 3


def test_out_of_memory_is_called_in_torch_as_it_is_here() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed (extra: torch)")
    assert torch.cuda.OutOfMemoryError.__name__ == "OutOfMemoryError"


def test_a_split_backward_is_measured_in_two_parts(fake_nvml: FakeNvml, folder: Path) -> None:
    done(f"{BUILD} --split-backward")
    profile = Profile.read_csv(folder / "profile.csv")
    assert profile.instructions == ("forward", "backward_input", "backward_weight")
    done("frontier -m 4 -q")


@pytest.mark.parametrize(("schedule", "chunks"), [("zb-h1", 1), ("zb-v", 2), ("dualpipe-v", 2)])
def test_a_profile_has_what_its_schedule_needs(folder: Path, schedule: str, chunks: int) -> None:
    job = ("--pp", "2", "--layers", "8", "-m", "4", "--schedule", schedule)
    done("profile --workload gpt --backend modelled", *job)
    assert Profile.read_csv(folder / "profile.csv").num_stages == 2 * chunks
    assert "2 stages" + (f" x {chunks} chunks" if chunks > 1 else "") in done("solve")


def test_a_t5_runs_in_torch(fake_nvml: FakeNvml, folder: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed (extra: torch)")
    (folder / "small.py").write_text(
        "import torch\n"
        "from envplan.profiling.models import model_of\n"
        "from envplan.profiling.torch_stages import torch_stages\n"
        "from envplan.profiling.training_job import TrainingJob\n"
        "def build():\n"
        "    model = model_of('t5', layers=2, hidden_size=32, heads=2, vocabulary_size=64,\n"
        "                     sequence_length=8)\n"
        "    job = TrainingJob(model=model, num_stages=2, microbatch_size=1, dtype='float32')\n"
        "    torch.set_num_threads(1)\n"
        "    return torch_stages(job, 'cpu')\n"
    )
    out = done("profile --entry small:build --step 900 --time-limit 0.1")
    assert "T5 of 2 x 2 layers x 32 training, 2 stages of 2-2 layers, 1 x 8 + 8 tokens" in out
    assert Profile.read_csv(folder / "profile.csv").metadata.extra["times"] == "host clock"


def test_one_rank_stands_for_all_and_says_so(fake_nvml: FakeNvml, folder: Path) -> None:
    assert "one of 4 tensor-parallel GPUs was measured" in done(f"{BUILD} --tp 4")
    metadata = Profile.read_csv(folder / "profile.csv").metadata
    assert metadata.tensor_parallel == 4
    assert "neither time nor energy" in metadata.extra["communication"]


def test_blocking_power_can_come_from_two_processes(fake_nvml: FakeNvml, folder: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed (extra: torch)")
    arguments = ("--entry", "stages:Waiting", "--step", "900", "--time-limit", "0.3")
    assert "waits to receive from another through gloo" in done("profile", *arguments)
    power = Profile.read_csv(folder / "profile.csv").blocking_power_w
    assert power is not None
    assert power[0] > 0


def test_modelled_sizes_take_recomputation_ranks_and_a_split(tmp_path: Path) -> None:
    profiles = []
    for more in ("", "--recompute", "--tp 2"):
        done(f"profile --backend modelled --step 300 -q --split-backward {more}", cwd=tmp_path)
        profiles.append(Profile.read_csv(tmp_path / "profile.csv"))
    forward, inputs, weights = (
        [profile.table(1, name).time_ns[0] for profile in profiles]
        for name in ("forward", "backward_input", "backward_weight")
    )
    assert weights[1] == weights[0]
    assert inputs[1] - inputs[0] == pytest.approx(forward[0], rel=1e-6)
    assert weights[2] == pytest.approx(weights[0] / 2, rel=0.01)
    assert profiles[2].metadata.tensor_parallel == 2


def test_an_entry_says_all_that_sizes_would(fake_nvml: FakeNvml, folder: Path) -> None:
    beside = ("--layers 3", "--stages 3", "--microbatch-size 3", "--recompute")
    for option in beside:
        refused(f"{BUILD} {option}", "--entry", option.split()[0])


def test_a_workload_that_torch_cannot_run_here_is_refused_with_clocks_untouched(
    fake_nvml: FakeNvml, folder: Path
) -> None:
    # Without torch, or with one that finds no CUDA: these GPUs are not really there.
    refused("profile", "torch")
    assert fake_nvml.clock_changes() == []
    assert made(folder) == set()
