"""Any file of envplan: what it is, and the proof that it holds."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from pydantic import FiniteFloat, create_model

from envplan._io.documents import MAX_DOCUMENT_BYTES
from envplan._io.files import is_file, parse_json, read_bounded
from envplan._io.tables import header_names, read_table
from envplan._io.words import counted, significant
from envplan.check.frontiers import check_curve, check_rows
from envplan.check.plans import verify_plan
from envplan.check.sites import verify_site
from envplan.costs.rate_file import read_rate
from envplan.enforce.clock_files import count_clocks
from envplan.enforce.freqplan import FrequencyPlan
from envplan.errors import InputError, naming, shown
from envplan.pipeline import Pipeline
from envplan.pipeline.imports.chrome import TraceMapping, read_chrome_traces
from envplan.pipeline.imports.torch_csv import read_torch_csv
from envplan.pipeline.operations import EXTRAS, LETTERS
from envplan.plan import Plan, check_reference, find_profile
from envplan.plan.frontier_file import FrontierFile, Row
from envplan.profile import Profile
from envplan.runtime.runlog import read_run_log
from envplan.simulation.cluster import read_slowdowns
from envplan.site import SitePlan
from envplan.site.model import SITE_SCHEMA
from envplan.solve import trace_job
from envplan.solve.doubts import doubt_profile
from envplan.sweep import read_config
from envplan.sweep.table import read_rows
from envplan.units import duration_text

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
    columns = [name.strip(' "') for name in header_names(header)]
    document: Any = None
    told = (sign for sign in _KINDS if sign.startswith(".") and file.name.endswith(sign))
    sign = next(told, None)
    if sign is None and text.startswith((b"{", b"[")):
        document = parse_json(data, file)
        said = document if isinstance(document, dict) else {}
        sign = said.get("schema", "traceEvents" if "traceEvents" in said else None)
        if not (isinstance(sign, str) and sign in _KINDS):
            raise InputError(f"is no file of envplan: its schema is {shown(sign)}", path=file)
    elif sign is None:
        sign = next(filter(columns.__contains__, _KINDS), "")
        sign = "0F0" if re.fullmatch(r"\d+[fbiw]\d+", columns[0]) else sign
    kind, check = _KINDS[sign]
    with naming(file):
        proved = check(_Given(file, document, columns, profile, force, progress))
    made_from = document.get("profile") if isinstance(document, dict) else None
    if isinstance(made_from, dict):
        there = made_from.get("path")
        profile = profile or (str(file.parent / there) if there else made_from.get("name"))
    return Checked(kind, proved, profile)


_Check = Callable[[_Given], list[str]]
#: What a file is and its proof, by what tells it: how a name ends that begins with a dot, a schema,
#: or a column that kinds further down have not.
_KINDS: Final[dict[str, tuple[str, _Check]]] = {}


def _told_by(kind: str, *signs: str) -> Callable[[_Check], _Check]:
    """A proof of files of a kind, which these tell."""

    def told(check: _Check) -> _Check:
        _KINDS.update(dict.fromkeys(signs, (kind, check)))
        return check

    return told


@_told_by("site plan", SITE_SCHEMA)
def _site(given: _Given) -> list[str]:
    return verify_site(SitePlan.from_document(given.document), given.file)


@_told_by("sidecar", _SIDECAR)
def _sidecar(given: _Given) -> list[str]:
    table = Path(str(given.file).removesuffix(_SIDECAR) + ".csv")
    zipped = Path(f"{table}.gz")
    table = zipped if is_file(zipped) and not is_file(table) else table
    beside = check_file(table)
    return [f"it goes with {table}, a {beside.kind}, and was read with it", *beside.proved]


@_told_by("plan", "envplan/plan/v1")
def _plan(given: _Given) -> list[str]:
    plan = Plan.from_document(given.document, path=given.file)
    source = find_profile(plan.profile, given.file, given.profile)
    return verify_plan(plan, source, force=given.force, progress=given.progress)


@_told_by("frequency plan", "envplan/freqplan/v1")
def _frequency_plan(given: _Given) -> list[str]:
    return FrequencyPlan.from_document(given.document, path=given.file).check()


@_told_by("frontier", "envplan/frontier/v1")
def _frontier(given: _Given) -> list[str]:
    frontier = FrontierFile.from_document(given.document, path=given.file)
    source = find_profile(frontier.profile, given.file, given.profile)
    proved = [check_reference(frontier.profile, source, given.force)]
    traced = trace_job(frontier.job, source, given.progress, full=frontier.slower is not None)
    proved += check_rows(frontier.plans)
    return proved + check_curve(frontier, traced)


@_told_by("DAG", "envplan/dag/v1")
def _dag(given: _Given) -> list[str]:
    pipeline = Pipeline.from_dag_file(given.file)
    return [
        f"{len(pipeline.operations)} operations on {pipeline.num_stages} stages, no gaps",
        f"{len(pipeline.succ)} dependencies, stage order included, without a cycle",
        "all operations are connected",
    ]


@_told_by("serving plan", "envplan/serving-plan/v1")
def _serving_plan(given: _Given) -> list[str]:
    from envplan.serving.plan import ServingPlan

    plan = ServingPlan.load(given.file)
    return plan.check(plan.find_profile(given.profile), force=given.force)


@_told_by("serving clocks", "envplan/serving-clocks/v1")
def _serving_clocks(given: _Given) -> list[str]:
    from envplan.serving.apply import ServingApplied

    applied = ServingApplied.load(given.file)
    return [
        f"{counted(len(applied.instances), 'instance')} on {counted(applied.nodes, 'node')}, no "
        "GPU used twice",
        f"clocks were checked against those of: {applied.clocks_source}",
    ]


@_told_by("Chrome trace", "traceEvents")
def _chrome_trace(given: _Given) -> list[str]:
    name = r"^{} (?P<microbatch>\d+)( chunk (?P<chunk>\d+))?$"
    events = {instruction: name.format(instruction) for instruction in (*LETTERS, *EXTRAS)}
    read = read_chrome_traces([given.file], TraceMapping.of(instructions=events))
    return [
        f"{sum(map(len, read.orders))} operations of {read.num_microbatches} microbatches on "
        f"{len(read.orders)} stages, as `envplan schedule import` reads them",
        "no two operations of a stage overlap",
    ]


@_told_by("schedule", "0F0")
def _torch_csv(given: _Given) -> list[str]:
    read = read_torch_csv(given.file)
    return [f"{sum(map(len, read.orders))} operations on {len(read.orders)} ranks, none twice"]


@_told_by("sweep configuration", ".toml")
def _sweep_config(given: _Given) -> list[str]:
    return [f"{len(read_config(given.file).points)} points"]


@_told_by("run log", ".jsonl")
def _run_log(given: _Given) -> list[str]:
    lines = list(read_run_log([given.file]))
    steps = sum(line.event == "step" for line in lines)
    return [f"{len(lines)} lines of {len({line.rank for line in lines})} ranks, {steps} steps"]


@_told_by("sweep", ".parquet", "target_value")
def _sweep(given: _Given) -> list[str]:
    rows = read_rows(given.file)
    failed = sum(row.error is not None for row in rows)
    for number, row in enumerate(rows, 1):
        if (row.energy_j or 0.0) < (row.energy_lower_bound_j or 0.0):
            raise InputError(f"point {number}: energy_lower_bound_j lies above energy_j")
    return [
        f"{len(rows)} points, {failed} of them failed; every cell is what its column says",
        "no plan uses less than its lower bound",
    ]


@_told_by("requests", "timestamp", "arrived_at", "arrival_timestamp")
def _requests(given: _Given) -> list[str]:
    from envplan.serving.trace import Trace

    trace = Trace.read_csv(given.file)
    return [f"{len(trace)} requests over {trace.duration_s:g} s, in order of time"]


@_told_by("replay over time", "attained")
def _series(given: _Given) -> list[str]:
    columns: Any = dict.fromkeys(given.columns, (FiniteFloat, ...))
    read = read_table(given.file, create_model("Series", **columns), kind="a replay over time")
    return [f"{len(read)} minutes, every cell a number"]


@_told_by("stragglers", "slowdown")
def _stragglers(given: _Given) -> list[str]:
    return [f"{len(read_slowdowns(given.file, _MOST_REPLICAS))} iterations, none missing"]


@_told_by("rates", "price", "carbon")
def _rates(given: _Given) -> list[str]:
    kinds: tuple[Literal["price", "carbon"], ...] = ("price", "carbon")
    rates = {kind: read_rate(str(given.file), kind) for kind in kinds if kind in given.columns}
    return [
        f"{kind}: {significant(rate.mean)} a kWh on average, over {duration_text(rate.lasts_s)} "
        "without a gap"
        for kind, rate in rates.items()
    ]


@_told_by("clocks", ".py", ".txt", "frequency_mhz")
def _clocks(given: _Given) -> list[str]:
    return [
        f"clocks of {len(counts := count_clocks(given.file))} stages, {sum(counts)} in all, in MHz",
        "whether they fit a pipeline, `envplan solve --clocks` says",
    ]


@_told_by("frontier", "iteration_time_s")
def _frontier_table(given: _Given) -> list[str]:
    return check_rows(list(read_table(given.file, Row, kind="a frontier").rows()))


@_told_by("serving profile", "tp", "class")
def _serving_profile(given: _Given) -> list[str]:
    from envplan.serving.profile import ServingProfile

    profile = ServingProfile.read_csv(given.file)
    return [
        f"{counted(len(profile.classes), 'class')}, "
        f"{counted(len(profile.curves), 'configuration')}, no holes",
        f"source: {profile.source or 'not said'}",
    ]


@_told_by("profile", "")
def _profile(given: _Given) -> list[str]:
    profile = Profile.read_csv(given.file)
    doubt_profile(profile)
    tables = profile.tables()
    clocks = sorted({int(mhz) for table in tables for mhz in table.frequency_mhz if mhz})
    span = f"between {clocks[0]} and {clocks[-1]} MHz" if clocks else "without a clock"
    fixed = sum(not table.frequency_mhz.any() for table in tables)
    constant = [f"{fixed} of the operations take the same time at any clock"] if fixed else []
    powers = ", ".join(significant(power, 3) for power in profile.blocking_power_w or ())
    return [
        f"{profile.describe()}: {profile.num_stages} stages with {', '.join(profile.instructions)}",
        f"{sum(map(len, tables))} options {span}, all times and energies in range, no gaps",
        *constant,
        f"blocking power {powers} W by stage"
        if powers
        else "no blocking rows: --blocking-power or 70 W will be used",
    ]
