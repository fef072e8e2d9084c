"""`envplan frontier`: the whole curve of iteration time against energy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import envplan
from envplan._io.files import atomic_write
from envplan.cli import output as ui
from envplan.cli.describe import ITERATION_TITLE, describe_ends, describe_job, modelled_title
from envplan.cli.given import as_typed
from envplan.cli.invocation import invocation
from envplan.cli.job_options import JobOptions
from envplan.cli.progress import progress
from envplan.cli.shared import MOST_USED, OUTPUT
from envplan.cli.tables import (
    Column,
    change_column,
    number_column,
    percent_column,
    text_column,
    value_column,
)
from envplan.cli.types import OPTIONAL_FILE, OutputFile, quantity
from envplan.quantities import COUNT

if TYPE_CHECKING:
    from envplan.planners import Comparison

_TABLE_PLANS = 9
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # Unicode's numbering, by row
_BLANK = 0x2800


def frontier(
    job: JobOptions,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar=OPTIONAL_FILE,
            parser=OutputFile(".png", ".svg", ".pdf", ".html", bare="frontier.png"),
            help="Draw the frontier: .png, .svg, .pdf or .html; without a name: frontier.png.",
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
        typer.Option(
            metavar="FILE",
            parser=OutputFile(".html"),
            help="Show the pipeline walking along the frontier: .html.",
            rich_help_panel=OUTPUT,
        ),
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
      envplan frontier a40-gpt3-1.3b-4stage --microbatches 32 --plot out.svg -o frontier.csv
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
    draw_frontier(plot, traced, along)
    if animate is not None:
        from envplan.plotting.report import animation_page

        with progress("drawing frames"):
            timelines = [envplan.simulate(plan, traced.profile) for plan in along]
            atomic_write(animate, animation_page(traced, timelines))
    if invocation().json:
        ui.say(document.to_json().rstrip())
        return
    ui.answer(
        dict,
        lambda: _print(traced, along, drawn=plot is not None),
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


def _print(traced: envplan.Frontier, plans: list[envplan.Plan], *, drawn: bool) -> None:
    ui.say(describe_job(traced))
    source = traced.profile.metadata.source
    ui.show_table(modelled_title(ITERATION_TITLE, source), _columns(traced, plans))
    ui.say(describe_ends(traced))
    if not drawn:
        baseline = plans[0].predicted.baseline
        curve = list(zip(traced.times.tolist(), traced.energies.tolist(), strict=True))
        marks = [(baseline.iteration_time_s, baseline.energy_j, "x")]
        ui.say("\n".join(sketch(curve, marks, units=(" s", " J"))))
        ui.say("x maximum frequency, curve: exact relaxed frontier; neither axis starts at 0")
    ui.say(_verdict(plans) + (" (modelled)" if source == "modelled" else ""))


def _columns(traced: envplan.Frontier, plans: Sequence[envplan.Plan]) -> list[Column]:
    """Maximum frequency, then some of the plans from T_min to T_star."""
    shown = _evenly_chosen(plans, _TABLE_PLANS)
    baseline = plans[0].predicted.baseline
    names = ["max frequency", "T_min plan", *[""] * (len(shown) - 2), "T_star plan"]
    times_s = [baseline.iteration_time_s, *(plan.iteration_time for plan in shown)]
    slowdowns = [0.0, *(plan.predicted.slowdown_percent for plan in shown)]
    energies_j = [baseline.energy_j, *(plan.energy for plan in shown)]
    savings = percent_column("saved (%)", [plan.predicted.savings_percent for plan in shown])
    gaps = percent_column("gap (%)", [100 * plan.gap for plan in shown], decimals=3)
    bound_j = traced.energy_at(baseline.iteration_time_s)
    baseline_gap = baseline.energy_j / bound_j - 1 if bound_j else 0.0
    powers_w = [baseline.average_power_w, *(plan.average_power for plan in shown)]
    return [
        text_column("", names[: len(shown) + 1]),
        number_column("time (s)", times_s),
        change_column("slower (%)", slowdowns),
        number_column("energy (J)", energies_j),
        value_column("saved (%)", ["", *savings.cells]),
        value_column("gap (%)", [f"{100 * baseline_gap:.2f}", *gaps.cells]),
        number_column("power (W)", powers_w),
    ]


def _evenly_chosen(plans: Sequence[envplan.Plan], count: int) -> list[envplan.Plan]:
    """At most so many of the plans, the first and the last among them."""
    count = min(len(plans), count)
    steps = max(1, count - 1)
    return [plans[k * (len(plans) - 1) // steps] for k in range(count)]


def _verdict(plans: list[envplan.Plan]) -> str:
    free = [p for p in plans if p.predicted.slowdown_percent <= 0]
    at_no_slowdown = max((p.predicted.savings_percent for p in free), default=0.0)
    thriftiest = max(plans, key=lambda p: p.predicted.savings_percent).predicted
    verdict = f"maximum frequency is wasting up to {at_no_slowdown:.1f}% at no slowdown"
    if thriftiest.slowdown_percent > 0:
        verdict += (
            f", {thriftiest.savings_percent:.1f}% at {thriftiest.slowdown_percent:.1f}% slowdown"
        )
    return verdict


def sketch(
    curve: Sequence[tuple[float, float]],
    marks: Sequence[tuple[float, float, str]],
    *,
    width: int = 60,
    height: int = 10,
    units: tuple[str, str] = ("", ""),
) -> list[str]:
    """A curve of braille dots and marks on it between labelled axes, as lines of text.

    Args:
        curve: points (x, y) to join, at least one.
        marks: single points (x, y, character).
        width, height: of the plotting area, in characters.
        units: what follows the numbers of the axes.
    """
    points = [*curve, *((x, y) for x, y, _ in marks)]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    low_x, low_y = min(xs), min(ys)
    span_x, span_y = max(xs) - low_x or 1.0, max(ys) - low_y or 1.0

    def place(x: float, y: float) -> tuple[int, int]:
        """Dot column and dot row, the latter from the top."""
        across = (x - low_x) / span_x * (2 * width - 1)
        return round(across), round((1 - (y - low_y) / span_y) * (4 * height - 1))

    cells = [[_BLANK] * width for _ in range(height)]
    dots = [place(x, y) for x, y in curve]
    for begin, end in pairwise([dots[0], *dots]):
        steps = max(abs(end[0] - begin[0]), abs(end[1] - begin[1]), 1)
        for k in range(steps + 1):
            column = round(begin[0] + (end[0] - begin[0]) * k / steps)
            row = round(begin[1] + (end[1] - begin[1]) * k / steps)
            cells[row // 4][column // 2] |= _DOTS[row % 4][column % 2]
    rows = [[chr(cell).replace(chr(_BLANK), " ") for cell in row] for row in cells]
    for x, y, character in marks:
        column, row = place(x, y)
        rows[row // 4][column // 2] = character
    high, low = (f"{y:.5g}{units[1]}" for y in (low_y + span_y, low_y))
    gutter = max(len(high), len(low))
    labels = [high, *[""] * (height - 2), low]
    lines = [f"{label:>{gutter}} │{''.join(row)}" for label, row in zip(labels, rows, strict=True)]
    left, right = f"{low_x:.5g}{units[0]}", f"{low_x + span_x:.5g}{units[0]}"
    lines.append(f"{'':>{gutter}} └{'─' * width}")
    lines.append(f"{'':>{gutter}}  {left}{right:>{width - len(left)}}")
    return [line.rstrip() for line in lines]
