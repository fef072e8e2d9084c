"""Self-contained web pages: charts one can point at, in one file that needs no network.

A page is HTML around `<div data-chart>` elements, the data of its charts as JSON, and the style and
script in `assets/`, all in one file.
"""

from __future__ import annotations

import html
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from envplan._files import atomic_write
from envplan.plotting.figures import ENDS, in_joules
from envplan.units import UW_PER_W, j_from_fj, s_from_ns

if TYPE_CHECKING:
    from envplan.plan import Plan
    from envplan.simulation import Timeline
    from envplan.solve import Frontier

__all__ = [
    "cards",
    "chart",
    "commands",
    "curve_of",
    "document",
    "frontier_data",
    "heading",
    "histogram_data",
    "notes",
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
        source: such as "modelled" or "measured", shown as a badge; None where nothing says.
    """
    kind = "measured" if source == "measured" else "modelled"
    unbroken = title.replace("-", "\N{NON-BREAKING HYPHEN}")
    badge = f'<span class="badge {kind}">{html.escape(source)}</span>' if source else ""
    return (
        f'<header><h1>{html.escape(unbroken)}</h1><button id="theme" type="button">Dark</button>'
        f'</header>\n<p class="about">{badge}{html.escape(about)}</p>'
    )


def section(title: str, inner: str) -> str:
    """HTML of a section; `inner` is HTML already."""
    return f"<section><h2>{html.escape(title)}</h2>\n{inner}\n</section>"


def chart(kind: str, key: str) -> str:
    """HTML of the place where a chart goes.

    Args:
        kind: one that page.js knows: frontier, timeline, histogram, series or animation.
        key: names its data in the page's document.
    """
    return f'<div data-chart="{html.escape(kind)}" data-key="{html.escape(key)}"></div>'


def commands(lines: Sequence[str]) -> str:
    """HTML of commands, each with a button that copies it."""
    rows = (
        f'<div class="command"><code>{html.escape(line)}</code>'
        '<button type="button" class="copy">Copy</button></div>'
        for line in lines
    )
    return "".join(rows)


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """HTML of a table; its first column is text and stays in sight, all others are numbers."""
    head = "".join(f"<th>{html.escape(text)}</th>" for text in headers)
    lines = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    whole = f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"
    return f'<div class="scroll shaded" tabindex="0">{whole}</div>'


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
    curves: Mapping[str, Sequence[tuple[float, float]]] = MappingProxyType({}),
) -> dict[str, Any]:
    """What the frontier chart draws.

    Args:
        plans: along the frontier, at least one, by ascending time.
        points: further plans to show, as plan_point makes them.
        slower: plans beyond T_star to look up for stragglers.
        straggler_time: s that a straggler takes when the page opens; None: there is none.
        curves: further curves by the planner whose they are, (s, J).
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
        "curve": _thinned(
            list(zip(frontier.times.tolist(), frontier.energies.tolist(), strict=True))
        ),
        "curves": {name: _thinned(points) for name, points in curves.items()},
        "plans": [plan_point(plan, "plan") for plan in plans],
        # Their gaps are against plans that nobody waits after, which says nothing here.
        "slower": [plan_point(plan, "plan") | {"gap": None} for plan in slower],
        "points": [highest, *points],
        "baseline": {"time": baseline.iteration_time_s, "energy": baseline.energy_j},
        "t_min": frontier.min_time,
        "t_star": frontier.min_energy_time,
        "ends": ENDS,
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


def curve_of(frontier: Frontier) -> list[tuple[float, float]]:
    """The relaxed frontier's breakpoints, (s, J)."""
    return _thinned(list(zip(frontier.times.tolist(), frontier.energies.tolist(), strict=True)))


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Points of a curve, (s, J); of very many, enough that no eye sees the difference."""
    step = max(1, -(-len(points) // _MOST_CURVE_POINTS))
    kept = sorted({*range(0, len(points), step), len(points) - 1}) if points else []
    return [points[k] for k in kept]


def timeline_data(timeline: Timeline, name: str) -> dict[str, Any]:
    """One timeline of a timeline chart: its operations column by column, and its power.

    Args:
        name: what to call it, such as "plan" or "maximum frequency".
    """
    timed = timeline.operations
    kinds = list(dict.fromkeys(one.operation.instruction for one in timed))
    path = set(timeline.critical_path)
    times, watts = timeline.power
    return {
        "name": name,
        "title": f"{name}: {timeline.iteration_time:#.4g} s, {in_joules(timeline.energy)}",
        "chunks": timeline.pipeline.num_chunks,
        "stages": len(timeline.stages),
        "kinds": kinds,
        "ops": {
            "stage": [one.operation.stage for one in timed],
            "kind": [kinds.index(one.operation.instruction) for one in timed],
            "microbatch": [one.operation.microbatch for one in timed],
            "chunk": [one.operation.chunk for one in timed],
            "start": [s_from_ns(one.start_ns) for one in timed],
            "time": [s_from_ns(one.time_ns) for one in timed],
            "mhz": [one.frequency_mhz for one in timed],
            "watts": [
                round(one.energy_fj / (one.time_ns * UW_PER_W), 3) if one.time_ns else 0.0
                for one in timed
            ],
            "slack": [s_from_ns(one.stretch_ns) for one in timed],
            "critical": [int(k in path) for k in range(len(timed))],
        },
        # Of operations whose parts have clocks of their own: begin and end, s, MHz, W, part.
        "parts": {
            k: [
                [
                    s_from_ns(part.start_ns),
                    s_from_ns(part.finish_ns),
                    part.frequency_mhz,
                    round(part.energy_fj / ((part.finish_ns - part.start_ns) * UW_PER_W), 3),
                    part.part,
                ]
                for part in one.slices
            ]
            for k, one in enumerate(timed)
            if one.slices[0].part
        },
        "bubbles": [
            [
                bubble.stage,
                s_from_ns(bubble.start_ns),
                s_from_ns(bubble.finish_ns),
                s_from_ns(bubble.usable_ns),
            ]
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
