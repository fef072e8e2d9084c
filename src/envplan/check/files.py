"""Any file of envplan: what it is, and the proof that it holds."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple

from envplan._io.documents import MAX_DOCUMENT_BYTES, refuse_later_version
from envplan._io.files import is_file, parse_json, read_bounded
from envplan._io.markup import read_toml
from envplan._io.tables import header_names
from envplan.check import provers
from envplan.check.provers import OpenedFile
from envplan.check.sources import Sources
from envplan.check.unproved import fields_not_proved, not_proved
from envplan.enforce.order_file import ORDER_SCHEMA
from envplan.errors import InputError, naming, shown
from envplan.site.model import SITE_SCHEMA

__all__ = ["Checked", "check_file", "kind_of_file"]

_BLANK: Final = b"\xef\xbb\xbf \t\r\n"
_LONGEST_HEADER: Final = 100_000
_SIDECAR: Final = ".meta.json"
#: What is drawn, by how its file begins, in small letters.
_DRAWINGS: Final = {
    b"<!doctype html": "web page",
    b"<html": "web page",
    b"<?xml": "picture",
    b"<svg": "picture",
    b"\x89png": "picture",
    b"%pdf": "picture",
}
_LONGEST_MARK: Final = max(map(len, _DRAWINGS))


class Checked(NamedTuple):
    """A file that was proved.

    Attributes:
        kind: the name of its kind.
        proved: a sentence for everything that was proved of it.
        profile: the path or name of the profile that it was made from, where it says one.
        not_proved: names of its fields that nothing recomputes; "*" if that is all of them.
    """

    kind: str
    proved: list[str]
    profile: str | None = None
    not_proved: Sequence[str] = ()


Prover = Callable[[OpenedFile], list[str]]
SourceFinder = Callable[[OpenedFile], Sources | None]


@dataclass(frozen=True)
class FileKind:
    """A kind of file, how it is recognized, and its proof.

    Attributes:
        name: what people call it.
        prove: its proof.
        find_sources: the files beside it that it was made from, which prove more of it.
        suffixes: how names of such files end.
        schemas: what `schema` says in such documents.
        toml_key: a table that such TOML files have; "": it does not matter.
        keys: of such documents without a schema.
        columns: one of these is in the first line of such tables.
        first_cell: a pattern of the first cell of such tables.
    """

    name: str
    prove: Prover
    find_sources: SourceFinder | None = None
    suffixes: tuple[str, ...] = ()
    schemas: tuple[str, ...] = ()
    toml_key: str = ""
    keys: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    first_cell: str = ""

    def has_suffix_of(self, path: Path) -> bool:
        """Whether a file's name ends as those of this kind, and it has their table."""
        if not path.name.endswith(self.suffixes):
            return False
        return not self.toml_key or self.toml_key in read_toml(path)

    def has_document(self, document: Any) -> bool:
        """Whether a JSON value is a document of this kind."""
        if not isinstance(document, dict):
            return False
        if "schema" in document:
            return document["schema"] in self.schemas
        return any(key in document for key in self.keys)

    def has_table(self, columns: tuple[str, ...]) -> bool:
        """Whether a table with these columns is of this kind."""
        if self.first_cell and re.fullmatch(self.first_cell, columns[0]):
            return True
        return any(column in columns for column in self.columns)


def check_file(
    file: Path,
    *,
    profile: str | None = None,
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Checked:
    """Prove a file from nothing but itself and the files that it refers to.

    Args:
        file: what is to be proved.
        profile: path or name of the profile that a plan or frontier was made from, if it has moved.
        force: go on though that has changed since.
        progress: as for trace_frontier, which is run again to prove lower bounds.

    Raises:
        InputError: it is no file of envplan, or does not hold; says where.
    """
    data = read_bounded(file, MAX_DOCUMENT_BYTES)
    text = data.lstrip(_BLANK)
    if not text:
        raise InputError("is empty", path=file)
    drawing = _drawing_or_none(text)
    if drawing is not None:
        raise InputError(f"is a {drawing}, which states nothing that can be proved", path=file)
    columns = _column_names(text)
    kind = _first_kind(lambda kind: kind.has_suffix_of(file))
    document: Any = None
    if kind is None and text.startswith((b"{", b"[")):
        document = parse_json(data, file)
        kind = _first_kind(lambda kind: kind.has_document(document))
        if kind is None:
            schema = document.get("schema") if isinstance(document, dict) else None
            for known in chain.from_iterable(kind.schemas for kind in KINDS):
                refuse_later_version(schema, known, file)
            raise InputError(f"is no file of envplan: its schema is {shown(schema)}", path=file)
    if kind is None:
        kind = _first_kind(lambda kind: kind.has_table(columns)) or PROFILE
    opened = OpenedFile(file, document, columns, profile, force, progress)
    with naming(file):
        proved = kind.prove(opened)
        sources = None if kind.find_sources is None else kind.find_sources(opened)
        if sources is not None:
            proved += sources.prove()
    patterns = fields_not_proved(kind.name, document) if sources is None else sources.not_proved
    trusted = not_proved(patterns, document, columns)
    return Checked(kind.name, proved, profile or _named_profile(document, file), trusted)


def kind_of_file(file: Path) -> str | None:
    """The name of a file's kind; None where it cannot be told, or it is no file of envplan."""
    try:
        data = read_bounded(file, MAX_DOCUMENT_BYTES)
        text = data.lstrip(_BLANK)
        drawing = _drawing_or_none(text)
        if drawing is not None:
            return drawing
        kind = _first_kind(lambda kind: kind.has_suffix_of(file))
        if kind is None and text.startswith(b"{"):
            document = parse_json(data, file)
            kind = _first_kind(lambda kind: kind.has_document(document))
        elif kind is None and text:
            columns = _column_names(text)
            kind = _first_kind(lambda kind: kind.has_table(columns))
            if kind is None and {"stage", "instruction", "frequency"} <= set(columns):
                kind = PROFILE
    except InputError:
        return None
    return None if kind is None else kind.name


def _drawing_or_none(text: bytes) -> str | None:
    """What is drawn in a file that begins so: envplan writes pages and pictures, too."""
    beginning = text[:_LONGEST_MARK].lower()
    for mark, name in _DRAWINGS.items():
        if beginning.startswith(mark):
            return name
    return None


def _column_names(text: bytes) -> tuple[str, ...]:
    """The names in the first line of a text, as if it were a table, in small letters."""
    header = text[:_LONGEST_HEADER].splitlines()[0].decode(errors="replace").lower()
    return tuple(name.strip(' "') for name in header_names(header))


def _first_kind(is_wanted: Callable[[FileKind], bool]) -> FileKind | None:
    """The first kind that fits; None where none does."""
    return next(filter(is_wanted, KINDS), None)


def _named_profile(document: Any, file: Path) -> str | None:
    """The path or name of the profile that a document says it was made from."""
    reference = document.get("profile") if isinstance(document, dict) else None
    if not isinstance(reference, dict):
        return None
    path, name = reference.get("path"), reference.get("name")
    return str(file.parent / path) if path else name


def prove_sidecar(file: OpenedFile) -> list[str]:
    """The table beside a sidecar, which is read with it."""
    table = Path(str(file.path).removesuffix(_SIDECAR) + ".csv")
    zipped = Path(f"{table}.gz")
    if is_file(zipped) and not is_file(table):
        table = zipped
    checked = check_file(table)
    return [f"it goes with {table}, a {checked.kind}, and was read with it", *checked.proved]


#: The kind of a table that no other kind fits.
PROFILE: Final = FileKind("profile", provers.prove_profile)

#: Every kind; where several fit, the first counts.
KINDS: Final[tuple[FileKind, ...]] = (
    FileKind("sidecar", prove_sidecar, suffixes=(_SIDECAR,)),
    FileKind("site plan", provers.prove_site, schemas=(SITE_SCHEMA,)),
    FileKind("plan", provers.prove_plan, schemas=("envplan/plan/v1",)),
    FileKind(
        "frequency plan",
        provers.prove_frequency_plan,
        provers.sources_of_frequency_plan,
        schemas=("envplan/freqplan/v1",),
    ),
    FileKind("frontier", provers.prove_frontier, schemas=("envplan/frontier/v1",)),
    FileKind("order", provers.prove_order, schemas=(ORDER_SCHEMA,)),
    FileKind("DAG", provers.prove_dag, schemas=("envplan/dag/v1",)),
    FileKind("serving plan", provers.prove_serving_plan, schemas=("envplan/serving-plan/v1",)),
    FileKind(
        "serving clocks",
        provers.prove_serving_clocks,
        provers.sources_of_serving_clocks,
        schemas=("envplan/serving-clocks/v1",),
    ),
    FileKind("Chrome trace", provers.prove_chrome_trace, keys=("traceEvents",)),
    FileKind("schedule", provers.prove_torch_csv, first_cell=r"\d+[fbiw]\d+"),
    FileKind("jobs of a site", provers.prove_site_jobs, suffixes=(".toml",), toml_key="jobs"),
    FileKind(
        "list of request classes",
        provers.prove_classes,
        suffixes=(".toml",),
        toml_key="classes",
        keys=("classes",),
    ),
    FileKind("sweep configuration", provers.prove_sweep_config, suffixes=(".toml",)),
    FileKind("journal of a sweep", provers.prove_journal, suffixes=(".journal",)),
    FileKind("power limits", provers.prove_power_limits, schemas=("envplan/power-limits/v1",)),
    FileKind("power of jobs", provers.prove_job_power, suffixes=(".power.jsonl",)),
    FileKind("part of a profile", provers.prove_profile_part, schemas=("envplan/profile-part/v1",)),
    FileKind("run log", provers.prove_run_log, suffixes=(".jsonl",)),
    FileKind("sweep", provers.prove_sweep, suffixes=(".parquet",), columns=("target_value",)),
    FileKind(
        "requests",
        provers.prove_requests,
        columns=("timestamp", "arrived_at", "arrival_timestamp"),
    ),
    FileKind("replay over time", provers.prove_series, columns=("attained",)),
    FileKind("stragglers", provers.prove_stragglers, columns=("slowdown",)),
    FileKind("rates", provers.prove_rates, columns=("price", "carbon")),
    FileKind("power over time", provers.prove_power_over_time, columns=("power",)),
    FileKind("clocks", provers.prove_clocks, suffixes=(".py", ".txt"), columns=("frequency_mhz",)),
    FileKind("frontier table", provers.prove_frontier_table, columns=("iteration_time_s",)),
    FileKind("serving profile", provers.prove_serving_profile, columns=("tp", "class")),
    PROFILE,
)
