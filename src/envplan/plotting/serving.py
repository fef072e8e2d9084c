"""Serving as figures: a profile's energy over clocks, a plan's pools, a fleet over time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from envplan.plotting import page
from envplan.plotting.figures import OKABE_ITO, RED, GridShape, draw_grid, figure, label_axes

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from envplan.serving.plan import Baseline, Pool, ServingPlan
    from envplan.serving.profile import ServingProfile
    from envplan.serving.simulation import Simulation
    from envplan.serving.steady_state import LoadCurve

FloatArray = NDArray[np.float64]

_DAY_S: Final = 86_400.0
_HOUR_S: Final = 3600.0
_LONG_S: Final = 2 * _DAY_S  # from here on, time is shown in days
_FONT_SIZE: Final = 10
_MAX_COLUMNS: Final = 3  # panels of classes beside each other
_BASELINE_COLOR: Final = RED
_BASELINE_MARK: Final = "X"

#: Dashes of lines as matplotlib names them, and as pages have them.
_DASHES: Final = {"-": "", "--": "7 4", ":": "2 3", "-.": "7 3 2 3"}


class _Look(NamedTuple):
    """How a TP is drawn: Okabe and Ito's colours, and marks that differ as well."""

    color: str
    mark: str


_TP_LOOKS: Final = {
    1: _Look("#CC79A7", "v"),
    2: _Look("#0072B2", "o"),
    4: _Look("#E69F00", "s"),
    8: _Look("#009E73", "D"),
}


def _source_note(source: str | None) -> str:
    return f" ({source})" if source else ""


# --- a trace replayed under policies -------------------------------------------------------------


class _PolicyLine(NamedTuple):
    """How a policy is drawn: the same wherever it appears."""

    label: str
    color: str
    dash: str


@dataclass(frozen=True)
class _Panel:
    """A quantity over time.

    Attributes:
        label: with its unit.
        lines: one for each policy, or one for all; NaN where there is no value.
        from_zero: whether its axis begins at zero.
        highest: where its axis ends; None: where its values do.
    """

    label: str
    lines: list[FloatArray]
    from_zero: bool = True
    highest: float | None = None


@dataclass(frozen=True)
class _TimeAxis:
    """Times of a trace's slots, in hours or days.

    Attributes:
        times: of the slots' begins.
        label: their unit.
    """

    times: FloatArray
    label: str


@dataclass(frozen=True)
class _OverTime:
    """Quantities over time under some policies; the baseline is the first."""

    axis: _TimeAxis
    load: _Panel
    power: _Panel
    gpus: _Panel
    attainment: _Panel
    policies: list[_PolicyLine]

    @property
    def panels(self) -> list[_Panel]:
        """All quantities, from the top down."""
        return [self.load, self.power, self.gpus, self.attainment]


def _over_time(simulations: Sequence[Simulation]) -> _OverTime:
    """The quantities of simulations of one trace, the baseline first."""
    # All have the same slots and the same load.
    baseline = simulations[0].series
    power_kw, gpus, attained_percent, policies = [], [], [], []
    for simulation in simulations:
        series = simulation.series
        power_kw.append(series.power_w / 1e3)
        gpus.append(series.gpus)
        attained_percent.append(_attainment_percent(series.attained, series.requests))
        policies.append(simulation.policy)
    return _OverTime(
        axis=_time_axis(baseline.time_s),
        load=_Panel("Load (1,000 tokens/s)", [baseline.load_tokens_s / 1e3]),
        power=_Panel("Power of all GPUs (kW)", power_kw),
        gpus=_Panel("GPUs in use", gpus),
        attainment=_Panel("SLOs met (%)", attained_percent, from_zero=False, highest=100),
        policies=_policy_lines(policies),
    )


def _time_axis(time_s: FloatArray) -> _TimeAxis:
    if time_s[-1] > _LONG_S:
        return _TimeAxis(time_s / _DAY_S, "Days")
    return _TimeAxis(time_s / _HOUR_S, "Hours")


def _attainment_percent(attained: FloatArray, requests: FloatArray) -> FloatArray:
    """Share of each slot's requests that met their SLOs; NaN where none came."""
    arrived = np.where(requests > 0, requests, np.nan)
    percent: FloatArray = 100 * (attained / arrived).clip(0, 1)
    return percent


def _policy_lines(names: Sequence[str]) -> list[_PolicyLine]:
    """The line of each policy; savings of others are against the first one."""
    from envplan.serving.policies import POLICIES

    # Of 7 colours and 4 kinds of dashes a pair comes again only after 28 policies.
    color_of = dict(zip(POLICIES, cycle(OKABE_ITO), strict=False))
    dash_of = dict(zip(POLICIES, cycle(_DASHES), strict=False))
    lines = []
    for name in names:
        is_baseline = len(names) > 1 and name == names[0]
        label = f"{name} (baseline)" if is_baseline else name
        color, dash = color_of.get(name, RED), dash_of.get(name, "-")  # of a fleet that is given
        lines.append(_PolicyLine(label, color, dash))
    return lines


def comparison_page(simulations: Sequence[Simulation], title: str, source: str | None) -> str:
    """A page about a trace replayed under several policies: cards, charts and table.

    Args:
        simulations: of one trace, the baseline first.
        title: what was replayed.
        source: of the profile, "modelled" or "measured".
    """
    from envplan.serving.policies import POLICIES

    baseline, *others = simulations
    policies = [simulation.policy for simulation in simulations]
    descriptions = [f"{policy}: {POLICIES[policy].about}." for policy in policies]
    parts = [
        page.cards([_savings_card(simulation, baseline) for simulation in others]),
        page.section("Over time", page.chart("series", "over_time")),
        page.section("Policies side by side", comparison_table(simulations)),
        page.section("What the policies do", page.notes(descriptions)),
    ]
    subtitle = f"Energy of all GPUs in use, against {baseline.policy}"
    data = {"over_time": _series_chart(_over_time(simulations))}
    return page.document(title, title, subtitle, source, parts, data)


def _savings_card(simulation: Simulation, baseline: Simulation) -> page.Card:
    saved_percent = simulation.saved_percent(baseline) or 0.0
    direction = "less" if saved_percent >= 0 else "more"
    return page.Card(
        f"{abs(saved_percent):.1f}%",
        f"{direction} energy: {simulation.policy}, SLOs met for "
        f"{100 * simulation.slo_attainment:.3f}%",
        is_good=saved_percent > 0,
    )


def comparison_table(simulations: Sequence[Simulation]) -> str:
    """HTML of the figures of policies side by side; savings are against the first one."""
    from envplan.serving.metrics import COMPARED, saved_percent_text

    headers = ["policy", "saved (%)", *(metric.name for metric in COMPARED)]
    rows = []
    for simulation in simulations:
        saved = saved_percent_text(simulation, simulations[0])
        figures = [metric.text(simulation) for metric in COMPARED]
        rows.append([simulation.policy, saved, *figures])
    return page.table(headers, rows)


def _series_chart(over_time: _OverTime) -> dict[str, object]:
    """The series chart's data, as page.js reads it."""
    return {
        "times": _page_numbers(over_time.axis.times),
        "label": over_time.axis.label,
        "panels": [_panel_data(panel) for panel in over_time.panels],
        "names": [policy.label for policy in over_time.policies],
        "colours": [policy.color for policy in over_time.policies],
        "dashes": [_DASHES[policy.dash] for policy in over_time.policies],
    }


def _panel_data(panel: _Panel) -> dict[str, object]:
    """A panel as page.js reads it."""
    return {
        "label": panel.label,
        "from_zero": panel.from_zero,
        "highest": panel.highest,
        "lines": [_page_numbers(line) for line in panel.lines],
    }


def _page_numbers(values: FloatArray) -> list[float | None]:
    """Five digits of each number; null for NaN."""
    return [None if np.isnan(value) else float(f"{value:.5g}") for value in values.tolist()]


def over_time_figure(simulations: Sequence[Simulation], title: str) -> Figure:
    """Load, power, GPUs in use and SLO attainment over time, a line for each policy."""
    over_time = _over_time(simulations)
    times = over_time.axis.times
    with figure(10.4, 7.6, _FONT_SIZE) as drawn:
        top, power, gpus, attainment = drawn.subplots(
            4, 1, sharex=True, height_ratios=[1, 2, 1.4, 1]
        )
        top.fill_between(times, over_time.load.lines[0], color="0.75", linewidth=0)
        label_axes(top, "", "Load\n(1,000 tokens/s)", title)
        _draw_policies(power, over_time.power, over_time)
        _draw_policies(gpus, over_time.gpus, over_time)
        _draw_policies(attainment, over_time.attainment, over_time)
        for axes in (top, power, gpus):
            axes.set_ylim(bottom=0)
        attainment.set_ylabel("SLOs met (%),\nnot from 0")
        attainment.ticklabel_format(axis="y", useOffset=False, style="plain")
        attainment.set_xlabel(over_time.axis.label)
        lowest = attainment.get_ylim()[0]
        attainment.set_ylim(lowest, 100 + 0.06 * max(100 - lowest, 0.01))
        top.set_xlim(0, times[-1] if len(times) > 1 else 1)
        drawn.legend(*power.get_legend_handles_labels(), loc="outside right upper")
    return drawn


def _draw_policies(axes: Axes, panel: _Panel, over_time: _OverTime) -> None:
    """A line for each policy, without slots that have no value."""
    label_axes(axes, "", panel.label)
    for values, policy in zip(panel.lines, over_time.policies, strict=True):
        has_value = ~np.isnan(values)
        axes.plot(
            over_time.axis.times[has_value],
            values[has_value],
            label=policy.label,
            color=policy.color,
            linestyle=policy.dash,
            linewidth=1.2,
        )


# --- a profile -----------------------------------------------------------------------------------


def serving_profile_figure(profile: ServingProfile, load: float = 2000.0) -> Figure:
    """Energy of a request against the clock at one load, a panel for each class."""
    names = [name for name in profile.classes if profile.curves_of(name)]
    shape = GridShape.of(len(names), max_columns=_MAX_COLUMNS)
    title = (
        f"{profile.name}{_source_note(profile.source)}, {load:g} tokens/s per instance\n"
        "SL: short input, long output; only clocks that meet the SLOs; circled: least energy"
    )
    with figure(3.4 * shape.num_columns, 1.3 + 2.3 * shape.num_rows, _FONT_SIZE) as drawn:
        grid = draw_grid(drawn, shape, sharex=True, sharey=False)
        for axes, name in zip(grid.used, names, strict=True):
            _draw_class(axes, profile, name, load)
        for axes in grid.lowest:
            axes.set_xlabel("SM clock (MHz)")
        drawn.supylabel("Energy per request (kJ)", fontsize=_FONT_SIZE)
        drawn.suptitle(title, fontsize=1.1 * _FONT_SIZE)
        marks = _labelled_marks(grid.used)
        labels = sorted(marks)
        drawn.legend(
            [marks[label] for label in labels], labels, loc="outside lower center", ncols=5
        )
    return drawn


def _labelled_marks(panels: Sequence[Axes]) -> dict[str, Artist]:
    """A mark for each label of some panels."""
    marks: dict[str, Artist] = {}
    for axes in panels:
        panel_marks, labels = axes.get_legend_handles_labels()
        marks.update(zip(labels, panel_marks, strict=True))
    return marks


class _EnergyPoint(NamedTuple):
    """Energy of a request in one configuration, kJ; of equal ones the lowest clock comes first."""

    energy_kj: float
    frequency_mhz: int
    tp: int


def _draw_class(axes: Axes, profile: ServingProfile, name: str, load: float) -> None:
    curves = _curves_within_slo(profile, name, load)
    if not curves:
        axes.set_title(f"{name}: no clock meets the SLOs", loc="left")
        return
    points = []
    points_of_tp: dict[int, list[_EnergyPoint]] = {}
    for curve in curves:
        energy_kj = profile.energy_per_request(curve, load) / 1e3
        point = _EnergyPoint(energy_kj, curve.frequency_mhz, curve.tp)
        points.append(point)
        points_of_tp.setdefault(curve.tp, []).append(point)
    for tp in sorted(points_of_tp):
        _draw_tp(axes, tp, points_of_tp[tp])
    # The last of all curves is that of most GPUs at the maximum clock.
    if curves[-1] is profile.curves_of(name)[-1]:
        _draw_baseline_point(axes, points[-1])
    best = min(points)
    axes.plot(
        best.frequency_mhz, best.energy_kj, "o", markersize=12, fillstyle="none", color="black"
    )
    label_axes(axes, "", "", name)
    axes.set_ylim(0, 1.1 * max(points).energy_kj)


def _curves_within_slo(profile: ServingProfile, name: str, load: float) -> list[LoadCurve]:
    slo = profile.classes[name].slo
    return [curve for curve in profile.curves_of(name) if curve.meets(slo, load)]


def _draw_tp(axes: Axes, tp: int, points: Sequence[_EnergyPoint]) -> None:
    look = _TP_LOOKS[tp]
    axes.plot(
        [point.frequency_mhz for point in points],
        [point.energy_kj for point in points],
        color=look.color,
        marker=look.mark,
        markersize=5,
        label=f"TP{tp}",
    )


def _draw_baseline_point(axes: Axes, point: _EnergyPoint) -> None:
    axes.plot(
        point.frequency_mhz,
        point.energy_kj,
        _BASELINE_MARK,
        color=_BASELINE_COLOR,
        markeredgecolor="white",
        zorder=5,
        linestyle="none",
        markersize=9,
        label="baseline: most GPUs, maximum clock",
    )


# --- a plan --------------------------------------------------------------------------------------


def plan_figure(plan: ServingPlan) -> Figure:
    """GPUs of each pool, by TP, with the clocks they run at, over those of maximum frequency."""
    from matplotlib.ticker import MaxNLocator

    baseline = plan.predicted.baseline
    names = [" + ".join(pool.classes) for pool in plan.pools]
    with figure(9.6, 2.2 + 0.45 * (len(names) + 1)) as drawn:
        axes = drawn.add_subplot()
        widest = max(plan.gpus, 0 if baseline is None else baseline.gpus)
        for row, pool in enumerate(plan.pools):
            _draw_pool(axes, row, pool)
            _annotate_clocks(axes, row, pool, is_wide=pool.gpus > 0.5 * widest)
        legend = list(_tp_patches(plan))
        if baseline is not None:
            legend.append(_draw_baseline_bar(axes, len(names), baseline))
            names.append("baseline, all")
        label_axes(
            axes,
            "GPUs (instances and their SM clocks in MHz beside the bars)",
            "",
            _plan_title(plan),
        )
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        drawn.legend(handles=legend, loc="outside lower left", ncols=4)
    return drawn


def _plan_title(plan: ServingPlan) -> str:
    title = (
        f"{plan.profile.name}{_source_note(plan.profile.source)}\n"
        f"{plan.planner}, {plan.gpus} GPUs, {plan.power / 1e3:.4g} kW"
    )
    if plan.predicted.baseline is not None:
        title += f", {plan.predicted.savings_percent or 0.0:.1f}% saved"
    return title


def _draw_pool(axes: Axes, row: int, pool: Pool) -> None:
    """A bar of the pool's GPUs, group after group."""
    begin = 0
    for group in pool.groups:
        color = _TP_LOOKS[group.tp].color
        axes.barh(row, group.gpus, left=begin, color=color, edgecolor="white")
        begin += group.gpus


def _annotate_clocks(axes: Axes, row: int, pool: Pool, *, is_wide: bool) -> None:
    """Instances and clocks beside a pool's bar, or on it where there is no room beside it."""
    num_instances: dict[str, int] = {}
    for group in pool.groups:
        clock = f"TP{group.tp} at {group.frequency_mhz}"
        num_instances[clock] = num_instances.get(clock, 0) + group.instances
    phrases = [f"{count} x {clock}" for clock, count in num_instances.items()]
    axes.annotate(
        ", ".join(phrases),
        (pool.gpus, row),
        xytext=(-6 if is_wide else 6, 0),
        textcoords="offset points",
        ha="right" if is_wide else "left",
        va="center",
        fontsize=10,
        bbox={"boxstyle": "round", "fc": "white", "ec": "none", "alpha": 0.85},
    )


def _tp_patches(plan: ServingPlan) -> Iterator[Artist]:
    """A patch in the legend for each TP of a plan."""
    from matplotlib.patches import Patch

    degrees: set[int] = set()
    for pool in plan.pools:
        degrees.update(group.tp for group in pool.groups)
    for tp in sorted(degrees):
        yield Patch(color=_TP_LOOKS[tp].color, label=f"TP{tp}")


def _draw_baseline_bar(axes: Axes, row: int, baseline: Baseline) -> Artist:
    """A bar of the baseline's GPUs; returns what the legend shows for it."""
    from matplotlib.patches import Patch

    axes.barh(row, baseline.gpus, color="0.8", edgecolor=_BASELINE_COLOR)
    figures = f"{baseline.gpus} GPUs, {baseline.power_w / 1e3:.4g} kW"
    return Patch(
        facecolor="0.8",
        edgecolor=_BASELINE_COLOR,
        label=f"baseline: TP8, maximum clock: {figures}",
    )
