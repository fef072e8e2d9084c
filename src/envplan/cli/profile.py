"""`envplan profile`: what every stage costs at every clock, measured or modelled."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from envplan.cli.command import (
    JOB,
    MOST,
    OUTPUT,
    file_of,
    flag,
    one_of,
    option,
    options,
    plot_option,
)
from envplan.cli.inputs import check_outputs
from envplan.cli.options import DEFAULT_PROFILE, OutputOptions
from envplan.errors import InputError, unknown
from envplan.profiling.sizes import Sizes
from envplan.quantities import COUNT, PERCENT, TIME, WHOLE

if TYPE_CHECKING:
    from envplan.devices.base import Device
    from envplan.profile import Profile
    from envplan.profiling.sweep import Progress, Workload
    from envplan.profiling.workloads import Model

_DEFAULT_GPU: Final = "a40"
_MODEL_GPU: Final = "h100"
_MICROBATCH_SIZES: Final = {"gpt": 4, "bert": 8, "t5": 4, "wide-resnet": 32}
_PRECISIONS: Final = {"bfloat16": "half", "float16": "half", "float32": "single"}
_PLOT_TYPES: Final = (".png", ".svg", ".pdf")
_HEADERS: Final = (
    *("stage", "clocks (MHz)", "time (s)", "energy (J)"),
    *("valley (MHz)", "slower (%)", "saved (%)"),
)
_REPORT_PERIOD_S: Final = 60.0
#: Of mixed-precision Adam: 16-bit weight; its gradient, both moments and a copy in 32 bits.
_BYTES_PER_PARAMETER: Final = 18

_SIZES, _MEASURING = "Sizes of the workload", "Measuring"


def _known_schedule(name: str, option_name: str) -> str:
    from envplan.pipeline import SCHEDULES

    if name not in SCHEDULES:
        raise InputError(f"{option_name}: {unknown('schedule', name, SCHEDULES)}")
    return name


@options
class WorkOptions:
    """What is profiled, and the job it is part of."""

    workload: str | None = option(
        "--workload NAME", MOST, "gpt (the default), bert, t5 or wide-resnet."
    )
    model: str | None = option(
        "--model NAME|FILE",
        MOST,
        "Instead, modelled: llama3-8b, llama3-70b, llama3-405b, qwen3-32b, mixtral-8x7b, "
        "deepseek-v3, gpt3-175b, or a config.json of Hugging Face.",
    )
    entry: str | None = option(
        "--entry MODULE:FUNCTION",
        MOST,
        "Measure the stages that this function returns: pairs of a torch module and inputs.",
    )
    stages: int | None = option("--pp, --stages N", MOST, "Pipeline stages; default 4.", COUNT)
    vp: int = option(
        "--vp, --chunks N", JOB, "Model chunks of a stage; default 1.", COUNT, default=1
    )
    tp: int = option(
        "--tp, --tensor-parallel N",
        JOB,
        "GPUs of a stage; one is measured.",
        COUNT,
        default=1,
    )
    cp: int = option(
        "--cp N", JOB, "Context-parallel size: GPUs that share a sequence.", COUNT, default=1
    )
    dp: int = option("--dp, --replicas N", JOB, "Replicas of the pipeline.", COUNT, default=1)
    microbatch_size: int | None = option(
        "--microbatch-size N",
        JOB,
        "Samples of a microbatch; default: by workload, 1 with --model.",
        COUNT,
    )
    microbatches: int = option(
        "-m, --microbatches M", JOB, "Microbatches of an iteration.", COUNT, default=32
    )
    schedule: str = option(
        "--schedule NAME", JOB, "The job's schedule.", _known_schedule, default="1f1b"
    )
    dtype: str = option(
        "--dtype TYPE",
        JOB,
        "bfloat16, float16 or float32.",
        one_of(*_PRECISIONS),
        default="bfloat16",
    )
    recompute: bool = flag("--recompute", JOB, "A backward does its forward again.")
    split_backward: bool = flag(
        "--split-backward", JOB, "Gradients of inputs and weights apart (zero bubble)."
    )

    def __post_init__(self) -> None:
        """Raises: InputError: more than one option says what runs."""
        given = [f"--{name}" for name in ("workload", "model", "entry") if getattr(self, name)]
        if len(given) > 1:
            raise InputError(f"{given[0]} and {given[1]} exclude each other; give one of them")

    @property
    def samples(self) -> int | None:
        """Of a microbatch; None if only the user's function knows."""
        if self.entry is not None:
            return None
        usual = 1 if self.model else _MICROBATCH_SIZES.get(self.workload or "gpt", 1)
        return self.microbatch_size or usual

    @property
    def num_stages(self) -> int:
        """Pipeline stages."""
        return self.stages or 4

    def what(self, sizes: Sizes) -> Model:
        """The model that is trained. Raises: InputError: there is none of that name or size."""
        from envplan.profiling.modelled import model_of, named_model

        if self.model is not None:
            return named_model(self.model, sizes)
        return model_of(self.workload or "gpt", sizes)


def _size(spec: str, help_text: str) -> Any:
    return option(spec, _SIZES, help_text, WHOLE)


@options
class SizeOptions(Sizes):
    """Sizes of the workload."""

    layers: int | None = _size(
        "--layers N", "Layers; t5: of either part; wide-resnet: 50, 101, 152."
    )
    hidden_size: int | None = _size("--hidden-size N", "Width of a transformer.")
    heads: int | None = _size("--heads N", "Attention heads.")
    vocabulary_size: int | None = _size(
        "--vocabulary-size N", "Words; 0: no embedding and head (gpt, bert)."
    )
    sequence_length: int | None = _size("--sequence-length N", "Tokens of a sample.")
    width_factor: int | None = _size(
        "--width-factor N", "How much wider than ResNet's 3x3 convolutions."
    )
    image_size: int | None = _size("--image-size N", "Pixels on a side of an image.")


@options
class MeasuringOptions:
    """How a real GPU is measured; None where nothing was said."""

    device: int | None = option(
        "--device N", _MEASURING, "Which GPU, by nvidia-smi; default: CUDA's first.", WHOLE
    )
    error: float | None = option(
        "--error PCT",
        _MEASURING,
        "Repeat until time and energy have this standard error; default 1.",
        PERCENT.within(1e-6),
    )
    time_limit: float | None = option(
        "--time-limit TIME",
        _MEASURING,
        "But at most so long for an operation; default 20s.",
        TIME.within(1e-6),
    )
    no_lock: bool = flag(
        "--no-lock", _MEASURING, "Touch no clock: measure at the current ones only."
    )
    smooth: bool = flag("--smooth", _MEASURING, "Take out noise; raw_time and raw_energy stay.")


def profile(
    work: WorkOptions,
    sizes: SizeOptions,
    measuring: MeasuringOptions,
    show: OutputOptions,
    backend: str | None = option(
        "--backend NAME",
        MOST,
        "nvml: measure on a GPU here (the default); zeusd: the same, with clocks set by the Zeus "
        "daemon; modelled: no GPU needed.",
    ),
    gpu: str | None = option(
        "--gpu NAME",
        MOST,
        "The GPU to model: h100, h200, b200, a100, l40s, a40, v100 and more (envplan devices "
        f"--backend modelled); default {_DEFAULT_GPU}, with --model {_MODEL_GPU}.",
    ),
    step: int = option(
        "--step MHZ", MOST, "Clocks at least this far apart; 0: all there are.", WHOLE, default=0
    ),
    plot: Path | None = plot_option(
        "profile.png", _PLOT_TYPES, "energy against clock", "choose one of them"
    ),
    output: Path = option(
        "-o, --output FILE",
        OUTPUT,
        "Where the profile goes.",
        file_of((".csv",), "a profile is a CSV file"),
        default=Path(DEFAULT_PROFILE),
    ),
) -> None:
    """Find out what time and energy each stage takes at each clock.

    Clocks are swept from the highest down until energy only rises. Run the same command again to
    continue a sweep that was cut off.

    \b
    Example:
      envplan profile --backend modelled --gpu a40 --workload gpt --pp 4
      envplan profile --model llama3-70b --gpu h100 --pp 8 --tp 8
      envplan profile --model config.json --gpu b200 --pp 4
      envplan profile --workload gpt --layers 24 --hidden-size 2048 --step 30 --smooth --plot
      envplan profile --entry mymodel.stages:build --no-lock
    """
    from envplan.cli.output import answer
    from envplan.devices import DEFAULT_BACKEND, backend_class

    check_outputs(output, plot)
    name = backend or ("modelled" if work.model else DEFAULT_BACKEND)
    if backend_class(name).real:
        _refuse({"--gpu": gpu}, f"goes with --backend modelled, not {name}")
        _refuse(
            {"--model": work.model},
            f"goes with --backend modelled, not {name}; measure your model's stages with --entry",
        )
        made = _measure(name, work, sizes, measuring, step, output, quiet=show.quiet)
    else:
        unfit = {"--entry": work.entry, **_given(measuring)}
        _refuse(unfit, f"goes with --backend {DEFAULT_BACKEND}, not {name}")
        usual = _MODEL_GPU if work.model else _DEFAULT_GPU
        made = _model(work, sizes, gpu or usual, step, output)
    if plot is not None:
        from envplan.plotting.profile import plot_profile

        plot_profile(made, plot)
    named = [] if output == Path(DEFAULT_PROFILE) else [str(output)]
    answer(
        show,
        lambda: _document(made),
        lambda: _print(made),
        written=[output, plot],
        then=["envplan", "frontier", *named, "--plot"],
    )


def _given(options: object) -> dict[str, Any]:
    return {f"--{name.replace('_', '-')}": value for name, value in vars(options).items()}


def _refuse(options: Mapping[str, Any], why: str) -> None:
    for name, value in options.items():
        if value not in (None, False):
            raise InputError(f"{name} {why}")


def _model(work: WorkOptions, sizes: Sizes, gpu: str, step: int, output: Path) -> Profile:
    from envplan.profile import Profile, ProfileMetadata
    from envplan.profiling.modelled import ModelledJob, modelled_profile

    job = ModelledJob(
        name=output.stem,
        gpu=gpu,
        model=work.what(sizes),
        num_stages=work.num_stages,
        chunks=work.vp,
        num_microbatches=work.microbatches,
        microbatch_size=work.samples or 1,
        tensor_parallel=work.tp,
        context_parallel=work.cp,
        replicas=work.dp,
        recompute=work.recompute,
        precision=_PRECISIONS[work.dtype],
        split_backward=work.split_backward,
        schedule=_schedule(work),
    )
    if output.exists():
        there = ProfileMetadata.read_json(output.with_suffix(".meta.json"))
        if there.source != "modelled":
            raise InputError(
                "exists and is not a modelled profile; choose another file with -o, or delete it",
                path=output,
            )
    modelled_profile(job, step=step).save_csv(output)
    return Profile.read_csv(output)


def _schedule(work: WorkOptions) -> str:
    """The job's; with several chunks 1f1b is interleaved."""
    return "interleaved" if work.schedule == "1f1b" and work.vp > 1 else work.schedule


def _measure(
    backend: str,
    work: WorkOptions,
    sizes: Sizes,
    measuring: MeasuringOptions,
    step: int,
    output: Path,
    *,
    quiet: bool,
) -> Profile:
    from envplan.profiling.smoothing import smooth_profile
    from envplan.profiling.sweep import Settings, sweep
    from envplan.runtime.guard import Guard

    if measuring.smooth and measuring.no_lock:
        raise InputError(
            "--smooth and --no-lock exclude each other: one clock makes no curve to smooth"
        )
    if work.cp > 1:
        raise InputError(
            "--cp is not measured: measure stages with the part of the sequence that one GPU has"
        )
    if work.split_backward and work.recompute:
        raise InputError(
            "--split-backward and --recompute are not measured together: torch would do the "
            "forward again for either part; measure without --recompute, and give --recompute to "
            "envplan frontier or solve instead"
        )
    settings = Settings(
        step=step,
        split_backward=work.split_backward,
        lock=not measuring.no_lock,
        target_error=(measuring.error or 1.0) / 100,
        time_limit=measuring.time_limit or Settings.time_limit,
    )
    with ExitStack() as stack:
        chosen, other = _devices(backend, measuring.device, stack)
        # CUDA and NVML number GPUs differently; from here on this is the only one CUDA knows.
        os.environ["CUDA_VISIBLE_DEVICES"] = chosen.info.uuid
        workload = _workload(work, sizes, "cuda:0")
        if settings.lock:
            _refuse_locks(chosen)
        stack.enter_context(_stoppable())
        if other is not None:
            _wait_with(workload, chosen, other, stack)
        reporter = None if quiet else _Reporter(sys.stderr.isatty())
        if reporter is not None:
            stack.callback(reporter.end)
        guard = partial(Guard.start, backend, chosen.info.index)
        made = sweep(
            workload,
            chosen,
            output,
            settings,
            metadata=_metadata(work, sizes),
            progress=reporter,
            hold=guard if settings.lock else nullcontext,
        )
    if measuring.smooth:
        made, _ = smooth_profile(output)
        made.save_csv(output)
    return made


def _metadata(work: WorkOptions, sizes: Sizes) -> Any:
    """What the sidecar shall say of the job itself."""
    from envplan.profile import INCLUDES_RECOMPUTATION, ProfileMetadata

    extra: dict[str, Any] = {}
    model = None if work.entry else work.what(sizes)
    if length := getattr(model, "sequence_length", None):
        extra["sequence_length"] = length
    if work.tp > 1:
        extra["communication"] = (
            f"one of {work.tp} tensor-parallel GPUs was measured; what they send each other is in "
            "neither time nor energy"
        )
    if work.recompute:
        extra[INCLUDES_RECOMPUTATION] = True
    return ProfileMetadata(
        microbatch_size=work.samples,
        tensor_parallel=work.tp,
        schedule=_schedule(work),
        num_microbatches=work.microbatches,
        job=_job(work),
        extra=extra,
    )


def _job(work: WorkOptions) -> Any:
    from envplan.profile.sidecar import Job

    return Job(
        stages=work.num_stages if work.vp > 1 else None,
        chunks=work.vp if work.vp > 1 else None,
        replicas=work.dp,
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


def _devices(name: str, index: int | None, stack: ExitStack) -> tuple[Device, Device | None]:
    """The GPU to measure on, and one for it to wait for.

    Raises:
        DeviceError: there is no driver or GPU; says what can be done without.
    """
    from envplan.devices import backend
    from envplan.devices.base import device_at
    from envplan.devices.visible import gpu_of_rank, visible_gpus

    source = backend(name)
    stack.callback(source.close)
    devices = source.devices()
    chosen = device_at(devices, gpu_of_rank(devices, 0) if index is None else index)
    others = (devices[k] for k in visible_gpus(devices) if devices[k] is not chosen)
    return chosen, next(filter(_is_whole, others), None)


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


def _workload(work: WorkOptions, sizes: Sizes, device: str) -> Workload:
    if work.entry is not None:
        from envplan.profiling.entry import load_entry

        beside = {
            "--workload": work.workload,
            "--stages": work.stages,
            "--microbatch-size": work.microbatch_size,
            "--recompute": work.recompute,
            **_given(sizes),
        }
        _refuse(beside, "and --entry exclude each other; the function says it all")
        return load_entry(work.entry, device)
    from envplan.profiling.torch_workloads import torch_workload

    return torch_workload(
        work.workload or "gpt",
        work.what(sizes),
        num_stages=work.num_stages * work.vp,
        microbatch_size=work.samples or 1,
        dtype=work.dtype,
        device=device,
        tensor_parallel=work.tp,
        recompute=work.recompute,
    )


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


class _Reporter:
    """Shows progress on stderr: a line that is rewritten on a terminal, else one a minute."""

    def __init__(self, terminal: bool) -> None:
        self._terminal = terminal
        self._last = time.monotonic()

    def __call__(self, progress: Progress) -> None:
        if self._terminal:
            print(f"\r\x1b[K{progress}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - self._last >= _REPORT_PERIOD_S:
            self._last = time.monotonic()
            print(progress, file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._terminal:
            with suppress(OSError):
                print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _print(profile: Profile) -> None:
    from envplan.cli.output import describe_profile, print_table, say, signed_percent, significant
    from envplan.profiling.sweep import summarize_profile

    metadata = profile.metadata
    say(f"{describe_profile(profile)}: {metadata.workload}")
    rows = []
    for one in summarize_profile(profile):
        lowest = "" if one.clocks == 1 else f"-{one.lowest} ({one.clocks})"
        rows.append(
            [
                str(one.stage),
                f"{one.highest}{lowest}",
                significant(one.time_at_highest),
                significant(one.energy_at_highest),
                str(one.valley) + ("" if one.ends_below else " (lowest)"),
                signed_percent(100 * (one.time_at_valley / one.time_at_highest - 1)),
                f"{100 * (1 - one.energy_at_valley / one.energy_at_highest):.2f}",
            ]
        )
    modelled = "" if metadata.source == "measured" else " (modelled)"
    print_table(
        "Forward + backward of a microbatch on one GPU at the highest clock,\nand what the clock "
        f"of least energy, the valley, does to it{modelled}",
        _HEADERS,
        rows,
        words=2,
    )
    of = f" of {metadata.microbatch_size} samples" if metadata.microbatch_size else ""
    say(
        f"planned for, unless a command says otherwise: {metadata.num_microbatches} "
        f"microbatches{of}, schedule {metadata.schedule}"
    )
    for line in _notes(profile):
        say(line)


def _notes(profile: Profile) -> list[str]:
    """What a user should know about the rows."""
    extra = profile.metadata.extra
    notes = []
    if profile.metadata.source == "modelled":
        notes.append("nothing was measured: the sidecar, .meta.json, says what the model assumes")
    if count := extra.get("parameters"):
        # What data-parallel replicas could share of it is not taken off.
        held = count * _BYTES_PER_PARAMETER / profile.num_stages / 1e9
        gpus = profile.metadata.gpus_per_stage
        notes.append(
            f"{count / 1e9:.4g} billion parameters: weights, gradients and Adam's state take about "
            f"{held * (profile.metadata.job.chunks or 1) / gpus:.3g} GB a GPU unless replicas or "
            "experts are spread further; activations come on top, and memory is not checked"
        )
    if extra.get("energy_source") == "integrated power":
        notes.append("this GPU has no energy counter: energy is its power, sampled and summed up")
    if resets := extra.get("counter_resets"):
        notes.append(
            f"the energy counter was set back {resets} times; what it spoiled was measured again"
        )
    if untold := extra.get("throttle_untold"):
        notes.append(f"the driver does not tell why the clock is held back ({untold})")
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
        how = f": blocking power {kind}" if kind else " (modelled)"
        notes.append(f"a GPU that waits draws {watts:.0f} W on average over the clocks{how}")
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


def _document(profile: Profile) -> dict[str, Any]:
    from dataclasses import asdict

    from envplan.profiling.sweep import summarize_profile

    return {
        "profile": str(profile.path),
        "source": profile.metadata.source,
        "gpu": profile.metadata.gpu,
        "workload": profile.metadata.workload,
        "stages": [asdict(summary) for summary in summarize_profile(profile)],
        "notes": _notes(profile),
    }
