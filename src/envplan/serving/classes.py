"""Request classes: how long their requests are, and how fast they must be answered.

A class takes inputs and outputs of up to so many tokens. A request is of the first class, in their
order, that takes it, and the last class takes all. Users state their own (class_file.py). Without
them there are the nine of DynamoLLM, as we know them, named by the length of input and output:
short, medium or long: SS, SM, ... LL. A profile's sidecar may state other mean lengths and SLOs of
these.

A class index is a class's place in that order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Annotated, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass as checked

from envplan._io.documents import Count, Model
from envplan.errors import InputError

#: The engine has the classes of a pool in the bits of a word (csrc/serving/requests.hpp).
MAX_CLASSES: Final = 64

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int32]
ClassIndices = npt.NDArray[np.uint8]
Positive = Annotated[float, Field(gt=0, strict=True)]
#: Names stand in options as in --load chat=2000,code=500.
_NAME: Final = r"^[^\s=,+]{1,64}$"
ClassName = Annotated[str, Field(pattern=_NAME)]


def is_class_name(text: str) -> bool:
    """Whether a class may be called so."""
    return re.fullmatch(_NAME, text) is not None


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
    """A class: the lengths that it takes, its mean lengths and its SLO.

    Attributes:
        name: of the class.
        input_tokens: mean length of its inputs.
        output_tokens: mean length of its outputs.
        ttft_slo_s: the most seconds to the first token.
        tbt_slo_s: the most seconds between further tokens.
        input_tokens_up_to: the longest input that it takes; None: any.
        output_tokens_up_to: the longest output that it takes; None: any.
    """

    name: ClassName
    input_tokens: Positive
    output_tokens: Positive
    ttft_slo_s: Positive
    tbt_slo_s: Positive = 0.1
    input_tokens_up_to: Count | None = None
    output_tokens_up_to: Count | None = None

    @property
    def slo(self) -> Slo:
        """The latency objective of its requests."""
        return Slo(self.ttft_slo_s, self.tbt_slo_s)

    @property
    def tokens(self) -> float:
        """Tokens of load that a mean request brings, input and output together."""
        return self.input_tokens + self.output_tokens

    @property
    def bounds(self) -> LengthBounds:
        """The longest requests that it takes."""
        return LengthBounds(
            np.inf if self.input_tokens_up_to is None else self.input_tokens_up_to,
            np.inf if self.output_tokens_up_to is None else self.output_tokens_up_to,
        )


class LengthBounds(NamedTuple):
    """Tokens of the longest input and of the longest output that a class takes, or infinity."""

    input_tokens: float
    output_tokens: float

    def cover(self, other: LengthBounds) -> bool:
        """Whether a class with these bounds takes all that one with the others takes."""
        return self.input_tokens >= other.input_tokens and self.output_tokens >= other.output_tokens


class RequestClasses(Mapping[str, RequestClass]):
    """Classes by name, in the order in which a request is compared with them.

    Args:
        classes: one to MAX_CLASSES, as check_classes wants them.
    """

    def __init__(self, classes: Iterable[RequestClass]) -> None:
        self._by_name = {request_class.name: request_class for request_class in classes}
        self.names = tuple(self._by_name)

    def __getitem__(self, name: str) -> RequestClass:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def __eq__(self, other: object) -> bool:
        """Whether others are the same, in the same order."""
        return isinstance(other, RequestClasses) and self.to_list() == other.to_list()

    def __hash__(self) -> int:
        return hash(self.names)

    def to_list(self) -> list[RequestClass]:
        """The classes in their order."""
        return list(self._by_name.values())

    def index(self, name: str) -> int:
        """The class index of a class."""
        return self.names.index(name)

    def check_name(self, name: str) -> str:
        """The name of a class as a user gave it.

        Raises:
            InputError: there is no such class.
        """
        if name not in self._by_name:
            raise InputError(self.no_class_text(repr(name)))
        return name

    def no_class_text(self, name: str) -> str:
        """Words for a name that no class has."""
        return f"there is no class {name}; the classes are {', '.join(self.names)}{self._about}"

    @property
    def _about(self) -> str:
        if self.names != CLASSES:
            return ""
        return " (input then output: short, medium, long)"

    def has_the_bounds_of(self, other: RequestClasses) -> bool:
        """Whether others have the same names and take the same requests."""
        return self.names == other.names and self._bounds == other._bounds

    def has_the_means_of(self, other: RequestClasses) -> bool:
        """Whether others have the same names and mean lengths."""
        return self._means == other._means

    def replaced(self, changed: Mapping[str, RequestClass]) -> RequestClasses:
        """The classes with some of them changed, by name."""
        return RequestClasses({**self._by_name, **changed}.values())

    def serves(self, pool_class: str, request_class: str) -> bool:
        """Whether a class's pool may serve requests of another: they are longer in no respect."""
        return self.index(pool_class) in _hosts_of_each(self._bounds)[self.index(request_class)]

    def hosts(self, name: str, *, merge: bool = True) -> list[str]:
        """The classes whose pools may serve a class, itself first; without `merge` only itself."""
        if not merge:
            return [name]
        return [name, *(host for host in self if host != name and self.serves(host, name))]

    def lowest_host(self, names: Iterable[str]) -> str:
        """The first class whose pool may serve all of these."""
        served = list(names)
        hosts = (host for host in self if all(self.serves(host, name) for name in served))
        return next(hosts)  # the last class serves all

    def classify(
        self,
        input_tokens: npt.NDArray[np.int_] | IntArray,
        output_tokens: npt.NDArray[np.int_] | IntArray,
    ) -> ClassIndices:
        """The class index of each request of these lengths, (n,)."""
        rows = np.searchsorted(self._input_bounds, input_tokens)
        columns = np.searchsorted(self._output_bounds, output_tokens)
        return self._class_of_cell[rows, columns]

    def one_length_off(self, step: int) -> ClassIndices:
        """The class that takes the requests of each class with other outputs, (classes,).

        A length is what lies between two bounds of outputs of any classes. Where there is no length
        more, it is the class itself.

        Args:
            step: 1 where outputs are one length longer, -1 where they are one shorter.
        """
        inputs = [bounds.input_tokens for bounds in self._bounds]
        outputs = [bounds.output_tokens for bounds in self._bounds]
        rows = np.searchsorted(self._input_bounds, inputs)
        columns = np.searchsorted(self._output_bounds, outputs) + step
        return self._class_of_cell[rows, np.clip(columns, 0, len(self._output_bounds))]

    @property
    def _means(self) -> list[tuple[str, float, float]]:
        return [
            (request_class.name, request_class.input_tokens, request_class.output_tokens)
            for request_class in self.values()
        ]

    @cached_property
    def _bounds(self) -> tuple[LengthBounds, ...]:
        return tuple(request_class.bounds for request_class in self.values())

    @cached_property
    def _input_bounds(self) -> FloatArray:
        return _finite({bounds.input_tokens for bounds in self._bounds})

    @cached_property
    def _output_bounds(self) -> FloatArray:
        return _finite({bounds.output_tokens for bounds in self._bounds})

    @cached_property
    def _class_of_cell(self) -> ClassIndices:
        """The first class that takes all between two bounds, (input bounds + 1, output bounds + 1).

        The last row and the last column are for what is longer than all bounds.
        """
        inputs, outputs = [*self._input_bounds, np.inf], [*self._output_bounds, np.inf]
        cells = np.zeros((len(inputs), len(outputs)), dtype=np.uint8)
        for row, input_tokens in enumerate(inputs):
            for column, output_tokens in enumerate(outputs):
                longest = LengthBounds(input_tokens, output_tokens)
                takes = (bounds.cover(longest) for bounds in self._bounds)
                cells[row, column] = list(takes).index(True)
        return cells


@lru_cache
def _hosts_of_each(bounds: tuple[LengthBounds, ...]) -> list[frozenset[int]]:
    """For each class of these bounds, the indices of those that take all that it takes."""
    return [
        frozenset(index for index, host in enumerate(bounds) if host.cover(of_class))
        for of_class in bounds
    ]


def _finite(bounds: Iterable[float]) -> FloatArray:
    return np.array(sorted(bound for bound in bounds if bound < np.inf), dtype=np.float64)


def check_classes(classes: Sequence[RequestClass]) -> None:
    """Refuse classes that leave a request without a class, or a class without requests.

    Raises:
        ValueError: saying which class, and why.
    """
    if not 1 <= len(classes) <= MAX_CLASSES:
        raise ValueError(f"there must be 1 to {MAX_CLASSES} classes, not {len(classes)}")
    for number, request_class in enumerate(classes):
        for earlier in classes[:number]:
            if earlier.name == request_class.name:
                raise ValueError(f"class {earlier.name} is there twice")
            if earlier.bounds.cover(request_class.bounds):
                raise ValueError(
                    f"class {request_class.name} gets no requests: {earlier.name}, before it, "
                    "takes all that it would; put shorter classes first"
                )
    last = classes[-1]
    if last.bounds != LengthBounds(np.inf, np.inf):
        raise ValueError(
            f"requests longer than class {last.name} would have no class: leave "
            "input_tokens_up_to and output_tokens_up_to out of the last one, which takes the rest"
        )


def _checked(classes: list[RequestClass]) -> list[RequestClass]:
    check_classes(classes)
    return classes


#: Classes in a document, in their order.
ClassList = Annotated[list[RequestClass], AfterValidator(_checked)]


class _DefaultLength(NamedTuple):
    """A length of the inputs, or of the outputs, of the nine default classes, in tokens."""

    letter: str
    mean: float
    up_to: int | None


_INPUT_LENGTHS: Final = (
    _DefaultLength("S", 160.0, 255),
    _DefaultLength("M", 600.0, 1023),
    _DefaultLength("L", 3000.0, None),
)
_OUTPUT_LENGTHS: Final = (
    _DefaultLength("S", 60.0, 99),
    _DefaultLength("M", 220.0, 349),
    _DefaultLength("L", 500.0, None),
)
_TTFT_SLO_S: Final = {"S": 0.25, "M": 0.4, "L": 2.0}  # by the length of inputs


def _nine_classes() -> Iterator[RequestClass]:
    for inputs in _INPUT_LENGTHS:
        for outputs in _OUTPUT_LENGTHS:
            yield RequestClass(
                name=inputs.letter + outputs.letter,
                input_tokens=inputs.mean,
                output_tokens=outputs.mean,
                ttft_slo_s=_TTFT_SLO_S[inputs.letter],
                input_tokens_up_to=inputs.up_to,
                output_tokens_up_to=outputs.up_to,
            )


#: The classes where nobody states others.
DEFAULT_CLASSES: Final = RequestClasses(_nine_classes())
#: Their names, shortest first.
CLASSES: Final = DEFAULT_CLASSES.names
