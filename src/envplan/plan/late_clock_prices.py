"""Prices on the precedences of a pipeline that are alike in its middle: few numbers for any length.

A long pipeline repeats itself with every microbatch. So precedences of its middle that differ in
nothing but the microbatch share a price, and the first and last microbatches have their own.
"""

from __future__ import annotations

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
    num_after = np.diff(pipeline.succ_begin)
    before = np.repeat(numbers, num_after)
    after = pipeline.succ.astype(np.int64)
    return before, after


def is_next_on_stage(pipeline: Pipeline) -> NDArray[np.bool_]:
    """Whether each precedence leads to the next operation of the same stage."""
    before, after = precedences(pipeline)
    stages = np.arange(pipeline.num_stages)
    num_operations = np.diff(pipeline.stage_begin)
    stage = np.repeat(stages, num_operations)
    is_neighbour = after == before + 1
    is_on_stage = stage[after] == stage[before]
    is_next: NDArray[np.bool_] = is_neighbour & is_on_stage
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
        shape = _shapes(pipeline)
        across = microbatch[after] - microbatch[before]
        columns = [shape[before], shape[after], across]
        kinds = np.stack(columns, axis=1)
        kinds = kinds.reshape(-1, 3)  # also where there are none
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
        is_near_end = from_end <= self.num_ends
        is_first = microbatches < self.num_ends
        from_beginning = np.minimum(microbatches, self.num_ends)
        before_last = self.num_positions - from_end
        return np.where(is_near_end & ~is_first, before_last, from_beginning)

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
        sums = np.zeros(self.num_classes)
        counts = np.zeros(self.num_classes)
        np.add.at(sums, self.of_precedences, arcs_10uw)
        np.add.at(counts, self.of_precedences, 1)
        return sums / np.maximum(counts, 1)


def _shapes(pipeline: Pipeline) -> NDArray[np.int64]:
    """The number of each operation's stage, instruction and chunk among those that there are."""
    shapes = [(op.stage, op.instruction, op.chunk) for op in pipeline.operations]
    distinct = sorted(set(shapes))
    numbers = {shape: number for number, shape in enumerate(distinct)}
    return np.array([numbers[shape] for shape in shapes], np.int64)


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
        lengths = [len(prices_uw) for prices_uw in self.prices_uw]
        if lengths != [classes.num_positions] * classes.num_kinds:
            raise InputError(
                "predicted.late_clock_prices.prices_uw does not have one row for each kind of "
                f"precedence ({classes.num_kinds}) with one price for each position "
                f"({classes.num_positions})"
            )
        prices_uw = np.array(self.prices_uw, np.int64)
        prices_10uw = prices_uw.reshape(-1) // 10
        return prices_10uw[classes.of_precedences]
