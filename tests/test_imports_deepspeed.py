"""DeepSpeed's instructions, without DeepSpeed: the streams come from a schedule of our own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envplan.errors import InputError
from envplan.pipeline import Operation, Pipeline
from envplan.pipeline.dependencies import short_name
from envplan.pipeline.imports import from_deepspeed, read_deepspeed

EXAMPLES = Path(__file__).parents[1] / "examples" / "schedules"


class Printed:
    """An instruction as DeepSpeed's print."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


class Listed:
    """A schedule of one stage: its instructions, step by step."""

    def __init__(self, *listed: list[str]) -> None:
        self.listed = listed

    def steps(self) -> Iterator[list[Printed]]:
        for commands in self.listed:
            yield list(map(Printed, commands))


def train_schedule(microbatches: int, stages: int, stage: int) -> Listed:
    """1F1B in the clockwork that DeepSpeed documents: every stage does one thing a step.

    Forwards of stage s fall on the steps s, s + 2, s + 4..., its backwards on the steps between,
    from 2 S - s - 1 on. A stage keeps as many buffers as microbatches are under way on it, at least
    two, and uses them in turns. What a step computes is sent in the next one.
    """
    buffers = max(2, min(stages - stage, microbatches))
    last, is_first, is_last = 2 * (microbatches + stages - 1), stage == 0, stage == stages - 1
    listed: list[list[str]] = []
    send = ""
    for step in range(last):
        commands, send = [send] if send else [], ""
        for name, first in (("Forward", stage), ("Backward", 2 * stages - stage - 1)):
            microbatch, odd = divmod(step - first, 2)
            if odd or not 0 <= microbatch < microbatches:
                continue
            buffer = f"(buffer_id={microbatch % buffers})"
            forward = name == "Forward"
            what = "Activation" if forward else "Grad"
            commands += [f"Recv{what}{buffer}"] * (not (is_first if forward else is_last))
            commands += [f"LoadMicroBatch{buffer}"] * (forward and (is_first or is_last))
            commands.append(f"{name}Pass{buffer}")
            send = "" if (is_last if forward else is_first) else f"Send{what}{buffer}"
        listed.append(commands)
    listed[-1] += ["ReduceTiedGrads()", "ReduceGrads()", "OptimizerStep()"]
    return Listed(*listed)


def train(microbatches: int, stages: int) -> list[Listed]:
    return [train_schedule(microbatches, stages, stage) for stage in range(stages)]


F0, F1, B0 = "ForwardPass(buffer_id=0)", "ForwardPass(buffer_id=1)", "BackwardPass(buffer_id=0)"


@given(stages=st.integers(1, 6), microbatches=st.integers(1, 14))
@settings(max_examples=60, deadline=None)
def test_train_schedule_is_1f1b(stages: int, microbatches: int) -> None:
    read = from_deepspeed(train(microbatches, stages))
    assert read.known_as == "1f1b"
    assert (
        Pipeline.from_imported(read).operations == Pipeline("1f1b", stages, microbatches).operations
    )


def test_buffers_tell_which_microbatch_a_backward_is_of() -> None:
    read = from_deepspeed([Listed([F0, F1, B0.replace("0", "1"), F1, B0, B0.replace("0", "1")])])
    assert list(map(short_name, read.orders[0])) == ["0F0", "0F1", "0B1", "0F2", "0B0", "0B2"]


def test_other_instructions_are_counted_or_kept() -> None:
    read = from_deepspeed(train(3, 2))
    assert dict(read.skipped) == {
        "LoadMicroBatch": 6,
        "SendActivation": 3,
        "RecvActivation": 3,
        "SendGrad": 3,
        "RecvGrad": 3,
        "ReduceTiedGrads": 2,
        "ReduceGrads": 2,
        "OptimizerStep": 2,
    }
    kept = from_deepspeed(train(3, 2), keep=("load", "all_reduce", "optimizer"))
    assert kept.orders[0][0] == Operation(0, "load", 0, 0, 0)
    assert kept.orders[1][-2:] == (
        Operation(1, "all_reduce", 0, 0, 1),
        Operation(1, "optimizer", 0, 0, 1),
    )
    assert [op.microbatch for op in kept.orders[1] if op.instruction == "load"] == [0, 1, 2]
    assert kept.known_as == "1f1b"
    assert "OptimizerStep" not in kept.skipped
    Pipeline.from_imported(kept)


@given(stages=st.integers(1, 4), microbatches=st.integers(1, 6))
@settings(max_examples=30, deadline=None)
def test_files_say_the_same_as_objects(
    stages: int, microbatches: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("files")
    schedules = train(microbatches, stages)
    lines = ["# printed"]
    for stage, schedule in enumerate(schedules):
        lines += [f"stage {stage}:", *map(str, schedule.steps()), ""]
    (folder / "train.txt").write_text("\n".join(lines))
    assert read_deepspeed(folder / "train.txt") == from_deepspeed(schedules)


def test_example_is_what_deepspeed_runs() -> None:
    read = read_deepspeed(EXAMPLES / "deepspeed-train-4x8.txt")
    assert read == from_deepspeed(train(8, 4))


@pytest.mark.parametrize(
    ("commands", "words"),
    [
        ([F1, B0], 'stage 0: "BackwardPass(buffer_id=0)" has no forward before'),
        ([F0, F0, B0], "would overwrite microbatch 0"),
        ([F0, B0, "Sleep(seconds=1)"], '"Sleep(seconds=1)" is no instruction'),
        (["ForwardPass()", B0], "must name a buffer_id"),
        (["ForwardPass(phase=1, buffer_id=0)", B0], "must name a buffer_id alone"),
        ([F0], "no stage has a BackwardPass"),
    ],
)
def test_instructions_that_cannot_run_are_refused(commands: list[str], words: str) -> None:
    with pytest.raises(InputError, match=re.escape(words)):
        from_deepspeed([Listed(commands)])
    with pytest.raises(InputError, match="give a list of schedules"):
        from_deepspeed([commands])
    with pytest.raises(InputError, match="sleep cannot be kept; these can be kept: load, opt"):
        from_deepspeed([Listed([F0, B0])], keep=["sleep"])


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("[ForwardPass(buffer_id=0)]\n", 1, 'where a line "stage 0" should'),
        ("stage 0\nForwardPass(buffer_id=0)\nstage 2\n", 3, 'a line "stage 1" should'),
        ("stage 0\n[ForwardPass(buffer_id=0), nothing]\n", 2, "no list of instructions"),
        ("stage 0\nForwardPass(buffer_id=x)\nBackwardPass(0)", 2, "must name a buffer_id"),
        ("stage 0\n\nForwardPass(buffer_id=0)\nBackwardPass(buffer_id=3)\n", 4, "has no forward"),
        ("", None, "no stage has a BackwardPass"),
    ],
)
def test_unusable_file_is_refused_saying_where(
    text: str, line: int | None, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "train.txt"
    path.write_text(text)
    with pytest.raises(InputError) as error:
        read_deepspeed(path)
    assert words in error.value.message
    assert "\n" not in str(error.value)
    assert error.value.path == str(path)
    if line is not None:
        assert error.value.line == line
