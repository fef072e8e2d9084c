"""`envplan refine`: a plan made anew from what a run measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from envplan.cli.command import argument, file_of, takes
from envplan.cli.inputs import check_outputs, refuse_overwriting
from envplan.cli.options import OutputOptions
from envplan.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from envplan.plan import Plan
    from envplan.runtime.drift import Drift


@takes(
    """
    Most used:
      --profile-output FILE  Where the new profile goes.
      -o, --output FILE  Where the new plan goes.
    """,
    profile_output=file_of((".csv",), "a profile is a CSV file"),
)
def refine(
    show: OutputOptions,
    plan: Path = argument("PLAN", "The plan.json that was followed."),
    logs: list[Path] = argument("LOG...", "Run logs that the shim wrote."),
    profile: str | None = None,
    profile_output: Path = Path("profile.refined.csv"),
    output: Path = Path("plan.refined.json"),
) -> None:
    """Scale the profile to the times a run measured, and make the plan anew for the same target.

    Every instruction of every stage gets one factor, the median of measured over planned time;
    energies are scaled likewise. The first step of each rank does not count.

    \b
    Example:
      envplan refine plan.json run.jsonl
      envplan apply plan.refined.json
    """
    from dataclasses import asdict
    from hashlib import sha256

    from envplan.cli.output import answer, progress_bar
    from envplan.plan import Plan, as_referenced, check_reference, find_profile
    from envplan.profile import Profile
    from envplan.runtime.drift import measure_drift, replan, rescale
    from envplan.runtime.runlog import read_run_log, steps_of_plan

    read = [("the plan", plan), *(("a run log", log) for log in logs)]
    check_outputs(output, profile_output, inputs=read)
    old = Plan.load(plan)
    known = find_profile(old.profile, plan) if profile is None else Profile.open(profile)
    check_reference(old.profile, known, force=False)
    known = as_referenced(old.profile, known)
    refuse_overwriting(known, output, profile_output)
    steps = list(steps_of_plan(read_run_log(logs), sha256(plan.read_bytes()).hexdigest()))
    if not steps:
        raise InputError(f"has no measured step of a run under {plan}", path=logs[0])
    drifts = measure_drift(old, known, steps)
    with progress_bar("Tracing the frontier", quiet=show.quiet) as progress:
        # Read back, so that the new plan refers to the file that it can be checked against.
        rescale(known, drifts).save_csv(profile_output)
        new = replan(old, Profile.open(str(profile_output)), progress)
    new.save(output)
    unmeasured = sorted(set(range(known.num_stages)) - {drift.stage for drift in drifts})
    answer(
        show,
        lambda: {
            "profile": str(profile_output),
            "plan": str(output),
            "drift": [asdict(drift) for drift in drifts],
            "unmeasured_stages": unmeasured,
            "before": {"iteration_time_s": old.iteration_time, "energy_j": old.energy},
            "after": {"iteration_time_s": new.iteration_time, "energy_j": new.energy},
        },
        lambda: _print(old, new, drifts, unmeasured),
        written=[profile_output, output],
        then=["envplan", "apply", str(output)],
    )


def _print(old: Plan, new: Plan, drifts: Sequence[Drift], unmeasured: Sequence[int]) -> None:
    from envplan.cli.output import print_table, say, signed_percent, significant

    print_table(
        "Measured against planned time",
        ("instruction", "stage", "operations", "change (%)"),
        [
            [d.instruction, str(d.stage), str(d.samples), signed_percent(100 * (d.factor - 1))]
            for d in drifts
        ],
    )
    if unmeasured:
        stages, whose = ("stages", "their") if len(unmeasured) > 1 else ("stage", "its")
        say(
            f"nothing measured of {stages} {', '.join(map(str, unmeasured))}: {whose} times stay "
            "as planned; give the run logs of all ranks"
        )
    for name, plan in (("old plan", old), ("new plan", new)):
        time, energy = significant(plan.iteration_time), significant(plan.energy)
        say(f"{name}: {time} s, {energy} J, as its own profile has it")
