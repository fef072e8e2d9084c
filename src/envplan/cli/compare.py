"""`envplan compare`: every planner on one profile, side by side."""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import envplan
from envplan.cli import output as ui
from envplan.cli.advise import advice_document, better_schedule
from envplan.cli.command import refuse_both, takes, typed
from envplan.cli.costs import cost_columns, costs_document
from envplan.cli.frontier import draw_frontier
from envplan.cli.options import CostOptions, JobOptions

if TYPE_CHECKING:
    from envplan.planners import Comparison, Entry, PartsRow

_ALONG: Final = 17
#: What JSON says of a plan, and what of clocks by part.
_ENTRY: Final = """
    planner point schedule=plan.job.schedule iteration_time_s=plan.iteration_time slowdown_percent
    energy_j=plan.energy savings_percent energy_lower_bound_j=plan.energy_lower_bound gap=plan.gap
    frontier_energy_j=ours.energy intrinsic_bloat_j=intrinsic_j extrinsic_bloat_j=extrinsic_j
    straggler_energy_j=straggler_energy straggler_savings_percent straggler_gap
    planning_time_s=planning_time
"""
_PARTS: Final = """
    switch_latency_s deadline_s one_clock_energy_j=one_clock_j by_parts_energy_j=by_parts_j
    gained_percent
"""
#: Why EnvPipe raised no further clock.
_STOPPED: Final = {
    "outer envelope": "the critical path is the outer envelope",
    "highest clocks": "the critical path has only highest clocks left",
}


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
)
def compare(
    job: JobOptions,
    costs: CostOptions,
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
    # Slots go with EnvPipe's own schedule, unless the job has it already.
    slots = None if job.schedule == "envpipe" else job.activation_slots
    if slots is not None:
        job = replace(job, activation_slots=None)
    stragglers = {"--straggler-time": straggler_time, "--straggler-slowdown": straggler_slowdown}
    refuse_both(name for name, value in stragglers.items() if value is not None)

    from envplan import planners
    from envplan.costs import priced

    frontier = job.trace()
    run = costs.run(frontier)
    with ui.Working("Comparing planners"):
        comparison = planners.compare(
            frontier,
            reconfigure=reconfigure or "balanced",
            activation_slots=slots,
            straggler_time=straggler_time,
            straggler_slowdown=None if straggler_slowdown is None else straggler_slowdown / 100,
        )
    with ui.Working("Comparing clocks by part with one clock"):
        parts = planners.beside_one_clock(frontier)
    if plot is not None:
        from envplan.plotting.frontier import plans_along

        draw_frontier(plot, frontier, plans_along(frontier, _ALONG), comparison)
    plans = [entry.plan for entry in comparison.entries]
    with_costs = (
        [] if run is None else [priced(plan, run, comparison.straggler_time) for plan in plans]
    )
    ui.answer(
        lambda: _document(comparison, with_costs, parts),
        lambda: _print(comparison, with_costs, parts),
        then=["envplan", "advise", *typed(job)],
    )


def _print(comparison: Comparison, priced: list[envplan.Plan], parts: list[PartsRow]) -> None:
    frontier, straggler = comparison.frontier, comparison.straggler_time
    place = {None: "", "T_min": " at T_min", "T_star": " at T_star", "straggler": " for straggler"}
    names: dict[str, Any] = {
        "planner": [entry.planner + place[entry.point] for entry in comparison.entries],
        "schedule": [entry.plan.job.schedule for entry in comparison.entries],
    }

    def show(title: str, columns: dict[str, Any], words: int = 2) -> None:
        ui.print_columns(ui.titled(title, frontier.profile.metadata.source), columns, words=words)

    ui.say(ui.describe_job(frontier))
    show(ui.ITERATION, names | _columns(comparison))
    if straggler is not None:
        until = f"Until a straggler is finished at {ui.exact_seconds(straggler)} s"
        show(until, names | _waiting_columns(comparison, straggler))
    if costs := [plan.costs for plan in priced if plan.costs is not None]:
        spent = [(one.iteration, one.run) for one in costs]
        title, amounts = cost_columns(costs[0].of_run(), spent)
        show(title, names | amounts)
    if parts:
        title = f"Clocks by part, by {ui.exact_seconds(parts[0].deadline_s)} s"
        columns = {
            "switch latency (ms)": [f"{1e3 * row.switch_latency_s:g}" for row in parts],
            "one clock an operation, saved (%)": [r.saved_percent(r.one_clock_j) for r in parts],
            "by parts, saved (%)": [row.saved_percent(row.by_parts_j) for row in parts],
            "gained (%)": [row.gained_percent for row in parts],
        }
        show(title, columns, words=0)
    extrinsic = "; extrinsic: that plan's above the best one for the straggler"
    ui.say(
        f"{ui.describe_ends(frontier)}; slower and saved are against max_frequency on "
        f"{frontier.pipeline.schedule}",
        "intrinsic bloat, of the energy beside it: above the frontier planner's at the same time "
        "and schedule" + (extrinsic if straggler is not None else ""),
        *_notes(comparison),
    )


def _columns(comparison: Comparison) -> dict[str, Any]:
    """A row for each plan, of its iteration."""
    entries = comparison.entries
    # A plan that is good only while everyone waits has its gap in the other table.
    gaps = [None if entry.point == "straggler" else 100 * entry.plan.gap for entry in entries]
    # How often each plan chose which config, where operations have some.
    counts = [ui.config_counts(entry.plan) for entry in entries]
    return {
        "time (s)": [entry.plan.iteration_time for entry in entries],
        "slower (%)": [entry.slowdown_percent for entry in entries],
        "energy (J)": [entry.plan.energy for entry in entries],
        "saved (%)": [entry.savings_percent for entry in entries],
        "gap (%)": gaps,
        "intrinsic (%)": [_share(entry.intrinsic_j, entry.plan.energy) for entry in entries],
        "planned in (s)": [f"{entry.planning_time:.2f}" for entry in entries],
        **{
            f"config {config}": [one.get(config, 0) for one in counts]
            for config in sorted({config for one in counts for config in one})
        },
    }


def _waiting_columns(comparison: Comparison, until_s: float) -> dict[str, Any]:
    """A row for each plan, until a straggler is finished."""
    entries = comparison.entries
    joules = [entry.straggler_energy or 0.0 for entry in entries]
    return {
        "time (s)": [max(until_s, entry.plan.iteration_time) for entry in entries],
        "energy (J)": joules,
        "saved (%)": [entry.straggler_savings_percent for entry in entries],
        "gap (%)": [100 * (entry.straggler_gap or 0.0) for entry in entries],
        "intrinsic (%)": [_share(e.intrinsic_j, j) for e, j in zip(entries, joules, strict=True)],
        "extrinsic (%)": [_share(e.extrinsic_j, j) for e, j in zip(entries, joules, strict=True)],
    }


def _share(part: float, whole: float) -> float:
    return 100 * part / whole if whole else 0.0


def _notes(comparison: Comparison) -> list[str]:
    ahead = comparison.envpipe_frontier.pipeline.forwards_ahead
    running = f", {', '.join(map(str, ahead))} forwards ahead of 1f1b by stage" if ahead else ""
    run, published = comparison.envpipe, comparison.published
    notes = [
        f"envpipe stopped after {len(run.choices)} iterations: {_STOPPED[run.stopped]}{running}"
    ]
    straggler = comparison.straggler_time
    if straggler is not None and straggler <= comparison.baseline.iteration_time_s:
        notes.append(
            f"{ui.exact_seconds(straggler)} s is not slower than maximum frequency, so it is no "
            "straggler: it leaves no time to use"
        )
    if comparison.advice:
        notes.append("; ".join(map(better_schedule, comparison.advice)))
    if published is not None:
        slower = published.slowdown_percent
        slowly = "" if slower is None else f" at {slower:g}% slowdown"
        notes.append(
            f"published for this workload, measured there and not here: "
            f"{published.savings_percent:g}% saved{slowly} ({published.source})"
        )
    return notes


def _document(
    comparison: Comparison, priced: list[envplan.Plan], parts: list[PartsRow]
) -> dict[str, Any]:
    frontier, plan = comparison.frontier, comparison.entries[0].plan
    return {
        "profile": plan.profile.model_dump(exclude_none=True),
        "job": plan.job.model_dump(exclude_none=True, exclude={"dag"}),
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
            "iterations": len(comparison.envpipe.choices),
            "stopped": comparison.envpipe.stopped,
        },
        "by_parts": [ui.picked(row, _PARTS) for row in parts],
        "advice": [advice_document(row) for row in comparison.advice],
        "published": comparison.published and comparison.published.model_dump(),
    }


def _entry_document(entry: Entry) -> dict[str, Any]:
    document = ui.picked(entry, _ENTRY)
    if entry.straggler_energy is None:
        document["extrinsic_bloat_j"] = None
    if configs := ui.config_counts(entry.plan):
        document["configs"] = configs
    return document
