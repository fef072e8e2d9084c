"""The sidecar of a profile, NAME.meta.json: the source of its rows, and the job they are of."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Field, JsonValue, Strict

from envplan._io.documents import parse_document, read_json
from envplan._io.files import exists, refuse_slip
from envplan.errors import InputError
from envplan.profile.clock_latency import SwitchLatency
from envplan.profile.instructions import INCLUDES_RECOMPUTATION

_KIND: Final = "profile's sidecar"
_SWITCH_LATENCY: Final = "switch_latency"
#: Field that says why it was not measured how late clocks come.
LATENCY_UNKNOWN: Final = "switch_latency_unknown"

#: The sidecar's field for the GPU's power limit, W.
POWER_LIMIT: Final = "power_limit_w"
#: The sidecar's field of a modelled profile whose time_std and energy_std are the model's error,
#: not spread from run to run: by how much, as a fraction, energies at two clocks of an operation
#: may be off against each other.
MODEL_ERROR: Final = "model_error_between_clocks"
MAX_POWER_W: Final = 1e5

Count = Annotated[int, Strict(), Field(gt=0, lt=2**31)]
Text = Annotated[str, Field(min_length=1)]
Seconds = Annotated[float, Strict(), Field(ge=0, allow_inf_nan=False)]


#: The sidecar's field for what each stage takes of a GPU's memory.
FOOTPRINT: Final = "memory"


@dataclass(frozen=True)
class Footprint:
    """What each stage of a profile takes of a GPU's memory, bytes.

    Attributes:
        model_bytes: weights, gradients and optimizer.
        activation_bytes: what a microbatch's forward leaves for its backward.
    """

    model_bytes: list[float]
    activation_bytes: list[float]

    @classmethod
    def of_document(cls, document: object) -> Footprint | None:
        """The footprint in a sidecar's field; None where that is none."""
        if not isinstance(document, dict):
            return None
        columns = [document.get(name) for name in ("model_bytes", "activation_bytes")]
        for column in columns:
            if not isinstance(column, list):
                return None
            if not all(isinstance(value, int | float) and value >= 0 for value in column):
                return None
        model_bytes, activation_bytes = columns
        if len(model_bytes) != len(activation_bytes):  # type: ignore[arg-type]
            return None
        return cls(model_bytes, activation_bytes)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The training job that a profile was measured for, beside schedule and microbatches.

    Attributes:
        stages: pipeline stages (ranks); None: the profile's stages over the chunks.
        chunks: model chunks of a rank; None: as many as the schedule usually has.
        microbatch_group: as for Pipeline.
        p2p_latency_s: what a transfer between stages takes, s; a list has one for each pair of
            neighbouring stages.
        extras: for each operation beside forwards and backwards the model stages that have it,
            such as {"optimizer": [0, 1]}.
        in_turn: stages that take turns with the next one; see Pipeline.
        gpus_per_stage: tensor- times context-parallel degree; None: the tensor-parallel one.
        replicas: data-parallel degree.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    stages: Count | None = None
    chunks: Count | None = None
    microbatch_group: Count | None = None
    p2p_latency_s: Seconds | list[Seconds] = 0.0
    extras: dict[str, list[int]] = field(default_factory=dict)
    in_turn: list[int] = field(default_factory=list)
    gpus_per_stage: Count | None = None
    replicas: Count = 1

    def to_dict(self) -> dict[str, JsonValue]:
        """The fields that say something unusual, in JSON types."""
        usual = vars(Workload())
        return {name: value for name, value in vars(self).items() if value != usual[name]}


@dataclass(frozen=True)
class ProfileMetadata:
    """The contents of a sidecar NAME.meta.json; None where it says nothing.

    Attributes:
        gpu: name of the GPU; of several, their names with "and" between them.
        stage_gpus: for each stage the name of its GPU, where the sidecar's `gpu` is a list.
        driver: its driver's version.
        source: "measured" or "modelled".
        workload: what was run.
        microbatch_size: samples per microbatch.
        tensor_parallel: tensor-parallel degree the rows were taken at.
        date: when, ISO 8601.
        envplan_version: what wrote the file.
        schedule: default pipeline schedule for this profile.
        num_microbatches: default number of microbatches.
        job: the rest of the job.
        switch_latency: how late the GPU's clocks come.
        extra: all other fields of the sidecar.
    """

    gpu: str | None = None
    driver: str | None = None
    source: Literal["measured", "modelled"] | None = None
    workload: str | None = None
    microbatch_size: Count | None = None
    tensor_parallel: Count | None = None
    date: str | None = None
    envplan_version: str | None = None
    schedule: str | None = None
    num_microbatches: Count | None = None
    stage_gpus: Annotated[tuple[Text, ...], Field(min_length=1)] | None = None
    job: Workload = Workload()
    switch_latency: SwitchLatency | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def gpu_of(self, stage: int) -> str | None:
        """Name of the GPU that a stage of the profile was measured on."""
        return self.gpu if self.stage_gpus is None else self.stage_gpus[stage]

    @property
    def footprint(self) -> Footprint | None:
        """What FOOTPRINT says; None where the sidecar says nothing that makes sense."""
        return Footprint.of_document(self.extra.get(FOOTPRINT))

    @property
    def model_error_between_clocks(self) -> float | None:
        """What MODEL_ERROR says; None where deviations are of measurements, or there are none."""
        error = self.extra.get(MODEL_ERROR)
        return float(error) if isinstance(error, int | float) else None

    @property
    def energies_are(self) -> str | None:
        """How the energies were found: "measured", "identified" or "modelled".

        Identified ones come from measurements of something else, as the sidecar's field of that
        name says. None: nothing says.
        """
        identified = self.source == "measured" and bool(self.extra.get("identified"))
        return "identified" if identified else self.source

    @property
    def energies_in_words(self) -> str | None:
        """What energies_are means, to follow "energies are"."""
        if self.energies_are == "identified":
            return "worked out from measured iterations"
        return self.energies_are

    @property
    def power_limit_w(self) -> float | None:
        """The GPU's power limit as the profile was measured, W; None: nothing says."""
        limit_w = self.extra.get(POWER_LIMIT)
        if not isinstance(limit_w, int | float) or not 0 < limit_w < MAX_POWER_W:
            return None
        return float(limit_w)

    @property
    def gpus_per_stage(self) -> int:
        """GPUs that share a stage, as far as the sidecar says."""
        return self.job.gpus_per_stage or self.tensor_parallel or 1

    def gpus_per_stage_with(self, tensor: int | None, context: int | None) -> int:
        """GPUs that share a stage at these degrees; None: as the sidecar says."""
        usual_tensor = self.tensor_parallel or self.gpus_per_stage
        usual_context = max(1, self.gpus_per_stage // usual_tensor)
        return (tensor or usual_tensor) * (context or usual_context)

    def made_today(self) -> ProfileMetadata:
        """The same with today's date and this version of envplan."""
        today = date.today().isoformat()
        return replace(self, date=today, envplan_version=version("envplan"))

    def with_power_limit(self, limit_w: float) -> ProfileMetadata:
        """The same with the GPU's power limit, W; 0, which stands for unknown, says nothing."""
        if not limit_w:
            return self
        return replace(self, extra={**self.extra, POWER_LIMIT: limit_w})

    def with_switch_latency(self, latency: SwitchLatency) -> ProfileMetadata:
        """The same with how late clocks come; why that was unknown is forgotten."""
        extra = {name: value for name, value in self.extra.items() if name != LATENCY_UNKNOWN}
        return replace(self, switch_latency=latency, extra=extra)

    @classmethod
    def read_json(cls, path: str | os.PathLike[str]) -> ProfileMetadata:
        """The metadata of a sidecar file; an empty one where there is no such file.

        Raises:
            InputError: the file cannot be read, is not a JSON object, a field has a wrong type, or
                one that it has is nearly one that decides how plans are made.
        """
        if not exists(path):
            return cls()
        try:
            return _parse_sidecar(read_json(path), path)
        except InputError as error:
            message = f"{error.message}; mend it or delete it, a sidecar is optional"
            raise InputError(message, path=path, line=error.line, column=error.column) from None

    def to_json(self) -> str:
        """The sidecar's text; fields that say nothing are left out."""
        document: dict[str, object] = {}
        for name in _WRITTEN:
            value = getattr(self, name)
            if value is not None:
                document[name] = value
        if self.stage_gpus is not None:
            document["gpu"] = list(self.stage_gpus)
        job = self.job.to_dict()
        if job:
            document["job"] = job
        if self.switch_latency is not None:
            document[_SWITCH_LATENCY] = self.switch_latency.to_dict()
        return json.dumps(document | dict(self.extra), indent=2, ensure_ascii=False) + "\n"


#: Fields that are written as they are.
_WRITTEN: Final = tuple(
    f.name
    for f in fields(ProfileMetadata)
    if f.name not in ("stage_gpus", "job", _SWITCH_LATENCY, "extra")
)
#: Fields that plans and their labels depend on.
_DECISIVE: Final = (
    "schedule", "num_microbatches", "gpu", "source", "job", _SWITCH_LATENCY, INCLUDES_RECOMPUTATION
)  # fmt: skip


def sidecar_path(path: Path) -> Path:
    """Where the sidecar of a profile lies; the profile may be gzipped."""
    return path.with_name(Path(path.name.removesuffix(".gz")).stem + ".meta.json")


def _parse_sidecar(document: Any, path: str | os.PathLike[str]) -> ProfileMetadata:
    """The metadata in a JSON value.

    Raises:
        InputError: a field has a wrong type, or is nearly one that decides how plans are made.
    """
    try:  # what is read here is written again with what is made from the profile
        json.dumps(document, indent=2, allow_nan=False)
    except (ValueError, RecursionError):
        raise InputError("has a number beyond 1e308, or is nested too deeply") from None
    if not isinstance(document, dict):
        raise InputError("must hold one JSON object, {...}")
    job = document.pop("job", None) or {}
    if isinstance(job, dict):
        _lift(job, "schedule", document, "schedule")
        _lift(job, "microbatches", document, "num_microbatches")
    fields = {name: document.pop(name) for name in _WRITTEN if document.get(name) is not None}
    if document.get(_SWITCH_LATENCY) is not None:
        fields[_SWITCH_LATENCY] = document.pop(_SWITCH_LATENCY)
    gpu = fields.get("gpu")
    if isinstance(gpu, list):
        fields["stage_gpus"] = tuple(gpu)
        fields["gpu"] = " and ".join(dict.fromkeys(map(str, gpu)))
    if not isinstance(document.get(INCLUDES_RECOMPUTATION, False), bool):
        raise InputError("must be true or false", column=INCLUDES_RECOMPUTATION)
    for name in document.keys() - set(_DECISIVE):
        refuse_slip(name, _DECISIVE, path)
    return parse_document(fields | {"job": job, "extra": document}, ProfileMetadata, kind=_KIND)


def _lift(job: dict[str, Any], name: str, document: dict[str, Any], field_name: str) -> None:
    """Let a field of a sidecar's job be one of the sidecar, which may say it, too.

    Raises:
        InputError: the two differ.
    """
    if name not in job:
        return
    value = job.pop(name)
    if document.setdefault(field_name, value) != value:
        raise InputError(f"says {name} twice, and not the same", column="job")
