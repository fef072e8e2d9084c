"""`envplan serving apply`: the instances of a plan on nodes and GPUs."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Final

from envplan._io.words import counted
from envplan.cli import command as cmd
from envplan.cli import output as ui

if TYPE_CHECKING:
    from envplan.serving.apply import ServingApplied

_MOST_NAMED: Final = 8


@cmd.takes(
    """
    Most used:
      PLAN  The plan of `envplan serving solve`.
    Fleet:
      --gpus-per-node N  GPUs of a machine.
      --clocks MHZ[,MHZ...]  Clocks the GPUs have, as in 210-1410:15; default: those of the
          profile's GPU.
    Output:
      -o, --output FILE  Where the clocks go.
    """
)
def apply(
    plan: Path = Path("serving-plan.json"),
    profile: str | None = None,
    gpus_per_node: int = 8,
    clocks: str | None = None,
    force: bool = False,
    output: Path = Path("serving.clocks.json"),
) -> None:
    """Put a plan's instances on nodes and GPUs.

    Each has its parallelism and its clock. `envplan serving hold` holds these clocks on a node.

    \b
    Example:
      envplan serving apply serving-plan.json
      envplan serving apply --gpus-per-node 16 -o fleet.clocks.json
    """
    from envplan.enforce.clocks import given_clocks
    from envplan.serving.apply import apply_serving_plan
    from envplan.serving.plan import ServingPlan

    serving_plan = ServingPlan.load(plan)
    serving_profile = serving_plan.find_profile(profile)
    cmd.refuse_overwriting(serving_profile.path, serving_profile.sidecar)
    applied = apply_serving_plan(
        serving_plan,
        serving_profile,
        clocks=None if clocks is None else given_clocks(clocks),
        gpus_per_node=gpus_per_node,
        force=force,
        plan_sha256=sha256(plan.read_bytes()).hexdigest(),
    )
    applied.save(output)
    _warn_of_unproven(applied)
    ui.answer(
        lambda: {"clocks": str(output), **applied.model_dump(by_alias=True)},
        lambda: _print(applied),
        last="on each node K",
        then=["envplan", "serving", "hold", str(output), "--node", "0"],
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
