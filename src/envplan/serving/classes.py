"""The nine classes of requests: how long they are, how fast they must be answered.

A class is named by the length of its input and of its output, short, medium or long: SS, SM, ...
LL. The bounds between them, and the SLOs, are those of DynamoLLM's evaluation as we know them; a
profile's sidecar may say otherwise for its own classes' mean lengths and SLOs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Final

import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass as checked

from envplan._io.documents import Model
from envplan.errors import InputError

_LENGTHS: Final = "SML"

#: All classes, shortest first: one that can serve another comes after it.
CLASSES: Final = tuple(i + o for i in _LENGTHS for o in _LENGTHS)

#: Tokens from which on an input is medium, and long.
INPUT_BOUNDS: Final = (256, 1024)
#: Tokens from which on an output is medium, and long.
OUTPUT_BOUNDS: Final = (100, 350)

FloatArray = npt.NDArray[np.float64]
Positive = Annotated[float, Field(gt=0, strict=True)]


@checked(frozen=True, config=ConfigDict(extra="forbid", strict=False, allow_inf_nan=False))
class Slo:
    """What a request is promised: seconds to its first token and between its tokens, at most."""

    ttft_s: Positive
    tbt_s: Positive

    def covers(self, other: Slo) -> bool:
        """Whether meeting this one meets the other, too."""
        return self.ttft_s <= other.ttft_s and self.tbt_s <= other.tbt_s

    @staticmethod
    def strictest(slos: Iterable[Slo]) -> Slo:
        """The loosest one that covers all of these."""
        several = tuple(slos)
        return Slo(min(s.ttft_s for s in several), min(s.tbt_s for s in several))


class RequestClass(Model):
    """One class.

    Attributes:
        input_tokens: mean length of its inputs.
        output_tokens: mean length of its outputs.
        ttft_slo_s, tbt_slo_s: what its requests are promised.
    """

    input_tokens: Positive
    output_tokens: Positive
    ttft_slo_s: Positive
    tbt_slo_s: Positive = 0.1

    @property
    def slo(self) -> Slo:
        """What its requests are promised."""
        return Slo(self.ttft_slo_s, self.tbt_slo_s)

    @property
    def tokens(self) -> float:
        """Tokens of load that a mean request brings, input and output together."""
        return self.input_tokens + self.output_tokens


_INPUTS: Final = {"S": (160.0, 0.25), "M": (600.0, 0.4), "L": (3000.0, 2.0)}  # tokens, TTFT (s)
_OUTPUTS: Final = {"S": 60.0, "M": 220.0, "L": 500.0}


def filled(classes: Any) -> Any:
    """All classes: what a profile's sidecar says of some over what is usual."""
    if not isinstance(classes, dict):
        return classes
    found = {name: classes.get(name, {}) for name in [*CLASSES, *classes]}
    for name in CLASSES:
        given, ttft = _INPUTS[name[0]]
        usual = {"input_tokens": given, "output_tokens": _OUTPUTS[name[1]], "ttft_slo_s": ttft}
        if isinstance(own := found[name], dict):
            found[name] = usual | {key: value for key, value in own.items() if value is not None}
    return found


def classify_all(
    input_tokens: npt.NDArray[Any], output_tokens: npt.NDArray[Any]
) -> npt.NDArray[np.uint8]:
    """The places in CLASSES of requests of these lengths."""
    given = np.digitize(input_tokens, INPUT_BOUNDS).astype(np.uint8)
    made = np.digitize(output_tokens, OUTPUT_BOUNDS).astype(np.uint8)
    place: npt.NDArray[np.uint8] = given * np.uint8(len(_LENGTHS)) + made
    return place


def serves(pool: str, request: str) -> bool:
    """Whether requests of a class may be served by another's pool: it is longer in no respect."""
    return all(_LENGTHS.index(r) <= _LENGTHS.index(p) for p, r in zip(pool, request, strict=True))


def hosts(name: str, *, merge: bool = True) -> list[str]:
    """The classes whose pools may serve a class, itself first; only itself without `merge`."""
    return [name, *(c for c in CLASSES if merge and c != name and serves(c, name))]


def _known(name: str) -> str:
    if name not in CLASSES:
        raise ValueError(
            f"there is no class {name!r}; the classes are {', '.join(CLASSES)} (input then output: "
            "short, medium, long)"
        )
    return name


Class = Annotated[str, AfterValidator(_known)]


def check_class(name: str) -> str:
    """`name`, which a user gave.

    Raises:
        InputError: there is no such class.
    """
    try:
        return _known(name)
    except ValueError as error:
        raise InputError(str(error)) from None
