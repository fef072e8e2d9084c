"""`envplan report`: one page about a plan, for people who would rather look than read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from envplan.cli.costs import (
    CarbonOption,
    CostOptions,
    CurrencyOption,
    IterationsOption,
    PriceOption,
    RepeatRatesOption,
    StartOption,
    TokensOption,
    TokensPerIterationOption,
)
from envplan.cli.inputs import JsonOption, QuietOption
from envplan.cli.plan_file import ForceOption, PlanArgument, ProfileOption, load_plan

_ALONG = 33


def report(
    plan: PlanArgument = Path("plan.json"),
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Where the page goes: .html.")
    ] = Path("report.html"),
    compare: Annotated[
        bool,
        typer.Option(
            "--compare/--no-compare", help="Set the other planners beside it, which takes longer."
        ),
    ] = True,
    price: PriceOption = None,
    carbon: CarbonOption = None,
    currency: CurrencyOption = None,
    iterations: IterationsOption = None,
    tokens: TokensOption = None,
    tokens_per_iteration: TokensPerIterationOption = None,
    start: StartOption = None,
    repeat_rates: RepeatRatesOption = False,
    profile: ProfileOption = None,
    force: ForceOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Write a page about a plan: what it saves, the frontier, timelines, stages, assumptions.

    One file that needs no network, in light and dark, for a wide screen and for a phone.

    \b
    Example:
      envplan solve a40-gpt3-1.3b-4stage --microbatches 8 --slowdown 1
      envplan report plan.json -o report.html
      envplan report plan.json --price 0.25 --currency EUR --carbon 380 --iterations 100000
    """
    from envplan.cli.frontier import check_type, distinct
    from envplan.cli.output import print_json, progress_bar, say, signed_percent, spinner
    from envplan.planners import compare as run_planners
    from envplan.plotting.page import save_page
    from envplan.plotting.report import Report, report_page
    from envplan.simulation import simulate
    from envplan.verify import trace_job

    check_type(output, "--output", (".html",), "a report is a page")
    costs = CostOptions(
        price,
        carbon,
        currency,
        iterations,
        tokens,
        tokens_per_iteration,
        start,
        repeat_rates,
    )
    loaded, source = load_plan(plan, profile, output)
    after = simulate(loaded, source, force=force)
    with progress_bar("Tracing the frontier", quiet=quiet) as progress:
        frontier = trace_job(loaded.job, source, progress)
    if costs.given:
        loaded = costs.run(frontier).reckon(loaded)
    with progress_bar("Choosing frequencies", quiet=quiet) as progress:
        along = distinct(frontier.sample_plans(_ALONG, progress=progress))
    comparison = None
    if compare:
        with spinner("Comparing planners", quiet=quiet):
            comparison = run_planners(frontier)
    made = Report(
        plan=loaded,
        frontier=frontier,
        along=along,
        before=simulate(frontier.max_frequency_plan(), source, force=force),
        after=after,
        comparison=comparison,
    )
    save_page(report_page(made), output)
    if json:
        print_json(
            {
                "written": str(output),
                "savings_percent": loaded.predicted.savings_percent,
                "slowdown_percent": loaded.predicted.slowdown_percent,
                "energy_j": loaded.energy,
                "gap": loaded.gap,
                "source": loaded.profile.source,
            }
        )
    elif not quiet:
        modelled = " (modelled)" if loaded.profile.source == "modelled" else ""
        say(
            f"{loaded.predicted.savings_percent:.1f}% of the energy saved at "
            f"{signed_percent(loaded.predicted.slowdown_percent)}% iteration time{modelled}"
        )
        say(f"wrote {output}")
