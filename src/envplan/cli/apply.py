"""`envplan apply`: from a plan to what every rank sets its clock to."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import envplan
from envplan.cli import output as ui
from envplan.cli.groups import ParallelOptions, PlanOptions
from envplan.cli.invocation import invocation
from envplan.cli.progress import progress
from envplan.cli.shared import JOB, MOST_USED, SLOW_CLOCKS, MinDwell
from envplan.cli.types import Numbers, OutputFile, numbers, one_of, quantity
from envplan.errors import InputError, naming
from envplan.quantities import COUNT

if TYPE_CHECKING:
    from envplan.enforce.freqplan import StageClocks

_DEFAULT_OUTPUT = {
    "envplan": "run.freqplan.json",
    "zeus": "run.freqplan.py",
    "csv": "run.freqplan.csv",
}
_MOST_DEVICES = 10**6


def apply(
    source: PlanOptions,
    parallel: ParallelOptions,
    rank_order: Annotated[
        str,
        typer.Option(
            metavar="ORDER",
            help="Dimensions in which global ranks count up, innermost first; the default is "
            "Megatron-LM's.",
            rich_help_panel=JOB,
        ),
    ] = "tp-cp-ep-dp-pp",
    gpus_per_node: Annotated[
        int,
        typer.Option(
            metavar="N",
            parser=quantity(COUNT.within(1, _MOST_DEVICES)),
            help="A rank's device is its number modulo N.",
            rich_help_panel=JOB,
        ),
    ] = 8,
    devices: Annotated[
        Numbers | None,
        typer.Option(
            metavar="I[,I...]",
            parser=numbers("0,2,4,6", least=0, most=_MOST_DEVICES),
            help="Devices of a node's ranks in turn, instead of 0, 1, 2, ...",
            rich_help_panel=JOB,
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[,NAME...]",
            help="Check clocks against this known GPU, or against one for each stage, as in "
            "a40,a40,a100; default: what the profile names.",
            show_default=False,
            rich_help_panel=SLOW_CLOCKS,
        ),
    ] = None,
    clocks: Annotated[
        str | None,
        typer.Option(
            metavar="MHZ",
            help="Check them against these, as in 210,900,1410 or 210-1410:15.",
            rich_help_panel=SLOW_CLOCKS,
        ),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            metavar="nvml",
            parser=one_of("nvml"),
            help="Check them against what this machine's GPUs support.",
            rich_help_panel=SLOW_CLOCKS,
        ),
    ] = None,
    min_dwell: MinDwell = None,
    ladder: Annotated[
        bool | None,
        typer.Option(
            "--ladder/--no-ladder",
            help="Include the plan's slower plans for stragglers; default: if it has any.",
            show_default=False,
            rich_help_panel=MOST_USED,
        ),
    ] = None,
    format: Annotated[  # noqa: A002  (the option's name)
        str,
        typer.Option(
            metavar="NAME",
            parser=one_of(*_DEFAULT_OUTPUT),
            help="envplan, csv, or zeus for the server of Zeus.",
            rich_help_panel=MOST_USED,
        ),
    ] = "envplan",
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            parser=OutputFile(),
            help="Where it goes; default: run.freqplan.json (.csv, .py).",
            show_default=False,
            rich_help_panel=MOST_USED,
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print every stage's clocks in order; write nothing.",
            rich_help_panel=MOST_USED,
        ),
    ] = False,
) -> None:
    """Turn a plan into a frequency plan: for every rank its clocks in order, checked.

    Clocks the GPU does not have are replaced by the next ones above, never by slower ones.

    \b
    Example:
      envplan apply plan.json
      envplan apply plan.json --tp 4 --dp 2 --min-dwell 20
      envplan apply plan.json --format zeus -o schedule.py
    """
    if ladder and format != "envplan":
        raise InputError(f"--format {format} has no place for a ladder; leave out --ladder")
    if devices is not None and len(set(devices)) < len(devices):
        raise InputError("--devices names a device twice")
    file = output or Path(_DEFAULT_OUTPUT[format])
    from envplan._io.files import atomic_write
    from envplan.enforce.apply import apply_plan
    from envplan.enforce.remarks import remarks
    from envplan.enforce.topology import Topology
    from envplan.request.limits import MinDwell as LeastDwell
    from envplan.runtime.drift import replan

    solved, profile = source.load()
    if not dry_run and output is None:
        invocation().will_write(file)
    elif dry_run and output is not None:
        invocation().will_not_write(file)
    if ladder and solved.ladder is None:
        raise InputError("has no ladder; solve again with --ladder N", path=source.plan)
    topology = Topology.for_job(
        solved.job, tp=parallel.tp, cp=parallel.cp, dp=parallel.dp, rank_order=rank_order
    )
    known = _clocks(profile, gpu, clocks, backend, source.force)
    planned = solved
    limits = solved.request.limits
    held = max((limit.time_s for limit in limits if isinstance(limit, LeastDwell)), default=0.0)
    hold = min_dwell or 0.0
    again = hold > held
    if again:
        with progress("Planning again") as work:
            solved = replan(planned, profile, work.frontier_step, min_dwell=hold)
    with progress("applying the plan"), naming(source.plan):
        applied = apply_plan(
            solved,
            profile,
            topology=topology,
            clocks=known,
            devices=devices or range(gpus_per_node),
            ladder=ladder is not False,
            force=source.force,
            plan_sha256=_sha256(source.plan),
        )
    if not dry_run:
        writers = {"zeus": applied.to_zeus, "csv": applied.to_csv}
        atomic_write(file, writers.get(format, applied.to_json)())
    forced = profile.sha256 != planned.profile.sha256
    notes = remarks(solved, applied, format, file, forced=forced)
    if again:
        notes.append(f"planned again for clocks that last {1000 * hold:g} ms")
    elif hold:
        notes.append(f"each clock of the plan lasts {1000 * held:g} ms already")
    then = ["apply" if dry_run else "simulate", str(source.plan)]
    if format == "envplan" and not dry_run:
        then = ["check", str(file)]
    lists = {"schema_id", "supported_clocks_mhz", "stage_gpus", "ranks", "ladder"}
    ui.answer(
        lambda: {
            "frequency_plan": None if dry_run else str(file),
            "format": format,
            "notes": notes,
            **applied.model_dump(mode="json", by_alias=True, exclude_none=True, exclude=lists),
            "ladder_rungs": len(applied.ladder or []),
        },
        lambda: _print(planned, applied, notes, dry_run=dry_run),
        then=["envplan", *then],
    )


def _sha256(plan: Path) -> str | None:
    """That of a file; none of a pipe, which has been read by now."""
    import hashlib

    return hashlib.sha256(plan.read_bytes()).hexdigest() if plan.is_file() else None


def _clocks(
    profile: envplan.Profile, gpu: str | None, clocks: str | None, backend: str | None, force: bool
) -> StageClocks | list[StageClocks] | None:
    """The clocks to check against, by whichever option says so; None: those of the profile.

    Raises:
        InputError: options exclude each other, or one names nothing.
    """
    from envplan.enforce.supported_clocks import (
        live_clocks,
        modelled_clocks,
        parse_clocks,
        refuse_other_gpus,
    )

    if backend is not None:
        if gpu is not None or clocks is not None:
            raise InputError("--backend reads the clocks from this machine; leave out the others")
        return live_clocks(profile, force=force)
    if clocks is not None:
        return parse_clocks(clocks, gpu or profile.metadata.gpu)
    if gpu is None:
        return None
    named = [modelled_clocks(name.strip()) for name in gpu.split(",")]
    if not force:
        refuse_other_gpus(profile, named)
    return named if len(named) > 1 else named[0]


def _print(
    plan: envplan.Plan, applied: envplan.FrequencyPlan, notes: list[str], *, dry_run: bool
) -> None:
    layout, operations = applied.layout, applied.stage_operations()
    ui.say(
        f"{applied.world_size} ranks: {layout.stages} stages x tp {layout.tp} x cp {layout.cp} x "
        f"dp {layout.dp}, in the order {layout.rank_order}"
    )
    planned_j = plan.energy * layout.tp * layout.cp * layout.dp / plan.job.num_gpus
    rows = [
        ("iteration time (s)", plan.iteration_time, applied.iteration_time_s),
        ("energy (J)", planned_j, applied.energy_j),
    ]
    title = ui.titled(ui.ITERATION, plan.profile.source)
    ui.print_table(title, ("", "plan", "applied", "change (%)"), ui.changes(rows))
    stages = range(len(operations))
    clocks = [sorted({mhz for *_, mhz in of_stage} - {0}) for of_stage in operations]
    columns = {
        "stage": stages,
        "ranks": [_spans([r.rank for r in applied.ranks if r.stage == s]) for s in stages],
        "operations": list(map(len, operations)),
        "clocks (MHz)": [ui.span(mhz, " to ") or "none set" for mhz in clocks],
    }
    ui.print_columns("", columns, wrap=("ranks",))
    for stage, of_stage in enumerate(operations if dry_run else ()):
        words = []
        for (instruction, mhz), run in groupby(of_stage, key=lambda op: (op[0], op[3])):
            count = len(list(run))
            words.append(f"{instruction} {f'x{count} ' if count > 1 else ''}{mhz or '-'}")
        ui.say(f"stage {stage}: {', '.join(words)}")
    ui.say(*notes)


def _spans(ranks: list[int]) -> str:
    """Ascending numbers, with neighbours as spans: 0-3, 8-11."""
    runs = groupby(enumerate(ranks), key=lambda place: place[1] - place[0])
    spans = [[rank for _, rank in run] for _, run in runs]
    shown = map(ui.span, spans[:6])
    return ", ".join(shown) + (", ..." if len(spans) > 6 else "")
