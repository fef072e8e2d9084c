"""`envplan schedule`: list, show, import and export schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from envplan.cli.command import MOST, Group, add, one_of, option, plot_option
from envplan.cli.inputs import check_outputs, refuse_overwriting
from envplan.cli.options import (
    Chunks,
    JsonOption,
    Latency,
    Microbatches,
    MicrobatchGroup,
    OutputOptions,
    QuietOption,
    Stages,
    open_profile,
)
from envplan.errors import InputError
from envplan.quantities import COUNT

if TYPE_CHECKING:
    from rich.text import Text

    from envplan.pipeline import Pipeline
    from envplan.pipeline.imports import ImportedSchedule
    from envplan.plotting.schedule import ScheduleLayout
    from envplan.profile import Profile

_PLOT_TYPES: Final = (".png", ".svg", ".pdf")
_TORCH_CSV, _CHROME_TRACE, _MEGATRON, _DAG = "torch-csv", "chrome-trace", "megatron", "dag"
_IMPORTS: Final = (_TORCH_CSV, "deepspeed", _MEGATRON, _CHROME_TRACE)
_EXPORTS: Final = {_TORCH_CSV: "schedule.csv", _DAG: "pipeline.dag.json"}
_TRACE: Final = "Chrome trace"
_STYLES: Final = {
    "forward": "black on bright_blue",
    "backward": "black on yellow",
    "backward_input": "black on bright_yellow",
    "backward_weight": "black on green",
}
_OTHER_STYLE: Final = "black on white"
_MOST_COLUMNS: Final = 4000
_UNBOUNDED: Final = 10**6
_MOST_NAMED: Final = 6

NameArgument = Annotated[
    str,
    typer.Argument(
        metavar="NAME|FILE", help="A schedule (envplan schedule list), or a DAG file (.json)."
    ),
]


@dataclass(frozen=True, kw_only=True)
class ShapeOptions:
    """A schedule's name and size."""

    name: NameArgument
    pp: Stages = None
    microbatches: Microbatches = None
    vp: Chunks = None
    microbatch_group: MicrobatchGroup = None


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """How to read a Chrome trace."""

    mapping: Annotated[
        list[str] | None,
        option(
            "--map INSTRUCTION=REGEX",
            _TRACE,
            "Which events are this instruction; groups named microbatch, chunk, stage and "
            "rank say so. Once for each instruction.",
        ),
    ] = None
    rank: Annotated[
        str | None,
        option(
            "--rank SOURCE",
            _TRACE,
            "Where an event's rank stands, file, pid, tid or args.NAME; default: file if "
            "there are several, else pid if there are several, else tid.",
        ),
    ] = None
    microbatch: Annotated[
        str | None,
        option(
            "--microbatch args.NAME",
            _TRACE,
            "Where the microbatch stands; default: the order of appearance.",
        ),
    ] = None
    chunk: Annotated[
        str | None,
        option(
            "--chunk args.NAME|order",
            _TRACE,
            "Where the model chunk stands, or order where nothing says it; default: there is one.",
        ),
    ] = None
    placement: Annotated[
        str | None,
        option(
            "--placement HOW", _TRACE, "How chunks lie on ranks, interleaved (the default) or v."
        ),
    ] = None
    category: Annotated[
        str | None, option("--category REGEX", _TRACE, "Only events of such a category.")
    ] = None
    within: Annotated[
        str | None,
        option(
            "--within REGEX",
            _TRACE,
            "Only what runs within an event of such a name: one iteration of several.",
        ),
    ] = None
    check_profile: Annotated[
        str | None,
        option("--check-profile PROFILE", _TRACE, "Compare the recorded times with a profile's."),
    ] = None


def list_schedules(json: JsonOption = False) -> None:
    """List the schedules that envplan can generate.

    \b
    Example:
      envplan schedule list
    """
    from envplan.cli.output import print_json, print_table, say
    from envplan.pipeline import SCHEDULES

    known = [
        {"name": name, "description": _paragraph(generate.__doc__)}
        for name, generate in SCHEDULES.items()
    ]
    if json:
        print_json({"schedules": known})
    else:
        rows = [[entry["name"], entry["description"]] for entry in known]
        print_table("", ("name", "order"), rows, words=2, wrap=("order",))
        say("next: envplan schedule show 1f1b --stages 4 -m 8")


def _paragraph(text: str | None) -> str:
    """The first paragraph of a docstring, on one line."""
    return " ".join((text or "-").split("\n\n")[0].split())


def show(
    shape: ShapeOptions,
    out: OutputOptions,
    profile: Annotated[
        str | None,
        option(
            "--profile PROFILE",
            MOST,
            "Lay it out with a profile's times at the highest clocks, instead of equal ones; "
            "stages and microbatches are the profile's unless given.",
        ),
    ] = None,
    p2p_latency: Latency = None,
    plot: Annotated[
        Path | None, plot_option("schedule.png", _PLOT_TYPES, "it", "a name goes before --plot")
    ] = None,
) -> None:
    """Print what each rank runs when: F forward, B backward, I and W its parts, dots for waiting.

    The number is the microbatch; where ranks have several model stages, theirs comes first. A
    forward takes one unit of time, a backward two and each of its parts one, unless --profile is
    given; time goes from left to right.

    \b
    Example:
      envplan schedule show zb-v --stages 4 --microbatches 8
      envplan schedule show 1f1b --stages 4 -m 8 --profile a40-gpt3-1.3b-4stage --plot
    """
    from envplan.cli.output import print_json, say, spinner
    from envplan.plotting.figures import save_figure
    from envplan.plotting.schedule import schedule_figure, schedule_layout

    check_outputs(plot)
    if p2p_latency is not None and profile is None:
        raise InputError("--p2p-latency goes with --profile: without one, transfers take no time")
    timed_by = None if profile is None else open_profile(profile)
    if timed_by is not None:
        refuse_overwriting(timed_by, plot)
    pipeline = _pipeline(shape, timed_by, p2p_latency)
    if timed_by is not None:
        _refuse_other_stages(pipeline, timed_by)
    layout = schedule_layout(pipeline, timed_by)
    if plot is not None:
        with spinner("Drawing", quiet=out.quiet):
            save_figure(schedule_figure(layout), plot)
    if out.json:
        print_json(layout.to_dict())
    elif not out.quiet:
        _print_grid(layout)
        _print_summary(layout)
        if plot is not None:
            say(f"wrote {plot}")


def _pipeline(
    shape: ShapeOptions, profile: Profile | None = None, p2p_latency: float | None = None
) -> Pipeline:
    """The schedule of a name and shape, or the DAG in a file.

    Args:
        profile: says stages and microbatches where options do not.
    """
    from envplan.pipeline import SCHEDULES, Pipeline, traits

    name, stages, microbatches = shape.name, shape.pp, shape.microbatches
    options = {
        "--pp/--stages": stages,
        "--microbatches": microbatches,
        "--vp/--chunks": shape.vp,
        "--microbatch-group": shape.microbatch_group,
        "--p2p-latency": p2p_latency,
    }
    if name not in SCHEDULES and (name.endswith(".json") or Path(name).is_file()):
        if given := [option for option, value in options.items() if value is not None]:
            raise InputError(f"{given[0]} goes with a schedule; the DAG file {name} says it all")
        return Pipeline.from_dag_file(name)
    chunks = shape.vp or traits(name).chunks
    if profile is not None:
        stages = stages or profile.num_stages // chunks
        microbatches = microbatches or profile.metadata.num_microbatches
    if name in SCHEDULES:
        for option, count in (("--pp/--stages", stages), ("--microbatches", microbatches)):
            if not count:
                raise InputError(f"schedule {name} needs {option}")
    return Pipeline(
        name,
        stages or 1,
        microbatches or 1,
        num_chunks=chunks,
        p2p_latency=p2p_latency or 0.0,
        microbatch_group=shape.microbatch_group,
    )


def _refuse_other_stages(pipeline: Pipeline, profile: Profile) -> None:
    if pipeline.num_profile_stages != profile.num_stages:
        raise InputError(
            f"the schedule has {pipeline.num_profile_stages} model stages, but profile "
            f"{profile.name} has {profile.num_stages}"
        )


def _print_grid(layout: ScheduleLayout) -> None:
    """A line for each rank, cut into panels where the terminal is narrower."""
    import sys

    from rich.console import Console

    tty = sys.stdout.isatty()
    console = Console(highlight=False, width=None if tty else _UNBOUNDED)
    width = 1 + max(len(layout.label(op)) for op in layout.pipeline.operations)
    rows = _rows(layout, width)
    length = max(len(row) for _, row in rows)
    columns = max(1, (console.width - len(rows[0][0])) // width)
    room = columns * width if tty else length
    for begin in range(0, length, room):
        if begin:
            console.print()
        for name, row in rows:
            line = row[begin : begin + room]
            line.rstrip()
            console.print(name, line, sep="", soft_wrap=True)


def _rows(layout: ScheduleLayout, width: int) -> list[tuple[str, Text]]:
    """The name and the line of each rank; a column is `width` characters wide."""
    from rich.text import Text

    columns = min(_MOST_COLUMNS, layout.columns)
    digits = len(str(layout.pipeline.num_stages - 1))
    rows = []
    for rank in range(layout.pipeline.num_stages):
        row = Text()
        for cell in layout.cells(rank, columns):
            if cell.operation is None:
                row.append(f"{'.':<{width}}" * cell.columns)
                continue
            inside = width * cell.columns - 1
            label = layout.label(cell.operation)
            filled = label.ljust(inside, "-" if cell.columns > 1 else " ")
            row.append(filled, _STYLES.get(cell.operation.instruction, _OTHER_STYLE))
            row.append(" ")
        rows.append((f"rank {rank:>{digits}}  ", row))
    return rows


def _hidden(layout: ScheduleLayout) -> int:
    """How many operations are too short for a column."""
    columns = min(_MOST_COLUMNS, layout.columns)
    ranks = range(layout.pipeline.num_stages)
    shown = sum(cell.operation is not None for r in ranks for cell in layout.cells(r, columns))
    return len(layout.pipeline.operations) - shown


def _print_summary(layout: ScheduleLayout) -> None:
    from envplan.cli.output import describe_profile, exact_seconds, say

    say("")
    say(", ".join(f"{sign} {name}" for sign, name in layout.legend().items()))
    if layout.profile is None:
        took = f"{layout.makespan:g} units of time, a forward taking 1"
    else:
        took = f"{exact_seconds(layout.makespan)} s at the highest clocks of "
        took += describe_profile(layout.profile)
        for words in layout.profile.adjustments.in_words():
            took += f"; {words}"
    say(f"{took}; ranks wait {100 * layout.bubble_share:.1f}% of it")
    held = [layout.activations(rank) for rank in range(layout.pipeline.num_stages)]
    say(f"activations held at most, by rank: {', '.join(map(str, held))}")
    if hidden := _hidden(layout):
        say(f"operations too short to be shown: {hidden}")


def import_schedule(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...", help="The schedule; of chrome-trace, also a file for each rank."
        ),
    ],
    form: Annotated[
        str, option("--format FORMAT", MOST, f"{', '.join(_IMPORTS)}.", one_of(*_IMPORTS))
    ],
    trace: TraceOptions,
    out: OutputOptions,
    output: Annotated[Path, option("-o, --output FILE", MOST, "Where the DAG file goes.")] = Path(
        _EXPORTS[_DAG]
    ),
    microbatches: Annotated[
        int | None,
        option(
            "-m, --microbatches M",
            MOST,
            "Of an iteration, where a megatron configuration does not say.",
            COUNT,
        ),
    ] = None,
    p2p_latency: Latency = None,
    keep: Annotated[
        list[str] | None,
        option(
            "--keep NAME",
            MOST,
            "Keep these as operations, timed by the profile's rows: all_reduce of torch-csv; "
            "load, all_reduce, reduce_tied_grads, optimizer of deepspeed. May be given repeatedly.",
        ),
    ] = None,
) -> None:
    """Turn a schedule from elsewhere into a DAG file, for --dag of frontier and solve.

    \b
    Example:
      envplan schedule import zbv.csv --format torch-csv -o pipeline.dag.json
      envplan schedule import train.json --format deepspeed --keep load --keep optimizer
      envplan schedule import run_config.yaml --format megatron --microbatches 16
      envplan schedule import trace.json.gz --format chrome-trace
        --map 'forward=^fwd' --map 'backward=^bwd' --within 'ProfilerStep#3'
    """
    from envplan.cli.output import print_json, spinner

    if form != _CHROME_TRACE and len(files) > 1:
        raise InputError(f"{form} is one file, not {len(files)}")
    given = {"keep": keep, "microbatches": microbatches, **asdict(trace)}
    goes_with = {"keep": (_TORCH_CSV, "deepspeed"), "microbatches": (_MEGATRON,)}
    for name, value in given.items():
        formats = goes_with.get(name, (_CHROME_TRACE,))
        if value is not None and form not in formats:
            named = "--map" if name == "mapping" else "--" + name.replace("_", "-")
            raise InputError(f"{named} goes with --format {' or '.join(formats)}, not {form}")
    check_outputs(output, inputs=[("the schedule", file) for file in files])
    timed_by = None if trace.check_profile is None else open_profile(trace.check_profile)
    if timed_by is not None:
        refuse_overwriting(timed_by, output)
    with spinner("Reading", quiet=out.quiet):
        imported, facts = _read(form, files, keep or (), trace, microbatches)
        pipeline = _connected(imported, files, p2p_latency or 0.0)
    if timed_by is not None:
        _refuse_other_stages(pipeline, timed_by)
        timed_by = timed_by.fitted({op.instruction for op in pipeline.operations})
    report = _report(imported, pipeline, timed_by) | facts
    pipeline.save_dag(output)
    if out.json:
        print_json({**report, "written": str(output)})
    elif not out.quiet:
        _print_report(report, timed_by, output)


def _read(
    form: str,
    files: Sequence[Path],
    keep: Sequence[str],
    trace: TraceOptions,
    microbatches: int | None,
) -> tuple[ImportedSchedule, dict[str, Any]]:
    """What the files say, and further facts for the report."""
    from envplan.pipeline.imports import chrome, deepspeed, megatron, torch_csv

    if form == _MEGATRON:
        return megatron.read_megatron_file(files[0], microbatches)
    if form == _CHROME_TRACE:
        rules = chrome.TraceMapping(
            _instructions(trace.mapping),
            trace.rank,
            trace.microbatch,
            trace.chunk,
            trace.placement or "interleaved",
            trace.category,
            trace.within,
        )
        return chrome.read_chrome_traces(files, rules), {}
    keepable = torch_csv.KEEPABLE if form == _TORCH_CSV else deepspeed.KEEPABLE
    for name in keep:
        if name not in keepable:
            raise InputError(f"--keep {name}: of {form}, these can be kept: {', '.join(keepable)}")
    read = torch_csv.read_torch_csv if form == _TORCH_CSV else deepspeed.read_deepspeed
    return read(files[0], keep=keep), {}


def _instructions(mapping: Sequence[str] | None) -> dict[str, str]:
    """--map as {instruction: expression}."""
    if not mapping:
        raise InputError(
            "say which events are operations: --map 'forward=REGEX' --map 'backward=REGEX'"
        )
    instructions: dict[str, str] = {}
    for item in mapping:
        instruction, equals, expression = item.partition("=")
        if not equals or not expression:
            raise InputError(f"--map must be INSTRUCTION=REGEX, not {item}")
        if instruction in instructions:
            raise InputError(f"--map {instruction} is given twice; join the expressions with |")
        instructions[instruction] = expression
    return instructions


def _connected(imported: ImportedSchedule, files: Sequence[Path], p2p_latency: float) -> Pipeline:
    from envplan.pipeline import Pipeline

    try:
        return Pipeline.from_imported(imported, p2p_latency=p2p_latency)
    except InputError as error:
        left_out = f" (left out: {_counts(imported.skipped)})" if imported.skipped else ""
        path = files[0] if len(files) == 1 else None
        raise InputError(error.message + left_out, path=path) from None


def _report(
    imported: ImportedSchedule, pipeline: Pipeline, profile: Profile | None
) -> dict[str, Any]:
    """What was found, in JSON types."""
    from envplan.pipeline.imports import ImportedTrace

    report: dict[str, Any] = {
        "ranks": pipeline.num_stages,
        "microbatches": pipeline.num_microbatches,
        "chunks": pipeline.num_chunks,
        "profile_stages": pipeline.num_profile_stages,
        "operations": len(pipeline.operations),
        "known_as": imported.known_as,
        "microbatch_group": imported.microbatch_group
        if imported.known_as == "interleaved"
        else None,
        "skipped": dict(imported.skipped),
    }
    if isinstance(imported, ImportedTrace):
        report["rank_labels"] = list(imported.rank_labels)
        if profile is not None:
            report["times"] = [
                {
                    "stage": check.profile_stage,
                    "instruction": check.instruction,
                    "operations": check.count,
                    "recorded_s": check.recorded,
                    "profile_fastest_s": check.fastest,
                    "profile_slowest_s": check.slowest,
                    "fits": check.fits,
                }
                for check in imported.check_times(profile)
            ]
    return report


def _print_report(report: dict[str, Any], profile: Profile | None, output: Path) -> None:
    from envplan.cli.output import say

    chunks = f" x {report['chunks']} chunks" if report["chunks"] > 1 else ""
    known = f"; the order is that of schedule {report['known_as']}" if report["known_as"] else ""
    if report["microbatch_group"] and known:
        known += f" with --microbatch-group {report['microbatch_group']}"
    say(
        f"{report['ranks']} ranks{chunks}, {report['microbatches']} microbatches, "
        f"{report['operations']} operations{known}"
    )
    if report.get("rank_labels"):
        say(f"ranks, as the trace calls them: {', '.join(report['rank_labels'])}")
    if "layers_per_stage" in report:
        layers = ",".join(map(str, report["layers_per_stage"]))
        vp = f" --vp {report['chunks']}" if report["chunks"] > 1 else ""
        alone = "" if report["overlap_p2p"] else " --no-overlap-p2p"
        say(
            f"a profile of its stages: envplan profile ... --pp {report['ranks']}{vp} "
            f"--layers-per-stage {layers} --p2p-latency TIME{alone}"
        )
    if report["skipped"]:
        say(f"left out: {_counts(report['skipped'])}")
    if "times" in report and profile is not None:
        _print_times(report["times"], profile)
    say(f"wrote {output}")
    say(f"next: envplan frontier PROFILE --dag {output}")


def _counts(skipped: Mapping[str, int]) -> str:
    """The most frequent names and how often they occur."""
    ordered = sorted(skipped.items(), key=lambda item: -item[1])
    named = ", ".join(f"{name} ({count})" for name, count in ordered[:_MOST_NAMED])
    if len(ordered) > _MOST_NAMED:
        named += f", and {sum(count for _, count in ordered[_MOST_NAMED:])} others"
    return named


def _print_times(times: Sequence[dict[str, Any]], profile: Profile) -> None:
    from envplan.cli.output import describe_profile, print_table, say, significant

    print_table(
        f"Recorded times beside {describe_profile(profile)}",
        ("instruction", "stage", "operations", "recorded (s)", "profile (s)", "fits"),
        [
            [
                check["instruction"],
                str(check["stage"]),
                str(check["operations"]),
                significant(check["recorded_s"], 4),
                f"{significant(check['profile_fastest_s'], 4)} to "
                f"{significant(check['profile_slowest_s'], 4)}",
                "yes" if check["fits"] else "NO",
            ]
            for check in times
        ],
    )
    off = sum(not check["fits"] for check in times)
    if off:
        say(
            f"{off} of {len(times)} lie more than 10% outside the profile's times: is it of the "
            "same model, microbatch size and GPU?"
        )


def export_schedule(
    shape: ShapeOptions,
    form: Annotated[
        str, option("--format FORMAT", MOST, f"{' or '.join(_EXPORTS)}.", one_of(*_EXPORTS))
    ] = _TORCH_CSV,
    output: Annotated[
        Path | None,
        option(
            "-o, --output FILE", MOST, f"Where it goes; default: {' or '.join(_EXPORTS.values())}."
        ),
    ] = None,
    quiet: QuietOption = False,
) -> None:
    """Write a schedule as the CSV that PyTorch's pipelining loads, or as a DAG file.

    \b
    Example:
      envplan schedule export zb-v --stages 4 --microbatches 8 --format torch-csv -o zbv.csv
      envplan schedule export 1f1b --stages 4 --microbatches 8 --format dag
    """
    from envplan._files import atomic_write
    from envplan.cli.output import say

    target = output or Path(_EXPORTS[form])
    check_outputs(target, inputs=[("the DAG file", shape.name)])
    pipeline = _pipeline(shape)
    if form == _DAG:
        pipeline.save_dag(target)
    else:
        from envplan.pipeline.imports import as_torch_csv

        atomic_write(target, as_torch_csv(pipeline))
    if not quiet:
        say(f"{len(pipeline.operations)} operations on {pipeline.num_stages} ranks")
        say(f"wrote {target}")


schedule = typer.Typer(
    name="schedule",
    cls=Group,
    rich_markup_mode=None,
    add_completion=False,
    help="""List, show, import and export schedules.

    \b
    Example:
      envplan schedule list
      envplan schedule show zb-v --stages 4 --microbatches 8
      envplan schedule import schedule.csv --format torch-csv -o pipeline.dag.json
      envplan schedule export interleaved --stages 4 --microbatches 8 --chunks 2
    """,
)

for function, name in (
    (list_schedules, "list"),
    (show, "show"),
    (import_schedule, "import"),
    (export_schedule, "export"),
):
    add(schedule, function, name)
