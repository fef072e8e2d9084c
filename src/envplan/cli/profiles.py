"""`envplan profiles` and `smooth`: what ships with envplan, and profiles without their noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import envplan
from envplan.cli import output as ui
from envplan.cli.command import argument, takes
from envplan.cli.options import DEFAULT_PROFILE, complete_profiles

#: The columns of the table, and what they show of the document.
_COLUMNS: Final = {
    "name": "name", "time": "time", "energy": "energy", "stages": "stages",
    "MHz": "frequency_mhz", "GPU": "gpu", "workload": "workload",
}  # fmt: skip


def profiles() -> None:
    """List the built-in profiles, those from measurements first.

    Their names stand in for a profile's path in every command.

    \b
    Example:
      envplan profiles
      envplan frontier sosp24-a100-gpt3-xl-4stage
    """

    known = [_describe(profile) for profile in envplan.builtin_profiles()]
    known.sort(key=lambda profile: (profile["source"] != "measured", profile["name"]))

    def tell() -> None:
        columns = {name: [one[field] for one in known] for name, field in _COLUMNS.items()}
        ui.print_columns("", columns, words=len(columns), wrap=("GPU", "workload"))
        ui.say(
            "time and energy of operations are measured on real GPUs (interpolated at clocks that "
            "no run had), identified from measured iterations, or modelled"
        )

    first = known[0]["name"]
    ui.answer(lambda: {"profiles": known}, tell, then=["envplan", "savings", first])


def _describe(profile: envplan.Profile) -> dict[str, Any]:
    clocks, source = profile.clocks_mhz, profile.metadata.source
    # Sidecars of measured profiles say what about them was not measured operation by operation.
    energy = profile.metadata.extra.get("identified", {}).get("energy", source)
    return {
        "name": profile.name,
        "stages": profile.num_stages,
        "frequency_mhz": f"{clocks[0]}-{clocks[-1]}" if clocks else None,
        **ui.picked(profile.metadata, "gpu source time=source"),
        "energy": energy if energy == source else "identified",
        "workload": profile.metadata.workload,
        "instructions": list(profile.instructions),
        **ui.picked(profile.metadata, "schedule microbatches=num_microbatches"),
        "sha256": profile.sha256,
    }


@takes(
    """
    Most used:
      -o, --output FILE  Where the smooth profile goes: .csv.
      --plot [FILE]  Draw the smooth energy against clock: .png, .svg or .pdf; without a name:
          smooth.png.
    """,
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
    ui.answer(
        lambda: {"profile": str(output), **said},
        lambda: ui.say(f"{source.describe()}: {describe_smoothing(said)}"),
        then=["envplan", "frontier", str(output)],
    )
