"""Traces: counted by class and slot, and refused where time runs backwards or stands still."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from envplan.serving.prediction import expect

from envplan.errors import InputError
from envplan.serving.classes import CLASSES
from envplan.serving.profile import ServingProfile
from envplan.serving.trace import Trace, builtin_traces


def written(folder: Path, *lines: str) -> Path:
    path = folder / "trace.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_counts_are_taken_by_slot_and_class(tmp_path: Path) -> None:
    path = written(tmp_path, "timestamp,class,requests", "0,SS,5", "0,LL,1", "60,SS,7", "120,SS,0")
    trace = Trace.read_csv(path)
    assert (trace.step_s, trace.requests.shape, trace.duration_s) == (60, (3, 9), 180)
    assert trace.requests[:, CLASSES.index("SS")].tolist() == [5, 7, 0]
    profile = ServingProfile.builtin()
    tokens = trace.tokens(profile)
    assert tokens[0, CLASSES.index("LL")] == profile.classes["LL"].tokens
    assert tokens[2].sum() == 0


@pytest.mark.parametrize("newline", ["\r", "\r\n"])
def test_counts_are_counts_whatever_ends_a_line(tmp_path: Path, newline: str) -> None:
    path = tmp_path / "trace.csv"
    lines = ["timestamp,class,requests", "0,SS,5", "60,SS,7", ""]
    path.write_bytes(newline.join(lines).encode())
    trace = Trace.read_csv(path)
    assert trace.requests[:, CLASSES.index("SS")].tolist() == [5, 7]


def test_a_column_of_nearly_the_right_name_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "timestamp,class,request", "0,SS,5", "60,SS,7")
    with pytest.raises(InputError, match=r"trace\.csv:1, column request: .* is requests meant"):
        Trace.read_csv(path)


def test_single_requests_with_token_counts_fall_into_classes(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "timestamp,input_tokens,output_tokens",
        "2026-11-16T09:00:00,100,50",
        "2026-11-16T09:00:30,2000,400",
        "2026-11-16T09:01:10,120,90",
    )
    trace = Trace.read_csv(path)
    tokens = trace.tokens(ServingProfile.builtin())
    assert trace.requests[:, CLASSES.index("SS")].tolist() == [1, 1]
    assert tokens[:, CLASSES.index("SS")].tolist() == [150, 210]
    assert tokens[0, CLASSES.index("LL")] == 2400


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["timestamp,class", "5,SS", "4,SS"], ":3, column timestamp: comes before"),
        (["timestamp,class,requests", "0,SS,1", "60,SS,1", "180,SS,1"], ":4, column timestamp: the "
         "trace has a gap: nothing between 60 and 180 s"),
        (["timestamp,class", "0,SS", "3601,SS"], ":3, column timestamp: the trace has a gap"),
        (["timestamp,class", "0,XX"], ":2, column class: there is no class 'XX'"),
        (["timestamp,class,requests", "0,SS,-1"], ":2, column requests"),
        (["timestamp,class,requests", "0,SS,1"], "two different timestamps"),
        (["timestamp,class", "noon,SS"], ":2, column timestamp: must be seconds"),
        (["timestamp,input_tokens", "0,5"], "output_tokens"),
        (["timestamp,class"], "no rows"),
        (["class", "SS"], "no column timestamp"),
    ],
)  # fmt: skip
def test_a_bad_trace_is_refused_with_its_place(
    tmp_path: Path, lines: list[str], words: str
) -> None:
    path = written(tmp_path, *lines)
    with pytest.raises(InputError) as refused:
        Trace.read_csv(path)
    assert words in str(refused.value)


def test_an_unknown_trace_is_told_what_there_is() -> None:
    with pytest.raises(InputError, match="coding-week, conversation-week"):
        Trace.open("nothing")


@pytest.mark.parametrize("name", ["coding-week", "conversation-week"])
def test_shipped_traces_have_days_and_a_week(name: str) -> None:
    trace = Trace.open(name)
    assert name in builtin_traces()
    assert trace.duration_s == 7 * 86_400
    by_hour = trace.requests.sum(axis=1).reshape(7, 24, 12).sum(axis=2)
    assert by_hour[2, 14] > 2 * by_hour[2, 3]  # Wednesday by day and by night
    assert by_hour[2].sum() > 1.1 * by_hour[6].sum()  # Wednesday and Sunday


def test_without_a_past_the_last_epoch_is_expected_to_repeat() -> None:
    seen = np.array([[1.0], [2.0], [4.0]])
    coming = expect(seen, 2, 2, 300.0)
    assert (coming.mean[0], coming.peak[0]) == (3.0, 4.0)


def test_yesterday_is_expected_again_at_todays_level() -> None:
    day = [10.0, 20.0, 30.0, 40.0]  # slots of six hours
    coming = expect(np.array([[x] for x in [*day, 15.0]]), 2, 1, 21_600.0)
    assert (coming.mean[0], coming.peak[0]) == (1.5 * 25, 1.5 * 30)
    coming = expect(np.array([[x] for x in [*day, 90.0]]), 2, 1, 21_600.0)
    assert coming.peak[0] == 2 * 30  # a factor of two at most
    coming = expect(np.array([[x] for x in day]), 2, 1, 21_600.0)
    assert coming.peak[0] == 40  # nothing before yesterday to compare with: the last epoch


def test_last_week_counts_more_than_yesterday() -> None:
    week = np.arange(7.0 * 4 + 3)[:, None] + 1
    coming = expect(week, 1, 1, 21_600.0)
    now = len(week)
    factor = min(2.0, week[-1, 0] / week[now - 29, 0])
    assert coming.mean[0] == pytest.approx(week[now - 28, 0] * factor)
