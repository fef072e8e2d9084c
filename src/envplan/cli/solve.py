"""`envplan solve`: one plan for one target."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from envplan.cli.command import MOST, option
from envplan.cli.conditions import (
    Clocks,
    cheapest_plan,
    check_conditions,
    condition_notes,
    robust_plan,
    slowness,
)
from envplan.cli.costs import cost_notes, cost_rows, costs_document, print_costs
from envplan.cli.inputs import check_outputs, refuse_overwriting
from envplan.cli.options import (
    ClockOptions,
    JobOptions,
    OutputOptions,
    PlannerOptions,
    RunOptions,
    TargetOptions,
)
from envplan.cli.replicas import REPLICA_PROFILE, ReplicaProfileOption, solve_replicas
from envplan.errors import InputError

if TYPE_CHECKING:
    from envplan.frontier import Frontier
    from envplan.plan import Plan
    from envplan.planners import EnvPipeRun

_STRAGGLER = "--straggler-time"
_PEAK = "--peak-power-cap"
_BUDGETS = ("--energy-budget", "--power-cap")


def solve(
    job: JobOptions,
    target: TargetOptions,
    how: PlannerOptions,
    clocks: ClockOptions,
    costs: RunOptions,
    show: OutputOptions,
    replica_profile: ReplicaProfileOption = None,
    output: Annotated[Path, option("-o, --output FILE", MOST, "Where the plan goes.")] = Path(
        "plan.json"
    ),
) -> None:
    """Choose a frequency for every operation and write the plan.

    Without a target: no slowdown, the least energy at T_min.

    \b
    Example:
      envplan solve --target-time 14.2
      envplan solve a40-gpt3-1.3b-4stage --microbatches 32 --slowdown 1 -o plan.json
      envplan solve a40-gpt3-1.3b-4stage --planner envpipe --explain
      envplan solve --price 0.25 --iterations 100000 --deadline 21d
      envplan solve --slowdown 2 --switch-latency 20 --min-dwell 100 --ladder 16
      envplan solve --slowdown 3 --robust 95 --noise 2
    """
    if how.planner == "envpipe" and not job.dag and job.vp in (None, 1):
        job = replace(job, schedule=job.schedule or "envpipe")
    check_outputs(output, inputs=[("the DAG file", job.dag), *costs.files])
    targets: dict[str, float | None] = {
        "--target-time": target.target_time,
        "--slowdown": target.slowdown,
        "--min-energy": 0.0 if target.min_energy else None,
        "--energy-budget": target.energy_budget,
        "--power-cap": target.power_cap,
        "--deadline": costs.deadline,
    }
    straggler_time, peak_power_cap = target.straggler_time, target.peak_power_cap
    polish, ladder, planner, robust = how.polish, how.ladder, how.planner, clocks.robust
    goal, value = _only_target(targets, straggler_time)
    check_conditions(
        clocks,
        planner,
        {
            _STRAGGLER: straggler_time is not None and robust is not None,
            "--polish": polish > 0,
            "--ladder": ladder > 0 and robust is not None,
            **{name: value is not None for name, value in targets.items() if name in _BUDGETS},
            "--min-energy": target.min_energy and robust is not None,
            _PEAK: peak_power_cap is not None,
        },
    )
    if replica_profile:
        _refuse_with_replicas(
            {
                _STRAGGLER: straggler_time is not None,
                _PEAK: peak_power_cap is not None,
                "--polish": polish > 0,
                "--ladder": ladder > 0,
                f"--planner {planner}": planner != "frontier",
                "--switch-latency": clocks.switch_latency is not None,
                "--min-dwell": clocks.min_dwell is not None,
                "--robust": robust is not None,
                "--price, --carbon, --iterations or --tokens": costs.given,
            }
        )
        solve_replicas(job, replica_profile, goal, value, output, show)
        return
    from envplan.cli.output import progress_bar, spinner
    from envplan.cli.planning import chosen_planner, plan_of, print_run

    if peak_power_cap is not None:
        _refuse_with_peak(goal, planner, polish, straggler_time)

    chosen = chosen_planner(
        planner, reconfigure=how.reconfigure, explain=how.explain, target=goal, polish=polish
    )
    run: EnvPipeRun | None = None
    frontier = job.trace(quiet=show.quiet)
    refuse_overwriting(frontier.profile, output)
    spent = costs.run(frontier) if costs.given else None
    doing = _doing(polish, straggler_time, costs.deadline, clocks)
    with spinner(doing or "", quiet=show.quiet or doing is None):
        if spent is not None and costs.deadline is not None:
            plan = cheapest_plan(clocks, frontier, spent, polish)
        elif robust is not None:
            plan = robust_plan(clocks, frontier, goal, value, quiet=show.quiet)
        elif peak_power_cap is not None:
            plan = _solve_under_peak(frontier, peak_power_cap, goal, value, quiet=show.quiet)
        elif planner == "frontier":
            known = slowness(clocks)
            plan = _solve(frontier, goal, value, straggler_time, polish, known, quiet=show.quiet)
        else:
            plan, run = plan_of(chosen, frontier, goal, value, straggler_time)
    if ladder > 0:
        with progress_bar("building the ladder", quiet=show.quiet) as progress:
            rungs = frontier.ladder(
                ladder, peak_power_cap=peak_power_cap, progress=progress, **slowness(clocks)
            )
        plan = plan.with_ladder(rungs)
    if spent is not None:
        plan = spent.reckon(plan)
    plan.save(output)
    if not how.explain:
        run = None
    if show.json:
        _print_json(frontier, plan, output, run)
    elif not show.quiet:
        if run is not None:
            print_run(run, frontier.pipeline)
        _print(frontier, plan, output)


def _only_target(
    targets: dict[str, float | None], straggler_time: float | None
) -> tuple[str | None, float]:
    """The one target given and its number; (None, 0) without any.

    Raises:
        InputError: two exclude each other.
    """
    given = [option for option, value in targets.items() if value is not None]
    timeless = ("--min-energy", "--energy-budget", "--power-cap", "--deadline")
    if straggler_time is not None:
        given += [_STRAGGLER] if set(given) & set(timeless) else []
    if len(given) > 1:
        raise InputError(f"{given[0]} and {given[1]} exclude each other; give one of them")
    if not given:
        return None, 0.0
    return given[0], targets[given[0]] or 0.0


def _solve(
    frontier: Frontier,
    option: str | None,
    value: float,
    straggler_time: float | None,
    polish: float,
    clocks: Clocks,
    *,
    quiet: bool,
) -> Plan:
    from envplan.cli.output import spinner

    match option:
        case "--min-energy":
            return frontier.min_energy_plan(polish=polish, **clocks)
        case "--energy-budget":
            return frontier.plan_for_energy_budget(value, polish=polish)
        case "--power-cap":
            with spinner("looking for the fastest plan under the cap", quiet=quiet or polish > 0):
                return frontier.plan_for_power_cap(value, polish=polish)
    target_time = value if option == "--target-time" else None
    slowdown = value / 100 if option == "--slowdown" else None
    if straggler_time is None:
        return frontier.plan(target_time, slowdown=slowdown, polish=polish, **clocks)
    asked = {"--target-time": value, "--slowdown": frontier.min_time * (1 + value / 100)}
    deadline = asked.get(option or "", frontier.min_time)
    plan = None
    if straggler_time > deadline >= frontier.min_time:
        plan = _plan_for_straggler(frontier, straggler_time, polish, clocks)
    if plan is None:
        plan = frontier.plan(target_time, slowdown=slowdown, polish=polish, **clocks)
    return frontier.with_straggler(plan, straggler_time)


def _plan_for_straggler(
    frontier: Frontier, straggler_time: float, polish: float, clocks: Clocks
) -> Plan | None:
    """The plan of least energy until then; None where clocks are too slow to be in time."""
    from envplan.frontier.switching import NoPlanInTimeError

    beyond = straggler_time > frontier.min_energy_time
    make = frontier.plan_for_sync if beyond else frontier.plan
    try:
        return make(straggler_time, polish=polish, **clocks)
    except NoPlanInTimeError:
        return None


def _doing(
    polish: float,
    straggler_time: float | None,
    deadline: float | None,
    clocks: ClockOptions,
) -> str | None:
    """What takes long about making the plan, if it is something that has no progress bar."""
    if clocks.robust is not None:
        return "replaying runs with noise" if deadline is not None else None
    if polish > 0:
        return f"polishing for {polish:g} s"
    if straggler_time is not None:
        return "planning for the straggler"
    slow = any(slowness(clocks).values())
    return "choosing clocks that can follow" if slow else None


def _refuse_with_replicas(others: dict[str, bool]) -> None:
    """Raises: InputError: an option that was given does not go with replicas of several kinds."""
    for name, given in others.items():
        if given:
            raise InputError(f"{REPLICA_PROFILE} and {name} exclude each other")


def _refuse_with_peak(
    target: str | None, planner: str, polish: float, straggler_time: float | None
) -> None:
    """Raises: InputError: an option does not go with a cap on the peak power."""
    others = {
        target or "": target not in (None, "--target-time", "--slowdown", "--min-energy"),
        f"--planner {planner}": planner != "frontier",
        "--polish": polish > 0,
        _STRAGGLER: straggler_time is not None,
    }
    for name, given in others.items():
        if given:
            instead = (
                ": give --target-time S instead, the deadline over the iterations"
                if name == "--deadline"
                else ""
            )
            raise InputError(f"{_PEAK} and {name} exclude each other{instead}")


def _solve_under_peak(
    frontier: Frontier, watts: float, option: str | None, value: float, *, quiet: bool
) -> Plan:
    from envplan.cli.output import progress_bar

    with progress_bar("Planning under the cap", quiet=quiet) as progress:
        return frontier.plan_for_peak_power_cap(
            watts,
            target_time=value if option == "--target-time" else None,
            slowdown=value / 100 if option == "--slowdown" else None,
            min_energy=option == "--min-energy",
            progress=progress,
        )


def _notes(frontier: Frontier, plan: Plan) -> list[str]:
    """What a user should know about how the target was met."""
    from envplan.cli.output import describe_configs, exact_seconds, significant

    notes = describe_configs(plan)
    target, star = plan.target, frontier.min_energy_time
    asked = target.time_s if target.kind == "time" and target.peak_power_w is None else None
    if asked is not None and asked > star:
        notes.append(
            f"{exact_seconds(asked)} s is beyond T_star, {exact_seconds(star)} s: going "
            "slower than that would cost energy as well as time, so this is the T_star plan"
        )
    if target.kind == "power-cap" and target.deadline_s > star:
        notes.append(
            f"this is slower than T_star, {exact_seconds(star)} s, where energy is least: faster "
            "plans found draw more than the cap"
        )
    if target.peak_power_w is not None:
        from envplan.simulation import simulate

        peak = simulate(plan, frontier.profile).peak_power
        notes.append(
            f"at its peak it draws {significant(peak, 6)} W, of {target.peak_power_w:g} W allowed; "
            "the gap is to a lower bound without that cap"
        )
    straggler = target.straggler_time_s
    if straggler is not None and straggler <= plan.iteration_time:
        notes.append("the straggler is not slower than this plan, so it leaves no time to use")
    elif straggler is not None:
        notes.append(
            f"waiting for the straggler until {exact_seconds(straggler)} s takes another "
            f"{significant(plan.waiting_energy(straggler), 5)} J"
        )
        if plan.iteration_time > star:
            notes.append(
                f"without the straggler, T_star's plan of {exact_seconds(star)} s would use less; "
                "while everyone waits anyway, slower clocks do"
            )
    return [*notes, *condition_notes(frontier, plan), *cost_notes(plan)]


def _print(frontier: Frontier, plan: Plan, output: Path) -> None:
    from envplan.cli.output import describe_job, exact_seconds, print_table, say

    say(describe_job(frontier))
    modelled = ", modelled" if plan.profile.source == "modelled" else ""
    print_table(
        f"One iteration, all GPUs{modelled}",
        ("", "max frequency", "plan", "change (%)"),
        _rows(plan),
    )
    print_costs(plan)
    for note in _notes(frontier, plan):
        say(note)
    say(
        f"T_min {exact_seconds(frontier.min_time)} s, "
        f"T_star {exact_seconds(frontier.min_energy_time)} s"
    )
    if plan.ladder is not None:
        say(f"{len(plan.ladder)} slower plans in the ladder for stragglers")
    say(f"wrote {output}")


def _rows(plan: Plan) -> list[list[str]]:
    from envplan.cli.output import column, signed_percent

    before, after = plan.predicted.baseline, plan.predicted
    rows = []
    for name, digits, old, new in (
        ("iteration time (s)", 6, before.iteration_time_s, after.iteration_time_s),
        ("energy (J)", 5, before.energy_j, after.energy_j),
        *_straggler_row(plan),
        ("average power (W)", 4, before.average_power_w, after.average_power_w),
        *cost_rows(plan),
    ):
        change = signed_percent(100 * (new / old - 1)) if old > 0 else "-"
        rows.append([name, *column([old, new], digits), change])
    until = after.until_straggler
    if until is not None:
        return [*rows, ["certified gap with waiting (%)", "", f"{100 * until.gap:.3f}", ""]]
    return [*rows, ["certified gap (%)", "", f"{100 * after.gap:.3f}", ""]]


def _straggler_row(plan: Plan) -> list[tuple[str, int, float, float]]:
    """Energy until the straggler ends, before and after, where there is one to wait for."""
    until = plan.predicted.until_straggler
    if until is None:
        return []
    return [("energy with waiting (J)", 5, until.baseline_energy_j, until.energy_j)]


def _print_json(frontier: Frontier, plan: Plan, output: Path, run: EnvPipeRun | None) -> None:
    from envplan.cli.output import print_json
    from envplan.cli.planning import run_document

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
        "notes": _notes(frontier, plan),
        **head,
    }
    if run is not None:
        summary["envpipe"] = run_document(run, frontier.pipeline)
    print_json(summary)
