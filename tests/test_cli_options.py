"""Options: declared once, in panels, in one vocabulary, with units."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from cli_helpers import envplan, says, small_profile
from envplan.cli.command import add, argument, one_of, options, takes
from envplan.plan import Plan
from envplan.profile import Profile


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    small_profile(4).save_csv(tmp_path / "profile.csv")
    return tmp_path


def plan(folder: Path, *arguments: object) -> Plan:
    ran = envplan("solve", *arguments, cwd=folder)
    assert (ran.code, ran.err) == (0, "")
    return Plan.load(folder / "plan.json")


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
    ("arguments", "group", "often", "dp"),
    [
        (["here"], {}, 1, None),
        (["here", "y", "--often", "2k"], {"name": "y"}, 2000, None),
        (["here", "-l", "5ms", "--loud", "--dp", "3"], {"late": 0.005, "loud": True}, 1, 3),
        (["here", "--late", "20ms", "--colour", "blue"], {"late": 0.02, "colour": "blue"}, 1, None),
        (["here", "--plot"], {"plot": Path("drawn.png")}, 1, None),
        (["here", "--plot", "--late", "2"], {"plot": Path("drawn.png"), "late": 2.0}, 1, None),
        (["here", "--plot", "a.svg"], {"plot": Path("a.svg")}, 1, None),
    ],
)
def test_a_table_declares_options_by_name_and_unit(
    arguments: list[str], group: dict[str, Any], often: int, dp: int | None
) -> None:
    app, received = declared()
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
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


def test_help_of_solve_starts_with_what_most_people_need(tmp_path: Path) -> None:
    text = envplan("solve", "--help", cwd=tmp_path).out
    panels = ("Most used", "Job", "Target", "Slow clocks", "Noise", "Money", "Output")
    places = [text.index(f"\n{panel}:\n") for panel in panels]
    assert places == sorted(places)
    first = text[places[0] : places[1]]
    for name in ("--microbatches", "--target-time", "--slowdown", "--min-energy", "--output"):
        assert name in first
    assert first.count(" --") == 5


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (["--gpus-per-stage", 4, "--replicas", 2], ["--tp", 4, "--dp", 2]),
        (["--chunks", 2], ["--vp", 2]),
        (["--stages", 2, "--chunks", 2], ["--pp", 2, "--vp", 2]),
        (["--gpus-per-stage", 4], ["--tp", 2, "--cp", 2]),
        (["--switch-latency", 20], ["--switch-latency", "0.02s"]),
        (["--p2p-latency", 0.001], ["--p2p-latency", "1ms"]),
    ],
)
def test_old_names_and_plain_numbers_mean_the_same(
    folder: Path, old: list[object], new: list[object]
) -> None:
    assert plan(folder, *old) == plan(folder, *new)


def test_pipeline_stages_alone_tell_the_chunks(folder: Path) -> None:
    job = plan(folder, "--pp", 2).job
    assert (job.schedule, job.stages, job.chunks) == ("interleaved", 2, 2)


def test_tensor_parallelism_comes_from_the_sidecar_and_a_contradiction_is_told(
    folder: Path,
) -> None:
    sidecar = folder / "profile.meta.json"
    document = json.loads(sidecar.read_text()) | {"tensor_parallel": 4}
    sidecar.write_text(json.dumps(document))
    assert Profile.read_csv(folder / "profile.csv").metadata.tensor_parallel == 4
    assert plan(folder).job.gpus_per_stage == 4
    ran = envplan("solve", "--tp", 2, "--cp", 2, cwd=folder)
    assert ran.code == 0
    assert "warning: profile.csv was made with --tp 4, not 2" in ran.err
    assert Plan.load(folder / "plan.json").job.gpus_per_stage == 4


def test_a_shape_that_contradicts_the_sidecar_is_told(folder: Path) -> None:
    sidecar = folder / "profile.meta.json"
    document = json.loads(sidecar.read_text())
    document["job"] = {"stages": 2, "chunks": 2, "schedule": "interleaved"}
    sidecar.write_text(json.dumps(document))
    assert (plan(folder).job.stages, plan(folder, "--pp", 2).job.chunks) == (2, 2)
    ran = envplan("solve", "--pp", 4, cwd=folder)
    assert ran.code == 0, ran.err
    assert "was made with --pp 2, not 4: its 4 model stages are shared out anew" in ran.err
