"""`envplan check`: what a file is, and whether it holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from envplan.cli.options import ForceOption, OutputOptions, ProfileOption


def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Any file of envplan.")],
    show: OutputOptions,
    profile: ProfileOption = None,
    force: ForceOption = False,
) -> None:
    """Check any file of envplan and say what was proved. Exits with 2 if it does not hold.

    A plan is replayed, priced again from its profile, and its lower bound is proved anew.

    \b
    Example:
      envplan check plan.json
      envplan check profile.csv
    """
    from envplan.check import check_file
    from envplan.cli.output import print_json, progress_bar, say

    with progress_bar("Tracing the frontier again", quiet=show.quiet) as progress:
        checked = check_file(file, profile=profile, force=force, progress=progress)
    if show.json:
        print_json({"file": str(file), **checked._asdict()})
    elif not show.quiet:
        say(f"{file}: {checked.kind}, holds")
        for line in checked.proved:
            say(f"  {line}")
<<<<<<< HEAD
=======


def _check(
    file: Path, profile: str | None, force: bool, progress: _Progress | None
) -> tuple[str, list[str]]:
    """What the file is and what was proved of it, by its content."""
    head = _head(file)
    if not head.strip(b"\xef\xbb\xbf \t\r\n"):
        raise InputError("is empty", path=file)
    if not head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith((b"{", b"[")):
        if head.lstrip(b"\xef\xbb\xbf").startswith(b"iteration_time_s"):
            return "frontier", _check_frontier_csv(file)
        if head.lstrip(b"\xef\xbb\xbf").startswith((b"class,", b"tp,")):
            return "serving profile", _check_serving_profile(file)
        return "profile", _check_profile(file)

    from envplan.errors import shown
    from envplan.freqplan import FREQPLAN_SCHEMA, FrequencyPlan
    from envplan.pipeline.formats import DAG_SCHEMA
    from envplan.plan import PLAN_SCHEMA, read_json

    document = read_json(file)
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema == PLAN_SCHEMA:
        return "plan", _check_plan(document, file, profile, force, progress)
    if schema == FREQPLAN_SCHEMA:
        return "frequency plan", FrequencyPlan.from_document(document, path=file).check()
    if schema == DAG_SCHEMA:
        return "DAG", _check_dag(file)
    if schema == "envplan/serving-plan/v1":
        return "serving plan", _check_serving_plan(file, profile, force)
    if schema == "envplan/serving-clocks/v1":
        return "serving clocks", _check_serving_clocks(file)
    if schema == "envplan/frontier/v1":
        return "frontier", _check_frontier(document, file, profile, force, progress)
    raise InputError(f"is no file of envplan: its schema is {shown(schema)}", path=file)


def _head(file: Path) -> bytes:
    try:
        with file.open("rb") as stream:
            return stream.read(4096)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"cannot be read ({reason})", path=file) from None


def _check_profile(file: Path) -> list[str]:
    from envplan.cli.output import describe_profile, significant
    from envplan.profile import Profile

    profile = Profile.read_csv(file)
    tables = [
        profile.table(stage, name)
        for stage in range(profile.num_stages)
        for name in profile.instructions
        if profile.has(stage, name)
    ]
    clocks = sorted({int(mhz) for table in tables for mhz in table.frequency_mhz if mhz})
    span = f"between {clocks[0]} and {clocks[-1]} MHz" if clocks else "without a clock"
    fixed = sum(not table.frequency_mhz.any() for table in tables)
    constant = [f"{fixed} of the operations take the same time at any clock"] if fixed else []
    powers = profile.blocking_power_w
    waiting = (
        "blocking power " + ", ".join(significant(power, 3) for power in powers) + " W by stage"
        if powers
        else "no blocking rows: --blocking-power or 70 W will be used"
    )
    return [
        f"{describe_profile(profile)}: {profile.num_stages} stages with "
        f"{', '.join(profile.instructions)}",
        f"{sum(map(len, tables))} options {span}, all times and energies in range, no duplicates, "
        "no gaps",
        *constant,
        waiting,
    ]


def _check_plan(
    document: object, file: Path, profile: str | None, force: bool, progress: _Progress | None
) -> list[str]:
    from envplan.plan import Plan
    from envplan.verify import find_profile, verify_plan

    plan = Plan.from_document(document, path=file)
    source = _named_profile(profile) or find_profile(plan.profile, file)
    with naming(file):
        return verify_plan(plan, source, force=force, progress=progress)


def _named_profile(name: str | None) -> Profile | None:
    from envplan.profile import Profile

    return None if name is None else Profile.open(name)


def _check_serving_profile(file: Path) -> list[str]:
    from envplan.serving.profile import ServingProfile

    profile = ServingProfile.read_csv(file)
    return [
        f"{len(profile.classes)} classes, {len(profile.curves)} configurations, no holes",
        f"source: {profile.source or 'not said'}",
    ]


def _check_serving_plan(file: Path, profile: str | None, force: bool) -> list[str]:
    from envplan.serving.plan import ServingPlan

    plan = ServingPlan.load(file)
    with naming(file):
        return plan.check(plan.find_profile(profile), force=force)


def _check_serving_clocks(file: Path) -> list[str]:
    from envplan.serving.apply import ServingApplied

    applied = ServingApplied.load(file)
    return [
        f"{len(applied.instances)} instances on {applied.nodes} nodes, no GPU used twice",
        f"clocks were checked against those of: {applied.clocks_source}",
    ]


def _check_dag(file: Path) -> list[str]:
    from envplan.pipeline import Pipeline

    pipeline = Pipeline.from_dag_file(file)
    return [
        f"{len(pipeline.operations)} operations on {pipeline.num_stages} stages, no gaps",
        f"{len(pipeline.succ)} dependencies, stage order included, without a cycle",
        "all operations are connected",
    ]


def _check_frontier_csv(file: Path) -> list[str]:
    from envplan.cli.frontier_file import check_rows, read_rows

    return check_rows(read_rows(file), file)


def _check_frontier(
    document: object, file: Path, profile: str | None, force: bool, progress: _Progress | None
) -> list[str]:
    from envplan.cli.frontier_file import FrontierFile, check_curve, check_rows
    from envplan.verify import as_referenced, check_reference, find_profile, trace_job

    frontier = FrontierFile.from_document(document, file)
    source = _named_profile(profile) or find_profile(frontier.profile, file)
    with naming(file):
        proved = [check_reference(frontier.profile, source, force)]
        source = as_referenced(frontier.profile, source)
        traced = trace_job(frontier.job, source, progress)
    proved += check_rows(frontier.plans, file)
    return proved + check_curve(frontier, traced, file)
>>>>>>> serving
