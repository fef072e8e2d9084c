"""A schedule laid out in time, as text and as a figure: which rank runs what, when.

Every forward takes one unit of time, a backward two, each of its parts one, and so does anything
else; transfers take none.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from envplan.pipeline.operations import LETTERS
from envplan.plotting.figures import bars, figure, rows_in_time

if TYPE_CHECKING:
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
_MOST_INCHES: Final = 100.0
_ROW_INCHES: Final = 0.27
_BAR: Final = 0.86
_LEAST_FONT: Final = 4.0
_LARGEST_FONT: Final = 9.0
_CHARACTER: Final = 0.68  # width of a character, in sizes of its font
_LIGHTEST: Final = 0.6


@dataclass(frozen=True)
class ScheduleLayout:
    """When every operation of a pipeline runs.

    Attributes:
        start, time: int64 (N,), in units.
    """

    pipeline: Pipeline
    start: NDArray[np.int64]
    time: NDArray[np.int64]

    @property
    def makespan(self) -> int:
        return int(np.max(self.start + self.time))

    @property
    def bubble_share(self) -> float:
        """The share of all ranks' time in which they wait."""
        return 1 - float(np.sum(self.time)) / (self.makespan * self.pipeline.num_stages)

    def of_rank(self, rank: int) -> range:
        """The indices of a rank's operations, in execution order."""
        return range(*self.pipeline.stage_begin[rank : rank + 2].tolist())

    def activations(self, rank: int) -> int:
        """How many activations a rank holds at most: from a forward to the end of its backward."""
        holds = {"forward": 1, "backward": -1, "backward_weight": -1}
        steps = (holds.get(self.pipeline.operations[i].instruction, 0) for i in self.of_rank(rank))
        return max(accumulate(steps, initial=0))

    def label(self, operation: Operation) -> str:
        """`F3`, or `4F3` with the model stage where ranks have several."""
        stage = operation.profile_stage if self.pipeline.num_chunks > 1 else ""
        return f"{stage}{_short_label(operation)}"

    def legend(self) -> dict[str, str]:
        """Letter -> instruction, of those that occur."""
        names = {operation.instruction for operation in self.pipeline.operations}
        known = [name for name in LETTERS if name in names]
        return {_letter(name): name for name in [*known, *sorted(names - set(known))]}

    def rows(self) -> list[str]:
        """A line of text for each rank: what it runs, with dots where it waits."""
        width = 1 + max(len(self.label(op)) for op in self.pipeline.operations)  # of a unit of time
        cells = [[f"{'.':<{width}}"] * self.makespan for _ in range(self.pipeline.num_stages)]
        timed = zip(self.pipeline.operations, self.start.tolist(), self.time.tolist(), strict=True)
        for op, begin, units in timed:
            text = self.label(op).ljust(width * units - 1, "-" if units > 1 else " ")
            cells[op.stage][begin : begin + units] = [f"{text} ", *[""] * (units - 1)]
        return ["".join(row) for row in cells]

    def to_dict(self) -> dict[str, Any]:
        """The layout in JSON types."""

        def listed(i: int) -> dict[str, Any]:
            operation = asdict(self.pipeline.operations[i])
            del operation["stage"]
            return operation | {"start": float(self.start[i]), "time": float(self.time[i])}

        return {
            "schedule": self.pipeline.schedule,
            "stages": self.pipeline.num_stages,
            "microbatches": self.pipeline.num_microbatches,
            "chunks": self.pipeline.num_chunks,
            "time_unit": "unit",
            "makespan": float(self.makespan),
            "bubble_share": self.bubble_share,
            "ranks": [
                {
                    "rank": rank,
                    "activations": self.activations(rank),
                    "operations": list(map(listed, self.of_rank(rank))),
                }
                for rank in range(self.pipeline.num_stages)
            ],
        }


def _letter(instruction: str) -> str:
    """PyTorch's letter for a forward or backward; a small one for anything else."""
    return LETTERS.get(instruction, instruction[:1].lower())


def _short_label(operation: Operation) -> str:
    return f"{_letter(operation.instruction)}{operation.microbatch}"


def schedule_layout(pipeline: Pipeline) -> ScheduleLayout:
    """When every operation runs if each takes its units."""
    units = np.array([1 + (op.instruction == "backward") for op in pipeline.operations], np.int64)
    starts, _ = pipeline.earliest_starts(units, lags=False)
    return ScheduleLayout(pipeline, starts, units)


def schedule_figure(layout: ScheduleLayout) -> Figure:
    """The figure: a row for each rank, as long as its labels need."""
    from matplotlib.patches import Patch

    pipeline, units, end = layout.pipeline, layout.makespan, layout.start + layout.time
    operations, chunks = pipeline.operations, pipeline.num_chunks
    width = min(_MOST_INCHES, max(7.0, 1.4 + 0.2 * units))
    # Such that the longest label fits into one unit; none where nobody could read it.
    longest = max(len(_short_label(op)) for op in operations)
    size = (width - 1.4) / units * 72 / (_CHARACTER * longest)
    look: dict[str, Any] = {"ha": "center", "va": "center_baseline"}
    with figure(width, _ROW_INCHES * pipeline.num_stages + 1.4, 10) as drawn:
        axes = drawn.add_subplot()
        low = np.array([op.stage for op in operations]) - _BAR / 2
        colours = [_colour(op.instruction, op.chunk, chunks) for op in operations]
        edged: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.6}
        bars(axes, layout.start, end, low, _BAR, facecolor=colours, **edged)
        for op, middle in zip(operations, (layout.start + end) / 2, strict=True):
            if size >= _LEAST_FONT and op.instruction in LETTERS:
                font = min(_LARGEST_FONT, size)
                axes.text(middle, op.stage, _short_label(op), fontsize=font, **look)
        rows_in_time(axes, [f"rank {rank}" for rank in range(pipeline.num_stages)], (0.0, units))
        axes.spines["left"].set_visible(False)
        axes.set_facecolor("0.955")
        axes.set_xlabel("Time (units)")
        paler = f" x {chunks} chunks (later ones paler)" if chunks > 1 else ""
        axes.set_title(
            f"{pipeline.schedule}, {pipeline.num_stages} ranks{paler}, {pipeline.num_microbatches} "
            "microbatches (forward 1, backward 2, its parts 1)",
            loc="left",
        )
        named = {name: f"{sign} {name}" for sign, name in layout.legend().items()}
        handles = [Patch(color=_colour(name, 0, 1), label=text) for name, text in named.items()]
        drawn.legend(handles=handles, loc="outside lower left", ncols=6, fontsize=9)
    return drawn


@cache
def _colour(instruction: str, chunk: int, num_chunks: int) -> Any:
    """The instruction's colour; the later the chunk, the lighter."""
    from matplotlib.colors import to_rgb

    pale = _LIGHTEST * chunk / max(1, num_chunks - 1)
    return tuple(c + pale * (1 - c) for c in to_rgb(_COLOURS.get(instruction, _OTHER_COLOUR)))
