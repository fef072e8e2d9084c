"""A schedule laid out in time, as text and as a figure: which rank runs what, when.

Every forward takes one unit of time, a backward two, each of its parts one, and so does anything
else; transfers take none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from envplan.pipeline.schedules import LETTERS
from envplan.plotting.figures import bar_corners, figure, rows_in_time

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
_POINTS_PER_INCH: Final = 72
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
        begin, end = self.pipeline.stage_begin[rank : rank + 2].tolist()
        return range(begin, end)

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

    def cells(self, rank: int) -> Iterator[tuple[Operation | None, int]]:
        """A rank's operations, and None for each gap, with how many units each takes."""
        at = 0
        for i in self.of_rank(rank):
            begin, time = int(self.start[i]), int(self.time[i])
            if begin > at:
                yield None, begin - at
            yield self.pipeline.operations[i], time
            at = begin + time
        if at < self.makespan:
            yield None, self.makespan - at

    def to_dict(self) -> dict[str, Any]:
        """The layout in JSON types."""
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
                    "operations": [self._entry(i) for i in self.of_rank(rank)],
                }
                for rank in range(self.pipeline.num_stages)
            ],
        }

    def _entry(self, i: int) -> dict[str, Any]:
        entry = asdict(self.pipeline.operations[i])
        del entry["stage"]
        return {**entry, "start": float(self.start[i]), "time": float(self.time[i])}


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
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Patch

    pipeline, units = layout.pipeline, layout.makespan
    operations = pipeline.operations
    width = min(_MOST_INCHES, max(7.0, 1.4 + 0.2 * units))
    # Such that the longest label fits into one unit; none where nobody could read it.
    longest = max(len(_short_label(op)) for op in operations)
    size = (width - 1.4) / units * _POINTS_PER_INCH / (_CHARACTER * longest)
    look: dict[str, Any] = {"ha": "center", "va": "center_baseline"}
    look["fontsize"] = min(_LARGEST_FONT, size)
    with figure(width, _ROW_INCHES * pipeline.num_stages + 1.4, 10) as drawn:
        axes = drawn.add_subplot()
        stages = np.array([op.stage for op in operations])
        end = layout.start + layout.time
        boxes: Any = bar_corners(layout.start, end, stages - _BAR / 2, _BAR)
        colours = [_colour(op.instruction, op.chunk, pipeline.num_chunks) for op in operations]
        bars = PolyCollection(boxes, facecolor=colours, edgecolor="white", linewidth=0.6)
        axes.add_collection(bars)
        for op, middle in zip(operations, (layout.start + end) / 2, strict=True):
            if size >= _LEAST_FONT and op.instruction in LETTERS:
                axes.text(middle, op.stage, _short_label(op), **look)
        ranks = [f"rank {rank}" for rank in range(pipeline.num_stages)]
        rows_in_time(axes, ranks, (0.0, layout.makespan))
        axes.spines["left"].set_visible(False)
        axes.set_facecolor("0.955")
        axes.set_xlabel("Time (units)")
        axes.set_title(_title(pipeline), loc="left")
        handles = [
            Patch(color=_colour(name, 0, 1), label=f"{sign} {name}")
            for sign, name in layout.legend().items()
        ]
        drawn.legend(handles=handles, loc="outside lower left", ncols=6, fontsize=9)
    return drawn


@cache
def _colour(instruction: str, chunk: int, num_chunks: int) -> tuple[float, float, float]:
    """The instruction's colour; the later the chunk, the lighter."""
    from matplotlib.colors import to_rgb

    pale = _LIGHTEST * chunk / max(1, num_chunks - 1)
    red, green, blue = to_rgb(_COLOURS.get(instruction, _OTHER_COLOUR))
    return red + pale * (1 - red), green + pale * (1 - green), blue + pale * (1 - blue)


def _title(pipeline: Pipeline) -> str:
    count = pipeline.num_chunks
    chunks = f" x {count} chunks (later ones paler)" if count > 1 else ""
    return (
        f"{pipeline.schedule}, {pipeline.num_stages} ranks{chunks}, {pipeline.num_microbatches} "
        "microbatches (forward 1, backward 2, its parts 1)"
    )
