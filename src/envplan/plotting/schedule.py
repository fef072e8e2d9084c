"""A schedule laid out in time, as text and as a figure: which rank runs what, when.

Without a profile every forward takes one unit of time, a backward two, each of its parts one, and
so does anything else; transfers take none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from envplan.pipeline.dependencies import starts_without_lags
from envplan.plotting.figures import figure
from envplan.units import s_from_ns

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from envplan.pipeline import Operation, Pipeline
    from envplan.profile import Profile

__all__ = ["Cell", "ScheduleLayout", "schedule_figure", "schedule_layout"]

_UNITS: Final = {"backward": 2}
_LETTERS: Final = {"forward": "F", "backward": "B", "backward_input": "I", "backward_weight": "W"}

# Okabe and Ito's palette, which colour-blind readers can tell apart.
_COLOURS: Final = {
    "forward": "#56B4E9",
    "backward": "#E69F00",
    "backward_input": "#DE9CBF",
    "backward_weight": "#5DBB9A",
}
_OTHER_COLOUR: Final = "#C9C9C9"
_UNITS_PER_BAND: Final = 80
_MOST_INCHES: Final = 60.0
_BAND_INCHES: Final = 16.0
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
        computing = [
            time
            for op, time in zip(self.pipeline.operations, self.time.tolist(), strict=True)
            if op.instruction in _LETTERS and time > 0
        ]
        return float(min(computing, default=self.makespan or 1.0))

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
        held = most = 0
        for i in self.of_rank(rank):
            instruction = self.pipeline.operations[i].instruction
            held += (instruction == "forward") - (instruction in ("backward", "backward_weight"))
            most = max(most, held)
        return most

    def label(self, operation: Operation) -> str:
        """`F3`, or `4F3` with the model stage where ranks have several."""
        stage = operation.profile_stage if self.pipeline.num_chunks > 1 else ""
        return f"{stage}{letter(operation.instruction)}{operation.microbatch}"

    def legend(self) -> dict[str, str]:
        """Letter -> instruction, of those that occur."""
        names = {operation.instruction for operation in self.pipeline.operations}
        known = [name for name in _LETTERS if name in names]
        return {letter(name): name for name in [*known, *sorted(names - set(known))]}

    def cells(self, rank: int, columns: int) -> Iterator[Cell]:
        """A rank's row of text: operations and gaps, which take up `columns` columns together.

        An operation that is too short for a column is left out.
        """
        scale = columns / self.makespan if self.makespan else 0.0
        at = 0
        for i in self.of_rank(rank):
            begin = math.floor(self.start[i] * scale + 0.5)
            end = math.floor((self.start[i] + self.time[i]) * scale + 0.5)
            if begin > at:
                yield Cell(None, begin - at)
            if end > begin:
                yield Cell(self.pipeline.operations[i], end - begin)
            at = max(at, end)
        if at < columns:
            yield Cell(None, columns - at)

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

    def _entry(self, i: int) -> Mapping[str, Any]:
        op = self.pipeline.operations[i]
        return {
            "instruction": op.instruction,
            "microbatch": op.microbatch,
            "chunk": op.chunk,
            "profile_stage": op.profile_stage,
            "start": float(self.start[i]),
            "time": float(self.time[i]),
        }


@dataclass(frozen=True)
class Cell:
    """Some columns of a row: an operation, or None where the rank waits."""

    operation: Operation | None
    columns: int


def letter(instruction: str) -> str:
    """PyTorch's letter for a forward or backward; a small one for anything else."""
    return _LETTERS.get(instruction, instruction[:1].lower())


def schedule_layout(pipeline: Pipeline, profile: Profile | None = None) -> ScheduleLayout:
    """When every operation runs if all take equal times, or those of a profile's highest clocks.

    Raises:
        InputError: the profile has no rows for an operation.
    """
    if profile is None:
        units = [_UNITS.get(op.instruction, 1) for op in pipeline.operations]
        starts_in_units = np.array(starts_without_lags(pipeline, units), float)
        return ScheduleLayout(pipeline, starts_in_units, np.array(units, float), None)
    fitted = profile.fitted({op.instruction for op in pipeline.operations})
    times = np.array(
        [
            (table := fitted.table(op.profile_stage, op.instruction)).time_ns[
                table.max_frequency_option
            ]
            for op in pipeline.operations
        ],
        np.int64,
    )
    starts, _ = pipeline.earliest_starts(times)
    return ScheduleLayout(pipeline, _seconds(starts), _seconds(times), fitted)


def _seconds(nanoseconds: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.array([s_from_ns(time) for time in nanoseconds.tolist()])


def schedule_figure(layout: ScheduleLayout) -> Figure:
    """The figure: a row for each rank; a long schedule goes on in further bands below."""
    units = layout.makespan / layout.unit
    band_inches = _ROW_INCHES * layout.pipeline.num_stages + 0.45
    most_bands = max(1, math.floor(_MOST_INCHES / band_inches))
    bands = min(most_bands, max(1, math.ceil(units / _UNITS_PER_BAND)))
    width = min(_BAND_INCHES, max(7.0, 1.4 + 0.2 * units / bands))
    height = bands * band_inches + 0.9
    with figure(width, height, 10) as drawn:
        all_axes = drawn.subplots(bands, 1, squeeze=False)[:, 0]
        span = math.ceil(units / bands) * layout.unit
        size = _font_size(layout, (width - 1.4) * layout.unit / span)
        for band, axes in enumerate(all_axes):
            _draw_band(axes, layout, band * span, (band + 1) * span, size)
        unit = "units" if layout.profile is None else "s"
        all_axes[-1].set_xlabel(f"Time ({unit})")
        all_axes[0].set_title(_title(layout), loc="left")
        drawn.legend(handles=_handles(layout), loc="outside lower left", ncols=6, fontsize=9)
    return drawn


def _font_size(layout: ScheduleLayout, unit_inches: float) -> float:
    """Such that the longest label fits into one unit; 0 where nobody could read it."""
    longest = max(len(_short_label(op)) for op in layout.pipeline.operations)
    size = unit_inches * _POINTS_PER_INCH / (_CHARACTER * longest)
    return min(_LARGEST_FONT, size) if size >= _LEAST_FONT else 0.0


def _short_label(operation: Operation) -> str:
    return f"{letter(operation.instruction)}{operation.microbatch}"


def _draw_band(
    axes: Axes, layout: ScheduleLayout, begin: float, end: float, font_size: float
) -> None:
    """The bars between two times; one that a band's end cuts has its label in its longer part."""
    pipeline = layout.pipeline
    spans: dict[tuple[str, int, int], list[tuple[float, float]]] = {}
    for i, op in enumerate(pipeline.operations):
        left = max(float(layout.start[i]), begin)
        right = min(float(layout.start[i] + layout.time[i]), end)
        if right <= left:
            continue
        spans.setdefault((op.instruction, op.chunk, op.stage), []).append((left, right - left))
        elsewhere = float(layout.time[i]) - (right - left)
        longer = (right - left, left == layout.start[i]) > (elsewhere, False)
        if font_size and longer and op.instruction in _LETTERS:
            axes.text(
                (left + right) / 2,
                op.stage,
                _short_label(op),
                ha="center",
                va="center_baseline",
                fontsize=font_size,
            )
    for (instruction, chunk, rank), bars in spans.items():
        axes.broken_barh(
            bars,
            (rank - _BAR / 2, _BAR),
            facecolors=_colour(instruction, chunk, pipeline.num_chunks),
            edgecolor="white",
            linewidth=0.6,
        )
    axes.set_xlim(begin, end)
    axes.set_ylim(pipeline.num_stages - 0.5, -0.5)
    axes.set_yticks(range(pipeline.num_stages), [f"rank {r}" for r in range(pipeline.num_stages)])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_facecolor("0.955")


def _colour(instruction: str, chunk: int, num_chunks: int) -> tuple[float, float, float]:
    """The instruction's colour; the later the chunk, the lighter."""
    from matplotlib.colors import to_rgb

    pale = _LIGHTEST * chunk / max(1, num_chunks - 1) if num_chunks > 1 else 0.0
    red, green, blue = (
        value + pale * (1 - value) for value in to_rgb(_COLOURS.get(instruction, _OTHER_COLOUR))
    )
    return red, green, blue


def _handles(layout: ScheduleLayout) -> list[Any]:
    from matplotlib.patches import Patch

    return [
        Patch(color=_colour(name, 0, 1), label=f"{sign} {name}")
        for sign, name in layout.legend().items()
    ]


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
