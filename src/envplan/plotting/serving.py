"""Serving as figures: a profile's energy over clocks, a plan's pools, a fleet over time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any, Final

from envplan.plotting import page
from envplan.plotting.figures import OKABE_ITO, RED, figure, label_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from envplan.serving.plan import ServingPlan
    from envplan.serving.profile import ServingProfile
    from envplan.serving.simulation import Simulation

# Okabe and Ito's palette; marks and dashes differ as well.
_DEGREES: Final = {
    1: ("#CC79A7", "v"),
    2: ("#0072B2", "o"),
    4: ("#E69F00", "s"),
    8: ("#009E73", "D"),
}
_DASHES: Final = {"-": "", "--": "7 4", ":": "2 3", "-.": "7 3 2 3"}  # and as pages have them
_BASELINE: Final = (RED, "X")
_DAY_S: Final = 86_400.0
_HOUR_S: Final = 3600.0
_LONG_S: Final = 2 * _DAY_S  # from here on, time is shown in days
_FONT: Final = 10


def comparison_page(simulations: Sequence[Simulation], title: str, source: str | None) -> str:
    """A page about a trace replayed under several policies: cards, charts and table.

    Args:
        simulations: of one trace, the baseline first.
        title: what was replayed.
        source: of the profile, "modelled" or "measured".
    """
    from envplan.serving.policies import POLICIES

    base, *others = simulations
    shown = []
    for result in others:
        saved = result.saved_percent(base) or 0.0
        which = "less" if saved >= 0 else "more"
        what = f"{which} energy: {result.policy}, SLOs met for {100 * result.slo_attainment:.3f}%"
        shown.append(page.Card(f"{abs(saved):.1f}%", what, is_good=saved > 0))
    about = [f"{each.policy}: {POLICIES[each.policy].about}." for each in simulations]
    parts = [
        page.cards(shown),
        page.section("Over time", page.chart("series", "over_time")),
        page.section("Policies side by side", comparison_table(simulations)),
        page.section("What the policies do", page.notes(about)),
    ]
    against = f"Energy of all GPUs in use, against {base.policy}"
    data = {"over_time": _series_data(simulations)}
    return page.document(title, title, against, source, parts, data)


def _lines(simulations: Sequence[Simulation]) -> list[tuple[str, str, str]]:
    """Of each policy what it is called, and colour and dash of its line, always the same.

    Savings of others are against the first one.
    """
    from envplan.serving.policies import POLICIES

    looks = dict(zip(POLICIES, zip(cycle(OKABE_ITO), cycle(_DASHES)), strict=False))
    names = [each.policy for each in simulations]
    base = " (baseline)" if len(names) > 1 else ""
    return [(name + base * (name == names[0]), *looks[name]) for name in names]


def _panels(simulations: Sequence[Simulation]) -> dict[str, list[Any]]:
    """What is shown over time: the load, and a line for each policy; NaN where nothing is asked."""
    import numpy as np

    series = [each.series for each in simulations]
    asked = [np.where(one.requests > 0, one.requests, np.nan) for one in series]
    return {
        "Load (1,000 tokens/s)": [series[0].load_tokens_s / 1e3],
        "Power of all GPUs (kW)": [one.power_w / 1e3 for one in series],
        "GPUs in use": [one.gpus for one in series],
        "SLOs met (%)": [
            100 * (one.attained / came).clip(0, 1) for one, came in zip(series, asked, strict=True)
        ],
    }


def _times(simulations: Sequence[Simulation]) -> tuple[Any, str]:
    """Times of the slots of a trace, and in what."""
    time_s = simulations[0].series.time_s
    unit, label = (_DAY_S, "Days") if time_s[-1] > _LONG_S else (_HOUR_S, "Hours")
    return time_s / unit, label


def _series_data(simulations: Sequence[Simulation]) -> dict[str, Any]:
    """What the series chart draws."""

    def rounded(values: Any) -> list[float | None]:
        """Numbers for a page; null for NaN."""
        return [None if value != value else float(f"{value:.5g}") for value in values.tolist()]

    times, label = _times(simulations)
    names, colours, dashes = zip(*_lines(simulations), strict=True)
    return {
        "times": rounded(times),
        "label": label,
        "panels": [
            {"label": name, "from_zero": "%" not in name, "lines": [rounded(one) for one in lines]}
            for name, lines in _panels(simulations).items()
        ],
        "names": names,
        "colours": colours,
        "dashes": [_DASHES[dash] for dash in dashes],
    }


def serving_profile_figure(profile: ServingProfile, load: float = 2000.0) -> Figure:
    """Energy of a request against the clock at one load, a panel for each class."""
    names = [name for name in profile.classes if profile.curves_of(name)]
    columns = min(3, len(names))
    rows = -(-len(names) // columns)
    modelled = f" ({profile.source})" if profile.source else ""
    title = (
        f"{profile.name}{modelled}, {load:g} tokens/s per instance\n"
        "SL: short input, long output; only clocks that meet the SLOs; circled: least energy"
    )
    with figure(3.4 * columns, 1.3 + 2.3 * rows, _FONT) as drawn:
        panels = drawn.subplots(rows, columns, squeeze=False, sharex=True).ravel()
        for axes, name in zip(panels, names, strict=False):
            _draw_class(axes, profile, name, load)
        for axes in panels[len(names) :]:
            axes.set_visible(False)
        for axes in panels[max(0, len(names) - columns) : len(names)]:
            axes.set_xlabel("SM clock (MHz)")
        drawn.supylabel("Energy per request (kJ)", fontsize=_FONT)
        drawn.suptitle(title, fontsize=1.1 * _FONT)
        marks = [axes.get_legend_handles_labels() for axes in panels]
        known = {name: mark for found in marks for mark, name in zip(*found, strict=True)}
        order = sorted(known)
        drawn.legend([known[name] for name in order], order, loc="outside lower center", ncols=5)
    return drawn


def _draw_class(axes: Axes, profile: ServingProfile, name: str, load: float) -> None:
    able = [
        curve for curve in profile.curves_of(name) if curve.meets(profile.classes[name].slo, load)
    ]
    if not able:
        axes.set_title(f"{name}: no clock meets the SLOs", loc="left")
        return
    points = [(profile.energy_per_request(c, load) / 1e3, c.frequency_mhz, c.tp) for c in able]
    for tp in sorted({tp for _, _, tp in points}):
        mine = sorted((clock, energy) for energy, clock, n in points if n == tp)
        color, mark = _DEGREES[tp]
        axes.plot(*zip(*mine, strict=True), color=color, marker=mark, markersize=5, label=f"TP{tp}")
    if able[-1] is profile.curves_of(name)[-1]:
        usual, highest, _ = points[-1]
        axes.plot(
            highest, usual, _BASELINE[1], color=_BASELINE[0], markeredgecolor="white", zorder=5,
            linestyle="none", markersize=9, label="baseline: most GPUs, maximum clock",
        )  # fmt: skip
    energy, clock, _ = min(points)
    axes.plot(clock, energy, "o", markersize=12, fillstyle="none", color="black")
    label_axes(axes, "", "", name)
    axes.set_ylim(0, 1.1 * max(points)[0])


def plan_figure(plan: ServingPlan) -> Figure:
    """GPUs of each pool, by TP, with the clocks they run at, over those of maximum frequency."""
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    before = plan.predicted.baseline
    names = [" + ".join(pool.classes) for pool in plan.pools]
    modelled = f" ({plan.profile.source})" if plan.profile.source else ""
    used = f"{plan.planner}, {plan.gpus} GPUs, {plan.power / 1e3:.4g} kW"
    heading = f"{plan.profile.name}{modelled}\n{used}"
    with figure(9.6, 2.2 + 0.45 * (len(names) + 1)) as drawn:
        axes = drawn.add_subplot()
        handles = {}
        widest = max(plan.gpus, 0 if before is None else before.gpus)
        for row, pool in enumerate(plan.pools):
            left, clocks = 0, Counter[tuple[int, int]]()
            for group in pool.groups:
                color = _DEGREES[group.tp][0]
                axes.barh(row, group.gpus, left=left, color=color, edgecolor="white")
                handles[group.tp] = Patch(color=color, label=f"TP{group.tp}")
                clocks[group.tp, group.frequency_mhz] += group.instances
                left += group.gpus
            right = left > 0.5 * widest  # beside the bar is no room
            axes.annotate(
                ", ".join(f"{count} x TP{tp} at {mhz}" for (tp, mhz), count in clocks.items()),
                (left, row), xytext=(-6 if right else 6, 0), textcoords="offset points",
                ha="right" if right else "left", va="center", fontsize=10,
                bbox={"boxstyle": "round", "fc": "white", "ec": "none", "alpha": 0.85},
            )  # fmt: skip
        marks = [handles[tp] for tp in sorted(handles)]
        if before is not None:
            look: Any = {"color": "0.8", "edgecolor": _BASELINE[0]}
            axes.barh(len(names), before.gpus, **look)
            names.append("baseline, all")
            words = f"{before.gpus} GPUs, {before.power_w / 1e3:.4g} kW"
            marks.append(Patch(facecolor="0.8", edgecolor=_BASELINE[0],
                               label=f"baseline: TP8, maximum clock: {words}"))  # fmt: skip
            heading += f", {plan.predicted.savings_percent or 0.0:.1f}% saved"
        label_axes(axes, "GPUs (instances and their SM clocks in MHz beside the bars)", "", heading)
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        drawn.legend(handles=marks, loc="outside lower left", ncols=4)
    return drawn


def over_time_figure(simulations: Sequence[Simulation], title: str) -> Figure:
    """Load, power, GPUs in use and SLO attainment over time, a line for each policy."""
    times, label = _times(simulations)
    (_, (load,)), *panels = _panels(simulations).items()
    with figure(10.4, 7.6, _FONT) as drawn:
        first, *axes = drawn.subplots(4, 1, sharex=True, height_ratios=[1, 2, 1.4, 1])
        first.fill_between(times, load, color="0.75", linewidth=0)
        label_axes(first, "", "Load\n(1,000 tokens/s)", title)
        for panel, (words, lines) in zip(axes, panels, strict=True):
            label_axes(panel, "", words)
            for values, (name, color, dash) in zip(lines, _lines(simulations), strict=True):
                there = values == values
                panel.plot(times[there], values[there], label=name, color=color, linestyle=dash,
                           linewidth=1.2)  # fmt: skip
        for panel in (first, *axes[:2]):
            panel.set_ylim(bottom=0)
        axes[2].set_ylabel("SLOs met (%),\nnot from 0")
        axes[2].set_xlabel(label)
        low = axes[2].get_ylim()[0]
        axes[2].set_ylim(low, 100 + 0.06 * max(100 - low, 0.01))
        first.set_xlim(0, times[-1] if len(times) > 1 else 1)
        drawn.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper")
    return drawn


def comparison_table(simulations: Sequence[Simulation]) -> str:
    """HTML of the figures of policies side by side; savings are against the first one."""
    from envplan.serving.metrics import COMPARED, saved_percent_text

    headers = ["policy", "saved (%)", *(metric.name for metric in COMPARED)]
    rows = []
    for simulation in simulations:
        saved = saved_percent_text(simulation, simulations[0])
        rows.append([simulation.policy, saved, *(metric.text(simulation) for metric in COMPARED)])
    return page.table(headers, rows)
