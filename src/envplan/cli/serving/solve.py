"""`envplan serving solve`: the fleet of least power for a load."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from envplan.cli import command as cmd
from envplan.cli import output as ui
from envplan.cli.serving.service import ServiceOptions, values_by_class
from envplan.errors import InputError
from envplan.quantities import NUMBER, TIME

if TYPE_CHECKING:
    from envplan.serving.plan import ServingPlan

_LOAD: Final = "CLASS=TOKENS/S, as in SS=2000,LL=500"
#: A certified gap up to this is due to rounding.
_OPTIMAL_GAP: Final = 1e-5


@cmd.takes(
    """
    Most used:
      --load CLASS=TOKENS/S[,...]  Tokens per second of each class, as in SS=2000,LL=500. May be
          repeated.
      --plot [FILE]  Draw the pools: .png, .svg or .pdf; without a name: serving-plan.png.
    Fleet:
      --gpus N  GPUs of the fleet.
      --planner NAME  exact or hierarchical.
      --no-merge  Every class in a pool of its own.
      --one-frequency  One clock for a pool's instances with the same TP.
      --time-limit TIME  For the exact planner; then the gap is stated. Default: 6s.
    Output:
      -o, --output FILE  Where the plan goes.
    """,
    planner=cmd.one_of("exact", "hierarchical"),
    time_limit=TIME.within(0.1),
)
def solve(
    service: ServiceOptions,
    load: list[str] | None = None,
    gpus: int = 1024,
    planner: str = "exact",
    no_merge: bool = False,
    one_frequency: bool = False,
    time_limit: float = 6.0,
    output: Path = Path("serving-plan.json"),
    plot: Path | None = None,
) -> None:
    """Find the fleet of least power that keeps its SLOs.

    \b
    Example:
      envplan serving solve --load SS=20000,MM=8000,LL=3000 --gpus 64
      envplan serving solve --load LL=9000 --planner hierarchical --plot
    """
    from envplan.plotting.serving import plan_figure
    from envplan.serving.planners import exact_plan, hierarchical_plan

    loads = _loads(load or [])
    if planner == "hierarchical" and one_frequency:
        raise InputError("--one-frequency goes with planner exact, not hierarchical")
    with ui.Working("looking for the least power"):
        if planner == "hierarchical":
            plan = hierarchical_plan(service.known, loads, gpus, merge=not no_merge)
        else:
            plan = exact_plan(
                service.known,
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
        then=["envplan", "serving", "apply", str(output)],
    )


def _loads(texts: Sequence[str]) -> dict[str, float]:
    """Tokens per second, by class."""
    loads: dict[str, float] = {}
    parts = [part for text in texts for part in text.split(",")]
    for name, value in values_by_class(parts, f"--load must be {_LOAD}"):
        if name in loads:
            raise InputError(f"--load gives {name} twice")
        loads[name] = NUMBER.parse(value, f"--load {name}")
    if not loads:
        raise InputError(f"which load? Give --load {_LOAD}")
    return loads


def _print(plan: ServingPlan) -> None:
    """A row for each group of instances; then what the fleet draws and saves."""
    headers = ("classes", "pool", "instances", "on", "MHz", "tokens/s", "W", "TTFT (s)", "TBT (s)")
    rows = [
        (
            " + ".join(pool.classes),
            pool.request_class,
            str(group.instances),
            f"TP{group.tp}",
            str(group.frequency_mhz),
            f"{group.load_tokens_s:.0f}",
            f"{group.power_w:.0f}",
            f"{group.ttft_s:.3f}",
            f"{group.tbt_s:.3f}",
        )
        for pool in plan.pools
        for group in pool.groups
    ]
    title = ui.titled(f"{plan.planner} plan, figures per instance", plan.profile.source)
    ui.print_table(title, headers, rows, words=2)
    predicted = plan.predicted
    ui.say(f"{predicted.gpus} of {plan.asked.gpus} GPUs, {predicted.power_w:.6g} W in all")
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
