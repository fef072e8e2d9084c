"""A profile as a figure: energy of each stage against its clock."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from envplan.plotting.figures import figure, label_axes
from envplan.plotting.titles import modelled_suffix, workload_title
from envplan.units import POWER_UNITS_PER_W

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

    from envplan.profile import OptionTable, Profile

#: So many stages have a line in the legend each; of more a bar says whose colour is whose.
_MAX_NAMED_STAGES: Final = 10
_LIGHTEST: Final = 0.88  # of the colour map: the yellow at its end is too pale for lines on white
#: A plateau's clocks bring less speed than this all together, and span at least that much.
_FLAT: Final = 0.015
_WIDE: Final = 0.04


def profile_figure(profile: Profile) -> Figure:
    """Draw forward + backward energy of each stage by clock, with a diamond at each valley.

    Stages that need the same energies are one curve.
    """
    curves = _stage_curves(profile)
    names_stages = len(curves) <= _MAX_NAMED_STAGES
    limit = plateau(profile)
    with figure(9.6, 4.8) as drawn:
        axes = drawn.add_subplot()
        colours = _stage_colours(profile.num_stages)
        for curve in curves:
            label = curve.label() if names_stages else None
            _draw_curve(axes, curve, colours(curve.stages[0]), label)
        if limit is not None:
            words = (
                f"power limit, about {limit.power_w:.0f} W:\n"
                f"from {limit.low_mhz} MHz on hardly any faster"
            )
            axes.axvspan(limit.low_mhz, limit.high_mhz, color="0.93", zorder=0, label=words)
        workload = workload_title(profile, profile.num_stages)
        label_axes(
            axes,
            "SM clock (MHz)",
            "Energy of forward + backward (J),\naxis does not start at 0",
            f"{workload}{modelled_suffix(profile.metadata.source)}\n{profile.name}",
        )
        if names_stages:
            drawn.legend(loc="outside right upper", title="valley: clock of least energy")
        else:
            _add_stage_bar(drawn, axes, colours)
            if limit is not None:
                drawn.legend(loc="outside lower left")
    return drawn


def _stage_colours(num_stages: int) -> Colormap:
    """A colour for each stage, darkest for the first."""
    import matplotlib as mpl
    from matplotlib.colors import ListedColormap

    last_stage = max(1, num_stages - 1)
    shares = [_LIGHTEST * stage / last_stage for stage in range(last_stage + 1)]
    return ListedColormap(mpl.colormaps["viridis"](shares))


class _StageCurve(NamedTuple):
    """The energy of some stages by clock: they need the same.

    Attributes:
        stages: ascending.
        energy_j_at: forward + backward of each of them by clock, MHz.
    """

    stages: list[int]
    energy_j_at: dict[int, float]

    @property
    def valley_mhz(self) -> int:
        """The clock of least energy; of several the highest."""
        return min(self.energy_j_at, key=lambda clock: (self.energy_j_at[clock], -clock))

    def label(self) -> str:
        """The curve in the legend."""
        return f"{_stages_in_words(self.stages)}, valley at {self.valley_mhz} MHz"


def _stage_curves(profile: Profile) -> list[_StageCurve]:
    """The curves of all stages, in the order of their first ones."""
    from envplan.profiling.remarks import energy_by_clock

    curves: list[_StageCurve] = []
    for stage in range(profile.num_stages):
        energy_j_at = energy_by_clock(profile, stage)
        alike = [curve for curve in curves if curve.energy_j_at == energy_j_at]
        if alike:
            alike[0].stages.append(stage)
        else:
            curves.append(_StageCurve([stage], energy_j_at))
    return curves


def _stages_in_words(stages: list[int]) -> str:
    """Stages such as "stage 3", "stages 1, 2" or "stages 1 to 6"."""
    first, last = stages[0], stages[-1]
    if first == last:
        return f"stage {first}"
    if len(stages) > 2 and stages == list(range(first, last + 1)):
        return f"stages {first} to {last}"
    return f"stages {', '.join(map(str, stages))}"


def _draw_curve(
    axes: Axes, curve: _StageCurve, colour: tuple[float, ...], label: str | None
) -> None:
    """Draw energies by clock, and the valley."""
    clocks_mhz = sorted(curve.energy_j_at)
    energies_j = [curve.energy_j_at[clock] for clock in clocks_mhz]
    axes.plot(clocks_mhz, energies_j, ".-", color=colour, linewidth=1.6, label=label)
    least_j = curve.energy_j_at[curve.valley_mhz]
    axes.plot(curve.valley_mhz, least_j, "D", color=colour, markeredgecolor="black")


def _add_stage_bar(drawn: Figure, axes: Axes, colours: Colormap) -> None:
    """Add a bar that says whose colour is whose."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    scale = ScalarMappable(Normalize(-0.5, colours.N - 0.5), colours)
    drawn.colorbar(
        scale, ax=axes, label="Stage; diamond: valley, the clock of least energy", pad=0.02
    )


class Plateau(NamedTuple):
    """Clocks at which the power limit, not the clock that is asked for, sets the speed.

    Attributes:
        low_mhz, high_mhz: the lowest and the highest of them.
        power_w: mean power of backwards there.
    """

    low_mhz: int
    high_mhz: int
    power_w: float


def plateau(profile: Profile) -> Plateau | None:
    """The plateau that most stages share.

    Returns:
        None where higher clocks are faster to the end, or where power still grows with the clock,
        so that something else than its limit holds the speed.
    """
    plateaus = []
    for table in profile.tables():
        if table.instruction in ("backward", "backward_input") and table.frequency_mhz.any():
            own_plateau = _plateau_of(table)
            if own_plateau is not None:
                plateaus.append(own_plateau)
    if 2 * len(plateaus) <= profile.num_stages:
        return None
    plateaus.sort()
    return Plateau(
        low_mhz=plateaus[len(plateaus) // 2].low_mhz,
        high_mhz=max(shared.high_mhz for shared in plateaus),
        power_w=fmean(shared.power_w for shared in plateaus),
    )


def _plateau_of(table: OptionTable) -> Plateau | None:
    """The clocks at the top of a table that bring next to no speed, if they span enough."""
    by_clock = table.frequency_mhz.argsort(kind="stable")
    clocks_mhz, times_ns = table.frequency_mhz[by_clock], table.time_ns[by_clock]
    power_w = table.energy_10fj[by_clock] / times_ns / POWER_UNITS_PER_W
    as_fast = times_ns <= (1 + _FLAT) * times_ns.min()
    is_flat = as_fast & (power_w >= (1 - 2 * _FLAT) * power_w.max())
    # The plateau begins after the last clock that is not flat.
    steep = np.flatnonzero(~is_flat)
    begin = int(steep[-1]) + 1 if len(steep) else 0
    if begin >= len(is_flat) - 1 or clocks_mhz[-1] < (1 + _WIDE) * clocks_mhz[begin]:
        return None
    return Plateau(
        low_mhz=int(clocks_mhz[begin]),
        high_mhz=int(clocks_mhz[-1]),
        power_w=float(power_w[begin:].mean()),
    )
