"""`envplan serving reshard`: a new fleet where an old one's weights are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from envplan.cli import output as ui
from envplan.cli.invocation import invocation
from envplan.cli.shared import OUTPUT
from envplan.cli.tables import table_columns
from envplan.cli.types import InPlace, InputFile, OutputFile

if TYPE_CHECKING:
    from envplan.serving.move_fleet import MovedFleet


def reshard(
    before: Annotated[
        Path,
        typer.Argument(metavar="BEFORE", help="What `envplan serving apply` wrote before."),
        InputFile(),
    ],
    after: Annotated[
        Path,
        typer.Argument(metavar="AFTER", help="What it wrote for the new fleet."),
        InPlace(),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            rich_help_panel=OUTPUT,
            metavar="FILE",
            help="Where the new fleet goes; default: AFTER.",
            show_default=False,
            parser=OutputFile(),
        ),
    ] = None,
) -> None:
    """Put a new fleet where an old one's weights are.

    Says which GPU sends which part of the weights to which. Nodes and GPUs of AFTER are chosen
    anew, such that the fewest weights are moved.

    \b
    Example:
      envplan serving reshard old.clocks.json new.clocks.json
    """
    from envplan.serving.apply import ServingApplied
    from envplan.serving.move_fleet import move_fleet

    target = output or after
    if output is None:
        invocation().will_write(target)
    fleet = move_fleet(ServingApplied.load(before), ServingApplied.load(after))
    fleet.applied.save(target)
    transfers = []
    for change in fleet.changes:
        transfers += [{"node": change.node, **sent._asdict()} for sent in change.transfers]
    ui.answer(
        lambda: {
            "clocks": str(target),
            "moved_copies": fleet.copies_moved,
            "transfers": transfers,
        },
        lambda: _print(fleet),
        next_command=["envplan", "serving", "hold", str(target), "--node", "0"],
    )


def _print(fleet: MovedFleet) -> None:
    """A row for each node, then a line for each part that is sent."""
    rows = []
    for change in fleet.changes:
        num_sent = in_turn = "-"
        if change.plan is not None:
            num_sent = str(len(change.plan.transfers))
            in_turn = str(change.plan.max_parts_of_gpu)
        sizes = [_sizes(change.old_tps), _sizes(change.new_tps)]
        rows.append([str(change.node), *sizes, num_sent, in_turn])
    headers = ("node", "before", "after", "sent", "one after another")
    title = "Eighths of the weights that GPUs send each other"
    ui.show_table(title, table_columns(headers, rows, num_texts=3))
    for change in fleet.changes:
        for transfer in change.transfers:
            ui.say(
                f"node {change.node}: GPU {transfer.source} sends eighth {transfer.part} "
                f"to GPU {transfer.target}"
            )
    ui.say(f"{fleet.copies_moved:g} copies of the weights in all")


def _sizes(tps: Sequence[int]) -> str:
    return " + ".join(f"TP{tp}" for tp in tps) or "-"
