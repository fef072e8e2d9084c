"""Options: declared once, in panels, in one vocabulary, with units; and every command's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from cli_helpers import assert_refused, done, envplan, says, small_profile
from envplan.cli.app import app as every_command
from envplan.cli.command import add, argument, one_of, options, takes
from envplan.plan import Plan


@options(
    """
    Arguments:
      PLACE  Where it is.
    Job:
      -l, --late TIME  How late, in words
          that go on here; default: a second.
      --loud  With sound.
    Most used:
      --colour NAME  Which.
      --plot [FILE]  Draw it: .png or .svg; without a name: drawn.png.
    """,
    colour=one_of("red", "blue"),
)
class Group:
    place: Path
    late: float = 1.0
    loud: bool = False
    colour: str = "red"
    plot: Path | None = None
    name: str = argument("NAME", "A name.", "x")


def declared() -> tuple[typer.Typer, list[Any]]:
    app, received = typer.Typer(rich_markup_mode=None), list[Any]()

    @takes("""
    Job:
      --often N  How often.
    """)
    def command(group: Group, often: int = 1, dp: int | None = None) -> None:
        received.append((group, often, dp))

    add(app, command)
    return app, received


@pytest.mark.parametrize(
    ("line", "group", "often", "dp"),
    [
        ("here", {}, 1, None),
        ("here y --often 2k", {"name": "y"}, 2000, None),
        ("here -l 5ms --loud --dp 3", {"late": 0.005, "loud": True}, 1, 3),
        ("here --late 20ms --colour blue", {"late": 0.02, "colour": "blue"}, 1, None),
        ("here --plot", {"plot": Path("drawn.png")}, 1, None),
        ("here --plot --late 2", {"plot": Path("drawn.png"), "late": 2.0}, 1, None),
        ("here --plot a.svg", {"plot": Path("a.svg")}, 1, None),
    ],
)
def test_a_table_declares_options_by_name_and_unit(
    line: str, group: dict[str, Any], often: int, dp: int | None
) -> None:
    app, received = declared()
    done = CliRunner().invoke(app, line.split(), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert received == [(Group(place=Path("here"), **group), often, dp)]


def test_help_shows_a_table_in_panels_and_says_a_default_once() -> None:
    text = CliRunner().invoke(declared()[0], ["--help"]).output
    headings = [line for line in text.splitlines() if line.endswith(":") and line[0] != " "]
    assert headings == ["Arguments:", "Most used:", "Job:", "Output:"]
    words = " ".join(text.split())
    says(words, "-l, --late TIME How late, in words that go on here; default: a second. --loud")
    says(words, "Which. [default: red]", "--json Print JSON", "-q, --quiet")


def test_an_option_that_nothing_receives_is_found_at_once() -> None:
    with pytest.raises(AssertionError, match="Lost has no place for late"):

        @options("Job:\n  --late TIME  How late.")
        class Lost:
            early: float | None = None


def leaves(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    """The commands that do something themselves."""
    if not hasattr(command, "list_commands"):
        yield path, command
        return
    for name in command.list_commands(None):
        yield from leaves(f"{path} {name}", command.get_command(None, name))


COMMANDS = list(leaves("envplan", typer.main.get_command(every_command)))


def test_every_command_takes_json_and_quiet_and_says_in_a_line_what_it_does() -> None:
    for path, command in COMMANDS:
        names = {name for param in command.params for name in param.opts}
        assert {"--json", "--quiet"} <= names, path
        says(done("", *path.split()[1:], "--help"), "Example:\n    envplan ", f"  {path}")
        if path.count(" ") == 2:  # a list of commands shows its first sentence
            assert not command.get_short_help_str(66).endswith("..."), path


def test_every_option_refuses_numbers_that_are_none_and_other_types_of_file() -> None:
    numbers = files = 0
    for path, command in COMMANDS:
        for param in command.params:
            kind, name, typed = str(param.metavar), param.opts[-1], path.split()[1:]
            if kind in {"TIME", "PCT", "W", "J", "N", "M"} and param.opts != ["--start"]:
                for text in ("nan", "-1", "1e999"):
                    ran = envplan(*typed, name, text)
                    assert (ran.code, ran.err.count("\n")) == (2, 1), (path, name)
                    assert re.search(rf"{name}\b.* must be ", ran.err), ran.err
                    numbers += 1
            elif "FILE" in kind and re.search(r": \.\w+", param.help or ""):
                assert_refused(envplan(*typed, name, "x.zzz"), 2, f"{name} x.zzz must end in .")
                files += 1
    assert (numbers > 300, files > 20) == (True, True)


def test_help_of_solve_starts_with_what_most_people_need() -> None:
    text = done("solve --help")
    panels = ("Most used", "Job", "Target", "Slow clocks", "Noise", "Money", "Output")
    places = [text.index(f"\n{panel}:\n") for panel in panels]
    assert places == sorted(places)
    first = text[places[0] : places[1]]
    says(first, "--microbatches", "--target-time", "--slowdown", "--min-energy", "--output")
    assert first.count(" --") == 5


@pytest.fixture
def folder(folder: Path) -> Path:
    """The current folder, with a small profile of four stages."""
    small_profile(4).save_csv(folder / "profile.csv")
    return folder


def plan(line: str = "") -> Plan:
    ran = envplan("solve", *line.split())
    assert (ran.code, ran.err) == (0, "")
    return Plan.load("plan.json")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("--gpus-per-stage 4 --replicas 2", "--tp 4 --dp 2"),
        ("--chunks 2", "--vp 2"),
        ("--stages 2 --chunks 2", "--pp 2 --vp 2"),
        ("--gpus-per-stage 4", "--tp 2 --cp 2"),
        ("--switch-latency 20", "--switch-latency 0.02s"),
        ("--p2p-latency 0.001", "--p2p-latency 1ms"),
    ],
)
def test_old_names_and_plain_numbers_mean_the_same(folder: Path, old: str, new: str) -> None:
    assert plan(old) == plan(new)


def test_what_the_sidecar_says_counts_and_a_contradiction_is_told(folder: Path) -> None:
    job = plan("--pp 2").job
    assert (job.schedule, job.stages, job.chunks) == ("interleaved", 2, 2)
    sidecar = folder / "profile.meta.json"
    known = json.loads(sidecar.read_text())
    sidecar.write_text(json.dumps(known | {"tensor_parallel": 4}))
    assert plan().job.gpus_per_stage == 4
    ran = envplan("solve", "--tp", 2, "--cp", 2)
    assert ran.code == 0
    assert "warning: profile.csv was made with --tp 4, not 2" in ran.err
    assert Plan.load("plan.json").job.gpus_per_stage == 4
    shape = {"stages": 2, "chunks": 2, "schedule": "interleaved"}
    sidecar.write_text(json.dumps(known | {"job": shape}))
    assert (plan().job.stages, plan("--pp 2").job.chunks) == (2, 2)
    ran = envplan("solve", "--pp", 4)
    assert ran.code == 0, ran.err
    assert "was made with --pp 2, not 4: its 4 model stages are shared out anew" in ran.err
