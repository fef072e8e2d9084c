"""`envplan compare`: every planner's plan beside ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

import envplan
from envplan._io.words import exact_seconds
from envplan.cli import output as ui
from envplan.cli.cost_options import CostOptions
from envplan.cli.costs import cost_columns, cost_title, costs_document
from envplan.cli.describe import (
    ITERATION_TITLE,
    config_counts,
    describe_ends,
    describe_job,
    modelled_title,
)
from envplan.cli.frontier import draw_frontier
from envplan.cli.given import as_typed, refuse_both
from envplan.cli.job_options import JobOptions
from envplan.cli.progress import progress
from envplan.cli.shared import MOST_USED, TARGET, Reconfigure
from envplan.cli.tables import (
    Column,
    change_column,
    number_column,
    percent_column,
    text_column,
    value_column,
)
from envplan.cli.terminal_plot import picture
from envplan.cli.types import OPTIONAL_FILE, TERMINAL, OutputFile, quantity
from envplan.quantities import PERCENT, TIME

if TYPE_CHECKING:
    from envplan.planners import Advice, Comparison, Entry, PartClockSavings

#: Plans of the frontier that are drawn, at most.
_MAX_DRAWN_PLANS: Final = 17
#: What is less than this is shown as 0.0% faster, and so left out.
_MIN_FASTER_PERCENT: Final = 0.05
#: What follows a planner's name, by the point that its plan is for.
_POINTS: Final = {
    None: "", "T_min": " at T_min", "T_star": " at T_star", "straggler": " for straggler"
}  # fmt: skip
#: Why EnvPipe raised no further clock.
_STOPPED: Final = {
    "outer envelope": "the critical path is the outer envelope",
    "highest clocks": "the critical path has only highest clocks left",
}


def compare(
    job: JobOptions,
    costs: CostOptions,
    straggler_time: Annotated[
        float | None,
        typer.Option(
            metavar="TIME",
            parser=quantity(TIME),
            help="Some replica takes so long, as in 16.5 (seconds): count energy until then.",
            rich_help_panel=TARGET,
        ),
    ] = None,
    straggler_slowdown: Annotated[
        float | None,
        typer.Option(
            metavar="PCT",
            parser=quantity(PERCENT),
            help="Instead: it takes PCT percent longer than maximum frequency.",
            rich_help_panel=TARGET,
        ),
    ] = None,
    reconfigure: Reconfigure = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar=OPTIONAL_FILE,
            parser=OutputFile(".png", ".svg", ".pdf", ".html", bare="compare.png", terminal=True),
            help=(
                "Draw all planners on one frontier: .png, .svg, .pdf or .html, - for the terminal; "
                "without a name: compare.png."
            ),
            rich_help_panel=MOST_USED,
        ),
    ] = None,
) -> None:
    """Set every planner's plan beside ours for the same time.

    All but envpipe keep the schedule; envpipe reschedules 1f1b as EnvPipe does.

    \b
    Example:
      envplan compare a40-gpt3-1.3b-4stage --microbatches 32 --plot
      envplan compare a40-gpt3-1.3b-4stage --straggler-slowdown 10
      envplan compare a40-gpt3-1.3b-4stage --price 0.25 --iterations 100000
    """
    # Slots go with EnvPipe's own schedule, unless the job has it already.
    slots = None if job.schedule == "envpipe" else job.activation_slots
    if slots is not None:
        job = replace(job, activation_slots=None)
    if straggler_time is not None and straggler_slowdown is not None:
        refuse_both(["--straggler-time", "--straggler-slowdown"])

    from envplan.plan.costs import priced
    from envplan.planners import compare_part_clocks

    frontier = job.trace()
    run = costs.run(frontier)
    with progress("Comparing planners"):
        comparison = envplan.compare(
            frontier,
            reconfigure=reconfigure or "balanced",
            activation_slots=slots,
            straggler_time=straggler_time,
            straggler_slowdown=None if straggler_slowdown is None else straggler_slowdown / 100,
        )
    with progress("Comparing clocks by part with one clock"):
        parts = compare_part_clocks(frontier)
    drawn = [] if plot is None else frontier.plans_to_draw(_MAX_DRAWN_PLANS)
    draws_here = plot == TERMINAL
    if not draws_here:
        draw_frontier(plot, frontier, drawn, comparison)
    plans = [entry.plan for entry in comparison.entries]
    if run is not None:
        plans = [priced(plan, run, comparison.straggler_time) for plan in plans]
    ui.answer(
        lambda: _document(comparison, plans, parts),
        lambda: _print(comparison, plans, parts, drawn if draws_here else ()),
        next_command=["envplan", "advise", *as_typed(job)],
    )


def _print(
    comparison: Comparison,
    plans: Sequence[envplan.Plan],
    parts: Sequence[PartClockSavings],
    drawn: Sequence[envplan.Plan],
) -> None:
    frontier = comparison.frontier
    straggler_s = comparison.straggler_time
    source = frontier.profile.metadata.source
    names = _name_columns(comparison)
    ui.say(describe_job(frontier))
    ui.show_table(
        modelled_title(ITERATION_TITLE, source),
        [*names, *_iteration_columns(comparison), *_config_columns(comparison)],
    )
    if drawn:
        ui.say(*picture(frontier, drawn, comparison))
    if straggler_s is not None:
        until = f"Until a straggler is finished at {exact_seconds(straggler_s)} s"
        columns = [*names, *_straggler_columns(comparison, straggler_s)]
        ui.show_table(modelled_title(until, source), columns)
    costs = [plan.costs for plan in plans if plan.costs is not None]
    if costs:
        from envplan.costs import RunComparison

        run = costs[0].of_run()
        spent_on = [RunComparison(cost.iteration, cost.run) for cost in costs]
        amounts = cost_columns(run, spent_on)
        ui.show_table(cost_title(run, source), [*names, *amounts])
    if parts:
        title = f"Clocks by part, by {exact_seconds(parts[0].deadline_s)} s"
        ui.show_table(modelled_title(title, source), _parts_columns(parts))
    bloat = (
        "intrinsic bloat, of the energy beside it: above the frontier planner's at the same time "
        "and schedule"
    )
    if straggler_s is not None:
        bloat += "; extrinsic: that plan's above the best one for the straggler"
    ui.say(
        f"{describe_ends(frontier)}; slower and saved are against max_frequency on "
        f"{frontier.pipeline.schedule}",
        bloat,
        *_notes(comparison),
    )


def _name_columns(comparison: Comparison) -> list[Column]:
    entries = comparison.entries
    return [
        text_column("planner", [entry.plan.planner + _POINTS[entry.point] for entry in entries]),
        text_column("schedule", [entry.plan.job.schedule for entry in entries]),
    ]


def _iteration_columns(comparison: Comparison) -> list[Column]:
    entries = comparison.entries
    # A plan that is good only while everyone waits has its gap in the straggler's table.
    gaps = [None if entry.point == "straggler" else 100 * entry.plan.gap for entry in entries]
    bloats = [_percent_of(entry.intrinsic_bloat_j, entry.plan.energy) for entry in entries]
    return [
        number_column("time (s)", [entry.plan.iteration_time for entry in entries]),
        change_column("slower (%)", [entry.slowdown_percent for entry in entries]),
        number_column("energy (J)", [entry.plan.energy for entry in entries]),
        percent_column("saved (%)", [entry.savings_percent for entry in entries]),
        percent_column("gap (%)", gaps, decimals=3),
        percent_column("intrinsic (%)", bloats),
        value_column("planned in (s)", [f"{entry.planning_time_s:.2f}" for entry in entries]),
    ]


def _config_columns(comparison: Comparison) -> list[Column]:
    """How often each plan chose which config; none where operations have no configs."""
    counts_by_plan = [config_counts(entry.plan) for entry in comparison.entries]
    configs = set().union(*counts_by_plan)
    columns = []
    for config in sorted(configs):
        counts = [counts_by_config.get(config, 0) for counts_by_config in counts_by_plan]
        columns.append(value_column(f"config {config}", counts))
    return columns


def _straggler_columns(comparison: Comparison, straggler_s: float) -> list[Column]:
    ends_s, outcomes, intrinsic, extrinsic = [], [], [], []
    for entry in comparison.entries:
        outcome = entry.with_straggler
        assert outcome is not None
        outcomes.append(outcome)
        ends_s.append(max(straggler_s, entry.plan.iteration_time))
        intrinsic.append(_percent_of(entry.intrinsic_bloat_j, outcome.energy_j))
        extrinsic.append(_percent_of(outcome.extrinsic_bloat_j, outcome.energy_j))
    return [
        number_column("time (s)", ends_s),
        number_column("energy (J)", [outcome.energy_j for outcome in outcomes]),
        percent_column("saved (%)", [outcome.savings_percent for outcome in outcomes]),
        percent_column("gap (%)", [100 * outcome.gap for outcome in outcomes], decimals=3),
        percent_column("intrinsic (%)", intrinsic),
        percent_column("extrinsic (%)", extrinsic),
    ]


def _percent_of(part: float, whole: float) -> float:
    return 100 * part / whole if whole else 0.0


def _parts_columns(parts: Sequence[PartClockSavings]) -> list[Column]:
    """Savings by clocks by part beside those by one clock, for each latency."""
    latencies = [f"{1e3 * savings.switch_latency_s:g}" for savings in parts]
    one_clock = [savings.one_clock_saved_percent for savings in parts]
    by_parts = [savings.by_parts_saved_percent for savings in parts]
    return [
        value_column("switch latency (ms)", latencies),
        percent_column("one clock an operation, saved (%)", one_clock),
        percent_column("by parts, saved (%)", by_parts),
        percent_column("gained (%)", [savings.gained_percent for savings in parts]),
    ]


def _notes(comparison: Comparison) -> list[str]:
    """How EnvPipe ended, and what else is to be known about the plans, a sentence each."""
    envpipe = comparison.envpipe
    stopped = (
        f"envpipe stopped after {len(envpipe.choices)} iterations: {_STOPPED[envpipe.stopped]}"
    )
    forwards_ahead = comparison.envpipe_frontier.pipeline.forwards_ahead
    if forwards_ahead:
        stopped += f", {', '.join(map(str, forwards_ahead))} forwards ahead of 1f1b by stage"
    notes = [stopped]
    straggler_s = comparison.straggler_time
    if straggler_s is not None and straggler_s <= comparison.baseline.iteration_time_s:
        notes.append(
            f"{exact_seconds(straggler_s)} s is not slower than maximum frequency, so it is no "
            "straggler: it leaves no time to use"
        )
    if comparison.advice:
        notes.append("; ".join(map(_better_schedule, comparison.advice)))
    published = comparison.published
    if published is not None:
        saved = f"{published.savings_percent:g}% saved"
        if published.slowdown_percent is not None:
            saved += f" at {published.slowdown_percent:g}% slowdown"
        notes.append(
            f"published for this workload, measured there and not here: {saved} "
            f"({published.source})"
        )
    return notes


def _document(
    comparison: Comparison, plans: Sequence[envplan.Plan], parts: Sequence[PartClockSavings]
) -> dict[str, object]:
    frontier = comparison.frontier
    plan = comparison.entries[0].plan
    published = comparison.published
    entries = zip(comparison.entries, plans, strict=True)
    return {
        "profile": plan.profile.model_dump(exclude_none=True),
        "job": plan.job.model_dump(exclude_none=True, exclude={"dag"}),
        "t_min_s": frontier.min_time,
        "t_star_s": frontier.min_energy_time,
        "baseline": comparison.baseline.model_dump(),
        "straggler_time_s": comparison.straggler_time,
        "planners": [_entry_document(entry, priced_plan) for entry, priced_plan in entries],
        "envpipe": {
            "forwards_ahead": list(comparison.envpipe_frontier.pipeline.forwards_ahead),
            "iterations": len(comparison.envpipe.choices),
            "stopped": comparison.envpipe.stopped,
        },
        "by_parts": [savings.to_dict() for savings in parts],
        "advice": [advice.to_dict() for advice in comparison.advice],
        "published": None if published is None else published.model_dump(),
    }


def _entry_document(entry: Entry, priced_plan: envplan.Plan) -> dict[str, object]:
    document: dict[str, object] = dict(entry.to_dict())
    configs = config_counts(entry.plan)
    if configs:
        document["configs"] = configs
    if priced_plan.costs is not None:
        document["costs"] = costs_document(priced_plan)
    return document


def _better_schedule(row: Advice) -> str:
    """How much faster than the job's a schedule is, and what it saves, as alternatives."""
    schedule = row.frontier.pipeline.schedule
    name = schedule
    if schedule == "envpipe":
        name += " order"
    elif row.frontier.profile.adjustments.backward_input_share is not None:
        name += " (halves of backward assumed)"
    gains = []
    if row.faster_percent is not None and row.faster_percent >= _MIN_FASTER_PERCENT:
        gains.append(f"{row.faster_percent:.1f}% faster at the same savings")
    if row.saved_percent is not None:
        gains.append(f"{row.saved_percent:.1f}% saved in the same time")
    return f"{name}: {', or '.join(gains)}"
