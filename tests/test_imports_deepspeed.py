"""DeepSpeed's instructions, without DeepSpeed: the streams come from a schedule of our own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envplan.errors import InputError
from envplan.pipeline import Operation, Pipeline
from envplan.pipeline.imports import from_deepspeed, read_deepspeed

EXAMPLES = Path(__file__).parents[1] / "examples" / "schedules"


class Instruction:
    """An instruction as DeepSpeed makes them: a class for each kind, arguments in `kwargs`."""

    def __init__(self, **kwargs: Any) -> None:
        self.kwargs = kwargs

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.kwargs.items())
        return f"{type(self).__name__}({arguments})"


def make(name: str, **kwargs: Any) -> Instruction:
    instruction: Instruction = type(name, (Instruction,), {})(**kwargs)
    return instruction


class Train:
    """1F1B in the clockwork that DeepSpeed documents: every stage does one thing a step.

    Forwards of stage s fall on the steps s, s + 2, s + 4..., its backwards on the steps between,
    from 2 S - s - 1 on. A stage keeps as many buffers as microbatches are under way on it, at least
    two, and uses them in turns. What a step computes is sent in the next one.
    """

    def __init__(self, microbatches: int, stages: int, stage: int) -> None:
        self.microbatches, self.stages, self.stage = microbatches, stages, stage
        self.buffers = max(2, min(stages - stage, microbatches))

    def at(self, step: int) -> tuple[str, int] | None:
        for kind, first in (
            ("forward", self.stage),
            ("backward", 2 * self.stages - self.stage - 1),
        ):
            microbatch, odd = divmod(step - first, 2)
            if not odd and 0 <= microbatch < self.microbatches:
                return kind, microbatch
        return None

    def steps(self) -> Iterator[list[Instruction]]:
        last_step = 2 * (self.microbatches + self.stages - 1) - 1
        before: tuple[str, int] | None = None
        for step in range(last_step + 1):
            now = self.at(step)
            commands = [*self.sends(before), *self.receives(now)]
            if now is not None:
                name = "ForwardPass" if now[0] == "forward" else "BackwardPass"
                commands.append(make(name, buffer_id=now[1] % self.buffers))
            if step == last_step:
                commands += map(make, ("ReduceTiedGrads", "ReduceGrads", "OptimizerStep"))
            yield commands
            before = now

    def sends(self, done: tuple[str, int] | None) -> Iterator[Instruction]:
        if done is None:
            return
        buffer = done[1] % self.buffers
        if done[0] == "forward" and self.stage < self.stages - 1:
            yield make("SendActivation", buffer_id=buffer)
        if done[0] == "backward" and self.stage > 0:
            yield make("SendGrad", buffer_id=buffer)

    def receives(self, wanted: tuple[str, int] | None) -> Iterator[Instruction]:
        if wanted is None:
            return
        buffer = wanted[1] % self.buffers
        if wanted[0] == "forward" and self.stage > 0:
            yield make("RecvActivation", buffer_id=buffer)
        if wanted[0] == "backward" and self.stage < self.stages - 1:
            yield make("RecvGrad", buffer_id=buffer)
        if wanted[0] == "forward" and self.stage in (0, self.stages - 1):
            yield make("LoadMicroBatch", buffer_id=buffer)


class Listed:
    """A schedule of one step that consists of these instructions."""

    def __init__(self, *commands: Instruction) -> None:
        self.commands = commands

    def steps(self) -> list[list[Instruction]]:
        return [list(self.commands)]


def forward(buffer: int, **kwargs: Any) -> Instruction:
    return make("ForwardPass", buffer_id=buffer, **kwargs)


def backward(buffer: int, **kwargs: Any) -> Instruction:
    return make("BackwardPass", buffer_id=buffer, **kwargs)


def train(microbatches: int, stages: int) -> list[Train]:
    return [Train(microbatches, stages, stage) for stage in range(stages)]


@given(stages=st.integers(1, 6), microbatches=st.integers(1, 14))
@settings(max_examples=60, deadline=None)
def test_train_schedule_is_1f1b(stages: int, microbatches: int) -> None:
    read = from_deepspeed(train(microbatches, stages))
    assert read.known_as == "1f1b"
    assert (
        Pipeline.from_imported(read).operations == Pipeline("1f1b", stages, microbatches).operations
    )


def test_buffers_tell_which_microbatch_a_backward_is_of() -> None:
    read = from_deepspeed(
        [Listed(forward(4), forward(7), backward(7), forward(7), backward(4), backward(7))]
    )
    assert [(op.instruction, op.microbatch) for op in read.orders[0]] == [
        ("forward", 0),
        ("forward", 1),
        ("backward", 1),
        ("forward", 2),
        ("backward", 0),
        ("backward", 2),
    ]


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
    as_json = [[[repr(c) for c in step] for step in schedule.steps()] for schedule in schedules]
    (folder / "train.json").write_text(json.dumps(as_json))
    lines = ["# printed"]
    for stage, schedule in enumerate(schedules):
        lines += [f"stage {stage}:", *map(str, schedule.steps()), ""]
    (folder / "train.txt").write_text("\n".join(lines))
    assert read_deepspeed(folder / "train.json") == from_deepspeed(schedules)
    assert read_deepspeed(folder / "train.txt") == from_deepspeed(schedules)


def test_example_is_what_deepspeed_runs() -> None:
    read = read_deepspeed(EXAMPLES / "deepspeed-train-4x8.txt")
    assert read == from_deepspeed(train(8, 4))


@pytest.mark.parametrize(
    ("commands", "words"),
    [
        ([forward(0), backward(1)], "stage 0: BackwardPass(buffer_id=1) has no forward"),
        ([forward(0), forward(0), backward(0)], "would overwrite microbatch 0"),
        ([forward(0), backward(0), make("Sleep", seconds=1)], "Sleep(seconds=1) is no instruction"),
        ([make("ForwardPass"), backward(0)], "must name a buffer_id"),
        ([forward(0, phase=1), backward(0)], "must name a buffer_id, and nothing else"),
        ([forward(0)], "no stage has a BackwardPass"),
    ],
)
def test_instructions_that_cannot_run_are_refused(commands: list[Instruction], words: str) -> None:
    with pytest.raises(InputError, match=re.escape(words)):
        from_deepspeed([Listed(*commands)])


def test_one_schedule_instead_of_a_list_is_refused() -> None:
    with pytest.raises(InputError, match="give a list of schedules"):
        from_deepspeed([[forward(0)], [backward(0)]])
    with pytest.raises(InputError, match="no stage"):
        from_deepspeed([])


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("[ForwardPass(buffer_id=0)]\n", None, "not valid JSON"),
        ("ForwardPass(buffer_id=0)\n", 1, 'where a line "stage 0" should'),
        (
            "stage 0\nForwardPass(buffer_id=0)\nstage 2\n",
            3,
            'a line "stage 1" should',
        ),
        ("stage 0\n[ForwardPass(buffer_id=0), nothing]\n", 2, "no list of instructions"),
        ("stage 0\nForwardPass(buffer_id=x)\n", 2, "no instruction such as"),
        ("stage 0\nForwardPass(0)\n", 2, "no instruction such as"),
        ("stage 0\n\nForwardPass(buffer_id=0)\nBackwardPass(buffer_id=3)\n", 4, "has no forward"),
        ('[[["ForwardPass"]]]', None, "no instruction such as"),
        ("[[[1]]]", None, "[0][0][0] should be a valid string, not 1"),
        ('[["ForwardPass(buffer_id=0)"]]', None, "[0][0] should be a valid list"),
        ("[1]", None, "[0] should be a valid list"),
        ("[" * 100_000, None, "not valid JSON"),
        ("[[[" + "9" * 5000 + "]]]", None, "not valid JSON"),
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
