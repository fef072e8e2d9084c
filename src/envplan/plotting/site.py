"""The plan of a site as a figure: power under the budget, throughput, the cost of shedding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from envplan.plotting.figures import (
    BLUE,
    GREEN,
    OKABE_ITO,
    ORANGE,
    RED,
    figure,
    label_axes,
)
from envplan.plotting.titles import shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from envplan.site import SitePlan
    from envplan.site.shedding import ShedPoint

#: Jobs with a colour of their own; all others are drawn together.
_NUM_COLOURS: Final = 6
_W_PER_KW: Final = 1e3
_S_PER_H: Final = 3600.0


def site_figure(plan: SitePlan, shed: Sequence[ShedPoint] = ()) -> Figure:
    """Draw a site's plan.

    Args:
        plan: of one interval or of a day.
        shed: the curve of what shedding costs; without it there is no such panel.
    """
    over_time = len(plan.intervals) > 1
    num_panels = 2 * over_time + bool(shed) or 1
    with figure(8.5, 1.0 + 2.6 * num_panels, 11) as drawn:
        panels = list(drawn.subplots(num_panels, 1, squeeze=False).ravel())
        if over_time or not shed:
            _draw_power(panels.pop(0), plan)
        if over_time:
            _draw_throughput(panels.pop(0), plan)
        if shed:
            _draw_shedding(panels.pop(0), shed)
        drawn.suptitle(_title(plan), fontsize=12)
    return drawn


def _title(plan: SitePlan) -> str:
    gpus = sum(job.gpus for job in plan.jobs)
    return (
        f"{len(plan.jobs)} jobs on {gpus:,} GPUs, "
        f"{plan.throughput_loss_percent:.2f}% of throughput lost"
    )


def _draw_power(axes: Axes, plan: SitePlan) -> None:
    """Stacked power of the jobs, overheads and others under the budget, over time."""
    edges_h = [interval.start_s / _S_PER_H for interval in plan.intervals]
    edges_h.append(plan.intervals[-1].end_s / _S_PER_H)
    bottom = np.zeros(len(plan.intervals))
    for colour, (name, power_kw) in zip(_colours(plan), _stack_kw(plan), strict=True):
        axes.stairs(
            bottom + power_kw, edges_h, baseline=bottom, fill=True, color=colour, label=name, lw=0
        )
        bottom = bottom + power_kw
    budget_kw = [interval.budget_w / _W_PER_KW for interval in plan.intervals]
    axes.stairs(budget_kw, edges_h, baseline=None, color="black", linewidth=1.8, label="budget")
    axes.set_ylim(0, 1.15 * max(budget_kw))
    label_axes(axes, "Time (h)", "Power (kW)", "Power under the budget")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


def _stack_kw(plan: SitePlan) -> list[tuple[str, np.ndarray]]:
    """Layers from the bottom: others, overheads, then jobs, the largest first; kW by interval."""
    jobs_w = np.array([[job.power_w for job in interval.jobs] for interval in plan.intervals])
    reserved_w = np.array([interval.reserved_w for interval in plan.intervals])
    site_w = np.array([interval.power_w for interval in plan.intervals])
    overhead_w = site_w - reserved_w - jobs_w.sum(axis=1)
    largest = np.argsort(-jobs_w.mean(axis=0), kind="stable")
    layers = [("reserved", reserved_w), ("overheads", overhead_w)]
    layers += [
        (shorten(plan.jobs[job].name), jobs_w[:, job]) for job in largest[:_NUM_COLOURS].tolist()
    ]
    others = largest[_NUM_COLOURS:]
    layers.append((f"{len(others)} other jobs", jobs_w[:, others].sum(axis=1)))
    return [(name, watts / _W_PER_KW) for name, watts in layers if watts.max() > 1e-9]


def _colours(plan: SitePlan) -> list[str]:
    """A colour for each layer, greys for what is no job of its own."""
    names = [name for name, _ in _stack_kw(plan)]
    own = iter(OKABE_ITO)
    return [
        "0.55" if name in ("reserved", "overheads") or name.endswith(" other jobs") else next(own)
        for name in names
    ]


def _draw_throughput(axes: Axes, plan: SitePlan) -> None:
    """Throughput that is left, over time."""
    edges_h = [interval.start_s / _S_PER_H for interval in plan.intervals]
    edges_h.append(plan.intervals[-1].end_s / _S_PER_H)
    left = [100 - interval.throughput_loss_percent for interval in plan.intervals]
    axes.stairs(left, edges_h, baseline=None, color=BLUE, linewidth=1.8)
    axes.set_ylim(min(left) - 0.1 * (100 - min(left)) - 0.5, 100.5)
    label_axes(axes, "Time (h)", "Throughput (%)", "Throughput, of all jobs at T_min")


def _draw_shedding(axes: Axes, shed: Sequence[ShedPoint]) -> None:
    """Throughput lost over the budget, for four ways to shed power."""
    power_kw = [point.power_w / _W_PER_KW for point in shed]
    for label, colour, style, lost in (
        (
            "pause the least valuable, no plans",
            RED,
            "--",
            [p.paused_percent for p in shed],
        ),
        ("cap all clocks alike, no plans", GREEN, ":", [p.capped_percent for p in shed]),
        ("cut each job alike", ORANGE, "-.", [p.alike_percent for p in shed]),
        ("share by price", BLUE, "-", [p.shared_percent for p in shed]),
    ):
        percents = [math.nan if percent is None else percent for percent in lost]
        axes.plot(power_kw, percents, color=colour, linestyle=style, linewidth=1.8, label=label)
    axes.invert_xaxis()
    label_axes(axes, "Power of the site (kW)", "Throughput lost (%)", "What it costs to shed power")
    axes.legend(loc="upper left")
