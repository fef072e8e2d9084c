from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from cli_helpers import envplan
from envplan.cli.sketch import sketch

NUMBERS = st.floats(-1e6, 1e6)
POINTS = st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=8)


@given(POINTS, st.tuples(NUMBERS, NUMBERS), st.integers(20, 90), st.integers(2, 20))
def test_every_sketch_has_its_size_and_its_mark(
    curve: list[tuple[float, float]], mark: tuple[float, float], width: int, height: int
) -> None:
    lines = sketch(curve, [(*mark, "x")], width=width, height=height)
    assert len(lines) == height + 2
    assert sum(line.split("│")[1].count("x") for line in lines[:height]) == 1
    assert all(len(line.split("│")[1]) <= width for line in lines[:height])


def test_a_falling_line_falls() -> None:
    lines = sketch([(0, 1), (1, 0)], [], width=8, height=2, units=(" s", " J"))
    assert lines == ["1 J │⠉⠒⠤⣀", "0 J │    ⠉⠒⠤⣀", "    └────────", "     0 s  1 s"]


def test_the_command_draws_it_unless_there_is_a_picture(tmp_path: Path) -> None:
    job = ("frontier", "a40-gpt3-1.3b-4stage", "-m", "4", "--plans", "3")
    assert "x maximum frequency" in envplan(*job, cwd=tmp_path).out
    assert "x maximum frequency" not in envplan(*job, "--plot", cwd=tmp_path).out
