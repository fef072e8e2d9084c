"""Traces as others publish them: units, failures and prefixes are understood, or asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cli_helpers import envplan
from envplan.errors import InputError
from envplan.serving.trace import Trace
from envplan.serving.trace_formats import FORMATS, OWN, format_of

#: The first requests of Mooncake's conversation trace (kvcache-ai/Mooncake), hashes shortened.
MOONCAKE = [
    {"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [*range(14)]},
    {"timestamp": 0, "input_length": 2290, "output_length": 316, "hash_ids": [0, 42, 43, 44, 45]},
    {"timestamp": 3000, "input_length": 915, "output_length": 355, "hash_ids": [0, 462]},
    {"timestamp": 5999, "input_length": 1024, "output_length": 26, "hash_ids": [0, 1]},
]


def json_lines(folder: Path, rows: list[dict[str, object]], name: str = "talk.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_mooncakes_milliseconds_and_shared_prefixes_are_understood(tmp_path: Path) -> None:
    trace = Trace.read_csv(json_lines(tmp_path, MOONCAKE))
    assert trace.name == "talk"
    assert trace.arrival_s.tolist() == pytest.approx([0, 0, 3, 5.999])
    assert trace.cached_tokens is not None
    # Blocks of 512 tokens; at least one token of a prompt is always run.
    assert trace.cached_tokens.tolist() == [0, 512, 512, 1023]
    assert trace.prefix_hit_share == pytest.approx((512 + 512 + 1023) / (6758 + 2290 + 915 + 1024))


def test_a_prefix_cache_takes_shared_tokens_from_prompts(tmp_path: Path) -> None:
    trace = Trace.read_csv(json_lines(tmp_path, MOONCAKE))
    cached = trace.with_prefix_cache(1.0)
    assert cached.input_tokens is not None
    assert cached.input_tokens.tolist() == [6758, 1778, 403, 1]
    half = trace.with_prefix_cache(0.5)
    assert half.input_tokens is not None
    assert half.input_tokens.tolist()[1:3] == [2290 - 256, 915 - 256]
    with pytest.raises(InputError, match="does not say which prompts begin alike"):
        Trace.open("azure-2023-code").with_prefix_cache(1.0)


@settings(max_examples=30, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=2, max_size=12)
)
def test_cached_blocks_are_those_of_the_longest_known_begin(
    prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    # Hashes of blocks tell all that stands before them, as Mooncake's do.
    rows: list[dict[str, object]] = []
    for number, prompt in enumerate(prompts):
        hashes = [hash(tuple(prompt[: end + 1])) for end in range(len(prompt))]
        length = 512 * len(prompt)
        row = {"timestamp": number, "input_length": length, "output_length": 5, "hash_ids": hashes}
        rows.append(row)
    trace = Trace.read_csv(json_lines(tmp_path_factory.mktemp("prefix"), rows))
    assert trace.cached_tokens is not None
    for number, prompt in enumerate(prompts):
        shared = 0
        for earlier in prompts[:number]:
            same = 0
            while same < min(len(prompt), len(earlier)) and prompt[same] == earlier[same]:
                same += 1
            shared = max(shared, same)
        assert trace.cached_tokens[number] == min(512 * shared, 512 * len(prompt) - 1)


def test_failures_of_burstgpt_are_no_requests(tmp_path: Path) -> None:
    path = tmp_path / "burst.csv"
    header = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
    rows = ["5,ChatGPT,472,18,490,API log", "45,GPT-4,417,0,417,API log", "118,GPT-4,417,9,426,x"]
    path.write_text("\n".join([header, *rows]) + "\n")
    trace = Trace.read_csv(path)
    assert (len(trace), trace.num_failed) == (2, 1)
    assert trace.arrival_s.tolist() == [0, 113]


def test_results_of_vllm_are_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    result = {
        "date": "20260101-000000",
        "completed": 2,
        "start_times": [101.5, 100.0, 103.0],
        "input_lens": [30, 20, 40],
        "output_lens": [3, 2, 0],
        "errors": ["", "", "timed out"],
    }
    for text in (json.dumps(result), json.dumps(result, indent=2)):
        path.write_text(text)
        trace = Trace.read_csv(path)
        assert trace.arrival_s.tolist() == [0, 1.5]
        assert trace.input_tokens is not None
        assert trace.input_tokens.tolist() == [20, 30]
        assert trace.num_failed == 1
    path.write_text(json.dumps({**result, "input_lens": [1]}))
    with pytest.raises(InputError, match="lists of one length"):
        Trace.read_csv(path)
    path.write_text('{"a": [1,\n 2]}')
    with pytest.raises(InputError, match="is no trace"):
        Trace.read_csv(path)


def test_a_workload_of_servegen_is_read(tmp_path: Path) -> None:
    path = tmp_path / "workload.csv"
    path.write_text("request_id,timestamp,input_tokens,output_tokens\n0,0.5,10,20\n1,2.0,30,40\n")
    assert Trace.read_csv(path).arrival_s.tolist() == [0, 1.5]


def an_hour_in_milliseconds(folder: Path) -> Path:
    trace = Trace.open("azure-2023-code")
    assert trace.input_tokens is not None
    assert trace.output_tokens is not None
    lines = ["timestamp,input_tokens,output_tokens"]
    for at_s, given_tokens, made_tokens in zip(
        trace.arrival_s, trace.input_tokens, trace.output_tokens, strict=True
    ):
        lines.append(f"{at_s * 1e3:.0f},{given_tokens},{made_tokens}")
    path = folder / "hour.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_an_hour_in_milliseconds_is_asked_about(tmp_path: Path) -> None:
    path = an_hour_in_milliseconds(tmp_path)
    with pytest.raises(InputError, match="say --time-unit"):
        Trace.read_csv(path)
    trace = Trace.read_csv(path, "ms")
    assert trace.arrival_s == pytest.approx(Trace.open("azure-2023-code").arrival_s, abs=1e-3)


def test_a_long_thin_trace_in_seconds_is_asked_about_and_believed(tmp_path: Path) -> None:
    path = tmp_path / "thin.csv"
    lines = [f"{600 * number},10,10" for number in range(200)]
    path.write_text("\n".join(["timestamp,input_tokens,output_tokens", *lines]) + "\n")
    with pytest.raises(InputError, match=r"33\.17 hours as seconds and 0\.03317 hours as milli"):
        Trace.read_csv(path)
    assert Trace.read_csv(path, "s").duration_s == pytest.approx(119_460)


def test_milliseconds_since_1970_are_read_when_said(tmp_path: Path) -> None:
    path = tmp_path / "epoch.csv"
    path.write_text("timestamp,input_tokens,output_tokens\n1700158546000,5,5\n1700158547500,5,5\n")
    with pytest.raises(InputError, match="say --time-unit ms if it is"):
        Trace.read_csv(path)
    assert Trace.read_csv(path, "ms").arrival_s.tolist() == [0, 1.5]


def test_every_format_is_told_by_its_columns() -> None:
    for candidate in FORMATS:
        assert format_of(candidate.columns) is candidate
    assert format_of(["timestamp", "class", "requests"]) is OWN
    assert format_of(["when", "what"]) is None


def test_a_broken_line_of_json_is_refused(tmp_path: Path) -> None:
    path = json_lines(tmp_path, MOONCAKE)
    path.write_text(path.read_text() + '{"timestamp": 7000, "input_length": \n')
    with pytest.raises(InputError, match="is not a CSV table or JSON lines"):
        Trace.read_csv(path)


def test_the_command_line_says_what_failed_and_what_a_cache_would_save(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = []
    for number in range(60):
        row = {**MOONCAKE[number % 4], "timestamp": 1000 * number}
        rows.append(row)
    path = json_lines(tmp_path, rows)
    run = envplan("serving", "simulate", "--trace", str(path), "--policy", "SinglePool", "--json")
    assert run.code == 0, run.err
    assert "begin a prompt as an earlier" in run.err
    cached = envplan(
        *("serving", "simulate", "--trace", str(path), "--policy", "SinglePool", "--json"),
        *("--prefix-cache", "100"),
    )
    assert cached.code == 0
    assert json.loads(cached.out)["energy_j"] < json.loads(run.out)["energy_j"]
    hour = an_hour_in_milliseconds(tmp_path)
    asked = envplan("serving", "simulate", "--trace", str(hour))
    assert asked.code == 2
    assert "--time-unit" in asked.err


@pytest.mark.parametrize("line", ["[1, 2]", "5", '"x"', "[" * 60_000])
def test_a_line_that_is_no_object_is_refused(tmp_path: Path, line: str) -> None:
    path = json_lines(tmp_path, MOONCAKE)
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(InputError):
        Trace.read_csv(path)
