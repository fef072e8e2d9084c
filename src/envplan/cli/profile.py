"""`envplan profile`: what every stage costs at every clock, measured or modelled."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

import envplan
from envplan._io.words import counted
from envplan.cli import command as cmd
from envplan.cli import output as ui
from envplan.cli.options import DEFAULT_PROFILE
from envplan.errors import InputError, unknown
from envplan.quantities import PERCENT, TIME, WHOLE

if TYPE_CHECKING:
    from envplan.profiling.sweep import Workload
    from envplan.profiling.workloads import Model, TrainingJob

_DEFAULT_GPU: Final = "a40"
_MODEL_GPU: Final = "h100"
_MICROBATCH_SIZES: Final = {"gpt": 4, "bert": 8, "t5": 4, "wide-resnet": 32}
_SIZES: Final = "layers hidden_size heads vocabulary_size sequence_length width_factor image_size"
_MEASURING: Final = "device error time_limit no_lock"


def _known_schedule(name: str, option_name: str) -> str:
    from envplan.pipeline import SCHEDULES

    if name not in SCHEDULES:
        raise InputError(f"{option_name}: {unknown('schedule', name, SCHEDULES)}")
    return name


@cmd.options(
    """
    Most used:
      --workload NAME  gpt (the default), bert, t5 or wide-resnet.
      --model NAME|FILE  Instead, modelled: llama3-8b, llama3-70b, llama3-405b, qwen3-32b,
          mixtral-8x7b, deepseek-v3, gpt3-175b, or a config.json of Hugging Face.
      --entry MODULE:FUNCTION  Measure the stages that this function returns: pairs of a torch
          module and inputs.
      --pp, --stages N  Pipeline stages; default: 4.
      --backend NAME  nvml: measure on a GPU here (the default); zeusd: the same, with clocks set
          by the Zeus daemon; modelled: no GPU needed.
      --gpu NAME  The GPU to model: h100, h200, b200, a100, l40s, a40, v100 and more (envplan
          devices --backend modelled); default: a40, with --model h100.
      --step MHZ  Clocks at least this far apart; 0: all there are.
    Job:
      --vp, --chunks N  Model chunks of a stage; default: the schedule's, else 1.
      --layers-per-stage LIST  Layers of each stage or chunk, in the model's order, as in 6,7,7,4;
          default: the split of least imbalance.
      --microbatch-group N  Schedule interleaved: microbatches that go through a chunk before the
          next. Default: the number of stages.
      --p2p-latency TIME  How long a transfer between stages takes.
      --no-overlap-p2p  With --backend modelled: the GPU that sends does not compute meanwhile.
      --tp, --tensor-parallel N  GPUs of a stage; one is measured.
      --cp N  Context-parallel size: GPUs that share a sequence.
      --dp, --replicas N  Replicas of the pipeline.
      --microbatch-size N  Samples of a microbatch; default: by workload, 1 with --model.
      -m, --microbatches M  Microbatches of an iteration.
      --schedule NAME  The job's schedule.
      --dtype TYPE  bfloat16, float16 or float32.
      --recompute  A backward does its forward again.
      --split-backward  Gradients of inputs and weights apart; default: as the schedule has it.
      --parts  With --backend modelled: rows for each module of a layer.
    Measuring:
      --device N  Which GPU, by nvidia-smi; default: CUDA's first.
      --error PCT  Repeat until time and energy have this standard error; default: 1.
      --time-limit TIME  But at most so long for an operation; default: 20s.
      --no-lock  Touch no clock: measure at the current ones only.
    Sizes of the workload:
      --layers N  Layers; t5: of either part; wide-resnet: 50, 101, 152.
      --hidden-size N  Width of a transformer.
      --heads N  Attention heads.
      --vocabulary-size N  Words; 0: no embedding and head (gpt, bert).
      --sequence-length N  Tokens of a sample.
      --width-factor N  How much wider than ResNet's 3x3 convolutions.
      --image-size N  Pixels on a side of an image.
    """,
    **dict.fromkeys(_SIZES.split(), WHOLE),
    step=WHOLE,
    schedule=_known_schedule,
    dtype=cmd.one_of("bfloat16", "float16", "float32"),
    layers_per_stage=cmd.numbers("6,7,7,4"),
    device=WHOLE,
    error=PERCENT.within(1e-6),
    time_limit=TIME.within(1e-6),
)
class WorkOptions:
    """What is profiled and how, and the job it is part of; None where nothing was said."""

    workload: str | None = None
    model: str | None = None
    entry: str | None = None
    stages: int | None = None
    backend: str | None = None
    gpu: str | None = None
    step: int = 0
    vp: int | None = None
    layers_per_stage: cmd.Numbers | None = None
    microbatch_group: int | None = None
    p2p_latency: float = 0.0
    no_overlap_p2p: bool = False
    tp: int = 1
    cp: int = 1
    dp: int = 1
    microbatch_size: int | None = None
    microbatches: int = 32
    schedule: str = "1f1b"
    dtype: str = "bfloat16"
    recompute: bool = False
    split_backward: bool = False
    parts: bool = False
    device: int | None = None
    error: float | None = None
    time_limit: float | None = None
    no_lock: bool = False
    layers: int | None = None
    hidden_size: int | None = None
    heads: int | None = None
    vocabulary_size: int | None = None
    sequence_length: int | None = None
    width_factor: int | None = None
    image_size: int | None = None

    def __post_init__(self) -> None:
        """Raises: InputError: more than one option says what runs, or the stages differ."""
        cmd.refuse_both(cmd.given(self, "workload model entry"))
        listed = self.layers_per_stage
        if listed and len(listed) != self.num_stages * self.chunks:
            raise InputError(
                f"--layers-per-stage lists {len(listed)} stages, but --pp {self.num_stages} and "
                f"--vp {self.chunks} make {self.num_stages * self.chunks}"
            )

    @property
    def num_stages(self) -> int:
        """Pipeline stages."""
        listed = self.layers_per_stage
        return self.stages or (max(1, len(listed) // self.chunks) if listed else 4)

    @property
    def chunks(self) -> int:
        """Model chunks of each: as given, else as many as the schedule needs."""
        from envplan.pipeline import traits

        return self.vp or traits(self.schedule).chunks

    def job(self) -> TrainingJob:
        """What is trained and how. Raises: InputError: there is no model of that name or size."""
        from envplan.pipeline import traits
        from envplan.profiling.workloads import TrainingJob

        samples = 1 if self.model else _MICROBATCH_SIZES.get(self.workload or "gpt", 1)
        interleaved = self.schedule == "1f1b" and self.chunks > 1
        return TrainingJob(
            model=None if self.entry else self._model(),
            num_stages=self.num_stages,
            chunks=self.chunks,
            num_microbatches=self.microbatches,
            microbatch_size=None if self.entry else self.microbatch_size or samples,
            tensor_parallel=self.tp,
            context_parallel=self.cp,
            replicas=self.dp,
            dtype=self.dtype,
            recompute=self.recompute,
            split_backward=self.split_backward or traits(self.schedule).passes > 2,
            schedule="interleaved" if interleaved else self.schedule,
            microbatch_group=self.microbatch_group,
            p2p_latency=self.p2p_latency,
            overlap_p2p=not self.no_overlap_p2p,
            layers=self.layers_per_stage,
        )

    def _model(self) -> Model:
        from envplan.profiling.models import model_of, named_model

        sizes = {name: size for name in _SIZES.split() if (size := getattr(self, name)) is not None}
        if self.model is not None:
            return named_model(self.model, **sizes)
        return model_of(self.workload or "gpt", **sizes)


@cmd.takes(
    """
    Most used:
      --plot [FILE]  Draw energy against clock: .png, .svg or .pdf; without a name: profile.png.
    Output:
      -o, --output FILE  Where the profile goes: .csv.
    """,
)
def profile(
    work: WorkOptions,
    plot: Path | None = None,
    output: Path = Path(DEFAULT_PROFILE),
) -> None:
    """Find out what time and energy each stage takes at each clock.

    Clocks are swept from the highest down until energy only rises. Run the same command again to
    continue a sweep that was cut off.

    \b
    Example:
      envplan profile --backend modelled --gpu a40 --workload gpt --pp 4
      envplan profile --model llama3-70b --gpu h100 --pp 8 --tp 8
      envplan profile --model config.json --gpu b200 --pp 4
      envplan profile --workload gpt --layers 24 --hidden-size 2048 --step 30 --plot
      envplan profile --entry mymodel.stages:build --no-lock
    """
    from envplan.devices import DEFAULT_BACKEND, backend_class
    from envplan.plotting.profile import profile_figure
    from envplan.profiling.remarks import remarks, summarize_profile

    backend = work.backend or ("modelled" if work.model else DEFAULT_BACKEND)
    if backend_class(backend).real:
        why = f"goes with --backend modelled, not {backend}"
        cmd.refuse(cmd.given(work, "gpu"), why)
        cmd.refuse(cmd.given(work, "model"), f"{why}; measure your model's stages with --entry")
        made = _measure(backend, work, output)
    else:
        unfit = cmd.given(work, f"entry {_MEASURING}")
        cmd.refuse(unfit, f"goes with --backend {DEFAULT_BACKEND}, not {backend}")
        made = _model(work, output)
    ui.draw(plot, lambda: profile_figure(made))
    named = [] if output == Path(DEFAULT_PROFILE) else [str(output)]
    ui.answer(
        lambda: {
            "profile": str(made.path),
            "source": made.metadata.source,
            "gpu": made.metadata.gpu,
            "workload": made.metadata.workload,
            "stages": [asdict(summary) for summary in summarize_profile(made)],
            "notes": remarks(made),
        },
        lambda: _print(made),
        then=["envplan", "frontier", *named, "--plot"],
    )


def _model(work: WorkOptions, output: Path) -> envplan.Profile:
    from envplan.profiling.modelled import modelled_profile

    job = work.job()
    if output.exists():
        there = envplan.ProfileMetadata.read_json(output.with_suffix(".meta.json"))
        if there.source != "modelled":
            raise InputError(
                "exists and is not a modelled profile; choose another file with -o, or delete it",
                path=output,
            )
    gpu = work.gpu or (_MODEL_GPU if work.model else _DEFAULT_GPU)
    made = modelled_profile(job, gpu, name=output.stem, step=work.step, parts=work.parts)
    made.save_csv(output)
    return envplan.Profile.read_csv(output)


def _measure(backend: str, work: WorkOptions, output: Path) -> envplan.Profile:
    from envplan.profiling.measuring import measure
    from envplan.profiling.sweep import Settings

    why = "is not measured: measure stages with the part of the sequence that one GPU has"
    cmd.refuse(cmd.given(work, "cp"), why)
    cmd.refuse(
        cmd.given(work, "no_overlap_p2p parts"),
        "goes with --backend modelled; a job that profiles itself, with envplan.runtime's "
        "Profiler(parts=), measures its own waits and parts",
    )
    job = work.job()
    if job.split_backward and job.recompute:
        raise InputError(
            "--split-backward and --recompute are not measured together: torch would do the "
            "forward again for either part; measure without --recompute, and give --recompute to "
            "envplan frontier or solve instead"
        )
    settings = Settings(
        step=work.step,
        split_backward=job.split_backward,
        lock=not work.no_lock,
        target_error=(work.error or 1.0) / 100,
        time_limit=work.time_limit or Settings.time_limit,
    )
    with ui.Working("Measuring") as running:
        return measure(
            lambda device: _workload(work, job, device),
            output,
            settings,
            source=backend,
            device=work.device,
            metadata=_metadata(job),
            progress=running.at,
        )


def _metadata(job: TrainingJob) -> envplan.ProfileMetadata:
    """What the sidecar of measured rows shall say of the job."""
    from envplan.profile import INCLUDES_RECOMPUTATION

    shared = (
        f"one of {job.tensor_parallel} tensor-parallel GPUs was measured; what they send each "
        "other is in neither time nor energy"
    )
    return job.metadata(
        sequence_length=job.model and job.model.tokens,
        communication=shared if job.tensor_parallel > 1 else None,
        layers_per_stage=job.layers,
        **{INCLUDES_RECOMPUTATION: job.recompute},
    )


def _workload(work: WorkOptions, job: TrainingJob, device: str) -> Workload:
    if work.entry is not None:
        from envplan.profiling.entry import load_entry

        beside = "workload stages layers_per_stage microbatch_size recompute"
        why = "and --entry exclude each other; the function says it all"
        cmd.refuse(cmd.given(work, f"{beside} {_SIZES}"), why)
        return load_entry(work.entry, device)
    from envplan.profiling.torch_workloads import torch_workload

    return torch_workload(job, device)


def _print(profile: envplan.Profile) -> None:
    from envplan.profiling.remarks import remarks, summarize_profile

    metadata, stages = profile.metadata, summarize_profile(profile)
    ui.say(f"{profile.describe()}: {metadata.workload}")
    lowest = ["" if one.clocks == 1 else f"-{one.lowest} ({one.clocks})" for one in stages]
    columns = {
        "stage": [one.stage for one in stages],
        "clocks (MHz)": [f"{one.highest}{low}" for one, low in zip(stages, lowest, strict=True)],
        "time (s)": [ui.significant(one.time_at_highest) for one in stages],
        "energy (J)": [ui.significant(one.energy_at_highest) for one in stages],
        "valley (MHz)": [f"{one.valley}{'' if one.ends_below else ' (lowest)'}" for one in stages],
        "slower (%)": [100 * (one.time_at_valley / one.time_at_highest - 1) for one in stages],
        "saved (%)": [100 * (1 - one.energy_at_valley / one.energy_at_highest) for one in stages],
    }
    modelled = "" if metadata.source == "measured" else " (modelled)"
    ui.print_columns(
        "Forward + backward of a microbatch on one GPU at the highest clock,\nand what the clock "
        f"of least energy, the valley, does to it{modelled}",
        columns,
        words=2,
    )
    size = metadata.microbatch_size
    of = f" of {counted(size, 'sample')}" if size else ""
    ui.say(
        f"planned for, unless a command says otherwise: {metadata.num_microbatches} "
        f"microbatches{of}, schedule {metadata.schedule}",
        *remarks(profile),
    )
