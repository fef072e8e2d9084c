"""The web pages: reports, frontiers, timelines."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cli_helpers import done, says, small_profile, told
from envplan._io.words import significant
from envplan.pipeline import Pipeline
from envplan.plan import Plan
from envplan.planners import compare
from envplan.plotting import page
from envplan.plotting.page_data import (
    ExplorerChart,
    FrontierChart,
    TimelineChart,
    TimelineData,
)
from envplan.plotting.report import (
    Report,
    frontier_page,
    report_page,
    timeline_page,
)
from envplan.profile import Profile
from envplan.simulation.iteration import simulate
from envplan.solve import Frontier, trace_frontier


@pytest.fixture(scope="module")
def frontier() -> Frontier:
    return trace_frontier(Pipeline("1f1b", 3, 4), small_profile(stages=3))


def data_of(text: str) -> dict[str, Any]:
    found = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    document: dict[str, Any] = json.loads(found[1])
    return document


def test_a_report_has_all_plans_planners_and_operations(frontier: Frontier) -> None:
    plan, along = frontier.plan(slowdown=0.02), frontier.sample_plans(5)
    timeline = simulate(plan, frontier.profile)
    report = Report(
        plan=plan,
        plan_file=Path("plan.json"),
        frontier=frontier,
        along=along,
        timeline=timeline,
        baseline=timeline.at_max_frequency(),
        comparison=compare(frontier),
    )
    text = report_page(report)
    # It fetches nothing.
    assert not re.search(r'(src|href)\s*=\s*["\'](?!#|data:)', text)
    assert not re.search(r"@import|url\(", text)
    says(
        text,
        f"{plan.predicted.savings_percent:.1f}%",
        '<span class="badge modelled">modelled</span> | modelled, not measured',
        "(assumed; say <code>--price</code>)",
        plan.profile.sha256,
    )
    explorer, drawn = (data_of(text)[name] for name in ("explorer", "timeline"))
    chart = explorer["frontier"]
    assert explorer["frames"] == []
    assert [point["time"] for point in chart["plans"]] == [plan.iteration_time for plan in along]
    planners = [point["planner"] for point in chart["points"]]
    rivals = ["zeus_global", "zeus_per_stage", "envpipe"]
    assert planners == ["max_frequency", *rivals, "frontier", "this_plan"]
    # Neither EnvPipe's plan nor ours on its schedule contradicts this schedule's T_min.
    labels = [point["label"] for point in chart["points"] if point["time"] < chart["t_min"]]
    assert all("(schedule envpipe)" in label for label in labels)
    curve = chart["curve"]
    assert (curve[0][0], curve[-1][0]) == (frontier.min_time, frontier.min_energy_time)
    both = timeline.at_max_frequency(), timeline
    for one, shown in zip(drawn["timelines"], both, strict=True):
        ops = one["ops"]
        assert len(ops["start"]) == len(shown.operations)
        joules = sum(w * t for w, t in zip(ops["watts"], ops["time"], strict=True))
        assert joules == pytest.approx(shown.computation_energy, rel=1e-5)
        assert sum(ops["critical"]) == len(shown.critical_path)
    assert drawn["span"] == max(shown.sync_time for shown in both)


def types_of_the_script() -> dict[str, list[str]]:
    """The keys of each type of object that the script documents."""
    comment = re.search(r"/\*\*.*?\*/", page.script(), re.DOTALL)
    assert comment is not None
    types: dict[str, list[str]] = {}
    lines = re.findall(
        r"@typedef \{object\} (\w+)|@property \{.*\} (\w+)(?: -|$)", comment[0], re.MULTILINE
    )
    for name, key in lines:
        if name:
            keys = types[name] = []
        else:
            keys.append(key)
    return types


def test_the_script_and_the_pages_agree_on_the_data_of_charts(frontier: Frontier) -> None:
    plans = frontier.sample_plans(2)
    timelines = [simulate(plan, frontier.profile) for plan in plans]
    chart = FrontierChart.of(frontier, plans, comparison=compare(frontier), this_plan=plans[0])
    explorer = ExplorerChart.of(chart, timelines).to_dict()
    timeline = TimelineData.of(timelines[0], "plan")
    written = {
        "FrontierChart": chart.to_dict(),
        "PlannerCurve": chart.curves[0].to_dict(),
        "PlanPoint": chart.baseline.to_dict(),
        "TimelineChart": TimelineChart.of({"plan": timelines[0]}).to_dict(),
        "ExplorerChart": explorer,
        "TimelineData": timeline.to_dict(),
        "OperationColumns": timeline.operations.to_dict(),
    }
    assert types_of_the_script() == {name: list(data) for name, data in written.items()}
    script = page.script().partition("*/")[2]
    for name, data in written.items():
        for key in data:
            assert re.search(rf"\b{key}\b", script), f"the script does not use {key} of {name}"


def test_a_hostile_name_stays_text() -> None:
    text = page.document("<b>", "<script>alert(1)</script>", "&", None, [], {"a": "</script>"})
    assert "<script>alert" not in text
    assert data_of(text) == {"a": "</script>"}


def test_a_timeline_has_a_page_of_its_own(frontier: Frontier) -> None:
    timeline = simulate(frontier.plan(slowdown=0.02), frontier.profile)
    text = timeline_page(timeline, timeline.at_max_frequency())
    assert len(data_of(text)["timeline"]["timelines"]) == 2


def test_the_page_of_a_frontier_has_timeline_and_stages_of_each_plan(frontier: Frontier) -> None:
    along, slower = frontier.sample_plans(5), frontier.slower_plans_to_draw()
    explorer = data_of(frontier_page(frontier, along, slower=slower))["explorer"]
    points = [*explorer["frontier"]["plans"], *explorer["frontier"]["slower"]]
    assert [point["time"] for point in points] == [
        plan.iteration_time for plan in (*along, *slower)
    ]
    tables = zip(points, explorer["frames"], explorer["stages"], strict=True)
    for point, frame, stages in tables:
        assert frame["power"]["times"][-1] == pytest.approx(point["time"])
        energies = [energy for energy, *_ in stages]
        assert sum(energies) == pytest.approx(point["energy"])
    # The columns that all frames share are written once.
    first, *others = (frame["ops"] for frame in explorer["frames"])
    assert all(
        first.keys() - ops.keys() == {"microbatch", "chunk", "stage", "kind"} for ops in others
    )
    assert all(len(ops["mhz"]) == len(first["stage"]) for ops in others)


def test_pages_of_large_frontiers_show_fewer_plans_and_then_no_timelines(
    frontier: Frontier, monkeypatch: pytest.MonkeyPatch
) -> None:
    along, slower = frontier.sample_plans(9), frontier.slower_plans_to_draw()
    num_operations = len(frontier.pipeline.operations)
    room = "envplan.plotting.report._MAX_EMBEDDED_OPERATIONS"
    monkeypatch.setattr(room, 8 * num_operations)
    explorer = data_of(frontier_page(frontier, along, slower=slower))["explorer"]
    shown = explorer["frontier"]["plans"]
    assert 5 <= len(explorer["frames"]) <= 8
    assert len(shown) < len(along)
    assert (shown[0]["time"], shown[-1]["time"]) == (
        along[0].iteration_time,
        along[-1].iteration_time,
    )
    monkeypatch.setattr(room, 4 * num_operations)
    explorer = data_of(frontier_page(frontier, along, slower=slower))["explorer"]
    assert explorer["frames"] == []
    assert len(explorer["frontier"]["plans"]) == len(along)


def test_large_jobs_have_no_slower_plans_and_long_curves_are_thinned(
    frontier: Frontier, monkeypatch: pytest.MonkeyPatch
) -> None:
    along = frontier.sample_plans(5)
    slower = frontier.slower_plans_to_draw()
    drawn = data_of(frontier_page(frontier, along, slower=slower))["explorer"]["frontier"]
    times = [plan["time"] for plan in drawn["slower"]]
    assert times == sorted(times)
    assert drawn["t_star"] < times[0] <= times[-1] <= drawn["t_max"]
    monkeypatch.setattr("envplan.solve.frontier._MAX_OPERATIONS_FOR_SLOWER", 10)
    monkeypatch.setattr("envplan.plotting.page_data.MAX_CURVE_POINTS", 5)
    assert frontier.slower_plans_to_draw() == []
    thin = data_of(frontier_page(frontier, along))["explorer"]["frontier"]
    assert 2 < len(thin["curve"]) <= 6 < len(frontier.times)
    assert [thin["curve"][k][0] for k in (0, -1)] == [frontier.min_time, frontier.min_energy_time]


def test_a_page_names_its_profile_once(frontier: Frontier) -> None:
    assert "; profile small<" in frontier_page(frontier, frontier.sample_plans(2))
    frame = frontier.profile.to_frame()
    unnamed = trace_frontier(Pipeline("1f1b", 3, 4), Profile.from_dataframe(frame))
    text = frontier_page(unnamed, unnamed.sample_plans(2))
    assert "profile profile" not in text
    assert "; profile.csv<" in text


@pytest.mark.parametrize("count", [1, 4, 6, 7, 8, 11, 13])
def test_rows_of_cards_are_about_alike(count: int) -> None:
    text = page.cards([page.Card("1", "one")] * count)
    found = re.search(r"--columns: (\d+)", text)
    assert found is not None
    columns = int(found[1])
    assert columns <= 6
    in_last_row = count % columns or columns
    num_rows = -(-count // columns)
    assert columns - in_last_row < num_rows


def reported(line: str = "") -> str:
    """The page about the plan in the current folder."""
    done(f"report --no-compare {line}")
    return Path("report.html").read_text()


def test_the_commands_write_what_they_say(folder: Path) -> None:
    done("solve --slowdown 1")
    for line, name in (
        ("report", "report.html"),
        ("frontier --plot g.html", "g.html"),
        ("frontier --animate walk.html", "walk.html"),
        ("timeline", "timeline.png"),
        ("timeline -o t.svg", "t.svg"),
        ("timeline --alone -o t.html", "t.html"),
        ("simulate --plot s.html", "s.html"),
        ("compare --plot c.html", "c.html"),
    ):
        assert f"wrote {name}" in done(line)
        assert (folder / name).stat().st_size > 1000


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--slowdown 3", "Clocks change at once"),
        ("--slowdown 3 --switch-latency 10", "Every clock comes 10 ms after it is asked for"),
        ("--slowdown 3 --robust 90 --noise 1", "of 10000 replays end by"),
        ("--straggler-time 9", "energy saved until the straggler has finished"),
    ],
)
def test_a_report_says_what_it_takes_for_granted_and_counts_the_waiting(
    folder: Path, options: str, words: str
) -> None:
    done(f"solve {options}")
    text = reported()
    assert words in text
    assert "`" not in text.partition("<script")[0]
    if until := Plan.load("plan.json").predicted.until_straggler:
        saved = 100 * (1 - until.energy_j / until.baseline_energy_j)
        says(text, f"<b>{saved:.1f}%</b><span>{words}")
        says(text, f"<b>{100 * until.gap:.3f}%</b><span>certified gap, waiting included")
        assert data_of(text)["explorer"]["frontier"]["straggler"] == 9


def test_a_report_tells_money_and_carbon_of_the_run(folder: Path) -> None:
    done("solve --slowdown 1")
    run = "--price 0.25 --currency EUR --carbon 380 --iterations 1000000"
    document, text = told(f"report --no-compare {run}"), reported(run)
    predicted = Plan.load("plan.json").predicted
    assert (document["energy_j"], document["source"]) == (predicted.energy_j, "modelled")
    saved_kwh = (predicted.baseline.energy_j - predicted.energy_j) / 3.6
    says(text, f"<b>{significant(saved_kwh * 0.25)} EUR</b> | at 380 g a kWh")
    says(text, f"<b>{significant(saved_kwh * 0.38)} kg CO2</b>")


def test_the_script_of_the_pages_parses(tmp_path: Path) -> None:
    """Where node is there: a slip in the script would else only show in a browser."""
    (tmp_path / "script.js").write_text(page.script())
    try:
        ran = subprocess.run(
            ["node", "--check", tmp_path / "script.js"], capture_output=True, text=True
        )
    except FileNotFoundError:
        pytest.skip("node is not installed")
    assert ran.returncode == 0, ran.stderr
