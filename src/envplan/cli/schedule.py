"""`envplan schedule`: list, show, import and export schedules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any, Final

from envplan.cli import command as cmd
from envplan.cli import output as ui
from envplan.errors import InputError

if TYPE_CHECKING:
    from envplan.pipeline import Pipeline
    from envplan.pipeline.imported import ImportedSchedule
    from envplan.plotting.schedule import ScheduleLayout

_TORCH_CSV, _CHROME_TRACE, _MEGATRON, _DAG = "torch-csv", "chrome-trace", "megatron", "dag"
_MAPPING: Final = "rank microbatch chunk placement category within"
#: What can be imported, and the options that go with it.
_IMPORTS: Final = {
    _TORCH_CSV: "",
    _MEGATRON: "microbatches",
    _CHROME_TRACE: f"map {_MAPPING}",
}
_EXPORTS: Final = {_TORCH_CSV: "schedule.csv", _DAG: "pipeline.dag.json"}
_FRONTIER: Final = ("envplan", "frontier", "PROFILE")
_MOST_NAMED: Final = 6


@cmd.options(
    """
    Most used:
      -m, --microbatches M  Microbatches per iteration; a DAG file says them itself.
    Job:
      -s, --pp, --stages N  Pipeline stages (ranks of a pipeline); a DAG file says them itself.
    """
)
class ShapeOptions:
    """A schedule's name and size."""

    name: str = cmd.argument(
        "NAME|FILE", "A schedule (envplan schedule list), or a DAG file (.json)."
    )
    pp: int | None = None
    microbatches: int | None = None
    vp: int | None = None
    microbatch_group: int | None = None


def _mapped(text: str, name: str) -> tuple[str, str]:
    """An instruction and its expression."""
    instruction, _, expression = text.partition("=")
    if not expression:
        raise InputError(f"{name} must be INSTRUCTION=REGEX, not {text}")
    return instruction, expression


@cmd.options(
    """
    Most used:
      -m, --microbatches M  Of an iteration, where a megatron configuration does not say.
    Chrome trace:
      --map INSTRUCTION=REGEX  Which events are this instruction; groups named microbatch, chunk,
          stage and rank say so. Once for each instruction.
      --rank SOURCE  Where an event's rank stands, file, pid, tid or args.NAME; default: file if
          there are several, else pid if there are several, else tid.
      --microbatch args.NAME  Where the microbatch stands; default: the order of appearance.
      --chunk args.NAME  Where the model chunk stands; default: there is one.
      --placement HOW  How chunks lie on ranks, interleaved (the default) or v.
      --category REGEX  Only events of such a category.
      --within REGEX  Only what runs within an event of such a name: one iteration of several.
    """,
    map=_mapped,
)
class SourceOptions:
    """How to read a schedule from elsewhere; see _IMPORTS for what goes with which format."""

    microbatches: int | None = None
    map: list[Any] | None = None
    rank: str | None = None
    microbatch: str | None = None
    chunk: str | None = None
    placement: str | None = None
    category: str | None = None
    within: str | None = None

    def read(self, form: str, files: Sequence[Path]) -> ImportedSchedule:
        """What the files say."""
        from envplan.pipeline.imports import chrome, megatron, torch_csv

        if form == _MEGATRON:
            return megatron.read_megatron_file(files[0], self.microbatches)
        if form == _TORCH_CSV:
            return torch_csv.read_torch_csv(files[0])
        if not self.map:
            raise InputError(
                "say which events are operations: --map 'forward=REGEX' --map 'backward=REGEX'"
            )
        for (one, text), (other, more) in combinations(self.map, 2):
            if one == other and text != more:
                raise InputError(f"--map {one} is given twice; join the expressions with |")
        told = {name: getattr(self, name) for name in _MAPPING.split()}
        known = {name: value for name, value in told.items() if value is not None}
        mapping = chrome.TraceMapping.of(instructions=dict(self.map), **known)
        return chrome.read_chrome_traces(files, mapping)


def list_schedules() -> None:
    """List the schedules that envplan can generate.

    \b
    Example:
      envplan schedule list
    """
    from envplan.pipeline import SCHEDULES

    rows = [  # the first paragraph of a docstring, on one line
        [name, " ".join((generate.__doc__ or "-").split("\n\n")[0].split())]
        for name, generate in SCHEDULES.items()
    ]
    ui.answer(
        lambda: {"schedules": [{"name": name, "description": order} for name, order in rows]},
        lambda: ui.print_table("", ("name", "order"), rows, words=2, wrap=("order",)),
        then="envplan schedule show 1f1b --pp 4 -m 8",
    )


@cmd.takes(
    """
    Most used:
      --plot [FILE]  Draw it: .png, .svg or .pdf; without a name: schedule.png.
    """,
)
def show(
    shape: ShapeOptions,
    plot: Path | None = None,
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

    pipeline = _pipeline(shape)
    layout = schedule_layout(pipeline)
    with ui.Working("Drawing"):
        ui.draw(plot, lambda: schedule_figure(layout))
    ui.answer(layout.to_dict, lambda: _print(layout), then=_frontier_of(shape, pipeline))


def _frontier_of(shape: ShapeOptions, pipeline: Pipeline) -> list[str]:
    """The command that traces the frontier of a schedule."""
    if pipeline.schedule == "dag":
        return [*_FRONTIER, "--dag", shape.name]
    vp = ["--vp", f"{shape.vp}"] if pipeline.num_chunks > 1 and shape.vp else []
    named = ["--schedule", shape.name, "--pp", f"{pipeline.num_stages}"]
    return [*_FRONTIER, *named, "-m", f"{pipeline.num_microbatches}", *vp]


def _pipeline(shape: ShapeOptions) -> Pipeline:
    """The schedule of a name and shape, or the DAG in a file."""
    from envplan.pipeline import SCHEDULES, Pipeline

    name, stages, microbatches = shape.name, shape.pp, shape.microbatches
    if name not in SCHEDULES and (name.endswith(".json") or Path(name).is_file()):
        asked = cmd.given(shape, "pp microbatches vp microbatch_group")
        cmd.refuse(asked, f"goes with a schedule; the DAG file {name} says it all")
        return Pipeline.from_dag_file(name)
    if name in SCHEDULES and (stages is None or microbatches is None):
        raise InputError(f"schedule {name} needs {'--pp' if stages is None else '--microbatches'}")
    more: Any = {"num_chunks": shape.vp, "microbatch_group": shape.microbatch_group}
    return Pipeline(name, stages, microbatches, **more)


def _print(layout: ScheduleLayout) -> None:
    """A line for each rank, cut into panels where the terminal is narrower; and a summary."""
    rows = layout.rows()
    digits, length = len(str(len(rows) - 1)), len(rows[0])
    room = length
    if ui.on_terminal():
        unit = length // layout.makespan
        room = max(1, (get_terminal_size().columns - digits - 7) // unit) * unit
    for begin in range(0, length, room):
        ui.say(*[""] * (begin > 0))
        for rank, row in enumerate(rows):
            ui.say(f"rank {rank:>{digits}}  {row[begin : begin + room]}".rstrip())
    held = [layout.activations(rank) for rank in range(layout.pipeline.num_stages)]
    ui.say(
        "",
        ", ".join(f"{sign} {name}" for sign, name in layout.legend().items()),
        f"{layout.makespan} units of time, a forward taking 1; ranks wait "
        f"{100 * layout.bubble_share:.1f}% of it",
        f"activations held at most, by rank: {', '.join(map(str, held))}",
    )


@cmd.takes(
    f"""
    Most used:
      --format FORMAT  {", ".join(_IMPORTS)}.
      -o, --output FILE  Where the DAG file goes.
    Job:
      --p2p-latency TIME  How long a transfer between stages takes, as in 2ms or 0.002 (seconds);
          default: 0.
    """,
    format=cmd.one_of(*_IMPORTS),
)
def import_schedule(
    files: list[Path] = cmd.argument(
        "FILE", "The schedule; of chrome-trace, also a file for each rank."
    ),
    *,
    format: str,  # noqa: A002  (the option's name)
    output: Path = Path(_EXPORTS[_DAG]),
    source: SourceOptions,
    p2p_latency: float | None = None,
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
    from envplan.pipeline import Pipeline

    if format != _CHROME_TRACE and len(files) > 1:
        raise InputError(f"{format} is one file, not {len(files)}")
    fitting = map(cmd.dashed, _IMPORTS[format].split())
    cmd.refuse(cmd.given(source).keys() - set(fitting), f"does not go with --format {format}")
    with ui.Working("Reading"):
        imported = source.read(format, files)
        try:
            pipeline = Pipeline.from_imported(imported, p2p_latency=p2p_latency or 0.0)
        except InputError as error:
            left_out = f" (left out: {_counts(imported.skipped)})" if imported.skipped else ""
            path = files[0] if len(files) == 1 else None
            raise InputError(error.message + left_out, path=path) from None
    pipeline.save_dag(output)
    ui.answer(
        lambda: {**_imported_document(pipeline, imported), "written": str(output)},
        lambda: _print_imported(pipeline, imported),
        then=[*_FRONTIER, "--dag", str(output)],
    )


def _imported_document(pipeline: Pipeline, imported: ImportedSchedule) -> dict[str, Any]:
    document: dict[str, Any] = {
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


@cmd.takes(
    f"""
    Most used:
      --format FORMAT  {" or ".join(_EXPORTS)}.
      -o, --output FILE  Where it goes; default: {" or ".join(_EXPORTS.values())}.
    """,
    format=cmd.one_of(*_EXPORTS),
)
def export_schedule(
    shape: ShapeOptions,
    format: str = _TORCH_CSV,  # noqa: A002  (the option's name)
    output: Path | None = None,
) -> None:
    """Write a schedule as PyTorch's CSV or a DAG file.

    The CSV is the one that torch.distributed.pipelining loads.

    \b
    Example:
      envplan schedule export zb-v --pp 4 --microbatches 8 --format torch-csv -o zbv.csv
      envplan schedule export 1f1b --pp 4 --microbatches 8 --format dag
    """
    target = output or Path(_EXPORTS[format])
    if output is None:
        cmd.will_write(target)
    pipeline = _pipeline(shape)
    if format == _DAG:
        pipeline.save_dag(target)
    else:
        from envplan._io.files import atomic_write
        from envplan.pipeline.imports.torch_csv import as_torch_csv

        atomic_write(target, as_torch_csv(pipeline))
    count, ranks = len(pipeline.operations), pipeline.num_stages
    ui.answer(
        lambda: {"written": str(target), "operations": count, "ranks": ranks},
        lambda: ui.say(f"{count} operations on {ranks} ranks"),
        then=[*_FRONTIER, "--dag", str(target)]
        if format == _DAG
        else _frontier_of(shape, pipeline),
    )


schedule = cmd.group(
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
