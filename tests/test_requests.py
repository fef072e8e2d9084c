"""Any request on any pipeline: what comes out keeps it, to the nanosecond."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from envplan.errors import NoAnswerError
from plan_checks import assert_answers
from strategies import Case, requests


@settings(max_examples=60)
@given(requests())
def test_a_plan_answers_its_request(case: Case) -> None:
    frontier, request = case
    try:
        plan = frontier.solve(request)
    except NoAnswerError:
        assert request.limits or request.latency_ns or request.run
        return
    assert_answers(frontier, request, plan)
