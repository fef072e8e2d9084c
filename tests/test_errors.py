"""Errors: which file they name, and which exit code they stand for."""

from __future__ import annotations

import pytest

from envplan.enforce.order_file import Order
from envplan.errors import InputError, NoAnswerError, naming


def test_input_errors_name_the_file_they_are_about() -> None:
    with pytest.raises(InputError) as caught, naming("plan.json"):
        raise InputError("is wrong", line=3)
    assert str(caught.value) == "plan.json:3: is wrong"


def test_input_errors_that_name_a_file_keep_it() -> None:
    with pytest.raises(InputError) as caught, naming("plan.json"):
        raise InputError("is wrong", path="profile.csv")
    assert str(caught.value) == "profile.csv: is wrong"


def test_a_question_without_an_answer_stays_one_when_a_file_is_named() -> None:
    with pytest.raises(NoAnswerError) as caught, naming("plan.json"):
        raise NoAnswerError("no plan is that fast")
    assert str(caught.value) == "plan.json: no plan is that fast"
    assert caught.value.exit_code == 1


ORDER = {
    "schema": "envplan/order/v1",
    "job": "a",
    "plan_sha256": "0" * 64,
    "sequence": 3,
    "rung": 2,
    "iteration_time_s": 1.5,
    "power_w": 3000.0,
}


@pytest.mark.parametrize("name", ["from\n", "from\x1b[31m", "from\u202e"])
def test_a_field_with_an_unprintable_name_is_refused_in_a_line(name: str) -> None:
    with pytest.raises(InputError) as caught:
        Order.from_document({**ORDER, name: 100})
    assert str(caught.value).isprintable()
    assert "from" in str(caught.value)


def test_a_field_with_a_long_name_is_shortened() -> None:
    with pytest.raises(InputError) as caught:
        Order.from_document({**ORDER, "x" * 100_000: 100})
    assert len(str(caught.value)) < 300
