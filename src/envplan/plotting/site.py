"""The plan of a site as a figure: power under the budget, throughput, the cost of shedding."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

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
_GREY: Final = "0.55"
#: Layers whose power is nowhere above this are not drawn, kW.
_NO_POWER_KW: Final = 1e-12
_W_PER_KW: Final = 1e3
_S_PER_H: Final = 3600.0


def site_figure(plan: SitePlan, shed: Sequence[ShedPoint] = ()) -> Figure:
    """Draw a site's plan.

    Args:
        plan: of one interval or of a day.
        shed: the curve of what shedding costs; without it there is no such panel.
    """
    over_time = len(plan.intervals) > 1
    shows_power = over_time or not shed
    num_panels = sum([shows_power, over_time, bool(shed)])
    with figure(8.5, 1.0 + 2.6 * num_panels, 11) as drawn:
        panels = iter(drawn.subplots(num_panels, 1, squeeze=False).ravel())
        if shows_power:
            _draw_power(next(panels), plan)
        if over_time:
            _draw_throughput(next(panels), plan)
        if shed:
            _draw_shedding(next(panels), shed)
        drawn.suptitle(_title(plan), fontsize=12)
    return drawn


def _title(plan: SitePlan) -> str:
    gpus = sum(job.gpus for job in plan.jobs)
    return (
        f"{len(plan.jobs)} jobs on {gpus:,} GPUs, "
        f"{plan.throughput_loss_percent:.2f}% of throughput lost"
    )


class _Layer(NamedTuple):
    """A layer of stacked power.

    Attributes:
        name: what draws it.
        power_kw: by interval.
        colour: grey for what is no job of its own.
    """

    name: str
    power_kw: NDArray[np.float64]
    colour: str


def _draw_power(axes: Axes, plan: SitePlan) -> None:
    """Draw the power of others, overheads and jobs, stacked under the budget, over time."""
    edges_h = _edges_h(plan)
    bottom_kw = np.zeros(len(plan.intervals))
    for layer in _layers(plan):
        if layer.power_kw.max() <= _NO_POWER_KW:
            continue
        top_kw = bottom_kw + layer.power_kw
        axes.stairs(
            top_kw,
            edges_h,
            baseline=bottom_kw,
            fill=True,
            color=layer.colour,
            label=layer.name,
            linewidth=0,
        )
        bottom_kw = top_kw
    budget_kw = [interval.budget_w / _W_PER_KW for interval in plan.intervals]
    axes.stairs(budget_kw, edges_h, baseline=None, color="black", linewidth=1.8, label="budget")
    axes.set_ylim(0, 1.15 * max(budget_kw))
    label_axes(axes, "Time (h)", "Power (kW)", "Power under the budget")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


def _edges_h(plan: SitePlan) -> list[float]:
    """The starts of all intervals and the end of the last one, h."""
    edges_h = [interval.start_s / _S_PER_H for interval in plan.intervals]
    edges_h.append(plan.intervals[-1].end_s / _S_PER_H)
    return edges_h


def _layers(plan: SitePlan) -> Iterator[_Layer]:
    """The layers from the bottom: others, overheads, then jobs, the largest first."""
    intervals = plan.intervals
    jobs_w = np.array([[job.power_w for job in interval.jobs] for interval in intervals])
    reserved_w = np.array([interval.reserved_w for interval in intervals])
    site_w = np.array([interval.power_w for interval in intervals])
    overheads_w = site_w - reserved_w - jobs_w.sum(axis=1)
    yield _Layer("reserved", reserved_w / _W_PER_KW, _GREY)
    yield _Layer("overheads", overheads_w / _W_PER_KW, _GREY)
    largest_first = np.argsort(-jobs_w.mean(axis=0), kind="stable")
    with_colour, without_colour = np.split(largest_first, [_NUM_COLOURS])
    for job, colour in zip(with_colour.tolist(), OKABE_ITO, strict=False):
        yield _Layer(shorten(plan.jobs[job].name), jobs_w[:, job] / _W_PER_KW, colour)
    others_w = jobs_w[:, without_colour].sum(axis=1)
    yield _Layer(f"{len(without_colour)} other jobs", others_w / _W_PER_KW, _GREY)


def _draw_throughput(axes: Axes, plan: SitePlan) -> None:
    """Draw the throughput that is left, over time."""
    remaining_percent = [100 - interval.throughput_loss_percent for interval in plan.intervals]
    axes.stairs(remaining_percent, _edges_h(plan), baseline=None, color=BLUE, linewidth=1.8)
    most_lost_percent = 100 - min(remaining_percent)
    # The line lies below the edge, and not on it.
    axes.set_ylim(99.5 - 1.1 * most_lost_percent, 100.03 + 0.06 * most_lost_percent)
    axes.ticklabel_format(axis="y", useOffset=False)
    label_axes(axes, "Time (h)", "Throughput (%)", "Throughput, of all jobs at T_min")


class _SheddingLine(NamedTuple):
    """The line of a way to shed power.

    Attributes:
        field: the field of a ShedPoint that says what it loses.
        label, colour, dashes: how it is drawn.
    """

    field: Literal["paused_percent", "capped_percent", "alike_percent", "shared_percent"]
    label: str
    colour: str
    dashes: str


#: A solid line lies below those with gaps, which may be at the same places.
_SHEDDING_LINES: Final = (
    _SheddingLine("shared_percent", "share by price", BLUE, "-"),
    _SheddingLine("paused_percent", "pause the least valuable, no plans", RED, "--"),
    _SheddingLine("capped_percent", "cap all clocks alike, no plans", GREEN, ":"),
    _SheddingLine("alike_percent", "cut each job alike", ORANGE, "-."),
)


def _percent_or_nan(point: ShedPoint, field: str) -> float:
    """A field of a point; NaN, which is not drawn, where it has no value."""
    percent: float | None = getattr(point, field)
    return math.nan if percent is None else percent


def _draw_shedding(axes: Axes, shed: Sequence[ShedPoint]) -> None:
    """Draw the throughput lost over the budget, a line for each of four ways to shed power."""
    power_kw = [point.power_w / _W_PER_KW for point in shed]
    for line in _SHEDDING_LINES:
        lost_percent = [_percent_or_nan(point, line.field) for point in shed]
        num_points = np.isfinite(lost_percent).sum()
        if num_points < 2:  # a legend needs a line to name
            continue
        axes.plot(
            power_kw,
            lost_percent,
            color=line.colour,
            linestyle=line.dashes,
            linewidth=1.8,
            label=line.label,
        )
    axes.invert_xaxis()
    label_axes(axes, "Power of the site (kW)", "Throughput lost (%)", "What it costs to shed power")
    axes.legend(loc="upper left")
