"""Prices on the precedences of a pipeline that are alike in its middle: few numbers for any length.

A long pipeline repeats itself with every microbatch. So precedences of its middle that differ in
nothing but the microbatch share a price, and the first and last microbatches have their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from envplan._io.documents import Model
from envplan.errors import InputError
from envplan.pipeline import Pipeline

#: The most microbatches at each end whose precedences have prices of their own.
MAX_ENDS: Final = 128
#: Prices above this, a megawatt, are refused: sums of them stay within 64 bits.
_MAX_PRICE_UW: Final = 10**12

PriceUw = Annotated[int, Field(ge=0, le=_MAX_PRICE_UW)]


def precedences(pipeline: Pipeline) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The operations before and after each precedence, in the order of `pipeline.succ`."""
    numbers = np.arange(len(pipeline.operations))
    before = np.repeat(numbers, np.diff(pipeline.succ_begin))
    return before, pipeline.succ.astype(np.int64)


def is_next_on_stage(pipeline: Pipeline) -> NDArray[np.bool_]:
    """Whether each precedence leads to the next operation of the same stage."""
    before, after = precedences(pipeline)
    stage = np.repeat(np.arange(pipeline.num_stages), np.diff(pipeline.stage_begin))
    is_next: NDArray[np.bool_] = (after == before + 1) & (stage[after] == stage[before])
    return is_next


class PriceClasses:
    """Which precedences of a pipeline share a price.

    The *position* of a precedence is the microbatch of the operation that it leads from, where that
    is among the first; all of the middle have one position, and the last ones have the last.
    Precedences of one *kind* lead from and to operations of the same stages, instructions and
    chunks, and over the same number of microbatches.

    Args:
        pipeline: whose precedences they are.
        num_ends: microbatches at each end that have positions of their own.
    """

    def __init__(self, pipeline: Pipeline, num_ends: int) -> None:
        self.num_ends = num_ends
        before, after = precedences(pipeline)
        microbatch = np.array([op.microbatch for op in pipeline.operations])
        shapes = [(op.stage, op.instruction, op.chunk) for op in pipeline.operations]
        numbers = {shape: number for number, shape in enumerate(sorted(set(shapes)))}
        shape = np.array([numbers[shape] for shape in shapes])
        across = microbatch[after] - microbatch[before]
        kinds = np.stack([shape[before], shape[after], across], axis=1).reshape(-1, 3)
        distinct, kind = np.unique(kinds, axis=0, return_inverse=True)
        self.num_kinds = len(distinct)
        self._kind = kind.reshape(-1)
        self._position = self._positions(microbatch[before], pipeline.num_microbatches)

    @property
    def num_positions(self) -> int:
        """How many positions there are."""
        return 2 * self.num_ends + 1

    def _positions(
        self, microbatches: NDArray[np.int64], num_microbatches: int
    ) -> NDArray[np.int64]:
        from_end = num_microbatches - microbatches
        is_last = (from_end <= self.num_ends) & (microbatches >= self.num_ends)
        positions = np.minimum(microbatches, self.num_ends)
        return np.where(is_last, self.num_positions - from_end, positions)

    @cached_property
    def of_precedences(self) -> NDArray[np.int64]:
        """The class of each precedence, counted by kind and position, (E,)."""
        classes: NDArray[np.int64] = self._kind * self.num_positions + self._position
        return classes

    @property
    def num_classes(self) -> int:
        """How many classes there may be; some have no precedence."""
        return self.num_kinds * self.num_positions

    def mean(self, arcs_10uw: NDArray[np.int64]) -> NDArray[np.float64]:
        """The mean of some prices in each class, 0 where it has no precedence, (num_classes,)."""
        sums, counts = np.zeros(self.num_classes), np.zeros(self.num_classes)
        np.add.at(sums, self.of_precedences, arcs_10uw)
        np.add.at(counts, self.of_precedences, 1)
        return sums / np.maximum(counts, 1)


class LateClockPrices(Model):
    """Prices that the bound of late and held clocks follows from, 10 uW.

    Any prices give a valid bound, so nothing has to be believed of them (docs/theory.md).
    """

    num_ends: Annotated[int, Field(ge=0, le=MAX_ENDS)] = Field(
        description="microbatches at each end of the iteration that have prices of their own"
    )
    prices_uw: list[list[PriceUw]] = Field(
        description="of each kind of precedence, in the order of (from, to, microbatches across), "
        "operations by stage, instruction and chunk: the price at each position, those of the "
        "first microbatches, the middle's, and those of the last"
    )

    @classmethod
    def of_classes(cls, classes: PriceClasses, prices_10uw: NDArray[np.int64]) -> LateClockPrices:
        """Prices by class, as a plan's file has them."""
        prices_uw = 10 * prices_10uw
        by_kind = prices_uw.reshape(classes.num_kinds, classes.num_positions)
        return cls(num_ends=classes.num_ends, prices_uw=by_kind.tolist())

    def arcs_10uw(self, pipeline: Pipeline) -> NDArray[np.int64]:
        """The price of each precedence of a pipeline, 10 uW, int64 (E,).

        Files of envplan 0.1 have prices between two units: they are rounded down.

        Raises:
            InputError: the pipeline has other kinds of precedences.
        """
        classes = PriceClasses(pipeline, self.num_ends)
        expected = [classes.num_positions] * classes.num_kinds
        if _lengths(self.prices_uw) != expected:
            raise InputError(
                "predicted.late_clock_prices.prices_uw does not have one row for each kind of "
                f"precedence ({classes.num_kinds}) with one price for each position "
                f"({classes.num_positions})"
            )
        flat = np.array(self.prices_uw, np.int64).reshape(-1) // 10
        return flat[classes.of_precedences]


def _lengths(rows: Sequence[Sequence[int]]) -> list[int]:
    return [len(row) for row in rows]
