"""`envplan serving simulate`: a trace under one policy, request by request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import typer

from envplan._io.files import atomic_write, is_file
from envplan.cli import output as ui
from envplan.cli.invocation import invocation
from envplan.cli.serving.replay import (
    Disaggregated,
    FleetRateOptions,
    GivenFleet,
    ReplayOptions,
    Replays,
    print_rivals,
)
from envplan.cli.serving.service import ServiceOptions
from envplan.cli.shared import MOST_USED, OUTPUT
from envplan.cli.tables import Column
from envplan.cli.types import OutputFile
from envplan.errors import InputError
from envplan.serving.settings import DISAGGREGATED, SPLIT_FLEETS, TOGETHER

if TYPE_CHECKING:
    from envplan.serving.profile import ServingProfile
    from envplan.serving.simulation import Simulation

_BASELINE: Final = "SinglePool"
_HOUR_S: Final = 3600.0


def simulate(
    service: ServiceOptions,
    replay: ReplayOptions,
    rates: FleetRateOptions,
    *,
    policy: Annotated[
        str,
        typer.Option(
            rich_help_panel=MOST_USED,
            metavar="NAME",
            help="One of those that `serving compare` names.",
        ),
    ] = "envplan",
    disaggregated: Disaggregated = False,
    fleet: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=MOST_USED,
            metavar="FLEET",
            help="Instead of a policy a fleet that never changes, as in 3xTP4@1200,1xTP8@1980, or "
            "that of a plan of `envplan serving solve`.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            rich_help_panel=OUTPUT,
            metavar="FILE",
            help="Write what happens over time: .csv.",
            parser=OutputFile(".csv"),
        ),
    ] = None,
) -> None:
    """Replay a trace under one policy or on one fleet, by request.

    Says how much energy the fleet uses, how many SLOs it meets, and how often it changes.

    \b
    Example:
      envplan serving simulate --trace azure-2023-conversation
      envplan serving simulate --trace azure-2023-code --policy static -o hour.csv
      envplan serving simulate --fleet 3xTP4@1200
      envplan serving simulate --disaggregated
      envplan serving simulate --trace mine.csv.gz --price 0.12 --carbon 380
    """
    from envplan.serving.class_file import class_list

    if fleet is not None and disaggregated:
        raise InputError("--disaggregated finds a fleet; leave out --fleet")
    given = None if fleet is None else _given_fleet(fleet, service)
    profile = service.serving_profile if given is None else given.profile
    policies = [] if given is not None else [policy]
    if disaggregated:
        policies = [*SPLIT_FLEETS]
    if replay.plot is not None and policies != [_BASELINE]:
        policies.insert(0, _BASELINE)  # a picture has it in it
    fleet_rates = rates.read()  # a mistake in them is told before hours are replayed
    replays = replay.run(profile, policies, given=None if given is None else given.fleet)
    replay.draw(replays, policy if fleet is None else Path(fleet).stem)
    result = replays.simulations[-1]
    if output is not None:
        atomic_write(output, result.to_frame().to_csv(index=False, float_format="%.10g"))
    costs = rates.named(fleet_rates.costs_of(result))
    ui.answer(
        lambda: {
            **result.to_dict(),
            **costs,
            **replays.rivals_document(-1),
            **_together(replays),
            "trace": replays.trace.name,
            "profile": replays.profile.name,
            "classes": class_list(replays.profile.classes),
        },
        lambda: _print(replays, costs),
        next_command=[
            *("envplan", "serving", "compare", *service.to_words(), "--trace", replay.trace)
        ],
    )


def _together(replays: Replays) -> dict[str, object]:
    """The best fleet whose instances do both phases, beside one whose instances do one of them."""
    if replays.simulations[-1].policy != DISAGGREGATED:
        return {}
    return {TOGETHER: replays.simulations[-2].to_dict()}


def _print_better(simulations: Sequence[Simulation]) -> None:
    """Prefill and decode together and apart, and which of both takes less."""
    from envplan.serving.metrics import kwh

    for result in simulations:
        percent = 100 * result.slo_attainment
        ui.say(f"{result.policy}: {result.fleet}: {kwh(result.energy_j)} kWh, SLOs {percent:.3f}%")
    better, worse = sorted(simulations, key=lambda result: result.energy_j)
    saved_percent = better.saved_percent(worse) or 0.0
    ui.say(f"{better.policy} takes {saved_percent:.1f}% less than {worse.policy}")


class _Given(NamedTuple):
    """A fleet that is given, and the profile for the classes that it was planned for."""

    fleet: GivenFleet
    profile: ServingProfile


def _given_fleet(text: str, service: ServiceOptions) -> _Given:
    """The fleet of a plan's file, or one that is written out."""
    from envplan.serving.given_fleet import fleet_of_plan, parse_fleet
    from envplan.serving.plan import ServingPlan

    path = Path(text)
    if not is_file(path):
        profile = service.serving_profile
        return _Given(GivenFleet(text, parse_fleet(text, profile.classes)), profile)
    invocation().will_read(path)
    plan = ServingPlan.load(path)
    profile = service.profile_for(plan.classes)
    if not profile.classes.has_the_bounds_of(plan.request.all_classes):
        raise InputError(
            f"was planned for other classes: {', '.join(plan.request.all_classes)}; leave out "
            "--classes",
            path=path,
        )
    return _Given(GivenFleet(path.stem, fleet_of_plan(plan)), profile)


def _print(replays: Replays, costs: Mapping[str, float]) -> None:
    from envplan.serving.metrics import METRICS

    result = replays.simulations[-1]
    if result.policy == DISAGGREGATED:
        _print_better(replays.simulations[-2:])
    ui.say(f"{result.policy}: {replays.title}, {result.duration_s / _HOUR_S:.3g} hours replayed")
    names = [metric.name for metric in METRICS] + list(costs)
    totals = [metric.text(result) for metric in METRICS]
    totals += [f"{cost:.6g}" for cost in costs.values()]
    columns = [
        Column(header="", cells=names, is_text=True),
        Column(header="in all", cells=totals),
    ]
    ui.show_table("", columns)
    print_rivals(replays.rivals[-1:])
