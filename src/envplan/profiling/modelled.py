"""Profiles of a workload of any size on a modelled GPU, for planning before one owns it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from envplan._files import exists
from envplan.devices.modelled import ModelledGpu, gpu
from envplan.errors import InputError, meant, shown, unknown
from envplan.profile import BLOCKING, INCLUDES_RECOMPUTATION, Profile, ProfileMetadata
from envplan.profile.sidecar import Job
from envplan.profiling import models
from envplan.profiling.huggingface import read_model
from envplan.profiling.sizes import Sizes
from envplan.profiling.workloads import (
    ConvolutionalModel,
    Model,
    StageWork,
    TransformerModel,
    Work,
    stage_works,
)

__all__ = [
    "WORKLOADS",
    "ModelledJob",
    "Sizes",
    "model_of",
    "modelled_profile",
    "named_model",
    "spaced_clocks",
]

#: The workloads that sizes may be given for, and what each is without any.
WORKLOADS: Final[dict[str, Model]] = {
    "gpt": models.GPT3_1_3B,
    "bert": models.BERT_1_3B,
    "t5": models.T5_3B,
    "wide-resnet": models.WIDE_RESNET_101_8,
}

#: Bottleneck blocks of the four groups, by the number of layers that ResNets are named after.
_BLOCKS: Final = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}

#: Fields of a model that are not called as the size is that sets them.
_FIELDS: Final = {"layers": "num_layers", "heads": "num_heads"}
#: Sizes that a model by name may be given.
_OF_MODELS: Final = ("layers", "sequence_length", "vocabulary_size")
_MOST_LAYERS: Final = 1000
_LARGEST: Final = 10_000_000
_SMALLEST_IMAGE: Final = 32

#: Clocks below these are left out: every valley lies above.
_LOWEST_CLOCK_MHZ: Final = {"v100": 450}
_LOWEST_CLOCK_ELSEWHERE_MHZ: Final = 600

#: Average over an operation of its activity, 1 being what settles the clock under the power limit.
#: The backward's lies between that of the A40 stages in the Perseus artifact (0.966) and that of
#: the Zeus documentation's A40 profile (283.6 W under a limit of 300 W: 0.92).
_FORWARD_ACTIVITY: Final = 1.0
_BACKWARD_ACTIVITY: Final = 0.94

_PRECISION: Final = {"half": "Mixed precision", "single": "Single precision without tensor cores"}
_SPLIT: Final = (
    "The backward is split: every product with weights costs the same FLOPs for gradients of its "
    "inputs as for those of its weights; attention's core, which has no weights, and all traffic "
    "but the sums of gradients belong to backward_input."
)
_SENDING: Final = (
    "Transfers do not overlap computing: an operation takes {:g} s longer for the one after it, at "
    "the power of waiting; whether the other side is there to receive is not modelled."
)
_PARTS: Final = (
    "Parts by roofline: each module's own arithmetic and traffic, at the power that the whole "
    "operation has at a clock, whatever bounds the part."
)


@dataclass(frozen=True, kw_only=True)
class ModelledJob:
    """What a modelled profile is of.

    Attributes:
        name: the profile's name.
        gpu: short name of the modelled GPU.
        model: what is trained.
        num_stages: pipeline stages.
        chunks: model chunks of each; the profile has a stage for each.
        num_microbatches: default for planning.
        microbatch_size: samples per microbatch.
        tensor_parallel, context_parallel: GPUs that share a stage's layers, and its sequences.
        replicas: of the pipeline.
        recompute: whether backwards recompute their forward.
        precision: "half" (mixed) or "single".
        split_backward: whether gradients of inputs and of weights are operations of their own.
        schedule: that the job runs.
        parts: whether modules have rows of their own; of transformers.
        microbatch_group: of an interleaved schedule; see Pipeline.
        p2p_latency: what a transfer between stages takes, s.
        overlap_p2p: whether the GPU that sends computes meanwhile; otherwise operations take as
            much longer, at the power of waiting, and wait for no transfer.
        layers: of each stage or chunk, in the model's order; None: the split of least imbalance.
    """

    name: str
    gpu: str
    model: Model
    num_stages: int
    num_microbatches: int
    microbatch_size: int = 4
    tensor_parallel: int = 1
    context_parallel: int = 1
    chunks: int = 1
    replicas: int = 1
    recompute: bool = False
    precision: str = "half"
    split_backward: bool = False
    schedule: str = "1f1b"
    parts: bool = False
    microbatch_group: int | None = None
    p2p_latency: float = 0.0
    overlap_p2p: bool = True
    layers: Sequence[int] | None = None


def model_of(workload: str, sizes: Sizes) -> Model:
    """The model of a workload with some of its sizes changed.

    Raises:
        InputError: there is no such workload, or it has no such size.
    """
    usual = WORKLOADS.get(workload)
    if usual is None:
        raise InputError(unknown("workload", workload, WORKLOADS))
    if not (given := sizes.given()):
        return usual
    resnet = isinstance(usual, ConvolutionalModel)
    known = {"blocks" if resnet else "num_layers", *(field.name for field in fields(usual))}
    changed: dict[str, Any] = {}
    for size, value in given.items():
        option = "--" + size.replace("_", "-")
        name = "blocks" if resnet and size == "layers" else _FIELDS.get(size, size)
        if name not in known:
            raise InputError(f"{option} does not go with workload {workload}")
        least = {"vocabulary_size": 0, "image_size": _SMALLEST_IMAGE}.get(size, 1)
        most = _MOST_LAYERS if size == "layers" else _LARGEST
        if not least <= value <= most:
            raise InputError(f"{option} must be {least} to {most}, not {shown(value)}")
        changed[name] = value
    if isinstance(usual, ConvolutionalModel):
        layers = changed.get("blocks", 101)
        if layers not in _BLOCKS:
            raise InputError(
                f"--layers of workload wide-resnet must be 50, 101 or 152, not {layers}"
            )
        name = f"Wide-ResNet-{layers}-{changed.get('width_factor', usual.width_factor)}"
        return replace(usual, **changed | {"blocks": _BLOCKS[layers], "name": name})
    layers = changed.get("num_layers", usual.num_layers)
    width = changed.get("hidden_size", usual.hidden_size)
    if usual.encoder_layers:
        changed["encoder_layers"] = layers
    if usual.feed_forward_size:
        changed["feed_forward_size"] = usual.feed_forward_size * width // usual.hidden_size
    if not usual.head_size:
        heads = changed.setdefault(
            "num_heads", max(1, width * usual.num_heads // usual.hidden_size)
        )
        if width % heads:
            raise InputError(
                f"--hidden-size {width} does not divide into {heads} heads; set --heads"
            )
    twice = "2 x " if usual.encoder_layers else ""
    return replace(usual, **changed, name=f"{workload.upper()} of {twice}{layers} layers x {width}")


def named_model(name: str, sizes: Sizes) -> TransformerModel:
    """A preset, or the model that a Hugging Face config.json describes.

    Args:
        name: in models.PRESETS, or a path.
        sizes: layers, sequence_length and vocabulary_size may be others.

    Raises:
        InputError: there is neither, the file is wrong, or another size is given.
    """
    known = models.PRESETS.get(name)
    if known is None:
        path = Path(name)
        if not exists(path):
            raise InputError(
                f"no such config.json, and no model of that name{meant(name, models.PRESETS)}",
                path=name,
            )
        known = read_model(path)
    given: dict[str, Any] = sizes.given()
    for size in given.keys() - set(_OF_MODELS):
        raise InputError(f"--{size.replace('_', '-')} does not go with --model, which says it")
    return replace(known, **{_FIELDS.get(size, size): value for size, value in given.items()})


def spaced_clocks(clocks: tuple[int, ...], step: int) -> list[int]:
    """Clocks from the highest down, neighbours at least `step` apart.

    Args:
        clocks: supported SM clocks, MHz, in any order.
        step: MHz; 0 takes all of them.
    """
    taken: list[int] = []
    for clock in sorted(clocks, reverse=True):
        if not taken or taken[-1] - clock >= step:
            taken.append(clock)
    return taken


def modelled_profile(job: ModelledJob, *, step: int = 0) -> Profile:
    """The profile of a job on a modelled GPU, made today.

    Args:
        job: what is trained, on what.
        step: MHz between clocks at least; 0 takes all.

    Raises:
        InputError: there is no such GPU, or the model cannot be split so.
    """
    device = gpu(job.gpu)
    if step > device.clocks_mhz[0] - device.clocks_mhz[-1]:
        raise InputError(f"--step {step} is wider than the clocks of {job.gpu} are apart")
    stages = stage_works(
        job.model,
        num_stages=job.num_stages * job.chunks,
        microbatch_size=job.microbatch_size,
        tensor_parallel=job.tensor_parallel,
        context_parallel=job.context_parallel,
        recompute=job.recompute,
        precision=job.precision,
        layers=job.layers,
        cost=lambda work: device.time_s(
            work.flops, work.traffic, device.clocks_mhz[0], job.precision
        ),
    )
    lowest = _LOWEST_CLOCK_MHZ.get(device.key, _LOWEST_CLOCK_ELSEWHERE_MHZ)
    clocks = [clock for clock in spaced_clocks(device.clocks_mhz, step) if clock >= lowest]
    layers = [stage.num_layers for stage in stages]
    extra: dict[str, Any] = {"layers_per_stage": layers}
    if job.model.tokens:
        extra["sequence_length"] = job.model.tokens
    if isinstance(job.model, TransformerModel) and (
        job.model in models.PRESETS.values() or job.model.gated
    ):
        extra["parameters"] = job.model.parameters
    if job.recompute:
        extra[INCLUDES_RECOMPUTATION] = True
    extra["assumptions"] = _assumptions(job, device, layers, lowest)
    if step:
        extra["step_mhz"] = step
    columns = ["stage", "instruction", "frequency", "time", "energy"]
    if job.parts and not all(stage.parts for stage in stages):
        raise InputError(f"the parts of {job.model.name} are not modelled; leave --parts out")
    return Profile.from_rows(
        _rows(job, device, stages, clocks),
        columns=[*columns, "part"] if job.parts else columns,
        name=job.name,
        metadata=ProfileMetadata(
            gpu=device.name,
            source="modelled",
            workload=f"{job.model.name} training, {job.num_stages} stages",
            microbatch_size=job.microbatch_size,
            tensor_parallel=job.tensor_parallel,
            date=date.today().isoformat(),
            envplan_version=version("envplan"),
            schedule=job.schedule,
            num_microbatches=job.num_microbatches,
            job=Job(
                stages=job.num_stages if job.chunks > 1 else None,
                chunks=job.chunks if job.chunks > 1 else None,
                microbatch_group=job.microbatch_group,
                p2p_latency_s=job.p2p_latency if job.overlap_p2p else 0.0,
                gpus_per_stage=job.tensor_parallel * job.context_parallel
                if job.context_parallel > 1
                else None,
                replicas=job.replicas,
            ),
            extra=extra,
        ),
    )


def _rows(
    job: ModelledJob, device: ModelledGpu, stages: Sequence[StageWork], clocks: Sequence[int]
) -> Iterator[tuple[Any, ...]]:
    for number, stage in enumerate(stages):
        backwards = ("backward_input", "backward_weight") if job.split_backward else ("backward",)
        for instruction in ("forward", *backwards):
            activity = _FORWARD_ACTIVITY if instruction == "forward" else _BACKWARD_ACTIVITY
            parts = stage.named_parts() if job.parts else [("", stage)]
            # Outputs go to the next stage, gradients of inputs to the one before.
            end = {"forward": len(stages) - 1, "backward_weight": number}.get(instruction, 0)
            sending = 0.0 if job.overlap_p2p or number == end else job.p2p_latency
            for part, share in parts if instruction == "forward" else reversed(parts):
                work: Work = getattr(share, instruction)
                if not work.flops and not work.traffic:
                    continue
                for clock in clocks:
                    time_s = device.time_s(work.flops, work.traffic, clock, job.precision)
                    energy_j = time_s * device.power_w(clock, activity)
                    if not part:
                        time_s += sending
                        energy_j += sending * device.blocking_power_w(clock)
                    row = number, instruction, clock, round(time_s, 9), round(energy_j, 6)
                    yield (*row, part) if part else row
            for clock in clocks if job.parts and sending else ():
                energy_j = sending * device.blocking_power_w(clock)
                yield number, instruction, clock, sending, round(energy_j, 6), "send"
        for clock in clocks:
            yield number, BLOCKING, clock, 1.0, round(device.blocking_power_w(clock), 6)


def _assumptions(
    job: ModelledJob, device: ModelledGpu, layers: list[int], lowest: int
) -> list[str]:
    shared = job.tensor_parallel * job.context_parallel
    recompute = "with recomputation" if job.recompute else "no recomputation"
    split = "the least imbalanced split" if job.layers is None else "as given"
    kernels = "attention without kernel fusion, fused cross entropy"
    if isinstance(job.model, ConvolutionalModel):
        kernels = "normalization and activation not fused into convolutions"
    elif job.model.fused_attention:
        kernels = "fused attention, fused cross entropy"
    return [
        "Modelled, not measured: t = a + b / f, P = P_static + k f V(f)^2, held to "
        f"{device.power_limit_w:g} W; parameters and their sources are in "
        "envplan.devices.modelled, residuals against measured points in docs/profiles.md.",
        f"{job.model.describe()}; layers per stage {layers}, {split}.",
        f"{_PRECISION[job.precision]}, {recompute} of activations, {kernels}; "
        f"{device.compute_efficiency:.0%} of the peak reached in matrix products and "
        f"{device.memory_efficiency:.0%} of the bandwidth elsewhere.",
        "Whether the memory of the GPU holds it is not checked. "
        f"{'' if job.p2p_latency else 'Transfers between stages, '}"
        f"{'transfers between the GPUs of a stage, ' if shared > 1 else ''}the "
        "optimizer step and gradient all-reduce are left out.",
        *([] if job.overlap_p2p else [_SENDING.format(job.p2p_latency)]),
        *([_SPLIT] if job.split_backward else []),
        *([_PARTS] if job.parts else []),
        f"Clocks from {device.clocks_mhz[0]} down to {lowest} MHz, memory at "
        f"{device.memory_clock_mhz} MHz.",
    ]
