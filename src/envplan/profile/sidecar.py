"""The sidecar of a profile, NAME.meta.json: where the rows come from and what job they are of."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from envplan._files import parse_json, read_bounded, refuse_slip
from envplan.errors import InputError, shown
from envplan.profile.options import INCLUDES_RECOMPUTATION

_MAX_BYTES: Final = 256 * 2**20


@dataclass(frozen=True)
class ProfileMetadata:
    """What the sidecar NAME.meta.json says about a profile; None where it says nothing.

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
        extra: all other fields of the sidecar.
    """

    gpu: str | None = None
    driver: str | None = None
    source: str | None = None
    workload: str | None = None
    microbatch_size: int | None = None
    tensor_parallel: int | None = None
    date: str | None = None
    envplan_version: str | None = None
    schedule: str | None = None
    num_microbatches: int | None = None
    stage_gpus: tuple[str, ...] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def gpu_of(self, stage: int) -> str | None:
        """Name of the GPU that a stage of the profile was measured on."""
        return self.gpu if self.stage_gpus is None else self.stage_gpus[stage]

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
            document = parse_json(read_bounded(path, _MAX_BYTES), path)
        except InputError as error:
            raise InputError(
                f"{error.message}; mend it or delete it, a sidecar is optional",
                path=path,
                line=error.line,
                column=error.column,
            ) from None
        if not isinstance(document, dict):
            raise InputError("must hold one JSON object, {...}", path=path)
        _refuse_unwritable(document, path)
        gpus = _gpu_list(document.get("gpu"), path)
        if gpus is not None:
            document["gpu"] = " and ".join(dict.fromkeys(gpus))
        known = {name: _known_field(name, document.pop(name, None), path) for name in _FIELDS}
        if not isinstance(document.get(INCLUDES_RECOMPUTATION, False), bool):
            raise InputError("must be true or false", path=path, column=INCLUDES_RECOMPUTATION)
        for name in document.keys() - set(_DECISIVE):
            refuse_slip(name, _DECISIVE, path)
        return cls(**known, stage_gpus=gpus, extra=document)

    def to_json(self) -> str:
        """The sidecar's text; fields that say nothing are left out."""
        known = {name: getattr(self, name) for name in _FIELDS}
        document = {name: value for name, value in known.items() if value is not None}
        if self.stage_gpus is not None:
            document["gpu"] = list(self.stage_gpus)
        return json.dumps(document | dict(self.extra), indent=2, ensure_ascii=False) + "\n"


_INTEGER_FIELDS: Final = frozenset({"microbatch_size", "tensor_parallel", "num_microbatches"})
#: Fields that plans and their labels depend on.
_DECISIVE: Final = ("schedule", "num_microbatches", "gpu", "source", INCLUDES_RECOMPUTATION)
_FIELDS: Final = tuple(
    f.name for f in dataclasses.fields(ProfileMetadata) if f.name not in ("stage_gpus", "extra")
)


def _refuse_unwritable(document: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """What is read here is written again with what is made from the profile."""
    try:
        json.dumps(document, indent=2, allow_nan=False)
    except (ValueError, RecursionError):
        raise InputError("has a number beyond 1e308, or is nested too deeply", path=path) from None


def _gpu_list(value: object, path: str | os.PathLike[str]) -> tuple[str, ...] | None:
    """The names in a list of GPUs; None where `gpu` is no list."""
    if not isinstance(value, list):
        return None
    if not value or not all(isinstance(name, str) and name for name in value):
        raise InputError("must name one GPU, or list one for each stage", path=path, column="gpu")
    return tuple(value)


def _known_field(name: str, value: object, path: str | os.PathLike[str]) -> Any:
    if value is None:
        return None
    if name in _INTEGER_FIELDS:
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31:
            return value
        raise InputError(
            f"must be a positive whole number, not {shown(value)}", path=path, column=name
        )
    if not isinstance(value, str):
        raise InputError(f"must be text, not {shown(value)}", path=path, column=name)
    if name == "source" and value not in ("measured", "modelled"):
        raise InputError(
            f'must be "measured" or "modelled", not {shown(value)}', path=path, column=name
        )
    return value


def sidecar_path(path: Path) -> Path:
    """Where the sidecar of a profile lies."""
    return path.with_name(path.stem + ".meta.json")


def exists(path: str | os.PathLike[str]) -> bool:
    """Whether a path leads to something; a name that no file can have leads nowhere."""
    try:
        return Path(path).exists()
    except (OSError, ValueError):  # a name too long for the file system, or no name at all
        return False
