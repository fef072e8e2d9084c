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
from typing import Any, Final

from envplan._files import parse_json
from envplan.errors import InputError, shown
from envplan.pipeline.imports.steps import (
    MOST_DIGITS,
    ImportedSchedule,
    Place,
    Step,
    from_file,
    walk,
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

_Instruction = tuple[str, dict[str, int]]  # its name and its arguments
_Entries = list[tuple[Place, _Instruction]]


def from_deepspeed(schedules: Iterable[Any], *, keep: Collection[str] = ()) -> ImportedSchedule:
    """The order in which DeepSpeed's schedule objects run their stages.

    Args:
        schedules: a schedule for each stage in order, such as
            `[TrainSchedule(micro_batches=8, stages=4, stage_id=s) for s in range(4)]`.
        keep: what to keep as operations of constant time: any of KEEPABLE.

    Raises:
        InputError: names the stage and the instruction that is not known or cannot run.
    """
    stages: list[_Entries] = []
    for schedule in schedules:
        if not callable(getattr(schedule, "steps", None)):
            raise InputError(
                f"a {type(schedule).__name__} has no steps(); give a list of schedules, one a stage"
            )
        commands = [command for step in schedule.steps() for command in step]
        stages.append([_entry(len(stages), _live(command)) for command in commands])
    return _read(stages, keep)


def _live(command: Any) -> _Instruction:
    arguments = getattr(command, "kwargs", {})
    numbers = {name: value for name, value in arguments.items() if isinstance(value, int)}
    return type(command).__name__, numbers


def read_deepspeed(path: str | os.PathLike[str], *, keep: Collection[str] = ()) -> ImportedSchedule:
    """Read the instructions of all stages from a JSON or text file.

    Args:
        keep: see from_deepspeed.

    Raises:
        InputError: the file cannot be read; or as for from_deepspeed, with the line of a text file.
    """

    def parse(text: str) -> ImportedSchedule:
        if text.lstrip().startswith("["):
            return _read(_from_json(parse_json(text.encode(), path)), keep)
        return _read(_from_text(text), keep)

    return from_file(path, parse)


def _from_json(document: Any) -> list[_Entries]:
    return [
        [
            _entry(stage, _parsed(command, f"stage {stage}: "))
            for step in _list(steps, f"stage {stage}")
            for command in _list(step, f"stage {stage}: a step")
        ]
        for stage, steps in enumerate(_list(document, "the file"))
    ]


def _list(value: object, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise InputError(f"{what} must be a list, not {shown(value)}")
    return value


def _from_text(text: str) -> list[_Entries]:
    stages: list[_Entries] = []
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
        elif _CALL.sub("", content).strip("[], \t"):
            raise InputError(f"{shown(content)} is no list of instructions", line=line)
        else:  # a step as Python prints the list of its instructions
            stage = len(stages) - 1
            calls = (_parsed(call[0], line=line) for call in _CALL.finditer(content))
            stages[-1] += [_entry(stage, call, line) for call in calls]
    return stages


def _parsed(command: object, where: str = "", line: int | None = None) -> _Instruction:
    call = _CALL.fullmatch(command) if isinstance(command, str) else None
    arguments = call[2].split(",") if call is not None and call[2].strip() else []
    pairs = [_ARGUMENT.fullmatch(argument.strip()) for argument in arguments]
    if call is None or not all(pairs):
        raise InputError(
            f'{where}{shown(command)} is no instruction such as "ForwardPass(buffer_id=0)"',
            line=line,
        )
    return call[1], {pair[1]: int(pair[2]) for pair in pairs if pair}


def _entry(
    stage: int, command: _Instruction, line: int | None = None
) -> tuple[Place, _Instruction]:
    arguments = ", ".join(f"{name}={value}" for name, value in command[1].items())
    return Place(f"stage {stage}: {command[0]}({arguments})", line), command


def _read(stages: Sequence[_Entries], keep: Collection[str]) -> ImportedSchedule:
    if not any(command[0] == _BACKWARD for stage in stages for _, command in stage):
        raise InputError(f"no stage has a {_BACKWARD}: only schedules for training can be planned")
    followed = [_Stage(rank, len(stages), keep) for rank in range(len(stages))]
    return walk(stages, lambda rank, place, command: followed[rank].read(place, *command))


class _Stage:
    """Follows one stage's instructions to find out which microbatch each is about."""

    def __init__(self, rank: int, num_ranks: int, keep: Collection[str]) -> None:
        self._model_stages = (rank, 2 * num_ranks - 1 - rank)  # by phase
        self._keep = keep
        self._buffers: dict[int, tuple[int, int]] = {}  # buffer -> (phase, microbatch) in it
        self._done: Counter[tuple[str, int]] = Counter()

    def read(self, place: Place, name: str, arguments: dict[str, int]) -> list[Step] | str:
        if name in (_FORWARD, _BACKWARD):
            return [self._computed(place, name, arguments)]
        if _CONSTANT.get(name) in self._keep:
            return [Step(_CONSTANT[name], self._count(name, 0), self._model_stages[0])]
        if name in _CONSTANT or name in _TRANSFERS:
            return name
        raise place.error("is no instruction that is known")

    def _computed(self, place: Place, name: str, arguments: dict[str, int]) -> Step:
        phase, buffer = arguments.get("phase", 0), arguments.get("buffer_id")
        if buffer is None:
            raise place.error("names no buffer_id")
        if phase >= _PHASES:
            raise place.error(f"has a phase beyond {_PHASES - 1}")
        if name == _FORWARD:
            if buffer in self._buffers:
                held = self._buffers[buffer][1]
                raise place.error(f"would overwrite microbatch {held}, whose backward has not run")
            self._buffers[buffer] = (phase, self._count(name, phase))
            return Step("forward", self._buffers[buffer][1], self._model_stages[phase])
        if buffer not in self._buffers:
            raise place.error("has no forward before it that filled its buffer")
        filled, microbatch = self._buffers.pop(buffer)
        if filled != phase:
            raise place.error(f"is about a buffer that phase {filled} filled")
        return Step("backward", microbatch, self._model_stages[phase])

    def _count(self, name: str, phase: int) -> int:
        self._done[name, phase] += 1
        return self._done[name, phase] - 1
