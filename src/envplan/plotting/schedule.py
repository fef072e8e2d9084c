"""A schedule laid out in time, as text and as a figure: what each rank runs when.

Every forward takes one unit of time, a backward two, each of its parts one, and so does anything
else; transfers take none.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from envplan.pipeline.operations import LETTERS
from envplan.plotting.figures import draw_bars, figure, name_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from envplan.pipeline import Operation, Pipeline

__all__ = ["ScheduleLayout", "schedule_figure", "schedule_layout"]

# Okabe and Ito's palette, which colour-blind readers can tell apart.
_COLOURS: Final = {
    "forward": "#56B4E9",
    "backward": "#E69F00",
    "backward_input": "#DE9CBF",
    "backward_weight": "#5DBB9A",
}
_OTHER_COLOUR: Final = "#C9C9C9"
_MAX_WIDTH_IN: Final = 100.0
_MIN_WIDTH_IN: Final = 7.0
_MARGINS_IN: Final = 1.4  # beside and below the rows
_UNIT_IN: Final = 0.2
_ROW_IN: Final = 0.27
_POINTS_PER_IN: Final = 72
_BAR_HEIGHT: Final = 0.86  # of a row
_MIN_FONT_SIZE: Final = 4.0
_MAX_FONT_SIZE: Final = 9.0
#: Widths of characters of DejaVu Sans, in sizes of the font.
_CHARACTER_WIDTHS: Final = {"W": 0.99, "I": 0.3, "F": 0.58}
_CHARACTER_WIDTH: Final = 0.69
_LABEL_SHARE: Final = 0.88  # of a unit; the rest keeps two labels apart
_LIGHTEST: Final = 0.6
#: How many more activations a rank holds after an instruction than before.
_ACTIVATIONS: Final = {"forward": 1, "backward": -1, "backward_weight": -1}


@dataclass(frozen=True)
class ScheduleLayout:
    """Start and time of every operation of a pipeline, in units.

    Attributes:
        pipeline: the operations.
        start, time: when each begins, and how long it takes, int64 (N,).
    """

    pipeline: Pipeline
    start: NDArray[np.int64]
    time: NDArray[np.int64]

    @property
    def end(self) -> NDArray[np.int64]:
        """The end of every operation, int64 (N,)."""
        return self.start + self.time

    @property
    def makespan(self) -> int:
        """The time until the last operation has ended."""
        return int(np.max(self.end))

    @property
    def bubble_share(self) -> float:
        """The share of all ranks' time in which they wait."""
        return 1 - float(np.sum(self.time)) / (self.makespan * self.pipeline.num_stages)

    def of_rank(self, rank: int) -> range:
        """The indices of a rank's operations, in execution order."""
        return range(*self.pipeline.stage_begin[rank : rank + 2].tolist())

    def activations(self, rank: int) -> int:
        """How many activations a rank holds at most: from a forward to the end of its backward."""
        num_held, max_held = 0, 0
        for index in self.of_rank(rank):
            instruction = self.pipeline.operations[index].instruction
            num_held += _ACTIVATIONS.get(instruction, 0)
            max_held = max(max_held, num_held)
        return max_held

    def label(self, operation: Operation) -> str:
        """The label of an operation, `F3`; `4F3` with its model stage where ranks have several."""
        stage = operation.profile_stage if self.pipeline.num_chunks > 1 else ""
        return f"{stage}{_short_label(operation)}"

    def legend(self) -> dict[str, str]:
        """The instructions that occur, by letter."""
        instructions = {operation.instruction for operation in self.pipeline.operations}
        usual = [name for name in LETTERS if name in instructions]
        others = sorted(instructions.difference(usual))
        return {_letter(name): name for name in [*usual, *others]}

    def rows(self) -> list[str]:
        """A line of text for each rank: what it runs, with dots where it waits."""
        operations = self.pipeline.operations
        labels = [self.label(operation) for operation in operations]
        unit_width = 1 + max(map(len, labels))
        waiting = ".".ljust(unit_width)
        # A cell for each rank and unit of time; an operation's text is all in its first cell.
        cells = [[waiting] * self.makespan for _ in range(self.pipeline.num_stages)]
        starts, times = self.start.tolist(), self.time.tolist()
        for operation, label, start, units in zip(operations, labels, starts, times, strict=True):
            filler = "-" if units > 1 else " "
            text = label.ljust(unit_width * units - 1, filler)
            row = cells[operation.stage]
            row[start : start + units] = [f"{text} ", *[""] * (units - 1)]
        return ["".join(row) for row in cells]

    def to_dict(self) -> dict[str, object]:
        """The layout in JSON types."""
        return {
            "schedule": self.pipeline.schedule,
            "stages": self.pipeline.num_stages,
            "microbatches": self.pipeline.num_microbatches,
            "chunks": self.pipeline.num_chunks,
            "time_unit": "unit",
            "makespan": float(self.makespan),
            "bubble_share": self.bubble_share,
            "ranks": [self._rank_dict(rank) for rank in range(self.pipeline.num_stages)],
        }

    def _rank_dict(self, rank: int) -> dict[str, object]:
        """A rank in JSON types."""
        return {
            "rank": rank,
            "activations": self.activations(rank),
            "operations": [self._operation_dict(index) for index in self.of_rank(rank)],
        }

    def _operation_dict(self, index: int) -> dict[str, object]:
        """An operation in JSON types."""
        fields = asdict(self.pipeline.operations[index])
        del fields["stage"]  # the rank under which it is listed
        return {**fields, "start": float(self.start[index]), "time": float(self.time[index])}


def _letter(instruction: str) -> str:
    """PyTorch's letter for a forward or backward; a small one for anything else."""
    return LETTERS.get(instruction, instruction[:1].lower())


def _short_label(operation: Operation) -> str:
    return f"{_letter(operation.instruction)}{operation.microbatch}"


def schedule_layout(pipeline: Pipeline) -> ScheduleLayout:
    """Lay a pipeline out in time, every operation as early as it can start."""
    instructions = [operation.instruction for operation in pipeline.operations]
    units = [2 if instruction == "backward" else 1 for instruction in instructions]
    times = np.array(units, np.int64)
    starts, _ = pipeline.earliest_starts(times, lags=False)
    return ScheduleLayout(pipeline, starts, times)


def schedule_figure(layout: ScheduleLayout) -> Figure:
    """Draw a row for each rank, as long as its labels need."""
    from matplotlib.patches import Patch

    pipeline = layout.pipeline
    wanted_in = _MARGINS_IN + _UNIT_IN * layout.makespan
    width_in = min(_MAX_WIDTH_IN, max(_MIN_WIDTH_IN, wanted_in))
    height_in = _ROW_IN * pipeline.num_stages + _MARGINS_IN
    with figure(width_in, height_in, 10) as drawn:
        axes = drawn.add_subplot()
        _draw_operations(axes, layout)
        _draw_labels(axes, layout, unit_in=(width_in - _MARGINS_IN) / layout.makespan)
        names = [f"rank {rank}" for rank in range(pipeline.num_stages)]
        name_rows(axes, names, 0.0, layout.makespan)
        axes.spines["left"].set_visible(False)
        axes.set_facecolor("0.955")
        axes.set_xlabel("Time (units)")
        axes.set_title(_title(pipeline), loc="left")
        handles = []
        for letter, instruction in layout.legend().items():
            colour = _colour(instruction, chunk=0, num_chunks=1)
            handles.append(Patch(color=colour, label=f"{letter} {instruction}"))
        drawn.legend(handles=handles, loc="outside lower left", ncols=6, fontsize=9)
    return drawn


def _draw_operations(axes: Axes, layout: ScheduleLayout) -> None:
    """Draw a bar for each operation, in the colour of its instruction and chunk."""
    num_chunks = layout.pipeline.num_chunks
    rows, colours = [], []
    for operation in layout.pipeline.operations:
        rows.append(operation.stage)
        colours.append(_colour(operation.instruction, operation.chunk, num_chunks))
    draw_bars(
        axes,
        layout.start,
        layout.end,
        np.array(rows) - _BAR_HEIGHT / 2,
        _BAR_HEIGHT,
        facecolor=colours,
        edgecolor="white",
        linewidth=0.6,
    )


def _draw_labels(axes: Axes, layout: ScheduleLayout, unit_in: float) -> None:
    """Label forwards and backwards so that the longest label fits into one unit.

    There are none where nobody could read them.
    """
    operations = layout.pipeline.operations
    labels = [_short_label(operation) for operation in operations]
    widest = max(map(_label_width, labels))
    font_size = _LABEL_SHARE * unit_in * _POINTS_PER_IN / widest
    if font_size < _MIN_FONT_SIZE:
        return
    middles = (layout.start + layout.end) / 2
    for operation, label, middle in zip(operations, labels, middles, strict=True):
        if operation.instruction in LETTERS:
            axes.text(
                middle,
                operation.stage,
                label,
                fontsize=min(_MAX_FONT_SIZE, font_size),
                ha="center",
                va="center_baseline",
            )


def _label_width(label: str) -> float:
    """The width of a label, in sizes of its font."""
    return sum(_CHARACTER_WIDTHS.get(character, _CHARACTER_WIDTH) for character in label)


def _title(pipeline: Pipeline) -> str:
    """The schedule, its shape, and the units that operations take."""
    chunks = ""
    if pipeline.num_chunks > 1:
        chunks = f" x {pipeline.num_chunks} chunks (later ones paler)"
    return (
        f"{pipeline.schedule}, {pipeline.num_stages} ranks{chunks}, {pipeline.num_microbatches} "
        "microbatches (forward 1, backward 2, its parts 1)"
    )


@cache
def _colour(instruction: str, chunk: int, num_chunks: int) -> tuple[float, float, float]:
    """The instruction's colour; the later the chunk, the lighter."""
    from matplotlib.colors import to_rgb

    white_share = _LIGHTEST * chunk / max(1, num_chunks - 1)
    red, green, blue = to_rgb(_COLOURS.get(instruction, _OTHER_COLOUR))
    return (
        red + white_share * (1 - red),
        green + white_share * (1 - green),
        blue + white_share * (1 - blue),
    )
