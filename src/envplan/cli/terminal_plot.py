"""The frontier as a picture in the terminal: `frontier --plot -` and `compare --plot -`."""

from __future__ import annotations

from collections.abc import Sequence
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Final, NamedTuple

import typer

import envplan
from envplan.cli import output as ui
from envplan.cli.sketch import Mark, sketch

if TYPE_CHECKING:
    from envplan.planners import Comparison

_LEAST_WIDTH, _MOST_WIDTH = 40, 120
_LEAST_HEIGHT, _MOST_HEIGHT = 10, 30
#: Columns beside the picture: numbers of the axis, and its line.
_GUTTER: Final = 14
#: Lines below and above the picture that should stay in sight with it.
_LINES_BESIDE: Final = 10
_BLUE: Final = "bright_blue"


class _Sign(NamedTuple):
    """The character and the colour of a planner's plans."""

    character: str
    colour: str
    name: str


_SIGNS: Final = {
    "max_frequency": _Sign("x", "red", "maximum frequency"),
    "zeus_global": _Sign("z", "cyan", "Zeus, one clock for all"),
    "zeus_per_stage": _Sign("s", "green", "Zeus, one clock a stage"),
    "envpipe": _Sign("e", "magenta", "EnvPipe"),
    "frontier": _Sign("o", "yellow", "plans"),
}


def picture(
    traced: envplan.Frontier,
    plans: Sequence[envplan.Plan],
    comparison: Comparison | None = None,
) -> list[str]:
    """The lines of the picture and of its legend, as large as the terminal has room.

    Args:
        traced: whose curve it is.
        plans: along the frontier, at least one, by ascending time.
        comparison: other planners to show beside it.
    """
    baseline = plans[0].predicted.baseline
    marks = [Mark(plan.iteration_time, plan.energy, "o") for plan in plans]
    shown = ["max_frequency", "frontier"]
    if comparison is not None:
        for entry in comparison.entries:
            name = entry.plan.planner
            if name in _SIGNS and name not in shown:
                shown.append(name)
            if name not in ("max_frequency", "frontier") and name in _SIGNS:
                sign = _SIGNS[name].character
                marks.append(Mark(entry.plan.iteration_time, entry.plan.energy, sign))
    marks.append(Mark(baseline.iteration_time_s, baseline.energy_j, "x"))
    curve = list(zip(traced.times.tolist(), traced.energies.tolist(), strict=True))
    terminal = get_terminal_size()
    width = min(_MOST_WIDTH, max(_LEAST_WIDTH, terminal.columns - _GUTTER))
    height = min(_MOST_HEIGHT, max(_LEAST_HEIGHT, terminal.lines - _LINES_BESIDE))
    lines = sketch(curve, marks, width=width, height=height, units=(" s", " J"))
    legend = ", ".join(f"{_coloured(_SIGNS[name])} {_SIGNS[name].name}" for name in shown)
    return [
        *map(_coloured_row, lines),
        f"{legend}, curve: exact relaxed frontier; neither axis starts at 0",
    ]


def _coloured(sign: _Sign) -> str:
    return typer.style(sign.character, fg=sign.colour) if ui.colored() else sign.character


def _coloured_row(line: str) -> str:
    """A row of the picture with its curve and marks in colours; the axis stays as it is."""
    axis, bar, drawn = line.partition("│")
    if not bar or not ui.colored():
        return line
    signs = {sign.character: sign for sign in _SIGNS.values()}
    cells = []
    for character in drawn:
        if character in signs:
            cells.append(_coloured(signs[character]))
        elif character != " ":
            cells.append(typer.style(character, fg=_BLUE))
        else:
            cells.append(character)
    return f"{axis}{bar}{''.join(cells)}"
