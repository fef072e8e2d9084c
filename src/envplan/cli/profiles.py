"""`envplan profiles` and `smooth`: what ships with envplan, and profiles without their noise."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import envplan
from envplan.cli import output as ui
from envplan.cli.job_options import DEFAULT_PROFILE, complete_profiles
from envplan.cli.progress import progress
from envplan.cli.shared import MOST_USED
from envplan.cli.tables import Column
from envplan.cli.types import OPTIONAL_FILE, InPlace, OutputFile

if TYPE_CHECKING:
    from envplan.profile.summary import ProfileSummary


def profiles() -> None:
    """List the built-in profiles, those from measurements first.

    Their names stand in for a profile's path in every command.

    \b
    Example:
      envplan profiles
      envplan frontier sosp24-a100-gpt3-xl-4stage
    """
    from envplan.profile.summary import ProfileSummary

    summaries = [ProfileSummary.of(profile) for profile in envplan.builtin_profiles()]
    summaries.sort(key=lambda summary: (summary.source != "measured", summary.name))
    ui.answer(
        lambda: {"profiles": [summary.to_dict() for summary in summaries]},
        lambda: _print(summaries),
        next_command=["envplan", "savings", summaries[0].name],
    )


def _print(summaries: Sequence[ProfileSummary]) -> None:
    columns = [
        _text_column("name", [summary.name for summary in summaries]),
        _text_column("time", [summary.time for summary in summaries]),
        _text_column("energy", [summary.energy for summary in summaries]),
        _text_column("stages", [str(summary.stages) for summary in summaries]),
        _text_column("MHz", [summary.frequency_mhz for summary in summaries]),
        _text_column("GPU", [summary.gpu for summary in summaries], may_fold=True),
        _text_column("workload", [summary.workload for summary in summaries], may_fold=True),
    ]
    ui.show_table("", columns)
    ui.say(
        "time and energy of operations are measured on real GPUs (interpolated at clocks that "
        "no run had), identified from measured iterations, or modelled"
    )


def _text_column(header: str, texts: Sequence[str | None], *, may_fold: bool = False) -> Column:
    """A column of facts; "-" where nothing is known."""
    cells = ["-" if text is None else text for text in texts]
    return Column(header=header, cells=cells, is_text=True, may_fold=may_fold)


def smooth(
    profile: Annotated[
        str,
        typer.Argument(
            metavar="PROFILE",
            help="Profile CSV, or the name of a built-in profile.",
            autocompletion=complete_profiles,
        ),
        InPlace(),
    ] = DEFAULT_PROFILE,
    plot: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=MOST_USED,
            metavar=OPTIONAL_FILE,
            help="Draw the smooth energy against clock: .png, .svg or .pdf; without a name: "
            "smooth.png.",
            parser=OutputFile(".png", ".svg", ".pdf", bare="smooth.png"),
        ),
    ] = None,
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            rich_help_panel=MOST_USED,
            metavar="FILE",
            help="Where the smooth profile goes: .csv.",
            parser=OutputFile(".csv"),
        ),
    ] = Path("smooth.csv"),
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
    with progress("operations") as work:
        smoothed = smooth_profile(source.path, work.items)
    smoothed.save_csv(output)
    ui.draw(plot, lambda: profile_figure(smoothed))
    smoothing = smoothed.metadata.extra["smoothed"]
    ui.answer(
        lambda: {"profile": str(output), **smoothing},
        lambda: ui.say(f"{source.describe()}: {describe_smoothing(smoothing)}"),
        next_command=["envplan", "frontier", str(output)],
    )
