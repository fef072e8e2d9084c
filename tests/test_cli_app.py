from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from cli_helpers import COMMAND, assert_refused, done, envplan, installed, says, small_profile
from envplan.cli import app, output
from envplan.cli.app import app as every_command

# What a command may import only once it needs it.
HEAVY = {"numpy", "pandas", "pydantic", "ortools", "matplotlib", "rich"}
OTHER_COMMANDS = {"envplan.cli.serving", "envplan.cli.profile", "envplan.serving"}


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        (None, set()),
        (["--help"], set()),
        (["solve", "--help"], {"pydantic"}),  # which typer uses, where it is installed
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
    run = f"from envplan.cli.app import _run; assert _run({arguments}) == 0"
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


def test_help_lists_the_commands_and_an_example(tmp_path: Path) -> None:
    for arguments in ([], ["--help"]):
        out = done("", *arguments, cwd=tmp_path)
        says(out, "frontier", "solve", "profiles", "check", "Example:")


def test_every_command_takes_json_and_quiet_and_says_in_a_line_what_it_does() -> None:
    for path, command in leaves("envplan", typer.main.get_command(every_command)):
        names = {name for param in command.params for name in param.opts}
        assert {"--json", "--quiet"} <= names, path
        says(done("", *path.split()[1:], "--help"), "Example:\n    envplan ", f"  {path}")
        if path.count(" ") == 2:  # a list of commands shows its first sentence
            assert not command.get_short_help_str(66).endswith("..."), path


@pytest.mark.parametrize("text", ["nan", "-1", "1e999"])
def test_every_option_that_takes_a_number_refuses_what_is_none(text: str) -> None:
    checked = 0
    for path, command in leaves("envplan", typer.main.get_command(every_command)):
        for param in command.params:
            if param.metavar in {"TIME", "PCT", "W", "J", "N", "M"} and param.opts != ["--start"]:
                ran = envplan(*path.split()[1:], param.opts[-1], text)
                assert (ran.code, ran.err.count("\n")) == (2, 1), (path, param.opts)
                assert re.search(rf"{param.opts[-1]}\b.* must be ", ran.err), ran.err
                checked += 1
    assert checked > 100


def test_every_option_that_names_an_output_refuses_other_types_of_file() -> None:
    checked = 0
    for path, command in leaves("envplan", typer.main.get_command(every_command)):
        for param in command.params:
            if "FILE" in str(param.metavar) and re.search(r": \.\w+", param.help or ""):
                ran = envplan(*path.split()[1:], param.opts[-1], "x.zzz")
                assert_refused(ran, 2, f"{param.opts[-1]} x.zzz must end in .")
                checked += 1
    assert checked > 20


def leaves(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    """The commands that do something themselves."""
    if not hasattr(command, "list_commands"):
        yield path, command
        return
    for name in command.list_commands(None):
        yield from leaves(f"{path} {name}", command.get_command(None, name))


def test_version_is_that_of_the_package(tmp_path: Path) -> None:
    import envplan as package

    out = done("--version", cwd=tmp_path)
    first, kernel, rest = out.splitlines()
    assert first == f"envplan {package.__version__}"
    assert kernel.startswith("kernel: ")
    assert "Release" in kernel
    assert f"Python {platform.python_version()}, numpy " in rest


@pytest.mark.parametrize(
    ("shell", "typed"),
    [
        ("bash", {"COMP_WORDS": "envplan fro", "COMP_CWORD": "1"}),
        ("zsh", {"_TYPER_COMPLETE_ARGS": "envplan fro"}),
        (
            "fish",
            {"_TYPER_COMPLETE_ARGS": "envplan fro", "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
        ),
    ],
)
def test_shells_complete_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: str, typed: dict[str, str]
) -> None:
    monkeypatch.setenv("_ENVPLAN_COMPLETE", f"complete_{shell}")
    for name, value in typed.items():
        monkeypatch.setenv(name, value)
    assert "frontier" in envplan(cwd=tmp_path).out


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("envplan solve a40-gpt3-1", {"a40-gpt3-1.3b-4stage", "a40-gpt3-1.3b-8stage"}),
        ("envplan solve mine", {"mine.csv", "mine/"}),
        ("envplan savings mine/", {"mine/deep.csv"}),
        ("envplan solve --sched", {"--schedule"}),
        ("envplan schedule e", {"export"}),
    ],
)
def test_shells_complete_profiles_files_and_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: str, offered: set[str]
) -> None:
    (tmp_path / "mine").mkdir()
    for name in ("mine.csv", "mine.txt", "mine/deep.csv"):
        (tmp_path / name).touch()
    monkeypatch.setenv("_ENVPLAN_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split()) - 1))
    assert set(envplan(cwd=tmp_path).out.split()) == offered


def test_interruption_is_exit_code_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("envplan.builtin_profiles", interrupted)
    assert app._run(["profiles"]) == 130
    assert capsys.readouterr().err == "envplan: error: interrupted\n"


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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "envplan: error: interrupted\n"


def test_with_json_an_error_is_a_document_too(tmp_path: Path) -> None:
    ran = envplan("solve", "nothing.csv", "--json", cwd=tmp_path)
    assert ran.code == 2
    document = json.loads(ran.out)
    assert (document["schema"], document["exit_code"]) == ("envplan/error/v1", 2)
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
    ("arguments", "variable", "bold"),
    [
        (["--color", "always"], "", True),
        (["--color", "never"], "", False),
        ([], "", True),
        ([], "1", False),
    ],
)
def test_colours_are_for_terminals_unless_somebody_says_otherwise(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    variable: str,
    bold: bool,
) -> None:
    monkeypatch.setenv("NO_COLOR", variable)
    monkeypatch.setattr(output, "on_terminal", lambda: True)
    # What is not a terminal gets no colours from typer.echo unless --color says always.
    monkeypatch.setattr(output.typer, "echo", lambda text, **_: print(text))
    ran = envplan(*arguments, "profiles", cwd=tmp_path)
    assert ("\x1b[" in ran.out) is bold


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


def test_reader_who_leaves_early_causes_no_traceback(tmp_path: Path) -> None:
    small_profile().save_csv(tmp_path / "profile.csv")
    code = "import os,sys; r,w=os.pipe(); os.close(r); os.dup2(w,1)\n"
    code += "from envplan.cli.app import main; main(['check','profile.csv'])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize(
    ("redirection", "code", "words"),
    [
        (">/dev/full", 2, "envplan: error: the output cannot be written or read (No space left"),
        (">&-", 0, ""),
        (">&- 2>&-", 0, ""),
    ],
)
def test_an_output_that_takes_nothing_causes_no_traceback(
    redirection: str, code: int, words: str, tmp_path: Path
) -> None:
    small_profile().save_csv(tmp_path / "profile.csv")
    shell = f"{COMMAND} check profile.csv {redirection}"
    done = subprocess.run(shell, shell=True, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == code
    assert done.stderr.startswith(words)
    assert done.stderr.count("\n") == bool(words)


def test_file_names_of_any_bytes_are_printed(tmp_path: Path) -> None:
    small_profile().save_csv(tmp_path / "\udcff.csv")
    ran = installed("solve", "\udcff.csv", "-o", "\udcfe.json", cwd=tmp_path)
    assert (ran.code, ran.err) == (0, "")
    assert "wrote \\udcfe.json" in ran.out


def test_profiles_are_listed_with_what_is_known_of_them(tmp_path: Path) -> None:
    table = envplan("profiles", cwd=tmp_path)
    document = json.loads(envplan("profiles", "--json", cwd=tmp_path).out)
    assert document["schema"] == "envplan/profiles/v1"
    listed = document["profiles"]
    assert table.code == 0
    assert listed
    for profile in listed:
        assert profile["name"] in table.out
        assert profile["source"] in ("measured", "modelled")
    sources = [profile["source"] for profile in listed]
    assert sources == sorted(sources)
    energies = {profile["name"]: profile["energy"] for profile in listed}
    assert energies["sosp24-a100-gpt3-xl-4stage"] == "identified"
    assert energies["sosp24-a100sxm-gpt3-175b-8stage"] == "measured"
    assert energies["a40-gpt3-1.3b-4stage"] == "modelled"


def test_long_work_says_how_far_it_is_where_there_is_no_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envplan.cli.output._REPORT_PERIOD_S", 0.01)
    arguments = ("frontier", "a40-gpt3-1.3b-4stage", "-m", 32)
    said = envplan(*arguments, cwd=tmp_path).err
    assert "Tracing the frontier of a40-gpt3-1.3b-4stage: 0 s so far\n" in said
    told = r"^choosing frequencies: [\d.]+% done after \d+ s, about \d+ s left$"
    assert re.search(told, said, re.MULTILINE)
    assert envplan(*arguments, "--quiet", cwd=tmp_path).err == ""
    source = Path(__file__).parents[1] / "profiles" / "sosp24-a100-gpt3-xl-4stage.csv"
    said = envplan("smooth", source, cwd=tmp_path).err
    assert re.search(r"\d of \d+ operations: [\d.]+% done", said)
