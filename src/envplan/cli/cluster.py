"""A plan on data-parallel replicas, some of which may straggle: options, and what came of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

import envplan
from envplan._io.words import counted, significant
from envplan.cli import output as ui
from envplan.cli.costs import cost_columns, cost_title
from envplan.cli.describe import modelled_title
from envplan.cli.given import options_given, refuse_both
from envplan.cli.job_options import ParallelOptions
from envplan.cli.progress import progress
from envplan.cli.shared import CLUSTER
from envplan.cli.tables import Column, percent_column, value_column
from envplan.cli.types import InputFile, Numbers, numbers, parser_of
from envplan.errors import InputError
from envplan.quantities import NUMBER, WHOLE

if TYPE_CHECKING:
    from envplan.costs import Run
    from envplan.simulation.conditions import Conditions


class Straggler(NamedTuple):
    """A replica that takes longer than its plan.

    Attributes:
        replica: its number; None: the lowest that is free.
        slowdown: how many times the plan's time it takes.
    """

    replica: int | None
    slowdown: float


def _parse_straggler(text: str, option: str) -> Straggler:
    """From `1.2`, or `3:1.2` for replica 3."""
    replica, colon, factor = text.rpartition(":")
    number = int(WHOLE.parse(replica, option)) if colon else None
    return Straggler(number, NUMBER.within(1, 1e6).parse(factor, option))


@dataclass(frozen=True, kw_only=True)
class ClusterOptions(ParallelOptions):
    """Replicas of the plan together, some of which may straggle."""

    straggler: Annotated[
        list[Straggler] | None,
        typer.Option(
            metavar="[REPLICA:]FACTOR",
            parser=parser_of(_parse_straggler),
            help="A replica takes FACTOR times the plan's time; may be given more than once.",
            rich_help_panel=CLUSTER,
        ),
    ] = None
    straggler_trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Stragglers of several iterations: CSV with iteration,replica,slowdown.",
            rich_help_panel=CLUSTER,
        ),
        InputFile(),
    ] = None
    strong_scaling: Annotated[
        Numbers | None,
        typer.Option(
            metavar="R,R,...",
            parser=numbers("32,64,128"),
            help="The same global batch on so many replicas, with fewer microbatches each.",
            rich_help_panel=CLUSTER,
        ),
    ] = None

    def __post_init__(self) -> None:
        """Raises: InputError: both options for stragglers are given."""
        refuse_both(options_given(self, "straggler", "straggler_trace"))

    @property
    def gpus_per_stage(self) -> int | None:
        """GPUs that run a stage together; None: as many as the plan says."""
        if self.tp is None and self.cp is None:
            return None
        return (self.tp or 1) * (self.cp or 1)

    def slowdowns(self, replicas: int) -> list[dict[int, float]]:
        """For each iteration the slowdowns of the replicas that straggle in it.

        Raises:
            InputError: a replica straggles twice, or the trace cannot be read.
        """
        if self.straggler_trace is not None:
            return envplan.read_slowdowns(self.straggler_trace, replicas)
        stragglers, slowdowns = self.straggler or [], dict[int, float]()
        for straggler in stragglers:
            if straggler.replica in slowdowns:
                raise InputError(f"--straggler names replica {straggler.replica} twice")
            if straggler.replica is not None:
                slowdowns[straggler.replica] = straggler.slowdown
        for straggler in stragglers:
            if straggler.replica is None:
                lowest_free = next(number for number in count() if number not in slowdowns)
                slowdowns[lowest_free] = straggler.slowdown
        return [slowdowns]

    def reports(
        self, plan: envplan.Plan, profile: envplan.Profile, conditions: Conditions, *, force: bool
    ) -> list[envplan.ClusterReport]:
        """The cluster, and then its further shapes; none where no option asks for it.

        Raises:
            InputError: a replica straggles twice, or as for simulate_cluster.
        """
        if not options_given(self):
            return []
        replicas = self.dp or plan.job.replicas
        slowdowns = self.slowdowns(replicas)
        with progress("Tracing the frontier") as work:
            report = envplan.simulate_cluster(
                plan,
                profile,
                replicas=replicas,
                slowdowns=slowdowns,
                gpus_per_stage=self.gpus_per_stage,
                conditions=conditions,
                force=force,
                progress=work.frontier_step,
            )
        if not self.strong_scaling:
            return [report]
        scaled = envplan.strong_scaling(
            plan,
            profile,
            self.strong_scaling,
            global_batch=plan.job.microbatches * replicas,
            slowdowns=slowdowns,
            gpus_per_stage=self.gpus_per_stage,
            conditions=conditions,
            force=force,
        )
        return [report, *scaled]


def print_clusters(
    reports: Sequence[envplan.ClusterReport], source: str | None, run: Run | None
) -> None:
    """The cluster and its further shapes, what they cost, and its stragglers."""
    if not reports:
        return
    title = modelled_title(f"Cluster, {counted(len(reports[0].iterations), 'iteration')}", source)
    if len(reports) > 1:
        title += "; the first row is the plan, others are planned anew for the same global batch"
    ui.show_table(title, _cluster_columns(reports))
    if run is not None:
        gpus = value_column("GPUs", [report.num_gpus for report in reports])
        costs = cost_columns(run, [report.costs(run) for report in reports])
        ui.show_table(cost_title(run, source), [gpus, *costs])
    ui.say(*_straggler_notes(reports[0]))


def _cluster_columns(reports: Sequence[envplan.ClusterReport]) -> list[Column]:
    def amounts(header: str, values: Iterable[float]) -> Column:
        return value_column(header, map(significant, values))

    def savings(header: str, energies_j: Iterable[float]) -> Column:
        energies = zip(reports, energies_j, strict=True)
        return percent_column(header, [report.percent(energy) for report, energy in energies])

    return [
        value_column("GPUs", [report.num_gpus for report in reports]),
        value_column("replicas", [report.replicas for report in reports]),
        value_column("microbatches", [report.num_microbatches for report in reports]),
        amounts("time (s)", [report.time for report in reports]),
        amounts("max frequency (J)", [report.baseline_energy for report in reports]),
        amounts("plan (J)", [report.plan_energy for report in reports]),
        amounts("with look-up (J)", [report.energy for report in reports]),
        savings("intrinsic saved (%)", [report.intrinsic_savings for report in reports]),
        savings("extrinsic saved (%)", [report.extrinsic_savings for report in reports]),
        savings("total saved (%)", [report.baseline_energy - report.energy for report in reports]),
    ]


def _straggler_notes(report: envplan.ClusterReport) -> list[str]:
    """In how many iterations somebody straggles, and what the worst one does to the others."""
    straggling = [iteration for iteration in report.iterations if iteration.stragglers]
    if not straggling:
        return []
    worst = max(straggling, key=lambda iteration: iteration.sync_time_s)
    return [
        f"somebody straggles in {len(straggling)} of {len(report.iterations)}; at worst T' is "
        f"{significant(worst.sync_time_s)} s, and the others follow the plan of "
        f"{significant(worst.followed_time_s)} s"
    ]
