"""`envplan schedule`: list, show, import and export schedules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import typer

from envplan.cli import output as ui
from envplan.cli.given import options_given, refuse
from envplan.cli.help import command_group
from envplan.cli.invocation import invocation
from envplan.cli.progress import progress
from envplan.cli.shared import JOB, MOST_USED, Chunks, MicrobatchGroup
from envplan.cli.tables import Column
from envplan.cli.types import (
    OPTIONAL_FILE,
    InputFile,
    OutputFile,
    completing,
    member_of,
    parser_of,
    quantity,
)
from envplan.errors import InputError
from envplan.pipeline.imports import ImportFormat
from envplan.quantities import COUNT, TIME

if TYPE_CHECKING:
    from envplan.pipeline import Pipeline
    from envplan.pipeline.imported import ImportedSchedule
    from envplan.pipeline.imports.chrome import TraceMapping
    from envplan.plotting.schedule import ScheduleLayout

_FRONTIER: Final = ("envplan", "frontier", "PROFILE")
_CHROME: Final = "Chrome trace"
_MOST_NAMED: Final = 6


class ExportFormat(StrEnum):
    """Formats that schedules can be written in."""

    TORCH_CSV = "torch-csv"
    DAG = "dag"


#: Where a schedule goes where --output does not say.
_DEFAULT_OUTPUTS: Final = {
    ExportFormat.TORCH_CSV: Path("schedule.csv"),
    ExportFormat.DAG: Path("pipeline.dag.json"),
}


@dataclass(frozen=True, kw_only=True)
class ShapeOptions:
    """A schedule's name and size."""

    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME|FILE",
            help="A schedule (envplan schedule list), or a DAG file (.json).",
        ),
        InputFile(),
    ]
    microbatches: Annotated[
        int | None,
        typer.Option(
            "-m",
            "--microbatches",
            rich_help_panel=MOST_USED,
            metavar="M",
            help="Microbatches per iteration; a DAG file says them itself.",
            parser=quantity(COUNT),
        ),
    ] = None
    pp: Annotated[
        int | None,
        typer.Option(
            "-s",
            "--pp",
            "--stages",
            rich_help_panel=JOB,
            metavar="N",
            help="Pipeline stages (ranks of a pipeline); a DAG file says them itself.",
            parser=quantity(COUNT),
        ),
    ] = None
    vp: Chunks = None
    microbatch_group: MicrobatchGroup = None

    def build(self) -> Pipeline:
        """The schedule of this name and shape, or the DAG in the file.

        Raises:
            InputError: options are missing or do not go with a file, or there is no such schedule.
        """
        from envplan.pipeline import SCHEDULES, Pipeline

        is_schedule = self.name in SCHEDULES
        if not is_schedule and (self.name.endswith(".json") or Path(self.name).is_file()):
            return self._from_file()
        if is_schedule and self.pp is None:
            raise InputError(f"schedule {self.name} needs --pp")
        if is_schedule and self.microbatches is None:
            raise InputError(f"schedule {self.name} needs --microbatches")
        return Pipeline(
            self.name,
            self.pp,
            self.microbatches,
            num_chunks=self.vp,
            microbatch_group=self.microbatch_group,
        )

    def _from_file(self) -> Pipeline:
        from envplan.pipeline import Pipeline

        shape = options_given(self, "pp", "microbatches", "vp", "microbatch_group")
        refuse(shape, f"goes with a schedule; the DAG file {self.name} says it all")
        return Pipeline.from_dag_file(self.name)


class Mapped(NamedTuple):
    """Which events of a trace are an instruction."""

    instruction: str
    expression: str


def _parse_mapped(text: str, option: str) -> Mapped:
    instruction, _, expression = text.partition("=")
    if not expression:
        raise InputError(f"{option} must be INSTRUCTION=REGEX, not {text}")
    return Mapped(instruction, expression)


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """How the events of a Chrome trace are read."""

    map: Annotated[
        list[Mapped] | None,
        typer.Option(
            rich_help_panel=_CHROME,
            metavar="INSTRUCTION=REGEX",
            help="Which events are this instruction; groups named microbatch, chunk, stage and "
            "rank say so. Once for each instruction.",
            parser=parser_of(_parse_mapped),
        ),
    ] = None
    rank: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_CHROME,
            metavar="SOURCE",
            help="Where an event's rank stands, file, pid, tid or args.NAME; default: file if "
            "there are several, else pid if there are several, else tid.",
            show_default=False,
        ),
    ] = None
    microbatch: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_CHROME,
            metavar="args.NAME",
            help="Where the microbatch stands; default: the order of appearance.",
            show_default=False,
        ),
    ] = None
    chunk: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_CHROME,
            metavar="args.NAME",
            help="Where the model chunk stands; default: there is one.",
            show_default=False,
        ),
    ] = None
    placement: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_CHROME,
            metavar="HOW",
            help="How chunks lie on ranks, interleaved (the default) or v.",
        ),
    ] = None
    category: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_CHROME,
            metavar="REGEX",
            help="Only events of such a category.",
        ),
    ] = None
    within: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_CHROME,
            metavar="REGEX",
            help="Only what runs within an event of such a name: one iteration of several.",
        ),
    ] = None

    def mapping(self) -> TraceMapping:
        """How events become operations.

        Raises:
            InputError: no instruction is mapped, or one to two expressions, or one is malformed.
        """
        from envplan.pipeline.imports.chrome import TraceMapping

        expressions: dict[str, str] = {}
        for instruction, expression in self.map or []:
            if expressions.setdefault(instruction, expression) != expression:
                raise InputError(f"--map {instruction} is given twice; join the expressions with |")
        if not expressions:
            raise InputError(
                "say which events are operations: --map 'forward=REGEX' --map 'backward=REGEX'"
            )
        return TraceMapping.of(
            instructions=expressions,
            rank=self.rank,
            microbatch=self.microbatch,
            chunk=self.chunk,
            placement=self.placement or "interleaved",
            category=self.category,
            within=self.within,
        )


def list_schedules() -> None:
    """List the schedules that envplan can generate.

    \b
    Example:
      envplan schedule list
    """
    from envplan.pipeline.schedules import describe_schedules

    orders = describe_schedules()
    ui.answer(
        lambda: {
            "schedules": [{"name": name, "description": order} for name, order in orders.items()]
        },
        lambda: _print_orders(orders),
        next_command=["envplan", "schedule", "show", "1f1b", "--pp", "4", "-m", "8"],
    )


def _print_orders(orders: Mapping[str, str]) -> None:
    names = Column(header="name", cells=list(orders), is_text=True)
    words = Column(header="order", cells=list(orders.values()), is_text=True, may_fold=True)
    ui.show_table("", [names, words])


def show(
    shape: ShapeOptions,
    plot: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=MOST_USED,
            metavar=OPTIONAL_FILE,
            help="Draw it: .png, .svg or .pdf; without a name: schedule.png.",
            parser=OutputFile(".png", ".svg", ".pdf", bare="schedule.png"),
        ),
    ] = None,
) -> None:
    """Print what each rank runs when.

    F is a forward, B a backward, I and W are its parts, and dots are waiting. The number is the
    microbatch; where ranks have several model stages, theirs comes first. A forward takes one unit
    of time, a backward two and each of its parts one. `envplan timeline` draws a plan's own times.

    \b
    Example:
      envplan schedule show zb-v --pp 4 --microbatches 8
      envplan schedule show 1f1b --pp 4 -m 8 --plot
    """
    from envplan.plotting.schedule import schedule_figure, schedule_layout

    pipeline = shape.build()
    layout = schedule_layout(pipeline)
    with progress("Drawing"):
        ui.draw(plot, lambda: schedule_figure(layout))
    ui.answer(
        layout.to_dict,
        lambda: _print_layout(layout),
        next_command=_frontier_command(shape, pipeline),
    )


def _print_layout(layout: ScheduleLayout) -> None:
    """A line for each rank, cut into panels where the terminal is narrower; and a summary."""
    rows = layout.rows()
    digits = len(str(len(rows) - 1))
    labels = [f"rank {rank:>{digits}}  " for rank in range(len(rows))]
    length = len(rows[0])
    panel_length = length
    if ui.on_terminal():
        unit_length = length // layout.makespan
        room = get_terminal_size().columns - len(labels[0])
        panel_length = max(1, room // unit_length) * unit_length
    for begin in range(0, length, panel_length):
        if begin:
            ui.say("")
        for label, row in zip(labels, rows, strict=True):
            ui.say(f"{label}{row[begin : begin + panel_length]}".rstrip())
    held = [layout.activations(rank) for rank in range(layout.pipeline.num_stages)]
    ui.say(
        "",
        ", ".join(f"{sign} {name}" for sign, name in layout.legend().items()),
        f"{layout.makespan} units of time, a forward taking 1; ranks wait "
        f"{100 * layout.bubble_share:.1f}% of it",
        f"activations held at most, by rank: {', '.join(map(str, held))}",
    )


def import_schedule(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE", help="The schedule; of chrome-trace, also a file for each rank."
        ),
        InputFile(),
    ],
    format: Annotated[  # noqa: A002  (the option's name)
        ImportFormat,
        typer.Option(
            rich_help_panel=MOST_USED,
            metavar="FORMAT",
            help=f"{', '.join(ImportFormat)}.",
            parser=member_of(ImportFormat),
            autocompletion=completing(ImportFormat),
        ),
    ],
    trace: TraceOptions,
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            rich_help_panel=MOST_USED,
            metavar="FILE",
            help="Where the DAG file goes.",
            parser=OutputFile(),
        ),
    ] = _DEFAULT_OUTPUTS[ExportFormat.DAG],
    microbatches: Annotated[
        int | None,
        typer.Option(
            "-m",
            "--microbatches",
            rich_help_panel=MOST_USED,
            metavar="M",
            help="Of an iteration, where a megatron configuration does not say.",
            parser=quantity(COUNT),
        ),
    ] = None,
    p2p_latency: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=JOB,
            metavar="TIME",
            help="How long a transfer between stages takes, as in 2ms or 0.002 (seconds); "
            "default: 0.",
            show_default=False,
            parser=quantity(TIME),
        ),
    ] = None,
) -> None:
    """Turn a schedule from elsewhere into a DAG file.

    frontier and solve take it with --dag. Format megatron reads configurations of Megatron, NeMo,
    Megatron-Bridge and GPT-NeoX, and Megatron-LM's launch script or log of arguments.

    \b
    Example:
      envplan schedule import zbv.csv --format torch-csv -o pipeline.dag.json
      envplan schedule import run_config.yaml --format megatron --microbatches 16
      envplan schedule import trace.json.gz --format chrome-trace
        --map 'forward=^fwd' --map 'backward=^bwd' --within 'ProfilerStep#3'
    """
    _refuse_other_formats(format, trace, microbatches)
    with progress("Reading"):
        imported = _read(format, files, trace, microbatches)
        pipeline = _imported_pipeline(imported, files, p2p_latency)
    pipeline.save_dag(output)
    ui.answer(
        lambda: {**_imported_document(pipeline, imported), "written": str(output)},
        lambda: _print_imported(pipeline, imported),
        next_command=[*_FRONTIER, "--dag", str(output)],
    )


def _refuse_other_formats(
    import_format: ImportFormat, trace: TraceOptions, microbatches: int | None
) -> None:
    """Raises: InputError: an option is given that goes with another format."""
    others = [] if import_format is ImportFormat.CHROME_TRACE else options_given(trace)
    if microbatches is not None and import_format is not ImportFormat.MEGATRON:
        others.append("--microbatches")
    refuse(others, f"does not go with --format {import_format}")


def _read(
    import_format: ImportFormat,
    files: Sequence[Path],
    trace: TraceOptions,
    microbatches: int | None,
) -> ImportedSchedule:
    """The content of the files."""
    from envplan.pipeline.imports import chrome, megatron, torch_csv

    if import_format is ImportFormat.CHROME_TRACE:
        return chrome.read_chrome_traces(files, trace.mapping())
    if len(files) > 1:
        raise InputError(f"{import_format} is one file, not {len(files)}")
    if import_format is ImportFormat.MEGATRON:
        return megatron.read_megatron_file(files[0], microbatches)
    return torch_csv.read_torch_csv(files[0])


def _imported_pipeline(
    imported: ImportedSchedule, files: Sequence[Path], p2p_latency: float | None
) -> Pipeline:
    """The pipeline; an error names the file, and what was left out of it."""
    from envplan.pipeline import Pipeline

    try:
        return Pipeline.from_imported(imported, p2p_latency=p2p_latency or 0.0)
    except InputError as error:
        message = error.message
        if imported.skipped:
            message += f" (left out: {_counts(imported.skipped)})"
        path = files[0] if len(files) == 1 else None
        raise InputError(message, path=path) from None


def _imported_document(pipeline: Pipeline, imported: ImportedSchedule) -> dict[str, object]:
    document: dict[str, object] = {
        "ranks": pipeline.num_stages,
        "microbatches": pipeline.num_microbatches,
        "chunks": pipeline.num_chunks,
        "profile_stages": pipeline.num_profile_stages,
        "operations": len(pipeline.operations),
        "known_as": imported.known_as,
        "microbatch_group": imported.microbatch_group,
        "skipped": dict(imported.skipped),
    }
    if imported.rank_labels is not None:
        document["rank_labels"] = list(imported.rank_labels)
    if imported.overlap_p2p is not None:
        document["overlap_p2p"] = imported.overlap_p2p
    if imported.layers_per_stage is not None:
        document["layers_per_stage"] = list(imported.layers_per_stage)
    return document


def _print_imported(pipeline: Pipeline, imported: ImportedSchedule) -> None:
    chunks = f" x {pipeline.num_chunks} chunks" if pipeline.num_chunks > 1 else ""
    size = (
        f"{pipeline.num_stages} ranks{chunks}, {pipeline.num_microbatches} microbatches, "
        f"{len(pipeline.operations)} operations"
    )
    ui.say(size + _same_order_as(imported))
    if imported.rank_labels is not None:
        ui.say(f"ranks, as the trace calls them: {', '.join(imported.rank_labels)}")
    if imported.layers_per_stage is not None:
        vp = f" --vp {pipeline.num_chunks}" if pipeline.num_chunks > 1 else ""
        layers = ",".join(map(str, imported.layers_per_stage))
        overlap = "" if imported.overlap_p2p else " --no-overlap-p2p"
        ui.say(
            f"a profile of its stages: envplan profile ... --pp {pipeline.num_stages}{vp} "
            f"--layers-per-stage {layers} --p2p-latency TIME{overlap}"
        )
    if imported.skipped:
        ui.say(f"left out: {_counts(imported.skipped)}")


def _same_order_as(imported: ImportedSchedule) -> str:
    """The generated schedule with this order, for the end of a line; empty if there is none."""
    if imported.known_as is None:
        return ""
    words = f"; the order is that of schedule {imported.known_as}"
    if imported.microbatch_group is not None:
        words += f" with --microbatch-group {imported.microbatch_group}"
    return words


def _counts(skipped: Mapping[str, int]) -> str:
    """The most frequent names and how often they occur."""
    most_frequent = Counter(skipped).most_common(_MOST_NAMED)
    parts = [f"{name} ({count})" for name, count in most_frequent]
    others = sum(skipped.values()) - sum(count for _, count in most_frequent)
    if others:
        parts.append(f"and {others} others")
    return ", ".join(parts)


def export_schedule(
    shape: ShapeOptions,
    format: Annotated[  # noqa: A002  (the option's name)
        ExportFormat,
        typer.Option(
            rich_help_panel=MOST_USED,
            metavar="FORMAT",
            help=f"{' or '.join(ExportFormat)}.",
            parser=member_of(ExportFormat),
            autocompletion=completing(ExportFormat),
        ),
    ] = ExportFormat.TORCH_CSV,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            rich_help_panel=MOST_USED,
            metavar="FILE",
            help=f"Where it goes; default: {' or '.join(map(str, _DEFAULT_OUTPUTS.values()))}.",
            show_default=False,
            parser=OutputFile(),
        ),
    ] = None,
) -> None:
    """Write a schedule as PyTorch's CSV or a DAG file.

    The CSV is the one that torch.distributed.pipelining loads.

    \b
    Example:
      envplan schedule export zb-v --pp 4 -m 8 --format torch-csv -o zbv.csv
      envplan schedule export 1f1b --pp 4 --microbatches 8 --format dag
    """
    from envplan._io.files import atomic_write
    from envplan.pipeline.imports.torch_csv import as_torch_csv

    target = output or _DEFAULT_OUTPUTS[format]
    if output is None:
        invocation().will_write(target)
    pipeline = shape.build()
    if format is ExportFormat.DAG:
        pipeline.save_dag(target)
        next_command = [*_FRONTIER, "--dag", str(target)]
    else:
        atomic_write(target, as_torch_csv(pipeline))
        next_command = _frontier_command(shape, pipeline)
    count, ranks = len(pipeline.operations), pipeline.num_stages
    ui.answer(
        lambda: {"written": str(target), "operations": count, "ranks": ranks},
        lambda: ui.say(f"{count} operations on {ranks} ranks"),
        next_command=next_command,
    )


def _frontier_command(shape: ShapeOptions, pipeline: Pipeline) -> list[str]:
    """The command that traces the frontier of a schedule."""
    if pipeline.schedule == "dag":
        return [*_FRONTIER, "--dag", shape.name]
    words = [*_FRONTIER, "--schedule", shape.name]
    words += ["--pp", str(pipeline.num_stages), "-m", str(pipeline.num_microbatches)]
    if pipeline.num_chunks > 1 and shape.vp:
        words += ["--vp", str(shape.vp)]
    return words


schedule = command_group(
    """List, show, import and export schedules.

    \b
    Example:
      envplan schedule list
      envplan schedule show zb-v --pp 4 --microbatches 8
      envplan schedule import schedule.csv --format torch-csv -o pipeline.dag.json
      envplan schedule export interleaved --pp 4 --microbatches 8 --vp 2
    """,
    {"list": list_schedules, "show": show, "import": import_schedule, "export": export_schedule},
)
