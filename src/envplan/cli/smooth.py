"""`envplan smooth`: take the noise out of a measured profile."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from envplan.cli.frontier import check_type, name_bare_plot
from envplan.cli.inputs import DEFAULT_PROFILE, JsonOption, QuietOption, check_outputs

_DEFAULT_OUTPUT = "smooth.csv"
_DEFAULT_PLOT = "smooth.png"
_PLOT_TYPES = (".png", ".svg", ".pdf")


class SmoothCommand(TyperCommand):
    """The command, with a `--plot` that may stand alone."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, name_bare_plot(args, _DEFAULT_PLOT))


def smooth(
    profile: Annotated[
        str,
        typer.Argument(
            metavar="[PROFILE]",
            help=f"Profile CSV or name of a built-in; default {DEFAULT_PROFILE}.",
        ),
    ] = DEFAULT_PROFILE,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="[FILE]",
            help="Draw the smooth energy against clock, as .png, .svg or .pdf; without a name: "
            f"{_DEFAULT_PLOT}.",
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Where the smooth profile goes.")
    ] = Path(_DEFAULT_OUTPUT),
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Take the noise out of a measured profile.

    Of every operation the nearest curves are kept over which time falls with the clock and energy
    has one valley. The measured values stay in the columns raw_time and raw_energy.

    \b
    Example:
      envplan smooth profile.csv -o smooth.csv
      envplan frontier smooth.csv --microbatches 32
    """
    from envplan.cli.output import describe_profile, print_json, say
    from envplan.cli.profile import describe_smoothing
    from envplan.profile import Profile
    from envplan.profiling.smoothing import smooth_profile

    check_type(plot, "--plot", _PLOT_TYPES, "choose one of them")
    check_type(output, "--output", (".csv",), "a profile is a CSV file")
    check_outputs(output, plot)
    source = Profile.open(profile)
    assert source.path is not None  # it was read from a file
    smoothed, _ = smooth_profile(source.path)
    smoothed.save_csv(output)
    if plot is not None:
        from envplan.plotting.profile import plot_profile

        plot_profile(smoothed, plot)
    said = smoothed.metadata.extra["smoothed"]
    if json:
        print_json({"profile": str(output), **said})
    elif not quiet:
        say(f"{describe_profile(source)}: {describe_smoothing(said)}")
        for path in (output, *([plot] if plot else [])):
            say(f"wrote {path}")
