"""Self-contained web pages: charts one can point at, in one file that needs no network.

A page is HTML around `<div data-chart>` elements, the data of its charts as JSON, and the style and
script in `assets/`, all in one file.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any, Final

from envplan.plotting.figures import ENDS, in_unit, job_line, source_words, workload_title
from envplan.plotting.frontier import LOOKS, plans_along
from envplan.units import UW_PER_W, s_from_ns

if TYPE_CHECKING:
    from envplan.plan import Plan
    from envplan.planners import Comparison
    from envplan.simulation.iteration import Timeline
    from envplan.solve import Frontier

#: Plans beyond T_star, for the straggler that one can move along the chart.
_SLOWER: Final = 12
#: Jobs of more operations have none: they take a further trace.
_MOST_FOR_SLOWER: Final = 8000
_ASSETS: Final = Path(__file__).parent / "assets"
_MOST_CURVE_POINTS: Final = 1500
#: What the charts say of a plan: s, J, percent, a fraction, W.
_POINT: Final = ("planner", "label", "time", "energy", "saved", "slower", "gap", "power")
#: What they say of an operation, and what a timeline calls it.
_OPERATION: Final = {
    "microbatch": "microbatch", "chunk": "chunk", "start": "start_s", "mhz": "frequency_mhz",
    "slack": "could_stretch_s",
}  # fmt: skip


def document(
    name: str, title: str, about: str, source: str | None, body: Sequence[str], data: Any
) -> str:
    """A whole page.

    Args:
        name: of the browser's window; this, title and about are plain text.
        title: over the page, and what that is about below it.
        source: where its figures are from, such as "modelled" or "measured", shown as a badge;
            None where nothing says.
        body: HTML of all sections.
        data: for each chart the data it draws, by the key that its element names.
    """
    page, style, script = (
        (_ASSETS / f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js")
    )
    kind = "measured" if source == "measured" else "modelled"
    badge = f'<span class="badge {kind}">{html.escape(source)}</span>' if source else ""
    unbroken = title.replace("-", "\N{NON-BREAKING HYPHEN}")
    return Template(page).substitute(
        {"style": style, "script": script, "body": "\n".join(body)},
        name=html.escape(name),
        title=html.escape(unbroken),
        about=badge + html.escape(about),
        # "<" stays out of the script element whatever a profile is called.
        data=json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
    )


def job_page(
    title: str, of: Frontier | Timeline, body: Sequence[str], data: Mapping[str, Any], by: str = ""
) -> str:
    """A whole page about a job.

    Args:
        title: what it shows, such as "Frontier of {}", with a place for the job's name.
        of: whose job it is.
        body, data: as for document.
        by: what to say of a planner.
    """
    name = workload_title(of.profile, of.num_gpus * of.pipeline.num_stages)
    about = f"{job_line(of.pipeline, of.num_gpus)}{by}; profile {of.profile.name}"
    return document(name, title.format(name), about, source_words(of.profile), body, data)


def section(title: str, inner: str) -> str:
    """HTML of a section; `inner` is HTML already."""
    return f"<section><h2>{html.escape(title)}</h2>\n{inner}\n</section>"


def chart(kind: str, key: str) -> str:
    """HTML of the place where a chart goes.

    Args:
        kind: one that page.js knows: frontier, timeline, series or animation.
        key: names its data in the page's document.
    """
    return f'<div data-chart="{kind}" data-key="{key}"></div>'


def _each(pattern: str, rows: Iterable[Sequence[str]]) -> str:
    """HTML of a pattern filled with the texts of each row."""
    return "".join(pattern.format(*map(html.escape, row)) for row in rows)


def _with_code(text: str) -> str:
    """HTML in which what stands between backquotes is code."""
    return re.sub("`([^`<]+)`", r"<code>\1</code>", text)


def commands(lines: Sequence[str]) -> str:
    """HTML of commands, each with a button that copies it."""
    copied = '<code>{}</code><button type="button" class="copy">Copy</button>'
    return _each(f'<div class="command">{copied}</div>', zip(lines, strict=True))


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """HTML of a table; its first column is text and stays in sight, all others are numbers."""
    head = _each("<th>{}</th>", zip(headers, strict=True))
    lines = _each(f"<tr>{'<td>{}</td>' * len(headers)}</tr>", rows)
    whole = f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"
    return f'<div class="scroll shaded" tabindex="0">{whole}</div>'


def notes(items: Sequence[str]) -> str:
    """HTML of a list of sentences; what stands between backquotes is code."""
    return f"<ul>{_with_code(_each('<li>{}</li>', zip(items, strict=True)))}</ul>"


def cards(shown: Sequence[tuple[str, str, str]]) -> str:
    """HTML of a row of cards.

    Args:
        shown: of each card its figure, what that is, and "good" or nothing.
    """
    pattern = '<div class="card {2}"><b>{0}</b><span>{1}</span></div>'
    return f'<div class="cards">{_with_code(_each(pattern, shown))}</div>'


def frontier_data(
    frontier: Frontier,
    along: Sequence[Plan],
    comparison: Comparison | None = None,
    own: Plan | None = None,
    *,
    beyond: bool = True,
) -> dict[str, Any]:
    """What the frontier chart draws.

    Args:
        along: plans along the frontier, at least one, by ascending time.
        comparison: planners to show beside it.
        own: the plan that the page is about; its straggler is there when the page opens.
        beyond: with plans beyond T_star to look up for stragglers, unless the job is too large.
    """
    before = along[0].predicted.baseline
    spent = before.iteration_time_s, before.energy_j, 0.0, 0.0, None, before.average_power_w
    everywhere = ("max_frequency", "maximum frequency everywhere", *spent)
    highest = dict(zip(_POINT, everywhere, strict=True))
    points, curves, slower = [highest], {}, []
    if comparison is not None:
        points += _rivals(comparison)
        curves = {name: _thinned(curve) for name, curve in comparison.curves.items()}
        if comparison.envpipe_frontier is not comparison.frontier:
            curves["envpipe"] = _curve(comparison.envpipe_frontier)
    if own is not None:
        points.append(_point(own, f"this plan ({own.planner})") | {"planner": "this_plan"})
    if beyond and len(frontier.pipeline.operations) <= _MOST_FOR_SLOWER:
        slower = plans_along(frontier, _SLOWER, beyond=True)
    return {
        "curve": _curve(frontier),
        "curves": curves,
        "plans": [_point(plan, "plan") for plan in along],
        # Their gaps are against plans that nobody waits after, which says nothing here.
        "slower": [_point(plan, "plan") | {"gap": None} for plan in slower],
        "points": points,
        "baseline": highest,
        "t_min": frontier.min_time,
        "t_star": frontier.min_energy_time,
        "ends": ENDS,
        "t_max": frontier.slowest_time,
        "waiting_w": sum(frontier.blocking_power_w) * frontier.gpus_per_stage * frontier.replicas,
        "straggler": None if own is None else own.target.straggler_time_s,
        "modelled": frontier.profile.metadata.source == "modelled",
    }


def _point(plan: Plan, label: str) -> dict[str, Any]:
    """A plan as a point of the frontier chart."""
    than_highest = plan.predicted.savings_percent, plan.predicted.slowdown_percent
    spent = plan.iteration_time, plan.energy, *than_highest, plan.gap, plan.average_power
    return dict(zip(_POINT, (plan.planner, label, *spent), strict=True))


def _rivals(comparison: Comparison) -> list[dict[str, Any]]:
    """The points of other planners, and of ours on other schedules; maximum frequency and our
    plans on this one are on every chart anyway."""
    shown = []
    for entry in comparison.entries:
        planner, schedule = entry.plan.planner, entry.plan.job.schedule
        name = entry_name(planner, entry.point)
        other = schedule != comparison.frontier.pipeline.schedule
        if planner != "max_frequency" and (other or planner != "frontier"):
            name += f" (schedule {schedule})" if other else ""
            against = {
                "saved": entry.savings_percent,
                "slower": entry.slowdown_percent,
            }
            shown.append(_point(entry.plan, name) | {"planner": planner} | against)
    return shown


def entry_name(planner: str, point: str | None) -> str:
    """What a planner's plan is called, such as "envplan at T_min"."""
    name = LOOKS[planner].name if planner in LOOKS else planner
    return name + (f" at {point}" if point in ("T_min", "T_star") else "")


def _curve(of: Frontier) -> list[tuple[float, float]]:
    """The relaxed frontier's breakpoints, (s, J)."""
    return _thinned(list(zip(of.times.tolist(), of.energies.tolist(), strict=True)))


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Points of a curve, (s, J); of very many, enough that no eye sees the difference."""
    step = max(1, -(-len(points) // _MOST_CURVE_POINTS))
    return [*points[:-1:step], *points[-1:]]


def timeline_data(timeline: Timeline, name: str) -> dict[str, Any]:
    """One timeline of a timeline chart: its operations column by column, and its power.

    Args:
        name: what to call it, such as "plan" or "maximum frequency".
    """
    operations, rows, replay = timeline.pipeline.operations, timeline.operations, timeline.replay
    times_ns = (replay.finishes_ns - replay.starts_ns).tolist()
    kinds = list(dict.fromkeys(row.instruction for row in rows))
    times, watts = timeline.power
    return {
        "name": name,
        "title": f"{name}: {timeline.iteration_time:#.4g} s, {in_unit(timeline.energy, 'J')}",
        "chunks": timeline.pipeline.num_chunks,
        "stages": len(timeline.stages),
        "kinds": kinds,
        "ops": {
            **{name: [getattr(row, of) for row in rows] for name, of in _OPERATION.items()},
            "stage": [op.stage for op in operations],
            "kind": [kinds.index(row.instruction) for row in rows],
            "time": list(map(s_from_ns, times_ns)),
            "watts": list(map(_watts, replay.energies_fj.tolist(), times_ns)),
            "critical": [int(row.critical_path) for row in rows],
        },
        # Of operations whose parts have clocks of their own: begin and end, s, MHz, W, part.
        "parts": {
            k: [
                (
                    *map(s_from_ns, (part.start_ns, part.finish_ns)),
                    part.frequency_mhz,
                    _watts(part.energy_fj, part.finish_ns - part.start_ns),
                    part.part,
                )
                for part in of
            ]
            for k, of in groupby(
                (one for one in timeline.slices if one.part), key=lambda one: one.operation
            )
        },
        "bubbles": [
            (use.stage, gap.start_s, gap.finish_s, gap.could_fill_s)
            for use in timeline.stages
            for gap in use.bubbles
        ],
        "power": {
            "times": [s_from_ns(t) for t in times.tolist()],
            "watts": watts.round(3).tolist(),
        },
        "average_w": timeline.average_power,
    }


def _watts(energy_fj: int, time_ns: int) -> float:
    return round(energy_fj / (time_ns * UW_PER_W), 3) if time_ns else 0.0


def timelines_data(timelines: Mapping[str, Timeline]) -> dict[str, Any]:
    """What the timeline chart draws: timelines one above the other on one time axis, by name."""
    return {
        "timelines": [timeline_data(each, name) for name, each in timelines.items()],
        "span": max(each.sync_time for each in timelines.values()),
    }
