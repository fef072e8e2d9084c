"""Plans of planners other than our own, for `envplan solve --planner NAME`."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

from envplan.errors import InputError

if TYPE_CHECKING:
    from envplan.frontier import Frontier
    from envplan.pipeline import Pipeline
    from envplan.plan import Plan
    from envplan.planners import EnvPipeRun, Planner

_TIMELY = ("--target-time", "--slowdown")


def chosen_planner(
    name: str, *, reconfigure: str | None, explain: bool, target: str | None, polish: float
) -> Planner:
    """The planner that the options ask for.

    Args:
        target: the option that gave a target, if any did.

    Raises:
        InputError: there is no such planner, or an option does not go with it.
    """
    from envplan.planners import EnvPipe, planner_named

    planner = planner_named(name)
    for option, given in (("--reconfigure", reconfigure is not None), ("--explain", explain)):
        if given and name != EnvPipe.name:
            raise InputError(f"{option} goes with --planner envpipe, not {name}")
    if name == "frontier":
        return planner
    if polish > 0:
        raise InputError(f"--polish goes with --planner frontier, not {name}")
    if target is not None and not planner.takes_target:
        raise InputError(
            f"--planner {name} takes no target: it settles on an iteration time of its own; leave "
            f"{target} out"
        )
    if target is not None and target not in _TIMELY:
        raise InputError(f"--planner {name} takes {' or '.join(_TIMELY)}, not {target}")
    return EnvPipe(reconfigure) if reconfigure is not None else planner


def plan_of(
    planner: Planner,
    frontier: Frontier,
    option: str | None,
    value: float,
    straggler_time: float | None,
) -> tuple[Plan, EnvPipeRun | None]:
    """The planner's plan for the target an option gave, and what EnvPipe did if it was EnvPipe.

    A straggler leaves those planners that take a target until it is finished.
    """
    from envplan.planners import EnvPipe
    from envplan.units import ns_from_s_floor

    if isinstance(planner, EnvPipe):
        run = planner.run(frontier)
        return _noted(run.plan(frontier), frontier, straggler_time), run
    target: int | None = None
    if option == "--target-time":
        target = ns_from_s_floor(value)
    elif option == "--slowdown":
        target = frontier.min_time_ns + int(frontier.min_time_ns * value / 100)
    plan = planner.plan(frontier, target)
    if straggler_time is not None and planner.takes_target:
        latest = ns_from_s_floor(straggler_time)
        if latest > ns_from_s_floor(plan.target.deadline_s):
            plan = planner.plan(frontier, latest)
    return _noted(plan, frontier, straggler_time), None


def _noted(plan: Plan, frontier: Frontier, straggler_time: float | None) -> Plan:
    return plan if straggler_time is None else frontier.with_straggler(plan, straggler_time)


def print_run(run: EnvPipeRun, pipeline: Pipeline) -> None:
    """EnvPipe's iterations as a table."""
    from envplan.cli.output import column, print_table, say

    iterations = run.iterations
    columns = [
        [str(n) for n in range(1, len(iterations) + 1)],
        [_raised(iteration.raised, pipeline) for iteration in iterations],
        column([iteration.iteration_time for iteration in iterations], 6),
        column([iteration.energy for iteration in iterations], 5),
        [str(len(iteration.critical_path)) for iteration in iterations],
    ]
    if pipeline.forwards_ahead:
        ahead = ", ".join(map(str, pipeline.forwards_ahead))
        say(f"EnvPipe runs {ahead} forwards ahead of 1F1B, by stage")
    print_table(
        "EnvPipe's iterations",
        ("", "then raised", "time (s)", "energy (J)", "critical path"),
        [list(row) for row in zip(*columns, strict=True)],
        words=2,
    )
    say(f"EnvPipe stopped: {_stop(run)}")


def _stop(run: EnvPipeRun) -> str:
    return {
        "outer envelope": "the critical path is the outer envelope",
        "highest clocks": "the critical path has only highest clocks left, without being the "
        "outer envelope",
    }[run.stopped]


def _raised(raised: tuple[tuple[int, int, int], ...], pipeline: Pipeline) -> str:
    """Such as "12 on stage 0, 3 on stage 1: 1005 to 1020 MHz"."""
    if not raised:
        return "nothing"
    if len(raised) == 1:
        i, before, after = raised[0]
        op = pipeline.operations[i]
        return f"{op.instruction} {op.microbatch} on stage {op.stage}: {before} to {after} MHz"
    stages = sorted(pipeline.operations[i].stage for i, _, _ in raised)
    counts = ", ".join(f"{len(list(same))} on stage {stage}" for stage, same in groupby(stages))
    clocks = " and ".join(
        f"{before} to {after}" for before, after in sorted({(b, a) for _, b, a in raised})
    )
    return f"{counts}: {clocks} MHz"


def run_document(run: EnvPipeRun, pipeline: Pipeline) -> dict[str, Any]:
    """EnvPipe's iterations as JSON."""
    return {
        "forwards_ahead": list(pipeline.forwards_ahead),
        "stopped": run.stopped,
        "iterations": [
            {
                "iteration_time_s": iteration.iteration_time,
                "energy_j": iteration.energy,
                "critical_path": len(iteration.critical_path),
                "raised": [_operation(pipeline, *raised) for raised in iteration.raised],
            }
            for iteration in run.iterations
        ],
    }


def _operation(pipeline: Pipeline, i: int, before: int, after: int) -> dict[str, Any]:
    op = pipeline.operations[i]
    return {
        "stage": op.stage,
        "instruction": op.instruction,
        "microbatch": op.microbatch,
        "chunk": op.chunk,
        "from_mhz": before,
        "to_mhz": after,
    }
