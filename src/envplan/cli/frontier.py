"""`envplan frontier`: the whole curve of iteration time against energy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

import envplan
from envplan.cli import output as ui
from envplan.cli.describe import ITERATION_TITLE, describe_ends, describe_job, modelled_title
from envplan.cli.given import as_typed
from envplan.cli.invocation import invocation
from envplan.cli.job_options import JobOptions
from envplan.cli.progress import progress
from envplan.cli.shared import MOST_USED, OUTPUT
from envplan.cli.sketch import Mark, sketch
from envplan.cli.tables import (
    Column,
    change_column,
    number_column,
    text_column,
    value_column,
)
from envplan.cli.terminal_plot import picture
from envplan.cli.types import OPTIONAL_FILE, TERMINAL, OutputFile, quantity
from envplan.quantities import COUNT

if TYPE_CHECKING:
    from envplan.planners import Comparison

#: Plans that the table shows, at most.
_TABLE_PLANS: Final = 9


def frontier(
    job: JobOptions,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar=OPTIONAL_FILE,
            parser=OutputFile(".png", ".svg", ".pdf", ".html", bare="frontier.png", terminal=True),
            help=(
                "Draw the frontier: .png, .svg, .pdf or .html, - for the terminal; without a name: "
                "frontier.png."
            ),
            rich_help_panel=MOST_USED,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            parser=OutputFile(".csv", ".json"),
            help="Write the plans and the curve: .csv or .json.",
            rich_help_panel=MOST_USED,
        ),
    ] = None,
    animate: Annotated[
        Path | None,
        typer.Option(metavar="FILE", parser=OutputFile(".html"), hidden=True),
    ] = None,
    plans: Annotated[
        int,
        typer.Option(
            metavar="N",
            parser=quantity(COUNT.within(2)),
            help="Plans along the frontier in the output.",
            rich_help_panel=OUTPUT,
        ),
    ] = 33,
    slower: Annotated[
        bool,
        typer.Option(
            "--slower",
            help="Go on beyond T_star, to plans of less power up to T_max, in .json files.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
) -> None:
    """Trace the exact frontier of iteration time against energy.

    From T_min, the least time possible, to T_star, where the energy is least.

    \b
    Example:
      envplan frontier --plot
      envplan frontier a40-gpt3-1.3b-4stage -m 32 --plot out.svg -o frontier.csv
    """
    from envplan.plan.frontier_file import distinct, less_powerful

    traced = job.trace(full=slower)
    beyond = None
    with progress("choosing frequencies") as work:
        along = distinct(traced.sample_plans(plans, progress=work.frontier_step))
        if slower:
            sampled = traced.sample_plans(plans, beyond=True, progress=work.frontier_step)
            beyond = less_powerful(sampled, along[-1])
    document = envplan.FrontierFile.from_plans(traced, along, beyond)
    if output is not None:
        document.save(output)
    draws_here = plot == TERMINAL
    draw_frontier(None if draws_here else plot, traced, along)
    # The page of --plot walks along the frontier since 0.2; --animate wrote one of its own.
    draw_frontier(animate, traced, along)
    if invocation().json:
        ui.say(document.to_json().rstrip())
        return
    ui.answer(
        dict,
        lambda: _print(traced, along, drawn=plot is not None and not draws_here, large=draws_here),
        next_command=["envplan", "solve", *as_typed(job)],
    )


def draw_frontier(
    path: Path | None,
    traced: envplan.Frontier,
    plans: Sequence[envplan.Plan],
    comparison: Comparison | None = None,
) -> None:
    """Write the picture or the page of a frontier; nothing without a file.

    Args:
        plans: along it.
        comparison: other planners to show beside it.
    """
    from envplan.plotting.frontier import frontier_figure
    from envplan.plotting.report import frontier_page

    def write_page() -> str:
        slower = traced.slower_plans_to_draw()
        return frontier_page(traced, plans, comparison, slower=slower)

    ui.draw(path, lambda: frontier_figure(traced, plans, comparison), write_page)


def _print(
    traced: envplan.Frontier, plans: list[envplan.Plan], *, drawn: bool, large: bool
) -> None:
    ui.say(describe_job(traced))
    source = traced.profile.metadata.source
    ui.show_table(modelled_title(ITERATION_TITLE, source), _columns(traced, plans))
    ui.say(describe_ends(traced))
    if large:
        ui.say(*picture(traced, plans))
    elif not drawn:
        baseline = plans[0].predicted.baseline
        curve = list(zip(traced.times.tolist(), traced.energies.tolist(), strict=True))
        max_frequency = Mark(baseline.iteration_time_s, baseline.energy_j, "x")
        ui.say(*sketch(curve, [max_frequency], units=(" s", " J")))
        ui.say("x maximum frequency, curve: exact relaxed frontier; neither axis starts at 0")
    ui.say(_verdict(plans) + (" (modelled)" if source == "modelled" else ""))


def _columns(traced: envplan.Frontier, plans: Sequence[envplan.Plan]) -> list[Column]:
    """Maximum frequency, then some of the plans from T_min to T_star."""
    from envplan.plan.frontier_file import evenly_chosen

    baseline = plans[0].predicted.baseline
    bound_j = traced.energy_at(baseline.iteration_time_s)
    baseline_gap = baseline.energy_j / bound_j - 1 if bound_j else 0.0
    # A row for maximum frequency is in front of those of plans.
    times_s = [baseline.iteration_time_s]
    slowdowns_percent = [0.0]
    energies_j = [baseline.energy_j]
    savings = [""]
    gaps = [f"{100 * baseline_gap:.2f}"]
    powers_w = [baseline.average_power_w]
    shown = evenly_chosen(plans, _TABLE_PLANS)
    for plan in shown:
        times_s.append(plan.iteration_time)
        slowdowns_percent.append(plan.predicted.slowdown_percent)
        energies_j.append(plan.energy)
        savings.append(f"{plan.predicted.savings_percent:.2f}")
        gaps.append(f"{100 * plan.gap:.3f}")
        powers_w.append(plan.average_power)
    return [
        text_column("", _row_names(len(shown))),
        number_column("time (s)", times_s),
        change_column("slower (%)", slowdowns_percent),
        number_column("energy (J)", energies_j),
        value_column("saved (%)", savings),
        value_column("gap (%)", gaps),
        number_column("power (W)", powers_w),
    ]


def _row_names(num_plans: int) -> list[str]:
    """Names of the rows for maximum frequency and some plans; those between the ends have none."""
    if num_plans == 1:
        return ["max frequency", "T_min plan"]
    return ["max frequency", "T_min plan", *[""] * (num_plans - 2), "T_star plan"]


def _verdict(plans: list[envplan.Plan]) -> str:
    """How much maximum frequency wastes, at no slowdown and at all."""
    wasted_percent = 0.0  # at no slowdown
    thriftiest = plans[0].predicted
    for plan in plans:
        predicted = plan.predicted
        if predicted.slowdown_percent <= 0:
            wasted_percent = max(wasted_percent, predicted.savings_percent)
        if predicted.savings_percent > thriftiest.savings_percent:
            thriftiest = predicted
    verdict = f"maximum frequency is wasting up to {wasted_percent:.1f}% at no slowdown"
    if thriftiest.slowdown_percent > 0:
        verdict += (
            f", {thriftiest.savings_percent:.1f}% at {thriftiest.slowdown_percent:.1f}% slowdown"
        )
    return verdict
