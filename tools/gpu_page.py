"""All that only a GPU can show, in ten minutes, as docs/gpu.md: `make gpu`.

    python -m tools.gpu_page docs/gpu.md [--set-clocks]

In this order: the devices, the energy counter against power, a measured profile of a small GPT, a
pipeline of two stages on one GPU timed by CUDA events, and how long NVML's calls take. No clock is
set. --set-clocks adds what sets clocks: how late they come, and all-reduces of two GPUs beside
clocks that change. Never give it on a card that is not yours alone. Without a GPU all of it runs
against a modelled one, and the page says so.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import date
from itertools import pairwise, permutations
from pathlib import Path

import torch
import torch.distributed as dist
from benchmarks.machine import describe_machine
from benchmarks.report import table
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

from envplan.devices import Backend, Device, DeviceError, backend
from envplan.profile import Profile
from envplan.profiling.measuring import measure_latency
from envplan.profiling.queued_slices import torch_slices
from envplan.runtime.torch import profile
from envplan.units import ENERGY_UNITS_PER_J, POWER_UNITS_PER_W
from tools import changing_clocks

_WATCHED_S = 10.0
_CALLS = 200
_WIDTH, _MICROBATCHES = 512, 8
_ENVPLAN = "from envplan.cli.app import main; main()"
_SMALL = ("--workload", "gpt", "--layers", "8", "--hidden-size", "512", "--pp", "2")


_REST = """
No clock was set. `make gpu SET_CLOCKS=--set-clocks` adds how late clocks come, and on two GPUs
whether changes of clock disturb all-reduces; on a card that is yours alone, `make test` with a GPU
adds locking and the kill tests.

## All-reduces while clocks change

Not run: it sets clocks, and takes two GPUs. It has not run on two GPUs anywhere yet, only over
gloo on CPUs with a stand-in for the driver. On a machine with two GPUs of your own, alone, it takes
two minutes: `python -m tools.changing_clocks`. See
[slow clocks](switching.md#do-changes-of-clock-disturb-nccl).
"""


def main() -> None:
    """Run all that needs a GPU and write the page of what was measured."""
    parser = argparse.ArgumentParser()
    parser.add_argument("page", type=Path)
    parser.add_argument("--set-clocks", action="store_true")
    options = parser.parse_args()
    source, real = _source()
    device = source.devices()[0]
    torch.set_num_threads(1)
    parts = [_devices(source), _counter(device), _profile(real), _pipeline(real), _calls(device)]
    if options.set_clocks:
        parts.append(_latency() if real else _switching(device))
        parts.append(_all_reduces(num_gpus=len(source.devices()) if real else 0))
    source.close()
    options.page.write_text(_page(parts, real, clocks=options.set_clocks))


def _source() -> tuple[Backend, bool]:
    with suppress(DeviceError):
        source = backend("nvml")
        if source.devices() and torch.cuda.is_available():
            return source, True
    return backend("modelled", gpu="h200"), False


def _devices(source: Backend) -> str:
    rows = [
        [
            device.info.name,
            device.info.driver,
            f"{device.info.supported_clocks[0]} to {device.info.max_clock}",
            f"{device.info.power_limit:.0f}",
            device.info.energy_source,
            device.lock_refusal() or "yes",
        ]
        for device in source.devices()
    ]
    header = ("GPU", "driver", "clocks, MHz", "limit, W", "energy", "clocks may be set")
    return "## Devices\n\n" + table(header, rows)


def _counter(device: Device) -> str:
    """What the energy counter says under load, beside the integral of power."""
    samples = [(time.monotonic(), device.energy(), device.power()) for _ in _loaded(_WATCHED_S)]
    (begin, first, _), (end, last, _) = samples[0], samples[-1]
    counted = (last - first) / 1e3
    integrated = sum(
        (one[0] - other[0]) * (one[2] + other[2]) / 2 for other, one in pairwise(samples)
    )
    steps = [one[0] for other, one in pairwise(samples) if one[1] != other[1]]
    gaps = [1e3 * (one - other) for other, one in pairwise(steps)]
    off, every = 100 * (counted / integrated - 1), statistics.median(gaps)
    rows = [[f"{figure:.1f}" for figure in (end - begin, counted, integrated, off, every)]]
    header = ("s", "counter, J", "integral of power, J", "difference, %", "counter moves every, ms")
    return "## Energy counter against power, under load\n\n" + table(header, rows)


def _loaded(seconds: float) -> Iterator[None]:
    """Again and again for so long, while the GPU multiplies matrices."""
    there = "cuda" if torch.cuda.is_available() else "cpu"
    matrix = torch.randn(4096 if there == "cuda" else 256, device=there).repeat(64, 1)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(20):
            matrix @ matrix.T
        yield


def _profile(real: bool) -> str:
    """A small GPT's stages, measured at the clock there is."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "profile.csv")
        how = ["--no-lock"] if real else ["--backend", "modelled", "--gpu", "h200", "--step", "600"]
        command = [sys.executable, "-c", _ENVPLAN, "profile", *_SMALL, *how, "-q", "-o", path]
        subprocess.run(command, check=True)
        rows = _rows(Profile.read_csv(path))
    words = "8 layers of 512 units in 2 stages, by `envplan profile"
    words += " --no-lock`." if real else " --backend modelled`."
    return f"## A profile of a small GPT\n\n{words}\n\n{table(_HEADER, rows)}"


_HEADER = ("stage", "instruction", "MHz", "time, ms", "energy, J", "power, W")


def _rows(measured: Profile) -> list[list[str]]:
    rows = []
    for stage in range(measured.num_stages):
        for instruction in ("forward", "backward"):
            options = measured.table(stage, instruction)
            for mhz, ns, energy_10fj in zip(
                options.frequency_mhz, options.time_ns, options.energy_10fj, strict=True
            ):
                cells = [
                    f"{ns / 1e6:.3f}",
                    f"{energy_10fj / ENERGY_UNITS_PER_J:.4f}",
                    f"{energy_10fj / ns / POWER_UNITS_PER_W:.1f}",
                ]
                rows.append([str(stage), instruction, str(mhz), *cells])
    return rows


def _pipeline(real: bool) -> str:
    """Two stages of torch's pipelining on one device, profiled in the job; events are CUDA's."""
    there = torch.device("cuda", 0) if real else torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(str(Path(folder, "store")), 1)
        dist.init_process_group("nccl" if real else "gloo", store=store, rank=0, world_size=1)
        layers = [torch.nn.Sequential(*_layer()).to(there) for _ in range(2)]
        stages = [PipelineStage(layer, k, 2, there) for k, layer in enumerate(layers)]
        schedule = ScheduleInterleaved1F1B(
            stages, _MICROBATCHES, loss_fn=torch.nn.functional.mse_loss
        )
        batch = torch.randn(64 * _MICROBATCHES, _WIDTH, device=there)
        path = Path(folder, "profile.csv")
        with profile(schedule, path, lock=False, iterations_per_frequency=100) as profiler:
            begin = time.monotonic()
            while not profiler.done and time.monotonic() < begin + 60:
                schedule.step(batch, target=torch.zeros_like(batch))
        dist.destroy_process_group()
        rows = _rows(Profile.read_csv(path)) if path.exists() else []
    words = f"{_MICROBATCHES} microbatches through two stages on one device, profiled by the job."
    if not rows:
        words += " No profile came of it: " + (
            "the log says why." if real else "a stand-in has no energy that a job could read."
        )
    found = table(_HEADER, rows) if rows else ""
    return f"## torch.distributed.pipelining\n\n{words}\n\n{found}".rstrip()


def _layer() -> Iterator[torch.nn.Module]:
    for _ in range(4):
        yield torch.nn.Linear(_WIDTH, _WIDTH)
        yield torch.nn.Tanh()


def _calls(device: Device) -> str:
    calls: dict[str, Callable[[], object]] = {
        "clock": device.clock,
        "power": device.power,
        "energy": device.energy,
        "throttle reasons": device.throttle_reasons,
    }
    rows = [[name, *_microseconds(call)] for name, call in calls.items()]
    return "## How long calls take\n\n" + table(("call", "median, us", "99th percentile, us"), rows)


def _microseconds(call: Callable[[], object]) -> list[str]:
    took = []
    for _ in range(_CALLS):
        begin = time.perf_counter_ns()
        call()
        took.append((time.perf_counter_ns() - begin) / 1e3)
    return [f"{statistics.median(took):.1f}", f"{statistics.quantiles(took, n=100)[-1]:.1f}"]


def _latency() -> str:
    """How late clocks come, from slices of work: as `envplan devices --measure-latency`."""
    _, latency = measure_latency(torch_slices, source="nvml", progress=lambda *_: None)
    rows = [
        [str(mhz), f"{1e3 * to_clock.median_s:.1f}", f"{1e3 * to_clock.p95_s:.1f}"]
        for mhz, to_clock in sorted(latency.by_mhz.items())
    ]
    header = ("to, MHz", "median, ms", "95th percentile, ms")
    return "## How late clocks come\n\n" + table(header, rows)


def _all_reduces(num_gpus: int) -> str:
    """All-reduces on two GPUs while clocks change, where there are two."""
    title = "## All-reduces while clocks change\n\n"
    if num_gpus < 2:
        return title + "Not run: it takes two GPUs."
    try:
        return title + changing_clocks.section(changing_clocks.measure(changing_clocks.Setting()))
    except DeviceError as error:
        return f"{title}Not run: {error}."


def _switching(device: Device) -> str:
    """How long the clock takes to follow, between the ends and the middle of its range."""
    clocks = device.info.supported_clocks
    chosen = [clocks[0], clocks[len(clocks) // 2], clocks[-1]]
    rows = []
    try:
        for before, after in permutations(chosen, 2):
            rows.append([str(before), str(after), _followed(device, before, after)])
    finally:
        device.reset_clock()
    return "## Switching clocks\n\n" + table(("from, MHz", "to, MHz", "follows after, ms"), rows)


def _followed(device: Device, before: int, after: int, times: int = 10) -> str:
    took: list[float] = []
    for _ in range(times):
        device.lock_clock(before)
        for _ in _loaded(0.3):
            pass
        begin = time.monotonic()
        device.lock_clock(after)
        for _ in _loaded(1.0):
            if abs(device.clock() - after) <= 15:
                took.append(1e3 * (time.monotonic() - begin))
                break
    return f"{statistics.median(took):.1f}" if took else "not within 1 s"


def _page(parts: Sequence[str], real: bool, *, clocks: bool) -> str:
    machine = ", ".join(f"{name}: {value}" for name, value in describe_machine().items())
    of = "" if real else " **No GPU was there: every figure below is of a modelled H200.**"
    rest = "" if clocks else _REST
    body = "\n\n".join(parts)
    return f"""# What was measured on a GPU

`make gpu` writes this page; last on {date.today().isoformat()}.{of}

{machine}.

{body}
{rest}"""


if __name__ == "__main__":
    main()
