"""`envplan preflight`: whether a frequency plan would be followed on this node."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from envplan.cli import output as ui
from envplan.cli.shared import MOST_USED
from envplan.cli.tables import text_column
from envplan.cli.types import InputFile, one_of, quantity
from envplan.devices import BACKENDS, DEFAULT_BACKEND
from envplan.quantities import WHOLE

if TYPE_CHECKING:
    from envplan.runtime.preflight import Preflight


def preflight(
    file: Annotated[
        Path,
        typer.Argument(metavar="FREQPLAN", help="The frequency plan, run.freqplan.json."),
        InputFile(),
    ],
    *,
    sha256: Annotated[
        str | None,
        typer.Option(
            "--sha256",
            metavar="HEX",
            help="Of the file where the job was sent from; fails where this one is another.",
            rich_help_panel=MOST_USED,
        ),
    ] = None,
    node: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            parser=quantity(WHOLE.within(0, 2**31 - 1)),
            help="Which node of the job this is, from 0; default: $SLURM_NODEID, else the plan's "
            "ranks of all nodes are checked.",
            show_default=False,
            rich_help_panel=MOST_USED,
        ),
    ] = None,
    backend: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Through which clocks are set: nvml, or zeusd.",
            parser=one_of(*(name for name in BACKENDS if name != "modelled")),
            rich_help_panel=MOST_USED,
        ),
    ] = DEFAULT_BACKEND,
) -> None:
    """Say whether a frequency plan would be followed on this node, before training.

    No clock is changed. Exit code 1: it would not be followed.

    \b
    Example:
      envplan preflight run.freqplan.json
      srun --ntasks-per-node 1 envplan preflight run.freqplan.json
    """
    from envplan.runtime.preflight import preflight

    found = preflight(file, node=node, sha256=sha256, backend=backend)
    ui.answer(found.to_dict, lambda: _print(found), closing=_verdict(found))
    if not found.would_follow:
        raise typer.Exit(1)


def _print(found: Preflight) -> None:
    """A row for each result, with the GPUs that have it."""
    gpus: dict[tuple[str, str, str], list[int]] = {}
    for check in found.checks:
        row = (check.name, check.status.value, check.detail)
        gpus.setdefault(row, [])
        if check.gpu is not None:
            gpus[row].append(check.gpu)
    columns = [
        text_column("check", [name for name, _, _ in gpus]),
        text_column("GPUs", [", ".join(map(str, indices)) for indices in gpus.values()]),
        text_column("result", [result for _, result, _ in gpus]),
        text_column("what was found", [detail for _, _, detail in gpus]),
    ]
    ui.show_table(f"{found.node}: {_ranks(found)}", columns)


def _ranks(found: Preflight) -> str:
    first, last = found.ranks[0], found.ranks[-1]
    return f"rank {first}" if first == last else f"ranks {first} to {last}"


def _verdict(found: Preflight) -> str:
    return "the plan would be followed" if found.would_follow else "the plan would not be followed"
