"""`envplan serving apply`: the instances of a plan on nodes and GPUs."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from envplan._io.files import atomic_write, read_bounded
from envplan._io.words import counted
from envplan.cli import output as ui
from envplan.cli.invocation import invocation
from envplan.cli.serving.service import FLEET
from envplan.cli.shared import OUTPUT, Force, MovedProfile
from envplan.cli.tables import table_columns
from envplan.cli.types import InputFile, OutputFile, either, one_of, parser_of, quantity
from envplan.enforce.freqplan import StageClocks
from envplan.enforce.supported_clocks import parse_clocks
from envplan.errors import InputError
from envplan.quantities import COUNT

if TYPE_CHECKING:
    from envplan.serving.apply import ServingApplied
    from envplan.serving.orchestrators import Deployment

#: A warning names so many instances at most.
_MOST_NAMED: Final = 8
#: The format for `serving hold`.
_CLOCKS: Final = "clocks"
#: This and ORCHESTRATORS, of which `--help` is to know without importing the planners.
_FORMATS: Final = (_CLOCKS, "dynamo", "production-stack", "keda", "hpa")
#: A panel of `--help`.
_ORCHESTRATOR: Final = "Orchestrator"


def _parse_name(text: str, option: str) -> str:
    """A name that Kubernetes takes, and that leaves room for those of deployments behind it."""
    if re.fullmatch("[a-z]([-a-z0-9]{0,20}[a-z0-9])?", text) is None:
        raise InputError(
            f"{option} must be at most 22 small letters, digits and dashes, as in my-fleet, not "
            f"{text!r}"
        )
    return text


def _parse_image(text: str, option: str) -> str:
    """An image and its tag."""
    if re.fullmatch(r"[^\s:]+(:[0-9]+/[^\s:]+)?:[\w.-]+", text) is None:
        raise InputError(f"{option} must be as in vllm/vllm-openai:latest, not {text!r}")
    return text


def apply(
    plan: Annotated[
        Path,
        typer.Argument(metavar="PLAN", help="The plan of `envplan serving solve`."),
        InputFile(),
    ] = Path("serving-plan.json"),
    *,
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
    format: Annotated[  # noqa: A002  (the option's name)
        str,
        typer.Option(
            rich_help_panel=OUTPUT,
            metavar="NAME",
            help=f"{either(_FORMATS)}: clocks for `serving hold`, a DynamoGraphDeployment of "
            "NVIDIA Dynamo, values for the Helm chart of vLLM's production stack, or for its "
            "deployments ScaledObjects of KEDA or autoscalers of Kubernetes itself.",
            parser=one_of(*_FORMATS),
        ),
    ] = _CLOCKS,
    name: Annotated[
        str,
        typer.Option(
            rich_help_panel=_ORCHESTRATOR,
            metavar="NAME",
            help="Of Dynamo's graph, or of the Helm release.",
            parser=parser_of(_parse_name),
        ),
    ] = "vllm",
    model: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_ORCHESTRATOR,
            metavar="NAME",
            help="What vLLM loads, as in org/name; for dynamo and production-stack.",
            show_default=False,
        ),
    ] = None,
    image: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_ORCHESTRATOR,
            metavar="REPOSITORY:TAG",
            help="What pods run; default: vLLM of Dynamo 1.4.0, or vllm/vllm-openai:latest for "
            "production-stack.",
            show_default=False,
            parser=parser_of(_parse_image),
        ),
    ] = None,
    prometheus: Annotated[
        str,
        typer.Option(
            rich_help_panel=_ORCHESTRATOR,
            metavar="URL",
            help="Where KEDA asks for vLLM's metrics.",
        ),
    ] = "http://prometheus-operated.monitoring.svc:9090",
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            rich_help_panel=OUTPUT,
            metavar="FILE",
            help="Where it goes; default: serving.clocks.json, or by the format's name.",
            show_default=False,
            parser=OutputFile(),
        ),
    ] = None,
) -> None:
    """Put a plan's instances on nodes and GPUs.

    Each has its parallelism and its clock. `envplan serving hold` holds these clocks on a node.

    \b
    Example:
      envplan serving apply serving-plan.json
      envplan serving apply --gpus-per-node 16 -o fleet.clocks.json
      envplan serving apply --format dynamo --model org/name
      envplan serving apply --format keda --name my-release
    """
    from envplan.serving.apply import apply_serving_plan
    from envplan.serving.orchestrators import ORCHESTRATORS, FleetOrder, deployments_of
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
    _warn_of_unproven(applied)
    if format == _CLOCKS:
        _answer_with_clocks(applied, output)
        return
    orchestrator = ORCHESTRATORS[format]
    order = FleetOrder(
        name=name,
        model=model,
        image=image or orchestrator.default_image,
        prometheus=prometheus,
        plan_sha256=applied.plan_sha256,
        deployments=deployments_of(serving_plan, serving_profile, applied),
    )
    text = orchestrator.text(order)
    file = _file_of(output, orchestrator.default_output)
    atomic_write(file, text)
    ui.answer(
        lambda: {"file": str(file), "format": format, "document": json.loads(text)},
        lambda: _print_deployments(order.deployments),
        next_command=[*orchestrator.command(order), str(file)],
    )


def _answer_with_clocks(applied: ServingApplied, output: Path | None) -> None:
    """Write the file of clocks, and say so."""
    file = _file_of(output, Path("serving.clocks.json"))
    applied.save(file)
    ui.answer(
        lambda: {"clocks": str(file), **applied.model_dump(by_alias=True)},
        lambda: _print_clocks(applied),
        closing="on each node K",
        next_command=["envplan", "serving", "hold", str(file), "--node", "0"],
    )


def _file_of(output: Path | None, default: Path) -> Path:
    """The file that is written: that of --output, or else the default one."""
    if output is not None:
        return output
    invocation().will_write(default)
    return default


def _print_deployments(deployments: Sequence[Deployment]) -> None:
    """Print a row for each deployment."""
    headers = ("deployment", "classes", "replicas", "GPUs each", "MHz", "W a GPU at most")
    rows = [
        [
            deployment.name,
            " + ".join(deployment.classes),
            str(deployment.replicas),
            str(deployment.tp),
            str(deployment.clock_mhz),
            str(deployment.power_limit_w),
        ]
        for deployment in deployments
    ]
    ui.show_table("", table_columns(headers, rows, num_texts=2))


def _warn_of_unproven(applied: ServingApplied) -> None:
    """Warn of instances whose clock is too low for the profile to prove their SLO.

    They all have the GPU's highest clock: only that is ever set for a planned clock above it.
    """
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


def _print_clocks(applied: ServingApplied) -> None:
    """Print the size of the fleet, and what is set for clocks of the plan that GPUs lack."""
    instances = counted(len(applied.instances), "instance")
    gpus = counted(sum(instance.tp for instance in applied.instances), "GPU")
    ui.say(f"{instances} on {gpus} of {counted(applied.nodes, 'node')}")
    clocks = {(instance.planned_mhz, instance.clock_mhz) for instance in applied.instances}
    for planned_mhz, clock_mhz in sorted(clocks):
        if planned_mhz != clock_mhz:
            gpu = applied.gpu or "the GPU"
            ui.say(f"{planned_mhz} MHz becomes {clock_mhz} MHz, which {gpu} has")
