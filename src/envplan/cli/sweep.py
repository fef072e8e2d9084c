"""`envplan sweep`: many plans in one go."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from envplan.cli import output as ui
from envplan.cli.describe import ITERATION_TITLE, modelled_title
from envplan.cli.given import flag, refuse_both
from envplan.cli.invocation import invocation
from envplan.cli.progress import progress
from envplan.cli.shared import MONEY, MOST_USED
from envplan.cli.tables import (
    change_column,
    number_column,
    percent_column,
    text_column,
    value_column,
)
from envplan.cli.types import OPTIONAL_FILE, InputFile, OutputFile, quantity
from envplan.quantities import COUNT, NUMBER

if TYPE_CHECKING:
    from envplan.sweep import SweepConfig, SweepResult, SweepRow

_TABLE_ROWS = 20
_BEST = 5
_FAILURES = 5
#: Assumed where nobody says: about what clouds ask for a GPU by the hour.
_DEFAULT_GPU_HOUR = 2.0
#: Keys of a sweep whose numbers are ms.
_IN_MS = ("switch_latency", "min_dwell")


@dataclass(frozen=True, kw_only=True)
class PriceOptions:
    """By what cost one of the plans is recommended."""

    price: Annotated[
        float | None,
        typer.Option(
            metavar="P",
            parser=quantity(NUMBER),
            help="Price of a kWh, for the recommended next command; default: 0.12.",
            rich_help_panel=MONEY,
        ),
    ] = None
    gpu_hour: Annotated[
        float | None,
        typer.Option(
            metavar="P",
            parser=quantity(NUMBER),
            help="What an hour of a GPU costs besides energy, for the same; default: 2.",
            rich_help_panel=MONEY,
        ),
    ] = None

    def cheapest(self, rows: Sequence[SweepRow]) -> SweepRow | None:
        """The point that saves most of the cost; None: none was planned."""
        from envplan.sweep.table import cheapest_row

        price, gpu_hour = self._prices()
        return cheapest_row(rows, price=price, gpu_hour=gpu_hour)

    def in_words(self) -> str:
        """By what cost that is."""
        price, gpu_hour = self._prices()
        words = f"least cost at {price:g} a kWh and {gpu_hour:g} a GPU and hour"
        if self.price is None or self.gpu_hour is None:
            words += " (assumed; --price and --gpu-hour say yours)"
        return words

    def _prices(self) -> tuple[float, float]:
        from envplan.solve.savings import DEFAULT_PRICE

        price = DEFAULT_PRICE if self.price is None else self.price
        return price, _DEFAULT_GPU_HOUR if self.gpu_hour is None else self.gpu_hour

    def to_dict(self) -> dict[str, float]:
        """The prices as --json prints them."""
        price, gpu_hour = self._prices()
        return {"price": price, "gpu_hour": gpu_hour}


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Where the plans are made."""

    jobs: Annotated[
        int | None,
        typer.Option(
            "-j",
            "--jobs",
            metavar="N",
            parser=quantity(COUNT),
            help="Processes; default: one for each core.",
            rich_help_panel=MOST_USED,
        ),
    ] = None
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Run on the Ray cluster there, such as auto or 10.0.0.1:6379.",
            rich_help_panel=MOST_USED,
        ),
    ] = None
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh",
            help="Compute what an earlier run has done once more.",
            rich_help_panel=MOST_USED,
        ),
    ] = False

    def __post_init__(self) -> None:
        """Refuse options that contradict each other."""
        if self.jobs is not None and self.ray is not None:
            refuse_both(["--jobs", "--ray"])


def sweep(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="The sweep's file, in TOML."), InputFile()
    ],
    run: RunOptions,
    prices: PriceOptions,
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            parser=OutputFile(".csv", ".parquet"),
            help="The table: .csv or .parquet.",
            rich_help_panel=MOST_USED,
        ),
    ] = Path("sweep.csv"),
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar=OPTIONAL_FILE,
            parser=OutputFile(".png", ".svg", ".pdf", bare="sweep.png"),
            help="Draw savings against slowdown: .png, .svg or .pdf; without a name: sweep.png.",
            rich_help_panel=MOST_USED,
        ),
    ] = None,
) -> None:
    """Make many plans: every combination of profiles, schedules, microbatches and targets.

    What is done is kept in a journal beside the output, so the same command continues a sweep that
    was cut off. A point that fails is a row with its error. Exit code 1 only if all fail.

    \b
    Example:
      envplan sweep sweep.toml --plot
      envplan sweep sweep.toml -o sweep.parquet --jobs 8
      envplan sweep sweep.toml --ray auto
    """
    from envplan.plotting.sweep import sweep_figure
    from envplan.sweep import read_config, run_sweep, table
    from envplan.sweep.running import journal_of

    table.check_table(output)
    points = read_config(config)
    invocation().will_read(*{points.folder / point.profile for point in points.points})
    journal = journal_of(output)
    try:
        with progress("points") as work:
            result = run_sweep(
                points,
                journal,
                jobs=run.jobs,
                ray=run.ray,
                fresh=run.fresh,
                progress=work.items,
            )
    except KeyboardInterrupt:
        print(f"what is done is kept in {journal}; the same command does the rest", file=sys.stderr)
        raise
    table.write_table(result.rows, output)
    best = table.best_rows(result.rows, _BEST)
    cheapest = prices.cheapest(result.rows)
    all_failed = len(result.failures) == len(result.rows)
    if plot is not None and all_failed:
        invocation().will_not_write(plot)
        plot = None
    ui.draw(plot, lambda: sweep_figure(result.rows))
    ui.answer(
        lambda: {
            **_document(result, best, output, journal, plot),
            "recommended_by": prices.to_dict(),
        },
        lambda: _print(result, best, output),
        closing="" if cheapest is None else prices.in_words(),
        next_command=() if cheapest is None else _solve_command(points, result.rows, cheapest),
    )
    if all_failed:
        raise typer.Exit(1)


def _solve_command(config: SweepConfig, rows: Sequence[SweepRow], row: SweepRow) -> list[str]:
    """The command that makes the plan of a row.

    It has an option for each thing that the row's point says, and says microbatches and schedule
    also where the point leaves them to the profile's sidecar.
    """
    point = config.points[rows.index(row)]
    options = {"microbatches": row.microbatches, "schedule": row.schedule}
    options |= point.model_dump(exclude_defaults=True, exclude={"profile", "seed"})
    if "robust" not in options:
        options.pop("noise", None)  # of the replay alone
    path = config.folder / row.profile
    words = ["envplan", "solve", str(path) if path.is_file() else row.profile]
    for name, value in options.items():
        if value is True:
            words.append(flag(name))
        elif value is not None and value is not False:
            unit = "ms" if name in _IN_MS and value else ""
            words += [flag(name), str(value).removesuffix(".0") + unit]
    return words


def _document(
    result: SweepResult, best: Sequence[SweepRow], output: Path, journal: Path, plot: Path | None
) -> dict[str, object]:
    from envplan.sweep.table import summarize_values

    return {
        "output": str(output),
        "journal": str(journal),
        "plot": None if plot is None else str(plot),
        "points": len(result.rows),
        "planned": len(result.rows) - len(result.failures),
        "failed": len(result.failures),
        "computed": result.computed,
        "resumed": result.resumed,
        "wall_s": result.wall_s,
        "best": [row.model_dump(exclude_none=True) for row in best],
        "by_what_varies": [summary.to_dict() for summary in summarize_values(result.rows)],
        "failures": [row.model_dump(exclude_none=True) for row in result.failures],
    }


def _print(result: SweepResult, best: Sequence[SweepRow], output: Path) -> None:
    planned = [row for row in result.rows if row.error is None]
    if planned:
        _print_points(planned, best)
        _print_shares(planned)
    failures = result.failures
    resumed = f", {result.resumed} of them by an earlier run" if result.resumed else ""
    ui.say(
        f"{len(result.rows)} points: {len(planned)} planned, {len(failures)} failed{resumed}; "
        f"took {result.wall_s:.1f} s",
        *map(_failure, failures[:_FAILURES]),
    )
    if len(failures) > _FAILURES:
        ui.say(f"and {len(failures) - _FAILURES} more: see column error of {output}")


def _print_points(planned: Sequence[SweepRow], best: Sequence[SweepRow]) -> None:
    """The points that were planned; of many the best ones."""
    from envplan.sweep.table import varying

    title = modelled_title(ITERATION_TITLE, *(row.source for row in planned))
    shown = planned
    if len(planned) > _TABLE_ROWS:
        shown = best
        title += f": the {len(shown)} of {len(planned)} points that save most"
    varied = varying(planned)
    columns = []
    for name in ("profile", "schedule", "planner"):
        if name in varied:
            labels = [getattr(row, name) for row in shown]
            columns.append(text_column(name, labels))
    columns.append(text_column("target", [row.request for row in shown]))
    for name in ("microbatches", "chunks", "replicas"):
        if name in varied:
            counts = [getattr(row, name) for row in shown]
            columns.append(value_column(name, counts))
    columns += [
        number_column("time (s)", [row.iteration_time_s for row in shown]),
        change_column("slower (%)", [row.slowdown_percent for row in shown]),
        number_column("energy (J)", [row.energy_j for row in shown]),
        percent_column("saved (%)", [row.savings_percent for row in shown]),
    ]
    ui.show_table(title, columns)


def _print_shares(planned: Sequence[SweepRow]) -> None:
    """Print the mean savings of points that share a value; nothing where no value varies."""
    from envplan.sweep.table import summarize_values

    summaries = summarize_values(planned)
    if not summaries:
        return
    columns = [
        text_column("what varies", [summary.name for summary in summaries]),
        text_column("value", [summary.value for summary in summaries]),
        value_column("points", [summary.points for summary in summaries]),
        change_column("slower (%)", [summary.slowdown_percent for summary in summaries]),
        percent_column("saved (%)", [summary.savings_percent for summary in summaries]),
        percent_column("most saved (%)", [summary.most_percent for summary in summaries]),
    ]
    ui.show_table("On average of the points that share a value", columns)


def _failure(row: SweepRow) -> str:
    """Which point failed, and why."""
    parts = [row.profile, row.schedule, row.planner, row.request]
    if row.microbatches:
        parts.append(f"{row.microbatches} microbatches")
    point = ", ".join(filter(None, parts))
    return f"failed: {point}: {row.error}"
