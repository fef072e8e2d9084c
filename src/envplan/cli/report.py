"""`envplan report` and `timeline`: a plan for people who would rather look than read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

import envplan
from envplan._io.files import atomic_write
from envplan._io.words import signed_percent
from envplan.cli import output as ui
from envplan.cli.better_order import better_order
from envplan.cli.cost_options import CostOptions
from envplan.cli.job_options import PlanOptions
from envplan.cli.plan_notes import plan_notes
from envplan.cli.progress import progress
from envplan.cli.shared import MOST_USED
from envplan.cli.types import OutputFile

#: Plans of the frontier that the page shows, at most.
_MAX_DRAWN_PLANS: Final = 33
#: Larger jobs are compared only on demand.
_MAX_COMPARED: Final = 8000


def report(
    source: PlanOptions,
    costs: CostOptions,
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            parser=OutputFile(".html"),
            help="Where the page goes: .html.",
            rich_help_panel=MOST_USED,
        ),
    ] = Path("report.html"),
    compare: Annotated[
        bool | None,
        typer.Option(
            "--compare/--no-compare",
            help=f"Set the other planners beside it; default: up to {_MAX_COMPARED:,} operations.",
            rich_help_panel=MOST_USED,
        ),
    ] = None,
) -> None:
    """Write a page about a plan: what it saves, the frontier, timelines, stages, assumptions.

    One file that needs no network, in light and dark, for a wide screen and for a phone.

    \b
    Example:
      envplan solve a40-gpt3-1.3b-4stage --microbatches 8 --slowdown 1
      envplan report plan.json -o report.html
      envplan report plan.json --price 0.25 --currency EUR --iterations 100000
    """
    from envplan.plan.costs import priced
    from envplan.plan.frontier_file import distinct
    from envplan.planners import compare as run_planners
    from envplan.plotting.report import Report, report_page
    from envplan.solve import trace_job

    plan, profile = source.load()
    timeline = envplan.simulate(plan, profile, force=source.force)
    with progress("Tracing the frontier") as work:
        frontier = trace_job(plan.job, profile, work.frontier_step)
    run = costs.run(frontier)
    if run is not None:
        plan = priced(plan, run)
    with progress("Choosing frequencies") as work:
        along = distinct(frontier.plans_to_draw(_MAX_DRAWN_PLANS, progress=work.frontier_step))
    comparison = None
    num_operations = len(frontier.pipeline.operations)
    wants_comparison = num_operations <= _MAX_COMPARED if compare is None else compare
    if wants_comparison:
        with progress("Comparing planners"):
            comparison = run_planners(frontier)
    content = Report(
        plan=plan,
        plan_file=source.plan,
        frontier=frontier,
        along=along,
        timeline=timeline,
        baseline=timeline.at_max_frequency(),
        comparison=comparison,
        notes=[*plan_notes(frontier, plan), *_better_order(frontier, plan)],
        slower=frontier.slower_plans_to_draw(),
    )
    atomic_write(output, report_page(content))
    modelled = " (modelled)" if plan.profile.source == "modelled" else ""
    words = (
        f"{plan.predicted.savings_percent:.1f}% of the energy saved at "
        f"{signed_percent(plan.predicted.slowdown_percent)}% iteration time{modelled}"
    )
    if compare is None and not wants_comparison:
        words += (
            f"\nother planners are left out of {num_operations:,} operations; --compare adds them"
        )
    ui.answer(
        lambda: {
            "written": str(output),
            "savings_percent": plan.predicted.savings_percent,
            "slowdown_percent": plan.predicted.slowdown_percent,
            "energy_j": plan.energy,
            "gap": plan.gap,
            "source": plan.profile.source,
        },
        lambda: ui.say(words),
        next_command=["envplan", "apply", str(source.plan)],
    )


def _better_order(frontier: envplan.Frontier, plan: envplan.Plan) -> list[str]:
    """Whether EnvPipe's order would save more, with a command for the plan's profile."""
    profile, job = plan.profile, plan.job
    words = ["envplan", "solve", str(profile.path or profile.name)]
    words += ["--microbatches", str(job.microbatches)]
    return list(better_order(frontier, plan, words))


def timeline(
    source: PlanOptions,
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            parser=OutputFile(".png", ".svg", ".pdf", ".html"),
            help="Where it goes: .png, .svg, .pdf or .html.",
            rich_help_panel=MOST_USED,
        ),
    ] = Path("timeline.png"),
    alone: Annotated[
        bool,
        typer.Option(
            "--alone", help="Without maximum frequency above it.", rich_help_panel=MOST_USED
        ),
    ] = False,
) -> None:
    """Draw what every stage does when, at maximum frequency above and under the plan below.

    \b
    Example:
      envplan solve a40-gpt3-1.3b-4stage --microbatches 8
      envplan timeline plan.json -o timeline.png
      envplan timeline plan.json -o timeline.html
    """
    plan, profile = source.load()
    with progress("Drawing"):
        planned = envplan.simulate(plan, profile, force=source.force)
        baseline = None if alone else planned.at_max_frequency()
        draw_timeline(output, planned, baseline)
    ui.answer(
        lambda: {
            "written": str(output),
            "iteration_time_s": planned.iteration_time,
            "energy_j": planned.energy,
            "max_frequency_iteration_time_s": baseline and baseline.iteration_time,
            "max_frequency_energy_j": baseline and baseline.energy,
        },
        next_command=["envplan", "report", str(source.plan)],
    )


def draw_timeline(
    path: Path, timeline: envplan.Timeline, baseline: envplan.Timeline | None = None
) -> None:
    """Write the picture or the page of a timeline.

    Args:
        path: of the picture or page.
        timeline: what is shown.
        baseline: that of maximum frequency, to show above it; None: nothing.
    """
    from envplan.plotting.report import timeline_page
    from envplan.plotting.timeline import timeline_figure

    ui.draw(
        path,
        lambda: timeline_figure(timeline, before=baseline),
        lambda: timeline_page(timeline, baseline),
    )
