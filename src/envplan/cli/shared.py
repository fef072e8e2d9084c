"""Options that several commands have, each named once, and the panels of `--help`."""

from __future__ import annotations

from typing import Annotated, Final

import typer

#: Panels of `--help`.
MOST_USED: Final = "Most used"
JOB: Final = "Job"
TARGET: Final = "Target"
NOISE: Final = "Noise"
MONEY: Final = "Money"
CLUSTER: Final = "Cluster"
OUTPUT: Final = "Output"

MovedProfile = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="PROFILE",
        help="The profile that the file was made from, if it has moved.",
        rich_help_panel=OUTPUT,
    ),
]
