"""Options that several commands have, each named once, and the panels of `--help`."""

from __future__ import annotations

from typing import Annotated, Final, Literal, NamedTuple

import typer

from envplan.cli.types import InputFile, one_of, quantity
from envplan.errors import InputError
from envplan.quantities import COUNT, NUMBER, PERCENT, POWER, TIME

#: Panels of `--help`.
ARGUMENTS: Final = "Arguments"
MOST_USED: Final = "Most used"
JOB: Final = "Job"
TARGET: Final = "Target"
NOISE: Final = "Noise"
MONEY: Final = "Money"
CLUSTER: Final = "Cluster"
OUTPUT: Final = "Output"
SLOW_CLOCKS: Final = "Slow clocks"

#: Latencies of clocks. Without a unit they are in ms, as they were when no unit could be given.
_CLOCK_TIME: Final = TIME.plainly("ms").within(0, 3600).with_unit()

PueOption = Annotated[
    float,
    typer.Option(
        metavar="X",
        parser=quantity(NUMBER.within(1, 100)),
        help="Power usage effectiveness of the site, from 1 up; default: 1.",
        show_default=False,
        rich_help_panel=MONEY,
    ),
]

HostPowerOption = Annotated[
    float,
    typer.Option(
        metavar="W",
        parser=quantity(POWER),
        help="What the host draws for each of its GPUs; default: 0.",
        show_default=False,
        rich_help_panel=MONEY,
    ),
]

JsonOption = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print JSON instead of a table; errors, too.",
        rich_help_panel=OUTPUT,
    ),
]

QuietOption = Annotated[
    bool,
    typer.Option(
        "-q",
        "--quiet",
        help="Print nothing but errors; files are still written.",
        rich_help_panel=OUTPUT,
    ),
]

MovedProfile = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="PROFILE",
        help="The profile that the file was made from, if it has moved.",
        rich_help_panel=OUTPUT,
    ),
    InputFile(),
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

NoiseOption = Annotated[
    float | None,
    typer.Option(
        "--noise",
        metavar="PCT",
        parser=quantity(PERCENT.within(0, 100)),
        help=(
            "Standard deviation of times; with --robust, default: the profile's column time_std."
        ),
        rich_help_panel=NOISE,
    ),
]

SwitchLatency = Annotated[
    float | None,
    typer.Option(
        "--switch-latency",
        metavar="TIME",
        parser=quantity(_CLOCK_TIME),
        help="A clock comes so long after it is asked for, as in 20ms or 20 (milliseconds); "
        "default: as measured by the profile's sidecar, or as the plan says; else at once.",
        rich_help_panel=SLOW_CLOCKS,
    ),
]

#: The values are those of envplan.replay.Ask, which help must not load.
AskOption = Annotated[
    Literal["ahead", "start"] | None,
    typer.Option(
        "--ask",
        metavar="WHEN",
        parser=one_of("ahead", "start"),
        help="Where clocks come late: they are asked for ahead, so that they are there in time, "
        "or as operations start; default: ahead.",
        rich_help_panel=SLOW_CLOCKS,
    ),
]

MinDwell = Annotated[
    float | None,
    typer.Option(
        "--min-dwell",
        metavar="TIME",
        parser=quantity(_CLOCK_TIME),
        help="No stage asks for another clock within TIME, as in 100ms or 100 (milliseconds).",
        rich_help_panel=SLOW_CLOCKS,
    ),
]

Reconfigure = Annotated[
    str | None,
    typer.Option(
        "--reconfigure",
        metavar="HOW",
        help="With planner envpipe: balanced (the default) or greedy.",
        rich_help_panel=TARGET,
    ),
]


class ReplicaGroup(NamedTuple):
    """Replicas on one kind of hardware: their profile, and how many there are."""

    profile: str
    replicas: int


def parse_replica_group(text: str, option: str) -> ReplicaGroup:
    """From `PROFILE` or `PROFILE:COUNT`.

    Raises:
        InputError: the count is not a number from 1 up.
    """
    profile, colon, count = text.rpartition(":")
    if not colon:
        return ReplicaGroup(text, 1)
    if not (count.isascii() and count.isdigit() and len(count) <= 7 and int(count)):
        raise InputError(
            f"{option} must be PROFILE or PROFILE:COUNT with a COUNT from 1 up, not {text}"
        )
    return ReplicaGroup(profile, int(count))
