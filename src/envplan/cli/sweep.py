"""`envplan sweep`: many plans in one go."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from envplan.cli import output as ui
from envplan.cli import state
from envplan.cli.command import argument, refuse_both, takes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from envplan.sweep import Row, SweepResult

_TABLE_ROWS = 20
_BEST = 5
_FAILURES = 5


@takes(
    """
    Most used:
      -o, --output FILE  The table: .csv or .parquet.
      -j, --jobs N  Processes; default: one for each core.
      --plot [FILE]  Draw savings against slowdown: .png, .svg or .pdf; without a name: sweep.png.
      --ray ADDRESS  Run on the Ray cluster there, such as auto or 10.0.0.1:6379.
      --fresh  Compute what an earlier run has done once more.
    """,
)
def sweep(
    config: Path = argument("CONFIG", "The sweep's file, in TOML."),
    output: Path = Path("sweep.csv"),
    plot: Path | None = None,
    jobs: int | None = None,
    ray: str | None = None,
    fresh: bool = False,
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
        refuse_both(["--jobs", "--ray"])
    from envplan.plotting.sweep import sweep_figure
    from envplan.sweep import read_config, run_sweep, table
    from envplan.sweep.running import journal_of

    table.check_table(output)
    read, journal = read_config(config), journal_of(output)
    try:
        with ui.Working("points") as work:
            result = run_sweep(
                read, journal, jobs=jobs, ray=ray, fresh=fresh, progress=work.counted
            )
    except KeyboardInterrupt:
        print(f"what is done is kept in {journal}; the same command does the rest", file=sys.stderr)
        raise
    table.write_table(result.rows, output)
    all_failed = len(result.failures) == len(result.rows)
    if plot is not None and all_failed:
        state.outputs.remove(plot)
        plot = None
    ui.draw(plot, lambda: sweep_figure(result.rows))
    ui.answer(
        lambda: _document(result, output, journal, plot),
        lambda: _print(result, output),
        then=_then(config, table.best_rows(result.rows, 1)),
    )
    if all_failed:
        raise typer.Exit(1)


def _then(config: Path, best: Sequence[Row]) -> list[str]:
    """The command that makes the plan that saves most; none where there is no plan."""
    if not best:
        return []
    row, target = best[0], list[str]()
    if row.target == "slowdown":
        target = ["--slowdown", f"{row.target_value:g}"] if row.target_value else []
    elif row.target != "own":
        name = "target-time" if row.target == "time" else row.target
        target = [f"--{name}", *([] if name == "min-energy" else [f"{row.target_value}"])]
    there = config.parent / row.profile
    profile = str(there) if there.is_file() else row.profile
    words = ["envplan", "solve", profile, "--microbatches", f"{row.microbatches}"]
    words += ["--schedule", row.schedule or "1f1b"]
    return [*words, *(["--planner", row.planner] if row.planner != "frontier" else []), *target]


def _print(result: SweepResult, output: Path) -> None:
    from envplan.sweep.table import best_rows, by_what_varies, varying

    planned, failures = [row for row in result.rows if row.error is None], result.failures
    if planned:
        title, shown = ui.titled(ui.ITERATION, *(row.source for row in planned)), planned
        if len(planned) > _TABLE_ROWS:
            shown = best_rows(planned, _BEST)
            title += f": the {len(shown)} of {len(planned)} points that save most"
        varied = varying(planned)
        words = [name for name in ("profile", "schedule", "planner") if name in varied]
        counts = [name for name in ("microbatches", "chunks", "replicas") if name in varied]
        said = {name: [getattr(row, name) for row in shown] for name in (*words, *counts)}
        columns: dict[str, Any] = {
            **{name: said[name] for name in words},
            "target": [row.asked for row in shown],
            **{name: said[name] for name in counts},
            "time (s)": [row.iteration_time_s for row in shown],
            "slower (%)": [row.slowdown_percent for row in shown],
            "energy (J)": [row.energy_j for row in shown],
            "saved (%)": [row.savings_percent for row in shown],
        }
        ui.print_columns(title, columns, words=len(words) + 1)
    if shares := by_what_varies(planned):
        headers = ("what varies", "value", "points", "slower (%)", "saved (%)", "most saved (%)")
        cells = [list(share.values()) for share in shares]
        ui.print_table("On average of the points that share a value", headers, cells, words=2)
    resumed = f", {result.resumed} of them by an earlier run" if result.resumed else ""
    ui.say(
        f"{len(result.rows)} points: {len(planned)} planned, {len(failures)} failed{resumed}; "
        f"took {result.wall_s:.1f} s",
    )
    for row in failures[:_FAILURES]:
        count = row.microbatches and f"{row.microbatches} microbatches"
        parts = (row.profile, row.schedule, row.planner, row.asked, count)
        ui.say(f"failed: {', '.join(part for part in parts if part)}: {row.error}")
    if len(failures) > _FAILURES:
        ui.say(f"and {len(failures) - _FAILURES} more: see column error of {output}")


def _document(
    result: SweepResult, output: Path, journal: Path, plot: Path | None
) -> dict[str, Any]:
    from envplan.sweep.table import best_rows, by_what_varies

    def shown(rows: Sequence[Row]) -> list[dict[str, Any]]:
        return [row.model_dump(exclude_none=True) for row in rows]

    return {
        "output": str(output),
        "journal": str(journal),
        "plot": plot and str(plot),
        "points": len(result.rows),
        "planned": len(result.rows) - len(result.failures),
        "failed": len(result.failures),
        **ui.picked(result, "computed resumed wall_s"),
        "best": shown(best_rows(result.rows, _BEST)),
        "by_what_varies": by_what_varies(result.rows),
        "failures": shown(result.failures),
    }
