"""`envplan compare`: every planner on one profile, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envplan.cli.advise import advice_document, better_schedule
from envplan.cli.command import PLOT_TYPES, file_of, takes, typed
from envplan.cli.costs import cost_columns, costs_document
from envplan.cli.frontier import draw
from envplan.cli.inputs import check_outputs, refuse_overwriting
from envplan.cli.options import (
    CostOptions,
    JobOptions,
    OutputOptions,
)
from envplan.errors import InputError

if TYPE_CHECKING:
    from envplan.plan import Plan
    from envplan.planners import Comparison, Entry, PartsRow


@takes(
    """
    Most used:
      --plot [FILE]  Draw all planners on one frontier: .png, .svg, .pdf or .html; without a name:
          compare.png.
    Target:
      --straggler-time TIME  Some replica takes so long, as in 16.5 (seconds): count energy until
          then.
      --straggler-slowdown PCT  Instead: it takes PCT percent longer than maximum frequency.
    """,
    plot=file_of(PLOT_TYPES, "a profile goes before --plot", "compare.png"),
)
def compare(
    job: JobOptions,
    costs: CostOptions,
    show: OutputOptions,
    straggler_time: float | None = None,
    straggler_slowdown: float | None = None,
    reconfigure: str | None = None,
    plot: Path | None = None,
) -> None:
    """Set every planner's plan beside ours for the same time.

    All but envpipe keep the schedule; envpipe reschedules 1f1b as EnvPipe does.

    \b
    Example:
      envplan compare a40-gpt3-1.3b-4stage --microbatches 32 --plot
      envplan compare a40-gpt3-1.3b-4stage --straggler-slowdown 10
      envplan compare a40-gpt3-1.3b-4stage --price 0.25 --iterations 100000
    """
    slots = job.slots
    rescheduled = job.schedule == "envpipe"
    if not rescheduled:
        job = replace(job, activation_slots=None)
    check_outputs(plot, inputs=[("the DAG file", job.dag), *costs.files])
    if None not in (straggler_time, straggler_slowdown):
        raise InputError(
            "--straggler-time and --straggler-slowdown exclude each other; give one of them"
        )

    from envplan import planners
    from envplan.cli.output import answer, spinner
    from envplan.costs import priced

    how = planners.EnvPipe(reconfigure or "balanced").reconfigure
    frontier = job.trace(quiet=show.quiet)
    refuse_overwriting(frontier.profile, plot)
    run = costs.run(frontier) if costs.given else None
    with spinner("Comparing planners", quiet=show.quiet):
        comparison = planners.compare(
            frontier,
            reconfigure=how,
            activation_slots=None if rescheduled else slots,
            straggler_time=straggler_time,
            straggler_slowdown=None if straggler_slowdown is None else straggler_slowdown / 100,
        )
    with spinner("Comparing clocks by part with one clock", quiet=show.quiet):
        parts = planners.beside_one_clock(frontier)
    if plot is not None:
        draw(frontier, plot, comparison)
    plans = [entry.plan for entry in comparison.entries]
    with_costs = (
        [] if run is None else [priced(plan, run, comparison.straggler_time) for plan in plans]
    )
    answer(
        show,
        lambda: _document(comparison, with_costs, parts),
        lambda: _print(comparison, with_costs, parts),
        written=[plot],
        then=["envplan", "advise", *typed(job)],
    )


def _print(comparison: Comparison, priced: list[Plan], parts: list[PartsRow]) -> None:
    from envplan.cli.output import (
        ITERATION,
        describe_ends,
        describe_job,
        exact_seconds,
        print_columns,
        say,
        titled,
    )

    frontier = comparison.frontier
    source = frontier.profile.metadata.source
    say(describe_job(frontier))
    print_columns(titled(ITERATION, source), _columns(comparison), words=2)
    if comparison.straggler_time is not None:
        until = exact_seconds(comparison.straggler_time)
        print_columns(
            titled(f"Until a straggler is finished at {until} s", source),
            _columns(comparison, waiting=True),
            words=2,
        )
    if priced:
        costs = [plan.costs for plan in priced if plan.costs is not None]
        title, columns = cost_columns(
            costs[0].of_run(), [(one.iteration, one.run) for one in costs]
        )
        print_columns(titled(title, source), {**_names(comparison), **columns}, words=2)
    if parts:
        title = f"Clocks by part, by {exact_seconds(parts[0].deadline_s)} s"
        print_columns(titled(title, source), _parts_columns(parts), words=0)
    say(
        f"{describe_ends(frontier)}; slower and saved are against max_frequency on "
        f"{frontier.pipeline.schedule}"
    )
    extrinsic = "; extrinsic: that plan's above the best one for the straggler"
    say(
        "intrinsic bloat, of the energy beside it: above the frontier planner's at the same time "
        "and schedule" + (extrinsic if comparison.straggler_time is not None else "")
    )
    for note in _notes(comparison):
        say(note)


def _columns(comparison: Comparison, *, waiting: bool = False) -> dict[str, list[str]]:
    """A row for each plan: of its iteration, or until a straggler is finished."""
    from envplan.cli.output import column, config_counts, signed_percent

    entries, sync = comparison.entries, comparison.straggler_time or 0.0
    times = [entry.plan.iteration_time for entry in entries]
    joules = [entry.plan.energy for entry in entries]
    columns = _names(comparison)
    if waiting:
        joules = [entry.straggler_energy or 0.0 for entry in entries]
        saved = [entry.straggler_savings_percent for entry in entries]
        gaps = [100 * (entry.straggler_gap or 0.0) for entry in entries]
        columns["time (s)"] = column([max(sync, time) for time in times])
    else:
        saved = [entry.savings_percent for entry in entries]
        gaps = [100 * entry.plan.gap for entry in entries]
        columns["time (s)"] = column(times)
        columns["slower (%)"] = [signed_percent(entry.slowdown_percent) for entry in entries]
    columns["energy (J)"] = column(joules)
    columns["saved (%)"] = [f"{percent:.2f}" for percent in saved]
    columns["gap (%)"] = [
        # A plan that is good only while everyone waits has its gap in the other table.
        "-" if entry.point == "straggler" and not waiting else f"{gap:.3f}"
        for entry, gap in zip(entries, gaps, strict=True)
    ]
    bloats = {"intrinsic (%)": [entry.intrinsic_j for entry in entries]}
    if waiting:
        bloats["extrinsic (%)"] = [entry.extrinsic_j for entry in entries]
    for name, parts in bloats.items():
        shares = zip(parts, joules, strict=True)
        columns[name] = [f"{100 * part / whole if whole else 0.0:.2f}" for part, whole in shares]
    if not waiting:
        columns["planned in (s)"] = [f"{entry.planning_time:.2f}" for entry in entries]
        # How often each plan chose which config, where operations have some.
        counts = [config_counts(entry.plan) for entry in entries]
        for config in sorted({config for one in counts for config in one}):
            columns[f"config {config}"] = [str(one[config]) for one in counts]
    return columns


def _parts_columns(rows: Sequence[PartsRow]) -> dict[str, list[str]]:
    def saved(row: PartsRow, energy_j: float | None) -> str:
        percent = row.saved_percent(energy_j)
        return "-" if percent is None else f"{percent:.2f}"

    return {
        "switch latency (ms)": [f"{1e3 * row.switch_latency_s:g}" for row in rows],
        "one clock an operation, saved (%)": [saved(row, row.one_clock_j) for row in rows],
        "by parts, saved (%)": [saved(row, row.by_parts_j) for row in rows],
        "gained (%)": [f"{row.gained_percent:.2f}" for row in rows],
    }


def _names(comparison: Comparison) -> dict[str, list[str]]:
    return {
        "planner": [label(entry) for entry in comparison.entries],
        "schedule": [entry.plan.job.schedule for entry in comparison.entries],
    }


def label(entry: Entry) -> str:
    """How a table or legend calls the plan."""
    place = {None: "", "T_min": " at T_min", "T_star": " at T_star", "straggler": " for straggler"}
    return entry.planner + place[entry.point]


def _notes(comparison: Comparison) -> list[str]:
    from envplan.cli.output import exact_seconds

    notes = []
    ahead = comparison.envpipe_frontier.pipeline.forwards_ahead
    running = f", {', '.join(map(str, ahead))} forwards ahead of 1f1b by stage" if ahead else ""
    notes.append(
        f"envpipe stopped after {len(comparison.envpipe.iterations)} iterations: "
        + {
            "outer envelope": "its critical path is the outer envelope",
            "highest clocks": "its critical path has only highest clocks left",
        }[comparison.envpipe.stopped]
        + running
    )
    straggler, usual = comparison.straggler_time, comparison.baseline.iteration_time_s
    if straggler is not None and straggler <= usual:
        notes.append(
            f"{exact_seconds(straggler)} s is not slower than maximum frequency, so it is no "
            "straggler: it leaves no time to use"
        )
    if comparison.advice:
        notes.append("; ".join(map(better_schedule, comparison.advice)))
    published = comparison.published
    if published is not None:
        slower = published.slowdown_percent
        slowly = "" if slower is None else f" at {slower:g}% slowdown"
        notes.append(
            f"published for this workload, measured there and not here: "
            f"{published.savings_percent:g}% saved{slowly} ({published.source})"
        )
    return notes


def _document(comparison: Comparison, priced: list[Plan], parts: list[PartsRow]) -> dict[str, Any]:
    frontier, published = comparison.frontier, comparison.published
    job = comparison.entries[0].plan.job.model_dump(exclude_none=True)
    job.pop("dag", None)
    return {
        "profile": comparison.entries[0].plan.profile.model_dump(exclude_none=True),
        "job": job,
        "t_min_s": frontier.min_time,
        "t_star_s": frontier.min_energy_time,
        "baseline": comparison.baseline.model_dump(),
        "straggler_time_s": comparison.straggler_time,
        "planners": [
            _entry_document(entry) | ({"costs": costs_document(plan)} if plan else {})
            for entry, plan in zip_longest(comparison.entries, priced)
        ],
        "envpipe": {
            "forwards_ahead": list(comparison.envpipe_frontier.pipeline.forwards_ahead),
            "iterations": len(comparison.envpipe.iterations),
            "stopped": comparison.envpipe.stopped,
        },
        "by_parts": [
            {
                "switch_latency_s": row.switch_latency_s,
                "deadline_s": row.deadline_s,
                "one_clock_energy_j": row.one_clock_j,
                "by_parts_energy_j": row.by_parts_j,
                "gained_percent": row.gained_percent,
            }
            for row in parts
        ],
        "advice": [advice_document(row) for row in comparison.advice],
        "published": None
        if published is None
        else {
            "savings_percent": published.savings_percent,
            "slowdown_percent": published.slowdown_percent,
            "source": published.source,
        },
    }


def _entry_document(entry: Entry) -> dict[str, Any]:
    plan = entry.plan
    document: dict[str, Any] = {
        "planner": entry.planner,
        "point": entry.point,
        "schedule": plan.job.schedule,
        "iteration_time_s": plan.iteration_time,
        "slowdown_percent": entry.slowdown_percent,
        "energy_j": plan.energy,
        "savings_percent": entry.savings_percent,
        "energy_lower_bound_j": plan.energy_lower_bound,
        "gap": plan.gap,
        "frontier_energy_j": entry.ours.energy,
        "intrinsic_bloat_j": entry.intrinsic_j,
        "extrinsic_bloat_j": None if entry.straggler_energy is None else entry.extrinsic_j,
        "straggler_energy_j": entry.straggler_energy,
        "straggler_savings_percent": entry.straggler_savings_percent,
        "straggler_gap": entry.straggler_gap,
        "planning_time_s": entry.planning_time,
    }
    from envplan.cli.output import config_counts

    if configs := config_counts(plan):
        document["configs"] = dict(sorted(configs.items()))
    return document
