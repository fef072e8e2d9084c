"""How commands show numbers, tables and progress."""

from __future__ import annotations

import json
import os
import shlex
import sys
import textwrap
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from operator import attrgetter
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any

import typer

from envplan._files import atomic_write
from envplan._words import column as column
from envplan._words import describe_profile as describe_profile
from envplan._words import exact_seconds as exact_seconds
from envplan._words import signed_percent as signed_percent
from envplan._words import significant as significant
from envplan.cli import state
from envplan.errors import DoubtWarning

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from envplan.cli.options import OutputOptions
    from envplan.plan import Plan
    from envplan.solve import Frontier

#: How often work says how far it is where nobody watches a terminal.
_REPORT_PERIOD_S = 60.0
_PATIENCE_S = 1.0
_BETWEEN = 2  # characters between columns of a table
_FOLDED = 8  # characters that a column of words may be folded to


def answer(
    show: OutputOptions,
    document: Callable[[], Mapping[str, Any]],
    tell: Callable[[], None] = lambda: None,
    *,
    written: Sequence[Path | None] = (),
    last: str = "",
    then: str | Sequence[str] = (),
) -> None:
    """How a command ends: with a JSON document, or with words; nothing where it is to be quiet.

    Args:
        document: makes the document.
        tell: prints the words.
        written: files that were written, if any.
        last: a sentence for the last line.
        then: what to type next, as one text or word by word.
    """
    following = then if isinstance(then, str) else shlex.join(then)
    if show.json:
        # Where a document has no schema of its own, it is the running command's.
        named = {"schema": f"envplan/{state.command}/v1", **document()}
        named |= {"next": following} if following else {}
        typer.echo(json.dumps(named, indent=2, allow_nan=False))
        return
    if show.quiet:
        return
    tell()
    for path in written:
        if path is not None:
            say(f"wrote {path}")
    end = [last] if last else []
    if following:
        end.append(f"next: {following}")
    if end:
        say("; ".join(end))


def print_table(
    title: str,
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    words: int = 1,
    wrap: Sequence[str] = (),
    drop: Sequence[str] = (),
) -> None:
    """A table on stdout, as wide as the terminal at most.

    Where it is narrow, headers and words wrap, and then columns are left out. No number is cut.

    Args:
        words: this many columns, the first ones, are text and stand left; all others are numbers.
        wrap: headers of the columns whose cells may take several lines.
        drop: headers of the columns to leave out first, in this order; then the last ones go.
    """
    # A table cut to the width of a terminal is useless in a file.
    room = get_terminal_size().columns if on_terminal() else 10_000
    columns = [
        _Column(header, [row[k] for row in rows], k < words, header in wrap)
        for k, header in enumerate(headers)
    ]
    left_out = []
    while len(columns) > 1 and sum(c.least + _BETWEEN for c in columns) - _BETWEEN > room:
        first = next((name for name in drop if name in [c.header for c in columns]), None)
        place = next((k for k, c in enumerate(columns) if c.header == first), len(columns) - 1)
        left_out.append(columns.pop(place).header)
    spare = room - sum(c.least + _BETWEEN for c in columns) + _BETWEEN
    for each in columns:
        given = min(spare, each.natural - each.least)
        each.width, spare = each.least + given, spare - given
    if title:
        say("\n".join(map(_bold, textwrap.wrap(title, room))))
    _print_cells(columns, [c.header for c in columns], heading=True)
    say("─" * (sum(c.width + _BETWEEN for c in columns) - _BETWEEN))
    for row in zip(*(c.cells for c in columns), strict=True):
        _print_cells(columns, row)
    if left_out:
        say(f"left out for want of room: {', '.join(left_out)}; --json has them")


class _Column:
    """A column of a table, and how wide it may be."""

    def __init__(self, header: str, cells: list[str], text: bool, wraps: bool) -> None:
        self.header, self.cells, self.text = header, cells, text
        whole = max(map(len, cells), default=0)
        parts = max((len(part) for cell in cells for part in cell.split()), default=0)
        self.natural = max(whole, len(header))
        least = min(parts, _FOLDED) if wraps else parts if text else whole
        self.least = max(least, *(len(word) for word in header.split()), 1)
        self.width = self.natural


def _print_cells(columns: Sequence[_Column], cells: Sequence[str], heading: bool = False) -> None:
    """A row of a table, on as many lines as its tallest cell takes; headings stand at the foot."""
    folded = [
        textwrap.wrap(cell, each.width, break_on_hyphens=False) or [""]
        for each, cell in zip(columns, cells, strict=True)
    ]
    height = max(map(len, folded))
    for each, lines in zip(columns, folded, strict=True):
        blank = [""] * (height - len(lines))
        lines[:] = [*blank, *lines] if heading else [*lines, *blank]
        lines[:] = [
            text.ljust(each.width) if each.text else text.rjust(each.width) for text in lines
        ]
    for parts in zip(*folded, strict=True):
        line = (" " * _BETWEEN).join(parts).rstrip()
        say(_bold(line) if heading else line)


def _bold(text: str) -> str:
    return f"\x1b[1m{text}\x1b[0m" if text and colored() else text


def print_columns(
    title: str,
    columns: Mapping[str, Any],
    *,
    words: int = 1,
    wrap: Sequence[str] = (),
    drop: Sequence[str] = (),
) -> None:
    """A table on stdout, given by its columns of texts or numbers. As print_table."""
    texts = [_texts(header, list(values)) for header, values in columns.items()]
    rows = list(zip(*texts, strict=True))
    print_table(title, list(columns), rows, words=words, wrap=wrap, drop=drop)


def _texts(header: str, values: list[Any]) -> list[str]:
    """The cells of a column: of fractions as many digits as its header asks for; None is "-"."""
    known = [value for value in values if isinstance(value, float)]
    if header.endswith("(%)"):
        form = _PERCENTS.get(header, "{:.2f}".format)
        shown = iter([form(value) for value in known])
    else:
        shown = iter(column(known))
    return [
        next(shown) if isinstance(value, float) else "-" if value is None else str(value)
        for value in values
    ]


#: Percentages that are not shown with two decimals and no sign.
_PERCENTS = {
    "slower (%)": signed_percent,
    "change (%)": signed_percent,
    "gap (%)": "{:.3f}".format,
}


ITERATION = "One iteration, all GPUs"


def titled(title: str, *sources: str | None) -> str:
    """The title of a table, which says if a profile that figures come from is modelled."""
    return title + (", modelled" if "modelled" in sources else "")


def changes(rows: Iterable[tuple[str, float, float]]) -> list[list[str]]:
    """Rows of name, before, after and change in percent, from name, before and after."""
    return [
        [name, *column([old, new]), signed_percent(100 * (new / old - 1)) if old else "-"]
        for name, old, new in rows
    ]


def picked(value: object, names: str) -> dict[str, Any]:
    """Attributes for a JSON document: from `name other=path.to.it` by the keys name and other."""
    pairs = (name.partition("=") for name in names.split())
    return {key: attrgetter(path or key)(value) for key, _, path in pairs}


def draw(
    path: Path | None, figure: Callable[[], Figure], page: Callable[[], str] | None = None
) -> None:
    """Write a picture, or a page where the file's name ends in .html; nothing without a file."""
    if path is not None and page is not None and path.suffix.lower() == ".html":
        atomic_write(path, page())
    elif path is not None:
        from envplan.plotting.figures import save_figure

        save_figure(figure(), path)


def colored() -> bool:
    """Whether to print in colours: as --color says, else on terminals unless NO_COLOR is set."""
    if state.color is not None:
        return state.color
    return on_terminal() and not os.environ.get("NO_COLOR")


def on_terminal() -> bool:
    """Whether somebody looks at stdout."""
    return sys.stdout.isatty()


def say(*lines: str) -> None:
    """Lines on stdout."""
    for line in lines:
        typer.echo(line, color=state.color)


def warn(line: str) -> None:
    """A line on stderr about something that is probably not meant."""
    warnings.warn(line, DoubtWarning, stacklevel=2)


def describe_job(frontier: Frontier) -> str:
    """One or two lines that say what numbers below them are about."""
    from envplan.plotting.figures import job_line

    powers = [significant(power, 3) for power in sorted(frontier.blocking_power_w)]
    source = {
        "profile": "from the profile",
        "argument": "as given",
        "default": "default, the profile does not say; --blocking-power sets it",
    }[frontier.blocking_power_source]
    return (
        f"{describe_profile(frontier.profile)}; {job_line(frontier.pipeline, frontier.num_gpus)}\n"
        f"waiting GPUs draw {' to '.join(dict.fromkeys([powers[0], powers[-1]]))} W ({source})"
        f"{_unused_rows(frontier)}"
    )


def describe_ends(frontier: Frontier) -> str:
    """Where a frontier begins and ends, with a word for each."""
    return (
        f"T_min {significant(frontier.min_time)} s (least time), "
        f"T_star {significant(frontier.min_energy_time)} s (least energy)"
    )


def _unused_rows(frontier: Frontier) -> str:
    """A line about operations that the profile times and the pipeline leaves out."""
    from envplan.pipeline.schedules import EXTRAS

    used = {op.instruction for op in frontier.pipeline.operations}
    unused = [name for name in EXTRAS if name in frontier.profile.instructions and name not in used]
    if not unused:
        return ""
    adds = "the DAG file has none" if frontier.pipeline.schedule == "dag" else "--extra adds them"
    return f"\nthe profile's rows for {', '.join(unused)} are not used; {adds}"


def config_counts(plan: Plan) -> Counter[str]:
    """How often a plan chose which config; empty where operations have no configs."""
    from envplan.profile import changes_of

    counts = Counter(
        "by part" if changes_of(op.config) else op.config or "none"
        for stage in plan.stages
        for op in stage
    )
    return Counter() if counts.keys() <= {"none"} else counts


def describe_configs(plan: Plan) -> list[str]:
    """A line about how often a plan chose which config; none where operations have no configs."""
    named = ", ".join(f"{config} {count}" for config, count in sorted(config_counts(plan).items()))
    return [f"operations by config: {named}"] if named else []


@contextmanager
def progress_bar(task: str, *, quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A callback for trace_frontier that shows how far it is once a second has passed.

    A bar on a terminal, else a line a minute.

    Yields:
        The callback (time now, T_min), or None where nobody wants to see it.
    """
    first: int | None = None
    with bar(task, quiet=quiet) as show:

        def update(now_ns: int, min_ns: int) -> None:
            nonlocal first
            first = now_ns if first is None else first
            show((first - now_ns) / max(1, first - min_ns), task)

        yield None if quiet else update


@contextmanager
def counting_bar(what: str, *, quiet: bool) -> Iterator[Callable[[int, int, int], None]]:
    """Likewise for things that are counted: the callback takes (done, of how many, failed)."""
    with bar(what, quiet=quiet) as show:

        def update(done: int, count: int, failed: int) -> None:
            known = f", {failed} failed" if failed else ""
            show(done / max(1, count), f"{done} of {count} {what}{known}")

        yield update


@contextmanager
def spinner(task: str, *, quiet: bool) -> Iterator[None]:
    """A sign of life on a terminal during work whose end is known and whose progress is not."""
    if quiet or not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(task):
        yield


@contextmanager
def bar(task: str, *, quiet: bool) -> Iterator[Callable[[float, str], None]]:
    """A callback that takes the part done, from 0 to 1, and what is being done."""
    if quiet:
        yield lambda part, now: None
        return
    shown = _Bar(task) if sys.stderr.isatty() else _Lines(task)
    try:
        yield shown
    finally:
        shown.stop()


class _Lines:
    """A line on stderr once a minute, for the logs of long work."""

    def __init__(self, task: str) -> None:
        self._task, self._part = task, 0.0
        self._first: float | None = None
        self._begun = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __call__(self, part: float, task: str) -> None:
        self._part, self._task = part, task
        self._first = part if self._first is None else self._first

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(_REPORT_PERIOD_S):
            minutes = (time.monotonic() - self._begun) / 60
            told = f"{self._task}: {self._part:.1%} done after {minutes:.0f} min"
            if (more := self._part - (self._first or 0.0)) > 0:  # an earlier run did the first
                told += f", about {minutes * (1 - self._part) / more:.0f} min left"
            with suppress(OSError):
                print(told, file=sys.stderr, flush=True)


class _Bar:
    """A rich progress bar that is imported only when it is shown, after a second."""

    def __init__(self, task: str) -> None:
        self._draw: Callable[[float, str], None] | None = None
        self._stop: Callable[[], None] = lambda: None
        self._patience = threading.Timer(_PATIENCE_S, self._show, (task,))
        self._patience.daemon = True
        self._patience.start()

    def __call__(self, part: float, task: str) -> None:
        if self._draw is not None:
            self._draw(part, task)

    def stop(self) -> None:
        self._patience.cancel()
        self._patience.join()
        self._stop()

    def _show(self, task: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        row = bar.add_task(task, total=1.0)
        bar.start()
        self._draw = lambda done, task: bar.update(row, completed=done, description=task)
        self._stop = bar.stop
