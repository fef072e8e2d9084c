"""`envplan compare` and `envplan advise`: every planner, and every schedule, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

import envplan
from envplan.cli import output as ui
from envplan.cli.costs import cost_columns, costs_document
from envplan.cli.frontier import draw_frontier
from envplan.cli.given import as_typed, refuse_both
from envplan.cli.groups import CostOptions, JobOptions
from envplan.cli.progress import progress
from envplan.cli.shared import MOST_USED, TARGET, Reconfigure
from envplan.cli.types import OPTIONAL_FILE, output_file, quantity
from envplan.errors import InputError
from envplan.quantities import COUNT, PERCENT, TIME

if TYPE_CHECKING:
    from envplan.planners import Advice, Comparison

_ALONG: Final = 17
#: Schedules of each ranking that `advise` plans, and does not only bound.
_PLANNED_OF_EACH: Final = 3
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
            parser=output_file(".png", ".svg", ".pdf", ".html", bare="compare.png"),
            help=(
                "Draw all planners on one frontier: .png, .svg, .pdf or .html; without a name: "
                "compare.png."
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
    stragglers = {"--straggler-time": straggler_time, "--straggler-slowdown": straggler_slowdown}
    refuse_both(name for name, value in stragglers.items() if value is not None)

    from envplan.plan.costs import priced
    from envplan.planners import beside_one_clock

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
        parts = beside_one_clock(frontier)
    if plot is not None:
        from envplan.plotting.frontier import plans_along

        draw_frontier(plot, frontier, plans_along(frontier, _ALONG), comparison)
    plans = [
        entry.plan if run is None else priced(entry.plan, run, comparison.straggler_time)
        for entry in comparison.entries
    ]
    ui.answer(
        lambda: _document(comparison, plans, parts),
        lambda: _print(comparison, plans, parts),
        then=["envplan", "advise", *as_typed(job)],
    )


def _print(
    comparison: Comparison, plans: Sequence[envplan.Plan], parts: list[dict[str, Any]]
) -> None:
    frontier, straggler = comparison.frontier, comparison.straggler_time
    entries, rows = comparison.entries, [entry.row for entry in comparison.entries]
    place = {None: "", "T_min": " at T_min", "T_star": " at T_star", "straggler": " for straggler"}
    names: dict[str, Any] = {
        "planner": [row["planner"] + place[row["point"]] for row in rows],
        "schedule": [row["schedule"] for row in rows],
    }

    def show(title: str, columns: dict[str, Any], words: int = 2) -> None:
        ui.print_columns(ui.titled(title, frontier.profile.metadata.source), columns, words=words)

    def of(name: str, scale: float = 1, listed: Sequence[dict[str, Any]] = rows) -> list[Any]:
        return [row[name] and scale * row[name] for row in listed]

    def bloat(kind: str, whole: str) -> list[float]:
        return [100 * row[f"{kind}_bloat_j"] / row[whole] if row[whole] else 0.0 for row in rows]

    # How often each plan chose which config, where operations have some.
    counts = [ui.config_counts(entry.plan) for entry in entries]
    ui.say(ui.describe_job(frontier))
    show(
        ui.ITERATION,
        names
        | {
            "time (s)": of("iteration_time_s"),
            "slower (%)": of("slowdown_percent"),
            "energy (J)": of("energy_j"),
            "saved (%)": of("savings_percent"),
            # A plan that is good only while everyone waits has its gap in the other table.
            "gap (%)": [None if r["point"] == "straggler" else 100 * r["gap"] for r in rows],
            "intrinsic (%)": bloat("intrinsic", "energy_j"),
            "planned in (s)": [f"{seconds:.2f}" for seconds in of("planning_time_s")],
        }
        | {
            f"config {config}": [one.get(config, 0) for one in counts]
            for config in sorted({config for one in counts for config in one})
        },
    )
    if straggler is not None:
        waited = {
            "time (s)": [max(straggler, time) for time in of("iteration_time_s")],
            "energy (J)": of("straggler_energy_j"),
            "saved (%)": of("straggler_savings_percent"),
            "gap (%)": of("straggler_gap", 100),
            "intrinsic (%)": bloat("intrinsic", "straggler_energy_j"),
            "extrinsic (%)": bloat("extrinsic", "straggler_energy_j"),
        }
        until = f"Until a straggler is finished at {ui.exact_seconds(straggler)} s"
        show(until, names | waited)
    if costs := [plan.costs for plan in plans if plan.costs is not None]:
        spent = [(one.iteration, one.run) for one in costs]
        title, amounts = cost_columns(costs[0].of_run(), spent)
        show(title, names | amounts)
    if parts:
        columns = {
            "switch latency (ms)": [f"{1e3 * row['switch_latency_s']:g}" for row in parts],
            "one clock an operation, saved (%)": of("one_clock_saved_percent", listed=parts),
            "by parts, saved (%)": of("by_parts_saved_percent", listed=parts),
            "gained (%)": of("gained_percent", listed=parts),
        }
        title = f"Clocks by part, by {ui.exact_seconds(parts[0]['deadline_s'])} s"
        show(title, columns, words=0)
    extrinsic = "; extrinsic: that plan's above the best one for the straggler"
    ui.say(
        f"{ui.describe_ends(frontier)}; slower and saved are against max_frequency on "
        f"{frontier.pipeline.schedule}",
        "intrinsic bloat, of the energy beside it: above the frontier planner's at the same time "
        "and schedule" + (extrinsic if straggler is not None else ""),
        *_notes(comparison),
    )


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
        notes.append("; ".join(map(_better_schedule, comparison.advice)))
    if published is not None:
        slower = published.slowdown_percent
        slowly = "" if slower is None else f" at {slower:g}% slowdown"
        notes.append(
            f"published for this workload, measured there and not here: "
            f"{published.savings_percent:g}% saved{slowly} ({published.source})"
        )
    return notes


def _document(
    comparison: Comparison, plans: Sequence[envplan.Plan], parts: list[dict[str, Any]]
) -> dict[str, Any]:
    frontier, plan = comparison.frontier, comparison.entries[0].plan
    planners = []
    for entry, with_costs in zip(comparison.entries, plans, strict=True):
        configs = ui.config_counts(entry.plan)
        more = {"configs": configs} if configs else {}
        more |= {"costs": costs_document(with_costs)} if with_costs.costs is not None else {}
        planners.append(entry.row | more)
    return {
        "profile": plan.profile.model_dump(exclude_none=True),
        "job": plan.job.model_dump(exclude_none=True, exclude={"dag"}),
        "t_min_s": frontier.min_time,
        "t_star_s": frontier.min_energy_time,
        "baseline": comparison.baseline.model_dump(),
        "straggler_time_s": comparison.straggler_time,
        "planners": planners,
        "envpipe": {
            "forwards_ahead": list(comparison.envpipe_frontier.pipeline.forwards_ahead),
            "iterations": len(comparison.envpipe.choices),
            "stopped": comparison.envpipe.stopped,
        },
        "by_parts": parts,
        "advice": [_schedule_document(row) for row in comparison.advice],
        "published": comparison.published and comparison.published.model_dump(),
    }


def advise(
    job: JobOptions,
    best: Annotated[
        int,
        typer.Option(
            metavar="N",
            parser=quantity(COUNT),
            help=f"How many to plan of each ranking; default: {_PLANNED_OF_EACH}.",
            rich_help_panel=MOST_USED,
            show_default=False,
        ),
    ] = _PLANNED_OF_EACH,
) -> None:
    """Find the schedule that suits a job best.

    All that fit the profile run the same batch on the same GPUs. They are ranked by energy in the
    time of the job's own plan without slowdown, and by time at its energy. With twice the chunks a
    GPU holds twice as much of the model; memory is not looked at.

    \b
    Example:
      envplan advise a40-gpt3-1.3b-4stage --microbatches 32
      envplan advise --schedule gpipe --best 5 --json
    """
    if job.dag is not None:
        raise InputError("advise compares schedules; leave --dag out")
    own = job if job.schedule == "envpipe" else replace(job, activation_slots=None)
    frontier = own.trace()
    with progress("schedules") as work:
        rows = envplan.advise(
            frontier, activation_slots=job.activation_slots, best=best, progress=work.items
        )
    # Next: plan what saves most with as much of the model on a GPU as now.
    first = next(row for row in rows if row.model_share == 1)  # ranked by energy
    name = first.frontier.pipeline.schedule
    slots = job.activation_slots if name == "envpipe" else None
    then = replace(job, schedule=job.schedule if first.is_job else name, activation_slots=slots)
    ui.answer(
        lambda: {
            "schema": "envplan/advice/v1",
            "profile": rows[0].frontier.profile.name,
            "source": frontier.profile.metadata.source,
            "t_min_s": frontier.min_time,
            "schedules": [_schedule_document(row) for row in rows],
        },
        lambda: _print_schedules(frontier, rows),
        then=["envplan", "solve", *as_typed(then)],
    )


def _print_schedules(frontier: envplan.Frontier, rows: Sequence[Advice]) -> None:
    ui.say(
        ui.describe_job(frontier),
        f"the job's plan without slowdown takes {ui.significant(frontier.min_time)} s; the same "
        "batch on the same GPUs:",
    )
    headers = ("schedule", "stages x chunks", "microbatches", "replicas", "model on a GPU")
    for title, header, ranked_by in (
        ("Energy at equal time", "saved (%)", "saved_percent"),
        ("Time at equal energy", "faster (%)", "faster_percent"),
    ):
        percent = attrgetter(ranked_by)  # without a value a schedule is not ranked by it
        known = [row for row in rows if percent(row) is not None]
        known.sort(key=percent, reverse=True)
        table = [
            [
                row.frontier.pipeline.schedule + (" (the job)" if row.is_job else ""),
                f"{row.frontier.pipeline.num_stages} x {row.frontier.pipeline.num_chunks}",
                row.frontier.pipeline.num_microbatches,
                row.frontier.replicas,
                f"x{row.model_share:g}",
                percent(row),
            ]
            for row in known
        ]
        title = ui.titled(title, frontier.profile.metadata.source)
        ui.print_table(title, (*headers, header), table)
    ui.say(
        "saved: of the energy of the job's schedule at maximum frequency; memory is not looked at"
    )
    if energies := frontier.profile.metadata.energies_are:
        ui.say(f"the profile's energies are {energies}")
    derived = {words for row in rows for words in row.frontier.profile.adjustments.in_words()}
    for words in sorted(derived.difference(frontier.profile.adjustments.in_words())):
        ui.say(f"split backwards: {words}")


def _better_schedule(row: Advice) -> str:
    """How much faster a schedule is, or what it saves, than the job's: at the same of the other."""
    name = row.frontier.pipeline.schedule
    parts, assumed = [], row.frontier.profile.adjustments.backward_input_share is not None
    if row.faster_percent is not None and row.faster_percent >= 0.05:
        parts.append(f"{row.faster_percent:.1f}% faster at the same savings")
    if row.saved_percent is not None:
        parts.append(f"{row.saved_percent:.1f}% saved in the same time")
    what = " order" if name == "envpipe" else " (halves of backward assumed)" if assumed else ""
    return f"{name}{what}: {', or '.join(parts)}"


def _schedule_document(row: Advice) -> dict[str, Any]:
    """What JSON says of a schedule."""
    pipeline = row.frontier.pipeline
    return {
        "schedule": pipeline.schedule,
        "is_job": row.is_job,
        "stages": pipeline.num_stages,
        "chunks": pipeline.num_chunks,
        "microbatches": pipeline.num_microbatches,
        "replicas": row.frontier.replicas,
        "model_share": row.model_share,
        "adjustments": row.frontier.profile.adjustments.model_dump(exclude_defaults=True),
        "saved_percent": row.saved_percent,
        "faster_percent": row.faster_percent,
        "at_equal_time": _figures(row.at_equal_time),
        "at_equal_energy": _figures(row.at_equal_energy),
    }


def _figures(plan: envplan.Plan | None) -> dict[str, float] | None:
    if plan is None:
        return None
    return {"iteration_time_s": plan.iteration_time, "energy_j": plan.energy}
