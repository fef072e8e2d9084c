"""Options: declared once, in panels, in one vocabulary, with units; and every command's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from cli_helpers import assert_refused, done, envplan, says, small_profile
from envplan._io.words import enumerated
from envplan.cli.app import app as every_command
from envplan.cli.help import add_command
from envplan.cli.types import OPTIONAL_FILE, InputFile, OutputFile, one_of, quantity
from envplan.errors import InputError
from envplan.pipeline.schedules import schedules_of_any_chunks
from envplan.plan import Plan
from envplan.quantities import COUNT, TIME


@dataclass(frozen=True, kw_only=True)
class Inner:
    """A group in a group."""

    late: Annotated[
        float,
        typer.Option(
            "-l",
            "--late",
            metavar="TIME",
            parser=quantity(TIME),
            help="How late; default: a second.",
            show_default=False,
            rich_help_panel="Job",
        ),
    ] = 1.0


@dataclass(frozen=True, kw_only=True)
class Group:
    """Options of every kind."""

    place: Annotated[Path, typer.Argument(metavar="PLACE", help="Where it is."), InputFile()]
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name.")] = "x"
    inner: Inner
    loud: Annotated[bool, typer.Option("--loud", help="With sound.", rich_help_panel="Job")] = False
    colour: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            parser=one_of("red", "blue"),
            help="Which.",
            rich_help_panel="Most used",
        ),
    ] = "red"
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar=OPTIONAL_FILE,
            parser=OutputFile(".png", ".svg", bare="drawn.png"),
            help="Draw it.",
            rich_help_panel="Most used",
        ),
    ] = None


def spread() -> tuple[typer.Typer, list[tuple[Group, int]]]:
    """An app of one command, and what that command received."""
    app, received = typer.Typer(rich_markup_mode=None), list[tuple[Group, int]]()

    def command(
        group: Group,
        often: Annotated[int, typer.Option(metavar="N", parser=quantity(COUNT))] = 1,
    ) -> None:
        received.append((group, often))

    add_command(app, command)
    return app, received


@pytest.mark.parametrize(
    ("line", "group", "often"),
    [
        ("here", {}, 1),
        ("here y --often 2k", {"name": "y"}, 2000),
        ("here -l 5ms --loud", {"inner": Inner(late=0.005), "loud": True}, 1),
        ("here --colour blue", {"colour": "blue"}, 1),
        ("here --plot", {"plot": Path("drawn.png")}, 1),
        ("here --plot -l 2", {"plot": Path("drawn.png"), "inner": Inner(late=2.0)}, 1),
        ("here --plot a.svg", {"plot": Path("a.svg")}, 1),
    ],
)
def test_fields_of_groups_become_options_and_come_back_in_their_groups(
    folder: Path, line: str, group: dict[str, Any], often: int
) -> None:
    app, received = spread()
    run = CliRunner().invoke(app, line.split(), catch_exceptions=False)
    assert run.exit_code == 0, run.output
    assert received == [(Group(**{"place": Path("here"), "inner": Inner()} | group), often)]


def test_help_shows_options_in_panels_and_says_a_default_once() -> None:
    text = CliRunner().invoke(spread()[0], ["--help"]).output
    headings = [line for line in text.splitlines() if line.endswith(":") and line[0] != " "]
    assert headings == ["Arguments:", "Most used:", "Job:", "Output:"]
    words = " ".join(text.split())
    says(words, "-l, --late TIME How late; default: a second. --loud")
    says(words, "Which. [default: red]", "--json Print JSON", "-q, --quiet")


def test_an_output_does_not_replace_an_input(folder: Path) -> None:
    app, received = spread()
    Path("here.svg").touch()
    with pytest.raises(InputError, match=r"here\.svg: is an input itself"):
        CliRunner().invoke(app, ["here.svg", "--plot", "here.svg"], catch_exceptions=False)
    assert received == []


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
        ("--p2p-latency 0.001", "--p2p-latency 1ms"),
    ],
)
def test_old_names_and_plain_numbers_mean_the_same(folder: Path, old: str, new: str) -> None:
    assert plan(old) == plan(new)


def test_a_plain_latency_is_in_milliseconds_and_says_so(folder: Path) -> None:
    ran = envplan("solve", "--switch-latency", "20")
    assert (ran.code, ran.err) == (0, "envplan: warning: 20 is read as 20ms; say so: 20ms\n")
    assert Plan.load("plan.json") == plan("--switch-latency 0.02s")


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


def test_help_of_chunks_names_the_schedules_that_run_any_number_of_them() -> None:
    help_text = " ".join(done("solve --help").split())
    assert f"for {enumerated(schedules_of_any_chunks())};" in help_text
