"""DeepSpeed's pipeline schedules: the instructions that each stage's schedule yields, step by step.

An instruction names a buffer, not a microbatch. Forwards take microbatches in order, so the n-th
ForwardPass of a stage is that of microbatch n, and a BackwardPass is that of the microbatch that
the latest ForwardPass put into its buffer. Sends and receives say nothing that data dependencies do
not; that they block is not modelled.

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
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from envplan._documents import first_problem
from envplan._files import parse_json
from envplan.errors import InputError, shown
from envplan.pipeline.dependencies import Place
from envplan.pipeline.imports.steps import (
    MOST_DIGITS,
    ImportedSchedule,
    Step,
    from_file,
    scheduled,
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
_CALL: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)\(([^()]*)\)")
_ARGUMENT: Final = re.compile(rf"([a-z_]+)=([0-9]{{1,{MOST_DIGITS}}})")
_STAGE: Final = re.compile(rf"stage\s+([0-9]{{1,{MOST_DIGITS}}})\s*:?", re.IGNORECASE)

_Printed = tuple[str, int | None]  # an instruction as it prints, and its line


def from_deepspeed(schedules: Iterable[Any], *, keep: Collection[str] = ()) -> ImportedSchedule:
    """The order in which DeepSpeed's schedule objects run their stages.

    Args:
        schedules: a schedule for each stage in order, such as
            `[TrainSchedule(micro_batches=8, stages=4, stage_id=s) for s in range(4)]`.
        keep: what to keep as operations of constant time: any of KEEPABLE.

    Raises:
        InputError: names the stage and the instruction that is not known or cannot run.
    """
    stages: list[list[_Printed]] = []
    for schedule in schedules:
        if not callable(getattr(schedule, "steps", None)):
            raise InputError(
                f"a {type(schedule).__name__} has no steps(); give a list of schedules, one a stage"
            )
        stages.append([(repr(command), None) for step in schedule.steps() for command in step])
    return _read(stages, keep)


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


def _from_json(document: Any) -> list[list[_Printed]]:
    try:
        stages = TypeAdapter(list[list[list[str]]]).validate_python(document, strict=True)
    except ValidationError as error:
        raise InputError(first_problem(error, "list of stages")) from None
    return [[(command, None) for step in steps for command in step] for steps in stages]


def _from_text(text: str) -> list[list[_Printed]]:
    stages: list[list[_Printed]] = []
    for line, content in enumerate(map(str.strip, text.splitlines()), 1):
        if not content or content.startswith("#"):
            continue
        header = _STAGE.fullmatch(content)
        if header or not stages:
            if header is None or int(header[1]) != len(stages):
                raise InputError(
                    f'{shown(content)} comes where a line "stage {len(stages)}" should: one stands '
                    "before the steps of each stage",
                    line=line,
                )
            stages.append([])
        elif _CALL.sub("", content).strip("[], \t"):
            raise InputError(f"{shown(content)} is no list of instructions", line=line)
        else:  # a step as Python prints the list of its instructions
            stages[-1] += [(call[0], line) for call in _CALL.finditer(content)]
    return stages


def _read(stages: Sequence[Sequence[_Printed]], keep: Collection[str]) -> ImportedSchedule:
    skipped: Counter[str] = Counter()
    ranks = [list(_steps(commands, stage, keep, skipped)) for stage, commands in enumerate(stages)]
    if not any(step.instruction == "backward" for rank in ranks for _, step in rank):
        raise InputError(f"no stage has a {_BACKWARD}: only schedules for training can be planned")
    return scheduled(ranks, skipped)


def _steps(
    commands: Iterable[_Printed], stage: int, keep: Collection[str], skipped: Counter[str]
) -> Iterator[tuple[Place, Step]]:
    """Follow one stage's instructions to find out which microbatch each is about."""
    buffers: dict[int, int] = {}  # buffer -> microbatch in it
    done: Counter[str] = Counter()
    for command, line in commands:
        name, arguments = _parsed(command, stage, line)
        place = Place(f"stage {stage}: {command}", line)
        if name not in (_FORWARD, _BACKWARD):
            if name not in _CONSTANT and name not in _TRANSFERS:
                raise place.error("is no instruction that is known")
            if _CONSTANT.get(name) in keep:
                yield place, Step(_CONSTANT[name], done[name], stage)
                done[name] += 1
            else:
                skipped[name] += 1
            continue
        if arguments.keys() != {"buffer_id"}:
            raise place.error("must name a buffer_id, and nothing else")
        buffer = arguments["buffer_id"]
        if name == _BACKWARD:
            if buffer not in buffers:
                raise place.error("has no forward before it that filled its buffer")
            yield place, Step("backward", buffers.pop(buffer), stage)
            continue
        if buffer in buffers:
            held = buffers[buffer]
            raise place.error(f"would overwrite microbatch {held}, whose backward has not run")
        buffers[buffer] = done[name]
        yield place, Step("forward", done[name], stage)
        done[name] += 1


def _parsed(command: str, stage: int, line: int | None) -> tuple[str, dict[str, int]]:
    """An instruction's name and arguments."""
    call = _CALL.fullmatch(command)
    arguments = call[2].split(",") if call is not None and call[2].strip() else []
    pairs = [_ARGUMENT.fullmatch(argument.strip()) for argument in arguments]
    if call is None or not all(pairs):
        raise InputError(
            f'stage {stage}: {shown(command)} is no instruction such as "ForwardPass(buffer_id=0)"',
            line=line,
        )
    return call[1], {pair[1]: int(pair[2]) for pair in pairs if pair}
