"""Files that state request classes: TOML or JSON, a table `classes` for each, shortest first.

    [[classes]]
    name = "chat"
    input_tokens_up_to = 2000
    output_tokens_up_to = 500
    ttft_slo_s = 0.5

    [[classes]]
    name = "rest"
    input_tokens = 8000
    output_tokens = 800
    ttft_slo_s = 4

A profile's sidecar may have such a list, too, or mean lengths and SLOs of the nine default classes
by name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final

from pydantic import Field, ValidationError

from envplan._io.documents import Count, Model, first_problem, parse_document, read_json
from envplan._io.markup import read_toml
from envplan.errors import InputError
from envplan.serving.classes import (
    DEFAULT_CLASSES,
    MAX_CLASSES,
    ClassName,
    Positive,
    RequestClass,
    RequestClasses,
    check_classes,
)

_KIND: Final = "list of request classes"


class _StatedClass(Model):
    """A class as a user states it: without means, they lie in the middle of the class."""

    name: ClassName
    input_tokens_up_to: Count | None = None
    output_tokens_up_to: Count | None = None
    input_tokens: Positive | None = None
    output_tokens: Positive | None = None
    ttft_slo_s: Positive
    tbt_slo_s: Positive = 0.1


class _StatedClasses(Model):
    classes: Annotated[list[_StatedClass], Field(min_length=1, max_length=MAX_CLASSES)]


def read_classes(path: str | os.PathLike[str]) -> RequestClasses:
    """The request classes in a file: JSON if its name ends in .json, otherwise TOML.

    Raises:
        InputError: it cannot be read, or states no classes that take every request; says what is
            wrong.
    """
    path = Path(path)
    document = read_json(path) if path.suffix == ".json" else read_toml(path)
    stated = parse_document(document, _StatedClasses, kind=_KIND, path=path)
    try:
        return _completed(stated.classes)
    except ValueError as error:
        raise InputError(str(error), path=path) from None


def sidecar_classes(stated: object) -> object:
    """The field `classes` of a profile's sidecar as RequestClass takes its items, by name.

    Args:
        stated: unchecked: a list of classes, or an object that overrides fields of default ones.
            What is neither is left for the validation of the sidecar to refuse.

    Raises:
        ValueError: a list does not state classes, or an object names one that there is not.
    """
    if isinstance(stated, list):
        return dict(_listed(stated))
    if not isinstance(stated, dict):
        return stated
    classes: dict[str, object] = {}
    for name in stated:
        if name not in DEFAULT_CLASSES:
            raise ValueError(DEFAULT_CLASSES.no_class_text(repr(name)))
    for name, default in DEFAULT_CLASSES.items():
        fields = stated.get(name, {})
        if isinstance(fields, dict):
            said = {key: value for key, value in fields.items() if value is not None}
            fields = default.model_dump() | said
        classes[name] = fields
    return classes


def class_list(classes: RequestClasses) -> list[dict[str, object]]:
    """Classes as a file lists them, in JSON types."""
    return [request_class.model_dump(exclude_none=True) for request_class in classes.values()]


def _listed(stated: list[object]) -> RequestClasses:
    try:
        classes = _StatedClasses.model_validate({"classes": stated}).classes
    except ValidationError as error:
        raise ValueError(first_problem(error, _KIND, _StatedClasses)) from None
    return _completed(classes)


def _completed(stated: Sequence[_StatedClass]) -> RequestClasses:
    """Classes with mean lengths.

    Raises:
        ValueError: a mean is missing that no bound tells, or as check_classes.
    """
    input_bounds = [stated_class.input_tokens_up_to for stated_class in stated]
    output_bounds = [stated_class.output_tokens_up_to for stated_class in stated]
    classes = []
    for stated_class in stated:
        means = {
            "input_tokens": _middle(stated_class.input_tokens_up_to, input_bounds),
            "output_tokens": _middle(stated_class.output_tokens_up_to, output_bounds),
        }
        fields = means | stated_class.model_dump(exclude_none=True)
        _require_means(stated_class.name, fields)
        classes.append(RequestClass.model_validate(fields))
    check_classes(classes)
    return RequestClasses(classes)


def _require_means(name: str, fields: Mapping[str, object]) -> None:
    for field, mean in fields.items():
        if mean is None:
            raise ValueError(f"class {name} needs {field}, its mean length, or {field}_up_to")


def _middle(bound: int | None, bounds: Sequence[int | None]) -> float | None:
    """Half way to a bound from the next one below it, of all classes, or from 0."""
    if bound is None:
        return None
    below = max((other for other in bounds if other is not None and other < bound), default=0)
    return (below + bound) / 2
