"""Profiles of a model of any size on a modelled GPU, for planning before one owns it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from envplan.devices import spaced_clocks
from envplan.devices.modelled import ModelledGpu, gpu
from envplan.errors import InputError
from envplan.profile import BLOCKING, INCLUDES_RECOMPUTATION, Profile
from envplan.profile.sidecar import FOOTPRINT, MODEL_ERROR
from envplan.profiling.language_model import LanguageModel
from envplan.profiling.operation_model import OperationModel, operation_model
from envplan.profiling.resnet import ConvolutionalModel
from envplan.profiling.training_job import BYTES_PER_PARAMETER, Model, TrainingJob
from envplan.profiling.transformer import TransformerModel
from envplan.profiling.work import ModuleWork, NamedModule, StageWork, Work

__all__ = ["modelled_profile"]

#: Clocks below these are left out: every valley lies above.
_LOWEST_CLOCK_MHZ: Final = {"v100": 450}
_LOWEST_CLOCK_ELSEWHERE_MHZ: Final = 600

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
_COLUMNS: Final = (
    *("stage", "instruction", "frequency", "time", "energy", "time_std", "energy_std", "part"),
)
_COLUMNS_WITHOUT_ERRORS: Final = ("stage", "instruction", "frequency", "time", "energy", "part")
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
    has_kernels = not isinstance(model, ConvolutionalModel)
    operations = operation_model(device, precision, has_kernels=has_kernels)
    stages = job.stages(operations.time_at_highest_s)
    if parts and not isinstance(model, TransformerModel):
        raise InputError(f"the parts of {model.name} are not modelled; leave --parts out")
    lowest_mhz = _LOWEST_CLOCK_MHZ.get(device.key, _LOWEST_CLOCK_ELSEWHERE_MHZ)
    clocks_mhz = [mhz for mhz in spaced_clocks(device.clocks_mhz, step) if mhz >= lowest_mhz]
    assumptions = _assumptions(job, operations, stages, precision)
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
            FOOTPRINT: _footprint(job, stages),
            MODEL_ERROR: operations.error_between_clocks,
        }
    )
    modelled = _ModelledJob(job, operations, stages, clocks_mhz)
    rows = modelled.rows_by_part() if parts else modelled.rows()
    has_errors = operations.error_between_clocks is not None
    return Profile.from_rows(
        (row.cells(with_errors=has_errors) for row in rows),
        columns=_COLUMNS if has_errors else _COLUMNS_WITHOUT_ERRORS,
        name=name,
        metadata=replace(
            metadata,
            gpu=device.name,
            source="modelled",
            workload=f"{model.name} training, {job.num_stages} stages",
        ).made_today(),
    )


def _footprint(job: TrainingJob, stages: Sequence[StageWork]) -> dict[str, list[int]] | None:
    """What each stage takes of a GPU's memory; None for the older benchmarks' models."""
    if _stated_parameters(job.known_model) is None:
        return None
    model_bytes, activation_bytes = [], []
    for stage in stages:
        model_bytes.append(round(BYTES_PER_PARAMETER * stage.whole.num_weights))
        activation_bytes.append(round(job.saved_bytes(stage)))
    return {"model_bytes": model_bytes, "activation_bytes": activation_bytes}


def _stated_parameters(model: Model) -> int | None:
    """Parameters of large language models; of the older benchmarks' models nothing is stated."""
    if isinstance(model, LanguageModel):
        return model.parameters
    if isinstance(model, TransformerModel) and model.fused_attention:
        return model.parameters
    return None


class _Row(NamedTuple):
    """A row of a profile: an operation or a part of it at one clock.

    Attributes:
        time_error_s: standard deviation by the model's error; None: not known.
        energy_error_j: the same of energy.
        part: its name; "" for a whole operation.
    """

    stage: int
    instruction: str
    frequency_mhz: int
    time_s: float
    energy_j: float
    time_error_s: float | None = None
    energy_error_j: float | None = None
    part: str = ""

    def cells(self, *, with_errors: bool) -> tuple[object, ...]:
        """Its values in the order of the columns; those that it lacks at the end are left out."""
        costs: tuple[float, ...] = (self.time_s, self.energy_j)
        if with_errors and (self.part or self.time_error_s is not None):
            costs += (self.time_error_s or 0.0, self.energy_error_j or 0.0)
        part = (self.part,) if self.part else ()
        return (self.stage, self.instruction, self.frequency_mhz, *costs, *part)

    def with_sending(self, time_s: float, energy_j: float) -> _Row:
        """The row of an operation that goes on to send what it made, rounded."""
        return self._replace(
            time_s=round(self.time_s + time_s, 9),
            energy_j=round(self.energy_j + energy_j, 6),
            time_error_s=_rounded(self.time_error_s, 9),
            energy_error_j=_rounded(self.energy_error_j, 6),
        )


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


@dataclass(frozen=True)
class _ModelledJob:
    """A job on a modelled GPU.

    Attributes:
        job: what is trained.
        operations: what they cost on the GPU.
        stages: work of each stage.
        clocks_mhz: the profile's clocks.
    """

    job: TrainingJob
    operations: OperationModel
    stages: Sequence[StageWork]
    clocks_mhz: Sequence[int]

    @property
    def device(self) -> ModelledGpu:
        """The GPU."""
        return self.operations.gpu

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
                    yield row.with_sending(sending_s, sending_j)
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
                        yield row.with_sending(0.0, 0.0)
                yield from self._sending_rows(stage, instruction)
            yield from self._blocking_rows(stage)

    def _module_rows(self, stage: int, instruction: str, module: NamedModule) -> Iterator[_Row]:
        """A module at each clock, not rounded; none if it has nothing to do."""
        work = _work_of(module.work, instruction)
        if not work.flops and not work.traffic:
            return
        is_forward = instruction == "forward"
        costs = self.operations.costs(work, self.clocks_mhz, is_forward=is_forward)
        for clock_mhz, cost in zip(self.clocks_mhz, costs, strict=True):
            yield _Row(stage, instruction, clock_mhz, *cost, module.name)

    def _sending_rows(self, stage: int, instruction: str) -> Iterator[_Row]:
        sending_s = self._sending_s(stage, instruction)
        if not sending_s:
            return
        for clock_mhz in self.clocks_mhz:
            energy_j = round(sending_s * self.device.blocking_power_w(clock_mhz), 6)
            yield _Row(stage, instruction, clock_mhz, sending_s, energy_j, part=_SEND_PART)

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
    job: TrainingJob, operations: OperationModel, stages: Sequence[StageWork], precision: str
) -> list[str]:
    """Sentences for the sidecar that say what the model assumes."""
    layers = [stage.num_layers for stage in stages]
    split = "the least imbalanced split" if job.layers is None else "as given"
    recompute = "with recomputation" if job.recompute else "no recomputation"
    sentences = [
        operations.describe(),
        f"{job.known_model.describe()}; layers per stage {layers}, {split}.",
        f"{_PRECISION[precision]}, {recompute} of activations, {_kernels(job.known_model)}"
        f"{operations.describe_rates()}.",
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
    if isinstance(model, LanguageModel) or model.fused_attention:
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
