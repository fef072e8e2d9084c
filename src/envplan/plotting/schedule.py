"""A schedule laid out in time, as text and as a figure: which rank runs what, when.

Without a profile every forward takes one unit of time, a backward two, each of its parts one, and
so does anything else; transfers take none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from envplan.pipeline.schedules import LETTERS
from envplan.plotting.figures import bar_corners, figure, rows_in_time
from envplan.units import NS_PER_S

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from envplan.pipeline import Operation, Pipeline
    from envplan.profile import Profile

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
        start, time: (N), in units or seconds.
        profile: whose times these are, at its highest clocks; None: units.
    """

    pipeline: Pipeline
    start: NDArray[np.float64]
    time: NDArray[np.float64]
    profile: Profile | None

    @property
    def makespan(self) -> float:
        return float(np.max(self.start + self.time))

    @property
    def bubble_share(self) -> float:
        """The share of all ranks' time in which they wait."""
        whole = self.makespan * self.pipeline.num_stages
        return 1 - float(np.sum(self.time)) / whole if whole else 0.0

    @property
    def unit(self) -> float:
        """The time of the shortest forward or backward."""
        computing = [op.instruction in LETTERS for op in self.pipeline.operations]
        times = self.time[np.array(computing) & (self.time > 0)].tolist()
        return float(min(times, default=self.makespan or 1.0))

    @property
    def columns(self) -> int:
        """How many columns of text show every forward and backward: one for each unit of time."""
        units = self.makespan / self.unit
        return round(units) if self.profile is None else math.floor(units) + 1

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

    def cells(self, rank: int, columns: int) -> Iterator[tuple[Operation | None, int]]:
        """A rank's row of text, which takes up `columns` columns: operations and how many each has.

        None is a gap. An operation that is too short for a column is left out.
        """
        scale = columns / self.makespan if self.makespan else 0.0
        at = 0
        for i in self.of_rank(rank):
            begin = math.floor(self.start[i] * scale + 0.5)
            end = math.floor((self.start[i] + self.time[i]) * scale + 0.5)
            if begin > at:
                yield None, begin - at
            if end > begin:
                yield self.pipeline.operations[i], end - begin
            at = max(at, end)
        if at < columns:
            yield None, columns - at

    def to_dict(self) -> dict[str, Any]:
        """The layout in JSON types."""
        return {
            "schedule": self.pipeline.schedule,
            "stages": self.pipeline.num_stages,
            "microbatches": self.pipeline.num_microbatches,
            "chunks": self.pipeline.num_chunks,
            "time_unit": "unit" if self.profile is None else "s",
            "profile": None if self.profile is None else self.profile.name,
            "profile_source": None if self.profile is None else self.profile.metadata.source,
            "makespan": self.makespan,
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


def schedule_layout(pipeline: Pipeline, profile: Profile | None = None) -> ScheduleLayout:
    """When every operation runs if all take equal times, or those of a profile's highest clocks.

    Raises:
        InputError: the profile has no rows for an operation.
    """
    operations = pipeline.operations
    if profile is None:
        units = np.array([1 + (op.instruction == "backward") for op in operations], np.int64)
        starts, _ = pipeline.earliest_starts(units, lags=False)
        return ScheduleLayout(pipeline, starts.astype(float), units.astype(float), None)
    fitted = profile.fitted({op.instruction for op in operations})
    tables = (fitted.table(op.profile_stage, op.instruction) for op in operations)
    times = np.array([table.time_ns[table.max_frequency_option] for table in tables], np.int64)
    starts, _ = pipeline.earliest_starts(times)
    return ScheduleLayout(pipeline, starts / NS_PER_S, times / NS_PER_S, fitted)


def schedule_figure(layout: ScheduleLayout) -> Figure:
    """The figure: a row for each rank, as long as its labels need."""
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Patch

    pipeline, units = layout.pipeline, layout.makespan / layout.unit
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
        axes.set_xlabel(f"Time ({'units' if layout.profile is None else 's'})")
        axes.set_title(_title(layout), loc="left")
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


def _title(layout: ScheduleLayout) -> str:
    pipeline = layout.pipeline
    count = pipeline.num_chunks
    chunks = f" x {count} chunks (later ones paler)" if count > 1 else ""
    if layout.profile is None:
        times = "forward 1, backward 2, its parts 1"
    else:
        modelled = ", modelled" if layout.profile.metadata.source == "modelled" else ""
        times = f"times of {layout.profile.name} at its highest clocks{modelled}"
    return (
        f"{pipeline.schedule}, {pipeline.num_stages} ranks{chunks}, {pipeline.num_microbatches} "
        f"microbatches ({times})"
    )
