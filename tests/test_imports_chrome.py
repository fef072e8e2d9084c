"""Recorded traces as schedules: replays whose order is known, and what PyTorch recorded."""

from __future__ import annotations

import gzip
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envplan.errors import InputError
from envplan.pipeline import Pipeline
from envplan.pipeline.imports import ImportedSchedule
from envplan.pipeline.imports.chrome import TraceMapping, read_chrome_traces
from envplan.pipeline.operations import LETTERS, short_name
from envplan.plotting.schedule import schedule_layout
from strategies import schedules

EXAMPLES = Path(__file__).parents[1] / "examples" / "schedules"
#: PyTorch's own names of what its schedules of several stages a rank run.
PYTORCH = {
    name: rf"^PP:(?P<stage>\d+){letter}(?P<microbatch>\d+)$" for name, letter in LETTERS.items()
}
BY_NAME = {"forward": "^fwd", "backward": "^bwd"}

Event = dict[str, Any]


def by(instructions: dict[str, str], **more: Any) -> TraceMapping:
    return TraceMapping.of(instructions=instructions, **more)


def traced(pipeline: Pipeline, *, unit_us: float = 1000.25) -> list[Event]:
    """A replay in unit times as complete events in PyTorch's words; a process for each rank."""
    layout = schedule_layout(pipeline)
    return [
        {
            "ph": "X",
            "name": f"PP:{op.profile_stage}{LETTERS[op.instruction]}{op.microbatch}",
            "cat": "user_annotation",
            "pid": 40 + op.stage,
            "tid": 7,
            "ts": start * unit_us,
            "dur": time * unit_us,
            "args": {"mb": op.microbatch + 96, "chunk": op.chunk, "rank": f"r{op.stage}"},
        }
        for op, start, time in zip(
            pipeline.operations, layout.start.tolist(), layout.time.tolist(), strict=True
        )
    ]


def simple(name: str, ts: object, dur: object, **fields: Any) -> Event:
    return {"ph": "X", "name": name, "pid": 0, "tid": 0, "ts": ts, "dur": dur, **fields}


def read(folder: Path, events: object, mapping: TraceMapping | None = None) -> ImportedSchedule:
    path = folder / "trace.json"
    path.write_text(json.dumps(events))
    return read_chrome_traces([path], mapping or by(BY_NAME))


def refused(folder: Path, events: object, mapping: TraceMapping | None = None) -> str:
    with pytest.raises(InputError) as error:
        read(folder, events, mapping)
    assert "\n" not in str(error.value)
    return str(error.value)


@given(schedules(None, 4, 8), st.randoms(use_true_random=False))
@settings(max_examples=80)
def test_trace_of_a_schedule_is_imported_as_that_schedule(
    tmp_path_factory: pytest.TempPathFactory, pipeline: Pipeline, shuffled: random.Random
) -> None:
    events = traced(pipeline)
    shuffled.shuffle(events)
    read_back = read(tmp_path_factory.mktemp("trace"), events, by(PYTORCH))
    assert Pipeline.from_imported(read_back).operations == pipeline.operations
    pids = [str(40 + rank) for rank in range(pipeline.num_stages)]
    assert read_back.rank_labels == tuple(pids if len(pids) > 1 else ["7"])


@pytest.mark.parametrize(("name", "placement"), [("interleaved", "interleaved"), ("zb-v", "v")])
def test_arguments_tell_rank_chunk_and_microbatch(
    name: str, placement: str, tmp_path: Path
) -> None:
    pipeline = Pipeline(name, 2, 4, num_chunks=2)
    events = [e | {"name": re.sub(r"PP|\W|\d", "", e["name"]), "pid": 0} for e in traced(pipeline)]
    instructions = {instruction: f"^{letter}$" for instruction, letter in LETTERS.items()}
    where = {"rank": "args.rank", "microbatch": "args.mb", "chunk": "args.chunk"}
    trace = read(tmp_path, events, by(instructions, **where, placement=placement))
    assert trace.known_as == name
    assert trace.rank_labels == ("r0", "r1")
    assert Pipeline.from_imported(trace).operations == pipeline.operations


def test_pairs_of_begin_and_end_are_events_too(tmp_path: Path) -> None:
    """Arguments of an end belong to its begin; microbatches may be told by order of appearance."""
    events = []
    for event in traced(Pipeline("gpipe", 2, 3)):
        common = {key: event[key] for key in ("pid", "tid")}
        name, end = event["name"][4], event["ts"] + event["dur"]
        outer = {**common, "ph": "B", "name": name, "ts": event["ts"]}
        inner = {**common, "ph": "B", "name": "kernel", "ts": event["ts"] + 1}
        ends = [{**common, "ph": "E", "ts": end - 1}, {**common, "ph": "E", "ts": end}]
        events += [outer, inner, *ends]
        ends[-1]["args"] = event["args"]
    events += [{"ph": "E", "ts": -1, "pid": 40, "tid": 7}, {"ph": "M", "name": "process_name"}]
    for told in ({}, {"microbatch": "args.mb"}):
        trace = read(tmp_path, events, by({"forward": "F", "backward": "B"}, **told))
        assert (trace.known_as, trace.num_microbatches) == ("gpipe", 3)
        assert dict(trace.skipped) == {"kernel": 12}


def test_ranks_are_numbered_by_value_and_by_digits_to_the_nanosecond(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    events = [
        f'{{"ph": "X", "tid": {tid}, "name": "{name}", "ts": 1732212345678901.{at}, "dur": {dur}}}'
        for tid in ('"gpu10"', '"gpu9"', 3, 20)
        for name, at, dur in (("fwd", 123, 0.001), ("bwd", 124, 0.002))
    ]
    path.write_text(f"[{', '.join(events)}]")
    trace = read_chrome_traces([path], by(BY_NAME))
    assert trace.rank_labels == ("3", "20", "gpu9", "gpu10")
    assert [len(order) for order in trace.orders] == [2] * 4


def test_a_file_for_each_rank_may_be_zipped(tmp_path: Path) -> None:
    paths = [tmp_path / f"rank{rank}.json.gz" for rank in range(11)]
    for rank, path in enumerate(paths):
        mine = [e | {"pid": 1} for e in traced(Pipeline("1f1b", 11, 4)) if e["pid"] == 40 + rank]
        path.write_bytes(gzip.compress(json.dumps({"traceEvents": mine}).encode()))
    assert read_chrome_traces(paths, by(PYTORCH)).known_as == "1f1b"


def test_trace_that_pytorch_recorded_is_the_schedule_it_ran() -> None:
    paths = [EXAMPLES / f"interleaved-zb-2x4.rank{rank}.json" for rank in range(2)]
    trace = read_chrome_traces(paths, by(PYTORCH, within=r"^ProfilerStep#2$"))
    assert trace.known_as == "interleaved-zb"
    assert (trace.num_chunks, trace.num_microbatches) == (2, 4)
    assert trace.skipped["operations of other iterations"] == 48
    assert trace.skipped["PP:0SEND_F0"] == 2
    with pytest.raises(InputError, match="several iterations"):
        read_chrome_traces(paths, by(PYTORCH))
    # An event that names two operations is both, in its order.
    paths = [EXAMPLES / f"dualpipe-v-2x8.rank{rank}.json" for rank in range(2)]
    anywhere = {
        name: text.replace("^PP:", r"\b").replace("$", r"\b") for name, text in PYTORCH.items()
    }
    trace = read_chrome_traces(paths, by(anywhere))
    assert trace.known_as == "dualpipe-v"
    assert trace.skipped["PP:0WAIT_SEND_F0"] == 1


def test_names_may_tell_the_rank_and_leave_the_first_chunk_out(tmp_path: Path) -> None:
    names = [f"{way} on {r}{c}" for way in ("fwd", "bwd") for c in ("", ".1") for r in (0, 1)]
    order = [0, 2, 6, 4, 1, 3, 7, 5]
    events = [simple(names[i], at, 1, tid=i % 2) for at, i in enumerate(order)]
    rest = r" on (?P<rank>\d)(\.(?P<chunk>\d))?$"
    mapping = {instruction: name + rest for instruction, name in BY_NAME.items()}
    trace = read(tmp_path, events, by(mapping))
    assert [op.profile_stage for op in trace.orders[0]] == [0, 2, 2, 0]
    assert [op.profile_stage for op in trace.orders[1]] == [1, 3, 3, 1]


def test_only_events_of_a_category_count(tmp_path: Path) -> None:
    cpu = traced(Pipeline("1f1b", 2, 4))
    gpu = [{**event, "cat": "gpu_user_annotation", "tid": 8} for event in cpu]
    # As ranks of their own, too, they would make a pipeline of four ranks.
    for mixed in (cpu + gpu, cpu + [{**event, "pid": 90} for event in gpu]):
        words = refused(tmp_path, mixed, by(PYTORCH))
        assert "gpu_user_annotation and user_annotation" in words
        assert "--category" in words
    trace = read(tmp_path, cpu + gpu, by(PYTORCH, category="^gpu_"))
    assert trace.known_as == "1f1b"
    assert sum(trace.skipped.values()) == len(cpu)


def test_constant_operations_need_not_tell_their_microbatch(tmp_path: Path) -> None:
    names = ["load", "fwd 8", "load", "fwd 9", "bwd 8", "bwd 9", "step"]
    events = [simple(name, at, 1) for at, name in enumerate(names)]
    numbered = {name: rf"{text} (?P<microbatch>\d+)" for name, text in BY_NAME.items()}
    trace = read(tmp_path, events, by({"load": "^load", **numbered, "optimizer": "^step"}))
    ran = "0load0 0F0 0load1 0F1 0B0 0B1 0optimizer0"
    assert " ".join(map(short_name, trace.orders[0])) == ran
    assert trace.known_as == "gpipe"


def test_overlapping_operations_of_a_gpu_are_refused_naming_both(tmp_path: Path) -> None:
    said = refused(tmp_path, [simple("bwd b", 14.999, 3), simple("fwd a", 10, 5)])
    assert '"fwd a" (10.000 to 15.000 us) and "bwd b" (14.999 to 17.999 us) overlap on' in said
    assert "DualPipeV's OVERLAP_F_B" in said


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"instructions": {"for ward": "f"}}, 'must be a name such as "forward"'),
        ({"instructions": {"forward": "("}}, "instructions.forward must be a regular expression"),
        ({"instructions": {"forward": "(?P<mb>x)"}}, "no named groups but chunk, microbatch, rank"),
        ({"instructions": {"backward": "^y"}}, '2 events match nothing, most often: "fwd" (1)'),
        ({"instructions": {"forward": "wd", "backward": "^bwd"}}, "the expressions of backward"),
        ({"rank": "args.gpu"}, "does not say its rank (by args.gpu)"),
        ({"rank": "gpu"}, "rank String should match pattern"),
        ({"chunk": "gpu"}, "chunk String should match pattern"),
        ({"microbatch": "args.word"}, "microbatch must be a whole number"),
        ({"microbatch": "args.none"}, "does not say its microbatch (by args.none)"),
        ({"category": "["}, "category must be a regular expression"),
        ({"within": "nowhere"}, "no event is a backward"),
    ],
)
def test_mapping_that_does_not_fit_the_trace_is_refused(
    asked: dict[str, Any], words: str, tmp_path: Path
) -> None:
    events = [simple(name, at, 1, args={"word": "first"}) for at, name in enumerate(("fwd", "bwd"))]
    with pytest.raises(InputError, match=re.escape(words)):
        read(tmp_path, events, by(**{"instructions": BY_NAME, **asked}))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{}", "no list of events under traceEvents"),
        (b"3", "no list of events"),
        (b"[", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[1]", "event 0 must be an object, not 1"),
        (b'[{"ph": "X", "name": "fwd"}]', "ts must be a number of microseconds, not null"),
        (b'[{"ph": "X", "name": "fwd", "ts": "3"}]', 'a number of microseconds, not "3"'),
        (b'[{"ph": "X", "name": "fwd", "ts": NaN}]', "ts must be a number"),
        (b'[{"ph": "X", "name": "fwd", "ts": 1e999999999}]', "ts must be a number"),
        (b'[{"ph": "X", "name": "fwd", "ts": 1e9999999999999999999}]', "a number too large"),
        (b'[{"ph": "X", "name": "fwd", "ts": 1e-9999999999999999999}]', "a number too large"),
        (b'[{"ph": "X", "name": "fwd", "ts": 3, "dur": -1}]', "dur must be a number"),
        (b"[]", "no event is a backward"),
        (gzip.compress(b"[]", mtime=0)[:-9], "cannot be read"),
        (b"\x1f\x8b\x08junkjunkjunkjunk", "cannot be read"),
    ],
)
def test_unusable_file_is_refused(content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_bytes(content)
    with pytest.raises(InputError, match=re.escape(words)) as error:
        read_chrome_traces([tmp_path / "trace.json"], by(BY_NAME))
    assert "\n" not in str(error.value)
