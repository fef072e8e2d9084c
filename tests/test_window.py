"""A window of a long pipeline: its times are those of the whole."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from envplan.replay.window import GivenTimes, Window, tails_ns
from envplan.solve import trace_frontier
from strategies import dags, pipelines, profiles


@given(st.data())
def test_a_windows_times_are_those_of_the_whole_pipeline(data: Any) -> None:
    pipeline = data.draw(st.one_of(pipelines(max_stages=3, max_microbatches=5), dags(num_stages=2)))
    profile = data.draw(profiles(pipeline.num_profile_stages, max_options=4))
    problem = trace_frontier(pipeline, profile, blocking_power=70.0).problem
    num_options = [
        len(profile.table(op.profile_stage, op.instruction)) for op in pipeline.operations
    ]

    def drawn_rows() -> Any:
        return np.array([data.draw(st.integers(0, num - 1)) for num in num_options], np.int32)

    rows = drawn_rows()
    replay = problem.replay(rows)
    position = np.argsort(pipeline.order)
    by_start = np.lexsort((position, replay.starts_ns))
    begin = data.draw(st.integers(0, len(rows) - 1))
    end = data.draw(st.integers(begin + 1, len(rows)))
    inside = np.zeros(len(rows), bool)
    inside[by_start[begin:end]] = True
    times = GivenTimes(replay.finishes_ns, tails_ns(replay), np.argsort(by_start))
    window = Window(problem, rows, inside, times)
    assert set(window.changeable.tolist()) == set(by_start[begin:end].tolist())
    assert (window.finishes_ns(window.rows) == replay.finishes_ns[window.changeable]).all()
    assert makespan_ns(window, window.rows) <= replay.makespan_ns  # it may wait for others

    # With other rows within, operations end when they do in the whole, which is in time if the
    # window is: what it takes as given may be too late by then, and never too early.
    changed = np.where(inside, drawn_rows(), rows)
    own = window.rows.copy()
    is_inside = np.isin(window.operations, window.changeable)
    own[: len(window.operations)][is_inside] = changed[window.changeable]
    whole = problem.replay(changed)
    assert (window.finishes_ns(own) == whole.finishes_ns[window.changeable]).all()
    assert whole.makespan_ns <= max(makespan_ns(window, own), replay.makespan_ns)


def makespan_ns(window: Window, rows: Any) -> int:
    return window.kernel.replay(rows, 0, False)[3]
