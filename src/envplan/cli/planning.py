"""Plans of planners other than our own, for `envplan solve --planner NAME`."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from envplan.pipeline import Pipeline
    from envplan.plan import Plan
    from envplan.planners import EnvPipeRun, Planner
    from envplan.request import Request
    from envplan.solve import Frontier


def plan_of(
    planner: Planner, frontier: Frontier, request: Request
) -> tuple[Plan, EnvPipeRun | None]:
    """The plan of a planner other than our own, and what EnvPipe did if it was EnvPipe."""
    from envplan.planners import EnvPipe
    from envplan.planners.base import answer

    run = planner.run(frontier) if isinstance(planner, EnvPipe) else None
    return answer(run or planner, frontier, request), run


def plan_of_clocks(frontier: Frontier, file: Path) -> Plan:
    """The plan that runs the clocks of a file."""
    from envplan.cli.inputs import naming
    from envplan.enforce.given_clocks import read_clocks
    from envplan.solve import plan_from_clocks

    clocks = read_clocks(file, frontier.pipeline)
    with naming(file):
        return plan_from_clocks(frontier.pipeline, frontier.profile, clocks, frontier=frontier)


def print_run(run: EnvPipeRun, pipeline: Pipeline) -> None:
    """EnvPipe's iterations as a table."""
    from envplan.cli.output import column, print_columns, say

    iterations = run.iterations
    columns = {
        "": [str(n) for n in range(1, len(iterations) + 1)],
        "then raised": [_raised(iteration.raised, pipeline) for iteration in iterations],
        "time (s)": column([iteration.iteration_time for iteration in iterations]),
        "energy (J)": column([iteration.energy for iteration in iterations]),
        "critical path": [str(len(iteration.critical_path)) for iteration in iterations],
    }
    if pipeline.forwards_ahead:
        ahead = ", ".join(map(str, pipeline.forwards_ahead))
        say(f"EnvPipe runs {ahead} forwards ahead of 1F1B, by stage")
    print_columns("EnvPipe's iterations", columns, words=2)
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
