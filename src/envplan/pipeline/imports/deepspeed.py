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
    Found,
    ImportedSchedule,
    Step,
    from_file,
    kept,
    scheduled,
)
from envplan.pipeline.schedules import BACKWARD, FORWARD

__all__ = ["from_deepspeed", "read_deepspeed"]

_FORWARD: Final = "ForwardPass"
_BACKWARD: Final = "BackwardPass"
#: What may be kept as operations beside forward and backward.
_KEEPABLE: Final = {
    "LoadMicroBatch": "load",
    "OptimizerStep": "optimizer",
    "ReduceGrads": "all_reduce",
    "ReduceTiedGrads": "reduce_tied_grads",
}
_TRANSFERS: Final = ("SendActivation", "RecvActivation", "SendGrad", "RecvGrad", "CommitP2P")
_CALL: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\([^()]*\)")
_BUFFER: Final = re.compile(rf"[A-Za-z]+\(buffer_id=([0-9]{{1,{MOST_DIGITS}}})\)")
_STAGE: Final = re.compile(rf"stage\s+([0-9]{{1,{MOST_DIGITS}}})\s*:?", re.IGNORECASE)

_Printed = tuple[str, int | None]  # an instruction as it prints, and its line


def from_deepspeed(schedules: Iterable[Any], *, keep: Collection[str] = ()) -> ImportedSchedule:
    """The order in which DeepSpeed's schedule objects run their stages.

    Args:
        schedules: a schedule for each stage in order, such as
            `[TrainSchedule(micro_batches=8, stages=4, stage_id=s) for s in range(4)]`.
        keep: what to keep as operations beside forwards and backwards: `load`, `optimizer`,
            `all_reduce`, `reduce_tied_grads`.

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
            stages[-1] += [(call, line) for call in _CALL.findall(content)]
    return stages


def _read(stages: Sequence[Sequence[_Printed]], keep: Collection[str]) -> ImportedSchedule:
    keep = kept(keep, _KEEPABLE.values())
    if not any(command.startswith(_BACKWARD) for commands in stages for command, _ in commands):
        raise InputError(f"no stage has a {_BACKWARD}: only schedules for training can be planned")
    return scheduled(_steps(commands, stage, keep) for stage, commands in enumerate(stages))


def _steps(commands: Iterable[_Printed], stage: int, keep: Collection[str]) -> Iterator[Found]:
    """Follow one stage's instructions to find out which microbatch each is about."""
    buffers: dict[int, int] = {}  # buffer -> microbatch in it
    done: Counter[str] = Counter()
    for command, line in commands:
        name = command.partition("(")[0]
        place = Place(f"stage {stage}: {shown(command)}", line)
        if name in (_FORWARD, _BACKWARD):
            found = _BUFFER.fullmatch(command)
            if found is None:
                raise place.error("must name a buffer_id and nothing else, as in (buffer_id=0)")
            buffer = int(found[1])
            if name == _BACKWARD:
                if buffer not in buffers:
                    raise place.error("has no forward before it that filled its buffer")
                yield place, Step(BACKWARD, buffers.pop(buffer), stage)
                continue
            if buffer in buffers:
                held = buffers[buffer]
                raise place.error(f"would overwrite microbatch {held}, whose backward has not run")
            buffers[buffer] = done[name]
            kind = FORWARD
        elif (kind := _KEEPABLE.get(name, "")) not in keep:
            if not kind and name not in _TRANSFERS:
                raise place.error('is no instruction that is known, as "ForwardPass(buffer_id=0)"')
            yield place, name
            continue
        yield place, Step(kind, done[name], stage)
        done[name] += 1
