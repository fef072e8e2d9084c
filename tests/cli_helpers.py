"""A small modelled profile, and the command run as a user would."""

from __future__ import annotations

import io
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envplan.cli import app
from envplan.profile import Profile, ProfileMetadata
from envplan.sweep.work import FinishedTask, Group, compute

COMMAND = Path(sys.executable).with_name("envplan")


def small_profile(
    stages: int = 2,
    clocks: tuple[int, ...] = (1740, 1500, 1260, 1020, 780),
    *,
    blocking: float | None = None,
    source: str | None = "modelled",
    microbatches: int | None = 4,
    schedule: str | None = None,
) -> Profile:
    """Stages of growing work on a GPU whose time goes with 1/f and power with f^2.6."""
    rows: list[tuple[object, ...]] = []
    for stage in range(stages):
        for instruction, work in (("forward", 1.0), ("backward", 2.1)):
            for mhz in clocks:
                time = round(work * (1 + 0.15 * stage) * (0.01 + 0.07 * 1740 / mhz), 6)
                power = 90 + 190 * (mhz / 1740) ** 2.6
                rows.append((stage, instruction, mhz, time, round(power * time, 6)))
        if blocking is not None:
            rows.append((stage, "blocking", 1740, 2.0, 2.0 * blocking))
    metadata = ProfileMetadata(source=source, schedule=schedule, num_microbatches=microbatches)
    return Profile.from_rows(rows, name="small", metadata=metadata)


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


def envplan(*arguments: object, cwd: Path | None = None) -> Ran:
    """Run the command in this process, in a folder."""
    out, err, before = io.StringIO(), io.StringIO(), Path.cwd()
    os.chdir(cwd or before)
    try:
        with redirect_stdout(out), redirect_stderr(err):
            code = app.run(list(map(str, arguments)))
    finally:
        os.chdir(before)
    return Ran(code, out.getvalue(), err.getvalue())


def done(line: str, *more: object, cwd: Path | None = None) -> str:
    """What a command that succeeds prints.

    Args:
        line: what is typed after `envplan`.
        more: further arguments, as they are.
    """
    ran = envplan(*shlex.split(line), *more, cwd=cwd)
    assert ran.code == 0, ran.err
    return ran.out


def told(line: str, *more: object, cwd: Path | None = None) -> Any:
    """The document that a command prints with --json."""
    return json.loads(done(line, *more, "--json", cwd=cwd))


def says(text: str, *words: str) -> None:
    """All these words are in a text; " | " stands between words."""
    for word in " | ".join(words).split(" | "):
        assert word in text, text


def installed(*arguments: object, cwd: Path, timeout: float = 300) -> Ran:
    """Run the installed command in a process of its own."""
    done = subprocess.run(
        [str(COMMAND), *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return Ran(done.returncode, done.stdout, done.stderr)


def in_this_process(groups: list[Group], jobs: int) -> Iterator[FinishedTask]:
    """As a sweep's run_on_processes: quicker by the start of one."""
    for group in groups:
        for task, outcome in zip(list(group.tasks), compute(group), strict=True):
            yield FinishedTask(task, outcome.row, outcome.is_final)


def assert_refused(ran: Ran, code: int, *words: str) -> None:
    """One line on stderr with these words in it, the exit code, and nothing on stdout."""
    assert ran.err.startswith("envplan: error: ")
    assert ran.err.count("\n") == 1, ran.err
    assert "Traceback" not in ran.err
    for word in words:
        assert word in ran.err, ran.err
    assert ran.out == ""
    assert ran.code == code


def refused(line: str, *words: str, code: int = 2) -> None:
    """The command is refused with these words and leaves no file in the current folder."""
    before = set(Path().iterdir())
    assert_refused(envplan(*shlex.split(line)), code, *words)
    assert set(Path().iterdir()) - {Path("__pycache__")} <= before


def put(document: Any, where: str, value: Any) -> None:
    """Another value of a field, or what a function makes of its own one."""
    *steps, last = (int(step) if step.isdigit() else step for step in where.split("."))
    for step in steps:
        document = document[step]
    document[last] = value(document[last]) if callable(value) else value
