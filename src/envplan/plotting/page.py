"""Self-contained web pages: charts one can point at, in one file that needs no network.

A page is HTML around `<div data-chart>` elements, the data of its charts as JSON, and the style and
script in `assets/`, all in one file.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Final, Literal

from envplan._io.files import read_bounded
from envplan.plotting.titles import job_line, source_words, workload_title

if TYPE_CHECKING:
    from envplan.simulation.iteration import Timeline
    from envplan.solve import Frontier

_ASSETS: Final = Path(__file__).parent / "assets"
#: The script of a page, a file for each idea: its data, tools, a chart each, the page itself.
_SCRIPTS: Final = (
    "data.js", "tools.js", "labels.js", "frontier.js", "timeline.js", "timeline_drawing.js",
    "series.js", "explorer.js", "page.js",
)  # fmt: skip
#: Wide enough each for its figure.
_MAX_CARDS_IN_A_ROW: Final = 6


def document(
    name: str,
    title: str,
    about: str,
    source: str | None,
    body: Sequence[str],
    data: Mapping[str, object],
) -> str:
    """Write a whole page as HTML.

    Args:
        name: of the browser's window; plain text.
        title: over the page; plain text.
        about: what the page is about, below the title; plain text.
        source: where its figures are from, such as "modelled" or "measured", shown as a badge;
            None where nothing says.
        body: HTML of all sections.
        data: for each chart the data it draws, in JSON types, by the key that its element names.
    """
    badge = ""
    if source:
        kind = "measured" if source == "measured" else "modelled"
        badge = f'<span class="badge {kind}">{html.escape(source)}</span>'
    unbroken = title.replace("-", "\N{NON-BREAKING HYPHEN}")
    # "<" stays out of the script element whatever a profile is called.
    data_text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return Template(_asset("page.html")).substitute(
        name=html.escape(name),
        style=_asset("page.css"),
        title=html.escape(unbroken),
        about=badge + html.escape(about),
        body="\n".join(body),
        data=data_text,
        script=script(),
    )


def script() -> str:
    """The script of every page."""
    return "\n".join(_asset(name) for name in _SCRIPTS)


def _asset(name: str) -> str:
    return read_bounded(_ASSETS / name).decode()


def job_page(
    title: str,
    job: Frontier | Timeline,
    body: Sequence[str],
    data: Mapping[str, object],
    planner: str | None = None,
) -> str:
    """Write a whole page about a job as HTML.

    Args:
        title: what it shows, such as "Frontier of {}", with a place for the job's name.
        job: the job.
        body: as for document.
        data: as for document.
        planner: the planner of what it shows; None: it is of none.
    """
    name = workload_title(job.profile, job.num_gpus * job.pipeline.num_stages)
    made_by = "" if planner is None else f"; planner {planner}"
    profile = "profile.csv" if job.profile.name == "profile" else f"profile {job.profile.name}"
    about = f"{job_line(job.pipeline, job.num_gpus)}{made_by}; {profile}"
    return document(name, title.format(name), about, source_words(job.profile), body, data)


def section(title: str, content: str) -> str:
    """HTML of a section, whose content is HTML already."""
    return f"<section><h2>{html.escape(title)}</h2>\n{content}\n</section>"


def chart(kind: Literal["explorer", "timeline", "series"], key: str) -> str:
    """HTML of the place where a chart goes.

    Args:
        kind: one that assets/page.js knows.
        key: names its data in the page's document.
    """
    return f'<div data-chart="{kind}" data-key="{key}"></div>'


def commands(lines: Sequence[str]) -> str:
    """HTML of commands, each with a button that copies it."""
    return "".join(map(_command, lines))


def _command(line: str) -> str:
    button = '<button type="button" class="copy">Copy</button>'
    return f'<div class="command"><code>{html.escape(line)}</code>{button}</div>'


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """HTML of a table; its first column is text and stays in sight, all others are numbers."""
    header_cells = "".join(f"<th>{html.escape(header)}</th>" for header in headers)
    head = f"<thead><tr>{header_cells}</tr></thead>"
    body = f"<tbody>{''.join(map(_table_row, rows))}</tbody>"
    return f'<div class="scroll shaded" tabindex="0"><table>{head}{body}</table></div>'


def _table_row(cells: Sequence[str]) -> str:
    columns = "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
    return f"<tr>{columns}</tr>"


def notes(items: Sequence[str]) -> str:
    """HTML of a list of sentences; what stands between backquotes is code."""
    lines = "".join(f"<li>{_with_code(item)}</li>" for item in items)
    return f"<ul>{lines}</ul>"


@dataclass(frozen=True, slots=True)
class Card:
    """A figure in large type.

    Attributes:
        figure: the figure with its unit.
        caption: what it is; what stands between backquotes is code.
        is_good: whether it is shown as good news.
    """

    figure: str
    caption: str
    is_good: bool = False


def cards(shown: Sequence[Card]) -> str:
    """HTML of cards, in rows of about as many each."""
    num_rows = math.ceil(len(shown) / _MAX_CARDS_IN_A_ROW)
    num_columns = math.ceil(len(shown) / max(1, num_rows))
    all_cards = "".join(map(_card, shown))
    return f'<div class="cards" style="--columns: {num_columns}">{all_cards}</div>'


def _card(card: Card) -> str:
    look = "good" if card.is_good else ""
    figure, caption = html.escape(card.figure), _with_code(card.caption)
    return f'<div class="card {look}"><b>{figure}</b><span>{caption}</span></div>'


def _with_code(text: str) -> str:
    """HTML of a text in which what stands between backquotes is code."""
    return re.sub("`([^`<]+)`", r"<code>\1</code>", html.escape(text))
