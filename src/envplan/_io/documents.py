"""JSON documents: the one reader and writer, and the base of values that are checked when made."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from envplan._io.completion import names_for_users
from envplan._io.files import AnyPath, atomic_write, parse_json, read_bounded
from envplan.errors import InputError, shown

#: A plan of 128 stages and 10,000 operations each takes 190 MB.
MAX_DOCUMENT_BYTES: Final = 256 * 2**20

#: The longest name of a field in an error message, in characters.
_LONGEST_NAME: Final = 80

#: What to do with a document where another kind is asked for, by its schema; added to an error.
_REMEDIES: Final = {
    "envplan/freqplan/v1": "; it is a frequency plan already, which training follows: give the "
    "plan that it was made from"
}

#: Names of models and documents that only the library uses.
_INNER_NAMES: Final = frozenset(
    {"of", "from_document", "schema_file", "schema_id", "schema_name", "writes_null", "kind"}
)

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
    stated_schema = document.get("schema")
    if schema is not None and stated_schema != schema:
        refuse_later_version(stated_schema, schema, path)
        remedy = _REMEDIES.get(stated_schema, "") if isinstance(stated_schema, str) else ""
        raise InputError(
            f"is not a {kind}: its schema is {shown(stated_schema)}, not {shown(schema)}{remedy}",
            path=path,
        )
    try:
        return TypeAdapter(model).validate_python(document)
    except ValidationError as error:
        raise InputError(first_problem(error, kind, model), path=path) from None


def refuse_later_version(stated: object, known: str, path: AnyPath | None) -> None:
    """Refuse a file of a version that only a later envplan reads.

    Args:
        stated: what its schema says, as in envplan/plan/v2.
        known: the schema of its kind, in the latest version that is known here.
        path: of the file, for errors.

    Raises:
        InputError: it is of a later version.
    """
    name, _, version = known.rpartition("/v")
    match = re.fullmatch(rf"{re.escape(name)}/v([0-9]{{1,9}})", str(stated))
    if match is None or int(match[1]) <= int(version):
        return
    raise InputError(
        f"is of version {match[1]} of its format ({stated}), which a later envplan wrote; this one "
        f"reads up to version {version}: pip install --upgrade envplan",
        path=path,
    )


def first_problem(error: ValidationError, kind: str, model: type[Any]) -> str:
    """Field and complaint of the first error of a document of some kind, in one line.

    Args:
        error: of the document.
        kind: what it is, for people.
        model: that it is checked by; a field that it does not know gets the one that is meant.
    """
    problem = error.errors(include_url=False)[0]
    field = _field_path(problem["loc"])
    num_further = error.error_count() - 1
    further = f" (and {num_further} more)" if num_further else ""
    match problem["type"]:
        case "missing":
            return f"{field} is missing{further}"
        case "extra_forbidden" | "unexpected_keyword_argument":
            name = str(problem["loc"][-1])
            return f"{field} is not a field of a {kind}{_field_meant(name, model)}{further}"
        case "value_error" if not field or isinstance(problem["input"], dict):
            return f"{field} {problem['ctx']['error']}{further}".strip()
        case "value_error":
            complaint = str(problem["ctx"]["error"])
        case _:
            complaint = problem["msg"].replace("Input should", "should", 1)
            complaint = re.sub("a (valid )?dictionary.*", "an object", complaint)
    return f"{field} {complaint}, not {shown(problem['input'])}{further}"


def _field_meant(name: str, model: type[Any]) -> str:
    """Words about the field of a model, or of one in it, that an unknown field may stand for."""
    names: set[str] = set()

    def collect(schema: object) -> None:
        if isinstance(schema, dict):
            properties = schema.get("properties")
            names.update(properties if isinstance(properties, dict) else ())
            for part in schema.values():
                collect(part)
        elif isinstance(schema, list):
            for part in schema:
                collect(part)

    collect(TypeAdapter(model).json_schema())
    names.discard(name)  # a field of another part
    similar = difflib.get_close_matches(name.lower().replace("-", "_"), names, n=1, cutoff=0.7)
    return f"; did you mean {similar[0]}?" if similar else ""


def _field_path(steps: Sequence[int | str]) -> str:
    """Where a field is in a document, as in pools[0].groups[1].tp."""
    path = ""
    for step in steps:
        path += f"[{step}]" if isinstance(step, int) else f".{_shortened(step)}"
    return path.removeprefix(".")


def _shortened(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 3] + "..."


def readable_json(value: object, depth: int = 0) -> str:
    """JSON text with a field a line and, in lists, an object a line; floats read back the same.

    Args:
        value: in JSON types.
        depth: by which lines after the first are indented, in steps of two spaces.
    """
    if isinstance(value, dict) and value:
        fields = []
        for name, field in value.items():
            fields.append(f"{json.dumps(name)}: {readable_json(field, depth + 1)}")
        return _indented("{", fields, "}", depth)
    if isinstance(value, list) and value:
        if isinstance(value[0], list):
            lists = [readable_json(item, depth + 1) for item in value]
            return _indented("[", lists, "]", depth)
        if isinstance(value[0], dict):
            objects = [json.dumps(item, allow_nan=False) for item in value]
            return _indented("[", objects, "]", depth)
    return json.dumps(value, allow_nan=False)


def _indented(opening: str, items: Sequence[str], closing: str, depth: int) -> str:
    """Items in brackets, one a line."""
    indent = "  " * depth
    lines = ",\n".join(f"{indent}  {item}" for item in items)
    return f"{opening}\n{lines}\n{indent}{closing}"


Index = Annotated[int, Field(ge=0, lt=2**31)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
GpuCount = Annotated[int, Field(ge=1, le=10**6)]
Seconds = Annotated[float, Field(ge=0)]
Joules = Annotated[float, Field(ge=0)]
Watts = Annotated[float, Field(ge=0)]


class Model(BaseModel):
    """A frozen value whose fields are checked when it is made; unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @classmethod
    def of(cls, **fields: Any) -> Self:
        """The value with these fields.

        Raises:
            InputError: a field is missing, unknown or out of range.
        """
        try:
            return cls(**fields)
        except ValidationError as error:
            raise InputError(first_problem(error, cls.__name__.lower(), cls)) from None

    def __dir__(self) -> list[str]:
        """Names for a user: without those of pydantic, and without exact integers."""
        return names_for_users(super().__dir__(), _INNER_NAMES)


class Document(Model):
    """A JSON file: its model has a field `schema_id`, written as "schema".

    Attributes:
        kind: what it is, for people.
        schema_name: what its field "schema" says.
        writes_null: fields that say nothing are written as null; else they are left out.
    """

    kind: ClassVar[str]
    schema_name: ClassVar[str]
    writes_null: ClassVar[bool] = False

    def to_json(self) -> str:
        """The text of the file: readable, with an object of a list in a line."""
        return (
            readable_json(self.model_dump(by_alias=True, exclude_none=not self.writes_null)) + "\n"
        )

    def save(self, path: AnyPath) -> None:
        """Write the file, whole or not at all.

        Raises:
            InputError: it cannot be written there.
        """
        atomic_write(path, self.to_json())

    @classmethod
    def load(cls, path: AnyPath) -> Self:
        """Read a file and check its form; `envplan check` proves what it says.

        Raises:
            InputError: the file cannot be read, is larger than 256 MiB, is not JSON (says line and
                column) or not of this kind (names the field).
        """
        return cls.from_document(read_json(path), path=path)

    @classmethod
    def from_document(cls, document: object, *, path: AnyPath | None = None) -> Self:
        """The same from a JSON value as parsed.

        Args:
            path: the file that errors shall name.

        Raises:
            InputError: it is not of this kind; names the field.
        """
        return parse_document(document, cls, kind=cls.kind, schema=cls.schema_name, path=path)

    @classmethod
    def schema_file(cls) -> Path:
        """Where the JSON Schema of the format is."""
        name, version = cls.schema_name.split("/")[1:]
        return Path(__file__).parents[1] / "schemas" / f"{name}.{version}.schema.json"


def check_stated(where: str, stated: object, true: object, tolerance: float = 0.0) -> None:
    """Check that a file states what was recomputed.

    Args:
        where: what to call it in an error, such as "predicted".
        stated: a number, or a model or list of them, which are compared one by one.
        true: the same, as recomputed.
        tolerance: how far numbers may lie apart, relatively.

    Raises:
        InputError: the first number that differs; names it.
    """
    if stated == true:
        return
    if isinstance(stated, BaseModel) and isinstance(true, type(stated)):
        for name in type(stated).model_fields:
            check_stated(f"{where}.{name}", getattr(stated, name), getattr(true, name), tolerance)
    elif isinstance(stated, list) and isinstance(true, list) and len(stated) == len(true):
        for number, (stated_item, true_item) in enumerate(zip(stated, true, strict=True)):
            check_stated(f"{where}[{number}]", stated_item, true_item, tolerance)
    elif not _are_close(stated, true, tolerance):
        raise InputError(f"{where} is {_describe(stated)}; recomputed it is {_describe(true)}")


def _are_close(stated: object, true: object, tolerance: float) -> bool:
    if not isinstance(stated, float) or not isinstance(true, float):
        return False
    return math.isclose(stated, true, rel_tol=tolerance, abs_tol=tolerance / 1000)


def _describe(value: object) -> str:
    return f"a list of {len(value)} values" if isinstance(value, list) else repr(value)
