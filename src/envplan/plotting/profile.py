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

# So many stages have a line in the legend each; of more a bar says whose colour is whose.
_NAMED_STAGES = 10
_LIGHTEST = 0.88  # of the colour map: the yellow at its end is too pale for lines on white


def plot_profile(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Draw a profile to a .png, .svg or .pdf file, whole or not at all.

    Raises:
        InputError: the file cannot be written.
    """
    save_figure(profile_figure(profile), Path(path))


def profile_figure(profile: Profile) -> Figure:
    """The figure: forward + backward energy of each stage by clock, a diamond at each valley."""
    import matplotlib as mpl
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize
    from matplotlib.figure import Figure

    from envplan.profiling.sweep import energy_by_clock

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 4.8), layout="constrained")
        axes = figure.add_subplot()
        named = profile.num_stages <= _NAMED_STAGES
        last = max(1, profile.num_stages - 1)
        shares = [_LIGHTEST * stage / last for stage in range(last + 1)]
        colors = ListedColormap(mpl.colormaps["viridis"](shares))
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
        else:
            scale = ScalarMappable(Normalize(-0.5, last + 0.5), colors)
            figure.colorbar(scale, ax=axes, label="Stage; diamond: valley", pad=0.02)
    return figure
