"""Errors: which file they name, and which exit code they stand for."""

from __future__ import annotations

import pytest

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
