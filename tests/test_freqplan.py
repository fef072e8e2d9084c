from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli_helpers import small_profile
from envplan.enforce.apply import apply_plan
from envplan.enforce.clock_files import read_clocks
from envplan.enforce.freqplan import FrequencyPlan
from envplan.enforce.topology import Topology
from envplan.errors import InputError
from envplan.pipeline import Pipeline
from envplan.solve import trace_frontier


@pytest.fixture(scope="module")
def freqplan() -> FrequencyPlan:
    profile = small_profile()
    frontier = trace_frontier(Pipeline("1f1b", 2, 4), profile, gpus_per_stage=2)
    plan = frontier.plan().with_ladder(frontier.ladder(3))
    return apply_plan(plan, profile, topology=Topology.for_job(plan.job))


def refused(text: str, tmp_path: Path) -> str:
    path = tmp_path / "f.json"
    path.write_text(text)
    with pytest.raises(InputError) as error:
        FrequencyPlan.load(path)
    message = str(error.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    return message


def test_saved_frequency_plan_loads_as_it_was(freqplan: FrequencyPlan, tmp_path: Path) -> None:
    freqplan.save(tmp_path / "f.json")
    assert FrequencyPlan.load(tmp_path / "f.json") == freqplan
    assert [path.name for path in tmp_path.iterdir()] == ["f.json"]
    lines = [line for line in freqplan.to_json().splitlines() if line.startswith('    {"rank"')]
    assert len(lines) == 4  # a rank a line


def test_truncated_file_is_refused_with_line_and_column(
    freqplan: FrequencyPlan, tmp_path: Path
) -> None:
    text = freqplan.to_json()
    for length in (0, 1, 50, len(text) // 2, len(text) - 3):
        assert "not valid JSON" in refused(text[:length], tmp_path)


@pytest.mark.parametrize(
    "text", ["[]", "{}", "3", '{"schema": "envplan/freqplan/v0"}', '{"schema": "envplan/plan/v1"}']
)
def test_older_schema_or_another_file_is_refused(text: str, tmp_path: Path) -> None:
    assert "is not a frequency plan" in refused(text, tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(world_size=8), ["world_size is 8", "there are 4 ranks"]),
        (lambda d: d["layout"].update(dp=2), ["the layout makes 8"]),
        (lambda d: d["layout"].update(tp=0), ["layout.tp"]),
        (lambda d: d["layout"].update(rank_order="pp"), ["leaves out tp"]),
        (lambda d: d["ranks"].pop(), ["there are 3 ranks"]),
        (lambda d: d["ranks"].reverse(), ["ranks[0] is rank 3"]),
        (lambda d: d["ranks"][1].update(stage=1), ["ranks[1]", "stage 0 there"]),
        (lambda d: d["ranks"][1]["operations"].pop(), ["ranks 0 and 1", "different operations"]),
        (lambda d: d["ranks"][1]["operations"][0].pop(), ["ranks[1].operations[0]", "missing"]),
        (lambda d: d["ranks"][1]["operations"][0].append(1), ["ranks[1].operations[0]"]),
        (lambda d: d["ranks"][1]["operations"][0].__setitem__(3, 1.5), ["operations[0][3]"]),
        (lambda d: d["ranks"][1]["operations"][0].__setitem__(3, "9"), ["operations[0][3]"]),
        (lambda d: d["ranks"][0].update(clocks_mhz=[7]), ["ranks[0]", "7 MHz"]),
        (lambda d: d["ranks"][0].update(clocks_mhz=[]), ["ranks[0]", "MHz"]),
        (lambda d: d["supported_clocks_mhz"].pop(), ["1740 MHz"]),
        (lambda d: d["ladder"].reverse(), ["not slower"]),
        (lambda d: d["ladder"][0]["frequencies_mhz"].pop(), ["ladder[0]", "every operation"]),
        (lambda d: d["ladder"][0]["frequencies_mhz"][1].pop(), ["ladder[0]", "every operation"]),
        (lambda d: d["ladder"][0]["frequencies_mhz"][1].__setitem__(0, 9), ["9 MHz on stage 1"]),
        (lambda d: d.update(plan_sha256="x"), ["plan_sha256"]),
        (lambda d: d.pop("ranks"), ["ranks is missing"]),
        (lambda d: d.update(hosts=[]), ["hosts is not a field of a frequency plan"]),
    ],
)
def test_file_that_contradicts_itself_is_refused_by_name(
    freqplan: FrequencyPlan, tmp_path: Path, change: Callable[[Any], None], words: list[str]
) -> None:
    document = json.loads(freqplan.to_json())
    change(document)
    message = refused(json.dumps(document), tmp_path)
    for word in words:
        assert word in message


def test_csv_has_a_row_for_every_operation_of_every_rank(freqplan: FrequencyPlan) -> None:
    lines = freqplan.to_csv().splitlines()
    assert lines[0] == "rank,stage,device,position,instruction,microbatch,chunk,frequency_mhz"
    assert len(lines) == 1 + 4 * 8
    assert lines[1] == f"0,0,0,0,forward,0,0,{freqplan.ranks[0].frequencies[0]}"


def test_zeus_gets_the_clock_before_for_what_sets_none(freqplan: FrequencyPlan) -> None:
    document = json.loads(freqplan.to_json())
    for rank in document["ranks"][:2]:
        rank["operations"][0][3] = rank["operations"][3][3] = 0
    schedule = ast.literal_eval(FrequencyPlan.from_document(document).to_zeus())
    clocks = [mhz for _, mhz in schedule[0]]
    assert clocks[0] == clocks[1]
    assert clocks[3] == clocks[2]
    for rank in document["ranks"][:2]:
        for operation in rank["operations"]:
            operation[3] = 0
    with pytest.raises(InputError, match="no operation with a clock"):
        FrequencyPlan.from_document(document).to_zeus()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[[('forward', 17", ["cut short"]),
        (b"", ["cut short"]),
        (b"__import__('os').getcwd()", ["not run"]),
        (b"[[('forward', 10 ** 3)]]", ["not run"]),
        (b"[" * 5000, ["cut short"]),
        (b"3", ["a list for each stage"]),
        (b"[3, 4]", ["a list for each stage"]),
        (b"[[]]", ["has 1 stages; the pipeline has 2"]),
        (b"[[('forward', 1740), ('forward', -1)], []]", ["[0][1]", "no clock in MHz"]),
        (b"[[('forward', True)], []]", ["[0][0]"]),
        (b"[[['forward', 1740]], []]", ["[0][0]"]),
        (b"[[(1740, 'forward')], []]", ["[0][0]"]),
        (b"[[('forward', 1740, 1)], []]", ["[0][0]"]),
        (b"#\xff", ["UTF-8"]),
        (b"[[('\x00', 1)]]", ["not UTF-8"]),
    ],
)
def test_anything_but_lists_of_clocks_is_refused_and_not_run(
    content: bytes, words: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "schedule.py"
    path.write_bytes(content)
    with pytest.raises(InputError) as error:
        read_clocks(path, Pipeline("1f1b", num_stages=2, num_microbatches=2))
    assert str(error.value).startswith(str(path))
    for word in words:
        assert word in str(error.value)


def test_huge_or_missing_schedule_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = Pipeline("1f1b", num_stages=2, num_microbatches=2)
    monkeypatch.setattr("envplan.enforce.clock_files.MAX_FILE_BYTES", 10)
    (tmp_path / "schedule.py").write_text("[[('forward', 1740)]]")
    with pytest.raises(InputError, match="is larger than"):
        read_clocks(tmp_path / "schedule.py", pipeline)
    with pytest.raises(InputError, match="No such file"):
        read_clocks(tmp_path / "none.py", pipeline)
