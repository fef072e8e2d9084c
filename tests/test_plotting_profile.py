from __future__ import annotations

import pytest

from cli_helpers import small_profile
from envplan.plotting.profile import plateau, profile_figure
from envplan.profile import Profile


def test_each_stage_is_a_curve_with_its_valley_named() -> None:
    figure = profile_figure(small_profile(stages=3))
    axes = figure.axes[0]
    (legend,) = figure.legends
    labels = [text.get_text() for text in legend.get_texts()]
    assert [label.split(",")[0] for label in labels] == ["stage 0", "stage 1", "stage 2"]
    assert all("valley at" in label for label in labels)
    assert "(modelled)" in axes.get_title(loc="left")
    assert "MHz" in axes.get_xlabel()
    # Of many stages a bar says whose colour is whose.
    axes, bar = profile_figure(small_profile(stages=12)).axes
    assert not axes.get_figure().legends
    assert bar.get_ylabel().startswith("Stage")
    assert bar.get_ylim() == (-0.5, 11.5)


def test_the_plateau_under_the_power_limit_is_named() -> None:
    def profile(limit_w: float) -> Profile:
        rows = []
        for mhz in range(900, 1800, 75):
            clock = min(mhz, 1350) if limit_w else mhz
            power = 300 * (clock / 1350) ** 2
            for instruction, work in (("forward", 1.0), ("backward", 2.0)):
                time = work * 1350 / clock * (1 - 1e-6 * mhz)
                rows.append((0, instruction, mhz, time, power * time))
        return Profile.from_rows(rows)

    found = plateau(profile(300.0))
    assert found is not None
    assert found[:2] == (1350, 1725)
    assert found[2] == pytest.approx(300)
    assert plateau(profile(0.0)) is None
    labels = profile_figure(profile(300.0)).legends[0].get_texts()
    assert "power limit, about 300 W" in labels[-1].get_text()
