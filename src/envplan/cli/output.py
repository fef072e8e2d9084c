"""How commands show numbers, tables and progress."""

from __future__ import annotations

import json
import os
import shlex
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any, Final

import typer

from envplan._io.files import atomic_write
from envplan._io.words import column as column
from envplan._io.words import exact_seconds as exact_seconds
from envplan._io.words import signed_percent as signed_percent
from envplan._io.words import significant as significant
from envplan.cli.invocation import invocation
from envplan.errors import DoubtWarning

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from envplan.cli.tables import Column
    from envplan.plan import Plan
    from envplan.solve import Frontier


def answer(
    document: Callable[[], Mapping[str, Any]],
    tell: Callable[[], None] = lambda: None,
    *,
    last: str = "",
    then: str | Sequence[str] = (),
) -> None:
    """How a command ends: with a JSON document, or with words and the files that it wrote; nothing
    where it is to be quiet.

    Args:
        document: makes the document.
        tell: prints the words.
        last: a sentence for the last line.
        then: what to type next, as one text or word by word.
    """
    call = invocation()
    following = then if isinstance(then, str) else shlex.join(then)
    if call.json:
        # Where a document has no schema of its own, it is the running command's.
        named = {"schema": f"envplan/{call.command}/v1", **document()}
        named |= {"next": following} if following else {}
        typer.echo(json.dumps(named, indent=2, allow_nan=False))
    elif not call.quiet:
        tell()
        say(*(f"wrote {path}" for path in call.outputs))
        if end := [last] * bool(last) + [f"next: {following}"] * bool(following):
            say("; ".join(end))


def show_table(title: str, columns: Sequence[Column]) -> None:
    """A table on stdout, as wide as the terminal at most; in a file or a pipe nothing is cut."""
    from envplan.cli.tables import UNLIMITED, table_lines

    width = get_terminal_size().columns if on_terminal() else UNLIMITED
    say(*table_lines(title, columns, width=width, bold=colored()))


def print_table(
    title: str, headers: Sequence[str], rows: Sequence[Sequence[Any]], **how: Any
) -> None:
    """A table on stdout, given by its rows. As print_columns."""
    print_columns(title, {name: [row[k] for row in rows] for k, name in enumerate(headers)}, **how)


def print_columns(
    title: str,
    columns: Mapping[str, Any],
    *,
    words: int = 1,
    wrap: Sequence[str] = (),
    drop: Sequence[str] = (),
) -> None:
    """A table on stdout, given by its columns of texts or numbers. As show_table.

    Args:
        words: this many columns, the first ones, are text and stand left; all others are numbers.
        wrap: headers of the columns whose cells may take several lines.
        drop: headers of the columns to leave out first, in this order; then the last ones go.
    """
    from envplan.cli.tables import Column

    show_table(
        title,
        [
            Column(
                header=header,
                cells=_texts(header, list(values)),
                is_text=place < words,
                may_fold=header in wrap,
                keep=drop.index(header) - len(drop) if header in drop else 0,
            )
            for place, (header, values) in enumerate(columns.items())
        ],
    )


#: Percentages that are not shown with two decimals and no sign.
_PERCENTS: Final = {
    "slower (%)": signed_percent, "change (%)": signed_percent, "gap (%)": "{:.3f}".format
}  # fmt: skip


def _texts(header: str, values: list[Any]) -> list[str]:
    """The cells of a column: of fractions as many digits as its header asks for; None is "-"."""
    known = [value for value in values if isinstance(value, float)]
    percent = _PERCENTS.get(header, "{:.2f}".format)
    shown = iter(map(percent, known) if header.endswith("(%)") else column(known))
    return [
        next(shown) if isinstance(value, float) else "-" if value is None else str(value)
        for value in values
    ]


ITERATION = "One iteration, all GPUs"


def titled(title: str, *sources: str | None) -> str:
    """The title of a table, which says if a profile that figures come from is modelled."""
    return title + (", modelled" if "modelled" in sources else "")


def span(ascending: Sequence[object], to: str = "-") -> str:
    """The first and the last of some things, as in 210-1740; "" where there is none."""
    return to.join(dict.fromkeys(map(str, [*ascending[:1], *ascending[-1:]])))


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
    from envplan.plotting.figures import save_figure

    if path is not None and page is not None and path.suffix.lower() == ".html":
        atomic_write(path, page())
    elif path is not None:
        save_figure(figure(), path)


def colored() -> bool:
    """Whether to print in colours: as --color says, else on terminals unless NO_COLOR is set."""
    color = invocation().color
    if color is not None:
        return color
    return on_terminal() and not os.environ.get("NO_COLOR")


def on_terminal() -> bool:
    """Whether somebody looks at stdout."""
    return sys.stdout.isatty()


def say(*lines: str) -> None:
    """Lines on stdout."""
    for line in lines:
        typer.echo(line, color=invocation().color)


def warn(line: str) -> None:
    """A line on stderr about something that is probably not meant."""
    warnings.warn(line, DoubtWarning, stacklevel=2)


def describe_job(frontier: Frontier) -> str:
    """Two or three lines that say what numbers below them are about; the last one names operations
    that the profile times and the pipeline leaves out."""
    from envplan.pipeline.schedules import EXTRAS
    from envplan.plotting.figures import job_line

    profile, pipeline = frontier.profile, frontier.pipeline
    powers = [significant(power, 3) for power in sorted(frontier.blocking_power_w)]
    source = {
        "profile": "from the profile",
        "argument": "as given",
        "default": "default, the profile does not say; --blocking-power sets it",
    }[frontier.blocking_power_source]
    used = {op.instruction for op in pipeline.operations}
    unused = ", ".join(name for name in EXTRAS if name in profile.instructions and name not in used)
    adds = "the DAG file has none" if pipeline.schedule == "dag" else "--extra adds them"
    return (
        f"{profile.describe()}; {job_line(pipeline, frontier.num_gpus)}\n"
        f"waiting GPUs draw {span(powers, ' to ')} W ({source})"
        + (f"\nthe profile's rows for {unused} are not used; {adds}" if unused else "")
    )


def describe_ends(frontier: Frontier) -> str:
    """Where a frontier begins and ends, with a word for each."""
    return (
        f"T_min {significant(frontier.min_time)} s (least time), "
        f"T_star {significant(frontier.min_energy_time)} s (least energy)"
    )


def config_counts(plan: Plan) -> dict[str, int]:
    """How often a plan chose which config; empty where operations have no configs."""
    from envplan.profile import parse_clock_requests

    configs = [op.config for stage in plan.stages for op in stage]
    counts = Counter("by part" if parse_clock_requests(one) else one or "none" for one in configs)
    return dict(sorted(counts.items())) if any(configs) else {}


def describe_configs(plan: Plan) -> list[str]:
    """A line about how often a plan chose which config; none where operations have no configs."""
    named = ", ".join(f"{config} {count}" for config, count in config_counts(plan).items())
    return [f"operations by config: {named}"] if named else []
