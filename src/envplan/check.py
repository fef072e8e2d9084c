"""Any file of envplan: what it is, and the proof that it holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from envplan._documents import MAX_DOCUMENT_BYTES
from envplan._files import parse_json, read_bounded
from envplan._words import describe_profile, significant
from envplan.errors import EnvplanError, InputError, shown

__all__ = ["Checked", "check_file"]

_BLANK: Final = b"\xef\xbb\xbf \t\r\n"


class Checked(NamedTuple):
    """What a file is, and a sentence for everything that was proved of it."""

    kind: str
    proved: list[str]


class _Given(NamedTuple):
    """A file that is to be checked, and what was said about it.

    Attributes:
        document: its JSON value; None of a table.
        profile: where its profile is, if it has moved.
    """

    file: Path
    document: Any
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
    document = None
    if text.startswith((b"{", b"[")):
        document = parse_json(data, file)
        schema = document.get("schema") if isinstance(document, dict) else None
        if not isinstance(schema, str) or schema not in _DOCUMENTS:
            raise InputError(f"is no file of envplan: its schema is {shown(schema)}", path=file)
        kind, check = _DOCUMENTS[schema]
    else:
        kind, check = next(_TABLES[start] for start in _TABLES if text.startswith(start))
    try:
        return Checked(kind, check(_Given(file, document, profile, force, progress)))
    except EnvplanError as error:
        if isinstance(error, InputError) and error.path is not None:
            raise
        raise InputError(str(error), path=file) from error


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
        f"{len(profile.classes)} classes, {len(profile.curves)} configurations, no holes",
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
        f"{len(applied.instances)} instances on {applied.nodes} nodes, no GPU used twice",
        f"clocks were checked against those of: {applied.clocks_source}",
    ]


_Check = Callable[[_Given], list[str]]

#: What a JSON file is, by its field `schema`.
_DOCUMENTS: Final[dict[str, tuple[str, _Check]]] = {
    "envplan/plan/v1": ("plan", _plan),
    "envplan/freqplan/v1": ("frequency plan", _frequency_plan),
    "envplan/frontier/v1": ("frontier", _frontier),
    "envplan/dag/v1": ("DAG", _dag),
    "envplan/serving-plan/v1": ("serving plan", _serving_plan),
    "envplan/serving-clocks/v1": ("serving clocks", _serving_clocks),
}

#: What a table is, by how its header begins.
_TABLES: Final[dict[bytes, tuple[str, _Check]]] = {
    b"iteration_time_s": ("frontier", _frontier_table),
    b"tp,": ("serving profile", _serving_profile),
    b"class,": ("serving profile", _serving_profile),
    b"": ("profile", _profile),
}
