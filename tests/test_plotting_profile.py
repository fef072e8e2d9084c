from __future__ import annotations

from pathlib import Path

import pytest

from cli_helpers import small_profile
from envplan.plotting.profile import plot_profile, profile_figure


def test_each_stage_is_a_curve_with_its_valley_named() -> None:
    figure = profile_figure(small_profile(stages=3))
    axes = figure.axes[0]
    legend = axes.get_legend()
    assert legend is not None
    labels = [text.get_text() for text in legend.get_texts()]
    assert [label.split(",")[0] for label in labels] == ["Stage 0", "Stage 1", "Stage 2"]
    assert all("valley at" in label for label in labels)
    assert "(modelled)" in axes.get_title(loc="left")
    assert "MHz" in axes.get_xlabel()


def test_of_many_stages_a_bar_says_whose_colour_is_whose() -> None:
    axes, bar = profile_figure(small_profile(stages=12)).axes
    assert axes.get_legend() is None
    assert bar.get_ylabel().startswith("Stage")
    assert bar.get_ylim() == (-0.5, 11.5)


@pytest.mark.parametrize(("name", "magic"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml")])
def test_the_same_profile_gives_the_same_bytes(tmp_path: Path, name: str, magic: bytes) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        plot_profile(small_profile(), tmp_path / folder / name)
    drawn = (tmp_path / "one" / name).read_bytes()
    assert drawn.startswith(magic)
    assert drawn == (tmp_path / "two" / name).read_bytes()
