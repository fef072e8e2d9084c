"""The rules of Chrome's trace-event format that viewers rely on, checked on the written text."""

from __future__ import annotations

import json
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cli_helpers import small_profile
from envplan.chrome_trace import save_chrome_trace
from envplan.pipeline import Pipeline
from envplan.simulation import simulate
from envplan.solve import trace_frontier

PHASES = {"M": {"args"}, "X": {"ts", "dur", "cat", "args"}, "C": {"ts", "args"}}


@pytest.mark.parametrize("met", [{}, {"noise": 0.05, "switch_latency": 0.03, "sync_time": 9.0}])
def test_a_trace_keeps_the_rules_and_says_what_the_timeline_does(
    met: dict[str, Any], tmp_path: Path
) -> None:
    profile = small_profile(stages=3)
    plan = trace_frontier(Pipeline("1f1b", 3, 5), profile).plan(slowdown=0.03)
    shown = simulate(plan, profile, **met)
    save_chrome_trace(shown, tmp_path / "trace.json")
    # Decimals, not floats: what a viewer makes of the text must not hang on its rounding.
    document = json.loads((tmp_path / "trace.json").read_text(), parse_float=Decimal)
    assert document["displayTimeUnit"] in ("ms", "ns")
    assert document["otherData"]["profile_source"] == "modelled"
    events = document["traceEvents"]
    # Every event has the fields of its phase.
    for event in events:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert event["ph"] in PHASES
        assert PHASES[event["ph"]] <= set(event)
        if event["ph"] == "X":
            assert isinstance(event["tid"], int)
            assert event["dur"] > 0
        for field in ("ts", "dur"):
            assert event.get(field, 0) >= 0
            assert event.get(field, Decimal(0)) % Decimal("0.001") == 0
    # Every stage has a named track with all its operations.
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(names.values()) == ["stage 0", "stage 1", "stage 2"]
    slices = [e for e in events if e["ph"] == "X"]
    columns = shown.pipeline.operations, shown.replay.starts_ns, shown.replay.finishes_ns
    for event, op, start, finish in zip(slices, *columns, strict=True):
        assert names[event["tid"]] == f"stage {op.stage}"
        assert event["ts"] * 1000 == int(start)
        assert event["dur"] * 1000 == int(finish - start)
    for one, other in pairwise(slices):
        assert one["tid"] != other["tid"] or one["ts"] + one["dur"] <= other["ts"]
    # Counters are numbers in time order.
    counters: dict[str, list[Any]] = {}
    for event in events:
        if event["ph"] == "C":
            counters.setdefault(event["name"], []).append(event)
    assert set(counters) == {*(f"stage {k} clock" for k in range(3)), "power of all GPUs"}
    for samples in counters.values():
        times = [sample["ts"] for sample in samples]
        assert times == sorted(times)
        assert (times[0], times[-1] * 1000) == (0, shown.sync_time_ns)
        for sample in samples:
            (value,) = sample["args"].values()
            assert isinstance(value, int | Decimal)
            assert not isinstance(value, bool)
