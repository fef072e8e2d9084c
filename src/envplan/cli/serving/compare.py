"""`envplan serving compare`: all policies side by side on one trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from envplan.cli import output as ui
from envplan.cli.serving.replay import (
    Disaggregated,
    FleetRateOptions,
    Names,
    ReplayOptions,
    Replays,
    print_rivals,
)
from envplan.cli.serving.service import ServiceOptions
from envplan.cli.shared import MOST_USED
from envplan.cli.tables import Column
from envplan.cli.types import parser_of
from envplan.errors import InputError
from envplan.serving.policies import POLICIES
from envplan.serving.settings import SPLIT_FLEETS


def _parse_policies(text: str, option: str) -> Names:
    """Names of policies, none twice."""
    names = Names(name.strip() for name in text.split(","))
    if len(set(names)) < len(names):
        raise InputError(f"{option} names a policy twice: {text}")
    return names


def compare(
    service: ServiceOptions,
    replay: ReplayOptions,
    rates: FleetRateOptions,
    policies: Annotated[
        Names | None,
        typer.Option(
            rich_help_panel=MOST_USED,
            metavar="NAME[,NAME...]",
            help="Only these, savings against the first; default: " + ", ".join(POLICIES) + ".",
            show_default=False,
            parser=parser_of(_parse_policies),
        ),
    ] = None,
    disaggregated: Disaggregated = False,
) -> None:
    """Set all policies side by side on one trace.

    Each is replayed request by request.

    \b
    Example:
      envplan serving compare --trace azure-2023-code
      envplan serving compare --trace mine.csv.gz --gpus 256 --plot
      envplan serving compare --policies SinglePool,envplan --plot
    """
    fleet_rates = rates.read()  # a mistake in them is told before hours are replayed
    names = policies or tuple(POLICIES)
    if disaggregated:
        names = Names([*names, *(name for name in SPLIT_FLEETS if name not in names)])
    replays = replay.run(service.serving_profile, names, left_out=ui.warn)
    replay.draw(replays, "compare")
    costs = [rates.named(fleet_rates.costs_of(result)) for result in replays.simulations]
    ui.answer(
        lambda: _document(replays, costs),
        lambda: _print(replays, costs),
        next_command=[
            *("envplan", "serving", "simulate", *service.to_words()),
            *("--trace", replay.trace, "--plot"),
        ],
    )


def _document(replays: Replays, costs: Sequence[Mapping[str, float]]) -> dict[str, object]:
    from envplan.serving.class_file import class_list

    baseline = replays.simulations[0]
    policies = []
    for number, (result, cost) in enumerate(zip(replays.simulations, costs, strict=True)):
        saved_percent = result.saved_percent(baseline)
        policies.append(
            {
                **result.to_dict(),
                **cost,
                "savings_percent": saved_percent,
                **replays.rivals_document(number),
            }
        )
    return {
        "trace": replays.trace.name,
        "made": replays.trace.provenance,
        "profile": replays.profile.name,
        "classes": class_list(replays.profile.classes),
        "source": replays.profile.source,
        "policies": policies,
    }


def _print(replays: Replays, costs: Sequence[Mapping[str, float]]) -> None:
    """A row for each policy, what each costs, and what each does."""
    from envplan.serving.metrics import COMPARED, saved_percent_text

    results = replays.simulations
    policies = Column(header="policy", cells=[result.policy for result in results], is_text=True)
    saved = [saved_percent_text(result, results[0]) for result in results]
    columns = [policies, Column(header="saved (%)", cells=saved)]
    for metric in COMPARED:
        cells = [metric.text(result) for result in results]
        columns.append(Column(header=metric.name, cells=cells))
    ui.show_table(replays.title, columns)
    first_tokens = [str(result.ttft_s) for result in results]
    intervals = [str(result.tbt_s) for result in results]
    times = [
        Column(header="first token, p50, p90, p99 (s)", cells=first_tokens),
        Column(header="between tokens, p50, p90, p99 (s)", cells=intervals),
    ]
    ui.show_table("", [policies, *times])
    print_rivals(replays.rivals)
    cost_columns = []
    for name in costs[0]:
        cells = [f"{cost[name]:.6g}" for cost in costs]
        cost_columns.append(Column(header=name, cells=cells))
    if cost_columns:
        ui.show_table("", [policies, *cost_columns])
    for result in results:
        if result.policy in SPLIT_FLEETS:
            ui.say(f"{result.policy}: {SPLIT_FLEETS[result.policy]}: {result.fleet}")
        else:
            ui.say(f"{result.policy}: {POLICIES[result.policy].about}")
