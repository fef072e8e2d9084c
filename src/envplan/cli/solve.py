"""`envplan solve`: one plan for one request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

import envplan
from envplan._io.words import counted, significant
from envplan.cli import output as ui
from envplan.cli.better_order import better_order
from envplan.cli.cost_options import CostOptions
from envplan.cli.costs import cost_rows, costs_document, print_costs, year_of
from envplan.cli.describe import ITERATION_TITLE, describe_ends, describe_job, modelled_title
from envplan.cli.given import as_typed, options_given, refuse, refuse_both, require_with
from envplan.cli.invocation import invocation
from envplan.cli.job_options import JobOptions, LoadedJob
from envplan.cli.late_clocks import frequent_changes
from envplan.cli.limits import LimitOptions, limit_keywords
from envplan.cli.plan_notes import plan_notes
from envplan.cli.progress import Progress, progress
from envplan.cli.shared import (
    JOB,
    MONEY,
    MOST_USED,
    SLOW_CLOCKS,
    TARGET,
    AskOption,
    Reconfigure,
    ReplicaGroup,
    SwitchLatency,
    parse_replica_group,
)
from envplan.cli.simulate import print_replicas
from envplan.cli.tables import change_row, table_columns
from envplan.cli.types import InputFile, OutputFile, completing, either, one_of, parser_of, quantity
from envplan.costs.model import Minimized
from envplan.errors import naming
from envplan.planners import PLANNERS
from envplan.quantities import ENERGY, LONG_TIME, PERCENT, TIME, WHOLE

_STALL = replace(TIME, what="an energy, such as 0.2J, or a time, such as 2ms", plain=None)

if TYPE_CHECKING:
    from envplan.planners import Planner
    from envplan.simulation.replicas import ReplicaPlans


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """By when an iteration is to be over; without one of these, no slowdown."""

    target_time: Annotated[
        float | None,
        typer.Option(
            metavar="TIME",
            parser=quantity(TIME),
            help="Least energy with an iteration of at most TIME, as in 14.2 (seconds) or 900ms.",
            rich_help_panel=MOST_USED,
        ),
    ] = None
    slowdown: Annotated[
        float | None,
        typer.Option(
            metavar="PCT",
            parser=quantity(PERCENT),
            help="Least energy at most PCT percent above T_min.",
            rich_help_panel=MOST_USED,
        ),
    ] = None
    min_energy: Annotated[
        bool,
        typer.Option(
            "--min-energy", help="Least energy of all, at T_star.", rich_help_panel=MOST_USED
        ),
    ] = False
    straggler_time: Annotated[
        float | None,
        typer.Option(
            metavar="TIME",
            parser=quantity(TIME),
            help="Some replica takes so long anyway: use what time that leaves, up to T_max.",
            rich_help_panel=TARGET,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class EffortOptions:
    """How much is done for a plan."""

    polish: Annotated[
        float,
        typer.Option(
            metavar="TIME",
            parser=quantity(TIME),
            help="Time to spend on improving the plan with CP-SAT, as in 30s; default: none.",
            show_default=False,
            rich_help_panel=TARGET,
        ),
    ] = 0.0
    ladder: Annotated[
        int,
        typer.Option(
            metavar="N",
            parser=quantity(WHOLE),
            help="Put up to N slower plans, up to T_max, into the file for when a straggler "
            "appears.",
            rich_help_panel=TARGET,
        ),
    ] = 0


@dataclass(frozen=True, kw_only=True)
class RunOptions(CostOptions):
    """Costs of a run, and by when it is to be over as cheaply as possible."""

    deadline: Annotated[
        float | None,
        typer.Option(
            metavar="TIME",
            parser=quantity(LONG_TIME),
            help="The cheapest plan whose run is over within TIME, as in 14d, 36h or 1d12h.",
            rich_help_panel=MONEY,
        ),
    ] = None
    minimize: Annotated[
        Minimized | None,
        typer.Option(
            metavar="WHAT",
            parser=one_of("money", "carbon", "energy"),
            help="With --deadline: money, carbon or energy; default: the first of these that is "
            "known.",
            rich_help_panel=MONEY,
        ),
    ] = None

    def __post_init__(self) -> None:
        """Raises: InputError: options contradict each other or lack one another."""
        super().__post_init__()
        require_with(self, "minimize", "deadline")
        require_with(self, "deadline", "iterations", "tokens")


@dataclass(frozen=True)
class ChangeCost:
    """What a change of clock costs: J of one GPU, or the s for which it stops."""

    energy_j: float = 0.0
    stall_s: float = 0.0


def _parse_change_cost(text: str, name: str) -> ChangeCost:
    """The cost that a text gives.

    Raises:
        InputError: it is neither an energy with a unit nor a time with one.
    """
    if text.strip().endswith("J"):
        return ChangeCost(energy_j=ENERGY.parse(text, name))
    return ChangeCost(stall_s=_STALL.parse(text, name))


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """All that is asked of a plan."""

    target: TargetOptions
    switch_latency: SwitchLatency = None
    ask: AskOption = None
    changes: Annotated[
        Literal["fewest", "free"] | None,
        typer.Option(
            metavar="HOW",
            parser=one_of("fewest", "free"),
            help="Changes of clock: fewest, as few as can be for 0.1% of energy (default); free, "
            "as many as save anything.",
            show_default=False,
            rich_help_panel=SLOW_CLOCKS,
        ),
    ] = None
    change_cost: Annotated[
        ChangeCost | None,
        typer.Option(
            metavar="J|TIME",
            parser=parser_of(_parse_change_cost),
            help="Instead, what each change costs, as in 0.2J; or for how long it stops its GPU, "
            "as in 2ms, which costs blocking power and is not in the plan's times.",
            rich_help_panel=SLOW_CLOCKS,
        ),
    ] = None
    limits: LimitOptions
    effort: EffortOptions
    run: RunOptions

    def __post_init__(self) -> None:
        """Raises: InputError: more than one option says by when an iteration is to be over."""
        times = options_given(self.target, "target_time", "slowdown", "min_energy")
        refuse_both([*times, *options_given(self.run, "deadline")])
        refuse_both(options_given(self, "changes", "change_cost"))

    def request(
        self, frontier: envplan.Frontier, *, measured_latency_s: float | None
    ) -> envplan.Request:
        """The request that the options make.

        Args:
            frontier: of the job.
            measured_latency_s: how late clocks come where no option says so; None: nobody knows.

        Raises:
            InputError: two of them exclude each other, or a rate cannot be read.
        """
        if measured_latency_s is None:
            require_with(self, "ask", "switch_latency")
        latency_s = measured_latency_s if self.switch_latency is None else self.switch_latency
        target = self.target
        run = self.run.run(frontier, deadline_s=self.run.deadline, minimize=self.run.minimize)
        change_cost = self.change_cost or ChangeCost()
        return envplan.Request.from_options(
            target_time=target.target_time,
            slowdown=None if target.slowdown is None else target.slowdown / 100,
            min_energy=target.min_energy,
            straggler_time=target.straggler_time,
            switch_latency=latency_s or 0.0,
            ask=self.ask or "ahead",
            run=run,
            polish=self.effort.polish,
            ladder=self.effort.ladder,
            changes=self.changes or "fewest",
            change_cost=change_cost.energy_j,
            change_stall=change_cost.stall_s,
            **limit_keywords(self.limits),
        )

    def beyond_other_planners(self) -> list[str]:
        """Options that are given and that our planner alone can do, as typed."""
        return [
            *options_given(self.target, "min_energy"),
            *options_given(self.limits),
            *options_given(self, "switch_latency", "changes", "change_cost"),
            *options_given(self.run, "deadline"),
            *options_given(self.effort),
        ]


@dataclass(frozen=True, kw_only=True)
class PlannerOptions:
    """Who chooses the frequencies."""

    planner: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help=f"{either(PLANNERS)}; envpipe brings its own schedule unless one is named.",
            autocompletion=completing(PLANNERS),
            rich_help_panel=TARGET,
        ),
    ] = "frontier"
    clocks: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Choose nothing: take the clocks from FILE (freqs_pipeline_*.py of Perseus and "
            "Zeus, a frequency plan, or a CSV) and say what they cost and what is lost.",
            rich_help_panel=TARGET,
        ),
        InputFile(),
    ] = None
    reconfigure: Reconfigure = None

    def other_planner(self, request: RequestOptions) -> Planner | None:
        """The planner that is asked for, if it can do all that is asked of the plan; None: ours.

        Raises:
            InputError: there is no such planner, or it cannot.
        """
        if not options_given(self):
            return None
        from envplan.planners import EnvPipe, planner_named

        planner = planner_named(self.planner)
        if self.planner != EnvPipe.name:
            why = f"goes with --planner envpipe, not {self.planner}"
            refuse(options_given(self, "reconfigure"), why)
        refuse_both(options_given(self, "clocks", "planner"))
        name = self.planner if self.clocks is None else "--clocks"
        excluded = request.beyond_other_planners()
        if self.clocks is None and planner.takes_target:
            accepted = "--target-time or --slowdown"
        else:
            accepted = "no target"
            excluded = options_given(request.target, "target_time", "slowdown") + excluded
        refuse(
            excluded,
            f"goes with --planner frontier; {name} takes {accepted} and knows no limits, so leave "
            "one of the two out",
        )
        return planner if self.reconfigure is None else EnvPipe(self.reconfigure)


def solve(
    job: JobOptions,
    request: RequestOptions,
    planner: PlannerOptions,
    replica_profile: Annotated[
        list[ReplicaGroup] | None,
        typer.Option(
            metavar="PROFILE[:COUNT]",
            parser=parser_of(parse_replica_group),
            help="Further replicas run on other hardware: COUNT of them (1) by this profile. May "
            "be given more than once; each kind gets a plan of its own, and all end together.",
            rich_help_panel=JOB,
        ),
    ] = None,
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            parser=OutputFile(),
            help="Where the plan goes.",
            rich_help_panel=MOST_USED,
        ),
    ] = Path("plan.json"),
) -> None:
    """Choose a frequency for every operation and write the plan.

    Without a target: no slowdown, the least energy at T_min. Targets and limits combine.

    \b
    Example:
      envplan solve --target-time 14.2
      envplan solve a40-gpt3-1.3b-4stage -m 32 --slowdown 1 -o plan.json
      envplan solve a40-gpt3-1.3b-4stage --planner envpipe
      envplan solve --clocks freqs_pipeline_00030.py
      envplan solve --price 0.25 --iterations 100000 --deadline 21d
      envplan solve -m 8 --slowdown 2 --switch-latency 20ms --ladder 4
      envplan solve --slowdown 3 --robust 95 --noise 2 --peak-power-cap 2000
    """
    if planner.planner == "envpipe" and not job.dag and job.vp in (None, 1):
        job = replace(job, schedule=job.schedule or "envpipe")
    other_planner = planner.other_planner(request)
    if replica_profile:
        refuse(
            options_given(planner, "clocks"),
            "says the clocks of one kind of replica: make a plan for each, and give them to "
            "envplan simulate PLAN --replica PLAN",
        )
        _solve_replicas(job, replica_profile, request, other_planner, output)
        return
    frontier = job.trace(whole=False)
    plans_for_late_clocks = other_planner is None and planner.clocks is None
    asked = request.request(
        frontier,
        measured_latency_s=_measured_latency_s([frontier]) if plans_for_late_clocks else None,
    )
    with progress("Planning") as work:
        plan = _plan(frontier, asked, other_planner, planner.clocks, work)
    plan.save(output)
    order = []
    if not invocation().quiet and not job.dag:
        order = list(better_order(frontier, plan, ["envplan", "solve", *as_typed(job)]))
    ui.answer(
        lambda: _document(frontier, plan, output, order),
        lambda: _print(frontier, plan, order),
        closing=year_of(plan, request.run),
        next_command=["envplan", "report", str(output)],
    )


def _measured_latency_s(frontiers: Sequence[envplan.Frontier]) -> float | None:
    """How late clocks come by the sidecars of the profiles, s: the latest; None: none says."""
    latencies_s = [frontier.profile.measured_latency_s for frontier in frontiers]
    return max((latency_s for latency_s in latencies_s if latency_s is not None), default=None)


def _plan(
    frontier: envplan.Frontier,
    request: envplan.Request,
    other_planner: Planner | None,
    clocks: Path | None,
    work: Progress,
) -> envplan.Plan:
    """The plan: of the clocks in a file, by another planner, or by ours.

    Raises:
        NoAnswerError: nothing meets the request.
    """
    if clocks is not None:
        from envplan.enforce.clock_files import read_clocks

        chosen = read_clocks(clocks, frontier.pipeline)
        with naming(clocks):
            return envplan.plan_from_clocks(
                frontier.pipeline, frontier.profile, chosen, frontier=frontier
            )
    if other_planner is None:
        return frontier.solve(request, progress=work.frontier_step)
    return other_planner.solve(frontier, request)


def _print(frontier: envplan.Frontier, plan: envplan.Plan, order: Sequence[str]) -> None:
    ui.say(describe_job(frontier))
    headers = ("", "max frequency", "plan", "change (%)")
    title = modelled_title(ITERATION_TITLE, plan.profile.source)
    ui.show_table(title, table_columns(headers, _iteration_rows(plan)))
    print_costs(plan)
    ui.say(*plan_notes(frontier, plan), describe_ends(frontier))
    ui.say(_changes_line(plan), *frequent_changes(frontier, plan), *order)
    if plan.ladder is not None:
        ui.say(f"{counted(len(plan.ladder), 'slower plan')} in the ladder for stragglers")


def _changes_line(plan: envplan.Plan) -> str:
    """How often the plan changes clocks, on average over the ranks."""
    per_rank = plan.clock_changes / plan.job.stages
    per_second = per_rank / plan.iteration_time
    return (
        f"{counted(plan.clock_changes, 'change')} of clock an iteration in all stages: "
        f"{per_rank:.1f} a rank, {per_second:.2f} a rank and second"
    )


def _iteration_rows(plan: envplan.Plan) -> list[list[str]]:
    """An iteration at maximum frequency and with the plan, a row for each quantity."""
    baseline, predicted = plan.predicted.baseline, plan.predicted
    until = predicted.until_straggler  # None without a straggler
    rows = [
        change_row("iteration time (s)", baseline.iteration_time_s, predicted.iteration_time_s),
        change_row("energy (J)", baseline.energy_j, predicted.energy_j),
    ]
    if until is not None:
        rows.append(change_row("energy with waiting (J)", until.baseline_energy_j, until.energy_j))
    rows.append(
        change_row("average power (W)", baseline.average_power_w, predicted.average_power_w)
    )
    if plan.costs is not None:
        _energy, *costs = cost_rows(plan.costs.iteration, plan.costs.currency, "g")
        rows += [change_row(row.name, row.max_frequency, row.plan) for row in costs]
    if until is None:
        rows.append(["certified gap (%)", "", f"{100 * predicted.gap:.3f}", ""])
    else:
        rows.append(["certified gap with waiting (%)", "", f"{100 * until.gap:.3f}", ""])
    return rows


def _document(
    frontier: envplan.Frontier, plan: envplan.Plan, output: Path, order: Sequence[str]
) -> ui.Document:
    """The plan without its operations, with what a person is told of it."""
    document: dict[str, object] = {
        "plan": str(output),
        "t_min_s": frontier.min_time,
        "t_star_s": frontier.min_energy_time,
        "notes": [*plan_notes(frontier, plan), *frequent_changes(frontier, plan), *order],
        "clock_changes": plan.clock_changes,
        "clock_changes_per_rank": plan.clock_changes / plan.job.stages,
        "clock_changes_per_rank_and_s": plan.clock_changes / plan.job.stages / plan.iteration_time,
    }
    not_shown: Any = {"stages": True, "schema_id": True, "ladder": True, "job": {"dag"}}
    document |= plan.model_dump(by_alias=True, exclude_none=True, exclude=not_shown)
    if plan.costs is not None:
        document["costs"] = costs_document(plan)
    return document


def _solve_replicas(
    job: JobOptions,
    groups: Sequence[ReplicaGroup],
    request: RequestOptions,
    planner: Planner | None,
    output: Path,
) -> None:
    """Plan every kind of replica for a common time, write the plans and say what they do.

    Args:
        job: that of the first kind.
        groups: profiles of the other kinds, and how many replicas have each.
        request: what is asked of all kinds together.
        planner: that plans every kind; None: our own.
        output: where the plan of the first kind goes; those of others go beside it.

    Raises:
        InputError: options contradict each other, or a profile does not fit the job.
        NoAnswerError: the slowest kind cannot meet the target, or a limit cannot be kept.
    """
    numbers = range(1, len(groups) + 1)
    further_files = [output.with_suffix(f".replica{n}{output.suffix}") for n in numbers]
    invocation().will_write(*further_files)
    first_kind = job.load()
    frontiers = [job.trace(first_kind, full=True)]
    for group in groups:
        profile = job.fitted(envplan.Profile.open(group.profile), first_kind.pipeline)
        kind = LoadedJob(profile, first_kind.pipeline)
        frontiers.append(job.trace(kind, replicas=group.replicas, full=True))
    asked = request.request(
        frontiers[0],
        measured_latency_s=_measured_latency_s(frontiers) if planner is None else None,
    )
    with progress("planning every kind of replica"):
        planned = envplan.plan_replicas(frontiers, asked, planner)
    files = [output, *further_files]
    for plan, file in zip(planned.plans, files, strict=True):
        plan.save(file)
    ui.answer(
        lambda: {"plans": [str(file) for file in files], **planned.to_dict()},
        lambda: _print_replicas(frontiers, planned),
        next_command=["envplan", "apply", str(output)],
    )


def _print_replicas(frontiers: Sequence[envplan.Frontier], planned: ReplicaPlans) -> None:
    ui.say(*map(describe_job, frontiers))
    print_replicas(planned)
    slowest_s = max(frontier.min_time for frontier in frontiers)
    ui.say(f"T_min of all together {significant(slowest_s)} s, that of the slowest")
