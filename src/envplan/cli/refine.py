"""`envplan refine`: a plan made anew from what a run measured."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import envplan
from envplan._io.documents import MAX_DOCUMENT_BYTES
from envplan._io.files import read_bounded
from envplan._io.words import significant
from envplan.cli import output as ui
from envplan.cli.job_options import PlanOptions
from envplan.cli.progress import progress
from envplan.cli.shared import MOST_USED, MovedProfile
from envplan.cli.tables import change_column, text_column, value_column
from envplan.cli.types import InputFile, OutputFile
from envplan.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from envplan.runtime.drift import Drift


def refine(
    plan: Annotated[
        Path, typer.Argument(metavar="PLAN", help="The plan.json that was followed."), InputFile()
    ],
    logs: Annotated[
        list[Path],
        typer.Argument(metavar="LOG...", help="Run logs that the shim wrote."),
        InputFile(),
    ],
    profile: MovedProfile = None,
    profile_output: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            parser=OutputFile(".csv"),
            help="Where the new profile goes: .csv.",
            rich_help_panel=MOST_USED,
        ),
    ] = Path("profile.refined.csv"),
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            parser=OutputFile(),
            help="Where the new plan goes.",
            rich_help_panel=MOST_USED,
        ),
    ] = Path("plan.refined.json"),
) -> None:
    """Scale the profile to the times a run measured, and make the plan anew for the same target.

    Every instruction of every stage gets one factor, the median of measured over planned time;
    energies are scaled likewise. The first iteration of each rank does not count.

    \b
    Example:
      envplan refine plan.json run.jsonl
      envplan apply plan.refined.json
    """
    from hashlib import sha256

    from envplan.plan import check_reference
    from envplan.runtime.drift import measure_drift, replan, rescale
    from envplan.runtime.run_log_reader import (
        iteration_counts_of_plan,
        iterations_of_plan,
        read_run_log,
    )

    old, old_profile = PlanOptions(plan=plan, profile=profile).load()
    check_reference(old.profile, old_profile, force=False)
    digest = sha256(read_bounded(plan, MAX_DOCUMENT_BYTES)).hexdigest()
    lines = list(read_run_log(logs))
    iterations = list(iterations_of_plan(lines, digest))
    counts = iteration_counts_of_plan(lines, digest)
    if not iterations:
        raise InputError(f"has no measured iteration of a run under {plan}", path=logs[0])
    drifts = measure_drift(old, old_profile, iterations)
    with progress("Tracing the frontier") as work:
        # Read back, so that the new plan refers to the file that it can be checked against.
        rescale(old_profile, drifts).save_csv(profile_output)
        new = replan(old, envplan.Profile.open(str(profile_output)), work.frontier_step)
    new.save(output)
    unmeasured = sorted(set(range(old_profile.num_stages)) - {drift.stage for drift in drifts})
    ui.answer(
        lambda: {
            "profile": str(profile_output),
            "plan": str(output),
            "drift": [asdict(drift) for drift in drifts],
            "unmeasured_stages": unmeasured,
            "iterations": counts,
            "before": _figures(old),
            "after": _figures(new),
        },
        lambda: _print(old, new, drifts, unmeasured, counts),
        next_command=["envplan", "apply", str(output)],
    )


def _figures(plan: envplan.Plan) -> dict[str, float]:
    return {"iteration_time_s": plan.iteration_time, "energy_j": plan.energy}


def _print(
    old: envplan.Plan,
    new: envplan.Plan,
    drifts: Sequence[Drift],
    unmeasured: Sequence[int],
    iterations: Mapping[str, int],
) -> None:
    from envplan.runtime.plan_follower import outcomes_in_words

    columns = [
        text_column("instruction", [drift.instruction for drift in drifts]),
        value_column("stage", [drift.stage for drift in drifts]),
        value_column("operations", [drift.samples for drift in drifts]),
        change_column("change (%)", [100 * (drift.factor - 1) for drift in drifts]),
    ]
    ui.show_table("Measured against planned time", columns)
    if outcomes := outcomes_in_words(iterations):
        ui.say(outcomes)
    if unmeasured:
        stages, whose = ("stages", "their") if len(unmeasured) > 1 else ("stage", "its")
        ui.say(
            f"nothing measured of {stages} {', '.join(map(str, unmeasured))}: {whose} times stay "
            "as planned; give the run logs of all ranks"
        )
    for name, plan in (("old plan", old), ("new plan", new)):
        time, energy = significant(plan.iteration_time), significant(plan.energy)
        ui.say(f"{name}: {time} s, {energy} J, as its own profile has it")
