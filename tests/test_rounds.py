"""The rounds in the middle of a long pipeline, repeated."""

from __future__ import annotations

import time

import numpy as np
import pytest

from envplan import Frontier, Pipeline, Profile, trace_frontier, verify_plan
from envplan.solve.cyclic_schedule import ROUND_OPTIONS, CyclicSchedule
from envplan.solve.rounding import Rounding, relaxed_rounding

STAGES = 3


def profile(rows: int = 24) -> Profile:
    """Nearly equal stages, the last the slowest; no two options of a stage fill its round."""
    table = []
    for stage in range(STAGES):
        for instruction, work in (("forward", 0.010), ("backward", 0.021)):
            for k in range(rows):
                clock = 1400 - 30 * k
                seconds = (work + 0.0007 * (stage == STAGES - 1)) * (0.3 + 0.7 * 1400 / clock)
                watts = 60 + 240 * (clock / 1400) ** 3
                table.append((stage, instruction, clock, seconds, seconds * watts))
    return Profile.from_rows(table)


def rounded(frontier: Frontier) -> Rounding:
    rounding = relaxed_rounding(frontier, frontier.min_time_ns)
    rounding.anneal()
    return rounding


@pytest.fixture(scope="module")
def frontier() -> Frontier:
    return trace_frontier(Pipeline("1f1b", STAGES, 60), profile(), blocking_power=60.0)


def test_rounds_of_a_long_pipeline_are_those_of_its_slowest_stage(frontier: Frontier) -> None:
    cyclic = CyclicSchedule.detect(frontier.pipeline, rounded(frontier))
    assert cyclic is not None
    slowest = [
        frontier.profile.table(STAGES - 1, instruction).time_ns.min()
        for instruction in ("forward", "backward")
    ]
    assert cyclic.round_ns == sum(slowest)
    assert len(cyclic.rank) == 2 * STAGES
    assert cyclic.rank.shape[1] > 40
    assert len(np.unique(cyclic.rank)) == cyclic.rank.size


@pytest.mark.parametrize("pipeline", [Pipeline("1f1b", STAGES, 6), Pipeline("gpipe", STAGES, 60)])
def test_short_pipelines_and_those_without_rounds_have_none(pipeline: Pipeline) -> None:
    frontier = trace_frontier(pipeline, profile(), blocking_power=60.0)
    assert CyclicSchedule.detect(pipeline, rounded(frontier)) is None


def test_repeated_rounds_keep_the_deadline_between_joints(frontier: Frontier) -> None:
    rounding = rounded(frontier)
    cyclic = CyclicSchedule.detect(frontier.pipeline, rounding)
    assert cyclic is not None
    curves = [frontier.network.cost_curves[table] for table in rounding.curve.tolist()]
    likely = [
        np.argsort(np.abs(c.time_ns - relaxed))[:ROUND_OPTIONS].tolist()
        for c, relaxed in zip(curves, rounding.relaxed_duration_ns.tolist(), strict=True)
    ]
    pattern = cyclic.best_pattern(rounding.pareto_choice, curves, likely, time.monotonic() + 2)
    assert pattern is not None
    *_, last = cyclic.insertions(rounding.pareto_choice, pattern)  # the widest joints
    rounding.pareto_choice[:] = last
    assert frontier.problem.replay(rounding.choice).makespan_ns <= frontier.min_time_ns
    repeated = {tuple(column) for column in last[cyclic.rank[:, 8:-8]].T.tolist()}
    assert repeated <= {tuple(column) for column in pattern.T.tolist()}


def test_polished_long_plan_costs_no_more_and_is_proved(frontier: Frontier) -> None:
    plain, polished = frontier.plan(), frontier.plan(polish=2)
    assert polished.energy <= plain.energy
    verify_plan(polished, frontier.profile)
