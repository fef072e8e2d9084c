"""How commands show numbers, tables and progress."""

from __future__ import annotations

import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from envplan.frontier import Frontier
    from envplan.plan import Plan
    from envplan.profile import Profile

_PATIENCE_S = 1.0
_BETWEEN = 2  # characters between columns of a table
_FOLDED = 8  # characters that a column of words may be folded to


def exact_seconds(seconds: float) -> str:
    """A time to the nanosecond without trailing zeros: it may be pasted back as a target."""
    text = f"{seconds:.9f}".rstrip("0")
    return text.removesuffix(".")


def significant(value: float, digits: int) -> str:
    """A number in fixed notation with about so many significant digits."""
    return f"{value:.{_decimals(value, digits)}f}"


def column(values: Sequence[float], digits: int) -> list[str]:
    """A column of numbers, all with as many decimals as the largest needs for `digits` digits."""
    decimals = _decimals(max(map(abs, values)), digits)
    return [f"{value:.{decimals}f}" for value in values]


def signed_percent(percent: float) -> str:
    """A change in percent; one that rounds to nothing has no sign."""
    text = f"{percent:+.2f}"
    return text[1:] if float(text) == 0 else text


def _decimals(value: float, digits: int) -> int:
    return max(0, digits - 1 - math.floor(math.log10(abs(value)))) if value else digits - 1


def print_json(document: object) -> None:
    """A JSON document on stdout."""
    typer.echo(json.dumps(document, indent=2, allow_nan=False))


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
    console = Console(highlight=False)
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


def say(line: str) -> None:
    """A line on stdout."""
    typer.echo(line)


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


def describe_profile(profile: Profile) -> str:
    """A profile's name, its GPU, whether it was measured or modelled, and what was derived."""
    known = [text for text in (profile.metadata.gpu, profile.metadata.source) if text]
    known += profile.adjustments.in_words()
    return profile.name + (f" ({', '.join(known)})" if known else "")


@contextmanager
def progress_bar(task: str, *, quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A callback for trace_frontier that draws a bar on a terminal once a second has passed.

    Yields:
        The callback (time now, T_min), or None where nobody would see the bar.
    """
    if quiet or not sys.stderr.isatty():
        yield None
        return
    bar = _Bar(task)
    try:
        yield bar.update
    finally:
        bar.stop()


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

    def __init__(self, task: str) -> None:
        self._task = task
        self._begin = time.monotonic()
        self._first: int | None = None
        self._bar: Callable[[float], None] | None = None
        self.stop: Callable[[], None] = lambda: None

    def update(self, now_ns: int, min_ns: int) -> None:
        if self._first is None:
            self._first = now_ns
        if self._bar is None:
            if time.monotonic() - self._begin < _PATIENCE_S:
                return
            self._show()
        assert self._bar is not None
        self._bar((self._first - now_ns) / max(1, self._first - min_ns))

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
        task = bar.add_task(self._task, total=1.0)
        bar.start()
        self._bar = lambda fraction: bar.update(task, completed=fraction)
        self.stop = bar.stop
