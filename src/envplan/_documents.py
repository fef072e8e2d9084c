"""The one reader and writer of JSON documents: schema name, pydantic model, errors in a line."""

from __future__ import annotations

import json
import re
from typing import Any, Final, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from envplan._files import AnyPath, parse_json, read_bounded
from envplan.errors import InputError, shown

MAX_DOCUMENT_BYTES: Final = 256 * 2**20

#: What to do with a document where another kind is asked for, by its schema.
_INSTEAD: Final = {
    "envplan/freqplan/v1": "; it is a frequency plan already, which training follows: give the "
    "plan that it was made from"
}

T = TypeVar("T")


def read_json(path: AnyPath, max_bytes: int = MAX_DOCUMENT_BYTES) -> Any:
    """The JSON value in a file of at most `max_bytes`.

    Raises:
        InputError: the file cannot be read, is too large or is not JSON; says line and column.
    """
    return parse_json(read_bounded(path, max_bytes), path)


def parse_document(
    document: object,
    model: type[T],
    *,
    kind: str,
    schema: str | None = None,
    path: AnyPath | None = None,
) -> T:
    """A JSON value as an instance of a model.

    Args:
        model: a pydantic model, or anything that pydantic makes a validator of.
        kind: what it is, for people: "plan".
        schema: what its field `schema` must say; None where it has none.
        path: for errors.

    Raises:
        InputError: it is something else; says the first problem.
    """
    if not isinstance(document, dict):
        raise InputError(f"is not a {kind}: must hold one JSON object, {{...}}", path=path)
    if schema is not None and document.get("schema") != schema:
        said = document.get("schema")
        more = _INSTEAD.get(said, "") if isinstance(said, str) else ""
        raise InputError(
            f"is not a {kind}: its schema is {shown(said)}, not {shown(schema)}{more}", path=path
        )
    try:
        return TypeAdapter(model).validate_python(document)
    except ValidationError as error:
        raise InputError(first_problem(error, kind), path=path) from None


def first_problem(error: ValidationError, kind: str) -> str:
    """Field and complaint of the first error of a document of some kind, in one line."""
    first = error.errors(include_url=False)[0]
    where = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"])
    field = where.removeprefix(".")
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    match first["type"]:
        case "missing":
            return f"{field} is missing{more}"
        case "extra_forbidden" | "unexpected_keyword_argument":
            return f"{field} is not a field of a {kind}{more}"
        case "value_error" if not field or isinstance(first["input"], dict):
            return f"{field} {first['ctx']['error']}{more}".strip()
        case "value_error":
            complaint = str(first["ctx"]["error"])
        case _:
            complaint = first["msg"].replace("Input should", "should", 1)
            complaint = re.sub("a valid dictionary.*", "an object", complaint)
    return f"{field} {complaint}, not {shown(first['input'])}{more}"


def readable_json(document: object) -> str:
    """JSON text with a field a line and, in lists, an object a line; floats read back the same."""
    return _readable(document, 0) + "\n"


def _readable(value: object, depth: int) -> str:
    inner, outer = "  " * (depth + 1), "  " * depth
    if isinstance(value, dict) and value:
        fields = [f"{inner}{json.dumps(k)}: {_readable(v, depth + 1)}" for k, v in value.items()]
        return "{\n" + ",\n".join(fields) + f"\n{outer}}}"
    if isinstance(value, list) and value and isinstance(value[0], list | dict):
        dump = _readable if isinstance(value[0], list) else _one_line
        return "[\n" + ",\n".join(inner + dump(v, depth + 1) for v in value) + f"\n{outer}]"
    return _one_line(value, depth)


def _one_line(value: object, _depth: int) -> str:
    return json.dumps(value, allow_nan=False)


def json_schema(model: type[BaseModel]) -> str:
    """The text of a model's JSON Schema file."""
    draft = "https://json-schema.org/draft/2020-12/schema"
    return json.dumps({"$schema": draft, **model.model_json_schema()}, indent=2) + "\n"
