from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cli_helpers import done, small_profile, told
from envplan._words import significant
from envplan.pipeline import Pipeline
from envplan.plan import Plan
from envplan.planners.comparison import compare
from envplan.plotting import page
from envplan.plotting.report import animation_page, frontier_page, report_page, timeline_page
from envplan.simulation import Timeline, simulate
from envplan.solve import Frontier, trace_frontier


@pytest.fixture(scope="module")
def frontier() -> Frontier:
    return trace_frontier(Pipeline("1f1b", 3, 4), small_profile(stages=3))


@pytest.fixture(scope="module")
def plan(frontier: Frontier) -> Plan:
    return frontier.plan(slowdown=0.02)


@pytest.fixture(scope="module")
def timeline(frontier: Frontier, plan: Plan) -> Timeline:
    return simulate(plan, frontier.profile)


@pytest.fixture(scope="module")
def report(frontier: Frontier, plan: Plan, timeline: Timeline) -> str:
    along = frontier.sample_plans(5)
    return report_page(plan, Path("plan.json"), frontier, along, timeline, compare(frontier))


def data_of(text: str) -> dict[str, Any]:
    found = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    document: dict[str, Any] = json.loads(found[1])
    return document


def test_a_page_fetches_nothing(report: str) -> None:
    assert not re.search(r'(src|href)\s*=\s*["\'](?!#|data:)', report)
    assert "@import" not in report
    assert "url(" not in report


def test_a_report_says_what_is_saved_and_that_it_is_modelled(report: str, plan: Plan) -> None:
    assert f"{plan.predicted.savings_percent:.1f}%" in report
    assert '<span class="badge modelled">modelled</span>' in report
    assert "modelled, not measured" in report
    assert "(assumed; say <code>--price</code>)" in report
    assert plan.profile.sha256 in report


def test_the_chart_has_every_plan_and_planner(report: str, frontier: Frontier) -> None:
    chart = data_of(report)["frontier"]
    times = [plan.iteration_time for plan in frontier.sample_plans(5)]
    assert [point["time"] for point in chart["plans"]] == times
    planners = [point["planner"] for point in chart["points"]]
    rivals = ["zeus_global", "zeus_per_stage", "envpipe"]
    assert planners == ["max_frequency", *rivals, "frontier", "this_plan"]
    # Neither EnvPipe's plan nor ours on its schedule contradicts this schedule's T_min.
    labels = [point["label"] for point in chart["points"] if point["time"] < chart["t_min"]]
    assert all("(schedule envpipe)" in label for label in labels)
    assert chart["curve"][0][0] == frontier.min_time
    assert chart["curve"][-1][0] == frontier.min_energy_time


def test_timelines_hold_every_operation(report: str, timeline: Timeline) -> None:
    chart = data_of(report)["timeline"]
    both = timeline.at_max_frequency(), timeline
    for drawn, shown in zip(chart["timelines"], both, strict=True):
        ops = drawn["ops"]
        assert len(ops["start"]) == len(shown.rows)
        joules = sum(w * t for w, t in zip(ops["watts"], ops["time"], strict=True))
        assert joules == pytest.approx(shown.computation_energy, rel=1e-5)
        assert sum(ops["critical"]) == len(shown.critical_path)
    assert chart["span"] == max(shown.sync_time for shown in both)


def test_a_hostile_name_stays_text() -> None:
    text = page.document("<b>", "<script>alert(1)</script>", "&", None, [], {"a": "</script>"})
    assert "<script>alert" not in text
    assert data_of(text) == {"a": "</script>"}


def test_a_very_long_curve_is_thinned_and_keeps_its_ends(
    frontier: Frontier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "_MOST_CURVE_POINTS", 5)
    curve = page.frontier_data(frontier, [frontier.plan()])["curve"]
    assert 2 < len(curve) <= 6 < len(frontier.times)
    assert (curve[0][0], curve[-1][0]) == (frontier.min_time, frontier.min_energy_time)


def test_frontier_and_timeline_have_pages_of_their_own(
    frontier: Frontier, timeline: Timeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    along = frontier.sample_plans(5)
    data = data_of(frontier_page(frontier, along))
    assert set(data) == {"frontier"}
    slower = [plan["time"] for plan in data["frontier"]["slower"]]
    assert slower == sorted(slower)
    assert data["frontier"]["t_star"] < slower[0]
    assert slower[-1] <= data["frontier"]["t_max"]
    timelines = timeline_page(timeline, timeline.at_max_frequency())
    assert len(data_of(timelines)["timeline"]["timelines"]) == 2
    # Of larger jobs there are none.
    monkeypatch.setattr(page, "_MOST_FOR_SLOWER", 10)
    assert data_of(frontier_page(frontier, along))["frontier"]["slower"] == []


def test_an_animation_has_a_frame_a_plan(frontier: Frontier) -> None:
    plans = frontier.sample_plans(4)
    frames = data_of(animation_page(frontier, plans))["animation"]["frames"]
    assert len({frame["title"] for frame in frames}) == len(plans)


def reported() -> str:
    """The page about the plan in the current folder."""
    done("report --no-compare")
    return Path("report.html").read_text()


def test_the_commands_write_what_they_say(folder: Path) -> None:
    done("solve --slowdown 1")
    for line, name in (
        ("report", "report.html"),
        ("frontier --plot g.html", "g.html"),
        ("timeline", "timeline.png"),
        ("timeline -o t.svg", "t.svg"),
        ("timeline --alone -o t.html", "t.html"),
        ("simulate --plot s.html", "s.html"),
        ("compare --plot c.html", "c.html"),
    ):
        assert f"wrote {name}" in done(line)
        assert (folder / name).stat().st_size > 1000


def test_a_report_of_a_plan_for_a_straggler_counts_the_waiting(folder: Path) -> None:
    done("solve --straggler-time 9")
    until = json.loads((folder / "plan.json").read_text())["predicted"]["until_straggler"]
    saved = 100 * (1 - until["energy_j"] / until["baseline_energy_j"])
    text = reported()
    assert f"<b>{saved:.1f}%</b><span>energy saved until the straggler has finished" in text
    assert f"<b>{100 * until['gap']:.3f}%</b><span>certified gap, waiting included" in text
    assert data_of(text)["frontier"]["straggler"] == 9


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("", "Clocks change at once"),
        ("--switch-latency 10", "Every clock comes 10 ms after it is asked for"),
        ("--robust 90 --noise 1", "of 10000 replays end by"),
    ],
)
def test_a_report_says_what_it_takes_for_granted(folder: Path, options: str, words: str) -> None:
    done(f"solve --slowdown 3 {options}")
    text = reported()
    assert words in text
    assert "`" not in text.partition("<script")[0]


def test_a_report_tells_money_and_carbon_of_the_run(folder: Path) -> None:
    done("solve --slowdown 1")
    priced = "--price 0.25 --currency EUR --carbon 380 --iterations 1000000"
    document = told(f"report --no-compare {priced}")
    text = Path("report.html").read_text()
    predicted = json.loads((folder / "plan.json").read_text())["predicted"]
    assert (document["energy_j"], document["source"]) == (predicted["energy_j"], "modelled")
    saved_j = (predicted["baseline"]["energy_j"] - predicted["energy_j"]) * 1e6
    assert f"<b>{significant(saved_j / 3.6e6 * 0.25)} EUR</b>" in text
    assert f"<b>{significant(saved_j / 3.6e6 * 0.38)} kg CO2</b>" in text
    assert "at 380 g a kWh" in text


def test_the_script_of_the_pages_parses() -> None:
    """Where node is there: a slip in the script would else only show in a browser."""
    script = Path(page.__file__).parent / "assets" / "page.js"
    try:
        ran = subprocess.run(["node", "--check", script], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("node is not installed")
    assert ran.returncode == 0, ran.stderr
