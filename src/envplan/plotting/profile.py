"""A profile as a figure: energy of each stage against its clock."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from envplan.plotting.frontier import STYLE, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from envplan.profile import Profile

__all__ = ["plot_profile", "profile_figure"]

# Stages are told apart by colour up to this many, and are one grey bundle beyond.
_NAMED_STAGES = 10


def plot_profile(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Draw a profile to a .png, .svg or .pdf file, whole or not at all.

    Raises:
        InputError: the file cannot be written.
    """
    save_figure(profile_figure(profile), Path(path))


def profile_figure(profile: Profile) -> Figure:
    """The figure: forward + backward energy of each stage by clock, a diamond at each valley."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    from envplan.profiling.sweep import energy_by_clock

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 4.8), layout="constrained")
        axes = figure.add_subplot()
        named = profile.num_stages <= _NAMED_STAGES
        colors = mpl.colormaps["viridis"].resampled(max(2, profile.num_stages))
        for stage in range(profile.num_stages):
            energy = energy_by_clock(profile, stage)
            clocks = sorted(energy)
            valley = min(clocks, key=lambda clock: (energy[clock], -clock))
            color = colors(stage)
            label = f"Stage {stage}, valley at {valley} MHz" if named else None
            joules = [energy[clock] for clock in clocks]
            axes.plot(clocks, joules, ".-", color=color, linewidth=1.6, label=label)
            axes.plot(valley, energy[valley], "D", color=color, markeredgecolor="black")
        modelled = " (modelled)" if profile.metadata.source == "modelled" else ""
        axes.set_title(f"{profile.name}{modelled}\n{profile.metadata.gpu or ''}", loc="left")
        axes.set_xlabel("SM clock (MHz)")
        axes.set_ylabel("Energy of forward + backward (J),\naxis does not start at 0")
        axes.grid(color="0.92", linewidth=0.8)
        axes.set_axisbelow(True)
        if named:
            axes.legend(frameon=True, edgecolor="0.85", framealpha=1)
    return figure
