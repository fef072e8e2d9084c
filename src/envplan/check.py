"""Any file of envplan: what it is, and the proof that it holds."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from envplan._documents import MAX_DOCUMENT_BYTES
from envplan._files import is_file, parse_json, read_bounded
from envplan._words import counted, describe_profile, significant
from envplan.errors import InputError, naming, shown

__all__ = ["Checked", "check_file"]

_BLANK: Final = b"\xef\xbb\xbf \t\r\n"
_LONGEST_HEADER: Final = 100_000
_MOST_REPLICAS: Final = 10**6
_SIDECAR: Final = ".meta.json"


class Checked(NamedTuple):
    """What a file is, and a sentence for everything that was proved of it.

    Attributes:
        profile: the path or name of the profile that it was made from, where it says one.
    """

    kind: str
    proved: list[str]
    profile: str | None = None


class _Given(NamedTuple):
    """A file that is to be checked, and what was said about it.

    Attributes:
        document: its JSON value; None of anything else.
        columns: of a table, in small letters; of anything else the words of its first line.
        profile: where its profile is, if it has moved.
    """

    file: Path
    document: Any
    columns: list[str]
    profile: str | None
    force: bool
    progress: Callable[[int, int], None] | None

    def source(self, reference: Any) -> Any:
        """The profile that the file was made from."""
        from envplan.plan import find_profile
        from envplan.profile import Profile

        if self.profile is not None:
            return Profile.open(self.profile)
        return find_profile(reference, self.file)


def check_file(
    file: Path,
    *,
    profile: str | None = None,
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Checked:
    """Prove a file from nothing but itself and the files that it refers to.

    Args:
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
    header = text[:_LONGEST_HEADER].splitlines()[0].decode(errors="replace").lower()
    columns = [name.strip(' "') for name in header.split(",")]
    document = None
    named = next((row for end, row in _BY_NAME.items() if file.name.endswith(end)), None)
    if named is not None:
        kind, check = named
    elif text.startswith((b"{", b"[")):
        document = parse_json(data, file)
        kind, check = _document_kind(document, file)
    elif re.fullmatch(r"\d+[fbiw]\d+", columns[0]):
        kind, check = "schedule", _torch_csv
    else:
        kind, check = next(_TABLES[name] for name in _TABLES if name in columns or not name)
    with naming(file):
        proved = check(_Given(file, document, columns, profile, force, progress))
    made_from = document.get("profile") if isinstance(document, dict) else None
    if isinstance(made_from, dict):
        there = made_from.get("path")
        profile = profile or (str(file.parent / there) if there else made_from.get("name"))
    return Checked(kind, proved, profile)


def _document_kind(document: Any, file: Path) -> tuple[str, _Check]:
    """Raises: InputError: a JSON value is no document of envplan."""
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema is None and isinstance(document, dict) and "traceEvents" in document:
        return "Chrome trace", _chrome_trace
    if not isinstance(schema, str) or schema not in _DOCUMENTS:
        raise InputError(f"is no file of envplan: its schema is {shown(schema)}", path=file)
    return _DOCUMENTS[schema]


def _profile(given: _Given) -> list[str]:
    from envplan.profile import Profile
    from envplan.solve.doubts import doubt_profile

    profile = Profile.read_csv(given.file)
    doubt_profile(profile)
    tables = profile.tables()
    clocks = sorted({int(mhz) for table in tables for mhz in table.frequency_mhz if mhz})
    span = f"between {clocks[0]} and {clocks[-1]} MHz" if clocks else "without a clock"
    fixed = sum(not table.frequency_mhz.any() for table in tables)
    constant = [f"{fixed} of the operations take the same time at any clock"] if fixed else []
    powers = ", ".join(significant(power, 3) for power in profile.blocking_power_w or ())
    return [
        f"{describe_profile(profile)}: {profile.num_stages} stages with "
        f"{', '.join(profile.instructions)}",
        f"{sum(map(len, tables))} options {span}, all times and energies in range, no gaps",
        *constant,
        f"blocking power {powers} W by stage"
        if powers
        else "no blocking rows: --blocking-power or 70 W will be used",
    ]


def _plan(given: _Given) -> list[str]:
    from envplan.plan import Plan
    from envplan.verify import verify_plan

    plan = Plan.from_document(given.document, path=given.file)
    source = given.source(plan.profile)
    return verify_plan(plan, source, force=given.force, progress=given.progress)


def _frequency_plan(given: _Given) -> list[str]:
    from envplan.enforce.freqplan import FrequencyPlan

    return FrequencyPlan.from_document(given.document, path=given.file).check()


def _dag(given: _Given) -> list[str]:
    from envplan.pipeline import Pipeline

    pipeline = Pipeline.from_dag_file(given.file)
    return [
        f"{len(pipeline.operations)} operations on {pipeline.num_stages} stages, no gaps",
        f"{len(pipeline.succ)} dependencies, stage order included, without a cycle",
        "all operations are connected",
    ]


def _frontier_table(given: _Given) -> list[str]:
    from envplan.frontier_file import check_rows, read_rows

    return check_rows(read_rows(given.file))


def _frontier(given: _Given) -> list[str]:
    from envplan.frontier_file import FrontierFile, check_curve, check_rows
    from envplan.plan import as_referenced, check_reference
    from envplan.solve import trace_job

    frontier = FrontierFile.from_document(given.document, path=given.file)
    source = given.source(frontier.profile)
    proved = [check_reference(frontier.profile, source, given.force)]
    traced = trace_job(frontier.job, as_referenced(frontier.profile, source), given.progress)
    proved += check_rows(frontier.plans)
    return proved + check_curve(frontier, traced)


def _serving_profile(given: _Given) -> list[str]:
    from envplan.serving.profile import ServingProfile

    profile = ServingProfile.read_csv(given.file)
    return [
        f"{counted(len(profile.classes), 'class')}, "
        f"{counted(len(profile.curves), 'configuration')}, no holes",
        f"source: {profile.source or 'not said'}",
    ]


def _serving_plan(given: _Given) -> list[str]:
    from envplan.serving.plan import ServingPlan

    plan = ServingPlan.load(given.file)
    return plan.check(plan.find_profile(given.profile), force=given.force)


def _serving_clocks(given: _Given) -> list[str]:
    from envplan.serving.apply import ServingApplied

    applied = ServingApplied.load(given.file)
    return [
        f"{counted(len(applied.instances), 'instance')} on {counted(applied.nodes, 'node')}, no "
        "GPU used twice",
        f"clocks were checked against those of: {applied.clocks_source}",
    ]


def _sidecar(given: _Given) -> list[str]:
    table = Path(str(given.file).removesuffix(_SIDECAR) + ".csv")
    zipped = Path(f"{table}.gz")
    table = zipped if is_file(zipped) and not is_file(table) else table
    beside = check_file(table)
    return [f"it goes with {table}, a {beside.kind}, and was read with it", *beside.proved]


def _chrome_trace(given: _Given) -> list[str]:
    from envplan.pipeline.imports import TraceMapping, read_chrome_traces
    from envplan.pipeline.schedules import EXTRAS, LETTERS

    name = r"^{} (?P<microbatch>\d+)( chunk (?P<chunk>\d+))?$"
    events = {instruction: name.format(instruction) for instruction in (*LETTERS, *EXTRAS)}
    read = read_chrome_traces([given.file], TraceMapping.of(instructions=events))
    return [
        f"{sum(map(len, read.orders))} operations of {read.num_microbatches} microbatches on "
        f"{len(read.orders)} stages, as `envplan schedule import` reads them",
        "no two operations of a stage overlap",
    ]


def _torch_csv(given: _Given) -> list[str]:
    from envplan.pipeline.imports import read_torch_csv

    read = read_torch_csv(given.file)
    return [f"{sum(map(len, read.orders))} operations on {len(read.orders)} ranks, none twice"]


def _sweep(given: _Given) -> list[str]:
    from envplan.sweep.table import read_rows

    rows = read_rows(given.file)
    failed = sum(row.error is not None for row in rows)
    for number, row in enumerate(rows, 1):
        if (row.energy_j or 0.0) < (row.energy_lower_bound_j or 0.0):
            raise InputError(f"point {number}: energy_lower_bound_j lies above energy_j")
    return [
        f"{len(rows)} points, {failed} of them failed; every cell is what its column says",
        "no plan uses less than its lower bound",
    ]


def _sweep_config(given: _Given) -> list[str]:
    from envplan.sweep import read_config

    return [f"{len(read_config(given.file).points)} points"]


def _run_log(given: _Given) -> list[str]:
    from envplan.runtime.runlog import read_run_log

    lines = list(read_run_log([given.file]))
    steps = sum(line["event"] == "step" for line in lines)
    return [f"{len(lines)} lines of {len({line['rank'] for line in lines})} ranks, {steps} steps"]


def _clocks(given: _Given) -> list[str]:
    from envplan.enforce.given_clocks import count_clocks

    return [
        f"clocks of {len(counts := count_clocks(given.file))} stages, {sum(counts)} in all, in MHz",
        "whether they fit a pipeline, `envplan solve --clocks` says",
    ]


def _rates(given: _Given) -> list[str]:
    from envplan.costs.rates import read_rate
    from envplan.units import duration_text

    kinds: tuple[Literal["price", "carbon"], ...] = ("price", "carbon")
    rates = {kind: read_rate(str(given.file), kind) for kind in kinds if kind in given.columns}
    return [
        f"{kind}: {significant(rate.mean)} a kWh on average, over {duration_text(rate.lasts_s)} "
        "without a gap"
        for kind, rate in rates.items()
    ]


def _stragglers(given: _Given) -> list[str]:
    from envplan.cluster import read_slowdowns

    return [f"{len(read_slowdowns(given.file, _MOST_REPLICAS))} iterations, none missing"]


def _requests(given: _Given) -> list[str]:
    from envplan.serving.trace import Trace

    trace = Trace.read_csv(given.file)
    return [f"{len(trace)} requests over {trace.duration_s:g} s, in order of time"]


def _series(given: _Given) -> list[str]:
    from pydantic import FiniteFloat, create_model

    from envplan._tables import read_table

    columns: Any = dict.fromkeys(given.columns, (FiniteFloat, ...))
    read = read_table(given.file, create_model("Series", **columns), kind="a replay over time")
    return [f"{len(read)} minutes, every cell a number"]


_Check = Callable[[_Given], list[str]]

#: What a file is by how its name ends, where its content does not tell.
_BY_NAME: Final[dict[str, tuple[str, _Check]]] = {
    _SIDECAR: ("sidecar", _sidecar),
    ".toml": ("sweep configuration", _sweep_config),
    ".parquet": ("sweep", _sweep),
    ".jsonl": ("run log", _run_log),
    ".py": ("clocks", _clocks),
    ".txt": ("clocks", _clocks),
}

#: What a JSON file is, by its field `schema`.
_DOCUMENTS: Final[dict[str, tuple[str, _Check]]] = {
    "envplan/plan/v1": ("plan", _plan),
    "envplan/freqplan/v1": ("frequency plan", _frequency_plan),
    "envplan/frontier/v1": ("frontier", _frontier),
    "envplan/dag/v1": ("DAG", _dag),
    "envplan/serving-plan/v1": ("serving plan", _serving_plan),
    "envplan/serving-clocks/v1": ("serving clocks", _serving_clocks),
}

#: What a table is, by a column that those further down have not.
_TABLES: Final[dict[str, tuple[str, _Check]]] = {
    "target_value": ("sweep", _sweep),
    "timestamp": ("requests", _requests),
    "arrived_at": ("requests", _requests),
    "arrival_timestamp": ("requests", _requests),
    "attained": ("replay over time", _series),
    "slowdown": ("stragglers", _stragglers),
    "price": ("rates", _rates),
    "carbon": ("rates", _rates),
    "frequency_mhz": ("clocks", _clocks),
    "iteration_time_s": ("frontier", _frontier_table),
    "tp": ("serving profile", _serving_profile),
    "class": ("serving profile", _serving_profile),
    "": ("profile", _profile),
}
