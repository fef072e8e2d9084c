"""`envplan serving apply`: the instances of a plan on nodes and GPUs."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from envplan._io.files import read_bounded
from envplan._io.words import counted
from envplan.cli import output as ui
from envplan.cli.invocation import invocation
from envplan.cli.serving.service import FLEET
from envplan.cli.shared import OUTPUT, Force, MovedProfile
from envplan.cli.types import InputFile, OutputFile, quantity
from envplan.enforce.freqplan import StageClocks
from envplan.enforce.supported_clocks import parse_clocks
from envplan.quantities import COUNT

if TYPE_CHECKING:
    from envplan.serving.apply import ServingApplied

_MOST_NAMED: Final = 8


def apply(
    plan: Annotated[
        Path,
        typer.Argument(metavar="PLAN", help="The plan of `envplan serving solve`."),
        InputFile(),
    ] = Path("serving-plan.json"),
    gpus_per_node: Annotated[
        int,
        typer.Option(
            rich_help_panel=FLEET, metavar="N", help="GPUs of a machine.", parser=quantity(COUNT)
        ),
    ] = 8,
    clocks: Annotated[
        StageClocks | None,
        typer.Option(
            rich_help_panel=FLEET,
            metavar="MHZ[,MHZ...]",
            help="Clocks the GPUs have, as in 210-1410:15; default: those of the profile's GPU.",
            show_default=False,
            parser=parse_clocks,
        ),
    ] = None,
    profile: MovedProfile = None,
    force: Force = False,
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            rich_help_panel=OUTPUT,
            metavar="FILE",
            help="Where the clocks go.",
            parser=OutputFile(),
        ),
    ] = Path("serving.clocks.json"),
) -> None:
    """Put a plan's instances on nodes and GPUs.

    Each has its parallelism and its clock. `envplan serving hold` holds these clocks on a node.

    \b
    Example:
      envplan serving apply serving-plan.json
      envplan serving apply --gpus-per-node 16 -o fleet.clocks.json
    """
    from envplan.serving.apply import apply_serving_plan
    from envplan.serving.plan import ServingPlan

    serving_plan = ServingPlan.load(plan)
    serving_profile = serving_plan.find_profile(profile)
    invocation().will_read(serving_profile.path, serving_profile.sidecar)
    applied = apply_serving_plan(
        serving_plan,
        serving_profile,
        clocks=clocks,
        gpus_per_node=gpus_per_node,
        force=force,
        plan_sha256=sha256(read_bounded(plan)).hexdigest(),
    )
    applied.save(output)
    _warn_of_unproven(applied)
    ui.answer(
        lambda: {"clocks": str(output), **applied.model_dump(by_alias=True)},
        lambda: _print(applied),
        closing="on each node K",
        next_command=["envplan", "serving", "hold", str(output), "--node", "0"],
    )


def _warn_of_unproven(applied: ServingApplied) -> None:
    unproven = [instance for instance in applied.instances if not instance.slo_proven]
    if not unproven:
        return
    numbers = ", ".join(str(instance.instance) for instance in unproven[:_MOST_NAMED])
    if len(unproven) > _MOST_NAMED:
        numbers += ", ..."
    ui.warn(
        f"at {unproven[0].clock_mhz} MHz, slower than planned, the profile does not prove the "
        f"SLO of instances {numbers} ({len(unproven)} of {len(applied.instances)}); "
        "measure that clock, then solve again"
    )


def _print(applied: ServingApplied) -> None:
    """The size of the fleet, and the clocks that GPUs lack."""
    instances = counted(len(applied.instances), "instance")
    gpus = counted(sum(instance.tp for instance in applied.instances), "GPU")
    ui.say(f"{instances} on {gpus} of {counted(applied.nodes, 'node')}")
    clocks = {(instance.planned_mhz, instance.clock_mhz) for instance in applied.instances}
    for planned_mhz, clock_mhz in sorted(clocks):
        if planned_mhz != clock_mhz:
            gpu = applied.gpu or "the GPU"
            ui.say(f"{planned_mhz} MHz becomes {clock_mhz} MHz, which {gpu} has")
