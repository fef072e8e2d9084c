"""`envplan smooth`: take the noise out of a measured profile."""

from __future__ import annotations

from pathlib import Path

import envplan
from envplan.cli import output as ui
from envplan.cli.command import PICTURES, argument, file_of, takes
from envplan.cli.options import DEFAULT_PROFILE, complete_profiles


@takes(
    """
    Most used:
      -o, --output FILE  Where the smooth profile goes.
      --plot [FILE]  Draw the smooth energy against clock: .png, .svg or .pdf; without a name:
          smooth.png.
    """,
    plot=file_of(PICTURES, "choose one of them", "smooth.png"),
    output=file_of((".csv",), "a profile is a CSV file"),
)
def smooth(
    profile: str = argument(
        "PROFILE",
        "Profile CSV, or the name of a built-in profile.",
        DEFAULT_PROFILE,
        in_place=True,
        autocompletion=complete_profiles,
    ),
    plot: Path | None = None,
    output: Path = Path("smooth.csv"),
) -> None:
    """Take the noise out of a measured profile.

    Of every operation the nearest curves are kept over which time falls with the clock and energy
    has one valley. The measured values stay in the columns raw_time and raw_energy.

    \b
    Example:
      envplan smooth profile.csv -o smooth.csv
      envplan frontier smooth.csv --microbatches 32
    """
    from envplan.plotting.profile import profile_figure
    from envplan.profiling.remarks import describe_smoothing
    from envplan.profiling.smoothing import smooth_profile

    source = envplan.Profile.open(profile)
    assert source.path is not None  # it was read from a file
    with ui.Working("operations") as work:
        smoothed = smooth_profile(source.path, work.counted)
    smoothed.save_csv(output)
    ui.draw(plot, lambda: profile_figure(smoothed))
    said = smoothed.metadata.extra["smoothed"]
    ui.respond(
        lambda: {"profile": str(output), **said},
        lambda: ui.say(f"{ui.describe_profile(source)}: {describe_smoothing(said)}"),
        then=["envplan", "frontier", str(output)],
    )
