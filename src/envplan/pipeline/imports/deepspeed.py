"""DeepSpeed's pipeline schedules: the instructions that each stage's schedule yields, step by step.

An instruction names a buffer, not a microbatch. Forwards take microbatches in order, so the n-th
ForwardPass of a stage (and of a phase, in schedules with two) is that of microbatch n, and a
BackwardPass is that of the microbatch that the latest ForwardPass put into its buffer. Sends and
receives say nothing that data dependencies do not; that they block is not modelled.

DeepSpeed is not needed: instructions are read by their class name and `kwargs`, or from a file. As
JSON, that is a list of stages, each a list of steps, each a list of instructions as they print:

    [[["LoadMicroBatch(buffer_id=0)", "ForwardPass(buffer_id=0)"], ["..."]], [["..."]]]

As text, it is a line `stage N` before the steps of each stage, and a line for each step:

    stage 0
    [LoadMicroBatch(buffer_id=0), ForwardPass(buffer_id=0)]
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from envplan.errors import InputError, shown
from envplan.pipeline.imports.steps import (
    MOST_DIGITS,
    ImportedSchedule,
    Step,
    located,
    parsed_json,
    place,
    read_text,
)

__all__ = ["KEEPABLE", "from_deepspeed", "read_deepspeed"]

_FORWARD: Final = "ForwardPass"
_BACKWARD: Final = "BackwardPass"
_CONSTANT: Final = {
    "LoadMicroBatch": "load",
    "OptimizerStep": "optimizer",
    "ReduceGrads": "all_reduce",
    "ReduceTiedGrads": "reduce_tied_grads",
}
#: What may be kept as operations beside forward and backward.
KEEPABLE: Final = tuple(_CONSTANT.values())

_TRANSFERS: Final = ("SendActivation", "RecvActivation", "SendGrad", "RecvGrad", "CommitP2P")
_PHASES: Final = 2
_CALL: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)\(([^()]*)\)")
_ARGUMENT: Final = re.compile(rf"([a-z_]+)=([0-9]{{1,{MOST_DIGITS}}})")
_STAGE: Final = re.compile(rf"stage\s+([0-9]{{1,{MOST_DIGITS}}})\s*:?", re.IGNORECASE)


@dataclass(frozen=True)
class _Instruction:
    name: str
    arguments: dict[str, int]
    line: int | None = None

    def __str__(self) -> str:
        arguments = ", ".join(f"{name}={value}" for name, value in self.arguments.items())
        return f"{self.name}({arguments})"

    @property
    def phase(self) -> int:
        return self.arguments.get("phase", 0)


def from_deepspeed(schedules: Iterable[Any], *, keep: Collection[str] = ()) -> ImportedSchedule:
    """The order in which DeepSpeed's schedule objects run their stages.

    Args:
        schedules: a schedule for each stage in order, such as
            `[TrainSchedule(micro_batches=8, stages=4, stage_id=s) for s in range(4)]`.
        keep: what to keep as operations of constant time: any of KEEPABLE.

    Raises:
        InputError: names the stage and the instruction that is not known or cannot run.
    """
    stages = []
    for schedule in schedules:
        if not callable(getattr(schedule, "steps", None)):
            raise InputError(
                f"a {type(schedule).__name__} has no steps(); give a list of schedules, one a stage"
            )
        stages.append([_live(command) for step in schedule.steps() for command in step])
    return _assigned(stages, keep)


def _live(command: Any) -> _Instruction:
    arguments = getattr(command, "kwargs", {})
    numbers = {name: value for name, value in arguments.items() if isinstance(value, int)}
    return _Instruction(type(command).__name__, numbers)


def read_deepspeed(path: str | os.PathLike[str], *, keep: Collection[str] = ()) -> ImportedSchedule:
    """Read the instructions of all stages from a JSON or text file.

    Args:
        keep: see from_deepspeed.

    Raises:
        InputError: the file cannot be read; or as for from_deepspeed, with the line of a text file.
    """
    text = read_text(path)
    try:
        stages = _from_json(text) if text.lstrip().startswith("[") else _from_text(text)
        return _assigned(stages, keep)
    except InputError as error:
        raise located(error, path) from None


def _from_json(text: str) -> list[list[_Instruction]]:
    stages = parsed_json(text)
    return [
        [
            _parsed(command, f"stage {stage}")
            for step in _list(steps, f"stage {stage}")
            for command in _list(step, f"stage {stage}: a step")
        ]
        for stage, steps in enumerate(_list(stages, "the file"))
    ]


def _list(value: object, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise InputError(f"{what} must be a list, not {shown(value)}")
    return value


def _from_text(text: str) -> list[list[_Instruction]]:
    stages: list[list[_Instruction]] = []
    for line, content in enumerate(map(str.strip, text.splitlines()), 1):
        if not content or content.startswith("#"):
            continue
        if header := _STAGE.fullmatch(content):
            if int(header[1]) != len(stages):
                raise InputError(
                    f"stage {int(header[1])} comes where stage {len(stages)} should", line=line
                )
            stages.append([])
        elif not stages:
            raise InputError(
                f'starts with {shown(content)}; a line "stage 0" must come before the steps of '
                "stage 0",
                line=line,
            )
        else:
            stages[-1] += _printed_step(content, line)
    return stages


def _printed_step(content: str, line: int) -> list[_Instruction]:
    """The instructions of a step as Python prints the list of them."""
    rest = _CALL.sub("", content)
    if rest.strip("[], \t"):
        raise InputError(f"{shown(content)} is no list of instructions", line=line)
    return [_parsed(call[0], None, line) for call in _CALL.finditer(content)]


def _parsed(command: object, where: str | None, line: int | None = None) -> _Instruction:
    call = _CALL.fullmatch(command) if isinstance(command, str) else None
    arguments = {}
    if call is not None and call[2].strip():
        for argument in call[2].split(","):
            pair = _ARGUMENT.fullmatch(argument.strip())
            if pair is None:
                call = None
                break
            arguments[pair[1]] = int(pair[2])
    if call is None:
        raise InputError(
            (f"{where}: " if where else "")
            + f'{shown(command)} is no instruction such as "ForwardPass(buffer_id=0)"',
            line=line,
        )
    return _Instruction(call[1], arguments, line)


def _assigned(stages: Sequence[Sequence[_Instruction]], keep: Collection[str]) -> ImportedSchedule:
    commands = [command for stage in stages for command in stage]
    if not any(command.name == _BACKWARD for command in commands):
        raise InputError(f"no stage has a {_BACKWARD}: only schedules for training can be planned")
    skipped: Counter[str] = Counter()
    ranks = [
        _Stage(rank, len(stages), keep, skipped).run(stage) for rank, stage in enumerate(stages)
    ]
    return place(ranks, skipped)


class _Stage:
    """Follows one stage's instructions to find out which microbatch each is about."""

    def __init__(
        self, rank: int, num_ranks: int, keep: Collection[str], skipped: Counter[str]
    ) -> None:
        self._rank, self._num_ranks, self._keep, self._skipped = rank, num_ranks, keep, skipped
        self._buffers: dict[int, tuple[int, int]] = {}  # buffer -> (phase, microbatch) in it
        self._done: Counter[tuple[str, int]] = Counter()

    def run(self, commands: Iterable[_Instruction]) -> list[Step]:
        steps = []
        for command in commands:
            if command.name == _FORWARD:
                steps.append(self._forward(command))
            elif command.name == _BACKWARD:
                steps.append(self._backward(command))
            elif _CONSTANT.get(command.name) in self._keep:
                steps.append(self._constant(command))
            elif command.name in _CONSTANT or command.name in _TRANSFERS:
                self._skipped[command.name] += 1
            else:
                raise self._error(command, "is no instruction that is known")
        return steps

    def _forward(self, command: _Instruction) -> Step:
        buffer = self._buffer(command)
        if buffer in self._buffers:
            held = self._buffers[buffer][1]
            raise self._error(
                command, f"would overwrite microbatch {held}, whose backward has not run"
            )
        microbatch = self._count(_FORWARD, command.phase)
        self._buffers[buffer] = (command.phase, microbatch)
        return self._step(command, "forward", microbatch)

    def _backward(self, command: _Instruction) -> Step:
        phase, microbatch = self._buffers.pop(self._buffer(command), (None, 0))
        if phase is None:
            raise self._error(command, "has no forward before it that filled its buffer")
        if phase != command.phase:
            raise self._error(command, f"is about a buffer that phase {phase} filled")
        return self._step(command, "backward", microbatch)

    def _constant(self, command: _Instruction) -> Step:
        count = self._count(command.name, 0)
        return Step(_CONSTANT[command.name], count, self._rank, str(command), command.line)

    def _step(self, command: _Instruction, instruction: str, microbatch: int) -> Step:
        if command.phase >= _PHASES:
            raise self._error(command, f"has a phase beyond {_PHASES - 1}")
        stage = 2 * self._num_ranks - 1 - self._rank if command.phase else self._rank
        return Step(instruction, microbatch, stage, str(command), command.line)

    def _buffer(self, command: _Instruction) -> int:
        if "buffer_id" not in command.arguments:
            raise self._error(command, "names no buffer_id")
        return command.arguments["buffer_id"]

    def _count(self, name: str, phase: int) -> int:
        count = self._done[name, phase]
        self._done[name, phase] += 1
        return count

    def _error(self, command: _Instruction, message: str) -> InputError:
        return InputError(f"stage {self._rank}: {command} {message}", line=command.line)
