"""Regenerates the built-in profiles: python -m envplan.profiling.builtin OUTDIR.

All of them are modelled, and their sidecars say so. The same code gives the same bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from envplan.devices.modelled import ModelledGpu, gpu
from envplan.errors import EnvplanError
from envplan.profile import BLOCKING, Profile, ProfileMetadata
from envplan.profiling.workloads import GPT3_1_3B, StageWork, TransformerModel, Work, stage_works

__all__ = ["BUILTINS", "Builtin", "build", "main"]

_DATE: Final = "2026-11-21"
_VERSION: Final = "0.1.0"

#: Clocks below this are left out: every valley lies well above it.
_LOWEST_CLOCK_MHZ: Final = 600

#: Average over an operation of its activity, 1 being what settles the clock under the power limit.
#: The backward's lies between that of the A40 stages in the Perseus artifact (0.966) and that of
#: the Zeus documentation's A40 profile (283.6 W under a limit of 300 W: 0.92).
_ACTIVITY: Final = {"forward": 1.0, "backward": 0.94}

Row = tuple[int, str, int, float, float]


@dataclass(frozen=True)
class Builtin:
    """What a built-in profile is of.

    Attributes:
        name: the profile's name.
        gpu: short name of the modelled GPU.
        model: what is trained.
        num_stages: pipeline stages.
        num_microbatches: default for planning.
        microbatch_size: samples per microbatch.
    """

    name: str
    gpu: str
    model: TransformerModel
    num_stages: int
    num_microbatches: int
    microbatch_size: int = 4


BUILTINS: Final = (
    Builtin("a40-gpt3-1.3b-4stage", "a40", GPT3_1_3B, 4, 32),
    Builtin("a40-gpt3-1.3b-8stage", "a40", GPT3_1_3B, 8, 64),
    Builtin("a100-gpt3-1.3b-4stage", "a100-pcie-80gb", GPT3_1_3B, 4, 32),
    Builtin("a100-gpt3-1.3b-8stage", "a100-pcie-80gb", GPT3_1_3B, 8, 64),
)


def build(builtin: Builtin) -> Profile:
    """The profile of a built-in, from the model of its GPU."""
    device = gpu(builtin.gpu)
    stages = stage_works(
        builtin.model,
        num_stages=builtin.num_stages,
        microbatch_size=builtin.microbatch_size,
        cost=lambda work: device.time_s(work.flops, work.traffic, device.clocks_mhz[0]),
    )
    return Profile.from_rows(
        _rows(device, stages), name=builtin.name, metadata=_metadata(builtin, device, stages)
    )


def _rows(device: ModelledGpu, stages: list[StageWork]) -> Iterator[Row]:
    clocks = [clock for clock in device.clocks_mhz if clock >= _LOWEST_CLOCK_MHZ]
    for number, stage in enumerate(stages):
        for clock in clocks:
            yield _operation(device, number, "forward", stage.forward, clock)
        for clock in clocks:
            yield _operation(device, number, "backward", stage.backward, clock)
        for clock in clocks:
            yield number, BLOCKING, clock, 1.0, round(device.blocking_power_w(clock), 6)


def _operation(
    device: ModelledGpu, stage: int, instruction: str, work: Work, clock_mhz: int
) -> Row:
    time_s = device.time_s(work.flops, work.traffic, clock_mhz)
    energy_j = time_s * device.power_w(clock_mhz, _ACTIVITY[instruction])
    return stage, instruction, clock_mhz, round(time_s, 9), round(energy_j, 6)


def _metadata(builtin: Builtin, device: ModelledGpu, stages: list[StageWork]) -> ProfileMetadata:
    model = builtin.model
    layers = [stage.num_layers for stage in stages]
    return ProfileMetadata(
        gpu=device.name,
        source="modelled",
        workload=f"{model.name} training, {builtin.num_stages} stages",
        microbatch_size=builtin.microbatch_size,
        tensor_parallel=1,
        date=_DATE,
        envplan_version=_VERSION,
        schedule="1f1b",
        num_microbatches=builtin.num_microbatches,
        extra={
            "layers_per_stage": layers,
            "assumptions": [
                "Modelled, not measured: t = a + b / f, P = P_static + k f V(f)^2, held to "
                f"{device.power_limit_w:g} W; parameters and their sources are in "
                "envplan.devices.modelled.",
                f"{model.num_layers} layers of {model.hidden_size} units and {model.num_heads} "
                f"heads, {model.sequence_length} tokens, {model.vocabulary_size} words; layers per "
                f"stage {layers}, embedding on the first stage, final norm and vocabulary head on "
                "the last.",
                "Mixed precision, no activation recomputation, attention without kernel fusion, "
                "fused cross entropy.",
                "Transfers between stages, the optimizer step and gradient all-reduce are left "
                "out.",
                f"Clocks from {device.clocks_mhz[0]} down to {_LOWEST_CLOCK_MHZ} MHz, memory at "
                f"{device.memory_clock_mhz} MHz.",
            ],
        },
    )


def main(arguments: list[str]) -> int:
    """Write every built-in profile and its sidecar into the folder given; returns an exit code."""
    if len(arguments) != 1:
        print("usage: python -m envplan.profiling.builtin OUTDIR", file=sys.stderr)
        return 2
    folder = Path(arguments[0])
    try:
        for builtin in BUILTINS:
            build(builtin).save_csv(folder / f"{builtin.name}.csv")
    except EnvplanError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
