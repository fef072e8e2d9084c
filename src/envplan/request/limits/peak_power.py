"""The most power at any moment (`--peak-power-cap`): for a breaker, or a rack's supply."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field

from envplan._io.words import significant
from envplan.quantities import POWER
from envplan.request.limits.average_power import doubt_cap, earliest_ns_under_average
from envplan.request.limits.base import (
    FastestKind,
    Limit,
    LimitContext,
    LimitOption,
    Penalties,
    StatedResults,
    SweepKey,
)
from envplan.units import in_10uw, w_from_10uw

if TYPE_CHECKING:
    from envplan.frontier import Relaxation
    from envplan.replay import Replay


class PeakPower(Limit):
    """The most that all GPUs draw together at any moment of the replay.

    A violation is in 10 uW of one GPU a stage together.
    """

    options: ClassVar = (
        LimitOption(
            field="power_w",
            keyword="peak_power_cap",
            flag="peak-power-cap",
            quantity=POWER,
            metavar="W",
            help="Shortest iteration of never more than W watts over all GPUs; with "
            "--target-time, --slowdown or --min-energy: least energy.",
            panel="Target",
            sweep=SweepKey(phrase="{:g} W at the peak"),
        ),
    )
    stated_as: ClassVar[FastestKind | None] = "peak-power-cap"
    obstacle: ClassVar = "power is capped"
    counts_all_gpus: ClassVar = True

    kind: Literal["peak-power"] = "peak-power"
    power_w: Annotated[float, Field(ge=0, le=1e12)]

    def cap_10uw(self, num_gpus: int) -> int:
        """The cap on one GPU a stage together, 10 uW."""
        return in_10uw(self.power_w) // num_gpus

    def target_fields(self) -> dict[str, float]:
        return {"peak_power_w": self.power_w}

    def penalties(self, num_gpus: int) -> Penalties:
        return Penalties(peak_10uw=self.cap_10uw(num_gpus))

    def violation(self, replay: Replay, context: LimitContext) -> int:
        return max(0, replay.peak_10uw - self.cap_10uw(context.num_gpus))

    def earliest_ns(self, frontier: Relaxation) -> int:
        # What keeps to a cap at every moment does so on average.
        return earliest_ns_under_average(frontier, in_10uw(self.power_w))

    def share(self, kind: Relaxation, kinds: Sequence[Relaxation]) -> Self:
        return self.model_copy(update={"power_w": self.power_w * share_of_peak(kind, kinds)})

    def explain_violation(self, replay: Replay, context: LimitContext) -> str:
        peak_w = w_from_10uw(replay.peak_10uw * context.num_gpus)
        return f"the GPUs draw {peak_w!r} W at the peak, more than the {self.power_w!r} W allowed"

    def explain_waiting(self, waiting_10uw: int) -> str | None:
        if waiting_10uw <= in_10uw(self.power_w):
            return None
        waiting_w = w_from_10uw(waiting_10uw)
        return (
            f"GPUs that wait for a straggler draw {waiting_w:.10g} W, more than the cap "
            f"of {self.power_w:.10g} W"
        )

    def explain_kept(self, stated: StatedResults, replay: Replay, context: LimitContext) -> str:
        peak_w = w_from_10uw(replay.peak_10uw * context.num_gpus)
        return f"{peak_w!r} W at the peak of the replay <= {self.power_w!r} W"

    def prove_ladder(self) -> str:
        return f"none of them ever draws more than {self.power_w!r} W"

    def notes(self, replay: Replay, context: LimitContext) -> Iterator[str]:
        peak_w = w_from_10uw(replay.peak_10uw * context.num_gpus)
        yield (
            f"at its peak it draws {significant(peak_w)} W, of {self.power_w:g} W allowed; the gap "
            "is to a lower bound without that cap"
        )

    def doubts(self, all_gpus: int) -> Iterator[str]:
        return doubt_cap(self.power_w, all_gpus)


def share_of_peak(kind: Relaxation, kinds: Sequence[Relaxation]) -> float:
    """One kind of replica's part of the peak power at maximum frequency of all kinds."""
    return _peak_at_max_frequency_10uw(kind) / sum(map(_peak_at_max_frequency_10uw, kinds))


def _peak_at_max_frequency_10uw(frontier: Relaxation) -> int:
    """Peak power with every operation at its highest frequency, all GPUs, 10 uW."""
    problem = frontier.problem
    return problem.replay(problem.max_frequency_rows).peak_10uw * frontier.num_gpus
