"""What a newcomer meets in the first hour: words, names, and the command to type next."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pandas as pd
import pytest
from pydantic import BaseModel

from cli_helpers import assert_refused, done, envplan, says, small_profile, told
from envplan import InputError, Pipeline, Plan, Profile, simulate, trace_frontier
from envplan.sweep.table import SweepRow, cheapest_row, cost_saved

JOB = "a40-gpt3-1.3b-4stage -m 8"


def test_names_to_complete_are_those_of_users() -> None:
    profile = small_profile(2)
    frontier = trace_frontier(Pipeline("1f1b", 2, 4), profile)
    plan = frontier.plan(slowdown=0.02)
    for shown in (plan, frontier, plan.job, plan.predicted):
        names = {name for name in dir(shown) if not name.startswith("_")}
        assert not {name for name in names if name.endswith(("_ns", "_10fj", "_10uw"))}
        assert not names & set(dir(BaseModel))
        assert all(hasattr(shown, name) for name in names)
    assert {
        "energy",
        "gap",
        "frequencies",
        "iteration_time",
        "save",
        "load",
        "to_dataframe",
    } <= set(dir(plan))
    assert {"plan", "solve", "energy_at", "min_time", "times", "plot"} <= set(dir(frontier))
    # What the library uses is still there.
    assert plan.model_dump()["planner"] == "frontier"


def test_a_profile_is_a_frame_and_back() -> None:
    profile = small_profile(2)
    frame = profile.to_frame()
    assert list(frame.columns[:5]) == ["stage", "instruction", "frequency", "time", "energy"]
    pd.testing.assert_frame_equal(Profile.from_dataframe(frame).to_frame(), frame)


def test_a_frontier_plots_into_the_format_of_its_name_or_says_which_there_are(
    tmp_path: Path,
) -> None:
    frontier = trace_frontier(Pipeline("1f1b", 2, 4), small_profile(2))
    frontier.plot(tmp_path / "f.html", plans=3)
    says((tmp_path / "f.html").read_text(), 'data-chart="explorer"')
    with pytest.raises(InputError, match=r"x\.gif: must end in \.png or \.svg or \.pdf"):
        frontier.plot(tmp_path / "x.gif", plans=3)
    assert not (tmp_path / "x.gif").exists()


def test_another_profile_is_said_to_be_another_one(folder: Path) -> None:
    done(f"solve {JOB} --quiet")
    other = "a40-gpt3-1.3b-8stage"
    ran = envplan("simulate", "plan.json", "--profile", other, cwd=folder)
    assert_refused(ran, 2, f"plan for profile a40-gpt3-1.3b-4stage; {other} is another profile")
    assert "changed since" not in ran.err


def test_a_changed_profile_is_said_to_have_changed(folder: Path) -> None:
    done("solve --quiet")
    text = Path("profile.csv").read_text()
    Path("profile.csv").write_text(text + "\n")
    assert_refused(envplan("simulate", "plan.json", cwd=folder), 2, "has changed since")


def test_apply_and_report_say_what_late_clocks_do(folder: Path) -> None:
    done(f"solve {JOB} --quiet")
    words = "clocks are taken to come at once; published, not measured here: 2 to 12 ms on A40"
    says(done("apply"), words, "where clocks are asked for ahead")
    done("report --no-compare")
    says(Path("report.html").read_text(), words[1:])


def test_a_better_order_is_named_with_the_command_that_plans_it(folder: Path) -> None:
    out = done(f"solve {JOB}")
    line = next(line for line in out.splitlines() if line.startswith("EnvPipe's order"))
    most = float(re.findall(r"up to ([0-9.]+)%", line)[0])
    plan = Plan.load("plan.json")
    done("", *shlex.split(line.partition(": ")[2])[1:], "-o", "better.json")
    better = Plan.load("better.json")
    assert better.iteration_time <= plan.iteration_time
    saved_percent = 100 * (1 - better.energy / plan.predicted.baseline.energy_j)
    assert plan.savings.percent + 0.5 < saved_percent <= most + 0.05
    done("report plan.json --no-compare")
    says(Path("report.html").read_text(), "order of the same operations saves up to")
    assert any("EnvPipe" in note for note in told(f"solve {JOB}")["notes"])


@pytest.mark.parametrize(
    "options", ["--schedule gpipe", "--peak-power-cap 2000", "--planner envpipe"]
)
def test_no_order_is_named_where_plans_do_not_compare(folder: Path, options: str) -> None:
    assert "EnvPipe's order" not in done(f"solve {JOB} {options}")


def test_a_sweep_recommends_by_cost(folder: Path) -> None:
    Path("sweep.toml").write_text(
        "[grid]\nprofiles = ['a40-gpt3-1.3b-4stage']\nmicrobatches = [8]\nslowdowns = [0, 15]\n"
    )
    out = done("sweep sweep.toml")
    says(out, "least cost at 0.12 a kWh and 2 a GPU and hour (assumed; --price")
    assert "--slowdown 15" not in out.splitlines()[-1]
    # Where time costs nothing, the least energy is the least cost.
    cheap = told("sweep sweep.toml --price 0.12 --gpu-hour 0")
    assert "--slowdown 15" in cheap["next"]
    assert cheap["recommended_by"] == {"price": 0.12, "gpu_hour": 0}


def test_the_cost_that_a_point_saves_is_that_of_its_gpus_and_its_energy() -> None:
    plan = trace_frontier(Pipeline("1f1b", 2, 4), small_profile(2), replicas=3).plan(slowdown=0.1)
    row = SweepRow(
        profile="p",
        chunks=1,
        planner="frontier",
        target="slowdown",
        recompute=False,
        seed=0,
        stages=2,
        replicas=3,
        iteration_time_s=plan.iteration_time,
        energy_j=plan.energy,
        savings_percent=plan.predicted.savings_percent,
        slowdown_percent=plan.predicted.slowdown_percent,
    )
    baseline = plan.predicted.baseline
    usual = 6 * baseline.iteration_time_s / 3600 * 2.5 + baseline.energy_j / 3.6e6 * 0.2
    now = 6 * plan.iteration_time / 3600 * 2.5 + plan.energy / 3.6e6 * 0.2
    assert cost_saved(row, price=0.2, gpu_hour=2.5) == pytest.approx(1 - now / usual)
    assert cheapest_row([row], price=0.2, gpu_hour=2.5) is row
    assert cheapest_row([], price=0.2, gpu_hour=2.5) is None


def test_a_timeline_keeps_its_names() -> None:
    profile = small_profile(2)
    timeline = simulate(trace_frontier(Pipeline("1f1b", 2, 4), profile).plan(), profile)
    assert {"iteration_time", "energy", "stages"} <= set(dir(timeline))


def test_a_picture_is_drawn_in_the_terminal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "40")
    before = set(folder.iterdir())
    out = done(f"frontier {JOB} --plot -")
    rows = [line.partition("│")[2] for line in out.splitlines() if "│" in line]
    assert len(rows) == 30
    assert max(map(len, rows)) <= 86
    assert sum(row.count("x") for row in rows) == 1
    assert sum(row.count("o") for row in rows) > 10
    says(out, "x maximum frequency, o plans, curve: exact relaxed frontier")
    # Marks of plans fall from left to right, as energy does.
    first = next(row for row in rows if "o" in row)
    last = next(row for row in reversed(rows) if "o" in row)
    assert first.index("o") < last.rindex("o")
    out = done(f"compare {JOB} --plot -")
    says(out, "z Zeus, one clock for all | s Zeus, one clock a stage | e EnvPipe")
    coloured = done(f"--color always frontier {JOB} --plot -")
    assert "\x1b[" in coloured
    assert set(folder.iterdir()) == before
