"""`envplan profile`: what every stage costs at every clock, measured or modelled."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

import envplan
from envplan._io.words import counted, significant
from envplan.cli import output as ui
from envplan.cli.given import options_given, refuse, refuse_both
from envplan.cli.job_options import DEFAULT_PROFILE
from envplan.cli.progress import progress
from envplan.cli.shared import JOB, MOST_USED, OUTPUT
from envplan.cli.tables import change_column, percent_column, text_column, value_column
from envplan.cli.types import (
    OPTIONAL_FILE,
    InputFile,
    Numbers,
    OutputFile,
    completing,
    either,
    numbers,
    one_of,
    quantity,
    registered,
)
from envplan.devices import DEFAULT_BACKEND, backend_class
from envplan.errors import InputError
from envplan.pipeline import SCHEDULES, traits
from envplan.profiling.models import PRESETS, WORKLOADS, model_of, named_model
from envplan.profiling.training_job import Model, TrainingJob
from envplan.quantities import COUNT, PERCENT, TIME, WHOLE

if TYPE_CHECKING:
    from envplan.profiling.remarks import StageSummary
    from envplan.profiling.stages import RunnableStages
    from envplan.profiling.sweep import Settings

_MEASURING: Final = "Measuring"
_SIZES: Final = "Sizes of the workload"

_DEFAULT_WORKLOAD: Final = "gpt"
_DEFAULT_STAGES: Final = 4
_DEFAULT_GPU: Final = "a40"
#: The GPU that `--model` is modelled on.
_MODEL_GPU: Final = "h100"
_DEFAULT_ERROR_PERCENT: Final = 1.0
_DTYPES: Final = ("bfloat16", "float16", "float32")
#: Samples of a microbatch by workload; of a model by name it is one.
_MICROBATCH_SIZES: Final = {"gpt": 4, "bert": 8, "t5": 4, "wide-resnet": 32}


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions:
    """The kind of thing that runs: a workload where none is given."""

    workload: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"{either(WORKLOADS)}; default: {_DEFAULT_WORKLOAD}.",
            rich_help_panel=MOST_USED,
        ),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help=f"Instead, modelled: {', '.join(PRESETS)}, or a config.json of Hugging Face.",
            rich_help_panel=MOST_USED,
        ),
        InputFile(),
    ] = None
    as_type: Annotated[
        str | None,
        typer.Option(
            "--as",
            metavar="TYPE",
            help="Read the config.json as if its model_type were TYPE, as in --as llama.",
            rich_help_panel=JOB,
        ),
    ] = None
    entry: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="Measure the stages that this function returns: pairs of a torch module and "
            "inputs.",
            rich_help_panel=MOST_USED,
        ),
    ] = None

    def __post_init__(self) -> None:
        """Raises: InputError: more than one option says what runs."""
        refuse_both(options_given(self, "workload", "model", "entry"))
        if self.as_type is not None and self.model is None:
            raise InputError("--as goes with --model")


def _size(meaning: str) -> Any:
    """An option for one of a workload's sizes."""
    return typer.Option(metavar="N", parser=quantity(WHOLE), help=meaning, rich_help_panel=_SIZES)


@dataclass(frozen=True, kw_only=True)
class SizeOptions:
    """Sizes of the workload that are not its own ones."""

    layers: Annotated[
        int | None, _size("Layers; t5: of either part; wide-resnet: 50, 101, 152.")
    ] = None
    hidden_size: Annotated[
        int | None,
        _size("Width of a transformer."),
    ] = None
    heads: Annotated[
        int | None,
        _size("Attention heads."),
    ] = None
    vocabulary_size: Annotated[
        int | None, _size("Words; 0: no embedding and head (gpt, bert).")
    ] = None
    sequence_length: Annotated[
        int | None,
        _size("Tokens of a sample."),
    ] = None
    width_factor: Annotated[int | None, _size("How much wider than ResNet's 3x3 convolutions.")] = (
        None
    )
    image_size: Annotated[
        int | None,
        _size("Pixels on a side of an image."),
    ] = None

    def chosen(self) -> dict[str, int]:
        """The sizes that are given, by their names."""
        return {name: size for name, size in asdict(self).items() if size is not None}


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """The job that the workload is part of; None where nothing is said."""

    stages: Annotated[
        int | None,
        typer.Option(
            "--pp",
            "--stages",
            metavar="N",
            parser=quantity(COUNT),
            help=f"Pipeline stages; default: {_DEFAULT_STAGES}.",
            rich_help_panel=MOST_USED,
        ),
    ] = None
    vp: Annotated[
        int | None,
        typer.Option(
            "--vp",
            "--chunks",
            metavar="N",
            parser=quantity(COUNT),
            help="Model chunks of a stage; default: the schedule's, else 1.",
            rich_help_panel=JOB,
        ),
    ] = None
    layers_per_stage: Annotated[
        Numbers | None,
        typer.Option(
            metavar="LIST",
            parser=numbers("6,7,7,4"),
            help="Layers of each stage or chunk, in the model's order, as in 6,7,7,4; default: "
            "the split of least imbalance.",
            rich_help_panel=JOB,
        ),
    ] = None
    microbatch_group: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            parser=quantity(COUNT),
            help="Schedule interleaved: microbatches that go through a chunk before the next. "
            "Default: the number of stages.",
            rich_help_panel=JOB,
        ),
    ] = None
    p2p_latency: Annotated[
        float,
        typer.Option(
            metavar="TIME",
            parser=quantity(TIME),
            help="How long a transfer between stages takes.",
            rich_help_panel=JOB,
        ),
    ] = 0.0
    no_overlap_p2p: Annotated[
        bool,
        typer.Option(
            "--no-overlap-p2p",
            help="With --backend modelled: the GPU that sends does not compute meanwhile.",
            rich_help_panel=JOB,
        ),
    ] = False
    tp: Annotated[
        int,
        typer.Option(
            "--tp",
            "--tensor-parallel",
            metavar="N",
            parser=quantity(COUNT),
            help="GPUs of a stage; one is measured.",
            rich_help_panel=JOB,
        ),
    ] = 1
    cp: Annotated[
        int,
        typer.Option(
            metavar="N",
            parser=quantity(COUNT),
            help="Context-parallel size: GPUs that share a sequence.",
            rich_help_panel=JOB,
        ),
    ] = 1
    dp: Annotated[
        int,
        typer.Option(
            "--dp",
            "--replicas",
            metavar="N",
            parser=quantity(COUNT),
            help="Replicas of the pipeline.",
            rich_help_panel=JOB,
        ),
    ] = 1
    microbatch_size: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            parser=quantity(COUNT),
            help="Samples of a microbatch; default: by workload, 1 with --model.",
            rich_help_panel=JOB,
        ),
    ] = None
    microbatches: Annotated[
        int,
        typer.Option(
            "-m",
            "--microbatches",
            metavar="M",
            parser=quantity(COUNT),
            help="Microbatches of an iteration.",
            rich_help_panel=JOB,
        ),
    ] = 32
    schedule: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            parser=registered("schedule", SCHEDULES),
            autocompletion=completing(SCHEDULES),
            help="The job's schedule.",
            rich_help_panel=JOB,
        ),
    ] = "1f1b"
    dtype: Annotated[
        str,
        typer.Option(
            metavar="TYPE",
            parser=one_of(*_DTYPES),
            help=f"{either(_DTYPES)}.",
            rich_help_panel=JOB,
        ),
    ] = "bfloat16"
    recompute: Annotated[
        bool,
        typer.Option(
            "--recompute",
            help="A backward does its forward again.",
            rich_help_panel=JOB,
        ),
    ] = False
    split_backward: Annotated[
        bool,
        typer.Option(
            "--split-backward",
            help="Gradients of inputs and weights apart; default: as the schedule has it.",
            rich_help_panel=JOB,
        ),
    ] = False
    parts: Annotated[
        bool,
        typer.Option(
            "--parts",
            help="With --backend modelled: rows for each module of a layer.",
            rich_help_panel=JOB,
        ),
    ] = False

    def __post_init__(self) -> None:
        """Raises: InputError: the layers listed are those of another number of stages."""
        listed = self.layers_per_stage
        if listed and len(listed) != self.num_stages * self.chunks:
            raise InputError(
                f"--layers-per-stage lists {len(listed)} stages, but --pp {self.num_stages} and "
                f"--vp {self.chunks} make {self.num_stages * self.chunks}"
            )

    @property
    def num_stages(self) -> int:
        """Pipeline stages: as given, else as many as layers are listed for."""
        if self.stages:
            return self.stages
        if self.layers_per_stage:
            return max(1, len(self.layers_per_stage) // self.chunks)
        return _DEFAULT_STAGES

    @property
    def chunks(self) -> int:
        """Model chunks of each stage: as given, else as many as the schedule needs."""
        return self.vp or traits(self.schedule).chunks


@dataclass(frozen=True, kw_only=True)
class GpuOptions:
    """Measuring or modelling, and at which clocks."""

    backend: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="nvml: measure on a GPU here (the default); zeusd: the same, with clocks set by "
            "the Zeus daemon; amdsmi: AMD GPUs, untried on hardware; modelled: no GPU needed.",
            rich_help_panel=MOST_USED,
        ),
    ] = None
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=(
                f"The GPU to model, such as {_DEFAULT_GPU} or {_MODEL_GPU} (envplan devices "
                f"--backend modelled lists them); default: {_DEFAULT_GPU}, with --model "
                f"{_MODEL_GPU}."
            ),
            rich_help_panel=MOST_USED,
        ),
    ] = None
    step: Annotated[
        int,
        typer.Option(
            metavar="MHZ",
            parser=quantity(WHOLE),
            help="Clocks at least this far apart; 0: all there are.",
            rich_help_panel=MOST_USED,
        ),
    ] = 0


@dataclass(frozen=True, kw_only=True)
class MeasuringOptions:
    """How to measure."""

    device: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            parser=quantity(WHOLE),
            help="Which GPU, by nvidia-smi; default: CUDA's first.",
            rich_help_panel=_MEASURING,
        ),
    ] = None
    error: Annotated[
        float | None,
        typer.Option(
            metavar="PCT",
            parser=quantity(PERCENT.within(1e-6)),
            help="Repeat until time and energy have this standard error; default: "
            f"{_DEFAULT_ERROR_PERCENT:g}.",
            rich_help_panel=_MEASURING,
        ),
    ] = None
    time_limit: Annotated[
        float | None,
        typer.Option(
            metavar="TIME",
            parser=quantity(TIME.within(1e-6)),
            help="But at most so long for an operation; default: 20s.",
            rich_help_panel=_MEASURING,
        ),
    ] = None
    no_lock: Annotated[
        bool,
        typer.Option(
            "--no-lock",
            help="Touch no clock: measure at the current ones only.",
            rich_help_panel=_MEASURING,
        ),
    ] = False
    share: Annotated[
        bool,
        typer.Option(
            "--share",
            help="Set clocks though other users or containers compute on the GPU.",
            rich_help_panel=_MEASURING,
        ),
    ] = False

    def settings(self, step: int, *, split_backward: bool) -> Settings:
        """The options as the library takes them.

        Args:
            step: MHz between clocks at least.
            split_backward: measure the two parts of a backward apart.
        """
        from envplan.profiling.sweep import Settings

        return Settings(
            step=step,
            split_backward=split_backward,
            lock=not self.no_lock,
            target_error=(self.error or _DEFAULT_ERROR_PERCENT) / 100,
            time_limit=self.time_limit or Settings.time_limit,
        )


def profile(
    workload: WorkloadOptions,
    pipeline: PipelineOptions,
    gpu: GpuOptions,
    measuring: MeasuringOptions,
    sizes: SizeOptions,
    *,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar=OPTIONAL_FILE,
            parser=OutputFile(".png", ".svg", ".pdf", bare="profile.png"),
            help="Draw energy against clock: .png, .svg or .pdf; without a name: profile.png.",
            rich_help_panel=MOST_USED,
        ),
    ] = None,
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            parser=OutputFile(".csv"),
            help="Where the profile goes: .csv.",
            rich_help_panel=OUTPUT,
        ),
    ] = Path(DEFAULT_PROFILE),
) -> None:
    """Find out what time and energy each stage takes at each clock.

    Clocks are swept from the highest down until energy only rises. Run the same command again to
    continue a sweep that was cut off.

    \b
    Example:
      envplan profile --backend modelled --gpu a40 --workload gpt --pp 4
      envplan profile --model llama3-70b --gpu h100 --pp 8 --tp 8
      envplan profile --model config.json --gpu b200 --pp 4
      envplan profile --workload gpt --layers 24 --hidden-size 2048 --step 30
      envplan profile --entry mymodel.stages:build --no-lock
    """
    from envplan.plotting.profile import profile_figure
    from envplan.profiling.remarks import remarks, summarize_profile

    backend = gpu.backend or ("modelled" if workload.model else DEFAULT_BACKEND)
    if backend_class(backend).real:
        _refuse_what_only_models_have(backend, workload, pipeline, gpu)
        job = _training_job(workload, pipeline, sizes)
        _refuse_what_cannot_be_measured(job, workload, pipeline, sizes)
        new_profile = _measure(backend, job, workload.entry, gpu.step, measuring, output)
    else:
        measured_only = options_given(workload, "entry") + options_given(measuring)
        refuse(measured_only, f"goes with --backend {DEFAULT_BACKEND}, not {backend}")
        job = _training_job(workload, pipeline, sizes)
        key = gpu.gpu or (_MODEL_GPU if workload.model else _DEFAULT_GPU)
        new_profile = _model(job, key, gpu.step, output, parts=pipeline.parts)
    ui.draw(plot, lambda: profile_figure(new_profile))
    named = [] if output == Path(DEFAULT_PROFILE) else [str(output)]
    ui.answer(
        lambda: {
            "profile": str(new_profile.path),
            "source": new_profile.metadata.source,
            "gpu": new_profile.metadata.gpu,
            "workload": new_profile.metadata.workload,
            "stages": [asdict(summary) for summary in summarize_profile(new_profile)],
            "notes": [*_memory_warning(new_profile, job), *remarks(new_profile)],
        },
        lambda: _print(new_profile, job),
        next_command=["envplan", "frontier", *named, "--plot"],
    )


def _training_job(
    workload: WorkloadOptions, pipeline: PipelineOptions, sizes: SizeOptions
) -> TrainingJob:
    """The model that is trained, and how.

    Raises:
        InputError: there is no model of that name or size.
    """
    model, microbatch_size = None, None
    if workload.entry is None:
        model = _model_of(workload, sizes)
        microbatch_size = pipeline.microbatch_size or _usual_microbatch_size(workload)
    interleaved = pipeline.schedule == "1f1b" and pipeline.chunks > 1
    return TrainingJob(
        model=model,
        num_stages=pipeline.num_stages,
        chunks=pipeline.chunks,
        num_microbatches=pipeline.microbatches,
        microbatch_size=microbatch_size,
        tensor_parallel=pipeline.tp,
        context_parallel=pipeline.cp,
        replicas=pipeline.dp,
        dtype=pipeline.dtype,
        recompute=pipeline.recompute,
        split_backward=pipeline.split_backward or traits(pipeline.schedule).passes > 2,
        schedule="interleaved" if interleaved else pipeline.schedule,
        microbatch_group=pipeline.microbatch_group,
        p2p_latency=pipeline.p2p_latency,
        overlap_p2p=not pipeline.no_overlap_p2p,
        layers=pipeline.layers_per_stage,
    )


def _model_of(workload: WorkloadOptions, sizes: SizeOptions) -> Model:
    if workload.model is not None:
        return named_model(workload.model, workload.as_type, **sizes.chosen())
    return model_of(workload.workload or _DEFAULT_WORKLOAD, **sizes.chosen())


def _usual_microbatch_size(workload: WorkloadOptions) -> int:
    if workload.model is not None:
        return 1
    return _MICROBATCH_SIZES.get(workload.workload or _DEFAULT_WORKLOAD, 1)


def _model(
    job: TrainingJob, gpu: str, step_mhz: int, output: Path, *, parts: bool
) -> envplan.Profile:
    """The modelled profile, written.

    Args:
        gpu: name of the modelled GPU.
        step_mhz: between clocks at least.
        parts: whether modules of a layer have rows of their own.

    Raises:
        InputError: there is no such GPU, or the output holds something else.
    """
    from envplan.profiling.modelled import modelled_profile

    if output.exists():
        metadata = envplan.ProfileMetadata.read_json(output.with_suffix(".meta.json"))
        if metadata.source != "modelled":
            raise InputError(
                "exists and is not a modelled profile; choose another file with -o, or delete it",
                path=output,
            )
    new_profile = modelled_profile(job, gpu, name=output.stem, step=step_mhz, parts=parts)
    new_profile.save_csv(output)
    return envplan.Profile.read_csv(output)


def _refuse_what_only_models_have(
    backend: str, workload: WorkloadOptions, pipeline: PipelineOptions, gpu: GpuOptions
) -> None:
    """Raises: InputError: an option says what can only be modelled."""
    why = f"goes with --backend modelled, not {backend}"
    refuse(options_given(gpu, "gpu"), why)
    refuse(options_given(workload, "model"), f"{why}; measure your model's stages with --entry")
    refuse(
        options_given(pipeline, "cp"),
        "is not measured: measure stages with the part of the sequence that one GPU has",
    )
    refuse(
        options_given(pipeline, "no_overlap_p2p", "parts"),
        "goes with --backend modelled; a job that profiles itself, with envplan.runtime's "
        "Profiler(parts=), measures its own waits and parts",
    )


def _refuse_what_cannot_be_measured(
    job: TrainingJob, workload: WorkloadOptions, pipeline: PipelineOptions, sizes: SizeOptions
) -> None:
    """Raises: InputError: options that go with no measurement are given together."""
    if job.split_backward and job.recompute:
        raise InputError(
            "--split-backward and --recompute are not measured together: torch would do the "
            "forward again for either part; measure without --recompute, and give --recompute to "
            "envplan frontier or solve instead"
        )
    if workload.entry is not None:
        shape = ("stages", "layers_per_stage", "microbatch_size", "recompute")
        refuse(
            options_given(pipeline, *shape) + options_given(sizes),
            "and --entry exclude each other; the function says it all",
        )


def _measure(
    backend: str,
    job: TrainingJob,
    entry: str | None,
    step_mhz: int,
    measuring: MeasuringOptions,
    output: Path,
) -> envplan.Profile:
    """The measured profile, which is written row by row.

    Args:
        entry: MODULE:FUNCTION that returns the stages; None: torch modules of the job's model.
        step_mhz: between clocks at least.
    """
    from envplan.profiling.measuring import measure

    def build_stages(device: str) -> RunnableStages:
        if entry is not None:
            from envplan.profiling.entry import load_entry

            return load_entry(entry, device)
        from envplan.profiling.torch_stages import torch_stages

        return torch_stages(job, device)

    with progress("Measuring") as running:
        return measure(
            build_stages,
            output,
            measuring.settings(step_mhz, split_backward=job.split_backward),
            source=backend,
            device=measuring.device,
            share=measuring.share,
            metadata=_metadata(job),
            progress=running.reach,
        )


def _metadata(job: TrainingJob) -> envplan.ProfileMetadata:
    """The job as the sidecar of measured rows shall state it."""
    from envplan.profile import INCLUDES_RECOMPUTATION

    shared = (
        f"one of {job.tensor_parallel} tensor-parallel GPUs was measured; what they send each "
        "other is in neither time nor energy"
    )
    return job.metadata(
        {
            "sequence_length": None if job.model is None else job.model.tokens,
            "communication": shared if job.tensor_parallel > 1 else None,
            "layers_per_stage": job.layers,
            INCLUDES_RECOMPUTATION: job.recompute,
        }
    )


def _print(profile: envplan.Profile, job: TrainingJob) -> None:
    from envplan.profiling.remarks import remarks, summarize_profile

    metadata = profile.metadata
    stages = summarize_profile(profile)
    slower_percents = []
    saved_percents = []
    for stage in stages:
        slower_percents.append(100 * (stage.time_at_valley / stage.time_at_highest - 1))
        saved_percents.append(100 * (1 - stage.energy_at_valley / stage.energy_at_highest))
    ui.say(*_memory_warning(profile, job))
    ui.say(f"{profile.describe()}: {metadata.workload}")
    columns = [
        text_column("stage", [stage.stage for stage in stages]),
        text_column("clocks (MHz)", map(_clocks, stages)),
        value_column("time (s)", [significant(stage.time_at_highest) for stage in stages]),
        value_column("energy (J)", [significant(stage.energy_at_highest) for stage in stages]),
        value_column("best (MHz)", map(_valley, stages)),
        change_column("slower (%)", slower_percents),
        percent_column("saved (%)", saved_percents),
    ]
    modelled = "" if metadata.source == "measured" else " (modelled)"
    ui.show_table(
        "Forward + backward of a microbatch on one GPU at the highest clock, and what the clock "
        f"of least energy (the valley of its curve) does to it{modelled}",
        columns,
    )
    microbatches = f"{metadata.num_microbatches} microbatches"
    if metadata.microbatch_size:
        microbatches += f" of {counted(metadata.microbatch_size, 'sample')}"
    ui.say(
        f"planned for, unless a command says otherwise: {microbatches}, "
        f"schedule {metadata.schedule}",
        *remarks(profile),
    )


def _memory_warning(profile: envplan.Profile, job: TrainingJob) -> list[str]:
    """That the job does not fit into its GPUs' memory, if it does not."""
    from envplan.profiling.memory_fit import memory_shortage

    shortage = memory_shortage(profile, job)
    return [] if shortage is None else [f"warning: {shortage}"]


def _clocks(stage: StageSummary) -> str:
    """Clocks in words, as in `1740-210 (18)`."""
    if stage.clocks == 1:
        return str(stage.highest)
    return f"{stage.highest}-{stage.lowest} ({stage.clocks})"


def _valley(stage: StageSummary) -> str:
    """The clock of least energy, and whether a lower one might have less."""
    return str(stage.valley) if stage.ends_below else f"{stage.valley} (lowest)"
