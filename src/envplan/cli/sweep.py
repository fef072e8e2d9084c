"""`envplan sweep`: many plans in one go."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from envplan.cli.command import MOST, option, plot_option
from envplan.cli.inputs import check_outputs
from envplan.cli.options import OutputOptions
from envplan.errors import InputError
from envplan.quantities import COUNT

if TYPE_CHECKING:
    from envplan.sweep import Row, SweepResult

_PLOT_TYPES = (".png", ".svg", ".pdf")
_TABLE_ROWS = 40
_FAILURES = 5


def sweep(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The sweep's file, in TOML.")],
    show: OutputOptions,
    output: Annotated[
        Path, option("-o, --output FILE", MOST, "The table: .csv or .parquet.")
    ] = Path("sweep.csv"),
    plot: Annotated[
        Path | None,
        plot_option(
            "sweep.png",
            _PLOT_TYPES,
            "savings against slowdown",
            "the sweep's file goes before --plot",
        ),
    ] = None,
    jobs: Annotated[
        int | None, option("-j, --jobs N", MOST, "Processes; default: one for each core.", COUNT)
    ] = None,
    ray: Annotated[
        str | None,
        option(
            "--ray ADDRESS", MOST, "Run on the Ray cluster there, such as auto or 10.0.0.1:6379."
        ),
    ] = None,
    fresh: Annotated[
        bool, option("--fresh", MOST, "Compute what an earlier run has done once more.")
    ] = False,
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
    if jobs is not None and ray is not None:
        raise InputError("--jobs and --ray exclude each other; give one of them")
    from envplan.cli.output import counting_bar
    from envplan.sweep import read_config, run_sweep, write_table
    from envplan.sweep.running import journal_of
    from envplan.sweep.table import check_table

    check_table(output)
    check_outputs(output, plot, inputs=[("the sweep's file", config)])
    read = read_config(config)
    journal = journal_of(output)
    try:
        with counting_bar("points", quiet=show.quiet) as progress:
            result = run_sweep(read, journal, jobs=jobs, ray=ray, fresh=fresh, progress=progress)
    except KeyboardInterrupt:
        print(f"what is done is kept in {journal}; the same command does the rest", file=sys.stderr)
        raise
    write_table(result.rows, output)
    failed = len(result.failures)
    all_failed = failed == len(result.rows)
    if plot is not None and not all_failed:
        from envplan.plotting.figures import save_figure
        from envplan.plotting.sweep import sweep_figure

        save_figure(sweep_figure(result.rows), plot)
    if show.json:
        _print_json(result, output, journal, None if all_failed else plot)
    elif not show.quiet:
        _print(result, output, None if all_failed else plot)
    if all_failed:
        raise typer.Exit(1)


def _print(result: SweepResult, output: Path, plot: Path | None) -> None:
    from envplan.cli.output import say

    planned = [row for row in result.rows if row.error is None]
    if 0 < len(planned) <= _TABLE_ROWS:
        _print_rows(planned)
    failures = result.failures
    resumed = f", {result.resumed} of them by an earlier run" if result.resumed else ""
    say(
        f"{len(result.rows)} points: {len(planned)} planned, {len(failures)} failed{resumed}; "
        f"took {result.wall_s:.1f} s"
    )
    for row in failures[:_FAILURES]:
        say(f"failed: {_name(row)}: {row.error}")
    if len(failures) > _FAILURES:
        say(f"and {len(failures) - _FAILURES} more: see column error of {output}")
    say(f"wrote {output}")
    if plot is not None:
        say(f"wrote {plot}")


def _print_rows(rows: list[Row]) -> None:
    from envplan.cli.output import ITERATION, column, print_columns, signed_percent, titled

    told = {
        "profile": [row.profile for row in rows],
        "schedule": [row.schedule or "" for row in rows],
        "planner": [row.planner for row in rows],
        "target": [_target(row) for row in rows],
        "microbatches": [str(row.microbatches) for row in rows],
    }
    columns = {
        **{name: told[name] for name in told if name == "target" or len(set(told[name])) > 1},
        "time (s)": column([row.iteration_time_s or 0.0 for row in rows], 6),
        "slower (%)": [signed_percent(row.slowdown_percent or 0.0) for row in rows],
        "energy (J)": column([row.energy_j or 0.0 for row in rows], 5),
        "saved (%)": [f"{row.savings_percent or 0.0:.2f}" for row in rows],
    }
    words = sum(name in columns for name in ("profile", "schedule", "planner", "target"))
    print_columns(titled(ITERATION, *(row.source for row in rows)), columns, words=words)


def _target(row: Row) -> str:
    seed = f", seed {row.seed}" if row.noise_percent is not None else ""
    words = {
        "time": f"{row.target_value:g} s" if row.target_value is not None else "",
        "slowdown": f"+{row.target_value or 0.0:g}%",
        "min-energy": "T_star",
        "energy-budget": f"{row.target_value or 0.0:g} J",
        "power-cap": f"{row.target_value or 0.0:g} W",
        "peak-power-cap": f"{row.target_value or 0.0:g} W at the peak",
        "own": "its own",
    }
    return ", ".join([words[row.target], *row.conditions]) + seed


def _name(row: Row) -> str:
    parts = [row.profile, row.schedule, row.planner, _target(row)]
    if row.microbatches is not None:
        parts.append(f"{row.microbatches} microbatches")
    return ", ".join(part for part in parts if part)


def _print_json(result: SweepResult, output: Path, journal: Path, plot: Path | None) -> None:
    from envplan.cli.output import print_json

    print_json(
        {
            "output": str(output),
            "journal": str(journal),
            "plot": None if plot is None else str(plot),
            "points": len(result.rows),
            "planned": len(result.rows) - len(result.failures),
            "failed": len(result.failures),
            "computed": result.computed,
            "resumed": result.resumed,
            "wall_s": result.wall_s,
            "failures": [row.model_dump(exclude_none=True) for row in result.failures],
        }
    )
