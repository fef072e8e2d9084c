"""`envplan serving solve`: the fleet of least power for a load."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import typer

from envplan.cli import output as ui
from envplan.cli.describe import modelled_title
from envplan.cli.progress import progress
from envplan.cli.serving.service import FLEET, FleetGpus, ServiceOptions, split_class
from envplan.cli.shared import MOST_USED, OUTPUT
from envplan.cli.tables import table_columns
from envplan.cli.types import OPTIONAL_FILE, OutputFile, either, one_of, parser_of, quantity
from envplan.errors import InputError
from envplan.quantities import NUMBER, TIME
from envplan.serving.settings import Settings

if TYPE_CHECKING:
    from envplan.serving.plan import Group, Pool, ServingPlan

_LOAD_FORM: Final = "CLASS=TOKENS/S, as in SS=2000,LL=500"
_PLANNERS: Final = ("exact", "hierarchical")
#: A certified gap up to this is due to rounding.
_OPTIMAL_GAP: Final = 1e-5


class ClassLoad(NamedTuple):
    """How much of a class arrives."""

    request_class: str
    tokens_s: float


class Loads(tuple[ClassLoad, ...]):
    """The loads that one --load lists."""


def _parse_loads(text: str, option: str) -> Loads:
    """`SS=2000,LL=500`: tokens per second."""
    loads = []
    for part in text.split(","):
        name, value = split_class(part, f"{option} must be {_LOAD_FORM}")
        loads.append(ClassLoad(name, NUMBER.parse(value, f"{option} {name}")))
    return Loads(loads)


def solve(
    service: ServiceOptions,
    *,
    load: Annotated[
        list[Loads] | None,
        typer.Option(
            rich_help_panel=MOST_USED,
            metavar="CLASS=TOKENS/S[,...]",
            help="Tokens per second of each class, as in SS=2000,LL=500. May be repeated.",
            parser=parser_of(_parse_loads),
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=MOST_USED,
            metavar=OPTIONAL_FILE,
            help="Draw the pools: .png, .svg or .pdf; without a name: serving-plan.png.",
            parser=OutputFile(".png", ".svg", ".pdf", bare="serving-plan.png"),
        ),
    ] = None,
    gpus: FleetGpus = Settings.max_gpus,
    planner: Annotated[
        str,
        typer.Option(
            rich_help_panel=FLEET,
            metavar="NAME",
            help=f"{either(_PLANNERS)}.",
            parser=one_of(*_PLANNERS),
        ),
    ] = "exact",
    no_merge: Annotated[
        bool,
        typer.Option("--no-merge", rich_help_panel=FLEET, help="Every class in a pool of its own."),
    ] = False,
    one_frequency: Annotated[
        bool,
        typer.Option(
            "--one-frequency",
            rich_help_panel=FLEET,
            help="One clock for a pool's instances with the same TP.",
        ),
    ] = False,
    time_limit: Annotated[
        float,
        typer.Option(
            rich_help_panel=FLEET,
            metavar="TIME",
            help="For the exact planner; then the gap is stated. Default: 6s.",
            show_default=False,
            parser=quantity(TIME.within(0.1)),
        ),
    ] = 6.0,
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            rich_help_panel=OUTPUT,
            metavar="FILE",
            help="Where the plan goes.",
            parser=OutputFile(),
        ),
    ] = Path("serving-plan.json"),
) -> None:
    """Find the fleet of least power that keeps its SLOs.

    \b
    Example:
      envplan serving solve --load SS=20000,MM=8000,LL=3000 --gpus 64
      envplan serving solve --load LL=9000 --planner hierarchical --plot
    """
    from envplan.plotting.serving import plan_figure
    from envplan.serving.exact_planner import exact_plan
    from envplan.serving.hierarchical_planner import hierarchical_plan

    loads = _loads_by_class(load or [])
    if planner == "hierarchical" and one_frequency:
        raise InputError("--one-frequency goes with planner exact, not hierarchical")
    with progress("looking for the least power"):
        if planner == "hierarchical":
            plan = hierarchical_plan(service.serving_profile, loads, gpus, merge=not no_merge)
        else:
            plan = exact_plan(
                service.serving_profile,
                loads,
                gpus,
                merge=not no_merge,
                one_frequency=one_frequency,
                time_limit=time_limit,
            )
    plan.save(output)
    ui.draw(plot, lambda: plan_figure(plan))
    ui.answer(
        lambda: {"plan": str(output), **plan.model_dump(by_alias=True)},
        lambda: _print(plan),
        next_command=["envplan", "serving", "apply", str(output)],
    )


def _loads_by_class(loads: Sequence[Loads]) -> dict[str, float]:
    """Tokens per second of each class."""
    by_class: dict[str, float] = {}
    for load in chain.from_iterable(loads):
        name = load.request_class
        if name in by_class:
            raise InputError(f"--load gives {name} twice")
        by_class[name] = load.tokens_s
    if not by_class:
        raise InputError(f"which load? Give --load {_LOAD_FORM}")
    return by_class


def _print(plan: ServingPlan) -> None:
    """A row for each group of instances; then what the fleet draws and saves."""
    headers = ("classes", "pool", "instances", "on", "MHz", "tokens/s", "W", "TTFT (s)", "TBT (s)")
    rows = []
    for pool in plan.pools:
        rows += [_group_cells(pool, group) for group in pool.groups]
    title = modelled_title(f"{plan.planner} plan, figures per instance", plan.profile.source)
    ui.show_table(title, table_columns(headers, rows, num_texts=2))
    predicted = plan.predicted
    ui.say(f"{predicted.gpus} of {plan.request.gpus} GPUs, {predicted.power_w:.6g} W in all")
    if predicted.gap is not None:
        optimal = predicted.gap <= _OPTIMAL_GAP
        proved = "proved optimal" if optimal else "the best found in time"
        ui.say(f"{proved}, certified gap {100 * predicted.gap:.4f}%")
    elif plan.planner == "exact":
        ui.say("the best found in time, with no proof of how near to the optimum it is")
    baseline = predicted.baseline
    if baseline is not None and predicted.savings_percent is not None:
        ui.say(
            f"at maximum frequency on the highest TP: {baseline.gpus} GPUs, "
            f"{baseline.power_w:.6g} W; saved {predicted.savings_percent:.1f}%"
        )


def _group_cells(pool: Pool, group: Group) -> list[str]:
    """The row of a group of instances."""
    return [
        " + ".join(pool.classes),
        pool.request_class,
        str(group.instances),
        f"TP{group.tp}",
        str(group.frequency_mhz),
        f"{group.load_tokens_s:.0f}",
        f"{group.power_w:.0f}",
        f"{group.ttft_s:.3f}",
        f"{group.tbt_s:.3f}",
    ]
