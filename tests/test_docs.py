"""Commands that the documentation shows work as written, page by page; files it names exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from cli_helpers import Ran, envplan
from envplan.cli.schedule import ExportFormat
from envplan.pipeline import SCHEDULES
from envplan.pipeline.imports import ImportFormat
from envplan.planners import PLANNERS
from envplan.profile import builtin_paths
from envplan.serving.policies import POLICIES

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(
    r"^(?:<!-- (?P<note>[^\n]*) -->\n)?```(?P<kind>console|python)\n(?P<text>.*?)^```", re.M | re.S
)


@dataclass(frozen=True)
class Block:
    kind: str
    text: str
    code: int

    def commands(self) -> Iterator[list[str]]:
        joined = self.text.replace("\\\n", " ")
        for line in joined.splitlines():
            if line.startswith("$ "):
                yield shlex.split(line[2:], comments=True)


def blocks(page: Path) -> list[Block]:
    """What is to be run; a note before a block may say that it is not, or its exit code."""
    found = []
    for match in _BLOCK.finditer(page.read_text(encoding="utf-8")):
        note = match["note"] or ""
        if note.startswith("not run: "):
            continue
        code = int(note.removeprefix("exit ")) if note.startswith("exit ") else 0
        found.append(Block(match["kind"], match["text"], code))
    return found


@cache
def made_of_builtins(command: tuple[str, ...]) -> tuple[Ran, dict[str, bytes]]:
    """What a command that reads no file says, and the files that it writes; run once."""
    with TemporaryDirectory() as folder:
        ran = envplan(*command, cwd=Path(folder))
        return ran, {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def type_in(folder: Path, command: list[str]) -> Ran:
    """Run a command in a folder. Several pages begin with the same ones, about a built-in profile:
    where no file of the folder is named, it is run once for all of them.
    """
    reads = any((folder / argument).exists() for argument in command)
    if reads or command[0] not in ("frontier", "solve") or command[1] not in builtin_paths():
        return envplan(*command, cwd=folder)
    ran, files = made_of_builtins(tuple(command))
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return ran


def run(page: Path, folder: Path) -> int:
    (folder / "examples").symlink_to(ROOT / "examples")
    count = 0
    for block in blocks(page):
        if block.kind == "python":
            code = [sys.executable, "-c", block.text]
            done = subprocess.run(
                code, cwd=folder, capture_output=True, text=True, timeout=300, check=False
            )
            assert done.returncode == block.code, f"{page.name}: {block.text}: {done.stderr}"
            count += 1
            continue
        commands = list(block.commands())
        assert commands, f"{page.name}: a console block without a command: {block.text}"
        for name, *command in commands:
            assert name == "envplan", f"{page.name}: {name} is not ours to run"
            ran = type_in(folder, command)
            assert ran.code == block.code, f"{page.name}: {command}: {ran.err}"
            count += 1
    return count


#: Pages whose commands take long; they are left to `make test-slow`.
SLOW = {"constraints.md", "switching.md", "serving.md", "costs.md"}


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.slow if page.name in SLOW else (), id=page.name)
        for page in PAGES
        if blocks(page)
    ],
)
def test_commands_and_code_of_a_page_work(page: Path, tmp_path: Path) -> None:
    assert run(page, tmp_path) > 0


def first_columns(page: str, heading: str) -> list[str]:
    """The names in backticks in the first column of the table whose head begins so."""
    _, _, table = (ROOT / "docs" / page).read_text().partition(f"\n| {heading} |")
    rows = table.partition("\n\n")[0].splitlines()[2:]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])]


def test_tables_of_schedules_and_policies_name_all_there_are() -> None:
    assert set(first_columns("schedules.md", "`--schedule`")) == set(SCHEDULES)
    assert set(first_columns("serving.md", "policy")) == set(POLICIES)


def test_pages_name_every_planner_and_every_format() -> None:
    row = re.search(r"^\| `planners` .*$", (ROOT / "docs" / "sweeps.md").read_text(), re.M)
    assert row is not None
    assert set(re.findall(r"`(\w+)`", row[0])) - {"planners", "planner"} == set(PLANNERS)
    text = (ROOT / "docs" / "import-schedules.md").read_text()
    assert set(re.findall(r"--format ([\w-]+)", text)) == {*ImportFormat, *ExportFormat}


def test_a_command_that_fails_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```console\n$ envplan check nothing.json\n```\n")
    (tmp_path / "folder").mkdir()
    with pytest.raises(AssertionError, match=r"page\.md: .*nothing\.json"):
        run(page, tmp_path / "folder")


def test_files_of_tests_that_are_named_exist() -> None:
    naming = [*PAGES, *ROOT.glob("*.md"), ROOT / "Makefile", *(ROOT / "tools").rglob("*.py")]
    names = {n for file in naming for n in re.findall(r"\btest_\w+\.py\b", file.read_text())}
    assert "test_schedules_against_torch.py" in names
    assert [name for name in sorted(names) if not (ROOT / "tests" / name).exists()] == []
