"""`envplan serving solve`: the fleet of least power for a load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import typer

from envplan.cli import output as ui
from envplan.cli.describe import modelled_title
from envplan.cli.progress import progress
from envplan.cli.serving.replay import GB
from envplan.cli.serving.service import FLEET, FleetGpus, ServiceOptions, split_class
from envplan.cli.shared import MOST_USED, OUTPUT
from envplan.cli.tables import table_columns
from envplan.cli.types import OPTIONAL_FILE, OutputFile, either, one_of, parser_of, quantity
from envplan.errors import InputError
from envplan.quantities import NUMBER, TIME
from envplan.serving.plan_replay import NUM_DRAWS
from envplan.serving.plan_request import SLO_QUANTILE_PERCENT
from envplan.serving.settings import TOGETHER, Settings

if TYPE_CHECKING:
    from envplan.serving.plan import Group, Pool, Predicted, ServingPlan

_LOAD_FORM: Final = "CLASS=TOKENS/S, as in SS=2000,LL=500"
_PLANNERS: Final = ("exact", "hierarchical")


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
    slo_quantile: Annotated[
        float,
        typer.Option(
            rich_help_panel=FLEET,
            metavar="PERCENT",
            help="Share of requests that must meet their SLOs when the plan is replayed.",
            parser=quantity(NUMBER.within(1, 99.99)),
        ),
    ] = SLO_QUANTILE_PERCENT,
    disaggregated: Annotated[
        bool,
        typer.Option(
            "--disaggregated",
            rich_help_panel=FLEET,
            help="Plan instances for prompts and others to decode, too, and alike ones that all "
            "classes share; take what draws least.",
        ),
    ] = False,
    kv_link: Annotated[
        float,
        typer.Option(
            rich_help_panel=FLEET,
            metavar="GB/S",
            help="Network of a GPU, over which contexts go from prefill to decode.",
            parser=quantity(NUMBER.within(0.001, 1e6)),
        ),
    ] = Settings.link_bytes_s / GB,
    time_limit: Annotated[
        float,
        typer.Option(
            rich_help_panel=FLEET,
            metavar="TIME",
            help="For the exact planner, on a usual core: it sets how many nodes are searched, "
            "the same on every machine. Then the gap is stated. Default: 6s.",
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

    The plan is replayed before it is stated.

    \b
    Example:
      envplan serving solve --load SS=20000,MM=8000,LL=3000 --gpus 64
      envplan serving solve --load LL=9000 --planner hierarchical --plot
    """
    from envplan.plotting.serving import plan_figure
    from envplan.serving.fleet_planning import Planning, plan_fleet

    loads = _loads_by_class(load or [])
    if planner == "hierarchical" and one_frequency:
        raise InputError("--one-frequency goes with planner exact, not hierarchical")
    planning = Planning(
        planner=planner,
        merge=not no_merge,
        one_frequency=one_frequency,
        time_limit=time_limit,
        slo_quantile=slo_quantile,
        disaggregated=disaggregated,
        kv_link_bytes_s=kv_link * GB,
    )
    with progress("replaying instances at rising loads") as work:
        plan = plan_fleet(service.serving_profile, loads, gpus, planning, work.items)
    plan.save(output)
    split = plan.predicted.savings_split
    ui.draw(plot, lambda: plan_figure(plan))
    ui.answer(
        lambda: {
            "plan": str(output),
            **plan.model_dump(by_alias=True),
            "savings_split": None if split is None else split._asdict(),
        },
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
    pool_name = "pool and role" if any(pool.has_roles for pool in plan.pools) else "pool"
    headers = (
        *("classes", pool_name, "instances", "on", "MHz", "tokens/s", "W"),
        *("TTFT (s)", "TBT (s)", "in SLO (%)"),
    )
    rows = []
    for pool in plan.pools:
        rows += [_group_cells(pool, group) for group in pool.groups]
    title = modelled_title(f"{plan.planner} plan, figures per instance", plan.profile.source)
    ui.show_table(title, table_columns(headers, rows, num_texts=2))
    _print_both(plan)
    predicted = plan.predicted
    ui.say(f"{predicted.gpus} of {plan.request.gpus} GPUs, {predicted.power_w:.6g} W in all")
    if predicted.gap is not None:
        ui.say(
            f"certified gap {100 * predicted.gap:.4f}%: no fleet draws less than "
            f"{predicted.power_lower_bound_w:.6g} W by the load curves of single instances"
        )
    elif plan.planner == "exact":
        ui.say("the best found in time, with no proof of how near to the optimum it is")
    elif plan.planner == TOGETHER:
        ui.say(
            "alike instances that all classes share: the best found, with no proof of how near to "
            "the optimum it is"
        )
    _print_attainment(plan)
    _print_one_clock_fleets(predicted, plan.request.gpus)
    baseline = predicted.baseline
    if baseline is not None and predicted.savings_percent is not None:
        ui.say(
            f"at maximum frequency on the highest TP: {_of_given(baseline.gpus, plan)}, "
            f"{baseline.power_w:.6g} W; saved {predicted.savings_percent:.1f}%"
        )
    split = predicted.savings_split
    if split is not None:
        ui.say(
            f"of these, by TP {split.parallelism_percent:.1f}%, by one lower clock "
            f"{split.clocks_percent:.1f}%, by instances and clocks that differ "
            f"{split.scaling_percent:.1f}%"
        )


def _print_both(plan: ServingPlan) -> None:
    """What the best fleets take whose instances run both phases, or one of them."""
    together, apart = plan.predicted.together, plan.predicted.apart
    if together is not None and apart is not None:
        saved_percent = 100 * (1 - apart.power_w / together.power_w)
        than = "less" if saved_percent >= 0 else "more"
        ui.say(
            f"prefill and decode apart: {apart.gpus} GPUs, {apart.power_w:.6g} W; together: "
            f"{together.gpus} GPUs, {together.power_w:.6g} W: apart draws "
            f"{abs(saved_percent):.1f}% {than}"
        )
    elif together is not None and plan.request.kv_link_bytes_s is not None:
        ui.say("no fleet with prefill and decode apart was found that keeps the SLOs")
    elif apart is not None:
        ui.say("no fleet whose instances run both phases keeps the SLOs")


def _of_given(gpus: int, plan: ServingPlan) -> str:
    """So many GPUs, and whether there are as many."""
    more = gpus - plan.request.gpus
    return f"{gpus} GPUs" + (f" ({more} more than there are)" if more > 0 else "")


def _print_attainment(plan: ServingPlan) -> None:
    """How many requests of each class met their SLOs when the plan was replayed."""
    by_class = plan.predicted.long_run_by_class
    if by_class is None:
        return
    words = []
    for name, long_run in by_class.items():
        at_least = _percent_down(long_run.at_least)
        words.append(f"{name} {at_least}% ({long_run.requests:,} requests)")
    ui.say(
        f"within their SLOs in the long run, at least, by {NUM_DRAWS} replays: {', '.join(words)}; "
        "Poisson arrivals, requests of mean lengths"
    )


def _print_one_clock_fleets(predicted: Predicted, gpus: int) -> None:
    """The best fleets at the highest clock and at one lower clock, and what the plan saves."""
    fleets = predicted.one_clock
    if not fleets:
        return
    for fleet in fleets:
        name = "the highest clock" if fleet.is_highest else "one lower clock"
        saved_percent = 100 * (1 - predicted.power_w / fleet.power_w) if fleet.power_w else 0.0
        ui.say(
            f"the best fleet on up to {gpus} GPUs at {name}, {fleet.frequency_mhz} MHz: "
            f"{fleet.gpus} GPUs, {fleet.power_w:.6g} W; saved {saved_percent:.1f}%"
        )


def _percent_down(share: float) -> str:
    """A share in percent, rounded down: no more is promised than was seen."""
    return f"{math.floor(1e4 * share) / 100:.2f}"


def _group_cells(pool: Pool, group: Group) -> list[str]:
    """The row of a group of instances."""
    return [
        " + ".join(pool.classes),
        f"{pool.request_class} {group.role}" if group.role else pool.request_class,
        str(group.instances),
        f"TP{group.tp}",
        str(group.frequency_mhz),
        f"{group.load_tokens_s:.0f}",
        f"{group.power_w:.0f}",
        f"{group.ttft_s:.3f}",
        f"{group.tbt_s:.3f}",
        "-" if group.attainment is None else _percent_down(group.attainment),
    ]
