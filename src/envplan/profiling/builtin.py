"""Regenerates the built-in profiles: python -m envplan.profiling.builtin OUTDIR [DOCUMENT].

All of them are modelled, and their sidecars say so. The same code gives the same bytes. With
DOCUMENT (docs/profiles.md) the list of profiles in it is written anew, too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from envplan.devices.modelled import ModelledGpu, gpu
from envplan.errors import EnvplanError
from envplan.profile import BLOCKING, INCLUDES_RECOMPUTATION, Profile, ProfileMetadata
from envplan.profiling import models
from envplan.profiling.document import markdown_table, update_block
from envplan.profiling.workloads import (
    ConvolutionalModel,
    Model,
    StageWork,
    TransformerModel,
    Work,
    stage_works,
)

__all__ = ["BUILTINS", "Builtin", "Published", "build", "listing", "main"]

_DATE: Final = "2026-11-21"
_VERSION: Final = "0.1.0"

#: Clocks below these are left out: every valley lies above.
_LOWEST_CLOCK_MHZ: Final = {"v100": 450}
_LOWEST_CLOCK_ELSEWHERE_MHZ: Final = 600

#: Average over an operation of its activity, 1 being what settles the clock under the power limit.
#: The backward's lies between that of the A40 stages in the Perseus artifact (0.966) and that of
#: the Zeus documentation's A40 profile (283.6 W under a limit of 300 W: 0.92).
_ACTIVITY: Final = {
    "forward": 1.0,
    "backward": 0.94,
    "backward_input": 0.94,
    "backward_weight": 0.94,
}

Row = tuple[int, str, int, float, float]


@dataclass(frozen=True)
class Published:
    """What others report of a workload: to stand beside ours, never to tune to.

    Attributes:
        savings_percent: energy saved against all GPUs at maximum frequency.
        slowdown_percent: at which slowdown; None where the source gives none.
        source: where it is published.
        note: what the figure means.
    """

    savings_percent: float
    slowdown_percent: float | None
    source: str
    note: str


def _perseus(savings_percent: float, note: str = "") -> Published:
    return Published(
        savings_percent,
        None,
        "Perseus (SOSP 2024), talk",
        "Potential saving over all GPUs at maximum frequency, intrinsic and extrinsic bloat "
        f"together; no slowdown is stated.{note}",
    )


_ENVPIPE_SINGLE: Final = Published(
    25.2,
    1.0,
    "EnvPipe (USENIX ATC 2023), 4 V100",
    "An upper figure: up to 25.2% over its single-node workloads, at a slowdown under 1%; what "
    "it saves on this one alone is not given here.",
)
_ENVPIPE_MULTI: Final = Published(
    28.4,
    1.0,
    "EnvPipe (USENIX ATC 2023), 16 V100",
    "An upper figure: up to 28.4% over its multi-node runs, at a slowdown under 1%; what it "
    "saves with this number of stages alone is not given here.",
)


@dataclass(frozen=True, kw_only=True)
class Builtin:
    """What a built-in profile is of.

    Attributes:
        name: the profile's name.
        gpu: short name of the modelled GPU.
        model: what is trained.
        num_stages: pipeline stages.
        num_microbatches: default for planning.
        microbatch_size: samples per microbatch.
        tensor_parallel: GPUs that share a stage.
        recompute: whether backwards recompute their forward.
        precision: "half" (mixed) or "single".
        split_backward: whether gradients of inputs and of weights are operations of their own.
        published: what others report of this workload.
    """

    name: str
    gpu: str
    model: Model
    num_stages: int
    num_microbatches: int
    microbatch_size: int = 4
    tensor_parallel: int = 1
    recompute: bool = False
    precision: str = "half"
    split_backward: bool = False
    published: Published | None = None


def _builtins() -> Iterator[Builtin]:
    """All of them; microbatches as the benchmarks of EnvPipe and Perseus set them."""
    # Contents of these four are kept as they were first published.
    for num_stages, num_microbatches in ((4, 32), (8, 64)):
        for short, device in (("a40", "a40"), ("a100", "a100-pcie-80gb")):
            perseus = short == "a100" and num_stages == 4
            yield Builtin(
                name=f"{short}-gpt3-1.3b-{num_stages}stage",
                gpu=device,
                model=models.GPT3_1_3B,
                num_stages=num_stages,
                num_microbatches=num_microbatches,
                published=_perseus(15.5, " Perseus runs 128 microbatches of 8 samples.")
                if perseus
                else None,
            )
    # Perseus artifact, workloads/dp1+pp4+tp1/models_A100.csv and dp1+pp8+tp1/models_A40.csv.
    for name, model, size, count, savings in (
        ("bloom-3b", models.BLOOM_3B, 4, 128, 15.6),
        ("bert-1.3b", models.BERT_1_3B, 8, 32, 16.9),
        ("t5-3b", models.T5_3B, 4, 32, 18.0),
        ("wide-resnet101-8", models.WIDE_RESNET_101_8, 64, 24, 12.7),
    ):
        yield Builtin(
            name=f"a100-{name}-4stage",
            gpu="a100-pcie-80gb",
            model=model,
            num_stages=4,
            num_microbatches=count,
            microbatch_size=size,
            published=_perseus(savings),
        )
    for name, model, size, count, savings in (
        ("gpt3-2.7b", models.GPT3_2_7B, 4, 256, 26.0),
        ("bloom-3b", models.BLOOM_3B, 4, 128, 26.4),
        ("bert-1.3b", models.BERT_1_3B, 8, 32, 24.1),
        ("t5-3b", models.T5_3B, 4, 32, 28.5),
        ("wide-resnet101-8", models.WIDE_RESNET_101_8, 32, 48, 26.3),
    ):
        yield Builtin(
            name=f"a40-{name}-8stage",
            gpu="a40",
            model=model,
            num_stages=8,
            num_microbatches=count,
            microbatch_size=size,
            published=_perseus(savings),
        )
    # EnvPipe's benchmark scripts: minibatch over microbatch size, and over replicas in the last.
    for name, model, size, minibatch, precision in (
        ("bert-336m", models.BERT_336M, 4, 64, "single"),
        ("gpt-125m", models.GPT_125M, 2, 32, "single"),
        ("megatron-125m", models.MEGATRON_125M, 4, 64, "half"),
        ("resnet-152", models.RESNET_152, 2, 32, "single"),
    ):
        yield Builtin(
            name=f"v100-{name}-4stage",
            gpu="v100",
            model=model,
            num_stages=4,
            num_microbatches=minibatch // size,
            microbatch_size=size,
            recompute=True,
            precision=precision,
            published=_ENVPIPE_SINGLE,
        )
    for num_stages in (8, 4, 2):
        yield Builtin(
            name=f"v100-megatron-1.3b-{num_stages}stage",
            gpu="v100",
            model=models.MEGATRON_1_3B,
            num_stages=num_stages,
            num_microbatches=512 // (2 * 16 // num_stages),
            microbatch_size=2,
            recompute=True,
            published=_ENVPIPE_MULTI,
        )
    # 1,536 samples over 16 pipelines, as Perseus emulates 1,024 GPUs.
    yield Builtin(
        name="h100-gpt3-175b-8stage",
        gpu="h100-sxm",
        model=models.GPT3_175B,
        num_stages=8,
        num_microbatches=96,
        microbatch_size=1,
        tensor_parallel=8,
    )


BUILTINS: Final = tuple(sorted(_builtins(), key=lambda builtin: builtin.name))


def build(builtin: Builtin) -> Profile:
    """The profile of a built-in, from the model of its GPU."""
    device = gpu(builtin.gpu)
    stages = _stages(builtin, device)
    return Profile.from_rows(
        _rows(builtin, device, stages),
        name=builtin.name,
        metadata=_metadata(builtin, device, stages),
    )


def _stages(builtin: Builtin, device: ModelledGpu) -> list[StageWork]:
    def cost(work: Work) -> float:
        return device.time_s(work.flops, work.traffic, device.clocks_mhz[0], builtin.precision)

    return stage_works(
        builtin.model,
        num_stages=builtin.num_stages,
        microbatch_size=builtin.microbatch_size,
        tensor_parallel=builtin.tensor_parallel,
        recompute=builtin.recompute,
        precision=builtin.precision,
        cost=cost,
    )


def _rows(builtin: Builtin, device: ModelledGpu, stages: list[StageWork]) -> Iterator[Row]:
    lowest = _lowest_clock_mhz(device)
    clocks = [clock for clock in device.clocks_mhz if clock >= lowest]
    for number, stage in enumerate(stages):
        for instruction, work in _operations(stage, builtin.split_backward):
            for clock in clocks:
                time_s = device.time_s(work.flops, work.traffic, clock, builtin.precision)
                energy_j = time_s * device.power_w(clock, _ACTIVITY[instruction])
                yield number, instruction, clock, round(time_s, 9), round(energy_j, 6)
        for clock in clocks:
            yield number, BLOCKING, clock, 1.0, round(device.blocking_power_w(clock), 6)


def _operations(stage: StageWork, split_backward: bool) -> list[tuple[str, Work]]:
    if not split_backward:
        return [("forward", stage.forward), ("backward", stage.backward)]
    return [
        ("forward", stage.forward),
        ("backward_input", stage.backward_input),
        ("backward_weight", stage.backward_weight),
    ]


def _lowest_clock_mhz(device: ModelledGpu) -> int:
    return _LOWEST_CLOCK_MHZ.get(device.key, _LOWEST_CLOCK_ELSEWHERE_MHZ)


def _metadata(builtin: Builtin, device: ModelledGpu, stages: list[StageWork]) -> ProfileMetadata:
    layers = [stage.num_layers for stage in stages]
    extra: dict[str, Any] = {"layers_per_stage": layers}
    if isinstance(builtin.model, TransformerModel):
        extra["sequence_length"] = builtin.model.sequence_length
    if builtin.published:
        extra["published"] = vars(builtin.published)
    if builtin.recompute:
        extra[INCLUDES_RECOMPUTATION] = True
    extra["assumptions"] = _assumptions(builtin, device, layers)
    return ProfileMetadata(
        gpu=device.name,
        source="modelled",
        workload=f"{builtin.model.name} training, {builtin.num_stages} stages",
        microbatch_size=builtin.microbatch_size,
        tensor_parallel=builtin.tensor_parallel,
        date=_DATE,
        envplan_version=_VERSION,
        schedule="1f1b",
        num_microbatches=builtin.num_microbatches,
        extra=extra,
    )


def _assumptions(builtin: Builtin, device: ModelledGpu, layers: list[int]) -> list[str]:
    recompute = "with recomputation" if builtin.recompute else "no recomputation"
    return [
        "Modelled, not measured: t = a + b / f, P = P_static + k f V(f)^2, held to "
        f"{device.power_limit_w:g} W; parameters and their sources are in "
        "envplan.devices.modelled, residuals against measured points in docs/profiles.md.",
        f"{builtin.model.describe()}; layers per stage {layers}, the least imbalanced split.",
        f"{_PRECISION[builtin.precision]}, {recompute} of activations, "
        f"{_kernels(builtin.model)}; {device.compute_efficiency:.0%} of the peak reached in matrix "
        f"products and {device.memory_efficiency:.0%} of the bandwidth elsewhere.",
        "Whether the memory of the GPU holds it is not checked. Transfers between stages"
        f"{' and between the GPUs of a stage' if builtin.tensor_parallel > 1 else ''}, the "
        "optimizer step and gradient all-reduce are left out.",
        *([_SPLIT] if builtin.split_backward else []),
        f"Clocks from {device.clocks_mhz[0]} down to {_lowest_clock_mhz(device)} MHz, memory at "
        f"{device.memory_clock_mhz} MHz.",
    ]


_SPLIT: Final = (
    "The backward is split: every product with weights costs the same FLOPs for gradients of its "
    "inputs as for those of its weights; attention's core, which has no weights, and all traffic "
    "but the sums of gradients belong to backward_input."
)
_PRECISION: Final = {"half": "Mixed precision", "single": "Single precision without tensor cores"}


def _kernels(model: Model) -> str:
    if isinstance(model, ConvolutionalModel):
        return "normalization and activation not fused into convolutions"
    if isinstance(model, TransformerModel) and model.fused_attention:
        return "fused attention, fused cross entropy"
    return "attention without kernel fusion, fused cross entropy"


def listing(profiles: list[Profile]) -> str:
    """The table of built-in profiles in docs/profiles.md, from what their sidecars say."""
    rows = []
    for profile in profiles:
        metadata, extra = profile.metadata, profile.metadata.extra
        published = extra.get("published")
        figure = f"{published['savings_percent']:g}" if published else "-"
        slowdown = published and published["slowdown_percent"]
        rows.append(
            (
                f"`{profile.name}`",
                str(metadata.gpu),
                str(metadata.workload).partition(" training")[0],
                f"{metadata.num_microbatches} x {metadata.microbatch_size}",
                "-".join(map(str, extra["layers_per_stage"])),
                f"up to {figure} at <{slowdown:g}" if slowdown else figure,
            )
        )
    headers = ("profile", "GPU", "model", "microbatches x samples", "layers", "published, %")
    return markdown_table(headers, rows)


def main(arguments: list[str]) -> int:
    """Write every built-in profile and its sidecar into the folder given; returns an exit code."""
    if len(arguments) not in (1, 2):
        print("usage: python -m envplan.profiling.builtin OUTDIR [DOCUMENT]", file=sys.stderr)
        return 2
    folder = Path(arguments[0])
    profiles = [build(builtin) for builtin in BUILTINS]
    try:
        for profile in profiles:
            profile.save_csv(folder / f"{profile.name}.csv")
        for document in arguments[1:]:
            update_block(Path(document), "list", listing(profiles))
    except EnvplanError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
