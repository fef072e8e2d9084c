"""A profile as a figure: energy of each stage against its clock."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING, Final

from envplan.plotting.figures import figure, label_axes, workload_title

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from envplan.profile import Profile

# So many stages have a line in the legend each; of more a bar says whose colour is whose.
_NAMED_STAGES: Final = 10
_LIGHTEST: Final = 0.88  # of the colour map: the yellow at its end is too pale for lines on white
#: A plateau's clocks bring less speed than this all together, and span at least that much.
_FLAT: Final = 0.015
_WIDE: Final = 0.04


def profile_figure(profile: Profile) -> Figure:
    """The figure: forward + backward energy of each stage by clock, a diamond at each valley."""
    import matplotlib as mpl
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize

    from envplan.profiling.remarks import energy_by_clock

    with figure(9.6, 4.8) as drawn:
        axes = drawn.add_subplot()
        named = profile.num_stages <= _NAMED_STAGES
        last = max(1, profile.num_stages - 1)
        shares = [_LIGHTEST * stage / last for stage in range(last + 1)]
        colors = ListedColormap(mpl.colormaps["viridis"](shares))
        for stage in range(profile.num_stages):
            energy = energy_by_clock(profile, stage)
            clocks = sorted(energy)
            valley = min(clocks, key=lambda clock: (energy[clock], -clock))
            color = colors(stage)
            label = f"stage {stage}, valley at {valley} MHz" if named else None
            joules = [energy[clock] for clock in clocks]
            axes.plot(clocks, joules, ".-", color=color, linewidth=1.6, label=label)
            axes.plot(valley, energy[valley], "D", color=color, markeredgecolor="black")
        if flat := plateau(profile):
            low, high, watts = flat
            words = f"power limit, about {watts:.0f} W:\nfrom {low} MHz on hardly any faster"
            axes.axvspan(low, high, color="0.93", zorder=0, label=words)
        modelled = " (modelled)" if profile.metadata.source == "modelled" else ""
        heading = f"{workload_title(profile, profile.num_stages)}{modelled}\n{profile.name}"
        label_axes(
            axes,
            "SM clock (MHz)",
            "Energy of forward + backward (J),\naxis does not start at 0",
            heading,
        )
        if not named:
            scale = ScalarMappable(Normalize(-0.5, last + 0.5), colors)
            drawn.colorbar(scale, ax=axes, label="Stage; diamond: valley", pad=0.02)
        if named or flat:
            drawn.legend(loc="outside right upper" if named else "outside lower left")
    return drawn


def plateau(profile: Profile) -> tuple[int, int, float] | None:
    """Where the power limit, not the clock that is asked for, sets the speed.

    Returns:
        The lowest and the highest clock of the plateau that most stages share, MHz, and the mean
        power of backwards on it, W. None where higher clocks are faster to the end, or where power
        still grows with the clock, so that something else than its limit holds the speed.
    """
    found = []
    for table in profile.tables():
        if table.instruction not in ("backward", "backward_input") or not table.frequency_mhz.any():
            continue
        order = table.frequency_mhz.argsort(kind="stable")
        clocks, times = table.frequency_mhz[order], table.time_ns[order]
        watts = table.energy_fj[order] / times / 1e6
        flat = (times <= (1 + _FLAT) * times.min()) & (watts >= (1 - 2 * _FLAT) * watts.max())
        at = 0 if flat.all() else len(flat) - int((~flat[::-1]).argmax())
        if at < len(flat) - 1 and clocks[-1] >= (1 + _WIDE) * clocks[at]:
            found.append((int(clocks[at]), int(clocks[-1]), float(watts[at:].mean())))
    if 2 * len(found) <= profile.num_stages:
        return None
    starts, tops, powers = zip(*sorted(found), strict=True)
    return starts[len(starts) // 2], max(tops), fmean(powers)
