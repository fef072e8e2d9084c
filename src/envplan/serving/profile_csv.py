"""Reading serving profiles: a CSV file with a row for each measured point, and its sidecar.

    tp,frequency,phase,size,time_s,power_w

A row is a point of prefill, decode or idle, or says what contexts add to a decode step. The sidecar
NAME.meta.json must state in `kv_tokens` how many tokens of context fit into the memory of each TP;
it may state where the figures come from, and the mean lengths and SLOs of the classes.
docs/serving.md ("Your own profile") has columns and units.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal, NamedTuple

import numpy as np
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from envplan._io.documents import Model, parse_document, read_json
from envplan._io.files import read_bounded, refuse_slip
from envplan._io.tables import MAX_TABLE_BYTES, Table, parse_table
from envplan.errors import InputError
from envplan.profile.sidecar import sidecar_path
from envplan.serving.class_file import sidecar_classes
from envplan.serving.classes import ClassName, FloatArray, RequestClass, RequestClasses
from envplan.serving.performance import Configuration, InstancePerformance

_DEFAULT_CHUNK_TOKENS: Final = 1024  # of an iteration, where the sidecar says nothing
_MAX_GPU_W: Final = 5000.0  # far above what any GPU draws
#: Fields of a sidecar that decide what comes out of a profile: they are in its digest.
_DECISIVE_FIELDS: Final = (
    "classes",
    "kv_tokens",
    "chunk_tokens",
    "max_context_tokens",
)

Amount = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]
Tokens = Annotated[float, Field(gt=0, le=1e15)]
if TYPE_CHECKING:
    Tp = int
else:  # read from text
    Tp = Annotated[Literal["1", "2", "4", "8"], AfterValidator(int)]
TokensByTp = dict[Tp, Tokens]
ChunkTokens = Annotated[float, Field(ge=1, le=2**20)]
Phase = Literal["prefill", "decode", "context", "idle"]
Source = Literal["measured", "identified", "modelled"]


class _Sidecar(Model):
    """The sidecar of a serving profile; other fields are ignored."""

    model_config = ConfigDict(extra="ignore")

    gpu: str | None = None
    model: str | None = None
    source: Source | None = None
    modelled: str | None = None
    classes: Annotated[dict[ClassName, RequestClass], BeforeValidator(sidecar_classes)] = Field(
        default_factory=dict, validate_default=True
    )
    kv_tokens: TokensByTp = Field(default_factory=dict)
    chunk_tokens: dict[Tp, ChunkTokens] = Field(default_factory=dict)
    max_context_tokens: Tokens | None = None
    kv_bytes_per_token: Annotated[float, Field(gt=0, le=1e9)] | None = None


class _Row(BaseModel):
    tp: Tp = Field(description="1, 2, 4 or 8 GPUs")
    frequency: Annotated[int, Field(ge=1, le=10**9)] = Field(description="an SM clock, whole MHz")
    phase: Phase = Field(description="a phase")
    size: Amount = Field(0.0, description="tokens of prompt or context, or requests in the batch")
    time_s: Amount = Field(0.0, description="s of the prompt, of a step or that a context adds")
    power_w: Amount = Field(description="W of the whole instance")

    @property
    def configuration(self) -> Configuration:
        """The instance size and clock that the row is about."""
        return Configuration(self.tp, self.frequency)


class _Point(NamedTuple):
    """A measured point of a phase: tokens or requests, seconds, watts."""

    size: float
    time_s: float
    power_w: float


class _Points(NamedTuple):
    """The points of a phase in one configuration, by ascending size, (n,) each."""

    sizes: FloatArray
    time_s: FloatArray
    power_w: FloatArray


@dataclass(frozen=True, eq=False)
class ProfileContent:
    """The content of a profile's two files.

    Attributes:
        performance: of an instance, by configuration.
        classes: lengths and SLOs of every class.
        sha256: hexadecimal digest of the CSV's bytes, and of what the sidecar says of classes and
            memory.
        gpu: name of the GPU, or None.
        model: name of the served model, or None.
        source: where the figures come from, or None.
        modelled: which part of it is modelled, in words, or None.
        max_context_tokens: the longest request, input and output together, or None.
        kv_bytes_per_token: bytes of KV cache of a token of context, on all GPUs together, or None.
    """

    performance: Mapping[Configuration, InstancePerformance]
    classes: RequestClasses
    sha256: str
    gpu: str | None
    model: str | None
    source: Source | None
    modelled: str | None
    max_context_tokens: float | None = None
    kv_bytes_per_token: float | None = None


def read_profile_files(path: Path) -> ProfileContent:
    """Read and check a profile's CSV file and its sidecar.

    Raises:
        InputError: naming file, line, column and what to do.
    """
    content, sidecar_file = read_bounded(path, MAX_TABLE_BYTES), sidecar_path(path)
    fields = read_json(sidecar_file)
    sidecar = parse_document(
        fields, _Sidecar, kind="sidecar of a serving profile", path=sidecar_file
    )
    for name in fields.keys() - {"schema", *_Sidecar.model_fields}:
        refuse_slip(name, list(_Sidecar.model_fields), sidecar_file)
    table = parse_table(content, _Row, path=path, kind="a serving profile")
    return ProfileContent(
        performance=_read_performance(table, sidecar),
        classes=RequestClasses(sidecar.classes.values()),
        sha256=_digest(content, fields),
        gpu=sidecar.gpu,
        model=sidecar.model,
        source=sidecar.source,
        modelled=sidecar.modelled,
        max_context_tokens=sidecar.max_context_tokens,
        kv_bytes_per_token=sidecar.kv_bytes_per_token,
    )


def _digest(content: bytes, sidecar_fields: Mapping[str, object]) -> str:
    decisive = {name: sidecar_fields[name] for name in _DECISIVE_FIELDS if name in sidecar_fields}
    sidecar_text = json.dumps(decisive, sort_keys=True).encode()
    return hashlib.sha256(content + b"\0" + sidecar_text).hexdigest()


def _read_performance(
    table: Table[_Row], sidecar: _Sidecar
) -> dict[Configuration, InstancePerformance]:
    """The performance of each configuration, by TP and clock."""
    phases: dict[Configuration, dict[Phase, list[_Point]]] = {}
    for number, row in enumerate(table.rows()):
        _check_row(table, number, row, sidecar)
        points = phases.setdefault(row.configuration, {}).setdefault(row.phase, [])
        if points and row.size <= points[-1].size:
            previous = points[-1].size
            raise table.error(
                number, f"must be above {previous:g}, the one before of this configuration", "size"
            )
        points.append(_Point(row.size, row.time_s, row.power_w))
    return {
        configuration: _performance(configuration, phases[configuration], sidecar, table.path)
        for configuration in sorted(phases)
    }


def _check_row(table: Table[_Row], number: int, row: _Row, sidecar: _Sidecar) -> None:
    """Refuse a row that a profile cannot have, whatever stands in the others."""
    if row.tp not in sidecar.kv_tokens:
        raise table.error(
            number, f"the sidecar does not say in kv_tokens how much TP{row.tp} holds", "tp"
        )
    gpu_w = row.power_w / row.configuration.tp
    if gpu_w > _MAX_GPU_W:
        raise table.error(number, f"means {gpu_w:.0f} W on each GPU, which none draws", "power_w")
    if row.phase == "idle":
        return
    for column, value in (("size", row.size), ("time_s", row.time_s)):
        if not value:
            raise table.error(number, "must be a number above 0", column)


def _performance(
    configuration: Configuration,
    phases: Mapping[Phase, list[_Point]],
    sidecar: _Sidecar,
    path: Path | None,
) -> InstancePerformance:
    def points_of(phase: Phase) -> _Points:
        if phase not in phases:
            raise InputError(
                f"TP{configuration.tp} at {configuration.frequency_mhz} MHz has no rows of {phase}",
                path=path,
            )
        return _Points(*np.array(phases[phase]).T)

    if len(phases.get("context", ())) > 1:
        name = f"TP{configuration.tp} at {configuration.frequency_mhz} MHz"
        raise InputError(f"{name} has several rows of context", path=path)
    idle, prompts, steps = points_of("idle"), points_of("prefill"), points_of("decode")
    chunk_tokens = sidecar.chunk_tokens.get(configuration.tp, _DEFAULT_CHUNK_TOKENS)
    context = phases.get("context", [_Point(size=1.0, time_s=0.0, power_w=0.0)])[0]
    return InstancePerformance(
        idle_w=idle.power_w[0],
        prompt_tokens=prompts.sizes,
        prompt_s=prompts.time_s,
        prompt_w=prompts.power_w,
        batch_sizes=steps.sizes,
        step_s=steps.time_s,
        step_w=steps.power_w,
        kv_tokens=sidecar.kv_tokens[configuration.tp],
        chunk_tokens=int(chunk_tokens),
        context_token_s=context.time_s / context.size,
        context_w=context.power_w,
    )
