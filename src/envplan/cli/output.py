"""How commands show numbers, tables and progress."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from envplan._words import column as column
from envplan._words import describe_profile as describe_profile
from envplan._words import exact_seconds as exact_seconds
from envplan._words import grouped as grouped
from envplan._words import signed_percent as signed_percent
from envplan._words import significant as significant
from envplan.cli import state
from envplan.errors import DoubtWarning

if TYPE_CHECKING:
    from envplan.cli.options import OutputOptions
    from envplan.plan import Plan
    from envplan.solve import Frontier

_PATIENCE_S = 1.0
_BETWEEN = 2  # characters between columns of a table
_FOLDED = 8  # characters that a column of words may be folded to


def print_json(document: Mapping[str, Any]) -> None:
    """A JSON document on stdout. Where it has no schema of its own, it is the running command's."""
    named = {"schema": f"envplan/{state.command}/v1", **document}
    typer.echo(json.dumps(named, indent=2, allow_nan=False))


def answer(
    show: OutputOptions,
    document: Callable[[], Mapping[str, Any]],
    tell: Callable[[], None],
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
        print_json({**document(), **({"next": following} if following else {})})
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
) -> None:
    """A table on stdout. On a narrow terminal headers and words wrap; no number is ever cut.

    Args:
        words: this many columns, the first ones, are text and stand left; all others are numbers.
        wrap: headers of the columns whose cells may take several lines.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=Text(title) if title else None,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    console = Console(highlight=False, color_system="auto" if colored() else None)
    if state.color:
        console = Console(highlight=False, color_system="standard", force_terminal=True)
    # A table cut to the width of a terminal is useless in a file.
    room = console.width if sys.stdout.isatty() else 1000
    cells = [[row[k] for row in rows] for k in range(len(headers))]
    natural = [
        max(map(len, [header, *column])) for header, column in zip(headers, cells, strict=True)
    ]
    narrow = sum(natural) + _BETWEEN * len(headers) > room
    needed = 0
    for k, header in enumerate(headers):
        wraps = header in wrap or (narrow and words == 1)
        # The longest number, or word where words may wrap.
        parts = [*header.split(), *(" ".join(cells[k]).split() if k < words else cells[k])]
        least = max(map(len, parts), default=1)
        if header in wrap:
            least = min(least, _FOLDED)
        needed += least + _BETWEEN
        table.add_column(
            Text(header),
            justify="left" if k < words else "right",
            no_wrap=not wraps,
            width=least if narrow and k >= words and header not in wrap else None,
        )
    for row in rows:
        table.add_row(*map(Text, row))
    console.width = max(room, needed)
    with console.capture() as drawn:
        console.print(table)
    say("\n".join(line.rstrip() for line in drawn.get().splitlines()))


def print_columns(
    title: str, columns: Mapping[str, Sequence[str]], *, words: int = 1, wrap: Sequence[str] = ()
) -> None:
    """A table on stdout, given by its columns. As print_table."""
    rows = list(zip(*columns.values(), strict=True))
    print_table(title, list(columns), rows, words=words, wrap=wrap)


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


def colored() -> bool:
    """Whether to print in colours: as --color says, else on terminals unless NO_COLOR is set."""
    if state.color is not None:
        return state.color
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def say(line: str) -> None:
    """A line on stdout."""
    typer.echo(line, color=state.color)


def warn(line: str) -> None:
    """A line on stderr about something that is probably not meant."""
    warnings.warn(line, DoubtWarning, stacklevel=2)


def describe_job(frontier: Frontier) -> str:
    """One or two lines that say what numbers below them are about."""
    from envplan.plotting.frontier import label_job

    powers = sorted({significant(power, 3) for power in frontier.blocking_power_w}, key=float)
    source = {
        "profile": "from the profile",
        "argument": "as given",
        "default": "default, the profile does not say; --blocking-power sets it",
    }[frontier.blocking_power_source]
    return (
        f"{describe_profile(frontier.profile)}; {label_job(frontier)}\n"
        f"waiting GPUs draw {' to '.join(dict.fromkeys([powers[0], powers[-1]]))} W ({source})"
        f"{_unused_rows(frontier)}"
    )


def _unused_rows(frontier: Frontier) -> str:
    """A line about operations that the profile times and the pipeline leaves out."""
    from envplan.pipeline.extras import EXTRAS

    used = {op.instruction for op in frontier.pipeline.operations}
    unused = [name for name in EXTRAS if name in frontier.profile.instructions and name not in used]
    if not unused:
        return ""
    adds = "the DAG file has none" if frontier.pipeline.schedule == "dag" else "--extra adds them"
    return f"\nthe profile's rows for {', '.join(unused)} are not used; {adds}"


def config_counts(plan: Plan) -> Counter[str]:
    """How often a plan chose which config; empty where operations have no configs."""
    counts = Counter(op.config or "none" for stage in plan.stages for op in stage)
    return Counter() if counts.keys() <= {"none"} else counts


def describe_configs(plan: Plan) -> list[str]:
    """A line about how often a plan chose which config; none where operations have no configs."""
    counts = config_counts(plan)
    named = ", ".join(f"{config} {count}" for config, count in sorted(counts.items()))
    return [f"operations by config: {named}"] if counts else []


@contextmanager
def progress_bar(task: str, *, quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A callback for trace_frontier that draws a bar on a terminal once a second has passed.

    Yields:
        The callback (time now, T_min), or None where nobody would see the bar.
    """
    first: int | None = None
    with _bar(quiet=quiet) as draw:

        def update(now_ns: int, min_ns: int) -> None:
            nonlocal first
            first = now_ns if first is None else first
            draw((first - now_ns) / max(1, first - min_ns), task)

        yield update if draw.visible else None


@contextmanager
def counting_bar(what: str, *, quiet: bool) -> Iterator[Callable[[int, int, int], None]]:
    """Likewise for things that are counted: the callback takes (done, of how many, failed)."""
    with _bar(quiet=quiet) as draw:

        def update(done: int, count: int, failed: int) -> None:
            known = f", {failed} failed" if failed else ""
            draw(done / max(1, count), f"{done} of {count} {what}{known}")

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


class _Bar:
    """A rich progress bar that is imported and drawn only when it is late enough."""

    def __init__(self, *, visible: bool) -> None:
        self.visible = visible
        self._begin = time.monotonic()
        self._draw: Callable[[float, str], None] | None = None
        self.stop: Callable[[], None] = lambda: None

    def __call__(self, fraction: float, task: str) -> None:
        if self._draw is None and self.visible and time.monotonic() - self._begin > _PATIENCE_S:
            self._show()
        if self._draw is not None:
            self._draw(fraction, task)

    def _show(self) -> None:
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
        row = bar.add_task("", total=1.0)
        bar.start()
        self._draw = lambda done, task: bar.update(row, completed=done, description=task)
        self.stop = bar.stop


@contextmanager
def _bar(*, quiet: bool) -> Iterator[_Bar]:
    bar = _Bar(visible=not quiet and sys.stderr.isatty())
    try:
        yield bar
    finally:
        bar.stop()
