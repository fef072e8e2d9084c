"""The proof of each kind of file, by the reader that uses such a file.

Each returns a sentence for everything that it proves, and refuses the file where it does not hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import FiniteFloat, create_model

from envplan._io.documents import check_stated
from envplan._io.files import parse_json, read_bounded
from envplan._io.tables import read_table
from envplan._io.words import counted, enumerated, significant
from envplan.check.frontiers import check_curve, check_rows
from envplan.check.plans import verify_plan
from envplan.check.powers import StatedJobPower, StatedPowerLimits
from envplan.check.sites import verify_site
from envplan.check.sources import AppliedPlan, Sources
from envplan.costs.rate_file import read_rate
from envplan.enforce.clock_files import count_clocks
from envplan.enforce.freqplan import FrequencyPlan
from envplan.enforce.order_file import Order
from envplan.errors import InputError
from envplan.pipeline import Pipeline
from envplan.pipeline.imports.chrome import TraceMapping, read_chrome_traces
from envplan.pipeline.imports.torch_csv import read_torch_csv
from envplan.pipeline.operations import EXTRAS, LETTERS
from envplan.plan import Plan, check_reference, find_profile
from envplan.plan.frontier_file import FrontierFile, Row
from envplan.profile import Profile
from envplan.runtime.profile_parts import RankProfile
from envplan.runtime.run_log_reader import read_run_log
from envplan.simulation.cluster import read_slowdowns
from envplan.site import SiteJob, SitePlan, read_jobs
from envplan.solve import trace_job
from envplan.solve.doubts import doubt_profile
from envplan.sweep import read_config
from envplan.sweep.running import read_journal
from envplan.sweep.table import SweepRow, read_rows
from envplan.units import duration_text

_MAX_REPLICAS: Final = 10**6
#: So many jobs are named in a sentence.
_MOST_NAMED: Final = 8


@dataclass(frozen=True)
class OpenedFile:
    """A file that is to be proved, and what was said about it.

    Attributes:
        path: where it is.
        document: its JSON value; None of anything else.
        columns: of a table, in small letters; of anything else the words of its first line.
        profile: path or name of its profile, if that has moved.
        force: go on though the profile has changed since.
        progress: as for trace_frontier.
    """

    path: Path
    document: Any
    columns: tuple[str, ...]
    profile: str | None = None
    force: bool = False
    progress: Callable[[int, int], None] | None = None


def prove_site(file: OpenedFile) -> list[str]:
    """Powers, throughputs and orders of a site follow from its jobs."""
    return verify_site(SitePlan.from_document(file.document), file.path)


def prove_plan(file: OpenedFile) -> list[str]:
    """A plan holds by its profile."""
    plan = Plan.from_document(file.document, path=file.path)
    source = find_profile(plan.profile, file.path, file.profile)
    return verify_plan(plan, source, force=file.force, progress=file.progress)


def prove_frequency_plan(file: OpenedFile) -> list[str]:
    """A frequency plan agrees with itself."""
    return FrequencyPlan.from_document(file.document, path=file.path).check()


def sources_of_frequency_plan(file: OpenedFile) -> Sources | None:
    """The plan that a frequency plan was made from; None where it is not beside it."""
    freqplan = FrequencyPlan.from_document(file.document, path=file.path)
    return AppliedPlan.find(
        freqplan, file.path, file.profile, force=file.force, progress=file.progress
    )


def prove_frontier(file: OpenedFile) -> list[str]:
    """A frontier is that of its job, traced again."""
    frontier = FrontierFile.from_document(file.document, path=file.path)
    source = find_profile(frontier.profile, file.path, file.profile)
    proved = [check_reference(frontier.profile, source, file.force)]
    traced = trace_job(frontier.job, source, file.progress, full=frontier.slower is not None)
    proved += check_rows(frontier.plans)
    return proved + check_curve(frontier, traced)


def prove_dag(file: OpenedFile) -> list[str]:
    """The operations of a DAG make a pipeline."""
    pipeline = Pipeline.from_dag_file(file.path)
    return [
        f"{len(pipeline.operations)} operations on {pipeline.num_stages} stages, no gaps",
        f"{len(pipeline.succ)} dependencies, stage order included, without a cycle",
        "all operations are connected",
    ]


def prove_serving_plan(file: OpenedFile) -> list[str]:
    """A serving plan holds by its profile."""
    from envplan.serving.plan import ServingPlan

    plan = ServingPlan.load(file.path)
    proved = plan.check(plan.find_profile(file.profile), force=file.force)
    predicted = plan.predicted
    bound_w, baseline = predicted.power_lower_bound_w, predicted.baseline
    if bound_w and predicted.gap is not None:
        gap = max(0.0, predicted.power_w / bound_w - 1)
        check_stated("predicted.gap", predicted.gap, gap, 1e-6)
    if baseline is not None and predicted.savings_percent is not None:
        savings_percent = 100 * (1 - predicted.power_w / baseline.power_w)
        check_stated("predicted.savings_percent", predicted.savings_percent, savings_percent, 1e-6)
    return proved


def prove_serving_clocks(file: OpenedFile) -> list[str]:
    """The clocks of a serving fleet agree with themselves."""
    from envplan.serving.apply import ServingApplied

    applied = ServingApplied.load(file.path)
    return [
        f"{counted(len(applied.instances), 'instance')} on {counted(applied.nodes, 'node')}, no "
        "GPU used twice",
        f"clocks were checked against those of: {applied.clocks_source}",
    ]


def sources_of_serving_clocks(file: OpenedFile) -> Sources | None:
    """The plan that serving clocks were made from; None where it is not beside them."""
    from envplan.check.serving_sources import AppliedServingPlan
    from envplan.serving.apply import ServingApplied

    applied = ServingApplied.load(file.path)
    return AppliedServingPlan.find(applied, file.path, file.profile, force=file.force)


def prove_chrome_trace(file: OpenedFile) -> list[str]:
    """A Chrome trace has the operations of a pipeline."""
    name = r"^{} (?P<microbatch>\d+)( chunk (?P<chunk>\d+))?$"
    events = {instruction: name.format(instruction) for instruction in (*LETTERS, *EXTRAS)}
    read = read_chrome_traces([file.path], TraceMapping.of(instructions=events))
    num_operations = sum(map(len, read.orders))
    return [
        f"{num_operations} operations of {read.num_microbatches} microbatches on "
        f"{len(read.orders)} stages, as `envplan schedule import` reads them",
        "no two operations of a stage overlap",
    ]


def prove_torch_csv(file: OpenedFile) -> list[str]:
    """A schedule of PyTorch has the operations of a pipeline."""
    read = read_torch_csv(file.path)
    return [f"{sum(map(len, read.orders))} operations on {len(read.orders)} ranks, none twice"]


def prove_sweep_config(file: OpenedFile) -> list[str]:
    """The file of a sweep has points."""
    return [counted(len(read_config(file.path).points), "point")]


def prove_run_log(file: OpenedFile) -> list[str]:
    """Every line of a run log is one."""
    lines = list(read_run_log([file.path]))
    ranks = {line.rank for line in lines}
    num_steps = sum(line.event == "step" for line in lines)
    return [f"{len(lines)} lines of {len(ranks)} ranks, {num_steps} steps"]


def prove_order(file: OpenedFile) -> list[str]:
    """An order is one; whether its rung is in the ladder, the ranks see that follow it."""
    order = Order.from_document(file.document, path=file.path)
    begin = "as soon as it is read"
    if order.from_iteration is not None:
        begin = f"from iteration {order.from_iteration} on"
    return [f"order {order.sequence} of job {order.job}: rung {order.rung}, {begin}"]


def prove_sweep(file: OpenedFile) -> list[str]:
    """The rows of a sweep agree with themselves."""
    rows = read_rows(file.path)
    failed = sum(row.error is not None for row in rows)
    for number, row in enumerate(rows, 1):
        if (row.energy_j or 0.0) < (row.energy_lower_bound_j or 0.0):
            raise InputError(f"point {number}: energy_lower_bound_j lies above energy_j")
        _check_sweep_row(number, row)
    return [
        f"{counted(len(rows), 'point')}, {failed} of them failed; every cell is as its column says",
        "no plan uses less than its lower bound",
        "gaps and average powers follow from times and energies",
    ]


def _check_sweep_row(number: int, row: SweepRow) -> None:
    """Check that a point's average power and gap follow from its time and energies.

    Raises:
        InputError: one does not.
    """
    if row.iteration_time_s is None or row.energy_j is None:
        return
    if row.average_power_w is not None:
        energy_j = row.average_power_w * row.iteration_time_s
        check_stated(f"point {number}: average_power_w x time", energy_j, row.energy_j, 1e-9)
    if row.gap_percent is not None and row.energy_lower_bound_j:
        gap_percent = 100 * (row.energy_j / row.energy_lower_bound_j - 1)
        check_stated(f"point {number}: gap_percent", row.gap_percent, gap_percent, 1e-6)


def prove_journal(file: OpenedFile) -> list[str]:
    """The rows in a sweep's journal agree with themselves."""
    rows = read_journal(file.path)
    for number, row in enumerate(rows, 1):
        _check_sweep_row(number, row)
    return [f"{counted(len(rows), 'point')} of a sweep that has not ended, every line whole"]


def prove_profile_part(file: OpenedFile) -> list[str]:
    """The measurements of a rank are those of a profile."""
    part = RankProfile.load(file.path)
    return [f"{counted(len(part.rows), 'row')} of rank {part.rank}, of {part.world_size}"]


def prove_power_limits(file: OpenedFile) -> list[str]:
    """The power limits of a job cost as much more as they say."""
    stated = StatedPowerLimits.from_document(file.document, path=file.path)
    stated.check()
    return [
        f"{counted(len(stated.gpus), 'GPU')}, all of a stage with the same limit",
        "what limits cost in time and energy follows from both",
    ]


def prove_job_power(file: OpenedFile) -> list[str]:
    """The lines of what jobs draw have all figures."""
    lines = read_bounded(file.path).splitlines()
    for line in lines:
        StatedJobPower.from_document(parse_json(line, file.path), path=file.path)
    return [f"{counted(len(lines), 'job')} with power of a GPU, a node and the job"]


def prove_requests(file: OpenedFile) -> list[str]:
    """Requests to an inference service come in order of time; their classes may be anyone's."""
    from envplan.serving.classes import DEFAULT_CLASSES, RequestClass, RequestClasses
    from envplan.serving.trace import Trace
    from envplan.serving.trace_file import read_class_names

    names = read_class_names(file.path)
    if all(name in DEFAULT_CLASSES for name in names):
        trace = Trace.read_csv(file.path)
        return [f"{len(trace)} requests over {trace.duration_s:g} s, in order of time"]
    # Only names are needed: the trace has no lengths, and no SLO is asked for.
    classes = RequestClasses(
        RequestClass(name=name, input_tokens=1, output_tokens=1, ttft_slo_s=1) for name in names
    )
    trace = Trace.read_csv(file.path, classes=classes)
    counts = trace.counts.sum(axis=0)
    by_class = [f"{name} ({count:.0f})" for name, count in zip(names, counts, strict=True)]
    return [
        f"{len(trace)} requests over {trace.duration_s:g} s, in order of time, of "
        f"{enumerated(by_class)}"
    ]


def prove_classes(file: OpenedFile) -> list[str]:
    """Request classes take every request."""
    from envplan.serving.class_file import read_classes

    classes = read_classes(file.path)
    count = counted(len(classes), "request class")
    return [f"{count}, {', '.join(classes)}, and each request is of one"]


def prove_series(file: OpenedFile) -> list[str]:
    """A replay over time has numbers."""
    columns: Any = dict.fromkeys(file.columns, (FiniteFloat, ...))
    read = read_table(file.path, create_model("Series", **columns), kind="a replay over time")
    return [f"{len(read)} minutes, every cell a number"]


def prove_power_over_time(file: OpenedFile) -> list[str]:
    """A power over time, such as a site's budget, has no gap."""
    power = read_rate(str(file.path), "power")
    duration = duration_text(power.lasts_s)
    return [f"{significant(power.mean)} W on average, over {duration} without a gap"]


def prove_site_jobs(file: OpenedFile) -> list[str]:
    """The jobs of a site have frontiers."""
    jobs = read_jobs(file.path)
    return [f"{counted(len(jobs), 'job')}, each with its frontier: {_names(jobs)}"]


def _names(jobs: Sequence[SiteJob]) -> str:
    names = [job.name for job in jobs[:_MOST_NAMED]]
    return ", ".join(names) + (", ..." if len(jobs) > _MOST_NAMED else "")


def prove_stragglers(file: OpenedFile) -> list[str]:
    """Slowdowns of replicas are there for every iteration."""
    return [f"{len(read_slowdowns(file.path, _MAX_REPLICAS))} iterations, none missing"]


def prove_rates(file: OpenedFile) -> list[str]:
    """A price or a carbon intensity over time has no gap."""
    kinds: tuple[Literal["price", "carbon"], ...] = ("price", "carbon")
    sentences = []
    for kind in kinds:
        if kind in file.columns:
            rate = read_rate(str(file.path), kind)
            duration = duration_text(rate.lasts_s)
            sentences.append(
                f"{kind}: {significant(rate.mean)} a kWh on average, over {duration} without a gap"
            )
    return sentences


def prove_clocks(file: OpenedFile) -> list[str]:
    """Clocks of others are there stage by stage."""
    counts = count_clocks(file.path)
    return [
        f"clocks of {len(counts)} stages, {sum(counts)} in all, in MHz",
        "whether they fit a pipeline, `envplan solve --clocks` says",
    ]


def prove_frontier_table(file: OpenedFile) -> list[str]:
    """The rows of a frontier agree with themselves."""
    return check_rows(list(read_table(file.path, Row, kind="a frontier").rows()))


def prove_serving_profile(file: OpenedFile) -> list[str]:
    """A profile of an inference service has no holes."""
    from envplan.serving.profile import ServingProfile

    profile = ServingProfile.read_csv(file.path)
    return [
        f"{counted(len(profile.classes), 'class')}, "
        f"{counted(len(profile.curves), 'configuration')}, no holes",
        f"source: {profile.source or 'not said'}",
    ]


def prove_profile(file: OpenedFile) -> list[str]:
    """A profile has all options that it needs."""
    profile = Profile.read_csv(file.path)
    doubt_profile(profile)
    tables = profile.tables()
    clocks_mhz: set[int] = set()
    for table in tables:
        clocks_mhz.update(table.frequency_mhz[table.frequency_mhz > 0].tolist())
    span = "without a clock"
    if clocks_mhz:
        span = f"between {min(clocks_mhz)} and {max(clocks_mhz)} MHz"
    num_options = sum(map(len, tables))
    sentences = [
        f"{profile.describe()}: {profile.num_stages} stages with {', '.join(profile.instructions)}",
        f"{num_options} options {span}, all times and energies in range, no gaps",
    ]
    num_fixed = sum(not table.frequency_mhz.any() for table in tables)
    if num_fixed:
        sentences.append(f"{num_fixed} of the operations take the same time at any clock")
    powers = ", ".join(significant(power, 3) for power in profile.blocking_power_w or ())
    if powers:
        sentences.append(f"blocking power {powers} W by stage")
    else:
        sentences.append("no blocking rows: --blocking-power or 70 W will be used")
    return sentences
