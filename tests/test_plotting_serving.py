"""Figures of serving: they show what they were given, and say what is modelled."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from envplan.plotting.figures import render
from envplan.plotting.serving import (
    comparison_page,
    over_time_figure,
    plan_figure,
    serving_profile_figure,
)
from envplan.serving.exact_planner import exact_plan
from envplan.serving.metrics import saved_percent_text
from envplan.serving.profile import ServingProfile
from envplan.serving.replay import compare_policies
from envplan.serving.trace import make_week


@cache
def a_comparison() -> list:  # type: ignore[type-arg]
    short = make_week("coding-week", days=1 / 48).scaled(0.1)
    return compare_policies(ServingProfile.builtin(), short, policies=("SinglePool", "envplan"))


def test_the_profile_has_a_panel_for_each_class_and_rings_its_optimum() -> None:
    profile = ServingProfile.builtin()
    figure = serving_profile_figure(profile)
    panels = {axes.get_title(loc="left"): axes for axes in figure.axes}
    assert len(panels) == 9
    slo = profile.classes["LL"].slo
    able = [curve for curve in profile.curves_of("LL") if curve.meets(slo, 2000.0)]
    best = min(able, key=lambda curve: curve.power_at(2000.0))
    assert list(panels["LL"].lines[-1].get_xdata()) == [best.frequency_mhz]
    assert "identified" in str(figure.get_suptitle())


def test_a_plan_has_a_bar_for_each_group() -> None:
    plan = exact_plan(ServingProfile.builtin(), {"SS": 9000.0, "LL": 3000.0}, 64)
    axes = plan_figure(plan).axes[0]
    widths = sorted(patch.get_width() for patch in axes.patches)
    groups = [group.gpus for pool in plan.pools for group in pool.groups]
    assert plan.predicted.baseline is not None
    assert widths == sorted([*groups, plan.predicted.baseline.gpus])
    assert "identified" in axes.get_title(loc="left")


def test_over_time_there_is_a_line_for_each_policy() -> None:
    results = a_comparison()
    figure = over_time_figure(results, "short")
    power = figure.axes[1]
    assert [line.get_label() for line in power.lines] == ["SinglePool (baseline)", "envplan"]
    assert list(power.lines[0].get_ydata()) == [w / 1e3 for w in results[0].series.power_w]
    assert render(figure, "svg") == render(over_time_figure(results, "short"), "svg")


def test_where_nothing_is_asked_no_slo_is_missed() -> None:
    baseline, ours = a_comparison()
    requests, attained = ours.series.requests.copy(), ours.series.attained.copy()
    requests[::2] = attained[::2] = 0
    series = replace(ours.series, requests=requests, attained=attained)
    results = [baseline, replace(ours, series=series)]
    shown = over_time_figure(results, "short").axes[3].lines[1].get_ydata()
    assert len(shown) == (series.requests > 0).sum()
    page = comparison_page(results, "short", "modelled")
    for words in ("null", '<span class="badge modelled">', 'data-chart="series"',
                  "less energy: envplan", "<td>SinglePool</td>"):  # fmt: skip
        assert words in page
    assert not any(words in page for words in ("NaN", "src="))


def test_nothing_is_saved_of_nothing() -> None:
    free = [replace(result, energy_j=0.0) for result in a_comparison()]
    assert [result.saved_percent(free[0]) for result in free] == [None, None]
    assert [saved_percent_text(result, free[0]) for result in free] == ["-", "-"]
    assert "0.0%" in comparison_page(free, "free", None)
