"""The nine request classes: how long their requests are and how fast they must be answered.

A class is named by the length of its input and of its output, short, medium or long: SS, SM, ...
LL. The bounds between the lengths, and the SLOs, are those of DynamoLLM's evaluation as we know
them. A profile's sidecar may state other mean lengths and SLOs.

A class index is a class's position in CLASSES. Only this module knows how the two lengths make one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass as checked

from envplan._io.documents import Model
from envplan.errors import InputError

_LENGTHS: Final = "SML"
#: Lengths of an input, and of an output: short, medium, long.
NUM_LENGTHS: Final = len(_LENGTHS)

#: All classes, shortest first: a class that can serve another comes after it.
CLASSES: Final = ("SS", "SM", "SL", "MS", "MM", "ML", "LS", "LM", "LL")

#: Tokens from which on an input is medium, and long.
INPUT_BOUNDS: Final = (256, 1024)
#: Tokens from which on an output is medium, and long.
OUTPUT_BOUNDS: Final = (100, 350)

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int32]
ClassIndices = npt.NDArray[np.uint8]
Positive = Annotated[float, Field(gt=0, strict=True)]


@checked(frozen=True, config=ConfigDict(extra="forbid", strict=False, allow_inf_nan=False))
class Slo:
    """A latency objective: the most seconds to the first token, and between further tokens."""

    ttft_s: Positive
    tbt_s: Positive

    def covers(self, other: Slo) -> bool:
        """Whether meeting this objective meets the other, too."""
        return self.ttft_s <= other.ttft_s and self.tbt_s <= other.tbt_s

    @staticmethod
    def strictest(slos: Iterable[Slo]) -> Slo:
        """The loosest objective that covers all of these."""
        objectives = list(slos)
        return Slo(
            ttft_s=min(objective.ttft_s for objective in objectives),
            tbt_s=min(objective.tbt_s for objective in objectives),
        )


class RequestClass(Model):
    """Mean lengths and SLO of one class.

    Attributes:
        input_tokens: mean length of its inputs.
        output_tokens: mean length of its outputs.
        ttft_slo_s: the most seconds to the first token.
        tbt_slo_s: the most seconds between further tokens.
    """

    input_tokens: Positive
    output_tokens: Positive
    ttft_slo_s: Positive
    tbt_slo_s: Positive = 0.1

    @property
    def slo(self) -> Slo:
        """The latency objective of its requests."""
        return Slo(self.ttft_slo_s, self.tbt_slo_s)

    @property
    def tokens(self) -> float:
        """Tokens of load that a mean request brings, input and output together."""
        return self.input_tokens + self.output_tokens


class _InputDefaults(NamedTuple):
    """Mean tokens of the inputs of one length, and the longest time to their first token."""

    tokens: float
    ttft_slo_s: float


_INPUT_DEFAULTS: Final = {
    "S": _InputDefaults(160.0, 0.25),
    "M": _InputDefaults(600.0, 0.4),
    "L": _InputDefaults(3000.0, 2.0),
}
_OUTPUT_TOKENS: Final = {"S": 60.0, "M": 220.0, "L": 500.0}


def complete_classes(stated: object) -> object:
    """All nine classes: the defaults, overridden by what a sidecar states.

    Args:
        stated: the sidecar's field `classes`, unchecked. What is no object is left for the
            validation of the sidecar to refuse.
    """
    if not isinstance(stated, dict):
        return stated
    classes = {name: stated.get(name, {}) for name in [*CLASSES, *stated]}
    for name in CLASSES:
        stated_class = classes[name]
        if isinstance(stated_class, dict):
            stated_fields = {key: value for key, value in stated_class.items() if value is not None}
            classes[name] = _default_fields(name) | stated_fields
    return classes


def _default_fields(name: str) -> dict[str, float]:
    input_length, output_length = name[0], name[1]
    defaults = _INPUT_DEFAULTS[input_length]
    return {
        "input_tokens": defaults.tokens,
        "output_tokens": _OUTPUT_TOKENS[output_length],
        "ttft_slo_s": defaults.ttft_slo_s,
    }


def classify_requests(
    input_tokens: npt.NDArray[np.int_] | IntArray, output_tokens: npt.NDArray[np.int_] | IntArray
) -> ClassIndices:
    """The class index of each request of these lengths, (n,)."""
    input_lengths = np.digitize(input_tokens, INPUT_BOUNDS).astype(np.uint8)
    output_lengths = np.digitize(output_tokens, OUTPUT_BOUNDS).astype(np.uint8)
    return class_indices(input_lengths, output_lengths)


def class_indices(input_lengths: ClassIndices, output_lengths: ClassIndices) -> ClassIndices:
    """The class index of each pair of lengths; 0 is short, 2 is long."""
    indices: ClassIndices = input_lengths * np.uint8(NUM_LENGTHS) + output_lengths
    return indices


def split_class_indices(indices: ClassIndices) -> tuple[ClassIndices, ClassIndices]:
    """Lengths of inputs and of outputs; the inverse of class_indices."""
    return indices // np.uint8(NUM_LENGTHS), indices % np.uint8(NUM_LENGTHS)


def serves(pool_class: str, request_class: str) -> bool:
    """Whether a class's pool may serve requests of another: they are longer in no respect."""
    return all(
        _LENGTHS.index(request_length) <= _LENGTHS.index(pool_length)
        for pool_length, request_length in zip(pool_class, request_class, strict=True)
    )


def host_classes(name: str, *, merge: bool = True) -> list[str]:
    """The classes whose pools may serve a class, itself first; without `merge` only itself."""
    if not merge:
        return [name]
    return [name, *(host for host in CLASSES if host != name and serves(host, name))]


def _check_name(name: str) -> str:
    if name not in CLASSES:
        raise ValueError(
            f"there is no class {name!r}; the classes are {', '.join(CLASSES)} (input then output: "
            "short, medium, long)"
        )
    return name


ClassName = Annotated[str, AfterValidator(_check_name)]


def check_class(name: str) -> str:
    """The name of a class as a user gave it.

    Raises:
        InputError: there is no such class.
    """
    try:
        return _check_name(name)
    except ValueError as error:
        raise InputError(str(error)) from None
