from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from cli_helpers import done, envplan, says, small_profile, told
from envplan.cli.frontier import sketch
from envplan.cli.output import print_table
from envplan.frontier_file import distinct
from envplan.pipeline import Pipeline
from envplan.plan import Plan
from envplan.solve import trace_frontier

PNG = b"\x89PNG\r\n\x1a\n"
COLUMNS = (
    "iteration_time_s,energy_j,lower_bound_j,gap,average_power_w,slowdown_percent,savings_percent"
)


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"profile.csv", "profile.meta.json"}


def test_bare_plot_reads_profile_csv_and_writes_frontier_png(folder: Path) -> None:
    ran = envplan("frontier", "--plot")
    assert ran.code == 0, ran.err
    assert files(folder) == {"frontier.png"}
    assert (folder / "frontier.png").read_bytes().startswith(PNG)
    assert ran.err == ""
    says(ran.out, "modelled", "max frequency", "T_min", "T_star", "at no slowdown", "70", "default")


def test_plot_and_output_stand_in_any_order(folder: Path) -> None:
    for arguments, written in (
        (["--plot", "out.svg"], {"out.svg"}),
        (["profile.csv", "--plot"], {"frontier.png"}),
        (["--plot", "-o", "x.csv"], {"frontier.png", "x.csv"}),
        (["-o", "x.json", "--plot"], {"frontier.png", "x.json"}),
        (["--plot=a.pdf"], {"a.pdf"}),
        (["--plot", "--", "profile.csv"], {"frontier.png"}),
    ):
        done("frontier --quiet", *arguments)
        assert files(folder) == written
        for name in written:
            (folder / name).unlink()


def test_files_hold_plans_and_breakpoints_and_json_is_what_is_printed(folder: Path) -> None:
    """The rows of a table are those of the JSON file: test_frontier_file.py."""
    document = told("frontier -o f.json")
    assert done("frontier -o f.csv --quiet") == ""
    assert (folder / "f.csv").read_text().splitlines()[0] == COLUMNS
    assert json.loads((folder / "f.json").read_text()) == document
    assert document["schema"] == "envplan/frontier/v1"
    times = document["breakpoints"]["iteration_time_s"]
    assert times == sorted(times)
    assert (times[0], times[-1]) == (document["t_min_s"], document["t_star_s"])
    plans = document["plans"]
    assert len(plans) > 5
    assert plans == sorted(plans, key=lambda plan: plan["iteration_time_s"])
    for plan in plans:
        assert [*plan] == [*COLUMNS.split(","), "frequencies_mhz"]
        assert [len(stage) for stage in plan["frequencies_mhz"]] == [8, 8]
        assert plan["lower_bound_j"] <= plan["energy_j"]
        assert plan["gap"] == pytest.approx(plan["energy_j"] / plan["lower_bound_j"] - 1)
    assert plans[0]["slowdown_percent"] <= 0 < plans[0]["savings_percent"]


def test_sidecar_says_schedule_and_microbatches_unless_told_otherwise(folder: Path) -> None:
    small_profile(4, microbatches=8, schedule="gpipe").save_csv(folder / "profile.csv")
    for arguments, expected in (
        ([], ("gpipe", 4, 8, 1)),
        (["-m", "4", "--schedule", "1f1b"], ("1f1b", 4, 4, 1)),
        (["--chunks", "2", "--schedule", "interleaved"], ("interleaved", 2, 8, 2)),
    ):
        job = told("frontier", *arguments)["job"]
        assert (job["schedule"], job["stages"], job["microbatches"], job["chunks"]) == expected


def test_distinct_leaves_out_plans_that_another_beats() -> None:
    frontier = trace_frontier(Pipeline("1f1b", 2, 4), small_profile())
    plans = frontier.sample_plans(9)
    worse = plans[0].model_copy(
        update={
            "predicted": plans[0].predicted.model_copy(
                update={"iteration_time_s": plans[-1].iteration_time}
            )
        }
    )
    kept: list[Plan] = distinct([*plans, worse, plans[0]])
    assert worse not in kept
    assert len({(p.iteration_time, p.energy) for p in kept}) == len(kept)


@pytest.mark.parametrize("width", [40, 60, 200])
def test_a_narrow_terminal_wraps_words_and_cuts_no_number(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    rows = [["maximum frequency", "4.14904", "3677.2"], ["", "14.22638", "3104.6"]]
    print_table("", ("", "iteration time (s)", "energy of all GPUs (J)"), rows)
    text = re.sub("\x1b.*?m", "", capsys.readouterr().out)
    assert "…" not in text
    assert all(cell in text.split() for row in rows for cell in row[1:])
    assert max(map(len, text.splitlines())) <= width


def test_the_text_draws_the_curve() -> None:
    said = envplan("frontier", "a40-gpt3-1.3b-4stage", "--microbatches", "4").out
    assert "curve: exact relaxed frontier" in said
    assert re.search("[\u2801-\u28ff]", said)


def test_a_falling_line_falls() -> None:
    lines = sketch([(0, 1), (1, 0)], [], width=8, height=2, units=(" s", " J"))
    assert lines == ["1 J │⠉⠒⠤⣀", "0 J │    ⠉⠒⠤⣀", "    └────────", "     0 s  1 s"]
