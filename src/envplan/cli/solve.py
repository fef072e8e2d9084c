"""`envplan solve`: one plan for one request."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envplan.cli.asking import check_targets, chosen_planner, request_of
from envplan.cli.command import takes
from envplan.cli.costs import cost_rows, costs_document, print_costs, year_of
from envplan.cli.inputs import check_outputs, refuse_overwriting
from envplan.cli.options import (
    ClockOptions,
    JobOptions,
    OutputOptions,
    PlannerOptions,
    RunOptions,
    TargetOptions,
)
from envplan.cli.replicas import solve_replicas
from envplan.errors import InputError

if TYPE_CHECKING:
    from envplan.plan import Plan
    from envplan.planners import EnvPipeRun
    from envplan.solve import Frontier


@takes(
    """
    Most used:
      -o, --output FILE  Where the plan goes.
    Job:
      --replica-profile PROFILE[:COUNT]  Further replicas run on other hardware: COUNT of them (1)
          by this profile. May be given more than once; each kind gets a plan of its own, and all
          end together.
    """,
)
def solve(
    job: JobOptions,
    target: TargetOptions,
    how: PlannerOptions,
    clocks: ClockOptions,
    costs: RunOptions,
    show: OutputOptions,
    replica_profile: list[str] | None = None,
    output: Path = Path("plan.json"),
) -> None:
    """Choose a frequency for every operation and write the plan.

    Without a target: no slowdown, the least energy at T_min. Targets and limits combine.

    \b
    Example:
      envplan solve --target-time 14.2
      envplan solve a40-gpt3-1.3b-4stage --microbatches 32 --slowdown 1 -o plan.json
      envplan solve a40-gpt3-1.3b-4stage --planner envpipe --explain
      envplan solve --clocks freqs_pipeline_00030.py
      envplan solve --price 0.25 --iterations 100000 --deadline 21d
      envplan solve --slowdown 2 --switch-latency 20 --min-dwell 100 --ladder 16
      envplan solve --slowdown 3 --robust 95 --noise 2 --peak-power-cap 2000
    """
    if how.planner == "envpipe" and not job.dag and job.vp in (None, 1):
        job = replace(job, schedule=job.schedule or "envpipe")
    check_outputs(
        output,
        inputs=[("the DAG file", job.dag), ("the file of clocks", how.clocks), *costs.files],
    )
    check_targets(target, costs)
    other = chosen_planner(target, how, clocks, costs)
    if replica_profile:
        if how.clocks is not None:
            raise InputError(
                "--clocks says the clocks of one kind of replica: make a plan for each, and give "
                "them to envplan simulate PLAN --replica PLAN"
            )
        solve_replicas(job, replica_profile, (target, how, clocks, costs), output, show, other)
        return
    from envplan.cli.output import answer, progress_bar
    from envplan.cli.planning import plan_of, plan_of_clocks, print_run

    frontier = job.trace(quiet=show.quiet, whole=False)
    refuse_overwriting(frontier.profile, output)
    request = request_of(frontier, target, how, clocks, costs)
    run: EnvPipeRun | None = None
    with progress_bar("Planning", quiet=show.quiet) as progress:
        if how.clocks is not None:
            plan = plan_of_clocks(frontier, how.clocks)
        elif other is None:
            plan = frontier.solve(request, progress=progress)
        else:
            plan, run = plan_of(other, frontier, request)
    plan.save(output)

    def tell() -> None:
        if run is not None and how.explain:
            print_run(run, frontier.pipeline)
        _print(frontier, plan)

    answer(
        show,
        lambda: _document(frontier, plan, output, run if how.explain else None),
        tell,
        written=[output],
        last=year_of(plan, costs),
        then=["envplan", "report", str(output)],
    )


def _print(frontier: Frontier, plan: Plan) -> None:
    from envplan.cli.output import ITERATION, describe_ends, describe_job, print_table, say, titled
    from envplan.cli.plan_notes import plan_notes

    say(describe_job(frontier))
    print_table(
        titled(ITERATION, plan.profile.source),
        ("", "max frequency", "plan", "change (%)"),
        _rows(plan),
    )
    print_costs(plan)
    for note in plan_notes(frontier, plan):
        say(note)
    say(describe_ends(frontier))
    if plan.ladder is not None:
        say(f"{len(plan.ladder)} slower plans in the ladder for stragglers")


def _rows(plan: Plan) -> list[list[str]]:
    from envplan.cli.output import changes

    before, after = plan.predicted.baseline, plan.predicted
    rows = [
        ("iteration time (s)", before.iteration_time_s, after.iteration_time_s),
        ("energy (J)", before.energy_j, after.energy_j),
    ]
    gap, until = ("certified gap (%)", after.gap), after.until_straggler
    if until is not None:
        rows.append(("energy with waiting (J)", until.baseline_energy_j, until.energy_j))
        gap = ("certified gap with waiting (%)", until.gap)
    rows.append(("average power (W)", before.average_power_w, after.average_power_w))
    return [*changes([*rows, *cost_rows(plan)]), [gap[0], "", f"{100 * gap[1]:.3f}", ""]]


def _document(
    frontier: Frontier, plan: Plan, output: Path, run: EnvPipeRun | None
) -> dict[str, Any]:
    from envplan.cli.plan_notes import plan_notes

    head = plan.model_dump(
        by_alias=True, exclude_none=True, exclude={"stages", "schema_id", "ladder"}
    )
    head["job"].pop("dag", None)
    if plan.costs is not None:
        head["costs"] = costs_document(plan)
    summary: dict[str, Any] = {
        "plan": str(output),
        "t_min_s": frontier.min_time,
        "t_star_s": frontier.min_energy_time,
        "notes": plan_notes(frontier, plan),
        **head,
    }
    return summary if run is None else {**summary, "envpipe": run.to_dict(frontier.pipeline)}
