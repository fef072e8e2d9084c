"""Serving as figures: a profile's energy over clocks, a plan's pools, a fleet over time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from envplan.plotting.frontier import STYLE, ink, save_figure
from envplan.units import J_PER_KWH

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from envplan.serving.plan import ServingPlan
    from envplan.serving.profile import ServingProfile
    from envplan.serving.simulation import Simulation

__all__ = [
    "HEADERS",
    "comparison_rows",
    "kwh",
    "over_time_figure",
    "plan_figure",
    "plot_over_time",
    "plot_plan",
    "plot_serving_profile",
    "save_comparison_page",
    "serving_profile_figure",
]

# Okabe and Ito's palette; marks and dashes differ as well.
_DEGREES: Final = {
    1: ("#CC79A7", "v"),
    2: ("#0072B2", "o"),
    4: ("#E69F00", "s"),
    8: ("#009E73", "D"),
}
_LINES: Final = {
    "SinglePool": ("#D55E00", ":"),
    "MultiPool": ("#CC79A7", ":"),
    "ScaleInst": ("#CC79A7", "--"),
    "ScaleShard": ("#56B4E9", "-."),
    "ScaleFreq": ("#E69F00", "--"),
    "DynamoLLM": ("#009E73", "-"),
    "envplan": ("#000000", "-"),
    "static": ("#E69F00", "-."),
    "exact": ("#0072B2", "-"),
}
_OTHER: Final = ("0.5", "-")
_DAY_S: Final = 86_400.0
_HOUR_S: Final = 3600.0
_LONG_S: Final = 2 * _DAY_S  # from here on, time is shown in days


def save_comparison_page(
    simulations: Sequence[Simulation], title: str, source: str | None, path: str | os.PathLike[str]
) -> None:
    """Write a page about a trace replayed under several policies: cards, figure and table.

    Args:
        simulations: of one trace, the baseline first.
        title: what was replayed.
        source: of the profile, "modelled" or "measured".

    Raises:
        InputError: the file cannot be written.
    """
    from envplan.plotting import page
    from envplan.serving.policies import POLICIES

    base = simulations[0]
    shown = []
    for result in simulations[1:]:
        saved = result.saved_percent(base) or 0.0
        what = f"less energy: {result.policy}, SLOs met for {100 * result.attainment:.3f}%"
        shown.append((f"{saved:.1f}%", what, "good" if saved > 0 else ""))
    body = "\n".join(
        [
            page.heading(title, f"Energy of all GPUs in use, against {base.policy}", source),
            page.cards(shown),
            page.section("Over time", page.picture(over_time_figure(simulations, title), title)),
            page.section(
                "Policies side by side", page.table(HEADERS, comparison_rows(simulations))
            ),
            page.section(
                "What the policies do",
                page.notes(
                    [f"{each.policy}: {POLICIES[each.policy].about}." for each in simulations]
                ),
            ),
        ]
    )
    page.save_page(page.document(title, body, {}), path)


def plot_serving_profile(profile: ServingProfile, path: str | os.PathLike[str]) -> None:
    """Draw a profile to a .png, .svg or .pdf file, whole or not at all.

    Raises:
        InputError: the file cannot be written.
    """
    save_figure(serving_profile_figure(profile), path)


def serving_profile_figure(profile: ServingProfile, load: float = 2000.0) -> Figure:
    """Energy of a request against the clock at one load, a panel for each class."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    names = [name for name in profile.classes if profile.degrees(name)]
    columns = min(3, len(names))
    rows = -(-len(names) // columns)
    with mpl.rc_context({**STYLE, "font.size": 10, "axes.titlesize": 11}):
        figure = Figure(figsize=(3.4 * columns, 0.6 + 2.3 * rows), layout="constrained")
        panels = figure.subplots(rows, columns, squeeze=False, sharex=True).ravel()
        for axes, name in zip(panels, names, strict=False):
            _draw_class(axes, profile, name, load)
        for axes in panels[len(names) :]:
            axes.set_visible(False)
        figure.supxlabel("SM clock (MHz)")
        figure.supylabel("Energy per request (kJ)")
        modelled = f" ({profile.source})" if profile.source else ""
        figure.suptitle(
            f"{profile.name}{modelled}, {load:g} tokens/s per instance\n"
            "only clocks that meet the SLOs; circled: least energy",
            fontsize=11,
        )
    return figure


def _draw_class(axes: Axes, profile: ServingProfile, name: str, load: float) -> None:
    points = []
    for tp in profile.degrees(name):
        curves = [profile.curves[name, tp, f] for f in profile.frequencies(name, tp)]
        slo = profile.classes[name].slo
        able = [curve for curve in curves if curve.meets(slo, load)]
        if able:
            clocks = [curve.frequency_mhz for curve in able]
            energies = [profile.energy_per_request(curve, load) / 1e3 for curve in able]
            color, mark = _DEGREES[tp]
            axes.plot(clocks, energies, mark + "-", color=color, markersize=5, label=f"TP{tp}")
            points += list(zip(energies, clocks, strict=True))
    axes.set_title(name, loc="left")
    axes.grid(color="0.92", linewidth=0.8)
    if points:
        energy, clock = min(points)
        axes.plot(clock, energy, "o", markersize=12, fillstyle="none", color="black")
        axes.set_ylim(0, 1.1 * max(points)[0])
        axes.legend(fontsize=8, frameon=False, loc="lower right")


def plot_plan(plan: ServingPlan, path: str | os.PathLike[str]) -> None:
    """Draw a plan to a .png, .svg or .pdf file, whole or not at all.

    Raises:
        InputError: the file cannot be written.
    """
    save_figure(plan_figure(plan), path)


def plan_figure(plan: ServingPlan) -> Figure:
    """GPUs of each pool, by TP, with the clocks they run at."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.4, 1.6 + 0.45 * len(plan.pools)), layout="constrained")
        axes = figure.add_subplot()
        for row, pool in enumerate(plan.pools):
            left = 0
            for group in pool.groups:
                color = _DEGREES[group.tp][0]
                axes.barh(row, group.gpus, left=left, color=color, edgecolor="white")
                if group.gpus > plan.gpus / 60:
                    axes.text(left + group.gpus / 2, row, f"{group.frequency_mhz}",
                              ha="center", va="center", color=ink(color), fontsize=10)  # fmt: skip
                left += group.gpus
        names = [" + ".join(s.request_class for s in pool.serves) for pool in plan.pools]
        axes.set_yticks(range(len(plan.pools)), names)
        axes.invert_yaxis()
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("GPUs (in the bars: SM clock, MHz)")
        modelled = f" ({plan.profile.source})" if plan.profile.source else ""
        axes.set_title(
            f"{plan.profile.name}{modelled}\n{plan.planner}, {plan.gpus} GPUs, "
            f"{plan.power / 1e3:.4g} kW",
            loc="left",
        )
        used = sorted({group.tp for pool in plan.pools for group in pool.groups})
        axes.legend(
            handles=[Patch(color=_DEGREES[tp][0], label=f"TP{tp}") for tp in used],
            loc="lower right",
            frameon=False,
        )
    return figure


def plot_over_time(
    simulations: Sequence[Simulation], title: str, path: str | os.PathLike[str]
) -> None:
    """Draw simulations of one trace to a .png, .svg or .pdf file, whole or not at all.

    Raises:
        InputError: the file cannot be written.
    """
    save_figure(over_time_figure(simulations, title), path)


def over_time_figure(simulations: Sequence[Simulation], title: str) -> Figure:
    """Load, power, GPUs in use and SLO attainment over time, a line for each policy."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({**STYLE, "font.size": 10, "axes.titlesize": 11, "axes.labelsize": 10}):
        figure = Figure(figsize=(9.6, 7.6), layout="constrained")
        load, power, gpus, slo = figure.subplots(4, 1, sharex=True, height_ratios=[1, 2, 1.4, 1])
        series = simulations[0].series
        unit, label = (_DAY_S, "Days") if series.time_s[-1] > _LONG_S else (_HOUR_S, "Hours")
        days = series.time_s / unit
        load.fill_between(
            days, simulations[0].series.load_tokens_s / 1e3, color="0.75", linewidth=0
        )
        load.set_ylabel("Load\n(1,000 tokens/s)")
        load.set_title(title, loc="left")
        for simulation in simulations:
            color, dash = _LINES.get(simulation.policy, _OTHER)
            series = simulation.series
            style = {"color": color, "linestyle": dash, "linewidth": 1.2}
            power.plot(days, series.power_w / 1e3, label=simulation.policy, **style)
            gpus.plot(days, series.gpus, **style)
            met = series.attained / series.requests.clip(1)
            slo.plot(days, 100 * met.clip(0, 1), **style)
        power.set_ylabel("Power of all GPUs (kW)")
        gpus.set_ylabel("GPUs in use")
        slo.set_ylabel("SLOs met (%),\nnot from 0")
        slo.set_xlabel(label)
        for axes in (load, power, gpus):
            axes.set_ylim(bottom=0)
        slo.set_ylim(top=101)
        for axes in (load, power, gpus, slo):
            axes.grid(color="0.92", linewidth=0.8)
            axes.set_xlim(0, days[-1] if len(days) > 1 else 1)
        power.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9)
    return figure


#: Headers of the table of a comparison.
HEADERS: Final = (
    "policy",
    "energy (kWh)",
    "saved (%)",
    "SLOs met (%)",
    "GPUs, mean",
    "GPUs, most",
    "GPU hours",
    "started",
    "re-sharded",
    "clock changes",
)


def kwh(joules: float) -> str:
    """An energy in kWh, to a tenth, or to three digits where there is little."""
    energy = joules / J_PER_KWH
    return f"{energy:.1f}" if energy >= 10 else f"{energy:.3g}"


def comparison_rows(simulations: Sequence[Simulation]) -> list[list[str]]:
    """The table of a comparison; savings are against the first one."""
    saved = [simulation.saved_percent(simulations[0]) for simulation in simulations]
    return [
        [
            simulation.policy,
            kwh(simulation.energy_j),
            "-" if percent is None else f"{percent:.1f}",
            f"{100 * simulation.attainment:.3f}",
            f"{simulation.series.gpus.mean():.1f}",
            f"{simulation.series.gpus.max():.0f}",
            f"{simulation.gpu_hours:.4g}",
            str(simulation.started),
            str(simulation.resharded),
            str(simulation.clock_changes),
        ]
        for simulation, percent in zip(simulations, saved, strict=True)
    ]
