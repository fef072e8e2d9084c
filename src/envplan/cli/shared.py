"""Options that several commands have, each named once, and the panels of `--help`."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from envplan.cli.types import quantity
from envplan.quantities import COUNT

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

Force = Annotated[
    bool,
    typer.Option(
        "--force", help="Go on though the profile has changed since.", rich_help_panel=OUTPUT
    ),
]

Chunks = Annotated[
    int | None,
    typer.Option(
        "--vp",
        "--chunks",
        metavar="N",
        help="Model chunks per pipeline stage, for interleaved, looped-bfs and interleaved-zb; the "
        "profile has a stage for each. Default: 1; zb-v and dualpipe-v always have 2.",
        show_default=False,
        rich_help_panel=JOB,
        parser=quantity(COUNT),
    ),
]
MicrobatchGroup = Annotated[
    int | None,
    typer.Option(
        "--microbatch-group",
        metavar="N",
        help="Schedule interleaved: microbatches that go through a chunk before the next, "
        "Megatron's microbatch_group_size_per_vp_stage. Default: the number of stages.",
        show_default=False,
        rich_help_panel=JOB,
        parser=quantity(COUNT),
    ),
]
