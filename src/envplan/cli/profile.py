"""`envplan profile`: what every stage costs at every clock, measured or modelled."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from envplan.cli.frontier import check_type, name_bare_plot
from envplan.cli.inputs import (
    DEFAULT_PROFILE,
    JsonOption,
    QuietOption,
    at_least,
    check_outputs,
    finite,
)
from envplan.errors import InputError

if TYPE_CHECKING:
    from envplan.devices.base import Device
    from envplan.profile import Profile, ProfileMetadata
    from envplan.profiling.modelled import Sizes
    from envplan.profiling.sweep import Progress, StageSummary, Workload

_DEFAULT_PLOT = "profile.png"
_PLOT_TYPES = (".png", ".svg", ".pdf")
_DEFAULT_GPU = "a40"
_MICROBATCH_SIZES = {"gpt": 4, "bert": 8, "t5": 4, "wide-resnet": 32}
_PRECISIONS = {"bfloat16": "half", "float16": "half", "float32": "single"}
_REPORT_PERIOD_S = 60.0


class ProfileCommand(TyperCommand):
    """The command, with a `--plot` that may stand alone."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, name_bare_plot(args, _DEFAULT_PLOT))


def _size(help_text: str) -> Any:
    return typer.Option(metavar="N", help=help_text)


def profile(
    backend: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="nvml: measure on a GPU here (the default); modelled: no GPU needed.",
        ),
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="gpt (the default), bert, t5 or wide-resnet."),
    ] = None,
    entry: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="Measure the stages that this function returns instead of a workload: pairs of "
            "a torch module and its sample inputs.",
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAME", help=f"The GPU to model; default {_DEFAULT_GPU}."),
    ] = None,
    device: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="The GPU to measure on, as nvidia-smi counts; default: the first one that "
            "CUDA_VISIBLE_DEVICES leaves.",
        ),
    ] = None,
    stages: Annotated[
        int | None, typer.Option(metavar="N", help="Pipeline stages; default 4.")
    ] = None,
    microbatch_size: Annotated[
        int | None,
        typer.Option(metavar="N", help="Samples of a microbatch; default: the workload's."),
    ] = None,
    microbatches: Annotated[
        int,
        typer.Option("--microbatches", "-m", metavar="M", help="Microbatches of an iteration."),
    ] = 32,
    schedule: Annotated[str, typer.Option(metavar="NAME", help="The job's schedule.")] = "1f1b",
    sequence_length: Annotated[int | None, _size("Tokens of a sample.")] = None,
    layers: Annotated[
        int | None,
        _size("Layers; of encoder and of decoder for t5; 50, 101 or 152 for wide-resnet."),
    ] = None,
    hidden_size: Annotated[int | None, _size("Width of a transformer.")] = None,
    heads: Annotated[int | None, _size("Attention heads.")] = None,
    vocabulary_size: Annotated[
        int | None, _size("Words; 0 leaves out embedding and head of gpt and bert.")
    ] = None,
    width_factor: Annotated[
        int | None, _size("How much wider than ResNet's the 3x3 convolutions are.")
    ] = None,
    image_size: Annotated[int | None, _size("Pixels on a side of an image.")] = None,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="TYPE", help="bfloat16 (the default), float16 or float32."),
    ] = None,
    tensor_parallel: Annotated[
        int | None,
        typer.Option(
            "--tensor-parallel",
            "--tp",
            metavar="N",
            help="GPUs that share a stage; one of them is measured. Default 1.",
        ),
    ] = None,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="A backward does its forward again.")
    ] = False,
    split_backward: Annotated[
        bool,
        typer.Option(
            "--split-backward",
            help="Gradients of inputs and of weights apart, for zero-bubble schedules.",
        ),
    ] = False,
    step: Annotated[
        int, typer.Option(metavar="MHZ", help="Clocks at least this far apart; 0: all there are.")
    ] = 0,
    error: Annotated[
        float | None,
        typer.Option(
            metavar="PCT",
            help="Repeat until time and energy have this standard error; default 1.",
        ),
    ] = None,
    time_limit: Annotated[
        float | None,
        typer.Option(metavar="S", help="But at most so long for an operation; default 20."),
    ] = None,
    no_lock: Annotated[
        bool,
        typer.Option("--no-lock", help="Touch no clock: measure at the current ones only."),
    ] = False,
    smooth: Annotated[
        bool,
        typer.Option(
            "--smooth",
            help="Take out noise at the end; raw_time and raw_energy keep what was measured.",
        ),
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="[FILE]",
            help="Draw energy against clock, as .png, .svg or .pdf; without a name: "
            f"{_DEFAULT_PLOT}.",
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Where the profile goes.")
    ] = Path(DEFAULT_PROFILE),
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Find out what time and energy each stage takes at each clock.

    Clocks are swept from the highest down until energy only rises. Run the same command again to
    continue a sweep that was cut off.

    \b
    Example:
      envplan profile --backend modelled --gpu a40 --workload gpt --stages 4
      envplan profile --workload gpt --layers 24 --hidden-size 2048 --step 30 --smooth --plot
      envplan profile --entry mymodel.stages:build --no-lock
    """
    from envplan.profiling.modelled import Sizes

    for option, count in (("--stages", stages), ("--microbatch-size", microbatch_size)):
        if count is not None:
            at_least(count, option, 1)
    if tensor_parallel is not None:
        at_least(tensor_parallel, "--tp", 1)
    at_least(microbatches, "--microbatches", 1)
    at_least(step, "--step", 0)
    check_type(plot, "--plot", _PLOT_TYPES, "choose one of them")
    check_type(output, "--output", (".csv",), "a profile is a CSV file")
    check_outputs(output, plot)
    job = _Job(
        workload=workload,
        entry=entry,
        stages=stages,
        microbatch_size=microbatch_size,
        microbatches=microbatches,
        schedule=_known_schedule(schedule),
        sizes=Sizes(
            layers=layers,
            hidden_size=hidden_size,
            heads=heads,
            vocabulary_size=vocabulary_size,
            sequence_length=sequence_length,
            width_factor=width_factor,
            image_size=image_size,
        ),
        dtype=_known_dtype(dtype),
        tensor_parallel=tensor_parallel or 1,
        recompute=recompute,
        split_backward=split_backward,
        step=step,
        output=output,
    )
    if backend == "modelled":
        _refuse_with(
            "modelled",
            "nvml",
            {
                "--entry": entry,
                "--device": device,
                "--error": error,
                "--time-limit": time_limit,
                "--no-lock": no_lock or None,
                "--smooth": smooth or None,
            },
        )
        made = _model(job, gpu or _DEFAULT_GPU)
    elif backend in (None, "nvml"):
        _refuse_with("nvml", "modelled", {"--gpu": gpu})
        if smooth and no_lock:
            raise InputError(
                "--smooth and --no-lock exclude each other: one clock makes no curve to smooth"
            )
        made = _measure(
            job,
            device=None if device is None else at_least(device, "--device", 0),
            error=_percent(error),
            time_limit=_limit(time_limit),
            lock=not no_lock,
            quiet=quiet,
        )
        if smooth:
            made = _smooth(output)
    else:
        raise InputError(f"there is no backend {backend!r}; there are: nvml, modelled")
    written = [output]
    if plot is not None:
        from envplan.plotting.profile import plot_profile

        plot_profile(made, plot)
        written.append(plot)
    if json:
        _print_json(made)
    elif not quiet:
        _print(made, written)


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What is to be profiled, as the options say."""

    workload: str | None
    entry: str | None
    stages: int | None
    microbatch_size: int | None
    microbatches: int
    schedule: str
    sizes: Sizes
    dtype: str
    tensor_parallel: int
    recompute: bool
    split_backward: bool
    step: int
    output: Path


def _percent(error: float | None) -> float:
    if error is None:
        return 0.01
    if finite(error, "--error") == 0:
        raise InputError("--error must be above 0; 1 is one percent")
    return error / 100


def _limit(seconds: float | None) -> float:
    if seconds is None:
        return 20.0
    if finite(seconds, "--time-limit") == 0:
        raise InputError("--time-limit must be above 0")
    return seconds


def _known_schedule(name: str) -> str:
    from envplan.pipeline import SCHEDULES

    if name not in SCHEDULES:
        raise InputError(f"there is no schedule {name!r}; there are: {', '.join(SCHEDULES)}")
    return name


def _known_dtype(name: str | None) -> str:
    if name is not None and name not in _PRECISIONS:
        raise InputError(f"--dtype must be one of {', '.join(_PRECISIONS)}, not {name}")
    return name or "bfloat16"


def _refuse_with(backend: str, other: str, options: dict[str, Any]) -> None:
    for option, value in options.items():
        if value is not None:
            raise InputError(f"{option} goes with --backend {other}, not {backend}")


def _model(job: _Job, gpu: str) -> Profile:
    from envplan.profile import Profile, ProfileMetadata
    from envplan.profiling.modelled import ModelledJob, model_of, modelled_profile

    workload = job.workload or "gpt"
    planned = ModelledJob(
        name=job.output.stem,
        gpu=gpu,
        model=model_of(workload, job.sizes),
        num_stages=4 if job.stages is None else job.stages,
        num_microbatches=job.microbatches,
        microbatch_size=job.microbatch_size or _MICROBATCH_SIZES[workload],
        tensor_parallel=job.tensor_parallel,
        recompute=job.recompute,
        precision=_PRECISIONS[job.dtype],
        split_backward=job.split_backward,
        schedule=job.schedule,
    )
    if job.output.exists():
        there = ProfileMetadata.read_json(job.output.with_suffix(".meta.json"))
        if there.source != "modelled":
            raise InputError(
                "exists and is not a modelled profile; choose another file with -o, or delete it",
                path=job.output,
            )
    made = modelled_profile(planned, step=job.step)
    made.save_csv(job.output)
    return Profile.read_csv(job.output)


def _measure(
    job: _Job, *, device: int | None, error: float, time_limit: float, lock: bool, quiet: bool
) -> Profile:
    from envplan.profiling.sweep import Settings, sweep
    from envplan.runtime.guard import Guard

    if job.split_backward and job.recompute:
        raise InputError(
            "--split-backward and --recompute are not measured together: torch would do the "
            "forward again for either part; measure without --recompute, and give --recompute to "
            "envplan frontier or solve instead"
        )
    with ExitStack() as stack:
        chosen, other = _devices(device, stack)
        # CUDA and NVML number GPUs differently; from here on this is the only one CUDA knows.
        os.environ["CUDA_VISIBLE_DEVICES"] = chosen.info.uuid
        workload = _workload(job, "cuda:0")
        if lock:
            _refuse_locks(chosen)
        stack.enter_context(_stoppable())
        if other is not None:
            _wait_with(workload, chosen, other, stack)
        return sweep(
            workload,
            chosen,
            job.output,
            Settings.within(
                time_limit,
                step=job.step,
                lock=lock,
                target_error=error,
                split_backward=job.split_backward,
            ),
            metadata=_metadata(job),
            progress=_reporter(stack, quiet=quiet),
            hold=partial(Guard.start, "nvml", chosen.info.index) if lock else nullcontext,
        )


def _metadata(job: _Job) -> ProfileMetadata:
    """What the sidecar shall say of the job itself."""
    from envplan.profile import ProfileMetadata
    from envplan.profiling.modelled import model_of
    from envplan.profiling.workloads import TransformerModel

    extra: dict[str, Any] = {}
    model = None if job.entry else model_of(job.workload or "gpt", job.sizes)
    if isinstance(model, TransformerModel):
        extra["sequence_length"] = model.sequence_length
    if job.tensor_parallel > 1:
        extra["communication"] = (
            f"one of {job.tensor_parallel} tensor-parallel GPUs was measured; what they send each "
            "other is in neither time nor energy"
        )
    if job.recompute:
        extra["recompute"] = True
    return ProfileMetadata(
        microbatch_size=None if job.entry else _microbatch_size(job),
        tensor_parallel=job.tensor_parallel,
        schedule=job.schedule,
        num_microbatches=job.microbatches,
        extra=extra,
    )


def _wait_with(workload: Workload, chosen: Device, other: Device, stack: ExitStack) -> None:
    """Have a torch workload wait for a second GPU, where that works; else it goes on spinning."""
    from envplan.devices import DeviceError
    from envplan.profiling.waiting import Peers

    torch = sys.modules.get("envplan.profiling.torch_workloads")  # a user's own needs no torch
    if torch is None or not isinstance(workload, torch.TorchWorkload) or not torch.nccl_available():
        return
    seen = [{"CUDA_VISIBLE_DEVICES": device.info.uuid} for device in (chosen, other)]
    try:
        workload.peers = stack.enter_context(
            Peers(backend="nccl", device="cuda:0", environments=seen)
        )
    except DeviceError as error:
        print(f"envplan: {error}; blocking power is that of idle spinning", file=sys.stderr)


def _smooth(path: Path) -> Profile:
    from envplan.profile import Profile
    from envplan.profiling.smoothing import smooth_profile

    smoothed, _ = smooth_profile(path)
    smoothed.save_csv(path)
    return Profile.read_csv(path)


def _devices(index: int | None, stack: ExitStack) -> tuple[Device, Device | None]:
    """The GPU to measure on, and one for it to wait for.

    Raises:
        DeviceError: there is no driver or GPU; says what can be done without.
        InputError: there is no GPU of that number.
    """
    from envplan.devices import backend
    from envplan.devices.visible import gpu_of_rank, visible_gpus

    source = backend("nvml")
    stack.callback(source.close)
    devices = source.devices()
    if index is None:
        index = gpu_of_rank(devices, 0)
    if index >= len(devices):
        raise InputError(f"there is no GPU {index}; there are {len(devices)}, counted from 0")
    others = (devices[k] for k in visible_gpus(devices) if k != index)
    return devices[index], next(filter(_is_whole, others), None)


def _is_whole(device: Device) -> bool:
    """Whether it is there and not split by MIG."""
    from envplan.devices import DeviceError

    try:
        return not device.info.mig
    except DeviceError:
        return False


def _refuse_locks(device: Device) -> None:
    from envplan.devices import DeviceError

    if refusal := device.can_lock(probe=True):
        # With MIG there is nothing to be measured at any clock.
        instead = "" if device.info.mig else "; or measure at the current clocks only: --no-lock"
        raise DeviceError(refusal + instead)


def _microbatch_size(job: _Job) -> int:
    return job.microbatch_size or _MICROBATCH_SIZES[job.workload or "gpt"]


def _workload(job: _Job, device: str) -> Workload:
    if job.entry is not None:
        from envplan.profiling.entry import load_entry

        _refuse_beside_entry(job)
        return load_entry(job.entry, device)
    from envplan.profiling.modelled import model_of
    from envplan.profiling.torch_workloads import torch_workload

    workload = job.workload or "gpt"
    return torch_workload(
        workload,
        model_of(workload, job.sizes),
        num_stages=4 if job.stages is None else job.stages,
        microbatch_size=_microbatch_size(job),
        dtype=job.dtype,
        device=device,
        tensor_parallel=job.tensor_parallel,
        recompute=job.recompute,
    )


def _refuse_beside_entry(job: _Job) -> None:
    beside = {
        "--workload": job.workload,
        "--stages": job.stages,
        "--microbatch-size": job.microbatch_size,
        "--recompute": job.recompute or None,
        **{f"--{name.replace('_', '-')}": size for name, size in job.sizes.given().items()},
    }
    for option, value in beside.items():
        if value is not None:
            raise InputError(f"--entry and {option} exclude each other; the function says it all")


@contextmanager
def _stoppable() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the sweep as Ctrl-C does, so that it cleans up behind itself."""

    def stop(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    # Not where somebody else has a say: nohup has SIGHUP ignored, a user's module its own handler.
    ours = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) == signal.SIG_DFL]
    for number in ours:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _reporter(stack: ExitStack, *, quiet: bool) -> Any:
    """Shows progress on stderr: a line that is rewritten on a terminal, else one a minute."""
    if quiet:
        return None
    reporter = _Reporter(sys.stderr.isatty())
    stack.callback(reporter.end)
    return reporter


class _Reporter:
    def __init__(self, terminal: bool) -> None:
        self._terminal = terminal
        self._last = time.monotonic()

    def __call__(self, progress: Progress) -> None:
        line = describe_progress(progress)
        if self._terminal:
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - self._last >= _REPORT_PERIOD_S:
            self._last = time.monotonic()
            print(line, file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._terminal:
            with suppress(OSError):
                print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def describe_progress(progress: Progress) -> str:
    """How far a sweep is, in a line."""
    clock = "current clocks" if progress.frequency is None else f"{progress.frequency} MHz"
    line = f"stage {progress.stage} of {progress.num_stages}, {clock}"
    if progress.seconds_left is None:
        return line
    minutes, seconds = divmod(round(progress.seconds_left), 60)
    left = f"{minutes} min" if minutes else f"{seconds} s"
    return f"{line}, {100 * progress.done / progress.total:.0f}%, up to about {left} left"


def _print(profile: Profile, written: Sequence[Path]) -> None:
    from envplan.cli.output import describe_profile, print_table, say, signed_percent, significant

    metadata = profile.metadata
    say(f"{describe_profile(profile)}: {metadata.workload}")
    headers = [
        "stage",
        "clocks (MHz)",
        "time (s)",
        "energy (J)",
        "valley (MHz)",
        "slower (%)",
        "saved (%)",
    ]
    rows = []
    for summary in _summaries(profile):
        saved = 100 * (1 - summary.energy_at_valley / summary.energy_at_highest)
        slower = 100 * (summary.time_at_valley / summary.time_at_highest - 1)
        one = summary.clocks == 1
        rows.append(
            [
                str(summary.stage),
                f"{summary.highest}" + ("" if one else f"-{summary.lowest} ({summary.clocks})"),
                significant(summary.time_at_highest, 4),
                significant(summary.energy_at_highest, 5),
                str(summary.valley) + ("" if summary.ends_below else " (lowest)"),
                signed_percent(slower),
                f"{saved:.2f}",
            ]
        )
    print_table(
        "Forward + backward of a microbatch on one GPU at the highest clock,\nand what the clock "
        f"of least energy, the valley, does to it{_modelled(profile)}",
        headers,
        rows,
        words=2,
    )
    if job := _job_line(metadata):
        say(job)
    for note in _notes(profile):
        say(note)
    for path in written:
        say(f"wrote {path}")


def _modelled(profile: Profile) -> str:
    return "" if profile.metadata.source == "measured" else " (modelled)"


def _job_line(metadata: ProfileMetadata) -> str:
    """The job that other commands take from the sidecar."""
    if metadata.num_microbatches is None or metadata.schedule is None:
        return ""
    of = f" of {metadata.microbatch_size} samples" if metadata.microbatch_size else ""
    return (
        f"planned for, unless a command says otherwise: {metadata.num_microbatches} "
        f"microbatches{of}, schedule {metadata.schedule}"
    )


def _summaries(profile: Profile) -> list[StageSummary]:
    from envplan.profiling.sweep import summarize_profile

    return summarize_profile(profile)


def _notes(profile: Profile) -> list[str]:
    """What a user should know about the rows."""
    extra = profile.metadata.extra
    notes = []
    if profile.metadata.source == "modelled":
        notes.append("nothing was measured: the sidecar, .meta.json, says what the model assumes")
    if extra.get("energy_source") == "integrated power":
        notes.append("this GPU has no energy counter: energy is its power, sampled and summed up")
    if throttled := extra.get("rows_throttled"):
        notes.append(f"the clock was held back during {throttled} rows; see the column throttle")
    if over := extra.get("rows_over_target_error"):
        notes.append(
            f"{over} rows did not reach the standard error asked for within --time-limit; see "
            "the columns time_std and energy_std"
        )
    if profile.blocking_power_w is not None:
        watts = sum(profile.blocking_power_w) / len(profile.blocking_power_w)
        kind = extra.get("blocking_power")
        notes.append(
            f"a GPU that waits draws {watts:.0f} W on average over the clocks"
            + (f": blocking power {kind}" if kind else _modelled(profile))
        )
    if communication := extra.get("communication"):
        notes.append(str(communication))
    if smoothed := extra.get("smoothed"):
        notes.append(describe_smoothing(smoothed))
    return notes


def describe_smoothing(said: Mapping[str, Any]) -> str:
    """What the sidecar says of a smoothed profile, in a line."""
    if not said["rows_moved"]:
        return "smoothed: no row moved, every operation's curves have their shape already"
    return (
        f"smoothed: {said['rows_moved']} rows moved, times by up to "
        f"{100 * said['largest_change_of_time']:.2g}%, energies by up to "
        f"{100 * said['largest_change_of_energy']:.2g}%; raw_time and raw_energy hold what was "
        "measured"
    )


def _print_json(profile: Profile) -> None:
    from dataclasses import asdict

    from envplan.cli.output import print_json

    print_json(
        {
            "profile": str(profile.path),
            "source": profile.metadata.source,
            "gpu": profile.metadata.gpu,
            "workload": profile.metadata.workload,
            "stages": [asdict(summary) for summary in _summaries(profile)],
            "notes": _notes(profile),
        }
    )
