"""Profiles of a workload of any size on a modelled GPU, for planning before one owns it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from envplan.devices import spaced_clocks
from envplan.devices.modelled import ModelledGpu, gpu
from envplan.errors import InputError
from envplan.profile import BLOCKING, INCLUDES_RECOMPUTATION, Profile
from envplan.profiling.workloads import (
    ConvolutionalModel,
    StageWork,
    TrainingJob,
    TransformerModel,
    Work,
)

__all__ = ["modelled_profile"]

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


def modelled_profile(
    job: TrainingJob, gpu_name: str, *, name: str, step: int = 0, parts: bool = False
) -> Profile:
    """The profile of a job on a modelled GPU, made today.

    Args:
        job: what is trained.
        gpu_name: short name of the GPU, such as "a40".
        name: of the profile.
        step: MHz between clocks at least; 0 takes all.
        parts: modules have rows of their own; of transformers.

    Raises:
        InputError: there is no such GPU, or the model cannot be split so.
    """
    device, model = gpu(gpu_name), job.model
    assert model is not None
    if step > device.clocks_mhz[0] - device.clocks_mhz[-1]:
        raise InputError(f"--step {step} is wider than the clocks of {gpu_name} are apart")
    precision = "single" if job.dtype == "float32" else "half"
    stages = job.stages(
        lambda work: device.time_s(work.flops, work.traffic, device.clocks_mhz[0], precision)
    )
    lowest = _LOWEST_CLOCK_MHZ.get(device.key, _LOWEST_CLOCK_ELSEWHERE_MHZ)
    clocks = [clock for clock in spaced_clocks(device.clocks_mhz, step) if clock >= lowest]
    parameters = None
    if isinstance(model, TransformerModel):
        parameters = model.parameters if model.fused_attention else None
    elif parts:
        raise InputError(f"the parts of {model.name} are not modelled; leave --parts out")
    layers = [stage.num_layers for stage in stages]
    metadata = job.metadata(
        layers_per_stage=layers,
        sequence_length=model.tokens,
        parameters=parameters,
        **{INCLUDES_RECOMPUTATION: job.recompute},
        assumptions=[
            *_assumptions(job, device, layers, precision),
            *([_PARTS] if parts else []),
            f"Clocks from {device.clocks_mhz[0]} down to {lowest} MHz, memory at "
            f"{device.memory_clock_mhz} MHz.",
        ],
        step_mhz=step,
    )
    columns = ["stage", "instruction", "frequency", "time", "energy"]
    return Profile.from_rows(
        _rows(job, device, stages, clocks, precision, parts),
        columns=[*columns, "part"] if parts else columns,
        name=name,
        metadata=replace(
            metadata,
            gpu=device.name,
            source="modelled",
            workload=f"{model.name} training, {job.num_stages} stages",
        ).made_today(),
    )


def _rows(
    job: TrainingJob,
    device: ModelledGpu,
    stages: Sequence[StageWork],
    clocks: Sequence[int],
    precision: str,
    by_parts: bool,
) -> Iterator[tuple[Any, ...]]:
    for number, stage in enumerate(stages):
        backwards = ("backward_input", "backward_weight") if job.split_backward else ("backward",)
        for instruction in ("forward", *backwards):
            activity = _FORWARD_ACTIVITY if instruction == "forward" else _BACKWARD_ACTIVITY
            parts = stage.named_modules() if by_parts else [("", stage.whole)]
            # Outputs go to the next stage, gradients of inputs to the one before.
            end = {"forward": len(stages) - 1, "backward_weight": number}.get(instruction, 0)
            sending = 0.0 if job.overlap_p2p or number == end else job.p2p_latency
            for part, share in parts if instruction == "forward" else reversed(parts):
                work: Work = getattr(share, instruction)
                if not work.flops and not work.traffic:
                    continue
                for clock in clocks:
                    time_s = device.time_s(work.flops, work.traffic, clock, precision)
                    energy_j = time_s * device.power_w(clock, activity)
                    if not part:
                        time_s += sending
                        energy_j += sending * device.blocking_power_w(clock)
                    row = number, instruction, clock, round(time_s, 9), round(energy_j, 6)
                    yield (*row, part) if part else row
            for clock in clocks if by_parts and sending else ():
                energy_j = sending * device.blocking_power_w(clock)
                yield number, instruction, clock, sending, round(energy_j, 6), "send"
        for clock in clocks:
            yield number, BLOCKING, clock, 1.0, round(device.blocking_power_w(clock), 6)


def _assumptions(
    job: TrainingJob, device: ModelledGpu, layers: list[int], precision: str
) -> list[str]:
    model = job.model
    assert model is not None
    shared = job.tensor_parallel * job.context_parallel
    recompute = "with recomputation" if job.recompute else "no recomputation"
    split = "the least imbalanced split" if job.layers is None else "as given"
    kernels = "attention without kernel fusion, fused cross entropy"
    if isinstance(model, ConvolutionalModel):
        kernels = "normalization and activation not fused into convolutions"
    elif model.fused_attention:
        kernels = "fused attention, fused cross entropy"
    return [
        "Modelled, not measured: t = a + b / f, P = P_static + k f V(f)^2, held to "
        f"{device.power_limit_w:g} W; parameters and their sources are in "
        "envplan.devices.modelled, residuals against measured points in docs/profiles.md.",
        f"{model.describe()}; layers per stage {layers}, {split}.",
        f"{_PRECISION[precision]}, {recompute} of activations, {kernels}; "
        f"{device.compute_efficiency:.0%} of the peak reached in matrix products and "
        f"{device.memory_efficiency:.0%} of the bandwidth elsewhere.",
        "Whether the memory of the GPU holds it is not checked. "
        f"{'' if job.p2p_latency else 'Transfers between stages, '}"
        f"{'transfers between the GPUs of a stage, ' if shared > 1 else ''}the "
        "optimizer step and gradient all-reduce are left out.",
        *([] if job.overlap_p2p else [_SENDING.format(job.p2p_latency)]),
        *([_SPLIT] if job.split_backward else []),
    ]
