"""`envplan frontier`: the whole curve of iteration time against energy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from envplan.cli.command import PLOT_TYPES, file_of, takes, typed
from envplan.cli.inputs import check_outputs, refuse_overwriting
from envplan.cli.options import JobOptions, OutputOptions
from envplan.errors import InputError
from envplan.quantities import COUNT

if TYPE_CHECKING:
    from envplan.plan import Plan
    from envplan.planners import Comparison
    from envplan.solve import Frontier

_TABLE_PLANS = 9
_ALONG = 17


@takes(
    """
    Most used:
      --plot [FILE]  Draw the frontier: .png, .svg, .pdf or .html; without a name: frontier.png.
      -o, --output FILE  Write the plans and the curve: .csv or .json.
    Output:
      --compare  Put the other planners' plans into the picture.
      --animate FILE  Show the pipeline walking along the frontier: .gif or .html.
      --plans N  Plans along the frontier in the output.
    """,
    plot=file_of(PLOT_TYPES, "a profile goes before --plot", "frontier.png"),
    animate=file_of((".gif", ".html"), "choose one of them"),
    output=file_of((".csv", ".json"), "choose one of the two"),
    plans=COUNT.within(2),
)
def frontier(
    job: JobOptions,
    show: OutputOptions,
    plot: Path | None = None,
    compare: bool = False,
    animate: Path | None = None,
    output: Path | None = None,
    plans: int = 33,
) -> None:
    """Trace the exact frontier of iteration time against energy.

    From T_min, the least time possible, to T_star, where the energy is least.

    \b
    Example:
      envplan frontier --plot
      envplan frontier a40-gpt3-1.3b-4stage --microbatches 32 --plot out.svg -o frontier.csv
    """
    if compare and plot is None:
        raise InputError("--compare goes with --plot; `envplan compare` prints the planners")
    check_outputs(output, plot, animate, inputs=[("the DAG file", job.dag)])
    traced = job.trace(quiet=show.quiet)
    refuse_overwriting(traced.profile, plot, output, animate)
    from envplan.cli.output import answer, progress_bar, say
    from envplan.frontier_file import FrontierFile, distinct

    with progress_bar("choosing frequencies", quiet=show.quiet) as progress:
        along = distinct(traced.sample_plans(plans, progress=progress))
    document = FrontierFile.from_plans(traced, along)
    if output is not None:
        document.save(output)
    if plot is not None:
        from envplan import planners

        draw(traced, plot, planners.compare(traced) if compare else None, along)
    if animate is not None:
        from envplan.plotting.animation import animate_frontier

        with progress_bar("drawing frames", quiet=show.quiet) as progress:
            animate_frontier(traced, along, animate, progress=progress)
    if show.json:
        say(document.to_json().rstrip())
        return
    answer(
        show,
        dict,
        lambda: _print(traced, along, drawn=plot is not None),
        written=[output, plot, animate],
        then=["envplan", "solve", *typed(job)],
    )


def draw(
    traced: Frontier,
    path: Path,
    comparison: Comparison | None = None,
    plans: Sequence[Plan] | None = None,
) -> None:
    """Write the picture or the page of a frontier.

    Args:
        comparison: other planners to show beside it.
        plans: along it; default: some.
    """
    from envplan.plotting.frontier import frontier_figure, plans_along

    plans = plans_along(traced, _ALONG) if plans is None else plans
    if path.suffix.lower() == ".html":
        from envplan.plotting.page import save_page
        from envplan.plotting.report import frontier_page

        save_page(frontier_page(traced, plans, comparison), path)
    else:
        from envplan.plotting.figures import save_figure

        save_figure(frontier_figure(traced, plans, comparison), path)


def _print(traced: Frontier, plans: list[Plan], *, drawn: bool) -> None:
    from envplan.cli.output import (
        ITERATION,
        describe_ends,
        describe_job,
        print_columns,
        say,
        titled,
    )

    say(describe_job(traced))
    source = traced.profile.metadata.source
    print_columns(titled(ITERATION, source), _columns(traced, plans))
    say(describe_ends(traced))
    if not drawn:
        _sketch(traced, plans)
    say(_verdict(plans) + (" (modelled)" if source == "modelled" else ""))


def _sketch(traced: Frontier, plans: list[Plan]) -> None:
    """The frontier in the terminal."""
    from envplan.cli.output import say
    from envplan.cli.sketch import sketch

    baseline = plans[0].predicted.baseline
    curve = list(zip(traced.times.tolist(), traced.energies.tolist(), strict=True))
    marks = [(baseline.iteration_time_s, baseline.energy_j, "x")]
    for line in sketch(curve, marks, units=(" s", " J")):
        say(line)
    say("x maximum frequency, curve: exact relaxed frontier; neither axis starts at 0")


def _columns(traced: Frontier, plans: list[Plan]) -> dict[str, list[str]]:
    from envplan.cli.output import column, signed_percent

    baseline = plans[0].predicted.baseline
    shown = evenly(plans, _TABLE_PLANS)
    names = ["max frequency", *[""] * len(shown)]
    names[1] = "T_min plan"
    if len(shown) > 1:
        names[-1] = "T_star plan"
    slower = [0.0, *(p.predicted.slowdown_percent for p in shown)]
    least = traced.energy_at(baseline.iteration_time_s)
    baseline_gap = baseline.energy_j / least - 1 if least else 0.0
    return {
        "": names,
        "time (s)": column([baseline.iteration_time_s, *(p.iteration_time for p in shown)]),
        "slower (%)": list(map(signed_percent, slower)),
        "energy (J)": column([baseline.energy_j, *(p.energy for p in shown)]),
        "saved (%)": ["", *(f"{p.predicted.savings_percent:.2f}" for p in shown)],
        "gap (%)": [f"{100 * baseline_gap:.2f}", *(f"{100 * p.gap:.3f}" for p in shown)],
        "power (W)": column([baseline.average_power_w, *(p.average_power for p in shown)]),
    }


def evenly(plans: list[Plan], count: int) -> list[Plan]:
    """At most `count` of the plans, evenly spread, the first and the last among them."""
    if len(plans) <= count:
        return plans
    return [plans[k * (len(plans) - 1) // (count - 1)] for k in range(count)]


def _verdict(plans: list[Plan]) -> str:
    free = [p for p in plans if p.predicted.slowdown_percent <= 0]
    at_no_slowdown = max((p.predicted.savings_percent for p in free), default=0.0)
    most = max(plans, key=lambda p: p.predicted.savings_percent).predicted
    verdict = f"maximum frequency is wasting up to {at_no_slowdown:.1f}% at no slowdown"
    if most.slowdown_percent > 0:
        verdict += f", {most.savings_percent:.1f}% at {most.slowdown_percent:.1f}% slowdown"
    return verdict
