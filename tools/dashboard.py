"""The Grafana dashboard of a cluster, and pictures of it from the same queries.

    python -m tools.dashboard                                     writes deploy/grafana/envplan.json
    python -m tools.dashboard --draw http://localhost:9090 PNG    draws the last minutes

The pictures are for docs/operations.md: they are drawn with matplotlib from what Prometheus answers
to the dashboard's own queries, for machines that have no Grafana.
"""

from __future__ import annotations

import argparse
import json
import re
import time
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DASHBOARD = ROOT / "deploy" / "grafana" / "envplan.json"
#: Lines that a picture names.
_MAX_LEGEND = 10
_RUN = 'instance=~"$node"'


@dataclass(frozen=True)
class Query:
    """An expression, and how its lines are called."""

    expression: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """A panel of the dashboard.

    Attributes:
        title: in a few words, with what is modelled said.
        unit: Grafana's name of the unit.
        queries: what is drawn.
        note: how to read it.
    """

    title: str
    unit: str
    queries: tuple[Query, ...]
    note: str


PANELS = (
    Panel(
        "Iterations that follow their plan",
        "percentunit",
        (
            Query(
                f"min by (instance) (envplan:iterations_followed:ratio_rate5m{{{_RUN}}})",
                "worst rank of {{instance}}",
            ),
        ),
        "Share of the last five minutes. The others ran at full speed.",
    ),
    Panel(
        "Iteration time, measured over planned",
        "percentunit",
        (
            Query(
                f"max by (instance) (envplan:iteration_time:ratio_rate5m{{{_RUN}}})",
                "slowest rank of {{instance}}",
            ),
        ),
        "100%: as planned. More than 102% for ten minutes raises an alert.",
    ),
    Panel(
        "Clocks: wanted and seen, average of a node's GPUs",
        "hertz",
        (
            Query(
                f"avg by (instance) (avg_over_time(envplan_clock_wanted_hertz{{{_RUN}}}[1m]))",
                "wanted on {{instance}}",
            ),
            Query(
                f"avg by (instance) (avg_over_time(envplan_clock_hertz{{{_RUN}}}[1m]))",
                "seen on {{instance}}",
            ),
        ),
        "Over the last minute: clocks change many times between two samples.",
    ),
    Panel(
        "Power of a GPU and its cap",
        "watt",
        (
            Query(
                f"avg by (instance) (avg_over_time(envplan_power_watts{{{_RUN}}}[1m]))",
                "average on {{instance}}",
            ),
            Query(
                f"min by (instance) (envplan_power_limit_watts{{{_RUN}}})",
                "lowest cap on {{instance}}",
            ),
        ),
        "By the driver; power over the last minute.",
    ),
    Panel(
        "Energy of followed iterations, over full speed (modelled)",
        "percentunit",
        (
            Query(
                "max by (instance) "
                f"(envplan:energy_of_full_speed_modelled:ratio_increase1h{{{_RUN}}})",
                "highest of {{instance}}",
            ),
        ),
        "Measured joules over those that the plan's profile says full speed would have used.",
    ),
    Panel(
        "Clock changes, and those that came late",
        "cps",
        (
            Query(
                f"sum by (instance) (rate(envplan_clock_changes_total{{{_RUN}}}[5m]))",
                "changes {{instance}}",
            ),
            Query(
                f"sum by (instance) (rate(envplan_clock_changes_late_total{{{_RUN}}}[5m]))",
                "late {{instance}}",
            ),
        ),
        "A second, over all GPUs of a node.",
    ),
    Panel(
        "Iterations at full speed, by reason",
        "cps",
        (
            Query(
                "sum by (instance, reason) "
                f"(rate(envplan_iterations_unfollowed_total{{{_RUN}}}[5m]))",
                "{{instance}}: {{reason}}",
            ),
        ),
        "A second, over all ranks of a node.",
    ),
    Panel(
        "Guards, and clocks left set",
        "none",
        (
            Query(
                f"sum by (instance) (envplan_guard_up{{{_RUN}}})", "guards alive on {{instance}}"
            ),
            Query(
                f"sum by (instance) (envplan_clock_left_set{{{_RUN}}})",
                "clocks left set on {{instance}}",
            ),
        ),
        "A clock left set for two minutes raises an alert.",
    ),
)


def dashboard() -> dict[str, Any]:
    """The dashboard, as Grafana imports it."""
    source = {"type": "prometheus", "uid": "${source}"}
    panels = []
    for number, panel in enumerate(PANELS):
        targets = [
            {
                "refId": chr(ord("A") + index),
                "datasource": source,
                "expr": query.expression,
                "legendFormat": query.legend,
            }
            for index, query in enumerate(panel.queries)
        ]
        panels.append(
            {
                "id": number + 1,
                "type": "timeseries",
                "title": panel.title,
                "description": panel.note,
                "datasource": source,
                "gridPos": {"x": 12 * (number % 2), "y": 8 * (number // 2), "w": 12, "h": 8},
                "fieldConfig": {
                    "defaults": {"unit": panel.unit, "custom": {"lineWidth": 1}},
                    "overrides": [],
                },
                "options": {
                    "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
                    "tooltip": {"mode": "multi", "sort": "desc"},
                },
                "targets": targets,
            }
        )
    return {
        "title": "envplan",
        "uid": "envplan",
        "tags": ["envplan", "gpu", "energy"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {
            "list": [
                {"name": "source", "type": "datasource", "query": "prometheus", "label": "Source"},
                {
                    "name": "node",
                    "type": "query",
                    "label": "Node",
                    "datasource": source,
                    "query": "label_values(envplan_build_info, instance)",
                    "refresh": 2,
                    "multi": True,
                    "includeAll": True,
                    "allValue": ".*",
                    "current": {"text": "All", "value": "$__all"},
                },
            ]
        },
        "panels": panels,
    }


def ask(server: str, query: str, begin: float, end: float) -> list[dict[str, Any]]:
    """The series that Prometheus answers to a query of the dashboard, all nodes chosen."""
    fields = {
        "query": query.replace("$node", ".*"),
        "start": f"{begin}",
        "end": f"{end}",
        "step": f"{max(1.0, (end - begin) / 300):.0f}",
    }
    url = f"{server}/api/v1/query_range?{urllib.parse.urlencode(fields)}"
    with urllib.request.urlopen(url, timeout=30) as answer:
        document = json.load(answer)
    series: list[dict[str, Any]] = document["data"]["result"]
    return series


def draw(server: str, picture: Path, minutes: float) -> None:
    """Draw all panels as they were in the last minutes."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, PercentFormatter

    end = time.time()
    begin = end - 60 * minutes
    figure = Figure(figsize=(14, 15), layout="constrained")
    axes = figure.subplots(4, 2).ravel()
    for axis, panel in zip(axes, PANELS, strict=True):
        colors: dict[str, Any] = {}
        for query in panel.queries:
            for series in ask(server, query.expression, begin, end):
                labels = series["metric"]
                name = re.sub(r"{{(\w+)}}", lambda m, of=labels: of.get(m[1], ""), query.legend)
                times = [(float(at) - begin) / 60 for at, _ in series["values"]]
                values = [float(value) for _, value in series["values"]]
                style = ":" if name.startswith("wanted") else "-"
                color = colors.get(name.removeprefix("wanted ").removeprefix("seen "))
                (line,) = axis.plot(times, values, style, label=name, lw=1.3, color=color)
                key = name.removeprefix("wanted ").removeprefix("seen ")
                colors.setdefault(key, line.get_color())
        axis.set_title(panel.title, fontsize=11, loc="left")
        axis.set_xlim(0, minutes)
        axis.set_xlabel("minutes", fontsize=8)
        axis.margins(y=0.15)
        if panel.unit == "percentunit":
            axis.yaxis.set_major_formatter(PercentFormatter(1.0))
        elif panel.unit in ("hertz", "watt"):
            axis.yaxis.set_major_formatter(EngFormatter({"hertz": "Hz", "watt": "W"}[panel.unit]))
        if panel.unit in ("none", "cps", "watt"):
            axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.tick_params(labelsize=8)
        if 0 < len(axis.lines) <= _MAX_LEGEND:
            axis.legend(fontsize=7, ncols=2, loc="best")
        elif axis.lines:
            axis.set_title(f"{len(axis.lines)} lines", fontsize=8, loc="right")
        else:
            axis.text(0.5, 0.5, "none", ha="center", transform=axis.transAxes, color="0.5")
    figure.savefig(picture, dpi=90)


def main() -> None:
    """Write the dashboard, or draw it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--draw", nargs=2, metavar=("SERVER", "PNG"))
    parser.add_argument("--minutes", type=float, default=10.0)
    arguments = parser.parse_args()
    if arguments.draw is None:
        DASHBOARD.write_text(json.dumps(dashboard(), indent=2) + "\n", encoding="utf-8")
    else:
        server, picture = arguments.draw
        draw(server.rstrip("/"), Path(picture), arguments.minutes)


if __name__ == "__main__":
    main()
