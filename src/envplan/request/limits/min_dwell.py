"""Clocks last: the least time between two clock changes of a stage (`--min-dwell`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field

from envplan.quantities import TIME
from envplan.request.limits.base import (
    Limit,
    LimitContext,
    LimitOption,
    Penalties,
    StatedResults,
    SweepKey,
)
from envplan.units import ns_from_s_ceil, s_from_ns

if TYPE_CHECKING:
    from envplan.frontier import Relaxation
    from envplan.replay import Replay

_LONGEST_S = 3600


class MinDwell(Limit):
    """Least time between two requests of a stage for another clock.

    From the last request of an iteration to the first of the next, too: iterations follow each
    other. A violation is in ns by which clocks last too short, all added up.
    """

    options: ClassVar = (
        LimitOption(
            field="time_s",
            keyword="min_dwell",
            older_keyword="min_hold",
            flag="min-dwell",
            quantity=TIME.plainly("ms").within(0, _LONGEST_S).with_unit(),
            metavar="TIME",
            help="No stage asks for another clock within TIME, as in 100ms or 100 (milliseconds).",
            panel="Slow clocks",
            zero_is_none=True,
            sweep=SweepKey(column_suffix="_ms", divisor=1000, phrase="clocks for {:g} ms"),
        ),
    )
    obstacle: ClassVar = "clocks may not change so soon"

    kind: Literal["min-hold"] = "min-hold"
    time_s: Annotated[float, Field(gt=0, le=_LONGEST_S)]

    @property
    def dwell_ns(self) -> int:
        """The least time, ns."""
        return ns_from_s_ceil(self.time_s)

    def penalties(self, num_gpus: int) -> Penalties:
        return Penalties(min_dwell_ns=self.dwell_ns)

    def violation(self, replay: Replay, context: LimitContext) -> int:
        short_dwells = replay.short_dwells(self.dwell_ns)
        return sum(self.dwell_ns - short_dwell.dwell_ns for short_dwell in short_dwells)

    def share(self, kind: Relaxation, kinds: Sequence[Relaxation]) -> Self:
        return self

    def explain_violation(self, replay: Replay, context: LimitContext) -> str:
        short_dwell = next(replay.short_dwells(self.dwell_ns))
        request_s = s_from_ns(short_dwell.request_ns)
        dwell_s = s_from_ns(short_dwell.dwell_ns)
        return (
            f"stage {short_dwell.stage} asks for a clock at {request_s!r} s and for another one "
            f"{dwell_s!r} s later, within the least time of {self.time_s!r} s"
        )

    def explain_kept(self, stated: StatedResults, replay: Replay, context: LimitContext) -> str:
        return f"no stage asks for another clock within {self.time_s!r} s"

    def notes(self, replay: Replay, context: LimitContext) -> Iterator[str]:
        yield f"no stage asks for another clock within {self.time_s * 1000:g} ms"
