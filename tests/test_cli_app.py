from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from cli_helpers import COMMAND, done, envplan, installed, says, small_profile, told
from envplan.cli import app, output
from envplan.cli.progress import progress

# What a command may import only once it needs it.
HEAVY = {"numpy", "pandas", "pydantic", "ortools", "matplotlib", "rich"}
OTHER_COMMANDS = {"envplan.cli.serving", "envplan.cli.profile", "envplan.serving"}


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        (None, set()),
        (["--help"], set()),
        (["solve", "--help"], {"pydantic", "numpy"}),  # it lists schedules and planners
        (["--version"], set()),
        (["profiles"], {"rich", "pydantic", "numpy"}),
        (["solve", "a40-gpt3-1.3b-4stage", "-m", "2"], {"rich", "pydantic", "numpy"}),
        (["check", "plan.json"], {"rich", "pydantic", "numpy"}),
    ],
)
def test_nothing_heavy_is_imported_before_it_is_needed(
    tmp_path: Path, arguments: list[str] | None, needed: set[str]
) -> None:
    if arguments == ["check", "plan.json"]:
        assert envplan("solve", "a40-gpt3-1.3b-4stage", "-m", "2", cwd=tmp_path).code == 0
    run = f"from envplan.cli.app import run; assert run({arguments}) == 0"
    code = f"import sys, envplan\n{run if arguments else ''}\nprint('MODULES', *sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    imported = set(done.stdout.split("MODULES", 1)[1].split())
    assert imported & HEAVY <= needed
    assert not imported & OTHER_COMMANDS


def test_public_names_are_all_there() -> None:
    import envplan

    for name in envplan.__all__:
        assert getattr(envplan, name) is not None
    assert set(envplan.__all__) <= set(dir(envplan))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = envplan.nothing


def test_help_and_version_say_what_there_is() -> None:
    import envplan as package

    assert done("") == done("--help")
    says(done("--help"), "frontier", "solve", "profiles", "check", "Example:")
    says(done("--version"), f"envplan {package.__version__}\nkernel: ", "Release")
    says(done("--version"), f"Python {platform.python_version()}, numpy ")


@pytest.mark.parametrize(
    ("shell", "typed", "offered"),
    [
        ("zsh", "envplan fro", {"frontier"}),
        ("fish", "envplan fro", {"frontier"}),
        ("bash", "envplan fro", {"frontier"}),
        ("bash", "envplan solve a40-gpt3-1", {"a40-gpt3-1.3b-4stage", "a40-gpt3-1.3b-8stage"}),
        ("bash", "envplan solve mine", {"mine.csv", "mine/"}),
        ("bash", "envplan savings mine/", {"mine/deep.csv"}),
        ("bash", "envplan solve --sched", {"--schedule"}),
        ("bash", "envplan schedule e", {"export"}),
        ("bash", "envplan solve --schedule zb", {"zb-h1", "zb-v"}),
        ("bash", "envplan solve --planner zeus", {"zeus_global", "zeus_per_stage"}),
        ("bash", "envplan schedule import --format m", {"megatron"}),
    ],
)
def test_shells_complete_commands_profiles_files_and_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: str, typed: str, offered: set[str]
) -> None:
    (tmp_path / "mine").mkdir()
    for name in ("mine.csv", "mine.txt", "mine/deep.csv"):
        (tmp_path / name).touch()
    for name, value in {
        "_ENVPLAN_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(typed.split()) - 1),
        "_TYPER_COMPLETE_ARGS": typed,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }.items():
        monkeypatch.setenv(name, value)
    said = envplan(cwd=tmp_path).out
    assert (set(said.split()) == offered) if shell == "bash" else "frontier" in said


def test_interruption_is_exit_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted = mock.Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr("envplan.builtin_profiles", interrupted)
    ran = envplan("profiles")
    assert (ran.code, ran.err) == (130, "envplan: error: interrupted\n")


def said_by(code: str) -> tuple[int, str, str]:
    """The exit code, output and errors of a process that runs some code for a minute at most."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    return done.returncode, done.stdout, done.stderr


def test_an_interruption_while_commands_are_imported_is_one_line() -> None:
    code = """
import os, signal, sys
class Interrupt:
    def find_spec(self, name, *rest):
        if name == "typer":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the parent does with it
from envplan.cli.main import main
main()
"""
    assert said_by(code) == (130, "", "envplan: error: interrupted\n")


# Python only reports what is raised in the callback of a weak reference; it does not propagate.
_LOSE_INTERRUPTION = """
import os, signal, sys, weakref
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the parent does with it
class Thing: pass
def lose_an_interruption(*_):
    thing = Thing()
    reference = weakref.ref(thing, lambda _: os.kill(os.getpid(), signal.SIGINT))
    del thing
"""


def test_an_interruption_that_a_library_turns_into_another_error_is_one_line() -> None:
    code = """
import envplan
from envplan.cli.app import main
def profiles():
    lose_an_interruption()
    raise TypeError("incompatible function arguments")
envplan.builtin_profiles = profiles
sys.argv = ["envplan", "profiles"]
main()
"""
    assert said_by(_LOSE_INTERRUPTION + code) == (130, "", "envplan: error: interrupted\n")


def test_a_command_ends_although_a_library_loses_its_interruption() -> None:
    code = """
import time
import envplan
from envplan.cli.app import main
def profiles():
    lose_an_interruption()
    time.sleep(3600)
envplan.builtin_profiles = profiles
sys.argv = ["envplan", "profiles"]
main()
"""
    assert said_by(_LOSE_INTERRUPTION + code) == (130, "", "envplan: error: interrupted\n")


def test_a_watch_ends_although_a_library_loses_its_interruption() -> None:
    code = """
from envplan.cli.invocation import Invocation
from envplan.cli.site_orders import follow_signal
class Watch:
    def round(self):
        lose_an_interruption()
        yield from ()
with Invocation().running():
    follow_signal(Watch(), every_s=3600.0)
"""
    assert said_by(_LOSE_INTERRUPTION + code) == (
        0,
        "stopped; jobs go on under their last orders\n",
        "",
    )


def test_with_json_an_error_is_a_document_too() -> None:
    ran = envplan("solve", "nothing.csv", "--json")
    document = json.loads(ran.out)
    assert (ran.code, document["schema"], document["exit_code"]) == (2, "envplan/error/v1", 2)
    assert ran.err == f"envplan: error: {document['error']}\n"


@pytest.mark.parametrize(
    ("line", "width"),
    [
        ("savings a40-gpt3-1.3b-4stage -m 4 --carbon 300", 60),
        ("compare a40-gpt3-1.3b-4stage -m 2", 80),
        ("profiles", 60),
        ("profiles", 120),
        ("devices --backend modelled", 60),
    ],
)
def test_no_row_of_a_table_is_wider_than_the_terminal(
    monkeypatch: pytest.MonkeyPatch, line: str, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(output, "on_terminal", lambda: True)
    lines = done(f"--color never {line}").splitlines()
    rule = next(k for k, line in enumerate(lines) if line.startswith("─"))
    table = [line for line in lines[max(0, rule - 3) : rule + 8] if "  " in line or line[:1] == "─"]
    assert table
    assert max(map(len, table)) <= width
    assert not any("…" in line for line in table)


@pytest.mark.parametrize(
    ("typed", "variable", "bold"),
    [
        ("--color always profiles", "", True),
        ("--color never profiles", "", False),
        ("profiles", "", True),
        ("profiles", "1", False),
    ],
)
def test_colours_are_for_terminals_unless_somebody_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, typed: str, variable: str, bold: bool
) -> None:
    monkeypatch.setenv("NO_COLOR", variable)
    monkeypatch.setattr(output, "on_terminal", lambda: True)
    # What is not a terminal gets no colours from typer.echo unless --color says always.
    monkeypatch.setattr(output.typer, "echo", lambda text, **_: print(text))
    assert ("\x1b[" in done(typed)) is bold


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("one\n  two\x1b[2J", r"one two\\x1b\[2J"),
        ("p.csv:3: is " + "x" * 10**6 + "; mend it", r"p.csv:3: is x{400,500} \.\.\. x+; mend it"),
    ],
)
def test_an_error_is_one_line_that_is_not_too_long(
    capsys: pytest.CaptureFixture[str], message: str, line: str
) -> None:
    assert app._fail(message, 2) == 2
    said = capsys.readouterr().err
    assert re.fullmatch(f"envplan: error: {line}\n", said)
    assert len(said) < 1100


@pytest.mark.parametrize(
    ("output", "code", "words"),
    [
        ("| :", 1, ""),  # the reader leaves early
        (">/dev/full", 2, "envplan: error: the output cannot be written or read (No space left"),
        (">&-", 0, ""),
        (">&- 2>&-", 0, ""),
    ],
)
def test_an_output_that_takes_nothing_causes_no_traceback(
    folder: Path, output: str, code: int, words: str
) -> None:
    wait = "sleep 0.5; " if "|" in output else ""
    shell = f"set -o pipefail; ({wait}{COMMAND} check profile.csv) {output}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True)
    assert done.returncode == code
    assert done.stderr.startswith(words)
    assert done.stderr.count("\n") == bool(words)


def test_file_names_of_any_bytes_are_printed(tmp_path: Path) -> None:
    small_profile().save_csv(tmp_path / "\udcff.csv")
    ran = installed("solve", "\udcff.csv", "-o", "\udcfe.json", cwd=tmp_path)
    assert (ran.code, ran.err) == (0, "")
    assert "wrote \\udcfe.json" in ran.out


def test_profiles_are_listed_with_what_is_known_of_them() -> None:
    table, document = done("profiles"), told("profiles")
    assert document["schema"] == "envplan/profiles/v1"
    says(table, *(profile["name"] for profile in document["profiles"]))
    sources = [profile["source"] for profile in document["profiles"]]
    assert sources == sorted(sources)
    assert set(sources) == {"measured", "modelled"}
    energies = {profile["name"]: profile["energy"] for profile in document["profiles"]}
    assert energies["sosp24-a100-gpt3-xl-4stage"] == "identified"
    assert energies["sosp24-a100sxm-gpt3-175b-8stage"] == "measured"
    assert energies["a40-gpt3-1.3b-4stage"] == "modelled"


def test_work_that_cannot_be_counted_says_how_long_it_has_gone_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envplan.cli.progress._LOG_PERIOD_S", 0.01)
    said = ""
    with progress("drawing frames"):
        while "\n" not in said:
            said += capsys.readouterr().err
    assert said.startswith("drawing frames: 0 s so far\n")


def test_long_work_says_how_far_it_is_where_there_is_no_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("envplan.cli.progress._LOG_PERIOD_S", 0.01)
    arguments = ("frontier", "a40-gpt3-1.3b-4stage", "-m", 32)
    said = envplan(*arguments).err
    assert "Tracing the frontier of a40-gpt3-1.3b-4stage: 0" in said
    told = r"^choosing frequencies: [\d.]+% done after \d+ s, about \d+ s left$"
    assert re.search(told, said, re.MULTILINE)
    assert envplan(*arguments, "--quiet").err == ""
    source = Path(__file__).parents[1] / "profiles" / "sosp24-a100-gpt3-xl-4stage.csv"
    said = envplan("smooth", source).err
    assert re.search(r"\d of \d+ operations: [\d.]+% done", said)
