"""DeepSpeed's pipeline schedules: the instructions that each stage's schedule yields, step by step.

An instruction names a buffer, not a microbatch. Forwards take microbatches in order, so the n-th
ForwardPass of a stage is that of microbatch n, and a BackwardPass is that of the microbatch that
the latest ForwardPass put into its buffer. Sends and receives say nothing that data dependencies do
not; that they block is not modelled.

DeepSpeed is not needed: instructions are read as they print, of schedule objects or from a text
file, which has a line `stage N` before the steps of each stage, and a line for each step:

    stage 0
    [LoadMicroBatch(buffer_id=0), ForwardPass(buffer_id=0)]
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Final

from envplan.errors import InputError, shown
from envplan.pipeline.imports.steps import (
    MOST_DIGITS,
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
    """Read the instructions of all stages from a text file.

    Args:
        keep: see from_deepspeed.

    Raises:
        InputError: the file cannot be read; or as for from_deepspeed, with its line.
    """
    return from_file(path, lambda text: _read(_from_text(text), keep))


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


def _steps(commands: Iterable[_Printed], stage: int, keep: Collection[str]) -> Iterator[Step | str]:
    """Follow one stage's instructions to find out which microbatch each is about."""
    buffers: dict[int, int] = {}  # buffer -> microbatch in it
    done: Counter[str] = Counter()
    for printed in commands:
        command = printed[0]
        name = command.partition("(")[0]
        if name in (_FORWARD, _BACKWARD):
            found = _BUFFER.fullmatch(command)
            if found is None:
                raise _wrong(stage, printed, "must name a buffer_id alone, as in (buffer_id=0)")
            buffer = int(found[1])
            if name == _BACKWARD:
                if buffer not in buffers:
                    raise _wrong(stage, printed, "has no forward before it that filled its buffer")
                yield Step(BACKWARD, buffers.pop(buffer), stage)
                continue
            if buffer in buffers:
                held = buffers[buffer]
                raise _wrong(
                    stage, printed, f"would overwrite microbatch {held} before its backward"
                )
            buffers[buffer] = done[name]
            kind = FORWARD
        elif (kind := _KEEPABLE.get(name, "")) not in keep:
            if not kind and name not in _TRANSFERS:
                raise _wrong(stage, printed, "is no instruction that is known")
            yield name
            continue
        yield Step(kind, done[name], stage)
        done[name] += 1


def _wrong(stage: int, printed: _Printed, problem: str) -> InputError:
    command, line = printed
    return InputError(f"stage {stage}: {shown(command)} {problem}", line=line)
