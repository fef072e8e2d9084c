"""What clocks come to on a profile, by envplan's own replay."""

from __future__ import annotations

from collections.abc import Sequence

from envplan import Pipeline, Profile
from envplan.replay import Machine, Problem
from envplan.units import in_10uw, j_from_10fj, ns_from_s, s_from_ns

__all__ = ["replay_clocks"]


def replay_clocks(
    pipeline: Pipeline,
    profile: Profile,
    clocks: Sequence[Sequence[int]],
    switch_latency: float = 0.0,
) -> tuple[float, float]:
    """Iteration time (s) and energy (J, one GPU a stage) of clocks on a profile.

    Args:
        clocks: MHz, a list per stage in execution order, without the operations whose time no clock
            changes.
        switch_latency: s from a request for a clock until it is there.
    """
    left = [iter(stage) for stage in clocks]
    settings = []
    for op in pipeline.operations:
        constant = not profile.table(op.profile_stage, op.instruction).frequency_mhz.any()
        settings.append((0 if constant else next(left[op.stage]), ""))
    assert profile.blocking_power_w is not None
    waiting = [in_10uw(power) for power in profile.blocking_power_w]
    problem = Problem(pipeline, profile, waiting)
    # Perseus's client sets the clock as an operation starts.
    machine = Machine(ns_from_s(switch_latency), "start")
    replay = problem.replay(problem.rows_at(settings), machine)
    return s_from_ns(replay.makespan_ns), j_from_10fj(replay.energy_10fj)
