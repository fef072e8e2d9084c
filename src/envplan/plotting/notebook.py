"""How frontiers, plans and timelines look in a notebook, and as data frames."""

from __future__ import annotations

import base64
import html
from typing import TYPE_CHECKING

from envplan._words import column
from envplan.plotting.figures import made, unit_of
from envplan.plotting.frontier import frontier_figure, plans_along
from envplan.plotting.page import table
from envplan.units import s_from_ns

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from envplan.plan import Plan
    from envplan.simulation import Timeline
    from envplan.solve import Frontier

_PLANS = 17


def frontier_html(frontier: Frontier) -> str:
    """The frontier's picture with a few plans on it."""
    return _image(
        frontier_figure(frontier, plans_along(frontier, _PLANS)),
        f"frontier of {frontier.profile.name}",
    )


def plan_html(plan: Plan) -> str:
    """What a plan saves, as a table."""
    before, after = plan.predicted.baseline, plan.predicted
    scale, unit = unit_of(before.energy_j, "J")
    rows = [
        ("saved (%)", "", f"{after.savings_percent:.2f}"),
        ("slower (%)", "", f"{after.slowdown_percent:.2f}"),
        ("iteration time (s)", *column([before.iteration_time_s, after.iteration_time_s])),
        (f"energy ({unit})", *column([before.energy_j / scale, after.energy_j / scale])),
        ("average power (W)", *column([before.average_power_w, after.average_power_w])),
        ("certified gap (%)", "", f"{100 * after.gap:.3f}"),
    ]
    modelled = ", modelled" if plan.profile.source == "modelled" else ""
    name = html.escape(f"{plan.profile.name}{modelled}, planner {plan.planner}")
    return f"<p>{name}</p>{table(('', 'maximum frequency', 'plan'), rows)}"


def timeline_html(timeline: Timeline) -> str:
    """The timeline's picture."""
    from envplan.plotting.timeline import timeline_figure

    seconds = s_from_ns(timeline.iteration_time_ns)
    return _image(timeline_figure(timeline), f"timeline of {seconds:.4g} s")


def _image(drawn: Figure, what: str) -> str:
    data = base64.b64encode(made(drawn, "png", dpi=90)).decode()
    return f'<img alt="{html.escape(what)}" src="data:image/png;base64,{data}">'
