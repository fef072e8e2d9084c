"""Profiles of a model of any size on a modelled GPU, for planning before one owns it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from envplan.devices import spaced_clocks
from envplan.devices.modelled import ModelledGpu, gpu
from envplan.errors import InputError
from envplan.profile import BLOCKING, INCLUDES_RECOMPUTATION, Profile
from envplan.profiling.resnet import ConvolutionalModel
from envplan.profiling.training_job import Model, TrainingJob
from envplan.profiling.transformer import TransformerModel
from envplan.profiling.work import ModuleWork, NamedModule, StageWork, Work

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
_COLUMNS: Final = ("stage", "instruction", "frequency", "time", "energy", "part")
_SEND_PART: Final = "send"
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
    device, model = gpu(gpu_name), job.known_model
    if step > device.clocks_mhz[0] - device.clocks_mhz[-1]:
        raise InputError(f"--step {step} is wider than the clocks of {gpu_name} are apart")
    precision = "single" if job.dtype == "float32" else "half"
    stages = job.stages(
        lambda work: device.time_s(work.flops, work.traffic, device.clocks_mhz[0], precision)
    )
    if parts and not isinstance(model, TransformerModel):
        raise InputError(f"the parts of {model.name} are not modelled; leave --parts out")
    lowest_mhz = _LOWEST_CLOCK_MHZ.get(device.key, _LOWEST_CLOCK_ELSEWHERE_MHZ)
    clocks_mhz = [mhz for mhz in spaced_clocks(device.clocks_mhz, step) if mhz >= lowest_mhz]
    assumptions = _assumptions(job, device, stages, precision)
    if parts:
        assumptions.append(_PARTS)
    assumptions.append(
        f"Clocks from {device.clocks_mhz[0]} down to {lowest_mhz} MHz, memory at "
        f"{device.memory_clock_mhz} MHz."
    )
    metadata = job.metadata(
        {
            "layers_per_stage": [stage.num_layers for stage in stages],
            "sequence_length": model.tokens,
            "parameters": _stated_parameters(model),
            INCLUDES_RECOMPUTATION: job.recompute,
            "assumptions": assumptions,
            "step_mhz": step,
        }
    )
    modelled = _ModelledJob(job, device, stages, clocks_mhz, precision)
    rows = modelled.rows_by_part() if parts else modelled.rows()
    return Profile.from_rows(
        (row.cells for row in rows),
        columns=_COLUMNS,
        name=name,
        metadata=replace(
            metadata,
            gpu=device.name,
            source="modelled",
            workload=f"{model.name} training, {job.num_stages} stages",
        ).made_today(),
    )


def _stated_parameters(model: Model) -> int | None:
    """Parameters of large language models; of the older benchmarks' models nothing is stated."""
    if isinstance(model, TransformerModel) and model.fused_attention:
        return model.parameters
    return None


class _Row(NamedTuple):
    """A row of a profile: an operation or a part of it at one clock.

    Attributes:
        part: its name; "" for a whole operation.
    """

    stage: int
    instruction: str
    frequency_mhz: int
    time_s: float
    energy_j: float
    part: str = ""

    @property
    def cells(self) -> tuple[object, ...]:
        """Its values in the order of _COLUMNS; a whole operation has no cell for its part."""
        return self if self.part else self[:-1]


@dataclass(frozen=True)
class _ModelledJob:
    """A job on a modelled GPU.

    Attributes:
        job: what is trained.
        device: the GPU.
        stages: work of each stage.
        clocks_mhz: the profile's clocks.
        precision: "half" or "single".
    """

    job: TrainingJob
    device: ModelledGpu
    stages: Sequence[StageWork]
    clocks_mhz: Sequence[int]
    precision: str

    @property
    def _instructions(self) -> tuple[str, ...]:
        if self.job.split_backward:
            return ("forward", "backward_input", "backward_weight")
        return ("forward", "backward")

    def rows(self) -> Iterator[_Row]:
        """Time and energy of every operation of each stage at each clock, and of waiting."""
        for stage, work in enumerate(self.stages):
            for instruction in self._instructions:
                sending_s = self._sending_s(stage, instruction)
                for row in self._module_rows(stage, instruction, NamedModule("", work.whole)):
                    sending_j = sending_s * self.device.blocking_power_w(row.frequency_mhz)
                    yield row._replace(
                        time_s=round(row.time_s + sending_s, 9),
                        energy_j=round(row.energy_j + sending_j, 6),
                    )
            yield from self._blocking_rows(stage)

    def rows_by_part(self) -> Iterator[_Row]:
        """The same of every module, in the order in which they run, and of sending.

        A backward runs the modules in reverse.
        """
        for stage, work in enumerate(self.stages):
            for instruction in self._instructions:
                modules = work.named_modules()
                for module in modules if instruction == "forward" else reversed(modules):
                    for row in self._module_rows(stage, instruction, module):
                        yield row._replace(
                            time_s=round(row.time_s, 9), energy_j=round(row.energy_j, 6)
                        )
                yield from self._sending_rows(stage, instruction)
            yield from self._blocking_rows(stage)

    def _module_rows(self, stage: int, instruction: str, module: NamedModule) -> Iterator[_Row]:
        """A module at each clock, not rounded; none if it has nothing to do."""
        work = _work_of(module.work, instruction)
        if not work.flops and not work.traffic:
            return
        activity = _FORWARD_ACTIVITY if instruction == "forward" else _BACKWARD_ACTIVITY
        for clock_mhz in self.clocks_mhz:
            time_s = self.device.time_s(work.flops, work.traffic, clock_mhz, self.precision)
            energy_j = time_s * self.device.power_w(clock_mhz, activity)
            yield _Row(stage, instruction, clock_mhz, time_s, energy_j, module.name)

    def _sending_rows(self, stage: int, instruction: str) -> Iterator[_Row]:
        sending_s = self._sending_s(stage, instruction)
        if not sending_s:
            return
        for clock_mhz in self.clocks_mhz:
            energy_j = round(sending_s * self.device.blocking_power_w(clock_mhz), 6)
            yield _Row(stage, instruction, clock_mhz, sending_s, energy_j, _SEND_PART)

    def _sending_s(self, stage: int, instruction: str) -> float:
        """How much longer an operation takes for the transfer of what it makes, s.

        Outputs go to the next stage, gradients of inputs to the one before.
        """
        last_stage = len(self.stages) - 1
        sends = {
            "forward": stage != last_stage,
            "backward": stage != 0,
            "backward_input": stage != 0,
            "backward_weight": False,
        }
        if self.job.overlap_p2p or not sends[instruction]:
            return 0.0
        return self.job.p2p_latency

    def _blocking_rows(self, stage: int) -> Iterator[_Row]:
        """A second of waiting at each clock."""
        for clock_mhz in self.clocks_mhz:
            energy_j = round(self.device.blocking_power_w(clock_mhz), 6)
            yield _Row(stage, BLOCKING, clock_mhz, 1.0, energy_j)


def _work_of(module: ModuleWork, instruction: str) -> Work:
    """The work of an instruction: ModuleWork has an attribute of the name of each."""
    work: Work = getattr(module, instruction)
    return work


def _assumptions(
    job: TrainingJob, device: ModelledGpu, stages: Sequence[StageWork], precision: str
) -> list[str]:
    """Sentences for the sidecar that say what the model assumes."""
    layers = [stage.num_layers for stage in stages]
    split = "the least imbalanced split" if job.layers is None else "as given"
    recompute = "with recomputation" if job.recompute else "no recomputation"
    sentences = [
        "Modelled, not measured: t = a + b / f, P = P_static + k f V(f)^2, held to "
        f"{device.power_limit_w:g} W; parameters and their sources are in "
        "envplan.devices.modelled, residuals against measured points in docs/profiles.md.",
        f"{job.known_model.describe()}; layers per stage {layers}, {split}.",
        f"{_PRECISION[precision]}, {recompute} of activations, {_kernels(job.known_model)}; "
        f"{device.compute_efficiency:.0%} of the peak reached in matrix products and "
        f"{device.memory_efficiency:.0%} of the bandwidth elsewhere.",
        _omissions(job),
    ]
    if not job.overlap_p2p:
        sentences.append(_SENDING.format(job.p2p_latency))
    if job.split_backward:
        sentences.append(_SPLIT)
    return sentences


def _kernels(model: Model) -> str:
    """Which operations are taken for fused."""
    if isinstance(model, ConvolutionalModel):
        return "normalization and activation not fused into convolutions"
    if model.fused_attention:
        return "fused attention, fused cross entropy"
    return "attention without kernel fusion, fused cross entropy"


def _omissions(job: TrainingJob) -> str:
    between_stages = "" if job.p2p_latency else "Transfers between stages, "
    within_stages = ""
    if job.gpus_per_stage > 1:
        within_stages = "transfers between the GPUs of a stage, "
    return (
        f"Whether the memory of the GPU holds it is not checked. {between_stages}{within_stages}"
        "the optimizer step and gradient all-reduce are left out."
    )
