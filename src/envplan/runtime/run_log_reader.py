"""Run logs as they are read: their lines, and what they say of the runs that followed a plan."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

from pydantic import Field

from envplan._io.documents import Index, Model, refuse_later_version
from envplan._io.files import AnyPath, ReadLimits, stream
from envplan.errors import InputError, shown
from envplan.runtime.run_records import RUN_SCHEMA, OperationTimes, RunStarted

_LOG_LIMITS: Final = ReadLimits(max_bytes=2**36, longest_line=2**24)


class LoggedLine(Model, extra="ignore"):
    """A line as it is read.

    Attributes:
        event: what happened.
        rank: global rank.
        plan_sha256: of a `start` line, the plan.json that is followed from then on.
        schema_id: of a `start` line, the version of the lines from then on.
        iterations: of an `end` line, and of a `killed` one for the run before, how many followed
            the plan, and how many did not, by the reason; absent in logs of older versions.
    """

    event: str
    rank: int
    plan_sha256: object = None
    schema_id: object = Field(None, alias="schema")
    iterations: dict[str, Index] | None = None


class LoggedStep(LoggedLine):
    """A `step` line as it is read.

    Attributes:
        stage: that the rank runs.
        step: its number, from 0.
        operations: times by kind of operation and clock.
    """

    stage: Index
    step: Index
    operations: list[OperationTimes]


def read_run_log(paths: Iterable[str | os.PathLike[str]]) -> Iterator[LoggedLine]:
    """Read the lines of run logs, one log after the other; `step` lines are LoggedSteps.

    A last line that was cut short, as a killed job leaves it, is passed over.

    Raises:
        InputError: a file cannot be read, or a line is not as RunLog writes it; says the line.
    """
    for path in paths:
        with stream(path, _LOG_LIMITS) as log:
            for number, text in enumerate(log, 1):
                if not text.endswith(b"\n"):
                    break
                try:
                    line = parse_line(json.loads(text))
                except (ValueError, RecursionError):
                    raise InputError(
                        "is not a line of a run log as the shim writes them", path=path, line=number
                    ) from None
                if line.event == RunStarted.event:
                    _refuse_unknown_version(line, path, number)
                yield line


def _refuse_unknown_version(start: LoggedLine, path: AnyPath, number: int) -> None:
    """Refuse a log whose lines may mean something else than is known here.

    Raises:
        InputError: it is of a later version, or of one that is not known; says the line.
    """
    refuse_later_version(start.schema_id, RUN_SCHEMA, path)
    if start.schema_id not in (None, RUN_SCHEMA):
        stated = shown(start.schema_id)
        problem = f"begins a run log of schema {stated}, not {shown(RUN_SCHEMA)}"
        raise InputError(problem, path=path, line=number)


def parse_line(document: object) -> LoggedLine:
    """A line of a run log from its JSON value.

    Raises:
        ValueError: it is none.
    """
    is_step = isinstance(document, dict) and document.get("event") == "step"
    model = LoggedStep if is_step else LoggedLine
    return model.model_validate(document)


def iterations_of_plan(lines: Iterable[LoggedLine], sha256: str) -> Iterator[LoggedStep]:
    """The iterations of runs that followed one plan; files may hold other runs too.

    Args:
        lines: of run logs, those of each rank in order.
        sha256: of the plan.json.
    """
    follows_plan: dict[int, bool] = {}
    for line in lines:
        if line.event == "start":
            follows_plan[line.rank] = line.plan_sha256 == sha256
        elif isinstance(line, LoggedStep) and follows_plan.get(line.rank, False):
            yield line


def iteration_counts_of_plan(lines: Iterable[LoggedLine], sha256: str) -> dict[str, int]:
    """The iterations of runs that followed one plan, by their outcome; of the first rank.

    A run that was killed counts once the next one has said of it how many it had.

    Args:
        lines: of run logs, those of each rank in order.
        sha256: of the plan.json.
    """
    follows_plan: dict[int, bool] = {}
    iterations: dict[int, Counter[str]] = {}  # by rank
    for line in lines:
        if line.event == "start":
            follows_plan[line.rank] = line.plan_sha256 == sha256
        elif line.iterations is not None and follows_plan.get(line.rank, False):
            iterations.setdefault(line.rank, Counter()).update(line.iterations)
    return dict(iterations[min(iterations)]) if iterations else {}
