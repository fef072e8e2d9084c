"""Self-contained web pages: charts one can point at, in one file that needs no network.

A page is HTML around `<div data-chart>` elements, the data of its charts as JSON, and the style and
script in `assets/`, all in one file.
"""

from __future__ import annotations

import html
import io
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from envplan._files import atomic_write
from envplan.units import UW_PER_W, j_from_fj, s_from_ns

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from envplan.plan import Plan
    from envplan.simulation import Timeline
    from envplan.solve import Frontier

__all__ = [
    "cards",
    "chart",
    "document",
    "frontier_data",
    "heading",
    "histogram_data",
    "notes",
    "picture",
    "plan_point",
    "save_page",
    "section",
    "table",
    "timeline_data",
    "timelines_data",
]

_ASSETS: Final = Path(__file__).parent / "assets"
_MOST_CURVE_POINTS: Final = 1500
_BIN_MHZ: Final = 30


def save_page(page: str, path: str | os.PathLike[str]) -> None:
    """Write a page, whole or not at all.

    Raises:
        InputError: the file cannot be written.
    """
    atomic_write(path, page)


def document(title: str, body: str, data: Mapping[str, Any]) -> str:
    """A whole page.

    Args:
        title: of the browser's window; plain text.
        body: HTML of everything below the button for light and dark.
        data: for each chart the data it draws, by the key that its element names.
    """
    # "<" stays out of the script element whatever a profile is called.
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    style = (_ASSETS / "page.css").read_text(encoding="utf-8")
    script = (_ASSETS / "page.js").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{html.escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        f'{body}\n</main>\n<div id="tip" role="tooltip"></div>\n'
        f'<script type="application/json" id="data">{text}</script>\n'
        f"<script>\n{script}</script>\n</body>\n</html>\n"
    )


def heading(title: str, about: str, source: str | None) -> str:
    """HTML of a page's head: its title, what it is about, and where its figures are from.

    Args:
        source: "modelled" or "measured", shown as a badge; None where the profile does not say.
    """
    badge = f'<span class="badge {source}">{source}</span>' if source else ""
    return (
        f'<header><h1>{html.escape(title)}</h1><button id="theme" type="button">Dark</button>'
        f'</header>\n<p class="about">{badge}{html.escape(about)}</p>'
    )


def section(title: str, inner: str) -> str:
    """HTML of a section; `inner` is HTML already."""
    return f"<section><h2>{html.escape(title)}</h2>\n{inner}\n</section>"


def chart(kind: str, key: str) -> str:
    """HTML of the place where a chart goes.

    Args:
        kind: one that page.js knows: frontier, timeline, histogram or animation.
        key: names its data in the page's document.
    """
    return f'<div data-chart="{html.escape(kind)}" data-key="{html.escape(key)}"></div>'


def picture(figure: Figure, what: str) -> str:
    """HTML of a figure that needs no script.

    Args:
        what: says what it shows, for those who cannot see it.
    """
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "envplan", "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    svg = buffer.getvalue().partition("<svg")[2]
    return (
        f'<div class="scroll picture"><svg role="img" aria-label="{html.escape(what)}"{svg}</div>'
    )


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """HTML of a table; its first column is text and stays in sight, all others are numbers."""
    head = "".join(f"<th>{html.escape(text)}</th>" for text in headers)
    lines = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    whole = f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"
    return f'<div class="scroll">{whole}</div>'


def notes(items: Sequence[str]) -> str:
    """HTML of a list of sentences; what stands between backquotes is code."""
    lines = (re.sub("`([^`]+)`", r"<code>\1</code>", html.escape(item)) for item in items)
    return "<ul>" + "".join(f"<li>{line}</li>" for line in lines) + "</ul>"


def cards(shown: Sequence[tuple[str, str, str]]) -> str:
    """HTML of a row of cards.

    Args:
        shown: of each card its figure, what that is, and "good" or nothing.
    """
    inner = "".join(
        f'<div class="card {kind}"><b>{html.escape(value)}</b>'
        f"<span>{html.escape(what)}</span></div>"
        for value, what, kind in shown
    )
    return f'<div class="cards">{inner}</div>'


def frontier_data(
    frontier: Frontier,
    plans: Sequence[Plan],
    points: Sequence[dict[str, Any]] = (),
    slower: Sequence[Plan] = (),
    straggler_time: float | None = None,
) -> dict[str, Any]:
    """What the frontier chart draws.

    Args:
        plans: along the frontier, at least one, by ascending time.
        points: further plans to show, as plan_point makes them.
        slower: plans beyond T_star to look up for stragglers.
        straggler_time: s that a straggler takes when the page opens; None: there is none.
    """
    baseline = plans[0].predicted.baseline
    highest = {
        "planner": "max_frequency",
        "label": "maximum frequency everywhere",
        "time": baseline.iteration_time_s,
        "energy": baseline.energy_j,
        "saved": 0.0,
        "slower": 0.0,
        "gap": None,
        "power": baseline.average_power_w,
    }
    waiting_w = sum(frontier.blocking_power_w) * frontier.gpus_per_stage * frontier.replicas
    return {
        "curve": _thinned(frontier),
        "plans": [plan_point(plan, "plan") for plan in plans],
        # Their gaps are against plans that nobody waits after, which says nothing here.
        "slower": [plan_point(plan, "plan") | {"gap": None} for plan in slower],
        "points": [highest, *points],
        "baseline": {"time": baseline.iteration_time_s, "energy": baseline.energy_j},
        "t_min": frontier.min_time,
        "t_star": frontier.min_energy_time,
        "t_max": frontier.slowest_time,
        "waiting_w": waiting_w,
        "straggler": straggler_time,
        "modelled": frontier.profile.metadata.source == "modelled",
    }


def plan_point(plan: Plan, label: str, *, planner: str | None = None) -> dict[str, Any]:
    """A plan as a point of the frontier chart."""
    predicted = plan.predicted
    return {
        "planner": planner or plan.planner,
        "label": label,
        "time": plan.iteration_time,
        "energy": plan.energy,
        "saved": predicted.savings_percent,
        "slower": predicted.slowdown_percent,
        "gap": plan.gap,
        "power": plan.average_power,
    }


def _thinned(frontier: Frontier) -> list[list[float]]:
    """The curve's breakpoints, (s, J); of very many, enough that no eye sees the difference."""
    count = len(frontier.times)
    step = max(1, -(-count // _MOST_CURVE_POINTS))
    kept = sorted({*range(0, count, step), count - 1})
    return [[float(frontier.times[k]), float(frontier.energies[k])] for k in kept]


def timeline_data(timeline: Timeline, name: str) -> dict[str, Any]:
    """One timeline of a timeline chart: its operations column by column, and its power.

    Args:
        name: what to call it, such as "plan" or "maximum frequency".
    """
    from envplan.plotting.frontier import in_joules

    path = set(timeline.critical_path)
    kinds = list(dict.fromkeys(timed.operation.instruction for timed in timeline.operations))
    ops: dict[str, list[float]] = {
        key: []
        for key in (
            "stage",
            "kind",
            "microbatch",
            "chunk",
            "start",
            "time",
            "mhz",
            "watts",
            "slack",
            "critical",
        )
    }
    for index, timed in enumerate(timeline.operations):
        operation = timed.operation
        values = (
            operation.stage,
            kinds.index(operation.instruction),
            operation.microbatch,
            operation.chunk,
            s_from_ns(timed.start_ns),
            s_from_ns(timed.time_ns),
            timed.frequency_mhz,
            round(timed.energy_fj / (timed.time_ns * UW_PER_W), 3) if timed.time_ns else 0.0,
            s_from_ns(timed.stretch_ns),
            int(index in path),
        )
        for column, value in zip(ops.values(), values, strict=True):
            column.append(value)
    # Operations whose parts have clocks of their own: [begin and end in s, MHz, W, part] of each.
    parts = {
        index: [
            [
                s_from_ns(part.start_ns),
                s_from_ns(part.finish_ns),
                part.frequency_mhz,
                round(part.energy_fj / ((part.finish_ns - part.start_ns) * UW_PER_W), 3),
                part.part,
            ]
            for part in timed.slices
        ]
        for index, timed in enumerate(timeline.operations)
        if timed.slices[0].part
    }
    times, watts = timeline.power
    return {
        "name": name,
        "title": f"{name}: {timeline.iteration_time:#.4g} s, {in_joules(timeline.energy)}",
        "chunks": timeline.pipeline.num_chunks,
        "stages": len(timeline.stages),
        "kinds": kinds,
        "ops": ops,
        "parts": parts,
        "bubbles": [
            [bubble.stage, s_from_ns(bubble.start_ns), s_from_ns(bubble.finish_ns), bubble.usable]
            for bubble in timeline.bubbles
        ],
        "power": {
            "times": [s_from_ns(time) for time in times.tolist()],
            "watts": [round(value, 3) for value in watts.tolist()],
        },
        "average_w": timeline.average_power,
        "energy_j": j_from_fj(timeline.energy_fj),
    }


def timelines_data(timelines: Sequence[Timeline], names: Sequence[str]) -> dict[str, Any]:
    """What the timeline chart draws: timelines one above the other on one time axis."""
    return {
        "timelines": [
            timeline_data(each, name) for each, name in zip(timelines, names, strict=True)
        ],
        "span": max(each.sync_time for each in timelines),
    }


def histogram_data(plan: Plan) -> dict[str, Any] | None:
    """Percent of the busy time that operations spend at which clock, by instruction; None where
    nothing has a clock."""
    busy: dict[tuple[int, str], float] = {}
    for stage in plan.stages:
        for operation in stage:
            if operation.frequency_mhz:
                key = (operation.frequency_mhz // _BIN_MHZ, operation.instruction)
                busy[key] = busy.get(key, 0.0) + operation.time_s
    if not busy:
        return None
    kinds = sorted({kind for _, kind in busy}, key=lambda kind: (kind != "forward", kind))
    total = sum(busy.values())
    bins = sorted({number for number, _ in busy})
    return {
        "kinds": kinds,
        "low": (bins[0] - 1) * _BIN_MHZ,
        "high": (bins[-1] + 2) * _BIN_MHZ,
        "bins": [
            {
                "from": number * _BIN_MHZ,
                "to": (number + 1) * _BIN_MHZ,
                "share": [100 * busy.get((number, kind), 0.0) / total for kind in kinds],
            }
            for number in bins
        ],
    }
