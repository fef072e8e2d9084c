"""Traces: counted by class and slot, and refused where time runs backwards or stands still."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from envplan.errors import InputError
from envplan.serving.builtin import builtin_traces
from envplan.serving.classes import CLASSES
from envplan.serving.profile import ServingProfile
from envplan.serving.trace import Trace, make_week


def written(folder: Path, *lines: str) -> Path:
    path = folder / "trace.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("newline", ["\n", "\r", "\r\n"])
def test_counts_become_requests_spread_evenly(tmp_path: Path, newline: str) -> None:
    path = tmp_path / "trace.csv"
    lines = ("timestamp,class,requests", "0,SS,6", "0,LL,1", "60,SS,7", "120,SS,0", "")
    path.write_bytes(newline.join(lines).encode())
    trace = Trace.read_csv(path)
    assert (len(trace), trace.duration_s) == (14, 180)
    assert trace.counts[:, CLASSES.index("SS")].tolist() == [6, 7, 0]
    assert trace.arrival_s[:7].tolist() == [5, 15, 25, 30, 35, 45, 55]
    profile = ServingProfile.builtin()
    mean = profile.classes["LL"]
    inputs, outputs = trace.lengths(profile)
    assert (inputs[3], outputs[3]) == (round(mean.input_tokens), round(mean.output_tokens))
    assert trace.mean_lengths() == {}


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
DAY = "2024-05-10 00:0"


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize(
    ("header", "rows", "arrival", "classes"),
    [
        *(
            (AZURE, [f"{at},{size},10" for at, size in zip(times, (4808, 3, 300), strict=True)],
             [0, 0.02, 120.52], "LS SS MS")
            for times in (
                ("2023-11-16 18:17:03.9799600", "2023-11-16 18:17:04", "2023-11-16 18:19:04.5"),
                (f"{DAY}0:00.009930+00:00", f"{DAY}0:00.029930+00:00", f"{DAY}2:00.529930+00:00"),
                (f"{DAY}0:00+00:00", f"{DAY}0:00.020000+00:00", f"{DAY}2:00.520000+00:00"),
                ("0", "0.02", "120.52"),
            )
        ),
        ("Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
         ["5,0,472,10,482,API log", "45.5,0,1087,10,482,API log"], [0, 40.5], "MS LS"),
        ("arrived_at,x,num_prefill_tokens,num_decode_tokens", ["5,0,472,10", "45.5,0,1087,10"],
         [0, 40.5], "MS LS"),
        ("arrival_timestamp,request_id,prompt_size,token_size", ["5,0,472,10", "45.5,0,1087,10"],
         [0, 40.5], "MS LS"),
        ('"timestamp","x","Input_Tokens","output_tokens"', ["5,0,472,10", "45.5,0,1087,10"],
         [0, 40.5], "MS LS"),
        ("timestamp,input_tokens,output_tokens",
         ["2026-11-16T09:00:00,100,50", "2026-11-16T09:00:30,2000,400"], [0, 30], "SS LL"),
    ],
)  # fmt: skip
def test_public_traces_are_read_as_they_are(
    tmp_path: Path, header: str, rows: list[str], arrival: list[float], classes: str, zipped: bool
) -> None:
    path = written(tmp_path, header, *rows)
    if zipped:
        packed = gzip.compress(path.read_bytes())
        path = tmp_path / "trace.csv.gz"
        path.write_bytes(packed)
    trace = Trace.read_csv(path)
    assert trace.name == "trace"
    assert trace.arrival_s == pytest.approx(arrival, abs=1e-4)
    assert [CLASSES[k] for k in trace.class_index] == classes.split()
    assert trace.duration_s == 60 * (arrival[-1] // 60 + 1)
    assert trace.mean_lengths().keys() == set(classes.split())


def test_pieces_are_put_together_and_lines_counted_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envplan.serving.trace_file._ROWS_PER_PIECE", 3)
    lines = ["timestamp,input_tokens,output_tokens", *(f"{k},{k + 1},5" for k in range(8))]
    trace = Trace.read_csv(written(tmp_path, *lines))
    assert trace.arrival_s.tolist() == list(range(8))
    assert trace.input_tokens is not None
    assert trace.input_tokens.tolist() == list(range(1, 9))
    assert trace.mean_lengths() == {"SS": (4.5, 5.0)}
    for bad, words in (("7.5,-1,5", ":10, column input_tokens: must be"), ("2,1,5", ":10, column")):
        with pytest.raises(InputError, match=words):
            Trace.read_csv(written(tmp_path, *lines, bad))


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["timestamp,class", "5,SS", "4,SS"], ":3, column timestamp: comes before"),
        (["timestamp,class,requests", "0,SS,1", "60,SS,1", "180,SS,1"], ":4, column timestamp: the "
         "trace has a gap: nothing between 60 and 180 s"),
        (["timestamp,class", "0,SS", "86401,SS"], ":3, column timestamp: the trace has a gap"),
        (["timestamp,class", "0,XX"], ":2, column class: there is no class "),
        (["timestamp,class,requests", "0,SS,-1"], ":2, column requests"),
        (["timestamp,class,requests", "0,SS,1"], "two different timestamps"),
        (["timestamp,class", "noon,SS"], ":2, column timestamp: must be seconds"),
        (["timestamp,input_tokens", "0,5"], "output_tokens"),
        (["timestamp,class"], "no rows"),
        (["timestamp,input_tokens,output_tokens", "0,5,-2"], ":2, column output_tokens: must be"),
        (["timestamp,input_tokens,output_tokens", "0,5,x"], ":2, column output_tokens: must be"),
        (["timestamp,input_tokens,output_tokens", "0,5"], ":2, column output_tokens: is blank"),
        (["timestamp,class", "0,SS", "1,SS,5"], "Expected 2 fields in line 3, saw 3"),
        (["timestamp,class", "0,SS,5", "1,SS,5"], "is not a CSV table or JSON lines (Length"),
        (["timestamp,class,class", "0,SS,SS"], ":1, column class.1"),
        (["timestamp,class,Class", "0,SS,SS"], ":1: column 'Class' is there twice"),
        (["class", "SS"], "no column timestamp"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens", "0,5,-2"], ":2, column GeneratedTokens: must"),
        (["TIMESTAMP,ContextTokens"], "both input_tokens and output_tokens (or as Azure"),
        (["TIMESTAMP;class", "0;SS"], "its first line is "),
        (["timestamp,class", "1700158546000,SS"], "which may be milliseconds"),
        (["TIMESTAMP,ContextToken,GeneratedTokens"], "is ContextTokens meant"),
        (["timestamp,class,request", "0,SS,5"], ":1, column request: is not known; is requests"),
    ],
)  # fmt: skip
def test_a_bad_trace_is_refused_with_its_place(
    tmp_path: Path, lines: list[str], words: str
) -> None:
    path = written(tmp_path, *lines)
    with pytest.raises(InputError) as refused:
        Trace.read_csv(path)
    assert words in str(refused.value)


def test_the_real_hours_ship_whole() -> None:
    with pytest.raises(InputError, match="coding-week, conversation-week"):
        Trace.open("nothing")
    assert list(builtin_traces()) == [
        "azure-2023-code", "azure-2023-conversation", "coding-week", "conversation-week"
    ]  # fmt: skip
    for name, count, first in (("code", 8819, 4808), ("conversation", 19366, 374)):
        trace = Trace.open(f"azure-2023-{name}")
        assert trace.input_tokens is not None
        assert (len(trace), trace.input_tokens[0]) == (count, first)


def test_a_week_has_the_digitized_minutes_and_the_hours_lengths() -> None:
    part, hour = make_week("coding-week", days=0.1), Trace.open("azure-2023-code")
    assert part.provenance is not None
    assert part.provenance.startswith("real-shaped")
    assert part.duration_s == 144 * 60
    assert len(part) == pytest.approx(1409 * 144, rel=0.1)
    assert np.bincount(part.class_index, minlength=9) / len(part) == pytest.approx(
        np.bincount(hour.class_index, minlength=9) / len(hour), abs=0.05
    )
    assert (np.diff(part.arrival_s) >= 0).all()
    assert (make_week("coding-week", days=0.1).arrival_s == part.arrival_s).all()


@pytest.mark.parametrize("factor", [0.1, 1.0, 2.5])
def test_a_trace_can_be_scaled(factor: float) -> None:
    hour = Trace.open("azure-2023-code")
    scaled = hour.scaled(factor)
    assert len(scaled) == round(factor * len(hour))
    assert scaled.duration_s == hour.duration_s
    assert (np.diff(scaled.arrival_s) >= 0).all()


def test_number_of_tokens_with_hundreds_of_digits_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(f"timestamp,input_tokens,output_tokens\n0,5,{'9' * 400}\n1,5,7\n")
    with pytest.raises(InputError, match="output_tokens: must be a number"):
        Trace.read_csv(path)
