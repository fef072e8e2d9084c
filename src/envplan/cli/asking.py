"""The request that a command's options make."""

from __future__ import annotations

from typing import TYPE_CHECKING

from envplan.cli.options import ClockOptions, PlannerOptions, RunOptions, TargetOptions
from envplan.errors import InputError

if TYPE_CHECKING:
    from envplan.planners import Planner
    from envplan.request import Request
    from envplan.solve import Frontier

_TARGETS = ("target_time", "slowdown", "min_energy", "energy_budget", "power_cap", "peak_power_cap")


def request_of(
    frontier: Frontier,
    target: TargetOptions,
    how: PlannerOptions,
    clocks: ClockOptions,
    costs: RunOptions,
) -> Request:
    """What the options ask for.

    Raises:
        InputError: two of them exclude each other, or a rate cannot be read.
    """
    from envplan.request import Request

    if clocks.noise is not None and clocks.robust is None:
        raise InputError("--noise goes with --robust PCT")
    return Request.asking(
        target.target_time,
        slowdown=None if target.slowdown is None else target.slowdown / 100,
        min_energy=target.min_energy,
        straggler_time=target.straggler_time,
        energy_budget=target.energy_budget,
        power_cap=target.power_cap,
        peak_power_cap=target.peak_power_cap,
        probability=None if clocks.robust is None else clocks.robust / 100,
        noise=None if clocks.noise is None else clocks.noise / 100,
        switch_latency=clocks.switch_latency or 0.0,
        min_hold=clocks.min_dwell or 0.0,
        run=costs.run(frontier) if costs.given else None,
        polish=how.polish,
        ladder=how.ladder,
    )


def check_targets(target: TargetOptions, costs: RunOptions) -> None:
    """That at most one option says when an iteration must be over, before any work is done.

    Raises:
        InputError: two of them do.
    """
    times = {
        "--target-time": target.target_time is not None,
        "--slowdown": target.slowdown is not None,
        "--min-energy": target.min_energy,
        "--deadline": costs.deadline is not None,
    }
    given = [name for name, is_given in times.items() if is_given]
    if len(given) > 1:
        raise InputError(f"{given[0]} and {given[1]} exclude each other; give one of them")


def chosen_planner(
    target: TargetOptions, how: PlannerOptions, clocks: ClockOptions, costs: RunOptions
) -> Planner | None:
    """The planner that the options ask for, and that it can do what else they ask for; None: ours,
    and nothing that only others can do.

    Raises:
        InputError: there is no such planner, or it cannot.
    """
    plain = how.planner == "frontier" and how.clocks is None
    if plain and how.reconfigure is None and not how.explain:
        return None
    from envplan.planners import EnvPipe, planner_named

    planner = planner_named(how.planner)
    for name, is_given in (
        ("--reconfigure", how.reconfigure is not None),
        ("--explain", how.explain),
    ):
        if is_given and how.planner != EnvPipe.name:
            raise InputError(f"{name} goes with --planner envpipe, not {how.planner}")
    if how.clocks is not None and how.planner != "frontier":
        raise InputError(f"--clocks and --planner {how.planner} exclude each other; leave one out")
    who = how.planner if how.clocks is None else "--clocks"
    timed = ("target_time", "slowdown") if who != "--clocks" and planner.takes_target else ()
    asked = {
        f"--{name.replace('_', '-')}": getattr(target, name)
        for name in _TARGETS
        if name not in timed
    }
    asked |= {
        "--switch-latency": clocks.switch_latency,
        "--min-dwell": clocks.min_dwell,
        "--robust": clocks.robust,
        "--deadline": costs.deadline,
        "--polish": how.polish,
        "--ladder": how.ladder,
    }
    for name, value in asked.items():
        if value:
            takes = " or ".join(f"--{one.replace('_', '-')}" for one in timed) or "no target"
            raise InputError(
                f"{name} goes with --planner frontier; {who} takes {takes} and knows no limits, so "
                f"leave one of the two out"
            )
    return EnvPipe(how.reconfigure) if how.reconfigure is not None else planner
