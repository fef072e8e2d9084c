"""`envplan apply`: from a plan to what every rank sets its clock to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

import envplan
from envplan._io.documents import MAX_DOCUMENT_BYTES
from envplan._io.files import atomic_write, read_bounded
from envplan._io.words import significant
from envplan.cli import output as ui
from envplan.cli.describe import ITERATION_TITLE, modelled_title, span
from envplan.cli.invocation import invocation
from envplan.cli.job_options import ParallelOptions, PlanOptions
from envplan.cli.late_clocks import late_clocks
from envplan.cli.progress import progress
from envplan.cli.shared import JOB, MOST_USED, SLOW_CLOCKS, MinDwell
from envplan.cli.tables import Column, change_row, table_columns, text_column, value_column
from envplan.cli.types import Numbers, OutputFile, completing, numbers, one_of, quantity
from envplan.enforce.formats import ENVPLAN, FORMATS, ZEUS
from envplan.errors import InputError, naming
from envplan.quantities import COUNT
from envplan.units import s_from_ns

if TYPE_CHECKING:
    from envplan.enforce.freqplan import ClockedOperation, StageClocks
    from envplan.enforce.power_limits import PowerLimits
    from envplan.enforce.topology import Topology

_MAX_DEVICES: Final = 10**6
#: Formats of watts, by name, with the files that are written where users name none.
_POWER_FORMATS: Final = {
    "power-limits": Path("run.power.json"),
    "job-power": Path("run.power.jsonl"),
}
#: Spans of ranks that a row of the table lists.
_MAX_SPANS: Final = 6


@dataclass(frozen=True, kw_only=True)
class RankOptions(ParallelOptions):
    """The ranks of a job, and the devices that they use."""

    rank_order: Annotated[
        str,
        typer.Option(
            metavar="ORDER",
            help="Dimensions in which global ranks count up, innermost first; the default is "
            "Megatron-LM's.",
            rich_help_panel=JOB,
        ),
    ] = "tp-cp-ep-dp-pp"
    gpus_per_node: Annotated[
        int,
        typer.Option(
            metavar="N",
            parser=quantity(COUNT.within(1, _MAX_DEVICES)),
            help="A rank's device is its number modulo N.",
            rich_help_panel=JOB,
        ),
    ] = 8
    devices: Annotated[
        Numbers | None,
        typer.Option(
            metavar="I[,I...]",
            parser=numbers("0,2,4,6", lowest=0, highest=_MAX_DEVICES),
            help="Devices of a node's ranks in turn, instead of 0, 1, 2, ...",
            rich_help_panel=JOB,
        ),
    ] = None

    def __post_init__(self) -> None:
        """Raises: InputError: a device is named twice."""
        if self.devices is not None and len(set(self.devices)) < len(self.devices):
            raise InputError("--devices names a device twice")

    @property
    def node_devices(self) -> Sequence[int]:
        """The devices of a node; a rank has the one of its number modulo their count."""
        return self.devices or range(self.gpus_per_node)

    def topology(self, plan: envplan.Plan) -> Topology:
        """Which rank runs which stage.

        Raises:
            InputError: these ranks cannot run the plan.
        """
        from envplan.enforce.topology import Topology

        return Topology.for_job(
            plan.job, tp=self.tp, cp=self.cp, dp=self.dp, rank_order=self.rank_order
        )


@dataclass(frozen=True, kw_only=True)
class SupportedClockOptions:
    """The clocks that the plan's are checked against."""

    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[,NAME...]",
            help="Check clocks against this known GPU, or against one for each stage, as in "
            "a40,a40,a100; default: what the profile names.",
            show_default=False,
            rich_help_panel=SLOW_CLOCKS,
        ),
    ] = None
    clocks: Annotated[
        str | None,
        typer.Option(
            metavar="MHZ",
            help="Check them against these, as in 210,900,1410 or 210-1410:15.",
            rich_help_panel=SLOW_CLOCKS,
        ),
    ] = None
    backend: Annotated[
        str | None,
        typer.Option(
            metavar="nvml",
            parser=one_of("nvml"),
            help="Check them against what this machine's GPUs support.",
            rich_help_panel=SLOW_CLOCKS,
        ),
    ] = None

    def read(
        self, profile: envplan.Profile, *, force: bool
    ) -> StageClocks | list[StageClocks] | None:
        """The clocks, of all stages or of each; None: those of the profile's GPU.

        Args:
            profile: of the plan.
            force: whether other GPUs than the profile's may be named.

        Raises:
            InputError: options exclude each other, or one names nothing.
        """
        from envplan.enforce.supported_clocks import (
            live_clocks,
            modelled_clocks,
            parse_clocks,
            refuse_other_gpus,
        )

        if self.backend is not None:
            if self.gpu is not None or self.clocks is not None:
                raise InputError(
                    "--backend reads the clocks from this machine; leave out the others"
                )
            return live_clocks(profile, force=force)
        if self.clocks is not None:
            return parse_clocks(self.clocks, self.gpu or profile.metadata.gpu)
        if self.gpu is None:
            return None
        stage_clocks = [modelled_clocks(name.strip()) for name in self.gpu.split(",")]
        if not force:
            refuse_other_gpus(profile, stage_clocks)
        return stage_clocks if len(stage_clocks) > 1 else stage_clocks[0]


def apply(
    source: PlanOptions,
    ranks: RankOptions,
    supported: SupportedClockOptions,
    *,
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
            parser=one_of(*FORMATS, *_POWER_FORMATS),
            autocompletion=completing((*FORMATS, *_POWER_FORMATS)),
            help="envplan, csv, or zeus for the server of Zeus; power-limits for watts in place "
            "of clocks, job-power for a line of what the job draws.",
            rich_help_panel=MOST_USED,
        ),
    ] = ENVPLAN.name,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            parser=OutputFile(),
            help="Where it goes; default: run.freqplan.json (.csv, .py), run.power.json(l).",
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
      envplan apply plan.json --tp 4 --dp 2 --min-dwell 20ms
      envplan apply plan.json --format zeus -o schedule.py
      envplan apply plan.json --format power-limits
    """
    from envplan.enforce.apply import apply_plan
    from envplan.enforce.remarks import remarks

    if format in _POWER_FORMATS:
        _apply_as_power(source, ranks, format, output, dry_run=dry_run)
        return
    chosen_format = FORMATS[format]
    if ladder and not chosen_format.has_ladder:
        raise InputError(f"--format {format} has no place for a ladder; leave out --ladder")
    file = output or chosen_format.default_output
    plan, profile = source.load()
    if output is None and not dry_run:
        invocation().will_write(file)
    elif output is not None and dry_run:
        invocation().will_not_write(file)
    if ladder and plan.ladder is None:
        raise InputError("has no ladder; solve again with --ladder N", path=source.plan)
    topology = ranks.topology(plan)
    clocks = supported.read(profile, force=source.force)
    followed, dwell_notes = _with_min_dwell(plan, profile, min_dwell or 0.0)
    with progress("applying the plan"), naming(source.plan):
        applied = apply_plan(
            followed,
            profile,
            topology=topology,
            clocks=clocks,
            devices=ranks.node_devices,
            ladder=ladder is not False,
            force=source.force,
            plan_sha256=_sha256(source.plan),
        )
    if followed is not plan:
        applied = applied.model_copy(update={"min_dwell_s": min_dwell})
    if not dry_run:
        atomic_write(file, chosen_format.text(applied))
    if chosen_format is ZEUS:
        _warn_of_late_clocks(followed, profile, force=source.force)
    forced = profile.sha256 != plan.profile.sha256
    notes = remarks(followed, applied, chosen_format, file, forced=forced) + dwell_notes
    if chosen_format is ENVPLAN and not forced:
        notes += late_clocks(profile, followed)
    if dry_run:
        next_command = ["envplan", "apply", str(source.plan)]
    elif chosen_format is ENVPLAN:
        next_command = ["envplan", "check", str(file)]
    else:
        next_command = ["envplan", "simulate", str(source.plan)]
    not_shown = {"schema_id", "supported_clocks_mhz", "stage_gpus", "ranks", "ladder", "switching"}
    ui.answer(
        lambda: {
            "frequency_plan": None if dry_run else str(file),
            "format": format,
            "notes": notes,
            **applied.model_dump(mode="json", by_alias=True, exclude_none=True, exclude=not_shown),
            "ladder_rungs": len(applied.ladder or []),
        },
        lambda: _print(plan, applied, notes, dry_run=dry_run),
        next_command=next_command,
    )


def _apply_as_power(
    source: PlanOptions, ranks: RankOptions, name: str, output: Path | None, *, dry_run: bool
) -> None:
    """Write power limits in the place of clocks, or the line of what the job draws."""
    from envplan.enforce.apply import apply_plan
    from envplan.enforce.power_limits import power_limits

    file = output or _POWER_FORMATS[name]
    if output is None and not dry_run:
        invocation().will_write(file)
    plan, profile = source.load()
    topology = ranks.topology(plan)
    with progress("choosing power limits"), naming(source.plan):
        applied = apply_plan(
            plan,
            profile,
            topology=topology,
            devices=ranks.node_devices,
            force=source.force,
            plan_sha256=_sha256(source.plan),
        )
        limits = power_limits(plan, profile, applied, force=source.force)
    if not dry_run:
        is_line = name == "job-power"
        text = limits.clocks_power.to_line() if is_line else limits.to_json()
        atomic_write(file, text)
    ui.answer(
        lambda: {"file": None if dry_run else str(file), "format": name, **limits.to_dict()},
        lambda: _print_power(limits),
        next_command=["envplan", "apply", str(source.plan)],
    )


def _print_power(limits: PowerLimits) -> None:
    rows = [
        change_row("iteration time (s)", limits.clocks_time_s, limits.iteration_time_s),
        change_row("energy (J)", limits.clocks_energy_j, limits.energy_j),
    ]
    for what in ("gpu", "node", "job"):
        with_clocks, with_limits = (
            getattr(power, what) for power in (limits.clocks_power, limits.power)
        )
        words = {"gpu": "a GPU", "node": "a node", "job": "the job"}[what]
        rows += [
            change_row(f"{words}: steady (W)", with_clocks.steady_w, with_limits.steady_w),
            change_row(f"{words}: peak (W)", with_clocks.peak_w, with_limits.peak_w),
            change_row(f"{words}: ramp (W/s)", with_clocks.ramp_w_per_s, with_limits.ramp_w_per_s),
        ]
    title = "An iteration with the plan's clocks, and under power limits in their place (modelled)"
    ui.show_table(title, table_columns(("", "clocks", "limits", "change (%)"), rows))
    columns = [
        text_column("stage", range(len(limits.limits_w))),
        value_column("power limit (W)", limits.limits_w),
    ]
    ui.show_table("", columns)
    first = limits.applied.ranks[0]
    limit_w = limits.limits_w[first.stage]
    ui.say(f"rank 0: nvidia-smi -i {first.device} -pl {limit_w}")


def _with_min_dwell(
    plan: envplan.Plan, profile: envplan.Profile, min_dwell_s: float
) -> tuple[envplan.Plan, list[str]]:
    """A plan whose clocks last so long, planned again if need be, and notes about that."""
    from envplan.request.limits import MinDwell as MinDwellLimit
    from envplan.runtime.drift import replan

    limit = plan.request.limit(MinDwellLimit)
    planned_dwell_s = 0.0 if limit is None else limit.time_s
    if min_dwell_s > planned_dwell_s:
        with progress("Planning again") as work:
            plan = replan(plan, profile, work.frontier_step, min_dwell=min_dwell_s)
        return plan, [f"planned again for clocks that last {1000 * min_dwell_s:g} ms"]
    if min_dwell_s:
        return plan, [f"each clock of the plan lasts {1000 * planned_dwell_s:g} ms already"]
    return plan, []


def _warn_of_late_clocks(plan: envplan.Plan, profile: envplan.Profile, *, force: bool) -> None:
    """Warn that Zeus asks for clocks as operations start, where the plan was made for ahead."""
    from envplan.plan import replay_plan

    machine = plan.job.machine
    if not (machine.latency_ns and machine.asks_ahead):
        return
    late = replay_plan(plan, profile, force=force, machine=replace(machine, ask="start"))
    time_s = s_from_ns(late.makespan_ns)
    percent = 100 * (time_s / plan.iteration_time - 1)
    ui.warn(
        "Zeus asks for a clock as its operation starts, and the plan is made for asking "
        f"ahead: its iteration then takes {significant(time_s)} s, {percent:.2f}% more; plan with "
        "--ask start"
    )


def _sha256(plan: Path) -> str:
    import hashlib

    return hashlib.sha256(read_bounded(plan, MAX_DOCUMENT_BYTES)).hexdigest()


def _print(
    plan: envplan.Plan, applied: envplan.FrequencyPlan, notes: Sequence[str], *, dry_run: bool
) -> None:
    layout = applied.layout
    ui.say(
        f"{applied.world_size} ranks: {layout.stages} stages x tp {layout.tp} x cp {layout.cp} x "
        f"dp {layout.dp}, in the order {layout.rank_order}"
    )
    planned_j = plan.energy * layout.tp * layout.cp * layout.dp / plan.job.num_gpus
    rows = [
        change_row("iteration time (s)", plan.iteration_time, applied.iteration_time_s),
        change_row("energy (J)", planned_j, applied.energy_j),
    ]
    title = modelled_title(ITERATION_TITLE, plan.profile.source)
    ui.show_table(title, table_columns(("", "plan", "applied", "change (%)"), rows))
    _print_stages(applied)
    if dry_run:
        for stage, operations in enumerate(applied.stage_operations()):
            ui.say(f"stage {stage}: {', '.join(_clocks_in_order(operations))}")
    ui.say(*notes)


def _print_stages(applied: envplan.FrequencyPlan) -> None:
    """A row for each stage: its ranks, operations and clocks."""
    by_stage = applied.stage_operations()
    ranks = []
    clocks = []
    for stage, operations in enumerate(by_stage):
        ranks.append(_spans([rank.rank for rank in applied.ranks if rank.stage == stage]))
        clocks_mhz = {operation.frequency_mhz for operation in operations} - {0}
        clocks.append(span(sorted(clocks_mhz), " to ") or "none set")
    columns = [
        text_column("stage", range(len(by_stage))),
        Column(header="ranks", cells=ranks, may_fold=True),
        value_column("operations", map(len, by_stage)),
        value_column("clocks (MHz)", clocks),
    ]
    ui.show_table("", columns)


def _clocks_in_order(operations: Sequence[ClockedOperation]) -> Iterator[str]:
    """Operations in a row of the same instruction and clock, as in `forward x3 1410`."""
    runs = groupby(
        operations, key=lambda operation: (operation.instruction, operation.frequency_mhz)
    )
    for (instruction, clock_mhz), run in runs:
        count = len(list(run))
        times = f"x{count} " if count > 1 else ""
        yield f"{instruction} {times}{clock_mhz or '-'}"


def _spans(ranks: Sequence[int]) -> str:
    """Ascending numbers, with neighbours as spans: 0-3, 8-11; the first ones of many."""
    neighbours: list[list[int]] = []
    for rank in ranks:
        if neighbours and rank == neighbours[-1][-1] + 1:
            neighbours[-1].append(rank)
        else:
            neighbours.append([rank])
    spans = [span(group) for group in neighbours[:_MAX_SPANS]]
    if len(neighbours) > _MAX_SPANS:
        spans.append("...")
    return ", ".join(spans)
